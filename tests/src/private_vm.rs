//! A virtual machine of one host in private folders, without namespaces and without root, for tests
//! of one program.

use crate::requirements;
use crate::run::{CommandResult, run_successfully, run_to_end};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Time limit for one command on a loaded machine.
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

/// A virtual machine of one host: its folders, programs and environment variables.
#[derive(Debug)]
pub struct PrivateVm {
    folder: TempDir,
    library_folder: PathBuf,
}

impl PrivateVm {
    /// Makes the folders and copies the programs; does not start a daemon. `console`, if given, is
    /// used instead of the installed console.
    ///
    /// # Panics
    /// The programs are not installed, or a folder or copy cannot be made.
    pub fn new(console: Option<&Path>) -> Self {
        let prefix = requirements::installed_prefix()
            .unwrap_or_else(|error| panic!("cannot run here: {error:#}"));
        Self::try_new(&prefix, console)
            .unwrap_or_else(|error| panic!("no folders for a virtual machine: {error:#}"))
    }

    fn try_new(prefix: &Path, console: Option<&Path>) -> Result<Self> {
        // The kernel limits the length of a socket's path, so the folder's path is short.
        let folder = tempfile::Builder::new()
            .prefix("sempa-lab")
            .tempdir_in("/tmp")?;
        let bin_folder = folder.path().join("bin");
        for folder_name in ["bin", "home", "tmp"] {
            fs::create_dir(folder.path().join(folder_name))?;
        }
        let installed_console = prefix.join("bin/pvm");
        let programs = [
            ("pvm", console.unwrap_or(&installed_console)),
            ("pvmd", &prefix.join("bin/pvmd")),
        ];
        for (name, source) in programs
            .into_iter()
            .chain([("pvm-tasker", &*prefix.join("bin/pvm-tasker"))])
        {
            // A child process makes the copy. If this process made the copy, a parallel test could
            // fork and inherit the open file, and a program that is open for writing cannot be
            // executed.
            let mut copy_command = Command::new("cp");
            copy_command.arg(source).arg(bin_folder.join(name));
            run_successfully(copy_command, COMMAND_TIMEOUT)
                .with_context(|| format!("copying {}", source.display()))?;
        }
        Ok(Self {
            folder,
            library_folder: prefix.join("lib"),
        })
    }

    /// As [`PrivateVm::new`], and starts a daemon.
    ///
    /// # Panics
    /// As [`PrivateVm::new`], or if the daemon does not start.
    pub fn start(console: Option<&Path>) -> Self {
        let vm = Self::new(console);
        if let Err(error) = vm.run_console(&["start"]).expect_success("pvm start") {
            panic!("{error:#}");
        }
        vm
    }

    /// Returns a path below the folder of the virtual machine.
    pub fn path_below(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the home folder of the user.
    pub fn home(&self) -> PathBuf {
        self.path_below("home")
    }

    /// Returns the folder of the daemon's files.
    pub fn daemon_folder(&self) -> PathBuf {
        self.path_below("tmp")
            .join(format!("sempa-{}", nix::unistd::geteuid()))
            .join("pvm")
    }

    /// Returns the path of the daemon's socket.
    pub fn socket_path(&self) -> PathBuf {
        self.daemon_folder().join("pvmd.sock")
    }

    /// Returns a command that runs `program` with the environment variables of this virtual
    /// machine.
    pub fn command_in_vm(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command
            .env("PVM_TMP", self.path_below("tmp"))
            .env("HOME", self.home())
            .env("PVM_ALLOW_ROOT", "1");
        command
            .env("LD_LIBRARY_PATH", &self.library_folder)
            .env("SEMPA_LIB", &self.library_folder)
            .env("PVM_PATH", "/usr/bin:/bin");
        command.env(
            "PATH",
            format!("{}:/usr/bin:/bin", self.path_below("bin").display()),
        );
        for name in REMOVED_VARIABLES {
            command.env_remove(name);
        }
        command.current_dir(self.folder.path());
        command
    }

    /// Returns a command that starts the console.
    pub fn console_command(&self) -> Command {
        self.command_in_vm(self.path_below("bin/pvm"))
    }

    /// Runs the console with one command and waits for its end.
    ///
    /// # Panics
    /// The console does not start or does not end.
    pub fn run_console(&self, arguments: &[&str]) -> CommandResult {
        let mut command = self.console_command();
        command.args(arguments);
        run_to_end(command, COMMAND_TIMEOUT)
            .unwrap_or_else(|error| panic!("pvm {}: {error:#}", arguments.join(" ")))
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
            let mut halt_command = self.console_command();
            let _ = halt_command
                .arg("halt")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
        }
    }
}
