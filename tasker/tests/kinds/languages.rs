//! Tests migrations of programs in languages other than C.

use super::scene::{Scene, source_path};
use std::path::PathBuf;
use std::process::Command;

/// Returns the path of the real program behind a name, which may be the name of a wrapper script.
///
/// # Panics
/// The program does not exist on this machine.
fn interpreter(name: &str, arguments: &[&str]) -> PathBuf {
    let done = Command::new(name)
        .args(arguments)
        .output()
        .ok()
        .filter(|done| done.status.success())
        .unwrap_or_else(|| panic!("cannot run here: {name} is missing"));
    String::from_utf8(done.stdout).expect("text").trim().into()
}

fn script_survives(interpreter: PathBuf, script: &str, row: &str) {
    let mut scene = Scene::begin();
    let script = source_path(script);
    scene.start(&interpreter, &[script.to_str().expect("text")], row, "");
    scene.migrate_there_and_back();
    assert_eq!(scene.assert_ends_successfully(), "ready\nright\n");
}

fn python() -> PathBuf {
    interpreter("python3", &["-c", "import sys; print(sys.executable)"])
}

#[test]
#[ignore = "system tier: needs CRIU and python3"]
fn python_goes_on_with_its_threads_generators_and_files() {
    script_survives(python(), "kinds.py", "threads");
}

#[test]
#[ignore = "system tier: needs CRIU and python3"]
fn a_pool_of_python_processes_goes_on_with_its_work() {
    script_survives(python(), "kinds.py", "pool");
}

#[test]
#[ignore = "system tier: needs CRIU and python3"]
fn an_asyncio_loop_goes_on_with_its_child() {
    script_survives(python(), "kinds.py", "loop");
}

#[test]
#[ignore = "system tier: needs CRIU and perl"]
fn perl_goes_on_with_its_child_files_and_handlers() {
    script_survives(interpreter("perl", &["-e", "print $^X"]), "kinds.pl", "all");
}

#[test]
#[ignore = "system tier: needs CRIU and gfortran"]
fn fortran_with_openmp_at_full_load_goes_on_computing() {
    interpreter("gfortran", &["--version"]);
    let mut scene = Scene::begin();
    let program = scene.compile("gfortran", &["-fopenmp"], "openmp.f90");
    scene.start(&program, &[], "load", "");
    scene.migrate_there_and_back();
    assert_eq!(scene.assert_ends_successfully(), "ready\nright\n");
}
