//! Looks at a living task through /proc: its facts, or the first thing about it that does not survive a move.

use super::descriptors::{Descriptor, Kind, Meaning, is_of_library, is_written, judge};
use super::files::{CARRIED_BYTES_MAX, CARRIED_FILES_MAX, Policy, is_own};
use super::hash::HashCache;
use super::{host, kernel, maps, sockets, strangers, sysv};
use crate::status::Status;
use sempa_proto::migration::{FileFact, FileMatch, Refusal, TaskFacts};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Namespaces that a task has to share with its tasker, with what to call one of its own.
const SHARED_NAMESPACES: [(&str, &str); 5] = [
    ("mnt", "a mount namespace of its own"),
    ("net", "a network namespace of its own"),
    ("ipc", "an IPC namespace of its own"),
    ("uts", "a host-name namespace of its own"),
    ("user", "a user namespace of its own"),
];

/// A task to be looked at.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Its root process.
    pub root: i32,
    /// All its processes, the root included.
    pub processes: Vec<i32>,
}

/// Bytes by which a target is told of files: with the rest of what is said of a task, and with what the target may have
/// against each of them, they fit into a frame.
pub const NAMED_BYTES_MAX: u64 = 32 << 20;
/// What is said of a file beside its path takes so much at most.
const NAMED_BYTES_EACH: u64 = 256;

/// What was found in all processes together.
#[derive(Clone, Default)]
struct Findings {
    /// What is to become of open files.
    policy: Policy,
    files: BTreeMap<PathBuf, (u64, Need)>,
    /// Bytes by which they are named.
    named: u64,
    sockets: BTreeSet<u64>,
    /// Those that the library closes.
    library: BTreeSet<u64>,
    terminals: BTreeSet<u64>,
    masters: BTreeSet<u64>,
    /// Named pipes by device and inode number.
    pipes: BTreeMap<(u64, u64), PathBuf>,
}

/// How much of a file the task needs; a later one includes the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    Directory,
    Exists,
    ExistsOrCarried,
    NoShorter,
    NoShorterOrCarried,
    Length,
    LengthOrCarried,
    Content,
}

impl Findings {
    fn need(&mut self, path: &Path, bytes: u64, need: Need) -> Result<(), Refusal> {
        if let Some((_, before)) = self.files.get_mut(path) {
            *before = need.max(*before);
            return Ok(());
        }
        self.named += path.as_os_str().len() as u64 + NAMED_BYTES_EACH;
        if self.named > NAMED_BYTES_MAX {
            return Err(Refusal::FilesTooMany {
                files: self.files.len(),
                limit: NAMED_BYTES_MAX,
            });
        }
        self.files.insert(path.into(), (bytes, need));
        Ok(())
    }

    /// It has a file open that is reached through this.
    fn open_file(&mut self, path: &Path, through: &Path, need: Need) -> Result<(), Refusal> {
        let Ok(meta) = std::fs::metadata(through) else {
            // Closed meanwhile.
            return Ok(());
        };
        let is_program = self
            .files
            .get(path)
            .is_some_and(|(_, need)| *need == Need::Content);
        let need = match (self.policy, need) {
            _ if is_program => Need::Content,
            (Policy::Refuse, _) => return Err(Refusal::FilesStay { path: path.into() }),
            (Policy::Copy, Need::Exists) if is_own(&meta) => Need::ExistsOrCarried,
            (Policy::Copy, Need::NoShorter) if is_own(&meta) => Need::NoShorterOrCarried,
            (Policy::Copy, Need::Length) if is_own(&meta) => Need::LengthOrCarried,
            _ => need,
        };
        self.need(path, meta.len(), need)
    }

