//! A complete checkpoint that is open for reading.

use super::SetInfo;
use super::ended;
use super::error::{Act, StoreError, failed, io};
use super::id::SetId;
use super::manifest::{self, Manifest, Part, part_name};
use super::part::{self, Stopped};
use super::seal::{Broken, Opener, What};
use super::shared::{Shared, is_there, lock_set};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use sempa_proto::Tid;
use std::fmt;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A complete checkpoint whose manifest is verified. While this exists the checkpoint is not
/// removed.
pub struct Set {
    shared: Arc<Shared>,
    dir: PathBuf,
    info: SetInfo,
    manifest: Manifest,
    _lock: Flock<File>,
}

impl Set {
    pub(super) fn open(shared: Arc<Shared>, id: SetId) -> Result<Set, StoreError> {
        let act = Act::Read;
        let dir = shared.set_dir(id);
        let lock = lock_set(&dir, FlockArg::LockSharedNonblock).map_err(|errno| match errno {
            // It is being removed.
            Errno::EWOULDBLOCK | Errno::ENOENT => StoreError::NoSet(id),
            _ => io(act, &dir)(errno.into()),
        })?;
        // A remover locks the checkpoint exclusively, but may have done so before this lock was
        // taken.
        if !is_there(&dir) {
            return Err(StoreError::NoSet(id));
        }
        let (manifest, bytes) = manifest::read(act, &dir, id, &shared.secret)?;
        let info = SetInfo {
            ended: ended::read(&dir),
            ..manifest.info(id, bytes)
        };
        Ok(Set {
            shared,
            dir,
            info,
            manifest,
            _lock: lock,
        })
    }

    pub fn info(&self) -> &SetInfo {
        &self.info
    }

    /// Returns the description that the writer has added.
    pub fn meta(&self) -> &[u8] {
        &self.manifest.meta
    }

    /// Unpacks the images of a task into a new directory (mode 0700, files 0600) and returns their
    /// bytes. On success they equal the images that were added.
    ///
    /// # Errors
    /// The directory does not exist afterwards. If it existed before, it is unchanged.
    pub fn unpack(&self, tid: Tid, to: &Path) -> Result<u64, StoreError> {
        let part = self.part(tid)?;
        DirBuilder::new()
            .mode(0o700)
            .create(to)
            .map_err(io(Act::Unpack, to))?;
        let unpacked = self.unpack_part(part, to);
        if unpacked.is_err() {
            // The first error is reported; it also explains a failure to remove.
            let _ = std::fs::remove_dir_all(to);
        }
        unpacked
    }

    /// Passes the decrypted stream of a task to `put`, in pieces, for
    /// [`Draft::add_copy`](super::Draft::add_copy). Each piece is authenticated before it is
    /// passed; only success means that the stream is complete and unchanged.
    ///
    /// # Errors
    /// The checkpoint was changed, or `put` failed.
    pub fn pour(
        &self,
        tid: Tid,
        mut put: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> Result<(), StoreError> {
        let act = Act::Read;
        self.read_part(act, self.part(tid)?, |opener, path| {
            let broken = |why| manifest::broken(act, path, &self.shared.secret, why);
            loop {
                match opener.next(usize::MAX).map_err(broken)? {
                    [] => return Ok(()),
                    piece => put(piece).map_err(io(act, path))?,
                }
            }
        })
    }

    fn part(&self, tid: Tid) -> Result<&Part, StoreError> {
        let id = self.info.id;
        self.manifest
            .parts
            .iter()
            .find(|part| part.tid == tid)
            .ok_or(StoreError::NoPart { id, tid })
    }

    fn unpack_part(&self, part: &Part, to: &Path) -> Result<u64, StoreError> {
        let act = Act::Unpack;
        self.read_part(act, part, |opener, path| {
            let broken = |why| manifest::broken(act, path, &self.shared.secret, why);
            let images_bytes = part::unpack(opener, to).map_err(|stopped| match stopped {
                Stopped::Broken(why) => broken(why),
                Stopped::Write(file, e, done) => {
                    failed(act, &file, e, Some(part.images_bytes.saturating_sub(done)))
                }
            })?;
            match images_bytes == part.images_bytes {
                true => Ok(images_bytes),
                false => Err(broken(Broken::Changed(
                    "its images are not as long as the manifest says".into(),
                ))),
            }
        })
    }

    /// Reads a part completely and verifies that it is the one that was added.
    fn read_part<T>(
        &self,
        act: Act,
        part: &Part,
        read: impl FnOnce(&mut Opener<File>, &Path) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let secret = &self.shared.secret;
        let path = self.dir.join(part_name(part.tid));
        let broken = |why| manifest::broken(act, &path, secret, why);
        let changed = |why: &str| broken(Broken::Changed(why.into()));
        let (file, bytes) = manifest::open_file(act, &path)?;
        if bytes != part.bytes {
            return Err(changed("its length is not that which the manifest says"));
        }
        let what = What::Part(self.info.id, part.tid);
        let mut opener = Opener::new(secret, what, file, bytes).map_err(broken)?;
        let result = read(&mut opener, &path)?;
        if opener.end().map_err(broken)? != part.blake3 {
            return Err(changed("its hash is not that which the manifest says"));
        }
        Ok(result)
    }
}

impl fmt::Debug for Set {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Set")
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}
