//! What PVM 3.4.6 had no room for.

use sempa_tests::Vm;
use sempa_tests::needs::testbed;
use sempa_tests::run::run;
use sempa_tests::vm::Settings;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(300);

/// Memory that the largest message takes on its way: with the sender, in the receiver's inbox as it grows, in between.
const GIANT_NEEDS_MIB: u64 = 14 << 10;

fn good(vm: &Vm, words: &[&str]) {
    let program = vm.program("limits").expect("gcc");
    let mut command = vm.command(vm.bed().host(1), program);
    command.args(words);
    let done = run(command, LONG).unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
    assert!(
        done.good() && done.out == "good\n",
        "{words:?}: {}\n{}\n{}\n{}",
        done.status,
        done.out,
        done.err,
        vm.logs()
    );
}

#[test]
fn a_hundred_thousand_messages_wait_and_come_in_order() {
    let Some((bed, _)) = testbed(1) else { return };
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    good(&vm, &["pending", "100000"]);
    vm.halt().expect("it ends");
}

#[test]
fn an_environment_larger_than_a_megabyte_reaches_a_spawned_task() {
    let Some((bed, _)) = testbed(1) else { return };
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    good(&vm, &["environment", "15"]);
    vm.halt().expect("it ends");
}

#[test]
fn more_tasks_than_pvms_four_thousand_live_on_one_host() {
    let Some((bed, _)) = testbed(1) else { return };
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    good(&vm, &["tasks", "4100"]);
    vm.halt().expect("it ends");
}

fn free_mebibytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    line.and_then(|words| words.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
}

#[test]
fn a_message_larger_than_four_gibibytes_arrives_whole() {
    if free_mebibytes() < GIANT_NEEDS_MIB {
        println!("not tried: it takes {GIANT_NEEDS_MIB} MiB of free memory");
        return;
    }
    let Some((bed, _)) = testbed(1) else { return };
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    good(&vm, &["giant", "4352"]);
    vm.halt().expect("it ends");
}
