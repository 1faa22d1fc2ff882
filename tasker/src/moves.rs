//! Migration orders, and the source's part of a migration: stop, dump, continue or kill.
//! [`crate::target`] is the other part.
//!
//! The tasker makes no decisions. It guarantees that after any failure the source's task can
//! continue and nothing is left at the target.

use crate::attempt::{Attempt, rest, roll};
use crate::carry::Carry;
use crate::ease;
use crate::files;
use crate::learning::Learning;
use crate::memory::{self, Following};
use crate::namespace::Namespace;
use crate::precopy::PreCopies;
use crate::promised::Promised;
use crate::stop::{self, Crowd};
use crate::supervisor::Supervisor;
use crate::sys;
use crate::target::{Stage, Target};
use crate::task::{Phase, Task, micros};
use crate::trial::Trial;
use crate::verdict::{self, For};
use crate::workers::{Outcome, Workers};
use checkpoint::engine::{CallLimits, Cancel, DumpJob, Engine, MemoryServer};
use checkpoint::facts::{self, HashCache};
use sempa_proto::migration::{Failure, Usage};
use sempa_proto::task::RedirectAt;
use sempa_proto::tasker::{DumpReport, FromTasker, Redirection, ToTasker};
use sempa_proto::{MigrationId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for the processes of a task to stop.
const STOP_ALLOWED: Duration = Duration::from_secs(2);
/// Time limit of a dump or restore without the part that depends on the size.
const ENGINE_ALLOWED_BASE: Duration = Duration::from_secs(10);
/// Image bytes for which a dump or restore gets one more second; memory that was never touched is
/// slow on virtual machines.
const ENGINE_BYTES_PER_SECOND: u64 = 100 << 20;
/// Time limit of the first attempt to dump a task, without the part for its memory.
///
/// CRIU waits forever for a thread that does not halt on request. The one known cause is handled by
/// its tracer (`checkpoint/src/criu/relay.rs`). A working dump ends long before this limit; the
/// second attempt gets the full time.
const FIRST_DUMP_BASE: Duration = Duration::from_secs(5);
/// Most orders deferred until the engine has been probed.
const DEFERRED_MAX: usize = 256;

/// Reason given when the tasker may not create namespaces.
pub(crate) const NO_NAMESPACES: &str = "the tasker may not make process-id namespaces here, which takes root; run the daemon as \
     root, or have the task write its own checkpoint (SEMPA_ENGINE), which takes no rights";

/// What is known about the engine.
#[derive(Clone, Debug)]
pub(crate) enum EngineState {
    /// The engine starts and has this version; a probe is running.
    Trying(String),
    /// A probe (dump and restore) was successful; the version.
    Works(String),
    /// The engine cannot be used: the reason, and how to get a working one.
    Broken(String),
    /// As `Broken`, but another probe is running.
    TryingAgain(String),
}

/// The migrations in progress on this host, and the engine.
pub(crate) struct Moves {
    pub(crate) engine: Option<Arc<dyn Engine>>,
    pub(crate) state: EngineState,
    pub(crate) workers: Workers,
    pub(crate) trial: Option<Trial>,
    /// Number of consecutive failed probes.
    pub(crate) trials_failed: u32,
    pub(crate) targets: BTreeMap<MigrationId, Target>,
    deferred: Vec<ToTasker>,
    pub(crate) following: Following,
    pub(crate) pre_copies: PreCopies,
    pub(crate) hashes: Arc<HashCache>,
    pub(crate) learning: Learning,
    pub(crate) promised: Promised,
}

impl Moves {
    /// Locates the engine and asks for its version if it could be used.
    ///
    /// # Errors
    /// No descriptors are left.
    pub(crate) fn new(namespaces: bool) -> io::Result<Moves> {
        let locate = || checkpoint::criu::Criu::locate(|name| std::env::var_os(name));
        let located = if namespaces {
            locate()
        } else {
            Err(NO_NAMESPACES.into())
        };
        let (engine, state) = match located.and_then(|criu| Ok((criu.probe()?, criu))) {
            Ok((version, criu)) => (
                Some(Arc::new(criu) as Arc<dyn Engine>),
                EngineState::Trying(version),
            ),
            Err(why) => (None, EngineState::Broken(why)),
        };
        let hashes = Arc::new(HashCache::default());
        Ok(Moves {
            engine,
            state,
            workers: Workers::new()?,
            trial: None,
            trials_failed: 0,
            targets: BTreeMap::new(),
            deferred: Vec::new(),
            following: Following::new(),
            pre_copies: PreCopies::new(),
            learning: Learning::new(hashes.clone()),
            hashes,
            promised: Promised::default(),
        })
    }

    /// Returns the engine's version, or why it cannot be used.
    pub(crate) fn engine_state(&self) -> Result<String, String> {
        match &self.state {
            EngineState::Trying(version) | EngineState::Works(version) => Ok(version.clone()),
            EngineState::Broken(why) | EngineState::TryingAgain(why) => Err(why.clone()),
        }
    }

    /// Becomes readable when workers have results.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.workers.wake()
    }

    /// Returns the copies held at this target, each with a descriptor that becomes readable when
    /// the copy dies.
    pub(crate) fn held(&self) -> impl Iterator<Item = (MigrationId, BorrowedFd<'_>)> {
        self.targets
            .iter()
            .filter_map(|(migration, target)| match &target.stage {
                Stage::Held { process, .. } => Some((*migration, process.pidfd.as_fd())),
                _ => None,
            })
    }

    /// True for processes that only their own waiter may reap.
    pub(crate) fn waits_for(&self, pid: i32) -> bool {
        let held = |target: &Target| match &target.stage {
            Stage::Held { process, .. } => process.pid == pid,
            _ => false,
        };
        self.workers.waits_for(pid) || self.targets.values().any(held)
    }

    /// Returns the stage of a migration to this host, until its task runs.
    pub(crate) fn stage_of(&mut self, migration: MigrationId) -> Option<&mut Stage> {
        self.targets
            .get_mut(&migration)
            .map(|target| &mut target.stage)
    }

    /// True if no worker is running.
    pub(crate) fn is_idle(&self) -> bool {
        self.workers.is_idle()
    }

    /// Cancels everything and drops all copies; called when the tasker ends.
    pub(crate) fn cancel_all(&mut self) {
        self.following.withhold_all();
        self.pre_copies.end_all();
        self.workers.cancel_all();
        self.targets.clear();
        self.trial = None;
    }
}

