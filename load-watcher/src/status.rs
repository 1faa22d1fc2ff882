//! Answers those who ask what uses their machine: every load watcher listens on a socket in the kernel's abstract names, which
//! leaves no file behind, and gives one value in JSON to whoever connects. It tells no more than `ps` does, and takes nothing.

use nix::sys::socket::{getsockopt, sockopt};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

/// How names of these sockets begin.
const NAME_PREFIX: &str = "sempa-owner/";
/// Watchers of one virtual machine on one host that can listen at the same time.
const WATCHERS_MAX: u32 = 16;
/// Answers given in one go.
const ANSWERS_MAX: usize = 16;
/// Bytes of an answer at most.
const STATUS_BYTES_MAX: u64 = 1 << 20;
/// A watcher answers in milliseconds; one that does not is not waited for.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// Tasks that an answer lists at most.
pub const TASKS_MAX: usize = 512;

/// One setting of the policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// Its name.
    pub name: String,
    /// Its value, as it would be written.
    pub value: String,
    /// Where it comes from.
    pub from: String,
}

/// A task of the virtual machine on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Guest {
    /// Its task id.
    pub tid: String,
    /// Its program.
    pub program: String,
    /// Its process.
    pub pid: i32,
    /// Its user.
    pub user: String,
    /// When its process was started here, in microseconds since 1970; 0 when nobody knows.
    pub since_us: u64,
    /// Processor time that it has used here, in seconds.
    pub cpu_s: f64,
}

/// What a load watcher says to the owner of its host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Name of the virtual machine.
    pub vm: String,
    /// Its user.
    pub user: String,
    /// Name of this host in it.
    pub host: String,
    /// `absent`, `maybe` or `present`.
    pub owner: String,
    /// How sure that is, in percent.
    pub confidence: u8,
    /// Why.
    pub why: String,
    /// Each source, and what it says.
    pub sources: Vec<(String, String)>,
    /// `welcome` or `stopped`.
    pub guests: String,
    /// Why they may do no more; empty when they may work.
    pub guests_why: String,
    /// When they leave, in microseconds since 1970.
    pub leave_at_us: Option<u64>,
    /// How they leave, `move`, `kill` or `checkpoint`.
    pub then: Option<String>,
    /// How they are stopped: `control groups`, `signals`, or `unknown`.
    #[serde(default)]
    pub stopped_by: String,
    /// Why not by control groups; empty otherwise.
    #[serde(default)]
    pub stopped_by_why: String,
    /// The policy.
    pub policy: Vec<Setting>,
    /// Files that were refused, and blocked users whom nobody knows here, and why.
    pub wrong: Vec<String>,
    /// Its tasks here; without those that serve the virtual machine.
    pub tasks: Vec<Guest>,
}

/// Where a load watcher answers.
#[derive(Debug)]
pub struct Listener(UnixListener);

impl Listener {
    /// Listens for a virtual machine of this user.
    ///
    /// # Errors
    /// What the system said.
    pub fn open(uid: u32, vm: &str) -> io::Result<Listener> {
        let mut result = Err(io::ErrorKind::AddrInUse.into());
        for number in 0..WATCHERS_MAX {
            let name = SocketAddr::from_abstract_name(format!("{NAME_PREFIX}{uid}/{vm}/{number}"))?;
            result = UnixListener::bind_addr(&name);
            if !matches!(&result, Err(e) if e.kind() == io::ErrorKind::AddrInUse) {
                break;
            }
        }
        let listener = result?;
        listener.set_nonblocking(true)?;
        Ok(Listener(listener))
    }

    /// Readable when somebody asks.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Answers those who wait. Whoever does not read gets what fits into the kernel's buffer.
    pub fn answer(&self, status: impl Fn() -> Status) {
        let mut text = None;
        for _ in 0..ANSWERS_MAX {
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

/// The name of a socket and the user in it, from a line of /proc/net/unix.
fn name_in(line: &str) -> Option<(&str, u32)> {
    let name = line.rsplit(' ').next()?.strip_prefix('@')?;
    let uid = name
        .strip_prefix(NAME_PREFIX)?
        .split('/')
        .next()?
        .parse()
        .ok()?;
    Some((name, uid))
}

fn ask(name: &str, uid: u32) -> io::Result<Status> {
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    // Anybody may take a free name; only the user in it is believed.
    let server = getsockopt(&stream, sockopt::PeerCredentials)?;
    if server.uid() != uid {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("it belongs to user {}", server.uid()),
        ));
    }
    stream.set_read_timeout(Some(ANSWER_TIME))?;
    let mut text = Vec::new();
    stream.take(STATUS_BYTES_MAX).read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(io::Error::other)
}

/// Asks all load watchers of this host. Answers, and sentences about those that did not answer.
///
/// # Errors
/// It cannot be known which there are.
pub fn ask_all() -> io::Result<(Vec<Status>, Vec<String>)> {
    let list = fs::read_to_string("/proc/net/unix")?;
    // A connection that is being answered has the listener's name as well.
    let mut names: Vec<(&str, u32)> = list.lines().filter_map(name_in).collect();
    names.sort_unstable();
    names.dedup();
    let (mut all, mut silent) = (Vec::new(), Vec::new());
    for (name, uid) in names {
        match ask(name, uid) {
            Ok(status) => all.push(status),
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(e) => silent.push(format!("the load watcher at {name} gives no answer: {e}")),
        }
    }
    Ok((all, silent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_asks_is_told_and_a_watcher_that_has_ended_is_not_asked() {
        let uid = nix::unistd::geteuid().as_raw();
        let vm = format!("test-{}", std::process::id());
        let listeners: Vec<Listener> = (0..2)
            .map(|_| Listener::open(uid, &vm).expect("listens"))
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
                listener.answer(status);
            }
            vm
        });
        let (all, _) = ask_all().expect("there is a list");
        let vm = answer.join().expect("it answered");
        let ours: Vec<&Status> = all.iter().filter(|status| status.vm == vm).collect();
        assert_eq!(ours.len(), 2);
        assert_eq!(ours[0].why, "because");
        let (all, silent) = ask_all().expect("there is a list");
        assert!(
            all.iter().all(|status| status.vm != vm)
                && silent.iter().all(|line| !line.contains(&vm)),
            "{silent:?}"
        );
    }

    #[test]
    fn only_sockets_of_load_watchers_are_known() {
        let line = |name: &str| {
            format!("0000000000000000: 00000002 00000000 00010000 0001 01 20114 {name}")
        };
        assert_eq!(
            name_in(&line("@sempa-owner/7/pvm/0")),
            Some(("sempa-owner/7/pvm/0", 7))
        );
        for other in [
            "@sempa-owner/x/pvm",
            "/tmp/sempa-owner/7/pvm/0",
            "@other",
            "",
        ] {
            assert_eq!(name_in(&line(other)), None, "{other}");
        }
    }
}
