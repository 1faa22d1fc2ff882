//! Copies of checkpoints in a second store.

use super::{JOB, OTHER_JOB, Scratch, files_from, random_content};
use checkpoint::store::{CheckpointId, CheckpointInfo, CheckpointStore, StoreError, StoreLimits};
use std::fs;

/// Opens another store, which has its own key.
fn open_second_store(scratch: &Scratch, limits: StoreLimits) -> CheckpointStore {
    let place = scratch.path("elsewhere");
    CheckpointStore::open(&place.join("store"), &place.join("keys/key"), limits).expect("opened")
}

fn copy_checkpoint(
    from: &CheckpointStore,
    to: &CheckpointStore,
    id: &CheckpointId,
) -> Result<CheckpointInfo, StoreError> {
    let set = from.open_checkpoint(id)?;
    let draft = to.begin_copy(*id, set.info().started, set.info().bytes)?;
    for part in &set.info().parts {
        draft.add_copy(part.tid, part.images_bytes, |put| {
            set.copy_part(part.tid, put).map_err(std::io::Error::other)
        })?;
    }
    draft.finish(set.meta())
}

/// A copy of a checkpoint equals the original, and is encrypted with the key of its store.
#[test]
fn copy_equals_original_under_its_own_key() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("elsewhere")).expect("made");
    let (store, other) = (
        scratch.store(StoreLimits::default()).for_vm("vm"),
        open_second_store(&scratch, StoreLimits::default()).for_vm("vm"),
    );
    let large = files_from(&[
        ("pages-1.img", &random_content(3 << 20)),
        ("zeros", &[0; 100_000]),
        ("empty", b""),
    ]);
    let info = scratch.write_checkpoint(&store, JOB, 7, &large);
    let copied = copy_checkpoint(&store, &other, &info.id).expect("copied");
    assert_eq!(
        CheckpointInfo {
            bytes: info.bytes,
            ..copied.clone()
        },
        info,
        "all but its length, which may differ a little"
    );
    assert_eq!(scratch.unpack(&other, &info.id, JOB).expect("whole"), large);
    assert_eq!(
        other.open_checkpoint(&info.id).expect("there").meta(),
        b"meta"
    );
    assert_eq!(other.list_checkpoints().expect("listed").0, [copied]);
    let again = copy_checkpoint(&store, &other, &info.id).expect_err("it is there");
    assert!(
        matches!(again, StoreError::CheckpointExists(id) if id == info.id),
        "{again}"
    );
    // A file of the first store cannot be decrypted with the key of the second store.
    let file = |place: &str| {
        scratch
            .path(place)
            .join(info.id.to_string())
            .join(JOB.to_string())
    };
    fs::copy(file("store"), file("elsewhere/store")).expect("copied");
    let mixed = scratch
        .unpack(&other, &info.id, JOB)
        .expect_err("another key");
    assert!(matches!(mixed, StoreError::OtherKey { .. }), "{mixed}");
    assert!(scratch.unpack(&store, &info.id, JOB).is_ok());
}

/// A copy that is interrupted or exceeds the limits leaves no files.
#[test]
fn failed_copy_leaves_nothing() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("elsewhere")).expect("made");
    let limits = StoreLimits {
        checkpoints_max: 8,
        bytes_max: 2_000_000,
    };
    let (store, other) = (
        scratch.store(StoreLimits::default()),
        open_second_store(&scratch, limits),
    );
    let there = || {
        fs::read_dir(scratch.path("elsewhere/store"))
            .expect("readable")
            .count()
    };
    let before = there();
    let info = scratch.write_checkpoint(
        &store,
        JOB,
        7,
        &files_from(&[("pages-1.img", &random_content(1 << 20))]),
    );
    let set = store.open_checkpoint(&info.id).expect("there");
    let draft = other
        .begin_copy(info.id, info.started, info.bytes)
        .expect("room");
    let breaks = draft.add_copy(JOB, 1 << 20, |put| {
        put(b"a piece")?;
        Err(std::io::Error::other("the line was cut"))
    });
    assert!(
        matches!(&breaks, Err(StoreError::Io { source, .. }) if source.to_string() == "the line was cut"),
        "{breaks:?}"
    );
    let part = draft.add_copy(JOB, 1 << 20, |put| {
        set.copy_part(JOB, put).map_err(std::io::Error::other)
    });
    part.expect("it may be tried again");
    drop(draft);
    let large = scratch.write_checkpoint(
        &store,
        OTHER_JOB,
        8,
        &files_from(&[("pages-1.img", &random_content(3 << 20))]),
    );
    assert!(matches!(
        copy_checkpoint(&store, &other, &large.id),
        Err(StoreError::LimitsExceeded { .. })
    ));
    // The copy is larger than announced.
    let set = store.open_checkpoint(&large.id).expect("there");
    let draft = other
        .begin_copy(large.id, large.started, 1)
        .expect("room for one byte");
    let too_large = draft.add_copy(OTHER_JOB, 1, |put| {
        set.copy_part(OTHER_JOB, put).map_err(std::io::Error::other)
    });
    assert!(
        matches!(too_large, Err(StoreError::CheckpointTooLarge { .. })),
        "{too_large:?}"
    );
    drop(draft);
    assert_eq!(there(), before, "nothing is left");
}

#[test]
fn changed_original_gives_no_copy() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("elsewhere")).expect("made");
    let (store, other) = (
        scratch.store(StoreLimits::default()),
        open_second_store(&scratch, StoreLimits::default()),
    );
    let info = scratch.write_checkpoint(
        &store,
        JOB,
        7,
        &files_from(&[("pages-1.img", &random_content(3 << 20))]),
    );
    let path = scratch
        .path("store")
        .join(info.id.to_string())
        .join(JOB.to_string());
    let mut bytes = fs::read(&path).expect("readable");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).expect("written");
    let refused = copy_checkpoint(&store, &other, &info.id).expect_err("it was changed");
    assert!(
        refused.to_string().contains("not as it was written"),
        "{refused}"
    );
    assert_eq!(other.list_checkpoints().expect("listed").0, []);
}
