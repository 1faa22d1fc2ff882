//! Places the tasks of one spawn (`pvm_spawn`), and says what excludes or restricts a host for
//! every spawn.

use super::chooser::Chooser;
use super::load::{WorkingLoads, limit_exclusion, unknown_reason};
use super::placement_request::failed_placement;
use super::placement_run::PlacementRun;
use super::{
    Constraints, ExclusionReason, Exclusions, OwnerState, Placement, PlacementPolicy,
    PlacementReason, PlacementRequest, Snapshot,
};
use sempa_proto::{HostId, PvmError};

/// Returns the reason why a host is excluded for every request; `None` if it is not.
pub fn general_exclusion(snapshot: &Snapshot, id: HostId) -> Option<ExclusionReason> {
    let host = snapshot.host(id)?;
    let full = || {
        limit_exclusion(host, snapshot.now, 0, || {
            WorkingLoads::of(snapshot).load(id)
        })
    };
    host.owner
        .exclusion_reason()
        .or_else(full)
        .map(ExclusionReason::into_owned)
}

/// Returns sentences about the restrictions that apply to a host although it is not excluded.
pub fn host_restrictions(snapshot: &Snapshot, id: HostId) -> Vec<String> {
    let Some(host) = snapshot.host(id) else {
        return Vec::new();
    };
    let mut all = Vec::new();
    if let OwnerState::PossiblyPresent {
        why,
        idle_login: true,
    } = &host.owner
    {
        all.push(format!(
            "other hosts are preferred, because its owner may be present ({why})"
        ));
    }
    let limits = &host.guest_policy.limits;
    let programs = limits.programs.iter().map(|pattern| {
        ExclusionReason::ProgramBlocked {
            pattern: pattern.as_str(),
        }
        .to_string()
    });
    let users = limits
        .users
        .iter()
        .map(|user| ExclusionReason::<&str>::UserBlocked { user: *user }.to_string());
    all.extend(programs.chain(users));
    let unknown =
        unknown_reason(host, snapshot.now).filter(|_| snapshot.policy == PlacementPolicy::Load);
    all.extend(unknown.map(|why| format!("its load is not known ({why})")));
    let moves = host
        .migration_obstacle
        .as_ref()
        .filter(|no| no.until > snapshot.now);
    all.extend(moves.map(|no| format!("no running task migrates there ({})", no.reason)));
    all
}

/// Places all tasks of a request by the snapshot's policy.
pub fn place(snapshot: &Snapshot, request: &PlacementRequest<'_>) -> Placement {
    place_with_chooser(snapshot, request, None)
}

/// Places all tasks of a request. If `chooser` is given, that external chooser selects among the
/// suitable hosts.
pub fn place_with_chooser(
    snapshot: &Snapshot,
    request: &PlacementRequest<'_>,
    chooser: Option<&dyn Chooser>,
) -> Placement {
    match Constraints::from_request(request.request) {
        Ok(constraints) => PlacementRun::new(snapshot, request, constraints).decide(chooser),
        Err(error) => failed_placement(
            snapshot,
            request,
            PvmError::BadParam,
            PlacementReason::InvalidConstraints(error),
            Exclusions::default(),
        ),
    }
}
