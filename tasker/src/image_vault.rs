//! Keeps the images of a user's tasks out of the user's reach.
//!
//! Images are code that root's engine runs. So the engine writes them into a directory that only
//! root can access, and they leave it only sealed with the site key ([`checkpoint::seal`]), as one
//! file in the image directory of the daemon. The tasker of the target opens the seal into a
//! directory of its own.

use crate::host_account::HostAccount;
use crate::image_manifest::{ImageManifest, prepare_image_dir};
use crate::locked_dir;
use crate::namespace::Namespace;
use crate::target::claim_failure;
use crate::task_user::{TaskUser, with_own_file_rights};
use checkpoint::criu::image_policy::{
    RestoreLimits, RestorePolicy, UserIdentity, check_access_as_user, verify_images,
};
use checkpoint::engine::{TaskIds, TaskNamespaces};
use checkpoint::proc;
use checkpoint::seal::{
    SealContext, SiteKeys, UnsealLimits, seal_images, site_key_path, unseal_images,
};
use nix::fcntl::Flock;
use sempa_proto::Tid;
use sempa_proto::migration::Failure;
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Directory of the service, which only root can change.
const SERVICE_DIR: &str = "/run/sempa";
/// Prefix of the name of a tasker's directory below [`SERVICE_DIR`].
const DIR_PREFIX: &str = "images-";
/// Name of the file with sealed images in the image directory of the daemon.
const SEALED_FILE: &str = "sealed-images";
/// Image of the control groups of a task. The tasker of the target creates the groups.
const CGROUP_IMAGE: &str = "cgroup.img";
/// Size of the buffer between the seal and its file.
const WRITE_BUFFER_BYTES: usize = 1 << 20;

/// The private directory and the keys of a tasker. Dropping this value removes the directory.
#[derive(Debug)]
pub(crate) struct ImageVault {
    dir: PathBuf,
    /// Other taskers remove directories that are not locked.
    _lock: Flock<File>,
    user: TaskUser,
    account: HostAccount,
    /// The site keys, or the reason why there are none: without keys no task migrates.
    keys: Result<Arc<SiteKeys>, String>,
    created_dirs: AtomicU64,
}

impl ImageVault {
    /// Creates the private directory for the images of this user's tasks, and reads the site keys.
    /// Removes the directories of killed taskers.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub(crate) fn create(user: &TaskUser, account: HostAccount) -> io::Result<Self> {
        with_own_file_rights(|| {
            let service_dir = Path::new(SERVICE_DIR);
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(service_dir)?;
            locked_dir::remove_stale(service_dir, DIR_PREFIX, |dir| {
                // The next tasker removes the directory if this one cannot.
                let _ = fs::remove_dir_all(dir);
            });
            let (dir, lock) = locked_dir::create(service_dir, DIR_PREFIX)?;
            Ok(Self {
                dir,
                _lock: lock,
                user: user.clone(),
                account,
                keys: load_keys(),
                created_dirs: AtomicU64::new(0),
            })
        })
    }

    /// Reads the site keys again. Returns the reason if there are none.
    ///
    /// # Errors
    /// The reason, with what the administrator can do.
    pub(crate) fn reload_keys(&mut self) -> Result<(), String> {
        self.keys = with_own_file_rights(load_keys);
        self.check_keys()
    }

    /// Checks that there are site keys.
    ///
    /// # Errors
    /// As for [`ImageVault::reload_keys`].
    pub(crate) fn check_keys(&self) -> Result<(), String> {
        self.keys.as_ref().map(drop).map_err(String::clone)
    }

    /// Creates an empty directory for the images of a task. `exchange_dir` is the image directory
    /// of the daemon.
    ///
    /// # Errors
    /// There are no site keys, or the directory cannot be created.
    pub(crate) fn new_image_dir(&self, tid: Tid, exchange_dir: &Path) -> Result<ImageDir, Failure> {
        let keys = self.keys.clone().map_err(Failure::Engine)?;
        let number = self.created_dirs.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(number.to_string());
        with_own_file_rights(|| prepare_image_dir(&path))?;
        let context = SealContext {
            uid: self.user.uid(),
            user_name: self.user.name().into(),
            tid,
        };
        Ok(ImageDir::Private(Arc::new(PrivateDir {
            path,
            exchange_dir: exchange_dir.to_path_buf(),
            keys,
            context,
            policy: restore_policy(&self.user),
            account: self.account.clone(),
            claimed_bytes: AtomicU64::new(0),
        })))
    }

    /// Returns the namespaces of a task for an engine that runs inside them.
    ///
    /// # Errors
    /// The namespace has ended.
    pub(crate) fn task_namespaces(&self, namespace: &Namespace) -> io::Result<TaskNamespaces> {
        let mount_namespace = namespace.open_mount_namespace()?;
        Ok(TaskNamespaces {
            pid_namespace: Arc::new(namespace.open()?),
            mount_namespace: Arc::new(mount_namespace.ok_or(io::ErrorKind::NotFound)?),
            user: TaskIds {
                uid: self.user.uid(),
                gid: self.user.gid(),
                groups: self.user.groups().to_vec(),
            },
            own_dir: self.dir.clone(),
        })
    }
}

