//! What is asked of a traced thread: thin names over the kernel's call.
#![allow(unsafe_code)] // ptrace has no safe interface.

use nix::errno::Errno;
use std::io;
use std::time::{Duration, Instant};

/// Room for the general registers of any architecture, in bytes.
const GENERAL_BYTES: usize = 1024;
/// Room for the floating-point and vector registers, in bytes.
const VECTOR_BYTES: usize = 32 << 10;
/// How long a stopped thread may take to report to us.
const ATTACH_ALLOWED: Duration = Duration::from_millis(500);
/// What the kernel calls a stop that a tracer asked for, or that of a whole stopped process.
const EVENT_STOP: i32 = 128;

/// Which registers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Registers {
    /// The general ones, with the instruction pointer.
    General,
    /// Floating point and vectors.
    Vector,
}

impl Registers {
    fn set(self) -> usize {
        match self {
            Registers::General => libc::NT_PRSTATUS as usize,
            #[cfg(target_arch = "x86_64")]
            Registers::Vector => 0x202,
            #[cfg(not(target_arch = "x86_64"))]
            Registers::Vector => libc::NT_PRFPREG as usize,
        }
    }

    fn bytes(self) -> usize {
        match self {
            Registers::General => GENERAL_BYTES,
            Registers::Vector => VECTOR_BYTES,
        }
    }
}

/// A thread that we trace while it stands still. Letting go leaves it stopped, as its process is.
pub(super) struct Attached {
    tid: i32,
}

impl Attached {
    /// Begins to trace a thread of a stopped process.
    pub(super) fn to(tid: i32) -> io::Result<Attached> {
        seize(tid)?;
        let attached = Attached { tid };
        interrupt(tid)?;
        let until = Instant::now() + ATTACH_ALLOWED;
        loop {
            match take_stop(tid) {
                Ok(Some(_)) => return Ok(attached),
                Ok(None) if Instant::now() < until => std::thread::yield_now(),
                Ok(None) => return Err(io::Error::from(io::ErrorKind::TimedOut)),
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads registers, as the kernel lays them out.
    pub(super) fn registers(&self, which: Registers) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0u8; which.bytes()];
        let mut area = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        ask(
            libc::PTRACE_GETREGSET,
            self.tid,
            which.set(),
            (&raw mut area).cast(),
        )?;
        let length = area.iov_len;
        bytes.truncate(length);
        Ok(bytes)
    }

    /// Sets registers.
    pub(super) fn set_registers(&self, which: Registers, registers: &[u8]) -> io::Result<()> {
        let mut bytes = registers.to_vec();
        let mut area = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        ask(
            libc::PTRACE_SETREGSET,
            self.tid,
            which.set(),
            (&raw mut area).cast(),
        )
    }

    /// The signals that it blocks, signal 1 in the lowest bit.
    pub(super) fn blocked(&self) -> io::Result<u64> {
        let mut mask = 0u64;
        ask(
            libc::PTRACE_GETSIGMASK,
            self.tid,
            size_of::<u64>(),
            (&raw mut mask).cast(),
        )?;
        Ok(mask)
    }

    /// Takes out the breakpoint that a tracer may have left in the processor's own registers.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn clear_breakpoint(&self) -> io::Result<()> {
        /// Where the register that switches breakpoints on lies in the kernel's `struct user`.
        const CONTROL_AT: usize =
            std::mem::offset_of!(libc::user, u_debugreg) + 7 * size_of::<u64>();
        ask(
            libc::PTRACE_POKEUSER,
            self.tid,
            CONTROL_AT,
            std::ptr::null_mut(),
        )
    }

    /// Takes out the breakpoint that a tracer may have left in the processor's own registers.
    #[cfg(target_arch = "aarch64")]
    pub(super) fn clear_breakpoint(&self) -> io::Result<()> {
        /// Number of that set of registers; one breakpoint: eight bytes about all of them, sixteen of its own.
        const SET: usize = 0x402;
        const BYTES: usize = 24;
        let mut bytes = [0u8; BYTES];
        let mut area = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        ask(
            libc::PTRACE_SETREGSET,
            self.tid,
            SET,
            (&raw mut area).cast(),
        )
    }

    /// When it is killed from now on it stands still on its way out, with its memory, until it is let go. Nothing else makes
    /// it go on, and nothing makes it do anything of its own.
    pub(super) fn stay_at_its_end(&self) -> io::Result<()> {
        let options = std::ptr::without_provenance_mut(libc::PTRACE_O_TRACEEXIT as usize);
        ask(libc::PTRACE_SETOPTIONS, self.tid, 0, options)
    }

    /// Sets the signals that it blocks.
    pub(super) fn set_blocked(&self, mut mask: u64) -> io::Result<()> {
        ask(
            libc::PTRACE_SETSIGMASK,
            self.tid,
            size_of::<u64>(),
            (&raw mut mask).cast(),
        )
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = let_go(self.tid, 0);
    }
}

