//! Tasks that are taken elsewhere by starting their program again: by its own checkpoint, or as it began.
//!
//! The protocol of a move is the same. Where CRIU would have the library let go, stop the task and write its images, the
//! program is asked by a signal or a message to end. The task does not end with it: it keeps its tid, and what comes for it waits. All that
//! is left of it is its record. The target starts the program and holds it before its first instruction, until the move is
//! committed; if the move fails, the source starts it again.
//!
//! Before it is asked, its library says where its conversations stand (see `parting`). The new process goes on with them: its
//! peers notice nothing. So the task stays on its timeline, and nobody else has a part in it.

use super::asks::Back;
use super::notify::{daemons_message, ints};
use super::tasks::{Phase, Task};
use super::{Machine, Output, Timer, World};
use checkpoint_protocol::{Inspected, SourceEvent, TargetEvent};
use sempa_proto::engine::{AGAIN_ENV, Asked, Begin, Engine, STATE_ENV};
use sempa_proto::event::EventKind;
use sempa_proto::host::{Carried, Held};
use sempa_proto::migration::{Cause, Failure, Move, Refusal, TaskFacts, Usage, Verdict};
use sempa_proto::task::{Reply, SpawnRequest, ToTask};
use sempa_proto::tasker::{DumpReport, StartTask, ToTasker};
use sempa_proto::{Micros, MigrationId, PvmError, RequestId, Tid};
use std::collections::VecDeque;

/// Wait status of a program that could not be started.
const NOT_STARTED: i32 = 0x100;
/// A library has so long to say where its conversations stand.
const HEAR_TIME: Micros = Micros::from_secs(5);
/// A program that has not ended in its time, and ends after all as agreed, is started again so long.
const LATE_TIME: Micros = Micros::from_secs(60);
/// Signals that end a task that has no process just now.
pub(super) const DEADLY: [i32; 2] = [9, 15];

/// How far a task is that is asked to end, to begin again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its library has let go, to stand still, and is to come back for this.
    Waking,
    /// Its library is to say where its conversations stand.
    Hearing,
    /// All is known, and the signal is on its way.
    Asked,
    /// The move is off; its library is to go on.
    Returning,
    /// It goes on, but may end yet as it was asked to.
    Off,
}

/// A task that was asked to end, to begin again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    pub(super) migration: MigrationId,
    engine: Engine,
    pub(super) stage: Stage,
    /// The program was asked.
    asked: bool,
    /// How it was asked for an earlier move, by which it may end yet.
    asked_before: Option<Engine>,
    /// The move is off.
    off: bool,
    /// Somebody has told the task to end for good.
    for_good: bool,
    /// It has stood still since the time was last looked at that it has for ending late.
    pub(super) stood: bool,
}

/// A task whose process has ended, and that begins again.
#[derive(Debug)]
pub(super) struct Away {
    migration: MigrationId,
    /// It begins here.
    here: bool,
    /// So much of what waits for the next process, at the beginning, was left by the last one.
    pub(super) left: usize,
}

/// What needs to ask the world.
#[derive(Debug)]
pub(super) enum Job {
    /// Whether a task that moves can be taken.
    JudgeMove(MigrationId, TaskFacts),
    /// Whether such a task could be; the daemon itself has this against it.
    JudgeQuestion(Back, Verdict, TaskFacts),
    /// The program of a task of this host is started again.
    Start(Tid),
    /// The program of a task that comes is started, and held.
    Build(MigrationId),
    /// The files are kept into which a task of this host has written its state, for a checkpoint.
    Collect(MigrationId),
    /// Such files are put where they belong for a task that comes, but for their names.
    Stage(MigrationId),
}

/// Work of this kind that waits for the end of the event.
pub(super) type Jobs = VecDeque<Job>;

/// What starting the program again comes to on a host, beside CRIU.
pub(super) type Other = Option<(Engine, Verdict)>;

/// What a host says with both ways, CRIU's verdict being this one.
pub(super) fn choose(criu: Verdict, other: Other) -> (Verdict, Engine) {
    match other {
        _ if criu.is_empty() => (criu, Engine::Criu),
        Some((engine, verdict)) if verdict.is_empty() => (verdict, engine),
        Some((_, verdict)) => (criu.into_iter().chain(verdict).collect(), Engine::Criu),
        None => (criu, Engine::Criu),
    }
}

/// How tasks of this request want to be taken elsewhere, if not by CRIU alone.
pub(super) fn begin_of(request: &SpawnRequest) -> Result<Option<Box<Begin>>, String> {
    let begin = Begin::of(request)?;
    Ok(begin.anew().is_some().then(|| Box::new(begin)))
}

