//! Reads the sources that show whether the owner is present: session files, terminals and interrupt
//! counters.

use crate::owner::{Evidence, InputActivity};
use crate::proc::parse_input_interrupts;
use crate::sessions::{
    SESSION_BYTES_MAX, SESSIONS_MAX, Session, parse_session_file, sort_by_start,
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
/// Directory of the terminals.
pub const TERMINALS_DIR: &str = "/dev";
/// File with the kernel's interrupt counters.
pub const INTERRUPTS_FILE: &str = "/proc/interrupts";
/// Interval after which a machine without keyboard and mouse is examined again, because devices may
/// have been connected.
pub const INPUT_RETRY_INTERVAL: Micros = Micros::from_secs(600);
/// Maximum number of bytes that are read from the interrupt counters.
const INTERRUPTS_BYTES_MAX: u64 = 256 << 10;

/// Reads the session files in `dir`. The result is unavailable if the directory does not exist or
/// cannot be read.
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
    let mut sessions = Vec::new();
    for entry in entries.flatten().take(SESSIONS_MAX) {
        // Each session also has a named pipe in this directory, which must not be opened.
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains('.') || !entry.file_type().is_ok_and(|file_type| file_type.is_file()) {
            continue;
        }
        let mut text = Vec::new();
        let read_result = File::open(entry.path())
            .and_then(|f| f.take(SESSION_BYTES_MAX as u64).read_to_end(&mut text));
        // The file of a session that has just ended may be missing; the session is skipped.
        sessions.extend(
            read_result
                .ok()
                .and_then(|_| parse_session_file(&name, &String::from_utf8_lossy(&text))),
        );
    }
    Evidence::Known(sort_by_start(sessions))
}

/// Returns the time of the last input at the terminal of each login, by terminal line. Terminals
/// outside the directory `dir` and terminals that cannot be examined are omitted. The kernel
/// updates the time of the last input with a resolution of eight seconds.
pub fn terminal_input_times(dir: &Path, logins: &[Login]) -> BTreeMap<String, Micros> {
    let line_and_input_time = |login: &Login| {
        // The terminal lines come from files that other programs write, so only paths inside the
        // directory are accepted.
        let is_inside = !login.terminal.starts_with('/')
            && !login
                .terminal
                .split('/')
                .any(|component| component == ".." || component.is_empty());
        let metadata = fs::metadata(dir.join(&login.terminal))
            .ok()
            .filter(|metadata| is_inside && !metadata.is_dir())?;
        let seconds = u64::try_from(metadata.atime()).ok()?;
        Some((
            login.terminal.clone(),
            Micros::from_secs(seconds) + Micros(metadata.atime_nsec().unsigned_abs() / 1000),
        ))
    };
    logins.iter().filter_map(line_and_input_time).collect()
}

/// Detects the use of keyboard and mouse by their interrupt counters.
#[derive(Debug)]
pub struct InputProbe {
    path: PathBuf,
    file: Option<File>,
    buffer: Vec<u8>,
    interrupt_count: Option<u64>,
    evidence: Evidence<InputActivity>,
    retry_at: Option<Micros>,
}

impl InputProbe {
    pub fn new(path: PathBuf) -> Self {
        let evidence = Evidence::Unavailable("not read yet".into());
        Self {
            path,
            file: None,
            buffer: Vec::new(),
            interrupt_count: None,
            evidence,
            retry_at: None,
        }
    }

    /// Returns the observed use of keyboard and mouse.
    pub fn evidence(&self) -> &Evidence<InputActivity> {
        &self.evidence
    }

    /// Reads the interrupt counters at the time of day `now` and updates the evidence. If the last
    /// attempt found no keyboard or mouse or could not read the counters, does nothing for
    /// [`INPUT_RETRY_INTERVAL`] afterwards.
    pub fn read_if_due(&mut self, now: Micros) {
        if self
            .retry_at
            .is_some_and(|retry_at| now < retry_at && now + INPUT_RETRY_INTERVAL >= retry_at)
        {
            return;
        }
        self.retry_at = None;
        let set_unavailable = |probe: &mut Self, reason: String| {
            (probe.evidence, probe.interrupt_count, probe.retry_at) = (
                Evidence::Unavailable(reason),
                None,
                Some(now + INPUT_RETRY_INTERVAL),
            );
            probe.buffer = Vec::new();
        };
        if let Err(e) = self.read_counters() {
            self.file = None;
            let reason = format!("{} cannot be read: {e}", self.path.display());
            return set_unavailable(self, reason);
        }
        let Some(count) = parse_input_interrupts(&self.buffer) else {
            let reason = format!("no keyboard or mouse in {}", self.path.display());
            return set_unavailable(self, reason);
        };
        let previous_count = self.interrupt_count.replace(count);
        let activity = match &self.evidence {
            Evidence::Known(activity) => *activity,
            Evidence::Unavailable(_) => InputActivity {
                watched_since: now,
                last_used: None,
            },
        };
        let last_used_at = if previous_count.is_some_and(|previous_count| previous_count != count) {
            Some(now)
        } else {
            activity.last_used
        };
        self.evidence = Evidence::Known(InputActivity {
            last_used: last_used_at,
            ..activity
        });
    }

