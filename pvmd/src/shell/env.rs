//! Environment variables that several modules read.

use nix::unistd::getuid;

/// Returns an environment variable if it is set and not empty.
pub(crate) fn env_var(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Looks up a variable for [`sempa_proto::runtime_paths::RuntimePaths::from_env`]. The directory is
/// made absolute, because tasks and migrations use it from other directories.
pub(crate) fn runtime_paths_variable(name: &str) -> Option<String> {
    let value = env_var(name)?;
    if name != "PVM_TMP" {
        return Some(value);
    }
    let absolute = std::path::absolute(&value).map(|path| path.to_string_lossy().into_owned());
    Some(absolute.unwrap_or(value))
}

/// Returns the reason why root may not run a daemon on this host; `None` if root may.
pub(crate) fn root_refusal(allowed_by_master: bool) -> Option<String> {
    let allowed = allowed_by_master || std::env::var_os("PVM_ALLOW_ROOT").is_some();
    (getuid().is_root() && !allowed)
        .then(|| "root may not run a virtual machine unless PVM_ALLOW_ROOT is set: use another user, or set it".into())
}
