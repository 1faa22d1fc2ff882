//! Jobs: spawned tasks and their descendants whose output comes to the console.
//!
//! Daemons send messages about each task: that its spawn was requested, that it was created,
//! pieces of its output, and its end. A piece may end in the middle of a line; this module
//! reassembles lines.

use sempa_proto::Tid;
use sempa_proto::body::Unpacker;
use sempa_proto::output::{OUTPUT_EOF, OUTPUT_REQUESTED, OUTPUT_STARTED};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Maximum length of a line in bytes. A longer line is broken into several.
pub(crate) const OUTPUT_LINE_BYTES_MAX: usize = 64 << 10;

/// Exit code that a shell gives to a command which signal 0 would have ended; signal n has this
/// code plus n.
const SIGNAL_EXIT_BASE: i32 = 128;

/// Exit code of a job whose output was lost with a task's host, so that the task's status is
/// unknown.
const LOST_TASK_EXIT_CODE: u8 = 1;

/// Content of a message about a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TaskOutput {
    /// The spawn of the task was requested.
    Spawned,
    /// The task was created.
    Created,
    /// A piece of the task's output.
    Data(Vec<u8>),
    /// No more output follows. Contains the wait status of the task's process; `None` if the task
    /// sends its output elsewhere from now on.
    End(Option<i32>),
}

/// Reads a message about a task's output. Returns `None` if the message is malformed or if its tid
/// is not the tid of a task.
pub(crate) fn read_output_message(mut body: Unpacker) -> Option<(Tid, TaskOutput)> {
    let tid = Tid::from_raw(body.read_int().ok()?);
    let output = match body.read_int().ok()? {
        OUTPUT_EOF => TaskOutput::End(body.read_int().ok()),
        OUTPUT_REQUESTED => TaskOutput::Spawned,
        OUTPUT_STARTED => TaskOutput::Created,
        length => TaskOutput::Data(
            body.read_bytes(usize::try_from(length).ok()?)
                .ok()?
                .to_vec(),
        ),
    };
    tid.is_task().then_some((tid, output))
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum TaskState {
    /// More output may follow.
    #[default]
    Running,
    /// The task's job rolls back. The task ends only if it is not restarted.
    AwaitingRestart,
    Ended,
}

#[derive(Debug, Default)]
struct JobTask {
    was_seen: bool,
    state: TaskState,
    /// Set by the end of a process that was killed for the rollback, or of a restarted process if
    /// the console has not yet received the event of the restart. Cleared by later output.
    has_ended_early: bool,
    partial_line: Vec<u8>,
    /// Exit code of the task's process as a shell reports it; 0 while the task runs.
    exit_code: u8,
}

impl JobTask {
    /// Adds a piece of output. Appends the lines that are complete or have reached
    /// [`OUTPUT_LINE_BYTES_MAX`] to `out`.
    fn add_output(&mut self, bytes: &[u8], out: &mut Vec<TaskEvent>) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.partial_line.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.partial_line.len() >= OUTPUT_LINE_BYTES_MAX {
                let mut line = std::mem::take(&mut self.partial_line);
                if line.ends_with(b"\n") {
                    line.pop();
                }
                out.push(TaskEvent::Line(line));
            }
        }
    }

    /// Appends the last line to `out` if it is unfinished.
    fn end_line(&mut self, out: &mut Vec<TaskEvent>) {
        if !self.partial_line.is_empty() {
            out.push(TaskEvent::Line(std::mem::take(&mut self.partial_line)));
        }
    }
}

#[derive(Debug, Default)]
struct Job {
    /// True after the reply to the spawn has been recorded. The job then contains all tasks of the
    /// spawn.
    spawn_replied: bool,
    /// Tasks of the spawn in the order of its reply. The other tasks of the job descend from them.
    spawned_tids: Vec<Tid>,
    tasks: BTreeMap<Tid, JobTask>,
    /// Number of tasks that have not ended.
    unended_count: usize,
    /// Running tasks for whose exit no notification was requested.
    unwatched: BTreeSet<Tid>,
}

impl Job {
    /// Returns a task of the job, and adds the task if it is new.
    fn task(&mut self, tid: Tid) -> &mut JobTask {
        self.tasks.entry(tid).or_insert_with(|| {
            self.unended_count += 1;
            self.unwatched.insert(tid);
            JobTask::default()
        })
    }

