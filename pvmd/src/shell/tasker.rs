//! The tasker process: started from this program's folder, connected by a socket pair, restarted
//! when it dies.
//!
//! The tasker kills all its tasks when the socket closes, so no task outlives this daemon.

use super::descriptors::TaskFrameReader;
use super::input::{Input, InputSender};
use super::local_socket::LocalSocket;
use super::outbox::{Outbox, Outgoing, outbox};
use super::sys::{OpenFilesLimit, pass_descriptor};
use super::task_listener::write_frames;
use pvmd_machine::io::Event;
use sempa_proto::frame::encode_control;
use sempa_proto::tasker::{FromTasker, ToTasker};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Maximum number of starts within [`STARTS_WINDOW`]. A tasker that dies more often is started
/// again only by a later request.
const STARTS_MAX: usize = 5;
const STARTS_WINDOW: Duration = Duration::from_secs(60);
/// Time limit for the tasker to kill and reap all its processes after the socket is closed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The tasker of this daemon. Owned by the daemon's loop.
pub(crate) struct TaskerProcess {
    program: PathBuf,
    files_limit: OpenFilesLimit,
    inputs: InputSender,
    connection: Option<TaskerConnection>,
    start_times: Vec<Instant>,
}

/// Why no tasker runs. The daemon continues without one.
#[derive(Debug, Error)]
pub(crate) enum StartTaskerError {
    #[error("{} ended {} times within a minute", program.display(), STARTS_MAX)]
    EndedTooOften { program: PathBuf },
    #[error("cannot start {}: {source}", program.display())]
    Spawn {
        program: PathBuf,
        source: std::io::Error,
    },
}

struct TaskerConnection {
    outbox: Outbox,
    serving: JoinHandle<()>,
}

impl TaskerProcess {
    /// Creates the state without a process. `program` is the tasker's path; `files_limit` is the
    /// initial limit of the tasker and its tasks.
    pub(crate) fn new(
        program: PathBuf,
        files_limit: OpenFilesLimit,
        inputs: InputSender,
    ) -> TaskerProcess {
        TaskerProcess {
            program,
            files_limit,
            inputs,
            connection: None,
            start_times: Vec::new(),
        }
    }

    /// Starts the process unless it is running or has died too often.
    ///
    /// # Errors
    /// Why it was not started.
    pub(crate) fn start(&mut self) -> Result<(), StartTaskerError> {
        if self.connection.is_some() {
            return Ok(());
        }
        self.start_times.retain(|at| at.elapsed() < STARTS_WINDOW);
        if self.start_times.len() >= STARTS_MAX {
            return Err(StartTaskerError::EndedTooOften {
                program: self.program.clone(),
            });
        }
        self.start_times.push(Instant::now());
        let (socket, child) = self.spawn().map_err(|source| StartTaskerError::Spawn {
            program: self.program.clone(),
            source,
        })?;
        let (outbox, queue) = outbox(0);
        tokio::spawn(write_frames(socket.clone(), queue));
        let inputs = self.inputs.clone();
        let serving = tokio::spawn(async move {
            let why = forward_messages(socket, child, &inputs).await;
            let _ = inputs.send(Input::Event(Event::TaskerGone { why })).await;
        });
        self.connection = Some(TaskerConnection { outbox, serving });
        Ok(())
    }

    fn spawn(&self) -> std::io::Result<(Arc<LocalSocket>, Child)> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = std::process::Command::new(&self.program);
        command.arg(theirs.as_raw_fd().to_string());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        // Ctrl-C at the master's terminal must reach only the master, which ends the tasks in
        // order.
        command.process_group(0);
        pass_descriptor(&mut command, theirs.as_raw_fd());
        self.files_limit.apply_to(&mut command);
        let child = tokio::process::Command::from(command).spawn()?;
        drop(theirs);
        Ok((Arc::new(LocalSocket::new(ours)?), child))
    }

    /// Records that the process has ended, and starts another one for new tasks.
    pub(crate) fn on_exit(&mut self) {
        self.connection = None;
        if let Err(why) = self.start() {
            tracing::error!("{why}");
        }
    }

    /// Sends a message to the tasker, which is started if necessary.
    ///
    /// If the tasker cannot be started, returns the reply to a start (failed) or to a discard
    /// (done) in its place. Other messages are dropped: the tasks that they concern died with the
    /// tasker.
    pub(crate) fn send(&mut self, message: &ToTasker) -> Option<FromTasker> {
        let failed = |why: String| match message {
            ToTasker::Start(task) => Some(FromTasker::StartFailed { tid: task.tid, why }),
            // Everything that the tasker had built is gone with it.
            ToTasker::Discard { migration } => Some(FromTasker::Discarded {
                migration: *migration,
            }),
            _ => None,
        };
        if self.connection.is_none()
            && let Err(why) = self.start()
        {
            return failed(why.to_string());
        }
        let running = self.connection.as_ref().expect("it has just been started");
        match encode_control(message) {
            Ok(frame) => {
                running.outbox.enqueue(Outgoing::Reliable(frame));
                None
            }
            Err(e) => failed(format!("arguments and environment are too long: {e}")),
        }
    }

    /// Makes the tasker end with all its tasks, and waits for its end.
    pub(crate) async fn shut_down(&mut self) {
        let Some(TaskerConnection { outbox, serving }) = self.connection.take() else {
            return;
        };
        outbox.enqueue(Outgoing::Close);
        drop(outbox);
        let _ = timeout(EXIT_TIMEOUT + Duration::from_secs(2), serving).await;
    }
}

/// Forwards the tasker's messages until it ends, and returns the reason of its end.
async fn forward_messages(
    socket: Arc<LocalSocket>,
    mut child: Child,
    inputs: &InputSender,
) -> String {
    if let Some(stderr) = child.stderr.take() {
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                tracing::info!("tasker: {line}");
            }
        });
    }
    let mut incoming = TaskFrameReader::default();
    let protocol_error = loop {
        let message = match incoming.next_frame(&socket).await {
            Ok(Some(frame)) => frame
                .decode_control::<FromTasker>()
                .map_err(|e| e.to_string()),
            Ok(None) => break None,
            Err(why) => Err(why.to_string()),
        };
        match message {
            Ok(message) => {
                if inputs
                    .send(Input::Event(Event::Tasker(message)))
                    .await
                    .is_err()
                {
                    break None;
                }
            }
            Err(why) => break Some(why),
        }
    };
    // Either side has closed the socket: the tasker kills its tasks and exits.
    socket.shut_down_writes();
    drop(socket);
    let ended = match timeout(EXIT_TIMEOUT, child.wait()).await {
        Ok(Ok(status)) => format!("it ended with {status}"),
        Ok(Err(e)) => format!("it cannot be waited for: {e}"),
        Err(_) => {
            let _ = child.kill().await;
            "it did not end by itself and was killed".to_string()
        }
    };
    match protocol_error {
        Some(why) => {
            format!("the tasker violated the protocol ({why}); {ended}")
        }
        None => format!("the tasker is gone: {ended}"),
    }
}
