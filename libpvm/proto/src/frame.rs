//! Length-limited frames on a byte stream. A frame consists of a length field, one kind byte and
//! the body. The length field is a little-endian `u32`: the number of the bytes that follow the
//! field.
//!
//! Task sockets, tasker sockets and daemon streams use this framing. A header that announces more
//! than [`FRAME_BYTES_MAX`] bytes is an error before any of the body is stored, so a hostile peer
//! cannot force an allocation.

use crate::link::LinkFrame;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Serialize, de::DeserializeOwned};
use thiserror::Error;

/// Maximum length of a frame's body, in bytes. Messages are split into much smaller fragments; the
/// limit is large enough for control messages with a complete environment or argument list.
pub const FRAME_BYTES_MAX: usize = 64 << 20;

/// Size in bytes of the header: the length and the kind byte.
pub const FRAME_HEAD_BYTES: usize = 5;

/// Minimum allocation, in bytes, when the decoder's buffer is full. Hundreds of small frames share
/// the allocation.
const RESERVE_BYTES_MIN: usize = 64 << 10;

/// Maximum allocation, in bytes, for announced bytes that have not arrived. Without this limit a
/// peer could force large allocations, because an announcement costs the peer nothing.
const RESERVE_BYTES_MAX: usize = 256 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// A control message in postcard encoding. The stream and the direction determine the type of
    /// the message.
    Control,
    /// A [`LinkFrame`] between two tasks.
    Link,
    /// Raw bytes of a checkpoint image.
    Image,
}

impl FrameKind {
    fn code(self) -> u8 {
        match self {
            Self::Control => 0,
            Self::Link => 1,
            Self::Image => 2,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Control),
            1 => Some(Self::Link),
            2 => Some(Self::Image),
            _ => None,
        }
    }
}

/// Error for bytes that are not a valid frame. The stream is unusable afterwards.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    /// The announced length exceeds the limit.
    #[error("a frame of {0} bytes was announced, over the limit of {FRAME_BYTES_MAX}")]
    TooLong(usize),
    #[error("unknown frame kind {0}")]
    UnknownKind(u8),
    /// The body does not match its frame kind.
    #[error("the body of the frame cannot be decoded: {0}")]
    BadBody(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: FrameKind,
    /// The body, without the length and the kind byte.
    pub body: Bytes,
}

impl Frame {
    /// Decodes the body of a control frame into a `T`.
    ///
    /// # Errors
    /// [`FrameError::BadBody`] if the frame has another kind or its body does not encode a `T`.
    pub fn decode_control<T: DeserializeOwned>(&self) -> Result<T, FrameError> {
        if self.kind != FrameKind::Control {
            return Err(FrameError::BadBody(format!(
                "expected a control frame, got {:?}",
                self.kind
            )));
        }
        from_bytes(&self.body)
    }

    /// Decodes the body of a link frame.
    ///
    /// # Errors
    /// [`FrameError::BadBody`] if the frame has another kind or is too short.
    pub fn decode_link(&self) -> Result<LinkFrame, FrameError> {
        if self.kind != FrameKind::Link {
            return Err(FrameError::BadBody(format!(
                "expected a link frame, got {:?}",
                self.kind
            )));
        }
        LinkFrame::decode(self.body.clone())
            .ok_or_else(|| FrameError::BadBody("short or unknown link frame".into()))
    }
}

/// Serializes a control value in postcard encoding.
///
/// # Errors
/// [`FrameError::TooLong`] if the encoding exceeds [`FRAME_BYTES_MAX`]; [`FrameError::BadBody`] if
/// the value cannot be encoded.
pub fn to_bytes<T: Serialize>(value: &T) -> Result<Vec<u8>, FrameError> {
    let bytes = postcard::to_stdvec(value).map_err(|e| FrameError::BadBody(e.to_string()))?;
    if bytes.len() > FRAME_BYTES_MAX {
        return Err(FrameError::TooLong(bytes.len()));
    }
    Ok(bytes)
}

/// Deserializes a control value from postcard encoding.
///
/// # Errors
/// [`FrameError::BadBody`] if the bytes do not encode a `T`.
pub fn from_bytes<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, FrameError> {
    postcard::from_bytes(bytes).map_err(|e| FrameError::BadBody(e.to_string()))
}

/// Deserializes a value from the start of `bytes`, whatever follows.
///
/// # Errors
/// [`FrameError::BadBody`] if `bytes` do not begin with a `T`.
pub fn decode_start<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, FrameError> {
    let start = postcard::take_from_bytes(bytes).map(|(value, _)| value);
    start.map_err(|e| FrameError::BadBody(e.to_string()))
}

/// Encodes a control message as a complete frame.
///
/// # Errors
/// [`FrameError::TooLong`] if the message exceeds [`FRAME_BYTES_MAX`].
pub fn encode_control<T: Serialize>(value: &T) -> Result<Bytes, FrameError> {
    let body = to_bytes(value)?;
    Ok(encode_frame(FrameKind::Control, &[&body]))
}

