//! Queries systemd-logind over D-Bus for the login sessions and for the use of their screens.
//! Desktops report to logind when they are idle or locked; neither session files nor terminals show
//! that.
//!
//! A separate thread owns the connection and reads all sessions again after each signal of logind,
//! so a bus that does not answer does not delay the load watcher. Without a bus or without logind
//! the result is [`Evidence::Unavailable`] with the reason.

use crate::owner::Evidence;
use crate::sessions::{SESSIONS_MAX, ScreenUse, Session, from_values, sorted_by_start};
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
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Initial interval between two attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum interval after repeated failures. On most machines without logind every attempt fails.
const RETRY_INTERVAL_MAX: Duration = Duration::from_secs(5 * 60);
/// Maximum number of queued D-Bus signals.
const SIGNALS_MAX: usize = 256;

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

/// Client of systemd-logind with its latest answer.
#[derive(Debug)]
pub struct LogindClient(Arc<SharedAnswer>);

impl LogindClient {
    /// Starts to query logind on the bus with this D-Bus address. The sessions are unavailable
    /// until the first answer.
    ///
    /// # Errors
    /// The system has no descriptor or thread left.
    pub fn start(address: String) -> std::io::Result<LogindClient> {
        let sessions = Mutex::new(Evidence::Unavailable("logind has not answered yet".into()));
        let news = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let known = Arc::new(SharedAnswer {
            sessions,
            change_event: news,
        });
        let shared = Arc::clone(&known);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        std::thread::Builder::new()
            .name("logind".into())
            .spawn(move || {
                runtime.block_on(async {
                    let mut pause = RETRY_INTERVAL;
                    loop {
                        let Err(error) = run_connection(&address, &shared).await;
                        if shared.store(Evidence::Unavailable(format!(
                            "logind cannot be asked over {address}: {error}"
                        ))) {
                            pause = RETRY_INTERVAL;
                        }
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(RETRY_INTERVAL_MAX);
                    }
                });
            })?;
        Ok(LogindClient(known))
    }

    /// Returns a descriptor that is readable when the answer has changed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.change_event.as_fd()
    }

    /// Returns true if the answer has changed since the last call.
    pub fn take_change(&self) -> bool {
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
    /// Stores a new answer. Returns true if it differs from the previous one.
    fn store(&self, sessions: Evidence<Vec<Session>>) -> bool {
        let mut known = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = *known != sessions;
        if is_news {
            *known = sessions;
            // Fails only if the descriptor is already readable.
            let _ = self.change_event.write(1);
        }
        is_news
    }
}

/// Queries logind and stores its answers until the connection fails.
async fn run_connection(address: &str, known: &SharedAnswer) -> zbus::Result<Infallible> {
    let builder = connection::Builder::address(address)?.method_timeout(ANSWER_TIMEOUT);
    let bus = tokio::time::timeout(ANSWER_TIMEOUT, builder.build());
    let bus = bus
        .await
        .map_err(|_| zbus::Error::Failure("the bus does not answer".into()))??;
    // Subscribe to signals before the first query, so that no change is lost.
    let signal = || MatchRule::builder().msg_type(message::Type::Signal);
    let logind_signals = signal().sender(LOGIND_SERVICE)?.build();
    let owner_changes = signal()
        .sender("org.freedesktop.DBus")?
        .member("NameOwnerChanged")?
        .add_arg(LOGIND_SERVICE)?
        .build();
    let mut logind_signals =
        MessageStream::for_match_rule(logind_signals, &bus, Some(SIGNALS_MAX)).await?;
    let mut owner_changes =
        MessageStream::for_match_rule(owner_changes, &bus, Some(SIGNALS_MAX)).await?;
    let mut locked = BTreeMap::new();
    loop {
        known.store(Evidence::Known(read_sessions(&bus, &mut locked).await?));
        let news = tokio::select! {
            news = next_signal(&mut logind_signals) => news,
            news = next_signal(&mut owner_changes) => news,
        };
        news.unwrap_or_else(|| Err(zbus::Error::Failure("the bus has hung up".into())))?;
    }
}

async fn next_signal(signals: &mut MessageStream) -> Option<zbus::Result<zbus::Message>> {
    std::future::poll_fn(|cx| Pin::new(&mut *signals).poll_next(cx)).await
}

