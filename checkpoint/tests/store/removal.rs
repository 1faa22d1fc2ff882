//! Removal of checkpoints: to make room, after their time, and of foreign files.

use super::{JOB, OTHER_JOB, Scratch, TASK, files_from, random_content, small_files};
use checkpoint::store::{
    CheckpointId, CheckpointInfo, CheckpointStore, ENDED_RETENTION, StoreError, StoreLimits,
};
use sempa_proto::{Micros, Tid};
use std::fs;
use std::os::unix::fs::symlink;

/// If the limits are exceeded, the oldest checkpoints are removed, but never the newest checkpoint
/// of a job.
#[test]
fn oldest_go_first_but_never_newest_of_a_job() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits {
        checkpoints_max: 3,
        ..StoreLimits::default()
    });
    let sets: Vec<CheckpointId> = (1..=3)
        .map(|second| {
            scratch
                .write_checkpoint(&store, JOB, second, &small_files())
                .id
        })
        .collect();
    let other = scratch
        .write_checkpoint(&store, OTHER_JOB, 4, &small_files())
        .id;
    let newest = scratch.write_checkpoint(&store, JOB, 5, &small_files()).id;
    let kept = sets[0];
    let swept = store.enforce_limits(|set| set.id == kept).expect("swept");
    assert_eq!(
        swept.removed.iter().map(|set| set.id).collect::<Vec<_>>(),
        sets[1..]
    );
    assert_eq!(
        (swept.checkpoints_over_limit, swept.bytes_over_limit),
        (0, 0)
    );
    let left = |store: &CheckpointStore| {
        store
            .list_checkpoints()
            .expect("listed")
            .0
            .iter()
            .map(|set| set.id)
            .collect::<Vec<_>>()
    };
    assert_eq!(left(&store), [kept, other, newest]);
    let tight = scratch.store(StoreLimits {
        checkpoints_max: 1,
        ..StoreLimits::default()
    });
    let swept = tight.enforce_limits(|_| false).expect("swept");
    assert_eq!(
        (swept.removed.len(), swept.checkpoints_over_limit),
        (1, 1),
        "the newest of two jobs"
    );
    assert_eq!(left(&tight), [other, newest]);
    assert!(matches!(
        tight.begin(JOB, Micros(0)),
        Err(StoreError::LimitsExceeded { checkpoints: 1, .. })
    ));
    // The same job number in another virtual machine is another job.
    let pair = scratch.store(StoreLimits {
        checkpoints_max: 2,
        ..StoreLimits::default()
    });
    pair.begin(JOB, Micros(0)).expect("begun");
    assert!(matches!(
        pair.for_vm("other").begin(JOB, Micros(0)),
        Err(StoreError::LimitsExceeded { checkpoints: 2, .. })
    ));
}

/// A checkpoint is refused if it is larger than the limit minus the newest checkpoints of the other
/// jobs.
#[test]
fn too_large_checkpoint_is_refused() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits {
        bytes_max: 100_000,
        ..StoreLimits::default()
    });
    let large = files_from(&[("pages-1.img", &random_content(60_000))]);
    scratch.write_checkpoint(&store, JOB, 1, &large);
    scratch.write_checkpoint(&store, JOB, 2, &large);
    let swept = store.enforce_limits(|_| false).expect("swept");
    assert_eq!((swept.removed.len(), swept.bytes_over_limit), (1, 0));
    let (small, large) = (
        scratch.write_images("small", &small_files()),
        scratch.write_images("large", &large),
    );
    let draft = store.begin(OTHER_JOB, Micros(0)).expect("begun");
    assert!(matches!(
        draft.add(TASK, &large),
        Err(StoreError::CheckpointTooLarge { tid: TASK, .. })
    ));
    draft.add(TASK, &small).expect("there is room for it");
    draft
        .add(
            JOB,
            &scratch.write_images(
                "ten",
                &files_from(&[("pages-1.img", &random_content(10_000))]),
            ),
        )
        .expect("added");
    // Both drafts together would exceed the limit.
    let rival = store.begin(TASK, Micros(0)).expect("begun");
    rival
        .add(
            TASK,
            &scratch.write_images(
                "middle",
                &files_from(&[("pages-1.img", &random_content(35_000))]),
            ),
        )
        .expect("added");
    rival.finish(b"").expect("finished");
    assert!(matches!(
        draft.finish(b""),
        Err(StoreError::LimitsExceeded { checkpoints: 2, .. })
    ));
    assert_eq!(store.list_checkpoints().expect("listed").0.len(), 2);
}

#[test]
fn open_checkpoint_is_not_removed() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits {
        checkpoints_max: 1,
        ..StoreLimits::default()
    });
    let (old, new) = (
        scratch.write_checkpoint(&store, JOB, 1, &small_files()).id,
        scratch.write_checkpoint(&store, JOB, 2, &small_files()).id,
    );
    let set = store.open_checkpoint(&old).expect("opened");
    let second = store.open_checkpoint(&old).expect("two may read");
    assert!(matches!(store.remove(&old), Err(StoreError::InUse(_))));
    let swept = store.enforce_limits(|_| false).expect("swept");
    assert_eq!((swept.removed.len(), swept.checkpoints_over_limit), (0, 1));
    drop((set, second));
    assert_eq!(
        store
            .enforce_limits(|_| false)
            .expect("swept")
            .removed
            .len(),
        1
    );
    assert!(matches!(
        store.open_checkpoint(&old),
        Err(StoreError::NoCheckpoint(_))
    ));
    assert!(matches!(
        store.remove(&old),
        Err(StoreError::NoCheckpoint(_))
    ));
    store
        .remove(&new)
        .expect("also the newest one, if somebody says so");
    assert_eq!(store.list_checkpoints().expect("listed").0, []);
}

