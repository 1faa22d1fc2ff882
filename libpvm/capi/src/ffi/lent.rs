//! Lists that a call leaves in the library's memory for the program to read: they stay until the next such call.

use crate::memory::Lent;
use std::ffi::{CString, c_char};
use std::sync::{Mutex, PoisonError};

/// Records for the program and the strings they point to.
pub(super) struct Records<T> {
    texts: Vec<CString>,
    records: Vec<T>,
}

impl<T> Records<T> {
    /// No records.
    pub(super) const fn new() -> Records<T> {
        Records {
            texts: Vec::new(),
            records: Vec::new(),
        }
    }

    /// Keeps a text and answers a pointer that stays good as long as the records. A NUL inside ends it.
    pub(super) fn text(&mut self, text: &str) -> *const c_char {
        let bytes: Vec<u8> = text.bytes().take_while(|byte| *byte != 0).collect();
        self.texts
            .push(CString::new(bytes).expect("no NUL is left"));
        self.texts
            .last()
            .map_or(std::ptr::null(), |text| text.as_ptr())
    }

    /// Adds a record.
    pub(super) fn push(&mut self, record: T) {
        self.records.push(record);
    }

    /// Number of records.
    pub(super) fn len(&self) -> i32 {
        self.records.len() as i32
    }
}

/// A place for the newest list of one call.
pub(super) struct Shelf<T>(Mutex<Lent<Records<T>>>);

impl<T> Shelf<T> {
    /// An empty place.
    pub(super) const fn new() -> Shelf<T> {
        Shelf(Mutex::new(Lent(Records::new())))
    }

    /// Drops the list before and lends the new one.
    pub(super) fn lend(&self, records: Records<T>) -> *mut T {
        let mut place = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *place = Lent(records);
        place.0.records.as_mut_ptr()
    }
}
