//! Detects processes that use the library of another PVM.
//!
//! PVM's library finds its daemon by the same variable as Sempa's, `PVMSOCK`, and connects to the
//! same socket. Its first message reveals the library. The daemon cannot know earlier: it sets the
//! environment of a task, but a start script may change it before the program starts.
//!
//! The files of the process in /proc tell the task and the library. A daemon of root has given up
//! the capabilities that a process of root has, so the kernel does not let it read them. A child
//! process of the daemon, which regains the capabilities, reads them.

use sempa_proto::library_fault::{ForeignLibrary, LibrarySource};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;

/// Maximum number of processes that are inspected concurrently.
pub(crate) const INSPECTIONS_MAX: usize = 4;
/// Time limit for the inspection of a process.
const INSPECTION_TIMEOUT: Duration = Duration::from_secs(5);
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

/// A process that uses the library of another PVM, as its files in /proc describe it.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct ForeignProcess {
    /// The token with which the process was spawned; `None` if a user started the process.
    pub(crate) spawn_token: Option<i32>,
    /// Path of the program; `None` if it cannot be read.
    program: Option<String>,
    source: LibrarySource,
}

impl ForeignProcess {
    /// Starts a process that inspects the process `pid`, and returns its result.
    ///
    /// # Errors
    /// The process cannot be started, or does not answer in time.
    pub(crate) async fn inspect(pid: i32) -> anyhow::Result<Self> {
        // The link refers to this program, even if its file has been replaced.
        let output = Command::new("/proc/self/exe")
            .args(["--inspect-process", &pid.to_string()])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = timeout(INSPECTION_TIMEOUT, output).await??;
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Reads the files of a process. What cannot be read is left out.
    fn read(pid: i32) -> Self {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let program = fs::read_link(folder.join("exe")).ok();
        let environment = fs::read(folder.join("environ")).unwrap_or_default();
        let maps = fs::read(folder.join("maps")).ok();
        Self {
            spawn_token: find_spawn_token(&environment),
            program: program.as_deref().map(path_text),
            source: maps.map_or(LibrarySource::Unknown, |maps| {
                find_library(&String::from_utf8_lossy(&maps))
            }),
        }
    }

    /// Returns what users read. `own_library` is the path of Sempa's library.
    pub(crate) fn into_fault(self, own_library: Option<&Path>) -> ForeignLibrary {
        ForeignLibrary {
            program: self.program.unwrap_or_else(|| "a program".to_string()),
            source: self.source,
            own_library: own_library.map(path_text),
        }
    }
}

/// Prints the inspection of a process, for [`ForeignProcess::inspect`]. Returns the exit status.
pub(crate) fn print_inspection(pid: i32) -> i32 {
    match serde_json::to_string(&ForeignProcess::read(pid)) {
        Ok(text) => {
            println!("{text}");
            0
        }
        Err(error) => {
            eprintln!("pvmd: {error}");
            1
        }
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

/// Finds the loaded library `libpvm3.so`. `maps` has the format of `/proc/PID/maps`: the path is
/// the last field and starts with a slash.
fn find_library(maps: &str) -> LibrarySource {
    let loaded_path = maps.lines().find_map(|line| {
        let path = &line[line.find('/')?..];
        let (_, name) = path.rsplit_once('/')?;
        name.starts_with(LIBRARY_NAME_START)
            .then(|| path.to_string())
    });
    loaded_path.map_or(LibrarySource::Linked, LibrarySource::Loaded)
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
            find_library(maps),
            LibrarySource::Loaded("/usr/lib/my libs/libpvm3.so.3.4.6".into())
        );
        assert_eq!(
            find_library(&maps.replace("libpvm3.so.3", "libpvm2")),
            LibrarySource::Linked
        );
    }

    /// This process has no such library, but a program and an environment.
    #[test]
    fn own_process_is_inspected() {
        let process = ForeignProcess::read(std::process::id() as i32);
        let own_library = Path::new("/opt/x/libpvm3.so.3");
        let fault = process.into_fault(Some(own_library));
        let program = std::env::current_exe().expect("a path");
        assert_eq!(fault.program, path_text(&program));
        assert_eq!(fault.source, LibrarySource::Linked);
        assert_eq!(fault.own_library.as_deref(), Some("/opt/x/libpvm3.so.3"));
    }
}