impl Drop for ImageVault {
    fn drop(&mut self) {
        // No caller could handle the error. The next tasker removes what remains.
        let _ = with_own_file_rights(|| fs::remove_dir_all(&self.dir));
    }
}

fn load_keys() -> Result<Arc<SiteKeys>, String> {
    SiteKeys::load(&site_key_path())
        .map(Arc::new)
        .map_err(|why| format!("no task of an ordinary user can be dumped or restored: {why}"))
}

/// The directory in which the engine writes or reads the images of a task.
#[derive(Clone, Debug)]
pub(crate) enum ImageDir {
    /// The image directory of the daemon, which belongs to the same user as the tasker.
    OfDaemon(PathBuf),
    /// A directory of the tasker; the daemon only gets sealed images.
    Private(Arc<PrivateDir>),
}

/// A private directory for the images of one task. Dropping this value removes the directory.
#[derive(Debug)]
pub(crate) struct PrivateDir {
    path: PathBuf,
    /// The image directory of the daemon, with the file of sealed images.
    exchange_dir: PathBuf,
    keys: Arc<SiteKeys>,
    context: SealContext,
    /// What the images may contain.
    policy: RestorePolicy,
    account: HostAccount,
    /// Size of the images in the account.
    claimed_bytes: AtomicU64,
}

impl ImageDir {
    /// Returns the directory for the engine.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::OfDaemon(path) => path,
            Self::Private(dir) => &dir.path,
        }
    }

    /// Returns the directory next to which the daemon looks for the journal of transferred files.
    pub(crate) fn journal_dir(&self) -> &Path {
        match self {
            Self::OfDaemon(path) => path,
            Self::Private(dir) => &dir.exchange_dir,
        }
    }

    /// Removes everything in the directory, for another attempt to dump.
    ///
    /// # Errors
    /// The directory cannot be emptied.
    pub(crate) fn clear(&self) -> Result<(), Failure> {
        with_own_file_rights_if(self.is_private(), || {
            fs::remove_dir_all(self.path()).map_err(|e| Failure::Io(e.to_string()))?;
            prepare_image_dir(self.path())
        })
    }

    fn is_private(&self) -> bool {
        matches!(self, Self::Private(_))
    }

    /// Removes images of a private directory that no restore reads, and that the target would
    /// refuse.
    ///
    /// # Errors
    /// An image cannot be removed.
    pub(crate) fn remove_unused_images(&self) -> Result<(), Failure> {
        let Self::Private(dir) = self else {
            return Ok(());
        };
        match fs::remove_file(dir.path.join(CGROUP_IMAGE)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Failure::Io(format!("cannot remove {CGROUP_IMAGE}: {e}")))
            }
            _ => Ok(()),
        }
    }

    /// Hands complete images to the daemon. Returns the number of bytes that the daemon gets;
    /// `None` if the daemon reads the images themselves.
    ///
    /// # Errors
    /// The sealed images cannot be written.
    pub(crate) fn hand_out(&self) -> Result<Option<u64>, Failure> {
        let Self::Private(dir) = self else {
            return Ok(None);
        };
        let path = dir.exchange_dir.join(SEALED_FILE);
        let write_failure =
            |e: io::Error| Failure::Io(format!("cannot write {}: {e}", path.display()));
        // With the rights of the user, to whom the directory belongs.
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(write_failure)?;
        let mut output = BufWriter::with_capacity(WRITE_BUFFER_BYTES, file);
        let size =
            with_own_file_rights(|| seal_images(&dir.path, &mut output, &dir.keys, &dir.context))?;
        output.flush().map_err(write_failure)?;
        if let Err(failure) = dir.claim(size.image_bytes) {
            // No caller could handle the error; the daemon removes the directory.
            let _ = fs::remove_file(&path);
            return Err(failure);
        }
        Ok(Some(size.sealed_bytes))
    }

    /// Takes the images from the daemon, checks their seal, and checks that they contain nothing
    /// that the user could not have.
    ///
    /// # Errors
    /// There are no sealed images, their seal is not valid, or they are refused.
    pub(crate) fn take_in(&self) -> Result<(), Failure> {
        let Self::Private(dir) = self else {
            return Ok(());
        };
        let path = dir.exchange_dir.join(SEALED_FILE);
        let read_failure = |e: io::Error| Failure::Images(format!("{}: {e}", path.display()));
        // With the rights of the user, who chooses the path. A pipe must not block the tasker.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path)
            .map_err(read_failure)?;
        let metadata = file.metadata().map_err(read_failure)?;
        if !metadata.is_file() || metadata.uid() != dir.context.uid {
            return Err(Failure::Images(format!(
                "{} is not a regular file of user {}",
                path.display(),
                dir.context.user_name
            )));
        }
        // The images are larger only by runs of zeros, which become holes.
        dir.claim(metadata.len())?;
        let mut limits = UnsealLimits::default();
        limits.image_bytes_max = limits.image_bytes_max.min(dir.account.image_bytes_max());
        with_own_file_rights(|| {
            let size = unseal_images(file, &dir.path, &dir.keys, &dir.context, &limits)?;
            dir.claim(size.image_bytes)?;
            dir.verify_images()
        })
    }
}

