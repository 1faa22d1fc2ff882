//! Traces the task on behalf of CRIU, so that the tracer survives when CRIU is killed.
//!
//! CRIU makes the task execute system calls, each of which ends in a trap. If the tracer dies at
//! that moment, the kernel delivers the trap (SIGTRAP) to the task, which kills it. Only the tracer
//! can take the trap back. Therefore the tracer is a thread of this program:
//!
//! 1. A small library that is loaded into CRIU ([`LIBRARY`], `csrc/relay.c`) sends each ptrace
//!    request and each wait over a packet socket.
//! 2. The tracer executes it and sends the result.
//! 3. When CRIU has ended for any reason, the tracer stops the threads that are still traced,
//!    removes their traps and detaches.
//!
//! A statically linked CRIU does not load the library and traces for itself.

use super::crossing::{self, Turn};
use super::ptrace::{self, Cause, Foreign, MEMORY_MAX, Memory, News};
use crate::status::ProcStatus;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{
    AddressFamily, MsgFlags, Shutdown, SockFlag, SockType, recv, send, shutdown, socketpair,
};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The library that CRIU loads.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/relay.so"));
/// Request number of a wait for a thread, in place of a ptrace request.
const WAIT: u64 = u64::MAX;
/// Error number for a thread that does not belong to the dumped task.
const NOT_MEANT: i32 = -1;
const BY_VECTOR: u32 = 1;
const READ: u32 = 2;
const WRITTEN: u32 = 4;
const EXCHANGED: u32 = 8;
/// Length of a request without the memory that follows it.
const QUESTION_BYTES: usize = 48;
/// Number of polls for a thread's event without a pause. Most threads stop within microseconds.
const ROUNDS_WITHOUT_PAUSE: u32 = 100;
/// Pause between polls after that, in milliseconds.
const PAUSE_MS: u8 = 1;
/// Timeout for a thread to stop after CRIU has ended.
const SETTLE_ALLOWED: Duration = Duration::from_secs(2);

/// What CRIU inherits.
#[derive(Debug)]
pub(super) struct Ends {
    /// The library sends its requests here.
    socket: OwnedFd,
    library: OwnedFd,
}

impl Ends {
    /// Returns the descriptors that CRIU must inherit with the same numbers.
    pub(super) fn descriptors(&self) -> [&OwnedFd; 2] {
        [&self.socket, &self.library]
    }

    /// Returns the environment variables for CRIU.
    pub(super) fn variables(&self) -> Vec<(&'static str, String)> {
        vec![
            preload(&self.library),
            ("SEMPA_RELAY", self.socket.as_raw_fd().to_string()),
        ]
    }
}

/// The tracer thread. Dropping it ends all tracing; CRIU must have ended before.
#[derive(Debug)]
pub(super) struct Relay {
    socket: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// Returns the environment variable that tells the library the file with the list of memory areas
/// to hide from CRIU.
pub(super) fn withheld(list: &OwnedFd) -> (&'static str, String) {
    ("SEMPA_WITHHELD", list.as_raw_fd().to_string())
}

/// Returns the environment variables that make the library report that it was loaded: it writes a
/// byte to `tells`.
pub(super) fn tells_of_loading(library: &OwnedFd, tells: &OwnedFd) -> [(&'static str, String); 2] {
    [
        preload(library),
        ("SEMPA_LOADED", tells.as_raw_fd().to_string()),
    ]
}

fn preload(library: &OwnedFd) -> (&'static str, String) {
    (
        "LD_PRELOAD",
        format!("/proc/self/fd/{}", library.as_raw_fd()),
    )
}

/// Returns the library as a file in memory.
///
/// # Errors
/// No file descriptor or memory is available.
pub(super) fn library() -> io::Result<OwnedFd> {
    let library = memfd_create(c"sempa-relay", MFdFlags::MFD_CLOEXEC)?;
    File::from(library.try_clone()?).write_all(LIBRARY)?;
    Ok(library)
}

impl Relay {
    /// Starts a thread that will trace these processes, whose root is `root`.
    ///
    /// # Errors
    /// No file descriptor or thread is available.
    pub(super) fn start(root: i32, processes: &[i32]) -> io::Result<(Relay, Ends)> {
        let library = library()?;
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )?;
        let socket = Arc::new(ours);
        let tracer = Tracer::new(socket.clone(), root, processes.to_vec());
        let thread = std::thread::Builder::new()
            .name("tracer".into())
            .spawn(move || tracer.run())?;
        Ok((
            Relay {
                socket,
                thread: Some(thread),
            },
            Ends {
                socket: theirs,
                library,
            },
        ))
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The thread may have ended already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the tracer does not panic");
        }
    }
}

