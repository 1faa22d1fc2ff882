//! The link: exactly-once, in-order messages between two tasks over routes that may break.
//!
//! - A message is split into fragments with ascending sequence numbers. The sender retains every
//!   message until the receiver's library has received it. The receiver accepts only the fragment
//!   it expects and drops all others.
//! - When a route is replaced, or the peer is silent for a while, the sender asks with a
//!   [`LinkKind::Probe`] which fragment the receiver expects, and continues from that fragment.
//!   Routes need not be reliable; reliable routes make retransmissions rare.
//! - A task that was restarted from a checkpoint has a new *incarnation*: everything that the task
//!   and its peers sent after the checkpoint is void. Frames contain the number of their
//!   incarnation, so a frame of an earlier incarnation is recognized however late it arrives.
//!
//! The owner of a link calls [`Link::send`] and [`Link::handle`], then [`Link::poll`] until it
//! returns `None`, and then sleeps at most until [`Link::next_wakeup`].

mod frame;
mod handoff;

pub use self::frame::{
    CPU_HINT_BYTE, FLAG_OUT_OF_LINE, FrameRef, LINK_HEAD_BYTES, LinkFrame, LinkKind, Payload,
    SHORT_HEAD_BYTES, decode_short_head, encode_short_head,
};
pub use self::handoff::LinkState;

use crate::buffer_pool;
use crate::ids::{Micros, RouteId, Tid};
use bytes::Bytes;
use std::collections::VecDeque;
use thiserror::Error;

/// Maximum size of the payload of a fragment, in bytes.
pub const FRAGMENT_BYTES_MAX: usize = 64 << 10;
/// Maximum number of unacknowledged bytes in flight per direction of a link. Bounds the memory that
/// daemons need for the link.
pub const WINDOW_BYTES_MAX: usize = 4 << 20;
/// Maximum number of unacknowledged fragments in flight per direction of a link.
pub const WINDOW_FRAGMENTS_MAX: u64 = 4096;
/// Maximum number of bytes that a sender retains for one receiver; above this limit [`Link::send`]
/// fails.
pub const RETAINED_BYTES_MAX: usize = 1 << 36;
/// Number of received bytes after which an acknowledgement is sent immediately.
pub const ACK_BYTES: usize = WINDOW_BYTES_MAX / 8;
/// Number of received fragments after which an acknowledgement is sent immediately.
pub const ACK_FRAGMENTS: u64 = WINDOW_FRAGMENTS_MAX / 8;
/// Maximum time that an acknowledgement waits for a data frame that can carry it.
pub const ACK_DELAY: Micros = Micros::from_millis(20);
/// Time without an acknowledgement after which the sender probes the receiver for the first time.
pub const PROBE_DELAY: Micros = Micros::from_millis(300);
/// Maximum interval between two probes; the interval doubles up to this limit.
pub const PROBE_DELAY_MAX: Micros = Micros::from_secs(5);
/// A second resync request for the same fragment within this time counts as a duplicate.
pub const RESYNC_ECHO_WINDOW: Micros = Micros::from_millis(50);

/// Maximum size of the header of a message, in bytes.
pub const HEAD_BYTES_MAX: usize = 24;
/// Bodies up to this size are stored inside the link's queue: a separate allocation costs more than
/// the copy.
pub const INLINE_BODY_BYTES_MAX: usize = 128;
/// Queue capacity, in messages, that an idle link keeps allocated.
const IDLE_QUEUE_CAPACITY: usize = 64;

/// An external event for a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// A frame from the peer has arrived.
    Frame(LinkFrame),
    /// The route with this id may carry frames from now on; frames on the previous route may be
    /// lost.
    RouteUp(RouteId),
    /// There is no route; nothing is transmitted until the next [`LinkEvent::RouteUp`].
    RouteDown,
    /// The peer has migrated; frames in flight may be lost.
    PeerMigrated,
    /// The peer has ended permanently.
    PeerGone,
    /// The time returned by [`Link::next_wakeup`] has been reached.
    Wake,
}

