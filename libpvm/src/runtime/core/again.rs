//! What a library does whose process was started again from a checkpoint.

use super::{Core, Open};
use sempa_proto::Tid;
use sempa_proto::link::Link;
use sempa_proto::migration::Timeline;
use sempa_proto::task::Restart;

impl Core {
    /// The timeline of the conversation with a peer.
    pub(in crate::runtime) fn line_with(&self, peer: Tid) -> u16 {
        self.links.get(&peer).map_or(self.line, Link::line)
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
        for id in &restart.again {
            if let Some(Open { frame, reply: None }) = self.requests.get(id) {
                self.outbox.push(frame.clone());
            }
        }
    }
}
