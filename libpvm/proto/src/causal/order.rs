//! The causal order of all messages of one task.

use super::arrivals::Arrivals;
use super::mark::{Mark, OrderMessage, Past};
use super::peers::{Held, Hold, Peer, Peers, Position};
use super::restart::Restart;
use super::unsettled::UnsettledMarks;
use super::{MARKS_BEFORE_PROMPT_ACK, MARKS_MAX, STAMP_MAX};
use crate::ids::Tid;
use std::collections::{BTreeSet, VecDeque};

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
    own_tid: Tid,
    clock: u64,
    marks: UnsettledMarks,
    /// While a message is sent to several tasks, the stamp of all copies.
    multicast_stamp: Option<u64>,
    peers: Peers<M>,
    /// Peers whose messages are held back.
    holding_peers: BTreeSet<Tid>,
    held_count: usize,
    /// True if messages were released since the last call of [`CausalOrder::take_released`].
    was_released: bool,
    arrivals: Arrivals<M>,
    answers: VecDeque<(Tid, OrderMessage)>,
    /// Number of peers that have not answered a list that named them.
    unanswered_count: usize,
    /// Marks that a peer told that has ended. Nobody will say that their messages have arrived.
    orphaned_marks: Vec<Mark>,
    /// True if a mark was settled that peers were told, since the last call of
    /// [`CausalOrder::next_refreshed_list`].
    has_stale_lists: bool,
    /// Peers that [`CausalOrder::next_refreshed_list`] has found and not returned yet.
    stale_peers: Vec<Tid>,
    last_restart: Option<Restart>,
}

