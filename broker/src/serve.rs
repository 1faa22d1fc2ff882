//! The broker as a task: one thread owns the session and its journal; other threads read what
//! arrives from tasks, from TLS connections and as signals.

use crate::args::ServeOptions;
use crate::departure_reasons::DepartureReasons;
use crate::folder::{self, Identity};
use crate::journal::Journal;
use crate::listener::{self, FrameSender, LinkNumbers, Listener};
use crate::task_input::{read_tasks, send_bytes, send_frame, watch_task};
use anyhow::{Context, Result};
use libpvm::Vm;
use libpvm::proto::Tid;
use sempa_broker_client::directory::{
    self, SessionEntry, StartReport, is_session_name, lock_session, publish, unlock_session,
};
use sempa_broker_client::tls::{fingerprint, server_config};
use sempa_broker_client::wire::encode;
use sempa_broker_session::{
    Event, LinkId, Millis, Output, Place, Role, Session, SessionEnd, SessionEvent, ToBroker,
    ToMember,
};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Largest number of inputs that wait for the broker's thread. Readers wait while it is reached, so
/// senders feel it.
const INPUTS_MAX: usize = 4096;
/// Largest number of inputs that share one commit of the journal.
const INPUTS_PER_COMMIT_MAX: usize = 256;
/// Name of the variable with the session's name in the environment of a foreman.
const SESSION_VARIABLE: &str = "SEMPA_SESSION";

/// What arrives at the broker's thread.
#[derive(Debug)]
pub(crate) enum Input {
    TaskFrame {
        tid: Tid,
        /// Number of the connection within the task.
        tag: i32,
        frame: ToBroker,
    },
    TaskEnded(Tid),
    Opened {
        link: LinkId,
        role: Role,
        sender: FrameSender,
    },
    Frame {
        link: LinkId,
        frame: ToBroker,
    },
    Closed {
        link: LinkId,
    },
    /// A signal asks this process to end.
    Terminate,
    /// The virtual machine has ended.
    VmLost,
}

/// Receiver of the frames of a link.
#[derive(Debug)]
enum Peer {
    Task { tid: Tid, tag: i32 },
    Outside(FrameSender),
}

struct Broker {
    vm: Vm,
    session_name: String,
    folder: PathBuf,
    /// Fingerprint of the session's certificate.
    fingerprint: String,
    session: Session,
    journal: Journal,
    peers: BTreeMap<LinkId, Peer>,
    task_links: BTreeMap<(Tid, i32), LinkId>,
    numbers: Arc<LinkNumbers>,
    reasons: DepartureReasons,
    started_at: Instant,
    /// The task that this broker has started as the foreman, until the task ends.
    started_foreman: Option<Tid>,
    had_outside_members: bool,
    ended: Option<SessionEnd>,
}

/// Serves a session until it ends.
///
/// # Errors
/// The session cannot be served, with the reason for the task that waits for this broker.
pub(crate) fn run(options: &ServeOptions) -> Result<()> {
    let vm = Vm::enroll().context("a broker is a task of a virtual machine")?;
    vm.disable_spinning();
    let report = |report: &StartReport| {
        if let Some((tid, tag)) = options.starter {
            // The task that has started this broker may have ended.
            let _ = send_bytes(&vm, Tid::from_raw(tid), tag, encode(report));
        }
    };
    if !is_session_name(&options.session) {
        anyhow::bail!("{:?} is not a session's name", options.session);
    }
    if !lock_session(&vm, &options.session)? {
        report(&StartReport::Taken);
        return Ok(vm.exit()?);
    }
    let result = match start(&vm, options) {
        Ok((broker, inputs, runtime)) => {
            report(&StartReport::Ready);
            let result = broker.serve(&inputs, options, &runtime);
            runtime.shutdown_background();
            result
        }
        Err(error) => {
            unlock_session(&vm, &options.session);
            report(&StartReport::Failed(format!("{error:#}")));
            Err(error)
        }
    };
    vm.exit().or(result)
}

/// The folder with which a broker starts.
#[derive(Debug)]
enum SessionFolder {
    /// The session begins with this broker.
    New(PathBuf),
    /// The session of a broker that was killed goes on.
    OfKilledBroker(PathBuf),
}

