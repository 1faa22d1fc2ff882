//! A fake virtual machine for tests of the resource manager. It records the requests of the
//! resource manager. Its clock advances only when no message is left to receive.

use bytes::Bytes;
use libpvm::{Error, MigrateError};
use pvm_rm::api::VmApi;
use pvm_rm::service::{Options, Service, ServiceError, TAG_EVENT, TAG_LOAD};
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

pub(crate) fn task_id(host: u16, local: u32) -> Tid {
    Tid::task(host_id(host), local).expect("a task")
}

/// The tid of the resource manager.
pub(crate) fn rm_tid() -> Tid {
    task_id(1, 1)
}

/// The tid of a task from a command line that spawns.
pub(crate) fn client() -> Tid {
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
pub(crate) struct FakeWorld {
    now: Micros,
    wait_limit: Micros,
    pub(crate) inbox: VecDeque<Message>,
    pub(crate) hosts: Vec<u16>,
    pub(crate) tasks: Vec<TaskInfo>,
    pub(crate) previous_rm: Tid,
    pub(crate) list_count: usize,
    pub(crate) sent: Vec<(Tid, i32, i32, Bytes)>,
    pub(crate) answers: Vec<(Tid, i32, i32, Bytes)>,
    pub(crate) event_log: Vec<Event>,
    pub(crate) execs: Vec<StartOrder>,
    pub(crate) migrations: Vec<(Tid, HostId, MigrationCause)>,
    pub(crate) refused_migrations: HashMap<(Tid, HostId), MigrationError>,
    pub(crate) records: Vec<EventKind>,
    pub(crate) killed: Vec<Tid>,
    pub(crate) signals: Vec<(Tid, i32)>,
    pub(crate) refused_signals: HashMap<Tid, PvmError>,
    pub(crate) suspends: Vec<(Tid, bool, suspend::SuspendCause)>,
    /// Active causes of suspension of each task.
    suspensions: HashMap<Tid, suspend::Suspensions>,
    pub(crate) refused_suspensions: HashMap<Tid, PvmError>,
    pub(crate) watched: Vec<Tid>,
    pub(crate) checkpoints: Vec<Tid>,
    pub(crate) restarts: Vec<(String, Vec<String>)>,
    /// Limits that all owners set.
    pub(crate) limits: GuestLimits,
    /// What happens to guests when an owner arrives.
    pub(crate) leave_mode: EvictionMode,
    /// Reason for which the owners' rules exclude guests; `None` if they accept guests.
    pub(crate) closed_reason: Option<String>,
    /// Busy fraction of the processors, and number of runnable threads, as the load watcher of each
    /// host reports them.
    pub(crate) load: (f32, u32),
    /// Available memory of each host in bytes, as load watchers report it.
    pub(crate) available_bytes: u64,
    event_count: u64,
    next_task_numbers: HashMap<HostId, u32>,
    migration_count: u64,
    order_count: i32,
}

#[derive(Clone, Default)]
pub(crate) struct FakeVm(pub(crate) Rc<RefCell<FakeWorld>>);

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
    fn recv(&self, span: Duration) -> Result<Option<Message>, Error> {
        let mut world = self.0.borrow_mut();
        let message = world.inbox.pop_front();
        if message.is_none() {
            let later = world.now + Micros(span.as_micros() as u64);
            world.now = later.min(world.wait_limit.max(world.now));
        }
        Ok(message)
    }
    fn send(&self, to: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        self.0.borrow_mut().sent.push((to, tag, wid, body));
        Ok(())
    }
    fn send_rm(&self, to: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        self.0.borrow_mut().answers.push((to, tag, wid, body));
        Ok(())
    }
    fn events(&self, from: u64, limit: u32) -> Result<Vec<Event>, Error> {
        let world = self.0.borrow();
        Ok(world
            .event_log
            .iter()
            .filter(|e| e.number >= from)
            .take(limit as usize)
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
            hosts: self.0.borrow().hosts.iter().map(entry).collect(),
        })
    }
    fn tasks(&self) -> Result<Vec<TaskInfo>, Error> {
        self.0.borrow_mut().list_count += 1;
        Ok(self.0.borrow().tasks.clone())
    }
    fn register(&self) -> Result<Tid, Error> {
        Ok(self.0.borrow().previous_rm)
    }
    fn subscribe(&self, ctx: i32, tag: i32) -> Result<(), Error> {
        assert_eq!((ctx, tag), (CTX_RM, TAG_EVENT));
        Ok(())
    }
    fn notify(&self, what: NotifySubjects, ctx: i32, _tag: i32) -> Result<(), Error> {
        assert_eq!(ctx, CTX_RM);
        if let NotifySubjects::TaskExit(tids) = what {
            self.0.borrow_mut().watched.extend(tids);
        }
        Ok(())
    }
    fn start_tasks(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error> {
        let mut world = self.0.borrow_mut();
        world.order_count += 1;
        let wid = 1000 + world.order_count;
        world.execs.push(StartOrder {
            host,
            parent,
            request: request.clone(),
            wid,
        });
        Ok(wid)
    }
    fn migrate(&self, tid: Tid, to: HostId, cause: MigrationCause) -> Result<(), MigrateError> {
        let mut world = self.0.borrow_mut();
        world.migrations.push((tid, to, cause));
        world
            .refused_migrations
            .get(&(tid, to))
            .map_or(Ok(()), |error| Err(error.clone().into()))
    }
    fn signal(&self, tid: Tid, signal: i32) -> Result<(), Error> {
        let mut world = self.0.borrow_mut();
        if let Some(code) = world.refused_signals.get(&tid) {
            return Err(Error::new(*code, "refused"));
        }
        world.signals.push((tid, signal));
        world.killed.push(tid);
        Ok(())
    }
    fn suspend(&self, tid: Tid, suspend: bool, cause: suspend::SuspendCause) -> Result<(), Error> {
        let mut world = self.0.borrow_mut();
        if let Some(code) = world.refused_suspensions.get(&tid) {
            return Err(Error::new(*code, "refused"));
        }
        world.suspends.push((tid, suspend, cause.clone()));
        let order = suspend::SuspendOrder {
            tid,
            suspend,
            cause,
        };
        let before = world.suspensions.get(&tid).copied().unwrap_or_default();
        world.suspensions.insert(tid, before.apply(&order));
        if let Some(event) = before.change_event(before.apply(&order), &order) {
            world.event(tid.birth_host().expect("a task"), event);
        }
        Ok(())
    }
    fn checkpoint_and_end(&self, job: Tid) -> Result<(), Error> {
        self.0.borrow_mut().checkpoints.push(job);
        Ok(())
    }
    fn restart(&self, set: &str, on: &[String]) -> Result<(), Error> {
        self.0.borrow_mut().restarts.push((set.into(), on.to_vec()));
        Ok(())
    }
    fn record_event(&self, _at: Micros, kind: EventKind) -> Result<(), Error> {
        let mut world = self.0.borrow_mut();
        use EventKind::{
            DrainEnded, DrainStarted, HostClosed, HostOpened, JobResumed, JobSuspended,
        };
        let of_hosts = matches!(
            kind,
            DrainStarted { .. } | DrainEnded { .. } | HostClosed { .. } | HostOpened { .. }
        );
        if of_hosts || matches!(kind, JobSuspended { .. } | JobResumed { .. }) {
            world.event(HostId::MASTER, kind.clone());
        }
        world.records.push(kind);
        Ok(())
    }
}

