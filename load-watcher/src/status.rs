//! Answers queries of users about the use of this machine by guests.
//!
//! Every load watcher listens on a socket with an abstract name, so that no file remains after its
//! exit. The load watcher sends one JSON value to each client and reads nothing from the client.
//! The value contains no more than `ps` shows. [`query_all`] is the client side.

use crate::proc;
use crate::user_files::ReadFile;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{UnixAddr, getsockopt, sockopt};
use nix::unistd::User;
use sempa_socket::connect_without_waiting;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// Prefix of the abstract names of the load watchers' sockets.
const SOCKET_NAME_PREFIX: &str = "sempa-owner/";
/// Maximum number of names of one virtual machine that a load watcher tries. Anybody can take a
/// name, so the load watcher then takes one that nobody can foresee.
const NUMBERED_NAMES_MAX: u32 = 16;
/// Maximum number of load watchers that a client queries.
const QUERIED_WATCHERS_MAX: usize = 256;
/// Maximum number of load watchers of one user that a client queries.
const QUERIED_WATCHERS_PER_USER_MAX: usize = 32;
/// Maximum number of clients that one call of [`StatusListener::answer_queries`] answers.
const ANSWERS_PER_CALL_MAX: usize = 16;
/// Maximum size of an answer in bytes.
const STATUS_BYTES_MAX: u64 = 1 << 20;
/// Time for which a client waits for all answers; a load watcher normally answers within
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
    /// Resident memory of all processes of the guest, in bytes; 0 if unknown. Memory that processes
    /// share counts once for each.
    #[serde(default)]
    pub resident_bytes: u64,
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
    /// Reason why no guest can leave, although `leave_at_us` is set; empty if guests can leave or
    /// are ended.
    #[serde(default)]
    pub cannot_leave: String,
    /// Mechanism by which guests are stopped: `control groups`, `signals`, or `unknown`.
    #[serde(default)]
    pub stopped_by: String,
    /// Reason why guests are not stopped by control groups; empty if control groups are used.
    #[serde(default)]
    pub stopped_by_why: String,
    pub policy: Vec<PolicySetting>,
    /// Errors, one sentence each: refused policy files, blocked users without an account on this
    /// host, and a directive that the daemon has refused.
    pub wrong: Vec<String>,
    /// Guests on this host, without tasks that serve the virtual machine.
    pub tasks: Vec<GuestStatus>,
    /// The overrides and published policies that were read and found valid. The directive that
    /// follows from them was sent to the daemon; it is in force if `directive_error` is empty.
    #[serde(default)]
    pub read_files: Vec<ReadFile>,
    /// Reason why the daemon has refused the last directive; empty if it is in force.
    #[serde(default)]
    pub directive_error: String,
    /// The source that contains `watch = false`; empty if owners are protected.
    #[serde(default)]
    pub switched_off_by: String,
    /// The time of the answer by the clock to which the owner's hours refer, with its time zone.
    #[serde(default)]
    pub clock: String,
    /// True if the load watcher of the whole machine has found out what this answer says of the
    /// owner.
    #[serde(default)]
    pub machine_sense: bool,
    /// Process id of the load watcher as the client sees it; 0 in the answer itself.
    #[serde(default)]
    pub pid: i32,
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
        let numbers = (0..NUMBERED_NAMES_MAX).map(|number| number.to_string());
        let random_name = format!("{:016x}", RandomState::new().hash_one(uid));
        for last_part in numbers.chain([random_name]) {
            let name = SocketAddr::from_abstract_name(format!(
                "{SOCKET_NAME_PREFIX}{uid}/{vm}/{last_part}"
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

/// A connection to a load watcher whose answer has not arrived completely.
struct OpenQuery {
    name: String,
    /// Process id of the load watcher, as this process sees it.
    pid: i32,
    stream: UnixStream,
    answer: Vec<u8>,
}

impl OpenQuery {
    /// Connects to a load watcher without waiting.
    fn connect(name: &str, uid: u32) -> io::Result<Self> {
        let address = UnixAddr::new_abstract(name.as_bytes())?;
        let stream = connect_without_waiting(&address).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::Error::other("it has too many unanswered queries"),
            _ => error,
        })?;
        // Any process may bind a free name. Therefore the answer is accepted only if the answering
        // process runs as the user whose uid is in the name.
        let server_credentials = getsockopt(&stream, sockopt::PeerCredentials)?;
        if server_credentials.uid() != uid {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("it belongs to user {}", server_credentials.uid()),
            ));
        }
        Ok(Self {
            name: name.to_string(),
            pid: server_credentials.pid(),
            stream,
            answer: Vec::new(),
        })
    }

    /// Reads what has arrived. Returns the complete answer; `None` if more must arrive.
    fn read(&mut self) -> Option<io::Result<WatcherStatus>> {
        let mut bytes = [0; 16 << 10];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => {
                    let status = serde_json::from_slice(&self.answer).map_err(io::Error::other);
                    return Some(status.map(|status: WatcherStatus| WatcherStatus {
                        pid: self.pid,
                        ..status
                    }));
                }
                Ok(count) => self.answer.extend_from_slice(&bytes[..count]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return None,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Some(Err(e)),
            }
            if self.answer.len() as u64 > STATUS_BYTES_MAX {
                return Some(Err(io::Error::other("its answer is too long")));
            }
        }
    }
}

