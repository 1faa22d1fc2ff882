//! Parts of tables that several commands print: hosts and tasks in the columns of PVM, and usage
//! totals.

use sempa_proto::rm::UsageTotals;
use sempa_proto::table::{
    HostTable, TASK_CONNECTED, TASK_FORKED, TASK_HOSTER, TASK_RM, TASK_TASKER, TaskInfo,
};
pub(crate) use sempa_proto::text::process_count as process_count_text;
use sempa_proto::{HostId, Tid};
use serde_json::{Value, json};

/// Letters of the task flags, in the order of their bits.
const FLAG_LETTERS: [(i32, char); 8] = [
    (TASK_CONNECTED, 'c'),
    (TASK_FORKED, 'f'),
    (8, 'a'),
    (16, 'o'),
    (32, 's'),
    (TASK_HOSTER, 'H'),
    (TASK_RM, 'R'),
    (TASK_TASKER, 'T'),
];

/// Returns the ending of a noun after the number `count`: empty for 1, otherwise `s`.
pub(crate) fn plural_ending(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Returns the name of a host, or the number of the host if the table does not contain the host.
pub(crate) fn host_name(table: &HostTable, host: HostId) -> String {
    table
        .get(host)
        .map_or_else(|| host.to_string(), |entry| entry.name.clone())
}

/// Formats the announcement of hosts that another console or task has added.
pub(crate) fn new_hosts_text(table: &HostTable, added_hosts: &[HostId]) -> String {
    let mut out = format!(
        "\nConsole: {} new host{} added\n",
        added_hosts.len(),
        plural_ending(added_hosts.len())
    );
    out += &format!("{:>24} {:>8} {:>8}{:>8}\n", "HOST", "DTID", "ARCH", "SPEED");
    for host in added_hosts.iter().filter_map(|id| table.get(*id)) {
        out += &format!(
            "{:>24} {:>8x} {:>8}{:>8}\n",
            host.name,
            host.id.tid(),
            host.arch,
            host.speed
        );
    }
    out
}

/// Returns the header of task tables.
pub(crate) fn ps_header(is_long: bool) -> String {
    let id_columns = if is_long {
        format!(" {:>8} {:>6}", "PTID", "PID")
    } else {
        String::new()
    };
    format!(
        "{:>24} {:>8}{id_columns} {:>9} COMMAND\n",
        "HOST", "TID", "FLAG 0x"
    )
}

/// Formats one row of a task table. `console` is the console's own tid.
pub(crate) fn ps_row(table: &HostTable, task: &TaskInfo, console: Tid, is_long: bool) -> String {
    let host = host_name(table, task.host);
    let mut out = if task.tid == console {
        format!("{host:>24}   (cons)")
    } else {
        format!("{host:>24} {:>8x}", task.tid)
    };
    if is_long {
        let parent = if task.parent == Tid::NONE {
            "-".to_string()
        } else {
            format!("{:x}", task.parent)
        };
        out += &format!(" {parent:>8} {:>6}", task.namespace_pid);
    }
    let name = if task.name.is_empty() {
        "-"
    } else {
        &task.name
    };
    // This column does not exist in PVM. A task is paused while the owner of its host is present,
    // and suspended until a user resumes it. It is stopping until the tasker has confirmed that
    // none of its processes runs. An ended task has a row while processes are left that it has
    // started. Programs of the host, such as a debugger, need the process id outside the task's PID
    // namespace.
    let has_host_pid = is_long && task.pid > 0 && task.pid != task.namespace_pid;
    let pause_note = if task.stopping { "stopping" } else { "stopped" };
    let left_note = || {
        format!(
            "ended, left {}",
            process_count_text(task.leftover_processes)
        )
    };
    let notes: Vec<String> = [
        task.is_leftover().then(left_note),
        (task.paused || task.stopping).then(|| pause_note.to_string()),
        task.suspended.then(|| "suspended".to_string()),
        has_host_pid.then(|| format!("on the host: process {}", task.pid)),
    ]
    .into_iter()
    .flatten()
    .collect();
    let notes = match notes.is_empty() {
        true => String::new(),
        false => format!(" ({})", notes.join(", ")),
    };
    out += &format!(" {:>9} {name:<12}{notes}\n", flags_text(task.flags));
    out
}

/// Formats task flags as a hexadecimal number and letters, such as `6/c,f`.
fn flags_text(flags: i32) -> String {
    let mut out = format!("{flags:x}/");
    let letters = FLAG_LETTERS.iter().filter(|(bit, _)| flags & bit != 0);
    for (index, (_, letter)) in letters.enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push(*letter);
    }
    out
}

