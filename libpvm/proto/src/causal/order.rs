//! The causal order of all messages of one task.

use super::arrivals::Arrivals;
use super::mark::{Mark, MarkKey, OrderMessage, Past, fold};
use super::peers::{Peer, Peers, Position};
use super::unsettled::UnsettledMarks;
use super::waits::Wait;
use super::{EXACT_MARKS_MAX, FOLD_MARKS_MIN, MARKS_BEFORE_PROMPT_ACK};
use crate::ids::Tid;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Number of refreshes of lists after which a sender is asked about a mark that it has told itself.
const TOLD_AGE_MAX: u32 = 8;

/// The causal order of a task's messages. `M` is a message of a program.
///
/// The owner calls, for each message that it sends, [`CausalOrder::list_for`],
/// [`CausalOrder::next_stamp`] and [`CausalOrder::record_sent`]; for each message that a link
/// delivers, [`CausalOrder::accept_message`] or [`CausalOrder::accept_order_message`]. Then it
/// sends the answers that [`CausalOrder::next_answer`] returns, looks at its rings while
/// [`CausalOrder::is_waiting_for_look`], and takes the messages from
/// [`CausalOrder::next_delivery`].
#[derive(Clone, Debug)]
pub struct CausalOrder<M> {
    pub(super) own_tid: Tid,
    /// Number of marks of one sender above which a list has one folded mark for them.
    fold_marks_min: usize,
    pub(super) clock: u64,
    pub(super) marks: UnsettledMarks,
    /// Stamp of the last message of this task that got a mark.
    last_own_stamp: u64,
    /// While a message is sent to several tasks, the stamp of all copies.
    pub(super) multicast_stamp: Option<u64>,
    pub(super) peers: Peers<M>,
    /// Peers whose messages are held back.
    pub(super) holding_peers: BTreeSet<Tid>,
    pub(super) held_count: usize,
    /// True if messages were released since the last call of [`CausalOrder::take_released`].
    pub(super) was_released: bool,
    pub(super) arrivals: Arrivals<M>,
    /// Messages to the runtimes of peers.
    pub(super) answers: VecDeque<(Tid, OrderMessage)>,
    /// Number of peers that have not answered a list that may have named them.
    pub(super) unanswered_count: usize,
    /// Marks of which nobody will say that their messages have arrived: their teller has ended, or
    /// they came from a service.
    pub(super) orphaned_marks: Vec<Mark>,
    /// True if a mark was settled that peers were told, since the last call of
    /// [`CausalOrder::next_refreshed_list`].
    pub(super) has_stale_lists: bool,
    /// Number of refreshes of lists since which each mark of another sender is unsettled.
    rumors: BTreeMap<MarkKey, u32>,
    /// True while [`CausalOrder::next_refreshed_list`] has more to return.
    is_refreshing: bool,
    /// Peers that [`CausalOrder::next_refreshed_list`] has found and not returned yet.
    stale_peers: Vec<Tid>,
    /// Peers that have asked for a list.
    pub(super) requested_lists: BTreeSet<Tid>,
    /// Waits of others than held messages, by number.
    pub(super) waits: BTreeMap<u64, Wait>,
    /// True if a peer has a stamp floor.
    pub(super) has_stamp_floors: bool,
}

impl<M> CausalOrder<M> {
    /// Creates the order of a task whose new links begin with this incarnation.
    pub fn new(own_tid: Tid, incarnation: u16) -> Self {
        Self {
            own_tid,
            fold_marks_min: FOLD_MARKS_MIN,
            clock: 0,
            marks: UnsettledMarks::default(),
            last_own_stamp: 0,
            multicast_stamp: None,
            peers: Peers::new(incarnation),
            holding_peers: BTreeSet::new(),
            held_count: 0,
            was_released: false,
            arrivals: Arrivals::default(),
            answers: VecDeque::new(),
            unanswered_count: 0,
            orphaned_marks: Vec::new(),
            has_stale_lists: false,
            rumors: BTreeMap::new(),
            is_refreshing: false,
            stale_peers: Vec::new(),
            requested_lists: BTreeSet::new(),
            waits: BTreeMap::new(),
            has_stamp_floors: false,
        }
    }

