//! Jobs: spawned tasks, and all that they spawn, whose output comes to the console.
//!
//! The daemons send messages about each task: that it was asked for, that it was created, pieces of its output, and its
//! end. Pieces are cut anywhere; this puts lines together again.

use sempa_proto::Tid;
use sempa_proto::body::Unpacker;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Longest line that is put together, in bytes; a longer one is broken.
pub(crate) const OUTPUT_LINE_BYTES_MAX: usize = 64 << 10;

/// What a message about a task says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TaskOutput {
    /// Somebody has asked for it.
    Spawned,
    /// It was created.
    Created,
    /// Some of its output.
    Data(Vec<u8>),
    /// Nothing more comes.
    End,
}

/// Reads a message about a task's output; `None` when it is not one.
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

/// A task of a job.
#[derive(Debug, Default)]
struct Member {
    met: bool,
    ended: bool,
    partial: Vec<u8>,
}

impl Member {
    /// Adds output; lines that are complete now, or too long to wait, come out.
    fn lines(&mut self, bytes: &[u8], out: &mut Vec<Happened>) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.partial.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.partial.len() >= OUTPUT_LINE_BYTES_MAX {
                let mut line = std::mem::take(&mut self.partial);
                if line.ends_with(b"\n") {
                    line.pop();
                }
                out.push(Happened::Line(line));
            }
        }
    }
}

/// A job.
#[derive(Debug, Default)]
struct Job {
    /// True when the answer to the spawn is known, so that no member is missing.
    started: bool,
    members: BTreeMap<Tid, Member>,
}

/// All jobs of this console.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    newest: u32,
    jobs: BTreeMap<u32, Job>,
}

/// What a message says about a task of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Happened {
    /// It was not known before.
    Met,
    /// As [`TaskOutput::Spawned`].
    Spawned,
    /// As [`TaskOutput::Created`].
    Created,
    /// It wrote a line; without its newline.
    Line(Vec<u8>),
    /// It writes nothing any more.
    Ended,
}

/// What became of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct News {
    /// In this order.
    pub(crate) happened: Vec<Happened>,
    /// True when the job is complete; it is forgotten.
    pub(crate) finished: bool,
}

impl Jobs {
    /// A new job, before its tasks are started. Numbers count from 1.
    pub(crate) fn open(&mut self) -> u32 {
        self.newest += 1;
        self.jobs.insert(self.newest, Job::default());
        self.newest
    }

    /// The tasks with which a job was started. A job without any is forgotten. True when it is finished already.
    pub(crate) fn started(&mut self, number: u32, tids: impl Iterator<Item = Tid>) -> bool {
        let Some(job) = self.jobs.get_mut(&number) else {
            return false;
        };
        job.started = true;
        for tid in tids {
            job.members.entry(tid).or_default();
        }
        if job.members.is_empty() {
            self.jobs.remove(&number);
            return false;
        }
        self.close_if_done(number)
    }

    /// A message about a task of a job.
    pub(crate) fn take(&mut self, number: u32, tid: Tid, what: TaskOutput) -> News {
        if number == 0 || number > self.newest {
            return News::default();
        }
        let job = match self.jobs.entry(number) {
            Entry::Occupied(known) => known.into_mut(),
            // A grandchild may be heard of only after the others have ended.
            Entry::Vacant(_) if what == TaskOutput::End => return News::default(),
            Entry::Vacant(new) => new.insert(Job {
                started: true,
                members: BTreeMap::new(),
            }),
        };
        let member = job.members.entry(tid).or_default();
        let mut happened = Vec::new();
        if !member.met {
            member.met = true;
            happened.push(Happened::Met);
        }
        match what {
            TaskOutput::Spawned => happened.push(Happened::Spawned),
            TaskOutput::Created => happened.push(Happened::Created),
            TaskOutput::Data(bytes) => member.lines(&bytes, &mut happened),
            TaskOutput::End if !member.ended => {
                if !member.partial.is_empty() {
                    happened.push(Happened::Line(std::mem::take(&mut member.partial)));
                }
                member.ended = true;
                happened.push(Happened::Ended);
            }
            TaskOutput::End => {}
        }
        News {
            happened,
            finished: self.close_if_done(number),
        }
    }