/// An action that a link requests from its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkOutput {
    /// Deliver this message to the application. Messages are delivered in the order in which they
    /// were sent.
    Deliver(Bytes),
    /// Transmit this frame on the current route.
    Transmit(LinkFrame),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LinkError {
    /// The receiver has not acknowledged enough earlier messages; the message was not queued.
    #[error("{RETAINED_BYTES_MAX} bytes wait for this receiver already; the message was not sent")]
    Full,
}

/// The body of a retained message, either stored inline or shared with the application.
#[derive(Clone, Debug)]
enum Body {
    Inline {
        len: u8,
        bytes: [u8; INLINE_BODY_BYTES_MAX],
    },
    Shared(Bytes),
}

impl Body {
    /// Copies a body of at most [`INLINE_BODY_BYTES_MAX`] bytes.
    #[inline]
    fn inline(body: &[u8]) -> Body {
        let mut bytes = [0; INLINE_BODY_BYTES_MAX];
        bytes[..body.len()].copy_from_slice(body);
        Body::Inline {
            len: body.len() as u8,
            bytes,
        }
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        match self {
            Body::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Body::Shared(bytes) => bytes,
        }
    }

    fn shared(&self) -> Option<&Bytes> {
        match self {
            Body::Inline { .. } => None,
            Body::Shared(bytes) => Some(bytes),
        }
    }
}

/// Returns the number of fragments of a message with this length, header included.
fn fragment_count(bytes: usize) -> u64 {
    (bytes.div_ceil(FRAGMENT_BYTES_MAX) as u64).max(1)
}

/// A message that is retained until it is acknowledged.
#[derive(Clone, Debug)]
struct RetainedMessage {
    first_seq: u64,
    fragments: u64,
    head: [u8; HEAD_BYTES_MAX],
    head_len: u8,
    body: Body,
}

impl RetainedMessage {
    #[inline]
    fn new(first_seq: u64, head: &[u8], body: Body) -> RetainedMessage {
        assert!(
            head.len() <= HEAD_BYTES_MAX,
            "a message's header has a limit"
        );
        let mut head_bytes = [0; HEAD_BYTES_MAX];
        head_bytes[..head.len()].copy_from_slice(head);
        let fragments = fragment_count(head.len() + body.bytes().len());
        RetainedMessage {
            first_seq,
            fragments,
            head: head_bytes,
            head_len: head.len() as u8,
            body,
        }
    }

    #[inline]
    fn head(&self) -> &[u8] {
        &self.head[..usize::from(self.head_len)]
    }

    fn len(&self) -> usize {
        usize::from(self.head_len) + self.body.bytes().len()
    }

    fn end_seq(&self) -> u64 {
        self.first_seq + self.fragments
    }

    /// Returns the payload of fragment `seq` in two parts: the message header (empty except in the
    /// first fragment) and a part of the body.
    fn fragment(&self, seq: u64) -> (&[u8], &[u8]) {
        let index = usize::try_from(seq - self.first_seq).expect("fragments fit the address space");
        let head = usize::from(self.head_len);
        let (start, end) = (
            index * FRAGMENT_BYTES_MAX,
            ((index + 1) * FRAGMENT_BYTES_MAX).min(self.len()),
        );
        let body = self.body.bytes();
        if index > 0 {
            (&[], &body[start - head..end - head])
        } else {
            (self.head(), &body[..end - head])
        }
    }
}

/// State of the messages that this end of a link sends.
#[derive(Clone, Debug)]
struct SendHalf {
    /// Messages that are not completely acknowledged, oldest first.
    retained: VecDeque<RetainedMessage>,
    retained_bytes: usize,
    /// All fragments below this number are acknowledged.
    acked: u64,
    /// Number of the next fragment to transmit. A resync request lowers it, at most to `acked`.
    next_seq: u64,
    /// Lowest fragment number that was never transmitted.
    highest_sent: u64,
    /// Number after the last queued fragment.
    end_seq: u64,
    /// Sizes in bytes of the fragments `acked..next_seq`.
    in_flight_sizes: VecDeque<usize>,
    in_flight_bytes: usize,
    probe_due: Option<Micros>,
    probe_delay: Micros,
    probe_pending: bool,
    last_resync: Option<(u64, Micros)>,
    window_disabled: bool,
    /// Unacknowledged fragments below this number were transmitted on routes that may have lost
    /// them.
    maybe_lost_below: u64,
    /// Set while the daemon has not yet returned all messages that the previous process of this
    /// task had sent.
    returning_messages: Option<Box<handoff::ReturningMessages>>,
}

