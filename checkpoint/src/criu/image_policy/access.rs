//! Checks that a user may open the files of a task. The check runs in a thread that has the ids of
//! the user and no capabilities, so that the kernel decides.

use super::files::is_about_process;
use super::violation::ImageViolation;
use super::{FileAccess, OpenedFile, OpenedFiles, UserIdentity};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::fstat;
use nix::unistd::AccessFlags;
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Character devices that a task may have open, as (major, minor): `/dev/null`, `/dev/zero`,
/// `/dev/full`, `/dev/random`, `/dev/urandom`, `/dev/tty`, `/dev/ptmx`.
const PERMITTED_DEVICES: [(u32, u32); 7] = [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)];

/// Decides whether the user may open a file.
pub trait FileChecker {
    /// Returns the reason why the user may not open the file.
    ///
    /// # Errors
    /// The user may not open the file.
    fn check(&mut self, file: &OpenedFile) -> io::Result<()>;
}

impl<F: FnMut(&OpenedFile) -> io::Result<()>> FileChecker for F {
    fn check(&mut self, file: &OpenedFile) -> io::Result<()> {
        self(file)
    }
}

/// Passes all files to `checker`.
///
/// # Errors
/// [`ImageViolation::Access`] for the first file that the user may not open.
pub fn check_access(
    files: &OpenedFiles,
    mut checker: impl FileChecker,
) -> Result<(), ImageViolation> {
    for file in &files.files {
        checker.check(file).map_err(|e| ImageViolation::Access {
            path: file.path.clone(),
            why: e.to_string(),
        })?;
    }
    Ok(())
}

/// Checks that the user may open all files here. `mount_namespace` is the mount namespace in which
/// the task is restored; `None` is that of this process. The caller must be root.
///
/// # Errors
/// [`ImageViolation::Access`] for the first file that the user may not open.
pub fn check_access_as_user(
    files: &OpenedFiles,
    identity: &UserIdentity,
    mount_namespace: Option<BorrowedFd<'_>>,
) -> Result<(), ImageViolation> {
    // Credentials and namespaces of a thread end with the thread.
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            become_user(identity, mount_namespace)
                .map_err(|e| ImageViolation::AccessCheck { why: e.to_string() })?;
            check_access(files, check_file)
        });
        thread.join().unwrap_or_else(|_| {
            Err(ImageViolation::AccessCheck {
                why: "the check ended early".into(),
            })
        })
    })
}

/// Gives this thread the ids of the user. The kernel then removes all its capabilities.
fn become_user(identity: &UserIdentity, mount_namespace: Option<BorrowedFd<'_>>) -> io::Result<()> {
    if let Some(mount_namespace) = mount_namespace {
        // A thread can enter a mount namespace only with directories of its own.
        unshare(CloneFlags::CLONE_FS)?;
        setns(mount_namespace, CloneFlags::CLONE_NEWNS)?;
    }
    let groups: Vec<Gid> = identity
        .groups
        .iter()
        .map(|gid| Gid::from_raw(*gid))
        .collect();
    set_thread_groups(&groups)?;
    let gid = Gid::from_raw(identity.gid);
    set_thread_res_gid(gid, gid, gid)?;
    let uid = Uid::from_raw(identity.uid);
    set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}

/// Checks with the credentials of this thread whether a file can be opened. The file is not opened
/// for reading or writing, because that has effects on devices and named pipes.
fn check_file(file: &OpenedFile) -> io::Result<()> {
    if file.access == FileAccess::Create {
        let dir = file.path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let dir = open_path(dir)?;
        check_kind(&dir, &[libc::S_IFDIR])?;
        return check_permissions(&dir, AccessFlags::W_OK | AccessFlags::X_OK);
    }
    let descriptor = open_path(&file.path)?;
    match file.access {
        FileAccess::Enter => check_kind(&descriptor, &[libc::S_IFDIR])?,
        FileAccess::Execute => check_kind(&descriptor, &[libc::S_IFREG])?,
        _ => check_kind(
            &descriptor,
            &[libc::S_IFREG, libc::S_IFDIR, libc::S_IFIFO, libc::S_IFCHR],
        )?,
    }
    let permissions = match file.access {
        FileAccess::Path | FileAccess::Create => return Ok(()),
        FileAccess::Enter | FileAccess::Execute => AccessFlags::X_OK,
        FileAccess::Read => AccessFlags::R_OK,
        FileAccess::Write => AccessFlags::W_OK,
        FileAccess::ReadWrite => AccessFlags::R_OK | AccessFlags::W_OK,
    };
    check_permissions(&descriptor, permissions)
}

/// Opens the path of a file, without a way through the descriptors of a process.
fn open_path(path: &Path) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let descriptor = openat2(AT_FDCWD, path, how)?;
    let real_path = std::fs::read_link(format!("/proc/thread-self/fd/{}", descriptor.as_raw_fd()))?;
    match is_about_process(&real_path) {
        true => Err(io::Error::other("it is a file about a process")),
        false => Ok(descriptor),
    }
}

fn check_kind(descriptor: &OwnedFd, permitted_kinds: &[u32]) -> io::Result<()> {
    let metadata = fstat(descriptor)?;
    let kind = metadata.st_mode & libc::S_IFMT;
    let device = (libc::major(metadata.st_rdev), libc::minor(metadata.st_rdev));
    if !permitted_kinds.contains(&kind) {
        return Err(io::Error::other("it is another kind of file here"));
    }
    match kind == libc::S_IFCHR && !PERMITTED_DEVICES.contains(&device) {
        true => Err(io::Error::other("it is a device")),
        false => Ok(()),
    }
}

fn check_permissions(descriptor: &OwnedFd, permissions: AccessFlags) -> io::Result<()> {
    let flags = nix::fcntl::AtFlags::AT_EMPTY_PATH | nix::fcntl::AtFlags::AT_EACCESS;
    nix::unistd::faccessat(descriptor, "", permissions, flags).map_err(|errno| match errno {
        Errno::EACCES => io::Error::other("permission denied"),
        errno => errno.into(),
    })
}
