//! Parser for login records in the format of utmp(5): a file of fixed-size records, one per
//! terminal, each overwritten when a login ends. Pure; accepts any bytes.
//!
//! The parser does not check whether the process of a record still exists: the load watcher may run
//! in its own PID namespace, in which the recorded pids have no meaning.

use sempa_proto::Micros;
use sempa_proto::load::Login;
use std::collections::BTreeMap;

/// Size in bytes of one record on 64-bit Linux (glibc, `struct utmp`).
pub const RECORD_BYTES: usize = 384;
/// Maximum number of bytes that are read from the file: about 2,700 terminals.
pub const FILE_BYTES_MAX: usize = RECORD_BYTES * 2731;

/// Value of `ut_type` for a user who is logged in.
pub const USER_PROCESS: i16 = 7;
/// Value of `ut_type` for a login that has ended.
pub const DEAD_PROCESS: i16 = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    kind: i16,
    login: Login,
}

fn array_at<const N: usize>(record: &[u8], at: usize) -> [u8; N] {
    record[at..at + N]
        .try_into()
        .expect("the offsets lie inside a record")
}

/// Returns a text field up to its first NUL. Control characters are replaced, because they could
/// manipulate the terminal on which they are printed.
fn text_field(field: &[u8]) -> String {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end])
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// Parses a record. Offsets (and sizes) in `struct utmp`: type 0, pid 4, line 8 (32), id 40 (4),
/// user 44 (32), host 76 (256), exit 332, session 336, seconds 340, microseconds 344, address 348,
/// unused 364.
fn parse_record(record: &[u8]) -> Record {
    let seconds = u64::from(u32::from_ne_bytes(array_at(record, 340)));
    let rest = u64::from(u32::from_ne_bytes(array_at(record, 344))).min(999_999);
    Record {
        kind: i16::from_ne_bytes(array_at(record, 0)),
        login: Login {
            user: text_field(&record[44..76]),
            line: text_field(&record[8..40]),
            from: text_field(&record[76..332]),
            at: Micros(seconds * 1_000_000 + rest),
        },
    }
}

/// Returns the users who are logged in, earliest first. An incomplete record at the end of the file
/// is ignored.
///
/// If a terminal has several records, the newest is used; among equally old records, the last one.
pub fn parse_logins(file: &[u8]) -> Vec<Login> {
    let mut newest: BTreeMap<String, Record> = BTreeMap::new();
    for record in file.chunks_exact(RECORD_BYTES).map(parse_record) {
        if !matches!(record.kind, USER_PROCESS | DEAD_PROCESS) {
            continue;
        }
        let older = |other: &Record| other.login.at <= record.login.at;
        if newest.get(&record.login.line).is_none_or(older) {
            newest.insert(record.login.line.clone(), record);
        }
    }
    let current = newest
        .into_values()
        .filter(|r| r.kind == USER_PROCESS && !r.login.user.is_empty());
    let mut logins: Vec<Login> = current.map(|r| r.login).collect();
    logins.sort_by(|a, b| (a.at, &a.line).cmp(&(b.at, &b.line)));
    logins
}

/// Creates a login record as login programs write it.
pub fn encode_record(kind: i16, login: &Login) -> [u8; RECORD_BYTES] {
    let mut out = [0; RECORD_BYTES];
    out[..2].copy_from_slice(&kind.to_ne_bytes());
    for (at, max, text) in [
        (8, 32, &login.line),
        (44, 32, &login.user),
        (76, 256, &login.from),
    ] {
        let len = text.len().min(max);
        out[at..at + len].copy_from_slice(&text.as_bytes()[..len]);
    }
    let seconds = u32::try_from(login.at.0 / 1_000_000).unwrap_or(u32::MAX);
    out[340..344].copy_from_slice(&seconds.to_ne_bytes());
    out[344..348].copy_from_slice(&((login.at.0 % 1_000_000) as u32).to_ne_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn login(user: &str, line: &str, seconds: u64) -> Login {
        Login {
            user: user.into(),
            line: line.into(),
            from: "10.77.0.1".into(),
            at: Micros::from_secs(seconds),
        }
    }

    /// Logins are returned earliest first; other records are ignored.
    #[test]
    fn logins_are_sorted_by_time() {
        let (bob, alice) = (login("bob", "pts/1", 200), login("alice", "pts/0", 300));
        let boot = encode_record(2, &login("reboot", "~", 100));
        let file = [
            boot,
            encode_record(USER_PROCESS, &alice),
            encode_record(USER_PROCESS, &bob),
        ]
        .concat();
        assert_eq!(parse_logins(&file), [bob, alice]);
    }

    /// A login that has ended is not returned, whatever the order of the records; a newer login at
    /// the same terminal is.
    #[test]
    fn ended_login_is_removed_in_any_order() {
        let alice = encode_record(USER_PROCESS, &login("alice", "pts/0", 300));
        let end = encode_record(DEAD_PROCESS, &login("", "pts/0", 400));
        assert_eq!(parse_logins(&end), []);
        assert_eq!(parse_logins(&[alice, end].concat()), []);
        assert_eq!(parse_logins(&[end, alice].concat()), []);
        // The end of an older login does not hide a newer login at the same terminal.
        let again = login("carol", "pts/0", 500);
        assert_eq!(
            parse_logins(&[encode_record(USER_PROCESS, &again), end].concat()),
            [again]
        );
    }

    /// An incomplete record and a record without a user are ignored.
    #[test]
    fn incomplete_and_userless_records_are_ignored() {
        let alice = login("alice", "pts/0", 300);
        let whole = encode_record(USER_PROCESS, &alice);
        assert_eq!(
            parse_logins(&[&whole[..], &whole[..RECORD_BYTES - 1]].concat()),
            [alice]
        );
        assert_eq!(
            parse_logins(&encode_record(USER_PROCESS, &login("", "pts/0", 300))),
            []
        );
    }

    #[test]
    fn control_characters_are_replaced() {
        let tricky = login("a\x1b[2J", "pts/0", 1);
        assert_eq!(
            parse_logins(&encode_record(USER_PROCESS, &tricky))[0].user,
            "a?[2J"
        );
    }

    proptest! {
        /// Any bytes are accepted, and yield at most one login per record.
        #[test]
        fn any_bytes_are_accepted(file in prop::collection::vec(any::<u8>(), 0..RECORD_BYTES * 4)) {
            prop_assert!(parse_logins(&file).len() <= file.len() / RECORD_BYTES);
        }

        /// Written logins are parsed into the same logins.
        #[test]
        fn written_logins_parse_unchanged(
            users in prop::collection::btree_map("[a-z]{1,8}/[0-9]{1,3}", ("[a-z]{1,32}", 0_u64..4_000_000_000_000_000), 0..20),
        ) {
            let mut expected: Vec<Login> = users
                .into_iter()
                .map(|(line, (user, at))| Login { user, line, from: String::new(), at: Micros(at) })
                .collect();
            let file: Vec<u8> = expected.iter().flat_map(|l| encode_record(USER_PROCESS, l)).collect();
            expected.sort_by(|a, b| (a.at, &a.line).cmp(&(b.at, &b.line)));
            prop_assert_eq!(parse_logins(&file), expected);
        }
    }
}
