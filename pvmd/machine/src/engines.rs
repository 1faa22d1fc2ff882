//! Restart engines: migration without CRIU. The program exits and is started again at the target,
//! either from its own checkpoint or from its beginning.
//!
//! The migration protocol is the same. Only some steps differ:
//!
//! | Step | With CRIU | With a restart engine |
//! | --- | --- | --- |
//! | quiesce, stop, dump | images are written | the program is asked to exit |
//! | transfer | images | the task's record |
//! | restore | processes are rebuilt | the program is started, and held at its entry |
//! | abort | the task resumes at the source | the source starts the program again |
//!
//! A signal or a message asks the program to exit. The task does not end with its process: it keeps
//! its tid, and items for it wait at its daemon. At the target the program is held before its first
//! instruction until the commit.
//!
//! Before the program is asked, its library reports the state of its links (see `parting`). The new
//! process continues these links, so that peers notice nothing. The task therefore keeps its
//! incarnation, and no other task is involved.

use super::asks::Back;
use super::notify::{daemons_message, ints};
use super::tasks::{Phase, Task};
use super::{Machine, Output, Timer, World};
use checkpoint_protocol::{InspectedTask, SourceEvent, TargetEvent};
use sempa_proto::engine::{AskMethod, Engine, LaunchInfo, RESTART_COUNT_ENV, STATE_ENV};
use sempa_proto::event::EventKind;
use sempa_proto::host::{DataMsg, PendingItem};
use sempa_proto::migration::{
    Failure, Migration, MigrationCause, Refusal, TaskFacts, Usage, Verdict,
};
use sempa_proto::task::{Reply, SpawnRequest, ToTask};
use sempa_proto::tasker::{DumpReport, StartTask, ToTasker};
use sempa_proto::{Micros, MigrationId, PvmError, RequestId, Tid};
use std::collections::VecDeque;

/// Wait status of a program that could not be started: exit status 1.
const NOT_STARTED: i32 = 0x100;
/// Time for a library to report its link states.
const HEAR_TIME: Micros = Micros::from_secs(5);
/// Time after an aborted migration in which a program that exits as agreed is still started again.
const LATE_TIME: Micros = Micros::from_secs(60);
/// Signals that end a task that has no process at the moment.
pub(super) const DEADLY: [i32; 2] = [9, 15];

/// Progress of a program's exit before a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The library had quiesced for a pause and must reconnect first.
    Waking,
    /// The library must report its link states.
    Hearing,
    /// The link states are known, and the program is being asked to exit.
    Asked,
    /// The migration is aborted; the library must continue.
    Returning,
    /// The task continues, but its program may still exit as it was asked.
    Off,
}

/// A task whose program was asked to exit, so that it can be started again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    pub(super) migration: MigrationId,
    engine: Engine,
    pub(super) stage: Stage,
    /// The request to exit was sent.
    asked: bool,
    /// Engine of an earlier migration whose request to exit is still outstanding.
    asked_before: Option<Engine>,
    /// The migration is aborted.
    off: bool,
    /// A signal has ended the task: it is not started again.
    for_good: bool,
    /// The task was paused since the window for a late exit last began.
    pub(super) stood: bool,
}

/// A task whose process has exited and that is started again.
#[derive(Debug)]
pub(super) struct Away {
    migration: MigrationId,
    /// The program is started again on this host.
    here: bool,
    /// Number of items at the head of the inbox that the previous process has left.
    pub(super) left: usize,
}

/// Work that needs the [`World`].
#[derive(Debug)]
pub(super) enum Job {
    /// Judges whether this host accepts a migrating task.
    JudgeMove(MigrationId, TaskFacts),
    /// The same for a placement query. The verdict contains the objections that the daemon already
    /// has.
    JudgeQuestion(Back, Verdict, TaskFacts),
    /// Starts the program of a task of this host again.
    Start(Tid),
    /// Starts the program of an arriving task and holds it.
    Build(MigrationId),
    /// Collects the files into which a task of this host has written its state, for a checkpoint.
    Collect(MigrationId),
    /// Copies such files to their directories for an arriving task, under temporary names.
    Stage(MigrationId),
}

