//! Copies a checkpoint from the master's store to the store of another host.
//!
//! The sender decrypts the data of the checkpoint and sends the data through a connection that has
//! its own keys ([`super::bulk_tcp`]). The receiving host encrypts the data with the key of its own
//! store; no store needs the key of another store. The copy becomes visible only when all of its
//! data is on the disk.

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

/// Maximum number of bytes of checkpoint data in one record.
const PIECE_BYTES_MAX: usize = 256 << 10;

/// Records that mark the structure of a copy. The data of the checkpoint is sent between these
/// records.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum CopyMark {
    /// First record of a copy. `started` is the time at which the checkpoint was begun (since
    /// 1970), `bytes` is the size of the checkpoint in the master's store.
    Checkpoint { started: Micros, bytes: u64 },
    /// The part of the task `tid` begins. The images of the task have `images_bytes` bytes when
    /// unpacked.
    Part { tid: Tid, images_bytes: u64 },
    /// The checkpoint's metadata begins. The metadata follows all parts.
    Meta,
    /// The current part or the metadata is complete and consists of `bytes` bytes.
    End { bytes: u64 },
}

/// Sends a checkpoint. `rate` limits the transfer rate. Returns the amounts of data sent.
pub(super) fn send_checkpoint<W: Write>(
    checkpoint: &StoredCheckpoint,
    mut writer: RecordWriter<W>,
    rate: &RateLimit,
) -> Result<SentAmounts, Failure> {
    let checkpoint_info = checkpoint.info();
    let mut sent_amounts = SentAmounts::default();
    send_mark(
        &mut writer,
        &CopyMark::Checkpoint {
            started: checkpoint_info.started_at,
            bytes: checkpoint_info.bytes,
        },
    )?;
    for part in &checkpoint_info.parts {
        send_mark(
            &mut writer,
            &CopyMark::Part {
                tid: part.tid,
                images_bytes: part.images_bytes,
            },
        )?;
        let mut bytes = 0;
        let copy_result = checkpoint.copy_part(part.tid, |content| {
            bytes += content.len() as u64;
            send_pieces(&mut writer, rate, content)
        });
        copy_result.map_err(|why| Failure::Images(why.to_string()))?;
        send_mark(&mut writer, &CopyMark::End { bytes })?;
        sent_amounts.file_bytes += bytes;
    }
    let meta = checkpoint.description();
    send_mark(&mut writer, &CopyMark::Meta)?;
    send_pieces(&mut writer, rate, meta).map_err(send_failure)?;
    send_mark(
        &mut writer,
        &CopyMark::End {
            bytes: meta.len() as u64,
        },
    )?;
    sent_amounts.file_bytes += meta.len() as u64;
    sent_amounts.wire_bytes = sent_amounts.file_bytes;
    Ok(sent_amounts)
}

fn send_pieces<W: Write>(
    writer: &mut RecordWriter<W>,
    rate: &RateLimit,
    content: &[u8],
) -> io::Result<()> {
    content.chunks(PIECE_BYTES_MAX).try_for_each(|piece| {
        rate.wait_for_slot(piece.len());
        let Ok(send_result) = writer.send(1 + piece.len(), |buffer| {
            buffer[0] = RECORD_PIECE;
            buffer[1..].copy_from_slice(piece);
            Ok::<(), Infallible>(())
        });
        send_result
    })
}

