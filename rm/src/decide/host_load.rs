//! Load of one host: its demand for processors, and the processor share that one more task would
//! get.
//!
//! "External" load is the load of all software that does not belong to the virtual machine.

use super::{HostView, TimedSample};
use sempa_proto::load::FREE_BYTES_PER_TASK_MIN;
use sempa_proto::{HostId, Micros};
use std::cmp::Reverse;

/// Utilization above which a host counts as saturated. For a saturated host, demand is computed
/// from runnable threads instead of used processors.
const SATURATED_UTILIZATION_MIN: f32 = 0.95;
/// Share of time in which threads wait for a processor. A host with a greater share that is not
/// saturated counts as throttled: a processor limit of a cgroup or hypervisor delays its threads.
const THROTTLED_PRESSURE_MIN: f32 = 0.25;

/// The processor share that one more task would get on a host, with all values by which hosts are
/// ranked. A better host has the greater value. The order is total, so that equal snapshots lead to
/// equal decisions.
///
/// Hosts are compared by these criteria, in this order:
///
/// 1. no idle login on the host,
/// 2. enough free memory,
/// 3. the share that one thread can use (at most one processor, times the host's speed),
/// 4. the share without the limit of one processor (processors times speed, divided by threads),
/// 5. fewer tasks of the virtual machine,
/// 6. the lower host id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessorShare {
    /// True if no idle user is logged in at the host.
    pub unattended: bool,
    /// True if [`FREE_BYTES_PER_TASK_MIN`] are available for one more task, or if the memory is
    /// unknown.
    pub has_memory: bool,
    /// Share that a single thread can use, in thousandths of an ordinary processor.
    pub usable_permille: u64,
    /// Share without the limit of one processor, in thousandths of an ordinary processor.
    pub uncapped_permille: u64,
    vm_task_count: Reverse<u32>,
    host: Reverse<HostId>,
}

impl ProcessorShare {
    pub fn host(&self) -> HostId {
        self.host.0
    }
}

/// Load of one host, as input of the decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostLoad {
    pub(super) host: HostId,
    /// Usable processors, in thousandths of a processor.
    pub(super) processors_permille: u64,
    pub(super) speed_permille: u64,
    /// Number of tasks of the virtual machine, including those that are migrating to the host.
    pub(super) vm_task_count: u32,
    /// External demand, in threads.
    pub(super) external_threads: u32,
    /// Demand of the virtual machine's tasks beyond one thread for each task, in threads.
    pub(super) extra_threads: u32,
    /// Number of further tasks for which there is memory; `u32::MAX` if the memory is unknown.
    pub(super) memory_slots: u32,
    /// True if no idle user is logged in at the host.
    pub(super) unattended: bool,
    /// Maximum number of tasks of the virtual machine that the owner allows; `u32::MAX` without a
    /// limit.
    pub(super) vm_tasks_max: u32,
}

impl HostLoad {
    /// Computes the load of a host. `own_tasks`: number of tasks of the virtual machine on the
    /// host.
    pub(super) fn compute(host: &HostView, now: Micros, own_tasks: u32) -> Self {
        let timed_sample = host.recent_sample(now);
        let free_bytes = timed_sample.map_or(0, |s| s.sample.available_bytes);
        let limits = &host.guest_policy.limits;
        let slots_by_memory = match free_bytes {
            0 => u32::MAX,
            bytes => u32::try_from(
                bytes.saturating_sub(limits.free_memory_bytes) / FREE_BYTES_PER_TASK_MIN,
            )
            .unwrap_or(u32::MAX),
        };
        let capacity_permille = timed_sample.filter(|s| s.sample.cpu_limit > 0.0).map_or(
            u64::from(host.cores.max(1)) * 1000,
            |limited_sample| {
                // The sample is not trusted: its processor limit may be huge or not a number.
                (f64::from(limited_sample.sample.cpu_limit) * 1000.0)
                    .clamp(1.0, f64::from(u32::MAX)) as u64
            },
        );
        let speed = u64::try_from(host.speed).unwrap_or(0).max(1);
        let external_count = external_threads(host, now).round() as u32;
        let extra_count = timed_sample
            .map_or(0.0, |s| divide_demand(s).extra_threads)
            .round() as u32;
        let (no_idle_login, guest_limit) = (
            host.owner.is_unattended(),
            limits.guests_max.unwrap_or(u32::MAX),
        );
        Self {
            host: host.id,
            processors_permille: capacity_permille,
            speed_permille: speed,
            vm_task_count: own_tasks,
            external_threads: external_count,
            extra_threads: extra_count,
            memory_slots: slots_by_memory,
            unattended: no_idle_login,
            vm_tasks_max: guest_limit,
        }
    }

