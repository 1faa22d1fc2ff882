//! The master-worker program that `cargo xtask bench work` measures: `work-farm NAME=VALUE...`
//! prints one line of JSON.
//!
//! | argument | meaning | default |
//! | --- | --- | --- |
//! | `tasks` | number of measured results | 100,000 |
//! | `grain_us` | mean processor time of a task in microseconds | 0 |
//! | `spread` | `fixed` or `exponential` distribution of that time | `fixed` |
//! | `payload` | bytes of data in each task and in each result | 0 |
//! | `workers` | number of resident workers | 2 |
//! | `hosts` | hosts of the workers, separated by commas; without it the placement decides | |
//! | `waiting` | number of tasks that always wait: each result adds a task; 0: all tasks are added at the start | 0 |
//! | `flow` | `batched`, `single` (one task per message, with look-ahead) or `alone` (a worker has one task) | `batched` |
//! | `journal` | directory of a journal | none |

use bytes::Bytes;
use master_worker::{
    ClassId, Driver, Failure, Nothing, PoolEvent, ProgramOptions, RunHandle, Task, TaskContext,
    Worker, WorkerPlace, WorkerProgram, run_program,
};
use nix::sys::resource::{UsageWho, getrusage};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Tasks that a worker may hold in the flow `single`.
const SINGLE_FLOW_HELD_TASKS: usize = 16;
/// Number of additions between two looks at the processor clock, which is a system call.
const ADDITIONS_PER_LOOK: u64 = 500;

/// How tasks travel to the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Batched,
    Single,
    Alone,
}

/// Parameters of a run, from the command line.
#[derive(Clone, Debug)]
struct FarmArguments {
    tasks: u64,
    grain_us: f64,
    is_exponential: bool,
    payload: usize,
    workers: u32,
    hosts: Vec<String>,
    waiting: u64,
    flow: Flow,
    journal: Option<String>,
}

impl FarmArguments {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let mut values = BTreeMap::new();
        for argument in arguments {
            let (name, value) = argument
                .split_once('=')
                .ok_or_else(|| format!("{argument:?} is not NAME=VALUE"))?;
            values.insert(name.to_string(), value.to_string());
        }
        let mut take =
            |name: &str, default: &str| values.remove(name).unwrap_or_else(|| default.to_string());
        let parsed = Self {
            tasks: take("tasks", "100000").parse()?,
            grain_us: take("grain_us", "0").parse()?,
            is_exponential: match take("spread", "fixed").as_str() {
                "fixed" => false,
                "exponential" => true,
                other => return Err(format!("there is no spread {other:?}").into()),
            },
            payload: take("payload", "0").parse()?,
            workers: take("workers", "2").parse()?,
            hosts: take("hosts", "")
                .split(',')
                .filter(|host| !host.is_empty())
                .map(String::from)
                .collect(),
            waiting: take("waiting", "0").parse()?,
            flow: match take("flow", "batched").as_str() {
                "batched" => Flow::Batched,
                "single" => Flow::Single,
                "alone" => Flow::Alone,
                other => return Err(format!("there is no flow {other:?}").into()),
            },
            journal: Some(take("journal", "")).filter(|path| !path.is_empty()),
        };
        match values.keys().next() {
            Some(name) => Err(format!("there is no argument {name:?}").into()),
            None => Ok(parsed),
        }
    }

    fn program_options(&self) -> ProgramOptions {
        let mut options = ProgramOptions::new("work-farm", self.workers);
        options.master.journal = self.journal.as_ref().map(Into::into);
        let settings = &mut options.master.settings;
        match self.flow {
            Flow::Batched => {}
            Flow::Single => {
                settings.report_interval = 0;
                settings.limits.tasks_per_worker = SINGLE_FLOW_HELD_TASKS;
            }
            Flow::Alone => {
                settings.report_interval = 0;
                settings.look_ahead = 0;
            }
        }
        options
    }
}

/// A task: a busy loop, and data that the worker sends back.
#[derive(Debug, Serialize, Deserialize)]
struct Job {
    is_measured: bool,
    grain_ns: u64,
    key: f64,
    data: Bytes,
}

impl Task for Job {
    type Result = Done;

