//! The state that all handles of a store share: its directory, the entries in it, and its lock.
//!
//! The lock of the store is held while a directory in it is renamed, and only for a short time:
//! content is written before and deleted afterwards.

use super::disk::Disk;
use super::error::{Act, StoreError, io};
use super::id::SetId;
use super::seal::Secret;
use super::sweep::{Total, others};
use super::{DRAFT, GONE, LOCK, Limits, SetInfo, ended, manifest};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use sempa_proto::Tid;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Longest time to wait for the lock of the store.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(30);
/// Interval between attempts to take the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// Names of the unreadable entries, with the reasons.
pub type Unreadable = Vec<(String, StoreError)>;

pub(super) struct Shared {
    /// Real path of the store.
    pub(super) dir: PathBuf,
    pub(super) secret: Secret,
    pub(super) limits: Limits,
    pub(super) disk: Disk,
}

/// The entries of a store, by the prefix of their names.
#[derive(Debug, Default)]
pub(super) struct Entries {
    /// Sorted, oldest checkpoint first.
    pub(super) sets: Vec<SetId>,
    pub(super) drafts: Vec<SetId>,
    pub(super) gone: Vec<SetId>,
    pub(super) strangers: Vec<String>,
}

impl Shared {
    pub(super) fn set_dir(&self, id: SetId) -> PathBuf {
        self.dir.join(id.to_string())
    }

    pub(super) fn draft_dir(&self, id: SetId) -> PathBuf {
        self.dir.join(format!("{DRAFT}{id}"))
    }

    fn gone_dir(&self, id: SetId) -> PathBuf {
        self.dir.join(format!("{GONE}{id}"))
    }

