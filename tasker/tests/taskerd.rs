//! The tasker service: which user gets which tasker, and what users cannot do to it.
#![allow(unsafe_code)] // A thread that connects as another user.

mod common;

use common::{WAIT_TIMEOUT, is_alive, shell_path, start_order, tid, wait_until};
use sempa_proto::frame::{FrameDecoder, encode_control};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::tasker_service::{
    BODY_BYTES_MAX, HEAD_BYTES, MAGIC, PROTOCOL_VERSION, ServiceRefusal, ServiceReply,
    ServiceRequest, SessionId, decode, encode,
};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Two ordinary users with accounts on every machine.
const NOBODY: u32 = 65_534;
const DAEMON: u32 = 1;
/// Number of taskers that a user may have at a time.
const SESSIONS_OF_USER_MAX: usize = 16;

/// A running service with its socket in a directory of its own.
struct Service {
    child: Child,
    dir: tempfile::TempDir,
}

impl Service {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(
            dir.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .expect("permissions");
        let service = Self {
            child: Self::spawn(dir.path()),
            dir,
        };
        wait_until("the service listens", || {
            UnixStream::connect(service.socket_path()).is_ok()
        });
        service
    }

    fn spawn(dir: &Path) -> Child {
        Command::new(env!("CARGO_BIN_EXE_pvm-taskerd"))
            .arg("--socket")
            .arg(dir.join("socket"))
            .arg("--sessions")
            .arg(dir.join("sessions"))
            .stdin(Stdio::null())
            .spawn()
            .expect("the service starts")
    }

    fn socket_path(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Connects as the user `uid`.
    fn connect(&self, uid: u32) -> UnixStream {
        let path = self.socket_path();
        let connect = move || {
            // SAFETY: the call takes numbers only, and changes this thread alone. The thread ends
            // with the function.
            let result = unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) };
            assert_eq!(result, 0, "the tests run as root");
            UnixStream::connect(path).expect("the service accepts")
        };
        let stream = std::thread::spawn(connect).join().expect("no panic");
        stream
            .set_read_timeout(Some(WAIT_TIMEOUT))
            .expect("a time limit");
        stream
    }

    /// Sends a request as the user `uid`. Returns the reply, and the connection.
    fn request(&self, uid: u32, request: &ServiceRequest) -> (ServiceReply, UnixStream) {
        let mut stream = self.connect(uid);
        stream.write_all(&encode(request)).expect("it reads");
        (read_reply(&mut stream).expect("a reply"), stream)
    }

    /// Starts a tasker for the user `uid`.
    fn start_session(&self, uid: u32) -> Session {
        match self.request(uid, &start_request()) {
            (ServiceReply::Started { session }, stream) => Session {
                id: session,
                stream,
                decoder: FrameDecoder::new(),
            },
            (other, _) => panic!("{other:?}"),
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A tasker that the service has started.
struct Session {
    id: SessionId,
    stream: UnixStream,
    decoder: FrameDecoder,
}

impl Session {
    fn send(&mut self, order: &ToTasker) {
        let frame = encode_control(order).expect("an order fits");
        self.stream.write_all(&frame).expect("it reads");
    }

    /// Waits for a message for which `pick` returns a value.
    fn wait_for<T>(&mut self, pick: impl Fn(&FromTasker) -> Option<T>) -> T {
        loop {
            while let Some(frame) = self.decoder.next_frame().expect("frames") {
                let message: FromTasker = frame.decode_control().expect("a message");
                if let Some(value) = pick(&message) {
                    return value;
                }
            }
            let mut bytes = [0; 4096];
            let count = self.stream.read(&mut bytes).expect("the tasker answers");
            assert!(count > 0, "the tasker has ended");
            self.decoder.push(&bytes[..count]);
        }
    }
}

fn start_request() -> ServiceRequest {
    ServiceRequest::Start {
        protocol: PROTOCOL_VERSION,
        version: "test".into(),
    }
}

/// Reads a reply, and not a byte more; `None` at the end of the stream.
fn read_reply(stream: &mut UnixStream) -> Option<ServiceReply> {
    let mut bytes = Vec::new();
    loop {
        if let Some((reply, _)) = decode(&bytes).expect("a reply") {
            return Some(reply);
        }
        let mut byte = [0];
        match stream.read(&mut byte) {
            Ok(1) => bytes.push(byte[0]),
            _ => return None,
        }
    }
}

/// The tasks of a user belong to this user, whatever the daemon says. They end with the connection.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn each_user_gets_a_tasker_for_own_tasks() {
    let service = Service::start();
    for uid in [NOBODY, DAEMON] {
        let mut session = service.start_session(uid);
        session.wait_for(|message| matches!(message, FromTasker::Ready(_)).then_some(()));
        let script = "id -ru; exec sleep 60";
        session.send(&ToTasker::Start(start_order(
            tid(1),
            &shell_path(),
            &["-c", script],
        )));
        let pid = session.wait_for(|message| match message {
            FromTasker::Started { pid, .. } => Some(*pid),
            FromTasker::StartFailed { reason, .. } => panic!("{reason}"),
            _ => None,
        });
        let output = session.wait_for(|message| match message {
            FromTasker::Output { bytes, .. } => Some(bytes.clone()),
            _ => None,
        });
        assert_eq!(String::from_utf8_lossy(&output).trim(), uid.to_string());
        let id = session.id;
        drop(session);
        wait_until("the task and the tasker have ended", || {
            !is_alive(pid) && !is_alive(id.0)
        });
    }
}

/// A daemon of another version gets a sentence that names both versions.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn other_version_is_refused() {
    let service = Service::start();
    let request = ServiceRequest::Start {
        protocol: PROTOCOL_VERSION + 1,
        version: "9.8.7".into(),
    };
    match service.request(NOBODY, &request).0 {
        ServiceReply::Refused(refusal @ ServiceRefusal::OtherVersion { .. }) => {
            let text = refusal.to_string();
            assert!(
                text.contains("9.8.7") && text.contains("protocol 1"),
                "{text}"
            );
        }
        other => panic!("{other:?}"),
    }
}

