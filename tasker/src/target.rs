//! A move to this host: what the tasker does as its target (prepare, restore or begin anew, run or discard).

use crate::carry::Carry;
use crate::files::Made;
use crate::freezer;
use crate::hold::Hold;
use crate::moves::{NO_NAMESPACES, limits_for, redirect};
use crate::namespace::Namespace;
use crate::supervisor::Supervisor;
use crate::sys::{self, Child};
use crate::task::{self, Output, Phase, Task};
use crate::workers::{Outcome, Workers};
use crate::written;
use checkpoint::engine::{Cancel, Outside, RestoreJob};
use sempa_proto::migration::{Failure, Usage};
use sempa_proto::tasker::{FromTasker, Redirection, StartTask};
use sempa_proto::{MigrationId, Tid};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Moves to this host that are prepared or further; one more is refused.
const TARGETS_MAX: usize = 64;

/// A move to this host.
pub(crate) struct Target {
    pub(crate) tid: Tid,
    /// None where the tasker may not make any: then only a program that is started anew can come.
    namespace: Option<Namespace>,
    pub(crate) stage: Stage,
    /// Files that have come with it.
    pub(crate) made: Made,
    /// Most of its memory comes later.
    memory_follows: bool,
}

pub(crate) enum Stage {
    /// There is room for it.
    Prepared,
    /// Files that come with it are put where they belong.
    Placing {
        dir: PathBuf,
        again: Option<Redirection>,
        discard: bool,
    },
    /// The engine builds it.
    Restoring {
        worker: u64,
        carry: Carry,
        output: Output,
        again: Option<Redirection>,
        discard: bool,
        /// Why the memory that was to follow will not come.
        lost: Option<Failure>,
    },
    /// It is built and stands still. The engine has ended, so that its death cannot take the task along once this copy is
    /// the only one.
    Held {
        process: Child,
        /// Those of its processes that were stopped before the move stopped the others.
        stopped_before: Vec<i32>,
        output: Output,
        /// It is on its way into its control group.
        enters: bool,
        /// It is to run when it is in: what it had used elsewhere, and whether it stays held.
        run: Option<(Usage, bool)>,
    },
}

impl Stage {
    /// What is said of a copy that is lost: of one that was told to run, that it does not.
    pub(crate) fn lost_word(&self, migration: MigrationId, why: Failure) -> FromTasker {
        match self {
            Stage::Held { run: Some(_), .. } => FromTasker::Ran {
                migration,
                result: Err(why),
            },
            _ => FromTasker::Restored {
                migration,
                result: Err(why),
            },
        }
    }
}

impl Supervisor {
    pub(crate) fn make_room(&mut self, migration: MigrationId, tid: Tid) -> Result<(), Failure> {
        if self.moves.targets.contains_key(&migration) {
            return Err(Failure::Engine(format!(
                "{migration} is prepared here already"
            )));
        }
        if self.moves.targets.len() >= TARGETS_MAX {
            return Err(Failure::Engine(format!(
                "{TARGETS_MAX} moves to this host are under way, the limit"
            )));
        }
        if self.tasks.contains_key(&tid) {
            return Err(Failure::Engine(format!("{tid} runs here already")));
        }
        let namespace = match self.namespaces {
            true => {
                let taken = self.spare.take(self.freezer.as_mut().ok());
                Some(taken.map_err(|e| Failure::Io(format!("no process-id namespace: {e}")))?)
            }
            false => None,
        };
        let target = Target {
            tid,
            namespace,
            stage: Stage::Prepared,
            made: Made::default(),
            memory_follows: false,
        };
        self.moves.targets.insert(migration, target);
        Ok(())
    }

