//! Calls that carry out a run or a worker, and calls about errors.

#![allow(
    unsafe_code,
    reason = "C programs pass pointers, and the names are exported"
)]

use super::driver::{self, CDriver};
use super::enrolled::is_task_of_libpvm3;
use super::memory;
use super::run::worker_program;
use super::worker::{self, CWorker};
use crate::abi;
use crate::errors::{
    self, CallError, CallResult, NO_MASTER, OK, guard, set_callback_error, with_last_error,
};
use crate::settings::duration_or;
use libpvm::Vm;
use master_worker::{MasterOptions, RunOutcome, Settings, WorkerEnd};
use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering};

/// Tid of this process in its run; 0 if there is no run, and -1 for a run in one process.
static TID: AtomicI32 = AtomicI32::new(NO_RUN);
const NO_RUN: i32 = 0;
const IN_PROCESS: i32 = -1;

/// Marks this process as busy with a run until the value is dropped.
struct BusyMark;

impl BusyMark {
    /// # Errors
    /// The process is busy with another run.
    fn set(tid: i32) -> CallResult<Self> {
        match TID.compare_exchange(NO_RUN, tid, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Ok(Self),
            Err(_) => Err(CallError::busy()),
        }
    }
}

impl Drop for BusyMark {
    fn drop(&mut self) {
        TID.store(NO_RUN, Ordering::Relaxed);
    }
}

/// Returns copies of the options.
///
/// # Safety
/// `options` is null or a structure with valid pointers.
unsafe fn master_options(options: *const abi::Options) -> CallResult<MasterOptions> {
    let initial = abi::Options {
        size: size_of::<abi::Options>(),
        run_name: std::ptr::null(),
        journal: std::ptr::null(),
        settings: std::ptr::null(),
        workers: std::ptr::null(),
        master_wait_s: 0.0,
        progress_interval_s: 0.0,
    };
    // SAFETY: by this function's contract.
    let (options, run_name, journal) = unsafe {
        let options = memory::read_struct("options", options, initial)?;
        (
            options,
            memory::optional_text("run_name", options.run_name)?,
            memory::optional_text("journal", options.journal)?,
        )
    };
    let run_name = run_name.filter(|name| !name.is_empty());
    let run_name = run_name.ok_or_else(|| CallError::argument("run_name is empty"))?;
    let mut master = MasterOptions::new(run_name);
    master.journal = journal.map(PathBuf::from);
    if !options.settings.is_null() {
        let defaults = Settings::default();
        let initial = abi::Settings::new(&defaults);
        // SAFETY: by this function's contract.
        let settings = unsafe { memory::read_struct("settings", options.settings, initial)? };
        master.settings = settings.to_settings(&defaults)?;
    }
    if !options.workers.is_null() {
        // SAFETY: by this function's contract.
        master.default_workers = Some(unsafe { worker_program(options.workers)? });
    }
    let master_wait = duration_or("master_wait_s", options.master_wait_s, None)?;
    master.master_wait = master_wait.unwrap_or(master.master_wait);
    let interval = options.progress_interval_s;
    master.progress_interval = duration_or("progress_interval_s", interval, None)?;
    Ok(master)
}

/// Returns a copy of the driver's callbacks.
///
/// # Safety
/// `driver` is null or a structure.
unsafe fn c_driver(driver: *const driver::Callbacks, has_journal: bool) -> CallResult<CDriver> {
    let initial = driver::Callbacks::NONE;
    // SAFETY: by this function's contract.
    let callbacks = unsafe { memory::read_struct("driver", driver, initial)? };
    callbacks.check(has_journal)?;
    Ok(CDriver::new(callbacks))
}

/// Stores the result of a run.
///
/// # Safety
/// `target` is null or a structure that may be written.
unsafe fn store_outcome(target: *mut abi::Outcome, outcome: &RunOutcome) -> CallResult<()> {
    if target.is_null() {
        return Ok(());
    }
    // SAFETY: by this function's contract.
    unsafe { memory::write_struct("outcome", target, &abi::Outcome::new(outcome)) }
}

