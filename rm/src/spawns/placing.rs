//! Places the tasks of a request and creates the orders to their hosts.

use super::{
    IncomingSpawn, PendingSpawn, START_ACK_TIMEOUT, SpawnOutput, Spawns, StartOrder, StartOrderId,
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

/// Indices of the tasks of a request, by the host on which each task is to start.
type TasksByHost = BTreeMap<HostId, Vec<usize>>;

impl Spawns {
    /// Places the first request in the queue, or queues it again if it may wait for a free host.
    /// `chooser`: external chooser, if the policy names one. Returns the host after which the next
    /// round-robin placement starts.
    pub fn place_next_request(
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
            return snapshot.last_round_robin_host;
        };
        let Some(spawn) = self.pending_spawns.get_mut(&number) else {
            return snapshot.last_round_robin_host;
        };
        let tasks = std::mem::take(&mut spawn.unplaced_tasks);
        let IncomingSpawn {
            caller_host,
            request,
            user,
            job,
            ..
        } = &spawn.incoming;
        let other_reservation = self
            .reservation
            .as_ref()
            .filter(|reservation| reservation.applies_to(now, &self.fair_share, (number, *user)));
        spawn.decline_ends.retain(|_, retry_at| now < *retry_at);
        let declining_hosts: Vec<HostId> = spawn.decline_ends.keys().copied().collect();
        let placement_request = PlacementRequest {
            user: *user,
            spawn_request: request,
            task_count: tasks.len() as u32,
            caller_host: *caller_host,
            peer_hosts: &snapshot.peer_hosts(*caller_host, *job),
            lost_hosts: &spawn.lost_hosts,
            declining_hosts: &declining_hosts,
            reserved_hosts: other_reservation.map_or(&[][..], |reservation| &reservation.hosts),
        };
        let chooser = chooser.filter(|_| !request.names_one_host());
        let placement = place_with_chooser(snapshot, &placement_request, chooser);
        let none_available = placement.reason == PlacementReason::NoneAvailable
            && placement.hosts.first() == Some(&Err(PvmError::OutOfRes));
        if none_available && now < spawn.wait_until {
            let previous_hosts = self
                .reservation
                .as_ref()
                .filter(|reservation| reservation.request_number == number)
                .map_or(&[][..], |reservation| &reservation.hosts);
            let hosts = hosts_to_reserve(snapshot, &placement_request, previous_hosts);
            self.enqueue(now, number, tasks, placement.describe(snapshot));
            self.reserve_if_overdue(now, number, None, || hosts);
            return snapshot.last_round_robin_host;
        }
        self.reservation
            .take_if(|reservation| reservation.request_number == number);
        let tasks_by_host = spawn.record_placement(now, snapshot, &placement, tasks);
        self.queue_start_orders(now, snapshot, number, tasks_by_host);
        self.finish_if_complete(number);
        placement.last_round_robin_host
    }

    /// Creates one order for each host. If the requesting task was notified that its request waits,
    /// it is first notified that the request stops waiting.
    fn queue_start_orders(
        &mut self,
        now: Micros,
        snapshot: &Snapshot,
        number: u64,
        tasks_by_host: TasksByHost,
    ) {
        let Some(spawn) = self.pending_spawns.get_mut(&number) else {
            return;
        };
        let IncomingSpawn {
            requester,
            wait_id,
            request,
            ..
        } = &spawn.incoming;
        if std::mem::take(&mut spawn.wait_notified) && !tasks_by_host.is_empty() {
            self.outputs.push_back(SpawnOutput::NotifyWait {
                requester: *requester,
                wid: *wait_id,
                waited: None,
            });
        }
        let memory_per_task = Constraints::from_request(request)
            .ok()
            .and_then(|constraints| constraints.min_memory_bytes())
            .unwrap_or(0);
        let directory = request
            .where_arg
            .find(':')
            .map_or("", |colon| &request.where_arg[colon..]);
        for (host, tasks) in tasks_by_host {
            spawn.host_names.insert(host, snapshot.host_name(host));
            self.last_number += 1;
            let order = StartOrderId(self.last_number);
            self.outputs.push_back(SpawnOutput::StartTasks {
                order,
                host,
                parent: *requester,
                request: SpawnRequest {
                    task_count: tasks.len() as u32,
                    where_arg: directory.to_string(),
                    ..request.clone()
                },
                memory_bytes: memory_per_task.saturating_mul(tasks.len() as u64),
            });
            self.start_orders.insert(
                order,
                StartOrder {
                    spawn_number: number,
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
    /// Records an attempt to place these tasks. A task without a host in the placement has failed.
    /// Returns the tasks that got a host.
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
                Err(error) => self.task_results[task] = Some(Err(*error)),
            }
        }
        tasks_by_host
    }
}
