//! Reads the utmp file of a host, which the real sshd of this host writes.

use crate::testbed::Host;
use anyhow::{Context, Result};

/// Size of a record (`struct utmp`) of glibc on 64-bit Linux.
const RECORD_BYTES: usize = 384;
/// The type of a record for a logged-in user.
const USER_PROCESS_TYPE: i16 = 7;

/// A login that a utmp file records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoginRecord {
    pub user: String,
    /// The name of the terminal.
    pub terminal: String,
    /// The host from which the user has logged in.
    pub remote_host: String,
    /// Time of the login in microseconds since 1970.
    pub at_us: u64,
}

/// Returns the logins in the utmp file of a host.
pub fn read_logins(host: &Host) -> Result<Vec<LoginRecord>> {
    let bytes = std::fs::read(host.machine_path("/run/utmp")).context("utmp of the host")?;
    Ok(bytes
        .chunks_exact(RECORD_BYTES)
        .filter_map(parse_record)
        .collect())
}

fn parse_record(bytes: &[u8]) -> Option<LoginRecord> {
    let text_field = |offset: usize, len: usize| {
        let field = &bytes[offset..offset + len];
        let end = field.iter().position(|byte| *byte == 0).unwrap_or(len);
        String::from_utf8_lossy(&field[..end]).into_owned()
    };
    let int_field = |offset: usize| {
        i32::from_ne_bytes([
            bytes[offset],
            bytes[offset + 1],
            bytes[offset + 2],
            bytes[offset + 3],
        ])
    };
    if i16::from_ne_bytes([bytes[0], bytes[1]]) != USER_PROCESS_TYPE {
        return None;
    }
    let (seconds, microseconds) = (int_field(340), int_field(344));
    Some(LoginRecord {
        user: text_field(44, 32),
        terminal: text_field(8, 32),
        remote_host: text_field(76, 256),
        at_us: u64::try_from(seconds).ok()? * 1_000_000 + u64::try_from(microseconds).ok()?,
    })
}
