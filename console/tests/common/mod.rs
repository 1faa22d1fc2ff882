//! A virtual machine of one host for tests of the console, in folders of its own, and a terminal to use it at.
#![allow(dead_code)] // Each test program uses its part.

use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::sys::termios::{Termios, tcgetattr};
use sempa_tests::prefix;
use sempa_tests::run::{Done, eventually, run};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// Time for anything that a test waits for, on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How much of a screen a failed test shows.
const SHOWN_BYTES: usize = 2000;

/// Folders, programs and environment of a virtual machine that nobody else uses.
pub(crate) struct Lab {
    folder: TempDir,
    lib: PathBuf,
}

impl Lab {
    /// Nothing runs yet. `None`, with a word on standard error, when the programs are not installed.
    pub(crate) fn new() -> Option<Lab> {
        let prefix = match prefix() {
            Ok(prefix) => prefix,
            Err(error) => {
                eprintln!("skipped: {error:#}");
                return None;
            }
        };
        // Short paths: a socket's is limited.
        let folder = tempfile::Builder::new().prefix("pvm-lab").tempdir_in("/tmp").expect("a folder");
        let bin = folder.path().join("bin");
        for dir in [bin.clone(), folder.path().join("home"), folder.path().join("tmp")] {
            fs::create_dir(dir).expect("a folder");
        }
        for name in ["pvmd", "pvm-tasker"] {
            fs::copy(prefix.join("bin").join(name), bin.join(name)).expect("an installed program");
        }
        fs::copy(env!("CARGO_BIN_EXE_pvm"), bin.join("pvm")).expect("the console");
        Some(Lab { folder, lib: prefix.join("lib") })
    }

    /// The same with a daemon.
    pub(crate) fn started() -> Option<Lab> {
        let lab = Lab::new()?;
        lab.pvm(&["start"]).expect_good("start").expect("a daemon");
        Some(lab)
    }

    pub(crate) fn home(&self) -> PathBuf {
        self.folder.path().join("home")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Folder of the daemon's files.
    pub(crate) fn place(&self) -> PathBuf {
        self.path("tmp").join(format!("sempa-{}", nix::unistd::geteuid())).join("pvm")
    }

    /// A program with the environment of this virtual machine.
    pub(crate) fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command.env("PVM_TMP", self.path("tmp")).env("HOME", self.home()).env("PVM_ALLOW_ROOT", "1");
        command.env("LD_LIBRARY_PATH", &self.lib).env("SEMPA_LIB", &self.lib).env("PVM_PATH", "/usr/bin:/bin");
        command.env("PATH", format!("{}:/usr/bin:/bin", self.path("bin").display()));
        for name in ["PVM_RM", "PVMSOCK", "PVMEPID", "PVM_EXPORT", "PVM_VMID", "PVMHOSTFILE", "SEMPA_LOG"] {
            command.env_remove(name);
        }
        command.current_dir(self.folder.path());
        command
    }

    /// The console.
    pub(crate) fn console(&self) -> Command {
        self.command(self.path("bin/pvm"))
    }

    /// One command.
    pub(crate) fn pvm(&self, words: &[&str]) -> Done {
        let mut command = self.console();
        command.args(words);
        run(command, PATIENCE).expect("it ends")
    }

    /// Commands through a pipe; what the console printed, standard error included.
    pub(crate) fn script(&self, lines: &str) -> String {
        script(self.console(), lines, true)
    }

    /// The daemon's process.
    pub(crate) fn daemon(&self) -> i32 {
        let text = fs::read_to_string(self.place().join("pvmd.lock")).expect("a daemon's lock");
        text.trim().parse().expect("a process number")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.place().join("pvmd.lock").exists() {
            let _ = run_quietly(self.console().arg("halt"));
        }
    }
}

fn run_quietly(command: &mut Command) -> std::io::Result<ExitStatus> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()
}

