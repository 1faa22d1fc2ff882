//! The PIDs of tasks in their PID namespaces: which number a task starts with, and whether the
//! kernel lets the tasker choose it.
//!
//! Programs use `getpid()` for seeds and for names of files, so the numbers must differ between the
//! tasks of a virtual machine, although each task is alone in its namespace. The first number of a
//! task depends only on its tid and on the range of numbers: a hand-over between hosts is not
//! needed. Children and threads get the following numbers.

use crate::clone_vfork;
use crate::last_pid;
use sempa_proto::Tid;
use std::io;

/// The smallest number that the kernel uses again after it has used the largest one
/// (RESERVED_PIDS).
const REUSED_PID_MIN: u32 = 300;
/// The kernel's default limit on a host with few processors. Each host allows lower numbers, unless
/// its administrator has lowered the limit.
const DEFAULT_PID_LIMIT: u32 = 1 << 15;
/// The highest limit that a 64-bit kernel allows (PID_MAX_LIMIT). Since Linux 6.14 each new
/// namespace has this limit; before, systemd sets it for the host.
const HIGHEST_PID_LIMIT: u32 = 1 << 22;
/// Distance between two consecutive tasks of a host, in units of 2^-64 of the range: the golden
/// ratio. Any number of consecutive multiples is spread nearly evenly over the range.
const TASK_STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Distance between tasks with the same local number on two consecutive hosts, in the same unit.
/// Found by a search for the value with which `consecutive_tasks_are_far_apart` holds.
const HOST_STEP: u64 = 0x2f55_6c06_ad39_26c7;

/// The range of the first PIDs of tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PidRange {
    first: u32,
    /// The first number after the range.
    end: u32,
}

impl PidRange {
    /// Returns the range for namespaces in which all PIDs are below `pid_limit`; `None` if the
    /// limit is too low to choose numbers.
    ///
    /// The two ranges have no number in common. So the tasks of two hosts differ also if only one
    /// of the hosts allows large numbers.
    fn below_limit(pid_limit: u32) -> Option<Self> {
        let (first, end) = match pid_limit {
            HIGHEST_PID_LIMIT.. => (DEFAULT_PID_LIMIT, HIGHEST_PID_LIMIT),
            _ => (REUSED_PID_MIN, pid_limit.min(DEFAULT_PID_LIMIT)),
        };
        (first < end).then_some(Self { first, end })
    }

    /// Returns the first PID of a task.
    fn first_pid(self, tid: Tid) -> i32 {
        let host = tid.birth_host().map_or(0, |host| u64::from(host.index()));
        let local = u64::from(tid.local_part());
        let position = TASK_STEP
            .wrapping_mul(local)
            .wrapping_add(HOST_STEP.wrapping_mul(host));
        let offset = (u128::from(position) * u128::from(self.end - self.first)) >> u64::BITS;
        (self.first + offset as u32).cast_signed()
    }
}

/// How the tasker chooses the PID of a new process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberingMethod {
    /// The system call that creates the process names the PID (Linux 5.5).
    SetTid,
    /// Another process in the namespace sets the number that precedes the PID. This takes one more
    /// process for each start.
    LastPid,
}

/// The PIDs that this host's PID namespaces allow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PidNumbering {
    /// All PIDs are below this number.
    pub(crate) pid_limit: u32,
    /// `None` if the kernel does not let the tasker choose PIDs. Then each namespace begins with
    /// the same numbers.
    method: Option<NumberingMethod>,
}

impl PidNumbering {
    /// Tests which PIDs a namespace allows, and whether the tasker may choose them. Logs a warning
    /// if it may not. Must be called where children start in a new namespace that contains only its
    /// init.
    pub(crate) fn probe() -> Self {
        let pid = |limit: u32| limit.saturating_sub(1).cast_signed();
        // The tasker can only read the limit of its own namespace, which may be lower than that of
        // a new one.
        let own_limit = checkpoint::proc::pid_limit().unwrap_or(DEFAULT_PID_LIMIT);
        let (pid_limit, helper_result) =
            match last_pid::set_by_helper(pid(HIGHEST_PID_LIMIT), Some(pid(HIGHEST_PID_LIMIT))) {
                Ok(write_result) => (HIGHEST_PID_LIMIT, Ok(write_result)),
                Err(_) => {
                    let pid = pid(own_limit);
                    (own_limit, last_pid::set_by_helper(pid, Some(pid)))
                }
            };
        let set_tid_works = helper_result.is_ok() && clone_vfork::IS_SUPPORTED;
        let last_pid_result = match helper_result {
            Ok(write_result) => write_result.map_err(io::Error::from),
            Err(_) => last_pid::set_by_helper(REUSED_PID_MIN.cast_signed(), None)
                .and_then(|write_result| write_result.map_err(io::Error::from)),
        };
        if let Err(why) = &last_pid_result {
            tracing::warn!(
                "processes that tasks of this host create have the same process ids in several \
                 tasks, because the tasker cannot set {}: {why}",
                last_pid::FILE.to_string_lossy()
            );
        }
        let method = match last_pid_result {
            _ if set_tid_works => Some(NumberingMethod::SetTid),
            Ok(()) => Some(NumberingMethod::LastPid),
            Err(_) => None,
        };
        Self { pid_limit, method }
    }

