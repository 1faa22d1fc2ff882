//! Takes the directory of a virtual machine on this host and gives it back: private directory, lock, healing of what a
//! dead daemon left, removal of everything at the end. Where the directory is, [`sempa_proto::place::Place`] says.
//!
//! Images are what was in the memory of tasks, passwords and all, and may not get onto a disk where somebody finds them later. If
//! the directory is on one, they have a second one in a file system in memory, private likewise.

use checkpoint::carried;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
use ring::digest::{SHA256, digest};
use sempa_proto::place::{CONFINED_FILE, Place, STATE_FILE};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long another daemon may hold the lock that nobody can reach.
const UNHEARD_MAX: Duration = Duration::from_secs(5);
/// How often it is looked whether it can be reached by now, or is gone.
const LOOK_PAUSE: Duration = Duration::from_millis(5);
/// Attempts to take the lock while another daemon of the same place is just removing its own.
const LOCK_ATTEMPTS_MAX: usize = 20;
/// Attempts to remove images while somebody who is being killed may still make files among them.
const REMOVALS_MAX: usize = 50;
const REMOVAL_PAUSE: Duration = Duration::from_millis(20);

/// Where there is a file system in memory on each Linux.
const IN_MEMORY: &str = "/dev/shm";
/// Of memory as well, and without a name in the library.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
/// Bytes of a hash of its path that name the second directory of a place.
const MARK_BYTES: usize = 8;

/// Why the place cannot be used. Nothing was changed in it.
#[derive(Debug, Error)]
pub(crate) enum PlaceError {
    /// Somebody else could read or replace our files.
    #[error(
        "{path}: {what}; the daemon's files are only safe in a directory of mode 0700 that is yours: remove it or set PVM_TMP"
    )]
    Unsafe {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A daemon holds the lock.
    #[error(
        "a virtual machine named {vm} of this user is running already (process {pid}); to run another one beside it, set PVM_VMID to another name"
    )]
    Running {
        /// Its name.
        vm: String,
        /// The daemon's process number, `?` if it has not written it yet.
        pid: String,
    },
    /// A file operation failed.
    #[error("cannot {act} {path}: {source}")]
    Io {
        /// What was tried.
        act: &'static str,
        /// On what.
        path: PathBuf,
        /// What happened.
        source: std::io::Error,
    },
}

