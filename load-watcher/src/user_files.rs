//! Files of users in a directory that all users of the machine share.
//!
//! The directory has the sticky bit: anybody can make a file with any free name, and nobody can
//! change or remove the files of others. A file belongs to the user in its name only if the kernel
//! says so. Other files have no effect: they are neither counted nor reported, and if another user
//! has taken the usual name of a user's file, the file gets another name.
//!
//! The usual name is `sempa-owner-UID` with a suffix that tells what the file contains. The other
//! names are `sempa-owner-UID-TAG`, with a random tag. Of several files of a user the newest one is
//! used, preferably one without hard links; writing removes the others.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Prefix of the names of the files.
pub const FILE_PREFIX: &str = "sempa-owner-";
/// Maximum number of users whose files are read.
pub const FILE_USERS_MAX: usize = 256;
/// Maximum number of files of one user that are kept in memory. Of more files, the newest ones are
/// kept; the others have no effect.
const USER_FILES_MAX: usize = 64;
/// Maximum number of attempts to find a free random name.
const NAME_ATTEMPTS_MAX: usize = 16;

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

/// Identifies one version of a file. Each write makes another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FileVersion {
    pub inode: u64,
    /// Time of the last change of the content, in nanoseconds since 1970.
    pub changed_ns: i64,
}

impl FileVersion {
    fn of(metadata: &fs::Metadata) -> Self {
        Self {
            inode: metadata.ino(),
            changed_ns: metadata
                .mtime()
                .saturating_mul(1_000_000_000)
                .saturating_add(metadata.mtime_nsec()),
        }
    }
}

/// What a user's file contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileContent {
    Override,
    Policy,
}

/// A file that a load watcher has read and found valid.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ReadFile {
    pub uid: u32,
    pub content: FileContent,
    pub version: FileVersion,
}

impl ReadFile {
    pub fn new(uid: u32, content: FileContent, version: FileVersion) -> Self {
        Self {
            uid,
            content,
            version,
        }
    }
}

/// The text of a user's file.
#[derive(Debug)]
pub(crate) struct UserFile {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

/// Returns the usual path of a user's file with this suffix.
pub(crate) fn usual_path(dir: &Path, uid: u32, suffix: &str) -> PathBuf {
    dir.join(format!("{FILE_PREFIX}{uid}{suffix}"))
}

/// Returns the uid in the name of a file; `None` for a name that no user's file with this suffix
/// has.
fn uid_in_name(name: &str, suffix: &str) -> Option<u32> {
    let middle = name.strip_prefix(FILE_PREFIX)?.strip_suffix(suffix)?;
    let uid_text = match middle.split_once('-') {
        None => middle,
        Some((uid_text, tag)) => {
            let is_tag = !tag.is_empty() && tag.bytes().all(|byte| byte.is_ascii_alphanumeric());
            is_tag.then_some(uid_text)?
        }
    };
    let is_number = uid_text.bytes().all(|byte| byte.is_ascii_digit());
    uid_text.parse().ok().filter(|_| is_number)
}

/// Order in which the files of a user are used: the last one counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct FileRank {
    /// True if the file has no second name. Where the kernel permits it
    /// (`fs.protected_hardlinks`), anybody can give a second name of this kind to any file of a
    /// user, and also to the user's genuine file. So a file with several names must not displace
    /// one with a single name, but must not be ignored either.
    has_one_name: bool,
    /// True for a file with several names under the user's usual name, under which a genuine file
    /// is more probable than under another.
    is_usual_of_several: bool,
    changed_ns: i64,
}

/// Lists the files with this suffix that belong to the user in their name, for the users whose uid
/// `is_wanted` accepts, the one that counts last for each user; at most the last
/// [`USER_FILES_MAX`] of each.
fn own_files(
    dir: &Path,
    suffix: &str,
    is_wanted: impl Fn(u32) -> bool,
) -> BTreeMap<u32, Vec<PathBuf>> {
    let mut files = BTreeMap::<u32, Vec<(FileRank, PathBuf)>>::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let uid = name.to_str().and_then(|name| uid_in_name(name, suffix));
        let Some(uid) = uid.filter(|uid| is_wanted(*uid)) else {
            continue;
        };
        // The metadata of an entry is that of a link itself.
        let Some(metadata) = entry.metadata().ok().filter(|m| m.uid() == uid) else {
            continue;
        };
        let path = entry.path();
        let has_one_name = metadata.nlink() <= 1;
        let rank = FileRank {
            has_one_name,
            is_usual_of_several: !has_one_name && path == usual_path(dir, uid, suffix),
            changed_ns: FileVersion::of(&metadata).changed_ns,
        };
        let user_files = files.entry(uid).or_default();
        user_files.push((rank, path));
        if user_files.len() >= 2 * USER_FILES_MAX {
            keep_last(user_files);
        }
    }
    let sorted_paths = |mut files: Vec<(FileRank, PathBuf)>| {
        keep_last(&mut files);
        files.into_iter().map(|(_, path)| path).collect()
    };
    let files = files.into_iter();
    files
        .map(|(uid, files)| (uid, sorted_paths(files)))
        .collect()
}

