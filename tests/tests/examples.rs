//! Debian's unmodified example programs, on two hosts.

use sempa_tests::needs::testbed;
use sempa_tests::run::run;
use sempa_tests::vm::Settings;
use sempa_tests::{Done, Testbed, Vm};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(120);

fn with_two_hosts(test: impl FnOnce(&Vm)) {
    let Some((bed, _)) = testbed(2) else { return };
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2"]).expect("h2 joins");
    examples_where_spawn_looks(&bed);
    test(&vm);
    vm.halt().expect("halts");
}

fn examples_where_spawn_looks(bed: &Testbed) {
    for name in ["hello_other", "slave1", "spmd", "timing_slave"] {
        symlink(Path::new("/usr/bin").join(name), bed.home().join("pvm3/bin/LINUX64").join(name)).expect("a link");
    }
}

fn example(vm: &Vm, name: &str) -> Done {
    let done = run(vm.command(vm.bed().host(1), Path::new("/usr/bin").join(name)), LONG).expect("it ends");
    assert!(done.good(), "{name}: {done:?}\n{}", vm.logs());
    done
}

#[test]
fn hello_gets_its_greeting_from_another_task() {
    with_two_hosts(|vm| {
        let done = example(vm, "hello.pvm");
        assert!(done.out.contains("hello, world from h"), "{done:?}");
    });
}

#[test]
fn master1_collects_a_result_from_every_slave1() {
    with_two_hosts(|vm| {
        let done = example(vm, "master1");
        let results = done.out.lines().filter(|line| line.starts_with("I got ")).count();
        assert!(results >= 2 && results == spawned(&done.out), "{done:?}");
    });
}

#[test]
fn spmd_passes_its_token_around() {
    with_two_hosts(|vm| {
        let done = run(vm.command(vm.bed().host(1), "/usr/bin/spmd"), LONG).expect("it ends");
        assert!(done.out.contains("token ring done"), "{done:?}\n{}", vm.logs());
    });
}

#[test]
fn timing_measures_round_trips() {
    with_two_hosts(|vm| {
        // Its exit status is 1 with every PVM.
        let done = run(vm.command(vm.bed().host(1), "/usr/bin/timing"), LONG).expect("it ends");
        assert!(done.out.contains("RTT Avg uSec"), "{done:?}");
    });
}

/// The number in "Spawning N worker tasks".
fn spawned(out: &str) -> usize {
    let after = out.split("Spawning ").nth(1).and_then(|rest| rest.split(' ').next());
    after.and_then(|number| number.parse().ok()).unwrap_or(0)
}
