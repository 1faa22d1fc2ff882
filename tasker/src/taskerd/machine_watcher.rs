//! The load watcher of this machine, which serves all virtual machines of all users.
//!
//! The service starts it, starts it again if it ends or hangs, and stores the number of guests that
//! the owner permits to all users together, where the taskers read it.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_service_settings::host_account::{ACCOUNT_DIR_VARIABLE, write_guest_cap};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Variables of the service's environment that the load watcher gets: the administrator's settings.
const PASSED_VARIABLES: [&str; 11] = [
    "PATH",
    "TZ",
    "SEMPA_UTMP",
    "SEMPA_SESSIONS",
    "SEMPA_BUS",
    "SEMPA_TERMINALS",
    "SEMPA_INTERRUPTS",
    "SEMPA_MEMINFO",
    "SEMPA_ADMIN_POLICY",
    "SEMPA_OWNER_WORDS",
    ACCOUNT_DIR_VARIABLE,
];
/// Time without a sign of life after which the load watcher is replaced. It gives one every three
/// seconds.
const SILENCE_MAX: Duration = Duration::from_secs(9);
/// Time until a load watcher that has ended is started again: the first time, and at most. Each
/// failure doubles the time.
const RESTART_DELAY_MIN: Duration = Duration::from_secs(1);
const RESTART_DELAY_MAX: Duration = Duration::from_secs(60);
/// Time after which a load watcher that runs counts as successful.
const SUCCESS_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of bytes of an incomplete line from the load watcher.
const LINE_BYTES_MAX: usize = 256;

/// One line of the load watcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LifeSign {
    /// Number of guests that all users together may have; `None` if there is no limit.
    guests_max: Option<u64>,
}

impl LifeSign {
    /// Parses a line; `None` if it is malformed.
    fn parse(line: &str) -> Option<Self> {
        let guests_max = match line.strip_prefix("guests ")? {
            "unlimited" => None,
            number => Some(number.parse().ok()?),
        };
        Some(Self { guests_max })
    }
}

#[derive(Debug)]
struct RunningWatcher {
    child: Child,
    connection: UnixStream,
    unread: Vec<u8>,
    started_at: Instant,
    heard_at: Instant,
}

#[derive(Debug)]
enum State {
    Ended { restart_at: Instant },
    Running(RunningWatcher),
}

/// Starts and supervises the load watcher.
#[derive(Debug)]
pub(crate) struct MachineWatcher {
    program: PathBuf,
    /// Directory of the sockets of the service and of the load watcher.
    socket_dir: PathBuf,
    account_dir: PathBuf,
    state: State,
    restart_delay: Duration,
    /// The limit that the taskers read; `None` before the first sign of life.
    stored_cap: Option<Option<u64>>,
}

impl MachineWatcher {
    /// Creates a value without a load watcher; the first call of [`MachineWatcher::check`] starts
    /// one.
    pub(crate) fn new(program: PathBuf, socket_dir: PathBuf, account_dir: PathBuf) -> Self {
        Self {
            program,
            socket_dir,
            account_dir,
            state: State::Ended {
                restart_at: Instant::now(),
            },
            restart_delay: RESTART_DELAY_MIN,
            stored_cap: None,
        }
    }

