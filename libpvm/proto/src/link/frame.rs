//! The frames of a link, for routes by the daemons and for those that only the two ends use.

use crate::ids::Tid;
use bytes::{Buf, BufMut, Bytes};

/// Bytes of a frame's header on the wire.
pub const LINK_HEAD_BYTES: usize = 28;

/// What a link frame means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// A fragment; `last` ends its message.
    Data {
        /// This fragment completes a message.
        last: bool,
    },
    /// Acknowledges all below `ack`; `resync` asks to re-send from there.
    Ack {
        /// The receiver misses something.
        resync: bool,
    },
    /// Asks what the receiver expects; `seq` is the next fragment the sender will send for the first time.
    Probe,
}

impl LinkKind {
    /// Its number and its flag in a header.
    fn code(self) -> (u8, bool) {
        match self {
            LinkKind::Data { last } => (1, last),
            LinkKind::Ack { resync } => (2, resync),
            LinkKind::Probe => (3, false),
        }
    }

    fn from_code(number: u8, flag: bool) -> Option<LinkKind> {
        match number {
            1 => Some(LinkKind::Data { last: flag }),
            2 => Some(LinkKind::Ack { resync: flag }),
            3 => Some(LinkKind::Probe),
            _ => None,
        }
    }
}

/// Bytes of a header on a route that only the two ends use: it names nobody.
pub const SHORT_HEAD_BYTES: usize = 16;
/// A byte of that header that is the route's own.
pub const SHORT_HEAD_SPARE: usize = 7;
/// Numbers of fragments in it have this many bits: enough for a million a second through eight years.
const SHORT_SEQ_BITS: u32 = 48;
/// The bit for the flag, above the kind.
const SHORT_FLAG: u64 = 0x10;
/// Bit of the first byte of such a header: the route carries a whole message apart, the record says where it is.
pub const SHORT_HEAD_APART: u8 = 0x20;
const KIND_BITS: u64 = 0xf;

/// A short header; [`SHORT_HEAD_SPARE`] is 0.
#[inline]
pub fn encode_short_head(kind: LinkKind, seq: u64, ack: u64) -> [u8; SHORT_HEAD_BYTES] {
    let (kind, flag) = kind.code();
    let seq = seq & ((1 << SHORT_SEQ_BITS) - 1);
    let word = seq << 8 | if flag { SHORT_FLAG } else { 0 } | u64::from(kind);
    let mut head = [0; SHORT_HEAD_BYTES];
    let mut out = &mut head[..];
    out.put_u64_le(word);
    out.put_u64_le(ack);
    head
}

/// What stands in a short header: kind, number and acknowledgement. `None` when the kind is unknown.
#[inline]
pub fn decode_short_head(head: [u8; SHORT_HEAD_BYTES]) -> Option<(LinkKind, u64, u64)> {
    let mut head = &head[..];
    let (word, ack) = (head.get_u64_le(), head.get_u64_le());
    let kind = LinkKind::from_code((word & KIND_BITS) as u8, word & SHORT_FLAG != 0)?;
    Some((kind, word >> 8 & ((1 << SHORT_SEQ_BITS) - 1), ack))
}

/// One unit between the two ends of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkFrame {
    /// The end that made it.
    pub src: Tid,
    /// The end it is for.
    pub dst: Tid,
    /// What it means.
    pub kind: LinkKind,
    /// Number of the fragment (data), next new number (probe), 0 (ack).
    pub seq: u64,
    /// The number `src` expects next from `dst`: all below has arrived.
    pub ack: u64,
    /// The timeline that it belongs to; see [`super::Link::begin_timeline`].
    pub line: u16,
    /// The fragment; empty unless data.
    pub payload: Bytes,
}

