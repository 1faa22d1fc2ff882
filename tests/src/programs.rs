//! The C programs of `tests/programs`, compiled against the installed header and library.

use crate::requirements;
use crate::run::run_ok;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

/// Time for one compilation on a loaded machine.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(120);
/// Installed files below `prefix` on which the programs depend.
const INSTALLED_INPUTS: [&str; 3] = ["include/pvm3.h", "lib/libpvm3.so.3", "lib/libgpvm3.so.3"];

/// Compiles `tests/programs/NAME.c` into `folder` with the header and libraries under `prefix`.
/// Returns the program's path.
pub fn compile(name: &str, prefix: &Path, folder: &Path) -> Result<PathBuf> {
    let program = folder.join(name);
    // A task may run the program. A replacement would delete the file of the running program.
    if program.exists() {
        return Ok(program);
    }
    // A child process makes the copy. If this process did, a parallel test could fork and inherit
    // the open file, and a program that is open for writing cannot be executed.
    let mut copy = Command::new("cp");
    copy.arg(compile_if_outdated(name, prefix)?).arg(&program);
    run_ok(copy, COMPILE_TIMEOUT)?;
    Ok(program)
}

/// Compiles a program into the build folder unless it is up to date there. Returns its path.
fn compile_if_outdated(name: &str, prefix: &Path) -> Result<PathBuf> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
    let source = sources.join(name).with_extension("c");
    let folder = requirements::build_folder()?.join("test-programs");
    fs::create_dir_all(&folder)?;
    let program = folder.join(name);
    let mut inputs = vec![source.clone(), sources.join("steps.h")];
    inputs.extend(INSTALLED_INPUTS.map(|file| prefix.join(file)));
    if is_newer(&program, &inputs) {
        return Ok(program);
    }
    // Tests compile in parallel. Each writes its own file and renames it; the last rename wins.
    let id = std::thread::current().id();
    let fresh = folder.join(format!("{name}-{}-{id:?}", std::process::id()));
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&fresh)
        .arg(&source);
    gcc.arg("-I")
        .arg(prefix.join("include"))
        .arg("-L")
        .arg(prefix.join("lib"));
    gcc.args(["-Wl,--as-needed", "-lgpvm3", "-lpvm3"]);
    run_ok(gcc, COMPILE_TIMEOUT).with_context(|| format!("compiling {}", source.display()))?;
    fs::rename(&fresh, &program)?;
    Ok(program)
}

/// True if `file` exists and is newer than all of `others`.
fn is_newer(file: &Path, others: &[PathBuf]) -> bool {
    let changed = |path: &Path| -> std::io::Result<SystemTime> { path.metadata()?.modified() };
    changed(file).is_ok_and(|at| {
        others
            .iter()
            .all(|other| changed(other).is_ok_and(|before| before < at))
    })
}
