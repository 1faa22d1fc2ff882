//! Checks processes and threads: tree, ids, credentials, limits, namespaces.

use super::images::ImageDir;
use super::names::NumberedImage;
use super::schema::{CORE, IDS, INVENTORY, NAMESPACE_FIELDS, PSTREE, SECCOMP, TIMENS};
use super::violation::ImageViolation;
use super::wire::Message;
use super::{RESOURCE_LIMITS, RestorePolicy};
use crate::criu::images::INVENTORY_IMAGE;
use std::collections::{BTreeMap, BTreeSet};

/// Value of `mtype` in `core_entry` for the processor of this program; CRIU for another processor
/// would refuse the images.
const MACHINE: u64 = if cfg!(target_arch = "aarch64") { 3 } else { 1 };
/// Value of `task_state` in `task_core_entry`: a zombie (`TASK_DEAD`, `include/pid.h`).
const STATE_DEAD: u64 = 2;
/// Values of `task_state` that occur: alive, zombie, stopped.
const TASK_STATES: [u64; 3] = [1, STATE_DEAD, 3];
/// Lowest process id of a task. Number 1 is the init of the namespace, which belongs to root.
const PID_MIN: u64 = 2;
/// Highest process id that Linux supports (`PID_MAX_LIMIT`).
const PID_MAX: u64 = 1 << 22;
/// Policies that give no more processor time than the ordinary one: SCHED_OTHER, SCHED_BATCH,
/// SCHED_IDLE.
const ORDINARY_POLICIES: [u64; 3] = [0, 3, 5];
/// The real-time policies SCHED_FIFO and SCHED_RR.
const REALTIME_POLICIES: [u64; 2] = [1, 2];
/// Value of `loginuid` for a process that no login started.
const NO_LOGIN: u64 = u32::MAX as u64;
/// Value of `seccomp_mode` for a process without a filter.
const SECCOMP_DISABLED: u64 = 0;
/// Flags of seccomp filters that give no further access: TSYNC, LOG, SPEC_ALLOW.
const SECCOMP_FLAGS: u64 = 0x7;
/// Clocks of timers that need no capability: CLOCK_REALTIME, CLOCK_MONOTONIC,
/// CLOCK_PROCESS_CPUTIME_ID, CLOCK_THREAD_CPUTIME_ID, CLOCK_BOOTTIME, CLOCK_TAI.
const TIMER_CLOCKS: [u64; 6] = [0, 1, 2, 3, 7, 11];
/// The lowest clock of processor time of the calling process or thread; see `CPUCLOCK_PID` of the
/// kernel.
const OWN_CPU_CLOCK_MIN: u64 = 0xffff_fff8;
/// The ids of a process in `creds_entry` with their names in messages.
const UID_FIELDS: [(&str, &str); 4] = [
    ("uid", "real user id"),
    ("euid", "effective user id"),
    ("suid", "saved user id"),
    ("fsuid", "file system user id"),
];
const GID_FIELDS: [(&str, &str); 4] = [
    ("gid", "real group id"),
    ("egid", "effective group id"),
    ("sgid", "saved group id"),
    ("fsgid", "file system group id"),
];
/// The sets of capabilities in `creds_entry` that must be empty, with their names in messages.
const CAPABILITY_FIELDS: [(&str, &str); 4] = [
    ("cap_inh", "inheritable"),
    ("cap_prm", "permitted"),
    ("cap_eff", "effective"),
    ("cap_amb", "ambient"),
];
/// Names of the resource limits, in the order of the kernel's numbers.
const RESOURCE_LIMIT_NAMES: [&str; RESOURCE_LIMITS] = [
    "RLIMIT_CPU",
    "RLIMIT_FSIZE",
    "RLIMIT_DATA",
    "RLIMIT_STACK",
    "RLIMIT_CORE",
    "RLIMIT_RSS",
    "RLIMIT_NPROC",
    "RLIMIT_NOFILE",
    "RLIMIT_MEMLOCK",
    "RLIMIT_AS",
    "RLIMIT_LOCKS",
    "RLIMIT_SIGPENDING",
    "RLIMIT_MSGQUEUE",
    "RLIMIT_NICE",
    "RLIMIT_RTPRIO",
    "RLIMIT_RTTIME",
];

