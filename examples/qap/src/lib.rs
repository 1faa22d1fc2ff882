//! Solves quadratic assignment problems on a virtual machine and proves the optimum.
