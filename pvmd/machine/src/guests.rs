//! Pauses the guest tasks of this host while its owner needs the machine.
//!
//! The host's load watcher decides; no other host is asked. Tasks that a user suspends pause the
//! same way (see `suspension`).
//!
//! A stopped process cannot close its rings, routes and daemon socket, and CRIU cannot dump it
//! while they are open. Each guest is therefore paused in this order:
//!
//! 1. The daemon asks the task's library to quiesce. The library has [`QUIESCE_TIMEOUT`], at a
//!    priority below all other processes of the host.
//! 2. The task is stopped when it has quiesced or the timeout has expired.
//! 3. The task stays stopped, even if a migration of it fails. If it has quiesced, its next
//!    location is written into its memory ([`Redirect`]). If it has not, it runs for at most
//!    [`RESUME_TO_QUIESCE_TIMEOUT`] when it must migrate: first only the library's threads, then
//!    the whole program.
//! 4. When the load watcher reports that guests are welcome, or its last directive has expired (see
//!    `owner_agent`), all guests resume except those that a user suspended.
//!
//! A task has one quiesce timeout per pause. If it was still reconnecting after an earlier pause or
//! migration when the timeout expired, it quiesces when its next migration needs it.

use super::owner_agent::OwnerAgents;
use super::relocation::ArrivingTask;
use super::tasks::{ConnectionPhase, Task};
use super::{Machine, Output, Timer};
use checkpoint_protocol::{Source, SourceEvent};
use sempa_proto::event::EventKind;
use sempa_proto::load::is_load_watcher;
use sempa_proto::migration::{Failure, MigrationCause, Refusal};
use sempa_proto::owner::{EvictionMode, GuestAccess, GuestDirective, REASON_BYTES_MAX};
use sempa_proto::table::TASK_SERVICE_FLAGS;
use sempa_proto::task::{Redirect, Reply, ResumeToken, ToTask};
use sempa_proto::tasker::{MemoryWrite, ToTasker};
use sempa_proto::text::truncate;
use sempa_proto::{Micros, MigrationId, PvmError, RequestId, Tid};
use std::collections::BTreeSet;
use std::path::PathBuf;
use thiserror::Error;

/// A limit of the owner that does not permit another guest.
#[derive(Debug, Error)]
enum OwnerLimit {
    /// The pattern that the program matches.
    #[error("its owner does not allow {0}")]
    BlockedProgram(String),
    #[error("its owner allows no tasks")]
    NoTasks,
    #[error("its owner allows one task, and one is present")]
    OneTask,
    #[error("its owner allows {0} tasks, and as many are present")]
    Tasks(u32),
}

/// Time limit for a guest to quiesce before it is stopped. The other 25 ms of the 50 ms within
/// which guests must stop for an owner are for detection and delivery.
const QUIESCE_TIMEOUT: Micros = Micros::from_millis(25);
/// Time limit for a suspended task to quiesce before it is stopped. It is longer than that of a
/// guest, because nothing waits for the task to stop.
pub(super) const SUSPEND_QUIESCE_TIMEOUT: Micros = Micros::from_millis(200);
/// Time limit for a task to quiesce when it migrates, if it was stopped before it had quiesced. The
/// task is resumed for that.
const RESUME_TO_QUIESCE_TIMEOUT: Micros = Micros::from_millis(200);
/// Part of [`RESUME_TO_QUIESCE_TIMEOUT`] during which only the library's threads run, so that a
/// computing program does not delay them.
const LIBRARY_ONLY_TIMEOUT: Micros = Micros::from_millis(100);
/// Time for guests to exit before they are killed.
const EVICTION_GRACE_TIMEOUT: Micros = Micros::from_millis(300);
const SIGTERM: i32 = 15;
const SIGKILL: i32 = 9;
/// Bit that marks the id of a pause without a migration. Such an id consists of this bit, the host
/// index and a counter.
const PAUSE_ID_BIT: u64 = 1 << 63;

/// Progress of pausing one task.
#[derive(Debug, Default)]
pub(super) struct Pause {
    /// Ids under which the quiesced library may be resumed. Empty if no quiesce was requested.
    resume_ids: Vec<MigrationId>,
    /// A migration that waits until the task has quiesced, and the paths of its resume tokens.
    pending_migration: Option<(MigrationId, Vec<PathBuf>)>,
    /// True if a resume was sent and the library has not reconnected yet.
    pub(super) is_resuming: bool,
}

