//! Queries systemd-logind over D-Bus for the sessions and for the use of their screens. Desktops
//! report to logind when they are idle or locked, which neither session files nor terminals show.
//!
//! A separate thread keeps the connection and reads all sessions again after each signal of logind,
//! so that a bus that does not answer delays no one. Without a bus or without logind the result is
//! [`Evidence::Missing`] with the reason.

use crate::owner::Evidence;
use crate::sessions::{Idle, SESSIONS_MAX, Session, in_order, session};
use crate::system::wall;
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
pub const BUS: &str = "unix:path=/run/dbus/system_bus_socket";
/// Maximum time for an answer of logind; after that the connection is closed until the next
/// attempt.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Pause between two attempts to connect: at first, and its maximum after repeated failures. Most
/// machines without logind never get one.
const AGAIN: Duration = Duration::from_secs(60);
const AGAIN_MAX: Duration = Duration::from_secs(5 * 60);
/// Maximum number of queued signals.
const SIGNALS_MAX: usize = 256;

const LOGIND: &str = "org.freedesktop.login1";
const MANAGER_PATH: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";
const SESSION: &str = "org.freedesktop.login1.Session";

/// State that [`Logind`] shares with its thread.
#[derive(Debug)]
struct Known {
    sessions: Mutex<Evidence<Vec<Session>>>,
    news: EventFd,
}

/// Client of systemd-logind with its latest answer.
#[derive(Debug)]
pub struct Logind(Arc<Known>);

impl Logind {
    /// Starts to query logind on the bus with this D-Bus address. Nothing is known before the first
    /// answer.
    ///
    /// # Errors
    /// If the system has no descriptor or thread left.
    pub fn ask(address: String) -> std::io::Result<Logind> {
        let sessions = Mutex::new(Evidence::Missing("logind has not answered yet".into()));
        let news = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let known = Arc::new(Known { sessions, news });
        let theirs = Arc::clone(&known);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        std::thread::Builder::new()
            .name("logind".into())
            .spawn(move || {
                runtime.block_on(async {
                    let mut pause = AGAIN;
                    loop {
                        let Err(error) = converse(&address, &theirs).await;
                        if theirs.tell(Evidence::Missing(format!(
                            "logind cannot be asked over {address}: {error}"
                        ))) {
                            pause = AGAIN;
                        }
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(AGAIN_MAX);
                    }
                });
            })?;
        Ok(Logind(known))
    }

