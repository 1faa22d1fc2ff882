//! Copies of checkpoints in a second store.

use super::{JOB, OTHER_JOB, ScratchDir, files_from, random_content};
use checkpoint::store::{CheckpointId, CheckpointInfo, CheckpointStore, StoreError, StoreLimits};
use std::fs;

/// Opens another store, which has its own key.
fn open_second_store(scratch_dir: &ScratchDir, limits: StoreLimits) -> CheckpointStore {
    let dir = scratch_dir.path("elsewhere");
    CheckpointStore::open(&dir.join("store"), &dir.join("keys/key"), limits).expect("opened")
}

fn copy_checkpoint(
    source_store: &CheckpointStore,
    target_store: &CheckpointStore,
    id: &CheckpointId,
) -> Result<CheckpointInfo, StoreError> {
    let checkpoint = source_store.open_checkpoint(id)?;
    let draft =
        target_store.begin_copy(*id, checkpoint.info().started_at, checkpoint.info().bytes)?;
    for part in &checkpoint.info().parts {
        draft.add_task_copy(part.tid, part.images_bytes, |write_piece| {
            checkpoint
                .copy_part(part.tid, write_piece)
                .map_err(std::io::Error::other)
        })?;
    }
    draft.finish(checkpoint.description())
}

/// A copy of a checkpoint equals the original, and is encrypted with the key of its store.
#[test]
fn copy_equals_original_under_its_own_key() {
    let scratch_dir = ScratchDir::new();
    fs::create_dir(scratch_dir.path("elsewhere")).expect("made");
    let (store, second_store) = (
        scratch_dir
            .open_own_store(StoreLimits::default())
            .for_vm("vm"),
        open_second_store(&scratch_dir, StoreLimits::default()).for_vm("vm"),
    );
    let large_files = files_from(&[
        ("pages-1.img", &random_content(3 << 20)),
        ("zeros", &[0; 100_000]),
        ("empty", b""),
    ]);
    let info = scratch_dir.write_checkpoint(&store, JOB, 7, &large_files);
    let copy_info = copy_checkpoint(&store, &second_store, &info.id).expect("copied");
    assert_eq!(
        CheckpointInfo {
            bytes: info.bytes,
            ..copy_info.clone()
        },
        info,
        "all but its length, which may differ a little"
    );
    assert_eq!(
        scratch_dir
            .unpack(&second_store, &info.id, JOB)
            .expect("whole"),
        large_files
    );
    assert_eq!(
        second_store
            .open_checkpoint(&info.id)
            .expect("there")
            .description(),
        b"meta"
    );
    assert_eq!(
        second_store.list_checkpoints().expect("listed").0,
        [copy_info]
    );
    let second_copy_error =
        copy_checkpoint(&store, &second_store, &info.id).expect_err("it is there");
    assert!(
        matches!(second_copy_error, StoreError::CheckpointExists(id) if id == info.id),
        "{second_copy_error}"
    );
    // A file of the first store cannot be decrypted with the key of the second store.
    let part_path = |store_dir: &str| {
        scratch_dir
            .path(store_dir)
            .join(info.id.to_string())
            .join(JOB.to_string())
    };
    fs::copy(part_path("store"), part_path("elsewhere/store")).expect("copied");
    let mixed_error = scratch_dir
        .unpack(&second_store, &info.id, JOB)
        .expect_err("another key");
    assert!(
        matches!(mixed_error, StoreError::OtherKey { .. }),
        "{mixed_error}"
    );
    assert!(scratch_dir.unpack(&store, &info.id, JOB).is_ok());
}

/// A copy that is interrupted or exceeds the limits leaves no files.
#[test]
fn failed_copy_leaves_nothing() {
    let scratch_dir = ScratchDir::new();
    fs::create_dir(scratch_dir.path("elsewhere")).expect("made");
    let limits = StoreLimits {
        checkpoints_max: 8,
        bytes_max: 2_000_000,
    };
    let (store, second_store) = (
        scratch_dir.open_own_store(StoreLimits::default()),
        open_second_store(&scratch_dir, limits),
    );
    let second_store_names = || {
        fs::read_dir(scratch_dir.path("elsewhere/store"))
            .expect("readable")
            .count()
    };
    let names_before = second_store_names();
    let info = scratch_dir.write_checkpoint(
        &store,
        JOB,
        7,
        &files_from(&[("pages-1.img", &random_content(1 << 20))]),
    );
    let checkpoint = store.open_checkpoint(&info.id).expect("there");
    let draft = second_store
        .begin_copy(info.id, info.started_at, info.bytes)
        .expect("room");
    let interrupted_result = draft.add_task_copy(JOB, 1 << 20, |write| {
        write(b"a piece")?;
        Err(std::io::Error::other("the line was cut"))
    });
    assert!(
        matches!(&interrupted_result, Err(StoreError::Io { source, .. }) if source.to_string() == "the line was cut"),
        "{interrupted_result:?}"
    );
    let part_result = draft.add_task_copy(JOB, 1 << 20, |write| {
        checkpoint
            .copy_part(JOB, write)
            .map_err(std::io::Error::other)
    });
    part_result.expect("it may be tried again");
    drop(draft);
    let large_info = scratch_dir.write_checkpoint(
        &store,
        OTHER_JOB,
        8,
        &files_from(&[("pages-1.img", &random_content(3 << 20))]),
    );
    assert!(matches!(
        copy_checkpoint(&store, &second_store, &large_info.id),
        Err(StoreError::LimitsExceeded { .. })
    ));
    // The copy is larger than announced.
    let checkpoint = store.open_checkpoint(&large_info.id).expect("there");
    let draft = second_store
        .begin_copy(large_info.id, large_info.started_at, 1)
        .expect("room for one byte");
    let too_large_result = draft.add_task_copy(OTHER_JOB, 1, |write| {
        checkpoint
            .copy_part(OTHER_JOB, write)
            .map_err(std::io::Error::other)
    });
    assert!(
        matches!(too_large_result, Err(StoreError::CheckpointTooLarge { .. })),
        "{too_large_result:?}"
    );
    drop(draft);
    assert_eq!(second_store_names(), names_before, "nothing is left");
}

#[test]
fn changed_original_gives_no_copy() {
    let scratch_dir = ScratchDir::new();
    fs::create_dir(scratch_dir.path("elsewhere")).expect("made");
    let (store, second_store) = (
        scratch_dir.open_own_store(StoreLimits::default()),
        open_second_store(&scratch_dir, StoreLimits::default()),
    );
    let info = scratch_dir.write_checkpoint(
        &store,
        JOB,
        7,
        &files_from(&[("pages-1.img", &random_content(3 << 20))]),
    );
    let path = scratch_dir
        .path("store")
        .join(info.id.to_string())
        .join(JOB.to_string());
    let mut bytes = fs::read(&path).expect("readable");
    let middle_index = bytes.len() / 2;
    bytes[middle_index] ^= 1;
    fs::write(&path, bytes).expect("written");
    let error = copy_checkpoint(&store, &second_store, &info.id).expect_err("it was changed");
    assert!(
        error.to_string().contains("not as it was written"),
        "{error}"
    );
    assert_eq!(second_store.list_checkpoints().expect("listed").0, []);
}
