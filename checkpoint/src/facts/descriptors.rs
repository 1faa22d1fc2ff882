//! Determines what an open descriptor means for a migration. [`descriptor`] reads /proc/PID/fd and
//! fdinfo; [`judge`] is pure.

use super::maps::{SHARED_MEMORY_FOLDER, posix_memory};
use sempa_proto::task;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The flag that marks connections of the task's library, as fdinfo prints it.
const LIBRARY_SOCKET_FLAG: u32 = task::LIBRARY_SOCKET_FLAG.cast_unsigned();
/// `O_ACCMODE`, `O_WRONLY` and `O_APPEND` as fdinfo prints them.
const ACCESS_MODE: u32 = 0o3;
const WRITE_ONLY: u32 = 0o1;
const APPEND: u32 = 0o2000;
/// `O_DIRECT`. On a pipe it selects packet mode, which preserves the bounds of writes.
const PACKETS: u32 = libc::O_DIRECT.cast_unsigned();

/// Types (statfs(2)) of file systems whose files are not stored on a disk.
const PROC_MAGIC: i64 = 0x9fa0;
const SYSFS_MAGIC: i64 = 0x6265_6572;
const MQUEUE_MAGIC: i64 = 0x1980_0202;
const SECRETMEM_MAGIC: i64 = 0x5345_434d;
const CGROUP2_MAGIC: i64 = 0x6367_7270;

/// Anonymous inodes that the engine can migrate.
const CARRIED_ANON: [&str; 7] = [
    "[eventfd]",
    "[eventpoll]",
    "[signalfd]",
    "[timerfd]",
    "inotify",
    "[fanotify]",
    "[pidfd]",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A regular file of this many bytes.
    Regular(u64),
    Directory,
    Fifo,
    Character {
        major: u64,
        minor: u64,
    },
    Other,
}

/// The properties of a descriptor that determine its meaning.
#[derive(Clone, Debug)]
struct Descriptor<'a> {
    /// Target of the link /proc/PID/fd/N.
    link: &'a Path,
    /// The text of /proc/PID/fdinfo/N.
    info: &'a str,
    kind: Kind,
    /// Number of hard links to the file.
    names: u64,
    /// Type of its file system.
    magic: i64,
}

/// The meaning of a descriptor for a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// The engine migrates it.
    Travels,
    /// A socket with this inode number (see [`super::sockets`]).
    Socket(u64),
    /// A socket, with this inode number, that the task's library closes before the dump.
    Library(u64),
    /// A file that must exist at the target with this length.
    SameLength(PathBuf, u64),
    /// A file that the task may write until it is stopped. It must exist at the target and be at
    /// least as long as at the source.
    Grows(PathBuf),
    /// A file that must exist at the target.
    Exists(PathBuf),
    /// A named pipe that must exist at the target, and that no other process may have open.
    NamedPipe(PathBuf),
    /// A directory that must exist at the target.
    Directory(PathBuf),
    /// The slave end of the pseudo terminal with this number.
    Terminal(u64),
    /// The master end of the pseudo terminal with this number.
    TerminalMaster(u64),
    /// It cannot be migrated; its description.
    Lost(String),
}

/// Reads one descriptor of a process and determines its meaning. `path` is its entry in
/// /proc/PID/fd.
///
/// # Errors
/// The descriptor was closed meanwhile.
pub(super) fn descriptor(pid: i32, path: &Path, number: &str) -> io::Result<Meaning> {
    let link = std::fs::read_link(path)?;
    let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"))?;
    if !link.is_absolute() {
        // Pipes, sockets and anonymous inodes need no metadata. Reading it never blocks for the
        // other files.
        return Ok(judge(&Descriptor {
            link: &link,
            info: &info,
            kind: Kind::Other,
            names: 1,
            magic: 0,
        }));
    }
    let meta = std::fs::metadata(path)?;
    let kind = match meta.file_type() {
        t if t.is_file() => Kind::Regular(meta.len()),
        t if t.is_dir() => Kind::Directory,
        t if t.is_fifo() => Kind::Fifo,
        t if t.is_char_device() => Kind::Character {
            major: libc::major(meta.rdev()).into(),
            minor: libc::minor(meta.rdev()).into(),
        },
        _ => Kind::Other,
    };
    let magic = nix::sys::statfs::statfs(path)?.filesystem_type().0;
    Ok(judge(&Descriptor {
        link: &link,
        info: &info,
        kind,
        names: meta.nlink(),
        magic,
    }))
}

