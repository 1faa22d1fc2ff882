//! Parser for login records in the format of utmp(5): a file of fixed-size records, one for each
//! terminal. The record of a terminal is overwritten when its login ends. Pure; accepts any bytes.
//!
//! The parser does not check whether the process of a record still exists: the load watcher may run
//! in its own PID namespace, in which the recorded pids have no meaning.

use sempa_proto::Micros;
use sempa_proto::load::Login;
use std::collections::BTreeMap;

/// Size in bytes of one record on 64-bit Linux (glibc, `struct utmp`).
pub const UTMP_RECORD_BYTES: usize = 384;
/// Maximum number of bytes that are read from the file: about 2,700 terminals.
pub const FILE_BYTES_MAX: usize = UTMP_RECORD_BYTES * 2731;

/// Value of `ut_type` for a user who is logged in.
pub const USER_PROCESS: i16 = 7;
/// Value of `ut_type` for a login that has ended.
pub const DEAD_PROCESS: i16 = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
struct UtmpRecord {
    record_type: i16,
    login: Login,
}

fn bytes_at<const N: usize>(record: &[u8], offset: usize) -> [u8; N] {
    record[offset..offset + N]
        .try_into()
        .expect("the offsets lie inside a record")
}

/// Returns the text of a field up to its first NUL. Control characters are replaced, because they
/// could manipulate the terminal on which the text is printed.
fn parse_text_field(field: &[u8]) -> String {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end])
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// Parses a record. Offsets (and sizes) in `struct utmp`: type 0, pid 4, line 8 (32), id 40 (4),
/// user 44 (32), host 76 (256), exit 332, session 336, seconds 340, microseconds 344, address 348,
/// unused 364.
fn parse_record(record: &[u8]) -> UtmpRecord {
    let seconds = u64::from(u32::from_ne_bytes(bytes_at(record, 340)));
    let microseconds = u64::from(u32::from_ne_bytes(bytes_at(record, 344))).min(999_999);
    UtmpRecord {
        record_type: i16::from_ne_bytes(bytes_at(record, 0)),
        login: Login {
            user_name: parse_text_field(&record[44..76]),
            terminal: parse_text_field(&record[8..40]),
            origin: parse_text_field(&record[76..332]),
            at: Micros(seconds * 1_000_000 + microseconds),
        },
    }
}

/// Returns the users who are logged in, earliest login first. An incomplete record at the end of
/// the file is ignored.
///
/// If a terminal has several records, the newest record is used; of equally old records, the last
/// record in the file.
pub fn parse_logins(file: &[u8]) -> Vec<Login> {
    let mut newest_records: BTreeMap<String, UtmpRecord> = BTreeMap::new();
    for record in file.chunks_exact(UTMP_RECORD_BYTES).map(parse_record) {
        if !matches!(record.record_type, USER_PROCESS | DEAD_PROCESS) {
            continue;
        }
        let other_is_not_newer = |other: &UtmpRecord| other.login.at <= record.login.at;
        if newest_records
            .get(&record.login.terminal)
            .is_none_or(other_is_not_newer)
        {
            newest_records.insert(record.login.terminal.clone(), record);
        }
    }
    let login_records = newest_records
        .into_values()
        .filter(|r| r.record_type == USER_PROCESS && !r.login.user_name.is_empty());
    let mut logins: Vec<Login> = login_records.map(|r| r.login).collect();
    logins.sort_by(|a, b| (a.at, &a.terminal).cmp(&(b.at, &b.terminal)));
    logins
}

