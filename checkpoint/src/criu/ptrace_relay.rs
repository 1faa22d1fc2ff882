//! Traces the task on behalf of CRIU, so that the tracer survives when CRIU is killed.
//!
//! CRIU makes the task execute system calls, each of which ends in a trap. If the tracer dies at
//! that moment, the kernel delivers the trap (SIGTRAP) to the task, which kills the task. Only the
//! tracer can remove a pending trap. Therefore the tracer is a thread of the tasker:
//!
//! 1. A small library that is loaded into CRIU ([`LIBRARY`], `csrc/relay.c`) sends each ptrace
//!    request and each wait over a packet socket.
//! 2. The tracer executes the request and sends the result. The library reads and writes the words
//!    of the task's memory itself, because any process with the rights may do so.
//! 3. When CRIU has ended for any reason, the tracer stops the threads that are still traced,
//!    removes their traps and detaches.
//!
//! A statically linked CRIU does not load the library, and traces the task without the relay.

use super::dump_lock::{self, DumpLock};
use super::ptrace::{
    self, REQUEST_MEMORY_BYTES, RelayedRequest, RequestMemory, SPIN_POLLS, StopCause, ThreadEvent,
};
use super::smaps_reader::SmapsReaders;
use crate::proc;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll, ppoll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, recv, sendmsg, shutdown,
    socketpair,
};
use procfs::process::Process;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::fs::File;
use std::io::{self, IoSlice, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The compiled library that CRIU loads.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/relay.so"));
/// Request number by which the library waits for a thread. The number belongs to no ptrace request.
const WAIT_REQUEST: u64 = u64::MAX;
/// Request number by which the library asks for the mappings of a process.
const SMAPS_REQUEST: u64 = u64::MAX - 1;
/// Thread id of a wait for any thread.
const ANY_THREAD: i32 = -1;
/// Error number of the reply if the thread does not belong to the dumped task.
const NOT_DUMPED_ERROR: i32 = -1;
/// Flag of a request: the data is passed through an iovec.
const FLAG_IOVEC: u32 = 1;
/// Flag of a request: the kernel reads the data.
const FLAG_KERNEL_READS: u32 = 2;
/// Flag of a request: the kernel writes the data.
const FLAG_KERNEL_WRITES: u32 = 4;
/// Flag of a request: address and data are in swapped positions.
const FLAG_SWAPPED: u32 = 8;
/// Length in bytes of a request of the library, without the memory that follows the request.
const REQUEST_HEADER_BYTES: usize = 48;
/// Pause between polls after [`SPIN_POLLS`] polls. Most of CRIU's waits end within a few of these.
const SHORT_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Number of polls with the short pause.
const SHORT_POLLS: u32 = 200;
/// Pause between polls after that.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Timeout for a thread to reach a stop, also after CRIU has ended.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);

/// The descriptors that CRIU inherits from the caller.
#[derive(Debug)]
pub(super) struct CriuDescriptors {
    /// The socket on which the library sends its requests.
    socket: OwnedFd,
    library: OwnedFd,
}

impl CriuDescriptors {
    /// Returns the descriptors that CRIU must inherit with the same numbers.
    pub(super) fn descriptors(&self) -> [&OwnedFd; 2] {
        [&self.socket, &self.library]
    }

    /// Returns the environment variables by which CRIU loads the library, and the library finds the
    /// socket.
    pub(super) fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            preload_variable(&self.library),
            ("SEMPA_RELAY", self.socket.as_raw_fd().to_string()),
        ]
    }
}

/// The socket on which the library in CRIU sends its requests, before the tracer is started.
#[derive(Debug)]
pub(super) struct IdleRelay {
    socket: Arc<OwnedFd>,
}

/// The tracer thread. Dropping this value ends all tracing; CRIU must have ended before.
#[derive(Debug)]
pub(super) struct Relay {
    socket: Arc<OwnedFd>,
    tracer_thread: Option<JoinHandle<()>>,
}

