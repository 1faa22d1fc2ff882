//! Checks files: regular files by their paths and flags, all other kinds in `special_files`.

use super::images::ImageDir;
use super::names::NumberedImage;
use super::processes::{ProcessTable, check_count};
use super::schema::{FDINFO, FILE, FS, GHOST_FILE, REMAP};
use super::special_files;
use super::violation::ImageViolation;
use super::wire::Message;
use super::{FileAccess, OpenedFile, OpenedFiles, RestorePolicy};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// Values of `type` in `file_entry`, with the field of the message that describes the file.
const PERMITTED_KINDS: [(u64, &str); 13] = [
    (REGULAR_KIND, "reg"),
    (2, "pipe"),
    (3, "fifo"),
    (4, "isk"),
    (5, "usk"),
    (6, "efd"),
    (7, "epfd"),
    (8, "ify"),
    (9, "sgfd"),
    (TTY_KIND, "tty"),
    (17, "tfd"),
    (MEMFD_KIND, "memfd"),
    (20, "pidfd"),
];
const REGULAR_KIND: u64 = 1;
const TTY_KIND: u64 = 11;
const MEMFD_KIND: u64 = 18;
/// Values of `type` that are refused, with their names in messages.
const REFUSED_KINDS: [(u64, &str); 7] = [
    (10, "a packet socket"),
    (12, "a fanotify descriptor"),
    (13, "a netlink socket"),
    (14, "a descriptor of a namespace"),
    (15, "a network tunnel"),
    (16, "a file that the engine does not restore itself"),
    (19, "a BPF map"),
];
/// Flags with which a regular file may be opened: the access mode, and O_NOCTTY, O_APPEND,
/// O_NONBLOCK, O_DSYNC, FASYNC, O_DIRECT, O_LARGEFILE, O_DIRECTORY, O_NOFOLLOW, O_CLOEXEC, O_SYNC,
/// O_PATH, O_TMPFILE. CRIU removes O_TMPFILE. O_CREAT and O_TRUNC would change files, and O_NOATIME
/// needs the owner's rights.
const REGULAR_FLAGS: u32 = ACCESS_MASK
    | (libc::O_NOCTTY
        | libc::O_APPEND
        | libc::O_NONBLOCK
        | libc::O_DSYNC
        | libc::O_ASYNC
        | libc::O_DIRECT
        | KERNEL_O_LARGEFILE
        | libc::O_DIRECTORY
        | libc::O_NOFOLLOW
        | libc::O_CLOEXEC
        | libc::O_SYNC
        | libc::O_PATH
        | libc::O_TMPFILE) as u32;
const ACCESS_MASK: u32 = libc::O_ACCMODE as u32;
/// O_LARGEFILE of the kernel; the C library defines the flag as 0 for 64-bit programs.
const KERNEL_O_LARGEFILE: i32 = if cfg!(target_arch = "aarch64") {
    0o400_000
} else {
    0o100_000
};
/// Maximum length of a path in bytes (PATH_MAX).
const PATH_BYTES_MAX: usize = 4096;
/// Value of `remap_type` in `remap_file_path_entry`: a deleted file, whose content is in an image.
const REMAP_GHOST: u64 = 1;
/// Permission bits of set-user-id, set-group-id and sticky files.
pub(super) const SPECIAL_MODE_BITS: u32 = 0o7000;

/// A file in `files.img`.
enum TableFile {
    Regular {
        path: PathBuf,
        flags: u32,
        /// True if a process, a mapping or another file refers to the file.
        is_referenced: bool,
    },
    Other {
        kind: u64,
    },
}

/// The files in the images, by id.
pub(super) struct FileTable {
    files: BTreeMap<u32, TableFile>,
    deleted_ids: BTreeSet<u32>,
    opened_files: OpenedFiles,
}

