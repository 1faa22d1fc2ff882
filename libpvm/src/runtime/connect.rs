//! Connects to the daemon: finds its socket, sends the hello, and reads the welcome.

use super::process::{ProcessOwned, mark_library_socket};
use crate::error::EnrollError;
use bytes::Bytes;
use nix::sys::socket::{MsgFlags, getsockopt, send, sockopt::PeerCredentials};
use sempa_proto::WIRE_VERSION;
use sempa_proto::frame::{FrameDecoder, encode_control};
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::task::{Claim, Hello, OnDaemonExit, TASK_MAGIC, ToDaemon, ToTask, Welcome};
use sempa_socket::{PendingFds, Received, receive};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Timeout for the daemon's answer to the hello.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// Buffer size for one read of the welcome.
const WELCOME_READ_BYTES: usize = 4096;
/// Maximum length in bytes of the program name in the hello.
const PROGRAM_NAME_BYTES_MAX: usize = 4096;

/// Set when this process image has used its spawn token (`PVMEPID`). A forked child inherits the
/// flag, so it cannot enroll in place of its parent.
static SPAWN_TOKEN_USED: AtomicBool = AtomicBool::new(false);

/// Options of an enrollment: the daemon's socket, and the identity that this process claims.
#[derive(Clone, Debug)]
pub struct EnrollOptions {
    /// Path of the daemon's socket.
    pub socket: PathBuf,
    pub claim: Claim,
    /// Program name that task lists show.
    pub program: String,
    /// What happens to this process when its daemon exits. Applies to processes that no daemon or
    /// tasker has started.
    pub on_daemon_exit: OnDaemonExit,
}

impl EnrollOptions {
    /// Reads the options from the environment. `PVMSOCK`, or else `PVM_TMP` and `PVM_VMID`, select
    /// the socket; `PVMEPID` is the token of a spawned process and is valid once per process image.
    /// The end of the daemon is reported to the program.
    ///
    /// # Errors
    /// [`EnrollError::Root`] for user 0 without `PVM_ALLOW_ROOT`, [`EnrollError::BadEnvironment`]
    /// if the variables give no valid path.
    pub fn from_env() -> Result<EnrollOptions, EnrollError> {
        let uid = nix::unistd::geteuid();
        EnrollOptions::from_vars(
            uid.as_raw(),
            SPAWN_TOKEN_USED.load(Ordering::Relaxed),
            |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()),
        )
    }

    fn from_vars(
        uid: u32,
        token_used: bool,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<EnrollOptions, EnrollError> {
        let non_empty = |name: &str| env(name).filter(|value| !value.is_empty());
        if uid == 0 && env("PVM_ALLOW_ROOT").is_none() {
            return Err(EnrollError::Root);
        }
        let socket = match non_empty("PVMSOCK") {
            Some(path) => PathBuf::from(path),
            None => RuntimePaths::from_env(uid, &env)
                .map_err(EnrollError::BadEnvironment)?
                .daemon_socket(),
        };
        let spawn_token = non_empty("PVMEPID")
            .and_then(|text| text.trim().parse().ok())
            .filter(|spawn_token| *spawn_token > 0 && !token_used);
        let claim = spawn_token.map_or(Claim::New, |spawn_token| Claim::Spawned { spawn_token });
        Ok(EnrollOptions {
            socket,
            claim,
            program: program_name(),
            on_daemon_exit: OnDaemonExit::FailCalls,
        })
    }
}

/// Claims the spawn token; false if it was used before.
pub(crate) fn claim_spawn_token() -> bool {
    !SPAWN_TOKEN_USED.swap(true, Ordering::Relaxed)
}

/// Makes the spawn token usable again, after a daemon that did not answer.
pub(crate) fn release_spawn_token() {
    SPAWN_TOKEN_USED.store(false, Ordering::Relaxed);
}

/// Returns the last component of `argv[0]`.
fn program_name() -> String {
    let argv0 = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&argv0)
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    name.chars().take(PROGRAM_NAME_BYTES_MAX / 4).collect()
}

