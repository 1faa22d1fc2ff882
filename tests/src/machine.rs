//! What the machine has: rights, programs, the dump engine, and the installed programs of Sempa.

use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs that the testbed calls, each with its Debian package.
const PROGRAMS: [(&str, &str); 4] = [
    ("/usr/sbin/sshd", "openssh-server"),
    ("/usr/bin/ssh", "openssh-client"),
    ("/usr/bin/nsenter", "util-linux"),
    ("/usr/bin/setpriv", "util-linux"),
];

/// True if this process has uid 0.
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Returns in one line why no testbed can be made on this machine; `None` if one can.
pub fn lacks() -> Option<String> {
    if !is_root() {
        return Some("hosts of their own need root (namespaces, sshd, CRIU)".to_string());
    }
    if let Some(why) = lacks_namespaces() {
        return Some(format!(
            "root may not make hosts of their own here ({why}): a container has to be privileged"
        ));
    }
    if find_in_path("ip").is_none() {
        return Some("the program ip is missing: install iproute2".to_string());
    }
    PROGRAMS
        .iter()
        .find(|(path, _)| !Path::new(path).exists())
        .map(|(path, package)| format!("{path} is missing: install {package}"))
}

/// Returns why the folders of a testbed are not on a disk on this machine; `None` if they are.
pub fn lacks_disk() -> Option<String> {
    let memory = nix::sys::statfs::statfs("/tmp")
        .is_ok_and(|of| of.filesystem_type() == nix::sys::statfs::TMPFS_MAGIC);
    memory.then(|| "/tmp is in memory here".to_string())
}

/// Returns why the kernel refuses namespaces to root; `None` if it permits them.
fn lacks_namespaces() -> Option<String> {
    match Command::new("unshare")
        .args(["--mount", "--net", "--uts", "--pid", "--fork", "true"])
        .output()
    {
        Ok(done) if done.status.success() => None,
        Ok(done) => Some(String::from_utf8_lossy(&done.stderr).trim().to_string()),
        Err(error) => Some(format!("unshare: {error}")),
    }
}

/// Returns the path of a program in PATH or in the system folders that an ordinary PATH may lack.
pub fn find_in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':')
        .chain(["/usr/sbin", "/sbin"])
        .map(|dir| Path::new(dir).join(name))
        .find(|file| file.is_file())
}

/// Returns the folder of built programs: the folder of the running program, or its parent if that
/// folder is `deps`.
pub fn build_folder() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().unwrap_or(Path::new("/"));
    Ok(if folder.ends_with("deps") {
        folder.parent().unwrap_or(folder).to_path_buf()
    } else {
        folder.to_path_buf()
    })
}

/// Returns the folder where `cargo xtask install` or `cargo xtask test` has installed the programs
/// for the tests: `SEMPA_PREFIX`, or `sempa-prefix` in the target folder.
///
/// # Errors
/// Nothing is installed there.
pub fn prefix() -> Result<PathBuf> {
    let place = match std::env::var_os("SEMPA_PREFIX") {
        Some(place) => PathBuf::from(place),
        None => build_folder()?
            .parent()
            .unwrap_or(Path::new("/"))
            .join("sempa-prefix"),
    };
    if !place.join("bin/pvmd").exists() {
        bail!(
            "no installed programs in {}: run cargo xtask test once, which installs them",
            place.display()
        );
    }
    Ok(place.canonicalize()?)
}

/// Returns the dump engine that the tasker would use. The search order is that of the tasker.
pub fn engine() -> Option<PathBuf> {
    let named = std::env::var_os("SEMPA_CRIU").map(PathBuf::from);
    let usual = ["/opt/sempa/criu/sbin/criu", "/opt/criu/sbin/criu"].map(PathBuf::from);
    named
        .into_iter()
        .chain(usual)
        .find(|file| file.is_file())
        .or_else(|| find_in_path("criu"))
}