/// The processes in the images.
pub(super) struct ProcessTable {
    /// The ids of processes that are not zombies, with the image of their descriptors.
    pub(super) living: BTreeMap<u32, u32>,
    /// All ids of processes.
    pub(super) pids: BTreeSet<u32>,
}

impl ProcessTable {
    pub(super) fn read(
        images: &ImageDir<'_>,
        policy: &RestorePolicy,
    ) -> Result<Self, ImageViolation> {
        let root_ids = check_inventory(images)?;
        for number in images.numbers(NumberedImage::TimeNamespace) {
            images.single_entry(&format!("timens-{number}.img"), &TIMENS)?;
        }
        for entry in images.entries("seccomp.img", &SECCOMP)? {
            for filter in entry.messages("seccomp_filters") {
                if filter.number("flags").unwrap_or(0) & !SECCOMP_FLAGS != 0 {
                    return Err(ImageViolation::FileKind {
                        kind: "a seccomp filter with a listener".into(),
                    });
                }
            }
        }
        let mut table = Self {
            living: BTreeMap::new(),
            pids: BTreeSet::new(),
        };
        let mut thread_ids = BTreeSet::new();
        let tree = images.entries("pstree.img", &PSTREE)?;
        check_count("processes", tree.len(), policy.limits.processes_max)?;
        for entry in &tree {
            let pid = checked_pid(entry.required("pid"))?;
            if !table.pids.insert(pid) || !thread_ids.insert(pid) {
                return Err(tree_violation(format!("the id {pid} occurs twice")));
            }
            check_count("threads", thread_ids.len(), policy.limits.threads_max)?;
            if !check_process_core(images, policy, pid)? {
                continue;
            }
            for thread in entry.numbers("threads") {
                let thread = checked_pid(thread)?;
                if thread == pid {
                    continue;
                }
                if !thread_ids.insert(thread) {
                    return Err(tree_violation(format!("the id {thread} occurs twice")));
                }
                check_count("threads", thread_ids.len(), policy.limits.threads_max)?;
                check_thread_core(images, policy, thread)?;
            }
            let files_id = check_ids(images, pid, &root_ids)?;
            table.living.insert(pid, files_id);
        }
        check_tree(&tree, &table.pids)?;
        for core in images.numbers(NumberedImage::Core) {
            if !u32::try_from(core).is_ok_and(|core| thread_ids.contains(&core)) {
                return Err(tree_violation(format!("core-{core}.img has no thread")));
            }
        }
        Ok(table)
    }
}

fn tree_violation(why: impl Into<String>) -> ImageViolation {
    ImageViolation::ProcessTree { why: why.into() }
}

pub(super) fn check_count(
    what: &'static str,
    count: usize,
    limit: usize,
) -> Result<(), ImageViolation> {
    match count > limit {
        true => Err(ImageViolation::TooMany {
            what,
            limit: limit as u64,
        }),
        false => Ok(()),
    }
}

fn checked_pid(pid: u64) -> Result<u32, ImageViolation> {
    match pid {
        PID_MIN..PID_MAX => Ok(pid as u32),
        _ => Err(tree_violation(format!(
            "{pid} is not the id of a task's process"
        ))),
    }
}

/// Checks the inventory. Returns the ids of the namespaces in which CRIU ran.
fn check_inventory(images: &ImageDir<'_>) -> Result<Message, ImageViolation> {
    let inventory = images.single_entry(INVENTORY_IMAGE, &INVENTORY)?;
    if inventory.flag("tcp_close") {
        return Err(ImageViolation::FileKind {
            kind: "a connection that the restore closes".into(),
        });
    }
    let root_ids = inventory.message("root_ids");
    root_ids.cloned().ok_or_else(|| ImageViolation::Damaged {
        image: INVENTORY_IMAGE.into(),
        why: "it does not name the namespaces".into(),
    })
}

/// Checks that the process tree is one tree, and that sessions and process groups are not those of
/// the namespace's init.
fn check_tree(tree: &[Message], pids: &BTreeSet<u32>) -> Result<(), ImageViolation> {
    let mut root_count = 0;
    for entry in tree {
        let parent = entry.required("ppid");
        match u32::try_from(parent) {
            Ok(0) => root_count += 1,
            Ok(parent) if pids.contains(&parent) => {}
            _ => return Err(tree_violation(format!("the parent {parent} is missing"))),
        }
        // The leader of a session or group may have ended.
        checked_pid(entry.required("sid"))?;
        checked_pid(entry.required("pgid"))?;
    }
    match root_count {
        1 => Ok(()),
        _ => Err(tree_violation(format!("it has {root_count} roots"))),
    }
}

