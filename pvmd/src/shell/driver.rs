//! The daemon's loop, the only place that accesses the state machine.
//!
//! Inputs come from one queue. The state machine's outputs are carried out in their order. The loop
//! never waits for a peer or a disk.

use super::bulk_fallback::BulkFallbacks;
use super::checkpoints::{CheckpointService, write_part};
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
use bytes::Bytes;
use checkpoint::allocator;
use pvmd_machine::{ConnId, Event, Machine, Output, World};
use sempa_proto::frame::encode_control;
use sempa_proto::host::DataMsg;
use sempa_proto::task::ToTask;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, Micros};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep_until};

/// Time limit for an orderly stop of the state machine; after it the daemon ends immediately, and
/// its tasks with it.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a slave's first session with its master.
const MASTER_SESSION_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for tasks and hosts to receive the last data sent to them.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for the exit of a slave's process after its last message; the master waits twice this
/// time.
const SLAVE_EXIT_TIMEOUT: Duration = Duration::from_millis(60);
/// Maximum number of inputs handled before the loop reads its clock and the streams are served.
const INPUT_BATCH_MAX: usize = 64;
/// Minimum interval between two releases of freed memory to the kernel.
const HEAP_TRIM_INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which queues and sessions are checked.
const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// A connected task, with the data to detect that it does not read.
struct ConnectedTask {
    connection: TaskConnection,
    sent_count: usize,
    last_progress_at: Instant,
    is_disconnected: bool,
}

/// The components of a daemon.
pub(crate) struct DaemonParts {
    pub(crate) machine: Machine,
    pub(crate) world: HostEnvironment,
    pub(crate) inputs: mpsc::Receiver<Input>,
    pub(crate) net: Net,
    pub(crate) tasker: TaskerProcess,
    pub(crate) images: ImageTransfers,
    pub(crate) memory: MemoryTransfers,
    pub(crate) bulk_fallbacks: BulkFallbacks,
    pub(crate) starter: HostStarter,
    pub(crate) migration_files: MigrationFiles,
    pub(crate) checkpoints: CheckpointService,
    pub(crate) program_state: ProgramStateFiles,
    pub(crate) failpoints: Failpoints,
    pub(crate) log: Log,
    pub(crate) runtime_dir: RuntimeDir,
}

pub(crate) struct Driver {
    parts: DaemonParts,
    is_master: bool,
    tasks: HashMap<ConnId, ConnectedTask>,
    started_at: Instant,
    reply_spinner: ReplySpinner,
    /// Time at which freed memory was last returned to the kernel.
    last_heap_trim: Instant,
    /// Deadline for the first session with the master. Only on a slave, until the session is
    /// established.
    master_deadline: Option<Instant>,
    stop_deadline: Option<Instant>,
    is_done: bool,
}

impl Driver {
    /// Creates a daemon whose clock begins at `started_at`.
    pub(crate) fn new(parts: DaemonParts, started_at: Instant, is_master: bool) -> Driver {
        let master_deadline = (!is_master).then(|| Instant::now() + MASTER_SESSION_TIMEOUT);
        let (tasks, reply_spinner) = (HashMap::new(), ReplySpinner::new());
        Driver {
            parts,
            is_master,
            tasks,
            started_at,
            reply_spinner,
            last_heap_trim: started_at,
            master_deadline,
            stop_deadline: None,
            is_done: false,
        }
    }

