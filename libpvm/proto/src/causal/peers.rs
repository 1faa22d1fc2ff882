//! State of a task's links with its peers: positions, lists of marks, and messages that are held
//! back.

use super::STAMP_MAX;
use super::mark::{Mark, OrderMessage};
use crate::ids::Tid;
use crate::link::is_later_incarnation;
use std::collections::{BTreeMap, VecDeque};

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
    Message { stamp: u64, message: M },
    Order(OrderMessage),
}

/// State of a peer whose messages are held back.
#[derive(Clone, Debug)]
pub(super) struct Hold<M> {
    /// Number and end of the list whose marks are awaited. The list itself counts as passed on when
    /// they have arrived, because marks that name its position cover these marks.
    pub(super) list_id: u64,
    pub(super) list_position: Position,
    pub(super) awaited_marks: Vec<Mark>,
    pub(super) queue: VecDeque<(Position, Held<M>)>,
}

#[derive(Clone, Debug)]
pub(super) struct Peer<M> {
    // ---- received from the peer
    /// Everything up to here was passed on.
    pub(super) passed: Position,
    pub(super) last_stamp: u64,
    /// Marks of the peer's last list that name other receivers.
    pub(super) heard_marks: Vec<Mark>,
    pub(super) hold: Option<Hold<M>>,
    pub(super) has_ended: bool,
    // ---- sent to the peer
    /// Version of the own marks with which `told_marks` was compared last.
    pub(super) told_version: u64,
    /// Marks of the last list that was told to the peer, without those that name the peer; sorted
    /// by pair.
    pub(super) told_marks: Vec<Mark>,
    pub(super) last_list_id: u64,
    /// Number of the last list that named the peer, while the peer has not answered it.
    pub(super) unanswered_list_id: Option<u64>,
}

impl<M> Peer<M> {
    /// Creates the state of a peer with which nothing was exchanged yet.
    fn new(start: Position) -> Self {
        Self {
            passed: start,
            last_stamp: 0,
            heard_marks: Vec::new(),
            hold: None,
            has_ended: false,
            told_version: 0,
            told_marks: Vec::new(),
            last_list_id: 0,
            unanswered_list_id: None,
        }
    }

    /// Records that a message up to `position` is passed on. Returns its stamp: stamps of a peer
    /// fall only after a restart, or if the peer violates the protocol.
    #[inline]
    pub(super) fn pass_message(&mut self, position: Position, stamp: u64) -> u64 {
        let stamp = stamp.min(STAMP_MAX).max(self.last_stamp);
        (self.last_stamp, self.passed) = (stamp, position);
        stamp
    }
}

/// The peers of a task. A peer is created when it is first named.
#[derive(Clone, Debug)]
pub(super) struct Peers<M> {
    peers_by_tid: BTreeMap<Tid, Peer<M>>,
    start: Position,
}

impl<M> Peers<M> {
    pub(super) fn new(incarnation: u16) -> Self {
        Self {
            peers_by_tid: BTreeMap::new(),
            start: Position::start_of(incarnation),
        }
    }

    /// Returns the position of a link that is not used yet. What was sent to an earlier incarnation
    /// of this task will never arrive, so no message waits for it.
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
        let start = self.start;
        self.peers_by_tid
            .entry(peer)
            .or_insert_with(|| Peer::new(start))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Tid, &Peer<M>)> {
        self.peers_by_tid.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&Tid, &mut Peer<M>)> {
        self.peers_by_tid.iter_mut()
    }

    pub(super) fn remove(&mut self, peer: &Tid) {
        self.peers_by_tid.remove(peer);
    }
}
