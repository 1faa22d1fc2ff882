//! Coordinates all migrations: decides the next step of each, whether it is aborted, and when it is
//! committed.
//!
//! [`Step`] lists the steps. The steps up to the restore have deadlines, but not the time in the
//! queue. The commit and the later steps end when they are done or a host is lost.

use super::turns::{Standing, turns};
use sempa_proto::engine::Engine;
use sempa_proto::event::EventKind;
use sempa_proto::migration::{
    Cause, Failure, Move, Order, Parting, Refusal, Report, Step, TaskFacts, Usage,
};
use sempa_proto::suspend::{self, Holds};
use sempa_proto::task::{MoveError, MoveReport};
use sempa_proto::{HostId, Micros, MigrationId, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;

/// Limit of migrations in progress. Further ones are refused.
pub const MOVES_OPEN_MAX: usize = 64;
/// Timeout of the steps that do not depend on the size of the task.
const STEP_TIME: Micros = Micros::from_secs(10);
/// Additional timeout for each GiB of memory, in the steps that depend on it.
const TIME_PER_GIB: Micros = Micros::from_secs(60);
/// Factor of the timeout for pre-copy. The task runs meanwhile, and some memory is sent more than
/// once.
const PRE_COPY_TIMES: u64 = 10;
/// Time after the loss of a source until its copy is considered dead. Its daemon has exited at the
/// end of its own, shorter lease, and its tasker with it; this margin is for killing the task.
const FENCE_TIME: Micros = Micros::from_secs(2);

/// An instruction to the coordinator's daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum CoordinatorOutput {
    /// Send this order to the source or the target.
    Order {
        host: HostId,
        of: Move,
        order: Order,
    },
    /// Write the location record durably, then call [`Coordinator::recorded`]. It commits the
    /// migration to `to`; with `to` equal to `from` it takes a commit back, and no call is needed.
    Record(Move),
    /// Announce the location `to` to every daemon under a new epoch. When all living daemons have
    /// acknowledged it, call [`Coordinator::located`].
    Locate(Move),
    Event(EventKind),
    /// Answer an end that has forwarded a suspend request. The answer must not overtake the orders
    /// to that end.
    SuspendDecided {
        host: HostId,
        /// The migration that it named.
        migration: MigrationId,
        /// Its id of the request.
        id: RequestId,
        /// The suspensions in force; `None` if this end was not entitled to forward the request,
        /// because the migration is over or the other end is authoritative.
        suspended: Option<Holds>,
    },
    Ended {
        id: MigrationId,
        result: Result<MoveReport, MoveError>,
    },
}

impl CoordinatorOutput {
    /// Returns the task and the step that starts with this output. All other steps start at the
    /// source or the target.
    pub fn begins(&self) -> Option<(Tid, Step)> {
        match self {
            // A record that takes a commit back starts no step.
            CoordinatorOutput::Record(of) if of.to != of.from => Some((of.tid, Step::Commit)),
            _ => None,
        }
    }
}

/// A migration in progress.
#[derive(Debug)]
struct Ongoing {
    of: Move,
    /// The step that must complete next.
    step: Step,
    deadline: Option<Micros>,
    /// Timeout of the steps that depend on the size of the task.
    sized: Micros,
    token: PathBuf,
    /// The engine, once the target has chosen it; CRIU before.
    engine: Engine,
    bytes: u64,
    /// When the source was ordered to let the task depart, and the duration of the pre-copy since
    /// then.
    leaves_at: Option<Micros>,
    went_ahead: Micros,
    stopped_at: Option<Micros>,
    /// Time for which the task was stopped.
    frozen: Micros,
    /// Post-copy is used. Before the target's verdict: the source supports it.
    memory_follows: bool,
    /// Pre-copy precedes the dump.
    pre_copies: bool,
    /// When the copy on a lost source is considered dead.
    fenced_at: Option<Micros>,
    /// The record is on disk, and the daemons are being notified.
    locating: bool,
    /// Suspensions of the task. The coordinator keeps them because either host may be lost, and the
    /// other one continues with them.
    suspended: Holds,
    /// The target has forwarded a suspend request. Requests from the source may be older, so they
    /// are refused from now on.
    target_spoke: bool,
    /// Resident memory of the task in bytes, once the source has reported it.
    resident: Option<u64>,
    /// Set while the inspected task is queued: since when, and its facts.
    waits: Option<(Micros, TaskFacts)>,
}

