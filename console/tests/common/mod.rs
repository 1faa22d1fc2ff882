//! Functions that several tests of the console share: a virtual machine with one host, and a
//! terminal.
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

/// Time limit of every wait. This time is long enough for a loaded machine.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of bytes of terminal output that the message of a failed test contains.
const SHOWN_BYTES_MAX: usize = 2000;
pub(crate) const PROMPT: &str = "pvm> ";

/// Returns a virtual machine that consists only of its folders. No daemon is started.
pub(crate) fn private_vm() -> PrivateVm {
    PrivateVm::new(Some(Path::new(env!("CARGO_BIN_EXE_pvm"))))
}

/// Returns a virtual machine with a running daemon.
pub(crate) fn running_vm() -> PrivateVm {
    PrivateVm::start(Some(Path::new(env!("CARGO_BIN_EXE_pvm"))))
}

/// Writes commands to a console through a pipe, each when the console has shown a prompt. Waits for
/// the end of the console. Returns the console's standard output, and also its standard error if
/// `with_stderr` is true.
pub(crate) fn run_script(mut command: Command, lines: &str, with_stderr: bool) -> String {
    let output = tempfile::tempfile().expect("a file");
    let output_handle = || Stdio::from(output.try_clone().expect("a descriptor"));
    let stderr = if with_stderr {
        output_handle()
    } else {
        Stdio::null()
    };
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(output_handle())
        .stderr(stderr)
        .spawn()
        .expect("it starts");
    let mut input = child.stdin.take();
    let mut unsent_lines = lines.split_inclusive('\n').peekable();
    let mut sent_count = 0;
    let mut text = String::new();
    let end_result = wait_for(WAIT_TIMEOUT, || {
        text = read_all(&output);
        if text.matches(PROMPT).count() > sent_count
            && let Some(line) = unsent_lines.next()
        {
            // Writing fails if the console has ended. The code below checks the end of the console.
            let _ = input.as_mut().map(|input| input.write_all(line.as_bytes()));
            sent_count += 1;
        }
        if unsent_lines.peek().is_none() {
            input = None;
        }
        match child.try_wait() {
            Ok(Some(_)) => Ok(()),
            other => Err(format!("it does not end: {other:?}")),
        }
    });
    if end_result.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    text = read_all(&output);
    end_result.unwrap_or_else(|error| panic!("{error:#}; it printed:\n{text}"));
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

/// A program that runs at a pseudo terminal.
pub(crate) struct Terminal {
    child: Child,
    keyboard: File,
    slave_fd: OwnedFd,
    output: Arc<Mutex<Vec<u8>>>,
    searched_bytes: usize,
    initial_modes: Termios,
}

impl Terminal {
    /// Starts a program at a terminal of 24 lines and 80 columns.
    pub(crate) fn start(mut command: Command) -> Self {
        let window_size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let OpenptyResult { master, slave } = openpty(&window_size, None).expect("a terminal");
        let initial_modes = tcgetattr(&slave).expect("a terminal");
        let slave_stdio = || Stdio::from(slave.try_clone().expect("a descriptor"));
        if command.get_envs().all(|(name, _)| name != "TERM") {
            command.env("TERM", "xterm");
        }
        let child = command
            .stdin(slave_stdio())
            .stdout(slave_stdio())
            .stderr(slave_stdio())
            .spawn()
            .expect("it starts");
        let output_bytes = Arc::new(Mutex::new(Vec::new()));
        let (thread_bytes, mut output) = (
            output_bytes.clone(),
            File::from(master.try_clone().expect("a descriptor")),
        );
        thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(read_count @ 1..) = output.read(&mut chunk) {
                thread_bytes
                    .lock()
                    .expect("no panic")
                    .extend_from_slice(&chunk[..read_count]);
            }
        });
        Self {
            child,
            keyboard: File::from(master),
            slave_fd: slave,
            output: output_bytes,
            searched_bytes: 0,
            initial_modes,
        }
    }

    /// Writes keys to the terminal.
    pub(crate) fn type_keys(&mut self, keys: &str) {
        self.keyboard
            .write_all(keys.as_bytes())
            .expect("a terminal");
    }

    /// Waits until `text` appears in the output after the text of the previous call. Returns the
    /// output between the two texts.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let wait_result = wait_for(WAIT_TIMEOUT, || {
            let output_bytes = self.output.lock().expect("no panic");
            let unsearched_bytes = &output_bytes[self.searched_bytes..];
            match unsearched_bytes
                .windows(text.len())
                .position(|window| window == text.as_bytes())
            {
                Some(index) => Ok((
                    String::from_utf8_lossy(&unsearched_bytes[..index]).into_owned(),
                    self.searched_bytes + index + text.len(),
                )),
                None => {
                    let tail =
                        &unsearched_bytes[unsearched_bytes.len().saturating_sub(SHOWN_BYTES_MAX)..];
                    Err(format!(
                        "no {text:?}; the last that was shown: {:?}",
                        String::from_utf8_lossy(tail)
                    ))
                }
            }
        });
        let (text_before, searched_end) = wait_result.unwrap_or_else(|error| panic!("{error:#}"));
        self.searched_bytes = searched_end;
        text_before
    }

    /// Waits until the output contains both texts, in any order. The texts may precede the text of
    /// an earlier [`Terminal::wait_for`].
    #[track_caller]
    pub(crate) fn wait_for_both(&mut self, first_text: &str, second_text: &str) {
        let wait_result = wait_for(WAIT_TIMEOUT, || {
            let output = self.output_text();
            let missing_texts: Vec<&str> = [first_text, second_text]
                .into_iter()
                .filter(|text| !output.contains(*text))
                .collect();
            if missing_texts.is_empty() {
                Ok(())
            } else {
                Err(format!("not shown: {missing_texts:?}"))
            }
        });
        wait_result.unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// Returns the output of the program since its start.
    pub(crate) fn output_text(&self) -> String {
        String::from_utf8_lossy(&self.output.lock().expect("no panic")).into_owned()
    }

    pub(crate) fn process_id(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a process number")
    }

    /// Waits until the program exits, and returns its exit status.
    #[track_caller]
    pub(crate) fn wait_for_exit(&mut self) -> ExitStatus {
        let exit_result = wait_for(WAIT_TIMEOUT, || match self.child.try_wait() {
            Ok(Some(status)) => Ok(status),
            _ => Err(format!(
                "it does not end; it showed {:?}",
                self.output_text()
            )),
        });
        exit_result.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// True if the terminal has the same modes as before the start of the program.
    pub(crate) fn is_restored(&self) -> bool {
        let current_modes = tcgetattr(&self.slave_fd).expect("a terminal");
        current_modes.local_flags == self.initial_modes.local_flags
            && current_modes.input_flags == self.initial_modes.input_flags
            && current_modes.output_flags == self.initial_modes.output_flags
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
