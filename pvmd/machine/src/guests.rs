//! Pauses the guest tasks of this host while its owner needs the machine.
//!
//! The host's load watcher decides; no other host is asked. Tasks that a user suspends are paused
//! in the same way (see `suspension`).
//!
//! A stopped process cannot close its rings, routes and daemon socket, and CRIU cannot dump it
//! while they are open. Each guest is therefore paused in this order:
//!
//! 1. The daemon asks the task's library to quiesce. The library has [`QUIESCE_TIMEOUT`], at a
//!    priority below all other processes of the host.
//! 2. The task is stopped when it has quiesced or the timeout has expired.
//! 3. The task stays stopped, even if a migration of it fails. If the task has quiesced, the paths
//!    of further resume tokens are written into its memory ([`Redirect`]). If it has not quiesced,
//!    it runs for at most [`RESUME_TO_QUIESCE_TIMEOUT`] when it must migrate: first only the
//!    library's threads, then the whole program.
//! 4. When the load watcher reports that guests are welcome, or its last directive has expired (see
//!    `owner_agent`), all guests resume except those that a user suspended.
//!
//! A task has one quiesce timeout per pause. If the task was still reconnecting after an earlier
//! pause or migration when the timeout expired, it quiesces when its next migration requires this.

use super::guest_stops::StoppedTasks;
use super::leftovers::Leftovers;
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
    /// The owner does not allow the program. Contains the pattern that the program matches.
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
/// Time limit for a suspended task to quiesce before it is stopped. The limit is longer than for a
/// guest, because nobody waits until the task has stopped.
pub(super) const SUSPEND_QUIESCE_TIMEOUT: Micros = Micros::from_millis(200);
/// Time for which a task that was stopped before it had quiesced may run again, to quiesce for a
/// migration.
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

/// State of the pause of one task.
#[derive(Debug, Default)]
pub(super) struct Pause {
    /// Ids under which the quiesced library may be resumed. Empty if no quiesce was requested.
    resume_ids: Vec<MigrationId>,
    /// A migration that waits until the task has quiesced, with the paths of its resume tokens.
    pending_migration: Option<(MigrationId, Vec<PathBuf>)>,
    /// True if a resume token was written and the library has not reconnected yet.
    pub(super) is_resuming: bool,
}

/// The directive about guests that is in force on this host.
#[derive(Debug)]
pub(super) struct ActiveDirective {
    sender: Tid,
    pub(super) directive: GuestDirective,
    pub(super) received_at: Micros,
    /// Guests at the time of the directive.
    guests: Vec<Tid>,
    /// Members of `guests` that are not stopped yet.
    pub(super) running_guests: BTreeSet<Tid>,
    /// True if the event log reports that all guests are paused.
    is_pause_reported: bool,
    /// True if the event log reports that guests were not paused in time.
    pub(super) is_delay_reported: bool,
    /// True if the guests were asked to exit.
    is_exit_requested: bool,
}

/// State by which the owner controls the guests of this host.
#[derive(Debug, Default)]
pub(super) struct OwnerControl {
    /// Directive that pauses the guests; `None` while guests are welcome.
    pub(super) active_directive: Option<ActiveDirective>,
    pub(super) owner_agents: OwnerAgents,
    /// What ended tasks have left behind; also guests.
    pub(super) leftovers: Leftovers,
    last_pause_number: u64,
    pub(super) stopped_tasks: StoppedTasks,
}

impl OwnerControl {
    /// True while guests must be paused.
    pub(super) fn pauses_guests(&self) -> bool {
        self.active_directive.is_some()
    }

    /// Returns what the directive that pauses the guests permits; `None` while guests are welcome.
    pub(super) fn active_access(&self) -> Option<GuestAccess> {
        self.active_directive
            .as_ref()
            .map(|directive| directive.directive.access)
    }

    /// True if this task has sent the directive that pauses the guests.
    pub(super) fn is_directive_sender(&self, tid: Tid) -> bool {
        self.active_directive
            .as_ref()
            .is_some_and(|directive| directive.sender == tid)
    }
}

impl Task {
    /// True for a task that the virtual machine needs for its own operation.
    pub(super) fn is_service(&self) -> bool {
        self.is_service || self.flags & TASK_SERVICE_FLAGS != 0
    }

