//! Pauses the guest tasks of this host while its owner needs the machine.
//!
//! The host's load watcher decides; no other host is asked. Tasks that a user suspends pause the
//! same way (see `suspend`).
//!
//! A stopped process cannot close its rings, routes and daemon socket, and CRIU cannot dump it
//! while they are open. Each guest is therefore paused in this order:
//!
//! 1. The daemon asks the task's library to quiesce. The library has [`LET_GO_TIME`], at a priority
//!    below all other processes of the host.
//! 2. The task is stopped when it has quiesced or the timeout has expired.
//! 3. The task stays stopped, even if a migration of it fails. If it has quiesced, its next
//!    location is written into its memory ([`Redirect`]). If it has not, it runs for at most
//!    [`EASE_TIME`] when it must migrate: first only the library's threads, then the whole program.
//! 4. When the load watcher reports that guests are welcome, or its last directive has expired (see
//!    `speaker`), all guests resume except those that a user suspended.
//!
//! A task has one quiesce timeout per pause. If it was still reconnecting after an earlier pause or
//! migration when the timeout expired, it quiesces when its next migration needs it.

use super::handover::Arrival;
use super::speaker::Speakers;
use super::tasks::{Phase, Task};
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

/// Time a guest has to quiesce before it is stopped. Leaves 25 ms of the owner's 50 ms for
/// detection and delivery.
const LET_GO_TIME: Micros = Micros::from_millis(25);
/// The same for a suspended task. It is longer, because nothing waits for the task to stop.
pub(super) const SUSPEND_TIME: Micros = Micros::from_millis(200);
/// Time a task that was stopped before it quiesced may run to do so when it migrates.
const EASE_TIME: Micros = Micros::from_millis(200);
/// Part of [`EASE_TIME`] during which only the library's threads run, so that a computing program
/// does not delay them.
const ALONE_TIME: Micros = Micros::from_millis(100);
/// Time that guests have to exit before they are killed.
const END_TIME: Micros = Micros::from_millis(300);
const SIGTERM: i32 = 15;
const SIGKILL: i32 = 9;
/// Marks the ids of pauses without a migration. They consist of this bit, the host index and a
/// counter.
const STOP_BIT: u64 = 1 << 63;

/// Progress of pausing one task.
#[derive(Debug, Default)]
pub(super) struct Still {
    /// Ids under which the quiesced library may be resumed. Empty if no quiesce was requested.
    ids: Vec<MigrationId>,
    /// A migration that waits until the task has quiesced, and the paths of its tokens.
    pending: Option<(MigrationId, Vec<PathBuf>)>,
    /// A resume was sent; the library has not reconnected yet.
    pub(super) waking: bool,
}

/// The directive about guests that is in force on this host.
#[derive(Debug)]
struct Said {
    by: Tid,
    word: GuestDirective,
    at: Micros,
    /// Guests at the time of the directive.
    guests: Vec<Tid>,
    /// Those of them that are not stopped yet.
    running: BTreeSet<Tid>,
    /// The event log contains that all guests are paused.
    told: bool,
    /// The guests were asked to exit.
    ending: bool,
}

/// Directives of the owner of this host.
#[derive(Debug, Default)]
pub(super) struct Hosting {
    /// `None` while guests are welcome.
    stopped: Option<Said>,
    pub(super) speakers: Speakers,
    last: u64,
}

impl Hosting {
    /// True while guests must be paused.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.is_some()
    }

    /// True if guests are paused by a directive of this task.
    pub(super) fn is_by(&self, tid: Tid) -> bool {
        self.stopped.as_ref().is_some_and(|said| said.by == tid)
    }
}

impl Task {
    /// True for a task that the virtual machine needs for its own operation.
    pub(super) fn serves(&self) -> bool {
        self.servant || self.flags & TASK_SERVICE_FLAGS != 0
    }

    /// True if the owner of the host may pause the task: it was spawned, has not exited and does
    /// not serve the virtual machine.
    fn is_guest(&self) -> bool {
        self.spawned() && !self.serves() && self.exited.is_none()
    }

    /// True if its library has quiesced and waits to be resumed.
    pub(super) fn has_let_go(&self) -> bool {
        let waits = |still: &Still| !still.ids.is_empty() && !still.waking;
        self.phase == Phase::Detached && self.still.as_ref().is_some_and(waits)
    }