/// Returns the folder of the session's journal.
///
/// # Errors
/// The session is over, also because the journal of a killed broker is not on this host.
fn choose_folder(vm: &Vm, session: &str) -> Result<SessionFolder> {
    match directory::lookup(vm, session)? {
        Some(SessionEntry::Over { end, .. }) => Err(sempa_broker_client::Error::Over {
            session: session.to_string(),
            end,
        }
        .into()),
        Some(SessionEntry::Running {
            folder,
            fingerprint,
            ..
        }) => {
            let folder = PathBuf::from(folder);
            if !folder.exists() {
                post_end(vm, session, SessionEnd::BrokerLost, fingerprint);
                anyhow::bail!(
                    "the journal of the session, {}, is not on this host; the session is over",
                    folder.display()
                );
            }
            Ok(SessionFolder::OfKilledBroker(folder))
        }
        None => {
            let folder = folder::sessions_folder(vm)?.join(session);
            // Such a folder belongs to a virtual machine that has ended.
            folder::remove(&folder);
            Ok(SessionFolder::New(folder))
        }
    }
}

type Started = (Broker, Receiver<Input>, tokio::runtime::Runtime);

fn start(vm: &Vm, options: &ServeOptions) -> Result<Started> {
    match choose_folder(vm, &options.session)? {
        SessionFolder::OfKilledBroker(folder) => start_in(folder, vm, options),
        SessionFolder::New(folder) => {
            let started = start_in(folder.clone(), vm, options).and_then(|mut started| {
                if let Some(program) = &options.broker.foreman {
                    started.0.start_foreman(program)?;
                }
                Ok(started)
            });
            if started.is_err() {
                // A session that has not begun must not be found by others.
                directory::remove(vm, &options.session)?;
                folder::remove(&folder);
            }
            started
        }
    }
}

fn start_in(session_folder: PathBuf, vm: &Vm, options: &ServeOptions) -> Result<Started> {
    let started_at = Instant::now();
    folder::make(&session_folder)?;
    folder::register(&session_folder, &options.session)?;
    let (journal, state) = Journal::open(&session_folder, options.broker.journal)?;
    let identity = Identity::read_or_generate(&session_folder, options.broker.port)?;
    let (runtime, listener, identity) = listen(&session_folder, identity)?;
    let now = Millis(0);
    let session = match state {
        Some(state) => Session::resume(state, now),
        None => Session::new(&options.session, options.broker.settings(), now),
    };
    let (inputs, input_receiver) = sync_channel(INPUTS_MAX);
    let numbers = Arc::new(LinkNumbers::default());
    let tls = Listener {
        config: server_config(&identity.certificate, &identity.private_key)?,
        session_key: Arc::new(identity.session_key),
        inputs: inputs.clone(),
        numbers: numbers.clone(),
    };
    runtime.spawn(tls.run(listener));
    watch_signals(&runtime, inputs.clone())?;
    let reader_vm = vm.clone();
    std::thread::Builder::new()
        .name("broker-tasks".into())
        .spawn(move || read_tasks(&reader_vm, &inputs))?;
    let broker = Broker {
        vm: vm.clone(),
        session_name: options.session.clone(),
        folder: session_folder,
        fingerprint: fingerprint(&identity.certificate),
        session,
        journal,
        peers: BTreeMap::new(),
        task_links: BTreeMap::new(),
        numbers,
        reasons: DepartureReasons::default(),
        started_at,
        started_foreman: None,
        had_outside_members: false,
        ended: None,
    };
    broker.publish_running()?;
    Ok((broker, input_receiver, runtime))
}

/// Listens on the port of the session, and keeps the port for the next broker.
fn listen(
    session_folder: &Path,
    mut identity: Identity,
) -> Result<(tokio::runtime::Runtime, TcpListener, Identity)> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let listener = {
        let _context = runtime.enter();
        listener::bind(identity.port)
            .with_context(|| format!("port {} cannot be used", identity.port))?
    };
    identity.port = listener.local_addr()?.port();
    identity.write(session_folder)?;
    Ok((runtime, listener, identity))
}

fn watch_signals(runtime: &tokio::runtime::Runtime, inputs: SyncSender<Input>) -> Result<()> {
    let _context = runtime.enter();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    runtime.spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        // The broker's thread ends without this input if its channel is closed.
        let _ = tokio::task::spawn_blocking(move || inputs.send(Input::Terminate)).await;
    });
    Ok(())
}

