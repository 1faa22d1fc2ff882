//! Long operations of the console: a silent host delays no other host, progress appears on
//! standard error, and an interrupt ends the wait. The state of the hosts is shown.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_tests::requirements::require_testbed;
use sempa_tests::ssh::remote_shell_command;
use sempa_tests::vm::VmSettings;
use sempa_tests::{Testbed, Vm, wait_for};
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Writes a remote shell that never answers for h3, and works for all other hosts. Returns its
/// path in the hosts.
fn write_shell_that_hangs_for_h3(bed: &Testbed) -> String {
    let remote_shell = remote_shell_command(bed.folder(), "root");
    let script = format!(
        "#!/bin/sh\ncase \" $* \" in\n*' h3 '*) exec tail -f /dev/null ;;\n*) exec {remote_shell} \"$@\" ;;\nesac\n"
    );
    let path = bed.folder().join("hanging-shell");
    std::fs::write(&path, script).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("executable");
    path.display().to_string()
}

/// Returns the PID of the console that the process `starter` has started in a host.
fn find_console_below(starter: u32) -> i32 {
    let processes = procfs::process::all_processes().expect("readable");
    let stats = processes
        .flatten()
        .filter_map(|process| process.stat().ok());
    let processes: BTreeMap<i32, (String, i32)> = stats
        .map(|stat| (stat.pid, (stat.comm, stat.ppid)))
        .collect();
    let is_below = |pid: i32| {
        std::iter::successors(Some(pid), |pid| {
            processes.get(pid).map(|(_, parent)| *parent)
        })
        .any(|ancestor| ancestor == starter.cast_signed())
    };
    let console = processes
        .iter()
        .find(|(pid, (name, _))| name == "pvm" && is_below(**pid));
    *console.expect("the console runs").0
}

/// The other host joins although h3 is silent. The console says what it waits for. An interrupt
/// ends the console, and the host that has joined stays.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn silent_host_delays_no_other_host() {
    let bed = require_testbed(3);
    let env = vec![("PVM_RSH".to_string(), write_shell_that_hangs_for_h3(&bed))];
    let settings = VmSettings {
        env,
        ..VmSettings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    let mut add = vm.start_pvm(&["add", "h2", "h3"]).expect("it starts");
    wait_for(TIMEOUT, || {
        let hosts = vm.run_pvm(&["conf"]).map_err(|error| error.to_string())?;
        match hosts.stdout.contains(" h2 ") {
            true => Ok(()),
            false => Err(format!("h2 has not joined: {}", hosts.stdout)),
        }
    })
    .expect("h2 joins");
    assert_eq!(add.poll_status().expect("its state"), None, "h3 is missing");
    wait_for(TIMEOUT, || {
        let progress = add.stderr_so_far().map_err(|error| error.to_string())?;
        match progress.contains("add: h2 has joined") || progress.contains("add: waiting for h3") {
            true => Ok(()),
            false => Err(format!("no progress: {progress}")),
        }
    })
    .expect("progress");
    let console = find_console_below(add.process_id());
    kill(Pid::from_raw(console), Signal::SIGINT).expect("it runs");
    let result = add.wait_or_kill(TIMEOUT).expect("it ends");
    assert_eq!(result.status.code(), Some(1), "{result:?}");
    assert!(
        result
            .stderr
            .contains("add: interrupted; hosts that have joined stay"),
        "{result:?}"
    );
    let hosts = vm.pvm_json(&["conf"]).expect("hosts");
    assert_eq!(hosts[0]["hosts"].as_array().map(Vec::len), Some(2));
    vm.halt_and_wait().expect("halts");
}

/// `hosts` shows what each host is doing, as text and as JSON.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn hosts_have_their_state() {
    let bed = require_testbed(2);
    let settings = VmSettings {
        rm_command: Some("pvm-rm --policy load".into()),
        ..VmSettings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("h2 joins");
    vm.compile_program("hold").expect("gcc");
    vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
    wait_for(TIMEOUT, || {
        let drain = vm.run_pvm(&["drain", "h1"]);
        let drain = drain.map_err(|error| error.to_string())?;
        match drain.succeeded() {
            true => Ok(()),
            false => Err(drain.stderr),
        }
    })
    .expect("h1 is drained");
    let value = vm.pvm_json(&["hosts"]).expect("hosts").remove(0);
    let hosts = value["hosts"].as_array().expect("a list");
    let states: Vec<_> = hosts
        .iter()
        .map(|host| (&host["name"], &host["drained"], &host["report"]["tasks"]))
        .collect();
    assert_eq!(
        serde_json::to_value(states).expect("values"),
        serde_json::json!([["h1", true, 0], ["h2", false, 1]])
    );
    for host in hosts {
        let report = &host["report"];
        assert!(
            report["processors"].as_u64() > Some(0)
                && report["memory_available_bytes"].as_u64() > Some(0)
                && report["lease_us"].as_u64() > Some(0)
                && report["guests_welcome"] == true
                && report["version"] == env!("CARGO_PKG_VERSION"),
            "{host}"
        );
    }
    let text = vm.run_pvm(&["hosts"]).expect("hosts").stdout;
    assert!(
        text.lines().count() == 3
            && text.starts_with("HOST ")
            && text.contains("guests are welcome"),
        "{text}"
    );
    vm.halt_and_wait().expect("halts");
}
