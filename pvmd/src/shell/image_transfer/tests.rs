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

/// Number of bytes that head and tag add to a record.
const RECORD_OVERHEAD_BYTES: usize = 20;

/// Creates the directories of one test. Returns the root directory, the existing source directory
/// in it, and the path of the target directory in it, which does not exist yet.
fn create_test_dirs(name: &str) -> (PathBuf, PathBuf, PathBuf) {
    let root = std::env::temp_dir().join(format!("pvmd-travel-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(root.join("from")).expect("a scratch directory");
    (root.clone(), root.join("from"), root.join("to"))
}

/// Sends a directory. Returns the bytes on the wire and the number of file bytes that the sender
/// reports.
fn send_dir(source_dir: &Path) -> (Vec<u8>, u64) {
    let dir_state = SharedDirState::default();
    dir_state.set_state(DirState::Complete);
    let (mut wire, rate) = (Vec::new(), RateLimit::default());
    let sent_amounts = Sender::new(
        source_dir,
        RecordWriter::new(&mut wire, ConnectionKeys::for_test(1).listener_key),
        &rate,
    )
    .send(&dir_state)
    .expect("sent");
    (wire, sent_amounts.file_bytes)
}

fn receive_dir(target_dir: &Path, wire: impl Read) -> Result<u64, Failure> {
    receive(
        target_dir,
        &mut RecordReader::new(wire, ConnectionKeys::for_test(1).listener_key),
    )
}

/// Splits the bytes on the wire into records.
fn split_records(mut wire: &[u8]) -> Vec<&[u8]> {
    let mut records = Vec::new();
    while let Some(head) = wire.first_chunk::<4>() {
        let (record, rest) =
            wire.split_at(u32::from_le_bytes(*head) as usize + RECORD_OVERHEAD_BYTES);
        records.push(record);
        wire = rest;
    }
    records
}

/// Encodes marks and pieces as correctly encrypted records. An item `Err` is a piece: the number of
/// its file and the length of the piece in bytes.
fn encode_records(items: &[Result<TransferMark, (u32, usize)>]) -> Vec<u8> {
    let (mut wire, rate) = (Vec::new(), RateLimit::default());
    let mut sender = Sender::new(
        Path::new("/"),
        RecordWriter::new(&mut wire, ConnectionKeys::for_test(1).listener_key),
        &rate,
    );
    for item in items {
        match item {
            Ok(mark) => sender.send_mark(mark).expect("sent"),
            Err((number, bytes)) => {
                let fill = |buffer: &mut [u8]| {
                    buffer.fill(7);
                    Ok::<(), Failure>(())
                };
                let piece_head = [&[RECORD_PIECE][..], &number.to_le_bytes()].concat();
                sender
                    .writer
                    .send_packed(&piece_head, *bytes, fill, |_| ())
                    .expect("filled")
                    .expect("sent");
            }
        }
    }
    drop(sender);
    wire
}

fn file_mark(number: u32, name: &str) -> Result<TransferMark, (u32, usize)> {
    Ok(TransferMark::File {
        number,
        name: name.to_string(),
    })
}

#[test]
fn files_arrive_as_they_were_sent() {
    let (root, source_dir, target_dir) = create_test_dirs("whole");
    let large_content: Vec<u8> = (0..3 * PIECE_BYTES_MAX + 17)
        .map(|i| (i % 251) as u8)
        .collect();
    std::fs::write(source_dir.join("pages-1.img"), &large_content).expect("writable");
    std::fs::write(source_dir.join("empty.img"), "").expect("writable");
    let (wire, bytes) = send_dir(&source_dir);
    assert_eq!(
        (bytes, receive_dir(&target_dir, &wire[..])),
        (large_content.len() as u64, Ok(bytes))
    );
    assert_eq!(
        std::fs::read(target_dir.join("pages-1.img")).expect("there"),
        large_content
    );
    assert_eq!(
        std::fs::read(target_dir.join("empty.img")).expect("there"),
        b""
    );
    std::fs::remove_dir_all(root).expect("ours");
}

/// Zeros are neither sent nor written. A file that ends with zeros has its original length.
#[test]
fn zeros_become_holes_and_lengths_are_kept() {
    let (root, source_dir, target_dir) = create_test_dirs("zeros");
    // Data at the beginning, across the border of two pieces, and before trailing zeros.
    let mut sparse_content = vec![0; 8 * PIECE_BYTES_MAX + 12_345];
    sparse_content[..5000].fill(1);
    sparse_content[3 * PIECE_BYTES_MAX - 700..3 * PIECE_BYTES_MAX + 900].fill(2);
    sparse_content[8 * PIECE_BYTES_MAX..8 * PIECE_BYTES_MAX + 3].fill(3);
    let nonzero_bytes = 5000 + 1600 + 3;
    let zeros = vec![0; 3 * PIECE_BYTES_MAX];
    std::fs::write(source_dir.join("pages-1.img"), &sparse_content).expect("writable");
    std::fs::write(source_dir.join("pages-2.img"), &zeros).expect("writable");
    let (wire, bytes) = send_dir(&source_dir);
    assert!(
        wire.len() < nonzero_bytes + 2048,
        "{} bytes left",
        wire.len()
    );
    assert_eq!(receive_dir(&target_dir, &wire[..]), Ok(bytes));
    assert_eq!(
        std::fs::read(target_dir.join("pages-1.img")).expect("there"),
        sparse_content
    );
    assert_eq!(
        std::fs::read(target_dir.join("pages-2.img")).expect("there"),
        zeros
    );
    let allocated_bytes = |name: &str| {
        std::fs::metadata(target_dir.join(name))
            .expect("there")
            .blocks()
            * 512
    };
    assert!(
        allocated_bytes("pages-1.img") < PIECE_BYTES_MAX as u64
            && allocated_bytes("pages-2.img") == 0,
        "there are holes"
    );
    std::fs::remove_dir_all(root).expect("ours");
}

#[test]
fn only_sent_bytes_count_for_the_rate_limit() {
    let (root, source_dir, _) = create_test_dirs("charged");
    std::fs::write(
        source_dir.join("pages-1.img"),
        vec![0; 64 * PIECE_BYTES_MAX],
    )
    .expect("writable");
    std::fs::write(source_dir.join("pages-2.img"), vec![7; PIECE_BYTES_MAX]).expect("writable");
    let dir_state = SharedDirState::default();
    dir_state.set_state(DirState::Complete);
    let rate = RateLimit::parse(Some("1000000")).expect("a rate");
    let sender = Sender::new(
        &source_dir,
        RecordWriter::new(io::sink(), ConnectionKeys::for_test(1).listener_key),
        &rate,
    );
    let started_at = std::time::Instant::now();
    let sent_amounts = sender.send(&dir_state).expect("sent");
    // 16 MiB at this rate would take 16 s.
    assert!(
        started_at.elapsed() < Duration::from_secs(12),
        "zeros were waited for"
    );
    let overhead_bytes = 64 * 64;
    assert!(
        (PIECE_BYTES_MAX..PIECE_BYTES_MAX + overhead_bytes)
            .contains(&(sent_amounts.wire_bytes as usize)),
        "{sent_amounts:?}"
    );
    std::fs::remove_dir_all(root).expect("ours");
}

/// The receiver refuses records that are altered, omitted, reordered or repeated, and a transfer
/// without an end mark.
#[test]
fn tampered_or_truncated_records_are_refused() {
    let (root, source_dir, target_dir) = create_test_dirs("tampered");
    std::fs::write(source_dir.join("core.img"), [5; 1000]).expect("writable");
    let (wire, _) = send_dir(&source_dir);
    let records = split_records(&wire);
    assert_eq!(
        records.len(),
        4,
        "a file begins, a piece, the file ends, the end"
    );
    let mut record_orders: Vec<Vec<usize>> = (0..records.len())
        .map(|length| (0..length).collect())
        .collect();
    record_orders.extend([
        vec![0, 2, 3],
        vec![0, 1, 1, 2, 3],
        vec![1, 0, 2, 3],
        vec![0, 1, 3, 2],
        vec![3],
    ]);
    for record_order in record_orders {
        let altered_wire = record_order
            .iter()
            .map(|index| records[*index])
            .collect::<Vec<_>>()
            .concat();
        let result = receive_dir(&target_dir, &altered_wire[..]);
        assert!(
            matches!(result, Err(Failure::Images(_))),
            "{record_order:?}: {result:?}"
        );
        std::fs::remove_dir_all(&target_dir).expect("ours");
    }
    for index in 0..wire.len() {
        let mut altered_wire = wire.clone();
        altered_wire[index] ^= 4;
        let result = receive_dir(&target_dir, &altered_wire[..]);
        assert!(
            matches!(result, Err(Failure::Images(_))),
            "byte {index}: {result:?}"
        );
        std::fs::remove_dir_all(&target_dir).expect("ours");
    }
    for bytes in 0..wire.len() {
        assert!(
            receive_dir(&target_dir, &wire[..bytes]).is_err(),
            "cut after {bytes} bytes"
        );
        std::fs::remove_dir_all(&target_dir).expect("ours");
    }
    std::fs::remove_dir_all(root).expect("ours");
}

/// The receiver returns an error if a source that has the keys violates the format.
#[test]
fn malformed_sequences_from_source_are_refused() {
    let (root, _, target_dir) = create_test_dirs("rules");
    let end_mark = |file_count, byte_count| {
        Ok(TransferMark::End {
            file_count,
            byte_count,
        })
    };
    let file_end_mark = |number, bytes| Ok(TransferMark::FileEnd { number, bytes });
    let mut invalid_sequences: Vec<Vec<Result<TransferMark, (u32, usize)>>> = vec![
        vec![Err((0, 5))],
        vec![file_mark(1, "a.img")],
        vec![file_mark(0, "a.img"), file_mark(0, "b.img")],
        vec![file_mark(0, "a.img"), file_mark(1, "a.img")],
        vec![file_mark(0, "a.img"), Err((1, 5))],
        vec![file_mark(0, "a.img"), Err((0, 5)), file_end_mark(0, 4)],
        vec![file_mark(0, "a.img"), Err((0, 5)), file_end_mark(0, 6)],
        vec![file_mark(0, "a.img"), file_end_mark(0, 0), Err((0, 5))],
        vec![file_end_mark(0, 0)],
        vec![end_mark(1, 0)],
        vec![file_mark(0, "a.img"), end_mark(1, 0)],
        vec![
            file_mark(0, "a.img"),
            Err((0, 5)),
            file_end_mark(0, 5),
            end_mark(1, 4),
        ],
        vec![
            file_mark(0, "a.img"),
            Ok(TransferMark::Restart),
            Err((0, 5)),
        ],
        (0..=RESTARTS_MAX)
            .map(|_| Ok(TransferMark::Restart))
            .collect(),
        (0..=OPEN_FILES_MAX as u32)
            .map(|number| file_mark(number, &format!("{number}.img")))
            .collect(),
    ];
    let names = ["", ".", "..", "../x", "a/b", "/etc/x", &"n".repeat(256)];
    invalid_sequences.extend(names.map(|name| vec![file_mark(0, name)]));
    for sequence in invalid_sequences {
        let mut wire = encode_records(&sequence);
        // Only the first byte of another record follows: the receiver must report the error without
        // waiting for the remainder of this record.
        wire.push(0);
        let result = receive_dir(&target_dir, &wire[..]);
        let ended_early = result == Err(format_failure("the transfer ended in the middle"));
        assert!(
            matches!(result, Err(Failure::Images(_) | Failure::Io(_))) && !ended_early,
            "{sequence:?}: {result:?}"
        );
        let _ = std::fs::remove_dir_all(&target_dir);
    }
    std::fs::remove_dir_all(root).expect("ours");
}

#[test]
fn oversized_record_is_refused_by_its_head() {
    let (root, _, target_dir) = create_test_dirs("announced");
    let result = receive_dir(&target_dir, &u32::MAX.to_le_bytes()[..]);
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

/// Waits until at least `bytes` bytes were sent. Panics after a time limit.
fn wait_until_sent(wire: &SharedWire, bytes: usize) {
    let started_at = std::time::Instant::now();
    while wire.0.lock().expect("no panic").len() < bytes {
        assert!(
            started_at.elapsed() < Duration::from_secs(30),
            "what grows is not sent"
        );
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Sends a directory whose first file grows to `content`. If there is additional content, the
/// directory is deleted while the file grows; a new directory of the same name then gets a second
/// file with the additional content. Returns the amounts that the sender reports, and the bytes on
/// the wire.
fn send_growing_dir(
    source_dir: &Path,
    content: &[u8],
    additional_content: Option<&[u8]>,
) -> (SentAmounts, Vec<u8>) {
    let (dir_state, wire, rate) = (
        SharedDirState::default(),
        SharedWire::default(),
        RateLimit::default(),
    );
    let result = std::thread::scope(|scope| {
        let (thread_wire, source_dir, thread_state, rate) =
            (wire.clone(), source_dir, &dir_state, &rate);
        let send_thread = scope.spawn(move || {
            Sender::new(
                source_dir,
                RecordWriter::new(thread_wire, ConnectionKeys::for_test(1).listener_key),
                rate,
            )
            .send(thread_state)
        });
        let path = source_dir.join("pages-1.img");
        let mut growing_file = File::create(&path).expect("writable");
        growing_file
            .write_all(&content[..PIECE_BYTES_MAX + 5])
            .expect("writable");
        wait_until_sent(&wire, PIECE_BYTES_MAX);
        if let Some(additional_content) = additional_content {
            std::fs::remove_dir_all(source_dir).expect("ours");
            std::fs::create_dir(source_dir).expect("a scratch directory");
            std::fs::write(&path, b"other").expect("writable");
            std::fs::write(source_dir.join("pages-2.img"), additional_content).expect("writable");
            wait_until_sent(&wire, PIECE_BYTES_MAX + additional_content.len());
        } else {
            growing_file
                .write_all(&content[PIECE_BYTES_MAX + 5..])
                .expect("writable");
        }
        std::fs::write(source_dir.join("core-1.img"), b"core").expect("writable");
        dir_state.set_state(DirState::Complete);
        send_thread.join().expect("no panic")
    });
    let wire = wire.0.lock().expect("no panic").clone();
    (result.expect("sent"), wire)
}

/// Growing files are sent before they are complete. A restarted directory is received in its final
/// state.
#[test]
fn growing_files_stream_and_restarts_are_followed() {
    let content: Vec<u8> = (0..2 * PIECE_BYTES_MAX + 100)
        .map(|i| (i % 241) as u8)
        .collect();
    // The new directory may contain an additional file. If this file is long enough, its whole
    // pieces are sent while the directory grows.
    for (is_restarted, additional_bytes) in [(false, 0), (true, 5), (true, content.len())] {
        let (root, source_dir, target_dir) =
            create_test_dirs(&format!("grows-{is_restarted}-{additional_bytes}"));
        let additional_content = is_restarted.then_some(&content[..additional_bytes]);
        let (sent_amounts, wire) = send_growing_dir(&source_dir, &content, additional_content);
        let expected_content = if is_restarted { b"other" } else { &content[..] };
        let expected_bytes = (expected_content.len() + additional_bytes + 4) as u64;
        let early_bytes_min = if is_restarted {
            additional_bytes - additional_bytes % PIECE_BYTES_MAX
        } else {
            PIECE_BYTES_MAX
        } as u64;
        assert_eq!(
            (
                sent_amounts.file_bytes,
                receive_dir(&target_dir, Cursor::new(wire))
            ),
            (expected_bytes, Ok(expected_bytes))
        );
        let void_bytes = if is_restarted {
            PIECE_BYTES_MAX as u64
        } else {
            0
        };
        assert!(
            sent_amounts.early_bytes >= early_bytes_min && sent_amounts.void_bytes == void_bytes,
            "{sent_amounts:?}"
        );
        assert_eq!(
            std::fs::read(target_dir.join("pages-1.img")).expect("there"),
            expected_content
        );
        assert_eq!(
            std::fs::read(target_dir.join("core-1.img")).expect("there"),
            b"core"
        );
        if is_restarted {
            assert!(
                std::fs::read(target_dir.join("pages-2.img")).expect("there")
                    == content[..additional_bytes],
                "it is as it was"
            );
        }
        assert_eq!(
            std::fs::read_dir(&target_dir).expect("there").count(),
            2 + usize::from(is_restarted)
        );
        std::fs::remove_dir_all(root).expect("ours");
    }
}

#[test]
fn replaced_partly_sent_file_is_an_error() {
    let (root, source_dir, _) = create_test_dirs("replaced");
    let (dir_state, wire) = (SharedDirState::default(), SharedWire::default());
    let result = std::thread::scope(|scope| {
        let (thread_wire, source_dir, thread_state) = (wire.clone(), &source_dir, &dir_state);
        let send_thread = scope.spawn(move || {
            let rate = RateLimit::default();
            Sender::new(
                source_dir,
                RecordWriter::new(thread_wire, ConnectionKeys::for_test(1).listener_key),
                &rate,
            )
            .send(thread_state)
        });
        let path = source_dir.join("pages-1.img");
        std::fs::write(&path, vec![7; PIECE_BYTES_MAX]).expect("writable");
        wait_until_sent(&wire, PIECE_BYTES_MAX);
        std::fs::remove_file(&path).expect("ours");
        std::fs::write(&path, vec![7; PIECE_BYTES_MAX]).expect("writable");
        dir_state.set_state(DirState::Complete);
        send_thread.join().expect("no panic")
    });
    assert!(
        matches!(&result, Err(Failure::Images(why)) if why.contains("pages-1.img was replaced")),
        "{result:?}"
    );
    std::fs::remove_dir_all(root).expect("ours");
}

/// A writer that truncates the file `path` before it writes a record with a whole piece.
struct TruncatingWriter<'a> {
    wire: SharedWire,
    path: &'a Path,
}

impl Write for TruncatingWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > PIECE_BYTES_MAX {
            OpenOptions::new().write(true).open(self.path)?.set_len(7)?;
        }
        self.wire.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An unreadable growing file is reported when the directory is complete, but not if the directory
/// is dropped.
#[test]
fn unreadable_growing_file_fails_at_completion() {
    for (state, expected_error) in [
        (DirState::Complete, "pages-1.img"),
        (DirState::Dropped, "aborted"),
    ] {
        let (root, source_dir, _) = create_test_dirs(&format!("unread-{state:?}"));
        let (dir_state, wire, path) = (
            SharedDirState::default(),
            SharedWire::default(),
            source_dir.join("pages-1.img"),
        );
        std::fs::write(&path, vec![7; 2 * PIECE_BYTES_MAX]).expect("writable");
        let result = std::thread::scope(|scope| {
            let (thread_writer, source_dir, thread_state) = (
                TruncatingWriter {
                    wire: wire.clone(),
                    path: &path,
                },
                &source_dir,
                &dir_state,
            );
            let send_thread = scope.spawn(move || {
                let rate = RateLimit::default();
                Sender::new(
                    source_dir,
                    RecordWriter::new(thread_writer, ConnectionKeys::for_test(1).listener_key),
                    &rate,
                )
                .send(thread_state)
            });
            wait_until_sent(&wire, PIECE_BYTES_MAX);
            dir_state.set_state(state);
            send_thread.join().expect("no panic")
        });
        let error_text = result.expect_err("it is not whole").to_string();
        assert!(error_text.contains(expected_error), "{error_text}");
        std::fs::remove_dir_all(root).expect("ours");
    }
}

#[test]
fn dropped_directory_is_not_sent() {
    let (root, source_dir, _) = create_test_dirs("void");
    let dir_state = SharedDirState::default();
    dir_state.set_state(DirState::Dropped);
    dir_state.set_state(DirState::Complete);
    let result = Sender::new(
        &source_dir,
        RecordWriter::new(io::sink(), ConnectionKeys::for_test(1).listener_key),
        &RateLimit::default(),
    )
    .send(&dir_state);
    assert!(matches!(result, Err(Failure::Cancelled(_))), "{result:?}");
    std::fs::remove_dir_all(root).expect("ours");
}
