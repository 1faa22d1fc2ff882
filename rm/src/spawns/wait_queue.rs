//! Requests that wait for a host, and the reservation for one of them.

use super::refusals::limit_attempt;
use super::{SpawnIncoming, SpawnOutput, Spawns, add_attempt, tasks_held};
use crate::decide::{FairShare, QueuedRequest, RESERVE_AFTER};
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
    pub(super) number: u64,
    pub(super) user: u32,
    /// User and job of the request, if it waits because one of them has reached its limit.
    limited_by: Option<(u32, Tid)>,
    /// Reserved hosts, which other requests do not get.
    pub(super) hosts: Vec<HostId>,
}

impl Reservation {
    /// True if `default_user` has a lower index than the user of the reservation. Requests of
    /// `default_user` ignore the reservation then. Otherwise a user with a high index could reserve
    /// every host that becomes free for users with lower ones.
    fn yields_to(&self, now: Micros, fair: &FairShare, user: u32) -> bool {
        user != self.user && fair.index(now, user) < fair.index(now, self.user)
    }

    /// True if the reservation applies to request `number` of `user`, so that this request
    /// must not use the reserved hosts.
    pub(super) fn excludes(
        &self,
        now: Micros,
        fair: &FairShare,
        (number, user): (u64, u32),
    ) -> bool {
        self.number != number && !self.yields_to(now, fair, user)
    }

    /// True if a request of this user or job must wait because the reserved request waits for a
    /// limit of the same user or job.
    fn blocks_others_of(&self, user: u32, job: Tid) -> bool {
        self.limited_by
            .is_some_and(|by| by.0 == user || by.1 == job)
    }
}

impl Spawns {
    /// Checks the limits before a placement. Returns true if a limit prevents it. In that case the
    /// request waits or, if its waiting time is over or it could never be allowed, is refused.
    pub(super) fn check_limits(&mut self, now: Micros, number: u64) -> bool {
        let Some(spawn) = self.pending.get_mut(&number) else {
            return false;
        };
        let (user, job, count) = (spawn.from.user, spawn.from.job, spawn.unplaced.len() as u32);
        let has = tasks_held(&self.fair, &self.suspended, &self.jobs, (user, job));
        let could = self.rules.limits.could_allow(has.0, has.1, count);
        let waits = could.is_ok() && now < spawn.wait_until;
        let kept = self
            .reservation
            .as_ref()
            .filter(|kept| kept.excludes(now, &self.fair, (number, user)));
        if waits && kept.is_some_and(|kept| kept.blocks_others_of(user, job)) {
            let tasks = std::mem::take(&mut spawn.unplaced);
            let why = "it waits for an earlier request of its user or job that has waited long"
                .to_string();
            self.enqueue(now, number, tasks, why);
            return true;
        }
        let Err(limited) = could.and_then(|()| self.rules.limits.allow(has.0, has.1, count)) else {
            return false;
        };
        let tasks = std::mem::take(&mut spawn.unplaced);
        if waits {
            self.enqueue(now, number, tasks, limited.to_string());
            self.reserve_for(now, number, Some((user, job)), Vec::new);
            return true;
        }
        add_attempt(&mut spawn.attempts, limit_attempt(limited.to_string()));
        spawn.placed_at = now;
        tasks
            .into_iter()
            .for_each(|task| spawn.results[task] = Some(Err(PvmError::OutOfRes)));
        self.reservation.take_if(|kept| kept.number == number);
        self.finish_if_complete(number);
        true
    }

    /// Returns a sentence that describes the reservation of this host; `None` if the host is not
    /// reserved.
    pub fn describe_reservation(&self, host: HostId) -> Option<String> {
        let kept = self
            .reservation
            .as_ref()
            .filter(|kept| kept.hosts.contains(&host))?;
        let spawn = self.pending.get(&kept.number)?;
        let (count, file, src) = (
            spawn.unplaced.len(),
            &spawn.from.request.file,
            spawn.from.requester,
        );
        Some(format!(
            "it is reserved for {count} {file} for {src}, which have waited long"
        ))
    }

    /// Makes the reservation for a request that has waited for a long time. It ends when the
    /// request is placed or stops waiting. There is at most one reservation.
    pub(super) fn reserve_for(
        &mut self,
        now: Micros,
        number: u64,
        limited: Option<(u32, Tid)>,
        hosts: impl FnOnce() -> Vec<HostId>,
    ) {
        let Some(spawn) = self
            .pending
            .get(&number)
            .filter(|_| self.waiting.contains(&number))
        else {
            return;
        };
        let SpawnIncoming {
            waited,
            ref request,
            requester: src,
            ..
        } = spawn.from;
        let kept = self
            .reservation
            .as_ref()
            .filter(|kept| kept.number != number);
        let is_for_another =
            kept.is_some_and(|kept| !kept.yields_to(now, &self.fair, spawn.from.user));
        if now.since(spawn.began_at) + waited < RESERVE_AFTER || is_for_another {
            return;
        }
        let hosts = hosts();
        if hosts.is_empty() && limited.is_none() {
            // All hosts together have too little room for the request, even without other tasks.
            self.reservation = None;
            return;
        }
        if self
            .reservation
            .as_ref()
            .is_none_or(|kept| kept.number != number)
        {
            let (count, file) = (spawn.unplaced.len(), &request.file);
            let what = if limited.is_some() {
                "other requests of its user and its job wait for it"
            } else {
                "hosts are reserved for it"
            };
            let text = format!(
                "{count} {file} for {src} have waited {} s for hosts: {what}",
                RESERVE_AFTER.0 / 1_000_000
            );
            self.outputs
                .push_back(SpawnOutput::LogEvent(EventKind::Note { text }));
        }
        self.reservation = Some(Reservation {
            number,
            user: spawn.from.user,
            limited_by: limited,
            hosts,
        });
    }