    fn read_counters(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            self.file = Some(File::open(&self.path)?);
        }
        let mut file = self.file.as_ref().expect("opened just now");
        file.rewind()?;
        self.buffer.clear();
        file.take(INTERRUPTS_BYTES_MAX)
            .read_to_end(&mut self.buffer)
            .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at_second(seconds: u64) -> Micros {
        Micros::from_secs(seconds)
    }

    /// Session files are read; pipes, directories and reference files in the same directory are
    /// ignored.
    #[test]
    fn only_session_files_are_read() {
        let dir = tempfile::tempdir().expect("a folder");
        assert!(
            matches!(read_session_files(&dir.path().join("no")), Evidence::Unavailable(reason) if reason.contains("does not exist"))
        );
        assert_eq!(read_session_files(dir.path()), Evidence::Known(Vec::new()));
        let text = "USER=olga\nCLASS=user\nTYPE=tty\nTTY=tty2\nREALTIME=5\n";
        fs::write(dir.path().join("1"), text).expect("the test's own file");
        fs::write(dir.path().join("1.ref"), text).expect("the test's own file");
        nix::unistd::mkfifo(&dir.path().join("2"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        fs::create_dir(dir.path().join("3")).expect("the test's own folder");
        let Evidence::Known(sessions) = read_session_files(dir.path()) else {
            panic!("the folder is there")
        };
        let users: Vec<&str> = sessions
            .iter()
            .map(|s| s.login.user_name.as_str())
            .collect();
        assert_eq!(users, ["olga"]);
    }

    /// Terminals outside the directory are ignored.
    #[test]
    fn terminal_input_times_stay_inside_folder() {
        let dir = tempfile::tempdir().expect("a folder");
        fs::create_dir(dir.path().join("pts")).expect("the test's own folder");
        let file = File::create(dir.path().join("pts/3")).expect("the test's own file");
        let access_time = std::time::UNIX_EPOCH + std::time::Duration::from_micros(5_000_007);
        file.set_times(fs::FileTimes::new().set_accessed(access_time))
            .expect("the test's own file");
        File::create(dir.path().join("outside")).expect("the test's own file");
        let login = |line: &str| Login {
            user_name: "a".into(),
            terminal: line.into(),
            origin: String::new(),
            at: Micros(1),
        };
        let terminal_lines = [
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
        let input_times = terminal_input_times(&dir, &terminal_lines.map(login));
        assert_eq!(
            input_times,
            BTreeMap::from([("pts/3".to_string(), Micros(5_000_007))])
        );
    }

    /// Any change of the interrupt count means input. The first count that is read does not mean
    /// input.
    #[test]
    fn rising_interrupt_count_means_input() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("interrupts");
        let write_count = |n: u32| {
            fs::write(&path, format!("  CPU0\n 1: {n} IO-APIC i8042\n"))
                .expect("the test's own file")
        };
        write_count(7);
        let mut probe = InputProbe::new(path.clone());
        probe.read_if_due(at_second(100));
        let watch_start = at_second(100);
        assert_eq!(
            *probe.evidence(),
            Evidence::Known(InputActivity {
                watched_since: watch_start,
                last_used: None
            })
        );
        write_count(8);
        probe.read_if_due(at_second(105));
        probe.read_if_due(at_second(110));
        assert_eq!(
            *probe.evidence(),
            Evidence::Known(InputActivity {
                watched_since: watch_start,
                last_used: Some(at_second(105))
            })
        );
    }

    /// A machine without a keyboard is examined again after the retry interval.
    #[test]
    fn missing_keyboard_is_reported_and_retried() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("interrupts");
        fs::write(&path, "  CPU0\n 4: 10 IO-APIC ttyS0\n").expect("the test's own file");
        let mut probe = InputProbe::new(path.clone());
        probe.read_if_due(at_second(100));
        assert!(
            matches!(probe.evidence(), Evidence::Unavailable(reason) if reason.starts_with("no keyboard"))
        );
        fs::write(&path, "  CPU0\n 1: 10 IO-APIC i8042\n").expect("the test's own file");
        probe.read_if_due(at_second(100) + Micros(INPUT_RETRY_INTERVAL.0 - 1));
        assert!(matches!(probe.evidence(), Evidence::Unavailable(_)));
        probe.read_if_due(at_second(100) + INPUT_RETRY_INTERVAL);
        assert!(matches!(probe.evidence(), Evidence::Known(_)));
        let mut probe_without_file = InputProbe::new(dir.path().join("no"));
        probe_without_file.read_if_due(at_second(1));
        assert!(
            matches!(probe_without_file.evidence(), Evidence::Unavailable(reason) if reason.contains("cannot be read"))
        );
    }
}
