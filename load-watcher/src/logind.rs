//! Queries systemd-logind over D-Bus for the login sessions and for the use of their screens.
//! Desktops report to logind when they are idle or locked; session files and terminals do not show
//! whether a desktop is idle or locked.
//!
//! A separate thread owns the connection and reads all sessions again after each signal of logind,
//! so a bus that does not answer does not delay the load watcher. Without a bus or without logind
//! the result is [`Evidence::Unavailable`] with the reason.

use crate::owner::Evidence;
use crate::sessions::{SESSIONS_MAX, ScreenUse, Session, session_from_values, sort_by_start};
use crate::system::time_of_day;
use nix::sys::eventfd::{EfdFlags, EventFd};
use sempa_proto::Micros;
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use zbus::export::futures_core::Stream;
use zbus::fdo::PropertiesProxy;
use zbus::names::InterfaceName;
use zbus::zvariant::{OwnedObjectPath, OwnedValue};
use zbus::{Connection, MatchRule, MessageStream, connection, message};

/// Address of the system bus.
pub const SYSTEM_BUS: &str = "unix:path=/run/dbus/system_bus_socket";
/// Time limit for an answer of logind; afterwards the connection is closed until the next attempt.
const LOGIND_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Initial interval between two attempts to connect.
const INITIAL_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum interval between two attempts to connect. The interval grows with each failure; on most
/// machines without logind every attempt fails.
const RETRY_INTERVAL_MAX: Duration = Duration::from_secs(5 * 60);
/// Maximum number of queued D-Bus signals.
const QUEUED_SIGNALS_MAX: usize = 256;

const LOGIND_SERVICE: &str = "org.freedesktop.login1";
const MANAGER_PATH: &str = "/org/freedesktop/login1";
const MANAGER_INTERFACE: &str = "org.freedesktop.login1.Manager";
const SESSION_INTERFACE: &str = "org.freedesktop.login1.Session";

/// State that [`LogindClient`] shares with its thread.
#[derive(Debug)]
struct SharedAnswer {
    sessions: Mutex<Evidence<Vec<Session>>>,
    change_event: EventFd,
}

/// Client of systemd-logind that stores the latest answer.
#[derive(Debug)]
pub struct LogindClient(Arc<SharedAnswer>);

impl LogindClient {
    /// Starts a thread that queries logind on the bus with the D-Bus address `address`. The
    /// sessions are unavailable until the first answer.
    ///
    /// # Errors
    /// The process has no free descriptor, or no thread can be created.
    pub fn start_queries(address: String) -> std::io::Result<Self> {
        let sessions = Mutex::new(Evidence::Unavailable("logind has not answered yet".into()));
        let change_event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let shared_answer = Arc::new(SharedAnswer {
            sessions,
            change_event,
        });
        let thread_answer = Arc::clone(&shared_answer);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        std::thread::Builder::new()
            .name("logind".into())
            .spawn(move || {
                runtime.block_on(async {
                    let mut retry_interval = INITIAL_RETRY_INTERVAL;
                    loop {
                        let Err(error) = run_connection(&address, &thread_answer).await;
                        if thread_answer.store_sessions(Evidence::Unavailable(format!(
                            "logind cannot be queried over {address}: {error}"
                        ))) {
                            retry_interval = INITIAL_RETRY_INTERVAL;
                        }
                        tokio::time::sleep(retry_interval).await;
                        retry_interval = (retry_interval * 2).min(RETRY_INTERVAL_MAX);
                    }
                });
            })?;
        Ok(Self(shared_answer))
    }

