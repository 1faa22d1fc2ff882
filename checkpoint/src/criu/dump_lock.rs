//! Serializes dumps of tasks that have the same working directory.
//!
//! To see PIDs inside the task's PID namespace, CRIU lets the task itself create the directory
//! `proc.crtools` in its working directory, mount a proc file system there, and remove both
//! immediately. Two dumps of tasks with the same working directory fail if they do this at the same
//! time.
//!
//! - Dumps of one tasker acquire a [`DumpLock`], a lock per working directory.
//! - Dumps by other programs, for example on another host that shares the directory, may still
//!   collide. Then CRIU fails with one of [`COLLISION_ERRORS`], and the dump is retried.
//! - If CRIU and the task are both killed while the directory exists, it remains and would make
//!   every further dump fail. [`is_retryable`] removes it.

use crate::proc;
use nix::mount::{MntFlags, umount2};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent};
use sempa_proto::migration::Failure;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Name of the directory that CRIU creates in the task's working directory.
const MOUNT_POINT: &str = "proc.crtools";
/// Errors in CRIU's log after a collision: the directory already exists (EEXIST), or was removed
/// before the mount (ENOENT) or before the unmount (EINVAL).
const COLLISION_ERRORS: [&str; 3] = [
    "Can't create a directory (-17)",
    "mount failed (-2)",
    "Can't detach mount proc.crtools: -22",
];
/// Age from which the directory counts as abandoned. A running dump removes it after less than a
/// millisecond.
const STALE_AGE: Duration = Duration::from_secs(2);

/// Maximum time for which a lock excludes other dumps. A lock usually lasts milliseconds, but CRIU
/// dumps memory while it is locked, and a dump may hang.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum time to wait for the lock, however often other dumps acquire it during that time.
pub(super) const LOCK_WAIT_TIMEOUT: Duration = Duration::from_secs(2);

/// The time of locking of each locked working directory, by device and inode number.
static LOCKED_DIRS: Mutex<BTreeMap<(u64, u64), Instant>> = Mutex::new(BTreeMap::new());

fn locked_dirs() -> MutexGuard<'static, BTreeMap<(u64, u64), Instant>> {
    LOCKED_DIRS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The working directory of a task that is about to be dumped.
#[derive(Debug)]
pub(super) struct WorkingDir {
    root_pid: i32,
    id: (u64, u64),
    /// Number of times that CRIU will create the directory.
    expected_visits: usize,
}

impl WorkingDir {
    /// Returns the working directory of a task's root process. `None` if it cannot be determined.
    pub(super) fn of_process(root: i32) -> Option<WorkingDir> {
        let about = std::fs::metadata(cwd_link(root)).ok()?;
        // Observed with CRIU 4.1 and 4.2: CRIU creates the directory once at the beginning, and
        // once for the control groups of each thread of the root process.
        let threads = proc::thread_ids(root).map_or(1, |threads| threads.len());
        Some(WorkingDir {
            root_pid: root,
            id: (about.dev(), about.ino()),
            expected_visits: 1 + threads,
        })
    }

    /// Locks the directory at the time `now`. `None` if another dump has locked it less than
    /// [`LOCK_TIMEOUT`] before.
    pub(super) fn try_lock(&self, now: Instant) -> Option<DumpLock> {
        {
            let mut locked = locked_dirs();
            let others = locked.get(&self.id);
            if others.is_some_and(|since| now.saturating_duration_since(*since) < LOCK_TIMEOUT) {
                return None;
            }
            locked.insert(self.id, now);
        }
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok();
        let watched = |watch: &Inotify| {
            watch
                .add_watch(cwd_link(self.root_pid).as_str(), AddWatchFlags::IN_DELETE)
                .is_ok()
        };
        // Without the inotify watch the lock lasts until the dump has ended.
        Some(DumpLock {
            id: self.id,
            locked_at: now,
            watch: watch.filter(watched),
            remaining_visits: self.expected_visits,
        })
    }
}

/// The lock of one dump on a working directory. It is released when CRIU has created the directory
/// [`MOUNT_POINT`] for the last time, or when this value is dropped.
#[derive(Debug)]
pub(super) struct DumpLock {
    id: (u64, u64),
    locked_at: Instant,
    watch: Option<Inotify>,
    /// Number of times that CRIU will still create the directory.
    remaining_visits: usize,
}

impl DumpLock {
    /// Returns a descriptor that becomes readable when [`is_released`](Self::is_released) may have
    /// changed; `None` if the directory is not watched.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.watch.as_ref().map(AsFd::as_fd)
    }

    /// True if CRIU no longer needs the directory, or if its accesses cannot be observed.
    pub(super) fn is_released(&mut self) -> bool {
        let events = self
            .watch
            .as_ref()
            .and_then(|watch| watch.read_events().ok())
            .unwrap_or_default();
        let is_visit =
            |event: &&InotifyEvent| event.name.as_deref() == Some(OsStr::new(MOUNT_POINT));
        self.remaining_visits = self
            .remaining_visits
            .saturating_sub(events.iter().filter(is_visit).count());
        let unseen = AddWatchFlags::IN_Q_OVERFLOW | AddWatchFlags::IN_IGNORED;
        self.remaining_visits == 0 || events.iter().any(|event| event.mask.intersects(unseen))
    }
}

