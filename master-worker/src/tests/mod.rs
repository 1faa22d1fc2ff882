//! Tests of masters and workers without a virtual machine.

mod restarts;
mod worker;
