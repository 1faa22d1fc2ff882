//! What keeps a CRIU that waits for an answer from asking for news without a pause.

use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// What CRIU loads. One that does not (because it is linked statically) has no patience, and needs none to be right.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/patience.so"));

/// What CRIU gets.
#[derive(Debug)]
pub(in super::super) struct Patience {
    library: File,
    open: File,
}

impl Patience {
    /// The descriptors, which have to keep their numbers in CRIU.
    pub(in super::super) fn descriptors(&self) -> [&File; 2] {
        [&self.library, &self.open]
    }

    /// What CRIU's environment has to say.
    pub(in super::super) fn variables(&self) -> [(&'static str, String); 2] {
        [
            ("LD_PRELOAD", format!("/proc/self/fd/{}", self.library.as_raw_fd())),
            ("SEMPA_OPEN_QUESTIONS", self.open.as_raw_fd().to_string()),
        ]
    }
}

/// How many questions of CRIU have no answer yet, where its library looks.
#[derive(Debug)]
pub(super) struct Open {
    file: File,
    number: u32,
}

impl Open {
    /// None so far.
    pub(super) fn new() -> io::Result<(Open, Patience)> {
        let new = |name| memfd_create(name, MFdFlags::MFD_CLOEXEC).map(|file: OwnedFd| File::from(file));
        let (mut library, open) = (new(c"sempa-patience")?, new(c"sempa-open")?);
        library.write_all(LIBRARY)?;
        open.write_all_at(&0u32.to_ne_bytes(), 0)?;
        let file = open.try_clone()?;
        Ok((Open { file, number: 0 }, Patience { library, open }))
    }

    /// So many.
    pub(super) fn set(&mut self, number: usize) -> io::Result<()> {
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        if self.number != number {
            self.file.write_all_at(&number.to_ne_bytes(), 0)?;
            self.number = number;
        }
        Ok(())
    }
}
