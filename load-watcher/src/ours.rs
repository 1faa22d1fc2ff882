//! What the tasks of the virtual machine use on this host, and so what others use. A task in a control group of its own is read
//! by the group, which counts all its processes; of others each process is read, children included. A reading allocates
//! nothing: all descriptors stay open.
//!
//! The kernel's counters do not say what a task had used that has ended. So a span in which a task of ours came or went gives
//! no mean, rather than a wrong one.

use crate::proc::{CpuTimes, TICK_US, group_used, read, used};
use nix::time::{ClockId, clock_gettime};
use sempa_proto::cgroup::folder;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Processes and groups that are read; with more there is no figure.
pub const PARTS_MAX: usize = 512;
/// Bytes of a file that are looked at; they are shorter.
const TEXT_BYTES_MAX: usize = 1024;
/// Processors in use below which it does not matter whose they are.
pub const QUIET: f32 = 0.25;
/// Weight of a new measurement in the mean: with one every ten seconds, a mean over about half a minute.
const WEIGHT: f32 = 0.3;
/// How the folder of a tasker's control groups is named, in which each task has one.
const GROUPS_NAME: &str = "sempa-";

/// What is read as one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    /// A control group.
    Group(PathBuf),
    /// A process.
    Process(i32),
}

/// A counter of ours.
#[derive(Debug)]
struct Part {
    file: File,
    /// What it said last, in microseconds.
    last: u64,
    /// It is a task, or stands for one; not a child, whose parent counts it when it has ended.
    task: bool,
}

/// The processes of our tasks.
#[derive(Debug)]
pub struct Ours {
    root: PathBuf,
    parts: BTreeMap<Key, Part>,
    /// There are more than are read.
    many: bool,
    /// A task came or went since the last measurement.
    changed: bool,
    /// What all have used since this was made, in microseconds.
    spent: u64,
    sampled: Option<(CpuTimes, u64)>,
    before: Option<(CpuTimes, u64)>,
    /// Ticks since boot when it was last looked who there is.
    looked: u64,
    mean: Option<f32>,
}

/// Ticks since boot.
fn ticks_now() -> u64 {
    let since = clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map_or(0, |time| time.tv_sec() * 100 + time.tv_nsec() / 10_000_000);
    u64::try_from(since).unwrap_or(0)
}

/// The control group of a task, if it has one of its own.
fn group_of(root: &Path, pid: i32, mounts: &[u8]) -> Option<PathBuf> {
    let text = fs::read(root.join(pid.to_string()).join("cgroup")).ok()?;
    let group = folder(mounts, &text, None)?;
    let name = group.parent()?.file_name()?.to_str()?;
    (name.starts_with(GROUPS_NAME) && group.join("cpu.stat").exists()).then_some(group)
}

/// The processes that a process has made, and those that they have made.
fn descendants(root: &Path, pid: i32) -> BTreeSet<i32> {
    let (mut open, mut all) = (vec![pid], BTreeSet::new());
    while let Some(parent) = open.pop().filter(|_| all.len() < PARTS_MAX) {
        let threads = fs::read_dir(root.join(parent.to_string()).join("task"));
        for thread in threads.into_iter().flatten().flatten() {
            let text = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            let children = text.split_whitespace().filter_map(|pid| pid.parse().ok());
            open.extend(children.filter(|child| *child != pid && all.insert(*child)));
        }
    }
    all
}

/// All processes of a task whose main process this is: everybody in its control group, or else all that it has made.
pub fn family(root: &Path, pid: i32) -> BTreeSet<i32> {
    let mounts = fs::read(root.join("self/mountinfo")).unwrap_or_default();
    let inside = group_of(root, pid, &mounts)
        .and_then(|group| fs::read_to_string(group.join("cgroup.procs")).ok());
    let mut all = match inside {
        // Whom the kernel does not name here it calls 0.
        Some(text) => text
            .lines()
            .filter_map(|line| line.parse().ok())
            .filter(|pid| *pid > 0)
            .collect(),
        None => descendants(root, pid),
    };
    all.insert(pid);
    all
}

