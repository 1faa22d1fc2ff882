//! Reads the memory of other processes, and finds pages that cannot be read.

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;

/// Number of pages of which one call reads one byte each: the limit of the system call (IOV_MAX).
const PROBED_PAGES_PER_CALL: usize = 1024;

/// Fills the buffer with the memory of a process from `address` on. Areas without read permission
/// are read as well.
///
/// # Errors
/// The process has exited, or a page cannot be read.
pub(super) fn read_memory(pid: i32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
    match read_readable_memory(pid, address, buffer) {
        Err(e) if e.raw_os_error() == Some(libc::EFAULT) => {
            File::open(format!("/proc/{pid}/mem"))?.read_exact_at(buffer, address)
        }
        read_result => read_result,
    }
}

fn read_readable_memory(pid: i32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
    let mut read_bytes = 0;
    while read_bytes < buffer.len() {
        let remote_range = [RemoteIoVec {
            base: address as usize + read_bytes,
            len: buffer.len() - read_bytes,
        }];
        match process_vm_readv(
            Pid::from_raw(pid),
            &mut [IoSliceMut::new(&mut buffer[read_bytes..])],
            &remote_range,
        ) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(byte_count) => read_bytes += byte_count,
            Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Returns those of the pages at these addresses that cannot be read. Reads one byte of each page.
///
/// # Errors
/// The process has exited.
pub(super) fn unreadable_pages(pid: i32, pages: &[u64]) -> io::Result<Vec<u64>> {
    let mut unreadable = Vec::new();
    let mut rest = pages;
    while !rest.is_empty() {
        let batch = &rest[..rest.len().min(PROBED_PAGES_PER_CALL)];
        let remote_bytes: Vec<RemoteIoVec> = batch
            .iter()
            .map(|page| RemoteIoVec {
                base: *page as usize,
                len: 1,
            })
            .collect();
        let mut bytes = [0; PROBED_PAGES_PER_CALL];
        // The kernel reads up to the first page that is not readable for the process itself.
        let read_count = match process_vm_readv(
            Pid::from_raw(pid),
            &mut [IoSliceMut::new(&mut bytes[..batch.len()])],
            &remote_bytes,
        ) {
            Ok(byte_count) => byte_count,
            Err(Errno::EINTR) => continue,
            Err(Errno::ESRCH) => return Err(Errno::ESRCH.into()),
            Err(_) => 0,
        };
        if let Some(page) = batch.get(read_count) {
            match read_memory(pid, *page, &mut [0]) {
                Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Err(e),
                Err(_) => unreadable.push(*page),
                Ok(()) => {}
            }
            rest = &rest[read_count + 1..];
        } else {
            rest = &rest[batch.len()..];
        }
    }
    Ok(unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::pages::page_size;

    /// Pages that do not exist are found, wherever they are in the list, and no others.
    #[test]
    fn exactly_missing_pages_are_unreadable() {
        let page_bytes = page_size();
        let buffer = vec![1_u8; 3000 * page_bytes as usize];
        let buffer_start = (buffer.as_ptr() as u64).next_multiple_of(page_bytes);
        let mut pages: Vec<u64> = (0..2900)
            .map(|index| buffer_start + index * page_bytes)
            .collect();
        let pid = std::process::id().cast_signed();
        assert_eq!(unreadable_pages(pid, &pages).expect("it runs"), []);
        // Nothing is mapped at the lowest addresses.
        let missing = [1, 2, 3].map(|index| index * page_bytes);
        pages.insert(0, missing[0]);
        pages.insert(1500, missing[1]);
        pages.push(missing[2]);
        assert_eq!(unreadable_pages(pid, &pages).expect("it runs"), missing);
    }

    #[test]
    fn missing_process_is_an_error() {
        let error = unreadable_pages(i32::MAX, &[page_size()]).expect_err("no process has it");
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    }
}
