//! What PVM's library exports beside its documented interface and programs were seen to use: console, group library,
//! tracer, examples. What makes trace records is in `trace_table`.

#![allow(unsafe_code)]

use super::zero;
use crate::data::pvmmytaskname;
use crate::memory::{Lent, Out, Text, put_string};
use crate::session::{answer, lock, report, say};
use crate::{abi::TimeVal, ask, env, leave, names, process, session};
use sempa_proto::PvmError;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};

/// A text given by the program, as far as there is one.
///
/// # Safety
/// `text` is null or a string.
unsafe fn text(text: *const c_char) -> String {
    // SAFETY: the caller's contract: null or a string.
    unsafe { Text::new(text) }.map_or_else(|_| "(null)".to_string(), |text| text.string())
}

/// Reports an error as a call of the library would; answers the code.
///
/// # Safety
/// `place` is null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn lpvmerr(place: *const c_char, code: c_int) -> c_int {
    // SAFETY: by this function's contract.
    report(&unsafe { text(place) }, code)
}

/// Writes a line to the log.
///
/// # Safety
/// `line` is null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmlogerror(line: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    say(&unsafe { text(line) }, true);
    0
}

/// Writes a line with the system's last error to the log.
///
/// # Safety
/// `line` is null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmlogperror(line: *const c_char) -> c_int {
    let error = std::io::Error::last_os_error();
    // SAFETY: by this function's contract.
    say(&format!("{}: {error}\n", unsafe { text(line) }), true);
    0
}

/// Hook of PVM's assertions; does nothing in a task.
#[unsafe(no_mangle)]
extern "C" fn pvmbailout(_code: c_int) {}

/// The code of an error's name, 1 for other words.
///
/// # Safety
/// `name` is null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn errnamecode(name: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    names::error_code(&unsafe { text(name) }).unwrap_or(1)
}

/// Enrols the process if it is no task yet.
#[unsafe(no_mangle)]
extern "C" fn pvmbeatask() -> c_int {
    session::runtime().map_or_else(PvmError::code, |_| 0)
}

/// Lets go of the daemon.
#[unsafe(no_mangle)]
extern "C" fn pvmendtask() -> c_int {
    leave::end();
    0
}

static TASK_NAME: Mutex<Option<Lent<CString>>> = Mutex::new(None);

/// Sets the name this task goes by in its own messages.
///
/// # Safety
/// `name` is null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmsettaskname(name: *const c_char) -> c_int {
    if name.is_null() {
        return PvmError::BadParam.code();
    }
    // SAFETY: not null, so a string by this function's contract.
    let name = unsafe { CStr::from_ptr(name) }.to_owned();
    pvmmytaskname.store(name.as_ptr().cast_mut().cast(), Relaxed);
    *TASK_NAME.lock().unwrap_or_else(PoisonError::into_inner) = Some(Lent(name));
    0
}

/// Removes mailbox entries that nobody owns, all or those of a name, at an index unless that is negative; with `kill` ends
/// all tasks first that a reset ends.
///
/// # Safety
/// `name` is null or a string.
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
        unsafe { text(name) }
    };
    answer(
        "pvmreset",
        zero(ask::reset(kill != 0, name, (index >= 0).then_some(index))),
    )
}

