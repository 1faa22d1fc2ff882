//! Lists the points at which checkpoints and restarts are held, and distributes them to rounds.

use crate::faults::{Point, StepEdge, is_full};
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

/// The point at which an operation is held on the job's own host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldPoint {
    /// The daemon is stopped at this edge of this step.
    At(Step, StepEdge),
    /// The tasker has called the engine, and the engine has not begun. In a checkpoint all tasks
    /// are stopped; in a restart no task is restored.
    EngineWaits,
    /// The engine is stopped while it dumps or restores.
    EngineWorks,
    /// All images are in the store, and the checkpoint waits for the lock of the store to get its
    /// final name.
    Sealing,
}

/// An operation and the point at which it is held.
pub type FaultPoint = (Operation, HoldPoint);

use Operation::{Checkpoint, Restart};
use StepEdge::{After, Before};

/// Points of which a round can hold several at the same time.
const CONCURRENT_POINTS: [FaultPoint; 7] = [
    (Checkpoint, HoldPoint::EngineWaits),
    (Checkpoint, HoldPoint::EngineWorks),
    (Restart, HoldPoint::EngineWaits),
    (Restart, HoldPoint::EngineWorks),
    (Checkpoint, HoldPoint::At(Step::Dump, After)),
    (Checkpoint, HoldPoint::Sealing),
    (Restart, HoldPoint::At(Step::Restore, After)),
];

/// Points of which a round can hold only one: while a daemon is stopped there, no daemon can count
/// tasks or find their locations.
const EXCLUSIVE_POINTS: [FaultPoint; 15] = [
    (Checkpoint, HoldPoint::At(Step::Inspect, Before)),
    (Restart, HoldPoint::At(Step::Prepare, Before)),
    (Checkpoint, HoldPoint::At(Step::Stop, After)),
    (Restart, HoldPoint::At(Step::Run, Before)),
    (Checkpoint, HoldPoint::At(Step::Quiesce, Before)),
    (Restart, HoldPoint::At(Step::Transfer, After)),
    (Checkpoint, HoldPoint::At(Step::Inspect, After)),
    (Restart, HoldPoint::At(Step::Run, After)),
    (Checkpoint, HoldPoint::At(Step::Dump, Before)),
    (Restart, HoldPoint::At(Step::Prepare, After)),
    (Checkpoint, HoldPoint::At(Step::Stop, Before)),
    (Restart, HoldPoint::At(Step::Arrive, Before)),
    (Checkpoint, HoldPoint::At(Step::Quiesce, After)),
    (Restart, HoldPoint::At(Step::Restore, Before)),
    (Restart, HoldPoint::At(Step::Arrive, After)),
];

/// Returns the points of an operation at which a test stops a daemon.
pub fn daemon_points(operation: Operation) -> BTreeSet<Point> {
    let all = CONCURRENT_POINTS.iter().chain(&EXCLUSIVE_POINTS);
    let at = |(_, hold): &FaultPoint| {
        if let HoldPoint::At(step, edge) = hold {
            Some((*step, *edge))
        } else {
            None
        }
    };
    all.filter(|(of, _)| *of == operation)
        .filter_map(at)
        .collect()
}

/// Returns the points of one round: half of [`CONCURRENT_POINTS`] and one of [`EXCLUSIVE_POINTS`].
/// The next round has the other half of [`CONCURRENT_POINTS`].
pub(super) fn round_points(turn: usize) -> Vec<FaultPoint> {
    let half = CONCURRENT_POINTS
        .into_iter()
        .enumerate()
        .filter(|(i, _)| i % 2 == turn % 2)
        .map(|(_, point)| point);
    half.chain([EXCLUSIVE_POINTS[turn % EXCLUSIVE_POINTS.len()]])
        .collect()
}

/// Number of rounds in which a test injects one fault into one victim. With [`is_full`] all points
/// are tried instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// One round, with half of `CONCURRENT_POINTS`.
    OneRound,
    /// Two rounds, with all of `CONCURRENT_POINTS`.
    TwoRounds,
}

impl Sampling {
    pub(super) fn rounds(self) -> usize {
        match self {
            _ if is_full() => full_round_count(),
            Sampling::OneRound => 1,
            Sampling::TwoRounds => 2,
        }
    }
}

/// Returns the number of successive rounds after which each point was held at least once.
pub fn full_round_count() -> usize {
    EXCLUSIVE_POINTS.len()
}

/// Returns the command word that makes the fake CRIU stop before this point; `None` if CRIU need
/// not be held.
pub(super) fn fake_criu_word((_, hold): &FaultPoint) -> Option<&'static str> {
    match hold {
        HoldPoint::EngineWorks => Some("stall 1"),
        HoldPoint::EngineWaits
        | HoldPoint::Sealing
        | HoldPoint::At(Step::Dump | Step::Restore, After) => Some("wait"),
        HoldPoint::At(..) => None,
    }
}

/// True if an engine process exists while the operation is held at this point.
pub(super) fn has_engine(point: &FaultPoint) -> bool {
    matches!(
        point.1,
        HoldPoint::EngineWaits | HoldPoint::EngineWorks | HoldPoint::At(Step::Restore, After)
    )
}

#[cfg(test)]
mod tests {
    use super::super::JOB_COUNT;
    use super::*;

    /// A round has at most one point per job, and two successive rounds have all of
    /// [`CONCURRENT_POINTS`].
    #[test]
    fn two_rounds_have_all_that_can_be_held_together() {
        for turn in 0..EXCLUSIVE_POINTS.len() {
            let both = [round_points(turn), round_points(turn + 1)];
            assert!(both.iter().all(|round| round.len() <= JOB_COUNT));
            assert!(
                CONCURRENT_POINTS
                    .iter()
                    .all(|point| both.concat().contains(point)),
                "from {turn} on"
            );
        }
    }

    #[test]
    fn all_rounds_have_each_point() {
        let all: Vec<FaultPoint> = (0..full_round_count()).flat_map(round_points).collect();
        let mut each = CONCURRENT_POINTS.iter().chain(&EXCLUSIVE_POINTS);
        assert!(each.all(|point| all.contains(point)));
    }
}
