//! Checks whether a program handles the signal that requests a self-checkpoint.

use checkpoint::proc;
use procfs::process::{Process, Syscall, Task};
use std::os::unix::fs::FileExt;

/// False if the default action of this signal would end the process, as far as /proc shows.
pub(crate) fn handles_signal(pid: i32, signal: i32) -> bool {
    let bit = 1u64 << (signal - 1);
    // A process that has ended cannot be killed by the signal.
    let Some(status) = proc::status(pid) else {
        return true;
    };
    // A blocked signal is not sufficient: a new process has all signals blocked for a short time.
    (status.sigcgt | status.sigign) & bit != 0
        || waits_in_sigwait(pid, bit)
        || status.sigblk & bit != 0 && reads_by_signalfd(pid, bit)
}

/// True if the process reads this signal from a signalfd. `bit` is the signal's bit in a signal
/// mask.
fn reads_by_signalfd(pid: i32, bit: u64) -> bool {
    let masks = proc::signalfd_masks(pid);
    masks.into_iter().any(|mask| mask & bit != 0)
}

/// True if a thread of the process waits for this signal in `sigwait`. The awaited set is read from
/// the memory to which the system call refers. While a thread waits, the signal does not count as
/// blocked.
fn waits_in_sigwait(pid: i32, bit: u64) -> bool {
    let waited_for = |thread: Task| {
        let Ok(Syscall::Blocked {
            syscall_number: libc::SYS_rt_sigtimedwait,
            argument_registers: [at, ..],
            ..
        }) = thread.syscall()
        else {
            return None;
        };
        let mut set = [0; size_of::<u64>()];
        let memory = Process::new(thread.tid).and_then(|thread| thread.mem());
        memory.ok()?.read_exact_at(&mut set, at).ok()?;
        Some(u64::from_ne_bytes(set))
    };
    let threads = Process::new(pid).and_then(|process| process.tasks());
    let threads = threads.into_iter().flatten().flatten();
    threads.filter_map(waited_for).any(|set| set & bit != 0)
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

    fn start_python(code: &str) -> Program {
        Program(
            Command::new("python3")
                .args(["-c", code])
                .stdin(Stdio::null())
                .spawn()
                .expect("python3"),
        )
    }

    fn wait_until_handled(program: &Program, signal: Signal) {
        let until = Instant::now() + Duration::from_secs(60);
        while !handles_signal(program.0.id() as i32, signal as i32) {
            assert!(Instant::now() < until, "{signal}");
            sleep(Duration::from_millis(5));
        }
    }

    /// A signal that a program catches, ignores or waits for counts as handled.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn caught_ignored_and_awaited_signals_are_handled() {
        let catches = start_python(
            "import signal; signal.signal(signal.SIGUSR1, print)\nwhile 1: signal.pause()",
        );
        wait_until_handled(&catches, Signal::SIGUSR1);
        assert!(!handles_signal(
            catches.0.id() as i32,
            Signal::SIGUSR2 as i32
        ));
        let ignores = start_python(
            "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nwhile 1: signal.pause()",
        );
        wait_until_handled(&ignores, Signal::SIGUSR1);
        let waits = start_python(
            "import signal; s = {signal.SIGUSR1}; signal.pthread_sigmask(signal.SIG_BLOCK, s); signal.sigwait(s)",
        );
        wait_until_handled(&waits, Signal::SIGUSR1);
        assert!(!handles_signal(waits.0.id() as i32, Signal::SIGUSR2 as i32));
    }

    #[test]
    #[ignore = "system tier: needs python3"]
    fn signal_that_is_only_blocked_is_not_handled() {
        // /proc shows the signal mask of a process's first thread, but the test runs in another
        // thread. Therefore the test uses a separate process.
        let blocks = start_python(
            "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\nwhile 1: signal.pause()",
        );
        let (pid, bit) = (blocks.0.id() as i32, 1u64 << (Signal::SIGUSR1 as i32 - 1));
        let until = Instant::now() + Duration::from_secs(60);
        while proc::status(pid).is_none_or(|status| status.sigblk & bit == 0) {
            assert!(Instant::now() < until, "it never blocks it");
            sleep(Duration::from_millis(5));
        }
        assert!(!handles_signal(pid, Signal::SIGUSR1 as i32));
    }

    #[test]
    fn signalfd_counts_only_for_its_own_signals() {
        let mut set = SigSet::empty();
        set.add(Signal::SIGUSR1);
        let bit = 1u64 << (Signal::SIGUSR1 as i32 - 1);
        let own = std::process::id() as i32;
        assert!(!reads_by_signalfd(own, bit));
        let held = SignalFd::new(&set).expect("a descriptor");
        assert!(reads_by_signalfd(own, bit) && !reads_by_signalfd(own, bit << 1));
        drop(held);
        assert!(!reads_by_signalfd(own, bit));
    }
}
