//! The main loop of the load watcher.
//!
//! The loop waits until a watched source changes or the next sample is due. It then derives a new
//! assessment of the owner, decides whether guests may run, and sends the results. The daemon of
//! this host is notified first, because it can stop guests immediately; the report to the resource
//! manager is sent when no other action is due.

use crate::Args;
use crate::rm_link::RmSubscription;
use anyhow::Context;
use libpvm::{Body, Vm};
use nix::sys::epoll::Epoll;
use procfs::process::Process;
use procfs::{CurrentSI, KernelStats};
use pvm_load_watcher::cpu_confinement::CpuConfinement;
use pvm_load_watcher::file_watcher::{
    FileWatcher, WakeReasons, WatchedPath, read_login_records, utmp_path,
};
use pvm_load_watcher::guests::{GuestDecision, GuestGate, GuestInputs};
use pvm_load_watcher::host_policy::{
    ADMIN_FILE, HostPolicy, PolicyPaths, VmUser, trusted_path, user_name, user_policy_file,
};
use pvm_load_watcher::load_attribution::{LOW_LOAD_PROCESSORS, TaskLoad, task_processes};
use pvm_load_watcher::logind::LogindClient;
use pvm_load_watcher::owner::{
    Evidence, LoginRecords, OwnerAssessment, OwnerDetector, OwnerSigns, merged_logins,
};
use pvm_load_watcher::owner_override::{OVERRIDE_PREFIX, OVERRIDES_DIR};
use pvm_load_watcher::policy::DEFAULT_IDLE_AFTER_MIN;
use pvm_load_watcher::probes::{InputProbe, read_session_files, terminal_input_times};
use pvm_load_watcher::report::{REPORTED_LOGINS_MAX, Reporter, SAMPLE_INTERVAL_BUSY};
use pvm_load_watcher::sampler::Sampler;
use pvm_load_watcher::sessions::Session;
use pvm_load_watcher::status::{GuestStatus, STATUS_TASKS_MAX, Setting, Status, StatusListener};
use pvm_load_watcher::system::{local_time, raise_nice, time_of_day, to_micros};
use sempa_proto::load::{LoadReport, LoadSample, OwnerVerdict, is_load_watcher};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::owner::{GuestAccess, GuestDirective, REASON_BYTES_MAX};
use sempa_proto::runtime_paths::GUEST_CPUS_FILE;
use sempa_proto::table::{TASK_FORKED, TASK_SERVICE_FLAGS, TaskInfo};
use sempa_proto::task::{Reply, Request};
use sempa_proto::text::truncate;
use sempa_proto::{Micros, frame};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Minimum interval of reading the expensive sources, and of a new assessment if no source has
/// changed.
const SLOW_CHECKS_INTERVAL: Micros = Micros::from_secs(5);
/// Minimum interval of listing the virtual machine's tasks and measuring their load.
const TASKS_INTERVAL: Micros = Micros::from_secs(10);
/// [`TASKS_INTERVAL`] while the owner limits guests, because the limits must be applied to new
/// guests soon.
const LIMITED_TASKS_INTERVAL: Micros = Micros::from_secs(1);
/// Time limit for a request of the resource manager; afterwards this load watcher exits. Without a
/// resource manager there is no limit.
const NO_REQUEST_TIMEOUT: Micros = Micros::from_secs(30);
/// Interval of reading the paths that cannot be watched.
const UNWATCHED_INTERVAL: Micros = Micros::from_secs(10);

/// Error context of a failed sample.
const SAMPLING_CONTEXT: &str = "sampling the load of this host";

// Indices of the watched paths.
const UTMP_PATH_INDEX: usize = 0;
const SESSIONS_PATH_INDEX: usize = 1;
const USER_POLICY_PATH_INDEX: usize = 2;
const ADMIN_POLICY_PATH_INDEX: usize = 3;
const OVERRIDES_PATH_INDEX: usize = 4;
const WATCHED_PATH_COUNT: usize = 5;

/// The results of reading the sources, as of the last reading.
struct Observations {
    records: LoginRecords,
    sessions: Evidence<Vec<Session>>,
    /// The reason why logind cannot be queried over D-Bus; the sessions then come from logind's
    /// files. `None` if the sessions come from logind itself.
    logind_error: Option<String>,
    terminal_input: BTreeMap<String, Micros>,
    input: InputProbe,
    external_load: Evidence<f32>,
}

