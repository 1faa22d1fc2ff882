//! Progress of long operations: shows what is under way on standard error, and ends the wait when
//! the user interrupts the command.
//!
//! At a terminal, one line is shown and rewritten. Otherwise an operation that takes longer than
//! [`LONG_WAIT`] prints a line for each step.

use crate::clock::unix_micros;
use crate::output::terminal::Terminal;
use crate::virtual_machine::{VirtualMachine, next_event_number};
use libpvm::Error;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use sempa_proto::Micros;
use sempa_proto::event::Event;
use sempa_proto::task::{Reply, Request};
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Time after which an operation is long enough for lines in a log.
const LONG_WAIT: Duration = Duration::from_secs(2);

/// Maximum number of events that are read at once. Events that occurred before the first reading
/// are found among the last of them.
const EVENTS_PER_READ: u32 = 256;

/// The progress of one operation.
pub(crate) trait Progress {
    /// Name of the operation with its subject, such as "migrate t40003".
    fn title(&self) -> String;
    /// Handles an event of the log. Returns the step that the event completes; `None` if the event
    /// does not belong to the operation.
    fn handle_event(&mut self, event: &Event) -> Option<String>;
    /// Asks for what the log does not report.
    fn refresh(&mut self, _machine: &dyn VirtualMachine) {}
    /// Describes what is under way.
    fn current_step(&self) -> String;
    /// States what happens to the operation when nobody waits for its end any more.
    fn without_waiting(&self) -> &'static str;
}

/// Sends a request to the daemon and waits for the reply. Shows the progress if `is_shown` is
/// true.
///
/// # Errors
/// Fails if the daemon refuses the request.
pub(crate) fn ask_showing_progress(
    machine: &dyn VirtualMachine,
    request: Request,
    progress: &mut dyn Progress,
    is_shown: bool,
) -> Result<Waited, Error> {
    let interrupts = Interrupts::catch();
    let mut display = Display::new(is_shown);
    let mut events = EventReader::new();
    let reply = machine.ask_while(request, &mut || {
        if interrupts.is_pending() {
            return ControlFlow::Break(());
        }
        if display.is_shown {
            for event in events.read(machine) {
                if let Some(step) = progress.handle_event(&event) {
                    display.add_step(&progress.title(), &step);
                }
            }
            if display.shows_current_step() {
                progress.refresh(machine);
            }
            display.show(&progress.title(), &progress.current_step());
        }
        ControlFlow::Continue(())
    });
    display.clear();
    Ok(match reply? {
        Some(reply) => Waited::Reply(reply),
        None => Waited::Interrupted(format!(
            "{}: interrupted; {}",
            progress.title(),
            progress.without_waiting()
        )),
    })
}

/// The progress of an operation whose steps the log does not report.
pub(crate) struct PlainProgress {
    pub(crate) title: String,
    /// The only step of the operation.
    pub(crate) step: &'static str,
    pub(crate) without_waiting: &'static str,
}

impl Progress for PlainProgress {
    fn title(&self) -> String {
        self.title.clone()
    }

    fn handle_event(&mut self, _event: &Event) -> Option<String> {
        None
    }

    fn current_step(&self) -> String {
        self.step.to_string()
    }

    fn without_waiting(&self) -> &'static str {
        self.without_waiting
    }
}

/// How the wait for a reply ended.
pub(crate) enum Waited {
    Reply(Reply),
    /// The user has interrupted the command. Contains the line that states what happens to the
    /// operation.
    Interrupted(String),
}

/// Reads the events of the log that occur from now on.
struct EventReader {
    /// Events before this time are not returned.
    started_at: Micros,
    /// Number of the next event; `None` before the first reading.
    next_number: Option<u64>,
}

impl EventReader {
    fn new() -> Self {
        Self {
            started_at: unix_micros(),
            next_number: None,
        }
    }

    /// Returns the new events. An error of the virtual machine is reported by the operation
    /// itself.
    fn read(&mut self, machine: &dyn VirtualMachine) -> Vec<Event> {
        let number = match self.next_number {
            Some(number) => number,
            None => next_event_number(machine).saturating_sub(u64::from(EVENTS_PER_READ)),
        };
        let events = machine.events(number, EVENTS_PER_READ).unwrap_or_default();
        self.next_number = Some(events.last().map_or(number, |event| event.number + 1));
        let is_new = |event: &Event| event.at >= self.started_at;
        events.into_iter().filter(is_new).collect()
    }
}

/// The progress on standard error.
struct Display {
    is_shown: bool,
    is_terminal: bool,
    started_at: Instant,
    /// Steps of a log that are not printed yet, because the operation is still short.
    pending_steps: Vec<String>,
    has_printed: bool,
}

impl Display {
    fn new(is_shown: bool) -> Self {
        Self {
            is_shown,
            is_terminal: io::stderr().is_terminal(),
            started_at: Instant::now(),
            pending_steps: Vec::new(),
            has_printed: false,
        }
    }

    fn add_step(&mut self, title: &str, step: &str) {
        self.pending_steps.push(format!("{title}: {step}"));
    }

    /// True if the current step is shown now or later. A log shows it at most once.
    fn shows_current_step(&self) -> bool {
        self.is_terminal || !self.has_printed
    }

    fn show(&mut self, title: &str, current_step: &str) {
        let elapsed = self.started_at.elapsed();
        let line = format!("{title}: {current_step} ({} s)", elapsed.as_secs());
        if self.is_terminal {
            // A failure to write to the terminal concerns only this display.
            let _ = write!(io::stderr().lock(), "\r\x1b[K{line}");
            self.has_printed = true;
            return;
        }
        if elapsed < LONG_WAIT {
            return;
        }
        let has_steps = !self.pending_steps.is_empty();
        for step in self.pending_steps.drain(..) {
            Terminal.print_error(&step);
        }
        if !self.has_printed && !has_steps {
            Terminal.print_error(&line);
        }
        self.has_printed = true;
    }

    /// Removes the line from the terminal.
    fn clear(&mut self) {
        if self.is_terminal && self.has_printed {
            let _ = write!(io::stderr().lock(), "\r\x1b[K");
        }
    }
}

/// Catches SIGINT while the value exists. The signal is then blocked in this thread; the threads
/// of the library always block it.
struct Interrupts {
    /// `None` if the kernel offers no descriptor. The signal then has its usual effect.
    descriptor: Option<SignalFd>,
    /// The earlier signal mask of the thread.
    earlier_mask: SigSet,
}

impl Interrupts {
    fn catch() -> Self {
        let mut interrupt = SigSet::empty();
        interrupt.add(Signal::SIGINT);
        let earlier_mask = SigSet::thread_get_mask().unwrap_or_else(|_| SigSet::empty());
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let descriptor = SignalFd::with_flags(&interrupt, flags).ok();
        let descriptor = descriptor.filter(|_| interrupt.thread_block().is_ok());
        let interrupts = Self {
            descriptor,
            earlier_mask,
        };
        // An interrupt that was typed before the operation does not end the operation.
        while interrupts.is_pending() {}
        interrupts
    }

    /// Takes one interrupt. Returns false if there is none.
    fn is_pending(&self) -> bool {
        let signal = self.descriptor.as_ref().map(SignalFd::read_signal);
        matches!(signal, Some(Ok(Some(_))))
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        // The mask was valid before.
        let _ = self.earlier_mask.thread_set_mask();
    }
}
