//! Solves quadratic assignment problems on a virtual machine and proves the optimum.

mod bounds;
pub mod distributed;
pub mod heuristic;
pub mod instance;
pub mod nugent;
pub mod proof;
pub mod search;
mod symmetry;
mod vector;
