//! What a worker can do while it executes a task.

use crate::protocol::{RawTask, Update};
use crate::raw::Failure;
use bytes::Bytes;
use sempa_work_dispatch::{AttemptId, TaskId};
use std::time::{Duration, Instant};

/// Messages between an executing task and its master.
pub(crate) trait TaskLink {
    /// Handles the messages that have arrived.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost.
    fn receive(&mut self) -> Result<(), Failure>;
    /// Returns the newest update, if it is newer than `after`.
    fn update_after(&self, after: u64) -> Option<Update>;
    /// True if the master needs no result of this attempt.
    fn is_canceled(&self, attempt: AttemptId) -> bool;
    /// Sends part of the result.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost.
    fn send_partial(
        &mut self,
        task: TaskId,
        attempt: AttemptId,
        data: Bytes,
    ) -> Result<(), Failure>;
}

/// Interval at which [`Context::poll`] looks for messages. A call in between only reads a clock.
const POLL_INTERVAL: Duration = Duration::from_micros(500);

/// The executing task's connection to its run.
pub struct Context<'a> {
    link: &'a mut dyn TaskLink,
    task: TaskId,
    attempt: AttemptId,
    deadline: Option<Instant>,
    polled_at: Instant,
    last_update: u64,
    pub(crate) returned_tasks: Vec<RawTask>,
}

impl std::fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("task", &self.task)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

impl<'a> Context<'a> {
    pub(crate) fn new(
        link: &'a mut dyn TaskLink,
        task: TaskId,
        attempt: AttemptId,
        time_limit: Option<Duration>,
    ) -> Self {
        let now = Instant::now();
        Self {
            link,
            task,
            attempt,
            deadline: time_limit.and_then(|limit| now.checked_add(limit)),
            polled_at: now,
            last_update: 0,
            returned_tasks: Vec::new(),
        }
    }

    /// Number of the task. It is the same in each attempt.
    pub fn task(&self) -> TaskId {
        self.task
    }

    /// Number of the attempt.
    pub fn attempt(&self) -> AttemptId {
        self.attempt
    }

    /// Looks for messages of the master. May be called often: most calls only read a clock.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost.
    pub fn poll(&mut self) -> Result<(), Failure> {
        let now = Instant::now();
        if now.duration_since(self.polled_at) < POLL_INTERVAL {
            return Ok(());
        }
        self.polled_at = now;
        self.link.receive()
    }

    /// Returns the newest update if this attempt has not seen it. Older ones are skipped.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost.
    pub fn update(&mut self) -> Result<Option<Bytes>, Failure> {
        self.poll()?;
        let update = self.link.update_after(self.last_update);
        Ok(update.map(|update| {
            self.last_update = update.number;
            update.data
        }))
    }

    /// True if the master needs no result of this attempt. The task may then return any result.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost.
    pub fn is_canceled(&mut self) -> Result<bool, Failure> {
        self.poll()?;
        Ok(self.link.is_canceled(self.attempt))
    }

    /// True if the time limit of the task is over: the task should return its result and its
    /// remaining work ([`Context::return_task`]) now.
    pub fn is_time_over(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Returns work that this attempt does not do. It becomes a task if the result is accepted.
    pub fn return_task(&mut self, task: RawTask) {
        self.returned_tasks.push(task);
    }

    /// Sends part of the result to the driver at once. A partial result of an attempt whose result
    /// is not accepted may reach the driver too.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost.
    pub fn send_partial(&mut self, data: Bytes) -> Result<(), Failure> {
        self.link.send_partial(self.task, self.attempt, data)
    }
}
