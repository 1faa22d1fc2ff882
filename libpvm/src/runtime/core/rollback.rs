//! Rolls back the links of a task that was restarted from a checkpoint.

use super::{Core, OpenRequest};
use sempa_proto::Tid;
use sempa_proto::causal::Restart;
use sempa_proto::link::Link;
use sempa_proto::migration::RestartGroup;
use sempa_proto::task::RestartInfo;

impl Core {
    /// Returns the incarnation of the link with a peer.
    pub(in crate::runtime) fn incarnation_with(&self, peer: Tid) -> u16 {
        self.links
            .get(&peer)
            .map_or(self.incarnation, Link::incarnation)
    }

    /// Continues after a restart from a checkpoint: begins the new incarnation on all links, and
    /// repeats the requests that the daemon lists as lost.
    ///
    /// Links with peers that were restarted from the same checkpoint keep their sequence numbers,
    /// because both ends have the state of the checkpoint. All other links start again at sequence
    /// number 1.
    pub(super) fn roll_back(&mut self, restart: &RestartInfo) {
        let RestartGroup { incarnation, .. } = &restart.restart_group;
        self.incarnation = *incarnation;
        let mut reset_peers = Vec::new();
        for (peer, link) in self
            .links
            .iter_mut()
            .filter(|(_, link)| !link.is_peer_gone())
        {
            let previous_incarnation = restart.restart_group.incarnation_at_checkpoint(*peer);
            // The link first accepts the incarnation that the peer had at the checkpoint, because
            // the peer would have announced that incarnation next.
            let own_incarnation = link.incarnation();
            previous_incarnation
                .map(|previous_incarnation| link.accept_incarnation(previous_incarnation));
            if previous_incarnation.is_none() || link.incarnation() != own_incarnation {
                reset_peers.push(*peer);
            }
            link.begin_incarnation(*incarnation, previous_incarnation.is_some());
        }
        let members = restart.restart_group.members.iter().map(|(tid, _)| *tid);
        self.order.roll_back(Restart {
            incarnation: *incarnation,
            members: members.chain([self.own_tid]).collect(),
        });
        for peer in reset_peers {
            self.reset_order(peer);
        }
        for id in &restart.requests_to_repeat {
            if let Some(OpenRequest {
                encoded_request: frame,
                reply: None,
            }) = self.open_requests.get(id)
            {
                self.outbox.push_frame(frame.clone());
            }
        }
    }
}