impl Ending {
    /// True if the program itself says, by its exit status, that it is to be started again.
    pub(super) fn is_agreed(&self) -> bool {
        matches!(self.engine, Engine::Own { .. })
    }

    /// True if it may end as agreed, to be started again.
    fn may_end(&self) -> bool {
        self.asked || self.asked_before.is_some()
    }

    /// True if its process ends whatever it does.
    fn has_to_end(&self) -> bool {
        self.asked && !self.is_agreed()
    }
}

impl Task {
    /// True while it is about to end, to begin again.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.is_some_and(|ending| ending.stage != Stage::Off)
    }

    /// It does not heed the signal by which it was to be asked for this checkpoint. True if CRIU may write it, which then was not asked
    /// yet.
    fn falls_to_criu(&mut self, id: MigrationId) -> bool {
        self.unheeding = Some(id);
        self.begin
            .as_ref()
            .is_some_and(|begin| begin.by_criu() && begin.own_first())
    }

    /// True if it has no process, and will have one again.
    pub(super) fn is_away(&self) -> bool {
        self.away.is_some()
    }
}

impl Machine {
    /// Work that needs the world; false if there was none.
    pub(super) fn begin_again(&mut self, world: &mut dyn World) -> bool {
        match self.beginnings.pop_front() {
            None => return false,
            Some(Job::JudgeMove(id, facts)) => self.judge_move(world, id, facts),
            Some(Job::JudgeQuestion(back, known, facts)) => {
                self.judge_question(world, back, known, facts)
            }
            Some(Job::Start(tid)) => self.start_again(world, tid),
            Some(Job::Build(id)) => self.build(world, id),
            Some(Job::Collect(id)) => self.keep_state(world, id),
            Some(Job::Stage(id)) => self.stage_state(world, id),
        }
        true
    }

    // ---- what it is, and whether it would be taken

    /// What a task of this host is, if that is to be said without asking the tasker: it does not want CRIU, or must not be
    /// taken otherwise. `None`: the tasker knows.
    pub(super) fn facts_without_criu(
        &self,
        tid: Tid,
        cause: Option<&Cause>,
    ) -> Option<Result<TaskFacts, Refusal>> {
        let task = self.tasks.get(tid)?;
        // One that was asked before, and may end by that yet, is the same on no other host.
        let begin = task.begin.as_ref()?;
        let by_criu = begin.by_criu() && task.ending.is_none();
        if cause != Some(&Cause::Checkpoint) {
            return (!by_criu).then(|| self.facts_anew(tid).unwrap_or(Err(Refusal::NoSuchTask)));
        }
        if task.ending.is_some() {
            return Some(Err(Refusal::MayEndYet));
        }
        let own_first = begin.own_first();
        match self.facts_written(tid)? {
            Err(_) if by_criu => None,
            result => (own_first || !by_criu).then_some(result),
        }
    }

    /// What a task is for a checkpoint of its job, CRIU apart.
    fn facts_written(&self, tid: Tid) -> Option<Result<TaskFacts, Refusal>> {
        let mut begin = self.tasks.get(tid)?.begin.clone()?;
        let Some(own) = begin.own() else {
            return Some(Err(Refusal::NotByCriu {
                engine: begin.anew()?,
            }));
        };
        begin.engines = vec![own];
        Some(if begin.state.is_empty() {
            Err(Refusal::NoState)
        } else if self.holds_of(tid).any() {
            // It has to run to do it.
            Err(Refusal::Suspended)
        } else {
            Ok(TaskFacts {
                uid: self.config.uid,
                begin: Some(begin),
                ..TaskFacts::default()
            })
        })
    }

    /// What a task is, with what the tasker says of it for CRIU.
    pub(super) fn facts_with_criu(
        &self,
        tid: Tid,
        cause: Option<&Cause>,
        result: Result<TaskFacts, Refusal>,
    ) -> Result<TaskFacts, Refusal> {
        if cause == Some(&Cause::Checkpoint) {
            return result.or_else(|refusal| match self.facts_written(tid) {
                Some(Ok(facts)) => Ok(facts),
                // That can be mended.
                Some(Err(Refusal::NoState)) if matches!(refusal, Refusal::NoEngine { .. }) => {
                    Err(Refusal::NoState)
                }
                _ => Err(refusal),
            });
        }
        match (result, self.facts_anew(tid)) {
            (
                Ok(facts),
                Some(Ok(TaskFacts {
                    begin: Some(mut begin),
                    ..
                })),
            ) => {
                let wanted = self.tasks.get(tid).and_then(|task| task.begin.as_ref());
                let wanted = wanted
                    .map(|wanted| wanted.engines.clone())
                    .unwrap_or_default();
                begin.engines = wanted
                    .into_iter()
                    .filter(|e| *e == Engine::Criu || begin.engines.contains(e))
                    .collect();
                Ok(TaskFacts {
                    begin: Some(begin),
                    ..facts
                })
            }
            (Err(_), Some(Ok(facts))) => Ok(facts),
            (result, _) => result,
        }
    }

