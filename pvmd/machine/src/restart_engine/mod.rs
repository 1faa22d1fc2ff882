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
//! Before the program is asked, its library reports the state of its links (see `handoff_log`). The
//! new process continues these links, so that peers notice nothing. The task therefore keeps its
//! incarnation, and no other task is involved.

mod inspection;
mod program_start;
use super::notify::{own_daemon_message, pack_ints};
use super::rpc::ReplyAddress;
use super::tasks::{ConnectionPhase, Task};
use super::{Machine, Output, Timer, World};
use checkpoint_protocol::SourceEvent;
use sempa_proto::engine::{AskMethod, Engine, LaunchInfo};
use sempa_proto::host::{DataMsg, PendingItem};
use sempa_proto::migration::{Failure, Migration, TaskFacts, Usage, Verdict};
use sempa_proto::task::{Reply, SpawnRequest, ToTask};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{Micros, MigrationId, RequestId, Tid};
use std::collections::VecDeque;

/// Wait status of a program that could not be started: exit status 1.
const NOT_STARTED_STATUS: i32 = 0x100;
/// Time limit for a library to report its link states.
const HANDOFF_TIMEOUT: Micros = Micros::from_secs(5);
/// Time after an aborted migration in which a program that exits as requested is still started
/// again.
const LATE_EXIT_WINDOW: Micros = Micros::from_secs(60);
/// Signals that end a task that has no process at the moment.
pub(super) const TERMINATING_SIGNALS: [i32; 2] = [9, 15];

/// Progress of a program's exit before a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExitStage {
    /// The library had quiesced for a pause and must reconnect first.
    Reconnecting,
    /// The library must report its link states.
    AwaitingHandoff,
    /// The link states are known, and the program is being asked to exit.
    ExitRequested,
    /// The migration is aborted; the library must continue.
    Resuming,
    /// The task continues, but its program may still exit as it was asked.
    LateExitPossible,
}

/// A task whose program was asked to exit, so that it can be started again.
#[derive(Clone, Copy, Debug)]
pub(super) struct GracefulExit {
    pub(super) migration: MigrationId,
    engine: Engine,
    pub(super) stage: ExitStage,
    /// True if the request to exit was sent.
    exit_requested: bool,
    /// Engine of an earlier migration whose request to exit is still outstanding.
    earlier_requested_engine: Option<Engine>,
    /// True if the migration is aborted.
    is_aborted: bool,
    /// True if a signal has ended the task, so that its program is not started again.
    is_final: bool,
    /// True if the task was paused since the window for a late exit last began.
    pub(super) was_paused: bool,
}

/// A task whose process has exited and that is started again.
#[derive(Debug)]
pub(super) struct Respawning {
    migration: MigrationId,
    /// True if the program is started again on this host.
    restarts_here: bool,
    /// Number of items at the head of the inbox that come from the handoff of the previous process.
    pub(super) left_items: usize,
}

/// Work that needs the [`World`].
#[derive(Debug)]
pub(super) enum WorldCall {
    /// Judges whether this host accepts a migrating task.
    JudgeMigration(MigrationId, TaskFacts),
    /// Judges for a placement query whether this host accepts a task. The verdict contains the
    /// objections that the daemon already has.
    JudgeQuery(ReplyAddress, Verdict, TaskFacts),
    /// Starts the program of a task of this host again.
    Respawn(Tid),
    /// Starts the program of an arriving task and holds it at its entry.
    Prepare(MigrationId),
    /// Collects the files into which a task of this host has written its state, for a checkpoint.
    CollectState(MigrationId),
    /// Copies the state files of an arriving task to their directories, under temporary names.
    StageState(MigrationId),
}

/// Work that runs at the end of the current event.
pub(super) type WorldCalls = VecDeque<WorldCall>;

/// A host's preferred restart engine for a task, with its verdict; `None` if the task permits only
/// CRIU.
pub(super) type RestartVerdict = Option<(Engine, Verdict)>;

