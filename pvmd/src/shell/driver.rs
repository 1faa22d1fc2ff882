//! The daemon's loop. No other code accesses the state machine.
//!
//! All inputs come from one queue. The loop executes the state machine's outputs in their order.
//! The loop never waits for a peer or a disk.

use super::bulk_fallback::BulkFallbacks;
use super::checkpoints::{CheckpointService, part_writer};
use super::failpoints::{Failpoints, StepEdge};
use super::host_env::HostEnvironment;
use super::host_start::HostStarter;
use super::images::ImageTransfers;
use super::input::{Input, TaskConnection};
use super::log::{Log, log_machine_line};
use super::memory_transfer::MemoryTransfers;
use super::migration_files::MigrationFiles;
use super::net::{Net, SessionChange};
use super::outbox::Outgoing;
use super::program_state::ProgramStateFiles;
use super::reply_spin::ReplySpinner;
use super::runtime_dir::RuntimeDir;
use super::session_input::NetInput;
use super::sys::signal_process;
use super::task_listener::{DISCONNECT_TIMEOUT, TASK_CONTROL_BYTES_MAX, TASK_READ_TIMEOUT};
use super::tasker::TaskerProcess;
use super::vm_note::{DaemonEnd, NoteKeeper};
use bytes::Bytes;
use checkpoint::{allocator, boot_clock};
use pvmd_machine::{ConnId, Event, Machine, Output, World};
use sempa_proto::HostId;
use sempa_proto::frame::encode_control;
use sempa_proto::host::DataMsg;
use sempa_proto::task::ToTask;
use sempa_proto::tasker::ToTasker;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep_until};

/// Time limit for the state machine to stop in order. After this time, the daemon and its tasks end
/// immediately.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a slave's first session with its master.
const MASTER_SESSION_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for tasks and hosts to receive the data that was sent to them last.
const FINAL_SEND_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for a slave's process to exit after its last message. The master waits twice as long.
const SLAVE_EXIT_TIMEOUT: Duration = Duration::from_millis(60);
/// Maximum number of inputs that the loop handles before it reads its clock and the runtime serves
/// the streams.
const INPUT_BATCH_MAX: usize = 64;
/// Minimum interval between two releases of freed memory to the kernel.
const HEAP_TRIM_INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which queues and sessions are checked.
const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// A connected task, with the data by which the daemon detects that the task does not read from its
/// socket.
struct ConnectedTask {
    connection: TaskConnection,
    sent_item_count: usize,
    last_progress_at: Instant,
    is_disconnected: bool,
}

/// The components of a daemon.
pub(crate) struct DaemonParts {
    pub(crate) machine: Machine,
    pub(crate) environment: HostEnvironment,
    pub(crate) inputs: mpsc::Receiver<Input>,
    pub(crate) sessions: Net,
    pub(crate) tasker: TaskerProcess,
    pub(crate) image_transfers: ImageTransfers,
    pub(crate) memory_transfers: MemoryTransfers,
    pub(crate) bulk_fallbacks: BulkFallbacks,
    pub(crate) host_starter: HostStarter,
    pub(crate) migration_files: MigrationFiles,
    pub(crate) checkpoints: CheckpointService,
    pub(crate) program_state: ProgramStateFiles,
    pub(crate) failpoints: Failpoints,
    pub(crate) note: NoteKeeper,
    pub(crate) log: Log,
    pub(crate) runtime_dir: RuntimeDir,
}

pub(crate) struct Driver {
    parts: DaemonParts,
    is_master: bool,
    tasks: HashMap<ConnId, ConnectedTask>,
    reply_spinner: ReplySpinner,
    /// Time at which freed memory was last returned to the kernel.
    last_heap_trim_at: Instant,
    /// Deadline for the first session with the master. Only on a slave, until the session is
    /// established.
    master_deadline: Option<Instant>,
    stop_deadline: Option<Instant>,
    /// True if the session with the master has been lost. Only on a slave.
    has_lost_master: bool,
    daemon_end: DaemonEnd,
    is_stopped: bool,
}

