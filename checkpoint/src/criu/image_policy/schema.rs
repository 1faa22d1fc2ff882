//! The messages of images and their fields, from `images/*.proto` of CRIU 4.2.1. The comment before
//! each message names its file. Fields that a permitted image never contains are left out: an image
//! with such a field is refused.

use super::wire::Kind::{Bool, Bytes, Fixed64, I32, Message, U32, U64, Zigzag};
use super::wire::{Field, Kind, Occurrence, Schema};

const fn required(number: u32, name: &'static str, kind: Kind) -> Field {
    Field {
        number,
        name,
        kind,
        occurrence: Occurrence::Required,
    }
}

const fn optional(number: u32, name: &'static str, kind: Kind) -> Field {
    Field {
        occurrence: Occurrence::Optional,
        ..required(number, name, kind)
    }
}

const fn repeated(number: u32, name: &'static str, kind: Kind) -> Field {
    Field {
        occurrence: Occurrence::Repeated,
        ..required(number, name, kind)
    }
}

const fn schema(name: &'static str, fields: &'static [Field]) -> Schema {
    Schema { name, fields }
}

// `inventory.proto`
static PLUGINS: Schema = schema("plugins_entry", &[]);
pub(super) static INVENTORY: Schema = schema(
    "inventory_entry",
    &[
        required(1, "img_version", U32),
        optional(2, "fdinfo_per_id", Bool),
        optional(3, "root_ids", Message(&IDS)),
        optional(4, "ns_per_id", Bool),
        optional(5, "root_cg_set", U32),
        optional(6, "lsmtype", U32),
        optional(8, "dump_uptime", U64),
        optional(9, "pre_dump_mode", U32),
        optional(10, "tcp_close", Bool),
        optional(11, "network_lock_method", U32),
        optional(12, "plugins_entry", Message(&PLUGINS)),
        optional(13, "dump_criu_run_id", Bytes),
    ],
);

// `pstree.proto`
pub(super) static PSTREE: Schema = schema(
    "pstree_entry",
    &[
        required(1, "pid", U32),
        required(2, "ppid", U32),
        required(3, "pgid", U32),
        required(4, "sid", U32),
        repeated(5, "threads", U32),
    ],
);

// `core.proto`
pub(super) static IDS: Schema = schema(
    "task_kobj_ids_entry",
    &[
        required(1, "vm_id", U32),
        required(2, "files_id", U32),
        required(3, "fs_id", U32),
        required(4, "sighand_id", U32),
        optional(5, "pid_ns_id", U32),
        optional(6, "net_ns_id", U32),
        optional(7, "ipc_ns_id", U32),
        optional(8, "uts_ns_id", U32),
        optional(9, "mnt_ns_id", U32),
        optional(10, "user_ns_id", U32),
        optional(11, "cgroup_ns_id", U32),
        optional(12, "time_ns_id", U32),
    ],
);
/// The fields of [`IDS`] that name namespaces.
pub(super) const NAMESPACE_FIELDS: [&str; 8] = [
    "pid_ns_id",
    "net_ns_id",
    "ipc_ns_id",
    "uts_ns_id",
    "mnt_ns_id",
    "user_ns_id",
    "cgroup_ns_id",
    "time_ns_id",
];

// `timer.proto`
static ITIMER: Schema = schema(
    "itimer_entry",
    &[
        required(1, "isec", U64),
        required(2, "iusec", U64),
        required(3, "vsec", U64),
        required(4, "vusec", U64),
    ],
);
static POSIX_TIMER: Schema = schema(
    "posix_timer_entry",
    &[
        required(1, "it_id", U32),
        required(2, "clock_id", U32),
        required(3, "si_signo", U32),
        required(4, "it_sigev_notify", U32),
        required(5, "sival_ptr", U64),
        required(6, "overrun", U32),
        required(7, "isec", U64),
        required(8, "insec", U64),
        required(9, "vsec", U64),
        required(10, "vnsec", U64),
        optional(11, "notify_thread_id", I32),
    ],
);
static TASK_TIMERS: Schema = schema(
    "task_timers_entry",
    &[
        required(1, "real", Message(&ITIMER)),
        required(2, "virt", Message(&ITIMER)),
        required(3, "prof", Message(&ITIMER)),
        repeated(4, "posix", Message(&POSIX_TIMER)),
    ],
);

