//! `trace`: selects the events that tasks of a traced job record.

use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::session::options::{TRACE_BUFFER, TRACE_DETAIL};
use crate::session::trace_events::{select, selectable_events, xpvm_mask};
use libpvm::Error;
use libpvm::trace_events::EventMask;
use serde_json::{Value, json};

/// Number of columns of the list of events.
const COLUMNS: usize = 4;
/// Levels of detail, numbered from 1.
const DETAIL_LEVELS: [&str; 3] = ["full", "time", "count"];

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "trace",
    summary: "Select the events that tasks spawned with -@ record",
    detail: "Syntax:  trace\n         trace [+] name ...\n         trace - name ...\n         trace [+] *\n         \
                 trace - *\n         trace xpvm (what XPVM displays, the default)\n         trace buf [ bytes ]\n         \
                 trace opt [ full | time | count ]\n",
    parse: |args| parse(args).map(|requests| ParsedCommand::on_vm(TraceCommand { requests })),
    completion: Completion::EveryWord(WordKind::OneOf(argument_words)),
    ..CommandSpec::DEFAULT
};

/// A `trace` command with all requests of its line.
#[derive(Debug)]
struct TraceCommand {
    requests: Vec<TraceRequest>,
}

/// One request of a `trace` command.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TraceRequest {
    /// Shows the list of events.
    Show,
    /// Selects or deselects an event; `*` stands for all.
    Select { on: bool, name: String },
    /// Selects exactly the events of [`xpvm_mask`].
    Xpvm,
    /// Shows or sets the number of bytes that a task collects before it sends records.
    Buffer(Option<i32>),
    /// Shows or sets the level of detail.
    Detail(Option<String>),
}

/// Parses the words after `trace`, which may contain several requests.
fn parse(args: &[String]) -> Result<Vec<TraceRequest>, ParseError> {
    if args.is_empty() {
        return Ok(vec![TraceRequest::Show]);
    }
    let mut requests = Vec::new();
    let mut on = true;
    let mut words = args.iter();
    while let Some(word) = words.next() {
        requests.push(match word.as_str() {
            sign @ ("+" | "-") => {
                on = sign == "+";
                continue;
            }
            "xpvm" => TraceRequest::Xpvm,
            "buf" => TraceRequest::Buffer(words.next().map(|word| parse_bytes(word)).transpose()?),
            "opt" => TraceRequest::Detail(words.next().cloned()),
            name => TraceRequest::Select {
                on,
                name: name.to_string(),
            },
        });
    }
    Ok(requests)
}

fn parse_bytes(word: &str) -> Result<i32, ParseError> {
    let number = word.parse().ok().filter(|bytes| *bytes >= 0);
    let wanted = "a number of bytes";
    number.ok_or_else(|| ParseError::WrongType {
        command: "trace",
        word: word.to_string(),
        expected: wanted,
    })
}

/// Returns the words that can follow `trace`, for completion.
fn argument_words() -> Vec<String> {
    selectable_events()
        .map(|(_, name)| name)
        .chain(["xpvm", "buf", "opt"])
        .chain(DETAIL_LEVELS)
        .map(String::from)
        .collect()
}

impl VmCommand for TraceCommand {
    /// Executes all requests. A refused request does not prevent the others.
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let (mut outcome, mut refusals) = (Outcome::default(), Vec::new());
        for request in &self.requests {
            match request.apply(session) {
                Ok(text) => outcome.text.push_str(&text),
                Err(line) => refusals.push(line),
            }
        }
        if !outcome.text.is_empty() {
            let (buffer, kind) = (
                session.options.value(TRACE_BUFFER),
                session.options.value(TRACE_DETAIL),
            );
            outcome.json = vec![value(&session.event_mask, buffer, kind)];
        }
        outcome.failed = !refusals.is_empty();
        outcome.refusal = outcome.failed.then(|| refusals.join("\n"));
        Ok(outcome)
    }
}

impl TraceRequest {
    /// Executes one request. Returns the text to show, or the reason for a refusal.
    fn apply(&self, session: &mut Session) -> Result<String, String> {
        let (buffer, kind) = (
            session.options.value(TRACE_BUFFER),
            session.options.value(TRACE_DETAIL),
        );
        let mut set = |name, value| match session.options.set(name, value) {
            Ok(_) => Ok(String::new()),
            Err(error) => Err(error.to_string()),
        };
        match self {
            TraceRequest::Show => Ok(event_list(&session.event_mask)),
            TraceRequest::Xpvm => {
                session.event_mask = xpvm_mask();
                Ok(String::new())
            }
            TraceRequest::Select { on, name } if select(&mut session.event_mask, *on, name) => {
                Ok(String::new())
            }
            TraceRequest::Select { name, .. } => Err(format!("no such event \"{name}\"")),
            TraceRequest::Buffer(None) => {
                Ok(format!("\nTrace Buffering set to {buffer} bytes\n\n"))
            }
            TraceRequest::Detail(None) => Ok(format!(
                "\nTrace Options set to \"{}\"\n\n",
                detail_name(kind)
            )),
            TraceRequest::Buffer(Some(bytes)) => set(TRACE_BUFFER, *bytes),
            TraceRequest::Detail(Some(name)) => match detail_number(name) {
                Some(kind) => set(TRACE_DETAIL, kind),
                None => Err(format!("\nError:  Unknown Trace Option \"{name}\"\n")),
            },
        }
    }
}

