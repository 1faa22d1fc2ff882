//! How tasks wait for each other's messages, by the system calls of their threads. A round trip
//! between two processors needs none, and on one processor a yield of each task.

mod common;

use common::vm::Vm;
use common::{Program, include_dir};
use sempa_socket::YIELDS_MAX;

/// Number of round trips in a batch of `waits.c`.
const BATCH_ROUND_TRIPS: u32 = 100;
/// Maximum number of futex calls in a batch of both tasks. Without spinning and yielding, each
/// round trip has at least two: a wake-up for each message.
const FUTEX_CALLS_MAX: u32 = BATCH_ROUND_TRIPS / 10;

/// The processor of a task before and after its enrolment; `None` means any.
#[derive(Clone, Copy)]
struct Pinning {
    before: Option<usize>,
    after: Option<usize>,
}

const UNPINNED: Pinning = Pinning {
    before: None,
    after: None,
};

fn pinned(cpu: usize) -> Pinning {
    Pinning {
        before: Some(cpu),
        after: None,
    }
}

fn repinned(before: usize, after: usize) -> Pinning {
    Pinning {
        before: Some(before),
        after: Some(after),
    }
}

/// Returns the two lowest processors on which this process may run.
fn two_cpus() -> [usize; 2] {
    let cpu_set = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).expect("a mask");
    let mut cpus = (0..nix::sched::CpuSet::count()).filter(|cpu| cpu_set.is_set(*cpu) == Ok(true));
    let mut next_cpu = || {
        cpus.next()
            .expect("cannot run here: two processors are needed")
    };
    [next_cpu(), next_cpu()]
}

/// Lets two tasks exchange messages until a batch has at most [`FUTEX_CALLS_MAX`] futex calls and
/// a number of yields within `yields`.
fn assert_waits(
    vm: &Vm,
    program: &Program,
    pinnings: [Pinning; 2],
    yields: std::ops::RangeInclusive<u32>,
) {
    let arguments = |role: &str, pinning: Pinning| -> Vec<String> {
        let cpu_argument = |cpu: Option<usize>| cpu.map_or("-1".to_string(), |cpu| cpu.to_string());
        vec![
            role.to_string(),
            cpu_argument(pinning.before),
            cpu_argument(pinning.after),
        ]
    };
    let start = |arguments: Vec<String>| {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        vm.start_program(program, &arguments)
    };
    let answering_task = start(arguments("answer", pinnings[0]));
    let mut asking_arguments = arguments("ask", pinnings[1]);
    asking_arguments
        .extend([FUTEX_CALLS_MAX, *yields.end(), *yields.start()].map(|bound| bound.to_string()));
    print!("{}", start(asking_arguments).wait_for_success());
    answering_task.wait_for_success();
}

/// Yields of both tasks in a batch on one processor: at least one for each round trip, except for
/// messages that were there before, and at most the limit of each wait.
fn yields_on_one_cpu() -> std::ops::RangeInclusive<u32> {
    BATCH_ROUND_TRIPS / 2..=2 * BATCH_ROUND_TRIPS * YIELDS_MAX
}

#[test]
#[ignore = "system tier: needs root, gcc and two processors"]
fn tasks_pinned_apart_wait_without_sleeping() {
    let (vm, program) = (Vm::start(), Program::compile("waits", &include_dir()));
    let [cpu, other_cpu] = two_cpus();
    assert_waits(
        &vm,
        &program,
        [pinned(cpu), pinned(other_cpu)],
        0..=u32::MAX >> 1,
    );
}

#[test]
#[ignore = "system tier: needs root, gcc and two processors"]
fn unpinned_tasks_wait_without_sleeping() {
    let (vm, program) = (Vm::start(), Program::compile("waits", &include_dir()));
    assert_waits(&vm, &program, [UNPINNED; 2], 0..=u32::MAX >> 1);
}

#[test]
#[ignore = "system tier: needs root, gcc and two processors"]
fn tasks_on_one_processor_yield_to_each_other() {
    let (vm, program) = (Vm::start(), Program::compile("waits", &include_dir()));
    let [cpu, _] = two_cpus();
    assert_waits(&vm, &program, [pinned(cpu); 2], yields_on_one_cpu());
}

/// A program may pin itself, or be pinned, after its enrolment.
#[test]
#[ignore = "system tier: needs root, gcc and two processors"]
fn pinning_after_enrolment_counts() {
    let (vm, program) = (Vm::start(), Program::compile("waits", &include_dir()));
    let [cpu, other_cpu] = two_cpus();
    assert_waits(
        &vm,
        &program,
        [repinned(cpu, cpu), repinned(other_cpu, cpu)],
        yields_on_one_cpu(),
    );
    assert_waits(
        &vm,
        &program,
        [repinned(cpu, cpu), repinned(cpu, other_cpu)],
        0..=u32::MAX >> 1,
    );
}
