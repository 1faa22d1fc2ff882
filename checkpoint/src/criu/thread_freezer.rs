//! Freezes single threads of a process, so that the library's threads can quiesce while the
//! program's threads do not run.
//!
//! The kernel stops only whole processes (signals) or whole control groups (freezer). Only a tracer
//! can stop a single thread.

use super::ptrace;
use super::ptrace_relay;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Timeout for attaching to all threads. A thread in the middle of an exec may never stop.
const ATTACH_ALL_TIMEOUT: Duration = Duration::from_millis(20);
/// Interval of checks whether a frozen thread has exited. Only the tracer detects the exit, and the
/// parent cannot reap a thread that is traced.
const EXIT_CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// Timeout for all threads to reach a stop from which they can be detached; bounds the delay of the
/// caller. Threads that do not stop before the timeout are detached by the kernel when the tracer
/// ends.
const DETACH_TIMEOUT: Duration = Duration::from_millis(10);

/// Frozen threads. Dropping this value lets the threads run again. Threads of processes that were
/// stopped or frozen in the meantime remain stopped.
#[derive(Debug)]
pub struct FrozenThreads {
    /// Closing this channel orders the tracer to detach. No message is sent on it.
    release_sender: Option<Sender<()>>,
    /// The tracer thread, which alone can detach. `None` if attaching was too slow; then the tracer
    /// ends without being joined.
    tracer_thread: Option<JoinHandle<()>>,
}

impl FrozenThreads {
    /// Freezes these threads, preferably of stopped processes. A thread that cannot be traced is
    /// not frozen.
    ///
    /// # Errors
    /// No thread is available for tracing. Nothing is frozen.
    pub fn freeze(tids: Vec<i32>) -> io::Result<Self> {
        let ((release_sender, release_receiver), (attached_sender, attached_receiver)) =
            (channel(), channel());
        let tracer = std::thread::Builder::new()
            .name("pins".into())
            .spawn(move || run_tracer(tids, &attached_sender, &release_receiver))?;
        let is_attached = attached_receiver.recv_timeout(ATTACH_ALL_TIMEOUT).is_ok();
        Ok(Self {
            release_sender: Some(release_sender),
            tracer_thread: is_attached.then_some(tracer),
        })
    }
}

impl Drop for FrozenThreads {
    fn drop(&mut self) {
        drop(self.release_sender.take());
        if let Some(tracer) = self.tracer_thread.take() {
            tracer.join().expect("it does not panic");
        }
    }
}

fn run_tracer(mut tids: Vec<i32>, attached_sender: &Sender<()>, release_receiver: &Receiver<()>) {
    super::process::raise_thread_priority();
    // The caller may have stopped waiting while a thread was attached.
    let is_released = || release_receiver.try_recv() == Err(TryRecvError::Disconnected);
    // Fails for threads that have exited or have another tracer.
    tids.retain(|tid| {
        !is_released()
            && ptrace::seize(*tid)
                .and_then(|()| ptrace::interrupt(*tid))
                .is_ok()
    });
    // Fails if the caller has stopped waiting.
    let _ = attached_sender.send(());
    let has_ended = |tid: &i32| {
        !matches!(
            ptrace::poll_event(*tid),
            Ok(None | Some(ptrace::ThreadEvent::Stopped(_)))
        )
    };
    while release_receiver.recv_timeout(EXIT_CHECK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        // Detach all threads, so that the parent of the exited thread can reap it.
        if tids.iter().any(has_ended) {
            break;
        }
    }
    ptrace_relay::stop_and_detach(&tids, DETACH_TIMEOUT);
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use std::process::{Child, Command};
    use std::time::Instant;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    /// Starts a process that computes without pause, and stops it.
    fn start_stopped_process() -> Child {
        let child = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .expect("a shell");
        send_signal(&child, Signal::SIGSTOP);
        wait_for_state(&child, 'T');
        child
    }

    fn send_signal(child: &Child, signal: Signal) {
        kill(Pid::from_raw(child.id() as i32), signal).expect("it is there");
    }

    fn wait_for_state(child: &Child, state: char) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        let has_state =
            || crate::proc::stat(child.id() as i32).is_some_and(|stat| stat.state == state);
        while !has_state() {
            assert!(Instant::now() < deadline, "it does not come to {state}");
            std::thread::yield_now();
        }
    }

    fn kill_and_reap(mut child: Child) {
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }

    /// A frozen thread does not run when its process is continued, and runs when it is no longer
    /// frozen.
    #[test]
    fn frozen_thread_runs_only_after_release() {
        let child = start_stopped_process();
        let frozen_threads = FrozenThreads::freeze(vec![child.id() as i32]).expect("a thread");
        send_signal(&child, Signal::SIGCONT);
        wait_for_state(&child, 't');
        std::thread::sleep(Duration::from_millis(50));
        wait_for_state(&child, 't');
        drop(frozen_threads);
        wait_for_state(&child, 'R');
        kill_and_reap(child);
    }

    /// A frozen thread whose process was stopped in the meantime remains stopped when it is no
    /// longer frozen.
    #[test]
    fn released_thread_of_stopped_process_remains_stopped() {
        let child = start_stopped_process();
        for _ in 0..50 {
            let frozen_threads = FrozenThreads::freeze(vec![child.id() as i32]).expect("a thread");
            send_signal(&child, Signal::SIGCONT);
            send_signal(&child, Signal::SIGSTOP);
            drop(frozen_threads);
            wait_for_state(&child, 'T');
        }
        kill_and_reap(child);
    }

    #[test]
    fn frozen_process_can_be_killed_and_reaped() {
        let mut child = start_stopped_process();
        let _frozen_threads = FrozenThreads::freeze(vec![child.id() as i32]).expect("a thread");
        child.kill().expect("it is there");
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&child.wait().expect("it ends")),
            Some(9)
        );
    }

    /// Threads that have exited or have another tracer are skipped.
    #[test]
    fn exited_and_traced_threads_are_skipped() {
        let child = start_stopped_process();
        let tid = child.id() as i32;
        let first_freeze = FrozenThreads::freeze(vec![tid]).expect("a thread");
        drop(FrozenThreads::freeze(vec![tid, i32::MAX]).expect("a thread"));
        send_signal(&child, Signal::SIGCONT);
        wait_for_state(&child, 't');
        drop(first_freeze);
        wait_for_state(&child, 'R');
        kill_and_reap(child);
    }
}
