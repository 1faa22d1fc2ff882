//! Makes a tar archive with an install script, for machines without apt.

use crate::debian::{Release, files_below};
use crate::process::run;
use crate::{Compression, Inputs, remove_folder};
use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask_install::project_folder;

/// Stands in the archive for the prefix of the installation; the install script replaces it.
const PREFIX_MARK: &str = "@PREFIX@";

/// Files of the sources in the archive, as (path in the sources, path in the archive, mode).
const SOURCE_FILES: [(&str, &str, u32); 9] = [
    ("packaging/tarball/install.sh", "install.sh", 0o755),
    ("packaging/tarball/README", "README", 0o644),
    ("docs/ADMIN.md", "files/share/doc/sempa/ADMIN.md", 0o644),
    ("CHANGELOG.md", "files/share/doc/sempa/CHANGELOG.md", 0o644),
    ("LICENSE-MIT", "files/share/doc/sempa/LICENSE-MIT", 0o644),
    (
        "LICENSE-APACHE",
        "files/share/doc/sempa/LICENSE-APACHE",
        0o644,
    ),
    (
        "docs/owner.toml",
        "files/share/doc/sempa/examples/owner.toml",
        0o644,
    ),
    (
        "packaging/systemd/sempa-taskerd.socket",
        "units/sempa-taskerd.socket",
        0o644,
    ),
    (
        "packaging/systemd/sempa-taskerd.service",
        "units/sempa-taskerd.service",
        0o644,
    ),
];

/// Makes the archive in the folder `out` and returns its path.
///
/// # Errors
/// A file cannot be read or written, or tar fails.
pub(crate) fn make(
    release: &Release,
    inputs: &Inputs<'_>,
    compression: Compression,
    out: &Path,
) -> Result<PathBuf> {
    let name = format!("sempa-{}-x86_64-linux", release.source_version());
    let parent = inputs.work_folder.join("tar");
    remove_folder(&parent)?;
    let root = parent.join(&name);
    fs::create_dir_all(&root)?;
    run(Command::new("cp")
        .arg("-a")
        .arg(inputs.prefix)
        .arg(root.join("files")))?;
    strip_programs(&root.join("files"))?;
    unset_prefix(&root.join("files/lib/pkgconfig"), inputs.prefix)?;
    let has_service = root.join("files/sbin/pvm-taskerd").exists();
    for (source, path, mode) in SOURCE_FILES {
        if path.starts_with("units/") && !has_service {
            continue;
        }
        let target = root.join(path);
        fs::create_dir_all(target.parent().unwrap_or(&root))?;
        fs::copy(project_folder().join(source), &target).with_context(|| source.to_string())?;
        fs::set_permissions(&target, fs::Permissions::from_mode(mode))?;
    }
    write_manifest(&root)?;
    // The blocks of several threads would depend on the number of processors.
    let compressor = match compression {
        Compression::Strong => "xz --threads=1",
        Compression::Little => "xz --threads=1 -0",
    };
    let archive = out.join(format!("{name}.tar.xz"));
    run(Command::new("tar")
        .args(["--create", "--sort=name", "--format=gnu", "--owner=0"])
        .args(["--group=0", "--numeric-owner", "--mode=u+rw,go+r,go-w"])
        .arg(format!("--mtime=@{}", release.epoch))
        .args(["--use-compress-program", compressor, "--file"])
        .arg(&archive)
        .arg("--directory")
        .arg(&parent)
        .arg(&name))?;
    Ok(archive)
}

/// Removes symbols that only a debugger of the programs' authors uses.
fn strip_programs(files: &Path) -> Result<()> {
    for folder in ["bin", "sbin", "lib"] {
        if !files.join(folder).exists() {
            continue;
        }
        for path in files_below(files, Path::new(folder))? {
            let file = files.join(&path);
            let is_program = fs::read(&file).is_ok_and(|bytes| bytes.starts_with(b"\x7fELF"));
            if is_program && !file.is_symlink() {
                run(Command::new("strip").arg("--strip-unneeded").arg(&file))?;
            }
        }
    }
    Ok(())
}

fn unset_prefix(folder: &Path, prefix: &Path) -> Result<()> {
    let prefix = std::path::absolute(prefix)?.display().to_string();
    for path in files_below(folder, Path::new(""))? {
        let file = folder.join(path);
        let text = fs::read_to_string(&file)?;
        fs::write(&file, text.replace(&prefix, PREFIX_MARK))?;
    }
    Ok(())
}

/// Writes the list of files, by which the script removes what it has installed.
fn write_manifest(root: &Path) -> Result<()> {
    let mut lines = String::new();
    for path in files_below(&root.join("files"), Path::new(""))? {
        lines += &format!("{}\n", path.display());
    }
    fs::write(root.join("MANIFEST"), lines)?;
    Ok(())
}
