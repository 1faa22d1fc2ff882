//! The ssh command that starts daemons when `PVM_RSH` is not set. Prefers X25519 key exchange,
//! which is much cheaper.
//!
//! OpenSSH 8.5 to 9.9 prefers sntrup761 for key exchange. That costs 60 to 90 ms of processor time
//! per login, most of it on this host: a third of the time of a `pvm_addhosts`, and more than half
//! if several hosts are added together. X25519, next on ssh's list, costs less than 1 ms. sntrup761
//! protects against recordings that are decrypted in many years; they would reveal the certificate
//! of a daemon that is long gone, and daemons and tasks use X25519 among themselves in any case.
//!
//! The settings of the user and the administrator keep precedence:
//!
//! 1. ssh uses the first value that it finds for each setting. The daemon's settings file includes
//!    the user's and the system's files before it sets its own value.
//! 2. Before the first use, `ssh -G` is asked for the effective settings with and without the
//!    daemon's settings file. That file is used only if the key exchange is the only difference. An
//!    ssh with its settings elsewhere, an older ssh, or another program is used unchanged.
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::sync::OnceCell;
use tokio::time::timeout;

const SSH: &str = "ssh";
/// Disables password prompts, which the daemon cannot answer.
const BATCH_MODE: [&str; 2] = ["-o", "BatchMode=yes"];
/// The expensive key exchange algorithm.
const EXPENSIVE_KEX: &str = "sntrup761";
/// The cheap key exchange algorithm.
const CHEAP_KEX: &str = "curve25519-sha256";
/// Files that ssh reads by default, in ssh's order.
const DEFAULT_CONFIG_FILES: [&str; 2] = ["~/.ssh/config", "/etc/ssh/ssh_config"];
/// Prefix of the line with the key exchange algorithms in the output of `ssh -G`.
const KEX_LINE_PREFIX: &str = "kexalgorithms ";
/// Time limit for `ssh -G`, which may resolve host names.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// The command by which this daemon calls ssh.
#[derive(Debug)]
pub(crate) struct SshCommand {
    /// Path of the daemon's settings file for ssh.
    settings_path: PathBuf,
    /// True if the settings file is written and usable; not set before the first call.
    is_usable: OnceCell<bool>,
}

impl SshCommand {
    /// Creates the command. Nothing is written or run before the first call of
    /// [`SshCommand::command_words`].
    pub(crate) fn new(settings: PathBuf) -> SshCommand {
        SshCommand {
            settings_path: settings,
            is_usable: OnceCell::new(),
        }
    }

    /// Returns the command words before the host name. The check for the first host applies to all
    /// hosts.
    pub(crate) async fn command_words(&self, contact: &str, login: Option<&str>) -> Vec<String> {
        let usable = *self
            .is_usable
            .get_or_init(|| self.check_settings(contact, login))
            .await;
        let mut words = vec![SSH.to_string()];
        if usable {
            words.extend(["-F".to_string(), self.settings_path.display().to_string()]);
        }
        words.extend(BATCH_MODE.map(String::from));
        words
    }

    /// Writes the settings file. Returns true if its only effect is the cheaper key exchange.
    async fn check_settings(&self, contact: &str, login: Option<&str>) -> bool {
        if let Err(e) = write_settings(&self.settings_path) {
            tracing::warn!(
                "ssh is used as it is: cannot write {}: {e}",
                self.settings_path.display()
            );
            return false;
        }
        let (theirs, ours) = tokio::join!(
            effective_settings(None, contact, login),
            effective_settings(Some(&self.settings_path), contact, login)
        );
        let usable = theirs
            .zip(ours)
            .is_some_and(|(theirs, ours)| differs_only_in_kex(&theirs, &ours));
        if usable {
            tracing::info!("ssh uses the key exchange {CHEAP_KEX}");
        } else {
            let _ = std::fs::remove_file(&self.settings_path);
        }
        usable
    }
}

fn write_settings(path: &Path) -> std::io::Result<()> {
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    let includes = DEFAULT_CONFIG_FILES
        .map(|theirs| format!("Include {theirs}\n"))
        .concat();
    file.write_all(format!("{includes}KexAlgorithms ^{CHEAP_KEX}\n").as_bytes())
}

/// Returns the effective settings for a host, with ssh's own files or with the given one.
async fn effective_settings(
    settings: Option<&Path>,
    contact: &str,
    login: Option<&str>,
) -> Option<String> {
    let mut command = Command::new(SSH);
    if let Some(settings) = settings {
        command.arg("-F").arg(settings);
    }
    if let Some(user) = login {
        command.args(["-l", user]);
    }
    command.args(BATCH_MODE).args(["-G", contact]);
    command
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let done = timeout(QUERY_TIMEOUT, command.output()).await.ok()?.ok()?;
    (done.status.success()).then(|| String::from_utf8_lossy(&done.stdout).into_owned())
}

/// True if `theirs` prefers the slow algorithm, `ours` the quick one, and all other settings are
/// equal.
fn differs_only_in_kex(theirs: &str, ours: &str) -> bool {
    let first = |text: &str, wanted: &str| {
        text.lines()
            .filter_map(|line| line.strip_prefix(KEX_LINE_PREFIX))
            .any(|list| list.starts_with(wanted))
    };
    let others = |text: &str| -> Vec<String> {
        text.lines()
            .filter(|line| !line.starts_with(KEX_LINE_PREFIX))
            .map(String::from)
            .collect()
    };
    first(theirs, EXPENSIVE_KEX) && first(ours, CHEAP_KEX) && others(theirs) == others(ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT_CONFIG_FILES: &str =
        "host h2\nport 22\nkexalgorithms sntrup761x25519-sha512,curve25519-sha256\nuser root\n";
    const OURS: &str =
        "host h2\nport 22\nkexalgorithms curve25519-sha256,sntrup761x25519-sha512\nuser root\n";

    #[test]
    fn file_that_only_changes_key_exchange_is_used() {
        assert!(differs_only_in_kex(DEFAULT_CONFIG_FILES, OURS));
    }

    #[test]
    fn file_that_loses_settings_is_not_used() {
        assert!(!differs_only_in_kex(
            &DEFAULT_CONFIG_FILES.replace("port 22", "port 2222"),
            OURS
        ));
        assert!(!differs_only_in_kex(
            &format!("{DEFAULT_CONFIG_FILES}proxyjump gate\n"),
            OURS
        ));
    }

    #[test]
    fn ssh_with_quick_key_exchange_is_left_unchanged() {
        let newer = DEFAULT_CONFIG_FILES.replace("sntrup761x25519-sha512", "mlkem768x25519-sha256");
        assert!(!differs_only_in_kex(&newer, OURS));
    }

    #[test]
    fn user_chosen_key_exchange_is_kept() {
        let chosen = DEFAULT_CONFIG_FILES.replace(",curve25519-sha256", "");
        assert!(!differs_only_in_kex(&chosen, &chosen));
        assert!(!differs_only_in_kex("", ""));
    }
}
