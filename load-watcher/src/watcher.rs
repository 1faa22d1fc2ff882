//! The main loop of the load watcher.
//!
//! The loop waits until a watched source changes or the next sample is due. It then derives a new
//! assessment of the owner, decides whether guests may run, and sends the results. The daemon of
//! this host is notified first, because it can stop guests immediately; the report to the resource
//! manager is sent when no other action is due.

use crate::Args;
use crate::directive::DirectiveSender;
use crate::guest_status::is_guest;
use crate::rm_link::RmSubscription;
use crate::status_report::StatusInputs;
use anyhow::Context;
use libpvm::{Body, Vm};
use nix::sys::epoll::Epoll;
use procfs::process::Process;
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
    Evidence, LoginRecords, OwnerAssessment, OwnerDetector, OwnerSigns, available_logins,
};
use pvm_load_watcher::owner_override::{Drain, OVERRIDES_DIR};
use pvm_load_watcher::policy::DEFAULT_IDLE_AFTER_MIN;
use pvm_load_watcher::probes::{InputProbe, read_session_files, terminal_input_times};
use pvm_load_watcher::report::{REPORTED_LOGINS_MAX, Reporter, SAMPLE_INTERVAL_CHANGING_LOAD};
use pvm_load_watcher::sampler::Sampler;
use pvm_load_watcher::sessions::Session;
use pvm_load_watcher::status::{StatusListener, WatcherStatus};
use pvm_load_watcher::system::{local_time, raise_nice_level, time_of_day, to_micros};
use pvm_load_watcher::user_files::FILE_PREFIX;
use sempa_proto::load::{LoadReport, LoadSample, OwnerVerdict};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::owner::{GuestDirective, REASON_BYTES_MAX};
use sempa_proto::rm::CTX_RM;
use sempa_proto::runtime_paths::GUEST_CPUS_FILE;
use sempa_proto::sm::SM_ALIVE;
use sempa_proto::table::{HostTable, TaskInfo};
use sempa_proto::task::{Reply, Request};
use sempa_proto::text::truncate;
use sempa_proto::{Micros, Tid, frame};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Minimum interval between two readings of the expensive sources, and between two assessments
/// while no source changes.
const SLOW_CHECKS_INTERVAL: Micros = Micros::from_secs(5);
/// Minimum interval between two queries of the virtual machine's tasks; the load of the tasks is
/// measured after each query.
const TASK_QUERY_INTERVAL: Micros = Micros::from_secs(10);
/// Minimum interval between two queries of the tasks while the owner limits guests. It is shorter
/// than [`TASK_QUERY_INTERVAL`], because the limits must be applied to new guests soon.
const LIMITED_TASK_QUERY_INTERVAL: Micros = Micros::from_secs(1);
/// Time for which the load watcher still answers queries after the owner's side has switched it
/// off, so that this side learns that its setting was read.
const SWITCH_OFF_DELAY: Micros = Micros::from_secs(10);
/// Interval at which paths that cannot be watched are read.
const UNWATCHED_READ_INTERVAL: Micros = Micros::from_secs(10);

/// Error context of a failed sample.
const SAMPLING_CONTEXT: &str = "sampling the load of this host";

// Indices of the watched paths in [`FileWatcher`].
const UTMP_PATH_INDEX: usize = 0;
const SESSIONS_PATH_INDEX: usize = 1;
const USER_POLICY_PATH_INDEX: usize = 2;
const ADMIN_POLICY_PATH_INDEX: usize = 3;
const OVERRIDES_PATH_INDEX: usize = 4;
const WATCHED_PATH_COUNT: usize = 5;

/// The results of the last reading of each source.
struct Observations {
    login_records: LoginRecords,
    sessions: Evidence<Vec<Session>>,
    /// The reason why logind cannot be queried over D-Bus; `sessions` was then read from logind's
    /// files. `None` if logind has answered.
    logind_error: Option<String>,
    terminal_input: BTreeMap<String, Micros>,
    input_probe: InputProbe,
    external_load: Evidence<f32>,
}

