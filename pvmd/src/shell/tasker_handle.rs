//! A running tasker: a child of this daemon, or a process of the tasker service of the host.
//!
//! The service (`pvm-taskerd`) is root. Its taskers can migrate the tasks of ordinary users, freeze
//! them and limit them, which a tasker of the user itself cannot.

use checkpoint::descendants::kill_descendants;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::tasker_service::{
    DecodeError, PROTOCOL_VERSION, SOCKET_VARIABLE, ServiceObstacle, ServiceRefusal, ServiceReply,
    ServiceRequest, SessionId, socket_path,
};
use sempa_socket::{ExchangeError, ask_tasker_service};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;
use tokio::process::Child;
use tokio::time::timeout;

/// Time limit for each exchange with the service.
const SERVICE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why this daemon does not use the tasker service, although there is one.
#[derive(Debug, Error)]
pub(crate) enum ServiceError {
    #[error("{}: {cause}", path.display())]
    Connect { path: PathBuf, cause: io::Error },
    #[error("{} does not answer: {cause}", path.display())]
    NoAnswer { path: PathBuf, cause: io::Error },
    #[error("{}: {cause}", path.display())]
    Decode { path: PathBuf, cause: DecodeError },
    #[error(transparent)]
    Refused(ServiceRefusal),
    #[error("the tasker service answers another request")]
    UnexpectedReply,
}

/// A running tasker, and how the daemon ends the tasker.
#[derive(Debug)]
pub(crate) enum TaskerHandle {
    Child(Child),
    /// A tasker that the service at `socket_path` has started.
    OfService {
        socket_path: PathBuf,
        session: SessionId,
    },
}

impl ServiceError {
    /// True if nobody listens at the socket, so that there is no service.
    fn is_absence(&self) -> bool {
        let absences = [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused];
        matches!(self, Self::Connect { cause, .. } if absences.contains(&cause.kind()))
    }
}

impl From<ServiceError> for ServiceObstacle {
    fn from(error: ServiceError) -> Self {
        match error {
            ServiceError::Refused(refusal) => refusal.into(),
            error if error.is_absence() => Self::NotRunning,
            other => Self::Failed(other.to_string()),
        }
    }
}

/// Starts a tasker by the service of this host. Returns the connection to the tasker. Blocks for a
/// few seconds at most.
///
/// # Errors
/// There is no service, the user wants none, or the service does not start a tasker. What an
/// administrator should know of is logged.
pub(crate) fn start_by_service() -> Result<(UnixStream, TaskerHandle), ServiceObstacle> {
    let Some(path) = socket_path(std::env::var_os(SOCKET_VARIABLE)) else {
        return Err(ServiceObstacle::Excluded);
    };
    start_by_service_at(&path).map_err(|why| {
        if !why.is_absence() {
            tracing::warn!("{why}; this daemon starts its tasker itself");
        }
        why.into()
    })
}

fn start_by_service_at(path: &Path) -> Result<(UnixStream, TaskerHandle), ServiceError> {
    let request = ServiceRequest::Start {
        protocol: PROTOCOL_VERSION,
        version: env!("CARGO_PKG_VERSION").into(),
    };
    let (socket, reply) = ask_service(path, &request)?;
    match reply {
        ServiceReply::Started { session } => {
            let handle = TaskerHandle::OfService {
                socket_path: path.to_path_buf(),
                session,
            };
            Ok((socket, handle))
        }
        ServiceReply::Refused(refusal) => Err(ServiceError::Refused(refusal)),
        ServiceReply::Killed => Err(ServiceError::UnexpectedReply),
    }
}

fn ask_service(
    path: &Path,
    request: &ServiceRequest,
) -> Result<(UnixStream, ServiceReply), ServiceError> {
    ask_tasker_service(path, request, SERVICE_TIMEOUT).map_err(|error| {
        let path = path.to_path_buf();
        match error {
            ExchangeError::Connect(cause) => ServiceError::Connect { path, cause },
            ExchangeError::NoReply(cause) => ServiceError::NoAnswer { path, cause },
            ExchangeError::Decode(cause) => ServiceError::Decode { path, cause },
        }
    })
}

impl TaskerHandle {
    /// Kills the tasker, which hangs, and all its tasks.
    pub(crate) fn kill(&mut self) {
        match self {
            Self::Child(child) => kill_with_descendants(child),
            Self::OfService {
                socket_path,
                session,
            } => {
                let request = ServiceRequest::Kill { session: *session };
                if let Err(why) = ask_service(socket_path, &request) {
                    tracing::error!("the tasker cannot be killed: {why}");
                }
            }
        }
    }

    /// Waits until the tasker has ended, for `time_limit` at most. Returns how it has ended; `None`
    /// after the time limit. `connection_end` resolves when the tasker has closed its connection.
    pub(crate) async fn wait_for_end(
        &mut self,
        time_limit: Duration,
        connection_end: impl Future<Output = ()>,
    ) -> Option<String> {
        match self {
            Self::Child(child) => match timeout(time_limit, child.wait()).await {
                Ok(Ok(status)) => Some(format!("it ended with {status}")),
                Ok(Err(e)) => Some(format!("it cannot be waited for: {e}")),
                Err(_) => None,
            },
            // The connection is closed by the end of the process.
            Self::OfService { .. } => timeout(time_limit, connection_end)
                .await
                .ok()
                .map(|()| "it ended".into()),
        }
    }

    /// Reaps a tasker that was killed.
    pub(crate) async fn reap(&mut self) {
        if let Self::Child(child) = self {
            // Fails only if it was waited for.
            let _ = child.wait().await;
        }
    }
}

/// Kills the tasker and everything that descends from it: without PID namespaces the kernel would
/// kill only the first processes of the tasks.
fn kill_with_descendants(child: &mut Child) {
    if let Some(pid) = child.id().map(u32::cast_signed) {
        // The tasker must start no process meanwhile, and stays the subreaper of its descendants.
        // Fails only if it has ended.
        let _ = kill(Pid::from_raw(pid), Signal::SIGSTOP);
        kill_descendants(pid);
    }
    // Fails only if the process has ended.
    let _ = child.start_kill();
}
