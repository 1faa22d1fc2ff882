//! The files that a stopped task has open. A task may open a file after the target was asked, for
//! example a temporary one; the target then explains a failed restore by the files that it lacks.

use super::descriptors::{DescriptorMeaning, read_descriptor};
use crate::proc;
use sempa_proto::migration::{FileRequirement, RequiredFile};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Maximum size in bytes of the paths that are listed. Further files are not listed.
const OPEN_PATHS_BYTES_MAX: usize = 128 << 10;

/// Returns the files that these stopped processes have open, with what the target must have for
/// each. Descriptors that cannot be read are omitted.
pub fn open_files(processes: &[i32]) -> Vec<RequiredFile> {
    let mut files = BTreeMap::<PathBuf, RequiredFile>::new();
    let mut remaining_bytes = OPEN_PATHS_BYTES_MAX;
    for pid in processes {
        let entries = proc::descriptors(*pid).into_iter().flatten();
        for entry in entries {
            let fd_number = entry.file_name();
            let meaning = read_descriptor(*pid, &entry.path(), &fd_number.to_string_lossy());
            let (path, requirement) = match meaning {
                Ok(DescriptorMeaning::EqualLengthFile(path, _)) => (path, FileRequirement::Length),
                Ok(
                    DescriptorMeaning::MinimumLengthFile(path)
                    | DescriptorMeaning::ExistingFile(path)
                    | DescriptorMeaning::NamedPipe(path),
                ) => (path, FileRequirement::Exists),
                Ok(DescriptorMeaning::Directory(path)) => (path, FileRequirement::Directory),
                _ => continue,
            };
            let path_bytes = path.as_os_str().len();
            if path_bytes > remaining_bytes || files.contains_key(&path) {
                continue;
            }
            let bytes = match requirement {
                FileRequirement::Length => std::fs::metadata(entry.path()).map_or(0, |m| m.len()),
                _ => 0,
            };
            remaining_bytes -= path_bytes;
            let file = RequiredFile {
                path: path.clone(),
                bytes,
                requirement,
            };
            files.insert(path, file);
        }
    }
    files.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    /// A file that was opened just now is listed with its length, and is not listed after it was
    /// closed.
    #[test]
    fn open_file_is_listed_with_its_length() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().canonicalize().expect("it exists").join("f");
        std::fs::write(&path, "four").expect("the test's own directory");
        let file = File::open(&path).expect("it exists");
        let own_pid = std::process::id().cast_signed();
        let find = || {
            let mut files = open_files(&[own_pid]).into_iter();
            files.find(|file| file.path == path)
        };
        let listed = RequiredFile {
            path: path.clone(),
            bytes: 4,
            requirement: FileRequirement::Length,
        };
        assert_eq!(find(), Some(listed));
        drop(file);
        assert_eq!(find(), None);
    }
}
