//! `sempa_run`: what a driver does with its run.

#![allow(
    unsafe_code,
    reason = "C programs pass pointers, and the names are exported"
)]

use super::memory;
use crate::abi;
use crate::errors::{CallError, CallResult, NONE, OK, guard};
use crate::settings;
use master_worker::{ClassId, Groups, Run, TaskId, WorkerId, WorkerPlace, WorkerProgram};
use std::cell::Cell;
use std::ffi::{c_double, c_int, c_void};

const PLACE_ANYWHERE: c_int = 0;
const PLACE_HOST: c_int = 1;
const PLACE_ARCHITECTURE: c_int = 2;

const REFRESH_NONE: c_int = 0;
const REFRESH_GROUPS: c_int = 1;
const REFRESH_ALL: c_int = 2;

/// The run of a driver. The pointer is null outside of the driver's callbacks, so that the handle
/// is useless there but never dangling while the master works.
#[derive(Debug)]
pub(super) struct RunHandle {
    run: Cell<*mut Run>,
}

impl Default for RunHandle {
    fn default() -> Self {
        Self {
            run: Cell::new(std::ptr::null_mut()),
        }
    }
}

impl RunHandle {
    /// Calls `f` while the handle stands for `run`.
    pub(super) fn with<R>(&self, run: *mut Run, f: impl FnOnce() -> R) -> R {
        let outer_run = self.run.replace(run);
        let result = f();
        self.run.set(outer_run);
        result
    }
}

/// Calls `f` with the run behind a handle.
///
/// # Safety
/// `handle` is null or the handle that a callback of the present master has got, in its thread.
unsafe fn with_run(handle: *const RunHandle, f: impl FnOnce(&mut Run) -> CallResult<i32>) -> c_int {
    guard(|| {
        // SAFETY: by this function's contract.
        let handle = unsafe { handle.as_ref() };
        let handle = handle.ok_or_else(|| CallError::argument("run is NULL"))?;
        let run = handle.run.replace(std::ptr::null_mut());
        // SAFETY: the pointer is null or comes from the exclusive reference of a callback that
        // waits for the program. The handle is of no use during this call, so no second reference
        // exists.
        let result = match unsafe { run.as_mut() } {
            Some(run) => f(run),
            None => Err(CallError::state("run")),
        };
        handle.run.set(run);
        result
    })
}

/// Adds tasks and stores their numbers.
///
/// # Safety
/// As [`with_run`]; `tasks` has `count` elements, and `ids` is null or has as many.
unsafe fn add_tasks(
    handle: *const RunHandle,
    tasks: *const abi::Task,
    count: usize,
    ids: *mut u64,
    in_front: bool,
) -> c_int {
    let add = |run: &mut Run| {
        // SAFETY: by this function's contract.
        let tasks = unsafe { memory::slice("tasks", tasks, count)? };
        // SAFETY: by this function's contract.
        let tasks = tasks.iter().map(|task| unsafe { memory::raw_task(task) });
        let tasks = tasks.collect::<CallResult<Vec<_>>>()?;
        let added = match in_front {
            true => run.add_tasks_in_front(tasks),
            false => run.add_tasks(tasks),
        };
        for (index, id) in added.map_err(|e| CallError::limit(&e))?.iter().enumerate() {
            if !ids.is_null() {
                // SAFETY: the array has as many elements as tasks were added.
                unsafe { ids.add(index).write(id.0) };
            }
        }
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(handle, add) }
}

/// # Safety
/// As [`add_tasks`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_add_tasks(
    run: *const RunHandle,
    tasks: *const abi::Task,
    count: usize,
    ids: *mut u64,
) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { add_tasks(run, tasks, count, ids, false) }
}

/// # Safety
/// As [`add_tasks`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_add_tasks_in_front(
    run: *const RunHandle,
    tasks: *const abi::Task,
    count: usize,
    ids: *mut u64,
) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { add_tasks(run, tasks, count, ids, true) }
}

/// # Safety
/// As [`with_run`]; `count` is null or valid for a write; `visit` may be called with `user`.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_prune(
    run: *const RunHandle,
    bound: c_double,
    with_running: c_int,
    visit: Option<unsafe extern "C" fn(*mut c_void, u64)>,
    user: *mut c_void,
    count: *mut usize,
) -> c_int {
    let prune = |run: &mut Run| {
        let pruned = run.prune_tasks(bound, with_running != 0);
        // SAFETY: by this function's contract.
        unsafe { memory::store(count, pruned.len()) };
        if let Some(visit) = visit {
            // SAFETY: by this function's contract.
            pruned.iter().for_each(|id| unsafe { visit(user, id.0) });
        }
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, prune) }
}

/// # Safety
/// As [`with_run`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_set_key(run: *const RunHandle, task: u64, key: c_double) -> c_int {
    let set = |run: &mut Run| match run.set_key(TaskId(task), key) {
        true => Ok(OK),
        false => Ok(NONE),
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, set) }
}

