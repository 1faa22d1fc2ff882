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
//! - If CRIU and the task are both killed while `proc.crtools` exists, that directory remains and
//!   would make every further dump fail. [`prepare_retry`] removes an abandoned `proc.crtools`.

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

/// Name of the directory that CRIU creates in the task's working directory to mount a proc file
/// system.
const MOUNT_POINT: &str = "proc.crtools";
/// Errors in CRIU's log after a collision: the directory already exists (EEXIST), was removed
/// before the mount, open or removal (ENOENT), or was unmounted before the unmount (EINVAL).
const COLLISION_ERRORS: [&str; 6] = [
    "Can't create a directory (-17)",
    "mount failed (-2)",
    "Can't open directory proc.crtools: -2",
    "Can't detach mount proc.crtools: -2",
    "Can't detach mount proc.crtools: -22",
    "Can't remove tmp dir proc.crtools: -2",
];
/// Age from which the directory [`MOUNT_POINT`] counts as abandoned. A running dump removes the
/// directory after less than a millisecond.
const STALE_AGE: Duration = Duration::from_secs(2);
/// The events that a lock watches. inotify(7) merges equal consecutive events that are unread.
/// Creations between the removals keep the removals apart, so that each one is counted.
const WATCHED_EVENTS: AddWatchFlags = AddWatchFlags::IN_CREATE.union(AddWatchFlags::IN_DELETE);

/// Maximum time for which a lock excludes other dumps. A lock usually lasts milliseconds. It lasts
/// longer while CRIU dumps memory, and a dump may hang.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum time to wait for the lock, however often other dumps acquire it during that time.
pub(super) const LOCK_WAIT_TIMEOUT: Duration = Duration::from_secs(2);

/// The time at which each working directory was locked, by the directory's device and inode number.
static LOCKED_DIRS: Mutex<BTreeMap<(u64, u64), Instant>> = Mutex::new(BTreeMap::new());

fn locked_dirs() -> MutexGuard<'static, BTreeMap<(u64, u64), Instant>> {
    LOCKED_DIRS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The working directory of a task that is about to be dumped.
#[derive(Debug)]
pub(super) struct WorkingDir {
    root_pid: i32,
    file_id: (u64, u64),
    /// Number of times that CRIU will create the directory [`MOUNT_POINT`] during the dump.
    expected_creations: usize,
}

impl WorkingDir {
    /// Returns the working directory of a task's root process. `None` if the directory cannot be
    /// determined.
    pub(super) fn of_process(root_pid: i32) -> Option<Self> {
        let meta = std::fs::metadata(cwd_link(root_pid)).ok()?;
        // Observed with CRIU 4.1 and 4.2: CRIU creates the directory once at the beginning, and
        // once for the control groups of each thread of the root process.
        let thread_count = proc::thread_ids(root_pid).map_or(1, |thread_count| thread_count.len());
        Some(Self {
            root_pid,
            file_id: (meta.dev(), meta.ino()),
            expected_creations: 1 + thread_count,
        })
    }

    /// Locks the directory at the time `now`. `None` if another dump has locked the directory less
    /// than [`LOCK_TIMEOUT`] before `now`.
    pub(super) fn try_lock(&self, now: Instant) -> Option<DumpLock> {
        {
            let mut lock_times = locked_dirs();
            let lock_time = lock_times.get(&self.file_id);
            if lock_time
                .is_some_and(|locked_at| now.saturating_duration_since(*locked_at) < LOCK_TIMEOUT)
            {
                return None;
            }
            lock_times.insert(self.file_id, now);
        }
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok();
        let add_watch = |watch: &Inotify| {
            watch
                .add_watch(cwd_link(self.root_pid).as_str(), WATCHED_EVENTS)
                .is_ok()
        };
        // Without the inotify watch the lock lasts until the dump has ended.
        Some(DumpLock {
            file_id: self.file_id,
            locked_at: now,
            watch: watch.filter(add_watch),
            remaining_removals: self.expected_creations,
        })
    }
}

/// The lock of one dump on a working directory. It is released when CRIU has removed the directory
/// [`MOUNT_POINT`] for the last time, or when this value is dropped.
#[derive(Debug)]
pub(super) struct DumpLock {
    file_id: (u64, u64),
    locked_at: Instant,
    watch: Option<Inotify>,
    /// Number of times that CRIU will still create and remove the directory [`MOUNT_POINT`].
    remaining_removals: usize,
}

impl DumpLock {
    /// Returns a descriptor that becomes readable when [`is_released`](Self::is_released) may have
    /// changed; `None` if the directory is not watched.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.watch.as_ref().map(AsFd::as_fd)
    }

    /// True if CRIU no longer needs the directory, or if its use by CRIU can no longer be observed.
    pub(super) fn is_released(&mut self) -> bool {
        let events = self
            .watch
            .as_ref()
            .and_then(|watch| watch.read_events().ok())
            .unwrap_or_default();
        let is_removal = |event: &&InotifyEvent| {
            event.mask.contains(AddWatchFlags::IN_DELETE)
                && event.name.as_deref() == Some(OsStr::new(MOUNT_POINT))
        };
        self.remaining_removals = self
            .remaining_removals
            .saturating_sub(events.iter().filter(is_removal).count());
        let lost_events = AddWatchFlags::IN_Q_OVERFLOW | AddWatchFlags::IN_IGNORED;
        self.remaining_removals == 0
            || events
                .iter()
                .any(|event| event.mask.intersects(lost_events))
    }
}

