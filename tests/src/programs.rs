//! The C programs of `tests/programs`, compiled against the installed header and library.

use crate::run::must;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Time for one compilation on a loaded machine.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(120);

/// Compiles `tests/programs/NAME.c` into `folder` with `prefix/include` and `prefix/lib`. Returns
/// the program's path.
///
/// # Errors
/// gcc is missing or refuses the program; the error has its output.
pub fn compile(name: &str, prefix: &Path, folder: &Path) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("programs")
        .join(name)
        .with_extension("c");
    let program = folder.join(name);
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(&source);
    gcc.arg("-I")
        .arg(prefix.join("include"))
        .arg("-L")
        .arg(prefix.join("lib"));
    gcc.args(["-Wl,--as-needed", "-lgpvm3", "-lpvm3"]);
    must(gcc, COMPILE_TIMEOUT).with_context(|| format!("compiling {}", source.display()))?;
    Ok(program)
}
