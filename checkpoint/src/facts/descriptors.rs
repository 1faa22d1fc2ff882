//! Determines what an open descriptor means for a migration. [`read_descriptor`] reads /proc/PID/fd
//! and fdinfo; [`classify`] is pure.

use super::memory_map::{SHARED_MEMORY_DIR, describe_posix_memory};
use crate::proc;
use sempa_proto::task;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The open flag that marks sockets of the task's library, as fdinfo prints it.
const LIBRARY_SOCKET_FLAG: u32 = task::LIBRARY_SOCKET_FLAG.cast_unsigned();
/// Mask of the access mode in the open flags that fdinfo prints (`O_ACCMODE`).
const ACCESS_MODE_MASK: u32 = 0o3;
/// Access mode `O_WRONLY` as fdinfo prints it.
const WRITE_ONLY: u32 = 0o1;
/// Open flag `O_APPEND` as fdinfo prints it.
const APPEND: u32 = 0o2000;
/// Open flag `O_DIRECT`. On a pipe it selects packet mode, which preserves the boundaries of
/// writes.
const PACKET_MODE: u32 = libc::O_DIRECT.cast_unsigned();

/// Type of the proc file system in statfs(2). Files of this type and of the following types are not
/// stored on a disk.
const PROC_MAGIC: i64 = 0x9fa0;
const SYSFS_MAGIC: i64 = 0x6265_6572;
const MQUEUE_MAGIC: i64 = 0x1980_0202;
const SECRETMEM_MAGIC: i64 = 0x5345_434d;
const CGROUP2_MAGIC: i64 = 0x6367_7270;

/// Names of the anonymous inodes that the engine can migrate.
const SUPPORTED_ANON_INODES: [&str; 7] = [
    "[eventfd]",
    "[eventpoll]",
    "[signalfd]",
    "[timerfd]",
    "inotify",
    "[fanotify]",
    "[pidfd]",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    /// A regular file. The value is its size in bytes.
    Regular(u64),
    Directory,
    Fifo,
    CharacterDevice {
        major: u64,
        minor: u64,
    },
    Other,
}

/// The properties of a descriptor that determine whether and how the descriptor can be migrated.
#[derive(Clone, Debug)]
struct Descriptor<'a> {
    /// Target of the symbolic link /proc/PID/fd/N.
    link: &'a Path,
    /// The text of /proc/PID/fdinfo/N.
    fdinfo: &'a str,
    kind: FileKind,
    /// Number of hard links to the file.
    link_count: u64,
    /// Type in statfs(2) of the file system that contains the file.
    fs_type: i64,
}

/// How a migration must treat a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DescriptorMeaning {
    /// The engine migrates the descriptor.
    Supported,
    /// A socket. The value is its inode number (see [`super::sockets`]).
    Socket(u64),
    /// A socket that the task's library closes before the dump. The value is its inode number.
    LibrarySocket(u64),
    /// A file that must exist at the target with this size in bytes.
    EqualLengthFile(PathBuf, u64),
    /// A file to which the task may write until the task is stopped. The file must exist at the
    /// target and be at least as long as at the source.
    MinimumLengthFile(PathBuf),
    /// A file that must exist at the target.
    ExistingFile(PathBuf),
    /// A named pipe that must exist at the target, and that no other process may have open.
    NamedPipe(PathBuf),
    /// A directory that must exist at the target.
    Directory(PathBuf),
    /// The slave end of the pseudo terminal with this number.
    TerminalSlave(u64),
    /// The master end of the pseudo terminal with this number.
    TerminalMaster(u64),
    /// The descriptor cannot be migrated. The value is its description for messages.
    Unsupported(String),
}

