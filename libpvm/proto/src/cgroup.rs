//! Locates the control groups of a process from the kernel's text files.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A mounted hierarchy: the group at its root, and the mount point.
#[derive(Debug, PartialEq, Eq)]
struct MountedHierarchy {
    root: PathBuf,
    mount_point: PathBuf,
}

impl MountedHierarchy {
    /// Returns the directory of the control group `group`; `None` if the group lies outside the
    /// mounted part.
    fn group_dir(&self, group: &Path) -> Option<PathBuf> {
        Some(self.mount_point.join(group.strip_prefix(&self.root).ok()?))
    }
}

/// Finds a mounted hierarchy in `mountinfo`, the content of /proc/PID/mountinfo: the version 1
/// hierarchy of `controller`, or the version 2 hierarchy if `controller` is `None`.
fn find_mount(mountinfo: &[u8], controller: Option<&str>) -> Option<MountedHierarchy> {
    let path = |word: &[u8]| PathBuf::from(OsString::from_vec(word.to_vec()));
    mountinfo.split(|b| *b == b'\n').find_map(|line| {
        let words: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
        let dash = words.iter().position(|word| *word == b"-")?;
        let (kind, options) = (*words.get(dash + 1)?, *words.get(dash + 3)?);
        let fits = match controller {
            None => kind == b"cgroup2",
            Some(name) => {
                kind == b"cgroup"
                    && options
                        .split(|b| *b == b',')
                        .any(|option| option == name.as_bytes())
            }
        };
        fits.then(|| {
            Some(MountedHierarchy {
                root: path(words.get(3)?),
                mount_point: path(words.get(4)?),
            })
        })?
    })
}

/// Returns a process's control group as named in `cgroups`, the content of /proc/PID/cgroup: the
/// group in the version 1 hierarchy of `controller`, or in the version 2 hierarchy if `controller`
/// is `None`.
fn find_group(cgroups: &[u8], controller: Option<&str>) -> Option<PathBuf> {
    cgroups.split(|b| *b == b'\n').find_map(|line| {
        let mut parts = line.splitn(3, |b| *b == b':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let fits = match controller {
            None => controllers.is_empty(),
            Some(name) => controllers
                .split(|b| *b == b',')
                .any(|c| c == name.as_bytes()),
        };
        fits.then(|| PathBuf::from(OsString::from_vec(path.to_vec())))
    })
}

/// Returns the directory of a process's control group, from the content of its /proc/PID/mountinfo
/// and /proc/PID/cgroup. The group is looked up in the version 1 hierarchy of `controller`, or in
/// the version 2 hierarchy if `controller` is `None`. Returns `None` if that hierarchy is not
/// mounted or the group lies outside the mounted part.
pub fn group_dir(mountinfo: &[u8], cgroups: &[u8], controller: Option<&str>) -> Option<PathBuf> {
    find_mount(mountinfo, controller)?.group_dir(&find_group(cgroups, controller)?)
}

/// Returns the mount point of the version 1 hierarchy of `controller`, or of the version 2
/// hierarchy if `controller` is `None`. The mount point is the directory of the outermost visible
/// control group.
pub fn find_mount_point(mountinfo: &[u8], controller: Option<&str>) -> Option<PathBuf> {
    find_mount(mountinfo, controller).map(|mount| mount.mount_point)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_in_both_cgroup_versions() {
        let cgroups = b"3:cpuset:/\n2:cpu,cpuacct:/slice/one\n1:name=systemd:/x\n0::/user/two\n";
        assert_eq!(find_group(cgroups, Some("cpu")), Some("/slice/one".into()));
        assert_eq!(
            find_group(cgroups, Some("cpuacct")),
            Some("/slice/one".into())
        );
        assert_eq!(find_group(cgroups, None), Some("/user/two".into()));
        assert_eq!(find_group(cgroups, Some("memory")), None);
        let mounts =
            b"30 29 0:26 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
            31 29 0:27 /user /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let mount = |root: &str, point: &str| MountedHierarchy {
            root: root.into(),
            mount_point: point.into(),
        };
        assert_eq!(
            find_mount(mounts, Some("cpuacct")),
            Some(mount("/", "/sys/fs/cgroup/cpu"))
        );
        assert_eq!(
            find_mount(mounts, None),
            Some(mount("/user", "/sys/fs/cgroup"))
        );
        let seen = find_mount(mounts, None).expect("just seen");
        assert_eq!(
            seen.group_dir(Path::new("/user/two")),
            Some("/sys/fs/cgroup/two".into())
        );
        assert_eq!(seen.group_dir(Path::new("/elsewhere")), None);
        assert_eq!(
            group_dir(mounts, cgroups, None),
            Some("/sys/fs/cgroup/two".into())
        );
        assert_eq!(group_dir(mounts, cgroups, Some("memory")), None);
        assert_eq!(
            find_mount_point(mounts, None),
            Some("/sys/fs/cgroup".into())
        );
    }
}