    /// True if this is an id under which its library may be resumed.
    pub(super) fn waits_for(&self, id: MigrationId) -> bool {
        self.still
            .as_ref()
            .is_some_and(|still| still.ids.contains(&id))
    }
}

impl Machine {
    /// Returns the time at which a task of this host must be stopped even if it has not quiesced;
    /// `None` if it need not be paused.
    fn still_by(&self, task: &Task) -> Option<Micros> {
        let owner = self
            .hosting
            .stopped
            .as_ref()
            .filter(|_| task.is_guest())
            .map(|said| said.at + LET_GO_TIME);
        owner
            .into_iter()
            .chain(
                task.suspended
                    .map(|suspended| suspended.since + SUSPEND_TIME),
            )
            .min()
    }

    /// True if a task that is here or arriving must be paused.
    pub(super) fn has_to_stand(&self, tid: Tid) -> bool {
        match self.tasks.get(tid) {
            Some(task) => self.still_by(task).is_some(),
            None => {
                let arrival = self.moves.arrivals.get(&tid);
                arrival
                    .is_some_and(|arrival| self.hosting.is_stopped() || arrival.suspended.is_some())
            }
        }
    }

    // ---- Directives about guests

    /// Handles a directive about guests, from a load watcher or from a program that the user has
    /// started from a command line.
    pub(super) fn guests_word(&mut self, by: Tid, id: RequestId, mut word: GuestDirective) {
        if self
            .tasks
            .get(by)
            .is_some_and(|task| task.spawned() && !task.servant)
        {
            let reason = "only a load watcher that the resource manager has started, or a program from a command line, \
                          may say what guests may do on this host";
            return self.fail(by, id, PvmError::Denied, reason);
        }
        word.reason
            .truncate(truncate(&word.reason, REASON_BYTES_MAX).len());
        self.take_word(by, word);
        self.reply(by, id, Reply::Done);
    }

    /// Puts a directive into force.
    pub(super) fn take_word(&mut self, by: Tid, word: GuestDirective) {
        let watches = self
            .tasks
            .get(by)
            .is_some_and(|task| task.servant && is_load_watcher(&task.name));
        self.hosting.speakers.spoke(by, &word, watches);
        match word.access {
            GuestAccess::Welcome => self.guests_go_on(&word.reason),
            GuestAccess::Paused {
                evict_at: leave_at, ..
            } => {
                let said = self.hosting.stopped.as_ref().map(|said| said.word.access);
                if let Some(at) = leave_at.filter(|_| said != Some(word.access)) {
                    self.timer(at.since(self.unix), Timer::GuestsLeave);
                }
                match &mut self.hosting.stopped {
                    Some(said) => (said.by, said.word) = (by, word),
                    None => self.stop_guests(by, word),
                }
            }
        }
    }

    fn stop_guests(&mut self, by: Tid, word: GuestDirective) {
        self.log(format!("guests are stopped: {}", word.reason));
        let why = word.reason.clone();
        let here: Vec<Tid> = self
            .tasks
            .live
            .values()
            .filter(|t| t.is_guest())
            .map(|t| t.tid)
            .collect();
        // Tasks that have just arrived are not in the task table yet.
        let coming = self
            .moves
            .arrivals
            .values()
            .filter(|a| a.run_ordered && !a.held);
        let coming: Vec<Tid> = coming.map(|a| a.tid).collect();
        let guests = [&here[..], &coming].concat();
        let running = guests.iter().copied().collect();
        self.hosting.stopped = Some(Said {
            by,
            word,
            at: self.now,
            guests,
            running,
            told: false,
            ending: false,
        });
        for tid in here {
            self.hold_guest(tid);
        }
        for tid in coming {
            self.hold_arrival(tid, LET_GO_TIME);
        }
        self.call_off_pre_copies(&why);
        self.copy_gives_way(&why);
        self.guests_step();
    }