pub(crate) struct Watcher {
    vm: Vm,
    rm: Arc<RmSubscription>,
    /// Time since which a resource manager exists that has not requested reports.
    not_requested_since: Option<Micros>,
    /// Readable when a user of this host queries the status, when logind reports a change, or when
    /// another resource manager requests reports.
    wake_epoll: Epoll,
    /// Name of the virtual machine.
    vm_name: String,
    args: Args,
    uid: u32,
    started: Instant,
    sampler: Sampler,
    watch: FileWatcher,
    observations: Observations,
    host_policy: HostPolicy,
    detector: OwnerDetector,
    guest_gate: GuestGate,
    task_load: TaskLoad,
    /// `None` if the system does not report the processors of this process.
    cpu_confinement: Option<CpuConfinement>,
    /// True if the owner limits guests by a nice level or by processors.
    guests_limited: bool,
    /// External load in the last sample, in processors; 0 if unknown.
    external_processors: f32,
    reporter: Reporter,
    listener: Option<StatusListener>,
    /// `None` if logind cannot be queried; only its files are read then.
    logind: Option<LogindClient>,
    sample: LoadSample,
    assessment: OwnerAssessment,
    decision: GuestDecision,
    reported_decision: Option<GuestDecision>,
    sent_directive: Option<GuestDirective>,
    /// The encoded report that is sent when no other action is due.
    outgoing_report: Option<Body>,
    directive_refused: Cell<bool>,
    deadlines: Deadlines,
}

/// Times at which the periodic actions are due next, by the watcher's monotonic clock.
#[derive(Debug, Default)]
struct Deadlines {
    slow_checks: Micros,
    tasks: Micros,
    unwatched: Micros,
}

/// Determines the paths to watch, and reads the policies of owners, administrator and the user with
/// the uid `user`.
fn read_policies(args: &Args, user: u32) -> (FileWatcher, HostPolicy) {
    let home = || {
        nix::unistd::User::from_uid(user.into())
            .ok()
            .flatten()
            .map(|user| user.dir)
    };
    let own = args
        .owner_policy
        .clone()
        .or_else(|| Some(user_policy_file(&home()?)));
    let (admin, admin_warning) = trusted_path(
        args.admin_policy.clone(),
        Path::new(ADMIN_FILE),
        user.into(),
    );
    let (words, overrides_warning) = trusted_path(
        args.owner_words.clone(),
        Path::new(OVERRIDES_DIR),
        user.into(),
    );
    let paths = PolicyPaths {
        user: own.unwrap_or_else(|| PathBuf::from("/nonexistent/owner.toml")),
        admin,
        overrides: words,
    };
    let watch = FileWatcher::new(vec![
        WatchedPath::file(utmp_path(args.utmp.clone())),
        WatchedPath::folder(args.sessions.clone(), ""),
        WatchedPath::settings(paths.user.clone()),
        WatchedPath::settings(paths.admin.clone()),
        WatchedPath::folder(paths.overrides.clone(), OVERRIDE_PREFIX),
    ]);
    let rules = HostPolicy::read(
        paths,
        VmUser {
            uid: user,
            name: user_name(user),
            defaults: args.guest_defaults.clone(),
        },
    );
    let wrong = rules.errors();
    admin_warning
        .iter()
        .chain(&overrides_warning)
        .chain(&wrong)
        .for_each(|line| tracing::warn!("{line}"));
    (watch, rules)
}

