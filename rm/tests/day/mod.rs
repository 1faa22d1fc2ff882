//! Generates a day of several users as a recording of the resource manager's input, which the
//! replay runs in virtual time. Each user requests whole jobs of equal processes at random times;
//! no owner is at the hosts.

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
/// The user who requests all hosts, all day.
pub(crate) const GREEDY: u32 = 1000;
/// Users who request small jobs now and then.
pub(crate) const LIGHT: [u32; 2] = [1001, 1002];
/// Seconds that a job may wait; longer than the day.
const WAIT_S: u64 = 200_000;

/// A pool and its demand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Day {
    pub(crate) pool: &'static str,
    /// Hosts with one processor each.
    pub(crate) hosts: u16,
    /// Processes of a light job, and mean seconds of work of each.
    pub(crate) light: (u32, f64),
    /// Number of light jobs of both users; `batch` of them arrive at the same moment.
    pub(crate) jobs: usize,
    pub(crate) batch: usize,
    /// Mean seconds between two arrivals.
    pub(crate) pause: f64,
    /// Processes and seconds of work of the greedy user's jobs, which all arrive at the beginning.
    pub(crate) greedy: (u32, f64),
}

/// More hosts than the light users ever need at once: without the greedy user they never wait.
pub(crate) const ROOMY: Day = Day {
    pool: "roomy",
    hosts: 24,
    light: (5, 0.5 * HOUR),
    jobs: 22,
    batch: 1,
    pause: HOUR,
    greedy: (6, 4.0 * HOUR),
};
/// Jobs that each take all hosts and arrive in groups: light users wait for each other and for
/// their own jobs even without the greedy user.
///
/// A request for more than the free hosts gets what there is. Jobs that leave some hosts free would
/// therefore differ in size from run to run.
pub(crate) const TIGHT: Day = Day {
    pool: "tight",
    hosts: 12,
    light: (12, 0.1 * HOUR),
    jobs: 24,
    batch: 4,
    pause: 3.6 * HOUR,
    greedy: (4, 4.0 * HOUR),
};
/// Arrival of the first light job, in seconds. By then the greedy user has used enough to be
/// preempted (see `GIVE_WAY_MARGIN`).
const BEGIN: f64 = 2.0 * HOUR;

#[derive(Clone, Copy, Debug)]
struct Job {
    user: u32,
    at: f64,
    processes: u32,
    work: f64,
}

/// Results of the same light jobs without and with the greedy user.
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
        // Twice the work that all hosts can do in the day.
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

    /// Returns the input of the resource manager.
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
            // Only the amount of usage counts, not the time of its report.
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

/// A policy under which jobs wait for their turn.
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

/// Seeds of the days.
pub(crate) const SEEDS: [u64; 4] = [11, 23, 37, 51];
/// Bounds for the waits of light users next to a greedy one: a fifth longer, plus one interval
/// between preemption decisions.
const LONGER: f64 = 1.2;
const LOOK_S: f64 = 1.0;

/// Results of one light user without and with the greedy user. The jobs and their arrivals are the
/// same.
#[derive(Debug, Serialize)]
pub(crate) struct Pair {
    pub(crate) alone: OfUser,
    pub(crate) beside: OfUser,
    /// Sorted waits in seconds, without and with the greedy user.
    pub(crate) waits_s: (Vec<f64>, Vec<f64>),
}

/// Comparison of both runs of a day.
#[derive(Debug, Serialize)]
pub(crate) struct Compared {
    pub(crate) pool: &'static str,
    pub(crate) hosts: u16,
    pub(crate) seed: u64,
    /// Results of the greedy user.
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

    /// True if all jobs of the light users ran, waited at most [`LONGER`] times as long plus
    /// [`LOOK_S`], on average and at worst, and did not run longer.
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
        text + "each without and with a greedy user\n"
    }
}
