//! Builds and runs the programs of the folder `examples` on two hosts. `make` builds the programs
//! in C and Fortran; the build of the workspace builds the programs in Rust.

use sempa_tests::programs::compile_into;
use sempa_tests::requirements::{
    build_folder, installed_prefix, panic_if_unmet, require_program, require_testbed,
};
use sempa_tests::run::{RunningCommand, run_successfully, run_to_end};
use sempa_tests::vm::VmSettings;
use sempa_tests::{CommandResult, Vm, wait_for};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const PROGRAM_TIMEOUT: Duration = Duration::from_secs(120);

/// The start of the line that every master prints, whatever the language of its workers.
const PI_LINE_START: &str = "pi is about 3.141659: 50266542 of 64000000 points";

/// Pairs (master, worker) of programs in C, Fortran and Rust.
const MASTERS_AND_WORKERS: [(&str, &str); 3] = [
    ("pi_master", "pi_worker"),
    ("fpi_master", "fpi_worker"),
    ("rust-pi-master", "rust-pi-worker"),
];
const RUST_PROGRAMS: [&str; 3] = ["rust-pi-master", "rust-pi-worker", "rust-prefix-sums"];

/// Script of a worker that computes on h1 and never answers on h2. `PROGRAM` stands for the path of
/// the real worker.
const SILENT_WORKER_SCRIPT: &str = "#!/bin/sh
case $(uname -n) in
h2) exec tail -f /dev/null ;;
*) exec PROGRAM ;;
esac
";

/// Returns the folder in which `spawn` searches for programs.
fn programs_folder(vm: &Vm) -> PathBuf {
    vm.user_home().join("pvm3/bin/LINUX64")
}

/// Runs `make` for the programs in C or Fortran, with the additional arguments `args` and the
/// environment variable `env`.
fn make_examples(vm: &Vm, args: &[&str], env: Option<(&str, &Path)>) {
    for (name, package) in [("make", "make"), ("gcc", "gcc")] {
        require_program(name, package);
    }
    let mut make = Command::new("make");
    make.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples"))
        .env_remove("PVM_ROOT")
        .envs(env)
        .arg(format!("BIN={}", programs_folder(vm).display()))
        .args(args);
    run_successfully(make, PROGRAM_TIMEOUT).expect("make builds the examples");
}

/// Copies the programs in Rust from the build of the workspace to the folder in which `spawn`
/// searches.
fn install_rust_programs(vm: &Vm) {
    let build_path = build_folder().expect("a folder");
    for name in RUST_PROGRAMS {
        let program = build_path.join(name);
        let missing_program = format!("{name} is not built: run cargo build -p sempa-examples");
        panic_if_unmet((!program.exists()).then_some(missing_program));
        fs::copy(program, programs_folder(vm).join(name)).expect("a copy");
    }
}

/// Installs a program `name` in the folder in which `spawn` searches. On h1 this program runs
/// `worker`; on h2 it never answers.
fn install_silent_worker(vm: &Vm, name: &str, worker: &str) {
    let (script_path, worker) = (
        programs_folder(vm).join(name),
        programs_folder(vm).join(worker),
    );
    let script = SILENT_WORKER_SCRIPT.replace("PROGRAM", &worker.display().to_string());
    fs::write(&script_path, script).expect("a file");
    fs::set_permissions(&script_path, fs::Permissions::from_mode(0o755)).expect("may run");
}

fn program_command(vm: &Vm, program_and_args: &[&str]) -> Command {
    let mut command = vm.user_command(
        vm.testbed().host(1),
        programs_folder(vm).join(program_and_args[0]),
    );
    command.args(&program_and_args[1..]);
    command
}

/// Runs a program on h1 to its end and returns the result. `program_and_args` are the name and the
/// arguments of the program.
fn run_example(vm: &Vm, program_and_args: &[&str]) -> CommandResult {
    run_to_end(program_command(vm, program_and_args), PROGRAM_TIMEOUT)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", vm.events_and_logs()))
}

