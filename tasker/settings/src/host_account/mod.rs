//! The account of a host: what the taskers of the tasker service use, for each user and together.
//!
//! Each tasker has a record: a file in [`ACCOUNT_DIR`] whose name is its PID. A record consists of
//! lines with a name and a number, and is replaced as a whole. Only root can change the directory,
//! and every user can read it. A record counts while its tasker runs: the PID exists, and if its
//! start time can be read, it is that of the record.
//!
//! The owner of the host may limit the tasks of all users together ([`guest_cap_path`]).

mod record;

pub use record::{AccountRecord, HostUse, InvalidRecord};

use sempa_proto::tasker_service::SessionId;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Directory of the records.
pub const ACCOUNT_DIR: &str = "/run/sempa/account";
/// Environment variable of taskers and load watchers with another directory of the records.
pub const ACCOUNT_DIR_VARIABLE: &str = "SEMPA_HOST_ACCOUNT";
/// Name of the file with the cap on the guests of all users. The file is in the directory that
/// contains the account directory.
pub const GUEST_CAP_NAME: &str = "guest-cap";
/// Maximum number of bytes of a record, and of the file with the cap.
const TEXT_BYTES_MAX: u64 = 4096;
/// Maximum number of records that are read. The tasker service starts fewer taskers.
const RECORDS_MAX: usize = 4096;
/// Mode of records and of the file with the cap.
const FILE_MODE: u32 = 0o644;

/// The use of one running tasker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionUse {
    pub session: SessionId,
    pub uid: u32,
    pub usage: HostUse,
}

/// The use of all running taskers of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostTotals {
    /// One element for each tasker, by ascending session.
    pub sessions: Vec<SessionUse>,
}

impl HostTotals {
    /// Returns the use of all users together.
    pub fn of_host(&self) -> HostUse {
        self.sum(|_| true)
    }

    /// Returns the use of one user in all virtual machines.
    pub fn of_user(&self, uid: u32) -> HostUse {
        self.sum(|session| session.uid == uid)
    }

    /// Returns the use of each user who has a tasker.
    pub fn by_user(&self) -> BTreeMap<u32, HostUse> {
        let mut users: BTreeMap<u32, HostUse> = BTreeMap::new();
        for session in &self.sessions {
            let usage = users.entry(session.uid).or_default();
            *usage = usage.plus(&session.usage);
        }
        users
    }

    /// Returns the use of all taskers except one.
    #[must_use]
    pub fn without(mut self, session: SessionId) -> Self {
        self.sessions.retain(|other| other.session != session);
        self
    }

    fn sum(&self, is_counted: impl Fn(&SessionUse) -> bool) -> HostUse {
        let counted = self.sessions.iter().filter(|session| is_counted(session));
        counted.fold(HostUse::default(), |sum, session| sum.plus(&session.usage))
    }
}

/// Returns the directory of the records. `variable` is the value of [`ACCOUNT_DIR_VARIABLE`].
pub fn account_dir(variable: Option<OsString>) -> PathBuf {
    variable
        .filter(|path| !path.is_empty())
        .map_or_else(|| ACCOUNT_DIR.into(), PathBuf::from)
}

/// Returns the path of the record of a tasker.
pub fn record_path(dir: &Path, session: SessionId) -> PathBuf {
    dir.join(session.0.to_string())
}

/// Reads the use of all running taskers. A missing directory contains none, and malformed records
/// are left out. `is_running` tells whether the tasker of a record runs; [`is_running`] is the
/// usual function.
///
/// # Errors
/// The directory cannot be read.
pub fn read_totals(
    dir: &Path,
    is_running: impl Fn(SessionId, &AccountRecord) -> bool,
) -> io::Result<HostTotals> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(HostTotals::default()),
        result => result?,
    };
    let mut sessions = Vec::new();
    for entry in entries.take(RECORDS_MAX) {
        let name = entry?.file_name();
        let Some(session) = name.to_str().and_then(parse_session) else {
            continue;
        };
        // A record that is removed or replaced meanwhile belongs to a tasker that has ended.
        let text = read_regular(&dir.join(&name)).unwrap_or_default();
        if let Ok(record) = text.parse::<AccountRecord>()
            && is_running(session, &record)
        {
            sessions.push(SessionUse {
                session,
                uid: record.uid,
                usage: record.usage,
            });
        }
    }
    sessions.sort_by_key(|session| session.session);
    Ok(HostTotals { sessions })
}

/// Removes the records of taskers that have ended, and malformed ones. Needs the rights of root.
pub fn remove_ended(dir: &Path, is_running: impl Fn(SessionId, &AccountRecord) -> bool) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let session = name.to_str().and_then(parse_session);
        let Some(session) = session else { continue };
        let text = read_regular(&entry.path()).unwrap_or_default();
        let record = text.parse::<AccountRecord>();
        if !record.is_ok_and(|record| is_running(session, &record)) {
            // The next tasker tries again.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// True if the tasker of a record runs.
pub fn is_running(session: SessionId, record: &AccountRecord) -> bool {
    is_running_since(session, record.start_ticks)
}

/// True if a tasker runs that has started at `start_ticks`, in clock ticks since boot.
pub fn is_running_since(session: SessionId, start_ticks: u64) -> bool {
    let stat = procfs::process::Process::new(session.0).and_then(|process| process.stat());
    match stat {
        Ok(stat) => stat.starttime == start_ticks && !matches!(stat.state, 'Z' | 'X'),
        // A mount option of /proc may hide the processes of other users, but not from kill(2).
        Err(_) => {
            let pid = nix::unistd::Pid::from_raw(session.0);
            nix::sys::signal::kill(pid, None) != Err(nix::errno::Errno::ESRCH)
        }
    }
}

/// Returns the path of the file with the cap on the guests of all users. `dir` is the directory of
/// the records. The file contains one decimal number. A missing file means no cap.
pub fn guest_cap_path(dir: &Path) -> PathBuf {
    dir.with_file_name(GUEST_CAP_NAME)
}

/// Reads the cap on the guests of all users; `None` if there is none. A file that is not regular,
/// that others than its owner can write, or that contains no number, is no cap.
pub fn read_guest_cap(dir: &Path) -> Option<u64> {
    read_regular(&guest_cap_path(dir)).ok()?.trim().parse().ok()
}

/// Writes the cap on the guests of all users, or removes it.
///
/// # Errors
/// The system's error.
pub fn write_guest_cap(dir: &Path, cap: Option<u64>) -> io::Result<()> {
    let path = guest_cap_path(dir);
    match cap {
        Some(cap) => replace_file(&path, &format!("{cap}\n")),
        None => match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    }
}

/// Replaces the content of a file, so that readers see the old or the new one. Only one process
/// may do so at a time.
///
/// # Errors
/// The system's error.
pub fn replace_file(path: &Path, text: &str) -> io::Result<()> {
    let new_path = path.with_extension("new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&new_path)?;
    file.set_permissions(Permissions::from_mode(FILE_MODE))?;
    file.write_all(text.as_bytes())?;
    fs::rename(&new_path, path)
}

/// Returns the session whose record has this file name.
fn parse_session(name: &str) -> Option<SessionId> {
    let pid: i32 = name.parse().ok().filter(|pid| *pid > 0)?;
    (pid.to_string() == name).then_some(SessionId(pid))
}

/// Reads a short regular file that only its owner can write.
fn read_regular(path: &Path) -> io::Result<String> {
    let file: File = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.mode() & 0o022 != 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut text = String::new();
    file.take(TEXT_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests;