/// Returns the list of all events by name, with a star before selected ones.
fn event_list(mask: &EventMask) -> String {
    let mut events: Vec<(usize, &str)> = selectable_events().collect();
    events.sort_by_key(|(_, name)| *name);
    let rows = events.len().div_ceil(COLUMNS);
    let cell = |(event, name): &(usize, &str)| {
        let mark = if mask.contains(*event) { " * " } else { "   " };
        format!("{mark}{name:<15}")
    };
    let line = |row: usize| {
        let cells: Vec<String> = events.iter().skip(row).step_by(rows).map(cell).collect();
        cells.join(" ") + "\n"
    };
    (0..rows).map(line).collect()
}

/// Returns the number of a level of detail.
fn detail_number(name: &str) -> Option<i32> {
    DETAIL_LEVELS
        .iter()
        .position(|kind| *kind == name)
        .and_then(|at| i32::try_from(at + 1).ok())
}

/// Returns the name of a level of detail.
fn detail_name(number: i32) -> &'static str {
    usize::try_from(number - 1)
        .ok()
        .and_then(|at| DETAIL_LEVELS.get(at))
        .copied()
        .unwrap_or("none")
}

/// Returns the selection as JSON.
fn value(mask: &EventMask, buffer: i32, kind: i32) -> Value {
    let chosen: Vec<&str> = selectable_events()
        .filter(|(event, _)| mask.contains(*event))
        .map(|(_, name)| name)
        .collect();
    json!({ "events": chosen, "buffer": buffer, "options": detail_name(kind) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(line: &str) -> Result<Vec<TraceRequest>, String> {
        let words: Vec<String> = line.split_whitespace().map(String::from).collect();
        parse(&words).map_err(|error| error.to_string())
    }

    /// All forms of `trace` are parsed.
    #[test]
    fn trace_arguments_parse() {
        let choose = |on, name: &str| TraceRequest::Select {
            on,
            name: name.into(),
        };
        assert_eq!(trace(""), Ok(vec![TraceRequest::Show]));
        assert_eq!(
            trace("send recv"),
            Ok(vec![choose(true, "send"), choose(true, "recv")])
        );
        assert_eq!(trace("+ *"), Ok(vec![choose(true, "*")]));
        assert_eq!(trace("- send"), Ok(vec![choose(false, "send")]));
        assert_eq!(trace("+"), Ok(vec![]));
        assert_eq!(trace("xpvm"), Ok(vec![TraceRequest::Xpvm]));
        assert_eq!(trace("buf"), Ok(vec![TraceRequest::Buffer(None)]));
        assert_eq!(
            trace("buf 1000"),
            Ok(vec![TraceRequest::Buffer(Some(1000))])
        );
        assert_eq!(
            trace("opt time"),
            Ok(vec![TraceRequest::Detail(Some("time".into()))])
        );
        assert_eq!(
            trace("buf x"),
            Err("trace: x is not a number of bytes".into())
        );
    }

    /// One line may contain several requests.
    #[test]
    fn one_line_may_contain_several_requests() {
        let choose = |on, name: &str| TraceRequest::Select {
            on,
            name: name.into(),
        };
        assert_eq!(
            trace("- * + send - recv"),
            Ok(vec![
                choose(false, "*"),
                choose(true, "send"),
                choose(false, "recv")
            ])
        );
        let all = [
            TraceRequest::Buffer(Some(5)),
            choose(true, "send"),
            TraceRequest::Detail(Some("time".into())),
            TraceRequest::Xpvm,
        ];
        assert_eq!(trace("buf 5 send opt time xpvm"), Ok(all.to_vec()));
    }

    /// The list of events has the layout of PVM's.
    #[test]
    fn event_list_matches_pvm() {
        let list = event_list(&xpvm_mask());
        let lines: Vec<&str> = list.lines().collect();
        assert_eq!(lines.len(), 26);
        assert_eq!(
            lines[0],
            "   addhosts           gettid             pkfloat            setopt         "
        );
        assert_eq!(
            lines[3],
            " * barrier            halt               pkshort            settmask       "
        );
        assert_eq!(
            lines[25],
            "   getsbuf            pkdouble           setmwid            version        "
        );
        assert_eq!(list.matches('*').count(), 24);
    }
}