/// The directive about guests that is in force on this host.
#[derive(Debug)]
struct ActiveDirective {
    sender: Tid,
    directive: GuestDirective,
    received_at: Micros,
    /// Guests at the time of the directive.
    guests: Vec<Tid>,
    /// Members of `guests` that are not stopped yet.
    running_guests: BTreeSet<Tid>,
    /// True if the event log contains that all guests are paused.
    pause_reported: bool,
    /// True if the guests were asked to exit.
    exit_requested: bool,
}

/// State by which the owner controls the guests of this host.
#[derive(Debug, Default)]
pub(super) struct OwnerControl {
    /// `None` while guests are welcome.
    active_directive: Option<ActiveDirective>,
    pub(super) owner_agents: OwnerAgents,
    last_pause_number: u64,
}

impl OwnerControl {
    /// True while guests must be paused.
    pub(super) fn pauses_guests(&self) -> bool {
        self.active_directive.is_some()
    }

    /// True if guests are paused by a directive of this task.
    pub(super) fn is_sent_by(&self, tid: Tid) -> bool {
        self.active_directive
            .as_ref()
            .is_some_and(|said| said.sender == tid)
    }
}

impl Task {
    /// True for a task that the virtual machine needs for its own operation.
    pub(super) fn is_service(&self) -> bool {
        self.is_service || self.flags & TASK_SERVICE_FLAGS != 0
    }

    /// True if the owner of the host may pause the task: it was spawned, has not exited and does
    /// not serve the virtual machine.
    fn is_guest(&self) -> bool {
        self.is_spawned() && !self.is_service() && self.exit_report.is_none()
    }

    /// True if the task's library has quiesced and waits to be resumed.
    pub(super) fn is_quiesced(&self) -> bool {
        let waits = |still: &Pause| !still.resume_ids.is_empty() && !still.is_resuming;
        self.phase == ConnectionPhase::Detached && self.pause.as_ref().is_some_and(waits)
    }

    /// True if the task's library may be resumed under this id.
    pub(super) fn has_resume_id(&self, id: MigrationId) -> bool {
        self.pause
            .as_ref()
            .is_some_and(|still| still.resume_ids.contains(&id))
    }
}

impl Machine {
    /// Returns the time at which a task of this host must be stopped even if it has not quiesced;
    /// `None` if it need not be paused.
    fn pause_deadline(&self, task: &Task) -> Option<Micros> {
        let owner = self
            .owner_control
            .active_directive
            .as_ref()
            .filter(|_| task.is_guest())
            .map(|said| said.received_at + QUIESCE_TIMEOUT);
        owner
            .into_iter()
            .chain(
                task.suspension
                    .map(|suspended| suspended.since + SUSPEND_QUIESCE_TIMEOUT),
            )
            .min()
    }

    /// True if a task that is on this host, or arriving, must be paused.
    pub(super) fn must_pause(&self, tid: Tid) -> bool {
        match self.tasks.get(tid) {
            Some(task) => self.pause_deadline(task).is_some(),
            None => {
                let arrival = self.migrations.arrivals.get(&tid);
                arrival.is_some_and(|arrival| {
                    self.owner_control.pauses_guests() || arrival.suspension.is_some()
                })
            }
        }
    }

    // ---- Directives about guests

    /// Handles a directive about guests, from a load watcher or from a program that the user has
    /// started from a command line.
    pub(super) fn handle_guest_directive(
        &mut self,
        by: Tid,
        id: RequestId,
        mut directive: GuestDirective,
    ) {
        if self
            .tasks
            .get(by)
            .is_some_and(|task| task.is_spawned() && !task.is_service)
        {
            let reason = "only a load watcher that the resource manager has started, or a program from a command \
                          line, may send directives about guests on this host";
            return self.reply_error(by, id, PvmError::Denied, reason);
        }
        directive
            .reason
            .truncate(truncate(&directive.reason, REASON_BYTES_MAX).len());
        self.apply_directive(by, directive);
        self.reply(by, id, Reply::Done);
    }