impl Watcher {
    pub(crate) fn new(vm: Vm, boss: Arc<RmSubscription>, args: Args) -> anyhow::Result<Watcher> {
        let mut sampler = Sampler::open(Path::new("/proc")).context(SAMPLING_CONTEXT)?;
        if let Some(meminfo) = &args.meminfo {
            sampler = sampler
                .with_meminfo_file(meminfo)
                .context(SAMPLING_CONTEXT)?;
        }
        let sample = sampler.sample(time_of_day()).context(SAMPLING_CONTEXT)?;
        let user = nix::unistd::geteuid().as_raw();
        let (watch, rules) = read_policies(&args, user);
        let name = std::env::var("PVM_VMID")
            .ok()
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| "pvm".into());
        // Without a listener, users of this host cannot query the status; all other functions work.
        let listener = StatusListener::open(user, &name)
            .inspect_err(|e| tracing::warn!("status queries are not answered: {e}"))
            .ok();
        let seen = Observations {
            records: read_login_records(watch.path(UTMP_PATH_INDEX)),
            sessions: Evidence::Unavailable("not read yet".into()),
            logind_error: None,
            terminal_input: BTreeMap::new(),
            input: InputProbe::new(args.interrupts.clone()),
            external_load: Evidence::Unavailable("not measured yet".into()),
        };
        let logind = LogindClient::start(args.bus.clone())
            .inspect_err(|e| tracing::warn!("logind cannot be queried: {e}"))
            .ok();
        let others = listener
            .iter()
            .map(StatusListener::fd)
            .chain(logind.iter().map(LogindClient::fd));
        let wake = boss.epoll_with(others).context("waiting for queries")?;
        let mut watcher = Watcher {
            vm,
            rm: boss,
            not_requested_since: None,
            wake_epoll: wake,
            vm_name: name,
            args,
            uid: user,
            started: Instant::now(),
            sampler,
            watch,
            observations: seen,
            host_policy: rules,
            detector: OwnerDetector::default(),
            guest_gate: GuestGate::default(),
            task_load: TaskLoad::new(Path::new("/proc")),
            cpu_confinement: CpuConfinement::new(runtime_file(GUEST_CPUS_FILE)).ok(),
            guests_limited: false,
            external_processors: 0.0,
            reporter: Reporter::default(),
            listener,
            logind,
            sample,
            assessment: OwnerAssessment::default(),
            decision: GuestDecision::default(),
            reported_decision: None,
            sent_directive: None,
            outgoing_report: None,
            directive_refused: Cell::new(false),
            deadlines: Deadlines::default(),
        };
        watcher.read_sessions();
        watcher.observations.input.poll(time_of_day());
        Ok(watcher)
    }

    fn now(&self) -> Micros {
        to_micros(self.started.elapsed())
    }

    /// Prepares a report for the resource manager. It is sent only when no other action is due, so
    /// that an assessment waits neither for the socket nor for the wake-up of another processor.
    fn prepare_report(&mut self) -> anyhow::Result<()> {
        let mut logins = self.assessment.logins.clone();
        logins.truncate(REPORTED_LOGINS_MAX);
        let GuestDecision {
            access: guests,
            reason: guests_why,
            limits,
        } = self.decision.clone();
        let report = LoadReport {
            host: self.vm.host(),
            at: time_of_day(),
            sample: self.sample,
            owner_verdict: self.assessment.verdict.clone(),
            confidence: self.assessment.confidence,
            owner_reason: self.assessment.reason.clone(),
            logins,
            access: guests,
            access_reason: guests_why,
            limits,
        };
        self.outgoing_report = Some(Body {
            enc: DSIG_X86_64,
            bytes: frame::to_bytes(&report)?.into(),
        });
        let now = self.now();
        self.reporter
            .record_sent(now, self.sample, report.owner_verdict, report.owner_reason);
        self.reported_decision = Some(self.decision.clone());
        Ok(())
    }

    /// Sends the prepared report if there is one.
    fn send_report(&mut self) {
        if let (Some(body), Some(rm)) = (self.outgoing_report.take(), self.rm.tid()) {
            // If the resource manager has just exited, the report is lost; the next resource
            // manager requests a complete report.
            let _ = self
                .vm
                .send_in_context(rm, self.args.ctx, self.args.tag, body);
        }
    }

    /// Derives a new assessment of the owner and a new decision about guests from all sources. The
    /// daemon of this host is notified first, because it can stop guests immediately.
    fn assess(&mut self) -> anyhow::Result<()> {
        let now = time_of_day();
        let logins = merged_logins(&self.observations.records, &self.observations.sessions);
        let before = self.host_policy.errors();
        self.host_policy.update_logins(&logins);
        self.log_new_errors(&before);
        self.observations.terminal_input = terminal_input_times(&self.args.terminals, &logins);
        let policy = &self.host_policy.merged().policy;
        let idle = policy.idle_after_min.unwrap_or(DEFAULT_IDLE_AFTER_MIN);
        let signs = OwnerSigns {
            records_path: self.watch.path(UTMP_PATH_INDEX),
            records: &self.observations.records,
            sessions: &self.observations.sessions,
            logind_error: self.observations.logind_error.as_deref(),
            terminal_input: &self.observations.terminal_input,
            input: self.observations.input.evidence(),
            external_load: &self.observations.external_load,
            overrides: self.host_policy.overrides(),
            owners: self.host_policy.owners(),
            idle_after: Micros::from_secs(u64::from(idle) * 60),
        };
        self.assessment = self.detector.verdict(now, &signs);
        let is_idle = |at: &Micros| now.since(*at) >= signs.idle_after;
        let idle = self
            .observations
            .terminal_input
            .iter()
            .filter(|(_, at)| is_idle(at));
        let idle: BTreeSet<PathBuf> = idle
            .map(|(line, _)| self.args.terminals.join(line))
            .collect();
        self.watch.watch_idle_terminals(&idle);
        self.decision = self.guest_gate.decide(&GuestInputs {
            policy,
            policy_unknown: self.host_policy.policy_unknown(),
            blocked_uids: self.host_policy.blocked_uids(),
            uid: self.uid,
            owner: &self.assessment.verdict,
            owner_reason: &self.assessment.reason,
            available_bytes: self.sample.available_bytes,
            local_time: local_time(now.0 / 1_000_000),
            now,
        });
        self.sampler
            .set_memory_matters(policy.memory_free.is_some());
        self.send_directive();
        let changed = self.reported_decision.as_ref() != Some(&self.decision);
        if changed
            || self
                .reporter
                .owner_changed(&self.assessment.verdict, &self.assessment.reason)
        {
            self.prepare_report()?;
        }
        Ok(())
    }

    /// Sends the daemon a directive that states whether guests may run, if the directive has
    /// changed.
    fn send_directive(&mut self) {
        let GuestDecision {
            access: guests,
            reason: why,
            limits,
        } = &self.decision;
        let word = GuestDirective {
            access: *guests,
            reason: truncate(why, REASON_BYTES_MAX).to_string(),
            limits: limits.clone(),
        };
        if self.sent_directive.as_ref() == Some(&word) {
            return;
        }
        match self.vm.set_guest_directive(word.clone()) {
            Ok(()) => self.directive_refused.set(false),
            Err(error) if !self.directive_refused.replace(true) => tracing::warn!(
                "{error}; guests are stopped only when the resource manager migrates them"
            ),
            Err(_) => {}
        }
        self.sent_directive = Some(word);
    }

    /// Reads the sources for which `which` returns true. Missing watches are set before the reads,
    /// so that no change between watch and read is missed.
    fn read_sources(&mut self, which: impl Fn(usize) -> bool) {
        (0..WATCHED_PATH_COUNT)
            .filter(|place| which(*place))
            .for_each(|place| self.watch.arm(place));
        if which(UTMP_PATH_INDEX) {
            self.observations.records = read_login_records(self.watch.path(UTMP_PATH_INDEX));
        }
        if which(SESSIONS_PATH_INDEX) {
            self.read_sessions();
        }
        let before = self.host_policy.errors();
        if which(ADMIN_POLICY_PATH_INDEX) {
            self.host_policy.read_admin();
        }
        if which(USER_POLICY_PATH_INDEX) {
            self.host_policy.read_user_policy();
        }
        if which(OVERRIDES_PATH_INDEX) {
            self.host_policy.read_overrides();
        }
        self.log_new_errors(&before);
    }

    /// Logs the errors of the policies that are not in `before`.
    fn log_new_errors(&self, before: &[String]) {
        self.host_policy
            .errors()
            .iter()
            .filter(|line| !before.contains(line))
            .for_each(|line| tracing::warn!("{line}"));
    }

    /// Reads the paths that cannot be watched and for which `which` returns true.
    fn read_unwatched(&mut self, which: impl Fn(usize) -> bool) {
        let new: Vec<bool> = (0..WATCHED_PATH_COUNT)
            .map(|place| which(place) && self.watch.retry_watch(place))
            .collect();
        self.read_sources(|place| new[place]);
    }

    /// Reads the sessions from logind, or from logind's files, which contain less, if logind cannot
    /// be queried.
    fn read_sessions(&mut self) {
        let why = match self.logind.as_ref().map(LogindClient::sessions) {
            Some(Evidence::Known(sessions)) => {
                (self.observations.sessions, self.observations.logind_error) =
                    (Evidence::Known(sessions), None);
                return;
            }
            Some(Evidence::Unavailable(why)) => why,
            None => "logind cannot be queried".into(),
        };
        (self.observations.sessions, self.observations.logind_error) =
            (read_session_files(&self.args.sessions), Some(why));
    }

    /// Requests from the daemon the list of the virtual machine's tasks on this host.
    fn query_tasks(&self) -> Vec<TaskInfo> {
        match self.vm.runtime().request(Request::Tasks {
            selector: self.vm.host().tid(),
        }) {
            Reply::Tasks(tasks) => tasks,
            // The connection to the daemon is lost, and this task is about to exit.
            _ => Vec::new(),
        }
    }

    /// Stores in the sample how many processors the virtual machine's tasks use, if the load is
    /// high enough to matter.
    fn attribute_load(&mut self) {
        let used = self.sample.busy * self.sample.processors();
        let Some(times) = self
            .sampler
            .cpu_times()
            .filter(|_| used >= LOW_LOAD_PROCESSORS)
        else {
            self.external_processors = 0.0;
            return self.task_load.skip_sample();
        };
        let Some(ours) = self
            .task_load
            .measure_own_processors(times, self.sample.cores)
        else {
            return;
        };
        let before = std::mem::replace(&mut self.external_processors, used - ours);
        if self.external_processors > before + LOW_LOAD_PROCESSORS {
            // New external load may come from new tasks of the virtual machine, so the tasks are
            // listed; the next sample then attributes the load correctly.
            self.set_task_processes(&self.query_tasks());
        } else {
            self.sample.task_cpus = Some(ours);
        }
    }

    /// Sets the processes whose load is not external: those of these tasks, and those of the
    /// daemon.
    fn set_task_processes(&mut self, tasks: &[TaskInfo]) {
        let mut pids: Vec<i32> = tasks
            .iter()
            .map(|task| task.pid)
            .filter(|pid| *pid > 0)
            .collect();
        pids.extend(daemon_processes());
        self.task_load.set_processes(&pids);
    }

    /// Applies the owner's limits to guests, and measures the external load.
    fn limit_and_measure_tasks(&mut self) {
        let Some(times) = self.sampler.cpu_times() else {
            return;
        };
        let policy = &self.host_policy.merged().policy;
        let (nice, cores) = (policy.nice, policy.cores);
        let limited = nice.is_some()
            || self
                .cpu_confinement
                .as_ref()
                .is_some_and(|confine| confine.is_needed(cores));
        if limited || self.task_load.origin_matters(times, self.sample.cores) {
            let tasks = self.query_tasks();
            if limited {
                let guests = tasks.iter().filter(|task| is_guest(task));
                let processes: Vec<i32> = guests
                    .flat_map(|task| task_processes(Path::new("/proc"), task.pid))
                    .collect();
                // Fails for a process that has exited, which needs no nice level.
                let levels = nice
                    .map(i32::from)
                    .into_iter()
                    .flat_map(|level| processes.iter().map(move |pid| (*pid, level)));
                levels.for_each(|(pid, level)| drop(raise_nice(pid, level)));
                self.cpu_confinement
                    .iter_mut()
                    .for_each(|confine| confine.apply(cores, processes.iter().copied()));
            }
            self.set_task_processes(&tasks);
        }
        self.guests_limited = limited;
        self.observations.external_load = match self
            .task_load
            .measure_external_processors(times, self.sample.cores)
        {
            Some(cores) => Evidence::Known(cores),
            None => Evidence::Unavailable("tasks of the virtual machine started or ended".into()),
        };
    }

    /// Executes the periodic actions that are due. Returns true if a new assessment is needed.
    fn run_periodic_checks(&mut self, now: Micros) -> bool {
        self.read_unwatched(|place| place == UTMP_PATH_INDEX);
        if now < self.deadlines.slow_checks {
            return self.watch.is_unwatched(UTMP_PATH_INDEX);
        }
        self.deadlines.slow_checks = now + SLOW_CHECKS_INTERVAL;
        self.exit_if_not_requested(now);
        if now >= self.deadlines.unwatched {
            self.deadlines.unwatched = now + UNWATCHED_INTERVAL;
            self.read_unwatched(|place| place != UTMP_PATH_INDEX);
            // A watch does not report that a file has become readable, so refused files are read
            // again periodically.
            if self.host_policy.policy_unknown().is_some() {
                self.read_sources(|place| {
                    [
                        ADMIN_POLICY_PATH_INDEX,
                        USER_POLICY_PATH_INDEX,
                        OVERRIDES_PATH_INDEX,
                    ]
                    .contains(&place)
                });
            }
        }
        self.observations.input.poll(time_of_day());
        if now >= self.deadlines.tasks {
            self.limit_and_measure_tasks();
            self.deadlines.tasks = now
                + if self.guests_limited {
                    LIMITED_TASKS_INTERVAL
                } else {
                    TASKS_INTERVAL
                };
        }
        true
    }

    /// Exits if the resource manager has not requested reports for [`NO_REQUEST_TIMEOUT`]: it has
    /// another load watcher on this host or needs none. Without a resource manager the load watcher
    /// continues to run, to protect the owner.
    fn exit_if_not_requested(&mut self, now: Micros) {
        if self.rm.tid().is_some() || self.vm.runtime().rm().is_none() {
            self.not_requested_since = None;
        } else if now.since(*self.not_requested_since.get_or_insert(now)) >= NO_REQUEST_TIMEOUT {
            tracing::info!(
                "the current resource manager does not request reports; this load watcher exits",
            );
            drop(self.vm.exit());
            std::process::exit(0);
        }
    }

    /// Returns the time until the next sample. If the policy depends on the time of day, the sample
    /// is taken no later than at the next full minute.
    fn next_interval(&mut self) -> Micros {
        let pause = self.reporter.interval_after(&self.sample);
        let pause = if self.watch.is_unwatched(UTMP_PATH_INDEX) {
            SAMPLE_INTERVAL_BUSY
        } else {
            pause
        };
        if !self.host_policy.depends_on_clock() {
            return pause;
        }
        pause.min(Micros(60_000_000 - time_of_day().0 % 60_000_000))
    }

    pub(crate) fn run(&mut self) -> anyhow::Result<()> {
        self.assess()?;
        let mut next = self.now() + SAMPLE_INTERVAL_BUSY;
        let mut minute = time_of_day().0 / 60_000_000;
        loop {
            self.send_report();
            let left = Duration::from_micros(next.since(self.now()).0);
            let woken: WakeReasons = self.watch.wait(left, Some(self.wake_epoll.0.as_fd()));
            if woken.any_change() {
                self.read_sources(|place| woken.path_changed(place));
                self.assess()?;
            }
            if woken.other_ready {
                if self.logind.as_ref().is_some_and(LogindClient::take_change) {
                    self.read_sessions();
                    self.assess()?;
                }
                self.answer_queries();
                if self.rm.take_change() {
                    self.prepare_report()?;
                }
            }
            if self.now() < next {
                continue;
            }
            self.sample = self
                .sampler
                .sample(time_of_day())
                .context(SAMPLING_CONTEXT)?;
            self.attribute_load();
            let now = self.now();
            let before = std::mem::replace(&mut minute, time_of_day().0 / 60_000_000);
            let of_hours = before != minute && self.host_policy.depends_on_clock();
            let of_memory = self.guest_gate.needs_decision(
                &self.host_policy.merged().policy,
                self.sample.available_bytes,
                time_of_day(),
            );
            if self.run_periodic_checks(now) || of_hours || of_memory {
                self.assess()?;
            }
            if self.reporter.must_report_load(now, &self.sample) {
                self.prepare_report()?;
            }
            next = now + self.next_interval();
        }
    }

    fn answer_queries(&self) {
        if let Some(listener) = &self.listener {
            listener.answer_queries(|| self.collect_status());
        }
    }

    /// Collects the status that is sent to a user of this host.
    fn collect_status(&self) -> Status {
        let (guests, leave_at_us, then) = match self.decision.access {
            GuestAccess::Welcome => ("welcome", None, None),
            GuestAccess::Paused {
                evict_at: leave_at,
                eviction: then,
            } => ("stopped", leave_at.map(|at| at.0), Some(then)),
        };
        let owner = match self.assessment.verdict {
            OwnerVerdict::Absent { .. } => "absent",
            OwnerVerdict::Maybe { .. } => "maybe",
            OwnerVerdict::Present { .. } => "present",
        };
        let setting = |(name, value, from): &(&str, String, String)| Setting {
            name: name.to_string(),
            value: value.clone(),
            from: from.clone(),
        };
        let tasks = self.query_tasks();
        let boot = boot_time();
        let host = match self.vm.runtime().request(Request::Config) {
            Reply::Hosts(table) => table.get(self.vm.host()).map(|entry| entry.name.clone()),
            _ => None,
        };
        let (stopped_by, stopped_by_why) =
            stop_mechanism(self.vm.runtime().request(Request::Freezer));
        Status {
            vm: self.vm_name.clone(),
            user: user_name(self.uid),
            host: host.unwrap_or_default(),
            owner: owner.into(),
            confidence: self.assessment.confidence,
            why: self.assessment.reason.clone(),
            sources: self
                .assessment
                .sources
                .iter()
                .map(|(name, says)| (name.to_string(), says.clone()))
                .collect(),
            guests: guests.into(),
            guests_why: self.decision.reason.clone(),
            leave_at_us,
            then: then.map(|then| then.to_string()),
            stopped_by: stopped_by.into(),
            stopped_by_why,
            policy: self
                .host_policy
                .merged()
                .settings
                .iter()
                .map(setting)
                .collect(),
            wrong: self.host_policy.errors(),
            tasks: tasks
                .iter()
                .filter(|task| is_guest(task))
                .take(STATUS_TASKS_MAX)
                .map(|task| guest_status(task, boot))
                .collect(),
        }
    }
}

