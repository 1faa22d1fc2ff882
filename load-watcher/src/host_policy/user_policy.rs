//! The policy file of the user of the virtual machine. The load watcher of a whole machine may not
//! be able to read the file, so it receives the content from the user's own load watcher.

use super::{LoadPolicyError, load_policy};
use crate::policy::{POLICY_BYTES_MAX, Policy};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Content of a policy file that another process has read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReceivedContent {
    Missing,
    Text(String),
    /// The file cannot be read; contains the system's error text.
    Unreadable(String),
}

/// A policy file that another process has read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceivedFile {
    /// Path of the file, for sentences.
    pub name: String,
    pub content: ReceivedContent,
}

impl ReceivedFile {
    /// Reads the file for another process.
    pub fn read(path: &Path) -> Self {
        let content = match read_limited(path) {
            Ok(text) => ReceivedContent::Text(text),
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                ReceivedContent::Missing
            }
            Err(error) => ReceivedContent::Unreadable(error.to_string()),
        };
        let name = path.display().to_string();
        Self { name, content }
    }
}

/// Reads a file up to one byte more than a policy may have, so that the parser refuses a longer
/// one.
fn read_limited(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let bytes_max = POLICY_BYTES_MAX as u64 + 1;
    File::open(path)?
        .take(bytes_max)
        .read_to_string(&mut text)?;
    Ok(text)
}

/// Where the policy of the user of the virtual machine comes from.
#[derive(Clone, Debug)]
pub enum UserPolicySource {
    /// This process reads the file.
    File(PathBuf),
    Received(ReceivedFile),
}

impl From<PathBuf> for UserPolicySource {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

impl UserPolicySource {
    /// Returns the path of the file, for sentences.
    pub(super) fn name(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Received(file) => file.name.clone(),
        }
    }

    pub(super) fn load(&self) -> Result<Policy, LoadPolicyError> {
        let ReceivedFile { name, content } = match self {
            Self::File(path) => return load_policy(path, Policy::parse_without_owners),
            Self::Received(file) => file,
        };
        match content {
            ReceivedContent::Missing => Ok(Policy::default()),
            ReceivedContent::Text(text) => {
                Policy::parse_without_owners(name, text).map_err(LoadPolicyError::Malformed)
            }
            ReceivedContent::Unreadable(error) => Err(LoadPolicyError::Read {
                name: name.clone(),
                source: io::Error::other(error.clone()),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file has the same effect if another process has read it.
    #[test]
    fn received_file_is_parsed_like_a_file() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("owner.toml");
        let assert_same = || {
            let received = UserPolicySource::Received(ReceivedFile::read(&path));
            let file = UserPolicySource::from(path.clone());
            assert_eq!(received.name(), file.name());
            let text = |source: &UserPolicySource| source.load().map_err(|error| error.to_string());
            assert_eq!(text(&received), text(&file));
            text(&file)
        };
        assert_eq!(assert_same(), Ok(Policy::default()));
        std::fs::write(&path, "cores = 3\n").expect("the test's own file");
        assert_eq!(assert_same().expect("valid").cores, Some(3));
        std::fs::write(&path, "owners = [\"me\"]\n").expect("the test's own file");
        assert!(assert_same().is_err());
        std::fs::remove_file(&path).expect("the test's own file");
        std::fs::create_dir(&path).expect("the test's own folder");
        assert!(
            assert_same()
                .expect_err("a folder")
                .contains("cannot be read")
        );
    }
}
