//! Output: what the formats of all commands share, and the terminal that shows it.

pub(crate) mod async_output;
pub(crate) mod json;
pub(crate) mod tables;
pub(crate) mod terminal;
pub(crate) mod time;