/// A request of the library.
#[derive(Debug)]
struct Question {
    request: u64,
    pid: i64,
    address: u64,
    data: u64,
    address_bytes: usize,
    data_bytes: usize,
    flags: u32,
    /// The memory that follows the request.
    memory: Vec<u8>,
}

impl Question {
    fn read(packet: &[u8]) -> Option<Question> {
        let (head, memory) = packet.split_at_checked(QUESTION_BYTES)?;
        let long = |at: usize| Some(u64::from_ne_bytes(head.get(at..at + 8)?.try_into().ok()?));
        let short = |at: usize| Some(u32::from_ne_bytes(head.get(at..at + 4)?.try_into().ok()?));
        let question = Question {
            request: long(0)?,
            pid: long(8)? as i64,
            address: long(16)?,
            data: long(24)?,
            address_bytes: short(32)? as usize,
            data_bytes: short(36)? as usize,
            flags: short(40)?,
            memory: memory.to_vec(),
        };
        let data_sent = if question.flags & READ != 0 {
            question.data_bytes
        } else {
            0
        };
        let fits = question.data_bytes <= MEMORY_MAX
            && question.address_bytes.checked_add(data_sent)? == memory.len();
        fits.then_some(question)
    }

    /// Converts the request for execution.
    fn foreign(&self) -> Foreign {
        let (address, data) = self.memory.split_at(self.address_bytes);
        let memory = |bytes: usize, value: u64, begin: &[u8]| match bytes {
            0 => Ok(value),
            _ => Err(Memory::beginning_with(begin)),
        };
        let vector = (self.flags & BY_VECTOR != 0).then_some(self.data_bytes);
        Foreign {
            request: self.request,
            address: memory(self.address_bytes, self.address, address),
            data: memory(self.data_bytes, self.data, data),
            vector,
            exchanged: self.flags & EXCHANGED != 0,
        }
    }
}

/// A reply to the library.
#[derive(Debug, Default)]
struct Answer {
    result: i64,
    error: i32,
    status: i32,
    data: Vec<u8>,
}

impl Answer {
    fn failed(error: &io::Error) -> Answer {
        Answer {
            error: error.raw_os_error().unwrap_or(libc::EIO),
            ..Answer::default()
        }
    }

    fn not_meant() -> Answer {
        Answer {
            error: NOT_MEANT,
            ..Answer::default()
        }
    }

    fn write(&self) -> Vec<u8> {
        let mut packet = self.result.to_ne_bytes().to_vec();
        packet.extend(self.error.to_ne_bytes());
        packet.extend(self.status.to_ne_bytes());
        packet.extend((self.data.len() as u64).to_ne_bytes());
        packet.extend(&self.data);
        packet
    }
}

struct Tracer {
    socket: Arc<OwnedFd>,
    root: i32,
    processes: Vec<i32>,
    traced: BTreeSet<i32>,
    /// The lock of the working directory: from the seizing of the root until CRIU no longer needs
    /// the directory.
    turn: Option<Turn>,
}

impl Tracer {
    fn new(socket: Arc<OwnedFd>, root: i32, processes: Vec<i32>) -> Tracer {
        Tracer {
            socket,
            root,
            processes,
            traced: BTreeSet::new(),
            turn: None,
        }
    }

