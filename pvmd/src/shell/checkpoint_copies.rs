//! Copies a checkpoint from the master's store to the store of another host.
//!
//! The data travels decrypted inside a connection with keys of its own ([`super::bulk_tcp`]). The
//! receiving host encrypts it with the key of its own store; no store needs the key of another
//! store. The copy becomes visible only when all of it is on the disk.

use super::bulk_tcp::{RecordReader, RecordWriter};
use super::image_transfer::{
    RECORD_MARK, RECORD_PIECE, SentAmounts, format_failure, receive_failure, send_failure,
    send_mark,
};
use super::rate_limit::RateLimit;
use checkpoint::store::{CheckpointDraft, StoreError, StoredCheckpoint};
use sempa_proto::frame::from_bytes;
use sempa_proto::migration::Failure;
use sempa_proto::{Micros, Tid};
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::io::{self, ErrorKind, Read, Write};

/// Maximum number of bytes of a checkpoint in one record.
const PIECE_BYTES_MAX: usize = 256 << 10;

/// Records that structure a copy. The data of the checkpoint is in the pieces between them.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum CopyMark {
    /// Sent first: the time at which the checkpoint was begun (since 1970), and its size in the
    /// master's store in bytes.
    Checkpoint { made: Micros, bytes: u64 },
    /// The part of a task begins; its images have `images_bytes` bytes when unpacked.
    Part { tid: Tid, images_bytes: u64 },
    /// The checkpoint's metadata begins; it is the last part.
    Meta,
    /// A part or the metadata is complete; it has `bytes` bytes.
    End { bytes: u64 },
}

/// Sends a checkpoint. `rate` limits the transfer rate.
pub(super) fn send_checkpoint<W: Write>(
    set: &StoredCheckpoint,
    mut out: RecordWriter<W>,
    rate: &RateLimit,
) -> Result<SentAmounts, Failure> {
    let info = set.info();
    let mut sent = SentAmounts::default();
    send_mark(
        &mut out,
        &CopyMark::Checkpoint {
            made: info.started,
            bytes: info.bytes,
        },
    )?;
    for part in &info.parts {
        send_mark(
            &mut out,
            &CopyMark::Part {
                tid: part.tid,
                images_bytes: part.images_bytes,
            },
        )?;
        let mut bytes = 0;
        let poured = set.copy_part(part.tid, |content| {
            bytes += content.len() as u64;
            send_pieces(&mut out, rate, content)
        });
        poured.map_err(|why| Failure::Images(why.to_string()))?;
        send_mark(&mut out, &CopyMark::End { bytes })?;
        sent.bytes += bytes;
    }
    let meta = set.meta();
    send_mark(&mut out, &CopyMark::Meta)?;
    send_pieces(&mut out, rate, meta).map_err(send_failure)?;
    send_mark(
        &mut out,
        &CopyMark::End {
            bytes: meta.len() as u64,
        },
    )?;
    sent.bytes += meta.len() as u64;
    sent.wire_bytes = sent.bytes;
    Ok(sent)
}

fn send_pieces<W: Write>(
    out: &mut RecordWriter<W>,
    rate: &RateLimit,
    content: &[u8],
) -> io::Result<()> {
    content.chunks(PIECE_BYTES_MAX).try_for_each(|piece| {
        rate.wait(piece.len());
        let Ok(sent) = out.send(1 + piece.len(), |room| {
            room[0] = RECORD_PIECE;
            room[1..].copy_from_slice(piece);
            Ok::<(), Infallible>(())
        });
        sent
    })
}

/// Receives a checkpoint into the draft that `begin` creates from its time and size. Returns the
/// number of bytes received.
pub(super) fn receive_checkpoint<R: Read>(
    incoming: &mut RecordReader<R>,
    begin: impl FnOnce(Micros, u64) -> Result<CheckpointDraft, StoreError>,
) -> Result<u64, Failure> {
    let store = |why: StoreError| Failure::Io(why.to_string());
    let ReceivedRecord::Mark(CopyMark::Checkpoint { made, bytes }) =
        next_record(incoming).map_err(receive_failure)?
    else {
        return Err(format_failure("the set was not announced"));
    };
    let draft = begin(made, bytes).map_err(store)?;
    let mut all = 0;
    loop {
        match next_record(incoming).map_err(receive_failure)? {
            ReceivedRecord::Mark(CopyMark::Part { tid, images_bytes }) => {
                let added = draft.add_copy(tid, images_bytes, |put| {
                    all += receive_pieces(incoming, put)?;
                    Ok(())
                });
                added.map_err(store)?;
            }
            ReceivedRecord::Mark(CopyMark::Meta) => {
                let mut meta = Vec::new();
                all += receive_pieces(incoming, &mut |piece| {
                    if meta.len() + piece.len() > checkpoint::store::META_BYTES_MAX {
                        return Err(invalid("more is said of the set than is possible"));
                    }
                    meta.extend_from_slice(piece);
                    Ok(())
                })
                .map_err(receive_failure)?;
                draft.finish(&meta).map_err(store)?;
                return Ok(all);
            }
            _ => return Err(format_failure("neither a task nor the end was announced")),
        }
    }
}

/// A record of either kind, as received.
enum ReceivedRecord<'a> {
    Mark(CopyMark),
    Piece(&'a [u8]),
}

