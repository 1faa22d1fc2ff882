//! Tests migrations of programs in languages other than C.

use super::TASK_USER;
use super::fixture::{MigrationFixture, source_path};
use std::path::PathBuf;
use std::process::Command;

/// Returns the path of the interpreter `name`. If `name` is a wrapper script, returns the path of
/// the program that it executes.
///
/// # Panics
/// The interpreter does not exist on this machine.
fn interpreter_path(name: &str, arguments: &[&str]) -> PathBuf {
    let output = Command::new(name)
        .args(arguments)
        .output()
        .ok()
        .filter(|output| output.status.success())
        .unwrap_or_else(|| panic!("cannot run here: {name} is missing"));
    String::from_utf8(output.stdout)
        .expect("text")
        .trim()
        .into()
}

fn assert_script_survives(interpreter_path: PathBuf, script_name: &str, row: &str) {
    let mut fixture = MigrationFixture::new();
    let script_name = source_path(script_name);
    fixture.start_and_wait_until_ready(
        &interpreter_path,
        &[script_name.to_str().expect("text")],
        row,
        "",
    );
    fixture.migrate_there_and_back();
    assert_eq!(fixture.assert_ends_successfully(), "ready\nright\n");
}

fn python_path() -> PathBuf {
    // The first one in the search path of root may be in root's home directory.
    let name = match TASK_USER {
        Some(_) => "/usr/bin/python3",
        None => "python3",
    };
    interpreter_path(name, &["-c", "import sys; print(sys.executable)"])
}

#[test]
#[ignore = "system tier: needs CRIU and python3"]
fn python_goes_on_with_its_threads_generators_and_files() {
    assert_script_survives(python_path(), "kinds.py", "threads");
}

#[test]
#[ignore = "system tier: needs CRIU and python3"]
fn a_pool_of_python_processes_goes_on_with_its_work() {
    assert_script_survives(python_path(), "kinds.py", "pool");
}

#[test]
#[ignore = "system tier: needs CRIU and python3"]
fn an_asyncio_loop_goes_on_with_its_child() {
    assert_script_survives(python_path(), "kinds.py", "loop");
}

#[test]
#[ignore = "system tier: needs CRIU and perl"]
fn perl_goes_on_with_its_child_files_and_handlers() {
    assert_script_survives(
        interpreter_path("perl", &["-e", "print $^X"]),
        "kinds.pl",
        "all",
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gfortran"]
fn fortran_with_openmp_at_full_load_goes_on_computing() {
    interpreter_path("gfortran", &["--version"]);
    let mut fixture = MigrationFixture::new();
    let program = fixture.compile("gfortran", &["-fopenmp"], "openmp.f90");
    fixture.start_and_wait_until_ready(&program, &[], "load", "");
    fixture.migrate_there_and_back();
    assert_eq!(fixture.assert_ends_successfully(), "ready\nright\n");
}
