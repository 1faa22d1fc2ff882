//! Fortran programs, built with gfortran against the installed header and libraries.

use sempa_tests::Vm;
use sempa_tests::needs::{find_in_path, testbed};
use sempa_tests::run::{Running, must, run};
use sempa_tests::vm::Settings;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(120);

/// Where Debian has the sources of PVM's examples.
const SOURCES: &str = "/usr/share/doc/pvm-examples";

fn on_one_host(test: impl FnOnce(&Vm)) {
    if find_in_path("gfortran").is_none() {
        eprintln!("skipped: gfortran is missing: install gfortran");
        return;
    }
    let Some((bed, _)) = testbed(1) else { return };
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    test(&vm);
    vm.halt().expect("halts");
}

/// Compiles a source file to where spawn looks, under this name.
fn build(vm: &Vm, source: &Path, words: &[&str], name: &str) -> PathBuf {
    let prefix = vm.bed().prefix().expect("installed");
    let program = vm.home().join("pvm3/bin/LINUX64").join(name);
    let mut gfortran = Command::new("gfortran");
    gfortran.args(words).arg("-o").arg(&program).arg(source).arg("-I").arg(prefix.join("include"));
    gfortran.arg("-L").arg(prefix.join("lib")).args(["-lfpvm3", "-lgpvm3", "-lpvm3"]);
    must(gfortran, LONG).expect("gfortran takes it");
    program
}

#[test]
fn every_kind_of_argument_goes_both_ways() {
    on_one_host(|vm| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/calls.f");
        // The header has to be good in both source forms.
        for (form, name) in [("-ffixed-form", "calls-fixed"), ("-ffree-form", "calls-free")] {
            let words = [form, "-ffixed-line-length-132", "-fallow-argument-mismatch"];
            let program = build(vm, &source, &words, name);
            let done = run(vm.command(vm.bed().host(1), program), LONG).expect("it ends");
            assert!(done.good() && done.out.contains("all calls are right"), "{form}: {done:?}\n{}", vm.logs());
        }
    });
}

/// Debian's sources of the examples in a folder, beside the header where they look for it.
fn sources(vm: &Vm) -> Option<PathBuf> {
    let folder = vm.bed().folder().join("fortran");
    fs::create_dir_all(folder.join("include")).expect("a folder");
    for archive in ["examples.tar.gz", "gexamples.tar.gz"] {
        let archive = Path::new(SOURCES).join(archive);
        if !archive.exists() {
            eprintln!("skipped: {} is missing: install pvm-examples", archive.display());
            return None;
        }
        let mut tar = Command::new("tar");
        tar.arg("-xzf").arg(archive).arg("-C").arg(&folder);
        must(tar, LONG).expect("unpacked");
    }
    let header = vm.bed().prefix().expect("installed").join("include/fpvm3.h");
    fs::copy(header, folder.join("include/fpvm3.h")).expect("copied");
    Some(folder)
}

#[test]
fn the_sources_of_pvms_fortran_examples_build_and_run_right() {
    on_one_host(|vm| {
        let Some(folder) = sources(vm) else { return };
        let programs = [
            ("examples/gexample.f", "fgexample", "", "The 1-Norm is         5050"),
            ("gexamples/frsg.f", "frsg", "8\n4\n", "Test OK: Sum of Squares of first"),
            ("examples/slave1.f", "fslave1", "", ""),
            ("examples/master1.f", "fmaster1", "3\n", "I got"),
        ];
        for (source, name, input, sign) in programs {
            let source = folder.join(source);
            // The files look for the header beside their folder.
            let words = [
                "-std=legacy",
                "-w",
                "-fallow-argument-mismatch",
                "-I",
                source.parent().and_then(Path::to_str).expect("text"),
            ];
            let program = build(vm, &source, &words, name);
            if sign.is_empty() {
                continue;
            }
            let mut task = Running::start(vm.command(vm.bed().host(1), program), Stdio::piped()).expect("it starts");
            // One that reads nothing may have ended before.
            let _ = task.take_stdin().expect("piped").write_all(input.as_bytes());
            let done = task.finish(LONG).unwrap_or_else(|error| panic!("{name}: {error:#}\n{}", vm.logs()));
            assert!(done.out.contains(sign), "{name}: {done:?}\n{}", vm.logs());
        }
    });
}
