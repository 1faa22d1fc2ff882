//! The link: exactly-once, in-order messages between two tasks over routes that may break.
//!
//! - A message is split into fragments with ascending sequence numbers. The sender retains every
//!   message until the receiver's library has received it. The receiver accepts only the fragment
//!   it expects and drops all other fragments.
//! - After a change of the route, or when the peer is silent for a while, the sender asks with a
//!   [`LinkKind::Probe`] which fragment the receiver expects, and continues from that fragment.
//!   Routes need not be reliable; reliable routes make retransmissions rare.
//! - A task that was restarted from a checkpoint has a new *incarnation*: everything that the task
//!   and its peers sent after the checkpoint is void. Frames contain the number of their
//!   incarnation, so a frame of an earlier incarnation is recognized however late it arrives.
//!
//! The owner of a link calls [`Link::send`] and [`Link::handle_event`], then calls [`Link::poll`]
//! until it returns `None`, and then sleeps at most until [`Link::next_wakeup`].

mod frame;
mod handoff;
mod placed;
mod small;
mod window;

pub use self::frame::{
    CPU_HINT_INDEX, FLAG_OUT_OF_LINE, FrameRef, LINK_HEAD_BYTES, LinkFrame, LinkKind, Payload,
    SHORT_HEAD_BYTES, decode_short_head, encode_short_head,
};
pub use self::handoff::LinkState;
pub use self::small::SmallFrame;
use self::window::Window;

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
pub const ACK_THRESHOLD_BYTES: usize = WINDOW_BYTES_MAX / 8;
/// Number of received fragments after which an acknowledgement is sent immediately.
pub const ACK_THRESHOLD_FRAGMENTS: u64 = WINDOW_FRAGMENTS_MAX / 8;
/// Maximum time that an acknowledgement waits for a data frame that can carry it.
pub const ACK_DELAY: Micros = Micros::from_millis(20);
/// Time without an acknowledgement after which the sender probes the receiver for the first time.
pub const PROBE_DELAY: Micros = Micros::from_millis(300);
/// Maximum interval between two probes; the interval doubles up to this limit.
pub const PROBE_DELAY_MAX: Micros = Micros::from_secs(5);
/// Time within which a second resync request for the same fragment counts as a duplicate.
pub const DUPLICATE_RESYNC_TIME: Micros = Micros::from_millis(50);

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
    /// As [`LinkEvent::RouteUp`], with a route that loses nothing and on which the sender sees how
    /// far the receiver has read: the owner calls [`Link::confirm_received`]. The route needs no
    /// acknowledgements, no probes and no window.
    ConfirmingRouteUp(RouteId),
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
    /// Too many bytes of earlier messages wait for the receiver's acknowledgement; the message was
    /// not queued.
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
    fn copy_inline(body: &[u8]) -> Self {
        let mut bytes = [0; INLINE_BODY_BYTES_MAX];
        bytes[..body.len()].copy_from_slice(body);
        Self::Inline {
            len: body.len() as u8,
            bytes,
        }
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Self::Shared(bytes) => bytes,
        }
    }

    fn shared_bytes(&self) -> Option<&Bytes> {
        match self {
            Self::Inline { .. } => None,
            Self::Shared(bytes) => Some(bytes),
        }
    }
}

/// Returns the number of fragments of a message with `message_bytes` bytes, header included.
fn fragment_count(message_bytes: usize) -> u64 {
    (message_bytes.div_ceil(FRAGMENT_BYTES_MAX) as u64).max(1)
}

/// Copies the header of a message, which has at most [`HEAD_BYTES_MAX`] bytes.
#[inline]
fn copy_head(head: &[u8]) -> [u8; HEAD_BYTES_MAX] {
    assert!(
        head.len() <= HEAD_BYTES_MAX,
        "a message's header has a limit"
    );
    let mut head_bytes = [0; HEAD_BYTES_MAX];
    head_bytes[..head.len()].copy_from_slice(head);
    head_bytes
}

/// A message that is retained until all its fragments are acknowledged.
#[derive(Clone, Debug)]
struct RetainedMessage {
    first_seq: u64,
    fragment_count: u64,
    head: [u8; HEAD_BYTES_MAX],
    head_len: u8,
    body: Body,
}

