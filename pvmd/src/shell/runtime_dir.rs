//! Acquires the runtime directory of a virtual machine on this host and releases it.
//!
//! The directory is private (mode 0700) and locked. When a daemon starts, it removes the files of a
//! daemon that died. When a daemon ends, it removes all files of daemons and libraries.
//! [`sempa_proto::runtime_paths::RuntimePaths`] defines the paths.
//!
//! Images contain the memory of tasks, including passwords. Images must not be written to a disk,
//! where other people may find them later. If the runtime directory is on a disk, images are
//! written to a second private directory on a file system in memory.

use checkpoint::file_transfer_journal;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
use ring::digest::{SHA256, digest};
use sempa_proto::runtime_paths::{GUEST_CPUS_FILE, RM_DATABASE_FILE, RuntimePaths};
use sempa_socket::find_or_create_root;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Time for which another daemon may hold the lock while its socket is not reachable. After this
/// time the directory is reported as in use.
const UNREACHABLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which the lock and the socket are checked.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum number of attempts to acquire the lock while another daemon removes the directory.
const LOCK_ATTEMPTS_MAX: usize = 20;
/// Maximum number of attempts to remove images. Several attempts may be necessary, because a
/// process that is being killed may still create files in the directory of the images.
const REMOVAL_ATTEMPTS_MAX: usize = 50;
const REMOVAL_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Directory of a file system in memory, which every Linux has.
const MEMORY_FILE_SYSTEM_DIR: &str = "/dev/shm";
/// Magic number of ramfs, another file system in memory; nix has no constant for it.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
/// Prefix of the links with which the brokers of sessions register their folders: the rest of the
/// name is the session. A broker removes its link and its folder, unless it is killed.
const BROKER_LINK_PREFIX: &str = "broker-";
/// Path of the brokers' folder in the user's state directory. A session's folder is
/// `<virtual machine>/<session>` in this folder.
const BROKER_STATE_DIR: &str = "sempa/broker";
/// Number of bytes of the path's hash that the name of the second directory contains.
const PATH_HASH_BYTES: usize = 8;

/// Reason why the runtime directory cannot be used. Existing files in the directory were not
/// changed.
#[derive(Debug, Error)]
pub(crate) enum RuntimeDirError {
    /// The directory is not private: another user could read or replace the daemon's files.
    #[error(
        "{path}: {problem}; the daemon's files are only safe in a directory of mode 0700 that belongs to you: remove it \
         or set PVM_TMP"
    )]
    Unsafe {
        path: PathBuf,
        /// The property that makes the directory unsafe.
        problem: String,
    },
    /// Another daemon holds the lock of the directory.
    #[error(
        "a virtual machine named {vm} of this user is running already (process {pid}); to run a second one, set \
         PVM_VMID to another name"
    )]
    Running {
        vm: String,
        /// The process id of the other daemon; `?` if the other daemon has not written its process
        /// id yet.
        pid: String,
    },
    /// A file operation failed.
    #[error("cannot {operation} {path}: {source}")]
    Io {
        operation: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
}

fn io_error(
    operation: &'static str,
    path: &Path,
) -> impl FnOnce(std::io::Error) -> RuntimeDirError {
    let path = path.to_path_buf();
    move |source| RuntimeDirError::Io {
        operation,
        path,
        source,
    }
}

/// A runtime directory that this process has locked. Dropping this value removes the files of
/// daemons and libraries from the directory, and removes the directory if no other file is in it.
#[derive(Debug)]
pub(crate) struct RuntimeDir {
    paths: RuntimePaths,
    /// The lock file, which is locked as long as this value exists.
    _lock: Flock<File>,
    /// Lock on the directory, which prevents systemd-tmpfiles from removing old files in the
    /// directory.
    _tmpfiles_lock: Option<Flock<File>>,
    /// Process id of a daemon that died without removing its files from this directory.
    predecessor: Option<String>,
    keep_log: bool,
    /// Lock of the second directory, if there is one.
    image_dir_lock: Option<Flock<File>>,
    /// Reason why images are stored on a disk; `None` if images are stored in memory.
    on_disk_reason: Option<String>,
}

