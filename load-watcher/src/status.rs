//! Answers queries of users about the use of this machine by guests.
//!
//! Every load watcher listens on a socket with an abstract name, so that no file remains after its
//! exit. The load watcher sends one JSON value to each client and reads nothing from the client.
//! The value contains no more than `ps` shows. [`query_all`] is the client side.

use crate::proc;
use nix::sys::socket::{getsockopt, sockopt};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

/// Prefix of the abstract names of the load watchers' sockets.
const SOCKET_NAME_PREFIX: &str = "sempa-owner/";
/// Maximum number of load watchers of one virtual machine that can listen on one host.
const LISTENERS_PER_VM_MAX: u32 = 16;
/// Maximum number of clients that one call of [`StatusListener::answer_queries`] answers.
const ANSWERS_PER_CALL_MAX: usize = 16;
/// Maximum size of an answer in bytes.
const STATUS_BYTES_MAX: u64 = 1 << 20;
/// Time for which a client waits for an answer; a load watcher normally answers within
/// milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of guests in an answer.
pub const STATUS_TASKS_MAX: usize = 512;

/// A setting of the merged policy that is in force on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicySetting {
    pub name: String,
    /// Value as in a policy file.
    pub value: String,
    /// Origin of the setting: a file, the command of an override, or the user of the virtual
    /// machine.
    pub from: String,
}

/// A guest of the virtual machine on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuestStatus {
    pub tid: String,
    pub program: String,
    pub pid: i32,
    pub user: String,
    /// Start time of the guest's process on this host, in microseconds since 1970; 0 if unknown.
    pub since_us: u64,
    /// Processor time that the guest's process has used on this host, in seconds.
    pub cpu_s: f64,
    /// Number of processes that the guest has left behind at its end; 0 if it has not ended. `pid`
    /// is then one of these processes.
    #[serde(default)]
    pub leftover_processes: u32,
}

/// The status that a load watcher sends to users of its host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WatcherStatus {
    /// Name of the virtual machine.
    pub vm: String,
    /// Login name of the user of the virtual machine.
    pub user: String,
    /// Name of this host in the virtual machine.
    pub host: String,
    /// `absent`, `maybe` or `present`.
    pub owner: String,
    /// Confidence in the owner verdict, in percent.
    pub confidence: u8,
    /// Reason for the owner verdict, in one sentence.
    pub why: String,
    /// Name of each source of the verdict, and a description of its state.
    pub sources: Vec<(String, String)>,
    /// Either `welcome` or `stopped`.
    pub guests: String,
    /// Reason why guests must stop; empty if they are welcome.
    pub guests_why: String,
    /// Time at which guests will be evicted, in microseconds since 1970; `None` if guests may run
    /// or are never evicted.
    pub leave_at_us: Option<u64>,
    /// How guests are evicted: `move`, `kill` or `checkpoint`; `None` if guests may run.
    pub then: Option<String>,
    /// Mechanism by which guests are stopped: `control groups`, `signals`, or `unknown`.
    #[serde(default)]
    pub stopped_by: String,
    /// Reason why guests are not stopped by control groups; empty if control groups are used.
    #[serde(default)]
    pub stopped_by_why: String,
    pub policy: Vec<PolicySetting>,
    /// Errors of the policy, one sentence each: refused files, and blocked users without an account
    /// on this host.
    pub wrong: Vec<String>,
    /// Guests on this host, without tasks that serve the virtual machine.
    pub tasks: Vec<GuestStatus>,
}

/// The socket on which a load watcher answers queries.
#[derive(Debug)]
pub struct StatusListener(UnixListener);

impl StatusListener {
    /// Listens for queries about the virtual machine `vm` of user `uid`.
    ///
    /// # Errors
    /// All names are in use, or another error of the system.
    pub fn open(uid: u32, vm: &str) -> io::Result<Self> {
        let mut bind_result = Err(io::ErrorKind::AddrInUse.into());
        for listener_number in 0..LISTENERS_PER_VM_MAX {
            let name = SocketAddr::from_abstract_name(format!(
                "{SOCKET_NAME_PREFIX}{uid}/{vm}/{listener_number}"
            ))?;
            bind_result = UnixListener::bind_addr(&name);
            if !matches!(&bind_result, Err(e) if e.kind() == io::ErrorKind::AddrInUse) {
                break;
            }
        }
        let listener = bind_result?;
        listener.set_nonblocking(true)?;
        Ok(Self(listener))
    }

