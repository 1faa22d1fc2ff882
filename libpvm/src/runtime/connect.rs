//! Connects to the daemon: finds the daemon's socket, sends the hello, and reads the welcome.

use super::process::{ProcessOwned, mark_library_socket};
use crate::error::EnrollError;
use bytes::Bytes;
use nix::sys::socket::{MsgFlags, getsockopt, send, sockopt::PeerCredentials};
use sempa_proto::WIRE_VERSION;
use sempa_proto::frame::{FrameDecoder, encode_control};
use sempa_proto::route::{DIRECT_ROUTES_VARIABLE, allows_automatic_routes};
use sempa_proto::runtime_paths::{RuntimePaths, VmNameError};
use sempa_proto::task::{Claim, Hello, OnDaemonExit, TASK_MAGIC, ToDaemon, ToTask, Welcome};
use sempa_socket::{PendingFds, ReadOutcome, find_runtime_paths, receive};
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

/// True if this process image has used its spawn token (`PVMEPID`). A forked child inherits the
/// flag, so the child cannot enroll in place of its parent.
static IS_SPAWN_TOKEN_USED: AtomicBool = AtomicBool::new(false);

/// Options of an enrollment: the daemon's socket, and the identity that this process claims.
#[derive(Clone, Debug)]
pub struct EnrollOptions {
    /// Path of the daemon's socket.
    pub socket: PathBuf,
    pub claim: Claim,
    /// Program name that task lists show.
    pub program: String,
    /// Action on this process when its daemon exits. Applies to processes that neither a daemon nor
    /// a tasker has started.
    pub on_daemon_exit: OnDaemonExit,
    /// True if the library may set up direct routes that its program has not requested.
    pub has_automatic_routes: bool,
}

impl EnrollOptions {
    /// Reads the options from the environment. `PVMSOCK`, or else `PVM_TMP` and `PVM_VMID`, select
    /// the socket. `PVMEPID` is the token of a spawned process; the token is valid once per process
    /// image. With these options the program is notified of the end of its daemon by failing calls.
    ///
    /// # Errors
    /// [`EnrollError::Root`] for user 0 without `PVM_ALLOW_ROOT`, [`EnrollError::BadEnvironment`]
    /// if the variables result in no valid path.
    pub fn from_env() -> Result<Self, EnrollError> {
        let uid = nix::unistd::geteuid();
        Self::from_variables(
            uid.as_raw(),
            IS_SPAWN_TOKEN_USED.load(Ordering::Relaxed),
            |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()),
        )
    }

    fn from_variables(
        uid: u32,
        is_token_used: bool,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, EnrollError> {
        let non_empty_variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        if uid == 0 && variable("PVM_ALLOW_ROOT").is_none() {
            return Err(EnrollError::Root);
        }
        let socket = match non_empty_variable("PVMSOCK") {
            Some(path) => PathBuf::from(path),
            None => runtime_paths(uid, &variable)?.daemon_socket_path(),
        };
        let spawn_token = non_empty_variable("PVMEPID")
            .and_then(|text| text.trim().parse().ok())
            .filter(|spawn_token| *spawn_token > 0 && !is_token_used);
        let claim = spawn_token.map_or(Claim::NotSpawned, |spawn_token| Claim::Spawned {
            spawn_token,
        });
        Ok(Self {
            socket,
            claim,
            program: program_name(),
            on_daemon_exit: OnDaemonExit::FailCalls,
            // The daemon reports an unknown value.
            has_automatic_routes: allows_automatic_routes(
                variable(DIRECT_ROUTES_VARIABLE).as_deref(),
            )
            .unwrap_or(false),
        })
    }
}

