//! Inspects a running task through /proc. The result is the task's facts, or the first property
//! found that prevents a migration.

use super::descriptors::{
    DescriptorMeaning, is_library_socket, is_open_for_writing, read_descriptor,
};
use super::files::{COPIED_BYTES_MAX, COPIED_FILES_MAX, FilePolicy, belongs_to_this_user};
use super::hash::HashCache;
use super::identity::{check_capabilities, check_ids};
use super::verdict::unreadable as unreadable_property;
use super::{fifo_peers, kernel, memory_map, shared_state, sockets, sysv, this_host};
use crate::proc::{self, Status, namespace};
use procfs::ProcError;
use procfs::process::{LimitValue, Process};
use sempa_proto::migration::{FileRequirement, Refusal, RequiredFile, TaskFacts};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Namespaces that a task must share with its tasker: the name in /proc/PID/ns, and the description
/// in the refusal of a task that has another namespace of this kind.
const SHARED_NAMESPACES: [(&str, &str); 6] = [
    ("mnt", "a mount namespace of its own"),
    ("net", "a network namespace of its own"),
    ("ipc", "an IPC namespace of its own"),
    ("uts", "a host-name namespace of its own"),
    ("user", "a user namespace of its own"),
    ("cgroup", "a control-group namespace of its own"),
];

/// The processes of a task to inspect.
#[derive(Clone, Debug)]
pub struct TaskProcesses {
    pub root_pid: i32,
    /// All processes, including the root.
    pub processes: Vec<i32>,
    pub engine_place: EnginePlace,
    /// Runs an action with the right to read the descriptors of all processes of the host, if the
    /// caller has it.
    pub with_host_view: fn(&mut dyn FnMut()),
}

/// Where the engine runs that dumps a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnginePlace {
    /// In the namespaces of the caller.
    Outside,
    /// Inside the PID and mount namespaces of the task.
    Inside {
        /// Ids that all processes of the task must have.
        uid: u32,
        gid: u32,
    },
}

/// Maximum size in bytes of the file list that is sent to a target. Together with the other facts,
/// and with the target's refusal of each file, the list fits into one frame.
pub const FILE_LIST_BYTES_MAX: u64 = 32 << 20;
/// Maximum size in bytes of an entry in the file list, without its path.
const FILE_ENTRY_OVERHEAD_BYTES: u64 = 256;

/// Findings of the inspection in the processes of a task that were inspected so far.
#[derive(Clone, Default)]
struct InspectionFindings {
    /// How open files of the task are treated.
    file_policy: FilePolicy,
    required_files: BTreeMap<PathBuf, (u64, FileNeed)>,
    /// Size in bytes of the file list.
    file_list_bytes: u64,
    /// Inode numbers of the task's sockets.
    sockets: BTreeSet<u64>,
    /// Inode numbers of the sockets that the library closes before the dump.
    library_sockets: BTreeSet<u64>,
    terminal_slaves: BTreeSet<u64>,
    terminal_masters: BTreeSet<u64>,
    /// Paths of the task's named pipes, by device and inode number.
    named_pipes: BTreeMap<(u64, u64), PathBuf>,
    /// The highest process or thread id in the task's PID namespace.
    highest_pid: u32,
}

/// Requirement of a task for a file at the target. Each requirement includes the previous ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FileNeed {
    Directory,
    Exists,
    ExistsOrCopied,
    MinimumLength,
    MinimumLengthOrCopied,
    EqualLength,
    EqualLengthOrCopied,
    EqualContent,
}

impl InspectionFindings {
    /// Records the PID of a process or thread in its own PID namespace.
    fn record_pid(&mut self, status: &Status) {
        let namespace_pid = status.nspid.as_ref().and_then(|pids| pids.last().copied());
        let namespace_pid = namespace_pid.and_then(|pid| u32::try_from(pid).ok());
        self.highest_pid = self.highest_pid.max(namespace_pid.unwrap_or(0));
    }

