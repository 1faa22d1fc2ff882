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
//! 1. ssh uses the first value it finds of each setting. Our file includes the user's and the
//!    system's files before it sets its own value.
//! 2. Before the first use, `ssh -G` is asked for the effective settings with and without our file.
//!    Our file is used only if the key exchange is the only difference. An ssh with its settings
//!    elsewhere, an older one, or another program is used unchanged.

use super::log::Log;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::sync::OnceCell;
use tokio::time::timeout;

const SSH: &str = "ssh";
/// The daemon cannot answer a password prompt.
const NO_QUESTIONS: [&str; 2] = ["-o", "BatchMode=yes"];
/// The expensive key exchange algorithm.
const SLOW: &str = "sntrup761";
/// The key exchange algorithm that replaces it.
const QUICK: &str = "curve25519-sha256";
/// Files that ssh reads by default, in ssh's order.
const THEIRS: [&str; 2] = ["~/.ssh/config", "/etc/ssh/ssh_config"];
/// Prefix of the line with the key exchange algorithms in the output of `ssh -G`.
const AGREEMENTS: &str = "kexalgorithms ";
/// Time limit for `ssh -G`, which may resolve host names.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// How this daemon calls ssh.
#[derive(Debug)]
pub(crate) struct Ssh {
    /// Path of our settings file.
    settings: PathBuf,
    /// Whether our settings file is written and usable, once that is known.
    usable: OnceCell<bool>,
}

impl Ssh {
    /// Writes and runs nothing before the first call.
    pub(crate) fn new(settings: PathBuf) -> Ssh {
        Ssh {
            settings,
            usable: OnceCell::new(),
        }
    }

    /// Returns the command words before the host name. The check for the first host applies to all
    /// hosts.
    pub(crate) async fn words(&self, contact: &str, login: Option<&str>, log: &Log) -> Vec<String> {
        let usable = *self
            .usable
            .get_or_init(|| self.try_out(contact, login, log))
            .await;
        let mut words = vec![SSH.to_string()];
        if usable {
            words.extend(["-F".to_string(), self.settings.display().to_string()]);
        }
        words.extend(NO_QUESTIONS.map(String::from));
        words
    }

    /// Writes our settings file. Returns true if its only effect is the cheaper key exchange.
    async fn try_out(&self, contact: &str, login: Option<&str>, log: &Log) -> bool {
        if let Err(e) = write(&self.settings) {
            log.line(format!(
                "ssh is used as it is: cannot write {}: {e}",
                self.settings.display()
            ));
            return false;
        }
        let (theirs, ours) = tokio::join!(
            effect(None, contact, login),
            effect(Some(&self.settings), contact, login)
        );
        let usable = theirs
            .zip(ours)
            .is_some_and(|(theirs, ours)| only_quicker(&theirs, &ours));
        if usable {
            log.line(format!("ssh is to agree on its keys by {QUICK}"));
        } else {
            let _ = std::fs::remove_file(&self.settings);
        }
        usable
    }
}

fn write(place: &Path) -> std::io::Result<()> {
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(place)?;
    let includes = THEIRS.map(|theirs| format!("Include {theirs}\n")).concat();
    file.write_all(format!("{includes}KexAlgorithms ^{QUICK}\n").as_bytes())
}

/// Returns the effective settings for a host, with ssh's own files or with the given one.
async fn effect(settings: Option<&Path>, contact: &str, login: Option<&str>) -> Option<String> {
    let mut command = Command::new(SSH);
    if let Some(settings) = settings {
        command.arg("-F").arg(settings);
    }
    if let Some(user) = login {
        command.args(["-l", user]);
    }
    command.args(NO_QUESTIONS).args(["-G", contact]);
    command
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let done = timeout(ANSWER_WITHIN, command.output()).await.ok()?.ok()?;
    (done.status.success()).then(|| String::from_utf8_lossy(&done.stdout).into_owned())
}

/// True if `theirs` prefers the slow algorithm, `ours` the quick one, and all other settings are
/// equal.
fn only_quicker(theirs: &str, ours: &str) -> bool {
    let first = |text: &str, wanted: &str| {
        text.lines()
            .filter_map(|line| line.strip_prefix(AGREEMENTS))
            .any(|list| list.starts_with(wanted))
    };
    let others = |text: &str| -> Vec<String> {
        text.lines()
            .filter(|line| !line.starts_with(AGREEMENTS))
            .map(String::from)
            .collect()
    };
    first(theirs, SLOW) && first(ours, QUICK) && others(theirs) == others(ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    const THEIRS: &str =
        "host h2\nport 22\nkexalgorithms sntrup761x25519-sha512,curve25519-sha256\nuser root\n";
    const OURS: &str =
        "host h2\nport 22\nkexalgorithms curve25519-sha256,sntrup761x25519-sha512\nuser root\n";

    #[test]
    fn file_that_only_changes_key_exchange_is_used() {
        assert!(only_quicker(THEIRS, OURS));
    }

    #[test]
    fn file_that_loses_settings_is_not_used() {
        assert!(!only_quicker(&THEIRS.replace("port 22", "port 2222"), OURS));
        assert!(!only_quicker(&format!("{THEIRS}proxyjump gate\n"), OURS));
    }

    #[test]
    fn ssh_with_quick_key_exchange_is_left_unchanged() {
        let newer = THEIRS.replace("sntrup761x25519-sha512", "mlkem768x25519-sha256");
        assert!(!only_quicker(&newer, OURS));
    }

    #[test]
    fn user_chosen_key_exchange_is_kept() {
        let chosen = THEIRS.replace(",curve25519-sha256", "");
        assert!(!only_quicker(&chosen, &chosen));
        assert!(!only_quicker("", ""));
    }
}