impl FakeWorld {
    pub(crate) fn post(&mut self, src: Tid, ctx: i32, tag: i32, wid: i32, body: Bytes) {
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

    pub(crate) fn event(&mut self, host: HostId, kind: EventKind) {
        self.event_count += 1;
        let at = Micros::from_secs(1_700_000_000) + self.now;
        let event = Event {
            number: self.event_count,
            at,
            host,
            kind,
        };
        self.event_log.push(event.clone());
        let body = frame::to_bytes(&event)
            .expect("an event can be written")
            .into();
        self.post(Tid::MY_DAEMON, CTX_RM, TAG_EVENT, 0, body);
    }

    /// Skips one number in the event log, as if that entry had been lost.
    pub(crate) fn miss_event(&mut self) {
        self.event_count += 1;
    }

    /// Drops all messages in the inbox.
    pub(crate) fn clear_inbox(&mut self) {
        self.inbox.clear();
    }

    pub(crate) fn spawn(&mut self, wid: i32, request: &SpawnRequest) {
        self.spawn_by(client(), wid, request);
    }

    pub(crate) fn spawn_by(&mut self, task: Tid, wid: i32, request: &SpawnRequest) {
        self.post(task, CTX_BASE, SM_SPAWN, wid, pack_spawn(request, None));
    }

    /// Like [`FakeWorld::handle_spawn`], for a request that has waited at an earlier resource
    /// manager since `since`.
    pub(crate) fn spawn_waiting_since(&mut self, wid: i32, request: &SpawnRequest, since: Micros) {
        self.post(
            client(),
            CTX_BASE,
            SM_SPAWN,
            wid,
            pack_spawn(request, Some(since)),
        );
    }

    /// Returns the notifications that the client got about the waiting of this request: the time
    /// waited, or `None` when it stopped waiting.
    pub(crate) fn wait_notices(&self, wid: i32) -> Vec<Option<Micros>> {
        let told = self
            .sent
            .iter()
            .filter(|s| s.0 == client() && s.1 == SM_SPAWN_WAITS && s.2 == wid);
        told.map(|s| unpack_spawn_waits(s.3.clone()).expect("a word"))
            .collect()
    }

    /// Acknowledges an order to start tasks. Returns the tids of the started tasks.
    pub(crate) fn ack(&mut self, exec: &StartOrder) -> Vec<Tid> {
        let local = self.next_task_numbers.entry(exec.host).or_insert(100);
        let first = *local;
        *local += exec.request.count;
        let tids: Vec<Tid> = (first..*local)
            .map(|n| task_id(exec.host.index(), n))
            .collect();
        self.ack_with(exec, &tids.iter().map(|tid| Ok(*tid)).collect::<Vec<_>>());
        tids
    }

    pub(crate) fn ack_with(&mut self, exec: &StartOrder, results: &[PvmResult<Tid>]) {
        self.post(
            exec.host.daemon_tid(),
            CTX_BASE,
            SM_EXECACK,
            exec.wid,
            pack_tids(results),
        );
    }

    pub(crate) fn report(&mut self, watcher: Tid, host: HostId, owner: OwnerVerdict) {
        let (busy, running) = self.load;
        let (load1, available_bytes) = (running as f32, self.available_bytes);
        let sample = LoadSample {
            cores: 2,
            busy,
            running,
            load1,
            available_bytes,
            ..LoadSample::default()
        };
        let why = match &owner {
            OwnerVerdict::Present { .. } => "alice on pts/0",
            OwnerVerdict::Maybe { .. } => "alice is idle on pts/0",
            OwnerVerdict::Absent { .. } => "no user is logged in",
        };
        let guests = match &owner {
            OwnerVerdict::Present {
                detected_at: seen, ..
            } => GuestAccess::Paused {
                evict_at: Some(*seen),
                eviction: self.leave_mode,
            },
            _ if self.closed_reason.is_some() => GuestAccess::Paused {
                evict_at: Some(Micros(8)),
                eviction: self.leave_mode,
            },
            _ => GuestAccess::Welcome,
        };
        let guests_why = self.closed_reason.clone().unwrap_or_else(|| why.into());
        let report = LoadReport {
            host,
            at: Micros(8),
            sample,
            owner_verdict: owner,
            confidence: 90,
            owner_reason: why.into(),
            logins: Vec::new(),
            access: guests,
            access_reason: guests_why,
            limits: self.limits.clone(),
        };
        let body = frame::to_bytes(&report)
            .expect("a report can be written")
            .into();
        self.post(watcher, CTX_RM, TAG_LOAD, 0, body);
    }

    pub(crate) fn migrated(&mut self, tid: Tid, from: u16, to: u16, cause: MigrationCause) {
        self.migration_count += 1;
        let id = MigrationId(self.migration_count);
        let (from, to, time) = (host_id(from), host_id(to), Micros(1));
        let kind = EventKind::Migrated {
            id,
            tid,
            from,
            to,
            cause,
            bytes: 1,
            resident: 1,
            frozen: time,
            transfer_time: time,
        };
        self.event(to, kind);
    }

    pub(crate) fn migration_failed(&mut self, tid: Tid, from: u16, to: u16, why: Failure) {
        self.migration_count += 1;
        let (id, step) = (
            MigrationId(self.migration_count),
            sempa_proto::migration::Step::Dump,
        );
        let cause = MigrationCause::Owner { why: String::new() };
        self.event(
            host_id(from),
            EventKind::MigrationFailed {
                id,
                tid,
                from: host_id(from),
                to: host_id(to),
                cause,
                step,
                why,
            },
        );
    }

    pub(crate) fn take_migrations(&mut self) -> Vec<(Tid, u16)> {
        std::mem::take(&mut self.migrations)
            .into_iter()
            .map(|(tid, to, _)| (tid, to.index()))
            .collect()
    }

    pub(crate) fn take_start_orders(&mut self) -> Vec<StartOrder> {
        std::mem::take(&mut self.execs)
    }

    /// Returns the reply to the spawn with this wait id, if there is one.
    pub(crate) fn spawn_reply(&self, wid: i32) -> Option<PvmResult<Vec<PvmResult<Tid>>>> {
        let found = self
            .sent
            .iter()
            .find(|s| s.0 == client() && s.1 == SM_SPAWN && s.2 == wid);
        found.map(|s| unpack_tids(s.3.clone()))
    }

    pub(crate) fn notes(&self) -> Vec<String> {
        self.records
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
    }
}

pub(crate) fn spawned_task_info(tid: Tid, host: u16) -> TaskInfo {
    task_info(tid, host, TASK_FORKED | TASK_CONNECTED, "worker")
}

pub(crate) fn world(hosts: u16) -> FakeVm {
    let vm = FakeVm::default();
    {
        let mut world = vm.0.borrow_mut();
        world.now = Micros::from_secs(100);
        world.hosts = (1..=hosts).collect();
        world.tasks = vec![
            task_info(rm_tid(), 1, TASK_CONNECTED, ""),
            task_info(client(), 1, TASK_CONNECTED, ""),
        ];
    }
    vm
}

pub(crate) struct TestBed {
    pub(crate) vm: FakeVm,
    pub(crate) service: Service<FakeVm>,
}

impl TestBed {
    pub(crate) fn try_start(vm: &FakeVm, watchers: bool) -> Result<TestBed, ServiceError> {
        TestBed::with(
            vm,
            Options {
                watchers,
                ..Options::default()
            },
        )
    }

