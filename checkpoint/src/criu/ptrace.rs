//! Ptrace requests to traced threads: safe functions around the system call.
#![allow(unsafe_code)] // ptrace has no safe interface.

use nix::errno::Errno;
use std::io;
use std::time::{Duration, Instant};

/// Size in bytes of a buffer that can contain the general registers of any architecture.
const GENERAL_REGISTERS_BYTES_MAX: usize = 1024;
/// Size in bytes of a buffer for the floating-point and vector registers.
const VECTOR_REGISTERS_BYTES_MAX: usize = 32 << 10;
/// Timeout for a stopped thread to report its stop to a new tracer.
const ATTACH_TIMEOUT: Duration = Duration::from_millis(500);
/// Pause between checks whether a running thread has stopped.
const STOP_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Number of checks for the stop of a thread that follow each other without a pause. Most threads
/// stop within microseconds.
pub(super) const SPIN_POLLS: u32 = 100;
/// Code of the SIGTRAP that reports the begin or end of a system call (PTRACE_O_TRACESYSGOOD).
const SYSCALL_TRAP_CODE: i32 = libc::SIGTRAP | 0x80;
/// PTRACE_EVENT_STOP: a stop by PTRACE_INTERRUPT, or the group stop of a stopped process.
const PTRACE_EVENT_STOP: i32 = 128;

/// Selects a set of registers.
#[derive(Clone, Copy, Debug)]
pub(super) enum RegisterSet {
    /// The general registers, including the instruction pointer.
    General,
    Vector,
}

impl RegisterSet {
    fn regset_number(self) -> usize {
        match self {
            Self::General => libc::NT_PRSTATUS as usize,
            #[cfg(target_arch = "x86_64")]
            Self::Vector => 0x202,
            #[cfg(not(target_arch = "x86_64"))]
            RegisterSet::Vector => libc::NT_PRFPREG as usize,
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::General => GENERAL_REGISTERS_BYTES_MAX,
            Self::Vector => VECTOR_REGISTERS_BYTES_MAX,
        }
    }
}

/// A traced thread of a stopped process. Dropping this value detaches from the thread, which
/// remains stopped with its process.
pub(super) struct TracedThread {
    tid: i32,
}

impl TracedThread {
    /// Attaches to a thread of a stopped process. Waits until the thread reports its stop.
    pub(super) fn attach(tid: i32) -> io::Result<Self> {
        Self::attach_until(tid, Instant::now())
    }

    /// Attaches to a thread like [`attach`](Self::attach), and waits until `deadline` if that is
    /// later. A thread in a system call that cannot be interrupted stops late.
    pub(super) fn attach_until(tid: i32, deadline: Instant) -> io::Result<Self> {
        seize(tid)?;
        let thread = Self { tid };
        interrupt(tid)?;
        thread.wait_until_stopped(deadline.max(Instant::now() + ATTACH_TIMEOUT))?;
        Ok(thread)
    }

    fn wait_until_stopped(&self, deadline: Instant) -> io::Result<()> {
        for poll_count in 0u32.. {
            match consume_stop(self.tid)? {
                Some(_) => return Ok(()),
                None if Instant::now() >= deadline => break,
                None if poll_count < SPIN_POLLS => std::thread::yield_now(),
                None => std::thread::sleep(STOP_POLL_INTERVAL),
            }
        }
        Err(io::Error::from(io::ErrorKind::TimedOut))
    }

    /// Continues the thread until its next system call begins or ends, or until it stops for
    /// another reason. Returns the reason. The other threads of the process do not run.
    ///
    /// # Errors
    /// The thread has exited, or still runs at `deadline`. In the second case the thread is stopped
    /// again if it can be interrupted.
    pub(super) fn run_to_system_call(&self, deadline: Instant) -> io::Result<StopCause> {
        ptrace_request(libc::PTRACE_SYSCALL, self.tid, 0, std::ptr::null_mut())?;
        match self.wait_until_stopped(deadline) {
            Ok(()) => stop_cause(self.tid),
            Err(error) => {
                interrupt(self.tid)?;
                self.wait_until_stopped(Instant::now() + ATTACH_TIMEOUT)?;
                Err(error)
            }
        }
    }