impl Ongoing {
    /// Returns its state in the queue of its source host; `None` if it no longer occupies the
    /// host's link.
    fn standing(&self) -> Option<Standing> {
        match (self.resident, &self.waits) {
            (None, _) => Some(Standing::Unknown),
            (Some(bytes), Some((since, _))) => {
                let stands = matches!(self.of.cause, Cause::Owner { .. });
                Some(Standing::Waits {
                    id: self.of.id,
                    bytes,
                    since: *since,
                    stands,
                })
            }
            // Other engines than CRIU send no images.
            (Some(_), None) if self.engine != Engine::Criu => None,
            // Pre-copy uses the link like post-copy memory: paused tasks do not wait for it.
            (Some(bytes), None) if self.step == Step::PreCopy => Some(Standing::Follows { bytes }),
            (Some(bytes), None) if self.step <= Step::Transfer => Some(Standing::Leaves { bytes }),
            // The remaining steps do not use the source's link, except for post-copy memory.
            (Some(bytes), None) => self.memory_follows.then_some(Standing::Follows { bytes }),
        }
    }

    /// Returns the timeout of a step.
    fn allowed(&self, step: Step) -> Micros {
        match (step, self.engine.asks()) {
            (Step::PreCopy, _) => Micros(self.sized.0 * PRE_COPY_TIMES),
            (Step::Dump | Step::Transfer | Step::Restore, _) => self.sized,
            // The program is asked to exit. Its host reports if it has not done so within `wait`
            // seconds.
            (Step::Quiesce | Step::Stop, Some((_, wait))) => {
                STEP_TIME + Micros::from_secs(wait.into())
            }
            _ => STEP_TIME,
        }
    }
}

/// All migrations of the virtual machine. Runs on the master.
#[derive(Debug, Default)]
pub struct Coordinator {
    moves: BTreeMap<MigrationId, Ongoing>,
    last: MigrationId,
    out: VecDeque<CoordinatorOutput>,
    /// When the queues must be examined again although nothing has happened.
    turns_at: Option<Micros>,
}

impl Coordinator {
    pub fn new() -> Coordinator {
        Coordinator::default()
    }

    /// Returns the number of migrations in progress.
    pub fn open(&self) -> usize {
        self.moves.len()
    }

    /// Returns the migration of this task that is in progress.
    pub fn of_task(&self, tid: Tid) -> Option<&Move> {
        self.moves.values().map(|m| &m.of).find(|m| m.tid == tid)
    }

    /// True if the migration of this task away from this host has reached the commit, and some of
    /// its memory is still there (post-copy).
    pub fn has_memory_on(&self, tid: Tid, host: HostId) -> bool {
        let lacks = |m: &Ongoing| {
            m.of.tid == tid && m.of.from == host && m.memory_follows && m.step >= Step::Commit
        };
        self.moves.values().any(lacks)
    }

    /// Returns when [`Coordinator::wake`] must be called, if at all.
    pub fn next_wakeup(&self) -> Option<Micros> {
        let moves = self
            .moves
            .values()
            .filter_map(|m| m.deadline.into_iter().chain(m.fenced_at).min());
        moves.chain(self.turns_at).min()
    }

    /// Returns the next output to execute.
    pub fn poll(&mut self) -> Option<CoordinatorOutput> {
        self.out.pop_front()
    }

    /// Returns a migration id that was never used.
    pub fn next_id(&mut self) -> MigrationId {
        self.last = self.last.next();
        self.last
    }