// `rlimit.proto`
static RLIMIT: Schema = schema(
    "rlimit_entry",
    &[required(1, "cur", U64), required(2, "max", U64)],
);
// `core.proto`
static TASK_RLIMITS: Schema = schema(
    "task_rlimits_entry",
    &[repeated(1, "rlimits", Message(&RLIMIT))],
);

// `siginfo.proto`
static SIGINFO: Schema = schema("siginfo_entry", &[required(1, "siginfo", Bytes)]);
static SIGNAL_QUEUE: Schema = schema(
    "signal_queue_entry",
    &[repeated(1, "signals", Message(&SIGINFO))],
);

// `sa.proto`
static SIGACTION: Schema = schema(
    "sa_entry",
    &[
        required(1, "sigaction", U64),
        required(2, "flags", U64),
        required(3, "restorer", U64),
        required(4, "mask", U64),
        optional(5, "compat_sigaction", Bool),
        optional(6, "mask_extended", U64),
    ],
);

// `core.proto`; without the control groups and the fields that newer images have per thread
static TASK_CORE: Schema = schema(
    "task_core_entry",
    &[
        required(1, "task_state", U32),
        required(2, "exit_code", U32),
        required(3, "personality", U32),
        required(4, "flags", U32),
        required(5, "blk_sigset", U64),
        required(6, "comm", Bytes),
        optional(7, "timers", Message(&TASK_TIMERS)),
        optional(8, "rlimits", Message(&TASK_RLIMITS)),
        optional(10, "signals_s", Message(&SIGNAL_QUEUE)),
        optional(13, "loginuid", U32),
        optional(14, "oom_score_adj", I32),
        repeated(15, "sigactions", Message(&SIGACTION)),
        optional(18, "child_subreaper", Bool),
        optional(20, "blk_sigset_extended", U64),
        optional(21, "stop_signo", U32),
        optional(22, "membarrier_registration_mask", U32),
    ],
);
static SIGNAL_STACK: Schema = schema(
    "thread_sas_entry",
    &[
        required(1, "ss_sp", U64),
        required(2, "ss_size", U64),
        required(3, "ss_flags", U32),
    ],
);

// `rseq.proto`
static RSEQ: Schema = schema(
    "rseq_entry",
    &[
        required(1, "rseq_abi_pointer", U64),
        required(2, "rseq_abi_size", U32),
        required(3, "signature", U32),
        optional(4, "rseq_cs_pointer", U64),
    ],
);

// `creds.proto`; without the profiles of security modules
pub(super) static CREDS: Schema = schema(
    "creds_entry",
    &[
        required(1, "uid", U32),
        required(2, "gid", U32),
        required(3, "euid", U32),
        required(4, "egid", U32),
        required(5, "suid", U32),
        required(6, "sgid", U32),
        required(7, "fsuid", U32),
        required(8, "fsgid", U32),
        repeated(9, "cap_inh", U32),
        repeated(10, "cap_prm", U32),
        repeated(11, "cap_eff", U32),
        repeated(12, "cap_bnd", U32),
        required(13, "secbits", U32),
        repeated(14, "groups", U32),
        optional(15, "lsm_profile", Bytes),
        optional(16, "lsm_sockcreate", Bytes),
        optional(17, "apparmor_data", Bytes),
        optional(18, "no_new_privs", U32),
        repeated(19, "cap_amb", U32),
    ],
);

// `core.proto`
static THREAD_CORE: Schema = schema(
    "thread_core_entry",
    &[
        required(1, "futex_rla", U64),
        required(2, "futex_rla_len", U32),
        optional(3, "sched_nice", Zigzag),
        optional(4, "sched_policy", U32),
        optional(5, "sched_prio", U32),
        optional(6, "blk_sigset", U64),
        optional(7, "sas", Message(&SIGNAL_STACK)),
        optional(8, "pdeath_sig", U32),
        optional(9, "signals_p", Message(&SIGNAL_QUEUE)),
        optional(10, "creds", Message(&CREDS)),
        optional(11, "seccomp_mode", U32),
        optional(12, "seccomp_filter", U32),
        optional(13, "comm", Bytes),
        optional(14, "blk_sigset_extended", U64),
        optional(15, "rseq_entry", Message(&RSEQ)),
        optional(16, "cg_set", U32),
    ],
);
/// The registers are not decoded: the kernel checks them as it checks those of a signal handler.
pub(super) static CORE: Schema = schema(
    "core_entry",
    &[
        required(1, "mtype", U32),
        optional(2, "thread_info", Bytes),
        optional(8, "ti_aarch64", Bytes),
        optional(3, "tc", Message(&TASK_CORE)),
        optional(4, "ids", Message(&IDS)),
        optional(5, "thread_core", Message(&THREAD_CORE)),
    ],
);