/// Reads one descriptor of the process `pid` and determines how a migration must treat it. `path`
/// is the descriptor's entry in /proc/PID/fd, `fd_number` the descriptor's number as text.
///
/// # Errors
/// The descriptor was closed during the call.
pub(super) fn read_descriptor(
    pid: i32,
    path: &Path,
    fd_number: &str,
) -> io::Result<DescriptorMeaning> {
    let link = std::fs::read_link(path)?;
    let fdinfo = proc::descriptor_info(pid, fd_number)?;
    if !link.is_absolute() {
        // Pipes, sockets and anonymous inodes need no metadata. For all other files reading the
        // metadata never blocks.
        return Ok(classify(&Descriptor {
            link: &link,
            fdinfo: &fdinfo,
            kind: FileKind::Other,
            link_count: 1,
            fs_type: 0,
        }));
    }
    let meta = std::fs::metadata(path)?;
    let kind = match meta.file_type() {
        t if t.is_file() => FileKind::Regular(meta.len()),
        t if t.is_dir() => FileKind::Directory,
        t if t.is_fifo() => FileKind::Fifo,
        t if t.is_char_device() => FileKind::CharacterDevice {
            major: libc::major(meta.rdev()).into(),
            minor: libc::minor(meta.rdev()).into(),
        },
        _ => FileKind::Other,
    };
    let fs_type = nix::sys::statfs::statfs(path)?.filesystem_type().0;
    Ok(classify(&Descriptor {
        link: &link,
        fdinfo: &fdinfo,
        kind,
        link_count: meta.nlink(),
        fs_type,
    }))
}

/// Determines from the properties of a descriptor how a migration must treat the descriptor.
fn classify(descriptor: &Descriptor<'_>) -> DescriptorMeaning {
    let link_text = descriptor.link.to_string_lossy();
    if let Some(inode) = link_text
        .strip_prefix("socket:[")
        .and_then(|rest| rest.strip_suffix(']')?.parse().ok())
    {
        return if has_library_flag(descriptor.fdinfo) {
            DescriptorMeaning::LibrarySocket(inode)
        } else {
            DescriptorMeaning::Socket(inode)
        };
    }
    if link_text.starts_with("pipe:[") {
        return if parse_flags(descriptor.fdinfo) & PACKET_MODE == 0 {
            DescriptorMeaning::Supported
        } else {
            DescriptorMeaning::Unsupported("a pipe in packet mode".into())
        };
    }
    if parse_number(descriptor.fdinfo, "eventfd-semaphore:") == Some(1) {
        // The engine would restore the semaphore as an ordinary eventfd without an error.
        return DescriptorMeaning::Unsupported("an eventfd that is a semaphore".into());
    }
    if let Some(name) = link_text.strip_prefix("anon_inode:") {
        let is_supported = SUPPORTED_ANON_INODES.contains(&name) || name.starts_with("bpf-map");
        return if is_supported {
            DescriptorMeaning::Supported
        } else {
            DescriptorMeaning::Unsupported(describe_anon_inode(name))
        };
    }
    match descriptor.fs_type {
        MQUEUE_MAGIC => {
            return DescriptorMeaning::Unsupported(format!("the POSIX message queue {link_text}"));
        }
        SECRETMEM_MAGIC => {
            return DescriptorMeaning::Unsupported("secret memory (memfd_secret)".into());
        }
        // After the migration the process has another PID, and the old PID may belong to another
        // process.
        PROC_MAGIC if is_process_file(descriptor.link) => {
            return DescriptorMeaning::Unsupported(format!(
                "the file {link_text}, which is about a process"
            ));
        }
        PROC_MAGIC | SYSFS_MAGIC | CGROUP2_MAGIC => return DescriptorMeaning::Supported,
        _ => {}
    }
    if descriptor
        .fdinfo
        .lines()
        .any(|line| line.starts_with("lock:"))
    {
        return DescriptorMeaning::Unsupported(format!("a lock on the file {link_text}"));
    }
    if link_text.ends_with(" (deleted)") || link_text.starts_with("/memfd:") {
        return match (descriptor.kind, descriptor.link_count) {
            (FileKind::Regular(_), 1..) => DescriptorMeaning::Unsupported(format!(
                "the deleted file {link_text}, which still has another name"
            )),
            _ => DescriptorMeaning::Supported,
        };
    }
    if link_text.starts_with(SHARED_MEMORY_DIR) && matches!(descriptor.kind, FileKind::Regular(_)) {
        return DescriptorMeaning::Unsupported(describe_posix_memory(&link_text));
    }
    match descriptor.kind {
        FileKind::Directory => DescriptorMeaning::Directory(descriptor.link.into()),
        FileKind::Fifo => DescriptorMeaning::NamedPipe(descriptor.link.into()),
        FileKind::CharacterDevice { major, minor } => classify_device(descriptor, major, minor),
        // The engine checks the lengths of all files except those that are opened only for
        // appending. All processes are stopped during that check.
        FileKind::Regular(_)
            if parse_flags(descriptor.fdinfo) & (ACCESS_MODE_MASK | APPEND)
                == WRITE_ONLY | APPEND =>
        {
            DescriptorMeaning::ExistingFile(descriptor.link.into())
        }
        FileKind::Regular(_) if is_open_for_writing(descriptor.fdinfo) => {
            DescriptorMeaning::MinimumLengthFile(descriptor.link.into())
        }
        FileKind::Regular(bytes) => {
            DescriptorMeaning::EqualLengthFile(descriptor.link.into(), bytes)
        }
        FileKind::Other => DescriptorMeaning::Unsupported(format!(
            "{link_text}, which is neither file, directory, pipe nor socket"
        )),
    }
}

