//! One task: how it is started, what is known of it, how its output is read.

use crate::attempt::Attempt;
use crate::freezer::ControlGroup;
use crate::hold::Hold;
use crate::namespace::Namespace;
use crate::stop::{self, Crowd};
use crate::sys::{
    self, Child, ExecPlan, Inherited, NotStarted, Program, Stage, StageError, StartGuard,
};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use sempa_proto::engine::Engine;
use sempa_proto::migration::Usage;
use sempa_proto::tasker::{OUTPUT_CHUNK_BYTES_MAX, Redirection, StartTask};
use sempa_proto::{Micros, MigrationId, Tid};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::time::{Duration, Instant};

/// Chunks read from one task before others get their turn.
const CHUNKS_AT_ONCE_MAX: usize = 16;
/// Signals kept for a task while it is stopped for a move; more are dropped, as the kernel merges equal ones too.
pub(crate) const HELD_SIGNALS_MAX: usize = 64;
/// How long the system may take to begin a program (its file may lie on a slow file system).
pub(crate) const EXEC_ALLOWED: Duration = Duration::from_secs(10);

/// What is being done with a task.
#[derive(Debug)]
pub(crate) enum Phase {
    /// It runs.
    Running,
    /// It was told to stop.
    Stopping {
        /// The move.
        migration: MigrationId,
        /// When to give up.
        until: Instant,
        /// Processes that have been sent SIGSTOP.
        told: BTreeSet<i32>,
    },
    /// All its processes are stopped.
    Stopped {
        /// The move.
        migration: MigrationId,
    },
    /// The engine writes its images.
    Dumping {
        /// The move.
        migration: MigrationId,
        /// Number of the worker that drives the engine, or waits before it is started again.
        worker: u64,
        /// Which attempt it is.
        attempt: Attempt,
        /// The move was called off; continue the task when the worker is through.
        called_off: bool,
    },
    /// Its images are written, and its memory is handed out.
    Serving {
        /// The move.
        migration: MigrationId,
        /// Number of the worker that waits for the engine.
        worker: u64,
        /// The move was called off; continue the task when the worker is through.
        called_off: bool,
    },
}

/// A task whose process exists.
#[derive(Debug)]
pub(crate) struct Task {
    /// Its id.
    pub(crate) tid: Tid,
    /// Its process.
    pub(crate) process: Child,
    /// Its namespace; `None` when the tasker may not make any.
    pub(crate) namespace: Option<Namespace>,
    /// Where its output comes out.
    pub(crate) output: Output,
    /// What it used on other hosts.
    pub(crate) used_before: Usage,
    /// What is being done with it.
    pub(crate) phase: Phase,
    /// Whether it stands still for the owner, apart from moves.
    pub(crate) hold: Hold,
    /// Processes that were stopped already when the others were stopped; they are not continued.
    pub(crate) stopped_before: Vec<i32>,
    /// It was asked to end, so that its program can be started again.
    pub(crate) ending: Option<Engine>,
    /// What the next stop is to write into it.
    pub(crate) redirection: Option<Redirection>,
    /// Signals that came while it was stopped.
    pub(crate) held_signals: Vec<i32>,
}

impl Task {
    /// Sends a signal to the task's process.
    pub(crate) fn send(&self, signal: i32) {
        // The pid is ours until we reap it; an unknown signal number or an ended process is nobody's fault here.
        let _ = sys::kill_raw(self.process.pid, signal);
    }

    /// Its processes.
    pub(crate) fn crowd(&self) -> Crowd<'_> {
        self.namespace
            .as_ref()
            .map_or(Crowd::Group(self.process.pid), Crowd::Namespace)
    }

    /// Numbers of its processes, found in the fastest way.
    pub(crate) fn members(&self) -> Vec<i32> {
        self.namespace
            .as_ref()
            .map_or_else(|| self.crowd().pids(), Namespace::members)
    }

    /// Lets a stopped task go on and delivers what came for it meanwhile, unless it is held.
    pub(crate) fn go_on(&mut self) {
        self.phase = Phase::Running;
        if !self.hold.is_free() {
            return;
        }
        self.let_run();
        self.stopped_before.clear();
        for signal in std::mem::take(&mut self.held_signals) {
            self.send(signal);
        }
    }

    /// The control group that all its processes are in, if there is one.
    pub(crate) fn group(&self) -> Option<&ControlGroup> {
        self.namespace.as_ref()?.group()
    }

    /// The control group that keeps it from running, if that is what does.
    pub(crate) fn frozen(&self) -> Option<&ControlGroup> {
        self.group().filter(|group| group.is_frozen())
    }

    /// Lets its processes go on, but those who had been stopped before.
    pub(crate) fn let_run(&self) {
        match self.frozen() {
            Some(group) => group.thaw(),
            None => stop::continue_all(&self.crowd(), &self.stopped_before),
        }
    }

    /// Ends every process of the task that can be reached: the whole namespace, or else its process group.
    pub(crate) fn kill(&self) {
        match &self.namespace {
            Some(namespace) => namespace.kill(),
            None => {
                let _ = sys::kill_raw(-self.process.pid, libc::SIGKILL);
            }
        }
        sys::kill_by(self.process.pidfd.as_fd());
    }

    /// As [`Task::kill`]; when it returns nothing of the task gets another instruction done, however long its end takes.
    pub(crate) fn kill_all(&self) {
        for pid in self.crowd().pids() {
            // It may have ended.
            let _ = sys::kill_raw(pid, libc::SIGKILL);
        }
        self.kill();
    }

    /// True when its first process has ended; it was not reaped.
    pub(crate) fn has_ended(&self) -> bool {
        stop::has_ended(self.process.pid)
    }

    /// Stops whatever of it an engine that died has left running.
    pub(crate) fn be_still(&self) {
        stop::all_still(&self.crowd(), &mut BTreeSet::new());
    }
}