    /// Changes the number of marks of one sender above which a list has one folded mark for them,
    /// which is [`FOLD_MARKS_MIN`]. With few tasks there are few marks.
    pub fn set_fold_marks_min(&mut self, fold_marks_min: usize) {
        self.fold_marks_min = fold_marks_min;
    }

    // ---- sending

    /// Returns the stamp of the next message.
    #[inline]
    pub fn next_stamp(&mut self) -> u64 {
        if let Some(stamp) = self.multicast_stamp {
            return stamp;
        }
        self.clock += 1;
        self.clock
    }

    /// True if no message of this task or of its past is in transit. Then a message that is visible
    /// at once needs neither a list nor a record.
    #[inline]
    pub fn is_settled(&self) -> bool {
        self.marks.is_empty() && self.unanswered_count == 0
    }

    /// True if marks were added since the last message to this peer.
    fn must_check_list(&self, peer: Tid) -> bool {
        let told_version = || self.peers.get(&peer).map_or(0, |peer| peer.told_version);
        !self.marks.is_empty() && told_version() != self.marks.version()
    }

    /// Returns the list that must precede the next message to this peer; `None` if the peer knows
    /// all marks that it needs.
    pub fn list_for(&mut self, peer: Tid) -> Option<OrderMessage> {
        if !self.must_check_list(peer) {
            return None;
        }
        let (version, list) = self.current_list(peer);
        let peer_state = self.peers.entry(peer);
        let is_known = |mark: &Mark| {
            let known_mark = find_mark(&peer_state.told_marks, mark);
            mark.receiver != peer && known_mark.is_some_and(|told| told.covers(mark))
        };
        if list.iter().all(is_known) {
            peer_state.told_version = version;
            return None;
        }
        Some(self.tell(peer, version, list))
    }

    /// Returns the whole list for a peer that knows nothing.
    pub fn whole_list_for(&mut self, peer: Tid) -> OrderMessage {
        let (version, list) = self.current_list(peer);
        self.tell(peer, version, list)
    }

    /// Returns the marks that concern this peer, and the version of the list.
    fn current_list(&self, peer: Tid) -> (u64, Vec<Mark>) {
        let own_tid = self.own_tid;
        let incarnation = self.peers.start().incarnation;
        // The link orders the messages of this task to the peer.
        let own_marks = self.marks.of_sender(own_tid);
        let own_marks = own_marks.filter(|mark| mark.receiver != peer);
        let mut exact_list: Vec<Mark> = own_marks.take(self.fold_marks_min + 1).copied().collect();
        if exact_list.len() > self.fold_marks_min {
            exact_list = vec![Mark::folded(own_tid, incarnation, self.last_own_stamp)];
        }
        // The peer knows its own messages.
        let other_marks = self.marks.of_others(own_tid);
        exact_list.extend(other_marks.filter(|mark| mark.sender != peer));
        exact_list.sort_by_key(Mark::key);
        let mut list = fold(exact_list, self.fold_marks_min);
        if list.len() > EXACT_MARKS_MAX {
            list = fold(list, 1);
        }
        (self.marks.version(), list)
    }

    /// Records that this list is told to the peer.
    fn tell(&mut self, peer: Tid, version: u64, list: Vec<Mark>) -> OrderMessage {
        // The list is later than everything that it names.
        if self.multicast_stamp.is_none() {
            self.next_stamp();
        }
        let (own_tid, clock) = (self.own_tid, self.clock);
        // A daemon passes lists on, and answers none.
        let names_peer = peer.is_task()
            && list
                .iter()
                .any(|mark| mark.may_concern(peer) && mark.sender != own_tid);
        let peer_state = self.peers.entry(peer);
        peer_state.told_version = version;
        // Also larger than the numbers of the process that has handed off this task.
        peer_state.last_list_id = (peer_state.last_list_id + 1).max(clock);
        let other_marks = list.iter().filter(|mark| mark.receiver != peer);
        peer_state.told_marks = other_marks.copied().collect();
        let id = peer_state.last_list_id;
        if names_peer {
            if peer_state.unanswered_list_id.replace(id).is_none() {
                self.unanswered_count += 1;
            }
            // The message to the peer is held back behind these messages, so its mark covers them.
            let unanswered_marks = &mut self.peers.entry(peer).unanswered_marks;
            self.marks.retain(|mark| {
                let is_named = |named: &Mark| named.is_folded() && named.sender == mark.sender;
                let is_covered = mark.receiver == peer
                    && mark.sender != own_tid
                    && (find_mark(&list, mark).is_some() || list.iter().any(is_named));
                if is_covered {
                    unanswered_marks.add(*mark);
                }
                !is_covered
            });
        }
        OrderMessage::Marks { id, marks: list }
    }