/// Chooses between CRIU and a restart engine by their verdicts. CRIU is chosen if it is possible.
/// If neither engine is possible, the verdict contains all refusals.
pub(super) fn choose_engine(criu: Verdict, other: RestartVerdict) -> (Verdict, Engine) {
    match other {
        _ if criu.is_empty() => (criu, Engine::Criu),
        Some((engine, verdict)) if verdict.is_empty() => (verdict, engine),
        Some((_, verdict)) => (criu.into_iter().chain(verdict).collect(), Engine::Criu),
        None => (criu, Engine::Criu),
    }
}

/// Returns the launch information of a spawn, if its tasks permit engines other than CRIU.
pub(super) fn launch_info_of(request: &SpawnRequest) -> Result<Option<Box<LaunchInfo>>, String> {
    let launch = LaunchInfo::from_request(request)?;
    Ok(launch.restart_engine().is_some().then(|| Box::new(launch)))
}

impl GracefulExit {
    /// True if the program reports by its exit status that it must be started again.
    pub(super) fn is_self_checkpoint(&self) -> bool {
        matches!(self.engine, Engine::SelfCheckpoint { .. })
    }

    /// True if the program was asked to exit, so that it is started again after its exit.
    fn was_asked_to_exit(&self) -> bool {
        self.exit_requested || self.earlier_requested_engine.is_some()
    }

    /// True if the process exits even if the migration is aborted.
    fn must_exit(&self) -> bool {
        self.exit_requested && !self.is_self_checkpoint()
    }
}

impl Task {
    /// True while the program is about to exit, to be started again.
    pub(super) fn is_exiting(&self) -> bool {
        self.graceful_exit
            .is_some_and(|ending| ending.stage != ExitStage::LateExitPossible)
    }

    /// Records that the program does not handle the signal that asks for its own checkpoint. True
    /// if CRIU may dump the task instead and was not tried yet.
    fn fall_back_to_criu(&mut self, id: MigrationId) -> bool {
        self.ignores_checkpoint_signal = Some(id);
        self.launch
            .as_ref()
            .is_some_and(|begin| begin.allows_criu() && begin.prefers_self_checkpoint())
    }

    /// True while the task has no process because it is being started again.
    pub(super) fn is_respawning(&self) -> bool {
        self.respawning.is_some()
    }
}

impl Machine {
    /// Performs one queued call that needs the world. False if no call was queued.
    pub(super) fn run_world_call(&mut self, world: &mut dyn World) -> bool {
        match self.world_calls.pop_front() {
            None => return false,
            Some(WorldCall::JudgeMigration(id, facts)) => self.judge_migration(world, id, facts),
            Some(WorldCall::JudgeQuery(back, known, facts)) => {
                self.judge_query(world, back, known, facts)
            }
            Some(WorldCall::Respawn(tid)) => self.respawn(world, tid),
            Some(WorldCall::Prepare(id)) => self.prepare_program(world, id),
            Some(WorldCall::CollectState(id)) => self.collect_state(world, id),
            Some(WorldCall::StageState(id)) => self.stage_state(world, id),
        }
        true
    }

    // ---- Exit of the old process

    /// Begins the exit of a program for a migration.
    pub(super) fn begin_graceful_exit(&mut self, id: MigrationId, tid: Tid, engine: Engine) {
        let is_paused = self.must_pause(tid);
        let may = |task: &&mut Task| {
            !task.awaits_restarted_process
                && task.respawning.is_none()
                && task.exit_report.is_none()
        };
        let Some(task) = self.tasks.get_mut(tid).filter(may) else {
            let why = Failure::Engine("its program is just being started, or has ended".into());
            return self.source_event(id, SourceEvent::Stopped(Err(why)));
        };
        let before = |ending: GracefulExit| {
            if ending.exit_requested {
                Some(ending.engine)
            } else {
                ending.earlier_requested_engine
            }
        };
        let (wakes, earlier_request) = (task.pause.is_some(), task.graceful_exit.and_then(before));
        task.graceful_exit = Some(GracefulExit {
            migration: id,
            engine,
            stage: ExitStage::Reconnecting,
            exit_requested: false,
            earlier_requested_engine: earlier_request,
            is_aborted: false,
            is_final: false,
            was_paused: false,
        });
        self.set_timer(HANDOFF_TIMEOUT, Timer::HandoffTimeout(tid, id));
        if is_paused {
            // A paused task may run to report its link states.
            self.send_to_tasker(ToTasker::Pause {
                tid,
                run_for: HANDOFF_TIMEOUT,
            });
        }
        if wakes {
            self.resume_to_exit(tid);
        } else {
            self.request_handoff(tid);
        }
    }

