//! The Unix socket for the tasks of this host. The listener checks the user of each peer, transfers
//! frames in both directions, and disconnects tasks that violate the protocol or do not read.

use super::descriptors::{TaskFrameReader, send_with_descriptors};
use super::foreign_library::{self, ForeignProcess};
use super::input::{Input, InputSender, LogRateLimit, TaskConnection};
use super::local_socket::LocalSocket;
use super::outbox::{LINK_BYTES_MAX, OutboxReader, Outgoing, outbox};
use super::sys::peer_process;
use pvmd_machine::io::{ConnId, Event};
use sempa_proto::WIRE_VERSION;
use sempa_proto::frame::{
    FRAME_HEAD_BYTES, Frame, FrameError, FrameKind, encode_control, encode_frame_head,
};
use sempa_proto::link::FRAGMENT_BYTES_MAX;
use sempa_proto::task::{TASK_MAGIC, ToDaemon, ToTask};
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use thiserror::Error;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

/// Time limit for the hello of a new connection.
pub(crate) const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of accepted connections that have not sent a hello. Further connections wait in
/// the kernel's queue.
const PENDING_HELLOS_MAX: usize = 128;
/// Maximum number of bytes of control messages that may be queued for a task for longer than
/// [`TASK_READ_TIMEOUT`] while the task reads nothing.
pub(crate) const TASK_CONTROL_BYTES_MAX: usize = 64 << 20;
/// Time after which a task that does not read is disconnected, if more than
/// [`TASK_CONTROL_BYTES_MAX`] bytes are queued for the task.
pub(crate) const TASK_READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for a disconnected task to read the data that was sent before the disconnection.
pub(crate) const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of frames passed to the kernel in one call.
const WRITE_FRAMES_MAX: usize = 64;

/// Listens at `path`, which must be in a private directory.
///
/// # Errors
/// The socket cannot be created.
pub(crate) fn bind_task_socket(path: &Path) -> std::io::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// State shared by all connections of tasks.
#[derive(Debug)]
struct TaskListener {
    uid: u32,
    inputs: InputSender,
    refusal_log_limit: LogRateLimit,
    next_conn_id: AtomicU64,
    /// Path of the library that tasks of this host load; `None` if it is not known.
    library: Option<PathBuf>,
    /// Limits the inspections of processes with the library of another PVM.
    inspections: Semaphore,
}

