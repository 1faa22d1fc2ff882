//! `trace`: selects the events that tasks of a traced job record.

use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::session::options::{OptionError, TRACE_BUFFER, TRACE_DETAIL};
use crate::session::trace_events::{select_events, selectable_events, xpvm_mask};
use libpvm::Error;
use libpvm::trace_events::EventMask;
use serde_json::{Value, json};

/// Number of columns in the list of events.
const COLUMN_COUNT: usize = 4;
/// Levels of detail, numbered from 1.
const DETAIL_LEVELS: [&str; 3] = ["full", "time", "count"];

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "trace",
    summary: "Select the events that tasks spawned with -@ record",
    detail: "Syntax:  trace\n         trace [+] name ...\n         trace - name ...\n         trace [+] *\n         \
                 trace - *\n         trace xpvm (what XPVM displays, the default)\n         trace buf [ bytes ]\n         \
                 trace opt [ full | time | count ]\n",
    parse: |args| parse(args).map(|requests| ParsedCommand::vm_command(TraceCommand { requests })),
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
    /// Selects or deselects an event. The name `*` stands for all events.
    Select { is_selected: bool, name: String },
    /// Selects exactly the events of [`xpvm_mask`].
    Xpvm,
    /// Shows the size of a task's trace buffer in bytes, or sets the size. A task sends its records
    /// when the buffer is full.
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
    let mut is_selected = true;
    let mut words = args.iter();
    while let Some(word) = words.next() {
        requests.push(match word.as_str() {
            sign @ ("+" | "-") => {
                is_selected = sign == "+";
                continue;
            }
            "xpvm" => TraceRequest::Xpvm,
            "buf" => TraceRequest::Buffer(words.next().map(|word| parse_bytes(word)).transpose()?),
            "opt" => TraceRequest::Detail(words.next().cloned()),
            name => TraceRequest::Select {
                is_selected,
                name: name.to_string(),
            },
        });
    }
    Ok(requests)
}

