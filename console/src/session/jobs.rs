//! Jobs: spawned tasks and their descendants whose output comes to the console.
//!
//! Daemons send messages about each task: that its spawn was requested, that it was created, pieces
//! of its output, and its end. A piece may end in the middle of a line; this module reassembles
//! lines.

use sempa_proto::Tid;
use sempa_proto::body::Unpacker;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Longest line in bytes. A longer one is broken.
pub(crate) const OUTPUT_LINE_BYTES_MAX: usize = 64 << 10;

/// Content of a message about a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TaskOutput {
    /// The spawn of the task was requested.
    Spawned,
    /// The task was created.
    Created,
    /// A piece of the task's output.
    Data(Vec<u8>),
    /// No more output follows.
    End,
}

/// Reads a message about a task's output. Returns `None` if it is malformed.
pub(crate) fn read_output(mut body: Unpacker) -> Option<(Tid, TaskOutput)> {
    let tid = Tid::from_raw(body.int().ok()?);
    let what = match body.int().ok()? {
        0 => TaskOutput::End,
        -1 => TaskOutput::Spawned,
        -2 => TaskOutput::Created,
        length => TaskOutput::Data(body.bytes(usize::try_from(length).ok()?).ok()?.to_vec()),
    };
    tid.is_task().then_some((tid, what))
}

#[derive(Debug, Default)]
struct JobTask {
    seen: bool,
    ended: bool,
    partial: Vec<u8>,
}

impl JobTask {
    /// Adds a piece of output. Lines that are complete or have reached the limit are appended to
    /// `out`.
    fn add_output(&mut self, bytes: &[u8], out: &mut Vec<TaskEvent>) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.partial.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.partial.len() >= OUTPUT_LINE_BYTES_MAX {
                let mut line = std::mem::take(&mut self.partial);
                if line.ends_with(b"\n") {
                    line.pop();
                }
                out.push(TaskEvent::Line(line));
            }
        }
    }
}

#[derive(Debug, Default)]
struct Job {
    /// True once the reply to the spawn is known and the job contains all tasks of the spawn.
    spawn_replied: bool,
    tasks: BTreeMap<Tid, JobTask>,
}

#[derive(Debug, Default)]
pub(crate) struct Jobs {
    newest_number: u32,
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
    /// The task writes no more output.
    Ended,
}

/// Change of a job that a message about one of its tasks has caused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct JobUpdate {
    /// Events in order of occurrence.
    pub(crate) events: Vec<TaskEvent>,
    /// True if the job is finished. It is removed then.
    pub(crate) finished: bool,
}

impl Jobs {
    /// Creates a job before its tasks are spawned. Returns its number; numbers start at 1.
    pub(crate) fn open(&mut self) -> u32 {
        self.newest_number += 1;
        self.jobs.insert(self.newest_number, Job::default());
        self.newest_number
    }

    /// Records the tasks of a job's spawn. A job without tasks is removed. Returns true if the job
    /// is finished already.
    pub(crate) fn record_spawn(&mut self, number: u32, tids: impl Iterator<Item = Tid>) -> bool {
        let Some(job) = self.jobs.get_mut(&number) else {
            return false;
        };
        job.spawn_replied = true;
        for tid in tids {
            job.tasks.entry(tid).or_default();
        }
        if job.tasks.is_empty() {
            self.jobs.remove(&number);
            return false;
        }
        self.remove_if_finished(number)
    }

    /// Handles a message about a task of a job.
    pub(crate) fn handle(&mut self, number: u32, tid: Tid, output: TaskOutput) -> JobUpdate {
        if number == 0 || number > self.newest_number {
            return JobUpdate::default();
        }
        let job = match self.jobs.entry(number) {
            Entry::Occupied(known) => known.into_mut(),
            // A grandchild may appear after all other tasks have ended.
            Entry::Vacant(_) if output == TaskOutput::End => return JobUpdate::default(),
            Entry::Vacant(new) => new.insert(Job {
                spawn_replied: true,
                tasks: BTreeMap::new(),
            }),
        };
        let task = job.tasks.entry(tid).or_default();
        let mut events = Vec::new();
        if !task.seen {
            task.seen = true;
            events.push(TaskEvent::FirstSeen);
        }
        match output {
            TaskOutput::Spawned => events.push(TaskEvent::Spawned),
            TaskOutput::Created => events.push(TaskEvent::Created),
            TaskOutput::Data(bytes) => task.add_output(&bytes, &mut events),
            TaskOutput::End if !task.ended => {
                if !task.partial.is_empty() {
                    events.push(TaskEvent::Line(std::mem::take(&mut task.partial)));
                }
                task.ended = true;
                events.push(TaskEvent::Ended);
            }
            TaskOutput::End => {}
        }
        JobUpdate {
            events,
            finished: self.remove_if_finished(number),
        }
    }

    /// Removes the job if all its tasks have ended, and returns true then.
    fn remove_if_finished(&mut self, number: u32) -> bool {
        let done = |job: &Job| job.spawn_replied && job.tasks.values().all(|task| task.ended);
        let finished = self.jobs.get(&number).is_some_and(done);
        if finished {
            self.jobs.remove(&number);
        }
        finished
    }