impl Key {
    fn counter(&self, text: &[u8]) -> Option<u64> {
        match self {
            Key::Group(_) => group_used(text),
            Key::Process(_) => used(text)?.ticks.checked_mul(TICK_US),
        }
    }
}

impl Ours {
    /// Nobody yet; `root` is /proc but in tests.
    pub fn new(root: &Path) -> Ours {
        Ours {
            root: root.to_path_buf(),
            parts: BTreeMap::new(),
            many: false,
            changed: false,
            spent: 0,
            sampled: None,
            before: None,
            looked: 0,
            mean: None,
        }
    }

    /// These are the processes of our tasks now, as their daemon names them; the others that they have made are looked up.
    pub fn set(&mut self, pids: &[i32]) {
        let mounts = fs::read(self.root.join("self/mountinfo")).unwrap_or_default();
        let mut wanted: BTreeMap<Key, (i32, bool)> = BTreeMap::new();
        for pid in pids {
            match group_of(&self.root, *pid, &mounts) {
                Some(group) => drop(wanted.insert(Key::Group(group), (*pid, true))),
                None => {
                    for child in descendants(&self.root, *pid) {
                        wanted.entry(Key::Process(child)).or_insert((child, false));
                    }
                    wanted.insert(Key::Process(*pid), (*pid, true));
                }
            }
        }
        self.many = wanted.len() > PARTS_MAX;
        let looked = std::mem::replace(&mut self.looked, ticks_now());
        // What it used since it was read last is read once more.
        self.spend();
        let changed = &mut self.changed;
        self.parts.retain(|key, part| {
            let stays = wanted.contains_key(key);
            *changed |= part.task && !stays;
            stays
        });
        for (key, (pid, task)) in wanted.into_iter().take(PARTS_MAX) {
            if !self.parts.contains_key(&key)
                && let Some(part) = self.open(&key, pid, task, looked)
            {
                self.changed |= task;
                self.parts.insert(key, part);
            }
        }
    }

    /// Begins to read one. What it used before it was looked last does not count; one that was started since is ours as a whole.
    fn open(&self, key: &Key, pid: i32, task: bool, looked: u64) -> Option<Part> {
        let stat = self.root.join(pid.to_string()).join("stat");
        let file = match key {
            Key::Group(group) => File::open(group.join("cpu.stat")).ok()?,
            Key::Process(_) => File::open(&stat).ok()?,
        };
        let mut text = [0; TEXT_BYTES_MAX];
        let now = key.counter(read(&file, &mut text).ok()?)?;
        let started = fs::read(stat)
            .ok()
            .and_then(|text| used(&text))
            .map_or(0, |used| used.started);
        let is_new = looked > 0 && started >= looked;
        Some(Part {
            file,
            last: if is_new { 0 } else { now },
            task,
        })
    }

    /// Adds up what all have used since they were read last.
    fn spend(&mut self) {
        let mut text = [0; TEXT_BYTES_MAX];
        for (key, part) in &mut self.parts {
            match read(&part.file, &mut text)
                .ok()
                .and_then(|text| key.counter(text))
            {
                Some(now) => {
                    self.spent += now.saturating_sub(part.last);
                    part.last = part.last.max(now);
                }
                None => self.changed |= part.task,
            }
        }
    }

    /// True when what is busy on the host is more than what may be left out of account, so that it has to be known whose it
    /// is. `times` are those of the newest sample.
    pub fn is_needed(&self, times: CpuTimes, cores: u32) -> bool {
        let busy = self.before.and_then(|(before, _)| times.busy_since(before));
        busy.is_none_or(|busy| busy * cores as f32 >= QUIET)
    }

    /// Processors that our tasks have used since the call before this one, which was for the sample before; `None` the first time,
    /// and when not all are read. `times` are those of the newest sample.
    pub fn sample(&mut self, times: CpuTimes, cores: u32) -> Option<f32> {
        self.spend();
        let (before, spent) = self.sampled.replace((times, self.spent))?;
        let total = times
            .total
            .checked_sub(before.total)
            .filter(|total| *total > 0)?;
        (!self.many).then(|| processors(self.spent - spent, total, cores))
    }

