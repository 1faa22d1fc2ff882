//! Checkpoints of jobs and what becomes of them: the glue between the protocol, this daemon's tasks, and the store, which
//! the master keeps.
//!
//! A job is a task and everything that it and its descendants have spawned. The master finds them by asking all hosts, so it
//! needs no resource manager for it. What was a member once stays one, also when its parent has ended.
//!
//! A job that is checkpointed again and again goes back to its newest set when a host is lost that had tasks of it: those
//! that are left are killed before anybody is told of the loss, and when all are gone the set is started again.

use super::asks::Asker;
use super::{Machine, Output, Timer};
use checkpoint::protocol::{Candidate, CutId, CutOutput, Cuts, RestartId, RestartOutput, Restarts, TargetEvent};
use sempa_proto::checkpoint::{
    CutFailure, PartMeta, PartRecord, RestartFailure, RestartReport, SET_TASKS_MAX, SET_VERSION, SetMeta, SetReport,
};
use sempa_proto::event::EventKind;
use sempa_proto::host::{Held, Question};
use sempa_proto::migration::{Failure, FileMatch, Report, Step, TaskFacts, Timeline};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{Redirect, Reply, Restart, ToTask};
use sempa_proto::tasker::{Redirection, ToTasker};
use sempa_proto::{HostId, Micros, MigrationId, PvmError, RequestId, Tid, WIRE_VERSION};
use std::collections::{BTreeMap, BTreeSet};

/// Jobs that are remembered for their checkpoints. Those with which nothing is to be done go first; then one more is refused.
const JOBS_MAX: usize = 1024;
/// How often a checkpoint is begun again because the job was changing, and how often a job that goes back is started.
const TRIES_MAX: u32 = 10;
/// Pause before that.
const TRY_PAUSE: Micros = Micros::from_millis(200);
/// Pause before a job that goes back is started once more.
const RESTART_PAUSE: Micros = Micros::from_secs(2);
/// Tasks of which it is remembered on which timeline they began again.
const LINES_MAX: usize = 1 << 20;
/// How often it is looked whether the last tasks of a job that goes back are gone.
const GONE_PAUSE: Micros = Micros::from_millis(20);
/// Looks at most.
const GONE_LOOKS_MAX: u32 = 1000;
/// Shortest pause between the end of one checkpoint of a job and the beginning of the next.
const EVERY_MIN: Micros = Micros::from_millis(500);
/// Signal that nobody survives.
const SIGKILL: i32 = 9;

/// What is under way for a job.
#[derive(Debug, Default, PartialEq)]
enum Doing {
    #[default]
    Nothing,
    /// Its tasks are being counted, for a checkpoint.
    Counting,
    /// This checkpoint.
    Cutting(CutId),
    /// What is left of it is being ended, to go back to its newest set; so many looks so far.
    Ending { lost: Option<HostId>, why: String, looks: u32 },
    /// It is started again.
    Restarting,
}

/// A job with checkpoints.
#[derive(Debug, Default)]
struct Job {
    doing: Doing,
    /// Pause between checkpoints; none when they are made on demand only.
    every: Option<Micros>,
    waiters: Vec<(Tid, RequestId)>,
    /// It is to end when its checkpoint is complete.
    ends: bool,
    /// It is not looked after before this.
    due: Micros,
    tries: u32,
    /// All that were ever seen to belong to it.
    members: BTreeSet<Tid>,
    /// The newest set, and who is in it.
    newest: Option<(String, BTreeSet<Tid>)>,
}

/// Why tasks are counted.
#[derive(Clone, Debug, PartialEq)]
enum Purpose {
    /// A checkpoint of this job is to begin.
    Begin(Tid),
    /// All tasks of this one stand still.
    Verify(CutId),
    /// The last tasks of this job are to be gone.
    Gone(Tid),
    /// None of the tasks that are to be started may be alive.
    Restart(u64),
}

#[derive(Debug)]
struct Count {
    purpose: Purpose,
    missing: usize,
    tasks: Vec<TaskInfo>,
    /// A host that has not answered: what it has nobody knows.
    mute: Option<HostId>,
}

/// A set that is to be started again.
#[derive(Debug)]
struct Wanted {
    set: String,
    on: Vec<String>,
    waiter: Option<(Tid, RequestId)>,
    why: String,
    meta: Option<SetMeta>,
    begun: Option<RestartId>,
}

