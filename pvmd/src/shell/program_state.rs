//! Files of programs that write their own checkpoints: the files are copied into a checkpoint and
//! back.
//!
//! All disk access runs on blocking threads. Each operation reports its result as an event.

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

/// Staged files by migration; `None` while the files are being staged.
type StagedByMigration = Arc<Mutex<HashMap<MigrationId, Option<StagedFiles>>>>;

/// The operations on the state files of programs that are in progress.
pub(crate) struct ProgramStateFiles {
    paths: RuntimePaths,
    inputs: InputSender,
    staged_files: StagedByMigration,
    space_reservations: Arc<SpaceReservations>,
}

fn lock(staged: &StagedByMigration) -> MutexGuard<'_, HashMap<MigrationId, Option<StagedFiles>>> {
    staged.lock().unwrap_or_else(|e| e.into_inner())
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
        // Created before the thread starts: after a drop, the thread must not create the directory
        // again. If the creation fails, the copy into the directory fails, too.
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
        let (image_dir, staged) = (self.paths.image_dir(migration), self.staged_files.clone());
        lock(&staged).insert(migration, None);
        self.spawn_work(move || {
            let result = state_files::stage(&files, &dir, &image_dir)
                .map_err(|e| state_failure(&e))
                .map(|files_staged| {
                    // If the migration was dropped before staging has ended, the staged files are
                    // dropped with `files_staged`.
                    let mut staged = lock(&staged);
                    staged
                        .entry(migration)
                        .and_modify(|entry| *entry = Some(files_staged));
                });
            Event::StateStaged { migration, result }
        });
    }

    /// Renames the staged files to their final names. Reports [`Event::StateInstalled`].
    pub(crate) fn rename_staged(&self, migration: MigrationId) {
        let staged_files = lock(&self.staged_files).remove(&migration).flatten();
        self.spawn_work(move || {
            let cancelled = || Failure::Cancelled("it was cancelled".into());
            let result = staged_files
                .ok_or_else(cancelled)
                .and_then(|staged_files| staged_files.install().map_err(|e| state_failure(&e)));
            Event::StateInstalled { migration, result }
        });
    }

    /// Removes files that are staged but not yet renamed.
    pub(crate) fn drop_staged(&self, migration: MigrationId) {
        if let Some(staged_files) = lock(&self.staged_files).remove(&migration) {
            tokio::task::spawn_blocking(move || drop(staged_files));
        }
    }
}
