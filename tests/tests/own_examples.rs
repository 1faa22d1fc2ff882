//! Builds and runs the programs of the folder `examples` on two hosts. Those in C and Fortran are
//! built by `make`, those in Rust by the build of the workspace.

use sempa_tests::requirements::{build_folder, require, require_program, testbed};
use sempa_tests::run::{RunningCommand, run, run_ok};
use sempa_tests::vm::Settings;
use sempa_tests::{CommandResult, Vm, wait_for};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const PROGRAM_TIMEOUT: Duration = Duration::from_secs(120);

/// The line that every master prints, whatever the language of its workers.
const PI_LINE: &str = "pi is about 3.141659: 50266542 of 64000000 points";

/// Masters, each with the worker of the same language.
const MASTERS: [(&str, &str); 3] = [
    ("pi_master", "pi_worker"),
    ("fpi_master", "fpi_worker"),
    ("rust-pi-master", "rust-pi-worker"),
];
const RUST_PROGRAMS: [&str; 3] = ["rust-pi-master", "rust-pi-worker", "rust-prefix-sums"];

/// Script that runs a worker on h1, and on h2 a task that never answers.
const SILENT_ON_H2: &str = "#!/bin/sh
case $(uname -n) in
h2) exec tail -f /dev/null ;;
*) exec PROGRAM ;;
esac
";

/// Returns the folder in which `spawn` searches for programs.
fn programs_folder(vm: &Vm) -> PathBuf {
    vm.home().join("pvm3/bin/LINUX64")
}

/// Runs `make` for the programs in C or Fortran, with additional arguments `words`.
fn make(vm: &Vm, words: &[&str], env: Option<(&str, &Path)>) {
    for (name, package) in [("make", "make"), ("gcc", "gcc")] {
        require_program(name, package);
    }
    let mut make = Command::new("make");
    make.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples"))
        .env_remove("PVM_ROOT")
        .envs(env)
        .arg(format!("BIN={}", programs_folder(vm).display()))
        .args(words);
    run_ok(make, PROGRAM_TIMEOUT).expect("make builds the examples");
}

/// Copies the programs in Rust from the build of the workspace to the folder in which `spawn`
/// searches.
fn install_rust_programs(vm: &Vm) {
    let built = build_folder().expect("a folder");
    for name in RUST_PROGRAMS {
        let program = built.join(name);
        let lack = format!("{name} is not built: run cargo build -p sempa-examples");
        require((!program.exists()).then_some(lack));
        fs::copy(program, programs_folder(vm).join(name)).expect("a copy");
    }
}

/// Installs a program `name` in the folder in which `spawn` searches. On h1 it runs `worker`; on h2
/// it never answers.
fn install_silent_worker(vm: &Vm, name: &str, worker: &str) {
    let (place, worker) = (
        programs_folder(vm).join(name),
        programs_folder(vm).join(worker),
    );
    let text = SILENT_ON_H2.replace("PROGRAM", &worker.display().to_string());
    fs::write(&place, text).expect("a file");
    fs::set_permissions(&place, fs::Permissions::from_mode(0o755)).expect("may run");
}

fn command(vm: &Vm, words: &[&str]) -> Command {
    let mut command = vm.command(vm.bed().host(1), programs_folder(vm).join(words[0]));
    command.args(&words[1..]);
    command
}

/// Runs a program on h1 to its end. Returns its result.
fn run_to_end(vm: &Vm, words: &[&str]) -> CommandResult {
    run(command(vm, words), PROGRAM_TIMEOUT)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()))
}

/// Asserts that a program on h1 succeeds and prints `text`.
fn check_output(vm: &Vm, words: &[&str], text: &str) {
    let done = run_to_end(vm, words);
    assert!(
        done.succeeded() && done.out == text,
        "{words:?}: {done:?}\n{}",
        vm.logs()
    );
}

fn on_two_hosts(test: impl FnOnce(&Vm)) {
    let bed = testbed(2);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    fs::create_dir_all(programs_folder(&vm)).expect("a folder");
    test(&vm);
    vm.halt().expect("halts");
}

/// Waits until exactly `count` processes of a host match `is_one`.
fn wait_for_processes(vm: &Vm, host: usize, count: usize, is_one: impl Fn(&str) -> bool) {
    let look = || {
        let processes = vm.bed().host(host).processes();
        match processes.iter().filter(|(_, line)| is_one(line)).count() {
            found if found == count => Ok(()),
            found => Err(format!("{found} of {count}: {processes:?}")),
        }
    };
    wait_for(PROGRAM_TIMEOUT, look).unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
}

/// Starts a master with four workers and waits until all of them run. The two workers on h2 never
/// answer.
fn start_with_silent(vm: &Vm, master: &str, workers: &str) -> RunningCommand {
    let running = RunningCommand::start(command(vm, &[master, "4", workers]), Stdio::null())
        .expect("it starts");
    wait_for_processes(vm, 2, 2, is_silent);
    running
}

