//! The files of a journal, behind a trait, so that tests can lose power at each call.

use super::error::OpenError;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::unistd::{geteuid, gethostname};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Prefix of the names of incomplete files.
pub(super) const TEMPORARY_PREFIX: &str = ".tmp-";
const LOCK_NAME: &str = "run.lock";
const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// Mode bits that give write access to the group and to others.
const OTHERS_WRITE: u32 = 0o022;
/// Attempts to lock a folder that finishing masters remove in the meantime.
const LOCK_ATTEMPTS_MAX: u32 = 100;
/// Bytes of the lock file that are shown at most.
const HOLDER_BYTES_MAX: u64 = 512;

/// A folder that belongs to one journal.
pub(super) trait Storage: Send + Sync {
    /// Returns the path that messages name.
    fn path(&self) -> &Path;
    /// Returns a name that no other file of this or another master has.
    fn temporary_name(&self) -> String;
    fn list(&self) -> io::Result<Vec<String>>;
    fn reader(&self, name: &str) -> io::Result<StoredReader>;
    /// Creates a file that does not exist.
    fn create(&self, name: &str) -> io::Result<Box<dyn StoredFile>>;
    fn open(&self, name: &str) -> io::Result<Box<dyn StoredFile>>;
    /// Replaces `to` if the file exists.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes creations, renames and removals durable.
    fn sync(&self) -> io::Result<()>;
    /// Removes the lock, and the folder if nothing else is in it.
    fn remove_folder(&self) -> io::Result<()>;
}

/// A file that is open for writing.
pub(super) trait StoredFile: Send {
    fn write_all_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()>;
    fn truncate(&mut self, len: u64) -> io::Result<()>;
    /// Makes the content and the length durable. After an error the system may have dropped what
    /// was written since the last success: the caller writes all of this again.
    fn sync(&mut self) -> io::Result<()>;
}

pub(super) struct StoredReader {
    pub(super) source: Box<dyn Read + Send>,
    /// The length of the file in bytes.
    pub(super) len: u64,
}

/// A locked folder in the file system.
pub(super) struct Folder {
    path: PathBuf,
    _lock: Flock<File>,
    /// Distinguishes temporary names of masters, also on hosts that share the file system.
    owner_tag: String,
    next_temporary: AtomicU64,
}

struct OpenFile(File);

impl Folder {
    /// Creates the folder if necessary, and locks the folder for this process.
    ///
    /// # Errors
    /// Another master has the lock, other users can write to the folder, or a call fails.
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        let io_error = |action| {
            move |cause| OpenError::Io {
                dir: path.to_path_buf(),
                action,
                cause,
            }
        };
        for _ in 0..LOCK_ATTEMPTS_MAX {
            create_folder(path).map_err(io_error("create the folder"))?;
            let metadata = match fs::metadata(path) {
                // A master that finishes has removed the folder.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                inspection => inspection.map_err(io_error("inspect the folder"))?,
            };
            let unsafe_folder = |why| {
                Err(OpenError::UnsafeFolder {
                    dir: path.to_path_buf(),
                    why,
                })
            };
            if metadata.uid() != geteuid().as_raw() {
                return unsafe_folder("belongs to another user");
            }
            if metadata.mode() & OTHERS_WRITE != 0 {
                return unsafe_folder("can be written by others");
            }
            let Some(lock) = try_lock(path).map_err(|refusal| refusal.into_error(path))? else {
                continue;
            };
            return Ok(Self {
                path: path.to_path_buf(),
                _lock: lock,
                owner_tag: owner_tag(),
                next_temporary: AtomicU64::new(0),
            });
        }
        Err(io_error("lock the folder")(io::Error::other(
            "other masters create and remove the folder all the time",
        )))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Storage for Folder {
    fn path(&self) -> &Path {
        &self.path
    }

    fn temporary_name(&self) -> String {
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        format!("{TEMPORARY_PREFIX}{}-{number}", self.owner_tag)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            // Names that are not UTF-8 are not the journal's.
            names.extend(entry?.file_name().into_string().ok());
        }
        Ok(names)
    }

