//! Settings of processes that the engine does not restore, and that the tasker can read and write
//! from outside: which memory a core dump contains, the timer slack of threads, and the nice value
//! of a session's autogroup.
//!
//! The source reads them while the engine writes the images. The target compares them with its own,
//! which restored processes inherit, and writes only what differs. For most tasks that is nothing.

use checkpoint::proc;
use sempa_proto::migration::Failure;
use serde::{Deserialize, Serialize};
use std::fs::{read_to_string, write};
use std::io;
use std::path::{Path, PathBuf};

/// The settings of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessSettings {
    /// PID in the task's namespace.
    namespace_pid: i32,
    /// Memory that a core dump contains, as a set of bits (core(5)).
    coredump_filter: Option<u64>,
    /// Nice value of the autogroup of the process's session (sched(7)).
    autogroup_nice: Option<i32>,
    /// Thread ids in the task's namespace, each with its timer slack in nanoseconds. Contains only
    /// threads whose timer slack differs from the source tasker's.
    timer_slack: Vec<(i32, u64)>,
    /// Timer slack in nanoseconds of all other threads.
    usual_timer_slack: Option<u64>,
}

impl ProcessSettings {
    /// Reads the settings of these stopped processes. Those that have ended are omitted.
    ///
    /// # Errors
    /// A setting cannot be read.
    pub(crate) fn read_all(pids: &[i32]) -> Result<Vec<Self>, Failure> {
        let usual_timer_slack = read_timer_slack("self")?;
        let mut settings = Vec::new();
        for pid in pids {
            let Some(namespace_pid) = proc::innermost_pid(*pid) else {
                continue;
            };
            settings.push(Self {
                namespace_pid,
                coredump_filter: read_coredump_filter(&pid.to_string())?,
                autogroup_nice: read_autogroup_nice(&pid.to_string())?,
                timer_slack: read_unusual_timer_slack(*pid, usual_timer_slack)?,
                usual_timer_slack,
            });
        }
        Ok(settings)
    }

    /// True if a process does not have all these settings that has inherited them, in a new
    /// session, from a process with this set of memory in core dumps and this timer slack.
    fn differs_from(&self, coredump_filter: Option<u64>, timer_slack: Option<u64>) -> bool {
        let differs = |setting: Option<u64>, other| setting.is_some() && setting != other;
        !self.timer_slack.is_empty()
            || self.autogroup_nice.is_some_and(|nice| nice != 0)
            || differs(self.coredump_filter, coredump_filter)
            || differs(self.usual_timer_slack, timer_slack)
    }

    /// Writes the settings of the restored process `pid`.
    fn write(&self, pid: i32) -> Result<(), Failure> {
        if let Some(filter) = self.coredump_filter {
            write_setting(pid, "coredump_filter", &filter.to_string())?;
        }
        if let Some(nice) = self.autogroup_nice.filter(|nice| *nice != 0) {
            write_setting(pid, "autogroup", &nice.to_string())?;
        }
        let thread_ids = proc::thread_ids(pid)
            .map_err(|e| Failure::Io(format!("the threads of process {pid}: {e}")))?;
        for thread_id in thread_ids {
            let namespace_tid = proc::innermost_pid(thread_id);
            let slack = self
                .timer_slack
                .iter()
                .find(|(tid, _)| Some(*tid) == namespace_tid)
                .map(|(_, slack)| *slack)
                .or(self.usual_timer_slack);
            // A thread with a real-time policy always has the timer slack zero.
            if let Some(slack) = slack.filter(|slack| *slack > 0) {
                write_setting(thread_id, "timerslack_ns", &slack.to_string())?;
            }
        }
        Ok(())
    }
}

/// Writes the settings of the restored, stopped processes of a task. `pids` returns their PIDs; it
/// is called only if a setting differs from this process's own.
///
/// # Errors
/// A setting cannot be read or written.
pub(crate) fn write_differing(
    settings: &[ProcessSettings],
    pids: impl FnOnce() -> Vec<i32>,
) -> Result<(), Failure> {
    let own_settings = (read_coredump_filter("self")?, read_timer_slack("self")?);
    let differing: Vec<&ProcessSettings> = settings
        .iter()
        .filter(|settings| settings.differs_from(own_settings.0, own_settings.1))
        .collect();
    if differing.is_empty() {
        return Ok(());
    }
    for pid in pids() {
        let namespace_pid = proc::innermost_pid(pid);
        let process_settings = differing
            .iter()
            .find(|settings| Some(settings.namespace_pid) == namespace_pid);
        process_settings.map_or(Ok(()), |settings| settings.write(pid))?;
    }
    Ok(())
}