    /// Asks the program to exit, because its library has reported its link states.
    pub(super) fn request_exit(&mut self, tid: Tid, by: MigrationId) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let is_current = |ending: &&mut GracefulExit| {
            ending.migration == by && ending.stage == ExitStage::AwaitingHandoff
        };
        let Some(ending) = task.graceful_exit.as_mut().filter(is_current) else {
            return;
        };
        ending.stage = ExitStage::ExitRequested;
        // A program that exits late was already asked, for an earlier migration.
        if ending.is_aborted || std::mem::replace(&mut ending.exit_requested, true) {
            return;
        }
        let GracefulExit {
            migration, engine, ..
        } = *ending;
        self.send_to_tasker(ToTasker::RequestExit { tid, engine });
        let Some((_, wait)) = engine.exit_request() else {
            return;
        };
        self.set_timer(
            Micros::from_secs(wait.into()),
            Timer::ExitTimeout(tid, migration),
        );
    }

    /// Asks a program by a message to exit. Called when the tasker has begun to expect the exit.
    /// The message is sent even if the migration was aborted meanwhile, because a program that is
    /// asked by a signal would have received its signal, too.
    pub(super) fn send_exit_message(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get(tid) else {
            return;
        };
        let Some(ending) = task.graceful_exit.filter(|ending| ending.exit_requested) else {
            return;
        };
        let (Some((AskMethod::Message(tag), wait)), Some(conn)) =
            (ending.engine.exit_request(), task.conn())
        else {
            return;
        };
        // The message bypasses the inbox, whose items are for the next process.
        let message = own_daemon_message(
            tid,
            (0, tag),
            pack_ints(&[i32::try_from(wait).unwrap_or(i32::MAX)]),
        );
        self.outputs.push_back(Output::ToTask {
            conn,
            message: ToTask::Deliver {
                message,
                deliver_after: None,
            },
        });
    }

    /// Fails a migration if the library has not reported its link states within
    /// [`HANDOFF_TIMEOUT`].
    pub(super) fn handle_handoff_timeout(&mut self, tid: Tid, id: MigrationId) {
        let ending = self
            .tasks
            .get(tid)
            .and_then(|task| task.graceful_exit.as_ref());
        let silent = |ending: &&GracefulExit| {
            ending.migration == id
                && matches!(
                    ending.stage,
                    ExitStage::Reconnecting | ExitStage::AwaitingHandoff
                )
        };
        if ending
            .filter(silent)
            .is_some_and(|ending| !ending.is_aborted)
        {
            let why = "its library did not report its link states in time".into();
            self.source_event(id, SourceEvent::Stopped(Err(Failure::Engine(why))));
        }
    }

    /// Fails a migration because the tasker has not asked the program to exit.
    pub(super) fn handle_exit_not_requested(&mut self, tid: Tid, why: String) {
        let Some(ending) = self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.graceful_exit.as_mut())
        else {
            return;
        };
        ending.exit_requested = false;
        let id = ending.migration;
        self.source_event(id, SourceEvent::Stopped(Err(Failure::Engine(why))));
    }

    /// Handles the notice of a library that its program is about to exit. If that exit is late, the
    /// library reports its link states now.
    pub(super) fn handle_about_to_exit(&mut self, tid: Tid, id: RequestId) {
        let is_aborted = self
            .tasks
            .get(tid)
            .and_then(|task| task.graceful_exit.as_ref());
        if is_aborted.is_some_and(|ending| ending.stage == ExitStage::LateExitPossible) {
            self.request_handoff(tid);
        }
        self.reply(tid, id, Reply::Done);
    }

    /// Handles the end of the time limit for a program to exit.
    pub(super) fn handle_exit_timeout(&mut self, tid: Tid, id: MigrationId) {
        let Some(task) = self
            .tasks
            .get(tid)
            .filter(|task| task.exit_report.is_none())
        else {
            return;
        };
        let Some(GracefulExit { engine, .. }) =
            task.graceful_exit.filter(|ending| ending.migration == id)
        else {
            return;
        };
        match engine {
            Engine::Criu => {}
            Engine::Restart { .. } => self.send_to_tasker(ToTasker::Kill { tid }),
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
    pub(super) fn handle_exit_for_restart(&mut self, tid: Tid, status: i32, used: Usage) -> bool {
        if self.shutdown.is_some() || self.tasker_gone {
            return false;
        }
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let continues = |ending: &GracefulExit| {
            let asked = ending.exit_requested.then_some(ending.engine);
            let mut by = asked.into_iter().chain(ending.earlier_requested_engine);
            !ending.is_final && by.any(|engine| engine.restarts_after(status))
        };
        let Some(GracefulExit { migration, .. }) = task.graceful_exit.filter(continues) else {
            return false;
        };
        let Some(log) = task.handoff_log.take() else {
            return false;
        };
        let conn = task.conn();
        task.graceful_exit = None;
        (task.exit_report, task.earlier_usage) = (None, used);
        (task.phase, task.holds_items, task.quiesced) = (ConnectionPhase::Detached, true, false);
        (task.pid, task.settling_part, task.permitted_open_requests) = (0, None, None);
        task.requests.clear();
        task.untimed_requests.clear();
        let count = task.launch.as_mut().map_or(0, |begin| {
            begin.restart_count += 1;
            begin.restart_count
        });
        let (successor, left, waiting) = log.into_handoff(count, task.inbox.drain());
        task.handoff = Some(Box::new(successor));
        left.into_iter().for_each(|held| task.inbox.push(held));
        task.respawning = Some(Respawning {
            migration,
            restarts_here: false,
            left_items: task.inbox.queue.len(),
        });
        waiting.into_iter().for_each(|held| task.inbox.push(held));
        if let Some(conn) = conn {
            self.conns.retire(conn);
            self.outputs.push_back(Output::CloseTask { conn });
        }
        self.end_pause(tid);
        // Peers that share rings with the task read the remaining data in the rings.
        for partner in self.ring_peers.remove_task(tid) {
            self.deliver(partner, ToTask::PeerMigrated { tid });
        }
        self.advance_respawn(tid);
        true
    }

    fn advance_respawn(&mut self, tid: Tid) {
        let Some(respawning) = self
            .tasks
            .get(tid)
            .and_then(|task| task.respawning.as_ref())
        else {
            return;
        };
        let waits = self
            .migrations
            .sources
            .get(&respawning.migration)
            .is_some_and(|source| source.awaits_exit());
        if waits {
            self.source_event(respawning.migration, SourceEvent::Stopped(Ok(())));
        } else {
            // The migration was aborted, possibly long ago.
            self.world_calls.push_back(WorldCall::Respawn(tid));
        }
    }

    /// Handles the abort of a migration by a restart engine. False if the migration used no restart
    /// engine.
    pub(super) fn abort_graceful_exit(&mut self, id: MigrationId, tid: Tid) -> bool {
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        if let Some(respawning) = task
            .respawning
            .as_mut()
            .filter(|respawning| respawning.migration == id)
        {
            if !std::mem::replace(&mut respawning.restarts_here, true) {
                self.world_calls.push_back(WorldCall::Respawn(tid));
            }
            return true;
        }
        let conn = task.conn();
        let Some(ending) = task
            .graceful_exit
            .as_mut()
            .filter(|ending| ending.migration == id)
        else {
            return false;
        };
        ending.is_aborted = true;
        // A program that exits in any case is started again on this host.
        if !ending.must_exit() && ending.stage != ExitStage::Reconnecting && conn.is_some() {
            // The program continues. If it exits as it was asked, it is started again.
            ending.stage = ExitStage::Resuming;
            let message = ToTask::PrepareExit { migration: None };
            self.outputs
                .extend(conn.map(|conn| Output::ToTask { conn, message }));
            if self.must_pause(tid) {
                // A paused task may run to continue its links.
                self.send_to_tasker(ToTasker::Pause {
                    tid,
                    run_for: HANDOFF_TIMEOUT,
                });
            }
        }
        self.source_event(id, SourceEvent::TaskResumed);
        true
    }

    /// Handles the order to resume the library of a task whose program was asked to exit. True if
    /// no token must be written, because the library is not quiesced.
    pub(super) fn resume_without_token(&mut self, id: MigrationId, tid: Tid) -> bool {
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        if task.awaits_restarted_process {
            return true;
        }
        let Some(ending) = task.graceful_exit.filter(|ending| ending.migration == id) else {
            return false;
        };
        if ending.stage != ExitStage::Resuming && !ending.must_exit() {
            self.finish_aborted_exit(tid);
        }
        true
    }

    /// Handles the report of a library that it continues after an aborted migration.
    pub(super) fn handle_exit_cancelled(&mut self, tid: Tid, by: MigrationId) {
        let ending = self
            .tasks
            .get(tid)
            .and_then(|task| task.graceful_exit.as_ref());
        if ending
            .is_some_and(|ending| ending.migration == by && ending.stage == ExitStage::Resuming)
        {
            self.cancel_handoff(tid);
            self.finish_aborted_exit(tid);
        }
    }

    /// Ends an aborted migration: the task continues, or it has left the virtual machine and only
    /// its exit is awaited.
    pub(super) fn finish_aborted_exit(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let left = task.conn().is_none() && task.pause.is_none();
        let Some(ending) = task.graceful_exit.as_mut() else {
            return;
        };
        let id = ending.migration;
        match (ending.was_asked_to_exit(), left) {
            (false, _) => task.graceful_exit = None,
            (true, true) => {}
            (true, false) => ending.stage = ExitStage::LateExitPossible,
        }
        if task.graceful_exit.is_some() {
            self.set_timer(LATE_EXIT_WINDOW, Timer::LateExitTimeout(tid, id));
        }
        self.source_event(id, SourceEvent::Reconnected);
        if self.must_pause(tid) {
            self.pause_guest(tid);
        } else {
            self.send_to_tasker(ToTasker::Resume { tid });
        }
    }

    /// Handles a program that leaves the virtual machine while it is about to exit. After an abort,
    /// its library is not awaited further.
    pub(super) fn handle_leave_while_exiting(&mut self, tid: Tid) {
        let ending = self
            .tasks
            .get(tid)
            .and_then(|task| task.graceful_exit.as_ref());
        if ending.is_some_and(|ending| ending.stage == ExitStage::Resuming) {
            self.finish_aborted_exit(tid);
        }
    }

    /// Handles the end of the window for a late exit.
    pub(super) fn handle_late_exit_timeout(&mut self, tid: Tid, id: MigrationId) {
        let is_paused = self.must_pause(tid);
        let Some(task) = self
            .tasks
            .get_mut(tid)
            .filter(|task| task.exit_report.is_none())
        else {
            return;
        };
        let left = task.conn().is_none();
        let Some(ending) = task
            .graceful_exit
            .as_mut()
            .filter(|ending| ending.migration == id && ending.is_aborted)
        else {
            return;
        };
        if std::mem::replace(&mut ending.was_paused, is_paused) || is_paused {
            // The window counts only while the task runs, so it begins again.
            self.set_timer(LATE_EXIT_WINDOW, Timer::LateExitTimeout(tid, id));
        } else if ending.stage == ExitStage::LateExitPossible {
            self.withdraw_exit_request(tid);
        } else if left {
            // The program has left the virtual machine instead of exiting.
            task.handoff_log = None;
            self.withdraw_exit_request(tid);
            self.detach(tid);
        } else {
            self.set_timer(LATE_EXIT_WINDOW, Timer::LateExitTimeout(tid, id));
        }
    }

    /// Withdraws the request to exit: from now on every exit ends the task.
    pub(super) fn withdraw_exit_request(&mut self, tid: Tid) {
        if self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.graceful_exit.take())
            .is_some_and(|ending| ending.was_asked_to_exit())
        {
            self.send_to_tasker(ToTasker::WithdrawExitRequest { tid });
        }
    }

    /// Handles the order to kill the process of a migrated task at the source. True if there is no
    /// process to kill.
    pub(super) fn report_absent_copy(&mut self, id: MigrationId, tid: Tid) -> bool {
        let Some(task) = self.tasks.get(tid).filter(|task| task.is_respawning()) else {
            return false;
        };
        let used = task.earlier_usage;
        self.source_event(id, SourceEvent::Killed(used));
        true
    }

    /// Sends a task without a process to its target. The items from the handoff of its process come
    /// first, because no peer would send them again if this host were lost.
    pub(super) fn send_task_without_process(&mut self, of: &Migration) {
        let left: Vec<PendingItem> = self
            .tasks
            .get(of.tid)
            .map(|task| task.inbox.iter().cloned().collect())
            .unwrap_or_default();
        for held in left {
            let message = DataMsg::Forwarded {
                dst: of.tid,
                migration: of.id,
                item: held,
            };
            self.outputs.push_back(Output::SendData {
                host: of.to,
                message,
            });
        }
        self.send_record(of, false);
        if let Some(task) = self.tasks.get_mut(of.tid) {
            task.transferring_migration = Some(of.id);
        }
    }

    /// Handles a signal for a task without a process, or with a process that is just starting. True
    /// if the signal needs no further handling: such a task either ends by it or ignores it. A
    /// program that was asked to exit by the restart engine is not started again after a signal
    /// that ends tasks.
    pub(super) fn signal_without_process(&mut self, tid: Tid, signal: i32) -> bool {
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let is_terminating = TERMINATING_SIGNALS.contains(&signal);
        if let Some(ending) = task
            .graceful_exit
            .as_mut()
            .filter(|ending| matches!(ending.engine, Engine::Restart { .. }))
        {
            ending.is_final |= is_terminating;
        }
        let used = task.earlier_usage;
        if task.respawning.is_some() && is_terminating {
            task.respawning = None;
            self.end_task(tid, signal, used);
            return true;
        }
        task.respawning.is_some() || task.awaits_restarted_process && !is_terminating
    }
}

/// True if `dir` is not a directory on this host that can be entered.
fn lacks_dir(world: &dyn World, dir: &str) -> bool {
    let usual = world.work_dir(None);
    world.work_dir(Some(dir)) == usual && usual.join(dir) != usual
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::migration::Refusal;

    /// CRIU is chosen if both engines are possible. If neither is, the verdict contains all
    /// refusals.
    #[test]
    fn criu_is_preferred_and_all_refusals_are_kept() {
        let other = Engine::Restart { timeout_s: 5 };
        assert_eq!(
            choose_engine(vec![], Some((other, vec![]))),
            (vec![], Engine::Criu)
        );
        assert_eq!(
            choose_engine(vec![Refusal::Pinned], Some((other, vec![]))),
            (vec![], other)
        );
        let both = choose_engine(
            vec![Refusal::Pinned],
            Some((other, vec![Refusal::Suspended])),
        );
        assert_eq!(
            both,
            (vec![Refusal::Pinned, Refusal::Suspended], Engine::Criu)
        );
        assert_eq!(
            choose_engine(vec![Refusal::Pinned], None).0,
            vec![Refusal::Pinned]
        );
    }
}