/// Returns the paths of the virtual machine that the environment variables select, in the directory
/// that the daemon of the user `uid` uses. `variable` returns the value of a variable.
///
/// # Errors
/// The value of `PVM_VMID` cannot be a directory name.
pub fn runtime_paths(
    uid: u32,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<RuntimePaths, VmNameError> {
    let usual_paths = RuntimePaths::from_env(uid, variable)?;
    Ok(find_runtime_paths(usual_paths, uid))
}

/// Claims the spawn token of this process image. Returns false if the token was used before.
pub(crate) fn claim_spawn_token() -> bool {
    !IS_SPAWN_TOKEN_USED.swap(true, Ordering::Relaxed)
}

/// Makes the spawn token usable again. Called when the daemon did not answer.
pub(crate) fn release_spawn_token() {
    IS_SPAWN_TOKEN_USED.store(false, Ordering::Relaxed);
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
    /// Socket to the daemon, shared so that the I/O thread can sleep on the socket while other
    /// threads use the socket.
    pub(crate) socket: Arc<ProcessOwned<UnixStream>>,
    /// Decoder that contains the bytes that arrived after the welcome.
    pub(crate) decoder: FrameDecoder,
    /// Descriptors that arrived together with the bytes in `decoder`.
    pub(crate) unhandled_fds: PendingFds,
    pub(crate) welcome: Welcome,
}

/// True if a daemon answers at this socket within `timeout`. A daemon that is exiting may still
/// accept connections, but does not answer. The result is also true if the listener belongs to
/// another user. The call enrolls no task.
pub fn wait_for_daemon_answer(path: &Path, timeout: Duration) -> bool {
    let is_no_answer = |error: &EnrollError| {
        matches!(error, EnrollError::Io { .. } | EnrollError::NoDaemon { .. })
    };
    !handshake_with_timeout(
        timeout,
        path,
        Claim::DaemonTest,
        "",
        OnDaemonExit::default(),
    )
    .is_err_and(|error| is_no_answer(&error))
}

/// Connects to the daemon's socket, sends the hello, and waits for the answer.
pub(crate) fn connect_and_wait_for_welcome(
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
    daemon_exit_action: OnDaemonExit,
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
    let socket = ProcessOwned::from_fd(socket);
    let peer_uid = getsockopt(socket.get(), PeerCredentials)
        .map_err(|e| io_error(e.into()))?
        .uid();
    // A daemon of root is trusted, because root controls this process anyway.
    if peer_uid != nix::unistd::geteuid().as_raw() && peer_uid != 0 {
        return Err(EnrollError::ForeignOwner {
            path: path.to_path_buf(),
            owner: peer_uid,
        });
    }
    let pid = i32::try_from(std::process::id()).expect("process numbers are ints");
    let hello = Hello {
        magic: TASK_MAGIC,
        version: WIRE_VERSION,
        claim,
        namespace_pid: pid,
        program: program.to_string(),
        on_daemon_exit: daemon_exit_action,
    };
    let hello =
        encode_control(&ToDaemon::Hello(hello)).map_err(|e| io_error(io::Error::other(e)))?;
    socket
        .get()
        .set_read_timeout(Some(timeout))
        .map_err(io_error)?;
    match write_all(socket.get(), hello) {
        // The daemon may have sent its reason before it closed the connection, so the answer is
        // still read.
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
            ) => {}
        write_result => write_result.map_err(io_error)?,
    }
    let (mut decoder, mut received_fds) = (FrameDecoder::new(), PendingFds::default());
    let welcome = read_welcome(socket.get(), &mut decoder, &mut received_fds, path)?;
    socket.get().set_read_timeout(None).map_err(io_error)?;
    Ok(AcceptedConnection {
        socket: Arc::new(socket),
        decoder,
        unhandled_fds: received_fds,
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
    received_fds: &mut PendingFds,
    path: &Path,
) -> Result<Welcome, EnrollError> {
    let version_mismatch_error = |mismatch_text: String| EnrollError::VersionMismatch {
        path: path.to_path_buf(),
        reason: mismatch_text,
    };
    let io_error = |source: io::Error| EnrollError::Io {
        path: path.to_path_buf(),
        source,
    };
    loop {
        if let Some(frame) = decoder
            .next_frame()
            .map_err(|e| version_mismatch_error(e.to_string()))?
        {
            return match frame.decode_control::<ToTask>() {
                Ok(ToTask::Welcome(welcome)) if welcome.tid.is_task() => Ok(welcome),
                Ok(ToTask::Refused { reason }) => Err(EnrollError::Refused(reason)),
                Ok(_) => Err(version_mismatch_error(
                    "its first frame is neither a welcome nor a refusal".into(),
                )),
                Err(e) => Err(version_mismatch_error(e.to_string())),
            };
        }
        decoder.buffer_mut().reserve(WELCOME_READ_BYTES);
        match receive(
            socket,
            decoder.buffer_mut(),
            received_fds,
            MsgFlags::empty(),
        ) {
            Ok(ReadOutcome { byte_count: 0, .. }) => {
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

    fn options_from(
        uid: u32,
        is_token_used: bool,
        vars: &[(&str, &str)],
    ) -> Result<EnrollOptions, EnrollError> {
        EnrollOptions::from_variables(uid, is_token_used, |name| {
            vars.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.to_string())
        })
    }

    /// The environment selects the daemon's socket. The spawn token is valid once per process
    /// image.
    #[test]
    fn environment_selects_socket_and_claim() {
        let new_task = options_from(7, false, &[]).expect("good");
        assert_eq!(
            (new_task.socket, new_task.claim),
            ("/tmp/sempa-7/pvm/pvmd.sock".into(), Claim::NotSpawned)
        );
        let variables = [("PVMSOCK", "/x/y"), ("PVMEPID", "42")];
        let spawned_task = options_from(7, false, &variables).expect("good");
        assert_eq!(
            (spawned_task.socket, spawned_task.claim),
            ("/x/y".into(), Claim::Spawned { spawn_token: 42 })
        );
        assert_eq!(
            options_from(7, true, &variables).expect("good").claim,
            Claim::NotSpawned
        );
        assert_eq!(
            options_from(7, false, &[("PVMEPID", "-3")])
                .expect("good")
                .claim,
            Claim::NotSpawned
        );
    }

    /// The user's variable selects whether there are automatic routes; unknown values forbid them.
    #[test]
    fn variable_forbids_automatic_routes() {
        let options_with =
            |value| options_from(7, false, &[("SEMPA_DIRECT_ROUTES", value)]).expect("good");
        assert!(options_with("automatic").has_automatic_routes);
        assert!(
            options_from(7, false, &[])
                .expect("good")
                .has_automatic_routes
        );
        for value in ["requested", "none"] {
            assert!(!options_with(value).has_automatic_routes);
        }
    }

    #[test]
    fn root_needs_permission() {
        assert!(matches!(
            options_from(0, false, &[]),
            Err(EnrollError::Root)
        ));
        assert!(options_from(0, false, &[("PVM_ALLOW_ROOT", "")]).is_ok());
    }

    #[test]
    fn invalid_vm_name_is_reported() {
        assert!(matches!(
            options_from(7, false, &[("PVM_VMID", "../x")]),
            Err(EnrollError::BadEnvironment(_))
        ));
    }

    /// A daemon counts as present only if it answers the hello. A listener that only accepts the
    /// connection does not count.
    #[test]
    fn listener_that_never_answers_is_no_daemon() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("s");
        let is_served = || wait_for_daemon_answer(&path, HANDSHAKE_TIMEOUT);
        assert!(!is_served(), "there is none");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        let is_served_by = |answer: Option<ToTask>| {
            std::thread::scope(|scope| {
                let query_thread = scope.spawn(is_served);
                let (mut stream, _) = listener.accept().expect("a connection");
                if let Some(answer) = answer {
                    let answer = encode_control(&answer).expect("a word");
                    io::Write::write_all(&mut stream, &answer).expect("written");
                }
                drop(stream);
                query_thread.join().expect("ended")
            })
        };
        assert!(!is_served_by(None), "it hangs up");
        assert!(is_served_by(Some(ToTask::Refused {
            reason: "no".into()
        })));
        drop(listener);
        assert!(!is_served(), "nobody listens any more");
    }
}
