//! The virtual machine, as this process sees it as one of its tasks.

use crate::arrivals::{PyLoopWaker, PyWatch, WatchedMessages};
use crate::enrolled::{Enrolled, selection};
use crate::event_stream::{self, PyEventStream, ShownEvent};
use crate::group::{self, PyGroup};
use crate::mailbox::PyMailbox;
use crate::message::PyMessage;
use crate::notices::PyNotices;
use crate::task::{PyTask, tid_of, tids_of};
use crate::{errors, records, waits};
use libpvm::proto::job::CONSTRAINTS_ENV;
use libpvm::proto::table::{HostEntry, TaskInfo};
use libpvm::proto::task::OnDaemonExit;
use libpvm::{Error, Inbox, Match, Spawn, Vm};
use pyo3::exceptions::{PyTimeoutError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;
use sempa_proto::{HostId, PvmError, Tid};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

/// This process as a task of the virtual machine. As a context manager it leaves the virtual
/// machine at the end of the block.
#[pyclass(name = "Vm", module = "sempa_pvm", frozen)]
pub(crate) struct PyVm {
    enrolled: Arc<Enrolled>,
}

impl PyVm {
    pub(crate) fn enrolled(&self) -> &Arc<Enrolled> {
        &self.enrolled
    }

    pub(crate) fn from_enrolled(enrolled: &Arc<Enrolled>) -> Self {
        Self {
            enrolled: enrolled.clone(),
        }
    }

    fn task_of(&self, tid: Tid) -> PyTask {
        PyTask::new(&self.enrolled, tid)
    }

    /// Returns the ids of hosts, which are given by name, as a record `Host`, or as a tid.
    fn host_ids(&self, py: Python<'_>, hosts: &Bound<'_, PyAny>) -> PyResult<Vec<HostId>> {
        let table = self.enrolled.request(py, Vm::config)?;
        let host_id = |host: Bound<'_, PyAny>| -> PyResult<HostId> {
            let found_host = match host.extract::<String>() {
                Ok(name) => table.find_by_name(&name).map(|entry| entry.id),
                Err(_) => {
                    let tid = host.getattr("tid").unwrap_or_else(|_| host.clone());
                    Tid::from_raw(tid.extract()?).birth_host()
                }
            };
            found_host.ok_or_else(|| {
                let reason = format!("there is no host {host} in the virtual machine");
                errors::from_code(py, PvmError::NoHost, reason)
            })
        };
        if hosts.is_instance_of::<PyString>() {
            return Err(PyTypeError::new_err(
                "hosts is a list of hosts, not one name",
            ));
        }
        hosts.try_iter()?.map(|host| host_id(host?)).collect()
    }
}

#[pymethods]
impl PyVm {
    /// Joins this user's virtual machine. With `ends_with_daemon` a process that was started from a
    /// command line gets SIGTERM when its daemon ends.
    #[staticmethod]
    #[pyo3(signature = (*, ends_with_daemon = false))]
    fn enroll(py: Python<'_>, ends_with_daemon: bool) -> PyResult<Self> {
        let on_daemon_exit = match ends_with_daemon {
            true => OnDaemonExit::Terminate,
            false => OnDaemonExit::FailCalls,
        };
        let vm = py
            .detach(|| Vm::enroll_as(on_daemon_exit))
            .map_err(|error| errors::from_enroll_error(py, &error))?;
        Ok(Self {
            enrolled: Arc::new(Enrolled::new(vm)),
        })
    }

    /// The id of this task as PVM's number.
    #[getter]
    fn tid(&self) -> i32 {
        self.enrolled.vm().tid().raw()
    }

    /// The handle of this task itself.
    #[getter]
    fn me(&self) -> PyTask {
        self.task_of(self.enrolled.vm().tid())
    }

    /// The task that spawned this task; None for a program from a command line.
    #[getter]
    fn parent(&self) -> Option<PyTask> {
        self.enrolled.vm().parent().map(|tid| self.task_of(tid))
    }

    /// False after exit() and after the loss of the daemon.
    #[getter]
    fn is_connected(&self) -> bool {
        self.enrolled.runtime().is_connected()
    }

    /// The name of the host on which this task runs now.
    #[getter]
    fn host(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let own_host = self.enrolled.vm().host();
        let table = self.enrolled.request(py, Vm::config)?;
        Ok(table.get(own_host).map(|host| host.name.clone()))
    }

    /// The mailbox of the virtual machine.
    #[getter]
    fn mailbox(&self) -> PyMailbox {
        PyMailbox::new(&self.enrolled)
    }

