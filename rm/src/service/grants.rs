//! Grants for future spawn requests: when they are made, and what is recorded when they are used.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Ask, Policy, Together, Wants, place};
use crate::grants::GRANT_SPAN;
use crate::recording::Input;
use crate::spawns::{Incoming, Rules, Started};
use crate::store::record;
use sempa_proto::rm::PlacementAttempt;
use sempa_proto::sm::{
    PlacementLease, PlacementLeaseUse, SM_PLACEMENT_LEASE, pack_placement_lease,
    unpack_placement_lease_use,
};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Message, Micros, Tid};

impl<V: VmApi> Service<V> {
    /// Considers a grant after a request was answered with all its tasks.
    pub(super) fn answered(&mut self, from: &Incoming) {
        let now = self.vm.now();
        // The task may have ended while its own tasks were started.
        if self.model.knows(from.src) && self.grants.answered(now, from) {
            self.grant(now, from.src);
        }
    }

    /// Grants a task hosts for its next requests. No grant is made if each request must be decided
    /// separately: with task limits, waiting requests, or round robin.
    fn grant(&mut self, now: Micros, task: Tid) {
        let conduct = self.options.conduct;
        let Some(next) = self.grants.next_of(task) else {
            return;
        };
        let one_by_one = conduct.placing != Policy::Load
            || conduct.rules != Rules::default()
            || self.killing.is_ending(next.job, task);
        let count = next.request.count as usize;
        if one_by_one || self.spawns.waiting() > 0 || !is_plain(&next.request) {
            return;
        }
        if self.grants.room(now, task) < count {
            let idle = self.grants.take_back_idle(now);
            self.tell_taken_back(idle);
        }
        let room = self.grants.room(now, task);
        if room < count {
            return;
        }
        if let Some((hosts, attempt)) = self
            .places_for(now, task, room)
            .filter(|(hosts, _)| hosts.len() >= count)
        {
            self.give(task, hosts, attempt);
        }
    }

    /// Returns the hosts to which `count` tasks of a task's last request would go now, and why.
    fn places_for(
        &mut self,
        now: Micros,
        task: Tid,
        count: usize,
    ) -> Option<(Vec<HostId>, PlacementAttempt)> {
        let snapshot = self.model.snapshot(now);
        let Incoming {
            user,
            request,
            caller,
            job,
            ..
        } = self.grants.next_of(task)?;
        let ask = Ask {
            peers: &snapshot.peers_of(*caller, *job),
            ..Ask::of(*user, request, count as u32, *caller)
        };
        let placement = place(snapshot, &ask);
        let hosts = placement.hosts.iter().map_while(|host| host.ok()).collect();
        let mut attempt = record::attempt(&placement, snapshot);
        attempt.reason = format!("granted in advance: {}", attempt.reason);
        Some((hosts, attempt))
    }

    fn give(&mut self, task: Tid, hosts: Vec<HostId>, attempt: PlacementAttempt) {
        let Some(wid) = self.grants.next_of(task).map(|next| next.wid) else {
            return;
        };
        self.grants.give(task, &hosts, attempt);
        self.send(
            task,
            SM_PLACEMENT_LEASE,
            wid,
            pack_placement_lease(&PlacementLease {
                hosts,
                valid_for: GRANT_SPAN,
            }),
        );
    }

    /// Compares all grants with a fresh placement and replaces those that differ.
    pub(super) fn review_grants(&mut self, now: Micros) {
        if self.grants.next_review().is_none_or(|at| at > now) {
            return;
        }
        for (task, given) in self.grants.review(now) {
            let Some((hosts, attempt)) = self.places_for(now, task, given.len()) else {
                continue;
            };
            let sorted = |hosts: &[HostId]| {
                let mut hosts = hosts.to_vec();
                hosts.sort_unstable();
                hosts
            };
            // The order in which the slots are used matters little.
            if sorted(&hosts) != sorted(&given) {
                self.give(task, hosts, attempt);
            }
        }
    }

    /// Revokes all grants, so that the tasks ask for each spawn.
    pub(super) fn take_grants_back(&mut self) {
        let taken = self.grants.take_back(self.vm.now());
        self.tell_taken_back(taken);
    }

    fn tell_taken_back(&mut self, whom: Vec<(Tid, i32)>) {
        for (task, wid) in whom {
            self.send(
                task,
                SM_PLACEMENT_LEASE,
                wid,
                pack_placement_lease(&PlacementLease {
                    hosts: Vec::new(),
                    valid_for: GRANT_SPAN,
                }),
            );
        }
    }

    /// Handles a daemon's report that tasks were started by a grant.
    pub(super) fn taken(&mut self, message: &Message) {
        let Ok(PlacementLeaseUse { spawner: by, tasks }) =
            unpack_placement_lease_use(message.body.clone())
        else {
            return;
        };
        let now = self.vm.now();
        // An unknown grant needs no further record: the event log reports its tasks.
        let hosts = tasks.iter().map(|(host, _)| *host);
        let Some(granted) = self.grants.taken(now, by, message.wid, hosts) else {
            return;
        };
        let snapshot = self.model.snapshot(now);
        let started: Vec<Started> = tasks
            .iter()
            .map(|(host, tid)| Started {
                tid: *tid,
                host: *host,
                name: snapshot.name(*host),
            })
            .collect();
        self.record_taken(&granted.from, &tasks);
        self.spawns.granted(granted.from, started, granted.attempt);
        if granted.renew {
            self.grant(now, by);
        }
    }

    /// Records the tasks as if they had been requested, so that a replay requests them.
    fn record_taken(&mut self, from: &Incoming, tasks: &[(HostId, Tid)]) {
        let Some((_, first)) = tasks.first() else {
            return;
        };
        let number = (from.src, first.raw());
        let Incoming {
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
        self.record_input(|| Input::Spawn {
            number,
            caller,
            user,
            job,
            request: request(),
        });
        self.record_input(|| Input::Started {
            number,
            tids: tasks.iter().map(|(_, tid)| *tid).collect(),
        });
    }
}

/// True for a request whose tasks can be placed a few at a time with the same result.
fn is_plain(request: &SpawnRequest) -> bool {
    // Memory is promised to tasks when their order is sent to a host.
    let plain = |wants: Wants| {
        wants.rank.is_none() && wants.together == Together::Any && wants.memory().is_none()
    };
    Wants::of(request).is_ok_and(plain)
}
