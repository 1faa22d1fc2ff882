//! Undocumented exports of PVM's library that existing programs use: console, group library,
//! tracer, examples.
//!
//! The functions that make trace records are in `trace_table`.

#![allow(unsafe_code)]

use super::zero_on_success;
use crate::data::pvmmytaskname;
use crate::memory::{COwnedMemory, OutParam, ProgramStr, write_c_string};
use crate::session::{lock, log_stderr, report_error, value_or_report};
use crate::{abi::TimeVal, env, leave, names, process, requests, session};
use sempa_proto::PvmError;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Reads a text of the program. Null is read as the text `(null)`.
///
/// # Safety
/// `text` must be null or a string.
unsafe fn string_or_null_text(text: *const c_char) -> String {
    // SAFETY: the caller's contract: null or a string.
    unsafe { ProgramStr::new(text) }
        .map_or_else(|_| "(null)".to_string(), |text| text.to_string_lossy())
}

/// Reports an error in the same way as the calls of this library, and returns its code.
///
/// # Safety
/// `function_name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn lpvmerr(function_name: *const c_char, code: c_int) -> c_int {
    // SAFETY: by this function's contract.
    report_error(&unsafe { string_or_null_text(function_name) }, code)
}

/// Writes a line to the log of a task, which is its standard error.
///
/// # Safety
/// `line` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmlogerror(line: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    log_stderr(&unsafe { string_or_null_text(line) }, true);
    0
}

/// Writes a line with the text of `errno` to the log.
///
/// # Safety
/// `line` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmlogperror(line: *const c_char) -> c_int {
    let error = std::io::Error::last_os_error();
    // SAFETY: by this function's contract.
    let line = unsafe { string_or_null_text(line) };
    log_stderr(&format!("{line}: {error}\n"), true);
    0
}

/// Does nothing. PVM's assertions call this hook, but tasks do not use it.
#[unsafe(no_mangle)]
extern "C" fn pvmbailout(_code: c_int) {}

/// Returns the error code with this name; 1 for an unknown name.
///
/// # Safety
/// `name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn errnamecode(name: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    names::error_code(&unsafe { string_or_null_text(name) }).unwrap_or(1)
}

/// Enrols the process if it is not a task.
#[unsafe(no_mangle)]
extern "C" fn pvmbeatask() -> c_int {
    session::runtime().map_or_else(PvmError::code, |_| 0)
}

/// Disconnects from the daemon, without the other steps of `pvm_exit`.
#[unsafe(no_mangle)]
extern "C" fn pvmendtask() -> c_int {
    leave::disconnect();
    0
}

static TASK_NAME: Mutex<Option<COwnedMemory<CString>>> = Mutex::new(None);

/// Sets the name of this task, to which `pvmmytaskname` then points.
///
/// # Safety
/// `name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmsettaskname(name: *const c_char) -> c_int {
    if name.is_null() {
        return PvmError::BadParam.code();
    }
    // SAFETY: not null, so a string by this function's contract.
    let name = unsafe { CStr::from_ptr(name) }.to_owned();
    pvmmytaskname.store(name.as_ptr().cast_mut().cast(), Relaxed);
    *TASK_NAME.lock().unwrap_or_else(PoisonError::into_inner) = Some(COwnedMemory(name));
    0
}

/// Removes mailbox entries without an owner: all entries if `name` is null or empty, otherwise the
/// entries of the class `name`; if `index` ≥ 0, only the entry with this index. If `kill` is
/// nonzero, ends all spawned tasks that are not exempt from a reset, and removes all entries
/// without an owner.
///
/// # Safety
/// `name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmreset(
    _mytid: c_int,
    kill: c_int,
    name: *const c_char,
    index: c_int,
) -> c_int {
    let name = if name.is_null() {
        String::new()
    } else {
        // SAFETY: by this function's contract.
        unsafe { string_or_null_text(name) }
    };
    value_or_report(
        "pvmreset",
        zero_on_success(requests::reset(
            kill != 0,
            name,
            (index >= 0).then_some(index),
        )),
    )
}

