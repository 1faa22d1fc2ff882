//! The command `trace`: which events the tasks of a traced job record. Pure.

use crate::parse::ParseError;
use libpvm::trace_events::{EVENTS, EventMask};
use serde_json::{Value, json};

/// Events that no call makes. Nobody chooses them: they always belong to a trace.
const NOT_CHOSEN: [&str; 5] = ["newtask", "endtask", "spntask", "timing", "profiling"];
/// The events of `trace xpvm`, and of a fresh console: those that the display program XPVM shows.
const XPVM: [&str; 24] = [
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
/// Columns of the list.
const COLUMNS: usize = 4;
/// How much is recorded of each event, in the order of their numbers from 1.
const KINDS: [&str; 3] = ["full", "time", "count"];

/// One of the things that `trace` is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trace {
    /// The list of events.
    Show,
    /// Choose an event, or no longer; `*` means all.
    Choose { on: bool, name: String },
    /// Choose those of [`XPVM`] and no others.
    Xpvm,
    /// Show or set how many bytes a task collects before it sends them.
    Buffer(Option<i32>),
    /// Show or set how much is recorded.
    Kind(Option<String>),
}

/// Reads what follows the word `trace`: one thing after the other.
pub(crate) fn parse(args: &[String]) -> Result<Vec<Trace>, ParseError> {
    if args.is_empty() {
        return Ok(vec![Trace::Show]);
    }
    let mut asked = Vec::new();
    let mut on = true;
    let mut words = args.iter();
    while let Some(word) = words.next() {
        asked.push(match word.as_str() {
            sign @ ("+" | "-") => {
                on = sign == "+";
                continue;
            }
            "xpvm" => Trace::Xpvm,
            "buf" => Trace::Buffer(words.next().map(|word| bytes(word)).transpose()?),
            "opt" => Trace::Kind(words.next().cloned()),
            name => Trace::Choose {
                on,
                name: name.to_string(),
            },
        });
    }
    Ok(asked)
}

fn bytes(word: &str) -> Result<i32, ParseError> {
    let number = word.parse().ok().filter(|bytes| *bytes >= 0);
    let wanted = "a number of bytes";
    number.ok_or_else(|| ParseError::NotA {
        command: "trace",
        word: word.to_string(),
        wanted,
    })
}

/// Words that can follow `trace`.
pub(crate) fn words() -> impl Iterator<Item = &'static str> {
    choosable()
        .map(|(_, name)| name)
        .chain(["xpvm", "buf", "opt"])
        .chain(KINDS)
}

/// Number and name of the events that can be chosen.
fn choosable() -> impl Iterator<Item = (usize, &'static str)> {
    let named = EVENTS
        .iter()
        .enumerate()
        .map(|(event, name)| (event, name.to_str().expect("names are ASCII")));
    named.filter(|(_, name)| !NOT_CHOSEN.contains(name))
}

/// What a traced task is told: what was chosen, and what always belongs to a trace.
pub(crate) fn told(mask: &EventMask) -> EventMask {
    let mut told = *mask;
    NOT_CHOSEN
        .into_iter()
        .filter_map(EventMask::event)
        .for_each(|event| told.set(event, true));
    told
}

/// What a fresh console chooses.
pub(crate) fn xpvm() -> EventMask {
    let mut mask = EventMask::none();
    XPVM.into_iter()
        .filter_map(EventMask::event)
        .for_each(|event| mask.set(event, true));
    mask
}

/// Chooses an event or not; false when none has this name.
pub(crate) fn choose(mask: &mut EventMask, on: bool, name: &str) -> bool {
    let mut found = false;
    for (event, _) in choosable().filter(|(_, event)| name == "*" || *event == name) {
        mask.set(event, on);
        found = true;
    }
    found
}

