//! Real virtual machine for a test, with the daemon and tasker of this project. Its other "hosts"
//! are folders of this host.

use super::Program;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Timeout of every wait; long, because the machine may be loaded.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the path of a program that the test run has built.
fn built_program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let found = test
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file());
    found.unwrap_or_else(|| {
        panic!(
            "{name} is not built: cargo build -p pvmd -p pvm-tasker, with the profile of the tests"
        )
    })
}

/// The virtual machine of one test. Dropping it ends the virtual machine.
pub(crate) struct Vm {
    dir: TempDir,
    master: Child,
}

impl Vm {
    /// Starts the master and waits for the line with its socket.
    pub(crate) fn start() -> Vm {
        Vm::start_with(&[])
    }

    /// As [`Vm::start`], with additional variables for the daemon.
    pub(crate) fn start_with(env: &[(&str, String)]) -> Vm {
        let dir = tempfile::Builder::new()
            .prefix("capi")
            .tempdir()
            .expect("a scratch directory");
        std::fs::create_dir(dir.path().join("master")).expect("writable");
        // rsh host [-l user] command: runs the command here, with the folder of that "host".
        let script = format!(
            "#!/bin/sh\nhost=$1; shift\n[ \"$1\" = -l ] && shift 2\nPVM_TMP={dir}/$host; export PVM_TMP\n\
             mkdir -p $PVM_TMP\nexec sh -c \"$*\"\n",
            dir = dir.path().display()
        );
        let path = dir.path().join("rsh");
        std::fs::write(&path, script).expect("writable");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("ours");
        let library = dir.path().join("lib");
        std::fs::create_dir(&library).expect("writable");
        std::os::unix::fs::symlink(super::library(), library.join("libpvm3.so.3")).expect("a link");
        built_program("pvm-tasker");
        let mut command = Command::new(built_program("pvmd"));
        Vm::environment(&mut command, dir.path());
        command.envs(env.iter().map(|(name, value)| (name, value)));
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
        Vm { dir, master }
    }

    fn environment(command: &mut Command, dir: &Path) {
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

    /// Returns a command for a program on a "host" (`master` or an added one).
    pub(crate) fn command_on(&self, host: &str, program: &Program) -> Command {
        let mut command = Command::new(program.path());
        Vm::environment(&mut command, self.dir.path());
        command.env("PVM_TMP", self.dir.path().join(host));
        command
    }

    /// Starts a program on the master's "host" with the arguments `words`.
    pub(crate) fn run(&self, program: &Program, words: &[&str]) -> RunningProgram {
        self.run_on("master", program, words)
    }

    /// As [`Vm::play`], on another "host".
    pub(crate) fn run_on(&self, host: &str, program: &Program, words: &[&str]) -> RunningProgram {
        let mut command = self.command_on(host, program);
        command.args(words);
        RunningProgram::start(command)
    }

    /// Returns the content of the master's log file.
    pub(crate) fn log(&self) -> String {
        use std::os::unix::fs::MetadataExt;
        let uid = std::fs::metadata(self.dir.path()).expect("ours").uid();
        let path = self.dir.path().join(format!("master/sempa-{uid}/pvm/pvml"));
        std::fs::read_to_string(path).unwrap_or_default()
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of the master:\n{}", self.log());
        }
        let pid = self.master.id().to_string();
        // The master ends its slaves and tasks. A master that hangs is killed.
        let _ = Command::new("kill").args(["-TERM", &pid]).status();
        let begin = Instant::now();
        while begin.elapsed() < WAIT_TIMEOUT && matches!(self.master.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.master.kill();
        let _ = self.master.wait();
    }
}

/// A running program whose output is read as it arrives.
pub(crate) struct RunningProgram {
    child: Child,
    output: Arc<Mutex<String>>,
    readers: Vec<std::thread::JoinHandle<()>>,
}

impl RunningProgram {
    pub(crate) fn start(mut command: Command) -> RunningProgram {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it can be run");
        let said = Arc::new(Mutex::new(String::new()));
        let out: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stdout.take().expect("a pipe")),
            Box::new(child.stderr.take().expect("a pipe")),
        ];
        let reader = |mut stream: Box<dyn Read + Send>| {
            let said = Arc::clone(&said);
            std::thread::spawn(move || {
                let mut chunk = [0; 4096];
                while let Ok(n @ 1..) = stream.read(&mut chunk) {
                    said.lock()
                        .expect("no panic")
                        .push_str(&String::from_utf8_lossy(&chunk[..n]));
                }
            })
        };
        let readers = out.map(reader).into();
        RunningProgram {
            child,
            output: said,
            readers,
        }
    }

    /// Returns everything that the program has written so far.
    pub(crate) fn output(&self) -> String {
        self.output.lock().expect("no panic").clone()
    }

    /// Waits until the program has written this text.
    pub(crate) fn wait_for_output(&mut self, text: &str) {
        let begin = Instant::now();
        while !self.output().contains(text) {
            let over = self.child.try_wait().expect("our child").is_some()
                && self.readers.iter().all(|r| r.is_finished());
            assert!(
                !over && begin.elapsed() < WAIT_TIMEOUT,
                "{text:?} was not said, but {:?}",
                self.output()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the program has ended with status zero, and returns its output.
    pub(crate) fn wait_for_success(mut self) -> String {
        let begin = Instant::now();
        let status = loop {
            match self.child.try_wait().expect("our child") {
                Some(status) => break status,
                None => assert!(
                    begin.elapsed() < WAIT_TIMEOUT,
                    "it does not end; it said {:?}",
                    self.output()
                ),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        for reader in self.readers.drain(..) {
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
        // Fails if the program has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
