//! Measures the load of the virtual machine's tasks on this host. All other load of the host is
//! external load.
//!
//! A task with its own control group is measured by the group's counter, which covers all processes
//! of the task. For all other tasks, each process of the task is measured, including child
//! processes. All files stay open, so a measurement allocates no memory.
//!
//! The kernel's counters do not include the time of an exited task. Therefore a period in which a
//! task started or ended yields no result.

use crate::proc::{CpuTimes, TICK_US, group_cpu_time_us, parse_process_usage, read_from_start};
use nix::time::{ClockId, clock_gettime};
use sempa_proto::cgroup::group_dir;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Maximum number of open counters of processes and control groups. If more counters are needed, a
/// measurement yields no result.
pub const COUNTERS_MAX: usize = 512;
/// Maximum number of bytes that are read from a counter's file; the files are shorter.
const COUNTER_FILE_BYTES_MAX: usize = 1024;
/// Number of busy processors of the host below which the origin of the load does not matter.
pub const LOW_LOAD_PROCESSORS: f32 = 0.25;
/// Weight of a new measurement in the exponential mean. With one measurement every ten seconds, the
/// mean covers about half a minute.
const MEAN_WEIGHT: f32 = 0.3;
/// Name prefix of the directory in which a tasker creates one control group per task.
const GROUPS_DIR_PREFIX: &str = "sempa-";

/// The control group or process that a counter measures.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CounterSource {
    Group(PathBuf),
    Process(i32),
}

/// An open counter of CPU time.
#[derive(Debug)]
struct CpuTimeCounter {
    file: File,
    /// Value of the counter at its last reading, in microseconds.
    last_us: u64,
    /// True for a task's main process or control group. False for a child process; after its exit,
    /// the time of a child process is included in the time of its parent.
    is_task: bool,
}

/// CPU time of the virtual machine's tasks on this host.
#[derive(Debug)]
pub struct TaskLoad {
    proc_dir: PathBuf,
    counters: BTreeMap<CounterSource, CpuTimeCounter>,
    /// True if there are more than [`COUNTERS_MAX`] counters, so that some are missing.
    too_many_counters: bool,
    /// True if a task started or ended since the last measurement.
    tasks_changed: bool,
    /// CPU time that all tasks have used since this value was created, in microseconds.
    used_us: u64,
    /// The CPU times of the host and the value of `used_us` at the last sample in which the tasks
    /// were measured. `None` before the first such sample and after a skipped sample.
    last_sample: Option<(CpuTimes, u64)>,
    /// The CPU times of the host and the value of `used_us` at the last measurement of the external
    /// load.
    last_measurement: Option<(CpuTimes, u64)>,
    /// Time at which the processes were last listed, in clock ticks since boot.
    listed_at_ticks: u64,
    mean_external_processors: Option<f32>,
}

/// Returns the time since boot in clock ticks.
fn ticks_since_boot() -> u64 {
    let ticks = clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map_or(0, |time| time.tv_sec() * 100 + time.tv_nsec() / 10_000_000);
    u64::try_from(ticks).unwrap_or(0)
}

/// Returns the control group of the task with the main process `pid`; `None` if the task has no
/// control group of its own. `mounts` is the content of /proc/self/mountinfo.
fn task_group(root: &Path, pid: i32, mounts: &[u8]) -> Option<PathBuf> {
    let text = fs::read(root.join(pid.to_string()).join("cgroup")).ok()?;
    let group = group_dir(mounts, &text, None)?;
    let name = group.parent()?.file_name()?.to_str()?;
    (name.starts_with(GROUPS_DIR_PREFIX) && group.join("cpu.stat").exists()).then_some(group)
}

/// Returns the child processes of all threads of a process; none if the process has ended. `root`
/// is /proc except in tests.
pub fn child_processes(root: &Path, pid: i32) -> Vec<i32> {
    let threads = fs::read_dir(root.join(pid.to_string()).join("task"));
    let mut child_pids = Vec::new();
    for thread in threads.into_iter().flatten().flatten() {
        let text = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        child_pids.extend(
            text.split_whitespace()
                .filter_map(|pid| pid.parse::<i32>().ok()),
        );
    }
    child_pids
}

