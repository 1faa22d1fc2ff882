//! What a library does whose process was started again: from a checkpoint of its job, or in the place of one that has ended.

use super::{Core, Open};
use sempa_proto::frame::encode_control;
use sempa_proto::link::Link;
use sempa_proto::migration::Timeline;
use sempa_proto::task::{Restart, ToDaemon, Welcome};
use sempa_proto::{Micros, RequestId, Tid};

/// Numbers of requests begin at that of the timeline, so many bits higher.
const REQUEST_BITS: u32 = 40;

/// The timeline of a new process, and the number before that of its first request. One in the place of another that has ended
/// begins anew with everybody, and answers to what the other one had asked are not for it.
pub(super) fn beginning(welcome: &Welcome) -> (u16, RequestId) {
    let line = welcome.restart.as_ref().map_or(0, |restart| restart.timeline.line);
    (line, RequestId(u64::from(line) << REQUEST_BITS))
}

impl Core {
    /// The timeline of the conversation with a peer.
    pub(in crate::runtime) fn line_with(&self, peer: Tid) -> u16 {
        self.links.get(&peer).map_or(self.line, Link::line)
    }

    /// True if this is the beginning of a later timeline of a peer, while a connection of their own may still bring what the
    /// process said that was there before. It has to wait; the peer says it again.
    pub(super) fn hears_out(&mut self, now: Micros, peer: Tid, line: u16) -> bool {
        if self.direct.leads_to(peer) && self.links.get(&peer).is_some_and(|link| link.is_before(line)) {
            self.hear_out(now, peer, false);
        }
        self.direct.leads_to(peer) && self.links.get(&peer).is_some_and(|link| link.is_before(line))
    }

    /// The program is about to be asked to end, or is not any more. What it has been sent so far it can receive.
    pub(super) fn take_nothing(&mut self, now: Micros, nothing: bool) {
        self.takes_nothing = nothing;
        let peers: Vec<Tid> = self.links.keys().copied().collect();
        for peer in peers {
            self.drain_peer(now, peer);
            self.links.get_mut(&peer).into_iter().for_each(|link| link.refuse(nothing));
            self.pump_link(now, peer);
        }
        if nothing {
            let word = encode_control(&ToDaemon::TakesNothing).expect("one word");
            self.outbox.push(word);
        }
        self.news += 1;
    }

    /// This process was started again from a checkpoint. Who was with it in there knows what it knows; whoever else it
    /// talked to has gone on, or does not exist.
    pub(super) fn begin_again(&mut self, restart: &Restart) {
        let Timeline { line, .. } = &restart.timeline;
        self.line = *line;
        for (peer, link) in self.links.iter_mut().filter(|(_, link)| !link.is_gone()) {
            let before = restart.timeline.before(*peer);
            // What it would have heard from the peer next.
            before.map(|before| link.follow(before));
            link.begin_timeline(*line, before.is_some());
        }
        // A resource manager that was asked before does not know of it.
        self.set_rm(None);
        for id in &restart.again {
            if let Some(Open { frame, reply: None }) = self.requests.get(id) {
                self.outbox.push(frame.clone());
            }
        }
    }
}
