//! Limits of the users of a host with the tasker service: they hold for all virtual machines of a
//! user together, and the cap of the owner for those of all users.

use sempa_proto::event::EventKind;
use sempa_service_settings::SETTINGS_VARIABLE;
use sempa_service_settings::host_account::{
    ACCOUNT_DIR, HostTotals, guest_cap_path, read_totals, write_guest_cap,
};
use sempa_tests::hold_tasks::check_memory;
use sempa_tests::requirements::require_testbed;
use sempa_tests::tasker_service::TaskerServices;
use sempa_tests::testbed::{ALICE, Account, BOB};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a small task in MiB.
const SMALL_MIB: &str = "1";

/// Starts the services with the administrator's settings `settings`.
fn start_services<'a>(testbed: &'a Testbed, settings: &str) -> TaskerServices<'a> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = dir.join(format!("service-{}.toml", std::process::id()));
    fs::write(&path, settings).expect("the test's own directory");
    fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("the test's own file");
    let variable = format!("{SETTINGS_VARIABLE}={}", path.display());
    TaskerServices::start_wrapped(testbed, dir, &["/usr/bin/env", &variable]).expect("services")
}

/// Starts a virtual machine of a user; `name` distinguishes those of one user.
fn start_vm<'a>(testbed: &'a Testbed, user: Account, name: &str) -> Vm<'a> {
    let settings = VmSettings {
        env: VmSettings::owned_env(&[("PVM_VMID", name)]),
        ..VmSettings::default()
    };
    let (vm, _) = Vm::start_as(testbed, user, settings).expect("a virtual machine");
    vm.compile_program("hold").expect("gcc");
    vm
}

fn spawn(vm: &Vm<'_>, host: &str, mebibytes: &str) -> String {
    let tid = vm.spawn_connected(&[&format!("-{host}"), "hold", mebibytes]);
    tid.or_panic_with_logs(vm)
}

/// Waits for an event whose text contains `part`. Returns the text.
fn wait_for_note(vm: &Vm<'_>, part: &str) -> String {
    let is_note =
        |kind: &EventKind| matches!(kind, EventKind::Note { text } if text.contains(part));
    let entry = vm.wait_for_event(TIMEOUT, part, |entry| is_note(&entry.kind));
    match entry.or_panic_with_logs(vm).kind {
        EventKind::Note { text } => text,
        kind => panic!("{kind:?}"),
    }
}

/// Asserts that a task cannot be started on h1 for a reason that contains `part`.
fn assert_start_refused(vm: &Vm<'_>, part: &str) {
    vm.run_pvm(&["spawn", "-h1", "hold", SMALL_MIB])
        .expect("the console ends");
    let text = wait_for_note(vm, part);
    assert!(
        text.contains("could not be started: cannot start"),
        "{text}"
    );
}

fn account_dir(testbed: &Testbed) -> PathBuf {
    testbed.host(1).machine_path(ACCOUNT_DIR)
}

fn account_of_h1(testbed: &Testbed) -> HostTotals {
    read_totals(&account_dir(testbed), |_, _| true).expect("the account")
}

fn end_task(vm: &Vm<'_>, tid: &str) {
    let output = vm.run_pvm(&["kill", tid]).or_panic_with_logs(vm);
    assert!(output.succeeded(), "{output:?}");
    let has_ended = || match vm.tasks() {
        Ok(tasks) if tasks.iter().all(|task| task.tid != tid) => Ok(()),
        other => Err(format!("{other:?}")),
    };
    wait_for(TIMEOUT, has_ended).or_panic_with_logs(vm);
}

