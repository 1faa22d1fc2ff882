//! Waits for messages: of held messages of peers, of everything that the daemon sends, and of
//! questions of the daemon; and the end of a wait whose messages do not arrive.

use super::mark::{Mark, OrderMessage, Past};
use super::order::CausalOrder;
use super::{HOLD_AGE_MAX, STAMP_MAX};
use crate::ids::Tid;
use std::collections::BTreeSet;

/// Number of the wait of everything that the daemon sends.
const DAEMON_WAIT: u64 = 0;

/// Something besides the messages of a peer that waits for messages.
#[derive(Clone, Debug)]
pub(super) struct Wait {
    pub(super) marks: Vec<Mark>,
    /// Number of calls of [`CausalOrder::age_holds`] since the wait began.
    age: u32,
}

impl<M> CausalOrder<M> {
    /// True if everything that the mark names for this task was passed on, or can no longer arrive.
    pub(super) fn has_passed(&self, mark: &Mark) -> bool {
        if mark.sender == self.own_tid {
            return true;
        }
        match self.peers.get(&mark.sender) {
            Some(peer_state) => peer_state.has_passed(mark),
            None => {
                // Nothing was sent on a link that does not exist yet.
                !mark.is_folded()
                    && mark.incarnation == self.peers.start().incarnation
                    && mark.end_seq <= 1
            }
        }
    }

    /// Returns the marks whose messages have not arrived. Asks the senders of those that positions
    /// alone cannot settle.
    pub(super) fn keep_awaited(&mut self, marks: Vec<Mark>) -> Vec<Mark> {
        let mut awaited_marks = marks;
        awaited_marks.retain(|mark| !self.has_passed(mark));
        for mark in &awaited_marks {
            let peer_state = self.peers.entry(mark.sender);
            if mark.is_folded() || mark.incarnation != peer_state.link_incarnation {
                self.ask(mark);
            }
        }
        awaited_marks
    }

    /// Asks the sender of a mark to answer when it has sent everything that the mark names.
    fn ask(&mut self, mark: &Mark) {
        let peer_state = self.peers.entry(mark.sender);
        if peer_state.asked_stamp < mark.stamp.max(1) {
            peer_state.asked_stamp = mark.stamp.max(1);
            let question = OrderMessage::Ask {
                stamp: peer_state.asked_stamp,
                wants_list: false,
            };
            self.answers.push_back((mark.sender, question));
        }
    }

    /// Asks the senders of all messages that are awaited. Called when a message is awaited for a
    /// while: the answer, or the news that the sender has ended, ends the wait even if the message
    /// does not exist.
    pub fn ask_awaited(&mut self) {
        for mark in self.awaited_marks() {
            self.ask(&mark);
        }
    }

    /// Returns the marks whose messages are awaited.
    fn awaited_marks(&self) -> Vec<Mark> {
        let holds = self.holding_peers.iter().filter_map(|peer| {
            let hold = self.peers.get(peer)?.hold.as_ref()?;
            Some(&hold.awaited_marks)
        });
        let waits = self.waits.values().map(|wait| &wait.marks);
        let marks = holds.chain(waits).flatten();
        marks
            .filter(|mark| !self.has_passed(mark))
            .copied()
            .collect()
    }

    /// True if anything waits for messages.
    #[inline]
    pub fn is_awaiting(&self) -> bool {
        !self.holding_peers.is_empty() || !self.waits.is_empty()
    }

    /// Handles the answer of a peer to a question. All messages that it had sent up to `clock` have
    /// arrived.
    pub(super) fn handle_all_sent(&mut self, peer: Tid, stamp: u64, clock: u64) {
        let peer_state = self.peers.entry(peer);
        peer_state.given_up_stamp = 0;
        let stamp = stamp.min(peer_state.asked_stamp);
        peer_state.answered_stamp = peer_state.answered_stamp.max(stamp.min(clock));
        if stamp == peer_state.asked_stamp {
            // A mark that is heard later with a larger stamp needs another question.
            peer_state.asked_stamp = peer_state.answered_stamp;
        }
        // A mark with a larger stamp than the sender's clock names messages that do not exist.
        let holds = self.peers.iter_mut().filter_map(|(_, p)| p.hold.as_mut());
        let waits = self.waits.values_mut().map(|wait| &mut wait.marks);
        let all_marks = holds.map(|hold| &mut hold.awaited_marks).chain(waits);
        for mark in all_marks.flatten() {
            if mark.sender == peer && mark.stamp > clock && mark.stamp <= stamp {
                mark.stamp = clock;
            }
        }
    }

