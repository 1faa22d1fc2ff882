//! Undocumented exports of PVM's library that no known program uses.
//!
//! If this library has the feature of such a function, the function is implemented. A function that
//! returns or takes PVM's internal structures, which do not exist in this library, returns null or
//! `PvmNotImpl`.

#![allow(unsafe_code)]

use super::zero_on_success;
use crate::memory::{ProgramStr, Strided, write_c_string};
use crate::session::{self, lock, log_stderr, value_or_report};
use crate::{control, env, names, process, send};
use libpvm::Runtime;
use libpvm::runtime::runtime_paths;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;

macro_rules! without_structures {
    ($($name:ident)*) => {$(
        /// Returns null: PVM would return an internal structure that does not exist in this
        /// library.
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> *mut c_void {
            std::ptr::null_mut()
        }
    )*};
}

macro_rules! without_meaning {
    ($($name:ident)*) => {$(
        /// Returns `PvmNotImpl`: PVM's function processes an internal structure that does not exist
        /// in this library.
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            PvmError::NotImpl.code()
        }
    )*};
}

without_structures! {
    da_new fr_new fr_snew midtobuf pmsg_new ttpcb_creat ttpcb_find ttpcb_new wait_find wait_get wait_new
}

without_meaning! {
    check_for_exit check_routeadd check_routedelete da_ref da_unref enc_trc_fin enc_trc_hdr fr_unref mesg_input
    msendrecv ogm_complete pmsg_decmore pmsg_dump pmsg_extend pmsg_pack pmsg_packbody pmsg_setenc pmsg_setlen
    pmsg_unpack pmsg_unref post_routedelete ttpcb_dead ttpcb_delete ttpcb_dump ttpcb_dumpall wait_delete wait_dump
    wait_dumpall wait_init
}

/// Creates a buffer and returns its number.
#[unsafe(no_mangle)]
extern "C" fn umbuf_new(encoding: c_int) -> c_int {
    super::buffers::create_buffer(encoding).unwrap_or_else(PvmError::code)
}

/// Frees a buffer; returns 0 or an error code.
#[unsafe(no_mangle)]
extern "C" fn umbuf_free(mid: c_int) -> c_int {
    zero_on_success(lock().free_buffer(mid)).unwrap_or_else(PvmError::code)
}

/// Writes number, tag, source and length of a buffer to the log.
#[unsafe(no_mangle)]
extern "C" fn umbuf_dump(mid: c_int, _level: c_int) -> c_int {
    let session = lock();
    let line = session.buffers.get(mid).map(|buffer| {
        format!(
            "mid {mid} tag {} src {:x} length {}\n",
            buffer.tag,
            buffer.src,
            buffer.len()
        )
    });
    drop(session);
    log_stderr(
        &line.unwrap_or_else(|error| format!("mid {mid}: {error}\n")),
        true,
    );
    0
}

/// Writes the number of buffers to the log.
#[unsafe(no_mangle)]
extern "C" fn umbuf_list(_level: c_int) -> c_int {
    let count = lock().buffers.count();
    log_stderr(&format!("{count} message buffers\n"), true);
    0
}

/// Does nothing. In PVM's library, the function adds a descriptor to the set of polled descriptors;
/// in this library the I/O thread polls all descriptors.
#[unsafe(no_mangle)]
extern "C" fn pvm_fd_add(_fd: c_int, _set: c_int) -> c_int {
    0
}

/// Does nothing, as [`pvm_fd_add`]: the I/O thread polls all descriptors.
#[unsafe(no_mangle)]
extern "C" fn pvm_fd_delete(_fd: c_int, _set: c_int) -> c_int {
    0
}

/// Handles the message in a buffer as if the message had arrived with the tag `tag`.
fn handle_control_message(mid: c_int, tag: c_int) -> PvmResult<i32> {
    let rt: Runtime = session::runtime()?;
    let mut message = send::buffer_as_message(mid)?;
    message.tag = tag;
    control::handle_control_message(&rt, &message);
    Ok(0)
}

macro_rules! control_messages {
    ($($name:ident $tag:path;)*) => {$(
        /// Handles the control message in a buffer.
        #[unsafe(no_mangle)]
        extern "C" fn $name(mid: c_int) -> c_int {
            handle_control_message(mid, $tag).unwrap_or_else(PvmError::code)
        }
    )*};
}

