//! Calls every function with bad arguments. Each call runs in its own process, returns a documented
//! number, and never ends the process by a signal. The calls are made from the header and the
//! symbol table, so no function is forgotten.

mod common;

use common::{FakeDaemon, Program, include, library};
use std::fmt::Write as _;
use std::process::Command;

/// Calls that may wait forever as documented.
const WAITING_FUNCTIONS: [&str; 5] = [
    "pvm_recv",
    "pvm_trecv",
    "pvm_precv",
    "pvm_recvinfo",
    "pvm_siblings",
];
/// Functions that end the process or wait as documented, and functions with variable arguments.
const SKIPPED_FUNCTIONS: [&str; 4] = ["pvm_packf", "pvm_unpackf", "pvmlogprintf", "vpvmlogprintf"];
/// Meaningless numbers: unknown, negative, huge.
const BAD_NUMBERS: [&str; 6] = ["0", "-1", "-5", "99999", "2147483647", "(-2147483647 - 1)"];
/// Texts: null, empty, unknown, longer than any buffer.
const BAD_TEXTS: [&str; 4] = ["(char *)0", "\"\"", "\"no such thing\"", "longer"];

/// Splits arguments at the commas outside of parentheses.
fn split_arguments(arguments: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in arguments.chars() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().expect("never empty").push(c);
    }
    parts.iter().map(|part| part.trim().to_string()).collect()
}

/// Returns each function of the header: its name, whether it returns an int, and its arguments in
/// C.
fn parse_functions(header: &str) -> Vec<(String, bool, Vec<String>)> {
    let mut found = Vec::new();
    for statement in header.split(';') {
        let flat = statement.split_whitespace().collect::<Vec<_>>().join(" ");
        let Some((before, arguments)) = flat.split_once('(') else {
            continue;
        };
        let Some(name) = before
            .rsplit([' ', '*'])
            .next()
            .filter(|name| name.starts_with("pvm"))
        else {
            continue;
        };
        if arguments.contains('{') || before.contains('#') || before.contains("typedef") {
            continue;
        }
        let arguments = arguments.trim_end().strip_suffix(')').unwrap_or(arguments);
        let list = split_arguments(arguments)
            .into_iter()
            .filter(|a| !a.is_empty() && a != "void")
            .collect();
        found.push((
            name.to_string(),
            before
                .strip_suffix(name)
                .is_some_and(|kind| kind.trim_end().ends_with("int")),
            list,
        ));
    }
    found
}

/// Returns argument lists for calls of a function: every test value appears in every position,
/// combined with other bad values.
fn argument_lists(arguments: &[String]) -> Vec<String> {
    let mut lists = Vec::new();
    let rounds = 2 * BAD_NUMBERS.len();
    for round in 0..rounds {
        let value = |(at, argument): (usize, &String)| {
            let is_text = argument.contains("char *") && !argument.contains("**");
            match () {
                () if is_text => BAD_TEXTS
                    [(round + round / BAD_NUMBERS.len() + at) % BAD_TEXTS.len()]
                .to_string(),
                // Other pointers are null: in C their targets must exist.
                () if argument.contains('*') || argument.contains('[') => "(void *)0".to_string(),
                () => BAD_NUMBERS
                    [(round + at * (1 + round / BAD_NUMBERS.len())) % BAD_NUMBERS.len()]
                .to_string(),
            }
        };
        lists.push(
            arguments
                .iter()
                .enumerate()
                .map(value)
                .collect::<Vec<_>>()
                .join(", "),
        );
    }
    lists.sort();
    lists.dedup();
    lists
}

/// True for functions that write text to a buffer: a constant text must not be passed.
fn writes_text(name: &str) -> bool {
    matches!(
        name,
        "pvm_upkstr" | "pvmtmpnam" | "pvm_gettmask" | "pvm_upkbyte" | "pvm_pkbyte" | "pvm_settmask"
    )
}