pub(crate) struct Watcher {
    vm: Vm,
    rm_subscription: Arc<RmSubscription>,
    /// Time since which the owner's side has switched this load watcher off; `None` if it has not,
    /// or if a resource manager needs the reports.
    switched_off_since: Option<Micros>,
    /// An epoll instance that is readable when a user of this host queries the status, when logind
    /// reports a change, or when a resource manager requests reports.
    wake_epoll: Epoll,
    /// Name of the virtual machine.
    vm_name: String,
    args: Args,
    uid: u32,
    /// Login name of the user of the virtual machine.
    user: String,
    started_at: Instant,
    sampler: Sampler,
    file_watcher: FileWatcher,
    observations: Observations,
    host_policy: HostPolicy,
    owner_detector: OwnerDetector,
    guest_gate: GuestGate,
    task_load: TaskLoad,
    /// `None` if the system does not report the processors of this process.
    cpu_confinement: Option<CpuConfinement>,
    /// True if the owner limits guests by a nice level or by processors.
    guests_limited: bool,
    /// External load in the last sample, in processors; 0 if unknown.
    external_processors: f32,
    reporter: Reporter,
    status_listener: Option<StatusListener>,
    /// `None` if no thread for queries of logind could be started; only logind's files are read
    /// then.
    logind_client: Option<LogindClient>,
    last_sample: LoadSample,
    assessment: OwnerAssessment,
    guest_decision: GuestDecision,
    reported_decision: Option<GuestDecision>,
    directive_sender: DirectiveSender,
    /// The encoded report that waits to be sent; `None` if there is none.
    outgoing_report: Option<Body>,
    deadlines: Deadlines,
}

/// Times, by the watcher's monotonic clock, at which each periodic action is due next.
#[derive(Debug, Default)]
struct Deadlines {
    slow_checks: Micros,
    task_query: Micros,
    unwatched_read: Micros,
}

/// Determines the paths to watch, and reads the policies of the owners, the administrator and the
/// user with the uid `user`. Logs the errors in the policies and the refused paths.
fn read_policies(args: &Args, user: u32) -> (FileWatcher, HostPolicy) {
    let home_dir = || {
        nix::unistd::User::from_uid(user.into())
            .ok()
            .flatten()
            .map(|user| user.dir)
    };
    let user_path = args
        .owner_policy
        .clone()
        .or_else(|| Some(user_policy_file(&home_dir()?)));
    let (admin_path, admin_warning) = trusted_path(
        args.admin_policy.clone(),
        Path::new(ADMIN_FILE),
        user.into(),
    );
    let (overrides_path, overrides_warning) = trusted_path(
        args.owner_words.clone(),
        Path::new(OVERRIDES_DIR),
        user.into(),
    );
    let paths = PolicyPaths {
        user: user_path.unwrap_or_else(|| PathBuf::from("/nonexistent/owner.toml")),
        admin: admin_path,
        overrides: overrides_path,
    };
    let file_watcher = FileWatcher::new(vec![
        WatchedPath::file(utmp_path(args.utmp.clone())),
        WatchedPath::dir(args.sessions.clone(), ""),
        WatchedPath::settings(paths.user.clone()),
        WatchedPath::settings(paths.admin.clone()),
        WatchedPath::dir(paths.overrides.clone(), FILE_PREFIX),
    ]);
    let host_policy = HostPolicy::read_and_merge(
        paths,
        VmUser {
            uid: user,
            name: user_name(user),
            defaults: args.guest_defaults.clone(),
        },
    );
    let policy_errors = host_policy.errors();
    admin_warning
        .iter()
        .chain(&overrides_warning)
        .chain(&policy_errors)
        .for_each(|line| tracing::warn!("{line}"));
    (file_watcher, host_policy)
}

