//! Files of programs that write their own checkpoints. The files are copied into the images of a
//! checkpoint, and from there back to their directories.
//!
//! All disk access runs on blocking threads. Each copy or renaming of files reports its result as
//! an event.

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

/// Staged files by migration. The value is `None` while the files are being staged.
type StagedByMigration = Arc<Mutex<HashMap<MigrationId, Option<StagedFiles>>>>;

/// State of the operations in progress on files of programs.
pub(crate) struct ProgramStateFiles {
    paths: RuntimePaths,
    inputs: InputSender,
    staged_files: StagedByMigration,
    space_reservations: Arc<SpaceReservations>,
}

fn lock(
    staged_by_migration: &StagedByMigration,
) -> MutexGuard<'_, HashMap<MigrationId, Option<StagedFiles>>> {
    staged_by_migration
        .lock()
        .unwrap_or_else(|e| e.into_inner())
}

fn state_failure(error: &StateFileError) -> Failure {
    Failure::Io(error.to_string())
}

impl ProgramStateFiles {
    pub(crate) fn new(paths: RuntimePaths, inputs: InputSender) -> Self {
        Self {
            paths,
            inputs,
            staged_files: StagedByMigration::default(),
            space_reservations: Arc::default(),
        }
    }

    fn spawn_work(&self, work: impl FnOnce() -> Event + Send + 'static) {
        let inputs = self.inputs.clone();
        tokio::task::spawn_blocking(move || {
            let _ = inputs.blocking_send(Input::Event(work()));
        });
    }

    /// Copies files into the image directory of this migration. Reports [`Event::StateCollected`].
    pub(crate) fn collect_files(&self, migration: MigrationId, files: Vec<PathBuf>, dir: PathBuf) {
        let (image_dir, space_reservations) = (
            self.paths.image_dir(migration),
            Arc::clone(&self.space_reservations),
        );
        // The directory is created before the thread starts: after a drop of the images, the thread
        // must not create the directory again. If the creation fails, the copy into the directory
        // fails, too.
        let _ = DirBuilder::new().mode(0o700).create(&image_dir);
        self.spawn_work(move || {
            let collect_result =
                state_files::collect(&files, &dir, &image_dir, &space_reservations);
            let result = collect_result
                .map(|(files, bytes)| DumpReport {
                    image_bytes: bytes,
                    image_files: files,
                })
                .map_err(|e| state_failure(&e));
            Event::StateCollected { migration, result }
        });
    }

    /// Copies the files into the directories of their destinations, under temporary names. Reports
    /// [`Event::StateStaged`].
    pub(crate) fn stage_files(&self, migration: MigrationId, files: Vec<PathBuf>, dir: PathBuf) {
        let (image_dir, staged_by_migration) =
            (self.paths.image_dir(migration), self.staged_files.clone());
        lock(&staged_by_migration).insert(migration, None);
        self.spawn_work(move || {
            let result = state_files::stage(&files, &dir, &image_dir)
                .map_err(|e| state_failure(&e))
                .map(|new_staged_files| {
                    // If the migration was dropped before the end of staging, the map has no entry,
                    // and the staged files are removed when `new_staged_files` is dropped.
                    let mut staged_by_migration = lock(&staged_by_migration);
                    staged_by_migration
                        .entry(migration)
                        .and_modify(|entry| *entry = Some(new_staged_files));
                });
            Event::StateStaged { migration, result }
        });
    }

    /// Renames the staged files to their final names. Reports [`Event::StateInstalled`].
    pub(crate) fn rename_staged(&self, migration: MigrationId) {
        let staged_files = lock(&self.staged_files).remove(&migration).flatten();
        self.spawn_work(move || {
            let cancelled_failure = || Failure::Cancelled("it was cancelled".into());
            let result = staged_files
                .ok_or_else(cancelled_failure)
                .and_then(|staged_files| staged_files.install().map_err(|e| state_failure(&e)));
            Event::StateInstalled { migration, result }
        });
    }

    /// Removes files that are staged and not yet renamed.
    pub(crate) fn drop_staged(&self, migration: MigrationId) {
        if let Some(staged_files) = lock(&self.staged_files).remove(&migration) {
            tokio::task::spawn_blocking(move || drop(staged_files));
        }
    }
}
