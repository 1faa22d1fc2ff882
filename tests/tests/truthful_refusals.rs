//! Refusals name the true reason, and what to do.

use sempa_tests::requirements::require_testbed;
use sempa_tests::testbed::NETWORK_PREFIX;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm};

/// A spawn that a limit of the resource manager refuses says that it is the limit, which one, and
/// how many tasks there are.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn spawn_over_a_limit_names_the_limit() {
    for (option, holder) in [("--user-tasks", "user"), ("--job-tasks", "job")] {
        let bed = require_testbed(1);
        let settings = VmSettings {
            rm_command: Some(format!("pvm-rm {option} 2")),
            ..VmSettings::default()
        };
        let vm = Vm::start(&bed, settings).expect("a virtual machine");
        vm.compile_program("hold").expect("gcc");
        let output = vm
            .run_pvm(&["spawn", "-3", "hold", "1"])
            .or_panic_with_logs(&vm);
        let reason = format!(
            "spawn hold: refused: the limit {option} of the resource manager is 2, and the {holder} has 0 tasks"
        );
        assert!(
            !output.succeeded() && output.stderr.contains(&reason),
            "{output:?}\n{}",
            vm.events_and_logs()
        );
        vm.halt_and_wait().expect("halts");
    }
}

/// A host that cannot be reached: the error names the exact command to try.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn failed_add_names_the_command_to_try() {
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    let address = format!("{NETWORK_PREFIX}.99");
    let output = vm.run_pvm(&["add", &address]).or_panic_with_logs(&vm);
    assert!(
        !output.succeeded() && output.stderr.contains(&format!("try 'ssh {address} true'")),
        "{output:?}"
    );
    vm.halt_and_wait().expect("halts");
}