impl RetainedMessage {
    #[inline]
    fn new(first_seq: u64, head: &[u8], body: Body) -> Self {
        let count = fragment_count(head.len() + body.bytes().len());
        Self {
            first_seq,
            fragment_count: count,
            head: copy_head(head),
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
        self.first_seq + self.fragment_count
    }

    /// Returns the payload of fragment `seq` in two parts: the message header (empty except in the
    /// first fragment) and a part of the body.
    fn fragment_payload(&self, seq: u64) -> (&[u8], &[u8]) {
        let index = usize::try_from(seq - self.first_seq).expect("fragments fit the address space");
        let head_len = usize::from(self.head_len);
        let (start, end) = (
            index * FRAGMENT_BYTES_MAX,
            ((index + 1) * FRAGMENT_BYTES_MAX).min(self.len()),
        );
        let body = self.body.bytes();
        if index > 0 {
            (&[], &body[start - head_len..end - head_len])
        } else {
            (self.head(), &body[..end - head_len])
        }
    }
}

/// State of the messages that this end of a link sends.
#[derive(Clone, Debug)]
struct SendHalf {
    /// Messages that are not completely acknowledged, oldest first.
    retained_messages: VecDeque<RetainedMessage>,
    retained_bytes: usize,
    /// All fragments below this number are acknowledged.
    acked_below: u64,
    /// Number of the next fragment to transmit. A resync request lowers this number, but not below
    /// `acked_below`.
    next_seq: u64,
    /// Number of the first fragment that was never transmitted.
    first_unsent_seq: u64,
    /// Number after the last queued fragment.
    end_seq: u64,
    window: Window,
    probe_due_at: Option<Micros>,
    probe_delay: Micros,
    probe_pending: bool,
    /// Fragment number and time of the last resync request that was not a duplicate.
    last_resync: Option<(u64, Micros)>,
    window_disabled: bool,
    /// Unacknowledged fragments below this number were transmitted on routes that may have lost
    /// them.
    maybe_lost_below: u64,
    /// Set while the daemon has not yet returned all messages that the previous process of this
    /// task had sent.
    returning_messages: Option<Box<handoff::ReturningMessages>>,
}

/// A complete message that a link has received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedMessage {
    /// Number after the last fragment of the message.
    pub end_seq: u64,
    /// Header of a message whose body arrived apart from it; otherwise empty.
    pub head: Bytes,
    /// Body of the message, preceded by the header unless `head` contains it.
    pub bytes: Bytes,
}

impl ReceivedMessage {
    /// Returns header and body as one sequence of bytes.
    pub fn into_contiguous(self) -> Bytes {
        if self.head.is_empty() {
            self.bytes
        } else {
            [self.head, self.bytes].concat().into()
        }
    }
}

/// State of the messages that this end of a link receives.
#[derive(Clone, Debug)]
struct ReceiveHalf {
    expected_seq: u64,
    /// Payloads of the accepted fragments of an incomplete message, and after them
    /// `placed_bytes` of the next fragment.
    partial_message: Vec<u8>,
    /// Number of bytes of the expected fragment that a route has written to the end of
    /// `partial_message`, before the fragment is complete.
    placed_bytes: usize,
    /// Complete messages, oldest first.
    ready_messages: VecDeque<ReceivedMessage>,
    unacked_bytes: usize,
    unacked_fragments: u64,
    ack_due_at: Option<Micros>,
    /// Set if an acknowledgement must be sent immediately; `true` if the acknowledgement requests a
    /// resync.
    pending_ack: Option<bool>,
    /// Number of the missing fragment for which a resync was requested.
    reported_gap: Option<u64>,
}

/// One end of a link between two tasks. A checkpoint of a task stores a copy of each end.
#[derive(Clone, Debug)]
pub struct Link {
    local_tid: Tid,
    peer: Tid,
    route: Option<RouteId>,
    /// Set if the route confirms what the receiver has read: the number of the first fragment that
    /// can have been transmitted on it. Earlier fragments may be lost, and until they are
    /// acknowledged the receiver may drop what it reads.
    confirms_from: Option<u64>,
    /// Number of times that fragments were scheduled to be transmitted again.
    retransmission_count: u64,
    peer_gone: bool,
    incarnation: u16,
    tx: SendHalf,
    rx: ReceiveHalf,
}