    /// Starts a migration. The caller has resolved the hosts.
    ///
    /// # Errors
    /// The migration is refused; nothing was started.
    pub fn begin(
        &mut self,
        now: Micros,
        tid: Tid,
        from: HostId,
        to: HostId,
        cause: Cause,
    ) -> Result<MigrationId, Refusal> {
        if from == to {
            return Err(Refusal::AlreadyThere);
        }
        if let Some(other) = self.of_task(tid) {
            return Err(Refusal::AlreadyMoving(other.id));
        }
        if self.moves.len() >= MOVES_OPEN_MAX {
            return Err(Refusal::TooManyMoves {
                limit: MOVES_OPEN_MAX,
            });
        }
        let of = Move {
            id: self.next_id(),
            tid,
            from,
            to,
            cause,
        };
        self.order(from, &of, Order::Inspect);
        self.moves.insert(
            of.id,
            Ongoing {
                of,
                step: Step::Inspect,
                deadline: Some(now + STEP_TIME),
                sized: STEP_TIME,
                token: PathBuf::new(),
                engine: Engine::Criu,
                bytes: 0,
                leaves_at: None,
                went_ahead: Micros::default(),
                stopped_at: None,
                frozen: Micros::default(),
                memory_follows: false,
                pre_copies: false,
                fenced_at: None,
                locating: false,
                suspended: Holds::default(),
                target_spoke: false,
                resident: None,
                waits: None,
            },
        );
        Ok(self.last)
    }

    /// Handles a report of one end. Reports that do not match the current step belong to an aborted
    /// migration and are ignored.
    pub fn report(&mut self, now: Micros, host: HostId, id: MigrationId, report: Report) {
        let Some(m) = self.moves.get(&id) else { return };
        let step = report.step();
        let sender = match step {
            Step::Inspect
            | Step::PreCopy
            | Step::Quiesce
            | Step::Stop
            | Step::Dump
            | Step::KillSource => m.of.from,
            Step::Prepare | Step::Restore | Step::Run | Step::Arrive => m.of.to,
            Step::Transfer | Step::Commit => host,
        };
        if let Report::Failed { step, why } = report {
            if host == m.of.from && m.step == Step::KillSource {
                // The source was ordered to release the task. This report means that its copy had
                // exited before. Other failures at the source, for example a missing
                // acknowledgement of the transfer, do not mean that the copy is gone; `SourceGone`
                // follows.
                if (step, why) == (Step::KillSource, Failure::TaskEnded) {
                    self.let_run(id, Usage::default());
                }
            } else if (host == m.of.from && m.step < Step::KillSource) || host == m.of.to {
                self.end_failed(id, step, why);
            }
        } else if host == sender {
            self.step_done(now, id, step, report);
        }
        self.take_turns(now);
    }

