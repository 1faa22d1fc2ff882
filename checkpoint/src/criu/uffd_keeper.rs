//! Copies of a restored task's userfaultfd descriptors.
//!
//! When the last descriptor of a userfaultfd is closed, the kernel fills all pages that are still
//! missing with zeros. The copies keep the userfaultfds open even if CRIU is killed or the thread
//! that forwards the descriptors has ended.

use nix::sys::stat::fstat;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// The copied descriptors. All clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct UffdKeeper(Arc<Mutex<Vec<OwnedFd>>>);

impl UffdKeeper {
    fn with_copies<T>(&self, action: impl FnOnce(&mut Vec<OwnedFd>) -> T) -> T {
        action(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn add_copies(&self, copies: Vec<OwnedFd>) {
        self.with_copies(|stored_copies| stored_copies.extend(copies));
    }

    /// Closes the copy with this inode number, because CRIU has closed its descriptor: the process
    /// has all its memory, or is dead. If the copy stayed open, the process would block at its next
    /// event, because no program reads the event.
    pub(super) fn close_copy(&self, inode: u64) {
        self.with_copies(|copies| {
            copies.retain(|fd| fstat(fd).is_ok_and(|stat| stat.st_ino != inode))
        });
    }

    /// Removes and returns all copies.
    pub(super) fn take_all(&self) -> Vec<OwnedFd> {
        self.with_copies(std::mem::take)
    }
}
