//! The part of a dump that waits for the engine. A thread of its own executes this part.

use crate::file_transfer;
use crate::image_manifest::{ImageManifest, TaskFiles};
use crate::image_vault::ImageDir;
use crate::process_settings::ProcessSettings;
use crate::stop;
use crate::task_user::with_own_file_rights;
use checkpoint::engine::{CallLimits, EngineFailure, MemoryServer, RunningDump};
use checkpoint::facts::{self, EnginePlace, HashCache};
use sempa_proto::migration::{Failure, Refusal, RequiredFile};
use sempa_proto::tasker::DumpReport;
use std::sync::Arc;

/// A dump that the engine performs.
pub(crate) struct DumpWork {
    pub(crate) running_dump: Box<dyn RunningDump>,
    pub(crate) limits: CallLimits,
    pub(crate) task: DumpedTask,
    pub(crate) engine_place: EnginePlace,
    pub(crate) hashes: Arc<HashCache>,
}

/// A stopped task, and where its images are.
pub(crate) struct DumpedTask {
    pub(crate) image_dir: ImageDir,
    pub(crate) root_pid: i32,
    pub(crate) processes: Vec<i32>,
    /// Inode number of the pipe to which the task writes its output.
    pub(crate) output_pipe: u64,
    /// Processes that were stopped before the migration, and must stay stopped after the restore.
    pub(crate) already_stopped_pids: Vec<i32>,
    pub(crate) memory_bytes: u64,
}

/// The report of a dump, and with post-copy the server of the memory that is not in the images.
pub(crate) type DumpResult = Result<(DumpReport, Option<Box<dyn MemoryServer>>), EngineFailure>;

impl DumpWork {
    /// Waits for the engine, completes the images and hands the images to the daemon. After a
    /// failure the task is still stopped, unless it has exited.
    pub(crate) fn run(self) -> DumpResult {
        // The engine works while this thread reads the settings and the open files.
        let process_settings = ProcessSettings::read_all(&self.task.processes);
        let open_files = facts::open_files(&self.task.processes);
        let limits = self.limits;
        let dump_result = with_own_file_rights(|| self.running_dump.wait_until_dumped(&limits));
        let task = self.task;
        let result = dump_result.and_then(|(report, memory_server)| {
            let report = task.complete_images(report, open_files, process_settings?)?;
            Ok((report, memory_server))
        });
        result.map_err(|failure| {
            stop::wait_until_stopped(&task.processes);
            EngineFailure {
                failure: task.explain_failed_dump(failure.failure, self.engine_place, &self.hashes),
                ..failure
            }
        })
    }
}

impl DumpedTask {
    /// Adds to the images of the engine what the tasker restores, and hands the images to the
    /// daemon.
    fn complete_images(
        &self,
        report: DumpReport,
        open_files: Vec<RequiredFile>,
        process_settings: Vec<ProcessSettings>,
    ) -> Result<DumpReport, Failure> {
        let dir = self.image_dir.path();
        let files = TaskFiles {
            open: open_files,
            transferred: file_transfer::copy_files_to_images(dir, self.root_pid, &self.processes)?,
            written: facts::written_files(&self.processes),
        };
        let file_count = files.transferred.len() as u32;
        let report = with_own_file_rights(|| {
            self.image_dir.remove_unused_images()?;
            let manifest = ImageManifest::from_image_dir(
                dir,
                self.output_pipe,
                self.already_stopped_pids.clone(),
                self.memory_bytes,
                files,
                process_settings,
            )?;
            let manifest_bytes = manifest.write(dir)?;
            Ok::<_, Failure>(DumpReport {
                image_bytes: manifest.image_bytes().max(report.image_bytes) + manifest_bytes,
                image_files: report.image_files + 1 + file_count,
            })
        })?;
        Ok(match self.image_dir.hand_out()? {
            Some(image_bytes) => DumpReport {
                image_bytes,
                image_files: 1,
            },
            None => report,
        })
    }

    /// Replaces the failure of an engine by the reason for which the stopped task would be refused
    /// now, if there is one: the task may have got a resource since it was inspected, for example a
    /// file that it has opened.
    fn explain_failed_dump(
        &self,
        failure: Failure,
        engine_place: EnginePlace,
        hashes: &HashCache,
    ) -> Failure {
        let Failure::Engine(engine_text) = &failure else {
            return failure;
        };
        let task = facts::TaskProcesses {
            root_pid: self.root_pid,
            processes: self.processes.clone(),
            engine_place,
            with_host_view: |action| with_own_file_rights(action),
        };
        match facts::inspect(&task, String::new(), hashes) {
            Ok(_) | Err(Refusal::NoSuchTask) => failure,
            Err(refusal) => {
                tracing::warn!("the dump failed because the task has changed: {engine_text}");
                Failure::Refused(vec![refusal])
            }
        }
    }
}
