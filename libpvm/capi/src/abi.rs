//! The structures and constants of `pvm3.h` and `pvmtev.h` in their C memory layout.
//!
//! The assertions at the end check the sizes at compile time.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering::Relaxed};

/// An entry of the host list of `pvm_config` (`struct pvmhostinfo`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct HostInfo {
    pub(crate) tid: c_int,
    pub(crate) name: *const c_char,
    pub(crate) arch: *const c_char,
    pub(crate) speed: c_int,
    pub(crate) dsig: c_int,
}

/// An entry of the task list of `pvm_tasks` (`struct pvmtaskinfo`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TaskInfo {
    pub(crate) tid: c_int,
    pub(crate) parent: c_int,
    pub(crate) host: c_int,
    pub(crate) flag: c_int,
    pub(crate) program: *const c_char,
    pub(crate) pid: c_int,
}

/// A message header as `pvm_getminfo` returns it (`struct pvmminfo`).
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct MsgInfo {
    pub(crate) len: c_int,
    pub(crate) ctx: c_int,
    pub(crate) tag: c_int,
    pub(crate) wid: c_int,
    pub(crate) enc: c_int,
    pub(crate) crc: c_int,
    pub(crate) src: c_int,
    pub(crate) dst: c_int,
}

/// A mailbox class as `pvm_getmboxinfo` lists it (`struct pvmmboxinfo`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MboxInfo {
    pub(crate) name: *const c_char,
    pub(crate) entries: c_int,
    pub(crate) indices: *const c_int,
    pub(crate) owners: *const c_int,
    pub(crate) flags: *const c_int,
}

/// Size of a trace mask in bytes, including the terminating NUL.
pub(crate) const MASK_BYTES: usize = 36;

/// Trace and output settings (`struct Pvmtracer`). The program can read and write them at any time,
/// so the fields are atomic.
#[repr(C)]
pub(crate) struct Tracer {
    pub(crate) trace_tid: AtomicI32,
    pub(crate) trace_ctx: AtomicI32,
    pub(crate) trace_tag: AtomicI32,
    pub(crate) out_tid: AtomicI32,
    pub(crate) out_ctx: AtomicI32,
    pub(crate) out_tag: AtomicI32,
    pub(crate) trace_buf: AtomicI32,
    pub(crate) trace_opt: AtomicI32,
    mask: [AtomicU8; MASK_BYTES],
}

impl Tracer {
    pub(crate) const fn new() -> Self {
        Self {
            trace_tid: AtomicI32::new(0),
            trace_ctx: AtomicI32::new(0),
            trace_tag: AtomicI32::new(0),
            out_tid: AtomicI32::new(0),
            out_ctx: AtomicI32::new(0),
            out_tag: AtomicI32::new(0),
            trace_buf: AtomicI32::new(0),
            trace_opt: AtomicI32::new(0),
            mask: [const { AtomicU8::new(0) }; MASK_BYTES],
        }
    }

    /// Returns a copy of the mask, including the terminating NUL.
    pub(crate) fn mask(&self) -> [u8; MASK_BYTES] {
        std::array::from_fn(|i| self.mask[i].load(Relaxed))
    }

    /// Copies `new_mask` into the settings. Excess bytes are ignored; the last byte stays NUL.
    pub(crate) fn set_mask(&self, new_mask: &[u8]) {
        for (mask_byte, byte) in self.mask.iter().zip(new_mask.iter().take(MASK_BYTES - 1)) {
            mask_byte.store(*byte, Relaxed);
        }
    }
}

pub(crate) const NO_EVENTS_MASK: [u8; MASK_BYTES] = {
    let mut mask = [b'@'; MASK_BYTES];
    mask[MASK_BYTES - 1] = 0;
    mask
};

pub(crate) type TimeVal = libc::timeval;

/// Description of a trace event (`struct Pvmtevinfo`).
#[repr(C)]
pub(crate) struct EventInfo {
    pub(crate) name: *const c_char,
    pub(crate) desc_status: AtomicI32,
    pub(crate) mark: [i64; 2],
    pub(crate) total: [i64; 2],
    pub(crate) count: AtomicI32,
}

/// Description of a data item of trace events (`struct Pvmtevdid`).
#[repr(C)]
pub(crate) struct DataId {
    pub(crate) name: *const c_char,
    pub(crate) desc: *const c_char,
}

const _: () = {
    assert!(
        size_of::<HostInfo>() == 32 && size_of::<TaskInfo>() == 32 && size_of::<MsgInfo>() == 32
    );
    assert!(size_of::<MboxInfo>() == 40 && size_of::<Tracer>() == 68);
    assert!(size_of::<EventInfo>() == 56 && size_of::<DataId>() == 16);
};
