//! Measures the load of the virtual machine's tasks on this host. The rest of the host's load is
//! the external load of other programs.
//!
//! A task with its own control group is measured by the group's counter, which covers all processes
//! of the task. For other tasks each process is measured, including child processes. All files stay
//! open, so a measurement allocates no memory.
//!
//! The kernel's counters do not include the time of an exited task. Therefore a period in which a
//! task started or ended yields no result.

use crate::proc::{CpuTimes, TICK_US, group_cpu_time, process_usage, read_from_start};
use nix::time::{ClockId, clock_gettime};
use sempa_proto::cgroup::group_dir;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Maximum number of counters (processes and groups); if there are more, a measurement yields no
/// result.
pub const COUNTERS_MAX: usize = 512;
/// Maximum number of bytes that are read from a file; the files are shorter.
const TEXT_BYTES_MAX: usize = 1024;
/// Number of busy processors of the host below which the origin of the load does not matter.
pub const LOW_LOAD_PROCESSORS: f32 = 0.25;
/// Weight of a new measurement in the exponential mean. With one measurement every ten seconds, the
/// mean covers about half a minute.
const MEAN_WEIGHT: f32 = 0.3;
/// Name prefix of the directory in which a tasker creates one control group per task.
const GROUPS_PREFIX: &str = "sempa-";

/// The control group or process that a counter measures.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CounterSource {
    Group(PathBuf),
    Process(i32),
}

/// An open counter of CPU time.
#[derive(Debug)]
struct Counter {
    file: File,
    /// Last value read, in microseconds.
    last_us: u64,
    /// True for a task's main process or group. False for a child process: when it has exited, its
    /// time is included in that of its parent.
    is_task: bool,
}

/// CPU time of the virtual machine's tasks on this host.
#[derive(Debug)]
pub struct TaskLoad {
    proc_dir: PathBuf,
    counters: BTreeMap<CounterSource, Counter>,
    /// True if there are more counters than [`COUNTERS_MAX`].
    too_many: bool,
    /// True if a task started or ended since the last measurement.
    tasks_changed: bool,
    /// CPU time that all tasks have used since this value was created, in microseconds.
    used_us: u64,
    last_sample: Option<(CpuTimes, u64)>,
    last_measurement: Option<(CpuTimes, u64)>,
    /// Time at which the processes were last listed, in clock ticks since boot.
    listed_at: u64,
    external_mean: Option<f32>,
}

/// Returns the time since boot in clock ticks.
fn ticks_now() -> u64 {
    let since = clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map_or(0, |time| time.tv_sec() * 100 + time.tv_nsec() / 10_000_000);
    u64::try_from(since).unwrap_or(0)
}

/// Returns the control group of the task with the main process `pid`; `None` if the task has no own
/// group. `mounts` is the content of /proc/self/mountinfo.
fn group_of(root: &Path, pid: i32, mounts: &[u8]) -> Option<PathBuf> {
    let text = fs::read(root.join(pid.to_string()).join("cgroup")).ok()?;
    let group = group_dir(mounts, &text, None)?;
    let name = group.parent()?.file_name()?.to_str()?;
    (name.starts_with(GROUPS_PREFIX) && group.join("cpu.stat").exists()).then_some(group)
}

/// Returns the child processes of all threads of a process, their child processes, and so on.
fn descendants(root: &Path, pid: i32) -> BTreeSet<i32> {
    let (mut pending, mut all) = (vec![pid], BTreeSet::new());
    while let Some(parent) = pending.pop().filter(|_| all.len() < COUNTERS_MAX) {
        let threads = fs::read_dir(root.join(parent.to_string()).join("task"));
        for thread in threads.into_iter().flatten().flatten() {
            let text = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            let children = text.split_whitespace().filter_map(|pid| pid.parse().ok());
            pending.extend(children.filter(|child| *child != pid && all.insert(*child)));
        }
    }
    all
}

