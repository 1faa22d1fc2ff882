//! The main loop of a virtual machine's load watcher.
//!
//! Where the tasker service runs a load watcher of the whole machine, the state of the machine
//! comes from there. Elsewhere, and whenever that load watcher is lost, this process observes the
//! machine itself.
//!
//! The loop waits until the state changes or the next sample is due. The daemon of this host is
//! notified first, because it can stop guests immediately; the report to the resource manager is
//! sent when no other action is due.

use crate::Args;
use crate::directive::DirectiveSender;
use crate::guest_status::is_guest;
use crate::machine_client::MachineClient;
use crate::own_sense::{OwnSense, User};
use crate::rm_link::RmSubscription;
use crate::status_report::StatusInputs;
use anyhow::Context;
use libpvm::{Body, Vm};
use nix::sys::epoll::Epoll;
use procfs::process::Process;
use pvm_load_watcher::cpu_confinement::CpuConfinement;
use pvm_load_watcher::guests::GuestDecision;
use pvm_load_watcher::host_policy::{user_name, user_policy_file};
use pvm_load_watcher::load_attribution::task_processes;
use pvm_load_watcher::machine_link::HostState;
use pvm_load_watcher::report::{REPORTED_LOGINS_MAX, Reporter};
use pvm_load_watcher::status::{StatusListener, WatcherStatus};
use pvm_load_watcher::system::{raise_nice_level, time_of_day, to_micros};
use sempa_proto::load::LoadReport;
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::owner::{GuestDirective, REASON_BYTES_MAX};
use sempa_proto::rm::CTX_RM;
use sempa_proto::runtime_paths::GUEST_CPUS_FILE;
use sempa_proto::sm::SM_ALIVE;
use sempa_proto::table::{HostTable, TaskInfo};
use sempa_proto::task::{Reply, Request};
use sempa_proto::text::truncate;
use sempa_proto::{Micros, Tid, frame};
use std::fmt::Display;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Minimum interval between two queries of the virtual machine's tasks; the load of the tasks is
/// measured after each query.
const TASK_QUERY_INTERVAL: Micros = Micros::from_secs(10);
/// Minimum interval between two queries of the tasks while the owner limits guests. It is shorter
/// than [`TASK_QUERY_INTERVAL`], because the limits must be applied to new guests soon.
const LIMITED_TASK_QUERY_INTERVAL: Micros = Micros::from_secs(1);
/// Time for which the load watcher still answers queries after the owner's side has switched it
/// off, so that this side learns that its setting was read.
const SWITCH_OFF_DELAY: Micros = Micros::from_secs(10);
/// Interval at which a load watcher that observes the machine itself looks for a load watcher of
/// the whole machine.
const MACHINE_RETRY_INTERVAL: Micros = Micros::from_secs(10);
/// Time for the first state from the machine's load watcher, when this process starts.
const FIRST_STATE_TIMEOUT: Duration = Duration::from_secs(1);

/// Where the state of the machine comes from.
enum Source {
    Own {
        sense: Box<OwnSense>,
        /// A load watcher of the machine that has not sent a state yet.
        candidate: Option<Box<MachineClient>>,
    },
    Machine(Box<MachineClient>),
}

pub(crate) struct Watcher {
    vm: Vm,
    rm_subscription: Arc<RmSubscription>,
    /// Time since which the owner's side has switched this load watcher off; `None` if it has not,
    /// or if a resource manager needs the reports.
    switched_off_since: Option<Micros>,
    /// An epoll instance that is readable when a user of this host queries the status, when the
    /// source of the state has something to read, or when a resource manager requests reports.
    wake_epoll: Epoll,
    /// Name of the virtual machine.
    vm_name: String,
    args: Args,
    user: User,
    started_at: Instant,
    source: Source,
    /// The newest state of the machine.
    state: HostState,
    /// `None` if the system does not report the processors of this process.
    cpu_confinement: Option<CpuConfinement>,
    reporter: Reporter,
    status_listener: Option<StatusListener>,
    reported_decision: Option<GuestDecision>,
    directive_sender: DirectiveSender,
    /// The encoded report that waits to be sent; `None` if there is none.
    outgoing_report: Option<Body>,
    /// Time, by the watcher's monotonic clock, at which the tasks are queried next.
    task_query_due: Micros,
    /// Time at which a load watcher of the machine is looked for next.
    machine_retry_due: Micros,
}

