//! The service's access to the persistent history: records events and decisions, restores the state
//! after a restart, and answers queries.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Estimates, LearnedCosts};
use crate::store::{HistoryWriter, LogPosition, decision_records};
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
const EVENT_PAGE_MAX: u32 = 1000;
/// Key of the values learned from tasks and migrations, within the learned values of the history.
const LEARNED_COSTS_KEY: u64 = 1;

/// History and related state of the service.
#[derive(Debug, Default)]
pub(super) struct HistoryState {
    pub(super) writer: HistoryWriter,
    /// The last recorded refusal of each task's migration, as (target, reason). The same refusal is
    /// not recorded twice in succession.
    recorded_refusals: BTreeMap<Tid, (HostId, String)>,
    /// Version of the learned values that were stored last.
    stored_version: u64,
    /// True if the stored history belongs to this virtual machine, and not to an earlier one of the
    /// same name.
    same_vm: bool,
}

impl HistoryState {
    pub(super) fn new(ledger: HistoryWriter) -> HistoryState {
        HistoryState {
            writer: ledger,
            ..HistoryState::default()
        }
    }
}

impl<V: VmApi> Service<V> {
    /// Adds the entries of the event log that follow the end of the history. Discards state of
    /// another virtual machine.
    pub(super) fn sync_history(&mut self) -> Result<(), Error> {
        let place = self.history.writer.history.log_position();
        let mut same_vm = false;
        if place.number > 0 {
            let stored_entry = self.vm.events(place.number, 1)?;
            // The master drops its oldest entries. If the entry at the end of the history was
            // dropped, the log of the same virtual machine begins after it.
            same_vm = stored_entry
                .first()
                .is_some_and(|e| e.number > place.number || LogPosition::after(e) == place);
            if !same_vm {
                self.history.writer.history.start_new_vm();
            }
        }
        self.history.same_vm = same_vm;
        self.read_missed_events()?;
        // The list must be requested after the log. Then a task that the log reports as started is
        // in the list or has ended.
        let (wall, tasks) = (self.vm.wall_clock(), self.vm.tasks()?);
        self.history.writer.history.reconcile(wall, &tasks);
        self.history
            .writer
            .history
            .record_decision(wall, DecisionKind::RmStarted { resumed: same_vm });
        Ok(())
    }

    /// Restores users' indices, holdings, jobs, ages of tasks, and learned values.
    pub(super) fn restore_state(&mut self) {
        let (now, wall) = (self.vm.now(), self.vm.wall_clock());
        let books = &self.history.writer.history;
        for (user, index, at) in books.indices() {
            self.spawns.restore_index(now, user, index, wall.since(at));
        }
        for task in books.running() {
            if !self.model.has_task(task.tid) {
                continue;
            }
            self.model.set_task_user(task.tid, task.user);
            let age = wall.since(task.started);
            if age <= now {
                self.model
                    .restore_task(task.tid, task.job, Micros(now.0 - age.0));
            }
            if task.counts_toward_limits {
                self.spawns
                    .task_started(now, task.tid, (task.user, task.job));
            }
        }
        if let Some(lessons) = books
            .learned(LEARNED_COSTS_KEY)
            .and_then(|bytes| from_bytes::<LearnedCosts>(bytes).ok())
        {
            let lessons = if self.history.same_vm {
                lessons
            } else {
                lessons.for_other_hosts()
            };
            self.model.restore_estimates(Estimates::restore(lessons));
            self.history.stored_version = self.model.estimates().version();
        }
    }

    /// Adds the entries of the event log that the history does not contain.
    fn read_missed_events(&mut self) -> Result<(), Error> {
        loop {
            let from = self.history.writer.history.log_position().number + 1;
            let events = self.vm.events(from, EVENT_PAGE_MAX)?;
            events
                .iter()
                .for_each(|event| self.history.writer.history.apply_event(event));
            if events.len() < EVENT_PAGE_MAX as usize {
                return Ok(());
            }
        }
    }

    /// Adds an event to the history. If events before it were missed, reads and adds them first.
    pub(super) fn record_in_history(&mut self, event: &Event) {
        let next = self.history.writer.history.log_position().number + 1;
        if event.number > next && self.read_missed_events().is_err() {
            // The daemon is gone. The next receive returns that error.
            return;
        }
        let books = &mut self.history.writer.history;
        books.apply_event(event);
        if let sempa_proto::event::EventKind::TaskStarted { tid, .. } = &event.kind
            && self.spawns.is_counted(*tid)
        {
            books.mark_counted(*tid);
        }
    }

    /// Orders a migration. Returns true if it has begun.
    pub(super) fn start_migration(
        &mut self,
        now: Micros,
        tid: Tid,
        (from, to): (HostId, HostId),
        cause: MigrationCause,
        expected: Option<MigrationBenefit>,
    ) -> bool {
        let begun = self.vm.migrate(tid, to, cause.clone());
        self.record_migration_order(tid, (from, to), cause, expected, begun.as_ref().err());
        match &begun {
            Ok(()) => self.model.migration_begun(now, tid, to),
            Err(error) => self.model.migration_not_begun(now, tid, to, error),
        }
        begun.is_ok()
    }

