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

pub use kill::{JOB_KILLS_MAX, TERM_TIMEOUT};
pub use vacate::VACATED_RESERVATION_DELAY;

use crate::api::VmApi;
use crate::decide::{Choosers, UnknownChooser, plan_evictions, plan_rebalances};
use crate::grants::Grants;
use crate::model::{HostLabels, Model};
use crate::policy::{EffectivePolicy, PolicyError};
use crate::recording::{RecordedInput, Recorder};
use crate::spawns::{self, IncomingSpawn, Spawns};
use crate::store::{HistoryWriter, StoreLocation, decision_records};
use crate::watchers::{self, Watchers};
use bytes::Bytes;
use history::HistoryState;
use libpvm::Error;
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::event::EventKind;
use sempa_proto::frame::from_bytes;
use sempa_proto::load::{LOAD_WATCHER_PROGRAM, LoadReport, TAG_REPORT_ADDRESS, is_load_watcher};
use sempa_proto::message::CTX_BASE;
use sempa_proto::migration::MigrationCause;
use sempa_proto::rm::{CTX_RM, TAG_PING, TAG_QUERY};
use sempa_proto::sm::{
    SM_ADDHOST, SM_ALIVE, SM_CONFIG, SM_DELHOST, SM_EXECACK, SM_HANDOFF, SM_HOSTX,
    SM_PLACEMENT_LEASE_USED, SM_SCHED, SM_SPAWN, SM_SPAWN_WAITS, SM_TASK, pack_spawn_waits,
    unpack_spawn, unpack_tids,
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
/// Tag of notifications that a host is no longer in the virtual machine.
pub const TAG_HOST_DELETE: i32 = 4;
/// Tag of reports from load watchers.
pub const TAG_LOAD_REPORT: i32 = 5;

/// Tag of a message with the content of the policy file. The thread that watches the file sends the
/// message when the file has changed.
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
    /// Policy in force. At first this is the policy of the command line, until a policy file is
    /// applied.
    pub policy: EffectivePolicy,
    /// Policy of the command line without settings from a policy file. The settings of the policy
    /// file are applied to this policy, not to the policy in force.
    pub command_line_policy: EffectivePolicy,
    /// Name of the policy file, for messages; empty without a policy file.
    pub policy_file: String,
    /// Content of the policy file at the start, or the reason why the file cannot be read; `None`
    /// if there is no policy file. The content takes precedence over `policy`.
    pub policy_content: Option<Result<Vec<u8>, String>>,
    /// True if a load watcher is started on every host.
    pub starts_watchers: bool,
    pub labels: HostLabels,
    /// Available external choosers; pvm-rm itself contains none.
    pub choosers: Choosers,
    /// Database of the history; `None` if the history is not stored.
    pub store_location: Option<StoreLocation>,
    /// User to whom tasks belong if their user is not known: the user of the resource manager.
    pub default_user: u32,
}

/// Reason why the service did not start, or why it ended.
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
    /// True if something on which evictions depend has changed since the last decision.
    needs_eviction_decision: bool,
    /// Time of the next eviction decision if nothing changes earlier; `None` if no timer is needed.
    eviction_decision_at: Option<Micros>,
    /// Time of the next rebalancing decision; `None` if the policy does not rebalance.
    rebalance_at: Option<Micros>,
    /// Earliest time of the next request for the lists of hosts and tasks.
    next_refresh_at: Micros,
    hosts_changed: bool,
    history: HistoryState,
    suspensions: suspend::SuspensionState,
    drain_deadlines: drain::DrainDeadlines,
    job_kills: kill::JobKills,
    vacate_state: vacate::VacateState,
    recorder: Option<Recorder>,
}

/// True for a load watcher that a daemon or an earlier resource manager has started, and that can
/// be requested to report to this resource manager.
fn is_running_watcher(task: &TaskInfo) -> bool {
    let required_flags = TASK_FORKED | TASK_CONNECTED;
    is_load_watcher(&task.name)
        && task.flags & required_flags == required_flags
        && !task.parent.is_task()
}

/// True for messages in which daemons report about tasks; false for requests.
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
    Unpacker::new_xdr(message.body.clone()).read_int().ok()
}

