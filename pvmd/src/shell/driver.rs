//! The daemon's loop, the only place that accesses the state machine.
//!
//! Inputs come from one queue. The state machine's outputs are carried out in their order. The loop
//! never waits for a peer or a disk.

use super::detour::Detours;
use super::halts::{Edge, Halts};
use super::images::Images;
use super::input::Input;
use super::local::{DISMISS_WITHIN, TASK_CONTROL_BYTES_MAX, TASK_SILENCE_MAX, TaskLine};
use super::log::Log;
use super::memory::Memory;
use super::moves::Moves;
use super::net::{Net, NetInput, NetNews};
use super::outbox::Parcel;
use super::place::HeldPlace;
use super::sets::{Sets, write_part};
use super::start::Starter;
use super::states::States;
use super::sys::signal_process;
use super::tasker::Tasker;
use super::vigil::Vigil;
use super::world::DaemonWorld;
use bytes::Bytes;
use checkpoint::heap;
use pvmd_machine::{ConnId, Event, Machine, Output, World};
use sempa_proto::frame::encode_control;
use sempa_proto::host::Carried;
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
const STOP_WITHIN: Duration = Duration::from_secs(30);
/// Time limit for a slave's first session with its master.
const MASTER_WITHIN: Duration = Duration::from_secs(30);
/// Time limit for tasks and hosts to receive the last data sent to them.
const FAREWELL_WITHIN: Duration = Duration::from_secs(3);
/// Time limit for the exit of a slave's process after its last message; the master waits twice this
/// time.
const LAST_STEPS: Duration = Duration::from_millis(60);
/// Most inputs handled before the loop reads its clock and the streams are served.
const INPUTS_AT_ONCE: usize = 64;
/// Minimum interval between two releases of freed memory to the kernel.
const GIVE_BACK_EVERY: Duration = Duration::from_secs(5);
/// Interval at which queues and sessions are checked.
const TICK: Duration = Duration::from_secs(1);

/// A connected task, with the data to detect that it does not read.
struct Connected {
    line: TaskLine,
    progress: usize,
    since: Instant,
    dismissed: bool,
}

/// The components of a daemon.
pub(crate) struct Parts {
    pub(crate) machine: Machine,
    pub(crate) world: DaemonWorld,
    pub(crate) inputs: mpsc::Receiver<Input>,
    pub(crate) net: Net,
    pub(crate) tasker: Tasker,
    pub(crate) images: Images,
    pub(crate) memory: Memory,
    pub(crate) detours: Detours,
    pub(crate) starter: Starter,
    pub(crate) moves: Moves,
    pub(crate) sets: Sets,
    pub(crate) states: States,
    pub(crate) halts: Halts,
    pub(crate) log: Log,
    pub(crate) place: HeldPlace,
}

pub(crate) struct Driver {
    parts: Parts,
    is_master: bool,
    tasks: HashMap<ConnId, Connected>,
    start: Instant,
    vigil: Vigil,
    /// When freed memory was last returned to the kernel.
    gave_back: Instant,
    /// Deadline for the first session with the master. Only on a slave, until the session is
    /// established.
    master_until: Option<Instant>,
    stop_at: Option<Instant>,
    done: bool,
}

impl Driver {
    /// Creates a daemon whose clock begins at `start`.
    pub(crate) fn new(parts: Parts, start: Instant, is_master: bool) -> Driver {
        let master_until = (!is_master).then(|| Instant::now() + MASTER_WITHIN);
        let (tasks, vigil) = (HashMap::new(), Vigil::new());
        Driver {
            parts,
            is_master,
            tasks,
            start,
            vigil,
            gave_back: start,
            master_until,
            stop_at: None,
            done: false,
        }
    }