    /// What a task is whose program can be started again, CRIU apart.
    fn facts_anew(&self, tid: Tid) -> Option<Result<TaskFacts, Refusal>> {
        let mut begin = self.tasks.get(tid)?.begin.clone()?;
        let suspended = self.holds_of(tid).any();
        begin.engines.retain(|engine| match engine {
            Engine::Criu => false,
            // It has to run to do it.
            Engine::Own { .. } => !suspended,
            Engine::Restart { .. } => true,
        });
        Some(match begin.engines.is_empty() {
            true => Err(Refusal::Suspended),
            false => Ok(TaskFacts {
                uid: self.config.uid,
                begin: Some(begin),
                ..TaskFacts::default()
            }),
        })
    }

    /// What a task is that is to move, or to be written. Whether one that is to write itself would is known before others are asked.
    pub(super) fn inspected(
        &mut self,
        id: MigrationId,
        tid: Tid,
        result: Result<TaskFacts, Refusal>,
        memory: (bool, bool),
    ) {
        let cause = self.moves.sources.get(&id).map(|source| &source.of().cause);
        let signal = result
            .as_ref()
            .ok()
            .filter(|_| cause == Some(&Cause::Checkpoint))
            .and_then(TaskFacts::signal);
        match signal {
            Some(signal) => self.tell_tasker(ToTasker::Minds {
                migration: id,
                tid,
                signal,
            }),
            None => self.inspection_over(id, tid, result, memory),
        }
    }

    /// The tasker knows whether a task has prepared for the signal that asks it for its state.
    pub(super) fn signal_looked_at(&mut self, id: MigrationId, minds: bool) {
        let Some(tid) = self.moves.sources.get(&id).map(|source| source.of().tid) else {
            return;
        };
        let facts = self.facts_written(tid).unwrap_or(Err(Refusal::NoSuchTask));
        let signal = facts
            .as_ref()
            .ok()
            .and_then(TaskFacts::signal)
            .filter(|_| !minds);
        let Some(signal) = signal else {
            return self.inspection_over(id, tid, facts, (false, false));
        };
        match self
            .tasks
            .get_mut(tid)
            .is_some_and(|task| task.falls_to_criu(id))
        {
            true => self.tell_tasker(ToTasker::Inspect { migration: id, tid }),
            false => {
                self.inspection_over(id, tid, Err(Refusal::NotMinded { signal }), (false, false))
            }
        }
    }

    fn inspection_over(
        &mut self,
        id: MigrationId,
        tid: Tid,
        result: Result<TaskFacts, Refusal>,
        (memory_can_follow, can_pre_copy): (bool, bool),
    ) {
        let suspended = self.holds_of(tid);
        let inspected = |facts| Inspected {
            facts,
            suspended,
            memory_can_follow,
            can_pre_copy,
        };
        let result = self.with_program(tid, result).map(inspected);
        self.source_event(id, SourceEvent::Inspected(result));
    }

    fn judge_move(&mut self, world: &dyn World, id: MigrationId, facts: TaskFacts) {
        let Some(arrival) = self.arrival_of(id) else {
            return;
        };
        let tid = arrival.tid;
        match anew(world, &facts) {
            Some((engine, verdict)) if decides(&facts, &verdict) => {
                self.judged_move(id, verdict, false, engine)
            }
            other => {
                arrival.other = other;
                let facts = TaskFacts {
                    begin: None,
                    ..facts
                };
                self.tell_tasker(ToTasker::Prepare {
                    migration: id,
                    tid,
                    facts,
                });
            }
        }
    }

    /// The tasker has compared a task that moves with this host.
    pub(super) fn prepared(&mut self, id: MigrationId, criu: Verdict, memory_can_follow: bool) {
        let other = self.arrival_of(id).and_then(|arrival| arrival.other.take());
        let (verdict, engine) = choose(criu, other);
        self.judged_move(id, verdict, memory_can_follow, engine);
    }

