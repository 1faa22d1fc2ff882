//! Observes the machine for one virtual machine only, where no load watcher of the whole machine
//! runs.

use crate::owner_view::OwnerView;
use crate::sensors::{CommonPaths, LoadMeter, OtherPath, Sensors, is_not_login_records};
use crate::{Args, GuestDefaults};
use pvm_load_watcher::file_watcher::WakeReasons;
use pvm_load_watcher::host_policy::{HostPolicy, PolicyPaths, VmUser};
use pvm_load_watcher::machine_link::HostState;
use pvm_load_watcher::proc::CpuTimes;
use pvm_load_watcher::report::{Reporter, SAMPLE_INTERVAL_CHANGING_LOAD};
use pvm_load_watcher::system::time_of_day;
use sempa_proto::Micros;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

pub(crate) struct OwnSense {
    pub(crate) sensors: Sensors,
    pub(crate) view: OwnerView,
    meter: LoadMeter,
    /// Time of the next sample, by the caller's monotonic clock.
    pub(crate) next_sample_at: Micros,
}

/// The user of the virtual machine.
#[derive(Clone, Debug)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) name: String,
    /// Path of the user's policy file.
    pub(crate) policy_path: PathBuf,
}

impl OwnSense {
    /// # Errors
    /// The load of this host cannot be sampled.
    pub(crate) fn open(args: &Args, user: &User, now: Micros) -> anyhow::Result<Self> {
        let common_paths = CommonPaths::from_args(&args.sources);
        let other_path = OtherPath::UserPolicy(user.policy_path.clone());
        let sensors = Sensors::open(&args.sources, &common_paths, other_path)?;
        let GuestDefaults { policy, .. } = &args.guest_defaults;
        let host_policy = HostPolicy::read_and_merge(
            PolicyPaths {
                user: user.policy_path.clone().into(),
                admin: common_paths.admin,
                overrides: common_paths.overrides,
            },
            VmUser {
                uid: user.uid,
                name: user.name.clone(),
                defaults: policy.clone(),
            },
        );
        Ok(Self {
            sensors,
            view: OwnerView::new(user.uid, user.name.clone(), host_policy),
            meter: LoadMeter::new(),
            next_sample_at: now + SAMPLE_INTERVAL_CHANGING_LOAD,
        })
    }

    /// Returns the descriptors that are readable when [`OwnSense::take_events`] has something to
    /// take.
    pub(crate) fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let file_users_fd = self.view.host_policy.file_users_fd();
        self.sensors.logind_fd().into_iter().chain(file_users_fd)
    }

    /// Derives a new state of the machine.
    pub(crate) fn assess(&mut self, has_rm: bool) -> HostState {
        self.view.assess(&mut self.sensors, has_rm);
        self.sensors
            .watch_idle_terminals(time_of_day(), self.view.idle_after());
        let memory_matters = self.view.policy().memory_free.is_some();
        self.sensors.set_memory_matters(memory_matters);
        self.view.state(&self.sensors)
    }

    /// Reads the sources that have changed.
    pub(crate) fn read_changes(&mut self, wake_reasons: WakeReasons) {
        self.sensors.read(|index| wake_reasons.path_changed(index));
        self.view
            .read_policies(|index| wake_reasons.path_changed(index));
    }

    /// Reads what other threads have reported. Returns true if a new assessment is needed.
    pub(crate) fn take_events(&mut self) -> bool {
        let sessions_changed = self.sensors.take_session_change();
        let users_changed = self.view.take_file_users_event();
        sessions_changed || users_changed
    }

    /// Takes a sample and executes the periodic actions that are due at `now`. `list_processes`
    /// returns the main processes of the virtual machine's tasks. Returns true if a new assessment
    /// is needed.
    ///
    /// # Errors
    /// The load of this host cannot be sampled.
    pub(crate) fn sample(
        &mut self,
        now: Micros,
        list_processes: impl FnOnce() -> Vec<i32>,
    ) -> anyhow::Result<SampleResult> {
        if self.sensors.take_sample(now)? {
            self.meter.restart();
        }
        let times = self.sensors.cpu_times();
        self.sensors.last_sample.task_cpus =
            self.meter
                .measure_tasks(&self.sensors.last_sample, times, list_processes);
        let hours_need_decision =
            self.sensors.take_new_minute() && self.view.host_policy.depends_on_clock();
        let available_bytes = self.sensors.last_sample.available_bytes;
        let memory_needs_decision = self.view.memory_needs_decision(available_bytes);
        let check = self.sensors.run_periodic_checks(now);
        if check.must_retry_policies {
            let must_read = self.sensors.retry_unwatched(is_not_login_records);
            self.view.read_policies(|index| must_read[index]);
            self.view.retry_policies();
        }
        Ok(SampleResult {
            must_assess: check.must_assess || hours_need_decision || memory_needs_decision,
            was_slow: check.was_slow,
        })
    }

    /// True if the machine was so busy that the origin of the load matters, so that the tasks must
    /// be listed.
    pub(crate) fn load_origin_matters(&self) -> bool {
        let cores = self.sensors.last_sample.cores;
        let matters = |times: CpuTimes| self.meter.origin_matters(times, cores);
        self.sensors.cpu_times().is_some_and(matters)
    }

    /// Sets the main processes of the virtual machine's tasks.
    pub(crate) fn set_task_processes(&mut self, pids: &[i32]) {
        self.meter.set_task_processes(pids);
    }

    pub(crate) fn measure_external_load(&mut self) {
        if let Some(times) = self.sensors.cpu_times() {
            let cores = self.sensors.last_sample.cores;
            self.sensors.observations.external_load = self.meter.measure_external(times, cores);
        }
    }

    /// Sets the time of the next sample.
    pub(crate) fn schedule_sample(&mut self, now: Micros, reporter: &mut Reporter) {
        let depends_on_clock = self.view.host_policy.depends_on_clock();
        self.next_sample_at = now + self.sensors.next_interval(reporter, depends_on_clock);
    }
}

/// The actions that a sample requires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SampleResult {
    pub(crate) must_assess: bool,
    /// True if the slow checks were due.
    pub(crate) was_slow: bool,
}