impl Supervisor {
    /// Handles an order that concerns a migration.
    pub(crate) fn obey_move(&mut self, order: ToTasker) {
        if matches!(self.moves.state, EngineState::Trying(_))
            && verdict::needs_engine(&order)
            && self.moves.deferred.len() < DEFERRED_MAX
        {
            self.moves.deferred.push(order);
            return;
        }
        match order {
            ToTasker::Inspect { migration, tid } => self.look(For::Move { migration, tid }, tid),
            ToTasker::Look { question, tid } => self.look(For::Question(question), tid),
            ToTasker::Prepare {
                migration,
                tid,
                facts,
            } => self.judge(For::Move { migration, tid }, facts),
            ToTasker::Judge { question, facts } => self.judge(For::Question(question), facts),
            ToTasker::PreCopy {
                migration,
                tid,
                memory_way,
            } => self.pre_copy(migration, tid, &memory_way),
            ToTasker::EndPreCopy { migration } => self.moves.pre_copies.end_going(migration),
            ToTasker::TakePreCopy {
                migration,
                memory_way,
            } => self.take_pre_copy(migration, &memory_way),
            ToTasker::Stop {
                migration,
                tid,
                redirection,
            } => self.stop(migration, tid, redirection),
            ToTasker::Dump {
                migration,
                tid,
                dir,
                memory_way,
            } => self.dump(migration, tid, dir, memory_way.as_deref()),
            ToTasker::Continue { migration, tid } => self.continue_task(migration, tid),
            ToTasker::KillMoved { migration, tid } => self.kill_moved(migration, tid),
            ToTasker::Restore {
                migration,
                tid,
                dir,
                again,
                memory_way,
            } => {
                self.restore(migration, tid, &dir, again, memory_way.as_deref());
            }
            ToTasker::MemoryLost { migration, why } => self.memory_lost(migration, why),
            ToTasker::Build { migration, start } => self.build_anew(migration, &start),
            ToTasker::Run {
                migration,
                used,
                held,
            } => self.run_held(migration, used, held),
            ToTasker::Discard { migration } => self.discard(migration),
            ToTasker::Start(_)
            | ToTasker::Signal { .. }
            | ToTasker::End { .. }
            | ToTasker::Minds { .. }
            | ToTasker::EndsForGood { .. }
            | ToTasker::Kill { .. }
            | ToTasker::Hold { .. }
            | ToTasker::Ease { .. }
            | ToTasker::GoOn { .. } => {}
        }
    }

