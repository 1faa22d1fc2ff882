//! CRIU's log: keeps it in memory, and finds the line that explains a failure.

use crate::engine::EngineFailure;
use nix::sys::memfd::{MFdFlags, memfd_create};
use sempa_proto::migration::Failure;
use sempa_proto::text::truncate;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Stdio;

/// Maximum number of bytes of a log that are searched. Real logs are far smaller.
const LOG_BYTES_MAX: u64 = 64 << 20;
/// Maximum length in bytes of a log line that is quoted in an error message. A longer line is cut.
const QUOTED_LINE_BYTES_MAX: usize = 400;
/// Begin of a line about CRIU's code in the task, after the time stamp.
const TASK_CODE_PREFIX: &str = "pie: ";

/// Parts of CRIU's errors about memory that a restored task gets later: CRIU's source file, and the
/// mechanism of the kernel.
const MISSING_MEMORY_MARKS: [&str; 4] = ["criu/uffd.c", "uffd", "userfault", "lazy"];

/// What an error of the engine means for the task: a part of the error's text, and an explanation.
const EXPLANATIONS: [(&str, &str); 7] = [
    (
        "whose /proc doesn't belong to it",
        "the engine must mount a file system in the task, which the task may not: it has no \
         capabilities, or has confined itself (landlock, seccomp)",
    ),
    (
        "Message reply from daemon is trimmed",
        "the task may open too few descriptors (RLIMIT_NOFILE)",
    ),
    (
        "Unknown socket collected",
        "the task has a socket of a kind that the engine does not support",
    ),
    (
        "Can't make FS id",
        "two processes of the task share their working directory (clone with CLONE_FS)",
    ),
    (
        "Can't make VM id",
        "two processes of the task share their memory (vfork, or clone with CLONE_VM)",
    ),
    (
        "Can't create ghost regfile: File exists",
        "another process has just created the same temporary file; try again",
    ),
    (
        "Cannot assign requested address",
        "a socket of the task is bound to an address that this host does not have",
    ),
];

/// A log that CRIU writes to a file in memory. It needs no space in the image directory, and is
/// complete even if the disk is full.
#[derive(Debug)]
pub(super) struct MemoryLog(File);

impl MemoryLog {
    /// Creates an empty log.
    ///
    /// # Errors
    /// No file descriptor or memory is available.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(
            memfd_create(c"sempa-engine-log", MFdFlags::MFD_CLOEXEC)?.into(),
        ))
    }

    /// Returns the log as an output of a new process.
    pub(super) fn writer(&self) -> io::Result<Stdio> {
        self.0.try_clone().map(Stdio::from)
    }

    /// Writes the log to the new file `path`, which only its owner may read.
    pub(super) fn save(&self, path: &Path) -> io::Result<()> {
        let mut file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)?;
        file.write_all(&self.bytes()?)
    }

    /// Returns the contents, at most [`LOG_BYTES_MAX`]. The position at which CRIU writes does not
    /// change.
    fn bytes(&self) -> io::Result<Vec<u8>> {
        let length = self.0.metadata()?.len().min(LOG_BYTES_MAX);
        let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
        self.0.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }
}

/// How a line of the log ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineEnd {
    /// The line ends with a line break.
    Newline,
    /// The log ends within the line.
    EndOfLog,
    /// The line ends in the middle, and another line follows: the disk was full, and later had free
    /// space again.
    CutOff,
}

/// Returns the first line that contains an error, without its time stamp, and how the line ends.
/// Skips errors about resource limits, which also appear in successful runs.
fn first_error(log: impl BufRead) -> Option<(String, LineEnd)> {
    let mut log = log.take(LOG_BYTES_MAX);
    let mut line = Vec::new();
    while log
        .read_until(b'\n', &mut line)
        .is_ok_and(|bytes| bytes > 0)
    {
        let text = String::from_utf8_lossy(&line);
        if let Some(error_start) = text.find("Error").filter(|_| !text.contains("rlimit")) {
            let text = &text[error_start..];
            return Some(match find_next_line(text) {
                Some(next_line) => (truncate_line(text[..next_line].trim()), LineEnd::CutOff),
                None => (
                    truncate_line(text.trim()),
                    if text.ends_with('\n') {
                        LineEnd::Newline
                    } else {
                        LineEnd::EndOfLog
                    },
                ),
            });
        }
        line.clear();
    }
    None
}