/// State of the messages that this end of a link receives.
#[derive(Clone, Debug)]
struct ReceiveHalf {
    expected_seq: u64,
    partial: Vec<u8>,
    ready: VecDeque<Bytes>,
    unacked_bytes: usize,
    unacked_fragments: u64,
    ack_due: Option<Micros>,
    /// Set if an acknowledgement must be sent immediately; `true` if it requests a resync.
    pending_ack: Option<bool>,
    /// Number of the missing fragment for which a resync was requested.
    reported_gap: Option<u64>,
}

/// One end of a link between two tasks. A checkpoint stores a copy of it.
#[derive(Clone, Debug)]
pub struct Link {
    local: Tid,
    peer: Tid,
    route: Option<RouteId>,
    peer_gone: bool,
    incarnation: u16,
    tx: SendHalf,
    rx: ReceiveHalf,
}

/// True if `incarnation` is later than `other`.
///
/// Incarnation numbers wrap around: a number is later than another if the distance from the other
/// is less than half of the number range. Zero, the incarnation of a task that was never restarted,
/// is earlier than all other numbers.
pub fn is_later_incarnation(incarnation: u16, other: u16) -> bool {
    incarnation != other
        && incarnation != 0
        && (other == 0 || incarnation.wrapping_sub(other) < 1 << 15)
}

impl SendHalf {
    /// Returns the index of the retained message that contains fragment `seq`.
    #[inline]
    fn retained_index(&self, seq: u64) -> usize {
        // Nearly always the fragment belongs to the newest message.
        let newest = self
            .retained
            .back()
            .is_some_and(|m| m.first_seq <= seq)
            .then(|| self.retained.len() - 1);
        newest.unwrap_or_else(|| self.retained.partition_point(|m| m.end_seq() <= seq))
    }

    #[inline]
    fn retain(&mut self, message: RetainedMessage) {
        self.retained_bytes += message.len();
        self.end_seq += message.fragments;
        self.retained.push_back(message);
    }

    /// Renumbers the fragments of the retained messages, starting with 1.
    fn renumber(&mut self) {
        self.end_seq = 1;
        for message in &mut self.retained {
            message.first_seq = self.end_seq;
            self.end_seq = message.end_seq();
        }
    }
}

impl Link {
    /// Creates a link without a route on which nothing has been sent.
    pub fn new(local: Tid, peer: Tid) -> Link {
        Link {
            local,
            peer,
            route: None,
            peer_gone: false,
            incarnation: 0,
            tx: SendHalf {
                retained: VecDeque::new(),
                retained_bytes: 0,
                acked: 1,
                next_seq: 1,
                highest_sent: 1,
                end_seq: 1,
                in_flight_sizes: VecDeque::new(),
                in_flight_bytes: 0,
                probe_due: None,
                probe_delay: PROBE_DELAY,
                probe_pending: false,
                last_resync: None,
                window_disabled: false,
                maybe_lost_below: 1,
                returning_messages: None,
            },
            rx: ReceiveHalf {
                expected_seq: 1,
                partial: Vec::new(),
                ready: VecDeque::new(),
                unacked_bytes: 0,
                unacked_fragments: 0,
                ack_due: None,
                pending_ack: None,
                reported_gap: None,
            },
        }
    }

    pub fn peer(&self) -> Tid {
        self.peer
    }

    /// Returns the number after the last queued fragment. A notification of this task's exit
    /// contains this number; the receiver delivers the notification only after all fragments below
    /// it.
    pub fn queued_end_seq(&self) -> u64 {
        self.tx.end_seq
    }

    /// Returns the number of the next fragment expected from the peer.
    pub fn expected_seq(&self) -> u64 {
        self.rx.expected_seq
    }

