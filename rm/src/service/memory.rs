//! The service's access to the persistent history: records events and decisions, restores the state
//! after a restart, and answers queries.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Estimates, Lessons};
use crate::store::{Ledger, Place, record};
use bytes::Bytes;
use libpvm::{Error, MigrateError};
use sempa_proto::event::Event;
use sempa_proto::frame::{from_bytes, to_bytes};
use sempa_proto::migration::MigrationCause;
use sempa_proto::rm::{
    DecisionKind, HostState, MigrationBenefit, REPLY_ENTRIES_MAX, RM_VERSION, RmQuery, RmReply,
    TAG_REPLY, WaitingSpawn, decode, encode,
};
use sempa_proto::{HostId, Message, Micros, Tid};
use std::collections::BTreeMap;

/// Maximum number of event log entries requested at once.
const EVENTS_AT_ONCE_MAX: u32 = 1000;
/// Key of the values learned from tasks and migrations, within the learned values of the history.
const LESSONS: u64 = 1;

/// History and related state of the service.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pub(super) ledger: Ledger,
    /// The last recorded refusal of each task's migration, as (target, reason). The same refusal is
    /// not recorded twice in succession.
    refusals: BTreeMap<Tid, (HostId, String)>,
    /// Version of the learned values that were stored last.
    learned: u64,
    /// True if the stored history belongs to this virtual machine, and not to an earlier one of the
    /// same name.
    again: bool,
}

impl Memory {
    pub(super) fn new(ledger: Ledger) -> Memory {
        Memory {
            ledger,
            ..Memory::default()
        }
    }
}

impl<V: VmApi> Service<V> {
    /// Adds the entries of the event log that follow the end of the history. Discards state of
    /// another virtual machine.
    pub(super) fn remember(&mut self) -> Result<(), Error> {
        let place = self.memory.ledger.books.place();
        let mut again = false;
        if place.number > 0 {
            let there = self.vm.events(place.number, 1)?;
            // The master drops its oldest entries. If the entry at the end of the history was
            // dropped, the log of the same virtual machine begins after it.
            again = there
                .first()
                .is_some_and(|e| e.number > place.number || Place::behind(e) == place);
            if !again {
                self.memory.ledger.books.begin_anew();
            }
        }
        self.memory.again = again;
        self.catch_up()?;
        // The list must be requested after the log. Then a task that the log reports as started is
        // in the list or has ended.
        let (wall, tasks) = (self.vm.wall(), self.vm.tasks()?);
        self.memory.ledger.books.reconcile(wall, &tasks);
        self.memory
            .ledger
            .books
            .decided(wall, DecisionKind::RmStarted { resumed: again });
        Ok(())
    }

    /// Restores users' indices, holdings, jobs, ages of tasks, and learned values.
    pub(super) fn recall(&mut self) {
        let (now, wall) = (self.vm.now(), self.vm.wall());
        let books = &self.memory.ledger.books;
        for (user, index, at) in books.indices() {
            self.spawns.recall_index(now, user, index, wall.since(at));
        }
        for task in books.running() {
            if !self.model.knows(task.tid) {
                continue;
            }
            self.model.belongs(task.tid, task.user);
            let age = wall.since(task.started);
            if age <= now {
                self.model
                    .recall_task(task.tid, task.job, Micros(now.0 - age.0));
            }
            if task.counts_toward_limits {
                self.spawns
                    .task_started(now, task.tid, (task.user, task.job));
            }
        }
        if let Some(lessons) = books
            .learned(LESSONS)
            .and_then(|bytes| from_bytes::<Lessons>(bytes).ok())
        {
            let lessons = if self.memory.again {
                lessons
            } else {
                lessons.of_other_hosts()
            };
            self.model.recall_estimates(Estimates::recall(lessons));
            self.memory.learned = self.model.estimates().version();
        }
    }

    /// Adds the entries of the event log that the history does not contain.
    fn catch_up(&mut self) -> Result<(), Error> {
        loop {
            let from = self.memory.ledger.books.place().number + 1;
            let events = self.vm.events(from, EVENTS_AT_ONCE_MAX)?;
            events
                .iter()
                .for_each(|event| self.memory.ledger.books.event(event));
            if events.len() < EVENTS_AT_ONCE_MAX as usize {
                return Ok(());
            }
        }
    }

    /// Adds an event to the history. If events before it were missed, reads and adds them first.
    pub(super) fn note_down(&mut self, event: &Event) {
        let next = self.memory.ledger.books.place().number + 1;
        if event.number > next && self.catch_up().is_err() {
            // The daemon is gone. The next receive returns that error.
            return;
        }
        let books = &mut self.memory.ledger.books;
        books.event(event);
        if let sempa_proto::event::EventKind::TaskStarted { tid, .. } = &event.kind
            && self.spawns.counts(*tid)
        {
            books.counts(*tid);
        }
    }

    /// Orders a migration. Returns true if it has begun.
    pub(super) fn begin_move(
        &mut self,
        now: Micros,
        tid: Tid,
        (from, to): (HostId, HostId),
        cause: MigrationCause,
        expected: Option<MigrationBenefit>,
    ) -> bool {
        let begun = self.vm.migrate(tid, to, cause.clone());
        self.told_to_go(tid, (from, to), cause, expected, begun.as_ref().err());
        match &begun {
            Ok(()) => self.model.move_begun(now, tid, to),
            Err(error) => self.model.move_not_begun(now, tid, to, error),
        }
        begun.is_ok()
    }