/// Work that runs at the end of the current event.
pub(super) type Jobs = VecDeque<Job>;

/// A host's preferred restart engine for a task, with its verdict; `None` if the task permits only
/// CRIU.
pub(super) type Other = Option<(Engine, Verdict)>;

/// Chooses between CRIU and a restart engine by their verdicts. CRIU wins if it is possible. If
/// neither is, the verdict contains all refusals.
pub(super) fn choose(criu: Verdict, other: Other) -> (Verdict, Engine) {
    match other {
        _ if criu.is_empty() => (criu, Engine::Criu),
        Some((engine, verdict)) if verdict.is_empty() => (verdict, engine),
        Some((_, verdict)) => (criu.into_iter().chain(verdict).collect(), Engine::Criu),
        None => (criu, Engine::Criu),
    }
}

/// Returns the launch information of a spawn, if its tasks permit engines other than CRIU.
pub(super) fn begin_of(request: &SpawnRequest) -> Result<Option<Box<LaunchInfo>>, String> {
    let begin = LaunchInfo::from_request(request)?;
    Ok(begin.restart_engine().is_some().then(|| Box::new(begin)))
}

impl Ending {
    /// True if the program reports by its exit status that it must be started again.
    pub(super) fn is_agreed(&self) -> bool {
        matches!(self.engine, Engine::SelfCheckpoint { .. })
    }

    /// True if the program may exit as agreed, to be started again.
    fn may_end(&self) -> bool {
        self.asked || self.asked_before.is_some()
    }

    /// True if the process exits in any case.
    fn has_to_end(&self) -> bool {
        self.asked && !self.is_agreed()
    }
}

impl Task {
    /// True while the program is about to exit, to be started again.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.is_some_and(|ending| ending.stage != Stage::Off)
    }

    /// Notes that the program does not handle the signal that asks for its own checkpoint. True if
    /// CRIU may dump the task instead and was not tried yet.
    fn falls_to_criu(&mut self, id: MigrationId) -> bool {
        self.unheeding = Some(id);
        self.begin
            .as_ref()
            .is_some_and(|begin| begin.allows_criu() && begin.prefers_self_checkpoint())
    }

    /// True while the task has no process because it is being started again.
    pub(super) fn is_away(&self) -> bool {
        self.away.is_some()
    }
}

impl Machine {
    /// Performs one piece of work that needs the world. False if there was none.
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

    // ---- Inspection and verdict

    /// Returns the properties of a task of this host if the tasker need not be asked, because the
    /// task does not permit CRIU or must not use it now. `None`: the tasker must be asked.
    pub(super) fn facts_without_criu(
        &self,
        tid: Tid,
        cause: Option<&MigrationCause>,
    ) -> Option<Result<TaskFacts, Refusal>> {
        let task = self.tasks.get(tid)?;
        // CRIU must not migrate a task that may still exit by an earlier request, because the
        // target would not expect that exit.
        let begin = task.begin.as_ref()?;
        let by_criu = begin.allows_criu() && task.ending.is_none();
        if cause != Some(&MigrationCause::Checkpoint) {
            return (!by_criu).then(|| self.facts_anew(tid).unwrap_or(Err(Refusal::NoSuchTask)));
        }
        if task.ending.is_some() {
            return Some(Err(Refusal::SelfCheckpointPending));
        }
        let own_first = begin.prefers_self_checkpoint();
        match self.facts_written(tid)? {
            Err(_) if by_criu => None,
            result => (own_first || !by_criu).then_some(result),
        }
    }

    /// Returns the properties of a task whose program writes its own checkpoint.
    fn facts_written(&self, tid: Tid) -> Option<Result<TaskFacts, Refusal>> {
        let mut begin = self.tasks.get(tid)?.begin.clone()?;
        let Some(own) = begin.self_checkpoint() else {
            return Some(Err(Refusal::NoCheckpointEngine {
                engine: begin.restart_engine()?,
            }));
        };
        begin.engines = vec![own];
        Some(if begin.state_files.is_empty() {
            Err(Refusal::NoStateFiles)
        } else if self.holds_of(tid).is_suspended() {
            // The program must run to write its checkpoint.
            Err(Refusal::Suspended)
        } else {
            Ok(TaskFacts {
                uid: self.config.uid,
                launch: Some(begin),
                ..TaskFacts::default()
            })
        })
    }