    /// True if every message has been acknowledged.
    pub fn is_all_acked(&self) -> bool {
        self.tx.retained.is_empty()
    }

    /// True if every fragment was transmitted on the current route at least once and the daemon has
    /// returned all messages of the previous process.
    #[inline]
    pub fn is_all_transmitted(&self) -> bool {
        self.tx.next_seq >= self.tx.end_seq && self.tx.returning_messages.is_none()
    }

    /// Returns the number of fragments that are transmitted but not acknowledged.
    #[inline]
    pub fn in_flight(&self) -> u64 {
        self.tx.next_seq - self.tx.acked
    }

    /// True once [`LinkEvent::PeerGone`] was handled.
    #[inline]
    pub fn is_peer_gone(&self) -> bool {
        self.peer_gone
    }

    pub fn retained_bytes(&self) -> usize {
        self.tx.retained_bytes
    }

    /// Returns the time at which the link needs [`LinkEvent::Wake`]; `None` if it needs none.
    #[inline]
    pub fn next_wakeup(&self) -> Option<Micros> {
        self.route?;
        if self.peer_gone {
            return None;
        }
        match (self.rx.ack_due, self.tx.probe_due) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Queues a message that consists of `head`, at most [`HEAD_BYTES_MAX`] bytes, and `body`. A
    /// large body is shared, not copied. A message to a peer that has ended is dropped, as PVM
    /// requires.
    ///
    /// # Errors
    /// [`LinkError::Full`] when [`RETAINED_BYTES_MAX`] is reached; the message is not queued.
    pub fn send(&mut self, head: impl AsRef<[u8]>, body: Bytes) -> Result<(), LinkError> {
        if self.peer_gone {
            return Ok(());
        }
        let head = head.as_ref();
        if self.tx.retained_bytes + head.len() + body.len() > RETAINED_BYTES_MAX {
            return Err(LinkError::Full);
        }
        let body = if body.len() <= INLINE_BODY_BYTES_MAX {
            Body::inline(&body)
        } else {
            Body::Shared(body)
        };
        self.tx
            .retain(RetainedMessage::new(self.tx.end_seq, head, body));
        Ok(())
    }

    /// Queues a message as [`Link::send`] does, with a body of at most [`INLINE_BODY_BYTES_MAX`]
    /// bytes, and returns its frame for immediate transmission.
    ///
    /// Returns `None` and queues nothing unless the link has a route, an open window and no other
    /// frame to transmit.
    #[inline]
    pub fn try_send_inline(
        &mut self,
        now: Micros,
        head: &[u8],
        body: &[u8],
    ) -> Option<FrameRef<'_>> {
        let idle = self.tx.next_seq == self.tx.end_seq
            && !self.tx.probe_pending
            && self.rx.pending_ack != Some(true);
        if !idle
            || self.peer_gone
            || self.route.is_none()
            || body.len() > INLINE_BODY_BYTES_MAX
            || !self.is_window_open()
        {
            return None;
        }
        self.tx.retain(RetainedMessage::new(
            self.tx.end_seq,
            head,
            Body::inline(body),
        ));
        self.next_data_frame(now)
    }

    /// Schedules the retransmission of every unacknowledged fragment, without a resync request. For
    /// a sender that has no time to ask which fragments were lost.
    pub fn retransmit_unacked(&mut self) {
        self.tx.next_seq = self.tx.acked;
        self.tx.in_flight_sizes.clear();
        self.tx.in_flight_bytes = 0;
    }

    /// Disables the window: all queued fragments are transmitted. For a task that ends, because its
    /// daemon receives the remaining frames. Fragments that were transmitted on a replaced route
    /// are retransmitted, because the task ends before it could learn which of them arrived.
    pub fn disable_window(&mut self) {
        self.tx.window_disabled = true;
        if std::mem::replace(&mut self.tx.maybe_lost_below, 1) > self.tx.acked {
            self.retransmit_unacked();
        }
    }

