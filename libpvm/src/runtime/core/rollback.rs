//! Rollback of a task that was restarted from a checkpoint.

use super::{Core, OpenRequest};
use sempa_proto::Tid;
use sempa_proto::link::Link;
use sempa_proto::migration::Timeline;
use sempa_proto::task::Restart;

impl Core {
    /// Returns the incarnation of the link with a peer.
    pub(in crate::runtime) fn incarnation_with(&self, peer: Tid) -> u16 {
        self.links.get(&peer).map_or(self.incarnation, Link::line)
    }

    /// Continues after a restart from a checkpoint. Peers that were restarted from the same
    /// checkpoint have consistent link states. All other peers have continued meanwhile, or do not
    /// exist.
    pub(super) fn roll_back(&mut self, restart: &Restart) {
        let Timeline { line, .. } = &restart.timeline;
        self.incarnation = *line;
        for (peer, link) in self.links.iter_mut().filter(|(_, link)| !link.is_gone()) {
            let before = restart.timeline.before(*peer);
            // The incarnation at the checkpoint, which the peer would have announced next.
            before.map(|before| link.follow(before));
            link.begin_timeline(*line, before.is_some());
        }
        for id in &restart.again {
            if let Some(OpenRequest { frame, reply: None }) = self.requests.get(id) {
                self.outbox.push(frame.clone());
            }
        }
    }
}
