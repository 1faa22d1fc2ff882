//! `owner status`: who uses this machine, and what its guests may do.

use super::machine_picture::{MachinePicture, OwnerLines};
use super::{describe_override, override_json};
use crate::clock::unix_micros;
use crate::outcome::Outcome;
use crate::output::tables::process_count_text;
use crate::output::time::format_local_time;
use pvm_load_watcher::host_daemons::{HostDaemon, daemons_without_watcher, resident_bytes};
use pvm_load_watcher::host_policy::user_name;
use pvm_load_watcher::owner_override::{self, OwnerOverride};
use pvm_load_watcher::status::{GuestStatus, WatcherStatus, query_all};
use sempa_proto::Micros;
use serde_json::json;
use std::path::Path;

/// Time after the eviction time from which guests that are still here count as overdue: they need
/// some time to migrate.
const OVERDUE_AFTER: Micros = Micros::from_secs(5);
/// Largest number of processes that are listed for a daemon without a load watcher.
const LISTED_PROCESSES_MAX: usize = 32;

pub(super) fn status_outcome(dir: &Path, uid: u32) -> Outcome {
    let (statuses, unanswered_lines) = match query_all() {
        Ok(answers) => answers,
        Err(error) => {
            return Outcome::from_refusal(format!("owner: load watchers cannot be found: {error}"));
        }
    };
    let (user_override, file_error) = match owner_override::read(dir, uid) {
        Ok(read_override) => (read_override, None),
        Err(error) => (OwnerOverride::default(), Some(error.to_string())),
    };
    let watcher_pids: Vec<i32> = statuses.iter().map(|status| status.pid).collect();
    let daemons = daemons_without_watcher(&watcher_pids);
    let mut text = String::new();
    if !user_override.is_empty() {
        text.push_str(&format!(
            "your directives: {}\n",
            describe_override(&user_override)
        ));
    }
    let now = unix_micros();
    let picture = MachinePicture::of(&statuses);
    text.extend(picture.iter().map(MachinePicture::text));
    let common = picture.as_ref().map(|picture| &picture.lines);
    statuses
        .iter()
        .for_each(|status| text.push_str(&status_text(status, common, now)));
    daemons
        .iter()
        .for_each(|daemon| text.push_str(&unwatched_text(daemon)));
    if statuses.is_empty() && daemons.is_empty() && unanswered_lines.is_empty() {
        text.push_str("no virtual machine uses this machine\n");
    }
    let failed = !unanswered_lines.is_empty();
    let error_lines = unanswered_lines
        .into_iter()
        .chain(file_error)
        .map(|line| format!("owner: {line}"))
        .collect();
    let unwatched: Vec<serde_json::Value> = daemons.iter().map(unwatched_json).collect();
    let json = json!({
        "you": override_json(&user_override),
        "machine": picture.as_ref().map(MachinePicture::to_json),
        "virtual_machines": statuses,
        "without_load_watcher": unwatched,
    });
    Outcome {
        errors: error_lines,
        ..Outcome::with_json(text, json, failed)
    }
}

/// Formats an amount of memory, such as "1.2 GiB".
pub(super) fn memory_text(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib >= 1024.0 {
        format!("{:.1} GiB", mib / 1024.0)
    } else {
        format!("{mib:.0} MiB")
    }
}

/// Names a daemon whose load watcher has not answered.
pub(super) fn daemon_name(daemon: &HostDaemon) -> String {
    let HostDaemon { pid, uid, .. } = daemon;
    format!(
        "virtual machine of {}, daemon process {pid}",
        user_name(*uid)
    )
}

fn unwatched_json(daemon: &HostDaemon) -> serde_json::Value {
    let processes = daemon.task_processes.iter();
    let processes: Vec<serde_json::Value> = processes
        .map(|(pid, name)| json!({ "pid": pid, "program": name, "resident_bytes": resident_bytes(*pid) }))
        .collect();
    json!({ "user": user_name(daemon.uid), "daemon_pid": daemon.pid, "processes": processes })
}