/// The list of all events by name; a star stands before those that are chosen.
pub(crate) fn list(mask: &EventMask) -> String {
    let mut events: Vec<(usize, &str)> = choosable().collect();
    events.sort_by_key(|(_, name)| *name);
    let rows = events.len().div_ceil(COLUMNS);
    let cell = |(event, name): &(usize, &str)| {
        let mark = if mask.has(*event) { " * " } else { "   " };
        format!("{mark}{name:<15}")
    };
    let line = |row: usize| {
        let cells: Vec<String> = events.iter().skip(row).step_by(rows).map(cell).collect();
        cells.join(" ") + "\n"
    };
    (0..rows).map(line).collect()
}

/// Number of a kind of records.
pub(crate) fn kind_number(name: &str) -> Option<i32> {
    KINDS
        .iter()
        .position(|kind| *kind == name)
        .and_then(|at| i32::try_from(at + 1).ok())
}

/// Name of a kind of records.
pub(crate) fn kind_name(number: i32) -> &'static str {
    usize::try_from(number - 1)
        .ok()
        .and_then(|at| KINDS.get(at))
        .copied()
        .unwrap_or("none")
}

/// The list for programs.
pub(crate) fn value(mask: &EventMask, buffer: i32, kind: i32) -> Value {
    let chosen: Vec<&str> = choosable()
        .filter(|(event, _)| mask.has(*event))
        .map(|(_, name)| name)
        .collect();
    json!({ "events": chosen, "buffer": buffer, "options": kind_name(kind) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::split;

    fn trace(line: &str) -> Result<Vec<Trace>, String> {
        parse(&split(line).expect(line)).map_err(|error| error.to_string())
    }

    #[test]
    fn all_forms_of_the_command_are_told_apart() {
        let choose = |on, name: &str| Trace::Choose {
            on,
            name: name.into(),
        };
        assert_eq!(trace(""), Ok(vec![Trace::Show]));
        assert_eq!(
            trace("send recv"),
            Ok(vec![choose(true, "send"), choose(true, "recv")])
        );
        assert_eq!(trace("+ *"), Ok(vec![choose(true, "*")]));
        assert_eq!(trace("- send"), Ok(vec![choose(false, "send")]));
        assert_eq!(trace("+"), Ok(vec![]));
        assert_eq!(trace("xpvm"), Ok(vec![Trace::Xpvm]));
        assert_eq!(trace("buf"), Ok(vec![Trace::Buffer(None)]));
        assert_eq!(trace("buf 1000"), Ok(vec![Trace::Buffer(Some(1000))]));
        assert_eq!(
            trace("opt time"),
            Ok(vec![Trace::Kind(Some("time".into()))])
        );
        assert_eq!(
            trace("buf x"),
            Err("trace: x is not a number of bytes".into())
        );
    }

    #[test]
    fn one_line_can_ask_for_several_things() {
        let choose = |on, name: &str| Trace::Choose {
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
            Trace::Buffer(Some(5)),
            choose(true, "send"),
            Trace::Kind(Some("time".into())),
            Trace::Xpvm,
        ];
        assert_eq!(trace("buf 5 send opt time xpvm"), Ok(all.to_vec()));
    }

    #[test]
    fn the_list_has_the_shape_of_pvm() {
        let list = list(&xpvm());
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
        assert_eq!(list.matches('*').count(), XPVM.len(), "every name is one");
    }

    #[test]
    fn events_are_chosen_by_name_and_all_at_once() {
        let mut mask = EventMask::none();
        assert!(
            choose(&mut mask, true, "send")
                && mask.has(EventMask::event("send").expect("an event"))
        );
        assert!(!choose(&mut mask, true, "x") && !choose(&mut mask, true, "newtask"));
        assert!(choose(&mut mask, true, "*"));
        assert_eq!(list(&mask).matches('*').count(), 104);
        choose(&mut mask, false, "*");
        assert_eq!(mask, EventMask::none());
        let told = told(&mask);
        assert!(
            told.has(75) && told.has(76) && told.has(77),
            "begin and end of tasks are always in it"
        );
    }
}
