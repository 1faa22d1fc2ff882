//! TLS 1.3 records, encrypted and decrypted in place with the keys of a finished handshake.
//! Decryption makes the contents of adjacent records contiguous without copying.

use super::RouteEndReason;
use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use rustls::ConnectionTrafficSecrets;

/// Size of the record header: type, version and length.
pub(super) const RECORD_HEAD_BYTES: usize = 5;
/// Size of the content type and the authentication tag, which follow the content of a record.
pub(super) const RECORD_TAIL_BYTES: usize = 17;
/// Maximum length of the content of a record, as TLS defines it.
pub(super) const CONTENT_BYTES_MAX: usize = 16 << 10;
/// Maximum length of a record from a peer. The maximum exceeds the length of this library's
/// records, because TLS allows padding.
pub(crate) const RECORD_BYTES_MAX: usize = RECORD_HEAD_BYTES + CONTENT_BYTES_MAX + 256;
/// Size of the ciphers' authentication tag.
const TAG_BYTES: usize = 16;
/// First three bytes of every record after the handshake: type "application data" and the version
/// number that TLS 1.3 always sends.
const RECORD_HEAD_PREFIX: [u8; 3] = [23, 3, 3];

/// Content type of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentType {
    /// Close notification, or an error report.
    Alert,
    /// Message of the handshake protocol. After the handshake this is a key update.
    Handshake,
    /// Application data; on a direct route, frames.
    Data,
}

impl ContentType {
    fn code(self) -> u8 {
        match self {
            Self::Alert => 21,
            Self::Handshake => 22,
            Self::Data => 23,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        [Self::Alert, Self::Handshake, Self::Data]
            .into_iter()
            .find(|content_type| content_type.code() == code)
    }
}

/// Key that encrypts or decrypts the records of one direction.
pub(super) struct TrafficKey {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    record_count: u64,
}

impl TrafficKey {
    /// Creates a key from the secrets of TLS and from the number of records that have already used
    /// the key. `None` if the cipher is unknown.
    pub(super) fn new((used_records, secrets): (u64, ConnectionTrafficSecrets)) -> Option<Self> {
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return None,
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).ok()?;
        Some(Self {
            key: LessSafeKey::new(key),
            iv: iv.as_ref().try_into().ok()?,
            record_count: used_records,
        })
    }

    /// Returns the number of records that have used the key.
    pub(super) fn record_count(&self) -> u64 {
        self.record_count
    }

    /// Returns the next nonce. The nonce contains the record number, so no nonce repeats.
    fn next_nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (nonce_byte, count_byte) in nonce[NONCE_LEN - 8..]
            .iter_mut()
            .zip(self.record_count.to_be_bytes())
        {
            *nonce_byte ^= count_byte;
        }
        self.record_count += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts a record in place. The content starts at [`RECORD_HEAD_BYTES`] and is followed by
    /// [`RECORD_TAIL_BYTES`] of free space.
    pub(super) fn encrypt(&mut self, content_type: ContentType, record: &mut [u8]) {
        let length = record.len() - RECORD_HEAD_BYTES;
        let head = record_head(length);
        record[..RECORD_HEAD_BYTES].copy_from_slice(&head);
        let (inner_plaintext, tag) = record[RECORD_HEAD_BYTES..].split_at_mut(length - TAG_BYTES);
        *inner_plaintext.last_mut().expect("the type of the content") = content_type.code();
        let nonce = self.next_nonce();
        let tag_result =
            self.key
                .seal_in_place_separate_tag(nonce, Aad::from(head), inner_plaintext);
        tag.copy_from_slice(
            tag_result
                .expect("records are far below the limit of the ciphers")
                .as_ref(),
        );
    }

    /// Decrypts the record from position `record_start` to the end of `bytes`, and moves its
    /// content to the start of `bytes`. Returns the length and the type of the content.
    pub(super) fn decrypt(
        &mut self,
        bytes: &mut [u8],
        record_start: usize,
    ) -> Result<(usize, ContentType), RouteEndReason> {
        let mut head = [0; RECORD_HEAD_BYTES];
        head.copy_from_slice(&bytes[record_start..record_start + RECORD_HEAD_BYTES]);
        let nonce = self.next_nonce();
        let plaintext = self
            .key
            .open_within(
                nonce,
                Aad::from(head),
                bytes,
                record_start + RECORD_HEAD_BYTES..,
            )
            .map_err(|_| {
                RouteEndReason::ProtocolError("a record was not made with the key of this route")
            })?;
        // TLS allows zero padding after the content type.
        let type_position = plaintext
            .iter()
            .rposition(|byte| *byte != 0)
            .ok_or(RouteEndReason::ProtocolError("an empty record"))?;
        let content_type = ContentType::from_code(plaintext[type_position])
            .ok_or(RouteEndReason::ProtocolError("a record of an unknown type"))?;
        if type_position > CONTENT_BYTES_MAX {
            return Err(RouteEndReason::ProtocolError("a record is too long"));
        }
        Ok((type_position, content_type))
    }
}

fn record_head(length: usize) -> [u8; RECORD_HEAD_BYTES] {
    let [high_byte, low_byte] = u16::try_from(length)
        .expect("records are shorter than 64 KiB")
        .to_be_bytes();
    [
        RECORD_HEAD_PREFIX[0],
        RECORD_HEAD_PREFIX[1],
        RECORD_HEAD_PREFIX[2],
        high_byte,
        low_byte,
    ]
}

/// Returns the length of the record at the start of `bytes`, including its header; `None` if the
/// header is incomplete.
pub(super) fn record_length(bytes: &[u8]) -> Result<Option<usize>, RouteEndReason> {
    let Some(head) = bytes.first_chunk::<RECORD_HEAD_BYTES>() else {
        return Ok(None);
    };
    if head[..3] != RECORD_HEAD_PREFIX {
        return Err(RouteEndReason::ProtocolError(
            "the data is not a TLS record",
        ));
    }
    let length = RECORD_HEAD_BYTES + usize::from(u16::from_be_bytes([head[3], head[4]]));
    if !(RECORD_HEAD_BYTES + RECORD_TAIL_BYTES..=RECORD_BYTES_MAX).contains(&length) {
        return Err(RouteEndReason::ProtocolError(
            "a record of an impossible length",
        ));
    }
    Ok(Some(length))
}
