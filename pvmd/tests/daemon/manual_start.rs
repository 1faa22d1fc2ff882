//! Hosts that a user starts by hand, with the line that the master prints.

use super::{DEADLINE, Task, Vm, until};
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

/// A user at a terminal.
struct Terminal {
    keyboard: File,
    shown_text: Arc<Mutex<String>>,
}

/// Starts a virtual machine with a user at the master's terminal.
fn vm_at_a_terminal() -> (Vm, Terminal, PathBuf) {
    let mut vm = Vm::new();
    let mut command = vm.command();
    let terminal = Terminal::for_command(&mut command);
    let socket = vm.start_as(command);
    (vm, terminal, socket)
}

/// Adds a host on another thread.
fn begin_adding_host(
    socket: &Path,
    line: &'static str,
) -> JoinHandle<Vec<Result<String, (PvmError, String)>>> {
    let socket = socket.to_path_buf();
    std::thread::spawn(move || Task::enrol(&socket).add(&[line]))
}

/// Starts a daemon by hand, as the master's terminal requests it. Returns the daemon's answer.
fn start_by_hand(vm: &Vm, host: &str, master_terminal: &Terminal) -> String {
    until("it is asked for the answer", || {
        master_terminal.shown().ends_with("Type response: ")
    });
    let shown = master_terminal.wait_for_text(&format!("Login to \"{host}\" and type:\n"));
    let lines: Vec<&str> = shown.lines().collect();
    let (typed, secret) = (lines[0], lines[2]);
    assert!(typed.contains(" -S --join "), "{typed}");
    fs::create_dir(vm.path(host)).expect("writable");
    let mut shell = Command::new("sh");
    shell
        .args(["-c", typed])
        .env("PVM_TMP", vm.path(host))
        .env_remove("PVM_VMID");
    let mut there = Terminal::for_command(&mut shell);
    let mut child = shell.spawn().expect("a shell");
    drop(shell);
    there.wait_for_text("Secret");
    there.enter(secret);
    assert!(
        child.wait().expect("our child").success(),
        "{}",
        there.shown()
    );
    there.wait_for_text("ddpro<");
    until("the whole line is there", || there.shown().ends_with('\n'));
    let shown = there.shown();
    assert!(
        !shown.contains(secret),
        "what is typed is not shown: {shown}"
    );
    shown
        .lines()
        .find(|line| line.starts_with("ddpro<"))
        .expect("just seen")
        .to_string()
}