    /// Starts a new incarnation after this end was restored from a checkpoint.
    ///
    /// - `peer_restored_too` is true: the peer was restored from the same checkpoint. The states of
    ///   the two ends still match; only frames of earlier incarnations are void.
    /// - Otherwise the peer continued to run. The link restarts with the messages that were never
    ///   transmitted. The peer has most probably received all other messages and must not receive
    ///   them twice.
    pub fn begin_incarnation(&mut self, incarnation: u16, peer_restored_too: bool) {
        if !peer_restored_too {
            let fresh = self.tx.highest_sent;
            self.tx
                .retained
                .retain(|message| message.first_seq >= fresh);
            self.tx.retained_bytes = self.tx.retained.iter().map(RetainedMessage::len).sum();
            // Messages that the daemon has yet to return were transmitted, too, so they are
            // dropped. Exception: if the link was reset after they were sent, the peer cannot have
            // received them.
            self.tx.returning_messages.take_if(|back| !back.was_reset());
            self.reset_to_incarnation(incarnation);
        }
        self.incarnation = incarnation;
    }

    /// True if `incarnation` is later than the link's: the peer was restarted.
    pub fn has_older_incarnation_than(&self, incarnation: u16) -> bool {
        is_later_incarnation(incarnation, self.incarnation)
    }

    pub fn incarnation(&self) -> u16 {
        self.incarnation
    }

    /// Resets the link to this incarnation: the fragments of retained messages get new numbers, and
    /// a partial message from the peer is discarded.
    fn reset_to_incarnation(&mut self, incarnation: u16) {
        let tx = &mut self.tx;
        if let Some(back) = &mut tx.returning_messages {
            back.record_reset(tx.acked, &tx.retained);
        }
        tx.renumber();
        tx.in_flight_sizes.clear();
        (
            tx.in_flight_bytes,
            tx.acked,
            tx.next_seq,
            tx.highest_sent,
            tx.maybe_lost_below,
        ) = (0, 1, 1, 1, 1);
        (
            tx.probe_due,
            tx.probe_pending,
            tx.probe_delay,
            tx.last_resync,
        ) = (None, false, PROBE_DELAY, None);
        let rx = &mut self.rx;
        rx.partial.clear();
        (rx.expected_seq, rx.unacked_bytes, rx.unacked_fragments) = (1, 0, 0);
        (rx.ack_due, rx.pending_ack, rx.reported_gap) = (None, None, None);
        (self.incarnation, self.peer_gone) = (incarnation, false);
    }

    /// Checks the incarnation of a frame from the peer. Returns true if the frame is valid.
    ///
    /// - Same incarnation: the frame is valid.
    /// - Later incarnation: the frame is valid. The peer was restarted, and this end resets itself
    ///   to the frame's incarnation.
    /// - Earlier incarnation: the frame is void. Either the peer does not know of the restart yet,
    ///   or the frame is old. An acknowledgement informs the peer.
    pub fn accept_incarnation(&mut self, incarnation: u16) -> bool {
        if incarnation == self.incarnation {
            return true;
        }
        if is_later_incarnation(incarnation, self.incarnation) {
            self.reset_to_incarnation(incarnation);
            return true;
        }
        self.rx.pending_ack.get_or_insert(false);
        false
    }

    /// Frees excess memory of the queues of an idle link.
    pub fn shrink_idle(&mut self) {
        if self.tx.retained.is_empty() {
            self.tx.retained.shrink_to(IDLE_QUEUE_CAPACITY);
            self.tx.in_flight_sizes.shrink_to(IDLE_QUEUE_CAPACITY);
            self.rx.ready.shrink_to(IDLE_QUEUE_CAPACITY);
        }
    }

    pub fn handle(&mut self, now: Micros, event: LinkEvent) {
        match event {
            LinkEvent::Frame(frame) => self.handle_frame(now, frame),
            LinkEvent::RouteUp(route) => {
                self.route = Some(route);
                self.schedule_probe();
            }
            LinkEvent::RouteDown => self.route = None,
            LinkEvent::PeerMigrated => self.schedule_probe(),
            LinkEvent::PeerGone => {
                self.peer_gone = true;
                let tx = &mut self.tx;
                tx.retained.clear();
                tx.in_flight_sizes.clear();
                tx.returning_messages = None;
                (
                    tx.retained_bytes,
                    tx.in_flight_bytes,
                    tx.probe_due,
                    tx.probe_pending,
                ) = (0, 0, None, false);
                (tx.acked, tx.next_seq, tx.highest_sent) = (tx.end_seq, tx.end_seq, tx.end_seq);
            }
            LinkEvent::Wake => self.handle_wake(now),
        }
    }

