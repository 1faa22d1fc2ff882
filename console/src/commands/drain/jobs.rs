//! The jobs that remain on a host, and the order in which a drain checkpoints them. Pure.

use super::estimate::{ESTIMATE_AGE_MAX, TransferTotals, write_seconds};
use sempa_proto::checkpoint::CheckpointEntry;
use sempa_proto::{Micros, Tid};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Instant;

/// Tasks that remain on a host, each with the reason why the task cannot leave. The reason is
/// `None` if the task can leave.
pub(super) type RemainingTasks = BTreeMap<Tid, Option<String>>;

/// State of a task that is still on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DepartureState {
    /// No other host accepts the task.
    Stuck,
    /// The task is queued for migration.
    Queued,
    /// The task is migrating, and its job cannot be checkpointed before the end of the migration.
    Migrating,
}

/// A job that has tasks on the host and can be checkpointed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemainingJob {
    pub(super) job: Tid,
    /// Tasks of the job on the host.
    pub(super) tasks_on_host: Vec<Tid>,
    /// Work that the job would lose: the sum of the times that its tasks, on all hosts, have run
    /// since its newest checkpoint.
    pub(super) unsaved_work: Micros,
    /// Bytes of memory of all tasks of the job, on all hosts.
    pub(super) memory_bytes: u64,
    pub(super) state: DepartureState,
}

impl RemainingJob {
    /// Returns the microseconds of work saved per second of checkpointing.
    fn work_saved_per_second(&self, transfer_totals: TransferTotals) -> u64 {
        (self.unsaved_work.0 as f64 / write_seconds(1, self.memory_bytes, transfer_totals)) as u64
    }
}

/// The attempts of this drain to checkpoint a job.
#[derive(Debug)]
pub(super) struct CheckpointAttempts {
    pub(super) count: u32,
    pub(super) last_attempt_at: Instant,
    /// True if every further attempt would fail, too.
    pub(super) failure_is_permanent: bool,
    /// The error line that was printed last.
    pub(super) last_error: String,
}

/// Returns the state of a job from the states of its tasks on the host. The job is stuck if a task
/// is stuck. Otherwise the job is migrating if a task is migrating or if there are no tasks.
/// Otherwise the job is queued.
pub(super) fn job_state(states: &[DepartureState]) -> DepartureState {
    let stuck_state = states.iter().find(|state| **state == DepartureState::Stuck);
    stuck_state
        .or(states.iter().max())
        .copied()
        .unwrap_or(DepartureState::Migrating)
}

/// Selects the job to checkpoint next.
///
/// Stuck jobs come first, ordered by the work that is saved per second of writing. Queued jobs
/// follow, the largest first, because the largest would leave last. If `queued_leave_in_time` is
/// true, queued jobs are not selected. Jobs with failed attempts come after all others, and are not
/// selected until the last attempt is [`ESTIMATE_AGE_MAX`] ago.
pub(super) fn select_job(
    mut jobs: Vec<RemainingJob>,
    queued_leave_in_time: bool,
    transfer_totals: TransferTotals,
    attempts: &BTreeMap<Tid, CheckpointAttempts>,
) -> Option<RemainingJob> {
    jobs.retain(|remaining_job| match remaining_job.state {
        DepartureState::Stuck => true,
        DepartureState::Queued => !queued_leave_in_time,
        DepartureState::Migrating => false,
    });
    jobs.retain(|remaining_job| {
        attempts
            .get(&remaining_job.job)
            .is_none_or(|attempts| attempts.last_attempt_at.elapsed() >= ESTIMATE_AGE_MAX)
    });
    jobs.into_iter().min_by_key(|remaining_job| {
        let priority = if remaining_job.state == DepartureState::Stuck {
            remaining_job.work_saved_per_second(transfer_totals)
        } else {
            remaining_job.memory_bytes
        };
        (
            attempts
                .get(&remaining_job.job)
                .map_or(0, |attempts| attempts.count),
            remaining_job.state,
            Reverse((priority, remaining_job.tasks_on_host.len())),
            remaining_job.job,
        )
    })
}

/// Returns the first task of the job to which `tid` belongs. A task on the host counts as spawned
/// even if its parent has exited.
pub(super) fn find_job(tid: Tid, parents: &BTreeMap<Tid, Tid>, tasks: &RemainingTasks) -> Tid {
    let is_spawned = |tid: &Tid| {
        tasks.contains_key(tid) || parents.get(tid).is_some_and(|parent| parent.is_task())
    };
    topmost_spawned(tid, parents, is_spawned)
}

