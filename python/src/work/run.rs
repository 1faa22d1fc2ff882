//! The run of a driver, in its callbacks.

use super::payload::{TaskParts, call_failed, from_python, groups, raw_task, to_python};
use super::scope::RunScope;
use master_worker::{ClassId, Grain, Run, TaskId, WorkerId};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Number, payload and key of a task, and true if an attempt of the task runs.
type OpenTask<'py> = (u64, Bound<'py, PyAny>, f64, bool);

/// The calls of a driver about its run. Only callbacks of the driver may use them.
#[pyclass(name = "WorkRun", module = "sempa_pvm._native", frozen)]
#[derive(Default)]
pub(crate) struct PyRun {
    scope: RunScope,
}

impl PyRun {
    pub(crate) fn scope(&self) -> &RunScope {
        &self.scope
    }

    fn with<R>(&self, f: impl FnOnce(&mut Run) -> R) -> PyResult<R> {
        self.scope.with(f).ok_or_else(|| {
            PyRuntimeError::new_err(
                "the run can be used only in a callback of its driver; nothing was changed",
            )
        })
    }
}

#[pymethods]
impl PyRun {
    /// Adds tasks and returns their numbers.
    fn add(&self, tasks: Vec<TaskParts<'_>>, in_front: bool) -> PyResult<Vec<u64>> {
        let tasks: PyResult<Vec<_>> = tasks.into_iter().map(raw_task).collect();
        let tasks = tasks?;
        let added = self.with(|run| match in_front {
            true => run.add_tasks_in_front(tasks),
            false => run.add_tasks(tasks),
        })?;
        let ids = added.map_err(|failure| call_failed(&failure))?;
        Ok(ids.into_iter().map(|id| id.0).collect())
    }

    /// Removes the waiting tasks whose keys are greater than `bound`; returns their number.
    fn prune(&self, bound: f64, with_running: bool) -> PyResult<usize> {
        self.with(|run| run.prune(bound, with_running))
    }

    /// Changes the key of an open task; returns false if the task is closed.
    fn set_key(&self, task: u64, key: f64) -> PyResult<bool> {
        self.with(|run| run.set_key(TaskId(task), key))
    }

    /// Changes the number of workers that the run should have.
    fn set_workers(&self, count: u32) -> PyResult<()> {
        self.with(|run| run.set_target(ClassId(0), count))
    }

    /// Sends data to one worker, or to all workers.
    #[pyo3(signature = (data, worker))]
    fn send_update(&self, data: &Bound<'_, PyBytes>, worker: Option<u64>) -> PyResult<()> {
        let data = from_python(data);
        self.with(|run| match worker {
            Some(worker) => run.send_update_to(WorkerId(worker), data),
            None => run.send_update(data),
        })
    }

    /// Replaces the init data of workers in the middle of the run.
    #[pyo3(signature = (data, group_bits))]
    fn refresh_init_data(
        &self,
        data: &Bound<'_, PyBytes>,
        group_bits: Option<u64>,
    ) -> PyResult<()> {
        let groups = group_bits.map(groups).transpose()?;
        let data = from_python(data);
        self.with(|run| run.refresh_init_data(data, groups))
    }

    /// Closes an open task; returns false if the task is closed.
    fn cancel_task(&self, task: u64) -> PyResult<bool> {
        self.with(|run| run.cancel_task(TaskId(task)))
    }

    /// Closes the task that a worker executes; returns its number.
    fn stop_work(&self, worker: u64) -> PyResult<Option<u64>> {
        let task = self.with(|run| run.stop_work(WorkerId(worker)))?;
        Ok(task.map(|task| task.0))
    }

    /// The open tasks: number, payload, key, and true if an attempt of the task runs.
    fn open_tasks<'py>(&self, py: Python<'py>) -> PyResult<Vec<OpenTask<'py>>> {
        let tasks = self.with(|run| {
            let tasks = run.open_tasks();
            let facts = tasks
                .map(|(id, task, is_running)| (id.0, task.payload.clone(), task.key, is_running));
            facts.collect::<Vec<_>>()
        })?;
        let task_record =
            |(id, payload, key, is_running)| Ok((id, to_python(py, &payload)?, key, is_running));
        tasks.into_iter().map(task_record).collect()
    }

    /// Sets the least and the greatest time limit of tasks in microseconds; None for no limit.
    #[pyo3(signature = (limits_us))]
    fn set_grain(&self, limits_us: Option<(u64, u64)>) -> PyResult<()> {
        let grain = limits_us.map(|(shortest, longest)| Grain { shortest, longest });
        self.with(|run| run.set_grain(grain))
    }

    /// Ends the run after the present callback.
    fn stop(&self) -> PyResult<()> {
        self.with(Run::stop)
    }

    /// The lowest key of a waiting task.
    #[getter]
    fn best_waiting_key(&self) -> PyResult<Option<f64>> {
        self.with(|run| run.best_waiting_key())
    }

    /// The lowest key of a running task.
    #[getter]
    fn best_running_key(&self) -> PyResult<Option<f64>> {
        self.with(|run| run.best_running_key())
    }

    /// Number of tasks that should be added so that no worker becomes idle.
    #[getter]
    fn wanted_tasks(&self) -> PyResult<usize> {
        self.with(|run| run.wanted_tasks())
    }

    /// Numbers of tasks and workers, as JSON.
    fn progress(&self) -> PyResult<String> {
        let progress = self.with(|run| run.progress())?;
        super::to_json(&progress)
    }

    /// The statistics up to now, as JSON, and as text.
    fn statistics(&self) -> PyResult<(String, String)> {
        let report = self.with(|run| run.statistics())?;
        Ok((super::to_json(&report)?, report.to_string()))
    }
}