fn setting_path(process: &str, name: &str) -> PathBuf {
    Path::new("/proc").join(process).join(name)
}

/// Reads a setting; `None` if the process has ended or the kernel does not have the setting.
fn read_setting(process: &str, name: &str) -> Result<Option<String>, Failure> {
    let path = setting_path(process, name);
    match read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(e) => Err(Failure::Io(format!("cannot read {}: {e}", path.display()))),
    }
}

fn write_setting(id: i32, name: &str, value: &str) -> Result<(), Failure> {
    let path = setting_path(&id.to_string(), name);
    write(&path, value).map_err(|e| {
        Failure::Io(format!(
            "cannot restore a setting of the task: {} to {value}: {e}",
            path.display()
        ))
    })
}

fn read_coredump_filter(process: &str) -> Result<Option<u64>, Failure> {
    let text = read_setting(process, "coredump_filter")?;
    // The file of a zombie is empty.
    Ok(text.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()))
}

fn read_autogroup_nice(process: &str) -> Result<Option<i32>, Failure> {
    Ok(read_setting(process, "autogroup")?.and_then(|text| parse_autogroup_nice(&text)))
}

/// Parses the text of `/proc/PID/autogroup`, such as `/autogroup-25 nice 0`.
fn parse_autogroup_nice(text: &str) -> Option<i32> {
    let (_, nice) = text.rsplit_once(" nice ")?;
    nice.trim().parse().ok()
}

fn read_timer_slack(thread: &str) -> Result<Option<u64>, Failure> {
    let text = read_setting(thread, "timerslack_ns")?;
    Ok(text.and_then(|text| text.trim().parse().ok()))
}

/// Returns the threads of a process whose timer slack is not `usual`: their ids in the task's
/// namespace, and the timer slack in nanoseconds.
fn read_unusual_timer_slack(pid: i32, usual: Option<u64>) -> Result<Vec<(i32, u64)>, Failure> {
    let mut unusual = Vec::new();
    for thread_id in proc::thread_ids(pid).unwrap_or_default() {
        let slack = read_timer_slack(&thread_id.to_string())?;
        if let (Some(slack), true) = (slack, slack != usual)
            && let Some(namespace_tid) = proc::innermost_pid(thread_id)
        {
            unusual.push((namespace_tid, slack));
        }
    }
    Ok(unusual)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    /// A process that sleeps until this value is dropped. It must not outlive a failed test: it has
    /// the test's output open, and readers would wait for its end.
    struct SleepingProcess(Child);

    impl SleepingProcess {
        fn start() -> Self {
            let mut command = Command::new("sleep");
            Self(command.arg("1000").spawn().expect("it starts"))
        }

        fn pid(&self) -> i32 {
            self.0.id().cast_signed()
        }
    }

    impl Drop for SleepingProcess {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn nice_value_of_autogroup_is_parsed() {
        assert_eq!(parse_autogroup_nice("/autogroup-25 nice 0\n"), Some(0));
        assert_eq!(parse_autogroup_nice("/autogroup-7 nice -11\n"), Some(-11));
        assert_eq!(parse_autogroup_nice(""), None, "a zombie");
    }

    /// What was read from one process is written to another with the same number, and a process
    /// with usual settings needs nothing to be written.
    #[test]
    fn settings_are_written_where_they_differ() {
        let processes = [SleepingProcess::start(), SleepingProcess::start()];
        let [source_pid, target_pid] = processes.each_ref().map(SleepingProcess::pid);
        let usual = ProcessSettings::read_all(&[source_pid]).expect("readable");
        write_differing(&usual, || panic!("nothing differs")).expect("nothing to do");
        write_setting(source_pid, "coredump_filter", "0x7f").expect("writable");
        let mut settings = ProcessSettings::read_all(&[source_pid]).expect("readable");
        assert_eq!(settings[0].coredump_filter, Some(0x7f));
        settings[0].namespace_pid = proc::innermost_pid(target_pid).expect("it runs");
        write_differing(&settings, || vec![source_pid, target_pid]).expect("writable");
        let filter = read_coredump_filter(&target_pid.to_string());
        assert_eq!(filter, Ok(Some(0x7f)));
        assert_eq!(ProcessSettings::read_all(&[i32::MAX]), Ok(Vec::new()));
    }
}