/// Returns all processes of the task with the main process `pid`: the members of its control group,
/// or the process and its descendants if it has no own group.
pub fn task_processes(root: &Path, pid: i32) -> BTreeSet<i32> {
    let mounts = fs::read(root.join("self/mountinfo")).unwrap_or_default();
    let inside = group_of(root, pid, &mounts)
        .and_then(|group| fs::read_to_string(group.join("cgroup.procs")).ok());
    let mut all = match inside {
        // The kernel reports processes outside of this PID namespace as 0.
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

impl CounterSource {
    fn counter(&self, text: &[u8]) -> Option<u64> {
        match self {
            CounterSource::Group(_) => group_cpu_time(text),
            CounterSource::Process(_) => process_usage(text)?.cpu_ticks.checked_mul(TICK_US),
        }
    }
}

impl TaskLoad {
    /// Creates a measurement without any tasks. `root` is /proc except in tests.
    pub fn new(root: &Path) -> TaskLoad {
        TaskLoad {
            proc_dir: root.to_path_buf(),
            counters: BTreeMap::new(),
            too_many: false,
            tasks_changed: false,
            used_us: 0,
            last_sample: None,
            last_measurement: None,
            listed_at: 0,
            external_mean: None,
        }
    }

    /// Sets the main processes whose time is measured, as the daemon lists them. Their descendants
    /// are added.
    pub fn set_processes(&mut self, pids: &[i32]) {
        let mounts = fs::read(self.proc_dir.join("self/mountinfo")).unwrap_or_default();
        let mut wanted: BTreeMap<CounterSource, (i32, bool)> = BTreeMap::new();
        for pid in pids {
            match group_of(&self.proc_dir, *pid, &mounts) {
                Some(group) => drop(wanted.insert(CounterSource::Group(group), (*pid, true))),
                None => {
                    for child in descendants(&self.proc_dir, *pid) {
                        wanted
                            .entry(CounterSource::Process(child))
                            .or_insert((child, false));
                    }
                    wanted.insert(CounterSource::Process(*pid), (*pid, true));
                }
            }
        }
        self.too_many = wanted.len() > COUNTERS_MAX;
        let looked = std::mem::replace(&mut self.listed_at, ticks_now());
        // Reads all counters once more before some of them are removed.
        self.read_counters();
        let changed = &mut self.tasks_changed;
        self.counters.retain(|key, part| {
            let stays = wanted.contains_key(key);
            *changed |= part.is_task && !stays;
            stays
        });
        for (key, (pid, task)) in wanted.into_iter().take(COUNTERS_MAX) {
            if !self.counters.contains_key(&key)
                && let Some(part) = self.open_counter(&key, pid, task, looked)
            {
                self.tasks_changed |= task;
                self.counters.insert(key, part);
            }
        }
    }

    /// Opens a counter. Time used before this call does not count, unless the process started after
    /// `listed_at`, the time of the previous listing; then all its time counts. `task` is true for
    /// a main process or group.
    fn open_counter(
        &self,
        key: &CounterSource,
        pid: i32,
        task: bool,
        listed_at: u64,
    ) -> Option<Counter> {
        let stat = self.proc_dir.join(pid.to_string()).join("stat");
        let file = match key {
            CounterSource::Group(group) => File::open(group.join("cpu.stat")).ok()?,
            CounterSource::Process(_) => File::open(&stat).ok()?,
        };
        let mut text = [0; TEXT_BYTES_MAX];
        let now = key.counter(read_from_start(&file, &mut text).ok()?)?;
        let started = fs::read(stat)
            .ok()
            .and_then(|text| process_usage(&text))
            .map_or(0, |used| used.start_ticks);
        let is_new = listed_at > 0 && started >= listed_at;
        Some(Counter {
            file,
            last_us: if is_new { 0 } else { now },
            is_task: task,
        })
    }

    /// Adds the time that all counters have measured since their last reading to the total.
    fn read_counters(&mut self) {
        let mut text = [0; TEXT_BYTES_MAX];
        for (key, part) in &mut self.counters {
            match read_from_start(&part.file, &mut text)
                .ok()
                .and_then(|text| key.counter(text))
            {
                Some(now) => {
                    self.used_us += now.saturating_sub(part.last_us);
                    part.last_us = part.last_us.max(now);
                }
                None => self.tasks_changed |= part.is_task,
            }
        }
    }

    /// True if the host was so busy since the last measurement that the origin of the load matters.
    /// `times` are the CPU times of the newest sample.
    pub fn origin_matters(&self, times: CpuTimes, cores: u32) -> bool {
        let busy = self
            .last_measurement
            .and_then(|(before, _)| times.busy_since(before));
        busy.is_none_or(|busy| busy * cores as f32 >= LOW_LOAD_PROCESSORS)
    }

    /// Returns the mean number of processors that our tasks have used since the previous call,
    /// which must have belonged to the previous sample. `None` at the first call, and if there are
    /// too many counters. `times` are the CPU times of the newest sample.
    pub fn measure_own_processors(&mut self, times: CpuTimes, cores: u32) -> Option<f32> {
        self.read_counters();
        let (before, spent) = self.last_sample.replace((times, self.used_us))?;
        let total = times
            .total
            .checked_sub(before.total)
            .filter(|total| *total > 0)?;
        (!self.too_many).then(|| to_processors(self.used_us - spent, total, cores))
    }

    /// Records that a sample was not measured; the next period starts with the next call.
    pub fn skip_sample(&mut self) {
        self.last_sample = None;
    }

    /// Returns the external load as an exponential mean over several measurements, in processors.
    /// `None` at the first call, and if a task of ours started or ended in the period, unless the
    /// total load is too low to matter.
    pub fn measure_external_processors(&mut self, times: CpuTimes, cores: u32) -> Option<f32> {
        self.read_counters();
        let comparable = !std::mem::take(&mut self.tasks_changed) && !self.too_many;
        let (before, spent) = self.last_measurement.replace((times, self.used_us))?;
        let total = times
            .total
            .checked_sub(before.total)
            .filter(|total| *total > 0)?;
        let busy = times.busy_since(before)? * cores as f32;
        let external = match comparable {
            true => (busy - to_processors(self.used_us - spent, total, cores)).max(0.0),
            false if busy < LOW_LOAD_PROCESSORS => busy,
            false => return None,
        };
        let mean = self
            .external_mean
            .map_or(external, |mean| mean + MEAN_WEIGHT * (external - mean));
        self.external_mean = Some(mean);
        Some(mean)
    }
}

/// Converts used CPU time to a number of processors. `spent` is the used time and `total` the time
/// of all `cores` processors, both in microseconds.
fn to_processors(spent: u64, total: u64, cores: u32) -> f32 {
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

    /// Returns CPU times; the arguments are clock ticks.
    fn times(total: u64, idle: u64) -> CpuTimes {
        CpuTimes {
            total: total * TICK_US,
            idle: idle * TICK_US,
        }
    }

    /// Busy time that our tasks have not used is external load.
    #[test]
    fn busy_time_of_others_is_external_load() {
        let proc = Proc::new();
        let mut ours = TaskLoad::new(proc.0.path());
        proc.task(5, 100);
        ours.set_processes(&[5]);
        assert_eq!(
            (
                ours.measure_external_processors(times(0, 0), 2),
                ours.measure_own_processors(times(0, 0), 2)
            ),
            (None, None)
        );
        // Two processors had a hundred ticks each: one and a half processors were busy, one of them
        // with our task.
        proc.task(5, 200);
        assert_eq!(
            (
                ours.measure_own_processors(times(200, 50), 2),
                ours.measure_external_processors(times(200, 50), 2)
            ),
            (Some(1.0), Some(0.5))
        );
        // Afterwards only our task is busy, and the mean decreases.
        proc.task(5, 300);
        let mean = ours
            .measure_external_processors(times(400, 150), 2)
            .expect("comparable");
        assert!(mean > 0.0 && mean < 0.5, "{mean}");
        assert_eq!(
            ours.measure_own_processors(times(400, 150), 2),
            Some(1.0),
            "whoever reads in between, nothing is lost"
        );
        ours.skip_sample();
        assert_eq!(ours.measure_own_processors(times(600, 150), 2), None);
    }

    /// The time of a task's child processes counts for the task, even after their exit.
    #[test]
    fn task_children_count_even_after_exit() {
        let proc = Proc::new();
        let mut ours = TaskLoad::new(proc.0.path());
        proc.task(5, 0);
        proc.children(5, "6 7 ");
        proc.task(6, 40);
        proc.children(6, "8");
        assert_eq!(
            task_processes(proc.0.path(), 5),
            BTreeSet::from([5, 6, 7, 8])
        );
        proc.task(7, 0);
        proc.task(8, 0);
        ours.set_processes(&[5]);
        ours.measure_own_processors(times(0, 0), 2);
        ours.measure_external_processors(times(0, 0), 2);
        proc.task(6, 90);
        proc.task(8, 50);
        assert_eq!(ours.measure_own_processors(times(200, 100), 2), Some(1.0));
        // One child process has exited, and its time is included in that of its parent.
        fs::remove_file(proc.0.path().join("6/stat")).expect("the test's own file");
        proc.task(5, 90);
        proc.task(8, 60);
        proc.children(5, "8 7");
        ours.set_processes(&[5]);
        assert_eq!(
            ours.measure_external_processors(times(200, 20), 2),
            Some(0.0),
            "that is no change of tasks"
        );
    }

    #[test]
    fn task_with_own_group_is_measured_by_group() {
        let proc = Proc::new();
        let mount = proc.0.path().join("groups");
        proc.write(
            "self/mountinfo",
            &format!("9 8 0:1 / {} rw - cgroup2 cgroup2 rw\n", mount.display()),
        );
        proc.write("5/cgroup", "1:cpu:/\n0::/sempa-x1/3\n");
        proc.task(5, 1000);
        // The daemon's process is in the root group.
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
        assert_eq!(task_processes(proc.0.path(), 5), BTreeSet::from([5, 9]));
        let mut ours = TaskLoad::new(proc.0.path());
        ours.set_processes(&[4, 5]);
        assert_eq!(ours.measure_own_processors(times(0, 0), 2), None);
        group(5_750_000);
        proc.task(4, 32);
        assert_eq!(ours.measure_own_processors(times(200, 100), 2), Some(1.0));
    }

    /// A period in which a task started or ended yields no result, unless the load is too low to
    /// matter.
    #[test]
    fn period_with_task_change_gives_no_result() {
        let proc = Proc::new();
        let mut ours = TaskLoad::new(proc.0.path());
        assert_eq!(ours.measure_external_processors(times(0, 0), 1), None);
        proc.task(5, 0);
        ours.set_processes(&[5]);
        assert_eq!(ours.measure_external_processors(times(100, 0), 1), None);
        assert_eq!(
            ours.measure_external_processors(times(200, 100), 1),
            Some(0.0)
        );
        ours.set_processes(&[]);
        assert_eq!(ours.measure_external_processors(times(300, 100), 1), None);
        assert_eq!(
            ours.measure_external_processors(times(400, 200), 1),
            Some(0.0)
        );
        proc.task(6, 0);
        ours.set_processes(&[6]);
        assert!(
            ours.measure_external_processors(times(500, 290), 1)
                .is_some_and(|mean| mean < 0.1),
            "so little is nobody's in particular"
        );
        ours.set_processes(&[99]);
        std::fs::remove_dir_all(proc.0.path().join("6")).expect("the test's own folder");
        ours.measure_external_processors(times(600, 290), 1);
        assert!(
            ours.measure_external_processors(times(700, 290), 1)
                .is_some(),
            "a process that is not there changes nothing"
        );
    }

    /// On a host with little load the origin of the load is not measured.
    #[test]
    fn idle_host_needs_no_measurement() {
        let mut ours = TaskLoad::new(Path::new("/nowhere"));
        assert!(
            ours.origin_matters(times(0, 0), 2),
            "there is nothing to compare with"
        );
        ours.measure_external_processors(times(0, 0), 2);
        assert!(!ours.origin_matters(times(200, 190), 2));
        assert!(ours.origin_matters(times(200, 150), 2));
    }

    /// The time of a real child process counts from its start.
    #[test]
    fn new_child_counts_from_its_start() {
        let mut ours = TaskLoad::new(Path::new("/proc"));
        let own = std::process::id().cast_signed();
        ours.set_processes(&[own]);
        let code = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo; read x";
        let mut child = std::process::Command::new("sh");
        let pipes = child
            .args(["-c", code])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped());
        let mut child = pipes.spawn().expect("sh");
        std::io::Read::read_exact(child.stdout.as_mut().expect("a pipe"), &mut [0])
            .expect("it says when");
        ours.set_processes(&[own]);
        ours.read_counters();
        child.kill().expect("it is there");
        child.wait().expect("a child");
        assert!(ours.used_us >= 20_000, "{} us", ours.used_us);
    }
}
