//! A fake systemd-logind on a bus in a host. The bus is D-Bus's own daemon; the interfaces are
//! those of org.freedesktop.login1(5).

use crate::Host;
use crate::run::{RunningCommand, wait_for};
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Runtime;
use zbus::zvariant::{OwnedObjectPath, Value};
use zbus::{Connection, connection, fdo, interface};

const DBUS_DAEMON: &str = "/usr/bin/dbus-daemon";
/// The socket of the system bus.
const SOCKET: &str = "/run/dbus/system_bus_socket";
/// Path in the host of the bus configuration, which permits everything.
const CONFIG: &str = "/run/dbus/all.conf";
const STARTUP_TIMEOUT: Duration = Duration::from_secs(20);

const BUS_NAME: &str = "org.freedesktop.login1";
const MANAGER_PATH: &str = "/org/freedesktop/login1";
const SESSION_PATH: &str = "/org/freedesktop/login1/session/c1";

/// Returns why no bus can run on this machine; `None` if one can.
pub fn lacks() -> Option<String> {
    (!Path::new(DBUS_DAEMON).exists())
        .then(|| format!("{DBUS_DAEMON} is missing: install dbus-daemon"))
}

/// The state of the fake's only session: a desktop on terminal 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesktopSession {
    /// The name of the session's user.
    pub user: String,
    /// True if the desktop reports that it is idle.
    pub idle: bool,
    /// Time of the desktop's last report about idleness, in microseconds since 1970; zero if there
    /// was none.
    pub idle_since: u64,
    pub locked: bool,
}

type SharedSession = Arc<Mutex<Option<DesktopSession>>>;
/// An entry in the list of sessions: session name, user number, user name, seat, and object path.
type ListedSession = (String, u32, String, String, OwnedObjectPath);

fn current_session(seat: &SharedSession) -> Option<DesktopSession> {
    seat.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The fake logind on the bus of a host. The bus ends with the host at the latest.
#[derive(Debug)]
pub struct Logind {
    bus: RunningCommand,
    runtime: Runtime,
    connection: Connection,
    seat: SharedSession,
}

impl Logind {
    /// Starts the bus and the fake logind, without a session.
    pub fn start(host: &Host) -> Result<Logind> {
        fs::create_dir_all(host.machine_path("/run/dbus"))?;
        let rules = "<allow user='*'/><allow own='*'/><allow send_destination='*'/><allow receive_sender='*'/>";
        let listen = format!("<listen>unix:path={SOCKET}</listen><auth>EXTERNAL</auth>");
        let config =
            format!("<busconfig>{listen}<policy context='default'>{rules}</policy></busconfig>");
        fs::write(host.machine_path(CONFIG), config)?;
        let mut command = host.command(DBUS_DAEMON);
        command.args([
            "--nofork",
            "--print-address=1",
            &format!("--config-file={CONFIG}"),
        ]);
        let bus = RunningCommand::start(command, Stdio::null())?;
        wait_for(STARTUP_TIMEOUT, || match bus.out_so_far() {
            Ok(out) if out.ends_with('\n') => Ok(()),
            other => Err(format!(
                "the bus names no address: {other:?}, {:?}",
                bus.err_so_far()
            )),
        })?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let seat = SharedSession::default();
        let address = format!("unix:path={}", host.machine_path(SOCKET).display());
        let builder = connection::Builder::address(address.as_str())?.name(BUS_NAME)?;
        let builder = builder.serve_at(MANAGER_PATH, Manager(Arc::clone(&seat)))?;
        let builder = builder.serve_at(SESSION_PATH, Session(Arc::clone(&seat)))?;
        let connection = runtime.block_on(builder.build()).context("on the bus")?;
        Ok(Logind {
            bus,
            runtime,
            connection,
            seat,
        })
    }

    /// Sets the state of the session, or removes the session if `desk` is `None`. Notifies all
    /// listeners.
    ///
    /// # Errors
    /// The bus has ended.
    pub fn set_session(&self, desk: Option<DesktopSession>) -> Result<()> {
        let before = std::mem::replace(
            &mut *self.seat.lock().unwrap_or_else(PoisonError::into_inner),
            desk.clone(),
        );
        let session = ("c1", OwnedObjectPath::try_from(SESSION_PATH)?);
        let manager = format!("{BUS_NAME}.Manager");
        let to = None::<zbus::names::BusName<'_>>;
        self.runtime.block_on(async {
            match (before.is_some(), desk.is_some()) {
                (false, true) => {
                    self.connection
                        .emit_signal(to, MANAGER_PATH, manager, "SessionNew", &session)
                        .await
                }
                (true, false) => {
                    self.connection
                        .emit_signal(to, MANAGER_PATH, manager, "SessionRemoved", &session)
                        .await
                }
                _ => {
                    let properties = "org.freedesktop.DBus.Properties";
                    let changed = HashMap::<&str, Value<'_>>::new();
                    let body = (
                        format!("{BUS_NAME}.Session"),
                        changed,
                        vec!["IdleHint", "IdleSinceHint", "LockedHint"],
                    );
                    self.connection
                        .emit_signal(to, SESSION_PATH, properties, "PropertiesChanged", &body)
                        .await
                }
            }
        })?;
        Ok(())
    }

    /// Ends the bus and the fake logind.
    pub fn end(self) -> Result<()> {
        self.runtime.block_on(self.connection.close())?;
        self.bus.end_inside()
    }
}

#[derive(Debug)]
struct Manager(SharedSession);

#[interface(name = "org.freedesktop.login1.Manager")]
impl Manager {
    fn list_sessions(&self) -> fdo::Result<Vec<ListedSession>> {
        let path = OwnedObjectPath::try_from(SESSION_PATH)
            .map_err(|error| fdo::Error::Failed(error.to_string()))?;
        Ok(current_session(&self.0)
            .into_iter()
            .map(|desk| ("c1".into(), 1000, desk.user, "seat0".into(), path.clone()))
            .collect())
    }
}

#[derive(Debug)]
struct Session(SharedSession);

impl Session {
    fn desk(&self) -> fdo::Result<DesktopSession> {
        current_session(&self.0).ok_or_else(|| fdo::Error::UnknownObject("it has ended".into()))
    }
}

#[interface(name = "org.freedesktop.login1.Session")]
impl Session {
    #[zbus(property)]
    fn class(&self) -> &str {
        "user"
    }

    #[zbus(property, name = "Type")]
    fn kind(&self) -> &str {
        "wayland"
    }

    #[zbus(property)]
    fn state(&self) -> &str {
        "active"
    }

    #[zbus(property)]
    fn name(&self) -> fdo::Result<String> {
        Ok(self.desk()?.user)
    }

    #[zbus(property, name = "TTY")]
    fn tty(&self) -> &str {
        "tty2"
    }

    #[zbus(property)]
    fn timestamp(&self) -> u64 {
        1_700_000_000_000_000
    }

    #[zbus(property)]
    fn remote(&self) -> bool {
        false
    }

    #[zbus(property)]
    fn idle_hint(&self) -> fdo::Result<bool> {
        Ok(self.desk()?.idle)
    }

    #[zbus(property)]
    fn idle_since_hint(&self) -> fdo::Result<u64> {
        Ok(self.desk()?.idle_since)
    }

    #[zbus(property)]
    fn locked_hint(&self) -> fdo::Result<bool> {
        Ok(self.desk()?.locked)
    }
}
