//! A host outside the virtual machine begins handshakes with the master and ends none.

use procfs::process::Process;
use sempa_tests::faults::daemon_pid;
use sempa_tests::requirements::require_testbed;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Handshakes per second. Each is unfinished for ten seconds, so without limits thousands would be.
const FLOOD_RATE: &str = "1500";
/// The flood lasts six times as long as an unfinished handshake is kept.
const FLOOD_SECONDS: &str = "60";
/// Number of KiB by which the flood may raise the daemon's memory. Without limits, 15,000
/// unfinished handshakes would need a GiB.
const GROWTH_MAX_KIB: u64 = 64 << 10;
/// The limits of docs/LIMITS.md: unfinished handshakes with peers whose address is not validated,
/// with one network, and in total.
const UNVALIDATED_MAX: usize = 32;
const NETWORK_MAX: usize = 16;
const TOTAL_MAX: usize = 256;

/// Returns the UDP port of the daemon of the master's host.
fn master_port(vm: &Vm) -> String {
    let host = vm.testbed().host(1);
    let pid = daemon_pid(host).expect("the daemon runs");
    // The sockets of all processes in the daemon's network namespace.
    let output = host
        .run_shell("ss -Hulnp", TIMEOUT)
        .or_panic_with_logs(vm)
        .stdout;
    let line = output
        .lines()
        .find(|line| line.contains("\"pvmd\""))
        .unwrap_or_else(|| panic!("no UDP port of pvmd ({pid}):\n{output}"));
    let address = line.split_whitespace().nth(3).expect("a local address");
    let (_, port) = address.rsplit_once(':').expect("a port");
    port.to_string()
}

/// Returns the memory of the master's daemon in KiB: now, and at most so far.
fn daemon_memory(vm: &Vm) -> (u64, u64) {
    let pid = daemon_pid(vm.testbed().host(1)).expect("the daemon runs");
    let status = Process::new(pid.as_raw()).and_then(|process| process.status());
    let status = status.expect("it has a status");
    (
        status.vmrss.expect("a running process"),
        status.vmhwm.expect("a running process"),
    )
}

/// Returns the lines of the master's log about peers that must wait or validate their address, as
/// the numbers of unfinished handshakes that they name: in total, and of one kind.
fn flood_lines(vm: &Vm) -> Vec<(usize, usize, String)> {
    let log = vm.testbed().host(1).machine_path("/tmp/sempa-0/pvm/pvml");
    let log = std::fs::read_to_string(log).unwrap_or_default();
    let parse_line = |line: &str| {
        let (before, after) = line.split_once(" handshakes are unfinished, ")?;
        let total = before.rsplit(' ').next()?.parse().ok()?;
        let count = after.split(' ').next()?.parse().ok()?;
        Some((total, count, line.to_string()))
    };
    log.lines().filter_map(parse_line).collect()
}

/// While an outsider floods the master with handshakes, few are unfinished at once, the daemon
/// needs little more memory, commands are answered, and another host joins.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn hosts_join_during_a_flood_of_handshakes() {
    let bed = require_testbed(4);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("h2 joins");
    vm.compile_program("hold").expect("gcc");
    let port = master_port(&vm);
    let (memory_before, _) = daemon_memory(&vm);
    let outsider = bed.host(4);
    let mut command = outsider.root_command(env!("CARGO_BIN_EXE_flood-handshakes"));
    command.args([&format!("h1:{port}"), FLOOD_RATE, FLOOD_SECONDS]);
    let mut flood = outsider.start_command(command).expect("it starts");
    let wait_result = wait_for(TIMEOUT, || {
        let lines = flood_lines(&vm);
        let must_validate = lines
            .iter()
            .any(|(_, _, line)| line.contains("must validate"));
        let must_wait = lines.iter().any(|(_, _, line)| line.contains("must wait"));
        if must_validate && must_wait {
            Ok(())
        } else {
            Err(format!("{lines:?}"))
        }
    });
    wait_result.or_panic_with_logs(&vm);

    vm.add_hosts(&["h3"]).or_panic_with_logs(&vm);
    assert_eq!(vm.host_names().or_panic_with_logs(&vm), ["h1", "h2", "h3"]);
    vm.spawn_connected(&["-h3", "hold", "1"])
        .or_panic_with_logs(&vm);

    assert!(
        flood.poll_status().expect("it can be asked").is_none(),
        "the flood has ended early"
    );
    while flood.poll_status().expect("it can be asked").is_none() {
        assert_eq!(vm.host_names().or_panic_with_logs(&vm), ["h1", "h2", "h3"]);
    }
    let (_, memory_peak) = daemon_memory(&vm);
    assert!(
        memory_peak < memory_before + GROWTH_MAX_KIB,
        "from {memory_before} to {memory_peak} KiB\n{}",
        vm.events_and_logs()
    );
    for (total, count, line) in flood_lines(&vm) {
        assert!(total <= TOTAL_MAX && count <= UNVALIDATED_MAX, "{line}");
        assert!(
            !line.contains("of its network") || count <= NETWORK_MAX,
            "{line}"
        );
    }
    drop(flood);
    vm.halt_and_wait().expect("halts");
}