/// Queries all load watchers of this host. Returns their answers, and an error sentence for each
/// load watcher that did not answer in time or whose answer was refused. If load watchers were not
/// asked, one more error sentence says how many.
///
/// # Errors
/// The list of sockets cannot be read.
pub fn query_all() -> io::Result<(Vec<WatcherStatus>, Vec<String>)> {
    query_all_within(ANSWER_TIMEOUT)
}

/// As [`query_all`], with a time limit for all answers together.
///
/// # Errors
/// As [`query_all`].
pub fn query_all_within(timeout: Duration) -> io::Result<(Vec<WatcherStatus>, Vec<String>)> {
    let deadline = Instant::now() + timeout;
    let socket_list = proc::read_unix_sockets()?;
    let (mut statuses, mut errors) = (Vec::new(), Vec::new());
    let error_text = |name: &str, error: &dyn std::fmt::Display| {
        format!("the load watcher at {name} does not answer: {error}")
    };
    let has_account = |uid: u32| matches!(User::from_uid(uid.into()), Ok(Some(_)));
    let may_connect = || Instant::now() < deadline;
    let connections = connect_to_owners(&socket_list, OpenQuery::connect, has_account, may_connect);
    let mut open_queries: Vec<OpenQuery> = connections
        .open
        .into_iter()
        .map(|(.., query)| query)
        .collect();
    let failed = connections.failed.iter();
    errors.extend(failed.map(|(name, error)| error_text(name, error)));
    let wait_for_answers = |queries: &[OpenQuery]| {
        let remaining_time = deadline.saturating_duration_since(Instant::now());
        if remaining_time.is_zero() {
            return false;
        }
        let mut fds: Vec<PollFd<'_>> = queries
            .iter()
            .map(|query| PollFd::new(query.stream.as_fd(), PollFlags::POLLIN))
            .collect();
        let millis = remaining_time.as_millis() + 1;
        // A failure has the effect of a wake-up without a reason.
        let _ = poll(
            &mut fds,
            PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX),
        );
        true
    };
    for (name, answer) in read_answers(&mut open_queries, wait_for_answers) {
        match answer {
            Ok(status) => statuses.push(status),
            Err(error) => errors.push(error_text(&name, &error)),
        }
    }
    let late_names = open_queries.iter().map(|query| query.name.as_str());
    errors.extend(late_names.map(|name| {
        let seconds = (timeout.as_secs_f64() * 100.0).round() / 100.0;
        error_text(name, &format!("nothing arrived within {seconds} s"))
    }));
    if connections.omitted_count > 0 {
        errors.push(format!(
            "{} more load watchers were not asked: at most {QUERIED_WATCHERS_MAX} are asked in all, \
             {QUERIED_WATCHERS_PER_USER_MAX} of each user, within the time limit",
            connections.omitted_count
        ));
    }
    statuses.sort_by(|a: &WatcherStatus, b| (&a.vm, &a.user).cmp(&(&b.vm, &b.user)));
    Ok((statuses, errors))
}

