//! The shortest form of a program: a function that the workers apply to many tasks.

use crate::context::Context;
use crate::program::{ProgramOptions, carry_out};
use crate::raw::{Failure, RawWorker};
use crate::start::RunOutcome;
use crate::typed::{Driver, Nothing, RunHandle, Task, pack, unpack};
use bytes::Bytes;
use sempa_work_dispatch::AttemptRecord;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::marker::PhantomData;

/// A task that is not tried again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskFailed {
    /// The attempts, the oldest first.
    pub history: Vec<AttemptRecord>,
}

impl fmt::Display for TaskFailed {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "the task failed in {} attempts", self.history.len())?;
        for (index, record) in self.history.iter().enumerate() {
            let separator = if index == 0 { ": " } else { "; " };
            write!(f, "{separator}{} on {}", record.reason, record.host)?;
        }
        Ok(())
    }
}

impl std::error::Error for TaskFailed {}

/// The results of [`map()`].
#[derive(Clone, Debug)]
pub struct MapOutcome<R> {
    /// One result for each task, in the order of the tasks.
    pub results: Vec<Result<R, TaskFailed>>,
    pub run: RunOutcome,
}

/// A task with its place among the tasks.
#[derive(Debug, Serialize, Deserialize)]
struct Numbered<T, R> {
    number: u64,
    task: T,
    result: PhantomData<fn() -> R>,
}

impl<T, R> Task for Numbered<T, R>
where
    T: Serialize + DeserializeOwned,
    R: Serialize + DeserializeOwned,
{
    type Result = R;
}

/// The driver of a map: collects the results in the order of the tasks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound(serialize = "R: Serialize", deserialize = "R: DeserializeOwned"))]
struct Collector<T, R> {
    /// Taken when the run begins.
    #[serde(skip)]
    tasks: Vec<T>,
    results: Vec<Option<Result<R, TaskFailed>>>,
}

impl<T, R> Collector<T, R> {
    /// Stores the result of a task.
    fn store(&mut self, number: u64, result: Result<R, TaskFailed>) -> Result<(), Failure> {
        let place = usize::try_from(number)
            .ok()
            .and_then(|number| self.results.get_mut(number));
        *place.ok_or("the journal is that of a run with more tasks")? = Some(result);
        Ok(())
    }
}

impl<T, R> Driver for Collector<T, R>
where
    T: Serialize + DeserializeOwned,
    R: Serialize + DeserializeOwned,
{
    type Task = Numbered<T, R>;
    type InitData = ();
    type Update = Nothing;
    type Partial = Nothing;

    fn initial_tasks(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
    ) -> Result<Vec<Self::Task>, Failure> {
        let numbered = |(number, task)| Numbered {
            number,
            task,
            result: PhantomData,
        };
        Ok((0..)
            .zip(std::mem::take(&mut self.tasks))
            .map(numbered)
            .collect())
    }

    fn init_data(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn on_result(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
        task: Self::Task,
        result: R,
    ) -> Result<(), Failure> {
        self.store(task.number, Ok(result))
    }

    fn on_quarantined(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
        task: Self::Task,
        history: &[AttemptRecord],
    ) -> Result<(), Failure> {
        let history = history.to_vec();
        self.store(task.number, Err(TaskFailed { history }))
    }
}

/// A worker that applies a function.
struct FunctionWorker<F, T, R> {
    function: F,
    types: PhantomData<fn(T) -> R>,
}

impl<F, T, R> RawWorker for FunctionWorker<F, T, R>
where
    F: FnMut(T) -> Result<R, Failure>,
    T: Serialize + DeserializeOwned,
    R: Serialize + DeserializeOwned,
{
    fn init(&mut self, _data: Bytes) -> Result<(), Failure> {
        Ok(())
    }

    fn execute(&mut self, task: Bytes, _context: &mut Context) -> Result<Bytes, Failure> {
        let numbered: Numbered<T, R> = unpack(&task)?;
        pack(&(self.function)(numbered.task)?)
    }
}

/// Applies a function to each task, on the workers of a run, and returns the results in the order
/// of the tasks. The workers are further processes of this program, which come to this call and
/// exit at its end.
///
/// With a journal, a program that starts again with the same tasks continues: the tasks of the
/// first start count.
///
/// ```
/// # use master_worker::{Failure, ProgramOptions, map};
/// let options = ProgramOptions { in_process: true, ..ProgramOptions::new("squares", 4) };
/// let outcome = map((1..=4).collect(), &options, |n: u64| Ok(n * n))?;
/// let squares: Result<Vec<u64>, _> = outcome.results.into_iter().collect();
/// assert_eq!(squares?, [1, 4, 9, 16]);
/// # Ok::<(), Failure>(())
/// ```
///
/// # Errors
/// The run cannot begin, ended early, or was stopped; the error says what this means for the
/// results. Tasks that failed are part of the results.
pub fn map<T, R, F>(
    tasks: Vec<T>,
    options: &ProgramOptions,
    function: F,
) -> Result<MapOutcome<R>, Failure>
where
    T: Serialize + DeserializeOwned + 'static,
    R: Serialize + DeserializeOwned + 'static,
    F: FnMut(T) -> Result<R, Failure>,
{
    let results = std::iter::repeat_with(|| None).take(tasks.len()).collect();
    let mut worker = FunctionWorker {
        function,
        types: PhantomData,
    };
    let (collector, run) = carry_out(Collector { tasks, results }, &mut worker, options)?;
    let task_count = collector.results.len();
    let results: Vec<_> = collector.results.into_iter().flatten().collect();
    // A finished run has a result of each task, and no journal any more.
    if !run.is_finished {
        let consequence = match options.master.journal {
            Some(_) => "start the program again to continue with the journal",
            None => "without a journal the results are lost",
        };
        return Err(format!(
            "the run was stopped when {} of {task_count} tasks had results: {consequence}",
            results.len()
        )
        .into());
    }
    Ok(MapOutcome { results, run })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_order_of_tasks_and_failures_have_reasons() {
        let mut options = ProgramOptions {
            in_process: true,
            ..ProgramOptions::new("map", 1)
        };
        options.master.settings.retry.attempts_max = 2;
        options.master.settings.retry.delay = 0;
        let half = |n: u64| match n % 2 {
            0 => Ok(n / 2),
            _ => Err(format!("{n} is odd").into()),
        };
        let outcome = map((0..10).collect(), &options, half).expect("a finished run");
        assert!(outcome.run.is_finished);
        for (number, result) in (0..10).zip(outcome.results) {
            match result {
                Ok(half) => assert_eq!(half * 2, number),
                Err(failed) => {
                    assert_eq!((number % 2, failed.history.len()), (1, 2));
                    let text = failed.to_string();
                    assert!(text.contains("failed in 2 attempts"), "{text}");
                }
            }
        }
    }
}