impl Watcher {
    pub(crate) fn new(
        vm: Vm,
        rm_subscription: Arc<RmSubscription>,
        args: Args,
    ) -> anyhow::Result<Self> {
        let euid = nix::unistd::geteuid().as_raw();
        let user = User {
            uid: euid,
            name: user_name(euid),
            policy_path: user_policy_path(&args, euid),
        };
        let vm_name = std::env::var("PVM_VMID")
            .ok()
            .filter(|vmid| !vmid.is_empty())
            .unwrap_or_else(|| "pvm".into());
        // Without a listener, users of this host cannot query the status; all other functions work.
        let status_listener = StatusListener::open(euid, &vm_name)
            .inspect_err(|e| tracing::warn!("status queries are not answered: {e}"))
            .ok();
        let has_rm = rm_subscription.rm_tid().is_some();
        let (source, state) = match connect_to_machine(&args, &user, has_rm) {
            Ok((client, state)) => (Source::Machine(client.into()), state),
            Err(error) => {
                tracing::info!("this load watcher observes the machine itself: {error}");
                let mut sense = OwnSense::open(&args, &user, Micros::default())?;
                let state = sense.assess(has_rm);
                let source = Source::Own {
                    sense: sense.into(),
                    candidate: None,
                };
                (source, state)
            }
        };
        let wake_epoll = create_wake_epoll(&rm_subscription, status_listener.as_ref(), &source)?;
        Ok(Self {
            vm,
            rm_subscription,
            switched_off_since: None,
            wake_epoll,
            vm_name,
            args,
            user,
            started_at: Instant::now(),
            source,
            state,
            cpu_confinement: CpuConfinement::new(runtime_path(GUEST_CPUS_FILE)).ok(),
            reporter: Reporter::default(),
            status_listener,
            reported_decision: None,
            directive_sender: DirectiveSender::default(),
            outgoing_report: None,
            task_query_due: Micros::default(),
            machine_retry_due: MACHINE_RETRY_INTERVAL,
        })
    }

    /// True if a resource manager uses the reports, so that it migrates tasks for owners.
    fn has_rm(&self) -> bool {
        self.rm_subscription.rm_tid().is_some()
    }

    fn now(&self) -> Micros {
        to_micros(self.started_at.elapsed())
    }

    // ---- Results

    /// Prepares a report for the resource manager. The main loop sends the report only when no
    /// other action is due, so that an assessment never waits for the socket or for the wake-up of
    /// another processor.
    fn prepare_report(&mut self) -> anyhow::Result<()> {
        let HostState {
            sample,
            assessment,
            decision,
            ..
        } = &self.state;
        let mut logins = assessment.logins.clone();
        logins.truncate(REPORTED_LOGINS_MAX);
        let GuestDecision {
            access,
            reason,
            limits,
        } = decision.clone();
        let report = LoadReport {
            host: self.vm.host(),
            at: time_of_day(),
            sample: *sample,
            owner_verdict: assessment.verdict.clone(),
            confidence_percent: assessment.confidence,
            owner_reason: assessment.reason.clone(),
            logins,
            guest_access: access,
            access_reason: reason,
            guest_limits: limits,
        };
        self.outgoing_report = Some(Body {
            enc: DSIG_X86_64,
            bytes: frame::to_bytes(&report)?.into(),
        });
        self.reported_decision = Some(decision.clone());
        let now = self.now();
        self.reporter.record_report(
            now,
            report.sample,
            report.owner_verdict,
            report.owner_reason,
        );
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

    /// Uses a new state of the machine. The daemon of this host is notified first, because it can
    /// stop guests immediately.
    fn use_state(&mut self, state: HostState) -> anyhow::Result<()> {
        self.state = state;
        self.send_directive();
        let HostState {
            assessment,
            decision,
            ..
        } = &self.state;
        if self.reported_decision.as_ref() != Some(decision)
            || self
                .reporter
                .owner_changed(&assessment.verdict, &assessment.reason)
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
        } = &self.state.decision;
        let directive = GuestDirective {
            access: *access,
            reason: truncate(reason, REASON_BYTES_MAX).to_string(),
            limits: limits.clone(),
        };
        let vm = &self.vm;
        self.directive_sender
            .send_if_new(directive, |directive| vm.set_guest_directive(directive));
    }

