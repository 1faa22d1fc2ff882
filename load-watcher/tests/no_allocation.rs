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
    let previous_count = allocation_count();
    let mut cores = 0;
    for i in 0..10 {
        cores = sampler.sample(Micros(i)).expect("this is Linux").cores;
    }
    assert_eq!(allocation_count(), previous_count);
    assert!(cores > 0);
}

/// Neither a measurement of the load of tasks nor a measurement of the external load allocates
/// memory.
#[test]
fn task_load_measurement_allocates_nothing() {
    let mut sampler = Sampler::open(Path::new("/proc")).expect("this is Linux");
    sampler.sample(Micros(0)).expect("this is Linux");
    let times = sampler.cpu_times().expect("a sample was taken");
    let mut task_load = TaskLoad::new(Path::new("/proc"));
    let own_pid = std::process::id().cast_signed();
    task_load.set_task_processes(&[own_pid, std::os::unix::process::parent_id().cast_signed()]);
    let previous_count = allocation_count();
    let mut result_count = 0;
    for i in 0..10 {
        let times = CpuTimes {
            total_us: times.total_us + i * 100,
            idle_us: times.idle_us,
        };
        result_count += usize::from(task_load.measure_task_processors(times, 2).is_some())
            + usize::from(task_load.measure_external_processors(times, 2).is_some());
        assert!(task_load.origin_matters(times, 2));
    }
    assert_eq!(allocation_count(), previous_count);
    assert!(result_count >= 17, "{result_count}");
}

#[test]
fn measuring_a_limit_allocates_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let group_dir = dir.path().join("groups/own");
    std::fs::create_dir_all(&group_dir).expect("the test's own folder");
    let write = |path: &Path, text: &str| std::fs::write(path, text).expect("the test's own file");
    write(&dir.path().join("cgroup"), "0::/own\n");
    let mounts = format!(
        "9 8 0:1 / {} rw - cgroup2 cgroup2 rw\n",
        dir.path().join("groups").display()
    );
    write(&dir.path().join("mountinfo"), &mounts);
    write(&group_dir.join("cpu.max"), "50000 100000\n");
    write(
        &group_dir.join("cpu.stat"),
        "usage_usec 1000000\nuser_usec 1\nthrottled_usec 5\n",
    );
    let mut group = LimitingGroup::of_process(dir.path()).expect("it is limited");
    let previous_count = allocation_count();
    let mut processor_limit = 0.0;
    for i in 0..10 {
        processor_limit = group
            .measure(Micros(i * 1_000_000))
            .expect("it is limited")
            .processor_limit;
    }
    assert_eq!(allocation_count(), previous_count);
    assert!(processor_limit > 0.0);
}