    fn step_done(&mut self, now: Micros, id: MigrationId, step: Step, report: Report) {
        let Some(m) = self.moves.get_mut(&id) else {
            return;
        };
        let of = m.of.clone();
        let next = match report {
            Report::Inspected {
                facts,
                suspended,
                memory_can_follow,
                can_pre_copy,
            } if m.step == Step::Inspect && m.waits.is_none() => {
                m.suspended = suspended;
                let gib = facts.resident_bytes >> 30;
                m.sized = STEP_TIME + Micros(TIME_PER_GIB.0 * (gib + 1));
                m.memory_follows = memory_can_follow;
                let waits = matches!(of.cause, Cause::Owner { .. }) || suspended.any();
                m.pre_copies = can_pre_copy && memory_can_follow && !waits;
                (m.resident, m.waits, m.deadline) =
                    (Some(facts.resident_bytes), Some((now, facts)), None);
                return self.log_step(id, step);
            }
            Report::Prepared {
                verdict,
                token,
                memory_follows,
                engine,
            } if m.step == Step::Prepare => {
                if !verdict.is_empty() {
                    return self.end_failed(id, Step::Prepare, Failure::Refused(verdict));
                }
                (m.token, m.memory_follows, m.engine) = (token.clone(), memory_follows, engine);
                m.pre_copies &= memory_follows && engine == Engine::Criu;
                m.leaves_at = Some(now);
                let pre_copies = m.pre_copies;
                if engine != Engine::Criu {
                    let Move { id, tid, .. } = of;
                    self.out
                        .push_back(CoordinatorOutput::Event(EventKind::MovesBy {
                            id,
                            tid,
                            engine,
                        }));
                }
                self.order(
                    of.from,
                    &of,
                    Order::Leave {
                        token,
                        memory_follows,
                        pre_copies,
                        engine,
                    },
                );
                if pre_copies {
                    Step::PreCopy
                } else {
                    Step::Quiesce
                }
            }
            Report::PreCopied { bytes } if m.step == Step::PreCopy => {
                m.bytes = bytes;
                m.went_ahead = now.since(m.leaves_at.unwrap_or(now));
                Step::Quiesce
            }
            // Source and target report over different connections. A report may overtake an earlier
            // one of the other end, and implies it.
            Report::Quiesced if m.step >= Step::PreCopy => Step::Stop,
            Report::Stopped if m.step >= Step::PreCopy => {
                m.stopped_at.get_or_insert(now);
                Step::Dump
            }
            Report::Dumped { bytes } | Report::Received { bytes } if m.step >= Step::PreCopy => {
                m.bytes = bytes;
                if step == Step::Dump {
                    Step::Transfer
                } else {
                    Step::Restore
                }
            }
            Report::Restored if (Step::PreCopy..Step::Commit).contains(&m.step) => {
                self.out.push_back(CoordinatorOutput::Record(of.clone()));
                Step::Commit
            }
            Report::SourceGone(used) if m.step == Step::KillSource => {
                return self.let_run(id, used);
            }
            Report::Running if m.step == Step::Run => {
                m.frozen = now.since(m.stopped_at.unwrap_or(now));
                Step::Arrive
            }
            Report::Arrived if m.step == Step::Arrive => return self.end_moved(now, id),
            _ => return,
        };
        self.advance(now, id, step, next);
    }

    /// Completes the step `done` and waits for `next`, unless a later step is awaited already.
    fn advance(&mut self, now: Micros, id: MigrationId, done: Step, next: Step) {
        let m = self.moves.get_mut(&id).expect("the caller found it");
        if next > m.step {
            m.step = next;
            m.deadline = match next {
                Step::Commit | Step::KillSource | Step::Run | Step::Arrive => None,
                _ => Some(now + m.allowed(next)),
            };
        }
        self.log_step(id, done);
    }

    /// Lets queued tasks depart as far as the limits of their hosts permit.
    fn take_turns(&mut self, now: Micros) {
        let hosts: BTreeSet<HostId> = self
            .moves
            .values()
            .filter(|m| m.waits.is_some())
            .map(|m| m.of.from)
            .collect();
        self.turns_at = None;
        for host in hosts {
            let its = self.moves.values().filter(|m| m.of.from == host);
            let (go, again) = turns(now, &its.filter_map(Ongoing::standing).collect::<Vec<_>>());
            self.turns_at = self.turns_at.into_iter().chain(again).min();
            for id in go {
                let Some(m) = self.moves.get_mut(&id) else {
                    continue;
                };
                let Some((_, facts)) = m.waits.take() else {
                    continue;
                };
                (m.step, m.deadline) = (Step::Prepare, Some(now + STEP_TIME));
                let (of, suspended, pre_copies) = (m.of.clone(), m.suspended, m.pre_copies);
                let (timeline, memory_can_follow) = (None, m.memory_follows);
                self.order(
                    of.to,
                    &of,
                    Order::Prepare {
                        facts,
                        suspended,
                        timeline,
                        memory_can_follow,
                        pre_copies,
                    },
                );
            }
        }
    }

