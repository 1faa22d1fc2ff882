//! A fake systemd-logind on a system bus in a host. The bus is D-Bus's own daemon; the interfaces
//! are those of org.freedesktop.login1(5).

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
/// Path in the host of the system bus's socket.
const SOCKET_PATH: &str = "/run/dbus/system_bus_socket";
/// Path in the host of the bus configuration, which permits every message and name.
const CONFIG_PATH: &str = "/run/dbus/all.conf";
const STARTUP_TIMEOUT: Duration = Duration::from_secs(20);

const BUS_NAME: &str = "org.freedesktop.login1";
const MANAGER_PATH: &str = "/org/freedesktop/login1";
const SESSION_PATH: &str = "/org/freedesktop/login1/session/c1";

/// Returns which requirement of a system bus this machine does not meet; `None` if it meets all.
pub fn unmet_requirement() -> Option<String> {
    (!Path::new(DBUS_DAEMON).exists())
        .then(|| format!("{DBUS_DAEMON} is missing: install dbus-daemon"))
}

/// The state of the fake logind's only session: a desktop on terminal 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesktopSession {
    /// The name of the session's user.
    pub user: String,
    /// True if the desktop reports that it is idle.
    pub is_idle: bool,
    /// Time of the desktop's last report about idleness, in microseconds since 1970; zero if the
    /// desktop has not reported.
    pub idle_changed_us: u64,
    pub is_locked: bool,
}

type SharedSession = Arc<Mutex<Option<DesktopSession>>>;
/// An entry in the list of sessions: session name, user number, user name, seat, and object path.
type SessionListEntry = (String, u32, String, String, OwnedObjectPath);

fn session_state(session: &SharedSession) -> Option<DesktopSession> {
    session
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone()
}

/// The fake logind on the bus of a host. The bus ends with the host at the latest.
#[derive(Debug)]
pub struct FakeLogind {
    bus: RunningCommand,
    runtime: Runtime,
    connection: Connection,
    session: SharedSession,
}

impl FakeLogind {
    /// Starts the bus and the fake logind, without a session.
    pub fn start(host: &Host) -> Result<Self> {
        fs::create_dir_all(host.machine_path("/run/dbus"))?;
        let policy_rules = "<allow user='*'/><allow own='*'/><allow send_destination='*'/><allow receive_sender='*'/>";
        let listen_element =
            format!("<listen>unix:path={SOCKET_PATH}</listen><auth>EXTERNAL</auth>");
        let config = format!(
            "<busconfig>{listen_element}<policy context='default'>{policy_rules}</policy></busconfig>"
        );
        fs::write(host.machine_path(CONFIG_PATH), config)?;
        let mut command = host.root_command(DBUS_DAEMON);
        command.args([
            "--nofork",
            "--print-address=1",
            &format!("--config-file={CONFIG_PATH}"),
        ]);
        let bus = RunningCommand::start(command, Stdio::null())?;
        wait_for(STARTUP_TIMEOUT, || match bus.stdout_so_far() {
            Ok(out) if out.ends_with('\n') => Ok(()),
            other => Err(format!(
                "the bus names no address: {other:?}, {:?}",
                bus.stderr_so_far()
            )),
        })?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let session = SharedSession::default();
        let address = format!("unix:path={}", host.machine_path(SOCKET_PATH).display());
        let builder = connection::Builder::address(address.as_str())?.name(BUS_NAME)?;
        let builder = builder.serve_at(MANAGER_PATH, ManagerInterface(Arc::clone(&session)))?;
        let builder = builder.serve_at(SESSION_PATH, SessionInterface(Arc::clone(&session)))?;
        let connection = runtime.block_on(builder.build()).context("on the bus")?;
        Ok(Self {
            bus,
            runtime,
            connection,
            session,
        })
    }

    /// Sets the state of the session, or removes the session if `new_session` is `None`. Sends the
    /// D-Bus signals for the change.
    ///
    /// # Errors
    /// The bus has ended.
    pub fn set_session(&self, new_session: Option<DesktopSession>) -> Result<()> {
        let old_session = std::mem::replace(
            &mut *self.session.lock().unwrap_or_else(PoisonError::into_inner),
            new_session.clone(),
        );
        let session = ("c1", OwnedObjectPath::try_from(SESSION_PATH)?);
        let manager_interface = format!("{BUS_NAME}.Manager");
        let destination = None::<zbus::names::BusName<'_>>;
        self.runtime.block_on(async {
            match (old_session.is_some(), new_session.is_some()) {
                (false, true) => {
                    self.connection
                        .emit_signal(
                            destination,
                            MANAGER_PATH,
                            manager_interface,
                            "SessionNew",
                            &session,
                        )
                        .await
                }
                (true, false) => {
                    self.connection
                        .emit_signal(
                            destination,
                            MANAGER_PATH,
                            manager_interface,
                            "SessionRemoved",
                            &session,
                        )
                        .await
                }
                _ => {
                    let properties_interface = "org.freedesktop.DBus.Properties";
                    let changed_properties = HashMap::<&str, Value<'_>>::new();
                    let body = (
                        format!("{BUS_NAME}.Session"),
                        changed_properties,
                        vec!["IdleHint", "IdleSinceHint", "LockedHint"],
                    );
                    self.connection
                        .emit_signal(
                            destination,
                            SESSION_PATH,
                            properties_interface,
                            "PropertiesChanged",
                            &body,
                        )
                        .await
                }
            }
        })?;
        Ok(())
    }

    /// Ends the bus and the fake logind.
    pub fn stop(self) -> Result<()> {
        self.runtime.block_on(self.connection.close())?;
        self.bus.kill_children_and_wait()
    }
}

#[derive(Debug)]
struct ManagerInterface(SharedSession);

#[interface(name = "org.freedesktop.login1.Manager")]
impl ManagerInterface {
    fn list_sessions(&self) -> fdo::Result<Vec<SessionListEntry>> {
        let path = OwnedObjectPath::try_from(SESSION_PATH)
            .map_err(|error| fdo::Error::Failed(error.to_string()))?;
        Ok(session_state(&self.0)
            .into_iter()
            .map(|session| {
                (
                    "c1".into(),
                    1000,
                    session.user,
                    "seat0".into(),
                    path.clone(),
                )
            })
            .collect())
    }
}

#[derive(Debug)]
struct SessionInterface(SharedSession);

impl SessionInterface {
    fn state_or_error(&self) -> fdo::Result<DesktopSession> {
        session_state(&self.0).ok_or_else(|| fdo::Error::UnknownObject("it has ended".into()))
    }
}

#[interface(name = "org.freedesktop.login1.Session")]
impl SessionInterface {
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
        Ok(self.state_or_error()?.user)
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
        Ok(self.state_or_error()?.is_idle)
    }

    #[zbus(property)]
    fn idle_since_hint(&self) -> fdo::Result<u64> {
        Ok(self.state_or_error()?.idle_changed_us)
    }

    #[zbus(property)]
    fn locked_hint(&self) -> fdo::Result<bool> {
        Ok(self.state_or_error()?.is_locked)
    }
}
