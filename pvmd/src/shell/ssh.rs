//! The ssh that starts daemons when `PVM_RSH` does not say otherwise.
//!
//! OpenSSH 8.5 to 9.9 agrees on the key of a connection by sntrup761 first. That costs 60 to 90 ms of processor time for every
//! login, most of it here: a third of the time of a `pvm_addhosts`, and more than half of it when several hosts are added at
//! once. X25519, the next on its list, costs less than one. What sntrup761 is for, a recording that is broken in many years,
//! would show the certificate of a daemon that is long gone; what daemons and tasks say to each other they agree on by X25519 in any
//! case. So X25519 comes first here, unless the user or the administrator says something in the settings of ssh.
//!
//! That they win is left to ssh: of each setting it takes the first it finds, and our file includes theirs before it says its
//! own. Whether it has the same effect as theirs otherwise, ssh itself is asked once (`-G`): an ssh with its settings elsewhere, an older
//! one, or one that is no OpenSSH is used as it is.

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
/// A daemon cannot answer a question about a password.
const NO_QUESTIONS: [&str; 2] = ["-o", "BatchMode=yes"];
/// The agreement that costs much.
const SLOW: &str = "sntrup761";
/// The one that takes its place.
const QUICK: &str = "curve25519-sha256";
/// Settings that ssh reads by itself, in its order.
const THEIRS: [&str; 2] = ["~/.ssh/config", "/etc/ssh/ssh_config"];
/// The word before the agreements in what ssh says of its settings.
const AGREEMENTS: &str = "kexalgorithms ";
/// Time to say what the settings are; names may be looked up for that.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// How ssh is called by this daemon.
#[derive(Debug)]
pub(crate) struct Ssh {
    /// Where our settings go.
    settings: PathBuf,
    /// Whether they are there and good, once that is known.
    usable: OnceCell<bool>,
}

impl Ssh {
    /// Nothing is written or run before the first call.
    pub(crate) fn new(settings: PathBuf) -> Ssh {
        Ssh {
            settings,
            usable: OnceCell::new(),
        }
    }

    /// The words before the name of a host. The first host decides for all how ssh is called.
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

    /// Writes our settings and looks whether they do what they are for, and nothing else.
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

/// What ssh says its settings for a host are, with its own files or with this one.
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

/// True when theirs begins with the slow agreement, ours with the quick one, and all else is the same.
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
    fn settings_that_only_change_the_agreement_are_used() {
        assert!(only_quicker(THEIRS, OURS));
    }

    #[test]
    fn settings_that_would_be_lost_are_not() {
        assert!(!only_quicker(&THEIRS.replace("port 22", "port 2222"), OURS));
        assert!(!only_quicker(&format!("{THEIRS}proxyjump gate\n"), OURS));
    }

    #[test]
    fn an_ssh_whose_own_agreement_is_quick_is_used_as_it_is() {
        let newer = THEIRS.replace("sntrup761x25519-sha512", "mlkem768x25519-sha256");
        assert!(!only_quicker(&newer, OURS));
    }

    #[test]
    fn agreements_that_the_user_has_chosen_stay() {
        let chosen = THEIRS.replace(",curve25519-sha256", "");
        assert!(!only_quicker(&chosen, &chosen));
        assert!(!only_quicker("", ""));
    }
}
