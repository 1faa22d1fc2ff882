//! The daemon's log: lines in PVM's format, in a file of limited length.
//!
//! A separate thread writes the file, so a full or slow disk never delays the daemon. The lines are
//! the events of this process ([`LogThread::collect_events`]) and the output of tasks
//! ([`Log::write_task_output`]). Where systemd runs, the events are also sent to its journal.

use super::sys::local_time;
use pvmd_machine::io::{LogLevel, LogSubject};
use sempa_logging::{Filter, QueuedItems, Record, WriteQueue, WriteThread};
use sempa_proto::{HostId, Tid};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Default size limit of the log, as in PVM; `PVMDLOGMAX` overrides it.
pub(crate) const LOG_BYTES_MAX_DEFAULT: u64 = 1_000_000;
/// Time limit for writing the last lines when the daemon ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of lines in the queue for the disk; further lines are counted and dropped.
const QUEUED_LINES_MAX: usize = 4096;

/// Sends lines to the log thread. A clone is cheap and uses the same thread.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    lines: WriteQueue<Vec<u8>>,
    host: HostId,
}

/// The log thread and, where journald runs, the thread that writes to the journal.
#[derive(Debug)]
pub(crate) struct LogThread {
    thread: WriteThread<Vec<u8>>,
    journal: Option<WriteThread<Record>>,
}

impl LogThread {
    /// Starts to write the events of this process as lines of the log and, where journald runs, as
    /// entries of the journal.
    pub(crate) fn collect_events(&mut self, log: &Log) {
        let (filter, filter_error) = Filter::from_env();
        let daemon_tid_text = log.host.daemon_tid().to_string();
        // On a host without systemd there is no journal, and only the log is written.
        let journal_connection =
            sempa_logging::connect_journal(daemon_tid_text, filter.max_level());
        let (journal, journal_thread) = journal_connection.ok().unzip();
        self.journal = journal_thread;
        sempa_logging::install_subscriber(log.clone().subscriber(filter, journal), filter_error);
    }

    /// Waits until all lines are written, at most [`FLUSH_TIMEOUT`]: a disk that does not respond
    /// must not delay the daemon's end. Lines that are written after this call are dropped.
    pub(crate) fn join(self) {
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        self.thread.join(deadline);
        if let Some(journal) = self.journal {
            journal.join(deadline);
        }
    }
}

/// Emits a line of the state machine as an event. The subject of the line becomes a field.
pub(crate) fn log_machine_line(level: LogLevel, subject: Option<LogSubject>, text: &str) {
    let (mut migration, mut checkpoint, mut job) = (None, None, None);
    match subject {
        Some(LogSubject::Migration(id)) => migration = Some(tracing::field::display(id)),
        Some(LogSubject::Checkpoint(name)) => checkpoint = Some(tracing::field::display(name)),
        Some(LogSubject::Job(tid)) => job = Some(tracing::field::display(tid)),
        None => {}
    }
    // Each level needs its own call site, because the level of a call site is constant.
    macro_rules! emit {
        ($level:ident) => {
            tracing::$level!(target: "pvmd::machine", migration, checkpoint, job, "{text}")
        };
    }
    match level {
        LogLevel::Error => emit!(error),
        LogLevel::Warning => emit!(warn),
        LogLevel::Info => emit!(info),
        LogLevel::Debug => emit!(debug),
    }
}

/// Opens the log at `path` for appending, and starts the thread that writes the log. The file grows
/// to about `bytes_max` bytes.
///
/// # Errors
/// The file cannot be opened or the thread cannot be started; the daemon must not run without a
/// log.
pub(crate) fn open_log(
    path: &Path,
    host: HostId,
    bytes_max: u64,
) -> std::io::Result<(Log, LogThread)> {
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)?;
    let write_queued_lines = move |lines| write_lines(file, &lines, bytes_max);
    let (lines, thread) = sempa_logging::spawn_writer("log", QUEUED_LINES_MAX, write_queued_lines)?;
    let journal = None;
    Ok((Log { lines, host }, LogThread { thread, journal }))
}

fn write_lines(mut file: File, lines: &QueuedItems<Vec<u8>>, bytes_max: u64) {
    let mut written_bytes = file.metadata().map(|m| m.len()).unwrap_or(0);
    let mut limit_reached = written_bytes >= bytes_max;
    while let Some(line) = lines.wait_for_item() {
        if limit_reached {
            continue;
        }
        let dropped_count = lines.take_dropped();
        let mut text = line;
        if dropped_count > 0 {
            text.extend_from_slice(format!("*** {dropped_count} lines were dropped\n").as_bytes());
        }
        written_bytes += text.len() as u64;
        limit_reached = written_bytes >= bytes_max;
        if limit_reached {
            text.extend_from_slice(b"*** logging truncated\n");
        }
        // A failure cannot be reported anywhere. The daemon continues without a log.
        let _ = file.write_all(&text);
    }
}

