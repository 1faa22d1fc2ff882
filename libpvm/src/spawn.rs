//! Builder for requests that spawn tasks.

use crate::error::Error;
use crate::task::Task;
use crate::vm::{Body, Vm};
use sempa_proto::message::CTX_TASK_CONTROL;
use sempa_proto::task::{
    SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_DEBUG, SPAWN_HOST, SPAWN_NO_PARENT, Sink, SpawnRequest,
};
use sempa_proto::{PvmError, Tid};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Tag of the control message that lists a task's siblings.
pub const TC_SIBLINGS: i32 = 0x8003_000c_u32.cast_signed();

/// Describes the tasks to start. No request is sent before [`Spawn::start`].
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let vm = libpvm::Vm::enroll()?;
/// let workers = vm.spawner("worker").arg("--quiet").count(4).env("COLOUR", "blue");
/// let workers = workers.start()?.all()?;
/// let near = vm.spawner("worker").on_host("h2").in_dir("/tmp").start()?;
/// println!("{} here, {} there, {} failed", workers.len(), near.tasks.len(), near.failed.len());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is started before start()"]
pub struct Spawn {
    vm: Vm,
    request: SpawnRequest,
    directory: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpawnOutcome {
    /// Tasks that were started, in the order of the request.
    pub tasks: Vec<Task>,
    /// Errors of the tasks that were not started.
    pub failed: Vec<PvmError>,
}

impl SpawnOutcome {
    /// Returns all tasks, or an error if any task was not started.
    ///
    /// # Errors
    /// At least one task was not started. The tasks that were started keep running, so this method
    /// suits programs that exit on an error.
    pub fn all(self) -> Result<Vec<Task>, Error> {
        match self.failed.first() {
            None => Ok(self.tasks),
            Some(error) => {
                let (started_count, failed_count) = (self.tasks.len(), self.failed.len());
                Err(Error::new(
                    *error,
                    format!(
                        "{failed_count} of {} tasks were not started: {error}",
                        started_count + failed_count
                    ),
                ))
            }
        }
    }
}

impl Vm {
    /// Creates a builder for tasks that run `program`. The target host looks the program up in its
    /// search path unless the name contains a `/`.
    pub fn spawner(&self, program: impl Into<String>) -> Spawn {
        let (own_output_sink, own_trace_sink) =
            (self.runtime().output_sink(), self.runtime().trace_sink());
        let request = SpawnRequest {
            program: program.into(),
            task_count: 1,
            output_sink: own_output_sink,
            trace_sink: own_trace_sink,
            ..SpawnRequest::default()
        };
        Spawn {
            vm: self.clone(),
            request,
            directory: String::new(),
        }
    }
}

impl Spawn {
    /// Sets the number of tasks; the default is 1.
    pub fn count(mut self, count: u32) -> Self {
        self.request.task_count = count;
        self
    }

    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.request.args.push(arg.as_ref().as_bytes().to_vec());
        self
    }

    pub fn args<S: AsRef<OsStr>>(self, args: impl IntoIterator<Item = S>) -> Self {
        args.into_iter().fold(self, |spawn, arg| spawn.arg(arg))
    }

    /// Sets an environment variable of the tasks. The tasks also get the variables of their daemon
    /// and the variables that `PVM_EXPORT` names.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.request
            .env
            .push([name.as_bytes(), b"=", value.as_ref().as_bytes()].concat());
        self
    }

    /// Places the tasks on the host with this name in the host table. The name `.` stands for the
    /// host of the calling task.
    pub fn on_host(self, host: &str) -> Self {
        self.select_hosts(SPAWN_HOST, host)
    }

    /// Places the tasks on hosts of this architecture, such as `LINUX64`.
    pub fn on_arch(self, arch: &str) -> Self {
        self.select_hosts(SPAWN_ARCH, arch)
    }

    fn select_hosts(mut self, flag: i32, selection: &str) -> Self {
        self.request.flags = self.request.flags & !(SPAWN_HOST | SPAWN_ARCH) | flag;
        self.request.where_arg = selection.to_string();
        self
    }

    /// Inverts the selection of hosts: the tasks are placed on any host that is not selected.
    pub fn invert_selection(mut self) -> Self {
        self.request.flags |= SPAWN_COMPLEMENT;
        self
    }

    /// Sets the working directory of the tasks.
    pub fn in_dir(mut self, directory: &str) -> Self {
        self.directory = directory.to_string();
        self
    }

    /// Hides this task's tid from the started tasks, so that they have no parent.
    pub fn hide_parent(mut self) -> Self {
        self.request.flags |= SPAWN_NO_PARENT;
        self
    }

    /// Requests that the tasks run under the debugger.
    pub fn run_in_debugger(mut self) -> Self {
        self.request.flags |= SPAWN_DEBUG;
        self
    }

    /// Sets the sink to which the tasks' standard output is sent, in PVM's output messages. The
    /// default is the sink of this task's own output.
    pub fn output_sink(mut self, sink: Sink) -> Self {
        self.request.output_sink = sink;
        self
    }

    /// Returns the spawn request for the daemon.
    fn request(&self, exports: Vec<Vec<u8>>) -> SpawnRequest {
        let mut request = self.request.clone();
        if !self.directory.is_empty() {
            request.where_arg = format!("{}:{}", request.where_arg, self.directory);
        }
        // Variables that were set in the builder come last, so they override exported variables.
        request.env.splice(..0, exports);
        request
    }

    /// Starts the tasks and sends each task the list of its siblings.
    ///
    /// # Errors
    /// The whole request failed. Errors of single tasks are in [`SpawnOutcome::failed`].
    pub fn start(self) -> Result<SpawnOutcome, Error> {
        let results = self.vm.spawn(self.request(exported_variables()))?;
        let mut outcome = SpawnOutcome {
            tasks: Vec::new(),
            failed: Vec::new(),
        };
        for result in results {
            match result {
                Ok(tid) => outcome.tasks.push(self.vm.task(tid)),
                Err(error) => outcome.failed.push(error),
            }
        }
        let tids: Vec<Tid> = outcome.tasks.iter().map(Task::tid).collect();
        let body = siblings_body(&tids);
        for tid in tids {
            // A failure is ignored: a task that has ended needs no list of siblings.
            let _ = self
                .vm
                .send_in_context(tid, CTX_TASK_CONTROL, TC_SIBLINGS, body.clone());
        }
        Ok(outcome)
    }
}

/// Returns the body of the control message that lists the tasks of one spawn.
pub fn siblings_body(tids: &[Tid]) -> Body {
    let count = i32::try_from(tids.len()).unwrap_or(i32::MAX);
    Body::items(|out| {
        out.pack_int(count)
            .pack_items(tids.iter().map(|tid| tid.raw()))
    })
}

/// Returns `PVM_EXPORT` and the variables that it names, as `NAME=value`.
fn exported_variables() -> Vec<Vec<u8>> {
    let Some(export_list) =
        std::env::var_os("PVM_EXPORT").filter(|export_list| !export_list.is_empty())
    else {
        return Vec::new();
    };
    let names = export_list
        .as_bytes()
        .split(|byte| *byte == b':')
        .filter(|name| !name.is_empty());
    let assignments = names.filter_map(|name| {
        let value = std::env::var_os(OsStr::from_bytes(name))?;
        Some([name, b"=", value.as_bytes()].concat())
    });
    std::iter::once([b"PVM_EXPORT=", export_list.as_bytes()].concat())
        .chain(assignments)
        .collect()
}
