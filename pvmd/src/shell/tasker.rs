//! The tasker process. The daemon requests it from the tasker service of the host. Without the
//! service, the daemon starts the tasker from the folder of this program, and connects it by a
//! socket pair. When the tasker ends, another one is started.
//!
//! The tasker kills all of its tasks when the socket is closed, so no task runs longer than this
//! daemon.

use super::descriptors::TaskFrameReader;
use super::input::{Input, InputSender};
use super::local_socket::LocalSocket;
use super::outbox::{Outbox, Outgoing, outbox};
use super::sys::{OpenFilesLimit, pass_descriptor};
use super::task_listener::write_frames;
use super::tasker_handle::{self, TaskerHandle};
use checkpoint::boot_clock;
use nix::unistd::geteuid;
use pvmd_machine::io::{Event, ServiceUse};
use sempa_proto::frame::encode_control;
use sempa_proto::lease;
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
use tokio::sync::oneshot;
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
    /// The last lease of the state machine. A process that is started later gets it first.
    lease: Option<ToTasker>,
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

/// A tasker that has just been started.
struct StartedTasker {
    socket: Arc<LocalSocket>,
    handle: TaskerHandle,
    service_use: ServiceUse,
}

struct TaskerConnection {
    outbox: Outbox,
    /// Sends the reason for which the process must be killed; `None` after the kill.
    kill_sender: Option<oneshot::Sender<String>>,
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
            lease: None,
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
        let StartedTasker {
            socket,
            handle,
            service_use,
        } = self
            .start_process()
            .map_err(|source| StartTaskerError::Spawn {
                program: self.program_path.clone(),
                source,
            })?;
        let (outbox, queue) = outbox(0);
        tokio::spawn(write_frames(socket.clone(), queue));
        if let Some(lease) = &self.lease {
            let frame = encode_control(lease).expect("two numbers");
            outbox.enqueue(Outgoing::Reliable(frame));
        }
        let inputs = self.inputs.clone();
        let (kill_sender, kill_receiver) = oneshot::channel();
        let forward_task = tokio::spawn(async move {
            let started = Input::Event(Event::TaskerStarted { service_use });
            // Fails if the daemon ends; the tasker is then told by its socket.
            let _ = inputs.send(started).await;
            let reason = forward_messages(socket, handle, kill_receiver, &inputs).await;
            let _ = inputs
                .send(Input::Event(Event::TaskerEnded { why: reason }))
                .await;
        });
        self.connection = Some(TaskerConnection {
            outbox,
            kill_sender: Some(kill_sender),
            forward_task,
        });
        Ok(())
    }

    /// Starts the tasker by the service of this host if there is one, otherwise as a child.
    fn start_process(&self) -> std::io::Result<StartedTasker> {
        let (socket, handle, service_use) = match tasker_handle::start_by_service() {
            Ok((socket, handle)) => (socket, handle, ServiceUse::ForUser),
            Err(obstacle) => {
                let (socket, handle) = self.spawn_process()?;
                (socket, handle, ServiceUse::Missing(obstacle))
            }
        };
        Ok(StartedTasker {
            socket: Arc::new(LocalSocket::new(socket)?),
            handle,
            service_use: match geteuid().is_root() {
                true => ServiceUse::AsRoot,
                false => service_use,
            },
        })
    }

    fn spawn_process(&self) -> std::io::Result<(UnixStream, TaskerHandle)> {
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
        Ok((daemon_end, TaskerHandle::Child(child)))
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
    /// messages have ended with the tasker. A lease does not start a tasker.
    pub(crate) fn send(&mut self, message: &ToTasker) -> Option<FromTasker> {
        if matches!(message, ToTasker::RenewLease { .. }) {
            self.lease = Some(message.clone());
            self.connection.as_ref()?;
        }
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

    /// Kills the process because it hangs. The kernel kills its tasks.
    pub(crate) fn kill(&mut self, reason: String) {
        let connection = self.connection.as_mut();
        if let Some(kill_sender) = connection.and_then(|c| c.kill_sender.take()) {
            // Fails if the process has just ended.
            let _ = kill_sender.send(reason);
        }
    }

    /// Makes the tasker and all of its tasks end, and waits until the tasker has ended. Kills a
    /// tasker that has not ended after [`EXIT_TIMEOUT`]. If `is_lease_binding` is true, kills it
    /// when the lease has run out, because the master may then start copies of its tasks.
    pub(crate) async fn shut_down(&mut self, is_lease_binding: bool) {
        let exit_time = match &self.lease {
            Some(ToTasker::RenewLease { kill_at, .. })
                if is_lease_binding && *kill_at != lease::NEVER =>
            {
                Duration::from_micros(kill_at.since(boot_clock::now()).0)
            }
            _ => EXIT_TIMEOUT,
        };
        let Some(TaskerConnection {
            outbox,
            kill_sender,
            mut forward_task,
        }) = self.connection.take()
        else {
            return;
        };
        outbox.enqueue(Outgoing::Close);
        drop(outbox);
        if timeout(exit_time, &mut forward_task).await.is_ok() {
            return;
        }
        if let Some(kill_sender) = kill_sender {
            // Fails if the process has just ended.
            let _ = kill_sender.send("it did not end in time".into());
        }
        let _ = timeout(EXIT_TIMEOUT + Duration::from_secs(2), forward_task).await;
    }
}

/// Forwards the tasker's messages until the tasker ends. Returns the reason of the end. A reason
/// from `kill_receiver` kills the tasker.
async fn forward_messages(
    socket: Arc<LocalSocket>,
    mut handle: TaskerHandle,
    mut kill_receiver: oneshot::Receiver<String>,
    inputs: &InputSender,
) -> String {
    if let TaskerHandle::Child(child) = &mut handle
        && let Some(stderr) = child.stderr.take()
    {
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                tracing::info!("tasker: {line}");
            }
        });
    }
    let mut frame_reader = TaskFrameReader::default();
    let (mut end_cause, mut can_be_killed) = (None, true);
    loop {
        let frame = tokio::select! {
            frame = frame_reader.next_frame(&socket) => frame,
            kill_reason = &mut kill_receiver, if can_be_killed => {
                can_be_killed = false;
                if let Ok(reason) = kill_reason {
                    end_cause.get_or_insert(format!("it was killed: {reason}"));
                    handle.kill();
                }
                continue;
            }
        };
        let message = match frame {
            Ok(Some(frame)) => frame
                .decode_control::<FromTasker>()
                .map_err(|e| e.to_string()),
            Ok(None) => break,
            Err(reason) => Err(reason.to_string()),
        };
        match message {
            Ok(message) => {
                if let FromTasker::LeaseExpired { reason } = &message {
                    end_cause = Some(reason.clone());
                }
                if inputs
                    .send(Input::Event(Event::Tasker(message)))
                    .await
                    .is_err()
                {
                    break;
                }
            }
            Err(reason) => {
                end_cause.get_or_insert(format!("it violated the protocol: {reason}"));
                break;
            }
        }
    }
    // The daemon or the tasker has closed the socket. The tasker therefore kills its tasks and
    // exits.
    socket.shut_down_writes();
    // What the tasker still sends is of no use. The end of the stream is that of the tasker.
    let connection_end =
        async { while matches!(frame_reader.next_frame(&socket).await, Ok(Some(_))) {} };
    let kill_order = async {
        if !can_be_killed || kill_receiver.await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let end_text = tokio::select! {
        end_text = handle.wait_for_end(EXIT_TIMEOUT, connection_end) => end_text,
        () = kill_order => None,
    };
    let exit_text = match end_text {
        Some(text) => text,
        None => {
            handle.kill();
            handle.reap().await;
            "it did not end by itself and was killed".to_string()
        }
    };
    match end_cause {
        Some(cause) => format!("the tasker is gone: {cause}; {exit_text}"),
        None => format!("the tasker is gone: {exit_text}"),
    }
}