    /// Schedules a probe after a route change, to learn which fragments arrived, and an
    /// acknowledgement of the fragments that arrived at this end.
    fn schedule_probe(&mut self) {
        self.tx.probe_delay = PROBE_DELAY;
        self.tx.probe_pending = self.tx.highest_sent > self.tx.acked;
        self.tx.maybe_lost_below = self.tx.highest_sent;
        if self.rx.expected_seq > 1 {
            self.rx.pending_ack.get_or_insert(false);
        }
    }

    fn handle_wake(&mut self, now: Micros) {
        if self.rx.ack_due.is_some_and(|due| due <= now) {
            self.rx.pending_ack.get_or_insert(false);
        }
        if self.tx.probe_due.is_some_and(|due| due <= now) {
            self.tx.probe_delay = Micros(self.tx.probe_delay.0 * 2).min(PROBE_DELAY_MAX);
            self.tx.probe_due = Some(now + self.tx.probe_delay);
            self.tx.probe_pending = true;
        }
    }

    fn handle_frame(&mut self, now: Micros, frame: LinkFrame) {
        if frame.src == self.peer
            && frame.dst == self.local
            && self.accept_incarnation(frame.incarnation)
        {
            self.handle_borrowed_frame(now, frame.kind, frame.seq, frame.ack, frame.payload);
        }
    }

    /// Processes a frame of the peer as [`Link::handle`] does. The payload is borrowed from the
    /// memory of the route.
    #[inline]
    pub fn handle_borrowed_frame(
        &mut self,
        now: Micros,
        kind: LinkKind,
        seq: u64,
        ack: u64,
        payload: impl Payload,
    ) {
        // Frames from a peer that has ended are valid, too: its earlier messages are still
        // delivered, only not acknowledged.
        match kind {
            LinkKind::Data { last } => {
                self.handle_ack(now, ack, false);
                self.handle_data(now, seq, last, payload);
            }
            LinkKind::Ack { resync } => self.handle_ack(now, ack, resync),
            LinkKind::Probe => {
                self.handle_ack(now, ack, false);
                let missing = seq > self.rx.expected_seq;
                self.rx.pending_ack = Some(missing || self.rx.pending_ack.unwrap_or(false));
            }
        }
    }

    /// Processes a complete message, header and body, as if it had arrived in fragments. `seq` is
    /// the number of its first fragment.
    pub fn handle_whole_message(&mut self, now: Micros, seq: u64, ack: u64, message: Bytes) {
        self.handle_ack(now, ack, false);
        let rest = fragment_count(message.len()) - 1;
        if seq == self.rx.expected_seq {
            // Only a peer that violates the protocol starts a message before it has completed the
            // previous one.
            self.rx.partial.clear();
            self.rx.expected_seq += rest;
            self.rx.unacked_fragments += rest;
            self.handle_data(now, seq + rest, true, message);
        } else {
            self.handle_data(now, seq, true, message);
        }
    }

    #[inline]
    fn handle_data(&mut self, now: Micros, seq: u64, last: bool, payload: impl Payload) {
        let rx = &mut self.rx;
        if seq < rx.expected_seq {
            rx.pending_ack.get_or_insert(false);
            return;
        }
        if seq > rx.expected_seq {
            if rx.reported_gap != Some(rx.expected_seq) {
                rx.reported_gap = Some(rx.expected_seq);
                rx.pending_ack = Some(true);
            }
            return;
        }
        rx.expected_seq += 1;
        rx.unacked_fragments += 1;
        rx.unacked_bytes += payload.len();
        if last && rx.partial.is_empty() {
            rx.ready.push_back(payload.into_bytes());
        } else {
            buffer_pool::reserve_for_growth(&mut rx.partial, payload.len());
            payload.append_to(&mut rx.partial);
            if last {
                rx.ready
                    .push_back(buffer_pool::freeze(std::mem::take(&mut rx.partial)));
            }
        }
        if rx.unacked_bytes >= ACK_BYTES || rx.unacked_fragments >= ACK_FRAGMENTS {
            rx.pending_ack.get_or_insert(false);
        } else if rx.ack_due.is_none() {
            rx.ack_due = Some(now + ACK_DELAY);
        }
    }

