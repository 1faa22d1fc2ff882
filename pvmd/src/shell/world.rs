//! What the machine may ask this host: programs, directories, the environment of tasks, the time, and chance.

use nix::unistd::{AccessFlags, access};
use pvmd_machine::World;
use rustls::crypto::SecureRandom;
use sempa_proto::place::Place;
use sempa_proto::{Micros, PvmError};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Architecture name of PVM for this machine.
pub(crate) const ARCH: &str = "LINUX64";
/// Data signature of x86-64: how numbers are laid out (short, int, long, float, double; all little-endian).
pub(crate) const DSIG: i32 = 0x0040_8c41;
/// Default of `PVM_ROOT`, as Debian's PVM has it.
const PVM_ROOT: &str = "/usr/lib/pvm3";
/// Default of the search path.
const SEARCH_PATH: &str = "$HOME/pvm3/bin/$PVM_ARCH:$PVM_ROOT/bin/$PVM_ARCH";
/// The library that tasks load.
const LIBRARY: &str = "libpvm3.so.3";

/// Variables that belong to the login session, or to one task, and not to every task of the host.
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
    // Set again where the virtual machine has a name of its own.
    "PVM_VMID",
];

/// The time of day.
pub(crate) fn unix_time() -> Micros {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Micros(u64::try_from(now.as_micros()).unwrap_or(u64::MAX))
}

/// What makes this daemon's world different from another one's on the same host.
#[derive(Debug, Default)]
pub(crate) struct WorldSettings {
    /// Search path, unexpanded; `PVM_PATH` or the default when absent.
    pub(crate) search_path: Option<String>,
    /// Working directory, unexpanded; `PVM_WD` or the home directory when absent.
    pub(crate) work_dir: Option<String>,
    /// A library folder to use if this host has none of its own.
    pub(crate) library: Option<String>,
    /// What debugs tasks here, unless `PVM_DEBUGGER` says something else.
    pub(crate) debugger: Option<String>,
}

/// The world of a running daemon.
pub(crate) struct DaemonWorld {
    search: Vec<PathBuf>,
    work_dir: PathBuf,
    env: BTreeMap<OsString, OsString>,
    random: &'static dyn SecureRandom,
}

impl DaemonWorld {
    /// The world as this process's environment and the settings make it.
    pub(crate) fn new(settings: WorldSettings, place: &Place, uid: u32) -> DaemonWorld {
        let own: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        let programs = programs_folder();
        let library = library_folder(
            programs.as_deref(),
            own.get(OsStr::new("SEMPA_LIB")),
            settings.library.as_deref(),
        );
        let mut env = task_environment(own, library.as_deref(), place, uid);
        if let Some(debugger) = &settings.debugger {
            let expanded = expand(debugger, |name| {
                env.get(OsStr::new(name))
                    .map(|v| v.to_string_lossy().into_owned())
            });
            env.entry("PVM_DEBUGGER".into())
                .or_insert_with(|| expanded.into());
        }
        let var = |name: &str| {
            env.get(OsStr::new(name))
                .map(|v| v.to_string_lossy().into_owned())
        };
        let search = settings
            .search_path
            .or_else(|| var("PVM_PATH"))
            .unwrap_or_else(|| SEARCH_PATH.into());
        let mut search: Vec<PathBuf> = expand(&search, var)
            .split(':')
            .filter(|dir| !dir.is_empty())
            .map(PathBuf::from)
            .collect();
        search.extend(programs);
        let home = || {
            var("HOME")
                .filter(|h| !h.is_empty())
                .unwrap_or_else(|| "/".into())
        };
        let work_dir = settings
            .work_dir
            .or_else(|| var("PVM_WD"))
            .map_or_else(home, |dir| expand(&dir, var));
        let random = rustls::crypto::ring::default_provider().secure_random;
        DaemonWorld {
            search,
            work_dir: PathBuf::from(work_dir),
            env,
            random,
        }
    }
}

/// The folder of this program and its siblings.
pub(crate) fn programs_folder() -> Option<PathBuf> {
    Some(std::env::current_exe().ok()?.parent()?.to_path_buf())
}

/// Where our library is: `SEMPA_LIB`, `lib` beside the programs' folder, that folder itself, or where the master has it.
pub(crate) fn library_folder(
    programs: Option<&Path>,
    set: Option<&OsString>,
    master: Option<&str>,
) -> Option<PathBuf> {
    if let Some(set) = set.filter(|s| !s.is_empty()) {
        return Some(PathBuf::from(set));
    }
    let beside = programs
        .and_then(Path::parent)
        .map(|prefix| prefix.join("lib"));
    let candidates = [
        beside,
        programs.map(Path::to_path_buf),
        master.map(PathBuf::from),
    ];
    candidates
        .into_iter()
        .flatten()
        .find(|dir| dir.join(LIBRARY).exists())
}

fn task_environment(
    mut env: BTreeMap<OsString, OsString>,
    library: Option<&Path>,
    place: &Place,
    uid: u32,
) -> BTreeMap<OsString, OsString> {
    for name in SESSION_VARIABLES {
        env.remove(OsStr::new(name));
    }
    let mut set = |name: &str, value: OsString| env.insert(name.into(), value);
    set("PVM_ARCH", ARCH.into());
    set("PVMSOCK", place.socket().into());
    if Place::of(uid, |_| None).is_ok_and(|usual| usual.vm() != place.vm()) {
        set("PVM_VMID", place.vm().into());
    }
    if uid == 0 {
        set("PVM_ALLOW_ROOT", "1".into());
    }
    env.entry("PVM_ROOT".into())
        .or_insert_with(|| PVM_ROOT.into());
    if let Some(library) = library {
        let before = env
            .get(OsStr::new("LD_LIBRARY_PATH"))
            .filter(|v| !v.is_empty());
        let mut path = library.as_os_str().to_os_string();
        if let Some(before) = before {
            path.push(":");
            path.push(before);
        }
        env.insert("LD_LIBRARY_PATH".into(), path);
    }
    env
}