    fn now(&self) -> Micros {
        Micros(u64::try_from(self.started_at.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// Runs until the state machine emits [`Output::Shutdown`], then shuts down everything in
    /// order.
    ///
    /// `signals` delivers reasons to stop; a second reason ends the daemon immediately.
    pub(crate) async fn run(mut self, mut signals: mpsc::Receiver<String>) {
        if self.is_master {
            self.start_tasker();
        }
        self.carry_out_all();
        let mut tick = interval(TICK_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut wake_timer, mut wake_timer_at) =
            (Box::pin(sleep_until(far_future().into())), None);
        while !self.is_done {
            let wake = self.parts.machine.next_wakeup();
            if wake.is_some_and(|at| at <= self.now()) {
                self.process_event(Event::Wake);
                // Inputs are still served if the state machine asks for an immediate wakeup again
                // and again.
                tokio::task::yield_now().await;
            }
            // The timer is reset only when the time has changed, which is rare while messages pass.
            let wake = self.parts.machine.next_wakeup();
            if wake != wake_timer_at {
                let at = wake.map(|at| self.started_at + Duration::from_micros(at.0));
                wake_timer
                    .as_mut()
                    .reset(at.unwrap_or_else(far_future).into());
                wake_timer_at = wake;
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
                Some(why) = signals.recv() => self.stop(why),
                () = &mut wake_timer, if wake_timer_at.is_some() => wake_timer_at = None,
                _ = tick.tick() => self.on_tick(),
            }
        }
        self.shut_down().await;
    }

    fn start_tasker(&mut self) {
        if let Err(why) = self.parts.tasker.start() {
            let why = why.to_string();
            tracing::error!("{why}");
            self.pass_to_machine(Event::TaskerGone { why });
        }
    }

    fn stop(&mut self, why: String) {
        tracing::info!("{why}");
        if self.stop_deadline.is_some() {
            tracing::warn!("second request to end: ending immediately");
            self.is_done = true;
            return;
        }
        self.stop_deadline = Some(Instant::now() + STOP_TIMEOUT);
        self.process_event(Event::Stop { why });
    }

    /// Handles an input and those queued after it.
    fn handle_inputs(&mut self, first: Input) {
        self.handle_input(first);
        for _ in 1..INPUT_BATCH_MAX {
            let Ok(input) = self.parts.inputs.try_recv() else {
                return;
            };
            self.handle_input(input);
            if self.is_done {
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
                        sent_count,
                        last_progress_at,
                        is_disconnected: false,
                    },
                );
                self.process_event(Event::TaskConnected { conn, pid });
            }
            Input::Event(event) => self.handle_event_input(event),
            Input::Net(NetInput::Control {
                host,
                number,
                message,
            }) => {
                if self.parts.net.is_current(host, number) {
                    self.process_event(Event::HostControl { host, message });
                }
            }
            Input::Net(NetInput::Data { host, number, item }) => {
                self.parts.net.accept_data(host, number, item);
                while let Some(message) = self.parts.net.next_data(host, number) {
                    self.reply_spinner.on_reply(&message, Instant::now());
                    self.process_event(Event::HostData { host, message });
                }
            }
            Input::Net(NetInput::Images(announced)) => self.parts.images.on_announcement(announced),
            Input::Net(NetInput::Memory(announced)) => self.parts.memory.on_announcement(announced),
            Input::Net(NetInput::FallbackStream {
                host,
                migration,
                what,
                streams,
            }) => {
                self.parts
                    .bulk_fallbacks
                    .on_stream(host, migration, what, streams);
            }
            Input::Net(input) => {
                for news in self.parts.net.handle_input(input) {
                    match news {
                        SessionChange::Connected(host) => {
                            if host == HostId::MASTER {
                                self.master_deadline = None;
                            }
                            self.process_event(Event::HostConnected { host });
                        }
                        SessionChange::Lost(host, why) => {
                            self.process_event(Event::HostLost { host, why })
                        }
                    }
                }
            }
        }
    }

    fn handle_event_input(&mut self, event: Event) {
        let is_ignored = match &event {
            // After a task is disconnected, only the end of its connection is handled.
            Event::TaskControl { conn, .. }
            | Event::TaskRoute { conn, .. }
            | Event::TaskLink { conn, .. } => {
                self.tasks.get(conn).is_none_or(|t| t.is_disconnected)
            }
            Event::TaskClosed { conn, .. } => self.tasks.remove(conn).is_none(),
            Event::TaskerGone { why } => {
                tracing::error!("{why}");
                self.parts.runtime_dir.undo_file_transfers();
                // Must come first: requests that the state machine makes next are for the new
                // tasker.
                self.parts.tasker.on_exit();
                false
            }
            _ => false,
        };
        if !is_ignored {
            self.process_event(event);
        }
    }

    /// Passes an event to the state machine and carries out its outputs.
    fn process_event(&mut self, event: Event) {
        self.pass_to_machine(event);
        self.carry_out_all();
    }

    /// Passes an event to the state machine. The caller carries out the outputs.
    fn pass_to_machine(&mut self, event: Event) {
        let now = self.now();
        self.parts.machine.handle(now, &mut self.parts.world, event);
    }

    fn carry_out_all(&mut self) {
        while let Some(output) = self.parts.machine.poll() {
            self.carry_out(output);
        }
    }

    // tidy: long because the match is a table of all outputs; the compiler checks that it is
    // complete
    fn carry_out(&mut self, output: Output) {
        match output {
            Output::ToTask { conn, message } => {
                self.send_to_task(conn, &message, Outgoing::Reliable)
            }
            Output::ToTaskWithFds {
                conn,
                message,
                descriptors,
            } => {
                self.send_to_task(conn, &message, |frame| {
                    Outgoing::WithFds(frame, descriptors)
                });
            }
            Output::LinkToTask { conn, frame } => self.send_link_frame(conn, frame),
            Output::DrainConnection { conn } => {
                if let Some(task) = self.tasks.get(&conn) {
                    task.connection.socket.shut_down_reads();
                }
            }
            Output::CloseTask { conn } => self.disconnect(conn),
            Output::ToHost { host, message } => self.parts.net.send_control(host, &message),
            Output::SendData { host, message } => self.send_to_host(host, message),
            Output::Connect { host, addresses } => self.parts.net.connect(host, addresses),
            Output::Disconnect { host } => {
                self.parts.net.expel(host);
                self.parts.memory.on_host_lost(host);
            }
            Output::StartHost { start, plan } => self.parts.starter.start(start, plan),
            Output::PrepareHosts { plans } => self.parts.starter.prepare_for_hoster(plans),
            Output::HosterReported { start, line } => {
                let event = self.parts.starter.on_hoster_reply(start, &line);
                self.pass_to_machine(event);
            }
            Output::Signal { conn, signal } => self.signal(conn, signal),
            Output::AbandonStart { start } => self.parts.starter.abandon(start),
            Output::StartTasker => self.start_tasker(),
            Output::ToTasker(message) => {
                if matches!(message, ToTasker::Dump { .. }) {
                    self.parts.runtime_dir.ensure_image_dir();
                }
                if let Some(answer) = self.parts.tasker.send(&message) {
                    self.pass_to_machine(Event::Tasker(answer));
                }
            }
            Output::SendImagesEarly { migration, to } => {
                self.parts
                    .images
                    .start_streaming(migration, to, &mut self.parts.net)
            }
            Output::SendImages { migration, to } => {
                self.parts.images.send(migration, to, &mut self.parts.net)
            }
            Output::ExpectImages { migration, from } => {
                self.parts.runtime_dir.ensure_image_dir();
                self.parts.images.expect(migration, from);
            }
            Output::ServeMemory { migration, to } => {
                self.parts.memory.serve(migration, to, &mut self.parts.net)
            }
            Output::FetchMemory { migration, from } => self.parts.memory.expect(migration, from),
            Output::DropImages { migration } => {
                drop(self.parts.images.drop_images(migration));
                self.parts.memory.abort_unused(migration);
                self.parts.program_state.drop_staged(migration);
            }
            Output::UploadPart {
                migration,
                record,
                to,
            } => {
                self.parts.images.complete_and_send(
                    migration,
                    to,
                    &mut self.parts.net,
                    write_part(record),
                );
            }
            Output::SendPart {
                restart,
                migration,
                tid,
                to,
            } => {
                self.parts.runtime_dir.ensure_image_dir();
                let complete = self.parts.checkpoints.unpack(restart, tid);
                self.parts
                    .images
                    .complete_and_send(migration, to, &mut self.parts.net, complete);
            }
            Output::CollectState {
                migration,
                files,
                dir,
            } => {
                self.parts.runtime_dir.ensure_image_dir();
                self.parts.program_state.collect(migration, files, dir);
            }
            Output::StageState {
                migration,
                files,
                dir,
            } => self.parts.program_state.stage(migration, files, dir),
            Output::InstallState { migration } => self.parts.program_state.rename_staged(migration),
            Output::ReadPart { migration } => self.parts.checkpoints.read_part(migration),
            Output::BeginCheckpoint { snapshot, job } => {
                self.parts
                    .checkpoints
                    .begin(snapshot, job, self.parts.world.unix_time())
            }
            Output::StorePart {
                snapshot,
                migration,
                tid,
            } => self.parts.checkpoints.add_part(snapshot, migration, tid),
            Output::SealCheckpoint {
                snapshot,
                meta,
                protected,
            } => self.parts.checkpoints.seal(
                snapshot,
                &meta,
                protected,
                self.parts.world.unix_time(),
            ),
            Output::AbandonCheckpoint { snapshot } => self.parts.checkpoints.abandon(snapshot),
            Output::OpenCheckpoint {
                restart,
                checkpoint,
            } => self.parts.checkpoints.open(restart, checkpoint),
            Output::CloseCheckpoint { restart } => self.parts.checkpoints.close(restart),
            Output::MarkCheckpoints {
                checkpoints,
                ended,
                protected,
            } => {
                self.parts.checkpoints.mark_job_end(
                    checkpoints,
                    ended.then(|| self.parts.world.unix_time()),
                    protected,
                );
            }
            Output::RemoveCheckpoints {
                tid,
                id,
                selection,
                include_foreign,
                refused,
            } => {
                self.parts
                    .checkpoints
                    .remove((tid, id), selection, include_foreign, refused);
            }
            Output::SendCopy {
                migration,
                checkpoint,
                to,
            } => {
                let copy = self.parts.checkpoints.send_copy(checkpoint);
                self.parts
                    .images
                    .send_copy(migration, to, &mut self.parts.net, copy);
            }
            Output::ExpectCopy {
                migration,
                from,
                checkpoint,
            } => {
                let take = self
                    .parts
                    .checkpoints
                    .receive_copy(checkpoint, self.parts.world.unix_time());
                self.parts.images.expect_into(migration, from, take);
            }
            Output::DiscardCopy {
                migration,
                checkpoint,
            } => {
                let over = self.parts.images.drop_images(migration);
                self.parts.checkpoints.discard(vec![checkpoint], Some(over));
            }
            Output::DropCheckpoints { checkpoints } => {
                self.parts.checkpoints.discard(checkpoints, None)
            }
            Output::ListCheckpoints { tid, id } => self.parts.checkpoints.list(tid, id),
            Output::WriteToken { path, token } => {
                self.parts.migration_files.write_token(&path, &token)
            }
            Output::RemoveToken { path } => self.parts.migration_files.remove_token(&path),
            Output::RecordMigration { migration, tid, to } => {
                self.parts.migration_files.record(migration, tid, to)
            }
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
            Output::LogTaskOutput { tid, bytes } => self.parts.log.task_output(tid, &bytes),
            Output::Shutdown => self.is_done = true,
        }
    }

    /// Queues a link frame for a task.
    fn send_link_frame(&mut self, conn: ConnId, frame: Bytes) {
        if let Some(task) = self.tasks.get_mut(&conn) {
            task.connection.outbox.enqueue(Outgoing::Link(frame));
        }
    }

    /// Sends an item over the data channel of another host.
    fn send_to_host(&mut self, host: HostId, carried: DataMsg) {
        self.reply_spinner.on_request(&carried, Instant::now());
        self.parts.net.send_data(host, carried);
    }

    fn send_to_task(
        &mut self,
        conn: ConnId,
        message: &ToTask,
        into_item: impl FnOnce(Bytes) -> Outgoing,
    ) {
        let Some(task) = self.tasks.get_mut(&conn) else {
            return;
        };
        match encode_control(message) {
            Ok(frame) => drop(task.connection.outbox.enqueue(into_item(frame))),
            Err(e) => tracing::warn!(
                "a message to process {} could not be sent: {e}",
                task.connection.pid
            ),
        }
    }

    /// Sends a signal to the process at the other end of a task's connection.
    fn signal(&mut self, conn: ConnId, signal: i32) {
        let Some(TaskConnection { pid, process, .. }) =
            self.tasks.get(&conn).map(|task| &task.connection)
        else {
            return;
        };
        let sent = match process {
            Ok(process) => signal_process(process.as_fd(), signal),
            Err(e) => Err(std::io::Error::new(
                e.kind(),
                format!("it cannot be reached: {e}"),
            )),
        };
        if let Err(e) = sent {
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
        let cut = task.connection.close_reason.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = cut.closed() => {}
                () = tokio::time::sleep(DISCONNECT_TIMEOUT) => {
                    cut.send_replace(Some("it did not receive its last messages".into()));
                }
            }
        });
    }

    /// Runs once a second. Checks for tasks that do not read, hosts to connect to, unused memory,
    /// and this daemon's deadlines.
    fn on_tick(&mut self) {
        for task in self.tasks.values_mut() {
            let progress = task.connection.outbox.sent_count();
            if progress != task.sent_count
                || task.connection.outbox.reliable_bytes() <= TASK_CONTROL_BYTES_MAX
            {
                (task.sent_count, task.last_progress_at) = (progress, Instant::now());
            } else if task.last_progress_at.elapsed() > TASK_READ_TIMEOUT {
                let why = format!(
                    "{} bytes wait for it and it has read nothing for {} s",
                    task.connection.outbox.reliable_bytes(),
                    TASK_READ_TIMEOUT.as_secs()
                );
                task.connection.close_reason.send_replace(Some(why));
            }
        }
        self.parts.net.tick();
        if self.last_heap_trim.elapsed() >= HEAP_TRIM_INTERVAL
            && self.parts.images.should_trim_heap()
        {
            allocator::trim_freed();
            self.last_heap_trim = Instant::now();
        }
        if self
            .master_deadline
            .take_if(|until| *until < Instant::now())
            .is_some()
        {
            self.stop(format!(
                "no session with the master within {} s",
                MASTER_SESSION_TIMEOUT.as_secs()
            ));
        }
        if self.stop_deadline.is_some_and(|at| at < Instant::now()) {
            tracing::warn!(
                "could not end in order within {} s: ending as it is",
                STOP_TIMEOUT.as_secs()
            );
            self.is_done = true;
        }
    }

    /// Ends the tasker with all its tasks, releases the runtime directory and closes all sessions.
    ///
    /// A slave completes all of this before it sends its last message, and the master listens until
    /// it has received that message. When the master's directory is free, no part of the virtual
    /// machine is left on any host.
    async fn shut_down(mut self) {
        let conns: Vec<ConnId> = self.tasks.keys().copied().collect();
        conns.into_iter().for_each(|conn| self.disconnect(conn));
        let had_slaves = self.is_master && self.parts.net.has_sessions();
        self.drain_inputs(|driver| {
            driver.tasks.is_empty() && !(driver.is_master && driver.parts.net.has_sessions())
        })
        .await;
        let Driver {
            parts, is_master, ..
        } = self;
        let DaemonParts {
            mut net,
            mut tasker,
            mut inputs,
            runtime_dir,
            images,
            starter,
            migration_files,
            ..
        } = parts;
        if had_slaves {
            tokio::time::sleep(2 * SLAVE_EXIT_TIMEOUT).await;
        }
        // The tasker sends messages until it ends, so its queue must be drained; the messages have
        // no effect.
        let drain = tokio::spawn(async move { while inputs.recv().await.is_some() {} });
        tasker.shut_down().await;
        drop((images, starter, migration_files));
        tracing::info!("ended");
        drop(runtime_dir);
        net.begin_shutdown();
        net.close(if is_master {
            DRAIN_TIMEOUT
        } else {
            SLAVE_EXIT_TIMEOUT
        })
        .await;
        drain.abort();
    }

    /// Handles the ends of connections until `is_over` holds or [`DRAIN_TIMEOUT`] has passed.
    async fn drain_inputs(&mut self, is_over: impl Fn(&Driver) -> bool) {
        let until = Instant::now() + DRAIN_TIMEOUT;
        while !is_over(self) {
            let input = tokio::select! {
                input = self.parts.inputs.recv() => input,
                () = sleep_until(until.into()) => None,
            };
            match input {
                Some(Input::Net(input)) => drop(self.parts.net.handle_input(input)),
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
