//! Sets up ssh in the folder of a testbed: keys, and the settings of clients and daemons.

use crate::layout::{Account, NETWORK_PREFIX, ORDINARY_USERS, ROOT, home_of};
use crate::run::run_successfully;
use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const KEYGEN_TIMEOUT: Duration = Duration::from_secs(20);

/// Makes the keys of users and hosts and the settings of clients and daemons, all in the testbed's
/// folder. `remote_env` contains the environment variables of commands that are started through
/// ssh.
pub(crate) fn make_keys_and_settings(
    folder: &Path,
    host_names: &[String],
    remote_env: &str,
) -> Result<()> {
    let ssh_folder = folder.join("ssh");
    fs::create_dir_all(&ssh_folder)?;
    let mut authorized_keys = String::new();
    for Account { name: user, uid } in [ROOT].into_iter().chain(ORDINARY_USERS) {
        let key_path = ssh_folder.join(format!("key-{user}"));
        authorized_keys.push_str(&make_key(&key_path, user)?);
        std::os::unix::fs::chown(&key_path, Some(uid), Some(uid))?;
        let config_file = client_config_path(folder, user);
        fs::create_dir_all(config_file.parent().context("it is in a folder")?)?;
        fs::write(config_file, client_settings(folder, &key_path))?;
    }
    fs::write(ssh_folder.join("authorized_keys"), authorized_keys)?;
    let mut known_hosts = String::new();
    for (i, name) in (1..).zip(host_names) {
        let host_folder = folder.join(name);
        fs::create_dir_all(&host_folder)?;
        let public_key = make_key(&host_folder.join("host_key"), name)?;
        known_hosts.push_str(&format!("{name},{}.{i} {public_key}", NETWORK_PREFIX));
        fs::write(
            host_folder.join("sshd_config"),
            daemon_settings(folder, &host_folder, remote_env),
        )?;
    }
    fs::write(ssh_folder.join("known_hosts"), known_hosts)?;
    Ok(())
}

fn make_key(key_file: &Path, key_comment: &str) -> Result<String> {
    let mut command = Command::new("ssh-keygen");
    command
        .args(["-q", "-t", "ed25519", "-N", "", "-C", key_comment, "-f"])
        .arg(key_file);
    run_successfully(command, KEYGEN_TIMEOUT)?;
    let public_key_file = key_file.with_extension("pub");
    fs::set_permissions(&public_key_file, fs::Permissions::from_mode(0o644))?;
    Ok(fs::read_to_string(public_key_file)?)
}

/// Returns the path of the client settings of `user`, which is `root` or an ordinary user. On the
/// hosts ssh finds the file without an option.
pub fn client_config_path(folder: &Path, user: &str) -> PathBuf {
    home_of(folder, user).join(".ssh/config")
}

/// Returns an ssh command with the settings of `user`, for programs that run outside the hosts.
pub fn remote_shell_command(folder: &Path, user: &str) -> String {
    format!("ssh -F {}", client_config_path(folder, user).display())
}

fn client_settings(folder: &Path, key_path: &Path) -> String {
    let known_hosts = folder.join("ssh/known_hosts");
    format!(
        "IdentityFile {}\nIdentitiesOnly yes\nIdentityAgent none\nUserKnownHostsFile {}\nGlobalKnownHostsFile /dev/null\n\
         StrictHostKeyChecking yes\nBatchMode yes\nConnectTimeout 5\nLogLevel ERROR\n",
        key_path.display(),
        known_hosts.display()
    )
}

fn daemon_settings(folder: &Path, host_folder: &Path, remote_env: &str) -> String {
    format!(
        "Port 22\nHostKey {host_folder}/host_key\nPidFile {host_folder}/sshd.pid\nAuthorizedKeysFile {all}/ssh/authorized_keys\n\
         StrictModes no\nUsePAM no\nPrintMotd no\nPrintLastLog no\nPermitRootLogin yes\nPasswordAuthentication no\n\
         KbdInteractiveAuthentication no\nUseDNS no\nMaxStartups 100\nMaxSessions 100\n\
         SetEnv {remote_env}\n",
        host_folder = host_folder.display(),
        all = folder.display(),
    )
}