impl RuntimeDir {
    /// Creates the directory, acquires its lock and removes the files of a daemon that died.
    /// `keep_log` is true if the user has chosen a log file in this directory; the log is then
    /// retained when this value is dropped.
    ///
    /// # Errors
    /// The directory is not private, another daemon uses it, or a file operation failed.
    pub(crate) fn acquire(
        paths: RuntimePaths,
        uid: u32,
        keep_log: bool,
    ) -> Result<Self, RuntimeDirError> {
        Self::acquire_with_memory_dir(paths, uid, keep_log, Path::new(MEMORY_FILE_SYSTEM_DIR))
    }

    fn acquire_with_memory_dir(
        paths: RuntimePaths,
        uid: u32,
        keep_log: bool,
        memory_fs_dir: &Path,
    ) -> Result<Self, RuntimeDirError> {
        let (mut last_error, mut attempt_count) = (None, 0);
        let deadline = Instant::now() + UNREACHABLE_TIMEOUT;
        while attempt_count < LOCK_ATTEMPTS_MAX {
            let root = find_or_create_root(paths.root(), uid, paths.vm_name())
                .map_err(io_error("make a directory in place of", paths.root()))?;
            let paths = paths.clone().with_root(&root);
            create_runtime_dir(&paths, uid)?;
            attempt_count += 1;
            match acquire_lock_file(&paths) {
                // The other daemon is starting or ending. Soon the other daemon is reachable or has
                // released the lock.
                Err(RuntimeDirError::Running { .. })
                    if !is_reachable(&paths) && Instant::now() < deadline =>
                {
                    std::thread::sleep(LOCK_RETRY_INTERVAL);
                    attempt_count = 0;
                }
                Ok(Some((lock, predecessor))) => {
                    let tmpfiles_lock = File::open(paths.dir())
                        .ok()
                        .and_then(|d| Flock::lock(d, FlockArg::LockSharedNonblock).ok());
                    let (paths, image_dir_lock, on_disk_reason) =
                        match create_image_dir_in_memory(&paths, uid, memory_fs_dir) {
                            Ok(None) => (paths, None, None),
                            Ok(Some((dir, lock))) => (paths.with_image_root(dir), Some(lock), None),
                            Err(why) => (paths, None, Some(why)),
                        };
                    let runtime_dir = Self {
                        paths,
                        _lock: lock,
                        _tmpfiles_lock: tmpfiles_lock,
                        predecessor,
                        keep_log,
                        image_dir_lock,
                        on_disk_reason,
                    };
                    runtime_dir.remove_stale();
                    return Ok(runtime_dir);
                }
                Ok(None) => {}
                Err(RuntimeDirError::Io {
                    source,
                    operation,
                    path,
                }) if source.kind() == ErrorKind::NotFound => {
                    last_error = Some(RuntimeDirError::Io {
                        source,
                        operation,
                        path,
                    });
                }
                Err(e) => return Err(e),
            }
        }
        Err(last_error.unwrap_or_else(|| RuntimeDirError::Running {
            vm: paths.vm_name().to_string(),
            pid: "?".into(),
        }))
    }

    pub(crate) fn paths(&self) -> &RuntimePaths {
        &self.paths
    }

    /// Returns the process id of a daemon that died without removing its files, if there was one.
    pub(crate) fn predecessor(&self) -> Option<&str> {
        self.predecessor.as_deref()
    }

    /// Returns the reason why images are stored on a disk; `None` if images are stored in memory.
    pub(crate) fn on_disk_reason(&self) -> Option<&str> {
        self.on_disk_reason.as_deref()
    }

    /// Undoes file transfers for tasks that never ran on this host. No task of this directory may
    /// be running.
    pub(crate) fn undo_file_transfers(&self) {
        file_transfer_journal::undo_all_journals(self.paths.image_root());
    }

    /// Creates the second directory again if it is missing. Must be called before images are
    /// written: when the last login of an ordinary user ends, logind removes the user's files in
    /// shared memory.
    pub(crate) fn ensure_image_dir(&self) {
        let dir = self.paths.image_root();
        if self.image_dir_lock.is_some() && !dir.exists() {
            // If the creation fails, writing the images fails, too.
            let _ = ensure_private_dir(dir, nix::unistd::getuid().as_raw());
        }
    }

