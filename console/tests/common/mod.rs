//! Common parts of the console's tests: a virtual machine with one host, and a terminal.
#![allow(dead_code)] // Each test program uses its part.

use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::sys::termios::{Termios, tcgetattr};
use sempa_tests::private_vm::PrivateVm;
use sempa_tests::wait_for;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Time limit of every wait, for a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
/// Maximum bytes of terminal output that the message of a failed test contains.
const SHOWN_BYTES: usize = 2000;
pub(crate) const PROMPT: &str = "pvm> ";

/// Returns a lab with the folders of a virtual machine. No daemon is started.
pub(crate) fn lab() -> PrivateVm {
    PrivateVm::new(Some(Path::new(env!("CARGO_BIN_EXE_pvm"))))
}

/// Returns a lab with a running daemon.
pub(crate) fn started() -> PrivateVm {
    PrivateVm::started(Some(Path::new(env!("CARGO_BIN_EXE_pvm"))))
}

/// Writes commands to a console through a pipe, each when its prompt has appeared. Returns all
/// standard output, and also standard error if `complaints` is true.
pub(crate) fn script(mut command: Command, lines: &str, complaints: bool) -> String {
    let output = tempfile::tempfile().expect("a file");
    let both = || Stdio::from(output.try_clone().expect("a descriptor"));
    let errors = if complaints { both() } else { Stdio::null() };
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(both())
        .stderr(errors)
        .spawn()
        .expect("it starts");
    let mut input = child.stdin.take();
    let mut waiting = lines.split_inclusive('\n').peekable();
    let mut given = 0;
    let mut text = String::new();
    let ended = wait_for(PATIENCE, || {
        text = read_all(&output);
        if text.matches(PROMPT).count() > given
            && let Some(line) = waiting.next()
        {
            // Writing fails if the console has ended; the exit status is checked below.
            let _ = input.as_mut().map(|input| input.write_all(line.as_bytes()));
            given += 1;
        }
        if waiting.peek().is_none() {
            input = None;
        }
        match child.try_wait() {
            Ok(Some(_)) => Ok(()),
            other => Err(format!("it does not end: {other:?}")),
        }
    });
    if ended.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    text = read_all(&output);
    ended.unwrap_or_else(|error| panic!("{error:#}; it printed:\n{text}"));
    text
}

/// Returns the content of a file without changing the file position, at which other processes
/// write.
pub(crate) fn read_all(file: &File) -> String {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; file.metadata().expect("a file").len() as usize];
    file.read_exact_at(&mut bytes, 0).expect("a file");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A program at a pseudo terminal.
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
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let OpenptyResult { master, slave } = openpty(&size, None).expect("a terminal");
        let before = tcgetattr(&slave).expect("a terminal");
        let end = || Stdio::from(slave.try_clone().expect("a descriptor"));
        if command.get_envs().all(|(name, _)| name != "TERM") {
            command.env("TERM", "xterm");
        }
        let child = command
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .expect("it starts");
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (screen, mut output) = (
            shown.clone(),
            File::from(master.try_clone().expect("a descriptor")),
        );
        thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut chunk) {
                screen
                    .lock()
                    .expect("no panic")
                    .extend_from_slice(&chunk[..read]);
            }
        });
        Terminal {
            child,
            keyboard: File::from(master),
            slave,
            shown,
            seen: 0,
            before,
        }
    }

    /// Writes keys to the terminal.
    pub(crate) fn keys(&mut self, keys: &str) {
        self.keyboard
            .write_all(keys.as_bytes())
            .expect("a terminal");
    }

    /// Waits until this text appears after the texts of earlier waits. Returns the output between
    /// the earlier text and this one.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let found = wait_for(PATIENCE, || {
            let shown = self.shown.lock().expect("no panic");
            let new = &shown[self.seen..];
            match new
                .windows(text.len())
                .position(|window| window == text.as_bytes())
            {
                Some(at) => Ok((
                    String::from_utf8_lossy(&new[..at]).into_owned(),
                    self.seen + at + text.len(),
                )),
                None => {
                    let last = &new[new.len().saturating_sub(SHOWN_BYTES)..];
                    Err(format!(
                        "no {text:?}; the last that was shown: {:?}",
                        String::from_utf8_lossy(last)
                    ))
                }
            }
        });
        let (before, seen) = found.unwrap_or_else(|error| panic!("{error:#}"));
        self.seen = seen;
        before
    }

    /// Waits until both texts have appeared, in any order, at any place.
    #[track_caller]
    pub(crate) fn wait_for_both(&mut self, one: &str, other: &str) {
        let found = wait_for(PATIENCE, || {
            let shown = self.shown();
            let missing: Vec<&str> = [one, other]
                .into_iter()
                .filter(|text| !shown.contains(*text))
                .collect();
            if missing.is_empty() {
                Ok(())
            } else {
                Err(format!("not shown: {missing:?}"))
            }
        });
        found.unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// Returns the output of the program since its start.
    pub(crate) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().expect("no panic")).into_owned()
    }

    pub(crate) fn id(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a process number")
    }

    /// Waits until the program ends, and returns its status.
    #[track_caller]
    pub(crate) fn end(&mut self) -> ExitStatus {
        let ended = wait_for(PATIENCE, || match self.child.try_wait() {
            Ok(Some(status)) => Ok(status),
            _ => Err(format!("it does not end; it showed {:?}", self.shown())),
        });
        ended.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// True if the terminal has the settings from before the start.
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