    fn log_step(&mut self, id: MigrationId, step: Step) {
        let m = &self.moves[&id];
        let bytes = if matches!(step, Step::PreCopy | Step::Dump | Step::Transfer) {
            m.bytes
        } else {
            0
        };
        let Move {
            id, tid, from, to, ..
        } = m.of;
        self.out
            .push_back(CoordinatorOutput::Event(EventKind::Moving {
                id,
                tid,
                from,
                to,
                step,
                bytes,
            }));
    }

    /// Handles the result of [`CoordinatorOutput::Record`].
    pub fn recorded(&mut self, id: MigrationId, result: Result<(), Failure>) {
        let Some(m) = self.moves.get_mut(&id).filter(|m| m.step == Step::Commit) else {
            return;
        };
        match result {
            Ok(()) => {
                m.locating = true;
                self.out.push_back(CoordinatorOutput::Locate(m.of.clone()));
            }
            Err(why) => self.end_failed(id, Step::Commit, why),
        }
    }

    /// Handles that every living daemon has acknowledged the new location.
    pub fn located(&mut self, now: Micros, id: MigrationId) {
        let Some(m) = self
            .moves
            .get_mut(&id)
            .filter(|m| m.step == Step::Commit && m.locating)
        else {
            return;
        };
        let of = m.of.clone();
        let source_lost = m.fenced_at.is_some();
        self.advance(now, id, Step::Commit, Step::KillSource);
        if !source_lost {
            self.order(of.from, &of, Order::Yield);
        }
    }

    /// Orders the target to run its copy. The source's copy is gone.
    fn let_run(&mut self, id: MigrationId, used: Usage) {
        let Some(m) = self.moves.get_mut(&id) else {
            return;
        };
        m.step = Step::Run;
        m.fenced_at = None;
        let parting = Parting {
            used,
            suspended: m.suspended,
        };
        let of = m.of.clone();
        self.log_step(id, Step::KillSource);
        self.order(of.to, &of, Order::Run(parting));
    }

    /// Handles a suspend or resume request that one end has forwarded.
    ///
    /// From the inspection on, each end forwards such requests before it acknowledges them, and
    /// applies the result.
    pub fn suspend(
        &mut self,
        host: HostId,
        migration: MigrationId,
        id: RequestId,
        order: &suspend::Order,
    ) {
        let takes = |m: &&mut Ongoing| {
            m.of.tid == order.tid && (m.of.to == host || m.of.from == host && !m.target_spoke)
        };
        let suspended = self.moves.get_mut(&migration).filter(takes).map(|m| {
            m.target_spoke |= m.of.to == host;
            let before = m.suspended;
            m.suspended = before.after(order);
            self.out.extend(
                before
                    .change(m.suspended, order)
                    .map(CoordinatorOutput::Event),
            );
            m.suspended
        });
        self.out.push_back(CoordinatorOutput::SuspendDecided {
            host,
            migration,
            id,
            suspended,
        });
    }

    /// Handles that a host has left or was lost. Its tasks are dead; the daemon handles the
    /// consequences for other tasks.
    pub fn host_lost(&mut self, now: Micros, host: HostId) {
        let concerned: Vec<MigrationId> = self
            .moves
            .values()
            .filter(|m| m.of.from == host || m.of.to == host)
            .map(|m| m.of.id)
            .collect();
        for id in concerned {
            let m = self.moves.get_mut(&id).expect("just listed");
            if m.of.from == host && matches!(m.step, Step::Commit | Step::KillSource) {
                m.fenced_at = Some(now + FENCE_TIME);
            } else if m.of.from == host && m.step >= Step::Run {
                // The source has finished, or the target itself reports the memory that is missing.
            } else {
                let step = m.step;
                self.end_failed(id, step, Failure::HostLost(host));
            }
        }
        self.take_turns(now);
    }

