//! `events`: shows the event log, and with `--follow` prints events as they occur.

use super::event_view::EventView;
use crate::arguments::{parse_number, parse_option_value, unknown_option_error};
use crate::command::{CommandSpec, ParsedCommand, ShellOptions, VmCommand};
use crate::outcome::Outcome;
use crate::output::repeats::{RepeatCounter, RepeatableLine};
use crate::output::terminal::Terminal;
use crate::output::time::{format_local, format_utc};
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::session::job_output::TAG_EVENTS;
use libpvm::{Error, Match, Vm};
use sempa_proto::HostId;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::message::CTX_BASE;
use sempa_proto::table::HostTable;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io;

/// Maximum number of events in the reply to one request.
const EVENTS_BATCH_MAX: u32 = 1000;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "events",
    summary: "Show what happened in the virtual machine, and why",
    detail: "Syntax:  events [ --from number ] [ --follow ] [ --verbose ]\n\
             One line for each event: time, zone, host, what happened. A failure that repeats is counted.\n\
             --follow continues until it is interrupted (only as `pvm events --follow`).\n\
             --verbose adds the steps of migrations, and the consoles that join and leave. With --json all events\n\
             are printed, with times in UTC.\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    ..CommandSpec::DEFAULT
};

#[derive(Debug, PartialEq, Eq)]
struct EventsCommand {
    /// Number of the first event to show.
    first_event: u64,
    /// True to print further events as they occur, until the command is interrupted.
    follow: bool,
    /// True to show also the events that [`EventView`] hides by default.
    is_verbose: bool,
}

fn parse(args: &[String]) -> Result<EventsCommand, ParseError> {
    let (mut first_number, mut follow, mut is_verbose) = (0, false, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match parse_option_value("events", "--from", arg, &mut rest)? {
            Some(value) => first_number = parse_number("events", value)?,
            None if arg == "--follow" || arg == "-f" => follow = true,
            None if arg == "--verbose" || arg == "-v" => is_verbose = true,
            None if arg.starts_with('-') => return Err(unknown_option_error(arg)),
            None => return Err(ParseError::WrongArgs("events")),
        }
    }
    Ok(EventsCommand {
        first_event: first_number,
        follow,
        is_verbose,
    })
}

impl VmCommand for EventsCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        if self.follow {
            return Ok(Outcome::from_error(
                "events: --follow runs until it is interrupted: use it from a shell, as 'pvm events --follow'",
            ));
        }
        let mut names = HostNames::default();
        names.add_table_names(&session.vm.hosts()?);
        let (mut all_events, mut next_event) = (Vec::new(), self.first_event);
        loop {
            let events = session.vm.events(next_event, EVENTS_BATCH_MAX)?;
            let Some(last_event) = events.last() else {
                break;
            };
            next_event = last_event.number + 1;
            events.iter().for_each(|event| names.add_event_name(event));
            all_events.extend(events);
        }
        let mut view = EventView::new(self.is_verbose);
        Ok(Outcome {
            text: events_text(
                &names,
                all_events.iter().filter(|event| view.shows(&event.kind)),
            ),
            json_values: all_events
                .iter()
                .map(|event| event_json(&names, event))
                .collect(),
            ..Outcome::default()
        })
    }

    fn run_for_shell(&self, vm: &Vm, options: ShellOptions) -> io::Result<Option<Outcome>> {
        if !self.follow {
            return Ok(None);
        }
        let error = EventFollower {
            vm,
            host_names: HostNames::default(),
            view: EventView::new(self.is_verbose || options.prints_json),
            next_event: self.first_event,
            prints_json: options.prints_json,
            repeats: RepeatCounter::default(),
        }
        .run()?;
        Ok(Some(Outcome::from_error(format!("events: {error}"))))
    }
}

/// Prints events as they occur.
struct EventFollower<'a> {
    vm: &'a Vm,
    host_names: HostNames,
    view: EventView,
    /// Number of the next event to print.
    next_event: u64,
    prints_json: bool,
    repeats: RepeatCounter,
}