/// Returns the jobs of these tasks, each as the tid of its first task. Jobs that cannot be
/// checkpointed are omitted. The job with most tasks comes first, because one checkpoint covers all
/// tasks of a job. `console` is the console that requested the drain.
pub(super) fn find_jobs(
    console: Tid,
    parents: &BTreeMap<Tid, Tid>,
    tasks: &RemainingTasks,
) -> Vec<Tid> {
    let mut jobs = BTreeMap::<Tid, usize>::new();
    for tid in tasks.keys() {
        *jobs.entry(find_job(*tid, parents, tasks)).or_default() += 1;
    }
    // Omits jobs whose parent was started by hand and is alive: the parent cannot be checkpointed,
    // and would notice that its children end.
    jobs.retain(|job, _| {
        parents
            .get(job)
            .is_none_or(|parent| *parent == console || !parents.contains_key(parent))
    });
    let mut jobs: Vec<(Tid, usize)> = jobs.into_iter().collect();
    jobs.sort_by_key(|(job, task_count)| (Reverse(*task_count), *job));
    jobs.into_iter().map(|(job, _)| job).collect()
}

/// Returns the first task of the job of `tid`: the topmost ancestor for which `is_spawned` returns
/// true, or `tid` if there is none.
fn topmost_spawned(
    tid: Tid,
    parents: &BTreeMap<Tid, Tid>,
    is_spawned: impl Fn(&Tid) -> bool,
) -> Tid {
    let mut topmost_tid = tid;
    // The loop is bounded by the number of tasks, in case a daemon reports a cycle.
    for _ in 0..parents.len() {
        match parents
            .get(&topmost_tid)
            .filter(|parent| parents.contains_key(parent) && is_spawned(parent))
        {
            Some(parent) => topmost_tid = *parent,
            None => break,
        }
    }
    topmost_tid
}

