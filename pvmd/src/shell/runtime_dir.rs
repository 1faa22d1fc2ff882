//! Acquires the runtime directory of a virtual machine on this host and releases it.
//!
//! The directory is private (mode 0700) and locked. Files that a dead daemon left are removed at
//! the start, and all files at the end. [`sempa_proto::runtime_paths::RuntimePaths`] defines the
//! paths.
//!
//! Images contain the memory of tasks, passwords included, and must not reach a disk where other
//! people may find them later. If the runtime directory is on a disk, images go to a second private
//! directory on a file system in memory.

use checkpoint::file_transfer_journal;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
use ring::digest::{SHA256, digest};
use sempa_proto::runtime_paths::{GUEST_CPUS_FILE, RM_DATABASE_FILE, RuntimePaths};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Time for which another daemon may hold the lock without being reachable at its socket.
const UNREACHABLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which the lock and the socket are checked.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum number of attempts to acquire the lock while another daemon removes the same directory.
const LOCK_ATTEMPTS_MAX: usize = 20;
/// Maximum number of attempts to remove images while a process that is being killed may still
/// create files among them.
const REMOVAL_ATTEMPTS_MAX: usize = 50;
const REMOVAL_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A file system in memory on every Linux.
const MEMORY_FILE_SYSTEM: &str = "/dev/shm";
/// Magic number of ramfs, another file system in memory; nix has no constant for it.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
/// Number of bytes of the path's hash in the name of the second directory.
const PATH_HASH_BYTES: usize = 8;

