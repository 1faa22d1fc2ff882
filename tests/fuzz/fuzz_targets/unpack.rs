//! The target of `cargo fuzz run unpack --features libfuzzer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sempa_fuzz::read_input(data));