impl FileTable {
    pub(super) fn read(
        images: &ImageDir<'_>,
        policy: &RestorePolicy,
        processes: &ProcessTable,
    ) -> Result<Self, ImageViolation> {
        let entries = images.entries("files.img", &FILE)?;
        check_count("open files", entries.len(), policy.limits.files_max)?;
        let mut table = Self {
            files: BTreeMap::new(),
            deleted_ids: BTreeSet::new(),
            opened_files: OpenedFiles::default(),
        };
        for entry in &entries {
            table.add(entry)?;
        }
        table.read_deleted_files(images, policy)?;
        for entry in &entries {
            let (kind, description) = describe(entry)?;
            match kind {
                REGULAR_KIND => special_files::check_signal_owner(description, policy)?,
                kind => special_files::check(kind, description, policy, &mut table)?,
            }
        }
        special_files::check_images(images, policy, &table)?;
        table.read_descriptors(images, policy, processes)?;
        for pid in processes.living.keys() {
            table.read_directories(images, *pid)?;
        }
        Ok(table)
    }

    /// Adds an entry of `files.img`. The other files to which it refers may be missing yet.
    fn add(&mut self, entry: &Message) -> Result<(), ImageViolation> {
        let (kind, description) = describe(entry)?;
        let file = match kind {
            REGULAR_KIND => regular_file(description)?,
            kind => TableFile::Other { kind },
        };
        let id = entry.required("id");
        if description.required("id") != id || self.files.insert(id as u32, file).is_some() {
            return Err(table_damage(format!("the file {id} occurs twice")));
        }
        Ok(())
    }

    /// Checks the deleted files, whose content is in images.
    fn read_deleted_files(
        &mut self,
        images: &ImageDir<'_>,
        policy: &RestorePolicy,
    ) -> Result<(), ImageViolation> {
        let mut ghost_numbers = BTreeSet::new();
        for remap in images.entries("remap-fpath.img", &REMAP)? {
            if remap.number("remap_type") != Some(REMAP_GHOST) {
                return Err(ImageViolation::FileKind {
                    kind: "a deleted file that has another name, or a file of an ended process"
                        .into(),
                });
            }
            let id = remap.required("orig_id") as u32;
            let path = self.regular_path(id)?.to_path_buf();
            let number = remap.required("remap_id");
            ghost_numbers.insert(number);
            let ghost = images.first_entry(&format!("ghost-file-{number:x}.img"), &GHOST_FILE)?;
            check_deleted_file(&ghost, &path, policy)?;
            self.deleted_ids.insert(id);
        }
        match images
            .numbers(NumberedImage::GhostFile)
            .find(|number| !ghost_numbers.contains(number))
        {
            None => Ok(()),
            Some(number) => Err(ImageViolation::UnknownImage {
                name: format!("ghost-file-{number:x}.img"),
            }),
        }
    }

    fn read_descriptors(
        &mut self,
        images: &ImageDir<'_>,
        policy: &RestorePolicy,
        processes: &ProcessTable,
    ) -> Result<(), ImageViolation> {
        let mut descriptor_count = 0;
        for files_id in processes.living.values() {
            let name = format!("fdinfo-{files_id}.img");
            if !images.contains(&name) {
                return Err(ImageViolation::Damaged {
                    image: name,
                    why: "it is missing".into(),
                });
            }
        }
        for number in images.numbers(NumberedImage::Descriptors) {
            let entries = images.entries(&format!("fdinfo-{number}.img"), &FDINFO)?;
            descriptor_count += entries.len();
            check_count("descriptors", descriptor_count, policy.limits.files_max)?;
            for entry in entries {
                let id = entry.required("id") as u32;
                if self.kind(id)? != entry.required("type") {
                    return Err(table_damage(format!("the file {id} has two kinds")));
                }
                if self.kind(id)? == REGULAR_KIND {
                    self.reference(id, None)?;
                }
            }
        }
        Ok(())
    }