/// Formats what is known of a virtual machine whose load watcher has not answered.
fn unwatched_text(daemon: &HostDaemon) -> String {
    let mut out = format!(
        "{}\n  guests    run, whatever you state: no load watcher of this virtual machine answers\n",
        daemon_name(daemon)
    );
    for (pid, name) in daemon.task_processes.iter().take(LISTED_PROCESSES_MAX) {
        let memory = memory_text(resident_bytes(*pid));
        out.push_str(&format!("  process   {pid} {name}, {memory} of memory\n"));
    }
    match daemon.task_processes.len() {
        0 => out.push_str("  processes none\n"),
        count if count > LISTED_PROCESSES_MAX => {
            let more = count - LISTED_PROCESSES_MAX;
            out.push_str(&format!("  process   and {more} more\n"));
        }
        _ => {}
    }
    out
}

/// Formats the report of one load watcher, without what the machine has in common.
fn status_text(status: &WatcherStatus, common: Option<&OwnerLines>, now: Micros) -> String {
    let WatcherStatus { vm, user, host, .. } = status;
    let (owner_lines, policy_lines) = OwnerLines::of(status).without_common(common);
    let mut out = format!("virtual machine {vm} of {user} ({host})\n");
    out.push_str(&owner_lines);
    out.push_str(&guests_text(status, now));
    out.extend(status.tasks.iter().map(task_line));
    if status.tasks.is_empty() {
        out.push_str("  tasks     none\n");
    }
    out + &policy_lines
}

/// Formats the line of a guest.
fn task_line(guest: &GuestStatus) -> String {
    let GuestStatus {
        tid,
        program,
        pid,
        user,
        since_us,
        cpu_s,
        leftover_processes,
        resident_bytes,
    } = guest;
    let since_text = if *since_us == 0 {
        "?".into()
    } else {
        format_local_time(Micros(*since_us))
    };
    let left_text = match leftover_processes {
        0 => String::new(),
        count => format!(" (ended), left {}", process_count_text(*count)),
    };
    let memory = memory_text(*resident_bytes);
    format!(
        "  task      {tid}{left_text} {program} of {user}, process {pid}, since {since_text}, {cpu_s:.1} s of processor, \
         {memory} of memory\n"
    )
}

/// Describes what guests that must stay although they must leave hold, and how they are ended.
fn held_text(status: &WatcherStatus) -> String {
    let bytes = status.tasks.iter().map(|task| task.resident_bytes).sum();
    let memory = memory_text(bytes);
    format!("they are stopped and hold {memory} of memory; 'pvm owner end' ends them")
}

/// Describes when guests leave, or why they do not.
fn leave_text(status: &WatcherStatus, now: Micros) -> String {
    let has_guests = !status.tasks.is_empty();
    match (status.leave_at_us, status.then.as_deref()) {
        (Some(at), Some("kill")) if Micros(at) > now => {
            format!("; they are ended at {}", format_local_time(Micros(at)))
        }
        (Some(_), Some("kill")) => "; they are ended".into(),
        (Some(_), _) if !status.cannot_leave.is_empty() => match has_guests {
            true => format!(
                "; they cannot leave: {}; {}",
                status.cannot_leave,
                held_text(status)
            ),
            false => String::new(),
        },
        (Some(at), _) if has_guests && now.since(Micros(at)) > OVERDUE_AFTER => format!(
            "; they were to leave at {}, but no host has accepted them so far; {}",
            format_local_time(Micros(at)),
            held_text(status)
        ),
        (Some(at), _) => format!("; they leave at {}", format_local_time(Micros(at))),
        (None, Some(_)) => "; they are paused until guests are welcome again".into(),
        (None, None) => String::new(),
    }
}

