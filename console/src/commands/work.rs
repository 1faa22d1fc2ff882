//! `work`: shows and changes the master-worker runs of the virtual machine.

use crate::arguments::unknown_option_error;
use crate::command::{CommandSpec, ParsedCommand, ShellOptions, VmCommand};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::{VirtualMachine, mailbox_classes};
use libpvm::{Error, Vm};
use sempa_proto::{PvmError, Tid};
use sempa_work_dispatch::{MAILBOX_PREFIX, Question};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::thread;
use std::time::Duration;

/// Interval at which `--follow` repeats the output.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(2);

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "work",
    summary: "Show and stop master-worker runs",
    detail: "Syntax:  work list\n         \
             work status RUN [ --follow ]\n         \
             work workers RUN [ --follow ]\n         \
             work quarantine RUN\n         \
             work retry RUN TASK\n         \
             work stop RUN\n\
             'status' shows the progress of a run and its statistics: W duration, T processor time of all tasks,\n\
             N the same weighted with the workers' factors, P pool performance, A average number of workers.\n\
             'quarantine' shows the tasks that are not tried again, because they have killed workers or failed,\n\
             with the history of their attempts; 'retry' lets one of them wait again.\n\
             'stop' ends a run; if the run has a journal, the master can be started again and continues.\n\
             --follow repeats the output every 2 seconds until the run has ended.\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    ..CommandSpec::DEFAULT
};

/// What is asked about a run.
#[derive(Clone, Debug, PartialEq, Eq)]
enum View {
    Status,
    Workers,
    Quarantine,
    Stop,
    Retry(u64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum WorkCommand {
    List,
    Run {
        run: String,
        view: View,
        follow: bool,
    },
}

fn parse(args: &[String]) -> Result<WorkCommand, ParseError> {
    let mut follow = false;
    let mut words = Vec::new();
    for arg in args {
        match arg.as_str() {
            "--follow" => follow = true,
            _ if arg.starts_with('-') => return Err(unknown_option_error(arg)),
            word => words.push(word),
        }
    }
    let (run, view) = match words[..] {
        ["list"] if !follow => return Ok(WorkCommand::List),
        ["status", run] => (run, View::Status),
        ["workers", run] => (run, View::Workers),
        ["quarantine", run] if !follow => (run, View::Quarantine),
        ["stop", run] if !follow => (run, View::Stop),
        ["retry", run, task] if !follow => {
            let wrong_type = || ParseError::WrongType {
                command: "work",
                word: task.to_string(),
                expected: "the number of a task",
            };
            (run, View::Retry(task.parse().map_err(|_| wrong_type())?))
        }
        _ => return Err(ParseError::WrongArgs("work")),
    };
    Ok(WorkCommand::Run {
        run: run.to_string(),
        view,
        follow,
    })
}

/// A run of the virtual machine.
#[derive(Clone, Debug)]
struct Run {
    name: String,
    master: Tid,
}

/// Returns the runs whose masters are registered.
fn find_runs(machine: &dyn VirtualMachine) -> Result<Vec<Run>, Error> {
    let classes = mailbox_classes(machine, &format!("{MAILBOX_PREFIX}*"))?;
    let run = |class: sempa_proto::task::MailboxClass| {
        let name = class.name.strip_prefix(MAILBOX_PREFIX)?.to_string();
        let (_, master, _) = class.entries.first().copied()?;
        Some(Run { name, master })
    };
    Ok(classes.into_iter().filter_map(run).collect())
}

fn find_run(machine: &dyn VirtualMachine, name: &str) -> Result<Run, Error> {
    let runs = find_runs(machine)?;
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let reason = match names[..] {
        [] => format!("there is no run {name}: no master-worker run is going on"),
        _ => format!(
            "there is no run {name}; these are going on: {}",
            names.join(", ")
        ),
    };
    let found = runs.iter().find(|run| run.name == name).cloned();
    found.ok_or_else(|| Error::new(PvmError::NotFound, reason))
}

/// Asks the master of a run and returns its answer.
fn ask(machine: &dyn VirtualMachine, run: &Run, question: &Question) -> Result<Value, Error> {
    let answer = machine.ask_master(run.master, question)?;
    serde_json::from_str(&answer).map_err(|error| {
        let reason = format!(
            "the answer of the master {} is not JSON: {error}",
            run.master
        );
        Error::new(PvmError::BadMsg, reason)
    })
}

impl VmCommand for WorkCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        match self {
            Self::List => list(&session.vm),
            Self::Run { run, view, .. } => {
                let run = find_run(&session.vm, run)?;
                show(&session.vm, &run, view)
            }
        }
    }

