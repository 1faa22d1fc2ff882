//! Tasks and jobs of the history: their starts, migrations and ends, and the totals that follow
//! from them.

use super::{History, Table, size_limits};
use sempa_proto::migration::Usage;
use sempa_proto::rm::{JobUsage, TaskOutcome, TaskUsage, UsageTotals};
use sempa_proto::table::TaskInfo;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeSet;

/// Maximum number of tasks that were started from a command line and have no children. Such a task
/// is not a job yet. When the maximum is exceeded, the oldest of these tasks is removed.
const CHILDLESS_TASKS_MAX: usize = 4_096;

impl History {
    /// Compares the history with a list of all tasks. Marks a task as lost if it runs according to
    /// the history but is not in the list. Corrects the hosts of the listed tasks.
    pub fn reconcile_tasks(&mut self, now: Micros, task_list: &[TaskInfo]) {
        let running_tids: BTreeSet<Tid> = task_list.iter().map(|info| info.tid).collect();
        let is_missing = |t: &TaskUsage| t.end.is_none() && !running_tids.contains(&t.tid);
        let missing_numbers: Vec<u64> = self
            .tasks
            .iter()
            .filter(|(_, t)| is_missing(t))
            .map(|(n, _)| *n)
            .collect();
        missing_numbers
            .into_iter()
            .for_each(|number| self.end_task(number, now, TaskOutcome::Lost, Usage::default()));
        for info in task_list {
            let host = self.host_name(info.host);
            if let Some(number) = self.task_numbers.get(&info.tid).copied() {
                let task = self.tasks.get_mut(&number).expect("numbered");
                if task.host != host {
                    task.host = host;
                    self.changed_keys.insert((Table::Tasks, number));
                }
            }
        }
    }

    pub(super) fn record_host_loss(&mut self, loss_time: Micros, name: &str) {
        let runs_there = |t: &TaskUsage| t.end.is_none() && t.host == name;
        let lost_numbers: Vec<u64> = self
            .tasks
            .iter()
            .filter(|(_, t)| runs_there(t))
            .map(|(n, _)| *n)
            .collect();
        lost_numbers.into_iter().for_each(|number| {
            self.end_task(number, loss_time, TaskOutcome::Lost, Usage::default())
        });
    }

    pub(super) fn record_task_start(
        &mut self,
        start_time: Micros,
        tid: Tid,
        (parent, user): (Tid, u32),
        name: &str,
        host: HostId,
    ) {
        let is_service = sempa_proto::load::is_load_watcher(name)
            || tid == self.rm_task
            || !tid.is_task()
            || tid == parent;
        if is_service {
            return;
        }
        if self.task(tid).is_some_and(|t| t.end.is_none()) {
            return self.set_program(tid, name, host);
        }
        if name.is_empty() && !parent.is_task() {
            self.add_childless_task(tid, start_time, user);
            if self.childless_tasks.len() > CHILDLESS_TASKS_MAX {
                let oldest_tid = self
                    .childless_tasks
                    .iter()
                    .min_by_key(|(_, (start_time, _))| *start_time)
                    .map(|(tid, _)| *tid);
                self.remove_childless_task(oldest_tid.expect("more than the limit"));
            }
            return;
        }
        if parent.is_task() && self.task(parent).is_none() {
            // If the start of the parent was not recorded, the start time of the child is used.
            let (parent_start, user) = self
                .remove_childless_task(parent)
                .unwrap_or((start_time, self.rm_user));
            let birth_host_name = parent
                .birth_host()
                .map(|birth_host_name| self.host_name(birth_host_name))
                .unwrap_or_default();
            self.insert_task(parent_start, parent, (parent, user), "", birth_host_name);
        }
        let job = self.task(parent).map_or(tid, |p| p.job);
        let host = self.host_name(host);
        self.insert_task(start_time, tid, (job, user), name, host);
    }

