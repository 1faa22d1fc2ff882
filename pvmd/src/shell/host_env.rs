//! Facts about this host that the state machine requests: programs, directories, the environment of
//! tasks, the time, and random numbers.

use super::transfer_counters::TransferCounters;
use nix::unistd::{AccessFlags, access};
use procfs::process::Process;
use procfs::{Current, LoadAverage, Meminfo};
use pvmd_machine::World;
use rustls::crypto::SecureRandom;
use sempa_proto::migration::Usage;
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::table::HostUsage;
use sempa_proto::{Micros, MigrationId, PvmError};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// PVM's architecture name for Linux on x86-64.
pub(crate) const ARCH_NAME: &str = "LINUX64";
/// PVM data signature of x86-64: layout of short, int, long, float, double (all little-endian).
pub(crate) const DATA_SIGNATURE: i32 = 0x0040_8c41;
/// Default of the variable `PVM_ROOT`, as in Debian's PVM.
const PVM_ROOT_DEFAULT: &str = "/usr/lib/pvm3";
/// Default search path for programs.
const SEARCH_PATH_DEFAULT: &str = "$HOME/pvm3/bin/$PVM_ARCH:$PVM_ROOT/bin/$PVM_ARCH";
/// File name of the library that tasks load.
const LIBRARY_FILE: &str = "libpvm3.so.3";
/// Folder of libraries of this architecture below `lib`, as Debian's packages use it.
const MULTIARCH_FOLDER: &str = "x86_64-linux-gnu";
/// Folders in which the dynamic loader searches without `LD_LIBRARY_PATH`.
const LOADER_FOLDERS: [&str; 2] = ["/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu"];

/// Variables that belong to the login session or to a single task. The tasks of this host do not
/// inherit these variables.
const SESSION_VARIABLES: [&str; 21] = [
    "SSH_CONNECTION",
    "SSH_CLIENT",
    "SSH_TTY",
    "SSH_AUTH_SOCK",
    "SSH_ORIGINAL_COMMAND",
    "XDG_SESSION_ID",
    "XDG_SESSION_TYPE",
    "XDG_SESSION_CLASS",
    "DBUS_SESSION_BUS_ADDRESS",
    "OLDPWD",
    "PWD",
    "SHLVL",
    "_",
    "PVMSOCK",
    "PVMEPID",
    "PVMCTX",
    "PVMTMASK",
    "PVMTRCBUF",
    "PVMTRCOPT",
    "PVMSPAWNWD",
    // `task_environment` sets this variable again if the virtual machine's name is not the default.
    "PVM_VMID",
];

pub(crate) fn unix_time() -> Micros {
    let since_epoch = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Micros(u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX))
}

/// Settings of a daemon's [`World`] that may differ between daemons of one host.
#[derive(Debug, Default)]
pub(crate) struct HostEnvironmentSettings {
    /// Search path, not expanded. Default: `PVM_PATH`, then [`SEARCH_PATH_DEFAULT`].
    pub(crate) search_path: Option<String>,
    /// Working directory, not expanded. Default: `PVM_WD`, then the home directory.
    pub(crate) work_dir: Option<String>,
    /// Library folder that is used if this host has no library of its own.
    pub(crate) library: Option<String>,
    /// Debugger command for tasks, unless `PVM_DEBUGGER` is set.
    pub(crate) debugger: Option<String>,
}

/// The [`World`] of a running daemon.
pub(crate) struct HostEnvironment {
    search_path: Vec<PathBuf>,
    work_dir: PathBuf,
    env: BTreeMap<OsString, OsString>,
    /// Path of the library that tasks load; `None` if this host has none.
    library: Option<PathBuf>,
    random_source: &'static dyn SecureRandom,
    counters: TransferCounters,
}