fn is_silent(line: &str) -> bool {
    line.contains("tail -f")
}

/// Waits for the end of a master that has lost the two workers on h2, and checks its output.
fn check_end_without_h2(vm: &Vm, master: RunningCommand) {
    let done = master
        .finish(PROGRAM_TIMEOUT)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
    assert!(
        done.succeeded() && done.out == format!("{PI_LINE}, 2 of 4 workers lost\n"),
        "{done:?}\n{}",
        vm.logs()
    );
}

/// The examples are built with `pkg-config`. A task on each host prints a greeting, and a token is
/// passed around a ring of tasks.
#[test]
#[ignore = "system tier: needs root, hosts and gcc"]
fn hello_and_ring_print_their_results() {
    require_program("pkg-config", "pkg-config");
    on_two_hosts(|vm| {
        let prefix = vm.bed().prefix().expect("installed");
        let files = prefix.join("lib/pkgconfig");
        let words = ["c", "CFLAGS=-O2 -Wall -Wextra -Werror"];
        make(vm, &words, Some(("PKG_CONFIG_PATH", &files)));
        check_output(vm, &["hello"], "hello from h1\nhello from h2\n");
        let said = "the token is 4000 after 1000 rounds of 4 members\n";
        check_output(vm, &["ring"], said);
        let said = "the token is 21 after 3 rounds of 7 members\n";
        check_output(vm, &["ring", "7", "3"], said);
        // A worker that was not spawned by a task reports an error.
        let done = run_to_end(vm, &["hello_worker"]);
        assert!(
            !done.succeeded() && done.err.contains("pvm_parent"),
            "{done:?}"
        );
    });
}

/// Every master in C, Fortran and Rust gets the same result from the workers in every language. A
/// master continues if workers are killed or their host is lost, and reports an error if no worker
/// is left.
#[test]
#[ignore = "system tier: needs root, hosts and gfortran"]
fn masters_in_c_fortran_and_rust_agree_on_pi() {
    require_program("gfortran", "gfortran");
    on_two_hosts(|vm| {
        let prefix = vm.bed().prefix().expect("installed");
        let root = format!("PVM_ROOT={}", prefix.display());
        make(vm, &[&root, "FFLAGS=-O2 -Wall -Werror"], None);
        install_rust_programs(vm);
        let said = format!("{PI_LINE}, 0 of 4 workers lost\n");
        for (master, own) in MASTERS {
            check_output(vm, &[master], &said);
            for (_, other) in MASTERS.iter().filter(|(_, worker)| *worker != own) {
                check_output(vm, &[master, "4", other], &said);
            }
            let done = run_to_end(vm, &[master, "4", "no_such_program"]);
            let is_told = done.err.contains(master) || done.err.contains("no_such_program");
            assert!(!done.succeeded() && is_told, "{done:?}");
        }
        install_silent_worker(vm, "silent", "pi_worker");
        for (master, _) in MASTERS {
            let running = start_with_silent(vm, master, "silent");
            vm.bed().host(2).kill_matching(is_silent);
            check_end_without_h2(vm, running);
        }
        let running = start_with_silent(vm, "pi_master", "silent");
        vm.bed().host(2).kill_all();
        check_end_without_h2(vm, running);
    });
}

/// When the master is killed, its workers end.
#[test]
#[ignore = "system tier: needs root, hosts and gfortran"]
fn workers_in_c_fortran_and_rust_end_with_master() {
    require_program("gfortran", "gfortran");
    on_two_hosts(|vm| {
        let prefix = vm.bed().prefix().expect("installed");
        make(vm, &[&format!("PVM_ROOT={}", prefix.display())], None);
        install_rust_programs(vm);
        for (master, worker) in MASTERS {
            let silent = format!("silent-{master}");
            install_silent_worker(vm, &silent, worker);
            let running = start_with_silent(vm, master, &silent);
            let is_worker = |line: &str| line.contains(&format!("/{worker}"));
            wait_for_processes(vm, 1, 2, is_worker);
            // The master still waits for the results of the workers on h2.
            running.end_inside().expect("it is killed");
            wait_for_processes(vm, 1, 0, is_worker);
            vm.bed().host(2).kill_matching(is_silent);
        }
    });
}

/// A group of tasks on both hosts computes sums.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn rust_group_prints_prefix_sums() {
    on_two_hosts(|vm| {
        install_rust_programs(vm);
        check_output(vm, &["rust-prefix-sums"], "1 3 6 10 15 21 28 36\n");
        check_output(vm, &["rust-prefix-sums", "2"], "1 3\n");
        let sums: Vec<String> = (1..=21)
            .map(|n: i64| (n * (n + 1) / 2).to_string())
            .collect();
        let said = sums.join(" ") + "\n";
        check_output(vm, &["rust-prefix-sums", "21"], &said);
    });
}