    fn run_for_shell(&self, vm: &Vm, options: ShellOptions) -> io::Result<Option<Outcome>> {
        let Self::Run {
            run,
            view,
            follow: true,
        } = self
        else {
            return Ok(None);
        };
        let run = match find_run(vm, run) {
            Ok(run) => run,
            Err(error) => return Ok(Some(Outcome::from_error(format!("work: {error}")))),
        };
        let mut out = io::stdout();
        while let Ok(outcome) = show(vm, &run, view) {
            match options.prints_json {
                true => outcome
                    .json_values
                    .iter()
                    .try_for_each(|v| writeln!(out, "{v}"))?,
                false => write!(out, "{}", outcome.text)?,
            }
            out.flush()?;
            thread::sleep(FOLLOW_INTERVAL);
            let is_going_on = find_runs(vm).is_ok_and(|runs| {
                runs.iter()
                    .any(|other| other.name == run.name && other.master == run.master)
            });
            if !is_going_on {
                break;
            }
        }
        Ok(Some(Outcome::from_text(String::new())))
    }
}

fn list(machine: &dyn VirtualMachine) -> Result<Outcome, Error> {
    let runs = find_runs(machine)?;
    let mut text = String::new();
    let mut values = Vec::new();
    let mut failed = false;
    for run in &runs {
        match ask(machine, run, &Question::Status) {
            Ok(status) => {
                let summary = status["summary"].as_str().unwrap_or("no summary");
                text += &format!("{}: {summary}\n", run.name);
                values.push(json!({
                    "run": run.name,
                    "master": run.master.to_string(),
                    "progress": status["progress"],
                }));
            }
            Err(error) => {
                failed = true;
                text += &format!("{}: {error}\n", run.name);
                values.push(json!({
                    "run": run.name,
                    "master": run.master.to_string(),
                    "error": error.to_string(),
                }));
            }
        }
    }
    if runs.is_empty() {
        text = "no master-worker run is going on\n".to_string();
    }
    Ok(Outcome::with_json(text, json!({ "runs": values }), failed))
}

fn show(machine: &dyn VirtualMachine, run: &Run, view: &View) -> Result<Outcome, Error> {
    let question = match view {
        View::Status => Question::Status,
        View::Workers => Question::Workers,
        View::Quarantine => Question::Quarantine,
        View::Stop => Question::Stop,
        View::Retry(task) => Question::Retry(*task),
    };
    let answer = ask(machine, run, &question)?;
    let text = match view {
        View::Status => status_text(run, &answer),
        View::Workers => workers_text(&answer),
        View::Quarantine => quarantine_text(&answer),
        View::Stop => stop_text(run, &answer),
        View::Retry(task) => retry_text(*task, &answer),
    };
    let failed = matches!(view, View::Retry(_)) && answer["retried"] != true;
    Ok(Outcome::with_json(text, answer, failed))
}

/// Returns a number with two digits behind the point; `-` if the master has none.
fn number(value: &Value) -> String {
    value
        .as_f64()
        .map_or("-".to_string(), |value| format!("{value:.2}"))
}

fn seconds(value: &Value) -> String {
    value
        .as_f64()
        .map_or("-".to_string(), |value| format!("{value:.1} s"))
}

