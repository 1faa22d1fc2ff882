//! Serves the memory of a dumped task that is not in the images. The memory stays in the task's
//! processes, even after they have been killed.
//!
//! The kernel frees the memory of a killed process when the process exits. A tracer can stop the
//! process immediately before the exit, at PTRACE_EVENT_EXIT. In that stop the process executes no
//! instructions, only its tracer can make it continue, and its memory is still readable. Therefore:
//!
//! 1. After the dump a thread of the tasker traces the first thread of each process whose memory is
//!    served.
//! 2. Before the processes are killed the tracer sets PTRACE_O_TRACEEXIT
//!    ([`TracerOrder::RetainMemoryAfterKill`]).
//! 3. When the last page was served, or no page is needed any more, the tracer detaches. A killed
//!    process then exits; any other process remains stopped. If the tasker ends for any reason, the
//!    kernel detaches the tracer with the same effect.

use super::lazy_pages_filter::LazyPages;
use super::page_server_wire::{
    CHANGED_PAGES, GET_CHANGED, HeaderLayout, PE_PRESENT, PS_CMD_BITS, PS_IOV_ADD_F, PS_IOV_CLOSE,
    PS_IOV_FORCE_CLOSE, PS_IOV_GET, PageHeader, bitmap_bytes,
};
use super::process::{raise_thread_priority, wait_until_readable};
use super::process_memory::read_memory;
use super::ptrace::TracedThread;
use crate::engine::pages::{BLOCK_PAGES, page_size};
use crate::engine::{CallLimits, MemoryServer, SentPages, ServedMemory, TracerOrder};
use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use sempa_proto::migration::Failure;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Maximum number of bytes that are read from a process and written to the stream at once.
const CHUNK_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of bytes that are read from the request stream at once.
const REQUEST_BUFFER_BYTES: usize = 4 << 10;
/// Capacity of the queue of orders to the tracer. Senders wait until each order is executed.
const ORDER_QUEUE_LEN_MAX: usize = 4;

/// A server for the memory of a dumped task, which the target requests page by page.
pub(super) struct PageServer {
    handle: ServedMemory,
    tracer_thread: Option<JoinHandle<()>>,
    serve_thread: Option<JoinHandle<Result<(), Failure>>>,
    /// Event that becomes readable when serving has ended.
    end_event: Arc<EventFd>,
}

impl PageServer {
    /// Attaches to the processes and starts to serve their memory on the stream `page_stream`.
    /// `sent_pages` records the pages that the target already has.
    ///
    /// # Errors
    /// A process cannot be traced, or no thread is available. The processes remain stopped.
    pub(super) fn start(
        lazy_pages: LazyPages,
        page_stream: Arc<OwnedFd>,
        sent_pages: Option<Arc<SentPages>>,
    ) -> Result<Self, Failure> {
        let to_failure = |object: &str, e: io::Error| {
            Failure::Engine(format!("its memory cannot be served: {object}: {e}"))
        };
        let pids: Vec<i32> = lazy_pages
            .processes
            .iter()
            .map(|process| process.pid)
            .collect();
        let (order_sender, order_receiver) = sync_channel(ORDER_QUEUE_LEN_MAX);
        let (attach_sender, attach_receiver) = sync_channel(1);
        let tracer = std::thread::Builder::new()
            .name("keeper".into())
            .spawn(move || run_tracer(&pids, &attach_sender, &order_receiver))
            .map_err(|e| to_failure("no thread", e))?;
        let handle = ServedMemory {
            page_stream: page_stream.clone(),
            order_sender,
        };
        let end_event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let end_event = Arc::new(end_event.map_err(|e| to_failure("no descriptor", e.into()))?);
        let mut server = Self {
            handle,
            tracer_thread: Some(tracer),
            serve_thread: None,
            end_event,
        };
        let attach_result = attach_receiver
            .recv()
            .unwrap_or_else(|_| Err(Errno::ESRCH.into()));
        attach_result.map_err(|e| to_failure("a process cannot be traced", e))?;
        let stream = page_stream
            .try_clone()
            .map(UnixStream::from)
            .map_err(|e| to_failure("no descriptor", e))?;
        let end_event = server.end_event.clone();
        let server_thread = std::thread::Builder::new()
            .name("handing".into())
            .spawn(move || {
                raise_thread_priority();
                let result = serve_requests(&stream, &lazy_pages, sent_pages.as_deref());
                // The shutdown also notifies a target that requested a page that is not served. The
                // write to `end_event` fails only if the counter is full.
                let _ = stream.shutdown(std::net::Shutdown::Both);
                let _ = end_event.write(1);
                result
            });
        server.serve_thread = Some(server_thread.map_err(|e| to_failure("no thread", e))?);
        Ok(server)
    }

