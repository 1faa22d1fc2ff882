//! Converts decisions to the types in which they are stored and sent.

use crate::decide::{
    self, ExclusionReason, Placement, PlacementReason, PredictionOutcome, Rebalance, Snapshot,
    StayDecision, StayReason,
};
use sempa_proto::rm::{
    DecisionKind, HostState, MigrationBenefit, PlacementAttempt, PlacementRule, REJECTED_HOSTS_MAX,
    RejectedHost, RejectionReason,
};
use sempa_proto::{HostId, Tid};

/// Converts the result of a placement to its stored form.
pub fn placement_attempt(placement: &Placement, snapshot: &Snapshot) -> PlacementAttempt {
    let choice = match &placement.reason {
        PlacementReason::HostNamed { .. } => PlacementRule::HostRequested,
        PlacementReason::RoundRobin { .. } => PlacementRule::RoundRobin,
        PlacementReason::LargestShare { host, usable } => PlacementRule::Load {
            host: host.clone(),
            permille: *usable,
        },
        PlacementReason::Rank { .. } => PlacementRule::Rank,
        PlacementReason::SameHost { .. } => PlacementRule::SameHost,
        PlacementReason::ChooserSelected { .. } | PlacementReason::ChooserFailed { .. } => {
            PlacementRule::ExternalPolicy
        }
        PlacementReason::InvalidConstraints(_) => PlacementRule::InvalidConstraints,
        PlacementReason::NoSuchHost => PlacementRule::NoSuchHost,
        PlacementReason::NoneAvailable => PlacementRule::NoHostFree,
    };
    let not_used = unused_hosts(&placement.excluded, snapshot);
    PlacementAttempt {
        rule: choice,
        reason: placement.sentence(snapshot),
        rejected: not_used,
    }
}

/// Converts excluded hosts to their stored form. Only the first ones are included.
pub fn unused_hosts(excluded: &decide::Exclusions, snapshot: &Snapshot) -> Vec<RejectedHost> {
    let one = |(host, why): &(HostId, ExclusionReason)| RejectedHost {
        host: snapshot.host_name(*host),
        why: exclusion(why),
    };
    excluded.iter().take(REJECTED_HOSTS_MAX).map(one).collect()
}

fn exclusion(why: &ExclusionReason) -> RejectionReason {
    match why {
        ExclusionReason::OtherHost | ExclusionReason::Complement => {
            RejectionReason::OtherHostRequested
        }
        ExclusionReason::OtherArch { has } => RejectionReason::Arch { has: has.clone() },
        ExclusionReason::OwnerPresent { why } => RejectionReason::Owner { why: why.clone() },
        ExclusionReason::Unmet { condition, has } => RejectionReason::ConstraintViolated {
            condition: condition.to_string(),
            has: has.to_string(),
        },
        ExclusionReason::NoAnswer => RejectionReason::Unresponsive,
        other => RejectionReason::Other {
            why: other.to_string(),
        },
    }
}

/// Returns the current state of a host for a reply. `drained`: task that requested its drain.
pub fn host_state(snapshot: &Snapshot, id: Option<HostId>, drained: Option<Tid>) -> HostState {
    let Some(id) = id.filter(|id| snapshot.host(*id).is_some()) else {
        return HostState::Gone;
    };
    let why = decide::general_exclusion(snapshot, id)
        .filter(|why| !matches!(why, ExclusionReason::Drained { .. }));
    if why.is_some() || drained.is_some() {
        return HostState::Excluded {
            why: why.as_ref().map(exclusion),
            drain_requested_by: drained,
        };
    }
    HostState::Used(decide::host_restrictions(snapshot, id))
}

/// Converts the decision that a guest stays to its stored form.
pub fn stay_decision(stay: &StayDecision, snapshot: &Snapshot) -> DecisionKind {
    let not_used = match &stay.reason {
        StayReason::NoHost { excluded } => unused_hosts(excluded, snapshot),
        _ => Vec::new(),
    };
    DecisionKind::CannotLeave {
        tid: stay.tid,
        host: snapshot.host_name(stay.host),
        why: stay.reason.to_string(),
        rejected: not_used,
    }
}

/// Converts the result of a rebalancing migration to its stored form.
pub fn rebalance_outcome(
    outcome: &PredictionOutcome,
    name: impl Fn(HostId) -> String,
) -> DecisionKind {
    let pair = |(gain, cost)| MigrationBenefit { gain, cost };
    let PredictionOutcome {
        tid,
        from,
        to,
        predicted: expected,
        actual: came,
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
pub fn predicted_gain(shift: &Rebalance) -> MigrationBenefit {
    MigrationBenefit {
        gain: shift.reason.gain,
        cost: shift.reason.cost,
    }
}
