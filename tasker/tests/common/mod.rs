//! Simulates the daemon for a tasker under test: starts a tasker, sends orders, and waits for
//! replies with a deadline.
#![allow(dead_code, unreachable_pub)] // Each test file uses its own part.

pub mod migration_steps;

use checkpoint::proc;
use checkpoint::seal::SiteKeys;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use procfs::process::Process;
use sempa_proto::frame::{FrameDecoder, encode_control};
use sempa_proto::tasker::{
    EngineUnavailable, FreezerUnavailable, FromTasker, TaskStart, TaskerCapabilities, ToTasker,
};
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Time limit of every wait. It is long because the machine may be loaded.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Environment variable of a tasker that stops paused tasks by signals.
pub const FREEZER_OFF: (&str, &str) = ("SEMPA_FREEZER", "off");
/// Environments of a tasker that stops paused tasks by control groups, if it has the privileges,
/// and by signals.
pub const MECHANISMS: [&[(&str, &str)]; 2] = [&[], &[FREEZER_OFF]];

/// A tasker under test, with the daemon's end of its socket.
pub struct Tasker {
    pub child: Child,
    stream: Option<UnixStream>,
    decoder: FrameDecoder,
    received_messages: VecDeque<FromTasker>,
    /// Id of the user whose tasks the tasker runs; `None` for its own user.
    pub user: Option<u32>,
    pub capabilities: TaskerCapabilities,
}

impl Tasker {
    pub fn start() -> Self {
        Self::start_with_env(&[])
    }

    /// Starts a tasker with additional environment variables.
    pub fn start_with_env(env: &[(&str, &str)]) -> Self {
        Self::start_wrapped(&[], env)
    }

    /// Starts a tasker with one of [`MECHANISMS`], and asserts that it uses this mechanism.
    pub fn start_with_mechanism(env: &[(&str, &str)]) -> Self {
        let tasker = Self::start_with_env(env);
        let TaskerCapabilities {
            pid_namespaces,
            freezer,
            ..
        } = &tasker.capabilities;
        let must_freeze = *pid_namespaces && !env.contains(&FREEZER_OFF);
        assert_eq!(freezer.is_ok(), must_freeze, "cannot run here: {freezer:?}");
        tasker
    }

    /// Starts a tasker of root that runs the tasks of the user with the id `uid`, as the system
    /// service does.
    pub fn start_for_user(uid: u32) -> Self {
        Self::start_wrapped_for(Some(uid), &[], &[])
    }

    /// As [`Tasker::start_wrapped`], for the tasks of the user `user`; `None` is the user of this
    /// process.
    pub fn start_wrapped_for(user: Option<u32>, wrapper: &[&str], env: &[(&str, &str)]) -> Self {
        let Some(uid) = user else {
            return Self::start_wrapped(wrapper, env);
        };
        let key = site_key();
        let key_variable = ("SEMPA_SITE_KEY", key.to_str().expect("text"));
        let env = [env, &[key_variable]].concat();
        let mut tasker = Self::start_with_arguments(wrapper, &["--user", &uid.to_string()], &env);
        tasker.user = user;
        tasker
    }

    /// Starts a tasker through the wrapper command `wrapper`, which receives the tasker's command
    /// as its last arguments.
    pub fn start_wrapped(wrapper: &[&str], env: &[(&str, &str)]) -> Self {
        Self::start_with_arguments(wrapper, &[], env)
    }

