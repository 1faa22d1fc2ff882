//! Checkpoints of jobs and what becomes of them: the glue between the protocol, this daemon's tasks, and the store, which
//! the master keeps.
//!
//! A job is a task and everything that it and its descendants have spawned. The master finds them by asking all hosts, so it
//! needs no resource manager for it. What was a member once stays one, also when its parent has ended.
//!
//! A job that is checkpointed again and again goes back to its newest set when a host is lost that had tasks of it: those
//! that are left are killed before anybody is told of the loss, and when all are gone the set is started again.

mod back;
mod copies;
mod ends;
mod fallen;
mod last_words;
mod restart;
mod unwanted;
mod way;

pub use copies::{COPIES_MAX, Copies};
pub(super) use last_words::Ends;

use super::asks::Asker;
use super::tasks::Task;
use super::{Machine, Output, Timer};
use checkpoint_protocol::{CutId, CutOutput, Cuts, RestartId, Restarts, SourceEvent};
use sempa_proto::checkpoint::{
    CutFailure, Pace, PartMeta, PartRecord, RestartFailure, SET_TASKS_MAX, SET_VERSION, SavedEntry,
    SavedGroup, SetMeta, SetReport,
};
use sempa_proto::event::EventKind;
use sempa_proto::host::{Held, Question};
use sempa_proto::migration::{Failure, Report, Step, TaskFacts};
use sempa_proto::table::{TASK_SERVES, TaskInfo};
use sempa_proto::task::{Reply, ToTask};
use sempa_proto::{HostId, Micros, MigrationId, PvmError, RequestId, Tid, WIRE_VERSION};
use std::collections::{BTreeMap, BTreeSet};

/// Jobs that are remembered for their checkpoints. Those with which nothing is to be done go first; then one more is refused.
const JOBS_MAX: usize = 1024;
/// How often a checkpoint is begun again because the job was changing, and how often a job that goes back is started soon after it
/// could not be.
const TRIES_MAX: u32 = 10;
/// Pause before that.
const TRY_PAUSE: Micros = Micros::from_millis(200);
/// Pause before that, when a program is still writing what it was asked for before. All tries together take as long as it may.
const WRITING_PAUSE: Micros = Micros::from_secs(6);
/// Pause before a job that goes back is started once more. After [`TRIES_MAX`] times it doubles with each, up to the other one: nobody
/// may be there who would start it by hand, and the host that it lacks may come back days later.
const RESTART_PAUSE: Micros = Micros::from_secs(2);
const RESTART_PAUSE_MAX: Micros = Micros::from_secs(600);
/// Tasks of which it is remembered on which timeline they began again.
const LINES_MAX: usize = 1 << 20;
/// After a host is lost its tasks are dead: its daemon ended by its own, shorter lease, and its tasker with it. This is the
/// margin for killing.
const FENCE_TIME: Micros = Micros::from_secs(2);
/// How often it is looked whether the last tasks of a job that goes back are gone.
const GONE_PAUSE: Micros = Micros::from_millis(20);
/// Looks at most.
const GONE_LOOKS_MAX: u32 = 1000;
/// Shortest pause between the end of one checkpoint of a job and the beginning of the next.
const PAUSE_MIN: Micros = Micros::from_millis(500);
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
    /// What is left of it is being ended, to go back to its newest set, when this host is gone and not before this time; so
    /// many looks so far.
    Ending {
        lost: Option<HostId>,
        not_before: Micros,
        why: String,
        looks: u32,
    },
    /// Its checkpoint is complete, and it is being ended; so many looks so far.
    Leaving { report: SetReport, looks: u32 },
    /// It is started again.
    Restarting,
}