/// Reads the answers of all queries, with the names of the load watchers. If some are missing,
/// calls `wait_for_answers` with their queries and reads again, until it returns false. The queries
/// that remain in `open_queries` are not answered.
fn read_answers(
    open_queries: &mut Vec<OpenQuery>,
    mut wait_for_answers: impl FnMut(&[OpenQuery]) -> bool,
) -> Vec<(String, io::Result<WatcherStatus>)> {
    let mut answers = Vec::new();
    loop {
        open_queries.retain_mut(|query| {
            let answer = query.read();
            let is_open = answer.is_none();
            answers.extend(answer.map(|answer| (query.name.clone(), answer)));
            is_open
        });
        // Without an open query nothing would end the wait before the time limit.
        if open_queries.is_empty() || !wait_for_answers(open_queries) {
            return answers;
        }
    }
}

/// The load watchers to which a client has tried to connect.
struct Connections<'a, T> {
    /// The connections, with the uids and the names of the load watchers.
    open: Vec<(u32, &'a str, T)>,
    /// The load watchers to which no connection could be made, and the reasons.
    failed: Vec<(&'a str, io::Error)>,
    /// Number of load watchers that are in neither list.
    omitted_count: usize,
}

impl<'a, T> Connections<'a, T> {
    /// Adds a connection. If there are too many, it is omitted, or replaces that of a user for whom
    /// `has_account` returns false: an ordinary user can run processes under many uids without an
    /// account (see `subuid`), and they must not displace other users.
    fn add(
        &mut self,
        (uid, name, connection): (u32, &'a str, T),
        mut has_account: impl FnMut(u32) -> bool,
    ) {
        if self.open.len() < QUERIED_WATCHERS_MAX {
            return self.open.push((uid, name, connection));
        }
        self.omitted_count += 1;
        if has_account(uid) {
            let replaced_connection = self.open.iter_mut().find(|(uid, ..)| !has_account(*uid));
            if let Some(replaced_connection) = replaced_connection {
                *replaced_connection = (uid, name, connection);
            }
        }
    }
}

/// Connects to the load watchers of a list of sockets, as long as `may_continue` returns true. At
/// most [`QUERIED_WATCHERS_MAX`] connections and as many errors are returned, and at most
/// [`QUERIED_WATCHERS_PER_USER_MAX`] connections of each user; the others are counted.
/// `has_account` is called only if there are too many connections, and once for each uid.
///
/// Anybody can take any free name. So only a connection counts, for which `connect` finds that the
/// socket belongs to the user in the name. Sockets of others are not reported.
fn connect_to_owners<'a, T>(
    socket_list: &'a str,
    mut connect: impl FnMut(&str, u32) -> io::Result<T>,
    has_account: impl Fn(u32) -> bool,
    may_continue: impl Fn() -> bool,
) -> Connections<'a, T> {
    // The list contains a listener and its accepted connections under the same name, so duplicate
    // names are removed.
    let mut names: Vec<(u32, &str)> = socket_list
        .lines()
        .filter_map(parse_socket_name)
        .map(|(name, uid)| (uid, name))
        .collect();
    names.sort_unstable();
    names.dedup();
    let mut connections = Connections {
        open: Vec::new(),
        failed: Vec::new(),
        omitted_count: 0,
    };
    let mut accounts = BTreeMap::<u32, bool>::new();
    let mut user_counts = BTreeMap::<u32, usize>::new();
    for (uid, name) in in_turns(&names) {
        let user_count = user_counts.entry(uid).or_default();
        if *user_count >= QUERIED_WATCHERS_PER_USER_MAX || !may_continue() {
            connections.omitted_count += 1;
            continue;
        }
        match connect(name, uid) {
            // Another user has taken the name of this user.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {}
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(_) if connections.failed.len() >= QUERIED_WATCHERS_MAX => {
                connections.omitted_count += 1;
            }
            Err(error) => connections.failed.push((name, error)),
            Ok(connection) => {
                *user_count += 1;
                connections.add((uid, name, connection), |uid| {
                    *accounts.entry(uid).or_insert_with(|| has_account(uid))
                });
            }
        }
    }
    connections
}