/// Tells late comers that the session is over.
fn post_end(vm: &Vm, session: &str, end: SessionEnd, fingerprint: String) {
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let entry = SessionEntry::Over {
        end,
        ended_at: seconds.map_or(0, |time| time.as_secs()),
        fingerprint,
    };
    // Without the virtual machine there are no late comers.
    if publish(vm, session, &entry).is_err() {
        return;
    }
    // A new session of this name may begin while this broker answers late comers.
    unlock_session(vm, session);
}

impl Broker {
    fn publish_running(&self) -> Result<()> {
        let hosts = self.vm.config()?;
        let host = hosts
            .get(self.vm.host())
            .map_or(String::new(), |host| host.name.clone());
        let entry = SessionEntry::Running {
            broker: self.vm.tid().raw(),
            host,
            folder: self.folder.to_string_lossy().into_owned(),
            fingerprint: self.fingerprint.clone(),
        };
        publish(&self.vm, &self.session_name, &entry)?;
        Ok(())
    }

    fn start_foreman(&mut self, command: &str) -> Result<()> {
        let mut words = command.split_whitespace();
        let program = words.next().context("--foreman names no program")?;
        let spawn = self
            .vm
            .spawner(program)
            .args(words)
            .env(SESSION_VARIABLE, &self.session_name)
            .hide_parent();
        let tasks = spawn
            .start()?
            .all()
            .with_context(|| format!("the foreman {program} was not started"))?;
        for task in tasks {
            watch_task(&self.vm, task.tid().raw())?;
            self.started_foreman = Some(task.tid());
        }
        Ok(())
    }

