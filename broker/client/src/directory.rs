//! Sessions in the mailbox of the virtual machine: finding a broker, starting one, and telling that
//! a session is over.

use crate::Error;
use crate::wire::{BROKER_CTX, decode, encode};
use libpvm::proto::message::ENC_XDR;
use libpvm::proto::task::{NotifyRequest, NotifySubjects};
use libpvm::proto::{PvmError, Tid};
use libpvm::{Body, Match, Vm};
use sempa_broker_session::SessionEnd;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Largest length of a session's name in bytes.
pub const SESSION_NAME_BYTES_MAX: usize = 64;
/// Largest number of running sessions in one virtual machine.
pub const SESSIONS_MAX: usize = 480;
/// Largest number of brokers on one host.
pub const SESSIONS_PER_HOST_MAX: usize = 48;
/// Number of entries above which old entries of ended sessions are removed: the virtual machine
/// remembers at least 256 ended sessions.
const ENTRIES_MAX: usize = SESSIONS_MAX + 256;
/// Number of entries of which the oldest are removed.
const SAMPLE_MAX: usize = 16;
/// Number of entries that a new session removes at most. Each session adds one.
const REMOVED_MAX: usize = 2;
/// Name of the broker's program.
const BROKER_PROGRAM: &str = "pvm-broker";

/// Flag of a mailbox entry that stays when its owner ends.
const PERSISTENT: i32 = 1;
/// Flag of a mailbox entry that other tasks may replace.
const OVERWRITABLE: i32 = 4;
/// Pause before the mailbox is read again while another broker starts.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

static NEXT_CONNECTION: AtomicI32 = AtomicI32::new(1);

/// Returns a number that this process has not used for a connection to a broker. The number is the
/// tag of all messages of the connection.
pub fn next_connection() -> i32 {
    NEXT_CONNECTION.fetch_add(1, Ordering::Relaxed)
}

/// Entry of a session in the mailbox of the virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionEntry {
    Running {
        /// Tid of the broker; the task may have ended.
        broker: i32,
        /// Name of the broker's host.
        host: String,
        /// Folder of the journal on that host.
        folder: String,
        /// Fingerprint of the session's certificate.
        fingerprint: String,
    },
    Over {
        end: SessionEnd,
        /// Time of the end, in seconds since 1970.
        ended_at: u64,
        /// Fingerprint of the session's certificate.
        fingerprint: String,
    },
}

/// Answer of a starting broker to the task that has started it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StartReport {
    Ready,
    /// Another broker serves the session.
    Taken,
    Failed(String),
}

/// True if the name can be part of a folder's name and of a mailbox name.
pub fn is_session_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty()
        && name.len() <= SESSION_NAME_BYTES_MAX
        && name.chars().all(is_allowed)
        && !name.starts_with('.')
}

const ENTRY_PREFIX: &str = "sempa-broker:";
const LOCK_PREFIX: &str = "sempa-broker-lock:";