/// Returns the frame header (length and kind byte) for a body of `body_len` bytes.
pub fn encode_frame_head(kind: FrameKind, body_len: usize) -> [u8; FRAME_HEAD_BYTES] {
    let length =
        u32::try_from(body_len + 1).expect("callers cut what they send below the frame limit");
    let mut head = [kind.code(); FRAME_HEAD_BYTES];
    head[..4].copy_from_slice(&length.to_le_bytes());
    head
}

/// Encodes a frame whose body is the concatenation of `parts`.
pub fn encode_frame(kind: FrameKind, parts: &[&[u8]]) -> Bytes {
    let body_len: usize = parts.iter().map(|p| p.len()).sum();
    assert!(
        body_len <= FRAME_BYTES_MAX,
        "callers cut what they send below the frame limit"
    );
    let mut out = BytesMut::with_capacity(FRAME_HEAD_BYTES + body_len);
    out.put_slice(&encode_frame_head(kind, body_len));
    for part in parts {
        out.put_slice(part);
    }
    out.freeze()
}

/// Encodes a link frame as a complete frame of kind [`FrameKind::Link`].
pub fn encode_link(frame: &LinkFrame) -> Bytes {
    encode_frame(FrameKind::Link, &[&frame.encode_head(), &frame.payload])
}

/// Splits a byte stream into frames. The caller appends bytes with [`push`](Self::push) and removes
/// frames with [`next_frame`](Self::next_frame).
#[derive(Debug, Default)]
pub struct FrameDecoder {
    buffer: BytesMut,
}

impl FrameDecoder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends bytes that were read from the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.buffer.capacity() - self.buffer.len() < bytes.len() {
            // Reserve space for the whole frame at once, so that its first bytes are not copied
            // repeatedly.
            self.buffer.reserve(
                self.missing_bytes()
                    .clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX)
                    .max(bytes.len()),
            );
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the number of bytes that are missing from the first frame, as announced by the
    /// frame's length field; 0 if the length field has not arrived.
    fn missing_bytes(&self) -> usize {
        let announced_len = self
            .buffer
            .first_chunk::<4>()
            .map_or(0, |head| 4 + u32::from_le_bytes(*head) as usize);
        announced_len.saturating_sub(self.buffer.len())
    }

    /// Returns the buffer, so that the caller can read from the stream into this buffer. Bytes that
    /// the caller appends count as pushed.
    pub fn buffer_mut(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// Removes and returns the next complete frame; `None` if more bytes are needed.
    ///
    /// # Errors
    /// The header announces an invalid length or an unknown kind. The stream is unusable
    /// afterwards.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some(head) = self.buffer.first_chunk::<4>() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes(*head) as usize;
        if len == 0 || len - 1 > FRAME_BYTES_MAX {
            return Err(FrameError::TooLong(len));
        }
        if let Some(&code) = self.buffer.get(4)
            && FrameKind::from_code(code).is_none()
        {
            return Err(FrameError::UnknownKind(code));
        }
        if self.buffer.len() < 4 + len {
            return Ok(None);
        }
        self.buffer.advance(4);
        let mut body = self.buffer.split_to(len).freeze();
        let code = body.get_u8();
        let kind = FrameKind::from_code(code).ok_or(FrameError::UnknownKind(code))?;
        Ok(Some(Frame { kind, body }))
    }

    /// True if the buffer contains no bytes. False while the buffer contains a partial frame.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two frames are decoded correctly wherever their bytes are split between two pushes.
    #[test]
    fn frames_decode_across_any_split() {
        let stream: Vec<u8> = [
            encode_control(&(1u32, "one")),
            encode_control(&(2u32, "two")),
        ]
        .into_iter()
        .flat_map(|f| f.expect("small").to_vec())
        .collect();
        for split_at in 0..=stream.len() {
            let mut decoder = FrameDecoder::new();
            let mut decoded_pairs = Vec::new();
            for part in [&stream[..split_at], &stream[split_at..]] {
                decoder.push(part);
                while let Some(frame) = decoder.next_frame().expect("a good stream") {
                    decoded_pairs.push(frame.decode_control::<(u32, String)>().expect("a pair"));
                }
            }
            assert_eq!(
                decoded_pairs,
                [(1, "one".to_string()), (2, "two".to_string())]
            );
            assert!(decoder.is_empty());
        }
    }

    #[test]
    fn oversized_frame_is_refused_by_its_header() {
        let mut decoder = FrameDecoder::new();
        decoder.push(&u32::MAX.to_le_bytes());
        assert_eq!(
            decoder.next_frame(),
            Err(FrameError::TooLong(u32::MAX as usize))
        );
    }

    /// A frame of valid length with an unknown kind byte is refused.
    #[test]
    fn unknown_kind_byte_is_refused() {
        let mut decoder = FrameDecoder::new();
        decoder.push(b"\x20\0\0\0GET / HTTP/1.1");
        assert_eq!(decoder.next_frame(), Err(FrameError::UnknownKind(b'G')));
    }
}
