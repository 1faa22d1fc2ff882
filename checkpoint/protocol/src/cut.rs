//! Checkpoints of jobs: all tasks of a job stand still at one moment, are written, and go on, each as soon as it is written.
//!
//! ```text
//! cutter            host of each task             the master's store
//!  Inspect  ------>  facts                         room for the set
//!  Stand    ------>  whoever writes its own checkpoint does, and ends
//!  Stand    ------>  the others quiesce, and are stopped
//!  (all stand still: has the job spawned anything meanwhile?)
//!  Write    ------>  dump, or copy what it has written; let it go on, or start it again; send --> kept
//!  (all are kept)  ----------------------------> sealed: from now on the set is there
//! ```
//!
//! Links number what tasks of the job say to each other and keep it until it has arrived, so tasks that stand still at the
//! same moment are a consistent cut, whatever is on its way between them. A process that has ended stands still, too: what it
//! had said and nobody has acknowledged its daemon keeps. That may take it long, so the others run until it has. Tasks outside
//! the job go on all the time.
//!
//! Whatever fails before the end, each task goes on and nothing of the set is left.

use sempa_proto::checkpoint::CutFailure;
use sempa_proto::migration::{Cause, Failure, Move, Order, Report, Step, TaskFacts};
use sempa_proto::{HostId, Micros, MigrationId, RequestId, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Time for the steps that do not depend on the size of the tasks.
const STEP_TIME: Micros = Micros::from_secs(15);
/// Time for all to stand still, and to get the answers to what they have asked for: the first one stands all that time.
const STAND_TIME: Micros = Micros::from_secs(5);
/// Time for each gigabyte of all tasks together on top, for writing, sending and keeping.
const TIME_PER_GIB: Micros = Micros::from_secs(90);

/// Number of one attempt.
pub type CutId = u64;

/// What the cutter asks its daemon to do.
#[derive(Clone, Debug, PartialEq)]
pub enum CutOutput {
    /// Send this order to the task's host.
    Order {
        /// The host.
        host: HostId,
        /// The task's part.
        of: Move,
        /// The order.
        order: Order,
    },
    /// Ask all hosts for the tasks of the job, then call [`Cuts::counted`].
    Count(CutId),
    /// Take the images of this part from its host.
    Expect(Move),
    /// They are here: put them into the store, then call [`Cuts::kept`].
    Keep {
        /// The attempt.
        cut: CutId,
        /// The part.
        of: Move,
    },
    /// All parts are in the store: seal the set, then call [`Cuts::sealed`].
    Seal {
        /// The attempt.
        cut: CutId,
        /// Each task, where it ran, and what it is.
        parts: Vec<(Tid, HostId, TaskFacts)>,
    },
    /// Remove what there is of it here: in the store, and of these parts.
    Abandon {
        /// The attempt.
        cut: CutId,
        /// Its parts.
        parts: Vec<MigrationId>,
    },
    /// It has ended: how long the tasks stood still, or why there is no checkpoint.
    Ended {
        /// The attempt.
        cut: CutId,
        /// How.
        result: Result<Micros, CutFailure>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Inspecting,
    /// Those that write their own checkpoints do so, and end.
    Ending,
    Standing,
    Counting,
    Writing,
    Sealing,
}

/// How far one task has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    Begun,
    Inspected,
    Stands,
    Written,
    Kept,
}

#[derive(Debug)]
struct Part {
    of: Move,
    progress: Progress,
    facts: TaskFacts,
}

impl Part {
    /// The seconds that it has to write its own checkpoint, if it does.
    fn writes_itself(&self) -> Option<u32> {
        self.facts
            .anew()
            .and_then(|engine| engine.asks())
            .map(|(_, seconds)| seconds)
    }
}

#[derive(Debug)]
struct Cut {
    stage: Stage,
    /// The store has room for it.
    has_room: bool,
    parts: BTreeMap<MigrationId, Part>,
    deadline: Micros,
    allowed: Micros,
    /// When the first task stood still, and when the last one was written.
    still: Option<Micros>,
    written: Option<Micros>,
}

impl Cut {
    /// All tasks are to be written in the time that follows from how much that is.
    fn allow_for_bytes(&mut self) {
        let bytes = self.parts.values().fold(0, |sum: u64, part| {
            sum.saturating_add(part.facts.resident_bytes)
        });
        self.allowed = STEP_TIME + Micros(TIME_PER_GIB.0 * ((bytes >> 30) + 1));
    }
}

/// All checkpoints under way. Lives on the master.
#[derive(Debug, Default)]
pub struct Cuts {
    open: BTreeMap<CutId, Cut>,
    last: CutId,
    out: VecDeque<CutOutput>,
}

impl Cuts {
    /// The next thing to do.
    pub fn poll(&mut self) -> Option<CutOutput> {
        self.out.pop_front()
    }

    /// When [`Cuts::wake`] is wanted, if at all.
    pub fn next_wakeup(&self) -> Option<Micros> {
        self.open
            .values()
            .filter(|cut| cut.stage != Stage::Sealing)
            .map(|cut| cut.deadline)
            .min()
    }

    /// The attempt that this part belongs to.
    pub fn of_part(&self, id: MigrationId) -> Option<CutId> {
        self.open
            .iter()
            .find(|(_, cut)| cut.parts.contains_key(&id))
            .map(|(number, _)| *number)
    }

    /// The part of this task that is under way and has it stand still, or will.
    pub fn of_task(&self, tid: Tid) -> Option<&Move> {
        let parts = self.open.values().flat_map(|cut| cut.parts.values());
        parts.map(|part| &part.of).find(|of| of.tid == tid)
    }

    /// The part of this task that keeps it where it is, until its images are written, and the attempt that it belongs to.
    pub fn keeps(&self, tid: Tid) -> Option<(CutId, MigrationId)> {
        let parts = self
            .open
            .iter()
            .flat_map(|(number, cut)| cut.parts.iter().map(move |(id, part)| (*number, *id, part)));
        let keeps = |part: &Part| part.of.tid == tid && part.progress < Progress::Written;
        parts
            .filter(|(_, _, part)| keeps(part))
            .map(|(number, id, _)| (number, id))
            .next()
    }

    /// A task of it has to leave its host now: all go on, and the checkpoint may be tried again.
    pub fn give_way(&mut self, number: CutId, tid: Tid, why: String) {
        self.fail(
            number,
            CutFailure::Task {
                tid,
                step: Step::Dump,
                why: Failure::CalledOff(why),
            },
        );
    }

    /// True while this attempt is under way.
    pub fn is_open(&self, cut: CutId) -> bool {
        self.open.contains_key(&cut)
    }

    /// Begins a checkpoint of these tasks, each with its host and a number of its own.
    pub fn begin(&mut self, now: Micros, tasks: &[(MigrationId, Tid, HostId)]) -> CutId {
        self.last += 1;
        let part = |&(id, tid, host): &(MigrationId, Tid, HostId)| {
            let of = Move {
                id,
                tid,
                from: host,
                to: HostId::MASTER,
                cause: Cause::Checkpoint,
            };
            (
                id,
                Part {
                    of,
                    progress: Progress::Begun,
                    facts: TaskFacts::default(),
                },
            )
        };
        let parts: BTreeMap<MigrationId, Part> = tasks.iter().map(part).collect();
        let (deadline, allowed) = (now + STEP_TIME, STEP_TIME);
        let stage = Stage::Inspecting;
        let cut = Cut {
            stage,
            has_room: false,
            parts,
            deadline,
            allowed,
            still: None,
            written: None,
        };
        self.open.insert(self.last, cut);
        self.order(self.last, &Order::Inspect, |_| true);
        self.last
    }

    /// Takes a report of a task's host. What does not fit belongs to an attempt that is over.
    pub fn report(&mut self, now: Micros, host: HostId, id: MigrationId, report: Report) {
        let Some(number) = self.of_part(id) else {
            return;
        };
        let Some(cut) = self.open.get_mut(&number) else {
            return;
        };
        let Some(part) = cut.parts.get_mut(&id).filter(|part| part.of.from == host) else {
            return;
        };
        let tid = part.of.tid;
        match report {
            Report::Inspected { facts, .. } if part.progress == Progress::Begun => {
                (part.facts, part.progress) = (facts, Progress::Inspected);
            }
            Report::Stopped if part.progress == Progress::Inspected => {
                part.progress = Progress::Stands;
                cut.still.get_or_insert(now);
            }
            Report::Dumped { bytes } if part.progress == Progress::Stands => {
                part.progress = Progress::Written;
                cut.written = Some(now);
                if part.writes_itself().is_some() {
                    // Until then nobody knew how much that is.
                    part.facts.resident_bytes = bytes;
                    let before = cut.allowed;
                    cut.allow_for_bytes();
                    cut.deadline = cut.deadline + cut.allowed.since(before);
                }
            }
            Report::Failed { step, why } => {
                return self.fail(number, CutFailure::Task { tid, step, why });
            }
            _ => return,
        }
        self.step(now, number);
    }

    /// The images of a part are at the master, or did not arrive.
    pub fn received(&mut self, id: MigrationId, result: Result<(), Failure>) {
        let Some(cut) = self.of_part(id) else { return };
        let Some(part) = self.open.get(&cut).and_then(|open| open.parts.get(&id)) else {
            return;
        };
        let of = part.of.clone();
        match result {
            Ok(()) => self.out.push_back(CutOutput::Keep { cut, of }),
            Err(why) => self.fail(
                cut,
                CutFailure::Task {
                    tid: of.tid,
                    step: Step::Transfer,
                    why,
                },
            ),
        }
    }

    /// A part is in the store, or the store did not take it.
    pub fn kept(&mut self, now: Micros, id: MigrationId, result: Result<(), String>) {
        let Some(number) = self.of_part(id) else {
            return;
        };
        if let Err(why) = result {
            return self.fail(number, CutFailure::Store(why));
        }
        if let Some(part) = self
            .open
            .get_mut(&number)
            .and_then(|cut| cut.parts.get_mut(&id))
        {
            part.progress = Progress::Kept;
            self.step(now, number);
        }
    }

    /// While all tasks stood still, the job had these; these requests were open by which they wait for others; and these tasks of
    /// it have ended since its last checkpoint.
    pub fn counted(
        &mut self,
        now: Micros,
        number: CutId,
        tasks: &[Tid],
        open: &BTreeMap<Tid, Vec<RequestId>>,
        ended: &[Tid],
    ) {
        let Some(cut) = self
            .open
            .get_mut(&number)
            .filter(|cut| cut.stage == Stage::Counting)
        else {
            return;
        };
        let known = |tid: &Tid| cut.parts.values().any(|part| part.of.tid == *tid);
        let new: Vec<Tid> = tasks.iter().copied().filter(|tid| !known(tid)).collect();
        if !new.is_empty() {
            return self.fail(number, CutFailure::Grew(new));
        }
        let meets = |part: &&Part| {
            part.writes_itself().is_some()
                && open.get(&part.of.tid).is_some_and(|of| !of.is_empty())
        };
        if let Some(tid) = cut.parts.values().find(meets).map(|part| part.of.tid) {
            // Its next process would not come to the meeting again, and the others would wait for it.
            let why = Failure::Engine(
                "it has ended while it waited for others, in a barrier for example".into(),
            );
            return self.fail(
                number,
                CutFailure::Task {
                    tid,
                    step: Step::Dump,
                    why,
                },
            );
        }
        cut.allow_for_bytes();
        (cut.stage, cut.deadline) = (Stage::Writing, now + cut.allowed);
        // Expected first: a host may be faster than we are.
        let parts: Vec<Move> = cut.parts.values().map(|part| part.of.clone()).collect();
        self.out.extend(parts.into_iter().map(CutOutput::Expect));
        let writes = cut.parts.values().map(|part| {
            let open = open.get(&part.of.tid).cloned().unwrap_or_default();
            let order = Order::Write {
                open,
                ended: ended.to_vec(),
            };
            CutOutput::Order {
                host: part.of.from,
                of: part.of.clone(),
                order,
            }
        });
        self.out.extend(writes);
    }

    /// What the job has could not be found out, or is more than a set takes.
    pub fn not_counted(&mut self, number: CutId, why: CutFailure) {
        if self
            .open
            .get(&number)
            .is_some_and(|cut| cut.stage == Stage::Counting)
        {
            self.fail(number, why);
        }
    }

    /// The set is sealed, or could not be.
    pub fn sealed(&mut self, number: CutId, result: Result<(), String>) {
        let Some(cut) = self
            .open
            .get(&number)
            .filter(|cut| cut.stage == Stage::Sealing)
        else {
            return;
        };
        match result {
            Ok(()) => {
                let stood = cut
                    .still
                    .zip(cut.written)
                    .map(|(from, until)| until.since(from))
                    .unwrap_or_default();
                self.open.remove(&number);
                self.out.push_back(CutOutput::Ended {
                    cut: number,
                    result: Ok(stood),
                });
            }
            Err(why) => self.fail(number, CutFailure::Store(why)),
        }
    }

    /// The store has room for the set, or does not take it. Nothing is stopped before that is known.
    pub fn room(&mut self, now: Micros, number: CutId, result: Result<(), String>) {
        match result {
            Ok(()) => {
                if let Some(cut) = self.open.get_mut(&number) {
                    cut.has_room = true;
                    self.step(now, number);
                }
            }
            Err(why) => self.fail(number, CutFailure::Store(why)),
        }
    }

    /// A host has left or was lost.
    pub fn host_lost(&mut self, host: HostId) {
        // What is kept is kept, wherever it came from.
        let concerned = |cut: &Cut| {
            cut.parts
                .values()
                .any(|p| p.of.from == host && p.progress < Progress::Kept)
        };
        let lost: Vec<CutId> = self
            .open
            .iter()
            .filter(|(_, cut)| concerned(cut))
            .map(|(number, _)| *number)
            .collect();
        for number in lost {
            self.fail(number, CutFailure::HostLost(host));
        }
    }

    /// The time of [`Cuts::next_wakeup`] has come.
    pub fn wake(&mut self, now: Micros) {
        // What is being sealed becomes a set or does not: nothing is waited for but the disk.
        let late = self
            .open
            .iter()
            .filter(|(_, cut)| cut.deadline <= now && cut.stage != Stage::Sealing);
        let late: Vec<(CutId, Micros)> = late.map(|(number, cut)| (*number, cut.allowed)).collect();
        for (number, allowed) in late {
            self.fail(number, CutFailure::Deadline { allowed });
        }
    }

    /// Goes on when all tasks have got as far as this stage wants.
    fn step(&mut self, now: Micros, number: CutId) {
        let Some(cut) = self.open.get_mut(&number) else {
            return;
        };
        let least = cut
            .parts
            .values()
            .map(|part| part.progress)
            .min()
            .unwrap_or(Progress::Kept);
        let ended =
            |part: &Part| part.writes_itself().is_none() || part.progress >= Progress::Stands;
        match cut.stage {
            Stage::Inspecting if least >= Progress::Inspected && cut.has_room => {
                let longest = cut
                    .parts
                    .values()
                    .filter_map(Part::writes_itself)
                    .max()
                    .unwrap_or_default();
                // Its library says before where its conversations stand.
                cut.allowed = STAND_TIME + STAND_TIME + Micros::from_secs(longest.into());
                (cut.stage, cut.deadline) = (Stage::Ending, now + cut.allowed);
                self.order(number, &Order::Stand, |part| part.writes_itself().is_some());
                self.step(now, number);
            }
            Stage::Ending if cut.parts.values().all(ended) => {
                (cut.stage, cut.deadline, cut.allowed) =
                    (Stage::Standing, now + STAND_TIME, STAND_TIME);
                self.order(number, &Order::Stand, |part| part.writes_itself().is_none());
                self.step(now, number);
            }
            Stage::Standing if least >= Progress::Stands => {
                (cut.stage, cut.deadline, cut.allowed) =
                    (Stage::Counting, now + STEP_TIME, STEP_TIME);
                self.out.push_back(CutOutput::Count(number));
            }
            Stage::Writing if least >= Progress::Kept => {
                cut.stage = Stage::Sealing;
                let facts = |part: &Part| (part.of.tid, part.of.from, part.facts.clone());
                let parts = cut.parts.values().map(facts).collect();
                self.out.push_back(CutOutput::Seal { cut: number, parts });
            }
            _ => {}
        }
    }

    fn order(&mut self, number: CutId, order: &Order, whom: impl Fn(&Part) -> bool) {
        let Some(cut) = self.open.get(&number) else {
            return;
        };
        let to = |part: &Part| CutOutput::Order {
            host: part.of.from,
            of: part.of.clone(),
            order: order.clone(),
        };
        self.out
            .extend(cut.parts.values().filter(|part| whom(part)).map(to));
    }

    /// It is off: all tasks go on, those that have been written already do.
    fn fail(&mut self, number: CutId, why: CutFailure) {
        self.order(number, &Order::GoOn, |_| true);
        let Some(cut) = self.open.remove(&number) else {
            return;
        };
        self.out.push_back(CutOutput::Abandon {
            cut: number,
            parts: cut.parts.into_keys().collect(),
        });
        self.out.push_back(CutOutput::Ended {
            cut: number,
            result: Err(why),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_that_loses_the_host_of_one_of_its_tasks_fails_with_that_host_and_others_go_on()
    {
        let host = |index| HostId::new(index).expect("an index");
        let task = |index, number| Tid::task(host(index), number).expect("a task");
        let mut cuts = Cuts::default();
        let number = cuts.begin(
            Micros(0),
            &[
                (MigrationId(1), task(2, 1), host(2)),
                (MigrationId(2), task(3, 1), host(3)),
            ],
        );
        let other = cuts.begin(Micros(0), &[(MigrationId(3), task(4, 1), host(4))]);
        cuts.host_lost(host(3));
        let end = |output| match output {
            CutOutput::Ended { cut, result } => Some((cut, result)),
            _ => None,
        };
        let ended: Vec<_> = std::iter::from_fn(|| cuts.poll()).filter_map(end).collect();
        assert_eq!(ended, [(number, Err(CutFailure::HostLost(host(3))))]);
        assert!(cuts.is_open(other) && !cuts.is_open(number));
    }
}
