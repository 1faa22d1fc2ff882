//! The taskers of the simulation: they start, pause, signal, dump and restore processes.

use super::{Channel, Proc, Sim, SimEvent};
use crate::Event;
use sempa_proto::frame::from_bytes;
use sempa_proto::migration::{Failure, Refusal, TaskFacts, Usage, Verdict};
use sempa_proto::task::{Redirect, RedirectAddress};
use sempa_proto::tasker::{DumpReport, FromTasker, MemoryWrite, TaskerCapabilities, ToTasker};
use sempa_proto::{HostId, Micros, MigrationId, Tid};

/// Process id, in its own PID namespace, of each process that a tasker starts. The process that
/// connects is a child of that process and has another one.
pub(in crate::tests) const STARTED_NAMESPACE_PID: i32 = 40_000;

/// Returns the address that the library of a process reports for its redirect.
pub(super) fn redirect_address(proc: usize) -> RedirectAddress {
    RedirectAddress {
        pid: 7,
        address: 0x7700 + proc as u64,
    }
}

impl Sim {
    /// Kills the tasker of a host with all its processes. A new tasker starts at once.
    pub(in crate::tests) fn kill_tasker(&mut self, host_id: HostId) {
        // A stopped tasker is dead, too.
        self.nodes
            .get_mut(&host_id)
            .expect("it is there")
            .deferred_orders = None;
        let dead_procs: Vec<usize> = (0..self.procs.len())
            .filter(|p| self.procs[*p].host == host_id && self.procs[*p].spawned_tid.is_some())
            .collect();
        for proc in dead_procs {
            self.close_connection(proc);
        }
        self.end_procs(host_id, |p| p.spawned_tid.is_some());
        self.injection.memory_lost_hosts.insert(host_id);
        self.pre_copy_targets
            .retain(|_, target_host| *target_host != host_id);
        self.leftovers.retain(|(host, _), _| *host != host_id);
        // Messages that the dead tasker had sent arrive before the report of its death.
        self.nodes
            .get_mut(&host_id)
            .expect("it is there")
            .is_tasker_dead = true;
        self.send_in_order(
            Channel::Tasker(host_id),
            SimEvent::Machine(
                host_id,
                Event::TaskerEnded {
                    why: "signal 9".into(),
                },
            ),
        );
        let ready_message = FromTasker::Ready(TaskerCapabilities {
            pid_namespaces: true,
            engine_version: Ok("fake".into()),
            freezer: Ok(()),
            missing_capabilities: Vec::new(),
        });
        self.send_from_tasker(host_id, ready_message);
    }

    /// Ends the process of a task and reports its exit. Has no effect if the process has already
    /// ended.
    pub(in crate::tests) fn exit_proc(&mut self, proc: usize, status: i32) {
        if std::mem::replace(&mut self.procs[proc].exited, true) {
            return;
        }
        self.close_connection(proc);
        self.report_exit(proc, status);
    }

    /// Ends the process of a task, which leaves processes behind. They are stopped if the task was.
    pub(in crate::tests) fn exit_and_leave_processes(&mut self, proc: usize, process_count: u32) {
        let host_id = self.procs[proc].host;
        let tid = self.procs[proc].tid();
        let p = &mut self.procs[proc];
        p.images_remain |= p.stopped_for_migration && !p.exited;
        let are_stopped = p.paused || p.stopped_for_migration;
        self.leftovers.insert((host_id, tid), are_stopped);
        let pids = (0..process_count as i32).map(|n| 7000 + n).collect();
        self.send_from_tasker(
            host_id,
            FromTasker::LeftBehind {
                tid,
                process_count,
                pids,
            },
        );
        self.exit_proc(proc, 0);
    }

    fn handle_leftover_order(&mut self, host_id: HostId, message: &ToTasker) {
        let (tid, must_run) = match message {
            ToTasker::StopLeftovers { tid } => (*tid, false),
            ToTasker::ResumeLeftovers { tid } => (*tid, true),
            ToTasker::KillLeftovers { tid } => {
                if self.leftovers.remove(&(host_id, *tid)).is_some() {
                    self.send_from_tasker(
                        host_id,
                        FromTasker::LeftBehind {
                            tid: *tid,
                            process_count: 0,
                            pids: Vec::new(),
                        },
                    );
                }
                return;
            }
            _ => return,
        };
        if let Some(is_stopped) = self.leftovers.get_mut(&(host_id, tid)) {
            *is_stopped = !must_run && !self.leftovers_never_stop;
            if *is_stopped {
                self.send_from_tasker(host_id, FromTasker::LeftoversStopped { tid });
            }
        }
    }

    /// Ends the process of a task while a child process holds the socket open: the connection is
    /// not closed.
    pub(in crate::tests) fn exit_with_open_socket(&mut self, proc: usize, status: i32) {
        self.procs[proc].exited = true;
        self.report_exit(proc, status);
    }

