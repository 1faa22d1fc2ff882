//! The prefix of an installation is `PVM_ROOT` for make files, scripts and programs of PVM: PVM's
//! own examples and programs with make files in other styles build with it, and run on two hosts.
//! The programs are linked with archives, so they run without `LD_LIBRARY_PATH`.

use sempa_tests::CommandResult;
use sempa_tests::Vm;
use sempa_tests::pvm_examples;
use sempa_tests::requirements::{
    installed_prefix, panic_if_unmet, require_program, require_testbed,
};
use sempa_tests::run::{run_successfully, run_to_end};
use sempa_tests::vm::VmSettings;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Time limit for one build or one program on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(240);
const ARCH: &str = "LINUX64";

/// Programs that `aimk all` makes of PVM's examples, without the parts of programs.
const EXAMPLES: [&str; 22] = [
    "hello",
    "hello_other",
    "gexample",
    "master1",
    "slave1",
    "spmd",
    "timing",
    "timing_slave",
    "gmbi",
    "dbwtest",
    "ibwtest",
    "pbwtest",
    "rbwtest",
    "fgexample",
    "fmaster1",
    "fslave1",
    "fspmd",
    "hitc",
    "hitc_slave",
    "inherita",
    "task0",
    "mhf_server",
];
/// Programs that `aimk` makes of PVM's examples with groups.
const GROUP_EXAMPLES: [&str; 11] = [
    "joinleave",
    "gexamp",
    "tst",
    "thb",
    "tnb",
    "ge",
    "tjl",
    "tjf",
    "trsg",
    "frsg",
    "gs",
];

fn pvm_root() -> PathBuf {
    installed_prefix().expect("installed programs")
}

/// Returns a command for the machine, in `folder`, with the environment of a user of PVM whose
/// home folder is `home`.
fn build_command(program: impl AsRef<Path>, folder: &Path, home: &Path) -> Command {
    let mut command = Command::new(program.as_ref());
    command
        .current_dir(folder)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("LANG", "C.UTF-8")
        .env("HOME", home)
        .env("PVM_ROOT", pvm_root());
    command
}

/// Copies a file of `tests/pvm-programs`.
fn copy_fixture(name: &str, folder: &Path, new_name: &str) {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("pvm-programs");
    fs::create_dir_all(folder).expect("a folder");
    fs::copy(fixtures.join(name), folder.join(new_name)).expect("a copy");
}

fn with_two_hosts(test: impl FnOnce(&Vm)) {
    for (name, package) in [("make", "make"), ("gcc", "gcc")] {
        require_program(name, package);
    }
    let bed = require_testbed(2);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    test(&vm);
    vm.halt_and_wait().expect("halts");
}

/// Returns the folder in which users of PVM install their programs.
fn programs_folder(vm: &Vm) -> PathBuf {
    vm.user_home().join("pvm3/bin").join(ARCH)
}

/// Runs a program on h1 to its end, without a search path for libraries.
fn run_program(vm: &Vm, program: &Path, arguments: &[&str]) -> CommandResult {
    let mut command = vm.user_command(vm.testbed().host(1), program);
    command.env_remove("LD_LIBRARY_PATH").args(arguments);
    run_to_end(command, TIMEOUT)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", vm.events_and_logs()))
}

/// Asserts that a program succeeds and that its output contains all texts.
#[track_caller]
fn check_output(vm: &Vm, program: &str, arguments: &[&str], texts: &[&str]) {
    let output = run_program(vm, &programs_folder(vm).join(program), arguments);
    let contains_all = texts.iter().all(|text| output.stdout.contains(text));
    assert!(
        output.succeeded() && contains_all,
        "{program}: {output:?}\n{}",
        vm.events_and_logs()
    );
}

/// Runs `aimk` with these arguments for the make files in the folder `name` of PVM's examples.
fn build_examples(vm: &Vm, name: &str, target: &str) {
    let home = vm.user_home();
    let folder = home.join("pvm3").join(name);
    // Debian's archive contains objects of another build.
    fs::remove_dir_all(folder.join(ARCH)).expect("Debian's objects");
    let mut aimk = build_command(pvm_root().join("lib/aimk"), &folder, &home);
    aimk.arg(target)
        .arg(format!("PVMDIR={}", pvm_root().display()))
        .arg(format!("BDIR={}", home.join("pvm3/bin").display()))
        .args(["SDIR=..", "CFLOPTS=-g -w -std=gnu89"]);
    let output = run_successfully(aimk, TIMEOUT).expect("aimk builds the examples");
    let heading = format!("making in {ARCH}/ for {ARCH}\n");
    assert!(output.stdout.starts_with(&heading), "{output:?}");
}

