//! The link: the conversation of one task with one other, exactly once and in order, over routes that may break.
//!
//! A message is cut into fragments with rising sequence numbers. The sender keeps every message until the receiver's
//! library has it; the receiver takes only the fragment it expects and drops the rest. When a route is replaced, or
//! nothing is heard for a while, the sender asks with a small [`LinkKind::Probe`] what the receiver expects, and goes on
//! from there. No route has to be reliable for this; reliable ones just make re-sending rare.
//!
//! A task that was started again from a checkpoint lives on a new *timeline*: what it and its peers said after the
//! checkpoint was made did not happen. Frames carry the number of their timeline, so that none of the old one is taken for
//! one of the new one, however long it was on its way.
//!
//! The shell calls [`Link::send`] and [`Link::handle`], then [`Link::poll`] until it is empty, then sleeps no longer than
//! [`Link::next_wakeup`].

mod frame;
mod talk;

pub use self::frame::{
    FrameRef, LINK_HEAD_BYTES, LinkFrame, LinkKind, Payload, SHORT_HEAD_APART, SHORT_HEAD_BYTES,
    SHORT_HEAD_SPARE, decode_short_head, encode_short_head,
};
pub use self::talk::Talk;

use crate::ids::{Micros, RouteId, Tid};
use crate::pool;
use bytes::Bytes;
use std::collections::VecDeque;
use thiserror::Error;

/// Bytes of a fragment's payload at most.
pub const FRAGMENT_BYTES_MAX: usize = 64 << 10;
/// Bytes on their way and not yet acknowledged, per direction of a link. Bounds what daemons hold for it.
pub const WINDOW_BYTES_MAX: usize = 4 << 20;
/// Fragments on their way and not yet acknowledged, per direction of a link.
pub const WINDOW_FRAGMENTS_MAX: u64 = 4096;
/// Bytes a sender may keep for one receiver; beyond it [`Link::send`] refuses.
pub const RETAINED_BYTES_MAX: usize = 1 << 36;
/// Received bytes after which an acknowledgement is sent at once.
pub const ACK_BYTES: usize = WINDOW_BYTES_MAX / 8;
/// Received fragments after which an acknowledgement is sent at once.
pub const ACK_FRAGMENTS: u64 = WINDOW_FRAGMENTS_MAX / 8;
/// How long an acknowledgement may wait for data to travel with.
pub const ACK_DELAY: Micros = Micros::from_millis(20);
/// Silence after which the sender asks what has arrived.
pub const PROBE_DELAY: Micros = Micros::from_millis(300);
/// The longest pause between two probes; it doubles up to here.
pub const PROBE_DELAY_MAX: Micros = Micros::from_secs(5);
/// A second request to re-send from the same place within this time is taken for an echo.
pub const RESYNC_ECHO: Micros = Micros::from_millis(50);

/// Bytes of a message's header at most.
pub const HEAD_BYTES_MAX: usize = 24;
/// Bodies up to this size are kept in the link's own list: for them memory of their own costs more than the copy.
pub const SMALL_BYTES_MAX: usize = 128;
/// Messages of which a link keeps the list's memory when none waits any more.
const KEPT_MESSAGES: usize = 64;

/// What happens to a link from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// A frame from the peer arrived.
    Frame(LinkFrame),
    /// From now on this route may carry frames; what the former one carried may be lost.
    RouteUp(RouteId),
    /// There is no route; nothing is transmitted until the next [`LinkEvent::RouteUp`].
    RouteDown,
    /// The peer runs elsewhere now; frames on their way may be lost.
    PeerMoved,
    /// The peer has ended for good.
    PeerGone,
    /// The time of [`Link::next_wakeup`] has come.
    Wake,
}

/// What a link asks its shell to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkOutput {
    /// Hand this message to the application. Messages come in the order sent.
    Deliver(Bytes),
    /// Put this frame on the current route.
    Transmit(LinkFrame),
}

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LinkError {
    /// The receiver has not taken what was sent before; the message was not queued.
    #[error("{RETAINED_BYTES_MAX} bytes wait for this receiver already; the message was not sent")]
    Full,
}