/// Accepts connections of tasks and serves each connection in a tokio task. Never returns.
/// `library` is the path of the library that tasks load.
pub(crate) async fn accept_tasks(
    listener: UnixListener,
    uid: u32,
    inputs: InputSender,
    library: Option<PathBuf>,
) {
    let task_listener = Arc::new(TaskListener {
        uid,
        inputs,
        refusal_log_limit: LogRateLimit::new(),
        next_conn_id: AtomicU64::new(1),
        library,
        inspections: Semaphore::new(foreign_library::INSPECTIONS_MAX),
    });
    let pending_hellos = Arc::new(Semaphore::new(PENDING_HELLOS_MAX));
    loop {
        let permit = pending_hellos
            .clone()
            .acquire_owned()
            .await
            .expect("the semaphore is never closed");
        match listener.accept().await {
            Ok((stream, _)) => {
                let task_listener = task_listener.clone();
                tokio::spawn(async move {
                    let handshake_result = task_listener.wait_for_hello(stream).await;
                    drop(permit);
                    if let Some((hello, pending_connection)) = handshake_result {
                        task_listener
                            .serve_connection(hello, pending_connection)
                            .await;
                    }
                });
            }
            Err(e) => {
                // Most likely there are no free descriptors. Descriptors become free when other
                // connections end.
                if task_listener.refusal_log_limit.try_acquire() {
                    tracing::warn!("cannot accept a task's connection: {e}; trying again");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// A connection before its hello is complete: the process at the other end, and the reader with the
/// data that was read but not handled yet.
struct PendingConnection {
    pid: i32,
    process: std::io::Result<OwnedFd>,
    socket: Arc<LocalSocket>,
    frame_reader: TaskFrameReader,
}

impl TaskListener {
    /// Checks the peer's user and waits for a valid hello. Returns the hello and the connection.
    /// Returns `None` if the peer has closed the connection, and for peers that are refused, after
    /// sending the reason to the peer.
    async fn wait_for_hello(&self, stream: UnixStream) -> Option<(ToDaemon, PendingConnection)> {
        let peer_credentials = stream.peer_cred().ok()?;
        let pid = peer_credentials.pid().unwrap_or(0);
        // The pidfd is opened first. The process may exit at any time, and then its id may be
        // reused.
        let process = peer_process(stream.as_fd(), pid);
        let socket = Arc::new(LocalSocket::new(stream.into_std().ok()?).ok()?);
        let mut connection = PendingConnection {
            pid,
            process,
            socket,
            frame_reader: TaskFrameReader::default(),
        };
        let refusal = if peer_credentials.uid() != self.uid {
            format!(
                "this daemon serves user {} only, and you are user {}",
                self.uid,
                peer_credentials.uid()
            )
        } else {
            match timeout(
                HELLO_TIMEOUT,
                connection.frame_reader.next_frame(&connection.socket),
            )
            .await
            {
                Ok(Ok(Some(frame))) => match check_hello(&frame) {
                    Ok(hello) => return Some((hello, connection)),
                    Err(reason) => reason.to_string(),
                },
                Ok(Ok(None)) => return None,
                Ok(Err(_)) if foreign_library::is_greeting(connection.frame_reader.unread()) => {
                    self.report_foreign_library(pid).await;
                    return None;
                }
                Ok(Err(reason)) => reason.to_string(),
                Err(_) => format!("no hello arrived within {} s", HELLO_TIMEOUT.as_secs()),
            }
        };
        if self.refusal_log_limit.try_acquire() {
            tracing::warn!(
                "refused process {pid} of user {} on the tasks' socket: {refusal}",
                peer_credentials.uid()
            );
        }
        if let Ok(frame) = encode_control(&ToTask::Refused { reason: refusal }) {
            // A failure has no consequence: the peer may have exited, or it does not read.
            let _ = timeout(
                Duration::from_secs(1),
                connection.socket.write_all(&mut [IoSlice::new(&frame)]),
            )
            .await;
        }
        None
    }

    /// Reports a process that uses the library of another PVM. The process must wait for an answer
    /// meanwhile, so that its files in /proc exist.
    async fn report_foreign_library(&self, pid: i32) {
        let inspection = {
            let _permit = self.inspections.acquire().await;
            ForeignProcess::inspect(pid).await
        };
        let process = inspection.unwrap_or_else(|error| {
            tracing::warn!("cannot find out which library process {pid} has loaded: {error:#}");
            ForeignProcess::default()
        });
        let spawn_token = process.spawn_token;
        let fault = process.into_fault(self.library.as_deref());
        if let Some(spawn_token) = spawn_token {
            // A failure has no consequence: the daemon is about to exit.
            let event = Event::ForeignLibrary { spawn_token, fault };
            let _ = self.inputs.send(Input::Event(event)).await;
        } else if self.refusal_log_limit.try_acquire() {
            tracing::warn!("refused process {pid} on the tasks' socket: {fault}");
        }
    }

    /// Serves a connection from its hello to its end: writes the queued frames, forwards the
    /// received frames, and reports the end.
    async fn serve_connection(&self, hello: ToDaemon, connection: PendingConnection) {
        let conn = ConnId(self.next_conn_id.fetch_add(1, Ordering::Relaxed));
        let (outbox, queue) = outbox(LINK_BYTES_MAX);
        let (close_reason, mut close_requests) = watch::channel(None);
        let PendingConnection {
            pid,
            process,
            socket,
            mut frame_reader,
        } = connection;
        let task_connected = Input::TaskConnected(TaskConnection {
            conn,
            pid,
            process,
            socket: socket.clone(),
            outbox,
            close_reason,
        });
        let hello_input = Input::Event(Event::TaskControl {
            conn,
            message: hello,
        });
        if self.inputs.send(task_connected).await.is_err()
            || self.inputs.send(hello_input).await.is_err()
        {
            return;
        }
        let mut writer = tokio::spawn(write_frames(socket.clone(), queue));
        let mut forward_future =
            std::pin::pin!(self.forward_frames(conn, &socket, &mut frame_reader));
        let protocol_error = tokio::select! {
            protocol_error = &mut forward_future => protocol_error,
            reason = wait_for_close_reason(&mut close_requests) => Some(reason),
            writer_result = &mut writer => {
                if writer_result.unwrap_or(false) {
                    None
                } else {
                    // The task reads no more data, but the frames that it sent before are still
                    // valid.
                    tokio::select! {
                        protocol_error = forward_future => protocol_error,
                        reason = wait_for_close_reason(&mut close_requests) => Some(reason),
                    }
                }
            }
        };
        writer.abort();
        if let Some(reason) = &protocol_error
            && self.refusal_log_limit.try_acquire()
        {
            tracing::warn!("closed the connection of process {pid}: {reason}");
        }
        let _ = self
            .inputs
            .send(Input::Event(Event::TaskClosed {
                conn,
                protocol_error,
            }))
            .await;
    }

    /// Forwards a task's frames as events. Returns `None` when the stream ends, or the reason if
    /// the task violates the protocol.
    async fn forward_frames(
        &self,
        conn: ConnId,
        socket: &LocalSocket,
        frame_reader: &mut TaskFrameReader,
    ) -> Option<String> {
        loop {
            let frame = match frame_reader.next_frame(socket).await {
                Ok(Some(frame)) => frame,
                Ok(None) => return None,
                Err(reason) => return Some(reason.to_string()),
            };
            let event = match frame.kind {
                FrameKind::Control => match frame.decode_control::<ToDaemon>() {
                    Ok(ToDaemon::Route { receiver, message }) => {
                        match frame_reader.take_descriptors(message.fd_count()) {
                            Ok(descriptors) => Event::TaskRoute {
                                conn,
                                dst: receiver,
                                message,
                                descriptors,
                            },
                            Err(e) => return Some(e.to_string()),
                        }
                    }
                    Ok(message) => Event::TaskControl { conn, message },
                    Err(e) => return Some(e.to_string()),
                },
                FrameKind::Link => match frame.decode_link() {
                    Ok(link) if link.payload.len() > FRAGMENT_BYTES_MAX => {
                        return Some(format!(
                            "a fragment of {} bytes is over the limit",
                            link.payload.len()
                        ));
                    }
                    Ok(_) => Event::TaskLink {
                        conn,
                        frame: frame.body,
                    },
                    Err(e) => return Some(e.to_string()),
                },
                FrameKind::Image => return Some("a task does not send images".into()),
            };
            if self.inputs.send(Input::Event(event)).await.is_err() {
                return None;
            }
        }
    }
}

/// Waits until the loop orders that the connection be closed, and returns the reason.
async fn wait_for_close_reason(close_requests: &mut watch::Receiver<Option<String>>) -> String {
    loop {
        if let Some(reason) = close_requests.borrow_and_update().clone() {
            return reason;
        }
        if close_requests.changed().await.is_err() {
            // The loop has dropped the connection without a reason. The writer ends the connection.
            std::future::pending::<()>().await;
        }
    }
}

/// Reason why the first frame of a task was refused. No further frame was read.
#[derive(Debug, Error)]
enum HelloError {
    #[error("the first frame is not a task's hello")]
    WrongMagic,
    #[error(
        "the task's library uses protocol version {0}, this daemon {own}: use the library installed with it",
        own = WIRE_VERSION
    )]
    WrongVersion(u16),
    #[error("the first frame is not a hello")]
    NotHello,
    #[error("the first frame is not a hello: {0}")]
    Decode(#[source] FrameError),
}

fn check_hello(frame: &Frame) -> Result<ToDaemon, HelloError> {
    match frame.decode_control::<ToDaemon>() {
        Ok(ToDaemon::Hello(hello)) if hello.magic != TASK_MAGIC => Err(HelloError::WrongMagic),
        Ok(ToDaemon::Hello(hello)) if hello.version != WIRE_VERSION => {
            Err(HelloError::WrongVersion(hello.version))
        }
        Ok(hello @ ToDaemon::Hello(_)) => Ok(hello),
        Ok(_) => Err(HelloError::NotHello),
        Err(e) => Err(HelloError::Decode(e)),
    }
}

/// Writes queued frames. Returns true after an order to close the stream or when the queue is
/// dropped, and false if the peer accepts no more data.
pub(crate) async fn write_frames(socket: Arc<LocalSocket>, mut queue: OutboxReader) -> bool {
    let mut batch = Vec::with_capacity(WRITE_FRAMES_MAX);
    loop {
        batch.clear();
        if queue.receive_batch(&mut batch, WRITE_FRAMES_MAX).await == 0 {
            return true;
        }
        let close_index = batch
            .iter()
            .position(|item| matches!(item, Outgoing::Close));
        let write_result = write_batch(&socket, &batch[..close_index.unwrap_or(batch.len())]).await;
        batch.iter().for_each(|item| queue.record_removed(item));
        if write_result.is_err() {
            return false;
        }
        if close_index.is_some() {
            socket.shut_down_writes();
            return true;
        }
    }
}

async fn write_batch(socket: &LocalSocket, batch: &[Outgoing]) -> std::io::Result<()> {
    let mut remaining_items = batch;
    while let Some(fd_item_index) = remaining_items
        .iter()
        .position(|item| matches!(item, Outgoing::WithFds(..)))
    {
        write_without_fds(socket, &remaining_items[..fd_item_index]).await?;
        if let Outgoing::WithFds(frame, descriptors) = &remaining_items[fd_item_index] {
            let written_bytes = send_with_descriptors(socket, frame, descriptors).await?;
            socket
                .write_all(&mut [IoSlice::new(&frame[written_bytes..])])
                .await?;
        }
        remaining_items = &remaining_items[fd_item_index + 1..];
    }
    write_without_fds(socket, remaining_items).await
}

async fn write_without_fds(socket: &LocalSocket, batch: &[Outgoing]) -> std::io::Result<()> {
    let mut heads = [[0; FRAME_HEAD_BYTES]; WRITE_FRAMES_MAX];
    for (head, item) in heads.iter_mut().zip(batch) {
        if let Outgoing::Link(body) = item {
            *head = encode_frame_head(FrameKind::Link, body.len());
        }
    }
    let mut slices = [IoSlice::new(&[]); 2 * WRITE_FRAMES_MAX];
    let mut slice_count = 0;
    let mut add_slice = |slice| {
        slices[slice_count] = IoSlice::new(slice);
        slice_count += 1;
    };
    for (item, head) in batch.iter().zip(&heads) {
        match item {
            Outgoing::Reliable(frame) => add_slice(frame),
            Outgoing::Link(body) => [head, &body[..]].into_iter().for_each(&mut add_slice),
            Outgoing::WithFds(..) | Outgoing::Close => {}
        }
    }
    socket.write_all(&mut slices[..slice_count]).await
}