impl Watcher {
    pub(crate) fn new(
        vm: Vm,
        rm_subscription: Arc<RmSubscription>,
        args: Args,
    ) -> anyhow::Result<Self> {
        let mut sampler = Sampler::open(Path::new("/proc")).context(SAMPLING_CONTEXT)?;
        if let Some(meminfo) = &args.meminfo {
            sampler = sampler
                .with_meminfo_file(meminfo)
                .context(SAMPLING_CONTEXT)?;
        }
        let sample = sampler.sample(time_of_day()).context(SAMPLING_CONTEXT)?;
        let euid = nix::unistd::geteuid().as_raw();
        let (file_watcher, initial_policy) = read_policies(&args, euid);
        let vmid = std::env::var("PVM_VMID")
            .ok()
            .filter(|vmid| !vmid.is_empty())
            .unwrap_or_else(|| "pvm".into());
        // Without a listener, users of this host cannot query the status; all other functions work.
        let status_listener = StatusListener::open(euid, &vmid)
            .inspect_err(|e| tracing::warn!("status queries are not answered: {e}"))
            .ok();
        let initial_observations = Observations {
            login_records: read_login_records(file_watcher.path(UTMP_PATH_INDEX)),
            sessions: Evidence::Unavailable("not read yet".into()),
            logind_error: None,
            terminal_input: BTreeMap::new(),
            input_probe: InputProbe::new(args.interrupts.clone()),
            external_load: Evidence::Unavailable("not measured yet".into()),
        };
        let logind_client = LogindClient::start_queries(args.bus.clone())
            .inspect_err(|e| tracing::warn!("logind cannot be queried: {e}"))
            .ok();
        let wake_fds = status_listener
            .iter()
            .map(StatusListener::fd)
            .chain(logind_client.iter().map(LogindClient::fd))
            .chain(initial_policy.file_users_fd());
        let epoll = rm_subscription
            .create_wake_epoll(wake_fds)
            .context("waiting for queries")?;
        let mut watcher = Self {
            vm,
            rm_subscription,
            switched_off_since: None,
            wake_epoll: epoll,
            vm_name: vmid,
            args,
            uid: euid,
            user: user_name(euid),
            started_at: Instant::now(),
            sampler,
            file_watcher,
            observations: initial_observations,
            host_policy: initial_policy,
            owner_detector: OwnerDetector::default(),
            guest_gate: GuestGate::default(),
            task_load: TaskLoad::new(Path::new("/proc")),
            cpu_confinement: CpuConfinement::new(runtime_path(GUEST_CPUS_FILE)).ok(),
            guests_limited: false,
            external_processors: 0.0,
            reporter: Reporter::default(),
            status_listener,
            logind_client,
            last_sample: sample,
            assessment: OwnerAssessment::default(),
            guest_decision: GuestDecision::default(),
            reported_decision: None,
            directive_sender: DirectiveSender::default(),
            outgoing_report: None,
            deadlines: Deadlines::default(),
        };
        watcher.read_sessions();
        watcher.observations.input_probe.read_if_due(time_of_day());
        Ok(watcher)
    }

    /// True if a resource manager uses the reports, so that it migrates tasks for owners.
    fn has_rm(&self) -> bool {
        self.rm_subscription.rm_tid().is_some()
    }

    fn now(&self) -> Micros {
        to_micros(self.started_at.elapsed())
    }