    fn key(&self) -> f64 {
        self.key
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Done {
    /// Nanoseconds between the end of the worker's previous task and the start of this one; 0 for
    /// the worker's first task.
    gap_ns: u64,
    data: Bytes,
}

/// Clocks at the first measured task.
#[derive(Clone, Copy, Debug)]
struct Start {
    at: Instant,
    master_cpu: Duration,
    machine_cpu: Duration,
}

/// Times of the whole measured part.
#[derive(Clone, Debug, Default)]
struct Measured {
    seconds: f64,
    master_cpu_s: f64,
    machine_cpu_s: f64,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Farm {
    #[serde(skip)]
    arguments: Option<FarmArguments>,
    ready_workers: u32,
    open_warm_up_tasks: u64,
    added: u64,
    results: u64,
    work_ns: u64,
    /// State of the pseudo-random numbers.
    random: u64,
    #[serde(skip)]
    start: Option<Start>,
    #[serde(skip)]
    gaps_ns: Vec<u64>,
    #[serde(skip)]
    measured: Option<Measured>,
}

impl Farm {
    fn new(arguments: FarmArguments) -> Self {
        Self {
            arguments: Some(arguments),
            random: 1,
            ..Self::default()
        }
    }

    fn arguments(&self) -> Result<&FarmArguments, Failure> {
        Ok(self.arguments.as_ref().ok_or("a restart is not measured")?)
    }

    /// Returns a number from 0 to 1 without 0 (splitmix64).
    fn random(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64 + f64::MIN_POSITIVE
    }

    fn job(&mut self, is_measured: bool) -> Result<Job, Failure> {
        let arguments = self.arguments()?;
        let (mean_us, is_exponential) = (arguments.grain_us, arguments.is_exponential);
        let data = Bytes::from(vec![0; arguments.payload]);
        let factor = if is_exponential {
            -self.random().ln()
        } else {
            1.0
        };
        let grain_ns = (mean_us * factor * 1e3) as u64;
        let key = self.random();
        Ok(Job {
            is_measured,
            grain_ns,
            key,
            data,
        })
    }

    fn jobs(&mut self, count: u64, is_measured: bool) -> Result<Vec<Job>, Failure> {
        (0..count).map(|_| self.job(is_measured)).collect()
    }

    /// Starts the measured part if all workers have started and the warm-up has ended. Otherwise
    /// continues the warm-up.
    fn leave_warm_up(&mut self, run: &mut RunHandle<'_, Self>) -> Result<(), Failure> {
        if self.start.is_some() || self.open_warm_up_tasks > 0 {
            return Ok(());
        }
        let arguments = self.arguments()?.clone();
        if self.ready_workers < arguments.workers {
            self.open_warm_up_tasks = 1;
            run.add(&self.jobs(1, false)?)?;
            return Ok(());
        }
        self.added = match arguments.waiting {
            0 => arguments.tasks,
            waiting => waiting + u64::from(arguments.workers),
        };
        let jobs = self.jobs(self.added, true)?;
        let (master_cpu, machine_cpu) = (own_cpu()?, machine_cpu()?);
        self.start = Some(Start {
            at: Instant::now(),
            master_cpu,
            machine_cpu,
        });
        run.add(&jobs)?;
        if arguments.waiting > 0 {
            // The time in which the waiting tasks are added does not count.
            self.start = Some(Start {
                at: Instant::now(),
                master_cpu: own_cpu()?,
                machine_cpu,
            });
        }
        Ok(())
    }

    fn count_result(&mut self, job: &Job, done: &Done) -> Result<bool, Failure> {
        self.results += 1;
        self.work_ns += job.grain_ns;
        if done.gap_ns > 0 {
            self.gaps_ns.push(done.gap_ns);
        }
        if self.results < self.arguments()?.tasks {
            return Ok(false);
        }
        let start = self.start.ok_or("a measured result before the start")?;
        self.measured = Some(Measured {
            seconds: start.at.elapsed().as_secs_f64(),
            master_cpu_s: own_cpu()?.saturating_sub(start.master_cpu).as_secs_f64(),
            machine_cpu_s: machine_cpu()?
                .saturating_sub(start.machine_cpu)
                .as_secs_f64(),
        });
        Ok(true)
    }

    /// Returns the line of JSON.
    fn report(mut self) -> Result<String, Failure> {
        let arguments = self.arguments()?.clone();
        let measured = self.measured.take().ok_or("the run was not finished")?;
        self.gaps_ns.sort_unstable();
        let gap_us = |share: f64| {
            let index = (self.gaps_ns.len() as f64 * share) as usize;
            let gap = self
                .gaps_ns
                .get(index.min(self.gaps_ns.len().saturating_sub(1)));
            gap.map(|gap| *gap as f64 / 1e3)
        };
        let tasks = self.results as f64;
        let report = serde_json::json!({
            "tasks": self.results,
            "seconds": measured.seconds,
            "tasks_per_second": tasks / measured.seconds,
            "efficiency":
                self.work_ns as f64 / 1e9 / (f64::from(arguments.workers) * measured.seconds),
            "gap_median_us": gap_us(0.5),
            "gap_p99_us": gap_us(0.99),
            "master_us_per_task": measured.master_cpu_s * 1e6 / tasks,
            "machine_us_per_task": measured.machine_cpu_s * 1e6 / tasks,
        });
        Ok(report.to_string())
    }
}

impl Driver for Farm {
    type Task = Job;
    type InitData = ();
    type Update = Nothing;
    type Partial = Nothing;

    fn initial_tasks(&mut self, _run: &mut RunHandle<'_, Self>) -> Result<Vec<Job>, Failure> {
        self.open_warm_up_tasks = u64::from(self.arguments()?.workers);
        self.jobs(self.open_warm_up_tasks, false)
    }

    fn configure(&mut self, run: &mut RunHandle<'_, Self>) -> Result<(), Failure> {
        let arguments = self.arguments()?;
        let own_program = std::env::current_exe()?.to_string_lossy().into_owned();
        for (class, host) in arguments.hosts.iter().enumerate() {
            let share = arguments.workers / u32::try_from(arguments.hosts.len())?;
            let mut program = WorkerProgram::new(own_program.clone(), share);
            program.place = WorkerPlace::Host(host.clone());
            run.set_workers(ClassId(u16::try_from(class)?), program);
        }
        Ok(())
    }

    fn init_data(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn on_result(
        &mut self,
        run: &mut RunHandle<'_, Self>,
        job: Job,
        done: Done,
    ) -> Result<(), Failure> {
        if !job.is_measured {
            self.open_warm_up_tasks -= 1;
            return self.leave_warm_up(run);
        }
        if self.measured.is_some() {
            return Ok(());
        }
        if self.count_result(&job, &done)? {
            run.stop();
            return Ok(());
        }
        let arguments = self.arguments()?;
        if arguments.waiting > 0 {
            let next = self.job(true)?;
            self.added += 1;
            run.add(&[next])?;
        }
        Ok(())
    }

    fn on_pool_event(
        &mut self,
        run: &mut RunHandle<'_, Self>,
        event: &PoolEvent,
    ) -> Result<(), Failure> {
        match event {
            PoolEvent::WorkerReady { .. } => {
                self.ready_workers += 1;
                self.leave_warm_up(run)
            }
            PoolEvent::WorkerLost { reason, .. } if self.measured.is_none() => {
                Err(format!("a worker was lost: {reason}").into())
            }
            _ => Ok(()),
        }
    }
}

struct Looper {
    previous_end: Option<Instant>,
}

impl Worker for Looper {
    type Task = Job;
    type InitData = ();
    type Update = Nothing;
    type Partial = Nothing;

    fn new(_data: ()) -> Result<Self, Failure> {
        Ok(Self { previous_end: None })
    }

    fn execute(
        &mut self,
        job: Job,
        _context: &mut TaskContext<'_, '_, Self>,
    ) -> Result<Done, Failure> {
        let gap = self
            .previous_end
            .map_or(Duration::ZERO, |end| end.elapsed());
        use_processor(Duration::from_nanos(job.grain_ns))?;
        self.previous_end = Some(Instant::now());
        Ok(Done {
            gap_ns: u64::try_from(gap.as_nanos())?,
            data: job.data,
        })
    }
}

/// Uses this much processor time. The C programs of the other systems do the same.
fn use_processor(time: Duration) -> Result<(), Failure> {
    if time.is_zero() {
        return Ok(());
    }
    let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let end = now()? + time;
    let mut state = 1u64;
    while now()? < end {
        for _ in 0..ADDITIONS_PER_LOOK {
            state = black_box(
                state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1),
            );
        }
    }
    Ok(())
}

/// Returns the processor time of this process.
fn own_cpu() -> Result<Duration, Failure> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let micros = |time: nix::sys::time::TimeVal| {
        Duration::from_micros((time.tv_sec() * 1_000_000 + time.tv_usec()).unsigned_abs())
    };
    Ok(micros(usage.user_time()) + micros(usage.system_time()))
}

/// Returns the processor time of all processes of the machine since its start.
fn machine_cpu() -> Result<Duration, Failure> {
    let total = <procfs::KernelStats as procfs::CurrentSI>::current()?.total;
    let used = total.user
        + total.nice
        + total.system
        + total.irq.unwrap_or(0)
        + total.softirq.unwrap_or(0);
    Ok(Duration::from_secs_f64(
        used as f64 / procfs::ticks_per_second() as f64,
    ))
}

fn main() -> Result<(), Failure> {
    let arguments = FarmArguments::parse(std::env::args().skip(1))?;
    let options = arguments.program_options();
    let (farm, _) = run_program::<Farm, Looper>(Farm::new(arguments), &options)?;
    println!("{}", farm.report()?);
    Ok(())
}