/// Encodes a login record in the format that login programs write.
pub fn encode_record(record_type: i16, login: &Login) -> [u8; UTMP_RECORD_BYTES] {
    let mut record = [0; UTMP_RECORD_BYTES];
    record[..2].copy_from_slice(&record_type.to_ne_bytes());
    for (offset, bytes_max, text) in [
        (8, 32, &login.terminal),
        (44, 32, &login.user_name),
        (76, 256, &login.origin),
    ] {
        let len = text.len().min(bytes_max);
        record[offset..offset + len].copy_from_slice(&text.as_bytes()[..len]);
    }
    let seconds = u32::try_from(login.at.0 / 1_000_000).unwrap_or(u32::MAX);
    record[340..344].copy_from_slice(&seconds.to_ne_bytes());
    record[344..348].copy_from_slice(&((login.at.0 % 1_000_000) as u32).to_ne_bytes());
    record
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn login(user: &str, terminal: &str, login_at_s: u64) -> Login {
        Login {
            user_name: user.into(),
            terminal: terminal.into(),
            origin: "10.77.0.1".into(),
            at: Micros::from_secs(login_at_s),
        }
    }

    /// Logins are returned earliest first; other records are ignored.
    #[test]
    fn logins_are_sorted_by_time() {
        let (bob, alice) = (login("bob", "pts/1", 200), login("alice", "pts/0", 300));
        let boot_record = encode_record(2, &login("reboot", "~", 100));
        let file = [
            boot_record,
            encode_record(USER_PROCESS, &alice),
            encode_record(USER_PROCESS, &bob),
        ]
        .concat();
        assert_eq!(parse_logins(&file), [bob, alice]);
    }

    /// A login that has ended is not returned, even if the record of its end precedes the record of
    /// its start in the file.
    #[test]
    fn ended_login_is_removed_in_any_order() {
        let alice_record = encode_record(USER_PROCESS, &login("alice", "pts/0", 300));
        let end_record = encode_record(DEAD_PROCESS, &login("", "pts/0", 400));
        assert_eq!(parse_logins(&end_record), []);
        assert_eq!(parse_logins(&[alice_record, end_record].concat()), []);
        assert_eq!(parse_logins(&[end_record, alice_record].concat()), []);
        // The record of an end does not hide a newer login at the same terminal.
        let newer_login = login("carol", "pts/0", 500);
        assert_eq!(
            parse_logins(&[encode_record(USER_PROCESS, &newer_login), end_record].concat()),
            [newer_login]
        );
    }

    /// An incomplete record and a record without a user are ignored.
    #[test]
    fn incomplete_and_userless_records_are_ignored() {
        let alice = login("alice", "pts/0", 300);
        let complete_record = encode_record(USER_PROCESS, &alice);
        assert_eq!(
            parse_logins(
                &[
                    &complete_record[..],
                    &complete_record[..UTMP_RECORD_BYTES - 1]
                ]
                .concat()
            ),
            [alice]
        );
        assert_eq!(
            parse_logins(&encode_record(USER_PROCESS, &login("", "pts/0", 300))),
            []
        );
    }

    #[test]
    fn control_characters_are_replaced() {
        let login_with_escape = login("a\x1b[2J", "pts/0", 1);
        assert_eq!(
            parse_logins(&encode_record(USER_PROCESS, &login_with_escape))[0].user_name,
            "a?[2J"
        );
    }

    proptest! {
        /// The result has at most one login for each record.
        #[test]
        fn any_bytes_are_accepted(file in prop::collection::vec(any::<u8>(), 0..UTMP_RECORD_BYTES * 4)) {
            prop_assert!(parse_logins(&file).len() <= file.len() / UTMP_RECORD_BYTES);
        }

        #[test]
        fn written_logins_parse_unchanged(
            users in prop::collection::btree_map("[a-z]{1,8}/[0-9]{1,3}", ("[a-z]{1,32}", 0_u64..4_000_000_000_000_000), 0..20),
        ) {
            let mut expected_logins: Vec<Login> = users
                .into_iter()
                .map(|(terminal, (user, at))| Login { user_name: user, terminal, origin: String::new(), at: Micros(at) })
                .collect();
            let file: Vec<u8> = expected_logins.iter().flat_map(|l| encode_record(USER_PROCESS, l)).collect();
            expected_logins.sort_by(|a, b| (a.at, &a.terminal).cmp(&(b.at, &b.terminal)));
            prop_assert_eq!(parse_logins(&file), expected_logins);
        }
    }
}