    /// Records that a migration was ordered, or that the order was refused.
    fn told_to_go(
        &mut self,
        tid: Tid,
        (from, to): (HostId, HostId),
        cause: MigrationCause,
        expected: Option<MigrationBenefit>,
        error: Option<&MigrateError>,
    ) {
        let refused = error.map(ToString::to_string);
        match &refused {
            Some(why)
                if self
                    .memory
                    .refusals
                    .get(&tid)
                    .is_some_and(|(host, told)| *host == to && told == why) =>
            {
                return;
            }
            Some(why) => drop(self.memory.refusals.insert(tid, (to, why.clone()))),
            None => drop(self.memory.refusals.remove(&tid)),
        }
        let expected = expected.unwrap_or_else(|| {
            let cost = self.model.cost(tid, (from, to));
            MigrationBenefit {
                gain: Micros::default(),
                cost,
            }
        });
        let (from, to) = (self.model.host_name(from), self.model.host_name(to));
        let what = DecisionKind::MigrationOrdered {
            tid,
            from,
            to,
            cause,
            expected,
            refused,
        };
        self.memory.ledger.books.decided(self.vm.wall(), what);
    }

    /// Records the results of rebalancing migrations.
    pub(super) fn note_outcomes(&mut self) {
        for outcome in self.model.outcomes() {
            let what = record::came_out(&outcome, |host| self.model.host_name(host));
            self.memory.ledger.books.decided(self.vm.wall(), what);
        }
    }

    /// Writes changes to the history file when they are due.
    pub(super) fn write_down(&mut self, now: Micros) {
        if self.memory.ledger.is_due(now) {
            self.memory.refusals.retain(|tid, _| self.model.knows(*tid));
            self.learn(now);
            if let Some(text) = self.memory.ledger.write(now) {
                self.note(text);
            }
        }
        self.memory.ledger.plan(now);
    }

    /// Stores the users' indices and the learned values in the history.
    fn learn(&mut self, now: Micros) {
        let indices: Vec<(u32, f64)> = self.spawns.fair().indices(now).collect();
        let books = &mut self.memory.ledger.books;
        books.set_indices(self.vm.wall(), indices);
        let estimates = self.model.estimates();
        if estimates.version() != self.memory.learned
            && let Ok(bytes) = to_bytes(&estimates.lessons())
        {
            self.memory.learned = estimates.version();
            books.learn(LESSONS, bytes);
        }
    }

    /// Returns earlier decisions about a host, and its current state.
    fn why_host(&mut self, name: String) -> RmReply {
        let id = self.model.host_called(&name);
        let drained = id.and_then(|id| self.model.drained_by(id));
        let mut answer = self
            .memory
            .ledger
            .books
            .answer(&RmQuery::HostDecisions(name));
        if let RmReply::Decisions {
            host_state: now, ..
        } = &mut answer
        {
            let mut holds = record::host_now(self.model.snapshot(self.vm.now()), id, drained);
            if let HostState::Used(but) = &mut holds {
                but.extend(id.and_then(|id| self.spawns.kept_for(id)));
            }
            *now = Some(holds);
        }
        answer
    }

    /// Lists the waiting spawns of all users or of one.
    fn waiting(&self, user: Option<u32>) -> RmReply {
        let wanted = |waits: &WaitingSpawn| user.is_none_or(|user| user == waits.user);
        let all = self.spawns.waits(self.vm.now(), self.vm.wall());
        RmReply::WaitingSpawns(all.filter(wanted).take(REPLY_ENTRIES_MAX).collect())
    }

    /// Handles a query or a command of a client, and sends the reply.
    pub(super) fn answer(&mut self, message: &Message) {
        let answer = match decode::<RmQuery>(&message.body) {
            Ok(Some(RmQuery::Suspend { job, suspend })) => {
                self.suspend_job(message.src, job, suspend)
            }
            Ok(Some(RmQuery::Drain { host, within })) => self.drain(message.src, &host, within),
            Ok(Some(RmQuery::Undrain { host })) => self.undrain(message.src, &host),
            Ok(Some(RmQuery::DrainStatus { host })) => self.draining(&host),
            Ok(Some(RmQuery::Kill(job))) => self.kill_job(message.src, job),
            Ok(Some(RmQuery::KillStatus(job))) => self.killed(job),
            Ok(Some(RmQuery::CancelVacated(job))) => self.unpark(message.src, job),
            Ok(Some(RmQuery::HostDecisions(name))) => self.why_host(name),
            Ok(Some(RmQuery::WaitingSpawns { user })) => self.waiting(user),
            Ok(Some(question)) => {
                self.learn(self.vm.now());
                self.memory.ledger.books.answer(&question)
            }
            Ok(None) | Err(_) => RmReply::UnsupportedVersion(RM_VERSION),
        };
        if let Ok(bytes) = encode(&answer) {
            // The reply fails if the client has ended.
            drop(
                self.vm
                    .answer(message.src, TAG_REPLY, message.wid, Bytes::from(bytes)),
            );
        }
    }
}
