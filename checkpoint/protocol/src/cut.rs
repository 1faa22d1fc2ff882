//! Snapshots of jobs: all tasks of a job are paused at the same time and dumped. Each task resumes
//! as soon as it is dumped. The result is a checkpoint.
//!
//! ```text
//! coordinator            host of each task                      the master's store
//!
//! 1 Inspect  --------->  report facts                           reserve space
//! 2 Pause    --------->  programs that write their own
//!                       checkpoint do so and exit
//! 3 Pause    --------->  all other tasks quiesce and stop
//! 4 (all are paused: count the tasks of the job again)
//! 5 Dump     --------->  dump, or copy the state files;
//!                       resume or restart; upload  --------->  store the images
//! 6 (all are stored)  -------------------------------------->  seal: the checkpoint exists
//! ```
//!
//! **Consistency.** Links number the messages between tasks and keep each one until it has arrived.
//! Tasks that are paused at the same moment therefore form a consistent cut, whatever is in transit
//! between them. A process that has exited counts as paused: its daemon keeps the messages that
//! were not acknowledged. Because writing its own checkpoint may take a program long, the other
//! tasks run until then. Step 4 detects tasks that the job has spawned meanwhile.
//!
//! Tasks outside the job are never paused. If a step fails before the seal, every task continues
//! and nothing of the checkpoint remains.

use sempa_proto::checkpoint::CutFailure;
use sempa_proto::migration::{Cause, Failure, Move, Order, Report, Step, TaskFacts};
use sempa_proto::{HostId, Micros, MigrationId, RequestId, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Timeout of the steps that do not depend on the size of the tasks.
const STEP_TIME: Micros = Micros::from_secs(15);
/// Timeout for pausing all tasks, including the replies to their requests. The first paused task
/// waits all that time.
const STAND_TIME: Micros = Micros::from_secs(5);
/// Additional timeout for each GiB of all tasks together, to dump, upload and store.
const TIME_PER_GIB: Micros = Micros::from_secs(90);

/// Number of one snapshot of a job.
pub type CutId = u64;

/// An instruction to the coordinator's daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum CutOutput {
    /// Send this order to the host of a task.
    Order {
        host: HostId,
        /// The task's part of the snapshot.
        of: Move,
        order: Order,
    },
    /// Ask all hosts for the tasks of the job, then call [`Cuts::counted`] or
    /// [`Cuts::not_counted`].
    Count(CutId),
    /// Accept the images of this task from its host, then call [`Cuts::received`].
    Expect(Move),
    /// The images are at the master: add them to the store, then call [`Cuts::kept`].
    Keep {
        cut: CutId,
        of: Move,
    },
    /// The images of all tasks are in the store: seal the checkpoint, then call [`Cuts::sealed`].
    Seal {
        cut: CutId,
        /// Each task, its host, and its facts.
        parts: Vec<(Tid, HostId, TaskFacts)>,
    },
    /// Remove everything of the snapshot: in the store, and images of these tasks that are on the
    /// way.
    Abandon {
        cut: CutId,
        parts: Vec<MigrationId>,
    },
    /// The snapshot has ended.
    Ended {
        cut: CutId,
        /// The time for which tasks were paused, or the reason of the failure.
        result: Result<Micros, CutFailure>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Inspecting,
    /// The tasks that write their own checkpoints do so and exit.
    Ending,
    Standing,
    Counting,
    Writing,
    Sealing,
}

/// Progress of one task.
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
    /// Returns the seconds that the program has to write its own checkpoint; `None` if CRIU dumps
    /// it.
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
    /// The store has reserved space.
    has_room: bool,
    parts: BTreeMap<MigrationId, Part>,
    deadline: Micros,
    allowed: Micros,
    /// When the first task was paused, and when the last one was dumped.
    still: Option<Micros>,
    written: Option<Micros>,
}

impl Cut {
    /// Sets the timeout for dumping and storing, which depends on the size of all tasks together.
    fn allow_for_bytes(&mut self) {
        let bytes = self.parts.values().fold(0, |sum: u64, part| {
            sum.saturating_add(part.facts.resident_bytes)
        });
        self.allowed = STEP_TIME + Micros(TIME_PER_GIB.0 * ((bytes >> 30) + 1));
    }
}

