//! The taskers of the simulation: they start, pause, signal, dump and restore processes.

use super::{Channel, Proc, Sim, SimEvent};
use crate::Event;
use sempa_proto::frame::from_bytes;
use sempa_proto::migration::{Failure, Refusal, TaskFacts, Usage, Verdict};
use sempa_proto::task::{Redirect, RedirectAddress};
use sempa_proto::tasker::{DumpReport, FromTasker, MemoryWrite, TaskerCapabilities, ToTasker};
use sempa_proto::{HostId, Micros, MigrationId, Tid};

/// Returns where the library of a process looks for a redirect.
pub(super) fn redirect_address(proc: usize) -> RedirectAddress {
    RedirectAddress {
        pid: 7,
        address: 0x7700 + proc as u64,
    }
}

impl Sim {
    /// Kills the tasker of a host with all its processes. A new tasker starts at once.
    pub(in crate::tests) fn kill_tasker(&mut self, on: HostId) {
        let dead: Vec<usize> = (0..self.procs.len())
            .filter(|p| self.procs[*p].host == on && self.procs[*p].spawned_tid.is_some())
            .collect();
        for proc in dead {
            self.close(proc);
        }
        self.end_procs(on, |p| p.spawned_tid.is_some());
        self.injection.memory_lost.insert(on);
        self.pre_copy_targets.retain(|_, at| *at != on);
        // Messages that the tasker had sent arrive before the report of its end.
        self.nodes.get_mut(&on).expect("it is there").tasker_dead = true;
        self.send_in_order(
            Channel::Tasker(on),
            SimEvent::Machine(
                on,
                Event::TaskerGone {
                    why: "signal 9".into(),
                },
            ),
        );
        let ready = FromTasker::Ready(TaskerCapabilities {
            pid_namespaces: true,
            engine: Ok("fake".into()),
            freezer: Ok(()),
        });
        self.send_from_tasker(on, ready);
    }

    /// Ends the process of a task.
    pub(in crate::tests) fn exit(&mut self, proc: usize, status: i32) {
        if std::mem::replace(&mut self.procs[proc].exited, true) {
            return;
        }
        self.close(proc);
        self.report_exit(proc, status);
    }

    /// Ends the process of a task whose socket another process holds open.
    pub(in crate::tests) fn exit_with_socket_held(&mut self, proc: usize, status: i32) {
        self.procs[proc].exited = true;
        self.report_exit(proc, status);
    }

    fn report_exit(&mut self, proc: usize, status: i32) {
        let on = self.procs[proc].host;
        if let Some(tid) = self.procs[proc].spawned_tid {
            let used = Usage {
                user: Micros(self.procs[proc].cpu_micros),
                ..Usage::default()
            };
            self.send_from_tasker(on, FromTasker::Exited { tid, status, used });
        }
    }

    fn verdict_of(&self, on: HostId) -> Verdict {
        self.verdicts.get(&on).cloned().unwrap_or_default()
    }

    pub(super) fn find_spawned(&self, on: HostId, tid: Tid) -> Option<usize> {
        self.procs
            .iter()
            .position(|p| p.spawned_tid == Some(tid) && p.host == on && !p.exited)
    }

    pub(in crate::tests) fn proc_of(&self, tid: Tid) -> usize {
        let is_task = |p: &Proc| {
            p.spawned_tid == Some(tid) || p.welcome.as_ref().is_some_and(|w| w.tid == tid)
        };
        self.procs
            .iter()
            .rposition(is_task)
            .expect("there is such a task")
    }

    pub(super) fn step_result<T>(&mut self, good: T) -> Result<T, Failure> {
        if self.rng.below(100) < self.random_faults.failed_steps_percent {
            Err(Failure::Engine("thrown".into()))
        } else {
            Ok(good)
        }
    }