    /// Queues a request until a host is free. If the queue is full, ends its waiting time, so that
    /// the next placement refuses it.
    pub(super) fn enqueue(&mut self, now: Micros, number: u64, tasks: Vec<usize>, why: String) {
        let Some(spawn) = self.pending.get_mut(&number) else {
            return;
        };
        (spawn.unplaced, spawn.wait_reason) =
            (tasks, truncate(&why, WAIT_REASON_BYTES_MAX).to_string());
        let SpawnIncoming {
            user,
            job,
            requester: src,
            wid,
            waited,
            ..
        } = spawn.from;
        let since = Micros(now.0.saturating_sub(waited.0));
        match self.fair.enqueue(
            now,
            QueuedRequest {
                number,
                user,
                job,
                since,
            },
        ) {
            Ok(()) => {
                self.waiting.insert(number);
                // The task may send the request again to another resource manager, which would
                // start all of its tasks. So it is notified only if none of them can have been
                // started, which includes tasks on lost hosts.
                let under_way = self.orders.values().any(|order| order.spawn == number);
                if !spawn.wait_notified
                    && !under_way
                    && spawn.lost_hosts.is_empty()
                    && spawn.hosts.iter().all(Option::is_none)
                {
                    spawn.wait_notified = true;
                    let waited = Some(waited + now.since(spawn.began_at));
                    self.outputs.push_back(SpawnOutput::NotifyWait {
                        to: src,
                        wid,
                        waited,
                    });
                }
            }
            Err(_) => {
                spawn.wait_until = now;
                self.placement_queue.push_back(number);
            }
        }
    }

    /// After a change, queues all waiting requests for placement, in the order of service.
    pub fn retry_waiting(&mut self, now: Micros) {
        for QueuedRequest { number, .. } in self.fair.drain_queue(now) {
            self.waiting.remove(&number);
            self.placement_queue.push_back(number);
        }
    }

    pub(super) fn stop_waiting(&mut self, now: Micros, user: u32, number: u64) {
        self.reservation.take_if(|kept| kept.number == number);
        self.fair.dequeue(now, user, number);
        self.waiting.remove(&number);
    }

    /// Returns the number of waiting requests.
    pub fn waiting_count(&self) -> usize {
        self.waiting.len()
    }

    /// Returns requests that wait for free hosts: the oldest one of each user, in the order of
    /// service. Each comes with the number of tasks without a host, and the hosts that are reserved
    /// for other requests. Requests that wait for a limit are not included.
    pub fn waiting_for_hosts(
        &self,
        now: Micros,
    ) -> impl Iterator<Item = (&SpawnIncoming, u32, &[HostId])> {
        self.fair.next_per_user(now).into_iter().filter_map(
            move |(
                _,
                QueuedRequest {
                    number, user, job, ..
                },
            )| {
                let spawn = self.pending.get(&number)?;
                let count = spawn.unplaced.len() as u32;
                let has = tasks_held(&self.fair, &self.suspended, &self.jobs, (user, job));
                self.rules.limits.allow(has.0, has.1, count).ok()?;
                let kept = self
                    .reservation
                    .as_ref()
                    .filter(|kept| kept.excludes(now, &self.fair, (number, user)));
                let is_free = kept.is_none_or(|kept| !kept.blocks_others_of(user, job));
                is_free.then(|| (&spawn.from, count, kept.map_or(&[][..], |kept| &kept.hosts)))
            },
        )
    }

    /// Lists the waiting requests in the order of service.
    pub fn list_waiting(&self, now: Micros, wall: Micros) -> impl Iterator<Item = WaitingSpawn> {
        let one = move |(
            turn,
            QueuedRequest {
                number, user, job, ..
            },
        ): (u32, QueuedRequest)| {
            let spawn = self.pending.get(&number)?;
            let SpawnIncoming {
                requester: by,
                ref request,
                waited,
                ..
            } = spawn.from;
            let waited = waited + now.since(spawn.began_at);
            let program = truncate(&request.file, PROGRAM_BYTES_MAX).to_string();
            let why = spawn.wait_reason.clone();
            let (count, since) = (
                spawn.unplaced.len() as u32,
                Micros(wall.0.saturating_sub(waited.0)),
            );
            Some(WaitingSpawn {
                program,
                count,
                requested_by: by,
                job,
                user,
                since,
                queue_position: turn,
                why,
            })
        };
        (1..).zip(self.fair.queue_in_order(now)).filter_map(one)
    }
}