/// Halts virtual machines that share their hosts.
fn halt_all(vms: &[&Vm<'_>]) {
    for vm in vms {
        let output = vm.run_pvm(&["halt"]).expect("the console ends");
        assert!(output.succeeded(), "{output:?}");
    }
    vms[0].wait_until_ended(TIMEOUT).expect("all end");
}

/// Asserts that the tasks of `hold` are in a control group of their user.
fn assert_in_group_of(vm: &Vm<'_>, user: Account) {
    let processes = vm.testbed().host(1).processes();
    let own = format!("/{}/", user.name);
    let is_task = |line: &str| line.contains("LINUX64/hold ") && line.contains(&own);
    let mut count = 0;
    for (pid, line) in processes.iter().filter(|(_, line)| is_task(line)) {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it runs");
        let group = format!("/sempa-user-{}/sempa-", user.uid);
        assert!(
            groups.lines().any(|path| path.contains(&group)),
            "{line}: {groups}"
        );
        count += 1;
    }
    assert!(count > 0, "{processes:?}");
}

/// Two virtual machines of a user share the limit of tasks; another user has his own.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_limit_holds_for_two_virtual_machines() {
    let testbed = require_testbed(1);
    let _services = start_services(&testbed, "[users.alice]\ntasks = 3\n");
    let first = start_vm(&testbed, ALICE, "first");
    let second = start_vm(&testbed, ALICE, "second");
    let bobs = start_vm(&testbed, BOB, "bobs");
    let tids = [
        spawn(&first, "h1", SMALL_MIB),
        spawn(&first, "h1", SMALL_MIB),
    ];
    spawn(&second, "h1", SMALL_MIB);
    assert_in_group_of(&first, ALICE);
    let reason = "the administrator allows 3 tasks of alice on this machine, and 3 are present";
    for vm in [&first, &second] {
        assert_start_refused(vm, reason);
    }
    for _ in 0..4 {
        spawn(&bobs, "h1", SMALL_MIB);
    }
    assert_in_group_of(&bobs, BOB);
    let account = account_of_h1(&testbed);
    let guests = [ALICE, BOB].map(|user| account.of_user(user.uid).guests);
    assert_eq!((guests, account.sessions.len()), ([3, 4], 3), "{account:?}");
    end_task(&first, &tids[0]);
    spawn(&second, "h1", SMALL_MIB);
    halt_all(&[&first, &second, &bobs]);
    let are_removed = || match account_of_h1(&testbed) {
        account if account.sessions.is_empty() => Ok(()),
        account => Err(format!("{account:?}")),
    };
    wait_for(TIMEOUT, are_removed).expect("no tasker is left");
}

/// The owner's cap counts the tasks of all users, for starts and for arrivals.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn cap_holds_for_all_users() {
    let testbed = require_testbed(2);
    let _services = start_services(&testbed, "");
    let alices = start_vm(&testbed, ALICE, "alices");
    let bobs = start_vm(&testbed, BOB, "bobs");
    alices.add_hosts(&["h2"]).or_panic_with_logs(&alices);
    let away = spawn(&alices, "h2", SMALL_MIB);
    let here = spawn(&alices, "h1", SMALL_MIB);
    spawn(&bobs, "h1", SMALL_MIB);
    let dir = account_dir(&testbed);
    write_guest_cap(&dir, Some(2)).expect("root may write it");
    let reason = "its owner allows 2 tasks on this machine, and as many are present";
    for vm in [&alices, &bobs] {
        assert_start_refused(vm, reason);
    }
    let output = alices.migrate(&away, "h1").or_panic_with_logs(&alices);
    assert!(
        !output.succeeded() && output.stderr.contains(reason),
        "{output:?}"
    );
    check_memory(&alices, &away);
    end_task(&alices, &here);
    alices.migrate_or_panic(&away, "h1");
    fs::remove_file(guest_cap_path(&dir)).expect("root may remove it");
    spawn(&bobs, "h1", SMALL_MIB);
    halt_all(&[&alices, &bobs]);
}

/// The task that uses most is killed while its user is over the limit of memory, in whichever
/// virtual machine it is, and the event log tells why.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn largest_task_is_killed_over_the_memory_limit() {
    let testbed = require_testbed(1);
    let settings = "[users.alice]\nmemory = \"240M\"\n";
    let _services = start_services(&testbed, settings);
    let first = start_vm(&testbed, ALICE, "first");
    let second = start_vm(&testbed, ALICE, "second");
    let bobs = start_vm(&testbed, BOB, "bobs");
    let bobs_task = spawn(&bobs, "h1", "300");
    let small = spawn(&first, "h1", "70");
    let large = spawn(&second, "h1", "110");
    let is_measured = || match account_of_h1(&testbed).of_user(ALICE.uid) {
        usage if usage.memory_bytes > 180 << 20 => Ok(()),
        usage => Err(format!("{usage:?}")),
    };
    wait_for(TIMEOUT, is_measured).or_panic_with_logs(&first);
    let middle = spawn(&first, "h1", "90");
    let text = wait_for_note(&second, "was killed");
    let has_words = text.starts_with(&format!("{large} was killed: the tasks of alice use "))
        && text.ends_with(" MiB, and the administrator allows 240 MiB");
    assert!(has_words, "{text}");
    for (vm, tid) in [(&first, &small), (&first, &middle), (&bobs, &bobs_task)] {
        check_memory(vm, tid);
    }
    let has_ended = || match second.tasks() {
        Ok(tasks) if tasks.iter().all(|task| task.tid != large) => Ok(()),
        other => Err(format!("{other:?}")),
    };
    wait_for(TIMEOUT, has_ended).or_panic_with_logs(&second);
    spawn(&second, "h1", SMALL_MIB);
    halt_all(&[&first, &second, &bobs]);
}