/// A job with checkpoints.
#[derive(Debug, Default)]
struct Job {
    doing: Doing,
    /// When the next one is made by itself; none when they are made on demand only.
    pace: Option<Pace>,
    /// When the one that is under way was begun, with its first try.
    began: Micros,
    waiters: Vec<(Tid, RequestId)>,
    /// It is to end when its checkpoint is complete.
    ends: bool,
    /// The resource manager wants that, and has it go on when there is room.
    parks: bool,
    /// A host of it is being emptied, and its tasks leave when they have been written.
    drains: bool,
    /// That its checkpoints take too long for the wanted bound was said.
    said_late: bool,
    /// How long the last one took.
    took: Micros,
    /// It is not looked after before this.
    due: Micros,
    tries: u32,
    /// All that were ever seen to belong to it, and those of them that have ended.
    members: BTreeSet<Tid>,
    ended: BTreeSet<Tid>,
    /// Those that may have been lost with a host.
    fallen: fallen::Fallen,
    /// The newest set.
    newest: Option<String>,
    /// The set that it was started from.
    origin: Option<String>,
    /// How its first task has come to its end.
    end: ends::End,
    copied: copies::Copied,
}

impl Job {
    /// Somebody wants a checkpoint of it now, and has not got it yet.
    fn is_wanted(&self) -> bool {
        self.ends || !self.waiters.is_empty()
    }

    /// Nothing of it runs, and it could not be started again.
    fn is_stuck(&self) -> bool {
        matches!(self.doing, Doing::Ending { .. }) && self.tries > 0
    }
}

/// What a checkpoint that is under way holds beside its tasks, as it was while all stood still, and what became of it.
#[derive(Debug, Default)]
struct Contents {
    groups: Vec<SavedGroup>,
    mailbox: Vec<SavedEntry>,
    contexts: Vec<(i32, Tid)>,
    /// Tasks of the set that is being sealed.
    members: Vec<Tid>,
    /// Those of them that have written their own checkpoints.
    own: Vec<Tid>,
    /// Its name and size.
    sealed: Option<(String, u64)>,
}

/// What hosts have named: tasks, and contexts with their owners.
#[derive(Debug, Default)]
pub(super) struct Counted {
    tasks: Vec<TaskInfo>,
    contexts: Vec<(i32, Tid)>,
}

impl Counted {
    /// What one host has named.
    pub(super) fn new(tasks: Vec<TaskInfo>, contexts: Vec<(i32, Tid)>) -> Counted {
        Counted { tasks, contexts }
    }
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
    /// This job seems to be over.
    Over(Tid),
}

#[derive(Debug)]
struct Count {
    purpose: Purpose,
    missing: usize,
    found: Counted,
    /// A host that has not answered: what it has nobody knows.
    mute: Option<HostId>,
}

/// A set that is to be started again.
#[derive(Debug)]
struct Wanted {
    set: String,
    /// The job that goes back; none when somebody asked for it, until the set says whose it is.
    job: Option<Tid>,
    on: Vec<String>,
    waiter: Option<(Tid, RequestId)>,
    why: String,
    meta: Option<SetMeta>,
    begun: Option<RestartId>,
    /// Contexts that belong to its tasks again.
    held: Vec<(i32, Tid)>,
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
    contents: BTreeMap<CutId, Contents>,
    /// The latest timeline, and that of each task that began again.
    line: u16,
    lines: BTreeMap<Tid, u16>,
    /// When this virtual machine was founded, as time of day.
    founded: Micros,
    /// Jobs all known tasks of which have ended.
    quiet: Vec<Tid>,
    /// Tasks of the whole virtual machine that have ended a moment ago.
    recent: last_words::Recent,
    copying: copies::Copying,
}

impl Keeping {
    /// When [`super::Event::Wake`] is wanted, if at all.
    pub(super) fn next_wakeup(&self) -> Option<Micros> {
        self.cuts
            .next_wakeup()
            .into_iter()
            .chain(self.restarts.next_wakeup())
            .min()
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
        let idle = |entry: &Job| {
            entry.pace.is_none() && entry.doing == Doing::Nothing && !entry.is_wanted()
        };
        let idle = self
            .jobs
            .iter()
            .find(|(_, entry)| idle(entry))
            .map(|(tid, _)| *tid);
        idle.is_some_and(|idle| self.jobs.remove(&idle).is_some())
    }