    fn reader(&self, name: &str) -> io::Result<StoredReader> {
        let file = file_options().read(true).open(self.file(name))?;
        let len = file.metadata()?.len();
        let source = Box::new(io::BufReader::with_capacity(1 << 16, file));
        Ok(StoredReader { source, len })
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn StoredFile>> {
        let file = file_options()
            .write(true)
            .create_new(true)
            .open(self.file(name))?;
        Ok(Box::new(OpenFile(file)))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StoredFile>> {
        let file = file_options().write(true).open(self.file(name))?;
        Ok(Box::new(OpenFile(file)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.file(from), self.file(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.file(name))
    }

    fn sync(&self) -> io::Result<()> {
        sync_folder(&self.path)
    }

    fn remove_folder(&self) -> io::Result<()> {
        fs::remove_file(self.file(LOCK_NAME))?;
        match fs::remove_dir(&self.path) {
            // The user keeps other files here.
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            // The program's current folder, a mount point, or a parent that is not writable.
            Err(e) if matches!(errno_of(&e), Errno::EBUSY | Errno::EINVAL | Errno::EACCES) => {
                Ok(())
            }
            removal => removal,
        }
    }
}

impl StoredFile for OpenFile {
    fn write_all_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn truncate(&mut self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_data()
    }
}

enum LockRefusal {
    Held { holder: String },
    Io(io::Error),
}

impl LockRefusal {
    fn into_error(self, path: &Path) -> OpenError {
        let dir = path.to_path_buf();
        match self {
            Self::Held { holder } => OpenError::Locked { dir, holder },
            Self::Io(cause) => OpenError::Io {
                dir,
                action: "lock the folder",
                cause,
            },
        }
    }
}

impl From<io::Error> for LockRefusal {
    fn from(cause: io::Error) -> Self {
        Self::Io(cause)
    }
}

/// Creates a file in the folder, makes the content durable, and gives the file its name: at each
/// moment there is the old file or the new one, complete.
pub(super) fn create_complete(
    storage: &dyn Storage,
    name: &str,
    write: impl FnOnce(&mut dyn StoredFile) -> io::Result<()>,
) -> io::Result<Box<dyn StoredFile>> {
    let temporary_name = storage.temporary_name();
    let write_and_rename = || {
        let mut file = storage.create(&temporary_name)?;
        write(&mut *file)?;
        file.sync()?;
        storage.rename(&temporary_name, name)?;
        Ok(file)
    };
    let file = write_and_rename().inspect_err(|_: &io::Error| {
        // The first error is reported; the next open removes what is left here.
        let _ = storage.remove(&temporary_name);
    })?;
    storage.sync()?;
    Ok(file)
}

fn create_folder(path: &Path) -> io::Result<()> {
    let parent = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => return Ok(()),
    };
    let create = || DirBuilder::new().mode(FOLDER_MODE).create(path);
    let mut creation = create();
    if matches!(&creation, Err(e) if e.kind() == io::ErrorKind::NotFound) {
        create_folder(parent)?;
        creation = create();
    }
    match creation {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        // A master that was killed may have created the folder without the sync.
        Ok(()) | Err(_) => {}
    }
    match sync_folder(parent) {
        // Such a parent can be searched, but not opened.
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        sync => sync,
    }
}

fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Locks the folder. Returns `None` if the lock file was removed in the meantime.
fn try_lock(folder: &Path) -> Result<Option<Flock<File>>, LockRefusal> {
    let path = folder.join(LOCK_NAME);
    let mut options = file_options();
    options.read(true).write(true).create(true).truncate(false);
    let file = match options.open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => lock,
        Err((file, Errno::EWOULDBLOCK)) => {
            let holder = describe_holder(&file);
            return Err(LockRefusal::Held { holder });
        }
        Err((_, errno)) => return Err(LockRefusal::Io(errno.into())),
    };
    let locked_inode = lock.metadata()?.ino();
    if !fs::metadata(&path).is_ok_and(|m| m.ino() == locked_inode) {
        return Ok(None);
    }
    lock.set_len(0)?;
    let (pid, host) = (std::process::id(), host_name());
    lock.write_all(format!("process {pid} on host {host}").as_bytes())?;
    Ok(Some(lock))
}

fn describe_holder(lock_file: &File) -> String {
    let mut holder = String::new();
    match lock_file.take(HOLDER_BYTES_MAX).read_to_string(&mut holder) {
        Ok(1..) => holder,
        // The holder writes its name after it has locked the file.
        Ok(0) | Err(_) => "a process that has just started".to_string(),
    }
}

fn file_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options
        .mode(FILE_MODE)
        .custom_flags(OFlag::O_NOFOLLOW.bits());
    options
}

fn owner_tag() -> String {
    let host: String = host_name()
        .chars()
        .filter(|c| c.is_alphanumeric())
        .collect();
    let random = RandomState::new().build_hasher().finish();
    format!("{host}-{}-{random:016x}", std::process::id())
}

fn host_name() -> String {
    gethostname().map_or_else(
        |_| "unknown".to_string(),
        |name| name.to_string_lossy().into_owned(),
    )
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(0))
}
