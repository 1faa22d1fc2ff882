//! Finds the one line of CRIU's log that says why it failed.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Most of a log that is looked through, in bytes; logs at this level are far smaller.
const LOG_BYTES_MAX: u64 = 64 << 20;
/// Longest line that is passed on, in bytes.
const LINE_BYTES_MAX: usize = 400;

/// The first line of a log that tells of an error, without its time stamp; not the noise about resource limits, which
/// also appears when all goes well.
pub(super) fn first_error(log: impl BufRead) -> Option<String> {
    log.take(LOG_BYTES_MAX).split(b'\n').map_while(Result::ok).find_map(|line| {
        let line = String::from_utf8_lossy(&line);
        let at = line.find("Error")?;
        (!line.contains("rlimit")).then(|| shorten(line[at..].trim()))
    })
}

/// Why an engine failed, from its log, or else from the first line of its standard error.
pub(super) fn reason(log: &Path, stderr: &Path) -> Option<String> {
    let open = |path: &Path| std::fs::File::open(path).ok().map(BufReader::new);
    let from_log = open(log).and_then(first_error);
    from_log.or_else(|| {
        let text = open(stderr)?.take(LOG_BYTES_MAX).lines().map_while(Result::ok);
        text.map(|line| shorten(line.trim())).find(|line| !line.is_empty() && !line.contains("rlimit"))
    })
}

fn shorten(line: &str) -> String {
    let mut end = line.len().min(LINE_BYTES_MAX);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    line[..end].to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_the_first_error_that_is_not_noise() {
        let log = "(00.000001) Version: 4.2.1\n\
                   (00.000100) Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE for self\n\
                   (00.010000)      2: Error (criu/sk-unix.c:9): External socket is used\n\
                   (00.020000) Error (criu/cr-dump.c:2): Dumping FAILED.\n";
        assert_eq!(first_error(log.as_bytes()).as_deref(), Some("Error (criu/sk-unix.c:9): External socket is used"));
        assert_eq!(first_error("(00.1) all is well\n".as_bytes()), None);
    }
}