    pub(crate) fn restore(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        dir: &Path,
        again: Option<Redirection>,
        memory_way: Option<&Path>,
    ) {
        let room = match self.moves.targets.get(&migration) {
            Some(Target {
                stage: Stage::Prepared,
                tid: of,
                ..
            }) if *of == tid => Ok(()),
            Some(_) => Err(Failure::Engine(format!(
                "{migration} is not waiting for the images of {tid}"
            ))),
            None => self.make_room(migration, tid),
        };
        if let Err(why) = room {
            return self.say(&FromTasker::Restored {
                migration,
                result: Err(why),
            });
        }
        let carry = Carry::read(dir);
        self.moves.promised.images_are_here(migration, dir);
        let room = carry
            .as_ref()
            .map_or(Ok(()), |carry| self.has_room_yet(migration, carry.memory));
        let fetches =
            room.and_then(|()| memory_way.map_or(Ok(()), |way| self.fetch(migration, dir, way)));
        if let Some(target) = self.moves.targets.get_mut(&migration) {
            target.memory_follows = memory_way.is_some();
        }
        match (fetches, carry) {
            (Err(why), _) => {
                self.moves.following.has_failed(Some(&why));
                self.clear_target(
                    migration,
                    vec![FromTasker::Restored {
                        migration,
                        result: Err(why),
                    }],
                );
            }
            (Ok(()), Ok(carry)) if !carry.files.is_empty() => {
                self.place_files(migration, dir, carry, again)
            }
            // What is wrong with it is told when it is needed.
            _ => self.build(migration, dir, again),
        }
    }