    #[inline]
    fn handle_ack(&mut self, now: Micros, ack: u64, resync: bool) {
        let tx = &mut self.tx;
        if ack > tx.highest_sent {
            // The fragment `ack - 1` was never sent. A peer that lies harms only its own link.
            return;
        }
        if ack > tx.acked {
            while tx.acked < ack {
                if let Some(bytes) = tx.in_flight_sizes.pop_front() {
                    tx.in_flight_bytes -= bytes;
                }
                tx.acked += 1;
            }
            tx.next_seq = tx.next_seq.max(tx.acked);
            while tx.retained.front().is_some_and(|m| m.end_seq() <= tx.acked) {
                let done = tx.retained.pop_front().expect("just seen");
                tx.retained_bytes -= done.len();
            }
            let has_unacked = tx.highest_sent > tx.acked;
            tx.probe_delay = PROBE_DELAY;
            tx.probe_due = has_unacked.then(|| now + tx.probe_delay);
            // This acknowledgement answers a probe that was not sent yet. Sent now, with nothing
            // outstanding, the probe would repeat forever.
            tx.probe_pending &= has_unacked;
        }
        if resync && ack == tx.acked && tx.next_seq > ack {
            let is_duplicate = tx
                .last_resync
                .is_some_and(|(seq, at)| seq == ack && now.since(at) < RESYNC_ECHO_WINDOW);
            if !is_duplicate {
                tx.last_resync = Some((ack, now));
                tx.next_seq = ack;
                tx.in_flight_sizes.clear();
                tx.in_flight_bytes = 0;
            }
        }
    }

    /// Returns the next action, or `None` if there is none.
    pub fn poll(&mut self, now: Micros) -> Option<LinkOutput> {
        if let Some(message) = self.take_message() {
            return Some(LinkOutput::Deliver(message));
        }
        Some(LinkOutput::Transmit(self.next_frame(now)?.to_frame()))
    }

    /// Removes and returns the next complete message for the application.
    #[inline]
    pub fn take_message(&mut self) -> Option<Bytes> {
        self.rx.ready.pop_front()
    }

    /// True if [`Link::next_frame`] will return a frame.
    #[inline]
    pub fn has_frame(&self) -> bool {
        self.route.is_some()
            && !self.peer_gone
            && (self.rx.pending_ack.is_some()
                || self.tx.probe_pending
                || (self.tx.next_seq < self.tx.end_seq && self.is_window_open()))
    }

