//! A simulated process with a model of its task library.

use super::{Sim, SimEvent};
use crate::{ConnId, Event};
use bytes::Bytes;
use sempa_proto::causal::Past;
use sempa_proto::link::{Link, LinkEvent};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::rm::CTX_RM;
use sempa_proto::sm::SM_ALIVE;
use sempa_proto::task::{
    Claim, OnDaemonExit, Reply, Request, RmInfo, SendWatermark, ToDaemon, ToTask, Welcome,
};
use sempa_proto::{HostId, Message, MigrationId, RequestId, RouteId, Tid};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A message or notification that a task has received.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::tests) enum Received {
    Message(Tid, Bytes),
    Notification(Message),
}

/// A process with a task library. The image of a process contains a clone of this value.
#[derive(Clone, Debug)]
pub(in crate::tests) struct Proc {
    pub(in crate::tests) host: HostId,
    pub(super) program: String,
    /// Tid by which the tasker knows this process; `None` if no tasker started the process.
    pub(in crate::tests) spawned_tid: Option<Tid>,
    /// Process id in the process's own PID namespace. A copy that is built from images keeps it.
    pub(in crate::tests) namespace_pid: i32,
    pub(in crate::tests) env: Vec<String>,
    pub(super) on_daemon_exit: OnDaemonExit,
    pub(in crate::tests) conn: Option<ConnId>,
    pub(in crate::tests) welcome: Option<Welcome>,
    pub(in crate::tests) refusal_reason: Option<String>,
    pub(in crate::tests) rm_info: Option<RmInfo>,
    pub(super) links: BTreeMap<Tid, Link>,
    pub(super) route_number: u64,
    /// Incarnation of the process; new links begin with it.
    pub(super) incarnation: u16,
    /// Number of messages sent to each peer.
    pub(in crate::tests) sent_counts: BTreeMap<Tid, u32>,
    pub(super) pending_requests: BTreeMap<RequestId, Request>,
    pub(in crate::tests) replies: BTreeMap<RequestId, Reply>,
    pub(super) next_request_number: u64,
    pub(in crate::tests) received: Vec<Received>,
    /// Route messages and the daemon's messages about peers, in order of arrival.
    pub(in crate::tests) daemon_messages: Vec<ToTask>,
    pub(super) deferred_notifications: Vec<(SendWatermark, Message)>,
    /// The past that the library hands off to the next process.
    pub(in crate::tests) past: Past,
    /// True if the library answers at once that awaited messages have arrived.
    pub(in crate::tests) answers_marks: bool,
    pub(super) quiesce_request: Option<(MigrationId, Vec<PathBuf>)>,
    pub(super) stopped_for_migration: bool,
    /// True if the process is stopped because the lease of its tasker permits no process to run.
    pub(super) is_held: bool,
    /// True if the process is paused for the owner of its host or by a suspension.
    pub(super) paused: bool,
    /// Number of orders to pause or resume the process so far.
    pub(super) pause_serial: u64,
    /// Number of times that the paused process was resumed for a limited time in order to quiesce.
    pub(in crate::tests) quiesce_runs: u64,
    /// Events that arrived while the process was paused.
    pub(super) deferred_events: Vec<SimEvent>,
    /// The claim that the process will present when it connects.
    pub(super) claim: Option<Claim>,
    /// The migration for which the library has handed off its links.
    pub(super) handoff_migration: Option<MigrationId>,
    /// True if the process was asked to exit at least once.
    pub(super) was_exit_requested: bool,
    /// Exit status of the process; `None` until the process begins to exit.
    pub(super) exit_status: Option<i32>,
    pub(in crate::tests) exited: bool,
    /// True if the process ended with its host or tasker and its images can still be restored.
    pub(super) images_remain: bool,
    pub(super) cpu_micros: u64,
    /// True if the process answers its daemon's questions whether it runs.
    pub(in crate::tests) answers_pings: bool,
    /// True if a child process holds the socket, so that quiescing does not close the connection.
    pub(in crate::tests) child_holds_socket: bool,
}