    fn now(&self) -> Micros {
        Micros(u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// Runs until the state machine emits [`Output::Shutdown`], then shuts down everything in
    /// order.
    ///
    /// `signals` delivers reasons to stop; a second one ends the daemon immediately.
    pub(crate) async fn run(mut self, mut signals: mpsc::Receiver<String>) {
        if self.is_master {
            self.start_tasker();
        }
        self.carry_out_all();
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut alarm, mut alarm_at) = (Box::pin(sleep_until(far_away().into())), None);
        while !self.done {
            let wake = self.parts.machine.next_wakeup();
            if wake.is_some_and(|at| at <= self.now()) {
                self.feed(Event::Wake);
                // Inputs are still served if the state machine asks for an immediate wakeup again
                // and again.
                tokio::task::yield_now().await;
            }
            // The timer is reset only when the time has changed, which is rare while messages pass.
            let wake = self.parts.machine.next_wakeup();
            if wake != alarm_at {
                let at = wake.map(|at| self.start + Duration::from_micros(at.0));
                alarm.as_mut().reset(at.unwrap_or_else(far_away).into());
                alarm_at = wake;
            }
            while self.vigil.lasts(Instant::now()) && self.parts.inputs.is_empty() {
                self.vigil.give_way();
                tokio::task::yield_now().await;
            }
            tokio::select! {
                input = self.parts.inputs.recv() => match input {
                    Some(input) => self.take_some(input),
                    None => break,
                },
                Some(why) = signals.recv() => self.stop(why),
                () = &mut alarm, if alarm_at.is_some() => alarm_at = None,
                _ = tick.tick() => self.look_after(),
            }
        }
        self.leave().await;
    }

    fn start_tasker(&mut self) {
        if let Err(why) = self.parts.tasker.start() {
            self.parts.log.line(&why);
            self.handle(Event::TaskerGone { why });
        }
    }

    fn stop(&mut self, why: String) {
        self.parts.log.line(&why);
        if self.stop_at.is_some() {
            self.parts.log.line("told again to end: ending at once");
            self.done = true;
            return;
        }
        self.stop_at = Some(Instant::now() + STOP_WITHIN);
        self.feed(Event::Stop { why });
    }

    /// Handles an input and those queued after it.
    fn take_some(&mut self, first: Input) {
        self.take(first);
        for _ in 1..INPUTS_AT_ONCE {
            let Ok(input) = self.parts.inputs.try_recv() else {
                return;
            };
            self.take(input);
            if self.done {
                return;
            }
        }
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::TaskUp(line) => {
                let (conn, pid) = (line.conn, line.pid);
                let progress = line.outbox.progress();
                let since = Instant::now();
                self.tasks.insert(
                    conn,
                    Connected {
                        line,
                        progress,
                        since,
                        dismissed: false,
                    },
                );
                self.feed(Event::TaskConnected { conn, pid });
            }
            Input::Event(event) => self.take_event(event),
            Input::Net(NetInput::Control {
                host,
                number,
                message,
            }) => {
                if self.parts.net.is_current(host, number) {
                    self.feed(Event::HostControl { host, message });
                }
            }
            Input::Net(NetInput::Data {
                host,
                number,
                parcel,
            }) => {
                self.parts.net.take_data(host, number, parcel);
                while let Some(message) = self.parts.net.carried(host, number) {
                    self.vigil.heard(&message, Instant::now());
                    self.feed(Event::HostData { host, message });
                }
            }
            Input::Net(NetInput::Images(announced)) => self.parts.images.arrived(announced),
            Input::Net(NetInput::Memory(announced)) => self.parts.memory.arrived(announced),
            Input::Net(NetInput::Detour {
                host,
                migration,
                what,
                streams,
            }) => {
                self.parts.detours.arrived(host, migration, what, streams);
            }
            Input::Net(input) => {
                for news in self.parts.net.take(input) {
                    match news {
                        NetNews::Connected(host) => {
                            if host == HostId::MASTER {
                                self.master_until = None;
                            }
                            self.feed(Event::HostConnected { host });
                        }
                        NetNews::Lost(host, why) => self.feed(Event::HostLost { host, why }),
                    }
                }
            }
        }
    }