/// The body of a message that is kept.
#[derive(Clone, Debug)]
enum Body {
    Small {
        len: u8,
        bytes: [u8; SMALL_BYTES_MAX],
    },
    Large(Bytes),
}

impl Body {
    /// A copy of a body that is small enough.
    #[inline]
    fn copy(body: &[u8]) -> Body {
        let mut bytes = [0; SMALL_BYTES_MAX];
        bytes[..body.len()].copy_from_slice(body);
        Body::Small {
            len: body.len() as u8,
            bytes,
        }
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        match self {
            Body::Small { len, bytes } => &bytes[..usize::from(*len)],
            Body::Large(bytes) => bytes,
        }
    }

    fn shared(&self) -> Option<&Bytes> {
        match self {
            Body::Small { .. } => None,
            Body::Large(bytes) => Some(bytes),
        }
    }
}

/// Fragments of a message of so many bytes, header included.
fn fragments_of(bytes: usize) -> u64 {
    (bytes.div_ceil(FRAGMENT_BYTES_MAX) as u64).max(1)
}

/// A message kept until it is acknowledged.
#[derive(Clone, Debug)]
struct Retained {
    first_seq: u64,
    fragments: u64,
    head: [u8; HEAD_BYTES_MAX],
    head_len: u8,
    body: Body,
}

