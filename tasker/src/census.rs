//! One reading of all processes of the host, and the processes of each task among them.
//!
//! A process belongs to a task by its PID namespace, which it cannot leave, and not by its control
//! group or its process group, which it can leave. A process that has created a further PID
//! namespace belongs to the task whose namespace surrounds it.
//!
//! Without PID namespaces (the tasker has no privileges), a process belongs to a task if one of its
//! ancestors does. Orphans become children of the tasker; they are recognized by their process
//! group, or by a variable of their environment that has another value in each task.
//!
//! The kernel does not reuse a PID while a process group has its number. So the group of a task
//! whose first process was reaped is its own until the kernel says that the group does not exist. A
//! census cannot say this: /proc is not read at one moment, so processes that fork and exit in
//! turns may be absent.

use crate::outer_namespace::outer_namespace_inode;
use crate::sys;
use checkpoint::proc;
use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use std::cell::{Cell, OnceCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::linux::fs::MetadataExt;
use thiserror::Error;

/// Environment variable whose value differs between tasks; the daemon sets it for each task.
const TASK_VARIABLE: &[u8] = b"PVMEPID=";

/// The processes of the host could not be read, for example because no descriptor was free. No
/// process may be considered absent or stopped then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the processes of the host cannot be read")]
pub(crate) struct CensusFailed;

impl From<io::Error> for CensusFailed {
    fn from(_: io::Error) -> Self {
        Self
    }
}

/// The parent and the process group of each process that has not ended.
type ParentsAndGroups = BTreeMap<i32, (i32, i32)>;

/// All processes of the host at one moment. Each part is read when it is first needed.
#[derive(Debug, Default)]
pub(crate) struct Census {
    namespaces: OnceCell<Result<Namespaces, CensusFailed>>,
    parents_and_groups: OnceCell<Result<ParentsAndGroups, CensusFailed>>,
}

/// The PID namespaces of all processes, by their inode numbers.
#[derive(Debug)]
struct Namespaces {
    /// The processes in each namespace.
    pids: BTreeMap<u64, Vec<i32>>,
    /// The namespace in which each namespace was created. Namespaces that were created in the
    /// tasker's own namespace are missing.
    outer: BTreeMap<u64, u64>,
}

/// A task without a PID namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessTree {
    /// PID of the task's first process, which leads a process group.
    first_pid: i32,
    /// True if the first process was reaped. Another process may have its PID then.
    is_first_reaped: bool,
    /// True if the first process was reaped and its process group has ended. The kernel may use the
    /// number for another group then.
    has_group_ended: Cell<bool>,
    /// Entry of the environment that only processes of this task have; `None` if the task was
    /// started without it.
    mark: Option<Vec<u8>>,
}

impl ProcessTree {
    /// Describes a task by its first process and the environment with which it was started.
    pub(crate) fn new(first_pid: i32, environment: &[Vec<u8>]) -> Self {
        let mark = environment.iter().find(|e| e.starts_with(TASK_VARIABLE));
        Self {
            first_pid,
            is_first_reaped: false,
            has_group_ended: Cell::new(false),
            mark: mark.cloned(),
        }
    }

    /// Records that the first process was reaped.
    pub(crate) fn record_first_reaped(&mut self) {
        self.is_first_reaped = true;
    }

    /// True if the first process was reaped and its process group has ended, also the members that
    /// were not reaped.
    pub(crate) fn has_group_ended(&self) -> bool {
        self.has_group_ended_by(group_exists)
    }

    /// True if the first process was reaped and its process group has a member, which may be absent
    /// from a census.
    pub(crate) fn has_left_group(&self) -> bool {
        self.is_first_reaped && !self.has_group_ended()
    }

    /// Kills the process group of the first process at once, if it is the task's. Processes that
    /// fork and exit in turns do not escape.
    pub(crate) fn kill_group(&self) {
        if !self.has_group_ended() {
            // Fails only if the group has ended since.
            let _ = sys::send_signal(-self.first_pid, libc::SIGKILL);
        }
    }

    fn has_group_ended_by(&self, group_exists: impl Fn(i32) -> bool) -> bool {
        if self.is_first_reaped && !self.has_group_ended.get() && !group_exists(self.first_pid) {
            self.has_group_ended.set(true);
        }
        self.has_group_ended.get()
    }

