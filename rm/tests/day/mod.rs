//! Generates a recording of a day with several users. The replay runs it in virtual time. Each user
//! requests jobs of equal processes at random times. No host has an owner.

use crate::random::Random;
use pvm_rm::policy::Conduct;
use pvm_rm::recording::{Entry, Input};
use pvm_rm::replay::{self, Figures, OfUser};
use pvm_rm::spawns::Rules;
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
const WAIT_S: u64 = 200_000;

/// Parameters of a day: the pool and the jobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Day {
    pub(crate) pool: &'static str,
    /// Number of hosts, each with one processor.
    pub(crate) hosts: u16,
    /// Each job of a light user, as (number of processes, mean seconds of work of each).
    pub(crate) light: (u32, f64),
    /// Number of jobs of both light users together.
    pub(crate) jobs: usize,
    /// Number of light jobs that arrive at the same moment.
    pub(crate) batch: usize,
    /// Mean seconds between two batches of light jobs.
    pub(crate) pause: f64,
    /// Each job of the greedy user, as (number of processes, seconds of work of each). All of them
    /// arrive at the beginning.
    pub(crate) greedy: (u32, f64),
}

/// A pool with more hosts than the light users ever need at once. Without the greedy user they
/// never wait.
pub(crate) const ROOMY: Day = Day {
    pool: "roomy",
    hosts: 24,
    light: (5, 0.5 * HOUR),
    jobs: 22,
    batch: 1,
    pause: HOUR,
    greedy: (6, 4.0 * HOUR),
};
/// A pool in which each job of a light user needs all hosts, and jobs arrive in groups. Even
/// without the greedy user, light users wait for each other and for their own jobs.
///
/// A request for more hosts than are free gets only the free ones. If jobs did not need all hosts,
/// their sizes would therefore differ between runs.
pub(crate) const TIGHT: Day = Day {
    pool: "tight",
    hosts: 12,
    light: (12, 0.1 * HOUR),
    jobs: 24,
    batch: 4,
    pause: 3.6 * HOUR,
    greedy: (4, 4.0 * HOUR),
};
/// Arrival of the first light job, in seconds. By then the index of the greedy user is high enough
/// for preemption (see `GIVE_WAY_MARGIN`).
const BEGIN: f64 = 2.0 * HOUR;

#[derive(Clone, Copy, Debug)]
struct Job {
    user: u32,
    at: f64,
    processes: u32,
    work: f64,
}

/// Results of the same light jobs in two runs: without the greedy user, and with the greedy user.
pub(crate) struct Both {
    pub(crate) alone: Figures,
    pub(crate) beside: Figures,
}

