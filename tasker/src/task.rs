//! State of a task, and functions that start it and read its output.

use crate::census::{Census, ProcessTree};
use crate::dump_attempt::DumpAttempt;
use crate::freezer::ControlGroup;
use crate::host_account::ClaimError;
use crate::namespace::Namespace;
use crate::pause::Pause;
use crate::pid_numbering::FirstPid;
use crate::stop::{self, TaskProcesses, VforkRule};
use crate::sys::{
    self, Child, ExecError, ExecPlan, ExecStage, Program, StartError, StartGuard, TaskStartState,
    ZeroByteError,
};
use checkpoint::proc;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use sempa_proto::engine::Engine;
use sempa_proto::migration::Usage;
use sempa_proto::tasker::{MemoryWrite, OUTPUT_CHUNK_BYTES_MAX, TaskStart};
use sempa_proto::{Micros, MigrationId, Tid};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Maximum number of output chunks that are read from one task before the main loop handles other
/// events.
const CHUNKS_PER_READ_MAX: usize = 16;
/// Maximum number of signals that are stored for a task which is stopped for a migration. Further
/// signals are dropped; the kernel, too, merges equal pending signals.
pub(crate) const DEFERRED_SIGNALS_MAX: usize = 64;
/// Longest time for the exec of a program. The program may be on a slow file system, and the kernel
/// delays new processes while it removes many PID namespaces. The main thread is blocked meanwhile,
/// so the limit is lower if the tasks must be frozen soon; see [`exec_time_limit`].
const EXEC_TIMEOUT_MAX: Duration = Duration::from_secs(10);
/// Shortest time limit for an exec, for a host whose tasks must be frozen at once.
const EXEC_TIMEOUT_MIN: Duration = Duration::from_millis(200);

/// Returns the time limit for the exec of a program: at most half of the time until the tasks must
/// be frozen, so that the main thread can read a renewal of the lease before. `None` stands for
/// tasks without a lease.
pub(crate) fn exec_time_limit(time_until_freeze: Option<Duration>) -> Duration {
    time_until_freeze.map_or(EXEC_TIMEOUT_MAX, |time| {
        (time / 2).clamp(EXEC_TIMEOUT_MIN, EXEC_TIMEOUT_MAX)
    })
}

/// The migration step of a task at the source.
#[derive(Debug)]
pub(crate) enum TaskPhase {
    /// The task is in no migration step. It runs unless it is paused.
    Running,
    /// The task was ordered to stop.
    Stopping {
        migration: MigrationId,
        deadline: Instant,
        /// Processes that have received SIGSTOP.
        signalled_pids: BTreeSet<i32>,
    },
    /// All processes of the task are stopped.
    Stopped { migration: MigrationId },
    /// The engine writes the task's images.
    Dumping {
        migration: MigrationId,
        /// Id of the worker that controls the engine or waits for the next attempt.
        worker_id: u64,
        /// The current attempt, with its retry state.
        attempt: DumpAttempt,
        /// True if the migration was aborted. Then the task continues when the worker has finished.
        aborted: bool,
    },
    /// The task's images are written, and a worker serves its remaining memory.
    ServingMemory {
        migration: MigrationId,
        /// Id of the worker that serves the memory.
        worker_id: u64,
        /// True if the migration was aborted. Then the task continues when the worker has finished.
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
    /// Describes the processes of the task if it has no namespace.
    pub(crate) tree: ProcessTree,
    pub(crate) output: Output,
    /// True if the task is a service of the virtual machine, by what its daemon says.
    pub(crate) is_pinned: bool,
    /// Resources that the task has used on other hosts.
    pub(crate) usage_on_other_hosts: Usage,
    pub(crate) phase: TaskPhase,
    /// Progress of pausing the task, independent of migrations.
    pub(crate) pause: Pause,
    /// True if the task is stopped only because the daemon has not renewed its lease.
    pub(crate) is_held: bool,
    /// PIDs, in the task's namespace, of processes that were already stopped before the task was
    /// stopped. They stay stopped when the task continues.
    pub(crate) already_stopped_pids: Vec<i32>,
    /// The engine that requires the task to exit, so that its program can be restarted; `None` if
    /// no exit was requested.
    pub(crate) exit_requested_for: Option<Engine>,
    /// The redirect that is written into the task's memory when the task is next stopped.
    pub(crate) pending_redirect: Option<MemoryWrite>,
    /// Signals for a stopped task. They are sent when the task continues.
    pub(crate) deferred_signals: Vec<i32>,
}

impl Task {
    /// Sends a signal to the task's first process.
    pub(crate) fn send_signal(&self, signal: i32) {
        // The PID is valid until the tasker reaps the process. An invalid signal number is ignored,
        // and so is a process that has ended.
        let _ = sys::send_signal(self.process.pid, signal);
    }