/// Checks that a process shares all namespaces with CRIU. Returns the number of its table of
/// descriptors.
fn check_ids(images: &ImageDir<'_>, pid: u32, root_ids: &Message) -> Result<u32, ImageViolation> {
    let ids = images.single_entry(&format!("ids-{pid}.img"), &IDS)?;
    for namespace in NAMESPACE_FIELDS {
        // CRIU restores each task into a new time namespace, which keeps its clocks.
        if namespace != "time_ns_id" && ids.number(namespace) != root_ids.number(namespace) {
            return Err(ImageViolation::Namespace { namespace });
        }
    }
    Ok(ids.required("files_id") as u32)
}

/// Checks the main thread of a process. Returns false for a zombie, which has no rights.
fn check_process_core(
    images: &ImageDir<'_>,
    policy: &RestorePolicy,
    pid: u32,
) -> Result<bool, ImageViolation> {
    let core = read_core(images, pid)?;
    let task = core.message("tc").ok_or_else(|| ImageViolation::Damaged {
        image: format!("core-{pid}.img"),
        why: "it describes no process".into(),
    })?;
    let privilege = |what: String| ImageViolation::Privilege { pid, what };
    let state = task.required("task_state");
    if !TASK_STATES.contains(&state) {
        return Err(privilege(format!("the state {state}")));
    }
    let login_uid = task.number("loginuid").unwrap_or(NO_LOGIN);
    if login_uid != NO_LOGIN && login_uid != u64::from(policy.identity.uid) {
        return Err(privilege(format!("the login of user {login_uid}")));
    }
    let oom_score_adj = task.signed("oom_score_adj").unwrap_or(0);
    if oom_score_adj < policy.limits.oom_score_adj_min && state != STATE_DEAD {
        return Err(privilege(format!("the oom_score_adj {oom_score_adj}")));
    }
    let timers = task.message("timers");
    for timer in timers
        .into_iter()
        .flat_map(|timers| timers.messages("posix"))
    {
        let clock = timer.required("clock_id");
        if !TIMER_CLOCKS.contains(&clock) && clock < OWN_CPU_CLOCK_MIN {
            return Err(privilege(format!("a timer of the clock {clock}")));
        }
    }
    if state == STATE_DEAD {
        return match core.is_present("thread_core") {
            true => Err(privilege("a thread although it has ended".into())),
            false => Ok(false),
        };
    }
    check_resource_limits(task, policy, pid)?;
    check_thread(&core, policy, pid)?;
    Ok(true)
}

/// Checks a thread that is not the main thread of its process.
fn check_thread_core(
    images: &ImageDir<'_>,
    policy: &RestorePolicy,
    tid: u32,
) -> Result<(), ImageViolation> {
    let core = read_core(images, tid)?;
    check_thread(&core, policy, tid)
}

fn read_core(images: &ImageDir<'_>, tid: u32) -> Result<Message, ImageViolation> {
    let image = format!("core-{tid}.img");
    let core = images.single_entry(&image, &CORE)?;
    match core.required("mtype") {
        MACHINE => Ok(core),
        machine => Err(ImageViolation::Damaged {
            image,
            why: format!("it is for another processor ({machine})"),
        }),
    }
}

/// Checks that the process has all its limits, none above the user's.
fn check_resource_limits(
    task: &Message,
    policy: &RestorePolicy,
    pid: u32,
) -> Result<(), ImageViolation> {
    let limits = task.message("rlimits");
    let limits: Vec<&Message> = limits
        .into_iter()
        .flat_map(|limits| limits.messages("rlimits"))
        .collect();
    if limits.len() != RESOURCE_LIMITS {
        // A limit that is absent would be that of CRIU.
        return Err(ImageViolation::Damaged {
            image: format!("core-{pid}.img"),
            why: format!("it has {} resource limits", limits.len()),
        });
    }
    for (index, limit) in limits.iter().enumerate() {
        let allowed = policy.limits.resource_limits_max[index];
        let found = limit.required("max").max(limit.required("cur"));
        if found > allowed {
            return Err(ImageViolation::ResourceLimit {
                pid,
                limit: RESOURCE_LIMIT_NAMES[index],
                found,
                allowed,
            });
        }
    }
    Ok(())
}