    /// Prepares a report for the resource manager. The main loop sends the report only when no
    /// other action is due, so that an assessment never waits for the socket or for the wake-up of
    /// another processor.
    fn prepare_report(&mut self) -> anyhow::Result<()> {
        let mut logins = self.assessment.logins.clone();
        logins.truncate(REPORTED_LOGINS_MAX);
        let GuestDecision {
            access: permitted_access,
            reason: guest_reason,
            limits,
        } = self.guest_decision.clone();
        let report = LoadReport {
            host: self.vm.host(),
            at: time_of_day(),
            sample: self.last_sample,
            owner_verdict: self.assessment.verdict.clone(),
            confidence_percent: self.assessment.confidence,
            owner_reason: self.assessment.reason.clone(),
            logins,
            guest_access: permitted_access,
            access_reason: guest_reason,
            guest_limits: limits,
        };
        self.outgoing_report = Some(Body {
            enc: DSIG_X86_64,
            bytes: frame::to_bytes(&report)?.into(),
        });
        let now = self.now();
        self.reporter.record_report(
            now,
            self.last_sample,
            report.owner_verdict,
            report.owner_reason,
        );
        self.reported_decision = Some(self.guest_decision.clone());
        Ok(())
    }

    /// Sends the prepared report if there is one.
    fn send_report(&mut self) {
        if let (Some(body), Some(rm)) = (self.outgoing_report.take(), self.rm_subscription.rm_tid())
        {
            // If the resource manager has just exited, the report is lost; the next resource
            // manager requests a complete report.
            let _ = self
                .vm
                .send_in_context(rm, self.args.ctx, self.args.tag, body);
        }
    }

    /// Derives a new assessment of the owner and a new decision about guests from all sources. The
    /// daemon of this host is notified first, because it can stop guests immediately.
    fn assess_and_notify(&mut self) -> anyhow::Result<()> {
        let now = time_of_day();
        let logins = available_logins(
            &self.observations.login_records,
            &self.observations.sessions,
        );
        let previous_errors = self.host_policy.errors();
        self.host_policy.update_logins(&logins);
        self.log_new_errors(&previous_errors);
        self.observations.terminal_input = terminal_input_times(&self.args.terminals, &logins);
        let has_rm = self.has_rm();
        let policy = &self.host_policy.merged_policy().policy;
        let idle_after_min = policy.idle_after_min.unwrap_or(DEFAULT_IDLE_AFTER_MIN);
        let signs = OwnerSigns {
            records_path: self.file_watcher.path(UTMP_PATH_INDEX),
            login_records: &self.observations.login_records,
            sessions: &self.observations.sessions,
            logind_error: self.observations.logind_error.as_deref(),
            terminal_input: &self.observations.terminal_input,
            input_activity: self.observations.input_probe.evidence(),
            external_load: &self.observations.external_load,
            overrides: self.host_policy.overrides(),
            owners: self.host_policy.owners(),
            idle_after: Micros::from_secs(u64::from(idle_after_min) * 60),
            own_user: (!has_rm).then_some(self.user.as_str()),
        };
        self.assessment = self.owner_detector.derive_verdict(now, &signs);
        let input_is_old = |at: &Micros| now.since(*at) >= signs.idle_after;
        let idle_terminals = self
            .observations
            .terminal_input
            .iter()
            .filter(|(_, at)| input_is_old(at));
        let idle_paths: BTreeSet<PathBuf> = idle_terminals
            .map(|(line, _)| self.args.terminals.join(line))
            .collect();
        self.file_watcher.watch_idle_terminals(&idle_paths);
        let drain_sentence = self.host_policy.drain().map(Drain::sentence);
        self.guest_decision = self.guest_gate.decide(&GuestInputs {
            policy,
            drained: drain_sentence.as_deref(),
            policy_unknown: self.host_policy.policy_unknown(),
            blocked_uids: self.host_policy.blocked_uids(),
            vm_uid: self.uid,
            owner_verdict: &self.assessment.verdict,
            owner_reason: &self.assessment.reason,
            available_bytes: self.last_sample.available_bytes,
            local_time: local_time(now.0 / 1_000_000),
            now,
        });
        self.sampler
            .set_memory_matters(policy.memory_free.is_some());
        if let Some(source) = self.host_policy.switched_off_by() {
            let reason = format!("watch = false in {source}: no owner is watched for");
            (self.assessment.verdict, self.assessment.reason) = (OwnerVerdict::default(), reason);
            self.guest_decision = GuestDecision::default();
        }
        self.send_directive();
        let decision_changed = self.reported_decision.as_ref() != Some(&self.guest_decision);
        if decision_changed
            || self
                .reporter
                .owner_changed(&self.assessment.verdict, &self.assessment.reason)
        {
            self.prepare_report()?;
        }
        Ok(())
    }

