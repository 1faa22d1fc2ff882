//! The user whose tasks a tasker of the system service runs.
//!
//! The service is root and serves a daemon that it does not trust. Two rules keep the daemon from
//! gaining anything:
//!
//! - Tasks run with the ids, groups and resource limits of the user, and with nothing of root's.
//! - The tasker itself accesses files with the user's rights ([`TaskUser::adopt_file_rights`]): a
//!   path that the daemon names opens what the user could open, and nothing else. The few files
//!   that belong to the service are accessed in [`with_own_file_rights`].
#![allow(unsafe_code)] // The C library's wrappers change the ids of all threads.

use checkpoint::capabilities::CapabilitySet;
use checkpoint::proc;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::{Gid, Group, Uid, User, getgrouplist, setgroups};
use procfs::process::{Limit as ProcessLimit, LimitValue, Limits, Process};
use sempa_service_settings::{
    Limit, LimitKind, SETTINGS_VARIABLE, Settings, SettingsError, UserLimits, settings_path,
};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use thiserror::Error;

/// Why a tasker cannot run tasks for a user.
#[derive(Debug, Error)]
pub(crate) enum TaskUserError {
    #[error("no user with the id {0} has an account on this host")]
    NoAccount(u32),
    #[error("the account database cannot be read: {0}")]
    Accounts(#[source] nix::Error),
    #[error(
        "the daemon runs as the user with the id {found}, and not as the one with the id {expected}"
    )]
    OtherDaemon { found: u32, expected: u32 },
    #[error("the resource limits of the daemon cannot be read: {0}")]
    Limits(String),
    #[error("the administrator of this host lets the tasker service run no tasks of {0}")]
    Denied(String),
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("the tasker cannot take on the user's file rights: {0}")]
    FileRights(#[source] io::Error),
}

/// Ids, groups and limits with which the tasks of a user start.
#[derive(Clone, Debug)]
pub(crate) struct TaskUser {
    name: String,
    uid: u32,
    gid: u32,
    /// All groups of the user on this host, including `gid`.
    groups: Vec<u32>,
    /// Each resource (`RLIMIT_*`) with its limit.
    limits: Vec<(u32, libc::rlimit)>,
    /// True if programs of tasks gain no privileges from set-user-id files.
    no_new_privs: bool,
    service_limits: UserLimits,
}

