//! Generates a recording of a day with several users, which the replay runs in virtual time. Each
//! user requests jobs at random times; all processes of a job have the same amount of work. No host
//! has an owner.

use crate::rng::Rng;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::recording::{RecordedInput, RecordingEntry};
use pvm_rm::replay::{self, ReplayResult, UserResult};
use pvm_rm::spawns::SpawnRules;
use sempa_proto::load::{GuestLimits, LoadReport, LoadSample, OwnerVerdict};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::migration::Usage;
use sempa_proto::owner::GuestAccess;
use sempa_proto::table::{HostEntry, HostTable};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{Epoch, HostId, Micros, Tid};
use serde::Serialize;
use std::fmt::Write;

const HOUR: f64 = 3600.0;
/// Uid of the user whose jobs occupy all hosts all day.
pub(crate) const GREEDY_USER: u32 = 1000;
/// Uids of the users who request small jobs from time to time.
pub(crate) const LIGHT_USERS: [u32; 2] = [1001, 1002];
/// Maximum waiting time of a job in seconds. No request expires, because the limit exceeds the
/// simulated day.
const WAIT_MAX_S: u64 = 200_000;

/// Parameters of a simulated day: the pool and the jobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DayScenario {
    pub(crate) pool_name: &'static str,
    /// Number of hosts, each with one processor.
    pub(crate) host_count: u16,
    /// Each job of a light user, as (number of processes, mean seconds of work of each).
    pub(crate) light_job: (u32, f64),
    /// Number of jobs of both light users together.
    pub(crate) job_count: usize,
    /// Number of light jobs that arrive at the same time.
    pub(crate) batch_size: usize,
    /// Mean seconds between two batches of light jobs.
    pub(crate) batch_interval_s: f64,
    /// Each job of the greedy user, as (number of processes, seconds of work of each). All of them
    /// arrive at the beginning.
    pub(crate) greedy_job: (u32, f64),
}

/// A pool with more hosts than the light users ever need at once. Without the greedy user no light
/// job waits.
pub(crate) const ROOMY_POOL: DayScenario = DayScenario {
    pool_name: "roomy",
    host_count: 24,
    light_job: (5, 0.5 * HOUR),
    job_count: 22,
    batch_size: 1,
    batch_interval_s: HOUR,
    greedy_job: (6, 4.0 * HOUR),
};
/// A pool in which each job of a light user needs all hosts, and jobs arrive in groups. Even
/// without the greedy user, light users wait for each other and for their own jobs.
///
/// A request for more hosts than are free gets only the free hosts. If light jobs needed fewer
/// hosts than the pool has, the number of processes of a job could therefore differ between runs.
pub(crate) const TIGHT_POOL: DayScenario = DayScenario {
    pool_name: "tight",
    host_count: 12,
    light_job: (12, 0.1 * HOUR),
    job_count: 24,
    batch_size: 4,
    batch_interval_s: 3.6 * HOUR,
    greedy_job: (4, 4.0 * HOUR),
};
/// Arrival of the first light job, in seconds. By then the index of the greedy user is high enough
/// for preemption (see `PREEMPTION_MARGIN`).
const FIRST_ARRIVAL_S: f64 = 2.0 * HOUR;

#[derive(Clone, Copy, Debug)]
struct DayJob {
    user: u32,
    arrival_s: f64,
    process_count: u32,
    work_s: f64,
}

/// Results of the same light jobs in two runs.
pub(crate) struct DayResults {
    /// Run without the greedy user.
    pub(crate) without_greedy: ReplayResult,
    /// Run with the greedy user.
    pub(crate) with_greedy: ReplayResult,
}

impl DayScenario {
    /// Runs the day twice: without and with the greedy user.
    pub(crate) fn run(&self, seed: u64) -> DayResults {
        let mut rng = Rng::new(seed);
        let mut arrival_s = FIRST_ARRIVAL_S;
        let mut light_jobs = Vec::new();
        for n in 0..self.job_count {
            if n % self.batch_size == 0 && n > 0 {
                arrival_s += rng.next_exponential(self.batch_interval_s);
            }
            let (process_total, work_seconds) = (
                self.light_job.0,
                self.light_job.1 * (0.75 + 0.5 * rng.next_uniform()),
            );
            light_jobs.push(DayJob {
                user: LIGHT_USERS[n % LIGHT_USERS.len()],
                arrival_s,
                process_count: process_total,
                work_s: work_seconds,
            });
        }
        // The greedy user's jobs have twice the work that all hosts can do in the day.
        let (process_total, work_seconds) = self.greedy_job;
        let job_count = (2.0 * f64::from(self.host_count) * arrival_s.max(24.0 * HOUR)
            / (f64::from(process_total) * work_seconds))
            .ceil() as usize;
        let greedy_jobs = vec![
            DayJob {
                user: GREEDY_USER,
                arrival_s: 0.0,
                process_count: process_total,
                work_s: work_seconds
            };
            job_count
        ];
        let replay_jobs = |job_count: &[DayJob]| {
            replay::replay_recording(&self.recording_entries(job_count), waiting_policy())
                .expect("it runs")
        };
        DayResults {
            without_greedy: replay_jobs(&light_jobs),
            with_greedy: replay_jobs(&[greedy_jobs, light_jobs].concat()),
        }
    }