    pub(super) fn handle_tasker_order(&mut self, on: HostId, message: ToTasker) {
        match message {
            ToTasker::Start(start) => {
                let tid = start.tid;
                if start.path.to_string_lossy().contains("broken") {
                    return self.send_from_tasker(
                        on,
                        FromTasker::StartFailed {
                            tid,
                            why: "thrown".into(),
                        },
                    );
                }
                let twice = self
                    .procs
                    .iter()
                    .any(|p| p.spawned_tid == Some(tid) && !p.exited);
                assert!(!twice, "two live copies of {tid} (seed {})", self.seed);
                let proc = self.create_process(on, &start);
                self.send_from_tasker(
                    on,
                    FromTasker::Started {
                        tid,
                        pid: 1000 + proc as i32,
                    },
                );
                self.connect_if_runnable(proc);
            }
            ToTasker::RequestExit { tid, engine } => self.request_exit(on, tid, engine),
            // Processes of the task that survive it are not simulated.
            ToTasker::WithdrawExitRequest { .. } => {}
            ToTasker::Signal { tid, .. } => {
                if let Some(proc) = self.find_spawned(on, tid)
                    && !self.procs[proc].program.contains("stubborn")
                {
                    self.exit(proc, 15);
                }
            }
            ToTasker::Kill { tid } => {
                if let Some(proc) = self.find_spawned(on, tid) {
                    self.exit(proc, 9);
                }
            }
            ToTasker::Pause {
                tid,
                run_for: after,
            }
            | ToTasker::ResumeToQuiesce {
                tid,
                run_for: after,
                ..
            } => {
                if let Some(proc) = self.find_spawned(on, tid) {
                    self.pause_after(on, proc, after);
                }
            }
            ToTasker::Resume { tid } => {
                if let Some(proc) = self.find_spawned(on, tid) {
                    self.procs[proc].pause_serial += 1;
                    self.procs[proc].paused = false;
                    self.resume_proc(proc);
                }
            }
            message => self.handle_source_order(on, message),
        }
    }

    pub(super) fn pause_after(&mut self, on: HostId, proc: usize, after: Micros) {
        let p = &mut self.procs[proc];
        p.pause_serial += 1;
        let number = p.pause_serial;
        if after == Micros(0) || p.stopped_for_migration {
            return self.pause_now(on, proc, number);
        }
        p.quiesce_runs += u64::from(std::mem::take(&mut p.paused));
        self.schedule(self.now + after, SimEvent::PauseNow(on, proc, number));
        self.resume_proc(proc);
    }

    /// Pauses a process at the end of its time to run, unless a later order has replaced this one.
    pub(super) fn pause_now(&mut self, on: HostId, proc: usize, serial: u64) {
        let p = &mut self.procs[proc];
        if p.pause_serial != serial || p.exited || p.host != on {
            return;
        }
        p.paused = true;
        if let Some(tid) = p.spawned_tid {
            self.send_from_tasker(on, FromTasker::Paused { tid });
        }
    }

    /// Lets a process that was paused handle the deferred events, if it may run.
    pub(super) fn resume_proc(&mut self, proc: usize) {
        while !self.procs[proc].is_frozen() && !self.procs[proc].deferred_events.is_empty() {
            let first = self.procs[proc].deferred_events.remove(0);
            self.dispatch(Some(first));
        }
        self.connect_if_runnable(proc);
        self.run_links(proc);
    }

    /// Writes a redirect into the memory of a stopped process.
    fn write_redirect(&mut self, proc: usize, redirection: &MemoryWrite) {
        assert_eq!(redirection.address, redirect_address(proc));
        let redirect: Redirect = from_bytes(&redirection.bytes[8..]).expect("it can be read");
        let p = &mut self.procs[proc];
        assert!(
            p.quiesced.is_some() && p.is_frozen(),
            "only a quiesced process reads its redirect"
        );
        p.quiesced = Some((redirect.migration, redirect.tokens));
    }

