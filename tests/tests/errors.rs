//! Errors of the console and of programs consist of one line and a non-zero exit status. Malformed
//! input to a daemon has no effect. After `halt` no processes and no files remain.

use procfs::process::Process;
use sempa_proto::event::EventKind;
use sempa_tests::requirements::{self, require_testbed, require_testbed_with_own_engine};
use sempa_tests::run::run_to_end;
use sempa_tests::ssh::{client_config_path, remote_shell_command};
use sempa_tests::testbed::{ALICE_UID, wait_until_no_process};
use sempa_tests::vm::VmSettings;
use sempa_tests::{CommandResult, Host, Testbed, Vm, wait_for};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Checks that a command has failed with exactly one line on standard error, besides lines that
/// report the progress of `add`. The line must contain all `expected_words`; upper and lower case
/// are equal.
fn check_one_line_error(output: &CommandResult, expected_words: &[&str]) {
    assert!(!output.succeeded(), "it must fail: {output:?}");
    let lines: Vec<&str> = output
        .stderr
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with("add: "))
        .collect();
    assert_eq!(lines.len(), 1, "one line: {output:?}");
    for word in expected_words {
        assert!(
            lines[0].to_lowercase().contains(&word.to_lowercase()),
            "{word:?} is not in {:?}",
            lines[0]
        );
    }
}

