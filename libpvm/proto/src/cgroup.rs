//! Locates the control groups of a process from the kernel's text files.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A mounted control group hierarchy: the group at its root, and its mount point.
#[derive(Debug, PartialEq, Eq)]
struct MountedHierarchy {
    root_group: PathBuf,
    mount_point: PathBuf,
}

impl MountedHierarchy {
    /// Returns the directory of the control group `group`; `None` if the group lies outside the
    /// mounted part of the hierarchy.
    fn group_dir(&self, group: &Path) -> Option<PathBuf> {
        Some(
            self.mount_point
                .join(group.strip_prefix(&self.root_group).ok()?),
        )
    }
}

/// Finds a mounted hierarchy in `mountinfo`, the content of /proc/PID/mountinfo: the version 1
/// hierarchy of `controller`, or the version 2 hierarchy if `controller` is `None`.
fn find_mount(mountinfo: &[u8], controller: Option<&str>) -> Option<MountedHierarchy> {
    let to_path = |field: &[u8]| PathBuf::from(OsString::from_vec(field.to_vec()));
    mountinfo.split(|b| *b == b'\n').find_map(|line| {
        let fields: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
        let separator_index = fields.iter().position(|field| *field == b"-")?;
        let (filesystem_type, options) = (
            *fields.get(separator_index + 1)?,
            *fields.get(separator_index + 3)?,
        );
        let is_match = match controller {
            None => filesystem_type == b"cgroup2",
            Some(name) => {
                filesystem_type == b"cgroup"
                    && options
                        .split(|b| *b == b',')
                        .any(|option| option == name.as_bytes())
            }
        };
        is_match.then(|| {
            Some(MountedHierarchy {
                root_group: to_path(fields.get(3)?),
                mount_point: to_path(fields.get(4)?),
            })
        })?
    })
}

/// Returns a process's control group as named in `cgroups`, the content of /proc/PID/cgroup: the
/// group in the version 1 hierarchy of `controller`, or in the version 2 hierarchy if `controller`
/// is `None`. Returns `None` if `cgroups` does not list the hierarchy.
fn find_group(cgroups: &[u8], controller: Option<&str>) -> Option<PathBuf> {
    cgroups.split(|b| *b == b'\n').find_map(|line| {
        let mut fields = line.splitn(3, |b| *b == b':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_match = match controller {
            None => controllers.is_empty(),
            Some(name) => controllers
                .split(|b| *b == b',')
                .any(|c| c == name.as_bytes()),
        };
        is_match.then(|| PathBuf::from(OsString::from_vec(path.to_vec())))
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
/// control group. Returns `None` if the hierarchy is not mounted.
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
        let mountinfo =
            b"30 29 0:26 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
            31 29 0:27 /user /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let hierarchy = |root: &str, point: &str| MountedHierarchy {
            root_group: root.into(),
            mount_point: point.into(),
        };
        assert_eq!(
            find_mount(mountinfo, Some("cpuacct")),
            Some(hierarchy("/", "/sys/fs/cgroup/cpu"))
        );
        assert_eq!(
            find_mount(mountinfo, None),
            Some(hierarchy("/user", "/sys/fs/cgroup"))
        );
        let user_hierarchy = find_mount(mountinfo, None).expect("just seen");
        assert_eq!(
            user_hierarchy.group_dir(Path::new("/user/two")),
            Some("/sys/fs/cgroup/two".into())
        );
        assert_eq!(user_hierarchy.group_dir(Path::new("/elsewhere")), None);
        assert_eq!(
            group_dir(mountinfo, cgroups, None),
            Some("/sys/fs/cgroup/two".into())
        );
        assert_eq!(group_dir(mountinfo, cgroups, Some("memory")), None);
        assert_eq!(
            find_mount_point(mountinfo, None),
            Some("/sys/fs/cgroup".into())
        );
    }
}