    /// What would have to be carried along must not be too much.
    fn measure(&self) -> Result<(), Refusal> {
        let carried = |need: &Need| {
            matches!(
                need,
                Need::ExistsOrCarried | Need::NoShorterOrCarried | Need::LengthOrCarried
            )
        };
        let all = self
            .files
            .values()
            .filter(|(_, need)| carried(need))
            .map(|(bytes, _)| *bytes);
        let (files, bytes) = all.fold((0, 0_u64), |(files, sum), bytes| {
            (files + 1, sum.saturating_add(bytes))
        });
        match files > CARRIED_FILES_MAX || bytes > CARRIED_BYTES_MAX {
            true => Err(Refusal::FilesTooLarge {
                files,
                bytes,
                limit: CARRIED_BYTES_MAX,
            }),
            false => Ok(()),
        }
    }
}

fn holds(what: impl Into<String>) -> Refusal {
    Refusal::Holds { what: what.into() }
}

/// Looks at a task; `engine` is the version of the engine that would dump it. The task is not disturbed; what it does
/// meanwhile may be missed.
///
/// # Errors
/// Why it cannot move at all: what it holds, or that it has ended.
pub fn inspect(
    subject: &Subject,
    engine: String,
    hashes: &HashCache,
) -> Result<TaskFacts, Refusal> {
    family(subject)?;
    let mut findings = Findings {
        policy: Policy::of(subject.root)?,
        ..Findings::default()
    };
    for &pid in &subject.processes {
        look_until_settled(pid, subject.root, &mut findings)?;
    }
    connections(subject.root, &findings)?;
    findings.measure()?;
    if let Some(number) = findings.terminals.difference(&findings.masters).next() {
        return Err(holds(format!(
            "the terminal /dev/pts/{number}, whose other end is elsewhere"
        )));
    }
    if let Some(path) = strangers::pipe_elsewhere(&findings.pipes, &subject.processes) {
        return Err(holds(format!(
            "the named pipe {}, which another process has open",
            path.display()
        )));
    }
    if let Some(what) = sysv::used_by(&subject.processes) {
        return Err(holds(what));
    }
    let uid = Status::of(subject.root)
        .and_then(|status| status.field("Uid")?.split_whitespace().nth(1)?.parse().ok());
    Ok(TaskFacts {
        program: Box::default(),
        resident_bytes: subject
            .processes
            .iter()
            .filter_map(|pid| resident_bytes(*pid))
            .sum(),
        uid: uid.ok_or(Refusal::NoSuchTask)?,
        cpu_features: host::cpu_features(),
        kernel_features: kernel::features(),
        kernel: host::release().into(),
        engine,
        threads: subject
            .processes
            .iter()
            .filter_map(|pid| Status::of(*pid)?.number::<u32>("Threads"))
            .sum(),
        files: file_facts(findings.files, hashes)?,
        begin: None,
    })
}

/// What is larger is no library as a rule but data, which nobody reads in vain.
const LEARNED_BYTES_MAX: u64 = 128 << 20;

/// Hashes the program and the libraries of a process, so that whoever looks at its task later need not wait until a disk has read
/// them. What cannot be read is told then.
pub fn learn(pid: i32, hashes: &HashCache) {
    let Ok(text) = std::fs::read(format!("/proc/{pid}/maps")) else {
        return;
    };
    for mapped in maps::read(&String::from_utf8_lossy(&text)) {
        let maps::Mapped::Private(path) = mapped else {
            continue;
        };
        if path
            .metadata()
            .is_ok_and(|meta| meta.len() <= LEARNED_BYTES_MAX)
        {
            let _ = hashes.hash(&path);
        }
    }
}

/// Memory of a process in bytes, resident or swapped out, while it exists.
pub fn resident_bytes(pid: i32) -> Option<u64> {
    Status::of(pid)?.memory_bytes()
}

/// How often a process that is just ending is looked at, a millisecond apart, before what was seen of it counts.
const LOOKS: u32 = 100;

