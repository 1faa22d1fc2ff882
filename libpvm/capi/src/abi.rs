//! The structures and numbers of `pvm3.h`, as memory lies in the program.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering::Relaxed};

/// A host, as `pvm_config` lists it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct HostInfo {
    pub(crate) tid: c_int,
    pub(crate) name: *const c_char,
    pub(crate) arch: *const c_char,
    pub(crate) speed: c_int,
    pub(crate) dsig: c_int,
}

/// A task, as `pvm_tasks` lists it.
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

/// The header of a message, as `pvm_getminfo` shows it.
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

/// A class of the mailbox, as `pvm_getmboxinfo` lists it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MboxInfo {
    pub(crate) name: *const c_char,
    pub(crate) entries: c_int,
    pub(crate) indices: *const c_int,
    pub(crate) owners: *const c_int,
    pub(crate) flags: *const c_int,
}

/// Bytes of a trace mask, with its final NUL.
pub(crate) const MASK_BYTES: usize = 36;

/// Trace and output settings (`struct Pvmtracer`); a program can look at them and change them.
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
    /// Nothing set.
    pub(crate) const fn new() -> Tracer {
        Tracer {
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

    /// The mask with its NUL.
    pub(crate) fn mask(&self) -> [u8; MASK_BYTES] {
        std::array::from_fn(|i| self.mask[i].load(Relaxed))
    }

    /// Takes over a mask; the last byte stays NUL.
    pub(crate) fn set_mask(&self, mask: &[u8]) {
        for (place, byte) in self.mask.iter().zip(mask.iter().take(MASK_BYTES - 1)) {
            place.store(*byte, Relaxed);
        }
    }
}

/// A mask in which no event is enabled.
pub(crate) const EMPTY_MASK: [u8; MASK_BYTES] = {
    let mut mask = [b'@'; MASK_BYTES];
    mask[MASK_BYTES - 1] = 0;
    mask
};

/// `struct timeval`.
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
