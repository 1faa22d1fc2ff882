//! Overrides of owners: settings that `pvm owner` writes for the load watchers of the machine
//! ("here", "away", times without guests, a number of cores).
//!
//! The override of the user UID is stored in `/var/tmp/sempa-owner-UID.toml`; another directory can
//! be configured. Only this user and root can write the file: the directory has the sticky bit, and
//! the file is accepted only if it belongs to the user whose uid is in the file name. Therefore an
//! owner needs no rights in another user's virtual machine. Only [`read_all`], [`read`] and
//! [`write()`] perform I/O.

use crate::hours::WeeklyHours;
use crate::policy::{Policy, PolicyError, line_of_key};
use sempa_proto::Micros;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// Directory of the overrides, unless [`OVERRIDES_DIR_VAR`] names another directory.
pub const OVERRIDES_DIR: &str = "/var/tmp";
/// Environment variable with the directory of the overrides.
pub const OVERRIDES_DIR_VAR: &str = "SEMPA_OWNER_WORDS";
/// Prefix of the names of override files.
pub const OVERRIDE_PREFIX: &str = "sempa-owner-";
/// Time for which an override without an explicit duration is valid.
pub const OVERRIDE_DURATION_DEFAULT: Duration = Duration::from_secs(12 * 3600);
/// Maximum duration that a user may request for an override: a week.
pub const OVERRIDE_DURATION_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
const OVERRIDE_SUFFIX: &str = ".toml";
/// Maximum size of an override file in bytes.
const OVERRIDE_BYTES_MAX: u64 = 16 << 10;
/// Maximum number of override files that are read.
const OVERRIDES_MAX: usize = 256;

/// Presence as declared by an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Presence {
    /// The owner does not need the machine.
    Away,
    /// The owner uses the machine.
    Here,
}

/// The override of one user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerOverride {
    /// The declared presence; `None` if the override only contains settings.
    pub presence: Option<DeclaredPresence>,
    /// Additional policy settings: times without guests, a number of cores.
    pub policy: Policy,
}

/// A declared presence and the time for which it is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeclaredPresence {
    pub state: Presence,
    /// Time of the declaration, in microseconds since 1970.
    pub declared_at: Micros,
    /// Time at which the declaration expires, in microseconds since 1970.
    pub expires_at: Micros,
    /// True if the next login or logout ends the declaration before `expires_at`.
    pub ends_with_visit: bool,
}

/// Content of an override file, as parsed from TOML.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OverrideFile {
    state: Option<Presence>,
    at_us: Option<u64>,
    until_us: Option<u64>,
    #[serde(default)]
    visit: bool,
    never: Option<Vec<WeeklyHours>>,
    cores: Option<u32>,
}

impl OwnerOverride {
    /// Parses the text of an override file; errors contain `file` as its name.
    ///
    /// # Errors
    /// As [`Policy::parse`].
    pub fn parse(file: &str, text: &str) -> Result<Self, PolicyError> {
        let content: OverrideFile =
            toml::from_str(text).map_err(|error| PolicyError::from_toml(file, text, &error))?;
        let OverrideFile {
            state,
            at_us,
            until_us,
            visit: ends_with_visit,
            never: forbidden_hours,
            cores,
        } = content;
        let presence = match (state, at_us, until_us) {
            (Some(state), Some(declared_at_us), Some(expires_at_us))
                if declared_at_us <= expires_at_us =>
            {
                Some(DeclaredPresence {
                    state,
                    declared_at: Micros(declared_at_us),
                    expires_at: Micros(expires_at_us),
                    ends_with_visit,
                })
            }
            (None, ..) => None,
            _ => {
                let (line, reason) = (
                    line_of_key(text, "state"),
                    "the state has no time (at_us, until_us)".to_string(),
                );
                return Err(PolicyError {
                    file: file.to_string(),
                    line,
                    reason,
                });
            }
        };
        Ok(Self {
            presence,
            policy: Policy {
                forbidden_hours,
                cores,
                ..Policy::default()
            },
        })
    }

    /// Formats the override as the text of its file.
    pub fn to_toml(&self) -> String {
        let mut toml_text = "# Written by `pvm owner`; `pvm owner auto` removes it.\n".to_string();
        if let Some(DeclaredPresence {
            state,
            declared_at,
            expires_at,
            ends_with_visit,
        }) = self.presence
        {
            let state = if state == Presence::Away {
                "away"
            } else {
                "here"
            };
            let (declared_at, expires_at) = (declared_at.0, expires_at.0);
            toml_text.push_str(&format!(
                "state = \"{state}\"\nat_us = {declared_at}\nuntil_us = {expires_at}\nvisit = {ends_with_visit}\n"
            ));
        }
        if let Some(forbidden_hours) = &self.policy.forbidden_hours {
            let hour_texts: Vec<String> = forbidden_hours
                .iter()
                .map(|hours| format!("\"{hours}\""))
                .collect();
            toml_text.push_str(&format!("never = [{}]\n", hour_texts.join(", ")));
        }
        if let Some(cores) = self.policy.cores {
            toml_text.push_str(&format!("cores = {cores}\n"));
        }
        toml_text
    }

