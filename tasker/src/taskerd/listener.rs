//! The listening socket of the service.

use anyhow::{Context, bail};
use nix::sys::socket::{Backlog, getsockname, listen};
use sempa_proto::tasker_service::SOCKET_PATH;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Number of the first descriptor that systemd passes (sd_listen_fds(3)).
const FIRST_PASSED_FD: RawFd = 3;
/// Number of connections that may wait for the service.
const BACKLOG: i32 = 128;

/// Returns the listening socket: the one that systemd has passed, or a new one at `path`.
///
/// # Errors
/// Another service uses the path, or the socket cannot be created.
pub(crate) fn open(path: Option<PathBuf>) -> anyhow::Result<UnixListener> {
    let listener = match (path, passed_fd()?) {
        (None, Some(passed)) => passed,
        (path, _) => bind(&path.unwrap_or_else(|| SOCKET_PATH.into()))?,
    };
    listener
        .set_nonblocking(true)
        .context("the listening socket")?;
    Ok(listener)
}

/// Takes the socket that systemd has passed to this process; `None` if it has passed none.
#[allow(unsafe_code)] // A descriptor with a known number has no owner yet.
fn passed_fd() -> anyhow::Result<Option<UnixListener>> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(None);
    }
    match number("LISTEN_FDS") {
        None | Some(0) => return Ok(None),
        Some(1) => {}
        Some(count) => bail!("systemd has passed {count} sockets, and the service uses one"),
    }
    // SAFETY: systemd has opened this descriptor for this process, and nothing else uses it.
    let socket = unsafe { OwnedFd::from_raw_fd(FIRST_PASSED_FD) };
    getsockname::<nix::sys::socket::UnixAddr>(socket.as_raw_fd())
        .context("the socket that systemd has passed is no Unix socket")?;
    Ok(Some(UnixListener::from(socket)))
}

fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    let context = || format!("the socket {}", path.display());
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(context)?;
    }
    match UnixStream::connect(path) {
        Ok(_) => bail!("another pvm-taskerd listens at {}", path.display()),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            // It belongs to a service that has ended.
            fs::remove_file(path).with_context(context)?;
        }
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).with_context(context)?;
    listen(&listener, Backlog::new(BACKLOG)?).with_context(context)?;
    // Every user may connect: the kernel says who it is.
    fs::set_permissions(path, fs::Permissions::from_mode(0o666)).with_context(context)?;
    Ok(listener)
}
