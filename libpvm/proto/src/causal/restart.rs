//! Causal order after a restart from a checkpoint.

use super::mark::Mark;
use super::order::CausalOrder;
use super::peers::{Held, NO_LIST_ID, Peer, Position};
use crate::ids::Tid;
use crate::link::is_later_incarnation;
use std::collections::BTreeSet;

/// A restart of tasks from a checkpoint. The links between these tasks keep their numbers in the
/// new incarnation.
#[derive(Clone, Debug)]
pub struct Restart {
    pub incarnation: u16,
    /// The tasks that were restored, including this one.
    pub members: BTreeSet<Tid>,
}

impl Restart {
    /// Gives a mark of the checkpoint the new incarnation if it is about restored tasks.
    fn renumber(&self, mark: &mut Mark) {
        if !self.members.contains(&mark.sender) {
            return;
        }
        if is_later_incarnation(self.incarnation, mark.sender_incarnation) {
            mark.sender_incarnation = self.incarnation;
        }
        let has_link_number = mark.is_folded() || self.members.contains(&mark.receiver);
        if has_link_number && is_later_incarnation(self.incarnation, mark.incarnation) {
            mark.incarnation = self.incarnation;
        }
    }

    fn renumber_all(&self, marks: &mut [Mark]) {
        marks.iter_mut().for_each(|mark| self.renumber(mark));
    }
}

impl<M> CausalOrder<M> {
    /// Records that the link with `peer` began again in a new incarnation at this end or at both.
    /// Messages that were received in the earlier incarnation are delivered first, in their order.
    pub fn handle_link_reset(&mut self, peer: Tid, incarnation: u16) {
        let own_tid = self.own_tid;
        self.marks
            .retain(|mark| (mark.sender, mark.receiver) != (own_tid, peer));
        // The message is void that would be held back behind these marks.
        for mark in self.drop_unanswered_list(peer).iter() {
            self.marks.add(mark);
        }
        self.answers.retain(|(receiver, _)| *receiver != peer);
        let peer_state = self.peers.entry(peer);
        (peer_state.told_version, peer_state.has_ended) = (0, false);
        if !std::mem::take(&mut peer_state.told_marks).is_empty() {
            // The peer may still receive the last list, so it must receive a newer one some time.
            self.requested_lists.insert(peer);
        }
        let has_hold = peer_state.hold.is_some();
        reset_received(peer_state, Position::start_of(incarnation));
        if has_hold {
            self.held_count += 1;
        } else {
            self.orphan_marks_of(peer);
        }
        self.has_stamp_floors = true;
        self.drop_stamp_floors();
        self.ask_awaited();
        self.release_held();
    }

    /// Continues after a restart from a checkpoint, from which all tasks in `restart` were
    /// restored. The owner calls [`CausalOrder::handle_link_reset`] for each link that began again.
    pub fn roll_back(&mut self, restart: Restart) {
        let incarnation = restart.incarnation;
        self.marks.change(|mark| restart.renumber(mark));
        for wait in self.waits.values_mut() {
            restart.renumber_all(&mut wait.marks);
        }
        self.peers.begin_incarnation(incarnation);
        let start = self.peers.start();
        let mut reset_hold_count = 0;
        for (peer, peer_state) in self.peers.iter_mut() {
            peer_state
                .unanswered_marks
                .change(|mark| restart.renumber(mark));
            for marks in [&mut peer_state.told_marks, &mut peer_state.heard_marks] {
                restart.renumber_all(marks);
                marks.sort_by_key(Mark::key);
            }
            if let Some(hold) = &mut peer_state.hold {
                restart.renumber_all(&mut hold.awaited_marks);
            }
            if restart.members.contains(peer) {
                peer_state.begin_incarnation(incarnation);
                peer_state.passed.incarnation = incarnation;
                if let Some(hold) = &mut peer_state.hold {
                    hold.list_position.incarnation = incarnation;
                    for (position, _) in &mut hold.queue {
                        position.incarnation = incarnation;
                    }
                }
            } else if !peer_state.has_ended {
                reset_hold_count += usize::from(peer_state.hold.is_some());
                reset_received(peer_state, start);
            }
        }
        self.held_count += reset_hold_count;
        self.has_stamp_floors = true;
        self.drop_stamp_floors();
        self.ask_awaited();
        self.release_held();
    }
}

/// Begins a new incarnation of what is received from a peer, behind what is held back.
fn reset_received<M>(peer_state: &mut Peer<M>, start: Position) {
    peer_state.begin_incarnation(start.incarnation);
    let Some(hold) = &mut peer_state.hold else {
        return peer_state.pass_reset(start);
    };
    hold.list_id = NO_LIST_ID;
    for (_, held) in &mut hold.queue {
        if let Held::List { id, .. } = held {
            *id = NO_LIST_ID;
        }
    }
    hold.queue.push_back((start, Held::Reset));
}
