//! Lists that a call returns in the library's memory. A list stays valid until the next call of the
//! same function.

use crate::memory::COwnedMemory;
use std::ffi::{CString, c_char};
use std::sync::{Mutex, PoisonError};

/// Records that are returned to the program, and the strings to which the records point.
pub(super) struct RecordList<T> {
    owned_texts: Vec<CString>,
    records: Vec<T>,
}

impl<T> RecordList<T> {
    pub(super) const fn new() -> Self {
        Self {
            owned_texts: Vec::new(),
            records: Vec::new(),
        }
    }

    /// Stores a text and returns a pointer that is valid while the records exist. The text ends at
    /// its first NUL.
    pub(super) fn add_text(&mut self, text: &str) -> *const c_char {
        let bytes: Vec<u8> = text.bytes().take_while(|byte| *byte != 0).collect();
        self.owned_texts
            .push(CString::new(bytes).expect("no NUL is left"));
        self.owned_texts
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

/// The list that the most recent call of one function returned. The list owns the memory that the
/// program reads.
pub(super) struct ReturnedList<T>(Mutex<COwnedMemory<RecordList<T>>>);

impl<T> ReturnedList<T> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(COwnedMemory(RecordList::new())))
    }

    /// Drops the previous list, stores the new one and returns a pointer to its records.
    pub(super) fn store(&self, records: RecordList<T>) -> *mut T {
        let mut stored_list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *stored_list = COwnedMemory(records);
        stored_list.0.records.as_mut_ptr()
    }
}