    /// Returns the descriptor that is readable when [`MachineWatcher::read`] has something to read.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            State::Running(watcher) => Some(watcher.connection.as_fd()),
            State::Ended { .. } => None,
        }
    }

    /// Returns the time until [`MachineWatcher::check`] has something to do.
    pub(crate) fn next_timeout(&self, now: Instant) -> Duration {
        let due = match &self.state {
            State::Running(watcher) => watcher.heard_at + SILENCE_MAX,
            State::Ended { restart_at } => *restart_at,
        };
        due.saturating_duration_since(now)
    }

    /// Starts a load watcher if one is due, and kills one that hangs.
    pub(crate) fn check(&mut self, now: Instant) {
        match &mut self.state {
            State::Running(watcher) if now >= watcher.heard_at + SILENCE_MAX => {
                tracing::warn!("the load watcher of this machine hangs; it is replaced");
                // The end is handled when the child is reaped.
                let pid = Pid::from_raw(watcher.child.id().cast_signed());
                let _ = kill(pid, Signal::SIGKILL);
                watcher.heard_at = now;
            }
            State::Ended { restart_at } if now >= *restart_at => match self.start(now) {
                Ok(watcher) => self.state = State::Running(watcher),
                Err(error) => {
                    tracing::warn!(
                        "the load watcher of this machine cannot be started: {}: {error}; each virtual machine observes \
                         the machine itself",
                        self.program.display()
                    );
                    self.schedule_restart(now);
                }
            },
            _ => {}
        }
    }

    fn start(&self, now: Instant) -> io::Result<RunningWatcher> {
        let (connection, far_end) = UnixStream::pair()?;
        connection.set_nonblocking(true)?;
        let variables = PASSED_VARIABLES
            .iter()
            .filter_map(|name| Some((name, std::env::var_os(name)?)));
        let child = Command::new(&self.program)
            .arg("--machine")
            .arg(&self.socket_dir)
            .env_clear()
            .envs(variables)
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(far_end)))
            .stdout(Stdio::null())
            .spawn()?;
        Ok(RunningWatcher {
            child,
            connection,
            unread: Vec::new(),
            started_at: now,
            heard_at: now,
        })
    }

    fn schedule_restart(&mut self, now: Instant) {
        self.state = State::Ended {
            restart_at: now + self.restart_delay,
        };
        self.restart_delay = (self.restart_delay * 2).min(RESTART_DELAY_MAX);
    }

    /// Handles the end of a child of the service. Returns true if the child was the load watcher.
    pub(crate) fn handle_end(&mut self, pid: Pid, now: Instant) -> bool {
        let State::Running(watcher) = &self.state else {
            return false;
        };
        if watcher.child.id().cast_signed() != pid.as_raw() {
            return false;
        }
        tracing::warn!("the load watcher of this machine has ended; it is started again");
        if now.saturating_duration_since(watcher.started_at) >= SUCCESS_AFTER {
            self.restart_delay = RESTART_DELAY_MIN;
        }
        self.schedule_restart(now);
        true
    }

    /// Reads the signs of life, and stores the limit that they contain.
    pub(crate) fn read(&mut self, now: Instant) {
        let State::Running(watcher) = &mut self.state else {
            return;
        };
        let mut buffer = [0; 1024];
        let count = match watcher.connection.read(&mut buffer) {
            Ok(0) => {
                // It has closed the connection, so it is about to end.
                let _ = watcher.child.kill();
                return;
            }
            Ok(count) => count,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return;
            }
            Err(_) => return,
        };
        watcher.unread.extend_from_slice(&buffer[..count]);
        let complete = watcher.unread.iter().rposition(|byte| *byte == b'\n');
        let lines: Vec<u8> = watcher
            .unread
            .drain(..complete.map_or(0, |end| end + 1))
            .collect();
        watcher.unread.truncate(LINE_BYTES_MAX);
        let text = String::from_utf8_lossy(&lines);
        if let Some(sign) = text.lines().filter_map(LifeSign::parse).next_back() {
            watcher.heard_at = now;
            self.store_cap(sign.guests_max);
        }
    }

    fn store_cap(&mut self, cap: Option<u64>) {
        if self.stored_cap == Some(cap) {
            return;
        }
        match write_guest_cap(&self.account_dir, cap) {
            Ok(()) => self.stored_cap = Some(cap),
            Err(error) => tracing::warn!("the owner's limit of guests cannot be stored: {error}"),
        }
    }

    /// Removes the stored limit, because nobody will change it any more. The load watcher ends when
    /// its connection is closed.
    pub(crate) fn end(mut self) {
        self.store_cap(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_service_settings::host_account::read_guest_cap;
    use std::os::unix::fs::PermissionsExt;

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn signs_of_life_are_parsed() {
        let sign = |guests_max| Some(LifeSign { guests_max });
        assert_eq!(LifeSign::parse("guests unlimited"), sign(None));
        assert_eq!(LifeSign::parse("guests 3"), sign(Some(3)));
        for line in [
            "",
            "guests",
            "guests -1",
            "guests 99999999999999999999",
            "x 3",
        ] {
            assert_eq!(LifeSign::parse(line), None, "{line:?}");
        }
    }

    /// Creates a program that stands for the load watcher.
    fn fake_watcher(dir: &std::path::Path, script: &str) -> MachineWatcher {
        let program = dir.join("watcher");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("the test's own file");
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("own file");
        let account_dir = dir.join("account");
        std::fs::create_dir(&account_dir).expect("the test's own folder");
        MachineWatcher::new(program, dir.to_path_buf(), account_dir)
    }

    /// The limit in a sign of life is stored for the taskers, and removed at the end.
    #[test]
    fn limit_is_stored() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut watcher = fake_watcher(dir.path(), "echo guests 2 >&0; cat");
        watcher.check(Instant::now());
        let account_dir = watcher.account_dir.clone();
        let deadline = Instant::now() + TIMEOUT;
        while read_guest_cap(&account_dir) != Some(2) {
            assert!(Instant::now() < deadline, "no limit is stored");
            watcher.read(Instant::now());
            std::thread::yield_now();
        }
        let State::Running(running) = &mut watcher.state else {
            panic!("it runs");
        };
        running.child.kill().expect("own child");
        running.child.wait().expect("own child");
        watcher.end();
        assert_eq!(read_guest_cap(&account_dir), None);
    }

    /// A load watcher that ends is started again, later after each failure.
    #[test]
    fn ended_watcher_is_started_again() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut watcher = fake_watcher(dir.path(), "exit 1");
        let mut now = Instant::now();
        let mut delays = Vec::new();
        for _ in 0..3 {
            watcher.check(now);
            let State::Running(running) = &mut watcher.state else {
                panic!("it was started");
            };
            running.child.wait().expect("own child");
            let pid = Pid::from_raw(running.child.id().cast_signed());
            assert!(!watcher.handle_end(Pid::from_raw(1), now));
            assert!(watcher.handle_end(pid, now));
            delays.push(watcher.next_timeout(now));
            now += watcher.next_timeout(now);
        }
        assert_eq!(delays, [1, 2, 4].map(Duration::from_secs));
    }

    /// A load watcher that gives no sign of life is killed.
    #[test]
    fn silent_watcher_is_killed() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut watcher = fake_watcher(dir.path(), "exec sleep 600");
        let now = Instant::now();
        watcher.check(now);
        watcher.check(now + SILENCE_MAX);
        let State::Running(running) = &mut watcher.state else {
            panic!("it was started");
        };
        assert!(!running.child.wait().expect("own child").success());
    }
}