/// Returns the environment variable by which the library finds `area_file`, the file with the
/// memory areas to hide from CRIU.
pub(super) fn hidden_areas_variable(area_file: &OwnedFd) -> (&'static str, String) {
    ("SEMPA_WITHHELD", area_file.as_raw_fd().to_string())
}

/// Returns the environment variables that make the library report that it was loaded: it writes a
/// byte to the pipe `report_pipe`.
pub(super) fn load_report_variables(
    library: &OwnedFd,
    report_pipe: &OwnedFd,
) -> [(&'static str, String); 2] {
    [
        preload_variable(library),
        ("SEMPA_LOADED", report_pipe.as_raw_fd().to_string()),
    ]
}

pub(super) fn preload_variable(library: &OwnedFd) -> (&'static str, String) {
    (
        "LD_PRELOAD",
        format!("/proc/self/fd/{}", library.as_raw_fd()),
    )
}

/// Returns the library as a file in memory.
///
/// # Errors
/// No file descriptor or memory is available.
pub(super) fn library_file() -> io::Result<OwnedFd> {
    memory_file(c"sempa-relay", LIBRARY)
}

/// Returns a file in memory with this name and content.
///
/// # Errors
/// No file descriptor or memory is available.
pub(super) fn memory_file(name: &CStr, content: &[u8]) -> io::Result<OwnedFd> {
    let file = memfd_create(name, MFdFlags::MFD_CLOEXEC)?;
    File::from(file.try_clone()?).write_all(content)?;
    Ok(file)
}

impl IdleRelay {
    /// Creates the socket and the library for a CRIU that is about to be started.
    ///
    /// # Errors
    /// No file descriptor or memory is available.
    pub(super) fn new() -> io::Result<(Self, CriuDescriptors)> {
        let library = library_file()?;
        let (own_socket, criu_socket) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )?;
        Ok((
            Self {
                socket: Arc::new(own_socket),
            },
            CriuDescriptors {
                socket: criu_socket,
                library,
            },
        ))
    }

    /// Starts a thread that will trace the processes of `task`. `smaps_readers` reads their
    /// mappings.
    ///
    /// # Errors
    /// No thread is available.
    pub(super) fn start_tracer(
        self,
        task: TracedTask,
        smaps_readers: SmapsReaders,
    ) -> io::Result<Relay> {
        let tracer = Tracer {
            smaps_readers,
            ..Tracer::new(self.socket.clone(), task)
        };
        let thread = std::thread::Builder::new()
            .name("tracer".into())
            .spawn(move || tracer.handle_requests())?;
        Ok(Relay {
            socket: self.socket,
            tracer_thread: Some(thread),
        })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The thread may have ended already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        if let Some(thread) = self.tracer_thread.take() {
            thread.join().expect("the tracer does not panic");
        }
    }
}

/// A request that the library in CRIU has sent.
#[derive(Debug)]
struct LibraryRequest {
    request_number: u64,
    pid: i64,
    address: u64,
    data: u64,
    address_bytes: usize,
    data_bytes: usize,
    flags: u32,
    /// The memory that the arguments point to, as sent after the request.
    memory: Vec<u8>,
}

impl LibraryRequest {
    fn decode(packet: &[u8]) -> Option<Self> {
        let (header, memory) = packet.split_at_checked(REQUEST_HEADER_BYTES)?;
        let u64_at = |offset: usize| {
            Some(u64::from_ne_bytes(
                header.get(offset..offset + 8)?.try_into().ok()?,
            ))
        };
        let u32_at = |offset: usize| {
            Some(u32::from_ne_bytes(
                header.get(offset..offset + 4)?.try_into().ok()?,
            ))
        };
        let request = Self {
            request_number: u64_at(0)?,
            pid: u64_at(8)? as i64,
            address: u64_at(16)?,
            data: u64_at(24)?,
            address_bytes: u32_at(32)? as usize,
            data_bytes: u32_at(36)? as usize,
            flags: u32_at(40)?,
            memory: memory.to_vec(),
        };
        let sent_data_bytes = if request.flags & FLAG_KERNEL_READS != 0 {
            request.data_bytes
        } else {
            0
        };
        let is_valid = request.data_bytes <= REQUEST_MEMORY_BYTES
            && request.address_bytes.checked_add(sent_data_bytes)? == memory.len();
        is_valid.then_some(request)
    }