fn program_text() -> String {
    let mut calls_text = String::new();
    let mut count = 0;
    let mut call = |name: &str, expression: &str| {
        let waits = i32::from(WAITING_FUNCTIONS.contains(&name));
        let shown = expression.replace('\\', "\\\\").replace('"', "\\\"");
        writeln!(
            calls_text,
            "    if (child(\"{shown}\", {waits})) finish((long)({expression}));"
        )
        .expect("a string");
        count += 1;
    };
    let symbols = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library())
        .output()
        .expect("binutils");
    let symbols = String::from_utf8_lossy(&symbols.stdout).into_owned();
    let exported: Vec<&str> = symbols
        .lines()
        .filter_map(|line| line.split_once(" T "))
        .map(|(_, name)| name)
        .collect();
    let header = std::fs::read_to_string(include().join("pvm3.h")).expect("the header");
    let mut known = Vec::new();
    for (name, is_int, arguments) in parse_functions(&header) {
        if !exported.contains(&name.as_str())
            || SKIPPED_FUNCTIONS.contains(&name.as_str())
            || arguments.iter().any(|a| a.contains("..."))
        {
            continue;
        }
        let arguments: Vec<String> = match writes_text(&name) {
            true => arguments
                .iter()
                .map(|a| {
                    if a.contains("char") {
                        "void *".into()
                    } else {
                        a.clone()
                    }
                })
                .collect(),
            false => arguments,
        };
        for list in argument_lists(&arguments) {
            call(
                &name,
                &if is_int {
                    format!("{name}({list})")
                } else {
                    format!("({name}({list}), 0)")
                },
            );
        }
        known.push(name);
    }
    assert!(known.len() > 90, "{known:?}");
    for name in exported {
        if !known.iter().any(|known| known == name) && !SKIPPED_FUNCTIONS.contains(&name) {
            call(name, &format!("(nothing(\"{name}\"), 0)"));
        }
    }
    assert!(count > 600, "{count} calls");
    format!(
        "#define _GNU_SOURCE\n#include <pvm3.h>\n#include <dlfcn.h>\n#include <fcntl.h>\n#include <signal.h>\n#include <stdio.h>\n\
         #include <stdlib.h>\n#include <string.h>\n#include <sys/wait.h>\n#include <unistd.h>\n\
         static char longer[100000];\nstatic int bad;\n\
         static void nothing(const char *name)\n{{\n    long (*f)() = (long (*)())dlsym(RTLD_DEFAULT, name);\n\
             if (!f) _exit(3);\n    f(0L, 0L, 0L, 0L, 0L, 0L);\n}}\n\
         static int child(const char *what, int waits)\n{{\n    int status;\n    pid_t pid = fork();\n\n\
             if (pid == 0) {{\n        int null = open(\"/dev/null\", O_WRONLY);\n        dup2(null, 1);\n        dup2(null, 2);\n\
                 alarm(waits ? 1 : 20);\n        pvm_setopt(PvmAutoErr, 0);\n        return 1;\n    }}\n\
             waitpid(pid, &status, 0);\n\
             if (WIFSIGNALED(status) && !(waits && WTERMSIG(status) == SIGALRM))\n\
                 printf(\"%s: signal %d\\n\", what, WTERMSIG(status)), bad++;\n\
             else if (WIFEXITED(status) && WEXITSTATUS(status))\n\
                 printf(\"%s: a number that is not documented, or the process ended (%d)\\n\", what, WEXITSTATUS(status)), bad++;\n\
             return 0;\n}}\n\
         static void finish(long answer)\n{{\n    _exit(answer < -36 && answer >= -100000);\n}}\n\
         int main(void)\n{{\n    memset(longer, 'x', sizeof longer - 1);\n    setvbuf(stdout, 0, _IONBF, 0);\n{calls_text}    return bad != 0;\n}}\n"
    )
}

/// No function crashes on meaningless arguments or returns an undocumented number.
#[test]
#[ignore = "system tier: needs gcc"]
fn no_function_breaks_on_bad_arguments() {
    let (daemon, nowhere) = (
        FakeDaemon::start(),
        tempfile::tempdir().expect("a directory"),
    );
    let bad = Program::of_text("bad", &program_text(), &["-w"]);
    for (what, tmp) in [
        ("with a daemon", daemon.tmp()),
        ("without a daemon", nowhere.path()),
    ] {
        let mut command = bad.command(tmp);
        // No call may start a daemon: its program does not exist.
        command
            .env("PVM_DPATH", "/nonexistent/pvmd")
            .current_dir(nowhere.path());
        let done = command.output().expect("runs");
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(done.status.success(), "{what}:\n{said}");
    }
}