/// Prints the message handlers on standard output in PVM's format.
///
/// # Safety
/// Both strings must be null or strings.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmdisplaymhfinfo(caller: *const c_char, message: *const c_char, tid: c_int) {
    // SAFETY: by this function's contract.
    let (caller, message) = unsafe { (string_or_null_text(caller), string_or_null_text(message)) };
    let session = lock();
    let (handlers, count, free_id) = (
        session.handlers.numbered_filters(),
        session.handlers.id_count(),
        session.handlers.lowest_free_id(),
    );
    drop(session);
    let (handler_count, first_free_id) = (handlers.len(), free_id.unwrap_or(-1));
    let free_id = free_id.map_or_else(String::new, |number| format!("{number} "));
    let mut handler_lines = format!(
        "\n{caller} t{tid:x}: Display Message Handler Information: ndhandles = {count}\tnhandles = {handler_count}\tfl_dhandles = \
         {first_free_id}\npvmdisplaymhfinfo: free list.  head <- {free_id}-< tail\n{caller} t{tid:x}: {message}\n"
    );
    for (index, (id, filter)) in handlers.iter().enumerate() {
        let source = format!("t{:x}", filter.src);
        handler_lines += &format!(
            "{caller} t{tid:x}: dhandles[{id:2}].mhid = {id:2}  .handle = {index:2}     handles[{index:2}].mhid = {id:2}  \
             .header.src = {source:<9}  .header.ctx = {:8}  .header.tag= {:8}\n",
            filter.ctx, filter.tag
        );
    }
    handler_lines += "\n\n";
    let handler_lines = CString::new(handler_lines.replace('\0', "")).expect("no NUL is left");
    // SAFETY: both pointers are strings. The output is written to the C library's stream, so that
    // it stays in order with the program's own output.
    unsafe { libc::printf(c"%s".as_ptr(), handler_lines.as_ptr()) };
}

/// Returns the data signature of this machine.
#[unsafe(no_mangle)]
extern "C" fn pvmgetdsig() -> c_int {
    sempa_proto::message::DSIG_X86_64
}

/// Sets an environment variable from the text `NAME=value`. Unlike `putenv`, the function copies
/// the text.
///
/// # Safety
/// `setting` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmputenv(setting: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    let setting = unsafe { string_or_null_text(setting) };
    match setting.split_once('=') {
        Some((name, value)) if !name.is_empty() => {
            env::set_var(name, value);
            0
        }
        _ => -1,
    }
}

/// Parses a number: decimal, hexadecimal with `0x`, or octal with `0`.
///
/// # Safety
/// `text` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmstrtoi(text: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { ProgramStr::new(text) }.map_or(0, |text| env::parse_number(text.to_bytes()))
}

/// Parses a hexadecimal number, with or without `0x`.
///
/// # Safety
/// `text` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmxtoi(text: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { ProgramStr::new(text) }.map_or(0, |text| env::parse_hex(text.to_bytes()))
}

static TAG_NAME: Mutex<Option<COwnedMemory<CString>>> = Mutex::new(None);

/// Returns the name of a reserved tag, or the number of any other tag as text. Stores 1 in
/// `name_flag` if the tag has a name, else 0.
///
/// # Safety
/// `name_flag` must be null or valid for one int.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmnametag(tag: c_int, name_flag: *mut c_int) -> *const c_char {
    // SAFETY: by this function's contract.
    let name_flag = unsafe { OutParam::new(name_flag) };
    let name = names::tag_name(tag);
    name_flag.set(c_int::from(name.is_some()));
    let name = CString::new(name.map_or_else(|| tag.to_string(), str::to_string))
        .expect("names have no NUL");
    let pointer = name.as_ptr();
    *TAG_NAME.lock().unwrap_or_else(PoisonError::into_inner) = Some(COwnedMemory(name));
    pointer
}

/// Stores the time of day in `time`.
///
/// # Safety
/// `time` must be null or valid for one structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmgetclock(time: *mut TimeVal) -> c_int {
    let (seconds, micros) = process::unix_time();
    // SAFETY: by this function's contract.
    unsafe { OutParam::new(time) }.set(TimeVal {
        tv_sec: seconds,
        tv_usec: micros,
    });
    0
}

/// Sleeps for `seconds` seconds. If a signal interrupts the sleep, returns the remaining seconds,
/// else 0.
#[unsafe(no_mangle)]
extern "C" fn pvmsleep(seconds: c_int) -> c_int {
    // SAFETY: `sleep` accesses no memory. A signal ends the sleep; programs rely on this behaviour.
    unsafe { libc::sleep(seconds.max(0) as c_uint) as c_int }
}

/// Returns 1 if the text contains the parts of the pattern in the order of the pattern, else 0; `*`
/// separates the parts.
///
/// # Safety
/// Both must be null or strings.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmmatchstring(string: *const c_char, pattern: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    let (string, pattern) = unsafe { (string_or_null_text(string), string_or_null_text(pattern)) };
    let mut remaining_text = string.as_str();
    for part in pattern.split('*').filter(|part| !part.is_empty()) {
        match remaining_text.find(part) {
            Some(offset) => remaining_text = &remaining_text[offset + part.len()..],
            None => return 0,
        }
    }
    1
}

/// Exits the process if `user` is root and the variable `PVM_ALLOW_ROOT` is not set.
#[unsafe(no_mangle)]
extern "C" fn pvmchkuid(user: c_int) {
    if user == 0 && env::read_var("PVM_ALLOW_ROOT").is_none() {
        session::exit_as_root();
    }
}

