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
use sempa_proto::engine::{AskMethod, Engine, LaunchInfo, LaunchInfoError};
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
const LATE_EXIT_TIMEOUT: Micros = Micros::from_secs(60);
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
    /// The task continues, but its program may still exit because it was asked to.
    LateExitPossible,
}

/// State of an exit of a program that was requested, or will be requested, so that the program can
/// be started again.
#[derive(Clone, Copy, Debug)]
pub(super) struct GracefulExit {
    pub(super) migration: MigrationId,
    engine: Engine,
    pub(super) stage: ExitStage,
    /// True if the request to exit was sent.
    exit_requested: bool,
    /// Engine of an earlier migration whose request to exit still applies.
    earlier_requested_engine: Option<Engine>,
    /// True if the migration is aborted.
    is_aborted: bool,
    /// True if a signal has ended the task. Its program is then not started again.
    is_final: bool,
    /// True if the task was paused since the window for a late exit last began.
    pub(super) was_paused: bool,
}

/// State of a task whose process has exited and whose program is started again.
#[derive(Debug)]
pub(super) struct RespawnState {
    migration: MigrationId,
    /// True if the program is started again on this host.
    restarts_locally: bool,
    /// Number of items at the head of the inbox that come from the handoff of the previous process.
    pub(super) handoff_item_count: usize,
}

/// A call of the machine that needs the [`World`].
#[derive(Debug)]
pub(super) enum WorldCall {
    /// Determines whether this host accepts a migrating task.
    MigrationVerdict(MigrationId, TaskFacts),
    /// Determines for a placement query whether this host accepts a task. The verdict contains the
    /// objections that the daemon already has.
    QueryVerdict(ReplyAddress, Verdict, TaskFacts),
    /// Starts the program of a task of this host again.
    Respawn(Tid),
    /// Starts the program of an arriving task and holds it at its entry.
    PrepareProgram(MigrationId),
    /// Collects the files into which a task of this host has written its state, for a checkpoint.
    CollectState(MigrationId),
    /// Copies the state files of an arriving task to their directories, under temporary names.
    StageState(MigrationId),
}

/// Calls that are performed at the end of the current event.
pub(super) type WorldCalls = VecDeque<WorldCall>;

/// A host's preferred restart engine for a task, with its verdict; `None` if the task permits only
/// CRIU.
pub(super) type RestartVerdict = Option<(Engine, Verdict)>;

/// Chooses between CRIU and a restart engine by their verdicts. CRIU is chosen if CRIU is possible.
/// If neither engine is possible, the returned verdict contains the refusals of both.
pub(super) fn choose_engine(
    criu_verdict: Verdict,
    restart_verdict: RestartVerdict,
) -> (Verdict, Engine) {
    match restart_verdict {
        _ if criu_verdict.is_empty() => (criu_verdict, Engine::Criu),
        Some((engine, verdict)) if verdict.is_empty() => (verdict, engine),
        Some((_, verdict)) => (
            criu_verdict.into_iter().chain(verdict).collect(),
            Engine::Criu,
        ),
        None => (criu_verdict, Engine::Criu),
    }
}

/// Returns the launch information of a spawn; `None` if its tasks permit only CRIU.
pub(super) fn launch_info_of(
    request: &SpawnRequest,
) -> Result<Option<Box<LaunchInfo>>, LaunchInfoError> {
    let launch = LaunchInfo::from_request(request)?;
    Ok(launch.restart_engine().is_some().then(|| Box::new(launch)))
}

impl GracefulExit {
    /// True if the program writes its own checkpoint before it exits. The program then reports by
    /// its exit status that it must be started again.
    pub(super) fn is_self_checkpoint(&self) -> bool {
        matches!(self.engine, Engine::SelfCheckpoint { .. })
    }

    /// True if the program was asked to exit, for this migration or an earlier migration. The
    /// program is then started again after its exit.
    fn was_asked_to_exit(&self) -> bool {
        self.exit_requested || self.earlier_requested_engine.is_some()
    }

    /// True if the process exits even if the migration is aborted.
    fn must_exit(&self) -> bool {
        self.exit_requested && !self.is_self_checkpoint()
    }
}