/// Determines the meaning of one descriptor.
fn judge(fd: &Descriptor<'_>) -> Meaning {
    let text = fd.link.to_string_lossy();
    if let Some(inode) = text
        .strip_prefix("socket:[")
        .and_then(|rest| rest.strip_suffix(']')?.parse().ok())
    {
        return if is_marked(fd.info) {
            Meaning::Library(inode)
        } else {
            Meaning::Socket(inode)
        };
    }
    if text.starts_with("pipe:[") {
        return if flags(fd.info) & PACKETS == 0 {
            Meaning::Travels
        } else {
            Meaning::Lost("a pipe of packets".into())
        };
    }
    if number(fd.info, "eventfd-semaphore:") == Some(1) {
        // The engine would silently restore it as an ordinary eventfd.
        return Meaning::Lost("an eventfd that is a semaphore".into());
    }
    if let Some(name) = text.strip_prefix("anon_inode:") {
        let carried = CARRIED_ANON.contains(&name) || name.starts_with("bpf-map");
        return if carried {
            Meaning::Travels
        } else {
            Meaning::Lost(anonymous(name))
        };
    }
    match fd.magic {
        MQUEUE_MAGIC => return Meaning::Lost(format!("the POSIX message queue {text}")),
        SECRETMEM_MAGIC => return Meaning::Lost("secret memory (memfd_secret)".into()),
        // The process has another PID after the migration, and another process may have this one.
        PROC_MAGIC if names_process(fd.link) => {
            return Meaning::Lost(format!("the file {text}, which is about a process"));
        }
        PROC_MAGIC | SYSFS_MAGIC | CGROUP2_MAGIC => return Meaning::Travels,
        _ => {}
    }
    if fd.info.lines().any(|line| line.starts_with("lock:")) {
        return Meaning::Lost(format!("a lock on the file {text}"));
    }
    if text.ends_with(" (deleted)") || text.starts_with("/memfd:") {
        return match (fd.kind, fd.names) {
            (Kind::Regular(_), 1..) => {
                Meaning::Lost(format!("the file {text}, which has another name left"))
            }
            _ => Meaning::Travels,
        };
    }
    if text.starts_with(SHARED_MEMORY_FOLDER) && matches!(fd.kind, Kind::Regular(_)) {
        return Meaning::Lost(posix_memory(&text));
    }
    match fd.kind {
        Kind::Directory => Meaning::Directory(fd.link.into()),
        Kind::Fifo => Meaning::NamedPipe(fd.link.into()),
        Kind::Character { major, minor } => device(fd, major, minor),
        // The engine checks the lengths of all files that are not open for appending only; at that
        // time all processes are stopped.
        Kind::Regular(_) if flags(fd.info) & (ACCESS_MODE | APPEND) == WRITE_ONLY | APPEND => {
            Meaning::Exists(fd.link.into())
        }
        Kind::Regular(_) if is_written(fd.info) => Meaning::Grows(fd.link.into()),
        Kind::Regular(bytes) => Meaning::SameLength(fd.link.into(), bytes),
        Kind::Other => Meaning::Lost(format!(
            "{text}, which is neither file, directory, pipe nor socket"
        )),
    }
}

/// True for a connection of the task's library.
pub(super) fn is_of_library(link: &Path, info: &str) -> bool {
    link.to_string_lossy().starts_with("socket:[") && is_marked(info)
}

