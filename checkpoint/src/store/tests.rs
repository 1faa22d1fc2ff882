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
    /// Index of the step, counted from 0, and the fault; `None` if no fault is injected.
    fault: Option<(usize, DiskFault)>,
    observed_steps: Mutex<Vec<String>>,
    is_dead: AtomicBool,
}

impl FaultInjector {
    fn new(fault: Option<(usize, DiskFault)>) -> Arc<Self> {
        Arc::new(Self {
            fault,
            observed_steps: Mutex::new(Vec::new()),
            is_dead: AtomicBool::new(false),
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
        let fault = self
            .fault
            .filter(|(fault_index, _)| *fault_index == steps.len());
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
        if self.is_dead.load(Ordering::Relaxed) {
            return Err(io::Error::other("dead"));
        }
        let Some((_, fault_kind)) = fault else {
            return Ok(());
        };
        let needs_space = !matches!(step, DiskStep::RemoveFile(_) | DiskStep::RemoveDir(_));
        match (fault_kind, step) {
            (DiskFault::DiskFull, _) if needs_space => {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            (DiskFault::DiskFull, _) => return Ok(()),
            (DiskFault::TornWrite, DiskStep::Append(_, file, bytes)) => {
                let mut file: &std::fs::File = file;
                file.write_all(&bytes[..bytes.len() / 2]).expect("written");
            }
            _ => {}
        }
        self.is_dead.store(true, Ordering::Relaxed);
        Err(io::Error::other("dead"))
    }
}

/// A temporary directory that contains images and the store under test.
struct Scratch(tempfile::TempDir);

impl Scratch {
    fn new() -> Self {
        let scratch = Self(tempfile::tempdir().expect("a directory"));
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
        CheckpointStore::open_with_disk(disk, &self.path("store"), &self.path("keys/key"), limits)
    }

    fn write_checkpoint(
        &self,
        store: &CheckpointStore,
        start_second: u64,
    ) -> Result<CheckpointInfo, StoreError> {
        let draft = store.begin(JOB, Micros::from_secs(start_second))?;
        draft.add_task(JOB, &self.path("images"))?;
        draft.add_task(TASK, &self.path("images"))?;
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
    fn verify_checkpoints(&self, store: &CheckpointStore) -> Vec<u64> {
        let (checkpoints, unreadable_entries) = store.list_checkpoints().expect("listed");
        assert!(unreadable_entries.is_empty(), "{unreadable_entries:?}");
        for info in &checkpoints {
            let checkpoint = store.open_checkpoint(&info.id).expect("opened");
            assert_eq!(
                (checkpoint.info(), checkpoint.description()),
                (info, &b"meta"[..])
            );
            for tid in [JOB, TASK] {
                let unpack_dir = self.path("unpacked");
                checkpoint.unpack_task(tid, &unpack_dir).expect("unpacked");
                assert_eq!(
                    std::fs::read(unpack_dir.join("pages.img")).expect("there"),
                    image_content()
                );
                assert_eq!(
                    std::fs::read(unpack_dir.join("core.img")).expect("there"),
                    b"core"
                );
                assert_eq!(
                    std::fs::read(unpack_dir.join("empty.img")).expect("there"),
                    b""
                );
                std::fs::remove_dir_all(unpack_dir).expect("removed");
            }
        }
        checkpoints
            .iter()
            .map(|checkpoint| checkpoint.started_at.0 / 1_000_000)
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
    let sweep_result = store.enforce_limits(|_| false)?;
    assert_eq!(
        (
            sweep_result.removed.len(),
            sweep_result.checkpoints_over_limit,
            sweep_result.bytes_over_limit
        ),
        (1, 0, 0)
    );
    Ok(())
}

/// Returns the steps of the scenario without a fault.
fn scenario_steps() -> Vec<String> {
    let (scratch, injector) = (Scratch::new(), FaultInjector::new(None));
    run_scenario(&scratch, &injector).expect("nothing happens");
    assert_eq!(
        scratch.verify_checkpoints(
            &scratch
                .open(Disk::new(), StoreLimits::default())
                .expect("opened")
        ),
        [2]
    );
    injector.steps()
}

/// After a process has died at any step, only complete checkpoints are visible, and the next
/// opening removes all other files.
#[test]
fn crash_at_any_step_leaves_complete_checkpoints() {
    let steps = scenario_steps();
    for fault in [DiskFault::ProcessDies, DiskFault::TornWrite] {
        let mut outcomes = BTreeSet::new();
        for (fault_index, step) in steps.iter().enumerate() {
            let (scratch, injector) = (
                Scratch::new(),
                FaultInjector::new(Some((fault_index, fault))),
            );
            run_scenario(&scratch, &injector).expect_err("it died");
            let store = scratch
                .open(Disk::new(), StoreLimits::default())
                .expect("opened");
            let checkpoints = scratch.verify_checkpoints(&store);
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
            outcomes.insert(checkpoints);
            // The store must still be usable.
            scratch.write_checkpoint(&store, 3).expect("made");
            assert_eq!(
                scratch.verify_checkpoints(&store).last(),
                Some(&3),
                "{step}"
            );
        }
        assert_eq!(outcomes.len(), 4, "all stages were met: {outcomes:?}");
    }
}

/// If the disk is full at any step, only the complete checkpoints remain.
#[test]
fn full_disk_at_any_step_leaves_complete_checkpoints() {
    let steps = scenario_steps();
    let mut failure_count = 0;
    for (fault_index, step) in steps.iter().enumerate() {
        let (scratch, injector) = (
            Scratch::new(),
            FaultInjector::new(Some((fault_index, DiskFault::DiskFull))),
        );
        let Err(error) = run_scenario(&scratch, &injector) else {
            continue;
        };
        failure_count += 1;
        let StoreError::DiskFull {
            unwritten,
            free,
            operation,
            ..
        } = &error
        else {
            panic!("{step}: {error}")
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
        let remaining_count = names.iter().filter(|name| name.starts_with('.')).count();
        assert_eq!(
            remaining_count,
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
        let checkpoints = scratch.verify_checkpoints(&store);
        assert!(
            [&[][..], &[1], &[1, 2], &[2]].contains(&&*checkpoints),
            "{step}: {checkpoints:?}"
        );
    }
    assert!(failure_count > 20, "{failure_count}");
}

/// A checkpoint gets its name after all its content is on the disk. Its name is removed durably
/// before its files are deleted.
#[test]
fn checkpoint_is_durable_before_it_is_named() {
    let steps = scenario_steps();
    let step_index = |step: &str| {
        steps
            .iter()
            .position(|s| s == step)
            .unwrap_or_else(|| panic!("{step} in {steps:?}"))
    };
    let (final_name, draft_name) = (
        "t40001-19700101T000001-1",
        ".draft-t40001-19700101T000001-1",
    );
    let rename_index = step_index(&format!("rename {draft_name} {final_name}"));
    for file in ["t40001", "t80001", "manifest"] {
        let last_step = steps[..rename_index]
            .iter()
            .rposition(|s| *s == format!("write {file}"))
            .expect("written");
        assert!(last_step < step_index(&format!("sync {file}")), "{file}");
        assert!(
            step_index(&format!("sync {file}"))
                < step_index(&format!("sync directory {draft_name}")),
            "{file}"
        );
    }
    assert!(
        step_index("sync t80001") < step_index("make manifest"),
        "the manifest comes last"
    );
    assert!(step_index(&format!("sync directory {draft_name}")) < rename_index);
    assert_eq!(steps[rename_index + 1], "sync directory store");
    let hide_step = format!("rename {final_name} .gone-{final_name}");
    assert_eq!(
        steps[step_index(&hide_step) + 1],
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
    draft.add_task(JOB, &scratch.path("images")).expect("added");
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
    let other_store = scratch
        .open(Disk::new(), StoreLimits::default())
        .expect("opened by another process");
    other_store.enforce_limits(|_| false).expect("swept");
    draft.add_task(JOB, &scratch.path("images")).expect("added");
    draft
        .add_task(TASK, &scratch.path("images"))
        .expect("added");
    draft.finish(b"meta").expect("finished");
    assert_eq!(scratch.verify_checkpoints(&other_store), [0]);
}