    /// Returns the past that the next process of this task must know. Lists to peers that are not
    /// answered are forgotten with this process, so their marks count again.
    pub fn past_for_successor(&self) -> Past {
        let (_, mut marks) = self.current_list(self.own_tid);
        for (_, peer_state) in self.peers.iter() {
            marks.extend(peer_state.unanswered_marks.iter());
        }
        marks.sort_by_key(Mark::key);
        marks.dedup_by_key(|mark| mark.key());
        Past {
            clock: self.clock,
            marks: fold(marks, EXACT_MARKS_MAX),
        }
    }

    /// Returns the stamp of the list that was returned last.
    pub fn list_stamp(&self) -> u64 {
        self.multicast_stamp.map_or(self.clock, |stamp| stamp - 1)
    }

    /// Records that the link to `peer` has queued a message that ends at `position`. `is_visible`
    /// is true if it is in a ring, and everything before it is settled: the peer finds it with its
    /// next look.
    pub fn record_sent(&mut self, peer: Tid, position: Position, is_visible: bool) {
        if is_visible && self.is_settled() {
            return;
        }
        let peer_state = self.peers.entry(peer);
        if peer_state.has_ended {
            return;
        }
        let follows_unsettled = peer_state.unanswered_list_id.is_some() || self.has_own_mark(peer);
        if !is_visible || follows_unsettled {
            self.last_own_stamp = self.multicast_stamp.unwrap_or(self.clock);
            self.marks.add(Mark {
                receiver: peer,
                sender: self.own_tid,
                incarnation: position.incarnation,
                sender_incarnation: self.peers.start().incarnation,
                end_seq: position.end_seq,
                stamp: self.last_own_stamp,
            });
        }
    }

    /// Records that the link to `peer` has queued a list that no message follows. Only a list that
    /// may name the peer needs a mark, which covers the marks that it names.
    pub fn record_list_sent(&mut self, peer: Tid, position: Position) {
        let peer_state = self.peers.get(&peer);
        if peer_state.is_some_and(|peer_state| peer_state.unanswered_list_id.is_some()) {
            self.record_sent(peer, position, false);
        }
    }

    /// True if [`CausalOrder::record_progress`] can settle a message to this peer.
    #[inline]
    pub fn has_mark_for(&self, peer: Tid) -> bool {
        !self.marks.is_empty() && self.has_own_mark(peer)
    }

    fn has_own_mark(&self, peer: Tid) -> bool {
        self.marks.of_pair(self.own_tid, peer).next().is_some()
    }

    /// True if the receivers of messages should acknowledge at once, because there are many marks.
    pub fn wants_prompt_acks(&self) -> bool {
        self.marks.len() > MARKS_BEFORE_PROMPT_ACK
    }

    /// Records how far the link to `peer` has come: the position up to which the peer has
    /// acknowledged, and whether all that was queued later is visible in a ring.
    pub fn record_progress(&mut self, peer: Tid, acked: Position, is_ring_complete: bool) {
        let is_answered = self
            .peers
            .get(&peer)
            .is_some_and(|peer| peer.unanswered_list_id.is_none());
        if !is_answered {
            return;
        }
        let is_settled = |mark: &Mark| {
            let (incarnation, end_seq) = (mark.incarnation, mark.end_seq);
            let position = Position {
                incarnation,
                end_seq,
            };
            is_ring_complete || acked.reaches(position)
        };
        let own_marks = self.marks.of_pair(self.own_tid, peer);
        if let Some(own_mark) = own_marks.last().copied().filter(is_settled) {
            self.marks.remove(&own_mark);
            self.has_stale_lists = true;
        }
    }