/// # Safety
/// As [`with_run`]; `visit` may be called with `user`.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_each_task(
    run: *const RunHandle,
    visit: Option<unsafe extern "C" fn(*mut c_void, *const abi::OpenTask) -> c_int>,
    user: *mut c_void,
) -> c_int {
    let visit_all = |run: &mut Run| {
        let visit = visit.ok_or_else(|| CallError::argument("visit is NULL"))?;
        for (id, task, is_running) in run.open_tasks() {
            let open_task = abi::OpenTask {
                id: id.0,
                payload: memory::address(&task.payload),
                length: task.payload.len(),
                key: task.key,
                groups: task.groups.bits(),
                is_running: is_running.into(),
            };
            // SAFETY: by this function's contract. The run is not changed meanwhile: its handle is
            // of no use before `with_run` returns.
            if unsafe { visit(user, &open_task) } != 0 {
                return Ok(NONE);
            }
        }
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, visit_all) }
}

/// # Safety
/// As [`with_run`]; `visit` may be called with `user`.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_each_quarantined(
    run: *const RunHandle,
    visit: Option<super::driver::VisitQuarantined>,
    user: *mut c_void,
) -> c_int {
    let visit_all = |run: &mut Run| {
        let visit = visit.ok_or_else(|| CallError::argument("visit is NULL"))?;
        for quarantined in run.quarantined_tasks() {
            let attempts = super::driver::Attempts::new(&quarantined.history);
            let task = attempts.quarantined(quarantined.task, &[]);
            // SAFETY: by this function's contract.
            if unsafe { visit(user, &task) } != 0 {
                return Ok(NONE);
            }
        }
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, visit_all) }
}

/// Returns a copy of a program of workers. The own program stands for a program that is not named.
///
/// # Errors
/// A field has no meaning, or the path of the own program is unknown.
///
/// # Safety
/// `workers` is null or a structure with valid pointers.
pub(super) unsafe fn worker_program(workers: *const abi::Workers) -> CallResult<WorkerProgram> {
    let initial = abi::Workers {
        size: size_of::<abi::Workers>(),
        program: std::ptr::null(),
        arguments: std::ptr::null(),
        target: 0,
        place_kind: PLACE_ANYWHERE,
        place: std::ptr::null(),
    };
    // SAFETY: by this function's contract.
    let (workers, program, arguments, place) = unsafe {
        let workers = memory::read_struct("workers", workers, initial)?;
        (
            workers,
            memory::optional_text("program", workers.program)?,
            memory::text_list("arguments", workers.arguments)?,
            memory::optional_text("place", workers.place)?,
        )
    };
    let program = match program {
        Some(program) => program,
        None => own_program()?,
    };
    let missing =
        || CallError::argument("place is NULL, but place_kind names a host or an architecture");
    Ok(WorkerProgram {
        arguments,
        place: match workers.place_kind {
            PLACE_ANYWHERE => WorkerPlace::Anywhere,
            PLACE_HOST => WorkerPlace::Host(place.ok_or_else(missing)?),
            PLACE_ARCHITECTURE => WorkerPlace::Architecture(place.ok_or_else(missing)?),
            other => {
                let text = format!("place_kind: {other} is not a kind of place");
                return Err(CallError::argument(text));
            }
        },
        ..WorkerProgram::new(program, workers.target)
    })
}

fn own_program() -> CallResult<String> {
    let program = std::env::current_exe().map_err(|error| {
        let text = format!("the path of this program cannot be read ({error}); set program");
        CallError::argument(text)
    })?;
    Ok(program.to_string_lossy().into_owned())
}

/// # Safety
/// As [`with_run`]; `workers` is null or a structure with valid pointers.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_set_workers(
    run: *const RunHandle,
    class_id: u16,
    workers: *const abi::Workers,
) -> c_int {
    let set = |run: &mut Run| {
        // SAFETY: by this function's contract.
        run.set_workers(ClassId(class_id), unsafe { worker_program(workers)? });
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, set) }
}

/// # Safety
/// As [`with_run`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_set_target(
    run: *const RunHandle,
    class_id: u16,
    target: u32,
) -> c_int {
    let set = |run: &mut Run| {
        run.set_target(ClassId(class_id), target);
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, set) }
}

/// # Safety
/// As [`with_run`]; `data` has `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_send_update(
    run: *const RunHandle,
    data: *const c_void,
    length: usize,
) -> c_int {
    let send = |run: &mut Run| {
        // SAFETY: by this function's contract.
        let data = unsafe { memory::bytes("data", data, length)? };
        run.send_update(data.to_vec().into());
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, send) }
}

/// # Safety
/// As [`with_run`]; `data` has `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_send_update_to(
    run: *const RunHandle,
    worker: u64,
    data: *const c_void,
    length: usize,
) -> c_int {
    let send = |run: &mut Run| {
        // SAFETY: by this function's contract.
        let data = unsafe { memory::bytes("data", data, length)? };
        run.send_update_to(WorkerId(worker), data.to_vec().into());
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, send) }
}

