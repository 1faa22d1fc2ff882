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
    let placement_rule = match &placement.reason {
        PlacementReason::HostNamed { .. } => PlacementRule::HostRequested,
        PlacementReason::RoundRobin { .. } => PlacementRule::RoundRobin,
        PlacementReason::LargestShare {
            host,
            usable_permille: usable_share,
        } => PlacementRule::Load {
            host: host.clone(),
            permille: *usable_share,
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
    let rejections = rejected_hosts(&placement.exclusions, snapshot);
    PlacementAttempt {
        rule: placement_rule,
        reason: placement.describe(snapshot),
        rejected_hosts: rejections,
    }
}

/// Converts excluded hosts to their stored form, at most the first [`REJECTED_HOSTS_MAX`].
pub fn rejected_hosts(exclusions: &decide::Exclusions, snapshot: &Snapshot) -> Vec<RejectedHost> {
    let to_rejected_host = |(host, why): &(HostId, ExclusionReason)| RejectedHost {
        host: snapshot.host_name(*host),
        why: rejection_reason(why),
    };
    exclusions
        .iter()
        .take(REJECTED_HOSTS_MAX)
        .map(to_rejected_host)
        .collect()
}

fn rejection_reason(exclusion_reason: &ExclusionReason) -> RejectionReason {
    match exclusion_reason {
        ExclusionReason::OtherHost | ExclusionReason::Complement => {
            RejectionReason::OtherHostRequested
        }
        ExclusionReason::OtherArch { arch: found_value } => RejectionReason::Arch {
            has: found_value.clone(),
        },
        ExclusionReason::OwnerPresent {
            why: exclusion_reason,
        } => RejectionReason::Owner {
            why: exclusion_reason.clone(),
        },
        ExclusionReason::UnmetCondition {
            condition,
            actual: found_value,
        } => RejectionReason::ConstraintViolated {
            condition: condition.to_string(),
            has: found_value.to_string(),
        },
        ExclusionReason::NoAnswer => RejectionReason::Unresponsive,
        other => RejectionReason::Other {
            why: other.to_string(),
        },
    }
}

/// Returns the current state of a host for a reply. `drain_requester`: task that requested the
/// drain of the host; `None` if the host is not being drained.
pub fn host_state(
    snapshot: &Snapshot,
    id: Option<HostId>,
    drain_requester: Option<Tid>,
) -> HostState {
    let Some(id) = id.filter(|id| snapshot.host(*id).is_some()) else {
        return HostState::Gone;
    };
    let why = decide::general_exclusion(snapshot, id)
        .filter(|why| !matches!(why, ExclusionReason::Drained { .. }));
    if why.is_some() || drain_requester.is_some() {
        return HostState::Excluded {
            why: why.as_ref().map(rejection_reason),
            drain_requested_by: drain_requester,
        };
    }
    HostState::Used(decide::host_restrictions(snapshot, id))
}

/// Converts the decision that a guest stays to its stored form.
pub fn stay_decision(stay: &StayDecision, snapshot: &Snapshot) -> DecisionKind {
    let rejections = match &stay.reason {
        StayReason::NoTargetHost {
            exclusions: excluded_hosts,
        } => rejected_hosts(excluded_hosts, snapshot),
        _ => Vec::new(),
    };
    DecisionKind::CannotLeave {
        tid: stay.tid,
        host: snapshot.host_name(stay.host),
        why: stay.reason.to_string(),
        rejected_hosts: rejections,
    }
}

/// Converts the outcome of a rebalancing migration to its stored form. `host_name` returns the name
/// of a host.
pub fn rebalance_outcome(
    outcome: &PredictionOutcome,
    host_name: impl Fn(HostId) -> String,
) -> DecisionKind {
    let to_benefit = |(gain, cost)| MigrationBenefit { gain, cost };
    let PredictionOutcome {
        tid,
        source,
        target,
        predicted_gain_and_cost: predicted_values,
        actual_gain_and_cost: actual_values,
    } = *outcome;
    DecisionKind::BenefitMeasured {
        tid,
        from: host_name(source),
        to: host_name(target),
        expected: to_benefit(predicted_values),
        actual_benefit: to_benefit(actual_values),
    }
}

/// Returns the predicted gain and cost of a rebalancing migration in their stored form.
pub fn predicted_benefit(rebalance: &Rebalance) -> MigrationBenefit {
    MigrationBenefit {
        gain: rebalance.reason.gain,
        cost: rebalance.reason.cost,
    }
}
