//! Received messages, and the contents that they may have.

use crate::array_header::ArrayHeader;
use crate::buffer::ExportedArray;
use crate::content::OBJECT_MAGIC;
use crate::enrolled::Enrolled;
use crate::errors;
use crate::task::PyTask;
use crate::unpacker::PyUnpacker;
use libpvm::Content;
use libpvm::proto::body::Encoding;
use pyo3::prelude::*;
use sempa_proto::{Message, PvmError};
use std::sync::Arc;

/// A received message. Its memory is read-only and stays as long as a Python object refers to it.
#[pyclass(name = "Message", module = "sempa_pvm", frozen)]
pub(crate) struct PyMessage {
    enrolled: Arc<Enrolled>,
    message: Message,
}

impl PyMessage {
    pub(crate) fn new(enrolled: &Arc<Enrolled>, message: Message) -> Self {
        Self {
            enrolled: enrolled.clone(),
            message,
        }
    }

    fn description(&self) -> String {
        format!(
            "the message from {} with tag {}",
            self.message.src, self.message.tag
        )
    }

    fn bad_message(&self, py: Python<'_>, content: &str, detail: &str) -> PyErr {
        let reason = format!("{} contains no {content}: {detail}", self.description());
        errors::from_code(py, PvmError::BadMsg, reason)
    }
}

#[pymethods]
impl PyMessage {
    /// The task that sent the message.
    #[getter]
    fn sender(&self) -> PyTask {
        PyTask::new(&self.enrolled, self.message.src)
    }

    #[getter]
    fn tag(&self) -> i32 {
        self.message.tag
    }

    /// The content as a read-only memoryview of bytes, without a copy.
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        ExportedArray::from_bytes(self.message.body.clone()).into_memoryview(py)
    }

    /// Returns the array that the sender passed to send_array, as a read-only memoryview with its
    /// format and shape, without a copy.
    fn array<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let body = &self.message.body;
        if self.message.enc != Encoding::Raw.enc_field() {
            return Err(self.bad_message(py, "array", "it was not sent with send_array"));
        }
        let (header, header_bytes) =
            ArrayHeader::decode(body).map_err(|detail| self.bad_message(py, "array", &detail))?;
        ExportedArray::new(header, body.slice(header_bytes..)).into_memoryview(py)
    }

    /// Returns a copy of the object that the sender passed to send_object. Reading the object runs
    /// code that the sender chooses.
    fn object<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let body = &self.message.body;
        if !body.starts_with(&OBJECT_MAGIC) {
            return Err(self.bad_message(py, "object", "it was not sent with send_object"));
        }
        let pickle = ExportedArray::from_bytes(body.slice(OBJECT_MAGIC.len()..));
        py.import("pickle")?
            .call_method1("loads", (pickle.into_memoryview(py)?,))
    }

    /// Returns a reader of the PVM items in the message.
    fn unpacker(&self, py: Python<'_>) -> PyResult<PyUnpacker> {
        let unpacker = self
            .message
            .items()
            .map_err(|error| errors::from_error(py, &error))?;
        let encoding = Encoding::from_enc_field(self.message.enc).unwrap_or_default();
        Ok(PyUnpacker::new(unpacker, encoding, self.description()))
    }

    fn __len__(&self) -> usize {
        self.message.body.len()
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, pyo3::types::PyBytes> {
        pyo3::types::PyBytes::new(py, &self.message.body)
    }

    fn __repr__(&self) -> String {
        format!(
            "<Message of {} bytes from {} with tag {}>",
            self.message.body.len(),
            self.message.src,
            self.message.tag
        )
    }
}
