//! Groups of tasks, and messages to several tasks.

use crate::content::body_of;
use crate::enrolled::{Enrolled, check_tag};
use crate::errors;
use crate::task::PyTask;
use libpvm::proto::message::{CTX_BASE, Message};
use pyo3::prelude::*;
use sempa_proto::Tid;
use std::sync::Arc;

/// A group of tasks, by its name. As a context manager it joins the group and leaves it.
#[pyclass(name = "Group", module = "sempa_pvm", frozen)]
pub(crate) struct PyGroup {
    enrolled: Arc<Enrolled>,
    name: String,
}

impl PyGroup {
    pub(crate) fn new(enrolled: &Arc<Enrolled>, name: String) -> Self {
        Self {
            enrolled: enrolled.clone(),
            name,
        }
    }

    fn member_tids(&self, py: Python<'_>) -> PyResult<Vec<Option<Tid>>> {
        self.enrolled.request(py, |vm| vm.group_members(&self.name))
    }
}

#[pymethods]
impl PyGroup {
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Joins the group and returns this task's instance number, the lowest free number.
    fn join(&self, py: Python<'_>) -> PyResult<i32> {
        self.enrolled.request(py, |vm| vm.join_group(&self.name))
    }

    /// Ends this task's membership.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        self.enrolled.request(py, |vm| vm.leave_group(&self.name))
    }

    /// Waits until `count` members have called barrier(); None stands for all current members.
    #[pyo3(signature = (count = None))]
    fn barrier(&self, py: Python<'_>, count: Option<u32>) -> PyResult<()> {
        let name = self.name.clone();
        self.enrolled
            .long_request(py, move |vm| vm.barrier(&name, count))
    }

    /// Returns the members by instance number; None stands for a free number.
    fn members(&self, py: Python<'_>) -> PyResult<Vec<Option<PyTask>>> {
        let tids = self.member_tids(py)?;
        Ok(tids
            .into_iter()
            .map(|tid| tid.map(|tid| PyTask::new(&self.enrolled, tid)))
            .collect())
    }

    /// Sends a message to all members except this task. This task need not be a member.
    #[pyo3(signature = (tag, data = None))]
    fn broadcast(&self, py: Python<'_>, tag: i32, data: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        check_tag(tag)?;
        let members: Vec<Tid> = self.member_tids(py)?.into_iter().flatten().collect();
        send_to_many(py, &self.enrolled, &members, tag, data)
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.member_tids(py)?.into_iter().flatten().count())
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().join(slf.py())?;
        Ok(slf)
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        exception_type: &Bound<'_, PyAny>,
        _exception: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let result = self.leave(py);
        // An exception of the block says more than one of the call that leaves the group.
        if exception_type.is_none() {
            result?;
        }
        Ok(false)
    }

    fn __repr__(&self) -> String {
        format!("<Group '{}'>", self.name)
    }
}

/// Sends one message to several tasks, except this task. Large contents are copied once.
pub(crate) fn send_to_many(
    py: Python<'_>,
    enrolled: &Enrolled,
    tids: &[Tid],
    tag: i32,
    data: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    check_tag(tag)?;
    let runtime = enrolled.runtime();
    let none = py.None();
    let body = body_of(py, Some(runtime), data.unwrap_or(none.bind(py)))?;
    let own_tid = runtime.tid();
    let receivers: Vec<Tid> = tids.iter().copied().filter(|tid| *tid != own_tid).collect();
    let message = Message {
        src: own_tid,
        dst: Tid::NONE,
        ctx: CTX_BASE,
        tag,
        wid: 0,
        enc: body.enc,
        body: body.bytes,
    };
    py.detach(|| runtime.send_to_many(&message, &receivers))
        .map_err(|code| match runtime.is_connected() {
            true => errors::from_code(
                py,
                code,
                format!(
                    "sending to {} tasks: {code}; some of them may have got it",
                    receivers.len()
                ),
            ),
            false => enrolled.exception(py, code.into()),
        })
}
