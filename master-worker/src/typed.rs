//! Drivers, tasks and workers with types of their own. Serde packs them.

use crate::context::Context;
use crate::protocol::RawTask;
use crate::raw::{Failure, PoolEvent, RawDriver, RawWorker, ResultInfo};
use crate::run::Run;
use bytes::Bytes;
use sempa_work_dispatch::{AttemptRecord, Groups, TaskId, WorkerId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A unit of work.
pub trait Task: Serialize + DeserializeOwned {
    type Result: Serialize + DeserializeOwned;

    /// Tasks with lower keys are dispatched first; tasks of equal key in the order in which they
    /// were added. NaN counts as 0.
    fn key(&self) -> f64 {
        0.0
    }

    /// The task goes only to workers that share a group.
    fn groups(&self) -> Groups {
        Groups::ALL
    }
}

/// Type of updates and partial results of programs that use none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Nothing {}

/// The application's part of the master. The value itself is saved in the journal, and restored
/// when a master starts again.
///
/// A restart repeats [`Driver::on_result`] and [`Driver::on_quarantined`] for what happened after
/// the newest saved state, so these two must depend only on the driver and their arguments.
pub trait Driver: Serialize + DeserializeOwned {
    type Task: Task;
    /// Data that each worker gets once.
    type InitData: Serialize + DeserializeOwned;
    /// Data for running workers, such as a new bound. [`Nothing`] if there are none.
    type Update: Serialize + DeserializeOwned;
    /// Parts of results of running tasks. [`Nothing`] if there are none.
    type Partial: Serialize + DeserializeOwned;

    /// Returns the first tasks of a new run. Not called on a restart.
    ///
    /// # Errors
    /// The application's; the run does not begin.
    fn initial_tasks(&mut self, run: &mut RunHandle<'_, Self>) -> Result<Vec<Self::Task>, Failure>;

    /// Returns the data that each worker gets before its first task. Called once for each master:
    /// after a restart, it must return the newest data of [`RunHandle::refresh`].
    ///
    /// # Errors
    /// The application's; the run ends.
    fn init_data(&mut self) -> Result<Self::InitData, Failure>;

    /// Handles the first result of a task.
    ///
    /// # Errors
    /// The application's; the run ends, and a restart repeats the call.
    fn on_result(
        &mut self,
        run: &mut RunHandle<'_, Self>,
        task: Self::Task,
        result: <Self::Task as Task>::Result,
    ) -> Result<(), Failure>;

    /// Sets targets, settings and other parts of the run that are not saved. Called after each
    /// start and restart.
    ///
    /// # Errors
    /// The application's; the run does not begin.
    fn configure(&mut self, _run: &mut RunHandle<'_, Self>) -> Result<(), Failure> {
        Ok(())
    }

    /// Returns the benchmark task, whose duration is a worker's factor. `None`: all factors are 1.
    fn benchmark(&mut self) -> Option<Self::Task> {
        None
    }

    /// Handles a part of the result of a running task.
    ///
    /// # Errors
    /// The application's; the run ends.
    fn on_partial_result(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
        _task: Self::Task,
        _partial: Self::Partial,
    ) -> Result<(), Failure> {
        Ok(())
    }

    /// Handles a task that is not tried again because it has killed too many workers.
    ///
    /// # Errors
    /// The application's; the run ends.
    fn on_quarantined(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
        _task: Self::Task,
        _history: &[AttemptRecord],
    ) -> Result<(), Failure> {
        Ok(())
    }

    /// Handles a change of the hosts or workers.
    ///
    /// # Errors
    /// The application's; the run ends.
    fn on_pool_event(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
        _event: &PoolEvent,
    ) -> Result<(), Failure> {
        Ok(())
    }

    /// Handles the end of the last open task. The run is finished if the driver adds no task.
    ///
    /// # Errors
    /// The application's; the run ends, and its journal remains.
    fn on_all_closed(&mut self, _run: &mut RunHandle<'_, Self>) -> Result<(), Failure> {
        Ok(())
    }
}

/// The application's part of a worker.
pub trait Worker: Sized {
    type Task: Task;
    type InitData: Serialize + DeserializeOwned;
    type Update: Serialize + DeserializeOwned;
    type Partial: Serialize + DeserializeOwned;

    /// Creates the worker from the init data. Called again when the driver replaces the data.
    ///
    /// # Errors
    /// The application's; the worker ends.
    fn new(data: Self::InitData) -> Result<Self, Failure>;

    /// Executes a task and returns its result.
    ///
    /// # Errors
    /// The application's; the attempt counts against the task.
    fn execute(
        &mut self,
        task: Self::Task,
        context: &mut TaskContext<'_, '_, Self>,
    ) -> Result<<Self::Task as Task>::Result, Failure>;
}

pub(crate) fn pack<T: Serialize>(value: &T) -> Result<Bytes, Failure> {
    Ok(postcard::to_allocvec(value)?.into())
}

pub(crate) fn unpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    Ok(postcard::from_bytes(bytes)?)
}

fn raw_task<T: Task>(task: &T) -> Result<RawTask, Failure> {
    Ok(RawTask {
        key: task.key(),
        groups: task.groups(),
        payload: pack(task)?,
    })
}

fn raw_tasks<T: Task>(tasks: &[T]) -> Result<Vec<RawTask>, Failure> {
    tasks.iter().map(raw_task).collect()
}

/// What a driver can do with its run: the methods here and those of [`Run`].
#[derive(Debug)]
pub struct RunHandle<'a, D: ?Sized> {
    run: &'a mut Run,
    driver: PhantomData<fn() -> D>,
}

