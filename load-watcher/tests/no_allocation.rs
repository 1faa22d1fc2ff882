//! A sample of the real /proc allocates nothing. This test has a process of its own, because it counts all allocations.

#[path = "../../libpvm/proto/tests/counting/mod.rs"]
mod counting;

use counting::allocations;
use pvm_load_watcher::sampler::Sampler;
use sempa_proto::Micros;
use std::path::Path;

#[test]
fn a_sample_allocates_nothing() {
    let mut sampler = Sampler::open(Path::new("/proc")).expect("this is Linux");
    let before = allocations();
    let mut cores = 0;
    for i in 0..10 {
        cores = sampler.sample(Micros(i)).expect("this is Linux").cores;
    }
    assert_eq!(allocations(), before);
    assert!(cores > 0);
}
