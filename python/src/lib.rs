//! The native part of the Python package `sempa_pvm`: the module `sempa_pvm._native`.
//!
//! The classes wrap the Rust API of `libpvm`. Each call that may wait releases the interpreter and
//! handles Python's signals while it waits (module `waits`). The package in `python/sempa_pvm` adds
//! the exceptions, the records and the parts for asyncio.

mod array_header;
mod arrivals;
mod broker;
mod buffer;
mod content;
mod enrolled;
mod errors;
mod event_stream;
mod group;
mod mailbox;
mod message;
mod notices;
mod packer;
mod records;
mod task;
mod unpacker;
mod vm;
mod waits;
mod work;

/// PVM tasks in Python. Use the package `sempa_pvm`, which exports these classes.
#[pyo3::pymodule(name = "_native")]
mod native {
    #[pymodule_export]
    use crate::arrivals::PyLoopWaker;
    #[pymodule_export]
    use crate::arrivals::PyWatch;
    #[pymodule_export]
    use crate::broker::PyMember;
    #[pymodule_export]
    use crate::content::PyContent;
    #[pymodule_export]
    use crate::event_stream::PyEventStream;
    #[pymodule_export]
    use crate::group::PyGroup;
    #[pymodule_export]
    use crate::mailbox::PyMailbox;
    #[pymodule_export]
    use crate::message::PyMessage;
    #[pymodule_export]
    use crate::notices::PyNotices;
    #[pymodule_export]
    use crate::packer::PyPacker;
    #[pymodule_export]
    use crate::task::PyTask;
    #[pymodule_export]
    use crate::unpacker::PyUnpacker;
    #[pymodule_export]
    use crate::vm::PyVm;
    #[pymodule_export]
    use crate::work::PyContext;
    #[pymodule_export]
    use crate::work::PyRun;
    #[pymodule_export]
    use crate::work::{work_in_process, work_master, work_run_of_worker, work_serve, work_stop};
}