/// Connection on which the daemon has sent its welcome.
pub(crate) struct AcceptedConnection {
    /// The socket is shared, so that the I/O thread can sleep on it while other threads use it.
    pub(crate) socket: Arc<ProcessOwned<UnixStream>>,
    /// Decoder that contains the bytes that arrived after the welcome.
    pub(crate) decoder: FrameDecoder,
    /// Descriptors that arrived together with the bytes in `decoder`.
    pub(crate) passed: PendingFds,
    pub(crate) welcome: Welcome,
}

/// True if a daemon answers at this socket within `timeout`. A daemon that is exiting may still
/// accept connections, but does not answer. No task is enrolled.
pub fn daemon_answers(path: &Path, timeout: Duration) -> bool {
    let is_no_answer = |error: &EnrollError| {
        matches!(error, EnrollError::Io { .. } | EnrollError::NoDaemon { .. })
    };
    !handshake_with_timeout(timeout, path, Claim::Probe, "", OnDaemonExit::default())
        .is_err_and(|error| is_no_answer(&error))
}

/// Connects to the daemon's socket, sends the hello, and waits for the answer.
pub(crate) fn handshake(
    path: &Path,
    claim: Claim,
    program: &str,
    on_daemon_exit: OnDaemonExit,
) -> Result<AcceptedConnection, EnrollError> {
    handshake_with_timeout(HANDSHAKE_TIMEOUT, path, claim, program, on_daemon_exit)
}

fn handshake_with_timeout(
    timeout: Duration,
    path: &Path,
    claim: Claim,
    program: &str,
    at_end: OnDaemonExit,
) -> Result<AcceptedConnection, EnrollError> {
    let io_error = |source: io::Error| EnrollError::Io {
        path: path.to_path_buf(),
        source,
    };
    let socket = UnixStream::connect(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => EnrollError::NoDaemon {
            path: path.to_path_buf(),
            source,
        },
        _ => io_error(source),
    })?;
    mark_library_socket(&socket).map_err(io_error)?;
    sempa_socket::enlarge_send_buffer(&socket);
    let socket = ProcessOwned::new_fd(socket);
    let owner = getsockopt(socket.get(), PeerCredentials)
        .map_err(|e| io_error(e.into()))?
        .uid();
    // A daemon of root is trusted: root can do anything to this process anyway.
    if owner != nix::unistd::geteuid().as_raw() && owner != 0 {
        return Err(EnrollError::ForeignOwner {
            path: path.to_path_buf(),
            owner,
        });
    }
    let pid = i32::try_from(std::process::id()).expect("process numbers are ints");
    let hello = Hello {
        magic: TASK_MAGIC,
        version: WIRE_VERSION,
        claim,
        own_pid: pid,
        program: program.to_string(),
        on_daemon_exit: at_end,
    };
    let hello =
        encode_control(&ToDaemon::Hello(hello)).map_err(|e| io_error(io::Error::other(e)))?;
    socket
        .get()
        .set_read_timeout(Some(timeout))
        .map_err(io_error)?;
    match write_all(socket.get(), hello) {
        // The daemon may have sent the reason before it closed the connection.
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
            ) => {}
        written => written.map_err(io_error)?,
    }
    let (mut decoder, mut passed) = (FrameDecoder::new(), PendingFds::default());
    let welcome = read_welcome(socket.get(), &mut decoder, &mut passed, path)?;
    socket.get().set_read_timeout(None).map_err(io_error)?;
    Ok(AcceptedConnection {
        socket: Arc::new(socket),
        decoder,
        passed,
        welcome,
    })
}