impl EventFollower<'_> {
    /// Runs until the virtual machine fails, and returns its error.
    ///
    /// # Errors
    /// Fails if standard output cannot be written.
    fn run(mut self) -> io::Result<Error> {
        // The subscription precedes the reading of the log, so that no event is missed.
        if let Err(error) = self.vm.subscribe_events(CTX_BASE, TAG_EVENTS) {
            return Ok(error);
        }
        loop {
            if let Err(error) = self.print_backlog()? {
                return Ok(error);
            }
            let message = match self.vm.recv(Match::any().ctx(CTX_BASE).tag(TAG_EVENTS)) {
                Ok(message) => message,
                Err(error) => return Ok(error),
            };
            if let Some(event) = Vm::decode_event(&message)
                && message.src.is_daemon()
                && event.number == self.next_event
            {
                self.print_event(&event)?;
            }
        }
    }

    /// Prints all logged events from `next_event` on. The outer error means that standard output
    /// cannot be written. The inner error is the failure of the virtual machine.
    fn print_backlog(&mut self) -> io::Result<Result<(), Error>> {
        loop {
            let events = match self.vm.events(self.next_event, EVENTS_BATCH_MAX) {
                Ok(events) => events,
                Err(error) => return Ok(Err(error)),
            };
            if events.is_empty() {
                return Ok(Ok(()));
            }
            events
                .iter()
                .for_each(|event| self.host_names.add_event_name(event));
            for event in events {
                self.print_event(&event)?;
            }
        }
    }

    fn print_event(&mut self, event: &Event) -> io::Result<()> {
        self.host_names.add_event_name(event);
        if self.host_names.get(event.host).is_none()
            && let Ok(table) = self.vm.config()
        {
            self.host_names.add_table_names(&table);
        }
        self.next_event = event.number + 1;
        if !self.view.shows(&event.kind) {
            return Ok(());
        }
        let text = if self.prints_json {
            format!("{}\n", event_json(&self.host_names, event))
        } else {
            counted_event_text(&self.host_names, event, &mut self.repeats)
        };
        Terminal.print(text.as_bytes())
    }
}

/// Names of hosts, including those that have left.
#[derive(Clone, Debug, Default)]
struct HostNames(BTreeMap<HostId, String>);

impl HostNames {
    /// Adds the names of a host table.
    fn add_table_names(&mut self, table: &HostTable) {
        self.0
            .extend(table.hosts.iter().map(|host| (host.id, host.name.clone())));
    }

    /// Adds the host name that an event contains. An event without a host name changes nothing.
    fn add_event_name(&mut self, event: &Event) {
        if let EventKind::HostAdded { host, name } | EventKind::HostGone { host, name, .. } =
            &event.kind
        {
            self.0.insert(*host, name.clone());
        }
    }

    /// Returns the name of a host, or `None` if the name is unknown.
    fn get(&self, host: HostId) -> Option<&str> {
        self.0.get(&host).map(String::as_str)
    }
}

/// Formats events. Failures that repeat are counted.
fn events_text<'a>(names: &HostNames, events: impl Iterator<Item = &'a Event>) -> String {
    let mut repeats = RepeatCounter::default();
    let mut text: String = events
        .map(|event| counted_event_text(names, event, &mut repeats))
        .collect();
    for report in repeats.finish() {
        text.push_str(&format!("{report}\n"));
    }
    text
}

/// Formats an event, and the reports about repetitions that precede the event. Empty if the event
/// repeats a recent one.
fn counted_event_text(names: &HostNames, event: &Event, repeats: &mut RepeatCounter) -> String {
    let line = event_text(names, event);
    let Some(content) = repeatable_content(names, event) else {
        return line;
    };
    let mut reports = Vec::new();
    let is_shown = repeats.take(
        RepeatableLine {
            content,
            at: event.at,
            time: format_local(event.at),
        },
        &mut reports,
    );
    let mut text: String = reports.iter().map(|report| format!("{report}\n")).collect();
    if is_shown {
        text.push_str(&line);
    }
    text
}

/// Returns what the line of an event says, without its time and without the number of a migration.
/// `None` for an event that never repeats, or whose repetitions are news.
fn repeatable_content(names: &HostNames, event: &Event) -> Option<String> {
    let content = event_content(names, event);
    match &event.kind {
        EventKind::MigrationFailed { id, .. } => Some(content.replacen(&format!("{id}: "), "", 1)),
        EventKind::RestartFailed { .. }
        | EventKind::CheckpointFailed { .. }
        | EventKind::HostRefused { .. }
        | EventKind::GuestsNotPaused { .. }
        | EventKind::GuestsStillRun { .. }
        | EventKind::Note { .. } => Some(content),
        _ => None,
    }
}

/// Formats one event: time, host, text.
fn event_text(names: &HostNames, event: &Event) -> String {
    format!(
        "{} {}\n",
        format_local(event.at),
        event_content(names, event)
    )
}

/// Formats one event without its time.
fn event_content(names: &HostNames, event: &Event) -> String {
    let host = names
        .get(event.host)
        .map_or_else(|| event.host.to_string(), str::to_string);
    let text = event.kind.with_host_names(|host| names.get(host));
    format!("{host} {text}")
}

