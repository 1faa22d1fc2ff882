//! What a task and its daemon do alike at the socket between them: reading it, with the descriptors that travel on it,
//! deciding how long to wait awake, and getting the processor soon.

mod receive;
mod room;
mod spin;
mod turns;

pub use receive::{Passed, Received, Taken, receive};
pub use room::make_room;
pub use spin::{Reach, Spin};
pub use turns::{come_first, take_short_turns};
