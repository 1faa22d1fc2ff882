//! Load of one host: its demand for processors, and the processor share that one more task would
//! get.
//!
//! "Own" tasks are the tasks of the virtual machine; "external" load is the load of all other
//! software.

use super::{HostView, TimedSample};
use sempa_proto::load::HEADROOM_BYTES_PER_TASK;
use sempa_proto::{HostId, Micros};
use std::cmp::Reverse;

/// Utilization above which a host counts as saturated. For a saturated host, demand is computed
/// from runnable threads instead of used processors.
const SATURATION_MIN: f32 = 0.95;
/// Share of time spent waiting for a processor above which a host that is not saturated counts as
/// throttled: a processor limit of a cgroup or hypervisor delays its threads.
const PRESSURE_MIN: f32 = 0.25;

/// The processor share that one more task would get on a host, with all values that rank hosts.
/// Greater is better. The order is total, so that equal snapshots give equal decisions.
///
/// Shares are compared by these criteria, in this order:
/// 1. no idle login on the host,
/// 2. enough free memory,
/// 3. the share that one thread can use (at most one processor, times the host's speed),
/// 4. the share without the limit of one processor (processors times speed, divided by threads),
/// 5. fewer own tasks,
/// 6. the lower host id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessorShare {
    /// True if no idle user is logged in.
    pub unattended: bool,
    /// True if [`HEADROOM_BYTES_PER_TASK`] are available for one more task, or if the memory is
    /// unknown.
    pub has_memory: bool,
    /// Share that a single thread can use, in thousandths of an ordinary processor.
    pub usable: u64,
    /// Share without the limit of one processor, in thousandths of an ordinary processor.
    pub uncapped: u64,
    own_tasks: Reverse<u32>,
    host: Reverse<HostId>,
}

impl ProcessorShare {
    pub fn host(&self) -> HostId {
        self.host.0
    }
}

/// Load of one host as decisions see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostLoad {
    pub(super) host: HostId,
    /// Usable processors, in thousandths.
    pub(super) capacity: u64,
    pub(super) speed: u64,
    /// Number of own tasks, including those that migrate to the host.
    pub(super) own_tasks: u32,
    /// External demand, in threads.
    pub(super) external_threads: u32,
    /// Demand of own tasks in addition to one thread each, in threads.
    pub(super) extra_threads: u32,
    /// Number of further tasks for which there is memory.
    pub(super) memory_slots: u32,
    /// True if no idle user is logged in.
    pub(super) unattended: bool,
    /// Maximum number of own tasks that the owner allows.
    pub(super) task_limit: u32,
}

impl HostLoad {
    /// Computes the load of a host with `own` own tasks.
    pub(super) fn of(host: &HostView, now: Micros, own_tasks: u32) -> HostLoad {
        let fresh = host.fresh_sample(now);
        let available = fresh.map_or(0, |s| s.sample.available_bytes);
        let limits = &host.guest_policy.limits;
        let room = match available {
            0 => u32::MAX,
            bytes => {
                u32::try_from(bytes.saturating_sub(limits.memory_free) / HEADROOM_BYTES_PER_TASK)
                    .unwrap_or(u32::MAX)
            }
        };
        let capacity = fresh.filter(|s| s.sample.cpu_limit > 0.0).map_or(
            u64::from(host.cores.max(1)) * 1000,
            |limited| {
                // The report is not trusted: the value may be negative, huge or not a number.
                (f64::from(limited.sample.cpu_limit) * 1000.0).clamp(1.0, f64::from(u32::MAX))
                    as u64
            },
        );
        let speed = u64::try_from(host.speed).unwrap_or(0).max(1);
        let foreign = external_threads(host, now).round() as u32;
        let more = fresh.map_or(0.0, |s| demand(s).extra).round() as u32;
        let (calm, most) = (
            host.owner.is_unattended(),
            limits.guests_max.unwrap_or(u32::MAX),
        );
        HostLoad {
            host: host.id,
            capacity,
            speed,
            own_tasks,
            external_threads: foreign,
            extra_threads: more,
            memory_slots: room,
            unattended: calm,
            task_limit: most,
        }
    }