/// True if the descriptor is a socket of the task's library. `link` is the target of the
/// descriptor's link in /proc/PID/fd; `fdinfo` is the text of its fdinfo file.
pub(super) fn is_library_socket(link: &Path, fdinfo: &str) -> bool {
    link.to_string_lossy().starts_with("socket:[") && has_library_flag(fdinfo)
}

fn has_library_flag(fdinfo: &str) -> bool {
    parse_flags(fdinfo) & LIBRARY_SOCKET_FLAG != 0
}

/// True if the descriptor whose fdinfo text is `fdinfo` is open for writing.
pub(super) fn is_open_for_writing(fdinfo: &str) -> bool {
    parse_flags(fdinfo) & ACCESS_MODE_MASK != 0
}

/// True if `path` is a file in the directory /proc/PID of any process.
fn is_process_file(path: &Path) -> bool {
    let dir = path
        .strip_prefix("/proc")
        .ok()
        .and_then(|rest| rest.iter().next()?.to_str());
    dir.is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
}

fn describe_anon_inode(name: &str) -> String {
    match name {
        "[io_uring]" => "an io_uring ring".into(),
        "[perf_event]" => "a perf event".into(),
        "[userfaultfd]" => "a userfaultfd".into(),
        other => format!(
            "a descriptor of the kind {}",
            other.trim_matches(['[', ']'])
        ),
    }
}

fn classify_device(descriptor: &Descriptor<'_>, major: u64, minor: u64) -> DescriptorMeaning {
    match (major, minor) {
        // null, zero, full, random, urandom, kmsg.
        (1, 3 | 5 | 7 | 8 | 9 | 11) => DescriptorMeaning::Supported,
        (5, 2) => match parse_number(descriptor.fdinfo, "tty-index:") {
            Some(index) => DescriptorMeaning::TerminalMaster(index),
            None => DescriptorMeaning::Unsupported("the master end of a pseudo terminal".into()),
        },
        (136..=143, minor) => DescriptorMeaning::TerminalSlave((major - 136) * 256 + minor),
        (4 | 5, _) => {
            DescriptorMeaning::Unsupported(format!("the terminal {}", descriptor.link.display()))
        }
        _ => DescriptorMeaning::Unsupported(format!("the device {}", descriptor.link.display())),
    }
}

fn parse_flags(fdinfo: &str) -> u32 {
    let text = fdinfo.lines().find_map(|line| line.strip_prefix("flags:"));
    text.and_then(|text| u32::from_str_radix(text.trim(), 8).ok())
        .unwrap_or(0)
}