    /// Selects the processes of the task. `processes` contains the parent and the process group of
    /// each process of the host; `tasker_pid` is the process that adopts orphans,
    /// `group_exists` returns whether a process group exists, and `environment` returns the
    /// environment of a process.
    fn select(
        &self,
        processes: &ParentsAndGroups,
        tasker_pid: i32,
        group_exists: impl Fn(i32) -> bool,
        environment: impl Fn(i32) -> Result<Vec<u8>, CensusFailed>,
    ) -> Result<Vec<i32>, CensusFailed> {
        if self.is_first_reaped && processes.contains_key(&self.first_pid) {
            // The PID of the first process is in use again, so its group has ended before.
            self.has_group_ended.set(true);
        }
        let has_group = !self.has_group_ended_by(group_exists);
        let has_mark = |pid: i32| -> Result<bool, CensusFailed> {
            let Some(mark) = &self.mark else {
                return Ok(false);
            };
            Ok(environment(pid)?
                .split(|byte| *byte == 0)
                .any(|e| e == mark))
        };
        let mut members = BTreeSet::new();
        for (pid, (parent, group)) in processes {
            let is_first = *pid == self.first_pid && !self.is_first_reaped;
            if is_first
                || (*group == self.first_pid && has_group)
                || (*parent == tasker_pid && has_mark(*pid)?)
            {
                members.insert(*pid);
            }
        }
        loop {
            let children = processes
                .iter()
                .filter(|(pid, (parent, _))| members.contains(parent) && !members.contains(pid));
            let children: Vec<i32> = children.map(|(pid, _)| *pid).collect();
            if children.is_empty() {
                return Ok(members.into_iter().collect());
            }
            members.extend(children);
        }
    }
}

impl Census {
    /// Returns the PIDs of the processes in the PID namespace with this inode number, and in
    /// namespaces that were created in it. The tasker's own PID namespace numbers the processes.
    pub(crate) fn namespace_pids(&self, inode: u64) -> Result<Vec<i32>, CensusFailed> {
        let namespaces = self.namespaces.get_or_init(Namespaces::read);
        let namespaces = namespaces.as_ref().map_err(|error| *error)?;
        let is_member =
            |(member_inode, _): &(&u64, &Vec<i32>)| namespaces.is_inside(**member_inode, inode);
        let groups = namespaces.pids.iter().filter(is_member);
        Ok(groups.flat_map(|(_, pids)| pids.iter().copied()).collect())
    }

    /// Returns the PIDs of the processes of a task without a PID namespace. Processes that have
    /// ended are not included.
    pub(crate) fn tree_pids(&self, tree: &ProcessTree) -> Result<Vec<i32>, CensusFailed> {
        let processes = self.parents_and_groups.get_or_init(read_parents_and_groups);
        let processes = processes.as_ref().map_err(|error| *error)?;
        let environment = |pid| {
            let environment = std::fs::read(format!("/proc/{pid}/environ"));
            Ok(if_visible(environment)?.unwrap_or_default())
        };
        let tasker_pid = std::process::id().cast_signed();
        tree.select(processes, tasker_pid, group_exists, environment)
    }
}

impl Namespaces {
    fn read() -> Result<Self, CensusFailed> {
        let mut pids = BTreeMap::<u64, Vec<i32>>::new();
        let mut own_inode = None;
        for pid in proc::process_ids()? {
            let metadata = std::fs::metadata(format!("/proc/{pid}/ns/pid"));
            if let Some(metadata) = if_visible(metadata)? {
                let inode = metadata.st_ino();
                pids.entry(inode).or_default().push(pid);
                if pid == std::process::id().cast_signed() {
                    own_inode = Some(inode);
                }
            }
        }
        // The kernel is asked, because the parent of a process may be in any namespace: see
        // CLONE_PARENT in clone(2) and setns(2).
        let outer = find_outer(&pids, own_inode, |pid| {
            if_visible(outer_namespace_inode(pid)).map_err(CensusFailed::from)
        })?;
        Ok(Self { pids, outer })
    }