/// Headings of the columns that [`totals_columns`] writes.
pub(crate) const TOTALS_HEADER: &str =
    " TASKS RUNNING  FAILED      CPU S     WALL S  MOVED EVICTED   RSS MIB";

/// Returns usage totals as columns under [`TOTALS_HEADER`].
pub(crate) fn totals_columns(totals: &UsageTotals) -> String {
    let seconds = |micros: u64| micros as f64 / 1e6;
    let UsageTotals {
        task_count: total_count,
        running_tasks: running_count,
        failed_tasks: failed_count,
        usage: total_usage,
        wall_time: wall,
        migrations: migration_count,
        evictions,
    } = totals;
    let cpu_s = seconds((total_usage.user + total_usage.system).0);
    let resident_mib = total_usage.resident_max_bytes as f64 / f64::from(1 << 20);
    format!(
        "{total_count:>6} {running_count:>7} {failed_count:>7} {cpu_s:>10.2} {:>10.2} {migration_count:>6} {evictions:>7} {resident_mib:>9.1}",
        seconds(wall.0)
    )
}

/// Returns usage totals as JSON, times in microseconds.
pub(crate) fn totals_json(totals: &UsageTotals) -> Value {
    json!({
        "tasks": totals.task_count,
        "running": totals.running_tasks,
        "failed": totals.failed_tasks,
        "user_us": totals.usage.user.0,
        "system_us": totals.usage.system.0,
        "resident_max_bytes": totals.usage.resident_max_bytes,
        "wall_us": totals.wall_time.0,
        "moves": totals.migrations,
        "evictions": totals.evictions,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{table, task};

    #[test]
    fn new_hosts_layout_matches_pvm() {
        let two_hosts = [HostId::new(2).expect("2"), HostId::new(3).expect("3")];
        let expected = "
Console: 2 new hosts added
                    HOST     DTID     ARCH   SPEED
                     ha2    80000  LINUX64    1000
                     ha3    c0000  LINUX64    1000
";
        assert_eq!(new_hosts_text(&table(), &two_hosts), expected);
    }

    /// A task is listed as stopped only when this is confirmed.
    #[test]
    fn unconfirmed_stop_is_listed_as_stopping() {
        let row_end = |paused, suspended, stopping| {
            let task = TaskInfo {
                paused,
                suspended,
                stopping,
                ..task(0x80001, 0, 7, 6, "worker")
            };
            let row = ps_row(&table(), &task, Tid::NONE, false);
            row.rsplit_once("worker")
                .expect("its name")
                .1
                .trim()
                .to_string()
        };
        assert_eq!(row_end(false, false, false), "");
        assert_eq!(row_end(false, false, true), "(stopping)");
        assert_eq!(row_end(true, false, false), "(stopped)");
        assert_eq!(row_end(false, true, true), "(stopping, suspended)");
        assert_eq!(row_end(false, true, false), "(suspended)");
        assert_eq!(row_end(true, true, false), "(stopped, suspended)");
        let left = TaskInfo {
            stopping: true,
            leftover_processes: 1,
            ..task(0x80001, 0, 7, 6, "worker")
        };
        let row = ps_row(&table(), &left, Tid::NONE, false);
        assert!(
            row.ends_with(" (ended, left 1 process, stopping)\n"),
            "{row}"
        );
    }
}
