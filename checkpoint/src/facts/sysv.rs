//! Detects the use of System V semaphores, message queues and shared memory (sysvipc(7)).
//!
//! These objects belong to a host, not to a process. At the target of a migration a task would find
//! none of its objects, or objects of other programs. Processes have no descriptors for the
//! objects, but the kernel records which process created or last used each object.
#![allow(unsafe_code)] // One call, which has no wrapper.

use crate::proc::sysv_table;
use std::collections::BTreeSet;

/// Maximum number of semaphores that are checked. A single semaphore set may contain thousands.
const SEMAPHORES_MAX: usize = 16_384;

/// Returns a description of an object that one of these processes was the last to create or use;
/// `None` if no such object exists.
pub(super) fn object_used_by(processes: &[i32]) -> Option<String> {
    let own: BTreeSet<i32> = processes.iter().copied().collect();
    let mentions_own = |table: &str, columns: &[&str]| {
        rows(table, columns)
            .into_iter()
            .any(|row| row.iter().flatten().any(|pid| own.contains(pid)))
    };
    if mentions_own(&sysv_table("shm"), &["cpid", "lpid"]) {
        return Some("System V shared memory".into());
    }
    if mentions_own(&sysv_table("msg"), &["lspid", "lrpid"]) {
        return Some("a System V message queue".into());
    }
    let sets = rows(&sysv_table("sem"), &["semid", "nsems"])
        .into_iter()
        .filter_map(|row| Some((row[0]?, row[1]?)));
    let mut semaphores = sets
        .flat_map(|(set, count)| (0..count).map(move |number| (set, number)))
        .take(SEMAPHORES_MAX);
    let is_used = semaphores
        .any(|(set, number)| last_user(set, number).is_some_and(|pid| own.contains(&pid)));
    is_used.then(|| "System V semaphores".into())
}

/// Returns the values of these columns in each row of a table whose first line contains the column
/// names. A value is `None` if the column is missing or not a number.
fn rows(table: &str, columns: &[&str]) -> Vec<Vec<Option<i32>>> {
    let mut lines = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<&str>>());
    let heading = lines.next().unwrap_or_default();
    let positions: Vec<Option<usize>> = columns
        .iter()
        .map(|name| heading.iter().position(|word| word == name))
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

/// Returns the process that was the last to change a semaphore; `None` if no process has changed
/// it, or if access is denied.
fn last_user(set: i32, number: i32) -> Option<i32> {
    // SAFETY: GETPID takes no further argument and accesses no memory of this process.
    let pid = unsafe { libc::semctl(set, number, libc::GETPID) };
    (pid > 0).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_found_by_name() {
        let table = "       key      msqid perms lspid lrpid\n         0          7   600    41     0\n  5 8\n";
        assert_eq!(
            rows(table, &["msqid", "lspid"]),
            [[Some(7), Some(41)], [Some(8), None]]
        );
        assert_eq!(rows(table, &["nobody"]), [[None], [None]]);
        assert!(rows("", &["msqid"]).is_empty());
    }

    #[test]
    fn last_user_of_semaphore_is_found() {
        // SAFETY: semget creates a new set of one semaphore and accesses no memory.
        let set = unsafe { libc::semget(libc::IPC_PRIVATE, 1, 0o600) };
        if set < 0 {
            return;
        }
        let own = std::process::id() as i32;
        let before = last_user(set, 0);
        let mut change = libc::sembuf {
            sem_num: 0,
            sem_op: 1,
            sem_flg: 0,
        };
        // SAFETY: `change` lives during the call, and 1 is the number of its elements.
        let changed = unsafe { libc::semop(set, &raw mut change, 1) };
        let (after, found) = (last_user(set, 0), object_used_by(&[own]));
        // SAFETY: IPC_RMID takes no further argument and accesses no memory.
        unsafe { libc::semctl(set, 0, libc::IPC_RMID) };
        assert_eq!((before, changed, after), (None, 0, Some(own)));
        assert_eq!(found.as_deref(), Some("System V semaphores"));
        assert_eq!(object_used_by(&[-5]), None);
    }
}