/// Returns an event as JSON. The key `kind` contains the event record as daemons exchange it.
fn event_json(names: &HostNames, event: &Event) -> Value {
    json!({
        "number": event.number,
        "at_us": event.at.0,
        "time": format_utc(event.at),
        "host": names.get(event.host),
        "host_index": event.host.index(),
        "text": event.kind.with_host_names(|host| names.get(host)),
        "kind": event.kind,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::table;
    use sempa_proto::event::LostTasks;
    use sempa_proto::migration::{Failure, MigrationCause, Refusal, Step};
    use sempa_proto::{Micros, Tid};

    fn host_names() -> HostNames {
        let mut names = HostNames::default();
        names.add_table_names(&table());
        names
    }

    #[test]
    fn events_options_parse() {
        let parse_words = |words: &[&str]| {
            parse(
                &words
                    .iter()
                    .map(|word| word.to_string())
                    .collect::<Vec<_>>(),
            )
            .map_err(|error| error.to_string())
        };
        let events_command = |from, follow| {
            Ok(EventsCommand {
                first_event: from,
                follow,
                is_verbose: false,
            })
        };
        assert_eq!(parse_words(&[]), events_command(0, false));
        assert_eq!(
            parse_words(&["--from", "7", "--follow"]),
            events_command(7, true)
        );
        assert_eq!(parse_words(&["--from=7"]), events_command(7, false));
        assert_eq!(parse_words(&["--from"]), Err("events: wrong #args".into()));
        assert_eq!(
            parse_words(&["--from", "x"]),
            Err("events: x is not a number".into())
        );
    }

    #[test]
    fn event_is_one_line() {
        let (source, target) = (HostId::MASTER, HostId::new(3).expect("3"));
        let kind = EventKind::MigrationFailed {
            id: sempa_proto::MigrationId(4),
            tid: Tid::from_raw(0x40002),
            from: source,
            to: target,
            cause: MigrationCause::Requested {
                requested_by: Tid::from_raw(0x40001),
            },
            step: Step::Dump,
            why: Failure::Killed { signal: 9 },
        };
        let event = Event {
            number: 7,
            at: Micros(1_795_253_641_123_456),
            host: source,
            kind,
        };
        assert_eq!(
            event_text(&host_names(), &event),
            format!(
                "{} ha1 m4: t40002 was not migrated from ha1 to ha3 (requested by t40001): dump failed: \
             the engine was killed by signal 9\n",
                format_local(event.at)
            )
        );
    }

    /// A migration that fails again and again for the same reason is one line, and a line with the
    /// count.
    #[test]
    fn repeated_failure_is_counted() {
        let failure = |number: u64, why: Failure| Event {
            number,
            at: Micros(1_795_253_641_000_000 + number * 500_000),
            host: HostId::MASTER,
            kind: EventKind::MigrationFailed {
                id: sempa_proto::MigrationId(number),
                tid: Tid::from_raw(0x40002),
                from: HostId::MASTER,
                to: HostId::new(3).expect("3"),
                cause: MigrationCause::Owner {
                    why: "olga is there".into(),
                },
                step: Step::Inspect,
                why,
            },
        };
        let not_connected = || Failure::Refused(vec![Refusal::NotConnected]);
        let mut events: Vec<Event> = (1..=5).map(|n| failure(n, not_connected())).collect();
        events.push(failure(6, Failure::TaskEnded));
        let time = |index: usize| format_local(events[index].at);
        let text = events_text(&host_names(), events.iter());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(
            lines[0].contains("ha1 m1: t40002 was not migrated"),
            "{text}"
        );
        assert!(
            lines[2].starts_with(&format!("{} ha1 t40002 was not migrated", time(4)))
                && lines[2].ends_with(&format!(" (4 more times since {})", time(0))),
            "{text}"
        );
        let twice = [events[0].clone(), events[5].clone()];
        assert_eq!(events_text(&host_names(), twice.iter()).lines().count(), 2);
    }

    #[test]
    fn departed_host_keeps_name_in_log() {
        let id = HostId::new(7).expect("7");
        let host_gone_kind = EventKind::HostGone {
            host: id,
            name: "h7".into(),
            why: "deleted".into(),
            lost_tasks: LostTasks::default(),
        };
        let earlier_event = Event {
            number: 1,
            at: Micros(0),
            host: id,
            kind: EventKind::HostVacated { host: id },
        };
        let mut names = host_names();
        assert!(event_text(&names, &earlier_event).contains(" host 7 "));
        names.add_event_name(&Event {
            number: 2,
            at: Micros(0),
            host: HostId::MASTER,
            kind: host_gone_kind,
        });
        assert!(event_text(&names, &earlier_event).contains(" h7 "));
    }

    #[test]
    fn events_have_text_and_record() {
        let kind = EventKind::HostVacated {
            host: HostId::MASTER,
        };
        let value = event_json(
            &host_names(),
            &Event {
                number: 1,
                at: Micros(5),
                host: HostId::MASTER,
                kind,
            },
        );
        assert_eq!(value["host"], "ha1");
        assert_eq!(value["kind"]["HostClean"]["host"], 1);
        assert!(
            value["text"]
                .as_str()
                .is_some_and(|text| text.contains("clean"))
        );
    }
}
