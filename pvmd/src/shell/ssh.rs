//! The ssh command that starts daemons when `PVM_RSH` is not set. The command prefers X25519 key
//! exchange, which needs much less processor time than ssh's default.
//!
//! OpenSSH 8.5 to 9.9 prefers sntrup761 for key exchange. A login with sntrup761 costs 60 to 90 ms
//! of processor time, most of it on this host. This is a third of the time of a `pvm_addhosts`, and
//! more than half if several hosts are added together. X25519, the next algorithm in ssh's list,
//! costs less than 1 ms. sntrup761 protects against the decryption of recorded connections many
//! years later. Such a decryption would reveal only the certificate of a daemon that no longer
//! exists, and daemons and tasks use X25519 among themselves in any case.
//!
//! The settings of the user and the administrator have priority:
//!
//! 1. ssh uses the first value that it finds for each setting. The daemon's settings file includes
//!    the user's and the system's files before it sets its own value.
//! 2. Before the first use, `ssh -G` prints the effective settings with and without the daemon's
//!    settings file. The daemon's settings file is used only if the key exchange is the only
//!    difference. An ssh that reads its settings from other files, an older ssh, or another program
//!    is used unchanged.
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::sync::OnceCell;
use tokio::time::timeout;

/// Program that is searched in `PATH`.
const SSH_PROGRAM: &str = "ssh";
/// Disables password prompts, which the daemon cannot answer.
const BATCH_MODE: [&str; 2] = ["-o", "BatchMode=yes"];
/// The key exchange algorithm that needs much processor time.
const EXPENSIVE_KEX: &str = "sntrup761";
/// The key exchange algorithm that needs little processor time.
const CHEAP_KEX: &str = "curve25519-sha256";
/// Files that ssh reads by default, in the order in which ssh reads them.
const DEFAULT_SETTINGS: [&str; 2] = ["~/.ssh/config", "/etc/ssh/ssh_config"];
/// Prefix of the line with the key exchange algorithms in the output of `ssh -G`.
const KEX_LINE_PREFIX: &str = "kexalgorithms ";
/// Time limit for `ssh -G`, which may resolve host names.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// The command by which this daemon calls ssh.
#[derive(Debug)]
pub(crate) struct SshCommand {
    /// Path of the daemon's settings file for ssh.
    settings_path: PathBuf,
    /// True if the settings file exists and may be used; not set before the first call of
    /// [`SshCommand::command_words`].
    are_settings_usable: OnceCell<bool>,
}

impl SshCommand {
    /// Creates the command. Nothing is written or run before the first call of
    /// [`SshCommand::command_words`].
    pub(crate) fn new(settings_path: PathBuf) -> Self {
        Self {
            settings_path,
            are_settings_usable: OnceCell::new(),
        }
    }

    /// Returns the words of the command before the host name. The settings are checked for the
    /// first host only; the result of the check applies to all hosts.
    pub(crate) async fn command_words(&self, contact: &str, login: Option<&str>) -> Vec<String> {
        let is_usable = *self
            .are_settings_usable
            .get_or_init(|| self.check_settings(contact, login))
            .await;
        let mut words = vec![SSH_PROGRAM.to_string()];
        if is_usable {
            words.extend(["-F".to_string(), self.settings_path.display().to_string()]);
        }
        words.extend(BATCH_MODE.map(String::from));
        words
    }

    /// Writes the settings file. Returns true if the only effect of the file is the cheaper key
    /// exchange; otherwise removes the file and returns false.
    async fn check_settings(&self, contact: &str, login: Option<&str>) -> bool {
        if let Err(e) = write_settings(&self.settings_path) {
            tracing::warn!(
                "ssh is used as it is: cannot write {}: {e}",
                self.settings_path.display()
            );
            return false;
        }
        let (default_settings, daemon_settings) = tokio::join!(
            effective_settings(None, contact, login),
            effective_settings(Some(&self.settings_path), contact, login)
        );
        let is_usable = default_settings.zip(daemon_settings).is_some_and(
            |(default_settings, daemon_settings)| {
                differs_only_in_kex(&default_settings, &daemon_settings)
            },
        );
        if is_usable {
            tracing::info!("ssh uses the key exchange {CHEAP_KEX}");
        } else {
            let _ = std::fs::remove_file(&self.settings_path);
        }
        is_usable
    }
}

