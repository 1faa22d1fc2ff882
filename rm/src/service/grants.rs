//! Grants for future spawn requests: decides when a task gets a grant, and records the tasks that
//! were started by it.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Colocation, Constraints, PlacementPolicy, PlacementRequest, place};
use crate::grants::GRANT_WINDOW;
use crate::recording::RecordedInput;
use crate::spawns::{GrantedTask, IncomingSpawn, SpawnRules};
use crate::store::decision_records;
use sempa_proto::rm::PlacementAttempt;
use sempa_proto::sm::{
    PlacementLease, PlacementLeaseUse, SM_PLACEMENT_LEASE, pack_placement_lease,
    unpack_placement_lease_use,
};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Message, Micros, Tid};

impl<V: VmApi> Service<V> {
    /// Decides whether the requesting task gets a grant after all tasks of its request were
    /// started.
    pub(super) fn consider_grant(&mut self, incoming_spawn: &IncomingSpawn) {
        let now = self.vm.now();
        // The requesting task may have ended while the tasks of its request were started.
        if self.model.has_task(incoming_spawn.requester)
            && self.grants.record_request(now, incoming_spawn)
        {
            self.grant_hosts(now, incoming_spawn.requester);
        }
    }

    /// Grants a task hosts for its next requests. Makes no grant if each request must be decided
    /// separately, because of task limits, waiting requests or round robin.
    fn grant_hosts(&mut self, now: Micros, task: Tid) {
        let current_policy = self.options.policy;
        let Some(last_request) = self.grants.last_request(task) else {
            return;
        };
        let needs_separate_decisions = current_policy.placement != PlacementPolicy::Load
            || current_policy.spawn_rules != SpawnRules::default()
            || self.job_kills.is_being_killed(last_request.job, task);
        let task_count = last_request.request.task_count as usize;
        if needs_separate_decisions
            || self.spawns.waiting_count() > 0
            || !is_grantable(&last_request.request)
        {
            return;
        }
        if self.grants.available_slots(now, task) < task_count {
            let revoked_grants = self.grants.revoke_idle(now);
            self.notify_revoked(revoked_grants);
        }
        let slot_count = self.grants.available_slots(now, task);
        if slot_count < task_count {
            return;
        }
        if let Some((hosts, attempt)) = self
            .place_last_request(now, task, slot_count)
            .filter(|(hosts, _)| hosts.len() >= task_count)
        {
            self.send_grant(task, hosts, attempt);
        }
    }

    /// Returns the hosts of `task_count` tasks if the task's last request were placed now, with the
    /// explanation of the placement. `None` if no request of the task is remembered.
    fn place_last_request(
        &mut self,
        now: Micros,
        task: Tid,
        task_count: usize,
    ) -> Option<(Vec<HostId>, PlacementAttempt)> {
        let snapshot = self.model.update_snapshot(now);
        let IncomingSpawn {
            user,
            request,
            caller_host: caller,
            job,
            ..
        } = self.grants.last_request(task)?;
        let placement_request = PlacementRequest {
            peer_hosts: &snapshot.peer_hosts(*caller, *job),
            ..PlacementRequest::new(*user, request, task_count as u32, *caller)
        };
        let placement = place(snapshot, &placement_request);
        let hosts = placement.hosts.iter().map_while(|host| host.ok()).collect();
        let mut attempt = decision_records::placement_attempt(&placement, snapshot);
        attempt.reason = format!("granted in advance: {}", attempt.reason);
        Some((hosts, attempt))
    }

    fn send_grant(&mut self, task: Tid, hosts: Vec<HostId>, attempt: PlacementAttempt) {
        let Some(wid) = self
            .grants
            .last_request(task)
            .map(|last_request| last_request.wait_id)
        else {
            return;
        };
        self.grants.set_grant(task, &hosts, attempt);
        self.send(
            task,
            SM_PLACEMENT_LEASE,
            wid,
            pack_placement_lease(&PlacementLease {
                hosts,
                validity_time: GRANT_WINDOW,
            }),
        );
    }