impl HostEnvironment {
    /// Creates the environment from `settings` and from the environment variables of this process.
    pub(crate) fn new(
        settings: HostEnvironmentSettings,
        paths: &RuntimePaths,
        uid: u32,
        counters: TransferCounters,
    ) -> Self {
        let process_env: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        let programs_dir = programs_folder();
        let library_dir = library_folder(
            programs_dir.as_deref(),
            process_env.get(OsStr::new("SEMPA_LIB")),
            settings.library.as_deref(),
        );
        let mut env = task_environment(process_env, library_dir.as_deref(), paths, uid);
        if let Some(debugger) = &settings.debugger {
            let debugger_command = expand_variables(debugger, |name| {
                env.get(OsStr::new(name))
                    .map(|v| v.to_string_lossy().into_owned())
            });
            env.entry("PVM_DEBUGGER".into())
                .or_insert_with(|| debugger_command.into());
        }
        let variable_value = |name: &str| {
            env.get(OsStr::new(name))
                .map(|v| v.to_string_lossy().into_owned())
        };
        let search_path = settings
            .search_path
            .or_else(|| variable_value("PVM_PATH"))
            .unwrap_or_else(|| SEARCH_PATH_DEFAULT.into());
        let mut search_path: Vec<PathBuf> = expand_variables(&search_path, variable_value)
            .split(':')
            .filter(|dir| !dir.is_empty())
            .map(PathBuf::from)
            .collect();
        // Programs that were installed for all users, and the programs of the virtual machine.
        search_path.extend(programs_dir.as_ref().map(|folder| folder.join(ARCH_NAME)));
        search_path.extend(programs_dir);
        let home_dir = || {
            variable_value("HOME")
                .filter(|h| !h.is_empty())
                .unwrap_or_else(|| "/".into())
        };
        let work_dir = settings
            .work_dir
            .or_else(|| variable_value("PVM_WD"))
            .map_or_else(home_dir, |dir| expand_variables(&dir, variable_value));
        let random_source = rustls::crypto::ring::default_provider().secure_random;
        Self {
            search_path,
            work_dir: PathBuf::from(work_dir),
            env,
            library: library_dir.map(|dir| dir.join(LIBRARY_FILE)),
            random_source,
            counters,
        }
    }

    pub(crate) fn library(&self) -> Option<&Path> {
        self.library.as_deref()
    }
}

/// Returns the directory that contains this program and the other programs of the virtual machine.
pub(crate) fn programs_folder() -> Option<PathBuf> {
    Some(std::env::current_exe().ok()?.parent()?.to_path_buf())
}

/// Returns the directory of the library `libpvm3.so.3`. If `configured_dir` (the value of
/// `SEMPA_LIB`) is set and not empty, returns this value. Otherwise returns the first of the
/// following directories that contains the library: `lib` next to the programs' directory, its
/// folder for this architecture, the programs' directory, the master's library directory.
pub(crate) fn library_folder(
    programs_dir: Option<&Path>,
    configured_dir: Option<&OsString>,
    master_dir: Option<&str>,
) -> Option<PathBuf> {
    if let Some(configured_dir) = configured_dir.filter(|s| !s.is_empty()) {
        return Some(PathBuf::from(configured_dir));
    }
    let sibling_lib = programs_dir
        .and_then(Path::parent)
        .map(|prefix| prefix.join("lib"));
    let candidates = [
        sibling_lib.clone(),
        sibling_lib.map(|lib| lib.join(MULTIARCH_FOLDER)),
        programs_dir.map(Path::to_path_buf),
        master_dir.map(PathBuf::from),
    ];
    candidates
        .into_iter()
        .flatten()
        .find(|dir| dir.join(LIBRARY_FILE).exists())
}

/// True if the dynamic loader searches `library_dir` without `LD_LIBRARY_PATH`, as it does for an
/// installation by packages. Tasks then keep the environment of the user, and a program that brings
/// libraries of its own is not affected.
pub(crate) fn is_loader_folder(library_dir: &Path) -> bool {
    LOADER_FOLDERS
        .iter()
        .any(|folder| library_dir == Path::new(folder))
}

fn task_environment(
    mut env: BTreeMap<OsString, OsString>,
    library_dir: Option<&Path>,
    paths: &RuntimePaths,
    uid: u32,
) -> BTreeMap<OsString, OsString> {
    for name in SESSION_VARIABLES {
        env.remove(OsStr::new(name));
    }
    let mut set_variable = |name: &str, value: OsString| env.insert(name.into(), value);
    set_variable("PVM_ARCH", ARCH_NAME.into());
    set_variable("PVMSOCK", paths.daemon_socket_path().into());
    if RuntimePaths::from_env(uid, |_| None)
        .is_ok_and(|default_paths| default_paths.vm_name() != paths.vm_name())
    {
        set_variable("PVM_VMID", paths.vm_name().into());
    }
    if uid == 0 {
        set_variable("PVM_ALLOW_ROOT", "1".into());
    }
    env.entry("PVM_ROOT".into())
        .or_insert_with(|| PVM_ROOT_DEFAULT.into());
    if let Some(library_dir) = library_dir.filter(|dir| !is_loader_folder(dir)) {
        let previous_path = env
            .get(OsStr::new("LD_LIBRARY_PATH"))
            .filter(|v| !v.is_empty());
        let mut library_path = library_dir.as_os_str().to_os_string();
        if let Some(previous_path) = previous_path {
            library_path.push(":");
            library_path.push(previous_path);
        }
        env.insert("LD_LIBRARY_PATH".into(), library_path);
    }
    env
}

