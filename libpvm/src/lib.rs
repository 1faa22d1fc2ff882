//! The library of a task: it joins the virtual machine and talks to the other tasks in it.
//!
//! * [`Vm`]: this process as a task; everything begins with [`Vm::enroll`]. [`Vm::spawner`] starts other tasks, [`Task`]
//!   is one of them, [`Vm::recv`] with a [`Match`] receives, [`Vm::watch_tasks`] and its like give [`Notices`],
//!   [`Vm::join_group`] and its like serve groups.
//! * [`Body`] and [`Content`]: what messages hold, as values of any type that serde knows or as PVM's items.
//! * [`runtime`]: what lies under it (and under the C interface): the connection to the daemon, the links to other
//!   tasks, and the helper thread that keeps them going and lets the task be moved.
//! * [`proto`]: the words that tasks and daemons speak.
//!
//! ```no_run
//! use libpvm::{Content, Vm};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vm = Vm::enroll()?;
//! for host in vm.config()?.hosts {
//!     println!("{} is {}", host.id.tid(), host.name);
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
//! A [`Vm`] and what comes from it may be used by several threads at once: a message goes to one of those that wait for
//! such a message. A child of `fork` is no task until it enrols itself.

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
pub use runtime::{Runtime, enroll};
pub use spawn::{Spawn, Spawned};
pub use task::Task;
pub use vm::{Body, Match, MoveAnswer, Vm};

pub use sempa_proto as proto;