    /// Returns the PID of the task's first process as the task sees it.
    pub(crate) fn namespace_pid(&self) -> i32 {
        let known_pid = self.namespace.as_ref().and_then(Namespace::first_pid);
        known_pid
            .or_else(|| proc::innermost_pid(self.process.pid))
            .unwrap_or(self.process.pid)
    }

    pub(crate) fn processes(&self) -> TaskProcesses<'_> {
        self.namespace
            .as_ref()
            .map_or(TaskProcesses::Tree(&self.tree), TaskProcesses::Namespace)
    }

    /// Returns the PIDs of the task's processes. They are read from the control group if possible,
    /// because that is fastest; processes that have left the group are then missing.
    pub(crate) fn member_pids(&self) -> Vec<i32> {
        self.member_pids_in(&Census::default())
    }

    /// As [`Task::member_pids`]; a task without a control group uses the census.
    pub(crate) fn member_pids_in(&self, census: &Census) -> Vec<i32> {
        match &self.namespace {
            Some(namespace) => namespace.member_pids_in(census),
            None => self.processes().pids_in(census),
        }
    }

    /// Ends the migration step of a stopped task. If the task is not paused, continues the task and
    /// sends it the stored signals. Otherwise the task does not count as stopped before its
    /// processes were seen stopped: the migration may have let some of them run. `census` must be
    /// younger than the stop.
    pub(crate) fn continue_after_migration(&mut self, census: &Census) {
        let phase = std::mem::replace(&mut self.phase, TaskPhase::Running);
        if !self.pause.is_inactive() {
            let signalled_pids = match phase {
                TaskPhase::Stopping { signalled_pids, .. } => signalled_pids,
                _ => BTreeSet::new(),
            };
            return self.begin_stopping_again(signalled_pids, census);
        }
        self.continue_processes(census);
        self.already_stopped_pids.clear();
        for signal in std::mem::take(&mut self.deferred_signals) {
            self.send_signal(signal);
        }
    }

    /// Returns the control group in which the task's processes were created; `None` if there is
    /// none.
    pub(crate) fn control_group(&self) -> Option<&ControlGroup> {
        self.namespace.as_ref()?.complete_control_group()
    }

    /// Returns the task's control group if a freeze of the group has been requested; otherwise
    /// `None`.
    pub(crate) fn frozen_group(&self) -> Option<&ControlGroup> {
        self.namespace.as_ref()?.frozen_group()
    }

    /// Continues the task's processes, except those that were already stopped before the task was
    /// stopped. `census` must be younger than the stop.
    pub(crate) fn continue_processes(&self, census: &Census) {
        if self.frozen_group().is_none() {
            let pids = self.processes().pids_in(census);
            stop::continue_processes(pids, &self.already_stopped_pids);
        }
        if let Some(namespace) = &self.namespace {
            namespace.thaw(census);
        }
    }

    /// Kills all processes in the task's namespace. Without a namespace, kills the process group
    /// and the descendants in the census, which misses processes that were created since.
    pub(crate) fn kill_processes(&self, census: &Census) {
        match &self.namespace {
            Some(namespace) => namespace.kill_processes(),
            None => {
                self.tree.kill_group();
                stop::kill(&self.processes().pids_in(census));
            }
        }
        sys::kill_pidfd(self.process.pidfd.as_fd());
    }

    /// Kills the task like [`Task::kill_processes`]. After the return, no process of the task
    /// executes another instruction, even if its exit takes long.
    pub(crate) fn kill_immediately(&self, census: &Census) {
        if self.namespace.is_some() {
            let killed_pids: BTreeSet<i32> = self.member_pids_in(census).into_iter().collect();
            stop::kill(&killed_pids);
            // The init reaps orphans at once, so the PIDs of killed processes may belong to other
            // processes already.
            let mut other_pids = self.processes().pids_in(census);
            other_pids.retain(|pid| !killed_pids.contains(pid));
            stop::kill(&other_pids);
        }
        self.kill_processes(census);
    }

    /// True if the task's first process was stopped by a signal that did not come from the tasker.
    pub(crate) fn is_stopped_by_signal(&self) -> bool {
        if !matches!(self.phase, TaskPhase::Running) {
            return false;
        }
        if self.pause.is_inactive() {
            return stop::is_stopped_by_signal(self.process.pid);
        }
        proc::innermost_pid(self.process.pid)
            .is_some_and(|namespace_pid| self.already_stopped_pids.contains(&namespace_pid))
    }

    /// True if the task's first process has ended. The process is not reaped yet.
    pub(crate) fn has_first_process_ended(&self) -> bool {
        stop::has_ended(self.process.pid)
    }

