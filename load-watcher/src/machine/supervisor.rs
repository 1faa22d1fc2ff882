//! The connection to the tasker service, which has started this process.

use anyhow::Context;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::{Gid, Uid, User, setgid, setgroups, setuid};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Account of the load watcher of a machine, if the administrator has created it.
const ACCOUNT: &str = "_sempa";
/// Account that is used if [`ACCOUNT`] does not exist.
const FALLBACK_ACCOUNT: &str = "nobody";

/// Standard input: a socket of the tasker service.
#[derive(Debug)]
pub(crate) struct Supervisor(File);

impl From<OwnedFd> for Supervisor {
    /// Uses a non-blocking socket.
    fn from(socket: OwnedFd) -> Self {
        Self(socket.into())
    }
}

impl Supervisor {
    /// # Errors
    /// Standard input cannot be used.
    pub(crate) fn from_stdin() -> anyhow::Result<Self> {
        let fd = io::stdin()
            .as_fd()
            .try_clone_to_owned()
            .context("standard input")?;
        fcntl(&fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).context("standard input")?;
        Ok(Self(fd.into()))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Reports that this process runs, and how many guests the owner permits to all users together.
    pub(crate) fn report_life(&mut self, guest_limit: Option<u32>) {
        let text = match guest_limit {
            Some(limit) => format!("guests {limit}\n"),
            None => "guests unlimited\n".to_string(),
        };
        // The service reads in time, or has ended, which the main loop notices.
        let _ = self.0.write_all(text.as_bytes());
    }

    /// True if the tasker service has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        let mut buffer = [0; 64];
        match self.0.read(&mut buffer) {
            Ok(count) => count == 0,
            Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }
}

/// Becomes an unprivileged user for good. Does nothing if this process is not root.
///
/// # Errors
/// There is no suitable account, or a system call failed.
pub(crate) fn drop_privileges() -> anyhow::Result<()> {
    if !Uid::effective().is_root() {
        return Ok(());
    }
    let account = [ACCOUNT, FALLBACK_ACCOUNT]
        .into_iter()
        .find_map(|name| User::from_name(name).ok().flatten());
    let (uid, gid) = match account {
        Some(account) => (account.uid, account.gid),
        // The kernel's ids for what has no other.
        None => (Uid::from_raw(65534), Gid::from_raw(65534)),
    };
    setgroups(&[])?;
    setgid(gid)?;
    setuid(uid)?;
    Ok(())
}
