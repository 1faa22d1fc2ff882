//! `events`: shows the event log, and with `--follow` prints events as they occur.

use crate::arguments::{option_value, parse_number, unknown_option};
use crate::command::{CommandSpec, ParsedCommand, ShellOptions, VmCommand};
use crate::outcome::Outcome;
use crate::output::terminal::Terminal;
use crate::output::time::time;
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::{Error, Match, Vm};
use sempa_proto::HostId;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::message::CTX_BASE;
use sempa_proto::table::HostTable;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io;

/// Tag of messages that carry events.
const TAG_EVENTS: i32 = 2;
/// Events fetched by one request.
const EVENTS_BATCH_MAX: u32 = 1000;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "events",
    summary: "Show what happened in the virtual machine, and why",
    detail: "Syntax:  events [ --from number ] [ --follow ]\n\
             One line for each event: time (UTC), host, what happened.\n\
             --follow continues until it is interrupted (only as `pvm events --follow`).\n",
    parse: |args| parse(args).map(ParsedCommand::on_vm),
    ..CommandSpec::DEFAULT
};

#[derive(Debug, PartialEq, Eq)]
struct EventsCommand {
    /// Number of the first event to show.
    from: u64,
    /// Prints further events as they occur, until interrupted.
    follow: bool,
}

fn parse(args: &[String]) -> Result<EventsCommand, ParseError> {
    let (mut from, mut follow) = (0, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match option_value("events", "--from", arg, &mut rest)? {
            Some(value) => from = parse_number("events", value)?,
            None if arg == "--follow" || arg == "-f" => follow = true,
            None if arg.starts_with('-') => return Err(unknown_option(arg)),
            None => return Err(ParseError::WrongArgs("events")),
        }
    }
    Ok(EventsCommand { from, follow })
}

impl VmCommand for EventsCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        if self.follow {
            return Ok(Outcome::error(
                "events: --follow runs until it is interrupted: use it from a shell, as 'pvm events --follow'",
            ));
        }
        let mut names = HostNames::default();
        names.learn_table(&session.vm.hosts()?);
        let (mut all, mut from) = (Vec::new(), self.from);
        loop {
            let events = session.vm.events(from, EVENTS_BATCH_MAX)?;
            let Some(last) = events.last() else { break };
            from = last.number + 1;
            events.iter().for_each(|event| names.learn_event(event));
            all.extend(events);
        }
        Ok(Outcome {
            text: all.iter().map(|event| text(&names, event)).collect(),
            json: all.iter().map(|event| value(&names, event)).collect(),
            ..Outcome::default()
        })
    }

    fn run_for_shell(&self, vm: &Vm, options: ShellOptions) -> io::Result<Option<Outcome>> {
        if !self.follow {
            return Ok(None);
        }
        let error = EventFollower {
            vm,
            names: HostNames::default(),
            next: self.from,
            json: options.json,
        }
        .run()?;
        Ok(Some(Outcome::error(format!("events: {error}"))))
    }
}

/// Prints events as they occur.
struct EventFollower<'a> {
    vm: &'a Vm,
    names: HostNames,
    /// Number of the next event to print.
    next: u64,
    json: bool,
}

impl EventFollower<'_> {
    /// Runs until the virtual machine fails, and returns its error.
    ///
    /// # Errors
    /// Fails if standard output cannot be written.
    fn run(mut self) -> io::Result<Error> {
        // Subscribes before it reads the log, so that no event is missed in between.
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
                && event.number == self.next
            {
                self.print_event(&event)?;
            }
        }
    }

    /// Prints all logged events from `next` on. The outer error is one of standard output, the
    /// inner error one of the virtual machine.
    fn print_backlog(&mut self) -> io::Result<Result<(), Error>> {
        loop {
            let events = match self.vm.events(self.next, EVENTS_BATCH_MAX) {
                Ok(events) => events,
                Err(error) => return Ok(Err(error)),
            };
            if events.is_empty() {
                return Ok(Ok(()));
            }
            events
                .iter()
                .for_each(|event| self.names.learn_event(event));
            for event in events {
                self.print_event(&event)?;
            }
        }
    }

    fn print_event(&mut self, event: &Event) -> io::Result<()> {
        self.names.learn_event(event);
        if self.names.get(event.host).is_none()
            && let Ok(table) = self.vm.config()
        {
            self.names.learn_table(&table);
        }
        self.next = event.number + 1;
        let line = if self.json {
            format!("{}\n", value(&self.names, event))
        } else {
            text(&self.names, event)
        };
        Terminal.print(line.as_bytes())
    }
}

