//! An ordinary user can use a virtual machine. Only migrations and checkpoints need more rights;
//! without these rights they are refused with this reason. A further test checks which capabilities
//! the programs of root retain.

use nix::unistd::Pid;
use procfs::process::Process;
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Refusal};
use sempa_tests::OrPanicWithLogs;
use sempa_tests::Vm;
use sempa_tests::faults::daemon_pid;
use sempa_tests::migration_steps::{Victim, victim_process};
use sempa_tests::requirements::require_testbed;
use sempa_tests::run::run_successfully;
use sempa_tests::vm::VmSettings;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Size in bytes of the kernel's buffer for a UDP port of root's daemons. The kernel doubles the
/// requested number.
const UDP_BUFFER_BYTES: usize = 8 << 20;

/// Tasks of an ordinary user run. A migration or a checkpoint is refused with the reason.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn ordinary_users_tasks_run_and_do_not_migrate() {
    let bed = require_testbed(2);
    let vm = Vm::start(
        &bed,
        VmSettings {
            runs_as_alice: true,
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("h2 joins");
    let program = vm.compile_program("hold").expect("gcc");
    let tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
    let mut ask_command = vm.user_command(bed.host(1), program);
    ask_command.args(["ask", &tid]);
    let output = run_successfully(ask_command, TIMEOUT).or_panic_with_logs(&vm);
    assert!(output.stdout.contains("sum GOOD"), "{output:?}");
    let refused_output = vm.migrate(&tid, "h1").expect("ends");
    assert!(
        refused_output.failed_with_one_sentence(),
        "{refused_output:?}"
    );
    assert_eq!(vm.host_of(&tid).expect("alive"), "h2");
    let entry = vm
        .wait_for_event(TIMEOUT, "refused move", |entry| {
            matches!(entry.kind, EventKind::MigrationFailed { .. })
        })
        .or_panic_with_logs(&vm);
    let EventKind::MigrationFailed {
        why: Failure::Refused(reasons),
        ..
    } = &entry.kind
    else {
        panic!("{entry:?}")
    };
    // The message names two alternatives: a daemon of root, and `SEMPA_ENGINE`.
    // tests/tests/engines.rs tests the alternative `SEMPA_ENGINE`.
    let has_hint = |why: &str| {
        why.contains("run the daemon as root")
            && why.contains("SEMPA_ENGINE")
            && !why.contains("CAP_")
    };
    assert!(
        reasons
            .iter()
            .any(|reason| matches!(reason, Refusal::NoEngine { why, .. } if has_hint(why))),
        "{reasons:?}"
    );
    let checkpoint_output = vm.run_pvm(&["checkpoint", &tid]).expect("ends");
    assert!(
        !checkpoint_output.succeeded()
            && checkpoint_output.stderr.contains("cannot dump or restore")
            && checkpoint_output.stderr.contains("the job continues"),
        "{checkpoint_output:?}"
    );
    let mut ask_command =
        vm.user_command(bed.host(1), vm.user_home().join("pvm3/bin/LINUX64/hold"));
    ask_command.args(["ask", &tid]);
    assert!(
        run_successfully(ask_command, TIMEOUT)
            .expect("it answers")
            .stdout
            .contains("sum GOOD")
    );
    vm.halt_and_wait().expect("halts");
}

/// Returns one capability set of a process as a bit mask. `set_name` is the field of the set in the
/// process's status file.
fn capability_set(pid: Pid, set_name: &str) -> u64 {
    let status = Process::new(pid.as_raw()).and_then(|process| process.status());
    let status = status.unwrap_or_else(|e| panic!("process {pid}: {e}"));
    let mask = match set_name {
        "CapInh" => Some(status.capinh),
        "CapPrm" => Some(status.capprm),
        "CapEff" => Some(status.capeff),
        "CapBnd" => status.capbnd,
        "CapAmb" => status.capamb,
        _ => None,
    };
    mask.expect("a set of that name")
}

/// The daemon and the tasker of root retain only the capabilities that they need. Tasks have all
/// capabilities, even after a migration.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn roots_daemons_drop_capabilities_tasks_keep_them() {
    let bed = require_testbed(2);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("h2 joins");
    vm.compile_program("hold").expect("gcc");
    let tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
    let task_pid = |host: usize| {
        let line = |(pid, line): (u32, String)| {
            line.ends_with("/hold 1")
                .then_some(Pid::from_raw(pid.cast_signed()))
        };
        bed.host(host)
            .processes()
            .into_iter()
            .find_map(line)
            .expect("it runs there")
    };
    let all_capabilities = capability_set(Pid::this(), "CapBnd");
    let check_has_all = |host: usize| {
        for set_name in ["CapPrm", "CapEff", "CapBnd"] {
            assert_eq!(
                capability_set(task_pid(host), set_name),
                all_capabilities,
                "{set_name} of a task of root on h{host}"
            );
        }
    };
    // Numbers of capabilities that no daemon or tasker retains: capabilities for other processes,
    // networks, modules, devices, clocks and the whole machine.
    let forbidden_capabilities = [
        12, 13, 14, 15, 16, 17, 20, 22, 25, 26, 27, 29, 30, 33, 34, 35, 36, 38, 39,
    ];
    let forbidden_capabilities = forbidden_capabilities
        .iter()
        .fold(0, |mask, number| mask | 1_u64 << number);
    let tasker_capabilities = [19, 21, 40]
        .iter()
        .fold(0, |mask, number| mask | 1_u64 << number);
    for host in bed.hosts() {
        let daemon_pid = daemon_pid(host).expect("a daemon");
        let tasker_pid = victim_process(host, Victim::TargetTasker).expect("a tasker");
        for set_name in ["CapPrm", "CapEff"] {
            assert_eq!(
                capability_set(daemon_pid, set_name)
                    & (forbidden_capabilities | tasker_capabilities),
                0,
                "{set_name} of the daemon on {}",
                host.name()
            );
            assert_eq!(
                capability_set(tasker_pid, set_name) & forbidden_capabilities,
                0,
                "{set_name} of the tasker on {}",
                host.name()
            );
            assert_eq!(
                capability_set(tasker_pid, set_name) & tasker_capabilities,
                all_capabilities & tasker_capabilities,
                "{set_name} on {}",
                host.name()
            );
        }
        // Setting this buffer size needs a capability that the daemon has dropped. The size shows
        // that the daemon has set it before it dropped the capability.
        let port_list = host
            .run_shell("ss -Huanm", TIMEOUT)
            .expect("iproute2")
            .stdout;
        assert!(
            port_list.contains(&format!("rb{}", 2 * UDP_BUFFER_BYTES)),
            "{}: {port_list}",
            host.name()
        );
    }
    check_has_all(2);
    vm.migrate_or_panic(&tid, "h1");
    check_has_all(1);
    vm.halt_and_wait().expect("halts");
}
