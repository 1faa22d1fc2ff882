//! Makes archives that programs in C and Fortran link.
//!
//! Cargo's static libraries contain Rust's standard library, and all their names are global. Two
//! such archives in one program define some names twice, and the linker refuses them: a program
//! with groups links `libgpvm3.a` and `libpvm3.a`. Therefore an installed archive has one object,
//! whose only global names are those that the shared library exports.

use crate::build::target_folder;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Sections with the bitcode of Rust's standard library. They are of no use here, and programs that
/// read archives fail if they have a plugin for another version of LLVM.
const BITCODE_SECTIONS: [&str; 2] = [".llvmbc", ".llvmcmd"];

/// Returns the content of an archive with one object. `archive` is cargo's static library,
/// `shared_library` the shared library of the same crate.
///
/// # Errors
/// A program of the package binutils is missing or fails.
pub(crate) fn seal_archive(archive: &Path, shared_library: &Path) -> Result<Vec<u8>> {
    let name = archive.file_stem().unwrap_or_default();
    // Two installations may run at the same time.
    let folder = target_folder()?.join(format!("sealed-archives-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let path_with = |ending: &str| folder.join(name).with_extension(ending);
    let exported_names = exported_names(shared_library)?;
    let names_file = path_with("names");
    fs::write(&names_file, exported_names.join("\n") + "\n")?;

    // The linker takes those members and sections of the archive that the exported names need. A
    // program would otherwise contain all of them, because the archive has one object.
    let object = path_with("o");
    let mut link = Command::new("ld");
    link.args(["-r", "--gc-sections", "--force-group-allocation", "-o"])
        .arg(&object)
        .args(exported_names.iter().flat_map(|name| ["-u", name]))
        .arg(archive);
    run(link)?;

    let mut hide_names = Command::new("objcopy");
    hide_names
        // Weak names that only removed sections referred to are not weak any more, so a program
        // that has such a reference of its own would not be linked.
        .arg("--strip-unneeded")
        .args(
            BITCODE_SECTIONS
                .iter()
                .flat_map(|name| ["--remove-section", name]),
        )
        .arg("--keep-global-symbols")
        .arg(&names_file)
        .arg(&object);
    run(hide_names)?;

    let sealed_archive = path_with("a");
    let _ = fs::remove_file(&sealed_archive);
    let mut pack = Command::new("ar");
    // The option D makes the same archive of the same object, whatever the time.
    pack.arg("rcsD").arg(&sealed_archive).arg(&object);
    run(pack)?;
    let bytes = fs::read(&sealed_archive).with_context(|| sealed_archive.display().to_string());
    let _ = fs::remove_dir_all(&folder);
    bytes
}

/// Returns the names that a shared library exports.
fn exported_names(shared_library: &Path) -> Result<Vec<String>> {
    let mut list = Command::new("nm");
    list.args(["--dynamic", "--defined-only", "--format=posix"])
        .arg(shared_library);
    let text = run(list)?;
    let name_of = |line: &str| {
        let symbol = line.split(' ').next().unwrap_or_default();
        let name = symbol.split('@').next().unwrap_or_default();
        name.to_string()
    };
    Ok(text.lines().map(name_of).collect())
}

/// Runs a program to its end and returns its standard output.
fn run(mut command: Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .with_context(|| format!("{program} cannot be executed: install binutils"))?;
    if !output.status.success() {
        bail!(
            "{program} failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
