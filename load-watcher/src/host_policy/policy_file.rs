//! Reading of policy files. The load watcher of a whole machine may not be able to read the file of
//! the user of a virtual machine, so it receives the content from the user's own load watcher.

use super::LoadPolicyError;
use crate::policy::{POLICY_BYTES_MAX, Policy, PolicyError};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Content of a policy file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PolicyFileContent {
    Missing,
    Text(String),
    /// The file cannot be read; contains the system's error text.
    Unreadable(String),
}

/// A policy file that was read by this or by another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyFile {
    /// Path of the file, for sentences.
    pub name: String,
    pub content: PolicyFileContent,
}

impl PolicyFile {
    /// Reads a policy file.
    pub fn read(path: &Path) -> Self {
        let content = match read_limited(path) {
            Ok(text) => PolicyFileContent::Text(text),
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                PolicyFileContent::Missing
            }
            Err(error) => PolicyFileContent::Unreadable(error.to_string()),
        };
        let name = path.display().to_string();
        Self { name, content }
    }

    /// Parses the content; a missing file is an empty policy. `parse` is called with the file's
    /// name and its text.
    pub(super) fn parse(
        &self,
        parse: fn(&str, &str) -> Result<Policy, PolicyError>,
    ) -> Result<Policy, LoadPolicyError> {
        match &self.content {
            PolicyFileContent::Missing => Ok(Policy::default()),
            PolicyFileContent::Text(text) => {
                parse(&self.name, text).map_err(LoadPolicyError::Malformed)
            }
            PolicyFileContent::Unreadable(cause) => Err(LoadPolicyError::Read {
                name: self.name.clone(),
                cause: cause.clone(),
            }),
        }
    }
}

/// Reads the text of a file, but not much more than a policy may have: the parser refuses a longer
/// one.
fn read_limited(path: &Path) -> io::Result<String> {
    // The cut may split the last character, which has four bytes at most.
    let bytes_max = POLICY_BYTES_MAX + 4;
    let mut bytes = Vec::new();
    File::open(path)?
        .take(bytes_max as u64)
        .read_to_end(&mut bytes)?;
    let is_cut = bytes.len() == bytes_max;
    String::from_utf8(bytes).or_else(|error| {
        let valid_bytes = error.utf8_error().valid_up_to();
        let mut bytes = error.into_bytes();
        if !is_cut || valid_bytes <= POLICY_BYTES_MAX {
            let message = "stream did not contain valid UTF-8";
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        bytes.truncate(valid_bytes);
        String::from_utf8(bytes).map_err(io::Error::other)
    })
}

/// Where the policy of the user of the virtual machine comes from.
#[derive(Clone, Debug)]
pub enum UserPolicySource {
    /// This process reads the file.
    File(PathBuf),
    Received(PolicyFile),
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
        let file = match self {
            Self::File(path) => &PolicyFile::read(path),
            Self::Received(file) => file,
        };
        file.parse(Policy::parse_without_owners)
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
            let received = UserPolicySource::Received(PolicyFile::read(&path));
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

    /// A file that is too long is refused for its length, wherever its text is cut.
    #[test]
    fn long_file_is_refused_for_its_length() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("owner.toml");
        for padding in ["", "a", "aa", "aaa"] {
            let text = format!("#{padding}{}", "\u{1F600}".repeat(POLICY_BYTES_MAX));
            std::fs::write(&path, text).expect("the test's own file");
            let error = PolicyFile::read(&path).parse(Policy::parse).map(drop);
            let error = error.map_err(|error| error.to_string());
            assert!(
                error.clone().is_err_and(|e| e.contains("is longer than")),
                "{error:?}"
            );
        }
        std::fs::write(&path, [b'#', 0xff]).expect("the test's own file");
        let content = PolicyFile::read(&path).content;
        let text = "stream did not contain valid UTF-8".to_string();
        assert_eq!(content, PolicyFileContent::Unreadable(text));
    }
}