    /// Records that the output of a task that has not ended ends.
    fn end_task(&mut self, tid: Tid) {
        self.task(tid).state = TaskState::Ended;
        self.unended_count -= 1;
        self.unwatched.remove(&tid);
    }

    /// Returns the exit code of the first spawned task, in the order of the spawn's reply, whose
    /// exit code is not 0. Returns 0 if there is no such task.
    fn exit_code(&self) -> u8 {
        let tasks = self
            .spawned_tids
            .iter()
            .filter_map(|tid| self.tasks.get(tid));
        let mut exit_codes = tasks.map(|task| task.exit_code);
        exit_codes.find(|code| *code != 0).unwrap_or(0)
    }

    /// Records that a task runs, as far as is known. The notification of its exit is requested
    /// again.
    fn continue_task(&mut self, tid: Tid) {
        let task = self.task(tid);
        if std::mem::take(&mut task.state) == TaskState::Ended {
            self.unended_count += 1;
        }
        self.unwatched.insert(tid);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Jobs {
    last_job_number: u32,
    jobs: BTreeMap<u32, Job>,
}

/// An event of a task of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TaskEvent {
    /// The first message about the task arrived.
    FirstSeen,
    /// The spawn of the task was requested ([`TaskOutput::Spawned`]).
    Spawned,
    /// The task was created ([`TaskOutput::Created`]).
    Created,
    /// A line of output, without its newline.
    Line(Vec<u8>),
    /// The task's job rolls back to a checkpoint.
    RolledBack,
    /// The task has exited without the end of its output.
    Lost,
    /// The task writes no more output.
    Ended,
}

/// Effect of a message about a task on its job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct JobUpdate {
    /// Events in order of occurrence.
    pub(crate) events: Vec<TaskEvent>,
    /// Exit code of the job if the message has finished the job. The job has then been removed.
    pub(crate) finished_with: Option<u8>,
}

impl JobUpdate {
    pub(crate) fn is_finished(&self) -> bool {
        self.finished_with.is_some()
    }
}

/// Returns the exit code that a shell reports for a wait status.
fn shell_exit_code(wait_status: i32) -> u8 {
    let status = ExitStatus::from_raw(wait_status);
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| SIGNAL_EXIT_BASE + signal));
    code.and_then(|code| u8::try_from(code).ok())
        .unwrap_or(LOST_TASK_EXIT_CODE)
}

impl Jobs {
    /// Creates a job before its tasks are spawned. Returns its number; numbers start at 1.
    pub(crate) fn create_job(&mut self) -> u32 {
        self.last_job_number += 1;
        self.jobs.insert(self.last_job_number, Job::default());
        self.last_job_number
    }

    /// Records the tasks of a job's spawn. Returns true if all tasks of the job have already
    /// ended. A job that has ended or has no tasks is removed.
    pub(crate) fn record_spawn(
        &mut self,
        job_number: u32,
        tids: impl Iterator<Item = Tid>,
    ) -> bool {
        let Some(job) = self.jobs.get_mut(&job_number) else {
            return false;
        };
        job.spawn_replied = true;
        for tid in tids {
            job.task(tid);
            job.spawned_tids.push(tid);
        }
        if job.tasks.is_empty() {
            self.jobs.remove(&job_number);
            return false;
        }
        self.remove_if_finished(job_number).is_some()
    }

    /// Handles a message about a task of a job. A message about a task of a removed job, other
    /// than its end, adds the job again. A message with an unknown job number is ignored.
    pub(crate) fn handle_output(
        &mut self,
        job_number: u32,
        tid: Tid,
        output: TaskOutput,
    ) -> JobUpdate {
        if job_number == 0 || job_number > self.last_job_number {
            return JobUpdate::default();
        }
        let job = match self.jobs.entry(job_number) {
            Entry::Occupied(occupied_entry) => occupied_entry.into_mut(),
            // The job was removed when all known tasks had ended. A grandchild may appear later.
            Entry::Vacant(_) if matches!(output, TaskOutput::End(_)) => {
                return JobUpdate::default();
            }
            Entry::Vacant(vacant_entry) => vacant_entry.insert(Job {
                spawn_replied: true,
                ..Job::default()
            }),
        };
        let task = job.task(tid);
        let mut events = Vec::new();
        if !task.was_seen {
            task.was_seen = true;
            events.push(TaskEvent::FirstSeen);
        }
        match output {
            TaskOutput::Spawned => events.push(TaskEvent::Spawned),
            TaskOutput::Created => events.push(TaskEvent::Created),
            TaskOutput::Data(bytes) => {
                task.has_ended_early = false;
                task.add_output(&bytes, &mut events);
            }
            TaskOutput::End(status) if task.state == TaskState::Running => {
                task.end_line(&mut events);
                task.exit_code = status.map_or(0, shell_exit_code);
                events.push(TaskEvent::Ended);
                job.end_task(tid);
            }
            TaskOutput::End(_) => task.has_ended_early = task.state == TaskState::AwaitingRestart,
        }
        JobUpdate {
            events,
            finished_with: self.remove_if_finished(job_number),
        }
    }