    /// True if [`CausalOrder::next_refreshed_list`] may have something to tell.
    pub fn has_stale_lists(&self) -> bool {
        self.has_stale_lists
            || !self.marks.is_empty()
            || !self.orphaned_marks.is_empty()
            || !self.requested_lists.is_empty()
    }

    /// Returns a list for a peer that was told marks that are settled now, so that the peer does
    /// not pass them on for ever; `None` if there is no such peer left. The caller sends the list
    /// and calls [`CausalOrder::record_list_sent`] before the next call; at the end it sends the
    /// messages of [`CausalOrder::next_answer`]. Called some time after the marks were settled:
    /// mostly another message has told it by then.
    pub fn next_refreshed_list(&mut self) -> Option<(Tid, OrderMessage)> {
        if !std::mem::replace(&mut self.is_refreshing, true) {
            self.check_rumors();
        }
        if std::mem::take(&mut self.has_stale_lists) {
            let is_stale = |(_, peer): &(&Tid, &Peer<M>)| self.is_stale(peer);
            let stale_peers = self.peers.iter().filter(is_stale);
            self.stale_peers = stale_peers.map(|(peer, _)| *peer).collect();
        }
        while let Some(peer) = self.requested_lists.pop_first() {
            if !self.has_ended(peer) {
                return Some((peer, self.refreshed_list_for(peer)));
            }
        }
        while let Some(peer) = self.stale_peers.pop() {
            if self
                .peers
                .get(&peer)
                .is_some_and(|peer| self.is_stale(peer))
            {
                return Some((peer, self.refreshed_list_for(peer)));
            }
        }
        while let Some(orphan) = self.orphaned_marks.pop() {
            if !self.marks.contains(&orphan) {
                continue;
            }
            if !self.has_ended(orphan.sender) {
                self.adopt_orphan(orphan);
            } else if orphan.is_folded() {
                // Everything that the ended task has sent has had the time to arrive.
                self.marks.settle(&orphan);
                self.has_stale_lists = true;
            } else {
                // The receivers say whether the messages of an ended task have arrived.
                let receiver = orphan.receiver;
                return Some((receiver, self.whole_list_for(receiver)));
            }
        }
        self.is_refreshing = false;
        None
    }

    /// Returns a list with the marks of this task's messages, and with those marks of the last list
    /// that are not settled. No message follows, so the list adds no others: new marks in such
    /// lists would be told on in further lists for ever.
    fn refreshed_list_for(&mut self, peer: Tid) -> OrderMessage {
        let own_tid = self.own_tid;
        let told_marks = std::mem::take(&mut self.peers.entry(peer).told_marks);
        let was_told = |mark: &Mark| {
            let covers_sender = |told: &Mark| told.is_folded() && told.sender == mark.sender;
            find_mark(&told_marks, mark).is_some() || told_marks.iter().any(covers_sender)
        };
        let is_repeated = |mark: &Mark| {
            let concerns_others = mark.receiver != peer && mark.sender != peer;
            concerns_others && (mark.sender == own_tid || was_told(mark))
        };
        let exact_list = self.marks.iter().filter(is_repeated).collect();
        let list = fold(exact_list, self.fold_marks_min);
        let told_version = self.peers.entry(peer).told_version;
        self.tell(peer, told_version, list)
    }

    /// Two tasks may tell each other a mark that all others know to be settled, and a restart may
    /// lose the news. Therefore the sender of a mark that stays unsettled is asked: soon if others
    /// have told the mark, later if the sender has told it.
    fn check_rumors(&mut self) {
        let is_told_by_sender = |mark: &Mark| {
            let sender = self
                .peers
                .get(&mark.sender)
                .filter(|sender| !sender.has_ended);
            let heard_mark = sender.and_then(|sender| find_mark(&sender.heard_marks, mark));
            heard_mark.is_some_and(|heard| heard.covers(mark))
        };
        let mut rumors = BTreeMap::new();
        for mark in self.marks.iter().filter(|mark| mark.sender != self.own_tid) {
            let age_max = if is_told_by_sender(&mark) {
                TOLD_AGE_MAX
            } else {
                0
            };
            let age = self.rumors.get(&mark.key()).copied();
            if age.is_some_and(|age| age >= age_max) {
                self.orphaned_marks.push(mark);
            } else {
                rumors.insert(mark.key(), age.map_or(0, |age| age + 1));
            }
        }
        self.rumors = rumors;
    }

