//! Answers queries from the history.

use super::{History, UserRecord};
use sempa_proto::rm::{Decision, DecisionKind, REPLY_ENTRIES_MAX, RmQuery, RmReply, UserUsage};
use sempa_proto::{Micros, Tid};
use std::collections::BTreeSet;

/// Maximum difference between the clocks of two hosts that is tolerated when times are compared.
const CLOCK_TOLERANCE: Micros = Micros::from_secs(1);

impl History {
    /// Answers a query from the history. Returns [`RmReply::NotFound`] if the history cannot answer
    /// the query.
    pub fn answer_query(&self, query: &RmQuery) -> RmReply {
        match query {
            RmQuery::TaskDecisions(tid) => {
                let task = self.task(*tid).cloned();
                let job_tids = self.job_tids(*tid);
                let is_about_task = |decision: &DecisionKind| {
                    decision.concerns_task(|entry| entry == *tid || job_tids.contains(&entry))
                };
                let decisions = self.newest_decisions(is_about_task, self.first_start_time(*tid));
                let is_not_found = task.is_none() && decisions.is_empty();
                if is_not_found {
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
                let decisions =
                    self.newest_decisions(|decision| decision.concerns_host(name), None);
                let is_known_host = self.host_names.values().any(|host| host == name);
                let is_not_found = !is_known_host && decisions.is_empty();
                if is_not_found {
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
                let selected_users = self
                    .users
                    .iter()
                    .filter(|(id, _)| user.is_none_or(|user| user == **id));
                let entry = |(id, u): (&u32, &UserRecord)| UserUsage {
                    user: *id,
                    totals: u.totals,
                    up_down_index: u.index,
                };
                RmReply::Users(selected_users.map(entry).take(REPLY_ENTRIES_MAX).collect())
            }
            RmQuery::Jobs { user } => {
                let selected_jobs = self
                    .jobs
                    .values()
                    .filter(|j| user.is_none_or(|user| user == j.user));
                RmReply::Jobs(take_newest(selected_jobs))
            }
            RmQuery::Job(tid) => {
                let Some(job) = self.job_of(*tid).cloned() else {
                    return RmReply::NotFound;
                };
                let tasks = take_newest(
                    self.tasks
                        .values()
                        .filter(|t| t.job == job.job && t.started_at >= job.started_at),
                );
                RmReply::Job { job, tasks }
            }
            // Commands, and queries that need the state of the service, are not answered from the
            // history. The service handles them.
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

    /// Returns the tasks of the job whose first task is `tid`. Empty if `tid` is not the first task
    /// of a job.
    fn job_tids(&self, tid: Tid) -> BTreeSet<Tid> {
        let job_start = self.job(tid).map(|job_start| job_start.started_at);
        let job_begin = job_start.filter(|_| self.task(tid).is_none_or(|task| task.job == tid));
        let Some(job_begin) = job_begin else {
            return BTreeSet::new();
        };
        self.tasks
            .values()
            .filter(|task| task.job == tid && task.started_at >= job_begin)
            .map(|task| task.tid)
            .collect()
    }

    /// Returns the start time of the newest task with this tid. For a task that was restarted from
    /// a checkpoint, returns the time of its first start. `None` if the task is unknown.
    fn first_start_time(&self, tid: Tid) -> Option<Micros> {
        let mut starts = self
            .tasks
            .values()
            .rev()
            .filter(|task| task.tid == tid)
            .map(|task| task.started_at);
        let mut earliest_start = starts.next()?;
        let restart_times = |decision: &DecisionKind| matches!(decision, DecisionKind::Restarted { tasks, .. } if tasks.iter().any(|(t, _)| *t == tid));
        let restart_times: Vec<Micros> = self
            .decisions
            .values()
            .filter(|d| restart_times(&d.kind))
            .map(|d| d.at)
            .collect();
        let mut next_start = Micros(u64::MAX);
        for previous_start in starts {
            if !restart_times.iter().any(|restart_time| {
                *restart_time + CLOCK_TOLERANCE >= earliest_start && *restart_time < next_start
            }) {
                break;
            }
            (next_start, earliest_start) = (earliest_start, previous_start);
        }
        Some(earliest_start)
    }

    /// Returns the newest decisions for which `is_selected` is true, at most [`REPLY_ENTRIES_MAX`].
    /// `task_start`: start time of the task; older decisions concern an earlier task with the same
    /// tid and are omitted.
    fn newest_decisions(
        &self,
        is_selected: impl Fn(&DecisionKind) -> bool,
        task_start: Option<Micros>,
    ) -> Vec<Decision> {
        let is_recent = |d: &&Decision| {
            task_start.is_none_or(|task_start| d.at + CLOCK_TOLERANCE >= task_start)
        };
        take_newest(
            self.decisions
                .values()
                .filter(|d| is_selected(&d.kind))
                .filter(is_recent),
        )
    }
}

/// Returns the newest entries, at most [`REPLY_ENTRIES_MAX`], in ascending order of time. `entries`
/// must be in this order.
fn take_newest<'a, T: Clone + 'a>(entries: impl DoubleEndedIterator<Item = &'a T>) -> Vec<T> {
    let mut newest_entries: Vec<T> = entries.rev().take(REPLY_ENTRIES_MAX).cloned().collect();
    newest_entries.reverse();
    newest_entries
}
