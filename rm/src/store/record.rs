//! Converts decisions to the types in which they are stored and sent.

use crate::decide::{self, Outcome, Placement, Reason, Shift, Snapshot, Stay, StayReason, Why};
use sempa_proto::rm::{
    DecisionKind, HostState, MigrationBenefit, PlacementAttempt, PlacementRule, REJECTED_HOSTS_MAX,
    RejectedHost, RejectionReason,
};
use sempa_proto::{HostId, Tid};

/// Converts the result of a placement to its stored form.
pub fn attempt(placement: &Placement, snapshot: &Snapshot) -> PlacementAttempt {
    let choice = match &placement.why {
        Why::Asked { .. } => PlacementRule::HostRequested,
        Why::InTurn { .. } => PlacementRule::RoundRobin,
        Why::Load { host, usable } => PlacementRule::Load {
            host: host.clone(),
            permille: *usable,
        },
        Why::Rank { .. } => PlacementRule::Rank,
        Why::SameHost { .. } => PlacementRule::SameHost,
        Why::Chosen { .. } | Why::NotChosen { .. } => PlacementRule::ExternalPolicy,
        Why::NotUnderstood(_) => PlacementRule::InvalidConstraints,
        Why::NoSuchHost => PlacementRule::NoSuchHost,
        Why::NoneFree => PlacementRule::NoHostFree,
    };
    let not_used = not_used(&placement.excluded, snapshot);
    PlacementAttempt {
        rule: choice,
        reason: placement.sentence(snapshot),
        rejected: not_used,
    }
}

/// Converts excluded hosts to their stored form. Only the first ones are included.
pub fn not_used(excluded: &decide::Excluded, snapshot: &Snapshot) -> Vec<RejectedHost> {
    let one = |(host, why): &(HostId, Reason)| RejectedHost {
        host: snapshot.name(*host),
        why: told(why),
    };
    excluded.iter().take(REJECTED_HOSTS_MAX).map(one).collect()
}

fn told(why: &Reason) -> RejectionReason {
    match why {
        Reason::OtherHost | Reason::Complement => RejectionReason::OtherHostRequested,
        Reason::OtherArch { has } => RejectionReason::Arch { has: has.clone() },
        Reason::Owner { why } => RejectionReason::Owner { why: why.clone() },
        Reason::Unmet { condition, has } => RejectionReason::ConstraintViolated {
            condition: condition.to_string(),
            has: has.to_string(),
        },
        Reason::NoAnswer => RejectionReason::Unresponsive,
        other => RejectionReason::Other {
            why: other.to_string(),
        },
    }
}

/// Returns the current state of a host for a reply. `drained`: task that requested its drain.
pub fn host_now(snapshot: &Snapshot, id: Option<HostId>, drained: Option<Tid>) -> HostState {
    let Some(id) = id.filter(|id| snapshot.host(*id).is_some()) else {
        return HostState::Gone;
    };
    let why = decide::left_out(snapshot, id).filter(|why| !matches!(why, Reason::Drained { .. }));
    if why.is_some() || drained.is_some() {
        return HostState::Excluded {
            why: why.as_ref().map(told),
            drained,
        };
    }
    HostState::Used(decide::used_but(snapshot, id))
}

/// Converts the decision that a guest stays to its stored form.
pub fn stays(stay: &Stay, snapshot: &Snapshot) -> DecisionKind {
    let not_used = match &stay.why {
        StayReason::NoHost { excluded } => not_used(excluded, snapshot),
        _ => Vec::new(),
    };
    DecisionKind::CannotLeave {
        tid: stay.tid,
        host: snapshot.name(stay.host),
        why: stay.why.to_string(),
        rejected: not_used,
    }
}

/// Converts the result of a rebalancing migration to its stored form.
pub fn came_out(outcome: &Outcome, name: impl Fn(HostId) -> String) -> DecisionKind {
    let pair = |(gain, cost)| MigrationBenefit { gain, cost };
    let Outcome {
        tid,
        from,
        to,
        expected,
        came,
    } = *outcome;
    DecisionKind::BenefitMeasured {
        tid,
        from: name(from),
        to: name(to),
        expected: pair(expected),
        actual: pair(came),
    }
}

/// Returns the predicted gain and cost of a rebalancing migration.
pub fn expected(shift: &Shift) -> MigrationBenefit {
    MigrationBenefit {
        gain: shift.why.gain,
        cost: shift.why.cost,
    }
}