/// Returns the byte offset in `text` at which another log line begins; `None` if there is none.
///
/// A log line begins with a time stamp like `(00.060959)`. CRIU writes the time stamp and the rest
/// of a line separately, so a full disk may also cut off the time stamp. A line about CRIU's code
/// in the task then begins with [`TASK_CODE_PREFIX`].
fn find_next_line(text: &str) -> Option<usize> {
    let is_stamp = |rest: &str| {
        let stamp_text = rest
            .strip_prefix('(')
            .and_then(|rest| rest.split_once(')'))
            .map(|(stamp_text, _)| stamp_text);
        let numbers = stamp_text.and_then(|stamp_text| stamp_text.split_once('.'));
        let is_decimal =
            |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        numbers.is_some_and(|(seconds, micros)| {
            is_decimal(seconds) && is_decimal(micros) && micros.len() == 6
        })
    };
    let time_stamp = text
        .match_indices('(')
        .map(|(offset, _)| offset)
        .find(|offset| is_stamp(&text[*offset..]));
    let offsets = [time_stamp, text.find(TASK_CODE_PREFIX)];
    offsets.into_iter().flatten().min()
}

/// Returns the error that prevents writing to the log at the moment; `None` if the log can be
/// written. Appends a whole page of line breaks to the log, because less might fit into the free
/// part of the log's last block.
fn write_error(log: &Path) -> Option<io::Error> {
    const LINE_BREAKS: [u8; 4096] = [b'\n'; 4096];
    std::fs::OpenOptions::new()
        .append(true)
        .open(log)
        .and_then(|mut log| log.write_all(&LINE_BREAKS))
        .err()
}

/// Returns the first error in a log. If the line is truncated, the cause is appended, such as a
/// full disk.
fn first_error_in_file(log: &Path) -> Option<String> {
    let (line, line_end) = first_error(BufReader::new(File::open(log).ok()?))?;
    let cause = match line_end {
        LineEnd::Newline => None,
        LineEnd::EndOfLog => write_error(log),
        // Only a disk that is temporarily full truncates a line in the middle.
        LineEnd::CutOff => Some(io::Error::from_raw_os_error(libc::ENOSPC)),
    };
    Some(cause.map_or_else(
        || line.clone(),
        |cause| format!("{line}… (the engine's log is truncated here: {cause})"),
    ))
}

/// Returns why an engine failed: the first error in its log, or else the first line of its standard
/// error. `None` if neither file contains a reason.
///
/// Known errors are followed by an explanation.
pub(super) fn failure_reason(log: &Path, stderr: &Path) -> Option<String> {
    first_error_in_file(log)
        .or_else(|| first_line(File::open(stderr).ok()?))
        .map(explain)
}

/// Returns why an engine failed, like [`failure_reason`], from logs in memory.
pub(super) fn failure_reason_in_memory(log: &MemoryLog, stderr: &MemoryLog) -> Option<String> {
    first_error(&*log.bytes().ok()?)
        .map(|(line, _)| line)
        .or_else(|| first_line(&*stderr.bytes().ok()?))
        .map(explain)
}

/// Returns the first line that is not empty and not about resource limits.
fn first_line(stderr: impl Read) -> Option<String> {
    BufReader::new(stderr)
        .take(LOG_BYTES_MAX)
        .lines()
        .map_while(Result::ok)
        .map(|line| truncate_line(line.trim()))
        .find(|line| !line.is_empty() && !line.contains("rlimit"))
}

/// Classifies a failed restore by CRIU's error. CRIU names its source file in each error. The
/// errors about missing memory come from one file, or name the mechanism. A restore that hangs may
/// wait for the process that fetches the memory.
pub(super) fn classify_restore_failure(failure: Failure) -> EngineFailure {
    let is_about_memory = match &failure {
        Failure::Engine(reason) => MISSING_MEMORY_MARKS
            .iter()
            .any(|mark| reason.contains(mark)),
        Failure::Deadline { .. } => true,
        _ => false,
    };
    if is_about_memory {
        EngineFailure::missing_memory(failure)
    } else {
        failure.into()
    }
}

/// Appends the explanation of an error, if there is one.
fn explain(error: String) -> String {
    let explanation = EXPLANATIONS
        .iter()
        .find(|(error_part, _)| error.contains(error_part));
    match explanation {
        Some((_, explanation)) => format!("{error} ({explanation})"),
        None => error,
    }
}

