//! The frames of a link in two formats: one for routes through the daemons, and a shorter one for
//! routes that connect the two tasks directly.

use crate::ids::Tid;
use bytes::{Buf, BufMut, Bytes};

/// Size in bytes of a frame header on a route through the daemons.
pub const LINK_HEAD_BYTES: usize = 28;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// A fragment of a message.
    Data {
        /// True if the fragment is the last one of its message.
        is_last: bool,
    },
    /// Acknowledges all fragments below `ack`.
    Ack {
        /// True if a fragment is missing: the receiver must retransmit from fragment `ack`.
        requests_resync: bool,
    },
    /// Asks which fragment the peer expects; `seq` is the number of the first fragment that was
    /// never transmitted.
    Probe,
}

impl LinkKind {
    /// Returns the kind number and the flag by which a header encodes this kind.
    fn code(self) -> (u8, bool) {
        match self {
            Self::Data {
                is_last: is_last_fragment,
            } => (1, is_last_fragment),
            Self::Ack {
                requests_resync: is_resync,
            } => (2, is_resync),
            Self::Probe => (3, false),
        }
    }

    fn from_code(number: u8, flag: bool) -> Option<Self> {
        match number {
            1 => Some(Self::Data { is_last: flag }),
            2 => Some(Self::Ack {
                requests_resync: flag,
            }),
            3 => Some(Self::Probe),
            _ => None,
        }
    }
}

/// Size in bytes of a short header, for a route that connects the two tasks directly. A short
/// header contains no tids.
pub const SHORT_HEAD_BYTES: usize = 16;
/// Index of the byte of a short header in which the route stores a hint about the sender's
/// processor.
pub const CPU_HINT_INDEX: usize = 7;
/// Number of bits of a sequence number in a short header. At a million fragments a second, 48 bits
/// suffice for eight years.
const SHORT_SEQ_BITS: u32 = 48;
/// Bit of a short header's first word that encodes the flag of the kind.
const SHORT_KIND_FLAG: u64 = 0x10;
/// Bit of a short header's first byte that is set if the message is stored outside the frame; the
/// frame then contains the location of the message.
pub const FLAG_OUT_OF_LINE: u8 = 0x20;
const SHORT_KIND_MASK: u64 = 0xf;

/// Encodes a short header; [`CPU_HINT_INDEX`] is 0.
#[inline]
pub fn encode_short_head(kind: LinkKind, seq: u64, ack: u64) -> [u8; SHORT_HEAD_BYTES] {
    let (kind, flag) = kind.code();
    let seq = seq & ((1 << SHORT_SEQ_BITS) - 1);
    let word = seq << 8 | if flag { SHORT_KIND_FLAG } else { 0 } | u64::from(kind);
    let mut head = [0; SHORT_HEAD_BYTES];
    let mut out = &mut head[..];
    out.put_u64_le(word);
    out.put_u64_le(ack);
    head
}

/// Decodes a short header into kind, sequence number and acknowledgement. `None` if the kind is
/// unknown.
#[inline]
pub fn decode_short_head(head: [u8; SHORT_HEAD_BYTES]) -> Option<(LinkKind, u64, u64)> {
    let mut head = &head[..];
    let (word, ack) = (head.get_u64_le(), head.get_u64_le());
    let kind = LinkKind::from_code((word & SHORT_KIND_MASK) as u8, word & SHORT_KIND_FLAG != 0)?;
    Some((kind, word >> 8 & ((1 << SHORT_SEQ_BITS) - 1), ack))
}

/// One unit of transmission between the two ends of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkFrame {
    /// Tid of the sending end.
    pub src: Tid,
    /// Tid of the receiving end.
    pub dst: Tid,
    pub kind: LinkKind,
    /// For a data frame the number of the fragment, for a probe the number of the first fragment
    /// that was never transmitted, for an acknowledgement 0.
    pub seq: u64,
    /// Number of the fragment that `src` expects next from `dst`; all fragments below this number
    /// have arrived.
    pub ack: u64,
    /// Incarnation of the link; see [`super::Link::begin_incarnation`].
    pub incarnation: u16,
    /// Payload of a data frame; otherwise empty.
    pub payload: Bytes,
}

