//! Task library. With this library a process joins the virtual machine as a task and exchanges
//! messages with other tasks.
//!
//! * [`Vm`] represents this process as a task; [`Vm::enroll`] creates the [`Vm`]. [`Vm::spawner`]
//!   starts tasks, [`Task`] is a handle of another task, [`Vm::recv`] receives the messages that a
//!   [`Match`] selects, [`Vm::watch_tasks`] and similar methods return [`Notices`],
//!   [`Vm::join_group`] and similar methods use groups.
//! * [`Body`] and [`Content`] write and read message contents: values of any type that serde
//!   supports, or PVM items.
//! * [`runtime`] is the layer below the Rust API and the C interface: the connection to the daemon,
//!   the links to other tasks, and the I/O thread that serves the connection and the links and lets
//!   the task migrate.
//! * [`proto`] is the protocol between tasks and daemons.
//!
//! ```no_run
//! use libpvm::{Content, Vm};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vm = Vm::enroll()?;
//! for host in vm.config()?.hosts {
//!   println!("{} is {}", host.id.tid(), host.name);
//! }
//! let worker = vm.spawner("worker").start()?.all()?.remove(0);
//! worker.send_value(1, &("count to", 10))?;
//! let answer = vm.recv(worker.matching().tag(2))?;
//! println!("{worker} counted: {:?}", answer.value::<Vec<u32>>()?);
//! vm.exit()?;
//! # Ok(())
//! # }
//! ```
//!
//! Several threads may use a [`Vm`] and its handles at the same time: each message is delivered to
//! exactly one of the threads that wait for it. A child of `fork` is not a task until it enrolls.

mod content;
mod error;
mod groups;
mod inbox;
pub mod job;
mod notices;
pub mod rm_client;
pub mod runtime;
pub mod spawn;
mod task;
pub mod trace_events;
mod vm;

pub use content::Content;
pub use error::{EnrollError, Error, MigrateError};
pub use inbox::Inbox;
pub use notices::{Notice, Notices};
pub use runtime::{Runtime, SmallMessageHead, enroll};
pub use spawn::{Spawn, SpawnOutcome};
pub use task::Task;
pub use vm::{Body, Match, MigrateReply, Vm};

pub use sempa_proto as proto;
