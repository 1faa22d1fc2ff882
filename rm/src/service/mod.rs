//! The main loop of the resource manager: receives messages, calls the decision functions of
//! [`crate::decide`], and sends the resulting orders. The state is in [`crate::model`],
//! [`crate::spawns`] and [`crate::watchers`].

mod drain;
mod grants;
mod history;
mod kill;
mod policy_runtime;
mod suspend;
mod vacate;

pub use kill::{KILLS_MAX, TERM_TIMEOUT};
pub use vacate::VACATED_RESERVE_AFTER;

use crate::api::VmApi;
use crate::decide::{Choosers, UnknownChooser, plan_evictions, plan_rebalances};
use crate::grants::Grants;
use crate::model::{Labels, Model};
use crate::policy::{EffectivePolicy, PolicyError};
use crate::recording::{RecordedInput, Recorder};
use crate::spawns::{self, SpawnIncoming, Spawns};
use crate::store::{HistoryWriter, StoreLocation, decision_records};
use crate::watchers::{self, Watchers};
use bytes::Bytes;
use history::HistoryState;
use libpvm::Error;
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::event::EventKind;
use sempa_proto::frame::from_bytes;
use sempa_proto::load::{LOAD_WATCHER_PROGRAM, LoadReport, TAG_REPORT_TO, is_load_watcher};
use sempa_proto::message::CTX_BASE;
use sempa_proto::migration::MigrationCause;
use sempa_proto::rm::{CTX_RM, TAG_QUERY};
use sempa_proto::sm::{
    SM_ADDHOST, SM_CONFIG, SM_DELHOST, SM_EXECACK, SM_HANDOFF, SM_HOSTX, SM_PLACEMENT_LEASE_USED,
    SM_SCHED, SM_SPAWN, SM_SPAWN_WAITS, SM_TASK, pack_spawn_waits, unpack_spawn, unpack_tids,
};
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED, TASK_RM, TaskInfo};
use sempa_proto::task::{NotifySubjects, SPAWN_HOST, SPAWN_NO_PARENT, SPAWN_PINNED, SpawnRequest};
use sempa_proto::{HostId, Message, Micros, PvmError, Tid};
use std::time::Duration;
use thiserror::Error;

/// Tag of entries of the event log.
pub const TAG_EVENT: i32 = 1;
/// Tag of notifications that a load watcher has ended.
pub const TAG_TASK_EXIT: i32 = 2;
/// Tag of notifications that hosts have joined.
pub const TAG_HOST_ADD: i32 = 3;
/// Tag of notifications that a host has left.
pub const TAG_HOST_DELETE: i32 = 4;
/// Tag of reports from load watchers.
pub const TAG_LOAD: i32 = 5;

/// Tag of a message with the content of the policy file. The thread that follows the file sends it
/// when the file has changed.
pub const TAG_POLICY: i32 = 6;

/// Maximum time between two checks of the deadlines.
const DEADLINE_CHECK_INTERVAL: Micros = Micros::from_secs(5);
/// Maximum number of task reports that are processed before decisions are made.
const REPORT_BATCH_MAX: usize = 64;
/// Minimum interval between two requests for lists of hosts and tasks.
const REFRESH_INTERVAL: Micros = Micros::from_secs(1);
/// Interval between two rebalancing decisions.
pub const REBALANCE_INTERVAL: Micros = Micros::from_secs(10);
/// Delay of a rebalancing decision after the end of a task, which may make a processor idle. One
/// decision follows for all tasks that end within this delay.
pub const REBALANCE_DELAY_AFTER_EXIT: Micros = Micros::from_secs(1);
const SIGKILL: i32 = 9;

/// Configuration of the resource manager.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Policy in force: that of the command line, until a policy file is applied.
    pub policy: EffectivePolicy,
    /// Policy of the command line without settings from a policy file. Each content of the policy
    /// file is applied to it.
    pub command_line_policy: EffectivePolicy,
    /// Name of the policy file, for messages.
    pub policy_file: String,
    /// Content of the policy file at the start, or the reason why it cannot be read. `None` if
    /// there is no policy file. It takes precedence over `policy`.
    pub policy_content: Option<Result<Vec<u8>, String>>,
    /// True if a load watcher is started on every host.
    pub watchers: bool,
    pub labels: Labels,
    /// Available external choosers; pvm-rm itself contains none.
    pub choosers: Choosers,
    /// Database of the history; `None` if the history is not stored.
    pub store_location: Option<StoreLocation>,
    /// User to whom tasks belong if their user is not known: the user of the resource manager.
    pub user: u32,
}