    fn handle_source_order(&mut self, on: HostId, message: ToTasker) {
        let answer = match message {
            ToTasker::Inspect { migration, .. } => {
                let [memory_can_follow, can_pre_copy] =
                    [(); 2].map(|()| self.rng.below(2) == 0 || self.injection.always_live_copies);
                FromTasker::Inspected {
                    migration,
                    result: Ok(TaskFacts::default()),
                    supports_post_copy: memory_can_follow,
                    supports_pre_copy: can_pre_copy,
                }
            }
            ToTasker::PreCopy { migration, tid, .. } => {
                // If the target's tasker has died, the transfer never ends; other parts of the
                // daemon must notice that.
                if self.pre_copy_targets.remove(&migration).is_none() {
                    return;
                }
                let result = self.step_result_of(on, 100);
                let is_there = self.find_spawned(on, tid).is_some();
                FromTasker::PreCopied {
                    migration,
                    result: result
                        .and_then(|bytes| is_there.then_some(bytes).ok_or(Failure::TaskEnded)),
                }
            }
            ToTasker::StopPreCopy { .. } => return,
            ToTasker::Stop {
                migration,
                tid,
                memory_write: redirection,
            } => {
                let Some(proc) = self.find_spawned(on, tid) else {
                    return;
                };
                let result = self.step_result_of(on, ());
                self.procs[proc].stopped_for_migration = result.is_ok();
                // The redirect may have been written even though a later part of the step failed.
                if let Some(redirection) =
                    redirection.filter(|_| result.is_ok() || self.rng.below(2) == 0)
                {
                    let stopped =
                        std::mem::replace(&mut self.procs[proc].stopped_for_migration, true);
                    self.write_redirect(proc, &redirection);
                    self.procs[proc].stopped_for_migration = stopped;
                }
                FromTasker::Stopped { migration, result }
            }
            ToTasker::Dump { migration, tid, .. } => {
                self.dump_image(on, migration, tid);
                let result = self.step_result_of(
                    on,
                    DumpReport {
                        bytes: 100,
                        files: 1,
                    },
                );
                FromTasker::Dumped { migration, result }
            }
            ToTasker::AbortMigration { migration, tid } => {
                assert!(
                    !self.injection.released_targets.contains(&migration),
                    "two live copies of {tid} (seed {})",
                    self.seed
                );
                if let Some(proc) = self.find_spawned(on, tid) {
                    self.procs[proc].stopped_for_migration = false;
                    self.resume_proc(proc);
                }
                FromTasker::MigrationAborted { migration }
            }
            ToTasker::KillSource { migration, .. } => {
                self.injection.killed_sources.insert(migration);
                FromTasker::SourceGone {
                    migration,
                    used: Usage::default(),
                }
            }
            message => return self.handle_question(on, message),
        };
        self.send_from_tasker(on, answer);
    }

    /// Answers questions that change nothing on the host.
    fn handle_question(&mut self, on: HostId, message: ToTasker) {
        let answer = match message {
            ToTasker::Prepare { migration, .. } => FromTasker::Prepared {
                migration,
                verdict: self.verdict_of(on),
                supports_post_copy: true,
            },
            ToTasker::CheckSignal { migration, tid, .. } => {
                let minds = self
                    .find_spawned(on, tid)
                    .is_none_or(|proc| !self.procs[proc].program.contains("heedless"));
                FromTasker::SignalChecked {
                    migration,
                    handles_signal: minds,
                }
            }
            ToTasker::QueryInspect {
                query: question,
                tid,
            } => {
                let facts = TaskFacts {
                    resident_bytes: 4096,
                    ..TaskFacts::default()
                };
                let result = self
                    .find_spawned(on, tid)
                    .map(|_| facts)
                    .ok_or(Refusal::NoSuchTask);
                FromTasker::QueryInspected {
                    query: question,
                    result,
                }
            }
            ToTasker::QueryVerdict {
                query: question,
                facts,
            } => {
                assert_eq!(facts.resident_bytes, 4096);
                FromTasker::QueryVerdict {
                    query: question,
                    verdict: self.verdict_of(on),
                }
            }
            message => return self.handle_target_order(on, message),
        };
        self.send_from_tasker(on, answer);
    }