    /// Returns the number of further tasks that the owner allows.
    pub(super) fn remaining_slots(&self) -> u32 {
        self.task_limit.saturating_sub(self.own_tasks)
    }

    pub(super) fn share(&self) -> ProcessorShare {
        let reserve = self.capacity * self.speed / 1000 / (self.threads() + 1);
        let (own, host) = (Reverse(self.own_tasks), Reverse(self.host));
        ProcessorShare {
            unattended: self.unattended,
            has_memory: self.memory_slots > 0,
            usable: reserve.min(self.speed),
            uncapped: reserve,
            own_tasks: own,
            host,
        }
    }

    /// Returns the rate of each own task, in thousandths of an ordinary processor.
    pub(super) fn rate(&self) -> f64 {
        self.speed as f64 * (self.processors() / self.threads().max(1) as f64).min(1.0)
    }

    /// Returns the total demand in threads.
    fn threads(&self) -> u64 {
        u64::from(self.own_tasks) + u64::from(self.external_threads) + u64::from(self.extra_threads)
    }

    /// Returns the number of usable processors as a fraction.
    pub(super) fn processors(&self) -> f64 {
        self.capacity as f64 / 1e3
    }

    /// Returns the idle processor time, in hundredths of a processor.
    pub(super) fn free_percent(&self) -> u64 {
        (self.capacity / 10).saturating_sub(self.threads() * 100)
    }
}

/// Returns the external demand in threads; 0 if the sample is missing or too old.
pub(super) fn external_threads(host: &HostView, now: Micros) -> f32 {
    host.fresh_sample(now).map_or(0.0, external_demand)
}

/// Time constant of the mean external demand.
const EXTERNAL_MEAN_WINDOW: Micros = Micros::from_secs(120);
/// Weight of the first sample in the mean, as the time for which it would have been observed.
const FIRST_SAMPLE_WINDOW: Micros = Micros::from_secs(5);

/// Mean external demand for processors over some minutes, in threads.
///
/// While a host has been observed for a shorter time, all observed time has the same weight.
/// Otherwise the first sample would dominate the mean.
///
/// Load watchers report changes. A demand therefore applies to the time from its report to the next
/// one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExternalMean {
    pub threads: f32,
    /// Mean absolute deviation from the mean, in threads.
    pub spread: f32,
    observed_time: Micros,
    /// The last sample, as (arrival time, demand).
    last: (Micros, f32),
}

impl ExternalMean {
    /// Starts the mean with the first sample.
    pub fn first(now: Micros, demand: f32) -> ExternalMean {
        ExternalMean {
            threads: demand,
            spread: 0.0,
            observed_time: FIRST_SAMPLE_WINDOW,
            last: (now, demand),
        }
    }

    /// Returns the mean updated by one more sample.
    pub fn updated(self, now: Micros, demand: f32) -> ExternalMean {
        let (since, before) = self.last;
        let span = now.since(since);
        let (seen, span) = (self.observed_time + span, span.0 as f32);
        let fades = 1.0 - (-span / EXTERNAL_MEAN_WINDOW.0 as f32).exp();
        let weight = fades.max(span / seen.0 as f32);
        let threads = self.threads + weight * (before - self.threads);
        let spread = self.spread + weight * ((before - threads).abs() - self.spread);
        ExternalMean {
            threads,
            spread,
            observed_time: seen,
            last: (now, demand),
        }
    }
}

/// Demand for processors in one sample, in threads.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ThreadDemand {
    /// Demand of external software, in threads.
    external: f32,
    /// Demand of own tasks in addition to one thread each, in threads.
    extra: f32,
}

