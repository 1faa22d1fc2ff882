//! Where checkpoints and restarts are held, and in which rounds.

use crate::strikes::{Edge, Point, is_full};
use sempa_proto::migration::Step;
use std::collections::BTreeSet;

/// What is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Of a job that goes back when it loses a host.
    Checkpoint,
    /// Of one that has ended.
    Restart,
}

/// Where the part of it is held that is not on the master's host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The daemon stands there.
    At(Step, Edge),
    /// All tasks stand, or none is built yet: the engine has been called, and has not begun.
    EngineWaits,
    /// The engine stands in the midst of what it does.
    EngineWorks,
    /// All is in the store, and the set is to get its name.
    Sealing,
}

/// What is held, and where.
pub type Spot = (What, Place);

/// Those that can be held beside each other.
const TOGETHER: [Spot; 7] = [
    (What::Checkpoint, Place::EngineWaits),
    (What::Checkpoint, Place::EngineWorks),
    (What::Restart, Place::EngineWaits),
    (What::Restart, Place::EngineWorks),
    (What::Checkpoint, Place::At(Step::Dump, Edge::After)),
    (What::Checkpoint, Place::Sealing),
    (What::Restart, Place::At(Step::Restore, Edge::After)),
];

/// Those of which there can be one: while it is held, no daemon counts tasks or learns where they are.
const ALONE: [Spot; 15] = [
    (What::Checkpoint, Place::At(Step::Inspect, Edge::Before)),
    (What::Restart, Place::At(Step::Prepare, Edge::Before)),
    (What::Checkpoint, Place::At(Step::Stop, Edge::After)),
    (What::Restart, Place::At(Step::Run, Edge::Before)),
    (What::Checkpoint, Place::At(Step::Quiesce, Edge::Before)),
    (What::Restart, Place::At(Step::Transfer, Edge::After)),
    (What::Checkpoint, Place::At(Step::Inspect, Edge::After)),
    (What::Restart, Place::At(Step::Run, Edge::After)),
    (What::Checkpoint, Place::At(Step::Dump, Edge::Before)),
    (What::Restart, Place::At(Step::Prepare, Edge::After)),
    (What::Checkpoint, Place::At(Step::Stop, Edge::Before)),
    (What::Restart, Place::At(Step::Arrive, Edge::Before)),
    (What::Checkpoint, Place::At(Step::Quiesce, Edge::After)),
    (What::Restart, Place::At(Step::Restore, Edge::Before)),
    (What::Restart, Place::At(Step::Arrive, Edge::After)),
];

/// The places at which faults meet one of the two and its daemon stands still.
pub fn met(what: What) -> BTreeSet<Point> {
    let all = TOGETHER.iter().chain(&ALONE).filter(|(of, _)| *of == what);
    let at = |(_, place): &Spot| {
        if let Place::At(step, edge) = place {
            Some((*step, *edge))
        } else {
            None
        }
    };
    all.filter_map(at).collect()
}

/// The places of one round, unless all are wanted: each fault has half of those that can be held together, and the next one the
/// others.
pub(super) fn some(turn: usize) -> Vec<Spot> {
    let half = TOGETHER
        .into_iter()
        .enumerate()
        .filter(|(i, _)| i % 2 == turn % 2)
        .map(|(_, spot)| spot);
    half.chain([ALONE[turn % ALONE.len()]]).collect()
}

/// How many of the places one fault meets one party at, unless all are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// One round: half of those that can be held together, and one of the others. The next fault has the other half.
    Half,
    /// Two of them.
    Both,
}

impl Share {
    pub(super) fn rounds(self) -> usize {
        match self {
            _ if is_full() => turns(),
            Share::Half => 1,
            Share::Both => 2,
        }
    }
}

/// Turns in which each place comes once at least.
pub fn turns() -> usize {
    ALONE.len()
}

/// By which word the engine is held on the way to this place, if it is.
pub(super) fn word((_, place): &Spot) -> Option<&'static str> {
    match place {
        Place::EngineWorks => Some("stall 1"),
        Place::EngineWaits
        | Place::Sealing
        | Place::At(Step::Dump | Step::Restore, Edge::After) => Some("wait"),
        Place::At(..) => None,
    }
}

/// An engine works at this place.
pub(super) fn has_engine(spot: &Spot) -> bool {
    matches!(
        spot.1,
        Place::EngineWaits | Place::EngineWorks | Place::At(Step::Restore, Edge::After)
    )
}

#[cfg(test)]
mod tests {
    use super::super::JOBS;
    use super::*;

    #[test]
    fn each_round_has_no_more_places_than_there_are_jobs_and_two_share_those_out_that_can_be_held_together()
     {
        for turn in 0..ALONE.len() {
            let both = [some(turn), some(turn + 1)];
            assert!(both.iter().all(|round| round.len() <= JOBS));
            assert!(
                TOGETHER.iter().all(|spot| both.concat().contains(spot)),
                "from {turn} on"
            );
        }
    }

    #[test]
    fn all_rounds_together_have_each_place() {
        let all: Vec<Spot> = (0..ALONE.len()).flat_map(some).collect();
        assert!(TOGETHER.iter().chain(&ALONE).all(|spot| all.contains(spot)));
    }
}