    /// Sends the daemon a directive that states whether guests may run, unless it is in force.
    fn send_directive(&mut self) {
        let GuestDecision {
            access,
            reason,
            limits,
        } = &self.guest_decision;
        let directive = GuestDirective {
            access: *access,
            reason: truncate(reason, REASON_BYTES_MAX).to_string(),
            limits: limits.clone(),
        };
        let vm = &self.vm;
        self.directive_sender
            .send_if_new(directive, |directive| vm.set_guest_directive(directive));
    }

    /// Reads the sources whose path index `selects_index` accepts. Sets missing watches before
    /// reading the sources, so that no change between watch and read is missed. Logs new errors of
    /// the policies.
    fn read_sources(&mut self, selects_index: impl Fn(usize) -> bool) {
        (0..WATCHED_PATH_COUNT)
            .filter(|path_index| selects_index(*path_index))
            .for_each(|path_index| self.file_watcher.set_missing_watches(path_index));
        if selects_index(UTMP_PATH_INDEX) {
            self.observations.login_records =
                read_login_records(self.file_watcher.path(UTMP_PATH_INDEX));
        }
        if selects_index(SESSIONS_PATH_INDEX) {
            self.read_sessions();
        }
        let previous_errors = self.host_policy.errors();
        if selects_index(ADMIN_POLICY_PATH_INDEX) {
            self.host_policy.read_admin_policy();
        }
        if selects_index(USER_POLICY_PATH_INDEX) {
            self.host_policy.read_user_policy();
        }
        if selects_index(OVERRIDES_PATH_INDEX) {
            self.host_policy.read_overrides();
        }
        self.log_new_errors(&previous_errors);
    }

    /// Logs the errors of the policies that `previous_errors` does not contain. `previous_errors`
    /// are the errors before the last reading.
    fn log_new_errors(&self, previous_errors: &[String]) {
        self.host_policy
            .errors()
            .iter()
            .filter(|line| !previous_errors.contains(line))
            .for_each(|line| tracing::warn!("{line}"));
    }

    /// Tries again to watch the unwatched paths whose index `selects_index` accepts. Reads the
    /// sources that [`FileWatcher::retry_watch`] requires to be read now.
    fn retry_unwatched(&mut self, selects_index: impl Fn(usize) -> bool) {
        let must_read: Vec<bool> = (0..WATCHED_PATH_COUNT)
            .map(|path_index| {
                selects_index(path_index) && self.file_watcher.retry_watch(path_index)
            })
            .collect();
        self.read_sources(|path_index| must_read[path_index]);
    }

    /// Reads the sessions from logind. If logind cannot be queried, reads logind's files, which
    /// contain less information.
    fn read_sessions(&mut self) {
        let query_error = match self.logind_client.as_ref().map(LogindClient::sessions) {
            Some(Evidence::Known(sessions)) => {
                (self.observations.sessions, self.observations.logind_error) =
                    (Evidence::Known(sessions), None);
                return;
            }
            Some(Evidence::Unavailable(query_error)) => query_error,
            None => "logind cannot be queried".into(),
        };
        (self.observations.sessions, self.observations.logind_error) =
            (read_session_files(&self.args.sessions), Some(query_error));
    }

    /// Requests from the daemon the list of the virtual machine's tasks on this host.
    fn query_tasks(&self) -> Vec<TaskInfo> {
        match self.vm.runtime().request_and_wait(Request::Tasks {
            selector: self.vm.host().tid(),
        }) {
            Reply::Tasks(tasks) => tasks,
            // The connection to the daemon is lost, and this task is about to exit.
            _ => Vec::new(),
        }
    }

