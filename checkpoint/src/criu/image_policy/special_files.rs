//! Checks open files that are not regular files: pipes, sockets, terminals, memory files, and the
//! anonymous files of the kernel.

use super::files::{FileTable, SPECIAL_MODE_BITS, checked_path, is_about_process, table_damage};
use super::images::ImageDir;
use super::schema::{MEMFD_INODE, PIPE_DATA, SOCKET_PACKET, TTY_INFO};
use super::violation::ImageViolation;
use super::wire::Message;
use super::{FileAccess, RestorePolicy};
use std::path::Path;

/// Clocks of timers that need no capability: CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_BOOTTIME.
const TIMERFD_CLOCKS: [u64; 3] = [0, 1, 7];
/// Highest priority of a socket's packets that needs no capability (`SO_PRIORITY`).
const SOCKET_PRIORITY_MAX: u64 = 6;
/// Types of Unix sockets: stream, datagram, sequence of packets.
const UNIX_SOCKET_TYPES: [u64; 3] = [1, 2, 5];
/// TCP states of sockets without a connection: TCP_CLOSE, TCP_LISTEN.
const UNCONNECTED_STATES: [u64; 2] = [7, 10];
/// Type of a control message that contains descriptors (`SCM_RIGHTS`).
const CONTROL_RIGHTS: u64 = 1;
/// Seals of memory files that Linux has (`F_SEAL_SEAL` … `F_SEAL_EXEC`).
const MEMFD_SEALS: u64 = 0x3f;
/// Values of `type` in `tty_info_entry`: a pseudo terminal, and the controlling terminal of a
/// process under the name `/dev/tty`.
const TTY_TYPES: [u64; 2] = [1, 4];
/// Device number of `/dev/ptmx`, as the kernel encodes it: major 5, minor 2.
const PTMX_DEVICE: u64 = 5 << 8 | 2;
/// Group `tty`, to which the system's pseudo terminals belong.
const TTY_GROUP: u32 = 5;
/// Highest value of `pid_type` in `fown_entry`: the owner is a process group (`F_OWNER_PGRP`).
const OWNER_TYPE_MAX: u64 = 2;
/// Number of signals that the kernel has, plus one.
const SIGNALS_END: u64 = 65;

/// Checks a file of `files.img` that is not a regular file.
pub(super) fn check(
    kind: u64,
    description: &Message,
    policy: &RestorePolicy,
    table: &mut FileTable,
) -> Result<(), ImageViolation> {
    match kind {
        // A named pipe has no owner of its own.
        3 => return check_fifo(description, table),
        4 => check_inet_socket(description, policy)?,
        5 => check_unix_socket(description, policy, table)?,
        8 => check_inotify(description, table)?,
        11 => check_tty_file(description, table)?,
        17 => check_timerfd(description)?,
        20 => check_pidfd(description)?,
        // Pipes, and the kernel's files without a name: eventfd, epoll, signalfd, memfd.
        _ => {}
    }
    check_signal_owner(description, policy)
}

/// Checks which process gets the signals of a file. CRIU takes the user ids in the images to decide
/// whether the signal is permitted.
pub(super) fn check_signal_owner(
    description: &Message,
    policy: &RestorePolicy,
) -> Result<(), ImageViolation> {
    let owner = description
        .message("fown")
        .ok_or_else(|| table_damage("a file has no owner"))?;
    if owner.required("signum") >= SIGNALS_END || owner.required("pid_type") > OWNER_TYPE_MAX {
        return Err(table_damage("the owner of a file is not valid"));
    }
    let pid = owner.required("pid");
    let uids = [owner.required("uid"), owner.required("euid")];
    let is_user = uids
        .iter()
        .all(|uid| *uid == u64::from(policy.identity.uid));
    if pid != 0 && (pid == 1 || !is_user) {
        return Err(ImageViolation::FileKind {
            kind: format!(
                "a file whose signals go to process {pid} as user {}",
                uids[0]
            ),
        });
    }
    Ok(())
}