    /// True if the owner of the host may pause the task: it was spawned, has not exited and does
    /// not serve the virtual machine.
    pub(super) fn is_guest(&self) -> bool {
        self.is_spawned() && !self.is_service() && self.exit_report.is_none()
    }

    /// True if the task's library has quiesced and waits to be resumed.
    pub(super) fn is_quiesced(&self) -> bool {
        let awaits_resume = |pause: &Pause| !pause.resume_ids.is_empty() && !pause.is_resuming;
        self.connection_phase == ConnectionPhase::Detached
            && self.pause.as_ref().is_some_and(awaits_resume)
    }

    /// True if this id is one of those under which the task's library may be resumed.
    pub(super) fn has_resume_id(&self, id: MigrationId) -> bool {
        self.pause
            .as_ref()
            .is_some_and(|pause| pause.resume_ids.contains(&id))
    }
}

impl Machine {
    /// Returns the time at which a task of this host must be stopped even if it has not quiesced;
    /// `None` if the task need not be paused.
    fn pause_deadline(&self, task: &Task) -> Option<Micros> {
        let owner_deadline = self
            .owner_control
            .active_directive
            .as_ref()
            .filter(|_| task.is_guest())
            .map(|active_directive| active_directive.received_at + QUIESCE_TIMEOUT);
        owner_deadline
            .into_iter()
            .chain(
                task.suspension
                    .map(|suspension| suspension.suspended_at + SUSPEND_QUIESCE_TIMEOUT),
            )
            .min()
    }

