//! Programs in Fortran that gfortran builds with the installed header and libraries.

use sempa_tests::Vm;
use sempa_tests::requirements::{require_program, require_testbed};
use sempa_tests::run::{run_successfully, run_to_end};
use sempa_tests::vm::VmSettings;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);

fn with_one_host(test: impl FnOnce(&Vm)) {
    require_program("gfortran", "gfortran");
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    test(&vm);
    vm.halt_and_wait().expect("halts");
}

/// Compiles a source file into the folder that `spawn` searches. `options` are options of gfortran,
/// `name` is the name of the program. Returns the path of the program.
fn compile_fortran(vm: &Vm, source: &Path, options: &[&str], name: &str) -> PathBuf {
    let prefix = vm.testbed().prefix().expect("installed");
    let program = vm.user_home().join("pvm3/bin/LINUX64").join(name);
    let mut gfortran = Command::new("gfortran");
    gfortran
        .args(options)
        .arg("-o")
        .arg(&program)
        .arg(source)
        .arg("-I")
        .arg(prefix.join("include"));
    gfortran
        .arg("-L")
        .arg(prefix.join("lib"))
        .args(["-lfpvm3", "-lgpvm3", "-lpvm3"]);
    run_successfully(gfortran, TIMEOUT).expect("gfortran takes it");
    program
}

#[test]
#[ignore = "system tier: needs root, hosts and gfortran"]
fn all_argument_types_are_passed_and_returned() {
    with_one_host(|vm| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/calls.f");
        // The header must be valid in the fixed and in the free source form of Fortran.
        for (form, name) in [
            ("-ffixed-form", "calls-fixed"),
            ("-ffree-form", "calls-free"),
        ] {
            let options = [form, "-ffixed-line-length-132", "-fallow-argument-mismatch"];
            let program = compile_fortran(vm, &source, &options, name);
            let output = run_to_end(vm.user_command(vm.testbed().host(1), program), TIMEOUT)
                .expect("it ends");
            assert!(
                output.succeeded() && output.stdout.contains("all calls are right"),
                "{form}: {output:?}\n{}",
                vm.events_and_logs()
            );
        }
    });
}
