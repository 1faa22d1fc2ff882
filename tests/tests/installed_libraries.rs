//! Programs that are compiled with the installed libraries for master-worker programs and for
//! members of a broker session, by the flags of pkg-config or with the archives.

use sempa_tests::requirements::{
    installed_prefix, require_prefix_in_hosts, require_program, require_testbed,
};
use sempa_tests::run::{RunningCommand, run_successfully};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const TIMEOUT: Duration = Duration::from_secs(240);
/// Output of the example in C++ with 10 tasks.
const PI_LINE: &str = "pi is about 3.14080\n";
/// Refers to one function of each library. `pvm_gsize` needs a virtual machine and is not called.
const ALL_LIBRARIES: &str = r#"
#include <pvm3.h>
#include <sempa_work.h>
#include <smbl.h>
#include <stdio.h>
int main(int argc, char **argv) {
  int rank;
  int is_outside = SMBL_Comm_rank(&rank) == SMBL_ERR_NOT_INIT;
  int size = argc > 1 ? pvm_gsize(argv[1]) : 0;
  printf("%d %d %d %s\n", sempa_work_tid() <= 0, is_outside, size, pvm_version());
}
"#;

fn prefix() -> PathBuf {
    installed_prefix().unwrap_or_else(|error| panic!("cannot run here: {error:#}"))
}

fn project_file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Returns the words that pkg-config prints for the installed prefix.
fn package_config(arguments: &[&str]) -> Vec<String> {
    require_program("pkg-config", "pkg-config");
    let mut command = Command::new("pkg-config");
    command
        .args(arguments)
        .env("PKG_CONFIG_PATH", prefix().join("lib/pkgconfig"));
    let result = run_successfully(command, TIMEOUT).expect("pkg-config knows the library");
    result.stdout.split_whitespace().map(String::from).collect()
}

