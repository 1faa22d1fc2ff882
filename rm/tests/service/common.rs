//! A fake virtual machine for tests of the resource manager. It records the requests of the
//! resource manager. Its clock advances only when the inbox is empty.

use bytes::Bytes;
use libpvm::{Error, MigrateError};
use pvm_rm::api::VmApi;
use pvm_rm::service::{Options, Service, ServiceError, TAG_EVENT, TAG_LOAD_REPORT};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::load::{GuestLimits, LoadReport, LoadSample, OwnerVerdict};
use sempa_proto::message::{CTX_BASE, DSIG_X86_64, ENC_XDR};
use sempa_proto::migration::{Failure, MigrationCause};
use sempa_proto::owner::{EvictionMode, GuestAccess};
use sempa_proto::rm::CTX_RM;
use sempa_proto::sm::{
    SM_EXECACK, SM_SPAWN, SM_SPAWN_WAITS, pack_spawn, pack_tids, unpack_spawn_waits, unpack_tids,
};
use sempa_proto::suspend;
use sempa_proto::table::{HostEntry, HostTable, TASK_CONNECTED, TASK_FORKED, TaskInfo};
use sempa_proto::task::{MigrationError, NotifySubjects, SpawnRequest};
use sempa_proto::{Epoch, HostId, Message, Micros, MigrationId, PvmError, PvmResult, Tid, frame};
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

