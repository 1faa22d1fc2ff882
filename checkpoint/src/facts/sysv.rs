//! Detects the use of System V semaphores, message queues and shared memory (sysvipc(7)).
//!
//! These objects belong to a host, not to a process. At the target of a migration a task would find
//! none of its objects, or objects of other programs. Processes have no descriptors for the
//! objects, but the kernel records which process created or last used each object.
#![allow(unsafe_code)] // One call, which has no wrapper.

use crate::proc::sysv_table;
use std::collections::BTreeSet;
use std::io;

/// Maximum number of semaphores that are checked. A single semaphore set may contain thousands.
const SEMAPHORES_MAX: usize = 16_384;

/// Returns a description of the first kind of System V object that one of these processes has
/// created or was the last to use; `None` if no such object exists. For a semaphore only the last
/// change counts.
///
/// # Errors
/// A table of the kernel cannot be read.
pub(super) fn describe_used_object(processes: &[i32]) -> io::Result<Option<String>> {
    let pids: BTreeSet<i32> = processes.iter().copied().collect();
    let has_row_of_process = |table: &str, columns: &[&str]| {
        parse_rows(table, columns)
            .into_iter()
            .any(|row| row.iter().flatten().any(|pid| pids.contains(pid)))
    };
    if has_row_of_process(&sysv_table("shm")?, &["cpid", "lpid"]) {
        return Ok(Some("System V shared memory".into()));
    }
    if has_row_of_process(&sysv_table("msg")?, &["lspid", "lrpid"]) {
        return Ok(Some("a System V message queue".into()));
    }
    let semaphore_sets = parse_rows(&sysv_table("sem")?, &["semid", "nsems"])
        .into_iter()
        .filter_map(|row| Some((row[0]?, row[1]?)));
    let mut semaphores = semaphore_sets
        .flat_map(|(set_id, semaphore_count)| {
            (0..semaphore_count).map(move |index| (set_id, index))
        })
        .take(SEMAPHORES_MAX);
    let is_used = semaphores.any(|(set_id, index)| {
        last_changer_pid(set_id, index).is_some_and(|pid| pids.contains(&pid))
    });
    Ok(is_used.then(|| "System V semaphores".into()))
}

/// Returns the values of these columns in each row of a table whose first line contains the column
/// names. A value is `None` if the column is missing or not a number.
fn parse_rows(table: &str, columns: &[&str]) -> Vec<Vec<Option<i32>>> {
    let mut lines = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<&str>>());
    let heading = lines.next().unwrap_or_default();
    let positions: Vec<Option<usize>> = columns
        .iter()
        .map(|name| heading.iter().position(|column| column == name))
        .collect();
    lines
        .map(|line| {
            positions
                .iter()
                .map(|position| line.get((*position)?)?.parse().ok())
                .collect()
        })
        .collect()
}

/// Returns the PID of the process that was the last to change a semaphore; `None` if no process has
/// changed the semaphore, or if access is denied.
fn last_changer_pid(set_id: i32, index: i32) -> Option<i32> {
    // SAFETY: GETPID takes no further argument and accesses no memory of this process.
    let pid = unsafe { libc::semctl(set_id, index, libc::GETPID) };
    (pid > 0).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_found_by_name() {
        let table = "       key      msqid perms lspid lrpid\n         0          7   600    41     0\n  5 8\n";
        assert_eq!(
            parse_rows(table, &["msqid", "lspid"]),
            [[Some(7), Some(41)], [Some(8), None]]
        );
        assert_eq!(parse_rows(table, &["nobody"]), [[None], [None]]);
        assert!(parse_rows("", &["msqid"]).is_empty());
    }

    #[test]
    fn last_user_of_semaphore_is_found() {
        // SAFETY: semget creates a new set of one semaphore and accesses no memory.
        let set_id = unsafe { libc::semget(libc::IPC_PRIVATE, 1, 0o600) };
        if set_id < 0 {
            return;
        }
        let own_pid = std::process::id() as i32;
        let pid_before = last_changer_pid(set_id, 0);
        let mut operation = libc::sembuf {
            sem_num: 0,
            sem_op: 1,
            sem_flg: 0,
        };
        // SAFETY: `operation` lives during the call, and 1 is the number of its elements.
        let semop_result = unsafe { libc::semop(set_id, &raw mut operation, 1) };
        let (pid_after, description) = (
            last_changer_pid(set_id, 0),
            describe_used_object(&[own_pid]).expect("readable"),
        );
        // SAFETY: IPC_RMID takes no further argument and accesses no memory.
        unsafe { libc::semctl(set_id, 0, libc::IPC_RMID) };
        assert_eq!(
            (pid_before, semop_result, pid_after),
            (None, 0, Some(own_pid))
        );
        assert_eq!(description.as_deref(), Some("System V semaphores"));
        assert_eq!(describe_used_object(&[-5]).expect("readable"), None);
    }
}