static TEMP_DIR: OnceLock<CString> = OnceLock::new();
static REMOTE_SHELL: OnceLock<CString> = OnceLock::new();
static PVM_ROOT_DIR: OnceLock<CString> = OnceLock::new();

fn env_or_default(
    cached_value: &'static OnceLock<CString>,
    name: &str,
    default_value: &str,
) -> *const c_char {
    let read_variable = || {
        CString::new(env::read_var(name).unwrap_or_else(|| default_value.to_string()))
            .unwrap_or_default()
    };
    cached_value.get_or_init(read_variable).as_ptr()
}

/// Returns the directory for temporary files: the value of `PVM_TMP`, by default `/tmp`.
#[unsafe(no_mangle)]
extern "C" fn pvmgettmp() -> *const c_char {
    env_or_default(&TEMP_DIR, "PVM_TMP", "/tmp")
}

/// Returns the command of the remote shell: the value of `PVM_RSH`, by default `ssh`.
#[unsafe(no_mangle)]
extern "C" fn pvmgetrsh() -> *const c_char {
    env_or_default(&REMOTE_SHELL, "PVM_RSH", "ssh")
}

/// Returns the directory in which PVM is installed: the value of `PVM_ROOT`, by default
/// `/usr/lib/pvm3`.
#[unsafe(no_mangle)]
extern "C" fn pvmgetroot() -> *const c_char {
    env_or_default(&PVM_ROOT_DIR, "PVM_ROOT", "/usr/lib/pvm3")
}

/// Size in bytes of the buffer that a caller of `pvmtmpnam` provides (`PVMTMPNAMLEN`).
const TEMP_NAME_BYTES: usize = 128;

/// Writes a name for a temporary file to `target`. Returns null if `target` is null or the name
/// does not fit.
///
/// # Safety
/// `target` must be null or have space for 128 bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmtmpnam(target: *mut c_char) -> *mut c_char {
    static NAME_COUNTER: AtomicU32 = AtomicU32::new(0);
    // SAFETY: the pointer comes from a static string.
    let directory = unsafe { string_or_null_text(pvmgettmp()) };
    let name = format!(
        "{directory}/pvmtmp{:06}.{}",
        process::process_id(),
        NAME_COUNTER.fetch_add(1, Relaxed)
    );
    if target.is_null() || name.len() >= TEMP_NAME_BYTES {
        return std::ptr::null_mut();
    }
    // SAFETY: by this function's contract; the name with its NUL fits.
    unsafe { write_c_string(target, name.as_bytes()) };
    target
}

/// Allocates memory. In PVM the function belongs to a debugging allocator; this library calls
/// `malloc`.
///
/// # Safety
/// As for `malloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn i_malloc(size: c_uint, _tag: *const c_char) -> *mut c_void {
    // SAFETY: `malloc` accepts any size.
    unsafe { libc::malloc(size as usize) }
}

/// Resizes memory of [`i_malloc`].
///
/// # Safety
/// As for `realloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn i_realloc(memory: *mut c_void, size: c_uint) -> *mut c_void {
    // SAFETY: by this function's contract.
    unsafe { libc::realloc(memory, size as usize) }
}

/// Frees memory of [`i_malloc`].
///
/// # Safety
/// As for `free`.
#[unsafe(no_mangle)]
unsafe extern "C" fn i_free(memory: *mut c_void) {
    // SAFETY: by this function's contract.
    unsafe { libc::free(memory) }
}

/// Allocates memory, as [`i_malloc`] does.
///
/// # Safety
/// As for `malloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_alloc(size: c_uint, _tag: *const c_char) -> *mut c_void {
    // SAFETY: `malloc` accepts any size.
    unsafe { libc::malloc(size as usize) }
}

/// Resizes memory of [`pvm_alloc`].
///
/// # Safety
/// As for `realloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_realloc(memory: *mut c_void, size: c_uint) -> *mut c_void {
    // SAFETY: by this function's contract.
    unsafe { libc::realloc(memory, size as usize) }
}

/// Frees memory of [`pvm_alloc`].
///
/// # Safety
/// As for `free`.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_free(memory: *mut c_void) {
    // SAFETY: by this function's contract.
    unsafe { libc::free(memory) }
}

/// Does nothing. In PVM this function checks a debugging allocator, but this library uses `malloc`.
#[unsafe(no_mangle)]
extern "C" fn i_choke() {}

/// Does nothing. In PVM this function lists the memory of a debugging allocator, but this library
/// uses `malloc`.
#[unsafe(no_mangle)]
extern "C" fn i_dump(_how: c_int) {}

/// Does nothing. In PVM this function lists collected output, but this library prints output line
/// by line.
#[unsafe(no_mangle)]
extern "C" fn tobuf_dump() -> c_int {
    0
}
