//! Where a virtual machine keeps its socket and files on a host.
//!
//! One directory per user and virtual machine, mode 0700: `/tmp/sempa-<uid>/<vm>`. `PVM_TMP` replaces `/tmp`, `PVM_VMID`
//! names the virtual machine (`pvm` by default). The user's runtime directory is not used: it goes when his last login
//! ends, and a daemon outlives the login that started it. Images of tasks have what is in their memory; where `/tmp` is a disk
//! the daemon keeps them in a directory elsewhere.

use std::path::{Path, PathBuf};

/// Longest name of a virtual machine, so that socket paths stay below the kernel's 107 bytes.
pub const VM_NAME_BYTES_MAX: usize = 32;

/// Name of a load watcher's note: on how many processors it keeps guests. For the next one, if it is killed.
pub const CONFINED_FILE: &str = "confined";
/// Name of the resource manager's file in the directory of its virtual machine.
pub const STATE_FILE: &str = "rm.redb";

/// The directory of one virtual machine on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    dir: PathBuf,
    vm: String,
    /// Where images are, if that is another directory.
    images: Option<PathBuf>,
}

impl Place {
    /// The place for a user, by the environment; `env` looks a variable up.
    ///
    /// # Errors
    /// One sentence when `PVM_VMID` cannot be a directory name.
    pub fn of(uid: u32, env: impl Fn(&str) -> Option<String>) -> Result<Place, String> {
        let set = |name: &str| env(name).filter(|value| !value.is_empty());
        let vm = set("PVM_VMID").unwrap_or_else(|| "pvm".to_string());
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if vm.len() > VM_NAME_BYTES_MAX || !vm.chars().all(good) || vm.starts_with('.') {
            return Err(format!(
                "PVM_VMID={vm:?} cannot name a virtual machine: use at most {VM_NAME_BYTES_MAX} letters, digits, '-', '_' or '.'"
            ));
        }
        let tmp = set("PVM_TMP").unwrap_or_else(|| "/tmp".to_string());
        Ok(Place {
            dir: Path::new(&tmp).join(format!("sempa-{uid}")).join(&vm),
            vm,
            images: None,
        })
    }

    /// Name of the virtual machine.
    pub fn vm(&self) -> &str {
        &self.vm
    }

    /// The directory itself.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The daemon's socket for tasks.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("pvmd.sock")
    }

    /// Locked by the living daemon; holds its process number.
    pub fn lock(&self) -> PathBuf {
        self.dir.join("pvmd.lock")
    }

    /// The daemon's log, and the output of tasks that nobody collects.
    pub fn log(&self) -> PathBuf {
        self.dir.join("pvml")
    }

    /// The master's record of committed moves.
    pub fn moves(&self) -> PathBuf {
        self.dir.join("moves")
    }

    /// The master's settings for the ssh that starts daemons.
    pub fn ssh_settings(&self) -> PathBuf {
        self.dir.join("ssh_config")
    }

    /// The same, with images in another directory.
    #[must_use]
    pub fn with_images_in(self, dir: PathBuf) -> Place {
        Place {
            images: Some(dir),
            ..self
        }
    }

    /// The directory in which those of images are.
    pub fn all_images(&self) -> &Path {
        self.images.as_ref().unwrap_or(&self.dir)
    }

    /// Directory of the images of one move.
    pub fn images(&self, migration: crate::ids::MigrationId) -> PathBuf {
        self.all_images().join(format!("images-{}", migration.0))
    }

    /// Socket on which a daemon and its tasker pass on memory that follows the task of one move.
    pub fn memory_way(&self, migration: crate::ids::MigrationId) -> PathBuf {
        self.dir.join(format!("memory-{}", migration.0))
    }

    /// File that wakes the quiesced library of one move.
    pub fn token(&self, migration: crate::ids::MigrationId) -> PathBuf {
        self.dir.join(format!("resume-{}", migration.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_follows_the_environment() {
        let of = |vars: &[(&str, &str)]| {
            let vars: Vec<(String, String)> = vars
                .iter()
                .map(|(k, v)| (k.to_string(), v.to_string()))
                .collect();
            Place::of(7, move |name| {
                vars.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone())
            })
        };
        assert_eq!(
            of(&[]).expect("good").socket(),
            Path::new("/tmp/sempa-7/pvm/pvmd.sock")
        );
        let own = of(&[("PVM_TMP", "/var/x"), ("PVM_VMID", "b")]).expect("good");
        assert_eq!(own.dir(), Path::new("/var/x/sempa-7/b"));
        let id = crate::ids::MigrationId(3);
        assert_eq!(own.images(id), Path::new("/var/x/sempa-7/b/images-3"));
        let elsewhere = own.with_images_in("/dev/shm/x".into());
        assert_eq!(elsewhere.images(id), Path::new("/dev/shm/x/images-3"));
        assert_eq!(elsewhere.token(id), Path::new("/var/x/sempa-7/b/resume-3"));
        for bad in ["../x", "a/b", ".x", &"x".repeat(40)] {
            assert!(of(&[("PVM_VMID", bad)]).is_err(), "{bad}");
        }
    }
}