/// Returns the names, which are sorted by the uids in them: the first one of each user, then the
/// second one of each user, and so on. Therefore a user with many names does not delay other users.
fn in_turns<'a>(names: &[(u32, &'a str)]) -> Vec<(u32, &'a str)> {
    let mut numbered = Vec::with_capacity(names.len());
    for names_of_user in names.chunk_by(|(uid, _), (next_uid, _)| uid == next_uid) {
        numbered.extend(names_of_user.iter().copied().enumerate());
    }
    numbered.sort_by_key(|(number, _)| *number);
    numbered.into_iter().map(|(_, name)| name).collect()
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
                let mut fds = [PollFd::new(listener.fd(), PollFlags::POLLIN)];
                poll(&mut fds, 20_000_u16).expect("somebody asks");
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

    /// A load watcher listens even if other users have taken all names that they can foresee.
    #[test]
    fn taken_names_do_not_silence_a_watcher() {
        let uid = nix::unistd::geteuid().as_raw();
        let vm = format!("taken-{}", std::process::id());
        let listeners: Vec<StatusListener> = (0..NUMBERED_NAMES_MAX + 2)
            .map(|_| StatusListener::open(uid, &vm).expect("listens"))
            .collect();
        let socket_list = proc::read_unix_sockets().expect("the kernel has it");
        let names: Vec<&str> = socket_list
            .lines()
            .filter_map(parse_socket_name)
            .map(|n| n.0)
            .collect();
        let own_names = names.iter().filter(|name| name.contains(&vm));
        assert_eq!(own_names.count(), listeners.len());
    }

    /// A load watcher that never answers does not delay the answers of others beyond the time
    /// limit, and is named.
    #[test]
    fn silent_watcher_is_named_after_time_limit() {
        let uid = nix::unistd::geteuid().as_raw();
        let vm = format!("silent-{}", std::process::id());
        let _listener = StatusListener::open(uid, &vm).expect("listens");
        let (_, errors) = query_all_within(Duration::from_millis(50)).expect("there is a list");
        let is_named = |line: &String| line.contains(&vm) && line.contains("0.05 s");
        assert!(errors.iter().any(is_named), "{errors:?}");
    }

    /// A query waits only for answers that are missing: it ends with the last answer.
    #[test]
    fn query_ends_with_last_answer() {
        let (mut servers, mut open_queries) = (Vec::new(), Vec::new());
        for name in ["first", "second", "malformed"] {
            let (server, client) = UnixStream::pair().expect("a pair");
            client.set_nonblocking(true).expect("a flag");
            servers.push(server);
            open_queries.push(OpenQuery {
                name: name.into(),
                pid: 0,
                stream: client,
                answer: Vec::new(),
            });
        }
        let status = WatcherStatus::default();
        let status_json = serde_json::to_vec(&status).expect("plain values");
        let mut waited_for = Vec::new();
        let answers = read_answers(&mut open_queries, |queries| {
            assert!(!queries.is_empty(), "nothing would end this wait");
            waited_for.push(queries.len());
            let mut server = servers.remove(0);
            if !servers.is_empty() {
                server.write_all(&status_json).expect("there is room");
            }
            true
        });
        assert_eq!(waited_for, [3, 2, 1]);
        assert!(open_queries.is_empty());
        let is_answered = answers.iter().map(|(name, a)| (name.as_str(), a.is_ok()));
        assert_eq!(
            is_answered.collect::<Vec<_>>(),
            [("first", true), ("second", true), ("malformed", false)]
        );
    }

    fn socket_lines(uid: u32, count: usize) -> String {
        let line = |number| format!("0: 2 0 10000 1 1 7 @{}\n", watcher_name(uid, number));
        (0..count).map(line).collect()
    }

    fn watcher_name(uid: u32, number: usize) -> String {
        format!("sempa-owner/{uid}/pvm/{number}")
    }

    /// The sockets of one user do not displace those of others.
    #[test]
    fn sockets_of_one_user_do_not_displace_others() {
        let list = socket_lines(5, 1000) + &socket_lines(6, 1);
        let connections = connect_to_owners(&list, |_, _| Ok(()), |_| true, || true);
        let count_of = |uid| {
            let uids = connections.open.iter().map(|(open_uid, ..)| *open_uid);
            uids.filter(|open_uid| *open_uid == uid).count()
        };
        assert_eq!(
            (count_of(5), count_of(6)),
            (QUERIED_WATCHERS_PER_USER_MAX, 1)
        );
        assert_eq!(
            connections.omitted_count,
            1000 - QUERIED_WATCHERS_PER_USER_MAX
        );
    }

    /// Sockets under the names of other users displace neither those of these users nor those of
    /// others, whether they accept connections or not.
    #[test]
    fn sockets_under_foreign_names_displace_nothing() {
        let forged_users = 0..2 * QUERIED_WATCHERS_MAX as u32;
        let list: String = forged_users
            .map(|uid| socket_lines(uid, 2 * QUERIED_WATCHERS_PER_USER_MAX))
            .collect();
        // Only the last socket of one user, and the only one of another, are genuine.
        let genuine = [
            watcher_name(7, 2 * QUERIED_WATCHERS_PER_USER_MAX - 1),
            watcher_name(1_000_000, 0),
        ];
        let list = list + &socket_lines(1_000_000, 1);
        let connect = |name: &str, uid: u32| match genuine.iter().any(|own_name| own_name == name) {
            true => Ok(()),
            false if uid.is_multiple_of(2) => {
                Err(io::Error::other("it has too many unanswered queries"))
            }
            false => Err(io::ErrorKind::PermissionDenied.into()),
        };
        let connections = connect_to_owners(&list, connect, |_| true, || true);
        let mut names: Vec<&str> = connections.open.iter().map(|(_, name, ())| *name).collect();
        names.sort_unstable();
        assert_eq!(names, [genuine[1].as_str(), genuine[0].as_str()]);
        assert_eq!(connections.failed.len(), QUERIED_WATCHERS_MAX);
    }

    /// If load watchers run under too many uids, those of users with an account displace others,
    /// and all that are not asked are counted.
    #[test]
    fn watchers_that_are_not_asked_are_counted() {
        let uid_count = QUERIED_WATCHERS_MAX as u32 + 50;
        let list: String = (0..uid_count).map(|uid| socket_lines(uid, 1)).collect();
        let looked_up = std::cell::RefCell::new(Vec::new());
        let has_account = |uid| {
            looked_up.borrow_mut().push(uid);
            uid < 10 || uid >= uid_count - 10
        };
        let connections = connect_to_owners(&list, |_, _| Ok(()), has_account, || true);
        let mut uids: Vec<u32> = connections.open.iter().map(|(uid, ..)| *uid).collect();
        uids.sort_unstable();
        assert_eq!(uids.len(), QUERIED_WATCHERS_MAX);
        assert!((0..10).all(|uid| uids.contains(&uid)));
        assert!((uid_count - 10..uid_count).all(|uid| uids.contains(&uid)));
        assert_eq!(connections.omitted_count, 50);
        let mut looked_up = looked_up.into_inner();
        let lookup_count = looked_up.len();
        looked_up.sort_unstable();
        looked_up.dedup();
        assert_eq!(looked_up.len(), lookup_count, "each uid is looked up once");
        // After the time limit no more connections are made.
        let attempts = std::cell::Cell::new(0);
        let connect = |_: &str, _| {
            attempts.set(attempts.get() + 1);
            Ok(())
        };
        let may_continue = || attempts.get() < 3;
        let connections = connect_to_owners(&list, connect, |_| true, may_continue);
        assert_eq!(connections.open.len(), 3);
        assert_eq!(connections.omitted_count, uid_count as usize - 3);
    }

    /// Load watchers for which there was no time are an error, not an answer.
    #[test]
    fn query_without_time_reports_what_it_has_not_asked() {
        let uid = nix::unistd::geteuid().as_raw();
        let vm = format!("unasked-{}", std::process::id());
        let _listener = StatusListener::open(uid, &vm).expect("listens");
        let (statuses, errors) = query_all_within(Duration::ZERO).expect("there is a list");
        assert!(statuses.is_empty());
        let is_counted = |line: &String| line.contains("more load watchers were not asked");
        assert!(errors.iter().any(is_counted), "{errors:?}");
    }

    /// The first socket of each user precedes the second one of any user.
    #[test]
    fn users_are_asked_in_turns() {
        let names = [(5, "a"), (5, "b"), (5, "c"), (6, "d"), (7, "e"), (7, "f")];
        let order: Vec<&str> = in_turns(&names).into_iter().map(|(_, name)| name).collect();
        assert_eq!(order, ["a", "d", "e", "b", "f", "c"]);
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