    fn require_file(&mut self, path: &Path, bytes: u64, need: FileNeed) -> Result<(), Refusal> {
        if let Some((_, previous_need)) = self.required_files.get_mut(path) {
            *previous_need = need.max(*previous_need);
            return Ok(());
        }
        self.file_list_bytes += path.as_os_str().len() as u64 + FILE_ENTRY_OVERHEAD_BYTES;
        if self.file_list_bytes > FILE_LIST_BYTES_MAX {
            return Err(Refusal::FilesTooMany {
                files: self.required_files.len(),
                limit: FILE_LIST_BYTES_MAX,
            });
        }
        self.required_files.insert(path.into(), (bytes, need));
        Ok(())
    }

    /// Adds a file that the task has open to the findings. `fd_path` is the file's path in
    /// /proc/PID/fd.
    fn require_open_file(
        &mut self,
        path: &Path,
        fd_path: &Path,
        need: FileNeed,
    ) -> Result<(), Refusal> {
        let Ok(meta) = std::fs::metadata(fd_path) else {
            // The file has just been closed.
            return Ok(());
        };
        let is_program = self
            .required_files
            .get(path)
            .is_some_and(|(_, need)| *need == FileNeed::EqualContent);
        let need = match (self.file_policy, need) {
            _ if is_program => FileNeed::EqualContent,
            (FilePolicy::Refuse, _) => return Err(Refusal::OpenFilesRefused { path: path.into() }),
            (FilePolicy::Copy, FileNeed::Exists) if belongs_to_this_user(&meta) => {
                FileNeed::ExistsOrCopied
            }
            (FilePolicy::Copy, FileNeed::MinimumLength) if belongs_to_this_user(&meta) => {
                FileNeed::MinimumLengthOrCopied
            }
            (FilePolicy::Copy, FileNeed::EqualLength) if belongs_to_this_user(&meta) => {
                FileNeed::EqualLengthOrCopied
            }
            _ => need,
        };
        self.require_file(path, meta.len(), need)
    }

    /// Fails if more than [`COPIED_FILES_MAX`] files, or more than [`COPIED_BYTES_MAX`] bytes in
    /// total, would be copied.
    fn check_copied_files(&self) -> Result<(), Refusal> {
        let is_copied = |need: &FileNeed| {
            matches!(
                need,
                FileNeed::ExistsOrCopied
                    | FileNeed::MinimumLengthOrCopied
                    | FileNeed::EqualLengthOrCopied
            )
        };
        let copied_sizes = self
            .required_files
            .values()
            .filter(|(_, need)| is_copied(need))
            .map(|(bytes, _)| *bytes);
        let (files, bytes) = copied_sizes.fold((0, 0_u64), |(files, byte_sum), bytes| {
            (files + 1, byte_sum.saturating_add(bytes))
        });
        match files > COPIED_FILES_MAX || bytes > COPIED_BYTES_MAX {
            true => Err(Refusal::OpenFilesTooLarge {
                files,
                bytes,
                limit: COPIED_BYTES_MAX,
            }),
            false => Ok(()),
        }
    }
}

pub(super) fn unsupported_resource(resource: impl Into<String>) -> Refusal {
    Refusal::UnsupportedResource {
        what: resource.into(),
    }
}

/// Returns the refusal because a property of the task cannot be read.
pub(super) fn unreadable(property: &str, error: &io::Error) -> Refusal {
    if proc::has_ended(error) {
        Refusal::NoSuchTask
    } else {
        unreadable_property(property, error)
    }
}

/// Returns the status of a process or thread; `None` if it does not exist.
fn read_status(id: i32) -> Result<Option<Status>, Refusal> {
    proc::read_status(id).map_err(|e| unreadable_property("its processes", &e))
}