/// Returns all descendants of a process: the child processes of all its threads, the child
/// processes of these, and so on. Stops after about [`COUNTERS_MAX`] processes.
fn descendants(root: &Path, pid: i32) -> BTreeSet<i32> {
    let (mut unvisited_pids, mut descendant_pids) = (vec![pid], BTreeSet::new());
    while let Some(parent_pid) = unvisited_pids
        .pop()
        .filter(|_| descendant_pids.len() < COUNTERS_MAX)
    {
        let children = child_processes(root, parent_pid).into_iter();
        unvisited_pids.extend(
            children.filter(|child_pid| *child_pid != pid && descendant_pids.insert(*child_pid)),
        );
    }
    descendant_pids
}

/// Returns all processes of the task with the main process `pid`: the members of the task's control
/// group, or the main process and its descendants if the task has no control group of its own.
pub fn task_processes(root: &Path, pid: i32) -> BTreeSet<i32> {
    let mounts = fs::read(root.join("self/mountinfo")).unwrap_or_default();
    let group_members = task_group(root, pid, &mounts)
        .and_then(|group| fs::read_to_string(group.join("cgroup.procs")).ok());
    let mut pids = match group_members {
        // The kernel reports processes outside of this PID namespace as 0.
        Some(text) => text
            .lines()
            .filter_map(|line| line.parse().ok())
            .filter(|pid| *pid > 0)
            .collect(),
        None => descendants(root, pid),
    };
    pids.insert(pid);
    pids
}

impl CounterSource {
    /// Parses the counter's file; returns the CPU time in microseconds.
    fn parse_counter_us(&self, text: &[u8]) -> Option<u64> {
        match self {
            Self::Group(_) => group_cpu_time_us(text),
            Self::Process(_) => parse_process_usage(text)?.cpu_ticks.checked_mul(TICK_US),
        }
    }
}

impl TaskLoad {
    /// Creates a load measurement without tasks. `root` is /proc except in tests.
    pub fn new(root: &Path) -> Self {
        Self {
            proc_dir: root.to_path_buf(),
            counters: BTreeMap::new(),
            too_many_counters: false,
            tasks_changed: false,
            used_us: 0,
            last_sample: None,
            last_measurement: None,
            listed_at_ticks: 0,
            mean_external_processors: None,
        }
    }

    /// Sets the main processes of the tasks that are measured, as the daemon lists them. The
    /// descendants of the processes are measured, too.
    pub fn set_task_processes(&mut self, pids: &[i32]) {
        let mounts = fs::read(self.proc_dir.join("self/mountinfo")).unwrap_or_default();
        let mut new_sources: BTreeMap<CounterSource, (i32, bool)> = BTreeMap::new();
        for pid in pids {
            match task_group(&self.proc_dir, *pid, &mounts) {
                Some(group) => drop(new_sources.insert(CounterSource::Group(group), (*pid, true))),
                None => {
                    for child_pid in descendants(&self.proc_dir, *pid) {
                        new_sources
                            .entry(CounterSource::Process(child_pid))
                            .or_insert((child_pid, false));
                    }
                    new_sources.insert(CounterSource::Process(*pid), (*pid, true));
                }
            }
        }
        self.too_many_counters = new_sources.len() > COUNTERS_MAX;
        let previous_listing_ticks =
            std::mem::replace(&mut self.listed_at_ticks, ticks_since_boot());
        // All counters are read once more before some of them are removed.
        self.read_counters();
        let tasks_changed = &mut self.tasks_changed;
        self.counters.retain(|source, counter| {
            let is_listed = new_sources.contains_key(source);
            *tasks_changed |= counter.is_task && !is_listed;
            is_listed
        });
        for (source, (pid, is_task)) in new_sources.into_iter().take(COUNTERS_MAX) {
            if !self.counters.contains_key(&source)
                && let Some(counter) =
                    self.open_counter(&source, pid, is_task, previous_listing_ticks)
            {
                self.tasks_changed |= is_task;
                self.counters.insert(source, counter);
            }
        }
    }

