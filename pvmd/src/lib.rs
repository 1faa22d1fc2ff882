//! The daemon of a host: `pvmd_machine` makes the decisions, [`shell`] performs input and output.

pub mod shell;