    /// Handles the orders that waited for the engine's probe.
    pub(crate) fn take_up_deferred(&mut self) {
        for order in std::mem::take(&mut self.moves.deferred) {
            self.obey_move(order);
        }
    }

    /// Handles the results of finished workers.
    pub(crate) fn hear_workers(&mut self) {
        for outcome in self.moves.workers.finished() {
            match outcome {
                Outcome::Dumped {
                    migration,
                    tid,
                    result,
                } => self.dumped(migration, tid, result),
                Outcome::Rested {
                    migration,
                    tid,
                    failure,
                } => self.rested(migration, tid, failure),
                Outcome::Placed { migration, result } => self.placed(migration, result),
                Outcome::Restored { migration, result } => self.restored(migration, result),
                Outcome::BroughtIn { migration, done } => self.brought_in(migration, done),
                Outcome::Seen { by, result } => self.seen(by, result),
                Outcome::Judged { by, verdict } => self.judged(by, verdict),
                Outcome::PreCopied { migration, result } => self.pre_copied(migration, result),
                Outcome::PreCopyCame { migration, result } => self.pre_copy_came(migration, result),
                Outcome::Served {
                    migration,
                    tid,
                    result,
                } => self.served(migration, tid, &result),
                Outcome::Arrived { migration, result } => self.arrived(migration, result),
                Outcome::Outlived => {}
                Outcome::TrialChecked(result) => self.trial_checked(result),
                Outcome::TrialDumped(result) => self.trial_dumped(result),
                Outcome::TrialHeld(result) => self.trial_held(result),
            }
        }
    }

    fn stop(&mut self, migration: MigrationId, tid: Tid, redirection: Option<Redirection>) {
        let result = match self.tasks.get_mut(&tid) {
            None => Err(Failure::TaskEnded),
            Some(Task {
                namespace: None, ..
            }) => Err(Failure::Engine(NO_NAMESPACES.into())),
            Some(task) if !matches!(task.phase, Phase::Running) => Err(Failure::CalledOff(
                "another move of the task is under way on this host".into(),
            )),
            Some(task) => {
                let told = task.hold_for_move();
                task.redirection = redirection;
                task.phase = Phase::Stopping {
                    migration,
                    until: Instant::now() + STOP_ALLOWED,
                    told,
                };
                Ok(())
            }
        };
        match result {
            Ok(()) => self.look_at_stopping(),
            Err(why) => self.say(&FromTasker::Stopped {
                migration,
                result: Err(why),
            }),
        }
    }

    /// Checks whether the tasks with a stop order have stopped.
    pub(crate) fn look_at_stopping(&mut self) {
        let now = Instant::now();
        let mut done = Vec::new();
        for (tid, task) in &mut self.tasks {
            let (
                Phase::Stopping {
                    migration,
                    until,
                    told,
                },
                Some(namespace),
            ) = (&mut task.phase, &task.namespace)
            else {
                continue;
            };
            let migration = *migration;
            if stop::all_still(&Crowd::Namespace(namespace), told)
                && !stop::finish_forks(&namespace.members(), &task.stopped_before, told)
            {
                let redirected = redirect(namespace, task.redirection.take());
                task.phase = Phase::Stopped { migration };
                done.push((*tid, migration, redirected));
            } else if now >= *until {
                // The task stays in this phase until the daemon continues it, as after any failed
                // migration.
                task.phase = Phase::Stopped { migration };
                done.push((
                    *tid,
                    migration,
                    Err(Failure::Deadline {
                        allowed: micros(STOP_ALLOWED),
                    }),
                ));
            }
        }
        for (tid, migration, result) in done {
            // No process of the task writes any more. Data left in the pipe would be in the images,
            // too, and arrive twice.
            self.drain_output(tid);
            self.say(&FromTasker::Stopped { migration, result });
        }
    }

