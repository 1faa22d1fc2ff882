//! Output of tasks: the marks in the messages that daemons send to a collector.
//!
//! Each message contains the tid of a task and a mark. A mark is the number of bytes that follow,
//! or one of the constants of this module.

/// Mark for the end of a task's output. The wait status of the task's process follows as an
/// integer, unless the task continues with another collector. PVM's daemons omit the status.
pub const OUTPUT_EOF: i32 = 0;
/// Mark for a task that was requested (PVM's `TO_SPAWN`).
pub const OUTPUT_REQUESTED: i32 = -1;
/// Mark for a task that was started (PVM's `TO_NEW`).
pub const OUTPUT_STARTED: i32 = -2;

/// Line that a collector shows in place of the output that is missing, if a task has exited
/// without the end of its output.
pub const LOST_TASK_LINE: &str = "lost with its host: the last lines may be missing";
