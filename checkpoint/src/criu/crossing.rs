//! Serializes dumps of tasks that have the same working directory.
//!
//! To see PIDs inside the task's PID namespace, CRIU lets the task itself create the directory
//! `proc.crtools` in its working directory, mount a proc file system there, and remove both
//! immediately. Two tasks with the same working directory that are dumped at the same time disturb
//! each other.
//!
//! - Dumps of one tasker take a [`Turn`], a lock per working directory.
//! - Dumps by others, for example on another host that shares the directory, may still collide.
//!   Then CRIU fails with one of [`SIGNS`], and a retry helps.
//! - If CRIU and the task are both killed at this moment, the directory remains and would make
//!   every further dump fail. [`may_try_again`] removes it.

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

/// Name of the directory that CRIU creates.
const MOUNT_POINT: &str = "proc.crtools";
/// Errors in CRIU's log if the directory exists already (EEXIST), or was removed before the mount
/// (ENOENT) or before the unmount (EINVAL).
const SIGNS: [&str; 3] = [
    "Can't create a directory (-17)",
    "mount failed (-2)",
    "Can't detach mount proc.crtools: -22",
];
/// Age from which the directory counts as left behind. In a running dump it exists for less than a
/// millisecond.
const LEFT_BEHIND_AGE: Duration = Duration::from_secs(2);

/// Maximum time for which a lock excludes others. It usually lasts milliseconds, but CRIU dumps
/// memory in the middle of it, and a dump may hang.
const TURN_MAX: Duration = Duration::from_millis(500);
/// Maximum time to wait for the lock, however often others take it meanwhile.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(2);

/// The locked working directories, by device and inode, with the time of locking.
static TAKEN: Mutex<BTreeMap<(u64, u64), Instant>> = Mutex::new(BTreeMap::new());

fn taken() -> MutexGuard<'static, BTreeMap<(u64, u64), Instant>> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The working directory of a task that is about to be dumped.
#[derive(Debug)]
pub(super) struct Place {
    root: i32,
    id: (u64, u64),
    /// How many times CRIU will create the directory.
    visits: usize,
}

impl Place {
    /// Returns the working directory of a task's root process. `None` if it cannot be determined.
    pub(super) fn of(root: i32) -> Option<Place> {
        let about = std::fs::metadata(cwd(root)).ok()?;
        // Observed with CRIU 4.1 and 4.2: once at the beginning, and once for the control groups of
        // each thread of the root process.
        let threads = std::fs::read_dir(format!("/proc/{root}/task")).map_or(1, Iterator::count);
        Some(Place {
            root,
            id: (about.dev(), about.ino()),
            visits: 1 + threads,
        })
    }

    /// Locks the directory. `None` if another dump locked it less than [`TURN_MAX`] ago.
    pub(super) fn take_turn(&self, now: Instant) -> Option<Turn> {
        {
            let mut taken = taken();
            let others = taken.get(&self.id);
            if others.is_some_and(|since| now.saturating_duration_since(*since) < TURN_MAX) {
                return None;
            }
            taken.insert(self.id, now);
        }
        let seen = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok();
        let watched = |seen: &Inotify| {
            seen.add_watch(cwd(self.root).as_str(), AddWatchFlags::IN_DELETE)
                .is_ok()
        };
        // Without the watch the lock lasts until the dump has ended.
        Some(Turn {
            id: self.id,
            since: now,
            seen: seen.filter(watched),
            expected: self.visits,
        })
    }
}

/// The lock of one dump. It ends when CRIU has created the directory for the last time, or when it
/// is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    id: (u64, u64),
    since: Instant,
    seen: Option<Inotify>,
    /// How many more times CRIU will create the directory.
    expected: usize,
}

