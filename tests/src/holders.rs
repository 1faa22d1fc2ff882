//! Hosts on which `hold` is there, a program that holds memory and says whether it is what it was.

use crate::needs::testbed_with_env;
use crate::run::must;
use crate::vm::{Settings, Sure};
use crate::{Testbed, Vm};
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

/// Runs a test on a virtual machine of so many hosts, in whose environment this is, and for its daemons as well.
///
/// # Panics
/// It cannot be had.
pub fn with_hosts(count: usize, env: &[(&str, &str)], test: impl FnOnce(&Vm)) {
    with_changed_hosts(count, env, |_| (), test);
}

/// The same, when `change` has made the hosts other ones.
///
/// # Panics
/// As above.
pub fn with_changed_hosts(
    count: usize,
    env: &[(&str, &str)],
    change: impl FnOnce(&Testbed),
    test: impl FnOnce(&Vm),
) {
    let bed = testbed_with_env(count, env);
    change(&bed);
    let env = env
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    let vm = Vm::start(
        &bed,
        Settings {
            env,
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    let names: Vec<&str> = bed.hosts()[1..count]
        .iter()
        .map(|host| host.name())
        .collect();
    vm.add(&names).expect("the others join");
    vm.program("hold").expect("gcc");
    test(&vm);
    vm.halt().expect("halts");
}

/// The task answers, and its memory is what it was.
///
/// # Panics
/// It does not, or it is not.
pub fn is_whole(vm: &Vm, tid: &str) {
    let mut command = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
    command.args(["ask", tid]);
    let done = must(command, SOON).sure(vm);
    assert!(done.out.contains("sum GOOD"), "{done:?}");
}

/// The move of this task has done this step.
///
/// # Panics
/// It has not, for long.
pub fn reached(vm: &Vm, tid: &str, wanted: Step) {
    let is = |kind: &EventKind| match kind {
        EventKind::MigrationStep { tid: of, step, .. } => *step == wanted && of.to_string() == tid,
        _ => false,
    };
    vm.event(SOON, "the step", |entry| is(&entry.kind)).sure(vm);
}
