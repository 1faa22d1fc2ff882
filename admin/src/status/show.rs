//! Formats the status of this machine as text. Pure.

use super::{MachineStatus, ServiceHealth, VmStatus};
use crate::service::ServiceState;
use crate::table::{format_bytes, format_table, printable};
use std::collections::BTreeSet;

/// Name of a virtual machine whose load watcher does not answer.
const UNKNOWN_NAME: &str = "?";

pub(super) fn format(status: &MachineStatus) -> String {
    let load = match status.load {
        Some([one, five, fifteen]) => format!("load {one:.2} {five:.2} {fifteen:.2}"),
        None => "load unknown".into(),
    };
    let mut text = format!(
        "{}: {load} on {} processors, {} of memory available\n",
        status.host,
        status.cores,
        format_bytes(status.available_bytes)
    );
    match status.drained.as_deref() {
        None => {}
        Some("") => text.push_str("drained: no guest may be here\n"),
        Some(reason) => text.push_str(&format!("drained: {}\n", printable(reason))),
    }
    text.push_str(&format_health(&status.service));
    text.push('\n');
    if status.virtual_machines.is_empty() {
        text.push_str("no virtual machine is on this machine\n");
    } else {
        text.push_str(&format_table(&vm_rows(&status.virtual_machines)));
        text.push('\n');
        text.push_str(&format_table(&user_rows(status)));
    }
    let remarks = remarks(status);
    if !remarks.is_empty() {
        text.push('\n');
    }
    for remark in remarks {
        text.push_str(&format!("{}\n", printable(&remark)));
    }
    text
}

fn format_health(health: &ServiceHealth) -> String {
    let state = match &health.state {
        ServiceState::Answers { version, .. } => format!("version {version}, answers"),
        ServiceState::Absent => "not running: only root's tasks migrate by CRIU".into(),
        ServiceState::SwitchedOff => "switched off by the environment".into(),
        ServiceState::Failed { why } => format!("fails: {why}"),
    };
    let line = |name: &str, result: &Result<String, String>| match result {
        Ok(value) => vec![name.into(), printable(value)],
        Err(why) => vec![name.into(), printable(why)],
    };
    format_table(&[
        vec!["service".into(), printable(&state)],
        line("site key", &health.site_key),
        line("engine", &health.engine),
        line("settings", &health.settings),
        line("owners", &health.owner_sense),
    ])
}

fn vm_rows(virtual_machines: &[VmStatus]) -> Vec<Vec<String>> {
    let header = [
        "VM",
        "USER",
        "TASKER",
        "STARTED BY",
        "TASKS",
        "MEMORY",
        "OWNER",
        "GUESTS",
    ];
    let row = |vm: &VmStatus| {
        let watcher = vm.watcher.as_ref();
        let of_watcher = |text: fn(&pvm_load_watcher::status::WatcherStatus) -> String| {
            watcher.map_or_else(|| UNKNOWN_NAME.into(), text)
        };
        let tasker = vm.tasker.as_ref();
        let started_by = tasker.map_or(UNKNOWN_NAME, |tasker| match tasker.by_service {
            true => "service",
            false => "daemon",
        });
        vec![
            printable(vm.name.as_deref().unwrap_or(UNKNOWN_NAME)),
            printable(&vm.user),
            tasker.map_or_else(|| UNKNOWN_NAME.into(), |tasker| tasker.pid.to_string()),
            started_by.into(),
            vm.task_count().to_string(),
            format_bytes(vm.task_bytes),
            of_watcher(|watcher| printable(&watcher.owner)),
            of_watcher(|watcher| printable(&watcher.guests)),
        ]
    };
    std::iter::once(header.map(String::from).into())
        .chain(virtual_machines.iter().map(row))
        .collect()
}

