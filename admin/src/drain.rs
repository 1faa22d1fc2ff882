//! `drain`: moves all guests away from this machine, and lets no guest come.
//!
//! The drain is a part of root's override of the owner, which all load watchers of the machine
//! read. They obey within moments, in the virtual machines of all users.

use crate::outcome::{Outcome, refuse_unless_root};
use crate::table::printable;
use anyhow::{Context, Result, bail};
use clap::Args;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use pvm_load_watcher::host_daemons::{HostTasker, taskers};
use pvm_load_watcher::owner_override::{
    self, Drain, OVERRIDES_DIR_VAR, REASON_BYTES_MAX, boot_id, overrides_dir,
};
use pvm_load_watcher::status::{WatcherStatus, query_all_within};
use pvm_load_watcher::user_files::{FileContent, FileVersion, ReadFile};
use sempa_proto::text::process_count;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

const ROOT_UID: u32 = 0;
/// Interval at which the load watchers are asked.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum time of one query.
const QUERY_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which load watchers may need to obey. After it, those that have not are reported.
const OBEY_TIMEOUT: Duration = Duration::from_secs(10);
/// Exit status of a command that ctrl-c has ended.
const INTERRUPTED_STATUS: i32 = 130;

#[derive(Debug, Args)]
pub(crate) struct DrainOptions {
    /// Let guests come again
    #[arg(long, conflicts_with_all = ["reason", "persistent", "no_wait"])]
    off: bool,
    /// Why, for the users of the guests
    #[arg(long, value_name = "TEXT", default_value = "", value_parser = parse_reason)]
    reason: String,
    /// Keep the drain after a reboot
    #[arg(long)]
    persistent: bool,
    /// Do not wait until all guests have left
    #[arg(long)]
    no_wait: bool,
}

fn parse_reason(text: &str) -> Result<String, String> {
    match text.len() > REASON_BYTES_MAX {
        true => Err(format!("at most {REASON_BYTES_MAX} bytes are accepted")),
        false => Ok(printable(text)),
    }
}

pub(crate) fn run(options: &DrainOptions) -> Result<Outcome> {
    let reason = "it affects the guests of all users";
    if let Some(refusal) = refuse_unless_root("drain", reason) {
        return Ok(refusal);
    }
    let drain = match (options.off, options.persistent) {
        (true, _) => None,
        (false, true) => Some((options.reason.clone(), None)),
        (false, false) => {
            let boot_id = boot_id().context(
                "the kernel does not say which boot this is; use --persistent, and --off later",
            )?;
            Some((options.reason.clone(), Some(boot_id)))
        }
    };
    let drain = drain.map(|(reason, boot_id)| Drain { reason, boot_id });
    let version = write(drain)?;
    if options.off {
        println!("guests may come to this machine again");
        return Ok(Outcome::Done);
    }
    println!("no guest may stay on this machine or come to it, until 'pvm-admin drain --off'");
    match options.no_wait {
        true => Ok(Outcome::Done),
        false => wait_until_empty(version),
    }
}

/// Writes the drain into root's override, and keeps the other settings of the override. Returns the
/// version of the file; `None` if nothing remains in it.
fn write(drain: Option<Drain>) -> Result<Option<FileVersion>> {
    let dir = overrides_dir(std::env::var_os(OVERRIDES_DIR_VAR).map(Into::into));
    let mut own_override = match owner_override::read(&dir, ROOT_UID) {
        Ok(own_override) => own_override,
        Err(error) => bail!("{error}; nothing was changed: remove the file first"),
    };
    own_override.drain = drain;
    let written = owner_override::write(&dir, ROOT_UID, &own_override)
        .with_context(|| format!("the drain cannot be written in {}", dir.display()))?;
    Ok(written.map(|(version, _)| version))
}

/// The guests that remain on a draining machine, and the reasons why they remain.
#[derive(Debug, Default, PartialEq, Eq)]
struct Progress {
    /// Number of guests that the load watchers report.
    guests: usize,
    /// Load watchers that have not read the drain yet.
    unaware: usize,
    /// A sentence for each thing that the administrator must know.
    obstacles: BTreeSet<String>,
}

impl Progress {
    /// Evaluates the answers of load watchers. `taskers` are all taskers of the machine. A tasker
    /// without a load watcher that answers does not learn of the drain.
    fn evaluate(
        statuses: &[WatcherStatus],
        taskers: &[HostTasker],
        version: Option<FileVersion>,
    ) -> Self {
        let mut progress = Self::default();
        let is_aware = |status: &&WatcherStatus| {
            let wanted = version.map(|v| ReadFile::new(ROOT_UID, FileContent::Override, v));
            wanted.is_some_and(|wanted| status.read_files.contains(&wanted))
        };
        for status in statuses {
            progress.guests += status.tasks.len();
            progress.unaware += usize::from(!is_aware(&status));
            let name = format!("virtual machine {} of {}", status.vm, status.user);
            let mut obstacle = |text: &str| {
                if !text.is_empty() {
                    let sentence = format!("{name}: {}", printable(text));
                    progress.obstacles.insert(sentence);
                }
            };
            obstacle(&status.directive_error);
            if !status.tasks.is_empty() && !status.cannot_leave.is_empty() {
                obstacle(&status.cannot_leave);
            }
        }
        let answers = |pid: &i32| statuses.iter().any(|status| status.pid == *pid);
        let unreached = taskers
            .iter()
            .filter(|tasker| !tasker.watchers.iter().any(answers));
        for tasker in unreached.filter(|tasker| !tasker.task_processes.is_empty()) {
            let count = u32::try_from(tasker.task_processes.len()).unwrap_or(u32::MAX);
            progress.guests += tasker.task_processes.len();
            progress.obstacles.insert(format!(
                "no load watcher answers for the tasker {}, whose tasks are {}: they do not learn of the drain; kill \
                 the tasker to end them",
                tasker.pid,
                process_count(count)
            ));
        }
        progress
    }

