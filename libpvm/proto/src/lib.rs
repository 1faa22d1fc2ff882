//! What the parts of a Sempa virtual machine say to each other, and the rules they say it by.
//!
//! Everything here is a value: no socket, file, clock or random number is touched. Shells (the task library, the
//! daemon, the tasker) feed these values with events and carry out what they ask for.
//!
//! * [`ids`]: typed identifiers and PVM's task-id layout.
//! * [`error`]: PVM's error codes.
//! * [`body`]: packing and unpacking of message bodies.
//! * [`message`]: a PVM message with its header.
//! * [`frame`]: length-limited frames on a byte stream.
//! * [`link`]: exactly-once, in-order conversation of two tasks over routes that may break.
//! * [`task`], [`host`], [`tasker`]: control messages task-daemon, daemon-daemon, daemon-tasker.
//! * [`group`]: what a task asks of the group service.
//! * [`job`]: job files: what is to be started, as a file says it.
//! * [`rm`]: questions to the resource manager: why, how much, which jobs.
//! * [`sm`]: the documented messages between tasks, resource managers and daemons. [`trace`]: records for tracers.
//! * [`table`], [`event`], [`migration`], [`suspend`], [`load`]: the records these messages carry.
//! * [`place`]: where a virtual machine keeps its socket and files. [`cgroup`]: where a process's control groups are.
//!   [`text`]: what people read or write.

pub mod body;
pub mod cgroup;
pub mod checkpoint;
pub mod engine;
pub mod error;
pub mod event;
pub mod frame;
pub mod group;
pub mod host;
pub mod ids;
pub mod job;
pub mod link;
pub mod load;
pub mod message;
pub mod migration;
pub mod owner;
pub mod place;
pub mod pool;
pub mod rm;
pub mod route;
pub mod sm;
pub mod suspend;
pub mod table;
pub mod task;
pub mod tasker;
pub mod text;
pub mod trace;

pub use error::{PvmError, PvmResult};
pub use ids::{Epoch, HostId, JobId, Micros, MigrationId, NoHostIndex, RequestId, RouteId, Tid};
pub use message::Message;

/// Version of every wire format in this crate. Peers with another number are refused at the first message.
pub const WIRE_VERSION: u16 = 21;