/// True if `incarnation` is later than `other`.
///
/// Incarnation numbers wrap around: `incarnation` is later if counting up from `other` reaches
/// `incarnation` in fewer steps than half of the number range. Zero, the incarnation of a task that
/// was never restarted, is earlier than all other numbers.
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
        let newest_index = self
            .retained_messages
            .back()
            .is_some_and(|m| m.first_seq <= seq)
            .then(|| self.retained_messages.len() - 1);
        newest_index.unwrap_or_else(|| {
            self.retained_messages
                .partition_point(|m| m.end_seq() <= seq)
        })
    }

    #[inline]
    fn retain_message(&mut self, message: RetainedMessage) {
        self.retained_bytes += message.len();
        self.end_seq += message.fragment_count;
        self.retained_messages.push_back(message);
    }

    /// Renumbers the fragments of the retained messages, starting with 1.
    fn renumber_fragments(&mut self) {
        self.end_seq = 1;
        for message in &mut self.retained_messages {
            message.first_seq = self.end_seq;
            self.end_seq = message.end_seq();
        }
    }
}

impl Link {
    /// Creates an unused link that has no route yet.
    pub fn new(local_tid: Tid, peer: Tid) -> Self {
        Self {
            local_tid,
            peer,
            route: None,
            confirms_from: None,
            retransmission_count: 0,
            peer_gone: false,
            incarnation: 0,
            tx: SendHalf {
                retained_messages: VecDeque::new(),
                retained_bytes: 0,
                acked_below: 1,
                next_seq: 1,
                first_unsent_seq: 1,
                end_seq: 1,
                window: Window::default(),
                probe_due_at: None,
                probe_delay: PROBE_DELAY,
                probe_pending: false,
                last_resync: None,
                window_disabled: false,
                maybe_lost_below: 1,
                returning_messages: None,
            },
            rx: ReceiveHalf {
                expected_seq: 1,
                partial_message: Vec::new(),
                placed_bytes: 0,
                ready_messages: VecDeque::new(),
                unacked_bytes: 0,
                unacked_fragments: 0,
                ack_due_at: None,
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
    /// this number.
    pub fn queued_end_seq(&self) -> u64 {
        self.tx.end_seq
    }

    /// Returns the number of the next fragment expected from the peer.
    pub fn expected_seq(&self) -> u64 {
        self.rx.expected_seq
    }

    /// Returns the number below which the peer has acknowledged all fragments.
    pub fn acked_below(&self) -> u64 {
        self.tx.acked_below
    }

    /// True if the route confirms what the receiver has read, and everything that was transmitted
    /// on earlier routes is acknowledged.
    pub fn confirms_all(&self) -> bool {
        self.confirms_from
            .is_some_and(|first| self.tx.acked_below >= first)
    }

    /// True if `byte_count` more bytes can be retained for the peer.
    pub fn has_space_for(&self, byte_count: usize) -> bool {
        self.tx.retained_bytes + byte_count <= RETAINED_BYTES_MAX
    }

    /// Schedules a probe, so that the peer acknowledges immediately what has arrived.
    pub fn request_ack(&mut self) {
        self.tx.probe_pending = self.tx.first_unsent_seq > self.tx.acked_below;
    }

    /// Schedules an acknowledgement. If the peer has ended, its daemon answers with that.
    pub fn schedule_ack(&mut self) {
        self.rx.pending_ack.get_or_insert(false);
    }

    /// True if every queued message has been acknowledged.
    pub fn is_all_acked(&self) -> bool {
        self.tx.retained_messages.is_empty()
    }

    /// True if every fragment was transmitted on the current route at least once and the daemon has
    /// returned all messages of the previous process.
    #[inline]
    pub fn is_all_transmitted(&self) -> bool {
        self.tx.next_seq >= self.tx.end_seq && self.tx.returning_messages.is_none()
    }

    /// Returns the number of fragments that are transmitted but not acknowledged.
    #[inline]
    pub fn in_flight_fragments(&self) -> u64 {
        self.tx.next_seq - self.tx.acked_below
    }

    /// True once [`LinkEvent::PeerGone`] was handled.
    #[inline]
    pub fn is_peer_gone(&self) -> bool {
        self.peer_gone
    }

    pub fn retained_bytes(&self) -> usize {
        self.tx.retained_bytes
    }

    /// Returns the time at which the link needs [`LinkEvent::Wake`]; `None` if the link needs no
    /// wake-up.
    #[inline]
    pub fn next_wakeup(&self) -> Option<Micros> {
        self.route?;
        if self.peer_gone {
            return None;
        }
        match (self.rx.ack_due_at, self.tx.probe_due_at) {
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
            Body::copy_inline(&body)
        } else {
            Body::Shared(body)
        };
        self.tx
            .retain_message(RetainedMessage::new(self.tx.end_seq, head, body));
        Ok(())
    }

    /// Records that the next fragment, of `fragment_bytes` bytes, is transmitted.
    #[inline]
    fn record_transmission(&mut self, now: Micros, fragment_bytes: usize) {
        let tx = &mut self.tx;
        if self.confirms_from.is_none() {
            tx.window.record_transmission(tx.next_seq, fragment_bytes);
            tx.probe_due_at.get_or_insert(now + tx.probe_delay);
        }
        tx.next_seq += 1;
        tx.first_unsent_seq = tx.first_unsent_seq.max(tx.next_seq);
    }

    /// Schedules the retransmission of every unacknowledged fragment, without a resync request.
    /// Used by a sender that ends before an answer to a probe could arrive.
    pub fn schedule_retransmission(&mut self) {
        self.retransmission_count += 1;
        self.tx.next_seq = self.tx.acked_below;
        self.tx.window.clear();
    }

    /// Disables the window: all queued fragments are transmitted. Used by a task that ends, because
    /// its daemon accepts the remaining frames. Fragments that were transmitted on a replaced route
    /// are retransmitted, because the task ends before it could learn which of them arrived.
    pub fn disable_window(&mut self) {
        self.tx.window_disabled = true;
        if std::mem::replace(&mut self.tx.maybe_lost_below, 1) > self.tx.acked_below {
            self.schedule_retransmission();
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
            let first_unsent_seq = self.tx.first_unsent_seq;
            self.tx
                .retained_messages
                .retain(|message| message.first_seq >= first_unsent_seq);
            self.tx.retained_bytes = self
                .tx
                .retained_messages
                .iter()
                .map(RetainedMessage::len)
                .sum();
            // The messages that the daemon has not returned yet were transmitted by the previous
            // process, so these messages are dropped as well. Exception: if the link was reset
            // after the messages were sent, the peer cannot have received them.
            self.tx
                .returning_messages
                .take_if(|pending_return| !pending_return.was_reset());
            self.reset_to_incarnation(incarnation);
        }
        self.incarnation = incarnation;
    }

    /// True if `incarnation` is later than the link's incarnation, which means that the peer was
    /// restarted.
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
        if let Some(pending_return) = &mut tx.returning_messages {
            pending_return.record_reset(tx.acked_below, &tx.retained_messages);
        }
        tx.renumber_fragments();
        tx.window.clear();
        (
            tx.acked_below,
            tx.next_seq,
            tx.first_unsent_seq,
            tx.maybe_lost_below,
        ) = (1, 1, 1, 1);
        (
            tx.probe_due_at,
            tx.probe_pending,
            tx.probe_delay,
            tx.last_resync,
        ) = (None, false, PROBE_DELAY, None);
        let rx = &mut self.rx;
        rx.partial_message.clear();
        rx.placed_bytes = 0;
        (rx.expected_seq, rx.unacked_bytes, rx.unacked_fragments) = (1, 0, 0);
        (rx.ack_due_at, rx.pending_ack, rx.reported_gap) = (None, None, None);
        (self.incarnation, self.peer_gone) = (incarnation, false);
        self.retransmission_count += 1;
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
        if self.tx.retained_messages.is_empty() {
            self.tx.retained_messages.shrink_to(IDLE_QUEUE_CAPACITY);
            self.tx.window.shrink_idle();
            self.rx.ready_messages.shrink_to(IDLE_QUEUE_CAPACITY);
        }
    }

    pub fn handle_event(&mut self, now: Micros, event: LinkEvent) {
        match event {
            LinkEvent::Frame(frame) => self.handle_frame(now, frame),
            LinkEvent::RouteUp(route) => {
                (self.route, self.confirms_from) = (Some(route), None);
                self.schedule_probe();
            }
            LinkEvent::ConfirmingRouteUp(route) => {
                (self.route, self.confirms_from) = (Some(route), Some(self.tx.first_unsent_seq));
                self.tx.window.clear();
                self.schedule_probe();
            }
            LinkEvent::RouteDown => (self.route, self.confirms_from) = (None, None),
            LinkEvent::PeerMigrated => self.schedule_probe(),
            LinkEvent::PeerGone => {
                self.peer_gone = true;
                let tx = &mut self.tx;
                tx.retained_messages.clear();
                tx.window.clear();
                tx.returning_messages = None;
                (tx.retained_bytes, tx.probe_due_at, tx.probe_pending) = (0, None, false);
                (tx.acked_below, tx.next_seq, tx.first_unsent_seq) =
                    (tx.end_seq, tx.end_seq, tx.end_seq);
            }
            LinkEvent::Wake => self.handle_wake(now),
        }
    }

    /// Schedules a probe after a route change, to learn which fragments arrived, and an
    /// acknowledgement of the fragments that arrived at this end.
    fn schedule_probe(&mut self) {
        self.tx.probe_delay = PROBE_DELAY;
        self.tx.probe_pending = self.tx.first_unsent_seq > self.tx.acked_below;
        self.tx.maybe_lost_below = self.tx.first_unsent_seq;
        if self.rx.expected_seq > 1 {
            self.rx.pending_ack.get_or_insert(false);
        }
    }

    fn handle_wake(&mut self, now: Micros) {
        if self.rx.ack_due_at.is_some_and(|due_time| due_time <= now) {
            self.rx.pending_ack.get_or_insert(false);
        }
        if self.tx.probe_due_at.is_some_and(|due_time| due_time <= now) {
            self.tx.probe_delay = Micros(self.tx.probe_delay.0 * 2).min(PROBE_DELAY_MAX);
            self.tx.probe_due_at = Some(now + self.tx.probe_delay);
            self.tx.probe_pending = true;
        }
    }

    fn handle_frame(&mut self, now: Micros, frame: LinkFrame) {
        if frame.src == self.peer
            && frame.dst == self.local_tid
            && self.accept_incarnation(frame.incarnation)
        {
            self.handle_borrowed_frame(now, frame.kind, frame.seq, frame.ack, frame.payload);
        }
    }

    /// Processes a frame of the peer as [`Link::handle_event`] does, with a payload that is
    /// borrowed from the memory of the route. The caller must have checked the frame's incarnation.
    #[inline]
    pub fn handle_borrowed_frame(
        &mut self,
        now: Micros,
        kind: LinkKind,
        seq: u64,
        ack: u64,
        payload: impl Payload,
    ) {
        // Frames from a peer that has ended are valid, too: the peer's earlier messages are still
        // delivered, only not acknowledged.
        match kind {
            LinkKind::Data {
                is_last: is_last_fragment,
            } => {
                self.handle_ack(now, ack, false);
                self.handle_data(now, seq, is_last_fragment, payload);
            }
            LinkKind::Ack {
                requests_resync: is_resync,
            } => self.handle_ack(now, ack, is_resync),
            LinkKind::Probe => {
                self.handle_ack(now, ack, false);
                let is_fragment_missing = seq > self.rx.expected_seq;
                self.rx.pending_ack =
                    Some(is_fragment_missing || self.rx.pending_ack.unwrap_or(false));
            }
        }
    }

    /// Processes a complete message, given as header and body, as if the message had arrived in
    /// fragments. `seq` is the number of the message's first fragment.
    pub fn handle_whole_message(
        &mut self,
        now: Micros,
        (seq, ack): (u64, u64),
        head: Bytes,
        body: Bytes,
    ) {
        self.handle_ack(now, ack, false);
        if seq != self.rx.expected_seq {
            return self.handle_data(now, seq, true, body);
        }
        let preceding_count = fragment_count(head.len() + body.len()) - 1;
        // Only a peer that violates the protocol starts a message before the previous message is
        // complete.
        self.rx.partial_message.clear();
        self.rx.placed_bytes = 0;
        self.rx.expected_seq += preceding_count;
        self.rx.unacked_fragments += preceding_count;
        self.handle_data(now, seq + preceding_count, true, body);
        if let Some(message) = self.rx.ready_messages.back_mut() {
            message.head = head;
        }
    }

    #[inline]
    fn handle_data(&mut self, now: Micros, seq: u64, is_last: bool, payload: impl Payload) {
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
        rx.drop_placed_bytes();
        rx.expected_seq += 1;
        let payload_bytes = payload.len();
        if is_last && rx.partial_message.is_empty() {
            rx.ready_messages.push_back(ReceivedMessage {
                end_seq: rx.expected_seq,
                head: Bytes::new(),
                bytes: payload.into_bytes(),
            });
        } else {
            buffer_pool::reserve_for_growth(&mut rx.partial_message, payload.len());
            payload.append_to(&mut rx.partial_message);
            if is_last {
                rx.complete_partial_message();
            }
        }
        self.count_received_fragment(now, payload_bytes);
    }

    /// Counts an accepted fragment, and schedules its acknowledgement unless the route confirms
    /// what is received.
    #[inline]
    fn count_received_fragment(&mut self, now: Micros, payload_bytes: usize) {
        let rx = &mut self.rx;
        rx.unacked_fragments += 1;
        rx.unacked_bytes += payload_bytes;
        if self.confirms_from.is_some() {
            return;
        }
        if rx.unacked_bytes >= ACK_THRESHOLD_BYTES
            || rx.unacked_fragments >= ACK_THRESHOLD_FRAGMENTS
        {
            rx.pending_ack.get_or_insert(false);
        } else if rx.ack_due_at.is_none() {
            rx.ack_due_at = Some(now + ACK_DELAY);
        }
    }

    #[inline]
    fn handle_ack(&mut self, now: Micros, ack: u64, requests_resync: bool) {
        let tx = &mut self.tx;
        if ack > tx.first_unsent_seq {
            // The fragment `ack - 1` was never sent. A peer that violates the protocol affects only
            // its own link.
            return;
        }
        if ack > tx.acked_below {
            tx.window.record_ack(ack);
            tx.acked_below = ack;
            tx.next_seq = tx.next_seq.max(tx.acked_below);
            while tx
                .retained_messages
                .front()
                .is_some_and(|m| m.end_seq() <= tx.acked_below)
            {
                let acked_message = tx.retained_messages.pop_front().expect("just seen");
                tx.retained_bytes -= acked_message.len();
            }
            let has_unacked_fragments = tx.first_unsent_seq > tx.acked_below;
            tx.probe_delay = PROBE_DELAY;
            tx.probe_due_at = (has_unacked_fragments && self.confirms_from.is_none())
                .then(|| now + tx.probe_delay);
            // This acknowledgement answers a probe that was not sent yet. If the probe were sent
            // now, with no fragment outstanding, the probe would be repeated forever.
            tx.probe_pending &= has_unacked_fragments;
        }
        if requests_resync && ack == tx.acked_below && tx.next_seq > ack {
            let is_duplicate = tx.last_resync.is_some_and(|(seq, resync_time)| {
                seq == ack && now.since(resync_time) < DUPLICATE_RESYNC_TIME
            });
            if !is_duplicate {
                tx.last_resync = Some((ack, now));
                self.retransmission_count += 1;
                tx.next_seq = ack;
                tx.window.clear();
            }
        }
    }

    /// Records that the receiver has read all fragments below `seq` from a confirming route.
    pub fn confirm_received(&mut self, now: Micros, seq: u64) {
        if self.confirms_all() {
            self.handle_ack(now, seq, false);
        }
    }

    /// Returns a counter that increases whenever fragments are transmitted again, so that positions
    /// on the route no longer tell which fragments the receiver has.
    pub fn retransmission_count(&self) -> u64 {
        self.retransmission_count
    }

    /// Returns the number of the next fragment to transmit.
    pub fn next_seq(&self) -> u64 {
        self.tx.next_seq
    }

    /// Returns the next action; `None` if the owner has nothing to do now.
    pub fn poll(&mut self, now: Micros) -> Option<LinkOutput> {
        if let Some(message) = self.take_message() {
            return Some(LinkOutput::Deliver(message.into_contiguous()));
        }
        Some(LinkOutput::Transmit(self.next_frame(now)?.to_frame()))
    }

    /// Removes and returns the next complete message for the application.
    #[inline]
    pub fn take_message(&mut self) -> Option<ReceivedMessage> {
        self.rx.ready_messages.pop_front()
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
        if let Some(is_resync) = self.rx.pending_ack {
            // An acknowledgement without a resync request is sent with a data frame if there is
            // one.
            let sends_with_data = !is_resync
                && !self.tx.probe_pending
                && self.tx.next_seq < self.tx.end_seq
                && self.is_window_open();
            if !sends_with_data {
                return Some(self.empty_frame(
                    LinkKind::Ack {
                        requests_resync: is_resync,
                    },
                    0,
                ));
            }
        }
        if std::mem::take(&mut self.tx.probe_pending) {
            self.tx
                .probe_due_at
                .get_or_insert(now + self.tx.probe_delay);
            let probe_seq = self.tx.first_unsent_seq;
            return Some(self.empty_frame(LinkKind::Probe, probe_seq));
        }
        self.next_data_frame(now)
    }

    /// True if the window permits another fragment.
    #[inline]
    fn is_window_open(&self) -> bool {
        let tx = &self.tx;
        tx.returning_messages.is_none()
            && (tx.window_disabled || self.confirms_from.is_some() || tx.window.is_open())
    }

    #[inline]
    fn next_data_frame(&mut self, now: Micros) -> Option<FrameRef<'_>> {
        if self.tx.next_seq >= self.tx.end_seq || !self.is_window_open() {
            return None;
        }
        let tx = &self.tx;
        let seq = tx.next_seq;
        let index = tx.retained_index(seq);
        let message = &tx.retained_messages[index];
        let (head, body) = message.fragment_payload(seq);
        let (len, is_last_fragment) = (head.len() + body.len(), seq + 1 == message.end_seq());
        self.record_transmission(now, len);
        let ack = self.take_ack(false);
        let message = &self.tx.retained_messages[index];
        let (head, body) = message.fragment_payload(seq);
        let (src, dst, link_incarnation, kind) = (
            self.local_tid,
            self.peer,
            self.incarnation,
            LinkKind::Data {
                is_last: is_last_fragment,
            },
        );
        Some(FrameRef {
            src,
            dst,
            kind,
            seq,
            ack,
            incarnation: link_incarnation,
            head,
            body,
            shared_body: message.body.shared_bytes(),
        })
    }

    /// Returns header and body of the next message, for a route that can carry whole messages.
    ///
    /// The message must have a body of at least `bytes_min` bytes, and the next fragment to
    /// transmit must be its first one. Returns `None` for any other message, and if the link may
    /// not transmit a fragment now.
    pub fn next_whole_message(&self, bytes_min: usize) -> Option<(&[u8], &Bytes)> {
        let may_transmit = self.route.is_some()
            && !self.peer_gone
            && self.rx.pending_ack != Some(true)
            && !self.tx.probe_pending;
        if !may_transmit || self.tx.next_seq >= self.tx.end_seq || !self.is_window_open() {
            return None;
        }
        let message = &self.tx.retained_messages[self.tx.retained_index(self.tx.next_seq)];
        let body = message
            .body
            .shared_bytes()
            .filter(|body| body.len() >= bytes_min)?;
        (message.first_seq == self.tx.next_seq).then_some((message.head(), body))
    }

    /// Marks the message that [`Link::next_whole_message`] returned as transmitted. Returns the
    /// number of the message's first fragment and the acknowledgement to send with the message. The
    /// window ignores the bytes of the message, because no daemon stores them.
    pub fn mark_whole_message_sent(&mut self, now: Micros) -> (u64, u64) {
        let tx = &mut self.tx;
        let (seq, count) = (
            tx.next_seq,
            tx.retained_messages[tx.retained_index(tx.next_seq)].fragment_count,
        );
        if self.confirms_from.is_none() {
            (seq..seq + count).for_each(|seq| tx.window.record_transmission(seq, 0));
            tx.probe_due_at.get_or_insert(now + tx.probe_delay);
        }
        tx.next_seq += count;
        tx.first_unsent_seq = tx.first_unsent_seq.max(tx.next_seq);
        (seq, self.take_ack(false))
    }

    /// Creates a frame without payload.
    fn empty_frame(&mut self, kind: LinkKind, seq: u64) -> FrameRef<'_> {
        let ack = self.take_ack(matches!(kind, LinkKind::Ack { .. }));
        let (src, dst, link_incarnation) = (self.local_tid, self.peer, self.incarnation);
        FrameRef {
            src,
            dst,
            kind,
            seq,
            ack,
            incarnation: link_incarnation,
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
        (rx.unacked_bytes, rx.unacked_fragments, rx.ack_due_at) = (0, 0, None);
        if is_ack_frame || rx.pending_ack == Some(false) {
            rx.pending_ack = None;
        }
        rx.expected_seq
    }
}