    /// Asks the sender of an orphaned mark for its list, as if it had told the mark.
    fn adopt_orphan(&mut self, orphan: Mark) {
        let heard_marks = &mut self.peers.entry(orphan.sender).heard_marks;
        match heard_marks.binary_search_by_key(&orphan.key(), Mark::key) {
            Ok(index) if !heard_marks[index].covers(&orphan) => heard_marks[index] = orphan,
            Ok(_) => {}
            Err(index) => heard_marks.insert(index, orphan),
        }
        let question = OrderMessage::Ask {
            stamp: 0,
            wants_list: true,
        };
        let question = (orphan.sender, question);
        if !self.answers.contains(&question) {
            self.answers.push_back(question);
        }
    }

    /// True if the peer was told a mark that is settled now.
    fn is_stale(&self, peer: &Peer<M>) -> bool {
        let is_settled = |told: &Mark| {
            if told.is_folded() {
                self.marks.of_sender(told.sender).next().is_none()
            } else {
                !self.marks.contains(told)
            }
        };
        peer.told_marks.iter().any(is_settled)
    }

    /// Begins to send one message to several tasks; until [`CausalOrder::end_multicast`] all copies
    /// get the same stamp, so that they can share their memory. As with separate messages, each
    /// copy is later than the copies before it.
    pub fn begin_multicast(&mut self) {
        // Lists between the copies have the stamp before that of the copies.
        self.clock += 1;
        self.multicast_stamp = Some(self.next_stamp());
    }

    pub fn end_multicast(&mut self) {
        self.multicast_stamp = None;
    }

    // ---- looks

    /// True if messages that have arrived wait for a look at the rings.
    #[inline]
    pub fn is_waiting_for_look(&self) -> bool {
        self.arrivals.is_waiting()
    }

    /// True if messages or answers wait, or if the owner must set a timer.
    #[inline]
    pub fn needs_attention(&self) -> bool {
        self.has_waiting_message() || self.has_stale_lists()
    }

    /// Returns the only sender of the messages that wait; see [`Arrivals::only_sender`].
    #[inline]
    pub fn only_sender(&self) -> Option<Tid> {
        self.arrivals.only_sender()
    }

    /// Begins a look at the rings; see [`Arrivals::begin_look`].
    pub fn begin_look(&mut self) {
        self.arrivals.begin_look();
    }

    /// Ends the look at the rings; see [`Arrivals::end_look`].
    pub fn end_look(&mut self) {
        self.arrivals.end_look();
        self.drop_stamp_floors();
    }

    /// Makes all messages that have arrived deliverable, because no ring can contain an earlier
    /// one.
    pub fn end_without_look(&mut self) {
        self.arrivals.deliver_all();
        self.drop_stamp_floors();
    }

    /// Sorts messages of peers that were restarted by their new stamps, once no message of the
    /// earlier incarnation waits for a look.
    #[inline]
    pub(super) fn drop_stamp_floors(&mut self) {
        if !self.has_stamp_floors || self.arrivals.is_waiting() {
            return;
        }
        self.has_stamp_floors = false;
        for (_, peer_state) in self.peers.iter_mut() {
            if std::mem::take(&mut peer_state.has_stamp_floor) {
                peer_state.last_stamp = peer_state.passed_stamp;
            }
        }
    }

    /// Returns the next message in causal order.
    #[inline]
    pub fn next_delivery(&mut self) -> Option<M> {
        self.arrivals.pop()
    }
}

/// Returns the mark with the same key in a list that is sorted by key.
pub(super) fn find_mark<'a>(sorted_marks: &'a [Mark], mark: &Mark) -> Option<&'a Mark> {
    let index = sorted_marks.binary_search_by_key(&mark.key(), Mark::key);
    index.ok().map(|index| &sorted_marks[index])
}