/// Looks at one process. Any but the root may end meanwhile: from its first step out, when it gives up its memory, until it
/// waits to be reaped it has no directory and no namespaces any more, which says nothing about the task.
fn look_until_settled(pid: i32, root: i32, findings: &mut Findings) -> Result<(), Refusal> {
    let gives_up = || std::fs::read_link(format!("/proc/{pid}/exe")).is_err();
    let mut result = Ok(());
    for _ in 0..LOOKS {
        let mut found = findings.clone();
        result = look_at(pid, root, &mut found);
        if result.is_ok() {
            *findings = found;
            break;
        } else if pid == root || !gives_up() {
            break;
        } else if !Path::new(&format!("/proc/{pid}")).exists() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    result
}

/// The engine takes a process tree. Whoever is in the namespace but not in the tree would stay behind. While processes end, a
/// parent may be gone that was named a moment before: what counts is what is seen twice.
fn family(subject: &Subject) -> Result<(), Refusal> {
    // Of one that is being reaped the kernel names none.
    let parent = |pid: i32| {
        Status::of(pid)?
            .number::<i32>("PPid")
            .filter(|parent| *parent != 0)
    };
    let look = || {
        subject
            .processes
            .iter()
            .filter_map(|&p| Some((p, parent(p)?)))
            .collect::<BTreeMap<i32, i32>>()
    };
    let mut parents = look();
    let mut result = tree(subject, &parents);
    for _ in 0..LOOKS {
        if result.is_ok() || result == Err(Refusal::NoSuchTask) {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
        let again = look();
        if again == parents {
            break;
        }
        result = tree(subject, &again);
        parents = again;
    }
    result
}

fn tree(subject: &Subject, parents: &BTreeMap<i32, i32>) -> Result<(), Refusal> {
    if !parents.contains_key(&subject.root) {
        return Err(Refusal::NoSuchTask);
    }
    for &pid in parents.keys() {
        let mut at = pid;
        while at != subject.root {
            let Some(&above) = parents.get(&at) else {
                let status = Status::of(pid);
                let name = status
                    .as_ref()
                    .and_then(|status| status.field("Name"))
                    .unwrap_or_default();
                return Err(holds(format!(
                    "a background process ({name}, process {pid}) that is no longer its child"
                )));
            };
            at = above;
        }
    }
    Ok(())
}

fn look_at(pid: i32, root: i32, findings: &mut Findings) -> Result<(), Refusal> {
    let threads = threads(pid);
    let status = Status::of(pid);
    if status
        .as_ref()
        .and_then(|status| status.field("State"))
        .is_some_and(|state| state.starts_with(['Z', 'X']))
    {
        // It waits to be reaped, if no thread of it goes on.
        return if threads.len() > 1 {
            Err(holds("a main thread that has ended before the others"))
        } else {
            Ok(())
        };
    }
    // Our own threads trace for a moment, too.
    let is_ours = |tracer: &str| Path::new("/proc/self/task").join(tracer).exists();
    let traces = |tracer: &str| tracer != "0" && !is_ours(tracer);
    if threads
        .into_iter()
        .filter_map(Status::of)
        .any(|status| status.field("TracerPid").is_some_and(traces))
    {
        return Err(holds("a debugger"));
    }
    rights(status.as_ref())?;
    namespaces(pid, root)?;
    let link = |name: &str| {
        std::fs::read_link(format!("/proc/{pid}/{name}")).map_err(|_| Refusal::NoSuchTask)
    };
    if link("root")? != std::fs::read_link("/proc/self/root").unwrap_or_else(|_| "/".into()) {
        return Err(holds("a root directory of its own"));
    }
    let cwd = link("cwd")?;
    working_directory(&cwd, pid)?;
    findings.need(&cwd, 0, Need::Directory)?;
    mappings(pid, findings)?;
    descriptors(pid, findings)
}

/// What the engine needs the process, or itself, to have the right to. Where we have none ourselves nothing is asked here.
fn rights(status: Option<&Status>) -> Result<(), Refusal> {
    const MAY_MOUNT: u64 = 1 << 21;
    const MAY_LIMIT: u64 = 1 << 24;
    let (Some(status), Some(own)) = (status, Status::of(std::process::id() as i32)) else {
        return Ok(());
    };
    let may = |status: &Status, what| status.capabilities("CapEff") & what != 0;
    let ids = |of: &Status, name| -> Vec<String> {
        of.field(name)
            .unwrap_or_default()
            .split_whitespace()
            .take(3)
            .map(String::from)
            .collect()
    };
    // It makes the process mount something for a moment.
    if may(&own, MAY_MOUNT) && !may(status, MAY_MOUNT) {
        let uid = ids(status, "Uid").get(1).cloned().unwrap_or_default();
        return Err(holds(format!(
            "a process without root's rights (its user is {uid}), in which the engine cannot work"
        )));
    }
    // It asks for the limits of the process, which the kernel tells only to equals without a further right.
    let differs = |name| {
        ids(status, name)
            .iter()
            .find(|id| ids(&own, name).first() != Some(id))
            .cloned()
    };
    if let (false, Some(id)) = (
        may(&own, MAY_LIMIT),
        differs("Uid").or_else(|| differs("Gid")),
    ) {
        return Err(holds(format!(
            "another user or group ({id}), for which the tasker needs CAP_SYS_RESOURCE"
        )));
    }
    Ok(())
}

/// Numbers of the threads of a process.
fn threads(pid: i32) -> Vec<i32> {
    let dir = std::fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    dir.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

fn namespaces(pid: i32, root: i32) -> Result<(), Refusal> {
    let link = |of: &str, name: &str| std::fs::read_link(format!("/proc/{of}/ns/{name}")).ok();
    let (own, root) = (pid.to_string(), root.to_string());
    if let Some((_, what)) = SHARED_NAMESPACES
        .iter()
        .find(|(name, _)| link(&own, name) != link("self", name))
    {
        return Err(holds(*what));
    }
    // That of the task is not the tasker's; its processes have to be in it, and so have their children.
    let task = link(&root, "pid");
    if ["pid", "pid_for_children"]
        .iter()
        .any(|name| link(&own, name) != task)
    {
        return Err(holds("a process-id namespace of its own"));
    }
    Ok(())
}

/// The engine needs to make a directory there for a moment.
fn working_directory(cwd: &Path, pid: i32) -> Result<(), Refusal> {
    let through = format!("/proc/{pid}/cwd");
    let writable = nix::unistd::access(through.as_str(), nix::unistd::AccessFlags::W_OK);
    match (cwd.to_string_lossy().ends_with(" (deleted)"), writable) {
        (true, _) => Err(holds("a working directory that was removed")),
        (_, Ok(())) => Ok(()),
        (_, Err(e)) => Err(holds(format!(
            "the working directory {}, where the engine cannot write: {}",
            cwd.display(),
            e.desc()
        ))),
    }
}

fn mappings(pid: i32, findings: &mut Findings) -> Result<(), Refusal> {
    let text = std::fs::read(format!("/proc/{pid}/maps")).map_err(|_| Refusal::NoSuchTask)?;
    for mapped in maps::read(&String::from_utf8_lossy(&text)) {
        let (path, need) = match mapped {
            maps::Mapped::Private(path) => (path, Need::Content),
            maps::Mapped::Shared(path) if findings.policy == Policy::Refuse => {
                return Err(Refusal::FilesStay { path });
            }
            maps::Mapped::Shared(path) => (path, Need::Length),
            maps::Mapped::Lost(what) => return Err(holds(what)),
        };
        if !findings.files.contains_key(&path) {
            let bytes = std::fs::metadata(&path)
                .map(|meta| meta.len())
                .map_err(|e| unreadable(&path, &e))?;
            findings.need(&path, bytes, need)?;
        } else {
            findings.need(&path, 0, need)?;
        }
    }
    Ok(())
}

fn descriptors(pid: i32, findings: &mut Findings) -> Result<(), Refusal> {
    let dir = std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(|_| Refusal::NoSuchTask)?;
    for entry in dir.flatten() {
        // A descriptor may be closed while we look; then it does not matter.
        let Ok(meaning) = descriptor(pid, &entry.path(), &entry.file_name().to_string_lossy())
        else {
            continue;
        };
        match meaning {
            Meaning::Travels => {}
            Meaning::Socket(inode) => drop(findings.sockets.insert(inode)),
            Meaning::Library(inode) => drop(findings.library.insert(inode)),
            Meaning::SameLength(path, _) => {
                findings.open_file(&path, &entry.path(), Need::Length)?
            }
            Meaning::Grows(path) => findings.open_file(&path, &entry.path(), Need::NoShorter)?,
            Meaning::Exists(path) => findings.open_file(&path, &entry.path(), Need::Exists)?,
            Meaning::NamedPipe(path) => {
                findings.need(&path, 0, Need::Exists)?;
                // One that was closed meanwhile does not matter.
                findings
                    .pipes
                    .extend(strangers::identity(&entry.path()).map(|id| (id, path)));
            }
            Meaning::Directory(path) => findings.need(&path, 0, Need::Directory)?,
            Meaning::Terminal(number) => drop(findings.terminals.insert(number)),
            Meaning::TerminalMaster(number) => drop(findings.masters.insert(number)),
            Meaning::Lost(what) => return Err(holds(what)),
        }
    }
    Ok(())
}

/// The regular files with a name that these processes, which stand still, have open for writing, and their lengths in bytes.
pub fn written_files(processes: &[i32]) -> Vec<(PathBuf, u64)> {
    let mut files = BTreeMap::new();
    for pid in processes {
        let Ok(dir) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        for entry in dir.flatten() {
            let (path, number) = (entry.path(), entry.file_name());
            let Ok(link) = std::fs::read_link(&path) else {
                continue;
            };
            let info =
                std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.to_string_lossy()));
            // Of what is no file a look at its length might block, and a file without a name travels.
            if !link.is_absolute() || !info.is_ok_and(|info| is_written(&info)) {
                continue;
            }
            if let Ok(meta) = std::fs::metadata(&path)
                && meta.is_file()
                && meta.nlink() > 0
            {
                files.insert(link, meta.len());
            }
        }
    }
    files.into_iter().collect()
}

/// True if a process has connections of a task's library open. One in which the library has let go has none; nor has a forked
/// child of it that has got as far as its own program.
pub fn has_library_sockets(pid: i32) -> bool {
    let dir = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten();
    let is_one = |entry: std::fs::DirEntry| {
        let link = std::fs::read_link(entry.path()).ok()?;
        let info = std::fs::read_to_string(format!(
            "/proc/{pid}/fdinfo/{}",
            entry.file_name().to_string_lossy()
        ))
        .ok()?;
        Some(is_of_library(&link, &info))
    };
    dir.filter_map(is_one).any(|is_one| is_one)
}

pub(super) fn descriptor(pid: i32, path: &Path, number: &str) -> io::Result<Meaning> {
    let link = std::fs::read_link(path)?;
    let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"))?;
    if !link.is_absolute() {
        // Pipes, sockets and the like need no further look, and cannot block one.
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

fn connections(root: i32, findings: &Findings) -> Result<(), Refusal> {
    if findings.sockets.is_empty() && findings.library.len() < 2 {
        return Ok(());
    }
    // Without the kernel's list the engine itself would find what is wrong, at the dump.
    let unix = sockets::unix_table().unwrap_or_default();
    if let Some(what) = sockets::foreign_unix(&findings.sockets, &unix) {
        return Err(holds(what));
    }
    if sockets::daemon_connections(&findings.library, &unix) > 1 {
        return Err(holds("a process that is a task of its own"));
    }
    for name in ["tcp", "tcp6"] {
        let table = std::fs::read_to_string(format!("/proc/{root}/net/{name}")).unwrap_or_default();
        if let Some(what) = sockets::tcp_connection(&findings.sockets, &table) {
            return Err(holds(what));
        }
    }
    Ok(())
}

fn unreadable(path: &Path, error: &io::Error) -> Refusal {
    Refusal::File {
        path: path.into(),
        why: format!("it cannot be read at the source: {error}"),
    }
}

fn file_facts(
    files: BTreeMap<PathBuf, (u64, Need)>,
    hashes: &HashCache,
) -> Result<Vec<FileFact>, Refusal> {
    files
        .into_iter()
        .map(|(path, (bytes, need))| {
            let must = match need {
                Need::Directory => FileMatch::Directory,
                Need::Exists | Need::NoShorter => FileMatch::Exists,
                Need::ExistsOrCarried | Need::NoShorterOrCarried => FileMatch::ExistsOrCarried,
                Need::Length => FileMatch::Length,
                Need::LengthOrCarried => FileMatch::LengthOrCarried,
                Need::Content => {
                    FileMatch::Content(hashes.hash(&path).map_err(|e| unreadable(&path, &e))?)
                }
            };
            let bytes = if matches!(need, Need::Exists | Need::ExistsOrCarried) {
                0
            } else {
                bytes
            };
            Ok(FileFact { path, bytes, must })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{ThisHost, compare};
    use std::process::{Child, Command, Stdio};
    use std::sync::Arc;

    #[test]
    fn a_task_with_more_files_than_a_target_can_be_told_of_is_refused() {
        let mut findings = Findings::default();
        let long = "x".repeat(4000);
        let path = |n: u64| PathBuf::from(format!("/{n}/{long}"));
        let refused = (0..65_530).find_map(|n| findings.need(&path(n), 1, Need::Content).err());
        let Some(Refusal::FilesTooMany { files, limit }) = refused else {
            panic!("{refused:?}")
        };
        assert!(
            (limit / 4300..limit / 4000).contains(&(files as u64)),
            "{files}"
        );
        assert_eq!(
            findings.need(&path(0), 1, Need::Content),
            Ok(()),
            "what is known is not named again"
        );
        let mut short = Findings::default();
        (0..65_530).for_each(|n| {
            short
                .need(&PathBuf::from(format!("/data/{n}")), 1, Need::Length)
                .expect("there is room")
        });
    }

    /// What is found of so many files of so many bytes each that are to be carried along.
    fn carried(files: usize, bytes: u64) -> Findings {
        let mut findings = Findings::default();
        let needs = [
            Need::ExistsOrCarried,
            Need::NoShorterOrCarried,
            Need::LengthOrCarried,
        ];
        for (n, need) in (0..files).zip(needs.into_iter().cycle()) {
            findings
                .need(&PathBuf::from(format!("/data/{n}")), bytes, need)
                .expect("there is room");
        }
        findings
    }

    #[test]
    fn a_task_moves_with_files_of_a_gibibyte_and_with_1024_of_them_and_not_with_more() {
        let refused = |files, bytes| {
            Err(Refusal::FilesTooLarge {
                files,
                bytes,
                limit: 1 << 30,
            })
        };
        assert_eq!(carried(1024, 1 << 20).measure(), Ok(()));
        assert_eq!(carried(1025, 0).measure(), refused(1025, 0));
        assert_eq!(
            carried(1, (1 << 30) + 1).measure(),
            refused(1, (1 << 30) + 1)
        );
        assert_eq!(carried(3, 1 << 29).measure(), refused(3, 3 << 29));
        assert_eq!(
            carried(3, u64::MAX / 2).measure(),
            refused(3, u64::MAX),
            "a sum that is too large for any number"
        );
    }

    #[test]
    fn files_that_have_to_be_at_the_target_may_be_many_and_large() {
        let mut findings = carried(1024, 1 << 20);
        let stay = [
            Need::Directory,
            Need::Exists,
            Need::NoShorter,
            Need::Length,
            Need::Content,
        ];
        for (n, need) in stay.into_iter().enumerate() {
            findings
                .need(&PathBuf::from(format!("/lib/{n}")), 1 << 40, need)
                .expect("there is room");
        }
        assert_eq!(findings.measure(), Ok(()));
        // What a process maps as its program as well is not carried either.
        let mut findings = carried(1, 1 << 40);
        findings
            .need(Path::new("/data/0"), 1 << 40, Need::Content)
            .expect("it is known");
        assert_eq!(findings.measure(), Ok(()));
    }

    /// A child that is ended with the test.
    struct Running(Child);

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn sleeping(command: &mut Command) -> (Running, Subject) {
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let root = child.id() as i32;
        // The caller hears of the start before the new program is mapped.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !std::fs::read_to_string(format!("/proc/{root}/maps"))
            .is_ok_and(|maps| maps.contains("libc"))
        {
            assert!(std::time::Instant::now() < until);
            std::thread::yield_now();
        }
        (
            Running(child),
            Subject {
                root,
                processes: vec![root],
            },
        )
    }

    #[test]
    fn a_plain_program_can_be_taken_by_the_host_it_runs_on() {
        let place = std::env::temp_dir().canonicalize().expect("there");
        let (_child, subject) = sleeping(
            Command::new("sleep")
                .arg("1000")
                .current_dir(&place)
                .stdin(Stdio::null()),
        );
        let hashes = Arc::new(HashCache::default());
        let facts = inspect(&subject, "1".into(), &hashes).expect("nothing is in the way");
        assert_eq!(facts.uid, nix::unistd::geteuid().as_raw());
        assert!(facts.resident_bytes > 0 && !facts.cpu_features.is_empty());
        let must = |end: &str| {
            facts
                .files
                .iter()
                .find(|f| f.path.ends_with(end))
                .map(|f| f.must.clone())
        };
        assert_eq!(
            must(place.to_str().expect("UTF-8")),
            Some(FileMatch::Directory)
        );
        assert!(matches!(must("sleep"), Some(FileMatch::Content(_))));
        assert!(matches!(must("libc.so.6"), Some(FileMatch::Content(_))));
        assert_eq!(compare(&facts, &ThisHost::new(hashes, 0)), []);
    }

    #[test]
    fn a_socket_to_somebody_else_is_refused_by_name() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("pair");
        let stdin = std::os::fd::OwnedFd::from(theirs);
        let mut sleep = Command::new("sleep");
        let place = std::env::temp_dir();
        let (_child, subject) = sleeping(sleep.arg("1000").current_dir(place).stdin(stdin));
        let refused = inspect(&subject, "1".into(), &HashCache::default());
        assert_eq!(
            refused,
            Err(holds("a Unix socket connected to another process"))
        );
        drop(ours);
    }

    #[test]
    fn children_that_end_while_they_are_looked_at_are_in_nobodys_way() {
        let forks = "while :; do (:); done";
        let place = std::env::temp_dir().canonicalize().expect("there");
        let mut shell = Command::new("sh");
        let (_child, subject) = sleeping(
            shell
                .args(["-c", forks])
                .current_dir(place)
                .stdin(Stdio::null()),
        );
        let (root, hashes) = (subject.root, HashCache::default());
        let mut seen = 0;
        while seen < 3000 {
            let children = std::fs::read_to_string(format!("/proc/{root}/task/{root}/children"))
                .expect("it forks");
            let children: Vec<i32> = children
                .split_whitespace()
                .map(|pid| pid.parse().expect("a number"))
                .collect();
            seen += children.len();
            let subject = Subject {
                root,
                processes: [vec![root], children].concat(),
            };
            inspect(&subject, "1".into(), &hashes).expect("only the shell counts");
        }
    }

    #[test]
    fn a_process_outside_the_tree_is_refused() {
        let (child, mut subject) = sleeping(Command::new("sleep").arg("1000").stdin(Stdio::null()));
        subject.processes.push(std::process::id() as i32);
        let refused = inspect(&subject, "1".into(), &HashCache::default());
        assert!(
            matches!(&refused, Err(Refusal::Holds { what }) if what.contains("background process")),
            "{refused:?}"
        );
        drop(child);
        subject.processes.pop();
        assert_eq!(
            inspect(&subject, "1".into(), &HashCache::default()),
            Err(Refusal::NoSuchTask)
        );
    }
}