    /// Takes a sample. When slow checks are due, determines first which control group the sample
    /// describes.
    fn take_sample(&mut self) -> anyhow::Result<()> {
        if self.now() >= self.deadlines.slow_checks {
            self.sampler.select_limiting_group();
        }
        self.last_sample = self
            .sampler
            .sample(time_of_day())
            .context(SAMPLING_CONTEXT)?;
        if self.sampler.take_cpu_times_restart() {
            self.task_load.restart();
        }
        self.attribute_load();
        Ok(())
    }

    /// Stores in the sample how many processors the virtual machine's tasks use. The number is not
    /// stored if less than [`LOW_LOAD_PROCESSORS`] are used in total, if it cannot be measured, or
    /// if the external load has risen so much that the tasks must be listed again.
    fn attribute_load(&mut self) {
        let used_processors = self.last_sample.busy_share * self.last_sample.usable_processors();
        let Some(times) = self
            .sampler
            .cpu_times()
            .filter(|_| used_processors >= LOW_LOAD_PROCESSORS)
        else {
            self.external_processors = 0.0;
            return self.task_load.skip_sample();
        };
        let Some(vm_processors) = self
            .task_load
            .measure_task_processors(times, self.last_sample.cores)
        else {
            return;
        };
        let previous_external_processors = std::mem::replace(
            &mut self.external_processors,
            used_processors - vm_processors,
        );
        if self.external_processors > previous_external_processors + LOW_LOAD_PROCESSORS {
            // New external load may come from new tasks of the virtual machine. The tasks are
            // listed now, so that the next sample attributes the load correctly.
            self.set_task_processes(&self.query_tasks());
        } else {
            self.last_sample.task_cpus = Some(vm_processors);
        }
    }

    /// Sets the processes whose load is not external: the processes of `tasks` and of the daemon.
    fn set_task_processes(&mut self, tasks: &[TaskInfo]) {
        let mut vm_pids: Vec<i32> = tasks
            .iter()
            .map(|task| task.pid)
            .filter(|pid| *pid > 0)
            .collect();
        vm_pids.extend(daemon_pids());
        self.task_load.set_task_processes(&vm_pids);
    }

    /// Applies the owner's limits to guests, and measures the external load. Queries the tasks only
    /// if there are limits or the origin of the load matters.
    fn limit_and_measure_tasks(&mut self) {
        let Some(times) = self.sampler.cpu_times() else {
            return;
        };
        let policy = &self.host_policy.merged_policy().policy;
        let (nice, cores) = (policy.nice, policy.cores);
        let is_limited = nice.is_some()
            || self
                .cpu_confinement
                .as_ref()
                .is_some_and(|confinement| confinement.is_needed(cores));
        if is_limited || self.task_load.origin_matters(times, self.last_sample.cores) {
            let tasks = self.query_tasks();
            if is_limited {
                let guests = tasks.iter().filter(|task| is_guest(task));
                let guest_pids: Vec<i32> = guests
                    .flat_map(|task| task_processes(Path::new("/proc"), task.pid))
                    .collect();
                // Setting the nice level fails for a process that has exited.
                let pids_and_levels = nice
                    .map(i32::from)
                    .into_iter()
                    .flat_map(|level| guest_pids.iter().map(move |pid| (*pid, level)));
                pids_and_levels.for_each(|(pid, level)| drop(raise_nice_level(pid, level)));
                self.cpu_confinement
                    .iter_mut()
                    .for_each(|confinement| confinement.apply(cores, guest_pids.iter().copied()));
            }
            self.set_task_processes(&tasks);
        }
        self.guests_limited = is_limited;
        self.observations.external_load = match self
            .task_load
            .measure_external_processors(times, self.last_sample.cores)
        {
            Some(cores) => Evidence::Known(cores),
            None => Evidence::Unavailable("tasks of the virtual machine started or ended".into()),
        };
    }

