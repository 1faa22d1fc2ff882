//! The daemon of a host: [`machine`] decides, [`shell`] acts.

pub mod machine;
pub mod shell;
