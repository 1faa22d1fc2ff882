//! Restores a task after CRIU was killed during a dump.
//!
//! CRIU makes the task execute system calls. To do so it changes registers, blocks signals,
//! overwrites an instruction or two at the beginning of a code mapping, and sets a hardware
//! breakpoint. If CRIU is killed during these changes, the task would die of a trap when it
//! continues. Therefore the state that CRIU may change is recorded while the task is stopped before
//! the dump, and restored if CRIU ends without restoring it.
//!
//! A thread may also be in the middle of CRIU's own code (the parasite) and may have a file open
//! there. If the task were dumped again in this state, that dump would fail. Therefore such a
//! thread first runs to the end of CRIU's code: there the code closes its files and either restores
//! the thread by itself or ends in a trap.
//!
//! [`ptrace_relay`](super::ptrace_relay) ensures that the task is still stopped after CRIU has
//! ended, and that no trap is pending.

use super::ptrace::{RegisterSet, StopCause, TracedThread};
use crate::proc;
use sempa_proto::migration::Failure;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Number of bytes that are recorded at the beginning of each code mapping. CRIU overwrites fewer
/// bytes: at most two machine words.
const RECORDED_CODE_BYTES: usize = 32;
/// The signal mask that CRIU sets in the task: all signals except SIGKILL and SIGSTOP, which cannot
/// be blocked.
const CRIU_SIGNAL_MASK: u64 = !(1 << 8 | 1 << 18);
/// The bit of SIGTRAP in a signal mask. The kernel unblocks SIGTRAP when it forces a trap.
const SIGTRAP_BIT: u64 = 1 << 4;
/// Time limit for the threads of a task to run to the end of CRIU's code. Most of the time is spent
/// in mount and unmount, which are slow on a loaded host.
const PARASITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of threads whose state is recorded. If a task has more threads, nothing is
/// recorded, and a killed CRIU may damage the task.
const THREADS_MAX: usize = 4096;

/// Offset in bytes of the instruction pointer in the general registers.
#[cfg(target_arch = "x86_64")]
const INSTRUCTION_POINTER_OFFSET: usize = 16 * 8;
#[cfg(target_arch = "aarch64")]
const INSTRUCTION_POINTER_OFFSET: usize = 32 * 8;

/// The recorded state of a stopped task that CRIU may change.
#[derive(Debug)]
pub(super) struct SavedTaskState {
    processes: Vec<ProcessState>,
}

#[derive(Debug)]
struct ProcessState {
    pid: i32,
    mappings: Vec<Range<u64>>,
    /// The first bytes of each code mapping, with the mapping's start address.
    code_starts: Vec<(u64, Vec<u8>)>,
    threads: Vec<ThreadState>,
}

#[derive(Debug)]
struct ThreadState {
    tid: i32,
    general_registers: Vec<u8>,
    vector_registers: Vec<u8>,
    blocked_signals: u64,
}

impl SavedTaskState {
    /// Records the state of these stopped processes.
    ///
    /// # Errors
    /// A thread cannot be traced. Nothing has changed.
    pub(super) fn record(pids: &[i32]) -> io::Result<Self> {
        let mut remaining_threads = THREADS_MAX;
        let processes = pids
            .iter()
            .map(|&pid| ProcessState::record(pid, &mut remaining_threads))
            .collect::<io::Result<_>>()?;
        Ok(Self { processes })
    }

    /// Restores the recorded state if the failure `failure` means that CRIU was killed before it
    /// could restore the task.
    pub(super) fn restore_after_failure(&self, failure: &Failure) {
        if matches!(
            failure,
            Failure::Killed { .. } | Failure::Deadline { .. } | Failure::Cancelled(_)
        ) {
            self.restore();
        }
    }

    /// Restores what CRIU has changed: overwritten code, signal masks and breakpoints, and the
    /// registers of threads that CRIU has stopped in overwritten code or in its own code. Processes
    /// that have exited are skipped.
    pub(super) fn restore(&self) {
        let deadline = Instant::now() + PARASITE_TIMEOUT;
        for process in &self.processes {
            process.restore(deadline);
        }
    }
}

