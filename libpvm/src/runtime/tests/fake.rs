//! Minimal daemon for tests: enrolls tasks, forwards link frames, queues frames for a migrating
//! task, and logs all other frames.

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
type OutFrame = (Bytes, Vec<OwnedFd>);
/// Recorded route message: sender, receiver, message, and copies of its descriptors.
pub(super) type RecordedMessage = (Tid, Tid, RouteMsg, Vec<OwnedFd>);
type Responder = Box<dyn Fn(Tid, &Request) -> Option<Reply> + Send>;
type AddressRewrite = Box<dyn Fn(SocketAddr) -> SocketAddr + Send>;

/// Frame for a task that has no connection.
enum QueuedFrame {
    Frame(OutFrame),
    /// Route message. When the task reconnects, the fake daemon adds whether both tasks are on the
    /// same host.
    Route {
        from: Tid,
        message: RouteMsg,
    },
}

/// State of one task at the daemon.
#[derive(Default)]
pub(super) struct TaskConn {
    stream: Option<UnixStream>,
    frame_sender: Option<Sender<OutFrame>>,
    queued: Vec<QueuedFrame>,
    /// True after a quiesce request: frames for the task are queued.
    is_quiescing: bool,
    stalled: bool,
    pub(super) closed: bool,
}

impl TaskConn {
    fn send(&mut self, bytes: Bytes) {
        self.send_with_descriptors(bytes, Vec::new());
    }

    fn send_with_descriptors(&mut self, bytes: Bytes, descriptors: Vec<OwnedFd>) {
        match &self.frame_sender {
            // A broken connection loses frames; only its task is affected.
            Some(out) if !self.is_quiescing => drop(out.send((bytes, descriptors))),
            _ if self.closed => {}
            _ => self.queued.push(QueuedFrame::Frame((bytes, descriptors))),
        }
    }

    fn is_receiving(&self) -> bool {
        self.frame_sender.is_some() && !self.is_quiescing && !self.closed
    }
}

#[derive(Default)]
pub(super) struct FakeState {
    pub(super) tasks: HashMap<Tid, TaskConn>,
    /// All control frames, in order of arrival.
    pub(super) control_log: Vec<(Tid, ToDaemon)>,
    pub(super) hellos: Vec<Hello>,
    pub(super) rm: Option<RmInfo>,
    pub(super) refusal_reason: Option<String>,
    /// If true, the fake daemon drops link frames.
    pub(super) drops_link_frames: bool,
    /// The tasks count as being on the same host and may have rings. Otherwise their offers are
    /// refused.
    pub(super) same_host: bool,
    /// Recorded route messages, if recording is enabled.
    pub(super) recorded: Option<Vec<RecordedMessage>>,
    /// Rewrites the addresses in offers of direct routes, to insert a proxy.
    pub(super) address_rewrite: Option<AddressRewrite>,
    responder: Option<Responder>,
    last_local: u32,
}

pub(super) struct Shared {
    state: Mutex<FakeState>,
    changed: Condvar,
}

/// The fake daemon. Dropping it closes its connections.
pub(super) struct FakeDaemon {
    pub(super) dir: TempDir,
    shared: Arc<Shared>,
}

