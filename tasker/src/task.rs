//! One task: how it is started, its state, and how its output is read.

use crate::dump_attempt::DumpAttempt;
use crate::freezer::ControlGroup;
use crate::namespace::Namespace;
use crate::pause::Pause;
use crate::stop::{self, TaskProcesses};
use crate::sys::{
    self, Child, ExecError, ExecPlan, ExecStage, InheritedState, Program, StartError, StartGuard,
};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use sempa_proto::engine::Engine;
use sempa_proto::migration::Usage;
use sempa_proto::tasker::{MemoryWrite, OUTPUT_CHUNK_BYTES_MAX, StartTask};
use sempa_proto::{Micros, MigrationId, Tid};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::time::{Duration, Instant};

/// Most chunks read from one task before other tasks are served.
const CHUNKS_PER_READ_MAX: usize = 16;
/// Most signals kept for a task that is stopped for a migration; more are dropped. The kernel, too,
/// merges equal pending signals.
pub(crate) const KEPT_SIGNALS_MAX: usize = 64;
/// Time limit for the exec of a program, whose file may be on a slow file system.
pub(crate) const EXEC_TIMEOUT: Duration = Duration::from_secs(10);

/// The migration step that a task is in.
#[derive(Debug)]
pub(crate) enum TaskPhase {
    /// No migration step is in progress.
    Running,
    /// The task was ordered to stop.
    Stopping {
        migration: MigrationId,
        deadline: Instant,
        /// Processes that got SIGSTOP.
        signalled: BTreeSet<i32>,
    },
    /// All its processes are stopped.
    Stopped { migration: MigrationId },
    /// The engine writes its images.
    Dumping {
        migration: MigrationId,
        /// Number of the worker that drives the engine, or waits before a retry.
        worker: u64,
        /// The current attempt, with its retry state.
        attempt: DumpAttempt,
        /// The migration was aborted; continue the task when the worker has finished.
        aborted: bool,
    },
    /// Its images are written, and its memory is being served.
    Serving {
        migration: MigrationId,
        /// Number of the worker that waits for the engine.
        worker: u64,
        /// The migration was aborted; continue the task when the worker has finished.
        aborted: bool,
    },
}

/// A task whose process exists.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) tid: Tid,
    /// The task's first process.
    pub(crate) process: Child,
    /// `None` if the tasker may not create namespaces.
    pub(crate) namespace: Option<Namespace>,
    pub(crate) output: Output,
    /// Resources that it used on other hosts.
    pub(crate) used_before: Usage,
    pub(crate) phase: TaskPhase,
    /// Whether it is paused, apart from migrations.
    pub(crate) pause: Pause,
    /// Processes that had been stopped before the others were; they are not continued.
    pub(crate) stopped_before: Vec<i32>,
    /// Set if the task was asked to exit so that its program can be restarted.
    pub(crate) exit_requested_for: Option<Engine>,
    /// Data that the next stop writes into the task.
    pub(crate) redirection: Option<MemoryWrite>,
    /// Signals that arrived while it was stopped.
    pub(crate) kept_signals: Vec<i32>,
}

impl Task {
    /// Sends a signal to the task's first process.
    pub(crate) fn send(&self, signal: i32) {
        // The pid stays valid until we reap it. An invalid signal number or an ended process is not
        // an error here.
        let _ = sys::kill_raw(self.process.pid, signal);
    }

    pub(crate) fn processes(&self) -> TaskProcesses<'_> {
        self.namespace.as_ref().map_or(
            TaskProcesses::Group(self.process.pid),
            TaskProcesses::Namespace,
        )
    }

    /// Returns the ids of its processes, by the fastest means.
    pub(crate) fn members(&self) -> Vec<i32> {
        self.namespace
            .as_ref()
            .map_or_else(|| self.processes().pids(), Namespace::members)
    }

    /// Continues a stopped task and delivers the kept signals, unless it is paused.
    pub(crate) fn continue_running(&mut self) {
        self.phase = TaskPhase::Running;
        if !self.pause.is_not_paused() {
            return;
        }
        self.continue_processes();
        self.stopped_before.clear();
        for signal in std::mem::take(&mut self.kept_signals) {
            self.send(signal);
        }
    }

    /// Returns the control group if all its processes are in it.
    pub(crate) fn group(&self) -> Option<&ControlGroup> {
        self.namespace.as_ref()?.group()
    }

    /// Returns the control group if it is frozen.
    pub(crate) fn frozen_group(&self) -> Option<&ControlGroup> {
        self.group().filter(|group| group.is_frozen())
    }

    /// Continues its processes, except those that had been stopped before.
    pub(crate) fn continue_processes(&self) {
        match self.frozen_group() {
            Some(group) => group.thaw(),
            None => stop::continue_all(&self.processes(), &self.stopped_before),
        }
    }

    /// Kills all processes of the task that can be reached: the namespace, or else the process
    /// group.
    pub(crate) fn kill(&self) {
        match &self.namespace {
            Some(namespace) => namespace.kill(),
            None => {
                let _ = sys::kill_raw(-self.process.pid, libc::SIGKILL);
            }
        }
        sys::kill_pidfd(self.process.pidfd.as_fd());
    }

    /// As [`Task::kill`], but no process of the task executes another instruction after this
    /// returns, however long its end takes.
    pub(crate) fn kill_all(&self) {
        for pid in self.processes().pids() {
            // Fails if the process has ended.
            let _ = sys::kill_raw(pid, libc::SIGKILL);
        }
        self.kill();
    }

    /// True if its first process has ended but was not reaped.
    pub(crate) fn has_ended(&self) -> bool {
        stop::has_ended(self.process.pid)
    }

    /// Stops processes that a dead engine has left running.
    pub(crate) fn stop_stragglers(&self) {
        stop::stop_all(&self.processes(), &mut BTreeSet::new());
    }
}