    /// Stops the processes that a dead engine has left running.
    pub(crate) fn stop_stragglers(&self) {
        stop::signal_and_check_stopped(
            &self.processes(),
            &mut BTreeSet::new(),
            VforkRule::ChildRuns,
        );
    }
}

/// The read end of the pipe for a task's standard output and standard error.
#[derive(Debug)]
pub(crate) struct Output {
    pipe: Option<File>,
    inode: u64,
}

impl Output {
    /// Creates a pipe. Returns its read end, and its write end for the task.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let (read_end, write_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        fcntl(&read_end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let pipe = File::from(read_end);
        let inode = pipe.metadata()?.st_ino();
        Ok((
            Self {
                pipe: Some(pipe),
                inode,
            },
            write_end,
        ))
    }

    /// Returns the inode number of the pipe, by which images identify the pipe.
    pub(crate) fn pipe_inode(&self) -> u64 {
        self.inode
    }

    /// Returns the descriptor to poll; `None` after the end of the output, when no process can
    /// write any more.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Reads at most [`CHUNKS_PER_READ_MAX`] chunks of the available output, and calls `on_chunk`
    /// with each.
    pub(crate) fn read_chunks(&mut self, mut on_chunk: impl FnMut(Vec<u8>)) {
        for _ in 0..CHUNKS_PER_READ_MAX {
            match self.read_chunk(OUTPUT_CHUNK_BYTES_MAX) {
                Some(bytes) => on_chunk(bytes),
                None => return,
            }
        }
    }

    /// Reads all output that is in the pipe at the time of the call, and calls `on_chunk` with each
    /// chunk.
    pub(crate) fn read_all(&mut self, mut on_chunk: impl FnMut(Vec<u8>)) {
        let mut remaining_bytes = self.fd().map_or(0, sys::bytes_in_pipe);
        while remaining_bytes > 0 {
            let Some(bytes) = self.read_chunk(remaining_bytes.min(OUTPUT_CHUNK_BYTES_MAX)) else {
                return;
            };
            remaining_bytes -= bytes.len();
            on_chunk(bytes);
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
                Ok(read_bytes) => {
                    bytes.truncate(read_bytes);
                    return Some(bytes);
                }
                Err(Errno::EINTR) => {}
                Err(_) => return None,
            }
        }
    }
}

/// Starts a program as a task. If a namespace is given, the task is started in it, with the PID
/// there if one is given, too.
///
/// # Errors
/// The task was not started. All its resources have been freed, and its process, if any, will be
/// reaped.
pub(crate) fn start_task_process(
    order: &TaskStart,
    namespace: Option<(Namespace, Option<FirstPid>)>,
    task_start_state: &TaskStartState,
    guard: &StartGuard,
    time_limit: Duration,
) -> Result<Task, StartTaskError> {
    let new_group = namespace.is_none();
    let start = |plan: ExecPlan<'_>| match &namespace {
        Some((namespace, first_pid)) => {
            let plan = plan.numbering_children_from(first_pid.map(FirstPid::pid));
            namespace.start_program(plan, guard, *first_pid)
        }
        None => sys::start_program(&plan, guard, None, None),
    };
    let (process, output) = create_process(order, task_start_state, new_group, time_limit, start)?;
    let namespace = namespace.map(|(namespace, _)| namespace);
    Ok(Task {
        tid: order.tid,
        tree: ProcessTree::new(process.pid, &order.env),
        process,
        namespace,
        output,
        is_pinned: order.pinned,
        usage_on_other_hosts: Usage::default(),
        phase: TaskPhase::Running,
        pause: Pause::NotPaused,
        is_held: false,
        already_stopped_pids: Vec::new(),
        exit_requested_for: None,
        pending_redirect: None,
        deferred_signals: Vec::new(),
    })
}

/// Creates a process that stops before its exec, in a namespace like [`start_task_process`].
/// Returns the process and its output.
///
/// # Errors
/// As [`start_task_process`].
pub(crate) fn start_stopped_process(
    order: &TaskStart,
    namespace: Option<(&Namespace, Option<FirstPid>)>,
    task_start_state: &TaskStartState,
    time_limit: Duration,
) -> Result<(Child, Output), StartTaskError> {
    let new_group = namespace.is_none();
    create_process(order, task_start_state, new_group, time_limit, |plan| {
        let plan = plan.stopping_before_exec();
        match namespace {
            Some((namespace, first_pid)) => {
                let plan = plan.numbering_children_from(first_pid.map(FirstPid::pid));
                namespace.start_waiting(plan, first_pid)
            }
            None => sys::start_stopped_before_exec(&plan, None, None),
        }
    })
}