impl Driver {
    pub(crate) fn new(parts: DaemonParts, is_master: bool) -> Self {
        let master_deadline = (!is_master).then(|| Instant::now() + MASTER_SESSION_TIMEOUT);
        let (connected_tasks, reply_spinner) = (HashMap::new(), ReplySpinner::new());
        Self {
            parts,
            is_master,
            tasks: connected_tasks,
            reply_spinner,
            last_heap_trim_at: Instant::now(),
            master_deadline,
            stop_deadline: None,
            has_lost_master: false,
            daemon_end: DaemonEnd::Orderly,
            is_stopped: false,
        }
    }

    /// Runs the loop until the state machine emits [`Output::Shutdown`] or a second stop request or
    /// a time limit ends it. Then shuts down all components in order.
    ///
    /// `signals` delivers reasons to stop; the second reason ends the daemon immediately.
    pub(crate) async fn run_loop(mut self, mut signals: mpsc::Receiver<String>) {
        if self.is_master {
            self.start_tasker();
        }
        self.execute_outputs();
        let mut tick_timer = interval(TICK_INTERVAL);
        tick_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut wake_timer, mut wake_timer_at) =
            (Box::pin(sleep_until(far_future().into())), None);
        while !self.is_stopped {
            let wakeup = self.parts.machine.next_wakeup_time();
            if wakeup.is_some_and(|wakeup_at| wakeup_at <= boot_clock::now()) {
                self.process_event(Event::Wake);
                // Inputs are still served if the state machine repeatedly requests an immediate
                // wakeup.
                tokio::task::yield_now().await;
            }
            // The timer is reset only if the wakeup time has changed, which is rare while messages
            // are forwarded.
            let wakeup = self.parts.machine.next_wakeup_time();
            if wakeup != wake_timer_at {
                // The timer stops while the machine sleeps. The next tick notices afterwards
                // that the wakeup is overdue.
                let wakeup_at = wakeup.map(|wakeup_at| {
                    Instant::now() + Duration::from_micros(wakeup_at.since(boot_clock::now()).0)
                });
                wake_timer
                    .as_mut()
                    .reset(wakeup_at.unwrap_or_else(far_future).into());
                wake_timer_at = wakeup;
            }
            while self.reply_spinner.should_spin(Instant::now()) && self.parts.inputs.is_empty() {
                self.reply_spinner.yield_cpu();
                tokio::task::yield_now().await;
            }
            tokio::select! {
                input = self.parts.inputs.recv() => match input {
                    Some(input) => self.handle_inputs(input),
                    None => break,
                },
                Some(reason) = signals.recv() => self.request_stop(reason),
                () = &mut wake_timer, if wake_timer_at.is_some() => wake_timer_at = None,
                _ = tick_timer.tick() => self.on_tick(),
            }
        }
        self.shut_down().await;
    }

    fn start_tasker(&mut self) {
        if let Err(error_text) = self.parts.tasker.start_if_needed() {
            let error_text = error_text.to_string();
            tracing::error!("{error_text}");
            self.pass_to_machine(Event::TaskerEnded { why: error_text });
        }
    }

    fn request_stop(&mut self, reason: String) {
        tracing::info!("{reason}");
        if self.stop_deadline.is_some() {
            tracing::warn!("second request to end: ending immediately");
            self.is_stopped = true;
            return;
        }
        self.stop_deadline = Some(Instant::now() + STOP_TIMEOUT);
        self.process_event(Event::Stop { why: reason });
    }

    /// Handles the input `first` and the inputs that are queued after it, at most
    /// [`INPUT_BATCH_MAX`] inputs in total.
    fn handle_inputs(&mut self, first: Input) {
        self.handle_input(first);
        for _ in 1..INPUT_BATCH_MAX {
            let Ok(input) = self.parts.inputs.try_recv() else {
                return;
            };
            self.handle_input(input);
            if self.is_stopped {
                return;
            }
        }
    }

    fn handle_input(&mut self, input: Input) {
        match input {
            Input::TaskConnected(connection) => {
                let (conn, pid) = (connection.conn, connection.pid);
                let sent_count = connection.outbox.sent_count();
                let last_progress_at = Instant::now();
                self.tasks.insert(
                    conn,
                    ConnectedTask {
                        connection,
                        sent_item_count: sent_count,
                        last_progress_at,
                        is_disconnected: false,
                    },
                );
                self.process_event(Event::TaskConnected { conn, pid });
            }
            Input::Event(event) => self.handle_event_input(event),
            Input::Net(NetInput::Control {
                host,
                session_number,
                message,
            }) => {
                if self.parts.sessions.is_current(host, session_number) {
                    self.process_event(Event::HostControl { host, message });
                }
            }
            Input::Net(NetInput::Data {
                host,
                session_number,
                item,
            }) => {
                self.parts.sessions.accept_data(host, session_number, item);
                while let Some(message) = self.parts.sessions.next_data(host, session_number) {
                    self.reply_spinner.on_reply(&message, Instant::now());
                    self.process_event(Event::HostData { host, message });
                }
            }
            Input::Net(NetInput::ImagesAnnounced(announcement)) => {
                self.parts.image_transfers.on_announcement(announcement)
            }
            Input::Net(NetInput::MemoryAnnounced(announcement)) => {
                self.parts.memory_transfers.on_announcement(announcement)
            }
            Input::Net(NetInput::FallbackStream {
                host,
                migration,
                content,
                streams,
            }) => {
                self.parts
                    .bulk_fallbacks
                    .on_stream(host, migration, content, streams);
            }
            Input::Net(input) => {
                for net_event in self.parts.sessions.handle_input(input) {
                    match net_event {
                        SessionChange::Connected(host) => {
                            if host == HostId::MASTER {
                                self.master_deadline = None;
                            }
                            self.process_event(Event::HostConnected { host });
                        }
                        SessionChange::Lost(host, why) => {
                            self.has_lost_master |= host == HostId::MASTER;
                            self.process_event(Event::HostLost { host, why })
                        }
                    }
                }
            }
        }
    }

    fn handle_event_input(&mut self, event: Event) {
        let is_ignored = match &event {
            // For a disconnected task, only the end of its connection is handled.
            Event::TaskControl { conn, .. }
            | Event::TaskRoute { conn, .. }
            | Event::TaskLink { conn, .. } => {
                self.tasks.get(conn).is_none_or(|t| t.is_disconnected)
            }
            Event::TaskClosed { conn, .. } => self.tasks.remove(conn).is_none(),
            Event::TaskerEnded { why } => {
                tracing::error!("{why}");
                self.parts.runtime_dir.undo_file_transfers();
                // Must happen before the state machine handles the event: the next requests of the
                // state machine are for the new tasker.
                self.parts.tasker.on_exit();
                false
            }
            _ => false,
        };
        if !is_ignored {
            self.process_event(event);
        }
    }

    /// Passes an event to the state machine and executes the outputs of the state machine.
    fn process_event(&mut self, event: Event) {
        self.pass_to_machine(event);
        self.execute_outputs();
    }

    /// Passes an event to the state machine. The caller must execute the outputs of the state
    /// machine.
    fn pass_to_machine(&mut self, event: Event) {
        self.parts
            .machine
            .handle_event(boot_clock::now(), &mut self.parts.environment, event);
    }

    fn execute_outputs(&mut self) {
        while let Some(output) = self.parts.machine.next_output() {
            self.execute_output(output);
        }
    }

    // tidy: long because the match is a table of all outputs; the compiler checks that it is
    // complete
    fn execute_output(&mut self, output: Output) {
        match output {
            Output::SendToTask { conn, message } => {
                self.send_to_task(conn, &message, Outgoing::Reliable)
            }
            Output::SendToTaskWithFds {
                conn,
                message,
                descriptors,
            } => {
                self.send_to_task(conn, &message, |frame| {
                    Outgoing::WithFds(frame, descriptors)
                });
            }
            Output::SendFrameToTask { conn, frame } => self.send_link_frame(conn, frame),
            Output::DrainConnection { conn } => {
                if let Some(task) = self.tasks.get(&conn) {
                    task.connection.socket.shut_down_reads();
                }
            }
            Output::CloseTask { conn } => self.disconnect(conn),
            Output::SendToHost { host, message } => {
                self.parts.sessions.send_control(host, &message)
            }
            Output::SendData { host, message } => self.send_to_host(host, message),
            Output::Connect { host, addresses } => {
                self.parts.sessions.keep_connected(host, addresses)
            }
            Output::Disconnect { host } => {
                self.parts.sessions.expel_host(host);
                self.parts.memory_transfers.on_host_lost(host);
            }
            Output::StartHost { start, plan } => self.parts.host_starter.start(start, plan),
            Output::PrepareHosts { plans } => self.parts.host_starter.prepare_for_hoster(plans),
            Output::HosterReported { start, line } => {
                let event = self.parts.host_starter.on_hoster_reply(start, &line);
                self.pass_to_machine(event);
            }
            Output::SendSignal { conn, signal } => self.signal_task_process(conn, signal),
            Output::AbandonStart { start } => self.parts.host_starter.abort_start(start),
            Output::StartTasker => self.start_tasker(),
            Output::SendToTasker(message) => {
                if matches!(message, ToTasker::Dump { .. }) {
                    self.parts.runtime_dir.ensure_image_dir();
                }
                if let Some(answer) = self.parts.tasker.send(&message) {
                    self.pass_to_machine(Event::Tasker(answer));
                }
            }
            Output::KillTasker { why } => self.parts.tasker.kill(why),
            Output::SendImagesEarly {
                migration,
                target: target_host,
            } => self.parts.image_transfers.start_streaming(
                migration,
                target_host,
                &mut self.parts.sessions,
            ),
            Output::SendImages {
                migration,
                target: target_host,
            } => self.parts.image_transfers.send_images(
                migration,
                target_host,
                &mut self.parts.sessions,
            ),
            Output::ExpectImages {
                migration,
                source: source_host,
            } => {
                self.parts.runtime_dir.ensure_image_dir();
                self.parts
                    .image_transfers
                    .expect_images(migration, source_host);
            }
            Output::ServeMemory {
                migration,
                target: target_host,
            } => self.parts.memory_transfers.send_memory(
                migration,
                target_host,
                &mut self.parts.sessions,
            ),
            Output::FetchMemory {
                migration,
                source: source_host,
            } => self
                .parts
                .memory_transfers
                .expect_memory(migration, source_host),
            Output::DropImages { migration } => {
                drop(self.parts.image_transfers.drop_images(migration));
                self.parts.memory_transfers.abort_unconnected(migration);
                self.parts.program_state.drop_staged(migration);
            }
            Output::UploadPart {
                migration,
                record,
                receiver: target_host,
            } => {
                self.parts.image_transfers.complete_and_send(
                    migration,
                    target_host,
                    &mut self.parts.sessions,
                    part_writer(record),
                );
            }
            Output::SendPart {
                restart_number,
                migration,
                tid,
                receiver: target_host,
            } => {
                self.parts.runtime_dir.ensure_image_dir();
                let unpack_part = self.parts.checkpoints.part_unpacker(restart_number, tid);
                self.parts.image_transfers.complete_and_send(
                    migration,
                    target_host,
                    &mut self.parts.sessions,
                    unpack_part,
                );
            }
            Output::CollectState {
                migration,
                files,
                dir,
            } => {
                self.parts.runtime_dir.ensure_image_dir();
                self.parts
                    .program_state
                    .collect_files(migration, files, dir);
            }
            Output::StageState {
                migration,
                files,
                dir,
            } => self.parts.program_state.stage_files(migration, files, dir),
            Output::InstallState { migration } => self.parts.program_state.rename_staged(migration),
            Output::ReadPart { migration } => self.parts.checkpoints.read_part(migration),
            Output::BeginCheckpoint { snapshot, job } => self.parts.checkpoints.begin_checkpoint(
                snapshot,
                job,
                self.parts.environment.unix_time(),
            ),
            Output::StorePart {
                snapshot,
                migration,
                tid,
            } => self.parts.checkpoints.add_part(snapshot, migration, tid),
            Output::SealCheckpoint {
                snapshot,
                meta,
                protected_checkpoints: protected_names,
            } => self.parts.checkpoints.seal(
                snapshot,
                &meta,
                protected_names,
                self.parts.environment.unix_time(),
            ),
            Output::AbandonCheckpoint { snapshot } => {
                self.parts.checkpoints.abandon_draft(snapshot)
            }
            Output::OpenCheckpoint {
                restart_number,
                checkpoint,
                vm_created_at,
                force,
            } => {
                let times = (vm_created_at, self.parts.environment.unix_time());
                self.parts
                    .checkpoints
                    .open_checkpoint(restart_number, checkpoint, times, force);
            }
            Output::CloseCheckpoint {
                restart_number,
                keeps_claim,
            } => self
                .parts
                .checkpoints
                .close_checkpoint(restart_number, keeps_claim),
            Output::ReleaseJob { key } => self.parts.checkpoints.release_job(key),
            Output::MarkCheckpoints {
                checkpoints,
                has_ended,
                protected_checkpoints: protected_names,
            } => {
                self.parts.checkpoints.mark_job_end(
                    checkpoints,
                    has_ended.then(|| self.parts.environment.unix_time()),
                    protected_names,
                );
            }
            Output::MarkDamaged {
                checkpoint,
                why,
                rollback_job,
            } => self
                .parts
                .checkpoints
                .mark_damaged(checkpoint, why, rollback_job),
            Output::RemoveCheckpoints {
                tid,
                id,
                selection,
                include_foreign,
                refusals,
            } => {
                self.parts.checkpoints.remove_selected(
                    (tid, id),
                    selection,
                    include_foreign,
                    refusals,
                );
            }
            Output::SendCopy {
                migration,
                checkpoint,
                receiver: target_host,
            } => {
                let send_checkpoint = self.parts.checkpoints.copy_sender(checkpoint);
                self.parts.image_transfers.send_copy(
                    migration,
                    target_host,
                    &mut self.parts.sessions,
                    send_checkpoint,
                );
            }
            Output::ExpectCopy {
                migration,
                sender: source_host,
                checkpoint,
            } => {
                let receive_checkpoint = self
                    .parts
                    .checkpoints
                    .copy_receiver(checkpoint, self.parts.environment.unix_time());
                self.parts.image_transfers.expect_transfer(
                    migration,
                    source_host,
                    receive_checkpoint,
                );
            }
            Output::DiscardCopy {
                migration,
                checkpoint,
            } => {
                let removal_task = self.parts.image_transfers.drop_images(migration);
                self.parts
                    .checkpoints
                    .discard_checkpoints(vec![checkpoint], Some(removal_task));
            }
            Output::DropCheckpoints { checkpoints } => self
                .parts
                .checkpoints
                .discard_checkpoints(checkpoints, None),
            Output::ListCheckpoints { tid, id } => self.parts.checkpoints.list_checkpoints(tid, id),
            Output::WriteToken { path, token } => {
                self.parts.migration_files.write_token(&path, &token)
            }
            Output::RemoveToken { path } => self.parts.migration_files.remove_token(&path),
            Output::RecordMigration {
                migration,
                tid,
                target: target_host,
            } => self
                .parts
                .migration_files
                .record_migration(migration, tid, target_host),
            Output::StepStarting { tid, step } => {
                self.parts
                    .failpoints
                    .stop_if_requested(tid, StepEdge::Before, step)
            }
            Output::StepEnded { tid, step } => {
                self.parts
                    .failpoints
                    .stop_if_requested(tid, StepEdge::After, step)
            }
            Output::Log {
                level,
                subject,
                text,
            } => log_machine_line(level, subject, &text),
            Output::LogTaskOutput { tid, bytes } => self.parts.log.write_task_output(tid, &bytes),
            Output::KeepSummary { summary } => self.parts.note.keep(*summary),
            Output::MasterLost { why } => self.daemon_end = DaemonEnd::MasterLost(why),
            Output::Shutdown => self.is_stopped = true,
        }
    }

    /// Queues a link frame for a task.
    fn send_link_frame(&mut self, conn: ConnId, frame: Bytes) {
        if let Some(task) = self.tasks.get_mut(&conn) {
            task.connection.outbox.enqueue(Outgoing::Link(frame));
        }
    }

    /// Sends `message` over the data channel of the host `host`. Starts to wait for a reply if
    /// `message` is a small request.
    fn send_to_host(&mut self, host: HostId, message: DataMsg) {
        self.reply_spinner.on_request(&message, Instant::now());
        self.parts.sessions.send_data(host, message);
    }

    fn send_to_task(
        &mut self,
        conn: ConnId,
        message: &ToTask,
        to_outgoing: impl FnOnce(Bytes) -> Outgoing,
    ) {
        let Some(task) = self.tasks.get_mut(&conn) else {
            return;
        };
        match encode_control(message) {
            Ok(frame) => drop(task.connection.outbox.enqueue(to_outgoing(frame))),
            Err(e) => tracing::warn!(
                "a message to process {} could not be sent: {e}",
                task.connection.pid
            ),
        }
    }

    /// Sends a signal to the process at the other end of a task's connection.
    fn signal_task_process(&mut self, conn: ConnId, signal: i32) {
        let Some(TaskConnection { pid, process, .. }) =
            self.tasks.get(&conn).map(|task| &task.connection)
        else {
            return;
        };
        let signal_result = match process {
            Ok(process) => signal_process(process.as_fd(), signal),
            Err(e) => Err(std::io::Error::new(
                e.kind(),
                format!("it cannot be reached: {e}"),
            )),
        };
        if let Err(e) = signal_result {
            tracing::warn!("signal {signal} could not be sent to process {pid}: {e}");
        }
    }

    fn disconnect(&mut self, conn: ConnId) {
        let Some(task) = self.tasks.get_mut(&conn) else {
            return;
        };
        if std::mem::replace(&mut task.is_disconnected, true) {
            return;
        }
        task.connection.outbox.enqueue(Outgoing::Close);
        let close_reason = task.connection.close_reason.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = close_reason.closed() => {}
                () = tokio::time::sleep(DISCONNECT_TIMEOUT) => {
                    close_reason.send_replace(Some("it did not receive its last messages".into()));
                }
            }
        });
    }

    /// Runs once per [`TICK_INTERVAL`]: disconnects tasks that do not read, maintains the sessions,
    /// returns freed memory to the kernel, and checks this daemon's deadlines.
    fn on_tick(&mut self) {
        for task in self.tasks.values_mut() {
            let sent_count = task.connection.outbox.sent_count();
            if sent_count != task.sent_item_count
                || task.connection.outbox.reliable_bytes() <= TASK_CONTROL_BYTES_MAX
            {
                (task.sent_item_count, task.last_progress_at) = (sent_count, Instant::now());
            } else if task.last_progress_at.elapsed() > TASK_READ_TIMEOUT {
                let reason = format!(
                    "{} bytes wait for it and it has read nothing for {} s",
                    task.connection.outbox.reliable_bytes(),
                    TASK_READ_TIMEOUT.as_secs()
                );
                task.connection.close_reason.send_replace(Some(reason));
            }
        }
        self.parts.sessions.maintain_sessions();
        self.parts.note.touch_if_due();
        if self.is_master {
            self.parts.checkpoints.renew_claims_if_due();
        }
        if self.last_heap_trim_at.elapsed() >= HEAP_TRIM_INTERVAL
            && self.parts.image_transfers.should_trim_heap()
        {
            allocator::trim_freed();
            self.last_heap_trim_at = Instant::now();
        }
        if self
            .master_deadline
            .take_if(|deadline| *deadline < Instant::now())
            .is_some()
        {
            self.request_stop(format!(
                "no session with the master within {} s",
                MASTER_SESSION_TIMEOUT.as_secs()
            ));
        }
        if self
            .stop_deadline
            .is_some_and(|deadline_at| deadline_at < Instant::now())
        {
            tracing::warn!(
                "could not end in order within {} s: ending as it is",
                STOP_TIMEOUT.as_secs()
            );
            self.is_stopped = true;
        }
    }

    /// Ends the tasker and all of its tasks, releases the runtime directory and closes all
    /// sessions.
    ///
    /// A slave does all this before it sends its last message, and the master waits for this
    /// message. Therefore, when the master's directory is free, no process of the virtual machine
    /// is left on any host.
    async fn shut_down(mut self) {
        let conns: Vec<ConnId> = self.tasks.keys().copied().collect();
        conns.into_iter().for_each(|conn| self.disconnect(conn));
        let had_slaves = self.is_master && self.parts.sessions.has_sessions();
        let may_release_jobs = self.parts.machine.have_other_hosts_ended();
        self.await_connection_ends(|driver| {
            driver.tasks.is_empty() && !(driver.is_master && driver.parts.sessions.has_sessions())
        })
        .await;
        let (is_master, has_lost_master) = (self.is_master, self.has_lost_master);
        let Self {
            parts, daemon_end, ..
        } = self;
        let DaemonParts {
            mut sessions,
            mut tasker,
            mut inputs,
            runtime_dir,
            image_transfers,
            host_starter,
            migration_files,
            checkpoints,
            note,
            ..
        } = parts;
        if had_slaves {
            tokio::time::sleep(2 * SLAVE_EXIT_TIMEOUT).await;
        }
        // The tasker sends messages until it ends, so the queue of inputs must be drained. The
        // messages have no effect.
        let discard_task = tokio::spawn(async move { while inputs.recv().await.is_some() {} });
        tasker.shut_down(has_lost_master).await;
        // Hosts that have not reported the end of their tasks end them within the lease.
        if may_release_jobs {
            checkpoints.release_all_jobs().await;
        }
        note.finish(daemon_end).await;
        drop((image_transfers, host_starter, migration_files));
        tracing::info!("ended");
        drop(runtime_dir);
        sessions.begin_shutdown();
        sessions
            .close(if is_master {
                FINAL_SEND_TIMEOUT
            } else {
                SLAVE_EXIT_TIMEOUT
            })
            .await;
        discard_task.abort();
    }

    /// Handles ends of connections until `is_over` returns true or [`FINAL_SEND_TIMEOUT`] has
    /// passed.
    async fn await_connection_ends(&mut self, is_over: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + FINAL_SEND_TIMEOUT;
        while !is_over(self) {
            let input = tokio::select! {
                input = self.parts.inputs.recv() => input,
                () = sleep_until(deadline.into()) => None,
            };
            match input {
                Some(Input::Net(input)) => drop(self.parts.sessions.handle_input(input)),
                Some(Input::Event(Event::TaskClosed { conn, .. })) => {
                    drop(self.tasks.remove(&conn))
                }
                Some(_) => {}
                None => return,
            }
        }
    }
}

fn far_future() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}