pub(crate) fn host_id(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

pub(crate) fn task_id(host: u16, local_number: u32) -> Tid {
    Tid::for_task(host_id(host), local_number).expect("a task")
}

pub(crate) fn rm_tid() -> Tid {
    task_id(1, 1)
}

/// Returns the tid of the task from a command line that sends the spawns of most tests.
pub(crate) fn client_tid() -> Tid {
    task_id(1, 2)
}

#[derive(Clone, Debug)]
pub(crate) struct StartOrder {
    pub(crate) host: HostId,
    pub(crate) parent: Tid,
    pub(crate) request: SpawnRequest,
    pub(crate) wid: i32,
}

#[derive(Default)]
pub(crate) struct FakeVmState {
    now: Micros,
    clock_limit: Micros,
    pub(crate) inbox: VecDeque<Message>,
    pub(crate) host_indices: Vec<u16>,
    pub(crate) tasks: Vec<TaskInfo>,
    pub(crate) previous_rm: Tid,
    /// Number of task lists that the resource manager has requested.
    pub(crate) task_list_count: usize,
    /// Messages in the base context, as (receiver, tag, wait id, body).
    pub(crate) base_messages: Vec<(Tid, i32, i32, Bytes)>,
    /// Messages in the context of the resource manager, as (receiver, tag, wait id, body).
    pub(crate) rm_messages: Vec<(Tid, i32, i32, Bytes)>,
    pub(crate) event_log: Vec<Event>,
    pub(crate) start_orders: Vec<StartOrder>,
    pub(crate) migrations: Vec<(Tid, HostId, MigrationCause)>,
    pub(crate) refused_migrations: HashMap<(Tid, HostId), MigrationError>,
    /// Events that the resource manager has recorded in the event log.
    pub(crate) recorded_events: Vec<EventKind>,
    pub(crate) signalled_tids: Vec<Tid>,
    pub(crate) signals: Vec<(Tid, i32)>,
    pub(crate) refused_signals: HashMap<Tid, PvmError>,
    /// Orders to suspend (true) or resume (false) a task, with their causes.
    pub(crate) suspend_orders: Vec<(Tid, bool, suspend::SuspendCause)>,
    /// Active causes of suspension of each task.
    suspensions: HashMap<Tid, suspend::Suspensions>,
    pub(crate) refused_suspensions: HashMap<Tid, PvmError>,
    pub(crate) exit_watched_tids: Vec<Tid>,
    pub(crate) checkpointed_jobs: Vec<Tid>,
    /// Requested restarts, as (checkpoint, host names).
    pub(crate) restart_requests: Vec<(String, Vec<String>)>,
    /// Limits of all owners, as load watchers report them.
    pub(crate) guest_limits: GuestLimits,
    /// Eviction mode of all owners, as load watchers report it.
    pub(crate) eviction_mode: EvictionMode,
    /// Reason for which the owners' rules exclude guests; `None` if they accept guests.
    pub(crate) closing_reason: Option<String>,
    /// Busy fraction of the processors, and number of runnable threads of each host, as its load
    /// watcher reports them.
    pub(crate) reported_load: (f32, u32),
    /// Available memory of each host in bytes, as load watchers report it.
    pub(crate) available_bytes: u64,
    event_count: u64,
    next_task_numbers: HashMap<HostId, u32>,
    migration_count: u64,
    order_count: i32,
}

#[derive(Clone, Default)]
pub(crate) struct FakeVm(pub(crate) Rc<RefCell<FakeVmState>>);

impl VmApi for FakeVm {
    fn tid(&self) -> Tid {
        rm_tid()
    }
    fn host(&self) -> HostId {
        host_id(1)
    }
    fn now(&self) -> Micros {
        self.0.borrow().now
    }
    fn wall_clock(&self) -> Micros {
        Micros::from_secs(1_700_000_000) + self.0.borrow().now
    }
    fn recv(&self, timeout: Duration) -> Result<Option<Message>, Error> {
        let mut state = self.0.borrow_mut();
        let message = state.inbox.pop_front();
        if message.is_none() {
            let timeout_end = state.now + Micros(timeout.as_micros() as u64);
            state.now = timeout_end.min(state.clock_limit.max(state.now));
        }
        Ok(message)
    }
    fn send(&self, receiver: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        self.0
            .borrow_mut()
            .base_messages
            .push((receiver, tag, wid, body));
        Ok(())
    }
    fn send_rm(&self, receiver: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        self.0
            .borrow_mut()
            .rm_messages
            .push((receiver, tag, wid, body));
        Ok(())
    }
    fn events(&self, first_number: u64, count_max: u32) -> Result<Vec<Event>, Error> {
        let state = self.0.borrow();
        Ok(state
            .event_log
            .iter()
            .filter(|e| e.number >= first_number)
            .take(count_max as usize)
            .cloned()
            .collect())
    }
    fn host_table(&self) -> Result<HostTable, Error> {
        let entry = |i: &u16| HostEntry {
            id: host_id(*i),
            name: format!("h{i}"),
            arch: "LINUX64".into(),
            speed: 1000,
            dsig: DSIG_X86_64,
            addresses: Vec::new(),
        };
        Ok(HostTable {
            epoch: Epoch(1),
            hosts: self.0.borrow().host_indices.iter().map(entry).collect(),
        })
    }
    fn tasks(&self) -> Result<Vec<TaskInfo>, Error> {
        self.0.borrow_mut().task_list_count += 1;
        Ok(self.0.borrow().tasks.clone())
    }
    fn register(&self) -> Result<Tid, Error> {
        Ok(self.0.borrow().previous_rm)
    }
    fn subscribe_events(&self, ctx: i32, tag: i32) -> Result<(), Error> {
        assert_eq!((ctx, tag), (CTX_RM, TAG_EVENT));
        Ok(())
    }
    fn request_notification(
        &self,
        subjects: NotifySubjects,
        ctx: i32,
        _tag: i32,
    ) -> Result<(), Error> {
        assert_eq!(ctx, CTX_RM);
        if let NotifySubjects::TaskExit(tids) = subjects {
            self.0.borrow_mut().exit_watched_tids.extend(tids);
        }
        Ok(())
    }
    fn start_tasks(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error> {
        let mut state = self.0.borrow_mut();
        state.order_count += 1;
        let wid = 1000 + state.order_count;
        state.start_orders.push(StartOrder {
            host,
            parent,
            request: request.clone(),
            wid,
        });
        Ok(wid)
    }
    fn migrate(&self, tid: Tid, target: HostId, cause: MigrationCause) -> Result<(), MigrateError> {
        let mut state = self.0.borrow_mut();
        state.migrations.push((tid, target, cause));
        state
            .refused_migrations
            .get(&(tid, target))
            .map_or(Ok(()), |error| Err(error.clone().into()))
    }
    fn signal(&self, tid: Tid, signal: i32) -> Result<(), Error> {
        let mut state = self.0.borrow_mut();
        if let Some(code) = state.refused_signals.get(&tid) {
            return Err(Error::new(*code, "refused"));
        }
        state.signals.push((tid, signal));
        state.signalled_tids.push(tid);
        Ok(())
    }
    fn set_suspended(
        &self,
        tid: Tid,
        suspend: bool,
        cause: suspend::SuspendCause,
    ) -> Result<(), Error> {
        let mut state = self.0.borrow_mut();
        if let Some(code) = state.refused_suspensions.get(&tid) {
            return Err(Error::new(*code, "refused"));
        }
        state.suspend_orders.push((tid, suspend, cause.clone()));
        let order = suspend::SuspendOrder {
            tid,
            suspend,
            cause,
        };
        let old_suspensions = state.suspensions.get(&tid).copied().unwrap_or_default();
        state
            .suspensions
            .insert(tid, old_suspensions.apply_order(&order));
        if let Some(event) =
            old_suspensions.change_event(old_suspensions.apply_order(&order), &order)
        {
            state.log_event(tid.birth_host().expect("a task"), event);
        }
        Ok(())
    }
    fn checkpoint_and_end(&self, job: Tid) -> Result<(), Error> {
        self.0.borrow_mut().checkpointed_jobs.push(job);
        Ok(())
    }
    fn restart(&self, checkpoint: &str, hosts: &[String]) -> Result<(), Error> {
        self.0
            .borrow_mut()
            .restart_requests
            .push((checkpoint.into(), hosts.to_vec()));
        Ok(())
    }
    fn record_event(&self, _at: Micros, kind: EventKind) -> Result<(), Error> {
        let mut state = self.0.borrow_mut();
        use EventKind::{
            DrainEnded, DrainStarted, HostClosed, HostOpened, JobResumed, JobSuspended,
        };
        let concerns_host = matches!(
            kind,
            DrainStarted { .. } | DrainEnded { .. } | HostClosed { .. } | HostOpened { .. }
        );
        if concerns_host || matches!(kind, JobSuspended { .. } | JobResumed { .. }) {
            state.log_event(HostId::MASTER, kind.clone());
        }
        state.recorded_events.push(kind);
        Ok(())
    }
}

impl FakeVmState {
    pub(crate) fn post_message(&mut self, src: Tid, ctx: i32, tag: i32, wid: i32, body: Bytes) {
        self.inbox.push_back(Message {
            src,
            dst: rm_tid(),
            ctx,
            tag,
            wid,
            enc: ENC_XDR,
            body,
        });
    }

    pub(crate) fn log_event(&mut self, host: HostId, kind: EventKind) {
        self.event_count += 1;
        let wall_time = Micros::from_secs(1_700_000_000) + self.now;
        let event = Event {
            number: self.event_count,
            at: wall_time,
            host,
            kind,
        };
        self.event_log.push(event.clone());
        let body = frame::to_bytes(&event)
            .expect("an event can be written")
            .into();
        self.post_message(Tid::MY_DAEMON, CTX_RM, TAG_EVENT, 0, body);
    }

    /// Skips one event number, as if the event with this number had been lost.
    pub(crate) fn skip_event_number(&mut self) {
        self.event_count += 1;
    }

    /// Drops all messages in the inbox, as if the service had never received them.
    pub(crate) fn clear_inbox(&mut self) {
        self.inbox.clear();
    }

    pub(crate) fn request_spawn(&mut self, wid: i32, request: &SpawnRequest) {
        self.request_spawn_by(client_tid(), wid, request);
    }

    pub(crate) fn request_spawn_by(&mut self, task: Tid, wid: i32, request: &SpawnRequest) {
        self.post_message(task, CTX_BASE, SM_SPAWN, wid, pack_spawn(request, None));
    }

    /// Like [`FakeVmState::request_spawn`], for a request that has waited at an earlier resource
    /// manager since `waiting_since`.
    pub(crate) fn request_spawn_waiting_since(
        &mut self,
        wid: i32,
        request: &SpawnRequest,
        waiting_since: Micros,
    ) {
        self.post_message(
            client_tid(),
            CTX_BASE,
            SM_SPAWN,
            wid,
            pack_spawn(request, Some(waiting_since)),
        );
    }

    /// Returns the notifications of the client about the waiting of this request. `Some` is the
    /// time at which the request began to wait; `None` means that it has stopped waiting.
    pub(crate) fn wait_notices(&self, wid: i32) -> Vec<Option<Micros>> {
        let notices = self
            .base_messages
            .iter()
            .filter(|s| s.0 == client_tid() && s.1 == SM_SPAWN_WAITS && s.2 == wid);
        notices
            .map(|s| unpack_spawn_waits(s.3.clone()).expect("a word"))
            .collect()
    }

    /// Reports that all tasks of an order to start tasks have been started. Returns their tids.
    pub(crate) fn acknowledge(&mut self, order: &StartOrder) -> Vec<Tid> {
        let next_number = self.next_task_numbers.entry(order.host).or_insert(100);
        let first_number = *next_number;
        *next_number += order.request.task_count;
        let tids: Vec<Tid> = (first_number..*next_number)
            .map(|n| task_id(order.host.index(), n))
            .collect();
        self.acknowledge_with(order, &tids.iter().map(|tid| Ok(*tid)).collect::<Vec<_>>());
        tids
    }

    pub(crate) fn acknowledge_with(&mut self, order: &StartOrder, results: &[PvmResult<Tid>]) {
        self.post_message(
            order.host.daemon_tid(),
            CTX_BASE,
            SM_EXECACK,
            order.wid,
            pack_tids(results),
        );
    }

    pub(crate) fn report_load(&mut self, watcher: Tid, host: HostId, owner: OwnerVerdict) {
        let (busy_fraction, runnable_count) = self.reported_load;
        let (load1, available_bytes) = (runnable_count as f32, self.available_bytes);
        let sample = LoadSample {
            cores: 2,
            busy_share: busy_fraction,
            runnable_threads: runnable_count,
            one_minute_load: load1,
            available_bytes,
            ..LoadSample::default()
        };
        let owner_reason = match &owner {
            OwnerVerdict::Present { .. } => "alice on pts/0",
            OwnerVerdict::Uncertain { .. } => "alice is idle on pts/0",
            OwnerVerdict::Absent { .. } => "no user is logged in",
        };
        let guest_access = match &owner {
            OwnerVerdict::Present { detected_at, .. } => GuestAccess::Paused {
                evict_at: Some(*detected_at),
                eviction: self.eviction_mode,
            },
            _ if self.closing_reason.is_some() => GuestAccess::Paused {
                evict_at: Some(Micros(8)),
                eviction: self.eviction_mode,
            },
            _ => GuestAccess::Welcome,
        };
        let access_reason = self
            .closing_reason
            .clone()
            .unwrap_or_else(|| owner_reason.into());
        let report = LoadReport {
            host,
            at: Micros(8),
            sample,
            owner_verdict: owner,
            confidence_percent: 90,
            owner_reason: owner_reason.into(),
            logins: Vec::new(),
            guest_access,
            access_reason,
            guest_limits: self.guest_limits.clone(),
        };
        let body = frame::to_bytes(&report)
            .expect("a report can be written")
            .into();
        self.post_message(watcher, CTX_RM, TAG_LOAD_REPORT, 0, body);
    }

    pub(crate) fn report_migrated(
        &mut self,
        tid: Tid,
        source: u16,
        target: u16,
        cause: MigrationCause,
    ) {
        self.migration_count += 1;
        let id = MigrationId(self.migration_count);
        let (source, target, duration) = (host_id(source), host_id(target), Micros(1));
        let kind = EventKind::Migrated {
            id,
            tid,
            from: source,
            to: target,
            cause,
            bytes: 1,
            resident: 1,
            frozen: duration,
            transfer_time: duration,
        };
        self.log_event(target, kind);
    }

    pub(crate) fn report_migration_failed(
        &mut self,
        tid: Tid,
        source: u16,
        target: u16,
        failure: Failure,
    ) {
        self.migration_count += 1;
        let (id, step) = (
            MigrationId(self.migration_count),
            sempa_proto::migration::Step::Dump,
        );
        let cause = MigrationCause::Owner { why: String::new() };
        self.log_event(
            host_id(source),
            EventKind::MigrationFailed {
                id,
                tid,
                from: host_id(source),
                to: host_id(target),
                cause,
                step,
                why: failure,
            },
        );
    }

    pub(crate) fn take_migrations(&mut self) -> Vec<(Tid, u16)> {
        std::mem::take(&mut self.migrations)
            .into_iter()
            .map(|(tid, target, _)| (tid, target.index()))
            .collect()
    }

    pub(crate) fn take_start_orders(&mut self) -> Vec<StartOrder> {
        std::mem::take(&mut self.start_orders)
    }

    /// Returns the reply to the spawn with this wait id, if there is one.
    pub(crate) fn spawn_reply(&self, wid: i32) -> Option<PvmResult<Vec<PvmResult<Tid>>>> {
        let reply = self
            .base_messages
            .iter()
            .find(|s| s.0 == client_tid() && s.1 == SM_SPAWN && s.2 == wid);
        reply.map(|s| unpack_tids(s.3.clone()))
    }

    pub(crate) fn recorded_notes(&self) -> Vec<String> {
        self.recorded_events
            .iter()
            .filter(|r| matches!(r, EventKind::Note { .. }))
            .map(EventKind::to_string)
            .collect()
    }
}

pub(crate) fn task_info(tid: Tid, host: u16, flags: i32, name: &str) -> TaskInfo {
    let (parent, pid, uid) = (Tid::NONE, 1, 0);
    TaskInfo {
        tid,
        parent,
        host: host_id(host),
        flags,
        name: name.into(),
        pid,
        uid,
        migrating: false,
        paused: false,
        suspended: false,
        namespace_pid: pid,
        stopping: false,
        leftover_processes: 0,
    }
}

pub(crate) fn spawned_task_info(tid: Tid, host: u16) -> TaskInfo {
    task_info(tid, host, TASK_FORKED | TASK_CONNECTED, "worker")
}

pub(crate) fn fake_vm(host_count: u16) -> FakeVm {
    let vm = FakeVm::default();
    {
        let mut state = vm.0.borrow_mut();
        state.now = Micros::from_secs(100);
        state.host_indices = (1..=host_count).collect();
        state.tasks = vec![
            task_info(rm_tid(), 1, TASK_CONNECTED, ""),
            task_info(client_tid(), 1, TASK_CONNECTED, ""),
        ];
    }
    vm
}

pub(crate) struct TestBed {
    pub(crate) vm: FakeVm,
    pub(crate) service: Service<FakeVm>,
}

impl TestBed {
    pub(crate) fn try_start(vm: &FakeVm, with_watchers: bool) -> Result<Self, ServiceError> {
        Self::try_start_with(
            vm,
            Options {
                starts_watchers: with_watchers,
                ..Options::default()
            },
        )
    }

    pub(crate) fn try_start_with(vm: &FakeVm, options: Options) -> Result<Self, ServiceError> {
        Ok(Self {
            vm: vm.clone(),
            service: Service::start(vm.clone(), options)?,
        })
    }

    /// Creates a service on hosts without owners, whose load watchers all run.
    /// [`TestBed::watcher_tid`] returns the tids of the watchers.
    pub(crate) fn start_with_watchers(vm: &FakeVm) -> Self {
        Self::start_with_options(
            vm,
            Options {
                starts_watchers: true,
                ..Options::default()
            },
        )
    }

    /// Like [`TestBed::start_with_watchers`], with other options.
    pub(crate) fn start_with_options(vm: &FakeVm, options: Options) -> Self {
        let mut bed = Self::try_start_with(vm, options).expect("no other resource manager");
        let orders = bed.state().take_start_orders();
        assert_eq!(orders.len(), bed.state().host_indices.len());
        for order in orders {
            let watcher = Self::watcher_tid(order.host.index());
            bed.state().acknowledge_with(&order, &[Ok(watcher)]);
            bed.state()
                .report_load(watcher, order.host, OwnerVerdict::Absent { since: None });
        }
        bed.process_inbox();
        bed
    }

    pub(crate) fn watcher_tid(host: u16) -> Tid {
        task_id(host, 50)
    }

    pub(crate) fn state(&self) -> std::cell::RefMut<'_, FakeVmState> {
        self.vm.0.borrow_mut()
    }

    pub(crate) fn try_process_inbox(&mut self) -> Result<(), ServiceError> {
        while !self.state().inbox.is_empty() {
            self.service.step()?;
        }
        Ok(())
    }

    /// Lets the service handle all messages in the inbox.
    pub(crate) fn process_inbox(&mut self) {
        self.try_process_inbox().expect("the service continues");
    }

    /// Advances the clock by `duration`. The service handles all messages and all timers that
    /// become due.
    pub(crate) fn advance(&mut self, duration: Micros) {
        let end_time = self.state().now + duration;
        self.state().clock_limit = end_time;
        while self.state().now < end_time || !self.state().inbox.is_empty() {
            self.service.step().expect("the service continues");
        }
        // One more step handles the timers that are due exactly at `end_time`.
        self.service.step().expect("the service continues");
    }

    pub(crate) fn report_owner_present(&mut self, host: u16) {
        let owner = OwnerVerdict::Present {
            since: Micros(7),
            detected_at: Micros(8),
        };
        self.state()
            .report_load(Self::watcher_tid(host), host_id(host), owner);
        self.process_inbox();
    }

    pub(crate) fn report_owner_absent(&mut self, host: u16) {
        self.state().report_load(
            Self::watcher_tid(host),
            host_id(host),
            OwnerVerdict::Absent { since: None },
        );
        self.process_inbox();
    }

    /// Sends one report of an absent owner from the load watcher of each of these hosts.
    pub(crate) fn report_absent_owners(&mut self, hosts: &[u16]) {
        for host in hosts {
            self.state().report_load(
                Self::watcher_tid(*host),
                host_id(*host),
                OwnerVerdict::Absent { since: None },
            );
        }
        self.process_inbox();
    }
}

pub(crate) fn request(count: u32) -> SpawnRequest {
    SpawnRequest {
        program: "worker".into(),
        task_count: count,
        ..SpawnRequest::default()
    }
}

pub(crate) fn migrate_error(failure: Failure) -> MigrationError {
    MigrationError {
        step: sempa_proto::migration::Step::Prepare,
        failure,
    }
}

pub(crate) fn no_file_error() -> PvmResult<Tid> {
    Err(PvmError::NoFile)
}
