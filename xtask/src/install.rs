//! Builds the workspace and installs the programs under a prefix.

use crate::setup::project_folder;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names of the installed programs.
const INSTALLED_PROGRAMS: [&str; 6] = [
    "pvm",
    "pvmd",
    "pvm-rm",
    "pvm-load-watcher",
    "pvm-tasker",
    "pvm_gstat",
];
/// Names of the packages that build the programs and the libraries.
const INSTALLED_PACKAGES: [&str; 7] = [
    "pvm-console",
    "pvmd",
    "pvm-rm",
    "pvm-load-watcher",
    "pvm-tasker",
    "pvm3-capi",
    "gpvm3",
];

/// Name of the build profile for the programs that users install and benchmarks measure.
pub(crate) const RELEASE_PROFILE: &str = "release";

/// Name of the build profile for the installed `libpvm3`: the C library alone, with link-time
/// optimization.
const C_LIBRARY_PROFILE: &str = "release-library";

/// Returns cargo's target folder of this build: two levels above the running program.
pub(crate) fn target_folder() -> Result<PathBuf> {
    let build_folder = sempa_tests::requirements::build_folder()?;
    Ok(build_folder.parent().unwrap_or(&build_folder).to_path_buf())
}

/// Returns the profile with which this program was built.
pub(crate) fn build_profile() -> Result<String> {
    let build_folder = sempa_tests::requirements::build_folder()?;
    let folder_name = build_folder
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    Ok(match &*folder_name {
        "debug" => "dev".to_string(),
        other => other.to_string(),
    })
}

/// Returns the name of the folder below the target folder that contains the programs of a profile.
fn profile_folder(profile: &str) -> &str {
    if profile == "dev" { "debug" } else { profile }
}