/// Returns `text` with `$NAME` and `${NAME}` replaced by the value that `value_of` returns. If
/// `value_of` returns `None`, the variable is replaced by nothing.
fn expand_variables(text: &str, value_of: impl Fn(&str) -> Option<String>) -> String {
    let mut expanded_text = String::new();
    let mut rest = text;
    while let Some(dollar_offset) = rest.find('$') {
        expanded_text.push_str(&rest[..dollar_offset]);
        rest = &rest[dollar_offset + 1..];
        let is_name_char = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if let Some((name, after_dollar)) = rest.strip_prefix('{').and_then(|r| r.split_once('}')) {
            expanded_text.push_str(&value_of(name).unwrap_or_default());
            rest = after_dollar;
        } else {
            let end = rest.find(|c| !is_name_char(c)).unwrap_or(rest.len());
            if end == 0 {
                expanded_text.push('$');
            }
            expanded_text.push_str(&value_of(&rest[..end]).unwrap_or_default());
            rest = &rest[end..];
        }
    }
    expanded_text.push_str(rest);
    expanded_text
}

/// True for a regular file that its owner may execute. PVM applies the same rule.
fn is_program(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o100 != 0)
}

fn is_accessible_dir(dir: &Path) -> bool {
    dir.is_dir() && access(dir, AccessFlags::X_OK).is_ok()
}

impl World for HostEnvironment {
    fn find_program(&self, name: &str, dir: Option<&str>) -> Result<PathBuf, PvmError> {
        if name.is_empty() || name.contains('\0') {
            return Err(PvmError::NoFile);
        }
        let program = if name.contains('/') {
            Some(self.work_dir(dir).join(name)).filter(|path| is_program(path))
        } else {
            self.search_path
                .iter()
                .map(|folder| self.work_dir.join(folder).join(name))
                .find(|path| is_program(path))
        };
        program.ok_or(PvmError::NoFile)
    }

    fn work_dir(&self, dir: Option<&str>) -> PathBuf {
        let default_dir = if is_accessible_dir(&self.work_dir) {
            &self.work_dir
        } else {
            Path::new("/")
        };
        match dir.filter(|d| !d.is_empty()).map(|d| default_dir.join(d)) {
            Some(dir) if is_accessible_dir(&dir) => dir,
            _ => default_dir.to_path_buf(),
        }
    }

    fn base_environment(&self) -> Vec<Vec<u8>> {
        let variable_line = |(name, value): (&OsString, &OsString)| {
            let mut line = name.clone().into_vec();
            line.push(b'=');
            line.extend_from_slice(value.as_bytes());
            line
        };
        self.env.iter().map(variable_line).collect()
    }

    fn unix_time(&self) -> Micros {
        unix_time()
    }

