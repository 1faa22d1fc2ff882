//! A program that is master and worker: the master spawns further processes of itself.

use crate::in_process::run_in_process;
use crate::protocol::RUN_VARIABLE;
use crate::raw::{Failure, RawWorker};
use crate::run::WorkerProgram;
use crate::start::{MasterOptions, RunOutcome};
use crate::typed::{Driver, PackedDriver, PackedWorker, Worker};
use crate::vm_master::run_master;
use crate::vm_worker::work;
use libpvm::Vm;
use sempa_work_dispatch::Groups;

/// How a program carries out its run.
#[derive(Clone, Debug)]
pub struct ProgramOptions {
    pub master: MasterOptions,
    /// Number of workers of this program, unless the driver sets the workers itself.
    pub workers: u32,
    /// True to execute all tasks in this process, without a virtual machine.
    pub in_process: bool,
}

impl ProgramOptions {
    /// Returns the options of a run with this name and number of workers.
    pub fn new(run_name: impl Into<String>, workers: u32) -> Self {
        Self {
            master: MasterOptions::new(run_name),
            workers,
            in_process: false,
        }
    }
}

/// True if a master has started this process as a worker.
pub fn is_worker() -> bool {
    std::env::var_os(RUN_VARIABLE).is_some()
}

/// Executes tasks until the run releases this worker. For programs that are only workers.
///
/// # Errors
/// The virtual machine or the run cannot be reached, or the worker cannot use the init data.
pub fn run_as_worker<W: Worker>(groups: Groups) -> Result<(), Failure> {
    let vm = Vm::enroll()?;
    work(&vm, &mut PackedWorker::<W>::default(), groups)?;
    Ok(vm.exit()?)
}

/// Carries out a run. In a process that a master has started, executes tasks instead and exits the
/// process at the end.
///
/// # Errors
/// The run cannot begin or ended early; the error says what this means for the results.
pub fn run_program<D, W>(driver: D, options: &ProgramOptions) -> Result<(D, RunOutcome), Failure>
where
    D: Driver + 'static,
    W: Worker<Task = D::Task, InitData = D::InitData, Update = D::Update, Partial = D::Partial>,
{
    carry_out(driver, &mut PackedWorker::<W>::default(), options)
}

/// As [`run_program`], with a worker of bytes.
pub(crate) fn carry_out<D: Driver + 'static>(
    driver: D,
    worker: &mut impl RawWorker,
    options: &ProgramOptions,
) -> Result<(D, RunOutcome), Failure> {
    if is_worker() {
        let vm = Vm::enroll()?;
        work(&vm, worker, Groups::ALL)?;
        vm.exit()?;
        std::process::exit(0);
    }
    let driver = PackedDriver(driver);
    if options.in_process {
        let settings = options.master.settings.clone();
        let (outcome, driver) = run_in_process(driver, worker, settings)?;
        return Ok((driver.0, outcome));
    }
    let vm = Vm::enroll()?;
    let own_program = std::env::current_exe()?.to_string_lossy().into_owned();
    let mut master_options = options.master.clone();
    let default_workers = WorkerProgram::new(own_program, options.workers);
    master_options
        .default_workers
        .get_or_insert(default_workers);
    let (outcome, driver) = run_master(&vm, driver, &master_options)?;
    vm.exit()?;
    Ok((driver.0, outcome))
}
