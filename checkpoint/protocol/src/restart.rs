//! Restarts of all tasks of a checkpoint, or of none.
//!
//! ```text
//! coordinator            host of each task
//!
//! 1 Prepare  --------->  verdict; reserve memory (a host that refuses is replaced by the next one)
//! 2 (unpack the images from the store and send them)
//!                       verify, restore, hold before the first instruction
//! 3 (all are held: announce their locations to all daemons)
//! 4 Run      --------->  run, wake the libraries
//! ```
//!
//! Each host acts as the target of a migration ([`super::Target`]). No task runs before all are
//! restored. If a step fails before the order to run, everything that was restored is discarded.

use sempa_proto::checkpoint::RestartFailure;
use sempa_proto::migration::{
    Cause, Failure, Move, Order, Parting, Report, Step, TaskFacts, Timeline,
};
use sempa_proto::suspend::Holds;
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Timeout of the steps that do not depend on the size of the tasks.
const STEP_TIME: Micros = Micros::from_secs(15);
/// Additional timeout for each GiB of all tasks together, to unpack, send and restore.
const TIME_PER_GIB: Micros = Micros::from_secs(90);

/// Number of one restart of a job.
pub type RestartId = u64;

/// A task to restart.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub tid: Tid,
    pub facts: TaskFacts,
    /// Hosts that may take it, the best first.
    pub hosts: Vec<HostId>,
}

/// An instruction to the coordinator's daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum RestartOutput {
    /// Send this order to the host of a task.
    Order {
        host: HostId,
        /// The task's part of the restart.
        of: Move,
        order: Order,
    },
    /// Unpack the images of this task and send them to its host. On failure call
    /// [`Restarts::not_sent`].
    Send {
        restart: RestartId,
        of: Move,
    },
    /// Announce the location of this task to every daemon, then call [`Restarts::located`].
    Locate(Move),
    /// The restart has ended.
    Ended {
        restart: RestartId,
        /// The host of each task, or why none of them runs.
        result: Result<Vec<(Tid, HostId)>, RestartFailure>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    Asked,
    Prepared,
    Held,
    Located,
    Running,
}

#[derive(Debug)]
struct Part {
    of: Move,
    progress: Progress,
    facts: TaskFacts,
    /// Hosts to try if this one refuses.
    others: VecDeque<HostId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Preparing,
    Building,
    Locating,
    Running,
}

#[derive(Debug)]
struct Restarting {
    timeline: Timeline,
    stage: Stage,
    parts: BTreeMap<MigrationId, Part>,
    deadline: Micros,
    allowed: Micros,
}

/// All restarts in progress. Runs on the master.
#[derive(Debug, Default)]
pub struct Restarts {
    open: BTreeMap<RestartId, Restarting>,
    last: RestartId,
    out: VecDeque<RestartOutput>,
}

impl Restarts {
    /// Returns the next output to execute.
    pub fn poll(&mut self) -> Option<RestartOutput> {
        self.out.pop_front()
    }

    /// Returns when [`Restarts::wake`] must be called, if at all.
    pub fn next_wakeup(&self) -> Option<Micros> {
        self.open.values().map(|open| open.deadline).min()
    }

    /// Returns the restart to which this part belongs.
    pub fn of_part(&self, id: MigrationId) -> Option<RestartId> {
        self.open
            .iter()
            .find(|(_, open)| open.parts.contains_key(&id))
            .map(|(number, _)| *number)
    }

    /// True while this task is being restarted.
    pub fn has(&self, tid: Tid) -> bool {
        self.open
            .values()
            .flat_map(|open| open.parts.values())
            .any(|part| part.of.tid == tid)
    }

    /// Starts to restart these tasks together. `id` generates ids.
    pub fn begin(
        &mut self,
        now: Micros,
        timeline: Timeline,
        tasks: Vec<Candidate>,
        mut id: impl FnMut() -> MigrationId,
    ) -> RestartId {
        self.last += 1;
        let mut parts = BTreeMap::new();
        for Candidate { tid, facts, hosts } in tasks {
            let mut others: VecDeque<HostId> = hosts.into();
            let to = others.pop_front().unwrap_or(HostId::MASTER);
            let of = Move {
                id: id(),
                tid,
                from: HostId::MASTER,
                to,
                cause: Cause::Restart,
            };
            parts.insert(
                of.id,
                Part {
                    of,
                    progress: Progress::Asked,
                    facts,
                    others,
                },
            );
        }
        let (deadline, allowed) = (now + STEP_TIME, STEP_TIME);
        for part in parts.values() {
            self.out.push_back(prepare(part, &timeline));
        }
        let open = Restarting {
            timeline,
            stage: Stage::Preparing,
            parts,
            deadline,
            allowed,
        };
        self.open.insert(self.last, open);
        self.last
    }