/// Creates the process of a program and its output pipe. If `new_process_group` is true, the
/// process gets its own process group.
fn create_process(
    order: &TaskStart,
    task_start_state: &TaskStartState,
    new_process_group: bool,
    time_limit: Duration,
    start: impl FnOnce(ExecPlan<'_>) -> Result<Child, StartError>,
) -> Result<(Child, Output), StartTaskError> {
    let start_error = |failure| StartTaskError::new(order, failure);
    let program = Program::new(&order.path, &order.working_dir, &order.argv, &order.env)
        .map_err(|why| start_error(StartTaskFailure::InvalidProgram(why)))?;
    let stdin = File::open("/dev/null").map_err(|e| start_error(StartTaskFailure::OpenStdin(e)))?;
    let (output, output_writer) =
        Output::new().map_err(|e| start_error(StartTaskFailure::CreateOutputPipe(e)))?;
    let creation_result = start(ExecPlan::new(
        &program,
        stdin.as_fd(),
        output_writer.as_fd(),
        task_start_state,
        new_process_group,
        time_limit,
    ));
    // The main loop reaps a failed process. Waiting for it here could block on a file system that
    // hangs.
    let process = creation_result
        .map_err(|why| start_error(StartTaskFailure::from_start_error(order, why)))?;
    Ok((process, output))
}

/// A program was not started. No running process of the attempt remains.
#[derive(Debug, Error)]
#[error("cannot start {}: {failure}", path.display())]
pub(crate) struct StartTaskError {
    path: PathBuf,
    #[source]
    failure: StartTaskFailure,
}

impl StartTaskError {
    pub(crate) fn new(order: &TaskStart, failure: StartTaskFailure) -> Self {
        Self {
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
    #[error(
        "this host has {tasks} tasks, and {leftovers} ended tasks have left processes; the limit is {limit}"
    )]
    TooManyWithLeftovers {
        tasks: usize,
        leftovers: usize,
        limit: usize,
    },
    #[error(transparent)]
    Claim(ClaimError),
    #[error("the daemon has not renewed its lease, so no task may run on this host")]
    LeaseNotRenewed,
    #[error("no process-id namespace: {0}")]
    CreateNamespace(#[source] io::Error),
    #[error(transparent)]
    InvalidProgram(ZeroByteError),
    #[error("/dev/null: {0}")]
    OpenStdin(#[source] io::Error),
    #[error("no pipe for its output: {0}")]
    CreateOutputPipe(#[source] io::Error),
    #[error("no new process: {0}")]
    CreateProcess(#[source] io::Error),
    /// The new process was killed.
    #[error(
        "the system did not execute it within {:.1} s; the file system of the program may be slow",
        .0.as_secs_f64()
    )]
    TimedOut(Duration),
    /// The new process has ended before its exec. The following variants have the same meaning, for
    /// other steps.
    #[error("its standard descriptors: {}", .0.desc())]
    Descriptors(#[source] Errno),
    #[error("its mount namespace: {}", .0.desc())]
    EnterMountNamespace(#[source] Errno),
    #[error("the ids and limits of its user: {}", .0.desc())]
    BecomeUser(#[source] Errno),
    #[error("working directory {}: {}", dir.display(), source.desc())]
    WorkingDir { dir: PathBuf, source: Errno },
    #[error("{}", .0.desc())]
    Exec(#[source] Errno),
}

impl StartTaskFailure {
    fn from_start_error(order: &TaskStart, start_error: StartError) -> Self {
        let (stage, errno) = match start_error {
            StartError::NoProcess(error) => return Self::CreateProcess(error),
            StartError::TimedOut(limit) => return Self::TimedOut(limit),
            StartError::Failed(ExecError { stage, errno }) => (stage, errno),
        };
        match stage {
            ExecStage::StandardDescriptors => Self::Descriptors(errno),
            ExecStage::MountNamespace => Self::EnterMountNamespace(errno),
            ExecStage::User => Self::BecomeUser(errno),
            ExecStage::WorkingDir => Self::WorkingDir {
                dir: order.working_dir.clone(),
                source: errno,
            },
            ExecStage::Exec | ExecStage::ProgramCheck => Self::Exec(errno),
        }
    }
}

/// Converts a duration to microseconds. A duration that is too long becomes the maximum.
pub(crate) fn to_micros(duration: Duration) -> Micros {
    Micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slow exec ends before the tasks must be frozen, and a host whose lease has run out still
    /// grants the shortest time.
    #[test]
    fn exec_ends_before_the_freeze() {
        let limit = |until_freeze_ms| exec_time_limit(Some(Duration::from_millis(until_freeze_ms)));
        assert_eq!(exec_time_limit(None), EXEC_TIMEOUT_MAX);
        assert_eq!(limit(60_000), EXEC_TIMEOUT_MAX);
        assert_eq!(limit(5000), Duration::from_millis(2500));
        assert_eq!(limit(0), EXEC_TIMEOUT_MIN);
    }
}
