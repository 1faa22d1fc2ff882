//! Tests of masters and workers without a virtual machine.

mod order;
mod refresh;
mod restarts;
mod worker;
