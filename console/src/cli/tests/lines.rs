//! Tests of lines: words, aliases, and commands that show text and JSON.

use super::*;
use crate::commands::has_json;
use crate::outcome::AfterCommand;

#[test]
fn empty_lines_and_errors_do_nothing() {
    let mut session = session();
    assert_eq!(run_line(&mut session, ""), Outcome::default());
    assert_eq!(run_line(&mut session, "  # all of it"), Outcome::default());
    for (line, refusal) in [
        ("foo", "foo: not found"),
        ("kill", "kill: wrong #args"),
        ("echo \"x", "unmatched \""),
        ("help foo", "foo: not found"),
        ("ps -nnohost", "unknown host nohost"),
        ("setopt foo 1", "PVM Option \"foo\" Unknown."),
    ] {
        let outcome = run_line(&mut session, line);
        assert_eq!(outcome.refusal.as_deref(), Some(refusal), "{line}");
        assert!(outcome.failed && outcome.text.is_empty(), "{line}");
    }
}

/// Aliases add words, and a loop of aliases is refused.
#[test]
fn alias_loop_is_refused() {
    let mut session = session();
    run_successfully(&mut session, "alias x echo 1 2");
    assert_eq!(run_successfully(&mut session, "x 3"), "1 2 3\n");
    assert_eq!(run_successfully(&mut session, "alias"), "x\techo 1 2\n");
    run_successfully(&mut session, "alias a b");
    run_successfully(&mut session, "alias b a");
    assert_eq!(
        run_line(&mut session, "a").refusal.as_deref(),
        Some("alias loop")
    );
    run_successfully(&mut session, "alias ps ps -a");
    assert_eq!(
        run_successfully(&mut session, "ps").lines().count(),
        3,
        "an alias may widen the command whose name it has"
    );
    run_successfully(&mut session, "unalias x a b ps unknown");
    assert_eq!(run_successfully(&mut session, "alias"), "");
}

/// `names`, `getopt`, `id`, `version`, `reset`, `put`, `jobs`, `quit` and `halt` print what PVM's
/// console prints.
#[test]
fn simple_commands_answer_as_in_pvm() {
    let mut session = session();
    assert_eq!(
        run_successfully(&mut session, "names"),
        "<svc>:\n\tindex=0 owner=0x40001/262145 flags=0x0\n\n"
    );
    assert_eq!(
        run_successfully(&mut session, "getopt PvmRoute"),
        "PvmRoute Currently Set to 1\n"
    );
    assert_eq!(run_successfully(&mut session, "id"), "t40001\n");
    assert_eq!(
        run_successfully(&mut session, "version"),
        concat!("3.4.6\nSempa ", env!("CARGO_PKG_VERSION"), "\n")
    );
    assert_eq!(run_successfully(&mut session, "reset"), "");
    assert_eq!(run_successfully(&mut session, "put svc 1"), "");
    assert_eq!(
        run_successfully(&mut session, "jobs -l"),
        "                    HOST      TID   FLAG 0x COMMAND\n"
    );
    assert_eq!(
        run_line(&mut session, "quit").after_command,
        AfterCommand::Quit
    );
    assert_eq!(
        run_line(&mut session, "halt").after_command,
        AfterCommand::Halt
    );
}

#[test]
fn printing_commands_have_json() {
    let mut session = session();
    run_successfully(&mut session, "alias x echo 1");
    for line in [
        "add ha9",
        "alias",
        "conf",
        "delete ha2",
        "events",
        "export",
        "getopt",
        "id",
        "jobs",
        "kill t40002",
        "migrate t40002 ha2",
        "mstat ha2",
        "names",
        "ps",
        "pstat t40002",
        "setenv",
        "setopt PvmRoute 2",
        "sig 1 t40002",
        "spawn hello",
        "tickle 5",
        "trace",
        "version",
    ] {
        let outcome = run_line(&mut session, line);
        assert!(
            !outcome.json_values.is_empty() && !outcome.prints_json,
            "{line}"
        );
        let name = line.split(' ').next().expect("a word");
        let json_outcome = run_line(
            &mut session,
            &line.replacen(name, &format!("{name} --json"), 1),
        );
        assert!(
            json_outcome.prints_json && json_outcome.json_values.len() == outcome.json_values.len(),
            "{line}"
        );
    }
    for name in [
        "echo", "halt", "help", "idump", "put", "quit", "reset", "start", "unalias", "unexport",
    ] {
        assert!(!has_json(name), "{name}");
    }
}
