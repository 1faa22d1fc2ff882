//! Answers queries of users about the use of this machine by guests.
//!
//! Every load watcher listens on a socket with an abstract name, so no file remains, and sends one
//! JSON value to each client. The value contains no more than `ps` shows; the load watcher reads
//! nothing from the client. [`query_all`] is the client side.

use crate::proc;
use nix::sys::socket::{getsockopt, sockopt};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

/// Prefix of the abstract names of these sockets.
const NAME_PREFIX: &str = "sempa-owner/";
/// Maximum number of load watchers of one virtual machine that can listen on one host.
const LISTENERS_MAX: u32 = 16;
/// Maximum number of clients that one call of [`StatusListener::answer_queries`] answers.
const ANSWERS_PER_CALL_MAX: usize = 16;
/// Maximum size of an answer in bytes.
const STATUS_BYTES_MAX: u64 = 1 << 20;
/// Time limit of a client for an answer; a load watcher normally answers in milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of guests in an answer.
pub const STATUS_TASKS_MAX: usize = 512;

/// One setting of the policy in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    pub name: String,
    /// Value as in a policy file.
    pub value: String,
    /// Origin of the setting: a file, an override or the user of the virtual machine.
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
}

/// The status that a load watcher sends to users of its host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
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
    /// Time at which guests will be evicted, in microseconds since 1970; `None` if they will not
    /// be.
    pub leave_at_us: Option<u64>,
    /// How guests are evicted: `move`, `kill` or `checkpoint`.
    pub then: Option<String>,
    /// Mechanism by which guests are stopped: `control groups`, `signals`, or `unknown`.
    #[serde(default)]
    pub stopped_by: String,
    /// Reason why guests are not stopped by control groups; empty if they are.
    #[serde(default)]
    pub stopped_by_why: String,
    pub policy: Vec<Setting>,
    /// Errors of the policy in sentences: refused files, and blocked users without an account on
    /// this host.
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

    /// Returns the descriptor of the socket, which is readable when a client waits.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Answers the clients that wait. A client that does not read receives only the bytes that fit
    /// into the kernel's buffer.
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

/// Parses a line of /proc/net/unix. Returns the abstract name of the socket and the uid in the
/// name; `None` if it is not a load watcher's socket.
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
    // Any process may bind a free name, so the answer is accepted only if the process runs as the
    // user in the name.
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

/// Queries all load watchers of this host. Returns their answers, and a sentence for each load
/// watcher that did not answer.
///
/// # Errors
/// The list of sockets cannot be read.
pub fn query_all() -> io::Result<(Vec<Status>, Vec<String>)> {
    let list = proc::unix_sockets()?;
    // The socket of a connection that is being answered has the same name as its listener, so each
    // name is used once.
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

    /// Running load watchers answer a query; a load watcher that has exited is not reported as
    /// silent.
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
