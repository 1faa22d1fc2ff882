//! Requests that wait for a host, and the reservation of hosts for one of these requests.

use super::refusals::limit_attempt;
use super::{IncomingSpawn, SpawnOutput, Spawns, add_attempt, task_counts};
use crate::decide::{FairShare, QueuedRequest, RESERVATION_DELAY};
use crate::store::history::PROGRAM_BYTES_MAX;
use sempa_proto::event::EventKind;
use sempa_proto::rm::WaitingSpawn;
use sempa_proto::text::truncate;
use sempa_proto::{HostId, Micros, PvmError, Tid};

/// Maximum size in bytes of the stored reason why a request waits.
const WAIT_REASON_BYTES_MAX: usize = 1024;

/// Reservation for a request that has waited for a long time.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) request_number: u64,
    pub(super) user: u32,
    /// User and job of the request if it waits because one of them has reached its task limit;
    /// otherwise `None`.
    limited_user_and_job: Option<(u32, Tid)>,
    /// Reserved hosts. Other requests do not get these hosts.
    pub(super) hosts: Vec<HostId>,
}

impl Reservation {
    /// True if `user` has a lower index than the user of the reservation. In this case requests of
    /// `user` ignore the reservation. Otherwise a user with a high index could reserve every host
    /// that becomes free for users with lower indices.
    fn is_ignored_by(&self, now: Micros, fair_share: &FairShare, user: u32) -> bool {
        user != self.user
            && fair_share.user_index(now, user) < fair_share.user_index(now, self.user)
    }

    /// True if the reservation applies to the request `number` of `user`, so that this request must
    /// not use the reserved hosts.
    pub(super) fn applies_to(
        &self,
        now: Micros,
        fair_share: &FairShare,
        (number, user): (u64, u32),
    ) -> bool {
        self.request_number != number && !self.is_ignored_by(now, fair_share, user)
    }

    /// True if a request of this user or job must wait, because the request with the reservation
    /// waits for a task limit of the same user or job.
    fn blocks_user_or_job(&self, user: u32, job: Tid) -> bool {
        self.limited_user_and_job
            .is_some_and(|user_and_job| user_and_job.0 == user || user_and_job.1 == job)
    }
}

impl Spawns {
    /// Checks the limits before a placement. Returns true if a limit prevents the placement. In
    /// this case the request waits, or is refused if its waiting time has ended or if the limits
    /// could never allow the request.
    pub(super) fn check_limits(&mut self, now: Micros, number: u64) -> bool {
        let Some(spawn) = self.pending_spawns.get_mut(&number) else {
            return false;
        };
        let (user, job, new_task_count) = (
            spawn.incoming.user,
            spawn.incoming.job,
            spawn.unplaced_tasks.len() as u32,
        );
        let current_counts = task_counts(
            &self.fair_share,
            &self.suspended_tasks,
            &self.tasks_per_job,
            (user, job),
        );
        let later_result =
            self.rules
                .task_limits
                .could_allow(current_counts.0, current_counts.1, new_task_count);
        let may_wait = later_result.is_ok() && now < spawn.wait_until;
        let current_reservation = self.reservation.as_ref().filter(|current_reservation| {
            current_reservation.applies_to(now, &self.fair_share, (number, user))
        });
        if may_wait
            && current_reservation.is_some_and(|current_reservation| {
                current_reservation.blocks_user_or_job(user, job)
            })
        {
            let tasks = std::mem::take(&mut spawn.unplaced_tasks);
            let wait_reason =
                "it waits for an earlier request of its user or job that has waited long"
                    .to_string();
            self.enqueue(now, number, tasks, wait_reason);
            return true;
        }
        let Err(limit_error) = later_result.and_then(|()| {
            self.rules
                .task_limits
                .allow(current_counts.0, current_counts.1, new_task_count)
        }) else {
            return false;
        };
        let tasks = std::mem::take(&mut spawn.unplaced_tasks);
        if may_wait {
            self.enqueue(now, number, tasks, limit_error.to_string());
            self.reserve_if_overdue(now, number, Some((user, job)), Vec::new);
            return true;
        }
        add_attempt(&mut spawn.attempts, limit_attempt(limit_error.to_string()));
        spawn.placed_at = now;
        tasks
            .into_iter()
            .for_each(|task| spawn.task_results[task] = Some(Err(PvmError::OutOfRes)));
        self.reservation
            .take_if(|current_reservation| current_reservation.request_number == number);
        self.finish_if_complete(number);
        true
    }

