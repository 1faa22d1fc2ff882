//! The tasker process. The daemon starts the tasker from the folder of this program, connects it by
//! a socket pair, and restarts it when it ends.
//!
//! The tasker kills all of its tasks when the socket is closed, so no task runs longer than this
//! daemon.

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

/// Maximum number of starts within [`STARTS_WINDOW`]. If the tasker ends more often, it is not
/// restarted immediately; a later request starts it again.
const STARTS_MAX: usize = 5;
/// Duration in which starts of the tasker are counted.
const STARTS_WINDOW: Duration = Duration::from_secs(60);
/// Time limit for the tasker to kill and reap all of its processes after the socket is closed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The tasker of this daemon. Owned by the daemon's loop.
pub(crate) struct TaskerProcess {
    program_path: PathBuf,
    files_limit: OpenFilesLimit,
    inputs: InputSender,
    connection: Option<TaskerConnection>,
    start_times: Vec<Instant>,
}

/// Reason why no tasker is running. The daemon continues without a tasker.
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
    forward_task: JoinHandle<()>,
}

impl TaskerProcess {
    /// Creates the state without a process. `program` is the tasker's path. `files_limit` is the
    /// initial limit of open files of the tasker and its tasks.
    pub(crate) fn new(program: PathBuf, files_limit: OpenFilesLimit, inputs: InputSender) -> Self {
        Self {
            program_path: program,
            files_limit,
            inputs,
            connection: None,
            start_times: Vec::new(),
        }
    }

    /// Starts the process if it is not running, and the tokio tasks that exchange messages with it.
    ///
    /// # Errors
    /// The process has ended too often, or it cannot be started.
    pub(crate) fn start_if_needed(&mut self) -> Result<(), StartTaskerError> {
        if self.connection.is_some() {
            return Ok(());
        }
        self.start_times
            .retain(|started_at| started_at.elapsed() < STARTS_WINDOW);
        if self.start_times.len() >= STARTS_MAX {
            return Err(StartTaskerError::EndedTooOften {
                program: self.program_path.clone(),
            });
        }
        self.start_times.push(Instant::now());
        let (socket, child) = self
            .spawn_process()
            .map_err(|source| StartTaskerError::Spawn {
                program: self.program_path.clone(),
                source,
            })?;
        let (outbox, queue) = outbox(0);
        tokio::spawn(write_frames(socket.clone(), queue));
        let inputs = self.inputs.clone();
        let forward_task = tokio::spawn(async move {
            let reason = forward_messages(socket, child, &inputs).await;
            let _ = inputs
                .send(Input::Event(Event::TaskerEnded { why: reason }))
                .await;
        });
        self.connection = Some(TaskerConnection {
            outbox,
            forward_task,
        });
        Ok(())
    }

    fn spawn_process(&self) -> std::io::Result<(Arc<LocalSocket>, Child)> {
        let (daemon_end, tasker_end) = UnixStream::pair()?;
        let mut command = std::process::Command::new(&self.program_path);
        command.arg(tasker_end.as_raw_fd().to_string());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        // Ctrl-C at the master's terminal must interrupt only the master, which ends the tasks in
        // order.
        command.process_group(0);
        pass_descriptor(&mut command, tasker_end.as_raw_fd());
        self.files_limit.apply_to(&mut command);
        let child = tokio::process::Command::from(command).spawn()?;
        drop(tasker_end);
        Ok((Arc::new(LocalSocket::new(daemon_end)?), child))
    }

    /// Records that the process has ended, and starts another process for new tasks. If the start
    /// fails, logs the reason.
    pub(crate) fn on_exit(&mut self) {
        self.connection = None;
        if let Err(why) = self.start_if_needed() {
            tracing::error!("{why}");
        }
    }

    /// Queues a message for the tasker. Starts the tasker if it is not running.
    ///
    /// If the message cannot be sent, returns a reply in the name of the tasker: a failure for a
    /// start, a success for a discard. Other messages are dropped, because the tasks of these
    /// messages have ended with the tasker.
    pub(crate) fn send(&mut self, message: &ToTasker) -> Option<FromTasker> {
        let failure_reply = |reason: String| match message {
            ToTasker::Start(task) => Some(FromTasker::StartFailed {
                tid: task.tid,
                reason,
            }),
            // Everything that the tasker had built was removed when it ended.
            ToTasker::Discard { migration } => Some(FromTasker::Discarded {
                migration: *migration,
            }),
            _ => None,
        };
        if self.connection.is_none()
            && let Err(reason) = self.start_if_needed()
        {
            return failure_reply(reason.to_string());
        }
        let connection = self.connection.as_ref().expect("it has just been started");
        match encode_control(message) {
            Ok(frame) => {
                connection.outbox.enqueue(Outgoing::Reliable(frame));
                None
            }
            Err(e) => failure_reply(format!("arguments and environment are too long: {e}")),
        }
    }

    /// Makes the tasker and all of its tasks end, and waits until the tasker has ended, at most
    /// about [`EXIT_TIMEOUT`].
    pub(crate) async fn shut_down(&mut self) {
        let Some(TaskerConnection {
            outbox,
            forward_task,
        }) = self.connection.take()
        else {
            return;
        };
        outbox.enqueue(Outgoing::Close);
        drop(outbox);
        let _ = timeout(EXIT_TIMEOUT + Duration::from_secs(2), forward_task).await;
    }
}

/// Forwards the tasker's messages until the tasker ends. Returns the reason of the end.
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
    let mut frame_reader = TaskFrameReader::default();
    let protocol_error = loop {
        let message = match frame_reader.next_frame(&socket).await {
            Ok(Some(frame)) => frame
                .decode_control::<FromTasker>()
                .map_err(|e| e.to_string()),
            Ok(None) => break None,
            Err(reason) => Err(reason.to_string()),
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
            Err(reason) => break Some(reason),
        }
    };
    // The daemon or the tasker has closed the socket. The tasker therefore kills its tasks and
    // exits.
    socket.shut_down_writes();
    drop(socket);
    let exit_text = match timeout(EXIT_TIMEOUT, child.wait()).await {
        Ok(Ok(status)) => format!("it ended with {status}"),
        Ok(Err(e)) => format!("it cannot be waited for: {e}"),
        Err(_) => {
            let _ = child.kill().await;
            "it did not end by itself and was killed".to_string()
        }
    };
    match protocol_error {
        Some(reason) => {
            format!("the tasker violated the protocol ({reason}); {exit_text}")
        }
        None => format!("the tasker is gone: {exit_text}"),
    }
}
