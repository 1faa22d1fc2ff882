//! The jobs that remain on a host, and the order in which a drain checkpoints them. Pure.

use super::estimate::{ESTIMATE_MAX_AGE, TransferTotals, write_seconds};
use sempa_proto::checkpoint::CheckpointEntry;
use sempa_proto::{Micros, Tid};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Instant;

/// Tasks that remain on a host, each with the reason why it cannot leave, if there is one.
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
    /// Number of tasks of the job on the host.
    pub(super) task_count: usize,
    /// Work that the job would lose: the sum of the times that its tasks, on all hosts, have run
    /// since its newest checkpoint.
    pub(super) unsaved_work: Micros,
    /// Bytes of memory of all tasks of the job, on all hosts.
    pub(super) bytes: u64,
    pub(super) state: DepartureState,
}

impl RemainingJob {
    /// Returns the microseconds of work saved per second of checkpointing.
    fn work_saved_per_second(&self, moved: TransferTotals) -> u64 {
        (self.unsaved_work.0 as f64 / write_seconds(1, self.bytes, moved)) as u64
    }
}

/// The attempts of this drain to checkpoint a job.
#[derive(Debug)]
pub(super) struct Attempts {
    pub(super) count: u32,
    pub(super) last_at: Instant,
    /// True if another attempt would fail, too.
    pub(super) is_permanent: bool,
    /// The error line that was printed last.
    pub(super) last_error: String,
}

/// Returns the state of a job whose tasks on the host have these states. One stuck task makes the
/// job stuck; otherwise one migrating task makes it migrating.
pub(super) fn job_state(states: &[DepartureState]) -> DepartureState {
    let stuck = states.iter().find(|state| **state == DepartureState::Stuck);
    stuck
        .or(states.iter().max())
        .copied()
        .unwrap_or(DepartureState::Migrating)
}

/// Selects the job to checkpoint next.
///
/// Stuck jobs come first, ordered by the work that is saved per second of writing. Queued jobs
/// follow, the largest first, because the largest would leave last. If `queued_leave_in_time` is
/// true, queued jobs are not selected. Jobs with failed attempts come after all others.
pub(super) fn select_job(
    mut jobs: Vec<RemainingJob>,
    queued_leave_in_time: bool,
    rate: TransferTotals,
    attempts: &BTreeMap<Tid, Attempts>,
) -> Option<RemainingJob> {
    jobs.retain(|rest| match rest.state {
        DepartureState::Stuck => true,
        DepartureState::Queued => !queued_leave_in_time,
        DepartureState::Migrating => false,
    });
    jobs.retain(|rest| {
        attempts
            .get(&rest.job)
            .is_none_or(|attempts| attempts.last_at.elapsed() >= ESTIMATE_MAX_AGE)
    });
    jobs.into_iter().min_by_key(|rest| {
        let worth = if rest.state == DepartureState::Stuck {
            rest.work_saved_per_second(rate)
        } else {
            rest.bytes
        };
        (
            attempts.get(&rest.job).map_or(0, |attempts| attempts.count),
            rest.state,
            Reverse((worth, rest.task_count)),
            rest.job,
        )
    })
}

/// Returns the first task of the job of a task. A task on the host counts as spawned even if its
/// parent has exited.
pub(super) fn job_of(tid: Tid, parents: &BTreeMap<Tid, Tid>, tasks: &RemainingTasks) -> Tid {
    let spawned = |tid: &Tid| {
        tasks.contains_key(tid) || parents.get(tid).is_some_and(|parent| parent.is_task())
    };
    topmost_spawned(tid, parents, spawned)
}

/// Returns the jobs of these tasks. The job with most tasks comes first, because one checkpoint
/// covers all its tasks. `console` is the console that requested the drain.
pub(super) fn jobs_of(
    console: Tid,
    parents: &BTreeMap<Tid, Tid>,
    tasks: &RemainingTasks,
) -> Vec<Tid> {
    let mut jobs = BTreeMap::<Tid, usize>::new();
    for tid in tasks.keys() {
        *jobs.entry(job_of(*tid, parents, tasks)).or_default() += 1;
    }
    // Omits jobs whose parent was started by hand and is alive: the parent cannot be checkpointed,
    // and would notice that its children end.
    jobs.retain(|job, _| {
        parents
            .get(job)
            .is_none_or(|by| *by == console || !parents.contains_key(by))
    });
    let mut jobs: Vec<(Tid, usize)> = jobs.into_iter().collect();
    jobs.sort_by_key(|(job, many)| (Reverse(*many), *job));
    jobs.into_iter().map(|(job, _)| job).collect()
}

/// Returns the first task of the job of `tid`: the topmost ancestor that was spawned.
fn topmost_spawned(tid: Tid, parents: &BTreeMap<Tid, Tid>, spawned: impl Fn(&Tid) -> bool) -> Tid {
    let mut top = tid;
    // Bounded by the number of tasks, in case a daemon reports a cycle.
    for _ in 0..parents.len() {
        match parents
            .get(&top)
            .filter(|parent| parents.contains_key(parent) && spawned(parent))
        {
            Some(parent) => top = *parent,
            None => break,
        }
    }
    top
}