impl<V: VmApi> Service<V> {
    /// Registers, lists hosts and tasks, restores the state from the history, and starts the load
    /// watchers.
    ///
    /// # Errors
    ///
    /// [`ServiceError::AlreadyRegistered`] if another resource manager is alive; the other one
    /// stays registered. [`ServiceError::UnknownChooser`] if the policy names an unknown chooser.
    /// [`ServiceError::InvalidPolicy`] or [`ServiceError::UnreadablePolicy`] if the policy file
    /// cannot be applied and no earlier content is stored. [`ServiceError::Refused`] if the daemon
    /// refuses a request, or [`ServiceError::Stopped`] if the daemon is gone.
    pub fn start(vm: V, mut options: Options) -> Result<Self, ServiceError> {
        let listed_tasks = vm.tasks().map_err(ServiceError::Refused)?;
        let is_rm = |t: &&TaskInfo| t.flags & TASK_RM != 0 && t.tid != vm.tid();
        if let Some(other_rm) = listed_tasks.iter().find(is_rm) {
            return Err(ServiceError::AlreadyRegistered(other_rm.tid));
        }
        // A registered resource manager must answer requests immediately, but opening the history
        // may be slow. The history is therefore opened before the registration.
        let (mut history_writer, mut notes) = HistoryWriter::open(
            options.store_location.as_ref(),
            options.default_user,
            vm.tid(),
        );
        notes.extend(options.apply_policy_at_start(&mut history_writer.history)?);
        let previous_rm = vm.register().map_err(ServiceError::Refused)?;
        if previous_rm.is_task()
            && previous_rm != vm.tid()
            && listed_tasks.iter().any(|t| t.tid == previous_rm)
        {
            // Another resource manager registered after this one had listed the tasks and before
            // this one registered. The other resource manager must stay registered.
            let mut body = Packer::new(Encoding::Xdr);
            body.pack_int(previous_rm.raw());
            vm.send(Tid::MY_DAEMON, SM_HANDOFF, 0, body.finish())
                .map_err(ServiceError::Stopped)?;
            return Err(ServiceError::AlreadyRegistered(previous_rm));
        }
        vm.subscribe_events(CTX_RM, TAG_EVENT)
            .map_err(ServiceError::Refused)?;
        vm.request_notification(
            NotifySubjects::HostAdd { messages_max: -1 },
            CTX_RM,
            TAG_HOST_ADD,
        )
        .map_err(ServiceError::Refused)?;
        let start_policy = options.policy;
        let (mut model, refresh_at) = (
            Model::new(start_policy.placement, vm.host(), options.labels.clone()),
            vm.now(),
        );
        model.set_default_user(options.default_user);
        let mut service = Self {
            vm,
            spawns: Spawns::new(start_policy.spawn_rules),
            grants: Grants::default(),
            options,
            model,
            watchers: Watchers::default(),
            needs_eviction_decision: true,
            eviction_decision_at: None,
            rebalance_at: None,
            next_refresh_at: refresh_at,
            hosts_changed: false,
            history: HistoryState::new(history_writer),
            suspensions: suspend::SuspensionState::default(),
            drain_deadlines: drain::DrainDeadlines::default(),
            job_kills: kill::JobKills::default(),
            vacate_state: vacate::VacateState::default(),
            recorder: None,
        };
        notes.into_iter().for_each(|text| service.log_note(text));
        service.apply_policy(start_policy);
        service.sync_history().map_err(ServiceError::Refused)?;
        service.refresh().map_err(ServiceError::Refused)?;
        service.restore_state();
        service.restore_suspensions();
        service.restore_drains();
        // Daemons list their load watchers only while there is a resource manager.
        let watcher_list = service.vm.tasks().map_err(ServiceError::Refused)?;
        let running_watchers = watcher_list.iter().filter(|task| is_running_watcher(task));
        running_watchers.for_each(|task| {
            service
                .watchers
                .adopt_watcher(service.vm.now(), task.host, task.tid);
        });
        service.make_due_decisions();
        Ok(service)
    }

