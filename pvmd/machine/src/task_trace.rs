//! Trace records of the daemon itself: a task was requested, has started, has ended.
//!
//! As in PVM these records are part of every trace, regardless of the event mask, which selects
//! only among the calls of tasks. A tracer needs them to know when the trace of a task is complete.

use super::Machine;
use super::tasks::Task;
use sempa_proto::Tid;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::migration::Usage;
use sempa_proto::task::Sink;
use sempa_proto::trace::{
    END_TASK_EVENT, NEW_TASK_EVENT, SPAWN_TASK_EVENT, TraceItem, int_item, pack_item_table,
    pack_record, record_head, text_item,
};
use std::collections::{BTreeSet, VecDeque};

/// Largest number of tracers that are remembered to have the item table. A tracer that was
/// forgotten gets the table again.
const INFORMED_TRACERS_MAX: usize = 1024;

/// The tracers that have received the item table.
#[derive(Debug, Default)]
pub(super) struct InformedTracers {
    tracers: BTreeSet<Tid>,
    /// The same tracers, oldest first.
    order: VecDeque<Tid>,
}

impl Machine {
    /// Sends a tracer the item table, which must precede all records.
    fn send_item_table(&mut self, sink: Sink) {
        if !self.informed_tracers.tracers.insert(sink.tid) {
            return;
        }
        self.informed_tracers.order.push_back(sink.tid);
        if self.informed_tracers.order.len() > INFORMED_TRACERS_MAX
            && let Some(oldest) = self.informed_tracers.order.pop_front()
        {
            self.informed_tracers.tracers.remove(&oldest);
        }
        let mut body = Packer::new(Encoding::Xdr);
        pack_item_table(&mut body);
        self.send_daemon_message(sink.tid, sink.ctx, sink.tag, 0, body.finish());
    }

    fn send_trace_record(
        &mut self,
        sink: Sink,
        of: Tid,
        (event, name): (i32, &str),
        items: Vec<TraceItem>,
    ) {
        if !sink.tid.is_task() || sink.tid == of {
            return;
        }
        self.send_item_table(sink);
        let mut all = record_head(
            (self.unix_time.0 / 1_000_000) as i32,
            (self.unix_time.0 % 1_000_000) as i32,
            of.raw(),
        );
        all.extend(items);
        let mut body = Packer::new(Encoding::Xdr);
        // Every record contains its own description: the daemon sends only a few.
        pack_record(&mut body, event, Some(name), &all);
        self.send_daemon_message(sink.tid, sink.ctx, sink.tag, 0, body.finish());
    }

    /// Sends the record of a task's start.
    pub(super) fn trace_task_start(&mut self, task: &Task) {
        // PVM uses −1 for an unknown value and a dash for a task without a name.
        let or_none = |n: i32| if n == 0 { -1 } else { n };
        let name = if task.name.is_empty() {
            "-"
        } else {
            task.name.as_str()
        };
        let items = vec![
            int_item("PT", or_none(task.parent.raw())),
            int_item("TF", task.flags),
            text_item("TN", name),
        ];
        self.send_trace_record(task.trace, task.tid, NEW_TASK_EVENT, items);
    }

    /// Sends the record of a requested task.
    pub(super) fn trace_task_request(&mut self, sink: Sink, tid: Tid, parent: Tid) {
        self.send_trace_record(
            sink,
            tid,
            SPAWN_TASK_EVENT,
            vec![int_item("PT", parent.raw())],
        );
    }

    /// Sends the record of a task's end.
    pub(super) fn trace_task_end(&mut self, task: &Task, status: i32, used: Usage) {
        let (seconds, micros) = (
            |t: u64| (t / 1_000_000) as i32,
            |t: u64| (t % 1_000_000) as i32,
        );
        let items = vec![
            int_item("TST", status),
            int_item("TUS", seconds(used.user.0)),
            int_item("TUU", micros(used.user.0)),
            int_item("TSS", seconds(used.system.0)),
            int_item("TSU", micros(used.system.0)),
        ];
        self.send_trace_record(task.trace, task.tid, END_TASK_EVENT, items);
    }
}
