//! Lists that a call returns in the library's memory. A list stays valid until the next call of the
//! same kind.

use crate::memory::PointedToByC;
use std::ffi::{CString, c_char};
use std::sync::{Mutex, PoisonError};

/// Records for the program, and the strings to which they point.
pub(super) struct RecordList<T> {
    texts: Vec<CString>,
    records: Vec<T>,
}

impl<T> RecordList<T> {
    pub(super) const fn new() -> RecordList<T> {
        RecordList {
            texts: Vec::new(),
            records: Vec::new(),
        }
    }

    /// Stores a text and returns a pointer that is valid while the records exist. The text ends at
    /// its first NUL.
    pub(super) fn add_text(&mut self, text: &str) -> *const c_char {
        let bytes: Vec<u8> = text.bytes().take_while(|byte| *byte != 0).collect();
        self.texts
            .push(CString::new(bytes).expect("no NUL is left"));
        self.texts
            .last()
            .map_or(std::ptr::null(), |text| text.as_ptr())
    }

    pub(super) fn push(&mut self, record: T) {
        self.records.push(record);
    }

    pub(super) fn len(&self) -> i32 {
        self.records.len() as i32
    }
}

/// The list that the latest call of one kind returned; keeps its memory valid for the program.
pub(super) struct ReturnedList<T>(Mutex<PointedToByC<RecordList<T>>>);

impl<T> ReturnedList<T> {
    pub(super) const fn new() -> ReturnedList<T> {
        ReturnedList(Mutex::new(PointedToByC(RecordList::new())))
    }

    /// Drops the previous list, stores the new one and returns a pointer to its records.
    pub(super) fn store(&self, records: RecordList<T>) -> *mut T {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *slot = PointedToByC(records);
        slot.0.records.as_mut_ptr()
    }
}