    fn job_of_cut(&self, cut: CutId) -> Option<Tid> {
        self.jobs
            .iter()
            .find(|(_, job)| job.doing == Doing::Cutting(cut))
            .map(|(tid, _)| *tid)
    }

    fn wanted_of(&self, restart: RestartId) -> Option<u64> {
        self.wanted
            .iter()
            .find(|(_, wanted)| wanted.begun == Some(restart))
            .map(|(number, _)| *number)
    }
}

impl Machine {
    /// Tasks in checkpoints have numbers up to this on a host.
    pub(super) fn spared_on(&self, host: HostId) -> u32 {
        // Where there are checkpoints each host knows of it: contexts may come from hosts that have no tasks in them.
        let least = u32::from(!self.config.spared.is_empty());
        self.config
            .spared
            .get(&host)
            .copied()
            .unwrap_or_default()
            .max(least)
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
        pace: Option<Pace>,
        end: bool,
        wait: bool,
    ) {
        let Some(keeping) = self.keeping() else {
            return;
        };
        if !keeping.has_room_for(job) {
            let reason =
                format!("{JOBS_MAX} jobs are checkpointed again and again already, the limit");
            return self.fail(tid, id, PvmError::OutOfRes, reason);
        }
        let entry = keeping.jobs.entry(job).or_default();
        match pace {
            Some(Pace::Never) => {
                entry.pace = None;
                if entry.is_stuck() {
                    self.forget_job(job);
                }
                return self.reply(tid, id, Reply::Done);
            }
            Some(pace) => (entry.pace, entry.said_late) = (Some(pace), false),
            None => {}
        }
        // Who comes while one is being counted has that one; one that stands still already may be too old for him.
        let begins = match entry.doing {
            Doing::Nothing => true,
            Doing::Counting => false,
            Doing::Cutting(_)
            | Doing::Ending { .. }
            | Doing::Leaving { .. }
            | Doing::Restarting => {
                return match wait {
                    true => self.reply(tid, id, Reply::Checkpointed(Err(CutFailure::UnderWay))),
                    false => {
                        self.fail(tid, id, PvmError::Already, CutFailure::UnderWay.to_string())
                    }
                };
            }
        };
        entry.ends |= end;
        entry.parks |= end && !wait;
        if wait {
            entry.waiters.push((tid, id));
        } else {
            self.reply(tid, id, Reply::Done);
        }
        if begins {
            self.begin_count(job);
        }
    }

