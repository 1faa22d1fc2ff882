//! Compares consoles: PVM's console on PVM's daemon, our console on our daemon, and PVM's console,
//! from Debian, on our daemon. All three print the same lines. Intended differences are listed with
//! their reasons, and the test checks that each difference exists.

mod common;

use common::{Terminal, WAIT_TIMEOUT, private_vm, run_script, running_vm};
use sempa_tests::private_vm::PrivateVm;
use sempa_tests::requirements::require_program;
use sempa_tests::wait_for;
use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Command, Stdio};

/// Path of PVM's console, from Debian.
const PVM_CONSOLE: &str = "/usr/bin/pvm";
/// Path of PVM's daemon, from Debian.
const PVM_DAEMON: &str = "/usr/bin/pvmd";
/// A program of Debian's PVM examples. The program spawns another program and prints the message of
/// that program.
const HELLO_PROGRAM: &str = "/usr/bin/hello.pvm";

/// Command lines for the consoles, in this order. Commands that end tasks come last, because the
/// time at which a task has ended is not defined.
const COMMANDS: &str = r#"version
id
conf
ps
ps -x
ps -ax
ps -al
ps -xal
ps -h40000
ps -ht40000
mstat . nohost
mstat
pstat t40001 t40009 40001
pstat
jobs
jobs -l
alias
alias bar echo a b
alias
bar c
unalias bar
unalias
unalias nonesuch
alias
export
export A B
export
unexport A
export
unexport B
export
unexport
echo
echo a  b "c  d" 'x' \y
echo a;echo b
getopt
getopt PvmRoute
getopt Foo
getopt PvmRoute PvmTraceTid
setopt
setopt PvmRoute
setopt PvmRoute 3
setopt PvmRoute 1
setopt PvmFragSize 8000
setopt PvmAutoErr 0
setopt PvmAutoErr 1
setopt PvmShowTids 0
setopt PvmNoReset 0
setopt PvmNoReset 1
setopt Foo 3
names
names foo
names PVM
put
put a
put a 0 x
put b 3 x
put b 3 x
names
names a
reset info
reset info b
reset info b 0
reset info b 0 1
names
reset foo
kill
kill -c
kill -x t40002
kill t40055
kill -c t40055
sig
sig 1
sig 10 t40055
trace
trace buf
trace buf 1000
trace buf
trace buf 0
trace opt
trace opt time
trace opt
trace opt foo
trace opt full
trace + send recv
trace - send
trace nosuch
trace
trace *
trace
trace - *
trace
trace xpvm
tickle
tickle 5
tickle 6 3
tickle 5
tickle 6 0
tickle 9
conf x
id x
version x
quit x
help id conf
add
delete
delete nohost
spawn
spawn -3
spawn nosuch
spawn -3 nosuch
spawn /nosuch
spawn -nohost nosuch
spawn -NOARCH nosuch
spawn -LINUX64 nosuch
spawn -. nosuch
spawn -~ nosuch
setenv FOO bar
setenv FOO
setenv NOSUCH
setenv FOO bar  'and more'
setenv FOO
setenv A=1 2
setenv A
setenv FOO ""
setenv FOO
export FOO A
export
setenv PVM_EXPORT X:Y
export
setenv PVM_EXPORT ""
export
echo ''
echo "" x
echo #x
echo a #x
echo a#x
echo \#x a\ b "a\b" 'a\b' a\\b a'b c'd
	echo  tab	and blank