    fn dump(&mut self, migration: MigrationId, tid: Tid, dir: PathBuf, memory_way: Option<&Path>) {
        let ahead = self.moves.pre_copies.take_sent(migration);
        let started = private_directory(&dir).and_then(|()| {
            let (asked_on, sent) = match (memory_way, ahead) {
                (Some(_), Some((stream, sent))) => (Some(stream), Some(sent)),
                (way, _) => (way.map(memory::connect).transpose()?.map(Arc::new), None),
            };
            let attempt = Attempt::first(dir, asked_on, sent);
            Ok((self.start_dump(migration, tid, &attempt)?, attempt))
        });
        match started {
            Ok((worker, attempt)) => self.is_dumping(migration, tid, worker, attempt),
            Err(why) => {
                self.moves
                    .following
                    .has_failed(Some(&why).filter(|_| memory_way.is_some()));
                self.say(&FromTasker::Dumped {
                    migration,
                    result: Err(why),
                });
            }
        }
    }

    fn is_dumping(&mut self, migration: MigrationId, tid: Tid, worker: u64, attempt: Attempt) {
        if let Some(task) = self.tasks.get_mut(&tid) {
            task.phase = Phase::Dumping {
                migration,
                worker,
                attempt,
                called_off: false,
            };
        }
    }

    fn start_dump(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        attempt: &Attempt,
    ) -> Result<u64, Failure> {
        let task = self.tasks.get(&tid).ok_or(Failure::TaskEnded)?;
        let (
            Phase::Stopped {
                migration: stopped_for,
            },
            Some(namespace),
        ) = (&task.phase, &task.namespace)
        else {
            return Err(Failure::Engine(format!("{tid} is not stopped for a move")));
        };
        if *stopped_for != migration {
            return Err(Failure::Engine(format!(
                "{tid} is stopped for another move, {stopped_for}"
            )));
        }
        let engine = self.moves.engine.as_ref().ok_or_else(|| self.broken())?;
        let processes = namespace.pids();
        let memory = resident_bytes(&processes);
        let (carried, root) = (
            (task.output.inode(), task.stopped_before.clone()),
            task.process.pid,
        );
        let mut limits = limits_for(memory)?;
        if attempt.is_first {
            limits.timeout -= ENGINE_ALLOWED_BASE - FIRST_DUMP_BASE;
        }
        let dir = attempt.dir.clone();
        let asked_on = attempt
            .asked_on
            .as_ref()
            .map(|stream| stream.try_clone())
            .transpose();
        let job = DumpJob {
            pid: task.process.pid,
            processes: processes.clone(),
            dir: dir.clone(),
            pid_namespace: namespace.inode(),
            page_stream: asked_on.map_err(|e| Failure::Io(format!("no descriptor: {e}")))?,
            pre_copied: attempt.sent.clone(),
        };
        let dumping = engine.start_dump(job)?;
        let (cancel, pid) = (limits.cancel.clone(), dumping.engine_pid());
        self.moves.workers.start(&cancel, Some(pid), move || {
            let result = dumping.finish(&limits).and_then(|(report, serving)| {
                let files = files::gather(&dir, root, &processes)?;
                let (many, written) = (files.len() as u32, facts::written_files(&processes));
                let carry = Carry::of(&dir, carried.0, carried.1, memory, written, files)?;
                let described = carry.write(&dir)?;
                let report = DumpReport {
                    bytes: carry.image_bytes().max(report.bytes) + described,
                    files: report.files + 1 + many,
                };
                Ok((report, serving))
            });
            if result.is_err() {
                stop::settle(&processes);
            }
            Outcome::Dumped {
                migration,
                tid,
                result,
            }
        })
    }

    pub(crate) fn broken(&self) -> Failure {
        Failure::Engine(
            self.moves
                .engine_state()
                .err()
                .unwrap_or_else(|| "there is no dump engine".into()),
        )
    }