    /// Handles a report of a task's host. `id` generates an id in case that another host must be
    /// tried.
    pub fn report(
        &mut self,
        now: Micros,
        host: HostId,
        of_part: MigrationId,
        report: Report,
        id: impl FnOnce() -> MigrationId,
    ) {
        let Some(number) = self.of_part(of_part) else {
            return;
        };
        let Some(open) = self.open.get_mut(&number) else {
            return;
        };
        let Some(part) = open
            .parts
            .get_mut(&of_part)
            .filter(|part| part.of.to == host)
        else {
            return;
        };
        match report {
            Report::Prepared { verdict, .. } if part.progress == Progress::Asked => {
                if verdict.is_empty() {
                    part.progress = Progress::Prepared;
                } else {
                    return self.refused(number, of_part, Failure::Refused(verdict), id());
                }
            }
            Report::Restored if part.progress == Progress::Prepared => {
                part.progress = Progress::Held
            }
            Report::Running if part.progress == Progress::Located => {
                part.progress = Progress::Running
            }
            Report::Failed { step, why } => {
                let tid = part.of.tid;
                return self.fail(
                    number,
                    RestartFailure::Task {
                        tid,
                        host,
                        step,
                        why,
                    },
                );
            }
            _ => return,
        }
        self.step(now, number);
    }

    /// Handles that a host refuses a task: tries the next one under a new id, or fails.
    fn refused(&mut self, number: RestartId, of_part: MigrationId, why: Failure, id: MigrationId) {
        let Some(open) = self.open.get_mut(&number) else {
            return;
        };
        let Some(mut part) = open.parts.remove(&of_part) else {
            return;
        };
        let (tid, host) = (part.of.tid, part.of.to);
        match part.others.pop_front() {
            Some(next) => {
                part.of = Move {
                    id,
                    to: next,
                    ..part.of
                };
                self.out.push_back(prepare(&part, &open.timeline));
                open.parts.insert(id, part);
            }
            None => {
                open.parts.insert(of_part, part);
                self.fail(
                    number,
                    RestartFailure::Task {
                        tid,
                        host,
                        step: Step::Prepare,
                        why,
                    },
                );
            }
        }
    }

    /// Handles that the images of a task could not be unpacked or sent.
    pub fn not_sent(&mut self, of_part: MigrationId, why: Failure) {
        let Some(number) = self.of_part(of_part) else {
            return;
        };
        if let Some(part) = self
            .open
            .get(&number)
            .and_then(|open| open.parts.get(&of_part))
        {
            let Move { tid, to: host, .. } = part.of;
            self.fail(
                number,
                RestartFailure::Task {
                    tid,
                    host,
                    step: Step::Transfer,
                    why,
                },
            );
        }
    }

    /// Handles that every living daemon has acknowledged the location of this task.
    pub fn located(&mut self, now: Micros, of_part: MigrationId) {
        let Some(number) = self.of_part(of_part) else {
            return;
        };
        let part = self
            .open
            .get_mut(&number)
            .and_then(|open| open.parts.get_mut(&of_part));
        if let Some(part) = part.filter(|part| part.progress == Progress::Held) {
            part.progress = Progress::Located;
            self.step(now, number);
        }
    }

    /// Handles that a host has left or was lost.
    pub fn host_lost(&mut self, host: HostId) {
        let concerned = |open: &Restarting| open.parts.values().any(|part| part.of.to == host);
        let lost: Vec<RestartId> = self
            .open
            .iter()
            .filter(|(_, o)| concerned(o))
            .map(|(number, _)| *number)
            .collect();
        for number in lost {
            self.fail(number, RestartFailure::HostLost(host));
        }
    }

    /// Handles the time that [`Restarts::next_wakeup`] has returned.
    pub fn wake(&mut self, now: Micros) {
        let late = self.open.iter().filter(|(_, open)| open.deadline <= now);
        let late: Vec<(RestartId, Micros)> =
            late.map(|(number, open)| (*number, open.allowed)).collect();
        for (number, allowed) in late {
            self.fail(number, RestartFailure::Deadline { allowed });
        }
    }