impl<D: ?Sized> Deref for RunHandle<'_, D> {
    type Target = Run;

    fn deref(&self) -> &Run {
        self.run
    }
}

impl<D: ?Sized> DerefMut for RunHandle<'_, D> {
    fn deref_mut(&mut self) -> &mut Run {
        self.run
    }
}

impl<'a, D: Driver> RunHandle<'a, D> {
    fn new(run: &'a mut Run) -> Self {
        Self {
            run,
            driver: PhantomData,
        }
    }

    /// Adds tasks behind those of equal key, and returns their numbers.
    ///
    /// # Errors
    /// The tasks cannot be packed or exceed a limit of the run; none was added.
    pub fn add(&mut self, tasks: &[D::Task]) -> Result<Vec<TaskId>, Failure> {
        self.run.add_tasks(raw_tasks(tasks)?)
    }

    /// Adds tasks in front of those of equal key, and returns their numbers.
    ///
    /// # Errors
    /// As [`RunHandle::add`].
    pub fn add_in_front(&mut self, tasks: &[D::Task]) -> Result<Vec<TaskId>, Failure> {
        self.run.add_tasks_in_front(raw_tasks(tasks)?)
    }

    /// Sends data to one worker. The data replace an older update of this worker.
    ///
    /// # Errors
    /// The data cannot be packed.
    pub fn update_worker(&mut self, worker: WorkerId, update: &D::Update) -> Result<(), Failure> {
        self.run.send_update_to(worker, pack(update)?);
        Ok(())
    }

    /// Replaces the init data; see [`Run::refresh_init_data`].
    ///
    /// # Errors
    /// The data cannot be packed.
    pub fn refresh(&mut self, data: &D::InitData, groups: Option<Groups>) -> Result<(), Failure> {
        self.run.refresh_init_data(pack(data)?, groups);
        Ok(())
    }

    /// Sends data to all workers, also to running ones. A newer update replaces an older one.
    ///
    /// # Errors
    /// The data cannot be packed.
    pub fn update(&mut self, update: &D::Update) -> Result<(), Failure> {
        self.run.send_update(pack(update)?);
        Ok(())
    }
}

/// What a worker can do while it executes a task.
#[derive(Debug)]
pub struct TaskContext<'a, 'b, W> {
    context: &'a mut Context<'b>,
    worker: PhantomData<fn() -> W>,
}

impl<W: Worker> TaskContext<'_, '_, W> {
    /// Number of the task. It is the same in each attempt.
    pub fn task(&self) -> TaskId {
        self.context.task()
    }

    /// Returns the newest update if this attempt has not seen it.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost, or the update cannot be unpacked.
    pub fn update(&mut self) -> Result<Option<W::Update>, Failure> {
        let update = self.context.update()?;
        update.map(|data| unpack(&data)).transpose()
    }

