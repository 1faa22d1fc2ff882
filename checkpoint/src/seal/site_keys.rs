//! The keys of a site, and the format of their file.
//!
//! The file is text. The first line is [`FIRST_LINE`]. Each other line is empty, a comment that
//! begins with `#`, or the word `current` or `previous` and a key of 64 hexadecimal digits.

use super::MAGIC;
use super::error::SiteKeyError;
use super::key_path::read_key_file;
use crate::sealed_stream::{KEY_BYTES, KEY_ID_BYTES, StreamKey, random_bytes};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// Maximum number of previous keys. Images that were sealed with these keys still open.
pub const PREVIOUS_KEYS_MAX: usize = 15;
/// Maximum length of a key file in bytes.
pub(super) const KEY_FILE_BYTES_MAX: u64 = 64 << 10;
/// First line of a key file: format and version.
const FIRST_LINE: &str = "sempa site key 1";
const CURRENT_WORD: &str = "current";
const PREVIOUS_WORD: &str = "previous";
/// Number of bytes of a [`KeyId`] that are displayed.
const DISPLAYED_BYTES: usize = 8;

/// Identifier of a site key. It does not reveal the key, so hosts can compare their keys by it.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyId([u8; KEY_ID_BYTES]);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0[..DISPLAYED_BYTES])
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn write_hex(out: &mut impl fmt::Write, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
}

/// The keys of a site: one current key, which seals, and the previous keys. All keys open.
pub struct SiteKeys {
    path: PathBuf,
    /// The current key, followed by the previous keys, newest first. Never empty.
    keys: Vec<StreamKey>,
}

impl SiteKeys {
    /// Reads a key file. See [`super::site_key_path`].
    ///
    /// # Errors
    /// The file does not exist or is not valid. The file, or a directory above it, belongs to a
    /// user other than root and the user of this process, or other users have access.
    pub fn load(path: &Path) -> Result<Self, SiteKeyError> {
        Self::parse(&read_key_file(path)?, path)
    }

    /// Parses the text of the key file `path`.
    ///
    /// # Errors
    /// The text is not a valid key file. The error does not contain any part of a key.
    pub fn parse(text: &str, path: &Path) -> Result<Self, SiteKeyError> {
        let invalid_file = |why: String| SiteKeyError::Invalid {
            path: path.to_path_buf(),
            why,
        };
        let mut lines = text.lines().enumerate();
        if lines.next().map(|(_, line)| line.trim_end()) != Some(FIRST_LINE) {
            return Err(invalid_file(format!(
                "its first line is not \"{FIRST_LINE}\""
            )));
        }
        let (mut current, mut previous) = (None, Vec::new());
        for (index, line) in lines {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let invalid_line = |why: &str| invalid_file(format!("line {} {why}", index + 1));
            let (word, digits) = line
                .split_once(' ')
                .ok_or_else(|| invalid_line("is not a key"))?;
            let key = parse_key(digits.trim_start())
                .ok_or_else(|| invalid_line("does not have a key of 64 hexadecimal digits"))?;
            match word {
                CURRENT_WORD if current.is_none() => current = Some(key),
                CURRENT_WORD => return Err(invalid_line("is a second current key")),
                PREVIOUS_WORD if previous.len() < PREVIOUS_KEYS_MAX => previous.push(key),
                PREVIOUS_WORD => {
                    return Err(invalid_line(&format!(
                        "exceeds the limit of {PREVIOUS_KEYS_MAX} previous keys"
                    )));
                }
                _ => return Err(invalid_line("is neither a current nor a previous key")),
            }
        }
        let current = current.ok_or_else(|| invalid_file("it has no current key".into()))?;
        let keys = std::iter::once(current).chain(previous);
        let site_keys = Self {
            path: path.to_path_buf(),
            keys: keys
                .map(|key| StreamKey::new(MAGIC, key))
                .collect::<Result<_, _>>()
                .map_err(|e| invalid_file(e.to_string()))?,
        };
        match site_keys.has_repeated_key() {
            true => Err(invalid_file("it contains the same key twice".into())),
            false => Ok(site_keys),
        }
    }