impl LinkFrame {
    /// Encodes the header: kind, flag, incarnation, src, dst, seq, ack; little-endian.
    pub fn encode_head(&self) -> [u8; LINK_HEAD_BYTES] {
        let (kind, flag) = self.kind.code();
        let mut head = [0; LINK_HEAD_BYTES];
        let mut out = &mut head[..];
        out.put_u8(kind);
        out.put_u8(u8::from(flag));
        out.put_u16_le(self.incarnation);
        out.put_i32_le(self.src.raw());
        out.put_i32_le(self.dst.raw());
        out.put_u64_le(self.seq);
        out.put_u64_le(self.ack);
        head
    }

    /// Returns the kind of an encoded frame without decoding the other fields; `None` if the frame
    /// is too short or its kind is unknown.
    pub fn peek_kind(bytes: &[u8]) -> Option<LinkKind> {
        let head: &[u8; LINK_HEAD_BYTES] = bytes.first_chunk()?;
        LinkKind::from_code(head[0], head[1] != 0)
    }

    /// Decodes a frame; `None` if `bytes` is too short or the kind is unknown.
    pub fn decode(mut bytes: Bytes) -> Option<Self> {
        if bytes.len() < LINK_HEAD_BYTES {
            return None;
        }
        let (kind, flag) = (bytes.get_u8(), bytes.get_u8() != 0);
        let link_incarnation = bytes.get_u16_le();
        let (src, dst) = (
            Tid::from_raw(bytes.get_i32_le()),
            Tid::from_raw(bytes.get_i32_le()),
        );
        let (seq, ack) = (bytes.get_u64_le(), bytes.get_u64_le());
        let kind = LinkKind::from_code(kind, flag)?;
        Some(Self {
            src,
            dst,
            kind,
            seq,
            ack,
            incarnation: link_incarnation,
            payload: bytes,
        })
    }
}

/// The payload of a frame, in any kind of memory. The payload is copied at most once, into the
/// message to which it belongs.
pub trait Payload {
    fn len(&self) -> usize;
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Converts the payload into one contiguous buffer.
    fn into_bytes(self) -> Bytes;
    /// Appends the payload to a buffer.
    fn append_to(self, out: &mut Vec<u8>);
}

impl Payload for Bytes {
    fn len(&self) -> usize {
        Self::len(self)
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

/// A frame to transmit, whose payload is borrowed from the retained message.
#[derive(Clone, Copy, Debug)]
pub struct FrameRef<'a> {
    /// Tid of the sending end.
    pub src: Tid,
    /// Tid of the receiving end.
    pub dst: Tid,
    pub kind: LinkKind,
    pub seq: u64,
    pub ack: u64,
    pub incarnation: u16,
    /// First part of the payload: the message header, in the first fragment only.
    pub head: &'a [u8],
    /// Second part of the payload: a part of the message body.
    pub body: &'a [u8],
    /// The whole message body, if the body can be shared without a copy.
    pub(super) shared_body: Option<&'a Bytes>,
}

impl FrameRef<'_> {
    /// Encodes the short header of this frame; [`CPU_HINT_INDEX`] is 0.
    #[inline]
    pub fn encode_short_head(&self) -> [u8; SHORT_HEAD_BYTES] {
        encode_short_head(self.kind, self.seq, self.ack)
    }

    /// Returns the number of bytes of the message that follow this fragment, if the message has a
    /// large body; otherwise 0.
    pub fn following_bytes(&self) -> usize {
        let end_address = |bytes: &[u8]| bytes.as_ptr_range().end.addr();
        self.shared_body
            .map_or(0, |whole| end_address(whole) - end_address(self.body))
    }

    /// Converts the frame into an owned frame. A payload without a message header shares the memory
    /// of the message body.
    pub fn to_frame(&self) -> LinkFrame {
        let payload = match self.shared_body {
            Some(shared_body) if self.head.is_empty() => shared_body.slice_ref(self.body),
            _ => [self.head, self.body].concat().into(),
        };
        let FrameRef {
            src,
            dst,
            kind,
            seq,
            ack,
            incarnation: link_incarnation,
            ..
        } = *self;
        LinkFrame {
            src,
            dst,
            kind,
            seq,
            ack,
            incarnation: link_incarnation,
            payload,
        }
    }
}