    /// Returns the entries of a recording: the hosts, their reports, and the spawns and ends of
    /// these jobs.
    fn recording_entries(&self, jobs: &[DayJob]) -> Vec<RecordingEntry> {
        let recording_time = |time_s: f64| Micros(((60.0 + time_s) * 1e6) as u64);
        let mut entries = vec![RecordingEntry {
            at: recording_time(-59.0),
            input: RecordedInput::Policy(waiting_policy()),
        }];
        entries.push(RecordingEntry {
            at: recording_time(-59.0),
            input: RecordedInput::Hosts(table(self.host_count)),
        });
        entries.extend((1..=self.host_count).map(|host| RecordingEntry {
            at: recording_time(-59.0),
            input: idle_report(host),
        }));
        let (mut next_local, mut end_entries) = (100, Vec::new());
        for (n, job) in jobs.iter().enumerate() {
            let caller = task_id(job.user - GREEDY_USER + 2);
            let request_number = (caller, n as i32 + 1);
            let request = SpawnRequest {
                program: "worker".into(),
                where_arg: "?spread; free >= 1".into(),
                task_count: job.process_count,
                ..SpawnRequest::default()
            };
            let input = RecordedInput::Spawn {
                request_id: request_number,
                caller_host: host_id(1),
                user: job.user,
                job: caller,
                request,
            };
            entries.push(RecordingEntry {
                at: recording_time(job.arrival_s),
                input,
            });
            let tids: Vec<Tid> = (0..job.process_count)
                .map(|n| task_id(next_local + n))
                .collect();
            next_local += job.process_count;
            let usage = Usage {
                user: Micros((job.work_s * 1e6) as u64),
                ..Usage::default()
            };
            // The replay uses the amount of the recorded usage, but not the time of the record.
            let end_entry = |tid: &Tid| RecordingEntry {
                at: recording_time(job.arrival_s),
                input: RecordedInput::TaskEnded { tid: *tid, usage },
            };
            end_entries.extend(tids.iter().map(end_entry));
            entries.push(RecordingEntry {
                at: recording_time(job.arrival_s),
                input: RecordedInput::SpawnAnswered {
                    request_id: request_number,
                    tids,
                },
            });
        }
        entries.extend(end_entries);
        entries.sort_by_key(|entry| entry.at);
        entries
    }
}

/// Returns a policy under which requests wait for hosts, and tasks are preempted.
fn waiting_policy() -> EffectivePolicy {
    EffectivePolicy {
        spawn_rules: SpawnRules {
            wait_max: Micros::from_secs(WAIT_MAX_S),
            ..SpawnRules::default()
        },
        ..EffectivePolicy::default()
    }
}

