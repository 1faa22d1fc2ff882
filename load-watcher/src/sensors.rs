//! Observes this machine: its load, its logins and the use of its keyboards. Everything here is the
//! same for all virtual machines on this machine.

use crate::SourceArgs;
use anyhow::Context;
use pvm_load_watcher::file_watcher::{
    FileWatcher, WakeReasons, WatchedPath, read_login_records, utmp_path,
};
use pvm_load_watcher::host_policy::{ADMIN_FILE, trusted_path};
use pvm_load_watcher::load_attribution::{LOW_LOAD_PROCESSORS, TaskLoad};
use pvm_load_watcher::logind::LogindClient;
use pvm_load_watcher::owner::{Evidence, LoginRecords};
use pvm_load_watcher::owner_override::OVERRIDES_DIR;
use pvm_load_watcher::probes::{InputProbe, read_session_files, terminal_input_times};
use pvm_load_watcher::proc::CpuTimes;
use pvm_load_watcher::report::{Reporter, SAMPLE_INTERVAL_CHANGING_LOAD};
use pvm_load_watcher::sampler::Sampler;
use pvm_load_watcher::sessions::Session;
use pvm_load_watcher::system::time_of_day;
use pvm_load_watcher::user_files::FILE_PREFIX;
use sempa_proto::Micros;
use sempa_proto::load::{LoadSample, Login};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Minimum interval between two readings of the expensive sources, and between two assessments
/// while no source changes.
const SLOW_CHECKS_INTERVAL: Micros = Micros::from_secs(5);
/// Number of microseconds in a minute.
const MINUTE_US: u64 = 60_000_000;
/// Interval at which paths that cannot be watched are read.
const UNWATCHED_READ_INTERVAL: Micros = Micros::from_secs(10);
/// Error context of a failed sample.
const SAMPLING_CONTEXT: &str = "sampling the load of this host";

// Indices of the watched paths in [`FileWatcher`].
const UTMP_PATH_INDEX: usize = 0;
const SESSIONS_PATH_INDEX: usize = 1;
pub(crate) const ADMIN_POLICY_PATH_INDEX: usize = 2;
pub(crate) const OVERRIDES_PATH_INDEX: usize = 3;
/// Only a load watcher that observes the machine for itself watches this path.
pub(crate) const USER_POLICY_PATH_INDEX: usize = 4;
/// Only the load watcher of a whole machine watches this path, the last of its paths.
pub(crate) const ACCOUNT_PATH_INDEX: usize = 4;

/// The path that only some load watchers watch.
#[derive(Clone, Debug)]
pub(crate) enum OtherPath {
    /// At [`USER_POLICY_PATH_INDEX`]: the policy file of the user of the virtual machine.
    UserPolicy(PathBuf),
    /// At [`ACCOUNT_PATH_INDEX`]: the folder in which taskers record their guests.
    Account(PathBuf),
}

/// Paths of the policies that apply to all users.
#[derive(Clone, Debug)]
pub(crate) struct CommonPaths {
    pub(crate) admin: PathBuf,
    pub(crate) overrides: PathBuf,
}

impl CommonPaths {
    /// Returns the paths that the arguments request, as far as the user of this process may do so.
    /// Logs what is refused.
    pub(crate) fn from_args(args: &SourceArgs) -> Self {
        let user = nix::unistd::getuid();
        let accept = |path: &PathBuf, default_path: &str| {
            let (path, warning) = trusted_path(path.clone(), Path::new(default_path), user);
            warning.iter().for_each(|line| tracing::warn!("{line}"));
            path
        };
        Self {
            admin: accept(&args.admin_policy, ADMIN_FILE),
            overrides: accept(&args.owner_words, OVERRIDES_DIR),
        }
    }
}

/// The results of the last reading of each source.
pub(crate) struct Observations {
    pub(crate) login_records: LoginRecords,
    pub(crate) sessions: Evidence<Vec<Session>>,
    /// The reason why logind cannot be queried over D-Bus; `sessions` was then read from logind's
    /// files. `None` if logind has answered.
    pub(crate) logind_error: Option<String>,
    pub(crate) terminal_input: BTreeMap<String, Micros>,
    pub(crate) input_probe: InputProbe,
    pub(crate) external_load: Evidence<f32>,
}

