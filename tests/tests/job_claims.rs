//! Two virtual machines with one store: a job runs in one of them.

use sempa_proto::event::EventKind;
use sempa_tests::requirements::require_testbed;
use sempa_tests::testbed::Testbed;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::Duration;

/// Longer than the validity of a claim, which is a minute.
const TIMEOUT: Duration = Duration::from_secs(240);
/// The store of both virtual machines on h1, and the path by which the first one reaches it.
const STORE_PATH: &str = "/tmp/claims/store";
const FIRST_PATH: &str = "/tmp/claims/first";

fn run_shell(bed: &Testbed, command_line: &str) {
    let output = bed.host(1).run_shell(command_line, TIMEOUT).expect("runs");
    assert!(output.succeeded(), "{command_line}: {output:?}");
}

/// Starts the virtual machine `name` with the store at this path.
fn start_vm<'a>(bed: &'a Testbed, name: &str, store: &str) -> Vm<'a> {
    let env = [
        ("PVM_VMID", name),
        ("SEMPA_STORE", store),
        ("SEMPA_STORE_KEY", "/tmp/claims/key"),
    ];
    let settings = VmSettings {
        env: VmSettings::owned_env(&env),
        ..VmSettings::default()
    };
    Vm::start(bed, settings).expect("a virtual machine")
}

fn has_task(vm: &Vm<'_>, tid: &str) -> bool {
    let tasks = vm.tasks().or_panic_with_logs(vm);
    tasks.iter().any(|task| task.tid == tid)
}

/// A job that runs in one virtual machine is not restarted in another one, until its record in the
/// store was not renewed for a minute and the user insists. The first virtual machine, which was
/// cut off from the store, ends its copy as soon as it finds this.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_runs_in_one_of_two_virtual_machines() {
    let bed = require_testbed(1);
    run_shell(
        &bed,
        &format!(
            "mkdir -m 700 -p /tmp/claims {STORE_PATH} {FIRST_PATH} && mount -n --bind {STORE_PATH} {FIRST_PATH}"
        ),
    );
    let first_vm = start_vm(&bed, "first", FIRST_PATH);
    first_vm.compile_program("hold").expect("gcc");
    let tid = first_vm
        .spawn_connected(&["-h1", "hold", "1"])
        .or_panic_with_logs(&first_vm);
    let values = first_vm
        .pvm_json(&["checkpoint", &tid])
        .or_panic_with_logs(&first_vm);
    let checkpoint = values[0]["set"].as_str().expect("a name").to_string();

    let second_vm = start_vm(&bed, "second", STORE_PATH);
    for options in [&[][..], &["--force"]] {
        let arguments = [&["restart", &*checkpoint], options].concat();
        let output = second_vm.run_pvm(&arguments).or_panic_with_logs(&second_vm);
        assert!(
            !output.succeeded()
                && output
                    .stderr
                    .contains("its job runs in virtual machine first")
                && output.stderr.contains("it runs there since 20")
                && output.stderr.contains("has not been renewed for another"),
            "{output:?}"
        );
    }
    assert!(has_task(&first_vm, &tid) && !has_task(&second_vm, &tid));

    // The first virtual machine loses the store, and nothing else.
    run_shell(&bed, &format!("umount -n -l {FIRST_PATH}"));
    let wait_result = wait_for(TIMEOUT, || {
        let arguments = ["restart", &checkpoint, "--force"];
        let output = second_vm
            .run_pvm(&arguments)
            .map_err(|error| error.to_string())?;
        match output.succeeded() {
            true => Ok(()),
            false => Err(output.stderr),
        }
    });
    wait_result.or_panic_with_logs(&second_vm);
    assert!(has_task(&second_vm, &tid));

    run_shell(&bed, &format!("mount -n --bind {STORE_PATH} {FIRST_PATH}"));
    let entry = first_vm.wait_for_event(TIMEOUT, "job taken over", |entry| {
        matches!(entry.kind, EventKind::JobTakenOver { .. })
    });
    let entry = entry.or_panic_with_logs(&first_vm);
    assert!(entry.text.contains("virtual machine second"), "{entry:?}");
    let wait_result = wait_for(TIMEOUT, || match has_task(&first_vm, &tid) {
        true => Err(format!("{tid} runs")),
        false => Ok(()),
    });
    wait_result.or_panic_with_logs(&first_vm);
    assert!(has_task(&second_vm, &tid));
    let output = first_vm
        .run_pvm(&["restart", &checkpoint])
        .or_panic_with_logs(&first_vm);
    assert!(
        !output.succeeded()
            && output
                .stderr
                .contains("its job runs in virtual machine second"),
        "{output:?}"
    );

    // A virtual machine that ends in order releases its jobs.
    let output = second_vm.run_pvm(&["halt"]).or_panic_with_logs(&second_vm);
    assert!(output.succeeded(), "{output:?}");
    let wait_result = wait_for(TIMEOUT, || {
        let arguments = ["restart", &checkpoint];
        let output = first_vm
            .run_pvm(&arguments)
            .map_err(|error| error.to_string())?;
        match output.succeeded() {
            true => Ok(()),
            false => Err(output.stderr),
        }
    });
    wait_result.or_panic_with_logs(&first_vm);
    first_vm.halt_and_wait().expect("halts");
}