    pub(crate) fn with(vm: &FakeVm, options: Options) -> Result<TestBed, ServiceError> {
        Ok(TestBed {
            vm: vm.clone(),
            service: Service::start(vm.clone(), options)?,
        })
    }

    /// Creates a service on hosts without owners, whose load watchers all run. The watcher of host
    /// n is t(n, 50).
    pub(crate) fn quiet(vm: &FakeVm) -> TestBed {
        TestBed::quiet_with(
            vm,
            Options {
                watchers: true,
                ..Options::default()
            },
        )
    }

    /// As [`TestBed::quiet`], with other options.
    pub(crate) fn quiet_with(vm: &FakeVm, options: Options) -> TestBed {
        let mut bed = TestBed::with(vm, options).expect("no other resource manager");
        let execs = bed.world().take_start_orders();
        assert_eq!(execs.len(), bed.world().hosts.len());
        for exec in execs {
            let watcher = TestBed::watcher(exec.host.index());
            bed.world().ack_with(&exec, &[Ok(watcher)]);
            bed.world()
                .report(watcher, exec.host, OwnerVerdict::Absent { since: None });
        }
        bed.settle();
        bed
    }

    pub(crate) fn watcher(host: u16) -> Tid {
        task_id(host, 50)
    }

    pub(crate) fn world(&self) -> std::cell::RefMut<'_, FakeWorld> {
        self.vm.0.borrow_mut()
    }

