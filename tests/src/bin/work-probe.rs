//! A master-worker program for tests: `work-probe MODE [NUMBER]` prints what the driver has seen,
//! one fact per line.
//!
//! | mode | the run |
//! | --- | --- |
//! | `poison` | 30 tasks; every tenth kills its worker |
//! | `update` | tasks that run until an update arrives, which the driver sends when all have begun |
//! | `init` | NUMBER workers get init data of 1 MiB and return its sum |
//! | `pause` | the driver suspends its first worker when a task has begun |

use libpvm::Vm;
use libpvm::proto::Tid;
use master_worker::{
    AttemptRecord, Driver, Failure, Groups, MasterOptions, PackedDriver, PoolEvent, RunHandle,
    Task, TaskContext, Worker, WorkerProgram, is_worker, run_as_worker, run_master,
};
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;
use std::time::Duration;

/// The master's connection, for the calls of its driver.
static VM: OnceLock<Vm> = OnceLock::new();

const INIT_BYTES: usize = 1 << 20;
const UPDATE: u64 = 4_711;
/// Number of tasks that wait for the update.
const WAITING_TASKS: u64 = 3;

/// What a task does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Action {
    Return(u64),
    Abort,
    /// Say that the task has begun, and return the first update.
    AwaitUpdate,
    /// Return the sum of the init data.
    SumInit,
    /// Say that the task has begun, and sleep.
    Sleep(Duration),
}

impl Task for Action {
    type Result = u64;
}

#[derive(Serialize, Deserialize)]
struct Probe {
    mode: String,
    number: u64,
    begun: u64,
    sum: u64,
    results: u64,
    ready_workers: u64,
    /// Tid of the first worker.
    first_worker: i32,
    pauses: u64,
    quarantined: Vec<String>,
}

impl Probe {
    fn tasks(&self) -> Result<Vec<Action>, Failure> {
        let numbered = |number: u64| match number % 10 {
            0 => Action::Abort,
            _ => Action::Return(number),
        };
        match self.mode.as_str() {
            "poison" => Ok((1..=30).map(numbered).collect()),
            "update" => Ok(vec![Action::AwaitUpdate; WAITING_TASKS as usize]),
            // Each worker gets some.
            "init" => Ok(vec![Action::SumInit; 20 * self.number as usize]),
            "pause" => Ok(vec![Action::Sleep(Duration::from_millis(500)); 2]),
            mode => Err(format!("there is no mode {mode}").into()),
        }
    }
}

impl Driver for Probe {
    type Task = Action;
    type InitData = Vec<u8>;
    type Update = u64;
    /// A task has begun.
    type Partial = ();

    fn initial_tasks(&mut self, _run: &mut RunHandle<'_, Self>) -> Result<Vec<Action>, Failure> {
        self.tasks()
    }

    fn init_data(&mut self) -> Result<Vec<u8>, Failure> {
        Ok(match self.mode.as_str() {
            "init" => (0..INIT_BYTES).map(|index| index as u8).collect(),
            _ => Vec::new(),
        })
    }

    fn on_result(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
        _task: Action,
        result: u64,
    ) -> Result<(), Failure> {
        self.results += 1;
        self.sum += result;
        Ok(())
    }

    fn on_partial_result(
        &mut self,
        run: &mut RunHandle<'_, Self>,
        _task: Action,
        _begun: (),
    ) -> Result<(), Failure> {
        self.begun += 1;
        if self.mode == "update" && self.begun == WAITING_TASKS {
            run.update(&UPDATE)?;
        }
        if self.mode == "pause" && self.begun == 1 {
            let vm = VM.get().ok_or("no connection")?;
            vm.task(Tid::from_raw(self.first_worker)).suspend()?;
        }
        Ok(())
    }

    fn on_quarantined(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
        task: Action,
        history: &[AttemptRecord],
    ) -> Result<(), Failure> {
        assert_eq!(task, Action::Abort);
        let reasons: Vec<String> = history.iter().map(|r| r.reason.to_string()).collect();
        self.quarantined.push(reasons.join("; "));
        Ok(())
    }

    fn on_pool_event(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
        event: &PoolEvent,
    ) -> Result<(), Failure> {
        match event {
            PoolEvent::WorkerReady { worker, .. } => {
                if self.ready_workers == 0 {
                    self.first_worker = i32::try_from(worker.0)?;
                }
                self.ready_workers += 1;
            }
            PoolEvent::WorkerPaused { .. } => self.pauses += 1,
            _ => {}
        }
        Ok(())
    }
}

struct Executor {
    init_data: Vec<u8>,
}

impl Worker for Executor {
    type Task = Action;
    type InitData = Vec<u8>;
    type Update = u64;
    type Partial = ();

    fn new(init_data: Vec<u8>) -> Result<Self, Failure> {
        Ok(Self { init_data })
    }

    fn execute(
        &mut self,
        task: Action,
        context: &mut TaskContext<'_, '_, Self>,
    ) -> Result<u64, Failure> {
        match task {
            Action::Return(number) => Ok(number),
            Action::Abort => std::process::abort(),
            Action::AwaitUpdate => {
                context.send_partial(&())?;
                loop {
                    if let Some(update) = context.update()? {
                        return Ok(update);
                    }
                    std::thread::yield_now();
                }
            }
            Action::SumInit => Ok(self.init_data.iter().map(|byte| u64::from(*byte)).sum()),
            Action::Sleep(duration) => {
                context.send_partial(&())?;
                std::thread::sleep(duration);
                Ok(1)
            }
        }
    }
}

fn main() -> Result<(), Failure> {
    if is_worker() {
        return run_as_worker::<Executor>(Groups::ALL);
    }
    let mut arguments = std::env::args().skip(1);
    let mode = arguments.next().unwrap_or_default();
    let number = arguments.next().map_or(Ok(3), |text| text.parse())?;
    let own_program = std::env::current_exe()?.to_string_lossy().into_owned();
    let mut options = MasterOptions::new("probe");
    options.settings.retry.delay = 10_000;
    options.default_workers = Some(WorkerProgram::new(own_program, u32::try_from(number)?));
    let probe = Probe {
        mode,
        number,
        begun: 0,
        sum: 0,
        results: 0,
        ready_workers: 0,
        first_worker: 0,
        pauses: 0,
        quarantined: Vec::new(),
    };
    let vm = Vm::enroll()?;
    VM.get_or_init(|| vm.clone());
    let (outcome, PackedDriver(probe)) = run_master(&vm, PackedDriver(probe), &options)?;
    let counts = outcome.statistics.counts;
    println!("results {}", probe.results);
    println!("sum {}", probe.sum);
    println!("ready {}", probe.ready_workers);
    println!("pauses {}", probe.pauses);
    println!("copies {}", counts.second_copies);
    println!("lost {}", counts.workers_lost);
    println!("init bytes {}", outcome.init_bytes_sent);
    for reasons in probe.quarantined {
        println!("quarantined {reasons}");
    }
    Ok(())
}
