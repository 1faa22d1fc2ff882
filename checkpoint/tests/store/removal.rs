//! Removal of checkpoints because of the limits, and after the retention time of ended jobs.
//! Foreign files are not removed.

use super::{JOB, OTHER_JOB, ScratchDir, TASK, files_from, random_content, small_files};
use checkpoint::store::{
    CheckpointId, CheckpointInfo, CheckpointStore, ENDED_JOB_RETENTION, StoreError, StoreLimits,
};
use sempa_proto::{Micros, Tid};
use std::fs;
use std::os::unix::fs::symlink;

/// If the limits are exceeded, the oldest checkpoints are removed, but never the newest checkpoint
/// of a job.
#[test]
fn oldest_are_removed_first_but_never_newest_of_job() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits {
        checkpoints_max: 3,
        ..StoreLimits::default()
    });
    let ids: Vec<CheckpointId> = (1..=3)
        .map(|start_second| {
            scratch_dir
                .write_checkpoint(&store, JOB, start_second, &small_files())
                .id
        })
        .collect();
    let other_id = scratch_dir
        .write_checkpoint(&store, OTHER_JOB, 4, &small_files())
        .id;
    let newest_id = scratch_dir
        .write_checkpoint(&store, JOB, 5, &small_files())
        .id;
    let retained_id = ids[0];
    let sweep_result = store
        .enforce_limits(|checkpoint| checkpoint.id == retained_id)
        .expect("swept");
    assert_eq!(
        sweep_result
            .removed
            .iter()
            .map(|checkpoint| checkpoint.id)
            .collect::<Vec<_>>(),
        ids[1..]
    );
    assert_eq!(
        (
            sweep_result.checkpoints_over_limit,
            sweep_result.bytes_over_limit
        ),
        (0, 0)
    );
    let remaining_ids = |store: &CheckpointStore| {
        store
            .list_checkpoints()
            .expect("listed")
            .0
            .iter()
            .map(|checkpoint| checkpoint.id)
            .collect::<Vec<_>>()
    };
    assert_eq!(remaining_ids(&store), [retained_id, other_id, newest_id]);
    let limited_store = scratch_dir.open_own_store(StoreLimits {
        checkpoints_max: 1,
        ..StoreLimits::default()
    });
    let sweep_result = limited_store.enforce_limits(|_| false).expect("swept");
    assert_eq!(
        (
            sweep_result.removed.len(),
            sweep_result.checkpoints_over_limit
        ),
        (1, 1),
        "the newest of two jobs"
    );
    assert_eq!(remaining_ids(&limited_store), [other_id, newest_id]);
    assert!(matches!(
        limited_store.begin(JOB, Micros(0)),
        Err(StoreError::LimitsExceeded { checkpoints: 1, .. })
    ));
    // The same job number in another virtual machine is another job.
    let two_checkpoint_store = scratch_dir.open_own_store(StoreLimits {
        checkpoints_max: 2,
        ..StoreLimits::default()
    });
    two_checkpoint_store.begin(JOB, Micros(0)).expect("begun");
    assert!(matches!(
        two_checkpoint_store.for_vm("other").begin(JOB, Micros(0)),
        Err(StoreError::LimitsExceeded { checkpoints: 2, .. })
    ));
}

/// A checkpoint is refused if it is larger than the limit minus the newest checkpoints of the other
/// jobs.
#[test]
fn too_large_checkpoint_is_refused() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits {
        bytes_max: 100_000,
        ..StoreLimits::default()
    });
    let large_files = files_from(&[("pages-1.img", &random_content(60_000))]);
    scratch_dir.write_checkpoint(&store, JOB, 1, &large_files);
    scratch_dir.write_checkpoint(&store, JOB, 2, &large_files);
    let sweep_result = store.enforce_limits(|_| false).expect("swept");
    assert_eq!(
        (sweep_result.removed.len(), sweep_result.bytes_over_limit),
        (1, 0)
    );
    let (small_images, large_files) = (
        scratch_dir.write_images("small", &small_files()),
        scratch_dir.write_images("large", &large_files),
    );
    let draft = store.begin(OTHER_JOB, Micros(0)).expect("begun");
    assert!(matches!(
        draft.add_task(TASK, &large_files),
        Err(StoreError::CheckpointTooLarge { tid: TASK, .. })
    ));
    draft
        .add_task(TASK, &small_images)
        .expect("there is room for it");
    draft
        .add_task(
            JOB,
            &scratch_dir.write_images(
                "ten",
                &files_from(&[("pages-1.img", &random_content(10_000))]),
            ),
        )
        .expect("added");
    // Both drafts together would exceed the limit.
    let second_draft = store.begin(TASK, Micros(0)).expect("begun");
    second_draft
        .add_task(
            TASK,
            &scratch_dir.write_images(
                "middle",
                &files_from(&[("pages-1.img", &random_content(35_000))]),
            ),
        )
        .expect("added");
    second_draft.finish(b"").expect("finished");
    assert!(matches!(
        draft.finish(b""),
        Err(StoreError::LimitsExceeded { checkpoints: 2, .. })
    ));
    assert_eq!(store.list_checkpoints().expect("listed").0.len(), 2);
}

