//! Minimal daemon for tests: enrolls tasks, forwards link frames, queues frames for a migrating
//! task, and logs all other frames.

use super::{PATIENCE, until};
use crate::runtime::{EnrollOptions, Runtime};
use bytes::Bytes;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use sempa_proto::frame::{Frame, FrameDecoder, FrameKind, encode, encode_control, to_bytes};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::route::RouteWord;
use sempa_proto::task::{
    AtEnd, Claim, Hello, Reply, Request, ResumeToken, RmInfo, Sink, ToDaemon, ToTask, Welcome,
};
use sempa_proto::{HostId, MigrationId, RequestId, Tid};
use sempa_socket::{Passed, Taken, receive};
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
type Parcel = (Bytes, Vec<OwnedFd>);
/// Recorded route message: sender, receiver, message, and copies of its descriptors.
pub(super) type Kept = (Tid, Tid, RouteWord, Vec<OwnedFd>);
type Answer = Box<dyn Fn(Tid, &Request) -> Option<Reply> + Send>;
type Detour = Box<dyn Fn(SocketAddr) -> SocketAddr + Send>;

/// Frame for a task that has no connection.
enum Held {
    Parcel(Parcel),
    /// Whether both tasks are on the same host is decided when the task returns.
    Route {
        from: Tid,
        word: RouteWord,
    },
}

/// State of one task at the daemon.
#[derive(Default)]
pub(super) struct Seat {
    stream: Option<UnixStream>,
    out: Option<Sender<Parcel>>,
    held: Vec<Held>,
    /// A quiesce request was sent: all frames are queued.
    holding: bool,
    stalled: bool,
    pub(super) closed: bool,
}

impl Seat {
    fn give(&mut self, bytes: Bytes) {
        self.give_with(bytes, Vec::new());
    }

    fn give_with(&mut self, bytes: Bytes, descriptors: Vec<OwnedFd>) {
        match &self.out {
            // A broken connection loses frames; only its task is affected.
            Some(out) if !self.holding => drop(out.send((bytes, descriptors))),
            _ if self.closed => {}
            _ => self.held.push(Held::Parcel((bytes, descriptors))),
        }
    }

    fn listens(&self) -> bool {
        self.out.is_some() && !self.holding && !self.closed
    }
}

#[derive(Default)]
pub(super) struct Net {
    pub(super) seats: HashMap<Tid, Seat>,
    /// All control frames, in order of arrival.
    pub(super) log: Vec<(Tid, ToDaemon)>,
    pub(super) hellos: Vec<Hello>,
    pub(super) rm: Option<RmInfo>,
    pub(super) refuse: Option<String>,
    /// Link frames are dropped.
    pub(super) lossy: bool,
    /// The tasks count as being on the same host and may have rings. Otherwise their offers are
    /// refused.
    pub(super) near: bool,
    /// Recorded route messages, if recording is enabled.
    pub(super) kept: Option<Vec<Kept>>,
    /// Rewrites the addresses in offers of direct routes, to insert a proxy.
    pub(super) detour: Option<Detour>,
    answer: Option<Answer>,
    locals: u32,
}

pub(super) struct Shared {
    net: Mutex<Net>,
    changed: Condvar,
}

/// The fake daemon. Dropping it closes its connections.
pub(super) struct Fake {
    pub(super) dir: TempDir,
    shared: Arc<Shared>,
}