    /// Combines what the tasker has found for CRIU with the restart engines that the task permits.
    pub(super) fn facts_with_criu(
        &self,
        tid: Tid,
        cause: Option<&MigrationCause>,
        result: Result<TaskFacts, Refusal>,
    ) -> Result<TaskFacts, Refusal> {
        if cause == Some(&MigrationCause::Checkpoint) {
            return result.or_else(|refusal| match self.facts_written(tid) {
                Some(Ok(facts)) => Ok(facts),
                // The user can add the missing list of files, so this is the more useful reason.
                Some(Err(Refusal::NoStateFiles)) if matches!(refusal, Refusal::NoEngine { .. }) => {
                    Err(Refusal::NoStateFiles)
                }
                _ => Err(refusal),
            });
        }
        match (result, self.facts_anew(tid)) {
            (
                Ok(facts),
                Some(Ok(TaskFacts {
                    launch: Some(mut begin),
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
                    launch: Some(begin),
                    ..facts
                })
            }
            (Err(_), Some(Ok(facts))) => Ok(facts),
            (result, _) => result,
        }
    }

    /// Returns the properties of a task for the restart engines that it permits.
    fn facts_anew(&self, tid: Tid) -> Option<Result<TaskFacts, Refusal>> {
        let mut begin = self.tasks.get(tid)?.begin.clone()?;
        let suspended = self.holds_of(tid).is_suspended();
        begin.engines.retain(|engine| match engine {
            Engine::Criu => false,
            // The program must run to write its checkpoint.
            Engine::SelfCheckpoint { .. } => !suspended,
            Engine::Restart { .. } => true,
        });
        Some(match begin.engines.is_empty() {
            true => Err(Refusal::Suspended),
            false => Ok(TaskFacts {
                uid: self.config.uid,
                launch: Some(begin),
                ..TaskFacts::default()
            }),
        })
    }

    /// Handles the properties of a task that will be migrated or dumped. If the program will write
    /// its own checkpoint, the tasker first checks the signal for that, before other tasks of the
    /// job are asked.
    pub(super) fn inspected(
        &mut self,
        id: MigrationId,
        tid: Tid,
        result: Result<TaskFacts, Refusal>,
        memory: (bool, bool),
    ) {
        let cause = self
            .moves
            .sources
            .get(&id)
            .map(|source| &source.migration().cause);
        let signal = result
            .as_ref()
            .ok()
            .filter(|_| cause == Some(&MigrationCause::Checkpoint))
            .and_then(TaskFacts::checkpoint_signal);
        match signal {
            Some(signal) => self.tell_tasker(ToTasker::CheckSignal {
                migration: id,
                tid,
                signal,
            }),
            None => self.inspection_over(id, tid, result, memory),
        }
    }

    /// Handles the tasker's answer whether a program handles the signal that asks for its own
    /// checkpoint.
    pub(super) fn signal_looked_at(&mut self, id: MigrationId, minds: bool) {
        let Some(tid) = self
            .moves
            .sources
            .get(&id)
            .map(|source| source.migration().tid)
        else {
            return;
        };
        let facts = self.facts_written(tid).unwrap_or(Err(Refusal::NoSuchTask));
        let signal = facts
            .as_ref()
            .ok()
            .and_then(TaskFacts::checkpoint_signal)
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
            false => self.inspection_over(
                id,
                tid,
                Err(Refusal::SignalNotHandled { signal }),
                (false, false),
            ),
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
        let inspected = |facts| InspectedTask {
            facts,
            suspensions: suspended,
            supports_post_copy: memory_can_follow,
            supports_pre_copy: can_pre_copy,
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
                    launch: None,
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

    /// Handles the tasker's verdict on a migrating task.
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
                supports_post_copy: memory_can_follow,
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
                    launch: None,
                    ..facts
                },
            ),
        }
    }

    // ---- Exit of the old process

    /// Begins the exit of a program for a migration.
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
            // A paused task may run to report its link states.
            self.tell_tasker(ToTasker::Pause {
                tid,
                run_for: HEAR_TIME,
            });
        }
        if wakes {
            self.wake_to_end(tid);
        } else {
            self.ask_to_part(tid);
        }
    }

    /// Asks the program to exit, because its library has reported its link states.
    pub(super) fn ask_to_end(&mut self, tid: Tid, by: MigrationId) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let hears = |ending: &&mut Ending| ending.migration == by && ending.stage == Stage::Hearing;
        let Some(ending) = task.ending.as_mut().filter(hears) else {
            return;
        };
        ending.stage = Stage::Asked;
        // A program that exits late was already asked, for an earlier migration.
        if ending.off || std::mem::replace(&mut ending.asked, true) {
            return;
        }
        let Ending {
            migration, engine, ..
        } = *ending;
        self.tell_tasker(ToTasker::RequestExit { tid, engine });
        let Some((_, wait)) = engine.exit_request() else {
            return;
        };
        self.timer(
            Micros::from_secs(wait.into()),
            Timer::Ending(tid, migration),
        );
    }

    /// Asks a program by a message to exit, because the tasker expects its exit from now on. The
    /// message is sent even if the migration was aborted meanwhile, because a program that is asked
    /// by a signal would have received that, too.
    pub(super) fn ask_by_message(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get(tid) else {
            return;
        };
        let Some(ending) = task.ending.filter(|ending| ending.asked) else {
            return;
        };
        let (Some((AskMethod::Message(tag), wait)), Some(conn)) =
            (ending.engine.exit_request(), task.conn())
        else {
            return;
        };
        // The message bypasses the inbox, whose items are for the next process.
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

    /// Fails a migration if the library has not reported its link states in time.
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

    /// Fails a migration because the tasker has not asked the program to exit.
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

    /// Handles the notice of a library that its program is about to exit. If that exit is late, the
    /// library reports its link states now.
    pub(super) fn last_words(&mut self, tid: Tid, id: RequestId) {
        let off = self.tasks.get(tid).and_then(|task| task.ending.as_ref());
        if off.is_some_and(|ending| ending.stage == Stage::Off) {
            self.ask_to_part(tid);
        }
        self.reply(tid, id, Reply::Done);
    }

    /// Handles a program that has not exited in time.
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
            Engine::SelfCheckpoint {
                ask_method: asked,
                exit_status: exit,
                timeout_s: wait,
            } => {
                let why = format!(
                    "{engine}: it was asked {asked} and has not ended with exit status {exit} within {wait} s"
                );
                self.source_event(id, SourceEvent::Stopped(Err(Failure::Engine(why))));
            }
        }
    }

    /// Handles the exit of a task's process. True if the task continues, because its program is
    /// started again.
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
            !ending.for_good && by.any(|engine| engine.restarts_after(status))
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
            begin.restart_count += 1;
            begin.restart_count
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
        // Peers that share rings with the task read what is left in them.
        for partner in self.pairs.take(tid) {
            self.deliver(partner, ToTask::PeerMigrated { tid });
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
            .is_some_and(|source| source.awaits_exit());
        if waits {
            self.source_event(away.migration, SourceEvent::Stopped(Ok(())));
        } else {
            // The migration was aborted, possibly long ago.
            self.beginnings.push_back(Job::Start(tid));
        }
    }

    /// Handles the abort of a migration by a restart engine. False if the migration used no restart
    /// engine.
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
        // A program that exits in any case is started again on this host.
        if !ending.has_to_end() && ending.stage != Stage::Waking && conn.is_some() {
            // The program continues. If it exits as it was asked, it is started again.
            ending.stage = Stage::Returning;
            let message = ToTask::PrepareExit { migration: None };
            self.out
                .extend(conn.map(|conn| Output::ToTask { conn, message }));
            if self.has_to_stand(tid) {
                // A paused task may run to continue its links.
                self.tell_tasker(ToTasker::Pause {
                    tid,
                    run_for: HEAR_TIME,
                });
            }
        }
        self.source_event(id, SourceEvent::Continued);
        true
    }

    /// Handles the order to resume the library of a task whose program was asked to exit. True if
    /// no token must be written, because the library is not quiesced.
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

    /// Handles the report of a library that it continues.
    pub(super) fn takes_again(&mut self, tid: Tid, by: MigrationId) {
        let ending = self.tasks.get(tid).and_then(|task| task.ending.as_ref());
        if ending.is_some_and(|ending| ending.migration == by && ending.stage == Stage::Returning) {
            self.part_no_more(tid);
            self.goes_on(tid);
        }
    }

    /// Ends an aborted migration: the task continues, or it has left the virtual machine and only
    /// its exit is awaited.
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
            self.tell_tasker(ToTasker::Resume { tid });
        }
    }

    /// Handles a program that leaves the virtual machine while it is about to exit. After an abort,
    /// its library is not awaited further.
    pub(super) fn ending_left(&mut self, tid: Tid) {
        let ending = self.tasks.get(tid).and_then(|task| task.ending.as_ref());
        if ending.is_some_and(|ending| ending.stage == Stage::Returning) {
            self.goes_on(tid);
        }
    }

    /// Ends the window for a late exit, if the program has not exited in it.
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
            // The window counts only while the task runs, so it begins again.
            self.timer(LATE_TIME, Timer::EndsLate(tid, id));
        } else if ending.stage == Stage::Off {
            self.asked_no_more(tid);
        } else if left {
            // The program has left the virtual machine instead of exiting.
            task.parting = None;
            self.asked_no_more(tid);
            self.detach(tid);
        } else {
            self.timer(LATE_TIME, Timer::EndsLate(tid, id));
        }
    }

    /// Withdraws the request to exit: from now on every exit ends the task.
    pub(super) fn asked_no_more(&mut self, tid: Tid) {
        if self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.ending.take())
            .is_some_and(|ending| ending.may_end())
        {
            self.tell_tasker(ToTasker::WithdrawExitRequest { tid });
        }
    }

    /// Handles the order to kill the copy at the source. True if there is no process to kill.
    pub(super) fn has_no_copy(&mut self, id: MigrationId, tid: Tid) -> bool {
        let Some(task) = self.tasks.get(tid).filter(|task| task.is_away()) else {
            return false;
        };
        let used = task.used_before;
        self.source_event(id, SourceEvent::Killed(used));
        true
    }

    /// Sends a task without a process to its new host. The items that its process has left come
    /// first: no peer would send them again if this host were lost.
    pub(super) fn send_away(&mut self, of: &Migration) {
        let left: Vec<PendingItem> = self
            .tasks
            .get(of.tid)
            .map(|task| task.inbox.iter().cloned().collect())
            .unwrap_or_default();
        for held in left {
            let carried = DataMsg::Forwarded {
                dst: of.tid,
                migration: of.id,
                item: held,
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

    /// Handles a signal for a task without a process, or with one that is just starting. True if
    /// the signal is done: such a task either ends by it or ignores it. A program that was asked to
    /// exit by the restart engine is not started again after a signal that ends tasks.
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

    // ---- Start of the new process

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
                    begin.restart_count
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

    /// Handles the connection of a program that was started again on this host.
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

    /// Collects the state files that a program has written before it exited, before it is started
    /// again.
    fn keep_state(&mut self, world: &dyn World, id: MigrationId) {
        let Some(tid) = self
            .moves
            .sources
            .get(&id)
            .map(|source| source.migration().tid)
        else {
            return;
        };
        let Some(begin) = self.tasks.get(tid).and_then(|task| task.begin.as_ref()) else {
            return;
        };
        if let Some(dir) = begin.working_dir().filter(|dir| lacks_dir(world, dir)) {
            let why = format!(
                "its working directory {dir} cannot be entered any more: nobody knows where it has written"
            );
            return self.source_event(id, SourceEvent::Dumped(Err(Failure::Io(why))));
        }
        let (files, dir) = (begin.state_paths(tid), world.work_dir(begin.working_dir()));
        self.out.push_back(Output::CollectState {
            migration: id,
            files,
            dir,
        });
    }

    /// Handles the result of collecting state files.
    pub(super) fn state_collected(&mut self, id: MigrationId, result: Result<DumpReport, Failure>) {
        let tid = self
            .moves
            .sources
            .get(&id)
            .map(|source| source.migration().tid);
        if let (Some(tid), Ok(DumpReport { files: 0, .. })) = (tid, &result) {
            let text = format!(
                "{tid} has ended as one that has written its own checkpoint, and none of the files is there that {STATE_ENV} names: \
                 from this set it begins anew"
            );
            self.record(EventKind::Note { text });
        }
        self.source_event(id, SourceEvent::Dumped(result));
    }

    /// Copies the state files of a task that is restarted from a checkpoint to their directories.
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
                .and_then(|record| record.launch.as_ref()),
        );
        let Some((files, dir)) =
            begin.map(|begin| (begin.state_paths(tid), world.work_dir(begin.working_dir())))
        else {
            return;
        };
        self.out.push_back(Output::StageState {
            migration: id,
            files,
            dir,
        });
    }

    /// Starts the program when its state files are copied. They get their final names when the task
    /// runs.
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
                .and_then(|record| record.launch.clone()),
        );
        match self.beginning(world, tid, &begin.unwrap_or_default()) {
            Ok((start, epid)) => {
                if let Some(arrival) = self.arrival_of(id) {
                    arrival.epid = Some(epid);
                }
                self.tell_tasker(ToTasker::PrepareRestart {
                    migration: id,
                    start,
                });
            }
            Err(why) => self.target_event(id, TargetEvent::Restored(Err(Failure::Io(why)))),
        }
    }

    /// Returns the order that starts the program again as a spawn on this host would, and the spawn
    /// token by which it claims its tid.
    fn beginning(
        &self,
        world: &mut dyn World,
        tid: Tid,
        begin: &LaunchInfo,
    ) -> Result<(StartTask, i32), String> {
        let (path, argv) = super::spawn::find_program(world, &begin.request)
            .map_err(|error| format!("{}: {error}", begin.request.file))?;
        let mut env = self.environment(world, &begin.request);
        let again = [RESTART_COUNT_ENV.as_bytes(), b"="].concat();
        env.retain(|entry| !entry.starts_with(&again));
        let epid = std::iter::repeat_with(|| world.secret())
            .find(|epid| !self.tasks.expected.contains_key(epid));
        let epid = epid.unwrap_or_default();
        env.push(format!("PVMEPID={epid}").into_bytes());
        env.push(format!("{RESTART_COUNT_ENV}={}", begin.restart_count).into_bytes());
        let pinned = false;
        Ok((
            StartTask {
                tid,
                path,
                argv,
                env,
                working_dir: world.work_dir(begin.working_dir()),
                pinned,
            },
            epid,
        ))
    }
}