    /// True if the task belongs to the job and runs, as far as is known.
    pub(crate) fn is_running(&self, job_number: u32, tid: Tid) -> bool {
        let job = self.jobs.get(&job_number);
        job.and_then(|job| job.tasks.get(&tid))
            .is_some_and(|task| task.state == TaskState::Running)
    }

    /// Returns the running tasks of a job.
    pub(crate) fn running_tasks(&self, job_number: u32) -> Vec<Tid> {
        let tasks = self.jobs.get(&job_number).map(|job| &job.tasks);
        let running_tasks = { tasks }
            .into_iter()
            .flatten()
            .filter(|(_, task)| task.state == TaskState::Running);
        running_tasks.map(|(tid, _)| *tid).collect()
    }

    /// Ends the output of a running task of a job that has exited. Without the end of its output
    /// it was lost with its host. Does nothing if the task does not run.
    pub(crate) fn handle_exit(&mut self, job_number: u32, tid: Tid) -> JobUpdate {
        let mut events = Vec::new();
        let Some(job) = self.jobs.get_mut(&job_number) else {
            return JobUpdate::default();
        };
        let Some(task) = job
            .tasks
            .get_mut(&tid)
            .filter(|task| task.state == TaskState::Running)
        else {
            return JobUpdate::default();
        };
        task.end_line(&mut events);
        if !task.has_ended_early {
            events.push(TaskEvent::Lost);
            task.exit_code = LOST_TASK_EXIT_CODE;
        }
        events.push(TaskEvent::Ended);
        job.end_task(tid);
        JobUpdate {
            events,
            finished_with: self.remove_if_finished(job_number),
        }
    }

    /// Handles the rollback of a running task of a job: the task waits for its restart.
    pub(crate) fn handle_rollback(&mut self, job_number: u32, tid: Tid) -> JobUpdate {
        let mut events = Vec::new();
        if let Some(job) = self.jobs.get_mut(&job_number)
            && let Some(task) = job.tasks.get_mut(&tid)
        {
            task.end_line(&mut events);
            task.state = TaskState::AwaitingRestart;
            job.unwatched.remove(&tid);
            events.push(TaskEvent::RolledBack);
        }
        JobUpdate {
            events,
            finished_with: None,
        }
    }

    /// Handles the exit of an earlier process of a running task: the task was restarted before
    /// this console handled the exit.
    pub(crate) fn handle_late_exit(&mut self, job_number: u32, tid: Tid) -> JobUpdate {
        let mut events = Vec::new();
        if let Some(job) = self.jobs.get_mut(&job_number)
            && let Some(task) = job.tasks.get_mut(&tid)
        {
            task.end_line(&mut events);
            job.continue_task(tid);
        }
        JobUpdate {
            events,
            finished_with: None,
        }
    }

    /// Returns the tasks that wait for a restart, each with its job.
    pub(crate) fn tasks_awaiting_restart(&self) -> Vec<(u32, Tid)> {
        let tasks = self.jobs.iter().flat_map(|(job_number, job)| {
            job.tasks
                .iter()
                .map(|(tid, task)| (*job_number, *tid, task.state))
        });
        tasks
            .filter(|(_, _, state)| *state == TaskState::AwaitingRestart)
            .map(|(job_number, tid, _)| (job_number, tid))
            .collect()
    }

    /// Ends the wait of a task for a restart. The notification of its exit, which is requested
    /// again, arrives at once if the task was not restarted.
    pub(crate) fn stop_awaiting_restart(&mut self, job_number: u32, tid: Tid) {
        if let Some(job) = self.jobs.get_mut(&job_number) {
            job.continue_task(tid);
        }
    }