    /// Gives up what has been awaited for [`HOLD_AGE_MAX`] calls. Returns the marks whose messages
    /// have not arrived. A sender that does not answer cannot hold messages of others back for
    /// ever.
    ///
    /// A wait ages only if it awaits a message that has not arrived. If each wait awaits messages
    /// that are held back themselves, all waits age.
    pub fn age_holds(&mut self) -> Vec<Mark> {
        let is_root = |marks: &Vec<Mark>| {
            let mut awaited_marks = marks.iter().filter(|mark| !self.has_passed(mark));
            awaited_marks.any(|mark| !self.holding_peers.contains(&mark.sender))
        };
        let holding_peers = self.holding_peers.iter().copied();
        let hold_of = |peer: &Tid| self.peers.get(peer).and_then(|peer| peer.hold.as_ref());
        let is_root_peer =
            |peer: &Tid| hold_of(peer).is_none_or(|hold| is_root(&hold.awaited_marks));
        let root_peers: BTreeSet<Tid> = holding_peers.filter(is_root_peer).collect();
        let roots = self.waits.iter().filter(|(_, wait)| is_root(&wait.marks));
        let root_waits: BTreeSet<u64> = roots.map(|(number, _)| *number).collect();
        let has_no_root = root_peers.is_empty() && root_waits.is_empty();
        let mut overdue_marks = Vec::new();
        let mut age_marks = |age: &mut u32, marks: &mut Vec<Mark>| {
            *age += 1;
            if *age > HOLD_AGE_MAX {
                overdue_marks.append(marks);
            }
        };
        for (peer, peer_state) in self.peers.iter_mut() {
            if let Some(hold) = &mut peer_state.hold
                && (has_no_root || root_peers.contains(peer))
            {
                age_marks(&mut hold.age, &mut hold.awaited_marks);
            }
        }
        for (number, wait) in &mut self.waits {
            if has_no_root || root_waits.contains(number) {
                age_marks(&mut wait.age, &mut wait.marks);
            }
        }
        overdue_marks.retain(|mark| !self.has_passed(mark));
        // Other messages do not wait for the same ones once more.
        for mark in &overdue_marks {
            let peer_state = self.peers.entry(mark.sender);
            peer_state.given_up_stamp = peer_state.given_up_stamp.max(mark.stamp);
        }
        self.release_held();
        overdue_marks
    }

    // ---- the daemon

    /// Accepts the past of what the task's daemon sends next. What follows waits while
    /// [`CausalOrder::is_past_awaited`].
    pub fn accept_past(&mut self, past: Past) {
        let own_marks = self.accept_past_of(past);
        let marks = self.keep_awaited(own_marks);
        if !marks.is_empty() {
            self.waits.insert(DAEMON_WAIT, Wait { marks, age: 0 });
        }
    }

    /// True if messages have not arrived that precede what the daemon sends next.
    pub fn is_past_awaited(&mut self) -> bool {
        self.is_waiting_for_number(DAEMON_WAIT)
    }

    /// Accepts a question whether these messages have arrived; see
    /// [`CausalOrder::next_arrived_wait`].
    pub fn await_marks(&mut self, wait_number: u64, marks: Vec<Mark>) {
        let marks = self.keep_awaited(marks);
        let wait = Wait { marks, age: 0 };
        self.waits.insert(wait_number, wait);
    }

    /// Returns the number of a question whose messages have arrived.
    pub fn next_arrived_wait(&mut self) -> Option<u64> {
        let numbers: Vec<u64> = self.waits.keys().copied().collect();
        let mut questions = numbers.into_iter().filter(|number| *number != DAEMON_WAIT);
        questions.find(|number| !self.is_waiting_for_number(*number))
    }

    fn is_waiting_for_number(&mut self, wait_number: u64) -> bool {
        let Some(wait) = self.waits.get(&wait_number) else {
            return false;
        };
        let is_waiting = wait.marks.iter().any(|mark| !self.has_passed(mark));
        if !is_waiting {
            self.waits.remove(&wait_number);
        }
        is_waiting
    }

    /// Forgets all waits, because nothing else can arrive.
    pub(super) fn end_waits(&mut self) {
        self.waits.clear();
    }

    /// Accepts the past of this task's spawn.
    pub fn accept_spawn(&mut self, past: Past) {
        self.accept_past_of(past);
    }

    /// Adds the marks of a past. Returns those that may name this task. Nobody says later that the
    /// others are settled, so this task asks.
    fn accept_past_of(&mut self, Past { clock, marks }: Past) -> Vec<Mark> {
        // The last message before the past may have this stamp. Later messages need a larger one.
        self.clock = self.clock.max(clock.min(STAMP_MAX) + 1);
        let own_marks = self.hear(Tid::NONE, 0, marks);
        self.orphan_marks_of(Tid::NONE);
        own_marks
    }
}
