//! Reads the sources of the signs of the owner's presence: session files, terminals and interrupt
//! counters.

use crate::owner::{Evidence, InputActivity};
use crate::proc::input_interrupts;
use crate::sessions::{
    SESSION_BYTES_MAX, SESSIONS_MAX, Session, parse_session_file, sorted_by_start,
};
use sempa_proto::Micros;
use sempa_proto::load::Login;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Directory of systemd-logind's session files.
pub const SESSIONS_DIR: &str = "/run/systemd/sessions";
pub const TERMINALS_DIR: &str = "/dev";
/// File with the kernel's interrupt counters.
pub const INTERRUPTS_FILE: &str = "/proc/interrupts";
/// Interval at which a machine without keyboard and mouse is examined again, because devices may
/// have been connected.
pub const INPUT_RETRY_INTERVAL: Micros = Micros::from_secs(600);
/// Maximum number of bytes that are read from the interrupt counters.
const INTERRUPTS_BYTES_MAX: u64 = 256 << 10;

/// Reads the session files in this directory.
pub fn read_session_files(dir: &Path) -> Evidence<Vec<Session>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Evidence::Unavailable(format!(
                "{} does not exist (no systemd-logind)",
                dir.display()
            ));
        }
        Err(e) => return Evidence::Unavailable(format!("{} cannot be read: {e}", dir.display())),
    };
    let mut all = Vec::new();
    for entry in entries.flatten().take(SESSIONS_MAX) {
        // Each session also has a named pipe in this directory, which must not be opened.
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains('.') || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let mut text = Vec::new();
        let read = File::open(entry.path())
            .and_then(|f| f.take(SESSION_BYTES_MAX as u64).read_to_end(&mut text));
        // The file of a session that has just ended may be missing; it is skipped.
        all.extend(
            read.ok()
                .and_then(|_| parse_session_file(&name, &String::from_utf8_lossy(&text))),
        );
    }
    Evidence::Known(sorted_by_start(all))
}

/// Returns the time of the last input at the terminal of each login, by terminal line. The kernel
/// updates the time with a resolution of eight seconds.
pub fn terminal_input_times(dir: &Path, logins: &[Login]) -> BTreeMap<String, Micros> {
    let last = |login: &Login| {
        // The lines come from files that other programs write, so only paths inside the directory
        // are accepted.
        let inside = !login.line.starts_with('/')
            && !login
                .line
                .split('/')
                .any(|part| part == ".." || part.is_empty());
        let metadata = fs::metadata(dir.join(&login.line))
            .ok()
            .filter(|metadata| inside && !metadata.is_dir())?;
        let seconds = u64::try_from(metadata.atime()).ok()?;
        Some((
            login.line.clone(),
            Micros::from_secs(seconds) + Micros(metadata.atime_nsec().unsigned_abs() / 1000),
        ))
    };
    logins.iter().filter_map(last).collect()
}

/// Detects the use of keyboard and mouse by their interrupt counters.
#[derive(Debug)]
pub struct InputProbe {
    path: PathBuf,
    file: Option<File>,
    text: Vec<u8>,
    interrupt_count: Option<u64>,
    evidence: Evidence<InputActivity>,
    retry_at: Option<Micros>,
}

impl InputProbe {
    pub fn new(path: PathBuf) -> InputProbe {
        let evidence = Evidence::Unavailable("not looked at yet".into());
        InputProbe {
            path,
            file: None,
            text: Vec::new(),
            interrupt_count: None,
            evidence,
            retry_at: None,
        }
    }

    /// Returns the observed use of keyboard and mouse.
    pub fn evidence(&self) -> &Evidence<InputActivity> {
        &self.evidence
    }

    /// Reads the interrupt counters at the time of day `now`. Does nothing if the last attempt,
    /// less than [`INPUT_RETRY_INTERVAL`] ago, found no keyboard.
    pub fn poll(&mut self, now: Micros) {
        if self
            .retry_at
            .is_some_and(|again| now < again && now + INPUT_RETRY_INTERVAL >= again)
        {
            return;
        }
        self.retry_at = None;
        let missing = |sense: &mut InputProbe, why: String| {
            (sense.evidence, sense.interrupt_count, sense.retry_at) = (
                Evidence::Unavailable(why),
                None,
                Some(now + INPUT_RETRY_INTERVAL),
            );
            sense.text = Vec::new();
        };
        if let Err(e) = self.read_counters() {
            self.file = None;
            let why = format!("{} cannot be read: {e}", self.path.display());
            return missing(self, why);
        }
        let Some(count) = input_interrupts(&self.text) else {
            let why = format!(
                "no keyboard or mouse with interrupts of its own in {}",
                self.path.display()
            );
            return missing(self, why);
        };
        let before = self.interrupt_count.replace(count);
        let keys = match &self.evidence {
            Evidence::Known(keys) => *keys,
            Evidence::Unavailable(_) => InputActivity {
                watched_since: now,
                last_used: None,
            },
        };
        let used = if before.is_some_and(|before| before != count) {
            Some(now)
        } else {
            keys.last_used
        };
        self.evidence = Evidence::Known(InputActivity {
            last_used: used,
            ..keys
        });
    }

