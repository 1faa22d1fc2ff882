//! Errors of the console and of programs are one clear line and a non-zero exit status. Malformed
//! input to a daemon has no effect. After `halt` no processes and no files remain.

use procfs::process::Process;
use sempa_proto::event::EventKind;
use sempa_tests::requirements::{self, testbed, testbed_with_own_engine};
use sempa_tests::run::run;
use sempa_tests::ssh::{client_config, remote_shell};
use sempa_tests::testbed::{ALICE_UID, wait_until_no_process};
use sempa_tests::vm::Settings;
use sempa_tests::{CommandResult, Host, Testbed, Vm, wait_for};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Checks that a command has failed with exactly one line on standard error, which contains these
/// words.
fn check_one_line_error(done: &CommandResult, words: &[&str]) {
    assert!(!done.succeeded(), "it must fail: {done:?}");
    let lines: Vec<&str> = done
        .err
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    assert_eq!(lines.len(), 1, "one line: {done:?}");
    for word in words {
        assert!(
            lines[0].to_lowercase().contains(&word.to_lowercase()),
            "{word:?} is not in {:?}",
            lines[0]
        );
    }
}

fn with_hosts(count: usize, joined: &[&str], test: impl FnOnce(&Vm, &Path)) {
    let bed = testbed(count);
    let prefix = requirements::prefix_in_bed();
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    if !joined.is_empty() {
        vm.add(joined).expect("they join");
    }
    test(&vm, &prefix);
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_unreachable_host_is_named_with_the_reason() {
    with_hosts(1, &[], |vm, _| {
        check_one_line_error(&vm.pvm(&["add", "nohost"]).expect("ends"), &["nohost"]);
        check_one_line_error(&vm.pvm(&["add", "desk"]).expect("ends"), &["desk"]);
        check_one_line_error(&vm.pvm(&["delete", "nohost"]).expect("ends"), &["nohost"]);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn ssh_uses_fast_keys_unless_configured() {
    let bed = testbed(2);
    let config = client_config(bed.folder(), "root");
    let usual = std::fs::read_to_string(&config).expect("the testbed has written it");
    let agreed_with = |own: &str| {
        // The settings are put first, because ssh uses the first value of each setting.
        std::fs::write(&config, format!("LogLevel DEBUG1\n{own}{usual}")).expect("ours");
        let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
        vm.add(&["h2"]).expect("it joins");
        let log = std::fs::read_to_string(bed.host(1).machine_path("/tmp/sempa-0/pvm/pvml"))
            .expect("a log");
        vm.halt().expect("halts");
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
    let by_itself = agreed_with("");
    assert!(!by_itself.contains("sntrup761"), "{by_itself}");
    assert_eq!(
        agreed_with("KexAlgorithms ecdh-sha2-nistp256\n"),
        "ecdh-sha2-nistp256"
    );
    assert_eq!(
        agreed_with("Host h2\nKexAlgorithms ecdh-sha2-nistp521\n"),
        "ecdh-sha2-nistp521"
    );
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn without_a_daemon_console_and_programs_say_so() {
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    let program = vm.compile_program("hold").expect("gcc");
    vm.halt().expect("halts");
    check_one_line_error(&vm.pvm(&["conf"]).expect("ends"), &["no virtual machine"]);
    let mut command = vm.command(bed.host(1), program);
    command.args(["ask", "t40001"]);
    let done = run(command, TIMEOUT).expect("ends");
    // The second line is PVM's: its library prints it for every call that fails.
    let lines: Vec<&str> = done.err.lines().collect();
    assert!(!done.succeeded() && lines.len() == 2, "{done:?}");
    assert!(
        lines[0].contains("daemon")
            && lines[0].contains("start")
            && lines[1].contains("pvm_mytid()"),
        "{done:?}"
    );
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn root_is_refused_unless_allowed() {
    let bed = testbed(1);
    let prefix = requirements::prefix_in_bed();
    for program in ["pvm", "pvmd"] {
        let mut command = bed.host(1).command(prefix.join("bin").join(program));
        if program == "pvm" {
            command.arg("start");
        }
        check_one_line_error(
            &run(command, TIMEOUT).expect("ends"),
            &["root", "PVM_ALLOW_ROOT"],
        );
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_program_that_is_not_on_the_host_is_named() {
    with_hosts(2, &["h2"], |vm, _| {
        check_one_line_error(
            &vm.pvm(&["spawn", "nosuchprogram"]).expect("ends"),
            &["nosuchprogram"],
        );
        check_one_line_error(
            &vm.pvm(&["spawn", "-h2", "nosuchprogram"]).expect("ends"),
            &["nosuchprogram"],
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_second_resource_manager_is_refused() {
    let bed = testbed(1);
    let prefix = requirements::prefix_in_bed();
    let rm = prefix.join("bin/pvm-rm");
    let settings = Settings {
        rm: Some(rm.display().to_string()),
        ..Settings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    check_one_line_error(
        &run(vm.command(bed.host(1), &rm), TIMEOUT).expect("ends"),
        &["resource manager"],
    );
    vm.halt().expect("halts");
}

/// The same user cannot start a second virtual machine on the same hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_second_virtual_machine_is_refused() {
    with_hosts(2, &["h2"], |vm, prefix| {
        for host in vm.bed().hosts() {
            let done = run(vm.command(host, prefix.join("bin/pvmd")), TIMEOUT).expect("ends");
            check_one_line_error(&done, &["running already"]);
        }
    });
}

/// If CRIU is missing or does not work, the error of a migration says so and names the remedy.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_missing_criu_is_named_with_the_remedy() {
    for script in [None, Some("#!/bin/sh\necho 'criu: broken' >&2\nexit 1\n")] {
        let bed = testbed_with_own_engine(2);
        let engine = bed.engine().expect("its own").to_path_buf();
        std::fs::remove_file(&engine).expect("removed");
        if let Some(script) = script {
            std::fs::write(&engine, script).expect("written");
            std::fs::set_permissions(&engine, std::fs::Permissions::from_mode(0o755))
                .expect("executable");
        }
        let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine runs without CRIU");
        vm.add(&["h2"]).expect("h2 joins");
        vm.compile_program("hold").expect("gcc");
        let tid = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
        check_one_line_error(
            &vm.migrate(&tid, "h1").expect("ends"),
            &["criu", "cargo xtask criu"],
        );
        assert_eq!(vm.host_of(&tid).expect("alive"), "h2");
        vm.halt().expect("halts");
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn impossible_migrations_are_refused_with_reason() {
    with_hosts(2, &["h2"], |vm, _| {
        vm.compile_program("hold").expect("gcc");
        let tid = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
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
        let socket = vm.bed().host(1).machine_path("/tmp/sempa-0/pvm/pvmd.sock");
        let garbage: Vec<Vec<u8>> = vec![
            b"GET / HTTP/1.0\r\n\r\n".to_vec(),
            vec![0xff; 4096],
            [5u32.to_le_bytes().as_slice(), &[9, 1, 2, 3, 4]].concat(),
            vec![0; 5],
        ];
        for bytes in garbage {
            let mut stream = UnixStream::connect(&socket).expect("it listens");
            stream.set_read_timeout(Some(TIMEOUT)).expect("set");
            // The daemon may close the connection before it has read everything, so errors are
            // ignored.
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            assert!(
                vm.pvm(&["conf"]).expect("ends").succeeded(),
                "{}",
                vm.logs()
            );
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn garbage_on_udp_port_has_no_effect() {
    with_hosts(2, &["h2"], |vm, _| {
        let port = udp_port(vm.bed().host(1));
        for bytes in [1, 20, 1200, 60_000] {
            let line = format!("head -c {bytes} /dev/urandom >/dev/udp/h1/{port}");
            let mut command = vm.bed().desk().command("/bin/bash");
            command.args(["-c", &format!("for i in 1 2 3 4 5; do {line}; done")]);
            assert!(run(command, TIMEOUT).expect("ends").succeeded());
        }
        assert!(
            vm.pvm_on(vm.bed().host(2), &["ps", "-a"])
                .expect("ends")
                .succeeded(),
            "{}",
            vm.logs()
        );
    });
}

fn udp_port(host: &Host) -> u16 {
    let init_pid = Process::new(host.init_pid().cast_signed()).expect("it runs");
    let mut sockets = init_pid.udp().expect("readable");
    sockets.extend(init_pid.udp6().unwrap_or_default());
    let socket = sockets.first().expect("the daemon has a UDP port");
    socket.local_address.port()
}

/// A daemon of another virtual machine is refused, with a log line and an event. Both virtual
/// machines continue.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_foreign_daemon_is_refused_and_logged() {
    let bed = testbed(3);
    let ours = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    ours.add(&["h2"]).expect("h2 joins");
    ours.compile_program("hold").expect("gcc");
    let tid = ours.spawn(&["-h2", "hold", "1"]).expect("spawned");
    let shell = misleading_shell(&bed, &format!("10.77.0.1:{}", udp_port(bed.host(1))));
    let env = [("PVM_VMID", "theirs".to_string()), ("PVM_RSH", shell)]
        .map(|(name, value)| (name.to_string(), value));
    let theirs = Vm::start(
        &bed,
        Settings {
            env: env.to_vec(),
            ..Settings::default()
        },
    )
    .expect("a second one");

    check_one_line_error(
        &theirs.pvm(&["add", "h3"]).expect("ends"),
        &["h3", "did not connect", "another program answers"],
    );
    let refused =
        |text: &str| text.starts_with("refused a connection from") && text.contains("10.77.0.3");
    let event = ours
        .wait_for_event(TIMEOUT, "refusal", |entry| refused(&entry.text))
        .expect("an event");
    assert!(
        event.text.contains("another virtual machine") && event.text.lines().count() == 1,
        "{}",
        event.text
    );
    let log =
        std::fs::read_to_string(bed.host(1).machine_path("/tmp/sempa-0/pvm/pvml")).expect("a log");
    assert!(log.contains(&event.text), "{log}");
    theirs
        .wait_for_event(
            TIMEOUT,
            "refusal",
            |entry| matches!(&entry.kind, EventKind::HostRefused { name, .. } if name == "h3"),
        )
        .expect("an event");
    wait_until_no_process(bed.host(3), "pvmd", TIMEOUT)
        .expect("the daemon that found no master has ended");

    for (vm, hosts) in [(&ours, 2), (&theirs, 1)] {
        let conf = vm
            .json(&["conf"])
            .expect("it answers")
            .pop()
            .expect("a value");
        assert_eq!(
            conf["hosts"].as_array().expect("a list").len(),
            hosts,
            "{conf}"
        );
    }
    theirs.spawn(&["hold", "1"]).expect("tasks start in theirs");
    ours.must_migrate(&tid, "h1");
    theirs
        .pvm(&["halt"])
        .expect("ends")
        .expect_success("halt")
        .expect("theirs halts");
    assert_eq!(ours.host_of(&tid).expect("alive"), "h1");
    ours.halt().expect("ours halts");
}

/// Writes a remote shell that passes `address` to each new daemon as the address of its master.
/// Returns the path of the shell.
fn misleading_shell(bed: &Testbed, address: &str) -> String {
    let place = bed.folder().join("misleading-shell");
    let edit = format!(r#"s/"masters":\[.*\],"library"/"masters":["{address}"],"library"/"#);
    let script = format!(
        "#!/bin/sh\nsed '{edit}' | {} \"$@\"\n",
        remote_shell(bed.folder(), "root")
    );
    std::fs::write(&place, script).expect("written");
    std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o755)).expect("executable");
    place.display().to_string()
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn other_users_reach_neither_socket_nor_files() {
    with_hosts(1, &[], |vm, _| {
        let home = vm.bed().folder().join("alice");
        for line in [
            "ls /tmp/sempa-0/pvm",
            "ls /tmp/sempa-0",
            "cat /tmp/sempa-0/pvm/pvml",
        ] {
            let mut command = vm
                .bed()
                .host(1)
                .command_as(Some(("alice", ALICE_UID, &home)), "/bin/sh");
            command.args(["-c", line]);
            let done = run(command, TIMEOUT).expect("ends");
            assert!(
                !done.succeeded() || line == "ls /tmp/sempa-0",
                "{line}: {done:?}"
            );
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn halt_leaves_no_process_and_no_file_on_any_host() {
    let bed = testbed(3);
    let rm = "pvm-rm --policy load".to_string();
    let before: Vec<usize> = bed
        .hosts()
        .iter()
        .map(|host| host.processes().len())
        .collect();
    let vm = Vm::start(
        &bed,
        Settings {
            rm: Some(rm),
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    let stays = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
    let moves = vm.spawn(&["-h3", "hold", "1"]).expect("spawned");
    vm.must_migrate(&moves, "h1");
    assert_eq!(vm.host_of(&stays).expect("alive"), "h2");
    vm.halt().expect("halts");
    for (host, before) in bed.hosts().iter().zip(before) {
        wait_until_no_process(host, "hold", TIMEOUT).expect("no task");
        wait_for(TIMEOUT, || {
            let now = host.processes();
            if now.len() <= before {
                Ok(())
            } else {
                Err(format!("{}: {now:?}", host.name()))
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
    let again = Vm::start(&bed, Settings::default()).expect("the next virtual machine starts");
    again.halt().expect("halts");
}
