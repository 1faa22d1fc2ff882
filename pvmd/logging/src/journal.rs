//! Records for the journal of systemd.
//!
//! A separate thread sends them, because the journal's socket blocks while journald is slow or
//! stopped, and the daemon must not wait for it. The thread has a subscriber of its own with the
//! layer of `tracing-journald`, and emits each record again there.

use crate::record::Record;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::level_filters::LevelFilter;
use tracing::{Level, Subscriber};
use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;

/// Datagram socket on which journald receives records.
const SOCKET: &str = "/run/systemd/journal/socket";
/// Maximum number of records in the queue; further records are counted and dropped.
const QUEUED_RECORDS_MAX: usize = 1024;
/// Prefix of the journal's fields.
const FIELD_PREFIX: &str = "SEMPA";
/// Target of the events of the journal's thread.
const TARGET: &str = "sempa_journal";
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Sends records to the journal's thread; cheap to clone.
#[derive(Clone, Debug)]
pub struct Journal {
    /// `None` ends the thread.
    records: SyncSender<Option<Record>>,
    dropped: Arc<AtomicU64>,
}

/// The thread that sends to the journal.
#[derive(Debug)]
pub struct JournalThread {
    records: SyncSender<Option<Record>>,
    thread: JoinHandle<()>,
}

impl Journal {
    /// Starts the thread. Each entry has the field `SEMPA_HOST` with this value; `max_level` is the
    /// most verbose level of the records.
    ///
    /// # Errors
    /// There is no journal on this host, or the thread cannot be started.
    pub fn connect(host: String, max_level: LevelFilter) -> io::Result<(Journal, JournalThread)> {
        std::fs::metadata(SOCKET)?;
        let (records, queue) = sync_channel(QUEUED_RECORDS_MAX);
        let dropped = Arc::new(AtomicU64::new(0));
        let journal = Journal {
            records: records.clone(),
            dropped: dropped.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("journal".into())
            .spawn(move || {
                // Connecting sends an empty entry, so it may block, too.
                if let Ok(layer) = tracing_journald::layer() {
                    let subscriber = journal_subscriber(layer, &host, max_level);
                    let send = || send_records(&queue, &dropped);
                    tracing::subscriber::with_default(subscriber, send);
                }
            })?;
        Ok((journal, JournalThread { records, thread }))
    }

    /// Queues a record. If the queue is full, counts the record as dropped.
    pub fn write(&self, record: Record) {
        if self.records.try_send(Some(record)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl JournalThread {
    /// Waits until all records are sent, at most until `deadline`.
    pub fn join(self, deadline: Instant) {
        let mut ended = self.records.try_send(None).is_ok();
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(POLL_INTERVAL);
            ended = ended || self.records.try_send(None).is_ok();
        }
    }
}

fn journal_subscriber(
    layer: tracing_journald::Layer,
    host: &str,
    max_level: LevelFilter,
) -> impl Subscriber + Send + Sync {
    let layer = layer
        .with_field_prefix(Some(FIELD_PREFIX.into()))
        .with_custom_fields([(format!("{FIELD_PREFIX}_HOST"), host)])
        .with_priority_mappings(PriorityMappings {
            info: Priority::Informational,
            debug: Priority::Debug,
            ..PriorityMappings::new()
        });
    // Without this filter the thread's subscriber would enable every event of the process.
    let filter = Targets::new().with_target(TARGET, max_level);
    tracing_subscriber::registry().with(layer).with(filter)
}

fn send_records(queue: &Receiver<Option<Record>>, dropped: &AtomicU64) {
    while let Ok(Some(record)) = queue.recv() {
        let missed = dropped.swap(0, Ordering::Relaxed);
        if missed > 0 {
            tracing::warn!(target: TARGET, "{missed} lines were not written in time");
        }
        emit(&record);
    }
}

/// Emits a record with its ids as fields.
fn emit(record: &Record) {
    let Record {
        level,
        target,
        text,
        context,
    } = record;
    let module = target.as_str();
    let [migration, checkpoint, job] = context.each_ref().map(Option::as_deref);
    // The level is part of the call site.
    macro_rules! emit_at {
        ($level:expr) => {
            tracing::event!(target: TARGET, $level, module, migration, checkpoint, job, "{text}")
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
    use crate::{Filter, subscriber};
    use std::sync::Mutex;

    /// A record that is emitted again has the same level, text and ids.
    #[test]
    fn emitted_record_keeps_level_text_and_ids() {
        let records = Arc::new(Mutex::new(Vec::new()));
        let sink = records.clone();
        let write = move |record| sink.lock().expect("lock").push(record);
        let record = Record {
            level: Level::WARN,
            target: "pvmd::shell::images".into(),
            text: "slow".into(),
            context: [Some("m5".into()), None, Some("t40001".into())],
        };
        let (sender, queue) = sync_channel(4);
        sender.send(Some(record.clone())).expect("room");
        sender.send(None).expect("room");
        tracing::subscriber::with_default(subscriber(Filter::default(), write), || {
            send_records(&queue, &AtomicU64::new(3));
        });
        let records = records.lock().expect("lock");
        assert_eq!(records[0].text, "3 lines were not written in time");
        assert_eq!(records[1].level, Level::WARN);
        assert_eq!(
            records[1].text,
            "slow module=\"pvmd::shell::images\"".replace('"', "")
        );
        assert_eq!(records[1].context, record.context);
    }
}
