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

/// Maximum number of event log entries that are requested at once.
const EVENT_PAGE_MAX: u32 = 1000;
/// Key of the values learned from tasks and migrations, within the learned values of the history.
const LEARNED_COSTS_KEY: u64 = 1;

/// The history, and the state that the service needs to record and store it.
#[derive(Debug, Default)]
pub(super) struct HistoryState {
    pub(super) writer: HistoryWriter,
    /// The last recorded refusal of each task's migration, as (target, reason). The same refusal is
    /// not recorded twice in succession.
    recorded_refusals: BTreeMap<Tid, (HostId, String)>,
    /// Version of the learned values that were stored most recently.
    stored_estimates_version: u64,
    /// True if the stored history belongs to this virtual machine. False if it belongs to an
    /// earlier virtual machine of the same name.
    is_same_vm: bool,
}

impl HistoryState {
    pub(super) fn new(history_writer: HistoryWriter) -> Self {
        Self {
            writer: history_writer,
            ..Self::default()
        }
    }
}

impl<V: VmApi> Service<V> {
    /// Adds the entries of the event log that follow the end of the history. If the history belongs
    /// to another virtual machine, discards the state of that virtual machine first.
    pub(super) fn sync_history(&mut self) -> Result<(), Error> {
        let end_position = self.history.writer.history.log_position();
        let mut belongs_to_same_vm = false;
        if end_position.event_number > 0 {
            let stored_entry = self.vm.events(end_position.event_number, 1)?;
            // The master drops its oldest entries. If the entry at the end of the history was
            // dropped, the first entry in the log of the same virtual machine has a greater number.
            belongs_to_same_vm = stored_entry.first().is_some_and(|e| {
                e.number > end_position.event_number || LogPosition::after_event(e) == end_position
            });
            if !belongs_to_same_vm {
                self.history.writer.history.start_new_vm();
            }
        }
        self.history.is_same_vm = belongs_to_same_vm;
        self.read_missed_events()?;
        // The task list must be requested after the log. A task that the log reports as started is
        // then in the list, or has ended.
        let (wall_time, mut tasks) = (self.vm.wall_clock(), self.vm.tasks()?);
        tasks.retain(|task| !task.is_leftover());
        self.history
            .writer
            .history
            .reconcile_tasks(wall_time, &tasks);
        self.history.writer.history.record_decision(
            wall_time,
            DecisionKind::RmStarted {
                continues_state: belongs_to_same_vm,
            },
        );
        Ok(())
    }

    /// Restores the indices and held processors of the users, the jobs and ages of tasks, and the
    /// learned values.
    pub(super) fn restore_state(&mut self) {
        let (now, wall_time) = (self.vm.now(), self.vm.wall_clock());
        let stored_history = &self.history.writer.history;
        for (user, index, indexed_at) in stored_history.user_indices() {
            self.spawns
                .restore_index(now, user, index, wall_time.since(indexed_at));
        }
        for task in stored_history.running_tasks() {
            if !self.model.has_task(task.tid) {
                continue;
            }
            self.model.set_task_user(task.tid, task.user);
            let age = wall_time.since(task.started_at);
            if age <= now {
                self.model
                    .restore_task(task.tid, task.job, Micros(now.0 - age.0));
            }
            if task.counts_toward_limits {
                self.spawns.count_task(now, task.tid, (task.user, task.job));
            }
        }
        if let Some(learned_costs) = stored_history
            .learned_value(LEARNED_COSTS_KEY)
            .and_then(|bytes| from_bytes::<LearnedCosts>(bytes).ok())
        {
            let learned_costs = if self.history.is_same_vm {
                learned_costs
            } else {
                learned_costs.for_other_hosts()
            };
            self.model
                .restore_estimates(Estimates::restore(learned_costs));
            self.history.stored_estimates_version = self.model.estimates().version();
        }
    }

    /// Adds the entries of the event log that the history does not contain.
    fn read_missed_events(&mut self) -> Result<(), Error> {
        loop {
            let first_number = self.history.writer.history.log_position().event_number + 1;
            let events = self.vm.events(first_number, EVENT_PAGE_MAX)?;
            events
                .iter()
                .for_each(|event| self.history.writer.history.apply_event(event));
            if events.len() < EVENT_PAGE_MAX as usize {
                return Ok(());
            }
        }
    }

    /// Adds an event to the history. If earlier events were missed, reads and adds them first.
    pub(super) fn add_to_history(&mut self, event: &Event) {
        let next_number = self.history.writer.history.log_position().event_number + 1;
        if event.number > next_number && self.read_missed_events().is_err() {
            // The daemon is gone. The next receive returns the same error.
            return;
        }
        let stored_history = &mut self.history.writer.history;
        stored_history.apply_event(event);
        if let sempa_proto::event::EventKind::TaskStarted { tid, .. } = &event.kind
            && self.spawns.is_counted(*tid)
        {
            stored_history.mark_counted(*tid);
        }
    }

    /// Orders a migration. Returns true if it has started.
    pub(super) fn start_migration(
        &mut self,
        now: Micros,
        tid: Tid,
        (source, target): (HostId, HostId),
        cause: MigrationCause,
        expected_benefit: Option<MigrationBenefit>,
    ) -> bool {
        let start_result = self.vm.migrate(tid, target, cause.clone());
        self.record_migration_order(
            tid,
            (source, target),
            cause,
            expected_benefit,
            start_result.as_ref().err(),
        );
        match &start_result {
            Ok(()) => self.model.record_migration_start(now, tid, target),
            Err(error) => self.model.record_start_error(now, tid, target, error),
        }
        start_result.is_ok()
    }