/// The master's part.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    pub(super) cuts: Cuts,
    pub(super) restarts: Restarts,
    jobs: BTreeMap<Tid, Job>,
    counts: BTreeMap<u64, Count>,
    last_count: u64,
    wanted: BTreeMap<u64, Wanted>,
    last_wanted: u64,
    /// Parts that are being unpacked and sent.
    unpacked: BTreeSet<MigrationId>,
    /// Size and tasks of the set that is being sealed.
    sealing: BTreeMap<CutId, Vec<Tid>>,
    sealed: BTreeMap<CutId, (String, u64)>,
    /// The latest timeline, and that of each task that began again.
    line: u16,
    lines: BTreeMap<Tid, u16>,
    /// When this virtual machine was founded, as time of day.
    founded: Micros,
}

impl Keeping {
    /// When [`super::Event::Wake`] is wanted, if at all.
    pub(super) fn next_wakeup(&self) -> Option<Micros> {
        self.cuts.next_wakeup().into_iter().chain(self.restarts.next_wakeup()).min()
    }

    /// This virtual machine exists since then.
    pub(super) fn found(&mut self, now: Micros) {
        if self.founded == Micros(0) {
            self.founded = now;
        }
    }

    /// Forgets a job with which nothing is to be done, if there are too many.
    fn has_room_for(&mut self, job: Tid) -> bool {
        if self.jobs.len() < JOBS_MAX || self.jobs.contains_key(&job) {
            return true;
        }
        let idle = |entry: &Job| entry.every.is_none() && entry.doing == Doing::Nothing && entry.waiters.is_empty();
        let idle = self.jobs.iter().find(|(_, entry)| idle(entry)).map(|(tid, _)| *tid);
        idle.is_some_and(|idle| self.jobs.remove(&idle).is_some())
    }

    fn job_of_cut(&self, cut: CutId) -> Option<Tid> {
        self.jobs.iter().find(|(_, job)| job.doing == Doing::Cutting(cut)).map(|(tid, _)| *tid)
    }

    fn wanted_of(&self, restart: RestartId) -> Option<u64> {
        self.wanted.iter().find(|(_, wanted)| wanted.begun == Some(restart)).map(|(number, _)| *number)
    }
}

impl Machine {
    /// Tasks in checkpoints have numbers up to this on a host.
    pub(super) fn spared_on(&self, host: HostId) -> u32 {
        self.config.spared.get(&host).copied().unwrap_or_default()
    }

    fn keeping(&mut self) -> Option<&mut Keeping> {
        self.master.as_mut().map(|master| &mut master.keeping)
    }

    // ---- what is wanted

    /// Master: somebody wants a checkpoint.
    pub(super) fn checkpoint_wanted(
        &mut self,
        (tid, id): (Tid, RequestId),
        job: Tid,
        every: Option<Micros>,
        end: bool,
    ) {
        let Some(keeping) = self.keeping() else { return };
        if !keeping.has_room_for(job) {
            let reason = format!("{JOBS_MAX} jobs are checkpointed again and again already, the limit");
            return self.fail(tid, id, PvmError::OutOfRes, reason);
        }
        let entry = keeping.jobs.entry(job).or_default();
        match every {
            Some(Micros(0)) => {
                entry.every = None;
                return self.reply(tid, id, Reply::Done);
            }
            Some(every) => entry.every = Some(every.max(EVERY_MIN)),
            None => {}
        }
        entry.waiters.push((tid, id));
        entry.ends |= end && matches!(entry.doing, Doing::Nothing | Doing::Counting);
        match entry.doing {
            Doing::Nothing => self.begin_count(job),
            // Who comes while one is being counted has that one; one that stands still already may be too old for him.
            Doing::Counting => {}
            Doing::Cutting(_) | Doing::Ending { .. } | Doing::Restarting => {
                entry.waiters.pop();
                self.reply(tid, id, Reply::Checkpointed(Err(CutFailure::UnderWay)));
            }
        }
    }

