//! A real virtual machine for a test, with the daemon and tasker of this project. Each additional
//! "host" is a directory on this host.

use super::Program;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Timeout of every wait. The timeout is long, because the machine may be loaded.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the path of a program that the test run has built.
fn built_program(name: &str) -> PathBuf {
    let test_program = std::env::current_exe().expect("a test has a path");
    let program_path = test_program
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file());
    program_path.unwrap_or_else(|| {
        panic!(
            "{name} is not built: cargo build -p pvmd -p pvm-tasker, with the profile of the tests"
        )
    })
}

/// The virtual machine of one test. The virtual machine ends when this value is dropped.
pub(crate) struct Vm {
    dir: TempDir,
    master: Child,
}

impl Vm {
    /// Starts the master and waits for the line with the address of the master's socket.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Does the same as [`Vm::start`] with additional environment variables for the daemon.
    pub(crate) fn start_with(variables: &[(&str, String)]) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("capi")
            .tempdir()
            .expect("a scratch directory");
        std::fs::create_dir(dir.path().join("master")).expect("writable");
        // The script has the arguments `host [-l user] command`, as `rsh`. The script runs the
        // command on this host, with the directory of the "host".
        let script = format!(
            "#!/bin/sh\nhost=$1; shift\n[ \"$1\" = -l ] && shift 2\nPVM_TMP={dir}/$host; export PVM_TMP\n\
             mkdir -p $PVM_TMP\nexec sh -c \"$*\"\n",
            dir = dir.path().display()
        );
        let rsh_path = dir.path().join("rsh");
        std::fs::write(&rsh_path, script).expect("writable");
        std::fs::set_permissions(&rsh_path, std::fs::Permissions::from_mode(0o755)).expect("ours");
        let library_dir = dir.path().join("lib");
        std::fs::create_dir(&library_dir).expect("writable");
        std::os::unix::fs::symlink(super::built_library(), library_dir.join("libpvm3.so.3"))
            .expect("a link");
        built_program("pvm-tasker");
        let mut command = Command::new(built_program("pvmd"));
        Self::set_environment(&mut command, dir.path());
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        let mut master = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("pvmd can be run");
        let mut line = String::new();
        BufReader::new(master.stdout.take().expect("a pipe"))
            .read_line(&mut line)
            .expect("readable");
        assert!(!line.is_empty(), "the master ended without its line");
        Self { dir, master }
    }

    fn set_environment(command: &mut Command, dir: &Path) {
        for name in [
            "PVM_RM",
            "PVM_VMID",
            "PVM_DPATH",
            "PVMHOSTFILE",
            "SEMPA_LOG",
            "SEMPA_LOG_FILTER",
            "PVM_EXPORT",
            "PVMSOCK",
            "PVMTASK",
        ] {
            command.env_remove(name);
        }
        command
            .env("PVM_TMP", dir.join("master"))
            .env("PVM_RSH", dir.join("rsh"))
            .env("LD_LIBRARY_PATH", dir.join("lib"))
            .env("SEMPA_LIB", dir.join("lib"))
            .env("SEMPA_ADDRESS", "127.0.0.1")
            .env("PVM_ALLOW_ROOT", "1");
    }

    /// Returns a command for a program on a "host". `host` is `master` or the name of an added
    /// host.
    pub(crate) fn command_on(&self, host: &str, program: &Program) -> Command {
        let mut command = Command::new(program.path());
        Self::set_environment(&mut command, self.dir.path());
        command.env("PVM_TMP", self.dir.path().join(host));
        command
    }

    /// Starts a program on the master's "host" with the arguments `args`.
    pub(crate) fn start_program(&self, program: &Program, args: &[&str]) -> RunningProgram {
        self.start_program_on("master", program, args)
    }

    /// Does the same as [`Vm::start_program`] on another "host".
    pub(crate) fn start_program_on(
        &self,
        host: &str,
        program: &Program,
        args: &[&str],
    ) -> RunningProgram {
        let mut command = self.command_on(host, program);
        command.args(args);
        RunningProgram::start(command)
    }

    /// Returns the content of the master's log file.
    pub(crate) fn read_master_log(&self) -> String {
        use std::os::unix::fs::MetadataExt;
        let uid = std::fs::metadata(self.dir.path()).expect("ours").uid();
        let path = self.dir.path().join(format!("master/sempa-{uid}/pvm/pvml"));
        std::fs::read_to_string(path).unwrap_or_default()
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of the master:\n{}", self.read_master_log());
        }
        let pid = self.master.id().to_string();
        // After SIGTERM the master ends its slaves and tasks. If the master does not exit within
        // [`WAIT_TIMEOUT`], the master is killed.
        let _ = Command::new("kill").args(["-TERM", &pid]).status();
        let start_time = Instant::now();
        while start_time.elapsed() < WAIT_TIMEOUT && matches!(self.master.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.master.kill();
        let _ = self.master.wait();
    }
}

/// A running program, and threads that continuously read its output.
pub(crate) struct RunningProgram {
    child: Child,
    output: Arc<Mutex<String>>,
    reader_threads: Vec<std::thread::JoinHandle<()>>,
}

impl RunningProgram {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it can be run");
        let output = Arc::new(Mutex::new(String::new()));
        let streams: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stdout.take().expect("a pipe")),
            Box::new(child.stderr.take().expect("a pipe")),
        ];
        let start_reader = |mut stream: Box<dyn Read + Send>| {
            let output = Arc::clone(&output);
            std::thread::spawn(move || {
                let mut buf = [0; 4096];
                while let Ok(n @ 1..) = stream.read(&mut buf) {
                    output
                        .lock()
                        .expect("no panic")
                        .push_str(&String::from_utf8_lossy(&buf[..n]));
                }
            })
        };
        let readers = streams.map(start_reader).into();
        Self {
            child,
            output,
            reader_threads: readers,
        }
    }

    /// Returns everything that the program has written so far.
    pub(crate) fn output(&self) -> String {
        self.output.lock().expect("no panic").clone()
    }

    /// Waits until the program has written this text. Panics if the program ends without this text,
    /// or after [`WAIT_TIMEOUT`].
    pub(crate) fn wait_for_output(&mut self, text: &str) {
        let start_time = Instant::now();
        while !self.output().contains(text) {
            let has_ended = self.child.try_wait().expect("our child").is_some()
                && self.reader_threads.iter().all(|r| r.is_finished());
            assert!(
                !has_ended && start_time.elapsed() < WAIT_TIMEOUT,
                "{text:?} was not said, but {:?}",
                self.output()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the program has ended, and returns its output. Panics if the status is not zero,
    /// or after [`WAIT_TIMEOUT`].
    pub(crate) fn wait_for_success(mut self) -> String {
        let start_time = Instant::now();
        let status = loop {
            match self.child.try_wait().expect("our child") {
                Some(status) => break status,
                None => assert!(
                    start_time.elapsed() < WAIT_TIMEOUT,
                    "it does not end; it said {:?}",
                    self.output()
                ),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        for reader in self.reader_threads.drain(..) {
            reader.join().expect("no panic");
        }
        assert!(status.success(), "{status}: {}", self.output());
        self.output()
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().expect("our child");
        self.child.wait().expect("our child");
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        // The call fails if the program has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