    fn guests_go_on(&mut self, why: &str) {
        let Some(said) = self.hosting.stopped.take() else {
            return;
        };
        self.log(format!("guests go on: {why}"));
        let goes_on =
            |t: &&Task| (t.still.is_some() || t.ending.is_some()) && t.suspended.is_none();
        let still: Vec<Tid> = self
            .tasks
            .live
            .values()
            .filter(goes_on)
            .map(|t| t.tid)
            .collect();
        for tid in still {
            self.free_guest(tid);
        }
        let held = self
            .moves
            .arrivals
            .values()
            .filter(|a| a.held && a.suspended.is_none());
        for tid in held.map(|a| a.tid).collect::<Vec<Tid>>() {
            self.free_arrival(tid);
        }
        let guests = said.guests.into_iter();
        let guests = guests
            .filter(|tid| self.tasks.get(*tid).is_some_and(|t| t.suspended.is_none()))
            .collect();
        self.record(EventKind::GuestsResumed {
            host: self.config.host,
            guests,
            why: why.to_string(),
        });
    }

    /// Handles the tasker's report that no process of a guest runs any more.
    pub(super) fn guest_held(&mut self, tid: Tid) {
        self.guest_is_still(tid);
        self.guests_step();
    }

    fn guest_is_still(&mut self, tid: Tid) {
        if let Some(said) = &mut self.hosting.stopped {
            said.running.remove(&tid);
        }
    }

    fn guests_step(&mut self) {
        let (host, now) = (self.config.host, self.now);
        let is_there =
            |tid: &Tid| self.tasks.get(*tid).is_some() || self.moves.arrivals.contains_key(tid);
        if let Some(said) = &mut self.hosting.stopped {
            said.running.retain(is_there);
        }
        let Some(said) = self
            .hosting
            .stopped
            .as_mut()
            .filter(|said| said.running.is_empty() && !said.told)
        else {
            return;
        };
        said.told = true;
        let (guests, took, why) = (
            said.guests.clone(),
            now.since(said.at),
            said.word.reason.clone(),
        );
        self.record(EventKind::GuestsPaused {
            host,
            guests,
            duration: took,
            why,
        });
    }

    /// Removes a task that has ended or migrated away from the current pause.
    pub(super) fn guest_gone(&mut self, task: &Task) {
        for id in task.still.iter().flat_map(|still| &still.ids) {
            self.out.push_back(Output::RemoveToken {
                path: self.config.place.resume_token(*id),
            });
        }
        self.guest_is_still(task.tid);
        self.guests_step();
    }

    // ---- Eviction of guests

    /// Asks guests to exit if their eviction is due and the owner wants them killed. If the owner
    /// wants them migrated, the resource manager does that.
    pub(super) fn guests_leave(&mut self) {
        let unix = self.unix;
        let due = |said: &&mut Said| match said.word.access {
            GuestAccess::Paused {
                evict_at: Some(at),
                eviction: EvictionMode::Kill,
            } => at <= unix && !said.ending,
            _ => false,
        };
        let Some(said) = self.hosting.stopped.as_mut().filter(due) else {
            return;
        };
        said.ending = true;
        let why = said.word.reason.clone();
        let guests: Vec<Tid> = self
            .tasks
            .live
            .values()
            .filter(|t| t.is_guest())
            .map(|t| t.tid)
            .collect();
        for tid in guests.iter().copied() {
            if !self.signal_away(tid, SIGTERM) {
                self.tell_tasker(ToTasker::Signal {
                    tid,
                    signal: SIGTERM,
                });
            }
        }
        self.timer(END_TIME, Timer::GuestsEnd);
        self.record(EventKind::GuestsEnded {
            host: self.config.host,
            guests,
            why,
        });
    }

    /// Kills the guests that have not exited in time.
    pub(super) fn guests_end(&mut self) {
        if self
            .hosting
            .stopped
            .as_ref()
            .is_some_and(|said| said.ending)
        {
            let left: Vec<Tid> = self
                .tasks
                .live
                .values()
                .filter(|t| t.is_guest())
                .map(|t| t.tid)
                .collect();
            for tid in left {
                if !self.signal_away(tid, SIGKILL) {
                    self.tell_tasker(ToTasker::Kill { tid });
                }
            }
        }
    }

    // ---- Pausing one guest