control_messages! {
    pvm_tc_noop control::TC_NOOP;
    pvm_tc_settrace control::TC_SETTRACE;
    pvm_tc_settmask control::TC_SETTMASK;
    pvm_tc_settrcbuf control::TC_SETTRCBUF;
    pvm_tc_settrcopt control::TC_SETTRCOPT;
    pvm_tc_siblings control::TC_SIBLINGS;
}

/// Sends a buffer to several tasks.
///
/// # Safety
/// `tids` must be null or contain `count` ints.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmmcast(mid: c_int, tids: *const c_int, count: c_int, tag: c_int) -> c_int {
    // SAFETY: by this function's contract.
    let tids = unsafe { Strided::new(tids, count, 1) };
    let result = tids.and_then(|tids| {
        zero_on_success(send::with_send_buffer(mid, || {
            send::multicast(&tids.to_vec(), tag)
        }))
    });
    value_or_report("pvmmcast", result)
}

/// Sends a buffer. If `mid` is 0 or negative, takes in the messages that have arrived instead.
#[unsafe(no_mangle)]
extern "C" fn mroute(mid: c_int, tid: c_int, tag: c_int, _time: *const c_void) -> c_int {
    let send_or_take_in = || {
        if mid <= 0 {
            crate::receive::take_in_all(&session::runtime()?);
            return Ok(0);
        }
        zero_on_success(send::with_send_buffer(mid, || {
            send::send_active_buffer(tid, tag)
        }))
    };
    value_or_report("mroute", send_or_take_in())
}

/// Returns the names of the bits of a debug mask.
#[unsafe(no_mangle)]
extern "C" fn debug_flags(mask: c_int) -> *const c_char {
    static TEXT: Mutex<Option<crate::memory::COwnedMemory<CString>>> = Mutex::new(None);
    store_text(&TEXT, names::debug_bit_names(mask))
}

fn store_text(
    stored_text: &Mutex<Option<crate::memory::COwnedMemory<CString>>>,
    text: String,
) -> *const c_char {
    let text = CString::new(text.replace('\0', "")).expect("no NUL is left");
    let pointer = text.as_ptr();
    *stored_text
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner) =
        Some(crate::memory::COwnedMemory(text));
    pointer
}

macro_rules! wire_numbers {
    ($($get:ident $put:ident $t:ty;)*) => {$(
        /// Reads a big-endian number; 0 for null.
        ///
        /// # Safety
        /// `place` must be null or contain the bytes of the number.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $get(place: *const u8) -> c_int {
            const BYTES: usize = size_of::<$t>();
            // SAFETY: by this function's contract; bytes need no alignment.
            unsafe { place.cast::<[u8; BYTES]>().as_ref() }.map_or(0, |bytes| <$t>::from_be_bytes(*bytes) as c_int)
        }

        /// Writes a number in big-endian order.
        ///
        /// # Safety
        /// `place` must be null or have space for the bytes of the number.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $put(place: *mut u8, number: c_int) -> c_int {
            const BYTES: usize = size_of::<$t>();
            // SAFETY: as above, by this function's contract.
            if let Some(bytes) = unsafe { place.cast::<[u8; BYTES]>().as_mut() } {
                *bytes = (number as $t).to_be_bytes();
            }
            0
        }
    )*};
}

wire_numbers! {
    pvmget32 pvmput32 u32;
    pvmget16 pvmput16 u16;
    pvmget8 pvmput8 u8;
}

/// Continues the CRC-32 `crc` over these bytes. Returns the new CRC-32.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmcrcappend(bytes: *const c_char, count: c_int, crc: c_uint) -> c_uint {
    const POLYNOMIAL: u32 = 0xedb8_8320;
    // SAFETY: by this function's contract.
    let bytes = unsafe { Strided::<u8>::new(bytes.cast(), count, 1) };
    let bytes = bytes.map_or_else(|_| Vec::new(), |bytes| bytes.to_vec());
    bytes.iter().fold(crc, |crc, byte| {
        let shift_bit = |crc: u32, _| {
            if crc & 1 == 1 {
                crc >> 1 ^ POLYNOMIAL
            } else {
                crc >> 1
            }
        };
        (0..8).fold(crc ^ u32::from(*byte), shift_bit)
    })
}

/// Copies a string into memory of the C library; null if no memory is available.
fn copy_string_to_malloc(text: &[u8]) -> *mut c_char {
    // SAFETY: `malloc` returns space for the text and its NUL, or null.
    unsafe {
        let copy = libc::malloc(text.len() + 1).cast::<c_char>();
        if !copy.is_null() {
            write_c_string(copy, text);
        }
        copy
    }
}