/// Gives a program lines and collects all that it prints, complaints included or not.
pub(crate) fn script(mut command: Command, lines: &str, complaints: bool) -> String {
    let mut input = tempfile::tempfile().expect("a file");
    input.write_all(lines.as_bytes()).expect("written");
    std::io::Seek::rewind(&mut input).expect("a file");
    let mut output = tempfile::tempfile().expect("a file");
    let both = || Stdio::from(output.try_clone().expect("a descriptor"));
    let errors = if complaints { both() } else { Stdio::null() };
    let mut child = command.stdin(input).stdout(both()).stderr(errors).spawn().expect("it starts");
    let ended = eventually(PATIENCE, || match child.try_wait() {
        Ok(Some(_)) => Ok(()),
        other => Err(format!("it does not end: {other:?}")),
    });
    if ended.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let mut text = Vec::new();
    std::io::Seek::rewind(&mut output).expect("a file");
    output.read_to_end(&mut text).expect("a file");
    let text = String::from_utf8_lossy(&text).into_owned();
    ended.unwrap_or_else(|error| panic!("{error:#}; it printed:\n{text}"));
    text
}

/// A program at a terminal.
pub(crate) struct Terminal {
    child: Child,
    keyboard: File,
    slave: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
    seen: usize,
    before: Termios,
}

impl Terminal {
    /// Starts a program at a terminal of 24 lines and 80 columns.
    pub(crate) fn start(mut command: Command) -> Terminal {
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave } = openpty(&size, None).expect("a terminal");
        let before = tcgetattr(&slave).expect("a terminal");
        let end = || Stdio::from(slave.try_clone().expect("a descriptor"));
        if command.get_envs().all(|(name, _)| name != "TERM") {
            command.env("TERM", "xterm");
        }
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().expect("it starts");
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (screen, mut output) = (shown.clone(), File::from(master.try_clone().expect("a descriptor")));
        thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut chunk) {
                screen.lock().expect("no panic").extend_from_slice(&chunk[..read]);
            }
        });
        Terminal { child, keyboard: File::from(master), slave, shown, seen: 0, before }
    }

    /// Types.
    pub(crate) fn keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("a terminal");
    }

    /// Waits until this is shown, behind all that was waited for before; answers what came before it.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let found = eventually(PATIENCE, || {
            let shown = self.shown.lock().expect("no panic");
            let new = &shown[self.seen..];
            match new.windows(text.len()).position(|window| window == text.as_bytes()) {
                Some(at) => Ok((String::from_utf8_lossy(&new[..at]).into_owned(), self.seen + at + text.len())),
                None => {
                    let last = &new[new.len().saturating_sub(SHOWN_BYTES)..];
                    Err(format!("no {text:?}; the last that was shown: {:?}", String::from_utf8_lossy(last)))
                }
            }
        });
        let (before, seen) = found.unwrap_or_else(|error| panic!("{error:#}"));
        self.seen = seen;
        before
    }

    /// Waits until both are shown, in any order, wherever the last waiting ended.
    #[track_caller]
    pub(crate) fn wait_for_both(&mut self, one: &str, other: &str) {
        let found = eventually(PATIENCE, || {
            let shown = self.shown();
            let missing: Vec<&str> = [one, other].into_iter().filter(|text| !shown.contains(*text)).collect();
            if missing.is_empty() { Ok(()) } else { Err(format!("not shown: {missing:?}")) }
        });
        found.unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// All that was shown so far.
    pub(crate) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().expect("no panic")).into_owned()
    }

    /// Its process.
    pub(crate) fn id(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a process number")
    }

    /// Waits until it ends by itself.
    #[track_caller]
    pub(crate) fn end(&mut self) -> ExitStatus {
        let ended = eventually(PATIENCE, || match self.child.try_wait() {
            Ok(Some(status)) => Ok(status),
            _ => Err(format!("it does not end; it showed {:?}", self.shown())),
        });
        ended.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// True when the terminal is as it was before the program came.
    pub(crate) fn is_restored(&self) -> bool {
        let now = tcgetattr(&self.slave).expect("a terminal");
        now.local_flags == self.before.local_flags
            && now.input_flags == self.before.input_flags
            && now.output_flags == self.before.output_flags
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// True when a program of Debian's packages is here; otherwise says which package is missing.
pub(crate) fn has(program: &str, package: &str) -> bool {
    let found = Path::new(program).exists();
    if !found {
        eprintln!("skipped: {program} is missing: install {package}");
    }
    found
}
