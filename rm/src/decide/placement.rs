//! Places the tasks of one spawn (`pvm_spawn`). Also describes what excludes or restricts a host
//! for every spawn.

use super::chooser::Chooser;
use super::load::{WorkingLoads, limit_exclusion, unknown_reason};
use super::placement_request::failed_placement;
use super::placement_run::PlacementRun;
use super::{
    Constraints, ExclusionReason, Exclusions, OwnerState, Placement, PlacementPolicy,
    PlacementReason, PlacementRequest, Snapshot,
};
use sempa_proto::{HostId, PvmError};

/// Returns the reason why a host is excluded for every request; `None` if there is no such reason.
pub fn general_exclusion(snapshot: &Snapshot, id: HostId) -> Option<ExclusionReason> {
    let host = snapshot.host(id)?;
    let limit_reason = || {
        limit_exclusion(host, snapshot.now, 0, || {
            WorkingLoads::new(snapshot).load(id)
        })
    };
    host.owner
        .exclusion_reason()
        .or_else(limit_reason)
        .map(ExclusionReason::into_owned)
}

/// Describes the restrictions of a host that apply although the host is not excluded, in one
/// sentence each: a possible presence of the owner, blocked programs and users, an unknown load,
/// and an obstacle to migrations.
pub fn host_restrictions(snapshot: &Snapshot, id: HostId) -> Vec<String> {
    let Some(host) = snapshot.host(id) else {
        return Vec::new();
    };
    let mut sentences = Vec::new();
    if let OwnerState::PossiblyPresent {
        why,
        idle_login: true,
    } = &host.owner
    {
        sentences.push(format!(
            "other hosts are preferred, because its owner may be present ({why})"
        ));
    }
    let limits = &host.guest_policy.limits;
    let program_sentences = limits.blocked_programs.iter().map(|pattern| {
        ExclusionReason::ProgramBlocked {
            pattern: pattern.as_str(),
        }
        .to_string()
    });
    let user_sentences = limits
        .blocked_users
        .iter()
        .map(|user| ExclusionReason::<&str>::UserBlocked { user: *user }.to_string());
    sentences.extend(program_sentences.chain(user_sentences));
    let unknown_load =
        unknown_reason(host, snapshot.now).filter(|_| snapshot.policy == PlacementPolicy::Load);
    sentences.extend(unknown_load.map(|why| format!("its load is not known ({why})")));
    let obstacle = host
        .migration_obstacle
        .as_ref()
        .filter(|migration_stop| migration_stop.until > snapshot.now);
    sentences.extend(obstacle.map(|migration_stop| {
        format!("no running task migrates there ({})", migration_stop.reason)
    }));
    sentences
}

/// Places all tasks of a request by the snapshot's policy.
pub fn place(snapshot: &Snapshot, request: &PlacementRequest<'_>) -> Placement {
    place_with_chooser(snapshot, request, None)
}

/// Places all tasks of a request. If `chooser` is not `None`, this external chooser selects among
/// the suitable hosts.
pub fn place_with_chooser(
    snapshot: &Snapshot,
    request: &PlacementRequest<'_>,
    chooser: Option<&dyn Chooser>,
) -> Placement {
    match Constraints::from_request(request.spawn_request) {
        Ok(constraints) => PlacementRun::new(snapshot, request, constraints).place_tasks(chooser),
        Err(error) => failed_placement(
            snapshot,
            request,
            PvmError::BadParam,
            PlacementReason::InvalidConstraints(error),
            Exclusions::default(),
        ),
    }
}
