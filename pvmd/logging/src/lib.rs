//! The logging of the daemon and its programs: `tracing` events become lines.
//!
//! 1. [`Filter`] decides by [`FILTER_VARIABLE`] which events are logged.
//! 2. [`subscriber`] turns each of these events into a [`Record`]: level, text, and the migration,
//!    checkpoint or job that the event or its spans name.
//! 3. A function of the caller writes the record. The daemon writes to its log and to the journal
//!    ([`connect_journal`]); the other programs write to standard error ([`init_stderr`]).
//!
//! A span or event names its migration, checkpoint or job by one of [`CONTEXT_NAMES`]: the span has
//! this name and a field `id`, or the event has a field of this name. All other spans are ignored.

mod filter;
mod journal;
mod queue;
mod record;

pub use filter::{DEFAULT_FILTER, FILTER_VARIABLE, Filter, FilterError};
pub use journal::connect_journal;
pub use queue::{QueuedItems, WriteQueue, WriteThread, spawn_writer};
pub use record::{CONTEXT_NAMES, Record};

use std::io::Write;
use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::SubscriberExt;

/// Returns a subscriber that passes a record of each event to `write`.
///
/// `write` runs in the thread that emits the event, so it must not block.
pub fn subscriber(
    filter: Filter,
    write: impl Fn(Record) + Send + Sync + 'static,
) -> impl Subscriber + Send + Sync {
    tracing_subscriber::registry().with(record::RecordLayer(write).with_filter(filter))
}

/// Makes `subscriber` receive the events of this process. If `filter_error` is `Some`, logs this
/// text as the first line; the text reports an invalid filter.
///
/// Must be called once, before the first event.
pub fn install_subscriber(subscriber: impl Subscriber + Send + Sync, filter_error: Option<String>) {
    // Fails only if the process has a subscriber already; that subscriber then receives the events.
    let _ = tracing::subscriber::set_global_default(subscriber);
    if let Some(filter_error) = filter_error {
        tracing::error!("{filter_error}");
    }
}

/// Writes all events of this process as lines `program: text` to standard error.
///
/// Must be called once, before the first event. If the filter in the environment is invalid, the
/// first line reports the error.
pub fn init_stderr(program: &'static str) {
    let (filter, filter_error) = Filter::from_env();
    let write_line = move |record: Record| {
        let line = format!("{program}: {}\n", record.line());
        // One system call writes the whole line. The program continues if standard error is closed.
        let _ = std::io::stderr().write_all(line.as_bytes());
    };
    install_subscriber(subscriber(filter, write_line), filter_error);
}