/// Takes the right to serve a session until this task ends. Returns false if another task has it.
///
/// # Errors
/// Returns the daemon's error.
pub fn lock_session(vm: &Vm, session: &str) -> Result<bool, Error> {
    match vm.mailbox_put(&format!("{LOCK_PREFIX}{session}"), 0, "") {
        Ok(_) => Ok(true),
        Err(error) if error.code == PvmError::Denied => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Gives the right back.
pub fn unlock_session(vm: &Vm, session: &str) {
    // If the call fails, the entry goes with this task.
    let _ = vm.mailbox_delete(&format!("{LOCK_PREFIX}{session}"), 0);
}

/// Stores the entry of a session.
///
/// # Errors
/// Returns the daemon's error.
pub fn publish(vm: &Vm, session: &str, entry: &SessionEntry) -> Result<(), Error> {
    let body = Body {
        enc: ENC_XDR,
        bytes: encode(entry).into(),
    };
    let flags = PERSISTENT | OVERWRITABLE;
    vm.mailbox_put(&format!("{ENTRY_PREFIX}{session}"), flags, body)?;
    Ok(())
}

/// Returns the entry of a session, if there is one.
///
/// # Errors
/// Returns the daemon's error.
pub fn lookup(vm: &Vm, session: &str) -> Result<Option<SessionEntry>, Error> {
    match vm.mailbox_take(&format!("{ENTRY_PREFIX}{session}"), 0, 0) {
        Ok(message) => Ok(decode(&message.body)),
        Err(error) if error.code == PvmError::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Removes the entry of a session.
///
/// # Errors
/// Returns the daemon's error.
pub fn remove(vm: &Vm, session: &str) -> Result<(), Error> {
    match vm.mailbox_delete(&format!("{ENTRY_PREFIX}{session}"), 0) {
        Err(error) if error.code != PvmError::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Returns the names of all sessions of the virtual machine, also of those that are over.
///
/// # Errors
/// Returns the daemon's error.
pub fn names(vm: &Vm) -> Result<Vec<String>, Error> {
    let classes = vm.mailbox_list(ENTRY_PREFIX)?.into_iter();
    let names = classes.filter_map(|class| Some(class.name.strip_prefix(ENTRY_PREFIX)?.into()));
    Ok(names.collect())
}

/// Returns all sessions of the virtual machine. Asks the daemon once for each session.
///
/// # Errors
/// Returns the daemon's error.
pub fn list(vm: &Vm) -> Result<BTreeMap<String, SessionEntry>, Error> {
    let mut sessions = BTreeMap::new();
    for session in names(vm)? {
        if let Some(entry) = lookup(vm, &session)? {
            sessions.insert(session, entry);
        }
    }
    Ok(sessions)
}

/// Returns the brokers that run.
fn running_brokers(vm: &Vm) -> Result<Vec<Tid>, Error> {
    let locks = vm.mailbox_list(LOCK_PREFIX)?.into_iter();
    let locks = locks.filter(|class| class.name.starts_with(LOCK_PREFIX));
    let owners = locks.filter_map(|class| class.entries.first().map(|(_, owner, _)| *owner));
    Ok(owners.collect())
}

/// Removes old entries of ended sessions if there are more entries than [`ENTRIES_MAX`]. The number
/// of requests does not grow with the number of sessions.
///
/// A session that starts does this, and not one that ends: a task that reads the mailbox while many
/// sessions end hears of the last messages of all, and asks each sender about them (causal order).
///
/// # Errors
/// Returns the daemon's error.
fn forget_ended(vm: &Vm) -> Result<(), Error> {
    let sessions = names(vm)?;
    let surplus = sessions.len().saturating_sub(ENTRIES_MAX);
    if surplus == 0 {
        return Ok(());
    }
    // Starters at one moment, and successive starts of one task, read different entries.
    let seed = vm.tid().raw().wrapping_add(next_connection());
    let mut ended = Vec::new();
    for name in sample(&sessions, seed.unsigned_abs()) {
        if let Some(SessionEntry::Over { ended_at, .. }) = lookup(vm, name)? {
            ended.push((ended_at, name));
        }
    }
    ended.sort_unstable();
    for (_, name) in ended.into_iter().take(surplus.min(REMOVED_MAX)) {
        remove(vm, name)?;
    }
    Ok(())
}

/// Returns at most [`SAMPLE_MAX`] names at equal distances. Different seeds give different samples.
fn sample(names: &[String], seed: u32) -> impl Iterator<Item = &String> {
    let step = names.len().div_ceil(SAMPLE_MAX).max(1);
    names.iter().skip(seed as usize % step).step_by(step)
}

/// True if the task runs.
fn is_running(vm: &Vm, tid: Tid) -> bool {
    vm.tasks(tid).is_ok_and(|tasks| !tasks.is_empty())
}

/// Parameters of a broker that starts.
#[derive(Clone, Copy, Debug, Default)]
pub struct StartSettings<'a> {
    /// Arguments of `pvm-broker serve`.
    pub options: &'a [String],
    /// Host for the broker of a new session; `None` leaves the choice to the resource manager.
    pub host: Option<&'a str>,
}

/// Returns the tid of the session's broker. Starts the broker if the session has none: a new
/// session begins, or the session of a killed broker goes on.
///
/// # Errors
/// [`Error::Over`] if the session is over; [`Error::NoBroker`] if the broker of a new session
/// cannot start, or no broker starts before the deadline.
pub fn find_or_start(
    vm: &Vm,
    session: &str,
    settings: StartSettings<'_>,
    deadline: Instant,
) -> Result<Tid, Error> {
    if !is_session_name(session) {
        return Err(no_broker(
            session,
            format!(
                "a session's name has 1 to {SESSION_NAME_BYTES_MAX} letters, digits, '-', '_' or '.'"
            ),
        ));
    }
    let mut last_reason = String::from("no broker has answered in time");
    loop {
        let entry = lookup(vm, session)?;
        let is_new = entry.is_none();
        let host = match entry {
            Some(SessionEntry::Over { end, .. }) => {
                let session = session.to_string();
                return Err(Error::Over { session, end });
            }
            Some(SessionEntry::Running { broker, host, .. }) => {
                let broker = Tid::from_raw(broker);
                if is_running(vm, broker) {
                    return Ok(broker);
                }
                // The journal is on the host of the broker that was killed. If that host is lost, a
                // broker on another host finds the journal in a shared home directory, or ends the
                // session.
                Some(host).filter(|host| vm.config().is_ok_and(|c| c.find_by_name(host).is_some()))
            }
            None => {
                forget_ended(vm)?;
                match settings.host {
                    Some(host) => Some(host.to_string()),
                    None => choose_host(vm, session)?,
                }
            }
        };
        match start_broker(vm, session, settings.options, host.as_deref(), deadline)? {
            (broker, StartOutcome::Reported(StartReport::Ready)) => return Ok(broker),
            (_, StartOutcome::Reported(StartReport::Taken)) => {}
            (_, StartOutcome::Reported(StartReport::Failed(reason))) if is_new => {
                return Err(no_broker(session, reason));
            }
            (_, StartOutcome::Reported(StartReport::Failed(reason))) => last_reason = reason,
            (_, StartOutcome::NoReport(reason)) => last_reason = reason.to_string(),
        }
        if Instant::now() >= deadline {
            return Err(no_broker(session, last_reason));
        }
        // No message announces the entry of a broker that another task has started.
        vm.recv_timeout(nothing(), RETRY_PAUSE)?;
    }
}

/// The answer to the task that starts a broker.
#[derive(Clone, Debug, PartialEq, Eq)]
enum StartOutcome {
    Reported(StartReport),
    /// The broker has not reported, for this reason. Another attempt may succeed.
    NoReport(&'static str),
}

/// A selection that no message matches.
fn nothing() -> Match {
    Match::any().ctx(BROKER_CTX).tag(0)
}

fn no_broker(session: &str, reason: String) -> Error {
    Error::NoBroker {
        session: session.to_string(),
        reason,
    }
}

/// Returns the host for a new broker, see [`place_broker`].
fn choose_host(vm: &Vm, session: &str) -> Result<Option<String>, Error> {
    let config = vm.config()?;
    let hosts = || config.hosts.iter().map(|host| host.name.clone());
    // One request tells which brokers run. Only the entries tell whether a broker that still runs
    // has ended its session, and each entry is a request.
    let running = running_brokers(vm)?;
    let brokers = running
        .iter()
        .filter_map(|broker| Some(config.get(broker.birth_host()?)?.name.as_str()));
    if let Ok(host) = place_broker(hosts(), brokers) {
        return Ok(host);
    }
    let sessions = list(vm)?;
    let brokers = sessions.values().filter_map(|entry| match entry {
        SessionEntry::Running { host, .. } => Some(host.as_str()),
        SessionEntry::Over { .. } => None,
    });
    place_broker(hosts(), brokers).map_err(|limit| no_broker(session, limit.to_string()))
}

/// A limit on the number of sessions that keeps a broker from starting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
enum SessionLimit {
    #[error(
        "the limit sessions is reached: {SESSIONS_MAX} sessions run in this virtual machine; end some"
    )]
    Sessions,
    #[error(
        "the limit sessions-per-host is reached: each host has {SESSIONS_PER_HOST_MAX} brokers; add hosts or end \
         sessions"
    )]
    SessionsPerHost,
}

/// Returns the host for a new broker: `None` leaves the choice to the resource manager. As soon as
/// a host has too many brokers, the host with the fewest is named. `brokers` are the hosts of the
/// running brokers.
fn place_broker<'a>(
    hosts: impl Iterator<Item = String>,
    brokers: impl Iterator<Item = &'a str>,
) -> Result<Option<String>, SessionLimit> {
    let mut broker_counts: BTreeMap<String, usize> = hosts.map(|host| (host, 0)).collect();
    let mut session_count = 0;
    for host in brokers {
        session_count += 1;
        if let Some(count) = broker_counts.get_mut(host) {
            *count += 1;
        }
    }
    if session_count >= SESSIONS_MAX {
        return Err(SessionLimit::Sessions);
    }
    if broker_counts
        .values()
        .all(|count| *count < SESSIONS_PER_HOST_MAX)
    {
        return Ok(None);
    }
    let fewest = broker_counts.into_iter().min_by_key(|(_, count)| *count);
    match fewest {
        Some((host, count)) if count < SESSIONS_PER_HOST_MAX => Ok(Some(host)),
        _ => Err(SessionLimit::SessionsPerHost),
    }
}

/// Returns why the session of a certificate has ended, if this host is part of the user's virtual
/// machine and the virtual machine remembers that end.
pub(crate) fn recorded_end(session: &str, certificate_fingerprint: &str) -> Option<SessionEnd> {
    let vm = Vm::enroll().ok()?;
    let entry = lookup(&vm, session);
    // The answer counts, whether or not the daemon still hears of the end.
    let _ = vm.exit();
    match entry {
        Ok(Some(SessionEntry::Over {
            end, fingerprint, ..
        })) if fingerprint == certificate_fingerprint => Some(end),
        _ => None,
    }
}

fn start_broker(
    vm: &Vm,
    session: &str,
    broker_options: &[String],
    host: Option<&str>,
    deadline: Instant,
) -> Result<(Tid, StartOutcome), Error> {
    let connection = next_connection();
    // The broker is a job of its own, so that it outlives the member that starts it.
    let mut spawn = vm
        .spawner(BROKER_PROGRAM)
        .args(["serve", session, "--starter"])
        .arg(format!("{}:{connection}", vm.tid().raw()))
        .args(broker_options)
        .hide_parent();
    if let Some(host) = host {
        spawn = spawn.on_host(host);
    }
    let outcome = spawn.start()?;
    let Some(broker) = outcome.tasks.first().map(libpvm::Task::tid) else {
        let cause = outcome
            .failed
            .first()
            .map_or("unknown".to_string(), ToString::to_string);
        return Err(no_broker(
            session,
            format!(
                "the virtual machine did not start {BROKER_PROGRAM} ({cause}); install it on all hosts, or see \
                 'pvm events'"
            ),
        ));
    };
    let notice = NotifyRequest {
        subjects: NotifySubjects::TaskExit(vec![broker]),
        ctx: BROKER_CTX,
        tag: connection,
        is_cancellation: false,
    };
    vm.notify(notice.clone())?;
    let selection = Match::any().ctx(BROKER_CTX).tag(connection);
    let timeout = deadline.saturating_duration_since(Instant::now());
    let outcome = match vm.recv_timeout(selection, timeout)? {
        Some(message) if message.src == broker => match decode(&message.body) {
            Some(report) => StartOutcome::Reported(report),
            None => StartOutcome::NoReport("its version differs from this program's"),
        },
        Some(_) => StartOutcome::NoReport(
            "the broker ended while it started; 'pvm events' and the daemon's log tell why",
        ),
        None => StartOutcome::NoReport("the broker did not answer in time"),
    };
    // The cancellation sends the notice at once if it has not come; nobody reads it then.
    let cancellation = NotifyRequest {
        is_cancellation: true,
        ..notice
    };
    vm.notify(cancellation)?;
    while vm.try_recv(selection)?.is_some() {}
    Ok((broker, outcome))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(host_count: usize, brokers: &[(&str, usize)]) -> Result<Option<String>, SessionLimit> {
        let hosts = (1..=host_count).map(|number| format!("h{number}"));
        let brokers = brokers
            .iter()
            .flat_map(|(host, count)| vec![*host; *count].into_iter());
        place_broker(hosts, brokers)
    }

    /// The resource manager chooses until a host is full. Then the host with the fewest brokers is
    /// chosen. Brokers on hosts that are gone count only against the limit of the virtual machine.
    #[test]
    fn full_hosts_get_no_broker() {
        assert_eq!(place(2, &[("h1", 47), ("h2", 47)]), Ok(None));
        let second = Ok(Some("h2".to_string()));
        assert_eq!(place(2, &[("h1", 48), ("h2", 47)]), second);
        assert_eq!(place(1, &[("h1", 47), ("gone", 400)]), Ok(None));
    }

    /// Each limit refuses with its name.
    #[test]
    fn limits_on_sessions_have_names() {
        let per_host = place(2, &[("h1", 48), ("h2", 48)]).expect_err("both are full");
        assert!(per_host.to_string().contains("limit sessions-per-host is"));
        let total = place(1, &[("gone", SESSIONS_MAX)]).expect_err("too many");
        assert!(total.to_string().contains("limit sessions is"));
    }
}