    /// True if a task of this host, or a task that is arriving, must be paused.
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
        sender: Tid,
        id: RequestId,
        mut directive: GuestDirective,
    ) {
        if self
            .tasks
            .get(sender)
            .is_some_and(|task| task.is_spawned() && !task.is_service)
        {
            let reason = "only a load watcher that the resource manager has started, or a program from a command \
                          line, may send directives about guests on this host";
            return self.reply_error(sender, id, PvmError::Denied, reason);
        }
        directive
            .reason
            .truncate(truncate(&directive.reason, REASON_BYTES_MAX).len());
        if !self.is_superseded_watcher(sender) {
            self.apply_directive(sender, directive);
        }
        self.reply(sender, id, Reply::Done);
        self.end_superseded_watcher();
    }

    /// Puts a directive into force: resumes the guests, or pauses the guests and sets a timer for
    /// their eviction.
    pub(super) fn apply_directive(&mut self, sender: Tid, directive: GuestDirective) {
        let is_from_watcher = self
            .tasks
            .get(sender)
            .is_some_and(|task| task.is_service && is_load_watcher(&task.name));
        self.owner_control
            .owner_agents
            .record_directive(sender, &directive, is_from_watcher);
        match directive.access {
            GuestAccess::Welcome => self.resume_guests(&directive.reason),
            GuestAccess::Paused { evict_at, .. } => {
                let active_directive = self
                    .owner_control
                    .active_directive
                    .as_ref()
                    .map(|active_directive| active_directive.directive.access);
                if let Some(eviction_time) =
                    evict_at.filter(|_| active_directive != Some(directive.access))
                {
                    self.set_timer(eviction_time.since(self.unix_time), Timer::EvictionDue);
                }
                match &mut self.owner_control.active_directive {
                    Some(active_directive) => {
                        (active_directive.sender, active_directive.directive) = (sender, directive)
                    }
                    None => self.pause_guests(sender, directive),
                }
            }
        }
    }

    fn pause_guests(&mut self, sender: Tid, directive: GuestDirective) {
        self.log(format!("guests are paused: {}", directive.reason));
        let why = directive.reason.clone();
        let local_guests: Vec<Tid> = self
            .tasks
            .live_tasks
            .values()
            .filter(|t| t.is_guest())
            .map(|t| t.tid)
            .collect();
        // Tasks that have just arrived are not in the task table yet.
        let arriving_guests = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.run_ordered && !a.pause_ordered);
        let arriving_guests: Vec<Tid> = arriving_guests.map(|a| a.tid).collect();
        let guests = [&local_guests[..], &arriving_guests].concat();
        let running_guests = guests.iter().copied().collect();
        self.owner_control.active_directive = Some(ActiveDirective {
            sender,
            directive,
            received_at: self.now,
            guests,
            running_guests,
            is_pause_reported: false,
            is_delay_reported: false,
            is_exit_requested: false,
        });
        for tid in local_guests {
            self.pause_guest(tid);
        }
        for tid in arriving_guests {
            self.pause_arrival(tid, QUIESCE_TIMEOUT);
        }
        self.stop_leftovers();
        self.cancel_pre_copies(&why);
        self.cancel_incoming_copy(&why);
        self.report_if_all_paused();
        self.await_guest_stops();
    }

    fn resume_guests(&mut self, why: &str) {
        let Some(ended_directive) = self.owner_control.active_directive.take() else {
            return;
        };
        self.log(format!("guests resume: {why}"));
        let must_resume =
            |t: &&Task| (t.pause.is_some() || t.graceful_exit.is_some()) && t.suspension.is_none();
        let paused_guests: Vec<Tid> = self
            .tasks
            .live_tasks
            .values()
            .filter(must_resume)
            .map(|t| t.tid)
            .collect();
        for tid in paused_guests {
            self.resume_guest(tid);
        }
        let paused_arrivals = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.pause_ordered && a.suspension.is_none());
        for tid in paused_arrivals.map(|a| a.tid).collect::<Vec<Tid>>() {
            self.resume_arrival(tid);
        }
        self.resume_leftovers();
        let guests = ended_directive.guests.into_iter();
        let guests = guests
            .filter(|tid| self.tasks.get(*tid).is_some_and(|t| t.suspension.is_none()))
            .collect();
        self.record_event(EventKind::GuestsResumed {
            host: self.config.host,
            guests,
            why: why.to_string(),
        });
    }

    /// Handles the tasker's report that no process of a guest runs any more.
    pub(super) fn handle_guest_paused(&mut self, tid: Tid) {
        // The task may have ended since.
        if self.tasks.get(tid).is_some() || self.migrations.arrivals.contains_key(&tid) {
            self.owner_control.stopped_tasks.insert(tid);
        }
        self.mark_paused(tid);
        self.report_if_all_paused();
    }

    fn mark_paused(&mut self, tid: Tid) {
        if let Some(directive) = &mut self.owner_control.active_directive {
            directive.running_guests.remove(&tid);
        }
    }

    pub(super) fn report_if_all_paused(&mut self) {
        let (host, now) = (self.config.host, self.now);
        self.forget_ended_guests();
        let (leftovers_have_stopped, leftovers) = (
            self.owner_control.leftovers.have_stopped(),
            self.owner_control.leftovers.counts(),
        );
        let Some(directive) = self
            .owner_control
            .active_directive
            .as_mut()
            .filter(|directive| {
                directive.running_guests.is_empty()
                    && leftovers_have_stopped
                    && !directive.is_pause_reported
            })
        else {
            return;
        };
        directive.is_pause_reported = true;
        let (guests, duration, why) = (
            directive.guests.clone(),
            now.since(directive.received_at),
            directive.directive.reason.clone(),
        );
        self.record_event(EventKind::GuestsPaused {
            host,
            guests,
            duration,
            why,
            leftovers,
        });
    }

    /// Removes the pause of a task that has ended or has migrated away, with its resume tokens.
    pub(super) fn forget_guest(&mut self, task: &Task) {
        for id in task.pause.iter().flat_map(|pause| &pause.resume_ids) {
            self.outputs.push_back(Output::RemoveToken {
                path: self.config.paths.resume_token_path(*id),
            });
        }
        self.owner_control.stopped_tasks.remove(task.tid);
        self.mark_paused(task.tid);
        self.report_if_all_paused();
    }

    // ---- Eviction of guests

    /// Asks guests to exit if their eviction is due and the owner's directive requires that guests
    /// are killed. If the directive requires that guests migrate, the resource manager migrates
    /// them.
    pub(super) fn evict_guests(&mut self) {
        self.evict_leftovers();
        let unix_time = self.unix_time;
        let must_evict =
            |active_directive: &&mut ActiveDirective| match active_directive.directive.access {
                GuestAccess::Paused {
                    evict_at: Some(evict_at),
                    eviction: EvictionMode::Kill,
                } => evict_at <= unix_time && !active_directive.is_exit_requested,
                _ => false,
            };
        let Some(active_directive) = self
            .owner_control
            .active_directive
            .as_mut()
            .filter(must_evict)
        else {
            return;
        };
        active_directive.is_exit_requested = true;
        let why = active_directive.directive.reason.clone();
        let guests: Vec<Tid> = self
            .tasks
            .live_tasks
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
        self.set_timer(EVICTION_GRACE_TIMEOUT, Timer::GuestKillDue);
        self.record_event(EventKind::GuestsEnded {
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
            .is_some_and(|directive| directive.is_exit_requested)
        {
            let remaining_guests: Vec<Tid> = self
                .tasks
                .live_tasks
                .values()
                .filter(|t| t.is_guest())
                .map(|t| t.tid)
                .collect();
            for tid in remaining_guests {
                if !self.signal_without_process(tid, SIGKILL) {
                    self.send_to_tasker(ToTasker::Kill { tid });
                }
            }
        }
    }

    // ---- Pausing one guest

    /// Quiesces and stops a task that must be paused.
    pub(super) fn pause_guest(&mut self, tid: Tid) {
        if let Some(graceful_exit) = self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.graceful_exit.as_mut())
        {
            graceful_exit.was_paused = true;
        }
        // A task that was asked to exit may run until its time limit has expired. If it still runs
        // afterwards, it is paused.
        if self.tasks.get(tid).is_some_and(Task::is_exiting) {
            return;
        }
        let controlling_migration = self
            .controlling_migration(tid)
            .map(|source| (source.migration().id, source.awaits_reconnect()));
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        match (&task.pause, controlling_migration) {
            // A quiesce request is already outstanding.
            (Some(_), _) => {}
            (None, Some((id, is_resuming))) => {
                task.pause = Some(Pause {
                    resume_ids: vec![id],
                    pending_migration: None,
                    is_resuming,
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
        let is_quiescing =
            task.conn().is_some() || task.pause.as_ref().is_some_and(|pause| pause.is_resuming);
        self.stop_after_quiesce(tid, is_quiescing);
    }

    /// Stops a task: immediately, or at the end of its quiesce timeout if the task is quiescing.
    fn stop_after_quiesce(&mut self, tid: Tid, is_quiescing: bool) {
        let deadline = self
            .tasks
            .get(tid)
            .filter(|_| is_quiescing)
            .and_then(|task| self.pause_deadline(task));
        let remaining_time = deadline.map(|deadline| deadline.since(self.now));
        self.send_to_tasker(ToTasker::Pause {
            tid,
            run_time: remaining_time.unwrap_or_default(),
        });
    }

    /// Asks the library of a guest to quiesce: for the migration `waiting_migration`, or, if that
    /// is `None`, for a pause.
    fn request_quiesce(
        &mut self,
        tid: Tid,
        waiting_migration: Option<(MigrationId, Vec<PathBuf>)>,
    ) {
        let (migration, resume_token_paths) = waiting_migration.unwrap_or_else(|| {
            self.owner_control.last_pause_number += 1;
            let id = MigrationId(
                PAUSE_ID_BIT
                    | u64::from(self.config.host.index()) << 40
                    | self.owner_control.last_pause_number,
            );
            (id, vec![self.config.paths.resume_token_path(id)])
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
        self.outputs.push_back(Output::SendToTask {
            conn,
            message: ToTask::Quiesce {
                migration,
                token_paths: resume_token_paths,
            },
        });
    }

    /// Ends the pause of a task. If a migration controls the task, the task stays stopped and gets
    /// no resume token.
    pub(super) fn resume_guest(&mut self, tid: Tid) {
        let is_migrating = self.controlling_migration(tid).is_some();
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(pause) = &mut task.pause else {
            if task.graceful_exit.is_some() {
                // The task was allowed to run only for a limited time, to exit.
                self.send_to_tasker(ToTasker::Resume { tid });
            }
            return;
        };
        if task.connection_phase == ConnectionPhase::Left || pause.resume_ids.is_empty() {
            task.pause = None;
        } else if !is_migrating {
            pause.is_resuming = true;
            let ids = pause.resume_ids.clone();
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

    /// Stops an arriving task, which may already run, after the time `delay`. Has no effect if the
    /// task was not ordered to run, or was already ordered to pause.
    pub(super) fn pause_arrival(&mut self, tid: Tid, delay: Micros) {
        if let Some(arrival) = self
            .migrations
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.run_ordered && !a.pause_ordered)
        {
            arrival.pause_ordered = true;
            self.send_to_tasker(ToTasker::Pause {
                tid,
                run_time: delay,
            });
        }
    }

    /// Returns the source of the migration that controls this task; `None` if there is no such
    /// migration.
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
        let must_pause = self.must_pause(tid);
        let is_exiting = self.tasks.get(tid).is_some_and(Task::is_exiting);
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(pause) = task.pause.take() else {
            return;
        };
        for id in &pause.resume_ids {
            self.outputs.push_back(Output::RemoveToken {
                path: self.config.paths.resume_token_path(*id),
            });
        }
        if is_exiting {
            return self.request_handoff(tid);
        }
        if let Some(waiting_migration) = pause.pending_migration {
            // A migration waits for the task, so the library quiesces again, for that migration.
            self.request_quiesce(tid, Some(waiting_migration));
            if !must_pause && let Some(task) = self.tasks.get_mut(tid) {
                task.pause = None;
            }
        } else if must_pause {
            self.request_quiesce(tid, None);
            // The task may have been allowed to run so that it could reconnect, for a migration
            // that was aborted meanwhile.
            self.stop_after_quiesce(tid, true);
        } else if self.controlling_migration(tid).is_none() {
            self.release_inbox(tid);
        }
        self.start_queued_migration(tid);
    }

    /// Sets the pause state of a task that has arrived from another host. `resume_id` is the id
    /// under which the task's library is quiesced; `None` if the library is not quiesced.
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

    /// Resumes a quiesced library whose program must exit, so that the library can report its link
    /// states.
    pub(super) fn resume_to_exit(&mut self, tid: Tid) {
        let Some(pause) = self.tasks.get_mut(tid).and_then(|task| task.pause.as_mut()) else {
            return;
        };
        pause.is_resuming |= !pause.resume_ids.is_empty();
        let ids = pause.resume_ids.clone();
        ids.into_iter().for_each(|id| self.write_resume_token(id));
    }

    /// Ends the pause of a task whose process has exited, while the task itself continues. The
    /// resume tokens of the pause are removed.
    pub(super) fn end_pause(&mut self, tid: Tid) {
        self.owner_control.stopped_tasks.remove(tid);
        self.mark_paused(tid);
        let pause = self.tasks.get_mut(tid).and_then(|task| task.pause.take());
        for id in pause.into_iter().flat_map(|pause| pause.resume_ids) {
            self.outputs.push_back(Output::RemoveToken {
                path: self.config.paths.resume_token_path(id),
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

    /// Delivers the items that were held back for a task, unless the task is paused.
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
                run_time: Micros::default(),
            });
            // A migration may have waited until the task was quiesced.
            self.start_queued_migration(tid);
        }
    }

    /// Handles a migration's order to quiesce a task that may be paused. Returns true if the task
    /// is paused: the quiesce of the pause then serves the migration, too.
    pub(super) fn quiesce_paused_guest(
        &mut self,
        id: MigrationId,
        tid: Tid,
        resume_token_paths: &[PathBuf],
    ) -> bool {
        let must_pause = self.must_pause(tid);
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let Some(pause) = &mut task.pause else {
            return false;
        };
        pause.pending_migration = Some((id, resume_token_paths.to_vec()));
        if task.is_quiesced() {
            self.pass_to_source(id, SourceEvent::Quiesced);
        } else if must_pause {
            self.resume_to_quiesce(tid);
        }
        true
    }

    /// Allows a paused guest to run until its library has quiesced.
    pub(super) fn resume_to_quiesce(&mut self, tid: Tid) {
        if self.must_pause(tid) {
            self.send_to_tasker(ToTasker::ResumeToQuiesce {
                tid,
                library_run_time: LIBRARY_ONLY_TIMEOUT,
                run_time: RESUME_TO_QUIESCE_TIMEOUT,
            });
        }
    }

    /// Stops a task for a migration. If the task's library has already quiesced for a pause, the
    /// paths of the migration's resume tokens are written into the task's memory.
    pub(super) fn stop_for_migration(&mut self, id: MigrationId, tid: Tid) {
        let memory_write = self.tasks.get(tid).and_then(|task| {
            let (migration, resume_token_paths) = task.pause.as_ref()?.pending_migration.clone()?;
            let bytes = Redirect {
                migration,
                token_paths: resume_token_paths,
            }
            .encode();
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
            Err(why) => self.pass_to_source(id, SourceEvent::Stopped(Err(Failure::Engine(why)))),
        }
    }

    /// Handles the tasker's report on the order to stop a task for a migration. `Err` means that
    /// the task was not stopped.
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
        let Some(pause) = self.tasks.get_mut(tid).and_then(|task| task.pause.as_mut()) else {
            return;
        };
        if pause
            .pending_migration
            .take_if(|(pending_id, _)| *pending_id == id)
            .is_some()
        {
            if result.is_ok() {
                pause.resume_ids.clear();
            }
            pause.resume_ids.push(id);
        }
    }

    /// Resumes the library of a task after an aborted migration. Returns true if the task had
    /// quiesced for a pause: the library then resumes under the ids of that pause, now or when the
    /// pause ends.
    pub(super) fn resume_after_abort(&mut self, id: MigrationId, tid: Tid) -> bool {
        let must_pause = self.must_pause(tid);
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let Some(pause) = &mut task.pause else {
            return false;
        };
        pause.pending_migration = None;
        if must_pause {
            self.send_to_tasker(ToTasker::Pause {
                tid,
                run_time: Micros::default(),
            });
            // The task stays paused, so the migration need not wait for its library.
            self.pass_to_source(id, SourceEvent::Reconnected);
        } else {
            pause.is_resuming = true;
            let ids = pause.resume_ids.clone();
            ids.into_iter().for_each(|id| self.write_resume_token(id));
        }
        true
    }

    /// Returns the reason why this host does not accept a task that runs this program; `None` if
    /// the host accepts it.
    pub(super) fn guest_refusal(&self, tid: Tid, program: &str) -> Option<Refusal> {
        self.free_slots_for(tid, program).err()
    }

    /// Returns the number of further guests that this host accepts; at least 1. Guests on this host
    /// and arriving guests are counted, except `tid`.
    ///
    /// # Errors
    /// The reason why this host accepts no guest.
    pub(super) fn free_slots_for(&self, tid: Tid, program: &str) -> Result<usize, Refusal> {
        let host = self.config.host;
        match &self.owner_control.active_directive {
            Some(directive) => Err(Refusal::OwnerPresent {
                host,
                why: directive.directive.reason.clone(),
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
    /// Departing and suspended tasks are not counted, because they need no processor.
    fn free_slots_by_limits(&self, tid: Tid, program: &str) -> Result<usize, OwnerLimit> {
        if let Some(pattern) = self
            .owner_control
            .owner_agents
            .limits()
            .find_map(|limits| limits.blocking_pattern(program))
        {
            return Err(OwnerLimit::BlockedProgram(pattern.to_string()));
        }
        let limits = self.owner_control.owner_agents.limits();
        let limits = limits.filter_map(|limits| limits.guests_max.zip(limits.stated_guests_max()));
        let Some((guests_max, stated_max)) = limits.min() else {
            return Ok(usize::MAX);
        };
        // A task that is dumped for a checkpoint does not depart.
        let is_departing = |source: &&Source| {
            source.buffers_incoming() && source.migration().cause != MigrationCause::Checkpoint
        };
        let departing_tids: BTreeSet<Tid> = self
            .migrations
            .sources
            .values()
            .filter(is_departing)
            .map(|source| source.migration().tid)
            .collect();
        let is_counted_task = |task: &&Task| {
            let is_counted =
                task.tid != tid && task.is_guest() && !task.pinned && task.suspension.is_none();
            is_counted && !departing_tids.contains(&task.tid)
        };
        let is_counted_arrival =
            |arrival: &&ArrivingTask| arrival.tid != tid && arrival.suspension.is_none();
        let local_count = self
            .tasks
            .live_tasks
            .values()
            .filter(is_counted_task)
            .count();
        let arriving_count = self
            .migrations
            .arrivals
            .values()
            .filter(is_counted_arrival)
            .count();
        match usize::try_from(guests_max)
            .unwrap_or(usize::MAX)
            .saturating_sub(local_count + arriving_count)
        {
            0 => Err(match stated_max {
                0 => OwnerLimit::NoTasks,
                1 => OwnerLimit::OneTask,
                _ => OwnerLimit::Tasks(stated_max),
            }),
            free_slots => Ok(free_slots),
        }
    }

    /// Writes the resume token for a library that quiesced under this id.
    pub(super) fn write_resume_token(&mut self, migration: MigrationId) {
        let paths = &self.config.paths;
        let token = ResumeToken {
            migration,
            socket_path: paths.daemon_socket_path(),
        };
        self.outputs.push_back(Output::WriteToken {
            path: paths.resume_token_path(migration),
            token,
        });
    }
}
