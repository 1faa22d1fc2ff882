//! The daemon of a host: its pure state machine, for tests and simulations. The program is in `main.rs`.

pub mod machine;
