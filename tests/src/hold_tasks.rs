//! Starts virtual machines for the test program `hold`, which allocates memory and checks that it
//! stays unchanged.

use crate::requirements::testbed_with_env;
use crate::run::run_ok;
use crate::vm::{OrPanicWithLogs, Settings};
use crate::{Testbed, Vm};
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `test` on a virtual machine of `count` hosts. `env` are environment variables of all hosts.
pub fn with_hosts(count: usize, env: &[(&str, &str)], test: impl FnOnce(&Vm)) {
    with_changed_hosts(count, env, |_| (), test);
}

/// As [`with_hosts`]. Calls `change` with the testbed before the virtual machine starts.
///
/// # Panics
/// As [`with_hosts`].
pub fn with_changed_hosts(
    count: usize,
    env: &[(&str, &str)],
    change: impl FnOnce(&Testbed),
    test: impl FnOnce(&Vm),
) {
    let bed = testbed_with_env(count, env);
    change(&bed);
    let settings = Settings {
        env: Settings::env_of(env),
        ..Settings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    let names: Vec<&str> = bed.hosts()[1..count]
        .iter()
        .map(|host| host.name())
        .collect();
    vm.add(&names).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    test(&vm);
    vm.halt().expect("halts");
}

/// Checks that a task of `hold` answers and that its memory is unchanged. Returns the task's
/// counter, which grows about once per millisecond while the task runs.
///
/// # Panics
/// The task does not answer, or its memory is damaged.
pub fn check_memory(vm: &Vm, tid: &str) -> u64 {
    let mut command = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
    command.args(["ask", tid]);
    let done = run_ok(command, TIMEOUT).or_panic_with_logs(vm);
    assert!(done.out.contains("sum GOOD"), "{done:?}");
    let count = done.out.split_whitespace().nth(1);
    count
        .and_then(|count| count.parse().ok())
        .unwrap_or_else(|| panic!("no count: {done:?}"))
}

/// Waits until the migration of a task has completed the step `wanted`.
///
/// # Panics
/// The step is not completed within the time limit.
pub fn wait_for_step(vm: &Vm, tid: &str, wanted: Step) {
    let is = |kind: &EventKind| match kind {
        EventKind::MigrationStep { tid: of, step, .. } => *step == wanted && of.to_string() == tid,
        _ => false,
    };
    vm.wait_for_event(TIMEOUT, "the step", |entry| is(&entry.kind))
        .or_panic_with_logs(vm);
}
