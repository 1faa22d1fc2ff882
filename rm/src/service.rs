//! The loop of the resource manager: receives messages and sends orders. Decisions are made in
//! [`crate::decide`]; the state is in [`crate::model`], [`crate::spawns`] and [`crate::watchers`].

mod drain;
mod grants;
mod kill;
mod memory;
mod park;
mod suspend;
mod terms;

pub use kill::{KILLS_MAX, TERM_TIME};
pub use park::KEEP_AFTER;

use crate::api::VmApi;
use crate::decide::{Choices, NoSuchChoice, balance, moves};
use crate::grants::Grants;
use crate::model::{Labels, Model};
use crate::policy::{Conduct, PolicyError};
use crate::recording::{Input, Recorder};
use crate::spawns::{self, Incoming, Spawns};
use crate::store::{Ledger, Shelf, record};
use crate::watchers::{self, Watchers};
use bytes::Bytes;
use libpvm::Error;
use memory::Memory;
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
/// Tag of load reports.
pub const TAG_LOAD: i32 = 5;

/// Tag of the policy file's content. The own process sends it when the file has changed.
pub const TAG_POLICY: i32 = 6;

/// Maximum time between two checks of the deadlines.
const WAIT_MAX: Micros = Micros::from_secs(5);
/// Maximum number of task reports that are processed before decisions follow.
const NEWS_AT_ONCE: usize = 64;
/// Minimum interval between two requests for lists of hosts and tasks.
const REFRESH_PAUSE: Micros = Micros::from_secs(1);
/// Interval between two rebalancing decisions.
pub const BALANCE_PAUSE: Micros = Micros::from_secs(10);
/// Delay of a rebalancing decision after the end of a task, which may leave a processor idle. Tasks
/// that end within it are handled together.
pub const BALANCE_PAUSE_AFTER_END: Micros = Micros::from_secs(1);
const SIGKILL: i32 = 9;

/// Configuration of the resource manager.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Policy of the command line.
    pub conduct: Conduct,
    /// Policy of the command line, without the policy file's settings.
    pub given: Conduct,
    /// Name of the policy file, for messages.
    pub policy_file: String,
    /// Content of the policy file at the start, or why it cannot be read. It takes precedence over
    /// `conduct`. `None`: there is no file.
    pub policy_read: Option<Result<Vec<u8>, String>>,
    /// Start a load watcher on every host.
    pub watchers: bool,
    pub labels: Labels,
    /// Available external choosers; pvm-rm itself contains none.
    pub choices: Choices,
    /// Where the history is stored; `None`: it is not stored.
    pub shelf: Option<Shelf>,
    /// User of tasks about which nothing else is known: the own user.
    pub user: u32,
}

/// Why the service did not start, or why it ended.
#[derive(Debug, Error)]
pub enum ServiceError {
    /// Another resource manager is registered.
    #[error(
        "resource manager {0} is registered already, and a virtual machine has only one: end it first ('kill {0}' at \
         the console)"
    )]
    AlreadyRegistered(Tid),
    /// The policy names a chooser that does not exist.
    #[error(transparent)]
    Choice(#[from] NoSuchChoice),
    /// The policy file is invalid, and no earlier content is stored.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The policy file cannot be read, and no earlier content is stored.
    #[error(
        "{file:?} is neither 'load' nor 'round-robin', and as a policy file it cannot be read: {why}"
    )]
    NoPolicy {
        /// The argument that was taken for the file's name.
        file: String,
        why: String,
    },
    /// The daemon refused the registration.
    #[error("registering as resource manager: {0}")]
    Refused(Error),
    /// Another resource manager has taken over.
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
    /// Something has changed on which evictions may depend.
    changed: bool,
    /// When to decide about evictions again even if nothing changes.
    again: Option<Micros>,
    /// When the next rebalancing decision is due.
    balance_at: Option<Micros>,
    /// Earliest time for the next request for lists.
    refresh_at: Micros,
    hosts_changed: bool,
    memory: Memory,
    standing: suspend::Standing,
    draining: drain::Draining,
    killing: kill::Killing,
    parking: park::Parking,
    recorder: Option<Recorder>,
}

/// True for a load watcher of an earlier resource manager that can be asked to report here.
fn is_left_watcher(task: &TaskInfo) -> bool {
    let serving = TASK_FORKED | TASK_CONNECTED;
    is_load_watcher(&task.name) && task.flags & serving == serving && !task.parent.is_task()
}

