//! Programs in other languages.

use super::scene::{Scene, program};
use std::path::PathBuf;
use std::process::Command;

/// The real program behind a name, which may be that of a script that looks for it.
fn interpreter(name: &str, words: &[&str]) -> Option<PathBuf> {
    let done = Command::new(name)
        .args(words)
        .output()
        .ok()
        .filter(|done| done.status.success());
    if done.is_none() {
        eprintln!("skipped: {name} is missing");
    }
    Some(String::from_utf8(done?.stdout).expect("text").trim().into())
}

fn script_survives(interpreter: Option<PathBuf>, script: &str, row: &str) {
    let (Some(interpreter), Some(mut scene)) = (interpreter, Scene::begin()) else {
        return;
    };
    let script = program(script);
    assert!(scene.start(&interpreter, &[script.to_str().expect("text")], row, ""));
    scene.moves_there_and_back();
    assert_eq!(scene.ends_right(), "ready\nright\n");
}

fn python() -> Option<PathBuf> {
    interpreter("python3", &["-c", "import sys; print(sys.executable)"])
}

#[test]
fn python_goes_on_with_its_threads_generators_and_files() {
    script_survives(python(), "kinds.py", "threads");
}

#[test]
fn a_pool_of_python_processes_goes_on_with_its_work() {
    script_survives(python(), "kinds.py", "pool");
}

#[test]
fn an_asyncio_loop_goes_on_with_its_child() {
    script_survives(python(), "kinds.py", "loop");
}

#[test]
fn perl_goes_on_with_its_child_files_and_handlers() {
    script_survives(interpreter("perl", &["-e", "print $^X"]), "kinds.pl", "all");
}

#[test]
fn fortran_with_openmp_at_full_load_goes_on_computing() {
    if interpreter("gfortran", &["--version"]).is_none() {
        return;
    }
    let Some(mut scene) = Scene::begin() else {
        return;
    };
    let program = scene.compile("gfortran", &["-fopenmp"], "openmp.f90");
    assert!(scene.start(&program, &[], "load", ""));
    scene.moves_there_and_back();
    assert_eq!(scene.ends_right(), "ready\nright\n");
}
