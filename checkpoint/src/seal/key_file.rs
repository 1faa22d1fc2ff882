//! Creates and changes the key file.

use super::error::SiteKeyError;
use super::key_path::{key_error, locate_key_file, read_located};
use super::site_keys::{KeyId, SiteKeys};
use sempa_trusted_file::{MissingDir, Replace};
use std::path::Path;

impl SiteKeys {
    /// Creates the key file `path` with a random key. The directory of the file is created if it
    /// does not exist. Returns the identifier of the key.
    ///
    /// # Errors
    /// The file already exists or cannot be written, or other users can change the directories
    /// above.
    pub fn create_file(path: &Path) -> Result<KeyId, SiteKeyError> {
        let file = locate_key_file(path, MissingDir::Create)?;
        let keys = Self::generate(path)?;
        file.write(keys.to_text().as_bytes(), Replace::Nothing)
            .map_err(key_error(path))?;
        Ok(keys.current_id())
    }

    /// Adds a random key to the key file `path`. The new key becomes the current key, and the old
    /// current key becomes a previous key. The file must then be copied to all hosts of the site.
    /// Returns the identifier of the new key.
    ///
    /// # Errors
    /// The file is unchanged: [`Self::load`] fails, the file has [`super::PREVIOUS_KEYS_MAX`]
    /// previous keys, or it cannot be written.
    pub fn rotate_file(path: &Path) -> Result<KeyId, SiteKeyError> {
        change_file(path, Self::rotate)
    }

    /// Removes all previous keys from the key file `path`. Images and checkpoints that were sealed
    /// with these keys do not open any more. Returns the identifier of the current key.
    ///
    /// # Errors
    /// The file is unchanged: [`Self::load`] fails, or the file cannot be written.
    pub fn forget_previous_file(path: &Path) -> Result<KeyId, SiteKeyError> {
        change_file(path, |keys| {
            keys.forget_previous();
            Ok(())
        })
    }
}

fn change_file(
    path: &Path,
    change: impl FnOnce(&mut SiteKeys) -> Result<(), SiteKeyError>,
) -> Result<KeyId, SiteKeyError> {
    let file = locate_key_file(path, MissingDir::Refuse)?;
    let _lock = file.lock().map_err(key_error(path))?;
    let mut keys = SiteKeys::parse(&read_located(&file, path)?, path)?;
    change(&mut keys)?;
    file.write(keys.to_text().as_bytes(), Replace::Existing)
        .map_err(key_error(path))?;
    Ok(keys.current_id())
}
