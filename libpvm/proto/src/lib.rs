//! Message types and protocol rules shared by all programs of a Sempa virtual machine.
//!
//! This crate contains only values and state machines: it uses no socket, file, clock or random
//! number. The task library, the daemon and the tasker pass events to the state machines and
//! execute the actions that these return.
//!
//! * [`ids`]: typed identifiers and PVM's tid layout.
//! * [`error`]: PVM's error codes.
//! * [`body`]: packing and unpacking of message bodies. [`buffer_pool`]: reuse of large message
//!   buffers.
//! * [`causal`]: causal order of messages across senders.
//! * [`message`]: a PVM message with its header.
//! * [`frame`]: length-limited frames on a byte stream.
//! * [`link`]: exactly-once, in-order messages between two tasks over routes that may break.
//! * [`route`]: setup of a route between two tasks.
//! * [`task`]: control messages between task and daemon. [`host`]: messages between daemons.
//!   [`tasker`]: control messages between daemon and tasker. [`tasker_service`]: the start of a
//!   tasker by the service of a host.
//! * [`group`]: requests to the group service. [`lease`]: times at which a silent host's tasks end.
//! * [`job`]: job files, which describe the tasks to start. [`engine`]: migration engines and the
//!   syntax to select them.
//! * [`rm`]: queries to the resource manager about decisions, usage and jobs.
//! * [`sm`]: PVM's documented messages between tasks, resource managers and daemons. [`trace`]:
//!   records for tracers.
//! * [`table`], [`event`], [`migration`], [`checkpoint`], [`suspend`], [`owner`], [`load`]: the
//!   records that these messages contain.
//! * [`vm_summary`]: what every host keeps for the case that the master is lost.
//! * [`runtime_paths`]: paths of a virtual machine's socket and files. [`cgroup`]: paths of a
//!   process's control groups. [`text`]: parsing and truncation of text.

pub mod body;
pub mod buffer_pool;
pub mod causal;
pub mod cgroup;
pub mod checkpoint;
pub mod engine;
pub mod error;
pub mod event;
pub mod frame;
pub mod group;
pub mod host;
pub mod host_limit;
pub mod ids;
pub mod job;
pub mod lease;
pub mod library_fault;
pub mod link;
pub mod load;
pub mod message;
pub mod migration;
pub mod output;
pub mod owner;
pub mod rm;
pub mod route;
pub mod runtime_paths;
pub mod sm;
mod spawn;
pub mod suspend;
pub mod table;
pub mod task;
pub mod tasker;
pub mod tasker_service;
pub mod text;
pub mod trace;
pub mod vm_summary;

pub use error::{PvmError, PvmResult};
pub use ids::{
    Epoch, HostId, InvalidHostIndex, JobId, Micros, MigrationId, RequestId, RouteId, Tid,
};
pub use message::Message;

/// Version of every wire format in this crate. A peer with another version is refused at its first
/// message.
pub const WIRE_VERSION: u16 = 25;
