//! The library of a task: it joins the virtual machine and talks to the other tasks in it.
//!
//! * [`Vm`]: the small Rust API. Most programs need nothing else.
//! * [`runtime`]: what lies under it (and under the C interface): the connection to the daemon, the links to other
//!   tasks, and the helper thread that keeps them going and lets the task be moved.
//! * [`proto`]: the words that tasks and daemons speak.
//!
//! ```no_run
//! use libpvm::proto::body::{Encoding, Packer};
//! use libpvm::{Match, Vm};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vm = Vm::enroll()?;
//! for host in vm.config()?.hosts {
//!     println!("{} is {}", host.id.tid(), host.name);
//! }
//! let mut body = Packer::new(Encoding::Xdr);
//! body.int(42);
//! vm.send(vm.tid(), 7, body)?;
//! let answer = vm.recv(Match::any().tag(7))?;
//! assert_eq!(answer.src, vm.tid());
//! vm.exit()?;
//! # Ok(())
//! # }
//! ```

mod error;
mod groups;
mod inbox;
pub mod rm_client;
pub mod runtime;
pub mod trace_events;
mod vm;

pub use error::{EnrollError, Error, MigrateError};
pub use inbox::Inbox;
pub use runtime::{Runtime, enroll};
pub use vm::{Body, Match, MoveAnswer, Vm};

pub use sempa_proto as proto;
