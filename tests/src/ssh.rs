//! Logins on hosts of a testbed over ssh, with a terminal.

pub use crate::ssh_settings::{client_config, remote_shell};

use crate::run::{RunningCommand, wait_for};
use crate::testbed::{Host, Testbed};
use anyhow::{Context, Result};
use std::process::{ChildStdin, Stdio};
use std::time::Duration;

const STARTUP_TIMEOUT: Duration = Duration::from_secs(20);

/// A login on a host, with a terminal, from the desk. Dropping ends the login.
#[derive(Debug)]
pub struct Login {
    session: RunningCommand,
    input: Option<ChildStdin>,
}

impl Login {
    /// Logs in a user on a host with `ssh -tt`, and waits until the record of the login is in the
    /// host's utmp.
    pub fn new(testbed: &Testbed, user: &str, host: &Host) -> Result<Login> {
        let before = crate::utmp::logins(host)?.len();
        let mut command = testbed.desk().command("ssh");
        command
            .arg("-F")
            .arg(client_config(testbed.folder(), "root"))
            .arg("-tt")
            .arg(format!("{user}@{}", host.name()));
        let mut session = RunningCommand::start(command, Stdio::piped())?;
        let input = session.take_stdin().context("its input is piped")?;
        let mut login = Login {
            session,
            input: Some(input),
        };
        wait_for(STARTUP_TIMEOUT, || {
            if crate::utmp::logins(host).is_ok_and(|logins| logins.len() > before) {
                return Ok(());
            }
            let ended = login
                .session
                .poll()
                .ok()
                .flatten()
                .map(|status| format!(", ssh ended: {status}"));
            let words = login.session.err_so_far().unwrap_or_default();
            Err(format!(
                "no login of {user} on {}{} {}",
                host.name(),
                ended.unwrap_or_default(),
                words.trim()
            ))
        })?;
        Ok(login)
    }

    /// Logs out and waits until ssh has ended.
    ///
    /// # Errors
    /// ssh does not end.
    pub fn log_out(mut self) -> Result<()> {
        use std::io::Write;
        if let Some(mut input) = self.input.take() {
            // The shell may have ended before, so an error is ignored.
            let _ = input.write_all(b"exit\n");
        }
        let session = &mut self.session;
        wait_for(STARTUP_TIMEOUT, || match session.poll() {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err("the login session does not end".to_string()),
            Err(error) => Err(error.to_string()),
        })
    }
}