    /// Returns the registers of this set, in the kernel's layout.
    pub(super) fn registers(&self, register_set: RegisterSet) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0u8; register_set.bytes()];
        let mut io_vector = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        ptrace_request(
            libc::PTRACE_GETREGSET,
            self.tid,
            register_set.regset_number(),
            (&raw mut io_vector).cast(),
        )?;
        let length = io_vector.iov_len;
        bytes.truncate(length);
        Ok(bytes)
    }

    pub(super) fn set_registers(
        &self,
        register_set: RegisterSet,
        registers: &[u8],
    ) -> io::Result<()> {
        let mut bytes = registers.to_vec();
        let mut io_vector = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        ptrace_request(
            libc::PTRACE_SETREGSET,
            self.tid,
            register_set.regset_number(),
            (&raw mut io_vector).cast(),
        )
    }

    /// Returns the bit mask of the blocked signals; signal 1 is the lowest bit.
    pub(super) fn blocked_signals(&self) -> io::Result<u64> {
        let mut mask = 0u64;
        ptrace_request(
            libc::PTRACE_GETSIGMASK,
            self.tid,
            size_of::<u64>(),
            (&raw mut mask).cast(),
        )?;
        Ok(mask)
    }

    /// Removes a hardware breakpoint that a previous tracer has set in the debug registers.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn clear_breakpoint(&self) -> io::Result<()> {
        /// Offset in the kernel's `struct user` of DR7, the debug register that enables
        /// breakpoints.
        const DR7_OFFSET: usize =
            std::mem::offset_of!(libc::user, u_debugreg) + 7 * size_of::<u64>();
        ptrace_request(
            libc::PTRACE_POKEUSER,
            self.tid,
            DR7_OFFSET,
            std::ptr::null_mut(),
        )
    }

    /// Removes a hardware breakpoint that a previous tracer has set in the debug registers.
    #[cfg(target_arch = "aarch64")]
    pub(super) fn clear_breakpoint(&self) -> io::Result<()> {
        /// The register set NT_ARM_HW_BREAK.
        const BREAKPOINT_SET: usize = 0x402;
        /// Size of the register set with one breakpoint: 8 bytes of header, 16 bytes for the
        /// breakpoint.
        const SET_BYTES: usize = 24;
        let mut bytes = [0u8; SET_BYTES];
        let mut io_vector = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        ptrace_request(
            libc::PTRACE_SETREGSET,
            self.tid,
            BREAKPOINT_SET,
            (&raw mut io_vector).cast(),
        )
    }

    /// Makes the thread stop at PTRACE_EVENT_EXIT when it is killed. In that stop the thread
    /// retains its memory and executes no instructions until the tracer detaches from it.
    pub(super) fn stop_at_exit(&self) -> io::Result<()> {
        let options = std::ptr::without_provenance_mut(libc::PTRACE_O_TRACEEXIT as usize);
        ptrace_request(libc::PTRACE_SETOPTIONS, self.tid, 0, options)
    }

    pub(super) fn set_blocked_signals(&self, mut mask: u64) -> io::Result<()> {
        ptrace_request(
            libc::PTRACE_SETSIGMASK,
            self.tid,
            size_of::<u64>(),
            (&raw mut mask).cast(),
        )
    }
}

impl Drop for TracedThread {
    fn drop(&mut self) {
        // Fails only if the thread has exited.
        let _ = detach(self.tid, 0);
    }
}

/// Starts to trace a thread, which continues to run. Stops at system calls can be told from traps.
pub(super) fn seize(tid: i32) -> io::Result<()> {
    let options = std::ptr::without_provenance_mut(libc::PTRACE_O_TRACESYSGOOD as usize);
    ptrace_request(libc::PTRACE_SEIZE, tid, 0, options)
}

/// Requests a traced thread to stop.
pub(super) fn interrupt(tid: i32) -> io::Result<()> {
    ptrace_request(libc::PTRACE_INTERRUPT, tid, 0, std::ptr::null_mut())
}

/// Continues a stopped thread under its tracer and suppresses the signal that it stopped for.
pub(super) fn resume(tid: i32) -> io::Result<()> {
    ptrace_request(libc::PTRACE_CONT, tid, 0, std::ptr::null_mut())
}

/// Detaches from a stopped thread and delivers the signal `signal` to it; 0 delivers no signal.
pub(super) fn detach(tid: i32, signal: i32) -> io::Result<()> {
    ptrace_request(
        libc::PTRACE_DETACH,
        tid,
        0,
        std::ptr::without_provenance_mut(signal as usize),
    )
}