    /// Returns the number of further tasks that the owner allows.
    pub(super) fn remaining_slots(&self) -> u32 {
        self.vm_tasks_max.saturating_sub(self.vm_task_count)
    }

    pub(super) fn share(&self) -> ProcessorShare {
        let share_per_thread =
            self.processors_permille * self.speed_permille / 1000 / (self.thread_demand() + 1);
        let (task_order, host) = (Reverse(self.vm_task_count), Reverse(self.host));
        ProcessorShare {
            unattended: self.unattended,
            has_memory: self.memory_slots > 0,
            usable_permille: share_per_thread.min(self.speed_permille),
            uncapped_permille: share_per_thread,
            vm_task_count: task_order,
            host,
        }
    }

    /// Returns the rate of each task of the virtual machine, in thousandths of an ordinary
    /// processor.
    pub(super) fn task_rate(&self) -> f64 {
        self.speed_permille as f64
            * (self.processors() / self.thread_demand().max(1) as f64).min(1.0)
    }

    /// Returns the total demand for processors, in threads.
    fn thread_demand(&self) -> u64 {
        u64::from(self.vm_task_count)
            + u64::from(self.external_threads)
            + u64::from(self.extra_threads)
    }

    /// Returns the number of usable processors as a fraction.
    pub(super) fn processors(&self) -> f64 {
        self.processors_permille as f64 / 1e3
    }

    /// Returns the idle processor time, in hundredths of a processor.
    pub(super) fn idle_percent(&self) -> u64 {
        (self.processors_permille / 10).saturating_sub(self.thread_demand() * 100)
    }
}

/// Returns the external demand in threads; 0 if the sample is missing or too old.
pub(super) fn external_threads(host: &HostView, now: Micros) -> f32 {
    host.recent_sample(now).map_or(0.0, external_demand)
}

/// Time constant of the mean external demand.
const EXTERNAL_MEAN_WINDOW: Micros = Micros::from_secs(120);
/// Time for which the first sample counts as observed. This time determines the sample's weight in
/// the mean.
const FIRST_SAMPLE_WINDOW: Micros = Micros::from_secs(5);

/// Mean external demand for processors over some minutes, in threads.
///
/// At first, all observed time has the same weight, because otherwise the first sample would
/// dominate the mean. Load watchers report only changes. A demand therefore applies to the time
/// from its report to the next one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExternalMean {
    pub mean_threads: f32,
    /// Mean absolute deviation from the mean, in threads.
    pub deviation: f32,
    observed_time: Micros,
    /// The last sample, as (arrival time, demand).
    last_sample: (Micros, f32),
}

impl ExternalMean {
    /// Starts the mean with the first sample.
    pub fn from_first_sample(now: Micros, demand: f32) -> Self {
        Self {
            mean_threads: demand,
            deviation: 0.0,
            observed_time: FIRST_SAMPLE_WINDOW,
            last_sample: (now, demand),
        }
    }

    /// Returns the mean updated by one more sample.
    pub fn with_sample(self, now: Micros, demand: f32) -> Self {
        let (last_at, last_demand) = self.last_sample;
        let elapsed = now.since(last_at);
        let (total_time, elapsed) = (self.observed_time + elapsed, elapsed.0 as f32);
        let exponential_weight = 1.0 - (-elapsed / EXTERNAL_MEAN_WINDOW.0 as f32).exp();
        let weight = exponential_weight.max(elapsed / total_time.0 as f32);
        let threads = self.mean_threads + weight * (last_demand - self.mean_threads);
        let spread = self.deviation + weight * ((last_demand - threads).abs() - self.deviation);
        Self {
            mean_threads: threads,
            deviation: spread,
            observed_time: total_time,
            last_sample: (now, demand),
        }
    }
}

/// Demand for processors in one sample, in threads.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ThreadDemand {
    /// Demand of external software, in threads.
    external_threads: f32,
    /// Demand of the virtual machine's tasks beyond one thread for each task, in threads.
    extra_threads: f32,
}