/// The reading end of a task's standard output and error.
#[derive(Debug)]
pub(crate) struct Output {
    pipe: Option<File>,
    inode: u64,
}

impl Output {
    /// A pipe: the reading end, and the end for the task.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub(crate) fn new() -> io::Result<(Output, OwnedFd)> {
        let (ours, theirs) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let pipe = File::from(ours);
        let inode = pipe.metadata()?.st_ino();
        Ok((
            Output {
                pipe: Some(pipe),
                inode,
            },
            theirs,
        ))
    }

    /// Inode number of the pipe, which names it in images.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// For polling; `None` when nobody can write any more.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Reads some of what is there.
    pub(crate) fn read(&mut self, mut take: impl FnMut(Vec<u8>)) {
        for _ in 0..CHUNKS_AT_ONCE_MAX {
            match self.chunk(OUTPUT_CHUNK_BYTES_MAX) {
                Some(bytes) => take(bytes),
                None => return,
            }
        }
    }

    /// Reads what lies in the pipe now, but not what a process that goes on writing adds meanwhile.
    pub(crate) fn drain(&mut self, mut take: impl FnMut(Vec<u8>)) {
        let mut left = self.fd().map_or(0, sys::bytes_in_pipe);
        while left > 0 {
            let Some(bytes) = self.chunk(left.min(OUTPUT_CHUNK_BYTES_MAX)) else {
                return;
            };
            left -= bytes.len();
            take(bytes);
        }
    }

    fn chunk(&mut self, bytes_max: usize) -> Option<Vec<u8>> {
        let pipe = self.pipe.as_ref()?;
        let mut bytes = vec![0u8; bytes_max];
        loop {
            match nix::unistd::read(pipe, &mut bytes) {
                Ok(0) => {
                    self.pipe = None;
                    return None;
                }
                Ok(read) => {
                    bytes.truncate(read);
                    return Some(bytes);
                }
                Err(Errno::EINTR) => {}
                Err(_) => return None,
            }
        }
    }
}

/// Starts a program as a task, in this namespace if there is one.
///
/// # Errors
/// One sentence: what was tried and what happened. Nothing is left of the attempt.
pub(crate) fn start(
    order: &StartTask,
    namespace: Option<Namespace>,
    inherited: &Inherited,
    guard: &StartGuard,
) -> Result<Task, String> {
    let (process, output) = make(
        order,
        inherited,
        namespace.is_none(),
        |plan| match &namespace {
            Some(namespace) => namespace.start(&plan, guard),
            None => sys::start_program(&plan, guard, None),
        },
    )?;
    Ok(Task {
        tid: order.tid,
        process,
        namespace,
        output,
        used_before: Usage::default(),
        phase: Phase::Running,
        hold: Hold::Free,
        stopped_before: Vec::new(),
        ending: None,
        redirection: None,
        held_signals: Vec::new(),
    })
}

/// Starts a process that waits, standing still, before it becomes this program, in this namespace if there is one; and where its
/// output will come out.
///
/// # Errors
/// As [`start`].
pub(crate) fn build(
    order: &StartTask,
    namespace: Option<&Namespace>,
    inherited: &Inherited,
) -> Result<(Child, Output), String> {
    make(order, inherited, namespace.is_none(), |plan| {
        let plan = plan.waiting();
        match namespace {
            Some(namespace) => namespace.start_waiting(&plan, EXEC_ALLOWED),
            None => sys::start_waiting(&plan, EXEC_ALLOWED, None),
        }
    })
}

/// Makes the process of a program, alone in a process group or not, and where its output will come out.
fn make(
    order: &StartTask,
    inherited: &Inherited,
    own_group: bool,
    start: impl FnOnce(ExecPlan<'_>) -> Result<Child, NotStarted>,
) -> Result<(Child, Output), String> {
    let path = order.path.display();
    let failed =
        |what: &str, error: &dyn std::fmt::Display| format!("cannot start {path}: {what}: {error}");
    let program = Program::new(&order.path, &order.dir, &order.argv, &order.env)
        .map_err(|why| format!("cannot start {path}: {why}"))?;
    let stdin = File::open("/dev/null").map_err(|e| failed("/dev/null", &e))?;
    let (output, theirs) = Output::new().map_err(|e| failed("no pipe for its output", &e))?;
    let made = start(ExecPlan::new(
        &program,
        stdin.as_fd(),
        theirs.as_fd(),
        inherited,
        own_group,
    ));
    // The sweep for unknown children reaps what has failed; nothing here waits for a file system that hangs.
    Ok((made.map_err(|why| explain(order, why))?, output))
}

fn explain(order: &StartTask, why: NotStarted) -> String {
    let path = order.path.display();
    let (stage, errno) = match why {
        NotStarted::NoProcess(error) => {
            return format!("cannot start {path}: no new process: {error}");
        }
        NotStarted::TooLate => {
            return format!(
                "cannot start {path}: the system did not begin it within {} s",
                EXEC_ALLOWED.as_secs()
            );
        }
        NotStarted::Failed(StageError { stage, errno }) => (stage, errno.desc()),
    };
    match stage {
        Stage::Stdio => format!("cannot start {path}: its standard descriptors: {errno}"),
        Stage::Dir => format!(
            "cannot start {path}: working directory {}: {errno}",
            order.dir.display()
        ),
        Stage::Exec | Stage::Access => format!("cannot start {path}: {errno}"),
    }
}

/// The span that a wait for stopping gets, in the words of a failure.
pub(crate) fn micros(span: std::time::Duration) -> Micros {
    Micros(u64::try_from(span.as_micros()).unwrap_or(u64::MAX))
}
