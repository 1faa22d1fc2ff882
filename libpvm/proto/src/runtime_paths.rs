//! Paths of a virtual machine's socket and files on a host.
//!
//! Each user has one directory per virtual machine, with mode 0700: `/tmp/sempa-<uid>/<vm>`. The
//! variable `PVM_TMP` replaces `/tmp`, and `PVM_VMID` names the virtual machine (`pvm` by default).
//! If another user has taken the name of the user's directory, the directory has another name
//! (`find_runtime_paths` in the crate `sempa-socket`).
//! The user's runtime directory is not suitable: it is removed at the user's last logout, and a
//! daemon outlives the login that started it. Task images contain process memory; if `/tmp` is on a
//! disk, the daemon stores images in another directory.

use std::path::{Path, PathBuf};
use thiserror::Error;

/// Maximum length, in bytes, of the name of a virtual machine. The limit keeps socket paths below
/// the kernel's limit of 107 bytes.
pub const VM_NAME_BYTES_MAX: usize = 32;

/// Name of the file in which a load watcher records the number of processors to which guests are
/// confined. If the load watcher is killed, its successor reads the file.
pub const GUEST_CPUS_FILE: &str = "confined";
/// Name of the resource manager's database file in the directory of the virtual machine.
pub const RM_DATABASE_FILE: &str = "rm.redb";

/// Error for a value of `PVM_VMID` that cannot be a directory name; contains the value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "PVM_VMID={0:?} cannot name a virtual machine: use at most {VM_NAME_BYTES_MAX} letters, digits, '-', '_' or '.'"
)]
pub struct VmNameError(pub String);

/// Paths of one virtual machine on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimePaths {
    dir: PathBuf,
    vm_name: String,
    /// Parent directory of the images, if images are not stored in `dir`.
    image_root: Option<PathBuf>,
}

impl RuntimePaths {
    /// Derives the paths of a user from environment variables; `env` returns the value of a
    /// variable.
    ///
    /// # Errors
    /// The value of `PVM_VMID` cannot be a directory name.
    pub fn from_env(uid: u32, env: impl Fn(&str) -> Option<String>) -> Result<Self, VmNameError> {
        let non_empty_var = |name: &str| env(name).filter(|value| !value.is_empty());
        let vm_name = non_empty_var("PVM_VMID").unwrap_or_else(|| "pvm".to_string());
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if vm_name.len() > VM_NAME_BYTES_MAX
            || !vm_name.chars().all(is_allowed)
            || vm_name.starts_with('.')
        {
            return Err(VmNameError(vm_name));
        }
        let tmp_dir = non_empty_var("PVM_TMP").unwrap_or_else(|| "/tmp".to_string());
        Ok(Self {
            dir: Path::new(&tmp_dir)
                .join(format!("sempa-{uid}"))
                .join(&vm_name),
            vm_name,
            image_root: None,
        })
    }

    pub fn vm_name(&self) -> &str {
        &self.vm_name
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the directory of all virtual machines of the user.
    pub fn root(&self) -> &Path {
        self.dir.parent().unwrap_or(&self.dir)
    }

    /// Returns the paths with `root` as the directory of all virtual machines of the user.
    #[must_use]
    pub fn with_root(self, root: &Path) -> Self {
        Self {
            dir: root.join(&self.vm_name),
            ..self
        }
    }

    /// Path of the socket on which the daemon accepts tasks.
    pub fn daemon_socket_path(&self) -> PathBuf {
        self.dir.join("pvmd.sock")
    }

    /// Path of the lock file of the running daemon. The file contains the daemon's process id.
    pub fn lock_file(&self) -> PathBuf {
        self.dir.join("pvmd.lock")
    }

    /// Path of the daemon's log file, which also contains the output of tasks without another
    /// destination.
    pub fn log_file(&self) -> PathBuf {
        self.dir.join("pvml")
    }

    /// Path of the master's log of committed migrations.
    pub fn migration_log(&self) -> PathBuf {
        self.dir.join("moves")
    }

    /// Path of the master's configuration file for the ssh that starts daemons.
    pub fn ssh_config(&self) -> PathBuf {
        self.dir.join("ssh_config")
    }

    /// Returns the paths with `dir` as the parent directory of the images.
    #[must_use]
    pub fn with_image_root(self, dir: PathBuf) -> Self {
        Self {
            image_root: Some(dir),
            ..self
        }
    }

    /// Returns the parent directory of all image directories.
    pub fn image_root(&self) -> &Path {
        self.image_root.as_ref().unwrap_or(&self.dir)
    }

    /// Path of the directory of the images of one migration.
    pub fn image_dir(&self, migration: crate::ids::MigrationId) -> PathBuf {
        self.image_root().join(format!("images-{}", migration.0))
    }

    /// Path of the socket over which a daemon and its tasker transfer post-copy and pre-copy memory
    /// of one migration.
    pub fn memory_socket_path(&self, migration: crate::ids::MigrationId) -> PathBuf {
        self.dir.join(format!("memory-{}", migration.0))
    }

    /// Returns the path of the resume token, the file from which the quiesced library of a migrated
    /// task learns that it must reconnect.
    pub fn resume_token_path(&self, migration: crate::ids::MigrationId) -> PathBuf {
        self.dir.join(format!("resume-{}", migration.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The environment variables determine the directory. A value that cannot be a directory name
    /// is refused.
    #[test]
    fn paths_follow_the_environment() {
        let paths_from = |vars: &[(&str, &str)]| {
            let vars: Vec<(String, String)> = vars
                .iter()
                .map(|(k, v)| (k.to_string(), v.to_string()))
                .collect();
            RuntimePaths::from_env(7, move |name| {
                vars.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone())
            })
        };
        assert_eq!(
            paths_from(&[]).expect("good").daemon_socket_path(),
            Path::new("/tmp/sempa-7/pvm/pvmd.sock")
        );
        let paths = paths_from(&[("PVM_TMP", "/var/x"), ("PVM_VMID", "b")]).expect("good");
        assert_eq!(paths.dir(), Path::new("/var/x/sempa-7/b"));
        let id = crate::ids::MigrationId(3);
        assert_eq!(paths.image_dir(id), Path::new("/var/x/sempa-7/b/images-3"));
        let paths_with_image_root = paths.with_image_root("/dev/shm/x".into());
        assert_eq!(
            paths_with_image_root.image_dir(id),
            Path::new("/dev/shm/x/images-3")
        );
        assert_eq!(
            paths_with_image_root.resume_token_path(id),
            Path::new("/var/x/sempa-7/b/resume-3")
        );
        for invalid_name in ["../x", "a/b", ".x", &"x".repeat(40)] {
            assert!(
                paths_from(&[("PVM_VMID", invalid_name)]).is_err(),
                "{invalid_name}"
            );
        }
    }
}
