//! Reads a host's utmp file, which the real sshd of the host writes.

use crate::testbed::Host;
use anyhow::{Context, Result};

/// Size of a record (`struct utmp`) of glibc on 64-bit Linux.
const RECORD_BYTES: usize = 384;
/// The type of a record of a logged-in user.
const USER_PROCESS: i16 = 7;

/// A record of a login.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoginRecord {
    pub user: String,
    /// The name of the terminal.
    pub line: String,
    /// The host from which the user has logged in.
    pub from: String,
    /// Time of the login in microseconds since 1970.
    pub at_us: u64,
}

/// Returns the logins that the utmp file of a host lists.
pub fn logins(host: &Host) -> Result<Vec<LoginRecord>> {
    let bytes = std::fs::read(host.machine_path("/run/utmp")).context("utmp of the host")?;
    Ok(bytes
        .chunks_exact(RECORD_BYTES)
        .filter_map(parse_record)
        .collect())
}

fn parse_record(bytes: &[u8]) -> Option<LoginRecord> {
    let text = |at: usize, len: usize| {
        let field = &bytes[at..at + len];
        let end = field.iter().position(|byte| *byte == 0).unwrap_or(len);
        String::from_utf8_lossy(&field[..end]).into_owned()
    };
    let int =
        |at: usize| i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    if i16::from_ne_bytes([bytes[0], bytes[1]]) != USER_PROCESS {
        return None;
    }
    let (seconds, micros) = (int(340), int(344));
    Some(LoginRecord {
        user: text(44, 32),
        line: text(8, 32),
        from: text(76, 256),
        at_us: u64::try_from(seconds).ok()? * 1_000_000 + u64::try_from(micros).ok()?,
    })
}
