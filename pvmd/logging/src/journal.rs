//! Records for the journal of systemd.
//!
//! A separate thread sends the records: the journal's socket blocks while journald is slow or
//! stopped, and the daemon must not wait for journald. The thread has its own subscriber with the
//! layer of `tracing-journald`, and emits each record as a new event to this subscriber.

use crate::queue::{QueuedItems, WriteQueue, WriteThread, spawn_writer};
use crate::record::Record;
use std::io;
use tracing::level_filters::LevelFilter;
use tracing::{Level, Subscriber};
use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;

/// Datagram socket on which journald receives records.
const JOURNAL_SOCKET: &str = "/run/systemd/journal/socket";
/// Maximum number of records in the queue; further records are counted and dropped.
const QUEUED_RECORDS_MAX: usize = 1024;
/// Prefix of the names of the journal's fields.
const FIELD_PREFIX: &str = "SEMPA";
/// Target of the events that the journal's thread emits.
const JOURNAL_TARGET: &str = "sempa_journal";

/// Starts the thread that sends records to the journal. Returns the queue of the thread and a
/// handle of the thread. Each entry of the journal has the field `SEMPA_HOST` with the value
/// `daemon_tid_text`; `max_level` is the most verbose level of the records.
///
/// # Errors
/// There is no journal on this host, or the thread cannot be started.
pub fn connect_journal(
    daemon_tid_text: String,
    max_level: LevelFilter,
) -> io::Result<(WriteQueue<Record>, WriteThread<Record>)> {
    std::fs::metadata(JOURNAL_SOCKET)?;
    spawn_writer("journal", QUEUED_RECORDS_MAX, move |records| {
        // `layer` sends an empty entry when it connects, so `layer` may block and is called in this
        // thread.
        if let Ok(layer) = tracing_journald::layer() {
            let subscriber = journal_subscriber(layer, &daemon_tid_text, max_level);
            tracing::subscriber::with_default(subscriber, || send_records(&records));
        }
    })
}

fn journal_subscriber(
    layer: tracing_journald::Layer,
    daemon_tid_text: &str,
    max_level: LevelFilter,
) -> impl Subscriber + Send + Sync {
    let layer = layer
        .with_field_prefix(Some(FIELD_PREFIX.into()))
        .with_custom_fields([(format!("{FIELD_PREFIX}_HOST"), daemon_tid_text)])
        .with_priority_mappings(PriorityMappings {
            info: Priority::Informational,
            debug: Priority::Debug,
            ..PriorityMappings::new()
        });
    // Without the filter, the thread's subscriber would enable every event of the process.
    let filter = Targets::new().with_target(JOURNAL_TARGET, max_level);
    tracing_subscriber::registry().with(layer).with(filter)
}

fn send_records(records: &QueuedItems<Record>) {
    while let Some(record) = records.wait_for_item() {
        let dropped_count = records.take_dropped();
        if dropped_count > 0 {
            tracing::warn!(target: JOURNAL_TARGET, "{dropped_count} lines were not written in time");
        }
        emit_record(&record);
    }
}

/// Emits a record to the journal's subscriber, with the record's ids as fields.
fn emit_record(record: &Record) {
    let Record {
        level,
        target,
        text,
        context,
    } = record;
    let module = target.as_str();
    let [migration, checkpoint, job] = context.each_ref().map(Option::as_deref);
    // Each level needs its own call site, because the level of a call site is constant.
    macro_rules! emit_at {
        ($level:expr) => {
            tracing::event!(target: JOURNAL_TARGET, $level, module, migration, checkpoint, job, "{text}")
        };
    }
    match *level {
        Level::ERROR => emit_at!(Level::ERROR),
        Level::WARN => emit_at!(Level::WARN),
        Level::INFO => emit_at!(Level::INFO),
        Level::DEBUG => emit_at!(Level::DEBUG),
        Level::TRACE => emit_at!(Level::TRACE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Filter;
    use crate::queue::write_queue;
    use crate::record::records_of;

    /// A record that is emitted as a new event has the same level, text and ids. Dropped records
    /// are reported before this record.
    #[test]
    fn emitted_record_keeps_level_text_and_ids() {
        let record = Record {
            level: Level::WARN,
            target: "pvmd::shell::images".into(),
            text: "slow".into(),
            context: [Some("m5".into()), None, Some("t40001".into())],
        };
        let (queue, queued_items) = write_queue(1);
        (0..4).for_each(|_| queue.push(record.clone()));
        drop(queue);
        let records = records_of(Filter::default(), || send_records(&queued_items));
        assert_eq!(records[0].text, "3 lines were not written in time");
        assert_eq!(records[1].level, Level::WARN);
        assert_eq!(
            records[1].text,
            "slow module=\"pvmd::shell::images\"".replace('"', "")
        );
        assert_eq!(records[1].context, record.context);
    }
}
