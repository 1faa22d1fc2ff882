//! Suspends tasks: whole jobs on request, and tasks of users with a high index to make room for
//! waiting requests (preemption). The daemons carry this out, and the event log reports it, so a
//! restarted resource manager knows from the history which tasks are suspended and why.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Again, Ask, give_way, go_on};
use libpvm::Error;
use sempa_proto::event::EventKind;
use sempa_proto::migration;
use sempa_proto::rm::{REPLY_ENTRIES_MAX, RmReply, SuspensionInfo};
use sempa_proto::suspend::SuspendCause;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;

/// Interval between preemption checks.
const SHARE_PAUSE: Micros = Micros::from_secs(10);
/// Shorter interval when a request has begun to wait, or when another request may profit.
const SHARE_SOON: Micros = Micros::from_secs(1);
/// Maximum number of requests examined in one check, which ends with the first one that preemption
/// helps.
const SHARE_LOOKS_MAX: usize = 32;

/// State of suspended tasks and jobs.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// Suspended jobs, with the task that requested it.
    jobs: BTreeMap<Tid, Tid>,
    /// The suspended jobs may have running tasks.
    look: bool,
    /// Preempted tasks, and when they were suspended.
    gave_way: BTreeMap<Tid, Micros>,
    /// Time of the last preemption check.
    shared: Option<Micros>,
    /// A request has begun to wait since the last check.
    newcomer: bool,
}

impl Standing {
    /// Records the start of a task, or that its job became known.
    pub(super) fn task_began(&mut self) {
        self.look |= !self.jobs.is_empty();
    }

    /// Records that a request begins to wait.
    pub(super) fn begins_to_wait(&mut self) {
        self.newcomer = true;
    }
}

impl<V: VmApi> Service<V> {
    /// Restores the suspensions in the history.
    pub(super) fn recall_standing(&mut self) {
        let (now, wall) = (self.vm.now(), self.vm.wall());
        let books = &self.memory.ledger.books;
        self.standing.jobs = books.suspended_jobs().collect();
        self.standing.look = true;
        let there = |tid: &Tid| self.model.is_suspended(*tid);
        let known = books.running().filter(|task| there(&task.tid));
        let known: Vec<(Tid, Tid, Option<SuspensionInfo>)> = known
            .map(|task| (task.tid, task.job, task.suspended.clone()))
            .collect();
        for (tid, job, suspended) in known {
            self.spawns.task_suspended(now, tid, true);
            match suspended.map(|s| (s.cause, s.since)) {
                Some((SuspendCause::Preempted { .. }, since)) => {
                    let age = wall.since(since).min(now);
                    self.standing.gave_way.insert(tid, Micros(now.0 - age.0));
                }
                // The previous resource manager died while resuming this job.
                Some((cause @ SuspendCause::JobRequested { .. }, _))
                    if !self.standing.jobs.contains_key(&job) =>
                {
                    self.suspend_again(tid, false, cause);
                }
                _ => {}
            }
        }
    }

    /// Handles the event that a task was suspended or resumed.
    pub(super) fn suspension_heard(&mut self, tid: Tid, suspended: bool) {
        self.spawns.task_suspended(self.vm.now(), tid, suspended);
        if !suspended {
            self.standing.gave_way.remove(&tid);
        }
    }

    /// The model may have dropped a task during its migration, and with it the suspension.
    pub(super) fn suspended_has_moved(&mut self, tid: Tid) {
        if self.memory.ledger.books.is_suspended(tid) {
            self.model.task_suspended(tid, true);
        }
    }

    /// Returns when [`Service::share`] is due, or when waiting requests are tried again without an
    /// event.
    pub(super) fn share_due(&self) -> Option<Micros> {
        let wanted = !self.standing.gave_way.is_empty() || self.spawns.waiting() > 0;
        let pause = if self.standing.newcomer {
            SHARE_SOON
        } else {
            SHARE_PAUSE
        };
        wanted.then(|| self.standing.shared.map_or(Micros(0), |at| at + pause))
    }

    /// Handles a request to suspend or resume a whole job.
    pub(super) fn suspend_job(&mut self, by: Tid, tid: Tid, suspend: bool) -> RmReply {
        let Some(job) = self.memory.ledger.books.job_of(tid).map(|job| job.job) else {
            return RmReply::NotFound;
        };
        let all = self.model.tasks_of(job);
        let (mut tasks, mut others) = (Vec::new(), Vec::new());
        let is_suspended = self.standing.jobs.contains_key(&job);
        if suspend != is_suspended && !(suspend && all.is_empty()) {
            self.record(if suspend {
                EventKind::JobSuspended {
                    job,
                    requested_by: by,
                }
            } else {
                EventKind::JobResumed {
                    job,
                    requested_by: by,
                }
            });
            if suspend {
                self.standing.jobs.insert(job, by);
            } else {
                self.standing.jobs.remove(&job);
            }
        }
        for tid in all.into_iter().filter(|tid| *tid != by) {
            // A daemon ignores a repeated request. When a job resumes, every suspended task must
            // resume.
            let stands = self.model.is_suspended(tid)
                || (!suspend && self.memory.ledger.books.is_suspended(tid));
            if self.standing.gave_way.contains_key(&tid)
                && let Err(error) = self.vm.suspend(
                    tid,
                    suspend,
                    SuspendCause::JobRequested { requested_by: by },
                )
            {
                // Otherwise the task would be resumed, or stay suspended, without its job at the
                // end of the preemption.
                others.push((tid, error.to_string()));
                continue;
            }
            match stands {
                true if suspend => others.push((tid, "it is suspended already".to_string())),
                true if self.standing.gave_way.contains_key(&tid) => {
                    others.push((
                        tid,
                        "it is preempted for another user's task and resumes when there is room for it"
                            .to_string(),
                    ));
                }
                false if !suspend => {}
                _ => match self.suspend_task(
                    tid,
                    suspend,
                    SuspendCause::JobRequested { requested_by: by },
                ) {
                    Ok(()) => tasks.push(tid),
                    Err(error) => others.push((tid, error.to_string())),
                },
            }
        }
        others.truncate(REPLY_ENTRIES_MAX);
        RmReply::Suspended {
            job,
            tasks,
            unchanged: others,
        }
    }