    /// Converts the request to the form in which it is executed.
    fn to_relayed(&self) -> RelayedRequest {
        let (address, data) = self.memory.split_at(self.address_bytes);
        let to_argument = |bytes: usize, value: u64, prefix: &[u8]| match bytes {
            0 => Ok(value),
            _ => Err(RequestMemory::with_prefix(prefix)),
        };
        let iovec_len = (self.flags & FLAG_IOVEC != 0).then_some(self.data_bytes);
        RelayedRequest {
            request_number: self.request_number,
            address: to_argument(self.address_bytes, self.address, address),
            data: to_argument(self.data_bytes, self.data, data),
            iovec_len,
            is_swapped: self.flags & FLAG_SWAPPED != 0,
        }
    }
}

/// The tracer's reply to a request of the library.
#[derive(Debug, Default)]
struct LibraryReply {
    result: i64,
    error: i32,
    status: i32,
    data: Vec<u8>,
    /// A descriptor that the library receives.
    descriptor: Option<OwnedFd>,
}

impl LibraryReply {
    fn from_error(error: &io::Error) -> Self {
        Self {
            error: error.raw_os_error().unwrap_or(libc::EIO),
            ..Self::default()
        }
    }

    fn not_dumped() -> Self {
        Self {
            error: NOT_DUMPED_ERROR,
            ..Self::default()
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut packet = self.result.to_ne_bytes().to_vec();
        packet.extend(self.error.to_ne_bytes());
        packet.extend(self.status.to_ne_bytes());
        packet.extend((self.data.len() as u64).to_ne_bytes());
        packet.extend(&self.data);
        packet
    }

    fn send(&self, socket: &OwnedFd) -> nix::Result<()> {
        let fd = self.descriptor.as_ref().map(AsRawFd::as_raw_fd);
        let rights: Vec<ControlMessage<'_>> = fd
            .as_slice()
            .chunks(1)
            .map(ControlMessage::ScmRights)
            .collect();
        let packet = self.encode();
        let parts = [IoSlice::new(&packet)];
        sendmsg::<()>(
            socket.as_raw_fd(),
            &parts,
            &rights,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )
        .map(drop)
    }
}

/// The processes that CRIU dumps.
#[derive(Clone, Debug)]
pub(super) struct TracedTask {
    /// Root of the process tree, in the caller's PID namespace.
    pub(super) root_pid: i32,
    /// All processes of the tree, in the caller's PID namespace.
    pub(super) processes: Vec<i32>,
    /// True if CRIU runs inside the task's PID namespace, so that its thread ids are those of the
    /// task.
    pub(super) is_criu_inside: bool,
}

/// Translates thread ids between CRIU's PID namespace and that of the caller.
#[derive(Debug)]
enum ThreadIds {
    /// CRIU is in the caller's namespace.
    Same,
    /// CRIU is in the task's namespace. Contains the caller's id of each thread that CRIU has
    /// named.
    Inner(BTreeMap<i32, i32>),
}

impl ThreadIds {
    fn new(task: &TracedTask) -> Self {
        match task.is_criu_inside {
            true => Self::Inner(BTreeMap::new()),
            false => Self::Same,
        }
    }

    /// Returns the caller's id of the thread that CRIU calls `criu_tid`; `None` if the thread does
    /// not belong to `processes`.
    fn own_id(&mut self, criu_tid: i32, processes: &[i32]) -> Option<i32> {
        let Self::Inner(own_ids) = self else {
            return Some(criu_tid);
        };
        if !own_ids.contains_key(&criu_tid) {
            let threads = processes
                .iter()
                .filter_map(|pid| proc::thread_ids(*pid).ok());
            own_ids.extend(
                threads
                    .flatten()
                    .filter_map(|tid| Some((proc::innermost_pid(tid)?, tid))),
            );
        }
        own_ids.get(&criu_tid).copied()
    }