/// A store that is full of checkpoints of ended jobs accepts a new checkpoint; then the oldest of
/// them is removed.
#[test]
fn ended_jobs_make_way_for_new_checkpoints() {
    let scratch = Scratch::new();
    let limits = StoreLimits {
        checkpoints_max: 3,
        ..StoreLimits::default()
    };
    let store = scratch.store(limits).for_vm("vm");
    let sets: Vec<CheckpointInfo> = (0..3)
        .map(|n| {
            scratch.write_checkpoint(
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
        .mark_jobs_ended(&[sets[1].id], Some(Micros::from_secs(160)))
        .expect("marked");
    store
        .mark_jobs_ended(&[sets[0].id], Some(Micros::from_secs(180)))
        .expect("marked");
    let made = scratch.write_checkpoint(&store, JOB, 200, &small_files());
    let swept = store.enforce_limits(|_| false).expect("swept");
    let gone: Vec<CheckpointId> = swept.removed.iter().map(|set| set.id).collect();
    assert_eq!(
        (gone, swept.checkpoints_over_limit),
        (vec![sets[1].id], 0),
        "the job that ended first"
    );
    let left: Vec<CheckpointId> = store
        .list_checkpoints()
        .expect("listed")
        .0
        .iter()
        .map(|set| set.id)
        .collect();
    assert_eq!(left, [sets[0].id, sets[2].id, made.id]);
}

/// Checkpoints of an ended job are removed after the retention time, unless the job was restarted.
#[test]
fn checkpoints_of_ended_jobs_expire() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits::default()).for_vm("vm");
    let ended = Micros::from_secs(1000);
    let (first, second) = (
        scratch.write_checkpoint(&store, JOB, 100, &small_files()),
        scratch.write_checkpoint(&store, JOB, 200, &small_files()),
    );
    let other = scratch.write_checkpoint(&store.for_vm("other"), JOB, 300, &small_files());
    let names = || {
        store
            .list_checkpoints()
            .expect("listed")
            .0
            .iter()
            .map(|set| (set.id, set.job_ended_at))
            .collect::<Vec<_>>()
    };
    store
        .mark_jobs_ended(&[second.id], Some(ended))
        .expect("marked");
    let all = [
        (first.id, Some(ended)),
        (second.id, Some(ended)),
        (other.id, None),
    ];
    assert_eq!(
        names(),
        all,
        "all of the job, and of no other job of that number"
    );
    let tidy = |store: &CheckpointStore, at: Micros| {
        store
            .remove_expired(at, |_| false)
            .expect("tidied")
            .removed
            .len()
    };
    assert_eq!(tidy(&store, ended + Micros(ENDED_RETENTION.0 - 1)), 0);
    assert_eq!(tidy(&store, Micros(0)), 0, "a clock that was set back");
    store
        .mark_jobs_ended(&[first.id], None)
        .expect("started again");
    assert_eq!(tidy(&store, ended + ENDED_RETENTION), 0);
    store
        .mark_jobs_ended(&[first.id], Some(ended))
        .expect("marked");
    let open = store.open_checkpoint(&first.id).expect("opened");
    assert_eq!(open.info().job_ended_at, Some(ended));
    assert_eq!(
        tidy(&store, ended + ENDED_RETENTION),
        1,
        "one is being read"
    );
    drop(open);
    assert_eq!(tidy(&store, ended + ENDED_RETENTION), 1);
    assert_eq!(names(), [(other.id, None)]);
}

#[test]
fn invalid_end_mark_is_ignored() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits::default());
    let set = scratch.write_checkpoint(&store, JOB, 100, &small_files());
    let file = scratch.path("store").join(set.id.to_string()).join("ended");
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
        fs::write(&file, text).expect("written");
        assert_eq!(
            store.list_checkpoints().expect("listed").0[0].job_ended_at,
            None,
            "{text:?}"
        );
    }
    store
        .mark_jobs_ended(&[set.id], Some(Micros(7)))
        .expect("marked");
    assert_eq!(fs::read_to_string(&file).expect("there"), "7\n");
    fs::remove_file(&file).expect("removed");
    symlink("/dev/zero", &file).expect("linked");
    assert_eq!(
        store.list_checkpoints().expect("listed").0[0].job_ended_at,
        None
    );
}

#[test]
fn foreign_files_are_reported_and_kept() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits::default());
    fs::write(scratch.path("store/notes"), "mine").expect("written");
    fs::create_dir(scratch.path("store").join("t40001-20261122T141503-1")).expect("made");
    let (sets, unreadable) = store.list_checkpoints().expect("listed");
    assert!(sets.is_empty());
    assert!(
        matches!(&unreadable[0], (name, StoreError::ForeignFile(_)) if name == "notes"),
        "{unreadable:?}"
    );
    assert!(
        matches!(&unreadable[1], (_, StoreError::Changed { .. })),
        "{unreadable:?}"
    );
    store.enforce_limits(|_| false).expect("swept");
    assert!(scratch.path("store/notes").exists());
}
