//! Limits on what the virtual machines of a user, or of all users, have together on one host.

use crate::text::binary_size;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A limit that another task, or more memory or images, would exceed on a host. The administrator
/// sets the limits of a user; the owner of the host limits the tasks of all users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
pub enum HostLimit {
    #[error("its owner allows {limit} tasks on this machine, and as many are present")]
    TasksOfAll { limit: u64 },
    #[error(
        "the administrator allows {limit} tasks of {user} on this machine, and {present} are present"
    )]
    TasksOfUser {
        user: String,
        /// Number of tasks in all virtual machines of the user.
        present: u64,
        limit: u64,
    },
    #[error(
        "the tasks of {user} use {}, and the administrator allows {}",
        binary_size(*.used_bytes),
        binary_size(*.limit_bytes)
    )]
    MemoryOfUser {
        user: String,
        /// Memory of the tasks in all virtual machines of the user. Includes the memory that an
        /// arriving task needs.
        used_bytes: u64,
        limit_bytes: u64,
    },
    #[error(
        "the images of the tasks of {user} have {}, and the administrator allows {} (image_bytes)",
        binary_size(*.used_bytes),
        binary_size(*.limit_bytes)
    )]
    ImagesOfUser {
        user: String,
        /// Size of the images of all virtual machines of the user, with those that are refused.
        used_bytes: u64,
        limit_bytes: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_sentences() {
        let user = || "alice".to_string();
        let limits = [
            HostLimit::TasksOfAll { limit: 4 },
            HostLimit::TasksOfUser {
                user: user(),
                present: 3,
                limit: 3,
            },
            HostLimit::MemoryOfUser {
                user: user(),
                used_bytes: (6 << 30) / 5,
                limit_bytes: 1 << 30,
            },
        ];
        let texts = limits.map(|limit| limit.to_string());
        let expected = [
            "its owner allows 4 tasks on this machine, and as many are present",
            "the administrator allows 3 tasks of alice on this machine, and 3 are present",
            "the tasks of alice use 1.2 GiB, and the administrator allows 1 GiB",
        ];
        assert_eq!(texts, expected);
    }
}