    /// Returns the id by which CRIU knows the thread `own_tid`.
    fn to_criu(&self, own_tid: i32) -> i32 {
        match self {
            Self::Same => own_tid,
            Self::Inner(own_ids) => own_ids
                .iter()
                .find(|(_, tid)| **tid == own_tid)
                .map_or(own_tid, |(criu_tid, _)| *criu_tid),
        }
    }
}

struct Tracer {
    socket: Arc<OwnedFd>,
    task: TracedTask,
    thread_ids: ThreadIds,
    traced_tids: BTreeSet<i32>,
    /// The lock of the task's working directory. It is acquired when the root is seized, and
    /// dropped when CRIU no longer needs the directory.
    directory_lock: Option<DumpLock>,
    smaps_readers: SmapsReaders,
}

impl Tracer {
    fn new(socket: Arc<OwnedFd>, task: TracedTask) -> Self {
        Self {
            socket,
            thread_ids: ThreadIds::new(&task),
            task,
            traced_tids: BTreeSet::new(),
            directory_lock: None,
            smaps_readers: SmapsReaders::default(),
        }
    }

    fn handle_requests(mut self) {
        super::process::raise_thread_priority();
        let mut packet = vec![0u8; REQUEST_HEADER_BYTES + 2 * REQUEST_MEMORY_BYTES];
        loop {
            self.wait_for_request();
            let length = match recv(self.socket.as_raw_fd(), &mut packet, MsgFlags::empty()) {
                Ok(0) => break,
                Ok(length) => length,
                Err(Errno::EINTR) => continue,
                Err(_) => break,
            };
            let reply = match LibraryRequest::decode(&packet[..length]) {
                Some(request) => self.handle_request(&request),
                None => LibraryReply::from_error(&Errno::EINVAL.into()),
            };
            if reply.send(&self.socket).is_err() {
                break;
            }
        }
        // CRIU has ended. Some of the task's threads may still be running.
        stop_and_detach(
            &self.traced_tids.into_iter().collect::<Vec<i32>>(),
            SETTLE_TIMEOUT,
        );
    }

    fn handle_request(&mut self, library_request: &LibraryRequest) -> LibraryReply {
        let own_tid = |criu_tid: i32| match criu_tid {
            ANY_THREAD => Some(ANY_THREAD),
            _ => self.thread_ids.own_id(criu_tid, &self.task.processes),
        };
        let Some(tid) = i32::try_from(library_request.pid).ok().and_then(own_tid) else {
            return LibraryReply::not_dumped();
        };
        if library_request.request_number == SMAPS_REQUEST {
            return match self.smaps_readers.take_text(tid) {
                Some(text) => LibraryReply {
                    descriptor: Some(text),
                    ..LibraryReply::default()
                },
                None => LibraryReply::not_dumped(),
            };
        }
        if library_request.request_number == WAIT_REQUEST {
            return self.wait_for_event(tid, library_request.address as i32);
        }
        let is_seize = library_request.request_number == u64::from(libc::PTRACE_SEIZE);
        let is_task_thread = self.traced_tids.contains(&tid) || (is_seize && self.is_dumped(tid));
        if !is_task_thread {
            return LibraryReply::not_dumped();
        }
        if is_seize {
            self.wait_for_group_stop(tid);
            // Inside the task's namespaces CRIU needs no second /proc.
            if tid == self.task.root_pid && !self.task.is_criu_inside {
                self.lock_directory();
            }
        }
        let mut request = library_request.to_relayed();
        let (result, iovec_len) = match request.execute(tid) {
            Ok(result_and_len) => result_and_len,
            Err(error) => return LibraryReply::from_error(&error),
        };
        if is_seize {
            self.traced_tids.insert(tid);
        } else if library_request.request_number == u64::from(libc::PTRACE_DETACH) {
            self.traced_tids.remove(&tid);
        }
        let written_bytes = match (request.iovec_len.is_some(), library_request.request_number) {
            (true, _) => iovec_len,
            (_, ptrace::PTRACE_SECCOMP_GET_FILTER) => {
                usize::try_from(result).unwrap_or(0).saturating_mul(8)
            }
            _ => library_request.data_bytes,
        };
        let data = match (&request.data, library_request.flags & FLAG_KERNEL_WRITES) {
            (Err(memory), FLAG_KERNEL_WRITES) => {
                memory.bytes(written_bytes.min(library_request.data_bytes))
            }
            _ => Vec::new(),
        };
        LibraryReply {
            result,
            data,
            ..LibraryReply::default()
        }
    }