fn status_text(run: &Run, status: &Value) -> String {
    let (statistics, counts) = (&status["statistics"], &status["statistics"]["counts"]);
    let mut text = format!(
        "{}: {}\n",
        run.name,
        status["summary"].as_str().unwrap_or("no summary")
    );
    text += &format!(
        "W {}, T {}, N {}, P {}, A {}, efficiency {}, N/W {}\n",
        seconds(&statistics["wall_s"]),
        seconds(&statistics["cpu_s"]),
        seconds(&statistics["normalized_s"]),
        number(&statistics["pool_performance"]),
        number(&statistics["average_workers"]),
        number(&statistics["efficiency"]),
        number(&statistics["normalized_per_wall"]),
    );
    let rows = [
        ("attempts", "attempts"),
        ("attempts_lost", "lost with their workers"),
        ("attempts_failed", "failed"),
        ("second_copies", "second copies"),
        ("results_discarded", "results discarded"),
        ("tasks_pruned", "tasks pruned"),
        ("workers_lost", "workers lost"),
        ("worker_migrations", "migrations"),
        ("worker_pauses", "pauses"),
    ];
    let counted = rows.iter().filter_map(|(key, label)| {
        let count = counts[key].as_u64().filter(|count| *count > 0)?;
        Some(format!("{count} {label}"))
    });
    text += &format!("{}\n", counted.collect::<Vec<_>>().join(", "));
    if let Some(share) = status["master_busy_share"].as_f64() {
        text += &format!("the master is busy for {:.1} % of its time", share * 100.0);
        if let Some(share) = status["master_callback_share"].as_f64() {
            text += &format!(", {:.1} % in callbacks of the driver", share * 100.0);
        }
        text.push('\n');
    }
    text
}

fn micros(value: &Value) -> String {
    value
        .as_f64()
        .map_or("-".to_string(), |micros| format!("{:.1}", micros / 1e6))
}

fn workers_text(answer: &Value) -> String {
    let workers = answer["workers"].as_array().map_or(&[][..], Vec::as_slice);
    let mut text = format!(
        "{:<9} {:<16} {:>7} {:>8} {:>11} {:>9} {:>10}  STATE\n",
        "WORKER", "HOST", "FACTOR", "TASKS", "AVAILABLE S", "PAUSED S", "WORKING S"
    );
    for worker in workers {
        let tid = worker["worker"].as_u64().unwrap_or_default();
        let state = match (worker["stage"].as_str(), &worker["condition"]) {
            (Some("Starting"), _) => "starting".to_string(),
            (_, Value::Object(paused)) => match paused["Paused"]["cause"].as_str() {
                Some("Owner") => "paused for an owner".to_string(),
                _ => "suspended".to_string(),
            },
            (Some("Leaving"), _) => "finishes its last task".to_string(),
            _ => match worker["current_task"].as_u64() {
                Some(task) => format!("task {task} for {} s", micros(&worker["current_age"])),
                None => "idle".to_string(),
            },
        };
        text += &format!(
            "{:<9} {:<16} {:>7} {:>8} {:>11} {:>9} {:>10}  {state}\n",
            format!("t{tid:x}"),
            worker["host"].as_str().unwrap_or("-"),
            number(&worker["factor"]),
            worker["tasks_finished"],
            micros(&worker["times"]["available"]),
            micros(&worker["times"]["paused"]),
            micros(&worker["times"]["working"]),
        );
    }
    text
}

