//! Checks under which user ids the processes in images would run. A restore gives the processes the
//! credentials that the images contain.

use super::images::{MAGIC_BYTES, damaged_image, first_value};
use protobuf::well_known_types::empty::Empty;
use protobuf::{Message, UnknownValueRef};
use sempa_proto::migration::{Failure, Refusal};
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// Prefix and suffix of the names of images that contain credentials. Each thread has one such
/// image.
const CORE_IMAGE_AFFIXES: (&str, &str) = ("core-", ".img");
/// Maximum length of an entry in bytes. Real entries have some thousand bytes.
const ENTRY_BYTES_MAX: u64 = 1 << 20;
/// Field number in `core_entry`: the message with the properties that do not depend on the
/// architecture.
const THREAD_FIELD: u32 = 5;
/// Field number in `thread_core_entry`: the credentials.
const CREDENTIALS_FIELD: u32 = 10;
/// Field numbers in `creds_entry`: real, effective, saved and file system user id.
const UID_FIELDS: [u32; 4] = [1, 3, 5, 7];
/// Field number in `creds_entry`: effective user id.
const EFFECTIVE_UID_FIELD: u32 = 3;

/// Checks that all processes in the image directory `dir` belong to the user with the id `uid`,
/// who restores them. For the user id 0 only the effective user id is checked: processes of root
/// may have other user ids as well.
///
/// # Errors
/// A process belongs to another user, or an image cannot be read.
pub fn check_owner(dir: &Path, uid: u32) -> Result<(), Failure> {
    let read_failure = |e| Failure::Io(format!("cannot read {}: {e}", dir.display()));
    for entry in fs::read_dir(dir).map_err(read_failure)? {
        let name = entry
            .map_err(read_failure)?
            .file_name()
            .to_string_lossy()
            .into_owned();
        if !name.starts_with(CORE_IMAGE_AFFIXES.0) || !name.ends_with(CORE_IMAGE_AFFIXES.1) {
            continue;
        }
        let checked_fields = if uid == 0 {
            &[EFFECTIVE_UID_FIELD][..]
        } else {
            &UID_FIELDS
        };
        // A zombie has no credentials.
        for found_uid in read_uids(&dir.join(&name), &name)?
            .iter()
            .filter(|(field, _)| checked_fields.contains(field))
        {
            if found_uid.1 != u64::from(uid) {
                let found_uid = u32::try_from(found_uid.1)
                    .map_err(|_| damaged_image(&name, "contains an invalid user id"))?;
                return Err(Failure::Refused(vec![Refusal::OtherUser {
                    found: found_uid,
                    expected: uid,
                }]));
            }
        }
    }
    Ok(())
}

/// Returns the user ids of a thread as pairs of field number and user id. Empty for a zombie.
fn read_uids(path: &Path, name: &str) -> Result<Vec<(u32, u64)>, Failure> {
    let file = File::open(path).map_err(|e| Failure::Io(format!("cannot read {name}: {e}")))?;
    let mut bytes = Vec::new();
    file.take(ENTRY_BYTES_MAX)
        .read_to_end(&mut bytes)
        .map_err(|e| Failure::Io(format!("cannot read {name}: {e}")))?;
    let entry = bytes.get(MAGIC_BYTES..).and_then(|rest| {
        let (length, rest) = rest.split_first_chunk()?;
        rest.get(..u32::from_le_bytes(*length) as usize)
    });
    let entry = entry.ok_or_else(|| damaged_image(name, "ends within its first entry"))?;
    let malformed_failure = |e: protobuf::Error| damaged_image(name, &format!("is damaged: {e}"));
    let Some(thread) = embedded_message(entry, THREAD_FIELD).map_err(malformed_failure)? else {
        return Ok(Vec::new());
    };
    let Some(credentials) =
        embedded_message(&thread, CREDENTIALS_FIELD).map_err(malformed_failure)?
    else {
        return Err(damaged_image(name, "has no credentials"));
    };
    let fields = super::images::varint_fields(&credentials).map_err(malformed_failure)?;
    // An absent field means 0. If a field occurs more than once, each of its values is checked.
    let absent_fields = UID_FIELDS
        .iter()
        .filter(|field| first_value(&fields, **field).is_none())
        .map(|field| (*field, 0));
    Ok(fields.iter().copied().chain(absent_fields).collect())
}