fn truncate_line(line: &str) -> String {
    truncate(line, QUOTED_LINE_BYTES_MAX).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::FailedPart;

    /// The reason is the first error that is not about resource limits.
    #[test]
    fn rlimit_errors_are_skipped() {
        let log = "(00.000001) Version: 4.2.1\n\
                   (00.000100) Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE for self\n\
                   (00.010000)      2: Error (criu/sk-unix.c:9): External socket is used\n\
                   (00.020000) Error (criu/cr-dump.c:2): Dumping FAILED.\n";
        let reason = first_error(log.as_bytes()).map(|(line, _)| line);
        assert_eq!(
            reason.as_deref(),
            Some("Error (criu/sk-unix.c:9): External socket is used")
        );
        assert_eq!(first_error("(00.1) all is well\n".as_bytes()), None);
    }

    /// Only errors about missing memory, and hanging restores, count as failures of post-copy.
    #[test]
    fn restore_failures_are_classified() {
        let part = |failure| classify_restore_failure(failure).failed_part;
        let engine_failure = |text: &str| Failure::Engine(text.into());
        for error in [
            "Error (criu/uffd.c:230): Failed to connect to the daemon",
            "Error (criu/pie/restorer.c:9): lazy-pages: can't register 0x1000",
        ] {
            assert_eq!(part(engine_failure(error)), FailedPart::MissingMemory);
        }
        let allowed = sempa_proto::Micros(1);
        assert_eq!(
            part(Failure::Deadline { allowed }),
            FailedPart::MissingMemory
        );
        let traced = "Error (criu/cr-restore.c:1): Can't attach to init: Operation not permitted";
        assert_eq!(part(engine_failure(traced)), FailedPart::Other);
        assert_eq!(part(Failure::Killed { signal: 9 }), FailedPart::Other);
    }

    /// A log in memory is searched and saved while a process still writes to it.
    #[test]
    fn memory_log_is_read_without_moving_the_writer() {
        let dir = tempfile::tempdir().expect("dir");
        let (log, stderr) = (
            MemoryLog::new().expect("log"),
            MemoryLog::new().expect("log"),
        );
        let write = |log: &MemoryLog, text: &str| {
            (&log.0).write_all(text.as_bytes()).expect("written");
        };
        assert_eq!(failure_reason_in_memory(&log, &stderr), None);
        write(&stderr, "\ncriu: no such library\n");
        assert_eq!(
            failure_reason_in_memory(&log, &stderr).as_deref(),
            Some("criu: no such library")
        );
        write(&log, "(00.1) all is well\n");
        assert_eq!(log.bytes().expect("readable").len(), 19);
        write(&log, "(00.2) Error (criu/x.c:1): it is not\n");
        assert_eq!(
            failure_reason_in_memory(&log, &stderr).as_deref(),
            Some("Error (criu/x.c:1): it is not")
        );
        let path = dir.path().join("dump.log");
        log.save(&path).expect("saved");
        let saved = std::fs::read_to_string(path).expect("readable");
        assert!(
            saved.starts_with("(00.1) all is well\n(00.2) Error"),
            "{saved}"
        );
    }

    #[test]
    fn known_errors_are_explained() {
        let error = "Error (criu/files.c:1): Message reply from daemon is trimmed (12/0)";
        assert_eq!(
            explain(error.into()),
            format!("{error} (the task may open too few descriptors (RLIMIT_NOFILE))")
        );
        assert_eq!(
            explain("Error: something else".into()),
            "Error: something else"
        );
    }

    /// A last line without a line break is recognized as truncated.
    #[test]
    fn truncated_last_line_is_recognized() {
        let log = "(00.000100) Error (criu/page-xfer.c:263): No space left on de";
        assert_eq!(
            first_error(log.as_bytes()).map(|(_, line_end)| line_end),
            Some(LineEnd::EndOfLog)
        );
        assert_eq!(
            first_error(format!("{log}vice\n").as_bytes()).map(|(_, line_end)| line_end),
            Some(LineEnd::Newline)
        );
    }

    /// A truncated line that is followed by another line is explained by a full disk.
    #[test]
    fn line_cut_in_the_middle_means_full_disk() {
        let log = tempfile::NamedTempFile::new().expect("a file");
        for (text, readable_part) in [
            (
                "(00.060958) Error (criu/page-xfer.c:26(00.060959) ----------------------------------------\n",
                "Error (criu/page-xfer.c:26… (",
            ),
            (
                "(00.060958) Error (criu/page-xfer.c:263): No space leftpie: 2: __fetched msg: 3 0 0\n",
                "Error (criu/page-xfer.c:263): No space left… (",
            ),
        ] {
            std::fs::write(log.path(), text).expect("written");
            let reason = first_error_in_file(log.path()).expect("an error");
            assert!(
                reason.starts_with(readable_part) && reason.contains("No space left on device"),
                "{reason}"
            );
        }
        for complete_log in [
            "Error (criu/x.c:1): size (12.5) of (3)\n",
            "Error (criu/x.c:1): (.123456) (1.)\n",
            "Error (1.12345)\n",
        ] {
            assert_eq!(
                first_error(complete_log.as_bytes()).map(|(_, line_end)| line_end),
                Some(LineEnd::Newline),
                "{complete_log}"
            );
        }
    }

    /// The error of a full disk is reported, and no error for a log that can be written.
    #[test]
    fn full_disk_is_named_as_the_cause() {
        let error = write_error(Path::new("/dev/full")).expect("it is always full");
        assert!(
            error.to_string().contains("No space left on device"),
            "{error}"
        );
        let writable_log = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(writable_log.path(), "(00.1) Error (criu/x.c:1): cut here")
            .expect("written");
        assert_eq!(
            first_error_in_file(writable_log.path()).as_deref(),
            Some("Error (criu/x.c:1): cut here"),
            "this disk has room"
        );
    }
}