/// Returns the entries of an environment.
///
/// # Safety
/// `list` must be null or a list of strings that ends with null.
unsafe fn env_entries(list: *mut *mut c_char) -> Vec<*mut c_char> {
    let mut entries = Vec::new();
    // SAFETY: the caller's list ends with null.
    unsafe {
        while !list.is_null() && !(*list.add(entries.len())).is_null() {
            entries.push(*list.add(entries.len()));
        }
    }
    entries
}

/// Copies pointers into a null-terminated list in memory of the C library. Returns null if no
/// memory is available.
fn copy_list_to_malloc(entries: &[*mut c_char]) -> *mut *mut c_char {
    // SAFETY: `calloc` returns space for all entries and the terminating null, or null.
    unsafe {
        let list = libc::calloc(entries.len() + 1, size_of::<*mut c_char>()).cast::<*mut c_char>();
        if !list.is_null() {
            std::ptr::copy_nonoverlapping(entries.as_ptr(), list, entries.len());
        }
        list
    }
}

/// Copies an environment. The caller must free the copy with `pvmfreeenv`.
///
/// # Safety
/// `list` must be null or a list of strings that ends with null.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmcopyenv(list: *mut *mut c_char) -> *mut *mut c_char {
    // SAFETY: by this function's contract.
    let entries = unsafe { env_entries(list) };
    // SAFETY: every entry is a string.
    let copies: Vec<*mut c_char> = entries
        .iter()
        .map(|e| copy_string_to_malloc(unsafe { CStr::from_ptr(*e) }.to_bytes()))
        .collect();
    copy_list_to_malloc(&copies)
}

/// Sets `NAME=value` in an environment that `pvmcopyenv` created. Returns 0; −1 if a pointer is
/// null or `setting` contains no `=`.
///
/// # Safety
/// `environment` must be null or point to an environment that `pvmcopyenv` created, and `setting`
/// must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmenvinsert(
    environment: *mut *mut *mut c_char,
    setting: *const c_char,
) -> c_int {
    // SAFETY: by this function's contract.
    let (environment, setting) = unsafe { (environment.as_mut(), ProgramStr::new(setting)) };
    let (Some(environment), Ok(setting)) = (environment, setting) else {
        return -1;
    };
    let Some(name) = setting.to_bytes().iter().position(|byte| *byte == b'=') else {
        return -1;
    };
    let name = &setting.to_bytes()[..=name];
    // SAFETY: the list and its strings were allocated by `pvmcopyenv`.
    unsafe {
        let mut entries = env_entries(*environment);
        let copy = copy_string_to_malloc(setting.to_bytes());
        match entries
            .iter()
            .position(|e| CStr::from_ptr(*e).to_bytes().starts_with(name))
        {
            Some(index) => libc::free(std::mem::replace(&mut entries[index], copy).cast()),
            None => entries.push(copy),
        }
        let list = copy_list_to_malloc(&entries);
        libc::free(std::mem::replace(environment, list).cast());
    }
    0
}

/// Frees the list and the strings of an environment.
///
/// # Safety
/// `list` must be null or an environment made by `pvmcopyenv`.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmfreeenv(list: *mut *mut c_char) -> c_int {
    // SAFETY: by this function's contract; list and strings were allocated by the C library.
    unsafe {
        env_entries(list)
            .into_iter()
            .for_each(|entry| libc::free(entry.cast()));
        libc::free(list.cast());
    }
    0
}

/// Returns the user's home directory.
#[unsafe(no_mangle)]
extern "C" fn pvmgethome() -> *const c_char {
    static TEXT: Mutex<Option<crate::memory::COwnedMemory<CString>>> = Mutex::new(None);
    store_text(
        &TEXT,
        env::read_var("HOME").unwrap_or_else(|| "/".to_string()),
    )
}

/// Returns the path of the daemon's executable.
#[unsafe(no_mangle)]
extern "C" fn pvmgetpvmd() -> *const c_char {
    static TEXT: Mutex<Option<crate::memory::COwnedMemory<CString>>> = Mutex::new(None);
    store_text(
        &TEXT,
        crate::start::daemon_executable()
            .to_string_lossy()
            .into_owned(),
    )
}