    fn take_event(&mut self, event: Event) {
        let unheard = match &event {
            // After a task is disconnected, only the end of its connection is handled.
            Event::TaskControl { conn, .. }
            | Event::TaskRoute { conn, .. }
            | Event::TaskLink { conn, .. } => self.tasks.get(conn).is_none_or(|t| t.dismissed),
            Event::TaskClosed { conn, .. } => self.tasks.remove(conn).is_none(),
            Event::TaskerGone { why } => {
                self.parts.log.line(why);
                self.parts.place.undo_carried();
                // Must come first: requests that the state machine makes next are for the new
                // tasker.
                self.parts.tasker.gone();
                false
            }
            _ => false,
        };
        if !unheard {
            self.feed(event);
        }
    }

    /// Passes an event to the state machine and carries out its outputs.
    fn feed(&mut self, event: Event) {
        self.handle(event);
        self.carry_out_all();
    }

    /// Passes an event to the state machine. The caller carries out the outputs.
    fn handle(&mut self, event: Event) {
        let now = self.now();
        self.parts.machine.handle(now, &mut self.parts.world, event);
    }

    fn carry_out_all(&mut self) {
        while let Some(output) = self.parts.machine.poll() {
            self.carry_out(output);
        }
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::ToTask { conn, message } => self.tell(conn, &message, Parcel::Sure),
            Output::ToTaskWithFds {
                conn,
                message,
                descriptors,
            } => {
                self.tell(conn, &message, |frame| Parcel::With(frame, descriptors));
            }
            Output::LinkToTask { conn, frame } => self.hand_over(conn, frame),
            Output::DrainConnection { conn } => {
                if let Some(task) = self.tasks.get(&conn) {
                    task.line.socket.hear_out();
                }
            }
            Output::CloseTask { conn } => self.dismiss(conn),
            Output::ToHost { host, message } => self.parts.net.send(host, &message),
            Output::SendData { host, message } => self.carry(host, message),
            Output::Connect { host, addresses } => self.parts.net.connect(host, addresses),
            Output::Disconnect { host } => {
                self.parts.net.forget(host);
                self.parts.memory.host_lost(host);
            }
            Output::StartHost { start, plan } => self.parts.starter.start(start, plan),
            Output::PrepareHosts { plans } => self.parts.starter.prepare(plans),
            Output::HosterReported { start, line } => {
                let event = self.parts.starter.heard(start, &line);
                self.handle(event);
            }
            Output::Signal { conn, signal } => self.signal(conn, signal),
            Output::AbandonStart { start } => self.parts.starter.abandon(start),
            Output::StartTasker => self.start_tasker(),
            Output::ToTasker(message) => {
                if matches!(message, ToTasker::Dump { .. }) {
                    self.parts.place.see_to_images();
                }
                if let Some(answer) = self.parts.tasker.send(&message) {
                    self.handle(Event::Tasker(answer));
                }
            }
            Output::SendImagesEarly { migration, to } => {
                self.parts
                    .images
                    .send_ahead(migration, to, &mut self.parts.net)
            }
            Output::SendImages { migration, to } => {
                self.parts.images.send(migration, to, &mut self.parts.net)
            }
            Output::ExpectImages { migration, from } => {
                self.parts.place.see_to_images();
                self.parts.images.expect(migration, from);
            }
            Output::ServeMemory { migration, to } => {
                self.parts.memory.lend(migration, to, &mut self.parts.net)
            }
            Output::FetchMemory { migration, from } => self.parts.memory.expect(migration, from),
            Output::DropImages { migration } => {
                drop(self.parts.images.drop_images(migration));
                self.parts.memory.give_up_unused(migration);
                self.parts.states.drop_staged(migration);
            }
            Output::UploadPart {
                migration,
                record,
                to,
            } => {
                self.parts
                    .images
                    .complete(migration, to, &mut self.parts.net, write_part(record));
            }
            Output::SendPart {
                restart,
                migration,
                tid,
                to,
            } => {
                self.parts.place.see_to_images();
                let complete = self.parts.sets.unpack(restart, tid);
                self.parts
                    .images
                    .complete(migration, to, &mut self.parts.net, complete);
            }
            Output::CollectState {
                migration,
                files,
                dir,
            } => {
                self.parts.place.see_to_images();
                self.parts.states.collect(migration, files, dir);
            }
            Output::StageState {
                migration,
                files,
                dir,
            } => self.parts.states.stage(migration, files, dir),
            Output::InstallState { migration } => self.parts.states.name(migration),
            Output::ReadPart { migration } => self.parts.sets.read_part(migration),
            Output::BeginCheckpoint { snapshot, job } => {
                self.parts
                    .sets
                    .begin(snapshot, job, self.parts.world.unix_time())
            }
            Output::StorePart {
                snapshot,
                migration,
                tid,
            } => self.parts.sets.keep(snapshot, migration, tid),
            Output::SealCheckpoint {
                snapshot,
                meta,
                protected,
            } => self
                .parts
                .sets
                .seal(snapshot, &meta, protected, self.parts.world.unix_time()),
            Output::AbandonCheckpoint { snapshot } => self.parts.sets.abandon(snapshot),
            Output::OpenCheckpoint {
                restart,
                checkpoint,
            } => self.parts.sets.open(restart, checkpoint),
            Output::CloseCheckpoint { restart } => self.parts.sets.close(restart),
            Output::MarkCheckpoints {
                checkpoints,
                ended,
                protected,
            } => {
                self.parts.sets.mark(
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
                    .sets
                    .remove((tid, id), selection, include_foreign, refused);
            }
            Output::SendCopy {
                migration,
                checkpoint,
                to,
            } => {
                let copy = self.parts.sets.send_copy(checkpoint);
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
                    .sets
                    .take_copy(checkpoint, self.parts.world.unix_time());
                self.parts.images.expect_with(migration, from, take);
            }
            Output::DiscardCopy {
                migration,
                checkpoint,
            } => {
                let over = self.parts.images.drop_images(migration);
                self.parts.sets.discard(vec![checkpoint], Some(over));
            }
            Output::DropCheckpoints { checkpoints } => self.parts.sets.discard(checkpoints, None),
            Output::ListCheckpoints { tid, id } => self.parts.sets.list(tid, id),
            Output::WriteToken { path, token } => {
                self.parts.moves.write_token(&path, &token, &self.parts.log)
            }
            Output::RemoveToken { path } => self.parts.moves.remove_token(&path),
            Output::RecordMigration { migration, tid, to } => {
                self.parts.moves.record(migration, tid, to)
            }
            Output::StepStarting { tid, step } => self.parts.halts.at(tid, Edge::Before, step),
            Output::StepEnded { tid, step } => self.parts.halts.at(tid, Edge::After, step),
            Output::Log { text } => self.parts.log.line(text),
            Output::LogTaskOutput { tid, bytes } => self.parts.log.task_output(tid, &bytes),
            Output::Shutdown => self.done = true,
        }
    }