fn parse_bytes(word: &str) -> Result<i32, ParseError> {
    let byte_count = word.parse().ok().filter(|bytes| *bytes >= 0);
    let expected_type = "a number of bytes";
    byte_count.ok_or_else(|| ParseError::WrongType {
        command: "trace",
        word: word.to_string(),
        expected: expected_type,
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
    /// Executes all requests. A refused request does not prevent the execution of later requests.
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let (mut outcome, mut refusals) = (Outcome::default(), Vec::new());
        for request in &self.requests {
            match request.execute(session) {
                Ok(text) => outcome.text.push_str(&text),
                Err(refusal) => refusals.push(refusal.to_string()),
            }
        }
        if !outcome.text.is_empty() {
            let (buffer_bytes, detail_level) = (
                session.options.value(TRACE_BUFFER),
                session.options.value(TRACE_DETAIL),
            );
            outcome.json_values = vec![settings_json(
                &session.event_mask,
                buffer_bytes,
                detail_level,
            )];
        }
        outcome.failed = !refusals.is_empty();
        outcome.refusal = outcome.failed.then(|| refusals.join("\n"));
        Ok(outcome)
    }
}

/// Reason why a request was refused. The selection and the options are unchanged.
#[derive(Debug, thiserror::Error)]
enum TraceRefusal {
    #[error("no such event \"{0}\"")]
    NoSuchEvent(String),
    #[error("\nError:  Unknown Trace Option \"{0}\"\n")]
    NoSuchDetail(String),
    #[error(transparent)]
    Option(#[from] OptionError),
}

impl TraceRequest {
    /// Executes one request. Returns the text to show.
    fn execute(&self, session: &mut Session) -> Result<String, TraceRefusal> {
        let (buffer_bytes, detail_level) = (
            session.options.value(TRACE_BUFFER),
            session.options.value(TRACE_DETAIL),
        );
        let mut set_option = |name, value| match session.options.set(name, value) {
            Ok(_) => Ok(String::new()),
            Err(error) => Err(TraceRefusal::from(error)),
        };
        match self {
            Self::Show => Ok(event_list(&session.event_mask)),
            Self::Xpvm => {
                session.event_mask = xpvm_mask();
                Ok(String::new())
            }
            Self::Select {
                is_selected: selects,
                name,
            } if select_events(&mut session.event_mask, *selects, name) => Ok(String::new()),
            Self::Select { name, .. } => Err(TraceRefusal::NoSuchEvent(name.clone())),
            Self::Buffer(None) => Ok(format!("\nTrace Buffering set to {buffer_bytes} bytes\n\n")),
            Self::Detail(None) => Ok(format!(
                "\nTrace Options set to \"{}\"\n\n",
                detail_name(detail_level)
            )),
            Self::Buffer(Some(bytes)) => set_option(TRACE_BUFFER, *bytes),
            Self::Detail(Some(name)) => match detail_number(name) {
                Some(detail_level) => set_option(TRACE_DETAIL, detail_level),
                None => Err(TraceRefusal::NoSuchDetail(name.clone())),
            },
        }
    }
}

/// Returns the list of all events by name, with a star before each selected event.
fn event_list(mask: &EventMask) -> String {
    let mut events: Vec<(usize, &str)> = selectable_events().collect();
    events.sort_by_key(|(_, name)| *name);
    let row_count = events.len().div_ceil(COLUMN_COUNT);
    let cell = |(event, name): &(usize, &str)| {
        let mark = if mask.contains(*event) { " * " } else { "   " };
        format!("{mark}{name:<15}")
    };
    let line = |row: usize| {
        let cells: Vec<String> = events
            .iter()
            .skip(row)
            .step_by(row_count)
            .map(cell)
            .collect();
        cells.join(" ") + "\n"
    };
    (0..row_count).map(line).collect()
}

/// Returns the number of a level of detail, or `None` if no level has this name.
fn detail_number(name: &str) -> Option<i32> {
    DETAIL_LEVELS
        .iter()
        .position(|level_name| *level_name == name)
        .and_then(|index| i32::try_from(index + 1).ok())
}

/// Returns the name of a level of detail, or `none` if no level has this number.
fn detail_name(number: i32) -> &'static str {
    usize::try_from(number - 1)
        .ok()
        .and_then(|index| DETAIL_LEVELS.get(index))
        .copied()
        .unwrap_or("none")
}

/// Returns the selected events, the buffer size in bytes and the level of detail as JSON.
fn settings_json(mask: &EventMask, buffer_bytes: i32, detail_level: i32) -> Value {
    let selected_events: Vec<&str> = selectable_events()
        .filter(|(event, _)| mask.contains(*event))
        .map(|(_, name)| name)
        .collect();
    json!({ "events": selected_events, "buffer": buffer_bytes, "options": detail_name(detail_level) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<Vec<TraceRequest>, String> {
        let words: Vec<String> = line.split_whitespace().map(String::from).collect();
        parse(&words).map_err(|error| error.to_string())
    }

    #[test]
    fn trace_arguments_parse() {
        let select_request = |selects, name: &str| TraceRequest::Select {
            is_selected: selects,
            name: name.into(),
        };
        assert_eq!(parse_line(""), Ok(vec![TraceRequest::Show]));
        assert_eq!(
            parse_line("send recv"),
            Ok(vec![
                select_request(true, "send"),
                select_request(true, "recv")
            ])
        );
        assert_eq!(parse_line("+ *"), Ok(vec![select_request(true, "*")]));
        assert_eq!(
            parse_line("- send"),
            Ok(vec![select_request(false, "send")])
        );
        assert_eq!(parse_line("+"), Ok(vec![]));
        assert_eq!(parse_line("xpvm"), Ok(vec![TraceRequest::Xpvm]));
        assert_eq!(parse_line("buf"), Ok(vec![TraceRequest::Buffer(None)]));
        assert_eq!(
            parse_line("buf 1000"),
            Ok(vec![TraceRequest::Buffer(Some(1000))])
        );
        assert_eq!(
            parse_line("opt time"),
            Ok(vec![TraceRequest::Detail(Some("time".into()))])
        );
        assert_eq!(
            parse_line("buf x"),
            Err("trace: x is not a number of bytes".into())
        );
    }

    #[test]
    fn one_line_may_contain_several_requests() {
        let select_request = |selects, name: &str| TraceRequest::Select {
            is_selected: selects,
            name: name.into(),
        };
        assert_eq!(
            parse_line("- * + send - recv"),
            Ok(vec![
                select_request(false, "*"),
                select_request(true, "send"),
                select_request(false, "recv")
            ])
        );
        let requests = [
            TraceRequest::Buffer(Some(5)),
            select_request(true, "send"),
            TraceRequest::Detail(Some("time".into())),
            TraceRequest::Xpvm,
        ];
        assert_eq!(
            parse_line("buf 5 send opt time xpvm"),
            Ok(requests.to_vec())
        );
    }

    #[test]
    fn event_list_matches_pvm() {
        let list_text = event_list(&xpvm_mask());
        let lines: Vec<&str> = list_text.lines().collect();
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
        assert_eq!(list_text.matches('*').count(), 24);
    }
}
