//! Moving tasks: the orders, and what the tasker does as source (stop, dump, continue or kill) of a move; [`crate::target`] is
//! the other half. It decides nothing; it makes sure that whatever fails, the source's task can go on and nothing is left at
//! the target.

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
use checkpoint::engine::{Cancel, DumpJob, Engine, Limits, Serving};
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

/// How long the processes of a task may take to stop.
const STOP_ALLOWED: Duration = Duration::from_secs(2);
/// Time of a dump or restore apart from its size.
const ENGINE_ALLOWED_BASE: Duration = Duration::from_secs(10);
/// Image bytes for which a dump or restore gets one second more; fresh memory is slow on virtual machines.
const ENGINE_BYTES_PER_SECOND: u64 = 100 << 20;
/// Time for the first attempt to dump a task without memory. CRIU waits for ever for a thread that does not halt when it is told
/// to (the one known cause is dealt with by its tracer, `checkpoint/src/criu/relay.rs`); a dump that works is done long before
/// this, and the second attempt has the whole time.
const FIRST_DUMP_BASE: Duration = Duration::from_secs(5);
/// Orders kept until it is known whether the engine works.
const DEFERRED_MAX: usize = 256;

/// Said when the tasker may not make namespaces.
pub(crate) const NO_NAMESPACES: &str = "the tasker may not make process-id namespaces here, which takes root; run the daemon as \
     root, or have the task write its own checkpoint (SEMPA_ENGINE), which takes no rights";

/// What is known of the engine.
#[derive(Clone, Debug)]
pub(crate) enum EngineState {
    /// It starts, this is its version, and a trial is under way.
    Trying(String),
    /// A trial dump and restore went well.
    Works(String),
    /// It cannot be used; why, and how to get one.
    Broken(String),
    /// The same, and a trial is under way that may change it.
    TryingAgain(String),
}

/// Moves under way on this host, and the engine that does the work.
pub(crate) struct Moves {
    pub(crate) engine: Option<Arc<dyn Engine>>,
    pub(crate) state: EngineState,
    pub(crate) workers: Workers,
    pub(crate) trial: Option<Trial>,
    /// Trials in a row that went wrong.
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
    /// Looks for the engine and asks for its version, where there can be one.
    ///
    /// # Errors
    /// When there is no descriptor left.
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

    /// The engine's version, or why there is none.
    pub(crate) fn engine_state(&self) -> Result<String, String> {
        match &self.state {
            EngineState::Trying(version) | EngineState::Works(version) => Ok(version.clone()),
            EngineState::Broken(why) | EngineState::TryingAgain(why) => Err(why.clone()),
        }
    }

    /// Readable when workers have something to say.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.workers.wake()
    }

    /// The held copies, each with a descriptor that becomes readable when it is lost.
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

    /// How far a move to this host is, until its task runs.
    pub(crate) fn stage_of(&mut self, migration: MigrationId) -> Option<&mut Stage> {
        self.targets
            .get_mut(&migration)
            .map(|target| &mut target.stage)
    }

    /// True when no thread runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.workers.is_idle()
    }

    /// Calls everything off and forgets all copies; for the end of the tasker.
    pub(crate) fn cancel_all(&mut self) {
        self.following.withhold_all();
        self.pre_copies.end_all();
        self.workers.cancel_all();
        self.targets.clear();
        self.trial = None;
    }
}

impl Supervisor {
    /// Carries out an order that is about a move.
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

    /// The engine's trial is over: what waited for it goes on.
    pub(crate) fn take_up_deferred(&mut self) {
        for order in std::mem::take(&mut self.moves.deferred) {
            self.obey_move(order);
        }
    }

    /// Takes what workers have finished.
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

    /// Looks whether the tasks that were told to stop have stopped.
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
                // It stays in this phase: the daemon continues it like any move that failed.
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
            // Nobody writes any more: with the pipe empty nothing of it can be in the images and come twice.
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
            limits.allowed -= ENGINE_ALLOWED_BASE - FIRST_DUMP_BASE;
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
            asked_on: asked_on.map_err(|e| Failure::Io(format!("no descriptor: {e}")))?,
            sent: attempt.sent.clone(),
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
        result: Result<(DumpReport, Option<Box<dyn Serving>>), Failure>,
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
                // An engine that died may have left it in any state; it is to be as it was.
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

    /// Sees to it that a dump is begun once more if it only met another one on its way, or hung.
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
        if !engine.may_try_again(root, failure) {
            return false;
        }
        let Some(pause) = attempt.again.pause(micros(attempt.begun.elapsed()), roll()) else {
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

    /// The pause before another attempt is over, or was called off.
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

    /// Begins a dump once more, in an empty directory.
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
                    // The answer comes when the engine is dead.
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
            // It has ended by itself, and was reported then.
            None => self.say(&FromTasker::SourceGone {
                migration,
                used: Usage::default(),
            }),
        }
    }

    /// A task that stood still and was killed gets no further instruction done; nobody needs to wait until the kernel has taken
    /// its memory back, which takes the longer the more there is.
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

    /// A task has ended while it was stopped for a move: whoever waits for a step of it gets an answer.
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

/// Writes into a stopped task what it is to find when it goes on elsewhere.
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

/// The time for a dump or restore of this many bytes, and a fresh handle to call it off.
pub(crate) fn limits_for(bytes: u64) -> Result<Limits, Failure> {
    let cancel = Cancel::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
    Ok(Limits {
        allowed: ENGINE_ALLOWED_BASE + Duration::from_secs(bytes / ENGINE_BYTES_PER_SECOND),
        cancel,
    })
}

/// Makes the directory for images, or accepts an empty one; only its owner may look into it.
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

/// Memory of these processes together, resident or swapped out.
pub(crate) fn resident_bytes(pids: &[i32]) -> u64 {
    pids.iter()
        .filter_map(|pid| checkpoint::facts::resident_bytes(*pid))
        .sum()
}