/// Why the service did not start, or why it ended.
#[derive(Debug, Error)]
pub enum ServiceError {
    /// Another resource manager is registered, with this tid.
    #[error(
        "resource manager {0} is registered already, and a virtual machine has only one: end it first ('kill {0}' at \
         the console)"
    )]
    AlreadyRegistered(Tid),
    /// The policy names a chooser that does not exist.
    #[error(transparent)]
    UnknownChooser(#[from] UnknownChooser),
    /// The policy file is invalid, and no earlier content is stored.
    #[error(transparent)]
    InvalidPolicy(#[from] PolicyError),
    /// The policy file cannot be read, and no earlier content is stored.
    #[error(
        "{file:?} is neither 'load' nor 'round-robin', and as a policy file it cannot be read: {why}"
    )]
    UnreadablePolicy {
        /// The command-line argument that was interpreted as the file's name.
        file: String,
        why: String,
    },
    /// The daemon refused the registration.
    #[error("registering as resource manager: {0}")]
    Refused(Error),
    /// The resource manager with this tid has taken over.
    #[error("resource manager {0} has taken over; this one exits")]
    Replaced(Tid),
    /// The daemon is gone.
    #[error("the virtual machine has stopped: {0}")]
    Stopped(Error),
}

/// A running resource manager.
#[derive(Debug)]
pub struct Service<V> {
    vm: V,
    options: Options,
    model: Model,
    spawns: Spawns,
    grants: Grants,
    watchers: Watchers,
    /// True if something that evictions depend on has changed since the last decision.
    needs_decision: bool,
    /// Time of the next eviction decision if nothing changes before.
    decide_at: Option<Micros>,
    /// Time of the next rebalancing decision; `None` if the policy does not rebalance.
    rebalance_at: Option<Micros>,
    /// Earliest time of the next request for the lists of hosts and tasks.
    refresh_at: Micros,
    hosts_changed: bool,
    history: HistoryState,
    suspensions: suspend::SuspensionState,
    drain_deadlines: drain::DrainDeadlines,
    job_kills: kill::JobKills,
    vacating: vacate::VacateState,
    recorder: Option<Recorder>,
}

/// True for a load watcher that an earlier resource manager started and that can be asked to report
/// to this one.
fn is_orphaned_watcher(task: &TaskInfo) -> bool {
    let serving = TASK_FORKED | TASK_CONNECTED;
    is_load_watcher(&task.name) && task.flags & serving == serving && !task.parent.is_task()
}

/// True for messages in which daemons report about tasks. Requests are not among them.
fn is_task_report(message: &Message) -> bool {
    let tag = message.tag;
    message.src.is_daemon()
        && if message.ctx == CTX_RM {
            tag == TAG_EVENT
        } else {
            tag == SM_PLACEMENT_LEASE_USED
        }
}

fn first_int(message: &Message) -> Option<i32> {
    Unpacker::xdr(message.body.clone()).int().ok()
}

