//! Copies the programs and files of a build to their locations under a prefix.

use crate::archive::seal_archive;
use crate::build::BuiltFolders;
use crate::libraries::{LIBRARIES, Library};
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
    for library in &LIBRARIES {
        install_library(library, prefix, built)?;
    }
    replace_link("pvm_gstat", &prefix.join("bin/pvmgroups"))?;
    install_fortran(prefix)?;
    install_pvm_root(prefix)?;
    install_manuals(prefix)
}

fn install_program(program: &Program, prefix: &Path, built: &BuiltFolders) -> Result<()> {
    let source_path = built.programs.join(program.name);
    let folder = prefix.join(program.folder);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    install_file(&source_path, &folder.join(program.name), 0o755)
}

/// Installs a library in both forms, with its headers and its files for pkg-config.
fn install_library(library: &Library, prefix: &Path, built: &BuiltFolders) -> Result<()> {
    let build_folder = built.folder_of(library.name);
    let shared_name = format!("{}.so", library.name);
    let shared_library = build_folder.join(&shared_name);
    install_file(
        &shared_library,
        &prefix.join("lib").join(library.soname),
        0o755,
    )?;
    replace_link(library.soname, &prefix.join("lib").join(&shared_name))?;
    let archive_name = format!("{}.a", library.name);
    let archive = seal_archive(&build_folder.join(&archive_name), &shared_library)
        .with_context(|| format!("cannot make {archive_name}"))?;
    replace_file(&prefix.join("lib").join(archive_name), &archive, 0o644)?;
    for (header, folder) in library.headers {
        install_header(&project_folder().join(header), &prefix.join(folder))?;
    }
    for (source_folder, folder) in library.header_folders {
        for header in files_of(&project_folder().join(source_folder))? {
            install_header(&header, &prefix.join(folder))?;
        }
    }
    for template in library.package_configs {
        write_package_config(prefix, &project_folder().join(template))?;
    }
    Ok(())
}

fn install_header(header: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    install_file(
        header,
        &folder.join(header.file_name().unwrap_or_default()),
        0o644,
    )
}

/// Returns the paths of the files in a folder.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let paths = entries.flatten().map(|entry| entry.path());
    Ok(paths.filter(|path| path.is_file()).collect())
}

/// Installs the files that Fortran programs need.
fn install_fortran(prefix: &Path) -> Result<()> {
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