/// Begins to trace a thread, which goes on with what it does.
pub(super) fn seize(tid: i32) -> io::Result<()> {
    ask(libc::PTRACE_SEIZE, tid, 0, std::ptr::null_mut())
}

/// Asks a traced thread to stand still.
pub(super) fn interrupt(tid: i32) -> io::Result<()> {
    ask(libc::PTRACE_INTERRUPT, tid, 0, std::ptr::null_mut())
}

/// Lets a thread that stands still run on under its tracer, without the signal that it stopped for.
pub(super) fn go_on(tid: i32) -> io::Result<()> {
    ask(libc::PTRACE_CONT, tid, 0, std::ptr::null_mut())
}

/// Ends the tracing of a thread that stands still and hands it a signal (0: none).
pub(super) fn let_go(tid: i32, signal: i32) -> io::Result<()> {
    ask(
        libc::PTRACE_DETACH,
        tid,
        0,
        std::ptr::without_provenance_mut(signal as usize),
    )
}

/// Why a traced thread stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// It was asked to, or its whole process is stopped.
    Asked,
    /// The kernel says so by SIGTRAP: a trap instruction, the end of a system call.
    Trap,
    /// A signal from somebody is about to reach it.
    Signal(i32),
}

/// Why a traced thread stands still.
///
/// # Errors
/// ESRCH: it does not stand still, or has ended.
pub(super) fn cause(tid: i32) -> io::Result<Cause> {
    // SAFETY: all zero is a valid siginfo.
    let mut info = unsafe { std::mem::zeroed::<libc::siginfo_t>() };
    ask(libc::PTRACE_GETSIGINFO, tid, 0, (&raw mut info).cast())?;
    Ok(match (info.si_signo, info.si_code) {
        (_, code) if code >> 8 == EVENT_STOP => Cause::Asked,
        (libc::SIGTRAP, code) if code > 0 => Cause::Trap,
        (signal, _) => Cause::Signal(signal),
    })
}

/// What a child or traced thread has to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// It stands still; its wait status.
    Stopped(i32),
    /// It has ended; its wait status.
    Ended(i32),
}

/// What there is to hear of a traced thread. A stop is thereby heard; its end is left to whoever reaps it.
///
/// # Errors
/// ECHILD: it is neither traced by us nor our child.
pub(super) fn hear(tid: i32) -> io::Result<Option<News>> {
    match wait(tid, libc::WEXITED | libc::WNOWAIT)? {
        Some((libc::CLD_EXITED, status)) => return Ok(Some(News::Ended((status & 0xff) << 8))),
        Some((libc::CLD_KILLED, status)) => return Ok(Some(News::Ended(status))),
        Some((libc::CLD_DUMPED, status)) => return Ok(Some(News::Ended(status | 0x80))),
        _ => {}
    }
    Ok(take_stop(tid)?.map(News::Stopped))
}

/// Hears that the traced thread stands still: its wait status, or `None` if it does not or was heard already.
fn take_stop(tid: i32) -> io::Result<Option<i32>> {
    Ok(wait(tid, libc::WSTOPPED)?.map(|(_, status)| status << 8 | 0x7f))
}

/// Waits without blocking: code and status.
fn wait(tid: i32, flags: libc::c_int) -> io::Result<Option<(libc::c_int, libc::c_int)>> {
    // SAFETY: all zero is a valid siginfo; the kernel fills it through a valid pointer, and what is read is always there.
    let (result, pid, code, status) = unsafe {
        let mut info = std::mem::zeroed::<libc::siginfo_t>();
        let flags = flags | libc::WNOHANG | libc::__WALL;
        let result = libc::waitid(libc::P_PID, tid as libc::id_t, &raw mut info, flags);
        (result, info.si_pid(), info.si_code, info.si_status())
    };
    match (result, Errno::last()) {
        (0, _) => Ok((pid == tid).then_some((code, status))),
        (_, Errno::EINTR) => Ok(None),
        (_, errno) => Err(errno.into()),
    }
}