impl ProcessState {
    fn record(pid: i32, remaining_threads: &mut usize) -> io::Result<Self> {
        let memory_file = File::open(format!("/proc/{pid}/mem"))?;
        let (mut mappings, mut code_starts) = (Vec::new(), Vec::new());
        for (range, is_executable) in read_mappings(pid)? {
            let mut bytes = vec![0; RECORDED_CODE_BYTES];
            // The kernel's vsyscall page cannot be read, and nothing can write to it.
            if is_executable && memory_file.read_exact_at(&mut bytes, range.start).is_ok() {
                code_starts.push((range.start, bytes));
            }
            mappings.push(range);
        }
        let mut threads = Vec::new();
        for tid in proc::thread_ids(pid)? {
            *remaining_threads = remaining_threads
                .checked_sub(1)
                .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
            let traced_thread = TracedThread::attach(tid)?;
            let (general_bytes, vector_bytes) = (
                traced_thread.registers(RegisterSet::General)?,
                traced_thread.registers(RegisterSet::Vector)?,
            );
            threads.push(ThreadState {
                tid,
                general_registers: general_bytes,
                vector_registers: vector_bytes,
                blocked_signals: traced_thread.blocked_signals()?,
            });
        }
        Ok(Self {
            pid,
            mappings,
            code_starts,
            threads,
        })
    }

    fn code_location(&self, address: u64) -> CodeLocation {
        if self
            .code_starts
            .iter()
            .any(|(start, bytes)| (*start..*start + bytes.len() as u64).contains(&address))
        {
            return CodeLocation::Overwritten;
        }
        match self.mappings.iter().any(|range| range.contains(&address)) {
            true => CodeLocation::OwnCode,
            false => CodeLocation::Parasite,
        }
    }

    fn restore(&self, deadline: Instant) {
        for thread in &self.threads {
            // Fails only if the thread has exited or does not stop in time.
            let _ = self.restore_thread(thread, deadline);
        }
        let Ok(memory_file) = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{}/mem", self.pid))
        else {
            return;
        };
        for (address, bytes) in &self.code_starts {
            let mut current_bytes = vec![0; bytes.len()];
            if memory_file
                .read_exact_at(&mut current_bytes, *address)
                .is_ok()
                && current_bytes != *bytes
            {
                let _ = memory_file.write_all_at(bytes, *address);
            }
        }
    }

    /// Restores one thread. CRIU's code in the thread must end until `deadline`.
    ///
    /// # Errors
    /// The thread has exited or does not stop.
    fn restore_thread(&self, saved: &ThreadState, deadline: Instant) -> io::Result<()> {
        let thread = TracedThread::attach_until(saved.tid, deadline)?;
        // Fails only if the thread was killed since it was attached.
        let _ = thread.clear_breakpoint();
        // Registers are restored only at addresses where CRIU stops a thread: a thread in its own
        // code may have continued since.
        let must_restore_registers = match self.thread_location(&thread)? {
            CodeLocation::Overwritten => true,
            CodeLocation::Parasite => match self.run_to_end_of_parasite(&thread, deadline) {
                Ok(ParasiteEnd::Trap) => true,
                Ok(ParasiteEnd::OwnCode) => return Ok(()),
                // CRIU's code in the main thread detects that CRIU has ended, and restores the
                // thread when the task continues. In other threads the code does not.
                Err(error) if saved.tid == self.pid => return Err(error),
                Err(_) => true,
            },
            CodeLocation::OwnCode => false,
        };
        if !must_restore_registers {
            return match thread.blocked_signals()? | SIGTRAP_BIT {
                CRIU_SIGNAL_MASK => thread.set_blocked_signals(saved.blocked_signals),
                _ => Ok(()),
            };
        }
        // A failure in one part must not leave the other parts unrestored.
        let results = [
            thread.set_registers(RegisterSet::General, &saved.general_registers),
            thread.set_registers(RegisterSet::Vector, &saved.vector_registers),
            thread.set_blocked_signals(saved.blocked_signals),
        ];
        results.into_iter().collect()
    }

    /// Runs a thread that executes CRIU's code to the end of that code.
    ///
    /// # Errors
    /// The code does not end until `deadline`, or the thread has exited.
    fn run_to_end_of_parasite(
        &self,
        thread: &TracedThread,
        deadline: Instant,
    ) -> io::Result<ParasiteEnd> {
        loop {
            let stop_cause = thread.run_to_system_call(deadline)?;
            if self.thread_location(thread)? != CodeLocation::Parasite {
                return Ok(ParasiteEnd::OwnCode);
            }
            if matches!(stop_cause, StopCause::Trap | StopCause::Signal(_)) {
                return Ok(ParasiteEnd::Trap);
            }
        }
    }