fn write_settings(path: &Path) -> std::io::Result<()> {
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    let include_lines = DEFAULT_SETTINGS
        .map(|default_file| format!("Include {default_file}\n"))
        .concat();
    file.write_all(format!("{include_lines}KexAlgorithms ^{CHEAP_KEX}\n").as_bytes())
}

/// Returns the effective settings for a host, as `ssh -G` prints them. `settings_path` is the
/// settings file; `None` means ssh's default files. Returns `None` if ssh fails.
async fn effective_settings(
    settings_path: Option<&Path>,
    contact: &str,
    login: Option<&str>,
) -> Option<String> {
    let mut command = Command::new(SSH_PROGRAM);
    if let Some(settings_path) = settings_path {
        command.arg("-F").arg(settings_path);
    }
    if let Some(user) = login {
        command.args(["-l", user]);
    }
    command.args(BATCH_MODE).args(["-G", contact]);
    command
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(QUERY_TIMEOUT, command.output()).await.ok()?.ok()?;
    (output.status.success()).then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// True if `default_settings` prefers the expensive algorithm, `daemon_settings` prefers the cheap
/// algorithm, and all other settings are equal.
fn differs_only_in_kex(default_settings: &str, daemon_settings: &str) -> bool {
    let prefers_algorithm = |text: &str, algorithm: &str| {
        text.lines()
            .filter_map(|line| line.strip_prefix(KEX_LINE_PREFIX))
            .any(|algorithm_list| algorithm_list.starts_with(algorithm))
    };
    let other_lines = |text: &str| -> Vec<String> {
        text.lines()
            .filter(|line| !line.starts_with(KEX_LINE_PREFIX))
            .map(String::from)
            .collect()
    };
    prefers_algorithm(default_settings, EXPENSIVE_KEX)
        && prefers_algorithm(daemon_settings, CHEAP_KEX)
        && other_lines(default_settings) == other_lines(daemon_settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT_SETTINGS: &str =
        "host h2\nport 22\nkexalgorithms sntrup761x25519-sha512,curve25519-sha256\nuser root\n";
    const DAEMON_SETTINGS: &str =
        "host h2\nport 22\nkexalgorithms curve25519-sha256,sntrup761x25519-sha512\nuser root\n";

    #[test]
    fn file_that_only_changes_key_exchange_is_used() {
        assert!(differs_only_in_kex(DEFAULT_SETTINGS, DAEMON_SETTINGS));
    }

    #[test]
    fn file_that_loses_settings_is_not_used() {
        assert!(!differs_only_in_kex(
            &DEFAULT_SETTINGS.replace("port 22", "port 2222"),
            DAEMON_SETTINGS
        ));
        assert!(!differs_only_in_kex(
            &format!("{DEFAULT_SETTINGS}proxyjump gate\n"),
            DAEMON_SETTINGS
        ));
    }

    #[test]
    fn ssh_with_quick_key_exchange_is_left_unchanged() {
        let newer_settings =
            DEFAULT_SETTINGS.replace("sntrup761x25519-sha512", "mlkem768x25519-sha256");
        assert!(!differs_only_in_kex(&newer_settings, DAEMON_SETTINGS));
    }

    #[test]
    fn user_chosen_key_exchange_is_kept() {
        let user_settings = DEFAULT_SETTINGS.replace(",curve25519-sha256", "");
        assert!(!differs_only_in_kex(&user_settings, &user_settings));
        assert!(!differs_only_in_kex("", ""));
    }
}
