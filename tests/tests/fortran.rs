//! Programs in Fortran that are built with gfortran and with the installed header and libraries.

use sempa_tests::Vm;
use sempa_tests::requirements::{require_program, testbed};
use sempa_tests::run::{run, run_ok};
use sempa_tests::vm::Settings;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);

fn on_one_host(test: impl FnOnce(&Vm)) {
    require_program("gfortran", "gfortran");
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    test(&vm);
    vm.halt().expect("halts");
}

/// Compiles a source file into the folder in which `spawn` searches. `name` is the name of the
/// program. Returns its path.
fn compile_fortran(vm: &Vm, source: &Path, words: &[&str], name: &str) -> PathBuf {
    let prefix = vm.bed().prefix().expect("installed");
    let program = vm.home().join("pvm3/bin/LINUX64").join(name);
    let mut gfortran = Command::new("gfortran");
    gfortran
        .args(words)
        .arg("-o")
        .arg(&program)
        .arg(source)
        .arg("-I")
        .arg(prefix.join("include"));
    gfortran
        .arg("-L")
        .arg(prefix.join("lib"))
        .args(["-lfpvm3", "-lgpvm3", "-lpvm3"]);
    run_ok(gfortran, TIMEOUT).expect("gfortran takes it");
    program
}

#[test]
#[ignore = "system tier: needs root, hosts and gfortran"]
fn all_argument_types_are_passed_and_returned() {
    on_one_host(|vm| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/calls.f");
        // The header must be valid in both source forms of Fortran.
        for (form, name) in [
            ("-ffixed-form", "calls-fixed"),
            ("-ffree-form", "calls-free"),
        ] {
            let words = [form, "-ffixed-line-length-132", "-fallow-argument-mismatch"];
            let program = compile_fortran(vm, &source, &words, name);
            let done = run(vm.command(vm.bed().host(1), program), TIMEOUT).expect("it ends");
            assert!(
                done.succeeded() && done.out.contains("all calls are right"),
                "{form}: {done:?}\n{}",
                vm.logs()
            );
        }
    });
}