    fn dumped(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        result: Result<(DumpReport, Option<Box<dyn MemoryServer>>), Failure>,
    ) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return self.say(&FromTasker::Dumped {
                migration,
                result: Err(Failure::TaskEnded),
            });
        };
        let mut go_on = false;
        if matches!(task.phase, Phase::Dumping { migration: of, .. } if of == migration) {
            let phase = std::mem::replace(&mut task.phase, Phase::Stopped { migration });
            if let (Err(_), Some(namespace)) = (&result, &task.namespace) {
                // An engine that died may have left the task in any state; it must be stopped
                // again.
                stop::all_still(&Crowd::Namespace(namespace), &mut BTreeSet::new());
            }
            if let Phase::Dumping {
                attempt,
                called_off,
                ..
            } = phase
            {
                go_on = called_off;
                let memory_follows = attempt.asked_on.is_some() && !called_off;
                let root = task.process.pid;
                let failure = result.as_ref().err().filter(|_| !called_off);
                if failure.is_some_and(|why| self.dumps_again(migration, tid, root, why, attempt)) {
                    return;
                }
                if memory_follows {
                    self.moves.following.has_failed(result.as_ref().err());
                }
            }
        }
        let result = result.and_then(|(report, serving)| {
            serving
                .map_or(Ok(()), |serving| self.hand_out(migration, tid, serving))
                .map(|()| report)
        });
        self.say(&FromTasker::Dumped { migration, result });
        if go_on {
            self.continue_task(migration, tid);
        }
    }

    /// Restarts a dump that failed only because it met another dump or hung. Returns false if it is
    /// not restarted.
    fn dumps_again(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        root: i32,
        failure: &Failure,
        mut attempt: Attempt,
    ) -> bool {
        let Some(engine) = &self.moves.engine else {
            return false;
        };
        if attempt.is_first && matches!(failure, Failure::Deadline { .. }) {
            return self.dump_anew(migration, tid, attempt);
        }
        if !engine.is_retryable(root, failure) {
            return false;
        }
        let Some(pause) = attempt
            .again
            .next_delay(micros(attempt.begun.elapsed()), roll())
        else {
            return false;
        };
        let (failure, cancel) = (failure.clone(), Cancel::new());
        let resting = cancel
            .map_err(|e| Failure::Io(e.to_string()))
            .and_then(|cancel| {
                let called_off = cancel.clone();
                self.moves.workers.start(&cancel, None, move || {
                    rest(&called_off, Duration::from_micros(pause.0));
                    Outcome::Rested {
                        migration,
                        tid,
                        failure,
                    }
                })
            });
        let Ok(worker) = resting else { return false };
        self.is_dumping(migration, tid, worker, attempt);
        true
    }

    /// Handles the end of the delay before another attempt, or its cancellation.
    fn rested(&mut self, migration: MigrationId, tid: Tid, failure: Failure) {
        if let Some(task) = self.tasks.get_mut(&tid)
            && let Phase::Dumping {
                migration: of,
                attempt,
                called_off: false,
                ..
            } = &task.phase
            && *of == migration
        {
            let attempt = attempt.clone();
            task.phase = Phase::Stopped { migration };
            if self.dump_anew(migration, tid, attempt) {
                return;
            }
        }
        self.dumped(migration, tid, Err(failure));
    }

    /// Starts a dump again, in an empty directory.
    fn dump_anew(&mut self, migration: MigrationId, tid: Tid, attempt: Attempt) -> bool {
        let emptied = std::fs::remove_dir_all(&attempt.dir).map_err(|e| Failure::Io(e.to_string()));
        let attempt = Attempt {
            is_first: false,
            ..attempt
        };
        let begun = emptied
            .and_then(|()| private_directory(&attempt.dir))
            .and_then(|()| self.start_dump(migration, tid, &attempt));
        let Ok(worker) = begun else { return false };
        self.is_dumping(migration, tid, worker, attempt);
        true
    }

    pub(crate) fn continue_task(&mut self, migration: MigrationId, tid: Tid) {
        if let Some(task) = self.tasks.get_mut(&tid) {
            match &mut task.phase {
                Phase::Dumping {
                    worker, called_off, ..
                } => {
                    // The reply is sent when the engine is dead.
                    *called_off = true;
                    let worker = *worker;
                    return self.moves.workers.cancel(worker);
                }
                Phase::Serving {
                    worker, called_off, ..
                } => {
                    *called_off = true;
                    let worker = *worker;
                    return self.withhold(migration, worker);
                }
                Phase::Stopping { migration: of, .. } | Phase::Stopped { migration: of }
                    if *of == migration =>
                {
                    task.go_on();
                }
                _ => {}
            }
        }
        self.say(&FromTasker::Continued { migration });
    }

    fn kill_moved(&mut self, migration: MigrationId, tid: Tid) {
        match self.tasks.get_mut(&tid) {
            Some(task) => {
                if let Phase::Dumping { worker, .. } = task.phase {
                    self.moves.workers.cancel(worker);
                }
                let used = task.used_before.plus(stop::used(task.process.pid));
                ease::put_last(&task.crowd().pids());
                self.moves.following.outlive(migration);
                task.kill_all();
                self.leave_to_die(migration, tid, used);
            }
            // The task has exited, and that was reported.
            None => self.say(&FromTasker::SourceGone {
                migration,
                used: Usage::default(),
            }),
        }
    }

    /// Forgets a task that was killed while it was stopped, and reports it as gone.
    ///
    /// The task executes no further instruction. Waiting until the kernel has freed its memory is
    /// not necessary, and takes longer the more memory there is.
    fn leave_to_die(&mut self, migration: MigrationId, tid: Tid, used: Usage) {
        self.drain_output(tid);
        let Some(task) = self.tasks.remove(&tid) else {
            return;
        };
        self.say(&FromTasker::SourceGone { migration, used });
        if let Some(namespace) = task.namespace {
            self.when_ended(namespace, Vec::new());
        }
    }

    /// Ends the current migration step of a task that has exited while it was stopped: the daemon
    /// gets a reply to the step.
    pub(crate) fn abandon_move_of(&mut self, task: &Task) {
        self.moves.pre_copies.ended(task.tid);
        match task.phase {
            Phase::Stopping { migration, .. } => {
                self.say(&FromTasker::Stopped {
                    migration,
                    result: Err(Failure::TaskEnded),
                });
            }
            Phase::Dumping { worker, .. } => self.moves.workers.cancel(worker),
            Phase::Serving {
                migration, worker, ..
            } => self.withhold(migration, worker),
            Phase::Running | Phase::Stopped { .. } => {}
        }
    }
}

