//! The part of this host's status that describes the guests.

use procfs::process::Process;
use procfs::{CurrentSI, KernelStats};
use pvm_load_watcher::host_daemons::resident_bytes;
use pvm_load_watcher::host_policy::user_name;
use pvm_load_watcher::load_attribution::task_processes;
use pvm_load_watcher::status::{GuestStatus, STATUS_TASKS_MAX};
use sempa_proto::load::is_load_watcher;
use sempa_proto::table::{TASK_FORKED, TASK_SERVICE_FLAGS, TaskInfo};
use sempa_proto::task::Reply;
use std::path::Path;

/// True for a task that was spawned and does not serve the virtual machine.
pub(crate) fn is_guest(task: &TaskInfo) -> bool {
    task.flags & TASK_FORKED != 0
        && task.flags & TASK_SERVICE_FLAGS == 0
        && !is_load_watcher(&task.name)
}

/// Returns the mechanism by which the daemon stops guests. The second string is the reason why
/// control groups are not used, or is empty.
pub(crate) fn stop_mechanism(reply: Reply) -> (&'static str, String) {
    match reply {
        Reply::Freezer(Some(Ok(()))) => ("control groups", String::new()),
        Reply::Freezer(Some(Err(reason))) => ("signals", reason.to_string()),
        Reply::Freezer(None) => ("unknown", "no tasker has reported it yet".into()),
        _ => ("unknown", "the daemon does not report it".into()),
    }
}

/// Returns the statuses of the guests among these tasks, at most [`STATUS_TASKS_MAX`].
pub(crate) fn guest_statuses(tasks: &[TaskInfo]) -> Vec<GuestStatus> {
    let boot_s = boot_time();
    let guests = tasks.iter().filter(|task| is_guest(task));
    guests
        .take(STATUS_TASKS_MAX)
        .map(|task| guest_status(task, boot_s))
        .collect()
}

/// Returns the boot time of this machine in seconds since 1970; `None` if the kernel's statistics
/// cannot be read.
fn boot_time() -> Option<u64> {
    Some(KernelStats::current().ok()?.btime)
}

fn guest_status(task: &TaskInfo, boot_s: Option<u64>) -> GuestStatus {
    let stat = Process::new(task.pid).and_then(|process| process.stat());
    let (cpu_ticks, start_time) = stat.map_or((0, 0), |stat| {
        let child_ticks = (stat.cutime + stat.cstime).unsigned_abs();
        (stat.utime + stat.stime + child_ticks, stat.starttime)
    });
    let ticks_per_second = procfs::ticks_per_second();
    let start_time = boot_s
        .filter(|_| start_time > 0)
        .map(|boot_s| boot_s * 1_000_000 + start_time * 1_000_000 / ticks_per_second);
    GuestStatus {
        tid: task.tid.to_string(),
        program: task.name.clone(),
        pid: task.pid,
        user: user_name(task.uid),
        since_us: start_time.unwrap_or(0),
        cpu_s: cpu_ticks as f64 / ticks_per_second as f64,
        leftover_processes: task.leftover_processes,
        resident_bytes: task_processes(Path::new("/proc"), task.pid)
            .into_iter()
            .map(resident_bytes)
            .sum(),
    }
}