    /// Waits for the next request. During the wait the directory lock is released as soon as CRIU
    /// no longer needs the directory, because other dumps wait for the lock.
    fn wait_for_request(&mut self) {
        while let Some(lock_fd) = self.directory_lock.as_ref().and_then(DumpLock::fd) {
            let mut fds =
                [self.socket.as_fd(), lock_fd].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            // If the wait was interrupted, the events are checked as well.
            let _ = poll(&mut fds, PollTimeout::NONE);
            let has_request = fds[0].any().unwrap_or(true);
            self.directory_lock.take_if(|lock| lock.is_released());
            if has_request {
                break;
            }
        }
    }

    /// Acquires the lock of the task's working directory. Waits until no other dump uses the
    /// directory, or until a timeout.
    fn lock_directory(&mut self) {
        if self.directory_lock.is_some() {
            return;
        }
        let Some(working_dir) = dump_lock::WorkingDir::of_process(self.task.root_pid) else {
            return;
        };
        let deadline = Instant::now() + dump_lock::LOCK_WAIT_TIMEOUT;
        for poll_count in 0u32.. {
            let now = Instant::now();
            self.directory_lock = working_dir.try_lock(now);
            if self.directory_lock.is_some()
                || now >= deadline
                || self.pause_unless_criu_ended(poll_count)
            {
                return;
            }
        }
    }

    /// Waits until a thread has returned to its group stop. The thread was traced to record its
    /// registers ([`super::trap_cleanup`]), and returns to the stop only when it gets CPU time.
    ///
    /// CRIU seizes and interrupts a thread, continues it if it finds a group stop, and then waits
    /// for the stop of the interrupt. If the interrupt arrives before the thread has reached the
    /// group stop, that stop consumes the interrupt: the thread would run, and CRIU would wait
    /// forever.
    fn wait_for_group_stop(&self, tid: i32) {
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        for poll_count in 0u32.. {
            if is_group_stopped(tid)
                || Instant::now() >= deadline
                || self.pause_unless_criu_ended(poll_count)
            {
                return;
            }
        }
    }

    /// True for threads of the dumped processes.
    fn is_dumped(&self, tid: i32) -> bool {
        let processes = &self.task.processes;
        processes.contains(&tid)
            || processes.iter().any(|pid| {
                Process::new(*pid).is_ok_and(|process| process.task_from_tid(tid).is_ok())
            })
    }

