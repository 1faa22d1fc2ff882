//! What PVM 3.4.6 had no room for.

use sempa_tests::Vm;
use sempa_tests::needs::testbed;
use sempa_tests::run::run;
use sempa_tests::vm::Settings;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(300);

fn good(vm: &Vm, words: &[&str]) {
    let program = vm.program("limits").expect("gcc");
    let mut command = vm.command(vm.bed().host(1), program);
    command.args(words);
    let done = run(command, LONG).unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
    assert!(done.good() && done.out == "good\n", "{words:?}: {}\n{}\n{}\n{}", done.status, done.out, done.err, vm.logs());
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