    /// Compares all grants with the placement that the same requests would get now. Replaces a
    /// grant if the hosts differ.
    pub(super) fn review_grants(&mut self, now: Micros) {
        if self
            .grants
            .next_review()
            .is_none_or(|review_time| review_time > now)
        {
            return;
        }
        for (task, granted_hosts) in self.grants.review(now) {
            let Some((hosts, attempt)) = self.place_last_request(now, task, granted_hosts.len())
            else {
                continue;
            };
            let sort_hosts = |hosts: &[HostId]| {
                let mut hosts = hosts.to_vec();
                hosts.sort_unstable();
                hosts
            };
            // Only the sets of hosts are compared, because the order in which a task uses the hosts
            // has little effect.
            if sort_hosts(&hosts) != sort_hosts(&granted_hosts) {
                self.send_grant(task, hosts, attempt);
            }
        }
    }

    /// Revokes all grants, so that tasks must send a request for each spawn.
    pub(super) fn revoke_grants(&mut self) {
        let revoked_grants = self.grants.revoke_all(self.vm.now());
        self.notify_revoked(revoked_grants);
    }

    fn notify_revoked(&mut self, revoked_grants: Vec<(Tid, i32)>) {
        for (task, wid) in revoked_grants {
            self.send(
                task,
                SM_PLACEMENT_LEASE,
                wid,
                pack_placement_lease(&PlacementLease {
                    hosts: Vec::new(),
                    validity_time: GRANT_WINDOW,
                }),
            );
        }
    }

    /// Handles a daemon's report that a task has started tasks by a grant.
    pub(super) fn handle_grant_use(&mut self, message: &Message) {
        let Ok(PlacementLeaseUse {
            spawner: spawner_tid,
            tasks,
        }) = unpack_placement_lease_use(message.body.clone())
        else {
            return;
        };
        let now = self.vm.now();
        // Tasks that were started by an unknown grant are not recorded here, because the event log
        // reports them.
        let hosts = tasks.iter().map(|(host, _)| *host);
        let Some(grant_use) = self.grants.record_use(now, spawner_tid, message.wid, hosts) else {
            return;
        };
        let snapshot = self.model.update_snapshot(now);
        let granted_tasks: Vec<GrantedTask> = tasks
            .iter()
            .map(|(host, tid)| GrantedTask {
                tid: *tid,
                host: *host,
                host_name: snapshot.host_name(*host),
            })
            .collect();
        self.record_granted_spawn(&grant_use.incoming, &tasks);
        self.spawns
            .record_granted(grant_use.incoming, granted_tasks, grant_use.attempt);
        if grant_use.needs_renewal {
            self.grant_hosts(now, spawner_tid);
        }
    }

    /// Records the tasks as a spawn request, so that a replay requests the same tasks.
    fn record_granted_spawn(&mut self, incoming_spawn: &IncomingSpawn, tasks: &[(HostId, Tid)]) {
        let Some((_, first_tid)) = tasks.first() else {
            return;
        };
        let request_id = (incoming_spawn.requester, first_tid.raw());
        let IncomingSpawn {
            caller_host: caller,
            user,
            job,
            ref request,
            ..
        } = *incoming_spawn;
        let request = || SpawnRequest {
            task_count: tasks.len() as u32,
            ..request.clone()
        };
        self.record_input(|| RecordedInput::Spawn {
            request_id,
            caller_host: caller,
            user,
            job,
            request: request(),
        });
        self.record_input(|| RecordedInput::SpawnAnswered {
            request_id,
            tids: tasks.iter().map(|(_, tid)| *tid).collect(),
        });
    }
}

/// True for a request whose tasks get the same hosts whether they are placed together or a few at a
/// time.
fn is_grantable(request: &SpawnRequest) -> bool {
    // Memory is promised only when an order is sent to a host. A grant sends no order, so a request
    // with a minimum of memory is not grantable.
    let is_independent = |constraints: Constraints| {
        constraints.rank.is_none()
            && constraints.colocation == Colocation::Any
            && constraints.min_memory_bytes().is_none()
    };
    Constraints::from_request(request).is_ok_and(is_independent)
}