fn parse_number(fdinfo: &str, field_name: &str) -> Option<u64> {
    fdinfo
        .lines()
        .find_map(|line| line.strip_prefix(field_name))?
        .trim()
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classify_as(
        link: &str,
        fdinfo: &str,
        kind: FileKind,
        link_count: u64,
        fs_type: i64,
    ) -> DescriptorMeaning {
        classify(&Descriptor {
            link: Path::new(link),
            fdinfo,
            kind,
            link_count,
            fs_type,
        })
    }

    /// A file that is open for reading must have the same length at the target. A file that is open
    /// for writing must be at least as long as at the source; a file that is open only for
    /// appending must only exist.
    #[test]
    fn read_files_need_equal_length_and_written_do_not() {
        let classify_file = |info: &str| classify_as("/d/f", info, FileKind::Regular(5), 1, 0xef53);
        assert_eq!(
            classify_file("pos:\t0\nflags:\t0100000\n"),
            DescriptorMeaning::EqualLengthFile("/d/f".into(), 5)
        );
        assert_eq!(
            classify_file("pos:\t0\nflags:\t0100001\n"),
            DescriptorMeaning::MinimumLengthFile("/d/f".into())
        );
        assert_eq!(
            classify_file("pos:\t0\nflags:\t0102002\n"),
            DescriptorMeaning::MinimumLengthFile("/d/f".into())
        );
        assert_eq!(
            classify_file("pos:\t0\nflags:\t0102001\n"),
            DescriptorMeaning::ExistingFile("/d/f".into())
        );
        let locked_file =
            classify_file("flags:\t0100002\nlock:\t1: FLOCK  ADVISORY  WRITE 1 fe:01:5 0 EOF\n");
        assert_eq!(
            locked_file,
            DescriptorMeaning::Unsupported("a lock on the file /d/f".into())
        );
        assert_eq!(
            classify_as("/d/f (deleted)", "", FileKind::Regular(5), 0, 0xef53),
            DescriptorMeaning::Supported
        );
        assert!(matches!(
            classify_as("/d/f (deleted)", "", FileKind::Regular(5), 1, 0xef53),
            DescriptorMeaning::Unsupported(_)
        ));
        assert_eq!(
            classify_as("/d", "", FileKind::Directory, 2, 0xef53),
            DescriptorMeaning::Directory("/d".into())
        );
        assert_eq!(
            classify_as("/d/p", "", FileKind::Fifo, 1, 0xef53),
            DescriptorMeaning::NamedPipe("/d/p".into())
        );
    }

    #[test]
    fn unsupported_descriptors_are_described() {
        let describe_unsupported =
            |link: &str, kind, magic| match classify_as(link, "", kind, 1, magic) {
                DescriptorMeaning::Unsupported(what) => what,
                other => panic!("{link}: {other:?}"),
            };
        assert_eq!(
            describe_unsupported("anon_inode:[io_uring]", FileKind::Other, 0),
            "an io_uring ring"
        );
        assert_eq!(
            describe_unsupported("anon_inode:[perf_event]", FileKind::Other, 0),
            "a perf event"
        );
        assert_eq!(
            describe_unsupported("anon_inode:[userfaultfd]", FileKind::Other, 0),
            "a userfaultfd"
        );
        assert_eq!(
            describe_unsupported("anon_inode:kvm-vm", FileKind::Other, 0),
            "a descriptor of the kind kvm-vm"
        );
        assert_eq!(
            describe_unsupported("/queue", FileKind::Regular(80), MQUEUE_MAGIC),
            "the POSIX message queue /queue"
        );
        let shm_description = "POSIX shared memory (/dev/shm/x), which exists on this host only";
        assert_eq!(
            describe_unsupported("/dev/shm/x", FileKind::Regular(80), 0x0102_1994),
            shm_description
        );
        assert_eq!(
            describe_unsupported(
                "/secretmem (deleted)",
                FileKind::Regular(0),
                SECRETMEM_MAGIC
            ),
            "secret memory (memfd_secret)"
        );
        let stat_description = "the file /proc/5/stat, which is about a process";
        assert_eq!(
            describe_unsupported("/proc/5/stat", FileKind::Regular(0), PROC_MAGIC),
            stat_description
        );
        let classify_fdinfo =
            |link: &str, info: &str| classify_as(link, info, FileKind::Other, 1, 0);
        let packet_mode_fdinfo = format!("pos:\t0\nflags:\t0{:o}\n", PACKET_MODE | WRITE_ONLY);
        assert_eq!(
            classify_fdinfo("pipe:[5]", &packet_mode_fdinfo),
            DescriptorMeaning::Unsupported("a pipe in packet mode".into())
        );
        let semaphore =
            classify_fdinfo("anon_inode:[eventfd]", "flags:\t02\neventfd-semaphore: 1\n");
        assert_eq!(
            semaphore,
            DescriptorMeaning::Unsupported("an eventfd that is a semaphore".into())
        );
        let gpu = FileKind::CharacterDevice {
            major: 226,
            minor: 0,
        };
        assert_eq!(
            describe_unsupported("/dev/dri/card0", gpu, 0),
            "the device /dev/dri/card0"
        );
        assert_eq!(
            describe_unsupported(
                "/dev/tty1",
                FileKind::CharacterDevice { major: 4, minor: 1 },
                0
            ),
            "the terminal /dev/tty1"
        );
    }

    #[test]
    fn supported_descriptors_are_accepted() {
        for link in [
            "pipe:[5]",
            "anon_inode:[eventfd]",
            "anon_inode:inotify",
            "anon_inode:[pidfd]",
        ] {
            assert_eq!(
                classify_as(link, "", FileKind::Other, 1, 0),
                DescriptorMeaning::Supported,
                "{link}"
            );
        }
        let null_device = FileKind::CharacterDevice { major: 1, minor: 3 };
        assert_eq!(
            classify_as("/dev/null", "", null_device, 1, 0),
            DescriptorMeaning::Supported
        );
        assert_eq!(
            classify_as("/proc/stat", "", FileKind::Regular(0), 1, PROC_MAGIC),
            DescriptorMeaning::Supported
        );
        assert_eq!(
            classify_as("/proc/sys", "", FileKind::Directory, 1, PROC_MAGIC),
            DescriptorMeaning::Supported
        );
        let eventfd_fdinfo = |semaphore_flag: u64| {
            format!(
                "flags:\t02\neventfd-count: 2\neventfd-id: 29\neventfd-semaphore: {semaphore_flag}\n"
            )
        };
        assert_eq!(
            classify_as(
                "anon_inode:[eventfd]",
                &eventfd_fdinfo(0),
                FileKind::Other,
                1,
                0
            ),
            DescriptorMeaning::Supported
        );
        let classify_socket = |flags: &str| {
            classify_as(
                "socket:[77]",
                &format!("pos:\t0\nflags:\t{flags}\n"),
                FileKind::Other,
                1,
                0,
            )
        };
        assert_eq!(classify_socket("02004002"), DescriptorMeaning::Socket(77));
        assert_eq!(
            classify_socket("02006002"),
            DescriptorMeaning::LibrarySocket(77)
        );
        let slave_device = FileKind::CharacterDevice {
            major: 136,
            minor: 4,
        };
        assert_eq!(
            classify_as("/dev/pts/4", "", slave_device, 1, 0),
            DescriptorMeaning::TerminalSlave(4)
        );
        let master_device = FileKind::CharacterDevice { major: 5, minor: 2 };
        assert_eq!(
            classify_as(
                "/dev/pts/ptmx",
                "pos:\t0\ntty-index:\t4\n",
                master_device,
                1,
                0
            ),
            DescriptorMeaning::TerminalMaster(4)
        );
    }
}
