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
pub enum Hold {
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
pub type FaultPoint = (Operation, Hold);

use Operation::{Checkpoint, Restart};
use StepEdge::{After, Before};

/// Points of which a round can hold several at the same time.
const TOGETHER: [FaultPoint; 7] = [
    (Checkpoint, Hold::EngineWaits),
    (Checkpoint, Hold::EngineWorks),
    (Restart, Hold::EngineWaits),
    (Restart, Hold::EngineWorks),
    (Checkpoint, Hold::At(Step::Dump, After)),
    (Checkpoint, Hold::Sealing),
    (Restart, Hold::At(Step::Restore, After)),
];

/// Points of which a round can hold only one: while a daemon is stopped there, no daemon can count
/// tasks or find their locations.
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

/// Returns the points of an operation at which a test stops a daemon.
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

/// Returns the points of one round: half of [`TOGETHER`] and one of [`ALONE`]. The next round has
/// the other half of [`TOGETHER`].
pub(super) fn round(turn: usize) -> Vec<FaultPoint> {
    let half = TOGETHER
        .into_iter()
        .enumerate()
        .filter(|(i, _)| i % 2 == turn % 2)
        .map(|(_, point)| point);
    half.chain([ALONE[turn % ALONE.len()]]).collect()
}

/// Number of rounds in which a test injects one fault into one victim. With [`is_full`] all points
/// are tried instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// One round, with half of [`TOGETHER`].
    Half,
    /// Two rounds, with all of [`TOGETHER`].
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

/// Returns the number of successive rounds after which each point was held at least once.
pub fn all_rounds() -> usize {
    ALONE.len()
}

/// Returns the command word that makes the fake CRIU stop before this point; `None` if CRIU need
/// not be held.
pub(super) fn word((_, hold): &FaultPoint) -> Option<&'static str> {
    match hold {
        Hold::EngineWorks => Some("stall 1"),
        Hold::EngineWaits | Hold::Sealing | Hold::At(Step::Dump | Step::Restore, After) => {
            Some("wait")
        }
        Hold::At(..) => None,
    }
}

/// True if an engine process exists while the operation is held at this point.
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

    /// A round has at most one point per job, and two successive rounds have all of [`TOGETHER`].
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