    /// Waits for an event of the thread `tid`. If `tid` is [`ANY_THREAD`], the wait is short,
    /// because CRIU may also wait for its own children; the library then repeats the request.
    fn wait_for_event(&mut self, tid: i32, options: i32) -> LibraryReply {
        let tids: Vec<i32> = match tid {
            ANY_THREAD => self.traced_tids.iter().copied().collect(),
            tid => self.traced_tids.get(&tid).copied().into_iter().collect(),
        };
        if tids.is_empty() {
            return LibraryReply::not_dumped();
        }
        for poll_count in 0u32.. {
            for &tid in &tids {
                match ptrace::poll_event(tid) {
                    Ok(None) => {}
                    Ok(Some(ThreadEvent::Stopped(status))) => {
                        return LibraryReply {
                            result: self.thread_ids.to_criu(tid).into(),
                            status,
                            ..LibraryReply::default()
                        };
                    }
                    Ok(Some(ThreadEvent::Exited(status))) => {
                        self.traced_tids.remove(&tid);
                        return LibraryReply {
                            result: self.thread_ids.to_criu(tid).into(),
                            status,
                            ..LibraryReply::default()
                        };
                    }
                    Err(error) => return LibraryReply::from_error(&error),
                }
            }
            let is_over = tid == ANY_THREAD && poll_count > SPIN_POLLS;
            if options & libc::WNOHANG != 0 || is_over || self.pause_unless_criu_ended(poll_count) {
                break;
            }
        }
        LibraryReply::default()
    }

    /// Pauses before the next poll. Returns true if CRIU has ended.
    fn pause_unless_criu_ended(&self, poll_count: u32) -> bool {
        if poll_count < SPIN_POLLS {
            std::thread::yield_now();
            return false;
        }
        let interval = if poll_count < SPIN_POLLS + SHORT_POLLS {
            SHORT_POLL_INTERVAL
        } else {
            POLL_INTERVAL
        };
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::empty())];
        matches!(ppoll(&mut fds, Some(interval.into()), None), Ok(ready_count) if ready_count > 0)
    }
}

/// Stops these traced threads and detaches from them. `timeout` is the time limit for a thread to
/// stop.
pub(super) fn stop_and_detach(tids: &[i32], timeout: Duration) {
    for &tid in tids {
        // Fails only if the thread has exited.
        let _ = ptrace::interrupt(tid);
    }
    let deadline = Instant::now() + timeout;
    for &tid in tids {
        while !try_detach(tid) && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }
}

/// Detaches from a thread if it is stopped. Returns true if the thread is detached or has exited.
fn try_detach(tid: i32) -> bool {
    match ptrace::stop_cause(tid) {
        // A trap is still pending although the thread has stopped on request. The thread must
        // consume the trap before it is detached.
        Ok(StopCause::Interrupt) if has_trap_pending(tid) => ptrace::resume(tid).is_err(),
        Ok(StopCause::Interrupt | StopCause::SystemCall | StopCause::Trap) => {
            ptrace::detach(tid, 0).is_ok()
        }
        // The signal comes from another process and must be delivered.
        Ok(StopCause::Signal(signal)) => ptrace::detach(tid, signal).is_ok(),
        // The thread is running or has exited.
        Err(_) => !matches!(
            ptrace::poll_event(tid),
            Ok(None | Some(ThreadEvent::Stopped(_)))
        ),
    }
}

/// True if a thread has completed its group stop or has exited.
fn is_group_stopped(tid: i32) -> bool {
    proc::stat(tid).is_none_or(|stat| matches!(stat.state, 'T' | 'Z' | 'X'))
}