fn user_rows(status: &MachineStatus) -> Vec<Vec<String>> {
    let header = ["USER", "VMS", "TASKS", "MEMORY"];
    let rows = status.users.iter().map(|user| {
        vec![
            printable(&user.user),
            user.virtual_machines.to_string(),
            user.task_processes.to_string(),
            format_bytes(user.task_bytes),
        ]
    });
    std::iter::once(header.map(String::from).into())
        .chain(rows)
        .collect()
}

/// Returns sentences about what is wrong, each once.
fn remarks(status: &MachineStatus) -> BTreeSet<String> {
    let mut remarks: BTreeSet<String> = status.errors.iter().cloned().collect();
    for vm in &status.virtual_machines {
        let Some(watcher) = &vm.watcher else {
            let pid = vm.tasker.as_ref().map_or(0, |tasker| tasker.pid);
            remarks.insert(format!(
                "no load watcher answers for the tasker {pid} of {}",
                vm.user
            ));
            continue;
        };
        remarks.extend(watcher.wrong.iter().cloned());
        let name = format!("virtual machine {} of {}", watcher.vm, watcher.user);
        for why in [
            &watcher.guests_why,
            &watcher.cannot_leave,
            &watcher.directive_error,
        ] {
            if !why.is_empty() {
                remarks.insert(format!("{name}: {why}"));
            }
        }
    }
    remarks
}

#[cfg(test)]
mod tests {
    use super::super::{TaskProcess, TaskerStatus, UserStatus};
    use super::*;
    use pvm_load_watcher::status::WatcherStatus;

    fn machine(virtual_machines: Vec<VmStatus>) -> MachineStatus {
        MachineStatus {
            host: "h1".into(),
            load: Some([0.5, 0.25, 0.0]),
            cores: 8,
            available_bytes: 3 << 30,
            service: ServiceHealth {
                state: ServiceState::Absent,
                site_key: Err("there is no site key".into()),
                engine: Ok("/opt/criu".into()),
                settings: Ok("/etc/s.toml".into()),
                owner_sense: Ok("one load watcher".into()),
            },
            drained: None,
            virtual_machines,
            users: vec![UserStatus {
                user: "alice".into(),
                virtual_machines: 1,
                task_processes: 1,
                task_bytes: 2048,
            }],
            errors: Vec::new(),
        }
    }

    #[test]
    fn machine_without_guests_is_shown() {
        let text = format(&machine(Vec::new()));
        for part in [
            "h1: load 0.50 0.25 0.00 on 8 processors, 3.0G of memory available\n",
            "service   not running",
            "site key  there is no site key\n",
            "engine    /opt/criu\n",
            "no virtual machine is on this machine\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    /// A virtual machine has one row. Texts of other users cannot change the terminal.
    #[test]
    fn virtual_machines_are_rows() {
        let watcher = WatcherStatus {
            vm: "lab".into(),
            user: "alice".into(),
            owner: "absent".into(),
            guests: "welcome".into(),
            wrong: vec!["bad\x1b[2J file".into()],
            ..WatcherStatus::default()
        };
        let vm = VmStatus {
            name: Some("lab".into()),
            user: "alice".into(),
            tasker: Some(TaskerStatus {
                pid: 77,
                by_service: true,
                tasks: vec![TaskProcess {
                    pid: 78,
                    program: "ring".into(),
                    resident_bytes: 2048,
                }],
            }),
            task_bytes: 2048,
            watcher: Some(watcher),
        };
        let unknown = VmStatus {
            name: None,
            user: "bob".into(),
            tasker: None,
            task_bytes: 0,
            watcher: None,
        };
        let mut machine = machine(vec![vm, unknown]);
        machine.drained = Some("new disks".into());
        let text = format(&machine);
        for part in [
            "drained: new disks\n",
            "lab  alice  77      service     1      2.0K    absent  welcome\n",
            "?    bob    ?       ?           0      0       ?       ?\n",
            "alice  1    1      2.0K\n",
            "no load watcher answers for the tasker 0 of bob\n",
            "bad?[2J file\n",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }
}