    fn thread_location(&self, thread: &TracedThread) -> io::Result<CodeLocation> {
        let registers = thread.registers(RegisterSet::General)?;
        Ok(instruction_pointer(&registers)
            .map_or(CodeLocation::OwnCode, |address| self.code_location(address)))
    }
}

/// How CRIU's code in a thread has ended.
enum ParasiteEnd {
    /// CRIU's code has restored the registers and the signal mask of the thread.
    OwnCode,
    /// CRIU's code has executed the trap at its end. The registers are still those of CRIU's code.
    Trap,
}

/// The kind of code at an instruction pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CodeLocation {
    /// Code that CRIU overwrites.
    Overwritten,
    /// CRIU's parasite code: memory that was not mapped before the dump.
    Parasite,
    /// Code of the task itself.
    OwnCode,
}

/// Returns the address ranges of a process's mappings. The bool is true if the mapping is
/// executable.
fn read_mappings(pid: i32) -> io::Result<Vec<(Range<u64>, bool)>> {
    Ok(proc::mappings(pid, "maps")?
        .lines()
        .filter_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
            Some((range, rest.as_bytes().get(2) == Some(&b'x')))
        })
        .collect())
}

fn instruction_pointer(registers: &[u8]) -> Option<u64> {
    Some(u64::from_ne_bytes(
        registers
            .get(INSTRUCTION_POINTER_OFFSET..INSTRUCTION_POINTER_OFFSET + 8)?
            .try_into()
            .ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::{Duration, Instant};

    /// Overwritten code, registers and the signal mask of a stopped process are restored.
    #[test]
    fn changed_process_is_restored() {
        let mut child = Command::new("sleep")
            .arg("1000")
            .spawn()
            .expect("it starts");
        let pid = child.id() as i32;
        let process_state = || proc::stat(pid).expect("it lives").state;
        let deadline = Instant::now() + Duration::from_secs(20);
        let wait_until = |condition: &dyn Fn() -> bool| {
            while !condition() {
                assert!(Instant::now() < deadline);
                std::thread::yield_now();
            }
        };
        // The process has started and is blocked in its only system call.
        wait_until(&|| {
            std::fs::read_to_string(format!("/proc/{pid}/syscall"))
                .is_ok_and(|s| s.starts_with(|c: char| c.is_ascii_digit()))
        });
        wait_until(&|| {
            std::fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|s| s.contains("libc"))
        });
        wait_until(&|| process_state() == 'S');
        let send_signal =
            |signal| nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).expect("kill");
        send_signal(nix::sys::signal::SIGSTOP);
        wait_until(&|| process_state() == 'T');
        let saved_state = SavedTaskState::record(&[pid]).expect("it is stopped");
        wait_until(&|| process_state() == 'T');

        let (address, code) = saved_state.processes[0].code_starts[0].clone();
        let memory_file = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .expect("mem");
        memory_file
            .write_all_at(&[0xcc; 8], address)
            .expect("a trap");
        {
            let traced_thread = TracedThread::attach(pid).expect("attach");
            let mut registers = traced_thread
                .registers(RegisterSet::General)
                .expect("registers");
            registers[INSTRUCTION_POINTER_OFFSET..INSTRUCTION_POINTER_OFFSET + 8]
                .copy_from_slice(&address.to_ne_bytes());
            traced_thread
                .set_registers(RegisterSet::General, &registers)
                .expect("set");
            traced_thread.set_blocked_signals(u64::MAX).expect("set");
        }
        saved_state.restore();
        let mut current_code = vec![0; code.len()];
        memory_file
            .read_exact_at(&mut current_code, address)
            .expect("read");
        assert_eq!(current_code, code);
        assert_eq!(proc::status(pid).expect("it lives").sigblk, 0);
        send_signal(nix::sys::signal::SIGCONT);
        wait_until(&|| process_state() == 'S');
        assert!(child.try_wait().expect("wait").is_none(), "it sleeps on");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }
}
