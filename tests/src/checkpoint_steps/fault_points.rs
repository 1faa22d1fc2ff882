//! The points at which checkpoints and restarts are held, and the rounds in which tests try them.

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

/// Where the part of the operation that is not on the master's host is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// The daemon is stopped at an edge of a step.
    At(Step, StepEdge),
    /// All tasks are stopped, or none is restored yet: the engine was called and has not begun.
    EngineWaits,
    /// The engine is stopped in the middle of its work.
    EngineWorks,
    /// All images are in the store, and the checkpoint is about to get its name.
    Sealing,
}

/// An operation, and where it is held.
pub type FaultPoint = (Operation, Hold);

use Operation::{Checkpoint, Restart};
use StepEdge::{After, Before};

/// Points that can be held at the same time.
const TOGETHER: [FaultPoint; 7] = [
    (Checkpoint, Hold::EngineWaits),
    (Checkpoint, Hold::EngineWorks),
    (Restart, Hold::EngineWaits),
    (Restart, Hold::EngineWorks),
    (Checkpoint, Hold::At(Step::Dump, After)),
    (Checkpoint, Hold::Sealing),
    (Restart, Hold::At(Step::Restore, After)),
];

/// Points of which a round can have one: while it is held, no daemon counts tasks or learns where
/// they are.
const ALONE: [FaultPoint; 15] = [
    (Checkpoint, Hold::At(Step::Inspect, Before)),
    (Restart, Hold::At(Step::Prepare, Before)),
    (Checkpoint, Hold::At(Step::Stop, After)),
    (Restart, Hold::At(Step::Run, Before)),
    (Checkpoint, Hold::At(Step::Quiesce, Before)),
    (Restart, Hold::At(Step::Transfer, After)),
    (Checkpoint, Hold::At(Step::Inspect, After)),
    (Restart, Hold::At(Step::Run, After)),
    (Checkpoint, Hold::At(Step::Dump, Before)),
    (Restart, Hold::At(Step::Prepare, After)),
    (Checkpoint, Hold::At(Step::Stop, Before)),
    (Restart, Hold::At(Step::Arrive, Before)),
    (Checkpoint, Hold::At(Step::Quiesce, After)),
    (Restart, Hold::At(Step::Restore, Before)),
    (Restart, Hold::At(Step::Arrive, After)),
];

/// Returns the points of an operation at which a daemon is stopped.
pub fn daemon_points(operation: Operation) -> BTreeSet<Point> {
    let all = TOGETHER.iter().chain(&ALONE);
    let at = |(_, hold): &FaultPoint| {
        if let Hold::At(step, edge) = hold {
            Some((*step, *edge))
        } else {
            None
        }
    };
    all.filter(|(of, _)| *of == operation)
        .filter_map(at)
        .collect()
}

/// Returns the points of one round: half of [`TOGETHER`], and one of [`ALONE`]. The next round has
/// the other half.
pub(super) fn round(turn: usize) -> Vec<FaultPoint> {
    let half = TOGETHER
        .into_iter()
        .enumerate()
        .filter(|(i, _)| i % 2 == turn % 2)
        .map(|(_, point)| point);
    half.chain([ALONE[turn % ALONE.len()]]).collect()
}

/// How many rounds one fault on one victim takes, unless all points are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// One round: half of the points that can be held at the same time.
    Half,
    /// Two rounds: all of the points that can be held at the same time.
    Both,
}

impl Sampling {
    pub(super) fn rounds(self) -> usize {
        match self {
            _ if is_full() => all_rounds(),
            Sampling::Half => 1,
            Sampling::Both => 2,
        }
    }
}

/// Returns the number of successive rounds that have each point at least once.
pub fn all_rounds() -> usize {
    ALONE.len()
}

/// Returns the word for the stand-in of CRIU that holds it on the way to this point, if any.
pub(super) fn word((_, hold): &FaultPoint) -> Option<&'static str> {
    match hold {
        Hold::EngineWorks => Some("stall 1"),
        Hold::EngineWaits | Hold::Sealing | Hold::At(Step::Dump | Step::Restore, After) => {
            Some("wait")
        }
        Hold::At(..) => None,
    }
}

/// True if an engine runs at this point.
pub(super) fn has_engine(point: &FaultPoint) -> bool {
    matches!(
        point.1,
        Hold::EngineWaits | Hold::EngineWorks | Hold::At(Step::Restore, After)
    )
}

#[cfg(test)]
mod tests {
    use super::super::JOBS;
    use super::*;

    /// A round fits on the jobs, and two successive rounds have all of [`TOGETHER`].
    #[test]
    fn two_rounds_have_all_that_can_be_held_together() {
        for turn in 0..ALONE.len() {
            let both = [round(turn), round(turn + 1)];
            assert!(both.iter().all(|round| round.len() <= JOBS));
            assert!(
                TOGETHER.iter().all(|point| both.concat().contains(point)),
                "from {turn} on"
            );
        }
    }

    #[test]
    fn all_rounds_have_each_point() {
        let all: Vec<FaultPoint> = (0..all_rounds()).flat_map(round).collect();
        let mut each = TOGETHER.iter().chain(&ALONE);
        assert!(each.all(|point| all.contains(point)));
    }
}