/// Inspects a task without stopping it. Changes during the inspection may be missed. `engine` is
/// the version of the engine that would dump the task.
///
/// # Errors
/// The reason why the task cannot migrate to any host: a resource, or its exit.
pub fn inspect(
    task: &TaskProcesses,
    engine: String,
    hashes: &HashCache,
) -> Result<TaskFacts, Refusal> {
    check_process_tree(task)?;
    let mut findings = InspectionFindings {
        file_policy: FilePolicy::read_from_process(task.root_pid)?,
        ..InspectionFindings::default()
    };
    for &pid in &task.processes {
        inspect_process_until_stable(pid, task, &mut findings)?;
    }
    shared_state::check_processes(&task.processes)?;
    let addresses =
        sockets::check_connections(task.root_pid, &findings.sockets, &findings.library_sockets)?;
    findings.check_copied_files()?;
    if let Some(terminal_number) = findings
        .terminal_slaves
        .difference(&findings.terminal_masters)
        .next()
    {
        return Err(unsupported_resource(format!(
            "the terminal /dev/pts/{terminal_number}, whose master end is held by another process"
        )));
    }
    let mut open_pipe = Ok(None);
    (task.with_host_view)(&mut || {
        open_pipe = fifo_peers::pipe_open_outside_task(&findings.named_pipes, &task.processes);
    });
    let open_pipe = open_pipe
        .map_err(|e| unreadable_property("the processes that have its named pipes open", &e))?;
    if let Some(path) = open_pipe {
        return Err(unsupported_resource(format!(
            "the named pipe {}, which another process has open",
            path.display()
        )));
    }
    let object = sysv::describe_used_object(&task.processes)
        .map_err(|e| unreadable_property("its System V objects", &e))?;
    if let Some(object) = object {
        return Err(unsupported_resource(object));
    }
    let root_status = read_status(task.root_pid)?.ok_or(Refusal::NoSuchTask)?;
    let (mut memory_bytes, mut thread_count) = (0, 0);
    for &pid in &task.processes {
        if let Some(status) = read_status(pid)? {
            memory_bytes += proc::memory_bytes(&status).unwrap_or(0);
            thread_count += u32::try_from(status.threads).unwrap_or(u32::MAX);
        }
    }
    Ok(TaskFacts {
        program: Box::default(),
        memory_bytes,
        uid: root_status.euid,
        cpu_features: this_host::cpu_features()
            .map_err(|e| unreadable_property("the source's processor features", &e))?,
        kernel_features: kernel::kernel_features(),
        kernel_release: proc::kernel_release().into(),
        engine_version: engine,
        thread_count,
        highest_pid: findings.highest_pid,
        files: file_facts(findings.required_files, hashes)?,
        launch: None,
        addresses,
    })
}

/// Returns the memory of a process in bytes, resident or swapped out; `None` if the process does
/// not exist.
pub fn process_memory_bytes(pid: i32) -> Option<u64> {
    proc::memory_bytes(&proc::status(pid)?)
}

/// Maximum number of attempts to inspect a process that seems to be exiting. Attempts are one
/// millisecond apart.
pub(super) const INSPECT_ATTEMPTS_MAX: u32 = 100;

