//! Engines that were started for a dump or a restore before the task stops, and wait for it.
//!
//! The start of an engine takes several milliseconds, in which the task would be stopped. An engine
//! that has ended while it waited is replaced when the dump or restore begins.

use crate::freezer;
use crate::image_vault::ImageVault;
use crate::namespace::Namespace;
use crate::pid_numbering::PidNumbering;
use crate::supervisor::Supervisor;
use crate::task::Output;
use crate::task_user::with_own_file_rights;
use crate::workers::{WorkerResult, Workers};
use checkpoint::engine::{
    CancelHandle, Engine, IdleDump, IdleRestore, RestoreResources, TaskNamespaces,
};
use sempa_proto::migration::Failure;
use sempa_proto::{MigrationId, Tid};
use std::io;
use std::time::{Duration, Instant};

/// Maximum number of engines that wait for a dump, and of those that wait for a restore. At most
/// eight tasks leave a host at a time.
pub(crate) const IDLE_ENGINES_MAX: usize = 8;
/// Number of the highest PIDs of a namespace that an engine inside it gets. Tasks get such PIDs
/// only after they have created all others.
const ENGINE_PIDS: u32 = 256;
/// Time after which an engine that waits for a dump is ended: the migration was probably given up,
/// which the tasker is not told before the task has been stopped.
const IDLE_DUMP_TIMEOUT: Duration = Duration::from_secs(10);

/// The engines that wait for a dump.
#[derive(Default)]
pub(crate) struct IdleDumps(Vec<WaitingDump>);

struct WaitingDump {
    migration: MigrationId,
    expires_at: Instant,
    engine: Box<dyn IdleDump>,
}

impl IdleDumps {
    /// True if another engine may be started for this migration.
    fn can_add(&self, migration: MigrationId) -> bool {
        self.0.len() < IDLE_ENGINES_MAX && self.0.iter().all(|idle| idle.migration != migration)
    }

    fn add(&mut self, migration: MigrationId, engine: Box<dyn IdleDump>, now: Instant) {
        self.0.push(WaitingDump {
            migration,
            expires_at: now + IDLE_DUMP_TIMEOUT,
            engine,
        });
    }

    /// Removes and returns the engine of this migration. `None` if there is none or it has ended.
    pub(crate) fn take(&mut self, migration: MigrationId) -> Option<Box<dyn IdleDump>> {
        let index = self.0.iter().position(|idle| idle.migration == migration)?;
        let engine = self.0.swap_remove(index).engine;
        (!engine.has_ended()).then_some(engine)
    }

    /// Ends the engines that have waited too long at the time `now`.
    pub(crate) fn end_expired(&mut self, now: Instant) {
        self.0.retain(|idle| idle.expires_at > now);
    }

    /// Returns the time at which the next engine has waited too long; `None` without engines.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.0.iter().map(|idle| idle.expires_at).min()
    }

    /// True if this process is one of the engines.
    pub(crate) fn owns(&self, pid: i32) -> bool {
        self.0.iter().any(|idle| idle.engine.engine_pid() == pid)
    }

    /// Ends all engines. Called when the tasker ends.
    pub(crate) fn end_all(&mut self) {
        self.0.clear();
    }
}

/// An engine that waits for a restore, and the pipe for the output of the restored task.
pub(crate) struct IdleRestoreWithOutput {
    pub(crate) engine: Box<dyn IdleRestore>,
    pub(crate) output: Output,
    /// True if the engine is a member of the task's control group. The processes that it creates
    /// are then members as well.
    pub(crate) is_in_group: bool,
}

impl Supervisor {
    /// Starts an engine that waits for the dump of the task `tid` in this migration, unless one
    /// waits already. If that fails, the dump starts its engine itself.
    pub(crate) fn start_idle_dump(&mut self, migration: MigrationId, tid: Tid) {
        let namespace = self
            .tasks
            .get(&tid)
            .and_then(|task| task.namespace.as_ref());
        let Some(Ok(inside)) = namespace.map(|namespace| self.engine_place(namespace)) else {
            return;
        };
        let migrations = &mut self.migrations;
        let Some(engine) = &migrations.engine else {
            return;
        };
        if migrations.idle_dumps.can_add(migration)
            && let Ok(idle_dump) = with_own_file_rights(|| engine.start_idle_dump(inside.as_ref()))
        {
            migrations
                .idle_dumps
                .add(migration, idle_dump, Instant::now());
        }
    }

    /// Starts an engine that waits for the restore of this migration, which is prepared. If that
    /// fails, the restore starts its engine itself.
    pub(crate) fn start_idle_restore(&mut self, migration: MigrationId) {
        let migrations = &mut self.migrations;
        let idle_count = migrations
            .incoming_tasks
            .values()
            .filter(|target| target.idle_restore.is_some())
            .count();
        let (Some(engine), Some(target)) = (
            &migrations.engine,
            migrations.incoming_tasks.get_mut(&migration),
        ) else {
            return;
        };
        let Some(namespace) = &target.namespace else {
            return;
        };
        let place = EnginePlace {
            namespace,
            vault: self.image_vault.as_ref(),
            pid_numbering: self.pid_numbering,
        };
        if idle_count < IDLE_ENGINES_MAX
            && target.idle_restore.is_none()
            && let Ok(idle_restore) = start_restore_engine(engine.as_ref(), &place)
        {
            let pids = vec![idle_restore.engine.engine_pid()];
            start_joining_group(namespace, pids, &mut migrations.workers, move |succeeded| {
                WorkerResult::EngineJoinedGroup {
                    migration,
                    succeeded,
                }
            });
            target.idle_restore = Some(idle_restore);
        }
    }

