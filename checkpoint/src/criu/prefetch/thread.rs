//! The thread that runs the proxy between `criu lazy-pages` and the source.

use super::super::process::raise_thread_priority;
use super::super::uffd_keeper::UffdKeeper;
use super::reply::UnexpectedReply;
use super::uffd_batching::{LazyPagesConnection, UffdCloseReports};
use super::{MissingMemory, Prefetcher, write_and_remove};
use crate::engine::pages::page_size;
use crate::engine::{FetchCompletion, ReceivedPages};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use sempa_proto::migration::Failure;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// Size in bytes of the buffer into which CRIU's requests are read.
const REQUEST_BUFFER_BYTES: usize = 4 << 10;

/// The proxy's thread. It ends when CRIU has received all memory and the reply to its PS_IOV_CLOSE,
/// when CRIU closes its connection, or when the source closes the stream.
///
/// The thread's result is true if CRIU was done or no memory was missing, and false if CRIU still
/// lacks memory. An error means that the source has violated the protocol, or that the images are
/// damaged.
pub(in super::super) type PrefetchThread = JoinHandle<Result<bool, Failure>>;

/// Starts the proxy for the task whose images are in `dir`. `source` is the stream to the source,
/// `received_pages` the pre-copied memory. When CRIU closes a userfaultfd, the proxy closes the
/// copy in `uffd_keeper` as well.
///
/// # Errors
/// No file descriptor or thread is available.
pub(in super::super) fn start(
    dir: &Path,
    source: OwnedFd,
    received_pages: ReceivedPages,
    uffd_keeper: UffdKeeper,
) -> Result<(PrefetchThread, LazyPagesConnection, FetchCompletion), Failure> {
    let to_failure = |e: io::Error| Failure::Io(format!("cannot prefetch memory: {e}"));
    let (engine_stream, stream) = UnixStream::pair().map_err(to_failure)?;
    let source = Arc::new(UnixStream::from(source));
    // Both streams are nonblocking, so that neither CRIU nor the source delays the other.
    engine_stream
        .set_nonblocking(true)
        .and_then(|()| source.set_nonblocking(true))
        .map_err(to_failure)?;
    let (connection, close_reports) = LazyPagesConnection::new(stream).map_err(to_failure)?;
    let completion = FetchCompletion::new(source.clone());
    let thread_completion = completion.clone();
    let thread = std::thread::Builder::new().name("ahead".into());
    let dir = dir.to_path_buf();
    let thread_handle = thread.spawn(move || {
        raise_thread_priority();
        // While the images are read, CRIU's requests wait in the socket.
        let prefetcher = Prefetcher::new(
            MissingMemory::read_from_images(&dir)?,
            received_pages,
            page_size(),
            Instant::now(),
        );
        let result = run_proxy(
            prefetcher,
            engine_stream,
            &source,
            (close_reports, uffd_keeper),
            &thread_completion,
        );
        // Closing is not enough, because other handles have the stream open.
        let _ = source.shutdown(Shutdown::Both);
        result.map_err(|error| Failure::Engine(error.to_string()))
    });
    Ok((thread_handle.map_err(to_failure)?, connection, completion))
}

fn run_proxy(
    mut prefetcher: Prefetcher,
    mut engine: UnixStream,
    mut source: &UnixStream,
    (report_receiver, uffd_keeper): (UffdCloseReports, UffdKeeper),
    completion: &FetchCompletion,
) -> Result<bool, UnexpectedReply> {
    let mut request_buffer = [0; REQUEST_BUFFER_BYTES];
    let mut close_reports = Some(report_receiver);
    loop {
        let [is_engine_readable, is_source_readable] =
            wait_ready(&mut prefetcher, &engine, source, close_reports.as_ref());
        prefetcher.set_now(Instant::now());
        match close_reports
            .as_ref()
            .map(UffdCloseReports::take_closed_inodes)
        {
            Some(Some(inodes)) => inodes
                .into_iter()
                .for_each(|inode| uffd_keeper.close_copy(inode)),
            Some(None) => close_reports = None,
            None => {}
        }
        if is_engine_readable {
            match read_byte_count(engine.read(&mut request_buffer)) {
                Some(0) => return Ok(prefetcher.engine_is_done()),
                Some(bytes) => prefetcher.receive_from_engine(&request_buffer[..bytes]),
                None => {}
            }
            if prefetcher.engine_has_all_memory() {
                completion.mark_complete();
            }
        }
        if is_source_readable {
            match read_byte_count(source.read(prefetcher.receive_buffer())) {
                Some(0) if prefetcher.engine_has_all_memory() => {
                    // Only the reply to PS_IOV_CLOSE is missing, and CRIU waits for this reply. The
                    // socket buffer has space for four bytes, unless CRIU has exited.
                    let _ = engine.write(prefetcher.missing_close_reply());
                    return Ok(true);
                }
                Some(0) => return Ok(prefetcher.engine_is_done()),
                Some(bytes) => prefetcher.receive_from_source(bytes)?,
                None => {}
            }
        }
        let write_result = prefetcher
            .write_replies(&mut engine)
            .and_then(|()| write_and_remove(&mut source, prefetcher.bytes_for_source()));
        if write_result.is_err() {
            // CRIU or the source has closed its stream. The remaining program detects the end of
            // its own stream.
            return Ok(prefetcher.engine_is_done());
        }
        // CRIU may wait long for the CPU time that it needs to exit. Neither host waits for that
        // exit.
        if prefetcher.is_finished() {
            return Ok(true);
        }
    }
}

/// Returns the number of bytes that were read: 0 at the end of the stream or after an error, `None`
/// if no data is available.
fn read_byte_count(read_result: io::Result<usize>) -> Option<usize> {
    match read_result {
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
            ) =>
        {
            None
        }
        read_result => Some(read_result.unwrap_or(0)),
    }
}

/// Waits until CRIU or the source can be read or accepts more data, or until CRIU has closed a
/// userfaultfd. Returns whether CRIU can be read, and whether the source can be read.
fn wait_ready(
    prefetcher: &mut Prefetcher,
    engine: &UnixStream,
    source: &UnixStream,
    close_reports: Option<&UffdCloseReports>,
) -> [bool; 2] {
    let awaited_events = |reads, writes| {
        let flag_if = |condition: bool, flag| if condition { flag } else { PollFlags::empty() };
        flag_if(reads, PollFlags::POLLIN) | flag_if(writes, PollFlags::POLLOUT)
    };
    let engine_events = awaited_events(prefetcher.accepts_requests(), prefetcher.is_blocked());
    let source_events = awaited_events(
        prefetcher.accepts_replies(),
        !prefetcher.bytes_for_source().is_empty(),
    );
    let mut fds = vec![
        PollFd::new(engine.as_fd(), engine_events),
        PollFd::new(source.as_fd(), source_events),
    ];
    fds.extend(
        close_reports
            .map(|report_receiver| PollFd::new(report_receiver.as_fd(), PollFlags::POLLIN)),
    );
    // If `poll` fails, the caller tries to read and calls this function again.
    let _ = poll(&mut fds, PollTimeout::NONE);
    let reads = PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR;
    [0, 1].map(|index: usize| {
        fds[index]
            .revents()
            .is_some_and(|events| events.intersects(reads))
    })
}