    /// As [`Tasker::start_wrapped`]; the tasker has the additional arguments `arguments`.
    fn start_with_arguments(wrapper: &[&str], arguments: &[&str], env: &[(&str, &str)]) -> Self {
        let (daemon_end, tasker_end) = socketpair(
            AddressFamily::Unix,
            SockType::Stream,
            None,
            SockFlag::empty(),
        )
        .expect("pair");
        nix::fcntl::fcntl(
            &daemon_end,
            nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC),
        )
        .expect("cloexec");
        let command: Vec<&str> = wrapper
            .iter()
            .copied()
            .chain([env!("CARGO_BIN_EXE_pvm-tasker")])
            .collect();
        let child = Command::new(command[0])
            .args(&command[1..])
            .arg(tasker_end.as_raw_fd().to_string())
            .args(arguments)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .spawn()
            .expect("the tasker starts");
        drop(tasker_end);
        let stream = UnixStream::from(daemon_end);
        stream
            .set_read_timeout(Some(Duration::from_millis(50)))
            .expect("timeout");
        let empty_capabilities = TaskerCapabilities {
            pid_namespaces: false,
            engine_version: Err(EngineUnavailable(String::new())),
            freezer: Err(FreezerUnavailable(String::new())),
            missing_capabilities: Vec::new(),
        };
        let mut tasker = Self {
            child,
            stream: Some(stream),
            decoder: FrameDecoder::new(),
            received_messages: VecDeque::new(),
            user: None,
            capabilities: empty_capabilities,
        };
        match tasker.wait_for_message() {
            FromTasker::Ready(empty_capabilities) => tasker.capabilities = empty_capabilities,
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
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(message) = self.wait_briefly_for_message() {
                return message;
            }
            assert!(
                Instant::now() < deadline,
                "the tasker said nothing for {WAIT_TIMEOUT:?}"
            );
        }
    }

    /// Returns the next message; `None` if no message arrives within 50 ms.
    pub fn wait_briefly_for_message(&mut self) -> Option<FromTasker> {
        if let Some(message) = self.received_messages.pop_front() {
            return Some(message);
        }
        let mut bytes = [0u8; 65536];
        match self.stream.as_mut().expect("open").read(&mut bytes) {
            Ok(0) => panic!("the tasker closed its socket"),
            Ok(read_bytes) => self.decoder.push(&bytes[..read_bytes]),
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

    /// Returns the next message as [`Tasker::wait_briefly_for_message`]; the tasker's capabilities,
    /// which it sends when it has probed the engine, are skipped.
    pub fn wait_briefly_for_report(&mut self) -> Option<FromTasker> {
        self.wait_briefly_for_message()
            .filter(|message| !matches!(message, FromTasker::Ready(_)))
    }

    /// Waits for a message for which `pick` returns a value, and returns that value. Adds earlier
    /// messages to `earlier_messages`. Panics after [`WAIT_TIMEOUT`].
    pub fn wait_for_value<T>(
        &mut self,
        earlier_messages: &mut Vec<FromTasker>,
        pick: impl Fn(&FromTasker) -> Option<T>,
    ) -> T {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(message) = self.wait_briefly_for_message() {
                match pick(&message) {
                    Some(value) => return value,
                    None => earlier_messages.push(message),
                }
            }
            assert!(
                Instant::now() < deadline,
                "no such message within {WAIT_TIMEOUT:?}, but {:?}",
                without_output(earlier_messages)
            );
        }
    }

    /// Starts a program as a task, and waits until it has started. Returns the PID. Panics if the
    /// start fails.
    pub fn start_task_and_wait(&mut self, tid: Tid, path: &Path, args: &[&str]) -> i32 {
        self.send(ToTasker::Start(start_order(tid, path, args)));
        self.wait_for_value(&mut Vec::new(), |m| match m {
            FromTasker::Started { tid: t, pid, .. } if *t == tid => Some(*pid),
            FromTasker::StartFailed { reason: why, .. } => panic!("{why}"),
            _ => None,
        })
    }

    /// Appends the task's output to `output` until `is_complete` returns true for `output`. Panics
    /// after [`WAIT_TIMEOUT`].
    pub fn wait_for_output(
        &mut self,
        tid: Tid,
        output: &mut Vec<u8>,
        is_complete: impl Fn(&[u8]) -> bool,
    ) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !is_complete(output) {
            match self.wait_briefly_for_message() {
                Some(FromTasker::Output { tid: t, bytes }) if t == tid => output.extend(bytes),
                Some(FromTasker::Exited { status, .. }) => {
                    panic!(
                        "the task ended with {status}; its output: {}",
                        String::from_utf8_lossy(output)
                    )
                }
                _ => assert!(
                    Instant::now() < deadline,
                    "only {:?}",
                    String::from_utf8_lossy(output)
                ),
            }
        }
    }

    /// Waits until a task has exited. Returns its remaining output, its wait status and its
    /// resource usage.
    pub fn wait_for_exit(&mut self, tid: Tid) -> (Vec<u8>, i32, sempa_proto::migration::Usage) {
        let mut messages = Vec::new();
        let (status, usage) = self.wait_for_value(&mut messages, |m| match m {
            FromTasker::Exited {
                tid: t,
                status,
                usage,
            } if *t == tid => Some((*status, *usage)),
            _ => None,
        });
        let output = messages.into_iter().filter_map(|m| match m {
            FromTasker::Output { tid: t, bytes } if t == tid => Some(bytes),
            _ => None,
        });
        (output.flatten().collect(), status, usage)
    }

    /// Closes the socket and waits until the tasker has exited.
    pub fn stop_and_wait(mut self) {
        drop(self.stream.take());
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while self.child.try_wait().expect("wait").is_none() {
            assert!(
                Instant::now() < deadline,
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

/// Returns the path of a site key for the taskers of this test program.
fn site_key() -> PathBuf {
    static KEY: OnceLock<PathBuf> = OnceLock::new();
    let create = || {
        let name = format!("site-key-{}", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = std::fs::remove_file(&path);
        SiteKeys::create_file(&path).expect("a key");
        path
    };
    KEY.get_or_init(create).clone()
}

/// Creates a temporary directory whose owner is the user of this tasker's tasks.
pub fn user_dir(user: Option<u32>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("dir");
    std::os::unix::fs::chown(dir.path(), user, user).expect("root may do so");
    dir
}

pub fn tid(local_number: u32) -> Tid {
    Tid::for_task(HostId::MASTER, local_number).expect("in range")
}

pub fn start_order(tid: Tid, path: &Path, args: &[&str]) -> TaskStart {
    let name = path.to_str().expect("text");
    let argv = std::iter::once(name)
        .chain(args.iter().copied())
        .map(|a| a.as_bytes().to_vec())
        .collect();
    let env = vec![b"PATH=/usr/bin:/bin".to_vec(), b"MARK=here".to_vec()];
    TaskStart {
        tid,
        path: path.into(),
        argv,
        env,
        working_dir: "/".into(),
        pinned: false,
    }
}

pub fn shell_path() -> PathBuf {
    "/bin/sh".into()
}

/// True if the kernel permits creating namespaces. Root may create them, except in an unprivileged
/// container.
pub fn can_make_namespaces() -> bool {
    Command::new("unshare")
        .args(["--pid", "--fork", "true"])
        .output()
        .is_ok_and(|output| output.status.success())
}

/// Returns the processor time of a process in the kernel's clock ticks.
pub fn cpu_ticks(pid: i32) -> u64 {
    let stat = proc::stat(pid).expect("it is there");
    stat.utime + stat.stime
}

/// Waits until a process uses its processor.
pub fn wait_until_runs(pid: i32) {
    let previous_ticks = cpu_ticks(pid);
    wait_until("the process runs", || cpu_ticks(pid) > previous_ticks);
}

/// True if a process with this PID exists and has not ended (a zombie has ended).
pub fn is_alive(pid: i32) -> bool {
    proc::stat(pid).is_some_and(|stat| !matches!(stat.state, 'Z' | 'X'))
}

/// True if the process `pid` descends from the process `ancestor`.
pub fn is_descendant(pid: i32, ancestor: i32) -> bool {
    std::iter::successors(Some(pid), |pid| proc::stat(*pid).map(|stat| stat.ppid))
        .take_while(|pid| *pid > 1)
        .any(|pid| pid == ancestor)
}

fn without_output(messages: &[FromTasker]) -> Vec<&FromTasker> {
    messages
        .iter()
        .filter(|m| !matches!(m, FromTasker::Output { .. }))
        .collect()
}

/// Waits until `condition` returns true. Panics with `expectation` after [`WAIT_TIMEOUT`].
pub fn wait_until(expectation: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !condition() {
        assert!(
            Instant::now() < deadline,
            "not within {WAIT_TIMEOUT:?}: {expectation}"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the PIDs of the processes whose command line contains `text`.
pub fn processes_with_text(text: &str) -> Vec<i32> {
    proc::process_ids()
        .expect("the kernel lists them")
        .into_iter()
        .filter(|pid| {
            let line = Process::new(*pid).and_then(|process| process.cmdline());
            let line = line.unwrap_or_default().join(" ");
            *pid != std::process::id() as i32 && line.contains(text) && is_alive(*pid)
        })
        .collect()
}

pub fn migration_id(number: u64) -> MigrationId {
    MigrationId(number)
}

/// Pauses task 1 and waits until the tasker calls the task paused. Appends other messages to
/// `messages`.
pub fn pause_and_wait(tasker: &mut Tasker, run_time: Micros, messages: &mut Vec<FromTasker>) {
    tasker.send(ToTasker::Pause {
        tid: tid(1),
        run_time,
    });
    wait_until_paused(tasker, messages);
}

/// Waits until the tasker calls task 1 paused.
pub fn wait_until_paused(tasker: &mut Tasker, messages: &mut Vec<FromTasker>) {
    tasker.wait_for_value(messages, |m| {
        matches!(m, FromTasker::Paused { tid: t } if *t == tid(1)).then_some(())
    });
}
