//! The names of images, from `criu/image-desc.c` of CRIU 4.2.1.

/// Names of images of which a directory contains at most one.
const SINGLE_IMAGES: [&str; 11] = [
    "inventory.img",
    "pstree.img",
    "files.img",
    "seccomp.img",
    "memfd.img",
    "remap-fpath.img",
    "pipes-data.img",
    "fifo-data.img",
    "sk-queues.img",
    "tty-info.img",
    "tty-data.img",
];
/// Files of the engine that CRIU does not read when it restores.
const ENGINE_FILES: [&str; 5] = [
    "stats-dump",
    "stats-restore",
    "dump.log",
    "restore.log",
    "criu.stderr",
];
/// The kinds of images that have a number: prefix, kind, radix of the number.
const NUMBERED_IMAGES: [(&str, NumberedImage, u32); 10] = [
    ("core-", NumberedImage::Core, 10),
    ("ids-", NumberedImage::Ids, 10),
    ("fs-", NumberedImage::Fs, 10),
    ("mm-", NumberedImage::Memory, 10),
    ("fdinfo-", NumberedImage::Descriptors, 10),
    ("pagemap-shmem-", NumberedImage::SharedPagemap, 10),
    ("pagemap-", NumberedImage::Pagemap, 10),
    ("pages-", NumberedImage::Pages, 10),
    ("timens-", NumberedImage::TimeNamespace, 10),
    ("ghost-file-", NumberedImage::GhostFile, 16),
];

/// The kind of an image with a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NumberedImage {
    /// A process or thread, by its id.
    Core,
    /// The shared resources of a process.
    Ids,
    /// The directories of a process.
    Fs,
    /// The memory mappings of a process.
    Memory,
    /// A table of descriptors.
    Descriptors,
    SharedPagemap,
    Pagemap,
    Pages,
    /// The offsets of the task's clocks.
    TimeNamespace,
    /// A deleted file with its content.
    GhostFile,
}

/// The meaning of a file in an image directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImageName {
    Single,
    EngineFile,
    Numbered(NumberedImage, u64),
}

impl ImageName {
    /// Returns the meaning of a file; `None` if its name is unknown. A number has one form only.
    pub(super) fn parse(name: &str) -> Option<Self> {
        if SINGLE_IMAGES.contains(&name) {
            return Some(Self::Single);
        }
        if ENGINE_FILES.contains(&name) {
            return Some(Self::EngineFile);
        }
        let stem = name.strip_suffix(".img")?;
        NUMBERED_IMAGES.iter().find_map(|(prefix, kind, radix)| {
            let digits = stem.strip_prefix(prefix)?;
            let number = u64::from_str_radix(digits, *radix).ok()?;
            let canonical_digits = match radix {
                16 => format!("{number:x}"),
                _ => number.to_string(),
            };
            (digits == canonical_digits).then_some(Self::Numbered(*kind, number))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_names_are_parsed() {
        let parsed = [
            ("files.img", ImageName::Single),
            ("dump.log", ImageName::EngineFile),
            ("core-12.img", ImageName::Numbered(NumberedImage::Core, 12)),
            (
                "pagemap-shmem-5.img",
                ImageName::Numbered(NumberedImage::SharedPagemap, 5),
            ),
            (
                "ghost-file-1f.img",
                ImageName::Numbered(NumberedImage::GhostFile, 31),
            ),
        ];
        for (name, expected) in parsed {
            assert_eq!(ImageName::parse(name), Some(expected), "{name}");
        }
        for name in [
            "",
            "files",
            "core-.img",
            "core-01.img",
            "core-+1.img",
            "core--1.img",
            "core-1.img.new",
            "ghost-file-1F.img",
            "creds-2.img",
            "rlimit-2.img",
            "vmas-2.img",
            "sigacts-2.img",
            "mountpoints-1.img",
            "netns-1.img",
            "pidns-1.img",
            "utsns-1.img",
            "ipcns-shm-1.img",
            "userns-1.img",
            "cgroup.img",
            "apparmor.img",
            "filelocks.img",
            "tcp-stream-1.img",
            "parent",
            "reg-files.img",
            "irmap-cache",
        ] {
            assert_eq!(ImageName::parse(name), None, "{name}");
        }
    }
}