/// Inspects one process, and repeats the inspection while the process is exiting.
///
/// Any process except the root may exit during the inspection. After an exiting process has
/// released its memory, and until it is reaped, it has no directories and no namespaces; this must
/// not prevent the migration of the task.
fn inspect_process_until_stable(
    pid: i32,
    task: &TaskProcesses,
    findings: &mut InspectionFindings,
) -> Result<(), Refusal> {
    let is_exiting = || Process::new(pid).and_then(|process| process.exe()).is_err();
    let mut result = Ok(());
    for _ in 0..INSPECT_ATTEMPTS_MAX {
        let mut attempt_findings = findings.clone();
        result = inspect_process(pid, task, &mut attempt_findings);
        if result.is_ok() {
            *findings = attempt_findings;
            break;
        } else if pid == task.root_pid || !is_exiting() {
            break;
        } else if !Path::new(&format!("/proc/{pid}")).exists() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    result
}

/// Checks that all processes belong to the tree of the root. The engine dumps only that tree; other
/// processes of the namespace would not migrate.
///
/// The parents of processes are read one after the other and may exit in between, so a result
/// counts only if two reads agree.
fn check_process_tree(task: &TaskProcesses) -> Result<(), Refusal> {
    let read_parents = || {
        let mut parents = BTreeMap::new();
        for &pid in &task.processes {
            let parent = read_status(pid)?.map(|status| status.ppid);
            // The kernel reports parent 0 for a process that is being reaped.
            parents.extend(
                parent
                    .filter(|parent| *parent != 0)
                    .map(|parent| (pid, parent)),
            );
        }
        Ok::<BTreeMap<i32, i32>, Refusal>(parents)
    };
    let mut parents = read_parents()?;
    let mut result = check_parents(task, &parents);
    for _ in 0..INSPECT_ATTEMPTS_MAX {
        if result.is_ok() || result == Err(Refusal::NoSuchTask) {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
        let new_parents = read_parents()?;
        if new_parents == parents {
            break;
        }
        result = check_parents(task, &new_parents);
        parents = new_parents;
    }
    result
}

fn check_parents(task: &TaskProcesses, parents: &BTreeMap<i32, i32>) -> Result<(), Refusal> {
    if !parents.contains_key(&task.root_pid) {
        return Err(Refusal::NoSuchTask);
    }
    for &pid in parents.keys() {
        let mut ancestor = pid;
        while ancestor != task.root_pid {
            let Some(&parent) = parents.get(&ancestor) else {
                let name = proc::status(pid).map_or_else(String::new, |status| status.name);
                return Err(unsupported_resource(format!(
                    "a background process ({name}, process {pid}) that is no longer its child"
                )));
            };
            ancestor = parent;
        }
    }
    Ok(())
}

fn inspect_process(
    pid: i32,
    task: &TaskProcesses,
    findings: &mut InspectionFindings,
) -> Result<(), Refusal> {
    let threads = proc::none_if_ended(proc::thread_ids(pid))
        .map_err(|e| unreadable("its threads", &e))?
        .unwrap_or_default();
    let status = read_status(pid)?;
    if let Some(status) = &status {
        findings.record_pid(status);
    }
    if status
        .as_ref()
        .is_some_and(|status| status.state.starts_with(['Z', 'X']))
    {
        // A zombie is accepted, because it only waits to be reaped. A process with an ended main
        // thread is refused if its other threads still run.
        return if threads.len() > 1 {
            Err(unsupported_resource(
                "a main thread that has ended before the others",
            ))
        } else {
            Ok(())
        };
    }
    // Threads of the tasker also trace the task for short times.
    let is_own_thread =
        |tracer: i32| Process::myself().is_ok_and(|process| process.task_from_tid(tracer).is_ok());
    for &thread_id in &threads {
        let Some(thread_status) = read_status(thread_id)? else {
            continue;
        };
        if thread_status.tracerpid != 0 && !is_own_thread(thread_status.tracerpid) {
            return Err(unsupported_resource("a debugger"));
        }
        findings.record_pid(&thread_status);
    }
    match (task.engine_place, status.as_ref()) {
        (EnginePlace::Outside, status) => {
            check_capabilities(status)?;
            check_namespaces(pid, task)?;
        }
        (EnginePlace::Inside { uid, gid }, status) => {
            check_namespaces(pid, task)?;
            status.map_or(Ok(()), |status| check_ids(status, uid, gid))?;
        }
    }
    shared_state::check_threads(pid, &threads)?;
    let unreadable_directories =
        |e: ProcError| unreadable("its directories", &proc::into_io_error(e));
    let process = Process::new(pid).map_err(unreadable_directories)?;
    let root_dir = process.root().map_err(unreadable_directories)?;
    let own_root_dir = Process::myself().and_then(|own_process| own_process.root());
    if root_dir != own_root_dir.unwrap_or_else(|_| "/".into()) {
        return Err(unsupported_resource("a root directory of its own"));
    }
    let cwd = process.cwd().map_err(unreadable_directories)?;
    check_working_directory(&cwd, pid, task.engine_place)?;
    findings.require_file(&cwd, 0, FileNeed::Directory)?;
    inspect_mappings(pid, findings)?;
    inspect_descriptors(pid, findings)
}

fn check_namespaces(pid: i32, task: &TaskProcesses) -> Result<(), Refusal> {
    let (process, root_process) = (pid.to_string(), task.root_pid.to_string());
    let expected_namespace = |name: &str| match task.engine_place {
        EnginePlace::Inside { .. } if name == "mnt" => namespace(&root_process, name),
        _ => namespace("self", name),
    };
    if let Some((_, what)) = SHARED_NAMESPACES
        .iter()
        .find(|(name, _)| namespace(&process, name) != expected_namespace(name))
    {
        return Err(unsupported_resource(*what));
    }
    // The task has its own PID namespace; its processes must be in it, and must create their
    // children in it.
    let task_namespace = namespace(&root_process, "pid");
    if ["pid", "pid_for_children"]
        .iter()
        .any(|name| namespace(&process, name) != task_namespace)
    {
        return Err(unsupported_resource("a process-id namespace of its own"));
    }
    // A restored task has a time namespace of its own, in which all its processes are.
    if namespace(&process, "time") != namespace(&process, "time_for_children") {
        return Err(unsupported_resource("a time namespace of its own"));
    }
    Ok(())
}

/// Checks that the working directory exists. An engine outside must also be able to create a
/// temporary directory there.
fn check_working_directory(cwd: &Path, pid: i32, place: EnginePlace) -> Result<(), Refusal> {
    let cwd_link = format!("/proc/{pid}/cwd");
    let write_access = nix::unistd::access(cwd_link.as_str(), nix::unistd::AccessFlags::W_OK);
    match (cwd.to_string_lossy().ends_with(" (deleted)"), write_access) {
        (true, _) => Err(unsupported_resource("a working directory that was removed")),
        (_, Ok(())) => Ok(()),
        (_, Err(_)) if place != EnginePlace::Outside => Ok(()),
        (_, Err(e)) => Err(unsupported_resource(format!(
            "the working directory {}, where the engine cannot write: {}",
            cwd.display(),
            e.desc()
        ))),
    }
}

fn inspect_mappings(pid: i32, findings: &mut InspectionFindings) -> Result<(), Refusal> {
    let text = proc::mappings(pid, "maps").map_err(|e| unreadable("its memory map", &e))?;
    for mapping in memory_map::parse_maps(&text) {
        let (path, need) = match mapping {
            memory_map::Mapping::Private(path) => (path, FileNeed::EqualContent),
            memory_map::Mapping::Shared(path) if findings.file_policy == FilePolicy::Refuse => {
                return Err(Refusal::OpenFilesRefused { path });
            }
            memory_map::Mapping::Shared(path) => (path, FileNeed::EqualLength),
            memory_map::Mapping::Unsupported(what) => return Err(unsupported_resource(what)),
        };
        if !findings.required_files.contains_key(&path) {
            let bytes = std::fs::metadata(&path)
                .map(|meta| meta.len())
                .map_err(|e| unreadable_file(&path, &e))?;
            findings.require_file(&path, bytes, need)?;
        } else {
            findings.require_file(&path, 0, need)?;
        }
    }
    Ok(())
}

fn inspect_descriptors(pid: i32, findings: &mut InspectionFindings) -> Result<(), Refusal> {
    let unreadable_descriptors = |e: io::Error| unreadable("its descriptors", &e);
    let fd_entries = proc::descriptors(pid).map_err(unreadable_descriptors)?;
    let mut fd_numbers = Vec::new();
    for entry in fd_entries {
        let fd_number = entry.file_name();
        let fd_number = fd_number.to_string_lossy();
        fd_numbers.extend(fd_number.parse::<u64>());
        // A descriptor that has just been closed is ignored.
        let meaning = proc::none_if_ended(read_descriptor(pid, &entry.path(), &fd_number))
            .map_err(unreadable_descriptors)?;
        let Some(meaning) = meaning else {
            continue;
        };
        match meaning {
            DescriptorMeaning::Supported => {}
            DescriptorMeaning::Socket(inode) => {
                let kind = proc::none_if_ended(sockets::unsupported_kind(&entry.path()))
                    .map_err(|e| unreadable("the kind of its sockets", &e))?;
                if let Some(kind) = kind.flatten() {
                    return Err(unsupported_resource(kind));
                }
                findings.sockets.insert(inode);
            }
            DescriptorMeaning::LibrarySocket(inode) => {
                findings.library_sockets.insert(inode);
            }
            DescriptorMeaning::EqualLengthFile(path, _) => {
                findings.require_open_file(&path, &entry.path(), FileNeed::EqualLength)?
            }
            DescriptorMeaning::MinimumLengthFile(path) => {
                findings.require_open_file(&path, &entry.path(), FileNeed::MinimumLength)?
            }
            DescriptorMeaning::ExistingFile(path) => {
                findings.require_open_file(&path, &entry.path(), FileNeed::Exists)?
            }
            DescriptorMeaning::NamedPipe(path) => {
                findings.require_file(&path, 0, FileNeed::Exists)?;
                // A pipe that has just been closed is ignored.
                findings
                    .named_pipes
                    .extend(fifo_peers::file_identity(&entry.path()).map(|id| (id, path)));
            }
            DescriptorMeaning::Directory(path) => {
                findings.require_file(&path, 0, FileNeed::Directory)?
            }
            DescriptorMeaning::TerminalSlave(number) => {
                findings.terminal_slaves.insert(number);
            }
            DescriptorMeaning::TerminalMaster(number) => {
                findings.terminal_masters.insert(number);
            }
            DescriptorMeaning::Unsupported(what) => return Err(unsupported_resource(what)),
        }
    }
    check_descriptor_limit(pid, &fd_numbers)
}

/// Number of descriptors that must be free in each process of the task. CRIU 4.2 opens four at a
/// time.
const ENGINE_DESCRIPTORS: u64 = 8;

/// Checks that the engine can open its descriptors in the process, which has those in `fd_numbers`.
fn check_descriptor_limit(pid: i32, fd_numbers: &[u64]) -> Result<(), Refusal> {
    let limits = Process::new(pid).and_then(|process| process.limits());
    let limits = limits.map_err(|e| unreadable("its limits", &proc::into_io_error(e)))?;
    let LimitValue::Value(limit) = limits.max_open_files.soft_limit else {
        return Ok(());
    };
    let used = fd_numbers.iter().filter(|number| **number < limit).count() as u64;
    if limit.saturating_sub(used) < ENGINE_DESCRIPTORS {
        return Err(unsupported_resource(format!(
            "a limit of {limit} descriptors (RLIMIT_NOFILE), of which {used} are used; the engine \
             needs {ENGINE_DESCRIPTORS} more in it"
        )));
    }
    Ok(())
}

/// Returns the paths of the regular files that these stopped processes have open for writing, with
/// their lengths in bytes. Files without a name are skipped.
pub fn written_files(processes: &[i32]) -> Vec<(PathBuf, u64)> {
    let mut files = BTreeMap::new();
    for pid in processes {
        let Ok(fd_entries) = proc::descriptors(*pid) else {
            continue;
        };
        for entry in fd_entries {
            let (path, fd_number) = (entry.path(), entry.file_name());
            let Ok(link) = std::fs::read_link(&path) else {
                continue;
            };
            let fdinfo = proc::descriptor_info(*pid, &fd_number.to_string_lossy());
            // Reading the metadata of other kinds of files might block. The content of files
            // without a name is in the images.
            if !link.is_absolute() || !fdinfo.is_ok_and(|fdinfo| is_open_for_writing(&fdinfo)) {
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

/// True if a process has sockets of a task's library open. A process has none if its library is
/// quiesced, or if the process is a forked child that has executed another program.
pub fn has_library_sockets(pid: i32) -> bool {
    let fd_entries = proc::descriptors(pid).into_iter().flatten();
    let is_library = |entry: std::fs::DirEntry| {
        let link = std::fs::read_link(entry.path()).ok()?;
        let fdinfo = proc::descriptor_info(pid, &entry.file_name().to_string_lossy()).ok()?;
        Some(is_library_socket(&link, &fdinfo))
    };
    fd_entries
        .filter_map(is_library)
        .any(|is_library| is_library)
}

fn unreadable_file(path: &Path, error: &io::Error) -> Refusal {
    Refusal::File {
        path: path.into(),
        why: format!("it cannot be read at the source: {error}"),
    }
}

fn file_facts(
    files: BTreeMap<PathBuf, (u64, FileNeed)>,
    hashes: &HashCache,
) -> Result<Vec<RequiredFile>, Refusal> {
    files
        .into_iter()
        .map(|(path, (bytes, need))| {
            let requirement = match need {
                FileNeed::Directory => FileRequirement::Directory,
                FileNeed::Exists | FileNeed::MinimumLength => FileRequirement::Exists,
                FileNeed::ExistsOrCopied | FileNeed::MinimumLengthOrCopied => {
                    FileRequirement::ExistsOrCopy
                }
                FileNeed::EqualLength => FileRequirement::Length,
                FileNeed::EqualLengthOrCopied => FileRequirement::LengthOrCopy,
                FileNeed::EqualContent => FileRequirement::Content(
                    hashes.hash(&path).map_err(|e| unreadable_file(&path, &e))?,
                ),
            };
            let bytes = if matches!(need, FileNeed::Exists | FileNeed::ExistsOrCopied) {
                0
            } else {
                bytes
            };
            Ok(RequiredFile {
                path,
                bytes,
                requirement,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{ThisHost, decide_verdict};
    use std::process::{Child, Command, Stdio};
    use std::sync::Arc;

    /// A task whose file list exceeds the limit is refused. A list of many short paths is accepted.
    #[test]
    fn too_long_file_list_is_refused() {
        let mut findings = InspectionFindings::default();
        let long_name = "x".repeat(4000);
        let path = |n: u64| PathBuf::from(format!("/{n}/{long_name}"));
        let refusal = (0..65_530).find_map(|n| {
            findings
                .require_file(&path(n), 1, FileNeed::EqualContent)
                .err()
        });
        let Some(Refusal::FilesTooMany { files, limit }) = refusal else {
            panic!("{refusal:?}")
        };
        assert!(
            (limit / 4300..limit / 4000).contains(&(files as u64)),
            "{files}"
        );
        assert_eq!(
            findings.require_file(&path(0), 1, FileNeed::EqualContent),
            Ok(()),
            "what is known is not named again"
        );
        let mut short_path_findings = InspectionFindings::default();
        (0..65_530).for_each(|n| {
            short_path_findings
                .require_file(
                    &PathBuf::from(format!("/data/{n}")),
                    1,
                    FileNeed::EqualLength,
                )
                .expect("there is room")
        });
    }

    /// Returns findings with `files` files that must be copied. Each file has `bytes` bytes.
    fn findings_with_copied_files(files: usize, bytes: u64) -> InspectionFindings {
        let mut findings = InspectionFindings::default();
        let needs = [
            FileNeed::ExistsOrCopied,
            FileNeed::MinimumLengthOrCopied,
            FileNeed::EqualLengthOrCopied,
        ];
        for (n, need) in (0..files).zip(needs.into_iter().cycle()) {
            findings
                .require_file(&PathBuf::from(format!("/data/{n}")), bytes, need)
                .expect("there is room");
        }
        findings
    }

    /// A task with more than 1 GiB or 1024 files to copy is refused.
    #[test]
    fn copied_files_are_limited() {
        let expected_refusal = |files, bytes| {
            Err(Refusal::OpenFilesTooLarge {
                files,
                bytes,
                limit: 1 << 30,
            })
        };
        assert_eq!(
            findings_with_copied_files(1024, 1 << 20).check_copied_files(),
            Ok(())
        );
        assert_eq!(
            findings_with_copied_files(1025, 0).check_copied_files(),
            expected_refusal(1025, 0)
        );
        assert_eq!(
            findings_with_copied_files(1, (1 << 30) + 1).check_copied_files(),
            expected_refusal(1, (1 << 30) + 1)
        );
        assert_eq!(
            findings_with_copied_files(3, 1 << 29).check_copied_files(),
            expected_refusal(3, 3 << 29)
        );
        assert_eq!(
            findings_with_copied_files(3, u64::MAX / 2).check_copied_files(),
            expected_refusal(3, u64::MAX),
            "a sum that is too large for any number"
        );
    }

    /// The size of files that must exist at the target is not limited.
    #[test]
    fn files_not_copied_are_unlimited() {
        let mut findings = findings_with_copied_files(1024, 1 << 20);
        let uncopied_needs = [
            FileNeed::Directory,
            FileNeed::Exists,
            FileNeed::MinimumLength,
            FileNeed::EqualLength,
            FileNeed::EqualContent,
        ];
        for (n, need) in uncopied_needs.into_iter().enumerate() {
            findings
                .require_file(&PathBuf::from(format!("/lib/{n}")), 1 << 40, need)
                .expect("there is room");
        }
        assert_eq!(findings.check_copied_files(), Ok(()));
        // A file that is also mapped as a program is not copied.
        let mut findings = findings_with_copied_files(1, 1 << 40);
        findings
            .require_file(Path::new("/data/0"), 1 << 40, FileNeed::EqualContent)
            .expect("it is known");
        assert_eq!(findings.check_copied_files(), Ok(()));
    }

    /// A child process that is killed at the end of the test.
    struct RunningChild(Child);

    impl Drop for RunningChild {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn start_and_wait_until_mapped(command: &mut Command) -> (RunningChild, TaskProcesses) {
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let root_pid = child.id() as i32;
        // `spawn` returns before the new program is mapped.
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while !std::fs::read_to_string(format!("/proc/{root_pid}/maps"))
            .is_ok_and(|maps| maps.contains("libc"))
        {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
        (
            RunningChild(child),
            TaskProcesses {
                root_pid,
                processes: vec![root_pid],
                engine_place: EnginePlace::Outside,
                with_host_view: |action| action(),
            },
        )
    }

    #[test]
    fn own_host_accepts_plain_program() {
        let temp_dir = std::env::temp_dir().canonicalize().expect("there");
        let (_child, task) = start_and_wait_until_mapped(
            Command::new("sleep")
                .arg("1000")
                .current_dir(&temp_dir)
                .stdin(Stdio::null()),
        );
        let hashes = Arc::new(HashCache::default());
        let facts = inspect(&task, "1".into(), &hashes).expect("nothing is in the way");
        assert_eq!(facts.uid, nix::unistd::geteuid().as_raw());
        assert!(facts.memory_bytes > 0 && !facts.cpu_features.is_empty());
        let requirement_of = |path_end: &str| {
            facts
                .files
                .iter()
                .find(|f| f.path.ends_with(path_end))
                .map(|f| f.requirement.clone())
        };
        assert_eq!(
            requirement_of(temp_dir.to_str().expect("UTF-8")),
            Some(FileRequirement::Directory)
        );
        assert!(matches!(
            requirement_of("sleep"),
            Some(FileRequirement::Content(_))
        ));
        assert!(matches!(
            requirement_of("libc.so.6"),
            Some(FileRequirement::Content(_))
        ));
        assert_eq!(
            decide_verdict(&facts, &ThisHost::new(hashes, 0, u32::MAX)),
            []
        );
    }

    #[test]
    fn foreign_socket_is_refused() {
        let (own_socket, child_socket) = std::os::unix::net::UnixStream::pair().expect("pair");
        let stdin = std::os::fd::OwnedFd::from(child_socket);
        let mut sleep = Command::new("sleep");
        let temp_dir = std::env::temp_dir();
        let (_child, task) =
            start_and_wait_until_mapped(sleep.arg("1000").current_dir(temp_dir).stdin(stdin));
        let result = inspect(&task, "1".into(), &HashCache::default());
        assert_eq!(
            result,
            Err(unsupported_resource(
                "a Unix socket connected to another process"
            ))
        );
        drop(own_socket);
    }

    #[test]
    fn exiting_children_do_not_prevent_migration() {
        let fork_script = "while :; do (:); done";
        let temp_dir = std::env::temp_dir().canonicalize().expect("there");
        let mut shell = Command::new("sh");
        let (_child, task) = start_and_wait_until_mapped(
            shell
                .args(["-c", fork_script])
                .current_dir(temp_dir)
                .stdin(Stdio::null()),
        );
        let (root_pid, hashes) = (task.root_pid, HashCache::default());
        let mut child_count = 0;
        while child_count < 3000 {
            let children = proc::children(root_pid).expect("it forks");
            child_count += children.len();
            let task = TaskProcesses {
                root_pid,
                processes: [vec![root_pid], children].concat(),
                engine_place: EnginePlace::Outside,
                with_host_view: |action| action(),
            };
            inspect(&task, "1".into(), &hashes).expect("only the shell counts");
        }
    }

    #[test]
    fn process_outside_the_tree_is_refused() {
        let (child, mut task) =
            start_and_wait_until_mapped(Command::new("sleep").arg("1000").stdin(Stdio::null()));
        task.processes.push(std::process::id() as i32);
        let result = inspect(&task, "1".into(), &HashCache::default());
        assert!(
            matches!(&result, Err(Refusal::UnsupportedResource { what }) if what.contains("background process")),
            "{result:?}"
        );
        drop(child);
        task.processes.pop();
        assert_eq!(
            inspect(&task, "1".into(), &HashCache::default()),
            Err(Refusal::NoSuchTask)
        );
    }
}