    /// Handles the restart of a task, which may have ended since the checkpoint. Returns its jobs.
    pub(crate) fn handle_restart(&mut self, tid: Tid) -> Vec<u32> {
        let jobs = self
            .jobs
            .iter_mut()
            .filter(|(_, job)| job.tasks.contains_key(&tid));
        jobs.map(|(job_number, job)| {
            job.continue_task(tid);
            *job_number
        })
        .collect()
    }

    /// Returns the running tasks of a job for whose exit a notification must be requested. Each
    /// task is returned once.
    pub(crate) fn take_unwatched(&mut self, job_number: u32) -> Vec<Tid> {
        let unwatched = self.jobs.get_mut(&job_number).map(|job| &mut job.unwatched);
        let unwatched = unwatched.map(std::mem::take).unwrap_or_default();
        unwatched.into_iter().collect()
    }

    /// If all tasks of the job have ended, removes the job and returns its exit code.
    fn remove_if_finished(&mut self, job_number: u32) -> Option<u8> {
        let has_ended = |job: &Job| job.spawn_replied && job.unended_count == 0;
        if !self.jobs.get(&job_number).is_some_and(has_ended) {
            return None;
        }
        self.jobs.remove(&job_number).map(|job| job.exit_code())
    }

    /// True while the job is running.
    pub(crate) fn contains(&self, job_number: u32) -> bool {
        self.jobs.contains_key(&job_number)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns the jobs, each with the tasks that have not ended.
    pub(crate) fn running_jobs(&self) -> impl Iterator<Item = (u32, Vec<Tid>)> {
        self.jobs.iter().map(|(job_number, job)| {
            (
                *job_number,
                job.tasks
                    .iter()
                    .filter(|(_, task)| task.state != TaskState::Ended)
                    .map(|(tid, _)| *tid)
                    .collect(),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::body::{Encoding, Packer};

    const TASK_A: Tid = Tid::from_raw(0x40002);
    const TASK_B: Tid = Tid::from_raw(0x80001);

    fn line(text: &str) -> TaskEvent {
        TaskEvent::Line(text.into())
    }

    fn data(text: &str) -> TaskOutput {
        TaskOutput::Data(text.into())
    }

    #[test]
    fn lines_are_reassembled() {
        let mut jobs = Jobs::default();
        let job = jobs.create_job();
        jobs.record_spawn(job, [TASK_A].into_iter());
        assert_eq!(
            jobs.handle_output(job, TASK_A, data("i'm t")).events,
            [TaskEvent::FirstSeen]
        );
        let lines = [line("i'm t40002"), line(""), line("second")];
        assert_eq!(
            jobs.handle_output(job, TASK_A, data("40002\n\nsecond\nthi"))
                .events,
            lines
        );
        let end_update = jobs.handle_output(job, TASK_A, TaskOutput::End(Some(0)));
        assert_eq!(end_update.events, [line("thi"), TaskEvent::Ended]);
        assert!(end_update.is_finished() && jobs.is_empty());
    }

    /// A job has the exit code of the first spawned task that failed, in the order of the spawn's
    /// reply. Children of these tasks do not count.
    #[test]
    fn job_has_exit_code_of_first_failed_task() {
        const CHILD: Tid = Tid::from_raw(0x40009);
        let exit_code = |status_a: i32, status_b: i32| {
            let mut jobs = Jobs::default();
            let job = jobs.create_job();
            jobs.record_spawn(job, [TASK_A, TASK_B].into_iter());
            jobs.handle_output(job, CHILD, TaskOutput::Created);
            jobs.handle_output(job, CHILD, TaskOutput::End(Some(9 << 8)));
            jobs.handle_output(job, TASK_B, TaskOutput::End(Some(status_b)));
            let end = jobs.handle_output(job, TASK_A, TaskOutput::End(Some(status_a)));
            end.finished_with
        };
        assert_eq!(exit_code(0, 0), Some(0));
        assert_eq!(exit_code(3 << 8, 4 << 8), Some(3));
        assert_eq!(exit_code(0, 4 << 8), Some(4));
        assert_eq!(exit_code(9, 0), Some(128 + 9), "killed by a signal");
        assert_eq!(exit_code(0x80 | 11, 0), Some(128 + 11), "with a core file");
    }

    #[test]
    fn lost_task_fails_its_job() {
        let mut jobs = Jobs::default();
        let job = jobs.create_job();
        jobs.record_spawn(job, [TASK_A].into_iter());
        assert_eq!(
            jobs.handle_exit(job, TASK_A).finished_with,
            Some(LOST_TASK_EXIT_CODE)
        );
    }

    /// A job ends with the last of its tasks and their children.
    #[test]
    fn job_ends_with_last_task() {
        let mut jobs = Jobs::default();
        let job = jobs.create_job();
        assert_eq!(
            jobs.handle_output(job, TASK_A, TaskOutput::Spawned).events,
            [TaskEvent::FirstSeen, TaskEvent::Spawned]
        );
        assert!(
            !jobs
                .handle_output(job, TASK_A, TaskOutput::End(Some(0)))
                .is_finished(),
            "the answer to the spawn may name more tasks"
        );
        let child_update = jobs.handle_output(job, TASK_B, TaskOutput::Created);
        assert_eq!(
            child_update,
            JobUpdate {
                events: vec![TaskEvent::FirstSeen, TaskEvent::Created],
                finished_with: None
            }
        );
        assert!(!jobs.record_spawn(job, [TASK_A].into_iter()));
        assert_eq!(jobs.running_jobs().collect::<Vec<_>>(), [(1, vec![TASK_B])]);
        assert!(
            jobs.handle_output(job, TASK_B, TaskOutput::End(Some(0)))
                .is_finished()
        );
        assert_eq!(
            jobs.handle_output(job, TASK_B, data("late\n")).events,
            [TaskEvent::FirstSeen, line("late")]
        );
    }

    /// A task that exits without the end of its output ends as lost, and so does its job. A later
    /// end, or an exit after the end, changes nothing.
    #[test]
    fn exit_without_end_of_output_ends_the_job() {
        let mut jobs = Jobs::default();
        let job = jobs.create_job();
        jobs.record_spawn(job, [TASK_A, TASK_B].into_iter());
        assert_eq!(jobs.take_unwatched(job), [TASK_A, TASK_B]);
        assert!(jobs.take_unwatched(job).is_empty());
        jobs.handle_output(job, TASK_B, TaskOutput::End(Some(0)));
        assert_eq!(jobs.handle_exit(job, TASK_B), JobUpdate::default());
        jobs.handle_output(job, TASK_A, data("half"));
        assert_eq!(
            jobs.handle_exit(job, TASK_A),
            JobUpdate {
                events: vec![line("half"), TaskEvent::Lost, TaskEvent::Ended],
                finished_with: Some(LOST_TASK_EXIT_CODE)
            }
        );
        assert_eq!(jobs.handle_exit(job, TASK_A), JobUpdate::default());
        assert!(jobs.is_empty());
    }

    /// A job that rolls back runs until the restarted tasks end. The end of a killed task is no
    /// end of the job, but if the task is not restarted, it is not lost.
    #[test]
    fn job_that_rolls_back_continues() {
        let mut jobs = Jobs::default();
        let job = jobs.create_job();
        jobs.record_spawn(job, [TASK_A, TASK_B].into_iter());
        jobs.take_unwatched(job);
        jobs.handle_output(job, TASK_A, data("half"));
        assert_eq!(jobs.running_tasks(job), [TASK_A, TASK_B]);
        assert_eq!(
            jobs.handle_rollback(job, TASK_A).events,
            [line("half"), TaskEvent::RolledBack]
        );
        jobs.handle_rollback(job, TASK_B);
        assert_eq!(
            jobs.tasks_awaiting_restart(),
            [(job, TASK_A), (job, TASK_B)]
        );
        assert_eq!(jobs.handle_exit(job, TASK_A), JobUpdate::default());
        let end_update = jobs.handle_output(job, TASK_B, TaskOutput::End(Some(0)));
        assert_eq!(end_update.events, [TaskEvent::FirstSeen]);
        assert!(!end_update.is_finished() && jobs.take_unwatched(job).is_empty());
        assert_eq!(jobs.handle_restart(TASK_A), [job]);
        jobs.stop_awaiting_restart(job, TASK_B);
        assert!(jobs.tasks_awaiting_restart().is_empty());
        assert_eq!(jobs.take_unwatched(job), [TASK_A, TASK_B]);
        jobs.handle_output(job, TASK_A, TaskOutput::End(Some(0)));
        let exit_update = jobs.handle_exit(job, TASK_B);
        assert_eq!(exit_update.events, [TaskEvent::Ended]);
        assert!(exit_update.is_finished());
    }

    /// A task that was lost with its host and is not restarted ends as lost, also if it was
    /// restarted before and has written since.
    #[test]
    fn task_that_is_not_restarted_is_lost() {
        let mut jobs = Jobs::default();
        let job = jobs.create_job();
        jobs.record_spawn(job, [TASK_A].into_iter());
        jobs.handle_rollback(job, TASK_A);
        jobs.handle_output(job, TASK_A, TaskOutput::End(Some(0)));
        jobs.handle_restart(TASK_A);
        jobs.handle_output(job, TASK_A, data("x\n"));
        assert_eq!(
            jobs.handle_exit(job, TASK_A).events,
            [TaskEvent::Lost, TaskEvent::Ended]
        );
    }

    /// A task that had ended before its job rolled back runs again after the restart.
    #[test]
    fn ended_task_runs_again_after_restart() {
        let mut jobs = Jobs::default();
        let job = jobs.create_job();
        jobs.record_spawn(job, [TASK_A, TASK_B].into_iter());
        jobs.handle_output(job, TASK_A, TaskOutput::End(Some(0)));
        jobs.handle_rollback(job, TASK_B);
        assert_eq!(jobs.handle_restart(TASK_A), [job]);
        assert_eq!(jobs.handle_restart(TASK_B), [job]);
        assert!(
            !jobs
                .handle_output(job, TASK_B, TaskOutput::End(Some(0)))
                .is_finished()
        );
        assert!(
            jobs.handle_output(job, TASK_A, TaskOutput::End(Some(0)))
                .is_finished()
        );
    }

    /// A job whose tasks end before the reply to the spawn finishes with the reply.
    #[test]
    fn job_may_end_with_spawn_reply() {
        let mut jobs = Jobs::default();
        let job = jobs.create_job();
        jobs.handle_output(job, TASK_A, TaskOutput::End(Some(0)));
        assert!(jobs.record_spawn(job, [TASK_A].into_iter()));
    }

    /// A job without tasks is removed, and unknown numbers are ignored.
    #[test]
    fn empty_job_is_removed() {
        let mut jobs = Jobs::default();
        let job = jobs.create_job();
        assert!(!jobs.record_spawn(job, [].into_iter()));
        assert!(jobs.is_empty());
        assert_eq!(
            jobs.handle_output(7, TASK_A, TaskOutput::Spawned),
            JobUpdate::default()
        );
        assert!(jobs.is_empty());
    }

    #[test]
    fn overlong_lines_are_broken() {
        let mut jobs = Jobs::default();
        let job = jobs.create_job();
        let update = jobs.handle_output(
            job,
            TASK_A,
            TaskOutput::Data(vec![b'x'; OUTPUT_LINE_BYTES_MAX]),
        );
        assert_eq!(
            update.events[1],
            TaskEvent::Line(vec![b'x'; OUTPUT_LINE_BYTES_MAX])
        );
    }

    #[test]
    fn malformed_output_message_is_refused() {
        let read_message = |numbers: &[i32], bytes: &[u8]| {
            let mut body = Packer::new(Encoding::Xdr);
            body.pack_items(numbers.iter().copied()).pack_bytes(bytes);
            read_output_message(Unpacker::new_xdr(body.finish()))
        };
        assert_eq!(
            read_message(&[0x40002, 0], b""),
            Some((TASK_A, TaskOutput::End(None)))
        );
        assert_eq!(
            read_message(&[0x40002, 0, 3 << 8], b""),
            Some((TASK_A, TaskOutput::End(Some(3 << 8))))
        );
        assert_eq!(
            read_message(&[0x40002, -1, 0], b""),
            Some((TASK_A, TaskOutput::Spawned))
        );
        assert_eq!(
            read_message(&[0x40002, -2, 0], b""),
            Some((TASK_A, TaskOutput::Created))
        );
        assert_eq!(
            read_message(&[0x40002, 3], b"abc"),
            Some((TASK_A, TaskOutput::Data(b"abc".to_vec())))
        );
        assert_eq!(read_message(&[0x40002, 3000], b"abc"), None);
        assert_eq!(read_message(&[0x40002, -7], b""), None);
        assert_eq!(read_message(&[0, 0], b""), None);
        assert_eq!(read_message(&[], b""), None);
    }
}
