//! As which users the processes in images would run. Whoever restores them runs what is in them: with the rights that they name.

use super::images::{KIND, first, wrong};
use protobuf::well_known_types::empty::Empty;
use protobuf::{Message, UnknownValueRef};
use sempa_proto::migration::{Failure, Refusal};
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// Names of the images that say it: one of each thread.
const CORE: (&str, &str) = ("core-", ".img");
/// Longest entry of these that is read, in bytes; real ones have some thousand.
const ENTRY_BYTES_MAX: u64 = 1 << 20;
/// Of `core_entry`: what is common to all kinds of processors.
const CORE_THREAD: u32 = 5;
/// Of `thread_core_entry`.
const THREAD_CREDENTIALS: u32 = 10;
/// Of `creds_entry`: real, effective, saved user, and that for files.
const USERS: [u32; 4] = [1, 3, 5, 7];
const EFFECTIVE: u32 = 3;

/// Whether all processes in a directory of images belong to this user, who restores them. Root may have processes with other users'
/// numbers as well, as long as they have root's rights.
///
/// # Errors
/// One is another user's, or an image cannot be read.
pub fn belong_to(dir: &Path, user: u32) -> Result<(), Failure> {
    let unreadable = |e| Failure::Io(format!("cannot read {}: {e}", dir.display()));
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        let name = entry
            .map_err(unreadable)?
            .file_name()
            .to_string_lossy()
            .into_owned();
        if !name.starts_with(CORE.0) || !name.ends_with(CORE.1) {
            continue;
        }
        let which = if user == 0 { &[EFFECTIVE][..] } else { &USERS };
        // A process that has ended has no rights.
        for found in users_in(&dir.join(&name), &name)?
            .iter()
            .filter(|(field, _)| which.contains(field))
        {
            if found.1 != u64::from(user) {
                let found = u32::try_from(found.1)
                    .map_err(|_| wrong(&name, "names a user that cannot be"))?;
                return Err(Failure::Refused(vec![Refusal::OtherUser {
                    found,
                    expected: user,
                }]));
            }
        }
    }
    Ok(())
}

/// The users of a thread, by the numbers of their fields.
fn users_in(path: &Path, name: &str) -> Result<Vec<(u32, u64)>, Failure> {
    let file = File::open(path).map_err(|e| Failure::Io(format!("cannot read {name}: {e}")))?;
    let mut bytes = Vec::new();
    file.take(ENTRY_BYTES_MAX)
        .read_to_end(&mut bytes)
        .map_err(|e| Failure::Io(format!("cannot read {name}: {e}")))?;
    let entry = bytes.get(KIND..).and_then(|rest| {
        let (length, rest) = rest.split_first_chunk()?;
        rest.get(..u32::from_le_bytes(*length) as usize)
    });
    let entry = entry.ok_or_else(|| wrong(name, "ends within its first entry"))?;
    let damaged = |e: protobuf::Error| wrong(name, &format!("is damaged: {e}"));
    let Some(thread) = part(entry, CORE_THREAD).map_err(damaged)? else {
        return Ok(Vec::new());
    };
    let Some(credentials) = part(&thread, THREAD_CREDENTIALS).map_err(damaged)? else {
        return Err(wrong(name, "does not say whose it is"));
    };
    let numbers = super::images::numbers(&credentials).map_err(damaged)?;
    // What is left out of a message is nought, and of what is said twice each has to be right.
    let left_out = USERS
        .iter()
        .filter(|field| first(&numbers, **field).is_none())
        .map(|field| (*field, 0));
    Ok(numbers.iter().copied().chain(left_out).collect())
}

