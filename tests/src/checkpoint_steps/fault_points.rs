//! Lists the points at which checkpoints and restarts are held, and distributes them to rounds.

use crate::faults::{Point, StepEdge, tests_all_cases};
use sempa_proto::migration::Step;
use std::collections::BTreeSet;

/// An operation that a fault can hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The checkpoint of a running job.
    Checkpoint,
    /// The restart of a job that has ended.
    Restart,
}

/// The point at which an operation is held on the host of the job's worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldPoint {
    /// The daemon is stopped at this edge of this step.
    DaemonAt(Step, StepEdge),
    /// The tasker has called the engine, and the engine has not begun. In a checkpoint all tasks
    /// are stopped; in a restart no task is restored.
    BeforeEngine,
    /// The engine is stopped while it dumps or restores.
    DuringEngine,
    /// All images are in the store. The checkpoint waits for the lock of the store and gets its
    /// final name while it holds this lock.
    BeforeSeal,
}

/// An operation and the point at which it is held.
pub type FaultPoint = (Operation, HoldPoint);

use Operation::{Checkpoint, Restart};
use StepEdge::{After, Before};

/// Points that one round can hold together.
const CONCURRENT_POINTS: [FaultPoint; 7] = [
    (Checkpoint, HoldPoint::BeforeEngine),
    (Checkpoint, HoldPoint::DuringEngine),
    (Restart, HoldPoint::BeforeEngine),
    (Restart, HoldPoint::DuringEngine),
    (Checkpoint, HoldPoint::DaemonAt(Step::Dump, After)),
    (Checkpoint, HoldPoint::BeforeSeal),
    (Restart, HoldPoint::DaemonAt(Step::Restore, After)),
];

/// Points of which a round can hold only one: while a daemon is stopped at such a point, no daemon
/// can count tasks or find their locations.
const EXCLUSIVE_POINTS: [FaultPoint; 15] = [
    (Checkpoint, HoldPoint::DaemonAt(Step::Inspect, Before)),
    (Restart, HoldPoint::DaemonAt(Step::Prepare, Before)),
    (Checkpoint, HoldPoint::DaemonAt(Step::Stop, After)),
    (Restart, HoldPoint::DaemonAt(Step::Run, Before)),
    (Checkpoint, HoldPoint::DaemonAt(Step::Quiesce, Before)),
    (Restart, HoldPoint::DaemonAt(Step::Transfer, After)),
    (Checkpoint, HoldPoint::DaemonAt(Step::Inspect, After)),
    (Restart, HoldPoint::DaemonAt(Step::Run, After)),
    (Checkpoint, HoldPoint::DaemonAt(Step::Dump, Before)),
    (Restart, HoldPoint::DaemonAt(Step::Prepare, After)),
    (Checkpoint, HoldPoint::DaemonAt(Step::Stop, Before)),
    (Restart, HoldPoint::DaemonAt(Step::Arrive, Before)),
    (Checkpoint, HoldPoint::DaemonAt(Step::Quiesce, After)),
    (Restart, HoldPoint::DaemonAt(Step::Restore, Before)),
    (Restart, HoldPoint::DaemonAt(Step::Arrive, After)),
];

/// Returns the points of an operation at which a test stops a daemon.
pub fn daemon_points(operation: Operation) -> BTreeSet<Point> {
    let points = CONCURRENT_POINTS.iter().chain(&EXCLUSIVE_POINTS);
    let daemon_point = |(_, hold_point): &FaultPoint| {
        if let HoldPoint::DaemonAt(step, edge) = hold_point {
            Some((*step, *edge))
        } else {
            None
        }
    };
    points
        .filter(|(point_operation, _)| *point_operation == operation)
        .filter_map(daemon_point)
        .collect()
}

/// Returns the points of the round with the number `round`: half of [`CONCURRENT_POINTS`] and one
/// of [`EXCLUSIVE_POINTS`]. The next round has the other half of [`CONCURRENT_POINTS`].
pub(super) fn round_points(round: usize) -> Vec<FaultPoint> {
    let half = CONCURRENT_POINTS
        .into_iter()
        .enumerate()
        .filter(|(i, _)| i % 2 == round % 2)
        .map(|(_, point)| point);
    half.chain([EXCLUSIVE_POINTS[round % EXCLUSIVE_POINTS.len()]])
        .collect()
}

/// Number of rounds in which a test injects one fault into one victim. If [`tests_all_cases`] is
/// true, the test runs [`full_round_count`] rounds instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundSample {
    /// One round, with half of `CONCURRENT_POINTS`.
    OneRound,
    /// Two rounds, with all of `CONCURRENT_POINTS`.
    TwoRounds,
}

impl RoundSample {
    pub(super) fn round_count(self) -> usize {
        match self {
            _ if tests_all_cases() => full_round_count(),
            Self::OneRound => 1,
            Self::TwoRounds => 2,
        }
    }
}

/// Returns the number of successive rounds in which each point is held at least once.
pub fn full_round_count() -> usize {
    EXCLUSIVE_POINTS.len()
}

/// Returns the command word that makes the fake CRIU stop before this point; `None` if the point
/// needs no stop of the fake CRIU.
pub(super) fn fake_criu_command((_, hold_point): &FaultPoint) -> Option<&'static str> {
    match hold_point {
        HoldPoint::DuringEngine => Some("stall 1"),
        HoldPoint::BeforeEngine
        | HoldPoint::BeforeSeal
        | HoldPoint::DaemonAt(Step::Dump | Step::Restore, After) => Some("wait"),
        HoldPoint::DaemonAt(..) => None,
    }
}

/// True if an engine process exists while the operation is held at this point.
pub(super) fn has_engine_process(point: &FaultPoint) -> bool {
    matches!(
        point.1,
        HoldPoint::BeforeEngine
            | HoldPoint::DuringEngine
            | HoldPoint::DaemonAt(Step::Restore, After)
    )
}

#[cfg(test)]
mod tests {
    use super::super::JOB_COUNT;
    use super::*;

    /// A round has at most one point per job. Two successive rounds have all of
    /// [`CONCURRENT_POINTS`].
    #[test]
    fn two_rounds_have_all_concurrent_points() {
        for round_number in 0..EXCLUSIVE_POINTS.len() {
            let rounds = [round_points(round_number), round_points(round_number + 1)];
            assert!(rounds.iter().all(|round| round.len() <= JOB_COUNT));
            assert!(
                CONCURRENT_POINTS
                    .iter()
                    .all(|point| rounds.concat().contains(point)),
                "from {round_number} on"
            );
        }
    }

    #[test]
    fn all_rounds_have_each_point() {
        let held_points: Vec<FaultPoint> = (0..full_round_count()).flat_map(round_points).collect();
        let mut all_points = CONCURRENT_POINTS.iter().chain(&EXCLUSIVE_POINTS);
        assert!(all_points.all(|point| held_points.contains(point)));
    }
}