impl<V: VmApi> Service<V> {
    /// Registers, lists hosts and tasks, and starts the load watchers.
    ///
    /// # Errors
    /// [`ServiceError::AlreadyRegistered`] if another resource manager is alive; it stays
    /// registered. [`ServiceError::UnknownChooser`] if the policy names an unknown chooser.
    /// [`ServiceError::InvalidPolicy`] or [`ServiceError::UnreadablePolicy`] if the policy file is
    /// invalid and was never in force.
    pub fn start(vm: V, mut options: Options) -> Result<Service<V>, ServiceError> {
        let known = vm.tasks().map_err(ServiceError::Refused)?;
        let is_rm = |t: &&TaskInfo| t.flags & TASK_RM != 0 && t.tid != vm.tid();
        if let Some(other_rm) = known.iter().find(is_rm) {
            return Err(ServiceError::AlreadyRegistered(other_rm.tid));
        }
        // A registered resource manager must answer requests immediately, but opening the history
        // may be slow. So the history is opened before the registration.
        let (mut ledger, mut notes) =
            HistoryWriter::open(options.store_location.as_ref(), options.user, vm.tid());
        notes.extend(options.apply_policy_at_start(&mut ledger.history)?);
        let previous = vm.register().map_err(ServiceError::Refused)?;
        if previous.is_task() && previous != vm.tid() && known.iter().any(|t| t.tid == previous) {
            // The other resource manager registered after this one had asked for it and before this
            // one registered. The other one stays.
            let mut body = Packer::new(Encoding::Xdr);
            body.int(previous.raw());
            vm.send(Tid::MY_DAEMON, SM_HANDOFF, 0, body.finish())
                .map_err(ServiceError::Stopped)?;
            return Err(ServiceError::AlreadyRegistered(previous));
        }
        vm.subscribe(CTX_RM, TAG_EVENT)
            .map_err(ServiceError::Refused)?;
        vm.notify(NotifySubjects::HostAdd { count: -1 }, CTX_RM, TAG_HOST_ADD)
            .map_err(ServiceError::Refused)?;
        let conduct = options.policy;
        let (mut model, refresh_at) = (
            Model::new(conduct.placing, vm.host(), options.labels.clone()),
            vm.now(),
        );
        model.set_default_user(options.user);
        let mut service = Service {
            vm,
            spawns: Spawns::new(conduct.rules),
            grants: Grants::default(),
            options,
            model,
            watchers: Watchers::default(),
            needs_decision: true,
            decide_at: None,
            rebalance_at: None,
            refresh_at,
            hosts_changed: false,
            history: HistoryState::new(ledger),
            suspensions: suspend::SuspensionState::default(),
            drain_deadlines: drain::DrainDeadlines::default(),
            job_kills: kill::JobKills::default(),
            vacating: vacate::VacateState::default(),
            recorder: None,
        };
        notes.into_iter().for_each(|text| service.log_note(text));
        service.apply_policy(conduct);
        service.sync_history().map_err(ServiceError::Refused)?;
        service.refresh().map_err(ServiceError::Refused)?;
        service.restore_state();
        service.restore_suspensions();
        service.restore_drains();
        known
            .iter()
            .filter(|task| is_orphaned_watcher(task))
            .for_each(|task| {
                service
                    .watchers
                    .adopt(service.vm.now(), task.host, task.tid);
            });
        service.act();
        Ok(service)
    }

    /// Runs until the virtual machine stops.
    ///
    /// # Errors
    /// Always returns an error: why the service ended.
    pub fn run(&mut self) -> Result<std::convert::Infallible, ServiceError> {
        loop {
            self.step()?;
        }
    }

    /// Waits for one message, for a batch of task reports, or for the next deadline, and acts on
    /// it.
    ///
    /// # Errors
    /// [`ServiceError::Stopped`] or [`ServiceError::Replaced`].
    pub fn step(&mut self) -> Result<(), ServiceError> {
        let now = self.vm.now();
        let (spawns, watchers) = (self.spawns.next_deadline(), self.watchers.next_deadline());
        let (drains, ledger) = (
            self.drain_deadlines.next_deadline(),
            self.history.writer.next_deadline(),
        );
        let (kills, review) = (self.job_kills.next_deadline(), self.grants.next_review());
        let due = [
            self.decide_at,
            self.rebalance_at,
            self.preemption_due(),
            self.vacated_check_due(),
            spawns,
            watchers,
            drains,
            ledger,
            kills,
            review,
        ];
        let due = due.into_iter().flatten().min();
        let wait = due
            .map_or(DEADLINE_CHECK_INTERVAL, |due| due.since(now))
            .min(DEADLINE_CHECK_INTERVAL);
        let received = self
            .vm
            .recv(Duration::from_micros(wait.0))
            .inspect_err(|_| self.history.writer.close());
        let mut received = received.map_err(ServiceError::Stopped)?;
        let mut room = REPORT_BATCH_MAX;
        while let Some(message) = received.take() {
            self.handle_message(&message)
                .inspect_err(|_| self.history.writer.close())?;
            room -= 1;
            // Daemons send task reports in batches; decisions follow once from the whole batch.
            if room > 0 && is_task_report(&message) {
                let more = self
                    .vm
                    .recv(Duration::ZERO)
                    .inspect_err(|_| self.history.writer.close());
                received = more.map_err(ServiceError::Stopped)?;
            }
        }
        self.act();
        Ok(())
    }

    /// Returns the known state, for tests and inspection.
    pub fn model(&self) -> &Model {
        &self.model
    }

