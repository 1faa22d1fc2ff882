//! Converts decisions to the types in which they are stored and sent.

use crate::decide::{self, Outcome, Placement, Reason, Shift, Snapshot, Stay, StayReason, Why};
use sempa_proto::rm::{
    Attempt, Choice, Decided, Excluded, Expected, HostNow, NOT_USED_MAX, NotUsed,
};
use sempa_proto::{HostId, Tid};

/// Converts an attempt to place tasks.
pub fn attempt(placement: &Placement, snapshot: &Snapshot) -> Attempt {
    let choice = match &placement.why {
        Why::Asked { .. } => Choice::Asked,
        Why::InTurn { .. } => Choice::InTurn,
        Why::Load { host, usable } => Choice::Load {
            host: host.clone(),
            permille: *usable,
        },
        Why::Rank { .. } => Choice::Rank,
        Why::SameHost { .. } => Choice::SameHost,
        Why::Chosen { .. } | Why::NotChosen { .. } => Choice::Chosen,
        Why::NotUnderstood(_) => Choice::NotUnderstood,
        Why::NoSuchHost => Choice::NoSuchHost,
        Why::NoneFree => Choice::NoneFree,
    };
    let not_used = not_used(&placement.excluded, snapshot);
    Attempt {
        choice,
        sentence: placement.sentence(snapshot),
        not_used,
    }
}

/// Converts the first excluded hosts.
pub fn not_used(excluded: &decide::Excluded, snapshot: &Snapshot) -> Vec<NotUsed> {
    let one = |(host, why): &(HostId, Reason)| NotUsed {
        host: snapshot.name(*host),
        why: told(why),
    };
    excluded.iter().take(NOT_USED_MAX).map(one).collect()
}

fn told(why: &Reason) -> Excluded {
    match why {
        Reason::OtherHost | Reason::Complement => Excluded::NotAsked,
        Reason::OtherArch { has } => Excluded::Arch { has: has.clone() },
        Reason::Owner { why } => Excluded::Owner { why: why.clone() },
        Reason::Unmet { condition, has } => Excluded::Unmet {
            condition: condition.to_string(),
            has: has.to_string(),
        },
        Reason::NoAnswer => Excluded::NoAnswer,
        other => Excluded::Other {
            why: other.to_string(),
        },
    }
}

/// Returns the current state of a host for an answer. `drained`: task that requested a drain.
pub fn host_now(snapshot: &Snapshot, id: Option<HostId>, drained: Option<Tid>) -> HostNow {
    let Some(id) = id.filter(|id| snapshot.host(*id).is_some()) else {
        return HostNow::Gone;
    };
    let why = decide::left_out(snapshot, id).filter(|why| !matches!(why, Reason::Drained { .. }));
    if why.is_some() || drained.is_some() {
        return HostNow::LeftOut {
            why: why.as_ref().map(told),
            drained,
        };
    }
    HostNow::Used(decide::used_but(snapshot, id))
}

/// Converts the decision that a guest stays.
pub fn stays(stay: &Stay, snapshot: &Snapshot) -> Decided {
    let not_used = match &stay.why {
        StayReason::NoHost { excluded } => not_used(excluded, snapshot),
        _ => Vec::new(),
    };
    Decided::Stays {
        tid: stay.tid,
        host: snapshot.name(stay.host),
        why: stay.why.to_string(),
        not_used,
    }
}

/// Converts the result of a rebalancing migration.
pub fn came_out(outcome: &Outcome, name: impl Fn(HostId) -> String) -> Decided {
    let pair = |(gain, cost)| Expected { gain, cost };
    let Outcome {
        tid,
        from,
        to,
        expected,
        came,
    } = *outcome;
    Decided::CameOut {
        tid,
        from: name(from),
        to: name(to),
        expected: pair(expected),
        came: pair(came),
    }
}

/// Returns the predicted gain and cost of a rebalancing migration.
pub fn expected(shift: &Shift) -> Expected {
    Expected {
        gain: shift.why.gain,
        cost: shift.why.cost,
    }
}
