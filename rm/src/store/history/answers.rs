//! Answers queries from the history.

use super::{History, UserSums};
use sempa_proto::rm::{Decision, DecisionKind, REPLY_ENTRIES_MAX, RmQuery, RmReply, UserUsage};
use sempa_proto::{Micros, Tid};
use std::collections::BTreeSet;

/// Tolerance for differing clocks of hosts.
const CLOCK_TOLERANCE: Micros = Micros::from_secs(1);

impl History {
    /// Answers a query from the history.
    pub fn answer(&self, question: &RmQuery) -> RmReply {
        match question {
            RmQuery::TaskDecisions(tid) => {
                let task = self.task(*tid).cloned();
                let members = self.tasks_of_job(*tid);
                let about = |what: &DecisionKind| {
                    what.concerns_task(|one| one == *tid || members.contains(&one))
                };
                let decisions = self.decisions_about(about, self.first_start(*tid));
                let unknown = task.is_none() && decisions.is_empty();
                if unknown {
                    RmReply::NotFound
                } else {
                    RmReply::Decisions {
                        task,
                        decisions,
                        host_state: None,
                    }
                }
            }
            RmQuery::HostDecisions(name) => {
                let decisions = self.decisions_about(|what| what.concerns_host(name), None);
                let known = self.hosts.values().any(|host| host == name);
                let unknown = !known && decisions.is_empty();
                if unknown {
                    RmReply::NotFound
                } else {
                    RmReply::Decisions {
                        task: None,
                        decisions,
                        host_state: None,
                    }
                }
            }
            RmQuery::Users { user } => {
                let wanted = self
                    .users
                    .iter()
                    .filter(|(id, _)| user.is_none_or(|user| user == **id));
                let one = |(id, u): (&u32, &UserSums)| UserUsage {
                    user: *id,
                    totals: u.sums,
                    index: u.index,
                };
                RmReply::Users(wanted.map(one).take(REPLY_ENTRIES_MAX).collect())
            }
            RmQuery::Jobs { user } => {
                let wanted = self
                    .jobs
                    .values()
                    .filter(|j| user.is_none_or(|user| user == j.user));
                RmReply::Jobs(newest_entries(wanted))
            }
            RmQuery::Job(tid) => {
                let Some(job) = self.job_of(*tid).cloned() else {
                    return RmReply::NotFound;
                };
                let tasks = newest_entries(
                    self.tasks
                        .values()
                        .filter(|t| t.job == job.job && t.started >= job.started),
                );
                RmReply::Job { job, tasks }
            }
            // Commands, and queries that need the state of the service, are not answered here.
            RmQuery::Suspend { .. }
            | RmQuery::Drain { .. }
            | RmQuery::Undrain { .. }
            | RmQuery::DrainStatus { .. }
            | RmQuery::Kill(_)
            | RmQuery::KillStatus(_)
            | RmQuery::CancelVacated(_)
            | RmQuery::WaitingSpawns { .. } => RmReply::NotFound,
        }
    }

    /// Returns the tasks of the job whose top task is `tid`; empty if there is no such job.
    fn tasks_of_job(&self, tid: Tid) -> BTreeSet<Tid> {
        let job = self.job(tid).map(|job| job.started);
        let since = job.filter(|_| self.task(tid).is_none_or(|task| task.job == tid));
        let Some(since) = since else {
            return BTreeSet::new();
        };
        self.tasks
            .values()
            .filter(|task| task.job == tid && task.started >= since)
            .map(|task| task.tid)
            .collect()
    }

    /// Returns the start time of the newest task with this tid. For a task that was restarted from
    /// a checkpoint, returns the time of its first start.
    fn first_start(&self, tid: Tid) -> Option<Micros> {
        let mut starts = self
            .tasks
            .values()
            .rev()
            .filter(|task| task.tid == tid)
            .map(|task| task.started);
        let mut began = starts.next()?;
        let restarts = |what: &DecisionKind| matches!(what, DecisionKind::Restarted { tasks, .. } if tasks.iter().any(|(t, _)| *t == tid));
        let restarts: Vec<Micros> = self
            .decisions
            .values()
            .filter(|d| restarts(&d.kind))
            .map(|d| d.at)
            .collect();
        let mut until = Micros(u64::MAX);
        for before in starts {
            if !restarts
                .iter()
                .any(|at| *at + CLOCK_TOLERANCE >= began && *at < until)
            {
                break;
            }
            (until, began) = (began, before);
        }
        Some(began)
    }

    /// Returns the newest decisions for which `wanted` is true. `since`: omits older decisions,
    /// which concern an earlier task with the same tid.
    fn decisions_about(
        &self,
        wanted: impl Fn(&DecisionKind) -> bool,
        since: Option<Micros>,
    ) -> Vec<Decision> {
        let new = |d: &&Decision| since.is_none_or(|since| d.at + CLOCK_TOLERANCE >= since);
        newest_entries(
            self.decisions
                .values()
                .filter(|d| wanted(&d.kind))
                .filter(new),
        )
    }
}

/// Returns the newest entries up to the maximum of a reply, in ascending order of time.
fn newest_entries<'a, T: Clone + 'a>(all: impl DoubleEndedIterator<Item = &'a T>) -> Vec<T> {
    let mut list: Vec<T> = all.rev().take(REPLY_ENTRIES_MAX).cloned().collect();
    list.reverse();
    list
}
