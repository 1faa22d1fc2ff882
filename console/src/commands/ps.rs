//! `ps`: lists the tasks of hosts.

use crate::arguments::parse_any_tid;
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::tables::{ps_header, ps_row};
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::Tid;
use sempa_proto::table::{HostTable, TaskInfo};
use serde_json::{Value, json};

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "ps",
    summary: "List tasks",
    detail: "Syntax:  ps [ -a ] [ -l ] [ -x ] [ -htid ] [ -nhost ]\n\
                 Options:  -a       on all hosts (default: on this one)\n          \
                 -htid    on the host with this tid, or this one task\n          \
                 -nhost   on the host with this name\n          \
                 -l       with parent and process id\n          \
                 -x       with the console itself\n\
                 Output fields:\n  HOST    where it runs now\n  TID     task id\n  PTID    parent\n  \
                 PID     process id on its host\n  FLAG    state\n  COMMAND program, or - when started by hand\n\
                 FLAG values:\n  f   started by the virtual machine\n  c   connected to its daemon\n  \
                 a   waiting for authorization\n  o   connection is being closed\n  s   deadlocked\n  \
                 H   hoster\n  R   resource manager\n  T   tasker\n\
                 A task that has ended is listed while processes are left that it has started.\n\
                 They stay guests of their host; 'kill' with the task's tid ends them.\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    completion: Completion::WordDependent(|_, word| match word.get(..2) {
        Some("-n") => (2, WordKind::Host),
        Some("-h") => (2, WordKind::Tid),
        _ => (0, WordKind::Unknown),
    }),
    ..CommandSpec::DEFAULT
};

/// Selection of the tasks and columns that a `ps` command shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct PsCommand {
    scope: PsScope,
    /// True to show also the parent and the process id.
    is_long: bool,
    /// True to show also the console itself and tasks without flags.
    all_tasks: bool,
}

/// The hosts, or the task, that `ps` shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum PsScope {
    /// The console's own host.
    #[default]
    LocalHost,
    AllHosts,
    /// The host with this tid, or the task with this tid.
    Tid(Tid),
    /// The host with this name.
    Host(String),
}

fn parse(args: &[String]) -> Result<PsCommand, ParseError> {
    let mut options = PsCommand::default();
    for arg in args {
        let Some(letters) = arg.strip_prefix('-') else {
            return Err(ParseError::WrongArgs("ps"));
        };
        for (letter_index, letter) in letters.char_indices() {
            let rest = &letters[letter_index + letter.len_utf8()..];
            match letter {
                'a' => options.scope = PsScope::AllHosts,
                'l' => options.is_long = true,
                'x' => options.all_tasks = true,
                'h' if rest.is_empty() => return Err(ParseError::WrongArgs("ps")),
                'h' => {
                    options.scope = PsScope::Tid(parse_any_tid("ps", rest)?);
                    break;
                }
                'n' => {
                    options.scope = PsScope::Host(rest.to_string());
                    break;
                }
                other => return Err(ParseError::UnknownFlag(other.to_string())),
            }
        }
    }
    Ok(options)
}

impl VmCommand for PsCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let table = session.vm.hosts()?;
        let selector = match &self.scope {
            PsScope::LocalHost => session.vm.local_host().tid(),
            PsScope::AllHosts => Tid::NONE,
            PsScope::Tid(tid) => *tid,
            PsScope::Host(name) if name == "." => session.vm.local_host().tid(),
            PsScope::Host(name) => match table.find_by_name(name) {
                Some(host) => host.id.tid(),
                None => return Ok(Outcome::from_refusal(format!("unknown host {name}"))),
            },
        };
        let console = session.vm.tid();
        let mut tasks = session.vm.tasks_and_leftovers(selector)?;
        // If no task is found and the birth host in the tid has left the virtual machine, an error
        // explains the empty table. A task may still run on another host after its birth host has
        // left.
        if tasks.is_empty()
            && selector
                .birth_host()
                .is_some_and(|home| table.get(home).is_none())
        {
            return Ok(Outcome::from_error(format!(
                "ps: {selector} is on no host of the virtual machine; 'conf' lists them"
            )));
        }
        tasks.retain(|task| self.all_tasks || (task.tid != console && task.flags != 0));
        tasks.sort_by_key(|task| (task.host, task.tid));
        Ok(Outcome::with_json(
            tasks_text(&table, &tasks, console, self.is_long),
            tasks_json(&table, &tasks),
            false,
        ))
    }
}

/// Formats the output of `ps` for tasks sorted by host and tid.
fn tasks_text(table: &HostTable, tasks: &[TaskInfo], console: Tid, is_long: bool) -> String {
    let mut out = ps_header(is_long);
    tasks
        .iter()
        .for_each(|task| out.push_str(&ps_row(table, task, console, is_long)));
    out
}

