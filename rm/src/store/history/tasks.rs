//! Tasks and jobs of the history: their starts, migrations and ends, and the totals that follow
//! from them.

use super::{History, Table, size_limits};
use sempa_proto::migration::Usage;
use sempa_proto::rm::{JobUsage, TaskOutcome, TaskUsage, UsageTotals};
use sempa_proto::table::TaskInfo;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeSet;

/// Maximum number of tasks that were started from a command line and have no children. Such a task
/// is not a job yet. Beyond it, the oldest is dropped.
const CHILDLESS_MAX: usize = 4_096;

impl History {
    /// Compares the history with a list of all tasks. Marks a task as lost if it runs according to
    /// the history but is not in the list. Corrects the hosts of the others.
    pub fn reconcile(&mut self, now: Micros, list: &[TaskInfo]) {
        let running_tids: BTreeSet<Tid> = list.iter().map(|info| info.tid).collect();
        let gone = |t: &TaskUsage| t.ended.is_none() && !running_tids.contains(&t.tid);
        let gone: Vec<u64> = self
            .tasks
            .iter()
            .filter(|(_, t)| gone(t))
            .map(|(n, _)| *n)
            .collect();
        gone.into_iter()
            .for_each(|number| self.end_task(number, now, TaskOutcome::Lost, Usage::default()));
        for info in list {
            let host = self.host_name(info.host);
            if let Some(number) = self.task_numbers.get(&info.tid).copied() {
                let task = self.tasks.get_mut(&number).expect("numbered");
                if task.host != host {
                    task.host = host;
                    self.dirty.insert((Table::Tasks, number));
                }
            }
        }
    }

    pub(super) fn host_gone(&mut self, at: Micros, name: &str) {
        let on = |t: &TaskUsage| t.ended.is_none() && t.host == name;
        let lost: Vec<u64> = self
            .tasks
            .iter()
            .filter(|(_, t)| on(t))
            .map(|(n, _)| *n)
            .collect();
        lost.into_iter()
            .for_each(|number| self.end_task(number, at, TaskOutcome::Lost, Usage::default()));
    }

    pub(super) fn task_started(
        &mut self,
        at: Micros,
        tid: Tid,
        (parent, user): (Tid, u32),
        name: &str,
        host: HostId,
    ) {
        let serves = sempa_proto::load::is_load_watcher(name)
            || tid == self.own_task
            || !tid.is_task()
            || tid == parent;
        if serves {
            return;
        }
        if self.task(tid).is_some_and(|t| t.ended.is_none()) {
            return self.set_program(tid, name, host);
        }
        if name.is_empty() && !parent.is_task() {
            self.add_childless(tid, at, user);
            if self.childless.len() > CHILDLESS_MAX {
                let oldest = self
                    .childless
                    .iter()
                    .min_by_key(|(_, (at, _))| *at)
                    .map(|(tid, _)| *tid);
                self.remove_childless(oldest.expect("more than the limit"));
            }
            return;
        }
        if parent.is_task() && self.task(parent).is_none() {
            // If the start of the parent was not recorded, the start of the child is used.
            let (began, user) = self.remove_childless(parent).unwrap_or((at, self.own_user));
            let home = parent
                .birth_host()
                .map(|home| self.host_name(home))
                .unwrap_or_default();
            self.insert_task(began, parent, (parent, user), "", home);
        }
        let job = self.task(parent).map_or(tid, |p| p.job);
        let host = self.host_name(host);
        self.insert_task(at, tid, (job, user), name, host);
    }

    /// Sets program and host of a task that was known only as a parent.
    fn set_program(&mut self, tid: Tid, name: &str, host: HostId) {
        let host = self.host_name(host);
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self
            .tasks
            .get_mut(&number)
            .filter(|t| t.program.is_empty() && !name.is_empty())
        else {
            return;
        };
        (task.program, task.host) = (size_limits::limit_program_name(name), host);
        self.dirty.insert((Table::Tasks, number));
        if let Some(number) = self.job_numbers.get(&tid).copied()
            && let Some(job) = self.jobs.get_mut(&number)
        {
            job.program = size_limits::limit_program_name(name);
            self.dirty.insert((Table::Jobs, number));
        }
    }

    /// Merges the tasks of a restarted job into one job. Each host has reported its tasks
    /// separately, and some children before their parents. Such tasks were counted for an earlier
    /// run of the job or as separate jobs.
    pub(super) fn merge_restarted(&mut self, at: Micros, job: Tid, tasks: &[(Tid, HostId)]) {
        let numbers: Vec<u64> = tasks
            .iter()
            .filter_map(|(tid, _)| self.task_numbers.get(tid).copied())
            .collect();
        let Some(began) = numbers
            .iter()
            .filter_map(|number| self.tasks.get(number))
            .map(|task| task.started)
            .min()
        else {
            return;
        };
        // A task outside the checkpoint may have spawned the first task. The job is then that
        // task's job.
        let job = self.task(job).map_or(job, |first| first.job);
        let Some(to) = self.job_numbers.get(&job).copied() else {
            return;
        };
        for number in numbers {
            let Some(from) = self.job_number_of(number).filter(|from| *from != to) else {
                continue;
            };
            let Some(mut task) = self.tasks.remove(&number) else {
                continue;
            };
            task.job = job;
            let (tid, running) = (task.tid, u64::from(task.ended.is_none()));
            // The task gets a new number, because it must be greater than the number of its job.
            let new_number = self.next_number();
            self.tasks.insert(new_number, task);
            self.task_numbers.insert(tid, new_number);
            self.dirty
                .extend([(Table::Tasks, number), (Table::Tasks, new_number)]);
            self.change_job_sums(from, at, |sums| {
                sums.tasks = sums.tasks.saturating_sub(1);
                sums.running = sums.running.saturating_sub(running);
            });
            self.change_job_sums(to, at, |sums| {
                sums.tasks += 1;
                sums.running += running;
            });
        }
        if let Some(job) = self.jobs.get_mut(&to) {
            job.started = job.started.min(began);
        }
    }

