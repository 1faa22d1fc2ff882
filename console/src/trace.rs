//! The command `trace`: selects the events that tasks of a traced job record. Pure.

use crate::parse::ParseError;
use libpvm::trace_events::{EVENT_NAMES, EventMask};
use serde_json::{Value, json};

/// Events that no call makes. They are always recorded and cannot be selected.
const ALWAYS_RECORDED: [&str; 5] = ["newtask", "endtask", "spntask", "timing", "profiling"];
/// Events selected by `trace xpvm` and in a new console: those that the display program XPVM shows.
const XPVM_EVENTS: [&str; 24] = [
    "addmhf",
    "barrier",
    "bcast",
    "delmhf",
    "exit",
    "joingroup",
    "kill",
    "lvgroup",
    "mcast",
    "mhf_invoke",
    "mytid",
    "nrecv",
    "parent",
    "precv",
    "probe",
    "psend",
    "recv",
    "recvf",
    "send",
    "sendsig",
    "siblings",
    "spawn",
    "trecv",
    "user_defined",
];
/// Columns of the list of events.
const COLUMNS: usize = 4;
/// Levels of detail, numbered from 1.
const DETAIL_LEVELS: [&str; 3] = ["full", "time", "count"];

/// One request of a `trace` command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TraceCommand {
    /// Shows the list of events.
    Show,
    /// Selects or deselects an event; `*` stands for all.
    Select { on: bool, name: String },
    /// Selects exactly the events of [`XPVM_EVENTS`].
    Xpvm,
    /// Shows or sets the number of bytes that a task collects before it sends records.
    Buffer(Option<i32>),
    /// Shows or sets the level of detail.
    Detail(Option<String>),
}

/// Parses the words after `trace`, which may contain several requests.
pub(crate) fn parse(args: &[String]) -> Result<Vec<TraceCommand>, ParseError> {
    if args.is_empty() {
        return Ok(vec![TraceCommand::Show]);
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
            "xpvm" => TraceCommand::Xpvm,
            "buf" => TraceCommand::Buffer(words.next().map(|word| parse_bytes(word)).transpose()?),
            "opt" => TraceCommand::Detail(words.next().cloned()),
            name => TraceCommand::Select {
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
pub(crate) fn argument_words() -> impl Iterator<Item = &'static str> {
    selectable_events()
        .map(|(_, name)| name)
        .chain(["xpvm", "buf", "opt"])
        .chain(DETAIL_LEVELS)
}

/// Returns number and name of the events that can be selected.
fn selectable_events() -> impl Iterator<Item = (usize, &'static str)> {
    let named = EVENT_NAMES
        .iter()
        .enumerate()
        .map(|(event, name)| (event, name.to_str().expect("names are ASCII")));
    named.filter(|(_, name)| !ALWAYS_RECORDED.contains(name))
}

/// Returns the mask for a traced task: the selected events and those that are always recorded.
pub(crate) fn with_always_recorded(mask: &EventMask) -> EventMask {
    let mut mask_with_always = *mask;
    ALWAYS_RECORDED
        .into_iter()
        .filter_map(EventMask::event_number)
        .for_each(|event| mask_with_always.set(event, true));
    mask_with_always
}

/// Returns the mask of a new console.
pub(crate) fn xpvm_mask() -> EventMask {
    let mut mask = EventMask::none();
    XPVM_EVENTS
        .into_iter()
        .filter_map(EventMask::event_number)
        .for_each(|event| mask.set(event, true));
    mask
}

/// Selects or deselects events by name. Returns false if no event has this name.
pub(crate) fn select(mask: &mut EventMask, on: bool, name: &str) -> bool {
    let mut found = false;
    for (event, _) in selectable_events().filter(|(_, event)| name == "*" || *event == name) {
        mask.set(event, on);
        found = true;
    }
    found
}

/// Returns the list of all events by name, with a star before selected ones.
pub(crate) fn event_list(mask: &EventMask) -> String {
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
pub(crate) fn detail_number(name: &str) -> Option<i32> {
    DETAIL_LEVELS
        .iter()
        .position(|kind| *kind == name)
        .and_then(|at| i32::try_from(at + 1).ok())
}

/// Returns the name of a level of detail.
pub(crate) fn detail_name(number: i32) -> &'static str {
    usize::try_from(number - 1)
        .ok()
        .and_then(|at| DETAIL_LEVELS.get(at))
        .copied()
        .unwrap_or("none")
}

/// Returns the selection as JSON.
pub(crate) fn value(mask: &EventMask, buffer: i32, kind: i32) -> Value {
    let chosen: Vec<&str> = selectable_events()
        .filter(|(event, _)| mask.contains(*event))
        .map(|(_, name)| name)
        .collect();
    json!({ "events": chosen, "buffer": buffer, "options": detail_name(kind) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::split_words;

    fn trace(line: &str) -> Result<Vec<TraceCommand>, String> {
        parse(&split_words(line).expect(line)).map_err(|error| error.to_string())
    }

    /// All forms of `trace` are parsed.
    #[test]
    fn trace_arguments_parse() {
        let choose = |on, name: &str| TraceCommand::Select {
            on,
            name: name.into(),
        };
        assert_eq!(trace(""), Ok(vec![TraceCommand::Show]));
        assert_eq!(
            trace("send recv"),
            Ok(vec![choose(true, "send"), choose(true, "recv")])
        );
        assert_eq!(trace("+ *"), Ok(vec![choose(true, "*")]));
        assert_eq!(trace("- send"), Ok(vec![choose(false, "send")]));
        assert_eq!(trace("+"), Ok(vec![]));
        assert_eq!(trace("xpvm"), Ok(vec![TraceCommand::Xpvm]));
        assert_eq!(trace("buf"), Ok(vec![TraceCommand::Buffer(None)]));
        assert_eq!(
            trace("buf 1000"),
            Ok(vec![TraceCommand::Buffer(Some(1000))])
        );
        assert_eq!(
            trace("opt time"),
            Ok(vec![TraceCommand::Detail(Some("time".into()))])
        );
        assert_eq!(
            trace("buf x"),
            Err("trace: x is not a number of bytes".into())
        );
    }

    /// One line may contain several requests.
    #[test]
    fn one_line_may_contain_several_requests() {
        let choose = |on, name: &str| TraceCommand::Select {
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
            TraceCommand::Buffer(Some(5)),
            choose(true, "send"),
            TraceCommand::Detail(Some("time".into())),
            TraceCommand::Xpvm,
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
        assert_eq!(
            list.matches('*').count(),
            XPVM_EVENTS.len(),
            "every name is one"
        );
    }

    /// Events are selected by name or all at once.
    #[test]
    fn events_are_selected_by_name_or_all() {
        let mut mask = EventMask::none();
        assert!(
            select(&mut mask, true, "send")
                && mask.contains(EventMask::event_number("send").expect("an event"))
        );
        assert!(!select(&mut mask, true, "x") && !select(&mut mask, true, "newtask"));
        assert!(select(&mut mask, true, "*"));
        assert_eq!(event_list(&mask).matches('*').count(), 104);
        select(&mut mask, false, "*");
        assert_eq!(mask, EventMask::none());
        let told = with_always_recorded(&mask);
        assert!(
            told.contains(75) && told.contains(76) && told.contains(77),
            "begin and end of tasks are always in it"
        );
    }
}
