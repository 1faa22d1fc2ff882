//! Asks systemd-logind over D-Bus who has a session, and whether somebody uses its screen: desktops tell it when nobody has
//! touched them for a while, and when they are locked, which neither session files nor terminals say.
//!
//! A thread of its own keeps the connection and reads everything anew when logind has news, so that a bus that does not answer
//! delays nobody. Without a bus, or a logind on it, there is only a reason why.

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

/// The bus of the system.
pub const BUS: &str = "unix:path=/run/dbus/system_bus_socket";
/// Without an answer for so long logind is asked no more, until the next attempt.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Between two attempts to reach it, at first; and at most, where it has never answered or not for long: most machines that have none
/// will not get one.
const AGAIN: Duration = Duration::from_secs(60);
const AGAIN_MAX: Duration = Duration::from_secs(5 * 60);
/// Signals that may wait to be read.
const SIGNALS_MAX: usize = 256;

const LOGIND: &str = "org.freedesktop.login1";
const MANAGER_PATH: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";
const SESSION: &str = "org.freedesktop.login1.Session";

/// What [`Logind`] and its thread share.
#[derive(Debug)]
struct Known {
    sessions: Mutex<Evidence<Vec<Session>>>,
    news: EventFd,
}

/// What systemd-logind says, as far as it has answered.
#[derive(Debug)]
pub struct Logind(Arc<Known>);

impl Logind {
    /// Begins to ask the logind that is on the bus with this address, as D-Bus writes it. Nothing is known before it answers.
    ///
    /// # Errors
    /// The system gives no descriptor or thread.
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

    /// Becomes readable when it says something else than before.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.news.as_fd()
    }

    /// True once after it has said something else than before.
    pub fn is_new(&self) -> bool {
        self.0.news.read().is_ok()
    }

    /// The sessions of people.
    pub fn sessions(&self) -> Evidence<Vec<Session>> {
        self.0
            .sessions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Known {
    /// True when that is news.
    fn tell(&self, sessions: Evidence<Vec<Session>>) -> bool {
        let mut known = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = *known != sessions;
        if is_news {
            *known = sessions;
            // It is readable already if it cannot be written.
            let _ = self.news.write(1);
        }
        is_news
    }
}

/// Tells what logind says, as long as it can be asked.
async fn converse(address: &str, known: &Known) -> zbus::Result<Infallible> {
    let builder = connection::Builder::address(address)?.method_timeout(ANSWER_TIME);
    let bus = tokio::time::timeout(ANSWER_TIME, builder.build());
    let bus = bus
        .await
        .map_err(|_| zbus::Error::Failure("the bus does not answer".into()))??;
    // Signals first, so that no change falls between.
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

/// All sessions of people. `locked`: since when sessions were seen to be locked, by their names.
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
        // One that has just ended is gone.
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

/// A session by its properties, under the names that its file would have. `locked`: since when it is known to be locked.
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
    // Zero: its desktop has never said whether somebody uses it.
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

    #[test]
    fn a_session_by_its_properties_says_who_where_and_since_when() {
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

    #[test]
    fn a_desktop_that_has_said_so_is_in_use_or_idle_and_a_locked_one_is_not_used() {
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

    #[test]
    fn values_of_other_types_are_as_good_as_none() {
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