    /// Cancels a migration that is not committed yet.
    pub fn call_off(&mut self, id: MigrationId, why: &str) {
        if let Some(m) = self.moves.get(&id).filter(|m| m.step < Step::Commit) {
            let step = m.step;
            self.end_failed(id, step, Failure::CalledOff(why.to_string()));
        }
    }

    /// Cancels the migrations of these tasks so that their job can be checkpointed first, and
    /// returns true.
    ///
    /// Does nothing and returns false unless every migration of these tasks is queued for departure
    /// from a host that is being drained. The cancelled ones fail with [`Refusal::AlreadyMoving`],
    /// like a migration that cannot start because of a checkpoint.
    pub fn give_way(&mut self, tids: &BTreeSet<Tid>) -> bool {
        let theirs: Vec<&Ongoing> = self
            .moves
            .values()
            .filter(|m| tids.contains(&m.of.tid))
            .collect();
        let waits = |m: &&Ongoing| m.waits.is_some() && matches!(m.of.cause, Cause::Drain { .. });
        if theirs.is_empty() || !theirs.iter().all(waits) {
            return false;
        }
        let ids: Vec<(MigrationId, Step)> = theirs.iter().map(|m| (m.of.id, m.step)).collect();
        for (id, step) in ids {
            self.end_failed(id, step, Failure::Refused(vec![Refusal::AlreadyMoving(id)]));
        }
        true
    }

    /// Handles the time that [`Coordinator::next_wakeup`] has returned.
    pub fn wake(&mut self, now: Micros) {
        let ids: Vec<MigrationId> = self.moves.keys().copied().collect();
        for id in ids {
            let m = &self.moves[&id];
            if m.deadline.is_some_and(|at| at <= now) {
                let (step, allowed) = (m.step, m.allowed(m.step));
                self.end_failed(id, step, Failure::Deadline { allowed });
            } else if m.step == Step::KillSource && m.fenced_at.is_some_and(|at| at <= now) {
                self.let_run(id, Usage::default());
            }
        }
        self.take_turns(now);
    }

    /// Ends a migration as successful.
    fn end_moved(&mut self, now: Micros, id: MigrationId) {
        let Some(m) = self.moves.remove(&id) else {
            return;
        };
        let Ongoing {
            of,
            bytes,
            frozen,
            engine,
            ..
        } = m;
        let resident = m.resident.filter(|_| engine == Engine::Criu).unwrap_or(0);
        let after = m
            .stopped_at
            .filter(|_| m.memory_follows)
            .map_or(frozen, |at| now.since(at).max(frozen));
        let whole = m.went_ahead + after;
        let Move {
            id,
            tid,
            from,
            to,
            cause,
        } = of;
        self.out
            .push_back(CoordinatorOutput::Event(EventKind::Moving {
                id,
                tid,
                from,
                to,
                step: Step::Arrive,
                bytes: 0,
            }));
        let moved = EventKind::Moved {
            id,
            tid,
            from,
            to,
            cause,
            bytes,
            resident,
            frozen,
            whole,
        };
        self.out.push_back(CoordinatorOutput::Event(moved));
        self.out.push_back(CoordinatorOutput::Ended {
            id,
            result: Ok(MoveReport {
                id,
                bytes,
                frozen,
                engine,
            }),
        });
    }

