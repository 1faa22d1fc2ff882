//! A process that is born inside a control group and borrows this one's memory until it is a program (as after `vfork`).
//!
//! The C library's `clone` knows nothing of control groups, and the kernel's `clone3` comes back twice on one stack if it is
//! called like a function. To be born outside and to be moved in costs many milliseconds, because the kernel then waits until
//! all its processors have come by.
#![allow(unsafe_code)] // A call that comes back twice, on two stacks, is beyond the language.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// The flag of `clone3` for a control group; too wide for the C library's type.
pub(crate) const INTO_CGROUP: u64 = 0x2_0000_0000;
/// True where such a process can be made.
pub(crate) const KNOWN: bool = cfg!(target_arch = "x86_64");

/// Makes a process in the control group (version 2) of this folder that runs `start` with `plan` on `stack` and ends with what it
/// returns; the calling thread goes on when it has become a program or has ended. `pidfd` is where the kernel puts its
/// descriptor. The process's number.
///
/// # Errors
/// What `clone3` says.
///
/// # Safety
/// `start` and `plan` may only do what is allowed between `vfork` and `execve`, `pidfd` may be written, and nobody else
/// uses `stack`.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn into_group(
    start: extern "C" fn(*mut c_void) -> i32,
    plan: *mut c_void,
    stack: &mut [u128],
    pidfd: *mut RawFd,
    group: BorrowedFd<'_>,
) -> io::Result<i32> {
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD;
    let args = libc::clone_args {
        flags: flags as u64 | INTO_CGROUP,
        pidfd: pidfd as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.as_mut_ptr() as u64,
        stack_size: size_of_val(stack) as u64,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: group.as_raw_fd() as u64,
    };
    let answer: i64;
    // SAFETY: the new process begins behind the first `syscall` with rax 0, all other registers as they were, and the stack
    // pointer at the end of `stack`, which is aligned as a call wants it; it never leaves these lines but through `start`, and
    // ends with the last `syscall`. The calling thread skips its part. The kernel changes rax, rcx and r11 only.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "mov edi, eax",
            "mov eax, {exit}",
            "syscall",
            "ud2",
            "2:",
            exit = const libc::SYS_exit,
            inlateout("rax") libc::SYS_clone3 => answer,
            in("rdi") &raw const args,
            in("rsi") size_of::<libc::clone_args>(),
            in("r12") plan,
            in("r13") start,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    match i32::try_from(answer) {
        Ok(pid) if pid > 0 => Ok(pid),
        _ => Err(io::Error::from_raw_os_error(-answer as i32)),
    }
}

/// Not known on this processor.
///
/// # Errors
/// Always.
///
/// # Safety
/// Nothing happens.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn into_group(
    _start: extern "C" fn(*mut c_void) -> i32,
    _plan: *mut c_void,
    _stack: &mut [u128],
    _pidfd: *mut RawFd,
    _group: BorrowedFd<'_>,
) -> io::Result<i32> {
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}