/// The reading end of a task's standard output and error.
#[derive(Debug)]
pub(crate) struct Output {
    pipe: Option<File>,
    inode: u64,
}

impl Output {
    /// Creates a pipe. Returns the reading end and the end for the task.
    ///
    /// # Errors
    /// No descriptors are left.
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

    /// Returns the inode number of the pipe, which identifies it in images.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// Returns the descriptor to poll; `None` if no process can write any more.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Reads some of the available output.
    pub(crate) fn read(&mut self, mut take: impl FnMut(Vec<u8>)) {
        for _ in 0..CHUNKS_PER_READ_MAX {
            match self.chunk(OUTPUT_CHUNK_BYTES_MAX) {
                Some(bytes) => take(bytes),
                None => return,
            }
        }
    }

    /// Reads what is in the pipe now, but not what is written meanwhile.
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

/// Starts a program as a task, in this namespace if one is given.
///
/// # Errors
/// One sentence: what failed and why. Nothing is left of the attempt.
pub(crate) fn start(
    order: &StartTask,
    namespace: Option<Namespace>,
    inherited: &InheritedState,
    guard: &StartGuard,
) -> Result<Task, String> {
    let (process, output) =
        create_process(
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
        phase: TaskPhase::Running,
        pause: Pause::NotPaused,
        stopped_before: Vec::new(),
        exit_requested_for: None,
        redirection: None,
        kept_signals: Vec::new(),
    })
}

/// Starts a process that stops before its exec, in this namespace if one is given. Returns the
/// process and its output.
///
/// # Errors
/// As [`start`].
pub(crate) fn build_stopped(
    order: &StartTask,
    namespace: Option<&Namespace>,
    inherited: &InheritedState,
) -> Result<(Child, Output), String> {
    create_process(order, inherited, namespace.is_none(), |plan| {
        let plan = plan.waiting();
        match namespace {
            Some(namespace) => namespace.start_waiting(&plan, EXEC_TIMEOUT),
            None => sys::start_waiting(&plan, EXEC_TIMEOUT, None),
        }
    })
}

/// Creates the process of a program and its output pipe. `own_group`: it gets a process group of
/// its own.
fn create_process(
    order: &StartTask,
    inherited: &InheritedState,
    own_group: bool,
    start: impl FnOnce(ExecPlan<'_>) -> Result<Child, StartError>,
) -> Result<(Child, Output), String> {
    let path = order.path.display();
    let failed =
        |what: &str, error: &dyn std::fmt::Display| format!("cannot start {path}: {what}: {error}");
    let program = Program::new(&order.path, &order.working_dir, &order.argv, &order.env)
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
    // A failed process is reaped with the unowned children; waiting here could block on a file
    // system that hangs.
    Ok((made.map_err(|why| start_failure(order, why))?, output))
}

fn start_failure(order: &StartTask, why: StartError) -> String {
    let path = order.path.display();
    let (stage, errno) = match why {
        StartError::NoProcess(error) => {
            return format!("cannot start {path}: no new process: {error}");
        }
        StartError::TimedOut => {
            return format!(
                "cannot start {path}: the system did not execute it within {} s",
                EXEC_TIMEOUT.as_secs()
            );
        }
        StartError::Failed(ExecError { stage, errno }) => (stage, errno.desc()),
    };
    match stage {
        ExecStage::Stdio => format!("cannot start {path}: its standard descriptors: {errno}"),
        ExecStage::Dir => format!(
            "cannot start {path}: working directory {}: {errno}",
            order.working_dir.display()
        ),
        ExecStage::Exec | ExecStage::Access => format!("cannot start {path}: {errno}"),
    }
}

/// Converts a duration, saturating.
pub(crate) fn micros(duration: std::time::Duration) -> Micros {
    Micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}