/// Prints the message handlers on standard output, in PVM's lines.
///
/// # Safety
/// Both strings are null or strings.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmdisplaymhfinfo(who: *const c_char, message: *const c_char, tid: c_int) {
    // SAFETY: by this function's contract.
    let (who, message) = unsafe { (text(who), text(message)) };
    let session = lock();
    let (list, count, free) = (
        session.handlers.list(),
        session.handlers.count(),
        session.handlers.free_number(),
    );
    drop(session);
    let (live, first_free) = (list.len(), free.unwrap_or(-1));
    let free = free.map_or_else(String::new, |number| format!("{number} "));
    let mut lines = format!(
        "\n{who} t{tid:x}: Display Message Handler Information: ndhandles = {count}\tnhandles = {live}\tfl_dhandles = \
         {first_free}\npvmdisplaymhfinfo: free list.  head <- {free}-< tail\n{who} t{tid:x}: {message}\n"
    );
    for (at, (id, filter)) in list.iter().enumerate() {
        let source = format!("t{:x}", filter.src);
        lines += &format!(
            "{who} t{tid:x}: dhandles[{id:2}].mhid = {id:2}  .handle = {at:2}     handles[{at:2}].mhid = {id:2}  \
             .header.src = {source:<9}  .header.ctx = {:8}  .header.tag= {:8}\n",
            filter.ctx, filter.tag
        );
    }
    lines += "\n\n";
    let lines = CString::new(lines.replace('\0', "")).expect("no NUL is left");
    // SAFETY: two strings; the C library's own stream keeps the order with what the program prints.
    unsafe { libc::printf(c"%s".as_ptr(), lines.as_ptr()) };
}

/// Data signature of this machine.
#[unsafe(no_mangle)]
extern "C" fn pvmgetdsig() -> c_int {
    sempa_proto::message::DSIG_X86_64
}

/// `putenv` with a copy of `NAME=value`.
///
/// # Safety
/// `setting` is null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmputenv(setting: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    let setting = unsafe { text(setting) };
    match setting.split_once('=') {
        Some((name, value)) if !name.is_empty() => {
            env::set(name, value);
            0
        }
        _ => -1,
    }
}

/// A number, decimal, hexadecimal with 0x, or octal with 0.
///
/// # Safety
/// `number` is null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmstrtoi(number: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { Text::new(number) }.map_or(0, |number| env::number(number.bytes()))
}

/// A hexadecimal number.
///
/// # Safety
/// `number` is null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmxtoi(number: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { Text::new(number) }.map_or(0, |number| env::hex(number.bytes()))
}

static TAG_NAME: Mutex<Option<Lent<CString>>> = Mutex::new(None);

/// Name of a reserved tag, or the number of another one.
///
/// # Safety
/// `found` is null or good for one int.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmnametag(tag: c_int, found: *mut c_int) -> *const c_char {
    // SAFETY: by this function's contract.
    let found = unsafe { Out::new(found) };
    let name = names::tag(tag);
    found.set(c_int::from(name.is_some()));
    let name = CString::new(name.map_or_else(|| tag.to_string(), str::to_string))
        .expect("names have no NUL");
    let place = name.as_ptr();
    *TAG_NAME.lock().unwrap_or_else(PoisonError::into_inner) = Some(Lent(name));
    place
}

/// The time of day.
///
/// # Safety
/// `time` is null or good for one structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmgetclock(time: *mut TimeVal) -> c_int {
    let (seconds, micros) = process::clock();
    // SAFETY: by this function's contract.
    unsafe { Out::new(time) }.set(TimeVal {
        tv_sec: seconds,
        tv_usec: micros,
    });
    0
}

/// Sleeps; answers the seconds left when a signal came.
#[unsafe(no_mangle)]
extern "C" fn pvmsleep(seconds: c_int) -> c_int {
    // SAFETY: touches no memory. The C library's sleep ends at a signal, which programs rely on.
    unsafe { libc::sleep(seconds.max(0) as c_uint) as c_int }
}

/// Does the text match the pattern? `*` stands for anything; text before and behind does not count.
///
/// # Safety
/// Both are null or strings.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmmatchstring(string: *const c_char, pattern: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    let (string, pattern) = unsafe { (text(string), text(pattern)) };
    let mut rest = string.as_str();
    for part in pattern.split('*').filter(|part| !part.is_empty()) {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return 0,
        }
    }
    1
}

/// Ends the process when it runs as root without permission.
#[unsafe(no_mangle)]
extern "C" fn pvmchkuid(user: c_int) {
    if user == 0 && env::get("PVM_ALLOW_ROOT").is_none() {
        session::refuse_root();
    }
}