/// Returns the line about the work that a job loses if the host leaves. `drain_checkpoint` is the
/// checkpoint of the job that this drain caused, if there is one.
pub(super) fn loss_line(
    host: &str,
    job: Tid,
    checkpoints: &[CheckpointEntry],
    drain_checkpoint: Option<&String>,
) -> String {
    let newest_checkpoint = checkpoints
        .iter()
        .filter(|checkpoint| checkpoint.job == job && checkpoint.unusable_reason.is_none())
        .max_by_key(|checkpoint| checkpoint.created_at);
    let loss = newest_checkpoint.map_or("all its work".into(), |checkpoint| {
        format!("its work since {}", checkpoint.name)
    });
    let advice = match newest_checkpoint
        .is_some_and(|checkpoint| Some(&checkpoint.name) == drain_checkpoint)
    {
        true => String::new(),
        false => format!("; 'drain {host} --checkpoint' checkpoints it"),
    };
    format!("job {job} loses {loss} if {host} leaves now{advice}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stuck jobs are checkpointed before queued jobs; migrating jobs are not checkpointed.
    #[test]
    fn stuck_jobs_are_checkpointed_before_queued_ones() {
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        let remaining_job = |n, tasks, bytes, state| RemainingJob {
            job: tid(n),
            tasks_on_host: vec![tid(n); tasks],
            unsaved_work: Micros(9),
            memory_bytes: bytes,
            state,
        };
        use DepartureState::{Migrating, Queued, Stuck};
        let candidates = || {
            vec![
                remaining_job(1, 9, 90, Migrating),
                remaining_job(2, 1, 50, Queued),
                remaining_job(3, 2, 60, Queued),
                remaining_job(4, 1, 99, Stuck),
                remaining_job(5, 2, 1, Stuck),
            ]
        };
        let mut attempts = BTreeMap::new();
        let selection_order =
            |leave_in_time, attempts: &mut BTreeMap<Tid, CheckpointAttempts>| -> Vec<i32> {
                let mut candidates = candidates();
                let selected_numbers = std::iter::from_fn(|| {
                    let selected_job = select_job(
                        candidates.clone(),
                        leave_in_time,
                        TransferTotals::default(),
                        attempts,
                    )?;
                    candidates.retain(|remaining_job| remaining_job.job != selected_job.job);
                    (1..=5).find(|n| tid(*n) == selected_job.job)
                });
                selected_numbers.collect()
            };
        assert_eq!(selection_order(false, &mut attempts), [5, 4, 3, 2]);
        assert_eq!(
            selection_order(true, &mut attempts),
            [5, 4],
            "the others leave in time"
        );
        let mut order_after_failure = |n, attempt_time| {
            attempts.insert(
                tid(n),
                CheckpointAttempts {
                    count: 1,
                    last_attempt_at: attempt_time,
                    failure_is_permanent: false,
                    last_error: String::new(),
                },
            );
            selection_order(false, &mut attempts)
        };
        let due_attempt_time = Instant::now()
            .checked_sub(ESTIMATE_AGE_MAX)
            .expect("the machine runs for longer");
        assert_eq!(
            order_after_failure(5, due_attempt_time),
            [4, 3, 2, 5],
            "a job that cannot be checkpointed yet does not delay others"
        );
        assert_eq!(
            order_after_failure(4, Instant::now()),
            [3, 2, 5],
            "a failed job is not tried again at once"
        );
        assert_eq!(
            [
                job_state(&[Queued, Migrating]),
                job_state(&[Migrating, Stuck]),
                job_state(&[Queued])
            ],
            [Migrating, Stuck, Queued]
        );
    }

    /// Of the stuck jobs, the one that saves most work per second of writing comes first.
    #[test]
    fn job_saving_most_work_per_second_is_first() {
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        let remaining_job = |n, tasks, hours: u64, bytes| {
            let lost_work = Micros::from_secs(3600 * hours);
            RemainingJob {
                job: tid(n),
                tasks_on_host: vec![tid(n); tasks],
                unsaved_work: lost_work,
                memory_bytes: bytes,
                state: DepartureState::Stuck,
            }
        };
        let first_job = |jobs: &[RemainingJob]| {
            let selected_job = select_job(jobs.to_vec(), false, (0, Micros(0)), &BTreeMap::new());
            selected_job.expect("there is one").job
        };
        // Job 1 has many tasks and a recent checkpoint. The only task of job 2 has run for a month.
        assert_eq!(
            first_job(&[
                remaining_job(1, 60, 1, 1 << 20),
                remaining_job(2, 1, 720, 1 << 20)
            ]),
            tid(2)
        );
        // Writing 10 GB takes 200 seconds. A hundred other jobs can be saved in that time.
        assert_eq!(
            first_job(&[
                remaining_job(1, 1, 20, 1 << 20),
                remaining_job(2, 1, 720, 10_000_000_000)
            ]),
            tid(1)
        );
        assert_eq!(
            first_job(&[
                remaining_job(1, 1, 5, 1 << 20),
                remaining_job(2, 2, 5, 1 << 20)
            ]),
            tid(2)
        );
    }

    #[test]
    fn loss_counts_from_newest_usable_checkpoint() {
        let (job, other_job) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        let entry =
            |checkpoint_name: &str, job, created_us, reason: Option<&str>| CheckpointEntry {
                name: checkpoint_name.into(),
                job,
                created_at: Micros(created_us),
                task_count: 1,
                stored_bytes: 1,
                unusable_reason: reason.map(String::from),
                job_ended_at: None,
                copy_hosts: Vec::new(),
            };
        let checkpoints = [
            entry("a", job, 1, None),
            entry("b", job, 2, None),
            entry("c", job, 3, Some("cut short")),
        ];
        assert_eq!(
            loss_line("h2", job, &checkpoints, None),
            "job t40001 loses its work since b if h2 leaves now; 'drain h2 --checkpoint' checkpoints it\n"
        );
        let line_after_checkpoint = |checkpoint_name: &str| {
            loss_line("h2", job, &checkpoints, Some(&checkpoint_name.into()))
        };
        assert_eq!(
            line_after_checkpoint("b"),
            "job t40001 loses its work since b if h2 leaves now\n"
        );
        assert_eq!(
            line_after_checkpoint("c"),
            loss_line("h2", job, &checkpoints, None),
            "an unusable checkpoint does not count"
        );
        let other_line = loss_line("h2", other_job, &checkpoints, None);
        assert!(other_line.starts_with("job t40002 loses all its work if h2 leaves now;"));
    }

    #[test]
    fn job_starts_at_topmost_spawned_ancestor() {
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        // Task 1 is a console, task 2 is its child, and task 3 is its grandchild. The parent of
        // task 4 has ended. A faulty daemon reports tasks 5 and 6 as parents of each other.
        let parents = BTreeMap::from([
            (tid(1), Tid::NONE),
            (tid(2), tid(1)),
            (tid(3), tid(2)),
            (tid(4), tid(9)),
            (tid(5), tid(6)),
            (tid(6), tid(5)),
        ]);
        let job = |number: i32| {
            topmost_spawned(tid(number), &parents, |tid| {
                parents.get(tid).is_some_and(|parent| parent.is_task())
            })
        };
        assert_eq!([job(3), job(2), job(4)], [tid(2), tid(2), tid(4)]);
        assert!([tid(5), tid(6)].contains(&job(5)));
    }
}