    /// Checks the working directory and the root directory of a process.
    fn read_directories(&mut self, images: &ImageDir<'_>, pid: u32) -> Result<(), ImageViolation> {
        let directories = images.single_entry(&format!("fs-{pid}.img"), &FS)?;
        let root_id = directories.required("root_id") as u32;
        if self.regular_path(root_id)? != Path::new("/") {
            return Err(ImageViolation::RootDirectory { pid });
        }
        self.reference(root_id, Some(FileAccess::Enter))?;
        self.reference(
            directories.required("cwd_id") as u32,
            Some(FileAccess::Enter),
        )
    }

    fn kind(&self, id: u32) -> Result<u64, ImageViolation> {
        match self.files.get(&id) {
            Some(TableFile::Regular { .. }) => Ok(REGULAR_KIND),
            Some(TableFile::Other { kind }) => Ok(*kind),
            None => Err(table_damage(format!("the file {id} is missing"))),
        }
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        u32::try_from(id).is_ok_and(|id| self.files.contains_key(&id))
    }

    pub(super) fn is_memfd(&self, id: u32) -> bool {
        matches!(
            self.files.get(&id),
            Some(TableFile::Other { kind: MEMFD_KIND })
        )
    }

    pub(super) fn regular_path(&self, id: u32) -> Result<&Path, ImageViolation> {
        match self.files.get(&id) {
            Some(TableFile::Regular { path, .. }) => Ok(path),
            _ => Err(table_damage(format!("{id} is not a regular file"))),
        }
    }

    /// Records that the restore opens a regular file. `None` means the access of the file's flags.
    pub(super) fn reference(
        &mut self,
        id: u32,
        access: Option<FileAccess>,
    ) -> Result<(), ImageViolation> {
        let is_deleted = self.deleted_ids.contains(&id);
        let Some(TableFile::Regular {
            path,
            flags,
            is_referenced,
        }) = self.files.get_mut(&id)
        else {
            return Err(table_damage(format!("{id} is not a regular file")));
        };
        *is_referenced = true;
        let access = match is_deleted {
            true => FileAccess::Create,
            false => access.unwrap_or_else(|| access_of(*flags)),
        };
        let path = path.clone();
        self.add_opened(path, access);
        Ok(())
    }

    /// Records that a regular file belongs to another file, which is restored in another way.
    pub(super) fn mark_referenced(&mut self, id: u32) {
        if let Some(TableFile::Regular { is_referenced, .. }) = self.files.get_mut(&id) {
            *is_referenced = true;
        }
    }

    pub(super) fn add_opened(&mut self, path: PathBuf, access: FileAccess) {
        self.opened_files.files.insert(OpenedFile { path, access });
    }

    /// Returns all files that the restore opens, including those to which nothing refers.
    pub(super) fn into_opened_files(mut self) -> Result<OpenedFiles, ImageViolation> {
        let is_unreferenced = |file: &TableFile| matches!(file, TableFile::Regular { is_referenced, .. } if !is_referenced);
        let unreferenced_ids: Vec<u32> = self
            .files
            .iter()
            .filter(|(_, file)| is_unreferenced(file))
            .map(|(id, _)| *id)
            .collect();
        for id in unreferenced_ids {
            self.reference(id, None)?;
        }
        Ok(self.opened_files)
    }
}

pub(super) fn table_damage(why: impl Into<String>) -> ImageViolation {
    ImageViolation::Damaged {
        image: "files.img".into(),
        why: why.into(),
    }
}

/// Returns the kind of an entry of `files.img`, and the message that describes the file.
fn describe(entry: &Message) -> Result<(u64, &Message), ImageViolation> {
    let kind = entry.required("type");
    let refused_kind = |name: &str| ImageViolation::FileKind { kind: name.into() };
    if let Some((_, name)) = REFUSED_KINDS.iter().find(|(number, _)| *number == kind) {
        return Err(refused_kind(name));
    }
    let field = PERMITTED_KINDS.iter().find(|(number, _)| *number == kind);
    let (_, field) = field.ok_or_else(|| refused_kind(&format!("a file of the kind {kind}")))?;
    let descriptions = entry.message_count();
    match entry.message(field) {
        Some(description) if descriptions == 1 => Ok((kind, description)),
        _ => Err(table_damage("a file does not have exactly one description")),
    }
}