    /// Returns the paths of all entries of the runtime directory and of the second directory.
    fn all_entries(&self) -> Vec<PathBuf> {
        let mut entry_paths = dir_entries(self.paths.dir());
        if self.image_dir_lock.is_some() {
            entry_paths.extend(dir_entries(self.paths.image_root()));
        }
        entry_paths
    }

    /// Removes the files of a daemon that died. The log of that daemon is retained until the next
    /// orderly halt, because the log may show why the daemon died.
    fn remove_stale(&self) {
        self.undo_file_transfers();
        for entry in self.all_entries() {
            let name = entry
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if entry != self.paths.lock_file()
                && entry != self.paths.log_file()
                && is_daemon_file(&self.paths, &entry, &name)
            {
                remove_recursively(&entry);
            }
        }
    }
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        self.undo_file_transfers();
        for entry in self.all_entries() {
            let name = entry
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let is_kept_log = self.keep_log && entry == self.paths.log_file();
            let is_own_file =
                is_daemon_file(&self.paths, &entry, &name) || name.starts_with(RM_DATABASE_FILE);
            if let Some(session) = name.strip_prefix(BROKER_LINK_PREFIX) {
                remove_broker_folder(&entry, session);
            }
            if !is_kept_log && entry != self.paths.lock_file() && is_own_file {
                remove_recursively(&entry);
            }
        }
        if self.image_dir_lock.is_some() {
            remove_with_root(self.paths.image_root());
        }
        // The lock file is removed last, because another daemon may acquire the directory as soon
        // as there is no lock file.
        let _ = fs::remove_file(self.paths.lock_file());
        remove_with_root(self.paths.dir());
    }
}

/// Removes a broker's link and the session's folder to which the link points, with the parents of
/// the folder that are empty then. A link to any other folder stays, because the folder is not a
/// broker's.
fn remove_broker_folder(link: &Path, session: &str) {
    let Ok(folder) = fs::read_link(link) else {
        return;
    };
    let sessions_folder = folder.ancestors().nth(2);
    let is_session_folder = folder.is_absolute()
        && folder.file_name() == Some(OsStr::new(session))
        && sessions_folder.is_some_and(|sessions| sessions.ends_with(BROKER_STATE_DIR));
    if !is_session_folder {
        return;
    }
    remove_recursively(&folder);
    let state_dir_depth = Path::new(BROKER_STATE_DIR).components().count();
    for parent in folder.ancestors().skip(1).take(1 + state_dir_depth) {
        // Other sessions and programs keep their files there.
        if fs::remove_dir(parent).is_err() {
            break;
        }
    }
    let _ = fs::remove_file(link);
}

/// Removes a directory if it is empty, and then the parent directory if the parent directory is
/// empty, too.
fn remove_with_root(dir: &Path) {
    if fs::remove_dir(dir).is_ok()
        && let Some(root) = dir.parent()
    {
        let _ = fs::remove_dir(root);
    }
}

/// Creates and locks the second directory, on a file system in memory. Returns the path and the
/// lock of the second directory; `None` if the runtime directory itself is in memory.
///
/// # Errors
/// The reason why the directory cannot be created or locked.
fn create_image_dir_in_memory(
    paths: &RuntimePaths,
    uid: u32,
    memory_fs_dir: &Path,
) -> Result<Option<(PathBuf, Flock<File>)>, String> {
    if is_in_memory(paths.dir()) {
        return Ok(None);
    }
    if !is_in_memory(memory_fs_dir) {
        return Err(format!(
            "{} is not a file system in memory either",
            memory_fs_dir.display()
        ));
    }
    // The hash distinguishes virtual machines that have the same name but different `PVM_TMP`.
    let hash = digest(&SHA256, paths.dir().as_os_str().as_bytes());
    let path_hash: String = hash.as_ref()[..PATH_HASH_BYTES]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let (usual_root, dir_name) = (
        memory_fs_dir.join(format!("sempa-{uid}")),
        format!("{}-{path_hash}", paths.vm_name()),
    );
    let dir = find_or_create_root(&usual_root, uid, &dir_name)
        .map_err(|e| {
            format!(
                "cannot make a directory in {}: {e}",
                memory_fs_dir.display()
            )
        })?
        .join(dir_name);
    for _ in 0..LOCK_ATTEMPTS_MAX {
        let lock = ensure_private_dir(&dir, uid)
            .map_err(|e| e.to_string())
            .and_then(|()| lock_dir(&dir));
        match lock {
            // Another daemon may have removed the directory after this daemon had created it.
            Ok(None) => {}
            Ok(Some(lock)) => return Ok(Some((dir, lock))),
            Err(_) if !dir.exists() => {}
            Err(why) => return Err(why),
        }
    }
    Err(format!("{} cannot be locked", dir.display()))
}