    /// Returns a sentence that describes the reservation of this host; `None` if the host is not
    /// reserved.
    pub fn describe_reservation(&self, host: HostId) -> Option<String> {
        let reservation = self
            .reservation
            .as_ref()
            .filter(|reservation| reservation.hosts.contains(&host))?;
        let spawn = self.pending_spawns.get(&reservation.request_number)?;
        let (count, program_name, requesting_task) = (
            spawn.unplaced_tasks.len(),
            &spawn.incoming.request.program,
            spawn.incoming.requester,
        );
        Some(format!(
            "it is reserved for {count} {program_name} for {requesting_task}, which have waited long"
        ))
    }

    /// Makes the reservation for a request that has waited for a long time. There is at most one
    /// reservation, which ends when the request is placed or stops waiting. `hosts` returns the
    /// hosts to reserve.
    pub(super) fn reserve_if_overdue(
        &mut self,
        now: Micros,
        number: u64,
        limited_user_and_job: Option<(u32, Tid)>,
        hosts: impl FnOnce() -> Vec<HostId>,
    ) {
        let Some(spawn) = self
            .pending_spawns
            .get(&number)
            .filter(|_| self.waiting_numbers.contains(&number))
        else {
            return;
        };
        let IncomingSpawn {
            earlier_wait: earlier_wait_time,
            ref request,
            requester: requesting_task,
            ..
        } = spawn.incoming;
        let other_reservation = self
            .reservation
            .as_ref()
            .filter(|other_reservation| other_reservation.request_number != number);
        let is_taken = other_reservation.is_some_and(|other_reservation| {
            !other_reservation.is_ignored_by(now, &self.fair_share, spawn.incoming.user)
        });
        if now.since(spawn.accepted_at) + earlier_wait_time < RESERVATION_DELAY || is_taken {
            return;
        }
        let hosts = hosts();
        if hosts.is_empty() && limited_user_and_job.is_none() {
            // All hosts together have too few slots for the request, even if no other task runs.
            self.reservation = None;
            return;
        }
        if self
            .reservation
            .as_ref()
            .is_none_or(|reservation| reservation.request_number != number)
        {
            let (count, program_name) = (spawn.unplaced_tasks.len(), &request.program);
            let consequence = if limited_user_and_job.is_some() {
                "other requests of its user and its job wait for it"
            } else {
                "hosts are reserved for it"
            };
            let text = format!(
                "{count} {program_name} for {requesting_task} have waited {} s for hosts: {consequence}",
                RESERVATION_DELAY.0 / 1_000_000
            );
            self.outputs
                .push_back(SpawnOutput::LogEvent(EventKind::Note { text }));
        }
        self.reservation = Some(Reservation {
            request_number: number,
            user: spawn.incoming.user,
            limited_user_and_job,
            hosts,
        });
    }

    /// Queues a request until a host is free, and notifies the requesting task that the request
    /// waits. If the queue is full, ends the waiting time of the request, so that the next
    /// placement refuses the request.
    pub(super) fn enqueue(&mut self, now: Micros, number: u64, tasks: Vec<usize>, reason: String) {
        let Some(spawn) = self.pending_spawns.get_mut(&number) else {
            return;
        };
        (spawn.unplaced_tasks, spawn.wait_reason) =
            (tasks, truncate(&reason, WAIT_REASON_BYTES_MAX).to_string());
        let IncomingSpawn {
            user,
            job,
            requester: requesting_task,
            wait_id: wid,
            earlier_wait: wait_time,
            ..
        } = spawn.incoming;
        let arrived_at = Micros(now.0.saturating_sub(wait_time.0));
        match self.fair_share.enqueue(
            now,
            QueuedRequest {
                number,
                user,
                job,
                enqueued_at: arrived_at,
            },
        ) {
            Ok(()) => {
                self.waiting_numbers.insert(number);
                // The requesting task may send the request again to another resource manager, which
                // would start all of its tasks. The requesting task is therefore notified only if
                // none of the tasks can have started, not even on a lost host.
                let has_open_orders = self
                    .start_orders
                    .values()
                    .any(|order| order.spawn_number == number);
                if !spawn.wait_notified
                    && !has_open_orders
                    && spawn.lost_hosts.is_empty()
                    && spawn.task_hosts.iter().all(Option::is_none)
                {
                    spawn.wait_notified = true;
                    let wait_time = Some(wait_time + now.since(spawn.accepted_at));
                    self.outputs.push_back(SpawnOutput::NotifyWait {
                        requester: requesting_task,
                        wid,
                        waited: wait_time,
                    });
                }
            }
            Err(_) => {
                spawn.wait_until = now;
                self.placement_queue.push_back(number);
            }
        }
    }