/// Asserts that a program on h1 succeeds and prints exactly `text`.
fn check_output(vm: &Vm, program_and_args: &[&str], text: &str) {
    let output = run_example(vm, program_and_args);
    assert!(
        output.succeeded() && output.stdout == text,
        "{program_and_args:?}: {output:?}\n{}",
        vm.events_and_logs()
    );
}

fn with_two_hosts(test: impl FnOnce(&Vm)) {
    let bed = require_testbed(2);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    fs::create_dir_all(programs_folder(&vm)).expect("a folder");
    test(&vm);
    vm.halt_and_wait().expect("halts");
}

/// Waits until `is_matching` accepts the command lines of exactly `count` processes of a host.
fn wait_for_processes(
    vm: &Vm,
    host_number: usize,
    count: usize,
    is_matching: impl Fn(&str) -> bool,
) {
    let check = || {
        let processes = vm.testbed().host(host_number).processes();
        match processes
            .iter()
            .filter(|(_, line)| is_matching(line))
            .count()
        {
            matching_count if matching_count == count => Ok(()),
            matching_count => Err(format!("{matching_count} of {count}: {processes:?}")),
        }
    };
    wait_for(PROGRAM_TIMEOUT, check)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", vm.events_and_logs()));
}

/// Starts a master with four workers and waits until the two workers on h2 run. The workers on h2
/// never answer.
fn start_with_silent_workers(vm: &Vm, master: &str, worker_program: &str) -> RunningCommand {
    let running_master = RunningCommand::start(
        program_command(vm, &[master, "4", worker_program]),
        Stdio::null(),
    )
    .expect("it starts");
    wait_for_processes(vm, 2, 2, is_silent_worker);
    running_master
}

fn is_silent_worker(line: &str) -> bool {
    line.contains("tail -f")
}

/// Waits for the end of a master that has lost the two workers on h2, and checks its output.
fn check_end_without_h2(vm: &Vm, master: RunningCommand) {
    let output = master
        .wait_or_kill(PROGRAM_TIMEOUT)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", vm.events_and_logs()));
    assert!(
        output.succeeded() && output.stdout == format!("{PI_LINE_START}, 2 of 4 workers lost\n"),
        "{output:?}\n{}",
        vm.events_and_logs()
    );
}