impl PrivateDir {
    /// Adds the images of this directory to the account. The directory may have been claimed for
    /// an earlier attempt.
    fn claim(&self, bytes: u64) -> Result<(), Failure> {
        self.release();
        self.account.claim_images(bytes).map_err(claim_failure)?;
        self.claimed_bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn release(&self) {
        let bytes = self.claimed_bytes.swap(0, Ordering::Relaxed);
        self.account.release_images(bytes);
    }

    /// Checks the images of this directory.
    fn verify_images(&self) -> Result<(), Failure> {
        let manifest = ImageManifest::read(&self.path)?;
        let policy = RestorePolicy {
            other_files: manifest.own_file_names().map(String::from).collect(),
            ..self.policy.clone()
        };
        let mut opened_files = verify_images(&self.path, &policy)?;
        // The files that come with the images do not exist yet. They are created with the rights of
        // the user.
        let transferred: BTreeSet<&Path> = manifest.transferred_paths().collect();
        // A missing file is reported by the restore, with the reason why the task needs it.
        opened_files.files.retain(|file| {
            !transferred.contains(&*file.path) && file.path.try_exists().unwrap_or(true)
        });
        Ok(check_access_as_user(&opened_files, &policy.identity, None)?)
    }
}

/// Returns what a user's images may contain on this host.
fn restore_policy(user: &TaskUser) -> RestorePolicy {
    let setting = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let mut limits = RestoreLimits::default();
    for (resource, limit) in user.limits() {
        if let Some(max) = limits.resource_limits_max.get_mut(*resource as usize) {
            *max = limit.rlim_max;
        }
    }
    limits.pipe_bytes_max = setting("/proc/sys/fs/pipe-max-size").unwrap_or(limits.pipe_bytes_max);
    let status = proc::status(std::process::id().cast_signed());
    RestorePolicy {
        identity: UserIdentity {
            uid: user.uid(),
            gid: user.gid(),
            groups: user.groups().to_vec(),
        },
        limits,
        requires_no_new_privs: user.no_new_privs(),
        bounding_set: status.and_then(|status| status.capbnd).unwrap_or(0),
        other_files: BTreeSet::new(),
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        // No caller could handle the error. The directory of the tasker is removed at its end.
        let _ = with_own_file_rights(|| fs::remove_dir_all(&self.path));
        self.release();
    }
}

/// Calls `action` with the tasker's own file rights if `is_own` is true.
fn with_own_file_rights_if<T>(is_own: bool, action: impl FnOnce() -> T) -> T {
    match is_own {
        true => with_own_file_rights(action),
        false => action(),
    }
}