    fn report_exit(&mut self, proc: usize, status: i32) {
        let host_id = self.procs[proc].host;
        if let Some(tid) = self.procs[proc].spawned_tid {
            let usage = Usage {
                user: Micros(self.procs[proc].cpu_micros),
                ..Usage::default()
            };
            self.send_from_tasker(host_id, FromTasker::Exited { tid, status, usage });
        }
    }

    fn host_verdict(&self, host_id: HostId) -> Verdict {
        self.verdicts.get(&host_id).cloned().unwrap_or_default()
    }

    pub(super) fn find_spawned_proc(&self, host_id: HostId, tid: Tid) -> Option<usize> {
        self.procs
            .iter()
            .position(|p| p.spawned_tid == Some(tid) && p.host == host_id && !p.exited)
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

    pub(super) fn random_step_result<T>(&mut self, success_value: T) -> Result<T, Failure> {
        if self.rng.below(100) < self.random_faults.failed_steps_percent {
            Err(Failure::Engine("thrown".into()))
        } else {
            Ok(success_value)
        }
    }

    pub(super) fn handle_tasker_order(&mut self, host_id: HostId, message: ToTasker) {
        match message {
            ToTasker::Ping => self.send_from_tasker(host_id, FromTasker::Pong),
            ToTasker::RenewLease { freeze_at, kill_at } => {
                self.renew_tasker_lease(host_id, freeze_at, kill_at)
            }
            ToTasker::Start(start) => {
                let tid = start.tid;
                if self.is_lease_frozen(host_id) {
                    let reason = "the lease has run out".into();
                    return self.send_from_tasker(host_id, FromTasker::StartFailed { tid, reason });
                }
                if start.path.to_string_lossy().contains("broken") {
                    return self.send_from_tasker(
                        host_id,
                        FromTasker::StartFailed {
                            tid,
                            reason: "thrown".into(),
                        },
                    );
                }
                let is_duplicate = self
                    .procs
                    .iter()
                    .any(|p| p.spawned_tid == Some(tid) && !p.exited);
                assert!(
                    !is_duplicate,
                    "two live copies of {tid} (seed {})",
                    self.seed
                );
                let proc = self.create_process(host_id, &start);
                self.send_from_tasker(
                    host_id,
                    FromTasker::Started {
                        tid,
                        pid: 1000 + proc as i32,
                        namespace_pid: STARTED_NAMESPACE_PID,
                    },
                );
                self.connect_if_runnable(proc);
            }
            ToTasker::RequestExit { tid, engine } => {
                self.request_exit_and_wait(host_id, tid, engine)
            }
            // Only one process per task is simulated, so no process of a task survives its exit.
            ToTasker::WithdrawExitRequest { .. } => {}
            ToTasker::Signal { tid, .. } => {
                if let Some(proc) = self.find_spawned_proc(host_id, tid)
                    && !self.procs[proc].program.contains("stubborn")
                {
                    self.exit_proc(proc, 15);
                }
            }
            ToTasker::Kill { tid } => {
                if let Some(proc) = self.find_spawned_proc(host_id, tid) {
                    self.exit_proc(proc, 9);
                }
            }
            ToTasker::Pause { tid, run_time } | ToTasker::ResumeToQuiesce { tid, run_time, .. } => {
                if let Some(proc) = self.find_spawned_proc(host_id, tid) {
                    self.pause_after(host_id, proc, run_time);
                }
            }
            ToTasker::Resume { tid } => {
                if let Some(proc) = self.find_spawned_proc(host_id, tid) {
                    self.procs[proc].pause_serial += 1;
                    self.procs[proc].paused = false;
                    self.resume_proc(proc);
                }
            }
            ToTasker::StopLeftovers { .. }
            | ToTasker::ResumeLeftovers { .. }
            | ToTasker::KillLeftovers { .. } => self.handle_leftover_order(host_id, &message),
            message => self.handle_source_order(host_id, message),
        }
    }

    pub(super) fn pause_after(&mut self, host_id: HostId, proc: usize, run_time: Micros) {
        let p = &mut self.procs[proc];
        p.pause_serial += 1;
        let pause_serial = p.pause_serial;
        if run_time == Micros(0) || p.stopped_for_migration {
            return self.pause_now(host_id, proc, pause_serial);
        }
        p.quiesce_runs += u64::from(std::mem::take(&mut p.paused));
        self.schedule(
            self.now + run_time,
            SimEvent::PauseDue(host_id, proc, pause_serial),
        );
        self.resume_proc(proc);
    }

    /// Pauses a process when its time to run has passed. Has no effect if a later order has
    /// replaced the order with this number, or if the process has ended or migrated.
    pub(super) fn pause_now(&mut self, host_id: HostId, proc: usize, pause_serial: u64) {
        let p = &mut self.procs[proc];
        if p.pause_serial != pause_serial || p.exited || p.host != host_id {
            return;
        }
        p.paused = true;
        if let Some(tid) = p.spawned_tid {
            self.send_from_tasker(host_id, FromTasker::Paused { tid });
        }
    }

    /// Connects a process and handles its deferred events, as far as the process may run.
    pub(super) fn resume_proc(&mut self, proc: usize) {
        while !self.procs[proc].is_frozen() && !self.procs[proc].deferred_events.is_empty() {
            let first_event = self.procs[proc].deferred_events.remove(0);
            self.dispatch(Some(first_event));
        }
        self.connect_if_runnable(proc);
        self.carry_out_link_outputs(proc);
    }

    /// Writes a redirect into the memory of a stopped process.
    fn write_redirect(&mut self, proc: usize, memory_write: &MemoryWrite) {
        assert_eq!(memory_write.address, redirect_address(proc));
        let redirect: Redirect = from_bytes(&memory_write.bytes[8..]).expect("it can be read");
        let p = &mut self.procs[proc];
        assert!(
            p.quiesce_request.is_some() && p.is_frozen(),
            "only a quiesced process reads its redirect"
        );
        p.quiesce_request = Some((redirect.migration, redirect.token_paths));
    }

    fn handle_source_order(&mut self, host_id: HostId, message: ToTasker) {
        let answer = match message {
            ToTasker::Inspect { migration, .. } => {
                let [supports_post_copy, supports_pre_copy] =
                    [(); 2].map(|()| self.rng.below(2) == 0 || self.injection.always_live_copies);
                FromTasker::Inspected {
                    migration,
                    result: Ok(TaskFacts::default()),
                    supports_post_copy,
                    supports_pre_copy,
                }
            }
            ToTasker::PreCopy { migration, tid, .. } => {
                // If the target's tasker has died, no report follows. The daemon must detect the
                // death in another way.
                if self.pre_copy_targets.remove(&migration).is_none() {
                    return;
                }
                let result = self.engine_step_result(host_id, 100);
                let is_found = self.find_spawned_proc(host_id, tid).is_some();
                FromTasker::PreCopied {
                    migration,
                    result: result
                        .and_then(|bytes| is_found.then_some(bytes).ok_or(Failure::TaskEnded)),
                }
            }
            ToTasker::StopPreCopy { .. } => return,
            ToTasker::Stop {
                migration,
                tid,
                memory_write,
            } => {
                let Some(proc) = self.find_spawned_proc(host_id, tid) else {
                    return;
                };
                let result = self.engine_step_result(host_id, ());
                self.procs[proc].stopped_for_migration = result.is_ok();
                // If the step has failed after the redirect was written, the redirect is still in
                // memory. The case is random.
                if let Some(memory_write) =
                    memory_write.filter(|_| result.is_ok() || self.rng.below(2) == 0)
                {
                    let was_stopped =
                        std::mem::replace(&mut self.procs[proc].stopped_for_migration, true);
                    self.write_redirect(proc, &memory_write);
                    self.procs[proc].stopped_for_migration = was_stopped;
                }
                FromTasker::Stopped { migration, result }
            }
            ToTasker::Dump { migration, tid, .. } => {
                self.dump_image(host_id, migration, tid);
                let result = self.engine_step_result(
                    host_id,
                    DumpReport {
                        image_bytes: 100,
                        image_files: 1,
                    },
                );
                FromTasker::Dumped { migration, result }
            }
            ToTasker::AbortMigration { migration, tid } => {
                assert!(
                    !self.injection.running_targets.contains(&migration),
                    "two live copies of {tid} (seed {})",
                    self.seed
                );
                if let Some(proc) = self.find_spawned_proc(host_id, tid) {
                    self.procs[proc].stopped_for_migration = false;
                    self.resume_proc(proc);
                }
                FromTasker::MigrationAborted { migration }
            }
            ToTasker::KillSource { migration, tid } => {
                self.injection.killed_sources.insert(migration);
                self.handle_leftover_order(host_id, &ToTasker::KillLeftovers { tid });
                FromTasker::SourceKilled {
                    migration,
                    usage: Usage::default(),
                }
            }
            message => return self.handle_question(host_id, message),
        };
        self.send_from_tasker(host_id, answer);
    }

    /// Answers the messages to a tasker that change nothing on the host.
    fn handle_question(&mut self, host_id: HostId, message: ToTasker) {
        let answer = match message {
            ToTasker::Prepare { migration, .. } => FromTasker::Prepared {
                migration,
                verdict: self.host_verdict(host_id),
                supports_post_copy: true,
            },
            ToTasker::CheckSignal { migration, tid, .. } => {
                let handles_signal = self
                    .find_spawned_proc(host_id, tid)
                    .is_none_or(|proc| !self.procs[proc].program.contains("heedless"));
                FromTasker::SignalChecked {
                    migration,
                    handles_signal,
                }
            }
            ToTasker::QueryInspect { query, tid } => {
                let facts = TaskFacts {
                    memory_bytes: 4096,
                    ..TaskFacts::default()
                };
                let result = self
                    .find_spawned_proc(host_id, tid)
                    .map(|_| facts)
                    .ok_or(Refusal::NoSuchTask);
                FromTasker::QueryInspected { query, result }
            }
            ToTasker::QueryVerdict { query, facts } => {
                assert_eq!(facts.memory_bytes, 4096);
                FromTasker::QueryVerdict {
                    query,
                    verdict: self.host_verdict(host_id),
                }
            }
            message => return self.handle_target_order(host_id, message),
        };
        self.send_from_tasker(host_id, answer);
    }

    fn handle_target_order(&mut self, host_id: HostId, message: ToTasker) {
        let answer = match message {
            ToTasker::ReceivePreCopy { migration, .. } => {
                let Err(why) = self.engine_step_result(host_id, ()) else {
                    self.pre_copy_targets.insert(migration, host_id);
                    return;
                };
                FromTasker::PreCopyLost {
                    migration,
                    failure: why,
                }
            }
            ToTasker::Restore {
                migration,
                memory_write: redirect_write,
                memory_socket_path,
                ..
            } => {
                self.post_copy_migrations
                    .extend(memory_socket_path.map(|_| migration));
                let result = self.engine_step_result(host_id, 4242);
                if let (Some(memory_write), true) = (redirect_write, result.is_ok()) {
                    self.build_from_images(host_id, migration, &memory_write);
                }
                FromTasker::Restored { migration, result }
            }
            ToTasker::Run {
                migration,
                stays_paused: is_paused,
                ..
            } if self.run_built(host_id, migration, is_paused) => FromTasker::Running {
                migration,
                result: Ok(()),
            },
            ToTasker::PrepareRestart { migration, start } => {
                self.prepare_respawn(host_id, migration, &start)
            }
            ToTasker::Run {
                migration,
                stays_paused: is_paused,
                ..
            } if self.respawned_procs.contains_key(&(host_id, migration)) => {
                let Some(answer) = self.run_respawned(host_id, migration, is_paused) else {
                    return;
                };
                answer
            }
            ToTasker::Run {
                migration,
                stays_paused: is_paused,
                ..
            } => return self.run_restored(host_id, migration, is_paused),
            ToTasker::Discard { migration } => {
                self.pre_copy_targets.remove(&migration);
                self.post_copy_migrations.remove(&migration);
                self.image_store.built_procs.remove(&(host_id, migration));
                self.discard_respawned(host_id, migration);
                FromTasker::Discarded { migration }
            }
            other => panic!("{other:?}"),
        };
        self.send_from_tasker(host_id, answer);
    }

    /// Runs a restored process. Source and target share one [`Proc`]; from now on it belongs to the
    /// target.
    fn run_restored(&mut self, host_id: HostId, migration: MigrationId, is_paused: bool) {
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
        let source_host = self.procs[proc].host;
        let is_source_dead =
            self.injection.killed_sources.contains(&migration) || self.procs[proc].exited;
        assert!(
            is_source_dead,
            "two live copies of {tid} (seed {})",
            self.seed
        );
        self.injection.running_targets.insert(migration);
        let p = &mut self.procs[proc];
        if p.exited && !p.images_remain {
            let result = Err(Failure::Engine("there is nothing to run".into()));
            return self.send_from_tasker(host_id, FromTasker::Running { migration, result });
        }
        (p.exited, p.images_remain) = (false, false);
        (p.host, p.stopped_for_migration, p.paused, p.pause_serial) =
            (host_id, false, is_paused, p.pause_serial + 1);
        assert!(p.conn.is_none(), "only a quiesced task can migrate");
        // Drops messages of a connection that the process had closed before the migration.
        p.deferred_events.clear();
        p.is_held = false;
        self.hold_procs(host_id);
        self.send_from_tasker(
            host_id,
            FromTasker::Running {
                migration,
                result: Ok(()),
            },
        );
        if self.post_copy_migrations.remove(&migration) {
            let delay_us = if self.injection.is_active() {
                self.rng.below(20_000)
            } else {
                0
            };
            if delay_us > 0 {
                return self.schedule(
                    self.now + Micros(delay_us),
                    SimEvent::MemoryTransferEnd(host_id, migration, source_host, tid),
                );
            }
            self.send_from_tasker(
                host_id,
                FromTasker::MemoryArrived {
                    migration,
                    result: Ok(()),
                },
            );
        }
    }
}