impl FakeDaemon {
    pub(super) fn start() -> FakeDaemon {
        let dir = TempDir::new().expect("a directory");
        let listener = UnixListener::bind(dir.path().join("s")).expect("a socket");
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&accepting);
                thread::spawn(move || serve(&shared, stream));
            }
        });
        FakeDaemon { dir, shared }
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    pub(super) fn options(&self) -> EnrollOptions {
        EnrollOptions {
            socket: self.socket(),
            claim: Claim::New,
            program: "test".into(),
            on_daemon_exit: OnDaemonExit::FailCalls,
        }
    }

    pub(super) fn enroll(&self) -> Runtime {
        Runtime::connect(self.options()).expect("welcome")
    }

    pub(super) fn state(&self) -> MutexGuard<'_, FakeState> {
        self.shared.state.lock().expect("no panic under the lock")
    }

    /// Sets the function that answers requests. A request for which the function returns `None`
    /// remains without a reply.
    pub(super) fn set_responder(
        &self,
        answer: impl Fn(Tid, &Request) -> Option<Reply> + Send + 'static,
    ) {
        self.state().responder = Some(Box::new(answer));
    }

    pub(super) fn send_control(&self, tid: Tid, what: ToTask) {
        self.send_raw(tid, encode_control(&what).expect("small"));
    }

    pub(super) fn reply(&self, tid: Tid, id: RequestId, reply: Reply) {
        self.send_control(tid, ToTask::Reply { id, reply });
    }

    pub(super) fn send_raw(&self, tid: Tid, bytes: impl Into<Bytes>) {
        self.state()
            .tasks
            .get_mut(&tid)
            .expect("seated")
            .send(bytes.into());
    }

    /// Waits for a log entry for which `f` returns a value.
    pub(super) fn wait_for_log<R>(&self, what: &str, f: impl Fn(Tid, &ToDaemon) -> Option<R>) -> R {
        wait_until(what, || {
            self.state()
                .control_log
                .iter()
                .find_map(|(tid, said)| f(*tid, said))
        })
    }

    /// Waits for a request and returns its id.
    pub(super) fn wait_for_request(&self, what: &str, f: impl Fn(&Request) -> bool) -> RequestId {
        self.wait_for_log(what, |_, said| match said {
            ToDaemon::Request { id, request: what } if f(what) => Some(*id),
            _ => None,
        })
    }

    /// Stops reading from this task, or resumes it.
    pub(super) fn set_stalled(&self, tid: Tid, stalled: bool) {
        self.state().tasks.get_mut(&tid).expect("seated").stalled = stalled;
        self.shared.changed.notify_all();
    }

    pub(super) fn token_path(&self, migration: u64) -> PathBuf {
        self.dir.path().join(format!("resume-{migration}"))
    }

    /// Sends a quiesce request to a task. After this call, frames for the task are queued.
    pub(super) fn quiesce(&self, tid: Tid, migration: u64) {
        let tokens = vec![self.dir.path().join("nowhere"), self.token_path(migration)];
        let order = ToTask::Quiesce {
            migration: MigrationId(migration),
            tokens,
        };
        let mut net = self.state();
        let seat = net.tasks.get_mut(&tid).expect("seated");
        seat.send(encode_control(&order).expect("small"));
        seat.is_quiescing = true;
    }

    pub(super) fn wait_quiesced(&self, tid: Tid, migration: u64) {
        self.wait_for_log("letting go", |who, said| {
            let wanted = MigrationId(migration);
            matches!(said, ToDaemon::Quiesced { migration, .. } if who == tid && *migration == wanted).then_some(())
        });
        wait_until("the closed socket", || {
            self.state().tasks[&tid].stream.is_none().then_some(())
        });
    }

    /// Writes the token file, so that the quiesced task reconnects to this daemon.
    pub(super) fn resume(&self, migration: u64) {
        self.write_token(migration, MigrationId(migration), self.socket());
    }

    pub(super) fn write_token(&self, file: u64, migration: MigrationId, socket: PathBuf) {
        let token = to_bytes(&ResumeToken { migration, socket }).expect("small");
        let temporary = self.dir.path().join("token.new");
        std::fs::write(&temporary, token).expect("written");
        std::fs::rename(temporary, self.token_path(file)).expect("renamed");
    }

    /// Closes the connection to a task, as if the daemon had died.
    pub(super) fn disconnect(&self, tid: Tid) {
        let net = self.state();
        let stream = net.tasks[&tid].stream.as_ref().expect("connected");
        stream.shutdown(Shutdown::Both).expect("was open");
    }

    pub(super) fn is_closed(&self, tid: Tid) -> bool {
        self.state().tasks[&tid].closed
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        let net = self
            .shared
            .state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        for stream in net.tasks.values().filter_map(|seat| seat.stream.as_ref()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn read_frame(
    stream: &UnixStream,
    decoder: &mut FrameDecoder,
    passed: &mut PendingFds,
) -> Option<Frame> {
    loop {
        if let Some(frame) = decoder.next_frame().expect("the library speaks in frames") {
            return Some(frame);
        }
        decoder.buffer_mut().reserve(64 << 10);
        match receive(stream, decoder.buffer_mut(), passed, MsgFlags::empty()) {
            Ok(received) if received.bytes > 0 => {}
            _ => return None,
        }
    }
}

fn serve(shared: &Shared, stream: UnixStream) {
    let (mut decoder, mut passed) = (FrameDecoder::new(), PendingFds::default());
    let Some(first) = read_frame(&stream, &mut decoder, &mut passed) else {
        return;
    };
    let Ok(ToDaemon::Hello(hello)) = first.decode_control::<ToDaemon>() else {
        panic!("the first frame is a hello")
    };
    let Some(tid) = enroll_task(shared, &hello, &stream) else {
        return;
    };
    loop {
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut net = shared.state.lock().expect("no panic under the lock");
        while net.tasks[&tid].stalled && Instant::now() < deadline {
            net = shared
                .changed
                .wait_timeout(net, TEST_TIMEOUT)
                .expect("no panic under the lock")
                .0;
        }
        drop(net);
        let Some(frame) = read_frame(&stream, &mut decoder, &mut passed) else {
            break;
        };
        handle_frame(shared, tid, frame, &mut passed);
    }
    let mut net = shared.state.lock().expect("no panic under the lock");
    let seat = net.tasks.get_mut(&tid).expect("seated");
    (seat.stream, seat.frame_sender) = (None, None);
    seat.closed = !seat.is_quiescing;
}

/// Answers a hello; `None` if the task was refused.
fn enroll_task(shared: &Shared, hello: &Hello, stream: &UnixStream) -> Option<Tid> {
    let mut writing = stream.try_clone().expect("a descriptor");
    let mut net = shared.state.lock().expect("no panic under the lock");
    net.hellos.push(hello.clone());
    if let Some(reason) = net.refusal_reason.clone() {
        writing
            .write_all(&encode_control(&ToTask::Refused { reason }).expect("small"))
            .expect("written");
        return None;
    }
    let tid = match hello.claim {
        Claim::Resume { tid, .. } => tid,
        _ => {
            net.last_local += 1;
            Tid::task(HostId::MASTER, net.last_local).expect("few tasks")
        }
    };
    let welcome = ToTask::Welcome(Welcome {
        tid,
        parent: Tid::NONE,
        host: HostId::MASTER,
        addresses: vec![Ipv4Addr::LOCALHOST.into()],
        rm: net.rm,
        output: Sink::default(),
        trace: Sink::default(),
        dsig: DSIG_X86_64,
        spawned: matches!(hello.claim, Claim::Spawned { .. }),
        tracer: None,
        restart: None,
        handoff: None,
    });
    let (out, queue) = channel::<OutFrame>();
    let near = net.same_host;
    let seat = net.tasks.entry(tid).or_default();
    out.send((encode_control(&welcome).expect("small"), Vec::new()))
        .expect("just made");
    for held in std::mem::take(&mut seat.queued) {
        let parcel = match held {
            QueuedFrame::Frame(parcel) => parcel,
            QueuedFrame::Route {
                from,
                message: word,
            } => (route_frame(from, near, word), Vec::new()),
        };
        out.send(parcel).expect("just made");
    }
    seat.is_quiescing = false;
    seat.frame_sender = Some(out);
    seat.stream = Some(stream.try_clone().expect("a descriptor"));
    thread::spawn(move || {
        for (bytes, descriptors) in queue {
            let numbers: Vec<RawFd> = descriptors.iter().map(|fd| fd.as_raw_fd()).collect();
            let rights = [ControlMessage::ScmRights(&numbers)];
            let rights = if numbers.is_empty() {
                &[][..]
            } else {
                &rights[..]
            };
            let first = [IoSlice::new(&bytes)];
            let Ok(n) = sendmsg::<()>(
                writing.as_raw_fd(),
                &first,
                rights,
                MsgFlags::MSG_NOSIGNAL,
                None,
            ) else {
                return;
            };
            if writing.write_all(&bytes[n..]).is_err() {
                return;
            }
        }
    });
    Some(tid)
}

fn handle_frame(shared: &Shared, tid: Tid, frame: Frame, passed: &mut PendingFds) {
    let mut net = shared.state.lock().expect("no panic under the lock");
    if frame.kind == FrameKind::Link {
        let link = frame.decode_link().expect("a link frame");
        assert_eq!(link.src, tid, "a task speaks for itself");
        let lossy = net.drops_link_frames;
        return match net.tasks.get_mut(&link.dst) {
            Some(seat) if !seat.closed && !lossy => {
                seat.send(encode_frame(FrameKind::Link, &[&frame.body]))
            }
            Some(seat) if !seat.closed => {}
            _ => {
                let gone = ToTask::PeerGone { tid: link.dst };
                net.tasks
                    .get_mut(&tid)
                    .expect("seated")
                    .send(encode_control(&gone).expect("small"));
            }
        };
    }
    let said: ToDaemon = frame.decode_control().expect("a control frame");
    if let ToDaemon::Request { id, request: what } = &said {
        let reply = match (&net.responder, what) {
            (_, Request::Exit { .. } | Request::AboutToExit) => Some(Reply::Done),
            (Some(answer), what) => answer(tid, what),
            (None, _) => None,
        };
        if let Some(reply) = reply {
            let reply = encode_control(&ToTask::Reply { id: *id, reply }).expect("small");
            net.tasks.get_mut(&tid).expect("seated").send(reply);
        }
    }
    if let ToDaemon::Route { to, message: word } = &said {
        let MessageFds::All(descriptors) = passed.take(word.fd_count()) else {
            panic!("a word without its descriptors")
        };
        forward_route_message(&mut net, tid, *to, word.clone(), descriptors);
    }
    net.control_log.push((tid, said));
}

fn route_frame(from: Tid, near: bool, word: RouteMsg) -> Bytes {
    encode_control(&ToTask::Route {
        from,
        same_host: near,
        message: word,
    })
    .expect("small")
}

/// Forwards a route message. A message with descriptors is forwarded only to a connected task on
/// the same host. Otherwise its sender receives a refusal, a migration notice, or nothing.
fn forward_route_message(
    net: &mut FakeState,
    from: Tid,
    to: Tid,
    mut message: RouteMsg,
    descriptors: Vec<OwnedFd>,
) {
    let near = net.same_host;
    if let Some(recorded) = &mut net.recorded {
        let copies = descriptors
            .iter()
            .map(|fd| fd.try_clone().expect("a descriptor"))
            .collect();
        recorded.push((from, to, message.clone(), copies));
    }
    if let (RouteMsg::DirectOffer { addresses, .. }, Some(detour)) =
        (&mut message, &net.address_rewrite)
    {
        addresses
            .iter_mut()
            .for_each(|address| *address = detour(*address));
    }
    if message.fd_count() > 0 && !(near && net.tasks.get(&to).is_some_and(TaskConn::is_receiving)) {
        let nothing = match message {
            RouteMsg::RingOffer { id, .. } => route_frame(to, false, RouteMsg::RingRefuse { id }),
            RouteMsg::PoolOffer { .. } => return,
            _ => encode_control(&ToTask::PeerMigrated { tid: to }).expect("small"),
        };
        return net
            .tasks
            .get_mut(&from)
            .into_iter()
            .for_each(|seat| seat.send(nothing.clone()));
    }
    let Some(seat) = net.tasks.get_mut(&to).filter(|seat| !seat.closed) else {
        return;
    };
    if seat.is_receiving() {
        seat.send_with_descriptors(route_frame(from, near, message), descriptors);
    } else {
        seat.queued.push(QueuedFrame::Route { from, message });
    }
}
