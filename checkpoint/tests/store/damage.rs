//! Damage marks, and the checkpoints that are used instead of damaged ones.

use super::{JOB, OTHER_JOB, ScratchDir, small_files};
use checkpoint::store::{CheckpointId, CheckpointStore, StoreLimits};
use sempa_proto::Micros;
use std::fs;

/// The newest older checkpoint of the same job is found, whichever virtual machine made it.
/// Checkpoints of other jobs, also of those with the same number, damaged and unreadable ones are
/// not.
#[test]
fn older_intact_checkpoint_of_the_job_is_found() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    let (own_store, other_store) = (store.for_vm("own"), store.for_vm("other"));
    let write = |store: &CheckpointStore, job, second| {
        scratch_dir
            .write_checkpoint(store, job, second, &small_files())
            .id
    };
    let mut ids: Vec<CheckpointId> = (1..=3)
        .map(|second| write(&own_store, JOB, 2 * second))
        .collect();
    // The job ran elsewhere for a time.
    let foreign_id = write(&other_store, JOB, 7);
    write(&own_store, OTHER_JOB, 7);
    let draft = own_store
        .begin(JOB, Micros::from_secs(7))
        .expect("there is room");
    draft.finish(b"another job").expect("finished");
    ids.push(write(&own_store, JOB, 8));
    let find_older = |id: &CheckpointId| {
        let is_same_job = |description: &[u8]| description == b"meta";
        own_store
            .find_older_checkpoint(id, JOB, is_same_job)
            .expect("read")
    };
    assert_eq!(find_older(&ids[3]), Some(foreign_id));
    let mark_damaged = |id: &CheckpointId| {
        let result = own_store.mark_damaged(id, Some("a byte was changed"));
        result.expect("marked");
    };
    mark_damaged(&foreign_id);
    assert_eq!(find_older(&ids[3]), Some(ids[2]));
    mark_damaged(&ids[2]);
    assert_eq!(find_older(&ids[3]), Some(ids[1]));
    let manifest = scratch_dir
        .path("store")
        .join(ids[1].to_string())
        .join("manifest");
    fs::write(manifest, "no manifest").expect("written");
    assert_eq!(find_older(&ids[3]), Some(ids[0]));
    assert_eq!(find_older(&ids[0]), None);
    // The damaged checkpoint itself may be unreadable.
    assert_eq!(find_older(&ids[1]), Some(ids[0]));
}

/// A mark keeps its first reason, is listed, and can be removed. The checkpoint itself is
/// unchanged.
#[test]
fn damage_mark_is_listed_until_it_is_removed() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    let info = scratch_dir.write_checkpoint(&store, JOB, 1, &small_files());
    let listed_damage = || {
        let (checkpoints, unreadable_entries) = store.list_checkpoints().expect("listed");
        assert!(unreadable_entries.is_empty(), "{unreadable_entries:?}");
        checkpoints[0].damage.clone()
    };
    assert_eq!(listed_damage(), None);
    for reason in ["a byte was changed", "another reason"] {
        store.mark_damaged(&info.id, Some(reason)).expect("marked");
        assert_eq!(listed_damage().as_deref(), Some("a byte was changed"));
    }
    scratch_dir.unpack(&store, &info.id, JOB).expect("intact");
    for _ in 0..2 {
        store.mark_damaged(&info.id, None).expect("unmarked");
        assert_eq!(listed_damage(), None);
    }
    store.remove_checkpoint(&info.id).expect("removed");
    store
        .mark_damaged(&info.id, Some("it is gone"))
        .expect("nothing to mark");
    assert!(!scratch_dir.path("store").join(info.id.to_string()).exists());
}
