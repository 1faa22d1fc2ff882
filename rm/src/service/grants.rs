//! Grants for future spawn requests: decides when a task gets one, and records the tasks started by
//! it.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Colocation, Constraints, PlacementPolicy, PlacementRequest, place};
use crate::grants::GRANT_WINDOW;
use crate::recording::RecordedInput;
use crate::spawns::{GrantedTask, SpawnIncoming, SpawnRules};
use crate::store::decision_records;
use sempa_proto::rm::PlacementAttempt;
use sempa_proto::sm::{
    PlacementLease, PlacementLeaseUse, SM_PLACEMENT_LEASE, pack_placement_lease,
    unpack_placement_lease_use,
};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Message, Micros, Tid};

impl<V: VmApi> Service<V> {
    /// Decides whether a task gets a grant after all tasks of its request were started.
    pub(super) fn consider_grant(&mut self, from: &SpawnIncoming) {
        let now = self.vm.now();
        // The task may have ended while its own tasks were started.
        if self.model.has_task(from.requester) && self.grants.record_answer(now, from) {
            self.grant_hosts(now, from.requester);
        }
    }

    /// Grants a task hosts for its next requests. Makes no grant if each request must be decided
    /// separately, because of task limits, waiting requests or round robin.
    fn grant_hosts(&mut self, now: Micros, task: Tid) {
        let conduct = self.options.policy;
        let Some(next) = self.grants.request_of(task) else {
            return;
        };
        let one_by_one = conduct.placing != PlacementPolicy::Load
            || conduct.rules != SpawnRules::default()
            || self.job_kills.is_being_killed(next.job, task);
        let count = next.request.count as usize;
        if one_by_one || self.spawns.waiting_count() > 0 || !is_grantable(&next.request) {
            return;
        }
        if self.grants.available_slots(now, task) < count {
            let idle = self.grants.revoke_idle(now);
            self.notify_revoked(idle);
        }
        let room = self.grants.available_slots(now, task);
        if room < count {
            return;
        }
        if let Some((hosts, attempt)) = self
            .hosts_for(now, task, room)
            .filter(|(hosts, _)| hosts.len() >= count)
        {
            self.send_grant(task, hosts, attempt);
        }
    }

    /// Returns the hosts of `count` tasks if a task's last request were placed now, and the
    /// explanation.
    fn hosts_for(
        &mut self,
        now: Micros,
        task: Tid,
        count: usize,
    ) -> Option<(Vec<HostId>, PlacementAttempt)> {
        let snapshot = self.model.snapshot(now);
        let SpawnIncoming {
            user,
            request,
            caller,
            job,
            ..
        } = self.grants.request_of(task)?;
        let ask = PlacementRequest {
            peers: &snapshot.peer_hosts(*caller, *job),
            ..PlacementRequest::new(*user, request, count as u32, *caller)
        };
        let placement = place(snapshot, &ask);
        let hosts = placement.hosts.iter().map_while(|host| host.ok()).collect();
        let mut attempt = decision_records::placement_attempt(&placement, snapshot);
        attempt.reason = format!("granted in advance: {}", attempt.reason);
        Some((hosts, attempt))
    }

    fn send_grant(&mut self, task: Tid, hosts: Vec<HostId>, attempt: PlacementAttempt) {
        let Some(wid) = self.grants.request_of(task).map(|next| next.wid) else {
            return;
        };
        self.grants.set_grant(task, &hosts, attempt);
        self.send(
            task,
            SM_PLACEMENT_LEASE,
            wid,
            pack_placement_lease(&PlacementLease {
                hosts,
                valid_for: GRANT_WINDOW,
            }),
        );
    }

    /// Compares all grants with the placement that the same requests would get now, and replaces
    /// those that differ.
    pub(super) fn review_grants(&mut self, now: Micros) {
        if self.grants.next_review().is_none_or(|at| at > now) {
            return;
        }
        for (task, given) in self.grants.review(now) {
            let Some((hosts, attempt)) = self.hosts_for(now, task, given.len()) else {
                continue;
            };
            let sorted = |hosts: &[HostId]| {
                let mut hosts = hosts.to_vec();
                hosts.sort_unstable();
                hosts
            };
            // Only the set of hosts is compared, because the order of use has little effect.
            if sorted(&hosts) != sorted(&given) {
                self.send_grant(task, hosts, attempt);
            }
        }
    }

    /// Revokes all grants, so that tasks must send a request for each spawn.
    pub(super) fn revoke_grants(&mut self) {
        let taken = self.grants.revoke_all(self.vm.now());
        self.notify_revoked(taken);
    }

    fn notify_revoked(&mut self, revoked: Vec<(Tid, i32)>) {
        for (task, wid) in revoked {
            self.send(
                task,
                SM_PLACEMENT_LEASE,
                wid,
                pack_placement_lease(&PlacementLease {
                    hosts: Vec::new(),
                    valid_for: GRANT_WINDOW,
                }),
            );
        }
    }

    /// Handles a daemon's report that tasks were started by a grant.
    pub(super) fn handle_grant_use(&mut self, message: &Message) {
        let Ok(PlacementLeaseUse { spawner: by, tasks }) =
            unpack_placement_lease_use(message.body.clone())
        else {
            return;
        };
        let now = self.vm.now();
        // Tasks of an unknown grant need no record here, because the event log reports them.
        let hosts = tasks.iter().map(|(host, _)| *host);
        let Some(granted) = self.grants.record_use(now, by, message.wid, hosts) else {
            return;
        };
        let snapshot = self.model.snapshot(now);
        let started: Vec<GrantedTask> = tasks
            .iter()
            .map(|(host, tid)| GrantedTask {
                tid: *tid,
                host: *host,
                host_name: snapshot.host_name(*host),
            })
            .collect();
        self.record_granted_spawn(&granted.from, &tasks);
        self.spawns
            .record_granted(granted.from, started, granted.attempt);
        if granted.needs_renewal {
            self.grant_hosts(now, by);
        }
    }

    /// Records the tasks as a spawn request, so that a replay requests them.
    fn record_granted_spawn(&mut self, from: &SpawnIncoming, tasks: &[(HostId, Tid)]) {
        let Some((_, first)) = tasks.first() else {
            return;
        };
        let number = (from.requester, first.raw());
        let SpawnIncoming {
            caller,
            user,
            job,
            ref request,
            ..
        } = *from;
        let request = || SpawnRequest {
            count: tasks.len() as u32,
            ..request.clone()
        };
        self.record_input(|| RecordedInput::Spawn {
            number,
            caller,
            user,
            job,
            request: request(),
        });
        self.record_input(|| RecordedInput::Started {
            number,
            tids: tasks.iter().map(|(_, tid)| *tid).collect(),
        });
    }
}

/// True for a request whose tasks get the same hosts whether they are placed together or a few at a
/// time.
fn is_grantable(request: &SpawnRequest) -> bool {
    // Memory is promised to tasks when their order is sent to a host.
    let is_independent = |wants: Constraints| {
        wants.rank.is_none()
            && wants.colocation == Colocation::Any
            && wants.memory_bytes().is_none()
    };
    Constraints::from_request(request).is_ok_and(is_independent)
}