    /// True if the master needs no result of this attempt.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost.
    pub fn is_canceled(&mut self) -> Result<bool, Failure> {
        self.context.is_canceled()
    }

    /// True if the task should return its result and its remaining work now.
    pub fn is_time_over(&self) -> bool {
        self.context.is_time_over()
    }

    /// Returns work that this attempt does not do. It becomes a task if the result is accepted.
    ///
    /// # Errors
    /// The task cannot be packed.
    pub fn return_task(&mut self, task: &W::Task) -> Result<(), Failure> {
        self.context.return_task(raw_task(task)?);
        Ok(())
    }

    /// Sends part of the result to the driver at once.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost, or the part cannot be packed.
    pub fn send_partial(&mut self, partial: &W::Partial) -> Result<(), Failure> {
        self.context.send_partial(pack(partial)?)
    }
}

/// A typed driver as a driver of bytes.
#[derive(Debug)]
pub struct PackedDriver<D>(pub D);

impl<D: Driver> RawDriver for PackedDriver<D> {
    fn start(&mut self, run: &mut Run) -> Result<(), Failure> {
        let mut handle = RunHandle::new(run);
        let tasks = self.0.initial_tasks(&mut handle)?;
        handle.add(&tasks).map(|_| ())
    }

    fn configure(&mut self, run: &mut Run) -> Result<(), Failure> {
        self.0.configure(&mut RunHandle::new(run))
    }

    fn save(&self) -> Result<Bytes, Failure> {
        pack(&self.0)
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Failure> {
        self.0 = unpack(state)?;
        Ok(())
    }

    fn init_data(&mut self) -> Result<Bytes, Failure> {
        pack(&self.0.init_data()?)
    }

    fn benchmark(&mut self) -> Option<Bytes> {
        let task = self.0.benchmark()?;
        pack(&task).ok()
    }

    fn on_result(
        &mut self,
        run: &mut Run,
        _info: &ResultInfo,
        task: &Bytes,
        result: &Bytes,
    ) -> Result<(), Failure> {
        let (task, result) = (unpack(task)?, unpack(result)?);
        self.0.on_result(&mut RunHandle::new(run), task, result)
    }

    fn on_partial_result(
        &mut self,
        run: &mut Run,
        _task: TaskId,
        payload: &Bytes,
        data: &Bytes,
    ) -> Result<(), Failure> {
        let (task, partial) = (unpack(payload)?, unpack(data)?);
        self.0
            .on_partial_result(&mut RunHandle::new(run), task, partial)
    }

    fn on_quarantined(
        &mut self,
        run: &mut Run,
        _task: TaskId,
        payload: &Bytes,
        history: &[AttemptRecord],
    ) -> Result<(), Failure> {
        let task = unpack(payload)?;
        self.0
            .on_quarantined(&mut RunHandle::new(run), task, history)
    }

    fn on_pool_event(&mut self, run: &mut Run, event: &PoolEvent) -> Result<(), Failure> {
        self.0.on_pool_event(&mut RunHandle::new(run), event)
    }

    fn on_all_closed(&mut self, run: &mut Run) -> Result<(), Failure> {
        self.0.on_all_closed(&mut RunHandle::new(run))
    }
}

/// A typed worker as a worker of bytes. The worker is created from the init data.
#[derive(Debug)]
pub struct PackedWorker<W>(Option<W>);

impl<W> Default for PackedWorker<W> {
    fn default() -> Self {
        Self(None)
    }
}

impl<W: Worker> RawWorker for PackedWorker<W> {
    fn init(&mut self, data: Bytes) -> Result<(), Failure> {
        self.0 = Some(W::new(unpack(&data)?)?);
        Ok(())
    }

    fn execute(&mut self, task: Bytes, context: &mut Context) -> Result<Bytes, Failure> {
        let Some(worker) = &mut self.0 else {
            return Err("the worker got a task before its init data".into());
        };
        let mut context = TaskContext {
            context,
            worker: PhantomData,
        };
        let result = worker.execute(unpack(&task)?, &mut context)?;
        pack(&result)
    }
}