    fn run(mut self) {
        super::process::hurry_thread();
        let mut packet = vec![0u8; QUESTION_BYTES + 2 * MEMORY_MAX];
        loop {
            self.wait_for_question();
            let length = match recv(self.socket.as_raw_fd(), &mut packet, MsgFlags::empty()) {
                Ok(0) => break,
                Ok(length) => length,
                Err(Errno::EINTR) => continue,
                Err(_) => break,
            };
            let answer = match Question::read(&packet[..length]) {
                Some(question) => self.answer(&question),
                None => Answer::failed(&Errno::EINVAL.into()),
            };
            if send(
                self.socket.as_raw_fd(),
                &answer.write(),
                MsgFlags::MSG_NOSIGNAL,
            )
            .is_err()
            {
                break;
            }
        }
        // CRIU has ended. The threads that it left running are stopped.
        settle(
            &self.traced.into_iter().collect::<Vec<i32>>(),
            SETTLE_ALLOWED,
        );
    }

    fn answer(&mut self, question: &Question) -> Answer {
        let Ok(tid) = i32::try_from(question.pid) else {
            return Answer::not_meant();
        };
        if question.request == WAIT {
            return self.wait(tid, question.address as i32);
        }
        let seizes = question.request == u64::from(libc::PTRACE_SEIZE);
        let is_ours = self.traced.contains(&tid) || (seizes && self.is_meant(tid));
        if !is_ours {
            return Answer::not_meant();
        }
        if seizes {
            self.wait_until_it_stands(tid);
            if tid == self.root {
                self.wait_for_turn();
            }
        }
        let mut request = question.foreign();
        let (result, vector) = match request.carry_out(tid) {
            Ok(done) => done,
            Err(error) => return Answer::failed(&error),
        };
        if seizes {
            self.traced.insert(tid);
        } else if question.request == u64::from(libc::PTRACE_DETACH) {
            self.traced.remove(&tid);
        }
        let written = match (request.vector.is_some(), question.request) {
            (true, _) => vector,
            (_, ptrace::GET_FILTER) => usize::try_from(result).unwrap_or(0).saturating_mul(8),
            _ => question.data_bytes,
        };
        let data = match (&request.data, question.flags & WRITTEN) {
            (Err(memory), WRITTEN) => memory.bytes(written.min(question.data_bytes)),
            _ => Vec::new(),
        };
        Answer {
            result,
            data,
            ..Answer::default()
        }
    }

    /// Waits for the next request. Meanwhile observes the end of the lock, because other dumps wait
    /// for it.
    fn wait_for_question(&mut self) {
        while let Some(seen) = self.turn.as_ref().and_then(Turn::fd) {
            let mut fds = [self.socket.as_fd(), seen].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            // After an interruption the events are checked as well.
            let _ = poll(&mut fds, PollTimeout::NONE);
            let asked = fds[0].any().unwrap_or(true);
            self.turn.take_if(|turn| turn.is_over());
            if asked {
                break;
            }
        }
    }

    /// Waits until no other dump uses the task's working directory.
    fn wait_for_turn(&mut self) {
        if self.turn.is_some() {
            return;
        }
        let Some(place) = crossing::Place::of(self.root) else {
            return;
        };
        let until = Instant::now() + crossing::WAIT_MAX;
        for round in 0u32.. {
            let now = Instant::now();
            self.turn = place.take_turn(now);
            if self.turn.is_some() || now >= until || self.pause(round) {
                return;
            }
        }
    }

    /// Waits until a thread has returned to its group stop. It was just traced to record its
    /// registers ([`super::rescue`]), and returns to the stop only when it gets CPU time.
    ///
    /// CRIU seizes and interrupts a thread, continues it if it finds a group stop, and then waits
    /// for the stop of the interrupt. If the interrupt arrives while the thread is on its way to
    /// the group stop, that stop consumes it: the thread would run, and CRIU would wait for ever.
    fn wait_until_it_stands(&self, tid: i32) {
        let until = Instant::now() + SETTLE_ALLOWED;
        for round in 0u32.. {
            if stands(tid) || Instant::now() >= until || self.pause(round) {
                return;
            }
        }
    }