    /// Prepares a report if the load has changed.
    fn report_load(&mut self) -> anyhow::Result<()> {
        if self
            .reporter
            .must_report_load(self.now(), &self.state.sample)
        {
            self.prepare_report()?;
        }
        Ok(())
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

    // ---- Tasks

    /// Applies the owner's limits to guests, and measures the external load. Queries the tasks only
    /// if there are limits or the origin of the load matters.
    fn limit_and_measure_tasks(&mut self) {
        let (nice, cores) = (self.state.policy.nice, self.state.policy.cores);
        let is_limited = nice.is_some()
            || self
                .cpu_confinement
                .as_ref()
                .is_some_and(|confinement| confinement.is_needed(cores));
        self.task_query_due = self.now()
            + match is_limited {
                true => LIMITED_TASK_QUERY_INTERVAL,
                false => TASK_QUERY_INTERVAL,
            };
        let load_matters = match &self.source {
            Source::Own { sense, .. } => sense.load_origin_matters(),
            Source::Machine(_) => false,
        };
        if is_limited || load_matters {
            let tasks = query_tasks(&self.vm);
            if is_limited {
                self.limit_guests(&tasks);
            }
            if let Source::Own { sense, .. } = &mut self.source {
                sense.set_task_processes(&main_processes(&tasks));
            }
        }
        if let Source::Own { sense, .. } = &mut self.source {
            sense.measure_external_load();
        }
    }

    /// Applies the owner's nice level and processors to the guests among the tasks.
    fn limit_guests(&mut self, tasks: &[TaskInfo]) {
        let (nice, cores) = (self.state.policy.nice, self.state.policy.cores);
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

    /// Exits if the owner's side has switched this load watcher off and no resource manager needs
    /// its reports. The exit status 0 tells the daemon that no load watcher is wanted.
    fn exit_if_switched_off(&mut self) {
        let now = self.now();
        let Some(source) = &self.state.policy.switched_off_by else {
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

    // ---- Main loop

    pub(crate) fn run_main_loop(&mut self) -> anyhow::Result<()> {
        self.use_state(self.state.clone())?;
        self.announce_alive();
        loop {
            self.send_report();
            match &self.source {
                Source::Own { .. } => self.observe_machine()?,
                Source::Machine(_) => self.follow_machine()?,
            }
        }
    }

    /// Answers queries and pings, and reacts to a resource manager that has come or gone.
    fn handle_requests(&mut self) -> anyhow::Result<()> {
        if self.rm_subscription.take_ping() {
            match &mut self.source {
                Source::Own { .. } => self.announce_alive(),
                Source::Machine(client) => {
                    if let Err(error) = client.ping() {
                        self.observe_alone(&error)?;
                    }
                }
            }
        }
        self.answer_queries();
        if self.rm_subscription.take_change_event() {
            // Whether a resource manager runs decides which logins count.
            let has_rm = self.has_rm();
            match &mut self.source {
                Source::Own { .. } => self.assess()?,
                Source::Machine(client) => {
                    if let Err(error) = client.set_has_rm(has_rm) {
                        self.observe_alone(&error)?;
                    }
                }
            }
            self.prepare_report()?;
        }
        Ok(())
    }

    /// Derives a new state from what this process has observed.
    fn assess(&mut self) -> anyhow::Result<()> {
        let has_rm = self.has_rm();
        match &mut self.source {
            Source::Own { sense, .. } => {
                let state = sense.assess(has_rm);
                self.use_state(state)
            }
            Source::Machine(_) => Ok(()),
        }
    }

    /// Waits for one event while this process observes the machine itself, and handles the event.
    fn observe_machine(&mut self) -> anyhow::Result<()> {
        let now = self.now();
        let Source::Own { sense, .. } = &mut self.source else {
            return Ok(());
        };
        let timeout = Duration::from_micros(sense.next_sample_at.since(now).0);
        let wake_reasons = sense.sensors.wait(timeout, self.wake_epoll.0.as_fd());
        if wake_reasons.any_change() {
            sense.read_changes(wake_reasons);
            self.assess()?;
        }
        if wake_reasons.additional_fd_ready {
            if let Source::Own { sense, .. } = &mut self.source
                && sense.take_events()
            {
                self.assess()?;
            }
            self.handle_requests()?;
            self.read_candidate()?;
        }
        let now = self.now();
        let Source::Own { sense, .. } = &mut self.source else {
            return Ok(());
        };
        if now < sense.next_sample_at {
            return Ok(());
        }
        let vm = &self.vm;
        let result = sense.sample(now, || main_processes(&query_tasks(vm)))?;
        self.state.sample = sense.sensors.last_sample;
        if result.was_slow {
            self.exit_if_switched_off();
            if now >= self.task_query_due {
                self.limit_and_measure_tasks();
            }
            self.look_for_machine();
        }
        if result.must_assess {
            self.assess()?;
        }
        self.report_load()?;
        if let Source::Own { sense, .. } = &mut self.source {
            sense.schedule_sample(now, &mut self.reporter);
        }
        Ok(())
    }

    /// Waits for one event while the machine's load watcher observes the machine, and handles the
    /// event.
    fn follow_machine(&mut self) -> anyhow::Result<()> {
        let now = self.now();
        let Source::Machine(client) = &mut self.source else {
            return Ok(());
        };
        let timeout = Duration::from_micros(self.task_query_due.since(now).0);
        let wake_reasons = client.wait(timeout, self.wake_epoll.0.as_fd());
        if wake_reasons.any_change()
            && let Err(error) = client.read_user_policy()
        {
            return self.observe_alone(&error);
        }
        match client.receive() {
            Ok(arrived) => {
                if arrived.is_alive {
                    self.announce_alive();
                }
                if let Some(state) = arrived.state {
                    self.use_state(*state)?;
                    self.report_load()?;
                }
            }
            Err(error) => return self.observe_alone(&error),
        }
        if wake_reasons.additional_fd_ready {
            self.handle_requests()?;
        }
        if self.now() >= self.task_query_due {
            self.exit_if_switched_off();
            self.limit_and_measure_tasks();
            if let Source::Machine(client) = &mut self.source
                && let Err(error) = client.retry_user_policy()
            {
                return self.observe_alone(&error);
            }
        }
        match &self.source {
            Source::Machine(client) if client.time_until_lost(Instant::now()).is_zero() => {
                self.observe_alone(&"it does not answer")
            }
            _ => Ok(()),
        }
    }

    // ---- Change of the source

    /// Observes the machine itself from now on, because the machine's load watcher is lost. The
    /// directive in force stays until the first own assessment.
    fn observe_alone(&mut self, why: &dyn Display) -> anyhow::Result<()> {
        tracing::warn!(
            "the load watcher of this machine is lost: {why}; this load watcher observes the machine itself"
        );
        let now = self.now();
        self.source = Source::Own {
            sense: OwnSense::open(&self.args, &self.user, now)?.into(),
            candidate: None,
        };
        self.machine_retry_due = now + MACHINE_RETRY_INTERVAL;
        self.renew_wake_epoll()?;
        self.assess()?;
        self.announce_alive();
        Ok(())
    }

    /// Looks for a load watcher of the machine, if this is due.
    fn look_for_machine(&mut self) {
        let (now, has_rm) = (self.now(), self.has_rm());
        let Source::Own { candidate, .. } = &mut self.source else {
            return;
        };
        if now < self.machine_retry_due {
            return;
        }
        self.machine_retry_due = now + MACHINE_RETRY_INTERVAL;
        *candidate = MachineClient::connect(&self.args, &self.user, has_rm)
            .ok()
            .map(Box::new);
        if candidate.is_some() && self.renew_wake_epoll().is_err() {
            self.drop_candidate();
        }
    }

    /// Follows the machine's load watcher from now on if it has sent its first state.
    fn read_candidate(&mut self) -> anyhow::Result<()> {
        let Source::Own { candidate, .. } = &mut self.source else {
            return Ok(());
        };
        let Some(mut client) = candidate.take() else {
            return Ok(());
        };
        match client.receive() {
            Ok(arrived) => match arrived.state {
                Some(state) => {
                    tracing::info!("the load watcher of this machine observes the machine");
                    self.source = Source::Machine(client);
                    self.renew_wake_epoll()?;
                    self.use_state(*state)
                }
                None => {
                    *candidate = Some(client);
                    Ok(())
                }
            },
            Err(error) => {
                tracing::debug!("no load watcher of this machine: {error}");
                self.renew_wake_epoll()
            }
        }
    }

    fn drop_candidate(&mut self) {
        if let Source::Own { candidate, .. } = &mut self.source {
            *candidate = None;
        }
    }

    fn renew_wake_epoll(&mut self) -> anyhow::Result<()> {
        self.wake_epoll = create_wake_epoll(
            &self.rm_subscription,
            self.status_listener.as_ref(),
            &self.source,
        )?;
        Ok(())
    }

    // ---- Queries of users

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
            user: &self.user.name,
            host: self.vm.host(),
            hosts: &hosts,
            has_rm: self.has_rm(),
            state: &self.state,
            serves_machine: matches!(self.source, Source::Machine(_)),
            directive_refusal: self.directive_sender.refusal(),
            tasks: &query_tasks(&self.vm),
            freezer: request(Request::QueryFreezer),
            engine: request(Request::QueryEngine),
            now: time_of_day(),
        }
        .into_status()
    }
}

/// Connects to the load watcher of the machine, and waits for the first state.
fn connect_to_machine(
    args: &Args,
    user: &User,
    has_rm: bool,
) -> anyhow::Result<(MachineClient, HostState)> {
    let mut client = MachineClient::connect(args, user, has_rm)
        .context("no load watcher of the whole machine runs")?;
    let state = client
        .wait_for_state(FIRST_STATE_TIMEOUT)
        .context("the load watcher of the machine does not answer")?;
    Ok((client, state))
}

/// Creates an epoll instance that is readable when there is something to handle.
fn create_wake_epoll(
    rm_subscription: &RmSubscription,
    status_listener: Option<&StatusListener>,
    source: &Source,
) -> anyhow::Result<Epoll> {
    let (sense, client) = match source {
        Source::Own { sense, candidate } => (Some(sense), candidate.as_ref()),
        Source::Machine(client) => (None, Some(client)),
    };
    let wake_fds = status_listener
        .into_iter()
        .map(StatusListener::fd)
        .chain(sense.into_iter().flat_map(|sense| sense.wake_fds()))
        .chain(client.map(|client| client.fd()));
    rm_subscription
        .create_wake_epoll(wake_fds)
        .context("waiting for queries")
}

/// Returns the path of the policy file of the user of the virtual machine.
fn user_policy_path(args: &Args, uid: u32) -> PathBuf {
    let home_dir = || {
        nix::unistd::User::from_uid(uid.into())
            .ok()
            .flatten()
            .map(|user| user.dir)
    };
    args.owner_policy
        .clone()
        .or_else(|| Some(user_policy_file(&home_dir()?)))
        .unwrap_or_else(|| PathBuf::from("/nonexistent/owner.toml"))
}

/// Requests from the daemon the list of the virtual machine's tasks on this host.
fn query_tasks(vm: &Vm) -> Vec<TaskInfo> {
    match vm.runtime().request_and_wait(Request::Tasks {
        selector: vm.host().tid(),
    }) {
        Reply::Tasks(tasks) => tasks,
        // The connection to the daemon is lost, and this task is about to exit.
        _ => Vec::new(),
    }
}

/// Returns the main processes whose load is not external: those of `tasks` and of the daemon.
fn main_processes(tasks: &[TaskInfo]) -> Vec<i32> {
    let mut pids: Vec<i32> = tasks
        .iter()
        .map(|task| task.pid)
        .filter(|pid| *pid > 0)
        .collect();
    pids.extend(daemon_pids());
    pids
}

/// Returns the path of a file in the runtime directory of this host's daemon.
fn runtime_path(name: &str) -> Option<PathBuf> {
    Some(PathBuf::from(std::env::var_os("PVMSOCK")?).with_file_name(name))
}

/// Returns the process id of this host's daemon.
pub(crate) fn daemon_pid() -> Option<i32> {
    let text = std::fs::read_to_string(runtime_path("pvmd.lock")?).ok()?;
    text.trim().parse().ok()
}

/// Returns the pids of this host's daemon and of its child processes.
fn daemon_pids() -> Vec<i32> {
    let Some(daemon) = daemon_pid() else {
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
