//! Checks images for completeness, as far as this is possible without the engine.
//!
//! CRIU may report success although a disk was full, or the files may be changed later; for a
//! checkpoint the damage would be noticed only at a restart. The check covers the files that nearly
//! every task has. The content of pages has no structure, so only the number of pages is compared
//! with the pagemaps.

use super::images::{
    Fields, INVENTORY, PAGEMAP_PREFIX, PageRun, damaged_image, first_value, read_entries,
};
use crate::engine::pages::page_size;
use sempa_proto::migration::Failure;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Name prefixes of the images that consist of entries up to the end of the file.
const ENTRY_IMAGES: [&str; 12] = [
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
const TREE: &str = "pstree.img";
const CORE: &str = "core-";
/// Names of the images that every task has.
const REQUIRED_IMAGES: [&str; 3] = [INVENTORY, "files.img", TREE];
/// Name prefixes of the images that exist for every process except zombies. The PID follows the
/// prefix.
const LIVE_PROCESS_IMAGES: [&str; 4] = ["ids-", "mm-", "pagemap-", "fs-"];
/// Field number in `pstree_entry`: PID of the process.
const TREE_PID: u32 = 1;
/// Field number in `pstree_entry`: ids of the threads.
const TREE_THREADS: u32 = 5;
/// Field number in `pagemap_head`: number of the file that contains the pages.
const PAGEMAP_PAGES_ID: u32 = 1;

/// The images in a directory.
struct Images<'a> {
    dir: &'a Path,
    names: BTreeSet<String>,
}

/// Checks all images in a directory.
///
/// # Errors
/// The name of the first damaged image, and how it is damaged.
pub(super) fn check_images(dir: &Path) -> Result<(), Failure> {
    let unreadable = |e| Failure::Io(format!("cannot read {}: {e}", dir.display()));
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        names.extend(entry.map_err(unreadable)?.file_name().into_string());
    }
    let images = Images { dir, names };
    REQUIRED_IMAGES
        .iter()
        .try_for_each(|name| images.require(name))?;
    let is_entry_image = |name: &&String| {
        name.ends_with(".img") && ENTRY_IMAGES.iter().any(|begin| name.starts_with(begin))
    };
    for name in images.names.iter().filter(is_entry_image) {
        let entries = read_entries(images.dir, name)?;
        if name == TREE {
            images.check_tree(&entries)?;
        } else if name.starts_with(PAGEMAP_PREFIX) {
            images.check_pages(name, &entries)?;
        }
    }
    Ok(())
}

