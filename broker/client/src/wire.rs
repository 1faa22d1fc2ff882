//! Encoding of frames: postcard, on TLS with a length of 4 bytes in network order before it.

use sempa_broker_session::{ToBroker, ToMember};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Context of all messages between brokers and members within the virtual machine. Daemons do not
/// allocate this number.
pub const BROKER_CTX: i32 = 0x7fff8;
/// Largest size of a frame in bytes; above the largest message of a session.
pub const FRAME_BYTES_MAX: usize = 80 << 20;
/// Largest size of the first frame of a connection, which proves the secret.
pub const PROOF_BYTES_MAX: usize = 256;

/// Encodes a frame.
///
/// # Panics
/// Never for the frames of this protocol, whose types all can be encoded.
pub fn encode<T: Serialize>(frame: &T) -> Vec<u8> {
    postcard::to_stdvec(frame).unwrap_or_default()
}

/// Decodes a frame; `None` if the bytes are not a frame of this version.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    postcard::from_bytes(bytes).ok()
}

/// Decodes a frame of a member.
pub fn decode_to_broker(bytes: &[u8]) -> Option<ToBroker> {
    decode(bytes)
}

/// Decodes a frame of the broker.
pub fn decode_to_member(bytes: &[u8]) -> Option<ToMember> {
    decode(bytes)
}

/// Reads one frame of at most `bytes_max` bytes.
///
/// # Errors
/// The connection is closed or broken, or the frame is too large.
pub async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin),
    bytes_max: usize,
) -> io::Result<Vec<u8>> {
    let length = stream.read_u32().await? as usize;
    if length > bytes_max {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a frame of {length} bytes, more than {bytes_max}"),
        ));
    }
    let mut bytes = Vec::new();
    // Memory is taken as bytes arrive, not as the length announces.
    let mut limited = AsyncReadExt::take(stream, length as u64);
    limited.read_to_end(&mut bytes).await?;
    if bytes.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}

/// Appends a frame with its length to a buffer.
pub fn append_frame(buffer: &mut Vec<u8>, bytes: &[u8]) {
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    buffer.extend(length.to_be_bytes());
    buffer.extend(bytes);
}

/// Writes one frame.
///
/// # Errors
/// The connection is broken.
pub async fn write_frame(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(bytes.len() + 4);
    append_frame(&mut buffer, bytes);
    stream.write_all(&buffer).await?;
    stream.flush().await
}
