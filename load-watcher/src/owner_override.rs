//! Overrides of owners: settings that `pvm owner` writes for the load watchers of the machine
//! ("here", "away", times without guests, a number of cores).
//!
//! The override of the user UID is stored in `/var/tmp/sempa-owner-UID.toml`; another directory can
//! be configured. Only this user and root can write the file (see [`user_files`]). Therefore an
//! owner needs no rights in another user's virtual machine. Only [`read_all`], [`read`] and
//! [`write()`] perform I/O.

use crate::hours::WeeklyHours;
use crate::policy::{LeaveAfter, Policy, PolicyError, line_of_key};
use crate::user_files::{self, FileVersion, UntrustedFileError, UserFile};
use sempa_proto::Micros;
use sempa_proto::owner::EvictionMode;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// Directory of the overrides, unless [`OVERRIDES_DIR_VAR`] names another directory.
pub const OVERRIDES_DIR: &str = "/var/tmp";
/// Environment variable with the directory of the overrides.
pub const OVERRIDES_DIR_VAR: &str = "SEMPA_OWNER_WORDS";
/// Time for which an override without an explicit duration is valid.
pub const OVERRIDE_DURATION_DEFAULT: Duration = Duration::from_secs(12 * 3600);
/// Maximum duration that a user may request for an override: a week.
pub const OVERRIDE_DURATION_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// Suffix of the file name, after the uid.
pub(crate) const OVERRIDE_SUFFIX: &str = ".toml";
/// Maximum length in bytes of the reason for a drain.
pub const REASON_BYTES_MAX: usize = 200;
/// File with the identifier of the running boot.
const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";
/// Maximum size of an override file in bytes.
const OVERRIDE_BYTES_MAX: u64 = 16 << 10;

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
    /// Additional policy settings: times without guests, a number of cores, whether guests end.
    pub policy: Policy,
    /// States that no guest may be on this machine. Only root's drain has an effect.
    pub drain: Option<Drain>,
}

/// The administrator's statement that no guest may be on this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// Why the machine is drained, for the users of the guests; at most [`REASON_BYTES_MAX`] bytes.
    #[serde(default)]
    pub reason: String,
    /// Identifier of the boot with which the drain ends; `None` if the drain survives a reboot.
    pub boot_id: Option<String>,
}

impl Drain {
    /// Returns the reason why guests must stop, as a sentence.
    pub fn sentence(&self) -> String {
        match self.reason.as_str() {
            "" => "the administrator has drained this machine".into(),
            reason => format!("the administrator has drained this machine: {reason}"),
        }
    }

    fn is_in_force(&self, boot_id: Option<&str>) -> bool {
        self.boot_id.is_none() || self.boot_id.as_deref() == boot_id
    }
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
    #[serde(default)]
    end: bool,
    drain: Option<Drain>,
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
            end: ends_guests,
            drain,
        } = content;
        if drain
            .as_ref()
            .is_some_and(|drain| drain.reason.len() > REASON_BYTES_MAX)
        {
            return Err(PolicyError {
                file: file.to_string(),
                line: line_of_key(text, "reason"),
                reason: format!("the reason of the drain is longer than {REASON_BYTES_MAX} bytes"),
            });
        }
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
        let mut owner_override = Self {
            presence,
            policy: Policy {
                forbidden_hours,
                cores,
                ..Policy::default()
            },
            drain,
        };
        owner_override.set_ends_guests(ends_guests);
        Ok(owner_override)
    }

    /// True if guests that must stop are ended at once.
    pub fn ends_guests(&self) -> bool {
        self.policy.eviction_mode == Some(EvictionMode::Kill)
    }

    /// States whether guests that must stop are ended at once, instead of what the other policies
    /// state.
    pub fn set_ends_guests(&mut self, ends_guests: bool) {
        let policy = &mut self.policy;
        (policy.eviction_mode, policy.leave_after) = match ends_guests {
            true => (Some(EvictionMode::Kill), Some(LeaveAfter::Seconds(0))),
            false => (None, None),
        };
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
        if self.ends_guests() {
            toml_text.push_str("end = true\n");
        }
        if let Some(drain) = &self.drain {
            // A table ends the list of the other settings.
            toml_text.push_str(&format!("[drain]\nreason = {}\n", quoted(&drain.reason)));
            if let Some(boot_id) = &drain.boot_id {
                toml_text.push_str(&format!("boot_id = {}\n", quoted(boot_id)));
            }
        }
        toml_text
    }

    /// True if the override contains no setting.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Returns a text as a string of TOML.
fn quoted(text: &str) -> String {
    let escape = |c: char| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04X}", u32::from(c)),
        c => c.to_string(),
    };
    format!("\"{}\"", text.chars().map(escape).collect::<String>())
}

/// Returns the identifier of the running boot; `None` if the kernel does not give it.
pub fn boot_id() -> Option<String> {
    let text = std::fs::read_to_string(BOOT_ID_FILE).ok()?;
    Some(text.trim().to_string())
}

