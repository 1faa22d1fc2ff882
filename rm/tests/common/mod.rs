//! A virtual machine in memory for tests of the resource manager. It records what the resource
//! manager requests; its clock advances when no message is left to read.

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

pub(crate) fn h(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

pub(crate) fn t(host: u16, local: u32) -> Tid {
    Tid::task(h(host), local).expect("a task")
}

/// The tid of the resource manager.
pub(crate) fn rm() -> Tid {
    t(1, 1)
}

/// The tid of a command-line task that spawns.
pub(crate) fn client() -> Tid {
    t(1, 2)
}

#[derive(Clone, Debug)]
pub(crate) struct Exec {
    pub(crate) host: HostId,
    pub(crate) parent: Tid,
    pub(crate) request: SpawnRequest,
    pub(crate) wid: i32,
}

#[derive(Default)]
pub(crate) struct World {
    now: Micros,
    until: Micros,
    pub(crate) inbox: VecDeque<Message>,
    pub(crate) hosts: Vec<u16>,
    pub(crate) tasks: Vec<TaskInfo>,
    pub(crate) previous: Tid,
    pub(crate) lists: usize,
    pub(crate) sent: Vec<(Tid, i32, i32, Bytes)>,
    pub(crate) answers: Vec<(Tid, i32, i32, Bytes)>,
    pub(crate) log: Vec<Event>,
    pub(crate) execs: Vec<Exec>,
    pub(crate) migrations: Vec<(Tid, HostId, MigrationCause)>,
    pub(crate) refuse: HashMap<(Tid, HostId), MigrationError>,
    pub(crate) records: Vec<EventKind>,
    pub(crate) killed: Vec<Tid>,
    pub(crate) signals: Vec<(Tid, i32)>,
    pub(crate) refuses_signals: HashMap<Tid, PvmError>,
    pub(crate) suspends: Vec<(Tid, bool, suspend::SuspendCause)>,
    /// Causes of the suspension of each task.
    holds: HashMap<Tid, suspend::Suspensions>,
    pub(crate) refuses_suspending: HashMap<Tid, PvmError>,
    pub(crate) watched: Vec<Tid>,
    pub(crate) checkpoints: Vec<Tid>,
    pub(crate) restarts: Vec<(String, Vec<String>)>,
    /// Limits that all owners set.
    pub(crate) limits: GuestLimits,
    /// How guests leave when an owner arrives.
    pub(crate) then: EvictionMode,
    /// The reason, if the owners' rules exclude guests.
    pub(crate) closed: Option<String>,
    /// Busy fraction of the hosts' processors and number of runnable threads, as load watchers
    /// report them.
    pub(crate) load: (f32, u32),
    /// Available bytes of memory of each host, as load watchers report them.
    pub(crate) memory: u64,
    events: u64,
    locals: HashMap<HostId, u32>,
    moves: u64,
    orders: i32,
}

#[derive(Clone, Default)]
pub(crate) struct FakeVm(pub(crate) Rc<RefCell<World>>);

impl VmApi for FakeVm {
    fn tid(&self) -> Tid {
        rm()
    }
    fn host(&self) -> HostId {
        h(1)
    }
    fn now(&self) -> Micros {
        self.0.borrow().now
    }
    fn wall(&self) -> Micros {
        Micros::from_secs(1_700_000_000) + self.0.borrow().now
    }
    fn recv(&self, span: Duration) -> Result<Option<Message>, Error> {
        let mut world = self.0.borrow_mut();
        let message = world.inbox.pop_front();
        if message.is_none() {
            let later = world.now + Micros(span.as_micros() as u64);
            world.now = later.min(world.until.max(world.now));
        }
        Ok(message)
    }
    fn send(&self, to: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        self.0.borrow_mut().sent.push((to, tag, wid, body));
        Ok(())
    }
    fn answer(&self, to: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        self.0.borrow_mut().answers.push((to, tag, wid, body));
        Ok(())
    }
    fn events(&self, from: u64, limit: u32) -> Result<Vec<Event>, Error> {
        let world = self.0.borrow();
        Ok(world
            .log
            .iter()
            .filter(|e| e.number >= from)
            .take(limit as usize)
            .cloned()
            .collect())
    }
    fn config(&self) -> Result<HostTable, Error> {
        let entry = |i: &u16| HostEntry {
            id: h(*i),
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
        self.0.borrow_mut().lists += 1;
        Ok(self.0.borrow().tasks.clone())
    }
    fn register(&self) -> Result<Tid, Error> {
        Ok(self.0.borrow().previous)
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
    fn exec(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error> {
        let mut world = self.0.borrow_mut();
        world.orders += 1;
        let wid = 1000 + world.orders;
        world.execs.push(Exec {
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
            .refuse
            .get(&(tid, to))
            .map_or(Ok(()), |error| Err(error.clone().into()))
    }
    fn signal(&self, tid: Tid, signal: i32) -> Result<(), Error> {
        let mut world = self.0.borrow_mut();
        if let Some(code) = world.refuses_signals.get(&tid) {
            return Err(Error::new(*code, "refused"));
        }
        world.signals.push((tid, signal));
        world.killed.push(tid);
        Ok(())
    }
    fn suspend(&self, tid: Tid, suspend: bool, cause: suspend::SuspendCause) -> Result<(), Error> {
        let mut world = self.0.borrow_mut();
        if let Some(code) = world.refuses_suspending.get(&tid) {
            return Err(Error::new(*code, "refused"));
        }
        world.suspends.push((tid, suspend, cause.clone()));
        let order = suspend::SuspendOrder {
            tid,
            suspend,
            cause,
        };
        let before = world.holds.get(&tid).copied().unwrap_or_default();
        world.holds.insert(tid, before.apply(&order));
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
    fn record(&self, _at: Micros, kind: EventKind) -> Result<(), Error> {
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

impl World {
    pub(crate) fn post(&mut self, src: Tid, ctx: i32, tag: i32, wid: i32, body: Bytes) {
        self.inbox.push_back(Message {
            src,
            dst: rm(),
            ctx,
            tag,
            wid,
            enc: ENC_XDR,
            body,
        });
    }

    pub(crate) fn event(&mut self, host: HostId, kind: EventKind) {
        self.events += 1;
        let at = Micros::from_secs(1_700_000_000) + self.now;
        let event = Event {
            number: self.events,
            at,
            host,
            kind,
        };
        self.log.push(event.clone());
        let body = frame::to_bytes(&event)
            .expect("an event can be written")
            .into();
        self.post(Tid::MY_DAEMON, CTX_RM, TAG_EVENT, 0, body);
    }

    /// Skips the number of a log entry, as if that entry had been lost.
    pub(crate) fn miss_event(&mut self) {
        self.events += 1;
    }

    /// Drops all messages in the inbox.
    pub(crate) fn forget_mail(&mut self) {
        self.inbox.clear();
    }

    pub(crate) fn spawn(&mut self, wid: i32, request: &SpawnRequest) {
        self.spawn_by(client(), wid, request);
    }

    pub(crate) fn spawn_by(&mut self, task: Tid, wid: i32, request: &SpawnRequest) {
        self.post(task, CTX_BASE, SM_SPAWN, wid, pack_spawn(request, None));
    }

    /// As [`World::spawn`], for a request that has waited under an earlier resource manager since
    /// `since`.
    pub(crate) fn spawn_again(&mut self, wid: i32, request: &SpawnRequest, since: Micros) {
        self.post(
            client(),
            CTX_BASE,
            SM_SPAWN,
            wid,
            pack_spawn(request, Some(since)),
        );
    }

    /// Returns what the client was notified of about the waiting of its request.
    pub(crate) fn waits(&self, wid: i32) -> Vec<Option<Micros>> {
        let told = self
            .sent
            .iter()
            .filter(|s| s.0 == client() && s.1 == SM_SPAWN_WAITS && s.2 == wid);
        told.map(|s| unpack_spawn_waits(s.3.clone()).expect("a word"))
            .collect()
    }

    /// Acknowledges a start order. Returns the tids of the tasks that the host starts.
    pub(crate) fn ack(&mut self, exec: &Exec) -> Vec<Tid> {
        let local = self.locals.entry(exec.host).or_insert(100);
        let first = *local;
        *local += exec.request.count;
        let tids: Vec<Tid> = (first..*local).map(|n| t(exec.host.index(), n)).collect();
        self.ack_with(exec, &tids.iter().map(|tid| Ok(*tid)).collect::<Vec<_>>());
        tids
    }

    pub(crate) fn ack_with(&mut self, exec: &Exec, results: &[PvmResult<Tid>]) {
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
        let (load1, available_bytes) = (running as f32, self.memory);
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
                eviction: self.then,
            },
            _ if self.closed.is_some() => GuestAccess::Paused {
                evict_at: Some(Micros(8)),
                eviction: self.then,
            },
            _ => GuestAccess::Welcome,
        };
        let guests_why = self.closed.clone().unwrap_or_else(|| why.into());
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

    pub(crate) fn moved(&mut self, tid: Tid, from: u16, to: u16, cause: MigrationCause) {
        self.moves += 1;
        let id = MigrationId(self.moves);
        let (from, to, time) = (h(from), h(to), Micros(1));
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

    pub(crate) fn move_failed(&mut self, tid: Tid, from: u16, to: u16, why: Failure) {
        self.moves += 1;
        let (id, step) = (MigrationId(self.moves), sempa_proto::migration::Step::Dump);
        let cause = MigrationCause::Owner { why: String::new() };
        self.event(
            h(from),
            EventKind::MigrationFailed {
                id,
                tid,
                from: h(from),
                to: h(to),
                cause,
                step,
                why,
            },
        );
    }

    pub(crate) fn took_migrations(&mut self) -> Vec<(Tid, u16)> {
        std::mem::take(&mut self.migrations)
            .into_iter()
            .map(|(tid, to, _)| (tid, to.index()))
            .collect()
    }

    pub(crate) fn took_execs(&mut self) -> Vec<Exec> {
        std::mem::take(&mut self.execs)
    }

    /// Returns the reply to the spawn with this wait id, if there is one.
    pub(crate) fn answer(&self, wid: i32) -> Option<PvmResult<Vec<PvmResult<Tid>>>> {
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

pub(crate) fn info(tid: Tid, host: u16, flags: i32, name: &str) -> TaskInfo {
    let (parent, pid, uid) = (Tid::NONE, 1, 0);
    TaskInfo {
        tid,
        parent,
        host: h(host),
        flags,
        name: name.into(),
        pid,
        uid,
        migrating: false,
        paused: false,
        suspended: false,
    }
}

pub(crate) fn spawned(tid: Tid, host: u16) -> TaskInfo {
    info(tid, host, TASK_FORKED | TASK_CONNECTED, "worker")
}

pub(crate) fn world(hosts: u16) -> FakeVm {
    let vm = FakeVm::default();
    {
        let mut world = vm.0.borrow_mut();
        world.now = Micros::from_secs(100);
        world.hosts = (1..=hosts).collect();
        world.tasks = vec![
            info(rm(), 1, TASK_CONNECTED, ""),
            info(client(), 1, TASK_CONNECTED, ""),
        ];
    }
    vm
}

pub(crate) struct Bed {
    pub(crate) vm: FakeVm,
    pub(crate) service: Service<FakeVm>,
}

impl Bed {
    pub(crate) fn start(vm: &FakeVm, watchers: bool) -> Result<Bed, ServiceError> {
        Bed::with(
            vm,
            Options {
                watchers,
                ..Options::default()
            },
        )
    }

    pub(crate) fn with(vm: &FakeVm, options: Options) -> Result<Bed, ServiceError> {
        Ok(Bed {
            vm: vm.clone(),
            service: Service::start(vm.clone(), options)?,
        })
    }

    /// A pool whose load watchers all run and report no owner. The watcher of host n is t(n, 50).
    pub(crate) fn quiet(vm: &FakeVm) -> Bed {
        Bed::quiet_with(
            vm,
            Options {
                watchers: true,
                ..Options::default()
            },
        )
    }

    /// As [`Bed::quiet`], with other options.
    pub(crate) fn quiet_with(vm: &FakeVm, options: Options) -> Bed {
        let mut bed = Bed::with(vm, options).expect("no other resource manager");
        let execs = bed.world().took_execs();
        assert_eq!(execs.len(), bed.world().hosts.len());
        for exec in execs {
            let watcher = Bed::watcher(exec.host.index());
            bed.world().ack_with(&exec, &[Ok(watcher)]);
            bed.world()
                .report(watcher, exec.host, OwnerVerdict::Absent { since: None });
        }
        bed.settle();
        bed
    }

    pub(crate) fn watcher(host: u16) -> Tid {
        t(host, 50)
    }

    pub(crate) fn world(&self) -> std::cell::RefMut<'_, World> {
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

    /// Advances the clock and lets the service work meanwhile.
    pub(crate) fn pass(&mut self, span: Micros) {
        let until = self.world().now + span;
        self.world().until = until;
        while self.world().now < until || !self.world().inbox.is_empty() {
            self.service.step().expect("the service continues");
        }
        // Handles what is due at the end.
        self.service.step().expect("the service continues");
    }

    pub(crate) fn owner_comes(&mut self, host: u16) {
        let owner = OwnerVerdict::Present {
            since: Micros(7),
            detected_at: Micros(8),
        };
        self.world().report(Bed::watcher(host), h(host), owner);
        self.settle();
    }

    pub(crate) fn owner_leaves(&mut self, host: u16) {
        self.world().report(
            Bed::watcher(host),
            h(host),
            OwnerVerdict::Absent { since: None },
        );
        self.settle();
    }

    /// Reports of the load watchers, which are due every ten seconds.
    pub(crate) fn signs_of_life(&mut self, hosts: &[u16]) {
        for host in hosts {
            self.world().report(
                Bed::watcher(*host),
                h(*host),
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

pub(crate) fn failed(why: Failure) -> MigrationError {
    MigrationError {
        step: sempa_proto::migration::Step::Prepare,
        why,
    }
}

pub(crate) fn no_file() -> PvmResult<Tid> {
    Err(PvmError::NoFile)
}