#[test]
fn open_checkpoint_is_not_removed() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits {
        checkpoints_max: 1,
        ..StoreLimits::default()
    });
    let (old_id, new_id) = (
        scratch_dir
            .write_checkpoint(&store, JOB, 1, &small_files())
            .id,
        scratch_dir
            .write_checkpoint(&store, JOB, 2, &small_files())
            .id,
    );
    let first_reader = store.open_checkpoint(&old_id).expect("opened");
    let second_reader = store.open_checkpoint(&old_id).expect("two may read");
    assert!(matches!(
        store.remove_checkpoint(&old_id),
        Err(StoreError::InUse(_))
    ));
    let sweep_result = store.enforce_limits(|_| false).expect("swept");
    assert_eq!(
        (
            sweep_result.removed.len(),
            sweep_result.checkpoints_over_limit
        ),
        (0, 1)
    );
    drop((first_reader, second_reader));
    assert_eq!(
        store
            .enforce_limits(|_| false)
            .expect("swept")
            .removed
            .len(),
        1
    );
    assert!(matches!(
        store.open_checkpoint(&old_id),
        Err(StoreError::NoCheckpoint(_))
    ));
    assert!(matches!(
        store.remove_checkpoint(&old_id),
        Err(StoreError::NoCheckpoint(_))
    ));
    store
        .remove_checkpoint(&new_id)
        .expect("also the newest one, if somebody says so");
    assert_eq!(store.list_checkpoints().expect("listed").0, []);
}

/// A store that is full of checkpoints of ended jobs accepts a new checkpoint. Then the oldest
/// checkpoint of the ended jobs is removed.
#[test]
fn new_checkpoint_displaces_oldest_of_ended_jobs() {
    let scratch_dir = ScratchDir::new();
    let limits = StoreLimits {
        checkpoints_max: 3,
        ..StoreLimits::default()
    };
    let store = scratch_dir.open_own_store(limits).for_vm("vm");
    let checkpoints: Vec<CheckpointInfo> = (0..3)
        .map(|n| {
            scratch_dir.write_checkpoint(
                &store,
                Tid::from_raw(OTHER_JOB.raw() + n),
                100 + n as u64,
                &small_files(),
            )
        })
        .collect();
    assert!(matches!(
        store.begin(JOB, Micros::from_secs(200)),
        Err(StoreError::LimitsExceeded { checkpoints: 3, .. })
    ));
    store
        .mark_jobs_ended(&[checkpoints[1].id], Some(Micros::from_secs(160)))
        .expect("marked");
    store
        .mark_jobs_ended(&[checkpoints[0].id], Some(Micros::from_secs(180)))
        .expect("marked");
    let new_checkpoint = scratch_dir.write_checkpoint(&store, JOB, 200, &small_files());
    let sweep_result = store.enforce_limits(|_| false).expect("swept");
    let removed_ids: Vec<CheckpointId> = sweep_result
        .removed
        .iter()
        .map(|checkpoint| checkpoint.id)
        .collect();
    assert_eq!(
        (removed_ids, sweep_result.checkpoints_over_limit),
        (vec![checkpoints[1].id], 0),
        "the job that ended first"
    );
    let remaining_ids: Vec<CheckpointId> = store
        .list_checkpoints()
        .expect("listed")
        .0
        .iter()
        .map(|checkpoint| checkpoint.id)
        .collect();
    assert_eq!(
        remaining_ids,
        [checkpoints[0].id, checkpoints[2].id, new_checkpoint.id]
    );
}

