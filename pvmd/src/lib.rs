//! The daemon of a host: `pvmd_machine` decides, [`shell`] acts.

pub mod shell;
