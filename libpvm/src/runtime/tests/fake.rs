//! Minimal daemon for tests. The daemon enrolls tasks, forwards link frames, queues frames for a
//! migrating task, and logs all control frames.

use super::{TEST_TIMEOUT, wait_until};
use crate::runtime::{EnrollOptions, Runtime};
use bytes::Bytes;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use sempa_proto::frame::{Frame, FrameDecoder, FrameKind, encode_control, encode_frame, to_bytes};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::route::RouteMsg;
use sempa_proto::task::{
    Claim, Hello, OnDaemonExit, Reply, Request, ResumeToken, RmInfo, Sink, ToDaemon, ToTask,
    Welcome,
};
use sempa_proto::{HostId, MigrationId, RequestId, Tid};
use sempa_socket::{MessageFds, PendingFds, receive};
use std::collections::HashMap;
use std::io::{IoSlice, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Instant;
use tempfile::TempDir;

/// Bytes to write, with the descriptors to send with them.
type FrameWithFds = (Bytes, Vec<OwnedFd>);
/// Recorded route message: sender, receiver, message, and copies of its descriptors.
pub(super) type RecordedMessage = (Tid, Tid, RouteMsg, Vec<OwnedFd>);
type Responder = Box<dyn Fn(Tid, &Request) -> Option<Reply> + Send>;
type AddressRewrite = Box<dyn Fn(SocketAddr) -> SocketAddr + Send>;

/// Frame that the fake daemon queues for a task without a connection.
enum QueuedFrame {
    Frame(FrameWithFds),
    /// Route message. When the task reconnects, the fake daemon adds whether both tasks are on the
    /// same host.
    Route {
        sender: Tid,
        message: RouteMsg,
    },
}

/// State of one task at the daemon.
#[derive(Default)]
pub(super) struct FakeTaskConn {
    stream: Option<UnixStream>,
    frame_sender: Option<Sender<FrameWithFds>>,
    queued_frames: Vec<QueuedFrame>,
    /// True after a quiesce request: frames for the task are queued.
    is_quiescing: bool,
    is_stalled: bool,
    pub(super) is_closed: bool,
}

impl FakeTaskConn {
    fn send(&mut self, bytes: Bytes) {
        self.send_with_descriptors(bytes, Vec::new());
    }

    fn send_with_descriptors(&mut self, bytes: Bytes, descriptors: Vec<OwnedFd>) {
        match &self.frame_sender {
            // Sending fails if the connection is broken. The frame is then lost, as with a real
            // daemon.
            Some(frame_sender) if !self.is_quiescing => {
                drop(frame_sender.send((bytes, descriptors)))
            }
            _ if self.is_closed => {}
            _ => self
                .queued_frames
                .push(QueuedFrame::Frame((bytes, descriptors))),
        }
    }

    fn is_receiving(&self) -> bool {
        self.frame_sender.is_some() && !self.is_quiescing && !self.is_closed
    }
}

#[derive(Default)]
pub(super) struct FakeState {
    pub(super) tasks: HashMap<Tid, FakeTaskConn>,
    /// All received control frames with their senders, in order of arrival.
    pub(super) control_log: Vec<(Tid, ToDaemon)>,
    pub(super) hellos: Vec<Hello>,
    pub(super) rm: Option<RmInfo>,
    pub(super) refusal_reason: Option<String>,
    /// True if the fake daemon drops link frames.
    pub(super) drops_link_frames: bool,
    /// True if the tasks count as being on the same host, so that they may have rings. Otherwise
    /// the fake daemon refuses their ring offers.
    pub(super) is_same_host: bool,
    /// True if the fake daemon forbids direct routes that no program has requested.
    pub(super) forbids_automatic_routes: bool,
    /// Recorded route messages; `None` if recording is disabled.
    pub(super) recorded_messages: Option<Vec<RecordedMessage>>,
    /// Function that rewrites the addresses in offers of direct routes, to insert a proxy.
    pub(super) address_rewrite: Option<AddressRewrite>,
    responder: Option<Responder>,
    last_local_number: u32,
}

pub(super) struct SharedFakeState {
    state: Mutex<FakeState>,
    state_changed: Condvar,
}

/// Handle of the fake daemon. Dropping the handle closes the connections of the fake daemon.
pub(super) struct FakeDaemon {
    pub(super) runtime_dir: TempDir,
    shared_state: Arc<SharedFakeState>,
}

impl FakeDaemon {
    pub(super) fn start() -> Self {
        let dir = TempDir::new().expect("a directory");
        let listener = UnixListener::bind(dir.path().join("s")).expect("a socket");
        let shared_state = Arc::new(SharedFakeState {
            state: Mutex::default(),
            state_changed: Condvar::new(),
        });
        let accept_state = Arc::clone(&shared_state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared_state = Arc::clone(&accept_state);
                thread::spawn(move || serve_task(&shared_state, stream));
            }
        });
        Self {
            runtime_dir: dir,
            shared_state,
        }
    }

    pub(super) fn socket_path(&self) -> PathBuf {
        self.runtime_dir.path().join("s")
    }

    pub(super) fn enroll_options(&self) -> EnrollOptions {
        EnrollOptions {
            socket: self.socket_path(),
            claim: Claim::NotSpawned,
            program: "test".into(),
            on_daemon_exit: OnDaemonExit::FailCalls,
            has_automatic_routes: false,
        }
    }

    pub(super) fn enroll(&self) -> Runtime {
        Runtime::connect(self.enroll_options()).expect("welcome")
    }

    /// Enrols a task whose library sets up direct routes on its own.
    pub(super) fn enroll_with_automatic_routes(&self) -> Runtime {
        let options = EnrollOptions {
            has_automatic_routes: true,
            ..self.enroll_options()
        };
        Runtime::connect(options).expect("welcome")
    }

    pub(super) fn state(&self) -> MutexGuard<'_, FakeState> {
        self.shared_state
            .state
            .lock()
            .expect("no panic under the lock")
    }

    /// Sets the function that answers requests. A request for which the function returns `None`
    /// remains without a reply.
    pub(super) fn set_responder(
        &self,
        responder: impl Fn(Tid, &Request) -> Option<Reply> + Send + 'static,
    ) {
        self.state().responder = Some(Box::new(responder));
    }

    pub(super) fn send_control(&self, tid: Tid, control_message: ToTask) {
        self.send_raw(tid, encode_control(&control_message).expect("small"));
    }

    pub(super) fn send_reply(&self, tid: Tid, id: RequestId, reply: Reply) {
        self.send_control(tid, ToTask::Reply { id, reply });
    }

    pub(super) fn send_raw(&self, tid: Tid, bytes: impl Into<Bytes>) {
        self.state()
            .tasks
            .get_mut(&tid)
            .expect("seated")
            .send(bytes.into());
    }

    /// Waits for a log entry for which `f` returns a value, and returns this value.
    pub(super) fn wait_for_log<R>(
        &self,
        awaited_event: &str,
        f: impl Fn(Tid, &ToDaemon) -> Option<R>,
    ) -> R {
        wait_until(awaited_event, || {
            self.state()
                .control_log
                .iter()
                .find_map(|(tid, control_message)| f(*tid, control_message))
        })
    }

    /// Waits for a request for which `f` returns true, and returns the id of the request.
    pub(super) fn wait_for_request(
        &self,
        awaited_event: &str,
        f: impl Fn(&Request) -> bool,
    ) -> RequestId {
        self.wait_for_log(awaited_event, |_, control_message| match control_message {
            ToDaemon::Request {
                id,
                request: awaited_event,
            } if f(awaited_event) => Some(*id),
            _ => None,
        })
    }

    /// Makes the fake daemon stop reading from this task (`is_stalled`), or read again.
    pub(super) fn set_stalled(&self, tid: Tid, is_stalled: bool) {
        self.state().tasks.get_mut(&tid).expect("seated").is_stalled = is_stalled;
        self.shared_state.state_changed.notify_all();
    }

    pub(super) fn token_path(&self, migration: u64) -> PathBuf {
        self.runtime_dir.path().join(format!("resume-{migration}"))
    }

    /// Sends a quiesce request to a task. After this call, the fake daemon queues frames for the
    /// task.
    pub(super) fn send_quiesce(&self, tid: Tid, migration: u64) {
        let paths = vec![
            self.runtime_dir.path().join("nowhere"),
            self.token_path(migration),
        ];
        let quiesce_request = ToTask::Quiesce {
            migration: MigrationId(migration),
            token_paths: paths,
        };
        let mut state = self.state();
        let task_conn = state.tasks.get_mut(&tid).expect("seated");
        task_conn.send(encode_control(&quiesce_request).expect("small"));
        task_conn.is_quiescing = true;
    }

    pub(super) fn wait_until_quiesced(&self, tid: Tid, migration: u64) {
        self.wait_for_log("quiescing", |sender, control_message| {
            let migration_id = MigrationId(migration);
            matches!(control_message, ToDaemon::Quiesced { migration, .. } if sender == tid && *migration == migration_id).then_some(())
        });
        wait_until("the closed socket", || {
            self.state().tasks[&tid].stream.is_none().then_some(())
        });
    }

    /// Writes the token file, so that the quiesced task reconnects to this daemon.
    pub(super) fn write_resume_token(&self, migration: u64) {
        self.write_token(migration, MigrationId(migration), self.socket_path());
    }

    pub(super) fn write_token(&self, file_number: u64, migration: MigrationId, socket: PathBuf) {
        let token = to_bytes(&ResumeToken {
            migration,
            socket_path: socket,
        })
        .expect("small");
        let temporary_path = self.runtime_dir.path().join("token.new");
        std::fs::write(&temporary_path, token).expect("written");
        std::fs::rename(temporary_path, self.token_path(file_number)).expect("renamed");
    }

    /// Closes the connection to a task, as if the daemon had died.
    pub(super) fn disconnect(&self, tid: Tid) {
        let state = self.state();
        let stream = state.tasks[&tid].stream.as_ref().expect("connected");
        stream.shutdown(Shutdown::Both).expect("was open");
    }

    pub(super) fn is_closed(&self, tid: Tid) -> bool {
        self.state().tasks[&tid].is_closed
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        let state = self
            .shared_state
            .state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        for stream in state
            .tasks
            .values()
            .filter_map(|task_conn| task_conn.stream.as_ref())
        {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn read_frame(
    stream: &UnixStream,
    decoder: &mut FrameDecoder,
    received_fds: &mut PendingFds,
) -> Option<Frame> {
    loop {
        if let Some(frame) = decoder.next_frame().expect("the library speaks in frames") {
            return Some(frame);
        }
        decoder.buffer_mut().reserve(64 << 10);
        match receive(
            stream,
            decoder.buffer_mut(),
            received_fds,
            MsgFlags::empty(),
        ) {
            Ok(read_outcome) if read_outcome.byte_count > 0 => {}
            _ => return None,
        }
    }
}

fn serve_task(shared_state: &SharedFakeState, stream: UnixStream) {
    let (mut decoder, mut received_fds) = (FrameDecoder::new(), PendingFds::default());
    let Some(first_frame) = read_frame(&stream, &mut decoder, &mut received_fds) else {
        return;
    };
    let Ok(ToDaemon::Hello(hello)) = first_frame.decode_control::<ToDaemon>() else {
        panic!("the first frame is a hello")
    };
    let Some(tid) = enroll_task(shared_state, &hello, &stream) else {
        return;
    };
    loop {
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut state = shared_state.state.lock().expect("no panic under the lock");
        while state.tasks[&tid].is_stalled && Instant::now() < deadline {
            state = shared_state
                .state_changed
                .wait_timeout(state, TEST_TIMEOUT)
                .expect("no panic under the lock")
                .0;
        }
        drop(state);
        let Some(frame) = read_frame(&stream, &mut decoder, &mut received_fds) else {
            break;
        };
        handle_frame(shared_state, tid, frame, &mut received_fds);
    }
    let mut state = shared_state.state.lock().expect("no panic under the lock");
    let task_conn = state.tasks.get_mut(&tid).expect("seated");
    (task_conn.stream, task_conn.frame_sender) = (None, None);
    task_conn.is_closed = !task_conn.is_quiescing;
}

/// Answers a hello, and sends the frames that were queued for the task. Returns the tid of the
/// task; `None` if the task was refused.
fn enroll_task(shared_state: &SharedFakeState, hello: &Hello, stream: &UnixStream) -> Option<Tid> {
    let mut write_stream = stream.try_clone().expect("a descriptor");
    let mut state = shared_state.state.lock().expect("no panic under the lock");
    state.hellos.push(hello.clone());
    if let Some(reason) = state.refusal_reason.clone() {
        write_stream
            .write_all(&encode_control(&ToTask::Refused { reason }).expect("small"))
            .expect("written");
        return None;
    }
    let tid = match hello.claim {
        Claim::Resume { tid, .. } => tid,
        _ => {
            state.last_local_number += 1;
            Tid::for_task(HostId::MASTER, state.last_local_number).expect("few tasks")
        }
    };
    let welcome = ToTask::Welcome(Welcome {
        tid,
        parent: Tid::NONE,
        host: HostId::MASTER,
        addresses: vec![Ipv4Addr::LOCALHOST.into()],
        allows_automatic_routes: !state.forbids_automatic_routes,
        rm: state.rm,
        output_sink: Sink::default(),
        trace_sink: Sink::default(),
        dsig: DSIG_X86_64,
        spawned: matches!(hello.claim, Claim::Spawned { .. }),
        tracer_settings: None,
        past: Default::default(),
        restart_info: None,
        handoff: None,
    });
    let (frame_sender, frame_receiver) = channel::<FrameWithFds>();
    let is_same_host = state.is_same_host;
    let task_conn = state.tasks.entry(tid).or_default();
    frame_sender
        .send((encode_control(&welcome).expect("small"), Vec::new()))
        .expect("just made");
    for queued_frame in std::mem::take(&mut task_conn.queued_frames) {
        let frame_with_fds = match queued_frame {
            QueuedFrame::Frame(frame_with_fds) => frame_with_fds,
            QueuedFrame::Route {
                sender: sender_tid,
                message: route_message,
            } => (
                encode_route_frame(sender_tid, is_same_host, route_message),
                Vec::new(),
            ),
        };
        frame_sender.send(frame_with_fds).expect("just made");
    }
    task_conn.is_quiescing = false;
    task_conn.frame_sender = Some(frame_sender);
    task_conn.stream = Some(stream.try_clone().expect("a descriptor"));
    thread::spawn(move || {
        for (bytes, descriptors) in frame_receiver {
            let raw_fds: Vec<RawFd> = descriptors.iter().map(|fd| fd.as_raw_fd()).collect();
            let control_messages = [ControlMessage::ScmRights(&raw_fds)];
            let control_messages = if raw_fds.is_empty() {
                &[][..]
            } else {
                &control_messages[..]
            };
            let slices = [IoSlice::new(&bytes)];
            let Ok(n) = sendmsg::<()>(
                write_stream.as_raw_fd(),
                &slices,
                control_messages,
                MsgFlags::MSG_NOSIGNAL,
                None,
            ) else {
                return;
            };
            if write_stream.write_all(&bytes[n..]).is_err() {
                return;
            }
        }
    });
    Some(tid)
}

fn handle_frame(
    shared_state: &SharedFakeState,
    tid: Tid,
    frame: Frame,
    received_fds: &mut PendingFds,
) {
    let mut state = shared_state.state.lock().expect("no panic under the lock");
    if frame.kind == FrameKind::Link {
        let link_frame = frame.decode_link().expect("a link frame");
        assert_eq!(link_frame.src, tid, "a task speaks for itself");
        let drops_frames = state.drops_link_frames;
        return match state.tasks.get_mut(&link_frame.dst) {
            Some(task_conn) if !task_conn.is_closed && !drops_frames => {
                task_conn.send(encode_frame(FrameKind::Link, &[&frame.body]))
            }
            Some(task_conn) if !task_conn.is_closed => {}
            _ => {
                let end_notice = ToTask::PeerGone {
                    tid: link_frame.dst,
                };
                state
                    .tasks
                    .get_mut(&tid)
                    .expect("seated")
                    .send(encode_control(&end_notice).expect("small"));
            }
        };
    }
    let control_message: ToDaemon = frame.decode_control().expect("a control frame");
    if let ToDaemon::Request {
        id,
        request: task_request,
    } = &control_message
    {
        let reply = match (&state.responder, task_request) {
            (_, Request::Exit { .. } | Request::AnnounceExit) => Some(Reply::Done),
            (Some(responder), task_request) => responder(tid, task_request),
            (None, _) => None,
        };
        if let Some(reply) = reply {
            let reply = encode_control(&ToTask::Reply { id: *id, reply }).expect("small");
            state.tasks.get_mut(&tid).expect("seated").send(reply);
        }
    }
    if let ToDaemon::Route {
        receiver,
        message: route_message,
    } = &control_message
    {
        let MessageFds::All(descriptors) = received_fds.take_message_fds(route_message.fd_count())
        else {
            panic!("a word without its descriptors")
        };
        forward_route_message(
            &mut state,
            tid,
            *receiver,
            route_message.clone(),
            descriptors,
        );
    }
    state.control_log.push((tid, control_message));
}

fn encode_route_frame(sender: Tid, is_same_host: bool, route_message: RouteMsg) -> Bytes {
    encode_control(&ToTask::Route {
        sender,
        same_host: is_same_host,
        message: route_message,
    })
    .expect("small")
}

/// Forwards a route message. A message with descriptors is forwarded only to a connected task on
/// the same host. Otherwise the sender receives a refusal or a migration notice; a pool offer is
/// dropped without an answer.
fn forward_route_message(
    state: &mut FakeState,
    sender: Tid,
    receiver: Tid,
    mut message: RouteMsg,
    descriptors: Vec<OwnedFd>,
) {
    let is_same_host = state.is_same_host;
    if let Some(recorded_messages) = &mut state.recorded_messages {
        let fd_copies = descriptors
            .iter()
            .map(|fd| fd.try_clone().expect("a descriptor"))
            .collect();
        recorded_messages.push((sender, receiver, message.clone(), fd_copies));
    }
    if let (RouteMsg::DirectOffer { addresses, .. }, Some(rewrite)) =
        (&mut message, &state.address_rewrite)
    {
        addresses
            .iter_mut()
            .for_each(|address| *address = rewrite(*address));
    }
    if message.fd_count() > 0
        && !(is_same_host
            && state
                .tasks
                .get(&receiver)
                .is_some_and(FakeTaskConn::is_receiving))
    {
        let refusal = match message {
            RouteMsg::RingOffer { id, .. } => {
                encode_route_frame(receiver, false, RouteMsg::RingRefuse { id })
            }
            RouteMsg::PoolOffer { .. } => return,
            _ => encode_control(&ToTask::PeerMigrated { tid: receiver }).expect("small"),
        };
        return state
            .tasks
            .get_mut(&sender)
            .into_iter()
            .for_each(|task_conn| task_conn.send(refusal.clone()));
    }
    let Some(task_conn) = state
        .tasks
        .get_mut(&receiver)
        .filter(|task_conn| !task_conn.is_closed)
    else {
        return;
    };
    if task_conn.is_receiving() {
        task_conn.send_with_descriptors(
            encode_route_frame(sender, is_same_host, message),
            descriptors,
        );
    } else {
        task_conn
            .queued_frames
            .push(QueuedFrame::Route { sender, message });
    }
}