    /// Enters the next stage when all tasks have reached the progress that it requires.
    fn step(&mut self, now: Micros, number: RestartId) {
        let Some(open) = self.open.get_mut(&number) else {
            return;
        };
        let least = open
            .parts
            .values()
            .map(|part| part.progress)
            .min()
            .unwrap_or(Progress::Running);
        let all: Vec<Move> = open.parts.values().map(|part| part.of.clone()).collect();
        match open.stage {
            Stage::Preparing if least >= Progress::Prepared => {
                let bytes = open.parts.values().fold(0, |sum: u64, part| {
                    sum.saturating_add(part.facts.resident_bytes)
                });
                open.allowed = STEP_TIME + Micros(TIME_PER_GIB.0 * ((bytes >> 30) + 1));
                (open.stage, open.deadline) = (Stage::Building, now + open.allowed);
                self.out
                    .extend(all.into_iter().map(|of| RestartOutput::Send {
                        restart: number,
                        of,
                    }));
            }
            Stage::Building if least >= Progress::Held => {
                (open.stage, open.deadline, open.allowed) =
                    (Stage::Locating, now + STEP_TIME, STEP_TIME);
                self.out.extend(all.into_iter().map(RestartOutput::Locate));
            }
            Stage::Locating if least >= Progress::Located => {
                (open.stage, open.deadline, open.allowed) =
                    (Stage::Running, now + STEP_TIME, STEP_TIME);
                let run = |of: Move| RestartOutput::Order {
                    host: of.to,
                    of,
                    order: Order::Run(Parting::default()),
                };
                self.out.extend(all.into_iter().map(run));
            }
            Stage::Running if least >= Progress::Running => {
                let places = all.into_iter().map(|of| (of.tid, of.to)).collect();
                self.open.remove(&number);
                self.out.push_back(RestartOutput::Ended {
                    restart: number,
                    result: Ok(places),
                });
            }
            _ => {}
        }
    }

    /// Fails a restart and discards everything that was restored. If tasks were ordered to run
    /// already, the caller must end them.
    fn fail(&mut self, number: RestartId, why: RestartFailure) {
        let Some(open) = self.open.remove(&number) else {
            return;
        };
        for Part { of, progress, .. } in open.parts.into_values() {
            // After the order to run a target cannot discard its task.
            if open.stage < Stage::Running && progress >= Progress::Asked {
                self.out.push_back(RestartOutput::Order {
                    host: of.to,
                    of,
                    order: Order::Discard,
                });
            }
        }
        self.out.push_back(RestartOutput::Ended {
            restart: number,
            result: Err(why),
        });
    }
}

fn prepare(part: &Part, timeline: &Timeline) -> RestartOutput {
    let (facts, suspended) = (part.facts.clone(), Holds::default());
    let timeline = Some(timeline.clone());
    let order = Order::Prepare {
        facts,
        suspended,
        timeline,
        memory_can_follow: false,
        pre_copies: false,
    };
    RestartOutput::Order {
        host: part.of.to,
        of: part.of.clone(),
        order,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A restart that loses the host of one of its tasks fails with that host as the reason. Other
    /// restarts continue.
    #[test]
    fn lost_host_fails_its_restarts_only() {
        let host = |index| HostId::new(index).expect("an index");
        let mut restarts = Restarts::default();
        let mut ids = (1..).map(MigrationId);
        let mut begin = |hosts: &[u16]| {
            let task = |index: &u16| Tid::task(host(1), u32::from(*index)).expect("a task");
            let candidate = |index: &u16| Candidate {
                tid: task(index),
                facts: TaskFacts::default(),
                hosts: vec![host(*index)],
            };
            let members = hosts.iter().map(|index| (task(index), 0)).collect();
            let (timeline, tasks) = (
                Timeline {
                    line: 1,
                    members,
                    same: true,
                },
                hosts.iter().map(candidate).collect(),
            );
            restarts.begin(Micros(0), timeline, tasks, || {
                ids.next().expect("there are more")
            })
        };
        let (number, other) = (begin(&[2, 3]), begin(&[4]));
        restarts.host_lost(host(3));
        let end = |output| match output {
            RestartOutput::Ended { restart, result } => Some((restart, result)),
            _ => None,
        };
        let ended: Vec<_> = std::iter::from_fn(|| restarts.poll())
            .filter_map(end)
            .collect();
        assert_eq!(ended, [(number, Err(RestartFailure::HostLost(host(3))))]);
        assert_eq!(restarts.open.keys().collect::<Vec<_>>(), [&other]);
    }
}