impl<M> CausalOrder<M> {
    /// Creates the order of a task whose new links begin with this incarnation.
    pub fn new(own_tid: Tid, incarnation: u16) -> Self {
        Self {
            own_tid,
            clock: 0,
            marks: UnsettledMarks::default(),
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
            stale_peers: Vec::new(),
            last_restart: None,
        }
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

    /// True if the limit [`MARKS_MAX`] is reached.
    pub fn is_full(&self) -> bool {
        self.marks.len() >= MARKS_MAX
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
        let is_for_peer = |mark: &Mark| {
            // The peer knows its own messages, and the link orders the messages of this task.
            mark.sender != peer && (mark.receiver, mark.sender) != (peer, self.own_tid)
        };
        let list = self.marks.iter().filter(is_for_peer).collect();
        (self.marks.version(), list)
    }

    /// Records that this list is told to the peer.
    fn tell(&mut self, peer: Tid, version: u64, list: Vec<Mark>) -> OrderMessage {
        let names_peer = list.iter().any(|mark| mark.receiver == peer);
        let peer_state = self.peers.entry(peer);
        peer_state.told_version = version;
        peer_state.last_list_id += 1;
        let other_marks = list.iter().filter(|mark| mark.receiver != peer);
        peer_state.told_marks = other_marks.copied().collect();
        let id = peer_state.last_list_id;
        if names_peer {
            if peer_state.unanswered_list_id.replace(id).is_none() {
                self.unanswered_count += 1;
            }
            // The message to the peer is held back behind these messages, so its mark covers them.
            self.marks
                .retain(|mark| mark.receiver != peer || find_mark(&list, mark).is_none());
        }
        OrderMessage::Marks { id, marks: list }
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
        let follows_unsettled =
            peer_state.unanswered_list_id.is_some() || self.marks.get(peer, self.own_tid).is_some();
        if !is_visible || follows_unsettled {
            self.marks.add(Mark {
                receiver: peer,
                sender: self.own_tid,
                incarnation: position.incarnation,
                end_seq: position.end_seq,
            });
        }
    }

    /// True if [`CausalOrder::record_progress`] can settle a message to this peer.
    #[inline]
    pub fn has_mark_for(&self, peer: Tid) -> bool {
        !self.marks.is_empty() && self.marks.get(peer, self.own_tid).is_some()
    }

    /// True if the receivers of messages should acknowledge at once, because there are many marks.
    pub fn wants_prompt_acks(&self) -> bool {
        self.marks.len() > MARKS_BEFORE_PROMPT_ACK
    }

    /// Records how far the link to `peer` has come: the position up to which the peer has
    /// acknowledged, and whether all that was queued later is visible in a ring.
    pub fn record_progress(&mut self, peer: Tid, acked: Position, is_ring_complete: bool) {
        let Some(own_mark) = self.marks.get(peer, self.own_tid) else {
            return;
        };
        let own_position = Position {
            incarnation: own_mark.incarnation,
            end_seq: own_mark.end_seq,
        };
        let is_answered = self
            .peers
            .get(&peer)
            .is_some_and(|peer| peer.unanswered_list_id.is_none());
        if is_answered && (is_ring_complete || acked.reaches(own_position)) {
            self.marks.remove(peer, self.own_tid);
            self.has_stale_lists = true;
        }
    }

    /// True if [`CausalOrder::next_refreshed_list`] may have something to tell.
    pub fn has_stale_lists(&self) -> bool {
        self.has_stale_lists || !self.orphaned_marks.is_empty()
    }

    /// Returns a list for a peer that was told marks that are settled now, so that the peer does
    /// not pass them on for ever; `None` if there is no such peer left. The caller sends the list
    /// and calls [`CausalOrder::record_sent`] before the next call. Called some time after the
    /// marks were settled: mostly another message has told it by then.
    pub fn next_refreshed_list(&mut self) -> Option<(Tid, OrderMessage)> {
        if std::mem::take(&mut self.has_stale_lists) {
            let is_stale = |(_, peer): &(&Tid, &Peer<M>)| self.is_stale(peer);
            let stale_peers = self.peers.iter().filter(is_stale);
            self.stale_peers = stale_peers.map(|(peer, _)| *peer).collect();
        }
        while let Some(peer) = self.stale_peers.pop() {
            if self
                .peers
                .get(&peer)
                .is_some_and(|peer| self.is_stale(peer))
            {
                return Some((peer, self.whole_list_for(peer)));
            }
        }
        // The receivers themselves say whether the messages of an ended task have arrived.
        while let Some(orphan) = self.orphaned_marks.pop() {
            let receiver = orphan.receiver;
            if self.marks.get(receiver, orphan.sender).is_some() && receiver != self.own_tid {
                return Some((receiver, self.whole_list_for(receiver)));
            }
        }
        None
    }

    /// True if the peer was told a mark that is settled now.
    fn is_stale(&self, peer: &Peer<M>) -> bool {
        let is_settled = |told: &Mark| self.marks.get(told.receiver, told.sender).is_none();
        peer.told_marks.iter().any(is_settled)
    }

    /// Begins to send one message to several tasks; until [`CausalOrder::end_multicast`] all copies
    /// get the same stamp, so that they can share their memory. As with separate messages, each
    /// copy is later than the copies before it.
    pub fn begin_multicast(&mut self) {
        self.multicast_stamp = Some(self.next_stamp());
    }

    pub fn end_multicast(&mut self) {
        self.multicast_stamp = None;
    }

    // ---- receiving

    /// Accepts a message from the link with `peer`. `position` is the end of the message.
    pub fn accept_message(&mut self, peer: Tid, position: Position, stamp: u64, message: M) {
        if self.peers.entry(peer).hold.is_some() {
            return self.accept(peer, position, Held::Message { stamp, message });
        }
        self.pass_to_arrivals(peer, position, stamp, message);
        if !self.holding_peers.is_empty() {
            self.release_held();
        }
    }

    /// True if a message that has passed the second look may be delivered at once: no message
    /// waits, no message of this task is in transit, and no peer awaits an answer.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.is_settled() && !self.has_waiting_message() && !self.arrivals.has_deliverable()
    }

    /// True if a message or an answer waits for its delivery.
    #[inline]
    fn has_waiting_message(&self) -> bool {
        self.arrivals.is_waiting()
            || !self.answers.is_empty()
            || self.was_released
            || !self.holding_peers.is_empty()
    }

    /// Records that a message is delivered at once, and returns its stamp. The order must be quiet,
    /// and a look that began when the message was visible must have found nothing else.
    #[inline]
    pub fn pass_message(&mut self, peer: Tid, position: Position, stamp: u64) -> u64 {
        let stamp = self.peers.entry(peer).pass_message(position, stamp);
        self.clock = self.clock.max(stamp);
        stamp
    }

    #[inline]
    fn pass_to_arrivals(&mut self, peer: Tid, position: Position, stamp: u64, message: M) {
        let stamp = self.pass_message(peer, position, stamp);
        self.arrivals.push(peer, stamp, message);
    }

    /// Accepts a message of the peer's runtime from the link with `peer`.
    pub fn accept_order_message(&mut self, peer: Tid, position: Position, message: OrderMessage) {
        if let OrderMessage::Arrived { id } = message {
            // An answer waits for nothing: the messages that it confirms were sent before. Only the
            // position of the link advances in order.
            self.handle_answer(peer, id);
        }
        self.accept(peer, position, Held::Order(message));
    }