/// Checks that a file would belong to the user.
pub(super) fn check_file_owner(
    what: String,
    uid: u32,
    gid: u32,
    policy: &RestorePolicy,
) -> Result<(), ImageViolation> {
    match uid == policy.identity.uid && policy.identity.has_group(gid) {
        true => Ok(()),
        false => Err(ImageViolation::ForeignOwner { what, uid, gid }),
    }
}

fn check_fifo(fifo: &Message, table: &mut FileTable) -> Result<(), ImageViolation> {
    match fifo.number("regf_id") {
        Some(id) => table.reference(id as u32, None),
        None => Err(table_damage("a named pipe has no name")),
    }
}

fn check_timerfd(timer: &Message) -> Result<(), ImageViolation> {
    let clock = timer.required("clockid");
    match TIMERFD_CLOCKS.contains(&clock) {
        true => Ok(()),
        false => Err(ImageViolation::FileKind {
            kind: format!("a timer of the clock {clock}"),
        }),
    }
}

/// Checks that a descriptor of a process is not that of the namespace's init.
fn check_pidfd(pidfd: &Message) -> Result<(), ImageViolation> {
    match pidfd.signed("nspid").unwrap_or(0) {
        // The process has ended.
        -1 => Ok(()),
        2.. => Ok(()),
        pid => Err(ImageViolation::FileKind {
            kind: format!("a descriptor of the process {pid}"),
        }),
    }
}

/// Checks that each watch names its path. CRIU opens a watch without a path by the handle of the
/// file, which gives access to any file.
fn check_inotify(inotify: &Message, table: &mut FileTable) -> Result<(), ImageViolation> {
    for watch in inotify.messages("wd") {
        let path = watch
            .message("f_handle")
            .and_then(|handle| handle.bytes("path"));
        let path = path.ok_or_else(|| ImageViolation::FileKind {
            kind: "an inotify watch whose path is unknown".into(),
        })?;
        let path = checked_path(path)?;
        if is_about_process(&path) {
            return Err(ImageViolation::FileKind {
                kind: "an inotify watch of a process".into(),
            });
        }
        table.add_opened(path, FileAccess::Read);
    }
    Ok(())
}

fn check_socket_options(socket: &Message, policy: &RestorePolicy) -> Result<(), ImageViolation> {
    let options = socket
        .message("opts")
        .ok_or_else(|| table_damage("a socket has no options"))?;
    let privileged_option = if options.number("so_mark").unwrap_or(0) != 0 {
        Some("a mark (SO_MARK)")
    } else if options.is_present("so_bound_dev") {
        Some("a device (SO_BINDTODEVICE)")
    } else if options.number("so_priority").unwrap_or(0) > SOCKET_PRIORITY_MAX {
        Some("a high priority (SO_PRIORITY)")
    } else {
        None
    };
    if let Some(option) = privileged_option {
        return Err(ImageViolation::FileKind {
            kind: format!("a socket with {option}"),
        });
    }
    let buffers = [options.required("so_sndbuf"), options.required("so_rcvbuf")];
    match buffers
        .iter()
        .any(|bytes| *bytes > policy.limits.socket_bytes_max)
    {
        true => Err(ImageViolation::TooMany {
            what: "bytes in the buffer of a socket",
            limit: policy.limits.socket_bytes_max,
        }),
        false => Ok(()),
    }
}