    /// True for threads of the dumped processes.
    fn is_meant(&self, tid: i32) -> bool {
        self.processes.contains(&tid)
            || self
                .processes
                .iter()
                .any(|pid| std::path::Path::new(&format!("/proc/{pid}/task/{tid}")).exists())
    }

    /// Waits for one thread. For any thread (-1) it waits only briefly, because CRIU may also wait
    /// for its own children; the library then repeats the request.
    fn wait(&mut self, tid: i32, options: i32) -> Answer {
        let wanted: Vec<i32> = match tid {
            -1 => self.traced.iter().copied().collect(),
            tid => self.traced.get(&tid).copied().into_iter().collect(),
        };
        if wanted.is_empty() {
            return Answer::not_meant();
        }
        for round in 0u32.. {
            for &tid in &wanted {
                match ptrace::hear(tid) {
                    Ok(None) => {}
                    Ok(Some(News::Stopped(status))) => {
                        return Answer {
                            result: tid.into(),
                            status,
                            ..Answer::default()
                        };
                    }
                    Ok(Some(News::Ended(status))) => {
                        self.traced.remove(&tid);
                        return Answer {
                            result: tid.into(),
                            status,
                            ..Answer::default()
                        };
                    }
                    Err(error) => return Answer::failed(&error),
                }
            }
            let is_late = tid == -1 && round > ROUNDS_WITHOUT_PAUSE;
            if options & libc::WNOHANG != 0 || is_late || self.pause(round) {
                break;
            }
        }
        Answer::default()
    }

    /// Pauses between polls. Returns true if CRIU has ended.
    fn pause(&self, round: u32) -> bool {
        if round < ROUNDS_WITHOUT_PAUSE {
            std::thread::yield_now();
            return false;
        }
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::empty())];
        matches!(poll(&mut fds, PollTimeout::from(PAUSE_MS)), Ok(ready) if ready > 0)
    }
}

/// Stops these traced threads and detaches from them. `allowed` is the time for a thread to stop.
pub(super) fn settle(tids: &[i32], allowed: Duration) {
    for &tid in tids {
        // Fails only if the thread has exited.
        let _ = ptrace::interrupt(tid);
    }
    let until = Instant::now() + allowed;
    for &tid in tids {
        while !settled(tid) && Instant::now() < until {
            std::thread::yield_now();
        }
    }
}

/// Detaches from a thread if it is stopped. True if nothing remains to be done.
fn settled(tid: i32) -> bool {
    match ptrace::cause(tid) {
        // A trap is pending after the requested stop. It must be consumed before the thread is
        // detached.
        Ok(Cause::Asked) if has_trap_pending(tid) => ptrace::go_on(tid).is_err(),
        Ok(Cause::Asked | Cause::Trap) => ptrace::let_go(tid, 0).is_ok(),
        // The signal is from another process and must be delivered.
        Ok(Cause::Signal(signal)) => ptrace::let_go(tid, signal).is_ok(),
        // The thread is running or has exited.
        Err(_) => !matches!(ptrace::hear(tid), Ok(None | Some(News::Stopped(_)))),
    }
}

/// True for a thread that has completed its group stop, and for one that has exited.
fn stands(tid: i32) -> bool {
    ProcStatus::of(tid).is_none_or(|status| {
        status
            .field("State")
            .is_some_and(|state| state.starts_with(['T', 'Z', 'X']))
    })
}

/// True if an unblocked SIGTRAP is pending for this thread.
fn has_trap_pending(tid: i32) -> bool {
    let waits = |status: ProcStatus| {
        status.signals("SigPnd") & !status.signals("SigBlk") & (1 << (libc::SIGTRAP - 1)) != 0
    };
    ProcStatus::of(tid).is_some_and(waits)
}