impl Fake {
    pub(super) fn start() -> Fake {
        let dir = TempDir::new().expect("a directory");
        let listener = UnixListener::bind(dir.path().join("s")).expect("a socket");
        let shared = Arc::new(Shared {
            net: Mutex::default(),
            changed: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&accepting);
                thread::spawn(move || serve(&shared, stream));
            }
        });
        Fake { dir, shared }
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    pub(super) fn options(&self) -> EnrollOptions {
        EnrollOptions {
            socket: self.socket(),
            claim: Claim::New,
            program: "test".into(),
            at_end: AtEnd::Told,
        }
    }

    pub(super) fn join(&self) -> Runtime {
        Runtime::connect(self.options()).expect("welcome")
    }

    pub(super) fn net(&self) -> MutexGuard<'_, Net> {
        self.shared.net.lock().expect("no panic under the lock")
    }

    /// Sets the function that answers requests; those for which it returns `None` stay open.
    pub(super) fn answer(&self, answer: impl Fn(Tid, &Request) -> Option<Reply> + Send + 'static) {
        self.net().answer = Some(Box::new(answer));
    }

    pub(super) fn tell(&self, tid: Tid, what: ToTask) {
        self.raw(tid, encode_control(&what).expect("small"));
    }

    pub(super) fn reply(&self, tid: Tid, id: RequestId, reply: Reply) {
        self.tell(tid, ToTask::Reply { id, reply });
    }

    pub(super) fn raw(&self, tid: Tid, bytes: impl Into<Bytes>) {
        self.net()
            .seats
            .get_mut(&tid)
            .expect("seated")
            .give(bytes.into());
    }

    /// Waits for a log entry for which `f` returns a value.
    pub(super) fn logged<R>(&self, what: &str, f: impl Fn(Tid, &ToDaemon) -> Option<R>) -> R {
        until(what, || {
            self.net().log.iter().find_map(|(tid, said)| f(*tid, said))
        })
    }

    /// Waits for a request and returns its id.
    pub(super) fn asked(&self, what: &str, f: impl Fn(&Request) -> bool) -> RequestId {
        self.logged(what, |_, said| match said {
            ToDaemon::Request { id, what } if f(what) => Some(*id),
            _ => None,
        })
    }

    /// Stops or resumes reading from this task.
    pub(super) fn stall(&self, tid: Tid, stalled: bool) {
        self.net().seats.get_mut(&tid).expect("seated").stalled = stalled;
        self.shared.changed.notify_all();
    }

    pub(super) fn token(&self, migration: u64) -> PathBuf {
        self.dir.path().join(format!("resume-{migration}"))
    }

    /// Sends a quiesce request to a task; from here on frames for it are queued.
    pub(super) fn quiesce(&self, tid: Tid, migration: u64) {
        let tokens = vec![self.dir.path().join("nowhere"), self.token(migration)];
        let order = ToTask::Quiesce {
            migration: MigrationId(migration),
            tokens,
        };
        let mut net = self.net();
        let seat = net.seats.get_mut(&tid).expect("seated");
        seat.give(encode_control(&order).expect("small"));
        seat.holding = true;
    }

    /// Waits until the task has quiesced.
    pub(super) fn has_let_go(&self, tid: Tid, migration: u64) {
        self.logged("letting go", |who, said| {
            let wanted = MigrationId(migration);
            matches!(said, ToDaemon::Quiesced { migration, .. } if who == tid && *migration == wanted).then_some(())
        });
        until("the closed socket", || {
            self.net().seats[&tid].stream.is_none().then_some(())
        });
    }

    /// Writes the token file, so that the quiesced task reconnects to this daemon.
    pub(super) fn wake(&self, migration: u64) {
        self.wake_with(migration, MigrationId(migration), self.socket());
    }

    pub(super) fn wake_with(&self, file: u64, migration: MigrationId, socket: PathBuf) {
        let token = to_bytes(&ResumeToken { migration, socket }).expect("small");
        let temporary = self.dir.path().join("token.new");
        std::fs::write(&temporary, token).expect("written");
        std::fs::rename(temporary, self.token(file)).expect("renamed");
    }

    /// Closes the connection to a task, as if the daemon had died.
    pub(super) fn hang_up(&self, tid: Tid) {
        let net = self.net();
        let stream = net.seats[&tid].stream.as_ref().expect("connected");
        stream.shutdown(Shutdown::Both).expect("was open");
    }

    pub(super) fn is_closed(&self, tid: Tid) -> bool {
        self.net().seats[&tid].closed
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let net = self
            .shared
            .net
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        for stream in net.seats.values().filter_map(|seat| seat.stream.as_ref()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn read_frame(
    stream: &UnixStream,
    decoder: &mut FrameDecoder,
    passed: &mut Passed,
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
    let (mut decoder, mut passed) = (FrameDecoder::new(), Passed::default());
    let Some(first) = read_frame(&stream, &mut decoder, &mut passed) else {
        return;
    };
    let Ok(ToDaemon::Hello(hello)) = first.control::<ToDaemon>() else {
        panic!("the first frame is a hello")
    };
    let Some(tid) = seat(shared, &hello, &stream) else {
        return;
    };
    loop {
        let deadline = Instant::now() + PATIENCE;
        let mut net = shared.net.lock().expect("no panic under the lock");
        while net.seats[&tid].stalled && Instant::now() < deadline {
            net = shared
                .changed
                .wait_timeout(net, PATIENCE)
                .expect("no panic under the lock")
                .0;
        }
        drop(net);
        let Some(frame) = read_frame(&stream, &mut decoder, &mut passed) else {
            break;
        };
        take(shared, tid, frame, &mut passed);
    }
    let mut net = shared.net.lock().expect("no panic under the lock");
    let seat = net.seats.get_mut(&tid).expect("seated");
    (seat.stream, seat.out) = (None, None);
    seat.closed = !seat.holding;
}

/// Answers a hello; `None` if the task was refused.
fn seat(shared: &Shared, hello: &Hello, stream: &UnixStream) -> Option<Tid> {
    let mut writing = stream.try_clone().expect("a descriptor");
    let mut net = shared.net.lock().expect("no panic under the lock");
    net.hellos.push(hello.clone());
    if let Some(reason) = net.refuse.clone() {
        writing
            .write_all(&encode_control(&ToTask::Refused { reason }).expect("small"))
            .expect("written");
        return None;
    }
    let tid = match hello.claim {
        Claim::Resume { tid, .. } => tid,
        _ => {
            net.locals += 1;
            Tid::task(HostId::MASTER, net.locals).expect("few tasks")
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
        successor: None,
    });
    let (out, queue) = channel::<Parcel>();
    let near = net.near;
    let seat = net.seats.entry(tid).or_default();
    out.send((encode_control(&welcome).expect("small"), Vec::new()))
        .expect("just made");
    for held in std::mem::take(&mut seat.held) {
        let parcel = match held {
            Held::Parcel(parcel) => parcel,
            Held::Route { from, word } => (route_frame(from, near, word), Vec::new()),
        };
        out.send(parcel).expect("just made");
    }
    seat.holding = false;
    seat.out = Some(out);
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

fn take(shared: &Shared, tid: Tid, frame: Frame, passed: &mut Passed) {
    let mut net = shared.net.lock().expect("no panic under the lock");
    if frame.kind == FrameKind::Link {
        let link = frame.link().expect("a link frame");
        assert_eq!(link.src, tid, "a task speaks for itself");
        let lossy = net.lossy;
        return match net.seats.get_mut(&link.dst) {
            Some(seat) if !seat.closed && !lossy => {
                seat.give(encode(FrameKind::Link, &[&frame.body]))
            }
            Some(seat) if !seat.closed => {}
            _ => {
                let gone = ToTask::PeerGone { tid: link.dst };
                net.seats
                    .get_mut(&tid)
                    .expect("seated")
                    .give(encode_control(&gone).expect("small"));
            }
        };
    }
    let said: ToDaemon = frame.control().expect("a control frame");
    if let ToDaemon::Request { id, what } = &said {
        let reply = match (&net.answer, what) {
            (_, Request::Exit { .. } | Request::LastWords) => Some(Reply::Done),
            (Some(answer), what) => answer(tid, what),
            (None, _) => None,
        };
        if let Some(reply) = reply {
            let reply = encode_control(&ToTask::Reply { id: *id, reply }).expect("small");
            net.seats.get_mut(&tid).expect("seated").give(reply);
        }
    }
    if let ToDaemon::Route { to, word } = &said {
        let Taken::All(descriptors) = passed.take(word.descriptors()) else {
            panic!("a word without its descriptors")
        };
        pass_on(&mut net, tid, *to, word.clone(), descriptors);
    }
    net.log.push((tid, said));
}

fn route_frame(from: Tid, near: bool, word: RouteWord) -> Bytes {
    encode_control(&ToTask::Route { from, near, word }).expect("small")
}

/// Forwards a route message. A message with descriptors reaches only a connected task on the same
/// host; otherwise its sender gets a refusal or a migration notice, or nothing.
fn pass_on(net: &mut Net, from: Tid, to: Tid, mut word: RouteWord, descriptors: Vec<OwnedFd>) {
    let near = net.near;
    if let Some(kept) = &mut net.kept {
        let copies = descriptors
            .iter()
            .map(|fd| fd.try_clone().expect("a descriptor"))
            .collect();
        kept.push((from, to, word.clone(), copies));
    }
    if let (RouteWord::DirectOffer { addresses, .. }, Some(detour)) = (&mut word, &net.detour) {
        addresses
            .iter_mut()
            .for_each(|address| *address = detour(*address));
    }
    if word.descriptors() > 0 && !(near && net.seats.get(&to).is_some_and(Seat::listens)) {
        let nothing = match word {
            RouteWord::RingOffer { id, .. } => route_frame(to, false, RouteWord::RingRefuse { id }),
            RouteWord::StoreOffer { .. } => return,
            _ => encode_control(&ToTask::PeerMoved { tid: to }).expect("small"),
        };
        return net
            .seats
            .get_mut(&from)
            .into_iter()
            .for_each(|seat| seat.give(nothing.clone()));
    }
    let Some(seat) = net.seats.get_mut(&to).filter(|seat| !seat.closed) else {
        return;
    };
    if seat.listens() {
        seat.give_with(route_frame(from, near, word), descriptors);
    } else {
        seat.held.push(Held::Route { from, word });
    }
}
