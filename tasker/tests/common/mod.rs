//! The daemon's end of the tasker's socket: starts a tasker, sends orders, and waits for answers
//! with a deadline.
#![allow(dead_code, unreachable_pub)] // Each test file uses its own part.

pub mod moving;

use checkpoint::proc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use procfs::process::Process;
use sempa_proto::frame::{FrameDecoder, encode_control};
use sempa_proto::tasker::{FromTasker, StartTask, TaskerCapabilities, ToTasker};
use sempa_proto::{HostId, MigrationId, Tid};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Deadline of every wait. It is long because the machine may be loaded.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// A tasker under test.
pub struct Tasker {
    pub child: Child,
    stream: Option<UnixStream>,
    decoder: FrameDecoder,
    received_messages: VecDeque<FromTasker>,
    pub capabilities: TaskerCapabilities,
}

impl Tasker {
    pub fn start() -> Tasker {
        Tasker::start_with_env(&[])
    }

    /// Starts a tasker with additional environment variables.
    pub fn start_with_env(env: &[(&str, &str)]) -> Tasker {
        Tasker::start_wrapped(&[], env)
    }

    /// Starts a tasker through the wrapper program `by`, which receives the tasker's command as its
    /// last arguments.
    pub fn start_wrapped(by: &[&str], env: &[(&str, &str)]) -> Tasker {
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::Stream,
            None,
            SockFlag::empty(),
        )
        .expect("pair");
        nix::fcntl::fcntl(
            &ours,
            nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC),
        )
        .expect("cloexec");
        let words: Vec<&str> = by
            .iter()
            .copied()
            .chain([env!("CARGO_BIN_EXE_pvm-tasker")])
            .collect();
        let child = Command::new(words[0])
            .args(&words[1..])
            .arg(theirs.as_raw_fd().to_string())
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .spawn()
            .expect("the tasker starts");
        drop(theirs);
        let stream = UnixStream::from(ours);
        stream
            .set_read_timeout(Some(Duration::from_millis(50)))
            .expect("timeout");
        let ready = TaskerCapabilities {
            pid_namespaces: false,
            engine: Err(String::new()),
            freezer: Err(String::new()),
        };
        let mut tasker = Tasker {
            child,
            stream: Some(stream),
            decoder: FrameDecoder::new(),
            received_messages: VecDeque::new(),
            capabilities: ready,
        };
        match tasker.wait_for_message() {
            FromTasker::Ready(ready) => tasker.capabilities = ready,
            other => panic!("the first message is {other:?}"),
        }
        tasker
    }

    pub fn send(&mut self, order: ToTasker) {
        let frame = encode_control(&order).expect("an order fits");
        self.stream
            .as_mut()
            .expect("open")
            .write_all(&frame)
            .expect("the tasker reads");
    }

    /// Waits for the next message and returns it.
    pub fn wait_for_message(&mut self) -> FromTasker {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(message) = self.poll() {
                return message;
            }
            assert!(
                Instant::now() < until,
                "the tasker said nothing for {WAIT_TIMEOUT:?}"
            );
        }
    }

    /// Returns the next message if one arrives within 50 ms.
    pub fn poll(&mut self) -> Option<FromTasker> {
        if let Some(message) = self.received_messages.pop_front() {
            return Some(message);
        }
        let mut bytes = [0u8; 65536];
        match self.stream.as_mut().expect("open").read(&mut bytes) {
            Ok(0) => panic!("the tasker closed its socket"),
            Ok(read) => self.decoder.push(&bytes[..read]),
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) => {}
            Err(e) => panic!("reading from the tasker: {e}"),
        }
        while let Some(frame) = self.decoder.next_frame().expect("frames") {
            self.received_messages
                .push_back(frame.decode_control().expect("a message"));
        }
        self.received_messages.pop_front()
    }

    /// Waits for a message that `pick` accepts, and returns the value of `pick`. Adds earlier
    /// messages to `rest`.
    pub fn wait_for<T>(
        &mut self,
        rest: &mut Vec<FromTasker>,
        pick: impl Fn(&FromTasker) -> Option<T>,
    ) -> T {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(message) = self.poll() {
                match pick(&message) {
                    Some(picked) => return picked,
                    None => rest.push(message),
                }
            }
            assert!(
                Instant::now() < until,
                "no such message within {WAIT_TIMEOUT:?}, but {:?}",
                without_output(rest)
            );
        }
    }

    /// Starts a program as a task and returns its PID.
    pub fn run(&mut self, tid: Tid, path: &Path, args: &[&str]) -> i32 {
        self.send(ToTasker::Start(start_order(tid, path, args)));
        self.wait_for(&mut Vec::new(), |m| match m {
            FromTasker::Started { tid: t, pid } if *t == tid => Some(*pid),
            FromTasker::StartFailed { why, .. } => panic!("{why}"),
            _ => None,
        })
    }

    /// Appends the task's output to `so_far` until `enough` returns true.
    pub fn wait_for_output(
        &mut self,
        tid: Tid,
        so_far: &mut Vec<u8>,
        enough: impl Fn(&[u8]) -> bool,
    ) {
        let until = Instant::now() + WAIT_TIMEOUT;
        while !enough(so_far) {
            match self.poll() {
                Some(FromTasker::Output { tid: t, bytes }) if t == tid => so_far.extend(bytes),
                Some(FromTasker::Exited { status, .. }) => {
                    panic!(
                        "the task ended with {status}; its output: {}",
                        String::from_utf8_lossy(so_far)
                    )
                }
                _ => assert!(
                    Instant::now() < until,
                    "only {:?}",
                    String::from_utf8_lossy(so_far)
                ),
            }
        }
    }

    /// Waits until a task has exited. Returns its remaining output, its wait status and its
    /// resource usage.
    pub fn wait_for_exit(&mut self, tid: Tid) -> (Vec<u8>, i32, sempa_proto::migration::Usage) {
        let mut rest = Vec::new();
        let (status, used) = self.wait_for(&mut rest, |m| match m {
            FromTasker::Exited {
                tid: t,
                status,
                used,
            } if *t == tid => Some((*status, *used)),
            _ => None,
        });
        let output = rest.into_iter().filter_map(|m| match m {
            FromTasker::Output { tid: t, bytes } if t == tid => Some(bytes),
            _ => None,
        });
        (output.flatten().collect(), status, used)
    }

    /// Closes the socket and waits until the tasker has exited.
    pub fn stop(mut self) {
        drop(self.stream.take());
        let until = Instant::now() + WAIT_TIMEOUT;
        while self.child.try_wait().expect("wait").is_none() {
            assert!(
                Instant::now() < until,
                "the tasker goes on without its daemon"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Tasker {
    fn drop(&mut self) {
        drop(self.stream.take());
        if std::thread::panicking() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

pub fn tid(local: u32) -> Tid {
    Tid::task(HostId::MASTER, local).expect("in range")
}

pub fn start_order(tid: Tid, path: &Path, args: &[&str]) -> StartTask {
    let name = path.to_str().expect("text");
    let argv = std::iter::once(name)
        .chain(args.iter().copied())
        .map(|a| a.as_bytes().to_vec())
        .collect();
    let env = vec![b"PATH=/usr/bin:/bin".to_vec(), b"MARK=here".to_vec()];
    StartTask {
        tid,
        path: path.into(),
        argv,
        env,
        working_dir: "/".into(),
        pinned: false,
    }
}

pub fn sh() -> PathBuf {
    "/bin/sh".into()
}

/// True if the kernel permits creating namespaces. Root may create them, except in an unprivileged
/// container.
pub fn can_make_namespaces() -> bool {
    Command::new("unshare")
        .args(["--pid", "--fork", "true"])
        .output()
        .is_ok_and(|done| done.status.success())
}

/// True while a process with this pid exists and is no zombie.
pub fn is_alive(pid: i32) -> bool {
    proc::stat(pid).is_some_and(|stat| !matches!(stat.state, 'Z' | 'X'))
}

fn without_output(messages: &[FromTasker]) -> Vec<&FromTasker> {
    messages
        .iter()
        .filter(|m| !matches!(m, FromTasker::Output { .. }))
        .collect()
}

/// Waits until `condition` returns true. Panics at the deadline.
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + WAIT_TIMEOUT;
    while !condition() {
        assert!(
            Instant::now() < until,
            "not within {WAIT_TIMEOUT:?}: {what}"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the processes whose command line contains this text.
pub fn processes_with(text: &str) -> Vec<i32> {
    proc::process_ids()
        .into_iter()
        .filter(|pid| {
            let line = Process::new(*pid).and_then(|process| process.cmdline());
            let line = line.unwrap_or_default().join(" ");
            *pid != std::process::id() as i32 && line.contains(text) && is_alive(*pid)
        })
        .collect()
}

pub fn migration(number: u64) -> MigrationId {
    MigrationId(number)
}