    fn begin_count(&mut self, job: Tid) {
        if let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) {
            entry.doing = Doing::Counting;
            self.count(Purpose::Begin(job));
        }
    }

    /// Asks all hosts for their tasks.
    fn count(&mut self, purpose: Purpose) {
        let hosts: Vec<HostId> = self.table.hosts.iter().map(|host| host.id).collect();
        let Some(keeping) = self.keeping() else { return };
        keeping.last_count += 1;
        let number = keeping.last_count;
        keeping.counts.insert(number, Count { purpose, missing: hosts.len(), tasks: Vec::new(), mute: None });
        for host in hosts {
            self.ask(host, Question::Tasks { only: None }, Asker::Count { count: number, host });
        }
    }

    /// One host has named its tasks, or is lost.
    pub(super) fn counted(&mut self, number: u64, tasks: Result<Vec<TaskInfo>, HostId>) {
        let Some(keeping) = self.keeping() else { return };
        let Some(count) = keeping.counts.get_mut(&number) else { return };
        match tasks {
            Ok(tasks) => count.tasks.extend(tasks),
            Err(host) => count.mute = Some(host),
        }
        count.missing -= 1;
        if count.missing > 0 {
            return;
        }
        let Some(Count { purpose, tasks, mute, .. }) = keeping.counts.remove(&number) else { return };
        match (purpose, mute) {
            (Purpose::Begin(job), None) => self.begin_cut(job, &tasks),
            // A set without the tasks of that host would be none of the job.
            (Purpose::Begin(job), Some(host)) => self.not_counted(job, host),
            (Purpose::Verify(cut), None) => self.verify_cut(cut, &tasks),
            (Purpose::Verify(cut), Some(host)) => {
                if let Some(keeping) = self.keeping() {
                    keeping.cuts.not_counted(cut, host);
                }
            }
            (Purpose::Gone(job), None) => self.look_whether_gone(job, &tasks),
            (Purpose::Gone(job), Some(_)) => self.schedule(job, GONE_PAUSE),
            (Purpose::Restart(wanted), None) => self.begin_restart(wanted, &tasks),
            (Purpose::Restart(wanted), Some(host)) => {
                self.restart_over(wanted, Err(RestartFailure::HostLost(host)));
            }
        }
    }

    fn not_counted(&mut self, job: Tid, host: HostId) {
        let counting = self.keeping().and_then(|k| k.jobs.get(&job)).is_some_and(|job| job.doing == Doing::Counting);
        if counting {
            self.cut_over(job, Err(CutFailure::HostLost(host)));
        }
    }

    /// Looks after a job then, and not before.
    fn schedule(&mut self, job: Tid, after: Micros) {
        let due = self.now + after;
        if let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) {
            entry.due = due;
            self.timer(after, Timer::Job(job));
        }
    }

    // ---- a checkpoint

    fn begin_cut(&mut self, job: Tid, tasks: &[TaskInfo]) {
        let now = self.now;
        let Some(master) = self.master.as_deref_mut() else { return };
        let keeping = &mut master.keeping;
        let Some(entry) = keeping.jobs.get_mut(&job).filter(|entry| entry.doing == Doing::Counting) else { return };
        let all = members(job, &mut entry.members, tasks);
        if all.is_empty() {
            return self.cut_over(job, Err(CutFailure::NoSuchJob(job)));
        }
        if all.len() > SET_TASKS_MAX {
            return self.cut_over(job, Err(CutFailure::TooMany { tasks: all.len() }));
        }
        let coordinator = &mut master.directing.coordinator;
        let moving = all.iter().find_map(|task| Some((task.tid, coordinator.of_task(task.tid)?.id)));
        if let Some((tid, id)) = moving {
            let why = Failure::Refused(vec![sempa_proto::migration::Refusal::AlreadyMoving(id)]);
            return self.cut_over(job, Err(CutFailure::Task { tid, step: Step::Inspect, why }));
        }
        let parts: Vec<_> = all.iter().map(|task| (coordinator.next_id(), task.tid, task.host)).collect();
        let cut = keeping.cuts.begin(now, job, &parts);
        if let Some(entry) = keeping.jobs.get_mut(&job) {
            entry.doing = Doing::Cutting(cut);
        }
        self.out.push_back(Output::BeginSet { cut, job });
    }

    /// The store has room for it, or not.
    pub(super) fn set_begun(&mut self, cut: CutId, result: Result<(), String>) {
        let now = self.now;
        if let Some(keeping) = self.keeping() {
            keeping.cuts.room(now, cut, result);
        }
    }

    fn verify_cut(&mut self, cut: CutId, tasks: &[TaskInfo]) {
        let now = self.now;
        let Some(keeping) = self.keeping() else { return };
        let Some(job) = keeping.job_of_cut(cut) else { return };
        let Some(entry) = keeping.jobs.get_mut(&job) else { return };
        let tids: Vec<Tid> = members(job, &mut entry.members, tasks).iter().map(|task| task.tid).collect();
        keeping.cuts.counted(now, cut, &tids);
    }

    /// Carries out what the protocols ask for; true if they asked for anything.
    pub(super) fn pump_keeping(&mut self) -> bool {
        let mut busy = false;
        while let Some(output) = self.keeping().and_then(|k| k.cuts.poll()) {
            busy = true;
            self.cutter_does(output);
        }
        while let Some(output) = self.keeping().and_then(|k| k.restarts.poll()) {
            busy = true;
            self.restarter_does(output);
        }
        busy
    }

    fn cutter_does(&mut self, output: CutOutput) {
        let me = self.config.host;
        match output {
            CutOutput::Order { host, of, order } => self.order_move(host, of, order),
            CutOutput::Count(cut) => self.count(Purpose::Verify(cut)),
            CutOutput::Expect(of) if of.from == me => {}
            CutOutput::Expect(of) => self.out.push_back(Output::ExpectImages { migration: of.id, from: of.from }),
            CutOutput::Keep { cut, of } => {
                self.out.push_back(Output::KeepPart { cut, migration: of.id, tid: of.tid });
            }
            CutOutput::Seal { cut, parts } => self.seal(cut, parts),
            CutOutput::Abandon { cut, parts } => {
                for migration in parts {
                    self.out.push_back(Output::DropImages { migration });
                }
                self.out.push_back(Output::AbandonSet { cut });
            }
            CutOutput::Ended { cut, result } => self.cut_ended(cut, result),
        }
    }

    fn seal(&mut self, cut: CutId, parts: Vec<(Tid, HostId, TaskFacts)>) {
        let name = |host: HostId| self.table.get(host).map(|entry| entry.name.clone()).unwrap_or_default();
        let Some(lines) = self.master.as_ref().map(|master| &master.keeping.lines) else { return };
        let line = |tid: Tid| lines.get(&tid).copied().unwrap_or_default();
        let part = |(tid, host, facts)| PartMeta { tid, host: name(host), facts, line: line(tid) };
        let parts: Vec<PartMeta> = parts.into_iter().map(part).collect();
        let Some(master) = self.master.as_deref_mut() else { return };
        let Some(job) = master.keeping.job_of_cut(cut) else { return };
        let members: Vec<Tid> = parts.iter().map(|part| part.tid).collect();
        let groups = master.groups.saved(&members);
        let Keeping { line, founded: vm, .. } = master.keeping;
        master.keeping.sealing.insert(cut, members);
        let meta = SetMeta { version: SET_VERSION, wire: WIRE_VERSION, vm, job, line, parts, groups };
        self.out.push_back(Output::SealSet { cut, meta: Box::new(meta) });
    }

    /// The set is complete, or is not.
    pub(super) fn set_sealed(&mut self, cut: CutId, result: Result<(String, u64), String>) {
        let Some(keeping) = self.keeping() else { return };
        let result = result.map(|sealed| {
            keeping.sealed.insert(cut, sealed);
        });
        keeping.cuts.sealed(cut, result);
    }

    fn cut_ended(&mut self, cut: CutId, result: Result<Micros, CutFailure>) {
        let Some(keeping) = self.keeping() else { return };
        let (tasks, sealed) = (keeping.sealing.remove(&cut), keeping.sealed.remove(&cut));
        let Some(job) = keeping.job_of_cut(cut) else { return };
        let result = result.and_then(|frozen| {
            let (set, bytes) = sealed.ok_or_else(|| CutFailure::Store("the set was lost".into()))?;
            Ok(SetReport { set, job, tasks: tasks.unwrap_or_default(), bytes, frozen })
        });
        self.cut_over(job, result);
    }

    /// A checkpoint of a job has ended, or did not begin.
    fn cut_over(&mut self, job: Tid, result: Result<SetReport, CutFailure>) {
        let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) else { return };
        entry.doing = Doing::Nothing;
        entry.tries += 1;
        if result.as_ref().err().is_some_and(CutFailure::may_try_again) && entry.tries < TRIES_MAX {
            return self.schedule(job, TRY_PAUSE);
        }
        entry.tries = 0;
        let waiters = std::mem::take(&mut entry.waiters);
        let ends = std::mem::take(&mut entry.ends) && result.is_ok();
        if ends {
            entry.every = None;
        }
        let every = entry.every;
        if let Ok(report) = &result {
            entry.newest = Some((report.set.clone(), report.tasks.iter().copied().collect()));
            entry.members.retain(|tid| report.tasks.contains(tid));
        }
        let gone = matches!(result, Err(CutFailure::NoSuchJob(_)));
        match (&result, every) {
            // It has ended; its sets stay until the store needs the room.
            _ if gone => self.forget_job(job),
            (_, Some(every)) => self.schedule(job, every),
            _ => {}
        }
        for tid in result.iter().filter(|_| ends).flat_map(|report| report.tasks.clone()) {
            self.ask_about(tid, Question::Signal { tid, signal: SIGKILL }, Asker::Nobody);
        }
        self.record(match &result {
            Ok(SetReport { set, tasks, bytes, frozen, .. }) => EventKind::Checkpointed {
                set: set.clone(),
                job,
                tasks: u32::try_from(tasks.len()).unwrap_or(u32::MAX),
                bytes: *bytes,
                frozen: *frozen,
            },
            Err(why) => EventKind::CheckpointFailed { job, why: why.to_string() },
        });
        for (tid, id) in waiters {
            self.reply(tid, id, Reply::Checkpointed(result.clone()));
        }
    }

    fn forget_job(&mut self, job: Tid) {
        if let Some(keeping) = self.keeping() {
            keeping.jobs.remove(&job);
        }
    }

    /// The time has come for the next checkpoint of a job, or for another try, or for a look at what is left of it.
    pub(super) fn job_due(&mut self, job: Tid) {
        let now = self.now;
        let Some(entry) = self.keeping().and_then(|k| k.jobs.get(&job)).filter(|job| job.due <= now) else { return };
        match entry.doing {
            Doing::Nothing if entry.every.is_some() || !entry.waiters.is_empty() => self.begin_count(job),
            Doing::Ending { .. } => self.count(Purpose::Gone(job)),
            _ => {}
        }
    }

    // ---- the end that a task's host has in it

    /// A task has been written and goes on: its images go to the store.
    pub(super) fn deposit(&mut self, id: MigrationId, tid: Tid) {
        let Some(task) = self.tasks.get(tid) else { return };
        // What links carry is in the memory of the tasks; words about routes were about those of that time.
        let item = |held: &Held| match held {
            Held::Item(ToTask::Route { .. }) | Held::Link(_) => None,
            Held::Item(item) => Some(item.clone()),
        };
        let waiting = task.inbox.queue.iter().filter_map(item).collect();
        let record = Box::new(PartRecord { version: SET_VERSION, record: self.record_of(task), waiting });
        let to = self.master.is_none().then_some(HostId::MASTER);
        if to.is_some() {
            self.moves.deposits.insert(id);
        }
        self.out.push_back(Output::Deposit { migration: id, record, to });
    }

    /// The images of a part have left for the master, or could not.
    pub(super) fn deposited(&mut self, id: MigrationId, result: Result<(), Failure>) {
        if self.moves.deposits.remove(&id) {
            self.out.push_back(Output::DropImages { migration: id });
            if let Err(why) = result {
                self.report(id, Report::Failed { step: Step::Transfer, why });
            }
        }
    }

    // ---- the store's end

    /// True for the images of a part of a checkpoint that is under way.
    pub(super) fn is_part_of_cut(&self, id: MigrationId) -> bool {
        self.master.as_ref().is_some_and(|master| master.keeping.cuts.of_part(id).is_some())
    }

    /// The images of a part are here, or did not arrive.
    pub(super) fn part_received(&mut self, id: MigrationId, result: Result<(), Failure>) {
        if let Some(keeping) = self.keeping() {
            keeping.cuts.received(id, result);
        }
    }

    /// A part is in the store, or not.
    pub(super) fn part_kept(&mut self, id: MigrationId, result: Result<(), String>) {
        let now = self.now;
        self.out.push_back(Output::DropImages { migration: id });
        if let Some(keeping) = self.keeping() {
            keeping.cuts.kept(now, id, result);
        }
    }

    // ---- a restart

    /// Master: somebody wants a set started again.
    pub(super) fn restart_wanted(&mut self, tid: Tid, id: RequestId, set: String, on: Vec<String>) {
        let why = format!("{tid} asked for it");
        self.restart_set(set, on, Some((tid, id)), why);
    }

    fn restart_set(&mut self, set: String, on: Vec<String>, waiter: Option<(Tid, RequestId)>, why: String) {
        let Some(keeping) = self.keeping() else { return };
        keeping.last_wanted += 1;
        let restart = keeping.last_wanted;
        let wanted = Wanted { set: set.clone(), on, waiter, why, meta: None, begun: None };
        keeping.wanted.insert(restart, wanted);
        self.out.push_back(Output::OpenSet { restart, set });
    }

    /// The store has looked into a set.
    pub(super) fn set_opened(&mut self, number: u64, result: Result<SetMeta, String>) {
        let Some(wanted) = self.keeping().and_then(|k| k.wanted.get_mut(&number)) else { return };
        match result {
            Ok(meta) if meta.wire != WIRE_VERSION => {
                let why = format!(
                    "the libraries in this set speak version {}, and this virtual machine speaks {WIRE_VERSION}: start it \
                     with the version by which it was made",
                    meta.wire
                );
                self.restart_over(number, Err(RestartFailure::Store(why)));
            }
            Ok(meta) => {
                wanted.meta = Some(meta);
                self.count(Purpose::Restart(number));
            }
            Err(why) => self.restart_over(number, Err(RestartFailure::Store(why))),
        }
    }

    fn begin_restart(&mut self, number: u64, tasks: &[TaskInfo]) {
        let now = self.now;
        let begun = self.plan_restart(number, tasks);
        let (job, timeline, candidates) = match begun {
            Ok(plan) => plan,
            Err(why) => return self.restart_over(number, Err(why)),
        };
        let Some(master) = self.master.as_deref_mut() else { return };
        let (keeping, coordinator) = (&mut master.keeping, &mut master.directing.coordinator);
        keeping.line = timeline.line;
        keeping.lines.extend(timeline.members.iter().map(|(tid, _)| (*tid, timeline.line)));
        while keeping.lines.len() > LINES_MAX {
            keeping.lines.pop_first();
        }
        let id = keeping.restarts.begin(now, job, timeline, candidates, || coordinator.next_id());
        if let Some(wanted) = keeping.wanted.get_mut(&number) {
            wanted.begun = Some(id);
        }
        let entry = keeping.jobs.entry(job).or_default();
        entry.doing = Doing::Restarting;
    }

    /// Where each task may be started, if nothing stands in the way.
    fn plan_restart(&self, number: u64, tasks: &[TaskInfo]) -> Result<(Tid, Timeline, Vec<Candidate>), RestartFailure> {
        let gone = || RestartFailure::Store("the set is not open any more".into());
        let keeping = self.master.as_ref().map(|master| &master.keeping).ok_or_else(gone)?;
        let wanted = keeping.wanted.get(&number).ok_or_else(gone)?;
        let meta = wanted.meta.as_ref().ok_or_else(gone)?;
        let job = keeping.jobs.get(&meta.job);
        let waits = wanted.waiter.is_none();
        if job.is_some_and(|job| !matches!(job.doing, Doing::Nothing) && !(waits && job.doing == Doing::Restarting)) {
            return Err(RestartFailure::UnderWay);
        }
        let members: Vec<Tid> = meta.parts.iter().map(|part| part.tid).collect();
        let alive: Vec<Tid> = tasks.iter().map(|task| task.tid).filter(|tid| members.contains(tid)).collect();
        if !alive.is_empty() {
            return Err(RestartFailure::Alive(alive));
        }
        let taken = self.master.as_ref().map(|master| master.groups.taken(&meta.groups)).unwrap_or_default();
        if !taken.is_empty() {
            return Err(RestartFailure::Groups(taken));
        }
        let mut on = Vec::new();
        for name in &wanted.on {
            on.push(self.host_named(name).ok_or_else(|| RestartFailure::NoHost(name.clone()))?);
        }
        let all: Vec<HostId> = self.table.hosts.iter().map(|host| host.id).collect();
        let mut candidates = Vec::new();
        for (turn, part) in meta.parts.iter().enumerate() {
            let mut hosts = if on.is_empty() { all.clone() } else { on.clone() };
            let many = hosts.len().max(1);
            hosts.rotate_left(turn % many);
            let home = self.table.by_name(&part.host).map(|entry| entry.id).filter(|_| on.is_empty());
            hosts.sort_by_key(|host| Some(*host) != home);
            candidates.push(Candidate { tid: part.tid, facts: without_lengths(&part.facts), hosts });
        }
        let line = keeping.line.max(meta.line).wrapping_add(1).max(1);
        let members = meta.parts.iter().map(|part| (part.tid, part.line)).collect();
        Ok((meta.job, Timeline { line, members, same: meta.vm == keeping.founded }, candidates))
    }

    fn restarter_does(&mut self, output: RestartOutput) {
        let me = self.config.host;
        match output {
            RestartOutput::Order { host, of, order } => self.order_move(host, of, order),
            RestartOutput::Send { restart, of } => {
                let Some(keeping) = self.keeping() else { return };
                let Some(number) = keeping.wanted_of(restart) else { return };
                let to = (of.to != me).then_some(of.to);
                if to.is_some() {
                    keeping.unpacked.insert(of.id);
                }
                self.out.push_back(Output::SendPart { restart: number, migration: of.id, tid: of.tid, to });
            }
            RestartOutput::Locate(of) => {
                self.join_again(of.id);
                self.locate(&of);
            }
            RestartOutput::Ended { restart, result } => {
                let Some(number) = self.keeping().and_then(|k| k.wanted_of(restart)) else { return };
                let result = result.map(|tasks| {
                    let set = self.keeping().and_then(|k| k.wanted.get(&number)).map(|w| w.set.clone());
                    RestartReport { set: set.unwrap_or_default(), tasks }
                });
                self.restart_over(number, result);
            }
        }
    }

    /// The tasks of a set are members again of the groups that they were in.
    fn join_again(&mut self, part: MigrationId) {
        let Some(master) = self.master.as_deref_mut() else { return };
        let restart = master.keeping.restarts.of_part(part);
        let number = restart.and_then(|restart| master.keeping.wanted_of(restart));
        let meta = number.and_then(|number| master.keeping.wanted.get_mut(&number)?.meta.as_mut());
        if let Some(meta) = meta {
            master.groups.restore(&std::mem::take(&mut meta.groups));
        }
    }

    /// True for images that the store has given out for this part.
    pub(super) fn is_unpacked_here(&self, id: MigrationId) -> bool {
        self.master.as_ref().is_some_and(|master| master.keeping.unpacked.contains(&id))
    }

    /// The images of a part have left the store for their host, or could not.
    pub(super) fn part_sent(&mut self, id: MigrationId, result: Result<(), Failure>) {
        let Some(keeping) = self.keeping() else { return };
        keeping.unpacked.remove(&id);
        if let Err(why) = result {
            keeping.restarts.not_sent(id, why);
        }
        self.out.push_back(Output::DropImages { migration: id });
    }

    /// The restart of a set has ended, or did not begin.
    fn restart_over(&mut self, number: u64, result: Result<RestartReport, RestartFailure>) {
        self.out.push_back(Output::CloseSet { restart: number });
        let Some(keeping) = self.keeping() else { return };
        let Some(Wanted { set, waiter, why, meta, begun, .. }) = keeping.wanted.remove(&number) else { return };
        let job = meta.as_ref().map(|meta| meta.job).unwrap_or_default();
        let members: BTreeSet<Tid> = meta.iter().flat_map(|meta| &meta.parts).map(|part| part.tid).collect();
        let mut next = None;
        // Else a host was lost meanwhile, and it goes back once more.
        if let Some(entry) = keeping.jobs.get_mut(&job).filter(|entry| entry.doing == Doing::Restarting) {
            entry.doing = Doing::Nothing;
            entry.tries += 1;
            if result.is_ok() {
                (entry.newest, next) = (Some((set.clone(), members.clone())), entry.every);
                entry.members.clone_from(&members);
                entry.tries = 0;
            } else if waiter.is_none() && entry.tries < TRIES_MAX {
                // What stands in the way may go away.
                entry.doing = Doing::Ending { lost: None, why: why.clone(), looks: 0 };
                next = Some(RESTART_PAUSE);
            } else {
                keeping.jobs.remove(&job);
            }
        }
        if let Some(next) = next {
            self.schedule(job, next);
        }
        if result.is_err() && begun.is_some() {
            // They may have been in their groups again already.
            members.iter().for_each(|tid| self.member_ended(*tid));
        }
        self.record(match &result {
            Ok(report) => EventKind::Restarted { set: set.clone(), job, tasks: report.tasks.clone(), why },
            Err(failure) => EventKind::RestartFailed { set: set.clone(), cause: why, why: failure.to_string() },
        });
        if let Some((tid, id)) = waiter {
            self.reply(tid, id, Reply::Restarted(result));
        }
    }

    /// What lay beside the images of a task that is started again here.
    pub(super) fn part_read(&mut self, id: MigrationId, result: Result<PartRecord, Failure>) {
        // It may have been thrown away meanwhile: then nothing must be built.
        if !self.moves.is_restoring(id) {
            return;
        }
        let rebuilt = result.and_then(|part| self.rebuild(id, part));
        match rebuilt {
            Ok(order) => self.tell_tasker(order),
            Err(why) => self.target_event(id, TargetEvent::Restored(Err(why))),
        }
    }

    /// Makes a task's record that of a task that begins again, and the order that builds it.
    fn rebuild(&mut self, id: MigrationId, part: PartRecord) -> Result<ToTasker, Failure> {
        let bad = |why: &str| Failure::Images(format!("what lies beside the images: {why}"));
        if part.version != SET_VERSION {
            return Err(bad(&format!("version {} was written, {SET_VERSION} is understood", part.version)));
        }
        let place = self.config.place.clone();
        let redirect = Redirect { migration: id, tokens: vec![place.token(id)] };
        let bytes = redirect.in_memory().map_err(Failure::Engine)?;
        let PartRecord { mut record, waiting, .. } = part;
        let again = Some(Redirection { place: record.redirect_at, bytes });
        let (mut output, mut trace) = Default::default();
        self.default_sinks(&mut output, &mut trace);
        let (hosts, epoch) = (self.table.hosts.iter().map(|host| host.id).collect(), self.table.epoch);
        let arrival = self.arrival_of(id).ok_or(Failure::TaskEnded)?;
        let tid = arrival.tid;
        if record.tid != tid {
            return Err(bad(&format!("it is about {}, not about {tid}", record.tid)));
        }
        let timeline = arrival.begins.take().ok_or(Failure::TaskEnded)?;
        let known = |tid: Tid| timeline.same || timeline.before(tid).is_some();
        if !known(record.output.tid) {
            record.output = output;
        }
        if !known(record.trace.tid) {
            record.trace = trace;
        }
        record.marks.retain(|mark| timeline.before(mark.peer).is_some());
        (record.hosts, record.epoch, record.rm) = (hosts, epoch, None);
        let open = std::mem::take(&mut record.requests);
        record.meetings.clear();
        record.restart = Some(Restart { timeline, again: open });
        arrival.take_whole(record, waiting);
        let dir = place.images(id);
        Ok(ToTasker::Restore { migration: id, tid, dir, again })
    }

    // ---- going back

    /// Master: a host is lost. Jobs that are checkpointed again and again and had tasks there go back to their newest set.
    pub(super) fn jobs_lost_host(&mut self, host: HostId) {
        if self.stop.is_some() {
            return;
        }
        let Some(keeping) = self.master.as_ref().map(|master| &master.keeping) else { return };
        let had = |job: &Job| job.members.iter().any(|tid| self.location(*tid) == Some(host));
        let concerned = keeping.jobs.iter().filter(|(_, job)| {
            job.every.is_some() && job.newest.is_some() && !matches!(job.doing, Doing::Ending { .. }) && had(job)
        });
        let concerned: Vec<(Tid, BTreeSet<Tid>)> = concerned.map(|(tid, job)| (*tid, job.members.clone())).collect();
        let name = self.table.get(host).map_or_else(|| host.to_string(), |entry| entry.name.clone());
        for (job, members) in concerned {
            let why = format!("{name} was lost");
            let mut waiters = Vec::new();
            if let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) {
                entry.doing = Doing::Ending { lost: Some(host), why, looks: 0 };
                (waiters, entry.tries) = (std::mem::take(&mut entry.waiters), 0);
            }
            for (tid, id) in waiters {
                self.reply(tid, id, Reply::Checkpointed(Err(CutFailure::HostLost(host))));
            }
            for tid in members {
                if self.location(tid).is_some_and(|at| at != host) {
                    self.ask_about(tid, Question::Signal { tid, signal: SIGKILL }, Asker::Nobody);
                }
            }
            self.schedule(job, GONE_PAUSE);
        }
    }

    /// What is left of a job that goes back.
    fn look_whether_gone(&mut self, job: Tid, tasks: &[TaskInfo]) {
        let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) else { return };
        let Doing::Ending { lost, why, looks } = &mut entry.doing else { return };
        *looks += 1;
        let (lost, why, looks) = (*lost, why.clone(), *looks);
        let left: Vec<Tid> = members(job, &mut entry.members, tasks).iter().map(|task| task.tid).collect();
        let Some((set, _)) = entry.newest.clone() else { return self.forget_job(job) };
        // The lost host is in the table until all daemons know; nothing is started before that.
        if left.is_empty() && lost.is_none_or(|lost| self.table.get(lost).is_none()) {
            if let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) {
                entry.doing = Doing::Restarting;
            }
            return self.restart_set(set, Vec::new(), None, why);
        }
        if looks >= GONE_LOOKS_MAX {
            let cause = format!("{why}, and {} of its tasks do not end", left.len());
            self.record(EventKind::RestartFailed { set, cause, why: "it would run twice".into() });
            return self.forget_job(job);
        }
        for tid in left {
            // Also those that the job has spawned since it was last counted.
            self.ask_about(tid, Question::Signal { tid, signal: SIGKILL }, Asker::Nobody);
        }
        self.schedule(job, GONE_PAUSE);
    }
}

/// What has to be there for a task that is started again. Files may have grown since, by what it wrote: they are cut back
/// before it is built, and whether others have the length that they had the engine looks then.
fn without_lengths(facts: &TaskFacts) -> TaskFacts {
    let mut facts = facts.clone();
    for file in facts.files.iter_mut().filter(|file| file.must == FileMatch::Length) {
        file.must = FileMatch::Exists;
    }
    facts
}

/// The tasks of a job among all tasks: the first one, those that were members before, and everything that any of them has
/// spawned. What serves the virtual machine belongs to no job.
fn members(job: Tid, known: &mut BTreeSet<Tid>, tasks: &[TaskInfo]) -> Vec<TaskInfo> {
    known.insert(job);
    loop {
        let before = known.len();
        let children = tasks.iter().filter(|task| known.contains(&task.parent)).map(|task| task.tid);
        let children: Vec<Tid> = children.collect();
        known.extend(children);
        if known.len() == before {
            break;
        }
    }
    let mut all: Vec<TaskInfo> = tasks.iter().filter(|task| known.contains(&task.tid)).cloned().collect();
    // In the moment of a move both ends may know the task.
    all.sort_by_key(|task| (task.tid, task.moving));
    all.dedup_by_key(|task| task.tid);
    all
}