impl Task {
    /// True while a requested exit of the program is in progress; false if the task continues after
    /// an aborted migration.
    pub(super) fn is_exiting(&self) -> bool {
        self.graceful_exit
            .is_some_and(|graceful_exit| graceful_exit.stage != ExitStage::LateExitPossible)
    }

    /// Records that the program does not handle the signal that asks for its own checkpoint.
    /// Returns true if CRIU may dump the task instead and was not tried yet.
    fn fall_back_to_criu(&mut self, id: MigrationId) -> bool {
        self.ignores_checkpoint_signal = Some(id);
        self.launch_info
            .as_ref()
            .is_some_and(|launch| launch.allows_criu() && launch.prefers_self_checkpoint())
    }

    /// True while the task has no process because it is being started again.
    pub(super) fn is_respawning(&self) -> bool {
        self.respawn_state.is_some()
    }
}

impl Machine {
    /// Performs one queued call that needs the [`World`]. Returns false if no call was queued.
    pub(super) fn run_world_call(&mut self, world: &mut dyn World) -> bool {
        match self.world_calls.pop_front() {
            None => return false,
            Some(WorldCall::MigrationVerdict(id, facts)) => {
                self.start_migration_verdict(world, id, facts)
            }
            Some(WorldCall::QueryVerdict(reply_to, objections, facts)) => {
                self.continue_query_verdict(world, reply_to, objections, facts)
            }
            Some(WorldCall::Respawn(tid)) => self.restart_program(world, tid),
            Some(WorldCall::PrepareProgram(id)) => self.prepare_program(world, id),
            Some(WorldCall::CollectState(id)) => self.collect_state(world, id),
            Some(WorldCall::StageState(id)) => self.stage_state(world, id),
        }
        true
    }

    // ---- Exit of the old process

    /// Begins the exit of a program for a migration. First the task's library must report its link
    /// states; a library that has quiesced for a pause must reconnect before.
    pub(super) fn begin_graceful_exit(&mut self, id: MigrationId, tid: Tid, engine: Engine) {
        let is_paused = self.must_pause(tid);
        let can_exit = |task: &&mut Task| {
            !task.awaits_restarted_process
                && task.respawn_state.is_none()
                && task.exit_report.is_none()
        };
        let Some(task) = self.tasks.get_mut(tid).filter(can_exit) else {
            let why = Failure::Engine("its program is just being started, or has ended".into());
            return self.pass_to_source(id, SourceEvent::Stopped(Err(why)));
        };
        let outstanding_engine = |graceful_exit: GracefulExit| {
            if graceful_exit.exit_requested {
                Some(graceful_exit.engine)
            } else {
                graceful_exit.earlier_requested_engine
            }
        };
        let (must_reconnect, earlier_engine) = (
            task.pause.is_some(),
            task.graceful_exit.and_then(outstanding_engine),
        );
        task.graceful_exit = Some(GracefulExit {
            migration: id,
            engine,
            stage: ExitStage::Reconnecting,
            exit_requested: false,
            earlier_requested_engine: earlier_engine,
            is_aborted: false,
            is_final: false,
            was_paused: false,
        });
        self.set_timer(HANDOFF_TIMEOUT, Timer::HandoffTimeout(tid, id));
        if is_paused {
            // A paused task may run to report its link states.
            self.send_to_tasker(ToTasker::Pause {
                tid,
                run_time: HANDOFF_TIMEOUT,
            });
        }
        if must_reconnect {
            self.resume_to_exit(tid);
        } else {
            self.request_handoff(tid);
        }
    }

