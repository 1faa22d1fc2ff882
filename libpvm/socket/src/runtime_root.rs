//! Finds the directory of a user's virtual machines in a directory that all users share.
//!
//! The usual directory is `sempa-UID`. Anybody could have made a file or a directory with this name
//! before the user did. The user's directory then has another name: `sempa-UID-TAG`, with a random
//! tag. Daemons, libraries and consoles find it by its properties: only a directory that belongs to
//! the user and that nobody else can enter is used, and nobody else can make such a directory.
//!
//! The shared directory must have the sticky bit, as `/tmp` has it; otherwise other users could
//! replace any directory in it.

use sempa_proto::runtime_paths::RuntimePaths;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, Metadata};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Permission bits of the group and of others.
const FOREIGN_MODE_BITS: u32 = 0o077;

/// Returns the paths of a virtual machine in the directory that its daemon uses. `paths` are the
/// usual paths; they are returned unchanged unless another user has taken the name of the user's
/// directory, or had taken it when the daemon was started. Creates nothing.
pub fn find_runtime_paths(paths: RuntimePaths, uid: u32) -> RuntimePaths {
    let root = match Root::find(paths.root(), uid, paths.vm_name()) {
        Root::Usable(root) => root,
        Root::Taken => return paths,
    };
    paths.with_root(&root)
}

/// Returns a directory for the virtual machines of a user, in which the directory `vm_dir_name`
/// exists or can be made: `usual_root`, which may not exist yet, or an existing directory with
/// another name if another user has taken `usual_root`. Makes such a directory if there is none.
///
/// # Errors
/// The directory cannot be made.
pub fn find_or_create_root(usual_root: &Path, uid: u32, vm_dir_name: &str) -> io::Result<PathBuf> {
    if let Root::Usable(root) = Root::find(usual_root, uid, vm_dir_name) {
        return Ok(root);
    }
    let mut name = usual_root.as_os_str().to_os_string();
    name.push(format!("-{:016x}", RandomState::new().hash_one(uid)));
    DirBuilder::new().mode(0o700).create(&name)?;
    // Another daemon may have made a directory at the same time. Both then use the same one.
    match Root::find(usual_root, uid, vm_dir_name) {
        Root::Usable(root) => Ok(root),
        Root::Taken => Err(io::Error::other("the new directory is not private")),
    }
}

/// The result of a search.
enum Root {
    Usable(PathBuf),
    /// Another user has taken the usual name, and the user has no other directory.
    Taken,
}

impl Root {
    fn find(usual_root: &Path, uid: u32, vm_dir_name: &str) -> Self {
        let usual_metadata = fs::symlink_metadata(usual_root);
        let is_own = usual_metadata
            .as_ref()
            .is_ok_and(|metadata| metadata.uid() == uid);
        let is_free = usual_metadata.is_err();
        // An own directory that others can enter is used, too: the daemon refuses it and says why.
        if is_own && usual_root.join(vm_dir_name).exists() {
            return Self::Usable(usual_root.to_path_buf());
        }
        let mut other_roots = other_roots(usual_root, uid);
        let has_vm = |root: &&PathBuf| root.join(vm_dir_name).exists();
        if let Some(root) = other_roots.iter().find(has_vm) {
            return Self::Usable(root.clone());
        }
        if is_own || is_free {
            return Self::Usable(usual_root.to_path_buf());
        }
        match other_roots.is_empty() {
            true => Self::Taken,
            false => Self::Usable(other_roots.swap_remove(0)),
        }
    }
}

