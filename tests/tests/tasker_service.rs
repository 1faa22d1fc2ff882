//! Virtual machines of an ordinary user on hosts with the tasker service: the user's tasks migrate,
//! are checkpointed and stop for owners like those of root.

use sempa_proto::event::EventKind;
use sempa_tests::hold_tasks::check_memory;
use sempa_tests::requirements::require_testbed;
use sempa_tests::ring_job::{RingJob, WORKER_COUNT};
use sempa_tests::ssh::SshLogin;
use sempa_tests::tasker_service::TaskerServices;
use sempa_tests::testbed::ALICE_UID;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a task in MiB that migrates with all its memory in the images, and of one that uses
/// post-copy.
const SMALL_MIB: &str = "1";
const LARGE_MIB: &str = "80";

fn start_services(testbed: &Testbed) -> TaskerServices<'_> {
    let key_dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    TaskerServices::start(testbed, key_dir).expect("the services")
}

/// Starts a virtual machine of alice on all hosts.
fn start_alices_vm<'a>(testbed: &'a Testbed) -> Vm<'a> {
    let settings = VmSettings {
        runs_as_alice: true,
        ..VmSettings::default()
    };
    let vm = Vm::start(testbed, settings).expect("a virtual machine");
    let slaves = testbed.hosts()[1..].iter().map(|host| host.name());
    vm.add_hosts(&slaves.collect::<Vec<_>>())
        .expect("they join");
    vm
}

/// Asserts that each process of a task belongs to alice and has no capability.
fn assert_runs_as_alice(vm: &Vm, host: usize, program: &str) {
    let processes = vm.testbed().host(host).processes();
    let pids = processes
        .iter()
        .filter(|(_, line)| line.contains(&format!("LINUX64/{program} ")));
    let mut count = 0;
    for (pid, line) in pids {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name));
            line.expect("the field")
                .split_whitespace()
                .skip(1)
                .collect::<Vec<_>>()
                .join(" ")
        };
        let uid = ALICE_UID.to_string();
        assert_eq!(field("Uid:"), [&*uid; 4].join(" "), "{line}");
        assert_eq!(
            (field("CapEff:"), field("NoNewPrivs:")),
            ("0".repeat(16), "1".into())
        );
        count += 1;
    }
    assert!(count > 0, "{program} runs: {processes:?}");
}

/// A small task, and one whose memory is post-copied, migrate there and back.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn tasks_of_a_user_migrate() {
    let testbed = require_testbed(2);
    let _services = start_services(&testbed);
    let vm = start_alices_vm(&testbed);
    vm.compile_program("hold").expect("gcc");
    for mebibytes in [SMALL_MIB, LARGE_MIB] {
        let tid = vm
            .spawn_connected(&["-h2", "hold", mebibytes])
            .or_panic_with_logs(&vm);
        check_memory(&vm, &tid);
        assert_runs_as_alice(&vm, 2, "hold");
        for (host, name) in [(1, "h1"), (2, "h2")] {
            vm.migrate_or_panic(&tid, name);
            check_memory(&vm, &tid);
            assert_runs_as_alice(&vm, host, "hold");
        }
    }
    vm.halt_and_wait().expect("halts");
}

/// Running tasks, and their migrations, survive a restart of the service.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn tasks_survive_a_restart_of_the_service() {
    let testbed = require_testbed(2);
    let mut services = start_services(&testbed);
    let vm = start_alices_vm(&testbed);
    vm.compile_program("hold").expect("gcc");
    let tid = vm
        .spawn_connected(&["-h2", "hold", SMALL_MIB])
        .or_panic_with_logs(&vm);
    services.restart(2).expect("another one");
    check_memory(&vm, &tid);
    vm.migrate_or_panic(&tid, "h1");
    vm.migrate_or_panic(&tid, "h2");
    check_memory(&vm, &tid);
    vm.halt_and_wait().expect("halts");
}

/// A job is checkpointed, and restarted in a new virtual machine of the same user.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_of_a_user_restarts_in_a_new_virtual_machine() {
    let testbed = require_testbed(3);
    let _services = start_services(&testbed);
    let vm = start_alices_vm(&testbed);
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 20);
    let values = vm
        .pvm_json(&["checkpoint", "--end", &job.tid])
        .or_panic_with_logs(&vm);
    let task_count = values[0]["tasks"].as_array().map(Vec::len);
    assert_eq!(task_count, Some(WORKER_COUNT + 1), "{values:?}");
    let checkpoint = values[0]["set"].as_str().expect("a name").to_string();
    vm.halt_and_wait().expect("halts");
    let vm = start_alices_vm(&testbed);
    let output = vm
        .run_pvm(&["restart", &checkpoint])
        .or_panic_with_logs(&vm);
    assert!(output.succeeded(), "{output:?}\n{}", vm.events_and_logs());
    vm.migrate_or_panic(&job.tid, "h3");
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

/// An owner logs in on the host of a user's task: the task stops at once, and leaves by migration.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn login_evicts_a_users_task() {
    let testbed = require_testbed(2);
    let _services = start_services(&testbed);
    let settings = VmSettings {
        rm_command: Some("pvm-rm --policy load".into()),
        runs_as_alice: true,
        ..VmSettings::default()
    };
    let vm = Vm::start(&testbed, settings).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("h2 joins");
    vm.compile_program("hold").expect("gcc");
    let tid = vm
        .spawn_connected(&["-h2", "hold", SMALL_MIB])
        .or_panic_with_logs(&vm);
    check_memory(&vm, &tid);
    let login = SshLogin::log_in(&testbed, "olga", testbed.host(2)).expect("a login");
    let is_pause = |kind: &EventKind| matches!(kind, EventKind::GuestsPaused { .. });
    vm.wait_for_event(TIMEOUT, "stopped guests", |entry| is_pause(&entry.kind))
        .or_panic_with_logs(&vm);
    let is_away = || match vm.host_of(&tid) {
        Ok(host) if host == "h1" => Ok(()),
        other => Err(format!("{other:?}")),
    };
    wait_for(TIMEOUT, is_away).or_panic_with_logs(&vm);
    check_memory(&vm, &tid);
    assert_runs_as_alice(&vm, 1, "hold");
    login.log_out().expect("logs out");
    vm.halt_and_wait().expect("halts");
}

/// Root's daemons use the service, too; root's tasks have what they had before.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn roots_virtual_machine_uses_the_service() {
    let testbed = require_testbed(2);
    let _services = start_services(&testbed);
    let vm = Vm::start(&testbed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("h2 joins");
    vm.compile_program("hold").expect("gcc");
    let tid = vm
        .spawn_connected(&["-h2", "hold", SMALL_MIB])
        .or_panic_with_logs(&vm);
    let sessions = testbed.host(2).machine_path("/run/sempa/sessions");
    assert_eq!(
        std::fs::read_dir(sessions).expect("the sessions").count(),
        1
    );
    for host in ["h1", "h2"] {
        vm.migrate_or_panic(&tid, host);
        check_memory(&vm, &tid);
    }
    vm.halt_and_wait().expect("halts");
}