fn next_record<R: Read>(incoming: &mut RecordReader<R>) -> io::Result<ReceivedRecord<'_>> {
    let ended = |e: io::Error| match e.kind() {
        ErrorKind::UnexpectedEof => io::Error::new(e.kind(), "the transfer ended in the middle"),
        _ => e,
    };
    match incoming.next().map_err(ended)?.split_first() {
        Some((&RECORD_PIECE, piece)) => Ok(ReceivedRecord::Piece(piece)),
        Some((&RECORD_MARK, mark)) => from_bytes(mark)
            .map(ReceivedRecord::Mark)
            .map_err(io::Error::other),
        _ => Err(invalid("something came that belongs to no set")),
    }
}

/// Passes the pieces up to the end mark to `put` and returns their total length.
fn receive_pieces<R: Read>(
    incoming: &mut RecordReader<R>,
    put: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<u64> {
    let mut received = 0;
    loop {
        match next_record(incoming)? {
            ReceivedRecord::Piece(piece) => {
                put(piece)?;
                received += piece.len() as u64;
            }
            ReceivedRecord::Mark(CopyMark::End { bytes }) if bytes == received => {
                return Ok(received);
            }
            ReceivedRecord::Mark(_) => {
                return Err(invalid("what came is not as long as what was sent"));
            }
        }
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::super::bulk_tcp::ConnectionKeys;
    use super::*;
    use checkpoint::store::{CheckpointId, CheckpointStore, StoreLimits};
    use std::path::Path;

    const JOB: Tid = Tid::from_raw(0x40001);

    fn store(dir: &Path, name: &str) -> CheckpointStore {
        let place = dir.join(name);
        std::fs::create_dir(&place).expect("made");
        CheckpointStore::open(
            &place.join("store"),
            &place.join("key"),
            StoreLimits::default(),
        )
        .expect("opened")
        .for_vm("pvm")
    }

    /// Creates a checkpoint of two tasks and returns its id.
    fn made(dir: &Path, store: &CheckpointStore) -> CheckpointId {
        let draft = store.begin(JOB, Micros::from_secs(5)).expect("room");
        for tid in [0x40001, 0x80001] {
            let images = dir.join(format!("images-{tid}"));
            std::fs::create_dir(&images).expect("made");
            let content: Vec<u8> = (0..900_000)
                .map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
                .collect();
            std::fs::write(images.join("pages-1.img"), content).expect("written");
            std::fs::write(images.join("zeros"), [0; 50_000]).expect("written");
            draft.add(Tid::from_raw(tid), &images).expect("added");
        }
        draft.finish(&[7; 600_000]).expect("complete").id
    }

    fn sent(store: &CheckpointStore, id: CheckpointId) -> Vec<u8> {
        let mut bytes = Vec::new();
        let out = RecordWriter::new(&mut bytes, ConnectionKeys::for_test(1).for_listener().0);
        let sent = send_checkpoint(
            &store.open_checkpoint(&id).expect("there"),
            out,
            &RateLimit::default(),
        )
        .expect("sent");
        assert!(
            sent.bytes > 2 * 900_000 + 600_000 && sent.bytes < 2_450_000,
            "zeros are not sent: {sent:?}"
        );
        bytes
    }

    fn received(bytes: &[u8], into: &CheckpointStore, id: CheckpointId) -> Result<u64, Failure> {
        let mut incoming = RecordReader::new(bytes, ConnectionKeys::for_test(1).for_connector().1);
        receive_checkpoint(&mut incoming, |made, bytes| {
            into.begin_copy(id, made, bytes)
        })
    }

    #[test]
    fn copied_checkpoint_equals_the_original() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (here, there) = (
            store(scratch.path(), "here"),
            store(scratch.path(), "there"),
        );
        let id = made(scratch.path(), &here);
        received(&sent(&here, id), &there, id).expect("received");
        let (from, to) = (
            here.open_checkpoint(&id).expect("there"),
            there.open_checkpoint(&id).expect("there"),
        );
        assert_eq!(
            (from.meta(), &from.info().vm, from.info().started),
            (to.meta(), &to.info().vm, to.info().started)
        );
        for tid in from.info().parts.iter().map(|part| part.tid) {
            let unpacked = scratch.path().join(format!("unpacked-{tid}"));
            to.unpack(tid, &unpacked).expect("unpacked");
            for file in ["pages-1.img", "zeros"] {
                let was = std::fs::read(
                    scratch
                        .path()
                        .join(format!("images-{}", tid.raw()))
                        .join(file),
                )
                .expect("there");
                assert!(
                    std::fs::read(unpacked.join(file)).expect("there") == was,
                    "{tid}: {file}"
                );
            }
        }
        let again = received(&sent(&here, id), &there, id).expect_err("it is there");
        assert!(
            again.to_string().contains("is in this store already"),
            "{again}"
        );
    }

    /// A copy that arrives truncated or altered leaves nothing visible in the store.
    #[test]
    fn truncated_or_altered_copy_is_not_visible() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (here, there) = (
            store(scratch.path(), "here"),
            store(scratch.path(), "there"),
        );
        let id = made(scratch.path(), &here);
        let whole = sent(&here, id);
        for cut in [0, 1, 30, 5_000, whole.len() / 2, whole.len() - 1] {
            let failed = received(&whole[..cut], &there, id).expect_err("not all of it");
            assert!(
                failed.to_string().contains("in the middle"),
                "{cut}: {failed}"
            );
            let mut changed = whole.clone();
            changed[cut] ^= 1;
            received(&changed, &there, id).expect_err("not what was sent");
        }
        assert_eq!(there.list_checkpoints().expect("listed").0, []);
        assert_eq!(
            std::fs::read_dir(scratch.path().join("there/store"))
                .expect("there")
                .count(),
            1,
            "its lock"
        );
        received(&whole, &there, id).expect("it may be sent again");
    }
}