    /// True if the namespace `inode` is `outer_inode`, or was created in it.
    fn is_inside(&self, inode: u64, outer_inode: u64) -> bool {
        let mut inode = Some(inode);
        // Each step leads to a surrounding namespace. Namespaces that have ended between two steps
        // of the reading could make a circle.
        for _ in 0..=self.outer.len() {
            match inode {
                Some(inode) if inode == outer_inode => return true,
                Some(known_inode) => inode = self.outer.get(&known_inode).copied(),
                None => return false,
            }
        }
        false
    }
}

/// Returns the namespace in which each namespace was created, except for those that were created in
/// the tasker's own namespace `own_inode` or outside it. `pids` contains the processes of each
/// namespace. `outer_of` returns the namespace in which the namespace of a process was created;
/// `None` if the process has ended.
fn find_outer(
    pids: &BTreeMap<u64, Vec<i32>>,
    own_inode: Option<u64>,
    outer_of: impl Fn(i32) -> Result<Option<Option<u64>>, CensusFailed>,
) -> Result<BTreeMap<u64, u64>, CensusFailed> {
    let mut outer_inodes = BTreeMap::new();
    for (inode, pids) in pids.iter().filter(|(inode, _)| Some(**inode) != own_inode) {
        let outer = pids.iter().find_map(|pid| outer_of(*pid).transpose());
        if let Some(outer) = outer.transpose()?.flatten()
            && Some(outer) != own_inode
        {
            outer_inodes.insert(*inode, outer);
        }
    }
    Ok(outer_inodes)
}

/// True if a process group has a member, which may not have been reaped. The kernel looks at all
/// members at one moment.
fn group_exists(group: i32) -> bool {
    kill(Pid::from_raw(-group), None) != Err(Errno::ESRCH)
}

/// Converts the errors of a process that has ended, or that the tasker may not inspect, into
/// `None`. The tasker may inspect its tasks.
fn if_visible<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match proc::none_if_ended(result) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        other => other,
    }
}