    /// Has the engine build a task for which everything else is there.
    pub(crate) fn build(&mut self, migration: MigrationId, dir: &Path, again: Option<Redirection>) {
        let started = self.start_restore(migration, dir, again);
        match (started, self.moves.targets.get_mut(&migration)) {
            (Ok(stage), Some(target)) => target.stage = stage,
            (Ok(_), None) => {}
            (Err(why), _) => self.clear_target(
                migration,
                vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }],
            ),
        }
    }

    /// Starts a program anew, up to the point where nothing of it runs yet.
    pub(crate) fn build_anew(&mut self, migration: MigrationId, start: &StartTask) {
        let room = match self.moves.targets.get(&migration) {
            Some(Target {
                stage: Stage::Prepared,
                ..
            }) => Ok(()),
            Some(_) => Err(Failure::Engine(format!("{migration} is held here already"))),
            None => self.make_room(migration, start.tid),
        };
        let built = room.and_then(|()| {
            let namespace = self
                .moves
                .targets
                .get(&migration)
                .and_then(|target| target.namespace.as_ref());
            task::build(start, namespace, &self.inherited).map_err(Failure::Io)
        });
        match (built, self.moves.targets.get_mut(&migration)) {
            (Ok((process, output)), Some(target)) => {
                let pid = process.pid;
                target.stage = Stage::Held {
                    process,
                    stopped_before: Vec::new(),
                    output,
                    enters: false,
                    run: None,
                };
                self.say(&FromTasker::Restored {
                    migration,
                    result: Ok(pid),
                });
            }
            (Ok(_), None) => {}
            (Err(why), None) => self.say(&FromTasker::Restored {
                migration,
                result: Err(why),
            }),
            (Err(why), Some(_)) => {
                self.clear_target(
                    migration,
                    vec![FromTasker::Restored {
                        migration,
                        result: Err(why),
                    }],
                );
            }
        }
    }

    fn start_restore(
        &mut self,
        migration: MigrationId,
        dir: &Path,
        again: Option<Redirection>,
    ) -> Result<Stage, Failure> {
        let target = self
            .moves
            .targets
            .get(&migration)
            .ok_or(Failure::TaskEnded)?;
        let namespace = target
            .namespace
            .as_ref()
            .ok_or_else(|| Failure::Engine(NO_NAMESPACES.into()))?;
        let memory_follows = target.memory_follows;
        if memory_follows && !self.moves.following.comes(migration) {
            return Err(Failure::Images("its memory does not come any more".into()));
        }
        let engine = self.moves.engine.as_ref().ok_or_else(|| self.broken())?;
        let carry = Carry::read(dir)?;
        // Whatever is in the images runs with the rights that they name.
        checkpoint::criu::belong_to(dir, nix::unistd::geteuid().as_raw())?;
        if again.is_some() {
            written::cut_back(&carry.written)?;
        }
        let io = |e: io::Error| Failure::Io(format!("cannot restore: {e}"));
        let (output, theirs) = Output::new().map_err(io)?;
        let limits = limits_for(carry.image_bytes())?;
        let job = RestoreJob {
            dir: dir.into(),
            outside: Outside {
                output_pipe: carry.output_pipe,
            },
            pid_namespace: namespace.open().map_err(io)?,
            output: theirs,
            memory_follows,
        };
        let restoring = engine.start_restore(job)?;
        let (cancel, pid) = (limits.cancel.clone(), restoring.engine_pid());
        // The images show a stopped task, and so it stays when the engine lets go of it.
        let build = move || {
            let built = restoring.hold(&limits).and_then(|held| {
                let process = held.pid();
                held.release(&limits).map(|()| process)
            });
            Outcome::Restored {
                migration,
                result: built,
            }
        };
        let worker = self.moves.workers.start(&cancel, Some(pid), build)?;
        Ok(Stage::Restoring {
            worker,
            carry,
            output,
            again,
            discard: false,
            lost: None,
        })
    }

    pub(crate) fn restored(&mut self, migration: MigrationId, result: Result<i32, Failure>) {
        let Some(target) = self.moves.targets.get_mut(&migration) else {
            return;
        };
        let stage = std::mem::replace(&mut target.stage, Stage::Prepared);
        let Stage::Restoring {
            carry,
            output,
            again,
            discard,
            lost,
            ..
        } = stage
        else {
            return;
        };
        if target.memory_follows && !discard && lost.is_none() {
            self.moves.following.has_failed(result.as_ref().err());
        }
        let adopted = lost.map_or(result, Err).and_then(|pid| {
            let pidfd = sys::pidfd_of(pid)
                .map_err(|e| Failure::Io(format!("no descriptor for process {pid}: {e}")))?;
            target
                .namespace
                .as_ref()
                .map_or(Ok(()), |namespace| redirect(namespace, again))?;
            Ok(Child { pid, pidfd })
        });
        match adopted {
            Ok(process) if !discard => {
                let pid = process.pid;
                let namespace = target.namespace.as_ref();
                let enters = namespace
                    .is_some_and(|n| begin_to_bring_in(migration, n, &mut self.moves.workers));
                let stopped_before = carry.stopped_before;
                target.stage = Stage::Held {
                    process,
                    stopped_before,
                    output,
                    enters,
                    run: None,
                };
                self.say(&FromTasker::Restored {
                    migration,
                    result: Ok(pid),
                });
            }
            Ok(_) => {
                let off = Err(Failure::CalledOff("the move was discarded".into()));
                let last = FromTasker::Restored {
                    migration,
                    result: off,
                };
                self.clear_target(migration, vec![last, FromTasker::Discarded { migration }]);
            }
            Err(why) => {
                let mut last = vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }];
                last.extend(discard.then_some(FromTasker::Discarded { migration }));
                self.clear_target(migration, last);
            }
        }
    }

    /// Somebody has killed a held copy.
    pub(crate) fn held_lost(&mut self, migration: MigrationId) {
        let is_held = |target: &Target| matches!(target.stage, Stage::Held { .. });
        if self.moves.targets.get(&migration).is_some_and(is_held) {
            let why = Failure::Engine("the restored task was killed before it could go on".into());
            let word = self.moves.targets[&migration]
                .stage
                .lost_word(migration, why);
            self.clear_target(migration, vec![word]);
        }
    }

    pub(crate) fn brought_in(&mut self, migration: MigrationId, done: bool) {
        let Some(target) = self.moves.targets.get_mut(&migration) else {
            return;
        };
        let Stage::Held { enters, run, .. } = &mut target.stage else {
            return;
        };
        *enters = false;
        if let Some(namespace) = target.namespace.as_ref().filter(|_| done) {
            namespace.joined();
        }
        if let Some((used, held)) = run.take() {
            self.run_held(migration, used, held);
        }
    }

    pub(crate) fn run_held(&mut self, migration: MigrationId, used: Usage, held: bool) {
        if let Some(Target {
            stage: Stage::Held {
                enters: true, run, ..
            },
            ..
        }) = self.moves.targets.get_mut(&migration)
        {
            // While it stands still nobody can be missed.
            *run = Some((used, held));
            return;
        }
        let (tid, namespace, process, stopped_before, output) =
            match self.moves.targets.remove(&migration) {
                Some(Target {
                    tid,
                    namespace,
                    stage:
                        Stage::Held {
                            process,
                            stopped_before,
                            output,
                            ..
                        },
                    made,
                    ..
                }) => {
                    made.keep();
                    (tid, namespace, process, stopped_before, output)
                }
                other => {
                    self.moves
                        .targets
                        .extend(other.map(|target| (migration, target)));
                    let not_held = Failure::Engine(format!("nothing is held here for {migration}"));
                    return self.say(&FromTasker::Ran {
                        migration,
                        result: Err(not_held),
                    });
                }
            };
        let mut task = Task {
            tid,
            process,
            namespace,
            output,
            used_before: used,
            phase: Phase::Running,
            hold: if held { Hold::Still } else { Hold::Free },
            stopped_before,
            ending: None,
            redirection: None,
            held_signals: Vec::new(),
        };
        if !held {
            task.go_on();
        }
        self.tasks.insert(tid, task);
        self.say(&FromTasker::Ran {
            migration,
            result: Ok(()),
        });
        self.memory_follows_to(migration, tid);
    }

    pub(crate) fn discard(&mut self, migration: MigrationId) {
        let Some(target) = self.moves.targets.get_mut(&migration) else {
            return self.say(&FromTasker::Discarded { migration });
        };
        match &mut target.stage {
            Stage::Restoring {
                worker, discard, ..
            } => {
                *discard = true;
                let worker = *worker;
                self.moves.workers.cancel(worker);
            }
            // It is told when they are there, and go again.
            Stage::Placing { discard, .. } => *discard = true,
            Stage::Prepared | Stage::Held { .. } => {
                self.clear_target(migration, vec![FromTasker::Discarded { migration }]);
            }
        }
    }

    /// Kills whatever there is of a copy and says this when it is gone.
    pub(crate) fn clear_target(&mut self, migration: MigrationId, then: Vec<FromTasker>) {
        self.fetch_no_more(migration);
        if let Some(target) = self.moves.targets.remove(&migration) {
            match (target.namespace, target.stage) {
                (Some(namespace), _) => self.when_ended(namespace, then),
                (None, stage) => {
                    if let Stage::Held { process, .. } = stage {
                        // It has never run, so it is alone.
                        sys::kill_by(process.pidfd.as_fd());
                    }
                    then.iter().for_each(|word| self.say(word));
                }
            }
            // A copy that had ended while it was held was left for us; its namespace does not end before it is reaped.
            self.reap_strangers();
        }
    }
}

/// Has the processes of a restored task brought into its control group, if it has one: in the background, because that takes
/// longer than anything else before they go on. True if it has begun.
fn begin_to_bring_in(migration: MigrationId, namespace: &Namespace, workers: &mut Workers) -> bool {
    let Some(entrance) = namespace.entrance() else {
        return false;
    };
    let Ok(cancel) = Cancel::new() else {
        return false;
    };
    let pids = namespace.pids();
    let work = move || Outcome::BroughtIn {
        migration,
        done: freezer::bring_in(&entrance, &pids).is_ok(),
    };
    // Without a thread it is stopped by signal, as where there is no freezer.
    workers.start(&cancel, None, work).is_ok()
}