impl Drop for DumpLock {
    fn drop(&mut self) {
        let mut locked = locked_dirs();
        // After a timeout the lock may belong to another dump.
        if locked.get(&self.id) == Some(&self.locked_at) {
            locked.remove(&self.id);
        }
    }
}

fn cwd_link(pid: i32) -> String {
    format!("/proc/{pid}/cwd")
}

/// True if a dump failed because another dump used the same directory. Also removes an abandoned
/// [`MOUNT_POINT`].
pub(super) fn is_retryable(root: i32, failure: &Failure) -> bool {
    let Failure::Engine(why) = failure else {
        return false;
    };
    let collided = COLLISION_ERRORS.iter().any(|sign| why.contains(sign));
    if collided && let Ok(cwd) = std::fs::read_link(cwd_link(root)) {
        remove_if_stale(&cwd.join(MOUNT_POINT));
    }
    collided
}

/// Unmounts or removes the directory `path` if it was abandoned.
fn remove_if_stale(path: &Path) {
    let changed = std::fs::symlink_metadata(path).and_then(|meta| meta.modified());
    let in_mount = procfs::mounts()
        .is_ok_and(|mounts| mounts.iter().any(|m| Some(&*m.fs_file) == path.to_str()));
    let old = changed.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > STALE_AGE));
    if in_mount {
        // The times of a mounted proc file system are not the age of the directory. A dump that
        // uses the mount already has it open, or is retried.
        let _ = umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
    } else if old {
        // Fails if the directory is not empty; then CRIU has not created it.
        let _ = std::fs::remove_dir(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_colliding_dumps_are_retried() {
        let retries = |why: &str| is_retryable(i32::MAX, &Failure::Engine(why.into()));
        assert!(retries(
            "Error (criu/pie/parasite.c:634): Can't create a directory (-17)"
        ));
        assert!(retries(
            "Error (criu/pie/util.c:38): Can't detach mount proc.crtools: -22"
        ));
        assert!(!retries(
            "Error (criu/pie/parasite.c:634): Can't create a directory (-30)"
        ));
        assert!(!retries(
            "Error (criu/sk-unix.c:9): External socket is used"
        ));
        assert!(!is_retryable(i32::MAX, &Failure::Killed { signal: 9 }));
    }

    /// Starts a process in this working directory, which the caller must kill.
    fn process_in(dir: &Path) -> (std::process::Child, WorkingDir) {
        let child = std::process::Command::new("sleep")
            .arg("1000")
            .current_dir(dir)
            .spawn()
            .expect("it starts");
        let working_dir = WorkingDir::of_process(child.id().cast_signed()).expect("it is there");
        (child, working_dir)
    }

    /// A dump gets the lock when the previous dump no longer needs the directory, or after a
    /// timeout.
    #[test]
    fn dumps_in_one_directory_take_turns() {
        let (here, elsewhere) = (
            tempfile::tempdir().expect("dir"),
            tempfile::tempdir().expect("dir"),
        );
        let (first, second, other) = (
            process_in(here.path()),
            process_in(here.path()),
            process_in(elsewhere.path()),
        );
        let (now, visit) = (Instant::now(), || {
            std::fs::create_dir(here.path().join(MOUNT_POINT)).expect("dir");
            std::fs::remove_dir(here.path().join(MOUNT_POINT)).expect("dir");
        });
        let mut lock = first.1.try_lock(now).expect("nobody has it");
        assert!(second.1.try_lock(now).is_none());
        assert!(other.1.try_lock(now).is_some(), "it is in another place");
        std::fs::write(here.path().join("file"), "").expect("the test's own file");
        std::fs::remove_file(here.path().join("file")).expect("the test's own file");
        assert!(!lock.is_released(), "that is the task's own affair");
        visit();
        assert!(
            !lock.is_released() && second.1.try_lock(now).is_none(),
            "there is another visit"
        );
        visit();
        assert!(lock.is_released());
        drop(lock);
        let late = second.1.try_lock(now).expect("nobody has it any more");
        let next = first
            .1
            .try_lock(now + LOCK_TIMEOUT)
            .expect("it has taken too long");
        drop(late);
        assert!(
            second.1.try_lock(now + LOCK_TIMEOUT).is_none(),
            "it is the next one's"
        );
        drop(next);
        drop(second.1.try_lock(now).expect("nobody has it any more"));
        for (mut child, _) in [first, second, other] {
            child.kill().expect("it is there");
            child.wait().expect("it ends");
        }
    }

    /// A directory that was created a moment ago is not removed.
    #[test]
    fn recent_directory_is_kept() {
        let dir = std::env::temp_dir().join(format!("sempa-crossing-{}", std::process::id()));
        std::fs::create_dir_all(dir.join(MOUNT_POINT)).expect("dir");
        remove_if_stale(&dir.join(MOUNT_POINT));
        assert!(dir.join(MOUNT_POINT).exists());
        std::fs::remove_dir_all(&dir).expect("remove");
    }
}
