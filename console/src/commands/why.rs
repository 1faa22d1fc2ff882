//! `why`: shows the decisions of the resource manager about a task, a job or a host.

use super::job::task_value;
use crate::arguments::{parse_tid, unknown_option};
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::time::time;
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::rm::{Decision, DecisionKind, HostState, RmQuery, RmReply, TaskUsage};
use serde_json::{Value, json};

/// Number of decisions that are shown without `-a`, the newest ones.
const DECISIONS_SHOWN_MAX: usize = 20;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "why",
    summary: "Explain why a task is where it is, or why a host is not used",
    detail: "Syntax:  why [ -a ] tid | host\n\
             Shows the newest decisions of the resource manager about it, with reasons. For the first task of a job\n\
             they include all its tasks; for a host, its present state is added.\n\
             Options:  -a   all decisions\n",
    parse: |args| parse(args).map(ParsedCommand::on_vm),
    completion: Completion::ByWords(|_, word| {
        let kind = if word.starts_with('t') {
            WordKind::Tid
        } else {
            WordKind::Host
        };
        (0, kind)
    }),
    ..CommandSpec::DEFAULT
};

/// A parsed `why` command.
#[derive(Clone, Debug, PartialEq, Eq)]
struct WhyCommand {
    /// The task or host as it was typed.
    subject: String,
    query: RmQuery,
    show_all: bool,
}

/// Parses the words: a task or job such as `t40001`, or a host.
fn parse(args: &[String]) -> Result<WhyCommand, ParseError> {
    let (all, rest): (Vec<&String>, Vec<&String>) = args.iter().partition(|arg| *arg == "-a");
    let [subject] = rest[..] else {
        return Err(ParseError::WrongArgs("why"));
    };
    if subject.starts_with('-') {
        return Err(unknown_option(subject));
    }
    // A host name may consist of hexadecimal digits, but never begins with `t` and a digit or with
    // a digit.
    let is_tid = subject.starts_with('t') || subject.starts_with(|c: char| c.is_ascii_digit());
    let tid = parse_tid(subject).filter(|tid| is_tid && tid.is_task());
    let query = tid.map_or_else(
        || RmQuery::HostDecisions(subject.clone()),
        RmQuery::TaskDecisions,
    );
    Ok(WhyCommand {
        subject: subject.clone(),
        query,
        show_all: !all.is_empty(),
    })
}

impl VmCommand for WhyCommand {
    /// Queries the resource manager and formats its reply.
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let RmReply::Decisions {
            task,
            decisions,
            host_state: now,
        } = session.vm.ask_rm(&self.query)?
        else {
            return Ok(Outcome::error(format!(
                "why: the resource manager knows nothing of {}: it is neither a host nor a task or job that it has seen",
                self.subject
            )));
        };
        let hidden = if self.show_all {
            0
        } else {
            decisions.len().saturating_sub(DECISIONS_SHOWN_MAX)
        };
        let now = now.map(|now| host_state(&self.subject, &now));
        let text = text(
            &self.subject,
            task.as_ref(),
            &decisions,
            hidden,
            now.as_deref(),
        );
        Ok(Outcome::with_values(
            text,
            value(&self.subject, task.as_ref(), &decisions, now.as_deref()),
            false,
        ))
    }
}

fn text(
    subject: &str,
    task: Option<&TaskUsage>,
    decisions: &[Decision],
    hidden: usize,
    now: Option<&str>,
) -> String {
    let mut lines: Vec<String> = task.map(task_line).into_iter().collect();
    if hidden > 0 {
        lines.push(format!("({hidden} earlier ones: 'why -a {subject}')"));
    }
    let shown = decisions.iter().skip(hidden);
    lines.extend(shown.map(|decision| format!("{} {}", time(decision.at), decision.kind)));
    let end = task
        .and_then(|task| placement_note(task, decisions))
        .or(now);
    lines.extend(end.map(String::from));
    lines.join("\n") + "\n"
}

/// Returns a line such as "t80003: worker, job t40002, user 1000, on h3, began …".
fn task_line(task: &TaskUsage) -> String {
    let program = if task.program.is_empty() {
        "from a command line"
    } else {
        &task.program
    };
    let began = time(task.started);
    let head = format!(
        "{}: {program}, job {}, user {}, on {}, began {began}",
        task.tid, task.job, task.user, task.host
    );
    match task.ended {
        None => head,
        Some((at, how)) => format!("{head}, ended {}: {how}", time(at)),
    }
}