fn quarantine_text(answer: &Value) -> String {
    let tasks = answer["quarantined"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    if tasks.is_empty() {
        return "no task is quarantined\n".to_string();
    }
    let mut text = String::new();
    for task in tasks {
        let attempts = task["attempts"].as_array().map_or(&[][..], Vec::as_slice);
        text += &format!("task {} after {} attempts:\n", task["task"], attempts.len());
        for attempt in attempts {
            text += &format!(
                "  {} on {} by {} for {} s: {}\n",
                attempt["attempt"].as_str().unwrap_or("-"),
                attempt["host"].as_str().unwrap_or("-"),
                attempt["worker"].as_str().unwrap_or("-"),
                number(&attempt["seconds"]),
                attempt["reason"].as_str().unwrap_or("no reason"),
            );
        }
    }
    text
}

fn stop_text(run: &Run, answer: &Value) -> String {
    let open = answer["open_tasks"].as_u64().unwrap_or_default();
    match answer["has_journal"].as_bool() {
        Some(true) => format!(
            "{} stops; its {open} open tasks are in its journal, and a new start continues with them\n",
            run.name
        ),
        _ => format!(
            "{} stops; it has no journal, so its {open} open tasks and its results are lost\n",
            run.name
        ),
    }
}

fn retry_text(task: u64, answer: &Value) -> String {
    match answer["retried"].as_bool() {
        Some(true) => format!("task {task} waits again\n"),
        _ => format!("task {task} is not quarantined; nothing was changed\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn wrong_words_are_refused() {
        assert_eq!(parse(&words("list")), Ok(WorkCommand::List));
        let followed = WorkCommand::Run {
            run: "nug".to_string(),
            view: View::Status,
            follow: true,
        };
        assert_eq!(parse(&words("status nug --follow")), Ok(followed));
        for line in [
            "",
            "status",
            "list all",
            "stop",
            "stop x --follow",
            "pause x",
            "retry x",
        ] {
            let refused = Err(ParseError::WrongArgs("work"));
            assert_eq!(parse(&words(line)), refused, "{line}");
        }
        let error = parse(&words("retry nug first")).expect_err("no number");
        assert_eq!(error.to_string(), "work: first is not the number of a task");
    }

    #[test]
    fn workers_have_a_line_with_their_state() {
        let worker = |stage: &str, condition: Value, task: Value| {
            json!({
                "worker": 0x80001, "host": "ha1", "stage": stage, "condition": condition,
                "factor": 1.5, "tasks_finished": 3, "current_task": task, "current_age": 2_000_000,
                "times": { "available": 10_000_000, "paused": 0, "working": 9_000_000 },
            })
        };
        let paused = json!({ "Paused": { "cause": "Owner", "since": 5 } });
        let answer = json!({ "workers": [
            worker("Ready", json!("Computing"), json!(7)),
            worker("Ready", paused, json!(7)),
            worker("Ready", json!("Computing"), Value::Null),
        ] });
        let text = workers_text(&answer);
        let states: Vec<&str> = text
            .lines()
            .skip(1)
            .filter_map(|line| line.split("9.0  ").nth(1))
            .collect();
        assert_eq!(states, ["task 7 for 2.0 s", "paused for an owner", "idle"]);
        assert!(text.contains("t80001"));
    }

    #[test]
    fn status_shows_the_master_and_its_callbacks() {
        let run = Run {
            name: "nug".to_string(),
            master: Tid::from_raw(0x40001),
        };
        let mut status = json!({ "summary": "1 finished", "master_busy_share": 0.25 });
        let last_line = |status: &Value| status_text(&run, status).lines().last().map(String::from);
        let alone = "the master is busy for 25.0 % of its time";
        assert_eq!(last_line(&status).as_deref(), Some(alone));
        status["master_callback_share"] = json!(0.2);
        let line = format!("{alone}, 20.0 % in callbacks of the driver");
        assert_eq!(last_line(&status), Some(line));
    }

    #[test]
    fn history_of_a_quarantined_task_has_its_reasons() {
        let answer = json!({ "quarantined": [{ "task": 9, "attempts": [{
            "attempt": "1.4", "worker": "t80001", "host": "ha1", "seconds": 0.5,
            "reason": "signal 11 killed the worker", "counts": true,
        }] }] });
        assert_eq!(
            quarantine_text(&answer),
            "task 9 after 1 attempts:\n  1.4 on ha1 by t80001 for 0.50 s: signal 11 killed the worker\n"
        );
        let nothing = json!({ "quarantined": [] });
        assert_eq!(quarantine_text(&nothing), "no task is quarantined\n");
    }
}
