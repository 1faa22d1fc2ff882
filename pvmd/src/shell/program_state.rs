//! Files of programs that write their own checkpoints: copies them into a checkpoint and back.
//!
//! All disk access runs on blocking threads; each operation reports its end as an event.

use super::input::{Input, InputSender};
use checkpoint::state_files::{self, SpaceReservations, StagedFiles, StateFileError};
use pvmd_machine::io::Event;
use sempa_proto::MigrationId;
use sempa_proto::migration::Failure;
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::tasker::DumpReport;
use std::collections::HashMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

/// Staged files by migration; `None` while they are being staged.
type StagedByMigration = Arc<Mutex<HashMap<MigrationId, Option<StagedFiles>>>>;

/// The operations in progress on the state files of programs.
pub(crate) struct ProgramStateFiles {
    paths: RuntimePaths,
    inputs: InputSender,
    staged: StagedByMigration,
    collect_reservations: Arc<SpaceReservations>,
}

fn lock(staged: &StagedByMigration) -> MutexGuard<'_, HashMap<MigrationId, Option<StagedFiles>>> {
    staged.lock().unwrap_or_else(|e| e.into_inner())
}

fn io_failure(error: &StateFileError) -> Failure {
    Failure::Io(error.to_string())
}

impl ProgramStateFiles {
    pub(crate) fn new(place: RuntimePaths, inputs: InputSender) -> ProgramStateFiles {
        ProgramStateFiles {
            paths: place,
            inputs,
            staged: StagedByMigration::default(),
            collect_reservations: Arc::default(),
        }
    }

    fn spawn_work(&self, work: impl FnOnce() -> Event + Send + 'static) {
        let inputs = self.inputs.clone();
        tokio::task::spawn_blocking(move || {
            let _ = inputs.blocking_send(Input::Event(work()));
        });
    }

    /// Copies files into the image directory of this migration. Reports [`Event::StateCollected`].
    pub(crate) fn collect(&self, migration: MigrationId, files: Vec<PathBuf>, dir: PathBuf) {
        let (images, room) = (
            self.paths.image_dir(migration),
            Arc::clone(&self.collect_reservations),
        );
        // Created before the thread starts: the thread must not create the directory again after a
        // drop. A failure shows when the directory is used.
        let _ = DirBuilder::new().mode(0o700).create(&images);
        self.spawn_work(move || {
            let collected = state_files::collect(&files, &dir, &images, &room);
            let result = collected
                .map(|(files, bytes)| DumpReport { bytes, files })
                .map_err(|e| io_failure(&e));
            Event::StateCollected { migration, result }
        });
    }

    /// Copies the files next to their destinations under temporary names. Reports
    /// [`Event::StateStaged`].
    pub(crate) fn stage(&self, migration: MigrationId, files: Vec<PathBuf>, dir: PathBuf) {
        let (images, staged) = (self.paths.image_dir(migration), self.staged.clone());
        lock(&staged).insert(migration, None);
        self.spawn_work(move || {
            let result = state_files::stage(&files, &dir, &images)
                .map_err(|e| io_failure(&e))
                .map(|files_staged| {
                    // If the migration was dropped meanwhile, the staged files are dropped with
                    // `files_staged`.
                    let mut staged = lock(&staged);
                    staged
                        .entry(migration)
                        .and_modify(|place| *place = Some(files_staged));
                });
            Event::StateStaged { migration, result }
        });
    }

    /// Renames the staged files to their final names. Reports [`Event::StateInstalled`].
    pub(crate) fn rename_staged(&self, migration: MigrationId) {
        let staged_files = lock(&self.staged).remove(&migration).flatten();
        self.spawn_work(move || {
            let dropped = || Failure::Cancelled("it was given up".into());
            let result = staged_files
                .ok_or_else(dropped)
                .and_then(|staged_files| staged_files.install().map_err(|e| io_failure(&e)));
            Event::StateInstalled { migration, result }
        });
    }

    /// Removes files that are staged but not renamed yet.
    pub(crate) fn drop_staged(&self, migration: MigrationId) {
        if let Some(staged_files) = lock(&self.staged).remove(&migration) {
            tokio::task::spawn_blocking(move || drop(staged_files));
        }
    }
}