fn ask(request: libc::c_uint, tid: i32, address: usize, data: *mut libc::c_void) -> io::Result<()> {
    // SAFETY: every caller passes, for its request, null, a plain value where the request takes one, or a pointer to a
    // live local of the size that the request writes or reads.
    match unsafe { libc::ptrace(request, tid, address, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// The request for a filter of system calls; its result counts instructions of eight bytes.
pub(super) const GET_FILTER: u64 = 0x420c;
/// Bytes that one request reads or writes at most.
pub(super) const MEMORY_MAX: usize = 64 << 10;

/// Memory for a request that somebody else words: always [`MEMORY_MAX`] bytes, aligned for whatever the kernel keeps there.
#[derive(Debug)]
pub(super) struct Memory(Vec<u64>);

impl Memory {
    /// Zeros, but for the beginning.
    pub(super) fn beginning_with(begin: &[u8]) -> Memory {
        let mut words = vec![0u64; MEMORY_MAX / 8];
        for (word, bytes) in words.iter_mut().zip(begin.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        Memory(words)
    }

    /// The first bytes of it.
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

/// A request in somebody else's words.
#[derive(Debug)]
pub(super) struct Foreign {
    /// Its number.
    pub(super) request: u64,
    /// A plain value, or what lies there.
    pub(super) address: Result<u64, Memory>,
    /// A plain value, or what lies there.
    pub(super) data: Result<u64, Memory>,
    /// The data is found through a vector of this length.
    pub(super) vector: Option<usize>,
    /// This request takes its data where others take their address.
    pub(super) exchanged: bool,
}

impl Foreign {
    /// Carries it out: the result, and the length of the vector afterwards.
    ///
    /// # Errors
    /// What the kernel answers; EIO for a request whose use of memory is not known.
    pub(super) fn carry_out(&mut self, tid: i32) -> io::Result<(i64, usize)> {
        if !self.is_sound() {
            return Err(Errno::EIO.into());
        }
        let address = self
            .address
            .as_mut()
            .map_or_else(Memory::pointer, |value| *value);
        let mut data = self
            .data
            .as_mut()
            .map_or_else(Memory::pointer, |value| *value);
        let mut vector = libc::iovec {
            iov_base: data as *mut libc::c_void,
            iov_len: self.vector.unwrap_or(0),
        };
        if self.vector.is_some() {
            data = (&raw mut vector) as u64;
        }
        let (address, data) = if self.exchanged {
            (data, address)
        } else {
            (address, data)
        };
        // SAFETY: as `is_sound` has seen, where the request takes memory it gets as much as it can use, which lives until
        // the call is over.
        let result = unsafe { libc::syscall(libc::SYS_ptrace, self.request, tid, address, data) };
        match result {
            -1 => Err(io::Error::last_os_error()),
            result => Ok((result, vector.iov_len)),
        }
    }

    /// True if the kernel will touch no memory but what the request brings along.
    fn is_sound(&self) -> bool {
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
        const GET_SET: u64 = libc::PTRACE_GETREGSET as u64;
        const SET_SET: u64 = libc::PTRACE_SETREGSET as u64;
        const SEIZE: u64 = libc::PTRACE_SEIZE as u64;
        const INTERRUPT: u64 = libc::PTRACE_INTERRUPT as u64;
        const LISTEN: u64 = libc::PTRACE_LISTEN as u64;
        const PEEK_SIGNALS: u64 = libc::PTRACE_PEEKSIGINFO as u64;
        const GET_MASK: u64 = libc::PTRACE_GETSIGMASK as u64;
        const SET_MASK: u64 = libc::PTRACE_SETSIGMASK as u64;
        // Filter metadata, information on a system call, restartable sequences, dispatch of system calls.
        const LATER: std::ops::RangeInclusive<u64> = GET_FILTER + 1..=0x4211;
        // Only the machine that has them knows these numbers: general, floating-point and vector registers.
        const REGISTERS: [u64; 6] = [12, 13, 14, 15, 18, 19];
        // What belongs to this architecture: it is told which memory or value by the other argument.
        const ARCH: u64 = 30;
        let has_memory = self.data.is_err();
        if cfg!(target_arch = "x86_64") && self.request == ARCH {
            // Where the thread's own data is, and the state of its shadow stack: to be read, else to be set.
            const READ: [u64; 3] = [0x1003, 0x1004, 0x5005];
            const SET: [u64; 6] = [0x1001, 0x1002, 0x5001, 0x5002, 0x5003, 0x5004];
            let known = if has_memory {
                READ.as_slice()
            } else {
                SET.as_slice()
            };
            return self.exchanged && self.address.as_ref().is_ok_and(|what| known.contains(what));
        }
        if self.exchanged {
            return false;
        }
        match self.request {
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
            GET_SET | SET_SET => {
                has_memory && self.vector.is_some_and(|length| length <= MEMORY_MAX)
            }
            GET_FILTER => has_memory || matches!(self.data, Ok(0)),
            PEEK_SIGNALS => {
                has_memory
                    && self
                        .address
                        .as_ref()
                        .is_err_and(|wanted| signals_fit(&wanted.bytes(16)))
            }
            request if LATER.contains(&request) => {
                has_memory && self.address.as_ref().is_ok_and(|&n| n <= MEMORY_MAX as u64)
            }
            request => has_memory && cfg!(target_arch = "x86_64") && REGISTERS.contains(&request),
        }
    }
}

/// What is wanted of a queue of signals (first, flags, how many) fits into [`MEMORY_MAX`].
fn signals_fit(wanted: &[u8]) -> bool {
    let count = wanted
        .get(12..16)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(u32::MAX, u32::from_ne_bytes);
    (count as usize)
        .checked_mul(size_of::<libc::siginfo_t>())
        .is_some_and(|bytes| bytes <= MEMORY_MAX)
}