/// Sorts files by rank, and removes all but the last [`USER_FILES_MAX`].
fn keep_last(files: &mut Vec<(FileRank, PathBuf)>) {
    files.sort_by_key(|(rank, _)| *rank);
    files.drain(..files.len().saturating_sub(USER_FILES_MAX));
}

/// Returns the users with files of these suffixes.
pub(crate) fn users_with_files(dir: &Path, suffixes: &[&str]) -> BTreeSet<u32> {
    let files = suffixes
        .iter()
        .map(|suffix| own_files(dir, suffix, |_| true));
    files.flat_map(BTreeMap::into_keys).collect()
}

/// Returns the newest file with this suffix of each of these users who has one.
pub(crate) fn newest_files(dir: &Path, suffix: &str, users: &BTreeSet<u32>) -> Vec<(u32, PathBuf)> {
    let files = own_files(dir, suffix, |uid| users.contains(&uid)).into_iter();
    files
        .filter_map(|(uid, mut paths)| Some((uid, paths.pop()?)))
        .collect()
}

/// Reads the newest file of a user with this suffix. Returns its version, its path and its text;
/// `None` if the user has no such file.
///
/// # Errors
/// Another user could have written the file, or the file cannot be read.
pub(crate) fn read(
    dir: &Path,
    uid: u32,
    suffix: &str,
    bytes_max: u64,
) -> Result<Option<(FileVersion, UserFile)>, UntrustedFileError> {
    let newest_path = own_files(dir, suffix, |other_uid| other_uid == uid)
        .remove(&uid)
        .and_then(|mut paths| paths.pop());
    match newest_path {
        Some(path) => read_trusted(path, uid, bytes_max),
        None => Ok(None),
    }
}

/// Reads a file that only user `uid` or root can have written. Returns `None` if the file does not
/// exist. Reads at most `bytes_max` + 1 bytes, so that the caller can detect a longer file.
///
/// # Errors
/// Another user could have written the file, or the file cannot be read.
pub(crate) fn read_trusted(
    path: PathBuf,
    uid: u32,
    bytes_max: u64,
) -> Result<Option<(FileVersion, UserFile)>, UntrustedFileError> {
    let unreadable_error = |error: io::Error| UntrustedFileError::Unreadable {
        path: path.clone(),
        reason: error.to_string(),
    };
    // A symbolic link could lead to a file of another user, and opening a named pipe could block.
    let open_result = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
        .open(&path);
    let file = match open_result {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(unreadable_error(e)),
    };
    let metadata = file.metadata().map_err(unreadable_error)?;
    if !metadata.is_file() || metadata.uid() != uid || metadata.mode() & 0o022 != 0 {
        return Err(UntrustedFileError::NotOwnFile { path, uid });
    }
    let mut text = String::new();
    file.take(bytes_max + 1)
        .read_to_string(&mut text)
        .map_err(unreadable_error)?;
    Ok(Some((FileVersion::of(&metadata), UserFile { path, text })))
}

/// Replaces the file of a user with this suffix atomically by `text`, or removes it if `text` is
/// `None`. The calling process must run as that user or as root. Returns the version and the path
/// of the new file.
///
/// # Errors
/// The error of the system. The user's file is unchanged.
pub(crate) fn write(
    dir: &Path,
    uid: u32,
    suffix: &str,
    text: Option<&str>,
) -> io::Result<Option<(FileVersion, PathBuf)>> {
    let own_paths = || {
        own_files(dir, suffix, |other_uid| other_uid == uid)
            .remove(&uid)
            .unwrap_or_default()
    };
    let Some(text) = text else {
        // Each reading returns a limited number of files.
        loop {
            let paths = own_paths();
            if paths.is_empty() {
                return Ok(None);
            }
            paths.iter().try_for_each(|path| remove(path))?;
        }
    };
    let own_paths = own_paths();
    let usual_path = usual_path(dir, uid, suffix);
    let is_usual_name_usable = match fs::symlink_metadata(&usual_path) {
        Ok(metadata) => metadata.uid() == uid,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    let (temporary_path, version) = create_temporary_file(dir, uid, text)?;
    let usual_name_result = match is_usual_name_usable {
        true => fs::rename(&temporary_path, &usual_path),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    };
    let rename_result = match usual_name_result {
        Ok(()) => Ok(usual_path),
        // Another user has the name, or has taken it just now.
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            let path = dir.join(format!("{FILE_PREFIX}{uid}-{}{suffix}", random_tag()));
            fs::rename(&temporary_path, &path).map(|()| path)
        }
        Err(e) => Err(e),
    };
    let path = rename_result.inspect_err(|_| drop(fs::remove_file(&temporary_path)))?;
    let old_paths = own_paths.iter().filter(|old_path| **old_path != path);
    for old_path in old_paths {
        // Readers use the newest file, so a failure has no effect.
        let _ = remove(old_path);
    }
    Ok(Some((version, path)))
}

