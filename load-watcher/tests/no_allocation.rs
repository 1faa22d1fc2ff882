//! Tests that a sample of the real /proc, a measurement of task load and a measurement of a
//! processor limit allocate no memory. The tests count all allocations of their process, so they
//! have their own binary.

#[path = "../../libpvm/proto/tests/counting_allocator/mod.rs"]
mod counting_allocator;

use counting_allocator::allocation_count;
use pvm_load_watcher::cgroup::LimitingGroup;
use pvm_load_watcher::load_attribution::TaskLoad;
use pvm_load_watcher::proc::CpuTimes;
use pvm_load_watcher::sampler::Sampler;
use sempa_proto::Micros;
use std::path::Path;

#[test]
fn a_sample_allocates_nothing() {
    let mut sampler = Sampler::open(Path::new("/proc")).expect("this is Linux");
    let before = allocation_count();
    let mut cores = 0;
    for i in 0..10 {
        cores = sampler.sample(Micros(i)).expect("this is Linux").cores;
    }
    assert_eq!(allocation_count(), before);
    assert!(cores > 0);
}

/// Reading the counters of the virtual machine's tasks, for own and external load, allocates no
/// memory.
#[test]
fn task_load_measurement_allocates_nothing() {
    let mut sampler = Sampler::open(Path::new("/proc")).expect("this is Linux");
    sampler.sample(Micros(0)).expect("this is Linux");
    let times = sampler.cpu_times().expect("a sample was taken");
    let mut ours = TaskLoad::new(Path::new("/proc"));
    let own = std::process::id().cast_signed();
    ours.set_processes(&[own, std::os::unix::process::parent_id().cast_signed()]);
    let before = allocation_count();
    let mut seen = 0;
    for i in 0..10 {
        let times = CpuTimes {
            total: times.total + i * 100,
            idle: times.idle,
        };
        seen += usize::from(ours.measure_own_processors(times, 2).is_some())
            + usize::from(ours.measure_external_processors(times, 2).is_some());
        assert!(ours.origin_matters(times, 2));
    }
    assert_eq!(allocation_count(), before);
    assert!(seen >= 17, "{seen}");
}

#[test]
fn measuring_a_limit_allocates_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let groups = dir.path().join("groups/own");
    std::fs::create_dir_all(&groups).expect("the test's own folder");
    let write = |path: &Path, text: &str| std::fs::write(path, text).expect("the test's own file");
    write(&dir.path().join("cgroup"), "0::/own\n");
    let mounts = format!(
        "9 8 0:1 / {} rw - cgroup2 cgroup2 rw\n",
        dir.path().join("groups").display()
    );
    write(&dir.path().join("mountinfo"), &mounts);
    write(&groups.join("cpu.max"), "50000 100000\n");
    write(
        &groups.join("cpu.stat"),
        "usage_usec 1000000\nuser_usec 1\nthrottled_usec 5\n",
    );
    let mut group = LimitingGroup::of_process(dir.path()).expect("it is limited");
    let before = allocation_count();
    let mut share = 0.0;
    for i in 0..10 {
        share = group
            .measure(Micros(i * 1_000_000))
            .expect("it is limited")
            .processor_limit;
    }
    assert_eq!(allocation_count(), before);
    assert!(share > 0.0);
}