    /// Accepts a message that comes from this task's host and concerns everything that has
    /// arrived: it is delivered behind these messages.
    pub fn accept_notice(&mut self, message: M) {
        self.arrivals.push(Tid::NONE, self.clock, message);
    }

    fn accept(&mut self, peer: Tid, position: Position, held: Held<M>) {
        let peer_state = self.peers.entry(peer);
        if let Some(hold) = &mut peer_state.hold {
            hold.queue.push_back((position, held));
            self.held_count += 1;
            return;
        }
        self.pass(peer, position, held);
        self.release_held();
    }

    /// Passes on a message of a peer whose messages are not held back. A list of marks may begin to
    /// hold back the messages that follow.
    fn pass(&mut self, peer: Tid, position: Position, held: Held<M>) {
        match held {
            Held::Message { stamp, message } => {
                self.pass_to_arrivals(peer, position, stamp, message);
            }
            Held::Order(OrderMessage::Arrived { .. }) => {
                // It was handled when it arrived.
                self.peers.entry(peer).passed = position;
            }
            Held::Order(OrderMessage::Marks { id, marks }) => {
                self.handle_list(peer, position, id, marks);
            }
        }
    }

    fn handle_answer(&mut self, peer: Tid, id: u64) {
        let peer_state = self.peers.entry(peer);
        if peer_state.unanswered_list_id == Some(id) {
            peer_state.unanswered_list_id = None;
            self.unanswered_count -= 1;
        }
    }

    /// Forgets that a list to this peer is unanswered, because no answer will come.
    fn drop_unanswered_list(&mut self, peer: Tid) {
        let peer_state = self.peers.entry(peer);
        if peer_state.unanswered_list_id.take().is_some() {
            self.unanswered_count -= 1;
        }
    }

    fn handle_list(&mut self, peer: Tid, position: Position, id: u64, mut marks: Vec<Mark>) {
        marks.truncate(MARKS_MAX);
        let own_marks = self.hear(peer, marks);
        if own_marks.is_empty() {
            self.peers.entry(peer).passed = position;
            return;
        }
        self.raise_stamp_above(peer, &own_marks);
        let awaited_marks: Vec<Mark> = own_marks
            .into_iter()
            .filter(|mark| !self.has_passed(mark))
            .collect();
        if awaited_marks.is_empty() {
            self.peers.entry(peer).passed = position;
            self.answers.push_back((peer, OrderMessage::Arrived { id }));
            return;
        }
        self.holding_peers.insert(peer);
        self.peers.entry(peer).hold = Some(Hold {
            list_id: id,
            list_position: position,
            awaited_marks,
            queue: VecDeque::new(),
        });
    }

    /// Makes the next messages of a peer later than the messages that these marks name. A service
    /// may have passed on the marks without the clocks of their senders.
    fn raise_stamp_above(&mut self, peer: Tid, marks: &[Mark]) {
        let sender_stamps = marks
            .iter()
            .filter_map(|mark| Some(self.peers.get(&mark.sender)?.last_stamp));
        let stamp_min = sender_stamps.max().unwrap_or(0);
        let peer_state = self.peers.entry(peer);
        peer_state.last_stamp = peer_state.last_stamp.max(stamp_min);
    }

    /// Returns the task's clock.
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Replaces the marks that `teller` has told. Returns those that name this task.
    fn hear(&mut self, teller: Tid, mut marks: Vec<Mark>) -> Vec<Mark> {
        let own_tid = self.own_tid;
        if let Some(restart) = &self.last_restart {
            marks.retain_mut(|mark| restart.admit(teller, mark));
        }
        let (own_marks, mut other_marks): (Vec<_>, Vec<_>) =
            marks.into_iter().partition(|mark| mark.receiver == own_tid);
        other_marks.sort_by_key(Mark::pair);
        let teller_state = self.peers.entry(teller);
        let heard_marks = std::mem::replace(&mut teller_state.heard_marks, other_marks.clone());
        // The teller no longer names a mark: the message has arrived, or is covered by another one.
        for heard in heard_marks {
            if find_mark(&other_marks, &heard).is_none() && heard.sender != own_tid {
                self.marks.settle(&heard);
            }
        }
        for mark in other_marks {
            // This task knows itself whether its messages are settled.
            if mark.sender != own_tid && !self.has_ended(mark.receiver) {
                self.marks.hear(mark);
            }
        }
        own_marks
    }