/// Why a traced thread has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopCause {
    /// The tracer has interrupted the thread, or the process of the thread is stopped.
    Interrupt,
    /// A system call begins or ends ([`TracedThread::run_to_system_call`]).
    SystemCall,
    /// SIGTRAP from the kernel: the thread has executed a trap instruction or ended a system call.
    Trap,
    /// A signal from another process is about to be delivered.
    Signal(i32),
}

/// Returns why a traced thread has stopped.
///
/// # Errors
/// ESRCH: the thread is not stopped, or has exited.
pub(super) fn stop_cause(tid: i32) -> io::Result<StopCause> {
    // SAFETY: all zeros is a valid `siginfo_t`.
    let mut siginfo = unsafe { std::mem::zeroed::<libc::siginfo_t>() };
    ptrace_request(libc::PTRACE_GETSIGINFO, tid, 0, (&raw mut siginfo).cast())?;
    Ok(match (siginfo.si_signo, siginfo.si_code) {
        (_, code) if code >> 8 == PTRACE_EVENT_STOP => StopCause::Interrupt,
        (libc::SIGTRAP, SYSCALL_TRAP_CODE) => StopCause::SystemCall,
        (libc::SIGTRAP, code) if code > 0 => StopCause::Trap,
        (signal, _) => StopCause::Signal(signal),
    })
}

/// An event of a child or traced thread. The value is the wait status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ThreadEvent {
    Stopped(i32),
    Exited(i32),
}

/// Returns the next event of a traced thread; `None` if no event is pending. A stop is consumed;
/// after an exit the thread can still be reaped by its parent.
///
/// # Errors
/// ECHILD: the thread is neither traced by the caller nor its child.
pub(super) fn poll_event(tid: i32) -> io::Result<Option<ThreadEvent>> {
    match wait_nonblocking(tid, libc::WEXITED | libc::WNOWAIT)? {
        Some((libc::CLD_EXITED, status)) => {
            return Ok(Some(ThreadEvent::Exited((status & 0xff) << 8)));
        }
        Some((libc::CLD_KILLED, status)) => return Ok(Some(ThreadEvent::Exited(status))),
        Some((libc::CLD_DUMPED, status)) => return Ok(Some(ThreadEvent::Exited(status | 0x80))),
        _ => {}
    }
    Ok(consume_stop(tid)?.map(ThreadEvent::Stopped))
}

/// Consumes a stop of a traced thread and returns its wait status. `None` if the thread is running
/// or the stop was already consumed.
fn consume_stop(tid: i32) -> io::Result<Option<i32>> {
    Ok(wait_nonblocking(tid, libc::WSTOPPED)?.map(|(_, status)| status << 8 | 0x7f))
}

/// Calls `waitid` without blocking. Returns the code and the status of the event; `None` if no
/// event is pending.
fn wait_nonblocking(
    tid: i32,
    flags: libc::c_int,
) -> io::Result<Option<(libc::c_int, libc::c_int)>> {
    // SAFETY: all zeros is a valid `siginfo_t`; the kernel fills it through a valid pointer, and
    // the fields that are read are always present.
    let (result, pid, code, status) = unsafe {
        let mut siginfo = std::mem::zeroed::<libc::siginfo_t>();
        let flags = flags | libc::WNOHANG | libc::__WALL;
        let result = libc::waitid(libc::P_PID, tid as libc::id_t, &raw mut siginfo, flags);
        (
            result,
            siginfo.si_pid(),
            siginfo.si_code,
            siginfo.si_status(),
        )
    };
    match (result, Errno::last()) {
        (0, _) => Ok((pid == tid).then_some((code, status))),
        (_, Errno::EINTR) => Ok(None),
        (_, errno) => Err(errno.into()),
    }
}

