//! Compares consoles: PVM's console on PVM's daemon, our console on our daemon, and PVM's console,
//! from Debian, on our daemon. All print the same lines. Intended differences are listed with their
//! reasons, and the test checks that they exist.

mod common;

use common::{PATIENCE, Terminal, lab, script, started};
use sempa_tests::private_vm::PrivateVm;
use sempa_tests::requirements::require_program;
use sempa_tests::wait_for;
use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Command, Stdio};

/// PVM's console and daemon, from Debian.
const CONSOLE: &str = "/usr/bin/pvm";
const DAEMON: &str = "/usr/bin/pvmd";
/// A program of Debian's examples that spawns another one and prints.
const HELLO: &str = "/usr/bin/hello.pvm";

/// Commands with their arguments, in this order. Commands that end tasks come last, because the
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

/// Intended differences of our console, with their reasons.
const DIFFERENT: [(&str, &str); 13] = [
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
struct Real {
    lab: PrivateVm,
    daemon: Child,
}

impl Real {
    fn start() -> Real {
        let lab = lab();
        let mut command = real(&lab, DAEMON);
        let daemon = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let real = Real { lab, daemon };
        let address = real
            .lab
            .path("tmp")
            .join(format!("pvmd.{}", nix::unistd::geteuid()));
        let up = || {
            if address.exists() {
                Ok(())
            } else {
                Err("PVM's daemon gives no address".to_string())
            }
        };
        wait_for(PATIENCE, up).expect("it comes up");
        real
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.daemon.id() as i32);
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.daemon.wait();
    }
}

/// Returns the command for a program that uses PVM's own library and daemon.
fn real(lab: &PrivateVm, program: &str) -> Command {
    let mut command = lab.command(program);
    command
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("SEMPA_LIB")
        .env("PATH", "/usr/bin:/bin");
    command
}

/// Returns each command with its standard output, in the order of the commands.
fn answers(command: Command) -> Vec<(String, String)> {
    // Standard error is not compared: it has messages of PVM's library and explanations of our
    // console.
    let text = script(command, COMMANDS, false);
    let text = text
        .strip_prefix("pvmd already running.\n")
        .unwrap_or(&text);
    let pieces = text.split("pvm> ").filter(|piece| !piece.is_empty());
    pieces
        .map(|piece| {
            let (command, answer) = piece.split_once('\n').unwrap_or((piece, ""));
            (command.to_string(), plain(command, answer))
        })
        .collect()
}