    pub(crate) fn try_settle(&mut self) -> Result<(), ServiceError> {
        while !self.world().inbox.is_empty() {
            self.service.step()?;
        }
        Ok(())
    }

    /// Lets the service handle all messages in the inbox.
    pub(crate) fn settle(&mut self) {
        self.try_settle().expect("the service continues");
    }

    /// Advances the clock by `span`. The service handles everything that becomes due.
    pub(crate) fn advance(&mut self, span: Micros) {
        let until = self.world().now + span;
        self.world().wait_limit = until;
        while self.world().now < until || !self.world().inbox.is_empty() {
            self.service.step().expect("the service continues");
        }
        // Handles what is due at the end of the time.
        self.service.step().expect("the service continues");
    }

    pub(crate) fn report_owner_present(&mut self, host: u16) {
        let owner = OwnerVerdict::Present {
            since: Micros(7),
            detected_at: Micros(8),
        };
        self.world()
            .report(TestBed::watcher(host), host_id(host), owner);
        self.settle();
    }

    pub(crate) fn report_owner_absent(&mut self, host: u16) {
        self.world().report(
            TestBed::watcher(host),
            host_id(host),
            OwnerVerdict::Absent { since: None },
        );
        self.settle();
    }

    /// Sends reports of the load watchers of these hosts, as they do every ten seconds.
    pub(crate) fn report_absent_owners(&mut self, hosts: &[u16]) {
        for host in hosts {
            self.world().report(
                TestBed::watcher(*host),
                host_id(*host),
                OwnerVerdict::Absent { since: None },
            );
        }
        self.settle();
    }
}

pub(crate) fn request(count: u32) -> SpawnRequest {
    SpawnRequest {
        file: "worker".into(),
        count,
        ..SpawnRequest::default()
    }
}

pub(crate) fn migrate_error(why: Failure) -> MigrationError {
    MigrationError {
        step: sempa_proto::migration::Step::Prepare,
        why,
    }
}

pub(crate) fn no_file_error() -> PvmResult<Tid> {
    Err(PvmError::NoFile)
}