/// The examples are built with `pkg-config`. A task on each host prints a greeting, and a token is
/// passed around a ring of tasks.
#[test]
#[ignore = "system tier: needs root, hosts and gcc"]
fn hello_and_ring_print_their_results() {
    require_program("pkg-config", "pkg-config");
    with_two_hosts(|vm| {
        let prefix = vm.testbed().prefix().expect("installed");
        let pkgconfig_folder = prefix.join("lib/pkgconfig");
        let args = ["c", "CFLAGS=-O2 -Wall -Wextra -Werror"];
        make_examples(vm, &args, Some(("PKG_CONFIG_PATH", &pkgconfig_folder)));
        check_output(vm, &["hello"], "hello from h1\nhello from h2\n");
        let expected_output = "the token is 4000 after 1000 rounds of 4 members\n";
        check_output(vm, &["ring"], expected_output);
        let expected_output = "the token is 21 after 3 rounds of 7 members\n";
        check_output(vm, &["ring", "7", "3"], expected_output);
        // A worker that was not spawned by a task reports an error.
        let output = run_example(vm, &["hello_worker"]);
        assert!(
            !output.succeeded() && output.stderr.contains("pvm_parent"),
            "{output:?}"
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
    with_two_hosts(|vm| {
        let prefix = vm.testbed().prefix().expect("installed");
        let root_argument = format!("PVM_ROOT={}", prefix.display());
        make_examples(vm, &[&root_argument, "FFLAGS=-O2 -Wall -Werror"], None);
        install_rust_programs(vm);
        let expected_output = format!("{PI_LINE_START}, 0 of 4 workers lost\n");
        for (master, own_worker) in MASTERS_AND_WORKERS {
            check_output(vm, &[master], &expected_output);
            for (_, other_worker) in MASTERS_AND_WORKERS
                .iter()
                .filter(|(_, worker)| *worker != own_worker)
            {
                check_output(vm, &[master, "4", other_worker], &expected_output);
            }
            let output = run_example(vm, &[master, "4", "no_such_program"]);
            let is_reported =
                output.stderr.contains(master) || output.stderr.contains("no_such_program");
            assert!(!output.succeeded() && is_reported, "{output:?}");
        }
        install_silent_worker(vm, "silent", "pi_worker");
        for (master, _) in MASTERS_AND_WORKERS {
            let running_master = start_with_silent_workers(vm, master, "silent");
            vm.testbed()
                .host(2)
                .kill_matching_processes(is_silent_worker);
            check_end_without_h2(vm, running_master);
        }
        let running_master = start_with_silent_workers(vm, "pi_master", "silent");
        vm.testbed().host(2).kill_all_processes();
        check_end_without_h2(vm, running_master);
    });
}

/// When the master is killed, its workers end.
#[test]
#[ignore = "system tier: needs root, hosts and gfortran"]
fn workers_in_c_fortran_and_rust_end_with_master() {
    require_program("gfortran", "gfortran");
    with_two_hosts(|vm| {
        let prefix = vm.testbed().prefix().expect("installed");
        make_examples(vm, &[&format!("PVM_ROOT={}", prefix.display())], None);
        install_rust_programs(vm);
        for (master, worker) in MASTERS_AND_WORKERS {
            let silent_program = format!("silent-{master}");
            install_silent_worker(vm, &silent_program, worker);
            let running_master = start_with_silent_workers(vm, master, &silent_program);
            let is_worker = |line: &str| line.contains(&format!("/{worker}"));
            wait_for_processes(vm, 1, 2, is_worker);
            // The master still waits for the results of the workers on h2.
            running_master
                .kill_children_and_wait()
                .expect("it is killed");
            wait_for_processes(vm, 1, 0, is_worker);
            vm.testbed()
                .host(2)
                .kill_matching_processes(is_silent_worker);
        }
    });
}

/// A group of tasks on both hosts computes prefix sums.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn rust_group_prints_prefix_sums() {
    with_two_hosts(|vm| {
        install_rust_programs(vm);
        check_output(vm, &["rust-prefix-sums"], "1 3 6 10 15 21 28 36\n");
        check_output(vm, &["rust-prefix-sums", "2"], "1 3\n");
        let sums: Vec<String> = (1..=21)
            .map(|n: i64| (n * (n + 1) / 2).to_string())
            .collect();
        let expected_output = sums.join(" ") + "\n";
        check_output(vm, &["rust-prefix-sums", "21"], &expected_output);
    });
}

/// Without a virtual machine, a program in Rust prints the sentence that a program in C prints.
#[test]
#[ignore = "system tier: needs gcc and built programs"]
fn rust_and_c_print_one_sentence_without_virtual_machine() {
    require_program("gcc", "gcc");
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = installed_prefix().expect("installed programs");
    let c_program = compile_into("careless", &prefix, folder.path()).expect("it compiles");
    let rust_program = build_folder().expect("a folder").join("rust-pi-master");
    let stderr_of = |program: &Path| {
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("HOME", folder.path())
            .env("PVM_TMP", folder.path())
            .env("PVM_ALLOW_ROOT", "1")
            .env("LD_LIBRARY_PATH", prefix.join("lib"));
        run_to_end(command, PROGRAM_TIMEOUT)
            .expect("it ends")
            .stderr
    };
    let c_text = stderr_of(&c_program);
    let first_line = c_text.lines().next().unwrap_or_default();
    let (_, sentence) = first_line
        .split_once("] ")
        .expect("a sentence of the library");
    assert!(sentence.starts_with("no daemon answers at "), "{c_text}");
    let rust_text = stderr_of(&rust_program);
    assert!(
        rust_text.starts_with(&format!("Error: {sentence}\n")),
        "C: {c_text}\nRust: {rust_text}"
    );
}
