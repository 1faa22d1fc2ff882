//! The start of a run: a new one, or the continuation of the run of a journal.

use crate::journal::{Callbacks, Journal, Notice, Previous, RunId};
use crate::journal_state::{FirstSnapshot, JournalState};
use crate::master::{Master, MasterParts, RunError};
use crate::raw::RawDriver;
use crate::recovery;
use crate::run::{Run, WorkerProgram};
use sempa_work_dispatch::{ClassId, Dispatcher, RunStatistics, Settings, StatisticsReport};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Time that the first snapshot of a run may take.
const FIRST_SNAPSHOT_PATIENCE: Duration = Duration::from_secs(600);

/// Wakes the master when the journal has stored records.
pub(crate) type Wake = Box<dyn Fn() + Send + Sync>;

/// How a run is carried out.
#[derive(Clone, Debug)]
pub struct MasterOptions {
    /// Name of the run, by which `pvm work` and workers find it. Two runs of a virtual machine must
    /// have different names.
    pub run_name: String,
    /// Directory of the run's journal. `None`: a run whose master is killed is lost.
    pub journal: Option<PathBuf>,
    pub settings: Settings,
    /// Workers of class 0, unless the driver sets the workers itself.
    pub default_workers: Option<WorkerProgram>,
    /// Time for which workers wait for the next master.
    pub master_wait: Duration,
    /// Interval of the progress line on standard error; `None` for no progress line.
    pub progress_interval: Option<Duration>,
}

impl MasterOptions {
    pub fn new(run_name: impl Into<String>) -> Self {
        Self {
            run_name: run_name.into(),
            journal: None,
            settings: Settings::default(),
            default_workers: None,
            master_wait: Duration::from_secs(600),
            progress_interval: None,
        }
    }
}

/// Result of a run.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// False if the run was stopped: open tasks are in the journal.
    pub is_finished: bool,
    pub statistics: StatisticsReport,
    /// Number of masters that the run has had.
    pub generation: u64,
    /// Results of earlier masters that were repeated for the driver at the start.
    pub repeated_results: usize,
    /// Bytes of init data in messages to workers.
    pub init_bytes_sent: u64,
    /// Seconds for which the present master has worked, including the driver's callbacks.
    pub master_busy_s: f64,
    /// Seconds that the driver's callbacks have used.
    pub callback_s: f64,
}

/// Returns a number that differs from that of any other call.
fn random_number() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// A run that is ready to serve workers.
pub(crate) struct RunStart<D> {
    pub(crate) master: Master<D>,
    pub(crate) generation: u64,
    pub(crate) repeated_results: usize,
}

/// Opens the journal and starts or restores the driver.
pub(crate) fn begin_run<D: RawDriver>(
    mut driver: D,
    options: &MasterOptions,
    wake: Wake,
) -> Result<RunStart<D>, RunError> {
    let start_error = |error: crate::raw::Failure| {
        RunError::Start(format!("the run was not begun: the driver failed: {error}"))
    };
    let mut generation = 1;
    let mut journal = None;
    let mut recovered = None;
    let mut run_number = random_number();
    if let Some(dir) = &options.journal {
        let first_snapshot = Arc::new(FirstSnapshot::default());
        let (opened, previous) = open_journal(dir, options, Arc::clone(&first_snapshot), wake)?;
        generation = opened.generation();
        run_number = u64::from_le_bytes(opened.run().0[..8].try_into().unwrap_or_default());
        if let Previous::Unfinished(found) = previous {
            recovered = Some(*found);
        }
        journal = Some(JournalState::new(opened, first_snapshot, 0));
    }
    let number = u32::try_from(generation).unwrap_or(u32::MAX);
    let was_begun = recovered
        .as_ref()
        .is_some_and(|found| found.driver_state.is_some());
    let abandoned_tasks = match &recovered {
        Some(found) if !was_begun => recovery::abandoned_tasks(found),
        _ => Vec::new(),
    };
    let mut repeated_results = 0;
    let mut run = match recovered.filter(|_| was_begun) {
        Some(found) => {
            let restart =
                recovery::restart(&mut driver, found, options.settings.clone(), number, 0)?;
            repeated_results = restart.repeated_results;
            restart.run
        }
        None => {
            let statistics = RunStatistics::default();
            let dispatcher = Dispatcher::new(options.settings.clone(), number, statistics, 0);
            Run::new(dispatcher, number, 0)
        }
    };
    if !was_begun {
        driver.start(&mut run).map_err(start_error)?;
    }
    driver.configure(&mut run).map_err(start_error)?;
    if let (true, Some(program)) = (run.programs.is_empty(), &options.default_workers) {
        run.set_workers(ClassId(0), program.clone());
    }
    let mut master = Master::new(MasterParts {
        driver,
        run,
        run_number,
        run_name: options.run_name.clone(),
        journal,
        master_wait: options.master_wait,
    })?;
    if !was_begun {
        master.store_start(abandoned_tasks, FIRST_SNAPSHOT_PATIENCE)?;
    }
    Ok(RunStart {
        master,
        generation,
        repeated_results,
    })
}

fn open_journal(
    dir: &Path,
    options: &MasterOptions,
    first_snapshot: Arc<FirstSnapshot>,
    wake: Wake,
) -> Result<(Journal, Previous), RunError> {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&random_number().to_le_bytes());
    id[8..].copy_from_slice(&random_number().to_le_bytes());
    let program = std::env::current_exe().ok().and_then(|path| {
        let name = path.file_name()?;
        Some(name.to_string_lossy().into_owned())
    });
    let settings = crate::journal::Settings::new(
        program.unwrap_or_else(|| options.run_name.clone()),
        RunId(id),
    );
    let callbacks = Callbacks {
        on_durable: Box::new(move |_| wake()),
        on_notice: Box::new(move |notice| match notice {
            Notice::SnapshotWritten { .. } => first_snapshot.note(Ok(())),
            Notice::WritesResumed => eprintln!("{notice}"),
            Notice::SnapshotFailed { .. } => {
                eprintln!("warning: {notice}");
                first_snapshot.note(Err(notice.to_string()));
            }
            _ => eprintln!("warning: {notice}"),
        }),
    };
    Journal::open(dir, settings, callbacks).map_err(|error| RunError::Start(error.to_string()))
}