/// Names of hosts, including those that have left.
#[derive(Clone, Debug, Default)]
struct HostNames(BTreeMap<HostId, String>);

impl HostNames {
    /// Adds the names of a host table.
    fn learn_table(&mut self, table: &HostTable) {
        self.0
            .extend(table.hosts.iter().map(|host| (host.id, host.name.clone())));
    }

    /// Adds the name that an event contains, if any.
    fn learn_event(&mut self, event: &Event) {
        if let EventKind::HostAdded { host, name } | EventKind::HostGone { host, name, .. } =
            &event.kind
        {
            self.0.insert(*host, name.clone());
        }
    }

    /// Returns the name of a host, if it is known.
    fn get(&self, host: HostId) -> Option<&str> {
        self.0.get(&host).map(String::as_str)
    }
}

/// Formats one event: time, host, text.
fn text(names: &HostNames, event: &Event) -> String {
    let host = names
        .get(event.host)
        .map_or_else(|| event.host.to_string(), str::to_string);
    format!(
        "{} {host} {}\n",
        time(event.at),
        event.kind.with_host_names(|host| names.get(host))
    )
}

/// Returns the value of an event. The key `kind` has the event record as daemons exchange it.
fn value(names: &HostNames, event: &Event) -> Value {
    json!({
        "number": event.number,
        "at_us": event.at.0,
        "time": time(event.at),
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
    use sempa_proto::migration::{Failure, MigrationCause, Step};
    use sempa_proto::{Micros, Tid};

    fn host_names() -> HostNames {
        let mut names = HostNames::default();
        names.learn_table(&table());
        names
    }

    /// `events` accepts a start number and `--follow`.
    #[test]
    fn events_options_parse() {
        let read = |words: &[&str]| {
            parse(
                &words
                    .iter()
                    .map(|word| word.to_string())
                    .collect::<Vec<_>>(),
            )
            .map_err(|error| error.to_string())
        };
        let events = |from, follow| Ok(EventsCommand { from, follow });
        assert_eq!(read(&[]), events(0, false));
        assert_eq!(read(&["--from", "7", "--follow"]), events(7, true));
        assert_eq!(read(&["--from=7"]), events(7, false));
        assert_eq!(read(&["--from"]), Err("events: wrong #args".into()));
        assert_eq!(
            read(&["--from", "x"]),
            Err("events: x is not a number".into())
        );
    }

    #[test]
    fn event_is_one_line() {
        let (from, to) = (HostId::MASTER, HostId::new(3).expect("3"));
        let kind = EventKind::MigrationFailed {
            id: sempa_proto::MigrationId(4),
            tid: Tid::from_raw(0x40002),
            from,
            to,
            cause: MigrationCause::Requested {
                requested_by: Tid::from_raw(0x40001),
            },
            step: Step::Dump,
            why: Failure::Killed { signal: 9 },
        };
        let happened = Event {
            number: 7,
            at: Micros(1_795_253_641_123_456),
            host: from,
            kind,
        };
        assert_eq!(
            text(&host_names(), &happened),
            "2026-11-21T09:34:01.123Z ha1 m4: t40002 was not migrated from ha1 to ha3 (requested by t40001): dump failed: \
             the engine was killed by signal 9\n"
        );
    }

    /// A host that has left keeps its name in the log.
    #[test]
    fn departed_host_keeps_name_in_log() {
        let id = HostId::new(7).expect("7");
        let gone = EventKind::HostGone {
            host: id,
            name: "h7".into(),
            why: "deleted".into(),
        };
        let before = Event {
            number: 1,
            at: Micros(0),
            host: id,
            kind: EventKind::HostVacated { host: id },
        };
        let mut names = host_names();
        assert!(text(&names, &before).starts_with("1970-01-01T00:00:00.000Z host 7 "));
        names.learn_event(&Event {
            number: 2,
            at: Micros(0),
            host: HostId::MASTER,
            kind: gone,
        });
        assert!(text(&names, &before).starts_with("1970-01-01T00:00:00.000Z h7 "));
    }

    /// An event has its text and its record.
    #[test]
    fn events_have_text_and_record() {
        let kind = EventKind::HostVacated {
            host: HostId::MASTER,
        };
        let value = value(
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