    /// Accepts the past of what the task's daemon sends next. Returns the marks that name this task
    /// and whose messages have not arrived; what follows must wait for them. Nobody says later
    /// that the other marks are settled, so this task asks the receivers.
    pub fn accept_past(&mut self, past: Past) -> Vec<Mark> {
        let mut own_marks = self.accept_past_of(Tid::NONE, past);
        let nobody = self.peers.entry(Tid::NONE);
        self.orphaned_marks.append(&mut nobody.heard_marks);
        own_marks.retain(|mark| !self.has_passed(mark));
        own_marks
    }

    /// Accepts the past of this task's spawn. The next list of the spawner replaces its marks.
    pub fn accept_spawn(&mut self, spawner: Tid, past: Past) {
        self.accept_past_of(spawner, past);
    }

    fn accept_past_of(&mut self, teller: Tid, Past { clock, mut marks }: Past) -> Vec<Mark> {
        // The last message before the past may have this stamp. Later messages need a larger one.
        self.clock = self.clock.max(clock.min(STAMP_MAX) + 1);
        marks.truncate(MARKS_MAX);
        self.hear(teller, marks)
    }

    fn has_ended(&self, peer: Tid) -> bool {
        self.peers.get(&peer).is_some_and(|peer| peer.has_ended)
    }

    /// Records that the predecessor of this process has received everything that `peer` had sent up
    /// to `position`.
    pub fn take_over_peer(&mut self, peer: Tid, position: Position) {
        self.peers.entry(peer).passed = position;
    }

    /// True if everything that the mark names was passed on.
    pub fn has_passed(&self, mark: &Mark) -> bool {
        let position = Position {
            incarnation: mark.incarnation,
            end_seq: mark.end_seq,
        };
        mark.sender == self.own_tid || self.has_passed_position(mark.sender, position)
    }

    /// True if everything that `peer` has sent up to `position` was passed on, or can no longer
    /// arrive.
    pub fn has_passed_position(&self, peer: Tid, position: Position) -> bool {
        match self.peers.get(&peer) {
            None => self.peers.start().reaches(position),
            Some(peer_state) => {
                peer_state.passed.reaches(position)
                    || (peer_state.has_ended && peer_state.hold.is_none())
            }
        }
    }

    /// Passes on the messages whose marks have arrived.
    fn release_held(&mut self) {
        while let Some(peer) = self.find_releasable() {
            self.holding_peers.remove(&peer);
            let peer_state = self.peers.entry(peer);
            let Some(hold) = peer_state.hold.take() else {
                continue;
            };
            let id = hold.list_id;
            self.raise_stamp_above(peer, &hold.awaited_marks);
            let peer_state = self.peers.entry(peer);
            self.was_released = true;
            peer_state.passed = hold.list_position;
            self.answers.push_back((peer, OrderMessage::Arrived { id }));
            let mut queue = hold.queue;
            while let Some((position, held)) = queue.pop_front() {
                self.held_count -= 1;
                self.pass(peer, position, held);
                if let Some(next_hold) = self.peers.get_mut(&peer).and_then(|p| p.hold.as_mut()) {
                    next_hold.queue = queue;
                    break;
                }
            }
        }
    }

    fn find_releasable(&self) -> Option<Tid> {
        let is_releasable = |peer: &&Tid| {
            let hold = self.peers.get(peer).and_then(|peer| peer.hold.as_ref());
            hold.is_none_or(|hold| hold.awaited_marks.iter().all(|mark| self.has_passed(mark)))
        };
        self.holding_peers.iter().find(is_releasable).copied()
    }

    /// Records that `peer` has ended, and that nothing of it can arrive any more.
    pub fn handle_peer_end(&mut self, peer: Tid) {
        self.marks.remove_receiver(peer);
        self.drop_unanswered_list(peer);
        let peer_state = self.peers.entry(peer);
        peer_state.has_ended = true;
        peer_state.told_marks = Vec::new();
        // Other peers were told marks of messages to this one.
        self.has_stale_lists = true;
        self.orphaned_marks
            .append(&mut std::mem::take(&mut peer_state.heard_marks));
        self.release_held();
    }

    /// Drops the state of a peer that has ended. The caller forgets the peer, too.
    pub fn forget_peer(&mut self, peer: Tid) {
        let is_held = self.holding_peers.contains(&peer);
        if !is_held {
            self.peers.remove(&peer);
        }
    }