    /// Records that a migration was ordered, or that the order was refused.
    fn record_migration_order(
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
                    .history
                    .recorded_refusals
                    .get(&tid)
                    .is_some_and(|(host, told)| *host == to && told == why) =>
            {
                return;
            }
            Some(why) => drop(
                self.history
                    .recorded_refusals
                    .insert(tid, (to, why.clone())),
            ),
            None => drop(self.history.recorded_refusals.remove(&tid)),
        }
        let expected = expected.unwrap_or_else(|| {
            let cost = self.model.migration_cost(tid, (from, to));
            MigrationBenefit {
                gain: Micros::default(),
                cost,
            }
        });
        let (from, to) = (self.model.host_name(from), self.model.host_name(to));
        let decision = DecisionKind::MigrationOrdered {
            tid,
            from,
            to,
            cause,
            expected,
            refused,
        };
        self.history
            .writer
            .history
            .record_decision(self.vm.wall_clock(), decision);
    }

    /// Records the results of rebalancing migrations.
    pub(super) fn record_outcomes(&mut self) {
        for outcome in self.model.take_outcomes() {
            let decision =
                decision_records::rebalance_outcome(&outcome, |host| self.model.host_name(host));
            self.history
                .writer
                .history
                .record_decision(self.vm.wall_clock(), decision);
        }
    }

    /// Writes changes to the history file when they are due.
    pub(super) fn write_history(&mut self, now: Micros) {
        if self.history.writer.is_due(now) {
            self.history
                .recorded_refusals
                .retain(|tid, _| self.model.has_task(*tid));
            self.store_learned(now);
            if let Some(text) = self.history.writer.write(now) {
                self.log_note(text);
            }
        }
        self.history.writer.schedule_write(now);
    }

    /// Stores the users' indices and the learned values in the history.
    fn store_learned(&mut self, now: Micros) {
        let indices: Vec<(u32, f64)> = self.spawns.fair_share().indices(now).collect();
        let books = &mut self.history.writer.history;
        books.set_indices(self.vm.wall_clock(), indices);
        let estimates = self.model.estimates();
        if estimates.version() != self.history.stored_version
            && let Ok(bytes) = to_bytes(&estimates.to_learned_costs())
        {
            self.history.stored_version = estimates.version();
            books.set_learned(LEARNED_COSTS_KEY, bytes);
        }
    }

    /// Returns earlier decisions about a host, and its current state.
    fn explain_host(&mut self, name: String) -> RmReply {
        let id = self.model.host_by_name(&name);
        let drained = id.and_then(|id| self.model.drained_by(id));
        let mut answer = self
            .history
            .writer
            .history
            .answer(&RmQuery::HostDecisions(name));
        if let RmReply::Decisions {
            host_state: now, ..
        } = &mut answer
        {
            let mut holds =
                decision_records::host_state(self.model.snapshot(self.vm.now()), id, drained);
            if let HostState::Used(but) = &mut holds {
                but.extend(id.and_then(|id| self.spawns.describe_reservation(id)));
            }
            *now = Some(holds);
        }
        answer
    }

    /// Lists the waiting spawns of all users or of one.
    fn list_waiting(&self, user: Option<u32>) -> RmReply {
        let wanted = |waits: &WaitingSpawn| user.is_none_or(|user| user == waits.user);
        let all = self
            .spawns
            .list_waiting(self.vm.now(), self.vm.wall_clock());
        RmReply::WaitingSpawns(all.filter(wanted).take(REPLY_ENTRIES_MAX).collect())
    }

    /// Handles a query or a command of a client, and sends the reply.
    pub(super) fn answer_question(&mut self, message: &Message) {
        let answer = match decode::<RmQuery>(&message.body) {
            Ok(Some(RmQuery::Suspend { job, suspend })) => {
                self.suspend_job(message.src, job, suspend)
            }
            Ok(Some(RmQuery::Drain { host, within })) => self.drain(message.src, &host, within),
            Ok(Some(RmQuery::Undrain { host })) => self.undrain(message.src, &host),
            Ok(Some(RmQuery::DrainStatus { host })) => self.drain_progress(&host),
            Ok(Some(RmQuery::Kill(job))) => self.kill_job(message.src, job),
            Ok(Some(RmQuery::KillStatus(job))) => self.kill_progress(job),
            Ok(Some(RmQuery::CancelVacated(job))) => self.cancel_restart(message.src, job),
            Ok(Some(RmQuery::HostDecisions(name))) => self.explain_host(name),
            Ok(Some(RmQuery::WaitingSpawns { user })) => self.list_waiting(user),
            Ok(Some(question)) => {
                self.store_learned(self.vm.now());
                self.history.writer.history.answer(&question)
            }
            Ok(None) | Err(_) => RmReply::UnsupportedVersion(RM_VERSION),
        };
        if let Ok(bytes) = encode(&answer) {
            // The reply fails if the client has ended.
            drop(
                self.vm
                    .send_rm(message.src, TAG_REPLY, message.wid, Bytes::from(bytes)),
            );
        }
    }
}