fn with_hosts(host_count: usize, added_hosts: &[&str], test: impl FnOnce(&Vm, &Path)) {
    let bed = require_testbed(host_count);
    let prefix = requirements::require_prefix_in_hosts();
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    if !added_hosts.is_empty() {
        vm.add_hosts(added_hosts).expect("they join");
    }
    test(&vm, &prefix);
    vm.halt_and_wait().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_unreachable_host_is_named_with_the_reason() {
    with_hosts(1, &[], |vm, _| {
        check_one_line_error(&vm.run_pvm(&["add", "nohost"]).expect("ends"), &["nohost"]);
        check_one_line_error(&vm.run_pvm(&["add", "desk"]).expect("ends"), &["desk"]);
        check_one_line_error(
            &vm.run_pvm(&["delete", "nohost"]).expect("ends"),
            &["nohost"],
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn ssh_uses_fast_keys_unless_configured() {
    let bed = require_testbed(2);
    let config_path = client_config_path(bed.folder(), "root");
    let testbed_config = std::fs::read_to_string(&config_path).expect("the testbed has written it");
    let key_exchange_with = |extra_settings: &str| {
        // The additional settings precede the testbed's settings, because ssh uses the first value
        // of each setting.
        std::fs::write(
            &config_path,
            format!("LogLevel DEBUG1\n{extra_settings}{testbed_config}"),
        )
        .expect("ours");
        let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
        vm.add_hosts(&["h2"]).expect("it joins");
        let log = std::fs::read_to_string(bed.host(1).machine_path("/tmp/sempa-0/pvm/pvml"))
            .expect("a log");
        vm.halt_and_wait().expect("halts");
        assert!(
            !bed.host(1).machine_path("/tmp/sempa-0").exists(),
            "the settings of ssh stay behind"
        );
        let line = log
            .lines()
            .find_map(|line| line.split_once("kex: algorithm: "));
        line.unwrap_or_else(|| panic!("no agreement in {log}"))
            .1
            .to_string()
    };
    let default_key_exchange = key_exchange_with("");
    assert!(
        !default_key_exchange.contains("sntrup761"),
        "{default_key_exchange}"
    );
    assert_eq!(
        key_exchange_with("KexAlgorithms ecdh-sha2-nistp256\n"),
        "ecdh-sha2-nistp256"
    );
    assert_eq!(
        key_exchange_with("Host h2\nKexAlgorithms ecdh-sha2-nistp521\n"),
        "ecdh-sha2-nistp521"
    );
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn missing_daemon_is_reported_by_console_and_programs() {
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    let program = vm.compile_program("hold").expect("gcc");
    vm.halt_and_wait().expect("halts");
    check_one_line_error(
        &vm.run_pvm(&["conf"]).expect("ends"),
        &["no virtual machine"],
    );
    let mut command = vm.user_command(bed.host(1), program);
    command.args(["ask", "t40001"]);
    let output = run_to_end(command, TIMEOUT).expect("ends");
    // The second line comes from the library, which prints a line for each failed call, as PVM's
    // library does.
    let lines: Vec<&str> = output.stderr.lines().collect();
    assert!(!output.succeeded() && lines.len() == 2, "{output:?}");
    assert!(
        lines[0].contains("daemon")
            && lines[0].contains("start")
            && lines[1].contains("pvm_mytid()"),
        "{output:?}"
    );
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn root_is_refused_unless_allowed() {
    let bed = require_testbed(1);
    let prefix = requirements::require_prefix_in_hosts();
    for program in ["pvm", "pvmd"] {
        let mut command = bed.host(1).root_command(prefix.join("bin").join(program));
        if program == "pvm" {
            command.arg("start");
        }
        check_one_line_error(
            &run_to_end(command, TIMEOUT).expect("ends"),
            &["root", "PVM_ALLOW_ROOT"],
        );
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_program_that_is_not_on_the_host_is_named() {
    with_hosts(2, &["h2"], |vm, _| {
        check_one_line_error(
            &vm.run_pvm(&["spawn", "nosuchprogram"]).expect("ends"),
            &["nosuchprogram"],
        );
        check_one_line_error(
            &vm.run_pvm(&["spawn", "-h2", "nosuchprogram"])
                .expect("ends"),
            &["nosuchprogram"],
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_second_resource_manager_is_refused() {
    let bed = require_testbed(1);
    let prefix = requirements::require_prefix_in_hosts();
    let rm_path = prefix.join("bin/pvm-rm");
    let settings = VmSettings {
        rm_command: Some(rm_path.display().to_string()),
        ..VmSettings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    check_one_line_error(
        &run_to_end(vm.user_command(bed.host(1), &rm_path), TIMEOUT).expect("ends"),
        &["resource manager"],
    );
    vm.halt_and_wait().expect("halts");
}

/// The same user cannot start a second virtual machine on the same hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_second_virtual_machine_is_refused() {
    with_hosts(2, &["h2"], |vm, prefix| {
        for host in vm.testbed().hosts() {
            let output =
                run_to_end(vm.user_command(host, prefix.join("bin/pvmd")), TIMEOUT).expect("ends");
            check_one_line_error(&output, &["running already"]);
        }
    });
}

/// If CRIU is missing or does not work, the error of a migration names CRIU and the command that
/// installs it.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_missing_criu_is_named_with_the_remedy() {
    for script in [None, Some("#!/bin/sh\necho 'criu: broken' >&2\nexit 1\n")] {
        let bed = require_testbed_with_own_engine(2);
        let criu_path = bed.engine().expect("its own").to_path_buf();
        std::fs::remove_file(&criu_path).expect("removed");
        if let Some(script) = script {
            std::fs::write(&criu_path, script).expect("written");
            std::fs::set_permissions(&criu_path, std::fs::Permissions::from_mode(0o755))
                .expect("executable");
        }
        let vm =
            Vm::start(&bed, VmSettings::default()).expect("a virtual machine runs without CRIU");
        vm.add_hosts(&["h2"]).expect("h2 joins");
        vm.compile_program("hold").expect("gcc");
        let tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
        check_one_line_error(
            &vm.migrate(&tid, "h1").expect("ends"),
            &["criu", "cargo xtask criu"],
        );
        assert_eq!(vm.host_of(&tid).expect("alive"), "h2");
        vm.halt_and_wait().expect("halts");
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn impossible_migrations_are_refused_with_reason() {
    with_hosts(2, &["h2"], |vm, _| {
        vm.compile_program("hold").expect("gcc");
        let tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
        check_one_line_error(&vm.migrate(&tid, "h2").expect("ends"), &["already"]);
        check_one_line_error(&vm.migrate(&tid, "h9").expect("ends"), &["h9"]);
        check_one_line_error(
            &vm.migrate("t40999", "h2").expect("ends"),
            &["no such task"],
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn garbage_on_unix_socket_has_no_effect() {
    with_hosts(1, &[], |vm, _| {
        let socket_path = vm
            .testbed()
            .host(1)
            .machine_path("/tmp/sempa-0/pvm/pvmd.sock");
        let garbage: Vec<Vec<u8>> = vec![
            b"GET / HTTP/1.0\r\n\r\n".to_vec(),
            vec![0xff; 4096],
            [5u32.to_le_bytes().as_slice(), &[9, 1, 2, 3, 4]].concat(),
            vec![0; 5],
        ];
        for bytes in garbage {
            let mut stream = UnixStream::connect(&socket_path).expect("it listens");
            stream.set_read_timeout(Some(TIMEOUT)).expect("set");
            // The daemon may close the connection before it has read everything, so errors are
            // ignored.
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            assert!(
                vm.run_pvm(&["conf"]).expect("ends").succeeded(),
                "{}",
                vm.events_and_logs()
            );
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn garbage_on_udp_port_has_no_effect() {
    with_hosts(2, &["h2"], |vm, _| {
        let port = udp_port(vm.testbed().host(1));
        for byte_count in [1, 20, 1200, 60_000] {
            let line = format!("head -c {byte_count} /dev/urandom >/dev/udp/h1/{port}");
            let mut command = vm.testbed().outside_host().root_command("/bin/bash");
            command.args(["-c", &format!("for i in 1 2 3 4 5; do {line}; done")]);
            assert!(run_to_end(command, TIMEOUT).expect("ends").succeeded());
        }
        assert!(
            vm.run_pvm_on(vm.testbed().host(2), &["ps", "-a"])
                .expect("ends")
                .succeeded(),
            "{}",
            vm.events_and_logs()
        );
    });
}

fn udp_port(host: &Host) -> u16 {
    let init_process = Process::new(host.init_pid().cast_signed()).expect("it runs");
    let mut sockets = init_process.udp().expect("readable");
    sockets.extend(init_process.udp6().unwrap_or_default());
    let socket = sockets.first().expect("the daemon has a UDP port");
    socket.local_address.port()
}

/// A daemon of another virtual machine is refused, with a log line and an event. Both virtual
/// machines continue.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_foreign_daemon_is_refused_and_logged() {
    let bed = require_testbed(3);
    let first_vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    first_vm.add_hosts(&["h2"]).expect("h2 joins");
    first_vm.compile_program("hold").expect("gcc");
    let tid = first_vm
        .spawn_connected(&["-h2", "hold", "1"])
        .expect("spawned");
    let shell_path = write_misleading_shell(&bed, &format!("10.77.0.1:{}", udp_port(bed.host(1))));
    let env = [("PVM_VMID", "theirs".to_string()), ("PVM_RSH", shell_path)]
        .map(|(name, value)| (name.to_string(), value));
    let foreign_vm = Vm::start(
        &bed,
        VmSettings {
            env: env.to_vec(),
            ..VmSettings::default()
        },
    )
    .expect("a second one");

    check_one_line_error(
        &foreign_vm.run_pvm(&["add", "h3"]).expect("ends"),
        &["h3", "did not connect", "another program answers"],
    );
    let is_refusal =
        |text: &str| text.starts_with("refused a connection from") && text.contains("10.77.0.3");
    let event = first_vm
        .wait_for_event(TIMEOUT, "refusal", |entry| is_refusal(&entry.text))
        .expect("an event");
    assert!(
        event.text.contains("another virtual machine") && event.text.lines().count() == 1,
        "{}",
        event.text
    );
    let log =
        std::fs::read_to_string(bed.host(1).machine_path("/tmp/sempa-0/pvm/pvml")).expect("a log");
    assert!(log.contains(&event.text), "{log}");
    foreign_vm
        .wait_for_event(
            TIMEOUT,
            "refusal",
            |entry| matches!(&entry.kind, EventKind::HostRefused { name, .. } if name == "h3"),
        )
        .expect("an event");
    wait_until_no_process(bed.host(3), "pvmd", TIMEOUT)
        .expect("the daemon that found no master has ended");

    for (vm, host_count) in [(&first_vm, 2), (&foreign_vm, 1)] {
        let conf = vm
            .pvm_json(&["conf"])
            .expect("it answers")
            .pop()
            .expect("a value");
        assert_eq!(
            conf["hosts"].as_array().expect("a list").len(),
            host_count,
            "{conf}"
        );
    }
    foreign_vm
        .spawn_connected(&["hold", "1"])
        .expect("tasks start in theirs");
    first_vm.migrate_or_panic(&tid, "h1");
    foreign_vm
        .run_pvm(&["halt"])
        .expect("ends")
        .expect_success("halt")
        .expect("theirs halts");
    assert_eq!(first_vm.host_of(&tid).expect("alive"), "h1");
    first_vm.halt_and_wait().expect("ours halts");
}

/// Writes a remote shell that passes `address` to each new daemon as the address of its master.
/// Returns the path of the shell.
fn write_misleading_shell(bed: &Testbed, address: &str) -> String {
    let shell_path = bed.folder().join("misleading-shell");
    let sed_command = format!(r#"s/"masters":\[.*\],"library"/"masters":["{address}"],"library"/"#);
    let script = format!(
        "#!/bin/sh\nsed '{sed_command}' | {} \"$@\"\n",
        remote_shell_command(bed.folder(), "root")
    );
    std::fs::write(&shell_path, script).expect("written");
    std::fs::set_permissions(&shell_path, std::fs::Permissions::from_mode(0o755))
        .expect("executable");
    shell_path.display().to_string()
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn other_users_reach_neither_socket_nor_files() {
    with_hosts(1, &[], |vm, _| {
        let alice_home = vm.testbed().folder().join("alice");
        for shell_line in [
            "ls /tmp/sempa-0/pvm",
            "ls /tmp/sempa-0",
            "cat /tmp/sempa-0/pvm/pvml",
        ] {
            let mut command = vm
                .testbed()
                .host(1)
                .command_as(Some(("alice", ALICE_UID, &alice_home)), "/bin/sh");
            command.args(["-c", shell_line]);
            let output = run_to_end(command, TIMEOUT).expect("ends");
            assert!(
                !output.succeeded() || shell_line == "ls /tmp/sempa-0",
                "{shell_line}: {output:?}"
            );
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn halt_leaves_no_process_and_no_file_on_any_host() {
    let bed = require_testbed(3);
    let rm = "pvm-rm --policy load".to_string();
    let process_counts_before: Vec<usize> = bed
        .hosts()
        .iter()
        .map(|host| host.processes().len())
        .collect();
    let vm = Vm::start(
        &bed,
        VmSettings {
            rm_command: Some(rm),
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    let resident_tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
    let migrating_tid = vm.spawn_connected(&["-h3", "hold", "1"]).expect("spawned");
    vm.migrate_or_panic(&migrating_tid, "h1");
    assert_eq!(vm.host_of(&resident_tid).expect("alive"), "h2");
    vm.halt_and_wait().expect("halts");
    for (host, process_counts_before) in bed.hosts().iter().zip(process_counts_before) {
        wait_until_no_process(host, "hold", TIMEOUT).expect("no task");
        wait_for(TIMEOUT, || {
            let processes_now = host.processes();
            if processes_now.len() <= process_counts_before {
                Ok(())
            } else {
                Err(format!("{}: {processes_now:?}", host.name()))
            }
        })
        .expect("no process");
        assert_eq!(
            host.leftover_files(bed.folder()),
            Vec::<std::path::PathBuf>::new(),
            "{}",
            host.name()
        );
    }
    let next_vm = Vm::start(&bed, VmSettings::default()).expect("the next virtual machine starts");
    next_vm.halt_and_wait().expect("halts");
}
