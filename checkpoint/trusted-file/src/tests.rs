use super::*;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};

const BYTES_MAX: u64 = 10;

fn locate(path: &Path) -> Result<TrustedFile, FileError> {
    TrustedFile::locate(path, Readers::Everyone, MissingDir::Refuse)
}

fn read(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    locate(path)
        .and_then(|file| file.read(&mut text, BYTES_MAX))
        .map_err(|error| error.to_string())?;
    Ok(text)
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("the test's own file");
}

#[test]
fn file_is_created_replaced_and_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("new/file");
    assert!(matches!(locate(&path), Err(FileError::Missing)));
    let file =
        TrustedFile::locate(&path, Readers::Everyone, MissingDir::Create).expect("a directory");
    assert!(matches!(
        file.read(&mut String::new(), BYTES_MAX),
        Err(FileError::Missing)
    ));
    file.write(b"one", Replace::Nothing).expect("written");
    assert!(matches!(
        file.write(b"two", Replace::Nothing),
        Err(FileError::Exists)
    ));
    assert_eq!(read(&path), Ok("one".into()));
    file.write(b"three", Replace::Existing).expect("written");
    assert_eq!(read(&path), Ok("three".into()));
    let mode = fs::metadata(&path).expect("a file").permissions().mode();
    assert_eq!(mode & 0o7777, 0o644);
    let names = fs::read_dir(dir.path().join("new")).expect("a directory");
    assert_eq!(names.count(), 1, "no temporary file remains");
}

/// A file is not used if other users can have written it or can replace it.
#[test]
fn files_of_others_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("file");
    fs::write(&path, "text").expect("written");
    set_mode(&path, 0o664);
    assert!(read(&path).expect_err("writable").contains("mode 0664"));
    set_mode(&path, 0o644);
    assert!(read(&path).is_ok());
    let secret = TrustedFile::locate(&path, Readers::OwnerOnly, MissingDir::Refuse).expect("ok");
    let error = secret.read(&mut String::new(), BYTES_MAX);
    assert!(matches!(error, Err(FileError::Accessible(why)) if why.contains("0644")));
    let link = dir.path().join("link");
    symlink(&path, &link).expect("a link");
    assert_eq!(read(&link), Err("it is a symbolic link".into()));
    let dir_link = dir.path().join("dir-link");
    symlink(dir.path(), &dir_link).expect("a link");
    let error = read(&dir_link.join("file")).expect_err("a link");
    assert!(
        error.contains("is a symbolic link or not a directory"),
        "{error}"
    );
    let pipe = dir.path().join("pipe");
    nix::unistd::mkfifo(&pipe, Mode::S_IRUSR).expect("a pipe");
    assert_eq!(read(&pipe), Err("it is not a regular file".into()));
    set_mode(dir.path(), 0o777);
    let error = read(&path).expect_err("writable directory");
    assert!(error.contains("mode 0777"), "{error}");
}

#[test]
fn unusable_paths_and_contents_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("file");
    fs::write(&path, "0123456789").expect("written");
    assert_eq!(read(&path), Ok("0123456789".into()));
    fs::write(&path, "0123456789a").expect("written");
    assert_eq!(read(&path), Err("it has more than 10 bytes".into()));
    fs::write(&path, b"\xff").expect("written");
    assert!(read(&path).is_err());
    assert_eq!(
        read(Path::new("/")),
        Err("its path does not name a file".into())
    );
    let error = read(&dir.path().join("../x/file")).expect_err("not resolved");
    assert_eq!(error, "its path contains \"..\"");
}