    fn handle_message(&mut self, message: &Message) -> Result<(), ServiceError> {
        if message.ctx == CTX_RM {
            return match message.tag {
                TAG_LOAD => {
                    self.handle_load_report(message);
                    Ok(())
                }
                TAG_POLICY if message.src == self.vm.tid() => {
                    self.policy_changed(&message.body);
                    Ok(())
                }
                TAG_QUERY => {
                    self.answer_question(message);
                    Ok(())
                }
                _ if message.src.is_daemon() => self.handle_daemon_message(message),
                _ => Ok(()),
            };
        }
        if message.ctx != CTX_BASE {
            return Ok(());
        }
        match message.tag {
            SM_SPAWN => self.handle_spawn(message),
            SM_SCHED => self.refuse(message, PvmError::Denied),
            // Daemons serve these requests. A task that sends one to the resource manager gets an
            // error, so that it does not wait forever.
            SM_CONFIG | SM_TASK | SM_ADDHOST | SM_DELHOST => {
                self.refuse(message, PvmError::NotImpl)
            }
            SM_EXECACK if message.src.is_daemon() => self.handle_acknowledgement(message),
            SM_PLACEMENT_LEASE_USED if message.src.is_daemon() => self.handle_grant_use(message),
            SM_HOSTX if message.src.is_daemon() => {
                if let Some(host) =
                    first_int(message).and_then(|raw| Tid::from_raw(raw).birth_host())
                {
                    self.host_gone(host);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn handle_daemon_message(&mut self, message: &Message) -> Result<(), ServiceError> {
        match message.tag {
            TAG_EVENT => return self.handle_event(message),
            TAG_TASK_EXIT => {
                if let Some(raw) = first_int(message) {
                    self.task_ended(Tid::from_raw(raw));
                }
            }
            TAG_HOST_ADD => self.hosts_changed = true,
            TAG_HOST_DELETE => {
                if let Some(host) =
                    first_int(message).and_then(|raw| Tid::from_raw(raw).birth_host())
                {
                    self.host_gone(host);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn handle_event(&mut self, message: &Message) -> Result<(), ServiceError> {
        let Some(event) = self.vm.event_of(message) else {
            return Ok(());
        };
        let now = self.vm.now();
        let shares_change = matches!(
            event.kind,
            EventKind::TaskStarted { .. }
                | EventKind::TaskEnded { .. }
                | EventKind::Migrated { .. }
        );
        if self.rebalance_at.is_some() && shares_change {
            self.model.account_if_due(now);
        }
        match &event.kind {
            EventKind::RmRegistered { tid } if *tid != self.vm.tid() => {
                return Err(ServiceError::Replaced(*tid));
            }
            EventKind::HostAdded { host, .. } if !self.model.has_host(*host) => {
                self.hosts_changed = true
            }
            EventKind::HostGone { host, .. } => self.host_gone(*host),
            EventKind::TaskEnded { tid, used, .. } => {
                self.record_input(|| RecordedInput::Ended {
                    tid: *tid,
                    used: *used,
                });
                self.watchers.task_ended(now, *tid);
                self.spawns.task_ended(now, *tid);
                self.grants.close_for_task(*tid);
                if self.model.is_guest(*tid) {
                    self.rebalance_at = self
                        .rebalance_at
                        .map(|at| at.min(now + REBALANCE_DELAY_AFTER_EXIT));
                }
            }
            _ => {}
        }
        self.model.apply_event(now, &event);
        match &event.kind {
            EventKind::TaskStarted { tid, .. } => {
                self.suspensions.task_started();
                self.job_kills
                    .task_started(now, self.model.user_and_job(*tid).1);
            }
            EventKind::Suspended { tid, .. } => self.suspension_changed(*tid, true),
            EventKind::Resumed { tid, .. } => self.suspension_changed(*tid, false),
            EventKind::Migrated { tid, .. } => self.reapply_suspension(*tid),
            _ => {}
        }
        self.handle_vacate_event(&event.kind);
        self.record_in_history(&event);
        self.needs_decision = true;
        Ok(())
    }

    fn handle_spawn(&mut self, message: &Message) {
        match unpack_spawn(message.body.clone()) {
            Ok((request, since)) => {
                self.grants.close_for_task(message.src);
                let caller = self.model.host_of(message.src).unwrap_or(self.vm.host());
                let (user, job) = self.model.user_and_job(message.src);
                let waited = since.map_or(Micros(0), |since| self.vm.wall_clock().since(since));
                let from = SpawnIncoming {
                    requester: message.src,
                    wid: message.wid,
                    caller,
                    user,
                    job,
                    request,
                    waited,
                };
                if self.job_kills.is_being_killed(job, message.src) {
                    let why = format!("job {job}, which it belongs to, is being ended");
                    return self
                        .spawns
                        .refuse_and_log(self.vm.now(), &from, PvmError::Denied, why);
                }
                self.record_input(|| RecordedInput::Spawn {
                    number: (from.requester, from.wid),
                    caller,
                    user,
                    job,
                    request: from.request.clone(),
                });
                self.spawns.accept(self.vm.now(), from);
            }
            Err(error) => self.spawns.refuse(message.src, message.wid, error),
        }
    }

    fn refuse(&mut self, message: &Message, error: PvmError) {
        let mut body = Packer::new(Encoding::Xdr);
        body.int(error.code());
        self.send(message.src, message.tag, message.wid, body.finish());
    }

    fn handle_acknowledgement(&mut self, message: &Message) {
        let started = unpack_tids(message.body.clone());
        let now = self.vm.now();
        if let Some(watcher) = self.watchers.order_acknowledged(now, message.wid, &started) {
            if let Some((host, tid)) = watcher {
                self.model.task_started(now, tid, host, true);
            }
        } else if !self
            .spawns
            .order_acknowledged(now, message.wid, started.clone())
        {
            // The sender is a process that joined without a spawn.
            let host = message.src.birth_host().unwrap_or(self.vm.host());
            for tid in started.into_iter().flatten().flatten() {
                self.model.task_started(now, tid, host, true);
            }
        }
        self.needs_decision = true;
    }

    fn handle_load_report(&mut self, message: &Message) {
        let Ok(report) = from_bytes::<LoadReport>(&message.body) else {
            return;
        };
        let now = self.vm.now();
        if !self.watchers.report_received(now, message.src, report.host) {
            return;
        }
        let own = self.model.guests_on(report.host);
        self.record_input(|| RecordedInput::Report {
            report: report.clone(),
            own,
        });
        self.model.task_started(now, message.src, report.host, true);
        if let Some(event) = self.model.apply_report(now, &report) {
            self.log_event(event);
            self.needs_decision = true;
        }
    }

    fn task_ended(&mut self, tid: Tid) {
        self.watchers.task_ended(self.vm.now(), tid);
        self.spawns.task_ended(self.vm.now(), tid);
        self.grants.close_for_task(tid);
        self.model.task_ended(tid);
        self.needs_decision = true;
    }

    fn host_gone(&mut self, host: HostId) {
        self.model.host_gone(host);
        self.watchers.remove(host);
        self.spawns.host_gone(host);
        self.drop_unknown_tasks();
        self.needs_decision = true;
    }

    fn drop_unknown_tasks(&mut self) {
        let Service {
            model,
            spawns,
            grants,
            vm,
            ..
        } = self;
        spawns.forget_tasks(vm.now(), |tid| model.has_task(tid));
        grants.close_unknown(|tid| model.has_task(tid));
    }

    /// Requests new lists of hosts and tasks.
    fn refresh(&mut self) -> Result<(), Error> {
        self.refresh_at = self.vm.now() + REFRESH_INTERVAL;
        self.refresh_hosts()?;
        let tasks = self.vm.tasks()?;
        self.model.set_tasks(self.vm.now(), &tasks);
        self.drop_unknown_tasks();
        self.needs_decision = true;
        Ok(())
    }

    fn refresh_hosts(&mut self) -> Result<(), Error> {
        self.hosts_changed = false;
        let table = self.vm.host_table()?;
        self.record_input(|| RecordedInput::Hosts(table.clone()));
        let before = self.model.host_ids();
        self.history
            .writer
            .history
            .set_host_names(table.hosts.iter().map(|host| (host.id, host.name.as_str())));
        let new = self.model.set_hosts(&table);
        for gone in before.into_iter().filter(|id| table.get(*id).is_none()) {
            self.host_gone(gone);
        }
        for host in &new {
            self.vm.notify(
                NotifySubjects::HostDelete(vec![host.tid()]),
                CTX_RM,
                TAG_HOST_DELETE,
            )?;
            if self.options.watchers {
                self.watchers.add(self.vm.now(), *host);
            }
        }
        self.needs_decision = true;
        Ok(())
    }

    /// Makes and carries out all decisions that are due.
    fn act(&mut self) {
        let now = self.vm.now();
        let mut changed = self.needs_decision;
        self.model.set_starting_tasks(self.spawns.starting_tasks());
        // Decisions because of owners come first.
        if self.needs_decision || self.decide_at.is_some_and(|at| at <= now) {
            self.decide_evictions();
        }
        if self.hosts_changed || (self.model.is_stale(now) && self.refresh_at <= now) {
            changed = true;
            let fresh = if self.hosts_changed {
                self.refresh_hosts()
            } else {
                self.refresh()
            };
            if let Err(error) = fresh {
                self.log_note(format!(
                    "the resource manager could not list hosts and tasks: {error}"
                ));
            }
            self.decide_evictions();
        }
        if self.rebalance_at.is_some_and(|at| at <= now) {
            self.rebalance(now);
        }
        let share_due = self.preemption_due().is_some_and(|at| at <= now);
        // Rebalancing also checks at an interval, because external load changes without an event.
        if changed || share_due {
            self.spawns.retry_waiting(now);
        }
        self.spawns.tick(now);
        self.place_spawns(now);
        self.suspend_new_tasks();
        // A request that has just begun to wait benefits from preempted tasks immediately.
        if self.preemption_due().is_some_and(|at| at <= now) && self.preempt_and_resume(now) {
            self.spawns.retry_waiting(now);
            self.place_spawns(now);
        }
        self.report_overdue_drains(now);
        self.send_due_signals(now);
        self.restart_vacated(now);
        self.record_outcomes();
        self.review_grants(now);
        self.watchers.tick(now);
        while let Some(output) = self.watchers.poll() {
            self.handle_watcher_output(output);
        }
        self.write_history(now);
    }

    /// Places the pending spawns and sends their orders.
    fn place_spawns(&mut self, now: Micros) {
        loop {
            while let Some(output) = self.spawns.poll() {
                self.handle_spawn_output(output);
            }
            if !self.spawns.has_unplaced() {
                break;
            }
            // Tasks that were just placed do not run yet, but they occupy their hosts.
            self.model.set_starting_tasks(self.spawns.starting_tasks());
            let snapshot = self.model.snapshot(now);
            // A policy with an unknown chooser is never applied, so the lookup does not fail.
            let choice = self
                .options
                .choosers
                .for_policy(snapshot.policy)
                .unwrap_or_default();
            let rotation = self.spawns.place_next(now, snapshot, choice);
            self.model.set_round_robin_last(rotation);
        }
    }

    fn decide_evictions(&mut self) {
        self.needs_decision = false;
        let now = self.vm.now();
        let snapshot = self.model.snapshot(now);
        let decided = plan_evictions(snapshot);
        self.decide_at = decided.retry_at();
        for step in &decided.evictions {
            if !self.start_migration(
                now,
                step.tid,
                (step.from, step.to),
                step.cause.clone(),
                None,
            ) {
                // Decide again immediately with the updated model: it excludes the failed target,
                // or the task.
                self.decide_at = Some(now);
            }
        }
        for stay in self.model.unreported_stays(&decided) {
            let snapshot = self.model.snapshot(now);
            let (text, decision) = (
                stay.sentence(snapshot),
                decision_records::stay_decision(stay, snapshot),
            );
            self.log_note(text);
            self.history
                .writer
                .history
                .record_decision(self.vm.wall_clock(), decision);
        }
        self.vacate_jobs(now, &decided);
        for host in self.model.newly_clean_hosts() {
            self.log_event(EventKind::HostVacated { host });
        }
    }

    /// Migrates tasks to hosts where they finish sooner.
    fn rebalance(&mut self, now: Micros) {
        self.rebalance_at = Some(now + REBALANCE_INTERVAL);
        self.model.account_work(now);
        for shift in plan_rebalances(self.model.snapshot(now)) {
            let cause = MigrationCause::Load {
                why: shift.reason.to_string(),
            };
            if self.start_migration(
                now,
                shift.tid,
                (shift.from, shift.to),
                cause,
                Some(decision_records::predicted_gain(&shift)),
            ) {
                self.model.follow_rebalance(&shift);
            }
        }
    }

    fn handle_spawn_output(&mut self, output: spawns::SpawnOutput) {
        match output {
            spawns::SpawnOutput::StartTasks {
                order,
                host,
                parent,
                request,
                memory,
            } => {
                if memory > 0 {
                    self.model.promise_memory(self.vm.now(), host, memory);
                }
                let wid = self.vm.start_tasks(host, parent, &request).ok();
                self.spawns.order_sent(order, wid);
            }
            spawns::SpawnOutput::NotifyWait { to, wid, waited } => {
                if waited.is_some() {
                    self.suspensions.request_waits();
                }
                let since =
                    waited.map(|waited| Micros(self.vm.wall_clock().0.saturating_sub(waited.0)));
                self.send(to, SM_SPAWN_WAITS, wid, pack_spawn_waits(since));
            }
            spawns::SpawnOutput::Reply { to, wid, body } => {
                self.record_input(|| {
                    let tids = unpack_tids(body.clone())
                        .into_iter()
                        .flatten()
                        .flatten()
                        .collect();
                    RecordedInput::Started {
                        number: (to, wid),
                        tids,
                    }
                });
                self.send(to, SM_SPAWN, wid, body);
            }
            spawns::SpawnOutput::FullyAnswered(from) => self.consider_grant(&from),
            spawns::SpawnOutput::Started {
                tid,
                host,
                host_named: named,
                pinned,
                constraints: wants,
                by,
                child,
            } => {
                let now = self.vm.now();
                self.model.task_started(now, tid, host, pinned);
                if child {
                    self.model.set_task_job(tid, by.1);
                }
                self.model.set_task_constraints(tid, named, wants);
                // The task may have ended before its start was reported.
                if !pinned && self.model.has_task(tid) {
                    self.spawns.task_started(now, tid, by);
                    self.history.writer.history.mark_counted(tid);
                }
                self.suspensions.task_started();
                self.needs_decision = true;
            }
            // The signal fails if the task has ended already. Then nothing must be done.
            spawns::SpawnOutput::Terminate { tid } => drop(self.vm.signal(tid, SIGKILL)),
            spawns::SpawnOutput::LogEvent(event) => self.log_event(event),
            spawns::SpawnOutput::RecordDecision(what) => self
                .history
                .writer
                .history
                .record_decision(self.vm.wall_clock(), what),
        }
    }

    fn handle_watcher_output(&mut self, output: watchers::WatcherOutput) {
        match output {
            watchers::WatcherOutput::Start(host) => {
                let wid = self
                    .vm
                    .start_tasks(host, self.vm.tid(), &self.watcher_request())
                    .ok();
                self.watchers.order_sent(self.vm.now(), host, wid);
            }
            watchers::WatcherOutput::Notify(tid) => {
                // If this fails, the event log still reports the watcher's end.
                drop(
                    self.vm
                        .notify(NotifySubjects::TaskExit(vec![tid]), CTX_RM, TAG_TASK_EXIT),
                );
            }
            watchers::WatcherOutput::Adopt(tid) => {
                drop(self.vm.send_rm(tid, TAG_REPORT_TO, 0, Bytes::new()))
            }
            watchers::WatcherOutput::Terminate(tid) => drop(self.vm.signal(tid, SIGKILL)),
            watchers::WatcherOutput::Note(text) => self.log_note(text),
        }
    }

    fn watcher_request(&self) -> SpawnRequest {
        let words = [
            "--report-to",
            &self.vm.tid().to_string(),
            "--ctx",
            &CTX_RM.to_string(),
            "--tag",
            &TAG_LOAD.to_string(),
        ];
        SpawnRequest {
            file: LOAD_WATCHER_PROGRAM.to_string(),
            args: words.iter().map(|word| word.as_bytes().to_vec()).collect(),
            flags: SPAWN_PINNED | SPAWN_NO_PARENT | SPAWN_HOST,
            count: 1,
            ..SpawnRequest::default()
        }
    }

    /// Sends a message. An error is ignored: either the receiver is gone, or the daemon is gone and
    /// the next receive reports that.
    fn send(&mut self, to: Tid, tag: i32, wid: i32, body: Bytes) {
        drop(self.vm.send(to, tag, wid, body));
    }

    fn log_note(&mut self, text: String) {
        self.log_event(EventKind::Note { text });
    }

    fn log_event(&mut self, kind: EventKind) {
        drop(self.vm.record_event(self.vm.wall_clock(), kind));
    }
}
