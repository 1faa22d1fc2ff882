//! Environment variables that several modules read.

use nix::unistd::getuid;

/// Returns an environment variable if it is set and not empty.
pub(crate) fn env_var(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns the environment variable `name` for
/// [`sempa_proto::runtime_paths::RuntimePaths::from_env`], or `None` if the variable is not set or
/// empty. The directory in `PVM_TMP` is made absolute, because tasks and migrations use the
/// directory from other working directories.
pub(crate) fn runtime_paths_variable(name: &str) -> Option<String> {
    let value = env_var(name)?;
    if name != "PVM_TMP" {
        return Some(value);
    }
    let absolute_path = std::path::absolute(&value).map(|path| path.to_string_lossy().into_owned());
    Some(absolute_path.unwrap_or(value))
}

/// Returns the reason why root may not run a daemon on this host; `None` if the user is not root,
/// or if root is allowed by the environment or by the master (`master_allows_root`).
pub(crate) fn root_refusal(master_allows_root: bool) -> Option<String> {
    let is_allowed = master_allows_root || std::env::var_os("PVM_ALLOW_ROOT").is_some();
    (getuid().is_root() && !is_allowed)
        .then(|| "root may not run a virtual machine unless PVM_ALLOW_ROOT is set: use another user, or set it".into())
}
