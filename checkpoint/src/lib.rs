//! Moving and checkpointing of tasks: the protocol (pure), and the engines that dump and restore processes.

pub mod protocol;