/// Returns the line about what a job loses if the host leaves. `kept` is the checkpoint of the job
/// that this drain caused, if there is one.
pub(super) fn loss_line(
    host: &str,
    job: Tid,
    checkpoints: &[CheckpointEntry],
    kept: Option<&String>,
) -> String {
    let newest = checkpoints
        .iter()
        .filter(|set| set.job == job && set.unusable_reason.is_none())
        .max_by_key(|set| set.created);
    let lost = newest.map_or("all its work".into(), |set| {
        format!("its work since {}", set.name)
    });
    let more = match newest.is_some_and(|set| Some(&set.name) == kept) {
        true => String::new(),
        false => format!("; 'drain {host} --checkpoint' checkpoints it"),
    };
    format!("job {job} loses {lost} if {host} leaves now{more}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stuck jobs are checkpointed before queued ones; migrating jobs are not checkpointed.
    #[test]
    fn stuck_jobs_are_checkpointed_before_queued_ones() {
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        let rest = |n, tasks, bytes, state| RemainingJob {
            job: tid(n),
            task_count: tasks,
            unsaved_work: Micros(9),
            bytes,
            state,
        };
        use DepartureState::{Migrating, Queued, Stuck};
        let rests = || {
            vec![
                rest(1, 9, 90, Migrating),
                rest(2, 1, 50, Queued),
                rest(3, 2, 60, Queued),
                rest(4, 1, 99, Stuck),
                rest(5, 2, 1, Stuck),
            ]
        };
        let mut tried = BTreeMap::new();
        let order = |leave, tried: &mut BTreeMap<Tid, Attempts>| -> Vec<i32> {
            let mut rests = rests();
            let next = std::iter::from_fn(|| {
                let next = select_job(rests.clone(), leave, TransferTotals::default(), tried)?;
                rests.retain(|rest| rest.job != next.job);
                (1..=5).find(|n| tid(*n) == next.job)
            });
            next.collect()
        };
        assert_eq!(order(false, &mut tried), [5, 4, 3, 2]);
        assert_eq!(order(true, &mut tried), [5, 4], "the others leave in time");
        let mut failed = |n, at| {
            tried.insert(
                tid(n),
                Attempts {
                    count: 1,
                    last_at: at,
                    is_permanent: false,
                    last_error: String::new(),
                },
            );
            order(false, &mut tried)
        };
        let before = Instant::now()
            .checked_sub(ESTIMATE_MAX_AGE)
            .expect("the machine runs for longer");
        assert_eq!(
            failed(5, before),
            [4, 3, 2, 5],
            "a job that cannot be checkpointed yet does not delay others"
        );
        assert_eq!(
            failed(4, Instant::now()),
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
        let rest = |n, tasks, hours: u64, bytes| {
            let at_stake = Micros::from_secs(3600 * hours);
            RemainingJob {
                job: tid(n),
                task_count: tasks,
                unsaved_work: at_stake,
                bytes,
                state: DepartureState::Stuck,
            }
        };
        let first = |rests: &[RemainingJob]| {
            let next = select_job(rests.to_vec(), false, (0, Micros(0)), &BTreeMap::new());
            next.expect("there is one").job
        };
        // Many tasks with a recent checkpoint, and one task that has run for a month.
        assert_eq!(
            first(&[rest(1, 60, 1, 1 << 20), rest(2, 1, 720, 1 << 20)]),
            tid(2)
        );
        // 10 GB take 200 seconds: a hundred other jobs can be saved in that time.
        assert_eq!(
            first(&[rest(1, 1, 20, 1 << 20), rest(2, 1, 720, 10_000_000_000)]),
            tid(1)
        );
        assert_eq!(
            first(&[rest(1, 1, 5, 1 << 20), rest(2, 2, 5, 1 << 20)]),
            tid(2)
        );
    }

    /// The loss of a job is its work since its newest usable checkpoint.
    #[test]
    fn loss_counts_from_newest_usable_checkpoint() {
        let (job, other) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        let entry = |set: &str, job, made, broken: Option<&str>| CheckpointEntry {
            name: set.into(),
            job,
            created: Micros(made),
            tasks: 1,
            bytes: 1,
            unusable_reason: broken.map(String::from),
            job_ended_at: None,
            copy_hosts: Vec::new(),
        };
        let sets = [
            entry("a", job, 1, None),
            entry("b", job, 2, None),
            entry("c", job, 3, Some("cut short")),
        ];
        assert_eq!(
            loss_line("h2", job, &sets, None),
            "job t40001 loses its work since b if h2 leaves now; 'drain h2 --checkpoint' checkpoints it\n"
        );
        let kept = |set: &str| loss_line("h2", job, &sets, Some(&set.into()));
        assert_eq!(
            kept("b"),
            "job t40001 loses its work since b if h2 leaves now\n"
        );
        assert_eq!(
            kept("c"),
            loss_line("h2", job, &sets, None),
            "an unusable checkpoint does not count"
        );
        let all = loss_line("h2", other, &sets, None);
        assert!(all.starts_with("job t40002 loses all its work if h2 leaves now;"));
    }

    /// The first task of a job is the topmost ancestor that was spawned.
    #[test]
    fn job_starts_at_topmost_spawned_ancestor() {
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        // A console, its child and its grandchild; a task whose parent has ended; two tasks that a
        // faulty daemon reports as parents of each other.
        let parents = BTreeMap::from([
            (tid(1), Tid::NONE),
            (tid(2), tid(1)),
            (tid(3), tid(2)),
            (tid(4), tid(9)),
            (tid(5), tid(6)),
            (tid(6), tid(5)),
        ]);
        let job = |of: i32| {
            topmost_spawned(tid(of), &parents, |tid| {
                parents.get(tid).is_some_and(|parent| parent.is_task())
            })
        };
        assert_eq!([job(3), job(2), job(4)], [tid(2), tid(2), tid(4)]);
        assert!([tid(5), tid(6)].contains(&job(5)));
    }
}