    fn judged_move(
        &mut self,
        id: MigrationId,
        verdict: Verdict,
        memory_can_follow: bool,
        engine: Engine,
    ) {
        if let Some(arrival) = self.arrival_of(id) {
            arrival.anew = verdict.is_empty() && engine != Engine::Criu;
        }
        self.target_event(
            id,
            TargetEvent::Prepared {
                verdict,
                memory_can_follow,
                engine,
            },
        );
    }

    fn judge_question(&mut self, world: &dyn World, back: Back, known: Verdict, facts: TaskFacts) {
        match anew(world, &facts) {
            Some((engine, verdict)) if decides(&facts, &verdict) => {
                self.verdict_known(back, known.into_iter().chain(verdict).collect(), engine);
            }
            other => self.ask_verdict(
                back,
                known,
                other,
                TaskFacts {
                    begin: None,
                    ..facts
                },
            ),
        }
    }

    // ---- the end of a process

    /// A move asks a program to end, to be started again.
    pub(super) fn end_for_move(&mut self, id: MigrationId, tid: Tid, engine: Engine) {
        let stands = self.has_to_stand(tid);
        let may =
            |task: &&mut Task| !task.returning && task.away.is_none() && task.exited.is_none();
        let Some(task) = self.tasks.get_mut(tid).filter(may) else {
            let why = Failure::Engine("its program is just being started, or has ended".into());
            return self.source_event(id, SourceEvent::Stopped(Err(why)));
        };
        let before = |ending: Ending| {
            if ending.asked {
                Some(ending.engine)
            } else {
                ending.asked_before
            }
        };
        let (wakes, asked_before) = (task.still.is_some(), task.ending.and_then(before));
        task.ending = Some(Ending {
            migration: id,
            engine,
            stage: Stage::Waking,
            asked: false,
            asked_before,
            off: false,
            for_good: false,
            stood: false,
        });
        self.timer(HEAR_TIME, Timer::AskToEnd(tid, id));
        if stands {
            // It may run for that.
            self.tell_tasker(ToTasker::Hold {
                tid,
                after: HEAR_TIME,
            });
        }
        if wakes {
            self.wake_to_end(tid);
        } else {
            self.ask_to_part(tid);
        }
    }

