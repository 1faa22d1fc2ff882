//! Answers queries about the use of this machine.
//!
//! Every load watcher listens on a socket with an abstract name, which leaves no file behind, and
//! sends one JSON value to each client. The value contains no more than `ps` shows; the watcher
//! reads nothing from the client. [`query_all`] is the client side.

use nix::sys::socket::{getsockopt, sockopt};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

/// Prefix of the names of these sockets.
const NAME_PREFIX: &str = "sempa-owner/";
/// Maximum number of load watchers of one virtual machine that can listen on one host.
const LISTENERS_MAX: u32 = 16;
/// Maximum number of queries that are answered in one call.
const ANSWERS_PER_CALL_MAX: usize = 16;
/// Maximum size of an answer in bytes.
const STATUS_BYTES_MAX: u64 = 1 << 20;
/// Time after which a client stops waiting; a load watcher normally answers in milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of tasks in an answer.
pub const TASKS_MAX: usize = 512;

/// One setting of the policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    pub name: String,
    /// Value as in a policy file.
    pub value: String,
    /// Origin: a file, an override or the user of the virtual machine.
    pub from: String,
}

/// A task of the virtual machine on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuestStatus {
    pub tid: String,
    pub program: String,
    pub pid: i32,
    pub user: String,
    /// Start time of its process on this host, in microseconds since 1970; 0 if unknown.
    pub since_us: u64,
    /// Processor time that its process has used on this host, in seconds.
    pub cpu_s: f64,
}

/// The status that a load watcher sends to users of its host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Name of the virtual machine.
    pub vm: String,
    /// User of the virtual machine.
    pub user: String,
    /// Name of this host in the virtual machine.
    pub host: String,
    /// `absent`, `maybe` or `present`.
    pub owner: String,
    /// Confidence of the owner verdict in percent.
    pub confidence: u8,
    /// Reason of the owner verdict.
    pub why: String,
    /// Name and state of each source.
    pub sources: Vec<(String, String)>,
    /// Either `welcome` or `stopped`.
    pub guests: String,
    /// Why guests must stop; empty if they are welcome.
    pub guests_why: String,
    /// When guests leave, in microseconds since 1970.
    pub leave_at_us: Option<u64>,
    /// How they leave: `move`, `kill` or `checkpoint`.
    pub then: Option<String>,
    /// How they are stopped: `control groups`, `signals`, or `unknown`.
    #[serde(default)]
    pub stopped_by: String,
    /// Why they are not stopped by control groups; empty otherwise.
    #[serde(default)]
    pub stopped_by_why: String,
    pub policy: Vec<Setting>,
    /// Errors of the policy: refused files, and blocked users without an account here.
    pub wrong: Vec<String>,
    /// Guest tasks on this host, without tasks that serve the virtual machine.
    pub tasks: Vec<GuestStatus>,
}

/// The socket on which a load watcher answers queries.
#[derive(Debug)]
pub struct StatusListener(UnixListener);

impl StatusListener {
    /// Listens for a virtual machine of this user.
    ///
    /// # Errors
    /// The error of the system.
    pub fn open(uid: u32, vm: &str) -> io::Result<StatusListener> {
        let mut result = Err(io::ErrorKind::AddrInUse.into());
        for number in 0..LISTENERS_MAX {
            let name = SocketAddr::from_abstract_name(format!("{NAME_PREFIX}{uid}/{vm}/{number}"))?;
            result = UnixListener::bind_addr(&name);
            if !matches!(&result, Err(e) if e.kind() == io::ErrorKind::AddrInUse) {
                break;
            }
        }
        let listener = result?;
        listener.set_nonblocking(true)?;
        Ok(StatusListener(listener))
    }