    /// True while the job is running.
    pub(crate) fn contains(&self, number: u32) -> bool {
        self.jobs.contains_key(&number)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns the jobs, each with those of its tasks that have not ended.
    pub(crate) fn running(&self) -> impl Iterator<Item = (u32, Vec<Tid>)> {
        self.jobs.iter().map(|(number, job)| {
            (
                *number,
                job.tasks
                    .iter()
                    .filter(|(_, task)| !task.ended)
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

    const A: Tid = Tid::from_raw(0x40002);
    const B: Tid = Tid::from_raw(0x80001);

    fn line(text: &str) -> TaskEvent {
        TaskEvent::Line(text.into())
    }

    fn data(text: &str) -> TaskOutput {
        TaskOutput::Data(text.into())
    }

    /// Lines are reassembled from pieces.
    #[test]
    fn lines_are_reassembled() {
        let mut jobs = Jobs::default();
        let job = jobs.open();
        jobs.record_spawn(job, [A].into_iter());
        assert_eq!(
            jobs.handle(job, A, data("i'm t")).events,
            [TaskEvent::FirstSeen]
        );
        let lines = [line("i'm t40002"), line(""), line("second")];
        assert_eq!(
            jobs.handle(job, A, data("40002\n\nsecond\nthi")).events,
            lines
        );
        let end = jobs.handle(job, A, TaskOutput::End);
        assert_eq!(end.events, [line("thi"), TaskEvent::Ended]);
        assert!(end.finished && jobs.is_empty());
    }

    /// A job ends with the last of its tasks and their children.
    #[test]
    fn job_ends_with_last_task() {
        let mut jobs = Jobs::default();
        let job = jobs.open();
        assert_eq!(
            jobs.handle(job, A, TaskOutput::Spawned).events,
            [TaskEvent::FirstSeen, TaskEvent::Spawned]
        );
        assert!(
            !jobs.handle(job, A, TaskOutput::End).finished,
            "the answer to the spawn may name more tasks"
        );
        let child = jobs.handle(job, B, TaskOutput::Created);
        assert_eq!(
            child,
            JobUpdate {
                events: vec![TaskEvent::FirstSeen, TaskEvent::Created],
                finished: false
            }
        );
        assert!(!jobs.record_spawn(job, [A].into_iter()));
        assert_eq!(jobs.running().collect::<Vec<_>>(), [(1, vec![B])]);
        assert!(jobs.handle(job, B, TaskOutput::End).finished);
        assert_eq!(
            jobs.handle(job, B, data("late\n")).events,
            [TaskEvent::FirstSeen, line("late")]
        );
    }

    /// A job whose tasks end before the reply to the spawn finishes with the reply.
    #[test]
    fn job_may_end_with_spawn_reply() {
        let mut jobs = Jobs::default();
        let job = jobs.open();
        jobs.handle(job, A, TaskOutput::End);
        assert!(jobs.record_spawn(job, [A].into_iter()));
    }

    /// A job without tasks is removed, and unknown numbers are ignored.
    #[test]
    fn empty_job_is_removed() {
        let mut jobs = Jobs::default();
        let job = jobs.open();
        assert!(!jobs.record_spawn(job, [].into_iter()));
        assert!(jobs.is_empty());
        assert_eq!(jobs.handle(7, A, TaskOutput::Spawned), JobUpdate::default());
        assert!(jobs.is_empty());
    }

    /// A line that reaches the limit is broken.
    #[test]
    fn overlong_lines_are_broken() {
        let mut jobs = Jobs::default();
        let job = jobs.open();
        let news = jobs.handle(job, A, TaskOutput::Data(vec![b'x'; OUTPUT_LINE_BYTES_MAX]));
        assert_eq!(
            news.events[1],
            TaskEvent::Line(vec![b'x'; OUTPUT_LINE_BYTES_MAX])
        );
    }

    /// Output messages are read, malformed ones are not.
    #[test]
    fn malformed_output_message_is_refused() {
        let read = |words: &[i32], bytes: &[u8]| {
            let mut body = Packer::new(Encoding::Xdr);
            body.items(words.iter().copied()).bytes(bytes);
            read_output(Unpacker::xdr(body.finish()))
        };
        assert_eq!(read(&[0x40002, 0], b""), Some((A, TaskOutput::End)));
        assert_eq!(read(&[0x40002, -1, 0], b""), Some((A, TaskOutput::Spawned)));
        assert_eq!(read(&[0x40002, -2, 0], b""), Some((A, TaskOutput::Created)));
        assert_eq!(
            read(&[0x40002, 3], b"abc"),
            Some((A, TaskOutput::Data(b"abc".to_vec())))
        );
        assert_eq!(read(&[0x40002, 3000], b"abc"), None);
        assert_eq!(read(&[0x40002, -7], b""), None);
        assert_eq!(read(&[0, 0], b""), None);
        assert_eq!(read(&[], b""), None);
    }
}