/// Returns the private directories of the user with a name that begins with that of `usual_root`
/// and has a tag, sorted by name.
fn other_roots(usual_root: &Path, uid: u32) -> Vec<PathBuf> {
    let (Some(parent), Some(usual_name)) = (usual_root.parent(), usual_root.file_name()) else {
        return Vec::new();
    };
    let is_candidate = |name: &OsStr| {
        let rest = name.as_bytes().strip_prefix(usual_name.as_bytes());
        rest.is_some_and(|rest| rest.len() > 1 && rest[0] == b'-')
    };
    let is_private = |metadata: &Metadata| {
        metadata.is_dir() && metadata.uid() == uid && metadata.mode() & FOREIGN_MODE_BITS == 0
    };
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut roots: Vec<PathBuf> = entries
        .filter(|entry| is_candidate(&entry.file_name()))
        // The metadata of an entry is that of a link itself.
        .filter(|entry| entry.metadata().is_ok_and(|metadata| is_private(&metadata)))
        .map(|entry| entry.path())
        .collect();
    roots.sort_unstable();
    roots
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    const STRANGER: u32 = 4711;
    const VM: &str = "pvm";

    fn own_uid() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    fn paths_in(dir: &Path) -> RuntimePaths {
        let dir_text = dir.to_str().expect("text").to_string();
        RuntimePaths::from_env(own_uid(), |name| {
            (name == "PVM_TMP").then(|| dir_text.clone())
        })
        .expect("a good name")
    }

    fn make_private(path: &Path) {
        fs::create_dir(path).expect("the test's own folder");
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).expect("ours");
    }

    #[test]
    fn free_or_own_name_is_used() {
        let dir = tempfile::tempdir().expect("a folder");
        let paths = paths_in(dir.path());
        assert_eq!(find_runtime_paths(paths.clone(), own_uid()), paths);
        let root = find_or_create_root(paths.root(), own_uid(), VM).expect("usable");
        assert_eq!(root, paths.root());
        assert!(!root.exists(), "the caller makes it");
        make_private(&root);
        assert_eq!(find_runtime_paths(paths.clone(), own_uid()), paths);
    }

    /// Of several directories of the user, the one with the virtual machine is used, else the usual
    /// one. A virtual machine is also found in another directory if the usual name is free again.
    /// Links and directories that others can enter are not used.
    #[test]
    fn directory_with_virtual_machine_is_used() {
        let dir = tempfile::tempdir().expect("a folder");
        let paths = paths_in(dir.path());
        let root_name = paths.root().to_str().expect("text");
        let tagged_path = |tag: &str| PathBuf::from(format!("{root_name}-{tag}"));
        let found_root = || {
            let root = find_or_create_root(paths.root(), own_uid(), VM).expect("usable");
            let found_paths = find_runtime_paths(paths.clone(), own_uid());
            assert_eq!(found_paths, paths.clone().with_root(&root));
            root
        };
        let open_dir = tagged_path("0");
        make_private(&open_dir);
        make_private(&open_dir.join(VM));
        fs::set_permissions(&open_dir, fs::Permissions::from_mode(0o755)).expect("ours");
        let elsewhere = dir.path().join("elsewhere");
        make_private(&elsewhere);
        make_private(&elsewhere.join(VM));
        symlink(&elsewhere, tagged_path("1")).expect("ours");
        assert_eq!(found_root(), paths.root(), "the free name");
        let (other_root, vm_root) = (tagged_path("2"), tagged_path("3"));
        make_private(&other_root);
        make_private(&vm_root);
        assert_eq!(found_root(), paths.root(), "the free name");
        make_private(&vm_root.join(VM));
        assert_eq!(found_root(), vm_root);
        make_private(paths.root());
        assert_eq!(found_root(), vm_root);
        make_private(&paths.root().join(VM));
        assert_eq!(found_root(), paths.root());
        fs::remove_dir(paths.root().join(VM)).expect("ours");
        fs::remove_dir(vm_root.join(VM)).expect("ours");
        assert_eq!(found_root(), paths.root());
    }

    /// If the name is taken, all programs find the same private directory of the user. Links and
    /// directories that others can enter are not used.
    #[test]
    #[ignore = "system tier: needs root"]
    fn taken_name_leads_to_private_directory() {
        assert!(
            nix::unistd::geteuid().is_root(),
            "cannot run here: needs root"
        );
        let dir = tempfile::tempdir().expect("a folder");
        let paths = paths_in(dir.path());
        make_private(paths.root());
        chown(paths.root(), Some(STRANGER), None).expect("root may");
        let root_name = paths.root().to_str().expect("text");
        let open_dir = PathBuf::from(format!("{root_name}-0"));
        fs::create_dir(&open_dir).expect("ours");
        fs::set_permissions(&open_dir, fs::Permissions::from_mode(0o755)).expect("ours");
        let stranger_dir = PathBuf::from(format!("{root_name}-1"));
        make_private(&stranger_dir);
        chown(&stranger_dir, Some(STRANGER), None).expect("root may");
        symlink(&open_dir, format!("{root_name}-2")).expect("ours");
        assert_eq!(find_runtime_paths(paths.clone(), own_uid()), paths);
        let root = find_or_create_root(paths.root(), own_uid(), VM).expect("made");
        assert!(![paths.root(), &open_dir, &stranger_dir].contains(&root.as_path()));
        let metadata = fs::symlink_metadata(&root).expect("there");
        assert_eq!(metadata.mode() & 0o7777, 0o700);
        let again = find_or_create_root(paths.root(), own_uid(), VM).expect("there");
        assert_eq!(again, root);
        let found_paths = find_runtime_paths(paths.clone(), own_uid());
        assert_eq!(found_paths, paths.clone().with_root(&root));
        // The running virtual machine is also found when the other user gives the name back.
        make_private(found_paths.dir());
        fs::remove_dir(paths.root()).expect("root may");
        assert_eq!(find_runtime_paths(paths.clone(), own_uid()), found_paths);
        fs::remove_dir(found_paths.dir()).expect("ours");
        assert_eq!(find_runtime_paths(paths.clone(), own_uid()), paths);
    }
}