    /// Asks the program to exit, because its library has reported its link states.
    pub(super) fn request_exit(&mut self, tid: Tid, migration_id: MigrationId) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let is_current = |graceful_exit: &&mut GracefulExit| {
            graceful_exit.migration == migration_id
                && graceful_exit.stage == ExitStage::AwaitingHandoff
        };
        let Some(graceful_exit) = task.graceful_exit.as_mut().filter(is_current) else {
            return;
        };
        graceful_exit.stage = ExitStage::ExitRequested;
        // A program whose migration was aborted must not be asked. A second request must not be
        // sent.
        if graceful_exit.is_aborted || std::mem::replace(&mut graceful_exit.exit_requested, true) {
            return;
        }
        let GracefulExit {
            migration, engine, ..
        } = *graceful_exit;
        self.send_to_tasker(ToTasker::RequestExit { tid, engine });
        let Some((_, timeout_s)) = engine.exit_request() else {
            return;
        };
        self.set_timer(
            Micros::from_secs(timeout_s.into()),
            Timer::ExitTimeout(tid, migration),
        );
    }

    /// Asks a program by a message to exit. The tasker has reported that it expects the exit. The
    /// message is sent even if the migration was aborted meanwhile, because a program that is asked
    /// by a signal would have received the signal, too.
    pub(super) fn send_exit_message(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get(tid) else {
            return;
        };
        let Some(graceful_exit) = task
            .graceful_exit
            .filter(|graceful_exit| graceful_exit.exit_requested)
        else {
            return;
        };
        let (Some((AskMethod::Message(tag), timeout_s)), Some(conn)) =
            (graceful_exit.engine.exit_request(), task.conn())
        else {
            return;
        };
        // The message bypasses the inbox, whose items are for the next process.
        let message = own_daemon_message(
            tid,
            (0, tag),
            pack_ints(&[i32::try_from(timeout_s).unwrap_or(i32::MAX)]),
        );
        self.outputs.push_back(Output::SendToTask {
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
        let graceful_exit = self
            .tasks
            .get(tid)
            .and_then(|task| task.graceful_exit.as_ref());
        let has_not_reported = |graceful_exit: &&GracefulExit| {
            graceful_exit.migration == id
                && matches!(
                    graceful_exit.stage,
                    ExitStage::Reconnecting | ExitStage::AwaitingHandoff
                )
        };
        if graceful_exit
            .filter(has_not_reported)
            .is_some_and(|graceful_exit| !graceful_exit.is_aborted)
        {
            let why = "its library did not report its link states in time".into();
            self.pass_to_source(id, SourceEvent::Stopped(Err(Failure::Engine(why))));
        }
    }

    /// Fails a migration because the tasker has not asked the program to exit.
    pub(super) fn handle_exit_not_requested(&mut self, tid: Tid, why: String) {
        let Some(graceful_exit) = self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.graceful_exit.as_mut())
        else {
            return;
        };
        graceful_exit.exit_requested = false;
        let id = graceful_exit.migration;
        self.pass_to_source(id, SourceEvent::Stopped(Err(Failure::Engine(why))));
    }

    /// Handles the notice of a library that its program is about to exit. If the migration that
    /// requested the exit was aborted, the library is asked for its link states now.
    pub(super) fn handle_about_to_exit(&mut self, tid: Tid, id: RequestId) {
        let aborted_exit = self
            .tasks
            .get(tid)
            .and_then(|task| task.graceful_exit.as_ref());
        if aborted_exit
            .is_some_and(|graceful_exit| graceful_exit.stage == ExitStage::LateExitPossible)
        {
            self.request_handoff(tid);
        }
        self.reply(tid, id, Reply::Done);
    }

    /// Fails a migration because its program has not exited within the time limit, or kills the
    /// program, depending on the engine.
    pub(super) fn handle_exit_timeout(&mut self, tid: Tid, id: MigrationId) {
        let Some(task) = self
            .tasks
            .get(tid)
            .filter(|task| task.exit_report.is_none())
        else {
            return;
        };
        let Some(GracefulExit { engine, .. }) = task
            .graceful_exit
            .filter(|graceful_exit| graceful_exit.migration == id)
        else {
            return;
        };
        match engine {
            Engine::Criu => {}
            Engine::Restart { .. } => self.send_to_tasker(ToTasker::Kill { tid }),
            Engine::SelfCheckpoint {
                ask_method,
                exit_status,
                timeout_s,
            } => {
                let why = format!(
                    "{engine}: it was asked {ask_method} and has not ended with exit status {exit_status} within {timeout_s} s"
                );
                self.pass_to_source(id, SourceEvent::Stopped(Err(Failure::Engine(why))));
            }
        }
    }

    /// Handles the exit of a task's process. Returns true if the task continues, because its
    /// program is started again.
    pub(super) fn handle_exit_for_restart(&mut self, tid: Tid, status: i32, usage: Usage) -> bool {
        if self.shutdown.is_some() || self.tasker_has_ended {
            return false;
        }
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let is_restarted = |graceful_exit: &GracefulExit| {
            let requested_engine = graceful_exit.exit_requested.then_some(graceful_exit.engine);
            let mut engines = requested_engine
                .into_iter()
                .chain(graceful_exit.earlier_requested_engine);
            !graceful_exit.is_final && engines.any(|engine| engine.restarts_after(status))
        };
        let Some(GracefulExit { migration, .. }) = task.graceful_exit.filter(is_restarted) else {
            return false;
        };
        let Some(log) = task.handoff_log.take() else {
            return false;
        };
        let conn = task.conn();
        task.graceful_exit = None;
        (task.exit_report, task.earlier_usage) = (None, usage);
        (task.connection_phase, task.holds_items, task.has_quiesced) =
            (ConnectionPhase::Detached, true, false);
        (task.pid, task.settling_part, task.permitted_open_requests) = (0, None, None);
        task.open_requests.clear();
        task.untimed_requests.clear();
        let restart_count = task.launch_info.as_mut().map_or(0, |launch| {
            launch.restart_count += 1;
            launch.restart_count
        });
        let (mut handoff, handoff_items, inbox_items) =
            log.into_handoff(restart_count, task.inbox.drain());
        // The process may have sent more messages after its handoff.
        handoff.past.clock = handoff.past.clock.max(task.past.clock);
        task.handoff = Some(Box::new(handoff));
        handoff_items
            .into_iter()
            .for_each(|item| task.inbox.push(item));
        task.respawn_state = Some(RespawnState {
            migration,
            restarts_locally: false,
            handoff_item_count: task.inbox.items.len(),
        });
        inbox_items
            .into_iter()
            .for_each(|item| task.inbox.push(item));
        if let Some(conn) = conn {
            self.conns.retire(conn);
            self.outputs.push_back(Output::CloseTask { conn });
        }
        self.end_pause(tid);
        // Peers that share rings with the task read the remaining data in the rings.
        for ring_peer in self.ring_peers.remove_task(tid) {
            self.deliver(ring_peer, ToTask::PeerMigrated { tid });
        }
        self.advance_respawn(tid);
        true
    }

    fn advance_respawn(&mut self, tid: Tid) {
        let Some(respawn_state) = self
            .tasks
            .get(tid)
            .and_then(|task| task.respawn_state.as_ref())
        else {
            return;
        };
        let source_awaits_exit = self
            .migrations
            .sources
            .get(&respawn_state.migration)
            .is_some_and(|source| source.awaits_exit());
        if source_awaits_exit {
            self.pass_to_source(respawn_state.migration, SourceEvent::Stopped(Ok(())));
        } else {
            // No migration waits for the exit, because the migration was aborted.
            self.world_calls.push_back(WorldCall::Respawn(tid));
        }
    }

    /// Handles the abort of a migration that uses a restart engine: the program continues, or is
    /// started again on this host. Returns false if the migration uses no restart engine.
    pub(super) fn abort_graceful_exit(&mut self, id: MigrationId, tid: Tid) -> bool {
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        if let Some(respawn_state) = task
            .respawn_state
            .as_mut()
            .filter(|respawn_state| respawn_state.migration == id)
        {
            if !std::mem::replace(&mut respawn_state.restarts_locally, true) {
                self.world_calls.push_back(WorldCall::Respawn(tid));
            }
            return true;
        }
        let conn = task.conn();
        let Some(graceful_exit) = task
            .graceful_exit
            .as_mut()
            .filter(|graceful_exit| graceful_exit.migration == id)
        else {
            return false;
        };
        graceful_exit.is_aborted = true;
        // A program whose exit cannot be avoided is started again on this host.
        if !graceful_exit.must_exit()
            && graceful_exit.stage != ExitStage::Reconnecting
            && conn.is_some()
        {
            // The program continues. If it exits because it was asked to, it is started again.
            graceful_exit.stage = ExitStage::Resuming;
            let message = ToTask::PrepareExit { migration: None };
            self.outputs
                .extend(conn.map(|conn| Output::SendToTask { conn, message }));
            if self.must_pause(tid) {
                // A paused task may run to continue its links.
                self.send_to_tasker(ToTasker::Pause {
                    tid,
                    run_time: HANDOFF_TIMEOUT,
                });
            }
        }
        self.pass_to_source(id, SourceEvent::TaskResumed);
        true
    }

    /// Handles the order to resume the library of a task whose program was asked to exit. Returns
    /// true if no resume token must be written, because the library is not quiesced.
    pub(super) fn resume_exiting_library(&mut self, id: MigrationId, tid: Tid) -> bool {
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        if task.awaits_restarted_process {
            return true;
        }
        let Some(graceful_exit) = task
            .graceful_exit
            .filter(|graceful_exit| graceful_exit.migration == id)
        else {
            return false;
        };
        if graceful_exit.stage != ExitStage::Resuming && !graceful_exit.must_exit() {
            self.finish_aborted_exit(tid);
        }
        true
    }

    /// Handles the report of a library that its program continues after an aborted migration.
    pub(super) fn handle_exit_cancelled(&mut self, tid: Tid, migration_id: MigrationId) {
        let graceful_exit = self
            .tasks
            .get(tid)
            .and_then(|task| task.graceful_exit.as_ref());
        if graceful_exit.is_some_and(|graceful_exit| {
            graceful_exit.migration == migration_id && graceful_exit.stage == ExitStage::Resuming
        }) {
            self.cancel_handoff(tid);
            self.finish_aborted_exit(tid);
        }
    }

    /// Ends an aborted migration at its source: the task continues, or its program has left the
    /// virtual machine and the daemon waits only for the exit of the program.
    pub(super) fn finish_aborted_exit(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let has_left = task.conn().is_none() && task.pause.is_none();
        let Some(graceful_exit) = task.graceful_exit.as_mut() else {
            return;
        };
        let id = graceful_exit.migration;
        match (graceful_exit.was_asked_to_exit(), has_left) {
            (false, _) => task.graceful_exit = None,
            (true, true) => {}
            (true, false) => graceful_exit.stage = ExitStage::LateExitPossible,
        }
        if task.graceful_exit.is_some() {
            self.set_timer(LATE_EXIT_TIMEOUT, Timer::LateExitTimeout(tid, id));
        }
        self.pass_to_source(id, SourceEvent::Reconnected);
        if self.must_pause(tid) {
            self.pause_guest(tid);
        } else {
            self.send_to_tasker(ToTasker::Resume { tid });
        }
    }

    /// Handles a program that leaves the virtual machine while it is about to exit. If the
    /// migration was aborted, the daemon stops waiting for the program's library.
    pub(super) fn handle_leave_while_exiting(&mut self, tid: Tid) {
        let graceful_exit = self
            .tasks
            .get(tid)
            .and_then(|task| task.graceful_exit.as_ref());
        if graceful_exit.is_some_and(|graceful_exit| graceful_exit.stage == ExitStage::Resuming) {
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
        let has_left = task.conn().is_none();
        let Some(graceful_exit) = task
            .graceful_exit
            .as_mut()
            .filter(|graceful_exit| graceful_exit.migration == id && graceful_exit.is_aborted)
        else {
            return;
        };
        if std::mem::replace(&mut graceful_exit.was_paused, is_paused) || is_paused {
            // A program may use the window only while it runs, so the window begins again.
            self.set_timer(LATE_EXIT_TIMEOUT, Timer::LateExitTimeout(tid, id));
        } else if graceful_exit.stage == ExitStage::LateExitPossible {
            self.withdraw_exit_request(tid);
        } else if has_left {
            // The program has left the virtual machine instead of exiting.
            task.handoff_log = None;
            self.withdraw_exit_request(tid);
            self.end_connection(tid);
        } else {
            self.set_timer(LATE_EXIT_TIMEOUT, Timer::LateExitTimeout(tid, id));
        }
    }

    /// Withdraws the request to exit: every later exit of the program ends the task.
    pub(super) fn withdraw_exit_request(&mut self, tid: Tid) {
        if self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.graceful_exit.take())
            .is_some_and(|graceful_exit| graceful_exit.was_asked_to_exit())
        {
            self.send_to_tasker(ToTasker::WithdrawExitRequest { tid });
        }
    }

    /// Reports to the coordinator that the source's copy of a respawning task is killed, because
    /// the task has no process. Returns false if the task is not respawning; the caller must then
    /// kill its process.
    pub(super) fn report_respawning_copy_killed(&mut self, id: MigrationId, tid: Tid) -> bool {
        let Some(task) = self.tasks.get(tid).filter(|task| task.is_respawning()) else {
            return false;
        };
        let usage = task.earlier_usage;
        self.pass_to_source(id, SourceEvent::Killed(usage));
        true
    }

    /// Sends a task without a process to its target. The items from the handoff of the exited
    /// process are sent first, because no peer would send them again if this host were lost.
    pub(super) fn send_task_without_process(&mut self, migration: &Migration) {
        let inbox_items: Vec<PendingItem> = self
            .tasks
            .get(migration.tid)
            .map(|task| task.inbox.iter().cloned().collect())
            .unwrap_or_default();
        for item in inbox_items {
            let message = DataMsg::Forwarded {
                dst: migration.tid,
                migration: migration.id,
                item,
            };
            self.outputs.push_back(Output::SendData {
                host: migration.to,
                message,
            });
        }
        self.send_record(migration, false);
        if let Some(task) = self.tasks.get_mut(migration.tid) {
            task.transferring_migration = Some(migration.id);
        }
    }

    /// Handles a signal for a task without a process, or with a process that is just starting.
    /// Returns true if the caller must not send the signal: a terminating signal ends a task
    /// without a process, and all other signals are ignored. A program that the restart engine has
    /// asked to exit is not started again after a terminating signal.
    pub(super) fn signal_without_process(&mut self, tid: Tid, signal: i32) -> bool {
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let is_terminating = TERMINATING_SIGNALS.contains(&signal);
        if let Some(graceful_exit) = task
            .graceful_exit
            .as_mut()
            .filter(|graceful_exit| matches!(graceful_exit.engine, Engine::Restart { .. }))
        {
            graceful_exit.is_final |= is_terminating;
        }
        let usage = task.earlier_usage;
        if task.respawn_state.is_some() && is_terminating {
            task.respawn_state = None;
            self.end_task(tid, signal, usage);
            return true;
        }
        task.respawn_state.is_some() || task.awaits_restarted_process && !is_terminating
    }
}

