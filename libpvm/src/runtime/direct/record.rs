//! TLS 1.3 records, encrypted and decrypted in place with the keys of a finished handshake.
//! Decryption makes the contents of adjacent records contiguous without copying.

use super::RouteEnd;
use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use rustls::ConnectionTrafficSecrets;

/// Size of the record header: type, version and length.
pub(super) const HEAD_BYTES: usize = 5;
/// Size of the content type and the authentication tag, which follow the content of a record.
pub(super) const TAIL_BYTES: usize = 17;
/// Maximum length of the content of a record, as TLS defines it.
pub(super) const CONTENT_BYTES_MAX: usize = 16 << 10;
/// Maximum length of a record from a peer: TLS allows padding.
pub(super) const RECORD_BYTES_MAX: usize = HEAD_BYTES + CONTENT_BYTES_MAX + 256;
/// Size of the ciphers' authentication tag.
const TAG_BYTES: usize = 16;
/// First three bytes of every record after the handshake: type "application data" and the version
/// number that TLS 1.3 always sends.
const HEAD_PREFIX: [u8; 3] = [23, 3, 3];

/// Content type of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentType {
    /// Closing of the connection, or an error.
    Alert,
    /// Message of the handshake protocol: a key update.
    Handshake,
    /// Application data, here frames.
    Data,
}

impl ContentType {
    fn code(self) -> u8 {
        match self {
            ContentType::Alert => 21,
            ContentType::Handshake => 22,
            ContentType::Data => 23,
        }
    }

    fn from_code(code: u8) -> Option<ContentType> {
        [
            ContentType::Alert,
            ContentType::Handshake,
            ContentType::Data,
        ]
        .into_iter()
        .find(|kind| kind.code() == code)
    }
}

/// Key that encrypts or decrypts the records of one direction.
pub(super) struct TrafficKey {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    record_count: u64,
}

impl TrafficKey {
    /// Creates a key from the secrets of TLS and the number of records that have used it. `None`
    /// for an unknown cipher.
    pub(super) fn new((records, secrets): (u64, ConnectionTrafficSecrets)) -> Option<TrafficKey> {
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return None,
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).ok()?;
        Some(TrafficKey {
            key: LessSafeKey::new(key),
            iv: iv.as_ref().try_into().ok()?,
            record_count: records,
        })
    }

    /// Returns the number of records that have used the key.
    pub(super) fn record_count(&self) -> u64 {
        self.record_count
    }

    /// Returns the next nonce. It contains the record number, so no nonce repeats.
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..]
            .iter_mut()
            .zip(self.record_count.to_be_bytes())
        {
            *byte ^= number;
        }
        self.record_count += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts a record in place. The content starts at [`HEAD_BYTES`] and is followed by
    /// [`TAIL_BYTES`] of free space.
    pub(super) fn seal(&mut self, kind: ContentType, record: &mut [u8]) {
        let length = record.len() - HEAD_BYTES;
        let head = record_head(length);
        record[..HEAD_BYTES].copy_from_slice(&head);
        let (inner, tag) = record[HEAD_BYTES..].split_at_mut(length - TAG_BYTES);
        *inner.last_mut().expect("the type of the content") = kind.code();
        let nonce = self.nonce();
        let sealed = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(head), inner);
        tag.copy_from_slice(
            sealed
                .expect("records are far below the limit of the ciphers")
                .as_ref(),
        );
    }

    /// Decrypts the record from `at` to the end of `bytes`, and moves its content to the start of
    /// `bytes`. Returns length and type of the content.
    pub(super) fn open(
        &mut self,
        bytes: &mut [u8],
        at: usize,
    ) -> Result<(usize, ContentType), RouteEnd> {
        let mut head = [0; HEAD_BYTES];
        head.copy_from_slice(&bytes[at..at + HEAD_BYTES]);
        let nonce = self.nonce();
        let inner = self
            .key
            .open_within(nonce, Aad::from(head), bytes, at + HEAD_BYTES..)
            .map_err(|_| {
                RouteEnd::ProtocolError("a record was not made with the key of this route")
            })?;
        // TLS allows zero padding after the type.
        let end = inner
            .iter()
            .rposition(|byte| *byte != 0)
            .ok_or(RouteEnd::ProtocolError("an empty record"))?;
        let kind = ContentType::from_code(inner[end])
            .ok_or(RouteEnd::ProtocolError("a record of an unknown type"))?;
        if end > CONTENT_BYTES_MAX {
            return Err(RouteEnd::ProtocolError("a record is too long"));
        }
        Ok((end, kind))
    }
}

fn record_head(length: usize) -> [u8; HEAD_BYTES] {
    let [high, low] = u16::try_from(length)
        .expect("records are shorter than 64 KiB")
        .to_be_bytes();
    [HEAD_PREFIX[0], HEAD_PREFIX[1], HEAD_PREFIX[2], high, low]
}

/// Returns the length of the record at the start of `bytes`, including its header; `None` if the
/// header is incomplete.
pub(super) fn record_length(bytes: &[u8]) -> Result<Option<usize>, RouteEnd> {
    let Some(head) = bytes.first_chunk::<HEAD_BYTES>() else {
        return Ok(None);
    };
    if head[..3] != HEAD_PREFIX {
        return Err(RouteEnd::ProtocolError("what came is no record"));
    }
    let length = HEAD_BYTES + usize::from(u16::from_be_bytes([head[3], head[4]]));
    if !(HEAD_BYTES + TAIL_BYTES..=RECORD_BYTES_MAX).contains(&length) {
        return Err(RouteEnd::ProtocolError("a record of an impossible length"));
    }
    Ok(Some(length))
}
