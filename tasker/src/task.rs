//! State of one task, how it is started, and how its output is read.

use crate::dump_attempt::DumpAttempt;
use crate::freezer::ControlGroup;
use crate::namespace::Namespace;
use crate::pause::Pause;
use crate::stop::{self, TaskProcesses};
use crate::sys::{
    self, Child, ExecError, ExecPlan, ExecStage, Program, StartError, StartGuard, TaskStartState,
    ZeroByteError,
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
use std::path::PathBuf;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Maximum number of chunks that are read from one task before other tasks are served.
const CHUNKS_PER_READ_MAX: usize = 16;
/// Maximum number of signals that are kept for a task which is stopped for a migration. Further
/// signals are dropped; the kernel, too, merges equal pending signals.
pub(crate) const KEPT_SIGNALS_MAX: usize = 64;
/// Time limit for the exec of a program, because its file may be on a slow file system.
pub(crate) const EXEC_TIMEOUT: Duration = Duration::from_secs(10);

/// The migration step that a task is in.
#[derive(Debug)]
pub(crate) enum TaskPhase {
    /// The task is in no migration step. It runs unless it is paused.
    Running,
    /// The task was ordered to stop.
    Stopping {
        migration: MigrationId,
        deadline: Instant,
        /// Processes that have received SIGSTOP.
        signalled: BTreeSet<i32>,
    },
    /// All processes of the task are stopped.
    Stopped { migration: MigrationId },
    /// The engine writes the task's images.
    Dumping {
        migration: MigrationId,
        /// Id of the worker that controls the engine, or waits before a retry.
        worker: u64,
        /// The current attempt, with its retry state.
        attempt: DumpAttempt,
        /// True if the migration was aborted. The task continues when the worker has finished.
        aborted: bool,
    },
    /// The task's images are written, and its memory is being served.
    Serving {
        migration: MigrationId,
        /// Id of the worker that waits until serving the memory has ended.
        worker: u64,
        /// True if the migration was aborted. The task continues when the worker has finished.
        aborted: bool,
    },
}

/// A task whose first process exists.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) tid: Tid,
    /// The task's first process.
    pub(crate) process: Child,
    /// The task's PID namespace; `None` if the tasker may not create namespaces.
    pub(crate) namespace: Option<Namespace>,
    pub(crate) output: Output,
    /// Resources that the task has used on other hosts.
    pub(crate) usage_on_other_hosts: Usage,
    pub(crate) phase: TaskPhase,
    /// Progress of pausing the task, independent of migrations.
    pub(crate) pause: Pause,
    /// Processes that were already stopped before the task was stopped. They are not continued with
    /// the task.
    pub(crate) already_stopped_pids: Vec<i32>,
    /// Set if the task was requested to exit so that its program can be restarted.
    pub(crate) exit_requested_for: Option<Engine>,
    /// Data that must be written into the task's memory when it is next stopped.
    pub(crate) redirection: Option<MemoryWrite>,
    /// Signals that arrived while the task was stopped, to be sent when it continues.
    pub(crate) kept_signals: Vec<i32>,
}

impl Task {
    /// Sends a signal to the task's first process.
    pub(crate) fn send_signal(&self, signal: i32) {
        // The PID stays valid until the tasker reaps the process. An invalid signal number or an
        // ended process is not an error here.
        let _ = sys::kill_raw(self.process.pid, signal);
    }