impl LinkFrame {
    /// The header: kind, flag, timeline, src, dst, seq, ack; little-endian.
    pub fn encode_head(&self) -> [u8; LINK_HEAD_BYTES] {
        let (kind, flag) = self.kind.code();
        let mut head = [0; LINK_HEAD_BYTES];
        let mut out = &mut head[..];
        out.put_u8(kind);
        out.put_u8(u8::from(flag));
        out.put_u16_le(self.line);
        out.put_i32_le(self.src.raw());
        out.put_i32_le(self.dst.raw());
        out.put_u64_le(self.seq);
        out.put_u64_le(self.ack);
        head
    }

    /// What a frame means, without a look at the rest.
    pub fn kind_of(bytes: &[u8]) -> Option<LinkKind> {
        let head: &[u8; LINK_HEAD_BYTES] = bytes.first_chunk()?;
        LinkKind::from_code(head[0], head[1] != 0)
    }

    /// Reads a frame, or `None` when it is too short or of an unknown kind.
    pub fn decode(mut bytes: Bytes) -> Option<LinkFrame> {
        if bytes.len() < LINK_HEAD_BYTES {
            return None;
        }
        let (kind, flag) = (bytes.get_u8(), bytes.get_u8() != 0);
        let line = bytes.get_u16_le();
        let (src, dst) = (
            Tid::from_raw(bytes.get_i32_le()),
            Tid::from_raw(bytes.get_i32_le()),
        );
        let (seq, ack) = (bytes.get_u64_le(), bytes.get_u64_le());
        let kind = LinkKind::from_code(kind, flag)?;
        Some(LinkFrame {
            src,
            dst,
            kind,
            seq,
            ack,
            line,
            payload: bytes,
        })
    }
}

/// The bytes of a fragment, wherever they lie: they are copied at most once on their way into a message.
pub trait Payload {
    /// How many there are.
    fn len(&self) -> usize;
    /// True when there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// All of them as one piece.
    fn into_bytes(self) -> Bytes;
    /// Puts them behind others.
    fn append_to(self, out: &mut Vec<u8>);
}

impl Payload for Bytes {
    fn len(&self) -> usize {
        Bytes::len(self)
    }
    fn into_bytes(self) -> Bytes {
        self
    }
    fn append_to(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self);
    }
}

impl Payload for &[u8] {
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
    fn into_bytes(self) -> Bytes {
        Bytes::copy_from_slice(self)
    }
    fn append_to(self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
}

/// A frame to be put on the route, whose payload still lies where the message lies.
#[derive(Clone, Copy, Debug)]
pub struct FrameRef<'a> {
    /// The end that makes it.
    pub src: Tid,
    /// The end it is for.
    pub dst: Tid,
    /// As in [`LinkFrame`].
    pub kind: LinkKind,
    /// As in [`LinkFrame`].
    pub seq: u64,
    /// As in [`LinkFrame`].
    pub ack: u64,
    /// As in [`LinkFrame`].
    pub line: u16,
    /// First part of the payload: the message's header, in its first fragment.
    pub head: &'a [u8],
    /// The rest of the payload: a part of the message's body.
    pub body: &'a [u8],
    /// The whole body, where it can be shared.
    pub(super) shared: Option<&'a Bytes>,
}

impl FrameRef<'_> {
    /// The header for a route that only the two ends use; [`SHORT_HEAD_SPARE`] is 0.
    #[inline]
    pub fn encode_short_head(&self) -> [u8; SHORT_HEAD_BYTES] {
        encode_short_head(self.kind, self.seq, self.ack)
    }

    /// The frame by itself. A payload without a header is shared with the message, not copied.
    pub fn to_frame(&self) -> LinkFrame {
        let payload = match self.shared {
            Some(whole) if self.head.is_empty() => whole.slice_ref(self.body),
            _ => [self.head, self.body].concat().into(),
        };
        let FrameRef {
            src,
            dst,
            kind,
            seq,
            ack,
            line,
            ..
        } = *self;
        LinkFrame {
            src,
            dst,
            kind,
            seq,
            ack,
            line,
            payload,
        }
    }
}