/// True if an unblocked SIGTRAP is pending for this thread.
fn has_trap_pending(tid: i32) -> bool {
    proc::status(tid)
        .is_some_and(|status| status.sigpnd & !status.sigblk & (1 << (libc::SIGTRAP - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::super::trap_cleanup::SavedTaskState;
    use super::*;
    use nix::sys::socket::send;
    use std::process::{Child, Command};

    /// Timeout for every event that a test waits for.
    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    fn wait_for<T>(event_name: &str, find: impl Fn() -> Option<T>) -> T {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            match find() {
                Some(found) => return found,
                None if Instant::now() < deadline => std::thread::yield_now(),
                None => panic!("{event_name}"),
            }
        }
    }

    /// Starts this `sleep` command and stops it.
    fn start_stopped_sleep(sleep: &mut Command) -> Child {
        let child = sleep.arg("1000").spawn().expect("it starts");
        let pid = child.id() as i32;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGSTOP)
            .expect("it is there");
        wait_for("it is stopped", || is_group_stopped(pid).then_some(()));
        child
    }

    fn sole_process(pid: i32) -> TracedTask {
        TracedTask {
            root_pid: pid,
            processes: vec![pid],
            is_criu_inside: false,
        }
    }

    /// Encodes a request without memory in the library's format.
    fn encode_packet(request: libc::c_uint, pid: i32) -> Vec<u8> {
        let mut packet = u64::from(request).to_ne_bytes().to_vec();
        packet.extend(i64::from(pid).to_ne_bytes());
        packet.resize(REQUEST_HEADER_BYTES, 0);
        packet
    }

    /// A thread whose registers were just recorded still stops when CRIU waits for its stop.
    #[test]
    fn recently_traced_thread_stops_for_criu() {
        let mut child = start_stopped_sleep(&mut Command::new("sleep"));
        let pid = child.id() as i32;
        let (tracer_socket, _criu_socket) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .expect("descriptors");
        let mut tracer = Tracer::new(Arc::new(tracer_socket), sole_process(pid));
        let mut send_request = |request: libc::c_uint| {
            let reply = tracer.handle_request(
                &LibraryRequest::decode(&encode_packet(request, pid)).expect("a question"),
            );
            assert_eq!(reply.error, 0, "{reply:?}");
        };
        let stop_event = || match ptrace::poll_event(pid).expect("it is traced") {
            Some(ThreadEvent::Stopped(status)) => Some(status >> 8 & 0xff),
            _ => None,
        };
        for _ in 0..200 {
            SavedTaskState::record(&[pid]).expect("it is stopped");
            // The steps of CRIU, in their order.
            send_request(libc::PTRACE_SEIZE);
            send_request(libc::PTRACE_INTERRUPT);
            if wait_for("it halts", stop_event) == libc::SIGSTOP {
                send_request(libc::PTRACE_CONT);
                wait_for("it halts again", stop_event);
            }
            send_request(libc::PTRACE_DETACH);
            wait_for("it is stopped again", || {
                is_group_stopped(pid).then_some(())
            });
        }
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }

    /// The directory lock is released after CRIU's last use of the directory, even without
    /// requests, and when CRIU has ended.
    #[test]
    fn directory_lock_ends_without_requests() {
        let dir = tempfile::tempdir().expect("dir");
        let mut child = start_stopped_sleep(Command::new("sleep").current_dir(dir.path()));
        let pid = child.id() as i32;
        // At this time no lock has timed out.
        let (working_dir, lock_time) = (
            dump_lock::WorkingDir::of_process(pid).expect("it is there"),
            Instant::now(),
        );
        let seize = || {
            let (idle_relay, criu_descriptors) = IdleRelay::new().expect("descriptors");
            let relay = idle_relay
                .start_tracer(sole_process(pid), SmapsReaders::default())
                .expect("a thread");
            send(
                criu_descriptors.socket.as_raw_fd(),
                &encode_packet(libc::PTRACE_SEIZE, pid),
                MsgFlags::empty(),
            )
            .expect("it listens");
            assert!(
                recv(
                    criu_descriptors.socket.as_raw_fd(),
                    &mut [0; 64],
                    MsgFlags::empty()
                )
                .expect("an answer")
                    > 0
            );
            assert!(
                working_dir.try_lock(lock_time).is_none(),
                "it is the task's turn"
            );
            (relay, criu_descriptors)
        };
        let (relay, criu_descriptors) = seize();
        for _ in 0..2 {
            std::fs::create_dir(dir.path().join("proc.crtools")).expect("dir");
            std::fs::remove_dir(dir.path().join("proc.crtools")).expect("dir");
        }
        drop(wait_for("it is over", || working_dir.try_lock(lock_time)));
        drop((criu_descriptors, relay));
        let (_relay, criu_descriptors) = seize();
        drop(criu_descriptors);
        drop(wait_for("it is over", || working_dir.try_lock(lock_time)));
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }
}
