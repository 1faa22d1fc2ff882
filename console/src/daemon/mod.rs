//! Start and end of the daemon of this host.

pub(crate) mod halt;
pub(crate) mod host_file;
pub(crate) mod process;
pub(crate) mod running;