    /// Makes a directive the one in force: resumes the guests, or pauses them and sets the time of
    /// their eviction.
    pub(super) fn apply_directive(&mut self, by: Tid, word: GuestDirective) {
        let watches = self
            .tasks
            .get(by)
            .is_some_and(|task| task.is_service && is_load_watcher(&task.name));
        self.owner_control
            .owner_agents
            .record_directive(by, &word, watches);
        match word.access {
            GuestAccess::Welcome => self.resume_guests(&word.reason),
            GuestAccess::Paused {
                evict_at: leave_at, ..
            } => {
                let said = self
                    .owner_control
                    .active_directive
                    .as_ref()
                    .map(|said| said.directive.access);
                if let Some(at) = leave_at.filter(|_| said != Some(word.access)) {
                    self.set_timer(at.since(self.unix_time), Timer::Eviction);
                }
                match &mut self.owner_control.active_directive {
                    Some(said) => (said.sender, said.directive) = (by, word),
                    None => self.pause_guests(by, word),
                }
            }
        }
    }

    fn pause_guests(&mut self, sender: Tid, directive: GuestDirective) {
        self.log(format!("guests are paused: {}", directive.reason));
        let why = directive.reason.clone();
        let here: Vec<Tid> = self
            .tasks
            .live
            .values()
            .filter(|t| t.is_guest())
            .map(|t| t.tid)
            .collect();
        // Tasks that have just arrived are not in the task table yet.
        let arriving = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.run_ordered && !a.pause_ordered);
        let arriving: Vec<Tid> = arriving.map(|a| a.tid).collect();
        let guests = [&here[..], &arriving].concat();
        let running = guests.iter().copied().collect();
        self.owner_control.active_directive = Some(ActiveDirective {
            sender,
            directive,
            received_at: self.now,
            guests,
            running_guests: running,
            pause_reported: false,
            exit_requested: false,
        });
        for tid in here {
            self.pause_guest(tid);
        }
        for tid in arriving {
            self.pause_arrival(tid, QUIESCE_TIMEOUT);
        }
        self.cancel_pre_copies(&why);
        self.cancel_incoming_copy(&why);
        self.report_if_all_paused();
    }

    fn resume_guests(&mut self, why: &str) {
        let Some(said) = self.owner_control.active_directive.take() else {
            return;
        };
        self.log(format!("guests resume: {why}"));
        let resumes =
            |t: &&Task| (t.pause.is_some() || t.graceful_exit.is_some()) && t.suspension.is_none();
        let still: Vec<Tid> = self
            .tasks
            .live
            .values()
            .filter(resumes)
            .map(|t| t.tid)
            .collect();
        for tid in still {
            self.resume_guest(tid);
        }
        let held = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.pause_ordered && a.suspension.is_none());
        for tid in held.map(|a| a.tid).collect::<Vec<Tid>>() {
            self.resume_arrival(tid);
        }
        let guests = said.guests.into_iter();
        let guests = guests
            .filter(|tid| self.tasks.get(*tid).is_some_and(|t| t.suspension.is_none()))
            .collect();
        self.record(EventKind::GuestsResumed {
            host: self.config.host,
            guests,
            why: why.to_string(),
        });
    }

    /// Handles the tasker's report that no process of a guest runs any more.
    pub(super) fn handle_guest_paused(&mut self, tid: Tid) {
        self.mark_paused(tid);
        self.report_if_all_paused();
    }

    fn mark_paused(&mut self, tid: Tid) {
        if let Some(said) = &mut self.owner_control.active_directive {
            said.running_guests.remove(&tid);
        }
    }

    fn report_if_all_paused(&mut self) {
        let (host, now) = (self.config.host, self.now);
        let is_there = |tid: &Tid| {
            self.tasks.get(*tid).is_some() || self.migrations.arrivals.contains_key(tid)
        };
        if let Some(said) = &mut self.owner_control.active_directive {
            said.running_guests.retain(is_there);
        }
        let Some(said) = self
            .owner_control
            .active_directive
            .as_mut()
            .filter(|said| said.running_guests.is_empty() && !said.pause_reported)
        else {
            return;
        };
        said.pause_reported = true;
        let (guests, took, why) = (
            said.guests.clone(),
            now.since(said.received_at),
            said.directive.reason.clone(),
        );
        self.record(EventKind::GuestsPaused {
            host,
            guests,
            duration: took,
            why,
        });
    }

    /// Removes a task that has ended or migrated away from the current pause.
    pub(super) fn forget_guest(&mut self, task: &Task) {
        for id in task.pause.iter().flat_map(|still| &still.resume_ids) {
            self.outputs.push_back(Output::RemoveToken {
                path: self.config.paths.resume_token(*id),
            });
        }
        self.mark_paused(task.tid);
        self.report_if_all_paused();
    }

    // ---- Eviction of guests

    /// Asks guests to exit if their eviction is due and the owner wants them killed. If the owner
    /// wants them migrated, the resource manager migrates them.
    pub(super) fn evict_guests(&mut self) {
        let unix = self.unix_time;
        let due = |said: &&mut ActiveDirective| match said.directive.access {
            GuestAccess::Paused {
                evict_at: Some(at),
                eviction: EvictionMode::Kill,
            } => at <= unix && !said.exit_requested,
            _ => false,
        };
        let Some(said) = self.owner_control.active_directive.as_mut().filter(due) else {
            return;
        };
        said.exit_requested = true;
        let why = said.directive.reason.clone();
        let guests: Vec<Tid> = self
            .tasks
            .live
            .values()
            .filter(|t| t.is_guest())
            .map(|t| t.tid)
            .collect();
        for tid in guests.iter().copied() {
            if !self.signal_without_process(tid, SIGTERM) {
                self.send_to_tasker(ToTasker::Signal {
                    tid,
                    signal: SIGTERM,
                });
            }
        }
        self.set_timer(EVICTION_GRACE_TIMEOUT, Timer::GuestKill);
        self.record(EventKind::GuestsEnded {
            host: self.config.host,
            guests,
            why,
        });
    }

    /// Kills the guests that have not exited within the grace period.
    pub(super) fn kill_evicted_guests(&mut self) {
        if self
            .owner_control
            .active_directive
            .as_ref()
            .is_some_and(|said| said.exit_requested)
        {
            let left: Vec<Tid> = self
                .tasks
                .live
                .values()
                .filter(|t| t.is_guest())
                .map(|t| t.tid)
                .collect();
            for tid in left {
                if !self.signal_without_process(tid, SIGKILL) {
                    self.send_to_tasker(ToTasker::Kill { tid });
                }
            }
        }
    }

    // ---- Pausing one guest

    /// Quiesces and stops a task that must be paused.
    pub(super) fn pause_guest(&mut self, tid: Tid) {
        if let Some(ending) = self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.graceful_exit.as_mut())
        {
            ending.was_paused = true;
        }
        // A task that was asked to exit gets its grace period first. If it still runs afterwards,
        // it is paused.
        if self.tasks.get(tid).is_some_and(Task::is_exiting) {
            return;
        }
        let leaving = self
            .controlling_migration(tid)
            .map(|source| (source.migration().id, source.awaits_reconnect()));
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        match (&task.pause, leaving) {
            // A quiesce request is already outstanding.
            (Some(_), _) => {}
            (None, Some((id, resuming))) => {
                task.pause = Some(Pause {
                    resume_ids: vec![id],
                    pending_migration: None,
                    is_resuming: resuming,
                })
            }
            (None, None) => {
                task.pause = Some(Pause::default());
                self.request_quiesce(tid, None);
            }
        }
        let Some(task) = self.tasks.get(tid) else {
            return;
        };
        let quiescing =
            task.conn().is_some() || task.pause.as_ref().is_some_and(|still| still.is_resuming);
        self.stop_after_quiesce(tid, quiescing);
    }

    /// Stops a task: immediately, or at the end of its quiesce timeout if it is quiescing.
    fn stop_after_quiesce(&mut self, tid: Tid, quiescing: bool) {
        let by = self
            .tasks
            .get(tid)
            .filter(|_| quiescing)
            .and_then(|task| self.pause_deadline(task));
        let left = by.map(|by| by.since(self.now));
        self.send_to_tasker(ToTasker::Pause {
            tid,
            run_for: left.unwrap_or_default(),
        });
    }

    /// Asks the library of a guest to quiesce, for a waiting migration if there is one.
    fn request_quiesce(&mut self, tid: Tid, waiting: Option<(MigrationId, Vec<PathBuf>)>) {
        let (migration, tokens) = waiting.unwrap_or_else(|| {
            self.owner_control.last_pause_number += 1;
            let id = MigrationId(
                PAUSE_ID_BIT
                    | u64::from(self.config.host.index()) << 40
                    | self.owner_control.last_pause_number,
            );
            (id, vec![self.config.paths.resume_token(id)])
        });
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(conn) = task.conn() else { return };
        task.holds_items = true;
        task.pause = Some(Pause {
            resume_ids: vec![migration],
            pending_migration: None,
            is_resuming: false,
        });
        self.outputs.push_back(Output::ToTask {
            conn,
            message: ToTask::Quiesce { migration, tokens },
        });
    }

    /// Resumes a paused task, unless a migration controls it.
    pub(super) fn resume_guest(&mut self, tid: Tid) {
        let moving = self.controlling_migration(tid).is_some();
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(still) = &mut task.pause else {
            if task.graceful_exit.is_some() {
                // The task was only allowed to run for a limited time, to exit.
                self.send_to_tasker(ToTasker::Resume { tid });
            }
            return;
        };
        if task.phase == ConnectionPhase::Left || still.resume_ids.is_empty() {
            task.pause = None;
        } else if !moving {
            still.is_resuming = true;
            let ids = still.resume_ids.clone();
            ids.into_iter().for_each(|id| self.write_resume_token(id));
        }
        // A task that a migration controls stays stopped.
        self.send_to_tasker(ToTasker::Resume { tid });
    }

    /// Resumes an arriving task that was marked to be paused.
    pub(super) fn resume_arrival(&mut self, tid: Tid) {
        let Some(arrival) = self.migrations.arrivals.get_mut(&tid) else {
            return;
        };
        if let Some(migration) = arrival.end_pause() {
            self.write_resume_token(migration);
        }
        self.send_to_tasker(ToTasker::Resume { tid });
    }

    /// Stops an arriving task, which may already run, when the time `after` has passed.
    pub(super) fn pause_arrival(&mut self, tid: Tid, after: Micros) {
        if let Some(arrival) = self
            .migrations
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.run_ordered && !a.pause_ordered)
        {
            arrival.pause_ordered = true;
            self.send_to_tasker(ToTasker::Pause {
                tid,
                run_for: after,
            });
        }
    }

    /// Returns the migration that controls this task, if there is one.
    fn controlling_migration(&self, tid: Tid) -> Option<&Source> {
        self.migrations
            .sources
            .values()
            .find(|source| source.migration().tid == tid && source.buffers_incoming())
    }

    /// Quiesces a spawned task that has just connected, if it must be paused.
    pub(super) fn handle_guest_connected(&mut self, tid: Tid) {
        if self.must_pause(tid) {
            self.request_quiesce(tid, None);
        }
    }

    /// Handles the reconnection of a library that had quiesced. The task already uses the new
    /// connection.
    pub(super) fn handle_guest_reconnected(&mut self, tid: Tid) {
        let stopped = self.must_pause(tid);
        let ending = self.tasks.get(tid).is_some_and(Task::is_exiting);
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(still) = task.pause.take() else {
            return;
        };
        for id in &still.resume_ids {
            self.outputs.push_back(Output::RemoveToken {
                path: self.config.paths.resume_token(*id),
            });
        }
        if ending {
            return self.request_handoff(tid);
        }
        if let Some(waiting) = still.pending_migration {
            // A migration waits for the task, so its library quiesces again, for that migration.
            self.request_quiesce(tid, Some(waiting));
            if !stopped && let Some(task) = self.tasks.get_mut(tid) {
                task.pause = None;
            }
        } else if stopped {
            self.request_quiesce(tid, None);
            // The task may have been allowed to run so that it could reconnect, for a migration
            // that was aborted meanwhile.
            self.stop_after_quiesce(tid, true);
        } else if self.controlling_migration(tid).is_none() {
            self.release_inbox(tid);
        }
        self.start_queued_migration(tid);
    }

    /// Sets the pause state of a task that has arrived from another host. `resume_id` is set if its
    /// library is still quiesced.
    pub(super) fn adopt_arrived_guest(&mut self, tid: Tid, resume_id: Option<MigrationId>) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        match resume_id {
            Some(id) => {
                task.holds_items = true;
                task.pause = Some(Pause {
                    resume_ids: vec![id],
                    pending_migration: None,
                    is_resuming: false,
                });
            }
            None if self.must_pause(tid) => self.pause_guest(tid),
            None => {}
        }
    }

    /// Resumes a quiesced library whose program must exit, so that it can report its link states.
    pub(super) fn resume_to_exit(&mut self, tid: Tid) {
        let Some(still) = self.tasks.get_mut(tid).and_then(|task| task.pause.as_mut()) else {
            return;
        };
        still.is_resuming |= !still.resume_ids.is_empty();
        let ids = still.resume_ids.clone();
        ids.into_iter().for_each(|id| self.write_resume_token(id));
    }

    /// Ends the pause of a task whose process has exited, while the task itself continues. The
    /// resume tokens of the pause are removed.
    pub(super) fn end_pause(&mut self, tid: Tid) {
        self.mark_paused(tid);
        let still = self.tasks.get_mut(tid).and_then(|task| task.pause.take());
        for id in still.into_iter().flat_map(|still| still.resume_ids) {
            self.outputs.push_back(Output::RemoveToken {
                path: self.config.paths.resume_token(id),
            });
        }
        self.report_if_all_paused();
    }

    /// Pauses the new process of a task if the task must be paused.
    pub(super) fn pause_if_required(&mut self, tid: Tid) {
        if self.must_pause(tid) {
            self.pause_guest(tid);
        }
    }

    // ---- Migration of paused guests

    /// Delivers the items that were held back for a task, unless it is paused.
    pub(super) fn release_inbox(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.get_mut(tid).filter(|task| task.pause.is_none()) {
            task.holds_items = false;
            self.flush_inbox(tid);
        }
    }

    /// Stops a guest whose library has quiesced.
    pub(super) fn handle_guest_quiesced(&mut self, tid: Tid) {
        if self.must_pause(tid)
            && self
                .tasks
                .get(tid)
                .is_some_and(|t| t.pause.is_some() && !t.is_exiting())
        {
            self.send_to_tasker(ToTasker::Pause {
                tid,
                run_for: Micros::default(),
            });
            // A migration may have waited until the task was quiesced.
            self.start_queued_migration(tid);
        }
    }

    /// Handles a migration's order to quiesce a task. True if the task is already quiescing for a
    /// pause, which then serves the migration, too.
    pub(super) fn quiesce_paused_guest(
        &mut self,
        id: MigrationId,
        tid: Tid,
        tokens: &[PathBuf],
    ) -> bool {
        let stopped = self.must_pause(tid);
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let Some(still) = &mut task.pause else {
            return false;
        };
        still.pending_migration = Some((id, tokens.to_vec()));
        if task.is_quiesced() {
            self.source_event(id, SourceEvent::Quiesced);
        } else if stopped {
            self.resume_to_quiesce(tid);
        }
        true
    }

    /// Allows a paused guest to run until its library has quiesced.
    pub(super) fn resume_to_quiesce(&mut self, tid: Tid) {
        if self.must_pause(tid) {
            self.send_to_tasker(ToTasker::ResumeToQuiesce {
                tid,
                library_only_for: LIBRARY_ONLY_TIMEOUT,
                run_for: RESUME_TO_QUIESCE_TIMEOUT,
            });
        }
    }

    /// Stops a task for a migration. A library that has already quiesced for a pause learns the
    /// migration's tokens from its memory.
    pub(super) fn stop_for_migration(&mut self, id: MigrationId, tid: Tid) {
        let memory_write = self.tasks.get(tid).and_then(|task| {
            let (migration, tokens) = task.pause.as_ref()?.pending_migration.clone()?;
            let bytes = Redirect { migration, tokens }.encode();
            Some(bytes.map(|bytes| MemoryWrite {
                address: task.redirect_address,
                bytes,
            }))
        });
        match memory_write.transpose() {
            Ok(memory_write) => self.send_to_tasker(ToTasker::Stop {
                migration: id,
                tid,
                memory_write,
            }),
            Err(why) => self.source_event(id, SourceEvent::Stopped(Err(Failure::Engine(why)))),
        }
    }

    /// Handles the tasker's report that it has stopped a task for a migration, or could not.
    pub(super) fn handle_stopped_for_migration(
        &mut self,
        id: MigrationId,
        result: &Result<(), Failure>,
    ) {
        let Some(tid) = self
            .migrations
            .sources
            .get(&id)
            .map(|source| source.migration().tid)
        else {
            return;
        };
        if result.is_ok() {
            // The tasker sends no other report for a guest that a migration has stopped.
            self.handle_guest_paused(tid);
        }
        let Some(still) = self.tasks.get_mut(tid).and_then(|task| task.pause.as_mut()) else {
            return;
        };
        if still
            .pending_migration
            .take_if(|(of, _)| *of == id)
            .is_some()
        {
            if result.is_ok() {
                still.resume_ids.clear();
            }
            still.resume_ids.push(id);
        }
    }

    /// Resumes the library of a task after an aborted migration. True if the task had quiesced for
    /// a pause: it then resumes under the ids of that pause, now or when the pause ends.
    pub(super) fn resume_after_abort(&mut self, id: MigrationId, tid: Tid) -> bool {
        let stopped = self.must_pause(tid);
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let Some(still) = &mut task.pause else {
            return false;
        };
        still.pending_migration = None;
        if stopped {
            self.send_to_tasker(ToTasker::Pause {
                tid,
                run_for: Micros::default(),
            });
            // Nothing remains to be done for the migration.
            self.source_event(id, SourceEvent::Reconnected);
        } else {
            still.is_resuming = true;
            let ids = still.resume_ids.clone();
            ids.into_iter().for_each(|id| self.write_resume_token(id));
        }
        true
    }

    /// Returns the reason why this host does not accept a task that runs this program; `None` if
    /// the host accepts it.
    pub(super) fn guest_refusal(&self, tid: Tid, program: &str) -> Option<Refusal> {
        self.free_slots_for(tid, program).err()
    }

    /// Returns the number of further guests that this host accepts, at least one. Guests that are
    /// here or arriving count, except `tid`.
    ///
    /// # Errors
    /// The reason why this host accepts no guest.
    pub(super) fn free_slots_for(&self, tid: Tid, program: &str) -> Result<usize, Refusal> {
        let host = self.config.host;
        match &self.owner_control.active_directive {
            Some(said) => Err(Refusal::OwnerPresent {
                host,
                why: said.directive.reason.clone(),
            }),
            None => self
                .free_slots_by_limits(tid, program)
                .map_err(|limit| Refusal::OwnerLimits {
                    host,
                    why: limit.to_string(),
                }),
        }
    }

    /// Returns the number of further guests within the owner's limits, while guests are welcome.
    /// Tasks that are leaving or suspended do not count, because they need no processor.
    fn free_slots_by_limits(&self, tid: Tid, program: &str) -> Result<usize, OwnerLimit> {
        if let Some(pattern) = self
            .owner_control
            .owner_agents
            .limits()
            .find_map(|limits| limits.blocking_pattern(program))
        {
            return Err(OwnerLimit::BlockedProgram(pattern.to_string()));
        }
        let Some(max_cores) = self
            .owner_control
            .owner_agents
            .limits()
            .filter_map(|limits| limits.guests_max)
            .min()
        else {
            return Ok(usize::MAX);
        };
        // A task that is dumped for a checkpoint does not leave.
        let leaves = |source: &&Source| {
            source.buffers_incoming() && source.migration().cause != MigrationCause::Checkpoint
        };
        let leaving: BTreeSet<Tid> = self
            .migrations
            .sources
            .values()
            .filter(leaves)
            .map(|source| source.migration().tid)
            .collect();
        let is_counted_task = |task: &&Task| {
            let counts =
                task.tid != tid && task.is_guest() && !task.pinned && task.suspension.is_none();
            counts && !leaving.contains(&task.tid)
        };
        let is_counted_arrival =
            |arrival: &&ArrivingTask| arrival.tid != tid && arrival.suspension.is_none();
        let here = self.tasks.live.values().filter(is_counted_task).count();
        let coming = self
            .migrations
            .arrivals
            .values()
            .filter(is_counted_arrival)
            .count();
        match usize::try_from(max_cores)
            .unwrap_or(usize::MAX)
            .saturating_sub(here + coming)
        {
            0 => Err(match max_cores {
                0 => OwnerLimit::NoTasks,
                1 => OwnerLimit::OneTask,
                _ => OwnerLimit::Tasks(max_cores),
            }),
            places => Ok(places),
        }
    }

    /// Writes the token that resumes the library that quiesced under this id.
    pub(super) fn write_resume_token(&mut self, migration: MigrationId) {
        let place = &self.config.paths;
        let token = ResumeToken {
            migration,
            socket: place.daemon_socket(),
        };
        self.outputs.push_back(Output::WriteToken {
            path: place.resume_token(migration),
            token,
        });
    }
}