/// Returns a command that runs cargo in the project, with the target folder of this build.
pub(crate) fn cargo_command(arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(arguments)
        .current_dir(project_folder())
        .env("CARGO_TARGET_DIR", target_folder()?);
    // Cargo sets variables that describe this package. These variables are removed: build scripts
    // of other packages would treat them as a change, and cargo would rebuild those packages and
    // all their dependents each time.
    let describes_package = |name: &OsString| {
        ["CARGO_PKG_", "CARGO_MANIFEST_"]
            .iter()
            .any(|variable_prefix| name.to_string_lossy().starts_with(variable_prefix))
    };
    for (name, _) in std::env::vars_os().filter(|(name, _)| describes_package(name)) {
        command.env_remove(name);
    }
    Ok(command)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BuildParts {
    /// The installed programs and libraries.
    Programs,
    /// The programs, the libraries, and the programs that run the hosts of a testbed.
    ProgramsAndHosts,
    /// The whole workspace with its tests.
    Tests,
}

/// Builds parts of the workspace with a profile.
///
/// # Errors
/// The build fails.
pub(crate) fn build(profile: &str, parts: BuildParts) -> Result<()> {
    let mut command = cargo_command(&["build", "--locked", "--profile", profile])?;
    if parts == BuildParts::Tests {
        command.args(["--workspace", "--all-targets"]);
    } else {
        command.args(INSTALLED_PACKAGES.iter().flat_map(|name| ["-p", name]));
    }
    if parts == BuildParts::ProgramsAndHosts {
        command.args(["-p", "sempa-tests"]);
    }
    if !command.status().context("cargo")?.success() {
        bail!("the build failed");
    }
    if profile == RELEASE_PROFILE {
        build_c_library()?;
    }
    Ok(())
}

/// Builds `libpvm3.so` and `libpvm3.a` as users install them.
///
/// Cargo ignores link-time optimization if the crate is also built as a Rust library, as tests and
/// benchmarks need it. This build therefore requests the other two types only.
///
/// # Errors
/// The build fails.
pub(crate) fn build_c_library() -> Result<()> {
    let mut command = cargo_command(&["rustc", "--locked", "--lib", "-p", "pvm3-capi"])?;
    command.args(["--profile", C_LIBRARY_PROFILE]);
    command.args(["--crate-type", "cdylib", "--crate-type", "staticlib"]);
    if !command.status().context("cargo")?.success() {
        bail!("the build of libpvm3 failed");
    }
    Ok(())
}

/// Returns the folder that contains `libpvm3` after [`build`] with a profile.
fn c_library_folder(profile: &str) -> Result<PathBuf> {
    let library_profile = if profile == RELEASE_PROFILE {
        C_LIBRARY_PROFILE
    } else {
        profile_folder(profile)
    };
    Ok(target_folder()?.join(library_profile))
}

/// Copies the programs and files of a build to their locations under `prefix`. Each file is
/// replaced as a whole, so that running programs are not affected.
///
/// # Errors
/// A program was not built, or the prefix cannot be written.
pub(crate) fn install_files(prefix: &Path, profile: &str) -> Result<()> {
    let build_folder = target_folder()?.join(profile_folder(profile));
    let c_library_folder = c_library_folder(profile)?;
    for folder in ["bin", "lib/pkgconfig", "include"] {
        let folder = prefix.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    for name in INSTALLED_PROGRAMS {
        install_file(
            &build_folder.join(name),
            &prefix.join("bin").join(name),
            0o755,
        )?;
    }
    install_file(
        &c_library_folder.join("libpvm3.so"),
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
    install_file(
        &c_library_folder.join("libpvm3.a"),
        &prefix.join("lib/libpvm3.a"),
        0o644,
    )?;
    write_package_config(prefix, &capi_folder.join("pvm3.pc.in"))?;
    install_groups_and_fortran(prefix, &build_folder)?;
    install_manuals(prefix)
}

/// Installs the group library with its programs, and the files that Fortran programs need.
fn install_groups_and_fortran(prefix: &Path, build_folder: &Path) -> Result<()> {
    install_file(
        &build_folder.join("libgpvm3.so"),
        &prefix.join("lib/libgpvm3.so.3"),
        0o755,
    )?;
    replace_link("libgpvm3.so.3", &prefix.join("lib/libgpvm3.so"))?;
    install_file(
        &build_folder.join("libgpvm3.a"),
        &prefix.join("lib/libgpvm3.a"),
        0o644,
    )?;
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
    for page in pages
        .iter()
        .filter(|page| page.extension().is_some_and(|end| end == "1"))
    {
        let folder = prefix.join("share/man/man1");
        fs::create_dir_all(&folder)?;
        install_file(
            page,
            &folder.join(page.file_name().unwrap_or_default()),
            0o644,
        )?;
    }
    Ok(())
}

fn install_file(source_path: &Path, target_path: &Path, mode: u32) -> Result<()> {
    let bytes =
        fs::read(source_path).with_context(|| format!("cannot read {}", source_path.display()))?;
    replace_file(target_path, &bytes, mode)
}

/// Replaces the file `target_path`: writes a temporary file in the same folder and renames it. An
/// identical file is not replaced, because other builds compare its time of modification.
fn replace_file(target_path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    if fs::read(target_path).is_ok_and(|existing_bytes| existing_bytes == bytes) {
        return Ok(());
    }
    let temporary_file = temporary_path(target_path);
    let write_result = fs::write(&temporary_file, bytes)
        .and_then(|()| fs::set_permissions(&temporary_file, fs::Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&temporary_file, target_path));
    write_result.with_context(|| format!("cannot write {}", target_path.display()))
}

fn replace_link(link_target: &str, link_path: &Path) -> Result<()> {
    if fs::read_link(link_path)
        .is_ok_and(|existing_target| existing_target == Path::new(link_target))
    {
        return Ok(());
    }
    let temporary_link = temporary_path(link_path);
    let _ = fs::remove_file(&temporary_link);
    symlink(link_target, &temporary_link)
        .and_then(|()| fs::rename(&temporary_link, link_path))
        .with_context(|| link_path.display().to_string())
}

/// Returns the path of a temporary file in the folder of `final_path`. No other process uses this
/// path.
fn temporary_path(final_path: &Path) -> PathBuf {
    let name = final_path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    final_path.with_file_name(format!(".{name}.{}", std::process::id()))
}
