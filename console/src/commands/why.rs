//! `why`: shows the decisions of the resource manager about a task, a job or a host.

use super::job::task_json;
use crate::arguments::{parse_tid, unknown_option_error};
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::repeats::{RepeatCounter, RepeatableLine};
use crate::output::time::{format_local, format_utc};
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::rm::{Decision, DecisionKind, HostState, RmQuery, RmReply, TaskUsage};
use serde_json::{Value, json};

/// Maximum number of decisions that are shown without `-a`. If there are more decisions, only the
/// newest decisions are shown.
const DECISIONS_SHOWN_MAX: usize = 20;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "why",
    summary: "Explain why a task is where it is, or why a host is not used",
    detail: "Syntax:  why [ -a ] tid | host\n\
             Shows the newest decisions of the resource manager about it, with reasons. For the first task of a job\n\
             they include all its tasks; for a host, its present state is added.\n\
             Options:  -a   all decisions\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    completion: Completion::WordDependent(|_, word| {
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
    let (all_options, subject_words): (Vec<&String>, Vec<&String>) =
        args.iter().partition(|arg| *arg == "-a");
    let [subject] = subject_words[..] else {
        return Err(ParseError::WrongArgs("why"));
    };
    if subject.starts_with('-') {
        return Err(unknown_option_error(subject));
    }
    // Host names such as `beef` consist of hexadecimal digits. Therefore only a word that begins
    // with `t` or with a digit can be a tid.
    let is_tid = subject.starts_with('t') || subject.starts_with(|c: char| c.is_ascii_digit());
    let tid = parse_tid(subject).filter(|tid| is_tid && tid.is_task());
    let query = tid.map_or_else(
        || RmQuery::HostDecisions(subject.clone()),
        RmQuery::TaskDecisions,
    );
    Ok(WhyCommand {
        subject: subject.clone(),
        query,
        show_all: !all_options.is_empty(),
    })
}

impl VmCommand for WhyCommand {
    /// Queries the resource manager and formats its reply.
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let RmReply::Decisions {
            task,
            decisions,
            host_state: current_state,
        } = session.vm.ask_rm(&self.query)?
        else {
            return Ok(Outcome::from_error(format!(
                "why: the resource manager knows nothing of {}: it is neither a host nor a task or job that it has seen",
                self.subject
            )));
        };
        let lines = decision_lines(&decisions);
        let hidden_count = if self.show_all {
            0
        } else {
            lines.len().saturating_sub(DECISIONS_SHOWN_MAX)
        };
        let current_state =
            current_state.map(|current_state| host_state_text(&self.subject, &current_state));
        let text = decisions_text(
            &self.subject,
            task.as_ref(),
            &decisions,
            &lines[hidden_count..],
            hidden_count,
            current_state.as_deref(),
        );
        Ok(Outcome::with_json(
            text,
            decisions_json(
                &self.subject,
                task.as_ref(),
                &decisions,
                current_state.as_deref(),
            ),
            false,
        ))
    }
}

/// Returns one line for each decision, with the number of repetitions in place of repeated lines.
fn decision_lines(decisions: &[Decision]) -> Vec<String> {
    let (mut repeats, mut lines) = (RepeatCounter::default(), Vec::new());
    for decision in decisions {
        let line = RepeatableLine {
            content: decision.kind.to_string(),
            at: decision.at,
            time: format_local(decision.at),
        };
        let text = format!("{} {}", line.time, line.content);
        if repeats.take(line, &mut lines) {
            lines.push(text);
        }
    }
    lines.extend(repeats.finish());
    lines
}

fn decisions_text(
    subject: &str,
    task: Option<&TaskUsage>,
    decisions: &[Decision],
    shown_lines: &[String],
    hidden_count: usize,
    current_state: Option<&str>,
) -> String {
    let mut lines: Vec<String> = task.map(task_line).into_iter().collect();
    if hidden_count > 0 {
        lines.push(format!("({hidden_count} earlier ones: 'why -a {subject}')"));
    }
    lines.extend_from_slice(shown_lines);
    let last_line = task
        .and_then(|task| placement_note(task, decisions))
        .or(current_state);
    lines.extend(last_line.map(String::from));
    lines.join("\n") + "\n"
}

/// Returns a line such as "t80003: worker, job t40002, user 1000, on h3, began …".
fn task_line(task: &TaskUsage) -> String {
    let program = if task.program.is_empty() {
        "from a command line"
    } else {
        &task.program
    };
    let start_time = format_local(task.started_at);
    let description = format!(
        "{}: {program}, job {}, user {}, on {}, began {start_time}",
        task.tid, task.job, task.user, task.host
    );
    match task.end {
        None => description,
        Some((at, outcome)) => format!("{description}, ended {}: {outcome}", format_local(at)),
    }
}