    /// Executes the periodic actions that are due at `now`. Returns true if a new assessment is
    /// needed.
    fn run_periodic_checks(&mut self, now: Micros) -> bool {
        self.retry_unwatched(|path_index| path_index == UTMP_PATH_INDEX);
        if now < self.deadlines.slow_checks {
            return self.file_watcher.is_unwatched(UTMP_PATH_INDEX);
        }
        self.deadlines.slow_checks = now + SLOW_CHECKS_INTERVAL;
        self.exit_if_switched_off(now);
        if now >= self.deadlines.unwatched_read {
            self.deadlines.unwatched_read = now + UNWATCHED_READ_INTERVAL;
            self.retry_unwatched(|path_index| path_index != UTMP_PATH_INDEX);
            // No watch reports that a file has become readable, or that a user has got an account.
            // While a refused file closes the host or users are omitted, the policies are therefore
            // read again periodically.
            if self.host_policy.policy_unknown().is_some() || self.host_policy.omits_users() {
                self.read_sources(|path_index| {
                    [
                        ADMIN_POLICY_PATH_INDEX,
                        USER_POLICY_PATH_INDEX,
                        OVERRIDES_PATH_INDEX,
                    ]
                    .contains(&path_index)
                });
            }
        }
        self.observations.input_probe.read_if_due(time_of_day());
        if now >= self.deadlines.task_query {
            self.limit_and_measure_tasks();
            self.deadlines.task_query = now
                + if self.guests_limited {
                    LIMITED_TASK_QUERY_INTERVAL
                } else {
                    TASK_QUERY_INTERVAL
                };
        }
        true
    }

    /// Exits if the owner's side has switched this load watcher off and no resource manager needs
    /// its reports. The exit status 0 tells the daemon that no load watcher is wanted.
    fn exit_if_switched_off(&mut self, now: Micros) {
        let Some(source) = self.host_policy.switched_off_by() else {
            self.switched_off_since = None;
            return;
        };
        if self.has_rm() {
            self.switched_off_since = None;
        } else if now.since(*self.switched_off_since.get_or_insert(now)) >= SWITCH_OFF_DELAY {
            tracing::info!("{source} contains watch = false; this load watcher exits");
            drop(self.vm.exit());
            std::process::exit(0);
        }
    }

    /// Returns the time until the next sample. If the policy depends on the time of day, this time
    /// ends no later than the next full minute.
    fn next_interval(&mut self) -> Micros {
        let interval = self.reporter.next_sample_interval(&self.last_sample);
        let interval = if self.file_watcher.is_unwatched(UTMP_PATH_INDEX) {
            SAMPLE_INTERVAL_CHANGING_LOAD
        } else {
            interval
        };
        if !self.host_policy.depends_on_clock() {
            return interval;
        }
        interval.min(Micros(60_000_000 - time_of_day().0 % 60_000_000))
    }

    /// Tells the daemon that this load watcher runs.
    fn announce_alive(&self) {
        // If this fails, the connection to the daemon is lost, and this task is about to exit.
        let _ = self.vm.send_in_context(
            Tid::MY_DAEMON,
            CTX_RM,
            SM_ALIVE,
            Body {
                enc: DSIG_X86_64,
                bytes: Vec::new().into(),
            },
        );
    }