alias y bar
alias bar echo one
y two
alias echo echo twice
echo
unalias echo bar y
alias p q
alias q p
p
unalias p q nonesuch
alias ? help
?
alias w echo 'a  b' "c"
w d
unalias ? w
trace xpvm send
trace - *
trace - xpvm
trace
trace + send - send + recv
trace
trace buf 5 send opt time recv
trace buf
trace opt
trace buf 1 2
trace opt full y
trace * xpvm
trace
trace +
trace + nosuch send
trace buf 0
kill -
kill -cc t40055
sig 0 t40001
reset a b
reset info a 1 2
mstat 40000
pstat 40000 x 0
ps -n.
ps -h 40000
spawn ->> nosuch
spawn -~ -nohost nosuch
foo
cle
"id"
help spawn
jobs -x
ps -nnohost
ps -a -l
setopt PvmRoute x
trace buf x
jobs -x y
ps x
echo "c\"d"
echo a\
help nosuch
kill nosuch
put c 1
spawn -2 /bin/sleep 100
ps
ps -a
ps -l
kill -c t40001
reset
quit
"#;

/// Command lines for which our console intentionally prints other output, with the reasons.
const INTENDED_DIFFERENCES: [(&str, &str); 14] = [
    ("version", "a second line has our version"),
    ("help spawn", "our own words"),
    ("?", "our own words"),
    ("trace buf x", "what is no number is refused"),
    ("ps x", "a word that means nothing is refused"),
    ("echo \"c\\\"d\"", "only what is wrong is said"),
    ("echo a\\", "only what is wrong is said"),
    ("jobs -x", "an unknown option is named"),
    ("ps -nnohost", "no table of nothing behind the message"),
    ("ps -a -l", "options may stand apart"),
    ("setopt PvmRoute x", "what is no number is refused"),
    ("help nosuch", "an unknown command is named"),
    ("kill nosuch", "what is no tid is refused"),
    ("put c 1", "the third word is not needed"),
];

/// A running daemon of PVM with folders of its own.
struct PvmDaemon {
    vm: PrivateVm,
    child: Child,
}

impl PvmDaemon {
    fn start() -> Self {
        let vm = private_vm();
        let mut command = pvm_command(&vm, PVM_DAEMON);
        let daemon = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let pvm_daemon = Self { vm, child: daemon };
        let address_file = pvm_daemon
            .vm
            .path_below("tmp")
            .join(format!("pvmd.{}", nix::unistd::geteuid()));
        let has_address = || {
            if address_file.exists() {
                Ok(())
            } else {
                Err("PVM's daemon gives no address".to_string())
            }
        };
        wait_for(WAIT_TIMEOUT, has_address).expect("it comes up");
        pvm_daemon
    }
}

