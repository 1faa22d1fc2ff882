//! Generates a recording of a day with several users. The replay runs it in virtual time. Each user
//! requests jobs of equal processes at random times. No host has an owner.

use crate::random::Rng;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::recording::{RecordedInput, RecordingEntry};
use pvm_rm::replay::{self, Figures, UserFigures};
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
/// The user whose jobs occupy all hosts all day.
pub(crate) const GREEDY: u32 = 1000;
/// The users who request small jobs from time to time.
pub(crate) const LIGHT: [u32; 2] = [1001, 1002];
/// Maximum waiting time of a job in seconds; longer than the day.
const WAIT_MAX_S: u64 = 200_000;

/// Parameters of a day: the pool and the jobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DayScenario {
    pub(crate) pool: &'static str,
    /// Number of hosts, each with one processor.
    pub(crate) hosts: u16,
    /// Each job of a light user, as (number of processes, mean seconds of work of each).
    pub(crate) light: (u32, f64),
    /// Number of jobs of both light users together.
    pub(crate) job_count: usize,
    /// Number of light jobs that arrive at the same moment.
    pub(crate) batch: usize,
    /// Mean seconds between two batches of light jobs.
    pub(crate) interval: f64,
    /// Each job of the greedy user, as (number of processes, seconds of work of each). All of them
    /// arrive at the beginning.
    pub(crate) greedy: (u32, f64),
}

/// A pool with more hosts than the light users ever need at once. Without the greedy user they
/// never wait.
pub(crate) const ROOMY: DayScenario = DayScenario {
    pool: "roomy",
    hosts: 24,
    light: (5, 0.5 * HOUR),
    job_count: 22,
    batch: 1,
    interval: HOUR,
    greedy: (6, 4.0 * HOUR),
};
/// A pool in which each job of a light user needs all hosts, and jobs arrive in groups. Even
/// without the greedy user, light users wait for each other and for their own jobs.
///
/// A request for more hosts than are free gets only the free ones. If jobs did not need all hosts,
/// their sizes would therefore differ between runs.
pub(crate) const TIGHT: DayScenario = DayScenario {
    pool: "tight",
    hosts: 12,
    light: (12, 0.1 * HOUR),
    job_count: 24,
    batch: 4,
    interval: 3.6 * HOUR,
    greedy: (4, 4.0 * HOUR),
};
/// Arrival of the first light job, in seconds. By then the index of the greedy user is high enough
/// for preemption (see `PREEMPTION_MARGIN`).
const FIRST_ARRIVAL_S: f64 = 2.0 * HOUR;

#[derive(Clone, Copy, Debug)]
struct Job {
    user: u32,
    at: f64,
    processes: u32,
    work: f64,
}

/// Results of the same light jobs in two runs: without the greedy user, and with the greedy user.
pub(crate) struct DayResults {
    pub(crate) alone: Figures,
    pub(crate) contended: Figures,
}

impl DayScenario {
    /// Runs the day without and with the greedy user.
    pub(crate) fn run(&self, seed: u64) -> DayResults {
        let mut random = Rng::new(seed);
        let mut at = FIRST_ARRIVAL_S;
        let mut light = Vec::new();
        for n in 0..self.job_count {
            if n % self.batch == 0 && n > 0 {
                at += random.exponential(self.interval);
            }
            let (processes, work) = (self.light.0, self.light.1 * (0.75 + 0.5 * random.uniform()));
            light.push(Job {
                user: LIGHT[n % LIGHT.len()],
                at,
                processes,
                work,
            });
        }
        // The greedy user's jobs have twice the work that all hosts can do in the day.
        let (processes, work) = self.greedy;
        let jobs = (2.0 * f64::from(self.hosts) * at.max(24.0 * HOUR)
            / (f64::from(processes) * work))
            .ceil() as usize;
        let greedy = vec![
            Job {
                user: GREEDY,
                at: 0.0,
                processes,
                work
            };
            jobs
        ];
        let run =
            |jobs: &[Job]| replay::run(&self.recording(jobs), waiting_policy()).expect("it runs");
        DayResults {
            alone: run(&light),
            contended: run(&[greedy, light].concat()),
        }
    }

    /// Returns the recorded input of the resource manager for these jobs.
    fn recording(&self, jobs: &[Job]) -> Vec<RecordingEntry> {
        let at = |seconds: f64| Micros(((60.0 + seconds) * 1e6) as u64);
        let mut all = vec![RecordingEntry {
            at: at(-59.0),
            input: RecordedInput::Policy(waiting_policy()),
        }];
        all.push(RecordingEntry {
            at: at(-59.0),
            input: RecordedInput::Hosts(table(self.hosts)),
        });
        all.extend((1..=self.hosts).map(|host| RecordingEntry {
            at: at(-59.0),
            input: report(host),
        }));
        let (mut last, mut ends) = (100, Vec::new());
        for (n, job) in jobs.iter().enumerate() {
            let caller = task_id(job.user - GREEDY + 2);
            let number = (caller, n as i32 + 1);
            let request = SpawnRequest {
                file: "worker".into(),
                place: "?spread; free >= 1".into(),
                count: job.processes,
                ..SpawnRequest::default()
            };
            let input = RecordedInput::Spawn {
                number,
                caller: host_id(1),
                user: job.user,
                job: caller,
                request,
            };
            all.push(RecordingEntry {
                at: at(job.at),
                input,
            });
            let tids: Vec<Tid> = (0..job.processes).map(|n| task_id(last + n)).collect();
            last += job.processes;
            let used = Usage {
                user: Micros((job.work * 1e6) as u64),
                ..Usage::default()
            };
            // The replay uses the amount of the recorded usage, but not the time of the record.
            let end = |tid: &Tid| RecordingEntry {
                at: at(job.at),
                input: RecordedInput::Ended { tid: *tid, used },
            };
            ends.extend(tids.iter().map(end));
            all.push(RecordingEntry {
                at: at(job.at),
                input: RecordedInput::Started { number, tids },
            });
        }
        all.extend(ends);
        all.sort_by_key(|entry| entry.at);
        all
    }
}