    /// Returns the next frame for the route; the frame counts as transmitted.
    #[inline]
    pub fn next_frame(&mut self, now: Micros) -> Option<FrameRef<'_>> {
        self.route?;
        if self.peer_gone {
            return None;
        }
        if let Some(resync) = self.rx.pending_ack {
            // An acknowledgement without a resync request is sent with a data frame if there is
            // one.
            let travels_with_data = !resync
                && !self.tx.probe_pending
                && self.tx.next_seq < self.tx.end_seq
                && self.is_window_open();
            if !travels_with_data {
                return Some(self.empty_frame(LinkKind::Ack { resync }, 0));
            }
        }
        if std::mem::take(&mut self.tx.probe_pending) {
            self.tx.probe_due.get_or_insert(now + self.tx.probe_delay);
            let fresh = self.tx.highest_sent;
            return Some(self.empty_frame(LinkKind::Probe, fresh));
        }
        self.next_data_frame(now)
    }

    /// True if the window permits another fragment.
    #[inline]
    fn is_window_open(&self) -> bool {
        let tx = &self.tx;
        tx.returning_messages.is_none()
            && (tx.window_disabled
                || (tx.in_flight_bytes < WINDOW_BYTES_MAX
                    && (tx.in_flight_sizes.len() as u64) < WINDOW_FRAGMENTS_MAX))
    }

    #[inline]
    fn next_data_frame(&mut self, now: Micros) -> Option<FrameRef<'_>> {
        if self.tx.next_seq >= self.tx.end_seq || !self.is_window_open() {
            return None;
        }
        let tx = &mut self.tx;
        let seq = tx.next_seq;
        let index = tx.retained_index(seq);
        let message = &tx.retained[index];
        let (head, body) = message.fragment(seq);
        let (len, last) = (head.len() + body.len(), seq + 1 == message.end_seq());
        tx.in_flight_sizes.push_back(len);
        tx.in_flight_bytes += len;
        tx.next_seq += 1;
        tx.highest_sent = tx.highest_sent.max(tx.next_seq);
        tx.probe_due.get_or_insert(now + tx.probe_delay);
        let ack = self.take_ack(false);
        let message = &self.tx.retained[index];
        let (head, body) = message.fragment(seq);
        let (src, dst, line, kind) = (
            self.local,
            self.peer,
            self.incarnation,
            LinkKind::Data { last },
        );
        Some(FrameRef {
            src,
            dst,
            kind,
            seq,
            ack,
            incarnation: line,
            head,
            body,
            shared_body: message.body.shared(),
        })
    }

    /// Returns header and body of the next message, for a route that can carry whole messages.
    ///
    /// `None` unless the next fragment to transmit is the first one of the message, the body has at
    /// least `bytes_min` bytes, and no fragment of the message was transmitted since the last
    /// resync.
    pub fn next_whole_message(&self, bytes_min: usize) -> Option<(&[u8], &Bytes)> {
        let ready = self.route.is_some()
            && !self.peer_gone
            && self.rx.pending_ack != Some(true)
            && !self.tx.probe_pending;
        if !ready || self.tx.next_seq >= self.tx.end_seq || !self.is_window_open() {
            return None;
        }
        let message = &self.tx.retained[self.tx.retained_index(self.tx.next_seq)];
        let body = message
            .body
            .shared()
            .filter(|body| body.len() >= bytes_min)?;
        (message.first_seq == self.tx.next_seq).then_some((message.head(), body))
    }

    /// Marks the message that [`Link::next_whole_message`] returned as transmitted. Returns the
    /// number of its first fragment and the acknowledgement to send with it. The bytes of the
    /// message do not count for the window, because no daemon stores them.
    pub fn mark_whole_sent(&mut self, now: Micros) -> (u64, u64) {
        let tx = &mut self.tx;
        let (seq, fragments) = (
            tx.next_seq,
            tx.retained[tx.retained_index(tx.next_seq)].fragments,
        );
        tx.in_flight_sizes.extend((0..fragments).map(|_| 0));
        tx.next_seq += fragments;
        tx.highest_sent = tx.highest_sent.max(tx.next_seq);
        tx.probe_due.get_or_insert(now + tx.probe_delay);
        (seq, self.take_ack(false))
    }

    /// Creates a frame without payload.
    fn empty_frame(&mut self, kind: LinkKind, seq: u64) -> FrameRef<'_> {
        let ack = self.take_ack(matches!(kind, LinkKind::Ack { .. }));
        let (src, dst, line) = (self.local, self.peer, self.incarnation);
        FrameRef {
            src,
            dst,
            kind,
            seq,
            ack,
            incarnation: line,
            head: &[],
            body: &[],
            shared_body: None,
        }
    }

    /// Returns the acknowledgement for the next frame: the number of the next expected fragment.
    /// Clears a pending acknowledgement; a pending resync request is cleared only if `is_ack_frame`
    /// is true.
    #[inline]
    fn take_ack(&mut self, is_ack_frame: bool) -> u64 {
        let rx = &mut self.rx;
        (rx.unacked_bytes, rx.unacked_fragments, rx.ack_due) = (0, 0, None);
        if is_ack_frame || rx.pending_ack == Some(false) {
            rx.pending_ack = None;
        }
        rx.expected_seq
    }
}