    /// Stops serving and detaches from the processes. Returns the result of serving.
    fn stop_and_join(&mut self) -> Result<(), Failure> {
        self.handle.stop_serving();
        let panic_failure = || Failure::Engine("the thread that serves memory has panicked".into());
        let serve_result = self.serve_thread.take().map_or(Ok(()), |thread| {
            thread.join().unwrap_or_else(|_| Err(panic_failure()))
        });
        if let Some(tracer) = self.tracer_thread.take() {
            // The tracer has already ended if it could not attach.
            let _ = self.handle.order_sender.send(TracerOrder::Detach);
            tracer.join().expect("the tracer does not panic");
        }
        serve_result
    }
}

impl MemoryServer for PageServer {
    fn handle(&self) -> ServedMemory {
        self.handle.clone()
    }

    fn wait_until_served(mut self: Box<Self>, limits: &CallLimits) -> Result<(), Failure> {
        let wait_result =
            wait_until_readable(&*self.end_event, limits, "the end of serving its memory");
        let serve_result = self.stop_and_join();
        wait_result.and(serve_result)
    }
}

impl Drop for PageServer {
    fn drop(&mut self) {
        // Has no effect after `wait_until_served`. If that was not called, the result is not
        // needed.
        let _ = self.stop_and_join();
    }
}

/// Attaches to the first threads of these processes and sends to `attach_result` whether attaching
/// succeeded. Then executes the orders until [`TracerOrder::Detach`] or the end of the channel.
fn run_tracer(
    pids: &[i32],
    attach_result: &SyncSender<io::Result<()>>,
    orders: &Receiver<TracerOrder>,
) {
    let traced_threads: io::Result<Vec<TracedThread>> =
        pids.iter().map(|pid| TracedThread::attach(*pid)).collect();
    let traced_threads = match traced_threads {
        Ok(traced_threads) => traced_threads,
        Err(e) => return drop(attach_result.send(Err(e))),
    };
    if attach_result.send(Ok(())).is_err() {
        return;
    }
    while let Ok(TracerOrder::RetainMemoryAfterKill(reply_sender)) = orders.recv() {
        // Fails for a process that has just exited. Such a process has no memory; a request for its
        // pages will fail.
        traced_threads
            .iter()
            .for_each(|thread| drop(thread.stop_at_exit()));
        let _ = reply_sender.send(());
    }
}