/// A policy under which requests wait for hosts, and tasks are preempted.
fn waiting_policy() -> EffectivePolicy {
    EffectivePolicy {
        rules: SpawnRules {
            wait: Micros::from_secs(WAIT_MAX_S),
            ..SpawnRules::default()
        },
        ..EffectivePolicy::default()
    }
}

fn host_id(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn task_id(local: u32) -> Tid {
    Tid::task(host_id(1), local).expect("a task")
}

fn table(hosts: u16) -> HostTable {
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
        hosts: (1..=hosts).map(host).collect(),
    }
}

/// A report of an idle host without an owner.
fn report(host: u16) -> RecordedInput {
    let sample = LoadSample {
        cores: 1,
        available_bytes: 8 << 30,
        ..LoadSample::default()
    };
    let report = LoadReport {
        host: host_id(host),
        at: Micros(1),
        sample,
        owner_verdict: OwnerVerdict::Absent { since: None },
        confidence: 90,
        owner_reason: String::new(),
        logins: Vec::new(),
        access: GuestAccess::Welcome,
        access_reason: String::new(),
        limits: GuestLimits::default(),
    };
    RecordedInput::Report { report, own: 0 }
}

/// Seeds of the simulated days.
pub(crate) const SEEDS: [u64; 4] = [11, 23, 37, 51];
/// Maximum factor by which the greedy user may prolong the waits of light users. One interval
/// between preemption decisions ([`PREEMPTION_INTERVAL_S`]) is added.
const WAIT_FACTOR_MAX: f64 = 1.2;
const PREEMPTION_INTERVAL_S: f64 = 1.0;

/// Results of one light user without and with the greedy user. Both runs contain the same jobs at
/// the same times.
#[derive(Debug, Serialize)]
pub(crate) struct UserComparison {
    pub(crate) alone: UserFigures,
    pub(crate) beside: UserFigures,
    /// Waiting times in seconds, ascending, as (without the greedy user, with the greedy user).
    pub(crate) waits_s: (Vec<f64>, Vec<f64>),
}

/// Comparison of the two runs of a day.
#[derive(Debug, Serialize)]
pub(crate) struct DayComparison {
    pub(crate) pool: &'static str,
    pub(crate) hosts: u16,
    pub(crate) seed: u64,
    /// Figures of the greedy user.
    pub(crate) greedy: UserFigures,
    pub(crate) light: Vec<UserComparison>,
}

impl DayComparison {
    pub(crate) fn of(
        day: &DayScenario,
        seed: u64,
        alone: &Figures,
        beside: &Figures,
    ) -> DayComparison {
        let of =
            |figures: &Figures, user: u32| figures.users.get(&user).cloned().unwrap_or_default();
        let pair = |user: u32| {
            let (alone, beside) = (of(alone, user), of(beside, user));
            let sorted = |of: &UserFigures| {
                let mut waits = of.waits_s.clone();
                waits.sort_by(f64::total_cmp);
                waits
            };
            UserComparison {
                waits_s: (sorted(&alone), sorted(&beside)),
                alone,
                beside,
            }
        };
        let DayScenario { pool, hosts, .. } = *day;
        DayComparison {
            pool,
            hosts,
            seed,
            greedy: of(beside, GREEDY),
            light: LIGHT.map(pair).into(),
        }
    }

    /// True if the greedy user hardly affects the light users: all their jobs run and do not run
    /// longer, and the mean and the maximum waiting time are at most [`WAIT_FACTOR_MAX`] times
    /// those without the greedy user plus [`PREEMPTION_INTERVAL_S`].
    pub(crate) fn is_fair(&self) -> bool {
        let fair = |UserComparison { alone, beside, .. }: &UserComparison| {
            let within = |a: f64, b: f64| b <= a * WAIT_FACTOR_MAX + PREEMPTION_INTERVAL_S;
            (alone.unanswered, beside.unanswered) == (0, 0)
                && (alone.answered, alone.finished) == (beside.answered, beside.finished)
                && within(alone.waited_mean_s, beside.waited_mean_s)
                && within(alone.waited_most_s, beside.waited_most_s)
                && beside.run_mean_s <= alone.run_mean_s * 1.01
        };
        self.light.iter().all(fair)
    }

    pub(crate) fn table(all: &[DayComparison]) -> String {
        let mut text = format!(
            "{:8}{:>6}{:>6}{:>18}{:>18}{:>18}\n",
            "pool", "seed", "user", "wait, mean, s", "wait, most, s", "run, mean, s"
        );
        for day in all {
            for (user, UserComparison { alone, beside, .. }) in LIGHT.iter().zip(&day.light) {
                let two =
                    |of: fn(&UserFigures) -> f64| format!("{:.1}, {:.1}", of(alone), of(beside));
                let (mean, most) = (two(|u| u.waited_mean_s), two(|u| u.waited_most_s));
                let run = two(|u| u.run_mean_s);
                let _ = writeln!(
                    text,
                    "{:8}{:>6}{user:>6}{mean:>18}{most:>18}{run:>18}",
                    day.pool, day.seed
                );
            }
        }
        text + "each without and with a greedy user\n"
    }
}
