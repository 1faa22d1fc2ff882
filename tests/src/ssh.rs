//! Logins to hosts of a testbed over ssh, with a terminal.

pub use crate::ssh_settings::{client_config_path, remote_shell_command};

use crate::run::{RunningCommand, wait_for};
use crate::testbed::{Host, Testbed};
use anyhow::{Context, Result};
use std::process::{ChildStdin, Stdio};
use std::time::Duration;

const STARTUP_TIMEOUT: Duration = Duration::from_secs(20);

/// A login from the outside host to another host of the testbed, with a terminal. Dropping the
/// value ends the login.
#[derive(Debug)]
pub struct SshLogin {
    ssh: RunningCommand,
    shell_input: Option<ChildStdin>,
}

impl SshLogin {
    /// Logs in a user on a host with `ssh -tt`, and waits until the login is in the host's utmp.
    pub fn log_in(testbed: &Testbed, user: &str, host: &Host) -> Result<Self> {
        let login_count = crate::utmp::read_logins(host)?.len();
        let mut command = testbed.outside_host().root_command("ssh");
        command
            .arg("-F")
            .arg(client_config_path(testbed.folder(), "root"))
            .arg("-tt")
            .arg(format!("{user}@{}", host.name()));
        let mut session = RunningCommand::start(command, Stdio::piped())?;
        let input = session.take_stdin().context("its input is piped")?;
        let mut login = Self {
            ssh: session,
            shell_input: Some(input),
        };
        wait_for(STARTUP_TIMEOUT, || {
            if crate::utmp::read_logins(host).is_ok_and(|logins| logins.len() > login_count) {
                return Ok(());
            }
            let end_text = login
                .ssh
                .poll_status()
                .ok()
                .flatten()
                .map(|status| format!(", ssh ended: {status}"));
            let error_text = login.ssh.stderr_so_far().unwrap_or_default();
            Err(format!(
                "no login of {user} on {}{} {}",
                host.name(),
                end_text.unwrap_or_default(),
                error_text.trim()
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
        if let Some(mut input) = self.shell_input.take() {
            // The shell may have ended already, so an error is ignored.
            let _ = input.write_all(b"exit\n");
        }
        let session = &mut self.ssh;
        wait_for(STARTUP_TIMEOUT, || match session.poll_status() {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err("the login session does not end".to_string()),
            Err(error) => Err(error.to_string()),
        })
    }
}