    /// True if the override contains no setting.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Returns the directory of the overrides: `configured_dir` if it is present and not empty,
/// otherwise [`OVERRIDES_DIR`].
pub fn overrides_dir(configured_dir: Option<PathBuf>) -> PathBuf {
    configured_dir
        .filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or_else(|| PathBuf::from(OVERRIDES_DIR))
}

/// Reason why a file of a user was not trusted and therefore not used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UntrustedFileError {
    /// The file cannot be opened or read, or is not UTF-8 text. Nothing in the file is used.
    #[error("{} is not trusted: {reason}", path.display())]
    Unreadable { path: PathBuf, reason: String },
    /// The file is not a regular file of this user, or another user can write it. The file was not
    /// read.
    #[error("{} is not trusted: it is not a file that only user {uid} can write", path.display())]
    NotOwnFile { path: PathBuf, uid: u32 },
}

/// Reason why the override of a user was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OverrideError {
    /// Another user could have written the file, or the file cannot be read. The file is unchanged
    /// and has no effect.
    #[error(transparent)]
    Untrusted(#[from] UntrustedFileError),
    /// The text of the override is malformed. The file is unchanged and has no effect.
    #[error(transparent)]
    Malformed(#[from] PolicyError),
}

/// Returns the path of a user's override file.
pub fn override_file(dir: &Path, uid: u32) -> PathBuf {
    dir.join(format!("{OVERRIDE_PREFIX}{uid}{OVERRIDE_SUFFIX}"))
}

/// Reads a file that only user `uid` or root can have written. Returns its text; `None` if the file
/// does not exist. Reads at most `bytes_max` + 1 bytes, so that the caller can detect a longer
/// file.
///
/// # Errors
/// Another user could have written the file, or the file cannot be read.
pub(crate) fn read_trusted(
    path: &Path,
    uid: u32,
    bytes_max: u64,
) -> Result<Option<String>, UntrustedFileError> {
    let unreadable_error = |error: io::Error| UntrustedFileError::Unreadable {
        path: path.to_path_buf(),
        reason: error.to_string(),
    };
    // A symbolic link could lead to a file of another user, and opening a named pipe could block.
    let open_result = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
        .open(path);
    let file = match open_result {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(unreadable_error(e)),
    };
    let metadata = file.metadata().map_err(unreadable_error)?;
    if !metadata.is_file() || metadata.uid() != uid || metadata.mode() & 0o022 != 0 {
        return Err(UntrustedFileError::NotOwnFile {
            path: path.to_path_buf(),
            uid,
        });
    }
    let mut text = String::new();
    file.take(bytes_max + 1)
        .read_to_string(&mut text)
        .map_err(unreadable_error)?;
    Ok(Some(text))
}

/// Reads the override of a user; returns an empty override if the file does not exist.
///
/// # Errors
/// Another user could have written the file, or the file cannot be read or parsed.
pub fn read(dir: &Path, uid: u32) -> Result<OwnerOverride, OverrideError> {
    let path = override_file(dir, uid);
    let Some(text) = read_trusted(&path, uid, OVERRIDE_BYTES_MAX)? else {
        return Ok(OwnerOverride::default());
    };
    Ok(OwnerOverride::parse(&path.display().to_string(), &text)?)
}

/// Returns the uids of the users who have a file with this suffix in the directory, in ascending
/// order, at most `OVERRIDES_MAX` uids.
pub(crate) fn users_with_file(dir: &Path, suffix: &str) -> Vec<u32> {
    let uid_of_entry = |entry: fs::DirEntry| {
        let name = entry.file_name();
        name.to_str()?
            .strip_prefix(OVERRIDE_PREFIX)?
            .strip_suffix(suffix)?
            .parse::<u32>()
            .ok()
    };
    let users: BTreeSet<u32> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(uid_of_entry)
        .collect();
    users.into_iter().take(OVERRIDES_MAX).collect()
}

/// Reads the overrides of all users. Returns each override with the uid of its user, and an error
/// sentence for each refused file.
pub fn read_all(dir: &Path) -> (Vec<(u32, OwnerOverride)>, Vec<String>) {
    let (mut overrides, mut errors) = (Vec::new(), Vec::new());
    for uid in users_with_file(dir, OVERRIDE_SUFFIX) {
        match read(dir, uid) {
            Ok(declared_override) => overrides.push((uid, declared_override)),
            Err(error) => errors.push(error.to_string()),
        }
    }
    (overrides, errors)
}

/// Writes the override of a user; an empty override removes the file. The calling process must run
/// as that user or as root.
///
/// # Errors
/// The error of the system.
pub fn write(dir: &Path, uid: u32, owner_override: &OwnerOverride) -> io::Result<()> {
    let text = (!owner_override.is_empty()).then(|| owner_override.to_toml());
    write_atomically(dir, uid, &override_file(dir, uid), text.as_deref())
}

/// Replaces the file `path` of a user atomically by `text`, or removes the file if `text` is
/// `None`. Succeeds if a file to be removed does not exist.
pub(crate) fn write_atomically(
    dir: &Path,
    uid: u32,
    path: &Path,
    text: Option<&str>,
) -> io::Result<()> {
    let Some(text) = text else {
        return match fs::remove_file(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        };
    };
    // The file is written under another name and then renamed, so that no reader sees an incomplete
    // file.
    let temporary_path = dir.join(format!(".{OVERRIDE_PREFIX}{uid}.{}", std::process::id()));
    let write_result = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(&temporary_path)
        .and_then(|mut file| {
            file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
            file.write_all(text.as_bytes())
        });
    write_result
        .and_then(|()| fs::rename(&temporary_path, path))
        .inspect_err(|_| drop(fs::remove_file(&temporary_path)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn own_uid() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    fn away_override() -> OwnerOverride {
        let declared_presence = DeclaredPresence {
            state: Presence::Away,
            declared_at: Micros::from_secs(5),
            expires_at: Micros::from_secs(9),
            ends_with_visit: true,
        };
        OwnerOverride {
            presence: Some(declared_presence),
            policy: Policy {
                cores: Some(2),
                ..Policy::default()
            },
        }
    }

    #[test]
    fn override_is_written_read_and_removed() {
        let dir = tempfile::tempdir().expect("a folder");
        assert_eq!(read(dir.path(), own_uid()), Ok(OwnerOverride::default()));
        write(dir.path(), own_uid(), &away_override()).expect("written");
        assert_eq!(
            read_all(dir.path()),
            (vec![(own_uid(), away_override())], Vec::new())
        );
        write(dir.path(), own_uid(), &OwnerOverride::default()).expect("removed");
        assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
        write(dir.path(), own_uid(), &OwnerOverride::default()).expect("nothing to remove is fine");
    }

    /// A symbolic link and a file that another user could have written are not trusted.
    #[test]
    fn file_writable_by_others_is_not_trusted() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = override_file(dir.path(), own_uid());
        write(dir.path(), own_uid(), &away_override()).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("the test's own file");
        assert!(
            read(dir.path(), own_uid())
                .expect_err("writable by all")
                .to_string()
                .contains("not trusted")
        );
        // Now the owner of the file differs from the user whose uid is in the file name.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("the test's own file");
        fs::rename(&path, override_file(dir.path(), own_uid() + 1)).expect("the test's own file");
        let (overrides, errors) = read_all(dir.path());
        assert!(
            overrides.is_empty() && errors.len() == 1,
            "{overrides:?} {errors:?}"
        );
        symlink(override_file(dir.path(), own_uid() + 1), &path).expect("a link");
        assert!(
            read(dir.path(), own_uid())
                .expect_err("a link")
                .to_string()
                .contains("not trusted")
        );
    }

    #[test]
    fn override_errors_name_line_and_reason() {
        for (text, line, reason) in [
            (
                "cores = 2\nnever = [\"noon\"]\n",
                2,
                "\"noon\" is not a time of the week",
            ),
            ("\n\ncorse = 2\n", 3, "unknown field `corse`"),
            (
                "cores = 2\nstate = \"here\"\n",
                2,
                "the state has no time (at_us, until_us)",
            ),
        ] {
            let error = OwnerOverride::parse("w.toml", text).expect_err(text);
            assert_eq!(
                (error.file.as_str(), error.line),
                ("w.toml", line),
                "{error}"
            );
            assert!(error.reason.contains(reason), "{error}");
        }
    }

    proptest! {
        #[test]
        fn formatted_override_parses_unchanged(start_s in 0_u64..1 << 40, duration_s in 0_u64..1 << 20, is_here: bool, ends_with_visit: bool, cores: u32) {
            let state = if is_here { Presence::Here } else { Presence::Away };
            let declared_presence = DeclaredPresence { state, declared_at: Micros::from_secs(start_s), expires_at: Micros::from_secs(start_s + duration_s), ends_with_visit };
            let hours = Some(vec!["mon-fri 9-17".parse().expect("good")]);
            let owner_override = OwnerOverride { presence: Some(declared_presence), policy: Policy { cores: Some(cores), forbidden_hours: hours, ..Policy::default() } };
            prop_assert_eq!(OwnerOverride::parse("x", &owner_override.to_toml()), Ok(owner_override));
        }

        #[test]
        fn any_text_is_accepted(text in "(?s).{0,100}") {
            let _ = OwnerOverride::parse("x", &text);
        }
    }
}