    /// Returns the descriptor of the socket. The descriptor is readable when a client waits.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Answers waiting clients, at most `ANSWERS_PER_CALL_MAX`. A client that does not read
    /// receives only the bytes that fit into the kernel's buffer.
    pub fn answer_queries(&self, status: impl Fn() -> WatcherStatus) {
        let mut status_json = None;
        for _ in 0..ANSWERS_PER_CALL_MAX {
            let Ok((mut stream, _)) = self.0.accept() else {
                return;
            };
            let status_json = status_json.get_or_insert_with(|| {
                serde_json::to_vec(&status()).expect("it is made of plain values")
            });
            let _ = stream
                .set_nonblocking(true)
                .and_then(|()| stream.write_all(status_json));
        }
    }
}

/// Parses a line of /proc/net/unix. Returns the abstract name of the socket and the uid in the
/// name; `None` if the line does not describe a load watcher's socket.
fn parse_socket_name(line: &str) -> Option<(&str, u32)> {
    let name = line.rsplit(' ').next()?.strip_prefix('@')?;
    let uid = name
        .strip_prefix(SOCKET_NAME_PREFIX)?
        .split('/')
        .next()?
        .parse()
        .ok()?;
    Some((name, uid))
}

fn query_watcher(name: &str, uid: u32) -> io::Result<WatcherStatus> {
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    // Any process may bind a free name. Therefore the answer is accepted only if the answering
    // process runs as the user whose uid is in the name.
    let server_credentials = getsockopt(&stream, sockopt::PeerCredentials)?;
    if server_credentials.uid() != uid {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("it belongs to user {}", server_credentials.uid()),
        ));
    }
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let mut answer = Vec::new();
    stream.take(STATUS_BYTES_MAX).read_to_end(&mut answer)?;
    serde_json::from_slice(&answer).map_err(io::Error::other)
}

/// Queries all load watchers of this host. Returns their answers, and an error sentence for each
/// load watcher that did not answer or whose answer was refused.
///
/// # Errors
/// The list of sockets cannot be read.
pub fn query_all() -> io::Result<(Vec<WatcherStatus>, Vec<String>)> {
    let socket_list = proc::read_unix_sockets()?;
    // The list contains a listener and its accepted connections under the same name, so duplicate
    // names are removed.
    let mut names: Vec<(&str, u32)> = socket_list.lines().filter_map(parse_socket_name).collect();
    names.sort_unstable();
    names.dedup();
    let (mut statuses, mut errors) = (Vec::new(), Vec::new());
    for (name, uid) in names {
        match query_watcher(name, uid) {
            Ok(status) => statuses.push(status),
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(e) => errors.push(format!("the load watcher at {name} does not answer: {e}")),
        }
    }
    Ok((statuses, errors))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every running load watcher answers a query. No error is reported for a load watcher that has
    /// exited.
    #[test]
    fn running_watchers_answer_queries() {
        let uid = nix::unistd::geteuid().as_raw();
        let vm = format!("test-{}", std::process::id());
        let listeners: Vec<StatusListener> = (0..2)
            .map(|_| StatusListener::open(uid, &vm).expect("listens"))
            .collect();
        let answer_thread = std::thread::spawn(move || {
            for listener in &listeners {
                let status = || WatcherStatus {
                    vm: vm.clone(),
                    why: "because".into(),
                    ..WatcherStatus::default()
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
        let (statuses, _) = query_all().expect("there is a list");
        let vm = answer_thread.join().expect("it answered");
        let test_statuses: Vec<&WatcherStatus> =
            statuses.iter().filter(|status| status.vm == vm).collect();
        assert_eq!(test_statuses.len(), 2);
        assert_eq!(test_statuses[0].why, "because");
        let (statuses, errors) = query_all().expect("there is a list");
        assert!(
            statuses.iter().all(|status| status.vm != vm)
                && errors.iter().all(|line| !line.contains(&vm)),
            "{errors:?}"
        );
    }

    /// Socket names with another prefix or without a uid are ignored.
    #[test]
    fn only_watcher_sockets_are_recognized() {
        let socket_line = |name: &str| {
            format!("0000000000000000: 00000002 00000000 00010000 0001 01 20114 {name}")
        };
        assert_eq!(
            parse_socket_name(&socket_line("@sempa-owner/7/pvm/0")),
            Some(("sempa-owner/7/pvm/0", 7))
        );
        for other_name in [
            "@sempa-owner/x/pvm",
            "/tmp/sempa-owner/7/pvm/0",
            "@other",
            "",
        ] {
            assert_eq!(
                parse_socket_name(&socket_line(other_name)),
                None,
                "{other_name}"
            );
        }
    }
}
