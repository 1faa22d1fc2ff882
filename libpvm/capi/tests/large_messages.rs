//! Large messages between two C programs on one host, packed in all ways.

mod common;

use common::vm::Vm;
use common::{Program, include_dir};

/// Large messages arrive unchanged, however they are packed: in one call or in many, with or
/// without conversion, in place, sent again, forwarded, and with a fork in the middle of packing.
#[test]
#[ignore = "system tier: needs gcc"]
fn large_messages_arrive_however_they_are_packed() {
    let (vm, program) = (Vm::start(), Program::compile("large", &include_dir()));
    let mut answering_task = vm.start_program(&program, &["answer"]);
    answering_task.wait_for_output("here");
    vm.start_program(&program, &["ask"]).wait_for_success();
    answering_task.wait_for_success();
}