impl TaskUser {
    /// Looks up the user with the id `uid` in the account database of this host. The resource
    /// limits are those of the daemon at the other end of `socket`: the daemon has them from its
    /// user's login.
    ///
    /// # Errors
    /// The user has no account, or the daemon belongs to another user.
    pub(crate) fn of_daemon(uid: u32, socket: BorrowedFd<'_>) -> Result<Self, TaskUserError> {
        let account = User::from_uid(Uid::from_raw(uid))
            .map_err(TaskUserError::Accounts)?
            .ok_or(TaskUserError::NoAccount(uid))?;
        let c_name =
            CString::new(account.name.as_str()).map_err(|_| TaskUserError::NoAccount(uid))?;
        let groups = getgrouplist(&c_name, account.gid).map_err(TaskUserError::Accounts)?;
        let peer = getsockopt(&socket, PeerCredentials)
            .map_err(|e| TaskUserError::Limits(e.desc().into()))?;
        // Root may act for any user; tests do.
        if peer.uid() != uid && peer.uid() != 0 {
            return Err(TaskUserError::OtherDaemon {
                found: peer.uid(),
                expected: uid,
            });
        }
        let settings_path = settings_path(std::env::var_os(SETTINGS_VARIABLE));
        let settings = Settings::load(&settings_path)?;
        if settings.denies(&account.name) {
            return Err(TaskUserError::Denied(account.name));
        }
        let group_names: Vec<String> = groups
            .iter()
            .filter_map(|gid| Some(Group::from_gid(*gid).ok()??.name))
            .collect();
        let service_limits = settings.of_user(&account.name, &group_names);
        Ok(Self {
            name: account.name,
            uid,
            gid: account.gid.as_raw(),
            groups: groups.into_iter().map(Gid::as_raw).collect(),
            limits: permitted_limits(peer.pid(), service_limits.get(LimitKind::Descriptors))?,
            no_new_privs: settings.no_new_privs,
            service_limits,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }

    pub(crate) fn gid(&self) -> u32 {
        self.gid
    }

    pub(crate) fn groups(&self) -> &[u32] {
        &self.groups
    }

    /// True if programs of tasks gain no privileges from set-user-id files.
    pub(crate) fn no_new_privs(&self) -> bool {
        self.no_new_privs
    }

    /// Returns the administrator's limit for this user; the greatest number if there is none.
    pub(crate) fn service_limit(&self, kind: LimitKind) -> u64 {
        self.service_limits.get(kind).max().unwrap_or(u64::MAX)
    }

    /// Returns each resource (`RLIMIT_*`) with its limit.
    pub(crate) fn limits(&self) -> &[(u32, libc::rlimit)] {
        &self.limits
    }

    /// Makes the calling thread, and all threads that it creates later, access files with the
    /// rights of this user and nothing more. Must be called before other threads exist.
    ///
    /// # Errors
    /// The process is not root's.
    pub(crate) fn adopt_file_rights(&self) -> Result<(), TaskUserError> {
        let groups: Vec<Gid> = self.groups.iter().copied().map(Gid::from_raw).collect();
        setgroups(&groups).map_err(|e| TaskUserError::FileRights(e.into()))?;
        let (uid, gid) = *FILE_IDS.get_or_init(|| (self.uid, self.gid));
        set_file_ids(uid, gid).map_err(TaskUserError::FileRights)
    }

    /// Gives the calling process the ids, groups and limits of this user, for ever. Makes only
    /// async-signal-safe calls. Returns false if the kernel refuses.
    ///
    /// # Safety
    /// May be called only in a new process between its creation and its exec.
    pub(crate) unsafe fn become_user(&self) -> bool {
        // Raw system calls: those of the C library change all threads of the tasker, with which a
        // new process shares its memory.
        //
        // SAFETY: the pointers refer to lists that live through the calls.
        unsafe {
            for (resource, limit) in &self.limits {
                if libc::syscall(
                    libc::SYS_prlimit64,
                    0,
                    *resource,
                    std::ptr::from_ref(limit),
                    std::ptr::null::<libc::rlimit>(),
                ) != 0
                {
                    return false;
                }
            }
            let (uid, gid) = (self.uid, self.gid);
            libc::syscall(libc::SYS_setgroups, self.groups.len(), self.groups.as_ptr()) == 0
                && libc::syscall(libc::SYS_setresgid, gid, gid, gid) == 0
                && libc::syscall(libc::SYS_setresuid, uid, uid, uid) == 0
                && (!self.no_new_privs || libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)
        }
    }
}

/// User id and group id with which all threads access files; unset if they have their own rights.
static FILE_IDS: OnceLock<(u32, u32)> = OnceLock::new();

/// Calls `action` with the tasker's own file rights, for files that belong to the service. The
/// action must not use a path that the daemon has named.
///
/// The engine must be started with these rights, too. If the file ids of a process are not its
/// effective ids, the kernel treats its exec like that of a set-user-id program, and the engine's
/// loader then ignores the libraries that the engine needs.
pub(crate) fn with_own_file_rights<T>(action: impl FnOnce() -> T) -> T {
    let Some(&(uid, gid)) = FILE_IDS.get().filter(|_| !has_own_file_rights()) else {
        return action();
    };
    /// Restores the user's rights also after a panic.
    struct Restore(u32, u32);
    impl Drop for Restore {
        fn drop(&mut self) {
            set_file_ids(self.0, self.1).expect("root may take on any user's file rights");
        }
    }
    set_file_ids(0, 0).expect("root may return to its own file rights");
    let _restore = Restore(uid, gid);
    action()
}

/// True if the calling thread accesses files with root's rights.
fn has_own_file_rights() -> bool {
    // SAFETY: an invalid id changes nothing; the call returns the present one.
    unsafe { libc::setfsuid(u32::MAX) == 0 }
}

/// Sets the ids with which the calling thread accesses files. The kernel withdraws the capabilities
/// that override file permissions together with the user id 0, and returns them with it.
fn set_file_ids(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: the calls take numbers only. They affect the calling thread alone. Each returns the
    // previous id, also on failure; an invalid id only reads.
    let ids = unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
        (libc::setfsuid(u32::MAX), libc::setfsgid(u32::MAX))
    };
    match ids == (uid.cast_signed(), gid.cast_signed()) {
        true => Ok(()),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

/// Returns the limits of the process `pid`, and for descriptors at most `descriptors_max`. Limits
/// above those of this process are lowered to them if this process may not exceed them.
fn permitted_limits(
    pid: i32,
    descriptors_max: Limit,
) -> Result<Vec<(u32, libc::rlimit)>, TaskUserError> {
    let read_limits = |process: Process| process.limits();
    let limits_error = |e: procfs::ProcError| TaskUserError::Limits(e.to_string());
    let login = Process::new(pid)
        .and_then(read_limits)
        .map_err(limits_error)?;
    let own = Process::myself()
        .and_then(read_limits)
        .map_err(limits_error)?;
    let own_pid = std::process::id().cast_signed();
    let may_exceed = proc::status(own_pid).is_some_and(|status| {
        CapabilitySet::from_bits_retain(status.capeff).contains(CapabilitySet::SYS_RESOURCE)
    });
    let resources = each_limit(&login).into_iter().zip(each_limit(&own));
    Ok(resources
        .map(|((resource, login), (_, own))| {
            let hard_max = match may_exceed {
                true => libc::RLIM_INFINITY,
                false => to_number(own.hard_limit),
            };
            let hard_max = match (resource, descriptors_max.max()) {
                (libc::RLIMIT_NOFILE, Some(max)) => hard_max.min(max),
                _ => hard_max,
            };
            let limit = libc::rlimit {
                rlim_cur: to_number(login.soft_limit).min(hard_max),
                rlim_max: to_number(login.hard_limit).min(hard_max),
            };
            (resource, limit)
        })
        .collect())
}

/// Returns each resource (`RLIMIT_*`) with its limit.
fn each_limit(limits: &Limits) -> [(u32, ProcessLimit); 16] {
    [
        (libc::RLIMIT_CPU, limits.max_cpu_time),
        (libc::RLIMIT_FSIZE, limits.max_file_size),
        (libc::RLIMIT_DATA, limits.max_data_size),
        (libc::RLIMIT_STACK, limits.max_stack_size),
        (libc::RLIMIT_CORE, limits.max_core_file_size),
        (libc::RLIMIT_RSS, limits.max_resident_set),
        (libc::RLIMIT_NPROC, limits.max_processes),
        (libc::RLIMIT_NOFILE, limits.max_open_files),
        (libc::RLIMIT_MEMLOCK, limits.max_locked_memory),
        (libc::RLIMIT_AS, limits.max_address_space),
        (libc::RLIMIT_LOCKS, limits.max_file_locks),
        (libc::RLIMIT_SIGPENDING, limits.max_pending_signals),
        (libc::RLIMIT_MSGQUEUE, limits.max_msgqueue_size),
        (libc::RLIMIT_NICE, limits.max_nice_priority),
        (libc::RLIMIT_RTPRIO, limits.max_realtime_priority),
        (libc::RLIMIT_RTTIME, limits.max_realtime_timeout),
    ]
}

fn to_number(limit: LimitValue) -> u64 {
    match limit {
        LimitValue::Unlimited => libc::RLIM_INFINITY,
        LimitValue::Value(value) => value,
    }
}

/// Returns the user with the id `uid` for a tasker whose daemon is at the other end of `socket`,
/// and takes on the user's file rights.
///
/// # Errors
/// As for [`TaskUser::of_daemon`] and [`TaskUser::adopt_file_rights`].
pub(crate) fn serve_user(uid: u32, socket: &impl AsFd) -> Result<TaskUser, TaskUserError> {
    let user = TaskUser::of_daemon(uid, socket.as_fd())?;
    user.adopt_file_rights()?;
    Ok(user)
}
