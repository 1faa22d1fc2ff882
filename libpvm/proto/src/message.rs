//! A PVM message and the encoding of its header.

use crate::ids::Tid;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// Size in bytes of the message header on a link.
pub const MESSAGE_HEAD_BYTES: usize = 16;

/// `enc` value of a message whose body is XDR (`pvm_getminfo`).
pub const ENC_XDR: i32 = 0x1000_0000;
/// Data signature of x86-64, which is also the `enc` value of a raw message from an x86-64 machine.
pub const DSIG_X86_64: i32 = 0x0040_8c41;
/// `enc` value of a user trace event.
pub const ENC_TRACE: i32 = 0x4000_0000;

/// Context of control messages between tasks (`TC_*` tags of PVM).
pub const CTX_TASK_CONTROL: i32 = 0x7ffff;
pub const CTX_GROUPS: i32 = 0x7fffc;
/// Context of a task until the task or its parent selects another context.
pub const CTX_BASE: i32 = 0;

/// A message with every property that a receiver can query.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Sending task or daemon.
    pub src: Tid,
    /// Receiving task or daemon.
    pub dst: Tid,
    pub ctx: i32,
    pub tag: i32,
    /// Wait id: pairs a request to a resource manager with its reply; otherwise 0.
    pub wid: i32,
    /// Encoding of the body: [`ENC_XDR`], a data signature, or [`ENC_TRACE`].
    pub enc: i32,
    pub body: Bytes,
}

/// Encodes a message header as four little-endian words: context, tag, wait id, encoding.
#[inline]
pub fn encode_message_head(ctx: i32, tag: i32, wid: i32, enc: i32) -> [u8; MESSAGE_HEAD_BYTES] {
    let mut head = [0; MESSAGE_HEAD_BYTES];
    for (place, word) in head.chunks_exact_mut(4).zip([ctx, tag, wid, enc]) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    head
}

/// Decodes a message header into context, tag, wait id and encoding.
#[inline]
pub fn decode_message_head(head: &[u8; MESSAGE_HEAD_BYTES]) -> (i32, i32, i32, i32) {
    let mut words = &head[..];
    (
        words.get_i32_le(),
        words.get_i32_le(),
        words.get_i32_le(),
        words.get_i32_le(),
    )
}

impl Message {
    /// Encodes the header that precedes the body on a link. The header does not contain source and
    /// destination, because the link implies them.
    pub fn encode_head(&self) -> [u8; MESSAGE_HEAD_BYTES] {
        encode_message_head(self.ctx, self.tag, self.wid, self.enc)
    }

    /// Encodes the message as it is sent on a link: header, then body.
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(MESSAGE_HEAD_BYTES + self.body.len());
        out.put_slice(&self.encode_head());
        out.put_slice(&self.body);
        out.freeze()
    }

    /// Decodes a message that a link delivered; `None` if `bytes` is shorter than a header.
    pub fn decode(src: Tid, dst: Tid, mut bytes: Bytes) -> Option<Self> {
        let (ctx, tag, wid, enc) = decode_message_head(bytes.first_chunk()?);
        bytes.advance(MESSAGE_HEAD_BYTES);
        Some(Self {
            src,
            dst,
            ctx,
            tag,
            wid,
            enc,
            body: bytes,
        })
    }
}
