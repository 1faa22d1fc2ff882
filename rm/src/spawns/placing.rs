//! Places the tasks of a request and creates the orders to their hosts.

use super::{
    PendingSpawn, START_ACK_TIMEOUT, SpawnIncoming, SpawnOutput, Spawns, StartOrder, StartOrderId,
    add_attempt,
};
use crate::decide::{
    Chooser, Constraints, Placement, PlacementReason, PlacementRequest, Snapshot, hosts_to_reserve,
    place_with_chooser,
};
use crate::store::decision_records;
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, PvmError};
use std::collections::BTreeMap;

/// Tasks of a request, as indices, by the host where each must start.
type TasksByHost = BTreeMap<HostId, Vec<usize>>;

impl Spawns {
    /// Places the first request in the queue. `chooser`: external chooser, if the policy names one.
    /// Returns the host after which the next round-robin placement starts.
    pub fn place_next(
        &mut self,
        now: Micros,
        snapshot: &Snapshot,
        chooser: Option<&dyn Chooser>,
    ) -> HostId {
        let Some(number) = self
            .placement_queue
            .pop_front()
            .filter(|n| !self.check_limits(now, *n))
        else {
            return snapshot.round_robin_last;
        };
        let Some(spawn) = self.pending.get_mut(&number) else {
            return snapshot.round_robin_last;
        };
        let tasks = std::mem::take(&mut spawn.unplaced);
        let SpawnIncoming {
            caller,
            request,
            user,
            job,
            ..
        } = &spawn.from;
        let other_reservation = self
            .reservation
            .as_ref()
            .filter(|reservation| reservation.excludes(now, &self.fair, (number, *user)));
        spawn.declined_until.retain(|_, until| now < *until);
        let declined_by: Vec<HostId> = spawn.declined_until.keys().copied().collect();
        let placement_request = PlacementRequest {
            user: *user,
            request,
            count: tasks.len() as u32,
            caller: *caller,
            peers: &snapshot.peer_hosts(*caller, *job),
            lost_hosts: &spawn.lost_hosts,
            declined_by: &declined_by,
            reserved_hosts: other_reservation.map_or(&[][..], |reservation| &reservation.hosts),
        };
        let chooser = chooser.filter(|_| !request.names_one_host());
        let placement = place_with_chooser(snapshot, &placement_request, chooser);
        let none_available = placement.reason == PlacementReason::NoneAvailable
            && placement.hosts.first() == Some(&Err(PvmError::OutOfRes));
        if none_available && now < spawn.wait_until {
            let before = self
                .reservation
                .as_ref()
                .filter(|reservation| reservation.number == number)
                .map_or(&[][..], |reservation| &reservation.hosts);
            let hosts = hosts_to_reserve(snapshot, &placement_request, before);
            self.enqueue(now, number, tasks, placement.sentence(snapshot));
            self.reserve_for(now, number, None, || hosts);
            return snapshot.round_robin_last;
        }
        self.reservation
            .take_if(|reservation| reservation.number == number);
        let tasks_by_host = spawn.record_placement(now, snapshot, &placement, tasks);
        self.order_starts(now, snapshot, number, tasks_by_host);
        self.finish_if_complete(number);
        placement.round_robin_last
    }

    /// Creates one order for each host. A requesting task that waits is notified before that its
    /// request stops waiting.
    fn order_starts(
        &mut self,
        now: Micros,
        snapshot: &Snapshot,
        number: u64,
        tasks_by_host: TasksByHost,
    ) {
        let Some(spawn) = self.pending.get_mut(&number) else {
            return;
        };
        let SpawnIncoming {
            requester,
            wid,
            request,
            ..
        } = &spawn.from;
        if std::mem::take(&mut spawn.wait_notified) && !tasks_by_host.is_empty() {
            self.outputs.push_back(SpawnOutput::NotifyWait {
                to: *requester,
                wid: *wid,
                waited: None,
            });
        }
        let memory_per_task = Constraints::from_request(request)
            .ok()
            .and_then(|constraints| constraints.memory_bytes())
            .unwrap_or(0);
        let directory = request
            .place
            .find(':')
            .map_or("", |at| &request.place[at..]);
        for (host, tasks) in tasks_by_host {
            spawn.host_names.insert(host, snapshot.host_name(host));
            self.last_number += 1;
            let order = StartOrderId(self.last_number);
            self.outputs.push_back(SpawnOutput::StartTasks {
                order,
                host,
                parent: *requester,
                request: SpawnRequest {
                    count: tasks.len() as u32,
                    place: directory.to_string(),
                    ..request.clone()
                },
                memory: memory_per_task.saturating_mul(tasks.len() as u64),
            });
            self.orders.insert(
                order,
                StartOrder {
                    spawn: number,
                    host,
                    tasks,
                    deadline: (now + START_ACK_TIMEOUT).min(spawn.deadline),
                    wid: None,
                },
            );
        }
    }
}

impl PendingSpawn {
    /// Records an attempt to place these tasks. Tasks that got no host have failed. Returns the
    /// others.
    fn record_placement(
        &mut self,
        now: Micros,
        snapshot: &Snapshot,
        placement: &Placement,
        tasks: Vec<usize>,
    ) -> TasksByHost {
        add_attempt(
            &mut self.attempts,
            decision_records::placement_attempt(placement, snapshot),
        );
        self.placed_at = now;
        let mut tasks_by_host = TasksByHost::new();
        for (task, host) in tasks.into_iter().zip(&placement.hosts) {
            match host {
                Ok(host) => tasks_by_host.entry(*host).or_default().push(task),
                Err(error) => self.results[task] = Some(Err(*error)),
            }
        }
        tasks_by_host
    }
}