    /// Quiesces and stops a task that must be paused.
    pub(super) fn hold_guest(&mut self, tid: Tid) {
        if let Some(ending) = self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.ending.as_mut())
        {
            ending.stood = true;
        }
        // A task that was asked to exit gets its grace period first; whatever remains of it is
        // paused afterwards.
        if self.tasks.get(tid).is_some_and(Task::is_ending) {
            return;
        }
        let leaving = self
            .source_of(tid)
            .map(|source| (source.migration().id, source.awaits_reconnect()));
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        match (&task.still, leaving) {
            // A quiesce request is already outstanding.
            (Some(_), _) => {}
            (None, Some((id, waking))) => {
                task.still = Some(Still {
                    ids: vec![id],
                    pending: None,
                    waking,
                })
            }
            (None, None) => {
                task.still = Some(Still::default());
                self.ask_guest(tid, None);
            }
        }
        let Some(task) = self.tasks.get(tid) else {
            return;
        };
        let lets_go =
            task.conn().is_some() || task.still.as_ref().is_some_and(|still| still.waking);
        self.hold_in_time(tid, lets_go);
    }

    /// Stops a task: immediately, or at the end of its quiesce timeout if it is quiescing.
    fn hold_in_time(&mut self, tid: Tid, lets_go: bool) {
        let by = self
            .tasks
            .get(tid)
            .filter(|_| lets_go)
            .and_then(|task| self.still_by(task));
        let left = by.map(|by| by.since(self.now));
        self.tell_tasker(ToTasker::Pause {
            tid,
            run_for: left.unwrap_or_default(),
        });
    }

    /// Asks the library of a guest to quiesce, for a waiting migration if there is one.
    fn ask_guest(&mut self, tid: Tid, waiting: Option<(MigrationId, Vec<PathBuf>)>) {
        let (migration, tokens) = waiting.unwrap_or_else(|| {
            self.hosting.last += 1;
            let id = MigrationId(
                STOP_BIT | u64::from(self.config.host.index()) << 40 | self.hosting.last,
            );
            (id, vec![self.config.place.resume_token(id)])
        });
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(conn) = task.conn() else { return };
        task.hold = true;
        task.still = Some(Still {
            ids: vec![migration],
            pending: None,
            waking: false,
        });
        self.out.push_back(Output::ToTask {
            conn,
            message: ToTask::Quiesce { migration, tokens },
        });
    }

    /// Resumes a paused task.
    pub(super) fn free_guest(&mut self, tid: Tid) {
        let moving = self.source_of(tid).is_some();
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(still) = &mut task.still else {
            if task.ending.is_some() {
                // The task was only allowed to run for a limited time, to exit.
                self.tell_tasker(ToTasker::Resume { tid });
            }
            return;
        };
        if task.phase == Phase::Left || still.ids.is_empty() {
            task.still = None;
        } else if !moving {
            still.waking = true;
            let ids = still.ids.clone();
            ids.into_iter().for_each(|id| self.write_token(id));
        }
        // A task that a migration controls stays stopped.
        self.tell_tasker(ToTasker::Resume { tid });
    }

    /// Resumes an arriving task that was marked to be paused.
    pub(super) fn free_arrival(&mut self, tid: Tid) {
        let Some(arrival) = self.moves.arrivals.get_mut(&tid) else {
            return;
        };
        if let Some(migration) = arrival.free() {
            self.write_token(migration);
        }
        self.tell_tasker(ToTasker::Resume { tid });
    }

    /// Pauses an arriving task that may already run.
    pub(super) fn hold_arrival(&mut self, tid: Tid, after: Micros) {
        if let Some(arrival) = self
            .moves
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.run_ordered && !a.held)
        {
            arrival.held = true;
            self.tell_tasker(ToTasker::Pause {
                tid,
                run_for: after,
            });
        }
    }

    /// Returns the migration that controls this task, if there is one.
    fn source_of(&self, tid: Tid) -> Option<&Source> {
        self.moves
            .sources
            .values()
            .find(|source| source.migration().tid == tid && source.buffers_incoming())
    }

    /// Quiesces a spawned task that has just connected, if it must be paused.
    pub(super) fn guest_connected(&mut self, tid: Tid) {
        if self.has_to_stand(tid) {
            self.ask_guest(tid, None);
        }
    }

    /// Handles the return of a library that had quiesced. Its new connection is already in use.
    pub(super) fn guest_came_back(&mut self, tid: Tid) {
        let stopped = self.has_to_stand(tid);
        let ending = self.tasks.get(tid).is_some_and(Task::is_ending);
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(still) = task.still.take() else {
            return;
        };
        for id in &still.ids {
            self.out.push_back(Output::RemoveToken {
                path: self.config.place.resume_token(*id),
            });
        }
        if ending {
            return self.ask_to_part(tid);
        }
        if let Some(waiting) = still.pending {
            // A migration waits for the task, so its library quiesces again, for that migration.
            self.ask_guest(tid, Some(waiting));
            if !stopped && let Some(task) = self.tasks.get_mut(tid) {
                task.still = None;
            }
        } else if stopped {
            self.ask_guest(tid, None);
            // The task may have been allowed to run so that it could reconnect, for a migration
            // that was aborted meanwhile.
            self.hold_in_time(tid, true);
        } else if self.source_of(tid).is_none() {
            self.release(tid);
        }
        self.settled(tid);
    }

    /// Takes over a task that has arrived from another host. `waits_for` is set if its library is
    /// still quiesced.
    pub(super) fn guest_arrived(&mut self, tid: Tid, waits_for: Option<MigrationId>) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        match waits_for {
            Some(id) => {
                task.hold = true;
                task.still = Some(Still {
                    ids: vec![id],
                    pending: None,
                    waking: false,
                });
            }
            None if self.has_to_stand(tid) => self.hold_guest(tid),
            None => {}
        }
    }

    /// Resumes a quiesced library whose program must exit, so that it can report its link states.
    pub(super) fn wake_to_end(&mut self, tid: Tid) {
        let Some(still) = self.tasks.get_mut(tid).and_then(|task| task.still.as_mut()) else {
            return;
        };
        still.waking |= !still.ids.is_empty();
        let ids = still.ids.clone();
        ids.into_iter().for_each(|id| self.write_token(id));
    }

    /// Ends the pause of a task whose process has exited, while the task itself continues. Its
    /// tokens are not needed any more.
    pub(super) fn still_no_more(&mut self, tid: Tid) {
        self.guest_is_still(tid);
        let still = self.tasks.get_mut(tid).and_then(|task| task.still.take());
        for id in still.into_iter().flat_map(|still| still.ids) {
            self.out.push_back(Output::RemoveToken {
                path: self.config.place.resume_token(id),
            });
        }
        self.guests_step();
    }

    /// Pauses the new process of a task if the task must be paused.
    pub(super) fn stand_if_it_has_to(&mut self, tid: Tid) {
        if self.has_to_stand(tid) {
            self.hold_guest(tid);
        }
    }

    // ---- Migration of paused guests

    /// Delivers the items that were kept for a task, unless it is paused.
    pub(super) fn release(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.get_mut(tid).filter(|task| task.still.is_none()) {
            task.hold = false;
            self.open_inbox(tid);
        }
    }

    /// Stops a guest whose library has quiesced.
    pub(super) fn guest_let_go(&mut self, tid: Tid) {
        if self.has_to_stand(tid)
            && self
                .tasks
                .get(tid)
                .is_some_and(|t| t.still.is_some() && !t.is_ending())
        {
            self.tell_tasker(ToTasker::Pause {
                tid,
                run_for: Micros::default(),
            });
            // A migration may have waited for that.
            self.settled(tid);
        }
    }

    /// Handles a migration's order to quiesce a task. True if the task is already quiescing for a
    /// pause, which then serves the migration, too.
    pub(super) fn quiesce_guest(&mut self, id: MigrationId, tid: Tid, tokens: &[PathBuf]) -> bool {
        let stopped = self.has_to_stand(tid);
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let Some(still) = &mut task.still else {
            return false;
        };
        still.pending = Some((id, tokens.to_vec()));
        if task.has_let_go() {
            self.source_event(id, SourceEvent::Quiesced);
        } else if stopped {
            self.ease(tid);
        }
        true
    }

    /// Allows a paused guest to run until its library has quiesced.
    pub(super) fn ease(&mut self, tid: Tid) {
        if self.has_to_stand(tid) {
            self.tell_tasker(ToTasker::ResumeToQuiesce {
                tid,
                library_only_for: ALONE_TIME,
                run_for: EASE_TIME,
            });
        }
    }

    /// Stops a task for a migration. A library that has already quiesced for a pause learns the
    /// migration's tokens from its memory.
    pub(super) fn stop_for_move(&mut self, id: MigrationId, tid: Tid) {
        let redirection = self.tasks.get(tid).and_then(|task| {
            let (migration, tokens) = task.still.as_ref()?.pending.clone()?;
            let bytes = Redirect { migration, tokens }.encode();
            Some(bytes.map(|bytes| MemoryWrite {
                address: task.redirect_at,
                bytes,
            }))
        });
        match redirection.transpose() {
            Ok(redirection) => self.tell_tasker(ToTasker::Stop {
                migration: id,
                tid,
                memory_write: redirection,
            }),
            Err(why) => self.source_event(id, SourceEvent::Stopped(Err(Failure::Engine(why)))),
        }
    }

    /// Handles the tasker's report that it has stopped a task for a migration, or could not.
    pub(super) fn stopped_for_move(&mut self, id: MigrationId, result: &Result<(), Failure>) {
        let Some(tid) = self
            .moves
            .sources
            .get(&id)
            .map(|source| source.migration().tid)
        else {
            return;
        };
        if result.is_ok() {
            // The tasker sends no other report for a guest that a migration has stopped.
            self.guest_held(tid);
        }
        let Some(still) = self.tasks.get_mut(tid).and_then(|task| task.still.as_mut()) else {
            return;
        };
        if still.pending.take_if(|(of, _)| *of == id).is_some() {
            if result.is_ok() {
                still.ids.clear();
            }
            still.ids.push(id);
        }
    }

    /// Resumes the library of a task after an aborted migration. True if the task had quiesced for
    /// a pause: it then resumes under the ids of that pause, now or when the pause ends.
    pub(super) fn wake_guest(&mut self, id: MigrationId, tid: Tid) -> bool {
        let stopped = self.has_to_stand(tid);
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let Some(still) = &mut task.still else {
            return false;
        };
        still.pending = None;
        if stopped {
            self.tell_tasker(ToTasker::Pause {
                tid,
                run_for: Micros::default(),
            });
            // Nothing remains to be done for the migration.
            self.source_event(id, SourceEvent::Reconnected);
        } else {
            still.waking = true;
            let ids = still.ids.clone();
            ids.into_iter().for_each(|id| self.write_token(id));
        }
        true
    }

    /// Returns the reason why a task that runs this program may not come to this host now.
    pub(super) fn no_guest(&self, tid: Tid, program: &str) -> Option<Refusal> {
        self.places_for(tid, program).err()
    }

    /// Returns the number of guests that may still come, at least one. Guests that are here or
    /// arriving count, except `tid`.
    ///
    /// # Errors
    /// The reason why this host accepts no guest.
    pub(super) fn places_for(&self, tid: Tid, program: &str) -> Result<usize, Refusal> {
        let host = self.config.host;
        match &self.hosting.stopped {
            Some(said) => Err(Refusal::OwnerPresent {
                host,
                why: said.word.reason.clone(),
            }),
            None => self
                .places_left(tid, program)
                .map_err(|why| Refusal::OwnerLimits { host, why }),
        }
    }

    /// The same while guests are welcome. Tasks that are leaving or suspended do not count, because
    /// they need no processor.
    fn places_left(&self, tid: Tid, program: &str) -> Result<usize, String> {
        if let Some(pattern) = self
            .hosting
            .speakers
            .limits()
            .find_map(|limits| limits.blocking_pattern(program))
        {
            return Err(format!("its owner lets nobody run {pattern}"));
        }
        let Some(most) = self
            .hosting
            .speakers
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
            .moves
            .sources
            .values()
            .filter(leaves)
            .map(|source| source.migration().tid)
            .collect();
        let works = |task: &&Task| {
            let counts =
                task.tid != tid && task.is_guest() && !task.pinned && task.suspended.is_none();
            counts && !leaving.contains(&task.tid)
        };
        let comes = |arrival: &&Arrival| arrival.tid != tid && arrival.suspended.is_none();
        let here = self.tasks.live.values().filter(works).count();
        let coming = self.moves.arrivals.values().filter(comes).count();
        match usize::try_from(most)
            .unwrap_or(usize::MAX)
            .saturating_sub(here + coming)
        {
            0 => Err(match most {
                0 => "its owner allows no tasks".to_string(),
                1 => "its owner allows one task, and it is there".to_string(),
                _ => format!("its owner allows {most} tasks, and they are there"),
            }),
            places => Ok(places),
        }
    }

    /// Writes the token that resumes the library that quiesced under this id.
    pub(super) fn write_token(&mut self, migration: MigrationId) {
        let place = &self.config.place;
        let token = ResumeToken {
            migration,
            socket: place.daemon_socket(),
        };
        self.out.push_back(Output::WriteToken {
            path: place.resume_token(migration),
            token,
        });
    }
}