impl Day {
    /// Runs the day without and with the greedy user.
    pub(crate) fn run(&self, seed: u64) -> Both {
        let mut random = Random::new(seed);
        let mut at = BEGIN;
        let mut light = Vec::new();
        for n in 0..self.jobs {
            if n % self.batch == 0 && n > 0 {
                at += random.waits(self.pause);
            }
            let (processes, work) = (self.light.0, self.light.1 * (0.75 + 0.5 * random.unit()));
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
        let run = |jobs: &[Job]| replay::run(&self.record(jobs), conduct()).expect("it runs");
        Both {
            alone: run(&light),
            beside: run(&[greedy, light].concat()),
        }
    }

    /// Returns the recorded input of the resource manager for these jobs.
    fn record(&self, jobs: &[Job]) -> Vec<Entry> {
        let at = |seconds: f64| Micros(((60.0 + seconds) * 1e6) as u64);
        let mut all = vec![Entry {
            at: at(-59.0),
            input: Input::Policy(conduct()),
        }];
        all.push(Entry {
            at: at(-59.0),
            input: Input::Hosts(table(self.hosts)),
        });
        all.extend((1..=self.hosts).map(|host| Entry {
            at: at(-59.0),
            input: report(host),
        }));
        let (mut last, mut ends) = (100, Vec::new());
        for (n, job) in jobs.iter().enumerate() {
            let caller = tid(job.user - GREEDY + 2);
            let number = (caller, n as i32 + 1);
            let request = SpawnRequest {
                file: "worker".into(),
                place: "?spread; free >= 1".into(),
                count: job.processes,
                ..SpawnRequest::default()
            };
            let input = Input::Spawn {
                number,
                caller: h(1),
                user: job.user,
                job: caller,
                request,
            };
            all.push(Entry {
                at: at(job.at),
                input,
            });
            let tids: Vec<Tid> = (0..job.processes).map(|n| tid(last + n)).collect();
            last += job.processes;
            let used = Usage {
                user: Micros((job.work * 1e6) as u64),
                ..Usage::default()
            };
            // The replay uses the amount of the recorded usage, but not the time of the record.
            let end = |tid: &Tid| Entry {
                at: at(job.at),
                input: Input::Ended { tid: *tid, used },
            };
            ends.extend(tids.iter().map(end));
            all.push(Entry {
                at: at(job.at),
                input: Input::Started { number, tids },
            });
        }
        all.extend(ends);
        all.sort_by_key(|entry| entry.at);
        all
    }
}

/// A policy under which requests wait for hosts, and tasks are preempted.
fn conduct() -> Conduct {
    Conduct {
        rules: Rules {
            wait: Micros::from_secs(WAIT_S),
            ..Rules::default()
        },
        ..Conduct::default()
    }
}

fn h(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn tid(local: u32) -> Tid {
    Tid::task(h(1), local).expect("a task")
}

fn table(hosts: u16) -> HostTable {
    let host = |i: u16| {
        let (name, arch) = (format!("h{i}"), "LINUX64".to_string());
        HostEntry {
            id: h(i),
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
fn report(host: u16) -> Input {
    let sample = LoadSample {
        cores: 1,
        available_bytes: 8 << 30,
        ..LoadSample::default()
    };
    let report = LoadReport {
        host: h(host),
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
    Input::Report { report, own: 0 }
}

/// Seeds of the simulated days.
pub(crate) const SEEDS: [u64; 4] = [11, 23, 37, 51];
/// Maximum factor by which the greedy user may prolong the waits of light users. One interval
/// between preemption decisions ([`LOOK_S`]) is added.
const LONGER: f64 = 1.2;
const LOOK_S: f64 = 1.0;

/// Results of one light user without and with the greedy user. Both runs contain the same jobs at
/// the same times.
#[derive(Debug, Serialize)]
pub(crate) struct Pair {
    pub(crate) alone: OfUser,
    pub(crate) beside: OfUser,
    /// Waiting times in seconds, ascending, as (without the greedy user, with the greedy user).
    pub(crate) waits_s: (Vec<f64>, Vec<f64>),
}

/// Comparison of the two runs of a day.
#[derive(Debug, Serialize)]
pub(crate) struct Compared {
    pub(crate) pool: &'static str,
    pub(crate) hosts: u16,
    pub(crate) seed: u64,
    /// Figures of the greedy user.
    pub(crate) greedy: OfUser,
    pub(crate) light: Vec<Pair>,
}

impl Compared {
    pub(crate) fn of(day: &Day, seed: u64, alone: &Figures, beside: &Figures) -> Compared {
        let of =
            |figures: &Figures, user: u32| figures.users.get(&user).cloned().unwrap_or_default();
        let pair = |user: u32| {
            let (alone, beside) = (of(alone, user), of(beside, user));
            let sorted = |of: &OfUser| {
                let mut waits = of.waits_s.clone();
                waits.sort_by(f64::total_cmp);
                waits
            };
            Pair {
                waits_s: (sorted(&alone), sorted(&beside)),
                alone,
                beside,
            }
        };
        let Day { pool, hosts, .. } = *day;
        Compared {
            pool,
            hosts,
            seed,
            greedy: of(beside, GREEDY),
            light: LIGHT.map(pair).into(),
        }
    }

    /// True if the greedy user hardly affects the light users: all their jobs run and do not run
    /// longer, and the mean and the maximum waiting time are at most [`LONGER`] times those without
    /// the greedy user plus [`LOOK_S`].
    pub(crate) fn is_fair(&self) -> bool {
        let fair = |Pair { alone, beside, .. }: &Pair| {
            let within = |a: f64, b: f64| b <= a * LONGER + LOOK_S;
            (alone.unanswered, beside.unanswered) == (0, 0)
                && (alone.answered, alone.finished) == (beside.answered, beside.finished)
                && within(alone.waited_mean_s, beside.waited_mean_s)
                && within(alone.waited_most_s, beside.waited_most_s)
                && beside.run_mean_s <= alone.run_mean_s * 1.01
        };
        self.light.iter().all(fair)
    }

    pub(crate) fn table(all: &[Compared]) -> String {
        let mut text = format!(
            "{:8}{:>6}{:>6}{:>18}{:>18}{:>18}\n",
            "pool", "seed", "user", "wait, mean, s", "wait, most, s", "run, mean, s"
        );
        for day in all {
            for (user, Pair { alone, beside, .. }) in LIGHT.iter().zip(&day.light) {
                let two = |of: fn(&OfUser) -> f64| format!("{:.1}, {:.1}", of(alone), of(beside));
                let (mean, most) = (two(|u| u.waited_mean_s), two(|u| u.waited_most_s));
                let run = two(|u| u.run_mean_s);
                let _ = writeln!(
                    text,
                    "{:8}{:>6}{user:>6}{mean:>18}{most:>18}{run:>18}",
                    day.pool, day.seed
                );
            }
        }
        text + "each alone, and beside a greedy one\n"
    }
}