/// Returns the embedded message in the field `field_number`. If the field occurs more than once,
/// its values are concatenated, as protobuf merges them.
fn embedded_message(message: &[u8], field_number: u32) -> protobuf::Result<Option<Vec<u8>>> {
    let message = Empty::parse_from_bytes(message)?;
    let fields = message.special_fields.unknown_fields().iter();
    let values = fields.filter_map(|(field, value)| match value {
        UnknownValueRef::LengthDelimited(bytes) if field == field_number => Some(bytes.to_vec()),
        _ => None,
    });
    let values: Vec<_> = values.collect();
    Ok((!values.is_empty()).then(|| values.concat()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes a number below 2^14 as a field.
    fn encode_number(field: u8, value: u64) -> Vec<u8> {
        vec![field << 3, (value & 0x7f | 0x80) as u8, (value >> 7) as u8]
    }

    /// Encodes an embedded message as a field.
    fn encode_message(field: u8, body: &[u8]) -> Vec<u8> {
        [&[field << 3 | 2, body.len() as u8][..], body].concat()
    }

    /// Encodes the image of a thread with these user ids: real, effective, saved and file system
    /// user id.
    fn encode_core(uids: [u64; 4]) -> Vec<u8> {
        let fields = [
            (1, uids[0]),
            (2, 9),
            (3, uids[1]),
            (5, uids[2]),
            (7, uids[3]),
        ];
        let credentials: Vec<u8> = fields
            .iter()
            .flat_map(|(field, value)| encode_number(*field, *value))
            .collect();
        encode_image(
            &[
                encode_number(1, 5),
                encode_message(
                    5,
                    &[encode_number(3, 0), encode_message(10, &credentials)].concat(),
                ),
            ]
            .concat(),
        )
    }

    fn encode_image(entry: &[u8]) -> Vec<u8> {
        [
            &[7; MAGIC_BYTES][..],
            &(entry.len() as u32).to_le_bytes(),
            entry,
        ]
        .concat()
    }

    fn check_owner_of(images: &[Vec<u8>], uid: u32) -> Result<(), Failure> {
        let dir = tempfile::tempdir().expect("a directory");
        for (number, image) in images.iter().enumerate() {
            fs::write(dir.path().join(format!("core-{number}.img")), image).expect("written");
        }
        fs::write(dir.path().join("pages-1.img"), "of no matter").expect("written");
        check_owner(dir.path(), uid)
    }

    fn other_user_refusal(found_uid: u32, expected_uid: u32) -> Result<(), Failure> {
        Err(Failure::Refused(vec![Refusal::OtherUser {
            found: found_uid,
            expected: expected_uid,
        }]))
    }

    /// An image with a foreign user id is refused, whichever of the four user ids it is.
    #[test]
    fn thread_of_other_user_is_refused() {
        assert_eq!(
            check_owner_of(&[encode_core([1000; 4]), encode_core([1000; 4])], 1000),
            Ok(())
        );
        assert_eq!(
            check_owner_of(&[encode_core([1000; 4]), encode_core([1001; 4])], 1000),
            other_user_refusal(1001, 1000)
        );
        for index in 0..4 {
            let mut uids = [1000; 4];
            uids[index] = 0;
            assert_eq!(
                check_owner_of(&[encode_core(uids)], 1000),
                other_user_refusal(0, 1000),
                "{index}"
            );
        }
        assert_eq!(check_owner_of(&[encode_core([0; 4])], 0), Ok(()));
        assert_eq!(
            check_owner_of(&[encode_core([1000, 0, 1000, 0])], 0),
            Ok(()),
            "it has root's rights"
        );
        assert_eq!(
            check_owner_of(&[encode_core([0, 1000, 0, 0])], 0),
            other_user_refusal(1000, 0)
        );
    }

    /// A zombie is accepted. Truncated images and images without credentials are refused.
    #[test]
    fn truncated_credentials_are_refused() {
        assert_eq!(
            check_owner_of(&[encode_image(&encode_number(1, 5))], 1000),
            Ok(())
        );
        let image_without_credentials = encode_image(&encode_message(5, &encode_number(3, 0)));
        assert!(matches!(
            check_owner_of(&[image_without_credentials], 1000),
            Err(Failure::Images(_))
        ));
        let complete_image = encode_core([1000; 4]);
        for length in 0..complete_image.len() {
            assert!(
                matches!(
                    check_owner_of(&[complete_image[..length].to_vec()], 1000),
                    Err(Failure::Images(_))
                ),
                "{length}"
            );
        }
    }

    /// If a field occurs twice, a wrong value is found in each of the two positions.
    #[test]
    fn repeated_credentials_are_all_checked() {
        let credentials = |user: u64| {
            encode_message(
                10,
                &[1, 3, 5, 7]
                    .map(|field| encode_number(field, user))
                    .concat(),
            )
        };
        // CRIU uses the last of several values.
        let repeated_credentials = encode_image(&encode_message(
            5,
            &[credentials(1000), credentials(0)].concat(),
        ));
        assert!(check_owner_of(&[repeated_credentials], 1000).is_err());
        let two_message_image = encode_image(
            &[
                encode_message(5, &credentials(1000)),
                encode_message(5, &credentials(0)),
            ]
            .concat(),
        );
        assert!(check_owner_of(&[two_message_image], 1000).is_err());
    }
}