impl Log {
    /// Returns the subscriber that writes events to the log and to the journal. Lines of warnings
    /// and errors begin with the name of the level.
    fn subscriber(
        self,
        filter: Filter,
        journal: Option<WriteQueue<Record>>,
    ) -> impl tracing::Subscriber + Send + Sync {
        sempa_logging::subscriber(filter, move |record: Record| {
            self.write_line(format!("{}{}", record.level_prefix(), record.line()));
            if let Some(journal) = &journal {
                journal.push(record);
            }
        })
    }

    /// Queues one line of the daemon itself.
    fn write_line(&self, text: impl AsRef<str>) {
        self.lines.push(
            format!(
                "{} {}\n",
                self.line_prefix(),
                text.as_ref().trim_end().replace('\n', " / ")
            )
            .into_bytes(),
        );
    }

    /// Queues output of a task that no other task collects. Each line is prefixed with the task's
    /// id. A newline is added to a partial line.
    pub(crate) fn write_task_output(&self, tid: Tid, bytes: &[u8]) {
        let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        for line in bytes.split(|b| *b == b'\n') {
            let mut prefixed_line = format!("{} [{tid}] ", self.line_prefix()).into_bytes();
            prefixed_line.extend_from_slice(line);
            prefixed_line.push(b'\n');
            self.lines.push(prefixed_line);
        }
    }

    fn line_prefix(&self) -> String {
        let unix_seconds = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        let (month, day, hour, minute, second) =
            local_time(i64::try_from(unix_seconds).unwrap_or(0));
        format!(
            "[{}] {month:02}/{day:02} {hour:02}:{minute:02}:{second:02}",
            self.host.daemon_tid()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Log lines have PVM's format. The file stops growing at its size limit.
    #[test]
    fn log_has_pvm_format_and_bounded_size() {
        let path = std::env::temp_dir().join(format!("pvmd-log-{}", std::process::id()));
        let (log, thread) = open_log(&path, HostId::MASTER, 200).expect("a log");
        log.write_line("ready");
        log.write_task_output(Tid::from_raw(0x40002), b"one\ntwo");
        for _ in 0..50 {
            log.write_line("more");
        }
        drop(log);
        thread.join();
        let text = std::fs::read_to_string(&path).expect("written");
        std::fs::remove_file(&path).expect("ours");
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].starts_with("[t80040000] ") && lines[0].ends_with(" ready"),
            "{text}"
        );
        assert!(
            lines[1].ends_with("[t40002] one") && lines[2].ends_with("[t40002] two"),
            "{text}"
        );
        assert_eq!(lines.last(), Some(&"*** logging truncated"));
        assert!(text.len() < 300);
    }

    /// Events become lines in PVM's format. Lines of warnings and errors begin with the level. A
    /// line contains the id of its migration once, even if both the span of the event and its text
    /// contain the id.
    #[test]
    fn events_are_lines_in_pvm_format() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("log");
        let (log, thread) = open_log(&path, HostId::MASTER, LOG_BYTES_MAX_DEFAULT).expect("a log");
        let filter = Filter::parse("info").expect("a filter");
        let migration = sempa_proto::MigrationId(5);
        tracing::subscriber::with_default(log.clone().subscriber(filter, None), || {
            tracing::info!("ready");
            let span = tracing::info_span!("migration", id = %migration);
            span.in_scope(|| tracing::warn!("slow\nnetwork"));
            span.in_scope(|| tracing::info!("{migration}: sent"));
            let subject = Some(LogSubject::Migration(migration));
            log_machine_line(LogLevel::Error, subject, "lost");
            tracing::debug!("not logged");
        });
        thread.join();
        let text = std::fs::read_to_string(&path).expect("written");
        let texts: Vec<&str> = text
            .lines()
            .map(|line| line.splitn(4, ' ').nth(3).expect("a text"))
            .collect();
        assert_eq!(
            texts,
            [
                "ready",
                "warning: slow / network (migration m5)",
                "m5: sent",
                "error: lost (migration m5)",
            ]
        );
        assert!(text.lines().all(|line| line.starts_with("[t80040000] ")));
    }
}
