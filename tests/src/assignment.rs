//! Computes the shortest time in which tasks can end on given hosts if the work of each task is
//! known and no task migrates. Tests compare placement and balancing with this time.

/// The speed and the number of processors of a host.
#[derive(Clone, Copy, Debug)]
pub struct HostSpeed {
    /// Work that one processor of the host does per second, in the caller's unit.
    pub work_per_second: f64,
    pub processors: f64,
}

/// Returns the seconds until the last task of a host ends. `sum` is the work of all its tasks,
/// `largest` that of the largest one. No schedule of the tasks is shorter.
fn end_seconds(host: &HostSpeed, (sum, largest): (f64, f64)) -> f64 {
    (sum / (host.work_per_second * host.processors)).max(largest / host.work_per_second)
}

/// Returns the seconds until the last task ends in the best assignment. Tries all assignments that
/// can be the best.
pub fn best_seconds(hosts: &[HostSpeed], work: &[f64]) -> f64 {
    fn search(hosts: &[HostSpeed], work: &[f64], sums: &mut [(f64, f64)], best: &mut f64) {
        let now = hosts
            .iter()
            .zip(sums.iter())
            .map(|(host, sums)| end_seconds(host, *sums))
            .fold(0.0, f64::max);
        if now >= *best {
            return;
        }
        let Some((first, rest)) = work.split_first() else {
            *best = now;
            return;
        };
        for i in 0..hosts.len() {
            let before = sums[i];
            sums[i] = (before.0 + first, before.1.max(*first));
            search(hosts, rest, sums, best);
            sums[i] = before;
        }
    }
    let mut work = work.to_vec();
    // The largest tasks come first, so that bad assignments are rejected early.
    work.sort_by(|a, b| b.total_cmp(a));
    let mut best = f64::MAX;
    search(hosts, &work, &mut vec![(0.0, 0.0); hosts.len()], &mut best);
    best
}

/// Returns the seconds until the last task ends if all running tasks make progress at the same
/// speed and migrations cost nothing. No scheduler without knowledge of the work can be expected to
/// do better.
pub fn uninformed_seconds(hosts: &[HostSpeed], work: &[f64]) -> f64 {
    let each = |host: &HostSpeed| vec![host.work_per_second; host.processors.round() as usize];
    let mut speeds: Vec<f64> = hosts.iter().flat_map(each).collect();
    speeds.sort_by(|a, b| b.total_cmp(a));
    let mut work = work.to_vec();
    work.sort_by(f64::total_cmp);
    let (mut seconds, mut before) = (0.0, 0.0);
    for (ended, work_of_next) in work.iter().enumerate() {
        let running = work.len() - ended;
        let together: f64 = speeds.iter().take(running).sum();
        seconds += (work_of_next - before) * running as f64 / together;
        before = *work_of_next;
    }
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDINARY: HostSpeed = HostSpeed {
        work_per_second: 1.0,
        processors: 1.0,
    };

    #[test]
    fn best_assignment_gives_fast_host_more() {
        let fast = HostSpeed {
            work_per_second: 2.0,
            ..ORDINARY
        };
        assert_eq!(best_seconds(&[ORDINARY, fast], &[10.0, 10.0, 10.0]), 10.0);
        assert_eq!(
            best_seconds(&[ORDINARY, fast], &[30.0, 10.0, 10.0]),
            15.0 + 5.0
        );
        assert_eq!(
            best_seconds(
                &[HostSpeed {
                    processors: 2.0,
                    ..ORDINARY
                }],
                &[30.0, 10.0, 10.0]
            ),
            30.0
        );
    }

    /// Without knowledge of the work, all running tasks make progress at the same speed.
    #[test]
    fn uninformed_seconds_are_of_equal_progress() {
        // Each task does ten units in ten seconds. Then one processor is idle for twenty seconds.
        assert_eq!(
            uninformed_seconds(&[ORDINARY, ORDINARY], &[10.0, 30.0]),
            30.0
        );
        assert_eq!(uninformed_seconds(&[ORDINARY], &[10.0, 30.0]), 40.0);
        let fast = HostSpeed {
            work_per_second: 3.0,
            ..ORDINARY
        };
        assert_eq!(
            uninformed_seconds(&[ORDINARY, fast], &[8.0, 20.0]),
            4.0 + 4.0
        );
    }
}