    fn read_counters(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            self.file = Some(File::open(&self.path)?);
        }
        let mut file = self.file.as_ref().expect("opened just now");
        file.rewind()?;
        self.text.clear();
        file.take(INTERRUPTS_BYTES_MAX)
            .read_to_end(&mut self.text)
            .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Micros {
        Micros::from_secs(seconds)
    }

    /// Session files are read; pipes, directories and reference files in the same directory are
    /// ignored.
    #[test]
    fn only_session_files_are_read() {
        let dir = tempfile::tempdir().expect("a folder");
        assert!(
            matches!(read_session_files(&dir.path().join("no")), Evidence::Unavailable(why) if why.contains("does not exist"))
        );
        assert_eq!(read_session_files(dir.path()), Evidence::Known(Vec::new()));
        let text = "USER=olga\nCLASS=user\nTYPE=tty\nTTY=tty2\nREALTIME=5\n";
        fs::write(dir.path().join("1"), text).expect("the test's own file");
        fs::write(dir.path().join("1.ref"), text).expect("the test's own file");
        nix::unistd::mkfifo(&dir.path().join("2"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        fs::create_dir(dir.path().join("3")).expect("the test's own folder");
        let Evidence::Known(found) = read_session_files(dir.path()) else {
            panic!("the folder is there")
        };
        let users: Vec<&str> = found.iter().map(|s| s.login.user.as_str()).collect();
        assert_eq!(users, ["olga"]);
    }

    /// The time of the last input is read from terminals inside the directory, and from no path
    /// outside.
    #[test]
    fn terminal_input_times_stay_inside_folder() {
        let dir = tempfile::tempdir().expect("a folder");
        fs::create_dir(dir.path().join("pts")).expect("the test's own folder");
        let file = File::create(dir.path().join("pts/3")).expect("the test's own file");
        let when = std::time::UNIX_EPOCH + std::time::Duration::from_micros(5_000_007);
        file.set_times(fs::FileTimes::new().set_accessed(when))
            .expect("the test's own file");
        File::create(dir.path().join("outside")).expect("the test's own file");
        let login = |line: &str| Login {
            user: "a".into(),
            line: line.into(),
            from: String::new(),
            at: Micros(1),
        };
        let lines = [
            "pts/3",
            "pts/4",
            "pts",
            "../outside",
            "pts/../../outside",
            "/dev/null",
            ":0",
            "",
        ];
        let dir = dir
            .path()
            .join("pts")
            .parent()
            .expect("it has one")
            .to_path_buf();
        let found = terminal_input_times(&dir, &lines.map(login));
        assert_eq!(
            found,
            BTreeMap::from([("pts/3".to_string(), Micros(5_000_007))])
        );
    }

    /// Keyboard and mouse count as used when their interrupt counters change.
    #[test]
    fn rising_interrupt_count_means_input() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("interrupts");
        let put = |n: u32| {
            fs::write(&path, format!("  CPU0\n 1: {n} IO-APIC i8042\n"))
                .expect("the test's own file")
        };
        put(7);
        let mut sense = InputProbe::new(path.clone());
        sense.poll(at(100));
        let watched = at(100);
        assert_eq!(
            *sense.evidence(),
            Evidence::Known(InputActivity {
                watched_since: watched,
                last_used: None
            })
        );
        put(8);
        sense.poll(at(105));
        sense.poll(at(110));
        assert_eq!(
            *sense.evidence(),
            Evidence::Known(InputActivity {
                watched_since: watched,
                last_used: Some(at(105))
            })
        );
    }

    /// A machine without a keyboard is reported, and examined again after the retry interval.
    #[test]
    fn missing_keyboard_is_reported_and_retried() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("interrupts");
        fs::write(&path, "  CPU0\n 4: 10 IO-APIC ttyS0\n").expect("the test's own file");
        let mut sense = InputProbe::new(path.clone());
        sense.poll(at(100));
        assert!(
            matches!(sense.evidence(), Evidence::Unavailable(why) if why.starts_with("no keyboard"))
        );
        fs::write(&path, "  CPU0\n 1: 10 IO-APIC i8042\n").expect("the test's own file");
        sense.poll(at(100) + Micros(INPUT_RETRY_INTERVAL.0 - 1));
        assert!(matches!(sense.evidence(), Evidence::Unavailable(_)));
        sense.poll(at(100) + INPUT_RETRY_INTERVAL);
        assert!(matches!(sense.evidence(), Evidence::Known(_)));
        let mut gone = InputProbe::new(dir.path().join("no"));
        gone.poll(at(1));
        assert!(
            matches!(gone.evidence(), Evidence::Unavailable(why) if why.contains("cannot be read"))
        );
    }
}
