//! What a task knows of the links with its peers: positions, lists of marks, and messages that are
//! held back.

use super::mark::{Mark, MarkKey};
use super::unsettled::UnsettledMarks;
use super::{MARKS_MAX, STAMP_MAX};
use crate::ids::Tid;
use crate::link::is_later_incarnation;
use indexmap::IndexMap;
use rustc_hash::FxBuildHasher;
use std::collections::{BTreeSet, VecDeque};

/// Number of a list that is not answered, because its teller was restarted.
pub(super) const NO_LIST_ID: u64 = 0;

/// Position on a link: all fragments below number `end_seq` of this incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    pub incarnation: u16,
    pub end_seq: u64,
}

impl Position {
    /// Position of a link on which nothing was sent in this incarnation.
    pub(super) fn start_of(incarnation: u16) -> Self {
        Self {
            incarnation,
            end_seq: 1,
        }
    }

    /// True if the messages up to `other` end at this position or before.
    pub(super) fn reaches(self, other: Self) -> bool {
        if self.incarnation == other.incarnation {
            self.end_seq >= other.end_seq
        } else {
            // Messages of an earlier incarnation are void.
            is_later_incarnation(self.incarnation, other.incarnation)
        }
    }
}

/// Something that waits behind a message that is held back.
#[derive(Clone, Debug)]
pub(super) enum Held<M> {
    Message {
        stamp: u64,
        message: M,
    },
    List {
        id: u64,
        stamp: u64,
        marks: Vec<Mark>,
    },
    /// A message of the runtimes that was handled when it arrived.
    Handled,
    /// The link began again.
    Reset,
}

/// State of a peer whose messages are held back.
#[derive(Clone, Debug)]
pub(super) struct Hold<M> {
    /// Number, stamp and end of the list whose marks are awaited. The list itself counts as passed
    /// on when they have arrived, because marks that name its position cover these marks.
    pub(super) list_id: u64,
    pub(super) list_stamp: u64,
    pub(super) list_position: Position,
    pub(super) awaited_marks: Vec<Mark>,
    /// Number of calls of [`super::CausalOrder::age_holds`] since the hold began.
    pub(super) age: u32,
    pub(super) queue: VecDeque<(Position, Held<M>)>,
}

impl<M> Hold<M> {
    /// True if nothing that has this stamp or a smaller one is held back.
    fn is_later_than(&self, stamp: u64) -> bool {
        let is_later = |held: &Held<M>| match held {
            Held::Message { stamp: s, .. } | Held::List { stamp: s, .. } => *s > stamp,
            Held::Handled | Held::Reset => true,
        };
        self.list_stamp > stamp && self.queue.iter().all(|(_, held)| is_later(held))
    }
}

#[derive(Clone, Debug)]
pub(super) struct Peer<M> {
    // ---- received from the peer
    /// Everything up to here was passed on.
    pub(super) passed: Position,
    /// Incarnation of the link, whether or not its messages were passed on.
    pub(super) link_incarnation: u16,
    /// Smallest stamp with which the next message is sorted.
    pub(super) last_stamp: u64,
    /// True if `last_stamp` belongs to the earlier incarnation.
    pub(super) has_stamp_floor: bool,
    /// Stamp of the last message that was passed on in this incarnation.
    pub(super) passed_stamp: u64,
    /// Largest stamp about which the peer was asked in this incarnation, and up to which it has
    /// answered.
    pub(super) asked_stamp: u64,
    pub(super) answered_stamp: u64,
    /// Largest stamp up to which messages are awaited no longer, because the peer did not answer.
    pub(super) given_up_stamp: u64,
    /// Marks of the peer's last list that name other receivers.
    pub(super) heard_marks: Vec<Mark>,
    /// Stamp of the peer's last list in this incarnation. Messages of the peer with smaller stamps
    /// that the list does not name are settled.
    pub(super) list_stamp: u64,
    pub(super) hold: Option<Hold<M>>,
    pub(super) has_ended: bool,
    /// Marks of this peer's messages that were settled after its end. Others may tell them still;
    /// without this memory tasks would remind each other of a settled mark again and again.
    settled_since_end: BTreeSet<(MarkKey, u64, u64)>,
    // ---- sent to the peer
    /// Version of the own marks with which `told_marks` was compared last.
    pub(super) told_version: u64,
    /// Marks of the last list that was told to the peer, without those that name the peer alone;
    /// sorted by key.
    pub(super) told_marks: Vec<Mark>,
    pub(super) last_list_id: u64,
    /// Number of the last list that may have named the peer, while the peer has not answered it.
    pub(super) unanswered_list_id: Option<u64>,
    /// Marks that name the peer, in lists that it has not answered.
    pub(super) unanswered_marks: UnsettledMarks,
}

impl<M> Peer<M> {
    /// Creates the state of a peer with which nothing was exchanged yet.
    fn new(start: Position) -> Self {
        Self {
            passed: start,
            link_incarnation: start.incarnation,
            last_stamp: 0,
            has_stamp_floor: false,
            passed_stamp: 0,
            asked_stamp: 0,
            answered_stamp: 0,
            given_up_stamp: 0,
            heard_marks: Vec::new(),
            list_stamp: 0,
            hold: None,
            has_ended: false,
            settled_since_end: BTreeSet::new(),
            told_version: 0,
            told_marks: Vec::new(),
            last_list_id: NO_LIST_ID,
            unanswered_list_id: None,
            unanswered_marks: UnsettledMarks::default(),
        }
    }

