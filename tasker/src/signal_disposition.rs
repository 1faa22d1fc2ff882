//! Checks whether a program handles the signal that requests a self-checkpoint.

use checkpoint::proc;
use procfs::process::{Process, Syscall, Task};
use std::os::unix::fs::FileExt;

/// False if the default action of this signal would end the process, according to /proc. True for a
/// process that has ended.
pub(crate) fn handles_signal(pid: i32, signal: i32) -> bool {
    let signal_bit = 1u64 << (signal - 1);
    // A process that has ended cannot be killed by the signal, so the result is true.
    let Some(status) = proc::status(pid) else {
        return true;
    };
    // A blocked signal does not count as handled, because a new process has all signals blocked for
    // a short time.
    (status.sigcgt | status.sigign) & signal_bit != 0
        || waits_in_sigwait(pid, signal_bit)
        || status.sigblk & signal_bit != 0 && reads_from_signalfd(pid, signal_bit)
}

/// True if the process reads this signal from a signalfd. `signal_bit` is the signal's bit in a
/// signal mask.
fn reads_from_signalfd(pid: i32, signal_bit: u64) -> bool {
    let masks = proc::signalfd_masks(pid);
    masks.into_iter().any(|mask| mask & signal_bit != 0)
}

/// True if a thread of the process waits for this signal in `sigwait`. `signal_bit` is the signal's
/// bit in a signal mask. The awaited set is read from the memory to which the system call refers;
/// during the wait, the kernel does not list its signals as blocked.
fn waits_in_sigwait(pid: i32, signal_bit: u64) -> bool {
    let awaited_signals = |thread: Task| {
        let Ok(Syscall::Blocked {
            syscall_number: libc::SYS_rt_sigtimedwait,
            argument_registers: [set_address, ..],
            ..
        }) = thread.syscall()
        else {
            return None;
        };
        let mut set_bytes = [0; size_of::<u64>()];
        let memory = Process::new(thread.tid).and_then(|thread| thread.mem());
        memory
            .ok()?
            .read_exact_at(&mut set_bytes, set_address)
            .ok()?;
        Some(u64::from_ne_bytes(set_bytes))
    };
    let threads = Process::new(pid).and_then(|process| process.tasks());
    let threads = threads.into_iter().flatten().flatten();
    threads
        .filter_map(awaited_signals)
        .any(|set_bytes| set_bytes & signal_bit != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::{SigSet, Signal};
    use nix::sys::signalfd::SignalFd;
    use std::process::{Child, Command, Stdio};
    use std::thread::sleep;
    use std::time::{Duration, Instant};

    struct Program(Child);

    impl Drop for Program {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn start_python(python_code: &str) -> Program {
        Program(
            Command::new("python3")
                .args(["-c", python_code])
                .stdin(Stdio::null())
                .spawn()
                .expect("python3"),
        )
    }

    fn wait_until_handled(program: &Program, signal: Signal) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !handles_signal(program.0.id() as i32, signal as i32) {
            assert!(Instant::now() < deadline, "{signal}");
            sleep(Duration::from_millis(5));
        }
    }

    /// A signal that a program catches, ignores or awaits counts as handled.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn caught_ignored_and_awaited_signals_are_handled() {
        let catching_program = start_python(
            "import signal; signal.signal(signal.SIGUSR1, print)\nwhile 1: signal.pause()",
        );
        wait_until_handled(&catching_program, Signal::SIGUSR1);
        assert!(!handles_signal(
            catching_program.0.id() as i32,
            Signal::SIGUSR2 as i32
        ));
        let ignoring_program = start_python(
            "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nwhile 1: signal.pause()",
        );
        wait_until_handled(&ignoring_program, Signal::SIGUSR1);
        let waiting_program = start_python(
            "import signal; s = {signal.SIGUSR1}; signal.pthread_sigmask(signal.SIG_BLOCK, s); signal.sigwait(s)",
        );
        wait_until_handled(&waiting_program, Signal::SIGUSR1);
        assert!(!handles_signal(
            waiting_program.0.id() as i32,
            Signal::SIGUSR2 as i32
        ));
    }

    #[test]
    #[ignore = "system tier: needs python3"]
    fn signal_that_is_only_blocked_is_not_handled() {
        // /proc shows the signal mask of a process's first thread, but the test runs in another
        // thread. Therefore the test starts a separate process.
        let blocking_program = start_python(
            "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\nwhile 1: signal.pause()",
        );
        let (pid, signal_bit) = (
            blocking_program.0.id() as i32,
            1u64 << (Signal::SIGUSR1 as i32 - 1),
        );
        let deadline = Instant::now() + Duration::from_secs(60);
        while proc::status(pid).is_none_or(|status| status.sigblk & signal_bit == 0) {
            assert!(Instant::now() < deadline, "it never blocks it");
            sleep(Duration::from_millis(5));
        }
        assert!(!handles_signal(pid, Signal::SIGUSR1 as i32));
    }

    #[test]
    fn signalfd_counts_only_for_its_own_signals() {
        let mut set = SigSet::empty();
        set.add(Signal::SIGUSR1);
        let signal_bit = 1u64 << (Signal::SIGUSR1 as i32 - 1);
        let test_pid = std::process::id() as i32;
        assert!(!reads_from_signalfd(test_pid, signal_bit));
        let signal_fd = SignalFd::new(&set).expect("a descriptor");
        assert!(
            reads_from_signalfd(test_pid, signal_bit)
                && !reads_from_signalfd(test_pid, signal_bit << 1)
        );
        drop(signal_fd);
        assert!(!reads_from_signalfd(test_pid, signal_bit));
    }
}