/// All snapshots in progress. Runs on the master.
#[derive(Debug, Default)]
pub struct Cuts {
    open: BTreeMap<CutId, Cut>,
    last: CutId,
    out: VecDeque<CutOutput>,
}

impl Cuts {
    /// Returns the next output to execute.
    pub fn poll(&mut self) -> Option<CutOutput> {
        self.out.pop_front()
    }

    /// Returns when [`Cuts::wake`] must be called, if at all.
    pub fn next_wakeup(&self) -> Option<Micros> {
        self.open
            .values()
            .filter(|cut| cut.stage != Stage::Sealing)
            .map(|cut| cut.deadline)
            .min()
    }

    /// Returns the snapshot to which this part belongs.
    pub fn of_part(&self, id: MigrationId) -> Option<CutId> {
        self.open
            .iter()
            .find(|(_, cut)| cut.parts.contains_key(&id))
            .map(|(number, _)| *number)
    }

    /// Returns the part of this task in a snapshot in progress. It will pause the task, pauses it,
    /// or has resumed it.
    pub fn of_task(&self, tid: Tid) -> Option<&Move> {
        let parts = self.open.values().flat_map(|cut| cut.parts.values());
        parts.map(|part| &part.of).find(|of| of.tid == tid)
    }

    /// Returns the snapshot, and its part, that binds this task to its host. A task is bound until
    /// it is dumped.
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

    /// Aborts a snapshot because one of its tasks must leave its host now. All tasks continue, and
    /// the caller may retry.
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

    /// True while this snapshot is in progress.
    pub fn is_open(&self, cut: CutId) -> bool {
        self.open.contains_key(&cut)
    }

    /// Starts a snapshot of these tasks, each with an unused id and its host.
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

    /// Handles a report of a task's host. Reports that do not match belong to a snapshot that has
    /// ended.
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
                    // The size of a program's own checkpoint is known only when it is written.
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

    /// Handles that the images of a task are at the master, or did not arrive.
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

    /// Handles that the images of a task are in the store, or could not be stored.
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

    /// Handles the second count, which took place while all tasks were paused.
    ///
    /// - `tasks`: the tasks of the job.
    /// - `open`: the requests of each task with which it waits for other tasks.
    /// - `ended`: tasks of the job that have ended since its last checkpoint.
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
            // Its restarted program would not join the barrier again, and the others would wait
            // forever.
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
        // Expect the images before ordering the dumps: a host may send them before this function
        // returns.
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

    /// Handles that the second count failed, or found more than a checkpoint can hold.
    pub fn not_counted(&mut self, number: CutId, why: CutFailure) {
        if self
            .open
            .get(&number)
            .is_some_and(|cut| cut.stage == Stage::Counting)
        {
            self.fail(number, why);
        }
    }

    /// Handles that the checkpoint is sealed, or could not be.
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

    /// Handles that the store has reserved space, or has none. No task is paused before.
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

    /// Handles that a host has left or was lost.
    pub fn host_lost(&mut self, host: HostId) {
        // Images in the store do not depend on the host that they came from.
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

    /// Handles the time that [`Cuts::next_wakeup`] has returned.
    pub fn wake(&mut self, now: Micros) {
        // Sealing has no deadline: it waits only for the disk, and either succeeds or fails.
        let late = self
            .open
            .iter()
            .filter(|(_, cut)| cut.deadline <= now && cut.stage != Stage::Sealing);
        let late: Vec<(CutId, Micros)> = late.map(|(number, cut)| (*number, cut.allowed)).collect();
        for (number, allowed) in late {
            self.fail(number, CutFailure::Deadline { allowed });
        }
    }

    /// Enters the next stage when all tasks have reached the progress that it requires.
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
                // Before the program is asked to exit, its library reports the state of its links;
                // that takes part of this time.
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

    /// Aborts a snapshot: all tasks continue. Those that are dumped already do.
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

    /// A snapshot that loses the host of one of its tasks fails with that host as the reason. Other
    /// snapshots continue.
    #[test]
    fn lost_host_fails_its_snapshots_only()
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
