//! Tests of hosts that a user starts by hand with the command that the master prints.

use super::{Task, Vm, WAIT_TIMEOUT, wait_until};
use nix::pty::{OpenptyResult, openpty};
use sempa_proto::task::{Reply, Request, ToDaemon};
use sempa_proto::{PvmError, RequestId};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// The terminal of a user: the keyboard, and the text that the screen has shown.
struct Terminal {
    keyboard: File,
    screen_text: Arc<Mutex<String>>,
}

/// Starts a virtual machine whose master has a terminal with a user. Returns the virtual machine,
/// the terminal and the path of the master's socket.
/// Number of programs of a master without tasks: daemon, tasker and load watcher.
const MASTER_PROGRAM_COUNT: usize = 3;

fn vm_at_a_terminal() -> (Vm, Terminal, PathBuf) {
    let mut vm = Vm::new();
    let mut command = vm.pvmd_command();
    let terminal = Terminal::for_command(&mut command);
    let socket = vm.start_with(command);
    (vm, terminal, socket)
}

/// Starts a thread that requests to add a host, because the request waits for the start by hand.
/// The thread returns the results of the request.
fn spawn_add_host(
    socket: &Path,
    line: &'static str,
) -> JoinHandle<Vec<Result<String, (PvmError, String)>>> {
    let socket = socket.to_path_buf();
    std::thread::spawn(move || Task::connect_and_enroll(&socket).add_hosts(&[line]))
}

/// Starts a daemon by hand, as the master's terminal requests. Returns the new daemon's reply line.
fn start_by_hand(vm: &Vm, host: &str, master_terminal: &Terminal) -> String {
    wait_until("it is asked for the answer", || {
        master_terminal.screen_text().ends_with("Type response: ")
    });
    let instructions = master_terminal.wait_for_text(&format!("Login to \"{host}\" and type:\n"));
    let lines: Vec<&str> = instructions.lines().collect();
    let (typed_command, secret) = (lines[0], lines[2]);
    assert!(typed_command.contains(" -S --join "), "{typed_command}");
    fs::create_dir(vm.path(host)).expect("writable");
    let mut shell_command = Command::new("sh");
    shell_command
        .args(["-c", typed_command])
        .env("PVM_TMP", vm.path(host))
        .env_remove("PVM_VMID");
    let mut remote_terminal = Terminal::for_command(&mut shell_command);
    let mut child = shell_command.spawn().expect("a shell");
    drop(shell_command);
    remote_terminal.wait_for_text("Secret");
    remote_terminal.type_line(secret);
    assert!(
        child.wait().expect("our child").success(),
        "{}",
        remote_terminal.screen_text()
    );
    remote_terminal.wait_for_text("ddpro<");
    wait_until("the whole line is there", || {
        remote_terminal.screen_text().ends_with('\n')
    });
    let instructions = remote_terminal.screen_text();
    assert!(
        !instructions.contains(secret),
        "what is typed is not shown: {instructions}"
    );
    instructions
        .lines()
        .find(|line| line.starts_with("ddpro<"))
        .expect("just seen")
        .to_string()
}

