//! Detects processes that use the library of another PVM.
//!
//! PVM's library finds its daemon by the same variable as Sempa's, `PVMSOCK`, and connects to the
//! same socket. Its first message reveals the library. Nothing else in a process can tell, because
//! the daemon sets the environment of a task, but a start script may change it before the program
//! starts.

use sempa_proto::library_fault::ForeignLibrary;
use std::fs;
use std::path::{Path, PathBuf};

/// Start of the first message of PVM's library: to the daemon, from a task without a tid.
const GREETING_START: [u8; 8] = [0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
/// Start of the file name of the library; its version follows.
const LIBRARY_NAME_START: &str = "libpvm3.so";
/// Variable with the spawn token of a task's process.
const SPAWN_TOKEN_PREFIX: &[u8] = b"PVMEPID=";

/// True if the bytes are the start of the first message of PVM's library.
pub(crate) fn is_greeting(bytes: &[u8]) -> bool {
    bytes.starts_with(&GREETING_START)
}

/// A process that uses the library of another PVM.
pub(crate) struct ForeignProcess {
    /// The token with which the process was spawned; `None` if a user started the process.
    pub(crate) spawn_token: Option<i32>,
    pub(crate) fault: ForeignLibrary,
}

/// Reads the files of a process in /proc. What cannot be read is left out. `own_library` is the
/// path of Sempa's library.
pub(crate) fn inspect(pid: i32, own_library: Option<PathBuf>) -> ForeignProcess {
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let program = fs::read_link(folder.join("exe"))
        .map_or_else(|_| format!("process {pid}"), |path| path_text(&path));
    let environment = fs::read(folder.join("environ")).unwrap_or_default();
    let maps = fs::read(folder.join("maps")).unwrap_or_default();
    ForeignProcess {
        spawn_token: find_spawn_token(&environment),
        fault: ForeignLibrary {
            program,
            library: find_library(&String::from_utf8_lossy(&maps)),
            own_library: own_library.as_deref().map(path_text),
        },
    }
}

fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn find_spawn_token(environment: &[u8]) -> Option<i32> {
    environment.split(|byte| *byte == 0).find_map(|entry| {
        let value = entry.strip_prefix(SPAWN_TOKEN_PREFIX)?;
        std::str::from_utf8(value).ok()?.parse().ok()
    })
}

/// Returns the path of the loaded library `libpvm3.so`. `maps` has the format of `/proc/PID/maps`:
/// the path is the last field and starts with a slash.
fn find_library(maps: &str) -> Option<String> {
    maps.lines().find_map(|line| {
        let path = &line[line.find('/')?..];
        let (_, name) = path.rsplit_once('/')?;
        name.starts_with(LIBRARY_NAME_START)
            .then(|| path.to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::frame::encode_control;
    use sempa_proto::task::{Claim, Hello, OnDaemonExit, TASK_MAGIC, ToDaemon};

    #[test]
    fn greeting_of_pvm_is_not_ours() {
        // The message of Debian's library 3.4.6.
        let greeting = b"\x80\0\0\0\xff\xff\xff\xff\0\0\0\x3c\x03\0\0\0\x10\0\0\0\x80\x01\0\x01";
        assert!(is_greeting(greeting));
        let hello = encode_control(&ToDaemon::Hello(Hello {
            magic: TASK_MAGIC,
            version: 1,
            claim: Claim::NotSpawned,
            namespace_pid: 1,
            program: "x".into(),
            on_daemon_exit: OnDaemonExit::default(),
        }))
        .expect("a hello");
        assert!(!is_greeting(&hello));
        assert!(!is_greeting(b"\x80"));
    }

    #[test]
    fn token_and_library_are_found() {
        assert_eq!(find_spawn_token(b"A=PVMEPID=3\0PVMEPID=42\0B="), Some(42));
        assert_eq!(find_spawn_token(b"XPVMEPID=42\0"), None);
        assert_eq!(find_spawn_token(b"PVMEPID=x"), None);
        let maps = "55d0-55d1 r--p 00000000 08:01 7      /h/libpvm3.so/master\n\
                    7f00-7f01 rw-p 00000000 00:00 0 \n\
                    7f02-7f03 r-xp 00000000 08:01 9      /usr/lib/my libs/libpvm3.so.3.4.6\n";
        assert_eq!(
            find_library(maps).as_deref(),
            Some("/usr/lib/my libs/libpvm3.so.3.4.6")
        );
        assert_eq!(find_library(&maps.replace("libpvm3.so.3", "libpvm2")), None);
    }

    /// The own process has no such library, but a program and an environment.
    #[test]
    fn own_process_is_inspected() {
        let process = inspect(
            std::process::id() as i32,
            Some("/opt/x/libpvm3.so.3".into()),
        );
        let program = std::env::current_exe().expect("a path");
        assert_eq!(process.fault.program, path_text(&program));
        assert_eq!(process.fault.library, None);
        assert_eq!(
            process.fault.own_library.as_deref(),
            Some("/opt/x/libpvm3.so.3")
        );
    }
}