    /// Records that a migration was ordered or refused. A refusal that was recorded last for this
    /// task is not recorded again.
    fn record_migration_order(
        &mut self,
        tid: Tid,
        (source, target): (HostId, HostId),
        cause: MigrationCause,
        expected_benefit: Option<MigrationBenefit>,
        error: Option<&MigrateError>,
    ) {
        let refusal = error.map(ToString::to_string);
        match &refusal {
            Some(reason)
                if self.history.recorded_refusals.get(&tid).is_some_and(
                    |(host, recorded_reason)| *host == target && recorded_reason == reason,
                ) =>
            {
                return;
            }
            Some(reason) => drop(
                self.history
                    .recorded_refusals
                    .insert(tid, (target, reason.clone())),
            ),
            None => drop(self.history.recorded_refusals.remove(&tid)),
        }
        let expected_benefit = expected_benefit.unwrap_or_else(|| {
            let cost = self.model.migration_cost(tid, (source, target));
            MigrationBenefit {
                gain: Micros::default(),
                cost,
            }
        });
        let (source, target) = (self.model.host_name(source), self.model.host_name(target));
        let decision = DecisionKind::MigrationOrdered {
            tid,
            from: source,
            to: target,
            cause,
            expected: expected_benefit,
            refused: refusal,
        };
        self.history
            .writer
            .history
            .record_decision(self.vm.wall_clock(), decision);
    }

    /// Records the outcomes of rebalancing migrations.
    pub(super) fn record_rebalance_outcomes(&mut self) {
        for outcome in self.model.take_prediction_outcomes() {
            let decision =
                decision_records::rebalance_outcome(&outcome, |host| self.model.host_name(host));
            self.history
                .writer
                .history
                .record_decision(self.vm.wall_clock(), decision);
        }
    }

    /// Writes changes to the history file when they are due.
    pub(super) fn write_history_if_due(&mut self, now: Micros) {
        if self.history.writer.is_due(now) {
            self.history
                .recorded_refusals
                .retain(|tid, _| self.model.has_task(*tid));
            self.store_learned_values(now);
            if let Some(error_note) = self.history.writer.send_changes(now) {
                self.log_note(error_note);
            }
        }
        self.history.writer.schedule_write(now);
    }

    /// Stores the users' indices and the learned values in the history.
    fn store_learned_values(&mut self, now: Micros) {
        let indices: Vec<(u32, f64)> = self.spawns.fair_share().user_indices(now).collect();
        let stored_history = &mut self.history.writer.history;
        stored_history.set_user_indices(self.vm.wall_clock(), indices);
        let estimates = self.model.estimates();
        if estimates.version() != self.history.stored_estimates_version
            && let Ok(bytes) = to_bytes(&estimates.to_learned_costs())
        {
            self.history.stored_estimates_version = estimates.version();
            stored_history.set_learned_value(LEARNED_COSTS_KEY, bytes);
        }
    }

    /// Returns the recorded decisions about a host, and its current state.
    fn host_decisions_reply(&mut self, name: String) -> RmReply {
        let id = self.model.host_by_name(&name);
        let drain_requester = id.and_then(|id| self.model.drain_requester(id));
        let mut reply = self
            .history
            .writer
            .history
            .answer_query(&RmQuery::HostDecisions(name));
        if let RmReply::Decisions { host_state, .. } = &mut reply {
            let mut state = decision_records::host_state(
                self.model.update_snapshot(self.vm.now()),
                id,
                drain_requester,
            );
            if let HostState::Used(exclusions) = &mut state {
                exclusions.extend(id.and_then(|id| self.spawns.describe_reservation(id)));
            }
            *host_state = Some(state);
        }
        reply
    }

    /// Returns the waiting spawns of one user, or of all users if `user` is `None`.
    fn waiting_spawns_reply(&self, user: Option<u32>) -> RmReply {
        let belongs_to_user =
            |waiting_spawn: &WaitingSpawn| user.is_none_or(|user| user == waiting_spawn.user);
        let waiting_spawns = self
            .spawns
            .waiting_entries(self.vm.now(), self.vm.wall_clock());
        RmReply::WaitingSpawns(
            waiting_spawns
                .filter(belongs_to_user)
                .take(REPLY_ENTRIES_MAX)
                .collect(),
        )
    }

    /// Handles a query or a command of a client, and sends the reply.
    pub(super) fn handle_query(&mut self, message: &Message) {
        let reply_to_client = match decode::<RmQuery>(&message.body) {
            Ok(Some(RmQuery::Suspend { job, suspend })) => {
                self.set_job_suspended(message.src, job, suspend)
            }
            Ok(Some(RmQuery::Drain {
                host,
                time_limit: time_until_deadline,
            })) => self.start_drain(message.src, &host, time_until_deadline),
            Ok(Some(RmQuery::Undrain { host })) => self.end_drain(message.src, &host),
            Ok(Some(RmQuery::DrainStatus { host })) => self.drain_progress(&host),
            Ok(Some(RmQuery::Kill(job))) => self.kill_job(message.src, job),
            Ok(Some(RmQuery::KillStatus(job))) => self.kill_progress(job),
            Ok(Some(RmQuery::CancelVacated(job))) => self.cancel_restart(message.src, job),
            Ok(Some(RmQuery::HostDecisions(name))) => self.host_decisions_reply(name),
            Ok(Some(RmQuery::WaitingSpawns { user })) => self.waiting_spawns_reply(user),
            Ok(Some(query)) => {
                self.store_learned_values(self.vm.now());
                self.history.writer.history.answer_query(&query)
            }
            Ok(None) | Err(_) => RmReply::UnsupportedVersion(RM_VERSION),
        };
        if let Ok(bytes) = encode(&reply_to_client) {
            // The send fails if the client has ended.
            drop(
                self.vm
                    .send_rm(message.src, TAG_REPLY, message.wid, Bytes::from(bytes)),
            );
        }
    }
}