    /// Waits for the lock of the store.
    pub(super) fn lock(&self, act: Act) -> Result<Flock<File>, StoreError> {
        let path = self.dir.join(LOCK);
        let mut file = open_lock(&path, true).map_err(io(act, &path))?;
        let until = Instant::now() + LOCK_WAIT_MAX;
        loop {
            file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((file, Errno::EWOULDBLOCK | Errno::EINTR)) => file,
                Err((_, errno)) => return Err(io(act, &path)(errno.into())),
            };
            if Instant::now() >= until {
                return Err(StoreError::Busy {
                    act,
                    dir: self.dir.clone(),
                    seconds: LOCK_WAIT_MAX.as_secs(),
                });
            }
            sleep(LOCK_PAUSE);
        }
    }

    /// Reads the entries of the store.
    pub(super) fn entries(&self, act: Act) -> Result<Entries, StoreError> {
        let mut entries = Entries::default();
        for entry in self.dir.read_dir().map_err(io(act, &self.dir))? {
            let name = entry
                .map_err(io(act, &self.dir))?
                .file_name()
                .to_string_lossy()
                .into_owned();
            let (place, id) = if let Some(id) = name.strip_prefix(DRAFT) {
                (&mut entries.drafts, id)
            } else if let Some(id) = name.strip_prefix(GONE) {
                (&mut entries.gone, id)
            } else {
                (&mut entries.sets, &*name)
            };
            match id.parse() {
                Ok(id) => place.push(id),
                Err(_) if name == LOCK => {}
                Err(_) => entries.strangers.push(name),
            }
        }
        entries.sets.sort();
        entries.strangers.sort();
        Ok(entries)
    }

    /// Reads all checkpoints, oldest first, and returns the unreadable entries as well.
    pub(super) fn read_all(&self, act: Act) -> Result<(Vec<SetInfo>, Unreadable), StoreError> {
        let entries = self.entries(act)?;
        let stranger = |name: String| (name.clone(), StoreError::Stranger(self.dir.join(name)));
        let mut unreadable: Unreadable = entries.strangers.into_iter().map(stranger).collect();
        let mut sets = Vec::new();
        for id in entries.sets {
            let dir = self.set_dir(id);
            match manifest::read(act, &dir, id, &self.secret) {
                Ok((manifest, bytes)) => {
                    sets.push(SetInfo {
                        ended: ended::read(&dir),
                        ..manifest.info(id, bytes)
                    });
                }
                // It was removed meanwhile.
                Err(_) if !is_there(&dir) => {}
                Err(why) => unreadable.push((id.to_string(), why)),
            }
        }
        Ok((sets, unreadable))
    }

    /// Returns the bytes that a new checkpoint of this job may have, so that the limits are kept
    /// after all removable checkpoints are removed.
    ///
    /// # Errors
    /// That is less than `needed`, or the number of checkpoints is exceeded.
    pub(super) fn room(
        &self,
        act: Act,
        vm: &str,
        job: Tid,
        needed: u64,
    ) -> Result<u64, StoreError> {
        let (sets, _) = self.read_all(act)?;
        let Total { sets, bytes } = others(&sets, vm, job);
        let Limits {
            sets_max,
            bytes_max,
        } = self.limits;
        let room = bytes_max.saturating_sub(bytes);
        if sets >= sets_max || room < needed {
            return Err(StoreError::NoPlace {
                act,
                dir: self.dir.clone(),
                needed,
                sets,
                bytes,
                sets_max,
                bytes_max,
            });
        }
        Ok(room)
    }

    /// Hides a directory by renaming it. It must be deleted later, without the lock of the store,
    /// which is held here.
    pub(super) fn retire(&self, act: Act, dir: &Path, id: SetId) -> Result<PathBuf, StoreError> {
        let gone = self.gone_dir(id);
        self.disk.remove_tree(&gone).map_err(io(act, &gone))?;
        self.disk.rename(dir, &gone).map_err(io(act, dir))?;
        Ok(gone)
    }

    /// Hides a checkpoint durably, if no reader has it open. The lock of the store is held.
    pub(super) fn retire_set(&self, act: Act, id: SetId) -> Result<PathBuf, StoreError> {
        let dir = self.set_dir(id);
        let _alone = match lock_set(&dir, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err(Errno::EWOULDBLOCK) => return Err(StoreError::InUse(id)),
            Err(Errno::ENOENT) if !is_there(&dir) => return Err(StoreError::NoSet(id)),
            Err(errno) => return Err(io(act, &dir)(errno.into())),
        };
        let gone = self.retire(act, &dir, id)?;
        // Otherwise a crash of the machine could restore the name without the files.
        self.disk.sync_dir(&self.dir).map_err(io(act, &self.dir))?;
        Ok(gone)
    }

    /// Hides drafts whose writers are dead, and returns all hidden directories, including those of
    /// earlier deletions. The lock of the store is held, so no draft is between its creation and
    /// its lock.
    pub(super) fn abandoned(&self, act: Act) -> Result<Vec<PathBuf>, StoreError> {
        let entries = self.entries(act)?;
        let mut gone: Vec<PathBuf> = entries
            .gone
            .into_iter()
            .map(|id| self.gone_dir(id))
            .collect();
        for id in entries.drafts {
            let dir = self.draft_dir(id);
            let living = match open_lock(&dir.join(LOCK), false) {
                Ok(file) => Flock::lock(file, FlockArg::LockExclusiveNonblock)
                    .err()
                    .map(|(_, errno)| errno),
                Err(e) if e.kind() == ErrorKind::NotFound => None,
                Err(e) => return Err(io(act, &dir)(e)),
            };
            match living {
                // Its writer may be removing it.
                None if is_there(&dir) => gone.push(self.retire(act, &dir, id)?),
                None | Some(Errno::EWOULDBLOCK) => {}
                Some(errno) => return Err(io(act, &dir)(errno.into())),
            }
        }
        Ok(gone)
    }

    /// Deletes directories that were hidden before.
    pub(super) fn delete(&self, act: Act, gone: &[PathBuf]) -> Result<(), StoreError> {
        gone.iter()
            .try_for_each(|dir| self.disk.remove_tree(dir).map_err(io(act, dir)))
    }
}

/// True unless the path certainly does not exist.
pub(super) fn is_there(path: &Path) -> bool {
    !matches!(path.symlink_metadata(), Err(e) if e.kind() == ErrorKind::NotFound)
}

/// Opens a lock file.
pub(super) fn open_lock(path: &Path, create: bool) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW);
    options.open(path)
}

/// Locks a checkpoint until the result is dropped. Creates the lock file if it is missing, as it
/// may be after the checkpoint was copied.
pub(super) fn lock_set(dir: &Path, how: FlockArg) -> Result<Flock<File>, Errno> {
    let errno = |e: std::io::Error| Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO));
    let file = open_lock(&dir.join(LOCK), true).map_err(errno)?;
    Flock::lock(file, how).map_err(|(_, errno)| errno)
}