/// Replaces `$NAME` and `${NAME}`; unknown names become nothing.
fn expand(text: &str, var: impl Fn(&str) -> Option<String>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if let Some((name, after)) = rest.strip_prefix('{').and_then(|r| r.split_once('}')) {
            out.push_str(&var(name).unwrap_or_default());
            rest = after;
        } else {
            let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
            if end == 0 {
                out.push('$');
            }
            out.push_str(&var(&rest[..end]).unwrap_or_default());
            rest = &rest[end..];
        }
    }
    out.push_str(rest);
    out
}

/// True for a regular file that its owner may execute, as PVM asks for.
fn is_program(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o100 != 0)
}

fn can_enter(dir: &Path) -> bool {
    dir.is_dir() && access(dir, AccessFlags::X_OK).is_ok()
}

impl World for DaemonWorld {
    fn find_program(&self, name: &str, dir: Option<&str>) -> Result<PathBuf, PvmError> {
        if name.is_empty() || name.contains('\0') {
            return Err(PvmError::NoFile);
        }
        let found = if name.contains('/') {
            Some(self.work_dir(dir).join(name)).filter(|path| is_program(path))
        } else {
            self.search
                .iter()
                .map(|folder| self.work_dir.join(folder).join(name))
                .find(|path| is_program(path))
        };
        found.ok_or(PvmError::NoFile)
    }

    fn work_dir(&self, dir: Option<&str>) -> PathBuf {
        let own = if can_enter(&self.work_dir) {
            &self.work_dir
        } else {
            Path::new("/")
        };
        match dir.filter(|d| !d.is_empty()).map(|d| own.join(d)) {
            Some(dir) if can_enter(&dir) => dir,
            _ => own.to_path_buf(),
        }
    }

    fn base_env(&self) -> Vec<Vec<u8>> {
        let pair = |(name, value): (&OsString, &OsString)| {
            let mut line = name.clone().into_vec();
            line.push(b'=');
            line.extend_from_slice(value.as_bytes());
            line
        };
        self.env.iter().map(pair).collect()
    }

    fn unix_time(&self) -> Micros {
        unix_time()
    }

    fn secret(&mut self) -> i32 {
        let mut bytes = [0; 4];
        // Without random numbers TLS would have failed long before.
        self.random
            .fill(&mut bytes)
            .expect("the kernel gives random numbers");
        (i32::from_le_bytes(bytes) & i32::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world() -> DaemonWorld {
        let place = Place::of(7, |_| None).expect("a good name");
        let settings = WorldSettings {
            search_path: Some("/nowhere:/bin".into()),
            ..WorldSettings::default()
        };
        DaemonWorld::new(settings, &place, 7)
    }

    #[test]
    fn variables_in_paths_are_expanded_in_both_forms() {
        let var = |name: &str| (name == "HOME").then(|| "/h".to_string());
        assert_eq!(expand("$HOME/a:${HOME}b:$NONE/c:5$", var), "/h/a:/hb:/c:5$");
    }

    #[test]
    fn programs_are_found_along_the_path_or_as_named() {
        let world = world();
        assert_eq!(world.find_program("sh", None), Ok(PathBuf::from("/bin/sh")));
        assert_eq!(
            world.find_program("./sh", Some("/bin")),
            Ok(PathBuf::from("/bin/./sh"))
        );
        assert_eq!(
            world.find_program("/bin/sh", None),
            Ok(PathBuf::from("/bin/sh"))
        );
        for bad in ["no-such-program", "/etc/passwd", "/bin", "", "sh\0"] {
            assert_eq!(
                world.find_program(bad, None),
                Err(PvmError::NoFile),
                "{bad}"
            );
        }
    }

    #[test]
    fn tasks_get_the_daemons_environment_without_its_session() {
        let own = [
            ("SSH_TTY", "x"),
            ("EDITOR", "vi"),
            ("LD_LIBRARY_PATH", "/b"),
            ("PVMEPID", "3"),
        ];
        let own = own
            .map(|(n, v)| (OsString::from(n), OsString::from(v)))
            .into_iter()
            .collect();
        let place = Place::of(7, |_| None).expect("a good name");
        let env = task_environment(own, Some(Path::new("/a")), &place, 7);
        let get = |name: &str| {
            env.get(OsStr::new(name))
                .map(|v| v.to_string_lossy().into_owned())
        };
        assert_eq!(
            (get("SSH_TTY"), get("PVMEPID"), get("EDITOR")),
            (None, None, Some("vi".into()))
        );
        assert_eq!(get("LD_LIBRARY_PATH"), Some("/a:/b".into()));
        assert_eq!(get("PVMSOCK"), Some("/tmp/sempa-7/pvm/pvmd.sock".into()));
        assert_eq!(
            (get("PVM_ARCH"), get("PVM_ALLOW_ROOT")),
            (Some("LINUX64".into()), None)
        );
        let named = |vm: &str| {
            let place = Place::of(7, |name| (name == "PVM_VMID").then(|| vm.to_string()))
                .expect("a good name");
            task_environment(BTreeMap::new(), None, &place, 7).remove(OsStr::new("PVM_VMID"))
        };
        assert_eq!((named("pvm"), named("b")), (None, Some("b".into())));
    }
}
