//! Direct routes that the library sets up on its own, for programs that use the default route.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use procfs::net::TcpState;
use procfs::process::{FDTarget, Process};
use sempa_tests::requirements::require_testbed;
use sempa_tests::run::RunningCommand;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Silence after which a host is lost: longer than the tests stop daemons.
const LONG_LEASE_ENV: (&str, &str) = ("SEMPA_LEASE_MS", "3600000");
/// Number of round trips for which a library that may set up a route has set it up.
const MANY_TURNS: u64 = 2000;

/// A running program `turns` on h1, with its other half on h2.
struct Turns {
    director: RunningCommand,
    count_file: PathBuf,
}

impl Turns {
    /// Starts the program; `options` are arguments of the other half.
    fn start(vm: &Vm<'_>, options: &[&str]) -> Self {
        let program = vm.compile_program("turns").expect("gcc");
        let count_file = vm.user_home().join("turns.count");
        let mut command = vm.user_command(vm.testbed().host(1), program);
        command.arg("h2").arg(&count_file).args(options);
        Self {
            director: RunningCommand::start(command, Stdio::null()).expect("it starts"),
            count_file,
        }
    }

    fn count(&self) -> Option<u64> {
        fs::read_to_string(&self.count_file)
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    /// Waits for this number of further round trips.
    fn wait_for_turns(&self, further_count: u64) -> anyhow::Result<()> {
        let start_count = self.count().unwrap_or(0);
        wait_for(TIMEOUT, || match self.count() {
            Some(count) if count >= start_count + further_count => Ok(()),
            count => Err(format!("{count:?} turns, {start_count} before")),
        })
    }

    fn stop_and_check(self, vm: &Vm<'_>) {
        fs::write(self.count_file.with_extension("count.stop"), "").expect("written");
        let output = self.director.wait_or_kill(TIMEOUT).or_panic_with_logs(vm);
        assert!(
            output.succeeded() && output.stdout.contains("turns in order"),
            "{output:?}"
        );
    }
}

/// Returns the process ids of the processes on host number `i` whose program has this name.
fn pids_of(bed: &Testbed, i: usize, program: &str) -> Vec<i32> {
    let runs_program = |line: &str| {
        let path = line.split(' ').next().unwrap_or_default();
        path.rsplit('/').next() == Some(program)
    };
    bed.host(i)
        .processes()
        .into_iter()
        .filter(|(_, line)| runs_program(line))
        .map(|(pid, _)| pid.cast_signed())
        .collect()
}

/// Returns the number of TCP connections that processes of the program `turns` on host number `i`
/// have established.
fn connection_count(bed: &Testbed, i: usize) -> usize {
    let count_of = |pid: i32| -> Option<usize> {
        let process = Process::new(pid).ok()?;
        let fds = process.fd().ok()?;
        let sockets: Vec<u64> = fds
            .filter_map(|fd| match fd.ok()?.target {
                FDTarget::Socket(inode) => Some(inode),
                _ => None,
            })
            .collect();
        let entries = [process.tcp().ok()?, process.tcp6().ok()?].concat();
        let is_own = |inode: u64, state: &TcpState| {
            *state == TcpState::Established && sockets.contains(&inode)
        };
        let own_entries = entries.iter().filter(|e| is_own(e.inode, &e.state));
        Some(own_entries.count())
    };
    pids_of(bed, i, "turns")
        .into_iter()
        .filter_map(count_of)
        .sum()
}

fn signal_daemons(bed: &Testbed, signal: Signal) {
    for i in 1..=2 {
        let pids = pids_of(bed, i, "pvmd");
        assert!(!pids.is_empty(), "no daemon on h{i}");
        for pid in pids {
            kill(Pid::from_raw(pid), signal).expect("it is there");
        }
    }
}

fn start_vm<'a>(bed: &'a Testbed, env: &[(&str, &str)]) -> Vm<'a> {
    let settings = VmSettings {
        env: VmSettings::owned_env(env),
        ..VmSettings::default()
    };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    vm
}

/// Once the route is set up, messages pass no daemon: they flow while both daemons are stopped.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn default_route_bypasses_daemons() {
    let bed = require_testbed(2);
    let vm = start_vm(&bed, &[LONG_LEASE_ENV]);
    let turns = Turns::start(&vm, &[]);
    wait_for(TIMEOUT, || {
        match [1, 2].map(|i| connection_count(&bed, i)) {
            [1, 1] => Ok(()),
            counts => Err(format!("{counts:?} connections, {:?} turns", turns.count())),
        }
    })
    .or_panic_with_logs(&vm);
    signal_daemons(&bed, Signal::SIGSTOP);
    let result = turns.wait_for_turns(MANY_TURNS);
    signal_daemons(&bed, Signal::SIGCONT);
    result.or_panic_with_logs(&vm);
    turns.stop_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

/// A peer that forbids direct routes refuses, and messages flow through the daemons.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn messages_flow_if_peer_refuses() {
    let bed = require_testbed(2);
    let vm = start_vm(&bed, &[]);
    let turns = Turns::start(&vm, &["dont"]);
    turns.wait_for_turns(MANY_TURNS).or_panic_with_logs(&vm);
    assert_eq!([1, 2].map(|i| connection_count(&bed, i)), [0, 0]);
    turns.stop_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

/// The administrator permits only the direct routes that programs request.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn administrator_forbids_automatic_routes() {
    let bed = require_testbed(2);
    let vm = start_vm(&bed, &[("SEMPA_DIRECT_ROUTES", "requested")]);
    let turns = Turns::start(&vm, &[]);
    turns.wait_for_turns(MANY_TURNS).or_panic_with_logs(&vm);
    assert_eq!([1, 2].map(|i| connection_count(&bed, i)), [0, 0]);
    turns.stop_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}