// `seccomp.proto`
static SECCOMP_FILTER: Schema = schema(
    "seccomp_filter",
    &[
        required(1, "filter", Bytes),
        optional(2, "prev", U32),
        optional(3, "flags", U32),
    ],
);
pub(super) static SECCOMP: Schema = schema(
    "seccomp_entry",
    &[repeated(1, "seccomp_filters", Message(&SECCOMP_FILTER))],
);

// `fs.proto`
pub(super) static FS: Schema = schema(
    "fs_entry",
    &[
        required(1, "cwd_id", U32),
        required(2, "root_id", U32),
        optional(3, "umask", U32),
    ],
);

// `timens.proto`
static TIMESPEC: Schema = schema(
    "timespec",
    &[required(1, "tv_sec", U64), required(2, "tv_nsec", U64)],
);
pub(super) static TIMENS: Schema = schema(
    "timens_entry",
    &[
        required(1, "monotonic", Message(&TIMESPEC)),
        required(2, "boottime", Message(&TIMESPEC)),
    ],
);

// `vma.proto`
pub(super) static VMA: Schema = schema(
    "vma_entry",
    &[
        required(1, "start", U64),
        required(2, "end", U64),
        required(3, "pgoff", U64),
        required(4, "shmid", U64),
        required(5, "prot", U32),
        required(6, "flags", U32),
        required(7, "status", U32),
        required(8, "fd", Zigzag),
        optional(9, "madv", U64),
        optional(10, "fdflags", U32),
    ],
);
// `mm.proto`
static AIO_RING: Schema = schema(
    "aio_ring_entry",
    &[
        required(1, "id", U64),
        required(2, "nr_req", U32),
        required(3, "ring_len", U32),
    ],
);
pub(super) static MM: Schema = schema(
    "mm_entry",
    &[
        required(1, "mm_start_code", U64),
        required(2, "mm_end_code", U64),
        required(3, "mm_start_data", U64),
        required(4, "mm_end_data", U64),
        required(5, "mm_start_stack", U64),
        required(6, "mm_start_brk", U64),
        required(7, "mm_brk", U64),
        required(8, "mm_arg_start", U64),
        required(9, "mm_arg_end", U64),
        required(10, "mm_env_start", U64),
        required(11, "mm_env_end", U64),
        required(12, "exe_file_id", U32),
        repeated(13, "mm_saved_auxv", U64),
        repeated(14, "vmas", Message(&VMA)),
        optional(15, "dumpable", I32),
        repeated(16, "aios", Message(&AIO_RING)),
        optional(17, "thp_disabled", Bool),
    ],
);
// `pagemap.proto`
pub(super) static PAGEMAP_HEAD: Schema = schema("pagemap_head", &[required(1, "pages_id", U32)]);
pub(super) static PAGEMAP: Schema = schema(
    "pagemap_entry",
    &[
        required(1, "vaddr", U64),
        required(2, "compat_nr_pages", U32),
        optional(4, "flags", U32),
        optional(5, "nr_pages", U64),
    ],
);

