//! Prints the output of child tasks (`pvm_catchout`).
//!
//! The module [`sempa_proto::output`] describes the messages with the output. Output is collected
//! separately for each task and printed in whole lines.

use crate::control::TC_OUTPUT;
#[cfg(doc)]
use crate::control::TC_WRITER_EXIT;
use crate::data::{pvmctrc, pvmmytid, pvmshowtaskid, pvmtrc};
use crate::memory::Stream;
use crate::session::{self, Session};
use sempa_proto::body::Unpacker;
use sempa_proto::message::CTX_TASK_CONTROL;
use sempa_proto::output::{LOST_TASK_LINE, OUTPUT_EOF, OUTPUT_REQUESTED, OUTPUT_STARTED};
use sempa_proto::{PvmResult, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;

/// Maximum length of an unfinished line of a task in bytes; a longer line is printed in pieces.
pub(crate) const LINE_BYTES_MAX: usize = 64 << 10;

#[derive(Debug, Default)]
struct ChildOutput {
    has_begun: bool,
    has_ended: bool,
    partial_line: Vec<u8>,
}

/// The tasks whose output this task prints, and the stream on which the output is printed.
///
/// A task stays in the table after its output has ended, because its marks arrive from two daemons
/// in any order. The number of possible tids bounds the table.
#[derive(Default)]
pub(crate) struct OutputCatcher {
    stream: Option<Stream>,
    children: BTreeMap<i32, ChildOutput>,
    /// Number of children whose output has not ended.
    running_count: usize,
    /// Children whose output has not ended and for whose exit no notification was requested.
    unwatched: BTreeSet<i32>,
}

impl OutputCatcher {
    /// True if this task prints the output of children, and at least one of these children may
    /// still write.
    pub(crate) fn has_running_children(&self) -> bool {
        self.stream.is_some() && self.running_count > 0
    }

    /// Returns the children that may still write and for whose exit [`TC_WRITER_EXIT`] must be
    /// requested. Each child is returned once.
    pub(crate) fn take_unwatched(&mut self) -> Vec<Tid> {
        let unwatched = std::mem::take(&mut self.unwatched);
        unwatched.into_iter().map(Tid::from_raw).collect()
    }

    /// True if [`OutputCatcher::take_unwatched`] would return a child.
    pub(crate) fn has_unwatched(&self) -> bool {
        !self.unwatched.is_empty()
    }

    /// Returns the child, and adds it if it is new.
    fn child(&mut self, tid: i32) -> &mut ChildOutput {
        self.children.entry(tid).or_insert_with(|| {
            self.running_count += 1;
            self.unwatched.insert(tid);
            ChildOutput::default()
        })
    }

    /// Records the end of a child's output. Returns false if the output has ended before.
    fn end_child(&mut self, tid: i32) -> bool {
        let child = self.child(tid);
        if std::mem::replace(&mut child.has_ended, true) {
            return false;
        }
        self.running_count -= 1;
        self.unwatched.remove(&tid);
        true
    }

    /// True if the output of this child has not ended.
    fn may_write(&self, tid: i32) -> bool {
        let child = self.children.get(&tid);
        child.is_some_and(|child| !child.has_ended)
    }

    /// Handles the exit of a child, and returns the text to print. The end of the output precedes
    /// the exit, so if the end is missing, the child's host is lost.
    fn process_exit(&mut self, tid: i32, shows_tids: bool) -> Vec<u8> {
        let mut text = Vec::new();
        let Some(child) = self.children.get_mut(&tid).filter(|c| !c.has_ended) else {
            return text;
        };
        let last_line = std::mem::take(&mut child.partial_line);
        self.end_child(tid);
        if !last_line.is_empty() {
            append_line(&mut text, tid, shows_tids, &last_line);
        }
        if shows_tids {
            append_line(&mut text, tid, true, LOST_TASK_LINE.as_bytes());
            append_line(&mut text, tid, true, b"EOF");
        }
        text
    }

    /// True if this task prints the output of other tasks.
    pub(crate) fn is_active(&self) -> bool {
        self.stream.is_some()
    }

    /// Registers spawned tasks whose output is expected. While output is printed,
    /// [`OutputCatcher::has_running_children`] stays true until the output of these tasks has
    /// ended.
    pub(crate) fn register(&mut self, tids: &[Tid]) {
        for tid in tids {
            self.child(tid.raw());
        }
    }

    /// Processes one output message and returns the text to print. With `shows_tids`, each line of
    /// the text begins with the task's tid, and two additional lines mark the begin and the end of
    /// the output.
    fn process_message(&mut self, mut body: Unpacker, shows_tids: bool) -> PvmResult<Vec<u8>> {
        let (tid, mark) = (body.read_int()?, body.read_int()?);
        let mut text = Vec::new();
        let mut append = |content: &[u8]| append_line(&mut text, tid, shows_tids, content);
        let child = self.child(tid);
        if !child.has_begun && ![OUTPUT_EOF, OUTPUT_REQUESTED].contains(&mark) {
            child.has_begun = true;
            if shows_tids {
                append(b"BEGIN");
            }
        }
        match mark {
            OUTPUT_REQUESTED | OUTPUT_STARTED => (),
            OUTPUT_EOF => {
                if !child.partial_line.is_empty() {
                    append(&std::mem::take(&mut child.partial_line));
                }
                if self.end_child(tid) && shows_tids {
                    append(b"EOF");
                }
            }
            count => {
                let bytes = body.read_bytes(
                    usize::try_from(count).map_err(|_| sempa_proto::PvmError::BadMsg)?,
                )?;
                for byte in bytes {
                    if byte == b'\n' || child.partial_line.len() >= LINE_BYTES_MAX {
                        append(&std::mem::take(&mut child.partial_line));
                    }
                    if byte != b'\n' {
                        child.partial_line.push(byte);
                    }
                }
            }
        }
        Ok(text)
    }
}

/// Appends a line of the task's output to `text`. With `shows_tid`, the line begins with the tid.
fn append_line(text: &mut Vec<u8>, tid: i32, shows_tid: bool, content: &[u8]) {
    if shows_tid {
        text.extend_from_slice(format!("[t{tid:x}] ").as_bytes());
    }
    text.extend_from_slice(content);
    text.push(b'\n');
}

/// Handles an output message that has arrived: prints the lines that the message completes.
pub(crate) fn handle_output_message(body: Unpacker) {
    print_text(|catcher, shows_tids| {
        // The marks of a task are also registered while nothing is printed, so that a later call
        // that waits for the end of the output notices the end. A malformed message has no text.
        catcher
            .process_message(body, shows_tids)
            .unwrap_or_default()
    });
}

/// Handles the notification that a child has exited. Without `PvmShowTids` the stream contains only
/// the children's bytes, so the loss of a child is reported on standard error.
pub(crate) fn handle_child_exit(mut body: Unpacker) {
    let Ok(tid) = body.read_int() else { return };
    let is_lost = {
        let catcher = &session::lock().output_catcher;
        catcher.is_active() && catcher.may_write(tid)
    };
    print_text(|catcher, shows_tids| catcher.process_exit(tid, shows_tids));
    if is_lost && pvmshowtaskid.load(Relaxed) == 0 {
        session::log_stderr(&format!("t{tid:x} was {LOST_TASK_LINE}\n"), false);
    }
}

/// Prints the text that `process` returns. The session is unlocked while the text is written.
fn print_text(process: impl FnOnce(&mut OutputCatcher, bool) -> Vec<u8>) {
    let mut session = session::lock();
    let shows_tids = pvmshowtaskid.load(Relaxed) != 0;
    let text = process(&mut session.output_catcher, shows_tids);
    if let Some(stream) = session.output_catcher.stream
        && !text.is_empty()
    {
        drop(session);
        stream.write(&text);
    }
}

/// Sets the stream on which the output of children is printed. With `None` nothing is printed any
/// more, so that the program may close the stream, and the output of tasks that are spawned later
/// is sent to the destination of this task's own output.
pub(crate) fn set_stream(session: &mut Session, stream: Option<Stream>) {
    session.output_catcher.stream = stream;
    if stream.is_some() {
        pvmctrc.out_tid.store(pvmmytid.load(Relaxed), Relaxed);
        pvmctrc.out_ctx.store(CTX_TASK_CONTROL, Relaxed);
        pvmctrc.out_tag.store(TC_OUTPUT, Relaxed);
    } else {
        pvmctrc.out_tid.store(pvmtrc.out_tid.load(Relaxed), Relaxed);
        pvmctrc.out_ctx.store(pvmtrc.out_ctx.load(Relaxed), Relaxed);
        pvmctrc.out_tag.store(pvmtrc.out_tag.load(Relaxed), Relaxed);
    }
}

/// True if the output of spawned tasks is sent to this task for printing.
pub(crate) fn prints_child_output() -> bool {
    let own_tid = pvmmytid.load(Relaxed);
    own_tid > 0
        && pvmctrc.out_tid.load(Relaxed) == own_tid
        && pvmctrc.out_tag.load(Relaxed) == TC_OUTPUT
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::body::{Encoding, Packer};

    fn output_message(integers: &[i32], data: &[u8]) -> Unpacker {
        let mut body = Packer::new(Encoding::Xdr);
        body.pack_items(integers.iter().copied()).pack_bytes(data);
        Unpacker::new_xdr(body.finish())
    }

    fn printed_text(
        catcher: &mut OutputCatcher,
        integers: &[i32],
        data: &[u8],
        shows_tids: bool,
    ) -> String {
        String::from_utf8(
            catcher
                .process_message(output_message(integers, data), shows_tids)
                .expect("a good message"),
        )
        .expect("text")
    }

    /// Each line is printed with the task's tid; an unfinished last line is completed when the
    /// output ends.
    #[test]
    fn lines_show_tid_and_last_line_is_completed() {
        let mut catcher = OutputCatcher::default();
        assert_eq!(
            printed_text(&mut catcher, &[0x800c2, -1, 0x40001], b"", true),
            ""
        );
        assert_eq!(
            printed_text(&mut catcher, &[0x800c2, -2, 0x40001], b"", true),
            "[t800c2] BEGIN\n"
        );
        assert_eq!(
            printed_text(&mut catcher, &[0x800c2, 5], b"a\nb\nc", true),
            "[t800c2] a\n[t800c2] b\n"
        );
        assert_eq!(printed_text(&mut catcher, &[0x800c2, 1], b"d", true), "");
        assert_eq!(
            printed_text(&mut catcher, &[0x800c2, 0], b"", true),
            "[t800c2] cd\n[t800c2] EOF\n"
        );
        assert_eq!(catcher.running_count, 0);
    }

    /// Without `PvmShowTids` only the text is printed.
    #[test]
    fn without_tids_only_the_text_is_printed() {
        let mut catcher = OutputCatcher::default();
        assert_eq!(
            printed_text(&mut catcher, &[0x800c2, -2, 0x40001], b"", false),
            ""
        );
        assert_eq!(
            printed_text(&mut catcher, &[0x800c2, 3], b"a\nb", false),
            "a\n"
        );
        assert_eq!(printed_text(&mut catcher, &[0x800c2, 0], b"", false), "b\n");
    }

    /// A child that exits without the end of its output ends with a line that says so, and its
    /// bytes are printed unchanged; the exit of any other child prints nothing.
    #[test]
    fn exit_ends_output_that_has_no_end() {
        let mut catcher = OutputCatcher::default();
        let (lost_tid, other_tid) = (0x800c2, 0x40002);
        catcher.register(&[Tid::from_raw(lost_tid), Tid::from_raw(other_tid)]);
        assert_eq!(catcher.take_unwatched().len(), 2);
        assert!(!catcher.has_unwatched());
        printed_text(&mut catcher, &[lost_tid, -1, 0x40001], b"", true);
        assert!(!catcher.has_unwatched(), "each child is watched once");
        printed_text(&mut catcher, &[lost_tid, 4], b"\xffalf", true);
        printed_text(&mut catcher, &[other_tid, 0], b"", true);
        assert_eq!(catcher.running_count, 1);
        assert!(catcher.process_exit(other_tid, true).is_empty());
        let expected_text: &[&[u8]] = &[
            b"[t800c2] \xffalf\n[t800c2] ",
            LOST_TASK_LINE.as_bytes(),
            b"\n[t800c2] EOF\n",
        ];
        assert_eq!(catcher.process_exit(lost_tid, true), expected_text.concat());
        assert!(catcher.process_exit(lost_tid, true).is_empty());
        assert!(catcher.process_exit(0x40003, true).is_empty(), "unknown");
        assert_eq!(catcher.running_count, 0);
    }

    /// A child whose output has ended needs no notification of its exit.
    #[test]
    fn ended_output_needs_no_notification() {
        let mut catcher = OutputCatcher::default();
        catcher.register(&[Tid::from_raw(0x800c2), Tid::from_raw(0x800c3)]);
        printed_text(&mut catcher, &[0x800c2, 0], b"", true);
        printed_text(&mut catcher, &[0x800c2, 0], b"", true);
        assert_eq!(catcher.take_unwatched(), [Tid::from_raw(0x800c3)]);
        assert_eq!(catcher.running_count, 1);
    }

    /// The marks of a task may arrive in any order; a malformed message is an error.
    #[test]
    fn output_marks_may_arrive_in_any_order() {
        let mut catcher = OutputCatcher::default();
        printed_text(&mut catcher, &[0x800c2, 2], b"x\n", true);
        printed_text(&mut catcher, &[0x800c2, 0], b"", true);
        catcher.register(&[Tid::from_raw(0x800c2)]);
        printed_text(&mut catcher, &[0x800c2, -1, 0x40001], b"", true);
        assert_eq!(catcher.running_count, 0, "the end has been seen");
        assert!(
            catcher
                .process_message(output_message(&[0x800c2, i32::MAX], b""), true)
                .is_err()
        );
    }
}