    /// Runs until the virtual machine stops.
    ///
    /// # Errors
    ///
    /// Always returns an error, which states why the service ended.
    pub fn run(&mut self) -> Result<std::convert::Infallible, ServiceError> {
        self.announce_alive();
        loop {
            self.step()?;
        }
    }

    /// Waits for one message, for a batch of task reports, or for the next deadline. Then processes
    /// the messages and makes the decisions that are due.
    ///
    /// # Errors
    ///
    /// [`ServiceError::Stopped`] or [`ServiceError::Replaced`].
    pub fn step(&mut self) -> Result<(), ServiceError> {
        let now = self.vm.now();
        let (spawn_deadline, watcher_deadline) =
            (self.spawns.next_deadline(), self.watchers.next_deadline());
        let (drain_deadline, history_deadline) = (
            self.drain_deadlines.next_deadline(),
            self.history.writer.next_deadline(),
        );
        let (kill_deadline, review_deadline) =
            (self.job_kills.next_deadline(), self.grants.next_review());
        let next_deadline_time = [
            self.eviction_decision_at,
            self.rebalance_at,
            self.preemption_due(),
            self.vacated_check_due(),
            spawn_deadline,
            watcher_deadline,
            drain_deadline,
            history_deadline,
            kill_deadline,
            review_deadline,
        ];
        let next_deadline_time = next_deadline_time.into_iter().flatten().min();
        let wait_time = next_deadline_time
            .map_or(DEADLINE_CHECK_INTERVAL, |next_deadline_time| {
                next_deadline_time.since(now)
            })
            .min(DEADLINE_CHECK_INTERVAL);
        let receive_result = self
            .vm
            .recv(Duration::from_micros(wait_time.0))
            .inspect_err(|_| self.history.writer.close());
        let mut received_message = receive_result.map_err(ServiceError::Stopped)?;
        let mut messages_left = REPORT_BATCH_MAX;
        while let Some(message) = received_message.take() {
            self.handle_message(&message)
                .inspect_err(|_| self.history.writer.close())?;
            messages_left -= 1;
            // Daemons send task reports in batches. Decisions are made once after the whole batch.
            if messages_left > 0 && is_task_report(&message) {
                let receive_result = self
                    .vm
                    .recv(Duration::ZERO)
                    .inspect_err(|_| self.history.writer.close());
                received_message = receive_result.map_err(ServiceError::Stopped)?;
            }
        }
        self.make_due_decisions();
        Ok(())
    }

    /// Returns the known state, for tests and inspection.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Tells the daemon that the resource manager handles messages.
    fn announce_alive(&self) {
        // If this fails, the daemon is gone, which the next receive reports.
        drop(self.vm.send_rm(Tid::MY_DAEMON, SM_ALIVE, 0, Bytes::new()));
    }