fn check_inet_socket(socket: &Message, policy: &RestorePolicy) -> Result<(), ImageViolation> {
    check_socket_options(socket, policy)?;
    let family = socket.required("family") as i32;
    let socket_type = socket.required("type") as i32;
    let protocol = socket.required("proto") as i32;
    let refused_socket = |kind: String| Err(ImageViolation::FileKind { kind });
    if !matches!(family, libc::AF_INET | libc::AF_INET6) {
        return refused_socket(format!("a socket of the family {family}"));
    }
    match (socket_type, protocol) {
        (libc::SOCK_STREAM, libc::IPPROTO_TCP) => {
            if !UNCONNECTED_STATES.contains(&socket.required("state")) {
                return refused_socket("a TCP connection".into());
            }
        }
        (libc::SOCK_DGRAM, libc::IPPROTO_UDP) => {}
        (libc::SOCK_RAW, _) => return refused_socket("a raw socket".into()),
        _ => return refused_socket(format!("a socket of the protocol {protocol}")),
    }
    let port = socket.required("src_port") as u32;
    match port != 0 && port < policy.limits.port_min {
        true => Err(ImageViolation::PrivilegedPort { port }),
        false => Ok(()),
    }
}

fn check_unix_socket(
    socket: &Message,
    policy: &RestorePolicy,
    table: &mut FileTable,
) -> Result<(), ImageViolation> {
    check_socket_options(socket, policy)?;
    if !UNIX_SOCKET_TYPES.contains(&socket.required("type")) {
        return Err(ImageViolation::FileKind {
            kind: "a Unix socket of an unknown type".into(),
        });
    }
    // The flags name sockets whose other end is not in the images.
    if socket.required("uflags") != 0 {
        return Err(ImageViolation::FileKind {
            kind: "a Unix socket that leads out of the task".into(),
        });
    }
    if socket.signed("mnt_id").unwrap_or(-1) != -1 {
        return Err(ImageViolation::Namespace {
            namespace: "mnt_id",
        });
    }
    let name = socket.bytes("name").unwrap_or_default();
    let name_dir = socket.bytes("name_dir");
    // The name of an abstract address begins with a null byte.
    if name.is_empty() || name[0] == 0 {
        return match name_dir {
            None => Ok(()),
            Some(_) => Err(table_damage("a Unix socket has a directory but no name")),
        };
    }
    let name = name.strip_suffix(b"\0").unwrap_or(name);
    let path = match name_dir {
        None => checked_path(name)?,
        Some(dir) => checked_path(&[dir, b"/", name].concat())?,
    };
    if is_about_process(&path) {
        return Err(ImageViolation::FilePath {
            path: path.display().to_string(),
        });
    }
    let what = format!("the Unix socket {}", path.display());
    if let Some(permissions) = socket.message("file_perms") {
        let mode = permissions.required("mode") as u32;
        if mode & libc::S_IFMT != libc::S_IFSOCK || mode & SPECIAL_MODE_BITS != 0 {
            return Err(ImageViolation::SpecialMode { what, mode });
        }
        let [uid, gid] = ["uid", "gid"].map(|name| permissions.required(name) as u32);
        check_file_owner(what, uid, gid, policy)?;
    }
    // CRIU removes a socket of this name, and creates the name again.
    table.add_opened(path, FileAccess::Create);
    Ok(())
}

/// Checks the name under which a terminal was opened. CRIU opens pseudo terminals by their number
/// and not by this name.
fn check_tty_file(tty: &Message, table: &mut FileTable) -> Result<(), ImageViolation> {
    let id = tty
        .number("regf_id")
        .ok_or_else(|| table_damage("a terminal has no name"))? as u32;
    let path = table.regular_path(id)?;
    let is_terminal = ["/dev/ptmx", "/dev/pts/ptmx", "/dev/tty"]
        .iter()
        .any(|name| path == Path::new(name))
        || path
            .strip_prefix("/dev/pts")
            .ok()
            .and_then(Path::to_str)
            .is_some_and(|number| number.parse::<u32>().is_ok());
    if !is_terminal {
        return Err(ImageViolation::FileKind {
            kind: format!("the terminal {}", path.display()),
        });
    }
    table.mark_referenced(id);
    Ok(())
}