    /// Opens a counter. If the process started after the previous listing (at `listed_at_ticks`),
    /// all its time counts; otherwise only the time after this call counts. `is_main` is true for a
    /// main process or control group.
    fn open_counter(
        &self,
        source: &CounterSource,
        pid: i32,
        is_main: bool,
        listed_at_ticks: u64,
    ) -> Option<CpuTimeCounter> {
        let stat = self.proc_dir.join(pid.to_string()).join("stat");
        let file = match source {
            CounterSource::Group(group) => File::open(group.join("cpu.stat")).ok()?,
            CounterSource::Process(_) => File::open(&stat).ok()?,
        };
        let mut buffer = [0; COUNTER_FILE_BYTES_MAX];
        let current_us = source.parse_counter_us(read_from_start(&file, &mut buffer).ok()?)?;
        let start_ticks = fs::read(stat)
            .ok()
            .and_then(|buffer| parse_process_usage(&buffer))
            .map_or(0, |usage| usage.start_ticks);
        let is_new = listed_at_ticks > 0 && start_ticks >= listed_at_ticks;
        Some(CpuTimeCounter {
            file,
            last_us: if is_new { 0 } else { current_us },
            is_task: is_main,
        })
    }

    /// Adds the time that each counter has measured since its last reading to `used_us`.
    fn read_counters(&mut self) {
        let mut buffer = [0; COUNTER_FILE_BYTES_MAX];
        for (source, counter) in &mut self.counters {
            match read_from_start(&counter.file, &mut buffer)
                .ok()
                .and_then(|buffer| source.parse_counter_us(buffer))
            {
                Some(current_us) => {
                    self.used_us += current_us.saturating_sub(counter.last_us);
                    counter.last_us = counter.last_us.max(current_us);
                }
                None => self.tasks_changed |= counter.is_task,
            }
        }
    }

    /// True if the host was so busy since the last measurement of the external load that the origin
    /// of the load matters. `times` are the CPU times of the newest sample.
    pub fn origin_matters(&self, times: CpuTimes, cores: u32) -> bool {
        let busy_processors = self
            .last_measurement
            .and_then(|(previous_times, _)| times.busy_since(previous_times));
        busy_processors
            .is_none_or(|busy_processors| busy_processors * cores as f32 >= LOW_LOAD_PROCESSORS)
    }

    /// Returns the mean number of processors that the tasks have used since the previous call,
    /// which must have belonged to the previous sample. `None` at the first call, after a skipped
    /// sample, and if there are too many counters. `times` are the CPU times of the newest sample.
    pub fn measure_task_processors(&mut self, times: CpuTimes, cores: u32) -> Option<f32> {
        self.read_counters();
        let (previous_times, previous_used_us) = self.last_sample.replace((times, self.used_us))?;
        let total_us = times
            .total_us
            .checked_sub(previous_times.total_us)
            .filter(|total_us| *total_us > 0)?;
        (!self.too_many_counters)
            .then(|| to_processor_count(self.used_us - previous_used_us, total_us, cores))
    }

    /// Forgets all measurements of the host, because the CPU times begin to describe another group
    /// of processes. The next measurements yield no result.
    pub fn restart(&mut self) {
        (self.last_sample, self.last_measurement) = (None, None);
        self.mean_external_processors = None;
    }

    /// Records that a sample is not measured. The next period starts with the next call of
    /// [`TaskLoad::measure_task_processors`].
    pub fn skip_sample(&mut self) {
        self.last_sample = None;
    }

    /// Returns the external load in processors, as an exponential mean over several measurements.
    /// `None` at the first call. Also `None` if a task started or ended in the period or there are
    /// too many counters, unless the total load is too low to matter.
    pub fn measure_external_processors(&mut self, times: CpuTimes, cores: u32) -> Option<f32> {
        self.read_counters();
        let is_comparable = !std::mem::take(&mut self.tasks_changed) && !self.too_many_counters;
        let (previous_times, previous_used_us) =
            self.last_measurement.replace((times, self.used_us))?;
        let total_us = times
            .total_us
            .checked_sub(previous_times.total_us)
            .filter(|total_us| *total_us > 0)?;
        let busy_processors = times.busy_since(previous_times)? * cores as f32;
        let external_processors = match is_comparable {
            true => (busy_processors
                - to_processor_count(self.used_us - previous_used_us, total_us, cores))
            .max(0.0),
            false if busy_processors < LOW_LOAD_PROCESSORS => busy_processors,
            false => return None,
        };
        let mean = self
            .mean_external_processors
            .map_or(external_processors, |mean| {
                mean + MEAN_WEIGHT * (external_processors - mean)
            });
        self.mean_external_processors = Some(mean);
        Some(mean)
    }
}