/// Writes the text to a new file under a name that no reader uses, so that no reader sees an
/// incomplete file.
fn create_temporary_file(dir: &Path, uid: u32, text: &str) -> io::Result<(PathBuf, FileVersion)> {
    let mut create_result = Err(io::ErrorKind::AlreadyExists.into());
    for _ in 0..NAME_ATTEMPTS_MAX {
        // Other users could have taken any name that they can foresee.
        let path = dir.join(format!(".{FILE_PREFIX}{uid}.{}", random_tag()));
        create_result = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(&path)
            .map(|file| (path, file));
        if !matches!(&create_result, Err(e) if e.kind() == io::ErrorKind::AlreadyExists) {
            break;
        }
    }
    let (path, mut file) = create_result?;
    let write_result = file
        .set_permissions(fs::Permissions::from_mode(0o644))
        .and_then(|()| file.write_all(text.as_bytes()))
        .and_then(|()| file.metadata());
    let metadata = write_result.inspect_err(|_| drop(fs::remove_file(&path)))?;
    Ok((path, FileVersion::of(&metadata)))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Returns a text that nobody can foresee: the standard library seeds each state of this kind at
/// random.
fn random_tag() -> String {
    format!("{:016x}", RandomState::new().hash_one(std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUFFIX: &str = ".toml";

    fn own_uid() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    fn text_of(dir: &Path) -> Option<String> {
        let file = read(dir, own_uid(), SUFFIX, 1000).expect("it can be read");
        file.map(|(_, file)| file.text)
    }

    #[test]
    fn only_complete_names_contain_a_uid() {
        for (name, uid) in [
            ("sempa-owner-7.toml", Some(7)),
            ("sempa-owner-7-0a1b.toml", Some(7)),
            ("sempa-owner-7.policy.toml", None),
            ("sempa-owner-7-.toml", None),
            ("sempa-owner-7-a-b.toml", None),
            ("sempa-owner-+7.toml", None),
            ("sempa-owner--7.toml", None),
            ("sempa-owner-.toml", None),
            ("sempa-owner-99999999999.toml", None),
            (".sempa-owner-7.0a1b", None),
        ] {
            assert_eq!(uid_in_name(name, SUFFIX), uid, "{name}");
        }
    }

    /// Files whose name contains another uid than that of their owner neither count nor displace
    /// others, however many they are.
    #[test]
    fn files_of_other_users_have_no_effect() {
        let dir = tempfile::tempdir().expect("a folder");
        // All these files belong to the user of this test.
        for uid in (0..2 * FILE_USERS_MAX as u32 + 1).filter(|uid| *uid != own_uid()) {
            fs::write(usual_path(dir.path(), uid, SUFFIX), "").expect("the test's own folder");
        }
        let all_users = (0..2 * FILE_USERS_MAX as u32 + 1).collect();
        assert!(users_with_files(dir.path(), &[SUFFIX]).is_empty());
        assert!(newest_files(dir.path(), SUFFIX, &all_users).is_empty());
        write(dir.path(), own_uid(), SUFFIX, Some("x")).expect("written");
        let users = users_with_files(dir.path(), &[SUFFIX]);
        assert_eq!(users, [own_uid()].into());
        let files = newest_files(dir.path(), SUFFIX, &users);
        assert_eq!(
            files,
            [(own_uid(), usual_path(dir.path(), own_uid(), SUFFIX))]
        );
    }

    /// Each write makes a new version. If the user has several files, the newest one is used, and a
    /// write removes the others.
    #[test]
    fn newest_file_is_used_and_write_removes_others() {
        let dir = tempfile::tempdir().expect("a folder");
        let first = write(dir.path(), own_uid(), SUFFIX, Some("first")).expect("written");
        let second = write(dir.path(), own_uid(), SUFFIX, Some("second")).expect("written");
        assert_ne!(first, second);
        let (version, path) = second.expect("a file");
        let (read_version, file) = read(dir.path(), own_uid(), SUFFIX, 1000)
            .expect("it can be read")
            .expect("it is there");
        assert_eq!((read_version, file.path), (version, path.clone()));
        let other_path = dir
            .path()
            .join(format!("{FILE_PREFIX}{}-0a{SUFFIX}", own_uid()));
        fs::write(&other_path, "third").expect("the test's own folder");
        let newer = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        let other_file = fs::File::options().write(true).open(&other_path);
        other_file
            .and_then(|file| file.set_modified(newer))
            .expect("the test's own file");
        assert_eq!(text_of(dir.path()).as_deref(), Some("third"));
        write(dir.path(), own_uid(), SUFFIX, Some("fourth")).expect("written");
        assert_eq!(text_of(dir.path()).as_deref(), Some("fourth"));
        assert!(path.exists() && !other_path.exists());
        write(dir.path(), own_uid(), SUFFIX, None).expect("removed");
        assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
    }

    /// Of very many files of a user, the newest is used.
    #[test]
    fn newest_of_very_many_files_is_used() {
        let dir = tempfile::tempdir().expect("a folder");
        let uid = own_uid();
        let path = |number: usize| {
            dir.path()
                .join(format!("{FILE_PREFIX}{uid}-{number}{SUFFIX}"))
        };
        let start = std::time::SystemTime::now();
        let count = 5 * USER_FILES_MAX;
        for number in 0..count {
            fs::write(path(number), number.to_string()).expect("the test's own folder");
            // The file in the middle is the newest one.
            let age = number.abs_diff(count / 2) as u64;
            let file = fs::File::options().write(true).open(path(number));
            file.and_then(|file| file.set_modified(start - std::time::Duration::from_secs(age)))
                .expect("the test's own file");
        }
        assert_eq!(
            own_files(dir.path(), SUFFIX, |_| true)[&uid].len(),
            USER_FILES_MAX
        );
        assert_eq!(text_of(dir.path()), Some((count / 2).to_string()));
        write(dir.path(), uid, SUFFIX, None).expect("removed");
        assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
    }

    /// Hard links that anybody could make neither replace nor hide what the user has written.
    #[test]
    fn hard_links_change_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        let link = |path: &Path, name: String| {
            fs::hard_link(path, dir.path().join(name)).expect("the test's own file");
        };
        write(dir.path(), own_uid(), SUFFIX, Some("here")).expect("written");
        let other_path = dir.path().join("other");
        fs::write(&other_path, "not a statement").expect("the test's own folder");
        let newer = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        let other_file = fs::File::options().write(true).open(&other_path);
        other_file
            .and_then(|file| file.set_modified(newer))
            .expect("the test's own file");
        link(
            &other_path,
            format!("{FILE_PREFIX}{}-0a{SUFFIX}", own_uid()),
        );
        assert_eq!(text_of(dir.path()).as_deref(), Some("here"));
        let usual_path = usual_path(dir.path(), own_uid(), SUFFIX);
        link(&usual_path, "link".into());
        assert_eq!(text_of(dir.path()).as_deref(), Some("here"));
        write(dir.path(), own_uid(), SUFFIX, Some("away")).expect("written");
        assert_eq!(text_of(dir.path()).as_deref(), Some("away"));
        let files = own_files(dir.path(), SUFFIX, |_| true);
        assert_eq!(files[&own_uid()], [usual_path]);
    }

    /// A user whose usual name another user has taken writes and reads under another name.
    #[test]
    #[ignore = "system tier: needs root"]
    fn taken_name_is_replaced_by_another() {
        assert!(
            nix::unistd::geteuid().is_root(),
            "cannot run here: needs root"
        );
        let dir = tempfile::tempdir().expect("a folder");
        let taken_path = usual_path(dir.path(), own_uid(), SUFFIX);
        for makes_dir in [false, true] {
            match makes_dir {
                true => fs::create_dir(&taken_path).expect("the test's own folder"),
                false => fs::write(&taken_path, "away").expect("the test's own folder"),
            }
            std::os::unix::fs::chown(&taken_path, Some(4711), None).expect("root may");
            assert_eq!(text_of(dir.path()), None);
            let (_, path) = write(dir.path(), own_uid(), SUFFIX, Some("here"))
                .expect("written")
                .expect("a file");
            assert_ne!(path, taken_path);
            assert_eq!(text_of(dir.path()).as_deref(), Some("here"));
            let files = newest_files(dir.path(), SUFFIX, &[own_uid()].into());
            assert_eq!(files, [(own_uid(), path)]);
            write(dir.path(), own_uid(), SUFFIX, None).expect("removed");
            assert_eq!(text_of(dir.path()), None);
            let _ = fs::remove_file(&taken_path);
        }
    }
}