/// True for a spawned task that does not serve the virtual machine.
fn is_guest(task: &TaskInfo) -> bool {
    task.flags & TASK_FORKED != 0
        && task.flags & TASK_SERVICE_FLAGS == 0
        && !is_load_watcher(&task.name)
}

/// Returns the mechanism by which the daemon stops guests, and the reason if it is not control
/// groups.
fn stop_mechanism(reply: Reply) -> (&'static str, String) {
    match reply {
        Reply::Freezer(Some(Ok(()))) => ("control groups", String::new()),
        Reply::Freezer(Some(Err(why))) => ("signals", why),
        Reply::Freezer(None) => ("unknown", "no tasker has reported it yet".into()),
        _ => ("unknown", "the daemon does not report it".into()),
    }
}

/// Returns the path of a file in the runtime directory of this host's daemon.
fn runtime_file(name: &str) -> Option<PathBuf> {
    Some(PathBuf::from(std::env::var_os("PVMSOCK")?).with_file_name(name))
}

/// Returns the pids of this host's daemon and of its child processes.
fn daemon_processes() -> Vec<i32> {
    let Some(lock) = runtime_file("pvmd.lock") else {
        return Vec::new();
    };
    let text = std::fs::read_to_string(lock).unwrap_or_default();
    let Ok(daemon) = text.trim().parse::<i32>() else {
        return Vec::new();
    };
    let children = Process::new(daemon)
        .and_then(|daemon| daemon.task_main_thread()?.children())
        .unwrap_or_default();
    let children = children.into_iter().map(u32::cast_signed);
    std::iter::once(daemon).chain(children).collect()
}

/// Returns the boot time of this machine in seconds since 1970.
fn boot_time() -> Option<u64> {
    Some(KernelStats::current().ok()?.btime)
}

fn guest_status(task: &TaskInfo, boot: Option<u64>) -> GuestStatus {
    let stat = Process::new(task.pid).and_then(|process| process.stat());
    let (ticks, started) = stat.map_or((0, 0), |stat| {
        let of_children = (stat.cutime + stat.cstime).unsigned_abs();
        (stat.utime + stat.stime + of_children, stat.starttime)
    });
    let second = procfs::ticks_per_second();
    let started = boot
        .filter(|_| started > 0)
        .map(|boot| boot * 1_000_000 + started * 1_000_000 / second);
    GuestStatus {
        tid: task.tid.to_string(),
        program: task.name.clone(),
        pid: task.pid,
        user: user_name(task.uid),
        since_us: started.unwrap_or(0),
        cpu_s: ticks as f64 / second as f64,
    }
}