/// Writes a redirection into a stopped task, which the task reads when it continues on another
/// host.
pub(crate) fn redirect(
    namespace: &Namespace,
    redirection: Option<Redirection>,
) -> Result<(), Failure> {
    let Some(Redirection {
        place: RedirectAt { pid: inner, at },
        bytes,
    }) = redirection
    else {
        return Ok(());
    };
    let Some(pid) = namespace
        .pids()
        .into_iter()
        .find(|pid| stop::inner_pid(*pid) == Some(inner))
    else {
        return Err(Failure::Engine(format!(
            "its process {inner}, whose library has let go, is not there"
        )));
    };
    let failed = |e| {
        Failure::Engine(format!(
            "its library cannot be told where it goes on: process {pid}: {e}"
        ))
    };
    sys::write_memory(pid, at, &bytes).map_err(failed)
}

/// Returns the time limit of a dump or restore of this size, with a new cancellation handle.
pub(crate) fn limits_for(bytes: u64) -> Result<CallLimits, Failure> {
    let cancel = Cancel::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
    Ok(CallLimits {
        timeout: ENGINE_ALLOWED_BASE + Duration::from_secs(bytes / ENGINE_BYTES_PER_SECOND),
        cancel,
    })
}

/// Creates the image directory with mode 0700, or accepts an empty one.
pub(crate) fn private_directory(dir: &Path) -> Result<(), Failure> {
    let bad = |e: &dyn std::fmt::Display| {
        Failure::Io(format!(
            "cannot make the image directory {}: {e}",
            dir.display()
        ))
    };
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            let mut entries = std::fs::read_dir(dir).map_err(|e| bad(&e))?;
            if entries.next().is_some() {
                return Err(bad(&"it exists and is not empty"));
            }
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
            std::fs::set_permissions(dir, mode).map_err(|e| bad(&e))
        }
        Err(e) => Err(bad(&e)),
    }
}

/// Returns the memory of these processes, resident or swapped out.
pub(crate) fn resident_bytes(pids: &[i32]) -> u64 {
    pids.iter()
        .filter_map(|pid| checkpoint::facts::resident_bytes(*pid))
        .sum()
}