fn regular_file(description: &Message) -> Result<TableFile, ImageViolation> {
    let path = checked_path(description.bytes("name").unwrap_or_default())?;
    if description.flag("ext") {
        return Err(ImageViolation::FileKind {
            kind: format!(
                "the file {}, which is outside of the images",
                path.display()
            ),
        });
    }
    if description.signed("mnt_id").unwrap_or(-1) != -1 {
        return Err(ImageViolation::Namespace {
            namespace: "mnt_id",
        });
    }
    if is_about_process(&path) {
        return Err(ImageViolation::FileKind {
            kind: format!("the file {}, which is about a process", path.display()),
        });
    }
    let flags = description.required("flags") as u32;
    if flags & !REGULAR_FLAGS != 0 || flags & ACCESS_MASK == ACCESS_MASK {
        return Err(ImageViolation::FileFlags { path, flags });
    }
    let kind = description
        .number("mode")
        .map(|mode| mode as u32 & libc::S_IFMT);
    if kind == Some(libc::S_IFBLK) {
        return Err(ImageViolation::FileKind {
            kind: format!("the block device {}", path.display()),
        });
    }
    Ok(TableFile::Regular {
        path,
        flags,
        is_referenced: false,
    })
}

/// Returns the path if it is absolute and has only plain components. The kernel reports paths of
/// open files in this form.
pub(super) fn checked_path(bytes: &[u8]) -> Result<PathBuf, ImageViolation> {
    let path = Path::new(OsStr::from_bytes(bytes));
    let is_plain_component =
        |component| matches!(component, Component::RootDir | Component::Normal(_));
    // Collecting the components removes `.`, repeated and trailing slashes.
    let is_canonical = path.is_absolute()
        && bytes.len() < PATH_BYTES_MAX
        && !bytes.contains(&0)
        && path.components().all(is_plain_component)
        && path.components().collect::<PathBuf>().as_os_str() == path.as_os_str();
    match is_canonical {
        true => Ok(path.to_path_buf()),
        false => Err(ImageViolation::FilePath {
            path: path.display().to_string(),
        }),
    }
}

/// True if a file in `/proc` is about a process. Opened by root, such a file gives access to any
/// process, also to CRIU.
pub(super) fn is_about_process(path: &Path) -> bool {
    let Ok(rest) = path.strip_prefix("/proc") else {
        return false;
    };
    let first = rest.components().next().map(Component::as_os_str);
    first.is_some_and(|name| {
        name == "self" || name == "thread-self" || name.as_bytes()[0].is_ascii_digit()
    })
}

/// Returns the access that the flags of a descriptor give.
fn access_of(flags: u32) -> FileAccess {
    match flags & ACCESS_MASK {
        _ if flags & libc::O_PATH as u32 != 0 => FileAccess::Path,
        0 => FileAccess::Read,
        1 => FileAccess::Write,
        _ => FileAccess::ReadWrite,
    }
}

/// Checks owner and mode with which a deleted file is created under the path `path`.
fn check_deleted_file(
    ghost: &Message,
    path: &Path,
    policy: &RestorePolicy,
) -> Result<(), ImageViolation> {
    let what = format!("the deleted file {}", path.display());
    let mode = ghost.required("mode") as u32;
    let is_permitted_kind = matches!(mode & libc::S_IFMT, libc::S_IFREG | libc::S_IFIFO);
    if !is_permitted_kind || mode & SPECIAL_MODE_BITS != 0 || ghost.number("rdev").unwrap_or(0) != 0
    {
        return Err(ImageViolation::SpecialMode { what, mode });
    }
    let (uid, gid) = (ghost.required("uid") as u32, ghost.required("gid") as u32);
    special_files::check_file_owner(what, uid, gid, policy)
}