/// True if `dir` is not a directory on this host that can be entered.
pub(super) fn lacks_dir(world: &dyn World, dir: &str) -> bool {
    let default_dir = world.work_dir(None);
    world.work_dir(Some(dir)) == default_dir && default_dir.join(dir) != default_dir
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::migration::Refusal;

    /// CRIU is chosen if both engines are possible. If neither engine is possible, the verdict
    /// contains all refusals.
    #[test]
    fn criu_is_preferred_and_all_refusals_are_kept() {
        let restart_engine = Engine::Restart { timeout_s: 5 };
        assert_eq!(
            choose_engine(vec![], Some((restart_engine, vec![]))),
            (vec![], Engine::Criu)
        );
        assert_eq!(
            choose_engine(vec![Refusal::Pinned], Some((restart_engine, vec![]))),
            (vec![], restart_engine)
        );
        let impossible_choice = choose_engine(
            vec![Refusal::Pinned],
            Some((restart_engine, vec![Refusal::Suspended])),
        );
        assert_eq!(
            impossible_choice,
            (vec![Refusal::Pinned, Refusal::Suspended], Engine::Criu)
        );
        assert_eq!(
            choose_engine(vec![Refusal::Pinned], None).0,
            vec![Refusal::Pinned]
        );
    }
}
