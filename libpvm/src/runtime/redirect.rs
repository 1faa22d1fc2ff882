//! Buffer in this process's memory for new paths of the token file, which names the next daemon of
//! a quiesced library.
//!
//! A task that is paused for the owner of its host quiesces before its target is known. The task
//! must not run to be notified of the target, so the tasker writes the new paths into this buffer
//! while the task is stopped.

use sempa_proto::frame::from_bytes;
use sempa_proto::task::{REDIRECT_BYTES_MAX, Redirect, RedirectAddress};
use std::sync::atomic::{AtomicU64, Ordering};

const BUFFER_WORDS: usize = REDIRECT_BYTES_MAX / 8;

/// Word 0 contains the length in bytes, 0 if the buffer is empty. The other words contain the
/// encoded redirect.
static BUFFER: [AtomicU64; BUFFER_WORDS] = [const { AtomicU64::new(0) }; BUFFER_WORDS];

/// Empties the buffer and returns its address.
pub(super) fn clear_and_locate() -> RedirectAddress {
    BUFFER[0].store(0, Ordering::Release);
    RedirectAddress {
        pid: std::process::id().cast_signed(),
        address: BUFFER.as_ptr().addr() as u64,
    }
}

/// Removes and returns the redirect. `None` if there is no redirect or it cannot be decoded.
pub(super) fn take_redirect() -> Option<Redirect> {
    let length = usize::try_from(BUFFER[0].swap(0, Ordering::AcqRel))
        .ok()
        .filter(|length| *length > 0)?;
    if length > REDIRECT_BYTES_MAX - 8 {
        return None;
    }
    let mut bytes: Vec<u8> = BUFFER[1..]
        .iter()
        .take(length.div_ceil(8))
        .flat_map(word_bytes)
        .collect();
    bytes.truncate(length);
    from_bytes(&bytes).ok()
}

fn word_bytes(word: &AtomicU64) -> [u8; 8] {
    word.load(Ordering::Acquire).to_ne_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::MigrationId;

    fn write(bytes: &[u8]) {
        assert_eq!(clear_and_locate().address, BUFFER.as_ptr().addr() as u64);
        for (buffer_word, bytes) in BUFFER.iter().zip(bytes.chunks(8)) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            buffer_word.store(u64::from_ne_bytes(word), Ordering::Release);
        }
    }

    /// A redirect in the buffer is returned exactly once. A redirect with an invalid length or
    /// content is ignored.
    #[test]
    fn redirect_is_taken_once_and_garbage_ignored() {
        let tokens = vec![
            "/tmp/a/resume-7".into(),
            "/var/tmp/some/where/else/resume-7".into(),
        ];
        let redirect = Redirect {
            migration: MigrationId(7),
            token_paths: tokens,
        };
        write(&redirect.encode().expect("it fits"));
        assert_eq!(take_redirect(), Some(redirect));
        assert_eq!(take_redirect(), None);
        write(&u64::MAX.to_ne_bytes());
        assert_eq!(take_redirect(), None);
        write(&[&3u64.to_ne_bytes()[..], &[0xff; 8]].concat());
        assert_eq!(take_redirect(), None);
        let oversized_redirect = Redirect {
            migration: MigrationId(7),
            token_paths: vec!["x".repeat(REDIRECT_BYTES_MAX).into()],
        };
        assert!(oversized_redirect.encode().is_err());
    }
}