    /// Queues a link frame for a task.
    fn hand_over(&mut self, conn: ConnId, frame: Bytes) {
        if let Some(task) = self.tasks.get_mut(&conn) {
            task.line.outbox.put(Parcel::Link(frame));
        }
    }

    /// Sends an item over the data channel of another host.
    fn carry(&mut self, host: HostId, carried: Carried) {
        self.vigil.sent(&carried, Instant::now());
        self.parts.net.carry(host, carried);
    }

    fn tell(&mut self, conn: ConnId, message: &ToTask, parcel: impl FnOnce(Bytes) -> Parcel) {
        let Some(task) = self.tasks.get_mut(&conn) else {
            return;
        };
        match encode_control(message) {
            Ok(frame) => drop(task.line.outbox.put(parcel(frame))),
            Err(e) => self.parts.log.line(format!(
                "a message to process {} could not be sent: {e}",
                task.line.pid
            )),
        }
    }

    /// Sends a signal to the process at the other end of a task's connection.
    fn signal(&mut self, conn: ConnId, signal: i32) {
        let Some(TaskLine { pid, process, .. }) = self.tasks.get(&conn).map(|task| &task.line)
        else {
            return;
        };
        let sent = match process {
            Ok(process) => signal_process(process.as_fd(), signal),
            Err(e) => Err(std::io::Error::new(
                e.kind(),
                format!("it is out of reach: {e}"),
            )),
        };
        if let Err(e) = sent {
            self.parts.log.line(format!(
                "signal {signal} could not be sent to process {pid}: {e}"
            ));
        }
    }

