//! The logging of the daemon and its programs: `tracing` events become lines.
//!
//! 1. [`Filter`] decides by [`FILTER_VARIABLE`] which events are logged.
//! 2. [`subscriber`] turns each of these events into a [`Record`]: level, text, and the migration,
//!    checkpoint or job that the event or its spans name.
//! 3. A function of the caller writes the record: the daemon to its log and to the journal
//!    ([`connect_journal`]), the other programs to standard error ([`init_stderr`]).
//!
//! Spans and events name their subject by [`CONTEXT_NAMES`]: a span of that name with a field `id`,
//! or a field of that name in the event. Other spans are ignored.

mod filter;
mod journal;
mod queue;
mod record;

pub use filter::{DEFAULT_FILTER, FILTER_VARIABLE, Filter};
pub use journal::connect_journal;
pub use queue::{QueuedItems, WriteQueue, WriteThread, spawn_writer};
pub use record::{CONTEXT_NAMES, Record};

use std::io::Write;
use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::SubscriberExt;

/// Returns a subscriber that passes a record of each event to `write`.
///
/// `write` runs in the thread of the event, so it must not block.
pub fn subscriber(
    filter: Filter,
    write: impl Fn(Record) + Send + Sync + 'static,
) -> impl Subscriber + Send + Sync {
    tracing_subscriber::registry().with(record::RecordLayer(write).with_filter(filter))
}

/// Makes `subscriber` receive the events of this process. `complaint` reports an invalid filter.
///
/// Call this once, before the first event.
pub fn install(subscriber: impl Subscriber + Send + Sync, complaint: Option<String>) {
    // Fails only if there is a subscriber already, which then gets the events.
    let _ = tracing::subscriber::set_global_default(subscriber);
    if let Some(complaint) = complaint {
        tracing::error!("{complaint}");
    }
}

/// Makes all events of this process lines `program: text` on standard error.
///
/// Call this once, before the first event. If the filter in the environment is invalid, the first
/// line reports it.
pub fn init_stderr(program: &'static str) {
    let (filter, complaint) = Filter::from_env();
    let write = move |record: Record| {
        let line = format!("{program}: {}\n", record.line());
        // One write per line; a closed standard error is no reason to stop.
        let _ = std::io::stderr().write_all(line.as_bytes());
    };
    install(subscriber(filter, write), complaint);
}