/// Answers page requests until the target reports the end or closes the stream.
fn serve_requests(
    mut stream: &UnixStream,
    lazy_pages: &LazyPages,
    sent_pages: Option<&SentPages>,
) -> Result<(), Failure> {
    let to_failure =
        |reason: &str| Failure::Engine(format!("serving its memory has failed: {reason}"));
    let (mut request_bytes, mut layout, mut buffer) = (Vec::new(), None, Vec::new());
    let mut read_buffer = [0; REQUEST_BUFFER_BYTES];
    loop {
        match stream.read(&mut read_buffer) {
            Ok(0) => return Ok(()),
            Ok(length) => request_bytes.extend_from_slice(&read_buffer[..length]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // The stream was shut down. A write fails for the same reason.
            Err(_) => return Ok(()),
        }
        while let Some(command) = request_bytes
            .first_chunk()
            .map(|command| u32::from_ne_bytes(*command))
        {
            if matches!(command, PS_IOV_CLOSE | PS_IOV_FORCE_CLOSE) {
                let _ = stream.write_all(&0_i32.to_ne_bytes());
                return Ok(());
            }
            layout = layout.or_else(|| {
                HeaderLayout::detect(&request_bytes, |namespace_pid, address| {
                    lazy_pages.contains(namespace_pid, address)
                })
            });
            let Some(header_layout) = layout else {
                match request_bytes.len() < HeaderLayout::BYTES_MAX {
                    true => break,
                    false => {
                        return Err(to_failure("the target requested a page that is not served"));
                    }
                }
            };
            if request_bytes.len() < header_layout.bytes() {
                break;
            }
            let header = header_layout.decode(&request_bytes);
            request_bytes.drain(..header_layout.bytes());
            let serve_result = match (header.command, sent_pages) {
                (PS_IOV_GET, _) if header.page_count > 0 => {
                    send_pages(stream, lazy_pages, header_layout, &header, &mut buffer)
                }
                (GET_CHANGED, Some(sent_pages))
                    if (1..=BLOCK_PAGES).contains(&header.page_count) =>
                {
                    send_changed_pages(
                        stream,
                        (lazy_pages, sent_pages),
                        header_layout,
                        &header,
                        &mut buffer,
                    )
                }
                _ => {
                    return Err(to_failure(&format!("unknown request {header:?}")));
                }
            };
            match serve_result {
                Ok(()) => {}
                Err(e) if is_closed(&e) => return Ok(()),
                Err(e) => return Err(to_failure(&format!("{header:?}: {e}"))),
            }
        }
    }
}

/// True if the target has closed the stream.
fn is_closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

/// Sends all pages of the request `request`.
fn send_pages(
    mut stream: &UnixStream,
    lazy_pages: &LazyPages,
    layout: HeaderLayout,
    request: &PageHeader,
    buffer: &mut Vec<u8>,
) -> io::Result<()> {
    let end = request_end_address(request)?;
    let mut address = request.address;
    // The header and the first chunk of pages are sent by one write.
    buffer.clear();
    buffer.extend(layout.encode(&PageHeader {
        command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
        ..*request
    }));
    while address < end {
        let (pid, range_end) = served_range_at(lazy_pages, request.namespace_pid, address)?;
        let length = (range_end.min(end) - address).min(CHUNK_BYTES_MAX);
        let chunk_offset = buffer.len();
        buffer.resize(chunk_offset + length as usize, 0);
        read_memory(pid, address, &mut buffer[chunk_offset..])?;
        stream.write_all(buffer)?;
        buffer.clear();
        address += length;
    }
    Ok(())
}

/// Sends the requested pages whose content has changed since the pre-copy. A bitmap before the
/// pages marks which of the requested pages are sent.
fn send_changed_pages(
    mut stream: &UnixStream,
    (lazy_pages, sent_pages): (&LazyPages, &SentPages),
    layout: HeaderLayout,
    request: &PageHeader,
    buffer: &mut Vec<u8>,
) -> io::Result<()> {
    let (end, page_bytes) = (request_end_address(request)?, page_size() as usize);
    let mut address = request.address;
    buffer.resize((end - address) as usize, 0);
    while address < end {
        let (pid, range_end) = served_range_at(lazy_pages, request.namespace_pid, address)?;
        let range_end = range_end.min(end);
        read_memory(
            pid,
            address,
            &mut buffer
                [(address - request.address) as usize..(range_end - request.address) as usize],
        )?;
        address = range_end;
    }
    let mut reply = layout.encode(&PageHeader {
        command: CHANGED_PAGES,
        ..*request
    });
    let bitmap_offset = reply.len();
    reply.resize(bitmap_offset + bitmap_bytes(request.page_count), 0);
    for (index, content) in buffer.chunks(page_bytes).enumerate() {
        if !sent_pages.contains(
            request.namespace_pid,
            request.address + (index * page_bytes) as u64,
            content,
        ) {
            reply[bitmap_offset + index / 8] |= 1 << (index % 8);
            reply.extend_from_slice(content);
        }
    }
    stream.write_all(&reply)
}

fn request_end_address(request: &PageHeader) -> io::Result<u64> {
    let length = request
        .page_count
        .checked_mul(page_size())
        .ok_or(io::ErrorKind::InvalidInput)?;
    request
        .address
        .checked_add(length)
        .ok_or(io::ErrorKind::InvalidInput.into())
}

/// Returns the PID of the process that contains the page at the address `address`, and the end
/// address of the range of served pages that contains this page.
fn served_range_at(
    lazy_pages: &LazyPages,
    namespace_pid: u64,
    address: u64,
) -> io::Result<(i32, u64)> {
    let not_served_error = || io::Error::other(format!("no page to serve at {address:#x}"));
    lazy_pages
        .range_at(namespace_pid, address)
        .ok_or_else(not_served_error)
}

#[cfg(test)]
mod tests {
    use super::super::pre_copy::{acknowledge, receive, send};
    use super::*;
    use crate::engine::{CancelHandle, PreCopyStopCondition};
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    /// Timeout for every event that a test waits for.
    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    /// Starts a process with a known byte pattern in its memory and stops it. Returns the process
    /// and the address of the pattern.
    fn start_stopped_process() -> (Child, u64) {
        let code = "import ctypes, time\nheld = ctypes.create_string_buffer(bytes(range(256)) * 16384)\n\
                    print(ctypes.addressof(held), flush=True)\ntime.sleep(1000)";
        let mut child = Command::new("python3")
            .args(["-c", code])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let mut line = String::new();
        let stdout = child.stdout.as_mut().expect("a pipe");
        io::BufRead::read_line(&mut io::BufReader::new(stdout), &mut line).expect("it says where");
        kill(Pid::from_raw(child.id() as i32), Signal::SIGSTOP).expect("it is there");
        (child, line.trim().parse().expect("a number"))
    }

    fn page_stream_pair() -> (UnixStream, Arc<OwnedFd>) {
        let (target_stream, source_stream) = UnixStream::pair().expect("descriptors");
        target_stream
            .set_read_timeout(Some(TEST_TIMEOUT))
            .expect("a socket");
        (target_stream, Arc::new(source_stream.into()))
    }

    fn request_pages(
        mut stream: &UnixStream,
        namespace_pid: u64,
        address: u64,
        page_count: u64,
    ) -> Option<Vec<u8>> {
        let request = HeaderLayout::Long.encode(&PageHeader {
            command: PS_IOV_GET,
            page_count,
            address,
            namespace_pid,
        });
        stream.write_all(&request).ok()?;
        let mut reply = vec![0; request.len() + (page_count * page_size()) as usize];
        stream.read_exact(&mut reply).ok()?;
        let header = HeaderLayout::Long.decode(&reply);
        assert_eq!(
            header,
            PageHeader {
                command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
                page_count,
                address,
                namespace_pid
            }
        );
        Some(reply.split_off(request.len()))
    }

    fn process_state(pid: u32) -> Option<char> {
        crate::proc::stat(pid.cast_signed()).map(|stat| stat.state)
    }

    fn wait_for(event_name: &str, has_occurred: impl Fn() -> bool) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !has_occurred() {
            assert!(Instant::now() < deadline, "{event_name}");
            std::thread::yield_now();
        }
    }

    /// The memory of a killed process is served until the target has all of it; then the process
    /// exits.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn memory_of_killed_process_is_served() {
        let (mut child, address) = start_stopped_process();
        let pid = child.id();
        let lazy_pages = LazyPages::choose(&[pid as i32]).expect("it is there");
        let namespace_pid = lazy_pages.processes[0].namespace_pid;
        let first_page = (address + page_size() - 1) & !(page_size() - 1);
        let (stream, page_stream) = page_stream_pair();
        let server = PageServer::start(lazy_pages, page_stream, None).expect("it can be traced");
        let skipped_bytes = (first_page - address) as usize;
        let expected: Vec<u8> = (0..=255_u8)
            .cycle()
            .skip(skipped_bytes % 256)
            .take(3 * page_size() as usize)
            .collect();
        assert_eq!(
            request_pages(&stream, namespace_pid, first_page, 3).as_deref(),
            Some(&expected[..]),
            "while it is stopped"
        );
        server.handle().retain_memory_after_kill();
        // Kill twice, because a second signal must not end the exit stop of a process.
        for _ in 0..2 {
            child.kill().expect("it is there");
            wait_for("it stays", || process_state(pid) == Some('t'));
        }
        assert_eq!(
            request_pages(&stream, namespace_pid, first_page, 3).as_deref(),
            Some(&expected[..]),
            "when it was killed"
        );
        drop(stream);
        let limits = CallLimits {
            timeout: TEST_TIMEOUT,
            cancel: CancelHandle::new().expect("a descriptor"),
        };
        assert_eq!(Box::new(server).wait_until_served(&limits), Ok(()));
        assert!(!child.wait().expect("it ends").success());
    }

    /// After a pre-copy, the server sends only pages that have changed since the pre-copy.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn only_pages_changed_since_pre_copy_are_sent() {
        let (mut child, address) = start_stopped_process();
        let pid = child.id() as i32;
        let first_page = address.next_multiple_of(page_size());
        let (stream, page_stream) = page_stream_pair();
        let sent_pages = std::thread::scope(|scope| {
            let target_stream = page_stream.clone();
            let receiver_thread = scope.spawn({
                let stream = OwnedFd::from(stream.try_clone().expect("a descriptor"));
                move || {
                    receive(&stream, u64::MAX).inspect(|store| {
                        acknowledge(store, &stream).expect("it listens");
                    })
                }
            });
            let sent_pages = send(
                &[pid],
                &target_stream,
                &PreCopyStopCondition::at_deadline(Instant::now() + TEST_TIMEOUT),
            )
            .expect("it is taken");
            receiver_thread
                .join()
                .expect("no panic")
                .expect("all comes");
            sent_pages
        });
        let memory_file = File::options()
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .expect("it is there");
        memory_file
            .write_all_at(b"new", first_page + 9 * page_size() + 5)
            .expect("it is stopped");
        let lazy_pages = LazyPages::choose(&[pid]).expect("it is there");
        let namespace_pid = lazy_pages.processes[0].namespace_pid;
        let server = PageServer::start(lazy_pages, page_stream, Some(Arc::new(sent_pages)))
            .expect("it can be traced");
        let request = HeaderLayout::Long.encode(&PageHeader {
            command: GET_CHANGED,
            page_count: 12,
            address: first_page,
            namespace_pid,
        });
        (&stream).write_all(&request).expect("it listens");
        let mut reply = vec![0; request.len() + bitmap_bytes(12) + page_size() as usize];
        (&stream).read_exact(&mut reply).expect("it answers");
        assert_eq!(
            HeaderLayout::Long.decode(&reply),
            PageHeader {
                command: CHANGED_PAGES,
                page_count: 12,
                address: first_page,
                namespace_pid
            }
        );
        assert_eq!(reply[request.len()..][..2], [0, 0b10]);
        assert_eq!(reply[request.len() + 2..][5..8], *b"new");
        assert_eq!(
            request_pages(&stream, namespace_pid, first_page + page_size(), 2)
                .map(|pages| pages.len() as u64),
            Some(2 * page_size())
        );
        drop(stream);
        let limits = CallLimits {
            timeout: TEST_TIMEOUT,
            cancel: CancelHandle::new().expect("a descriptor"),
        };
        assert_eq!(Box::new(server).wait_until_served(&limits), Ok(()));
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }

    /// When serving ends, a process remains stopped and can be continued.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn process_without_server_remains_stopped() {
        let (mut child, _) = start_stopped_process();
        let pid = child.id();
        let (stream, page_stream) = page_stream_pair();
        let server = PageServer::start(
            LazyPages::choose(&[pid as i32]).expect("it is there"),
            page_stream,
            None,
        )
        .expect("traced");
        server.handle().stop_serving();
        let limits = CallLimits {
            timeout: TEST_TIMEOUT,
            cancel: CancelHandle::new().expect("a descriptor"),
        };
        assert_eq!(Box::new(server).wait_until_served(&limits), Ok(()));
        wait_for("it is stopped", || process_state(pid) == Some('T'));
        assert_eq!(request_pages(&stream, 1, 4096, 1), None);
        kill(Pid::from_raw(pid as i32), Signal::SIGCONT).expect("it is there");
        wait_for("it goes on", || {
            matches!(process_state(pid), Some('S' | 'R'))
        });
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }

    /// A request for pages that are not served is an error and receives no reply.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn request_for_other_pages_is_an_error() {
        let (mut child, address) = start_stopped_process();
        let lazy_pages = LazyPages::choose(&[child.id() as i32]).expect("it is there");
        let (namespace_pid, page_bytes) = (
            lazy_pages.processes[0].namespace_pid,
            address & !(page_size() - 1),
        );
        for (requested_pid, address, page_count) in [
            (namespace_pid + 1, page_bytes, 1),
            (namespace_pid, page_bytes + (1 << 40), 1),
            (namespace_pid, page_bytes, u64::MAX / 4096),
        ] {
            let (stream, page_stream) = page_stream_pair();
            let server =
                PageServer::start(lazy_pages.clone(), page_stream, None).expect("it can be traced");
            let request = HeaderLayout::Long.encode(&PageHeader {
                command: PS_IOV_GET,
                page_count,
                address,
                namespace_pid: requested_pid,
            });
            (&stream).write_all(&request).expect("it listens");
            let limits = CallLimits {
                timeout: TEST_TIMEOUT,
                cancel: CancelHandle::new().expect("a descriptor"),
            };
            let failure = Box::new(server)
                .wait_until_served(&limits)
                .expect_err("it was asked for nonsense")
                .to_string();
            assert!(
                failure.contains("serving its memory has failed"),
                "{failure}"
            );
        }
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }

    /// A page server ends when it is canceled.
    #[test]
    fn canceled_server_ends() {
        let (_stream, page_stream) = page_stream_pair();
        let server = PageServer::start(LazyPages::default(), page_stream, None)
            .expect("nothing is to be traced");
        let cancel = CancelHandle::new().expect("a descriptor");
        cancel.fire();
        let result = Box::new(server).wait_until_served(&CallLimits {
            timeout: TEST_TIMEOUT,
            cancel,
        });
        assert!(matches!(result, Err(Failure::Cancelled(_))), "{result:?}");
    }
}
