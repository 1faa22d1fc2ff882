//! Creates a process in a control group, with a chosen PID, or both. Until its exec the new process
//! shares the memory of the tasker, as after `vfork`.
//!
//! The C library's `clone` supports neither, and the kernel's `clone3` returns twice on the same
//! stack if it is called like a function. Creating the process outside the group and adding it
//! later costs many milliseconds, because the kernel then waits for all processors.
#![allow(unsafe_code)] // A call that comes back twice, on two stacks, is beyond the language.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// The flag CLONE_INTO_CGROUP of `clone3`, which is too large for the C library's type.
pub(crate) const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// True if [`clone_vfork`] is implemented for this processor architecture.
pub(crate) const IS_SUPPORTED: bool = cfg!(target_arch = "x86_64");

/// The PID of a new process, as `clone3` reads it. The value must not move until the call.
pub(crate) struct SetTid(Option<i32>);

impl SetTid {
    /// `None` lets the kernel choose the PID.
    pub(crate) fn new(namespace_pid: Option<i32>) -> Self {
        Self(namespace_pid)
    }

    /// Returns the value of `clone_args.set_tid`: the address of the PID, or null.
    pub(crate) fn address(&self) -> u64 {
        self.0
            .as_ref()
            .map_or(0, |pid| std::ptr::from_ref(pid).expose_provenance() as u64)
    }

    /// Returns the value of `clone_args.set_tid_size`: the number of PIDs.
    pub(crate) fn count(&self) -> u64 {
        self.0.is_some().into()
    }
}

/// Creates a process in the control group (version 2) whose directory is `group`, and with the PID
/// `namespace_pid` in its own PID namespace. `None` is the tasker's group, or a PID that the kernel
/// chooses. Returns the PID of the process in the tasker's namespace.
///
/// The process runs `entry_function` with the argument `plan` on the stack `stack`, and exits with
/// the value that `entry_function` returns. The calling thread continues after the exec or the exit
/// of the process. The kernel writes the pidfd to `pidfd`.
///
/// # Errors
/// Those of `clone3`. `EEXIST` if a process has the PID.
///
/// # Safety
/// `entry_function` may only do with `plan` what is allowed between `vfork` and `execve`. `pidfd`
/// must be writable, and no other code may use `stack`.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn clone_vfork(
    entry_function: extern "C" fn(*mut c_void) -> i32,
    plan: *mut c_void,
    stack: &mut [u128],
    pidfd: *mut RawFd,
    group: Option<BorrowedFd<'_>>,
    namespace_pid: Option<i32>,
) -> io::Result<i32> {
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD;
    let group_flag = group.map_or(0, |_| CLONE_INTO_CGROUP);
    let set_tid = SetTid::new(namespace_pid);
    let args = libc::clone_args {
        flags: flags as u64 | group_flag,
        pidfd: pidfd as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.as_mut_ptr() as u64,
        stack_size: size_of_val(stack) as u64,
        tls: 0,
        set_tid: set_tid.address(),
        set_tid_size: set_tid.count(),
        cgroup: group.map_or(0, |group_dir| group_dir.as_raw_fd() as u64),
    };
    let result: i64;
    // SAFETY: the new process begins after the first `syscall` with rax 0, all other registers
    // unchanged, and the stack pointer at the end of `stack`, which is aligned for a call. The new
    // process leaves the assembly code only through `entry_function`, and ends with the last
    // `syscall`. The calling thread skips that part. The kernel changes only rax, rcx and r11.
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
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") &raw const args,
            in("rsi") size_of::<libc::clone_args>(),
            in("r12") plan,
            in("r13") entry_function,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    match i32::try_from(result) {
        Ok(pid) if pid > 0 => Ok(pid),
        _ => Err(io::Error::from_raw_os_error(-result as i32)),
    }
}

/// Always fails: this processor architecture is not supported.
///
/// # Errors
/// ENOSYS.
///
/// # Safety
/// Has no effect.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn clone_vfork(
    _start: extern "C" fn(*mut c_void) -> i32,
    _plan: *mut c_void,
    _stack: &mut [u128],
    _pidfd: *mut RawFd,
    _group: Option<BorrowedFd<'_>>,
    _namespace_pid: Option<i32>,
) -> io::Result<i32> {
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}