/// Garbage, messages that are too long, and silence of one user neither stop the service nor keep
/// another user waiting.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn flood_of_one_user_does_not_reach_others() {
    let service = Service::start();
    let oversized = [&MAGIC[..], &u16::MAX.to_le_bytes()].concat();
    let garbage = [
        vec![0; 1],
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        oversized,
        [&MAGIC[..], &[3, 0, 200, 200, 200]].concat(),
        vec![0x5a; 4 * (HEAD_BYTES + BODY_BYTES_MAX)],
        [encode(&start_request()), b"more".to_vec()].concat(),
    ];
    for bytes in &garbage {
        let mut stream = service.connect(NOBODY);
        // The service may close the connection before all bytes are written.
        let _ = stream.write_all(bytes);
        let reply = read_reply(&mut stream);
        let refusal = ServiceReply::Refused(ServiceRefusal::Malformed);
        assert!(reply.is_none() || reply == Some(refusal), "{reply:?}");
    }
    let silent: Vec<UnixStream> = (0..500).map(|_| service.connect(NOBODY)).collect();
    let session = service.start_session(DAEMON);
    assert!(is_alive(session.id.0));
    drop(silent);
}

/// A user has a limited number of taskers, and their end makes room.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn user_has_few_taskers() {
    let service = Service::start();
    let sessions: Vec<Session> = (0..SESSIONS_OF_USER_MAX)
        .map(|_| service.start_session(NOBODY))
        .collect();
    let expected = ServiceReply::Refused(ServiceRefusal::TooManyOfUser(SESSIONS_OF_USER_MAX));
    assert_eq!(service.request(NOBODY, &start_request()).0, expected);
    let other = service.start_session(DAEMON);
    let ids: Vec<SessionId> = sessions.iter().map(|session| session.id).collect();
    drop(sessions);
    wait_until("the taskers have ended", || {
        ids.iter().all(|id| !is_alive(id.0))
    });
    drop(service.start_session(NOBODY));
    assert!(is_alive(other.id.0));
}

/// Only root and its user may have a tasker killed, also after a restart of the service. No other
/// process is killed.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn tasker_is_killed_for_its_user_only() {
    let mut service = Service::start();
    let kill =
        |service: &Service, uid, session| service.request(uid, &ServiceRequest::Kill { session }).0;
    let refusal = ServiceReply::Refused(ServiceRefusal::NoSuchSession);
    let first = service.start_session(NOBODY);
    let second = service.start_session(NOBODY);
    let own_pid = SessionId(std::process::id().cast_signed());
    let service_pid = SessionId(service.child.id().cast_signed());
    for session in [
        first.id,
        own_pid,
        service_pid,
        SessionId(1),
        SessionId(-1),
        SessionId(0),
    ] {
        assert_eq!(kill(&service, DAEMON, session), refusal, "{session:?}");
    }
    assert_eq!(kill(&service, NOBODY, own_pid), refusal);
    assert!(is_alive(first.id.0) && is_alive(second.id.0));
    assert_eq!(kill(&service, NOBODY, first.id), ServiceReply::Killed);
    wait_until("it has ended", || !is_alive(first.id.0));
    // A new service knows the taskers of the previous one.
    service.child.kill().expect("it runs");
    service.child.wait().expect("it ends");
    service.child = Service::spawn(service.dir.path());
    wait_until("the service listens", || {
        UnixStream::connect(service.socket_path()).is_ok()
    });
    assert!(is_alive(second.id.0), "it outlives the service");
    assert_eq!(kill(&service, DAEMON, second.id), refusal);
    assert_eq!(kill(&service, 0, second.id), ServiceReply::Killed);
    wait_until("it has ended", || !is_alive(second.id.0));
}
