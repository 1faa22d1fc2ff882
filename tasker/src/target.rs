//! The target's part of a migration: prepare, restore or restart, run or discard.

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
use checkpoint::engine::{Cancel, ExternalResources, RestoreJob};
use sempa_proto::migration::{Failure, Usage};
use sempa_proto::tasker::{FromTasker, Redirection, StartTask};
use sempa_proto::{MigrationId, Tid};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Most migrations to this host that are prepared or further advanced; more are refused.
const TARGETS_MAX: usize = 64;

/// A migration to this host.
pub(crate) struct Target {
    pub(crate) tid: Tid,
    /// `None` if the tasker may not create namespaces: then only a program that is restarted can be
    /// hosted.
    namespace: Option<Namespace>,
    pub(crate) stage: Stage,
    /// Files that were transferred with the task.
    pub(crate) made: Made,
    /// Most of the task's memory is post-copied.
    memory_follows: bool,
}

pub(crate) enum Stage {
    /// A place is reserved for the task.
    Prepared,
    /// Files transferred with the task are being placed.
    Placing {
        dir: PathBuf,
        again: Option<Redirection>,
        discard: bool,
    },
    /// The engine builds the task.
    Restoring {
        worker: u64,
        carry: Carry,
        output: Output,
        again: Option<Redirection>,
        discard: bool,
        /// Why the post-copied memory will not arrive.
        lost: Option<Failure>,
    },
    /// The task is built and stopped. The engine has ended, so its death cannot kill the task once
    /// this copy is the only one.
    Held {
        process: Child,
        /// Processes that were stopped before the migration stopped the others.
        stopped_before: Vec<i32>,
        output: Output,
        /// The processes are joining the control group.
        enters: bool,
        /// Set if the task must run once that is done: its usage on other hosts, and whether it
        /// stays paused.
        run: Option<(Usage, bool)>,
    },
}

impl Stage {
    /// Returns the reply for a lost copy: if it was ordered to run, that it does not run;
    /// otherwise, that it was not restored.
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
            // A defect of the manifest is reported when the build reads it.
            _ => self.build(migration, dir, again),
        }
    }

    /// Makes the engine build a task for which everything else is in place.
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

    /// Starts a program from its beginning, up to the point before its exec.
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
        // The images determine the rights of the restored processes, so they must belong to this
        // user.
        checkpoint::criu::check_owner(dir, nix::unistd::geteuid().as_raw())?;
        if again.is_some() {
            written::cut_back(&carry.written)?;
        }
        let io = |e: io::Error| Failure::Io(format!("cannot restore: {e}"));
        let (output, theirs) = Output::new().map_err(io)?;
        let limits = limits_for(carry.image_bytes())?;
        let job = RestoreJob {
            dir: dir.into(),
            external: ExternalResources {
                output_pipe: carry.output_pipe,
            },
            pid_namespace: namespace.open().map_err(io)?,
            output: theirs,
            post_copy: memory_follows,
        };
        let restoring = engine.start_restore(job)?;
        let (cancel, pid) = (limits.cancel.clone(), restoring.engine_pid());
        // The images contain a stopped task, so it stays stopped when the engine releases it.
        let build = move || {
            let built = restoring.wait_until_restored(&limits).and_then(|held| {
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

    /// Handles the death of a held copy, which another process has killed.
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
            // A stopped copy cannot fork, so no process is missed; it runs after all have joined
            // the group.
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
            // The reply is sent when the files have been placed and removed again.
            Stage::Placing { discard, .. } => *discard = true,
            Stage::Prepared | Stage::Held { .. } => {
                self.clear_target(migration, vec![FromTasker::Discarded { migration }]);
            }
        }
    }

    /// Kills what exists of a copy; sends the messages when it is gone.
    pub(crate) fn clear_target(&mut self, migration: MigrationId, then: Vec<FromTasker>) {
        self.fetch_no_more(migration);
        if let Some(target) = self.moves.targets.remove(&migration) {
            match (target.namespace, target.stage) {
                (Some(namespace), _) => self.when_ended(namespace, then),
                (None, stage) => {
                    if let Stage::Held { process, .. } = stage {
                        // The copy has never run, so it is a single process.
                        sys::kill_by(process.pidfd.as_fd());
                    }
                    then.iter().for_each(|word| self.say(word));
                }
            }
            // A held copy that died is still unreaped, and its namespace cannot end before it is
            // reaped.
            self.reap_strangers();
        }
    }
}

/// Starts to add the processes of a restored task to its control group, if it has one. Returns true
/// if that has begun.
///
/// A worker does that, because it takes longer than everything else before the task runs.
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
    // Without a worker, the task is paused by signals, as without a freezer.
    workers.start(&cancel, None, work).is_ok()
}
