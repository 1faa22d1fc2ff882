//! `pvm_gstat` prints the groups of the virtual machine. Under the name `pvmgroups` the program
//! prints the groups in the format of PVM's dump.

use libpvm::proto::Tid;
use libpvm::proto::group::{GroupInfo, GroupWait};
use libpvm::{EnrollError, Error, Vm};
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
    match output_text(std::env::args().nth(1).as_deref(), &name) {
        Ok(text) => match std::io::stdout().write_all(text.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            // Writing fails if the reader has closed the pipe.
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Reason why the program prints no groups.
#[derive(Debug, thiserror::Error)]
enum GroupStatusError {
    #[error("{0} is not an option; only --help and --version are")]
    UnknownOption(String),
    #[error(transparent)]
    Enroll(#[from] EnrollError),
    /// The group server did not return the groups.
    #[error(transparent)]
    Groups(#[from] Error),
}

/// Returns the text that the program prints for its first argument `option`. `program_name` is the
/// name by which the program was called.
fn output_text(option: Option<&str>, program_name: &str) -> Result<String, GroupStatusError> {
    match option {
        None => {}
        Some("--version") => return Ok(format!("{program_name} {}\n", env!("CARGO_PKG_VERSION"))),
        Some("--help") => {
            return Ok(format!(
                "Usage: {program_name}\nPrints the groups of the virtual machine.\n"
            ));
        }
        Some(unknown_option) => {
            return Err(GroupStatusError::UnknownOption(unknown_option.into()));
        }
    }
    let vm = Vm::enroll()?;
    let groups = vm.groups()?;
    // An error is ignored: the connection closes with the process.
    let _ = vm.exit();
    Ok(if program_name == "pvmgroups" {
        dump_text(&groups)
    } else {
        status_text(&groups)
    })
}

/// Returns the instance number and the tid of each member of a group.
fn members(group: &GroupInfo) -> impl Iterator<Item = (usize, Tid)> {
    group
        .members
        .iter()
        .copied()
        .enumerate()
        .filter(|(_, tid)| *tid != Tid::NONE)
}

/// Returns the number of tasks that a barrier or a freeze requires, and the number of tasks that
/// wait. For `None` the numbers are −1 and 0.
fn required_and_waiting(group_wait: Option<&GroupWait>) -> (i64, usize) {
    group_wait.map_or((-1, 0), |group_wait| {
        (
            i64::from(group_wait.required_members),
            group_wait.waiting_members.len(),
        )
    })
}

// Writing to a string cannot fail, so the functions below ignore the result.

/// Formats groups as PVM's `pvm_gstat` does.
fn status_text(groups: &[GroupInfo]) -> String {
    if groups.is_empty() {
        return "no groups exist\n".to_string();
    }
    let mut out = String::new();
    for group in groups {
        let (required_count, waiting_count) = required_and_waiting(group.barrier.as_ref());
        let (name, member_count) = (String::from_utf8_lossy(&group.name), group.member_count());
        let _ = writeln!(
            out,
            "group: {name}, size: {member_count},  barrier_count {required_count}, barrier_reached {waiting_count}\ntids:"
        );
        for (instance, tid) in members(group) {
            let _ = write!(out, "{instance} {:#x}\t", tid.raw());
        }
        out.push('\n');
        if let Some(barrier) = &group.barrier {
            out.push_str("tids waiting on barrier:\n");
            barrier
                .waiting_members
                .iter()
                .for_each(|tid| out.push_str(&format!("{:#x}\t", tid.raw())));
            out.push('\n');
        }
    }
    out
}

/// Formats groups as the dump of PVM's group server does.
fn dump_text(groups: &[GroupInfo]) -> String {
    let mut out = format!("DUMP {} groups:\n", groups.len());
    for group in groups {
        let (required_count, waiting_count) = required_and_waiting(group.barrier.as_ref());
        let (freeze_required_count, freeze_waiting_count) =
            required_and_waiting(group.freeze.as_ref());
        let (name, member_count) = (String::from_utf8_lossy(&group.name), group.member_count());
        let _ = writeln!(
            out,
            " group: {name}  size: {member_count} barrier_count: {required_count} barrier_reached {waiting_count}"
        );
        let _ = writeln!(
            out,
            " state: {:?}  sgroup_count: {freeze_required_count} sgroup_reached {freeze_waiting_count}",
            group.state
        );
        out.push_str("  Tids: ");
        members(group)
            .for_each(|(instance, tid)| out.push_str(&format!("({instance},  {:#x}) ", tid.raw())));
        out.push('\n');
        for (wait_name, group_wait) in [("barrier", &group.barrier), ("freeze", &group.freeze)] {
            let Some(group_wait) = group_wait else {
                continue;
            };
            let _ = write!(out, "  Waiting for the {wait_name}: ");
            group_wait
                .waiting_members
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
                required_members: 3,
                waiting_members: vec![tid(1)],
            }),
            freeze: None,
        }
    }

    #[test]
    fn group_status_matches_pvm() {
        let text = "group: gg, size: 2,  barrier_count 3, barrier_reached 1\ntids:\n1 0x40007\t2 0x40001\t\n\
                    tids waiting on barrier:\n0x40001\t\n";
        assert_eq!(status_text(&[group()]), text);
        assert_eq!(status_text(&[]), "no groups exist\n");
        let idle_group = GroupInfo {
            barrier: None,
            ..group()
        };
        assert!(
            status_text(&[idle_group])
                .ends_with("barrier_count -1, barrier_reached 0\ntids:\n1 0x40007\t2 0x40001\t\n")
        );
    }

    #[test]
    fn dump_lists_waiting_tasks() {
        let text = dump_text(&[group()]);
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