    pub(crate) fn run_main_loop(&mut self) -> anyhow::Result<()> {
        self.assess_and_notify()?;
        self.announce_alive();
        let mut next_sample_at = self.now() + SAMPLE_INTERVAL_CHANGING_LOAD;
        let mut current_minute = time_of_day().0 / 60_000_000;
        loop {
            self.send_report();
            let timeout = Duration::from_micros(next_sample_at.since(self.now()).0);
            let wake_reasons: WakeReasons = self
                .file_watcher
                .wait(timeout, Some(self.wake_epoll.0.as_fd()));
            if wake_reasons.any_change() {
                self.read_sources(|path_index| wake_reasons.path_changed(path_index));
                self.assess_and_notify()?;
            }
            if wake_reasons.additional_fd_ready {
                if self.rm_subscription.take_ping() {
                    self.announce_alive();
                }
                if self
                    .logind_client
                    .as_ref()
                    .is_some_and(LogindClient::take_change_event)
                {
                    self.read_sessions();
                    self.assess_and_notify()?;
                }
                if self.host_policy.take_file_users_event() {
                    self.read_sources(|path_index| path_index == OVERRIDES_PATH_INDEX);
                    self.assess_and_notify()?;
                }
                self.answer_queries();
                if self.rm_subscription.take_change_event() {
                    // Whether a resource manager runs decides which logins count.
                    self.assess_and_notify()?;
                    self.prepare_report()?;
                }
            }
            if self.now() < next_sample_at {
                continue;
            }
            self.take_sample()?;
            let now = self.now();
            let previous_minute =
                std::mem::replace(&mut current_minute, time_of_day().0 / 60_000_000);
            let hours_need_decision =
                previous_minute != current_minute && self.host_policy.depends_on_clock();
            let memory_needs_decision = self.guest_gate.needs_decision(
                &self.host_policy.merged_policy().policy,
                self.last_sample.available_bytes,
                time_of_day(),
            );
            if self.run_periodic_checks(now) || hours_need_decision || memory_needs_decision {
                self.assess_and_notify()?;
            }
            if self.reporter.must_report_load(now, &self.last_sample) {
                self.prepare_report()?;
            }
            next_sample_at = now + self.next_interval();
        }
    }

    fn answer_queries(&self) {
        if let Some(listener) = &self.status_listener {
            listener.answer_queries(|| self.collect_status());
        }
    }

    /// Collects the status of this host, with which the load watcher answers a user's query.
    fn collect_status(&self) -> WatcherStatus {
        let request = |request| self.vm.runtime().request_and_wait(request);
        let hosts = match request(Request::Config) {
            Reply::Hosts(table) => table,
            _ => HostTable::default(),
        };
        StatusInputs {
            vm: &self.vm_name,
            user: &self.user,
            host: self.vm.host(),
            hosts: &hosts,
            has_rm: self.has_rm(),
            assessment: &self.assessment,
            decision: &self.guest_decision,
            host_policy: &self.host_policy,
            directive_refusal: self.directive_sender.refusal(),
            tasks: &self.query_tasks(),
            freezer: request(Request::QueryFreezer),
            engine: request(Request::QueryEngine),
            now: time_of_day(),
        }
        .into_status()
    }
}

/// Returns the path of a file in the runtime directory of this host's daemon.
fn runtime_path(name: &str) -> Option<PathBuf> {
    Some(PathBuf::from(std::env::var_os("PVMSOCK")?).with_file_name(name))
}

/// Returns the pids of this host's daemon and of its child processes.
fn daemon_pids() -> Vec<i32> {
    let Some(lock_path) = runtime_path("pvmd.lock") else {
        return Vec::new();
    };
    let text = std::fs::read_to_string(lock_path).unwrap_or_default();
    let Ok(daemon) = text.trim().parse::<i32>() else {
        return Vec::new();
    };
    let child_pids = Process::new(daemon)
        .and_then(|daemon| daemon.task_main_thread()?.children())
        .unwrap_or_default();
    let child_pids = child_pids.into_iter().map(u32::cast_signed);
    // The tasker has started this process. A tasker of the service is no child of the daemon.
    let tasker = std::os::unix::process::parent_id().cast_signed();
    let mut pids: Vec<i32> = [daemon, tasker].into_iter().chain(child_pids).collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}