/// A message within a message; several are put together, as all readers of the format do.
fn part(message: &[u8], wanted: u32) -> protobuf::Result<Option<Vec<u8>>> {
    let message = Empty::parse_from_bytes(message)?;
    let fields = message.special_fields.unknown_fields().iter();
    let parts = fields.filter_map(|(field, value)| match value {
        UnknownValueRef::LengthDelimited(bytes) if field == wanted => Some(bytes.to_vec()),
        _ => None,
    });
    let parts: Vec<_> = parts.collect();
    Ok((!parts.is_empty()).then(|| parts.concat()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field that is a number below 2^14, or a message.
    fn number(field: u8, value: u64) -> Vec<u8> {
        vec![field << 3, (value & 0x7f | 0x80) as u8, (value >> 7) as u8]
    }

    fn message(field: u8, body: &[u8]) -> Vec<u8> {
        [&[field << 3 | 2, body.len() as u8][..], body].concat()
    }

    /// The image of a thread of these users.
    fn core(users: [u64; 4]) -> Vec<u8> {
        let fields = [
            (1, users[0]),
            (2, 9),
            (3, users[1]),
            (5, users[2]),
            (7, users[3]),
        ];
        let credentials: Vec<u8> = fields
            .iter()
            .flat_map(|(field, value)| number(*field, *value))
            .collect();
        image(
            &[
                number(1, 5),
                message(5, &[number(3, 0), message(10, &credentials)].concat()),
            ]
            .concat(),
        )
    }

    fn image(entry: &[u8]) -> Vec<u8> {
        [&[7; KIND][..], &(entry.len() as u32).to_le_bytes(), entry].concat()
    }

    fn judged(images: &[Vec<u8>], user: u32) -> Result<(), Failure> {
        let dir = tempfile::tempdir().expect("a directory");
        for (number, image) in images.iter().enumerate() {
            fs::write(dir.path().join(format!("core-{number}.img")), image).expect("written");
        }
        fs::write(dir.path().join("pages-1.img"), "of no matter").expect("written");
        belong_to(dir.path(), user)
    }

    fn other(found: u32, expected: u32) -> Result<(), Failure> {
        Err(Failure::Refused(vec![Refusal::OtherUser {
            found,
            expected,
        }]))
    }

    #[test]
    fn a_thread_of_another_user_among_those_of_the_right_one_is_found() {
        assert_eq!(judged(&[core([1000; 4]), core([1000; 4])], 1000), Ok(()));
        assert_eq!(
            judged(&[core([1000; 4]), core([1001; 4])], 1000),
            other(1001, 1000)
        );
        for place in 0..4 {
            let mut users = [1000; 4];
            users[place] = 0;
            assert_eq!(judged(&[core(users)], 1000), other(0, 1000), "{place}");
        }
        assert_eq!(judged(&[core([0; 4])], 0), Ok(()));
        assert_eq!(
            judged(&[core([1000, 0, 1000, 0])], 0),
            Ok(()),
            "it has root's rights"
        );
        assert_eq!(judged(&[core([0, 1000, 0, 0])], 0), other(1000, 0));
    }

    #[test]
    fn a_process_that_has_ended_is_nobodys_and_what_is_cut_or_says_nothing_is_refused() {
        assert_eq!(judged(&[image(&number(1, 5))], 1000), Ok(()));
        let says_nothing = image(&message(5, &number(3, 0)));
        assert!(matches!(
            judged(&[says_nothing], 1000),
            Err(Failure::Images(_))
        ));
        let whole = core([1000; 4]);
        for length in 0..whole.len() {
            assert!(
                matches!(
                    judged(&[whole[..length].to_vec()], 1000),
                    Err(Failure::Images(_))
                ),
                "{length}"
            );
        }
    }

    #[test]
    fn what_is_said_twice_counts_as_the_engine_reads_it() {
        let credentials =
            |user: u64| message(10, &[1, 3, 5, 7].map(|field| number(field, user)).concat());
        // The engine takes the later one of two numbers.
        let twice = image(&message(5, &[credentials(1000), credentials(0)].concat()));
        assert!(judged(&[twice], 1000).is_err());
        let apart = image(&[message(5, &credentials(1000)), message(5, &credentials(0))].concat());
        assert!(judged(&[apart], 1000).is_err());
    }
}