    /// Returns a descriptor that is readable after the answer has changed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.change_event.as_fd()
    }

    /// Returns true if the answer has changed since the last call.
    pub fn take_change_event(&self) -> bool {
        self.0.change_event.read().is_ok()
    }

    /// Returns logind's latest list of the sessions of persons.
    pub fn sessions(&self) -> Evidence<Vec<Session>> {
        self.0
            .sessions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl SharedAnswer {
    /// Stores a new answer and makes the descriptor readable if the answer differs from the
    /// previous one. Returns true if it differs.
    fn store_sessions(&self, sessions: Evidence<Vec<Session>>) -> bool {
        let mut stored_sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let has_changed = *stored_sessions != sessions;
        if has_changed {
            *stored_sessions = sessions;
            // Fails only if the descriptor is already readable.
            let _ = self.change_event.write(1);
        }
        has_changed
    }
}

/// Queries logind and stores its answers until the connection fails.
async fn run_connection(address: &str, shared_answer: &SharedAnswer) -> zbus::Result<Infallible> {
    let builder = connection::Builder::address(address)?.method_timeout(LOGIND_ANSWER_TIMEOUT);
    let bus = tokio::time::timeout(LOGIND_ANSWER_TIMEOUT, builder.build());
    let bus = bus
        .await
        .map_err(|_| zbus::Error::Failure("the bus does not answer".into()))??;
    // The signals are subscribed before the first query, so that no change is lost.
    let signal_rule_builder = || MatchRule::builder().msg_type(message::Type::Signal);
    let logind_signals = signal_rule_builder().sender(LOGIND_SERVICE)?.build();
    let owner_changes = signal_rule_builder()
        .sender("org.freedesktop.DBus")?
        .member("NameOwnerChanged")?
        .add_arg(LOGIND_SERVICE)?
        .build();
    let mut logind_signals =
        MessageStream::for_match_rule(logind_signals, &bus, Some(QUEUED_SIGNALS_MAX)).await?;
    let mut owner_changes =
        MessageStream::for_match_rule(owner_changes, &bus, Some(QUEUED_SIGNALS_MAX)).await?;
    let mut lock_times = BTreeMap::new();
    loop {
        shared_answer.store_sessions(Evidence::Known(read_sessions(&bus, &mut lock_times).await?));
        let signal_result = tokio::select! {
            signal_result = next_signal(&mut logind_signals) => signal_result,
            signal_result = next_signal(&mut owner_changes) => signal_result,
        };
        signal_result
            .unwrap_or_else(|| Err(zbus::Error::Failure("the bus closed the connection".into())))?;
    }
}

async fn next_signal(signals: &mut MessageStream) -> Option<zbus::Result<zbus::Message>> {
    std::future::poll_fn(|cx| Pin::new(&mut *signals).poll_next(cx)).await
}

/// Reads all sessions of persons. `lock_times` contains the time at which the lock of each locked
/// session was first seen, by session name; the function updates these times.
async fn read_sessions(
    bus: &Connection,
    lock_times: &mut BTreeMap<String, Micros>,
) -> zbus::Result<Vec<Session>> {
    let answer = bus
        .call_method(
            Some(LOGIND_SERVICE),
            MANAGER_PATH,
            Some(MANAGER_INTERFACE),
            "ListSessions",
            &(),
        )
        .await?;
    let session_list: Vec<(String, u32, String, String, OwnedObjectPath)> =
        answer.body().deserialize()?;
    lock_times.retain(|name, _| {
        session_list
            .iter()
            .any(|(session_list, ..)| session_list == name)
    });
    let mut sessions = Vec::new();
    for (name, .., path) in session_list.into_iter().take(SESSIONS_MAX) {
        let properties = PropertiesProxy::builder(bus)
            .destination(LOGIND_SERVICE)?
            .path(&path)?
            .build()
            .await?;
        // A session that has just ended has no properties, and is skipped.
        let Ok(properties) = properties
            .get_all(InterfaceName::try_from(SESSION_INTERFACE)?)
            .await
        else {
            continue;
        };
        if bool_property(&properties, "LockedHint") {
            lock_times.entry(name.clone()).or_insert_with(time_of_day);
        } else {
            lock_times.remove(&name);
        }
        sessions.extend(session_from_properties(
            &name,
            &properties,
            lock_times.get(&name).copied(),
        ));
    }
    Ok(sort_by_start(sessions))
}

fn bool_property(properties: &HashMap<String, OwnedValue>, name: &str) -> bool {
    properties
        .get(name)
        .is_some_and(|value| bool::try_from(value) == Ok(true))
}

fn u64_property(properties: &HashMap<String, OwnedValue>, name: &str) -> Option<u64> {
    u64::try_from(properties.get(name)?).ok()
}

/// Creates a session from its D-Bus properties, which are mapped to the keys of a session file.
/// `locked_since` is the time at which the lock of the session's screen was first seen; `None` if
/// the screen is not locked. Returns `None` if the session does not belong to a person.
fn session_from_properties(
    name: &str,
    properties: &HashMap<String, OwnedValue>,
    locked_since: Option<Micros>,
) -> Option<Session> {
    let text_property = |name: &str| {
        properties
            .get(name)
            .and_then(|value| <&str>::try_from(value).ok())
            .map(str::to_string)
    };
    let session = session_from_values(name, |key| match key {
        "CLASS" => text_property("Class"),
        "STATE" => text_property("State"),
        "TYPE" => text_property("Type"),
        "USER" => text_property("Name"),
        "TTY" => text_property("TTY"),
        "DISPLAY" => text_property("Display"),
        "REMOTE" => Some(u8::from(bool_property(properties, "Remote")).to_string()),
        "REMOTE_HOST" => text_property("RemoteHost"),
        "REALTIME" => u64_property(properties, "Timestamp").map(|at| at.to_string()),
        _ => None,
    })?;
    // Zero means that the desktop has never reported whether it is idle.
    let idle_since_hint = u64_property(properties, "IdleSinceHint")
        .filter(|idle_since_hint| *idle_since_hint > 0)
        .map(Micros);
    let reported_use = if bool_property(properties, "IdleHint") {
        idle_since_hint
    } else {
        None
    };
    let reported_use = match (
        reported_use.into_iter().chain(locked_since).min(),
        idle_since_hint,
    ) {
        (Some(idle_since_hint), _) => ScreenUse::IdleSince(idle_since_hint),
        (None, Some(_)) => ScreenUse::InUse,
        (None, None) => ScreenUse::Unknown,
    };
    Some(Session {
        screen_use: reported_use,
        ..session
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use zbus::zvariant::Value;

    fn desktop_properties(
        additional_properties: &[(&str, Value<'_>)],
    ) -> HashMap<String, OwnedValue> {
        let text_properties = [
            ("Class", "user"),
            ("State", "active"),
            ("Type", "wayland"),
            ("Name", "olga"),
            ("TTY", "tty2"),
        ];
        let text_properties = text_properties.map(|(name, value)| (name, Value::from(value)));
        let properties = text_properties
            .iter()
            .chain(additional_properties)
            .map(|(name, value)| (name.to_string(), value.try_to_owned().expect("plain")));
        properties.collect()
    }

    fn parsed_screen_use(
        additional: &[(&str, Value<'_>)],
        locked_since: Option<Micros>,
    ) -> ScreenUse {
        session_from_properties("3", &desktop_properties(additional), locked_since)
            .expect("somebody")
            .screen_use
    }

    #[test]
    fn session_properties_give_user_terminal_and_start() {
        let remote_properties = [
            ("Timestamp", 5_u64.into()),
            ("Remote", true.into()),
            ("RemoteHost", "10.0.0.9".into()),
        ];
        let Session {
            login,
            is_remote,
            has_screen,
            screen_use: reported_use,
        } = session_from_properties("3", &desktop_properties(&remote_properties), None)
            .expect("somebody");
        assert_eq!(
            (
                login.user_name.as_str(),
                login.terminal.as_str(),
                login.origin.as_str()
            ),
            ("olga", "tty2", "10.0.0.9")
        );
        assert_eq!(
            (login.at, is_remote, has_screen, reported_use),
            (Micros(5), true, true, ScreenUse::Unknown)
        );
        assert_eq!(
            session_from_properties(
                "3",
                &desktop_properties(&[("Class", "greeter".into())]),
                None
            ),
            None
        );
        assert_eq!(session_from_properties("3", &HashMap::new(), None), None);
    }

    /// A locked screen counts as idle even if the desktop does not report that it is idle.
    #[test]
    fn idle_and_locked_hints_determine_screen_use() {
        let idle_hints =
            |hint: bool, since: u64| [("IdleHint", hint.into()), ("IdleSinceHint", since.into())];
        assert_eq!(
            parsed_screen_use(&idle_hints(true, 70), None),
            ScreenUse::IdleSince(Micros(70))
        );
        assert_eq!(
            parsed_screen_use(&idle_hints(false, 70), None),
            ScreenUse::InUse
        );
        assert_eq!(
            parsed_screen_use(&idle_hints(false, 0), None),
            ScreenUse::Unknown,
            "it has never said anything"
        );
        assert_eq!(
            parsed_screen_use(&idle_hints(true, 0), None),
            ScreenUse::Unknown
        );
        assert_eq!(
            parsed_screen_use(&idle_hints(false, 70), Some(Micros(90))),
            ScreenUse::IdleSince(Micros(90))
        );
        assert_eq!(
            parsed_screen_use(&idle_hints(true, 70), Some(Micros(90))),
            ScreenUse::IdleSince(Micros(70))
        );
    }

    #[test]
    fn properties_of_wrong_type_are_ignored() {
        let wrong_types = [
            ("IdleHint", 1_u64.into()),
            ("IdleSinceHint", "long ago".into()),
            ("Timestamp", true.into()),
        ];
        assert_eq!(parsed_screen_use(&wrong_types, None), ScreenUse::Unknown);
        assert_eq!(
            session_from_properties("3", &desktop_properties(&[("Name", 7_u32.into())]), None),
            None
        );
    }
}
