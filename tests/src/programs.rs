//! The C programs of `tests/programs`, compiled against the installed header and library.

use crate::requirements;
use crate::run::run_successfully;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

/// Time limit for one compilation on a loaded machine.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(120);
/// Installed files below `prefix` on which the programs depend.
const INSTALLED_INPUTS: [&str; 3] = ["include/pvm3.h", "lib/libpvm3.so.3", "lib/libgpvm3.so.3"];

/// Headers of the programs in `tests/programs`.
const HEADERS: [&str; 2] = ["steps.h", "causal.h"];
/// Options for all programs.
const COMPILER_OPTIONS: [&str; 6] = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o"];

/// Compiles `tests/programs/NAME.c` into `folder` with the header and libraries under `prefix`,
/// unless the program exists in `folder`. Returns the program's path.
pub fn compile_into(name: &str, prefix: &Path, folder: &Path) -> Result<PathBuf> {
    let program = folder.join(name);
    // A task may run the program, so the existing file must not be replaced.
    if program.exists() {
        return Ok(program);
    }
    // A child process makes the copy. If this process made the copy, a parallel test could fork and
    // inherit the open file, and a program that is open for writing cannot be executed.
    let mut copy_command = Command::new("cp");
    copy_command
        .arg(compile_if_outdated(name, prefix)?)
        .arg(&program);
    run_successfully(copy_command, COMPILE_TIMEOUT)?;
    Ok(program)
}

/// Compiles `tests/programs/NAME.c` into `folder` with the header and libraries of Debian's PVM.
pub fn compile_for_pvm(name: &str, folder: &Path) -> Result<()> {
    let source = source_folder().join(name).with_extension("c");
    let mut compiler = Command::new("gcc");
    compiler
        .args(COMPILER_OPTIONS)
        .arg(folder.join(name))
        .arg(&source)
        .args(["-Wl,--as-needed", "-lgpvm3", "-lpvm3"]);
    run_successfully(compiler, COMPILE_TIMEOUT)
        .map(drop)
        .with_context(|| format!("compiling {} for PVM", source.display()))
}

fn source_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs")
}

/// Compiles a program into the build folder unless it is up to date there. Returns its path.
fn compile_if_outdated(name: &str, prefix: &Path) -> Result<PathBuf> {
    let source_folder = source_folder();
    let source = source_folder.join(name).with_extension("c");
    let folder = requirements::build_folder()?.join("test-programs");
    fs::create_dir_all(&folder)?;
    let program = folder.join(name);
    let mut inputs = vec![source.clone()];
    inputs.extend(HEADERS.map(|header| source_folder.join(header)));
    inputs.extend(INSTALLED_INPUTS.map(|file| prefix.join(file)));
    if is_newer(&program, &inputs) {
        return Ok(program);
    }
    // Tests compile in parallel. Each test writes its own file and renames it; the last rename
    // wins.
    let thread_id = std::thread::current().id();
    let new_program = folder.join(format!("{name}-{}-{thread_id:?}", std::process::id()));
    let mut compiler = Command::new("gcc");
    compiler
        .args(COMPILER_OPTIONS)
        .arg(&new_program)
        .arg(&source);
    compiler
        .arg("-I")
        .arg(prefix.join("include"))
        .arg("-L")
        .arg(prefix.join("lib"));
    compiler.args(["-Wl,--as-needed", "-lgpvm3", "-lpvm3"]);
    run_successfully(compiler, COMPILE_TIMEOUT)
        .with_context(|| format!("compiling {}", source.display()))?;
    fs::rename(&new_program, &program)?;
    Ok(program)
}

/// True if `file` exists and is newer than all files in `inputs`.
fn is_newer(file: &Path, inputs: &[PathBuf]) -> bool {
    let modified_at = |path: &Path| -> std::io::Result<SystemTime> { path.metadata()?.modified() };
    modified_at(file).is_ok_and(|file_modified_at| {
        inputs.iter().all(|input| {
            modified_at(input).is_ok_and(|input_modified_at| input_modified_at < file_modified_at)
        })
    })
}