impl Retained {
    #[inline]
    fn new(first_seq: u64, head: &[u8], body: Body) -> Retained {
        assert!(
            head.len() <= HEAD_BYTES_MAX,
            "a message's header has a limit"
        );
        let mut kept = [0; HEAD_BYTES_MAX];
        kept[..head.len()].copy_from_slice(head);
        let fragments = fragments_of(head.len() + body.bytes().len());
        Retained {
            first_seq,
            fragments,
            head: kept,
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

    /// Payload of the fragment `seq` of this message: the header in the first one, and a part of the body.
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

/// Sending half.
#[derive(Clone, Debug)]
struct Sender {
    /// Not fully acknowledged messages, oldest first.
    retained: VecDeque<Retained>,
    retained_bytes: usize,
    /// All below has been acknowledged.
    acked: u64,
    /// Next fragment to transmit; falls back to `acked` at most.
    next: u64,
    /// Next fragment never transmitted so far.
    fresh: u64,
    /// Number of the fragment after the last queued one.
    end: u64,
    /// Sizes of the fragments `acked..next`.
    flight: VecDeque<usize>,
    flight_bytes: usize,
    probe_due: Option<Micros>,
    probe_delay: Micros,
    probe_wanted: bool,
    last_resync: Option<(u64, Micros)>,
    unlimited: bool,
    /// What was transmitted below this went by ways that may have lost it, unless it is acknowledged.
    doubted: u64,
    /// What the process before this one had sent has yet to come back.
    back: Option<Box<talk::Back>>,
}

/// Receiving half.
#[derive(Clone, Debug)]
struct Receiver {
    expected: u64,
    partial: Vec<u8>,
    ready: VecDeque<Bytes>,
    unacked_bytes: usize,
    unacked_fragments: u64,
    ack_due: Option<Micros>,
    /// An acknowledgement to send at once; `true` asks to re-send.
    answer: Option<bool>,
    /// The gap at this number has been reported.
    reported_gap: Option<u64>,
}

/// One end of the conversation of two tasks. A copy is what a checkpoint keeps of it.
#[derive(Clone, Debug)]
pub struct Link {
    local: Tid,
    peer: Tid,
    route: Option<RouteId>,
    gone: bool,
    line: u16,
    tx: Sender,
    rx: Receiver,
}

/// True if the first of two timelines is the later one. They are few, so a difference of half of what there can be is none;
/// but zero, that of whoever was never started again, is earlier than all others, however many they have been.
pub fn is_later(line: u16, than: u16) -> bool {
    line != than && line != 0 && (than == 0 || line.wrapping_sub(than) < 1 << 15)
}

impl Sender {
    /// Which of the messages that are kept has this fragment.
    #[inline]
    fn holder(&self, seq: u64) -> usize {
        // Nearly always the newest.
        let newest = self
            .retained
            .back()
            .is_some_and(|m| m.first_seq <= seq)
            .then(|| self.retained.len() - 1);
        newest.unwrap_or_else(|| self.retained.partition_point(|m| m.end_seq() <= seq))
    }

    #[inline]
    fn keep(&mut self, message: Retained) {
        self.retained_bytes += message.len();
        self.end += message.fragments;
        self.retained.push_back(message);
    }

    /// Numbers what is kept from the beginning.
    fn number_anew(&mut self) {
        self.end = 1;
        for message in &mut self.retained {
            message.first_seq = self.end;
            self.end = message.end_seq();
        }
    }
}

impl Link {
    /// A link at its beginning, without a route.
    pub fn new(local: Tid, peer: Tid) -> Link {
        Link {
            local,
            peer,
            route: None,
            gone: false,
            line: 0,
            tx: Sender {
                retained: VecDeque::new(),
                retained_bytes: 0,
                acked: 1,
                next: 1,
                fresh: 1,
                end: 1,
                flight: VecDeque::new(),
                flight_bytes: 0,
                probe_due: None,
                probe_delay: PROBE_DELAY,
                probe_wanted: false,
                last_resync: None,
                unlimited: false,
                doubted: 1,
                back: None,
            },
            rx: Receiver {
                expected: 1,
                partial: Vec::new(),
                ready: VecDeque::new(),
                unacked_bytes: 0,
                unacked_fragments: 0,
                ack_due: None,
                answer: None,
                reported_gap: None,
            },
        }
    }

    // ---- getters

    /// The other end.
    pub fn peer(&self) -> Tid {
        self.peer
    }

    /// Number after the last fragment that was queued. A notification about this end's death that carries it is handed
    /// over only when the receiver has got that far.
    pub fn sent_end(&self) -> u64 {
        self.tx.end
    }

    /// The number expected next from the peer.
    pub fn expected(&self) -> u64 {
        self.rx.expected
    }

    /// True when every message has been acknowledged.
    pub fn is_flushed(&self) -> bool {
        self.tx.retained.is_empty()
    }

    /// True when every fragment has been put on the current route at least once, and none has yet to come back.
    #[inline]
    pub fn is_transmitted(&self) -> bool {
        self.tx.next >= self.tx.end && self.tx.back.is_none()
    }

    /// Fragments that were transmitted and not acknowledged.
    #[inline]
    pub fn in_flight(&self) -> u64 {
        self.tx.next - self.tx.acked
    }

    /// True after [`LinkEvent::PeerGone`].
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Bytes kept for the peer.
    pub fn retained_bytes(&self) -> usize {
        self.tx.retained_bytes
    }

    /// When [`LinkEvent::Wake`] is wanted, if at all.
    #[inline]
    pub fn next_wakeup(&self) -> Option<Micros> {
        self.route?;
        if self.gone {
            return None;
        }
        match (self.rx.ack_due, self.tx.probe_due) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    // ---- mutators

    /// Queues a message made of `head`, at most [`HEAD_BYTES_MAX`] bytes, and `body`, which is not copied. To a peer that has
    /// ended it vanishes, as PVM wants.
    ///
    /// # Errors
    /// [`LinkError::Full`] when [`RETAINED_BYTES_MAX`] is reached; nothing was queued.
    pub fn send(&mut self, head: impl AsRef<[u8]>, body: Bytes) -> Result<(), LinkError> {
        if self.gone {
            return Ok(());
        }
        let head = head.as_ref();
        if self.tx.retained_bytes + head.len() + body.len() > RETAINED_BYTES_MAX {
            return Err(LinkError::Full);
        }
        let body = if body.len() <= SMALL_BYTES_MAX {
            Body::copy(&body)
        } else {
            Body::Large(body)
        };
        self.tx.keep(Retained::new(self.tx.end, head, body));
        Ok(())
    }

    /// As [`Link::send`] with a body of [`SMALL_BYTES_MAX`] bytes at most, for a link that can transmit it at once and has
    /// nothing else to transmit: the frame for the route, which counts as transmitted. `None`, and nothing was queued,
    /// when something stands in the way.
    #[inline]
    pub fn send_at_once(&mut self, now: Micros, head: &[u8], body: &[u8]) -> Option<FrameRef<'_>> {
        let idle =
            self.tx.next == self.tx.end && !self.tx.probe_wanted && self.rx.answer != Some(true);
        if !idle
            || self.gone
            || self.route.is_none()
            || body.len() > SMALL_BYTES_MAX
            || !self.is_open()
        {
            return None;
        }
        self.tx
            .keep(Retained::new(self.tx.end, head, Body::copy(body)));
        self.next_data(now)
    }

    /// What the peer has not acknowledged is transmitted again, though nobody asked: what carried it may be lost, and there
    /// is no time to find out.
    pub fn transmit_again(&mut self) {
        self.tx.next = self.tx.acked;
        self.tx.flight.clear();
        self.tx.flight_bytes = 0;
    }

    /// From now on transmits without regard to the window. For a task that ends: its daemon takes over what is left, and what
    /// went by a route that was replaced since is transmitted again, because nobody will be there to hear what got through.
    pub fn lift_window(&mut self) {
        self.tx.unlimited = true;
        if std::mem::replace(&mut self.tx.doubted, 1) > self.tx.acked {
            self.transmit_again();
        }
    }

    /// This end was started again from a checkpoint, and everything of this timeline begins there. With `together` the peer
    /// was, too, from the same one: what the two ends know of each other stays true, and only frames of the time before do
    /// not count. Else the peer has gone on meanwhile: the conversation begins anew, with what was never on its way. The rest
    /// the peer has most probably had in the time before, and it is not to have it twice.
    pub fn begin_timeline(&mut self, line: u16, together: bool) {
        if !together {
            let fresh = self.tx.fresh;
            self.tx
                .retained
                .retain(|message| message.first_seq >= fresh);
            self.tx.retained_bytes = self.tx.retained.iter().map(Retained::len).sum();
            // What has yet to come back was on its way, too; unless that was before the conversation began anew already.
            self.tx.back.take_if(|back| !back.is_anew());
            self.restart(line);
        }
        self.line = line;
    }

    /// True if this timeline is a later one: the peer was started again.
    pub fn is_before(&self, line: u16) -> bool {
        is_later(line, self.line)
    }

    /// The timeline of this end.
    pub fn line(&self) -> u16 {
        self.line
    }

    /// The conversation begins anew on this timeline: what is kept gets new numbers, and half a message from the peer is none.
    fn restart(&mut self, line: u16) {
        let tx = &mut self.tx;
        if let Some(back) = &mut tx.back {
            back.begin_anew(tx.acked, &tx.retained);
        }
        tx.number_anew();
        tx.flight.clear();
        (tx.flight_bytes, tx.acked, tx.next, tx.fresh, tx.doubted) = (0, 1, 1, 1, 1);
        (
            tx.probe_due,
            tx.probe_wanted,
            tx.probe_delay,
            tx.last_resync,
        ) = (None, false, PROBE_DELAY, None);
        let rx = &mut self.rx;
        rx.partial.clear();
        (rx.expected, rx.unacked_bytes, rx.unacked_fragments) = (1, 0, 0);
        (rx.ack_due, rx.answer, rx.reported_gap) = (None, None, None);
        (self.line, self.gone) = (line, false);
    }

    /// Looks at the timeline of a frame of the peer; true if the frame counts.
    ///
    /// A later one: the peer was started again, and this end follows it. An earlier one: the peer does not know yet, unless
    /// the frame is an old one that was long on its way; either way an acknowledgement tells it.
    pub fn follow(&mut self, line: u16) -> bool {
        if line == self.line {
            return true;
        }
        if is_later(line, self.line) {
            self.restart(line);
            return true;
        }
        self.rx.answer.get_or_insert(false);
        false
    }

    /// Gives memory back that a busier time has left; for a link that is quiet.
    pub fn trim(&mut self) {
        if self.tx.retained.is_empty() {
            self.tx.retained.shrink_to(KEPT_MESSAGES);
            self.tx.flight.shrink_to(KEPT_MESSAGES);
            self.rx.ready.shrink_to(KEPT_MESSAGES);
        }
    }

    // ---- handle

    /// Takes an event.
    pub fn handle(&mut self, now: Micros, event: LinkEvent) {
        match event {
            LinkEvent::Frame(frame) => self.handle_frame(now, frame),
            LinkEvent::RouteUp(route) => {
                self.route = Some(route);
                self.ask_again();
            }
            LinkEvent::RouteDown => self.route = None,
            LinkEvent::PeerMoved => self.ask_again(),
            LinkEvent::PeerGone => {
                self.gone = true;
                let tx = &mut self.tx;
                tx.retained.clear();
                tx.flight.clear();
                tx.back = None;
                (
                    tx.retained_bytes,
                    tx.flight_bytes,
                    tx.probe_due,
                    tx.probe_wanted,
                ) = (0, 0, None, false);
                (tx.acked, tx.next, tx.fresh) = (tx.end, tx.end, tx.end);
            }
            LinkEvent::Wake => self.handle_wake(now),
        }
    }

    /// After a change of route: find out what got through, and make sure that the peer learns what got here.
    fn ask_again(&mut self) {
        self.tx.probe_delay = PROBE_DELAY;
        self.tx.probe_wanted = self.tx.fresh > self.tx.acked;
        self.tx.doubted = self.tx.fresh;
        if self.rx.expected > 1 {
            self.rx.answer.get_or_insert(false);
        }
    }

    fn handle_wake(&mut self, now: Micros) {
        if self.rx.ack_due.is_some_and(|due| due <= now) {
            self.rx.answer.get_or_insert(false);
        }
        if self.tx.probe_due.is_some_and(|due| due <= now) {
            self.tx.probe_delay = Micros(self.tx.probe_delay.0 * 2).min(PROBE_DELAY_MAX);
            self.tx.probe_due = Some(now + self.tx.probe_delay);
            self.tx.probe_wanted = true;
        }
    }

    fn handle_frame(&mut self, now: Micros, frame: LinkFrame) {
        if frame.src == self.peer && frame.dst == self.local && self.follow(frame.line) {
            self.take(now, frame.kind, frame.seq, frame.ack, frame.payload);
        }
    }

    /// Takes a frame of the peer, as [`Link::handle`] does, from where it lies.
    #[inline]
    pub fn take(&mut self, now: Micros, kind: LinkKind, seq: u64, ack: u64, payload: impl Payload) {
        // Also from a peer that has ended: what it sent before is still handed over, it just is not acknowledged.
        match kind {
            LinkKind::Data { last } => {
                self.handle_ack(now, ack, false);
                self.handle_data(now, seq, last, payload);
            }
            LinkKind::Ack { resync } => self.handle_ack(now, ack, resync),
            LinkKind::Probe => {
                self.handle_ack(now, ack, false);
                let missing = seq > self.rx.expected;
                self.rx.answer = Some(missing || self.rx.answer.unwrap_or(false));
            }
        }
    }

    /// Takes a whole message, header and body, whose first fragment has this number, as if it had come in fragments.
    pub fn take_whole(&mut self, now: Micros, seq: u64, ack: u64, message: Bytes) {
        self.handle_ack(now, ack, false);
        let rest = fragments_of(message.len()) - 1;
        if seq == self.rx.expected {
            // Only a peer that breaks the protocol begins a message within another.
            self.rx.partial.clear();
            self.rx.expected += rest;
            self.rx.unacked_fragments += rest;
            self.handle_data(now, seq + rest, true, message);
        } else {
            self.handle_data(now, seq, true, message);
        }
    }

    #[inline]
    fn handle_data(&mut self, now: Micros, seq: u64, last: bool, payload: impl Payload) {
        let rx = &mut self.rx;
        if seq < rx.expected {
            rx.answer.get_or_insert(false);
            return;
        }
        if seq > rx.expected {
            if rx.reported_gap != Some(rx.expected) {
                rx.reported_gap = Some(rx.expected);
                rx.answer = Some(true);
            }
            return;
        }
        rx.expected += 1;
        rx.unacked_fragments += 1;
        rx.unacked_bytes += payload.len();
        if last && rx.partial.is_empty() {
            rx.ready.push_back(payload.into_bytes());
        } else {
            pool::make_room_for_a_piece(&mut rx.partial, payload.len());
            payload.append_to(&mut rx.partial);
            if last {
                rx.ready
                    .push_back(pool::seal(std::mem::take(&mut rx.partial)));
            }
        }
        if rx.unacked_bytes >= ACK_BYTES || rx.unacked_fragments >= ACK_FRAGMENTS {
            rx.answer.get_or_insert(false);
        } else if rx.ack_due.is_none() {
            rx.ack_due = Some(now + ACK_DELAY);
        }
    }

    #[inline]
    fn handle_ack(&mut self, now: Micros, ack: u64, resync: bool) {
        let tx = &mut self.tx;
        if ack > tx.fresh {
            // Never sent: a peer that lies harms only its own link.
            return;
        }
        if ack > tx.acked {
            while tx.acked < ack {
                if let Some(bytes) = tx.flight.pop_front() {
                    tx.flight_bytes -= bytes;
                }
                tx.acked += 1;
            }
            tx.next = tx.next.max(tx.acked);
            while tx.retained.front().is_some_and(|m| m.end_seq() <= tx.acked) {
                let done = tx.retained.pop_front().expect("just seen");
                tx.retained_bytes -= done.len();
            }
            let is_owed = tx.fresh > tx.acked;
            tx.probe_delay = PROBE_DELAY;
            tx.probe_due = is_owed.then(|| now + tx.probe_delay);
            // A question that was not asked yet is answered: asked behind this it would be asked for ever.
            tx.probe_wanted &= is_owed;
        }
        if resync && ack == tx.acked && tx.next > ack {
            let echo = tx
                .last_resync
                .is_some_and(|(seq, at)| seq == ack && now.since(at) < RESYNC_ECHO);
            if !echo {
                tx.last_resync = Some((ack, now));
                tx.next = ack;
                tx.flight.clear();
                tx.flight_bytes = 0;
            }
        }
    }

    // ---- poll

    /// What to do next, or `None` when there is nothing.
    pub fn poll(&mut self, now: Micros) -> Option<LinkOutput> {
        if let Some(message) = self.take_message() {
            return Some(LinkOutput::Deliver(message));
        }
        Some(LinkOutput::Transmit(self.next_frame(now)?.to_frame()))
    }

    /// The next message for the application.
    #[inline]
    pub fn take_message(&mut self) -> Option<Bytes> {
        self.rx.ready.pop_front()
    }

    /// True when [`Link::next_frame`] has something.
    #[inline]
    pub fn has_frame(&self) -> bool {
        self.route.is_some()
            && !self.gone
            && (self.rx.answer.is_some()
                || self.tx.probe_wanted
                || (self.tx.next < self.tx.end && self.is_open()))
    }

    /// The next frame for the route; it counts as transmitted.
    #[inline]
    pub fn next_frame(&mut self, now: Micros) -> Option<FrameRef<'_>> {
        self.route?;
        if self.gone {
            return None;
        }
        if let Some(resync) = self.rx.answer {
            // What only acknowledges travels with data when there are any.
            let travels =
                !resync && !self.tx.probe_wanted && self.tx.next < self.tx.end && self.is_open();
            if !travels {
                return Some(self.frame(LinkKind::Ack { resync }, 0));
            }
        }
        if std::mem::take(&mut self.tx.probe_wanted) {
            self.tx.probe_due.get_or_insert(now + self.tx.probe_delay);
            let fresh = self.tx.fresh;
            return Some(self.frame(LinkKind::Probe, fresh));
        }
        self.next_data(now)
    }

    /// True when the window lets something through.
    #[inline]
    fn is_open(&self) -> bool {
        let tx = &self.tx;
        tx.back.is_none()
            && (tx.unlimited
                || (tx.flight_bytes < WINDOW_BYTES_MAX
                    && (tx.flight.len() as u64) < WINDOW_FRAGMENTS_MAX))
    }

    #[inline]
    fn next_data(&mut self, now: Micros) -> Option<FrameRef<'_>> {
        if self.tx.next >= self.tx.end || !self.is_open() {
            return None;
        }
        let tx = &mut self.tx;
        let seq = tx.next;
        let index = tx.holder(seq);
        let message = &tx.retained[index];
        let (head, body) = message.fragment(seq);
        let (len, last) = (head.len() + body.len(), seq + 1 == message.end_seq());
        tx.flight.push_back(len);
        tx.flight_bytes += len;
        tx.next += 1;
        tx.fresh = tx.fresh.max(tx.next);
        tx.probe_due.get_or_insert(now + tx.probe_delay);
        let ack = self.acknowledge(false);
        let message = &self.tx.retained[index];
        let (head, body) = message.fragment(seq);
        let (src, dst, line, kind) = (self.local, self.peer, self.line, LinkKind::Data { last });
        Some(FrameRef {
            src,
            dst,
            kind,
            seq,
            ack,
            line,
            head,
            body,
            shared: message.body.shared(),
        })
    }

    /// The next message, header and body, for a route that can carry it whole: when it comes next, nothing of it has been
    /// transmitted since the last re-sending, and its body has so many bytes at least.
    pub fn next_whole(&self, bytes_min: usize) -> Option<(&[u8], &Bytes)> {
        let ready = self.route.is_some()
            && !self.gone
            && self.rx.answer != Some(true)
            && !self.tx.probe_wanted;
        if !ready || self.tx.next >= self.tx.end || !self.is_open() {
            return None;
        }
        let message = &self.tx.retained[self.tx.holder(self.tx.next)];
        let body = message
            .body
            .shared()
            .filter(|body| body.len() >= bytes_min)?;
        (message.first_seq == self.tx.next).then_some((message.head(), body))
    }

    /// The message of [`Link::next_whole`] counts as transmitted: number of its first fragment, and what is acknowledged with
    /// it. Its bytes do not count for the window, because no daemon holds them.
    pub fn whole_sent(&mut self, now: Micros) -> (u64, u64) {
        let tx = &mut self.tx;
        let (seq, fragments) = (tx.next, tx.retained[tx.holder(tx.next)].fragments);
        tx.flight.extend((0..fragments).map(|_| 0));
        tx.next += fragments;
        tx.fresh = tx.fresh.max(tx.next);
        tx.probe_due.get_or_insert(now + tx.probe_delay);
        (seq, self.acknowledge(false))
    }

    /// A frame without payload.
    fn frame(&mut self, kind: LinkKind, seq: u64) -> FrameRef<'_> {
        let ack = self.acknowledge(matches!(kind, LinkKind::Ack { .. }));
        let (src, dst, line) = (self.local, self.peer, self.line);
        FrameRef {
            src,
            dst,
            kind,
            seq,
            ack,
            line,
            head: &[],
            body: &[],
            shared: None,
        }
    }

    /// What the next frame acknowledges: all that has arrived. A request to re-send only goes with `answers`.
    #[inline]
    fn acknowledge(&mut self, answers: bool) -> u64 {
        let rx = &mut self.rx;
        (rx.unacked_bytes, rx.unacked_fragments, rx.ack_due) = (0, 0, None);
        if answers || rx.answer == Some(false) {
            rx.answer = None;
        }
        rx.expected
    }
}