    /// Returns keys for a new key file: a random current key and no previous keys.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn generate(path: &Path) -> Result<Self, SiteKeyError> {
        Ok(Self {
            path: path.to_path_buf(),
            keys: vec![Self::generate_key(path)?],
        })
    }

    fn generate_key(path: &Path) -> Result<StreamKey, SiteKeyError> {
        random_bytes::<KEY_BYTES>()
            .and_then(|key| StreamKey::new(MAGIC, Zeroizing::new(key)))
            .map_err(|cause| SiteKeyError::Io {
                action: "create",
                path: path.to_path_buf(),
                cause,
            })
    }

    /// Adds a random key, which becomes the current key.
    pub(super) fn rotate(&mut self) -> Result<(), SiteKeyError> {
        if self.keys.len() > PREVIOUS_KEYS_MAX {
            return Err(SiteKeyError::TooManyPreviousKeys {
                path: self.path.clone(),
            });
        }
        self.keys.insert(0, Self::generate_key(&self.path)?);
        Ok(())
    }

    pub(super) fn forget_previous(&mut self) {
        self.keys.truncate(1);
    }

    /// Returns the text of the key file.
    pub(super) fn to_text(&self) -> Zeroizing<String> {
        // The whole text fits, so the keys are not copied to memory that is not erased.
        let mut text = Zeroizing::new(String::with_capacity(KEY_FILE_BYTES_MAX as usize));
        text.push_str(FIRST_LINE);
        text.push_str(
            "\n# Keep this file secret. All hosts of a site have the same file.\n\
             # A person who has these keys can run programs as any user of the site.\n",
        );
        for (index, key) in self.keys.iter().enumerate() {
            text.push_str(match index {
                0 => CURRENT_WORD,
                _ => PREVIOUS_WORD,
            });
            text.push(' ');
            // Writing to a string never fails.
            let _ = write_hex(&mut *text, key.key_bytes());
            text.push('\n');
        }
        text
    }

    fn has_repeated_key(&self) -> bool {
        let ids: Vec<_> = self.keys.iter().map(StreamKey::id).collect();
        (1..ids.len()).any(|index| ids[..index].contains(&ids[index]))
    }

    /// Returns the identifier of the current key. Two hosts with the same current key can migrate
    /// tasks to each other.
    pub fn current_id(&self) -> KeyId {
        KeyId(self.current().id())
    }

    /// True if images that were sealed with the key `key_id` open here.
    pub fn can_open(&self, key_id: KeyId) -> bool {
        self.find(key_id).is_some()
    }

    /// Returns the number of previous keys.
    pub fn previous_count(&self) -> usize {
        self.keys.len() - 1
    }

    /// Returns the identifiers of the previous keys, newest first.
    pub fn previous_ids(&self) -> impl Iterator<Item = KeyId> {
        self.keys[1..].iter().map(|key| KeyId(key.id()))
    }

    pub(super) fn current(&self) -> &StreamKey {
        &self.keys[0]
    }

    pub(super) fn find(&self, key_id: KeyId) -> Option<&StreamKey> {
        self.keys.iter().find(|key| key.id() == key_id.0)
    }
}

impl KeyId {
    pub(super) fn from_bytes(bytes: [u8; KEY_ID_BYTES]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for SiteKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, current) = (self.path.display(), self.current_id());
        write!(f, "the site keys in {path}, current {current}")
    }
}

