//! A process of the simulation: the task library's part in it.

use super::{Happening, Sim};
use crate::ConnId;
use bytes::Bytes;
use sempa_proto::link::{Link, LinkEvent};
use sempa_proto::task::{AtEnd, Claim, LinkMark, Reply, Request, RmInfo, ToTask, Welcome};
use sempa_proto::{HostId, Message, MigrationId, RequestId, RouteId, Tid};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What a task has got, in order.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::tests) enum Seen {
    Message(Tid, Bytes),
    Note(Message),
}

/// A process with a task library in it. A copy is what its images hold.
#[derive(Clone, Debug)]
pub(in crate::tests) struct Proc {
    pub(in crate::tests) host: HostId,
    pub(super) program: String,
    /// The tasker's name for it; `None` when it was not spawned.
    pub(in crate::tests) spawned: Option<Tid>,
    pub(in crate::tests) env: Vec<String>,
    pub(super) at_end: AtEnd,
    pub(in crate::tests) conn: Option<ConnId>,
    pub(in crate::tests) welcome: Option<Welcome>,
    pub(in crate::tests) refused: Option<String>,
    pub(in crate::tests) rm: Option<RmInfo>,
    pub(super) links: BTreeMap<Tid, Link>,
    pub(super) route: u64,
    /// The timeline that its links begin on.
    pub(super) line: u16,
    /// How often it has said something to whom.
    pub(in crate::tests) said: BTreeMap<Tid, u32>,
    /// Requests without a reply.
    pub(super) open: BTreeMap<RequestId, Request>,
    pub(in crate::tests) replies: BTreeMap<RequestId, Reply>,
    pub(super) next_request: u64,
    pub(in crate::tests) seen: Vec<Seen>,
    /// Words about routes, and what its daemon said of peers, in order.
    pub(in crate::tests) told: Vec<ToTask>,
    pub(super) waiting: Vec<(LinkMark, Message)>,
    pub(super) quiesced: Option<(MigrationId, Vec<PathBuf>)>,
    pub(super) stopped: bool,
    /// It stands still for the owner of its host.
    pub(super) held: bool,
    /// Which order to hold it was the last.
    pub(super) holds: u64,
    /// How often it was let run again while it was held.
    pub(in crate::tests) eased: u64,
    /// What has come while it stood still.
    pub(super) mail: Vec<Happening>,
    /// It has not connected yet, and will by this.
    pub(super) claim: Option<Claim>,
    /// The move for which it has said all.
    pub(super) parted: Option<MigrationId>,
    /// It was asked to end some time.
    pub(super) asked: bool,
    /// It is ending, with this status.
    pub(super) ends: Option<i32>,
    pub(in crate::tests) exited: bool,
    /// It has ended with its host or tasker, but its images hold it.
    pub(super) kept: bool,
    pub(super) used: u64,
}

impl Proc {
    pub(in crate::tests) fn tid(&self) -> Tid {
        self.welcome.as_ref().expect("enrolled").tid
    }

    /// True when its link to this peer has been told that the peer is dead.
    pub(in crate::tests) fn is_gone(&self, peer: Tid) -> bool {
        self.links.get(&peer).is_some_and(Link::is_gone)
    }

    /// Requests without a reply.
    pub(in crate::tests) fn open_requests(&self) -> usize {
        self.open.len()
    }

    /// True from when its library has let go until it is welcomed again.
    pub(in crate::tests) fn has_let_go(&self) -> bool {
        self.quiesced.is_some()
    }

    /// True while nothing of it runs.
    pub(in crate::tests) fn is_frozen(&self) -> bool {
        self.stopped || self.held
    }

    pub(in crate::tests) fn notes(&self, tag: i32) -> Vec<Message> {
        let notes = self.seen.iter().filter_map(|s| match s {
            Seen::Note(message) if message.tag == tag => Some(message.clone()),
            _ => None,
        });
        notes.collect()
    }

    /// Hands over notifications whose turn has come.
    pub(super) fn settle(&mut self) {
        let links = &self.links;
        let here = |mark: &LinkMark| {
            links
                .get(&mark.peer)
                .is_none_or(|l| l.is_gone() || l.expected() >= mark.end)
        };
        for (_, message) in self.waiting.extract_if(.., |(mark, _)| here(mark)) {
            self.seen.push(Seen::Note(message));
        }
    }
}

impl Sim {
    /// A library hears that its process is a task.
    pub(super) fn welcomed(&mut self, proc: usize, welcome: Welcome) {
        let p = &mut self.procs[proc];
        p.rm = welcome.rm;
        let (restart, successor) = (welcome.restart.clone(), welcome.successor.clone());
        p.welcome = Some(welcome);
        p.quiesced = None;
        p.route += 1;
        let route = RouteId(p.route);
        if let Some(successor) = successor {
            self.succeed(proc, &successor);
        }
        if let Some(restart) = restart {
            self.begin_again(proc, &restart);
        }
        self.each_link(proc, &LinkEvent::RouteUp(route));
    }
}
