//! Complete policies of owners, which `pvm owner policy FILE` publishes for the load watchers of
//! the machine. With a published policy, an owner needs no rights in another user's virtual
//! machine, and the load watchers need no access to the owner's home directory.
//!
//! The policy of the user UID is stored in `/var/tmp/sempa-owner-UID.policy.toml` and trusted under
//! the same conditions as an override (see [`owner_override`]). The text of the policy is parsed
//! like any policy file. If the text is malformed, the policy is refused and the previous policy
//! stays in force; if there was none, no guest may run.

use crate::owner_override::{self, OVERRIDE_PREFIX, UntrustedFileError};
use crate::policy::{POLICY_BYTES_MAX, Policy, PolicyError};
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Suffix of the file name, after the uid.
const POLICY_SUFFIX: &str = ".policy.toml";

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

/// Returns the path of a user's published policy.
pub fn policy_file(dir: &Path, uid: u32) -> PathBuf {
    dir.join(format!("{OVERRIDE_PREFIX}{uid}{POLICY_SUFFIX}"))
}

/// Reads the published policy of a user. Returns its text and its settings; `None` if the user has
/// published no policy.
///
/// # Errors
/// Another user could have written the policy, or the policy cannot be read or is malformed.
pub fn read(dir: &Path, uid: u32) -> Result<Option<(String, Policy)>, PublishedPolicyError> {
    let path = policy_file(dir, uid);
    let text = owner_override::read_trusted(&path, uid, POLICY_BYTES_MAX as u64)?;
    let parse = |text: String| {
        Ok::<_, PolicyError>((
            Policy::parse_without_owners(&path.display().to_string(), &text)?,
            text,
        ))
    };
    let parsed_policy = text.map(parse).transpose()?;
    Ok(parsed_policy.map(|(policy, text)| (text, policy)))
}

/// Reads the published policies of all users. Each result is paired with the uid of its user.
pub fn read_all(dir: &Path) -> Vec<(u32, Result<Policy, PublishedPolicyError>)> {
    let uids = owner_override::users_with_file(dir, POLICY_SUFFIX).into_iter();
    uids.filter_map(|uid| {
        Some((
            uid,
            read(dir, uid)
                .map(|text_and_policy| text_and_policy.map(|(_, policy)| policy))
                .transpose()?,
        ))
    })
    .collect()
}

/// Publishes a valid policy text for a user, or withdraws the policy if `text` is `None`. The
/// calling process must run as that user or as root.
///
/// # Errors
/// The error of the system.
pub fn write(dir: &Path, uid: u32, text: Option<&str>) -> io::Result<()> {
    owner_override::write_atomically(dir, uid, &policy_file(dir, uid), text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn own_uid() -> u32 {
        nix::unistd::geteuid().as_raw()
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
        assert_eq!(read_all(dir.path()), [(own_uid(), Ok(policy))]);
        assert_eq!(
            owner_override::read_all(dir.path()),
            (Vec::new(), Vec::new())
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
        fs::rename(&path, policy_file(dir.path(), own_uid() + 1)).expect("the test's own file");
        assert!(
            matches!(read_all(dir.path())[..], [(uid, Err(PublishedPolicyError::Untrusted(_)))] if uid == own_uid() + 1)
        );
    }
}