/// Formats those lines of a load watcher's report that say what guests may do and how guests are
/// stopped.
fn guests_text(status: &WatcherStatus, now: Micros) -> String {
    let with_reason = |text: &str, reason: &str| match reason {
        "" => text.to_string(),
        reason => format!("{text}: {reason}"),
    };
    let mut out = format!(
        "  guests    {}{}\n",
        with_reason(&status.guests, &status.guests_why),
        leave_text(status, now)
    );
    if !status.stopped_by.is_empty() {
        let stopped_by = with_reason(&status.stopped_by, &status.stopped_by_why);
        out.push_str(&format!("  stopped   by {stopped_by}\n"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Micros = Micros::from_secs(50);

    fn stopped_status() -> WatcherStatus {
        WatcherStatus {
            vm: "pvm".into(),
            user: "alice".into(),
            host: "h2".into(),
            owner: "present".into(),
            confidence: 99,
            why: "olga is logged in on tty2".into(),
            guests: "stopped".into(),
            guests_why: "olga is logged in on tty2".into(),
            leave_at_us: Some(60_000_000),
            then: Some("move".into()),
            stopped_by: "signals".into(),
            stopped_by_why: "SEMPA_FREEZER=off".into(),
            ..WatcherStatus::default()
        }
    }

    fn guest(resident_bytes: u64) -> GuestStatus {
        GuestStatus {
            tid: "t80001".into(),
            program: "worker".into(),
            pid: 4711,
            user: "alice".into(),
            since_us: 0,
            cpu_s: 1.0,
            leftover_processes: 0,
            resident_bytes,
        }
    }

    #[test]
    fn status_names_user_time_and_reason() {
        let text = status_text(&stopped_status(), None, NOW);
        for part in [
            "virtual machine pvm of alice (h2)",
            "present, 99 % sure: olga is logged in on tty2",
            &format!(
                "stopped: olga is logged in on tty2; they leave at {}",
                format_local_time(Micros(60_000_000))
            ),
            "stopped   by signals: SEMPA_FREEZER=off",
            "tasks     none",
            "policy    none",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    /// Guests that cannot leave are never said to leave: the report says why not, what they hold,
    /// and which command ends them.
    #[test]
    fn guests_that_cannot_leave_are_not_said_to_leave() {
        let cannot_leave = WatcherStatus {
            cannot_leave: "the virtual machine has no other host".into(),
            tasks: vec![guest(3 << 29), guest(1 << 28)],
            ..stopped_status()
        };
        let text = status_text(&cannot_leave, None, NOW);
        assert!(!text.contains("they leave at"), "{text}");
        assert!(
            text.contains(
                "they cannot leave: the virtual machine has no other host; they are stopped and hold 1.8 GiB of \
                 memory; 'pvm owner end' ends them"
            ),
            "{text}"
        );
        assert!(text.contains("256 MiB of memory"), "{text}");
        // Without guests nothing is held.
        let without_guests = WatcherStatus {
            tasks: Vec::new(),
            ..cannot_leave
        };
        let text = status_text(&without_guests, None, NOW);
        assert!(
            !text.contains("they leave") && !text.contains("cannot"),
            "{text}"
        );
    }

    /// Guests that are still here some time after their eviction time are not said to leave either.
    #[test]
    fn overdue_guests_are_named() {
        let status = WatcherStatus {
            tasks: vec![guest(1 << 20)],
            ..stopped_status()
        };
        let soon = guests_text(&status, Micros::from_secs(61));
        let minute = format_local_time(Micros(60_000_000));
        assert!(soon.contains(&format!("they leave at {minute}")), "{soon}");
        let late = guests_text(&status, Micros::from_secs(70));
        assert!(
            late.contains(&format!(
                "they were to leave at {minute}, but no host has accepted them"
            )) && late.contains("hold 1 MiB"),
            "{late}"
        );
        let kill = WatcherStatus {
            then: Some("kill".into()),
            ..status
        };
        assert!(guests_text(&kill, NOW).contains(&format!("they are ended at {minute}")));
    }

    /// The clock to which hours refer is named with its zone.
    #[test]
    fn hours_are_reported_with_their_zone() {
        use pvm_load_watcher::status::PolicySetting;
        let status = WatcherStatus {
            policy: vec![PolicySetting {
                name: "never".into(),
                value: "[\"9:00-17:00\"]".into(),
                from: "pvm owner".into(),
            }],
            clock: "10:41, CEST (UTC+02:00)".into(),
            ..stopped_status()
        };
        let text = status_text(&status, None, NOW);
        assert!(text.contains("clock     10:41, CEST (UTC+02:00)"), "{text}");
    }

    /// A virtual machine without a load watcher that answers is reported with its processes.
    #[test]
    fn daemon_without_watcher_is_reported() {
        let own_pid = std::process::id().cast_signed();
        let daemon = HostDaemon {
            pid: 17,
            uid: 0,
            task_processes: vec![(own_pid, "worker".into())],
        };
        let text = unwatched_text(&daemon);
        assert!(
            text.starts_with("virtual machine of root, daemon process 17\n"),
            "{text}"
        );
        assert!(
            text.contains("no load watcher of this virtual machine answers"),
            "{text}"
        );
        assert!(
            text.contains(&format!("process   {own_pid} worker, ")),
            "{text}"
        );
        assert!(unwatched_json(&daemon)["processes"][0]["resident_bytes"].as_u64() > Some(0));
    }
}