fn is_marked(info: &str) -> bool {
    flags(info) & LIBRARY_SOCKET_FLAG != 0
}

/// True if the descriptor is open for writing, according to its fdinfo.
pub(super) fn is_written(info: &str) -> bool {
    flags(info) & ACCESS_MODE != 0
}

/// True for files in the directory of a process in /proc.
fn names_process(path: &Path) -> bool {
    let folder = path
        .strip_prefix("/proc")
        .ok()
        .and_then(|rest| rest.iter().next()?.to_str());
    folder.is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
}

fn anonymous(name: &str) -> String {
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

fn device(fd: &Descriptor<'_>, major: u64, minor: u64) -> Meaning {
    match (major, minor) {
        // null, zero, full, random, urandom, kmsg.
        (1, 3 | 5 | 7 | 8 | 9 | 11) => Meaning::Travels,
        (5, 2) => match number(fd.info, "tty-index:") {
            Some(index) => Meaning::TerminalMaster(index),
            None => Meaning::Lost("the controlling end of a pseudo terminal".into()),
        },
        (136..=143, minor) => Meaning::Terminal((major - 136) * 256 + minor),
        (4 | 5, _) => Meaning::Lost(format!("the terminal {}", fd.link.display())),
        _ => Meaning::Lost(format!("the device {}", fd.link.display())),
    }
}

fn flags(info: &str) -> u32 {
    let text = info.lines().find_map(|line| line.strip_prefix("flags:"));
    text.and_then(|text| u32::from_str_radix(text.trim(), 8).ok())
        .unwrap_or(0)
}

fn number(info: &str, name: &str) -> Option<u64> {
    info.lines()
        .find_map(|line| line.strip_prefix(name))?
        .trim()
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge_as(link: &str, info: &str, kind: Kind, names: u64, magic: i64) -> Meaning {
        judge(&Descriptor {
            link: Path::new(link),
            info,
            kind,
            names,
            magic,
        })
    }

    /// Files open for reading need the same length at the target; files open for writing may grow
    /// or need only exist.
    #[test]
    fn read_files_need_equal_length_and_written_do_not() {
        let file = |info: &str| judge_as("/d/f", info, Kind::Regular(5), 1, 0xef53);
        assert_eq!(
            file("pos:\t0\nflags:\t0100000\n"),
            Meaning::SameLength("/d/f".into(), 5)
        );
        assert_eq!(
            file("pos:\t0\nflags:\t0100001\n"),
            Meaning::Grows("/d/f".into())
        );
        assert_eq!(
            file("pos:\t0\nflags:\t0102002\n"),
            Meaning::Grows("/d/f".into())
        );
        assert_eq!(
            file("pos:\t0\nflags:\t0102001\n"),
            Meaning::Exists("/d/f".into())
        );
        let locked = file("flags:\t0100002\nlock:\t1: FLOCK  ADVISORY  WRITE 1 fe:01:5 0 EOF\n");
        assert_eq!(locked, Meaning::Lost("a lock on the file /d/f".into()));
        assert_eq!(
            judge_as("/d/f (deleted)", "", Kind::Regular(5), 0, 0xef53),
            Meaning::Travels
        );
        assert!(matches!(
            judge_as("/d/f (deleted)", "", Kind::Regular(5), 1, 0xef53),
            Meaning::Lost(_)
        ));
        assert_eq!(
            judge_as("/d", "", Kind::Directory, 2, 0xef53),
            Meaning::Directory("/d".into())
        );
        assert_eq!(
            judge_as("/d/p", "", Kind::Fifo, 1, 0xef53),
            Meaning::NamedPipe("/d/p".into())
        );
    }

    #[test]
    fn unsupported_descriptors_are_described() {
        let lost = |link: &str, kind, magic| match judge_as(link, "", kind, 1, magic) {
            Meaning::Lost(what) => what,
            other => panic!("{link}: {other:?}"),
        };
        assert_eq!(
            lost("anon_inode:[io_uring]", Kind::Other, 0),
            "an io_uring ring"
        );
        assert_eq!(
            lost("anon_inode:[perf_event]", Kind::Other, 0),
            "a perf event"
        );
        assert_eq!(
            lost("anon_inode:[userfaultfd]", Kind::Other, 0),
            "a userfaultfd"
        );
        assert_eq!(
            lost("anon_inode:kvm-vm", Kind::Other, 0),
            "a descriptor of the kind kvm-vm"
        );
        assert_eq!(
            lost("/queue", Kind::Regular(80), MQUEUE_MAGIC),
            "the POSIX message queue /queue"
        );
        let named = "POSIX shared memory (/dev/shm/x), which is in the memory of this host";
        assert_eq!(lost("/dev/shm/x", Kind::Regular(80), 0x0102_1994), named);
        assert_eq!(
            lost("/secretmem (deleted)", Kind::Regular(0), SECRETMEM_MAGIC),
            "secret memory (memfd_secret)"
        );
        let stat = "the file /proc/5/stat, which is about a process";
        assert_eq!(lost("/proc/5/stat", Kind::Regular(0), PROC_MAGIC), stat);
        let with = |link: &str, info: &str| judge_as(link, info, Kind::Other, 1, 0);
        let packets = format!("pos:\t0\nflags:\t0{:o}\n", PACKETS | WRITE_ONLY);
        assert_eq!(
            with("pipe:[5]", &packets),
            Meaning::Lost("a pipe of packets".into())
        );
        let counting = with("anon_inode:[eventfd]", "flags:\t02\neventfd-semaphore: 1\n");
        assert_eq!(
            counting,
            Meaning::Lost("an eventfd that is a semaphore".into())
        );
        let gpu = Kind::Character {
            major: 226,
            minor: 0,
        };
        assert_eq!(lost("/dev/dri/card0", gpu, 0), "the device /dev/dri/card0");
        assert_eq!(
            lost("/dev/tty1", Kind::Character { major: 4, minor: 1 }, 0),
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
                judge_as(link, "", Kind::Other, 1, 0),
                Meaning::Travels,
                "{link}"
            );
        }
        let null = Kind::Character { major: 1, minor: 3 };
        assert_eq!(judge_as("/dev/null", "", null, 1, 0), Meaning::Travels);
        assert_eq!(
            judge_as("/proc/stat", "", Kind::Regular(0), 1, PROC_MAGIC),
            Meaning::Travels
        );
        assert_eq!(
            judge_as("/proc/sys", "", Kind::Directory, 1, PROC_MAGIC),
            Meaning::Travels
        );
        let count = |kind: u64| {
            format!("flags:\t02\neventfd-count: 2\neventfd-id: 29\neventfd-semaphore: {kind}\n")
        };
        assert_eq!(
            judge_as("anon_inode:[eventfd]", &count(0), Kind::Other, 1, 0),
            Meaning::Travels
        );
        let socket = |flags: &str| {
            judge_as(
                "socket:[77]",
                &format!("pos:\t0\nflags:\t{flags}\n"),
                Kind::Other,
                1,
                0,
            )
        };
        assert_eq!(socket("02004002"), Meaning::Socket(77));
        assert_eq!(socket("02006002"), Meaning::Library(77));
        let slave = Kind::Character {
            major: 136,
            minor: 4,
        };
        assert_eq!(
            judge_as("/dev/pts/4", "", slave, 1, 0),
            Meaning::Terminal(4)
        );
        let master = Kind::Character { major: 5, minor: 2 };
        assert_eq!(
            judge_as("/dev/pts/ptmx", "pos:\t0\ntty-index:\t4\n", master, 1, 0),
            Meaning::TerminalMaster(4)
        );
    }
}
