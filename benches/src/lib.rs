//! Benchmarks. `benches/wire.rs` measures the wire format and the link without any I/O; the running system is measured by
//! `cargo xtask bench system`.
