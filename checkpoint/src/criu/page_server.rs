//! Serves the memory of a dumped task that is not in the images. The memory stays in the task's
//! processes, even after they have been killed.
//!
//! The kernel frees the memory of a killed process when the process exits. A tracer can stop the
//! process immediately before the exit, at PTRACE_EVENT_EXIT. In that stop the process executes no
//! instructions, only its tracer can make it continue, and its memory is still readable. Therefore:
//!
//! 1. From the dump on, a thread of the tasker traces the first thread of each process that has
//!    served memory.
//! 2. Before the processes are killed the tracer sets PTRACE_O_TRACEEXIT
//!    ([`TracerOrder::RetainMemoryAfterKill`]).
//! 3. When the last page was served, or no page is needed any more, the tracer detaches. A killed
//!    process then exits; any other process remains stopped. The kernel does the same if the tasker
//!    ends for any reason.

use super::lazy_pages_filter::LazyPages;
use super::page_server_wire::{
    CHANGED_PAGES, GET_CHANGED, HeaderLayout, PE_PRESENT, PS_CMD_BITS, PS_IOV_ADD_F, PS_IOV_CLOSE,
    PS_IOV_FORCE_CLOSE, PS_IOV_GET, PageHeader, bitmap_bytes,
};
use super::process::{raise_thread_priority, wait_readable};
use super::ptrace::TracedThread;
use crate::engine::pages::{BLOCK_PAGES, page_size};
use crate::engine::{CallLimits, MemoryServer, SentPages, ServedMemory, TracerOrder};
use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use sempa_proto::migration::Failure;
use std::fs::File;
use std::io::{self, IoSliceMut, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Maximum number of bytes that are read from a process and written to the stream at once.
const READ_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of bytes that are read from the request stream at once.
const REQUEST_BUFFER_BYTES: usize = 4 << 10;
/// Capacity of the queue of orders to the tracer. Senders wait until each order is executed.
const ORDER_QUEUE_LEN: usize = 4;

/// A server for the memory of a dumped task, which the target requests page by page.
pub(super) struct PageServer {
    handle: ServedMemory,
    tracer: Option<JoinHandle<()>>,
    server: Option<JoinHandle<Result<(), Failure>>>,
    /// Event that becomes readable when serving has ended.
    ended: Arc<EventFd>,
}

impl PageServer {
    /// Attaches to the processes and starts to serve their memory on the stream `page_stream`.
    /// `sent` records the pages that the target already has.
    ///
    /// # Errors
    /// A process cannot be traced, or no thread is available. The processes remain stopped.
    pub(super) fn start(
        lazy_pages: LazyPages,
        page_stream: Arc<OwnedFd>,
        sent: Option<Arc<SentPages>>,
    ) -> Result<PageServer, Failure> {
        let io = |what: &str, e: io::Error| {
            Failure::Engine(format!("its memory cannot be served: {what}: {e}"))
        };
        let pids: Vec<i32> = lazy_pages.processes.iter().map(|kept| kept.pid).collect();
        let (orders, to_tracer) = sync_channel(ORDER_QUEUE_LEN);
        let (attach_sender, attach_receiver) = sync_channel(1);
        let tracer = std::thread::Builder::new()
            .name("keeper".into())
            .spawn(move || run_tracer(&pids, &attach_sender, &to_tracer))
            .map_err(|e| io("no thread", e))?;
        let handle = ServedMemory {
            page_stream: page_stream.clone(),
            order_sender: orders,
        };
        let ended = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let ended = Arc::new(ended.map_err(|e| io("no descriptor", e.into()))?);
        let mut server = PageServer {
            handle,
            tracer: Some(tracer),
            server: None,
            ended,
        };
        let traced = attach_receiver
            .recv()
            .unwrap_or_else(|_| Err(Errno::ESRCH.into()));
        traced.map_err(|e| io("a process cannot be traced", e))?;
        let stream = page_stream
            .try_clone()
            .map(UnixStream::from)
            .map_err(|e| io("no descriptor", e))?;
        let ended = server.ended.clone();
        let server_thread = std::thread::Builder::new()
            .name("handing".into())
            .spawn(move || {
                raise_thread_priority();
                let done = serve_requests(&stream, &lazy_pages, sent.as_deref());
                // The shutdown also notifies a target that requested a page that is not served. The
                // write to `ended` fails only if the counter is full.
                let _ = stream.shutdown(std::net::Shutdown::Both);
                let _ = ended.write(1);
                done
            });
        server.server = Some(server_thread.map_err(|e| io("no thread", e))?);
        Ok(server)
    }

    /// Stops serving and detaches from the processes. Returns the result of serving.
    fn stop(&mut self) -> Result<(), Failure> {
        self.handle.stop_serving();
        let broken = || Failure::Engine("the thread that serves memory has panicked".into());
        let serve_result = self.server.take().map_or(Ok(()), |handing| {
            handing.join().unwrap_or_else(|_| Err(broken()))
        });
        if let Some(tracer) = self.tracer.take() {
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

    fn finish(mut self: Box<Self>, limits: &CallLimits) -> Result<(), Failure> {
        let waited = wait_readable(&*self.ended, limits, "the end of serving its memory");
        let serve_result = self.stop();
        waited.and(serve_result)
    }
}

impl Drop for PageServer {
    fn drop(&mut self) {
        // Has no effect after `finish`. Without `finish` the result is not needed.
        let _ = self.stop();
    }
}

/// Attaches to these processes and traces them until it is ordered to detach. Sends to
/// `attach_result` whether attaching succeeded.
fn run_tracer(
    pids: &[i32],
    attach_result: &SyncSender<io::Result<()>>,
    orders: &Receiver<TracerOrder>,
) {
    let attached: io::Result<Vec<TracedThread>> =
        pids.iter().map(|pid| TracedThread::attach(*pid)).collect();
    let attached = match attached {
        Ok(attached) => attached,
        Err(e) => return drop(attach_result.send(Err(e))),
    };
    if attach_result.send(Ok(())).is_err() {
        return;
    }
    while let Ok(TracerOrder::RetainMemoryAfterKill(answer)) = orders.recv() {
        // Fails for a process that has just exited. Such a process has no memory; a request for its
        // pages will fail.
        attached
            .iter()
            .for_each(|process| drop(process.stop_at_exit()));
        let _ = answer.send(());
    }
}

/// Answers page requests until the target reports the end or closes the stream.
fn serve_requests(
    mut stream: &UnixStream,
    lazy_pages: &LazyPages,
    sent: Option<&SentPages>,
) -> Result<(), Failure> {
    let failed = |what: &str| Failure::Engine(format!("serving its memory has failed: {what}"));
    let (mut received, mut layout, mut buffer) = (Vec::new(), None, Vec::new());
    let mut bytes = [0; REQUEST_BUFFER_BYTES];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(length) => received.extend_from_slice(&bytes[..length]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // The stream was shut down. A write fails for the same reason.
            Err(_) => return Ok(()),
        }
        while let Some(command) = received
            .first_chunk()
            .map(|command| u32::from_ne_bytes(*command))
        {
            if matches!(command, PS_IOV_CLOSE | PS_IOV_FORCE_CLOSE) {
                let _ = stream.write_all(&0_i32.to_ne_bytes());
                return Ok(());
            }
            layout = layout.or_else(|| {
                HeaderLayout::detect(&received, |number, address| {
                    lazy_pages.contains(number, address)
                })
            });
            let Some(header_layout) = layout else {
                match received.len() < HeaderLayout::BYTES_MAX {
                    true => break,
                    false => return Err(failed("the target requested a page that is not served")),
                }
            };
            if received.len() < header_layout.bytes() {
                break;
            }
            let head = header_layout.read(&received);
            received.drain(..header_layout.bytes());
            let answered = match (head.command, sent) {
                (PS_IOV_GET, _) if head.pages > 0 => {
                    send_pages(stream, lazy_pages, header_layout, &head, &mut buffer)
                }
                (GET_CHANGED, Some(sent)) if (1..=BLOCK_PAGES).contains(&head.pages) => {
                    send_changed_pages(
                        stream,
                        (lazy_pages, sent),
                        header_layout,
                        &head,
                        &mut buffer,
                    )
                }
                _ => {
                    return Err(failed(&format!("unknown request {head:?}")));
                }
            };
            match answered {
                Ok(()) => {}
                Err(e) if is_closed(&e) => return Ok(()),
                Err(e) => return Err(failed(&format!("{head:?}: {e}"))),
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
    let mut at = request.address;
    // The header and the first chunk of pages are sent by one write.
    buffer.clear();
    buffer.extend(layout.write(&PageHeader {
        command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
        ..*request
    }));
    while at < end {
        let (pid, until) = served_range_at(lazy_pages, request.process, at)?;
        let length = (until.min(end) - at).min(READ_BYTES_MAX);
        let begin = buffer.len();
        buffer.resize(begin + length as usize, 0);
        read_memory(pid, at, &mut buffer[begin..])?;
        stream.write_all(buffer)?;
        buffer.clear();
        at += length;
    }
    Ok(())
}

/// Sends those of the requested pages whose content has changed since the pre-copy, with a bitmap
/// of them.
fn send_changed_pages(
    mut stream: &UnixStream,
    (lazy_pages, sent): (&LazyPages, &SentPages),
    layout: HeaderLayout,
    request: &PageHeader,
    buffer: &mut Vec<u8>,
) -> io::Result<()> {
    let (end, page) = (request_end_address(request)?, page_size() as usize);
    let mut at = request.address;
    buffer.resize((end - at) as usize, 0);
    while at < end {
        let (pid, until) = served_range_at(lazy_pages, request.process, at)?;
        let until = until.min(end);
        read_memory(
            pid,
            at,
            &mut buffer[(at - request.address) as usize..(until - request.address) as usize],
        )?;
        at = until;
    }
    let mut reply = layout.write(&PageHeader {
        command: CHANGED_PAGES,
        ..*request
    });
    let bitmap_offset = reply.len();
    reply.resize(bitmap_offset + bitmap_bytes(request.pages), 0);
    for (number, content) in buffer.chunks(page).enumerate() {
        if !sent.has(
            request.process,
            request.address + (number * page) as u64,
            content,
        ) {
            reply[bitmap_offset + number / 8] |= 1 << (number % 8);
            reply.extend_from_slice(content);
        }
    }
    stream.write_all(&reply)
}

fn request_end_address(request: &PageHeader) -> io::Result<u64> {
    let length = request
        .pages
        .checked_mul(page_size())
        .ok_or(io::ErrorKind::InvalidInput)?;
    request
        .address
        .checked_add(length)
        .ok_or(io::ErrorKind::InvalidInput.into())
}

/// Returns the PID of the process that has the page at the address `at`, and the end address of the
/// range of served pages that contains it.
fn served_range_at(lazy_pages: &LazyPages, process: u64, at: u64) -> io::Result<(i32, u64)> {
    let not_missing = || io::Error::other(format!("no page to serve at {at:#x}"));
    lazy_pages.range_at(process, at).ok_or_else(not_missing)
}

/// Reads memory of a process into the whole buffer, including areas without read permission.
fn read_memory(pid: i32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
    match read_readable(pid, address, buffer) {
        Err(e) if e.raw_os_error() == Some(libc::EFAULT) => {
            File::open(format!("/proc/{pid}/mem"))?.read_exact_at(buffer, address)
        }
        read => read,
    }
}

fn read_readable(pid: i32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        let from = [RemoteIoVec {
            base: address as usize + done,
            len: buffer.len() - done,
        }];
        match process_vm_readv(
            Pid::from_raw(pid),
            &mut [IoSliceMut::new(&mut buffer[done..])],
            &from,
        ) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::pre_copy::{acknowledge, receive, send};
    use super::*;
    use crate::engine::{CancelHandle, PreCopyStopCondition};
    use nix::sys::signal::{Signal, kill};
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    /// Timeout for every event that a test waits for.
    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    /// Starts a process with a known byte pattern in its memory and stops it. Returns the process
    /// and the address of the pattern.
    fn stopped_process_with_pattern() -> (Child, u64) {
        let code = "import ctypes, time\nheld = ctypes.create_string_buffer(bytes(range(256)) * 16384)\n\
                    print(ctypes.addressof(held), flush=True)\ntime.sleep(1000)";
        let mut child = Command::new("python3")
            .args(["-c", code])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let mut line = String::new();
        let out = child.stdout.as_mut().expect("a pipe");
        io::BufRead::read_line(&mut io::BufReader::new(out), &mut line).expect("it says where");
        kill(Pid::from_raw(child.id() as i32), Signal::SIGSTOP).expect("it is there");
        (child, line.trim().parse().expect("a number"))
    }

    fn page_stream_pair() -> (UnixStream, Arc<OwnedFd>) {
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        ours.set_read_timeout(Some(TEST_TIMEOUT)).expect("a socket");
        (ours, Arc::new(theirs.into()))
    }

    fn request_pages(
        mut stream: &UnixStream,
        process: u64,
        address: u64,
        pages: u64,
    ) -> Option<Vec<u8>> {
        let request = HeaderLayout::Long.write(&PageHeader {
            command: PS_IOV_GET,
            pages,
            address,
            process,
        });
        stream.write_all(&request).ok()?;
        let mut answer = vec![0; request.len() + (pages * page_size()) as usize];
        stream.read_exact(&mut answer).ok()?;
        let head = HeaderLayout::Long.read(&answer);
        assert_eq!(
            head,
            PageHeader {
                command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
                pages,
                address,
                process
            }
        );
        Some(answer.split_off(request.len()))
    }

    fn process_state(pid: u32) -> Option<char> {
        crate::proc::stat(pid.cast_signed()).map(|stat| stat.state)
    }

    fn wait_for(what: &str, look: impl Fn() -> bool) {
        let until = Instant::now() + TEST_TIMEOUT;
        while !look() {
            assert!(Instant::now() < until, "{what}");
            std::thread::yield_now();
        }
    }

    /// The memory of a killed process is served until the target has all of it; then the process
    /// exits.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn memory_of_killed_process_is_served() {
        let (mut child, address) = stopped_process_with_pattern();
        let pid = child.id();
        let lazy_pages = LazyPages::choose(&[pid as i32]).expect("it is there");
        let number = lazy_pages.processes[0].namespace_pid;
        let first = (address + page_size() - 1) & !(page_size() - 1);
        let (stream, page_stream) = page_stream_pair();
        let server = PageServer::start(lazy_pages, page_stream, None).expect("it can be traced");
        let skipped = (first - address) as usize;
        let expected: Vec<u8> = (0..=255_u8)
            .cycle()
            .skip(skipped % 256)
            .take(3 * page_size() as usize)
            .collect();
        assert_eq!(
            request_pages(&stream, number, first, 3).as_deref(),
            Some(&expected[..]),
            "while it is stopped"
        );
        server.handle().retain_memory_after_kill();
        // Twice, because a second signal must not release a process at its exit stop.
        for _ in 0..2 {
            child.kill().expect("it is there");
            wait_for("it stays", || process_state(pid) == Some('t'));
        }
        assert_eq!(
            request_pages(&stream, number, first, 3).as_deref(),
            Some(&expected[..]),
            "when it was killed"
        );
        drop(stream);
        let limits = CallLimits {
            timeout: TEST_TIMEOUT,
            cancel: CancelHandle::new().expect("a descriptor"),
        };
        assert_eq!(Box::new(server).finish(&limits), Ok(()));
        assert!(!child.wait().expect("it ends").success());
    }

    /// After a pre-copy, the server sends only pages that have changed since the pre-copy.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn only_pages_changed_since_pre_copy_are_sent() {
        let (mut child, address) = stopped_process_with_pattern();
        let pid = child.id() as i32;
        let first = address.next_multiple_of(page_size());
        let (stream, page_stream) = page_stream_pair();
        let sent = std::thread::scope(|scope| {
            let target = page_stream.clone();
            let taking = scope.spawn({
                let stream = OwnedFd::from(stream.try_clone().expect("a descriptor"));
                move || {
                    receive(&stream, u64::MAX).inspect(|store| {
                        acknowledge(store, &stream).expect("it listens");
                    })
                }
            });
            let sent = send(
                &[pid],
                &target,
                &PreCopyStopCondition::at_deadline(Instant::now() + TEST_TIMEOUT),
            )
            .expect("it is taken");
            taking.join().expect("no panic").expect("all comes");
            sent
        });
        let memory = File::options()
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .expect("it is there");
        memory
            .write_all_at(b"new", first + 9 * page_size() + 5)
            .expect("it is stopped");
        let lazy_pages = LazyPages::choose(&[pid]).expect("it is there");
        let number = lazy_pages.processes[0].namespace_pid;
        let server = PageServer::start(lazy_pages, page_stream, Some(Arc::new(sent)))
            .expect("it can be traced");
        let request = HeaderLayout::Long.write(&PageHeader {
            command: GET_CHANGED,
            pages: 12,
            address: first,
            process: number,
        });
        (&stream).write_all(&request).expect("it listens");
        let mut answer = vec![0; request.len() + bitmap_bytes(12) + page_size() as usize];
        (&stream).read_exact(&mut answer).expect("it answers");
        assert_eq!(
            HeaderLayout::Long.read(&answer),
            PageHeader {
                command: CHANGED_PAGES,
                pages: 12,
                address: first,
                process: number
            }
        );
        assert_eq!(answer[request.len()..][..2], [0, 0b10]);
        assert_eq!(answer[request.len() + 2..][5..8], *b"new");
        assert_eq!(
            request_pages(&stream, number, first + page_size(), 2).map(|pages| pages.len() as u64),
            Some(2 * page_size())
        );
        drop(stream);
        let limits = CallLimits {
            timeout: TEST_TIMEOUT,
            cancel: CancelHandle::new().expect("a descriptor"),
        };
        assert_eq!(Box::new(server).finish(&limits), Ok(()));
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }

    /// When serving ends, a process remains stopped and can be continued.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn process_without_server_remains_stopped() {
        let (mut child, _) = stopped_process_with_pattern();
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
        assert_eq!(Box::new(server).finish(&limits), Ok(()));
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
        let (mut child, address) = stopped_process_with_pattern();
        let lazy_pages = LazyPages::choose(&[child.id() as i32]).expect("it is there");
        let (number, page) = (
            lazy_pages.processes[0].namespace_pid,
            address & !(page_size() - 1),
        );
        for (process, address, pages) in [
            (number + 1, page, 1),
            (number, page + (1 << 40), 1),
            (number, page, u64::MAX / 4096),
        ] {
            let (stream, page_stream) = page_stream_pair();
            let server =
                PageServer::start(lazy_pages.clone(), page_stream, None).expect("it can be traced");
            let request = HeaderLayout::Long.write(&PageHeader {
                command: PS_IOV_GET,
                pages,
                address,
                process,
            });
            (&stream).write_all(&request).expect("it listens");
            let limits = CallLimits {
                timeout: TEST_TIMEOUT,
                cancel: CancelHandle::new().expect("a descriptor"),
            };
            let why = Box::new(server)
                .finish(&limits)
                .expect_err("it was asked for nonsense")
                .to_string();
            assert!(why.contains("serving its memory has failed"), "{why}");
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
        let done = Box::new(server).finish(&CallLimits {
            timeout: TEST_TIMEOUT,
            cancel,
        });
        assert!(matches!(done, Err(Failure::Cancelled(_))), "{done:?}");
    }
}