/// The result of a periodic check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CheckResult {
    pub(crate) must_assess: bool,
    /// True if the slow checks were due.
    pub(crate) was_slow: bool,
    /// True if unwatched paths were due: policies that close the host must be read again.
    pub(crate) must_retry_policies: bool,
}

pub(crate) struct Sensors {
    sampler: Sampler,
    file_watcher: FileWatcher,
    pub(crate) observations: Observations,
    /// `None` if no thread for queries of logind could be started; only logind's files are read
    /// then.
    logind_client: Option<LogindClient>,
    pub(crate) last_sample: LoadSample,
    sessions_dir: PathBuf,
    terminals_dir: PathBuf,
    /// Times, by the caller's monotonic clock, at which each periodic action is due next.
    slow_checks_due: Micros,
    unwatched_read_due: Micros,
    /// Minute of the last call of [`Sensors::take_new_minute`], since 1970.
    last_minute: u64,
}

impl Sensors {
    /// Opens all sources. `other_path` is watched, too.
    ///
    /// # Errors
    /// The load of this host cannot be sampled.
    pub(crate) fn open(
        args: &SourceArgs,
        paths: &CommonPaths,
        other_path: OtherPath,
    ) -> anyhow::Result<Self> {
        let mut sampler = Sampler::open(Path::new("/proc")).context(SAMPLING_CONTEXT)?;
        if let Some(meminfo) = &args.meminfo {
            sampler = sampler
                .with_meminfo_file(meminfo)
                .context(SAMPLING_CONTEXT)?;
        }
        let last_sample = sampler.sample(time_of_day()).context(SAMPLING_CONTEXT)?;
        let watched_paths = vec![
            WatchedPath::file(utmp_path(args.utmp.clone())),
            WatchedPath::dir(args.sessions.clone(), ""),
            WatchedPath::settings(paths.admin.clone()),
            WatchedPath::dir(paths.overrides.clone(), FILE_PREFIX),
            match other_path {
                OtherPath::UserPolicy(path) => WatchedPath::settings(path),
                OtherPath::Account(dir) => WatchedPath::dir(dir, ""),
            },
        ];
        let file_watcher = FileWatcher::new(watched_paths);
        let logind_client = LogindClient::start_queries(args.bus.clone())
            .inspect_err(|e| tracing::warn!("logind cannot be queried: {e}"))
            .ok();
        let observations = Observations {
            login_records: read_login_records(file_watcher.path(UTMP_PATH_INDEX)),
            sessions: Evidence::Unavailable("not read yet".into()),
            logind_error: None,
            terminal_input: BTreeMap::new(),
            input_probe: InputProbe::new(args.interrupts.clone()),
            external_load: Evidence::Unavailable("not measured yet".into()),
        };
        let mut sensors = Self {
            sampler,
            file_watcher,
            observations,
            logind_client,
            last_sample,
            sessions_dir: args.sessions.clone(),
            terminals_dir: args.terminals.clone(),
            slow_checks_due: Micros::default(),
            unwatched_read_due: Micros::default(),
            last_minute: time_of_day().0 / MINUTE_US,
        };
        sensors.read_sessions();
        sensors.observations.input_probe.read_if_due(time_of_day());
        Ok(sensors)
    }

