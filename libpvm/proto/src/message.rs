//! A PVM message: header and body.

use crate::ids::Tid;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// Bytes of a message's header on a link.
pub const MESSAGE_HEAD_BYTES: usize = 16;

/// `enc` of a message whose body is XDR (`pvm_getminfo`).
pub const ENC_XDR: i32 = 0x1000_0000;
/// Data signature of x86-64: `enc` of a raw message made there.
pub const DSIG_X86_64: i32 = 0x0040_8c41;
/// `enc` of a user trace event.
pub const ENC_TRACE: i32 = 0x4000_0000;

/// Context of control messages between tasks (`TC_*` tags).
pub const CTX_TASK_CONTROL: i32 = 0x7ffff;
/// Context of the group server's messages.
pub const CTX_GROUPS: i32 = 0x7fffc;
/// The context every task starts in.
pub const CTX_BASE: i32 = 0;

/// A message with all that a receiver can ask about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The task, or daemon, that sent it.
    pub src: Tid,
    /// The task, or daemon, it is for.
    pub dst: Tid,
    /// Context in which it was sent.
    pub ctx: i32,
    /// The sender's tag.
    pub tag: i32,
    /// Wait id: pairs the request to a resource manager with its reply; 0 otherwise.
    pub wid: i32,
    /// How the body is encoded: [`ENC_XDR`], a data signature, or [`ENC_TRACE`].
    pub enc: i32,
    /// The packed items.
    pub body: Bytes,
}

/// A message's header: context, tag, wait id, encoding; little-endian.
#[inline]
pub fn message_head(ctx: i32, tag: i32, wid: i32, enc: i32) -> [u8; MESSAGE_HEAD_BYTES] {
    let mut head = [0; MESSAGE_HEAD_BYTES];
    for (place, word) in head.chunks_exact_mut(4).zip([ctx, tag, wid, enc]) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    head
}

impl Message {
    /// The header as it travels in front of the body on a link; source and destination are the link's.
    pub fn head(&self) -> [u8; MESSAGE_HEAD_BYTES] {
        message_head(self.ctx, self.tag, self.wid, self.enc)
    }

    /// Header and body in one piece.
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(MESSAGE_HEAD_BYTES + self.body.len());
        out.put_slice(&self.head());
        out.put_slice(&self.body);
        out.freeze()
    }

    /// Reads what a link handed over; `None` when it is shorter than a header.
    pub fn decode(src: Tid, dst: Tid, mut bytes: Bytes) -> Option<Message> {
        if bytes.len() < MESSAGE_HEAD_BYTES {
            return None;
        }
        let mut word = || bytes.get_i32_le();
        let (ctx, tag, wid, enc) = (word(), word(), word(), word());
        Some(Message {
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
