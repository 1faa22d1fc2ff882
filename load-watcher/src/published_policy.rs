//! Complete policies of owners, which `pvm owner policy FILE` publishes for the load watchers of
//! the machine. With a published policy, an owner needs no rights in another user's virtual
//! machine, and the load watchers need no access to the owner's home directory.
//!
//! The policy of the user UID is stored in `/var/tmp/sempa-owner-UID.policy.toml` and trusted under
//! the same conditions as an override (see [`user_files`]). The text of the policy is parsed
//! like any policy file. If the text is malformed, the policy is refused and the previous policy
//! stays in force; if there was none, no guest may run.

use crate::policy::{POLICY_BYTES_MAX, Policy, PolicyError};
use crate::user_files::{self, FileVersion, UntrustedFileError, UserFile};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Suffix of the file name, after the uid.
pub(crate) const POLICY_SUFFIX: &str = ".policy.toml";

/// The reason why a published policy was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PublishedPolicyError {
    /// Another user could have written the file, or the file cannot be read. The file is unchanged
    /// and has no effect.
    #[error(transparent)]
    Untrusted(#[from] UntrustedFileError),
    /// The text of the policy is malformed. The previous policy stays in force; if there was none,
    /// no guest may run.
    #[error(transparent)]
    Malformed(#[from] PolicyError),
}

/// Returns the usual path of a user's published policy. If another user has taken the name, the
/// file has another one.
pub fn policy_file(dir: &Path, uid: u32) -> PathBuf {
    user_files::usual_path(dir, uid, POLICY_SUFFIX)
}

/// Reads the published policy of a user. Returns its text and its settings; `None` if the user has
/// published no policy.
///
/// # Errors
/// Another user could have written the policy, or the policy cannot be read or is malformed.
pub fn read(dir: &Path, uid: u32) -> Result<Option<(String, Policy)>, PublishedPolicyError> {
    let file = user_files::read(dir, uid, POLICY_SUFFIX, POLICY_BYTES_MAX as u64)?;
    let Some((_, file)) = file else {
        return Ok(None);
    };
    let policy = parse_file(&file)?;
    Ok(Some((file.text, policy)))
}

fn parse_file(file: &UserFile) -> Result<Policy, PolicyError> {
    Policy::parse_without_owners(&file.path.display().to_string(), &file.text)
}

/// A published policy, and the version of its file.
pub type PolicyVersion = (Policy, FileVersion);

/// Reads the published policies of these users. Each result is paired with the uid of its user.
pub fn read_all(
    dir: &Path,
    users: &BTreeSet<u32>,
) -> Vec<(u32, Result<PolicyVersion, PublishedPolicyError>)> {
    let read_file = |uid: u32, path: PathBuf| {
        let file = user_files::read_trusted(path, uid, POLICY_BYTES_MAX as u64);
        let Some((version, file)) = file? else {
            return Ok(None);
        };
        Ok::<_, PublishedPolicyError>(Some((parse_file(&file)?, version)))
    };
    let files = user_files::newest_files(dir, POLICY_SUFFIX, users).into_iter();
    files
        .filter_map(|(uid, path)| Some((uid, read_file(uid, path).transpose()?)))
        .collect()
}

/// Publishes a valid policy text for a user, or withdraws the policy if `text` is `None`. The
/// calling process must run as that user or as root. Returns the version and the path of the new
/// file; `None` if the policy was withdrawn.
///
/// # Errors
/// The error of the system.
pub fn write(
    dir: &Path,
    uid: u32,
    text: Option<&str>,
) -> io::Result<Option<(FileVersion, PathBuf)>> {
    user_files::write(dir, uid, POLICY_SUFFIX, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn own_uid() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    fn users() -> BTreeSet<u32> {
        [own_uid(), own_uid() + 1].into()
    }

    /// The file of a published policy is not read as an override.
    #[test]
    fn policy_is_published_read_and_withdrawn() {
        let dir = tempfile::tempdir().expect("a folder");
        assert_eq!(read(dir.path(), own_uid()), Ok(None));
        write(dir.path(), own_uid(), Some("leave_after = 30\n")).expect("written");
        let policy = Policy::parse("x", "leave_after = 30").expect("good");
        assert_eq!(
            read(dir.path(), own_uid()),
            Ok(Some(("leave_after = 30\n".into(), policy.clone())))
        );
        let all: Vec<(u32, Policy)> = read_all(dir.path(), &users())
            .into_iter()
            .map(|(uid, result)| (uid, result.expect("it is valid").0))
            .collect();
        assert_eq!(all, [(own_uid(), policy)]);
        assert_eq!(
            crate::owner_override::read_all(dir.path(), &users()),
            crate::owner_override::ReadOverrides::default()
        );
        write(dir.path(), own_uid(), None).expect("removed");
        assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
    }

    /// A policy that another user could have written is not trusted. A malformed policy is refused
    /// with the line of its error.
    #[test]
    fn untrusted_or_malformed_policy_is_rejected() {
        let dir = tempfile::tempdir().expect("a folder");
        write(dir.path(), own_uid(), Some("nice = 3\nowners = [\"me\"]\n")).expect("written");
        let Err(PublishedPolicyError::Malformed(error)) = read(dir.path(), own_uid()) else {
            panic!("nobody names himself")
        };
        assert_eq!(error.line, 2);
        let path = policy_file(dir.path(), own_uid());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("the test's own file");
        assert!(
            matches!(read(dir.path(), own_uid()), Err(PublishedPolicyError::Untrusted(says)) if says.to_string().contains("not trusted"))
        );
        assert!(
            matches!(read_all(dir.path(), &users())[..], [(uid, Err(PublishedPolicyError::Untrusted(_)))] if uid == own_uid())
        );
        fs::rename(&path, policy_file(dir.path(), own_uid() + 1)).expect("the test's own file");
        assert!(
            read_all(dir.path(), &users()).is_empty(),
            "another user's file has no effect"
        );
    }
}