/// Parses a key of 64 hexadecimal digits.
fn parse_key(digits: &str) -> Option<Zeroizing<[u8; KEY_BYTES]>> {
    if digits.len() != 2 * KEY_BYTES || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    for (byte, pair) in key.iter_mut().zip(digits.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_line(word: &str, byte: u8) -> String {
        format!("{word} {}\n", format!("{byte:02x}").repeat(KEY_BYTES))
    }

    fn parse(text: &str) -> Result<SiteKeys, String> {
        SiteKeys::parse(text, Path::new("/etc/key")).map_err(|e| e.to_string())
    }

    #[test]
    fn text_is_parsed_and_written() {
        let text = format!(
            "{FIRST_LINE}\n\n# a comment\n{}{}{}",
            key_line("previous", 2),
            key_line("current", 1),
            key_line("previous", 3)
        );
        let keys = parse(&text).expect("valid");
        assert_eq!(keys.previous_count(), 2);
        assert_eq!(keys.current().key_bytes(), &[1; KEY_BYTES]);
        let parsed_again = parse(&keys.to_text()).expect("valid");
        let key_bytes = |keys: &SiteKeys| {
            let bytes = keys.keys.iter().map(|key| *key.key_bytes());
            bytes.collect::<Vec<_>>()
        };
        assert_eq!(key_bytes(&parsed_again), key_bytes(&keys));
        assert!(parsed_again.can_open(keys.current_id()));
        let other_keys = parse(&format!("{FIRST_LINE}\n{}", key_line("current", 3))).expect("ok");
        assert!(keys.can_open(other_keys.current_id()));
        assert!(!other_keys.can_open(keys.current_id()));
        assert_eq!(keys.current_id().to_string().len(), 2 * DISPLAYED_BYTES);
        assert!(!format!("{keys:?}").contains("0101"), "no key is revealed");
    }

    /// Invalid texts are refused, and the error contains no digits of a key.
    #[test]
    fn invalid_text_is_refused() {
        let current = key_line("current", 0xab);
        let many_keys: String = (0..=PREVIOUS_KEYS_MAX as u8)
            .map(|byte| key_line("previous", byte))
            .collect();
        let cases = [
            (String::new(), "first line"),
            ("sempa site key 2\n".into(), "first line"),
            (format!("{FIRST_LINE}\n"), "no current key"),
            (
                format!("{FIRST_LINE}\n{}", key_line("previous", 0xab)),
                "no current key",
            ),
            (
                format!("{FIRST_LINE}\n{current}{}", key_line("current", 1)),
                "line 3 is a second current key",
            ),
            (
                format!("{FIRST_LINE}\n{current}{}", key_line("previous", 0xab)),
                "the same key twice",
            ),
            (
                format!("{FIRST_LINE}\n{current}{many_keys}"),
                "exceeds the limit of 15",
            ),
            (
                format!("{FIRST_LINE}\n{}", current.replace("ab\n", "a\n")),
                "line 2 does not have a key",
            ),
            (
                format!("{FIRST_LINE}\n{}", current.replace("ab\n", "+b\n")),
                "line 2 does not have a key",
            ),
            (
                format!("{FIRST_LINE}\n{}", key_line("next", 0xab)),
                "neither",
            ),
            (format!("{FIRST_LINE}\nabababab\n"), "line 2 is not a key"),
        ];
        for (text, expected) in cases {
            let error_text = parse(&text).expect_err(expected);
            assert!(error_text.contains(expected), "{error_text}");
            assert!(error_text.contains("pvm-admin site-key create"));
            assert!(!error_text.contains("abab"), "{error_text}");
        }
    }

    #[test]
    fn rotation_is_limited() {
        let mut keys = SiteKeys::generate(Path::new("/etc/key")).expect("random");
        let first_id = keys.current_id();
        for _ in 0..PREVIOUS_KEYS_MAX {
            keys.rotate().expect("below the limit");
        }
        assert!(keys.can_open(first_id) && keys.current_id() != first_id);
        assert!(matches!(
            keys.rotate(),
            Err(SiteKeyError::TooManyPreviousKeys { .. })
        ));
        parse(&keys.to_text()).expect("valid");
        keys.forget_previous();
        assert!(!keys.can_open(first_id));
        keys.rotate().expect("below the limit");
    }
}