    /// Records that the link with `peer` began again in a new incarnation at this end or at both.
    /// Messages of the earlier incarnation that are held back wait no longer.
    pub fn handle_link_reset(&mut self, peer: Tid, incarnation: u16) {
        self.marks.remove(peer, self.own_tid);
        self.drop_unanswered_list(peer);
        let peer_state = self.peers.entry(peer);
        (peer_state.told_version, peer_state.last_stamp) = (0, 0);
        peer_state.has_ended = false;
        peer_state.told_marks = Vec::new();
        self.orphaned_marks
            .append(&mut std::mem::take(&mut peer_state.heard_marks));
        let start = Position::start_of(incarnation);
        peer_state.passed = start;
        if let Some(hold) = peer_state.hold.take() {
            self.holding_peers.remove(&peer);
            for (_, held) in hold.queue {
                self.held_count -= 1;
                if let Held::Message { .. } = held {
                    self.pass(peer, start, held);
                }
            }
        }
        self.release_held();
    }

    /// Continues after a restart from a checkpoint, from which all tasks in `restart` were
    /// restored. Marks of other tasks are dropped.
    pub fn roll_back(&mut self, restart: Restart) {
        self.marks.retain(|mark| restart.renumber(mark));
        self.peers.begin_incarnation(restart.incarnation);
        for (peer, peer_state) in self.peers.iter_mut() {
            let has_peer = restart.members.contains(peer);
            if has_peer {
                peer_state.passed.incarnation = restart.incarnation;
            }
            peer_state
                .told_marks
                .retain_mut(|mark| restart.renumber(mark));
            peer_state
                .heard_marks
                .retain_mut(|mark| restart.renumber(mark));
            let Some(hold) = &mut peer_state.hold else {
                continue;
            };
            hold.awaited_marks.retain_mut(|mark| restart.renumber(mark));
            if has_peer {
                hold.list_position.incarnation = restart.incarnation;
                for (position, _) in &mut hold.queue {
                    position.incarnation = restart.incarnation;
                }
            }
        }
        self.last_restart = Some(restart);
        self.release_held();
    }

    /// Returns the next message to send to a peer's runtime, on the link with that peer.
    pub fn next_answer(&mut self) -> Option<(Tid, OrderMessage)> {
        self.answers.pop_front()
    }

    /// Returns the tasks whose messages are awaited.
    pub fn awaited_senders(&self) -> BTreeSet<Tid> {
        let holds = self.holding_peers.iter().filter_map(|peer| {
            let hold = self.peers.get(peer)?.hold.as_ref()?;
            Some(&hold.awaited_marks)
        });
        holds
            .flatten()
            .filter(|mark| !self.has_passed(mark))
            .map(|mark| mark.sender)
            .collect()
    }

    /// True if messages of this peer are held back.
    pub fn is_holding(&self, peer: Tid) -> bool {
        self.holding_peers.contains(&peer)
    }

    /// True if messages of any peer are held back.
    pub fn is_holding_any(&self) -> bool {
        !self.holding_peers.is_empty()
    }

    /// True if messages that were held back were passed on since the last call.
    pub fn take_released(&mut self) -> bool {
        std::mem::take(&mut self.was_released)
    }

    /// Returns the number of messages that are held back.
    pub fn held_count(&self) -> usize {
        self.held_count
    }

    /// Passes on everything that is held back, because nothing else can arrive.
    pub fn release_all(&mut self) {
        while let Some(peer) = self.holding_peers.pop_first() {
            let Some(hold) = self.peers.get_mut(&peer).and_then(|peer| peer.hold.take()) else {
                continue;
            };
            let mut list_ids = vec![hold.list_id];
            for (position, held) in hold.queue {
                self.held_count -= 1;
                match held {
                    Held::Message { .. } => self.pass(peer, position, held),
                    Held::Order(OrderMessage::Marks { id, .. }) => list_ids.push(id),
                    Held::Order(OrderMessage::Arrived { .. }) => {}
                }
            }
            self.answers.extend(
                list_ids
                    .into_iter()
                    .map(|id| (peer, OrderMessage::Arrived { id })),
            );
        }
        self.arrivals.deliver_all();
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
    }

    /// Makes all messages that have arrived deliverable, because no ring can contain an earlier
    /// one.
    pub fn end_without_look(&mut self) {
        self.arrivals.deliver_all();
    }

    /// Returns the next message in causal order.
    #[inline]
    pub fn next_delivery(&mut self) -> Option<M> {
        self.arrivals.pop()
    }
}

/// Returns the mark of the same pair of tasks in a list that is sorted by pair.
fn find_mark<'a>(sorted_marks: &'a [Mark], mark: &Mark) -> Option<&'a Mark> {
    let index = sorted_marks.binary_search_by_key(&mark.pair(), Mark::pair);
    index.ok().map(|index| &sorted_marks[index])
}