    /// Suspends or resumes a task.
    fn suspend_task(&mut self, tid: Tid, suspend: bool, cause: SuspendCause) -> Result<(), Error> {
        self.vm.suspend(tid, suspend, cause)?;
        self.model.task_suspended(tid, suspend);
        self.suspension_heard(tid, suspend);
        self.changed = true;
        Ok(())
    }

    /// Suspends or resumes a task without a client that waits for the result. A task that has ended
    /// is ignored; other errors are logged.
    fn suspend_again(&mut self, tid: Tid, suspend: bool, cause: SuspendCause) {
        if let Err(error) = self.suspend_task(tid, suspend, cause)
            && error.code != sempa_proto::PvmError::NoTask
        {
            let what = if suspend { "suspended" } else { "resumed" };
            self.note(format!("{tid} was not {what}: {error}"));
        }
    }

    /// Suspends tasks that started in suspended jobs.
    pub(super) fn keep_suspended(&mut self) {
        if !std::mem::take(&mut self.standing.look) {
            return;
        }
        let books = &self.memory.ledger.books;
        self.standing
            .jobs
            .retain(|job, _| books.job_of(*job).is_some_and(|job| job.ended.is_none()));
        for (job, by) in self.standing.jobs.clone() {
            for tid in self.model.running_of(job) {
                self.suspend_again(tid, true, SuspendCause::JobRequested { requested_by: by });
            }
        }
    }

    /// Preempts tasks for the first waiting request that this helps, and resumes preempted tasks
    /// for which there is room. Requests that find hosts without preemption have already been
    /// placed. True if there may be room for waiting requests.
    pub(super) fn share(&mut self, now: Micros) -> bool {
        (self.standing.shared, self.standing.newcomer) = (Some(now), false);
        let books = &self.memory.ledger.books;
        // A recent suspension may not be in the event log yet.
        let counts =
            |tid: Tid, since: Micros| books.is_suspended(tid) || now.since(since) < SHARE_PAUSE;
        self.standing
            .gave_way
            .retain(|tid, since| counts(*tid, *since));
        if !self.options.conduct.give_way {
            let why = "the policy does not preempt tasks any more".to_string();
            for tid in self.standing.gave_way.keys().copied().collect::<Vec<Tid>>() {
                self.end_of_giving_way(tid, why.clone());
            }
            return false;
        }
        let (snapshot, spawns) = (self.model.snapshot(now), &self.spawns);
        // A request that cannot be helped does not prevent helping others.
        let looks = spawns
            .waiting_in_turn(now)
            .take(SHARE_LOOKS_MAX)
            .map(|(from, count, kept)| {
                let (user, caller, request) = (from.user, from.caller, &from.request);
                let ask = Ask {
                    peers: &snapshot.peers_of(caller, from.job),
                    kept,
                    ..Ask::of(user, request, count, caller)
                };
                give_way(snapshot, spawns.fair(), &ask)
            });
        let decided = looks
            .into_iter()
            .find(|decided| !decided.is_empty())
            .unwrap_or_default();
        for gives in &decided {
            self.suspend_again(
                gives.tid,
                true,
                SuspendCause::Preempted {
                    why: gives.why.clone(),
                },
            );
            self.standing.gave_way.insert(gives.tid, now);
        }
        if decided.is_empty() {
            self.let_go_on(now);
        } else {
            self.standing.newcomer = self.spawns.waiting() > 1;
        }
        !decided.is_empty()
    }

    /// Resumes preempted tasks for which there is room.
    fn let_go_on(&mut self, now: Micros) {
        let jobs = &self.standing.jobs;
        let may = |tid: &Tid| !jobs.contains_key(&self.model.user_and_job(*tid).1);
        let gave_way = self
            .standing
            .gave_way
            .iter()
            .filter(|(tid, _)| may(tid))
            .map(|(tid, at)| (*tid, *at))
            .collect();
        let busy = self.spawns.starting_on();
        for (tid, from, again) in go_on(self.model.snapshot(now), &gave_way, &busy) {
            let (here, user) = (self.model.host_name(from), self.model.user_and_job(tid).0);
            match again {
                Again::Here => self.end_of_giving_way(
                    tid,
                    format!("there is room on {here} for user {user} again"),
                ),
                Again::At(to) => {
                    let there = self.model.host_name(to);
                    let why = format!(
                        "it was preempted on {here}, where others run now, and there is room on {there}"
                    );
                    self.begin_move(
                        now,
                        tid,
                        (from, to),
                        migration::MigrationCause::Load { why },
                        None,
                    );
                }
            }
        }
    }

    fn end_of_giving_way(&mut self, tid: Tid, why: String) {
        let job = self.model.user_and_job(tid).1;
        if !self.standing.jobs.contains_key(&job) {
            self.suspend_again(tid, false, SuspendCause::Preempted { why });
        }
    }
}