    /// Returns the handle of a task.
    fn task(&self, tid: &Bound<'_, PyAny>) -> PyResult<PyTask> {
        Ok(self.task_of(tid_of(tid)?))
    }

    /// Returns the hosts of the virtual machine.
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let table = self.enrolled.request(py, Vm::config)?;
        table
            .hosts
            .iter()
            .map(|host| host_record(py, host))
            .collect()
    }

    /// Returns the tasks of the virtual machine, or of one host.
    #[pyo3(signature = (host = None))]
    fn tasks<'py>(&self, py: Python<'py>, host: Option<&str>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let (table, tasks) = self.enrolled.request(py, |vm| {
            let table = vm.config()?;
            let selector = match host {
                None => Tid::NONE,
                Some(name) => table
                    .find_by_name(name)
                    .map(|entry| entry.id.tid())
                    .ok_or_else(|| {
                        let reason = format!("there is no host '{name}' in the virtual machine");
                        Error::new(PvmError::NoHost, reason)
                    })?,
            };
            let tasks = vm.tasks(selector)?;
            Ok((table, tasks))
        })?;
        tasks
            .iter()
            .filter(|task| !task.is_hidden())
            .map(|task| {
                let host_name = table.get(task.host).map(|host| host.name.as_str());
                self.task_record(py, task, host_name)
            })
            .collect()
    }

    /// Starts tasks and returns them.
    #[pyo3(signature = (program, args = None, *, count = 1, host = None, arch = None, env = None,
                        directory = None, wants = None, hide_parent = false, debug = false))]
    #[expect(clippy::too_many_arguments)]
    fn spawn<'py>(
        &self,
        py: Python<'py>,
        program: PathBuf,
        args: Option<Vec<PathBuf>>,
        count: u32,
        host: Option<&str>,
        arch: Option<&str>,
        env: Option<BTreeMap<String, OsString>>,
        directory: Option<PathBuf>,
        wants: Option<&str>,
        hide_parent: bool,
        debug: bool,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let program = utf8_of(program, "program")?;
        let mut spawn = self
            .enrolled
            .vm()
            .spawner(program.as_str())
            .count(count)
            .args(args.iter().flatten().map(|arg| arg.as_os_str()));
        spawn = match (host, arch) {
            (None, None) => spawn,
            (Some(host), None) => spawn.on_host(host),
            (None, Some(arch)) => spawn.on_arch(arch),
            (Some(_), Some(_)) => {
                return Err(PyValueError::new_err(
                    "host and arch exclude each other: a host has one architecture",
                ));
            }
        };
        for (name, value) in env.iter().flatten() {
            spawn = spawn.env(name, value);
        }
        if let Some(wants) = wants {
            spawn = spawn.env(CONSTRAINTS_ENV, wants);
        }
        if let Some(directory) = directory {
            spawn = spawn.in_dir(&utf8_of(directory, "directory")?);
        }
        if hide_parent {
            spawn = spawn.hide_parent();
        }
        if debug {
            spawn = spawn.run_in_debugger();
        }
        self.start(py, &program, spawn)
    }

    /// Waits for a message. Raises TimeoutError after `timeout` seconds.
    #[pyo3(signature = (source = None, tag = None, timeout = None))]
    fn recv(
        &self,
        py: Python<'_>,
        source: Option<&Bound<'_, PyAny>>,
        tag: Option<i32>,
        timeout: Option<f64>,
    ) -> PyResult<PyMessage> {
        receive(py, &self.enrolled, selection_of(source, tag)?, timeout)
    }

    /// Returns a message, or None if none has arrived.
    #[pyo3(signature = (source = None, tag = None))]
    fn try_recv(
        &self,
        py: Python<'_>,
        source: Option<&Bound<'_, PyAny>>,
        tag: Option<i32>,
    ) -> PyResult<Option<PyMessage>> {
        let message = self.enrolled.try_receive(py, selection_of(source, tag)?)?;
        Ok(message.map(|message| PyMessage::new(&self.enrolled, message)))
    }

    /// Waits for a message without blocking the event loop of asyncio.
    #[pyo3(signature = (source = None, tag = None))]
    fn arecv<'py>(
        slf: &Bound<'py, Self>,
        py: Python<'py>,
        source: Option<&Bound<'py, PyAny>>,
        tag: Option<i32>,
    ) -> PyResult<Bound<'py, PyAny>> {
        selection_of(source, tag)?;
        arecv(py, slf, source, tag)
    }

    /// Returns sender, tag and size of a message that has arrived, without receiving it, or None.
    #[pyo3(signature = (source = None, tag = None))]
    fn probe<'py>(
        &self,
        py: Python<'py>,
        source: Option<&Bound<'py, PyAny>>,
        tag: Option<i32>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let selection = selection_of(source, tag)?;
        let runtime = self.enrolled.runtime();
        let mut find_message = |inbox: &mut Inbox| {
            let message = inbox.iter().find(|message| selection.matches(message))?;
            Some((message.src, message.tag, message.body.len()))
        };
        let found = py.detach(|| runtime.check_inbox(&mut find_message));
        let Some((sender, tag, size)) = found else {
            return match runtime.is_connected() {
                true => Ok(None),
                false => Err(self.enrolled.exception(py, PvmError::SysErr.into())),
            };
        };
        records::make(py, "MessageInfo", (self.task_of(sender), tag, size)).map(Some)
    }

    /// Sends one message to several tasks, except this task.
    #[pyo3(signature = (tasks, tag, data = None))]
    fn send_many(
        &self,
        py: Python<'_>,
        tasks: &Bound<'_, PyAny>,
        tag: i32,
        data: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        group::send_to_many(py, &self.enrolled, &tids_of(tasks)?, tag, data)
    }

    /// Returns the group with this name. The group exists while it has members.
    fn group(&self, name: String) -> PyGroup {
        PyGroup::new(&self.enrolled, name)
    }

    /// Returns the names of all groups.
    fn groups(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let groups = self.enrolled.request(py, Vm::groups)?;
        let name_of = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        Ok(groups.iter().map(|group| name_of(&group.name)).collect())
    }

    /// Returns an iterator with one notice for the end of each of these tasks.
    fn watch_tasks(&self, py: Python<'_>, tasks: &Bound<'_, PyAny>) -> PyResult<PyNotices> {
        let tids = tids_of(tasks)?;
        let notices = self.enrolled.request(py, |vm| vm.watch_tasks(&tids))?;
        Ok(PyNotices::new(&self.enrolled, notices))
    }

    /// Returns an iterator with one notice for the departure or loss of each of these hosts.
    fn watch_hosts(&self, py: Python<'_>, hosts: &Bound<'_, PyAny>) -> PyResult<PyNotices> {
        let hosts = self.host_ids(py, hosts)?;
        let notices = self.enrolled.request(py, |vm| vm.watch_hosts(&hosts))?;
        Ok(PyNotices::new(&self.enrolled, notices))
    }

    /// Returns an iterator with a notice for each host that joins from now on.
    fn watch_new_hosts(&self, py: Python<'_>) -> PyResult<PyNotices> {
        let notices = self.enrolled.request(py, Vm::watch_new_hosts)?;
        Ok(PyNotices::new(&self.enrolled, notices))
    }

    /// Returns entries of the event log, beginning with the entry of this number.
    #[pyo3(signature = (first = 0, limit = 1000))]
    fn events<'py>(
        &self,
        py: Python<'py>,
        first: u64,
        limit: usize,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let (events, mut host_names) = self.enrolled.request(py, |vm| {
            let events = event_stream::read_log(vm, first, Some(limit))?;
            Ok((events, event_stream::host_names(vm)?))
        })?;
        events
            .iter()
            .map(|event| ShownEvent::new(event, &mut host_names).into_python(py))
            .collect()
    }

    /// Returns an iterator over events as they happen. With `first` it begins with the entry of
    /// this number. A task has one such iterator at a time.
    #[pyo3(signature = (first = None))]
    fn watch_events(&self, py: Python<'_>, first: Option<u64>) -> PyResult<PyEventStream> {
        PyEventStream::start(py, &self.enrolled, first)
    }

    /// Adds hosts. Each text has the format of a line of a host file, such as a host name.
    fn add_hosts<'py>(
        &self,
        py: Python<'py>,
        hosts: Vec<String>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let results = self
            .enrolled
            .long_request(py, move |vm| vm.add_hosts(&hosts))?;
        results
            .iter()
            .map(|added| match &added.result {
                Ok(host) => {
                    let host = host_record(py, host)?;
                    records::make(py, "AddedHost", (host, py.None()))
                }
                Err(code) => {
                    let error = errors::from_code(py, *code, added.reason.as_str());
                    records::make(py, "AddedHost", (py.None(), error.into_value(py)))
                }
            })
            .collect()
    }

    /// Removes hosts by name. Returns for each name None, or the error as an exception.
    fn delete_hosts<'py>(
        &self,
        py: Python<'py>,
        hosts: Vec<String>,
    ) -> PyResult<Vec<Option<Bound<'py, PyAny>>>> {
        let names = hosts.clone();
        let results = self
            .enrolled
            .long_request(py, move |vm| vm.delete_hosts(&names))?;
        let error_of = |(name, result): (&String, Result<(), PvmError>)| {
            let code = result.err()?;
            let reason = format!("{name} was not removed: {code}");
            let error = errors::from_code(py, code, reason);
            Some(error.into_value(py).into_bound(py).into_any())
        };
        Ok(hosts.iter().zip(results).map(error_of).collect())
    }

    /// Stops the whole virtual machine.
    fn halt(&self, py: Python<'_>) -> PyResult<()> {
        self.enrolled.long_request(py, Vm::halt)
    }

    /// Sends what is queued, and leaves the virtual machine.
    fn exit(&self, py: Python<'_>) -> PyResult<()> {
        self.enrolled.exit(py)
    }

    #[pyo3(signature = (source, tag, waker))]
    fn _watch(
        &self,
        source: Option<&Bound<'_, PyAny>>,
        tag: Option<i32>,
        waker: &PyLoopWaker,
    ) -> PyResult<PyWatch> {
        let messages = WatchedMessages::Selected(selection_of(source, tag)?);
        Ok(self.enrolled.arrivals()?.watch(messages, waker))
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        exception_type: &Bound<'_, PyAny>,
        _exception: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        if self.enrolled.runtime().is_connected() {
            let result = self.exit(py);
            // An exception of the block says more than one of the exit.
            if exception_type.is_none() {
                result?;
            }
        }
        Ok(false)
    }

    fn __repr__(&self) -> String {
        format!("<Vm, this task is {}>", self.enrolled.vm().tid())
    }
}

