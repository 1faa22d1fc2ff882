//! Sets up ssh in the folder of a testbed: keys, and the settings of clients and daemons.

use crate::layout::{ALICE_UID, NETWORK, OLGA_UID, home_of};
use crate::run::run_ok;
use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const KEYGEN_TIMEOUT: Duration = Duration::from_secs(20);

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
        known.push_str(&format!("{name},{}.{i} {public}", NETWORK));
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
    run_ok(command, KEYGEN_TIMEOUT)?;
    let public = file.with_extension("pub");
    fs::set_permissions(&public, fs::Permissions::from_mode(0o644))?;
    Ok(fs::read_to_string(public)?)
}

/// Returns the path of the client settings of `root`, `alice` or `olga`. On the hosts ssh finds the
/// file without an option.
pub fn client_config(folder: &Path, user: &str) -> PathBuf {
    home_of(folder, user).join(".ssh/config")
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
