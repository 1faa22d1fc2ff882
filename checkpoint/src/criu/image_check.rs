//! Checks images for completeness, as far as this is possible without the engine.
//!
//! CRIU may report success although a disk was full, or the files may be changed later; for a
//! checkpoint the damage would be noticed only at a restart. The check covers the files that nearly
//! every task has. The content of pages has no structure, so only the number of pages is compared
//! with the pagemaps.

use super::images::{
    Fields, INVENTORY_IMAGE, PAGEMAP_PREFIX, PageRun, damaged_image, first_value, read_entries,
};
use crate::engine::pages::page_size;
use sempa_proto::migration::Failure;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Name prefixes of the images that consist of entries up to the end of the file.
const ENTRY_IMAGE_PREFIXES: [&str; 12] = [
    "core-",
    "fdinfo-",
    "files.img",
    "fs-",
    "ids-",
    "inventory.img",
    "memfd.img",
    "mm-",
    "pagemap-",
    "pstree.img",
    "remap-fpath.img",
    "seccomp.img",
];
const TREE_IMAGE: &str = "pstree.img";
const CORE_PREFIX: &str = "core-";
/// Names of the images that every task has.
const REQUIRED_IMAGES: [&str; 3] = [INVENTORY_IMAGE, "files.img", TREE_IMAGE];
/// Name prefixes of the images that exist for every process except zombies. The PID follows the
/// prefix.
const LIVE_PROCESS_PREFIXES: [&str; 4] = ["ids-", "mm-", "pagemap-", "fs-"];
/// Field number in `pstree_entry`: PID of the process.
const TREE_PID_FIELD: u32 = 1;
/// Field number in `pstree_entry`: ids of the threads.
const TREE_THREADS_FIELD: u32 = 5;
/// Field numbers in `pstree_entry` of all values that are ids of processes: PID, parent, process
/// group, session.
const TREE_ID_FIELDS: [u32; 4] = [TREE_PID_FIELD, 2, 3, 4];
/// Field number in `pagemap_head`: number of the file that contains the pages.
const PAGES_ID_FIELD: u32 = 1;

/// The images in a directory.
struct Images<'a> {
    dir: &'a Path,
    names: BTreeSet<String>,
}

/// Returns the highest process or thread id in the images in the directory `dir`; 0 if the images
/// contain no process. The threads of a zombie do not count: CRIU does not set their ids.
///
/// # Errors
/// The image of the process tree cannot be read or is damaged.
pub fn highest_pid(dir: &Path) -> Result<u32, Failure> {
    let mut highest = 0;
    for entry in read_entries(dir, TREE_IMAGE)? {
        let pid = first_value(&entry, TREE_PID_FIELD).unwrap_or(0);
        let is_zombie = !dir
            .join(format!("{}{pid}.img", LIVE_PROCESS_PREFIXES[0]))
            .exists();
        let ids = entry.iter().filter(|(field, _)| {
            TREE_ID_FIELDS.contains(field) || (*field == TREE_THREADS_FIELD && !is_zombie)
        });
        highest = ids.map(|(_, id)| *id).max().unwrap_or(0).max(highest);
    }
    u32::try_from(highest).map_err(|_| damaged_image(TREE_IMAGE, "contains an invalid process id"))
}

/// Checks all images in a directory.
///
/// # Errors
/// An image is damaged or missing. The error contains the name of the first such image and the kind
/// of damage.
pub(super) fn check_images(dir: &Path) -> Result<(), Failure> {
    let read_failure = |e| Failure::Io(format!("cannot read {}: {e}", dir.display()));
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir).map_err(read_failure)? {
        names.extend(entry.map_err(read_failure)?.file_name().into_string());
    }
    let images = Images { dir, names };
    REQUIRED_IMAGES
        .iter()
        .try_for_each(|name| images.check_present(name))?;
    let is_entry_image = |name: &&String| {
        name.ends_with(".img")
            && ENTRY_IMAGE_PREFIXES
                .iter()
                .any(|prefix| name.starts_with(prefix))
    };
    for name in images.names.iter().filter(is_entry_image) {
        let entries = read_entries(images.dir, name)?;
        if name == TREE_IMAGE {
            images.check_tree(&entries)?;
        } else if name.starts_with(PAGEMAP_PREFIX) {
            images.check_pages(name, &entries)?;
        }
    }
    Ok(())
}