impl PyVm {
    /// Starts the tasks of a spawn.
    ///
    /// # Errors
    /// `SpawnError` if a task was not started.
    fn start<'py>(
        &self,
        py: Python<'py>,
        program: &str,
        spawn: Spawn,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let outcome = waits::run_request(py, move || spawn.start())?
            .map_err(|error| self.enrolled.exception(py, error))?;
        let tasks = outcome
            .tasks
            .iter()
            .map(|task| Bound::new(py, self.task_of(task.tid())).map(Bound::into_any))
            .collect::<PyResult<Vec<_>>>()?;
        match outcome.failed.is_empty() {
            true => Ok(tasks),
            false => Err(errors::from_spawn_failures(
                py,
                program,
                tasks,
                &outcome.failed,
            )),
        }
    }

    fn task_record<'py>(
        &self,
        py: Python<'py>,
        task: &TaskInfo,
        host_name: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let parent = task.parent.is_task().then(|| self.task_of(task.parent));
        let fields = (
            self.task_of(task.tid),
            parent,
            host_name,
            task.name.as_str(),
            task.namespace_pid,
            task.migrating,
            task.paused,
            task.suspended,
        );
        records::make(py, "TaskInfo", fields)
    }
}

/// Waits for a message.
///
/// # Errors
/// `TimeoutError` after the timeout, otherwise as [`Enrolled::receive`].
pub(crate) fn receive(
    py: Python<'_>,
    enrolled: &Arc<Enrolled>,
    selection: Match,
    timeout_s: Option<f64>,
) -> PyResult<PyMessage> {
    let deadline = waits::deadline_after(timeout_s)?;
    let message = enrolled.receive(py, selection, deadline)?;
    message
        .map(|message| PyMessage::new(enrolled, message))
        .ok_or_else(|| {
            PyTimeoutError::new_err(format!(
                "no such message has arrived within {} s",
                timeout_s.unwrap_or_default()
            ))
        })
}

/// Returns a coroutine that waits for a message.
pub(crate) fn arecv<'py>(
    py: Python<'py>,
    vm: &Bound<'py, PyVm>,
    source: Option<&Bound<'py, PyAny>>,
    tag: Option<i32>,
) -> PyResult<Bound<'py, PyAny>> {
    py.import("sempa_pvm._aio")?
        .call_method1("recv", (vm, source, tag))
}

fn selection_of(source: Option<&Bound<'_, PyAny>>, tag: Option<i32>) -> PyResult<Match> {
    selection(source.map(tid_of).transpose()?, tag)
}

fn host_record<'py>(py: Python<'py>, host: &HostEntry) -> PyResult<Bound<'py, PyAny>> {
    let fields = (
        host.id.tid().raw(),
        host.name.as_str(),
        host.arch.as_str(),
        host.speed,
    );
    records::make(py, "Host", fields)
}

fn utf8_of(path: PathBuf, argument: &str) -> PyResult<String> {
    path.into_os_string().into_string().map_err(|path| {
        PyValueError::new_err(format!("the {argument} {} is not UTF-8", path.display()))
    })
}
