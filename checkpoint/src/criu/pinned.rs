//! Threads of stopped processes that stay where they are while others of their process run: a library lets go of what leads out of a
//! process, and the program does not come to run for it.
//!
//! The kernel stops whole processes and whole control groups. Single threads it keeps only for a tracer.

use super::ptrace;
use super::relay;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long it may take to take hold of all of them. One that is just about to become another program can take for ever.
const BEGIN_ALLOWED: Duration = Duration::from_millis(20);
/// How often somebody looks whether one has ended: what is traced nobody else can reap.
const LOOK: Duration = Duration::from_millis(5);
/// How long they may take to come to the stop from which they are let go: others wait for that. The kernel lets go of the rest when
/// their tracer has ended.
const END_ALLOWED: Duration = Duration::from_millis(10);

/// Threads that do not run. Dropping it lets them go: those of stopped or frozen processes then stand still like these.
#[derive(Debug)]
pub struct Pinned {
    /// Nothing is ever said: its end is.
    over: Option<Sender<()>>,
    /// Traces them; only it can let them go. `None` if it was not through in time, and ends by itself.
    tracer: Option<JoinHandle<()>>,
}

impl Pinned {
    /// Takes hold of these threads, best of processes that stand still. One that cannot be traced will run with the others.
    ///
    /// # Errors
    /// There is no thread to trace them. Nothing is pinned.
    pub fn threads(tids: Vec<i32>) -> io::Result<Pinned> {
        let ((over, until), (begins, begun)) = (channel(), channel());
        let tracer = std::thread::Builder::new()
            .name("pins".into())
            .spawn(move || pin(tids, &begins, &until))?;
        let in_time = begun.recv_timeout(BEGIN_ALLOWED).is_ok();
        Ok(Pinned {
            over: Some(over),
            tracer: in_time.then_some(tracer),
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        drop(self.over.take());
        if let Some(tracer) = self.tracer.take() {
            tracer.join().expect("it does not panic");
        }
    }
}

fn pin(mut tids: Vec<i32>, begins: &Sender<()>, until: &Receiver<()>) {
    super::process::hurry_thread();
    // Who asked may have given up by the time that it is through with one of them.
    let is_over = || until.try_recv() == Err(TryRecvError::Disconnected);
    // Fails for one that has ended, and where others trace.
    tids.retain(|tid| {
        !is_over()
            && ptrace::seize(*tid)
                .and_then(|()| ptrace::interrupt(*tid))
                .is_ok()
    });
    // Who asked may have waited long enough.
    let _ = begins.send(());
    let has_ended = |tid: &i32| {
        !matches!(
            ptrace::hear(*tid),
            Ok(None | Some(ptrace::News::Stopped(_)))
        )
    };
    while until.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        // Then all of them are let go: whoever waits for its end is not to wait for the others.
        if tids.iter().any(has_ended) {
            break;
        }
    }
    relay::settle(&tids, END_ALLOWED);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Status;
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use std::process::{Child, Command};
    use std::time::Instant;

    const SOON: Duration = Duration::from_secs(20);

    /// A process that computes, and is stopped.
    fn stopped() -> Child {
        let child = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .expect("a shell");
        tell(&child, Signal::SIGSTOP);
        wait_for(&child, 'T');
        child
    }

    fn tell(child: &Child, signal: Signal) {
        kill(Pid::from_raw(child.id() as i32), signal).expect("it is there");
    }

    fn wait_for(child: &Child, state: char) {
        let until = Instant::now() + SOON;
        let is = || {
            Status::of(child.id() as i32)?
                .field("State")
                .map(|now| now.starts_with(state))
        };
        while is() != Some(true) {
            assert!(Instant::now() < until, "it does not come to {state}");
            std::thread::yield_now();
        }
    }

    fn end(mut child: Child) {
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }

    #[test]
    fn a_pinned_thread_does_not_run_when_its_process_is_continued_and_does_when_it_is_let_go() {
        let child = stopped();
        let pinned = Pinned::threads(vec![child.id() as i32]).expect("a thread");
        tell(&child, Signal::SIGCONT);
        wait_for(&child, 't');
        std::thread::sleep(Duration::from_millis(50));
        wait_for(&child, 't');
        drop(pinned);
        wait_for(&child, 'R');
        end(child);
    }

    #[test]
    fn a_pinned_thread_of_a_process_that_was_stopped_again_stays_stopped() {
        let child = stopped();
        for _ in 0..50 {
            let pinned = Pinned::threads(vec![child.id() as i32]).expect("a thread");
            tell(&child, Signal::SIGCONT);
            tell(&child, Signal::SIGSTOP);
            drop(pinned);
            wait_for(&child, 'T');
        }
        end(child);
    }

    #[test]
    fn a_pinned_process_can_be_killed_and_reaped() {
        let mut child = stopped();
        let _pinned = Pinned::threads(vec![child.id() as i32]).expect("a thread");
        child.kill().expect("it is there");
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&child.wait().expect("it ends")),
            Some(9)
        );
    }

    #[test]
    fn whoever_has_ended_or_is_traced_by_others_is_left_out() {
        let child = stopped();
        let tid = child.id() as i32;
        let first = Pinned::threads(vec![tid]).expect("a thread");
        drop(Pinned::threads(vec![tid, i32::MAX]).expect("a thread"));
        tell(&child, Signal::SIGCONT);
        wait_for(&child, 't');
        drop(first);
        wait_for(&child, 'R');
        end(child);
    }
}