    fn is_over(&self) -> bool {
        self.guests == 0 && self.unaware == 0
    }
}

fn wait_until_empty(version: Option<FileVersion>) -> Result<Outcome> {
    let signals = interrupt_signals()?;
    let start = Instant::now();
    let (mut reported_guests, mut reported) = (None, BTreeSet::new());
    loop {
        let (statuses, errors) = query_all_within(QUERY_TIMEOUT)?;
        let mut progress = Progress::evaluate(&statuses, &taskers(), version);
        if start.elapsed() >= OBEY_TIMEOUT {
            progress.obstacles.extend(errors);
        } else {
            // Load watchers and daemons need moments to obey.
            progress.obstacles.clear();
        }
        if reported_guests != Some(progress.guests) {
            match progress.guests {
                0 => println!("no guest is on this machine"),
                1 => println!("1 guest is left"),
                count => println!("{count} guests are left"),
            }
            reported_guests = Some(progress.guests);
        }
        for obstacle in progress.obstacles.difference(&reported) {
            println!("{}", printable(obstacle));
        }
        reported.extend(progress.obstacles.iter().cloned());
        if progress.is_over() {
            return Ok(Outcome::Done);
        }
        if was_interrupted(&signals, POLL_INTERVAL) {
            println!("the drain stays in force; 'pvm-admin drain --off' ends it");
            std::process::exit(INTERRUPTED_STATUS);
        }
    }
}

fn interrupt_signals() -> Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set.thread_block()?;
    Ok(SignalFd::with_flags(
        &set,
        SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK,
    )?)
}

/// Waits for a signal, at most for `timeout`.
fn was_interrupted(signals: &SignalFd, timeout: Duration) -> bool {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::fd::AsFd;
    let mut fds = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
    // A failure has the effect of a wake-up without a signal.
    poll(&mut fds, timeout).is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvm_load_watcher::status::GuestStatus;

    const VERSION: FileVersion = FileVersion {
        inode: 1,
        changed_ns: 2,
    };

    fn guest() -> GuestStatus {
        GuestStatus {
            tid: "t40001".into(),
            program: "ring".into(),
            pid: 9,
            user: "alice".into(),
            since_us: 0,
            cpu_s: 0.0,
            leftover_processes: 0,
            resident_bytes: 0,
        }
    }

    fn watcher(pid: i32, is_aware: bool, guests: usize) -> WatcherStatus {
        let read_file = ReadFile::new(ROOT_UID, FileContent::Override, VERSION);
        WatcherStatus {
            vm: "pvm".into(),
            user: "alice".into(),
            pid,
            read_files: is_aware.then_some(read_file).into_iter().collect(),
            tasks: vec![guest(); guests],
            ..WatcherStatus::default()
        }
    }

    fn tasker(pid: i32, watchers: &[i32], tasks: i32) -> HostTasker {
        HostTasker {
            pid,
            uid: 0,
            watchers: watchers.to_vec(),
            task_processes: (0..tasks).map(|n| (100 + n, "ring".into())).collect(),
        }
    }

    /// A drain is over when no guest is left and all load watchers know of it.
    #[test]
    fn drain_ends_with_the_last_guest() {
        let progress = |statuses: &[WatcherStatus], taskers: &[HostTasker]| {
            Progress::evaluate(statuses, taskers, Some(VERSION))
        };
        assert!(progress(&[], &[]).is_over());
        let running = progress(&[watcher(5, true, 2), watcher(6, true, 1)], &[]);
        assert_eq!((running.guests, running.is_over()), (3, false));
        assert!(!progress(&[watcher(5, false, 0)], &[]).is_over());
        assert!(progress(&[watcher(5, true, 0)], &[tasker(4, &[5], 0)]).is_over());
    }

    /// Guests that cannot leave, and taskers that do not learn of the drain, are reported.
    #[test]
    fn obstacles_are_reported() {
        let mut held = watcher(5, true, 1);
        held.cannot_leave = "no resource manager\nruns".into();
        let taskers = [tasker(4, &[5], 1), tasker(7, &[8], 2), tasker(9, &[], 0)];
        let progress = Progress::evaluate(&[held], &taskers, Some(VERSION));
        assert_eq!(progress.guests, 3);
        let obstacles: Vec<&str> = progress.obstacles.iter().map(String::as_str).collect();
        assert_eq!(obstacles.len(), 2, "{obstacles:?}");
        assert!(obstacles[0].contains("the tasker 7") && obstacles[0].contains("2 processes"));
        assert_eq!(
            obstacles[1],
            "virtual machine pvm of alice: no resource manager runs"
        );
    }

    #[test]
    fn reason_is_short_and_printable() {
        assert_eq!(parse_reason("new\ndisks"), Ok("new disks".into()));
        assert!(parse_reason(&"r".repeat(REASON_BYTES_MAX + 1)).is_err());
    }
}