    /// Sets the program and the host of a task that was known only as a parent.
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
        self.changed_keys.insert((Table::Tasks, number));
        if let Some(number) = self.job_numbers.get(&tid).copied()
            && let Some(job) = self.jobs.get_mut(&number)
        {
            job.program = size_limits::limit_program_name(name);
            self.changed_keys.insert((Table::Jobs, number));
        }
    }

    /// Merges the tasks of a restarted job into one job. Each host reports its tasks separately,
    /// and some children before their parents. The history has therefore counted such tasks for an
    /// earlier run of the job, or as separate jobs.
    pub(super) fn merge_restarted(
        &mut self,
        restart_time: Micros,
        job: Tid,
        tasks: &[(Tid, HostId)],
    ) {
        let numbers: Vec<u64> = tasks
            .iter()
            .filter_map(|(tid, _)| self.task_numbers.get(tid).copied())
            .collect();
        let Some(earliest_start) = numbers
            .iter()
            .filter_map(|number| self.tasks.get(number))
            .map(|task| task.started_at)
            .min()
        else {
            return;
        };
        // A task outside the checkpoint may have spawned the first task of the checkpoint. In that
        // case the tasks belong to the job of that outer task.
        let job = self.task(job).map_or(job, |first_task| first_task.job);
        let Some(job_number) = self.job_numbers.get(&job).copied() else {
            return;
        };
        for number in numbers {
            let Some(previous_job_number) = self
                .job_number_of(number)
                .filter(|previous_job_number| *previous_job_number != job_number)
            else {
                continue;
            };
            let Some(mut task) = self.tasks.remove(&number) else {
                continue;
            };
            task.job = job;
            let (tid, running_count) = (task.tid, u64::from(task.end.is_none()));
            // The task gets a new number, because its number must be greater than the number of its
            // job.
            let new_number = self.next_number();
            self.tasks.insert(new_number, task);
            self.task_numbers.insert(tid, new_number);
            self.changed_keys
                .extend([(Table::Tasks, number), (Table::Tasks, new_number)]);
            self.change_job_totals(previous_job_number, restart_time, |changed_totals| {
                changed_totals.task_count = changed_totals.task_count.saturating_sub(1);
                changed_totals.running_tasks =
                    changed_totals.running_tasks.saturating_sub(running_count);
            });
            self.change_job_totals(job_number, restart_time, |changed_totals| {
                changed_totals.task_count += 1;
                changed_totals.running_tasks += running_count;
            });
        }
        if let Some(job) = self.jobs.get_mut(&job_number) {
            job.started_at = job.started_at.min(earliest_start);
        }
    }

    /// Changes the totals of a job by `change`, and updates the end time of the job. Removes the
    /// job if it has no tasks.
    fn change_job_totals(
        &mut self,
        number: u64,
        change_time: Micros,
        change: impl Fn(&mut UsageTotals),
    ) {
        let Some(job) = self.jobs.get_mut(&number) else {
            return;
        };
        change(&mut job.totals);
        job.ended_at =
            (job.totals.running_tasks == 0).then_some(job.ended_at.unwrap_or(change_time));
        if job.totals.task_count == 0 {
            let tid = job.job;
            self.jobs.remove(&number);
            if self.job_numbers.get(&tid) == Some(&number) {
                self.job_numbers.remove(&tid);
            }
        }
        self.changed_keys.insert((Table::Jobs, number));
    }

    /// Adds a task. Adds its job too if the job is new. Otherwise the user of the job is also the
    /// user of the task.
    fn insert_task(
        &mut self,
        start_time: Micros,
        tid: Tid,
        (job, user): (Tid, u32),
        program: &str,
        host: String,
    ) {
        let user = self.job(job).map_or(user, |j| j.user);
        if tid == job || self.job(job).is_none() {
            let number = self.next_number();
            let (usage_totals, program) = (
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
                    started_at: start_time,
                    ended_at: None,
                    totals: usage_totals,
                    suspension: None,
                },
            );
            self.job_numbers.insert(job, number);
        }
        let number = self.next_number();
        let (usage, program) = (Usage::default(), size_limits::limit_program_name(program));
        let task = TaskUsage {
            tid,
            job,
            user,
            program,
            host,
            started_at: start_time,
            end: None,
            usage,
            migrations: 0,
            evictions: 0,
            counts_toward_limits: false,
            suspension: None,
            suspended_time: Micros::default(),
        };
        self.tasks.insert(number, task);
        self.task_numbers.insert(tid, number);
        self.changed_keys.insert((Table::Tasks, number));
        self.change_totals(
            self.job_numbers.get(&job).copied(),
            user,
            start_time,
            |usage_totals| {
                usage_totals.task_count += 1;
                usage_totals.running_tasks += 1;
            },
        );
        self.remove_excess_entries();
    }

    /// Returns the number of the job in whose totals a task was counted. Among the jobs with the
    /// same tid, this is the last one with a smaller number than the task, because a restarted job
    /// gets a new number. `None` if the task or the job is unknown.
    fn job_number_of(&self, number: u64) -> Option<u64> {
        let job = self.tasks.get(&number)?.job;
        self.jobs
            .range(..number)
            .rev()
            .find(|(_, entry)| entry.job == job)
            .map(|(number, _)| *number)
    }

    /// Changes the totals of a user and of a job by `change`, and updates the end time of the job.
    fn change_totals(
        &mut self,
        job: Option<u64>,
        user: u32,
        change_time: Micros,
        change: impl Fn(&mut UsageTotals),
    ) {
        let entry = self.users.entry(user).or_default();
        entry.changed_at = entry.changed_at.max(change_time);
        change(&mut entry.totals);
        self.changed_keys.insert((Table::Users, u64::from(user)));
        if let Some(number) = job
            && let Some(job) = self.jobs.get_mut(&number)
        {
            change(&mut job.totals);
            job.ended_at = (job.totals.running_tasks == 0).then_some(change_time);
            self.changed_keys.insert((Table::Jobs, number));
        }
    }

    pub(super) fn end_task(
        &mut self,
        number: u64,
        end_time: Micros,
        outcome: TaskOutcome,
        usage: Usage,
    ) {
        if let Some(tid) = self
            .tasks
            .get(&number)
            .filter(|t| t.suspension.is_some())
            .map(|t| t.tid)
        {
            self.set_suspended(tid, end_time, None);
        }
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.end.is_none()) else {
            return;
        };
        (task.end, task.usage) = (Some((end_time, outcome)), usage);
        let run_time = Micros(
            end_time
                .since(task.started_at)
                .0
                .saturating_sub(task.suspended_time.0),
        );
        let user = task.user;
        self.changed_keys.insert((Table::Tasks, number));
        self.change_totals(self.job_number_of(number), user, end_time, |totals| {
            totals.running_tasks = totals.running_tasks.saturating_sub(1);
            totals.failed_tasks += u64::from(!outcome.is_success());
            totals.usage = totals.usage.merged_with(usage);
            totals.wall_time = totals.wall_time + run_time;
        });
    }

    pub(super) fn record_migration(&mut self, tid: Tid, target_host: String, is_eviction: bool) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.end.is_none()) else {
            return;
        };
        task.migrations += 1;
        task.evictions += u32::from(is_eviction);
        task.host = target_host;
        let (user, task_start) = (task.user, task.started_at);
        self.changed_keys.insert((Table::Tasks, number));
        self.change_totals(self.job_number_of(number), user, task_start, |totals| {
            totals.migrations += 1;
            totals.evictions += u64::from(is_eviction);
        });
    }

    /// Counts an eviction for a task that was ended instead of migrated.
    pub(super) fn record_eviction(&mut self, tid: Tid) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.end.is_none()) else {
            return;
        };
        task.evictions += 1;
        let (user, task_start) = (task.user, task.started_at);
        self.changed_keys.insert((Table::Tasks, number));
        self.change_totals(self.job_number_of(number), user, task_start, |totals| {
            totals.evictions += 1
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
            self.changed_keys.insert((Table::Tasks, number));
        }
    }
}