fn host_id(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn task_id(local_number: u32) -> Tid {
    Tid::for_task(host_id(1), local_number).expect("a task")
}

fn table(host_count: u16) -> HostTable {
    let host = |i: u16| {
        let (name, arch) = (format!("h{i}"), "LINUX64".to_string());
        HostEntry {
            id: host_id(i),
            name,
            arch,
            speed: 1000,
            dsig: DSIG_X86_64,
            addresses: Vec::new(),
        }
    };
    HostTable {
        epoch: Epoch(1),
        hosts: (1..=host_count).map(host).collect(),
    }
}

/// Returns the load report of an idle host without an owner.
fn idle_report(host_index: u16) -> RecordedInput {
    let sample = LoadSample {
        cores: 1,
        available_bytes: 8 << 30,
        ..LoadSample::default()
    };
    let report = LoadReport {
        host: host_id(host_index),
        at: Micros(1),
        sample,
        owner_verdict: OwnerVerdict::Absent { since: None },
        confidence_percent: 90,
        owner_reason: String::new(),
        logins: Vec::new(),
        guest_access: GuestAccess::Welcome,
        access_reason: String::new(),
        guest_limits: GuestLimits::default(),
    };
    RecordedInput::Report {
        report,
        vm_task_count: 0,
    }
}

/// Seeds of the random arrival times and amounts of work. Each seed gives a different day.
pub(crate) const SEEDS: [u64; 4] = [11, 23, 37, 51];
/// Maximum ratio of a light user's waiting time with the greedy user to the waiting time without
/// the greedy user. [`PREEMPTION_INTERVAL_S`] is added to the limit.
const WAIT_FACTOR_MAX: f64 = 1.2;
/// Interval between two preemption decisions in seconds.
const PREEMPTION_INTERVAL_S: f64 = 1.0;

/// Results of one light user without and with the greedy user. Both runs contain the same jobs at
/// the same times.
#[derive(Debug, Serialize)]
pub(crate) struct UserComparison {
    pub(crate) alone: UserResult,
    pub(crate) beside: UserResult,
    /// Waiting times in seconds, ascending, as (without the greedy user, with the greedy user).
    pub(crate) waits_s: (Vec<f64>, Vec<f64>),
}

/// Comparison of the two runs of a day (see [`DayResults`]).
#[derive(Debug, Serialize)]
pub(crate) struct DayComparison {
    pub(crate) pool: &'static str,
    pub(crate) hosts: u16,
    pub(crate) seed: u64,
    /// Figures of the greedy user; they exist only in the second run.
    pub(crate) greedy: UserResult,
    /// Comparison of each light user, in the order of [`LIGHT_USERS`].
    pub(crate) light: Vec<UserComparison>,
}

impl DayComparison {
    pub(crate) fn from_runs(
        day: &DayScenario,
        seed: u64,
        alone_result: &ReplayResult,
        beside_result: &ReplayResult,
    ) -> Self {
        let user_figures = |figures: &ReplayResult, user: u32| {
            figures.users.get(&user).cloned().unwrap_or_default()
        };
        let user_comparison = |user: u32| {
            let (alone_result, beside_result) = (
                user_figures(alone_result, user),
                user_figures(beside_result, user),
            );
            let sorted_waits = |user_figures: &UserResult| {
                let mut waits = user_figures.waits_s.clone();
                waits.sort_by(f64::total_cmp);
                waits
            };
            UserComparison {
                waits_s: (sorted_waits(&alone_result), sorted_waits(&beside_result)),
                alone: alone_result,
                beside: beside_result,
            }
        };
        let DayScenario {
            pool_name: pool,
            host_count: hosts,
            ..
        } = *day;
        Self {
            pool,
            hosts,
            seed,
            greedy: user_figures(beside_result, GREEDY_USER),
            light: LIGHT_USERS.map(user_comparison).into(),
        }
    }

    /// True if the greedy user hardly affects the light users. All jobs of the light users run, and
    /// they do not run longer. The mean and the maximum waiting time are at most
    /// [`WAIT_FACTOR_MAX`] times those without the greedy user plus [`PREEMPTION_INTERVAL_S`].
    pub(crate) fn is_fair(&self) -> bool {
        let is_user_fair = |UserComparison { alone, beside, .. }: &UserComparison| {
            let is_within_limit = |uncontended_s: f64, contended_s: f64| {
                contended_s <= uncontended_s * WAIT_FACTOR_MAX + PREEMPTION_INTERVAL_S
            };
            (alone.unanswered, beside.unanswered) == (0, 0)
                && (alone.answered, alone.finished) == (beside.answered, beside.finished)
                && is_within_limit(alone.waited_mean_s, beside.waited_mean_s)
                && is_within_limit(alone.waited_most_s, beside.waited_most_s)
                && beside.run_mean_s <= alone.run_mean_s * 1.01
        };
        self.light.iter().all(is_user_fair)
    }

    pub(crate) fn format_table(comparisons: &[Self]) -> String {
        let mut text = format!(
            "{:8}{:>6}{:>6}{:>18}{:>18}{:>18}\n",
            "pool", "seed", "user", "wait, mean, s", "wait, most, s", "run, mean, s"
        );
        for day in comparisons {
            for (user, UserComparison { alone, beside, .. }) in LIGHT_USERS.iter().zip(&day.light) {
                let format_pair =
                    |of: fn(&UserResult) -> f64| format!("{:.1}, {:.1}", of(alone), of(beside));
                let (mean, longest) = (
                    format_pair(|u| u.waited_mean_s),
                    format_pair(|u| u.waited_most_s),
                );
                let run = format_pair(|u| u.run_mean_s);
                let _ = writeln!(
                    text,
                    "{:8}{:>6}{user:>6}{mean:>18}{longest:>18}{run:>18}",
                    day.pool, day.seed
                );
            }
        }
        text + "each without and with a greedy user\n"
    }
}