fn demand(sampled: &TimedSample) -> ThreadDemand {
    let sample = &sampled.sample;
    let used = sample.busy * sample.processors();
    // The number of runnable threads is a momentary value. The average with the one-minute load
    // smooths it.
    let queued = (sample.running as f32 + sample.load1) / 2.0;
    let demand = if sample.busy >= SATURATION_MIN {
        used.max(queued)
    } else if sample.cpu_pressure >= PRESSURE_MIN {
        // Without the limit, threads would use the processors also in the time in which they wait
        // for them.
        used / (1.0 - sample.cpu_pressure).max(0.25)
    } else {
        used
    };
    let own = sampled.own_tasks as f32;
    let Some(ours) = sample.task_cpus.filter(|ours| ours.is_finite()) else {
        return ThreadDemand {
            external: (demand - own).max(0.0),
            extra: 0.0,
        };
    };
    // The demand is divided in proportion to the use: software with half of the use has half of the
    // demand.
    let foreign = if used > 0.0 {
        (1.0 - ours / used).clamp(0.0, 1.0) * demand
    } else {
        0.0
    };
    ThreadDemand {
        external: foreign,
        extra: (demand - foreign - own).max(0.0),
    }
}

/// Returns the external demand for processors in a sample, in threads: the total demand minus the
/// part of own tasks, which follows from their measured use. If that use is unknown, each own task
/// counts as one thread.
pub fn external_demand(sampled: &TimedSample) -> f32 {
    demand(sampled).external
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::load::LoadSample;

    /// Returns a sample of a host with two processors.
    fn sampled(busy: f32, queue: u32, ours: Option<f32>, own: u32) -> TimedSample {
        let sample = LoadSample {
            cores: 2,
            busy,
            running: queue,
            load1: queue as f32,
            task_cpus: ours,
            ..LoadSample::default()
        };
        TimedSample {
            sample,
            received_at: Micros(0),
            own_tasks: own,
        }
    }

    /// An idle guest does not hide the external load of its host.
    #[test]
    fn idle_guests_do_not_hide_external_load() {
        // One process of the owner runs, and one own task waits.
        assert_eq!(external_demand(&sampled(0.5, 1, Some(0.0), 1)), 1.0);
        assert_eq!(
            external_demand(&sampled(0.5, 1, None, 1)),
            0.0,
            "nobody has measured it"
        );
        // Two processes of the owner are busy, and five own tasks wait.
        assert_eq!(external_demand(&sampled(1.0, 2, Some(0.0), 5)), 2.0);
    }

    /// Additional threads of a guest are not external load, but they reduce the share of other
    /// tasks.
    #[test]
    fn guest_threads_count_as_own_demand() {
        let eight = sampled(1.0, 8, Some(2.0), 1);
        assert_eq!(
            demand(&eight),
            ThreadDemand {
                external: 0.0,
                extra: 7.0
            }
        );
        // Two processes of the owner also run.
        let ThreadDemand {
            external: foreign,
            extra: more,
        } = demand(&sampled(1.0, 10, Some(1.6), 1));
        assert!(
            (foreign - 2.0).abs() < 0.01 && (more - 7.0).abs() < 0.01,
            "{foreign} {more}"
        );
        // The task needs less than one processor.
        assert_eq!(
            demand(&sampled(0.25, 0, Some(0.5), 1)),
            ThreadDemand {
                external: 0.0,
                extra: 0.0
            }
        );
    }

    /// Arbitrary values in a sample give a finite demand that is not negative.
    #[test]
    fn untrusted_samples_give_finite_demand() {
        for ours in [f32::NAN, f32::INFINITY, -3.0, 1e30] {
            for busy in [0.0, 0.3, 1.0] {
                let ThreadDemand {
                    external: foreign,
                    extra: more,
                } = demand(&sampled(busy, 3, Some(ours), 2));
                assert!(
                    foreign >= 0.0 && more >= 0.0 && foreign.is_finite() && more.is_finite(),
                    "{ours} {busy}"
                );
            }
        }
    }
}