/// Returns a note if the decisions do not include the placement of the task.
fn placement_note(task: &TaskUsage, decisions: &[Decision]) -> Option<&'static str> {
    let has = |tasks: &[(sempa_proto::Tid, String)]| tasks.iter().any(|(tid, _)| *tid == task.tid);
    let placed = |d: &Decision| match &d.kind {
        DecisionKind::Spawn { started: tasks, .. } | DecisionKind::Restarted { tasks, .. } => {
            has(tasks)
        }
        _ => false,
    };
    let line = "it was not placed by the resource manager: it was started from a command line, by a daemon, or while none ran";
    (!decisions.iter().any(placed)).then_some(line)
}

/// Describes whether tasks are placed on a host at present, and why not.
fn host_state(subject: &str, now: &HostState) -> String {
    match now {
        HostState::Gone => {
            format!("now: nothing is placed on {subject}: it is not part of the virtual machine")
        }
        HostState::Excluded {
            why,
            drain_requested_by: drained,
        } => {
            let drained = drained
                .map(|by| format!("it is drained at the request of {by}; 'undrain' ends that"));
            let why: Vec<String> = why.iter().map(ToString::to_string).chain(drained).collect();
            format!("now: nothing is placed on {subject}: {}", why.join("; "))
        }
        HostState::Used(caveats) if caveats.is_empty() => {
            format!("now: {subject} is used like any other host")
        }
        HostState::Used(caveats) => format!("now: {subject} is used, but {}", caveats.join("; ")),
    }
}

fn value(
    subject: &str,
    task: Option<&TaskUsage>,
    decisions: &[Decision],
    now: Option<&str>,
) -> Value {
    let decision = |d: &Decision| {
        json!({
            "number": d.number,
            "at_us": d.at.0,
            "time": time(d.at),
            "text": d.kind.to_string(),
            "decided": d.kind,
        })
    };
    json!({
        "subject": subject,
        "task": task.map(task_value),
        "decisions": decisions.iter().map(decision).collect::<Vec<_>>(),
        "now": now,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;
    use sempa_proto::rm::RejectionReason;
    use sempa_proto::{Micros, Tid};

    fn parse_line(line: &str) -> Result<WhyCommand, ParseError> {
        parse(&words(line))
    }

    /// Words for tasks and names of hosts are distinguished.
    #[test]
    fn tasks_are_distinguished_from_hosts() {
        let query = |line: &str| parse_line(line).expect(line).query;
        assert_eq!(
            query("t40001"),
            RmQuery::TaskDecisions(Tid::from_raw(0x40001))
        );
        assert_eq!(
            query("40001"),
            RmQuery::TaskDecisions(Tid::from_raw(0x40001))
        );
        for host in ["beef", "h2", "t40000", "tea"] {
            assert_eq!(query(host), RmQuery::HostDecisions(host.into()));
        }
        assert!(parse_line("-a h2").expect("good").show_all);
        assert_eq!(parse_line("a b"), Err(ParseError::WrongArgs("why")));
        assert_eq!(parse_line("-x"), Err(ParseError::UnknownFlag("x".into())));
    }

    /// The text about a host ends with its present state, whatever was decided before.
    #[test]
    fn host_text_ends_with_present_state() {
        let came = DecisionKind::OwnerReturned {
            host: "h2".into(),
            why: "olga on pts/1".into(),
        };
        let came = Decision {
            number: 1,
            at: Micros(0),
            kind: came,
        };
        let last = |now: &HostState| {
            let text = text(
                "h2",
                None,
                std::slice::from_ref(&came),
                0,
                Some(&host_state("h2", now)),
            );
            text.lines().last().map(String::from).expect("a line")
        };
        let by = Tid::from_raw(0x40001);
        let owner = Some(RejectionReason::Owner {
            why: "olga on pts/1".into(),
        });
        let closed = Some(RejectionReason::Other {
            why: "no guests now (the owner wants no guests always)".into(),
        });
        let left_out = |why: &Option<RejectionReason>, drained| {
            last(&HostState::Excluded {
                why: why.clone(),
                drain_requested_by: drained,
            })
        };
        let nothing = "now: nothing is placed on h2: ";
        let drained = "it is drained at the request of t40001; 'undrain' ends that";
        let present = "its owner is present (olga on pts/1)";
        assert_eq!(left_out(&owner, None), format!("{nothing}{present}"));
        assert_eq!(
            left_out(&closed, None),
            format!("{nothing}no guests now (the owner wants no guests always)")
        );
        assert_eq!(left_out(&None, Some(by)), format!("{nothing}{drained}"));
        assert_eq!(
            left_out(&owner, Some(by)),
            format!("{nothing}{present}; {drained}")
        );
        assert_eq!(
            last(&HostState::Gone),
            format!("{nothing}it is not part of the virtual machine")
        );
        assert_eq!(
            last(&HostState::Used(Vec::new())),
            "now: h2 is used like any other host"
        );
        let but = HostState::Used(vec!["its load is not known (no sample)".into()]);
        assert_eq!(
            last(&but),
            "now: h2 is used, but its load is not known (no sample)"
        );
    }
}