fn divide_demand(sampled: &TimedSample) -> ThreadDemand {
    let sample = &sampled.sample;
    let used_processors = sample.busy_share * sample.usable_processors();
    // The number of runnable threads is a momentary value. The average with the one-minute load
    // smooths it.
    let runnable_threads = (sample.runnable_threads as f32 + sample.one_minute_load) / 2.0;
    let demand = if sample.busy_share >= SATURATED_UTILIZATION_MIN {
        used_processors.max(runnable_threads)
    } else if sample.cpu_pressure >= THROTTLED_PRESSURE_MIN {
        // Threads wait for processors because of the limit. Without the limit, the threads would
        // use processors instead of waiting.
        used_processors / (1.0 - sample.cpu_pressure).max(0.25)
    } else {
        used_processors
    };
    let task_count = sampled.vm_task_count as f32;
    let Some(used_by_tasks) = sample
        .task_cpus
        .filter(|used_by_tasks| used_by_tasks.is_finite())
    else {
        return ThreadDemand {
            external_threads: (demand - task_count).max(0.0),
            extra_threads: 0.0,
        };
    };
    // The demand is divided in proportion to the processor time used: software that uses half of
    // this time has half of the demand.
    let external_part = if used_processors > 0.0 {
        (1.0 - used_by_tasks / used_processors).clamp(0.0, 1.0) * demand
    } else {
        0.0
    };
    ThreadDemand {
        external_threads: external_part,
        extra_threads: (demand - external_part - task_count).max(0.0),
    }
}

/// Returns the external demand for processors in a sample, in threads: the total demand minus the
/// demand of the virtual machine's tasks. The latter follows from the measured processor use of the
/// tasks. Without this measurement, each task counts as one thread.
pub fn external_demand(sampled: &TimedSample) -> f32 {
    divide_demand(sampled).external_threads
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::load::LoadSample;

    /// Returns a sample of a host with two processors. `used_by_tasks`: processors used by tasks of
    /// the virtual machine; `task_count`: number of these tasks.
    fn timed_sample(
        busy_fraction: f32,
        runnable_count: u32,
        used_by_tasks: Option<f32>,
        task_count: u32,
    ) -> TimedSample {
        let sample = LoadSample {
            cores: 2,
            busy_share: busy_fraction,
            runnable_threads: runnable_count,
            one_minute_load: runnable_count as f32,
            task_cpus: used_by_tasks,
            ..LoadSample::default()
        };
        TimedSample {
            sample,
            received_at: Micros(0),
            vm_task_count: task_count,
        }
    }

    /// An idle guest does not hide the external load of its host.
    #[test]
    fn idle_guests_do_not_hide_external_load() {
        // One process of the owner runs, and one task of the virtual machine waits.
        assert_eq!(external_demand(&timed_sample(0.5, 1, Some(0.0), 1)), 1.0);
        assert_eq!(
            external_demand(&timed_sample(0.5, 1, None, 1)),
            0.0,
            "nobody has measured it"
        );
        // Two processes of the owner are busy, and five tasks of the virtual machine wait.
        assert_eq!(external_demand(&timed_sample(1.0, 2, Some(0.0), 5)), 2.0);
    }

    /// Additional threads of a guest are not external load, but they reduce the share of other
    /// tasks.
    #[test]
    fn guest_threads_are_not_external_demand() {
        let sample_with_eight_threads = timed_sample(1.0, 8, Some(2.0), 1);
        assert_eq!(
            divide_demand(&sample_with_eight_threads),
            ThreadDemand {
                external_threads: 0.0,
                extra_threads: 7.0
            }
        );
        // Two processes of the owner also run.
        let ThreadDemand {
            external_threads: external_part,
            extra_threads: extra_part,
        } = divide_demand(&timed_sample(1.0, 10, Some(1.6), 1));
        assert!(
            (external_part - 2.0).abs() < 0.01 && (extra_part - 7.0).abs() < 0.01,
            "{external_part} {extra_part}"
        );
        // The task needs less than one processor.
        assert_eq!(
            divide_demand(&timed_sample(0.25, 0, Some(0.5), 1)),
            ThreadDemand {
                external_threads: 0.0,
                extra_threads: 0.0
            }
        );
    }

    /// Arbitrary values in a sample lead to a finite demand that is not negative.
    #[test]
    fn untrusted_samples_give_finite_demand() {
        for used_by_tasks in [f32::NAN, f32::INFINITY, -3.0, 1e30] {
            for utilization in [0.0, 0.3, 1.0] {
                let ThreadDemand {
                    external_threads: external_part,
                    extra_threads: extra_part,
                } = divide_demand(&timed_sample(utilization, 3, Some(used_by_tasks), 2));
                assert!(
                    external_part >= 0.0
                        && extra_part >= 0.0
                        && external_part.is_finite()
                        && extra_part.is_finite(),
                    "{used_by_tasks} {utilization}"
                );
            }
        }
    }
}
