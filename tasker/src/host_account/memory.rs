//! Measures the memory of the tasks of a user with a limit, and kills a task that uses most while
//! the user is over the limit.
//!
//! Memory is what a limit of a control group would not reclaim: anonymous and shared memory,
//! resident or swapped out. The first measurement counts memory that several processes share for
//! each of them. Only if the user is then over the limit, the exact share of each process is read,
//! which takes some milliseconds for each GiB. All taskers of the user do so within one interval,
//! so a user counts as over the limit after two measurements.

use crate::census::Census;
use crate::freezer;
use crate::supervisor::Supervisor;
use crate::task::TaskPhase;
use checkpoint::proc;
use sempa_proto::Tid;
use sempa_proto::host_limit::HostLimit;
use sempa_proto::tasker::FromTasker;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

const MEASURE_INTERVAL: Duration = Duration::from_secs(1);
/// Number of consecutive measurements over the limit after which a task is killed.
const EXCESSES_MAX: u32 = 2;

/// A task, or what an ended task has left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemoryOwner {
    tid: Tid,
    has_ended: bool,
}

/// The result of one measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Measurement {
    total_bytes: u64,
    /// The killable owner with the most memory, and its bytes.
    largest: Option<(MemoryOwner, u64)>,
}

impl Measurement {
    fn add(&mut self, owner: MemoryOwner, bytes: u64, is_killable: bool) {
        self.total_bytes = self.total_bytes.saturating_add(bytes);
        let largest_bytes = self.largest.map_or(0, |(_, bytes)| bytes);
        if is_killable && bytes > largest_bytes {
            self.largest = Some((owner, bytes));
        }
    }
}

/// The measurements of a tasker.
#[derive(Debug, Default)]
pub(crate) struct MemoryWatch {
    /// Time of the next measurement; `None` if none is needed.
    next_at: Option<Instant>,
    last: Measurement,
    /// Number of consecutive measurements over the limit.
    excess_count: u32,
    /// Tasks that were killed. Their memory does not count any more.
    killed_tids: BTreeSet<Tid>,
}

impl MemoryWatch {
    /// Returns the time until [`Supervisor::check_memory_limit`] must be called.
    pub(crate) fn delay(&self) -> Option<Duration> {
        self.next_at
            .map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Returns the memory of all tasks, and of the killable task that uses most, in bytes.
    pub(super) fn measured_bytes(&self) -> (u64, u64) {
        let largest_bytes = self.last.largest.map_or(0, |(_, bytes)| bytes);
        (self.last.total_bytes, largest_bytes)
    }
}

impl Supervisor {
    /// Measures the memory of the tasks when a measurement is due, and kills the task that uses
    /// most if the user is over the limit and no other tasker of the user has a larger one.
    pub(crate) fn check_memory_limit(&mut self) {
        let Some(limit_bytes) = self
            .account
            .as_ref()
            .and_then(|account| account.memory_limit())
        else {
            return;
        };
        if self.tasks.is_empty() && self.leftovers.ended_task_count() == 0 {
            self.memory_watch = MemoryWatch::default();
            return;
        }
        let now = Instant::now();
        if *self
            .memory_watch
            .next_at
            .get_or_insert(now + MEASURE_INTERVAL)
            > now
        {
            return;
        }
        self.memory_watch.next_at = Some(now + MEASURE_INTERVAL);
        // Without the records of the other taskers the next measurement decides.
        let others = self
            .account
            .as_ref()
            .and_then(|account| account.others_of_user().ok());
        let Some(others) = others else { return };
        let other_bytes = others
            .total_bytes
            .saturating_add(self.arriving_memory_bytes());
        let census = Census::default();
        let mut measurement = self.measure_memory(&census, resident_bytes);
        if measurement.total_bytes.saturating_add(other_bytes) > limit_bytes {
            measurement = self.measure_memory(&census, proportional_bytes);
        }
        self.memory_watch.last = measurement;
        self.record_usage();
        let used_bytes = measurement.total_bytes.saturating_add(other_bytes);
        if used_bytes <= limit_bytes {
            self.memory_watch.excess_count = 0;
            return;
        }
        self.memory_watch.excess_count += 1;
        if self.memory_watch.excess_count >= EXCESSES_MAX
            && let Some((owner, bytes)) = measurement.largest
            && others.has_no_larger_task(bytes)
        {
            self.kill_for_memory(owner, bytes, used_bytes, limit_bytes);
        }
    }

    fn kill_for_memory(
        &mut self,
        owner: MemoryOwner,
        bytes: u64,
        used_bytes: u64,
        limit_bytes: u64,
    ) {
        let MemoryOwner { tid, has_ended } = owner;
        let user = self.account.as_ref().map(|account| account.user_name());
        let limit = HostLimit::MemoryOfUser {
            user: user.unwrap_or_default(),
            used_bytes,
            limit_bytes,
        };
        tracing::warn!(%tid, bytes, "killed: {limit}");
        self.send(&FromTasker::KilledForLimit {
            tid,
            has_ended,
            limit,
        });
        match has_ended {
            true => self.kill_leftovers(tid),
            false => self.kill_task(tid),
        }
        let watch = &mut self.memory_watch;
        watch.killed_tids.insert(tid);
        watch.excess_count = 0;
        watch.last.total_bytes = watch.last.total_bytes.saturating_sub(bytes);
        watch.last.largest = None;
        self.record_usage();
    }

