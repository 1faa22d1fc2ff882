//! `pvm_gstat` prints the groups of the virtual machine. Under the name `pvmgroups` it prints them
//! in the format of PVM's dump.

use libpvm::Vm;
use libpvm::proto::Tid;
use libpvm::proto::group::{GroupInfo, GroupWait};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&name)
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    match run(std::env::args().nth(1).as_deref(), &name) {
        Ok(text) => match std::io::stdout().write_all(text.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            // The reader has closed the pipe.
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the text to print.
fn run(option: Option<&str>, name: &str) -> Result<String, String> {
    match option {
        None => {}
        Some("--version") => return Ok(format!("{name} {}\n", env!("CARGO_PKG_VERSION"))),
        Some("--help") => {
            return Ok(format!(
                "Usage: {name}\nPrints the groups of the virtual machine.\n"
            ));
        }
        Some(other) => {
            return Err(format!(
                "{other} is not an option; only --help and --version are"
            ));
        }
    }
    let vm = Vm::enroll().map_err(|error| error.to_string())?;
    let groups = vm.groups().map_err(|error| error.to_string())?;
    // An error is ignored: the connection closes with the process.
    let _ = vm.exit();
    Ok(if name == "pvmgroups" {
        dump(&groups)
    } else {
        status(&groups)
    })
}

/// Returns the instance number and the tid of each member.
fn members(group: &GroupInfo) -> impl Iterator<Item = (usize, Tid)> {
    group
        .members
        .iter()
        .copied()
        .enumerate()
        .filter(|(_, tid)| *tid != Tid::NONE)
}

/// Returns the number of tasks that a barrier requires and the number that have arrived; −1 and 0
/// if no task waits.
fn progress(meeting: Option<&GroupWait>) -> (i64, usize) {
    meeting.map_or((-1, 0), |meeting| {
        (i64::from(meeting.required), meeting.waiting.len())
    })
}

// The functions below ignore the results of writing to a string, which cannot fail.

/// Formats groups as `pvm_gstat` does.
fn status(groups: &[GroupInfo]) -> String {
    if groups.is_empty() {
        return "no groups exist\n".to_string();
    }
    let mut out = String::new();
    for group in groups {
        let (wanted, reached) = progress(group.barrier.as_ref());
        let (name, size) = (String::from_utf8_lossy(&group.name), group.size());
        let _ = writeln!(
            out,
            "group: {name}, size: {size},  barrier_count {wanted}, barrier_reached {reached}\ntids:"
        );
        for (instance, tid) in members(group) {
            let _ = write!(out, "{instance} {:#x}\t", tid.raw());
        }
        out.push('\n');
        if let Some(barrier) = &group.barrier {
            out.push_str("tids waiting on barrier:\n");
            barrier
                .waiting
                .iter()
                .for_each(|tid| out.push_str(&format!("{:#x}\t", tid.raw())));
            out.push('\n');
        }
    }
    out
}

/// Formats groups as the dump of PVM's group server.
fn dump(groups: &[GroupInfo]) -> String {
    let mut out = format!("DUMP {} groups:\n", groups.len());
    for group in groups {
        let (wanted, reached) = progress(group.barrier.as_ref());
        let (freezing, frozen) = progress(group.freeze.as_ref());
        let (name, size) = (String::from_utf8_lossy(&group.name), group.size());
        let _ = writeln!(
            out,
            " group: {name}  size: {size} barrier_count: {wanted} barrier_reached {reached}"
        );
        let _ = writeln!(
            out,
            " state: {:?}  sgroup_count: {freezing} sgroup_reached {frozen}",
            group.state
        );
        out.push_str("  Tids: ");
        members(group)
            .for_each(|(instance, tid)| out.push_str(&format!("({instance},  {:#x}) ", tid.raw())));
        out.push('\n');
        for (what, meeting) in [("barrier", &group.barrier), ("freeze", &group.freeze)] {
            let Some(meeting) = meeting else { continue };
            let _ = write!(out, "  Waiting for the {what}: ");
            meeting
                .waiting
                .iter()
                .for_each(|tid| out.push_str(&format!("{:#x} ", tid.raw())));
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use libpvm::proto::group::GroupState;

    fn group() -> GroupInfo {
        let tid = |n| Tid::from_raw(0x40000 + n);
        GroupInfo {
            name: b"gg".to_vec(),
            state: GroupState::Dynamic,
            members: vec![Tid::NONE, tid(7), tid(1)],
            barrier: Some(GroupWait {
                required: 3,
                waiting: vec![tid(1)],
            }),
            freeze: None,
        }
    }

    /// The status of groups is printed as PVM prints it.
    #[test]
    fn group_status_matches_pvm() {
        let text = "group: gg, size: 2,  barrier_count 3, barrier_reached 1\ntids:\n1 0x40007\t2 0x40001\t\n\
                    tids waiting on barrier:\n0x40001\t\n";
        assert_eq!(status(&[group()]), text);
        assert_eq!(status(&[]), "no groups exist\n");
        let idle = GroupInfo {
            barrier: None,
            ..group()
        };
        assert!(
            status(&[idle])
                .ends_with("barrier_count -1, barrier_reached 0\ntids:\n1 0x40007\t2 0x40001\t\n")
        );
    }

    /// The dump lists the waiting tasks of each meeting.
    #[test]
    fn dump_lists_waiting_tasks() {
        let text = dump(&[group()]);
        assert!(
            text.starts_with(
                "DUMP 1 groups:\n group: gg  size: 2 barrier_count: 3 barrier_reached 1\n"
            ),
            "{text}"
        );
        assert!(
            text.contains("(1,  0x40007) (2,  0x40001)") && text.contains("barrier: 0x40001"),
            "{text}"
        );
    }
}