    /// True when all members have ended; the job is forgotten then.
    fn close_if_done(&mut self, number: u32) -> bool {
        let done = |job: &Job| job.started && job.members.values().all(|member| member.ended);
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

    /// True when no job is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Jobs with those of their tasks that have not ended.
    pub(crate) fn running(&self) -> impl Iterator<Item = (u32, Vec<Tid>)> {
        self.jobs.iter().map(|(number, job)| {
            (
                *number,
                job.members
                    .iter()
                    .filter(|(_, member)| !member.ended)
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

    fn line(text: &str) -> Happened {
        Happened::Line(text.into())
    }

    fn data(text: &str) -> TaskOutput {
        TaskOutput::Data(text.into())
    }

    #[test]
    fn lines_are_put_together_from_pieces() {
        let mut jobs = Jobs::default();
        let job = jobs.open();
        jobs.started(job, [A].into_iter());
        assert_eq!(jobs.take(job, A, data("i'm t")).happened, [Happened::Met]);
        let lines = [line("i'm t40002"), line(""), line("second")];
        assert_eq!(
            jobs.take(job, A, data("40002\n\nsecond\nthi")).happened,
            lines
        );
        let end = jobs.take(job, A, TaskOutput::End);
        assert_eq!(end.happened, [line("thi"), Happened::Ended]);
        assert!(end.finished && jobs.is_empty());
    }

    #[test]
    fn a_job_ends_with_the_last_of_its_tasks_and_their_children() {
        let mut jobs = Jobs::default();
        let job = jobs.open();
        assert_eq!(
            jobs.take(job, A, TaskOutput::Spawned).happened,
            [Happened::Met, Happened::Spawned]
        );
        assert!(
            !jobs.take(job, A, TaskOutput::End).finished,
            "the answer to the spawn may name more tasks"
        );
        let child = jobs.take(job, B, TaskOutput::Created);
        assert_eq!(
            child,
            News {
                happened: vec![Happened::Met, Happened::Created],
                finished: false
            }
        );
        assert!(!jobs.started(job, [A].into_iter()));
        assert_eq!(jobs.running().collect::<Vec<_>>(), [(1, vec![B])]);
        assert!(jobs.take(job, B, TaskOutput::End).finished);
        assert_eq!(
            jobs.take(job, B, data("late\n")).happened,
            [Happened::Met, line("late")]
        );
    }

    #[test]
    fn a_job_whose_tasks_end_before_the_answer_finishes_with_the_answer() {
        let mut jobs = Jobs::default();
        let job = jobs.open();
        jobs.take(job, A, TaskOutput::End);
        assert!(jobs.started(job, [A].into_iter()));
    }

    #[test]
    fn a_job_without_tasks_is_forgotten_and_foreign_numbers_are_ignored() {
        let mut jobs = Jobs::default();
        let job = jobs.open();
        assert!(!jobs.started(job, [].into_iter()));
        assert!(jobs.is_empty());
        assert_eq!(jobs.take(7, A, TaskOutput::Spawned), News::default());
        assert!(jobs.is_empty());
    }

    #[test]
    fn endless_lines_are_broken() {
        let mut jobs = Jobs::default();
        let job = jobs.open();
        let news = jobs.take(job, A, TaskOutput::Data(vec![b'x'; OUTPUT_LINE_BYTES_MAX]));
        assert_eq!(
            news.happened[1],
            Happened::Line(vec![b'x'; OUTPUT_LINE_BYTES_MAX])
        );
    }

    #[test]
    fn output_messages_are_read_and_garbage_is_not() {
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
