//! The mailbox of the virtual machine: messages under names, which all tasks can read.

use crate::content::body_of;
use crate::enrolled::Enrolled;
use crate::message::PyMessage;
use crate::records;
use crate::task::PyTask;
use pyo3::prelude::*;
use std::sync::Arc;

/// Flags of mailbox requests in `pvm3.h` (`PvmMbox…`).
const PERSISTENT: i32 = 1;
const MULTI_INSTANCE: i32 = 2;
const OVERWRITABLE: i32 = 4;
const FIRST_AVAILABLE: i32 = 8;
const READ_AND_DELETE: i32 = 16;
const WAIT_FOR_ENTRY: i32 = 32;

/// The mailbox of the virtual machine.
#[pyclass(name = "Mailbox", module = "sempa_pvm", frozen)]
pub(crate) struct PyMailbox {
    enrolled: Arc<Enrolled>,
}

impl PyMailbox {
    pub(crate) fn new(enrolled: &Arc<Enrolled>) -> Self {
        let enrolled = enrolled.clone();
        Self { enrolled }
    }
}

/// Returns the union of the flags that are set.
fn union_of(flags: &[(bool, i32)]) -> i32 {
    flags
        .iter()
        .filter(|(is_set, _)| *is_set)
        .fold(0, |union, (_, flag)| union | flag)
}

#[pymethods]
impl PyMailbox {
    /// Stores a content under a name and returns the index of the entry.
    #[pyo3(signature = (name, data, *, persistent = false, multi_instance = false, overwritable = false))]
    fn put(
        &self,
        py: Python<'_>,
        name: &str,
        data: &Bound<'_, PyAny>,
        persistent: bool,
        multi_instance: bool,
        overwritable: bool,
    ) -> PyResult<i32> {
        let flags = union_of(&[
            (persistent, PERSISTENT),
            (multi_instance, MULTI_INSTANCE),
            (overwritable, OVERWRITABLE),
        ]);
        let body = body_of(py, None, data)?;
        self.enrolled
            .request(py, |vm| vm.mailbox_put(name, flags, body))
    }

    /// Returns the message under a name. With `wait` the call waits for an entry, with `remove` it
    /// removes the entry, with `first` it accepts the first entry at or after `index`.
    #[pyo3(signature = (name, index = 0, *, wait = false, remove = false, first = false))]
    fn take(
        &self,
        py: Python<'_>,
        name: String,
        index: i32,
        wait: bool,
        remove: bool,
        first: bool,
    ) -> PyResult<PyMessage> {
        let flags = union_of(&[
            (first, FIRST_AVAILABLE),
            (remove, READ_AND_DELETE),
            (wait, WAIT_FOR_ENTRY),
        ]);
        let message = match wait {
            true => self
                .enrolled
                .long_request(py, move |vm| vm.mailbox_take(&name, index, flags))?,
            false => self
                .enrolled
                .request(py, |vm| vm.mailbox_take(&name, index, flags))?,
        };
        Ok(PyMessage::new(&self.enrolled, message))
    }

    /// Removes the entry with this index under a name.
    #[pyo3(signature = (name, index = 0))]
    fn delete(&self, py: Python<'_>, name: &str, index: i32) -> PyResult<()> {
        self.enrolled
            .request(py, |vm| vm.mailbox_delete(name, index))
    }

    /// Returns the entries whose name matches a pattern; the empty pattern matches all names.
    #[pyo3(signature = (pattern = ""))]
    fn list<'py>(&self, py: Python<'py>, pattern: &str) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let classes = self.enrolled.request(py, |vm| vm.mailbox_list(pattern))?;
        let mut entries = Vec::new();
        for class in &classes {
            for (index, owner, flags) in &class.entries {
                let owner = owner.is_task().then(|| PyTask::new(&self.enrolled, *owner));
                let is_persistent = flags & PERSISTENT != 0;
                let fields = (class.name.as_str(), *index, owner, is_persistent);
                entries.push(records::make(py, "MailboxEntry", fields)?);
            }
        }
        Ok(entries)
    }
}