    fn begin_count(&mut self, job: Tid) {
        let now = self.now;
        if let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) {
            entry.doing = Doing::Counting;
            if entry.tries == 0 {
                entry.began = now;
            }
            self.count(Purpose::Begin(job));
        }
    }

    /// Asks all hosts for their tasks.
    fn count(&mut self, purpose: Purpose) {
        let hosts: Vec<HostId> = self.table.hosts.iter().map(|host| host.id).collect();
        let Some(keeping) = self.keeping() else {
            return;
        };
        keeping.last_count += 1;
        let number = keeping.last_count;
        keeping.counts.insert(
            number,
            Count {
                purpose,
                missing: hosts.len(),
                found: Counted::default(),
                mute: None,
            },
        );
        for host in hosts {
            self.ask(
                host,
                Question::Count,
                Asker::Count {
                    count: number,
                    host,
                },
            );
        }
    }

    /// One host has named what it has, or is lost.
    pub(super) fn counted(&mut self, number: u64, found: Result<Counted, HostId>) {
        let Some(keeping) = self.keeping() else {
            return;
        };
        let Some(count) = keeping.counts.get_mut(&number) else {
            return;
        };
        match found {
            Ok(found) => {
                count.found.tasks.extend(found.tasks);
                count.found.contexts.extend(found.contexts);
            }
            Err(host) => count.mute = Some(host),
        }
        count.missing -= 1;
        if count.missing > 0 {
            return;
        }
        let Some(Count {
            purpose,
            found,
            mute,
            ..
        }) = keeping.counts.remove(&number)
        else {
            return;
        };
        match (purpose, mute) {
            (Purpose::Begin(job), None) => self.begin_cut(job, &found.tasks),
            // A set without the tasks of that host would be none of the job.
            (Purpose::Begin(job), Some(host)) => self.not_counted(job, host),
            (Purpose::Verify(cut), None) => self.verify_cut(cut, found),
            (Purpose::Verify(cut), Some(host)) => {
                if let Some(keeping) = self.keeping() {
                    keeping.cuts.not_counted(cut, CutFailure::HostLost(host));
                }
            }
            (Purpose::Gone(job), None) => self.look_whether_gone(job, &found.tasks),
            (Purpose::Gone(job), Some(_)) => self.schedule(job, GONE_PAUSE),
            (Purpose::Restart(wanted), None) => self.begin_restart(wanted, &found),
            (Purpose::Restart(wanted), Some(host)) => {
                self.restart_over(wanted, Err(RestartFailure::HostLost(host)));
            }
            (Purpose::Over(job), None) => self.look_whether_over(job, &found.tasks),
            // What was there may be wanted.
            (Purpose::Over(_), Some(_)) => {}
        }
    }

    fn not_counted(&mut self, job: Tid, host: HostId) {
        let counting = self
            .keeping()
            .and_then(|k| k.jobs.get(&job))
            .is_some_and(|job| job.doing == Doing::Counting);
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
        let (now, lease) = (self.now, self.config.lease);
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let keeping = &mut master.keeping;
        let Some(entry) = keeping
            .jobs
            .get_mut(&job)
            .filter(|entry| entry.doing == Doing::Counting)
        else {
            return;
        };
        if let Some(until) = entry
            .fallen
            .unknown_until(now, lease)
            .filter(|_| !entry.is_wanted() && !entry.drains)
        {
            // A set without those who were lost would be none of the job.
            entry.doing = Doing::Nothing;
            return self.schedule(job, until.since(now));
        }
        let all = members(job, &mut entry.members, tasks);
        if all.is_empty() {
            return self.cut_over(job, Err(CutFailure::NoSuchJob(job)));
        }
        if all.len() > SET_TASKS_MAX {
            return self.cut_over(job, Err(CutFailure::TooMany { tasks: all.len() }));
        }
        let (coordinator, cuts) = (&mut master.directing.coordinator, &keeping.cuts);
        if entry.is_wanted() && !all.iter().any(|task| cuts.of_task(task.tid).is_some()) {
            // Who only waits for his turn to leave a host has given nothing away. He is written first, and may leave then.
            let tids = all.iter().map(|task| task.tid).collect();
            entry.drains |= coordinator.give_way(&tids);
        }
        let other = |tid: Tid| {
            coordinator
                .of_task(tid)
                .or_else(|| cuts.of_task(tid))
                .map(|of| of.id)
        };
        let moving = all
            .iter()
            .find_map(|task| Some((task.tid, other(task.tid)?)));
        if let Some((tid, id)) = moving {
            let why = Failure::Refused(vec![sempa_proto::migration::Refusal::AlreadyMoving(id)]);
            return self.cut_over(
                job,
                Err(CutFailure::Task {
                    tid,
                    step: Step::Inspect,
                    why,
                }),
            );
        }
        let parts: Vec<_> = all
            .iter()
            .map(|task| (coordinator.next_id(), task.tid, task.host))
            .collect();
        let cut = keeping.cuts.begin(now, &parts);
        if let Some(entry) = keeping.jobs.get_mut(&job) {
            entry.doing = Doing::Cutting(cut);
        }
        self.out.push_back(Output::BeginSet { cut, job });
    }

    /// The store has room for it, or not.
    pub(super) fn set_begun(&mut self, cut: CutId, result: Result<(), String>) {
        let now = self.now;
        let Some(keeping) = self.keeping() else {
            return;
        };
        if keeping.cuts.is_open(cut) {
            keeping.cuts.room(now, cut, result);
        } else {
            self.out.push_back(Output::AbandonSet { cut });
        }
    }

    fn verify_cut(&mut self, cut: CutId, found: Counted) {
        let now = self.now;
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let keeping = &mut master.keeping;
        let Some(job) = keeping.job_of_cut(cut) else {
            return;
        };
        let Some(entry) = keeping.jobs.get_mut(&job) else {
            return;
        };
        let tids: Vec<Tid> = members(job, &mut entry.members, &found.tasks)
            .iter()
            .map(|task| task.tid)
            .collect();
        let mut ended = entry.ended.clone();
        if entry.newest.is_none() {
            // Who belonged to it before it was looked at nobody knows.
            ended.extend(keeping.recent.all(now));
            let lives: BTreeSet<Tid> = found.tasks.iter().map(|task| task.tid).collect();
            ended.retain(|tid| !lives.contains(tid));
        }
        let ended: Vec<Tid> = ended.into_iter().collect();
        let mailbox = match master.mailbox.saved(&tids) {
            Ok(mailbox) => mailbox,
            Err(bytes) => return keeping.cuts.not_counted(cut, CutFailure::Mailbox { bytes }),
        };
        // While all stand still nobody enters a group, or leaves one, and nobody comes to a meeting.
        let groups = master.groups.saved(&tids);
        let members: BTreeSet<Tid> = tids.iter().copied().collect();
        let contexts = found
            .contexts
            .into_iter()
            .filter(|(_, owner)| members.contains(owner))
            .collect();
        keeping.contents.insert(
            cut,
            Contents {
                groups,
                mailbox,
                contexts,
                ..Contents::default()
            },
        );
        let mut open = BTreeMap::<Tid, Vec<RequestId>>::new();
        for (tid, id) in master.groups.open().chain(master.mailbox.open()) {
            open.entry(tid).or_default().push(id);
        }
        keeping.cuts.counted(now, cut, &tids, &open, &ended);
    }

    /// Carries out what the protocols ask for; true if they asked for anything.
    pub(super) fn pump_keeping(&mut self) -> bool {
        let mut busy = self.look_at_quiet();
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
            CutOutput::Expect(of) => self.out.push_back(Output::ExpectImages {
                migration: of.id,
                from: of.from,
            }),
            CutOutput::Keep { cut, of } => {
                self.out.push_back(Output::KeepPart {
                    cut,
                    migration: of.id,
                    tid: of.tid,
                });
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
        let name = |host: HostId| {
            self.table
                .get(host)
                .map(|entry| entry.name.clone())
                .unwrap_or_default()
        };
        let Some(lines) = self.master.as_ref().map(|master| &master.keeping.lines) else {
            return;
        };
        let line = |tid: Tid| lines.get(&tid).copied().unwrap_or_default();
        let part = |(tid, host, facts)| PartMeta {
            tid,
            host: name(host),
            facts,
            line: line(tid),
        };
        let parts: Vec<PartMeta> = parts.into_iter().map(part).collect();
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let Some(job) = master.keeping.job_of_cut(cut) else {
            return master
                .keeping
                .cuts
                .sealed(cut, Err("the job goes back to an earlier one".into()));
        };
        let Keeping {
            line, founded: vm, ..
        } = master.keeping;
        let members = parts.iter().map(|part| part.tid).collect();
        let own = parts
            .iter()
            .filter(|part| part.facts.anew().is_some())
            .map(|part| part.tid)
            .collect();
        // The rest goes into the set.
        let kept = Contents {
            members,
            own,
            ..Contents::default()
        };
        let known = master
            .keeping
            .contents
            .insert(cut, kept)
            .unwrap_or_default();
        let Contents {
            groups,
            mailbox,
            contexts,
            ..
        } = known;
        let pace = master.keeping.jobs.get(&job).and_then(|entry| entry.pace);
        let (version, wire) = (SET_VERSION, WIRE_VERSION);
        let meta = SetMeta {
            version,
            wire,
            vm,
            job,
            line,
            parts,
            groups,
            mailbox,
            contexts,
            pace,
        };
        let keep = master.keeping.needed();
        self.out.push_back(Output::SealSet {
            cut,
            meta: Box::new(meta),
            keep,
        });
    }

    /// The set is complete, or is not.
    pub(super) fn set_sealed(&mut self, cut: CutId, mut result: Result<(String, u64), String>) {
        let Some(keeping) = self.master.as_deref_mut().map(|master| &mut master.keeping) else {
            return;
        };
        if let Ok((set, _)) = &result
            && keeping.job_of_cut(cut).is_none()
        {
            // It was told as failed, and its job goes back to an earlier one: files are as they were then.
            self.out.push_back(Output::DropSets {
                sets: vec![set.clone()],
            });
            result = Err("its checkpoint was over before".into());
        }
        let contents = keeping.contents.get_mut(&cut);
        let result =
            result.map(|sealed| contents.map_or((), |contents| contents.sealed = Some(sealed)));
        keeping.cuts.sealed(cut, result);
    }

    fn cut_ended(&mut self, cut: CutId, result: Result<Micros, CutFailure>) {
        let Some(keeping) = self.keeping() else {
            return;
        };
        let Contents {
            members: tasks,
            own,
            sealed,
            ..
        } = keeping.contents.remove(&cut).unwrap_or_default();
        let Some(job) = keeping.job_of_cut(cut) else {
            return;
        };
        let result = result.and_then(|frozen| {
            let (set, bytes) =
                sealed.ok_or_else(|| CutFailure::Store("the set was lost".into()))?;
            Ok(SetReport {
                set,
                job,
                tasks,
                bytes,
                frozen,
                own,
            })
        });
        self.cut_over(job, result);
    }

    /// A checkpoint of a job has ended, or did not begin.
    fn cut_over(&mut self, job: Tid, result: Result<SetReport, CutFailure>) {
        let (now, lease) = (self.now, self.config.lease);
        let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        entry.doing = Doing::Nothing;
        entry.tries += 1;
        let unknown_until = entry
            .fallen
            .unknown_until(now, lease)
            .filter(|_| entry.pace.is_some());
        if let Some(why) = result
            .as_ref()
            .err()
            .filter(|why| why.may_try_again() && entry.tries < TRIES_MAX)
        {
            return self.schedule(
                job,
                if why.is_being_written() {
                    WRITING_PAUSE
                } else {
                    TRY_PAUSE
                },
            );
        }
        (entry.tries, entry.drains) = (0, false);
        if result.is_ok() {
            entry.took = now.since(entry.began);
        }
        let parked = std::mem::take(&mut entry.parks) && entry.ends;
        let ends = std::mem::take(&mut entry.ends) && result.is_ok();
        if let (Ok(report), true) = (&result, ends) {
            // Who waits is told when it has ended.
            (entry.doing, entry.pace) = (
                Doing::Leaving {
                    report: report.clone(),
                    looks: 0,
                },
                None,
            );
        }
        let waiters = if ends {
            Vec::new()
        } else {
            std::mem::take(&mut entry.waiters)
        };
        if let Ok(report) = &result {
            entry.newest = Some(report.set.clone());
            let ended = std::mem::take(&mut entry.ended);
            entry.members.retain(|tid| !ended.contains(tid));
            entry.fallen.forget_all_but(&report.tasks);
        } else if entry.doing == Doing::Nothing && entry.is_quiet() {
            let quiet = job;
            self.keeping()
                .into_iter()
                .for_each(|keeping| keeping.quiet.push(quiet));
        }
        if let (Err(CutFailure::NoSuchJob(_)), Some(until)) = (&result, unknown_until) {
            self.schedule(job, until.since(now));
        } else if matches!(result, Err(CutFailure::NoSuchJob(_))) {
            self.job_over(job);
            self.forget_job(job);
        } else {
            self.schedule_next(job, result.is_ok());
        }
        if ends {
            self.count(Purpose::Gone(job));
        }
        self.record(match &result {
            Ok(SetReport {
                set,
                tasks,
                bytes,
                frozen,
                ..
            }) => EventKind::Checkpointed {
                set: set.clone(),
                job,
                tasks: u32::try_from(tasks.len()).unwrap_or(u32::MAX),
                bytes: *bytes,
                frozen: *frozen,
                parked,
            },
            Err(why) => EventKind::CheckpointFailed {
                job,
                why: why.to_string(),
            },
        });
        for (tid, id) in waiters {
            self.reply(tid, id, Reply::Checkpointed(result.clone()));
        }
        if let Ok(report) = &result {
            self.copy_wanted(job, &report.set);
        }
    }

    /// When the next checkpoint of a job is made, if it is made by itself, now that one has ended well or not.
    fn schedule_next(&mut self, job: Tid, good: bool) {
        let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        let (took, Some(pace)) = (entry.took, entry.pace) else {
            return;
        };
        let pause = pause(pace, good.then_some(took));
        let mut late = None;
        if let Pace::Loss(bound) | Pace::Every(bound) = pace
            && good
            && took + took + pause > bound
            && !std::mem::replace(&mut entry.said_late, true)
        {
            late = Some(bound);
        }
        self.schedule(job, pause);
        if let Some(bound) = late {
            let text = format!(
                "a checkpoint of job {job} took {:.1} s: as often as it is made, more than {:.1} s of work may be lost",
                took.0 as f64 / 1e6,
                bound.0 as f64 / 1e6
            );
            self.record(EventKind::Note { text });
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
        let Some(entry) = self
            .keeping()
            .and_then(|k| k.jobs.get(&job))
            .filter(|job| job.due <= now)
        else {
            return;
        };
        match entry.doing {
            Doing::Nothing if entry.pace.is_some() || entry.is_wanted() => self.begin_count(job),
            Doing::Ending { .. } | Doing::Leaving { .. } => self.count(Purpose::Gone(job)),
            _ => {}
        }
    }

    // ---- the end that a task's host has in it

    /// A task stands still for a checkpoint: waits until what it has asked for is answered. With `open` all others of its job
    /// stand still as well, and nothing but these may be open.
    pub(super) fn settle(&mut self, id: MigrationId, tid: Tid, open: Option<Vec<RequestId>>) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.closing = open.map(|open| open.into_iter().collect());
        task.settling = Some(id);
        self.moves.settled.extend(task.take_settled());
    }

    /// It has all answers. What is known of it now is of the same moment as the memory of all; a moment later others go on.
    pub(super) fn part_settled(&mut self, id: MigrationId) {
        let tid = self.moves.sources.get(&id).map(|source| source.of().tid);
        if let Some(task) = tid
            .and_then(|tid| self.tasks.get(tid))
            .filter(|task| task.closing.is_some())
        {
            if let Err(why) = self.has_heard_the_dead(task) {
                return self.source_event(id, SourceEvent::Dumped(Err(why)));
            }
            let record = Box::new(self.part_of(task));
            self.moves.parts.insert(id, record);
        }
        self.source_event(id, SourceEvent::Settled);
    }

    /// Nothing is left of a checkpoint here.
    pub(super) fn part_over(&mut self, id: MigrationId, tid: Tid) {
        self.moves.parts.remove(&id);
        if let Some(task) = self.tasks.get_mut(tid) {
            (task.settling, task.closing) = (None, None);
            task.awaits.clear();
        }
    }

    fn part_of(&self, task: &Task) -> PartRecord {
        let left = task.away.as_ref().map_or(0, |away| away.left);
        let keeps = |(place, held): &(usize, &Held)| match held {
            // Words about routes were about those of that time, and about resource managers, too: its library is told of the one
            // that there is.
            Held::Item(ToTask::Route { .. } | ToTask::RmChanged { .. }) => false,
            Held::Item(_) => true,
            // What links carry is in the memory of the tasks, or what their processes have left. Whoever else was written may have
            // gone on and said more by now.
            Held::Link(_) => *place < left,
        };
        let waiting = task
            .inbox
            .queue
            .iter()
            .enumerate()
            .filter(keeps)
            .map(|(_, held)| held.clone())
            .collect();
        PartRecord {
            version: SET_VERSION,
            record: self.record_of(task),
            waiting,
        }
    }

    /// A task has been written and goes on, or is about to be started again: its images go to the store.
    pub(super) fn deposit(&mut self, id: MigrationId) {
        let Some(record) = self.moves.parts.remove(&id) else {
            return;
        };
        let to = self.master.is_none().then_some(HostId::MASTER);
        if to.is_some() {
            self.moves.deposits.insert(id);
        }
        self.out.push_back(Output::Deposit {
            migration: id,
            record,
            to,
        });
    }

    /// The images of a part have left for the master, or could not.
    pub(super) fn deposited(&mut self, id: MigrationId, result: Result<(), Failure>) {
        if self.moves.deposits.remove(&id) {
            self.out.push_back(Output::DropImages { migration: id });
            if let Err(why) = result {
                self.report(
                    id,
                    Report::Failed {
                        step: Step::Transfer,
                        why,
                    },
                );
            }
        }
    }

    // ---- the store's end

    /// True for the images of a part of a checkpoint that is under way.
    pub(super) fn is_part_of_cut(&self, id: MigrationId) -> bool {
        self.master
            .as_ref()
            .is_some_and(|master| master.keeping.cuts.of_part(id).is_some())
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
}

/// Until the next checkpoint, when the last one took so long or has failed.
fn pause(pace: Pace, took: Option<Micros>) -> Micros {
    let pause = match (pace, took) {
        // What is lost at worst was done since the last one was begun, until the next one is in the store, which may take half as
        // long again.
        (Pace::Loss(bound), Some(took)) => bound.since(Micros(took.0.saturating_mul(5) / 2)),
        // The same, but no job spends all its time on checkpoints for it.
        (Pace::Every(every), Some(took)) => {
            pause(Pace::Loss(every), Some(took)).max(Micros(every.0 / 2))
        }
        (Pace::Every(every), None) => every,
        // Each moment without one may be lost.
        (Pace::Loss(_) | Pace::Never, _) => TRY_PAUSE,
    };
    pause.max(PAUSE_MIN)
}

/// Until a job that goes back is started again, when it could not be so many times.
fn restart_pause(tries: u32) -> Micros {
    // More doublings than that change nothing.
    let doublings = tries.saturating_sub(TRIES_MAX).min(16);
    Micros(RESTART_PAUSE.0 << doublings).min(RESTART_PAUSE_MAX)
}

/// The tasks of a job among all tasks: the first one, those that were members before, and everything that any of them has
/// spawned. What serves the virtual machine belongs to no job.
fn members(job: Tid, known: &mut BTreeSet<Tid>, tasks: &[TaskInfo]) -> Vec<TaskInfo> {
    known.insert(job);
    loop {
        let before = known.len();
        let children = tasks
            .iter()
            .filter(|task| known.contains(&task.parent))
            .map(|task| task.tid);
        let children: Vec<Tid> = children.collect();
        known.extend(children);
        if known.len() == before {
            break;
        }
    }
    let mut all: Vec<TaskInfo> = tasks
        .iter()
        .filter(|task| known.contains(&task.tid) && task.flags & TASK_SERVES == 0)
        .cloned()
        .collect();
    // In the moment of a move both ends may know the task.
    all.sort_by_key(|task| (task.tid, task.moving));
    all.dedup_by_key(|task| task.tid);
    all
}