/// Returns a note if the decisions do not include the placement of the task.
fn placement_note(task: &TaskUsage, decisions: &[Decision]) -> Option<&'static str> {
    let contains_task =
        |tasks: &[(sempa_proto::Tid, String)]| tasks.iter().any(|(tid, _)| *tid == task.tid);
    let is_placement = |d: &Decision| match &d.kind {
        DecisionKind::Spawn { started: tasks, .. } | DecisionKind::Restarted { tasks, .. } => {
            contains_task(tasks)
        }
        _ => false,
    };
    let line = "it was not placed by the resource manager: it was started from a command line, by a daemon, or while none ran";
    (!decisions.iter().any(is_placement)).then_some(line)
}

/// Describes whether tasks are placed on a host at present, and for which reasons not.
fn host_state_text(subject: &str, state: &HostState) -> String {
    match state {
        HostState::Gone => {
            format!("now: nothing is placed on {subject}: it is not part of the virtual machine")
        }
        HostState::Excluded {
            why: reasons,
            drain_requested_by: drain_text,
        } => {
            let drain_text = drain_text.map(|requester| {
                format!("it is drained at the request of {requester}; 'undrain' ends that")
            });
            let reasons: Vec<String> = reasons
                .iter()
                .map(ToString::to_string)
                .chain(drain_text)
                .collect();
            format!(
                "now: nothing is placed on {subject}: {}",
                reasons.join("; ")
            )
        }
        HostState::Used(caveats) if caveats.is_empty() => {
            format!("now: {subject} is used like any other host")
        }
        HostState::Used(caveats) => format!("now: {subject} is used, but {}", caveats.join("; ")),
    }
}

fn decisions_json(
    subject: &str,
    task: Option<&TaskUsage>,
    decisions: &[Decision],
    current_state: Option<&str>,
) -> Value {
    let decision = |d: &Decision| {
        json!({
            "number": d.number,
            "at_us": d.at.0,
            "time": format_utc(d.at),
            "text": d.kind.to_string(),
            "decided": d.kind,
        })
    };
    json!({
        "subject": subject,
        "task": task.map(task_json),
        "decisions": decisions.iter().map(decision).collect::<Vec<_>>(),
        "now": current_state,
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

    /// Decisions that repeat become one line with their number.
    #[test]
    fn repeated_decisions_are_counted() {
        let decision = |number: u64, host: &str| Decision {
            number,
            at: Micros(number),
            kind: DecisionKind::OwnerReturned {
                host: host.into(),
                why: "olga on pts/1".into(),
            },
        };
        let decisions = [
            decision(1, "h2"),
            decision(2, "h2"),
            decision(3, "h2"),
            decision(4, "h3"),
        ];
        let lines = decision_lines(&decisions);
        assert_eq!(lines.len(), 3, "{lines:?}");
        let count = format!(" (2 more times since {})", format_local(Micros(1)));
        assert!(lines[2].ends_with(&count), "{lines:?}");
    }

    /// The text about a host ends with its present state, whatever was decided before.
    #[test]
    fn host_text_ends_with_present_state() {
        let owner_decision = DecisionKind::OwnerReturned {
            host: "h2".into(),
            why: "olga on pts/1".into(),
        };
        let owner_decision = Decision {
            number: 1,
            at: Micros(0),
            kind: owner_decision,
        };
        let last_line = |host_state: &HostState| {
            let text = decisions_text(
                "h2",
                None,
                std::slice::from_ref(&owner_decision),
                &decision_lines(std::slice::from_ref(&owner_decision)),
                0,
                Some(&host_state_text("h2", host_state)),
            );
            text.lines().last().map(String::from).expect("a line")
        };
        let requester = Tid::from_raw(0x40001);
        let owner = Some(RejectionReason::Owner {
            why: "olga on pts/1".into(),
        });
        let closed_reason = Some(RejectionReason::Other {
            why: "no guests now (the owner wants no guests always)".into(),
        });
        let unused_state = |why: &Option<RejectionReason>, drained| {
            last_line(&HostState::Excluded {
                why: why.clone(),
                drain_requested_by: drained,
            })
        };
        let line_start = "now: nothing is placed on h2: ";
        let drained = "it is drained at the request of t40001; 'undrain' ends that";
        let owner_reason = "its owner is present (olga on pts/1)";
        assert_eq!(
            unused_state(&owner, None),
            format!("{line_start}{owner_reason}")
        );
        assert_eq!(
            unused_state(&closed_reason, None),
            format!("{line_start}no guests now (the owner wants no guests always)")
        );
        assert_eq!(
            unused_state(&None, Some(requester)),
            format!("{line_start}{drained}")
        );
        assert_eq!(
            unused_state(&owner, Some(requester)),
            format!("{line_start}{owner_reason}; {drained}")
        );
        assert_eq!(
            last_line(&HostState::Gone),
            format!("{line_start}it is not part of the virtual machine")
        );
        assert_eq!(
            last_line(&HostState::Used(Vec::new())),
            "now: h2 is used like any other host"
        );
        let used_state = HostState::Used(vec!["its load is not known (no sample)".into()]);
        assert_eq!(
            last_line(&used_state),
            "now: h2 is used, but its load is not known (no sample)"
        );
    }
}
