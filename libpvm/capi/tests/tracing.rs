//! Tests of tracing: a C tracer receives the documented records of a C task, either one by one,
//! collected, or as totals.

mod common;

use common::vm::{RunningProgram, Vm};
use common::{Program, include};

fn start_tracer_and_task(vm: &Vm, program: &Program, buffer: &str, option: &str) -> RunningProgram {
    let mut tracer = vm.run(program, &["tracer", buffer, option]);
    tracer.wait_for_output("serving");
    vm.run(program, &["task"]).wait_for_success();
    tracer.wait_for_output("output 0\n");
    tracer.wait_for_output("endtask: ");
    tracer
}

/// Each call of a traced task is reported when it begins and when it ends.
#[test]
#[ignore = "system tier: needs gcc"]
fn traced_calls_report_begin_and_end() {
    let (vm, program) = (Vm::start(), Program::compile("traced", &include()));
    let mut tracer = start_tracer_and_task(&vm, &program, "0", "1");
    tracer.wait_for_output("exit begins: ");
    let said = tracer.output();
    assert!(
        !said.contains("group") && said.contains("123 items\n") && said.contains("newtask: "),
        "{said}"
    );
    for (line, end) in [
        ("mytid begins:", ""),
        ("mytid ends:", " 262146"),
        ("pkint begins:", " somewhere 3 1"),
        ("pkstr begins:", " somewhere"),
        ("send begins:", " 24 262146 5 0"),
        ("send ends:", " 0"),
        ("recv begins:", " 262146 5 0"),
        ("kill begins:", " -5"),
        ("kill ends:", " -2"),
        ("send again:", " 56 -1111 -2222 0"),
        ("spawn ends:", " 262146 1 262147"),
        ("spntask:", " 262146"),
    ] {
        let found = said
            .lines()
            .any(|said| said.starts_with(line) && said.ends_with(end));
        assert!(found, "{line} … {end}: {said}");
    }
    assert!(
        said.contains("own event 108 user_defined 1: 3 of type 134\n"),
        "{said}"
    );
    assert!(
        said.contains("output -2\n") && said.contains("output 6\n"),
        "output that nobody collects comes too: {said}"
    );
    // Internal work of the library inside a call is not traced.
    assert!(
        !said.contains("notify") && !said.contains("putinfo"),
        "{said}"
    );
}

/// Trace records are collected, or summed to totals, if the tracer requests that.
#[test]
#[ignore = "system tier: needs gcc"]
fn trace_records_are_collected_and_summed() {
    let (vm, program) = (Vm::start(), Program::compile("traced", &include()));
    let mut tracer = start_tracer_and_task(&vm, &program, "100000", "1");
    tracer.wait_for_output("group\n");
    tracer.kill();
    for (option, line) in [("2", "timing: "), ("3", "profiling: ")] {
        let mut tracer = start_tracer_and_task(&vm, &program, "0", option);
        tracer.wait_for_output(line);
        let said = tracer.output();
        assert!(
            !said.contains("recv begins") && said.contains("'recv'"),
            "{said}"
        );
        tracer.kill();
    }
    // Without a tracer the calls of the task succeed as well.
    vm.run(&program, &["task"]).wait_for_success();
}