impl Drop for PvmDaemon {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

/// Returns the command for a program that uses PVM's own library and daemon.
fn pvm_command(vm: &PrivateVm, program: &str) -> Command {
    let mut command = vm.command_in_vm(program);
    command
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("SEMPA_LIB")
        .env("PATH", "/usr/bin:/bin");
    command
}

/// Returns each command with its standard output, in the order of the commands.
fn run_commands(command: Command) -> Vec<(String, String)> {
    // Standard error is not compared, because it contains messages of PVM's library and
    // explanations of our console.
    let text = run_script(command, COMMANDS, false);
    let text = text
        .strip_prefix("pvmd already running.\n")
        .unwrap_or(&text);
    let pieces = text.split("pvm> ").filter(|piece| !piece.is_empty());
    pieces
        .map(|piece| {
            let (command, answer) = piece.split_once('\n').unwrap_or((piece, ""));
            (command.to_string(), normalize_output(command, answer))
        })
        .collect()
}

/// Replaces text that differs from run to run: process ids, and tids, which depend on the number of
/// earlier tasks.
fn normalize_output(command: &str, answer: &str) -> String {
    let mut tids = BTreeMap::new();
    let lines = answer.lines().map(|line| {
        let mut words: Vec<String> = line
            .split(' ')
            .map(|word| normalize_tid(word, &mut tids))
            .collect();
        let is_row = command.starts_with("ps")
            && command.contains('l')
            && line.contains("4/c") | line.contains("2/f");
        if is_row {
            // The columns are host, tid, parent and process id.
            let cell_indices: Vec<usize> = words
                .iter()
                .enumerate()
                .filter(|(_, w)| !w.is_empty())
                .map(|(index, _)| index)
                .collect();
            words[cell_indices[3]] = "PID".into();
            words.retain(|word| !word.is_empty());
            // Our console appends the process ID on the host; PVM has no other process ID.
            if let Some(index) = words.iter().position(|word| word == "(on") {
                words.truncate(index);
            }
        }
        words.join(" ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Replaces the tid of a task, except the console, by a number in the order of first appearance.
fn normalize_tid(word: &str, numbers: &mut BTreeMap<String, usize>) -> String {
    let digits = word.strip_prefix('t').unwrap_or(word);
    if digits.len() != 5 || !digits.starts_with("400") || ["40000", "40001"].contains(&digits) {
        return word.to_string();
    }
    let next_number = numbers.len();
    let number = *numbers.entry(digits.to_string()).or_insert(next_number);
    word.replace(digits, &format!("task{number}"))
}

/// Our console prints the same as PVM's console, and PVM's console prints the same on our daemon as
/// on PVM's daemon.
#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn both_consoles_answer_alike_on_both_daemons() {
    require_program(PVM_CONSOLE, "pvm");
    let pvm = PvmDaemon::start();
    let our_vm = running_vm();
    let mixed_vm = running_vm();
    // The consoles run at the same time: they mostly wait for time limits and need little processor
    // time.
    let commands = [
        pvm_command(&pvm.vm, PVM_CONSOLE),
        our_vm.console_command(),
        mixed_vm.command_in_vm(PVM_CONSOLE),
    ];
    let [pvm_output, our_output, mixed_output] = std::thread::scope(|scope| {
        commands
            .map(|command| scope.spawn(move || run_commands(command)))
            .map(|thread| thread.join().expect("the console ends"))
    });
    assert_eq!(
        pvm_output.len(),
        COMMANDS.lines().count(),
        "PVM's console understood all: {pvm_output:?}"
    );
    let mut mismatches = Vec::new();
    for (index, (command, answer)) in pvm_output.iter().enumerate() {
        let may_differ = INTENDED_DIFFERENCES.iter().any(|(name, _)| name == command);
        if our_output[index].0 != *command || (our_output[index].1 == *answer) == may_differ {
            mismatches.push(format!(
                "{command}\nPVM: {answer}\nours: {}",
                our_output[index].1
            ));
        }
        if mixed_output.get(index) != Some(&pvm_output[index]) {
            mismatches.push(format!(
                "{command}\nPVM: {answer}\nPVM's on our daemon: {:?}",
                mixed_output.get(index)
            ));
        }
    }
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n\n"));
}

/// Waits until the screen of PVM's console contains all texts. Meanwhile sends commands to that
/// console, because PVM's console reads messages only when it receives a command.
#[track_caller]
fn wait_for_texts(terminal: &mut Terminal, texts: &[&str]) {
    let output = wait_for(WAIT_TIMEOUT, || {
        terminal.type_keys("id\n");
        let output = terminal.output_text();
        match texts.iter().find(|text| !output.contains(**text)) {
            Some(missing_text) => Err(format!("no {missing_text:?} in {output}")),
            None => Ok(()),
        }
    });
    output.unwrap_or_else(|error| panic!("{error:#}"));
}

/// PVM's console shows output and traces of the tasks of our daemon.
#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn pvms_console_shows_output_and_traces() {
    require_program(PVM_CONSOLE, "pvm");
    require_program(HELLO_PROGRAM, "pvm-examples");
    let vm = running_vm();
    let mut terminal = Terminal::start(vm.command_in_vm(PVM_CONSOLE));
    terminal.wait_for("pvm> ");
    terminal.type_keys("spawn -> hello.pvm\n");
    terminal.wait_for("[1]\r\n1 successful\r\nt4");
    wait_for_texts(
        &mut terminal,
        &["] i'm t4", ": hello, world from ", "[1] finished"],
    );
    terminal.type_keys("spawn -@ hello.pvm\n");
    let records = [
        "\"host_add(0)\" {",
        "libpvmtrc: Task TID=0x4",
        "\"newtask(0)\" {",
        "\"endtask(0)\" {",
    ];
    wait_for_texts(&mut terminal, &records);
    terminal.type_keys("halt\n");
    terminal.wait_for_exit();
    let has_exited = || {
        if vm.daemon_folder().exists() {
            Err("it is there".to_string())
        } else {
            Ok(())
        }
    };
    wait_for(WAIT_TIMEOUT, has_exited).expect("the virtual machine has ended");
}

#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn last_command_without_newline_runs_once() {
    require_program(PVM_CONSOLE, "pvm");
    let (pvm, our_vm) = (PvmDaemon::start(), running_vm());
    for vm in [&pvm.vm, &our_vm] {
        fs::write(
            vm.home().join(".pvmrc"),
            "alias me id\n# nothing\n\nme\necho the end",
        )
        .expect("written");
    }
    let expected = run_script(pvm_command(&pvm.vm, PVM_CONSOLE), "conf x\nme", false);
    assert!(
        expected.contains("me\nt40001\nthe end\npvm> conf x\n")
            && expected.contains("pvm> t40001\n"),
        "{expected}"
    );
    assert_eq!(
        run_script(our_vm.console_command(), "conf x\nme", false),
        expected
    );
}

/// The trace of each job that a console starts begins with the description of its items.
#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn each_traced_job_describes_its_items() {
    let vm = running_vm();
    let mut terminal = Terminal::start(vm.console_command());
    terminal.wait_for("pvm> ");
    for job in 1..=2 {
        let trace_file = vm.path_below(&format!("trace{job}"));
        terminal.type_keys(&format!("spawn -@{} /bin/true\r", trace_file.display()));
        terminal.wait_for(&format!("[{job}] finished"));
        let text = fs::read_to_string(trace_file).expect("a trace");
        let description_start = text
            .find("\"newtask(0)\"\n{")
            .unwrap_or_else(|| panic!("no description: {text}"));
        let descriptions = &text[description_start..];
        for name in ["TS", "TU", "TID", "PT", "TF"] {
            assert!(
                descriptions.contains(&format!("\tint \"{name}\";\n")),
                "{job}: {descriptions}"
            );
        }
        assert!(text.starts_with("/*\n * \"Creation Date\" \""), "{text}");
    }
}

/// Our console shows the output of an unmodified program of Debian together with its trace.
#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn console_shows_output_with_trace_of_debian_program() {
    require_program(HELLO_PROGRAM, "pvm-examples");
    let vm = running_vm();
    let trace_file = vm.path_below("trace");
    let output = vm.run_console(&[
        "spawn",
        "->",
        &format!("-@{}", trace_file.display()),
        "hello.pvm",
    ]);
    let output = output.expect_success("spawn").expect("it ran");
    let lines: Vec<&str> = output.stdout.lines().collect();
    assert_eq!(lines[..2], ["[1]", "1 successful"], "{output:?}");
    assert!(
        lines
            .iter()
            .any(|line| line.contains(": hello, world from ")),
        "{output:?}"
    );
    assert_eq!(
        lines
            .iter()
            .filter(|line| line.starts_with("[1] libpvmtrc: Task TID=0x4"))
            .count(),
        2,
        "{output:?}"
    );
    assert_eq!(lines.last(), Some(&"[1] finished"), "{output:?}");
    let text = fs::read_to_string(trace_file).expect("a trace");
    for name in [
        "host_add(0)",
        "newtask(0)",
        "spntask(0)",
        "output(0)",
        "endtask(0)",
    ] {
        assert!(
            text.contains(&format!("\n\"{name}\" {{ ")),
            "{name}: {text}"
        );
    }
}