    /// Reports that the kernel has killed a task because the group of its user is over the limit.
    /// `status` is the wait status of the task. Memory that grows fast exceeds the kernel's limit
    /// before the tasker has measured it twice.
    pub(crate) fn report_kernel_kill(&mut self, tid: Tid, status: i32) {
        let was_killed = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL;
        let Some(account) = self.account.as_ref().filter(|_| was_killed) else {
            return;
        };
        let (user, limit_bytes) = (account.user_name(), account.memory_limit());
        if let Some(limit_bytes) = limit_bytes
            && !self.memory_watch.killed_tids.contains(&tid)
            && let Ok(freezer) = &mut self.freezer
            && freezer.take_kernel_kill()
        {
            self.send(&FromTasker::KilledForLimit {
                tid,
                has_ended: false,
                limit: HostLimit::MemoryOfUser {
                    user,
                    used_bytes: freezer::kernel_limit(limit_bytes),
                    limit_bytes,
                },
            });
        }
    }

    /// Measures the memory of all tasks and of what ended tasks have left behind, except those that
    /// were killed.
    fn measure_memory(
        &mut self,
        census: &Census,
        bytes_of: impl Fn(i32) -> Option<u64>,
    ) -> Measurement {
        let sum = |pids: Vec<i32>| {
            let bytes = pids.into_iter().filter_map(&bytes_of);
            bytes.fold(0, u64::saturating_add)
        };
        let mut measurement = Measurement::default();
        let mut killed_tids = BTreeSet::new();
        let is_killed = |tid: Tid| self.memory_watch.killed_tids.contains(&tid);
        for task in self.tasks.values() {
            let tid = task.tid;
            if is_killed(tid) {
                killed_tids.insert(tid);
                continue;
            }
            // Others are about to leave, and their copies may need them.
            let is_killable = matches!(task.phase, TaskPhase::Running | TaskPhase::Stopping { .. });
            let has_ended = false;
            let owner = MemoryOwner { tid, has_ended };
            measurement.add(owner, sum(task.member_pids_in(census)), is_killable);
        }
        for (tid, pids) in self.leftovers.living_pids_of_ended(census) {
            if is_killed(tid) {
                killed_tids.insert(tid);
                continue;
            }
            let has_ended = true;
            measurement.add(MemoryOwner { tid, has_ended }, sum(pids), true);
        }
        self.memory_watch.killed_tids = killed_tids;
        measurement
    }
}

/// Returns the anonymous and shared memory of a process, resident or swapped out, in bytes. `None`
/// for a process that has released its memory.
fn resident_bytes(pid: i32) -> Option<u64> {
    let status = proc::status(pid)?;
    let resident_kib = match status.rssanon {
        Some(anonymous) => anonymous.saturating_add(status.rssshmem.unwrap_or(0)),
        // A kernel before Linux 4.5 does not distinguish files.
        None => status.vmrss?,
    };
    let kib = resident_kib.saturating_add(status.vmswap.unwrap_or(0));
    Some(kib.saturating_mul(1024))
}

/// As [`resident_bytes`], but divides shared memory by the number of processes that have mapped it.
fn proportional_bytes(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"));
    text.ok()
        .and_then(|text| parse_smaps_rollup(&text))
        .or_else(|| resident_bytes(pid))
}

/// Returns the memory in bytes from the text of /proc/PID/smaps_rollup; `None` if the kernel does
/// not tell files from other memory.
fn parse_smaps_rollup(text: &str) -> Option<u64> {
    let kib_of = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    let kib = kib_of("Pss_Anon:")?
        .saturating_add(kib_of("Pss_Shmem:")?)
        .saturating_add(kib_of("SwapPss:").unwrap_or(0));
    Some(kib.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rollup_is_parsed() {
        let text = "5555-7777 ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\nPss: 500 kB\n\
                    Pss_Dirty: 7 kB\nPss_Anon:   100 kB\nPss_File: 380 kB\nPss_Shmem:   20 kB\n\
                    Swap: 9 kB\nSwapPss: 4 kB\n";
        assert_eq!(parse_smaps_rollup(text), Some(124 * 1024));
        assert_eq!(parse_smaps_rollup("Pss: 500 kB\n"), None);
        let own_pid = std::process::id().cast_signed();
        let exact = proportional_bytes(own_pid).expect("this process");
        let bound = resident_bytes(own_pid).expect("this process");
        assert!(exact > 0 && exact <= bound + (1 << 20), "{exact} {bound}");
    }

    /// The largest killable task is found, and tasks that may not be killed count.
    #[test]
    fn largest_killable_task_is_found() {
        let owner = |tid| MemoryOwner {
            tid: Tid::from_raw(tid),
            has_ended: false,
        };
        let mut measurement = Measurement::default();
        measurement.add(owner(1), 10, true);
        measurement.add(owner(2), 90, false);
        measurement.add(owner(3), 30, true);
        measurement.add(owner(4), 30, true);
        assert_eq!(measurement.total_bytes, 160);
        assert_eq!(measurement.largest, Some((owner(3), 30)));
    }
}
