//! Output: formats that several commands share, and the terminal.

pub(crate) mod async_output;
pub(crate) mod json;
pub(crate) mod progress;
pub(crate) mod repeats;
pub(crate) mod tables;
pub(crate) mod terminal;
pub(crate) mod time;
pub(crate) mod transfer_amounts;