fn failed(act: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> PlaceError {
    let path = path.to_path_buf();
    move |source| PlaceError::Io { act, path, source }
}

/// A place that this process holds. Dropping it removes everything in it.
#[derive(Debug)]
pub(crate) struct HeldPlace {
    place: Place,
    /// Kept for its lock.
    _lock: Flock<File>,
    /// Keeps those who clean /tmp of old files away (systemd-tmpfiles leaves a locked directory alone).
    _keep: Option<Flock<File>>,
    /// Process number of a daemon that died here without cleaning up.
    predecessor: Option<String>,
    keep_log: bool,
    /// The directory of images, if it is a second one.
    images: Option<Flock<File>>,
    /// Why images lie on a disk, if they do.
    on_disk: Option<String>,
}

impl HeldPlace {
    /// Makes the directory, takes its lock and removes what a dead daemon left. With `keep_log` a log in it is the
    /// user's and stays.
    ///
    /// # Errors
    /// When the directory is not private, another daemon runs there, or a file operation fails.
    pub(crate) fn take(place: Place, uid: u32, keep_log: bool) -> Result<HeldPlace, PlaceError> {
        HeldPlace::take_with(place, uid, keep_log, Path::new(IN_MEMORY))
    }

    fn take_with(
        place: Place,
        uid: u32,
        keep_log: bool,
        memory: &Path,
    ) -> Result<HeldPlace, PlaceError> {
        let (mut last, mut attempts) = (None, 0);
        let until = Instant::now() + UNHEARD_MAX;
        while attempts < LOCK_ATTEMPTS_MAX {
            make_private(&place, uid)?;
            attempts += 1;
            match lock_file(&place) {
                // It is about to begin, or the kernel is taking it apart: one of the two will be seen soon.
                Err(PlaceError::Running { .. }) if !listens(&place) && Instant::now() < until => {
                    std::thread::sleep(LOOK_PAUSE);
                    attempts = 0;
                }
                Ok(Some((lock, predecessor))) => {
                    let keep = File::open(place.dir())
                        .ok()
                        .and_then(|d| Flock::lock(d, FlockArg::LockSharedNonblock).ok());
                    let (place, images, on_disk) = match images_in_memory(&place, uid, memory) {
                        Ok(None) => (place, None, None),
                        Ok(Some((dir, lock))) => (place.with_images_in(dir), Some(lock), None),
                        Err(why) => (place, None, Some(why)),
                    };
                    let held = HeldPlace {
                        place,
                        _lock: lock,
                        _keep: keep,
                        predecessor,
                        keep_log,
                        images,
                        on_disk,
                    };
                    held.remove_stale();
                    return Ok(held);
                }
                Ok(None) => {}
                Err(PlaceError::Io { source, act, path })
                    if source.kind() == ErrorKind::NotFound =>
                {
                    last = Some(PlaceError::Io { source, act, path });
                }
                Err(e) => return Err(e),
            }
        }
        Err(last.unwrap_or_else(|| PlaceError::Running {
            vm: place.vm().to_string(),
            pid: "?".into(),
        }))
    }

    /// The directory and the names in it.
    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// Process number of the daemon that died here, if one did.
    pub(crate) fn predecessor(&self) -> Option<&str> {
        self.predecessor.as_deref()
    }

    /// Why images get onto a disk, if they do.
    pub(crate) fn on_disk(&self) -> Option<&str> {
        self.on_disk.as_deref()
    }

    /// No task runs any more that belongs to this place: files that came with those that did not run yet go.
    pub(crate) fn undo_carried(&self) {
        carried::undo_all(self.place.all_images());
    }

    /// Images are about to come. When the last login of an ordinary user ends logind removes what is his in shared memory.
    pub(crate) fn see_to_images(&self) {
        let dir = self.place.all_images();
        if self.images.is_some() && !dir.exists() {
            // Whoever uses it says what is wrong.
            let _ = private(dir, nix::unistd::getuid().as_raw());
        }
    }

    /// All that is in its directories.
    fn entries(&self) -> Vec<PathBuf> {
        let mut all = entries(self.place.dir());
        if self.images.is_some() {
            all.extend(entries(self.place.all_images()));
        }
        all
    }

    /// Removes what a dead daemon left; its log stays until the next orderly halt, because it may say why it died.
    fn remove_stale(&self) {
        self.undo_carried();
        for entry in self.entries() {
            let name = entry
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if entry != self.place.lock()
                && entry != self.place.log()
                && is_ours(&self.place, &entry, &name)
            {
                remove_any(&entry);
            }
        }
    }
}

impl Drop for HeldPlace {
    fn drop(&mut self) {
        self.undo_carried();
        for entry in self.entries() {
            let name = entry
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let wanted = self.keep_log && entry == self.place.log();
            let ours = is_ours(&self.place, &entry, &name) || name.starts_with(STATE_FILE);
            if !wanted && entry != self.place.lock() && ours {
                remove_any(&entry);
            }
        }
        if self.images.is_some() {
            remove_with_root(self.place.all_images());
        }
        // The lock goes last: who finds no lock file may take the place.
        let _ = fs::remove_file(self.place.lock());
        remove_with_root(self.place.dir());
    }
}

/// Removes an empty directory, and the one above it if it was the last one there.
fn remove_with_root(dir: &Path) {
    if fs::remove_dir(dir).is_ok()
        && let Some(root) = dir.parent()
    {
        let _ = fs::remove_dir(root);
    }
}

/// The second directory of a place, in a file system in memory, and its lock; none if the place is in memory itself.
///
/// # Errors
/// Why there is none although there should be.
fn images_in_memory(
    place: &Place,
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
    // Virtual machines of one name may have their places under several PVM_TMP.
    let hash = digest(&SHA256, place.dir().as_os_str().as_bytes());
    let mark: String = hash.as_ref()[..MARK_BYTES]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let dir = memory
        .join(format!("sempa-{uid}"))
        .join(format!("{}-{mark}", place.vm()));
    for _ in 0..LOCK_ATTEMPTS_MAX {
        let lock = private(&dir, uid)
            .map_err(|e| e.to_string())
            .and_then(|()| lock_dir(&dir));
        match lock {
            // Another one may just have removed it.
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

/// True if a daemon has its ear open there.
fn listens(place: &Place) -> bool {
    std::os::unix::net::UnixStream::connect(place.socket()).is_ok()
}

/// The lock of a directory, unless it was replaced meanwhile.
fn lock_dir(dir: &Path) -> Result<Option<Flock<File>>, String> {
    let open = File::open(dir).map_err(|e| format!("cannot open {}: {e}", dir.display()))?;
    let lock = Flock::lock(open, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, e)| format!("cannot lock {}: {e}", dir.display()))?;
    let same =
        fs::symlink_metadata(dir).ok().map(|m| m.ino()) == lock.metadata().ok().map(|m| m.ino());
    Ok(same.then_some(lock))
}

/// True for the names that daemons and libraries give to files here; anything else is not ours to remove.
fn is_ours(place: &Place, path: &Path, name: &str) -> bool {
    let moves = place.moves();
    [
        place.socket(),
        moves.with_extension("before"),
        moves,
        place.log(),
        place.ssh_settings(),
    ]
    .iter()
    .any(|p| p == path)
        || name == CONFINED_FILE
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

/// Removes a file, a socket or a whole directory; what cannot be removed stays.
pub(crate) fn remove_any(path: &Path) {
    let Ok(meta) = fs::symlink_metadata(path) else {
        return;
    };
    let _ = if meta.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
}

/// Removes the images of a move. An engine that is just being killed may still make files there: then they are removed again.
pub(crate) fn remove_images(dir: &Path) {
    for _ in 0..REMOVALS_MAX {
        match fs::remove_dir_all(dir) {
            Err(e) if e.kind() == ErrorKind::DirectoryNotEmpty => std::thread::sleep(REMOVAL_PAUSE),
            _ => return,
        }
    }
}

/// Makes the directory and the one above it, private both, or checks them.
fn make_private(place: &Place, uid: u32) -> Result<(), PlaceError> {
    private(place.dir(), uid)
}

fn private(dir: &Path, uid: u32) -> Result<(), PlaceError> {
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
            // Another daemon has just removed it; the caller tries again.
            Err(e) => return Err(failed("look at", path)(e)),
        };
        let bad = |what: String| {
            Err(PlaceError::Unsafe {
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

/// The locked file, and what an earlier daemon wrote into it.
type Locked = (Flock<File>, Option<String>);

/// Locks the lock file: the lock and the process number it held before, or `None` when the file was replaced meanwhile.
fn lock_file(place: &Place) -> Result<Option<Locked>, PlaceError> {
    let path = place.lock();
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
    // Text of a foreign encoding is no process number either.
    let _ = file.read_to_string(&mut before);
    let before = Some(before.trim().to_string()).filter(|pid| !pid.is_empty());
    let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => lock,
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
            let pid = before.unwrap_or_else(|| "?".into());
            return Err(PlaceError::Running {
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

    /// A directory of this test alone; removed at the end.
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

        fn place(&self) -> Place {
            let tmp = self.0.to_string_lossy().into_owned();
            Place::of(uid(), |name| (name == "PVM_TMP").then(|| tmp.clone())).expect("a good name")
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
    fn a_place_is_private_and_leaves_nothing_behind() {
        let scratch = Scratch::new();
        let held = HeldPlace::take(scratch.place(), uid(), false).expect("free");
        let mode = fs::metadata(held.place().dir()).expect("there").mode();
        assert_eq!(mode & 0o777, 0o700);
        fs::write(held.place().socket(), "").expect("writable");
        fs::create_dir(held.place().images(sempa_proto::MigrationId(3))).expect("writable");
        drop(held);
        assert_eq!(entries(&scratch.0), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_second_daemon_is_told_about_the_first() {
        let scratch = Scratch::new();
        let held = HeldPlace::take(scratch.place(), uid(), false).expect("free");
        let _ear = std::os::unix::net::UnixListener::bind(scratch.place().socket()).expect("bound");
        let text = HeldPlace::take(scratch.place(), uid(), false)
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
        drop(held);
    }

    #[test]
    fn a_place_whose_daemon_is_just_going_is_taken_when_it_is_gone() {
        let scratch = Scratch::new();
        let held = HeldPlace::take(scratch.place(), uid(), false).expect("free");
        std::thread::scope(|scope| {
            let next = scope.spawn(|| HeldPlace::take(scratch.place(), uid(), false).map(drop));
            std::thread::sleep(LOOK_PAUSE * 3);
            drop(held);
            next.join().expect("it ends").expect("it is free then");
        });
    }

    #[test]
    fn what_a_dead_daemon_left_is_removed_and_foreign_files_are_not() {
        let scratch = Scratch::new();
        let place = scratch.place();
        make_private(&place, uid()).expect("fresh");
        fs::write(place.lock(), "4711\n").expect("writable");
        fs::write(place.socket(), "").expect("writable");
        fs::write(place.token(sempa_proto::MigrationId(1)), "").expect("writable");
        fs::write(place.log(), "why it died\n").expect("writable");
        fs::write(place.dir().join("mine"), "").expect("writable");
        let held = HeldPlace::take(place.clone(), uid(), false).expect("stale");
        assert_eq!(held.predecessor(), Some("4711"));
        assert!(!place.socket().exists() && !place.token(sempa_proto::MigrationId(1)).exists());
        assert!(place.log().exists() && place.dir().join("mine").exists());
        drop(held);
        assert!(!place.log().exists() && place.dir().join("mine").exists());
    }

    /// A directory on a disk, and one in memory.
    ///
    /// # Panics
    /// The directory for temporary files is in memory, or /dev/shm is not.
    fn disk_and_memory() -> (Scratch, Scratch) {
        let (disk, memory) = (
            Scratch::under(&std::env::temp_dir()),
            Scratch::under(Path::new(IN_MEMORY)),
        );
        assert!(
            !is_in_memory(&disk.0) && is_in_memory(&memory.0),
            "cannot run here: no disk, or no memory"
        );
        (disk, memory)
    }

    const MOVE: sempa_proto::MigrationId = sempa_proto::MigrationId(7);

    #[test]
    #[ignore = "system tier: needs a /tmp on a disk"]
    fn images_of_a_place_on_a_disk_are_in_memory_and_go_with_the_place_or_with_the_next_daemon() {
        let (disk, memory) = disk_and_memory();
        let take = |place| HeldPlace::take_with(place, uid(), false, &memory.0).expect("free");
        let held = take(disk.place());
        let (own, images) = (
            held.place().all_images().to_path_buf(),
            held.place().images(MOVE),
        );
        assert!(
            images.starts_with(&memory.0) && held.on_disk().is_none(),
            "{images:?}"
        );
        assert_eq!(fs::metadata(&own).expect("there").mode() & 0o777, 0o700);
        fs::create_dir(&images).expect("writable");
        assert!(lock_dir(&own).is_err(), "nobody else takes it");
        fs::create_dir(disk.0.join("x")).expect("writable");
        let tmp = disk.0.join("x").to_string_lossy().into_owned();
        let other = take(
            Place::of(uid(), |name| (name == "PVM_TMP").then(|| tmp.clone())).expect("a good name"),
        );
        assert_ne!(
            other.place().all_images(),
            own,
            "a place of the same name elsewhere has another one"
        );
        drop((held, other));
        assert_eq!(entries(&memory.0), Vec::<PathBuf>::new());
        // What a killed one leaves.
        private(&own, uid()).expect("fresh");
        fs::create_dir(&images).expect("writable");
        let held = take(disk.place());
        assert!(own.exists() && !images.exists());
        drop(held);
        assert_eq!(entries(&memory.0), Vec::<PathBuf>::new());
    }

    #[test]
    #[ignore = "system tier: needs a /tmp on a disk"]
    fn a_place_without_memory_says_that_images_get_onto_a_disk() {
        let (disk, _) = disk_and_memory();
        let held = HeldPlace::take_with(disk.place(), uid(), false, &disk.0).expect("free");
        assert!(held.place().images(MOVE).starts_with(&disk.0));
        assert!(
            held.on_disk()
                .is_some_and(|why| why.contains("no file system in memory"))
        );
    }

    #[test]
    fn a_directory_that_others_can_enter_is_refused() {
        let scratch = Scratch::new();
        let place = scratch.place();
        make_private(&place, uid()).expect("fresh");
        fs::set_permissions(place.dir(), fs::Permissions::from_mode(0o755)).expect("ours");
        let text = HeldPlace::take(place.clone(), uid(), false)
            .expect_err("open to others")
            .to_string();
        assert!(text.contains("others can enter it (mode 0755)"), "{text}");
        fs::remove_dir(place.dir()).expect("empty");
        std::os::unix::fs::symlink("/", place.dir()).expect("writable");
        let text = HeldPlace::take(place, uid(), false)
            .expect_err("a link")
            .to_string();
        assert!(text.contains("symbolic link"), "{text}");
    }
}