/// Replaces what differs from run to run: process ids, and tids, which depend on the number of
/// earlier tasks.
fn plain(command: &str, answer: &str) -> String {
    let mut tids = BTreeMap::new();
    let lines = answer.lines().map(|line| {
        let mut words: Vec<String> = line.split(' ').map(|word| tid(word, &mut tids)).collect();
        let is_row = command.starts_with("ps")
            && command.contains('l')
            && line.contains("4/c") | line.contains("2/f");
        if is_row {
            // Host, tid, parent, process.
            let cells: Vec<usize> = words
                .iter()
                .enumerate()
                .filter(|(_, w)| !w.is_empty())
                .map(|(at, _)| at)
                .collect();
            words[cells[3]] = "PID".into();
            words.retain(|word| !word.is_empty());
        }
        words.join(" ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Replaces the tid of another task by its number in the order of appearance.
fn tid(word: &str, seen: &mut BTreeMap<String, usize>) -> String {
    let digits = word.strip_prefix('t').unwrap_or(word);
    if digits.len() != 5 || !digits.starts_with("400") || ["40000", "40001"].contains(&digits) {
        return word.to_string();
    }
    let next = seen.len();
    let number = *seen.entry(digits.to_string()).or_insert(next);
    word.replace(digits, &format!("task{number}"))
}

/// Our console prints the same as PVM's console, and PVM's console prints the same on our daemon as
/// on PVM's daemon.
#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn both_consoles_answer_alike_on_both_daemons() {
    require_program(CONSOLE, "pvm");
    let pvm = Real::start();
    let ours = started();
    let mixed = started();
    // The consoles run at the same time: they mostly wait for time limits and need little processor
    // time.
    let commands = [
        real(&pvm.lab, CONSOLE),
        ours.console(),
        mixed.command(CONSOLE),
    ];
    let [wanted, own, strange] = std::thread::scope(|scope| {
        commands
            .map(|command| scope.spawn(move || answers(command)))
            .map(|thread| thread.join().expect("the console ends"))
    });
    assert_eq!(
        wanted.len(),
        COMMANDS.lines().count(),
        "PVM's console understood all: {wanted:?}"
    );
    let mut wrong = Vec::new();
    for (at, (command, answer)) in wanted.iter().enumerate() {
        let differs = DIFFERENT.iter().any(|(name, _)| name == command);
        if own[at].0 != *command || (own[at].1 == *answer) == differs {
            wrong.push(format!("{command}\nPVM: {answer}\nours: {}", own[at].1));
        }
        if strange.get(at) != Some(&wanted[at]) {
            wrong.push(format!(
                "{command}\nPVM: {answer}\nPVM's on our daemon: {:?}",
                strange.get(at)
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

/// Waits for texts on the screen of PVM's console. Sends it commands meanwhile, because PVM's
/// console reads messages only when it gets a command.
#[track_caller]
fn shown_with_commands(terminal: &mut Terminal, texts: &[&str]) {
    let shown = wait_for(PATIENCE, || {
        terminal.keys("id\n");
        let shown = terminal.shown();
        match texts.iter().find(|text| !shown.contains(**text)) {
            Some(missing) => Err(format!("no {missing:?} in {shown}")),
            None => Ok(()),
        }
    });
    shown.unwrap_or_else(|error| panic!("{error:#}"));
}

/// PVM's console shows output and traces of the tasks of our daemon.
#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn pvms_console_shows_output_and_traces() {
    require_program(CONSOLE, "pvm");
    require_program(HELLO, "pvm-examples");
    let lab = started();
    let mut terminal = Terminal::start(lab.command(CONSOLE));
    terminal.wait_for("pvm> ");
    terminal.keys("spawn -> hello.pvm\n");
    terminal.wait_for("[1]\r\n1 successful\r\nt4");
    shown_with_commands(
        &mut terminal,
        &["] i'm t4", ": hello, world from ", "[1] finished"],
    );
    terminal.keys("spawn -@ hello.pvm\n");
    let records = [
        "\"host_add(0)\" {",
        "libpvmtrc: Task TID=0x4",
        "\"newtask(0)\" {",
        "\"endtask(0)\" {",
    ];
    shown_with_commands(&mut terminal, &records);
    terminal.keys("halt\n");
    terminal.end();
    let gone = || {
        if lab.daemon_folder().exists() {
            Err("it is there".to_string())
        } else {
            Ok(())
        }
    };
    wait_for(PATIENCE, gone).expect("the virtual machine has ended");
}

/// The last command of a script needs no newline, and runs once.
#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn last_command_without_newline_runs_once() {
    require_program(CONSOLE, "pvm");
    let (pvm, ours) = (Real::start(), started());
    for lab in [&pvm.lab, &ours] {
        fs::write(
            lab.home().join(".pvmrc"),
            "alias me id\n# nothing\n\nme\necho the end",
        )
        .expect("written");
    }
    let wanted = script(real(&pvm.lab, CONSOLE), "conf x\nme", false);
    assert!(
        wanted.contains("me\nt40001\nthe end\npvm> conf x\n") && wanted.contains("pvm> t40001\n"),
        "{wanted}"
    );
    assert_eq!(script(ours.console(), "conf x\nme", false), wanted);
}

/// The trace of each job that a console starts begins with the description of its items.
#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn each_traced_job_describes_its_items() {
    let lab = started();
    let mut terminal = Terminal::start(lab.console());
    terminal.wait_for("pvm> ");
    for job in 1..=2 {
        let file = lab.path(&format!("trace{job}"));
        terminal.keys(&format!("spawn -@{} /bin/true\r", file.display()));
        terminal.wait_for(&format!("[{job}] finished"));
        let text = fs::read_to_string(file).expect("a trace");
        let begin = text
            .find("\"newtask(0)\"\n{")
            .unwrap_or_else(|| panic!("no description: {text}"));
        let described = &text[begin..];
        for name in ["TS", "TU", "TID", "PT", "TF"] {
            assert!(
                described.contains(&format!("\tint \"{name}\";\n")),
                "{job}: {described}"
            );
        }
        assert!(text.starts_with("/*\n * \"Creation Date\" \""), "{text}");
    }
}

/// Our console shows the output of an unmodified program of Debian together with its trace.
#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn console_shows_output_with_trace_of_debian_program() {
    require_program(HELLO, "pvm-examples");
    let lab = started();
    let trace = lab.path("trace");
    let done = lab.pvm(&[
        "spawn",
        "->",
        &format!("-@{}", trace.display()),
        "hello.pvm",
    ]);
    let done = done.expect_success("spawn").expect("it ran");
    let lines: Vec<&str> = done.out.lines().collect();
    assert_eq!(lines[..2], ["[1]", "1 successful"], "{done:?}");
    assert!(
        lines
            .iter()
            .any(|line| line.contains(": hello, world from ")),
        "{done:?}"
    );
    assert_eq!(
        lines
            .iter()
            .filter(|line| line.starts_with("[1] libpvmtrc: Task TID=0x4"))
            .count(),
        2,
        "{done:?}"
    );
    assert_eq!(lines.last(), Some(&"[1] finished"), "{done:?}");
    let text = fs::read_to_string(trace).expect("a trace");
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