/// Returns the path of the socket of this user's daemon; empty if the value of `PVM_VMID` is
/// invalid.
#[unsafe(no_mangle)]
extern "C" fn pvmdsockfile() -> *const c_char {
    static TEXT: Mutex<Option<crate::memory::COwnedMemory<CString>>> = Mutex::new(None);
    let paths = runtime_paths(process::real_uid() as u32, env::read_var);
    store_text(
        &TEXT,
        paths.map_or_else(
            |_| String::new(),
            |paths| paths.daemon_socket_path().to_string_lossy().into_owned(),
        ),
    )
}

/// Number of bytes per line of `pvmhdump`.
const DUMP_LINE_BYTES: usize = 16;

/// Writes bytes in hexadecimal to the log.
///
/// # Safety
/// `bytes` must be null or contain `count` bytes, and `title` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmhdump(bytes: *const c_char, count: c_int, title: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    let (bytes, title) = unsafe {
        (
            Strided::<u8>::new(bytes.cast(), count, 1),
            ProgramStr::new(title),
        )
    };
    let title = title
        .map(|title| title.to_string_lossy())
        .unwrap_or_default();
    for line in bytes
        .map_or_else(|_| Vec::new(), |bytes| bytes.to_vec())
        .chunks(DUMP_LINE_BYTES)
    {
        let hex_bytes: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        log_stderr(&format!("{title}{}\n", hex_bytes.join(" ")), false);
    }
    0
}

/// Writes the members of a descriptor set to the log.
///
/// # Safety
/// `title` must be null or a string, and `set` null or a set.
#[unsafe(no_mangle)]
unsafe extern "C" fn print_fdset(title: *const c_char, count: c_int, set: *const libc::fd_set) {
    // SAFETY: by this function's contract.
    let title = unsafe { ProgramStr::new(title) }
        .map(|title| title.to_string_lossy())
        .unwrap_or_default();
    let members = (0..count.clamp(0, libc::FD_SETSIZE as c_int)).filter(|fd| {
        // SAFETY: the set is not null, and the number is in the range that a set supports.
        !set.is_null() && unsafe { libc::FD_ISSET(*fd, set) }
    });
    let fd_texts: Vec<String> = members.map(|fd| fd.to_string()).collect();
    log_stderr(&format!("{title}{}\n", fd_texts.join(",")), true);
}

/// Parses an address: eight hexadecimal digits, a colon, and the port in hexadecimal.
///
/// # Safety
/// `text` must be null or a string, and `target` null or valid for one structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn hex_inadport(text: *const c_char, target: *mut libc::sockaddr_in) {
    // SAFETY: by this function's contract.
    let (text, target) = unsafe { (ProgramStr::new(text), target.as_mut()) };
    let (Ok(text), Some(target)) = (text, target) else {
        return;
    };
    let text = text.to_string_lossy();
    let (address, port) = text.split_once(':').unwrap_or((&text, "0"));
    target.sin_addr.s_addr = (env::parse_hex(address.as_bytes()) as u32).to_be();
    target.sin_port = (env::parse_hex(port.as_bytes()) as u16).to_be();
}

/// Formats an address in the format of `hex_inadport`.
///
/// # Safety
/// `address` must be null or point to a structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn inadport_hex(address: *const libc::sockaddr_in) -> *const c_char {
    static TEXT: Mutex<Option<crate::memory::COwnedMemory<CString>>> = Mutex::new(None);
    // SAFETY: by this function's contract.
    let (ip, port) =
        unsafe { address.as_ref() }.map_or((0, 0), |a| (a.sin_addr.s_addr, a.sin_port));
    store_text(
        &TEXT,
        format!("{:08x}:{:04x}", u32::from_be(ip), u16::from_be(port)),
    )
}

/// Formats an address in dotted decimal notation with its port.
///
/// # Safety
/// `address` must be null or point to a structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn inadport_decimal(address: *const libc::sockaddr_in) -> *const c_char {
    static TEXT: Mutex<Option<crate::memory::COwnedMemory<CString>>> = Mutex::new(None);
    // SAFETY: by this function's contract.
    let (ip, port) =
        unsafe { address.as_ref() }.map_or((0, 0), |a| (a.sin_addr.s_addr, a.sin_port));
    store_text(
        &TEXT,
        format!(
            "{}:{}",
            std::net::Ipv4Addr::from(u32::from_be(ip)),
            u16::from_be(port)
        ),
    )
}