/// Converts used CPU time to a number of processors. `used_us` is the used time and `total_us` the
/// total time of all `cores` processors, both in microseconds.
fn to_processor_count(used_us: u64, total_us: u64, cores: u32) -> f32 {
    used_us as f32 / total_us as f32 * cores as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    struct ProcFixture(tempfile::TempDir);

    impl ProcFixture {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a folder"))
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("in a folder")).expect("the test's own folder");
            fs::write(path, text).expect("the test's own file");
        }

        fn write_process(&self, pid: i32, ticks: u64) {
            self.write(
                &format!("{pid}/stat"),
                &format!("{pid} (x) R 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 5 0"),
            );
        }

        fn write_children(&self, pid: i32, children: &str) {
            self.write(&format!("{pid}/task/{pid}/children"), children);
        }
    }

    /// Returns CPU times; the arguments are clock ticks.
    fn cpu_times(total_ticks: u64, idle_ticks: u64) -> CpuTimes {
        CpuTimes {
            total_us: total_ticks * TICK_US,
            idle_us: idle_ticks * TICK_US,
        }
    }

    /// Busy time that the virtual machine's tasks have not used is external load.
    #[test]
    fn busy_time_of_others_is_external_load() {
        let proc = ProcFixture::new();
        let mut task_load = TaskLoad::new(proc.0.path());
        proc.write_process(5, 100);
        task_load.set_task_processes(&[5]);
        assert_eq!(
            (
                task_load.measure_external_processors(cpu_times(0, 0), 2),
                task_load.measure_task_processors(cpu_times(0, 0), 2)
            ),
            (None, None)
        );
        // Two processors had a hundred ticks each. One and a half processors were busy, one of them
        // with the task.
        proc.write_process(5, 200);
        assert_eq!(
            (
                task_load.measure_task_processors(cpu_times(200, 50), 2),
                task_load.measure_external_processors(cpu_times(200, 50), 2)
            ),
            (Some(1.0), Some(0.5))
        );
        // Afterwards only the task is busy, and the mean decreases.
        proc.write_process(5, 300);
        let mean = task_load
            .measure_external_processors(cpu_times(400, 150), 2)
            .expect("comparable");
        assert!(mean > 0.0 && mean < 0.5, "{mean}");
        assert_eq!(
            task_load.measure_task_processors(cpu_times(400, 150), 2),
            Some(1.0),
            "a read in between loses nothing"
        );
        task_load.skip_sample();
        assert_eq!(
            task_load.measure_task_processors(cpu_times(600, 150), 2),
            None
        );
        // Times that describe another group of processes are not compared with earlier ones.
        task_load.restart();
        assert_eq!(
            (
                task_load.measure_task_processors(cpu_times(1000, 150), 2),
                task_load.measure_external_processors(cpu_times(1000, 150), 2),
                task_load.measure_external_processors(cpu_times(1200, 350), 2),
            ),
            (None, None, Some(0.0))
        );
    }

    /// A child's time is counted after its exit as well.
    #[test]
    fn task_children_count_even_after_exit() {
        let proc = ProcFixture::new();
        let mut task_load = TaskLoad::new(proc.0.path());
        proc.write_process(5, 0);
        proc.write_children(5, "6 7 ");
        proc.write_process(6, 40);
        proc.write_children(6, "8");
        assert_eq!(
            task_processes(proc.0.path(), 5),
            BTreeSet::from([5, 6, 7, 8])
        );
        proc.write_process(7, 0);
        proc.write_process(8, 0);
        task_load.set_task_processes(&[5]);
        task_load.measure_task_processors(cpu_times(0, 0), 2);
        task_load.measure_external_processors(cpu_times(0, 0), 2);
        proc.write_process(6, 90);
        proc.write_process(8, 50);
        assert_eq!(
            task_load.measure_task_processors(cpu_times(200, 100), 2),
            Some(1.0)
        );
        // One child process has exited, and its time is included in its parent's time.
        fs::remove_file(proc.0.path().join("6/stat")).expect("the test's own file");
        proc.write_process(5, 90);
        proc.write_process(8, 60);
        proc.write_children(5, "8 7");
        task_load.set_task_processes(&[5]);
        assert_eq!(
            task_load.measure_external_processors(cpu_times(200, 20), 2),
            Some(0.0),
            "that is no change of tasks"
        );
    }

    #[test]
    fn task_with_own_group_is_measured_by_group() {
        let proc = ProcFixture::new();
        let cgroup_mount = proc.0.path().join("groups");
        proc.write(
            "self/mountinfo",
            &format!(
                "9 8 0:1 / {} rw - cgroup2 cgroup2 rw\n",
                cgroup_mount.display()
            ),
        );
        proc.write("5/cgroup", "1:cpu:/\n0::/sempa-x1/3\n");
        proc.write_process(5, 1000);
        // The daemon's process is in the root group.
        proc.write("4/cgroup", "0::/\n");
        proc.write_process(4, 7);
        let write_group_time = |used_us: u64| {
            proc.write(
                "groups/sempa-x1/3/cpu.stat",
                &format!("usage_usec {used_us}\nuser_usec 1\n"),
            )
        };
        write_group_time(5_000_000);
        proc.write("groups/sempa-x1/3/cgroup.procs", "5\n9\n0\n");
        assert_eq!(task_processes(proc.0.path(), 5), BTreeSet::from([5, 9]));
        let mut task_load = TaskLoad::new(proc.0.path());
        task_load.set_task_processes(&[4, 5]);
        assert_eq!(task_load.measure_task_processors(cpu_times(0, 0), 2), None);
        write_group_time(5_750_000);
        proc.write_process(4, 32);
        assert_eq!(
            task_load.measure_task_processors(cpu_times(200, 100), 2),
            Some(1.0)
        );
    }

    /// A period in which a task started or ended yields no result, unless the total load is too low
    /// to matter.
    #[test]
    fn period_with_task_change_gives_no_result() {
        let proc = ProcFixture::new();
        let mut task_load = TaskLoad::new(proc.0.path());
        assert_eq!(
            task_load.measure_external_processors(cpu_times(0, 0), 1),
            None
        );
        proc.write_process(5, 0);
        task_load.set_task_processes(&[5]);
        assert_eq!(
            task_load.measure_external_processors(cpu_times(100, 0), 1),
            None
        );
        assert_eq!(
            task_load.measure_external_processors(cpu_times(200, 100), 1),
            Some(0.0)
        );
        task_load.set_task_processes(&[]);
        assert_eq!(
            task_load.measure_external_processors(cpu_times(300, 100), 1),
            None
        );
        assert_eq!(
            task_load.measure_external_processors(cpu_times(400, 200), 1),
            Some(0.0)
        );
        proc.write_process(6, 0);
        task_load.set_task_processes(&[6]);
        assert!(
            task_load
                .measure_external_processors(cpu_times(500, 290), 1)
                .is_some_and(|mean| mean < 0.1),
            "so little is nobody's in particular"
        );
        task_load.set_task_processes(&[99]);
        fs::remove_dir_all(proc.0.path().join("6")).expect("the test's own folder");
        task_load.measure_external_processors(cpu_times(600, 290), 1);
        assert!(
            task_load
                .measure_external_processors(cpu_times(700, 290), 1)
                .is_some(),
            "a process that is not there changes nothing"
        );
    }

    #[test]
    fn idle_host_needs_no_measurement() {
        let mut task_load = TaskLoad::new(Path::new("/nowhere"));
        assert!(
            task_load.origin_matters(cpu_times(0, 0), 2),
            "there is nothing to compare with"
        );
        task_load.measure_external_processors(cpu_times(0, 0), 2);
        assert!(!task_load.origin_matters(cpu_times(200, 190), 2));
        assert!(task_load.origin_matters(cpu_times(200, 150), 2));
    }

    /// The time of a child process that started after the last listing counts from its start. The
    /// test uses a real process.
    #[test]
    fn new_child_counts_from_its_start() {
        let mut task_load = TaskLoad::new(Path::new("/proc"));
        let own_pid = std::process::id().cast_signed();
        task_load.set_task_processes(&[own_pid]);
        let code = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo; read x";
        let mut child = std::process::Command::new("sh");
        let command_with_pipes = child
            .args(["-c", code])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped());
        let mut child = command_with_pipes.spawn().expect("sh");
        std::io::Read::read_exact(child.stdout.as_mut().expect("a pipe"), &mut [0])
            .expect("it says when");
        task_load.set_task_processes(&[own_pid]);
        task_load.read_counters();
        child.kill().expect("it is there");
        child.wait().expect("a child");
        assert!(task_load.used_us >= 20_000, "{} us", task_load.used_us);
    }
}