impl Proc {
    pub(in crate::tests) fn tid(&self) -> Tid {
        self.welcome.as_ref().expect("enrolled").tid
    }

    /// True if the process's link to this peer has been notified that the peer is dead.
    pub(in crate::tests) fn knows_peer_dead(&self, peer: Tid) -> bool {
        self.links.get(&peer).is_some_and(Link::is_peer_gone)
    }

    /// Returns the number of requests without a reply.
    pub(in crate::tests) fn pending_request_count(&self) -> usize {
        self.pending_requests.len()
    }

    /// True if the library has quiesced and no daemon has accepted it since.
    pub(in crate::tests) fn has_quiesced(&self) -> bool {
        self.quiesce_request.is_some()
    }

    /// True while the process is paused, held by a lease, or stopped for a migration.
    pub(in crate::tests) fn is_frozen(&self) -> bool {
        self.stopped_for_migration || self.paused || self.is_held
    }

    pub(in crate::tests) fn is_program(&self, name: &str) -> bool {
        self.program.ends_with(name)
    }

    /// Stops the process from outside, as SIGSTOP does.
    pub(in crate::tests) fn stop(&mut self) {
        self.paused = true;
    }

    pub(in crate::tests) fn notifications(&self, tag: i32) -> Vec<Message> {
        let notifications = self.received.iter().filter_map(|s| match s {
            Received::Notification(message) if message.tag == tag => Some(message.clone()),
            _ => None,
        });
        notifications.collect()
    }

    /// Delivers the deferred notifications whose watermark has been reached or whose peer is dead.
    pub(super) fn deliver_notifications(&mut self) {
        let links = &self.links;
        let is_due = |watermark: &SendWatermark| {
            links
                .get(&watermark.peer)
                .is_none_or(|l| l.is_peer_gone() || l.expected_seq() >= watermark.end_seq)
        };
        for (_, message) in self
            .deferred_notifications
            .extract_if(.., |(watermark, _)| is_due(watermark))
        {
            self.received.push(Received::Notification(message));
        }
    }
}

impl Sim {
    /// Continues a process that was stopped from outside.
    pub(in crate::tests) fn continue_proc(&mut self, proc: usize) {
        self.procs[proc].paused = false;
        self.resume_proc(proc);
    }

    /// Lets a load watcher or resource manager tell its daemon that it runs. It answers the
    /// daemon's questions from now on.
    pub(in crate::tests) fn announce_alive(&mut self, proc: usize) {
        let p = &mut self.procs[proc];
        p.answers_pings = true;
        let message = Message {
            src: p.tid(),
            dst: Tid::MY_DAEMON,
            ctx: CTX_RM,
            tag: SM_ALIVE,
            wid: 0,
            enc: DSIG_X86_64,
            body: Bytes::new(),
        };
        let (conn, host_id) = (p.conn.expect("connected"), p.host);
        let message = ToDaemon::Message(message);
        self.send_from_proc(conn, host_id, Event::TaskControl { conn, message });
    }

    /// Handles the message by which the daemon accepts a process as a task.
    pub(super) fn on_welcome(&mut self, proc: usize, welcome: Welcome) {
        let p = &mut self.procs[proc];
        p.rm_info = welcome.rm;
        let (restart_info, handoff) = (welcome.restart_info.clone(), welcome.handoff.clone());
        p.welcome = Some(welcome);
        p.quiesce_request = None;
        p.route_number += 1;
        let route = RouteId(p.route_number);
        if let Some(handoff) = handoff {
            self.adopt_links(proc, &handoff);
        }
        if let Some(restart_info) = restart_info {
            self.resume_after_restart(proc, &restart_info);
        }
        self.notify_links(proc, &LinkEvent::RouteUp(route));
    }
}
