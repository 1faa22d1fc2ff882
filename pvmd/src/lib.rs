//! The daemon of a host: `pvmd_machine` makes the decisions, [`shell`] does input and output.

pub mod shell;