    /// Returns the descriptor, which is readable after the answer has changed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.news.as_fd()
    }

    /// Returns true once after the answer has changed.
    pub fn is_new(&self) -> bool {
        self.0.news.read().is_ok()
    }

    /// Returns the sessions of people.
    pub fn sessions(&self) -> Evidence<Vec<Session>> {
        self.0
            .sessions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Known {
    /// Stores a new answer. Returns true if it differs from the previous one.
    fn tell(&self, sessions: Evidence<Vec<Session>>) -> bool {
        let mut known = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = *known != sessions;
        if is_news {
            *known = sessions;
            // Fails only if the descriptor is already readable.
            let _ = self.news.write(1);
        }
        is_news
    }
}

/// Stores the answers of logind until the connection fails.
async fn converse(address: &str, known: &Known) -> zbus::Result<Infallible> {
    let builder = connection::Builder::address(address)?.method_timeout(ANSWER_TIME);
    let bus = tokio::time::timeout(ANSWER_TIME, builder.build());
    let bus = bus
        .await
        .map_err(|_| zbus::Error::Failure("the bus does not answer".into()))??;
    // Subscribe to signals before the first query, so that no change is lost.
    let signal = || MatchRule::builder().msg_type(message::Type::Signal);
    let said = signal().sender(LOGIND)?.build();
    let came_or_went = signal()
        .sender("org.freedesktop.DBus")?
        .member("NameOwnerChanged")?
        .add_arg(LOGIND)?
        .build();
    let mut said = MessageStream::for_match_rule(said, &bus, Some(SIGNALS_MAX)).await?;
    let mut came_or_went =
        MessageStream::for_match_rule(came_or_went, &bus, Some(SIGNALS_MAX)).await?;
    let mut locked = BTreeMap::new();
    loop {
        known.tell(Evidence::Known(read(&bus, &mut locked).await?));
        let news = tokio::select! {
            news = next(&mut said) => news,
            news = next(&mut came_or_went) => news,
        };
        news.unwrap_or_else(|| Err(zbus::Error::Failure("the bus has hung up".into())))?;
    }
}

async fn next(signals: &mut MessageStream) -> Option<zbus::Result<zbus::Message>> {
    std::future::poll_fn(|cx| Pin::new(&mut *signals).poll_next(cx)).await
}

/// Reads all sessions of people. `locked` holds the names of locked sessions, with the time at
/// which the lock was first seen.
async fn read(
    bus: &Connection,
    locked: &mut BTreeMap<String, Micros>,
) -> zbus::Result<Vec<Session>> {
    let answer = bus
        .call_method(
            Some(LOGIND),
            MANAGER_PATH,
            Some(MANAGER),
            "ListSessions",
            &(),
        )
        .await?;
    let listed: Vec<(String, u32, String, String, OwnedObjectPath)> =
        answer.body().deserialize()?;
    locked.retain(|name, _| listed.iter().any(|(listed, ..)| listed == name));
    let mut all = Vec::new();
    for (name, .., path) in listed.into_iter().take(SESSIONS_MAX) {
        let about = PropertiesProxy::builder(bus)
            .destination(LOGIND)?
            .path(&path)?
            .build()
            .await?;
        // A session that has just ended has no properties.
        let Ok(about) = about.get_all(InterfaceName::try_from(SESSION)?).await else {
            continue;
        };
        if flag(&about, "LockedHint") {
            locked.entry(name.clone()).or_insert_with(wall);
        } else {
            locked.remove(&name);
        }
        all.extend(of_properties(&name, &about, locked.get(&name).copied()));
    }
    Ok(in_order(all))
}

fn flag(about: &HashMap<String, OwnedValue>, name: &str) -> bool {
    about
        .get(name)
        .is_some_and(|value| bool::try_from(value) == Ok(true))
}

fn number(about: &HashMap<String, OwnedValue>, name: &str) -> Option<u64> {
    u64::try_from(about.get(name)?).ok()
}

/// Creates a session from its properties, which are mapped to the keys of a session file. `locked`
/// is the time at which its lock was first seen.
fn of_properties(
    name: &str,
    about: &HashMap<String, OwnedValue>,
    locked: Option<Micros>,
) -> Option<Session> {
    let text = |name: &str| {
        about
            .get(name)
            .and_then(|value| <&str>::try_from(value).ok())
            .map(str::to_string)
    };
    let found = session(name, |key| match key {
        "CLASS" => text("Class"),
        "STATE" => text("State"),
        "TYPE" => text("Type"),
        "USER" => text("Name"),
        "TTY" => text("TTY"),
        "DISPLAY" => text("Display"),
        "REMOTE" => Some(u8::from(flag(about, "Remote")).to_string()),
        "REMOTE_HOST" => text("RemoteHost"),
        "REALTIME" => number(about, "Timestamp").map(|at| at.to_string()),
        _ => None,
    })?;
    // Zero means that the desktop has never reported its use.
    let since = number(about, "IdleSinceHint")
        .filter(|since| *since > 0)
        .map(Micros);
    let idle = if flag(about, "IdleHint") { since } else { None };
    let idle = match (idle.into_iter().chain(locked).min(), since) {
        (Some(since), _) => Idle::Since(since),
        (None, Some(_)) => Idle::InUse,
        (None, None) => Idle::Unknown,
    };
    Some(Session { idle, ..found })
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

    fn idle(more: &[(&str, Value<'_>)], locked: Option<Micros>) -> Idle {
        of_properties("3", &desk(more), locked)
            .expect("somebody")
            .idle
    }

    /// The properties of a session give user, terminal, origin and start.
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
            idle,
        } = of_properties("3", &desk(&far), None).expect("somebody");
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
            (Micros(5), true, true, Idle::Unknown)
        );
        assert_eq!(
            of_properties("3", &desk(&[("Class", "greeter".into())]), None),
            None
        );
        assert_eq!(of_properties("3", &HashMap::new(), None), None);
    }

    /// The idle hint of a desktop determines the use of its screen; a locked screen counts as idle.
    #[test]
    fn idle_and_locked_hints_determine_screen_use() {
        let said =
            |hint: bool, since: u64| [("IdleHint", hint.into()), ("IdleSinceHint", since.into())];
        assert_eq!(idle(&said(true, 70), None), Idle::Since(Micros(70)));
        assert_eq!(idle(&said(false, 70), None), Idle::InUse);
        assert_eq!(
            idle(&said(false, 0), None),
            Idle::Unknown,
            "it has never said anything"
        );
        assert_eq!(idle(&said(true, 0), None), Idle::Unknown);
        assert_eq!(
            idle(&said(false, 70), Some(Micros(90))),
            Idle::Since(Micros(90))
        );
        assert_eq!(
            idle(&said(true, 70), Some(Micros(90))),
            Idle::Since(Micros(70))
        );
    }

    /// Properties of a wrong type are ignored.
    #[test]
    fn properties_of_wrong_type_are_ignored() {
        let wrong = [
            ("IdleHint", 1_u64.into()),
            ("IdleSinceHint", "long ago".into()),
            ("Timestamp", true.into()),
        ];
        assert_eq!(idle(&wrong, None), Idle::Unknown);
        assert_eq!(
            of_properties("3", &desk(&[("Name", 7_u32.into())]), None),
            None
        );
    }
}