    /// Returns the descriptor that is readable after [`Sensors::take_session_change`] has something
    /// to take.
    pub(crate) fn logind_fd(&self) -> Option<BorrowedFd<'_>> {
        self.logind_client.as_ref().map(LogindClient::fd)
    }

    pub(crate) fn records_path(&self) -> &Path {
        self.file_watcher.path(UTMP_PATH_INDEX)
    }

    /// Waits until a watched path may have changed, `fd` is readable, or the time is over.
    pub(crate) fn wait(&mut self, timeout: Duration, fd: BorrowedFd<'_>) -> WakeReasons {
        self.file_watcher.wait(timeout, Some(fd))
    }

    /// True if the login records cannot be watched, so that each sample must read them.
    pub(crate) fn must_poll_logins(&self) -> bool {
        self.file_watcher.is_unwatched(UTMP_PATH_INDEX)
    }

    /// Reads the logins and sessions, if `selects_index` accepts their path index. Sets missing
    /// watches of all selected paths before, so that no change between watch and read is missed:
    /// the caller must read the selected policies afterwards.
    pub(crate) fn read(&mut self, selects_index: impl Fn(usize) -> bool) {
        (0..self.file_watcher.path_count())
            .filter(|path_index| selects_index(*path_index))
            .for_each(|path_index| self.file_watcher.set_missing_watches(path_index));
        if selects_index(UTMP_PATH_INDEX) {
            self.observations.login_records = read_login_records(self.records_path());
        }
        if selects_index(SESSIONS_PATH_INDEX) {
            self.read_sessions();
        }
    }

    /// Reads the sessions again if logind has reported a change. Returns true if so.
    pub(crate) fn take_session_change(&mut self) -> bool {
        let has_changed = self
            .logind_client
            .as_ref()
            .is_some_and(LogindClient::take_change_event);
        if has_changed {
            self.read_sessions();
        }
        has_changed
    }

    /// Reads the sessions from logind. If logind cannot be queried, reads logind's files, which
    /// contain less information.
    fn read_sessions(&mut self) {
        let query_error = match self.logind_client.as_ref().map(LogindClient::sessions) {
            Some(Evidence::Known(sessions)) => {
                (self.observations.sessions, self.observations.logind_error) =
                    (Evidence::Known(sessions), None);
                return;
            }
            Some(Evidence::Unavailable(query_error)) => query_error,
            None => "logind cannot be queried".into(),
        };
        (self.observations.sessions, self.observations.logind_error) =
            (read_session_files(&self.sessions_dir), Some(query_error));
    }

    /// Reads when there was input at the terminals of these logins.
    pub(crate) fn read_terminals(&mut self, logins: &[Login]) {
        self.observations.terminal_input = terminal_input_times(&self.terminals_dir, logins);
    }

    /// Watches the terminals without input for `idle_after`, because input there must be noticed at
    /// once.
    pub(crate) fn watch_idle_terminals(&mut self, now: Micros, idle_after: Micros) {
        let terminals = self.observations.terminal_input.iter();
        let idle_paths: BTreeSet<PathBuf> = terminals
            .filter(|(_, at)| now.since(**at) >= idle_after)
            .map(|(line, _)| self.terminals_dir.join(line))
            .collect();
        self.file_watcher.watch_idle_terminals(&idle_paths);
    }

    /// Sets whether policies depend on the available memory.
    pub(crate) fn set_memory_matters(&mut self, matters: bool) {
        self.sampler.set_memory_matters(matters);
    }

    /// Takes a sample. When slow checks are due at `now`, determines first which control group the
    /// sample describes. Returns true if earlier CPU times cannot be compared with the new ones.
    ///
    /// # Errors
    /// The load of this host cannot be sampled.
    pub(crate) fn take_sample(&mut self, now: Micros) -> anyhow::Result<bool> {
        if now >= self.slow_checks_due {
            self.sampler.select_limiting_group();
        }
        self.last_sample = self
            .sampler
            .sample(time_of_day())
            .context(SAMPLING_CONTEXT)?;
        Ok(self.sampler.take_cpu_times_restart())
    }

    /// Returns true if a new minute of the time of day has begun since the last call.
    pub(crate) fn take_new_minute(&mut self) -> bool {
        let minute = time_of_day().0 / MINUTE_US;
        std::mem::replace(&mut self.last_minute, minute) != minute
    }

    /// Returns the time until the next sample. If a policy depends on the time of day, the next
    /// sample is no later than the next full minute.
    pub(crate) fn next_interval(&self, reporter: &mut Reporter, depends_on_clock: bool) -> Micros {
        let interval = reporter.next_sample_interval(&self.last_sample);
        let interval = match self.must_poll_logins() {
            true => SAMPLE_INTERVAL_CHANGING_LOAD,
            false => interval,
        };
        match depends_on_clock {
            true => interval.min(Micros(MINUTE_US - time_of_day().0 % MINUTE_US)),
            false => interval,
        }
    }

    /// Returns the CPU times of the newest sample.
    pub(crate) fn cpu_times(&self) -> Option<CpuTimes> {
        self.sampler.cpu_times()
    }

    /// Executes the periodic actions that are due at `now`, a time of the caller's monotonic clock.
    pub(crate) fn run_periodic_checks(&mut self, now: Micros) -> CheckResult {
        self.retry_unwatched(|path_index| path_index == UTMP_PATH_INDEX);
        if now < self.slow_checks_due {
            return CheckResult {
                must_assess: self.must_poll_logins(),
                ..CheckResult::default()
            };
        }
        self.slow_checks_due = now + SLOW_CHECKS_INTERVAL;
        let must_retry_policies = now >= self.unwatched_read_due;
        if must_retry_policies {
            self.unwatched_read_due = now + UNWATCHED_READ_INTERVAL;
        }
        self.observations.input_probe.read_if_due(time_of_day());
        CheckResult {
            must_assess: true,
            was_slow: true,
            must_retry_policies,
        }
    }

    /// Tries again to watch the unwatched paths whose index `selects_index` accepts, and reads
    /// logins and sessions among them. Returns, by index, which paths the caller must read now.
    pub(crate) fn retry_unwatched(&mut self, selects_index: impl Fn(usize) -> bool) -> Vec<bool> {
        let must_read: Vec<bool> = (0..self.file_watcher.path_count())
            .map(|path_index| {
                selects_index(path_index) && self.file_watcher.retry_watch(path_index)
            })
            .collect();
        self.read(|path_index| must_read[path_index]);
        must_read
    }
}