/// # Safety
/// As [`with_run`]; `data` has `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_refresh_init_data(
    run: *const RunHandle,
    data: *const c_void,
    length: usize,
    workers: c_int,
    groups: u64,
) -> c_int {
    let refresh = |run: &mut Run| {
        let no_groups = || CallError::argument("groups: no group is named");
        let groups = match workers {
            REFRESH_NONE => None,
            REFRESH_GROUPS => Some(Groups::from_bits(groups).ok_or_else(no_groups)?),
            REFRESH_ALL => Some(Groups::ALL),
            other => {
                let text = format!("workers: {other} selects no workers");
                return Err(CallError::argument(text));
            }
        };
        // SAFETY: by this function's contract.
        let data = unsafe { memory::bytes("data", data, length)? };
        run.refresh_init_data(data.to_vec().into(), groups);
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, refresh) }
}

/// # Safety
/// As [`with_run`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_cancel_task(run: *const RunHandle, task: u64) -> c_int {
    let cancel = |run: &mut Run| match run.cancel_task(TaskId(task)) {
        true => Ok(OK),
        false => Ok(NONE),
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, cancel) }
}

/// # Safety
/// As [`with_run`]; `task` is null or valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_stop_work(
    run: *const RunHandle,
    worker: u64,
    task: *mut u64,
) -> c_int {
    let stop = |run: &mut Run| {
        let Some(stopped) = run.stop_work(WorkerId(worker)) else {
            return Ok(NONE);
        };
        // SAFETY: by this function's contract.
        unsafe { memory::store(task, stopped.0) };
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, stop) }
}

/// # Safety
/// As [`with_run`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_set_grain(
    run: *const RunHandle,
    shortest_s: c_double,
    longest_s: c_double,
) -> c_int {
    let set = |run: &mut Run| {
        run.set_grain(settings::grain(shortest_s, longest_s)?);
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, set) }
}

/// # Safety
/// As [`with_run`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_stop(run: *const RunHandle) -> c_int {
    let stop = |run: &mut Run| {
        run.stop();
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, stop) }
}

/// # Safety
/// As [`with_run`]; `settings` is null or a structure that may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_get_settings(
    run: *const RunHandle,
    settings: *mut abi::Settings,
) -> c_int {
    let get = |run: &mut Run| {
        let value = abi::Settings::new(run.settings());
        // SAFETY: by this function's contract.
        unsafe { memory::write_struct("settings", settings, &value)? };
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, get) }
}

/// # Safety
/// As [`with_run`]; `settings` is null or a structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_set_settings(
    run: *const RunHandle,
    settings: *const abi::Settings,
) -> c_int {
    let set = |run: &mut Run| {
        let present = abi::Settings::new(run.settings());
        // SAFETY: by this function's contract.
        let settings = unsafe { memory::read_struct("settings", settings, present)? };
        let settings = settings.to_settings(run.settings())?;
        run.set_settings(settings);
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, set) }
}

/// Stores a key, if there is one.
///
/// # Safety
/// `target` is null or valid for a write.
unsafe fn store_key(target: *mut c_double, key: Option<f64>) -> CallResult<i32> {
    let Some(key) = key else {
        return Ok(NONE);
    };
    // SAFETY: by this function's contract.
    unsafe { memory::store(target, key) };
    Ok(OK)
}

/// # Safety
/// As [`with_run`]; `key` is null or valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_best_waiting_key(
    run: *const RunHandle,
    key: *mut c_double,
) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { with_run(run, |run| store_key(key, run.best_waiting_key())) }
}

/// # Safety
/// As [`with_run`]; `key` is null or valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_best_running_key(
    run: *const RunHandle,
    key: *mut c_double,
) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { with_run(run, |run| store_key(key, run.best_running_key())) }
}

/// # Safety
/// As [`with_run`]; `count` is null or valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_wanted_tasks(run: *const RunHandle, count: *mut usize) -> c_int {
    let get = |run: &mut Run| {
        // SAFETY: by this function's contract.
        unsafe { memory::store(count, run.wanted_tasks()) };
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, get) }
}

/// # Safety
/// As [`with_run`]; `progress` is null or a structure that may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_progress(
    run: *const RunHandle,
    progress: *mut abi::Progress,
) -> c_int {
    let get = |run: &mut Run| {
        let value = abi::Progress::new(&run.progress());
        // SAFETY: by this function's contract.
        unsafe { memory::write_struct("progress", progress, &value)? };
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, get) }
}

/// # Safety
/// As [`with_run`]; `statistics` is null or a structure that may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_run_statistics(
    run: *const RunHandle,
    statistics: *mut abi::Statistics,
) -> c_int {
    let get = |run: &mut Run| {
        let value = abi::Statistics::new(&run.statistics());
        // SAFETY: by this function's contract.
        unsafe { memory::write_struct("statistics", statistics, &value)? };
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_run(run, get) }
}
