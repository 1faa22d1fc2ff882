//! Dumps that cross each other. To see the numbers inside a process-id namespace CRIU lets the task itself make a directory
//! of a fixed name in its working directory, mount a proc file system there for a moment, and remove both. Two tasks with
//! one working directory that are dumped at the same moment disturb each other; trying again helps. If CRIU and the task
//! are both killed within that moment the directory stays, and nothing could be dumped there ever after.

use nix::mount::{MntFlags, umount2};
use sempa_proto::migration::Failure;
use std::path::Path;
use std::time::Duration;

/// Name of the directory.
const MOUNT_POINT: &str = "proc.crtools";
/// What CRIU says when the directory is there already, or was taken away while it was about to use it or to put it away.
const SIGNS: [&str; 3] =
    ["Can't create a directory (-17)", "mount failed (-2)", "Can't detach mount proc.crtools: -22"];
/// A living one exists for less than a millisecond; one of this age was left behind.
const LEFT_BEHIND_AGE: Duration = Duration::from_secs(2);

pub(super) fn may_try_again(root: i32, failure: &Failure) -> bool {
    let Failure::Engine(why) = failure else { return false };
    let crossed = SIGNS.iter().any(|sign| why.contains(sign));
    if crossed && let Ok(cwd) = std::fs::read_link(format!("/proc/{root}/cwd")) {
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
        // Times inside a mounted proc say nothing. Whoever is using it has it open already or tries again.
        let _ = umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
    } else if old {
        // Fails if it is not empty; then it is not what we take it for.
        let _ = std::fs::remove_dir(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_crossing_dumps_are_tried_again() {
        let again = |why: &str| may_try_again(i32::MAX, &Failure::Engine(why.into()));
        assert!(again("Error (criu/pie/parasite.c:634): Can't create a directory (-17)"));
        assert!(again("Error (criu/pie/util.c:38): Can't detach mount proc.crtools: -22"));
        assert!(!again("Error (criu/pie/parasite.c:634): Can't create a directory (-30)"));
        assert!(!again("Error (criu/sk-unix.c:9): External socket is used"));
        assert!(!may_try_again(i32::MAX, &Failure::Killed { signal: 9 }));
    }

    #[test]
    fn a_young_directory_is_left_alone_and_a_full_one_too() {
        let dir = std::env::temp_dir().join(format!("sempa-crossing-{}", std::process::id()));
        std::fs::create_dir_all(dir.join(MOUNT_POINT)).expect("dir");
        clear(&dir.join(MOUNT_POINT));
        assert!(dir.join(MOUNT_POINT).exists());
        std::fs::remove_dir_all(&dir).expect("remove");
    }
}