fn write_all(socket: &UnixStream, mut bytes: Bytes) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(socket.as_raw_fd(), &bytes, MsgFlags::MSG_NOSIGNAL) {
            Ok(n) => drop(bytes.split_to(n)),
            Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn read_welcome(
    socket: &UnixStream,
    decoder: &mut FrameDecoder,
    passed: &mut PendingFds,
    path: &Path,
) -> Result<Welcome, EnrollError> {
    let version_mismatch = |why: String| EnrollError::VersionMismatch {
        path: path.to_path_buf(),
        reason: why,
    };
    let io_error = |source: io::Error| EnrollError::Io {
        path: path.to_path_buf(),
        source,
    };
    loop {
        if let Some(frame) = decoder
            .next_frame()
            .map_err(|e| version_mismatch(e.to_string()))?
        {
            return match frame.decode_control::<ToTask>() {
                Ok(ToTask::Welcome(welcome)) if welcome.tid.is_task() => Ok(welcome),
                Ok(ToTask::Refused { reason }) => Err(EnrollError::Refused(reason)),
                Ok(_) => Err(version_mismatch(
                    "its first frame is neither a welcome nor a refusal".into(),
                )),
                Err(e) => Err(version_mismatch(e.to_string())),
            };
        }
        decoder.buffer_mut().reserve(WELCOME_READ_BYTES);
        match receive(socket, decoder.buffer_mut(), passed, MsgFlags::empty()) {
            Ok(Received { bytes: 0, .. }) => {
                return Err(io_error(io::Error::other(
                    "it closed the connection without an answer",
                )));
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {
                return Err(io_error(io::Error::other(
                    "it closed the connection without an answer",
                )));
            }
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let seconds = socket
                    .read_timeout()
                    .ok()
                    .flatten()
                    .unwrap_or_default()
                    .as_secs();
                return Err(io_error(io::Error::other(format!(
                    "it did not answer within {seconds} s"
                ))));
            }
            Err(e) => return Err(io_error(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(
        uid: u32,
        token_used: bool,
        vars: &[(&str, &str)],
    ) -> Result<EnrollOptions, EnrollError> {
        EnrollOptions::from_vars(uid, token_used, |name| {
            vars.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.to_string())
        })
    }

    /// The environment selects the daemon's socket, and the spawn token once per process image.
    #[test]
    fn environment_selects_socket_and_claim() {
        let plain = options(7, false, &[]).expect("good");
        assert_eq!(
            (plain.socket, plain.claim),
            ("/tmp/sempa-7/pvm/pvmd.sock".into(), Claim::New)
        );
        let spawned = [("PVMSOCK", "/x/y"), ("PVMEPID", "42")];
        let first = options(7, false, &spawned).expect("good");
        assert_eq!(
            (first.socket, first.claim),
            ("/x/y".into(), Claim::Spawned { spawn_token: 42 })
        );
        assert_eq!(options(7, true, &spawned).expect("good").claim, Claim::New);
        assert_eq!(
            options(7, false, &[("PVMEPID", "-3")]).expect("good").claim,
            Claim::New
        );
    }

    #[test]
    fn root_needs_permission() {
        assert!(matches!(options(0, false, &[]), Err(EnrollError::Root)));
        assert!(options(0, false, &[("PVM_ALLOW_ROOT", "")]).is_ok());
    }

    /// An invalid `PVM_VMID` is reported as an error.
    #[test]
    fn invalid_vm_name_is_reported() {
        assert!(matches!(
            options(7, false, &[("PVM_VMID", "../x")]),
            Err(EnrollError::BadEnvironment(_))
        ));
    }

    /// A daemon counts as present only if it answers the hello; a listener that accepts the
    /// connection is not enough.
    #[test]
    fn listener_that_never_answers_is_no_daemon() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("s");
        let is_served = || daemon_answers(&path, HANDSHAKE_TIMEOUT);
        assert!(!is_served(), "there is none");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        let accept = |answer: Option<ToTask>| {
            std::thread::scope(|scope| {
                let asks = scope.spawn(is_served);
                let (mut stream, _) = listener.accept().expect("a connection");
                if let Some(answer) = answer {
                    let answer = encode_control(&answer).expect("a word");
                    std::io::Write::write_all(&mut stream, &answer).expect("written");
                }
                drop(stream);
                asks.join().expect("ended")
            })
        };
        assert!(!accept(None), "it hangs up");
        assert!(accept(Some(ToTask::Refused {
            reason: "no".into()
        })));
        drop(listener);
        assert!(!is_served(), "nobody listens any more");
    }
}
