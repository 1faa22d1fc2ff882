//! Computes the shortest possible completion times of tasks on given hosts if the work of each task
//! is known and no task migrates. Tests compare placement and balancing with these times.

/// The speed of a host's processors, and their number.
#[derive(Clone, Copy, Debug)]
pub struct HostCapacity {
    /// Work that one processor of the host does per second, in the caller's unit.
    pub work_per_second: f64,
    pub processor_count: f64,
}

/// Returns a lower bound of the time in seconds until the last task of a host ends. `total_work` is
/// the total work of the host's tasks, and `largest_work` is the work of the largest task.
fn host_time_min_s(host: &HostCapacity, (total_work, largest_work): (f64, f64)) -> f64 {
    (total_work / (host.work_per_second * host.processor_count))
        .max(largest_work / host.work_per_second)
}

/// Returns the time in seconds until the last task ends in the best assignment. Tries all
/// assignments that can be the best. Element `i` of `task_works` is the work of task `i`.
pub fn best_completion_s(hosts: &[HostCapacity], task_works: &[f64]) -> f64 {
    fn search_best(
        hosts: &[HostCapacity],
        task_works: &[f64],
        host_sums: &mut [(f64, f64)],
        best_s: &mut f64,
    ) {
        let partial_time_s = hosts
            .iter()
            .zip(host_sums.iter())
            .map(|(host, host_sums)| host_time_min_s(host, *host_sums))
            .fold(0.0, f64::max);
        if partial_time_s >= *best_s {
            return;
        }
        let Some((task_work, remaining_work)) = task_works.split_first() else {
            *best_s = partial_time_s;
            return;
        };
        for i in 0..hosts.len() {
            let old_sums = host_sums[i];
            host_sums[i] = (old_sums.0 + task_work, old_sums.1.max(*task_work));
            search_best(hosts, remaining_work, host_sums, best_s);
            host_sums[i] = old_sums;
        }
    }
    let mut task_works = task_works.to_vec();
    // The search assigns the largest tasks first, so that it rejects bad assignments early.
    task_works.sort_by(|a, b| b.total_cmp(a));
    let mut best_s = f64::MAX;
    search_best(
        hosts,
        &task_works,
        &mut vec![(0.0, 0.0); hosts.len()],
        &mut best_s,
    );
    best_s
}

/// Returns the time in seconds until the last task ends if all running tasks make progress at the
/// same speed and migrations cost nothing. A scheduler that does not know the work cannot be
/// expected to do better.
pub fn uninformed_completion_s(hosts: &[HostCapacity], task_works: &[f64]) -> f64 {
    let processor_speeds =
        |host: &HostCapacity| vec![host.work_per_second; host.processor_count.round() as usize];
    let mut all_speeds: Vec<f64> = hosts.iter().flat_map(processor_speeds).collect();
    all_speeds.sort_by(|a, b| b.total_cmp(a));
    let mut task_works = task_works.to_vec();
    task_works.sort_by(f64::total_cmp);
    let (mut elapsed_s, mut completed_work) = (0.0, 0.0);
    for (ended_count, next_work) in task_works.iter().enumerate() {
        let running_count = task_works.len() - ended_count;
        let total_speed: f64 = all_speeds.iter().take(running_count).sum();
        elapsed_s += (next_work - completed_work) * running_count as f64 / total_speed;
        completed_work = *next_work;
    }
    elapsed_s
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDINARY_HOST: HostCapacity = HostCapacity {
        work_per_second: 1.0,
        processor_count: 1.0,
    };

    #[test]
    fn fast_host_gets_more_work_in_best_assignment() {
        let fast_host = HostCapacity {
            work_per_second: 2.0,
            ..ORDINARY_HOST
        };
        assert_eq!(
            best_completion_s(&[ORDINARY_HOST, fast_host], &[10.0, 10.0, 10.0]),
            10.0
        );
        assert_eq!(
            best_completion_s(&[ORDINARY_HOST, fast_host], &[30.0, 10.0, 10.0]),
            15.0 + 5.0
        );
        assert_eq!(
            best_completion_s(
                &[HostCapacity {
                    processor_count: 2.0,
                    ..ORDINARY_HOST
                }],
                &[30.0, 10.0, 10.0]
            ),
            30.0
        );
    }

    #[test]
    fn uninformed_tasks_progress_at_equal_speed() {
        // Each task completes ten units in ten seconds. Then one processor is idle for twenty
        // seconds.
        assert_eq!(
            uninformed_completion_s(&[ORDINARY_HOST, ORDINARY_HOST], &[10.0, 30.0]),
            30.0
        );
        assert_eq!(
            uninformed_completion_s(&[ORDINARY_HOST], &[10.0, 30.0]),
            40.0
        );
        let fast_host = HostCapacity {
            work_per_second: 3.0,
            ..ORDINARY_HOST
        };
        assert_eq!(
            uninformed_completion_s(&[ORDINARY_HOST, fast_host], &[8.0, 20.0]),
            4.0 + 4.0
        );
    }
}
