//! A process of the simulation, with a model of its task library.

use super::{Sim, SimEvent};
use crate::ConnId;
use bytes::Bytes;
use sempa_proto::link::{Link, LinkEvent};
use sempa_proto::task::{
    Claim, OnDaemonExit, Reply, Request, RmInfo, SendWatermark, ToTask, Welcome,
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

/// A process with a task library. A clone of it is the content of its images.
#[derive(Clone, Debug)]
pub(in crate::tests) struct Proc {
    pub(in crate::tests) host: HostId,
    pub(super) program: String,
    /// The tid that the tasker uses; `None` for a process that was not spawned.
    pub(in crate::tests) spawned_tid: Option<Tid>,
    pub(in crate::tests) env: Vec<String>,
    pub(super) on_daemon_exit: OnDaemonExit,
    pub(in crate::tests) conn: Option<ConnId>,
    pub(in crate::tests) welcome: Option<Welcome>,
    pub(in crate::tests) refused: Option<String>,
    pub(in crate::tests) rm: Option<RmInfo>,
    pub(super) links: BTreeMap<Tid, Link>,
    pub(super) route: u64,
    /// The incarnation with which the links of the process begin.
    pub(super) incarnation: u16,
    /// Number of messages sent to each peer.
    pub(in crate::tests) sent_counts: BTreeMap<Tid, u32>,
    pub(super) pending_requests: BTreeMap<RequestId, Request>,
    pub(in crate::tests) replies: BTreeMap<RequestId, Reply>,
    pub(super) next_request: u64,
    pub(in crate::tests) received: Vec<Received>,
    /// Route messages and the daemon's messages about peers, in order.
    pub(in crate::tests) daemon_messages: Vec<ToTask>,
    pub(super) deferred_notifications: Vec<(SendWatermark, Message)>,
    pub(super) quiesced: Option<(MigrationId, Vec<PathBuf>)>,
    pub(super) stopped_for_migration: bool,
    /// True if the process is paused for the owner of its host or by a suspension.
    pub(super) paused: bool,
    /// Number of the latest order to pause or resume the process.
    pub(super) pause_serial: u64,
    /// Number of times that the process was resumed to quiesce while it was paused.
    pub(in crate::tests) quiesce_runs: u64,
    /// Events that arrived while the process was paused.
    pub(super) deferred_events: Vec<SimEvent>,
    /// The claim with which the process will connect.
    pub(super) claim: Option<Claim>,
    /// The migration for which the library has handed off its links.
    pub(super) handed_off_for: Option<MigrationId>,
    /// True if the process was asked to exit at least once.
    pub(super) exit_requested: bool,
    /// Exit status of the process, from the moment when it begins to exit.
    pub(super) exit_status: Option<i32>,
    pub(in crate::tests) exited: bool,
    /// True if the process ended with its host or tasker, but its images remain.
    pub(super) images_remain: bool,
    pub(super) cpu_micros: u64,
}

impl Proc {
    pub(in crate::tests) fn tid(&self) -> Tid {
        self.welcome.as_ref().expect("enrolled").tid
    }

    /// True if the process's link to this peer knows that the peer is dead.
    pub(in crate::tests) fn knows_dead(&self, peer: Tid) -> bool {
        self.links.get(&peer).is_some_and(Link::is_peer_gone)
    }

    /// Returns the number of requests without a reply.
    pub(in crate::tests) fn pending_request_count(&self) -> usize {
        self.pending_requests.len()
    }

    /// True if the library has quiesced and the daemon has not accepted it again.
    pub(in crate::tests) fn has_quiesced(&self) -> bool {
        self.quiesced.is_some()
    }

    /// True while the process does not run.
    pub(in crate::tests) fn is_frozen(&self) -> bool {
        self.stopped_for_migration || self.paused
    }

    pub(in crate::tests) fn notifications(&self, tag: i32) -> Vec<Message> {
        let notes = self.received.iter().filter_map(|s| match s {
            Received::Notification(message) if message.tag == tag => Some(message.clone()),
            _ => None,
        });
        notes.collect()
    }

    /// Delivers notifications whose watermark has been reached.
    pub(super) fn deliver_notifications(&mut self) {
        let links = &self.links;
        let is_due = |mark: &SendWatermark| {
            links
                .get(&mark.peer)
                .is_none_or(|l| l.is_peer_gone() || l.expected_seq() >= mark.end_seq)
        };
        for (_, message) in self
            .deferred_notifications
            .extract_if(.., |(mark, _)| is_due(mark))
        {
            self.received.push(Received::Notification(message));
        }
    }
}

impl Sim {
    /// Handles the daemon's acceptance of a process as a task.
    pub(super) fn on_welcome(&mut self, proc: usize, welcome: Welcome) {
        let p = &mut self.procs[proc];
        p.rm = welcome.rm;
        let (restart, successor) = (welcome.restart.clone(), welcome.handoff.clone());
        p.welcome = Some(welcome);
        p.quiesced = None;
        p.route += 1;
        let route = RouteId(p.route);
        if let Some(successor) = successor {
            self.adopt_links(proc, &successor);
        }
        if let Some(restart) = restart {
            self.resume_after_restart(proc, &restart);
        }
        self.notify_links(proc, &LinkEvent::RouteUp(route));
    }
}