/// Checks the images that describe the content of special files.
pub(super) fn check_images(
    images: &ImageDir<'_>,
    policy: &RestorePolicy,
    table: &FileTable,
) -> Result<(), ImageViolation> {
    for name in ["pipes-data.img", "fifo-data.img"] {
        let entries =
            images.entries_with_data(name, &PIPE_DATA, |entry| entry.required("bytes"))?;
        for entry in entries {
            let pipe_bytes = entry
                .number("size")
                .unwrap_or(0)
                .max(entry.required("bytes"));
            if pipe_bytes > policy.limits.pipe_bytes_max {
                return Err(ImageViolation::TooMany {
                    what: "bytes in a pipe",
                    limit: policy.limits.pipe_bytes_max,
                });
            }
        }
    }
    let packets = images.entries_with_data("sk-queues.img", &SOCKET_PACKET, |packet| {
        packet.required("length")
    })?;
    for control_message in packets.iter().flat_map(|packet| packet.messages("scm")) {
        let has_known_files = control_message
            .numbers("rights")
            .all(|id| table.contains(id));
        if control_message.required("type") != CONTROL_RIGHTS || !has_known_files {
            return Err(ImageViolation::FileKind {
                kind: "a socket with control messages of an unknown kind".into(),
            });
        }
    }
    for inode in images.entries("memfd.img", &MEMFD_INODE)? {
        check_memfd(&inode, policy)?;
    }
    for terminal in images.entries("tty-info.img", &TTY_INFO)? {
        check_terminal(&terminal, policy)?;
    }
    Ok(())
}

fn check_memfd(inode: &Message, policy: &RestorePolicy) -> Result<(), ImageViolation> {
    let name = String::from_utf8_lossy(inode.bytes("name").unwrap_or_default()).into_owned();
    let what = format!("the memory file {name:?}");
    let mode = inode.number("mode").unwrap_or(0) as u32;
    if mode & SPECIAL_MODE_BITS != 0 {
        return Err(ImageViolation::SpecialMode { what, mode });
    }
    if inode.required("seals") & !MEMFD_SEALS != 0 || inode.number("hugetlb_flag").unwrap_or(0) != 0
    {
        return Err(ImageViolation::FileKind {
            kind: format!("{what} of an unknown kind"),
        });
    }
    let [uid, gid] = ["uid", "gid"].map(|field| inode.required(field) as u32);
    check_file_owner(what, uid, gid, policy)
}

/// Checks a pseudo terminal. CRIU changes the owner of the file that it opens, for the master end
/// `/dev/ptmx`, which belongs to root.
fn check_terminal(terminal: &Message, policy: &RestorePolicy) -> Result<(), ImageViolation> {
    let terminal_type = terminal.required("type");
    if !TTY_TYPES.contains(&terminal_type) {
        return Err(ImageViolation::FileKind {
            kind: "a terminal that is not a pseudo terminal".into(),
        });
    }
    // The leaders of session and group may have ended; number 1 is the namespace's init.
    if ["sid", "pgrp"]
        .iter()
        .any(|field| terminal.required(field) == 1)
    {
        return Err(ImageViolation::FileKind {
            kind: "the terminal of the namespace's init".into(),
        });
    }
    let owner = ["uid", "gid"].map(|field| terminal.number(field));
    let [Some(uid), Some(gid)] = owner else {
        return match owner {
            [None, None] => Ok(()),
            _ => Err(table_damage("a terminal has half an owner")),
        };
    };
    let (uid, gid) = (uid as u32, gid as u32);
    let is_master = terminal.required("rdev") == PTMX_DEVICE;
    let is_permitted = match is_master {
        true => uid == 0 && (gid == 0 || gid == TTY_GROUP),
        false => uid == policy.identity.uid && (gid == TTY_GROUP || policy.identity.has_group(gid)),
    };
    match is_permitted {
        true => Ok(()),
        false => Err(ImageViolation::ForeignOwner {
            what: "a terminal".into(),
            uid,
            gid,
        }),
    }
}
