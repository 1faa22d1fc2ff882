//! The virtual machine.
/// x
pub struct Vm;