fn is_in_memory(dir: &Path) -> bool {
    statfs(dir)
        .is_ok_and(|fs_stats| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&fs_stats.filesystem_type()))
}

/// True if a daemon accepts connections at the socket of this runtime directory.
fn is_reachable(paths: &RuntimePaths) -> bool {
    std::os::unix::net::UnixStream::connect(paths.daemon_socket_path()).is_ok()
}

/// Locks a directory and returns the lock. Returns `None` if the directory was replaced before the
/// lock was acquired.
///
/// # Errors
/// The directory cannot be opened, or another process has locked it.
fn lock_dir(dir: &Path) -> Result<Option<Flock<File>>, String> {
    let dir_file = File::open(dir).map_err(|e| format!("cannot open {}: {e}", dir.display()))?;
    let lock = Flock::lock(dir_file, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, e)| format!("cannot lock {}: {e}", dir.display()))?;
    let is_same_dir =
        fs::symlink_metadata(dir).ok().map(|m| m.ino()) == lock.metadata().ok().map(|m| m.ino());
    Ok(is_same_dir.then_some(lock))
}

/// True for files that daemons and libraries create in the runtime directory. Other files must not
/// be removed.
fn is_daemon_file(paths: &RuntimePaths, path: &Path, name: &str) -> bool {
    let migration_log = paths.migration_log();
    [
        paths.daemon_socket_path(),
        migration_log.with_extension("before"),
        migration_log,
        paths.log_file(),
        paths.ssh_config(),
    ]
    .iter()
    .any(|p| p == path)
        || name == GUEST_CPUS_FILE
        || ["images-", "memory-", "resume-", ".tmp-"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
}

fn dir_entries(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    entries.flatten().map(|e| e.path()).collect()
}

/// Removes a file, a socket or a directory with its content. Errors are ignored.
pub(crate) fn remove_recursively(path: &Path) {
    let Ok(file_metadata) = fs::symlink_metadata(path) else {
        return;
    };
    let _ = if file_metadata.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
}

/// Removes the images of a migration. Retries while an engine that is being killed still creates
/// files in the directory.
pub(crate) fn remove_images(dir: &Path) {
    for _ in 0..REMOVAL_ATTEMPTS_MAX {
        match fs::remove_dir_all(dir) {
            Err(e) if e.kind() == ErrorKind::DirectoryNotEmpty => {
                std::thread::sleep(REMOVAL_RETRY_INTERVAL)
            }
            _ => return,
        }
    }
}

/// Creates the directory and its parent directory with mode 0700. Directories that exist must be
/// private.
fn create_runtime_dir(paths: &RuntimePaths, uid: u32) -> Result<(), RuntimeDirError> {
    ensure_private_dir(paths.dir(), uid)
}

fn ensure_private_dir(dir: &Path, uid: u32) -> Result<(), RuntimeDirError> {
    let root = dir
        .parent()
        .expect("a place is always a directory in a root");
    for path in [root, dir] {
        match DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(io_error("make the directory", path)(e)),
        }
        let meta = match fs::symlink_metadata(path) {
            Ok(meta) => meta,
            // Another daemon has just removed the directory. The caller retries.
            Err(e) => return Err(io_error("look at", path)(e)),
        };
        let unsafe_error = |problem: String| {
            Err(RuntimeDirError::Unsafe {
                path: path.to_path_buf(),
                problem,
            })
        };
        if meta.file_type().is_symlink() {
            return unsafe_error("it is a symbolic link".into());
        }
        if !meta.is_dir() {
            return unsafe_error("it is not a directory".into());
        }
        if meta.uid() != uid {
            return unsafe_error(format!("it belongs to user {}", meta.uid()));
        }
        if meta.mode() & 0o077 != 0 {
            return unsafe_error(format!(
                "others can enter it (mode {:04o})",
                meta.mode() & 0o7777
            ));
        }
    }
    Ok(())
}