/// # Safety
/// The pointers are null or valid structures; callbacks may be called until this function returns.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_work_master(
    options: *const abi::Options,
    driver: *const driver::Callbacks,
    outcome: *mut abi::Outcome,
) -> c_int {
    guard(|| {
        // SAFETY: by this function's contract.
        let (options, driver) = unsafe {
            let options = master_options(options)?;
            let driver = c_driver(driver, options.journal.is_some())?;
            (options, driver)
        };
        let vm = Vm::enroll().map_err(CallError::vm)?;
        let busy = BusyMark::set(vm.tid().raw())?;
        let result = master_worker::run_master(&vm, driver, &options);
        drop(busy);
        let left = vm.exit();
        let (result, _driver) = result?;
        left.map_err(CallError::vm)?;
        // SAFETY: by this function's contract.
        unsafe { store_outcome(outcome, &result)? };
        Ok(OK)
    })
}

/// # Safety
/// As [`sempa_work_master`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_work_in_process(
    options: *const abi::Options,
    driver: *const driver::Callbacks,
    worker: *const worker::Callbacks,
    outcome: *mut abi::Outcome,
) -> c_int {
    guard(|| {
        // SAFETY: by this function's contract.
        let (options, driver, callbacks) = unsafe {
            let options = master_options(options)?;
            let driver = c_driver(driver, false)?;
            let initial = worker::Callbacks::NONE;
            let worker = memory::read_struct("worker", worker, initial)?;
            (options, driver, worker)
        };
        let mut worker = CWorker::new(callbacks)?;
        let busy = BusyMark::set(IN_PROCESS)?;
        let result = master_worker::run_in_process(driver, &mut worker, options.settings);
        drop(busy);
        // SAFETY: by this function's contract.
        unsafe { store_outcome(outcome, &result?.0)? };
        Ok(OK)
    })
}

/// # Safety
/// As [`sempa_work_master`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_work_worker(worker: *const worker::Callbacks) -> c_int {
    guard(|| {
        let initial = worker::Callbacks::NONE;
        // SAFETY: by this function's contract.
        let callbacks = unsafe { memory::read_struct("worker", worker, initial)? };
        let mut worker = CWorker::new(callbacks)?;
        if is_task_of_libpvm3() {
            return Err(CallError::enrolled_before());
        }
        let vm = Vm::enroll().map_err(CallError::vm)?;
        let busy = BusyMark::set(vm.tid().raw())?;
        let end = master_worker::work(&vm, &mut worker, callbacks.groups());
        drop(busy);
        let left = vm.exit();
        let end = end.map_err(|error| CallError::worker(&error))?;
        left.map_err(CallError::vm)?;
        match end {
            WorkerEnd::Released => Ok(OK),
            WorkerEnd::NoMaster(patience) => {
                let seconds = patience.as_secs();
                errors::set_last_error(&format!(
                    "the master was lost, and no next one came within {seconds} s; results that \
                     the run has not stored are lost, and the next master repeats their tasks"
                ));
                Ok(NO_MASTER)
            }
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn sempa_work_is_worker() -> c_int {
    guard(|| Ok(master_worker::is_worker().into()))
}

#[unsafe(no_mangle)]
extern "C" fn sempa_work_tid() -> c_int {
    TID.load(Ordering::Relaxed).max(NO_RUN)
}

#[unsafe(no_mangle)]
extern "C" fn sempa_work_last_error() -> *const c_char {
    with_last_error(|text| text.as_ptr())
}

/// # Safety
/// `text` is null or a string that ends with a zero byte.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_work_set_error(text: *const c_char) {
    guard(|| {
        if !text.is_null() {
            // SAFETY: by this function's contract.
            let text = unsafe { CStr::from_ptr(text) };
            set_callback_error(text.to_string_lossy().into_owned());
        }
        Ok(OK)
    });
}

/// # Safety
/// `settings` is null or a structure that may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_work_default_settings(settings: *mut abi::Settings) -> c_int {
    guard(|| {
        let value = abi::Settings::new(&Settings::default());
        // SAFETY: by this function's contract.
        unsafe { memory::write_struct("settings", settings, &value)? };
        Ok(OK)
    })
}