    /// Returns the descriptor, which is readable when a client waits.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Answers the waiting clients. A client that does not read gets only what fits into the
    /// kernel's buffer.
    pub fn answer_queries(&self, status: impl Fn() -> Status) {
        let mut text = None;
        for _ in 0..ANSWERS_PER_CALL_MAX {
            let Ok((mut stream, _)) = self.0.accept() else {
                return;
            };
            let text = text.get_or_insert_with(|| {
                serde_json::to_vec(&status()).expect("it is made of plain values")
            });
            let _ = stream
                .set_nonblocking(true)
                .and_then(|()| stream.write_all(text));
        }
    }
}

/// Returns the name of a socket and the uid in it, from a line of /proc/net/unix.
fn parse_socket_name(line: &str) -> Option<(&str, u32)> {
    let name = line.rsplit(' ').next()?.strip_prefix('@')?;
    let uid = name
        .strip_prefix(NAME_PREFIX)?
        .split('/')
        .next()?
        .parse()
        .ok()?;
    Some((name, uid))
}

fn query(name: &str, uid: u32) -> io::Result<Status> {
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    // Any process may bind a free name, so the answer is accepted only from the user in the name.
    let server = getsockopt(&stream, sockopt::PeerCredentials)?;
    if server.uid() != uid {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("it belongs to user {}", server.uid()),
        ));
    }
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let mut text = Vec::new();
    stream.take(STATUS_BYTES_MAX).read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(io::Error::other)
}

/// Queries all load watchers of this host. Returns the answers, and a sentence for each one that
/// did not answer.
///
/// # Errors
/// If the list of sockets cannot be read.
pub fn query_all() -> io::Result<(Vec<Status>, Vec<String>)> {
    let list = fs::read_to_string("/proc/net/unix")?;
    // A connection that is being answered has the same name as its listener.
    let mut names: Vec<(&str, u32)> = list.lines().filter_map(parse_socket_name).collect();
    names.sort_unstable();
    names.dedup();
    let (mut all, mut silent) = (Vec::new(), Vec::new());
    for (name, uid) in names {
        match query(name, uid) {
            Ok(status) => all.push(status),
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(e) => silent.push(format!("the load watcher at {name} does not answer: {e}")),
        }
    }
    Ok((all, silent))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Running load watchers answer a query; one that has ended is not reported as silent.
    #[test]
    fn running_watchers_answer_queries() {
        let uid = nix::unistd::geteuid().as_raw();
        let vm = format!("test-{}", std::process::id());
        let listeners: Vec<StatusListener> = (0..2)
            .map(|_| StatusListener::open(uid, &vm).expect("listens"))
            .collect();
        let answer = std::thread::spawn(move || {
            for listener in &listeners {
                let status = || Status {
                    vm: vm.clone(),
                    why: "because".into(),
                    ..Status::default()
                };
                let mut fds = [nix::poll::PollFd::new(
                    listener.fd(),
                    nix::poll::PollFlags::POLLIN,
                )];
                nix::poll::poll(&mut fds, 20_000_u16).expect("somebody asks");
                listener.answer_queries(status);
            }
            vm
        });
        let (all, _) = query_all().expect("there is a list");
        let vm = answer.join().expect("it answered");
        let ours: Vec<&Status> = all.iter().filter(|status| status.vm == vm).collect();
        assert_eq!(ours.len(), 2);
        assert_eq!(ours[0].why, "because");
        let (all, silent) = query_all().expect("there is a list");
        assert!(
            all.iter().all(|status| status.vm != vm)
                && silent.iter().all(|line| !line.contains(&vm)),
            "{silent:?}"
        );
    }

    /// Only sockets of load watchers are recognized in the kernel's list.
    #[test]
    fn only_watcher_sockets_are_recognized() {
        let line = |name: &str| {
            format!("0000000000000000: 00000002 00000000 00010000 0001 01 20114 {name}")
        };
        assert_eq!(
            parse_socket_name(&line("@sempa-owner/7/pvm/0")),
            Some(("sempa-owner/7/pvm/0", 7))
        );
        for other in [
            "@sempa-owner/x/pvm",
            "/tmp/sempa-owner/7/pvm/0",
            "@other",
            "",
        ] {
            assert_eq!(parse_socket_name(&line(other)), None, "{other}");
        }
    }
}