    /// Ends a migration as failed.
    ///
    /// Until the source is ordered to release the task, both ends are ordered to abort, and a
    /// commit that has begun is taken back. After that there is no way back.
    fn end_failed(&mut self, id: MigrationId, step: Step, why: Failure) {
        let Some(m) = self.moves.remove(&id) else {
            return;
        };
        if self.moves.values().any(|other| other.waits.is_some()) {
            // A queued task may be able to depart: request an immediate wake-up.
            self.turns_at = Some(Micros(0));
        }
        if m.step <= Step::Commit {
            if m.step == Step::Commit {
                let back = Move {
                    to: m.of.from,
                    ..m.of.clone()
                };
                self.out.push_back(CoordinatorOutput::Record(back.clone()));
                if m.locating {
                    self.out.push_back(CoordinatorOutput::Locate(back));
                }
            }
            if m.step >= Step::PreCopy {
                self.order(
                    m.of.from,
                    &m.of,
                    Order::Resume {
                        suspended: m.suspended,
                    },
                );
            }
            if m.step >= Step::Prepare {
                self.order(m.of.to, &m.of, Order::Discard);
            }
        }
        let Move {
            id,
            tid,
            from,
            to,
            cause,
        } = m.of;
        self.out
            .push_back(CoordinatorOutput::Event(EventKind::MoveFailed {
                id,
                tid,
                from,
                to,
                cause,
                step,
                why: why.clone(),
            }));
        self.out.push_back(CoordinatorOutput::Ended {
            id,
            result: Err(MoveError { step, why }),
        });
    }

    fn order(&mut self, host: HostId, of: &Move, order: Order) {
        self.out.push_back(CoordinatorOutput::Order {
            host,
            of: of.clone(),
            order,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(index: u16) -> HostId {
        HostId::new(index).expect("an index")
    }

    fn task(number: usize) -> Tid {
        Tid::task(host(2), number as u32).expect("a task")
    }

    fn begin(
        coordinator: &mut Coordinator,
        number: usize,
        from: u16,
        to: u16,
    ) -> Result<MigrationId, Refusal> {
        coordinator.begin(
            Micros(0),
            task(number),
            host(from),
            host(to),
            Cause::Asked {
                by: HostId::MASTER.tid(),
            },
        )
    }

    /// Returns the results of all migrations that have ended.
    fn ended(coordinator: &mut Coordinator) -> Vec<(MigrationId, Result<MoveReport, MoveError>)> {
        let end = |output| match output {
            CoordinatorOutput::Ended { id, result } => Some((id, result)),
            _ => None,
        };
        std::iter::from_fn(|| coordinator.poll())
            .filter_map(end)
            .collect()
    }

    /// With 64 migrations in progress another one is refused until one has ended.
    #[test]
    fn migrations_beyond_the_limit_are_refused() {
        let mut coordinator = Coordinator::new();
        let begin = |coordinator: &mut Coordinator, number| begin(coordinator, number, 2, 3);
        let all: Vec<MigrationId> = (1..=64)
            .map(|n| begin(&mut coordinator, n).expect("there is room"))
            .collect();
        assert_eq!(
            begin(&mut coordinator, 65),
            Err(Refusal::TooManyMoves { limit: 64 })
        );
        assert_eq!(
            begin(&mut coordinator, 64),
            Err(Refusal::AlreadyMoving(all[63])),
            "that is the better reason"
        );
        assert_eq!(coordinator.open(), 64);
        coordinator.call_off(all[0], "nobody wants it");
        assert_eq!(ended(&mut coordinator).len(), 1);
        assert!(begin(&mut coordinator, 65).is_ok());
        assert_eq!(
            begin(&mut coordinator, 66),
            Err(Refusal::TooManyMoves { limit: 64 })
        );
    }

    /// The loss of source or target before the commit fails the migration with the lost host as the
    /// reason. Other migrations continue.
    #[test]
    fn lost_host_fails_its_migrations_only()
     {
        for lost in [2, 3] {
            let mut coordinator = Coordinator::new();
            let id = begin(&mut coordinator, 1, 2, 3).expect("there is room");
            let other = begin(&mut coordinator, 2, 4, 5).expect("there is room");
            coordinator.host_lost(Micros(1), host(lost));
            let why = Failure::HostLost(host(lost));
            assert_eq!(
                ended(&mut coordinator),
                [(
                    id,
                    Err(MoveError {
                        step: Step::Inspect,
                        why
                    })
                )]
            );
            assert_eq!(coordinator.of_task(task(2)).map(|of| of.id), Some(other));
        }
    }
}