    /// Returns the PID with which the task `tid` starts; `None` if the kernel chooses it.
    pub(crate) fn first_pid(&self, tid: Tid) -> Option<FirstPid> {
        Some(FirstPid {
            pid: PidRange::below_limit(self.pid_limit)?.first_pid(tid),
            method: self.method?,
        })
    }
}

/// The PID of a new process in its namespace, and how it is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FirstPid {
    pid: i32,
    method: NumberingMethod,
}

impl FirstPid {
    pub(crate) fn pid(self) -> i32 {
        self.pid
    }

    /// True if the system call that creates the process must name the PID. Otherwise the number
    /// that precedes the PID must be set before.
    pub(crate) fn is_set_by_clone(self) -> bool {
        self.method == NumberingMethod::SetTid
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::HostId;
    use std::collections::HashSet;

    const LIMITS: [u32; 4] = [HIGHEST_PID_LIMIT, 1 << 17, DEFAULT_PID_LIMIT, 20_000];

    fn task(host: u16, local: u32) -> Tid {
        Tid::for_task(HostId::new(host).expect("a host"), local).expect("a task")
    }

    /// If each of `hosts` hosts has `tasks` tasks with consecutive numbers, two of these tasks are
    /// at least 1/25 of the range, divided by the number of tasks, apart.
    #[test]
    fn consecutive_tasks_are_far_apart() {
        const TASKS_MAX: u64 = 1 << 17;
        let counts = || (0..17).flat_map(|bit| [1 << bit, 3 << bit]);
        for hosts in counts().filter(|hosts| *hosts <= 4095) {
            for tasks in counts().filter(|tasks| (2..=TASKS_MAX).contains(&(tasks * hosts))) {
                // All positions are multiples of the steps, so the distance of two tasks depends
                // only on the differences of their numbers.
                let distance = (0..hosts)
                    .flat_map(|host| (0..tasks).map(move |local| (host, local)))
                    .filter(|difference| *difference != (0, 0))
                    .flat_map(|(host, local)| {
                        let (host, local) =
                            (HOST_STEP.wrapping_mul(host), TASK_STEP.wrapping_mul(local));
                        [host.wrapping_add(local), host.wrapping_sub(local)]
                    })
                    .map(|position| position.min(position.wrapping_neg()))
                    .min()
                    .expect("two tasks");
                let distance_min = u64::MAX / (25 * tasks * hosts);
                assert!(
                    distance >= distance_min,
                    "{tasks} tasks on each of {hosts} hosts: {distance} of {distance_min}"
                );
            }
        }
    }

    #[test]
    fn a_thousand_tasks_of_a_host_have_different_pids() {
        for limit in LIMITS {
            let range = PidRange::below_limit(limit).expect("a range");
            for (host, first_local) in [(1, 1), (3, 70_000), (4095, Tid::LOCAL_PART_MAX - 999)] {
                let pids: HashSet<i32> = (first_local..first_local + 1000)
                    .map(|local| range.first_pid(task(host, local)))
                    .collect();
                assert_eq!(pids.len(), 1000, "limit {limit}, host {host}");
            }
        }
    }

    /// The kernel accepts each PID, and hosts with a small limit use other PIDs than hosts with the
    /// highest one.
    #[test]
    fn pids_are_within_the_limit() {
        for limit in LIMITS {
            let range = PidRange::below_limit(limit).expect("a range");
            for host in [1, 2, 77, 4095] {
                for local in (1..1000).chain([Tid::LOCAL_PART_MAX]) {
                    let pid = range.first_pid(task(host, local)).cast_unsigned();
                    let allowed_pids = match limit {
                        HIGHEST_PID_LIMIT => DEFAULT_PID_LIMIT..HIGHEST_PID_LIMIT,
                        _ => REUSED_PID_MIN..limit.min(DEFAULT_PID_LIMIT),
                    };
                    assert!(allowed_pids.contains(&pid), "limit {limit}: {pid}");
                }
            }
        }
        assert_eq!(PidRange::below_limit(REUSED_PID_MIN), None);
    }
}
