//! Calls every function with bad arguments. Each call runs in its own process. The call must return
//! a documented number and must never end the process by a signal. The calls are generated from the
//! header and the symbol table, so no function is forgotten.

mod common;

use common::{FakeDaemon, Program, built_library, include_dir};
use std::fmt::Write as _;
use std::process::Command;

/// Functions that may wait forever, as the documentation states.
const WAITING_FUNCTIONS: [&str; 5] = [
    "pvm_recv",
    "pvm_trecv",
    "pvm_precv",
    "pvm_recvinfo",
    "pvm_siblings",
];
/// Functions that the test does not call, because they have variable arguments.
const SKIPPED_FUNCTIONS: [&str; 4] = ["pvm_packf", "pvm_unpackf", "pvmlogprintf", "vpvmlogprintf"];
/// Invalid numbers: unknown, negative, huge.
const BAD_NUMBERS: [&str; 6] = ["0", "-1", "-5", "99999", "2147483647", "(-2147483647 - 1)"];
/// Invalid texts: null, empty, unknown, longer than any buffer.
const BAD_TEXTS: [&str; 4] = ["(char *)0", "\"\"", "\"no such thing\"", "longer"];

/// Splits arguments at the commas outside of parentheses.
fn split_arguments(arguments: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for character in arguments.chars() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().expect("never empty").push(character);
    }
    parts.iter().map(|part| part.trim().to_string()).collect()
}

/// Returns the functions of the header. Each tuple contains the function's name, whether the
/// function returns an int, and the arguments in C.
fn parse_functions(header: &str) -> Vec<(String, bool, Vec<String>)> {
    let mut functions = Vec::new();
    for statement in header.split(';') {
        let declaration = statement.split_whitespace().collect::<Vec<_>>().join(" ");
        let Some((type_and_name, arguments)) = declaration.split_once('(') else {
            continue;
        };
        let Some(name) = type_and_name
            .rsplit([' ', '*'])
            .next()
            .filter(|name| name.starts_with("pvm"))
        else {
            continue;
        };
        if arguments.contains('{')
            || type_and_name.contains('#')
            || type_and_name.contains("typedef")
        {
            continue;
        }
        let arguments = arguments.trim_end().strip_suffix(')').unwrap_or(arguments);
        let argument_list = split_arguments(arguments)
            .into_iter()
            .filter(|a| !a.is_empty() && a != "void")
            .collect();
        functions.push((
            name.to_string(),
            type_and_name
                .strip_suffix(name)
                .is_some_and(|kind| kind.trim_end().ends_with("int")),
            argument_list,
        ));
    }
    functions
}

/// Returns argument lists for calls of a function: every test value appears in every position,
/// combined with other bad values.
fn argument_lists(arguments: &[String]) -> Vec<String> {
    let mut lists = Vec::new();
    let round_count = 2 * BAD_NUMBERS.len();
    for round in 0..round_count {
        let test_value = |(position, argument): (usize, &String)| {
            let is_text = argument.contains("char *") && !argument.contains("**");
            match () {
                () if is_text => BAD_TEXTS
                    [(round + round / BAD_NUMBERS.len() + position) % BAD_TEXTS.len()]
                .to_string(),
                // Other pointers are null: a pointer with another value must have a valid target in
                // C.
                () if argument.contains('*') || argument.contains('[') => "(void *)0".to_string(),
                () => BAD_NUMBERS
                    [(round + position * (1 + round / BAD_NUMBERS.len())) % BAD_NUMBERS.len()]
                .to_string(),
            }
        };
        lists.push(
            arguments
                .iter()
                .enumerate()
                .map(test_value)
                .collect::<Vec<_>>()
                .join(", "),
        );
    }
    lists.sort();
    lists.dedup();
    lists
}

/// True for functions that write to a text argument. The test must not pass a constant text to such
/// a function.
fn writes_text_argument(name: &str) -> bool {
    matches!(
        name,
        "pvm_upkstr" | "pvmtmpnam" | "pvm_gettmask" | "pvm_upkbyte" | "pvm_pkbyte" | "pvm_settmask"
    )
}

fn generate_program() -> String {
    let mut calls_text = String::new();
    let mut call_count = 0;
    let mut add_call = |name: &str, expression: &str| {
        let may_wait = i32::from(WAITING_FUNCTIONS.contains(&name));
        let quoted_expression = expression.replace('\\', "\\\\").replace('"', "\\\"");
        writeln!(
            calls_text,
            "    if (child(\"{quoted_expression}\", {may_wait})) finish((long)({expression}));"
        )
        .expect("a string");
        call_count += 1;
    };
    let symbols = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(built_library())
        .output()
        .expect("binutils");
    let symbols = String::from_utf8_lossy(&symbols.stdout).into_owned();
    let exported_functions: Vec<&str> = symbols
        .lines()
        .filter_map(|line| line.split_once(" T "))
        .map(|(_, name)| name)
        .collect();
    let header = std::fs::read_to_string(include_dir().join("pvm3.h")).expect("the header");
    let mut header_functions = Vec::new();
    for (name, is_int, arguments) in parse_functions(&header) {
        if !exported_functions.contains(&name.as_str())
            || SKIPPED_FUNCTIONS.contains(&name.as_str())
            || arguments.iter().any(|a| a.contains("..."))
        {
            continue;
        }
        let arguments: Vec<String> = match writes_text_argument(&name) {
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
        for argument_list in argument_lists(&arguments) {
            add_call(
                &name,
                &if is_int {
                    format!("{name}({argument_list})")
                } else {
                    format!("({name}({argument_list}), 0)")
                },
            );
        }
        header_functions.push(name);
    }
    assert!(header_functions.len() > 90, "{header_functions:?}");
    for name in exported_functions {
        if !header_functions
            .iter()
            .any(|header_functions| header_functions == name)
            && !SKIPPED_FUNCTIONS.contains(&name)
        {
            add_call(name, &format!("(nothing(\"{name}\"), 0)"));
        }
    }
    assert!(call_count > 600, "{call_count} calls");
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

/// On invalid arguments no function crashes or returns an undocumented number.
#[test]
#[ignore = "system tier: needs gcc"]
fn no_function_breaks_on_bad_arguments() {
    let (daemon, empty_dir) = (
        FakeDaemon::start(),
        tempfile::tempdir().expect("a directory"),
    );
    let program = Program::compile_text("bad", &generate_program(), &["-w"]);
    for (case, tmp) in [
        ("with a daemon", daemon.tmp()),
        ("without a daemon", empty_dir.path()),
    ] {
        let mut command = program.command(tmp);
        // No call may start a daemon, so the path of the daemon's program does not exist.
        command
            .env("PVM_DPATH", "/nonexistent/pvmd")
            .current_dir(empty_dir.path());
        let output = command.output().expect("runs");
        let stdout_text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{case}:\n{stdout_text}");
    }
}
