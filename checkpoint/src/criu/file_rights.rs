//! Makes a CRIU of root access the files of another user's task with that user's rights.
//!
//! A library that is loaded into CRIU (`csrc/file_rights.c`) sets the ids of the user around each
//! access. The ids are passed in environment variables.

use super::ptrace_relay::{memory_file, preload_variable};
use crate::engine::{TaskIds, TaskNamespaces};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The compiled library that CRIU loads.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/file_rights.so"));

/// The library and its environment for a CRIU that restores a task.
#[derive(Debug)]
pub(super) struct FileRights {
    library: OwnedFd,
    variables: Vec<(&'static str, String)>,
}

impl FileRights {
    /// Creates the library for a restore inside these namespaces.
    ///
    /// # Errors
    /// No file descriptor or memory is available.
    pub(super) fn new(inside: &TaskNamespaces) -> io::Result<Self> {
        let library = memory_file(c"sempa-file-rights", LIBRARY)?;
        let TaskIds { uid, gid, groups } = &inside.user;
        let ids: Vec<String> = [*uid, *gid]
            .iter()
            .chain(groups)
            .map(u32::to_string)
            .collect();
        let own_dir = inside.own_dir.display().to_string();
        let variables = vec![
            preload_variable(&library),
            ("SEMPA_FILE_IDS", ids.join(",")),
            ("SEMPA_OWN_DIR", own_dir),
        ];
        Ok(Self { library, variables })
    }

    /// Returns the descriptor that CRIU must inherit with the same number.
    pub(super) fn library(&self) -> BorrowedFd<'_> {
        self.library.as_fd()
    }

    pub(super) fn variables(&self) -> Vec<(&'static str, String)> {
        self.variables.clone()
    }
}

/// Returns the environment variable by which the library for dumps knows the ids of the task, which
/// it needs to read the task's limits.
pub(super) fn task_ids_variable(ids: &TaskIds) -> (&'static str, String) {
    ("SEMPA_TASK_IDS", format!("{},{}", ids.uid, ids.gid))
}