    /// Changes the totals of a job. Deletes the job if it has no tasks.
    fn change_job_sums(&mut self, number: u64, at: Micros, change: impl Fn(&mut UsageTotals)) {
        let Some(job) = self.jobs.get_mut(&number) else {
            return;
        };
        change(&mut job.totals);
        job.ended = (job.totals.running == 0).then_some(job.ended.unwrap_or(at));
        if job.totals.tasks == 0 {
            let tid = job.job;
            self.jobs.remove(&number);
            if self.job_numbers.get(&tid) == Some(&number) {
                self.job_numbers.remove(&tid);
            }
        }
        self.dirty.insert((Table::Jobs, number));
    }

    /// Adds a task, and its job if the job is new. If the job exists, its user is also the user of
    /// the task.
    fn insert_task(
        &mut self,
        began: Micros,
        tid: Tid,
        (job, user): (Tid, u32),
        program: &str,
        host: String,
    ) {
        let user = self.job(job).map_or(user, |j| j.user);
        if tid == job || self.job(job).is_none() {
            let number = self.next_number();
            let (sums, program) = (
                UsageTotals::default(),
                if tid == job {
                    size_limits::limit_program_name(program)
                } else {
                    String::new()
                },
            );
            self.jobs.insert(
                number,
                JobUsage {
                    job,
                    user,
                    program,
                    started: began,
                    ended: None,
                    totals: sums,
                    suspension: None,
                },
            );
            self.job_numbers.insert(job, number);
        }
        let number = self.next_number();
        let (used, program) = (Usage::default(), size_limits::limit_program_name(program));
        let task = TaskUsage {
            tid,
            job,
            user,
            program,
            host,
            started: began,
            ended: None,
            used,
            migrations: 0,
            evictions: 0,
            counts_toward_limits: false,
            suspension: None,
            suspended_total: Micros::default(),
        };
        self.tasks.insert(number, task);
        self.task_numbers.insert(tid, number);
        self.dirty.insert((Table::Tasks, number));
        self.change_sums(self.job_numbers.get(&job).copied(), user, began, |sums| {
            sums.tasks += 1;
            sums.running += 1;
        });
        self.enforce_limits();
    }

    /// Returns the number of the job in whose totals a task was counted. Of the jobs with the same
    /// tid this is the last one with a smaller number than the task, because a restarted job gets a
    /// new number.
    fn job_number_of(&self, number: u64) -> Option<u64> {
        let job = self.tasks.get(&number)?.job;
        self.jobs
            .range(..number)
            .rev()
            .find(|(_, entry)| entry.job == job)
            .map(|(number, _)| *number)
    }

    /// Changes the totals of a user and of a job.
    fn change_sums(
        &mut self,
        job: Option<u64>,
        user: u32,
        at: Micros,
        change: impl Fn(&mut UsageTotals),
    ) {
        let entry = self.users.entry(user).or_default();
        entry.changed_at = entry.changed_at.max(at);
        change(&mut entry.sums);
        self.dirty.insert((Table::Users, u64::from(user)));
        if let Some(number) = job
            && let Some(job) = self.jobs.get_mut(&number)
        {
            change(&mut job.totals);
            job.ended = (job.totals.running == 0).then_some(at);
            self.dirty.insert((Table::Jobs, number));
        }
    }

    pub(super) fn end_task(&mut self, number: u64, at: Micros, how: TaskOutcome, used: Usage) {
        if let Some(tid) = self
            .tasks
            .get(&number)
            .filter(|t| t.suspension.is_some())
            .map(|t| t.tid)
        {
            self.set_suspended(tid, at, None);
        }
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.ended.is_none()) else {
            return;
        };
        (task.ended, task.used) = (Some((at, how)), used);
        let wall = Micros(
            at.since(task.started)
                .0
                .saturating_sub(task.suspended_total.0),
        );
        let user = task.user;
        self.dirty.insert((Table::Tasks, number));
        self.change_sums(self.job_number_of(number), user, at, |sums| {
            sums.running = sums.running.saturating_sub(1);
            sums.failed += u64::from(!how.is_success());
            sums.used = sums.used.plus(used);
            sums.wall_time = sums.wall_time + wall;
        });
    }

    pub(super) fn record_migration(&mut self, tid: Tid, to: String, eviction: bool) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.ended.is_none()) else {
            return;
        };
        task.migrations += 1;
        task.evictions += u32::from(eviction);
        task.host = to;
        let (user, began) = (task.user, task.started);
        self.dirty.insert((Table::Tasks, number));
        self.change_sums(self.job_number_of(number), user, began, |sums| {
            sums.migrations += 1;
            sums.evictions += u64::from(eviction);
        });
    }

    /// Counts the eviction of a task that was ended instead of migrated.
    pub(super) fn record_eviction(&mut self, tid: Tid) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.ended.is_none()) else {
            return;
        };
        task.evictions += 1;
        let (user, began) = (task.user, task.started);
        self.dirty.insert((Table::Tasks, number));
        self.change_sums(self.job_number_of(number), user, began, |sums| {
            sums.evictions += 1
        });
    }

    /// Marks a task as counted against the limits of its user and job.
    pub fn mark_counted(&mut self, tid: Tid) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        if let Some(task) = self
            .tasks
            .get_mut(&number)
            .filter(|t| !t.counts_toward_limits)
        {
            task.counts_toward_limits = true;
            self.dirty.insert((Table::Tasks, number));
        }
    }
}