impl Images<'_> {
    fn check_present(&self, name: &str) -> Result<(), Failure> {
        match self.names.contains(name) {
            true => Ok(()),
            false => Err(damaged_image(
                name,
                "is missing although the engine reported success",
            )),
        }
    }

    /// Checks that each process is a zombie or has all its images, and that no core image belongs
    /// to an unknown process or thread.
    fn check_tree(&self, tree: &[Fields]) -> Result<(), Failure> {
        let mut expected_cores = BTreeSet::new();
        for entry in tree {
            let Some(pid) = first_value(entry, TREE_PID_FIELD) else {
                return Err(damaged_image(TREE_IMAGE, "has a process without a PID"));
            };
            expected_cores.insert(format!("{CORE_PREFIX}{pid}.img"));
            let required_images = LIVE_PROCESS_PREFIXES.map(|prefix| format!("{prefix}{pid}.img"));
            if required_images.iter().any(|name| self.names.contains(name)) {
                required_images
                    .iter()
                    .try_for_each(|name| self.check_present(name))?;
                let thread_fields = entry
                    .iter()
                    .filter(|(field, _)| *field == TREE_THREADS_FIELD);
                expected_cores
                    .extend(thread_fields.map(|(_, thread)| format!("{CORE_PREFIX}{thread}.img")));
            }
        }
        expected_cores
            .iter()
            .try_for_each(|name| self.check_present(name))?;
        match self
            .names
            .iter()
            .find(|name| name.starts_with(CORE_PREFIX) && !expected_cores.contains(*name))
        {
            Some(name) => Err(damaged_image(
                TREE_IMAGE,
                &format!("has no process or thread for {name}"),
            )),
            None => Ok(()),
        }
    }

    /// Checks that the file of pages has the size that this pagemap requires.
    fn check_pages(&self, name: &str, pagemap: &[Fields]) -> Result<(), Failure> {
        let Some((head, runs)) = pagemap.split_first() else {
            return Err(damaged_image(name, "is empty"));
        };
        let Some(pages_id) = first_value(head, PAGES_ID_FIELD) else {
            return Err(damaged_image(name, "does not name its file of pages"));
        };
        let present_runs = runs
            .iter()
            .map(PageRun::decode)
            .filter(|page_count| page_count.is_present);
        let page_count = present_runs
            .map(|page_count| page_count.page_count)
            .fold(0_u64, u64::saturating_add);
        let file_name = format!("pages-{pages_id}.img");
        let expected_bytes = page_count.saturating_mul(page_size());
        // Without pages the file may be missing.
        let actual_bytes = fs::metadata(self.dir.join(&file_name)).map_or(0, |meta| meta.len());
        match actual_bytes == expected_bytes {
            true => Ok(()),
            false => Err(damaged_image(
                &file_name,
                &format!(
                    "has {actual_bytes} bytes instead of {expected_bytes} bytes for the {page_count} pages in {name}"
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::images::{INVENTORY_MAGIC_BYTES, MAGIC_BYTES};
    use super::*;

    /// Encodes an entry with these fields, given as (number, value). All values must be below 128.
    fn encode_entry(fields: &[(u8, u8)]) -> Vec<u8> {
        let message: Vec<u8> = fields
            .iter()
            .flat_map(|(field, number)| [field << 3, *number])
            .collect();
        [&(message.len() as u32).to_le_bytes()[..], &message].concat()
    }

    fn encode_image(entries: &[Vec<u8>]) -> Vec<u8> {
        [&[7; MAGIC_BYTES][..], &entries.concat()].concat()
    }

    /// Writes images of a process with one thread, a process with two threads, and a zombie.
    /// Returns the file names.
    fn complete_images() -> (tempfile::TempDir, Vec<&'static str>) {
        let dir = tempfile::tempdir().expect("a directory");
        let page_bytes = page_size() as usize;
        let process = |pid, threads: &[u8]| {
            let threads = threads.iter().map(|thread| (5, *thread));
            encode_entry(&[(1, pid)].into_iter().chain(threads).collect::<Vec<_>>())
        };
        let plain_image =
            || encode_image(&[encode_entry(&[(1, 2)]), encode_entry(&[(3, 4), (5, 6)])]);
        let encode_pagemap = |id, pages: &[(u8, u8)]| {
            let maps = pages
                .iter()
                .map(|(flags, pages)| encode_entry(&[(1, 9), (2, 0), (4, *flags), (5, *pages)]));
            encode_image(
                &std::iter::once(encode_entry(&[(1, id)]))
                    .chain(maps)
                    .collect::<Vec<_>>(),
            )
        };
        let mut images = vec![
            (
                "inventory.img",
                [&[7; INVENTORY_MAGIC_BYTES][..], &encode_entry(&[(1, 2)])].concat(),
            ),
            ("files.img", plain_image()),
            (
                "pstree.img",
                encode_image(&[
                    process(11, &[11, 12]),
                    process(13, &[13]),
                    process(14, &[99]),
                ]),
            ),
            (
                "pagemap-11.img",
                encode_pagemap(1, &[(4, 2), (2, 90), (6, 1)]),
            ),
            (
                "pagemap-13.img",
                encode_image(&[
                    encode_entry(&[(1, 2)]),
                    encode_entry(&[(1, 9), (2, 1)]),
                    encode_entry(&[(2, 7), (3, 1)]),
                ]),
            ),
            ("pagemap-shmem-5.img", encode_pagemap(3, &[])),
            ("pages-1.img", vec![1; 3 * page_bytes]),
            ("pages-2.img", vec![1; page_bytes]),
            (
                "pipes-data.img",
                b"in a form that is not looked at".to_vec(),
            ),
        ];
        for name in [
            "core-11", "core-12", "core-13", "core-14", "mm-11", "mm-13", "ids-11", "ids-13",
            "fs-11", "fs-13",
        ] {
            images.push((
                Box::leak(format!("{name}.img").into_boxed_str()),
                plain_image(),
            ));
        }
        for (name, bytes) in &images {
            fs::write(dir.path().join(name), bytes).expect("written");
        }
        (dir, images.into_iter().map(|(name, _)| name).collect())
    }

    #[test]
    fn complete_images_are_accepted() {
        let (dir, _) = complete_images();
        assert_eq!(check_images(dir.path()), Ok(()));
    }

    #[test]
    fn highest_pid_is_that_of_any_thread_or_zombie() {
        let (dir, _) = complete_images();
        // The thread 99 of the zombie 14 does not exist.
        assert_eq!(highest_pid(dir.path()), Ok(14));
        let tree = encode_image(&[encode_entry(&[(1, 11), (5, 20)])]);
        fs::write(dir.path().join("pstree.img"), tree).expect("written");
        assert_eq!(highest_pid(dir.path()), Ok(20));
        fs::remove_file(dir.path().join("pstree.img")).expect("removed");
        assert!(highest_pid(dir.path()).is_err());
    }

    /// Truncating, extending or removing an image is an error that names the image.
    #[test]
    fn damaged_image_is_named() {
        let (dir, names) = complete_images();
        for name in names.iter().filter(|name| **name != "pipes-data.img") {
            let path = dir.path().join(name);
            let bytes = fs::read(&path).expect("readable");
            let expect_error_about = |damage: &str| {
                let error_text = check_images(dir.path()).expect_err(damage).to_string();
                assert!(error_text.contains(name), "{name}, {damage}: {error_text}");
            };
            for length in [bytes.len() - 1, bytes.len() / 2 + 1, 3, 0] {
                fs::write(&path, &bytes[..length]).expect("written");
                expect_error_about(&format!("{length} bytes"));
            }
            fs::write(&path, [&bytes[..], &[0]].concat()).expect("written");
            expect_error_about("longer");
            fs::remove_file(&path).expect("removed");
            match *name {
                // No other image refers to this pagemap, so its absence is not noticed.
                "pagemap-shmem-5.img" => assert_eq!(check_images(dir.path()), Ok(())),
                _ => expect_error_about("missing"),
            }
            fs::write(&path, bytes).expect("written");
        }
        assert_eq!(check_images(dir.path()), Ok(()));
    }
}