fn read_parents_and_groups() -> Result<ParentsAndGroups, CensusFailed> {
    let mut parents_and_groups = BTreeMap::new();
    for pid in proc::process_ids()? {
        let stat = if_visible(proc::read_stat(pid))?.flatten();
        if let Some(stat) = stat.filter(|stat| !matches!(stat.state, 'Z' | 'X')) {
            parents_and_groups.insert(pid, (stat.ppid, stat.pgrp));
        }
    }
    Ok(parents_and_groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TASKER: i32 = 10;

    fn tree(is_first_reaped: bool) -> ProcessTree {
        let mut tree = ProcessTree::new(20, &[b"A=1".to_vec(), b"PVMEPID=77".to_vec()]);
        if is_first_reaped {
            tree.record_first_reaped();
        }
        tree
    }

    /// Returns the process groups of these processes.
    fn groups_of(processes: &BTreeMap<i32, (i32, i32)>) -> impl Fn(i32) -> bool {
        |group| processes.values().any(|(_, member_of)| *member_of == group)
    }

    /// A group that is absent from one census exists until the kernel says otherwise.
    #[test]
    fn group_outlives_a_census_without_it() {
        let (tree, no_environment) = (tree(true), |_| Ok(Vec::new()));
        let (empty, processes) = (BTreeMap::new(), BTreeMap::from([(21, (TASKER, 20))]));
        let pids = tree.select(&empty, TASKER, |_| true, no_environment);
        assert_eq!(pids, Ok(vec![]));
        let pids = tree.select(&processes, TASKER, |_| true, no_environment);
        assert_eq!(pids, Ok(vec![21]));
        assert!(!tree.has_group_ended_by(|_| true));
        assert!(tree.has_group_ended_by(|_| false));
        // Another group has the number now.
        assert!(tree.has_group_ended_by(|_| true));
        let own_group = nix::unistd::getpgrp().as_raw();
        assert!(group_exists(own_group) && !group_exists(i32::MAX));
    }

    /// A task without a namespace consists of its process group, all descendants, and orphans with
    /// its environment.
    #[test]
    fn tree_contains_descendants_and_marked_orphans() {
        let processes = BTreeMap::from([
            (20, (TASKER, 20)),
            (21, (20, 20)),
            // A child with a session of its own, and its child.
            (22, (21, 22)),
            (23, (22, 22)),
            // An orphan with the task's environment, and its child.
            (24, (TASKER, 24)),
            (25, (24, 24)),
            // Another task, and a process of another program.
            (30, (TASKER, 30)),
            (40, (1, 40)),
        ]);
        let environment = |pid| match pid {
            24 => Ok(b"X=y\0PVMEPID=77\0".to_vec()),
            30 => Ok(b"PVMEPID=78\0".to_vec()),
            _ => Ok(b"PVMEPID=770\0".to_vec()),
        };
        let pids = tree(false).select(&processes, TASKER, groups_of(&processes), environment);
        assert_eq!(pids, Ok(vec![20, 21, 22, 23, 24, 25]));
    }

    /// After the first process was reaped, a new process with its PID is another task.
    #[test]
    fn reused_pid_does_not_join_ended_tree() {
        let environment = |pid| match pid {
            24 => Ok(b"PVMEPID=77\0".to_vec()),
            _ => Ok(Vec::new()),
        };
        let mut processes = BTreeMap::from([(21, (TASKER, 20)), (24, (TASKER, 24))]);
        let pids = tree(true).select(&processes, TASKER, groups_of(&processes), environment);
        assert_eq!(pids, Ok(vec![21, 24]));
        let tree = tree(true);
        processes.insert(20, (TASKER, 20));
        let pids = tree.select(&processes, TASKER, groups_of(&processes), environment);
        assert_eq!(pids, Ok(vec![24]));
        // The process with the reused PID ends, and leaves a process of its group.
        processes.remove(&20);
        let pids = tree.select(&processes, TASKER, groups_of(&processes), environment);
        assert_eq!(pids, Ok(vec![24]));
    }

    /// After the first process was reaped and its group was empty, another group with its number is
    /// not the task's.
    #[test]
    fn reused_group_does_not_join_ended_tree() {
        let no_environment = |_| Ok(Vec::new());
        let tree = tree(true);
        let mut processes = BTreeMap::from([(21, (TASKER, 20)), (30, (1, 30))]);
        assert_eq!(
            tree.select(&processes, TASKER, groups_of(&processes), no_environment),
            Ok(vec![21])
        );
        processes.remove(&21);
        assert_eq!(
            tree.select(&processes, TASKER, groups_of(&processes), no_environment),
            Ok(vec![])
        );
        processes.insert(31, (30, 20));
        assert_eq!(
            tree.select(&processes, TASKER, groups_of(&processes), no_environment),
            Ok(vec![])
        );
    }

    /// A process in a PID namespace that was created in a task's namespace belongs to the task.
    #[test]
    fn nested_namespace_is_inside_surrounding_one() {
        let pids = BTreeMap::from([
            (100, vec![1, 10]),
            (200, vec![20, 25]),
            (300, vec![21, 23]),
            (400, vec![22]),
            (500, vec![50]),
        ]);
        // Process 20 has ended.
        let outer_inodes = BTreeMap::from([(25, 100), (21, 200), (22, 300)]);
        let outer = find_outer(&pids, Some(100), |pid| {
            Ok((pid != 20).then(|| outer_inodes.get(&pid).copied()))
        });
        let outer = outer.expect("all can be read");
        let namespaces = Namespaces { pids, outer };
        for (inode, expected) in [
            (100, false),
            (200, true),
            (300, true),
            (400, true),
            (500, false),
        ] {
            assert_eq!(namespaces.is_inside(inode, 200), expected, "{inode}");
        }
    }

    /// A process that cannot be read makes the census fail. Nothing is considered absent then.
    #[test]
    fn unreadable_process_is_not_absent() {
        let processes = BTreeMap::from([(24, (TASKER, 24))]);
        let pids = tree(false).select(&processes, TASKER, |_| true, |_| Err(CensusFailed));
        assert_eq!(pids, Err(CensusFailed));
        let pids = BTreeMap::from([(200, vec![20])]);
        let outer = find_outer(&pids, Some(100), |_| Err(CensusFailed));
        assert_eq!(outer, Err(CensusFailed));
        let read = |errno| if_visible::<()>(Err(io::Error::from_raw_os_error(errno)));
        for errno in [libc::ENOENT, libc::ESRCH, libc::EACCES] {
            assert!(read(errno).is_ok(), "{errno}");
        }
        for errno in [libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
            assert!(read(errno).is_err(), "{errno}");
        }
    }
}