/// Reads all sessions of persons. `locked` contains the locked sessions by name, with the time at
/// which the lock was first seen; it is updated.
async fn read_sessions(
    bus: &Connection,
    locked: &mut BTreeMap<String, Micros>,
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
    let listed: Vec<(String, u32, String, String, OwnedObjectPath)> =
        answer.body().deserialize()?;
    locked.retain(|name, _| listed.iter().any(|(listed, ..)| listed == name));
    let mut all = Vec::new();
    for (name, .., path) in listed.into_iter().take(SESSIONS_MAX) {
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
            locked.entry(name.clone()).or_insert_with(time_of_day);
        } else {
            locked.remove(&name);
        }
        all.extend(from_properties(
            &name,
            &properties,
            locked.get(&name).copied(),
        ));
    }
    Ok(sorted_by_start(all))
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
/// `locked` is the time at which the lock of its screen was first seen. `None` if the session does
/// not belong to a person.
fn from_properties(
    name: &str,
    properties: &HashMap<String, OwnedValue>,
    locked: Option<Micros>,
) -> Option<Session> {
    let text = |name: &str| {
        properties
            .get(name)
            .and_then(|value| <&str>::try_from(value).ok())
            .map(str::to_string)
    };
    let found = from_values(name, |key| match key {
        "CLASS" => text("Class"),
        "STATE" => text("State"),
        "TYPE" => text("Type"),
        "USER" => text("Name"),
        "TTY" => text("TTY"),
        "DISPLAY" => text("Display"),
        "REMOTE" => Some(u8::from(bool_property(properties, "Remote")).to_string()),
        "REMOTE_HOST" => text("RemoteHost"),
        "REALTIME" => u64_property(properties, "Timestamp").map(|at| at.to_string()),
        _ => None,
    })?;
    // Zero means that the desktop has never reported whether it is idle.
    let since = u64_property(properties, "IdleSinceHint")
        .filter(|since| *since > 0)
        .map(Micros);
    let idle = if bool_property(properties, "IdleHint") {
        since
    } else {
        None
    };
    let idle = match (idle.into_iter().chain(locked).min(), since) {
        (Some(since), _) => ScreenUse::IdleSince(since),
        (None, Some(_)) => ScreenUse::InUse,
        (None, None) => ScreenUse::Unknown,
    };
    Some(Session {
        screen_use: idle,
        ..found
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use zbus::zvariant::Value;

    fn desk(more: &[(&str, Value<'_>)]) -> HashMap<String, OwnedValue> {
        let text = [
            ("Class", "user"),
            ("State", "active"),
            ("Type", "wayland"),
            ("Name", "olga"),
            ("TTY", "tty2"),
        ];
        let text = text.map(|(name, value)| (name, Value::from(value)));
        let all = text
            .iter()
            .chain(more)
            .map(|(name, value)| (name.to_string(), value.try_to_owned().expect("plain")));
        all.collect()
    }

    fn idle(more: &[(&str, Value<'_>)], locked: Option<Micros>) -> ScreenUse {
        from_properties("3", &desk(more), locked)
            .expect("somebody")
            .screen_use
    }

    /// A session's properties contain user, terminal, origin and start.
    #[test]
    fn session_properties_give_user_terminal_and_start() {
        let far = [
            ("Timestamp", 5_u64.into()),
            ("Remote", true.into()),
            ("RemoteHost", "10.0.0.9".into()),
        ];
        let Session {
            login,
            remote,
            graphical,
            screen_use: idle,
        } = from_properties("3", &desk(&far), None).expect("somebody");
        assert_eq!(
            (
                login.user.as_str(),
                login.line.as_str(),
                login.from.as_str()
            ),
            ("olga", "tty2", "10.0.0.9")
        );
        assert_eq!(
            (login.at, remote, graphical, idle),
            (Micros(5), true, true, ScreenUse::Unknown)
        );
        assert_eq!(
            from_properties("3", &desk(&[("Class", "greeter".into())]), None),
            None
        );
        assert_eq!(from_properties("3", &HashMap::new(), None), None);
    }

    /// The idle hint of a desktop determines the use of its screen; a locked screen counts as idle.
    #[test]
    fn idle_and_locked_hints_determine_screen_use() {
        let said =
            |hint: bool, since: u64| [("IdleHint", hint.into()), ("IdleSinceHint", since.into())];
        assert_eq!(
            idle(&said(true, 70), None),
            ScreenUse::IdleSince(Micros(70))
        );
        assert_eq!(idle(&said(false, 70), None), ScreenUse::InUse);
        assert_eq!(
            idle(&said(false, 0), None),
            ScreenUse::Unknown,
            "it has never said anything"
        );
        assert_eq!(idle(&said(true, 0), None), ScreenUse::Unknown);
        assert_eq!(
            idle(&said(false, 70), Some(Micros(90))),
            ScreenUse::IdleSince(Micros(90))
        );
        assert_eq!(
            idle(&said(true, 70), Some(Micros(90))),
            ScreenUse::IdleSince(Micros(70))
        );
    }

    #[test]
    fn properties_of_wrong_type_are_ignored() {
        let wrong = [
            ("IdleHint", 1_u64.into()),
            ("IdleSinceHint", "long ago".into()),
            ("Timestamp", true.into()),
        ];
        assert_eq!(idle(&wrong, None), ScreenUse::Unknown);
        assert_eq!(
            from_properties("3", &desk(&[("Name", 7_u32.into())]), None),
            None
        );
    }
}