fn ptrace_request(
    request: libc::c_uint,
    tid: i32,
    address: usize,
    data: *mut libc::c_void,
) -> io::Result<()> {
    // SAFETY: for its request every caller passes null, a plain value, or a pointer to a live local
    // of the size that the request reads or writes.
    match unsafe { libc::ptrace(request, tid, address, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// The request PTRACE_SECCOMP_GET_FILTER. Its result is a number of instructions, each of which has
/// eight bytes.
pub(super) const PTRACE_SECCOMP_GET_FILTER: u64 = 0x420c;
/// Maximum number of bytes that one relayed request reads or writes.
pub(super) const REQUEST_MEMORY_BYTES: usize = 64 << 10;

/// Memory for a relayed request. It always has [`REQUEST_MEMORY_BYTES`] bytes and is aligned for
/// all structures of the kernel.
#[derive(Debug)]
pub(super) struct RequestMemory(Vec<u64>);

impl RequestMemory {
    /// Creates memory that starts with the bytes `prefix` and contains zeros after them.
    pub(super) fn with_prefix(prefix: &[u8]) -> Self {
        let mut words = vec![0u64; REQUEST_MEMORY_BYTES / 8];
        for (word, bytes) in words.iter_mut().zip(prefix.chunks(8)) {
            let mut word_bytes = [0; 8];
            word_bytes[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(word_bytes);
        }
        Self(words)
    }

    /// Returns the first `length` bytes.
    pub(super) fn bytes(&self, length: usize) -> Vec<u8> {
        self.0
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .take(length)
            .collect()
    }

    fn pointer(&mut self) -> u64 {
        self.0.as_mut_ptr() as u64
    }
}

/// A ptrace request of another process, relayed by [`super::ptrace_relay`].
#[derive(Debug)]
pub(super) struct RelayedRequest {
    /// Number of the ptrace request.
    pub(super) request_number: u64,
    /// The argument `addr` of ptrace. `Ok`: a plain value. `Err`: the memory that the argument
    /// points to.
    pub(super) address: Result<u64, RequestMemory>,
    /// The argument `data` of ptrace. `Ok`: a plain value. `Err`: the memory that the argument
    /// points to.
    pub(super) data: Result<u64, RequestMemory>,
    /// Length of the iovec through which the data is passed; `None` if the data is passed directly.
    pub(super) iovec_len: Option<usize>,
    /// True if the request expects address and data in swapped positions.
    pub(super) is_swapped: bool,
}

impl RelayedRequest {
    /// Executes the request on the thread `tid`. Returns the result, and the length of the iovec
    /// after the call.
    ///
    /// # Errors
    /// The error of the kernel, or EIO for a request whose use of memory is unknown.
    pub(super) fn execute(&mut self, tid: i32) -> io::Result<(i64, usize)> {
        if !self.uses_only_own_memory() {
            return Err(Errno::EIO.into());
        }
        let address = self
            .address
            .as_mut()
            .map_or_else(RequestMemory::pointer, |value| *value);
        let mut data = self
            .data
            .as_mut()
            .map_or_else(RequestMemory::pointer, |value| *value);
        let mut io_vector = libc::iovec {
            iov_base: data as *mut libc::c_void,
            iov_len: self.iovec_len.unwrap_or(0),
        };
        if self.iovec_len.is_some() {
            data = (&raw mut io_vector) as u64;
        }
        let (address, data) = if self.is_swapped {
            (data, address)
        } else {
            (address, data)
        };
        // SAFETY: `uses_only_own_memory` has checked that each pointer argument refers to as much
        // memory as the request can use. The memory lives until the call has returned.
        let result =
            unsafe { libc::syscall(libc::SYS_ptrace, self.request_number, tid, address, data) };
        match result {
            -1 => Err(io::Error::last_os_error()),
            result => Ok((result, io_vector.iov_len)),
        }
    }

    /// True if the kernel will access no memory except the memory of the request.
    fn uses_only_own_memory(&self) -> bool {
        const PEEK_TEXT: u64 = libc::PTRACE_PEEKTEXT as u64;
        const PEEK_USER: u64 = libc::PTRACE_PEEKUSER as u64;
        const POKE_TEXT: u64 = libc::PTRACE_POKETEXT as u64;
        const POKE_USER: u64 = libc::PTRACE_POKEUSER as u64;
        const CONT: u64 = libc::PTRACE_CONT as u64;
        const SYSCALL: u64 = libc::PTRACE_SYSCALL as u64;
        const DETACH: u64 = libc::PTRACE_DETACH as u64;
        const SET_OPTIONS: u64 = libc::PTRACE_SETOPTIONS as u64;
        const GET_EVENT: u64 = libc::PTRACE_GETEVENTMSG as u64;
        const GET_SIGNAL: u64 = libc::PTRACE_GETSIGINFO as u64;
        const SET_SIGNAL: u64 = libc::PTRACE_SETSIGINFO as u64;
        const GET_REGSET: u64 = libc::PTRACE_GETREGSET as u64;
        const SET_REGSET: u64 = libc::PTRACE_SETREGSET as u64;
        const SEIZE: u64 = libc::PTRACE_SEIZE as u64;
        const INTERRUPT: u64 = libc::PTRACE_INTERRUPT as u64;
        const LISTEN: u64 = libc::PTRACE_LISTEN as u64;
        const PEEK_SIGNALS: u64 = libc::PTRACE_PEEKSIGINFO as u64;
        const GET_MASK: u64 = libc::PTRACE_GETSIGMASK as u64;
        const SET_MASK: u64 = libc::PTRACE_SETSIGMASK as u64;
        // The requests after PTRACE_SECCOMP_GET_FILTER: PTRACE_SECCOMP_GET_METADATA,
        // PTRACE_GET_SYSCALL_INFO, PTRACE_GET_RSEQ_CONFIGURATION, and the two requests for the
        // dispatch of system calls.
        const LATER_REQUESTS: std::ops::RangeInclusive<u64> =
            PTRACE_SECCOMP_GET_FILTER + 1..=0x4211;
        // PTRACE_GETREGS to PTRACE_SETFPXREGS of x86-64: general, floating-point and vector
        // registers.
        const REGISTERS: [u64; 6] = [12, 13, 14, 15, 18, 19];
        // PTRACE_ARCH_PRCTL: the code in the other argument determines whether `data` is a value or
        // points to memory.
        const ARCH_PRCTL: u64 = 30;
        let has_memory = self.data.is_err();
        if cfg!(target_arch = "x86_64") && self.request_number == ARCH_PRCTL {
            // Codes that read the base addresses of thread-local storage or the state of the shadow
            // stack into memory.
            const READ_CODES: [u64; 3] = [0x1003, 0x1004, 0x5005];
            /// Codes that set these values and use no memory.
            const SET_CODES: [u64; 6] = [0x1001, 0x1002, 0x5001, 0x5002, 0x5003, 0x5004];
            let is_known = if has_memory {
                READ_CODES.as_slice()
            } else {
                SET_CODES.as_slice()
            };
            return self.is_swapped
                && self
                    .address
                    .as_ref()
                    .is_ok_and(|code| is_known.contains(code));
        }
        if self.is_swapped {
            return false;
        }
        match self.request_number {
            POKE_TEXT..=POKE_USER
            | CONT
            | SYSCALL
            | DETACH
            | SET_OPTIONS
            | SEIZE
            | INTERRUPT
            | LISTEN => !has_memory,
            PEEK_TEXT..=PEEK_USER | GET_EVENT | GET_SIGNAL | SET_SIGNAL | GET_MASK | SET_MASK => {
                has_memory
            }
            GET_REGSET | SET_REGSET => {
                has_memory
                    && self
                        .iovec_len
                        .is_some_and(|length| length <= REQUEST_MEMORY_BYTES)
            }
            PTRACE_SECCOMP_GET_FILTER => has_memory || matches!(self.data, Ok(0)),
            PEEK_SIGNALS => {
                has_memory
                    && self
                        .address
                        .as_ref()
                        .is_err_and(|peek_arguments| siginfo_fits(&peek_arguments.bytes(16)))
            }
            request if LATER_REQUESTS.contains(&request) => {
                has_memory
                    && self
                        .address
                        .as_ref()
                        .is_ok_and(|&n| n <= REQUEST_MEMORY_BYTES as u64)
            }
            request => has_memory && cfg!(target_arch = "x86_64") && REGISTERS.contains(&request),
        }
    }
}

/// True if the requested number of signals fits into [`REQUEST_MEMORY_BYTES`]. `peek_arguments` is
/// the request's structure: offset, flags, count.
fn siginfo_fits(peek_arguments: &[u8]) -> bool {
    let signal_count = peek_arguments
        .get(12..16)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(u32::MAX, u32::from_ne_bytes);
    (signal_count as usize)
        .checked_mul(size_of::<libc::siginfo_t>())
        .is_some_and(|bytes| bytes <= REQUEST_MEMORY_BYTES)
}