/// Other hosts are added while one host waits for a start by hand.
#[test]
fn manual_start_allows_other_hosts() {
    let (mut vm, mut terminal, socket) = vm_at_a_terminal();
    let by_hand = begin_adding_host(&socket, "h2 so=ms");
    terminal.wait_for_text("*** Manual startup ***");
    let mut task = Task::enrol(&socket);
    assert_eq!(
        task.add(&["h3"]),
        [Ok("h3".to_string())],
        "nobody waits for the person"
    );
    let answer = start_by_hand(&vm, "h2", &terminal);
    terminal.enter("");
    terminal.enter(&answer);
    terminal.wait_for_text("Thanks");
    assert_eq!(by_hand.join().expect("no panic"), [Ok("h2".to_string())]);
    let uid = nix::unistd::getuid();
    let mut there = Task::enrol(&vm.path(&format!("h2/sempa-{uid}/pvm/pvmd.sock")));
    until(
        "it knows all",
        || matches!(there.ask(Request::Config), Reply::Hosts(t) if t.hosts.len() == 3),
    );
    task.send(&ToDaemon::Request {
        id: RequestId(99),
        request: Request::Halt,
    });
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// A wrong answer at the start by hand is refused with the reason, and leaves no daemon.
#[test]
fn wrong_manual_answer_leaves_no_daemon() {
    let (mut vm, mut terminal, socket) = vm_at_a_terminal();
    until("the master has its tasker", || vm.program_count() == 2);
    let by_hand = begin_adding_host(&socket, "h2 so=ms");
    start_by_hand(&vm, "h2", &terminal);
    assert!(vm.program_count() > 2, "{:?}", vm.processes());
    terminal.enter("hello there");
    let added = by_hand.join().expect("no panic");
    let (error, reason) = added[0].as_ref().expect_err("refused");
    assert!(
        *error == PvmError::CantStart
            && reason.contains("\"hello there\" is not the reply of a daemon"),
        "{reason}"
    );
    terminal.wait_for_text("h2 is not added: ");
    until("its daemon ends", || vm.program_count() == 2);
    let by_hand = begin_adding_host(&socket, "h2 so=ms");
    until("it can be tried again", || {
        terminal.shown().matches("Type response: ").count() == 2
    });
    terminal.enter("sempa-error: -28 one runs here");
    let added = by_hand.join().expect("no panic");
    let (error, reason) = added[0].as_ref().expect_err("refused");
    assert!(
        *error == PvmError::DupHost && reason.contains("one runs here"),
        "{reason}"
    );
    vm.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

/// Halt does not wait for a host that waits for a start by hand.
#[test]
fn halt_does_not_wait_for_a_manual_start() {
    let (mut vm, terminal, socket) = vm_at_a_terminal();
    let mut task = Task::enrol(&socket);
    let lines = vec!["h2 so=ms".to_string(), "h3 so=ms".to_string()];
    task.send(&ToDaemon::Request {
        id: RequestId(1),
        request: Request::AddHosts { lines },
    });
    terminal.wait_for_text("Type response: ");
    let begin = Instant::now();
    task.send(&ToDaemon::Request {
        id: RequestId(2),
        request: Request::Halt,
    });
    assert!(vm.wait_for_end().success());
    assert!(begin.elapsed() < DEADLINE / 2, "{:?}", begin.elapsed());
    assert_eq!(
        terminal.shown().matches("*** Manual startup ***").count(),
        1,
        "one at a time"
    );
    vm.assert_clean();
}

/// A master without a terminal refuses a start by hand, with the reason.
#[test]
fn manual_start_needs_a_terminal() {
    let mut vm = Vm::new();
    let socket = vm.start();
    let added = Task::enrol(&socket).add(&["h2 so=ms", "h3 so=pw", "h4"]);
    let codes: Vec<_> = added
        .iter()
        .map(|a| a.as_ref().map(String::as_str).map_err(|(e, _)| *e))
        .collect();
    assert_eq!(
        codes,
        [Err(PvmError::CantStart), Err(PvmError::NotImpl), Ok("h4")]
    );
    let reason = |n: usize| added[n].as_ref().expect_err("refused").1.clone();
    assert!(
        reason(0).contains("not a terminal") && reason(0).contains("pvmd hostfile"),
        "{}",
        reason(0)
    );
    assert!(reason(1).contains("so=pw is for hosters"), "{}", reason(1));
    vm.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(vm.wait_for_end().success());
    vm.assert_clean();
}

impl Terminal {
    /// Creates a terminal for a command, whose standard output may be redirected.
    fn for_command(command: &mut Command) -> Terminal {
        let OpenptyResult { master, slave } = openpty(None, None).expect("a terminal");
        let keys = File::from(master);
        let mut screen = keys.try_clone().expect("a descriptor");
        let shown = Arc::new(Mutex::new(String::new()));
        let seen = shown.clone();
        // The thread ends when the last program has closed the terminal.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                seen.lock()
                    .expect("no panic")
                    .push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        let end = || slave.try_clone().expect("a descriptor");
        command.stdin(end()).stdout(end()).stderr(end());
        Terminal {
            keyboard: keys,
            shown_text: shown,
        }
    }

    fn shown(&self) -> String {
        self.shown_text.lock().expect("no panic").replace('\r', "")
    }

    /// Waits for a text and returns the text that follows it.
    fn wait_for_text(&self, text: &str) -> String {
        until(text, || self.shown().contains(text));
        let shown = self.shown();
        shown[shown.find(text).expect("just seen") + text.len()..].to_string()
    }

    fn enter(&mut self, line: &str) {
        self.keyboard
            .write_all(format!("{line}\n").as_bytes())
            .expect("somebody reads");
    }
}
