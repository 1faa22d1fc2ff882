//! The daemon's log: lines in PVM's format, in a file of limited length.
//!
//! A separate thread writes the file, so a full or slow disk never delays the daemon.

use super::sys::local_time;
use sempa_proto::{HostId, Tid};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Default size limit of the log (PVM's own); `PVMDLOGMAX` overrides it.
pub(crate) const LOG_BYTES_MAX: u64 = 1_000_000;
/// Time limit for writing the last lines when the daemon ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of lines in the queue for the disk; further lines are counted and dropped.
const QUEUED_LINES_MAX: usize = 4096;

/// Sends lines to the log thread; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    line_sender: SyncSender<Vec<u8>>,
    dropped_lines: Arc<AtomicU64>,
    host: HostId,
}

/// The log thread. It ends when all [`Log`]s are dropped.
#[derive(Debug)]
pub(crate) struct LogThread(JoinHandle<()>);

impl LogThread {
    /// Waits until everything is written, at most [`FLUSH_TIMEOUT`]: a disk that hangs must not
    /// delay the daemon's end.
    pub(crate) fn join(self) {
        let until = Instant::now() + FLUSH_TIMEOUT;
        while !self.0.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Opens the log at `path` for appending. The file grows to about `bytes_max`.
///
/// # Errors
/// The file cannot be opened; the daemon must not run without a log.
pub(crate) fn open(path: &Path, host: HostId, bytes_max: u64) -> std::io::Result<(Log, LogThread)> {
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)?;
    let (lines, receiver) = sync_channel(QUEUED_LINES_MAX);
    let dropped = Arc::new(AtomicU64::new(0));
    let log = Log {
        line_sender: lines,
        dropped_lines: dropped.clone(),
        host,
    };
    let thread = std::thread::Builder::new()
        .name("log".into())
        .spawn(move || write_lines(file, &receiver, &dropped, bytes_max))?;
    Ok((log, LogThread(thread)))
}

fn write_lines(mut file: File, lines: &Receiver<Vec<u8>>, dropped: &AtomicU64, bytes_max: u64) {
    let mut written = file.metadata().map(|m| m.len()).unwrap_or(0);
    let mut full = written >= bytes_max;
    for line in lines {
        if full {
            continue;
        }
        let missed = dropped.swap(0, Ordering::Relaxed);
        let mut text = line;
        if missed > 0 {
            text.extend_from_slice(
                format!("*** {missed} lines were not written in time\n").as_bytes(),
            );
        }
        written += text.len() as u64;
        full = written >= bytes_max;
        if full {
            text.extend_from_slice(b"*** logging truncated\n");
        }
        // A failure cannot be reported anywhere; the daemon continues without a log.
        let _ = file.write_all(&text);
    }
}

impl Log {
    /// Writes one line of the daemon itself.
    pub(crate) fn write_line(&self, text: impl AsRef<str>) {
        self.enqueue(
            format!(
                "{} {}\n",
                self.line_prefix(),
                text.as_ref().trim_end().replace('\n', " / ")
            )
            .into_bytes(),
        );
    }

    /// Writes output of a task that no other task collects. Each line is prefixed with the task's
    /// id; a partial line gets a newline.
    pub(crate) fn task_output(&self, tid: Tid, bytes: &[u8]) {
        let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        for line in bytes.split(|b| *b == b'\n') {
            let mut out = format!("{} [{tid}] ", self.line_prefix()).into_bytes();
            out.extend_from_slice(line);
            out.push(b'\n');
            self.enqueue(out);
        }
    }

    fn line_prefix(&self) -> String {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        let (month, day, hour, minute, second) = local_time(i64::try_from(now).unwrap_or(0));
        format!(
            "[{}] {month:02}/{day:02} {hour:02}:{minute:02}:{second:02}",
            self.host.daemon_tid()
        )
    }

    fn enqueue(&self, line: Vec<u8>) {
        if self.line_sender.try_send(line).is_err() {
            self.dropped_lines.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Log lines have PVM's format, and the file stops growing at its limit.
    #[test]
    fn log_has_pvm_format_and_bounded_size() {
        let path = std::env::temp_dir().join(format!("pvmd-log-{}", std::process::id()));
        let (log, thread) = open(&path, HostId::MASTER, 200).expect("a log");
        log.write_line("ready");
        log.task_output(Tid::from_raw(0x40002), b"one\ntwo");
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
}