/// True for the index of a path that is not that of the login records.
pub(crate) fn is_not_login_records(path_index: usize) -> bool {
    path_index != UTMP_PATH_INDEX
}

/// Measures how much of the machine's load some tasks cause.
#[derive(Debug)]
pub(crate) struct LoadMeter {
    task_load: TaskLoad,
    /// External load in the last sample, in processors; 0 if unknown.
    external_processors: f32,
}

impl LoadMeter {
    pub(crate) fn new() -> Self {
        Self {
            task_load: TaskLoad::new(Path::new("/proc")),
            external_processors: 0.0,
        }
    }

    /// Forgets all measurements, because the CPU times begin to describe another group of
    /// processes.
    pub(crate) fn restart(&mut self) {
        self.task_load.restart();
    }

    /// Sets the main processes whose load is not external.
    pub(crate) fn set_task_processes(&mut self, pids: &[i32]) {
        self.task_load.set_task_processes(pids);
    }

    /// Returns how many processors the tasks use. Returns `None` if less than
    /// [`LOW_LOAD_PROCESSORS`] are used in total, if the number cannot be measured, or if the
    /// external load has risen so much that the tasks must be listed again, with `list_processes`.
    pub(crate) fn measure_tasks(
        &mut self,
        sample: &LoadSample,
        times: Option<CpuTimes>,
        list_processes: impl FnOnce() -> Vec<i32>,
    ) -> Option<f32> {
        let used_processors = sample.busy_share * sample.usable_processors();
        let Some(times) = times.filter(|_| used_processors >= LOW_LOAD_PROCESSORS) else {
            self.external_processors = 0.0;
            self.task_load.skip_sample();
            return None;
        };
        let task_processors = self
            .task_load
            .measure_task_processors(times, sample.cores)?;
        let previous_external_processors = std::mem::replace(
            &mut self.external_processors,
            used_processors - task_processors,
        );
        if self.external_processors > previous_external_processors + LOW_LOAD_PROCESSORS {
            // New external load may come from new tasks. They are listed now, so that the next
            // sample attributes the load correctly.
            self.set_task_processes(&list_processes());
            return None;
        }
        Some(task_processors)
    }

    /// True if the machine was so busy that the origin of the load matters.
    pub(crate) fn origin_matters(&self, times: CpuTimes, cores: u32) -> bool {
        self.task_load.origin_matters(times, cores)
    }

    /// Measures the external load.
    pub(crate) fn measure_external(&mut self, times: CpuTimes, cores: u32) -> Evidence<f32> {
        match self.task_load.measure_external_processors(times, cores) {
            Some(processors) => Evidence::Known(processors),
            None => Evidence::Unavailable("tasks of the virtual machine started or ended".into()),
        }
    }
}