    /// Queues all waiting requests for placement, in the order of service. Must be called after
    /// every change that may help a request.
    pub fn retry_waiting(&mut self, now: Micros) {
        for QueuedRequest { number, .. } in self.fair_share.drain_queue(now) {
            self.waiting_numbers.remove(&number);
            self.placement_queue.push_back(number);
        }
    }

    pub(super) fn stop_waiting(&mut self, now: Micros, user: u32, number: u64) {
        self.reservation
            .take_if(|current_reservation| current_reservation.request_number == number);
        self.fair_share.dequeue(now, user, number);
        self.waiting_numbers.remove(&number);
    }

    pub fn waiting_count(&self) -> usize {
        self.waiting_numbers.len()
    }

    /// Returns requests that wait for free hosts: the oldest request of each user, in the order of
    /// service. Each entry contains the request, the number of its tasks without a host, and the
    /// hosts that are reserved for other requests. Requests that wait because of a limit are not
    /// included.
    pub fn requests_waiting_for_hosts(
        &self,
        now: Micros,
    ) -> impl Iterator<Item = (&IncomingSpawn, u32, &[HostId])> {
        self.fair_share.next_requests(now).into_iter().filter_map(
            move |(
                _,
                QueuedRequest {
                    number, user, job, ..
                },
            )| {
                let spawn = self.pending_spawns.get(&number)?;
                let new_task_count = spawn.unplaced_tasks.len() as u32;
                let current_counts = task_counts(
                    &self.fair_share,
                    &self.suspended_tasks,
                    &self.tasks_per_job,
                    (user, job),
                );
                self.rules
                    .task_limits
                    .allow(current_counts.0, current_counts.1, new_task_count)
                    .ok()?;
                let other_reservation = self.reservation.as_ref().filter(|other_reservation| {
                    other_reservation.applies_to(now, &self.fair_share, (number, user))
                });
                let is_unblocked = other_reservation.is_none_or(|other_reservation| {
                    !other_reservation.blocks_user_or_job(user, job)
                });
                is_unblocked.then(|| {
                    (
                        &spawn.incoming,
                        new_task_count,
                        other_reservation
                            .map_or(&[][..], |other_reservation| &other_reservation.hosts),
                    )
                })
            },
        )
    }

    /// Returns the waiting requests in the order of service, as entries for users. `wall_time`: the
    /// current time of day.
    pub fn waiting_entries(
        &self,
        now: Micros,
        wall_time: Micros,
    ) -> impl Iterator<Item = WaitingSpawn> {
        let to_entry = move |(
            position,
            QueuedRequest {
                number, user, job, ..
            },
        ): (u32, QueuedRequest)| {
            let spawn = self.pending_spawns.get(&number)?;
            let IncomingSpawn {
                requester: requesting_task,
                ref request,
                earlier_wait: wait_time,
                ..
            } = spawn.incoming;
            let wait_time = wait_time + now.since(spawn.accepted_at);
            let program = truncate(&request.program, PROGRAM_BYTES_MAX).to_string();
            let reason = spawn.wait_reason.clone();
            let (count, since) = (
                spawn.unplaced_tasks.len() as u32,
                Micros(wall_time.0.saturating_sub(wait_time.0)),
            );
            Some(WaitingSpawn {
                program,
                task_count: count,
                requested_by: requesting_task,
                job,
                user,
                since,
                queue_position: position,
                last_result: reason,
            })
        };
        (1..)
            .zip(self.fair_share.requests_in_order(now))
            .filter_map(to_entry)
    }
}