/// Other hosts can be added while one host waits for its start by hand.
#[test]
fn manual_start_allows_other_hosts() {
    let (mut vm, mut terminal, socket) = vm_at_a_terminal();
    let add_host_thread = spawn_add_host(&socket, "h2 so=ms");
    terminal.wait_for_text("*** Manual startup ***");
    let mut task = Task::connect_and_enroll(&socket);
    assert_eq!(
        task.add_hosts(&["h3"]),
        [Ok("h3".to_string())],
        "nobody waits for the person"
    );
    let daemon_reply = start_by_hand(&vm, "h2", &terminal);
    terminal.type_line("");
    terminal.type_line(&daemon_reply);
    terminal.wait_for_text("Thanks");
    assert_eq!(
        add_host_thread.join().expect("no panic"),
        [Ok("h2".to_string())]
    );
    let uid = nix::unistd::getuid();
    let mut h2_task = Task::connect_and_enroll(&vm.path(&format!("h2/sempa-{uid}/pvm/pvmd.sock")));
    wait_until(
        "it knows all",
        || matches!(h2_task.request_reply(Request::Config), Reply::Hosts(t) if t.hosts.len() == 3),
    );
    task.send_message(&ToDaemon::Request {
        id: RequestId(99),
        request: Request::Halt,
    });
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// A wrong reply at the master's terminal is refused with the reason, and no daemon remains.
#[test]
fn wrong_manual_answer_leaves_no_daemon() {
    let (mut vm, mut terminal, socket) = vm_at_a_terminal();
    wait_until("the master has its programs", || {
        vm.program_count() == MASTER_PROGRAM_COUNT
    });
    let add_host_thread = spawn_add_host(&socket, "h2 so=ms");
    start_by_hand(&vm, "h2", &terminal);
    assert!(
        vm.program_count() > MASTER_PROGRAM_COUNT,
        "{:?}",
        vm.find_processes()
    );
    terminal.type_line("hello there");
    let results = add_host_thread.join().expect("no panic");
    let (error, reason) = results[0].as_ref().expect_err("refused");
    assert!(
        *error == PvmError::CantStart
            && reason.contains("\"hello there\" is not the reply of a daemon"),
        "{reason}"
    );
    terminal.wait_for_text("h2 is not added: ");
    wait_until("its daemon ends", || {
        vm.program_count() == MASTER_PROGRAM_COUNT
    });
    let add_host_thread = spawn_add_host(&socket, "h2 so=ms");
    wait_until("it can be tried again", || {
        terminal.screen_text().matches("Type response: ").count() == 2
    });
    terminal.type_line("sempa-error: -28 one runs here");
    let results = add_host_thread.join().expect("no panic");
    let (error, reason) = results[0].as_ref().expect_err("refused");
    assert!(
        *error == PvmError::DupHost && reason.contains("one runs here"),
        "{reason}"
    );
    vm.signal_master(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// Halt does not wait for a host that must be started by hand.
#[test]
fn halt_does_not_wait_for_a_manual_start() {
    let (mut vm, terminal, socket) = vm_at_a_terminal();
    let mut task = Task::connect_and_enroll(&socket);
    let lines = vec!["h2 so=ms".to_string(), "h3 so=ms".to_string()];
    task.send_message(&ToDaemon::Request {
        id: RequestId(1),
        request: Request::AddHosts {
            host_file_lines: lines,
        },
    });
    terminal.wait_for_text("Type response: ");
    let halted_at = Instant::now();
    task.send_message(&ToDaemon::Request {
        id: RequestId(2),
        request: Request::Halt,
    });
    assert!(vm.wait_for_end().success());
    assert!(
        halted_at.elapsed() < WAIT_TIMEOUT / 2,
        "{:?}",
        halted_at.elapsed()
    );
    assert_eq!(
        terminal
            .screen_text()
            .matches("*** Manual startup ***")
            .count(),
        1,
        "one at a time"
    );
    vm.assert_clean();
}

/// A master without a terminal refuses a start by hand and reports the reason.
#[test]
fn manual_start_needs_a_terminal() {
    let mut vm = Vm::new();
    let socket = vm.start_master();
    let results = Task::connect_and_enroll(&socket).add_hosts(&["h2 so=ms", "h3 so=pw", "h4"]);
    let names_or_errors: Vec<_> = results
        .iter()
        .map(|a| a.as_ref().map(String::as_str).map_err(|(e, _)| *e))
        .collect();
    assert_eq!(
        names_or_errors,
        [Err(PvmError::CantStart), Err(PvmError::NotImpl), Ok("h4")]
    );
    let reason = |n: usize| results[n].as_ref().expect_err("refused").1.clone();
    assert!(
        reason(0).contains("not a terminal") && reason(0).contains("pvmd hostfile"),
        "{}",
        reason(0)
    );
    assert!(reason(1).contains("so=pw is for hosters"), "{}", reason(1));
    vm.signal_master(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

impl Terminal {
    /// Creates a terminal and connects the command's standard streams to it. The caller may
    /// redirect the standard output afterwards.
    fn for_command(command: &mut Command) -> Self {
        let OpenptyResult { master, slave } = openpty(None, None).expect("a terminal");
        let keyboard = File::from(master);
        let mut screen_reader = keyboard.try_clone().expect("a descriptor");
        let screen_text = Arc::new(Mutex::new(String::new()));
        let thread_screen_text = screen_text.clone();
        // The thread ends when the last program on the terminal has closed the terminal.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(byte_count @ 1..) = screen_reader.read(&mut bytes) {
                thread_screen_text
                    .lock()
                    .expect("no panic")
                    .push_str(&String::from_utf8_lossy(&bytes[..byte_count]));
            }
        });
        let slave_copy = || slave.try_clone().expect("a descriptor");
        command
            .stdin(slave_copy())
            .stdout(slave_copy())
            .stderr(slave_copy());
        Self {
            keyboard,
            screen_text,
        }
    }

    fn screen_text(&self) -> String {
        self.screen_text.lock().expect("no panic").replace('\r', "")
    }

    /// Waits until the terminal shows `text`, and returns the text after it.
    fn wait_for_text(&self, text: &str) -> String {
        wait_until(text, || self.screen_text().contains(text));
        let screen_text = self.screen_text();
        screen_text[screen_text.find(text).expect("just seen") + text.len()..].to_string()
    }

    fn type_line(&mut self, line: &str) {
        self.keyboard
            .write_all(format!("{line}\n").as_bytes())
            .expect("somebody reads");
    }
}