// `fdinfo.proto`
pub(super) static FDINFO: Schema = schema(
    "fdinfo_entry",
    &[
        required(1, "id", U32),
        required(2, "flags", U32),
        required(3, "type", U32),
        required(4, "fd", U32),
    ],
);
/// The messages of file kinds that are never permitted are not decoded.
pub(super) static FILE: Schema = schema(
    "file_entry",
    &[
        required(1, "type", U32),
        required(2, "id", U32),
        optional(3, "reg", Message(&REG_FILE)),
        optional(4, "isk", Message(&INET_SOCKET)),
        optional(5, "nsf", Bytes),
        optional(6, "psk", Bytes),
        optional(7, "nlsk", Bytes),
        optional(8, "efd", Message(&EVENTFD)),
        optional(9, "epfd", Message(&EVENTPOLL)),
        optional(10, "sgfd", Message(&SIGNALFD)),
        optional(11, "tunf", Bytes),
        optional(12, "tfd", Message(&TIMERFD)),
        optional(13, "ify", Message(&INOTIFY)),
        optional(14, "ffy", Bytes),
        optional(15, "ext", Bytes),
        optional(16, "usk", Message(&UNIX_SOCKET)),
        optional(17, "fifo", Message(&FIFO)),
        optional(18, "pipe", Message(&PIPE)),
        optional(19, "tty", Message(&TTY_FILE)),
        optional(20, "memfd", Message(&MEMFD_FILE)),
        optional(21, "bpf", Bytes),
        optional(22, "pidfd", Message(&PIDFD)),
    ],
);

