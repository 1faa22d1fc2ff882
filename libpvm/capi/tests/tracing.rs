//! Tests of tracing: a C tracer receives the documented records of a C task. The task sends each
//! record immediately, a collection of records, or only totals.

mod common;

use common::vm::{RunningProgram, Vm};
use common::{Program, include_dir};

fn start_tracer_and_task(
    vm: &Vm,
    program: &Program,
    buffer_bytes: &str,
    option: &str,
) -> RunningProgram {
    let mut tracer = vm.start_program(program, &["tracer", buffer_bytes, option]);
    tracer.wait_for_output("serving");
    vm.start_program(program, &["task"]).wait_for_success();
    tracer.wait_for_output("output 0\n");
    tracer.wait_for_output("endtask: ");
    tracer
}

/// The tracer receives a record at the begin and at the end of each call of a traced task, and also
/// the events that the task defines and the task's output.
#[test]
#[ignore = "system tier: needs gcc"]
fn traced_calls_report_begin_and_end() {
    let (vm, program) = (Vm::start(), Program::compile("traced", &include_dir()));
    let mut tracer = start_tracer_and_task(&vm, &program, "0", "1");
    tracer.wait_for_output("exit begins: ");
    let text = tracer.output();
    assert!(
        !text.contains("group") && text.contains("123 items\n") && text.contains("newtask: "),
        "{text}"
    );
    for (line_start, line_end) in [
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
        let is_reported = text
            .lines()
            .any(|text| text.starts_with(line_start) && text.ends_with(line_end));
        assert!(is_reported, "{line_start} … {line_end}: {text}");
    }
    assert!(
        text.contains("own event 108 user_defined 1: 3 of type 134\n"),
        "{text}"
    );
    assert!(
        text.contains("output -2\n") && text.contains("output 6\n"),
        "output that nobody collects comes too: {text}"
    );
    // Calls that the library makes internally during a call are not traced.
    assert!(
        !text.contains("notify") && !text.contains("putinfo"),
        "{text}"
    );
}

/// Trace records are collected, or summed to totals, if the tracer requests that.
#[test]
#[ignore = "system tier: needs gcc"]
fn trace_records_are_collected_and_summed() {
    let (vm, program) = (Vm::start(), Program::compile("traced", &include_dir()));
    let mut tracer = start_tracer_and_task(&vm, &program, "100000", "1");
    tracer.wait_for_output("group\n");
    tracer.kill();
    for (option, expected_text) in [("2", "timing: "), ("3", "profiling: ")] {
        let mut tracer = start_tracer_and_task(&vm, &program, "0", option);
        tracer.wait_for_output(expected_text);
        let output = tracer.output();
        assert!(
            !output.contains("recv begins") && output.contains("'recv'"),
            "{output}"
        );
        tracer.kill();
    }
    // Without a tracer the calls of the task succeed as well.
    vm.start_program(&program, &["task"]).wait_for_success();
}