#[test]
#[ignore = "system tier: needs root, hosts, gfortran and PVM's examples"]
fn aimk_builds_examples_of_pvm() {
    panic_if_unmet(pvm_examples::unmet_requirement());
    with_two_hosts(|vm| {
        let user_root = vm.user_home().join("pvm3");
        pvm_examples::extract_sources(&pvm_root(), &user_root).expect("the sources");
        build_examples(vm, "examples", "all");
        build_examples(vm, "gexamples", "all");
        for name in EXAMPLES.iter().chain(&GROUP_EXAMPLES) {
            let program = programs_folder(vm).join(name);
            assert!(program.exists(), "{name} is not built");
        }
        check_output(vm, "hello", &[], &["hello, world from h"]);
        check_output(vm, "master1", &[], &["SUCCESSFUL", "I got "]);
        check_output(vm, "fmaster1", &[], &["I got "]);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and imake"]
fn imake_builds_program_with_groups() {
    require_program("xmkmf", "xutils-dev");
    with_two_hosts(|vm| {
        let home = vm.user_home();
        let folder = home.join("ring");
        copy_fixture("Imakefile", &folder, "Imakefile");
        copy_fixture("ring.c", &folder, "ring.c");
        run_successfully(build_command("xmkmf", &folder, &home), TIMEOUT).expect("a make file");
        let arch_command = build_command(pvm_root().join("lib/pvmgetarch"), &folder, &home);
        let arch = run_successfully(arch_command, TIMEOUT).expect("an architecture");
        let mut make = build_command("make", &folder, &home);
        make.env("PVM_ARCH", arch.stdout.trim()).arg("pvm.install");
        run_successfully(make, TIMEOUT).expect("make builds the program");
        check_output(vm, "ring", &["5"], &["5 members: 10\n"]);
    });
}

/// Removes a program from the folder for all users.
struct InstalledProgram(PathBuf);

impl Drop for InstalledProgram {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// `aimk` finds the installation also by its own path. Programs in `$PVM_ROOT/bin/$PVM_ARCH` are
/// found on all hosts.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn aimk_installs_program_for_all_users() {
    with_two_hosts(|vm| {
        let home = vm.user_home();
        let folder = home.join("sum");
        copy_fixture("Makefile.aimk", &folder, "Makefile.aimk");
        copy_fixture("sum.c", &folder, "sum.c");
        let installed = InstalledProgram(pvm_root().join("bin").join(ARCH).join("sum"));
        let mut aimk = build_command(pvm_root().join("bin/aimk"), &folder, &home);
        aimk.env_remove("PVM_ROOT").arg("install");
        run_successfully(aimk, TIMEOUT).expect("aimk builds the program");
        assert!(folder.join(ARCH).join("sum").exists());
        let output = run_program(vm, &installed.0, &["4", "1000"]);
        assert_eq!(output.stdout, "4 workers: 500500\n", "{output:?}");
        let mut aimk = build_command(pvm_root().join("lib/aimk"), &folder, &home);
        aimk.args(["-here", "-f", "nosuch"]);
        let output = run_to_end(aimk, TIMEOUT).expect("aimk ends");
        assert!(
            output.stdout.starts_with("making in . for LINUX64\n"),
            "{output:?}"
        );
        assert!(!output.succeeded(), "make's status is aimk's: {output:?}");
    });
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn make_file_includes_definitions() {
    with_two_hosts(|vm| {
        let home = vm.user_home();
        let folder = home.join("sum");
        copy_fixture("Makefile.include", &folder, "Makefile");
        copy_fixture("sum.c", &folder, "sum.c");
        run_successfully(build_command("make", &folder, &home), TIMEOUT).expect("make builds it");
        check_output(vm, "sum", &["3", "10"], &["3 workers: 55\n"]);
    });
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn configure_script_finds_installation() {
    with_two_hosts(|vm| {
        let home = vm.user_home();
        let folder = home.join("sum");
        copy_fixture("configure", &folder, "configure");
        copy_fixture("sum.c", &folder, "sum.c");
        let configure = build_command("./configure", &folder, &home);
        let output = run_successfully(configure, TIMEOUT).expect("PVM is found");
        assert!(!output.stdout.contains("no\n"), "{output:?}");
        run_successfully(build_command("make", &folder, &home), TIMEOUT).expect("make builds it");
        check_output(vm, "sum", &["2", "100"], &["2 workers: 5050\n"]);
    });
}

/// Returns the names that `nm` lists for a library, in alphabetical order.
fn defined_names(library: &Path, option: &str) -> Vec<String> {
    let mut nm = Command::new("nm");
    nm.args([option, "--defined-only", "--format=posix"])
        .arg(library);
    let output = run_successfully(nm, TIMEOUT).expect("nm lists names");
    let names = output.stdout.lines().filter_map(|line| {
        let (name, _) = line.split_once(' ')?;
        Some(name.split('@').next()?.to_string())
    });
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// An archive has no names but those of PVM's interface. Otherwise, two archives of one program
/// could define a name twice.
#[test]
#[ignore = "system tier: needs installed programs"]
fn archives_define_only_names_of_interface() {
    require_program("nm", "binutils");
    let folder = pvm_root().join("lib");
    for name in ["libpvm3", "libgpvm3"] {
        let exported_names = defined_names(&folder.join(format!("{name}.so")), "--dynamic");
        let archive = folder.join(ARCH).join(format!("{name}.a"));
        assert!(!exported_names.is_empty());
        assert_eq!(defined_names(&archive, "--extern-only"), exported_names);
    }
}
