//! Guests stand still while the owner of this host wants it: decided here, without asking anybody else. A task that is
//! suspended stands still in the same way (see `suspend`).
//!
//! The load watcher of this host says so. A process that is stopped cannot let go of its rings, routes and socket any more,
//! which it has to do before it can move. So every guest is told to let go and has [`LET_GO_TIME`] for that, behind
//! everybody else on the host; then it is stopped, let go or not. It stays stopped whatever becomes of its moves: one that
//! has let go learns in its memory where it will go on ([`Redirect`]), and one that has not runs for [`EASE_TIME`] so that
//! it can: its library at first, and its program only if that is not enough. When the watcher says that guests are welcome, or ends, they are woken as after a move that came to nothing,
//! but for those that are suspended.
//!
//! From the moment from which a task has to stand still it has one span of time for letting go. What it did not get done by
//! then, because it was still coming back from something else, it does when a move needs it.

use super::handover::Arrival;
use super::speaker::Speakers;
use super::tasks::{Phase, Task};
use super::{Machine, Output, Timer};
use checkpoint_protocol::{Source, SourceEvent};
use sempa_proto::event::EventKind;
use sempa_proto::load::is_watcher;
use sempa_proto::migration::{Cause, Failure, Refusal};
use sempa_proto::owner::{Guests, GuestsWord, Leave, WHY_BYTES_MAX};
use sempa_proto::table::TASK_SERVES;
use sempa_proto::task::{Redirect, Reply, ResumeToken, ToTask};
use sempa_proto::tasker::{Redirection, ToTasker};
use sempa_proto::text::cut;
use sempa_proto::{Micros, MigrationId, PvmError, RequestId, Tid};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// After the watcher's word guests have so long to let go; then they are stopped. With the way of the word it leaves room
/// in the 50 ms that owners are promised.
const LET_GO_TIME: Micros = Micros::from_millis(25);
/// A task that is suspended has so long for the same: nobody waits for it to stop.
pub(super) const SUSPEND_TIME: Micros = Micros::from_millis(200);
/// A task that was stopped before it had let go runs so long for it when it is to move.
const EASE_TIME: Micros = Micros::from_millis(200);
/// Of that its library has so long for itself. A program that computes is not in its way.
const ALONE_TIME: Micros = Micros::from_millis(100);
/// Guests that were asked to end have so long for it.
const END_TIME: Micros = Micros::from_millis(300);
/// Signal of a polite end.
const SIGTERM: i32 = 15;
/// Signal of an end.
const SIGKILL: i32 = 9;
/// Numbers of the occasions on which guests let go without a move: this bit, the host, a count.
const STOP_BIT: u64 = 1 << 63;

/// Where a task stands that was told to let go because it has to stand still.
#[derive(Debug, Default)]
pub(super) struct Still {
    /// What its library may be waiting for, or will wait for when it has let go; none if nobody talks to it.
    ids: Vec<MigrationId>,
    /// The move that found it so, and where that one's tokens will be.
    pending: Option<(MigrationId, Vec<PathBuf>)>,
    /// It has been woken and has not come back.
    pub(super) waking: bool,
}

/// What somebody said about guests.
#[derive(Debug)]
struct Said {
    by: Tid,
    word: GuestsWord,
    at: Micros,
    /// Guests that were there.
    guests: Vec<Tid>,
    /// Those of them that may run yet.
    running: BTreeSet<Tid>,
    /// That all stand still is in the event log.
    told: bool,
    /// They were asked to end.
    ending: bool,
}

/// What this daemon knows of its owner's wishes.
#[derive(Debug, Default)]
pub(super) struct Hosting {
    /// The word by which guests are stopped; none while they are welcome.
    stopped: Option<Said>,
    pub(super) speakers: Speakers,
    last: u64,
}

impl Hosting {
    /// True while guests have to stand still.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.is_some()
    }

    /// True if guests are stopped by the word of this task.
    pub(super) fn is_by(&self, tid: Tid) -> bool {
        self.stopped.as_ref().is_some_and(|said| said.by == tid)
    }
}

impl Task {
    /// True for what the virtual machine needs for itself.
    pub(super) fn serves(&self) -> bool {
        self.servant || self.flags & TASK_SERVES != 0
    }

    /// True if the owner of the host may stop it: what was spawned, but for what the virtual machine needs for itself.
    fn is_guest(&self) -> bool {
        self.spawned() && !self.serves() && self.exited.is_none()
    }

