//! A virtual machine of one host in private folders, without namespaces and without root, for tests
//! of one program.

use crate::requirements;
use crate::run::{CommandResult, run, run_ok};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Time for one command on a loaded machine.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// Environment variables of the calling process that must not reach the virtual machine.
const REMOVED_VARIABLES: [&str; 9] = [
    "PVM_RM",
    "PVMSOCK",
    "PVMEPID",
    "PVM_EXPORT",
    "PVM_VMID",
    "PVMHOSTFILE",
    "SEMPA_LOG",
    "SEMPA_LOG_FILTER",
    "PVM_TASKER",
];

/// Folders, programs and environment of a private virtual machine.
#[derive(Debug)]
pub struct PrivateVm {
    folder: TempDir,
    lib: PathBuf,
}

impl PrivateVm {
    /// Makes the folders and copies the programs, and starts nothing. `console` replaces the
    /// installed console.
    pub fn new(console: Option<&Path>) -> PrivateVm {
        let prefix =
            requirements::prefix().unwrap_or_else(|error| panic!("cannot run here: {error:#}"));
        PrivateVm::make_folders(&prefix, console)
            .unwrap_or_else(|error| panic!("no folders for a virtual machine: {error:#}"))
    }

    fn make_folders(prefix: &Path, console: Option<&Path>) -> Result<PrivateVm> {
        // The path of a socket is limited in length, so the folder's path is short.
        let folder = tempfile::Builder::new()
            .prefix("sempa-lab")
            .tempdir_in("/tmp")?;
        let bin = folder.path().join("bin");
        for dir in ["bin", "home", "tmp"] {
            fs::create_dir(folder.path().join(dir))?;
        }
        let installed = prefix.join("bin/pvm");
        let programs = [
            ("pvm", console.unwrap_or(&installed)),
            ("pvmd", &prefix.join("bin/pvmd")),
        ];
        for (name, from) in programs
            .into_iter()
            .chain([("pvm-tasker", &*prefix.join("bin/pvm-tasker"))])
        {
            // A child process makes the copy. If this process did, a parallel test could fork and
            // inherit the open file, and a program that is open for writing cannot be executed.
            let mut copy = Command::new("cp");
            copy.arg(from).arg(bin.join(name));
            run_ok(copy, COMMAND_TIMEOUT).with_context(|| format!("copying {}", from.display()))?;
        }
        Ok(PrivateVm {
            folder,
            lib: prefix.join("lib"),
        })
    }

    /// As [`PrivateVm::new`], and starts a daemon.
    ///
    /// # Panics
    /// As [`PrivateVm::new`], or the daemon does not start.
    pub fn started(console: Option<&Path>) -> PrivateVm {
        let lab = PrivateVm::new(console);
        if let Err(error) = lab.pvm(&["start"]).expect_success("pvm start") {
            panic!("{error:#}");
        }
        lab
    }

    /// Returns a path below the folder of the virtual machine.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the home folder of the user.
    pub fn home(&self) -> PathBuf {
        self.path("home")
    }

    /// Returns the folder of the daemon's files.
    pub fn daemon_folder(&self) -> PathBuf {
        self.path("tmp")
            .join(format!("sempa-{}", nix::unistd::geteuid()))
            .join("pvm")
    }

    /// Returns the path of the daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.daemon_folder().join("pvmd.sock")
    }

    /// Returns a command that runs `program` with the environment of this virtual machine.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command
            .env("PVM_TMP", self.path("tmp"))
            .env("HOME", self.home())
            .env("PVM_ALLOW_ROOT", "1");
        command
            .env("LD_LIBRARY_PATH", &self.lib)
            .env("SEMPA_LIB", &self.lib)
            .env("PVM_PATH", "/usr/bin:/bin");
        command.env(
            "PATH",
            format!("{}:/usr/bin:/bin", self.path("bin").display()),
        );
        for name in REMOVED_VARIABLES {
            command.env_remove(name);
        }
        command.current_dir(self.folder.path());
        command
    }

    /// Returns a command that starts the console.
    pub fn console(&self) -> Command {
        self.command(self.path("bin/pvm"))
    }

    /// Runs the console with one command.
    pub fn pvm(&self, words: &[&str]) -> CommandResult {
        let mut command = self.console();
        command.args(words);
        run(command, COMMAND_TIMEOUT)
            .unwrap_or_else(|error| panic!("pvm {}: {error:#}", words.join(" ")))
    }

    /// Returns the daemon's process number; `None` if no daemon runs.
    pub fn daemon_pid(&self) -> Option<i32> {
        fs::read_to_string(self.daemon_folder().join("pvmd.lock"))
            .ok()?
            .trim()
            .parse()
            .ok()
    }
}

impl Drop for PrivateVm {
    fn drop(&mut self) {
        if self.daemon_pid().is_some() {
            let mut halt = self.console();
            let _ = halt
                .arg("halt")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
        }
    }
}
