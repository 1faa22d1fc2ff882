//! Sets up ssh in a testbed: keys, daemons and client settings. Also makes logins with a terminal.

use crate::run::{RunningCommand, run_ok, wait_for};
use crate::testbed::{ALICE_UID, Host, OLGA_UID, Testbed};
use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

const STARTUP_TIMEOUT: Duration = Duration::from_secs(20);

/// Makes the keys of users and hosts and the settings of clients and daemons, all in the testbed's
/// folder. `remote` is the environment of commands that are started through ssh.
pub(crate) fn make_keys_and_settings(folder: &Path, names: &[String], remote: &str) -> Result<()> {
    let all = folder.join("ssh");
    fs::create_dir_all(&all)?;
    let mut authorized = String::new();
    for (user, uid) in [("root", 0), ("alice", ALICE_UID), ("olga", OLGA_UID)] {
        let key = all.join(format!("key-{user}"));
        authorized.push_str(&make_key(&key, user)?);
        std::os::unix::fs::chown(&key, Some(uid), Some(uid))?;
        let config = client_config(folder, user);
        fs::create_dir_all(config.parent().context("it is in a folder")?)?;
        fs::write(config, client_settings(folder, &key))?;
    }
    fs::write(all.join("authorized_keys"), authorized)?;
    let mut known = String::new();
    for (i, name) in (1..).zip(names) {
        let own = folder.join(name);
        fs::create_dir_all(&own)?;
        let public = make_key(&own.join("host_key"), name)?;
        known.push_str(&format!("{name},{}.{i} {public}", crate::testbed::NETWORK));
        fs::write(
            own.join("sshd_config"),
            daemon_settings(folder, &own, remote),
        )?;
    }
    fs::write(all.join("known_hosts"), known)?;
    Ok(())
}

fn make_key(file: &Path, comment: &str) -> Result<String> {
    let mut command = Command::new("ssh-keygen");
    command
        .args(["-q", "-t", "ed25519", "-N", "", "-C", comment, "-f"])
        .arg(file);
    run_ok(command, STARTUP_TIMEOUT)?;
    let public = file.with_extension("pub");
    fs::set_permissions(&public, fs::Permissions::from_mode(0o644))?;
    Ok(fs::read_to_string(public)?)
}

/// Returns the path of the client settings of `root`, `alice` or `olga`. On the hosts ssh finds the
/// file without an option.
pub fn client_config(folder: &Path, user: &str) -> PathBuf {
    crate::testbed::home_of(folder, user).join(".ssh/config")
}

/// Returns an ssh command with the settings of this user, for programs that run outside the hosts.
pub fn remote_shell(folder: &Path, user: &str) -> String {
    format!("ssh -F {}", client_config(folder, user).display())
}

fn client_settings(folder: &Path, key: &Path) -> String {
    let known = folder.join("ssh/known_hosts");
    format!(
        "IdentityFile {}\nIdentitiesOnly yes\nIdentityAgent none\nUserKnownHostsFile {}\nGlobalKnownHostsFile /dev/null\n\
         StrictHostKeyChecking yes\nBatchMode yes\nConnectTimeout 5\nLogLevel ERROR\n",
        key.display(),
        known.display()
    )
}

fn daemon_settings(folder: &Path, own: &Path, remote: &str) -> String {
    format!(
        "Port 22\nHostKey {own}/host_key\nPidFile {own}/sshd.pid\nAuthorizedKeysFile {all}/ssh/authorized_keys\n\
         StrictModes no\nUsePAM no\nPrintMotd no\nPrintLastLog no\nPermitRootLogin yes\nPasswordAuthentication no\n\
         KbdInteractiveAuthentication no\nUseDNS no\nMaxStartups 100\nMaxSessions 100\n\
         SetEnv {remote}\n",
        own = own.display(),
        all = folder.display(),
    )
}

/// Starts the sshd of a host and waits until it listens.
pub(crate) fn start_sshd(host: &Host, folder: &Path) -> Result<()> {
    let own = folder.join(host.name());
    let mut command = host.command("/usr/sbin/sshd");
    command
        .arg("-f")
        .arg(own.join("sshd_config"))
        .arg("-E")
        .arg(own.join("sshd.log"));
    run_ok(command, STARTUP_TIMEOUT)?;
    // sshd starts to listen before it writes its process number.
    wait_for(STARTUP_TIMEOUT, || {
        if own.join("sshd.pid").exists() {
            Ok(())
        } else {
            Err(format!("the sshd of {} does not listen", host.name()))
        }
    })
}

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