/// Checks the credentials and the priority of a thread.
fn check_thread(core: &Message, policy: &RestorePolicy, pid: u32) -> Result<(), ImageViolation> {
    let missing = |what: &str| ImageViolation::Damaged {
        image: format!("core-{pid}.img"),
        why: format!("it has no {what}"),
    };
    let thread = core
        .message("thread_core")
        .ok_or_else(|| missing("thread"))?;
    let credentials = thread
        .message("creds")
        .ok_or_else(|| missing("credentials"))?;
    check_credentials(credentials, policy, pid)?;
    let has_no_new_privs = credentials.number("no_new_privs") == Some(1);
    let seccomp_mode = thread.number("seccomp_mode").unwrap_or(SECCOMP_DISABLED);
    if seccomp_mode != SECCOMP_DISABLED && !has_no_new_privs {
        let what = "a seccomp filter without no_new_privs".into();
        return Err(ImageViolation::Privilege { pid, what });
    }
    check_priority(thread, policy, pid)
}

fn check_priority(
    thread: &Message,
    policy: &RestorePolicy,
    pid: u32,
) -> Result<(), ImageViolation> {
    let privilege = |what: String| Err(ImageViolation::Privilege { pid, what });
    let nice = thread.signed("sched_nice").unwrap_or(0);
    if nice < policy.limits.nice_min {
        return privilege(format!("the nice value {nice}"));
    }
    // Children start with the ordinary policy (sched(7)): this flag only takes rights away.
    let reset_on_fork = u64::from(libc::SCHED_RESET_ON_FORK.cast_unsigned());
    let scheduling_policy = thread.number("sched_policy").unwrap_or(0) & !reset_on_fork;
    let priority = thread.number("sched_prio").unwrap_or(0);
    if ORDINARY_POLICIES.contains(&scheduling_policy) {
        return Ok(());
    }
    let permitted_priorities = 1..=policy.limits.realtime_priority_max;
    if !REALTIME_POLICIES.contains(&scheduling_policy) || !permitted_priorities.contains(&priority)
    {
        return privilege(format!(
            "the scheduling policy {scheduling_policy} with the priority {priority}"
        ));
    }
    Ok(())
}

fn check_credentials(
    credentials: &Message,
    policy: &RestorePolicy,
    pid: u32,
) -> Result<(), ImageViolation> {
    let identity = &policy.identity;
    for (name, field) in UID_FIELDS {
        let found = credentials.required(name) as u32;
        if found != identity.uid {
            return Err(ImageViolation::OtherUser {
                pid,
                field,
                found,
                expected: identity.uid,
            });
        }
    }
    for (name, field) in GID_FIELDS {
        let found = credentials.required(name) as u32;
        if found != identity.gid {
            return Err(ImageViolation::OtherGroup {
                pid,
                field,
                found,
                expected: identity.gid,
            });
        }
    }
    let mut groups = credentials.numbers("groups").map(|gid| gid as u32);
    if let Some(gid) = groups.find(|gid| !identity.has_group(*gid)) {
        return Err(ImageViolation::ForeignGroup { pid, gid });
    }
    for (name, set) in CAPABILITY_FIELDS {
        if credentials.numbers(name).any(|word| word != 0) {
            return Err(ImageViolation::Capabilities { pid, set });
        }
    }
    let bounding_words = credentials.numbers("cap_bnd").enumerate();
    for (index, word) in bounding_words {
        let allowed = policy
            .bounding_set
            .checked_shr(32 * index as u32)
            .unwrap_or(0)
            & u64::from(u32::MAX);
        if word & !allowed != 0 {
            return Err(ImageViolation::Capabilities {
                pid,
                set: "bounding",
            });
        }
    }
    let secure_bits = credentials.required("secbits") as u32;
    if secure_bits != 0 {
        return Err(ImageViolation::SecureBits {
            pid,
            bits: secure_bits,
        });
    }
    let profiles = ["lsm_profile", "lsm_sockcreate", "apparmor_data"];
    if profiles
        .iter()
        .any(|profile| credentials.is_present(profile))
    {
        return Err(ImageViolation::SecurityProfile { pid });
    }
    if policy.requires_no_new_privs && credentials.number("no_new_privs") != Some(1) {
        return Err(ImageViolation::NewPrivileges { pid });
    }
    Ok(())
}