    fn handle_target_order(&mut self, on: HostId, message: ToTasker) {
        let answer = match message {
            ToTasker::ReceivePreCopy { migration, .. } => {
                let Err(why) = self.step_result_of(on, ()) else {
                    self.pre_copy_targets.insert(migration, on);
                    return;
                };
                FromTasker::PreCopyLost { migration, why }
            }
            ToTasker::Restore {
                migration,
                memory_write: again,
                memory_socket: memory_way,
                ..
            } => {
                self.post_copy_migrations
                    .extend(memory_way.map(|_| migration));
                let result = self.step_result_of(on, 4242);
                if let (Some(redirection), true) = (again, result.is_ok()) {
                    self.build_from_images(on, migration, &redirection);
                }
                FromTasker::Restored { migration, result }
            }
            ToTasker::Run {
                migration,
                paused: held,
                ..
            } if self.run_built(on, migration, held) => FromTasker::Running {
                migration,
                result: Ok(()),
            },
            ToTasker::PrepareRestart { migration, start } => {
                self.prepare_respawn(on, migration, &start)
            }
            ToTasker::Run {
                migration,
                paused: held,
                ..
            } if self.respawned.contains_key(&(on, migration)) => {
                let Some(answer) = self.run_respawned(on, migration, held) else {
                    return;
                };
                answer
            }
            ToTasker::Run {
                migration,
                paused: held,
                ..
            } => return self.run_restored(on, migration, held),
            ToTasker::Discard { migration } => {
                self.pre_copy_targets.remove(&migration);
                self.post_copy_migrations.remove(&migration);
                self.image_store.built.remove(&(on, migration));
                self.discard_respawned(on, migration);
                FromTasker::Discarded { migration }
            }
            other => panic!("{other:?}"),
        };
        self.send_from_tasker(on, answer);
    }

    /// Runs a restored process. Source and target share one [`Proc`], which from here on is the
    /// target's.
    fn run_restored(&mut self, on: HostId, migration: MigrationId, held: bool) {
        let (_, tid, _) = *self
            .recorded_migrations
            .iter()
            .rev()
            .find(|r| r.0 == migration)
            .expect("recorded first");
        let proc = self.proc_of(tid);
        assert!(
            self.procs[proc].stopped_for_migration,
            "only a stopped task can be restored (seed {})",
            self.seed
        );
        let from = self.procs[proc].host;
        let source_is_dead = self.injection.killed_sources.contains(&migration)
            || self.procs[proc].exited
            || self.is_removed(from);
        assert!(
            source_is_dead,
            "two live copies of {tid} (seed {})",
            self.seed
        );
        self.injection.released_targets.insert(migration);
        let p = &mut self.procs[proc];
        if p.exited && !p.images_remain {
            let result = Err(Failure::Engine("there is nothing to run".into()));
            return self.send_from_tasker(on, FromTasker::Running { migration, result });
        }
        (p.exited, p.images_remain) = (false, false);
        (p.host, p.stopped_for_migration, p.paused, p.pause_serial) =
            (on, false, held, p.pause_serial + 1);
        assert!(p.conn.is_none(), "only a quiesced task can migrate");
        // Drops late messages of a connection that the process had closed.
        p.deferred_events.clear();
        self.send_from_tasker(
            on,
            FromTasker::Running {
                migration,
                result: Ok(()),
            },
        );
        if self.post_copy_migrations.remove(&migration) {
            let late = if self.injection.is_active() {
                self.rng.below(20_000)
            } else {
                0
            };
            if late > 0 {
                return self.schedule(
                    self.now + Micros(late),
                    SimEvent::MemoryTransferEnded(on, migration, from, tid),
                );
            }
            self.send_from_tasker(
                on,
                FromTasker::MemoryArrived {
                    migration,
                    result: Ok(()),
                },
            );
        }
    }
}