    /// Its library has said where its conversations stand.
    pub(super) fn ask_to_end(&mut self, tid: Tid, by: MigrationId) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let hears = |ending: &&mut Ending| ending.migration == by && ending.stage == Stage::Hearing;
        let Some(ending) = task.ending.as_mut().filter(hears) else {
            return;
        };
        ending.stage = Stage::Asked;
        // One that ends late has been asked, if not for this.
        if ending.off || std::mem::replace(&mut ending.asked, true) {
            return;
        }
        let Ending {
            migration, engine, ..
        } = *ending;
        self.tell_tasker(ToTasker::End { tid, engine });
        let Some((_, wait)) = engine.asks() else {
            return;
        };
        self.timer(
            Micros::from_secs(wait.into()),
            Timer::Ending(tid, migration),
        );
    }

    /// The tasker expects the end of a program that is asked by a message: only now may it have that, so that its end is taken for
    /// what it is. Should the move be off meanwhile the program has been asked all the same, as one that has got a signal.
    pub(super) fn ask_by_message(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get(tid) else {
            return;
        };
        let Some(ending) = task.ending.filter(|ending| ending.asked) else {
            return;
        };
        let (Some((Asked::Message(tag), wait)), Some(conn)) = (ending.engine.asks(), task.conn())
        else {
            return;
        };
        // Past what waits, which is for the next process, as is whatever else comes now.
        let message = daemons_message(
            tid,
            (0, tag),
            ints(&[i32::try_from(wait).unwrap_or(i32::MAX)]),
        );
        self.out.push_back(Output::ToTask {
            conn,
            message: ToTask::Deliver {
                message,
                after: None,
            },
        });
    }

    /// The time is over that its library had to say so.
    pub(super) fn not_heard(&mut self, tid: Tid, id: MigrationId) {
        let ending = self.tasks.get(tid).and_then(|task| task.ending.as_ref());
        let silent = |ending: &&Ending| {
            ending.migration == id && matches!(ending.stage, Stage::Waking | Stage::Hearing)
        };
        if ending.filter(silent).is_some_and(|ending| !ending.off) {
            let why = "its library has not said in its time where its conversations stand".into();
            self.source_event(id, SourceEvent::Stopped(Err(Failure::Engine(why))));
        }
    }

    /// The tasker has not asked a program: why.
    pub(super) fn not_asked(&mut self, tid: Tid, why: String) {
        let Some(ending) = self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.ending.as_mut())
        else {
            return;
        };
        ending.asked = false;
        let id = ending.migration;
        self.source_event(id, SourceEvent::Stopped(Err(Failure::Engine(why))));
    }

    /// A program ends. If it was asked to, and late, its library says now where its conversations stand.
    pub(super) fn last_words(&mut self, tid: Tid, id: RequestId) {
        let off = self.tasks.get(tid).and_then(|task| task.ending.as_ref());
        if off.is_some_and(|ending| ending.stage == Stage::Off) {
            self.ask_to_part(tid);
        }
        self.reply(tid, id, Reply::Done);
    }

    /// The time is over that a program had to end.
    pub(super) fn ending_over(&mut self, tid: Tid, id: MigrationId) {
        let Some(task) = self.tasks.get(tid).filter(|task| task.exited.is_none()) else {
            return;
        };
        let Some(Ending { engine, .. }) = task.ending.filter(|ending| ending.migration == id)
        else {
            return;
        };
        match engine {
            Engine::Criu => {}
            Engine::Restart { .. } => self.tell_tasker(ToTasker::Kill { tid }),
            Engine::Own { asked, exit, wait } => {
                let why = format!(
                    "{engine}: it was asked {asked} and has not ended with exit status {exit} within {wait} s"
                );
                self.source_event(id, SourceEvent::Stopped(Err(Failure::Engine(why))));
            }
        }
    }

    /// The process of a task has ended. True if the task has not: its program is started again.
    pub(super) fn comes_again(&mut self, tid: Tid, status: i32, used: Usage) -> bool {
        if self.stop.is_some() || self.tasker_gone {
            return false;
        }
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let goes_on = |ending: &Ending| {
            let asked = ending.asked.then_some(ending.engine);
            let mut by = asked.into_iter().chain(ending.asked_before);
            !ending.for_good && by.any(|engine| engine.goes_on_after(status))
        };
        let Some(Ending { migration, .. }) = task.ending.filter(goes_on) else {
            return false;
        };
        let Some(parting) = task.parting.take() else {
            return false;
        };
        let conn = task.conn();
        task.ending = None;
        (task.exited, task.used_before) = (None, used);
        (task.phase, task.hold, task.quiesced) = (Phase::Detached, true, false);
        (task.pid, task.settling, task.closing) = (0, None, None);
        task.requests.clear();
        task.meetings.clear();
        let count = task.begin.as_mut().map_or(0, |begin| {
            begin.count += 1;
            begin.count
        });
        let (successor, left, waited) = parting.inherit(count, task.inbox.drain());
        task.successor = Some(Box::new(successor));
        left.into_iter().for_each(|held| task.inbox.push(held));
        task.away = Some(Away {
            migration,
            here: false,
            left: task.inbox.queue.len(),
        });
        waited.into_iter().for_each(|held| task.inbox.push(held));
        if let Some(conn) = conn {
            self.conns.retire(conn);
            self.out.push_back(Output::CloseTask { conn });
        }
        self.still_no_more(tid);
        // Who shares rings with it reads what is in them.
        for partner in self.pairs.take(tid) {
            self.deliver(partner, ToTask::PeerMoved { tid });
        }
        self.away_step(tid);
        true
    }

    fn away_step(&mut self, tid: Tid) {
        let Some(away) = self.tasks.get(tid).and_then(|task| task.away.as_ref()) else {
            return;
        };
        let waits = self
            .moves
            .sources
            .get(&away.migration)
            .is_some_and(|source| source.is_ending());
        if waits {
            self.source_event(away.migration, SourceEvent::Stopped(Ok(())));
        } else {
            // The move was called off, perhaps long ago.
            self.beginnings.push_back(Job::Start(tid));
        }
    }

    /// The move that had asked a program to end is off. True if it is such a move.
    pub(super) fn end_called_off(&mut self, id: MigrationId, tid: Tid) -> bool {
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        if let Some(away) = task.away.as_mut().filter(|away| away.migration == id) {
            if !std::mem::replace(&mut away.here, true) {
                self.beginnings.push_back(Job::Start(tid));
            }
            return true;
        }
        let conn = task.conn();
        let Some(ending) = task.ending.as_mut().filter(|ending| ending.migration == id) else {
            return false;
        };
        ending.off = true;
        // One that has to end is started again here.
        if !ending.has_to_end() && ending.stage != Stage::Waking && conn.is_some() {
            // It goes on here, or ends yet as it was asked to: then it is started again.
            ending.stage = Stage::Returning;
            let message = ToTask::TakeNothing { by: None };
            self.out
                .extend(conn.map(|conn| Output::ToTask { conn, message }));
            if self.has_to_stand(tid) {
                // It may run for that.
                self.tell_tasker(ToTasker::Hold {
                    tid,
                    after: HEAR_TIME,
                });
            }
        }
        self.source_event(id, SourceEvent::Continued);
        true
    }

    /// The library of a task whose program was asked to end is to come back. True if there is nothing to wake.
    pub(super) fn never_let_go(&mut self, id: MigrationId, tid: Tid) -> bool {
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        if task.returning {
            return true;
        }
        let Some(ending) = task.ending.filter(|ending| ending.migration == id) else {
            return false;
        };
        if ending.stage != Stage::Returning && !ending.has_to_end() {
            self.goes_on(tid);
        }
        true
    }

    /// Its library goes on.
    pub(super) fn takes_again(&mut self, tid: Tid, by: MigrationId) {
        let ending = self.tasks.get(tid).and_then(|task| task.ending.as_ref());
        if ending.is_some_and(|ending| ending.migration == by && ending.stage == Stage::Returning) {
            self.part_no_more(tid);
            self.goes_on(tid);
        }
    }

    /// The move is off, and the process goes on; or it has taken leave, and only its end is waited for.
    pub(super) fn goes_on(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let left = task.conn().is_none() && task.still.is_none();
        let Some(ending) = task.ending.as_mut() else {
            return;
        };
        let id = ending.migration;
        match (ending.may_end(), left) {
            (false, _) => task.ending = None,
            (true, true) => {}
            (true, false) => ending.stage = Stage::Off,
        }
        if task.ending.is_some() {
            self.timer(LATE_TIME, Timer::EndsLate(tid, id));
        }
        self.source_event(id, SourceEvent::Reconnected);
        if self.has_to_stand(tid) {
            self.hold_guest(tid);
        } else {
            self.tell_tasker(ToTasker::GoOn { tid });
        }
    }

    /// A program that is about to end has taken leave. If the move is off, nobody waits for its library.
    pub(super) fn ending_left(&mut self, tid: Tid) {
        let ending = self.tasks.get(tid).and_then(|task| task.ending.as_ref());
        if ending.is_some_and(|ending| ending.stage == Stage::Returning) {
            self.goes_on(tid);
        }
    }

    /// A program that was asked, and had not ended in its time, has not ended since.
    pub(super) fn ends_no_more(&mut self, tid: Tid, id: MigrationId) {
        let stands = self.has_to_stand(tid);
        let Some(task) = self.tasks.get_mut(tid).filter(|task| task.exited.is_none()) else {
            return;
        };
        let left = task.conn().is_none();
        let Some(ending) = task
            .ending
            .as_mut()
            .filter(|ending| ending.migration == id && ending.off)
        else {
            return;
        };
        if std::mem::replace(&mut ending.stood, stands) || stands {
            // It gets its time when it runs.
            self.timer(LATE_TIME, Timer::EndsLate(tid, id));
        } else if ending.stage == Stage::Off {
            self.asked_no_more(tid);
        } else if left {
            // It has left the virtual machine instead.
            task.parting = None;
            self.asked_no_more(tid);
            self.detach(tid);
        } else {
            self.timer(LATE_TIME, Timer::EndsLate(tid, id));
        }
    }

    /// If a task ends now, it has ended, however it does.
    pub(super) fn asked_no_more(&mut self, tid: Tid) {
        if self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.ending.take())
            .is_some_and(|ending| ending.may_end())
        {
            self.tell_tasker(ToTasker::EndsForGood { tid });
        }
    }

    /// The copy at the source is to be killed. True if there is none.
    pub(super) fn has_no_copy(&mut self, id: MigrationId, tid: Tid) -> bool {
        let Some(task) = self.tasks.get(tid).filter(|task| task.is_away()) else {
            return false;
        };
        let used = task.used_before;
        self.source_event(id, SourceEvent::Gone(used));
        true
    }

    /// All that is left of a task goes to its new host. First what its process has left: nobody else would say it again if this
    /// host were lost.
    pub(super) fn send_away(&mut self, of: &Move) {
        let left: Vec<Held> = self
            .tasks
            .get(of.tid)
            .map(|task| task.inbox.iter().cloned().collect())
            .unwrap_or_default();
        for held in left {
            let carried = Carried::Handed {
                dst: of.tid,
                migration: of.id,
                held,
            };
            self.out.push_back(Output::Carry {
                host: of.to,
                carried,
            });
        }
        self.send_record(of, false);
        if let Some(task) = self.tasks.get_mut(of.tid) {
            task.leaving = Some(of.id);
        }
    }

    /// Somebody sends a signal. True if that is done: a task that has no process, or one that is just beginning, ends by it or
    /// not at all. One that was to be ended and started again is not started again after a signal that is meant to end it.
    pub(super) fn signal_away(&mut self, tid: Tid, signal: i32) -> bool {
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let deadly = DEADLY.contains(&signal);
        if let Some(ending) = task
            .ending
            .as_mut()
            .filter(|ending| matches!(ending.engine, Engine::Restart { .. }))
        {
            ending.for_good |= deadly;
        }
        let used = task.used_before;
        if task.away.is_some() && deadly {
            task.away = None;
            self.end_task(tid, signal, used);
            return true;
        }
        task.away.is_some() || task.returning && !deadly
    }

    // ---- the beginning of a process

    fn start_again(&mut self, world: &mut dyn World, tid: Tid) {
        let stopping = self.stop.is_some();
        let Some(task) = self
            .tasks
            .get_mut(tid)
            .filter(|task| task.away.is_some() && !stopping)
        else {
            return;
        };
        task.away = None;
        let begin = task.begin.clone().unwrap_or_default();
        match self.beginning(world, tid, &begin) {
            Ok((start, epid)) => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    (task.epid, task.phase, task.returning) = (Some(epid), Phase::Expected, true);
                }
                self.tasks.expected.insert(epid, tid);
                self.tell_tasker(ToTasker::Start(start));
                self.note(format!(
                    "{tid} is started again where it was ({} times so far)",
                    begin.count
                ));
                self.stand_if_it_has_to(tid);
            }
            Err(why) => {
                self.note(format!("{tid} could not be started again: {why}"));
                let used = self
                    .tasks
                    .get(tid)
                    .map(|task| task.used_before)
                    .unwrap_or_default();
                self.end_task(tid, NOT_STARTED, used);
            }
        }
        self.move_task_continued(tid);
    }

    /// The program of a task that was started again has connected.
    pub(super) fn came_again(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(tid).filter(|task| task.returning) else {
            return;
        };
        task.returning = false;
        if !self.has_to_stand(tid)
            && let Some(task) = self.tasks.get_mut(tid)
        {
            task.still = None;
        }
        self.move_task_came_back(tid);
        self.release(tid);
        self.settled(tid);
    }

    /// The program of a task of this host has written its state and ended: that is kept before it is started again.
    fn keep_state(&mut self, world: &dyn World, id: MigrationId) {
        let Some(tid) = self.moves.sources.get(&id).map(|source| source.of().tid) else {
            return;
        };
        let Some(begin) = self.tasks.get(tid).and_then(|task| task.begin.as_ref()) else {
            return;
        };
        if let Some(dir) = begin.dir().filter(|dir| lacks_dir(world, dir)) {
            let why = format!(
                "its working directory {dir} cannot be entered any more: nobody knows where it has written"
            );
            return self.source_event(id, SourceEvent::Dumped(Err(Failure::Io(why))));
        }
        let (files, dir) = (begin.state_of(tid), world.work_dir(begin.dir()));
        self.out.push_back(Output::CollectState {
            migration: id,
            files,
            dir,
        });
    }

    /// They are kept, or could not be.
    pub(super) fn state_collected(&mut self, id: MigrationId, result: Result<DumpReport, Failure>) {
        let tid = self.moves.sources.get(&id).map(|source| source.of().tid);
        if let (Some(tid), Ok(DumpReport { files: 0, .. })) = (tid, &result) {
            let text = format!(
                "{tid} has ended as one that has written its own checkpoint, and none of the files is there that {STATE_ENV} names: \
                 from this set it begins anew"
            );
            self.record(EventKind::Note { text });
        }
        self.source_event(id, SourceEvent::Dumped(result));
    }

    /// The files of a task that is started again from a checkpoint are copied to where they belong.
    fn stage_state(&mut self, world: &dyn World, id: MigrationId) {
        if !self.moves.is_restoring(id) {
            return;
        }
        let Some(arrival) = self.arrival_of(id) else {
            return;
        };
        let (tid, begin) = (
            arrival.tid,
            arrival
                .record
                .as_ref()
                .and_then(|record| record.begin.as_ref()),
        );
        let Some((files, dir)) =
            begin.map(|begin| (begin.state_of(tid), world.work_dir(begin.dir())))
        else {
            return;
        };
        self.out.push_back(Output::StageState {
            migration: id,
            files,
            dir,
        });
    }

    /// They are there, and get their names when the task is let run; or they could not be copied.
    pub(super) fn state_staged(&mut self, id: MigrationId, result: Result<(), Failure>) {
        match result {
            Ok(()) => self.beginnings.push_back(Job::Build(id)),
            Err(why) => self.target_event(id, TargetEvent::Restored(Err(why))),
        }
    }

    fn build(&mut self, world: &mut dyn World, id: MigrationId) {
        if !self.moves.is_restoring(id) {
            return;
        }
        let Some(arrival) = self.arrival_of(id) else {
            return;
        };
        let (tid, begin) = (
            arrival.tid,
            arrival
                .record
                .as_ref()
                .and_then(|record| record.begin.clone()),
        );
        match self.beginning(world, tid, &begin.unwrap_or_default()) {
            Ok((start, epid)) => {
                if let Some(arrival) = self.arrival_of(id) {
                    arrival.epid = Some(epid);
                }
                self.tell_tasker(ToTasker::Build {
                    migration: id,
                    start,
                });
            }
            Err(why) => self.target_event(id, TargetEvent::Restored(Err(Failure::Io(why)))),
        }
    }

    /// How a program is started again here: as by a spawn on this host, with the number by which it claims its tid.
    fn beginning(
        &self,
        world: &mut dyn World,
        tid: Tid,
        begin: &Begin,
    ) -> Result<(StartTask, i32), String> {
        let (path, argv) = super::spawn::find_program(world, &begin.request)
            .map_err(|error| format!("{}: {error}", begin.request.file))?;
        let mut env = self.environment(world, &begin.request);
        let again = [AGAIN_ENV.as_bytes(), b"="].concat();
        env.retain(|entry| !entry.starts_with(&again));
        let epid = std::iter::repeat_with(|| world.secret())
            .find(|epid| !self.tasks.expected.contains_key(epid));
        let epid = epid.unwrap_or_default();
        env.push(format!("PVMEPID={epid}").into_bytes());
        env.push(format!("{AGAIN_ENV}={}", begin.count).into_bytes());
        let pinned = false;
        Ok((
            StartTask {
                tid,
                path,
                argv,
                env,
                dir: world.work_dir(begin.dir()),
                pinned,
            },
            epid,
        ))
    }
}