impl Images<'_> {
    fn require(&self, name: &str) -> Result<(), Failure> {
        match self.names.contains(name) {
            true => Ok(()),
            false => Err(damaged_image(
                name,
                "is missing although the engine said that all was written",
            )),
        }
    }

    /// Checks that each process has all its images or is a zombie, and that no image belongs to an
    /// unknown process.
    fn check_tree(&self, tree: &[Fields]) -> Result<(), Failure> {
        let mut cores = BTreeSet::new();
        for process in tree {
            let Some(pid) = first_value(process, TREE_PID) else {
                return Err(damaged_image(TREE, "has a process without a number"));
            };
            cores.insert(format!("{CORE}{pid}.img"));
            let required_images = LIVE_PROCESS_IMAGES.map(|kind| format!("{kind}{pid}.img"));
            if required_images.iter().any(|name| self.names.contains(name)) {
                required_images
                    .iter()
                    .try_for_each(|name| self.require(name))?;
                let threads = process.iter().filter(|(field, _)| *field == TREE_THREADS);
                cores.extend(threads.map(|(_, thread)| format!("{CORE}{thread}.img")));
            }
        }
        cores.iter().try_for_each(|name| self.require(name))?;
        match self
            .names
            .iter()
            .find(|name| name.starts_with(CORE) && !cores.contains(*name))
        {
            Some(name) => Err(damaged_image(
                TREE,
                &format!("has nobody whose image is {name}"),
            )),
            None => Ok(()),
        }
    }

    /// Checks that the file of pages has the size that this pagemap requires.
    fn check_pages(&self, name: &str, map: &[Fields]) -> Result<(), Failure> {
        let Some((head, maps)) = map.split_first() else {
            return Err(damaged_image(name, "is empty"));
        };
        let Some(id) = first_value(head, PAGEMAP_PAGES_ID) else {
            return Err(damaged_image(name, "does not say where its pages are"));
        };
        let present = maps
            .iter()
            .map(PageRun::decode)
            .filter(|pages| pages.present);
        let pages = present
            .map(|pages| pages.count)
            .fold(0_u64, u64::saturating_add);
        let file = format!("pages-{id}.img");
        let expected_bytes = pages.saturating_mul(page_size());
        // Without pages there may be no file.
        let found = fs::metadata(self.dir.join(&file)).map_or(0, |meta| meta.len());
        match found == expected_bytes {
            true => Ok(()),
            false => Err(damaged_image(
                &file,
                &format!(
                    "has {found} bytes, and {name} has {pages} pages in it, {expected_bytes} bytes"
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
    fn entry(fields: &[(u8, u8)]) -> Vec<u8> {
        let message: Vec<u8> = fields
            .iter()
            .flat_map(|(field, number)| [field << 3, *number])
            .collect();
        [&(message.len() as u32).to_le_bytes()[..], &message].concat()
    }

    fn image(entries: &[Vec<u8>]) -> Vec<u8> {
        [&[7; MAGIC_BYTES][..], &entries.concat()].concat()
    }

    /// Writes images of a process with one thread, a process with two threads, and a zombie.
    /// Returns the file names.
    fn complete_images() -> (tempfile::TempDir, Vec<&'static str>) {
        let dir = tempfile::tempdir().expect("a directory");
        let page = page_size() as usize;
        let process = |pid, threads: &[u8]| {
            let threads = threads.iter().map(|thread| (5, *thread));
            entry(&[(1, pid)].into_iter().chain(threads).collect::<Vec<_>>())
        };
        let plain = || image(&[entry(&[(1, 2)]), entry(&[(3, 4), (5, 6)])]);
        let map = |id, pages: &[(u8, u8)]| {
            let maps = pages
                .iter()
                .map(|(flags, pages)| entry(&[(1, 9), (2, 0), (4, *flags), (5, *pages)]));
            image(
                &std::iter::once(entry(&[(1, id)]))
                    .chain(maps)
                    .collect::<Vec<_>>(),
            )
        };
        let mut images = vec![
            (
                "inventory.img",
                [&[7; INVENTORY_MAGIC_BYTES][..], &entry(&[(1, 2)])].concat(),
            ),
            ("files.img", plain()),
            (
                "pstree.img",
                image(&[
                    process(11, &[11, 12]),
                    process(13, &[13]),
                    process(14, &[99]),
                ]),
            ),
            ("pagemap-11.img", map(1, &[(4, 2), (2, 90), (6, 1)])),
            (
                "pagemap-13.img",
                image(&[
                    entry(&[(1, 2)]),
                    entry(&[(1, 9), (2, 1)]),
                    entry(&[(2, 7), (3, 1)]),
                ]),
            ),
            ("pagemap-shmem-5.img", map(3, &[])),
            ("pages-1.img", vec![1; 3 * page]),
            ("pages-2.img", vec![1; page]),
            (
                "pipes-data.img",
                b"in a form that is not looked at".to_vec(),
            ),
        ];
        for name in [
            "core-11", "core-12", "core-13", "core-14", "mm-11", "mm-13", "ids-11", "ids-13",
            "fs-11", "fs-13",
        ] {
            images.push((Box::leak(format!("{name}.img").into_boxed_str()), plain()));
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

    /// Truncating, extending or removing an image is an error that names the image.
    #[test]
    fn damaged_image_is_named() {
        let (dir, names) = complete_images();
        for name in names.iter().filter(|name| **name != "pipes-data.img") {
            let path = dir.path().join(name);
            let bytes = fs::read(&path).expect("readable");
            let fails = |what: &str| {
                let why = check_images(dir.path()).expect_err(what).to_string();
                assert!(why.contains(name), "{name}, {what}: {why}");
            };
            for length in [bytes.len() - 1, bytes.len() / 2 + 1, 3, 0] {
                fs::write(&path, &bytes[..length]).expect("written");
                fails(&format!("{length} bytes"));
            }
            fs::write(&path, [&bytes[..], &[0]].concat()).expect("written");
            fails("longer");
            fs::remove_file(&path).expect("removed");
            match *name {
                // No other image refers to this pagemap, so its absence is not noticed.
                "pagemap-shmem-5.img" => assert_eq!(check_images(dir.path()), Ok(())),
                _ => fails("missing"),
            }
            fs::write(&path, bytes).expect("written");
        }
        assert_eq!(check_images(dir.path()), Ok(()));
    }
}