    fn handle_message(&mut self, message: &Message) -> Result<(), ServiceError> {
        if message.ctx == CTX_RM {
            return match message.tag {
                TAG_PING if message.src.is_daemon() => {
                    self.announce_alive();
                    Ok(())
                }
                TAG_LOAD_REPORT => {
                    self.handle_load_report(message);
                    Ok(())
                }
                TAG_POLICY if message.src == self.vm.tid() => {
                    self.handle_policy_change(&message.body);
                    Ok(())
                }
                TAG_QUERY => {
                    self.handle_query(message);
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
            SM_SCHED => self.reply_error(message, PvmError::Denied),
            // Daemons serve these requests. A task that sends one of them to the resource manager
            // gets an error, so that the task does not wait forever.
            SM_CONFIG | SM_TASK | SM_ADDHOST | SM_DELHOST => {
                self.reply_error(message, PvmError::NotImpl)
            }
            SM_EXECACK if message.src.is_daemon() => self.handle_acknowledgement(message),
            SM_PLACEMENT_LEASE_USED if message.src.is_daemon() => self.handle_grant_use(message),
            SM_HOSTX if message.src.is_daemon() => {
                if let Some(host) =
                    first_int(message).and_then(|raw| Tid::from_raw(raw).birth_host())
                {
                    self.handle_host_loss(host);
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
                    self.handle_task_end(Tid::from_raw(raw));
                }
            }
            TAG_HOST_ADD => self.hosts_changed = true,
            TAG_HOST_DELETE => {
                if let Some(host) =
                    first_int(message).and_then(|raw| Tid::from_raw(raw).birth_host())
                {
                    self.handle_host_loss(host);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn handle_event(&mut self, message: &Message) -> Result<(), ServiceError> {
        let Some(event) = self.vm.decode_event(message) else {
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
            EventKind::HostGone { host, .. } => self.handle_host_loss(*host),
            EventKind::TaskEnded { tid, used, .. } => {
                self.record_input(|| RecordedInput::TaskEnded {
                    tid: *tid,
                    usage: *used,
                });
                self.watchers.handle_task_end(now, *tid);
                self.spawns.record_task_end(now, *tid);
                self.grants.close_for_task(*tid);
                if self.model.is_guest(*tid) {
                    self.rebalance_at = self
                        .rebalance_at
                        .map(|due_time| due_time.min(now + REBALANCE_DELAY_AFTER_EXIT));
                }
            }
            _ => {}
        }
        self.model.apply_event(now, &event);
        match &event.kind {
            EventKind::TaskStarted { tid, .. } => {
                self.suspensions.request_job_check();
                self.job_kills
                    .handle_task_start(now, self.model.user_and_job(*tid).1);
            }
            EventKind::Suspended { tid, .. } => self.handle_suspension_change(*tid, true),
            EventKind::Resumed { tid, .. } => self.handle_suspension_change(*tid, false),
            EventKind::Migrated { tid, .. } => self.reapply_suspension(*tid),
            _ => {}
        }
        self.handle_vacate_event(&event.kind);
        self.add_to_history(&event);
        self.needs_eviction_decision = true;
        Ok(())
    }

    fn handle_spawn(&mut self, message: &Message) {
        match unpack_spawn(message.body.clone()) {
            Ok((request, first_sent_at)) => {
                self.grants.close_for_task(message.src);
                let caller_host = self.model.host_of(message.src).unwrap_or(self.vm.host());
                let (user, job) = self.model.user_and_job(message.src);
                let earlier_wait = first_sent_at.map_or(Micros(0), |first_sent_at| {
                    self.vm.wall_clock().since(first_sent_at)
                });
                let incoming_spawn = IncomingSpawn {
                    requester: message.src,
                    wait_id: message.wid,
                    caller_host,
                    user,
                    job,
                    request,
                    earlier_wait,
                };
                if self.job_kills.is_being_killed(job, message.src) {
                    let reason = format!("job {job}, which it belongs to, is being ended");
                    return self.spawns.reply_error_and_log(
                        self.vm.now(),
                        &incoming_spawn,
                        PvmError::Denied,
                        reason,
                    );
                }
                self.record_input(|| RecordedInput::Spawn {
                    request_id: (incoming_spawn.requester, incoming_spawn.wait_id),
                    caller_host,
                    user,
                    job,
                    request: incoming_spawn.request.clone(),
                });
                self.spawns.accept_request(self.vm.now(), incoming_spawn);
            }
            Err(error) => self.spawns.reply_error(message.src, message.wid, error),
        }
    }

    fn reply_error(&mut self, message: &Message, error: PvmError) {
        let mut body = Packer::new(Encoding::Xdr);
        body.pack_int(error.code());
        self.send(message.src, message.tag, message.wid, body.finish());
    }

    fn handle_acknowledgement(&mut self, message: &Message) {
        let start_results = unpack_tids(message.body.clone());
        let now = self.vm.now();
        if let Some(started_watcher) =
            self.watchers
                .handle_acknowledgement(now, message.wid, &start_results)
        {
            if let Some((host, tid)) = started_watcher {
                self.model.record_task_start(now, tid, host, true);
            }
        } else if !self
            .spawns
            .handle_acknowledgement(now, message.wid, start_results.clone())
        {
            // A daemon reports a task that has joined without a spawn.
            let host = message.src.birth_host().unwrap_or(self.vm.host());
            for tid in start_results.into_iter().flatten().flatten() {
                self.model.record_task_start(now, tid, host, true);
            }
        }
        self.needs_eviction_decision = true;
    }

    fn handle_load_report(&mut self, message: &Message) {
        let Ok(report) = from_bytes::<LoadReport>(&message.body) else {
            return;
        };
        let now = self.vm.now();
        if !self.watchers.handle_report(now, message.src, report.host) {
            return;
        }
        let computing_count = self.model.computing_task_count(report.host);
        self.record_input(|| RecordedInput::Report {
            report: report.clone(),
            vm_task_count: computing_count,
        });
        self.model
            .record_task_start(now, message.src, report.host, true);
        if let Some(event) = self.model.apply_report(now, &report) {
            self.log_event(event);
            self.needs_eviction_decision = true;
        }
    }

    fn handle_task_end(&mut self, tid: Tid) {
        self.watchers.handle_task_end(self.vm.now(), tid);
        self.spawns.record_task_end(self.vm.now(), tid);
        self.grants.close_for_task(tid);
        self.model.record_task_end(tid);
        self.needs_eviction_decision = true;
    }

    fn handle_host_loss(&mut self, host: HostId) {
        self.model.remove_host(host);
        self.watchers.remove_host(host);
        self.spawns.handle_host_loss(host);
        self.drop_unknown_tasks();
        self.needs_eviction_decision = true;
    }

    fn drop_unknown_tasks(&mut self) {
        let Self {
            model,
            spawns,
            grants,
            vm,
            ..
        } = self;
        spawns.remove_unknown_tasks(vm.now(), |tid| model.has_task(tid));
        grants.close_unknown(|tid| model.has_task(tid));
    }

    /// Requests new lists of hosts and tasks and applies them.
    fn refresh(&mut self) -> Result<(), Error> {
        self.next_refresh_at = self.vm.now() + REFRESH_INTERVAL;
        self.refresh_hosts()?;
        let tasks = self.vm.tasks()?;
        self.model.set_tasks(self.vm.now(), &tasks);
        self.drop_unknown_tasks();
        self.needs_eviction_decision = true;
        Ok(())
    }

    fn refresh_hosts(&mut self) -> Result<(), Error> {
        self.hosts_changed = false;
        let table = self.vm.host_table()?;
        self.record_input(|| RecordedInput::Hosts(table.clone()));
        let previous_ids = self.model.host_ids();
        self.history
            .writer
            .history
            .set_host_names(table.hosts.iter().map(|host| (host.id, host.name.as_str())));
        let new_hosts = self.model.set_hosts(&table);
        for removed_host in previous_ids
            .into_iter()
            .filter(|id| table.get(*id).is_none())
        {
            self.handle_host_loss(removed_host);
        }
        for host in &new_hosts {
            self.vm.request_notification(
                NotifySubjects::HostDelete(vec![host.tid()]),
                CTX_RM,
                TAG_HOST_DELETE,
            )?;
            if self.options.starts_watchers {
                self.watchers.add_host(self.vm.now(), *host);
            }
        }
        self.needs_eviction_decision = true;
        Ok(())
    }

    /// Makes and carries out all decisions that are due.
    fn make_due_decisions(&mut self) {
        let now = self.vm.now();
        let mut has_changed = self.needs_eviction_decision;
        self.model
            .set_starting_task_counts(self.spawns.starting_task_counts());
        // Decisions about owners come before all others.
        if self.needs_eviction_decision
            || self
                .eviction_decision_at
                .is_some_and(|due_time| due_time <= now)
        {
            self.start_evictions();
        }
        if self.hosts_changed || (self.model.is_stale(now) && self.next_refresh_at <= now) {
            has_changed = true;
            let refresh_result = if self.hosts_changed {
                self.refresh_hosts()
            } else {
                self.refresh()
            };
            if let Err(error) = refresh_result {
                self.log_note(format!(
                    "the resource manager could not list hosts and tasks: {error}"
                ));
            }
            self.start_evictions();
        }
        if self.rebalance_at.is_some_and(|due_time| due_time <= now) {
            self.start_rebalances(now);
        }
        let is_preemption_due = self
            .preemption_due()
            .is_some_and(|due_time| due_time <= now);
        // Waiting requests are also retried at an interval, because external load changes without
        // an event.
        if has_changed || is_preemption_due {
            self.spawns.retry_waiting(now);
        }
        self.spawns.handle_timeouts(now);
        self.place_spawns(now);
        self.suspend_new_tasks();
        // A request that has just begun to wait immediately gets the hosts of preempted tasks.
        if self
            .preemption_due()
            .is_some_and(|due_time| due_time <= now)
            && self.preempt_and_resume(now)
        {
            self.spawns.retry_waiting(now);
            self.place_spawns(now);
        }
        self.report_overdue_drains(now);
        self.send_due_signals(now);
        self.restart_next_vacated(now);
        self.record_rebalance_outcomes();
        self.review_grants(now);
        self.watchers.handle_deadlines(now);
        while let Some(output) = self.watchers.poll() {
            self.handle_watcher_output(output);
        }
        self.write_history_if_due(now);
    }

    /// Places the pending spawns and sends their orders.
    fn place_spawns(&mut self, now: Micros) {
        loop {
            while let Some(output) = self.spawns.poll() {
                self.handle_spawn_output(output);
            }
            if !self.spawns.has_unplaced_requests() {
                break;
            }
            // Tasks that were just placed do not run yet, but they occupy their hosts.
            self.model
                .set_starting_task_counts(self.spawns.starting_task_counts());
            let snapshot = self.model.update_snapshot(now);
            // A policy with an unknown chooser is never applied, so the lookup does not fail.
            let external_chooser = self
                .options
                .choosers
                .for_policy(snapshot.policy)
                .unwrap_or_default();
            let last_host = self
                .spawns
                .place_next_request(now, snapshot, external_chooser);
            self.model.set_round_robin_last(last_host);
        }
    }

    fn start_evictions(&mut self) {
        self.needs_eviction_decision = false;
        let now = self.vm.now();
        let snapshot = self.model.update_snapshot(now);
        let plan = plan_evictions(snapshot);
        self.eviction_decision_at = plan.retry_at();
        for eviction in &plan.evictions {
            if !self.start_migration(
                now,
                eviction.tid,
                (eviction.source, eviction.target),
                eviction.cause.clone(),
                None,
            ) {
                // Decides again immediately. The updated model excludes the failed target or the
                // task.
                self.eviction_decision_at = Some(now);
            }
        }
        for stay in self.model.unreported_stays(&plan) {
            let snapshot = self.model.update_snapshot(now);
            let (text, decision) = (
                stay.describe_stay(snapshot),
                decision_records::stay_decision(stay, snapshot),
            );
            self.log_note(text);
            self.history
                .writer
                .history
                .record_decision(self.vm.wall_clock(), decision);
        }
        self.vacate_jobs(now, &plan);
        for host in self.model.newly_guest_free_hosts() {
            self.log_event(EventKind::HostVacated { host });
        }
    }

    /// Migrates tasks to hosts where they finish sooner, and schedules the next rebalancing
    /// decision.
    fn start_rebalances(&mut self, now: Micros) {
        self.rebalance_at = Some(now + REBALANCE_INTERVAL);
        self.model.account_work(now);
        for planned_rebalance in plan_rebalances(self.model.update_snapshot(now)) {
            let cause = MigrationCause::Load {
                why: planned_rebalance.reason.to_string(),
            };
            if self.start_migration(
                now,
                planned_rebalance.tid,
                (planned_rebalance.source, planned_rebalance.target),
                cause,
                Some(decision_records::predicted_benefit(&planned_rebalance)),
            ) {
                self.model.start_gain_measurement(&planned_rebalance);
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
                memory_bytes: promised_bytes,
            } => {
                if promised_bytes > 0 {
                    self.model
                        .promise_memory(self.vm.now(), host, promised_bytes);
                }
                let wid = self.vm.start_tasks(host, parent, &request).ok();
                self.spawns.record_order_sent(order, wid);
            }
            spawns::SpawnOutput::NotifyWait {
                requester: receiver,
                wid,
                waited: waited_time,
            } => {
                if waited_time.is_some() {
                    self.suspensions.record_waiting_request();
                }
                let waiting_since = waited_time.map(|waited_time| {
                    Micros(self.vm.wall_clock().0.saturating_sub(waited_time.0))
                });
                self.send(
                    receiver,
                    SM_SPAWN_WAITS,
                    wid,
                    pack_spawn_waits(waiting_since),
                );
            }
            spawns::SpawnOutput::Reply {
                requester: receiver,
                wid,
                body,
            } => {
                self.record_input(|| {
                    let tids = unpack_tids(body.clone())
                        .into_iter()
                        .flatten()
                        .flatten()
                        .collect();
                    RecordedInput::SpawnAnswered {
                        request_id: (receiver, wid),
                        tids,
                    }
                });
                self.send(receiver, SM_SPAWN, wid, body);
            }
            spawns::SpawnOutput::ConsiderGrant(incoming) => self.consider_grant(&incoming),
            spawns::SpawnOutput::ReportStarted {
                tid,
                host,
                host_named: names_host,
                pinned,
                constraints: task_constraints,
                user_and_job,
                is_child: has_parent,
            } => {
                let now = self.vm.now();
                self.model.record_task_start(now, tid, host, pinned);
                if has_parent {
                    self.model.set_task_job(tid, user_and_job.1);
                }
                self.model
                    .set_task_constraints(tid, names_host, task_constraints);
                // The task may have ended before its start was reported.
                if !pinned && self.model.has_task(tid) {
                    self.spawns.count_task(now, tid, user_and_job);
                    self.history.writer.history.mark_counted(tid);
                }
                self.suspensions.request_job_check();
                self.needs_eviction_decision = true;
            }
            // The signal fails if the task has already ended. In that case nothing remains to be
            // done.
            spawns::SpawnOutput::Terminate { tid } => drop(self.vm.signal(tid, SIGKILL)),
            spawns::SpawnOutput::LogEvent(event) => self.log_event(event),
            spawns::SpawnOutput::RecordDecision(decision) => self
                .history
                .writer
                .history
                .record_decision(self.vm.wall_clock(), decision),
        }
    }

    fn handle_watcher_output(&mut self, output: watchers::WatcherOutput) {
        match output {
            watchers::WatcherOutput::Start(host) => {
                let wid = self
                    .vm
                    .start_tasks(host, self.vm.tid(), &self.watcher_request())
                    .ok();
                self.watchers.record_order_sent(self.vm.now(), host, wid);
            }
            watchers::WatcherOutput::Notify(tid) => {
                // If the request fails, the event log still reports the watcher's end.
                drop(self.vm.request_notification(
                    NotifySubjects::TaskExit(vec![tid]),
                    CTX_RM,
                    TAG_TASK_EXIT,
                ));
            }
            watchers::WatcherOutput::Adopt(tid) => {
                drop(self.vm.send_rm(tid, TAG_REPORT_ADDRESS, 0, Bytes::new()))
            }
            watchers::WatcherOutput::Terminate(tid) => drop(self.vm.signal(tid, SIGKILL)),
            watchers::WatcherOutput::Note(text) => self.log_note(text),
        }
    }

    fn watcher_request(&self) -> SpawnRequest {
        let arguments = [
            "--report-to",
            &self.vm.tid().to_string(),
            "--ctx",
            &CTX_RM.to_string(),
            "--tag",
            &TAG_LOAD_REPORT.to_string(),
        ];
        SpawnRequest {
            program: LOAD_WATCHER_PROGRAM.to_string(),
            args: arguments
                .iter()
                .map(|argument| argument.as_bytes().to_vec())
                .collect(),
            flags: SPAWN_PINNED | SPAWN_NO_PARENT | SPAWN_HOST,
            task_count: 1,
            ..SpawnRequest::default()
        }
    }

    /// Sends a message. An error is ignored: either the receiver is gone, or the daemon is gone and
    /// the next receive returns an error.
    fn send(&mut self, receiver: Tid, tag: i32, wid: i32, body: Bytes) {
        drop(self.vm.send(receiver, tag, wid, body));
    }

    fn log_note(&mut self, text: String) {
        self.log_event(EventKind::Note { text });
    }

    fn log_event(&mut self, kind: EventKind) {
        drop(self.vm.record_event(self.vm.wall_clock(), kind));
    }
}
