//! Replaces files and links as a whole, so that running programs are not affected.

use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// Copies a file. The copy has the permissions `mode`.
pub(crate) fn install_file(source_path: &Path, target_path: &Path, mode: u32) -> Result<()> {
    let bytes =
        fs::read(source_path).with_context(|| format!("cannot read {}", source_path.display()))?;
    replace_file(target_path, &bytes, mode)
}

/// Replaces the file `target_path`: writes a temporary file in the same folder and renames it. An
/// identical file is not replaced, because other builds compare its time of modification.
pub(crate) fn replace_file(target_path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    if fs::read(target_path).is_ok_and(|existing_bytes| existing_bytes == bytes) {
        return Ok(());
    }
    let temporary_file = temporary_path(target_path);
    let write_result = fs::write(&temporary_file, bytes)
        .and_then(|()| fs::set_permissions(&temporary_file, fs::Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&temporary_file, target_path));
    write_result.with_context(|| format!("cannot write {}", target_path.display()))
}

/// Replaces the link `link_path` by one that points to `link_target`.
pub(crate) fn replace_link(link_target: &str, link_path: &Path) -> Result<()> {
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