    fn host_usage(&self) -> Option<HostUsage> {
        let load = LoadAverage::current().ok()?;
        let memory = Meminfo::current().ok()?;
        Some(HostUsage {
            load_hundredths: (load.one * 100.0).round() as u32,
            processor_count: std::thread::available_parallelism()
                .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX)),
            available_bytes: memory.mem_available?,
            total_bytes: memory.mem_total,
        })
    }

    fn process_usage(&self, pid: i32) -> Usage {
        let stat = Process::new(pid).and_then(|process| process.stat());
        let Ok(stat) = stat else {
            return Usage::default();
        };
        let micros = |ticks: u64| Micros(ticks * 1_000_000 / procfs::ticks_per_second());
        let child_ticks = |ticks: i64| u64::try_from(ticks).unwrap_or(0);
        Usage {
            user: micros(stat.utime + child_ticks(stat.cutime)),
            system: micros(stat.stime + child_ticks(stat.cstime)),
            resident_max_bytes: stat.rss * procfs::page_size(),
        }
    }

    fn sent_bytes(&self, migration: MigrationId) -> u64 {
        self.counters.sent_bytes(migration)
    }

    fn random_secret(&mut self) -> i32 {
        let mut bytes = [0; 4];
        // If the kernel gave no random numbers, TLS would have failed before.
        self.random_source
            .fill(&mut bytes)
            .expect("the kernel gives random numbers");
        (i32::from_le_bytes(bytes) & i32::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_environment() -> HostEnvironment {
        let paths = RuntimePaths::from_env(7, |_| None).expect("a good name");
        let settings = HostEnvironmentSettings {
            search_path: Some("/nowhere:/bin".into()),
            ..HostEnvironmentSettings::default()
        };
        HostEnvironment::new(settings, &paths, 7, TransferCounters::default())
    }

    #[test]
    fn variables_in_paths_are_expanded() {
        let variable_value = |name: &str| (name == "HOME").then(|| "/h".to_string());
        assert_eq!(
            expand_variables("$HOME/a:${HOME}b:$NONE/c:5$", variable_value),
            "/h/a:/hb:/c:5$"
        );
    }

    /// Packages install the library where the loader finds it; no variable is set then.
    #[test]
    fn library_of_packages_needs_no_search_path() {
        let paths = RuntimePaths::from_env(7, |_| None).expect("a good name");
        let library_path = |folder: &str| {
            let env = task_environment(BTreeMap::new(), Some(Path::new(folder)), &paths, 7);
            env.get(OsStr::new("LD_LIBRARY_PATH")).cloned()
        };
        assert_eq!(library_path("/usr/lib/x86_64-linux-gnu"), None);
        assert_eq!(
            library_path("/usr/local/lib"),
            Some("/usr/local/lib".into())
        );
    }

    #[test]
    fn library_is_found_next_to_programs() {
        let prefix = tempfile::tempdir().expect("a folder");
        let programs = prefix.path().join("bin");
        let multiarch = prefix.path().join("lib").join(MULTIARCH_FOLDER);
        std::fs::create_dir_all(&multiarch).expect("a folder");
        let folder = || library_folder(Some(&programs), None, None);
        assert_eq!(folder(), None);
        std::fs::write(multiarch.join(LIBRARY_FILE), "").expect("a file");
        assert_eq!(folder(), Some(multiarch));
        std::fs::write(prefix.path().join("lib").join(LIBRARY_FILE), "").expect("a file");
        assert_eq!(folder(), Some(prefix.path().join("lib")));
    }

    #[test]
    fn programs_are_found_in_path_or_by_name() {
        let environment = test_environment();
        assert_eq!(
            environment.find_program("sh", None),
            Ok(PathBuf::from("/bin/sh"))
        );
        assert_eq!(
            environment.find_program("./sh", Some("/bin")),
            Ok(PathBuf::from("/bin/./sh"))
        );
        assert_eq!(
            environment.find_program("/bin/sh", None),
            Ok(PathBuf::from("/bin/sh"))
        );
        for invalid_name in ["no-such-program", "/etc/passwd", "/bin", "", "sh\0"] {
            assert_eq!(
                environment.find_program(invalid_name, None),
                Err(PvmError::NoFile),
                "{invalid_name}"
            );
        }
    }

    #[test]
    fn task_environment_omits_session_variables() {
        let process_env = [
            ("SSH_TTY", "x"),
            ("EDITOR", "vi"),
            ("LD_LIBRARY_PATH", "/b"),
            ("PVMEPID", "3"),
        ];
        let process_env = process_env
            .map(|(n, v)| (OsString::from(n), OsString::from(v)))
            .into_iter()
            .collect();
        let paths = RuntimePaths::from_env(7, |_| None).expect("a good name");
        let env = task_environment(process_env, Some(Path::new("/a")), &paths, 7);
        let variable_value = |name: &str| {
            env.get(OsStr::new(name))
                .map(|v| v.to_string_lossy().into_owned())
        };
        assert_eq!(
            (
                variable_value("SSH_TTY"),
                variable_value("PVMEPID"),
                variable_value("EDITOR")
            ),
            (None, None, Some("vi".into()))
        );
        assert_eq!(variable_value("LD_LIBRARY_PATH"), Some("/a:/b".into()));
        assert_eq!(
            variable_value("PVMSOCK"),
            Some("/tmp/sempa-7/pvm/pvmd.sock".into())
        );
        assert_eq!(
            (variable_value("PVM_ARCH"), variable_value("PVM_ALLOW_ROOT")),
            (Some("LINUX64".into()), None)
        );
        let vm_id_variable = |vm: &str| {
            let paths =
                RuntimePaths::from_env(7, |name| (name == "PVM_VMID").then(|| vm.to_string()))
                    .expect("a good name");
            task_environment(BTreeMap::new(), None, &paths, 7).remove(OsStr::new("PVM_VMID"))
        };
        assert_eq!(
            (vm_id_variable("pvm"), vm_id_variable("b")),
            (None, Some("b".into()))
        );
    }
}