/// Returns this host's verdict on starting the program of such a task; `None` if the task permits
/// only CRIU.
fn anew(world: &dyn World, facts: &TaskFacts) -> Other {
    let begin = facts.launch.as_ref()?;
    let engine = begin.restart_engine()?;
    let mut verdict = Verdict::new();
    if let Err(PvmError::NoFile) = super::spawn::find_program(world, &begin.request) {
        let why =
            "this host has no such program where programs of spawned tasks are looked for".into();
        verdict.push(Refusal::File {
            path: (&begin.request.file).into(),
            why,
        });
    }
    if let Some(dir) = begin.working_dir().filter(|dir| lacks_dir(world, dir)) {
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

/// True if the tasker need not be asked: the task's first engine is a restart engine that is
/// possible here, or the task does not permit CRIU.
fn decides(facts: &TaskFacts, verdict: &Verdict) -> bool {
    let first = facts
        .launch
        .as_ref()
        .and_then(|begin| begin.engines.first());
    !facts.allows_criu() || verdict.is_empty() && first != Some(&Engine::Criu)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CRIU is chosen if both engines are possible. If neither is, the verdict contains all
    /// refusals.
    #[test]
    fn criu_is_preferred_and_all_refusals_are_kept() {
        let other = Engine::Restart { timeout_s: 5 };
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