/// What this host has against starting the program of such a task; `None` if it is for CRIU only.
fn anew(world: &dyn World, facts: &TaskFacts) -> Other {
    let begin = facts.begin.as_ref()?;
    let engine = begin.anew()?;
    let mut verdict = Verdict::new();
    if let Err(PvmError::NoFile) = super::spawn::find_program(world, &begin.request) {
        let why =
            "this host has no such program where programs of spawned tasks are looked for".into();
        verdict.push(Refusal::File {
            path: (&begin.request.file).into(),
            why,
        });
    }
    if let Some(dir) = begin.dir().filter(|dir| lacks_dir(world, dir)) {
        let why = "this host has no such directory that can be entered; what the program needs has to be there".into();
        verdict.push(Refusal::File {
            path: dir.into(),
            why,
        });
    }
    Some((engine, verdict))
}

/// True if this host has no such working directory that can be entered.
fn lacks_dir(world: &dyn World, dir: &str) -> bool {
    let usual = world.work_dir(None);
    world.work_dir(Some(dir)) == usual && usual.join(dir) != usual
}

/// True if the tasker need not be asked: the first way is not CRIU and can be gone, or there is no other.
fn decides(facts: &TaskFacts, verdict: &Verdict) -> bool {
    let first = facts.begin.as_ref().and_then(|begin| begin.engines.first());
    !facts.by_criu() || verdict.is_empty() && first != Some(&Engine::Criu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_both_ways_that_are_possible_criu_comes_first_and_of_none_all_reasons_are_said() {
        let other = Engine::Restart { wait: 5 };
        assert_eq!(
            choose(vec![], Some((other, vec![]))),
            (vec![], Engine::Criu)
        );
        assert_eq!(
            choose(vec![Refusal::Pinned], Some((other, vec![]))),
            (vec![], other)
        );
        let both = choose(
            vec![Refusal::Pinned],
            Some((other, vec![Refusal::Suspended])),
        );
        assert_eq!(
            both,
            (vec![Refusal::Pinned, Refusal::Suspended], Engine::Criu)
        );
        assert_eq!(choose(vec![Refusal::Pinned], None).0, vec![Refusal::Pinned]);
    }
}
