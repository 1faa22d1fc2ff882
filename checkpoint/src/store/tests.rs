//! Tests the store under faults of the disk: a crash, or a full disk, at every step.

use super::disk::{Disk, DiskObserver, DiskStep};
use super::*;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

const JOB: Tid = Tid::from_raw(0x40001);
const TASK: Tid = Tid::from_raw(0x80001);

/// A fault that is injected at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskFault {
    /// The process dies before the step.
    ProcessDies,
    /// The process dies in the middle of a write.
    TornWrite,
    /// The disk is full at this step only. Steps that remove files succeed.
    DiskFull,
}

/// Records the steps and injects a fault at one step.
struct FaultInjector {
    /// Number of the step, counted from 0, and the fault.
    fault: Option<(usize, DiskFault)>,
    observed_steps: Mutex<Vec<String>>,
    dead: AtomicBool,
}

impl FaultInjector {
    fn new(fault: Option<(usize, DiskFault)>) -> Arc<FaultInjector> {
        Arc::new(FaultInjector {
            fault,
            observed_steps: Mutex::new(Vec::new()),
            dead: AtomicBool::new(false),
        })
    }

    fn steps(&self) -> Vec<String> {
        self.observed_steps.lock().expect("unpoisoned").clone()
    }
}

impl DiskObserver for FaultInjector {
    fn before_step(&self, step: &DiskStep<'_>) -> io::Result<()> {
        let mut steps = self.observed_steps.lock().expect("unpoisoned");
        let name = |path: &Path| {
            path.file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned()
        };
        let fault = self.fault.filter(|(at, _)| *at == steps.len());
        steps.push(match step {
            DiskStep::MakeDir(path) => format!("make directory {}", name(path)),
            DiskStep::MakeFile(path) => format!("make {}", name(path)),
            DiskStep::Append(path, ..) => format!("write {}", name(path)),
            DiskStep::Sync(path) => format!("sync {}", name(path)),
            DiskStep::SyncDir(path) => format!("sync directory {}", name(path)),
            DiskStep::Rename(from, to) => format!("rename {} {}", name(from), name(to)),
            DiskStep::Link(to) => format!("link {}", name(to)),
            DiskStep::RemoveFile(path) => format!("remove {}", name(path)),
            DiskStep::RemoveDir(path) => format!("remove directory {}", name(path)),
        });
        if self.dead.load(Ordering::Relaxed) {
            return Err(io::Error::other("dead"));
        }
        let Some((_, fate)) = fault else {
            return Ok(());
        };
        let takes_room = !matches!(step, DiskStep::RemoveFile(_) | DiskStep::RemoveDir(_));
        match (fate, step) {
            (DiskFault::DiskFull, _) if takes_room => {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            (DiskFault::DiskFull, _) => return Ok(()),
            (DiskFault::TornWrite, DiskStep::Append(_, file, bytes)) => {
                let mut file: &std::fs::File = file;
                file.write_all(&bytes[..bytes.len() / 2]).expect("written");
            }
            _ => {}
        }
        self.dead.store(true, Ordering::Relaxed);
        Err(io::Error::other("dead"))
    }
}

/// A temporary directory that contains images, and the store under test.
struct Scratch(tempfile::TempDir);

impl Scratch {
    fn new() -> Scratch {
        let scratch = Scratch(tempfile::tempdir().expect("a directory"));
        std::fs::create_dir(scratch.path("images")).expect("made");
        std::fs::write(scratch.path("images/core.img"), b"core").expect("written");
        std::fs::write(scratch.path("images/pages.img"), image_content()).expect("written");
        std::fs::write(scratch.path("images/empty.img"), b"").expect("written");
        scratch
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn open(&self, disk: Disk, limits: StoreLimits) -> Result<CheckpointStore, StoreError> {
        CheckpointStore::open_on(disk, &self.path("store"), &self.path("keys/key"), limits)
    }

    fn write_checkpoint(
        &self,
        store: &CheckpointStore,
        second: u64,
    ) -> Result<CheckpointInfo, StoreError> {
        let draft = store.begin(JOB, Micros::from_secs(second))?;
        draft.add(JOB, &self.path("images"))?;
        draft.add(TASK, &self.path("images"))?;
        draft.finish(b"meta")
    }

    /// Returns the names of the entries in the store's directory.
    fn entry_names(&self) -> BTreeSet<String> {
        let entries = self.path("store").read_dir().expect("readable");
        entries
            .map(|entry| {
                entry
                    .expect("readable")
                    .file_name()
                    .into_string()
                    .expect("text")
            })
            .collect()
    }

    /// Verifies that all visible checkpoints are complete, and returns their start times in
    /// seconds.
    fn verify_all(&self, store: &CheckpointStore) -> Vec<u64> {
        let (checkpoints, unreadable) = store.list_checkpoints().expect("listed");
        assert!(unreadable.is_empty(), "{unreadable:?}");
        for info in &checkpoints {
            let checkpoint = store.open_checkpoint(&info.id).expect("opened");
            assert_eq!((checkpoint.info(), checkpoint.meta()), (info, &b"meta"[..]));
            for tid in [JOB, TASK] {
                let to = self.path("unpacked");
                checkpoint.unpack(tid, &to).expect("unpacked");
                assert_eq!(
                    std::fs::read(to.join("pages.img")).expect("there"),
                    image_content()
                );
                assert_eq!(std::fs::read(to.join("core.img")).expect("there"), b"core");
                assert_eq!(std::fs::read(to.join("empty.img")).expect("there"), b"");
                std::fs::remove_dir_all(to).expect("removed");
            }
        }
        checkpoints
            .iter()
            .map(|checkpoint| checkpoint.started.0 / 1_000_000)
            .collect()
    }
}

/// Returns the content of an image file, which needs more than one chunk and includes zeros.
fn image_content() -> Vec<u8> {
    let mut content: Vec<u8> = (0..(1 << 20) + 9000).map(|i| (i % 251) as u8).collect();
    content[8192..40_000].fill(0);
    content
}

/// Writes two checkpoints and removes the older one, with a fault at one step.
fn run_scenario(scratch: &Scratch, injector: &Arc<FaultInjector>) -> Result<(), StoreError> {
    let limits = StoreLimits {
        checkpoints_max: 1,
        ..StoreLimits::default()
    };
    let store = scratch.open(
        Disk::with_observer(Arc::clone(injector) as Arc<dyn DiskObserver>),
        limits,
    )?;
    scratch.write_checkpoint(&store, 1)?;
    scratch.write_checkpoint(&store, 2)?;
    let swept = store.enforce_limits(|_| false)?;
    assert_eq!(
        (
            swept.removed.len(),
            swept.checkpoints_over_limit,
            swept.bytes_over_limit
        ),
        (1, 0, 0)
    );
    Ok(())
}

/// Returns the steps of the scenario without a fault.
fn scenario_steps() -> Vec<String> {
    let (scratch, fates) = (Scratch::new(), FaultInjector::new(None));
    run_scenario(&scratch, &fates).expect("nothing happens");
    assert_eq!(
        scratch.verify_all(
            &scratch
                .open(Disk::new(), StoreLimits::default())
                .expect("opened")
        ),
        [2]
    );
    fates.steps()
}

/// After a process has died at any step, only complete checkpoints are visible, and the next
/// opening removes all other files.
#[test]
fn crash_at_any_step_leaves_complete_checkpoints() {
    let steps = scenario_steps();
    for fault in [DiskFault::ProcessDies, DiskFault::TornWrite] {
        let mut seen = BTreeSet::new();
        for (at, step) in steps.iter().enumerate() {
            let (scratch, fates) = (Scratch::new(), FaultInjector::new(Some((at, fault))));
            run_scenario(&scratch, &fates).expect_err("it died");
            let store = scratch
                .open(Disk::new(), StoreLimits::default())
                .expect("opened");
            let checkpoints = scratch.verify_all(&store);
            assert!(
                [&[][..], &[1], &[1, 2], &[2]].contains(&&*checkpoints),
                "{step}: {checkpoints:?}"
            );
            assert!(
                scratch
                    .entry_names()
                    .iter()
                    .all(|name| !name.starts_with('.')),
                "{step}: {:?}",
                scratch.entry_names()
            );
            seen.insert(checkpoints);
            // The store must still be usable.
            scratch.write_checkpoint(&store, 3).expect("made");
            assert_eq!(scratch.verify_all(&store).last(), Some(&3), "{step}");
        }
        assert_eq!(seen.len(), 4, "all stages were met: {seen:?}");
    }
}

/// If the disk is full at any step, only the complete checkpoints remain.
#[test]
fn full_disk_at_any_step_leaves_complete_checkpoints() {
    let steps = scenario_steps();
    let mut full = 0;
    for (at, step) in steps.iter().enumerate() {
        let (scratch, fates) = (
            Scratch::new(),
            FaultInjector::new(Some((at, DiskFault::DiskFull))),
        );
        let Err(why) = run_scenario(&scratch, &fates) else {
            continue;
        };
        full += 1;
        let StoreError::DiskFull {
            unwritten,
            free,
            operation,
            ..
        } = &why
        else {
            panic!("{step}: {why}")
        };
        assert!(free.is_some(), "{step}");
        assert_eq!(
            unwritten.is_some(),
            *operation == StoreOperation::Add,
            "{step}"
        );
        // Read the names before the store is opened again, because opening it removes incomplete
        // files.
        let names = if scratch.path("store").is_dir() {
            scratch.entry_names()
        } else {
            BTreeSet::new()
        };
        let left = names.iter().filter(|name| name.starts_with('.')).count();
        assert_eq!(
            left,
            usize::from(*operation == StoreOperation::Sweep && step.starts_with("sync")),
            "{step}: {names:?}"
        );
        let keys: Vec<_> = scratch
            .path("keys")
            .read_dir()
            .map(|entries| entries.collect())
            .unwrap_or_default();
        assert!(keys.len() <= 1, "{step}: {keys:?}");
        let store = scratch
            .open(Disk::new(), StoreLimits::default())
            .expect("opened");
        let checkpoints = scratch.verify_all(&store);
        assert!(
            [&[][..], &[1], &[1, 2], &[2]].contains(&&*checkpoints),
            "{step}: {checkpoints:?}"
        );
    }
    assert!(full > 20, "{full}");
}

/// A checkpoint gets its name after all its content is on the disk. Its name is removed durably
/// before its files are deleted.
#[test]
fn checkpoint_is_durable_before_it_is_named() {
    let steps = scenario_steps();
    let at = |step: &str| {
        steps
            .iter()
            .position(|s| s == step)
            .unwrap_or_else(|| panic!("{step} in {steps:?}"))
    };
    let (name, draft) = (
        "t40001-19700101T000001-1",
        ".draft-t40001-19700101T000001-1",
    );
    let rename = at(&format!("rename {draft} {name}"));
    for file in ["t40001", "t80001", "manifest"] {
        let last = steps[..rename]
            .iter()
            .rposition(|s| *s == format!("write {file}"))
            .expect("written");
        assert!(last < at(&format!("sync {file}")), "{file}");
        assert!(
            at(&format!("sync {file}")) < at(&format!("sync directory {draft}")),
            "{file}"
        );
    }
    assert!(
        at("sync t80001") < at("make manifest"),
        "the manifest comes last"
    );
    assert!(at(&format!("sync directory {draft}")) < rename);
    assert_eq!(steps[rename + 1], "sync directory store");
    let gone = format!("rename {name} .gone-{name}");
    assert_eq!(
        steps[at(&gone) + 1],
        "sync directory store",
        "it cannot come back without its files"
    );
}

#[test]
fn dropped_draft_leaves_nothing() {
    let scratch = Scratch::new();
    let store = scratch
        .open(Disk::new(), StoreLimits::default())
        .expect("opened");
    let draft = store.begin(JOB, Micros(0)).expect("begun");
    draft.add(JOB, &scratch.path("images")).expect("added");
    assert_eq!(scratch.entry_names().len(), 2, "the draft and the lock");
    drop(draft);
    assert_eq!(scratch.entry_names(), BTreeSet::from([LOCK_FILE.into()]));
}

#[test]
fn draft_of_living_process_is_kept() {
    let scratch = Scratch::new();
    let store = scratch
        .open(Disk::new(), StoreLimits::default())
        .expect("opened");
    let draft = store.begin(JOB, Micros(0)).expect("begun");
    let other = scratch
        .open(Disk::new(), StoreLimits::default())
        .expect("opened by another process");
    other.enforce_limits(|_| false).expect("swept");
    draft.add(JOB, &scratch.path("images")).expect("added");
    draft.add(TASK, &scratch.path("images")).expect("added");
    draft.finish(b"meta").expect("finished");
    assert_eq!(scratch.verify_all(&other), [0]);
}