impl Drop for DumpLock {
    fn drop(&mut self) {
        let mut lock_times = locked_dirs();
        // After a timeout the lock may belong to another dump.
        if lock_times.get(&self.file_id) == Some(&self.locked_at) {
            lock_times.remove(&self.file_id);
        }
        drop(lock_times);
        if let Some(watch) = self.watch.take() {
            close_without_waiting(watch);
        }
    }
}

/// Closes a descriptor of inotify in a thread of its own. The kernel waits for a grace period of 10
/// to 15 ms when such a descriptor is closed, and CRIU waits for the caller meanwhile.
fn close_without_waiting(watch: Inotify) {
    // If no thread can be started, the descriptor is closed here.
    let _ = std::thread::Builder::new()
        .name("closing".into())
        .spawn(move || drop(watch));
}

fn cwd_link(pid: i32) -> String {
    format!("/proc/{pid}/cwd")
}

/// True if a dump failed because another dump used the same directory. In this case an abandoned
/// [`MOUNT_POINT`] is removed.
pub(super) fn prepare_retry(root_pid: i32, failure: &Failure) -> bool {
    let Failure::Engine(reason) = failure else {
        return false;
    };
    let has_collided = COLLISION_ERRORS
        .iter()
        .any(|message| contains_error(reason, message));
    if has_collided && let Ok(cwd) = std::fs::read_link(cwd_link(root_pid)) {
        remove_if_stale(&cwd.join(MOUNT_POINT));
    }
    has_collided
}

/// True if `reason` contains `message`, and the error number at its end is complete: -2 is not -24.
fn contains_error(reason: &str, message: &str) -> bool {
    reason
        .split(message)
        .skip(1)
        .any(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Unmounts or removes the directory `path` if it was abandoned.
fn remove_if_stale(path: &Path) {
    let modified_at = std::fs::symlink_metadata(path).and_then(|meta| meta.modified());
    let is_mounted = procfs::mounts().is_ok_and(|mounts| {
        mounts
            .iter()
            .any(|mount| Some(&*mount.fs_file) == path.to_str())
    });
    let is_old = modified_at.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > STALE_AGE));
    if is_mounted {
        // The times of a mounted proc file system do not show the age of the directory. A dump that
        // uses the mount has already opened it, or is retried.
        let _ = umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
    } else if is_old {
        // Fails if the directory is not empty. In this case another program has created it.
        let _ = std::fs::remove_dir(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_colliding_dumps_are_retried() {
        let is_retried = |reason: &str| prepare_retry(i32::MAX, &Failure::Engine(reason.into()));
        assert!(is_retried(
            "Error (criu/pie/parasite.c:634): Can't create a directory (-17)"
        ));
        assert!(is_retried(
            "Error (criu/pie/util.c:38): Can't detach mount proc.crtools: -22"
        ));
        assert!(is_retried(
            "Error (criu/pie/util.c:44): Can't remove tmp dir proc.crtools: -2"
        ));
        assert!(!is_retried(
            "Error (criu/pie/util.c:32): Can't open directory proc.crtools: -24"
        ));
        assert!(!is_retried(
            "Error (criu/pie/parasite.c:634): Can't create a directory (-30)"
        ));
        assert!(!is_retried(
            "Error (criu/sk-unix.c:9): External socket is used"
        ));
        assert!(!prepare_retry(i32::MAX, &Failure::Killed { signal: 9 }));
    }

    /// Starts a process in the working directory `dir`. The caller must kill the process.
    fn start_process_in(dir: &Path) -> (std::process::Child, WorkingDir) {
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
        let (dir, other_dir) = (
            tempfile::tempdir().expect("dir"),
            tempfile::tempdir().expect("dir"),
        );
        let (first_process, second_process, other_process) = (
            start_process_in(dir.path()),
            start_process_in(dir.path()),
            start_process_in(other_dir.path()),
        );
        let (now, create_mount_point) = (Instant::now(), || {
            std::fs::create_dir(dir.path().join(MOUNT_POINT)).expect("dir");
            std::fs::remove_dir(dir.path().join(MOUNT_POINT)).expect("dir");
        });
        let mut lock = first_process.1.try_lock(now).expect("nobody has it");
        assert!(second_process.1.try_lock(now).is_none());
        assert!(
            other_process.1.try_lock(now).is_some(),
            "it is in another place"
        );
        std::fs::write(dir.path().join("file"), "").expect("the test's own file");
        std::fs::remove_file(dir.path().join("file")).expect("the test's own file");
        assert!(!lock.is_released(), "that is the task's own affair");
        create_mount_point();
        assert!(
            !lock.is_released() && second_process.1.try_lock(now).is_none(),
            "there is another visit"
        );
        create_mount_point();
        assert!(lock.is_released());
        drop(lock);
        let mut lock = first_process.1.try_lock(now).expect("nobody has it");
        create_mount_point();
        create_mount_point();
        assert!(lock.is_released(), "unread removals are counted one by one");
        drop(lock);
        let second_lock = second_process
            .1
            .try_lock(now)
            .expect("nobody has it any more");
        let third_lock = first_process
            .1
            .try_lock(now + LOCK_TIMEOUT)
            .expect("it has taken too long");
        drop(second_lock);
        assert!(
            second_process.1.try_lock(now + LOCK_TIMEOUT).is_none(),
            "it is the next one's"
        );
        drop(third_lock);
        drop(
            second_process
                .1
                .try_lock(now)
                .expect("nobody has it any more"),
        );
        for (mut child, _) in [first_process, second_process, other_process] {
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