    /// There is no figure for this sample; the next one counts from a new begin.
    pub fn skip(&mut self) {
        self.sampled = None;
    }

    /// Processors that others used since the last measurement, as a mean over some measurements. `None` while it cannot be
    /// told: the first time, and when tasks of ours came or went; unless so little was used by all that it does not matter.
    pub fn measure(&mut self, times: CpuTimes, cores: u32) -> Option<f32> {
        self.spend();
        let comparable = !std::mem::take(&mut self.changed) && !self.many;
        let (before, spent) = self.before.replace((times, self.spent))?;
        let total = times
            .total
            .checked_sub(before.total)
            .filter(|total| *total > 0)?;
        let busy = times.busy_since(before)? * cores as f32;
        let others = match comparable {
            true => (busy - processors(self.spent - spent, total, cores)).max(0.0),
            false if busy < QUIET => busy,
            false => return None,
        };
        let mean = self
            .mean
            .map_or(others, |mean| mean + WEIGHT * (others - mean));
        self.mean = Some(mean);
        Some(mean)
    }
}

/// Processors that so much use is, in so much time of all processors together, both in microseconds.
fn processors(spent: u64, total: u64, cores: u32) -> f32 {
    spent as f32 / total as f32 * cores as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Proc(tempfile::TempDir);

    impl Proc {
        fn new() -> Proc {
            Proc(tempfile::tempdir().expect("a folder"))
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("in a folder")).expect("the test's own folder");
            fs::write(path, text).expect("the test's own file");
        }

        fn task(&self, pid: i32, ticks: u64) {
            self.write(
                &format!("{pid}/stat"),
                &format!("{pid} (x) R 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 5 0"),
            );
        }

        fn children(&self, pid: i32, children: &str) {
            self.write(&format!("{pid}/task/{pid}/children"), children);
        }
    }

    /// Of so many clock ticks.
    fn times(total: u64, idle: u64) -> CpuTimes {
        CpuTimes {
            total: total * TICK_US,
            idle: idle * TICK_US,
        }
    }

    #[test]
    fn what_is_busy_and_not_ours_is_others() {
        let proc = Proc::new();
        let mut ours = Ours::new(proc.0.path());
        proc.task(5, 100);
        ours.set(&[5]);
        assert_eq!(
            (ours.measure(times(0, 0), 2), ours.sample(times(0, 0), 2)),
            (None, None)
        );
        // Two processors for a hundred ticks each: one and a half busy, one of it ours.
        proc.task(5, 200);
        assert_eq!(
            (
                ours.sample(times(200, 50), 2),
                ours.measure(times(200, 50), 2)
            ),
            (Some(1.0), Some(0.5))
        );
        // Then only ours; the mean follows.
        proc.task(5, 300);
        let mean = ours.measure(times(400, 150), 2).expect("comparable");
        assert!(mean > 0.0 && mean < 0.5, "{mean}");
        assert_eq!(
            ours.sample(times(400, 150), 2),
            Some(1.0),
            "whoever reads in between, nothing is lost"
        );
        ours.skip();
        assert_eq!(ours.sample(times(600, 150), 2), None);
    }

    #[test]
    fn the_children_of_a_task_are_ours_also_when_they_have_ended() {
        let proc = Proc::new();
        let mut ours = Ours::new(proc.0.path());
        proc.task(5, 0);
        proc.children(5, "6 7 ");
        proc.task(6, 40);
        proc.children(6, "8");
        assert_eq!(family(proc.0.path(), 5), BTreeSet::from([5, 6, 7, 8]));
        proc.task(7, 0);
        proc.task(8, 0);
        ours.set(&[5]);
        ours.sample(times(0, 0), 2);
        ours.measure(times(0, 0), 2);
        proc.task(6, 90);
        proc.task(8, 50);
        assert_eq!(ours.sample(times(200, 100), 2), Some(1.0));
        // One has ended, and its parent has it in its own times.
        fs::remove_file(proc.0.path().join("6/stat")).expect("the test's own file");
        proc.task(5, 90);
        proc.task(8, 60);
        proc.children(5, "8 7");
        ours.set(&[5]);
        assert_eq!(
            ours.measure(times(200, 20), 2),
            Some(0.0),
            "that is no change of tasks"
        );
    }

    #[test]
    fn a_task_in_a_group_of_its_own_is_read_by_it_with_all_that_has_run_there() {
        let proc = Proc::new();
        let mount = proc.0.path().join("groups");
        proc.write(
            "self/mountinfo",
            &format!("9 8 0:1 / {} rw - cgroup2 cgroup2 rw\n", mount.display()),
        );
        proc.write("5/cgroup", "1:cpu:/\n0::/sempa-x1/3\n");
        proc.task(5, 1000);
        // The daemon is in a group of everybody's.
        proc.write("4/cgroup", "0::/\n");
        proc.task(4, 7);
        let group = |used: u64| {
            proc.write(
                "groups/sempa-x1/3/cpu.stat",
                &format!("usage_usec {used}\nuser_usec 1\n"),
            )
        };
        group(5_000_000);
        proc.write("groups/sempa-x1/3/cgroup.procs", "5\n9\n0\n");
        assert_eq!(family(proc.0.path(), 5), BTreeSet::from([5, 9]));
        let mut ours = Ours::new(proc.0.path());
        ours.set(&[4, 5]);
        assert_eq!(ours.sample(times(0, 0), 2), None);
        group(5_750_000);
        proc.task(4, 32);
        assert_eq!(ours.sample(times(200, 100), 2), Some(1.0));
    }

    #[test]
    fn a_span_in_which_tasks_came_or_went_gives_no_figure() {
        let proc = Proc::new();
        let mut ours = Ours::new(proc.0.path());
        assert_eq!(ours.measure(times(0, 0), 1), None);
        proc.task(5, 0);
        ours.set(&[5]);
        assert_eq!(ours.measure(times(100, 0), 1), None);
        assert_eq!(ours.measure(times(200, 100), 1), Some(0.0));
        ours.set(&[]);
        assert_eq!(ours.measure(times(300, 100), 1), None);
        assert_eq!(ours.measure(times(400, 200), 1), Some(0.0));
        proc.task(6, 0);
        ours.set(&[6]);
        assert!(
            ours.measure(times(500, 290), 1)
                .is_some_and(|mean| mean < 0.1),
            "so little is nobody's in particular"
        );
        ours.set(&[99]);
        std::fs::remove_dir_all(proc.0.path().join("6")).expect("the test's own folder");
        ours.measure(times(600, 290), 1);
        assert!(
            ours.measure(times(700, 290), 1).is_some(),
            "a process that is not there changes nothing"
        );
    }

    #[test]
    fn a_quiet_host_is_not_looked_into() {
        let mut ours = Ours::new(Path::new("/nowhere"));
        assert!(
            ours.is_needed(times(0, 0), 2),
            "there is nothing to compare with"
        );
        ours.measure(times(0, 0), 2);
        assert!(!ours.is_needed(times(200, 190), 2));
        assert!(ours.is_needed(times(200, 150), 2));
    }

    #[test]
    fn a_real_child_that_computes_is_counted_from_its_birth() {
        let mut ours = Ours::new(Path::new("/proc"));
        let own = std::process::id().cast_signed();
        ours.set(&[own]);
        let code = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo; read x";
        let mut child = std::process::Command::new("sh");
        let pipes = child
            .args(["-c", code])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped());
        let mut child = pipes.spawn().expect("sh");
        std::io::Read::read_exact(child.stdout.as_mut().expect("a pipe"), &mut [0])
            .expect("it says when");
        ours.set(&[own]);
        ours.spend();
        child.kill().expect("it is there");
        child.wait().expect("a child");
        assert!(ours.spent >= 20_000, "{} us", ours.spent);
    }
}
