//! Trace records of the daemon itself: a task was requested, has started, has ended.
//!
//! As in PVM the daemon's records are part of every trace. The event mask selects only among the
//! calls of tasks. A tracer needs the daemon's records to know when the trace of a task is
//! complete.

use super::Machine;
use super::tasks::Task;
use sempa_proto::Tid;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::migration::Usage;
use sempa_proto::task::Sink;
use sempa_proto::trace::{
    END_TASK_EVENT, NEW_TASK_EVENT, SPAWN_TASK_EVENT, TraceItem, int_item, pack_item_table,
    pack_record, record_head_items, text_item,
};
use std::collections::{BTreeSet, VecDeque};

/// Largest number of tracers for which the daemon remembers that they have received the item table.
/// A forgotten tracer receives the table again.
const INFORMED_TRACERS_MAX: usize = 1024;

/// The tracers that have received the item table.
#[derive(Debug, Default)]
pub(super) struct InformedTracers {
    tracers: BTreeSet<Tid>,
    /// The members of `tracers`, oldest first.
    send_order: VecDeque<Tid>,
}

impl Machine {
    /// Sends a tracer the item table, which must precede all records. Has no effect if the tracer
    /// has received the table.
    fn send_item_table(&mut self, sink: Sink) {
        if !self.informed_tracers.tracers.insert(sink.tid) {
            return;
        }
        self.informed_tracers.send_order.push_back(sink.tid);
        if self.informed_tracers.send_order.len() > INFORMED_TRACERS_MAX
            && let Some(oldest_tracer) = self.informed_tracers.send_order.pop_front()
        {
            self.informed_tracers.tracers.remove(&oldest_tracer);
        }
        let mut body = Packer::new(Encoding::Xdr);
        pack_item_table(&mut body);
        self.send_daemon_message(sink.tid, sink.ctx, sink.tag, 0, body.finish());
    }

    fn send_trace_record(
        &mut self,
        sink: Sink,
        subject: Tid,
        (event, name): (i32, &str),
        items: Vec<TraceItem>,
    ) {
        if !sink.tid.is_task() || sink.tid == subject {
            return;
        }
        self.send_item_table(sink);
        let mut record_items = record_head_items(
            (self.unix_time.0 / 1_000_000) as i32,
            (self.unix_time.0 % 1_000_000) as i32,
            subject.raw(),
        );
        record_items.extend(items);
        let mut body = Packer::new(Encoding::Xdr);
        // Every record contains its own description, because the daemon sends only a few records.
        pack_record(&mut body, event, Some(name), &record_items);
        self.send_daemon_message(sink.tid, sink.ctx, sink.tag, 0, body.finish());
    }

    /// Sends the record of a task's start.
    pub(super) fn trace_task_start(&mut self, task: &Task) {
        // PVM uses −1 for an unknown value and a dash for a task without a name.
        let value_or_minus_one = |n: i32| if n == 0 { -1 } else { n };
        let name = if task.name.is_empty() {
            "-"
        } else {
            task.name.as_str()
        };
        let items = vec![
            int_item("PT", value_or_minus_one(task.parent.raw())),
            int_item("TF", task.flags),
            text_item("TN", name),
        ];
        self.send_trace_record(task.trace_sink, task.tid, NEW_TASK_EVENT, items);
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
    pub(super) fn trace_task_end(&mut self, task: &Task, status: i32, usage: Usage) {
        let (seconds, microseconds) = (
            |t: u64| (t / 1_000_000) as i32,
            |t: u64| (t % 1_000_000) as i32,
        );
        let items = vec![
            int_item("TST", status),
            int_item("TUS", seconds(usage.user.0)),
            int_item("TUU", microseconds(usage.user.0)),
            int_item("TSS", seconds(usage.system.0)),
            int_item("TSU", microseconds(usage.system.0)),
        ];
        self.send_trace_record(task.trace_sink, task.tid, END_TASK_EVENT, items);
    }
}
