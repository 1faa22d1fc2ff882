//! What the service does about tasks that stand still: it has whole jobs suspended as somebody asks for it, and tasks of users
//! who have taken much give way. The daemons carry it out, and the event log tells it; so a resource manager that begins
//! again knows from the books who stands still and why.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Again, Ask, give_way, go_on};
use libpvm::Error;
use sempa_proto::event::EventKind;
use sempa_proto::migration;
use sempa_proto::rm::{ANSWER_ENTRIES_MAX, Answer, Suspended};
use sempa_proto::suspend::Cause;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;

/// Pause between looks for who is to give way, and who goes on.
const SHARE_PAUSE: Micros = Micros::from_secs(10);
/// The same when somebody has begun to wait, or it may be the next one's turn.
const SHARE_SOON: Micros = Micros::from_secs(1);
/// Requests that are looked at in one look; the first that it helps when others give way is the last of them.
const SHARE_LOOKS_MAX: usize = 32;

/// Who stands still.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// Jobs that somebody has suspended, and who.
    jobs: BTreeMap<Tid, Tid>,
    /// They may have tasks that run.
    look: bool,
    /// Tasks that gave way, and since when.
    gave_way: BTreeMap<Tid, Micros>,
    /// When it was looked for who is to give way, or goes on.
    shared: Option<Micros>,
    /// Somebody waits for whom nobody was looked for.
    newcomer: bool,
}

impl Standing {
    /// A task began, or a job got to know of one.
    pub(super) fn task_began(&mut self) {
        self.look |= !self.jobs.is_empty();
    }

    /// A request begins to wait.
    pub(super) fn begins_to_wait(&mut self) {
        self.newcomer = true;
    }
}

impl<V: VmApi> Service<V> {
    /// Goes on with what the books say.
    pub(super) fn recall_standing(&mut self) {
        let (now, wall) = (self.vm.now(), self.vm.wall());
        let books = &self.memory.ledger.books;
        self.standing.jobs = books.suspended_jobs().collect();
        self.standing.look = true;
        let there = |tid: &Tid| self.model.is_suspended(*tid);
        let known = books.running().filter(|task| there(&task.tid));
        let known: Vec<(Tid, Tid, Option<Suspended>)> = known
            .map(|task| (task.tid, task.job, task.suspended.clone()))
            .collect();
        for (tid, job, suspended) in known {
            self.spawns.task_suspended(now, tid, true);
            match suspended.map(|s| (s.cause, s.since)) {
                Some((Cause::Share { .. }, since)) => {
                    let age = wall.since(since).min(now);
                    self.standing.gave_way.insert(tid, Micros(now.0 - age.0));
                }
                // It was to go on when the one before this died.
                Some((cause @ Cause::Job { .. }, _)) if !self.standing.jobs.contains_key(&job) => {
                    self.suspend_again(tid, false, cause);
                }
                _ => {}
            }
        }
    }

    /// The event log says that a task is suspended, or goes on.
    pub(super) fn suspension_heard(&mut self, tid: Tid, suspended: bool) {
        self.spawns.task_suspended(self.vm.now(), tid, suspended);
        if !suspended {
            self.standing.gave_way.remove(&tid);
        }
    }

    /// A task that has moved may have been forgotten on its way, and with it that it stands still.
    pub(super) fn suspended_has_moved(&mut self, tid: Tid) {
        if self.memory.ledger.books.is_suspended(tid) {
            self.model.task_suspended(tid, true);
        }
    }

    /// When [`Service::share`] has something to do, or who waits is to be tried again although nothing was heard.
    pub(super) fn share_due(&self) -> Option<Micros> {
        let wanted = !self.standing.gave_way.is_empty() || self.spawns.waiting() > 0;
        let pause = if self.standing.newcomer {
            SHARE_SOON
        } else {
            SHARE_PAUSE
        };
        wanted.then(|| self.standing.shared.map_or(Micros(0), |at| at + pause))
    }