#[cfg(test)]
mod tests {
    use super::super::rescue::Snapshot;
    use super::*;
    use std::process::{Child, Command};

    /// Timeout for anything that a test waits for.
    const SOON: Duration = Duration::from_secs(20);

    fn wait<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
        let until = Instant::now() + SOON;
        loop {
            match look() {
                Some(seen) => return seen,
                None if Instant::now() < until => std::thread::yield_now(),
                None => panic!("{what}"),
            }
        }
    }

    /// Starts this `sleep` command and stops it.
    fn stopped(sleep: &mut Command) -> Child {
        let child = sleep.arg("1000").spawn().expect("it starts");
        let pid = child.id() as i32;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGSTOP)
            .expect("it is there");
        wait("it is stopped", || stands(pid).then_some(()));
        child
    }

    /// Encodes a request without memory, as the library does.
    fn packet(request: libc::c_uint, pid: i32) -> Vec<u8> {
        let mut packet = u64::from(request).to_ne_bytes().to_vec();
        packet.extend(i64::from(pid).to_ne_bytes());
        packet.resize(QUESTION_BYTES, 0);
        packet
    }

    /// A thread whose registers were just recorded stops whenever CRIU waits for its stop.
    #[test]
    fn recently_traced_thread_stops_for_criu() {
        let mut child = stopped(&mut Command::new("sleep"));
        let pid = child.id() as i32;
        let (ours, _theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .expect("descriptors");
        let (socket, processes) = (Arc::new(ours), vec![pid]);
        let mut tracer = Tracer::new(socket, pid, processes);
        let mut ask = |request: libc::c_uint| {
            let answer = tracer.answer(&Question::read(&packet(request, pid)).expect("a question"));
            assert_eq!(answer.error, 0, "{answer:?}");
        };
        let halts = || match ptrace::hear(pid).expect("it is traced") {
            Some(News::Stopped(status)) => Some(status >> 8 & 0xff),
            _ => None,
        };
        for _ in 0..200 {
            Snapshot::take(&[pid]).expect("it stands still");
            // These are CRIU's steps in their order.
            ask(libc::PTRACE_SEIZE);
            ask(libc::PTRACE_INTERRUPT);
            if wait("it halts", halts) == libc::SIGSTOP {
                ask(libc::PTRACE_CONT);
                wait("it halts again", halts);
            }
            ask(libc::PTRACE_DETACH);
            wait("it is stopped again", || stands(pid).then_some(()));
        }
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }

    /// The directory lock ends after the last visit even without requests, and when CRIU has ended.
    #[test]
    fn directory_lock_ends_without_requests() {
        let dir = tempfile::tempdir().expect("dir");
        let mut child = stopped(Command::new("sleep").current_dir(dir.path()));
        let pid = child.id() as i32;
        // By this clock no lock has timed out.
        let (place, then) = (
            crossing::Place::of(pid).expect("it is there"),
            Instant::now(),
        );
        let seize = || {
            let (relay, ends) = Relay::start(pid, &[pid]).expect("descriptors");
            send(
                ends.socket.as_raw_fd(),
                &packet(libc::PTRACE_SEIZE, pid),
                MsgFlags::empty(),
            )
            .expect("it listens");
            assert!(
                recv(ends.socket.as_raw_fd(), &mut [0; 64], MsgFlags::empty()).expect("an answer")
                    > 0
            );
            assert!(place.take_turn(then).is_none(), "it is the task's turn");
            (relay, ends)
        };
        let (relay, ends) = seize();
        for _ in 0..2 {
            std::fs::create_dir(dir.path().join("proc.crtools")).expect("dir");
            std::fs::remove_dir(dir.path().join("proc.crtools")).expect("dir");
        }
        drop(wait("it is over", || place.take_turn(then)));
        drop((ends, relay));
        let (_relay, ends) = seize();
        drop(ends);
        drop(wait("it is over", || place.take_turn(then)));
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }
}