    /// Records that the engine that waits for this restore is a member of the task's control group.
    pub(crate) fn on_engine_joined_group(&mut self, migration: MigrationId, succeeded: bool) {
        if let Some(target) = self.migrations.incoming_tasks.get_mut(&migration)
            && let Some(idle_restore) = &mut target.idle_restore
        {
            idle_restore.is_in_group = succeeded;
        }
    }
}

/// Where an engine restores a task.
pub(crate) struct EnginePlace<'a> {
    pub(crate) namespace: &'a Namespace,
    /// `Some` if the engine runs inside the namespace.
    pub(crate) vault: Option<&'a ImageVault>,
    pub(crate) pid_numbering: Option<PidNumbering>,
}

impl EnginePlace<'_> {
    /// Returns the namespaces inside which the engine runs, and makes the engine's PIDs there
    /// differ from those of the task; `None` if the engine runs outside.
    ///
    /// # Errors
    /// The namespace has ended, or the kernel does not let the tasker choose PIDs.
    fn prepare_inside(&self) -> io::Result<Option<TaskNamespaces>> {
        let Some(vault) = self.vault else {
            return Ok(None);
        };
        if let Some(numbering) = self.pid_numbering {
            let last_pid = numbering.pid_limit.saturating_sub(ENGINE_PIDS);
            self.namespace.set_last_pid(last_pid.cast_signed())?;
        }
        vault.task_namespaces(self.namespace).map(Some)
    }
}

/// Starts an engine that waits for a restore.
pub(crate) fn start_restore_engine(
    engine: &dyn Engine,
    place: &EnginePlace<'_>,
) -> Result<IdleRestoreWithOutput, Failure> {
    let io_failure = |e: io::Error| Failure::Io(format!("cannot restore: {e}"));
    let (output, output_writer) = Output::new().map_err(io_failure)?;
    let resources = RestoreResources {
        inside: place.prepare_inside().map_err(io_failure)?,
        pid_namespace: place.namespace.open().map_err(io_failure)?,
        output: output_writer,
    };
    Ok(IdleRestoreWithOutput {
        engine: with_own_file_rights(|| engine.start_idle_restore(resources))?,
        output,
        is_in_group: false,
    })
}

/// Starts a worker that adds processes to the control group of a task. Returns false if the task
/// has no group or the worker cannot be started. `to_result` makes the worker's result of whether
/// the processes were added.
///
/// A worker is used because the kernel takes longer to add a process than for all other steps
/// before the task runs.
pub(crate) fn start_joining_group(
    namespace: &Namespace,
    pids: Vec<i32>,
    workers: &mut Workers,
    to_result: impl FnOnce(bool) -> WorkerResult + Send + 'static,
) -> bool {
    let Some(procs_file) = namespace.joinable_procs_file() else {
        return false;
    };
    let Ok(cancel) = CancelHandle::new() else {
        return false;
    };
    let work = move || to_result(freezer::add_to_group(&procs_file, &pids).is_ok());
    // If no worker can be started, a pause will stop the task by signals, as without a freezer.
    workers.start_worker(&cancel, None, work).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::engine::{DumpParams, EngineFailure, RunningDump};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// An engine that has ended when its flag is set. Its PID is its number.
    struct TestEngine(i32, Arc<AtomicBool>);

    impl IdleDump for TestEngine {
        fn engine_pid(&self) -> i32 {
            self.0
        }

        fn has_ended(&self) -> bool {
            self.1.load(Ordering::Relaxed)
        }

        fn start(self: Box<Self>, _: DumpParams) -> Result<Box<dyn RunningDump>, EngineFailure> {
            Err(Failure::TaskEnded.into())
        }
    }

    fn add(idle_dumps: &mut IdleDumps, number: u64, now: Instant) -> Arc<AtomicBool> {
        let has_ended = Arc::new(AtomicBool::new(false));
        let engine = Box::new(TestEngine(number as i32, has_ended.clone()));
        idle_dumps.add(MigrationId(number), engine, now);
        has_ended
    }

    /// A migration gets the engine that waits for it, once, and none that has ended.
    #[test]
    fn ended_engine_is_not_used() {
        let (mut idle_dumps, now) = (IdleDumps::default(), Instant::now());
        add(&mut idle_dumps, 1, now);
        let has_ended = add(&mut idle_dumps, 2, now);
        assert!(!idle_dumps.can_add(MigrationId(1)) && idle_dumps.can_add(MigrationId(3)));
        assert_eq!(
            idle_dumps
                .take(MigrationId(1))
                .map(|idle| idle.engine_pid()),
            Some(1)
        );
        assert!(idle_dumps.take(MigrationId(1)).is_none() && !idle_dumps.owns(1));
        has_ended.store(true, Ordering::Relaxed);
        assert!(idle_dumps.owns(2) && idle_dumps.take(MigrationId(2)).is_none());
    }

    /// The number of waiting engines is limited, and each ends when it has waited too long.
    #[test]
    fn idle_engines_are_few_and_end() {
        let (mut idle_dumps, start) = (IdleDumps::default(), Instant::now());
        for number in 0..IDLE_ENGINES_MAX as u64 {
            assert!(idle_dumps.can_add(MigrationId(number)));
            add(&mut idle_dumps, number, start + Duration::from_secs(number));
        }
        assert!(!idle_dumps.can_add(MigrationId(99)));
        assert_eq!(idle_dumps.next_expiry(), Some(start + IDLE_DUMP_TIMEOUT));
        idle_dumps.end_expired(start + IDLE_DUMP_TIMEOUT);
        assert!(!idle_dumps.owns(0) && idle_dumps.owns(1));
        idle_dumps.end_all();
        assert_eq!(idle_dumps.next_expiry(), None);
    }
}