/// Compiles a source in C11 or C++11 into `program`, with these flags.
fn compile(source: &Path, program: &Path, flags: &[String]) {
    let is_c = source.extension().is_some_and(|ending| ending == "c");
    let (compiler, standard) = match is_c {
        true => ("gcc", "-std=gnu11"),
        false => ("g++", "-std=c++11"),
    };
    require_program(compiler, compiler);
    let mut command = Command::new(compiler);
    command
        .args([standard, "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(program)
        .arg(source)
        .args(flags);
    run_successfully(command, TIMEOUT).expect("the program compiles");
}

/// Returns the flags of pkg-config for a library, and the flag by which the program finds the
/// shared library in `library_folder`.
fn flags_of(name: &str, library_folder: &Path) -> Vec<String> {
    let mut flags = package_config(&["--cflags", "--libs", name]);
    flags.push(format!("-Wl,-rpath,{}", library_folder.display()));
    flags
}

fn run_in_process(program: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env("SEMPA_WORK_IN_PROCESS", "1")
        .env_remove("LD_LIBRARY_PATH");
    let result = run_successfully(command, TIMEOUT).expect("the program succeeds");
    result.stdout
}

/// Master-worker programs in C and C++ compile with the flags of pkg-config, and run in one
/// process.
#[test]
#[ignore = "system tier: needs installed programs and pkg-config"]
fn master_worker_programs_compile_with_package_config() {
    let folder = TempDir::new().expect("a folder");
    let libraries = prefix().join("lib");
    for name in ["sempa_work", "sempa_mw", "sempa_broker"] {
        let version = package_config(&["--modversion", name]);
        assert_eq!(version, [env!("CARGO_PKG_VERSION")], "{name}");
    }
    let program = folder.path().join("work_api");
    compile(
        &project_file("tests/programs/work_api.c"),
        &program,
        &flags_of("sempa_work", &libraries),
    );
    assert_eq!(run_in_process(&program, &[]), "ok\n");
    let program = folder.path().join("monte_carlo");
    compile(
        &project_file("examples/cpp/monte_carlo.cpp"),
        &program,
        &flags_of("sempa_mw", &libraries),
    );
    assert_eq!(run_in_process(&program, &["10"]), PI_LINE);
}

/// `MWMap` returns the results of all other tasks if the function fails for some.
#[test]
#[ignore = "system tier: needs installed programs and pkg-config"]
fn map_returns_the_places_of_failed_tasks() {
    let folder = TempDir::new().expect("a folder");
    let program = folder.path().join("map_failures");
    compile(
        &project_file("tests/programs/map_failures.cpp"),
        &program,
        &flags_of("sempa_mw", &prefix().join("lib")),
    );
    let output = run_in_process(&program, &[]);
    assert!(output.ends_with("\nsum 227 failed 3 7\n"), "{output}");
}

/// The archives of all libraries are linked together, and the programs run without the shared
/// libraries.
#[test]
#[ignore = "system tier: needs installed programs and pkg-config"]
fn archives_of_all_libraries_link_together() {
    let folder = TempDir::new().expect("a folder");
    let mut flags = package_config(&["--cflags", "sempa_mw"]);
    let archives = prefix().join("lib/LINUX64");
    flags.push(format!("-L{}", archives.display()));
    let libraries = ["-lsempa_work", "-lsempa_broker", "-lgpvm3", "-lpvm3", "-lm"];
    flags.extend(libraries.map(String::from));
    let source = folder.path().join("all.c");
    fs::write(&source, ALL_LIBRARIES).expect("a file");
    let program = folder.path().join("all");
    compile(&source, &program, &flags);
    assert_eq!(run_in_process(&program, &[]), "1 1 0 3.4.6\n");
    let program = folder.path().join("monte_carlo");
    compile(
        &project_file("examples/cpp/monte_carlo.cpp"),
        &program,
        &flags,
    );
    assert_eq!(run_in_process(&program, &["10"]), PI_LINE);
    let mut list = Command::new("ldd");
    list.arg(&program);
    let needed = run_successfully(list, TIMEOUT).expect("ldd lists libraries");
    assert!(!needed.stdout.contains("sempa"), "{needed:?}");
}

/// A virtual machine of one host, for programs that are compiled with the installed libraries.
struct Programs<'a> {
    vm: Vm<'a>,
}

impl Programs<'_> {
    fn compile(&self, source: &str, name: &str, library: &str) {
        let libraries = require_prefix_in_hosts().join("lib");
        let program = self.vm.user_home().join(name);
        compile(
            &project_file(source),
            &program,
            &flags_of(library, &libraries),
        );
    }

    fn start(&self, program_and_args: &[&str]) -> RunningCommand {
        let program = self.vm.user_home().join(program_and_args[0]);
        let mut command = self.vm.user_command(self.vm.testbed().host(1), program);
        command.args(&program_and_args[1..]);
        RunningCommand::start(command, Stdio::null()).expect("starts")
    }

    fn output(&self, running: RunningCommand) -> String {
        let result = running.wait_or_kill(TIMEOUT).or_panic_with_logs(&self.vm);
        assert!(
            result.succeeded(),
            "{result:?}\n{}",
            self.vm.events_and_logs()
        );
        result.stdout
    }
}

/// A master starts workers of itself, and members of a session find the installed broker, in a
/// virtual machine of the installed programs.
#[test]
#[ignore = "system tier: needs root, hosts and pkg-config"]
fn programs_with_installed_libraries_run_as_tasks() {
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    let programs = Programs { vm };
    programs.compile("examples/cpp/monte_carlo.cpp", "monte_carlo", "sempa_mw");
    let master = programs.start(&["monte_carlo", "10"]);
    assert_eq!(programs.output(master), PI_LINE);
    for name in ["squares_worker", "squares_foreman"] {
        let source = format!("broker/examples/{name}.c");
        programs.compile(&source, name, "sempa_broker");
    }
    let worker = programs.start(&["squares_worker", "installed"]);
    let foreman = programs.start(&["squares_foreman", "installed", "100"]);
    let sum: u64 = (0..100).map(|number| number * number).sum();
    let expected = format!("the sum of 100 squares is {sum}\n");
    assert_eq!(programs.output(foreman), expected);
    let worker = worker
        .wait_or_kill(TIMEOUT)
        .or_panic_with_logs(&programs.vm);
    // The status of a program whose session is over.
    assert_eq!(worker.status.code(), Some(79), "{worker:?}");
    programs.vm.halt_and_wait().expect("halts");
}