    fn now(&self) -> Millis {
        Millis(u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// Serves until the session has ended and late comers from outside had time to learn that.
    fn serve(
        mut self,
        inputs: &Receiver<Input>,
        options: &ServeOptions,
        runtime: &tokio::runtime::Runtime,
    ) -> Result<()> {
        self.carry_out()?;
        while self.ended.is_none() {
            self.handle_next(inputs, None)?;
        }
        let end = self.ended.unwrap_or(SessionEnd::Idle);
        self.session_folder_ends();
        if end != SessionEnd::VmEnded {
            let fingerprint = self.fingerprint.clone();
            post_end(&self.vm, &self.session_name, end, fingerprint);
            if self.had_outside_members {
                let linger_end = Instant::now() + Duration::from_secs(options.broker.linger);
                while Instant::now() < linger_end && self.ended != Some(SessionEnd::VmEnded) {
                    self.handle_next(inputs, Some(linger_end))?;
                }
            }
        }
        // Frames that are queued for connections, such as the last word, are still written.
        self.peers.clear();
        runtime.block_on(async {
            tokio::time::sleep(LAST_FRAMES_TIME).await;
        });
        Ok(())
    }

    fn session_folder_ends(&self) {
        folder::remove(&self.folder);
    }

    /// Handles the inputs that are there, or waits for one.
    fn handle_next(&mut self, inputs: &Receiver<Input>, until: Option<Instant>) -> Result<()> {
        let wakeup = self.session.next_wakeup();
        let until_wakeup = wakeup.map(|at| Duration::from_millis(at.since(self.now()).0));
        let until_end = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = [until_wakeup, until_end].into_iter().flatten().min();
        match inputs.recv_timeout(timeout.unwrap_or(Duration::from_secs(60))) {
            Ok(input) => self.handle_input(input)?,
            Err(RecvTimeoutError::Timeout) => {
                let now = self.now();
                self.session.handle(now, Event::Wakeup);
            }
            Err(RecvTimeoutError::Disconnected) => self.end_with_vm(),
        }
        for input in inputs.try_iter().take(INPUTS_PER_COMMIT_MAX) {
            self.handle_input(input)?;
        }
        self.carry_out()
    }

    fn end_with_vm(&mut self) {
        let now = self.now();
        let end = SessionEnd::VmEnded;
        let within = Millis(0);
        self.session.handle(now, Event::End { end, within });
        self.ended = Some(SessionEnd::VmEnded);
    }

    fn handle_input(&mut self, input: Input) -> Result<()> {
        let now = self.now();
        match input {
            Input::TaskFrame { tid, tag, frame } => {
                let link = self.task_link(now, tid, tag);
                self.session.handle(now, Event::Frame { link, frame });
            }
            Input::TaskEnded(tid) => {
                let reason = self.reasons.find(&self.vm, tid);
                let tid_number = tid.raw();
                self.session.handle(
                    now,
                    Event::TaskEnded {
                        tid: tid_number,
                        reason,
                    },
                );
                if self
                    .started_foreman
                    .take_if(|foreman| *foreman == tid)
                    .is_some()
                {
                    self.session.handle(now, Event::ForemanEnded);
                }
            }
            Input::Opened { link, role, sender } => {
                self.had_outside_members = true;
                self.peers.insert(link, Peer::Outside(sender));
                let (place, rights) = (Place::Outside, role);
                let opened = Event::Opened {
                    link,
                    place,
                    rights,
                };
                self.session.handle(now, opened);
            }
            Input::Frame { link, frame } => {
                self.session.handle(now, Event::Frame { link, frame });
            }
            Input::Closed { link } => {
                self.peers.remove(&link);
                self.session.handle(now, Event::Closed { link });
            }
            Input::Terminate | Input::VmLost => self.end_with_vm(),
        }
        Ok(())
    }

    /// Returns the link of a task's connection. All tasks of the virtual machine belong to its user
    /// and may be foremen.
    fn task_link(&mut self, now: Millis, tid: Tid, tag: i32) -> LinkId {
        if let Some(link) = self.task_links.get(&(tid, tag)) {
            return *link;
        }
        let link = self.numbers.next();
        self.task_links.insert((tid, tag), link);
        self.peers.insert(link, Peer::Task { tid, tag });
        let opened = Event::Opened {
            link,
            place: Place::Inside { tid: tid.raw() },
            rights: Role::Foreman,
        };
        self.session.handle(now, opened);
        link
    }

    /// Writes all records to the journal, then carries out the other outputs in order.
    fn carry_out(&mut self) -> Result<()> {
        let outputs: Vec<Output> = std::iter::from_fn(|| self.session.poll()).collect();
        if self.ended.is_none() {
            for output in &outputs {
                if let Output::Record(record) = output {
                    self.journal.add(record)?;
                }
            }
            self.journal.commit()?;
            self.journal.compact(self.session.state())?;
        }
        for output in outputs {
            self.carry_out_one(output);
        }
        Ok(())
    }

    fn carry_out_one(&mut self, output: Output) {
        match output {
            Output::Record(_) => {}
            Output::Send { link, frame } => self.send(link, frame),
            Output::Close { link } => {
                if let Some(Peer::Task { tid, tag }) = self.peers.remove(&link) {
                    self.task_links.remove(&(tid, tag));
                    // An empty message closes the connection; the task may have ended.
                    let _ = send_bytes(&self.vm, tid, tag, Vec::new());
                }
            }
            Output::WatchTask { tid } => {
                // A failure means that the virtual machine is ending.
                let _ = watch_task(&self.vm, tid);
            }
            Output::Log(event) => log_event(&self.session_name, &event),
            Output::Ended(end) => self.ended = self.ended.or(Some(end)),
        }
    }

    fn send(&mut self, link: LinkId, frame: ToMember) {
        match self.peers.get(&link) {
            Some(Peer::Task { tid, tag }) => {
                // A message to a task that has ended is dropped; a notice tells of the end.
                if let Err(error) = send_frame(&self.vm, *tid, *tag, &frame) {
                    eprintln!("pvm-broker: a frame to {tid} was not sent: {error}");
                }
            }
            // The reader reports the end of the connection.
            Some(Peer::Outside(sender)) if !sender.send(frame) => {
                self.peers.remove(&link);
            }
            Some(Peer::Outside(_)) | None => {}
        }
    }
}

/// Time for the last frames of connections at the end of the broker.
const LAST_FRAMES_TIME: Duration = Duration::from_millis(50);

fn log_event(session: &str, event: &SessionEvent) {
    let text = match event {
        SessionEvent::Joined { member, host } => format!("{member} joined from {host}"),
        SessionEvent::Resumed { member } => format!("{member} is back"),
        SessionEvent::Away { member } => format!("{member} is away"),
        SessionEvent::Gone { member, reason } => format!("{member} is gone: {reason}"),
        SessionEvent::Ending(end) => format!("it ends: {end}"),
    };
    // One write is one line in the log of the virtual machine.
    let line = format!("session {session}: {text}\n");
    // Without standard error there is no log.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Returns the identity of a session whose broker runs on this host or shares the folder.
///
/// # Errors
/// The folder cannot be read here.
pub(crate) fn read_identity(folder: &Path) -> Result<Identity> {
    let identity = Identity::read_or_generate(folder, 0)?;
    anyhow::ensure!(
        identity.port != 0,
        "{} is not on this host; run this command on the broker's host",
        folder.display()
    );
    Ok(identity)
}