impl Turn {
    /// Returns a descriptor that is readable when [`is_over`](Self::is_over) may have changed.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.seen.as_ref().map(AsFd::as_fd)
    }

    /// True if CRIU no longer needs the directory, or if its accesses cannot be observed.
    pub(super) fn is_over(&mut self) -> bool {
        let events = self
            .seen
            .as_ref()
            .and_then(|seen| seen.read_events().ok())
            .unwrap_or_default();
        let is_visit =
            |event: &&InotifyEvent| event.name.as_deref() == Some(OsStr::new(MOUNT_POINT));
        self.expected = self
            .expected
            .saturating_sub(events.iter().filter(is_visit).count());
        let unseen = AddWatchFlags::IN_Q_OVERFLOW | AddWatchFlags::IN_IGNORED;
        self.expected == 0 || events.iter().any(|event| event.mask.intersects(unseen))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut taken = taken();
        // After a timeout the lock may belong to another dump.
        if taken.get(&self.id) == Some(&self.since) {
            taken.remove(&self.id);
        }
    }
}

fn cwd(pid: i32) -> String {
    format!("/proc/{pid}/cwd")
}

/// True if a dump failed because of another one in the same directory. Then also removes a
/// directory that was left behind.
pub(super) fn may_try_again(root: i32, failure: &Failure) -> bool {
    let Failure::Engine(why) = failure else {
        return false;
    };
    let crossed = SIGNS.iter().any(|sign| why.contains(sign));
    if crossed && let Ok(cwd) = std::fs::read_link(cwd(root)) {
        clear(&cwd.join(MOUNT_POINT));
    }
    crossed
}

/// Removes the directory if it was left behind.
fn clear(path: &Path) {
    let changed = std::fs::symlink_metadata(path).and_then(|meta| meta.modified());
    let in_mount = std::fs::read_to_string("/proc/self/mounts")
        .is_ok_and(|mounts| mounts.lines().any(|m| m.split(' ').nth(1) == path.to_str()));
    let old = changed.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LEFT_BEHIND_AGE));
    if in_mount {
        // Times inside a mounted proc file system mean nothing. A dump that uses it has it open
        // already, or retries.
        let _ = umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
    } else if old {
        // Fails if it is not empty; then it was not created by CRIU.
        let _ = std::fs::remove_dir(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_colliding_dumps_are_retried() {
        let again = |why: &str| may_try_again(i32::MAX, &Failure::Engine(why.into()));
        assert!(again(
            "Error (criu/pie/parasite.c:634): Can't create a directory (-17)"
        ));
        assert!(again(
            "Error (criu/pie/util.c:38): Can't detach mount proc.crtools: -22"
        ));
        assert!(!again(
            "Error (criu/pie/parasite.c:634): Can't create a directory (-30)"
        ));
        assert!(!again("Error (criu/sk-unix.c:9): External socket is used"));
        assert!(!may_try_again(i32::MAX, &Failure::Killed { signal: 9 }));
    }

    /// Starts a process in this working directory.
    fn process_in(dir: &Path) -> (std::process::Child, Place) {
        let child = std::process::Command::new("sleep")
            .arg("1000")
            .current_dir(dir)
            .spawn()
            .expect("it starts");
        let place = Place::of(child.id().cast_signed()).expect("it is there");
        (child, place)
    }

    /// A dump gets the lock when the previous one has made its last visit to the directory, or
    /// after a timeout.
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
        let mut turn = first.1.take_turn(now).expect("nobody has it");
        assert!(second.1.take_turn(now).is_none());
        assert!(other.1.take_turn(now).is_some(), "it is in another place");
        std::fs::write(here.path().join("file"), "").expect("the test's own file");
        std::fs::remove_file(here.path().join("file")).expect("the test's own file");
        assert!(!turn.is_over(), "that is the task's own affair");
        visit();
        assert!(
            !turn.is_over() && second.1.take_turn(now).is_none(),
            "there is another visit"
        );
        visit();
        assert!(turn.is_over());
        drop(turn);
        let late = second.1.take_turn(now).expect("nobody has it any more");
        let next = first
            .1
            .take_turn(now + TURN_MAX)
            .expect("it has taken too long");
        drop(late);
        assert!(
            second.1.take_turn(now + TURN_MAX).is_none(),
            "it is the next one's"
        );
        drop(next);
        drop(second.1.take_turn(now).expect("nobody has it any more"));
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
        clear(&dir.join(MOUNT_POINT));
        assert!(dir.join(MOUNT_POINT).exists());
        std::fs::remove_dir_all(&dir).expect("remove");
    }
}