/// True for daemons' reports about tasks, as opposed to requests.
fn is_news(message: &Message) -> bool {
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
    /// registered. [`ServiceError::Choice`] if the policy names an unknown chooser.
    /// [`ServiceError::Policy`] or [`ServiceError::NoPolicy`] if the policy file is invalid and was
    /// never in force.
    pub fn start(vm: V, mut options: Options) -> Result<Service<V>, ServiceError> {
        let known = vm.tasks().map_err(ServiceError::Refused)?;
        let is_rm = |t: &&TaskInfo| t.flags & TASK_RM != 0 && t.tid != vm.tid();
        if let Some(other) = known.iter().find(is_rm) {
            return Err(ServiceError::AlreadyRegistered(other.tid));
        }
        // A registered resource manager must answer requests immediately, and opening the history
        // may take a while.
        let (mut ledger, mut notes) = Ledger::open(options.shelf.as_ref(), options.user, vm.tid());
        notes.extend(options.begin(&mut ledger.books)?);
        let previous = vm.register().map_err(ServiceError::Refused)?;
        if previous.is_task() && previous != vm.tid() && known.iter().any(|t| t.tid == previous) {
            // The other one registered between our query and our registration: it was first.
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
        let conduct = options.conduct;
        let (mut model, refresh_at) = (
            Model::new(conduct.placing, vm.host(), options.labels.clone()),
            vm.now(),
        );
        model.set_user(options.user);
        let mut service = Service {
            vm,
            spawns: Spawns::new(conduct.rules),
            grants: Grants::default(),
            options,
            model,
            watchers: Watchers::default(),
            changed: true,
            again: None,
            balance_at: None,
            refresh_at,
            hosts_changed: false,
            memory: Memory::new(ledger),
            standing: suspend::Standing::default(),
            draining: drain::Draining::default(),
            killing: kill::Killing::default(),
            parking: park::Parking::default(),
            recorder: None,
        };
        notes.into_iter().for_each(|text| service.note(text));
        service.take_up(conduct);
        service.remember().map_err(ServiceError::Refused)?;
        service.refresh().map_err(ServiceError::Refused)?;
        service.recall();
        service.recall_standing();
        service.recall_drains();
        known
            .iter()
            .filter(|task| is_left_watcher(task))
            .for_each(|task| {
                service
                    .watchers
                    .found(service.vm.now(), task.host, task.tid);
            });
        service.settle();
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
            self.draining.next_deadline(),
            self.memory.ledger.next_deadline(),
        );
        let (kills, review) = (self.killing.next_deadline(), self.grants.next_review());
        let due = [
            self.again,
            self.balance_at,
            self.share_due(),
            self.parking_due(),
            spawns,
            watchers,
            drains,
            ledger,
            kills,
            review,
        ];
        let due = due.into_iter().flatten().min();
        let wait = due.map_or(WAIT_MAX, |due| due.since(now)).min(WAIT_MAX);
        let received = self
            .vm
            .recv(Duration::from_micros(wait.0))
            .inspect_err(|_| self.memory.ledger.close());
        let mut received = received.map_err(ServiceError::Stopped)?;
        let mut room = NEWS_AT_ONCE;
        while let Some(message) = received.take() {
            self.message(&message)
                .inspect_err(|_| self.memory.ledger.close())?;
            room -= 1;
            // Daemons send task reports in batches; decisions follow once from the whole batch.
            if room > 0 && is_news(&message) {
                let more = self
                    .vm
                    .recv(Duration::ZERO)
                    .inspect_err(|_| self.memory.ledger.close());
                received = more.map_err(ServiceError::Stopped)?;
            }
        }
        self.settle();
        Ok(())
    }

    /// Returns the known state, for tests and inspection.
    pub fn model(&self) -> &Model {
        &self.model
    }

    fn message(&mut self, message: &Message) -> Result<(), ServiceError> {
        if message.ctx == CTX_RM {
            return match message.tag {
                TAG_LOAD => {
                    self.load_report(message);
                    Ok(())
                }
                TAG_POLICY if message.src == self.vm.tid() => {
                    self.policy_changed(&message.body);
                    Ok(())
                }
                TAG_QUERY => {
                    self.answer(message);
                    Ok(())
                }
                _ if message.src.is_daemon() => self.daemon_message(message),
                _ => Ok(()),
            };
        }
        if message.ctx != CTX_BASE {
            return Ok(());
        }
        match message.tag {
            SM_SPAWN => self.spawn(message),
            SM_SCHED => self.refuse(message, PvmError::Denied),
            // The daemons serve these requests. A task that sends one here must not wait forever.
            SM_CONFIG | SM_TASK | SM_ADDHOST | SM_DELHOST => {
                self.refuse(message, PvmError::NotImpl)
            }
            SM_EXECACK if message.src.is_daemon() => self.acknowledged(message),
            SM_PLACEMENT_LEASE_USED if message.src.is_daemon() => self.taken(message),
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

    fn daemon_message(&mut self, message: &Message) -> Result<(), ServiceError> {
        match message.tag {
            TAG_EVENT => return self.event(message),
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

    fn event(&mut self, message: &Message) -> Result<(), ServiceError> {
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
        if self.balance_at.is_some() && shares_change {
            self.model.account_change(now);
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
                self.record_input(|| Input::Ended {
                    tid: *tid,
                    used: *used,
                });
                self.watchers.ended(now, *tid);
                self.spawns.task_ended(now, *tid);
                self.grants.given_up(*tid);
                if self.model.is_guest(*tid) {
                    self.balance_at = self
                        .balance_at
                        .map(|at| at.min(now + BALANCE_PAUSE_AFTER_END));
                }
            }
            _ => {}
        }
        self.model.event(now, &event);
        match &event.kind {
            EventKind::TaskStarted { tid, .. } => {
                self.standing.task_began();
                self.killing
                    .task_began(now, self.model.user_and_job(*tid).1);
            }
            EventKind::Suspended { tid, .. } => self.suspension_heard(*tid, true),
            EventKind::Resumed { tid, .. } => self.suspension_heard(*tid, false),
            EventKind::Migrated { tid, .. } => self.suspended_has_moved(*tid),
            _ => {}
        }
        self.parking_heard(&event.kind);
        self.note_down(&event);
        self.changed = true;
        Ok(())
    }

    fn spawn(&mut self, message: &Message) {
        match unpack_spawn(message.body.clone()) {
            Ok((request, since)) => {
                self.grants.given_up(message.src);
                let caller = self.model.host_of(message.src).unwrap_or(self.vm.host());
                let (user, job) = self.model.user_and_job(message.src);
                let waited = since.map_or(Micros(0), |since| self.vm.wall().since(since));
                let from = Incoming {
                    src: message.src,
                    wid: message.wid,
                    caller,
                    user,
                    job,
                    request,
                    waited,
                };
                if self.killing.is_ending(job, message.src) {
                    let why = format!("job {job}, which it belongs to, is being ended");
                    return self.spawns.refuse_and_tell(
                        self.vm.now(),
                        &from,
                        PvmError::Denied,
                        why,
                    );
                }
                self.record_input(|| Input::Spawn {
                    number: (from.src, from.wid),
                    caller,
                    user,
                    job,
                    request: from.request.clone(),
                });
                self.spawns.begin(self.vm.now(), from);
            }
            Err(error) => self.spawns.refuse(message.src, message.wid, error),
        }
    }

    fn refuse(&mut self, message: &Message, error: PvmError) {
        let mut body = Packer::new(Encoding::Xdr);
        body.int(error.code());
        self.send(message.src, message.tag, message.wid, body.finish());
    }

    fn acknowledged(&mut self, message: &Message) {
        let started = unpack_tids(message.body.clone());
        let now = self.vm.now();
        if let Some(watcher) = self.watchers.ack(now, message.wid, &started) {
            if let Some((host, tid)) = watcher {
                self.model.task_started(now, tid, host, true);
            }
        } else if !self.spawns.ack(now, message.wid, started.clone()) {
            // A process that joined without a spawn.
            let host = message.src.birth_host().unwrap_or(self.vm.host());
            for tid in started.into_iter().flatten().flatten() {
                self.model.task_started(now, tid, host, true);
            }
        }
        self.changed = true;
    }

    fn load_report(&mut self, message: &Message) {
        let Ok(report) = from_bytes::<LoadReport>(&message.body) else {
            return;
        };
        let now = self.vm.now();
        if !self.watchers.heard(now, message.src, report.host) {
            return;
        }
        let own = self.model.guests_on(report.host);
        self.record_input(|| Input::Report {
            report: report.clone(),
            own,
        });
        self.model.task_started(now, message.src, report.host, true);
        if let Some(event) = self.model.report(now, &report) {
            self.record(event);
            self.changed = true;
        }
    }

    fn task_ended(&mut self, tid: Tid) {
        self.watchers.ended(self.vm.now(), tid);
        self.spawns.task_ended(self.vm.now(), tid);
        self.grants.given_up(tid);
        self.model.task_ended(tid);
        self.changed = true;
    }

    fn host_gone(&mut self, host: HostId) {
        self.model.host_gone(host);
        self.watchers.remove(host);
        self.spawns.host_gone(host);
        self.forget_tasks();
        self.changed = true;
    }

    fn forget_tasks(&mut self) {
        let Service {
            model,
            spawns,
            grants,
            vm,
            ..
        } = self;
        spawns.forget_tasks(vm.now(), |tid| model.knows(tid));
        grants.keep(|tid| model.knows(tid));
    }

    /// Requests fresh lists of hosts and tasks.
    fn refresh(&mut self) -> Result<(), Error> {
        self.refresh_at = self.vm.now() + REFRESH_PAUSE;
        self.refresh_hosts()?;
        let tasks = self.vm.tasks()?;
        self.model.set_tasks(self.vm.now(), &tasks);
        self.forget_tasks();
        self.changed = true;
        Ok(())
    }

    fn refresh_hosts(&mut self) -> Result<(), Error> {
        self.hosts_changed = false;
        let table = self.vm.config()?;
        self.record_input(|| Input::Hosts(table.clone()));
        let before = self.model.host_ids();
        self.memory
            .ledger
            .books
            .know_hosts(table.hosts.iter().map(|host| (host.id, host.name.as_str())));
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
        self.changed = true;
        Ok(())
    }

    /// Makes and carries out all decisions that are due.
    fn settle(&mut self) {
        let now = self.vm.now();
        let mut changed = self.changed;
        self.model.set_starting(self.spawns.starting());
        // Decisions because of owners come first.
        if self.changed || self.again.is_some_and(|at| at <= now) {
            self.decide_moves();
        }
        if self.hosts_changed || (self.model.is_stale(now) && self.refresh_at <= now) {
            changed = true;
            let fresh = if self.hosts_changed {
                self.refresh_hosts()
            } else {
                self.refresh()
            };
            if let Err(error) = fresh {
                self.note(format!(
                    "the resource manager could not list hosts and tasks: {error}"
                ));
            }
            self.decide_moves();
        }
        if self.balance_at.is_some_and(|at| at <= now) {
            self.balance(now);
        }
        let share_due = self.share_due().is_some_and(|at| at <= now);
        // External load changes without an event.
        if changed || share_due {
            self.spawns.try_waiting(now);
        }
        self.spawns.tick(now);
        self.place(now);
        self.keep_suspended();
        // Requests that have just begun to wait profit immediately.
        if self.share_due().is_some_and(|at| at <= now) && self.share(now) {
            self.spawns.try_waiting(now);
            self.place(now);
        }
        self.drains_due(now);
        self.kills_due(now);
        self.start_parked(now);
        self.note_outcomes();
        self.review_grants(now);
        self.watchers.tick(now);
        while let Some(output) = self.watchers.poll() {
            self.watcher_output(output);
        }
        self.write_down(now);
    }

    /// Places the pending spawns and sends their orders.
    fn place(&mut self, now: Micros) {
        loop {
            while let Some(output) = self.spawns.poll() {
                self.spawn_output(output);
            }
            if !self.spawns.wants_place() {
                break;
            }
            // Tasks that were just placed do not run yet, but they occupy their hosts.
            self.model.set_starting(self.spawns.starting());
            let snapshot = self.model.snapshot(now);
            // A policy that names an unknown chooser was not applied.
            let choice = self.options.choices.of(snapshot.policy).unwrap_or_default();
            let rotation = self.spawns.place(now, snapshot, choice);
            self.model.set_rotation(rotation);
        }
    }

    fn decide_moves(&mut self) {
        self.changed = false;
        let now = self.vm.now();
        let snapshot = self.model.snapshot(now);
        let decided = moves(snapshot);
        self.again = decided.again();
        for step in &decided.go {
            if !self.begin_move(
                now,
                step.tid,
                (step.from, step.to),
                step.cause.clone(),
                None,
            ) {
                // The next best target is tried with the updated model. Each failure leaves a
                // target or the task out.
                self.again = Some(now);
            }
        }
        for stay in self.model.news(&decided) {
            let snapshot = self.model.snapshot(now);
            let (text, what) = (stay.sentence(snapshot), record::stays(stay, snapshot));
            self.note(text);
            self.memory.ledger.books.decided(self.vm.wall(), what);
        }
        self.park(now, &decided);
        for host in self.model.newly_clean() {
            self.record(EventKind::HostVacated { host });
        }
    }

    /// Migrates tasks to hosts where they finish sooner.
    fn balance(&mut self, now: Micros) {
        self.balance_at = Some(now + BALANCE_PAUSE);
        self.model.account(now);
        for shift in balance(self.model.snapshot(now)) {
            let cause = MigrationCause::Load {
                why: shift.why.to_string(),
            };
            if self.begin_move(
                now,
                shift.tid,
                (shift.from, shift.to),
                cause,
                Some(record::expected(&shift)),
            ) {
                self.model.promised(&shift);
            }
        }
    }

    fn spawn_output(&mut self, output: spawns::Output) {
        match output {
            spawns::Output::Exec {
                order,
                host,
                parent,
                request,
                memory,
            } => {
                if memory > 0 {
                    self.model.promise_memory(self.vm.now(), host, memory);
                }
                let wid = self.vm.exec(host, parent, &request).ok();
                self.spawns.sent(order, wid);
            }
            spawns::Output::Waits { to, wid, waited } => {
                if waited.is_some() {
                    self.standing.begins_to_wait();
                }
                let since = waited.map(|waited| Micros(self.vm.wall().0.saturating_sub(waited.0)));
                self.send(to, SM_SPAWN_WAITS, wid, pack_spawn_waits(since));
            }
            spawns::Output::Reply { to, wid, body } => {
                self.record_input(|| {
                    let tids = unpack_tids(body.clone())
                        .into_iter()
                        .flatten()
                        .flatten()
                        .collect();
                    Input::Started {
                        number: (to, wid),
                        tids,
                    }
                });
                self.send(to, SM_SPAWN, wid, body);
            }
            spawns::Output::Answered(from) => self.answered(&from),
            spawns::Output::Started {
                tid,
                host,
                named,
                pinned,
                wants,
                by,
                child,
            } => {
                let now = self.vm.now();
                self.model.task_started(now, tid, host, pinned);
                if child {
                    self.model.task_of(tid, by.1);
                }
                self.model.task_wanted(tid, named, wants);
                // The task may have ended before its start was reported.
                if !pinned && self.model.knows(tid) {
                    self.spawns.task_started(now, tid, by);
                    self.memory.ledger.books.counts(tid);
                }
                self.standing.task_began();
                self.changed = true;
            }
            // The task may have ended already; then there is nothing to do.
            spawns::Output::End { tid } => drop(self.vm.signal(tid, SIGKILL)),
            spawns::Output::Record(event) => self.record(event),
            spawns::Output::Decided(what) => self.memory.ledger.books.decided(self.vm.wall(), what),
        }
    }

    fn watcher_output(&mut self, output: watchers::Output) {
        match output {
            watchers::Output::Start(host) => {
                let wid = self
                    .vm
                    .exec(host, self.vm.tid(), &self.watcher_request())
                    .ok();
                self.watchers.sent(self.vm.now(), host, wid);
            }
            watchers::Output::Notify(tid) => {
                // If this fails, the event log still reports the watcher's end.
                drop(
                    self.vm
                        .notify(NotifySubjects::TaskExit(vec![tid]), CTX_RM, TAG_TASK_EXIT),
                );
            }
            watchers::Output::Adopt(tid) => {
                drop(self.vm.answer(tid, TAG_REPORT_TO, 0, Bytes::new()))
            }
            watchers::Output::End(tid) => drop(self.vm.signal(tid, SIGKILL)),
            watchers::Output::Note(text) => self.note(text),
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

    fn note(&mut self, text: String) {
        self.record(EventKind::Note { text });
    }

    fn record(&mut self, kind: EventKind) {
        drop(self.vm.record(self.vm.wall(), kind));
    }
}
