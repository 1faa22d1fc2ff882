//! A master-worker program for tests: `work-probe MODE [NUMBER]` prints what the driver has seen,
//! one fact per line.
//!
//! | mode | the run |
//! | --- | --- |
//! | `poison` | 30 tasks; every tenth kills its worker |
//! | `update` | tasks that run until an update arrives, which the driver sends when all have begun |
//! | `init` | NUMBER workers get init data of 1 MiB and return its sum |
//! | `pause` | the driver suspends its first worker when a task has begun |
//! | `refresh` | NUMBER workers return the sum of their init data, which the driver replaces |
//! | `stop` | two tasks wait; the driver abandons one, and updates the worker of the other |
//! | `slow` | a callback waits until the worker has executed further tasks |
//! | `long` | 40 tasks of half a second on NUMBER workers |

use libpvm::Vm;
use libpvm::proto::Tid;
use master_worker::{
    AttemptRecord, Driver, Failure, Groups, MasterOptions, PackedDriver, PoolEvent, RunHandle,
    Task, TaskContext, Worker, WorkerId, WorkerProgram, is_worker, run_as_worker, run_master,
};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The master's connection, for the calls of its driver.
static VM: OnceLock<Vm> = OnceLock::new();

const INIT_BYTES: usize = 1 << 20;
const UPDATE: u64 = 4_711;
/// Number of tasks that wait for the update.
const WAITING_TASKS: u64 = 3;
/// Each byte of the init data that replace the first ones.
const NEW_BYTE: u8 = 2;
/// Tasks that the worker executes while a callback runs.
const OVERLAPPED_TASKS: u64 = 5;
const CALLBACK_TIMEOUT: Duration = Duration::from_secs(60);

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
    /// Say that the task has begun, and return an update, or 0 when the task is canceled.
    AwaitEnd,
    /// Append a byte to a file and compute for a millisecond.
    Count(PathBuf),
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
    /// The workers in the order in which they became ready.
    workers: Vec<WorkerId>,
    overlapped_tasks: u64,
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
            "refresh" => Ok(vec![Action::SumInit; 20 * self.number as usize]),
            "stop" => Ok(vec![Action::AwaitEnd; 2]),
            "slow" => Ok(vec![Action::Count(counter_file()?); 200]),
            "long" => Ok(vec![Action::Sleep(Duration::from_millis(500)); 40]),
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
            "init" | "refresh" => (0..INIT_BYTES).map(|index| index as u8).collect(),
            _ => Vec::new(),
        })
    }

    fn on_result(
        &mut self,
        run: &mut RunHandle<'_, Self>,
        _task: Action,
        result: u64,
    ) -> Result<(), Failure> {
        self.results += 1;
        self.sum += result;
        let first_tasks = 20 * self.number;
        if self.mode == "refresh" && self.results == first_tasks {
            run.refresh(&vec![NEW_BYTE; INIT_BYTES], Some(Groups::ALL))?;
            run.add(&vec![Action::SumInit; first_tasks as usize])?;
        }
        if self.mode == "slow" && self.results == 50 {
            self.overlapped_tasks = wait_for_tasks()?;
        }
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
            let first = self.workers.first().ok_or("no worker")?;
            vm.task(Tid::from_raw(i32::try_from(first.0)?)).suspend()?;
        }
        if self.mode == "stop" && self.begun == 2 {
            let [first, second] = self.workers[..] else {
                return Err(format!("not two workers: {:?}", self.workers).into());
            };
            run.stop_work(first).ok_or("the worker executes no task")?;
            run.update_worker(second, &UPDATE)?;
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
                self.workers.push(*worker);
                self.ready_workers += 1;
            }
            PoolEvent::WorkerPaused { .. } => self.pauses += 1,
            _ => {}
        }
        Ok(())
    }
}

/// Returns the file in which a worker counts its tasks.
fn counter_file() -> Result<PathBuf, Failure> {
    let program = std::env::current_exe()?;
    Ok(program.with_extension("counter"))
}

fn file_size(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// Waits until workers have executed further tasks. Returns their number.
fn wait_for_tasks() -> Result<u64, Failure> {
    let (file, began) = (counter_file()?, Instant::now());
    let before = file_size(&file);
    loop {
        let executed = file_size(&file) - before;
        if executed >= OVERLAPPED_TASKS || began.elapsed() > CALLBACK_TIMEOUT {
            return Ok(executed);
        }
        std::thread::yield_now();
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
            Action::AwaitEnd => {
                context.send_partial(&())?;
                while !context.is_canceled()? {
                    if let Some(update) = context.update()? {
                        return Ok(update);
                    }
                    std::thread::yield_now();
                }
                Ok(0)
            }
            Action::Count(path) => {
                let mut file = std::fs::File::options()
                    .append(true)
                    .create(true)
                    .open(path)?;
                file.write_all(b".")?;
                let began = Instant::now();
                while began.elapsed() < Duration::from_millis(1) {}
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
    // The loss of a host must be noticed, not only its slowness.
    options.settings.second_copies = mode != "long";
    options.default_workers = Some(WorkerProgram::new(own_program, u32::try_from(number)?));
    let probe = Probe {
        mode,
        number,
        begun: 0,
        sum: 0,
        results: 0,
        ready_workers: 0,
        workers: Vec::new(),
        overlapped_tasks: 0,
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
    println!("pruned {}", counts.tasks_pruned);
    println!("overlapped {}", probe.overlapped_tasks);
    println!("init bytes {}", outcome.init_bytes_sent);
    for reasons in probe.quarantined {
        println!("quarantined {reasons}");
    }
    Ok(())
}