/// Receives a checkpoint and completes the copy in the store. `create_draft` creates the draft from
/// the checkpoint's start time and its size in bytes. Returns the number of bytes received.
pub(super) fn receive_checkpoint<R: Read>(
    reader: &mut RecordReader<R>,
    create_draft: impl FnOnce(Micros, u64) -> Result<CheckpointDraft, StoreError>,
) -> Result<u64, Failure> {
    let store_failure = |why: StoreError| Failure::Io(why.to_string());
    let ReceivedRecord::Mark(CopyMark::Checkpoint { started, bytes }) =
        next_record(reader).map_err(receive_failure)?
    else {
        return Err(format_failure("the checkpoint was not announced"));
    };
    let draft = create_draft(started, bytes).map_err(store_failure)?;
    let mut received_bytes = 0;
    loop {
        match next_record(reader).map_err(receive_failure)? {
            ReceivedRecord::Mark(CopyMark::Part { tid, images_bytes }) => {
                let add_result = draft.add_task_copy(tid, images_bytes, |write_piece| {
                    received_bytes += receive_pieces(reader, write_piece)?;
                    Ok(())
                });
                add_result.map_err(store_failure)?;
            }
            ReceivedRecord::Mark(CopyMark::Meta) => {
                let mut meta = Vec::new();
                received_bytes += receive_pieces(reader, &mut |piece| {
                    if meta.len() + piece.len() > checkpoint::store::DESCRIPTION_BYTES_MAX {
                        return Err(invalid_data(
                            "the checkpoint's metadata is longer than the limit",
                        ));
                    }
                    meta.extend_from_slice(piece);
                    Ok(())
                })
                .map_err(receive_failure)?;
                draft.finish(&meta).map_err(store_failure)?;
                return Ok(received_bytes);
            }
            _ => return Err(format_failure("neither a task nor the end was announced")),
        }
    }
}

/// A received record: a structure mark or a piece of data.
enum ReceivedRecord<'a> {
    Mark(CopyMark),
    Piece(&'a [u8]),
}

fn next_record<R: Read>(reader: &mut RecordReader<R>) -> io::Result<ReceivedRecord<'_>> {
    let read_error = |e: io::Error| match e.kind() {
        ErrorKind::UnexpectedEof => io::Error::new(e.kind(), "the transfer ended in the middle"),
        _ => e,
    };
    match reader.wait_for_record().map_err(read_error)?.split_first() {
        Some((&RECORD_PIECE, piece)) => Ok(ReceivedRecord::Piece(piece)),
        Some((&RECORD_MARK, mark)) => from_bytes(mark)
            .map(ReceivedRecord::Mark)
            .map_err(io::Error::other),
        _ => Err(invalid_data(
            "received a record that does not belong to a checkpoint",
        )),
    }
}