static TEMPORARY: OnceLock<CString> = OnceLock::new();
static REMOTE_SHELL: OnceLock<CString> = OnceLock::new();
static ROOT: OnceLock<CString> = OnceLock::new();

fn variable(place: &'static OnceLock<CString>, name: &str, otherwise: &str) -> *const c_char {
    let read = || {
        CString::new(env::get(name).unwrap_or_else(|| otherwise.to_string())).unwrap_or_default()
    };
    place.get_or_init(read).as_ptr()
}

/// Directory for temporary files.
#[unsafe(no_mangle)]
extern "C" fn pvmgettmp() -> *const c_char {
    variable(&TEMPORARY, "PVM_TMP", "/tmp")
}

/// The remote shell.
#[unsafe(no_mangle)]
extern "C" fn pvmgetrsh() -> *const c_char {
    variable(&REMOTE_SHELL, "PVM_RSH", "ssh")
}

/// Directory in which PVM is installed.
#[unsafe(no_mangle)]
extern "C" fn pvmgetroot() -> *const c_char {
    variable(&ROOT, "PVM_ROOT", "/usr/lib/pvm3")
}

/// Room that a caller of `pvmtmpnam` provides.
const TEMPORARY_NAME_BYTES: usize = 128;

/// Makes a name for a temporary file.
///
/// # Safety
/// `place` is null or room for 128 bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmtmpnam(place: *mut c_char) -> *mut c_char {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    // SAFETY: the pointer comes from a static string.
    let directory = unsafe { text(pvmgettmp()) };
    let name = format!(
        "{directory}/pvmtmp{:06}.{}",
        process::id(),
        COUNT.fetch_add(1, Relaxed)
    );
    if place.is_null() || name.len() >= TEMPORARY_NAME_BYTES {
        return std::ptr::null_mut();
    }
    // SAFETY: by this function's contract; the name with its NUL fits.
    unsafe { put_string(place, name.as_bytes()) };
    place
}

/// Memory, as PVM's debugging allocator gives it.
///
/// # Safety
/// As `malloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn i_malloc(size: c_uint, _tag: *const c_char) -> *mut c_void {
    // SAFETY: malloc takes any size.
    unsafe { libc::malloc(size as usize) }
}

/// More or less memory.
///
/// # Safety
/// As `realloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn i_realloc(place: *mut c_void, size: c_uint) -> *mut c_void {
    // SAFETY: by this function's contract.
    unsafe { libc::realloc(place, size as usize) }
}

/// Gives memory back.
///
/// # Safety
/// As `free`.
#[unsafe(no_mangle)]
unsafe extern "C" fn i_free(place: *mut c_void) {
    // SAFETY: by this function's contract.
    unsafe { libc::free(place) }
}

/// Memory.
///
/// # Safety
/// As `malloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_alloc(size: c_uint, _tag: *const c_char) -> *mut c_void {
    // SAFETY: malloc takes any size.
    unsafe { libc::malloc(size as usize) }
}

/// More or less memory.
///
/// # Safety
/// As `realloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_realloc(place: *mut c_void, size: c_uint) -> *mut c_void {
    // SAFETY: by this function's contract.
    unsafe { libc::realloc(place, size as usize) }
}

/// Gives memory back.
///
/// # Safety
/// As `free`.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_free(place: *mut c_void) {
    // SAFETY: by this function's contract.
    unsafe { libc::free(place) }
}

/// Would check PVM's debugging allocator; memory is the C library's here.
#[unsafe(no_mangle)]
extern "C" fn i_choke() {}

/// Would list PVM's debugging allocator; memory is the C library's here.
#[unsafe(no_mangle)]
extern "C" fn i_dump(_how: c_int) {}

/// Would list the collected output; it is printed line by line.
#[unsafe(no_mangle)]
extern "C" fn tobuf_dump() -> c_int {
    0
}
