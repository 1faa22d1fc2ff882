//! Copies the programs and files of a build to their locations under a prefix.

use crate::archive::seal_archive;
use crate::build::BuiltFolders;
use crate::programs::{PROGRAMS, Program};
use crate::project_folder;
use crate::pvm_root::install_pvm_root;
use crate::replace::{install_file, replace_file, replace_link};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Copies the programs and files of a build with this profile to their locations under `prefix`.
/// Each file is replaced as a whole, so that running programs are not affected.
///
/// # Errors
/// A program was not built, or the prefix cannot be written.
pub fn install_files(prefix: &Path, profile: &str) -> Result<()> {
    install_built(prefix, &BuiltFolders::of_profile(profile)?)
}

/// Does the same as [`install_files`] for a build in any folders.
///
/// # Errors
/// A program was not built, or the prefix cannot be written.
pub fn install_built(prefix: &Path, built: &BuiltFolders) -> Result<()> {
    for folder in ["bin", "lib/pkgconfig", "include"] {
        let folder = prefix.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    for program in &PROGRAMS {
        install_program(program, prefix, built)?;
    }
    install_file(
        &built.c_library.join("libpvm3.so"),
        &prefix.join("lib/libpvm3.so.3"),
        0o755,
    )?;
    replace_link("libpvm3.so.3", &prefix.join("lib/libpvm3.so"))?;
    let capi_folder = project_folder().join("libpvm/capi");
    for header in ["pvm3.h", "pvmproto.h", "pvmtev.h"] {
        install_file(
            &capi_folder.join("include").join(header),
            &prefix.join("include").join(header),
            0o644,
        )?;
    }
    install_archive("libpvm3", &built.c_library, prefix)?;
    write_package_config(prefix, &capi_folder.join("pvm3.pc.in"))?;
    install_groups_and_fortran(prefix, &built.programs)?;
    install_pvm_root(prefix)?;
    install_manuals(prefix)
}

fn install_program(program: &Program, prefix: &Path, built: &BuiltFolders) -> Result<()> {
    let source_path = built.programs.join(program.name);
    let folder = prefix.join(program.folder);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    install_file(&source_path, &folder.join(program.name), 0o755)
}

/// Installs the archive of the library `name` from a folder of built libraries.
fn install_archive(name: &str, build_folder: &Path, prefix: &Path) -> Result<()> {
    let file_name = format!("{name}.a");
    let bytes = seal_archive(
        &build_folder.join(&file_name),
        &build_folder.join(format!("{name}.so")),
    )
    .with_context(|| format!("cannot make {file_name}"))?;
    replace_file(&prefix.join("lib").join(file_name), &bytes, 0o644)
}

/// Installs the group library with its programs, and the files that Fortran programs need.
fn install_groups_and_fortran(prefix: &Path, build_folder: &Path) -> Result<()> {
    install_file(
        &build_folder.join("libgpvm3.so"),
        &prefix.join("lib/libgpvm3.so.3"),
        0o755,
    )?;
    replace_link("libgpvm3.so.3", &prefix.join("lib/libgpvm3.so"))?;
    install_archive("libgpvm3", build_folder, prefix)?;
    replace_link("pvm_gstat", &prefix.join("bin/pvmgroups"))?;
    write_package_config(prefix, &project_folder().join("libpvm/group/gpvm3.pc.in"))?;
    replace_file(&prefix.join("lib/libfpvm3.a"), fpvm3::ARCHIVE, 0o644)?;
    replace_file(
        &prefix.join("include/fpvm3.h"),
        fpvm3::HEADER.as_bytes(),
        0o644,
    )
}

/// Writes a file for pkg-config. `template_path` is the path of the template.
fn write_package_config(prefix: &Path, template_path: &Path) -> Result<()> {
    let text =
        fs::read_to_string(template_path).with_context(|| template_path.display().to_string())?;
    let absolute_prefix = std::path::absolute(prefix)?.display().to_string();
    let text = text
        .replace("@PREFIX@", &absolute_prefix)
        .replace("@prefix@", &absolute_prefix)
        .replace("@VERSION@", env!("CARGO_PKG_VERSION"));
    let name = template_path.file_stem().unwrap_or_default();
    replace_file(
        &prefix.join("lib/pkgconfig").join(name),
        text.as_bytes(),
        0o644,
    )
}

fn install_manuals(prefix: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(project_folder().join("docs/man")) else {
        return Ok(());
    };
    let pages: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    for section in ["1", "8"] {
        let folder = prefix.join(format!("share/man/man{section}"));
        let in_section = |page: &&PathBuf| page.extension().is_some_and(|end| end == section);
        for page in pages.iter().filter(in_section) {
            fs::create_dir_all(&folder)?;
            install_file(
                page,
                &folder.join(page.file_name().unwrap_or_default()),
                0o644,
            )?;
        }
    }
    Ok(())
}