    /// True if its library has let go of this daemon and waits to be woken.
    pub(super) fn has_let_go(&self) -> bool {
        let waits = |still: &Still| !still.ids.is_empty() && !still.waking;
        self.phase == Phase::Detached && self.still.as_ref().is_some_and(waits)
    }

    /// True if its library let go, or is to, by this number.
    pub(super) fn waits_for(&self, id: MigrationId) -> bool {
        self.still
            .as_ref()
            .is_some_and(|still| still.ids.contains(&id))
    }
}

impl Machine {
    /// When the time is over that a task of this host has for letting go before it stands still; `None` if it need not.
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

    /// True if a task that is here, or on its way, has to stand still.
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

    // ---- the word

    /// A load watcher, or the user by a program of his, says what guests may do here.
    pub(super) fn guests_word(&mut self, by: Tid, id: RequestId, mut word: GuestsWord) {
        if self
            .tasks
            .get(by)
            .is_some_and(|task| task.spawned() && !task.servant)
        {
            let reason = "only a load watcher that the resource manager has started, or a program from a command line, \
                          may say what guests may do on this host";
            return self.fail(by, id, PvmError::Denied, reason);
        }
        word.why.truncate(cut(&word.why, WHY_BYTES_MAX).len());
        self.take_word(by, word);
        self.reply(by, id, Reply::Done);
    }

    /// This counts now.
    pub(super) fn take_word(&mut self, by: Tid, word: GuestsWord) {
        let watches = self
            .tasks
            .get(by)
            .is_some_and(|task| task.servant && is_watcher(&task.name));
        self.hosting.speakers.spoke(by, &word, watches);
        match word.guests {
            Guests::Welcome => self.guests_go_on(&word.why),
            Guests::Stopped { leave_at, .. } => {
                let said = self.hosting.stopped.as_ref().map(|said| said.word.guests);
                if let Some(at) = leave_at.filter(|_| said != Some(word.guests)) {
                    self.timer(at.since(self.unix), Timer::GuestsLeave);
                }
                match &mut self.hosting.stopped {
                    Some(said) => (said.by, said.word) = (by, word),
                    None => self.stop_guests(by, word),
                }
            }
        }
    }

    fn stop_guests(&mut self, by: Tid, word: GuestsWord) {
        self.log(format!("guests are stopped: {}", word.why));
        let why = word.why.clone();
        let here: Vec<Tid> = self
            .tasks
            .live
            .values()
            .filter(|t| t.is_guest())
            .map(|t| t.tid)
            .collect();
        // Those that have just come are not quite here.
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
        self.record(EventKind::GuestsContinued {
            host: self.config.host,
            guests,
            why: why.to_string(),
        });
    }