    fn dismiss(&mut self, conn: ConnId) {
        let Some(task) = self.tasks.get_mut(&conn) else {
            return;
        };
        if std::mem::replace(&mut task.dismissed, true) {
            return;
        }
        task.line.outbox.put(Parcel::End);
        let cut = task.line.cut.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = cut.closed() => {}
                () = tokio::time::sleep(DISMISS_WITHIN) => {
                    cut.send_replace(Some("it did not take its last messages".into()));
                }
            }
        });
    }

    /// Runs once a second. Checks for tasks that do not read, hosts to connect to, unused memory,
    /// and this daemon's deadlines.
    fn look_after(&mut self) {
        for task in self.tasks.values_mut() {
            let progress = task.line.outbox.progress();
            if progress != task.progress || task.line.outbox.sure_bytes() <= TASK_CONTROL_BYTES_MAX
            {
                (task.progress, task.since) = (progress, Instant::now());
            } else if task.since.elapsed() > TASK_SILENCE_MAX {
                let why = format!(
                    "{} bytes wait for it and it has read nothing for {} s",
                    task.line.outbox.sure_bytes(),
                    TASK_SILENCE_MAX.as_secs()
                );
                task.line.cut.send_replace(Some(why));
            }
        }
        self.parts.net.tick();
        if self.gave_back.elapsed() >= GIVE_BACK_EVERY && self.parts.images.gives_back() {
            heap::give_back_freed();
            self.gave_back = Instant::now();
        }
        if self
            .master_until
            .take_if(|until| *until < Instant::now())
            .is_some()
        {
            self.stop(format!(
                "no session with the master within {} s",
                MASTER_WITHIN.as_secs()
            ));
        }
        if self.stop_at.is_some_and(|at| at < Instant::now()) {
            self.parts.log.line(format!(
                "could not end in order within {} s: ending as it is",
                STOP_WITHIN.as_secs()
            ));
            self.done = true;
        }
    }

    /// Ends the tasker with all its tasks, releases the runtime directory and closes all sessions.
    ///
    /// A slave has finished all that before it sends its last message, and the master listens until
    /// then: when the master's directory is free, nothing of the virtual machine is left on any
    /// host.
    async fn leave(mut self) {
        let conns: Vec<ConnId> = self.tasks.keys().copied().collect();
        conns.into_iter().for_each(|conn| self.dismiss(conn));
        let had_slaves = self.is_master && self.parts.net.has_sessions();
        self.farewell(|driver| {
            driver.tasks.is_empty() && !(driver.is_master && driver.parts.net.has_sessions())
        })
        .await;
        let Driver {
            parts, is_master, ..
        } = self;
        let Parts {
            mut net,
            mut tasker,
            mut inputs,
            log,
            place,
            images,
            starter,
            moves,
            ..
        } = parts;
        if had_slaves {
            tokio::time::sleep(2 * LAST_STEPS).await;
        }
        // The tasker sends messages until it ends, so its queue must be drained; the messages have
        // no effect.
        let drain = tokio::spawn(async move { while inputs.recv().await.is_some() {} });
        tasker.end().await;
        drop((images, starter, moves));
        log.line("ended");
        drop(place);
        net.begin_leaving();
        net.close(if is_master {
            FAREWELL_WITHIN
        } else {
            LAST_STEPS
        })
        .await;
        drain.abort();
    }

    /// Handles the ends of connections until `is_over` holds or [`FAREWELL_WITHIN`] has passed.
    async fn farewell(&mut self, is_over: impl Fn(&Driver) -> bool) {
        let until = Instant::now() + FAREWELL_WITHIN;
        while !is_over(self) {
            let input = tokio::select! {
                input = self.parts.inputs.recv() => input,
                () = sleep_until(until.into()) => None,
            };
            match input {
                Some(Input::Net(input)) => drop(self.parts.net.take(input)),
                Some(Input::Event(Event::TaskClosed { conn, .. })) => {
                    drop(self.tasks.remove(&conn))
                }
                Some(_) => {}
                None => return,
            }
        }
    }
}

fn far_away() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}