/// Reason why the runtime directory cannot be used. Nothing was changed in it.
#[derive(Debug, Error)]
pub(crate) enum RuntimeDirError {
    /// Another user could read or replace the daemon's files.
    #[error(
        "{path}: {what}; the daemon's files are only safe in a directory of mode 0700 that is yours: remove it or set PVM_TMP"
    )]
    Unsafe {
        path: PathBuf,
        /// The property that makes the directory unsafe.
        what: String,
    },
    /// Another daemon holds the lock.
    #[error(
        "a virtual machine named {vm} of this user is running already (process {pid}); to run another one beside it, set PVM_VMID to another name"
    )]
    Running {
        vm: String,
        /// The process id of the other daemon; `?` if that daemon has not written it yet.
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

fn failed(act: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> RuntimeDirError {
    let path = path.to_path_buf();
    move |source| RuntimeDirError::Io {
        operation: act,
        path,
        source,
    }
}

/// A runtime directory held by this process. Dropping it removes the directory and all files in it.
#[derive(Debug)]
pub(crate) struct RuntimeDir {
    paths: RuntimePaths,
    /// The lock file, whose lock is held as long as this value exists.
    _lock: Flock<File>,
    /// Keeps systemd-tmpfiles from removing old files: it skips a locked directory.
    _tmpfiles_lock: Option<Flock<File>>,
    /// Process id of a daemon that died without removing its files from this directory.
    predecessor: Option<String>,
    keep_log: bool,
    /// Lock of the second directory, if there is one.
    image_dir_lock: Option<Flock<File>>,
    /// Reason why images are stored on a disk; `None` if they are in memory.
    on_disk_reason: Option<String>,
}

impl RuntimeDir {
    /// Creates the directory, acquires its lock and removes the files of a dead daemon. `keep_log`
    /// is true if the user chose a log in this directory: the log is then retained.
    ///
    /// # Errors
    /// The directory is not private, another daemon uses it, or a file operation fails.
    pub(crate) fn acquire(
        place: RuntimePaths,
        uid: u32,
        keep_log: bool,
    ) -> Result<RuntimeDir, RuntimeDirError> {
        RuntimeDir::acquire_with_memory_dir(place, uid, keep_log, Path::new(MEMORY_FILE_SYSTEM))
    }

    fn acquire_with_memory_dir(
        paths: RuntimePaths,
        uid: u32,
        keep_log: bool,
        memory: &Path,
    ) -> Result<RuntimeDir, RuntimeDirError> {
        let (mut last, mut attempts) = (None, 0);
        let until = Instant::now() + UNREACHABLE_TIMEOUT;
        while attempts < LOCK_ATTEMPTS_MAX {
            create_runtime_dir(&paths, uid)?;
            attempts += 1;
            match lock_file(&paths) {
                // The other daemon is starting or ending: soon it is reachable or gone.
                Err(RuntimeDirError::Running { .. })
                    if !is_reachable(&paths) && Instant::now() < until =>
                {
                    std::thread::sleep(LOCK_RETRY_INTERVAL);
                    attempts = 0;
                }
                Ok(Some((lock, predecessor))) => {
                    let keep = File::open(paths.dir())
                        .ok()
                        .and_then(|d| Flock::lock(d, FlockArg::LockSharedNonblock).ok());
                    let (paths, image_dir_lock, on_disk_reason) =
                        match create_image_dir_in_memory(&paths, uid, memory) {
                            Ok(None) => (paths, None, None),
                            Ok(Some((dir, lock))) => (paths.with_image_root(dir), Some(lock), None),
                            Err(why) => (paths, None, Some(why)),
                        };
                    let runtime_dir = RuntimeDir {
                        paths,
                        _lock: lock,
                        _tmpfiles_lock: keep,
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
                    operation: act,
                    path,
                }) if source.kind() == ErrorKind::NotFound => {
                    last = Some(RuntimeDirError::Io {
                        source,
                        operation: act,
                        path,
                    });
                }
                Err(e) => return Err(e),
            }
        }
        Err(last.unwrap_or_else(|| RuntimeDirError::Running {
            vm: paths.vm().to_string(),
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

    /// Returns the reason why images are stored on a disk; `None` if they are in memory.
    pub(crate) fn on_disk_reason(&self) -> Option<&str> {
        self.on_disk_reason.as_deref()
    }

    /// Undoes file transfers of tasks that never ran on this host. No task of this directory may be
    /// running.
    pub(crate) fn undo_file_transfers(&self) {
        file_transfer_journal::undo_all(self.paths.image_root());
    }

    /// Recreates the second directory if it is missing; called before images are written. When the
    /// last login of an ordinary user ends, logind removes the user's files in shared memory.
    pub(crate) fn ensure_image_dir(&self) {
        let dir = self.paths.image_root();
        if self.image_dir_lock.is_some() && !dir.exists() {
            // A failure shows when the directory is used.
            let _ = ensure_private_dir(dir, nix::unistd::getuid().as_raw());
        }
    }

    /// Returns all entries of both directories.
    fn entries(&self) -> Vec<PathBuf> {
        let mut all = entries(self.paths.dir());
        if self.image_dir_lock.is_some() {
            all.extend(entries(self.paths.image_root()));
        }
        all
    }

    /// Removes the files that a dead daemon left. Its log stays until the next orderly halt,
    /// because it may show why the daemon died.
    fn remove_stale(&self) {
        self.undo_file_transfers();
        for entry in self.entries() {
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
        for entry in self.entries() {
            let name = entry
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let wanted = self.keep_log && entry == self.paths.log_file();
            let ours =
                is_daemon_file(&self.paths, &entry, &name) || name.starts_with(RM_DATABASE_FILE);
            if !wanted && entry != self.paths.lock_file() && ours {
                remove_recursively(&entry);
            }
        }
        if self.image_dir_lock.is_some() {
            remove_with_root(self.paths.image_root());
        }
        // The lock file is removed last: a daemon that finds no lock file may take the directory.
        let _ = fs::remove_file(self.paths.lock_file());
        remove_with_root(self.paths.dir());
    }
}

/// Removes an empty directory, and its parent if that is empty, too.
fn remove_with_root(dir: &Path) {
    if fs::remove_dir(dir).is_ok()
        && let Some(root) = dir.parent()
    {
        let _ = fs::remove_dir(root);
    }
}

/// Creates and locks the second directory, on a file system in memory. Returns `None` if the
/// runtime directory itself is in memory.
///
/// # Errors
/// The reason why the directory cannot be created.
fn create_image_dir_in_memory(
    place: &RuntimePaths,
    uid: u32,
    memory: &Path,
) -> Result<Option<(PathBuf, Flock<File>)>, String> {
    if is_in_memory(place.dir()) {
        return Ok(None);
    }
    if !is_in_memory(memory) {
        return Err(format!(
            "{} is no file system in memory either",
            memory.display()
        ));
    }
    // The hash separates virtual machines of the same name with different `PVM_TMP`.
    let hash = digest(&SHA256, place.dir().as_os_str().as_bytes());
    let path_hash: String = hash.as_ref()[..PATH_HASH_BYTES]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let dir = memory
        .join(format!("sempa-{uid}"))
        .join(format!("{}-{path_hash}", place.vm()));
    for _ in 0..LOCK_ATTEMPTS_MAX {
        let lock = ensure_private_dir(&dir, uid)
            .map_err(|e| e.to_string())
            .and_then(|()| lock_dir(&dir));
        match lock {
            // Another daemon may have removed it after it was created.
            Ok(None) => {}
            Ok(Some(lock)) => return Ok(Some((dir, lock))),
            Err(_) if !dir.exists() => {}
            Err(why) => return Err(why),
        }
    }
    Err(format!("{} cannot be locked", dir.display()))
}

fn is_in_memory(dir: &Path) -> bool {
    statfs(dir).is_ok_and(|of| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&of.filesystem_type()))
}

/// True if a daemon accepts connections at the socket of this runtime directory.
fn is_reachable(place: &RuntimePaths) -> bool {
    std::os::unix::net::UnixStream::connect(place.daemon_socket()).is_ok()
}

/// Locks a directory. Returns `None` if the directory was replaced before the lock was taken.
fn lock_dir(dir: &Path) -> Result<Option<Flock<File>>, String> {
    let open = File::open(dir).map_err(|e| format!("cannot open {}: {e}", dir.display()))?;
    let lock = Flock::lock(open, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, e)| format!("cannot lock {}: {e}", dir.display()))?;
    let same =
        fs::symlink_metadata(dir).ok().map(|m| m.ino()) == lock.metadata().ok().map(|m| m.ino());
    Ok(same.then_some(lock))
}

/// True for files that daemons and libraries create in the runtime directory; all other files must
/// not be removed.
fn is_daemon_file(place: &RuntimePaths, path: &Path, name: &str) -> bool {
    let moves = place.migration_log();
    [
        place.daemon_socket(),
        moves.with_extension("before"),
        moves,
        place.log_file(),
        place.ssh_config(),
    ]
    .iter()
    .any(|p| p == path)
        || name == GUEST_CPUS_FILE
        || ["images-", "memory-", "resume-", ".tmp-"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let Ok(read) = fs::read_dir(dir) else {
        return Vec::new();
    };
    read.flatten().map(|e| e.path()).collect()
}

/// Removes a file, a socket or a whole directory. Errors are ignored.
pub(crate) fn remove_recursively(path: &Path) {
    let Ok(meta) = fs::symlink_metadata(path) else {
        return;
    };
    let _ = if meta.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
}

/// Removes the images of a migration. Retries while an engine that is being killed still creates
/// files among them.
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

/// Creates the directory and its parent with mode 0700, or checks that existing ones are private.
fn create_runtime_dir(place: &RuntimePaths, uid: u32) -> Result<(), RuntimeDirError> {
    ensure_private_dir(place.dir(), uid)
}

fn ensure_private_dir(dir: &Path, uid: u32) -> Result<(), RuntimeDirError> {
    let root = dir
        .parent()
        .expect("a place is always a directory in a root");
    for path in [root, dir] {
        match DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(failed("make the directory", path)(e)),
        }
        let meta = match fs::symlink_metadata(path) {
            Ok(meta) => meta,
            // Another daemon has just removed the directory; the caller retries.
            Err(e) => return Err(failed("look at", path)(e)),
        };
        let bad = |what: String| {
            Err(RuntimeDirError::Unsafe {
                path: path.to_path_buf(),
                what,
            })
        };
        if meta.file_type().is_symlink() {
            return bad("it is a symbolic link".into());
        }
        if !meta.is_dir() {
            return bad("it is not a directory".into());
        }
        if meta.uid() != uid {
            return bad(format!("it belongs to user {}", meta.uid()));
        }
        if meta.mode() & 0o077 != 0 {
            return bad(format!(
                "others can enter it (mode {:04o})",
                meta.mode() & 0o7777
            ));
        }
    }
    Ok(())
}

/// The locked lock file, and the process id that an earlier daemon wrote into it.
type AcquiredLock = (Flock<File>, Option<String>);

/// Locks the lock file and writes this process id into it. Returns `None` if the file was replaced
/// before it was locked.
fn lock_file(place: &RuntimePaths) -> Result<Option<AcquiredLock>, RuntimeDirError> {
    let path = place.lock_file();
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)
        .map_err(failed("open the lock", &path))?;
    let mut before = String::new();
    // Content that is not UTF-8 is not a process id either.
    let _ = file.read_to_string(&mut before);
    let before = Some(before.trim().to_string()).filter(|pid| !pid.is_empty());
    let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => lock,
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
            let pid = before.unwrap_or_else(|| "?".into());
            return Err(RuntimeDirError::Running {
                vm: place.vm().to_string(),
                pid,
            });
        }
        Err((_, errno)) => return Err(failed("lock", &path)(errno.into())),
    };
    let same =
        fs::symlink_metadata(&path).ok().map(|m| m.ino()) == lock.metadata().ok().map(|m| m.ino());
    if !same {
        return Ok(None);
    }
    let write = |file: &mut File| {
        file.set_len(0)?;
        file.seek(SeekFrom::Start(0))?;
        writeln!(file, "{}", std::process::id())
    };
    write(&mut lock).map_err(failed("write the lock", &path))?;
    Ok(Some((lock, before)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A directory for one test, removed at the end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new() -> Scratch {
            Scratch::under(&std::env::temp_dir())
        }

        fn under(top: &Path) -> Scratch {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let dir = top.join(format!("pvmd-place-{}-{n}", std::process::id()));
            fs::create_dir_all(&dir).expect("a scratch directory");
            Scratch(dir)
        }

        fn place(&self) -> RuntimePaths {
            let tmp = self.0.to_string_lossy().into_owned();
            RuntimePaths::from_env(uid(), |name| (name == "PVM_TMP").then(|| tmp.clone()))
                .expect("a good name")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn uid() -> u32 {
        nix::unistd::getuid().as_raw()
    }

    #[test]
    fn runtime_dir_is_private_and_removed_on_drop() {
        let scratch = Scratch::new();
        let runtime_dir = RuntimeDir::acquire(scratch.place(), uid(), false).expect("free");
        let mode = fs::metadata(runtime_dir.paths().dir())
            .expect("there")
            .mode();
        assert_eq!(mode & 0o777, 0o700);
        fs::write(runtime_dir.paths().daemon_socket(), "").expect("writable");
        fs::create_dir(runtime_dir.paths().image_dir(sempa_proto::MigrationId(3)))
            .expect("writable");
        drop(runtime_dir);
        assert_eq!(entries(&scratch.0), Vec::<PathBuf>::new());
    }

    #[test]
    fn second_daemon_is_refused_with_pid_of_first() {
        let scratch = Scratch::new();
        let runtime_dir = RuntimeDir::acquire(scratch.place(), uid(), false).expect("free");
        let _listener =
            std::os::unix::net::UnixListener::bind(scratch.place().daemon_socket()).expect("bound");
        let text = RuntimeDir::acquire(scratch.place(), uid(), false)
            .expect_err("held")
            .to_string();
        assert!(
            text.contains("named pvm of this user is running already"),
            "{text}"
        );
        assert!(
            text.contains(&format!("process {}", std::process::id())) && text.contains("PVM_VMID"),
            "{text}"
        );
        drop(runtime_dir);
    }

    /// A directory whose daemon is ending is acquired as soon as that daemon is gone.
    #[test]
    fn dir_of_ending_daemon_is_taken_afterwards() {
        let scratch = Scratch::new();
        let runtime_dir = RuntimeDir::acquire(scratch.place(), uid(), false).expect("free");
        std::thread::scope(|scope| {
            let next = scope.spawn(|| RuntimeDir::acquire(scratch.place(), uid(), false).map(drop));
            std::thread::sleep(LOCK_RETRY_INTERVAL * 3);
            drop(runtime_dir);
            next.join().expect("it ends").expect("it is free then");
        });
    }

    /// Files of a dead daemon are removed at the start; files of other programs stay.
    #[test]
    fn stale_files_are_removed_and_foreign_files_kept() {
        let scratch = Scratch::new();
        let place = scratch.place();
        create_runtime_dir(&place, uid()).expect("fresh");
        fs::write(place.lock_file(), "4711\n").expect("writable");
        fs::write(place.daemon_socket(), "").expect("writable");
        fs::write(place.resume_token(sempa_proto::MigrationId(1)), "").expect("writable");
        fs::write(place.log_file(), "why it died\n").expect("writable");
        fs::write(place.dir().join("mine"), "").expect("writable");
        let runtime_dir = RuntimeDir::acquire(place.clone(), uid(), false).expect("stale");
        assert_eq!(runtime_dir.predecessor(), Some("4711"));
        assert!(
            !place.daemon_socket().exists()
                && !place.resume_token(sempa_proto::MigrationId(1)).exists()
        );
        assert!(place.log_file().exists() && place.dir().join("mine").exists());
        drop(runtime_dir);
        assert!(!place.log_file().exists() && place.dir().join("mine").exists());
    }

    /// Returns a directory on a disk and one in memory.
    ///
    /// # Panics
    /// The directory for temporary files is in memory, or /dev/shm is not.
    fn disk_and_memory() -> (Scratch, Scratch) {
        let (disk, memory) = (
            Scratch::under(&std::env::temp_dir()),
            Scratch::under(Path::new(MEMORY_FILE_SYSTEM)),
        );
        assert!(
            !is_in_memory(&disk.0) && is_in_memory(&memory.0),
            "cannot run here: no disk, or no memory"
        );
        (disk, memory)
    }

    const MIGRATION: sempa_proto::MigrationId = sempa_proto::MigrationId(7);

    /// If the runtime directory is on a disk, images are in memory; they are removed with the
    /// directory, or by the next daemon.
    #[test]
    #[ignore = "system tier: needs a /tmp on a disk"]
    fn images_of_dir_on_disk_are_kept_in_memory() {
        let (disk, memory) = disk_and_memory();
        let take = |place| {
            RuntimeDir::acquire_with_memory_dir(place, uid(), false, &memory.0).expect("free")
        };
        let runtime_dir = take(disk.place());
        let (own, images) = (
            runtime_dir.paths().image_root().to_path_buf(),
            runtime_dir.paths().image_dir(MIGRATION),
        );
        assert!(
            images.starts_with(&memory.0) && runtime_dir.on_disk_reason().is_none(),
            "{images:?}"
        );
        assert_eq!(fs::metadata(&own).expect("there").mode() & 0o777, 0o700);
        fs::create_dir(&images).expect("writable");
        assert!(lock_dir(&own).is_err(), "nobody else takes it");
        fs::create_dir(disk.0.join("x")).expect("writable");
        let tmp = disk.0.join("x").to_string_lossy().into_owned();
        let other = take(
            RuntimePaths::from_env(uid(), |name| (name == "PVM_TMP").then(|| tmp.clone()))
                .expect("a good name"),
        );
        assert_ne!(
            other.paths().image_root(),
            own,
            "a place of the same name elsewhere has another one"
        );
        drop((runtime_dir, other));
        assert_eq!(entries(&memory.0), Vec::<PathBuf>::new());
        // State that a killed daemon leaves.
        ensure_private_dir(&own, uid()).expect("fresh");
        fs::create_dir(&images).expect("writable");
        let runtime_dir = take(disk.place());
        assert!(own.exists() && !images.exists());
        drop(runtime_dir);
        assert_eq!(entries(&memory.0), Vec::<PathBuf>::new());
    }

    /// Without a file system in memory, images are on the disk and the reason is reported.
    #[test]
    #[ignore = "system tier: needs a /tmp on a disk"]
    fn missing_memory_file_system_is_reported() {
        let (disk, _) = disk_and_memory();
        let runtime_dir =
            RuntimeDir::acquire_with_memory_dir(disk.place(), uid(), false, &disk.0).expect("free");
        assert!(
            runtime_dir
                .paths()
                .image_dir(MIGRATION)
                .starts_with(&disk.0)
        );
        assert!(
            runtime_dir
                .on_disk_reason()
                .is_some_and(|why| why.contains("no file system in memory"))
        );
    }

    #[test]
    fn non_private_directory_is_refused() {
        let scratch = Scratch::new();
        let place = scratch.place();
        create_runtime_dir(&place, uid()).expect("fresh");
        fs::set_permissions(place.dir(), fs::Permissions::from_mode(0o755)).expect("ours");
        let text = RuntimeDir::acquire(place.clone(), uid(), false)
            .expect_err("open to others")
            .to_string();
        assert!(text.contains("others can enter it (mode 0755)"), "{text}");
        fs::remove_dir(place.dir()).expect("empty");
        std::os::unix::fs::symlink("/", place.dir()).expect("writable");
        let text = RuntimeDir::acquire(place, uid(), false)
            .expect_err("a link")
            .to_string();
        assert!(text.contains("symbolic link"), "{text}");
    }
}