    /// The tasker says that nothing of a guest runs any more.
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
            said.word.why.clone(),
        );
        self.record(EventKind::GuestsStopped {
            host,
            guests,
            took,
            why,
        });
    }

    /// A task is not a guest here any more: it has ended, or moved away.
    pub(super) fn guest_gone(&mut self, task: &Task) {
        for id in task.still.iter().flat_map(|still| &still.ids) {
            self.out.push_back(Output::RemoveToken {
                path: self.config.place.token(*id),
            });
        }
        self.guest_is_still(task.tid);
        self.guests_step();
    }

    // ---- the end of their time

    /// The time may have come at which guests are to leave. Those that are to move are moved by the resource manager.
    pub(super) fn guests_leave(&mut self) {
        let unix = self.unix;
        let due = |said: &&mut Said| match said.word.guests {
            Guests::Stopped {
                leave_at: Some(at),
                then: Leave::Kill,
            } => at <= unix && !said.ending,
            _ => false,
        };
        let Some(said) = self.hosting.stopped.as_mut().filter(due) else {
            return;
        };
        said.ending = true;
        let why = said.word.why.clone();
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

    /// Guests that were asked to end have had their time.
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

    // ---- one guest

    /// Has a task let go and stop that has to stand still.
    pub(super) fn hold_guest(&mut self, tid: Tid) {
        if let Some(ending) = self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.ending.as_mut())
        {
            ending.stood = true;
        }
        // One that is asked to end needs its time for that. What becomes of it then stands still.
        if self.tasks.get(tid).is_some_and(Task::is_ending) {
            return;
        }
        let leaving = self
            .source_of(tid)
            .map(|source| (source.of().id, source.is_waking()));
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        match (&task.still, leaving) {
            // It was told before, and has not come back since.
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

    /// Has a task stopped that has to stand still: at once, or, if it is letting go, when its time for that is over.
    fn hold_in_time(&mut self, tid: Tid, lets_go: bool) {
        let by = self
            .tasks
            .get(tid)
            .filter(|_| lets_go)
            .and_then(|task| self.still_by(task));
        let left = by.map(|by| by.since(self.now));
        self.tell_tasker(ToTasker::Hold {
            tid,
            after: left.unwrap_or_default(),
        });
    }

    /// Tells the library of a guest to let go, for this move if one waits for it.
    fn ask_guest(&mut self, tid: Tid, waiting: Option<(MigrationId, Vec<PathBuf>)>) {
        let (migration, tokens) = waiting.unwrap_or_else(|| {
            self.hosting.last += 1;
            let id = MigrationId(
                STOP_BIT | u64::from(self.config.host.index()) << 40 | self.hosting.last,
            );
            (id, vec![self.config.place.token(id)])
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

    /// A task that stood still goes on.
    pub(super) fn free_guest(&mut self, tid: Tid) {
        let moving = self.source_of(tid).is_some();
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(still) = &mut task.still else {
            if task.ending.is_some() {
                // It ran for some time only, to end.
                self.tell_tasker(ToTasker::GoOn { tid });
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
        // What a move has waits for that move.
        self.tell_tasker(ToTasker::GoOn { tid });
    }

    /// A task on its way here that was to stand still goes on.
    pub(super) fn free_arrival(&mut self, tid: Tid) {
        let Some(arrival) = self.moves.arrivals.get_mut(&tid) else {
            return;
        };
        if let Some(migration) = arrival.free() {
            self.write_token(migration);
        }
        self.tell_tasker(ToTasker::GoOn { tid });
    }

    /// A task on its way here that may run already has to stand still.
    pub(super) fn hold_arrival(&mut self, tid: Tid, after: Micros) {
        if let Some(arrival) = self
            .moves
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.run_ordered && !a.held)
        {
            arrival.held = true;
            self.tell_tasker(ToTasker::Hold { tid, after });
        }
    }

    /// The move of this task that has it, if there is one.
    fn source_of(&self, tid: Tid) -> Option<&Source> {
        self.moves
            .sources
            .values()
            .find(|source| source.of().tid == tid && source.holds())
    }

    /// A process connects as a task that was spawned here: while guests have to stand still it lets go at once.
    pub(super) fn guest_connected(&mut self, tid: Tid) {
        if self.has_to_stand(tid) {
            self.ask_guest(tid, None);
        }
    }

    /// A library that had let go has come back, on a connection that counts already.
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
                path: self.config.place.token(*id),
            });
        }
        if ending {
            return self.ask_to_part(tid);
        }
        if let Some(waiting) = still.pending {
            // A move waits for it: it goes on letting go, now for that one.
            self.ask_guest(tid, Some(waiting));
            if !stopped && let Some(task) = self.tasks.get_mut(tid) {
                task.still = None;
            }
        } else if stopped {
            self.ask_guest(tid, None);
            // It may have been let run for coming back, for the sake of a move that came to nothing meanwhile.
            self.hold_in_time(tid, true);
        } else if self.source_of(tid).is_none() {
            self.release(tid);
        }
        self.settled(tid);
    }

    /// A task that has come from another host is one of this host's now.
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

    /// A program is asked to end: a library that has let go comes back, so that it can say its last words.
    pub(super) fn wake_to_end(&mut self, tid: Tid) {
        let Some(still) = self.tasks.get_mut(tid).and_then(|task| task.still.as_mut()) else {
            return;
        };
        still.waking |= !still.ids.is_empty();
        let ids = still.ids.clone();
        ids.into_iter().for_each(|id| self.write_token(id));
    }

    /// The process of a task has ended, and the task has not: nobody waits for a token any more.
    pub(super) fn still_no_more(&mut self, tid: Tid) {
        self.guest_is_still(tid);
        let still = self.tasks.get_mut(tid).and_then(|task| task.still.take());
        for id in still.into_iter().flat_map(|still| still.ids) {
            self.out.push_back(Output::RemoveToken {
                path: self.config.place.token(id),
            });
        }
        self.guests_step();
    }

    /// A new process of a task begins: it stands still if it has to.
    pub(super) fn stand_if_it_has_to(&mut self, tid: Tid) {
        if self.has_to_stand(tid) {
            self.hold_guest(tid);
        }
    }

    // ---- moves of guests that stand still

    /// What is kept for a task goes to it again, unless it has to stand still.
    pub(super) fn release(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.get_mut(tid).filter(|task| task.still.is_none()) {
            task.hold = false;
            self.open_inbox(tid);
        }
    }

    /// The library of a guest has let go.
    pub(super) fn guest_let_go(&mut self, tid: Tid) {
        if self.has_to_stand(tid)
            && self
                .tasks
                .get(tid)
                .is_some_and(|t| t.still.is_some() && !t.is_ending())
        {
            self.tell_tasker(ToTasker::Hold {
                tid,
                after: Micros::default(),
            });
            // A move may have waited for that.
            self.settled(tid);
        }
    }

    /// A move wants the library to let go. True if it was told to before, to stand still: then this does the rest.
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

    /// Lets a guest run for the moment that its library needs.
    pub(super) fn ease(&mut self, tid: Tid) {
        if self.has_to_stand(tid) {
            self.tell_tasker(ToTasker::Ease {
                tid,
                alone: ALONE_TIME,
                after: EASE_TIME,
            });
        }
    }

    /// A move has the task stopped; a library that has let go already has to hear of the move's tokens.
    pub(super) fn stop_for_move(&mut self, id: MigrationId, tid: Tid) {
        let redirection = self.tasks.get(tid).and_then(|task| {
            let (migration, tokens) = task.still.as_ref()?.pending.clone()?;
            let bytes = Redirect { migration, tokens }.in_memory();
            Some(bytes.map(|bytes| Redirection {
                place: task.redirect_at,
                bytes,
            }))
        });
        match redirection.transpose() {
            Ok(redirection) => self.tell_tasker(ToTasker::Stop {
                migration: id,
                tid,
                redirection,
            }),
            Err(why) => self.source_event(id, SourceEvent::Stopped(Err(Failure::Engine(why)))),
        }
    }

    /// The tasker has stopped a task for a move, or could not.
    pub(super) fn stopped_for_move(&mut self, id: MigrationId, result: &Result<(), Failure>) {
        let Some(tid) = self.moves.sources.get(&id).map(|source| source.of().tid) else {
            return;
        };
        if result.is_ok() {
            // Whom a move has stopped before his time was over is not told of otherwise.
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

    /// A move came to nothing and the task's library is to be woken here. True if that is done with what it let go for
    /// before: now, or when it need not stand still any more.
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
            self.tell_tasker(ToTasker::Hold {
                tid,
                after: Micros::default(),
            });
            // Nothing is left to do for the move.
            self.source_event(id, SourceEvent::Reconnected);
        } else {
            still.waking = true;
            let ids = still.ids.clone();
            ids.into_iter().for_each(|id| self.write_token(id));
        }
        true
    }

    /// Why a task that runs this program may not come to this host now.
    pub(super) fn no_guest(&self, tid: Tid, program: &str) -> Option<Refusal> {
        self.places_for(tid, program).err()
    }

    /// For how many guests that run this program there is a place, besides those that are here or come, this one aside; one at least.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn places_for(&self, tid: Tid, program: &str) -> Result<usize, Refusal> {
        let host = self.config.host;
        match &self.hosting.stopped {
            Some(said) => Err(Refusal::OwnerThere {
                host,
                why: said.word.why.clone(),
            }),
            None => self
                .places_left(tid, program)
                .map_err(|why| Refusal::OwnerLimits { host, why }),
        }
    }

    /// The same while guests are welcome. Tasks that leave and those that are suspended need no processor.
    fn places_left(&self, tid: Tid, program: &str) -> Result<usize, String> {
        if let Some(pattern) = self
            .hosting
            .speakers
            .limits()
            .find_map(|limits| limits.blocked(program))
        {
            return Err(format!("its owner lets nobody run {pattern}"));
        }
        let Some(most) = self
            .hosting
            .speakers
            .limits()
            .filter_map(|limits| limits.cores)
            .min()
        else {
            return Ok(usize::MAX);
        };
        // One that is written for a checkpoint does not leave.
        let leaves = |source: &&Source| source.holds() && source.of().cause != Cause::Checkpoint;
        let leaving: BTreeSet<Tid> = self
            .moves
            .sources
            .values()
            .filter(leaves)
            .map(|source| source.of().tid)
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

    /// Writes the token that wakes the library that let go by this number.
    pub(super) fn write_token(&mut self, migration: MigrationId) {
        let place = &self.config.place;
        let token = ResumeToken {
            migration,
            socket: place.socket(),
        };
        self.out.push_back(Output::WriteToken {
            path: place.token(migration),
            token,
        });
    }
}