    /// Somebody wants a whole job suspended, or to go on.
    pub(super) fn suspend_job(&mut self, by: Tid, tid: Tid, suspend: bool) -> Answer {
        let Some(job) = self.memory.ledger.books.job_of(tid).map(|job| job.job) else {
            return Answer::Unknown;
        };
        let all = self.model.tasks_of(job);
        let (mut tasks, mut others) = (Vec::new(), Vec::new());
        let is_suspended = self.standing.jobs.contains_key(&job);
        if suspend != is_suspended && !(suspend && all.is_empty()) {
            self.record(if suspend {
                EventKind::JobSuspended { job, by }
            } else {
                EventKind::JobResumed { job, by }
            });
            if suspend {
                self.standing.jobs.insert(job, by);
            } else {
                self.standing.jobs.remove(&job);
            }
        }
        for tid in all.into_iter().filter(|tid| *tid != by) {
            // Asked twice, a daemon does nothing; but whoever stands still has to go on.
            let stands = self.model.is_suspended(tid)
                || (!suspend && self.memory.ledger.books.is_suspended(tid));
            if self.standing.gave_way.contains_key(&tid)
                && let Err(error) = self.vm.suspend(tid, suspend, Cause::Job { by })
            {
                // It would go on, or stand, without its job when it need not give way any more.
                others.push((tid, error.to_string()));
                continue;
            }
            match stands {
                true if suspend => others.push((tid, "it is suspended already".to_string())),
                true if self.standing.gave_way.contains_key(&tid) => {
                    others.push((
                        tid,
                        "it gives way to another user's, and goes on when there is room for it"
                            .to_string(),
                    ));
                }
                false if !suspend => {}
                _ => match self.suspend_task(tid, suspend, Cause::Job { by }) {
                    Ok(()) => tasks.push(tid),
                    Err(error) => others.push((tid, error.to_string())),
                },
            }
        }
        others.truncate(ANSWER_ENTRIES_MAX);
        Answer::Suspended { job, tasks, others }
    }

    /// Has a task suspended, or go on.
    fn suspend_task(&mut self, tid: Tid, suspend: bool, cause: Cause) -> Result<(), Error> {
        self.vm.suspend(tid, suspend, cause)?;
        self.model.task_suspended(tid, suspend);
        self.suspension_heard(tid, suspend);
        self.changed = true;
        Ok(())
    }

    /// The same where nobody waits for an answer: a task that has ended needs nothing, and what a daemon refuses for another
    /// reason is told.
    fn suspend_again(&mut self, tid: Tid, suspend: bool, cause: Cause) {
        if let Err(error) = self.suspend_task(tid, suspend, cause)
            && error.code != sempa_proto::PvmError::NoTask
        {
            let what = if suspend { "suspended" } else { "resumed" };
            self.note(format!("{tid} was not {what}: {error}"));
        }
    }

    /// Has tasks suspended that began in suspended jobs.
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
                self.suspend_again(tid, true, Cause::Job { by });
            }
        }
    }

    /// Has tasks give way to the first request in turn that this helps, and tasks go on for which there is room again. Requests
    /// that find a place as it is have it before that. True when there may be room for requests that wait.
    pub(super) fn share(&mut self, now: Micros) -> bool {
        (self.standing.shared, self.standing.newcomer) = (Some(now), false);
        let books = &self.memory.ledger.books;
        // What was decided a moment ago may not be in the log yet.
        let counts =
            |tid: Tid, since: Micros| books.is_suspended(tid) || now.since(since) < SHARE_PAUSE;
        self.standing
            .gave_way
            .retain(|tid, since| counts(*tid, *since));
        if !self.options.conduct.give_way {
            let why = "the policy has nobody give way any more".to_string();
            for tid in self.standing.gave_way.keys().copied().collect::<Vec<Tid>>() {
                self.end_of_giving_way(tid, why.clone());
            }
            return false;
        }
        let (snapshot, spawns) = (self.model.snapshot(now), &self.spawns);
        // One that cannot be helped, whatever is free, is no reason to help nobody.
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
                Cause::Share {
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

    /// Tasks that gave way go on where there is room.
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
                        "it gave way on {here}, where others work now, and there is room on {there}"
                    );
                    self.begin_move(now, tid, (from, to), migration::Cause::Load { why }, None);
                }
            }
        }
    }

    fn end_of_giving_way(&mut self, tid: Tid, why: String) {
        let job = self.model.user_and_job(tid).1;
        if !self.standing.jobs.contains_key(&job) {
            self.suspend_again(tid, false, Cause::Share { why });
        }
    }
}
