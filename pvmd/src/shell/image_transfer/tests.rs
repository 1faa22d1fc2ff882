//! Tests of image transfers: the sender writes into a buffer, which the receiver then reads.

use super::super::bulk_tcp::{ConnectionKeys, RecordReader, RecordWriter};
use super::super::rate_limit::RateLimit;
use super::receive::RESTARTS_MAX;
use super::send::POLL_INTERVAL;
use super::*;
use std::fs::{File, OpenOptions};
use std::io::{Cursor, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

/// Bytes that head and tag add to a record.
const RECORD_OVERHEAD_BYTES: usize = 20;

/// Returns a root and two directories in it for one test; the second directory does not exist yet.
fn scratch(name: &str) -> (PathBuf, PathBuf, PathBuf) {
    let root = std::env::temp_dir().join(format!("pvmd-travel-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(root.join("from")).expect("a scratch directory");
    (root.clone(), root.join("from"), root.join("to"))
}

/// Returns the bytes that are sent for a directory, and the number of file bytes that the sender
/// reports.
fn sent(from: &Path) -> (Vec<u8>, u64) {
    let progress = SharedDirState::default();
    progress.set(DirState::Complete);
    let (mut wire, rate) = (Vec::new(), RateLimit::default());
    let bytes = Sender::new(
        from,
        RecordWriter::new(&mut wire, ConnectionKeys::for_test(1).listener_key),
        &rate,
    )
    .send(&progress)
    .expect("sent");
    (wire, bytes.bytes)
}

fn received(to: &Path, wire: impl Read) -> Result<u64, Failure> {
    receive(
        to,
        &mut RecordReader::new(wire, ConnectionKeys::for_test(1).listener_key),
    )
}

/// Splits the sent bytes into their records.
fn records(mut wire: &[u8]) -> Vec<&[u8]> {
    let mut all = Vec::new();
    while let Some(head) = wire.first_chunk::<4>() {
        let (record, rest) =
            wire.split_at(u32::from_le_bytes(*head) as usize + RECORD_OVERHEAD_BYTES);
        all.push(record);
        wire = rest;
    }
    all
}

/// Encodes these marks and pieces as correctly encrypted records. A piece is given by the number of
/// its file and its length.
fn encode_records(what: &[Result<TransferMark, (u32, usize)>]) -> Vec<u8> {
    let (mut wire, rate) = (Vec::new(), RateLimit::default());
    let mut sender = Sender::new(
        Path::new("/"),
        RecordWriter::new(&mut wire, ConnectionKeys::for_test(1).listener_key),
        &rate,
    );
    for one in what {
        match one {
            Ok(mark) => sender.send_mark(mark).expect("sent"),
            Err((number, bytes)) => {
                let fill = |room: &mut [u8]| {
                    room.fill(7);
                    Ok::<(), Failure>(())
                };
                let front = [&[RECORD_PIECE][..], &number.to_le_bytes()].concat();
                sender
                    .out
                    .send_packed(&front, *bytes, fill, |_| ())
                    .expect("filled")
                    .expect("sent");
            }
        }
    }
    drop(sender);
    wire
}

fn file(number: u32, name: &str) -> Result<TransferMark, (u32, usize)> {
    Ok(TransferMark::File {
        number,
        name: name.to_string(),
    })
}

#[test]
fn files_arrive_as_they_were_sent() {
    let (root, from, to) = scratch("whole");
    let big: Vec<u8> = (0..3 * PIECE_BYTES + 17).map(|i| (i % 251) as u8).collect();
    std::fs::write(from.join("pages-1.img"), &big).expect("writable");
    std::fs::write(from.join("empty.img"), "").expect("writable");
    let (wire, bytes) = sent(&from);
    assert_eq!(
        (bytes, received(&to, &wire[..])),
        (big.len() as u64, Ok(bytes))
    );
    assert_eq!(std::fs::read(to.join("pages-1.img")).expect("there"), big);
    assert_eq!(std::fs::read(to.join("empty.img")).expect("there"), b"");
    std::fs::remove_dir_all(root).expect("ours");
}

/// Zeros are neither sent nor written, and files that end with zeros keep their length.
#[test]
fn zeros_become_holes_and_lengths_are_kept() {
    let (root, from, to) = scratch("zeros");
    // Data at the beginning, across the border of two pieces, and before trailing zeros.
    let mut big = vec![0; 8 * PIECE_BYTES + 12_345];
    big[..5000].fill(1);
    big[3 * PIECE_BYTES - 700..3 * PIECE_BYTES + 900].fill(2);
    big[8 * PIECE_BYTES..8 * PIECE_BYTES + 3].fill(3);
    let something = 5000 + 1600 + 3;
    let zeros = vec![0; 3 * PIECE_BYTES];
    std::fs::write(from.join("pages-1.img"), &big).expect("writable");
    std::fs::write(from.join("pages-2.img"), &zeros).expect("writable");
    let (wire, bytes) = sent(&from);
    assert!(wire.len() < something + 2048, "{} bytes left", wire.len());
    assert_eq!(received(&to, &wire[..]), Ok(bytes));
    assert_eq!(std::fs::read(to.join("pages-1.img")).expect("there"), big);
    assert_eq!(std::fs::read(to.join("pages-2.img")).expect("there"), zeros);
    let kept = |name: &str| std::fs::metadata(to.join(name)).expect("there").blocks() * 512;
    assert!(
        kept("pages-1.img") < PIECE_BYTES as u64 && kept("pages-2.img") == 0,
        "there are holes"
    );
    std::fs::remove_dir_all(root).expect("ours");
}

#[test]
fn only_sent_bytes_count_for_the_rate_limit() {
    let (root, from, _) = scratch("charged");
    std::fs::write(from.join("pages-1.img"), vec![0; 64 * PIECE_BYTES]).expect("writable");
    std::fs::write(from.join("pages-2.img"), vec![7; PIECE_BYTES]).expect("writable");
    let progress = SharedDirState::default();
    progress.set(DirState::Complete);
    let rate = RateLimit::parse(Some("1000000")).expect("a rate");
    let sender = Sender::new(
        &from,
        RecordWriter::new(io::sink(), ConnectionKeys::for_test(1).listener_key),
        &rate,
    );
    let begin = std::time::Instant::now();
    let sent = sender.send(&progress).expect("sent");
    // 16 MiB at this rate would take 16 s.
    assert!(
        begin.elapsed() < Duration::from_secs(12),
        "zeros were waited for"
    );
    let around = 64 * 64;
    assert!(
        (PIECE_BYTES..PIECE_BYTES + around).contains(&(sent.wire_bytes as usize)),
        "{sent:?}"
    );
    std::fs::remove_dir_all(root).expect("ours");
}

/// Records that are altered, omitted, reordered or repeated, and a missing end, are refused.
#[test]
fn tampered_or_truncated_records_are_refused() {
    let (root, from, to) = scratch("tampered");
    std::fs::write(from.join("core.img"), [5; 1000]).expect("writable");
    let (wire, _) = sent(&from);
    let all = records(&wire);
    assert_eq!(
        all.len(),
        4,
        "a file begins, a piece, the file ends, the end"
    );
    let mut ways: Vec<Vec<usize>> = (0..all.len()).map(|cut| (0..cut).collect()).collect();
    ways.extend([
        vec![0, 2, 3],
        vec![0, 1, 1, 2, 3],
        vec![1, 0, 2, 3],
        vec![0, 1, 3, 2],
        vec![3],
    ]);
    for order in ways {
        let changed = order.iter().map(|at| all[*at]).collect::<Vec<_>>().concat();
        let result = received(&to, &changed[..]);
        assert!(
            matches!(result, Err(Failure::Images(_))),
            "{order:?}: {result:?}"
        );
        std::fs::remove_dir_all(&to).expect("ours");
    }
    for at in 0..wire.len() {
        let mut changed = wire.clone();
        changed[at] ^= 4;
        let result = received(&to, &changed[..]);
        assert!(
            matches!(result, Err(Failure::Images(_))),
            "byte {at}: {result:?}"
        );
        std::fs::remove_dir_all(&to).expect("ours");
    }
    for bytes in 0..wire.len() {
        assert!(
            received(&to, &wire[..bytes]).is_err(),
            "cut after {bytes} bytes"
        );
        std::fs::remove_dir_all(&to).expect("ours");
    }
    std::fs::remove_dir_all(root).expect("ours");
}

/// A source that has the keys but violates the format gets an error.
#[test]
fn malformed_sequences_from_source_are_refused() {
    let (root, _, to) = scratch("rules");
    let end = |files, bytes| Ok(TransferMark::End { files, bytes });
    let ends = |number, bytes| Ok(TransferMark::FileEnd { number, bytes });
    let mut rules: Vec<Vec<Result<TransferMark, (u32, usize)>>> = vec![
        vec![Err((0, 5))],
        vec![file(1, "a.img")],
        vec![file(0, "a.img"), file(0, "b.img")],
        vec![file(0, "a.img"), file(1, "a.img")],
        vec![file(0, "a.img"), Err((1, 5))],
        vec![file(0, "a.img"), Err((0, 5)), ends(0, 4)],
        vec![file(0, "a.img"), Err((0, 5)), ends(0, 6)],
        vec![file(0, "a.img"), ends(0, 0), Err((0, 5))],
        vec![ends(0, 0)],
        vec![end(1, 0)],
        vec![file(0, "a.img"), end(1, 0)],
        vec![file(0, "a.img"), Err((0, 5)), ends(0, 5), end(1, 4)],
        vec![file(0, "a.img"), Ok(TransferMark::Restart), Err((0, 5))],
        (0..=RESTARTS_MAX)
            .map(|_| Ok(TransferMark::Restart))
            .collect(),
        (0..=OPEN_FILES_MAX as u32)
            .map(|number| file(number, &format!("{number}.img")))
            .collect(),
    ];
    let names = ["", ".", "..", "../x", "a/b", "/etc/x", &"n".repeat(256)];
    rules.extend(names.map(|name| vec![file(0, name)]));
    for what in rules {
        let mut wire = encode_records(&what);
        // Only the first byte of a further record follows: the error must be reported without
        // waiting for the rest.
        wire.push(0);
        let result = received(&to, &wire[..]);
        let middle = result == Err(format_failure("the transfer ended in the middle"));
        assert!(
            matches!(result, Err(Failure::Images(_) | Failure::Io(_))) && !middle,
            "{what:?}: {result:?}"
        );
        let _ = std::fs::remove_dir_all(&to);
    }
    std::fs::remove_dir_all(root).expect("ours");
}

#[test]
fn oversized_record_is_refused_by_its_head() {
    let (root, _, to) = scratch("announced");
    let result = received(&to, &u32::MAX.to_le_bytes()[..]);
    assert!(
        matches!(&result, Err(Failure::Images(why)) if why.contains("impossible length")),
        "{result:?}"
    );
    std::fs::remove_dir_all(root).expect("ours");
}

/// A shared buffer that collects the sent bytes.
#[derive(Clone, Default)]
struct SharedWire(std::sync::Arc<Mutex<Vec<u8>>>);

impl Write for SharedWire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until at least `bytes` bytes were sent.
fn wait_until_sent(wire: &SharedWire, bytes: usize) {
    let begin = std::time::Instant::now();
    while wire.0.lock().expect("no panic").len() < bytes {
        assert!(
            begin.elapsed() < Duration::from_secs(30),
            "what grows is not sent"
        );
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Growing files are sent before they are complete, and a restarted directory arrives in its final
/// state.
#[test]
fn growing_files_stream_and_restarts_are_followed() {
    let content: Vec<u8> = (0..2 * PIECE_BYTES + 100)
        .map(|i| (i % 241) as u8)
        .collect();
    // The new directory may have more files, some of them completely sent while they are written.
    for (restarted, more) in [(false, 0), (true, 5), (true, content.len())] {
        let (root, from, to) = scratch(&format!("grows-{restarted}-{more}"));
        let (progress, wire, rate) = (
            SharedDirState::default(),
            SharedWire::default(),
            RateLimit::default(),
        );
        let result = std::thread::scope(|scope| {
            let (out, from, of_thread, rate) = (wire.clone(), &from, &progress, &rate);
            let sending = scope.spawn(move || {
                Sender::new(
                    from,
                    RecordWriter::new(out, ConnectionKeys::for_test(1).listener_key),
                    rate,
                )
                .send(of_thread)
            });
            let path = from.join("pages-1.img");
            let mut growing = File::create(&path).expect("writable");
            growing
                .write_all(&content[..PIECE_BYTES + 5])
                .expect("writable");
            wait_until_sent(&wire, PIECE_BYTES);
            if restarted {
                std::fs::remove_dir_all(from).expect("ours");
                std::fs::create_dir(from).expect("a scratch directory");
                std::fs::write(&path, b"other").expect("writable");
                std::fs::write(from.join("pages-2.img"), &content[..more]).expect("writable");
                wait_until_sent(&wire, PIECE_BYTES + more);
            } else {
                growing
                    .write_all(&content[PIECE_BYTES + 5..])
                    .expect("writable");
            }
            std::fs::write(from.join("core-1.img"), b"core").expect("writable");
            progress.set(DirState::Complete);
            sending.join().expect("no panic")
        });
        let expected = if restarted { b"other" } else { &content[..] };
        let bytes = (expected.len() + more + 4) as u64;
        let wire = wire.0.lock().expect("no panic").clone();
        let early_bytes = if restarted {
            more - more % PIECE_BYTES
        } else {
            PIECE_BYTES
        } as u64;
        let sent = result.expect("sent");
        assert_eq!(
            (sent.bytes, received(&to, Cursor::new(wire))),
            (bytes, Ok(bytes))
        );
        let void_bytes = if restarted { PIECE_BYTES as u64 } else { 0 };
        assert!(
            sent.early_bytes >= early_bytes && sent.void_bytes == void_bytes,
            "{sent:?}"
        );
        assert_eq!(
            std::fs::read(to.join("pages-1.img")).expect("there"),
            expected
        );
        assert_eq!(
            std::fs::read(to.join("core-1.img")).expect("there"),
            b"core"
        );
        if restarted {
            assert!(
                std::fs::read(to.join("pages-2.img")).expect("there") == content[..more],
                "it is as it was"
            );
        }
        assert_eq!(
            std::fs::read_dir(&to).expect("there").count(),
            2 + usize::from(restarted)
        );
        std::fs::remove_dir_all(root).expect("ours");
    }
}

#[test]
fn replaced_partly_sent_file_is_an_error() {
    let (root, from, _) = scratch("replaced");
    let (progress, wire) = (SharedDirState::default(), SharedWire::default());
    let result = std::thread::scope(|scope| {
        let (out, from, of_thread) = (wire.clone(), &from, &progress);
        let sending = scope.spawn(move || {
            let rate = RateLimit::default();
            Sender::new(
                from,
                RecordWriter::new(out, ConnectionKeys::for_test(1).listener_key),
                &rate,
            )
            .send(of_thread)
        });
        let path = from.join("pages-1.img");
        std::fs::write(&path, vec![7; PIECE_BYTES]).expect("writable");
        wait_until_sent(&wire, PIECE_BYTES);
        std::fs::remove_file(&path).expect("ours");
        std::fs::write(&path, vec![7; PIECE_BYTES]).expect("writable");
        progress.set(DirState::Complete);
        sending.join().expect("no panic")
    });
    assert!(
        matches!(&result, Err(Failure::Images(why)) if why.contains("pages-1.img was replaced")),
        "{result:?}"
    );
    std::fs::remove_dir_all(root).expect("ours");
}

/// A writer that truncates a file after some of it was sent.
struct TruncatingWriter<'a> {
    wire: SharedWire,
    path: &'a Path,
}

impl Write for TruncatingWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > PIECE_BYTES {
            OpenOptions::new().write(true).open(self.path)?.set_len(7)?;
        }
        self.wire.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An unreadable growing file is reported when the directory is complete, and not if it is dropped.
#[test]
fn unreadable_growing_file_fails_at_completion() {
    for (state, told) in [
        (DirState::Complete, "pages-1.img"),
        (DirState::Dropped, "aborted"),
    ] {
        let (root, from, _) = scratch(&format!("unread-{state:?}"));
        let (progress, wire, path) = (
            SharedDirState::default(),
            SharedWire::default(),
            from.join("pages-1.img"),
        );
        std::fs::write(&path, vec![7; 2 * PIECE_BYTES]).expect("writable");
        let result = std::thread::scope(|scope| {
            let (out, from, of_thread) = (
                TruncatingWriter {
                    wire: wire.clone(),
                    path: &path,
                },
                &from,
                &progress,
            );
            let sending = scope.spawn(move || {
                let rate = RateLimit::default();
                Sender::new(
                    from,
                    RecordWriter::new(out, ConnectionKeys::for_test(1).listener_key),
                    &rate,
                )
                .send(of_thread)
            });
            wait_until_sent(&wire, PIECE_BYTES);
            progress.set(state);
            sending.join().expect("no panic")
        });
        let why = result.expect_err("it is not whole").to_string();
        assert!(why.contains(told), "{why}");
        std::fs::remove_dir_all(root).expect("ours");
    }
}

#[test]
fn dropped_directory_is_not_sent() {
    let (root, from, _) = scratch("void");
    let progress = SharedDirState::default();
    progress.set(DirState::Dropped);
    progress.set(DirState::Complete);
    let result = Sender::new(
        &from,
        RecordWriter::new(io::sink(), ConnectionKeys::for_test(1).listener_key),
        &RateLimit::default(),
    )
    .send(&progress);
    assert!(matches!(result, Err(Failure::Cancelled(_))), "{result:?}");
    std::fs::remove_dir_all(root).expect("ours");
}
