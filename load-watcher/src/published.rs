//! Whole policies of owners: what `pvm owner policy FILE` lays beside his word for the load watchers of the machine. So an owner
//! needs no rights in anybody's virtual machine, and nobody has to look into his home.
//!
//! A policy lies in `/var/tmp/sempa-owner-UID.policy.toml` and is believed as a word is (see [`word`]). It is read as any
//! policy file: one that is wrong is refused, and what it said before stays; if it said nothing, no guest is welcome.

use crate::policy::{POLICY_BYTES_MAX, Policy, PolicyError};
use crate::word::{self, WORD_PREFIX};
use std::io;
use std::path::{Path, PathBuf};

/// How names of these files end.
const POLICY_END: &str = ".policy.toml";

/// Why a policy does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// It may be somebody else's.
    Doubted(String),
    /// It cannot be understood.
    Refused(PolicyError),
}

/// The policy file of a user.
pub fn policy_file(dir: &Path, uid: u32) -> PathBuf {
    dir.join(format!("{WORD_PREFIX}{uid}{POLICY_END}"))
}

/// What a user has published, and what it says; `None` when there is nothing.
///
/// # Errors
/// It is not the user's own, or cannot be understood.
pub fn read(dir: &Path, uid: u32) -> Result<Option<(String, Policy)>, Wrong> {
    let path = policy_file(dir, uid);
    let text = word::believed(&path, uid, POLICY_BYTES_MAX as u64).map_err(Wrong::Doubted)?;
    let parsed = |text: String| Ok((Policy::parse_own(&path.display().to_string(), &text)?, text));
    let read = text.map(parsed).transpose().map_err(Wrong::Refused)?;
    Ok(read.map(|(policy, text)| (text, policy)))
}

/// What each user has published.
pub fn read_all(dir: &Path) -> Vec<(u32, Result<Policy, Wrong>)> {
    let users = word::users_with(dir, POLICY_END).into_iter();
    users
        .filter_map(|uid| {
            Some((
                uid,
                read(dir, uid)
                    .map(|read| read.map(|(_, policy)| policy))
                    .transpose()?,
            ))
        })
        .collect()
}

/// Makes this text, which is a good policy, the policy of a user, as whom (or as root) this process must run; `None` takes it back.
///
/// # Errors
/// What the system said.
pub fn write(dir: &Path, uid: u32, text: Option<&str>) -> io::Result<()> {
    word::put(dir, uid, &policy_file(dir, uid), text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn own() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    #[test]
    fn a_policy_is_published_read_and_taken_back_and_is_no_word() {
        let dir = tempfile::tempdir().expect("a folder");
        assert_eq!(read(dir.path(), own()), Ok(None));
        write(dir.path(), own(), Some("leave_after = 30\n")).expect("written");
        let policy = Policy::parse("x", "leave_after = 30").expect("good");
        assert_eq!(
            read(dir.path(), own()),
            Ok(Some(("leave_after = 30\n".into(), policy.clone())))
        );
        assert_eq!(read_all(dir.path()), [(own(), Ok(policy))]);
        assert_eq!(word::read_all(dir.path()), (Vec::new(), Vec::new()));
        write(dir.path(), own(), None).expect("removed");
        assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
    }

    #[test]
    fn a_policy_that_somebody_else_could_have_written_is_not_believed_and_a_wrong_one_is_refused_with_its_line()
     {
        let dir = tempfile::tempdir().expect("a folder");
        write(dir.path(), own(), Some("nice = 3\nowners = [\"me\"]\n")).expect("written");
        let Err(Wrong::Refused(error)) = read(dir.path(), own()) else {
            panic!("nobody names himself")
        };
        assert_eq!(error.line, 2);
        let path = policy_file(dir.path(), own());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("the test's own file");
        assert!(
            matches!(read(dir.path(), own()), Err(Wrong::Doubted(says)) if says.contains("not believed"))
        );
        fs::rename(&path, policy_file(dir.path(), own() + 1)).expect("the test's own file");
        assert!(
            matches!(read_all(dir.path())[..], [(uid, Err(Wrong::Doubted(_)))] if uid == own() + 1)
        );
    }
}