    /// Records that a message up to `position` is passed on. Returns its stamp: stamps of a peer
    /// fall only after a restart, or if the peer violates the protocol.
    #[inline]
    pub(super) fn pass_message(&mut self, position: Position, stamp: u64) -> u64 {
        let stamp = stamp.min(STAMP_MAX);
        self.passed_stamp = stamp.max(self.passed_stamp);
        self.last_stamp = stamp.max(self.last_stamp);
        self.passed = position;
        self.last_stamp
    }

    /// True if everything that the mark of this peer names for this task was passed on, or can no
    /// longer arrive.
    pub(super) fn has_passed(&self, mark: &Mark) -> bool {
        if is_later_incarnation(mark.incarnation, self.link_incarnation) {
            return false;
        }
        let is_exact = !mark.is_folded() && mark.incarnation == self.passed.incarnation;
        if is_exact && self.passed.end_seq >= mark.end_seq {
            return true;
        }
        // A message of an earlier incarnation that the peer retains is sent again before anything
        // that is newer.
        let has_passed_stamp = !is_exact
            && self.passed.incarnation == self.link_incarnation
            && self.passed_stamp >= mark.stamp;
        let has_arrived =
            self.has_ended || self.answered_stamp.max(self.given_up_stamp) >= mark.stamp;
        let is_held = || {
            let hold = self.hold.as_ref();
            hold.is_some_and(|hold| !hold.is_later_than(mark.stamp))
        };
        (has_passed_stamp || has_arrived) && !is_held()
    }

    /// Remembers that the message of a mark of this peer has arrived, if the peer has ended: it
    /// will not say so itself.
    pub(super) fn remember_settled(&mut self, mark: &Mark) {
        if self.has_ended {
            if self.settled_since_end.len() >= MARKS_MAX {
                self.settled_since_end.clear();
            }
            self.settled_since_end.insert(exact_key(mark));
        }
    }

    /// True if the peer has told a list that would name the mark if its message had not arrived, or
    /// if it was settled after the end of the peer.
    pub(super) fn has_settled(&self, mark: &Mark) -> bool {
        if self.has_ended {
            // Marks of an ended task say nothing about a new task with the same tid.
            return self.settled_since_end.contains(&exact_key(mark));
        }
        mark.stamp <= self.list_stamp
            && !is_later_incarnation(mark.incarnation, self.link_incarnation)
    }

    /// Forgets what belongs to the earlier incarnation of the link.
    pub(super) fn begin_incarnation(&mut self, incarnation: u16) {
        self.link_incarnation = incarnation;
        self.settled_since_end.clear();
        (self.asked_stamp, self.answered_stamp, self.given_up_stamp) = (0, 0, 0);
    }

    /// Records that everything of the earlier incarnation was passed on. Its messages may still
    /// wait for a look, so those of the new incarnation get no smaller stamps for now.
    pub(super) fn pass_reset(&mut self, position: Position) {
        (self.passed, self.passed_stamp, self.list_stamp) = (position, 0, 0);
        self.has_stamp_floor = true;
    }
}

fn exact_key(mark: &Mark) -> (MarkKey, u64, u64) {
    (mark.key(), mark.end_seq, mark.stamp)
}

/// The peers of a task. A peer is created when it is first named.
#[derive(Clone, Debug)]
pub(super) struct Peers<M> {
    peers_by_tid: IndexMap<Tid, Peer<M>, FxBuildHasher>,
    start: Position,
}

impl<M> Peers<M> {
    pub(super) fn new(incarnation: u16) -> Self {
        Self {
            peers_by_tid: IndexMap::default(),
            start: Position::start_of(incarnation),
        }
    }

    /// Returns the position of a link that is not used yet.
    pub(super) fn start(&self) -> Position {
        self.start
    }

    /// Lets new links begin with this incarnation, because the task was restarted.
    pub(super) fn begin_incarnation(&mut self, incarnation: u16) {
        self.start = Position::start_of(incarnation);
    }

    pub(super) fn get(&self, peer: &Tid) -> Option<&Peer<M>> {
        self.peers_by_tid.get(peer)
    }

    pub(super) fn get_mut(&mut self, peer: &Tid) -> Option<&mut Peer<M>> {
        self.peers_by_tid.get_mut(peer)
    }

    /// Returns the state of a peer, which is created if necessary.
    #[inline]
    pub(super) fn entry(&mut self, peer: Tid) -> &mut Peer<M> {
        let mut unknown_index = usize::MAX;
        self.entry_at(&mut unknown_index, peer)
    }

    /// As [`Peers::entry`]. `index` is the index at which the peer was found last; any number if
    /// the peer was not searched for yet.
    #[inline]
    pub(super) fn entry_at(&mut self, index: &mut usize, peer: Tid) -> &mut Peer<M> {
        let peers = &mut self.peers_by_tid;
        if peers.get_index(*index).is_none_or(|(tid, _)| *tid != peer) {
            let start = self.start;
            let entry = peers.entry(peer);
            *index = entry.index();
            return entry.or_insert_with(|| Peer::new(start));
        }
        &mut peers[*index]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Tid, &Peer<M>)> {
        self.peers_by_tid.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&Tid, &mut Peer<M>)> {
        self.peers_by_tid.iter_mut()
    }

    pub(super) fn remove(&mut self, peer: &Tid) {
        self.peers_by_tid.swap_remove(peer);
    }
}
