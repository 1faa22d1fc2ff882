//! Starts virtual machines for the test program `hold`, which allocates memory and checks that it
//! stays unchanged.

use crate::requirements::require_testbed_with_env;
use crate::run::run_successfully;
use crate::vm::{OrPanicWithLogs, VmSettings};
use crate::{Testbed, Vm};
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use std::time::Duration;

const TASK_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `test` on a virtual machine with `host_count` hosts, for which the program `hold` is
/// compiled. Halts the virtual machine afterwards. `env` contains the environment variables of all
/// hosts.
pub fn with_hosts(host_count: usize, env: &[(&str, &str)], test: impl FnOnce(&Vm)) {
    with_prepared_hosts(host_count, env, |_| (), test);
}

/// As [`with_hosts`]. Calls `prepare` with the testbed before the virtual machine starts.
///
/// # Panics
/// The virtual machine does not start or does not halt.
pub fn with_prepared_hosts(
    host_count: usize,
    env: &[(&str, &str)],
    prepare: impl FnOnce(&Testbed),
    test: impl FnOnce(&Vm),
) {
    let testbed = require_testbed_with_env(host_count, env);
    prepare(&testbed);
    let settings = VmSettings {
        env: VmSettings::owned_env(env),
        ..VmSettings::default()
    };
    let vm = Vm::start(&testbed, settings).expect("a virtual machine");
    let slave_names: Vec<&str> = testbed.hosts()[1..host_count]
        .iter()
        .map(|host| host.name())
        .collect();
    vm.add_hosts(&slave_names).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    test(&vm);
    vm.halt_and_wait().expect("halts");
}

/// Checks that a task of `hold` answers and that its memory is unchanged. Returns the task's
/// counter, which increases about once per millisecond while the task runs.
///
/// # Panics
/// The task does not answer, or its memory is damaged.
pub fn check_memory(vm: &Vm, tid: &str) -> u64 {
    let mut command = vm.user_command(
        vm.testbed().host(1),
        vm.user_home().join("pvm3/bin/LINUX64/hold"),
    );
    command.args(["ask", tid]);
    let result = run_successfully(command, TASK_TIMEOUT).or_panic_with_logs(vm);
    assert!(result.stdout.contains("sum GOOD"), "{result:?}");
    let counter = result.stdout.split_whitespace().nth(1);
    counter
        .and_then(|counter| counter.parse().ok())
        .unwrap_or_else(|| panic!("no count: {result:?}"))
}

/// Waits until the migration of a task has completed the step `expected_step`.
///
/// # Panics
/// The step is not completed within the time limit.
pub fn wait_for_step(vm: &Vm, tid: &str, expected_step: Step) {
    let is_completed = |kind: &EventKind| match kind {
        EventKind::MigrationStep {
            tid: migrating_tid,
            step,
            ..
        } => *step == expected_step && migrating_tid.to_string() == tid,
        _ => false,
    };
    vm.wait_for_event(TASK_TIMEOUT, "the step", |entry| is_completed(&entry.kind))
        .or_panic_with_logs(vm);
}
