//! Forwards the standard output of spawned tasks: to the collector that the spawner named,
//! otherwise to the master's log.
//!
//! A collector also receives a mark for each task that was requested, for each task that was
//! started, and at the end of each task's output; see [`sempa_proto::output`].

use super::{Machine, Output};
use bytes::Bytes;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::host::HostMsg;
use sempa_proto::message::ENC_XDR;
use sempa_proto::output::{OUTPUT_EOF, OUTPUT_REQUESTED, OUTPUT_STARTED};
use sempa_proto::task::{Sink, ToTask};
use sempa_proto::{HostId, Message, Tid};

impl Machine {
    /// Returns the address of this daemon as `dst` knows it. For a task of this host the address
    /// is [`Tid::MY_DAEMON`].
    pub(super) fn daemon_address_for(&self, dst: Tid) -> Tid {
        let own_host = self.config.host;
        if self.location(dst) == Some(own_host) {
            Tid::MY_DAEMON
        } else {
            own_host.daemon_tid()
        }
    }

    /// Sends a message from this daemon in the default encoding.
    pub(super) fn send_daemon_message(
        &mut self,
        dst: Tid,
        ctx: i32,
        tag: i32,
        wid: i32,
        body: Bytes,
    ) {
        let message = self.build_daemon_message(dst, ctx, tag, wid, body);
        self.deliver(
            dst,
            ToTask::Deliver {
                message,
                deliver_after: None,
            },
        );
    }

    /// Builds a message from this daemon in the default encoding.
    pub(super) fn build_daemon_message(
        &self,
        dst: Tid,
        ctx: i32,
        tag: i32,
        wid: i32,
        body: Bytes,
    ) -> Message {
        Message {
            src: self.daemon_address_for(dst),
            dst,
            ctx,
            tag,
            wid,
            enc: ENC_XDR,
            body,
        }
    }

    fn send_to_collector(&mut self, sink: Sink, body: Bytes) {
        if sink.tid.is_task() {
            self.send_daemon_message(sink.tid, sink.ctx, sink.tag, 0, body);
        }
    }

    /// Reports to the collector that a task was requested.
    ///
    /// The daemon that knows all tasks of a spawn must report them together, because the collector
    /// assumes that no further tasks follow.
    pub(super) fn report_output_requested(&mut self, tid: Tid, parent: Tid, sink: Sink) {
        self.send_output_mark(tid, OUTPUT_REQUESTED, parent, sink);
    }

    /// Reports to the collector that a task was started.
    pub(super) fn report_output_started(&mut self, tid: Tid, parent: Tid, sink: Sink) {
        self.send_output_mark(tid, OUTPUT_STARTED, parent, sink);
    }

    fn send_output_mark(&mut self, tid: Tid, mark: i32, parent: Tid, sink: Sink) {
        let mut body = Packer::new(Encoding::Xdr);
        body.pack_items([tid.raw(), mark, parent.raw()]);
        self.send_to_collector(sink, body.finish());
    }

    /// Reports the end of a task's output to the collector. `status` is the wait status of the
    /// task's process, or `None` if the task continues with another collector. PVM's collectors
    /// read only the tid and the mark.
    pub(super) fn report_output_ended(&mut self, tid: Tid, status: Option<i32>, sink: Sink) {
        let mut body = Packer::new(Encoding::Xdr);
        body.pack_items([tid.raw(), OUTPUT_EOF]);
        body.pack_items(status);
        self.send_to_collector(sink, body.finish());
    }

    /// Forwards output of a task to its collector. Output of a task without a collector goes to
    /// the log.
    pub(super) fn forward_task_output(&mut self, tid: Tid, bytes: Vec<u8>) {
        self.look_for_load_failure(tid, &bytes);
        let arriving_sink = self
            .migrations
            .arrivals
            .get(&tid)
            .and_then(|a| a.record.as_ref())
            .map(|r| r.output_sink);
        let sink = self
            .tasks
            .get(tid)
            .map(|t| t.output_sink)
            .or(arriving_sink)
            .unwrap_or_default();
        self.send_task_output(tid, sink, bytes);
    }

    /// Sends output of a task to a collector, or to the log if `sink` names no collector.
    pub(super) fn send_task_output(&mut self, tid: Tid, sink: Sink, bytes: Vec<u8>) {
        if sink.tid.is_task() {
            let mut body = Packer::new(Encoding::Xdr);
            body.pack_int(tid.raw())
                .pack_int(i32::try_from(bytes.len()).unwrap_or(i32::MAX))
                .pack_bytes(&bytes);
            self.send_to_collector(sink, body.finish());
        } else {
            self.log_task_output(tid, bytes.into());
        }
    }

    /// Writes output of a task without a collector to the master's log.
    pub(super) fn log_task_output(&mut self, tid: Tid, bytes: Bytes) {
        if self.master.is_some() {
            self.outputs.push_back(Output::LogTaskOutput { tid, bytes });
        } else {
            self.send_to_host(HostId::MASTER, HostMsg::TaskOutput { tid, bytes });
        }
    }
}
