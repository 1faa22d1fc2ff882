//! Finds what the tests need on this machine: rights, programs, the dump engine, and the installed
//! programs of Sempa.

use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs that the testbed calls, each with its Debian package.
const REQUIRED_PROGRAMS: [(&str, &str); 4] = [
    ("/usr/sbin/sshd", "openssh-server"),
    ("/usr/bin/ssh", "openssh-client"),
    ("/usr/bin/nsenter", "util-linux"),
    ("/usr/bin/setpriv", "util-linux"),
];

/// True if this process has uid 0.
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Returns in one line which requirement of a testbed this machine does not meet; `None` if it
/// meets all.
pub fn unmet_requirement() -> Option<String> {
    if !is_root() {
        return Some("hosts of their own need root (namespaces, sshd, CRIU)".to_string());
    }
    if let Some(reason) = namespace_refusal() {
        return Some(format!(
            "root may not make hosts of their own here ({reason}): a container has to be privileged"
        ));
    }
    if find_in_path("ip").is_none() {
        return Some("the program ip is missing: install iproute2".to_string());
    }
    REQUIRED_PROGRAMS
        .iter()
        .find(|(path, _)| !Path::new(path).exists())
        .map(|(path, package)| format!("{path} is missing: install {package}"))
}

/// Returns a reason if the folders of a testbed are not on a disk on this machine; `None` if they
/// are.
pub fn missing_disk_reason() -> Option<String> {
    let is_in_memory = nix::sys::statfs::statfs("/tmp")
        .is_ok_and(|file_system| file_system.filesystem_type() == nix::sys::statfs::TMPFS_MAGIC);
    is_in_memory.then(|| "/tmp is in memory here".to_string())
}

/// Returns the kernel's reason for refusing namespaces to root; `None` if it permits namespaces.
fn namespace_refusal() -> Option<String> {
    match Command::new("unshare")
        .args(["--mount", "--net", "--uts", "--pid", "--fork", "true"])
        .output()
    {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_string()),
        Err(error) => Some(format!("unshare: {error}")),
    }
}

/// Returns the path of a program in PATH or in the system folders that the PATH of an ordinary user
/// may lack.
pub fn find_in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':')
        .chain(["/usr/sbin", "/sbin"])
        .map(|folder| Path::new(folder).join(name))
        .find(|file| file.is_file())
}

/// Returns the folder of built programs: the folder of the running program, or its parent if that
/// folder is `deps`.
pub fn build_folder() -> Result<PathBuf> {
    let executable = std::env::current_exe()?;
    let folder = executable.parent().unwrap_or(Path::new("/"));
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
/// The folder contains no installed programs.
pub fn installed_prefix() -> Result<PathBuf> {
    let folder = match std::env::var_os("SEMPA_PREFIX") {
        Some(folder) => PathBuf::from(folder),
        None => build_folder()?
            .parent()
            .unwrap_or(Path::new("/"))
            .join("sempa-prefix"),
    };
    if !folder.join("bin/pvmd").exists() {
        bail!(
            "no installed programs in {}: run cargo xtask test once, which installs them",
            folder.display()
        );
    }
    Ok(folder.canonicalize()?)
}

/// Returns the dump engine that the tasker would use; `None` if there is none. The search order is
/// the tasker's.
pub fn find_engine() -> Option<PathBuf> {
    let requested_engine = std::env::var_os("SEMPA_CRIU").map(PathBuf::from);
    let default_engines = [
        "/opt/sempa/criu/sbin/criu",
        "/usr/lib/sempa/criu/sbin/criu",
        "/opt/criu/sbin/criu",
    ]
    .map(PathBuf::from);
    requested_engine
        .into_iter()
        .chain(default_engines)
        .find(|file| file.is_file())
        .or_else(|| find_in_path("criu"))
}