/// The locked lock file, and the process id that an earlier daemon wrote into it.
type AcquiredLock = (Flock<File>, Option<String>);

/// Locks the lock file and writes the id of this process into the file. Returns the locked file,
/// and the process id that the file contained before. Returns `None` if the file was replaced
/// before it was locked.
fn acquire_lock_file(paths: &RuntimePaths) -> Result<Option<AcquiredLock>, RuntimeDirError> {
    let path = paths.lock_file();
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)
        .map_err(io_error("open the lock", &path))?;
    let mut previous_pid = String::new();
    // Content that is not UTF-8 cannot be a process id, so an error is ignored.
    let _ = file.read_to_string(&mut previous_pid);
    let previous_pid = Some(previous_pid.trim().to_string()).filter(|pid| !pid.is_empty());
    let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => lock,
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
            let pid = previous_pid.unwrap_or_else(|| "?".into());
            return Err(RuntimeDirError::Running {
                vm: paths.vm_name().to_string(),
                pid,
            });
        }
        Err((_, errno)) => return Err(io_error("lock", &path)(errno.into())),
    };
    let is_same_file =
        fs::symlink_metadata(&path).ok().map(|m| m.ino()) == lock.metadata().ok().map(|m| m.ino());
    if !is_same_file {
        return Ok(None);
    }
    let write_pid = |file: &mut File| {
        file.set_len(0)?;
        file.seek(SeekFrom::Start(0))?;
        writeln!(file, "{}", std::process::id())
    };
    write_pid(&mut lock).map_err(io_error("write the lock", &path))?;
    Ok(Some((lock, previous_pid)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A directory for one test. The directory is removed when this value is dropped.
    struct TestDir(PathBuf);

    impl TestDir {
        fn new() -> Self {
            Self::under(&std::env::temp_dir())
        }

        fn under(parent: &Path) -> Self {
            static NEXT_NUMBER: AtomicU32 = AtomicU32::new(0);
            let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
            let dir = parent.join(format!("pvmd-place-{}-{number}", std::process::id()));
            fs::create_dir_all(&dir).expect("a scratch directory");
            Self(dir)
        }

        fn place(&self) -> RuntimePaths {
            let tmp_dir = self.0.to_string_lossy().into_owned();
            RuntimePaths::from_env(uid(), |name| (name == "PVM_TMP").then(|| tmp_dir.clone()))
                .expect("a good name")
        }
    }

    impl Drop for TestDir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn uid() -> u32 {
        nix::unistd::getuid().as_raw()
    }

    #[test]
    fn runtime_dir_is_private_and_removed_on_drop() {
        let test_dir = TestDir::new();
        let runtime_dir = RuntimeDir::acquire(test_dir.place(), uid(), false).expect("free");
        let mode = fs::metadata(runtime_dir.paths().dir())
            .expect("there")
            .mode();
        assert_eq!(mode & 0o777, 0o700);
        fs::write(runtime_dir.paths().daemon_socket_path(), "").expect("writable");
        fs::create_dir(runtime_dir.paths().image_dir(sempa_proto::MigrationId(3)))
            .expect("writable");
        drop(runtime_dir);
        assert_eq!(dir_entries(&test_dir.0), Vec::<PathBuf>::new());
    }

    #[test]
    fn second_daemon_is_refused_with_pid_of_first() {
        let test_dir = TestDir::new();
        let runtime_dir = RuntimeDir::acquire(test_dir.place(), uid(), false).expect("free");
        let _listener =
            std::os::unix::net::UnixListener::bind(test_dir.place().daemon_socket_path())
                .expect("bound");
        let error_text = RuntimeDir::acquire(test_dir.place(), uid(), false)
            .expect_err("held")
            .to_string();
        assert!(
            error_text.contains("named pvm of this user is running already"),
            "{error_text}"
        );
        assert!(
            error_text.contains(&format!("process {}", std::process::id()))
                && error_text.contains("PVM_VMID"),
            "{error_text}"
        );
        drop(runtime_dir);
    }

    /// A directory whose daemon is ending is acquired as soon as that daemon has ended.
    #[test]
    fn dir_of_ending_daemon_is_taken_afterwards() {
        let test_dir = TestDir::new();
        let runtime_dir = RuntimeDir::acquire(test_dir.place(), uid(), false).expect("free");
        std::thread::scope(|scope| {
            let acquire_thread =
                scope.spawn(|| RuntimeDir::acquire(test_dir.place(), uid(), false).map(drop));
            std::thread::sleep(LOCK_RETRY_INTERVAL * 3);
            drop(runtime_dir);
            acquire_thread
                .join()
                .expect("it ends")
                .expect("it is free then");
        });
    }

    /// Files of a daemon that died are removed at the start. Files of other programs are retained.
    #[test]
    fn stale_files_are_removed_and_foreign_files_kept() {
        let test_dir = TestDir::new();
        let paths = test_dir.place();
        create_runtime_dir(&paths, uid()).expect("fresh");
        fs::write(paths.lock_file(), "4711\n").expect("writable");
        fs::write(paths.daemon_socket_path(), "").expect("writable");
        fs::write(paths.resume_token_path(sempa_proto::MigrationId(1)), "").expect("writable");
        fs::write(paths.log_file(), "why it died\n").expect("writable");
        fs::write(paths.dir().join("mine"), "").expect("writable");
        let runtime_dir = RuntimeDir::acquire(paths.clone(), uid(), false).expect("stale");
        assert_eq!(runtime_dir.predecessor(), Some("4711"));
        assert!(
            !paths.daemon_socket_path().exists()
                && !paths
                    .resume_token_path(sempa_proto::MigrationId(1))
                    .exists()
        );
        assert!(paths.log_file().exists() && paths.dir().join("mine").exists());
        drop(runtime_dir);
        assert!(!paths.log_file().exists() && paths.dir().join("mine").exists());
    }

    /// The folder of a killed broker stays for the next daemon of the virtual machine, and is
    /// removed when a daemon ends. Links to other folders and their targets stay.
    #[test]
    fn folders_of_killed_brokers_are_removed_on_drop() {
        let test_dir = TestDir::new();
        let runtime_dir = RuntimeDir::acquire(test_dir.place(), uid(), false).expect("free");
        let state = test_dir.0.join("state");
        let sessions = state.join("sempa/broker/pvm@h1");
        let (killed, foreign) = (sessions.join("killed"), state.join("precious"));
        for folder in [&killed, &foreign] {
            fs::create_dir_all(folder).expect("writable");
            fs::write(folder.join("journal"), "").expect("writable");
        }
        let link = |name: &str, target: &Path| {
            let path = test_dir.place().dir().join(format!("broker-{name}"));
            std::os::unix::fs::symlink(target, &path).expect("writable");
            path
        };
        let good_link = link("killed", &killed);
        let foreign_links = [link("precious", &foreign), link("other", &sessions)];
        runtime_dir.remove_stale();
        assert!(killed.exists() && good_link.is_symlink());
        drop(runtime_dir);
        assert!(!good_link.is_symlink() && !state.join("sempa").exists());
        assert!(foreign.join("journal").exists());
        assert!(foreign_links.iter().all(|link| link.is_symlink()));
    }

    /// Returns a directory on a disk and a directory in memory.
    ///
    /// # Panics
    /// The directory for temporary files is in memory, or /dev/shm is not in memory.
    fn disk_and_memory_dirs() -> (TestDir, TestDir) {
        let (disk_dir, memory_dir) = (
            TestDir::under(&std::env::temp_dir()),
            TestDir::under(Path::new(MEMORY_FILE_SYSTEM_DIR)),
        );
        assert!(
            !is_in_memory(&disk_dir.0) && is_in_memory(&memory_dir.0),
            "cannot run here: no disk, or no memory"
        );
        (disk_dir, memory_dir)
    }

    const MIGRATION: sempa_proto::MigrationId = sempa_proto::MigrationId(7);

    /// If the runtime directory is on a disk, images are in memory. The images are removed when the
    /// runtime directory is released, or by the next daemon.
    #[test]
    #[ignore = "system tier: needs a /tmp on a disk"]
    fn images_of_dir_on_disk_are_kept_in_memory() {
        let (disk_dir, memory_dir) = disk_and_memory_dirs();
        let acquire = |paths| {
            RuntimeDir::acquire_with_memory_dir(paths, uid(), false, &memory_dir.0).expect("free")
        };
        let runtime_dir = acquire(disk_dir.place());
        let (image_root, migration_dir) = (
            runtime_dir.paths().image_root().to_path_buf(),
            runtime_dir.paths().image_dir(MIGRATION),
        );
        assert!(
            migration_dir.starts_with(&memory_dir.0) && runtime_dir.on_disk_reason().is_none(),
            "{migration_dir:?}"
        );
        assert_eq!(
            fs::metadata(&image_root).expect("there").mode() & 0o777,
            0o700
        );
        fs::create_dir(&migration_dir).expect("writable");
        assert!(lock_dir(&image_root).is_err(), "nobody else takes it");
        fs::create_dir(disk_dir.0.join("x")).expect("writable");
        let other_tmp_dir = disk_dir.0.join("x").to_string_lossy().into_owned();
        let other_dir = acquire(
            RuntimePaths::from_env(uid(), |name| {
                (name == "PVM_TMP").then(|| other_tmp_dir.clone())
            })
            .expect("a good name"),
        );
        assert_ne!(
            other_dir.paths().image_root(),
            image_root,
            "a place of the same name elsewhere has another one"
        );
        drop((runtime_dir, other_dir));
        assert_eq!(dir_entries(&memory_dir.0), Vec::<PathBuf>::new());
        // Creates the state of a daemon that was killed.
        ensure_private_dir(&image_root, uid()).expect("fresh");
        fs::create_dir(&migration_dir).expect("writable");
        let runtime_dir = acquire(disk_dir.place());
        assert!(image_root.exists() && !migration_dir.exists());
        drop(runtime_dir);
        assert_eq!(dir_entries(&memory_dir.0), Vec::<PathBuf>::new());
    }

    /// Without a file system in memory, images are on the disk, and the reason is reported.
    #[test]
    #[ignore = "system tier: needs a /tmp on a disk"]
    fn missing_memory_file_system_is_reported() {
        let (disk_dir, _) = disk_and_memory_dirs();
        let runtime_dir =
            RuntimeDir::acquire_with_memory_dir(disk_dir.place(), uid(), false, &disk_dir.0)
                .expect("free");
        assert!(
            runtime_dir
                .paths()
                .image_dir(MIGRATION)
                .starts_with(&disk_dir.0)
        );
        assert!(
            runtime_dir
                .on_disk_reason()
                .is_some_and(|why| why.contains("not a file system in memory"))
        );
    }

    #[test]
    fn non_private_directory_is_refused() {
        let test_dir = TestDir::new();
        let paths = test_dir.place();
        create_runtime_dir(&paths, uid()).expect("fresh");
        fs::set_permissions(paths.dir(), fs::Permissions::from_mode(0o755)).expect("ours");
        let error_text = RuntimeDir::acquire(paths.clone(), uid(), false)
            .expect_err("open to others")
            .to_string();
        assert!(
            error_text.contains("others can enter it (mode 0755)"),
            "{error_text}"
        );
        fs::remove_dir(paths.dir()).expect("empty");
        std::os::unix::fs::symlink("/", paths.dir()).expect("writable");
        let error_text = RuntimeDir::acquire(paths, uid(), false)
            .expect_err("a link")
            .to_string();
        assert!(error_text.contains("symbolic link"), "{error_text}");
    }
}