// `fown.proto`
static OWNER: Schema = schema(
    "fown_entry",
    &[
        required(1, "uid", U32),
        required(2, "euid", U32),
        required(3, "signum", U32),
        required(4, "pid_type", U32),
        required(5, "pid", U32),
    ],
);
// `regfile.proto`
static REG_FILE: Schema = schema(
    "reg_file_entry",
    &[
        required(1, "id", U32),
        required(2, "flags", U32),
        required(3, "pos", U64),
        required(5, "fown", Message(&OWNER)),
        required(6, "name", Bytes),
        optional(7, "mnt_id", Zigzag),
        optional(8, "size", U64),
        optional(9, "ext", Bool),
        optional(10, "mode", U32),
        repeated(11, "build_id", U32),
        optional(12, "checksum", U32),
        optional(13, "checksum_config", U32),
        optional(14, "checksum_parameter", U32),
    ],
);
// `pipe.proto`
static PIPE: Schema = schema(
    "pipe_entry",
    &[
        required(1, "id", U32),
        required(2, "pipe_id", U32),
        required(3, "flags", U32),
        required(4, "fown", Message(&OWNER)),
    ],
);
// `pipe-data.proto`
pub(super) static PIPE_DATA: Schema = schema(
    "pipe_data_entry",
    &[
        required(1, "pipe_id", U32),
        required(2, "bytes", U32),
        optional(3, "size", U32),
    ],
);
// `fifo.proto`
static FIFO: Schema = schema(
    "fifo_entry",
    &[
        required(1, "id", U32),
        required(2, "pipe_id", U32),
        optional(3, "regf_id", U32),
    ],
);
// `eventfd.proto`
static EVENTFD: Schema = schema(
    "eventfd_file_entry",
    &[
        required(1, "id", U32),
        required(2, "flags", U32),
        required(3, "fown", Message(&OWNER)),
        required(4, "counter", U64),
    ],
);
// `eventpoll.proto`
static EVENTPOLL_TARGET: Schema = schema(
    "eventpoll_tfd_entry",
    &[
        required(1, "id", U32),
        required(2, "tfd", U32),
        required(3, "events", U32),
        required(4, "data", U64),
        optional(5, "dev", U32),
        optional(6, "inode", U64),
        optional(7, "pos", U64),
    ],
);
static EVENTPOLL: Schema = schema(
    "eventpoll_file_entry",
    &[
        required(1, "id", U32),
        required(2, "flags", U32),
        required(3, "fown", Message(&OWNER)),
        repeated(4, "tfd", Message(&EVENTPOLL_TARGET)),
    ],
);
// `signalfd.proto`
static SIGNALFD: Schema = schema(
    "signalfd_entry",
    &[
        required(1, "id", U32),
        required(2, "flags", U32),
        required(3, "fown", Message(&OWNER)),
        required(4, "sigmask", U64),
    ],
);
// `timerfd.proto`
static TIMERFD: Schema = schema(
    "timerfd_entry",
    &[
        required(1, "id", U32),
        required(2, "flags", U32),
        required(3, "fown", Message(&OWNER)),
        required(4, "clockid", U32),
        required(5, "ticks", U64),
        required(6, "settime_flags", U32),
        required(7, "vsec", U64),
        required(8, "vnsec", U64),
        required(9, "isec", U64),
        required(10, "insec", U64),
    ],
);
// `fh.proto`
static FILE_HANDLE: Schema = schema(
    "fh_entry",
    &[
        required(1, "bytes", U32),
        required(2, "type", U32),
        repeated(3, "handle", U64),
        optional(4, "path", Bytes),
        optional(5, "mnt_id", U32),
    ],
);
// `fsnotify.proto`
static INOTIFY_WATCH: Schema = schema(
    "inotify_wd_entry",
    &[
        required(1, "id", U32),
        required(2, "i_ino", U64),
        required(3, "mask", U32),
        required(4, "ignored_mask", U32),
        required(5, "s_dev", U32),
        required(6, "wd", U32),
        required(7, "f_handle", Message(&FILE_HANDLE)),
    ],
);
static INOTIFY: Schema = schema(
    "inotify_file_entry",
    &[
        required(1, "id", U32),
        required(2, "flags", U32),
        required(4, "fown", Message(&OWNER)),
        repeated(5, "wd", Message(&INOTIFY_WATCH)),
    ],
);
// `sk-opts.proto`; without the options that need privileges: `so_mark`, `so_bound_dev`
static SOCKET_OPTIONS: Schema = schema(
    "sk_opts_entry",
    &[
        required(1, "so_sndbuf", U32),
        required(2, "so_rcvbuf", U32),
        required(3, "so_snd_tmo_sec", U64),
        required(4, "so_snd_tmo_usec", U64),
        required(5, "so_rcv_tmo_sec", U64),
        required(6, "so_rcv_tmo_usec", U64),
        optional(7, "reuseaddr", Bool),
        optional(8, "so_priority", U32),
        optional(9, "so_rcvlowat", U32),
        optional(10, "so_mark", U32),
        optional(11, "so_passcred", Bool),
        optional(12, "so_passsec", Bool),
        optional(13, "so_dontroute", Bool),
        optional(14, "so_no_check", Bool),
        optional(15, "so_bound_dev", Bytes),
        repeated(16, "so_filter", Fixed64),
        optional(17, "so_reuseport", Bool),
        optional(18, "so_broadcast", Bool),
        optional(19, "so_keepalive", Bool),
        optional(20, "tcp_keepcnt", U32),
        optional(21, "tcp_keepidle", U32),
        optional(22, "tcp_keepintvl", U32),
        optional(23, "so_oobinline", U32),
        optional(24, "so_linger", U32),
        optional(25, "so_buf_lock", U32),
    ],
);
// `sk-unix.proto`
static FILE_PERMISSIONS: Schema = schema(
    "file_perms_entry",
    &[
        required(1, "mode", U32),
        required(2, "uid", U32),
        required(3, "gid", U32),
    ],
);
static UNIX_SOCKET: Schema = schema(
    "unix_sk_entry",
    &[
        required(1, "id", U32),
        required(2, "ino", U32),
        required(3, "type", U32),
        required(4, "state", U32),
        required(5, "flags", U32),
        required(6, "uflags", U32),
        required(7, "backlog", U32),
        required(8, "peer", U32),
        required(9, "fown", Message(&OWNER)),
        required(10, "opts", Message(&SOCKET_OPTIONS)),
        required(11, "name", Bytes),
        optional(12, "shutdown", U32),
        optional(13, "file_perms", Message(&FILE_PERMISSIONS)),
        optional(14, "name_dir", Bytes),
        optional(15, "deleted", Bool),
        optional(16, "ns_id", U32),
        optional(17, "mnt_id", Zigzag),
    ],
);
// `sk-inet.proto`; without the options of raw sockets
static IP_OPTIONS: Schema = schema(
    "ip_opts_entry",
    &[
        optional(1, "freebind", Bool),
        optional(5, "pktinfo", Bool),
        optional(6, "tos", U32),
        optional(7, "ttl", U32),
    ],
);
// `tcp-stream.proto`
static TCP_OPTIONS: Schema = schema(
    "tcp_opts_entry",
    &[
        optional(1, "cork", Bool),
        optional(2, "nodelay", Bool),
        optional(3, "keepcnt", U32),
        optional(4, "keepidle", U32),
        optional(5, "keepintvl", U32),
    ],
);
static INET_SOCKET: Schema = schema(
    "inet_sk_entry",
    &[
        required(1, "id", U32),
        required(2, "ino", U32),
        required(3, "family", U32),
        required(4, "type", U32),
        required(5, "proto", U32),
        required(6, "state", U32),
        required(7, "src_port", U32),
        required(8, "dst_port", U32),
        required(9, "flags", U32),
        required(10, "backlog", U32),
        repeated(11, "src_addr", U32),
        repeated(12, "dst_addr", U32),
        required(13, "fown", Message(&OWNER)),
        required(14, "opts", Message(&SOCKET_OPTIONS)),
        optional(15, "v6only", Bool),
        optional(16, "ip_opts", Message(&IP_OPTIONS)),
        optional(17, "ifname", Bytes),
        optional(18, "ns_id", U32),
        optional(19, "shutdown", U32),
        optional(20, "tcp_opts", Message(&TCP_OPTIONS)),
    ],
);
// `sk-packet.proto`
static CONTROL_MESSAGE: Schema = schema(
    "scm_entry",
    &[required(1, "type", U32), repeated(2, "rights", U32)],
);
pub(super) static SOCKET_PACKET: Schema = schema(
    "sk_packet_entry",
    &[
        required(1, "id_for", U32),
        required(2, "length", U32),
        repeated(4, "scm", Message(&CONTROL_MESSAGE)),
    ],
);
// `tty.proto`
static TTY_FILE: Schema = schema(
    "tty_file_entry",
    &[
        required(1, "id", U32),
        required(2, "tty_info_id", U32),
        required(3, "flags", U32),
        required(4, "fown", Message(&OWNER)),
        optional(6, "regf_id", U32),
    ],
);
static PTY: Schema = schema("tty_pty_entry", &[required(1, "index", U32)]);
pub(super) static TTY_INFO: Schema = schema(
    "tty_info_entry",
    &[
        required(1, "id", U32),
        required(2, "type", U32),
        required(3, "locked", Bool),
        required(4, "exclusive", Bool),
        required(5, "packet_mode", Bool),
        required(6, "sid", U32),
        required(7, "pgrp", U32),
        required(8, "rdev", U32),
        optional(9, "termios", Bytes),
        optional(10, "termios_locked", Bytes),
        optional(11, "winsize", Bytes),
        optional(12, "pty", Message(&PTY)),
        optional(13, "dev", U32),
        optional(14, "uid", U32),
        optional(15, "gid", U32),
    ],
);
// `memfd.proto`
static MEMFD_FILE: Schema = schema(
    "memfd_file_entry",
    &[
        required(1, "id", U32),
        required(2, "flags", U32),
        required(3, "pos", U64),
        required(4, "fown", Message(&OWNER)),
        required(5, "inode_id", U32),
    ],
);
pub(super) static MEMFD_INODE: Schema = schema(
    "memfd_inode_entry",
    &[
        required(1, "name", Bytes),
        required(2, "uid", U32),
        required(3, "gid", U32),
        required(4, "size", U64),
        required(5, "shmid", U32),
        required(6, "seals", U32),
        required(7, "inode_id", U64),
        optional(8, "hugetlb_flag", U32),
        optional(9, "mode", U32),
    ],
);
// `pidfd.proto`
static PIDFD: Schema = schema(
    "pidfd_entry",
    &[
        required(1, "id", U32),
        required(2, "ino", U32),
        required(3, "flags", U32),
        required(4, "nspid", I32),
        required(5, "fown", Message(&OWNER)),
    ],
);

// `time.proto`
static TIMEVAL: Schema = schema(
    "timeval",
    &[required(1, "tv_sec", U64), required(2, "tv_usec", U64)],
);
// `ghost-file.proto`; without devices
pub(super) static GHOST_FILE: Schema = schema(
    "ghost_file_entry",
    &[
        required(1, "uid", U32),
        required(2, "gid", U32),
        required(3, "mode", U32),
        optional(4, "dev", U32),
        optional(5, "ino", U64),
        optional(6, "rdev", U32),
        optional(7, "atim", Message(&TIMEVAL)),
        optional(8, "mtim", Message(&TIMEVAL)),
        optional(9, "chunks", Bool),
        optional(10, "size", U64),
        optional(11, "symlnk_target", Bytes),
    ],
);
// `remap-file-path.proto`
pub(super) static REMAP: Schema = schema(
    "remap_file_path_entry",
    &[
        required(1, "orig_id", U32),
        required(2, "remap_id", U32),
        optional(3, "remap_type", U32),
    ],
);
