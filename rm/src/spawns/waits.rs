//! Requests that wait for a host, and the reservation for one of them.

use super::refusals::limit;
use super::{Incoming, Output, Spawns, held, searched};
use crate::decide::{Fair, RESERVE_AFTER, Waiting};
use crate::store::books::PROGRAM_BYTES_MAX;
use sempa_proto::event::EventKind;
use sempa_proto::rm::WaitingSpawn;
use sempa_proto::text::truncate;
use sempa_proto::{HostId, Micros, PvmError, Tid};

/// Maximum size of the kept explanation why a request waits, in bytes.
const WHY_BYTES_MAX: usize = 1024;

/// Reservation for a request that has waited long.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) number: u64,
    pub(super) user: u32,
    /// User and job of the request, if it waits until one of them has fewer tasks.
    limited: Option<(u32, Tid)>,
    /// Hosts that other requests do not get.
    pub(super) hosts: Vec<HostId>,
}

impl Kept {
    /// True if this user goes first, so the reservation does not hold against the user. Otherwise a
    /// user with a high index could wait for everything that is freed for others.
    fn is_behind(&self, now: Micros, fair: &Fair, user: u32) -> bool {
        user != self.user && fair.index(now, user) < fair.index(now, self.user)
    }

    /// True if the reservation holds against this request of this user.
    pub(super) fn is_kept_from(
        &self,
        now: Micros,
        fair: &Fair,
        (number, user): (u64, u32),
    ) -> bool {
        self.number != number && !self.is_behind(now, fair, user)
    }

    /// True if other requests of this user or job must wait until the reserved one is within its
    /// limit.
    fn is_before(&self, user: u32, job: Tid) -> bool {
        self.limited.is_some_and(|by| by.0 == user || by.1 == job)
    }
}

impl Spawns {
    /// Checks the limits before a placement. True if a limit prevents it. The request then waits,
    /// or is refused: immediately if it asks for more than is ever allowed.
    pub(super) fn is_limited(&mut self, now: Micros, number: u64) -> bool {
        let Some(spawn) = self.open.get_mut(&number) else {
            return false;
        };
        let (user, job, count) = (spawn.from.user, spawn.from.job, spawn.unplaced.len() as u32);
        let has = held(&self.fair, &self.suspended, &self.jobs, (user, job));
        let could = self.rules.limits.could_allow(has.0, has.1, count);
        let waits = could.is_ok() && now < spawn.wait_until;
        let kept = self
            .kept
            .as_ref()
            .filter(|kept| kept.is_kept_from(now, &self.fair, (number, user)));
        if waits && kept.is_some_and(|kept| kept.is_before(user, job)) {
            let tasks = std::mem::take(&mut spawn.unplaced);
            let why = "it waits for an earlier request of its user or job that has waited long"
                .to_string();
            self.wait(now, number, tasks, why);
            return true;
        }
        let Err(limited) = could.and_then(|()| self.rules.limits.allow(has.0, has.1, count)) else {
            return false;
        };
        let tasks = std::mem::take(&mut spawn.unplaced);
        if waits {
            self.wait(now, number, tasks, limited.to_string());
            self.keep(now, number, Some((user, job)), Vec::new);
            return true;
        }
        searched(&mut spawn.attempts, limit(limited.to_string()));
        spawn.placed = now;
        tasks
            .into_iter()
            .for_each(|task| spawn.results[task] = Some(Err(PvmError::OutOfRes)));
        self.kept.take_if(|kept| kept.number == number);
        self.finish(number);
        true
    }

    /// Describes the reservation of this host, if there is one.
    pub fn kept_for(&self, host: HostId) -> Option<String> {
        let kept = self
            .kept
            .as_ref()
            .filter(|kept| kept.hosts.contains(&host))?;
        let spawn = self.open.get(&kept.number)?;
        let (count, file, src) = (
            spawn.unplaced.len(),
            &spawn.from.request.file,
            spawn.from.src,
        );
        Some(format!(
            "it is reserved for {count} {file} for {src}, which have waited long"
        ))
    }

