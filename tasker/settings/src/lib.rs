//! The administrator's settings of the tasker service: who may run tasks on this host, and within
//! which limits.
//!
//! ```toml
//! no_new_privs = true
//! deny = ["mallory"]
//! tasks = 256
//! memory = "16G"
//!
//! [users.alice]
//! memory = "unlimited"
//!
//! [groups.students]
//! tasks = 32
//! ```
//!
//! A limit of a user is the one below `[users.NAME]`; without one, the smallest limit of the user's
//! groups; without one, the limit for all users; without one, the default of [`LimitKind`].
//!
//! A file that is malformed, or that other users can write, is refused as a whole: nobody can tell
//! what the administrator has forbidden. Only [`Settings::load`] reads a file.

pub mod host_account;
mod limits;
mod parse;

pub use limits::{Limit, LimitKind, LimitRange, UserLimits};

use limits::PartialLimits;
use sempa_trusted_file::{FileError, MissingDir, Readers, TrustedFile};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Path of the settings.
pub const DEFAULT_SETTINGS_PATH: &str = "/etc/sempa/service.toml";
/// Environment variable that replaces [`DEFAULT_SETTINGS_PATH`]. The environment is that of the
/// service, not of a user.
pub const SETTINGS_VARIABLE: &str = "SEMPA_SERVICE_SETTINGS";
/// Maximum length of the settings in bytes.
pub const SETTINGS_BYTES_MAX: u64 = 256 << 10;
/// Maximum number of users, of groups, and of denied users in the settings.
pub const ENTRIES_MAX: usize = 1024;
/// Maximum length in bytes of the name of a user or group.
pub const NAME_BYTES_MAX: usize = 256;

/// The reason why settings are not used. The service then runs no tasks.
#[derive(Debug, Error)]
pub enum SettingsError {
    #[error("{}, line {line}: {why}", .path.display())]
    Invalid {
        path: PathBuf,
        /// Line number, starting at 1.
        line: usize,
        why: String,
    },
    #[error(
        "{} is not used, because {why}: only root may change the file and the directories above \
         (`chown root:root FILE`, `chmod 644 FILE`)",
        .path.display()
    )]
    Untrusted { path: PathBuf, why: String },
    #[error("cannot {action} {}: {cause}", .path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        cause: std::io::Error,
    },
}

/// The settings of the tasker service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// True if programs of tasks gain no privileges from set-user-id files.
    pub no_new_privs: bool,
    denied_users: BTreeSet<String>,
    limits: PartialLimits,
    users: BTreeMap<String, PartialLimits>,
    groups: BTreeMap<String, PartialLimits>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            no_new_privs: true,
            denied_users: BTreeSet::new(),
            limits: PartialLimits::default(),
            users: BTreeMap::new(),
            groups: BTreeMap::new(),
        }
    }
}

impl Settings {
    /// Reads the settings. A missing file has the effect of an empty one.
    ///
    /// # Errors
    /// The file is malformed, cannot be read, or can be changed by other users than root and the
    /// user of this process.
    pub fn load(path: &Path) -> Result<Self, SettingsError> {
        let mut text = String::new();
        let read_result = locate(path, MissingDir::Refuse)
            .and_then(|file| file.read(&mut text, SETTINGS_BYTES_MAX));
        match read_result {
            Ok(()) => Self::parse(path, &text),
            Err(FileError::Missing) => Ok(Self::default()),
            Err(error) => Err(file_error(path, error)),
        }
    }

    /// Parses the text of the settings file `path`.
    ///
    /// # Errors
    /// Contains the line and the reason, with the accepted values.
    pub fn parse(path: &Path, text: &str) -> Result<Self, SettingsError> {
        parse::parse(text).map_err(|error| SettingsError::Invalid {
            path: path.to_path_buf(),
            line: error.line,
            why: error.why,
        })
    }

    /// Returns the limits of a user. `groups` are the names of all groups of the user.
    pub fn of_user<G: AsRef<str>>(&self, name: &str, groups: &[G]) -> UserLimits {
        let group_limits: Vec<&PartialLimits> = groups
            .iter()
            .filter_map(|group| self.groups.get(group.as_ref()))
            .collect();
        UserLimits::new(|kind| {
            let of_user = self.users.get(name).and_then(|limits| limits.get(kind));
            let of_groups = || {
                group_limits
                    .iter()
                    .filter_map(|limits| limits.get(kind))
                    .min()
            };
            of_user
                .or_else(of_groups)
                .or_else(|| self.limits.get(kind))
                .unwrap_or(kind.default_limit())
        })
    }

    /// Returns the limits of users who are not named and whose groups are not named.
    pub fn of_other_users(&self) -> UserLimits {
        self.of_user::<&str>("", &[])
    }

    /// True if the service must not run tasks of this user.
    pub fn denies(&self, name: &str) -> bool {
        self.denied_users.contains(name)
    }

    /// Returns the names of the users for whom the service runs no tasks.
    pub fn denied_users(&self) -> impl Iterator<Item = &str> {
        self.denied_users.iter().map(String::as_str)
    }

    /// Returns the names of the users who have limits of their own.
    pub fn named_users(&self) -> impl Iterator<Item = &str> {
        self.users.keys().map(String::as_str)
    }

    /// Returns the names of the groups that have limits of their own.
    pub fn named_groups(&self) -> impl Iterator<Item = &str> {
        self.groups.keys().map(String::as_str)
    }

    /// Returns the limits of a named group; `None` for a limit that the settings do not give.
    pub fn of_group(&self, name: &str, kind: LimitKind) -> Option<Limit> {
        self.groups.get(name)?.get(kind)
    }
}

/// Returns the path of the settings. `variable` is the value of [`SETTINGS_VARIABLE`].
pub fn settings_path(variable: Option<OsString>) -> PathBuf {
    variable
        .filter(|path| !path.is_empty())
        .map_or_else(|| DEFAULT_SETTINGS_PATH.into(), PathBuf::from)
}

/// Locates the settings file, for a program that changes it.
///
/// # Errors
/// As for [`TrustedFile::locate`].
pub fn locate(path: &Path, missing_dir: MissingDir) -> Result<TrustedFile, FileError> {
    TrustedFile::locate(path, Readers::Everyone, missing_dir)
}

/// Converts an error of the settings file `path`.
pub fn file_error(path: &Path, error: FileError) -> SettingsError {
    let path = path.to_path_buf();
    match error {
        FileError::Io { action, cause } => SettingsError::Io {
            action,
            path,
            cause,
        },
        error => SettingsError::Untrusted {
            path,
            why: error.to_string(),
        },
    }
}

#[cfg(test)]
mod tests;
