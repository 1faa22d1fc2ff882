//! Socket functions that a task and its daemon share: reading with descriptors, adaptive spinning,
//! socket buffers and scheduling latency.

mod receive;
mod room;
mod spin;
mod turns;

pub use receive::{Passed, Received, Taken, receive};
pub use room::make_room;
pub use spin::{Reach, Spin};
pub use turns::{come_first, take_short_turns};