    pub(crate) fn processes(&self) -> TaskProcesses<'_> {
        self.namespace.as_ref().map_or(
            TaskProcesses::Group(self.process.pid),
            TaskProcesses::Namespace,
        )
    }

    /// Returns the PIDs of the task's processes, from the control group if possible, because that
    /// is fastest.
    pub(crate) fn member_pids(&self) -> Vec<i32> {
        self.namespace
            .as_ref()
            .map_or_else(|| self.processes().pids(), Namespace::members)
    }

    /// Continues a stopped task, unless it is paused, and sends it the kept signals.
    pub(crate) fn continue_running(&mut self) {
        self.phase = TaskPhase::Running;
        if !self.pause.is_inactive() {
            return;
        }
        self.continue_processes();
        self.already_stopped_pids.clear();
        for signal in std::mem::take(&mut self.kept_signals) {
            self.send_signal(signal);
        }
    }

    /// Returns the task's control group if all its processes are in it.
    pub(crate) fn control_group(&self) -> Option<&ControlGroup> {
        self.namespace.as_ref()?.control_group()
    }

    /// Returns the task's control group if it is frozen.
    pub(crate) fn frozen_group(&self) -> Option<&ControlGroup> {
        self.control_group().filter(|group| group.is_frozen())
    }

    /// Continues the task's processes, except those that were already stopped before the task was
    /// stopped.
    pub(crate) fn continue_processes(&self) {
        match self.frozen_group() {
            Some(group) => group.thaw(),
            None => stop::continue_all(&self.processes(), &self.already_stopped_pids),
        }
    }

    /// Kills all processes in the task's namespace. Without a namespace, kills only the process
    /// group, which may not contain all processes.
    pub(crate) fn kill(&self) {
        match &self.namespace {
            Some(namespace) => namespace.kill(),
            None => {
                let _ = sys::kill_raw(-self.process.pid, libc::SIGKILL);
            }
        }
        sys::kill_pidfd(self.process.pidfd.as_fd());
    }

    /// Like [`Task::kill`]. In addition, no process of the task executes another instruction after
    /// the return, even if its exit takes long.
    pub(crate) fn kill_all(&self) {
        for pid in self.processes().pids() {
            // Fails if the process has ended.
            let _ = sys::kill_raw(pid, libc::SIGKILL);
        }
        self.kill();
    }

    /// True if the task's first process has ended but was not reaped.
    pub(crate) fn has_ended(&self) -> bool {
        stop::has_ended(self.process.pid)
    }

    /// Stops processes of the task that an engine which died has left running.
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
    /// Creates a pipe. Returns its reading end, and its writing end for the task.
    ///
    /// # Errors
    /// No descriptors are available.
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

    /// Returns the inode number of the pipe, by which images refer to it.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// Returns the descriptor to poll; `None` if no process can write any more.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Reads some of the available output and passes it to `take` in chunks.
    pub(crate) fn read(&mut self, mut take: impl FnMut(Vec<u8>)) {
        for _ in 0..CHUNKS_PER_READ_MAX {
            match self.read_chunk(OUTPUT_CHUNK_BYTES_MAX) {
                Some(bytes) => take(bytes),
                None => return,
            }
        }
    }

    /// Reads the output that is in the pipe at the time of the call, and passes it to `take` in
    /// chunks.
    pub(crate) fn drain(&mut self, mut take: impl FnMut(Vec<u8>)) {
        let mut left = self.fd().map_or(0, sys::bytes_in_pipe);
        while left > 0 {
            let Some(bytes) = self.read_chunk(left.min(OUTPUT_CHUNK_BYTES_MAX)) else {
                return;
            };
            left -= bytes.len();
            take(bytes);
        }
    }

    fn read_chunk(&mut self, bytes_max: usize) -> Option<Vec<u8>> {
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

/// Starts a program as a task, in the namespace if one is given.
///
/// # Errors
/// The task was not started. Nothing of the attempt remains.
pub(crate) fn start_task_process(
    order: &StartTask,
    namespace: Option<Namespace>,
    inherited: &TaskStartState,
    guard: &StartGuard,
) -> Result<Task, StartTaskError> {
    let (process, output) =
        create_process(
            order,
            inherited,
            namespace.is_none(),
            |plan| match &namespace {
                Some(namespace) => namespace.start_program(&plan, guard),
                None => sys::start_program(&plan, guard, None),
            },
        )?;
    Ok(Task {
        tid: order.tid,
        process,
        namespace,
        output,
        usage_on_other_hosts: Usage::default(),
        phase: TaskPhase::Running,
        pause: Pause::NotPaused,
        already_stopped_pids: Vec::new(),
        exit_requested_for: None,
        redirection: None,
        kept_signals: Vec::new(),
    })
}

/// Starts a process that stops before its exec, in the namespace if one is given. Returns the
/// process and its output.
///
/// # Errors
/// As [`start_task_process`].
pub(crate) fn start_stopped_process(
    order: &StartTask,
    namespace: Option<&Namespace>,
    inherited: &TaskStartState,
) -> Result<(Child, Output), StartTaskError> {
    create_process(order, inherited, namespace.is_none(), |plan| {
        let plan = plan.stopping_before_exec();
        match namespace {
            Some(namespace) => namespace.start_waiting(&plan, EXEC_TIMEOUT),
            None => sys::start_waiting(&plan, EXEC_TIMEOUT, None),
        }
    })
}

/// Creates the process of a program and its output pipe. If `own_group` is true, the process gets
/// its own process group.
fn create_process(
    order: &StartTask,
    inherited: &TaskStartState,
    own_group: bool,
    start: impl FnOnce(ExecPlan<'_>) -> Result<Child, StartError>,
) -> Result<(Child, Output), StartTaskError> {
    let failed = |failure| StartTaskError::new(order, failure);
    let program = Program::new(&order.path, &order.working_dir, &order.argv, &order.env)
        .map_err(|why| failed(StartTaskFailure::InvalidProgram(why)))?;
    let stdin = File::open("/dev/null").map_err(|e| failed(StartTaskFailure::Stdin(e)))?;
    let (output, theirs) = Output::new().map_err(|e| failed(StartTaskFailure::Output(e)))?;
    let made = start(ExecPlan::new(
        &program,
        stdin.as_fd(),
        theirs.as_fd(),
        inherited,
        own_group,
    ));
    // A failed process is reaped with the unowned children; waiting here could block on a file
    // system that hangs.
    let process = made.map_err(|why| failed(StartTaskFailure::of(order, why)))?;
    Ok((process, output))
}

/// A program was not started. Nothing of the attempt remains.
#[derive(Debug, Error)]
#[error("cannot start {}: {failure}", path.display())]
pub(crate) struct StartTaskError {
    path: PathBuf,
    #[source]
    failure: StartTaskFailure,
}

impl StartTaskError {
    pub(crate) fn new(order: &StartTask, failure: StartTaskFailure) -> StartTaskError {
        StartTaskError {
            path: order.path.clone(),
            failure,
        }
    }
}

/// Why a program was not started.
#[derive(Debug, Error)]
pub(crate) enum StartTaskFailure {
    #[error("{0} exists already")]
    TidExists(Tid),
    #[error("this host has {0} tasks, the limit")]
    TooManyTasks(usize),
    #[error("no process-id namespace: {0}")]
    Namespace(#[source] io::Error),
    #[error(transparent)]
    InvalidProgram(ZeroByteError),
    #[error("/dev/null: {0}")]
    Stdin(#[source] io::Error),
    #[error("no pipe for its output: {0}")]
    Output(#[source] io::Error),
    #[error("no new process: {0}")]
    CreateProcess(#[source] io::Error),
    /// The new process was killed.
    #[error("the system did not execute it within {} s", EXEC_TIMEOUT.as_secs())]
    TimedOut,
    /// The new process has ended before its exec, as in the following cases.
    #[error("its standard descriptors: {}", .0.desc())]
    Descriptors(#[source] Errno),
    #[error("working directory {}: {}", dir.display(), source.desc())]
    WorkingDir { dir: PathBuf, source: Errno },
    #[error("{}", .0.desc())]
    Exec(#[source] Errno),
}

impl StartTaskFailure {
    fn of(order: &StartTask, why: StartError) -> StartTaskFailure {
        let (stage, errno) = match why {
            StartError::NoProcess(error) => return StartTaskFailure::CreateProcess(error),
            StartError::TimedOut => return StartTaskFailure::TimedOut,
            StartError::Failed(ExecError { stage, errno }) => (stage, errno),
        };
        match stage {
            ExecStage::Stdio => StartTaskFailure::Descriptors(errno),
            ExecStage::Dir => StartTaskFailure::WorkingDir {
                dir: order.working_dir.clone(),
                source: errno,
            },
            ExecStage::Exec | ExecStage::Access => StartTaskFailure::Exec(errno),
        }
    }
}

/// Converts a duration to microseconds. A too long duration becomes the maximum.
pub(crate) fn micros(duration: std::time::Duration) -> Micros {
    Micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}