/// Passes the pieces up to the end mark to `write_piece` and returns their total length in bytes.
fn receive_pieces<R: Read>(
    reader: &mut RecordReader<R>,
    write_piece: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<u64> {
    let mut received_bytes = 0;
    loop {
        match next_record(reader)? {
            ReceivedRecord::Piece(piece) => {
                write_piece(piece)?;
                received_bytes += piece.len() as u64;
            }
            ReceivedRecord::Mark(CopyMark::End { bytes }) if bytes == received_bytes => {
                return Ok(received_bytes);
            }
            ReceivedRecord::Mark(_) => {
                return Err(invalid_data(
                    "received another number of bytes than was sent",
                ));
            }
        }
    }
}

fn invalid_data(reason: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use super::super::bulk_tcp::ConnectionKeys;
    use super::*;
    use checkpoint::store::{CheckpointId, CheckpointStore, StoreLimits};
    use std::path::Path;

    const JOB: Tid = Tid::from_raw(0x40001);

    fn create_store(dir: &Path, name: &str) -> CheckpointStore {
        let store_dir = dir.join(name);
        std::fs::create_dir(&store_dir).expect("made");
        CheckpointStore::open(
            &store_dir.join("store"),
            &store_dir.join("key"),
            StoreLimits::default(),
        )
        .expect("opened")
        .for_vm("pvm")
    }

    /// Creates a checkpoint of two tasks and returns its id.
    fn create_checkpoint(dir: &Path, store: &CheckpointStore) -> CheckpointId {
        let draft = store.begin(JOB, Micros::from_secs(5)).expect("room");
        for tid in [0x40001, 0x80001] {
            let images_dir = dir.join(format!("images-{tid}"));
            std::fs::create_dir(&images_dir).expect("made");
            let content: Vec<u8> = (0..900_000)
                .map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
                .collect();
            std::fs::write(images_dir.join("pages-1.img"), content).expect("written");
            std::fs::write(images_dir.join("zeros"), [0; 50_000]).expect("written");
            draft
                .add_task(Tid::from_raw(tid), &images_dir)
                .expect("added");
        }
        draft.finish(&[7; 600_000]).expect("complete").id
    }

    fn send_to_bytes(store: &CheckpointStore, id: CheckpointId) -> Vec<u8> {
        let mut bytes = Vec::new();
        let writer = RecordWriter::new(&mut bytes, ConnectionKeys::for_test(1).for_listener().0);
        let sent_amounts = send_checkpoint(
            &store.open_checkpoint(&id).expect("there"),
            writer,
            &RateLimit::default(),
        )
        .expect("sent");
        assert!(
            sent_amounts.file_bytes > 2 * 900_000 + 600_000 && sent_amounts.file_bytes < 2_450_000,
            "zeros are not sent: {sent_amounts:?}"
        );
        bytes
    }

    fn receive_into(
        bytes: &[u8],
        store: &CheckpointStore,
        id: CheckpointId,
    ) -> Result<u64, Failure> {
        let mut reader = RecordReader::new(bytes, ConnectionKeys::for_test(1).for_connector().1);
        receive_checkpoint(&mut reader, |started, bytes| {
            store.begin_copy(id, started, bytes)
        })
    }

    #[test]
    fn copied_checkpoint_equals_the_original() {
        let scratch_dir = tempfile::tempdir().expect("a directory");
        let (source_store, target_store) = (
            create_store(scratch_dir.path(), "here"),
            create_store(scratch_dir.path(), "there"),
        );
        let id = create_checkpoint(scratch_dir.path(), &source_store);
        receive_into(&send_to_bytes(&source_store, id), &target_store, id).expect("received");
        let (original_checkpoint, copied_checkpoint) = (
            source_store.open_checkpoint(&id).expect("there"),
            target_store.open_checkpoint(&id).expect("there"),
        );
        assert_eq!(
            (
                original_checkpoint.description(),
                &original_checkpoint.info().vm,
                original_checkpoint.info().started_at
            ),
            (
                copied_checkpoint.description(),
                &copied_checkpoint.info().vm,
                copied_checkpoint.info().started_at
            )
        );
        for tid in original_checkpoint.info().parts.iter().map(|part| part.tid) {
            let unpacked_dir = scratch_dir.path().join(format!("unpacked-{tid}"));
            copied_checkpoint
                .unpack_task(tid, &unpacked_dir)
                .expect("unpacked");
            for file_name in ["pages-1.img", "zeros"] {
                let original_content = std::fs::read(
                    scratch_dir
                        .path()
                        .join(format!("images-{}", tid.raw()))
                        .join(file_name),
                )
                .expect("there");
                assert!(
                    std::fs::read(unpacked_dir.join(file_name)).expect("there") == original_content,
                    "{tid}: {file_name}"
                );
            }
        }
        let second_copy_error = receive_into(&send_to_bytes(&source_store, id), &target_store, id)
            .expect_err("it is there");
        assert!(
            second_copy_error
                .to_string()
                .contains("is in this store already"),
            "{second_copy_error}"
        );
    }

    /// A truncated or altered copy creates no visible checkpoint in the store.
    #[test]
    fn truncated_or_altered_copy_is_not_visible() {
        let scratch_dir = tempfile::tempdir().expect("a directory");
        let (source_store, target_store) = (
            create_store(scratch_dir.path(), "here"),
            create_store(scratch_dir.path(), "there"),
        );
        let id = create_checkpoint(scratch_dir.path(), &source_store);
        let copy_bytes = send_to_bytes(&source_store, id);
        for offset in [0, 1, 30, 5_000, copy_bytes.len() / 2, copy_bytes.len() - 1] {
            let truncation_error =
                receive_into(&copy_bytes[..offset], &target_store, id).expect_err("not all of it");
            assert!(
                truncation_error.to_string().contains("in the middle"),
                "{offset}: {truncation_error}"
            );
            let mut altered_bytes = copy_bytes.clone();
            altered_bytes[offset] ^= 1;
            receive_into(&altered_bytes, &target_store, id).expect_err("not what was sent");
        }
        assert_eq!(target_store.list_checkpoints().expect("listed").0, []);
        assert_eq!(
            std::fs::read_dir(scratch_dir.path().join("there/store"))
                .expect("there")
                .count(),
            1,
            "its lock"
        );
        receive_into(&copy_bytes, &target_store, id).expect("it may be sent again");
    }
}
