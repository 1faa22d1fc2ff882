//! Gives the ghost files of images names that no other restore uses.
//!
//! A ghost file is an open or mapped file without a name, such as a program that was replaced while
//! it ran. CRIU restores it under a temporary name in its old directory, which it makes from the
//! old name and the file's number in the images. The numbers of different images are the same, so
//! restores of the same program on several hosts would meet at one name if the directory is on a
//! file system that the hosts share. Therefore the numbers are replaced by random ones.

use super::images::{
    Fields, MAGIC_BYTES, damaged_image, encode_entry, first_value, read_entries, read_image,
};
use sempa_proto::migration::Failure;
use std::collections::BTreeMap;
use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;

/// Name of the image that lists files without a name.
const REMAP_IMAGE: &str = "remap-fpath.img";
/// Field number in `remap_file_path_entry`: number of the ghost file.
const REMAP_ID_FIELD: u32 = 2;
/// Field number in `remap_file_path_entry`: kind of the file.
const REMAP_TYPE_FIELD: u32 = 3;
/// Kind of a ghost file.
const REMAP_TYPE_GHOST: u64 = 1;

/// Replaces the numbers of all ghost files in these images by random ones. Does nothing for images
/// without ghost files.
///
/// # Errors
/// The list of ghost files is damaged, or an image cannot be read, written or renamed.
pub(super) fn make_unique(dir: &Path) -> Result<(), Failure> {
    if !dir.join(REMAP_IMAGE).exists() {
        return Ok(());
    }
    let mut entries = read_entries(dir, REMAP_IMAGE)?;
    let mut new_numbers = BTreeMap::new();
    for fields in entries.iter_mut().filter(|fields| is_ghost(fields)) {
        let number_field = fields
            .iter_mut()
            .find(|(field, _)| *field == REMAP_ID_FIELD);
        let (_, number) =
            number_field.ok_or_else(|| damaged_image(REMAP_IMAGE, "lacks the number of a file"))?;
        // Several descriptors may refer to one ghost file.
        *number = *new_numbers.entry(*number).or_insert_with(random_number);
    }
    if new_numbers.is_empty() {
        return Ok(());
    }
    for (number, new_number) in &new_numbers {
        let (name, new_name) = (ghost_image(*number), ghost_image(*new_number));
        fs::rename(dir.join(&name), dir.join(new_name))
            .map_err(|e| Failure::Images(format!("cannot rename {name}: {e}")))?;
    }
    let mut image = read_image(dir, REMAP_IMAGE)?;
    image.truncate(MAGIC_BYTES);
    image.extend(entries.iter().flat_map(|fields| encode_entry(fields)));
    fs::write(dir.join(REMAP_IMAGE), image)
        .map_err(|e| Failure::Io(format!("cannot change {REMAP_IMAGE}: {e}")))
}

fn is_ghost(fields: &Fields) -> bool {
    // The kind of old entries is missing, and is that of ghost files (the images' default).
    first_value(fields, REMAP_TYPE_FIELD).is_none_or(|kind| kind == REMAP_TYPE_GHOST)
}

fn ghost_image(number: u64) -> String {
    format!("ghost-file-{number:x}.img")
}

/// Returns a random number of 32 bits, the size of the field. The numbers of CRIU are small, so the
/// highest bit keeps them apart.
fn random_number() -> u64 {
    // Each `RandomState` has new random keys.
    RandomState::new().build_hasher().finish() >> 32 | 1 << 31
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ghost files get other numbers in each restore, and entries of one file keep one number.
    /// Other entries stay as they are.
    #[test]
    fn ghost_files_get_new_numbers() {
        let numbers_of = |ghosts: &[(u64, u64)]| {
            let dir = tempfile::tempdir().expect("a directory");
            let mut image = vec![7; MAGIC_BYTES];
            for (file, number) in ghosts {
                image.extend(encode_entry(&[
                    (1, *file),
                    (REMAP_ID_FIELD, *number),
                    (REMAP_TYPE_FIELD, REMAP_TYPE_GHOST),
                ]));
                fs::write(dir.path().join(ghost_image(*number)), b"content").expect("written");
            }
            image.extend(encode_entry(&[
                (1, 9),
                (REMAP_ID_FIELD, 1),
                (REMAP_TYPE_FIELD, 2),
            ]));
            fs::write(dir.path().join(REMAP_IMAGE), image).expect("written");
            make_unique(dir.path()).expect("they are whole");
            let entries = read_entries(dir.path(), REMAP_IMAGE).expect("readable");
            assert_eq!(entries.last(), Some(&vec![(1, 9), (2, 1), (3, 2)]));
            let numbers: Vec<u64> = entries[..ghosts.len()]
                .iter()
                .map(|fields| first_value(fields, REMAP_ID_FIELD).expect("a number"))
                .collect();
            for number in &numbers {
                let content = fs::read(dir.path().join(ghost_image(*number)));
                assert_eq!(content.expect("it was renamed"), b"content");
            }
            numbers
        };
        let numbers = numbers_of(&[(5, 1), (6, 2), (7, 1)]);
        assert_eq!(numbers[0], numbers[2]);
        assert_ne!(numbers[0], numbers[1]);
        assert_ne!(numbers_of(&[(5, 1)]), numbers_of(&[(5, 1)]));
        assert!(numbers.iter().all(|number| u32::try_from(*number).is_ok()));
        assert_eq!(numbers_of(&[]), []);
    }

    #[test]
    fn images_without_ghosts_stay_as_they_are() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(make_unique(dir.path()), Ok(()));
        assert_eq!(fs::read_dir(dir.path()).expect("readable").count(), 0);
    }
}