/// Returns the directory of the overrides: `configured_dir` if it is present and not empty,
/// otherwise [`OVERRIDES_DIR`].
pub fn overrides_dir(configured_dir: Option<PathBuf>) -> PathBuf {
    configured_dir
        .filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or_else(|| PathBuf::from(OVERRIDES_DIR))
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

/// Returns the usual path of a user's override file. If another user has taken the name, the file
/// has another one.
pub fn override_file(dir: &Path, uid: u32) -> PathBuf {
    user_files::usual_path(dir, uid, OVERRIDE_SUFFIX)
}

/// Reads the override of a user; returns an empty override if the user has no file.
///
/// # Errors
/// Another user could have written the file, or the file cannot be read or parsed.
pub fn read(dir: &Path, uid: u32) -> Result<OwnerOverride, OverrideError> {
    match user_files::read(dir, uid, OVERRIDE_SUFFIX, OVERRIDE_BYTES_MAX)? {
        Some((_, file)) => Ok(parse_file(&file)?),
        None => Ok(OwnerOverride::default()),
    }
}

/// Parses a file. A drain that has ended with an earlier boot is left out.
fn parse_file(file: &UserFile) -> Result<OwnerOverride, PolicyError> {
    let mut owner_override = OwnerOverride::parse(&file.path.display().to_string(), &file.text)?;
    owner_override.drain = owner_override
        .drain
        .filter(|drain| drain.is_in_force(boot_id().as_deref()));
    Ok(owner_override)
}

/// Overrides that were read together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadOverrides {
    /// The overrides, with the uid of their users.
    pub overrides: Vec<(u32, OwnerOverride)>,
    /// The version of each file whose override is in `overrides`.
    pub versions: Vec<(u32, FileVersion)>,
    /// An error sentence for each refused file.
    pub errors: Vec<String>,
}

/// Reads the overrides of these users.
pub fn read_all(dir: &Path, users: &BTreeSet<u32>) -> ReadOverrides {
    let mut result = ReadOverrides::default();
    for (uid, path) in user_files::newest_files(dir, OVERRIDE_SUFFIX, users) {
        let file = user_files::read_trusted(path, uid, OVERRIDE_BYTES_MAX);
        let parsed_file = file.map_err(OverrideError::from).and_then(|file| {
            let Some((version, file)) = file else {
                return Ok(None);
            };
            Ok(Some((version, parse_file(&file)?)))
        });
        match parsed_file {
            Ok(Some((version, declared_override))) => {
                result.overrides.push((uid, declared_override));
                result.versions.push((uid, version));
            }
            Ok(None) => {}
            Err(error) => result.errors.push(error.to_string()),
        }
    }
    result
}

/// Writes the override of a user; an empty override removes the file. The calling process must run
/// as that user or as root. Returns the version and the path of the new file; `None` if the file
/// was removed.
///
/// # Errors
/// The error of the system.
pub fn write(
    dir: &Path,
    uid: u32,
    owner_override: &OwnerOverride,
) -> io::Result<Option<(FileVersion, PathBuf)>> {
    let text = (!owner_override.is_empty()).then(|| owner_override.to_toml());
    user_files::write(dir, uid, OVERRIDE_SUFFIX, text.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;
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
            drain: None,
        }
    }

    /// A drain ends with the boot that it names.
    #[test]
    fn drain_ends_with_its_boot() {
        let dir = tempfile::tempdir().expect("a folder");
        let written = |boot_id: Option<String>| {
            let drain = Some(Drain {
                reason: "new disks".into(),
                boot_id,
            });
            let owner_override = OwnerOverride {
                drain: drain.clone(),
                ..away_override()
            };
            write(dir.path(), own_uid(), &owner_override).expect("written");
            let found = read(dir.path(), own_uid()).expect("valid");
            assert_eq!(found.presence, away_override().presence);
            (found.drain == drain, found.drain.is_some())
        };
        assert_eq!(written(None), (true, true));
        assert_eq!(written(boot_id()), (true, true));
        assert_eq!(written(Some("another".into())), (false, false));
    }

    #[test]
    fn override_is_written_read_and_removed() {
        let dir = tempfile::tempdir().expect("a folder");
        assert_eq!(read(dir.path(), own_uid()), Ok(OwnerOverride::default()));
        write(dir.path(), own_uid(), &away_override()).expect("written");
        let all = read_all(dir.path(), &[own_uid()].into());
        assert_eq!(all.overrides, [(own_uid(), away_override())]);
        assert_eq!((all.versions.len(), all.errors.len()), (1, 0));
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
        // Now the owner of the file differs from the user whose uid is in the file name. The file
        // has no effect.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("the test's own file");
        fs::rename(&path, override_file(dir.path(), own_uid() + 1)).expect("the test's own file");
        let users = [own_uid(), own_uid() + 1].into();
        assert_eq!(read_all(dir.path(), &users), ReadOverrides::default());
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
            ("[drain]\nwhy = 1\n", 2, "unknown field `why`"),
            (
                &format!(
                    "[drain]\nreason = \"{}\"\n",
                    "r".repeat(REASON_BYTES_MAX + 1)
                ),
                2,
                "longer than 200 bytes",
            ),
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
        fn formatted_override_parses_unchanged(start_s in 0_u64..1 << 40, duration_s in 0_u64..1 << 20, is_here: bool, ends_with_visit: bool, cores: u32, ends_guests: bool, reason in "\\PC{0,40}[\"\\\\\n\t]{0,3}", boot_id: Option<String>, is_drained: bool) {
            let state = if is_here { Presence::Here } else { Presence::Away };
            let declared_presence = DeclaredPresence { state, declared_at: Micros::from_secs(start_s), expires_at: Micros::from_secs(start_s + duration_s), ends_with_visit };
            let hours = Some(vec!["mon-fri 9-17".parse().expect("good")]);
            let mut owner_override = OwnerOverride { presence: Some(declared_presence), policy: Policy { cores: Some(cores), forbidden_hours: hours, ..Policy::default() }, drain: is_drained.then_some(Drain { reason, boot_id }) };
            owner_override.set_ends_guests(ends_guests);
            prop_assert_eq!(owner_override.ends_guests(), ends_guests);
            prop_assert_eq!(OwnerOverride::parse("x", &owner_override.to_toml()), Ok(owner_override));
        }

        #[test]
        fn any_text_is_accepted(text in "(?s).{0,100}") {
            let _ = OwnerOverride::parse("x", &text);
        }
    }
}