/// Checkpoints of an ended job are removed after the retention time, unless the job was restarted.
#[test]
fn checkpoints_of_ended_jobs_expire() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir
        .open_own_store(StoreLimits::default())
        .for_vm("vm");
    let ended_at = Micros::from_secs(1000);
    let (first_info, second_info) = (
        scratch_dir.write_checkpoint(&store, JOB, 100, &small_files()),
        scratch_dir.write_checkpoint(&store, JOB, 200, &small_files()),
    );
    let other_vm_info =
        scratch_dir.write_checkpoint(&store.for_vm("other"), JOB, 300, &small_files());
    let remaining_names = || {
        store
            .list_checkpoints()
            .expect("listed")
            .0
            .iter()
            .map(|checkpoint_info| (checkpoint_info.id, checkpoint_info.job_ended_at))
            .collect::<Vec<_>>()
    };
    store
        .mark_jobs_ended(&[second_info.id], Some(ended_at))
        .expect("marked");
    let all_names = [
        (first_info.id, Some(ended_at)),
        (second_info.id, Some(ended_at)),
        (other_vm_info.id, None),
    ];
    assert_eq!(
        remaining_names(),
        all_names,
        "all of the job, and of no other job of that number"
    );
    let remove_expired = |store: &CheckpointStore, now: Micros| {
        store
            .remove_expired(now, |_| false)
            .expect("tidied")
            .removed
            .len()
    };
    assert_eq!(
        remove_expired(&store, ended_at + Micros(ENDED_JOB_RETENTION.0 - 1)),
        0
    );
    assert_eq!(
        remove_expired(&store, Micros(0)),
        0,
        "a clock that was set back"
    );
    store
        .mark_jobs_ended(&[first_info.id], None)
        .expect("started again");
    assert_eq!(remove_expired(&store, ended_at + ENDED_JOB_RETENTION), 0);
    store
        .mark_jobs_ended(&[first_info.id], Some(ended_at))
        .expect("marked");
    let reader = store.open_checkpoint(&first_info.id).expect("opened");
    assert_eq!(reader.info().job_ended_at, Some(ended_at));
    assert_eq!(
        remove_expired(&store, ended_at + ENDED_JOB_RETENTION),
        1,
        "one is being read"
    );
    drop(reader);
    assert_eq!(remove_expired(&store, ended_at + ENDED_JOB_RETENTION), 1);
    assert_eq!(remaining_names(), [(other_vm_info.id, None)]);
}

#[test]
fn invalid_end_mark_is_ignored() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    let checkpoint = scratch_dir.write_checkpoint(&store, JOB, 100, &small_files());
    let mark_path = scratch_dir
        .path("store")
        .join(checkpoint.id.to_string())
        .join("ended");
    for text in [
        "",
        "1",
        "12",
        "1x\n",
        "-1\n",
        "99999999999999999999999\n",
        "1\n\n",
        "\u{e9}\n",
    ] {
        fs::write(&mark_path, text).expect("written");
        assert_eq!(
            store.list_checkpoints().expect("listed").0[0].job_ended_at,
            None,
            "{text:?}"
        );
    }
    store
        .mark_jobs_ended(&[checkpoint.id], Some(Micros(7)))
        .expect("marked");
    assert_eq!(fs::read_to_string(&mark_path).expect("there"), "7\n");
    fs::remove_file(&mark_path).expect("removed");
    symlink("/dev/zero", &mark_path).expect("linked");
    assert_eq!(
        store.list_checkpoints().expect("listed").0[0].job_ended_at,
        None
    );
}

#[test]
fn foreign_files_are_reported_and_kept() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    fs::write(scratch_dir.path("store/notes"), "mine").expect("written");
    fs::create_dir(scratch_dir.path("store").join("t40001-20261122T141503-1")).expect("made");
    let (checkpoints, unreadable_entries) = store.list_checkpoints().expect("listed");
    assert!(checkpoints.is_empty());
    assert!(
        matches!(&unreadable_entries[0], (name, StoreError::ForeignFile(_)) if name == "notes"),
        "{unreadable_entries:?}"
    );
    assert!(
        matches!(&unreadable_entries[1], (_, StoreError::Changed { .. })),
        "{unreadable_entries:?}"
    );
    store.enforce_limits(|_| false).expect("swept");
    assert!(scratch_dir.path("store/notes").exists());
}
