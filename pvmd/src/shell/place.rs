//! Takes the directory of a virtual machine on this host and gives it back: private directory, lock, healing of what a
//! dead daemon left, removal of everything at the end. Where the directory is, [`sempa_proto::place::Place`] says.

use nix::fcntl::{Flock, FlockArg};
use sempa_proto::place::{Place, STATE_FILE};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// Attempts to take the lock while another daemon of the same place is just removing its own.
const LOCK_ATTEMPTS_MAX: usize = 20;
/// Attempts to remove images while somebody who is being killed may still make files among them.
const REMOVALS_MAX: usize = 50;
const REMOVAL_PAUSE: Duration = Duration::from_millis(20);

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
}

impl HeldPlace {
    /// Makes the directory, takes its lock and removes what a dead daemon left. With `keep_log` a log in it is the
    /// user's and stays.
    ///
    /// # Errors
    /// When the directory is not private, another daemon runs there, or a file operation fails.
    pub(crate) fn take(place: Place, uid: u32, keep_log: bool) -> Result<HeldPlace, PlaceError> {
        let mut last = None;
        for _ in 0..LOCK_ATTEMPTS_MAX {
            make_private(&place, uid)?;
            match lock_file(&place) {
                Ok(Some((lock, predecessor))) => {
                    let keep =
                        File::open(place.dir()).ok().and_then(|d| Flock::lock(d, FlockArg::LockSharedNonblock).ok());
                    let held = HeldPlace { place, _lock: lock, _keep: keep, predecessor, keep_log };
                    held.remove_stale();
                    return Ok(held);
                }
                Ok(None) => {}
                Err(PlaceError::Io { source, act, path }) if source.kind() == ErrorKind::NotFound => {
                    last = Some(PlaceError::Io { source, act, path });
                }
                Err(e) => return Err(e),
            }
        }
        Err(last.unwrap_or_else(|| PlaceError::Running { vm: place.vm().to_string(), pid: "?".into() }))
    }

    /// The directory and the names in it.
    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// Process number of the daemon that died here, if one did.
    pub(crate) fn predecessor(&self) -> Option<&str> {
        self.predecessor.as_deref()
    }

    /// Removes what a dead daemon left; its log stays until the next orderly halt, because it may say why it died.
    fn remove_stale(&self) {
        for entry in entries(self.place.dir()) {
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if entry != self.place.lock() && entry != self.place.log() && is_ours(&self.place, &entry, &name) {
                remove_any(&entry);
            }
        }
    }
}

impl Drop for HeldPlace {
    fn drop(&mut self) {
        for entry in entries(self.place.dir()) {
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let wanted = self.keep_log && entry == self.place.log();
            let ours = is_ours(&self.place, &entry, &name) || name.starts_with(STATE_FILE);
            if !wanted && entry != self.place.lock() && ours {
                remove_any(&entry);
            }
        }
        // The lock goes last: who finds no lock file may take the place.
        let _ = fs::remove_file(self.place.lock());
        if fs::remove_dir(self.place.dir()).is_ok()
            && let Some(root) = self.place.dir().parent()
        {
            let _ = fs::remove_dir(root);
        }
    }
}

/// True for the names that daemons and libraries give to files here; anything else is not ours to remove.
fn is_ours(place: &Place, path: &Path, name: &str) -> bool {
    let moves = place.moves();
    [place.socket(), moves.with_extension("before"), moves, place.log(), place.ssh_settings()].iter().any(|p| p == path)
        || ["images-", "memory-", "resume-", ".tmp-"].iter().any(|prefix| name.starts_with(prefix))
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let Ok(read) = fs::read_dir(dir) else { return Vec::new() };
    read.flatten().map(|e| e.path()).collect()
}

/// Removes a file, a socket or a whole directory; what cannot be removed stays.
pub(crate) fn remove_any(path: &Path) {
    let Ok(meta) = fs::symlink_metadata(path) else { return };
    let _ = if meta.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
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
    let dir = place.dir();
    let root = dir.parent().expect("a place is always a directory in a root");
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
        let bad = |what: String| Err(PlaceError::Unsafe { path: path.to_path_buf(), what });
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
            return bad(format!("others can enter it (mode {:04o})", meta.mode() & 0o7777));
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
            return Err(PlaceError::Running { vm: place.vm().to_string(), pid });
        }
        Err((_, errno)) => return Err(failed("lock", &path)(errno.into())),
    };
    let same = fs::symlink_metadata(&path).ok().map(|m| m.ino()) == lock.metadata().ok().map(|m| m.ino());
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
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let dir = std::env::temp_dir().join(format!("pvmd-place-{}-{n}", std::process::id()));
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
        let text = HeldPlace::take(scratch.place(), uid(), false).expect_err("held").to_string();
        assert!(text.contains("named pvm of this user is running already"), "{text}");
        assert!(text.contains(&format!("process {}", std::process::id())) && text.contains("PVM_VMID"), "{text}");
        drop(held);
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

    #[test]
    fn a_directory_that_others_can_enter_is_refused() {
        let scratch = Scratch::new();
        let place = scratch.place();
        make_private(&place, uid()).expect("fresh");
        fs::set_permissions(place.dir(), fs::Permissions::from_mode(0o755)).expect("ours");
        let text = HeldPlace::take(place.clone(), uid(), false).expect_err("open to others").to_string();
        assert!(text.contains("others can enter it (mode 0755)"), "{text}");
        fs::remove_dir(place.dir()).expect("empty");
        std::os::unix::fs::symlink("/", place.dir()).expect("writable");
        let text = HeldPlace::take(place, uid(), false).expect_err("a link").to_string();
        assert!(text.contains("symbolic link"), "{text}");
    }
}