fn tasks_json(table: &HostTable, tasks: &[TaskInfo]) -> Value {
    let task = |task: &TaskInfo| {
        json!({
            "tid": task.tid.to_string(),
            "parent": task.parent.is_task().then(|| task.parent.to_string()),
            "host": table.get(task.host).map(|host| host.name.clone()),
            "host_index": task.host.index(),
            "flags": task.flags,
            "name": task.name,
            "pid": task.namespace_pid,
            "host_pid": task.pid,
            "uid": task.uid,
            "moving": task.migrating,
            "stopped": task.paused,
            "suspended": task.suspended,
            "stopping": task.stopping,
            "left_processes": task.leftover_processes,
        })
    };
    json!({ "tasks": tasks.iter().map(task).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{table, task};

    #[test]
    fn ps_options_combine() {
        let parse_line = |line: &str| {
            let words: Vec<String> = line.split(' ').skip(1).map(String::from).collect();
            parse(&words)
        };
        let parse_valid = |line: &str| parse_line(line).expect(line);
        assert_eq!(parse_valid("ps"), PsCommand::default());
        let long_command = PsCommand {
            scope: PsScope::AllHosts,
            is_long: true,
            all_tasks: true,
        };
        assert_eq!(parse_valid("ps -alx"), long_command);
        assert_eq!(parse_valid("ps -a -l -x"), long_command);
        assert_eq!(parse_valid("ps -lnh2").scope, PsScope::Host("h2".into()));
        assert_eq!(
            parse_valid("ps -ht80000").scope,
            PsScope::Tid(Tid::from_raw(0x80000))
        );
        assert_eq!(
            parse_line("ps -hzz").expect_err("no tid").to_string(),
            "ps: zz is not a task id: write it as t40001"
        );
    }

    #[test]
    fn ps_layout_matches_pvm() {
        let console = Tid::from_raw(0x40001);
        let tasks = [
            task(0x40001, 0, 11690, 4, ""),
            task(0x40004, -35, 16853, 6, "/opt/t/sleeper"),
            task(0xc0003, 0x40004, 16854, 0x104, "rm"),
        ];
        let expected = "                    HOST      TID   FLAG 0x COMMAND
                     ha1   (cons)       4/c -           
                     ha1    40004     6/c,f /opt/t/sleeper
                     ha3    c0003   104/c,R rm          
";
        assert_eq!(tasks_text(&table(), &tasks, console, false), expected);
        let expected = "                    HOST      TID     PTID    PID   FLAG 0x COMMAND
                     ha1   (cons)        -  11690       4/c -           
                     ha1    40004 ffffffdd  16853     6/c,f /opt/t/sleeper
                     ha3    c0003    40004  16854   104/c,R rm          
";
        assert_eq!(tasks_text(&table(), &tasks, console, true), expected);
    }

    /// The long table has both process ids of a task in a PID namespace, and the states.
    #[test]
    fn long_table_has_pid_on_the_host() {
        let mut tasks = [task(0x40004, 0x40001, 3_211_264, 6, "worker")];
        tasks[0].pid = 4711;
        let text = |tasks: &[TaskInfo], is_long| {
            tasks_text(&table(), tasks, Tid::from_raw(0x40001), is_long)
        };
        assert!(
            text(&tasks, true)
                .ends_with(" 3211264     6/c,f worker       (on the host: process 4711)\n")
        );
        assert!(text(&tasks, false).ends_with("6/c,f worker      \n"));
        (tasks[0].paused, tasks[0].suspended) = (true, true);
        assert!(text(&tasks, true).ends_with("(stopped, suspended, on the host: process 4711)\n"));
        assert!(text(&tasks, false).ends_with("(stopped, suspended)\n"));
        let task = &tasks_json(&table(), &tasks)["tasks"][0];
        assert_eq!(
            (&task["pid"], &task["host_pid"]),
            (&json!(3_211_264), &json!(4711))
        );
    }

    /// An ended task is listed with the number of processes that it has left behind.
    #[test]
    fn row_of_ended_task_counts_left_processes() {
        let mut left = task(0x40004, 0, 16853, 2, "sleeper");
        (left.leftover_processes, left.paused) = (2, true);
        let text = tasks_text(&table(), &[left.clone()], Tid::NONE, false);
        assert!(
            text.ends_with("sleeper      (ended, left 2 processes, stopped)\n"),
            "{text}"
        );
        assert_eq!(
            tasks_json(&table(), &[left])["tasks"][0]["left_processes"],
            2
        );
    }

    #[test]
    fn tasks_become_json() {
        let tasks_value = tasks_json(
            &table(),
            &[
                task(0x40004, -35, 9, 6, "x"),
                task(0x80001, 0x40004, 9, 6, "y"),
            ],
        );
        assert_eq!(
            tasks_value["tasks"][0]["parent"],
            Value::Null,
            "a parent that asked not to be known is none"
        );
        assert_eq!(tasks_value["tasks"][1]["parent"], "t40004");
        assert_eq!(tasks_value["tasks"][1]["host"], "ha2");
    }
}