    /// Reserves room for a request that has waited long, until it is placed or stops waiting. There
    /// is at most one reservation.
    pub(super) fn keep(
        &mut self,
        now: Micros,
        number: u64,
        limited: Option<(u32, Tid)>,
        hosts: impl FnOnce() -> Vec<HostId>,
    ) {
        let Some(spawn) = self
            .open
            .get(&number)
            .filter(|_| self.waiting.contains(&number))
        else {
            return;
        };
        let Incoming {
            waited,
            ref request,
            src,
            ..
        } = spawn.from;
        let kept = self.kept.as_ref().filter(|kept| kept.number != number);
        let is_for_another =
            kept.is_some_and(|kept| !kept.is_behind(now, &self.fair, spawn.from.user));
        if now.since(spawn.began) + waited < RESERVE_AFTER || is_for_another {
            return;
        }
        let hosts = hosts();
        if hosts.is_empty() && limited.is_none() {
            // All hosts together are not enough, even without other tasks.
            self.kept = None;
            return;
        }
        if self.kept.as_ref().is_none_or(|kept| kept.number != number) {
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
            self.out.push_back(Output::Record(EventKind::Note { text }));
        }
        self.kept = Some(Kept {
            number,
            user: spawn.from.user,
            limited,
            hosts,
        });
    }

    /// Lets a request wait for a host. If the queue is full, the next attempt refuses the request.
    pub(super) fn wait(&mut self, now: Micros, number: u64, tasks: Vec<usize>, why: String) {
        let Some(spawn) = self.open.get_mut(&number) else {
            return;
        };
        (spawn.unplaced, spawn.waits_for) = (tasks, truncate(&why, WHY_BYTES_MAX).to_string());
        let Incoming {
            user,
            job,
            src,
            wid,
            waited,
            ..
        } = spawn.from;
        let since = Micros(now.0.saturating_sub(waited.0));
        match self.fair.wait(
            now,
            Waiting {
                number,
                user,
                job,
                since,
            },
        ) {
            Ok(()) => {
                self.waiting.insert(number);
                // The next resource manager receives the request as a whole, so none of its tasks
                // may have been started. On a lost host, some may have been.
                let under_way = self.orders.values().any(|order| order.spawn == number);
                if !spawn.told
                    && !under_way
                    && spawn.lost.is_empty()
                    && spawn.hosts.iter().all(Option::is_none)
                {
                    spawn.told = true;
                    let waited = Some(waited + now.since(spawn.began));
                    self.out.push_back(Output::Waits {
                        to: src,
                        wid,
                        waited,
                    });
                }
            }
            Err(_) => {
                spawn.wait_until = now;
                self.to_place.push_back(number);
            }
        }
    }

    /// Queues all waiting requests for a placement after a change, in the order of service.
    pub fn try_waiting(&mut self, now: Micros) {
        for Waiting { number, .. } in self.fair.take_waiting(now) {
            self.waiting.remove(&number);
            self.to_place.push_back(number);
        }
    }

    pub(super) fn wait_no_longer(&mut self, now: Micros, user: u32, number: u64) {
        self.kept.take_if(|kept| kept.number == number);
        self.fair.leave(now, user, number);
        self.waiting.remove(&number);
    }

    /// Returns the number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the oldest request of each user that waits for free hosts, in the order of service,
    /// with the number of missing hosts and the hosts that are reserved for other requests.
    /// Requests that wait for a limit are left out.
    pub fn waiting_in_turn(
        &self,
        now: Micros,
    ) -> impl Iterator<Item = (&Incoming, u32, &[HostId])> {
        self.fair.turns(now).into_iter().filter_map(
            move |(
                _,
                Waiting {
                    number, user, job, ..
                },
            )| {
                let spawn = self.open.get(&number)?;
                let count = spawn.unplaced.len() as u32;
                let has = held(&self.fair, &self.suspended, &self.jobs, (user, job));
                self.rules.limits.allow(has.0, has.1, count).ok()?;
                let kept = self
                    .kept
                    .as_ref()
                    .filter(|kept| kept.is_kept_from(now, &self.fair, (number, user)));
                let is_free = kept.is_none_or(|kept| !kept.is_before(user, job));
                is_free.then(|| (&spawn.from, count, kept.map_or(&[][..], |kept| &kept.hosts)))
            },
        )
    }

    /// Lists the waiting requests in the order of service.
    pub fn waits(&self, now: Micros, wall: Micros) -> impl Iterator<Item = WaitingSpawn> {
        let one = move |(
            turn,
            Waiting {
                number, user, job, ..
            },
        ): (u32, Waiting)| {
            let spawn = self.open.get(&number)?;
            let Incoming {
                src: by,
                ref request,
                waited,
                ..
            } = spawn.from;
            let waited = waited + now.since(spawn.began);
            let program = truncate(&request.file, PROGRAM_BYTES_MAX).to_string();
            let why = spawn.waits_for.clone();
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
        (1..).zip(self.fair.queue(now)).filter_map(one)
    }
}
