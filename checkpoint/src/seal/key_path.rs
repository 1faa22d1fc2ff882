//! Locates and reads the key file.

use super::error::SiteKeyError;
use super::site_keys::KEY_FILE_BYTES_MAX;
use sempa_trusted_file::{FileError, MissingDir, Readers, TrustedFile};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// Path of the site key if the environment names no other.
const DEFAULT_SITE_KEY_PATH: &str = "/etc/sempa/site.key";
/// Environment variable with the path of the site key. The environment is that of the tasker
/// service or of root, and never that of a daemon.
pub const SITE_KEY_VARIABLE: &str = "SEMPA_SITE_KEY";

/// Returns the path of the site key.
pub fn site_key_path() -> PathBuf {
    let path = std::env::var_os(SITE_KEY_VARIABLE).filter(|path| !path.is_empty());
    path.map_or_else(|| DEFAULT_SITE_KEY_PATH.into(), PathBuf::from)
}

/// Returns a function that converts the errors of the key file `path`.
pub(super) fn key_error(path: &Path) -> impl Fn(FileError) -> SiteKeyError {
    let path = path.to_path_buf();
    move |error| {
        let path = path.clone();
        match error {
            FileError::Missing => SiteKeyError::Missing { path },
            FileError::Path(why) => SiteKeyError::Invalid {
                path,
                why: format!("its path {why}"),
            },
            FileError::Accessible(why) => SiteKeyError::AccessibleKey { path, why },
            FileError::AccessibleDirectory { dir, why } => {
                SiteKeyError::AccessibleDirectory { path, dir, why }
            }
            FileError::Content(why) => SiteKeyError::Invalid { path, why },
            FileError::Exists => SiteKeyError::Exists { path },
            FileError::Io { action, cause } => SiteKeyError::Io {
                action,
                path,
                cause,
            },
        }
    }
}

pub(super) fn locate_key_file(
    path: &Path,
    missing_dir: MissingDir,
) -> Result<TrustedFile, SiteKeyError> {
    TrustedFile::locate(path, Readers::OwnerOnly, missing_dir).map_err(key_error(path))
}

/// Reads the text of the key file `path`, which was located as `file`.
pub(super) fn read_located(
    file: &TrustedFile,
    path: &Path,
) -> Result<Zeroizing<String>, SiteKeyError> {
    // The whole text fits, so the keys are not copied to memory that is not erased.
    let mut text = Zeroizing::new(String::with_capacity(KEY_FILE_BYTES_MAX as usize + 1));
    file.read(&mut text, KEY_FILE_BYTES_MAX)
        .map_err(key_error(path))?;
    Ok(text)
}

pub(super) fn read_key_file(path: &Path) -> Result<Zeroizing<String>, SiteKeyError> {
    read_located(&locate_key_file(path, MissingDir::Refuse)?, path)
}
