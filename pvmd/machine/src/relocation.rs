//! Keeps the order of items for a task while it changes hosts, and updates its location.
//!
//! 1. From the order to quiesce on, the source holds back all items for the task.
//! 2. When the new location is distributed, every daemon sends its items for the task to the
//!    target. After the last item that a daemon sent to the source, it sends a
//!    [`DataMsg::RouteDrained`] to the source.
//! 3. After the commit the source forwards the items that it held back, in order. When a
//!    [`DataMsg::RouteDrained`] has arrived from every daemon, the source sends a
//!    [`DataMsg::ForwardingComplete`].
//! 4. The target holds back items that other daemons send to it directly. The task receives these
//!    after all forwarded items.
//!
//! A session between two live daemons may break and lose messages in transit. The source therefore
//! retains what it has forwarded until no message can be in transit any more. When a new session is
//! established, both daemons repeat the messages that may be lost.

use super::restart_engine::{RestartVerdict, TERMINATING_SIGNALS};
use super::suspension::TaskSuspension;
use super::tasks::{ConnectionPhase, Inbox, Task};
use super::{ConnId, Machine, Output};
use checkpoint_protocol::TargetEvent;
use sempa_proto::event::EventKind;
use sempa_proto::host::{DataMsg, HostMsg, Location, PendingItem, TaskRecord};
use sempa_proto::migration::{Migration, RestartGroup, Usage};
use sempa_proto::suspend::Suspensions;
use sempa_proto::task::RedirectAddress;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{Epoch, HostId, Micros, MigrationId, Tid};
use std::collections::BTreeSet;

/// Wait status of a task that was killed by signal 9.
const KILLED_STATUS: i32 = 9;

/// A task that is arriving on this host.
#[derive(Debug)]
pub(super) struct ArrivingTask {
    pub(super) tid: Tid,
    pub(super) migration: MigrationId,
    source: HostId,
    /// State of the task. It is final when the source has released the task.
    pub(super) record: Option<TaskRecord>,
    is_record_complete: bool,
    /// Items that the source has forwarded.
    forwarded_items: Inbox,
    has_all_forwarded: bool,
    /// Items that other daemons have sent directly to this host.
    pub(super) direct_items: Inbox,
    /// True if this host is the task's location.
    pub(super) is_located: bool,
    /// True if the task's process runs on this host, or has exited.
    pub(super) has_run: bool,
    /// True if the tasker was ordered to run the task.
    pub(super) run_ordered: bool,
    /// True if the task's process on this host is dead. The task has ended, unless the commit is
    /// revoked.
    is_dead: bool,
    pub(super) exit_report: Option<(i32, Usage)>,
    /// Connection on which the task's library has reconnected.
    pub(super) conn: Option<ConnId>,
    /// True if the tasker was ordered to pause the task.
    pub(super) pause_ordered: bool,
    /// Suspension of the task, as far as this host knows. Until the task is ordered to run, the
    /// coordinator's state takes precedence.
    pub(super) suspension: Option<TaskSuspension>,
    /// True if the task has not run on this host yet: its library waits for the resume token.
    pub(super) library_quiesced: bool,
    /// Signals that have arrived before the task runs.
    pub(super) pending_signals: Vec<i32>,
    pub(super) pid: i32,
    /// Process id that the restarted program has reported. `None` if no program was restarted; then
    /// the task's record contains the process id.
    namespace_pid: Option<i32>,
    /// Restart group of the task; `None` if the task migrates and is not restarted from a
    /// checkpoint.
    pub(super) restart_group: Option<RestartGroup>,
    /// This host's verdict on a restart engine, for the case that CRIU is not possible.
    pub(super) restart_verdict: RestartVerdict,
    /// True if the task's program is started again on this host.
    pub(super) restarts_program: bool,
    /// Spawn token by which the restarted program claims the task's tid.
    pub(super) spawn_token: Option<i32>,
}

/// Forwarding of the items that still arrive for a task that has migrated away. It ends when all
/// daemons use the task's new location.
#[derive(Debug)]
pub(super) struct Forwarding {
    pub(super) migration: MigrationId,
    pub(super) target: HostId,
    epoch: Epoch,
    awaited_hosts: BTreeSet<HostId>,
}

/// State and items that were forwarded to the target. They are retained until it is certain that
/// the session has not lost them.
#[derive(Debug)]
pub(super) struct ForwardedItems {
    target: HostId,
    migration: MigrationId,
    record: Box<TaskRecord>,
    /// Forwarded items. Link frames that their senders retransmit are not included.
    items: Vec<PendingItem>,
    is_complete: bool,
    /// Time until which the items are retained; `None` if they are retained until the target is
    /// connected again.
    retained_until: Option<Micros>,
}

impl ForwardedItems {
    fn is_needed(&self, now: Micros) -> bool {
        self.retained_until.is_none_or(|end_time| end_time > now)
    }
}

impl Machine {
    /// True if this is the spawn token of an arriving task's program that is started again on this
    /// host.
    pub(super) fn is_respawn_token(&self, spawn_token: i32) -> bool {
        self.migrations
            .arrivals
            .values()
            .any(|arrival| arrival.spawn_token == Some(spawn_token))
    }

    /// Handles the connection of an arriving task's program, which was started again on this host.
    pub(super) fn connect_restarted_program(
        &mut self,
        conn: ConnId,
        namespace_pid: i32,
        spawn_token: i32,
    ) {
        let Some(arrival) = self
            .migrations
            .arrivals
            .values_mut()
            .find(|arrival| arrival.spawn_token == Some(spawn_token))
        else {
            return;
        };
        // The token is used once: another process that presents it is refused.
        arrival.spawn_token = None;
        (arrival.conn, arrival.namespace_pid) = (Some(conn), Some(namespace_pid));
        let tid = arrival.tid;
        self.conns.await_record(conn, tid);
        self.advance_arrival(tid);
    }

    /// Handles the reconnection of a library that had quiesced, either of an arriving task or of a
    /// task of this host. Any other connection is refused.
    pub(super) fn reconnect_library(&mut self, conn: ConnId, tid: Tid, migration: MigrationId) {
        if let Some(arrival) = self
            .migrations
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.migration == migration && a.is_located)
        {
            if let Some(previous_conn) = arrival.conn.replace(conn) {
                self.conns.retire(previous_conn);
                self.outputs.push_back(Output::CloseTask {
                    conn: previous_conn,
                });
            }
            self.conns.await_record(conn, tid);
            return self.advance_arrival(tid);
        }
        let is_migrating = self
            .migrations
            .sources
            .get(&migration)
            .is_some_and(|s| s.migration().tid == tid);
        let may_reconnect = |t: &&mut Task| {
            (is_migrating || t.has_resume_id(migration))
                && t.holds_items
                && t.connection_phase != ConnectionPhase::Left
        };
        let Some(task) = self.tasks.get_mut(tid).filter(may_reconnect) else {
            return self
                .refuse_connection(conn, format!("{tid} is not expected here ({migration})"));
        };
        task.has_quiesced = false;
        if let Some(previous_conn) = task.conn() {
            self.conns.retire(previous_conn);
        }
        self.bind_and_welcome(conn, tid);
        self.notify_sources_reconnected(tid);
        self.handle_guest_reconnected(tid);
    }

    /// Handles the master's order that sets the location of a task, and acknowledges it.
    pub(super) fn handle_location(&mut self, location: Location) {
        let Location { tid, epoch, .. } = location;
        if epoch <= self.epoch {
            return self.log_warning(format!(
                "the location of {tid} in epoch {epoch} is older than epoch {}; it was refused",
                self.epoch
            ));
        }
        self.epoch = epoch;
        self.apply_location(location);
        self.send_to_host(HostId::MASTER, HostMsg::TaskLocationAck { tid, epoch });
    }

    pub(super) fn apply_location(&mut self, location: Location) {
        let Location {
            tid,
            host,
            previous_host,
            epoch,
        } = location;
        if !self.locations.update(location) {
            return;
        }
        // If an exit of the task is known, it is void, because the task was restarted.
        self.tasks.known_exits.forget_exit(tid);
        let own_host = self.config.host;
        if tid.birth_host() == Some(own_host) {
            // A task from a checkpoint may have a number that this daemon has not allocated.
            self.tasks.reserve_ids_up_to(tid.local_part());
        }
        if host == own_host {
            if self.tasks.get(tid).is_none() {
                let arrival = self.migrations.arrivals.entry(tid);
                arrival
                    .or_insert_with(|| ArrivingTask::new(tid, MigrationId(0), previous_host))
                    .is_located = true;
            }
        } else if self
            .migrations
            .arrivals
            .get(&tid)
            .is_some_and(|a| a.is_located && (!a.has_run || a.is_dead))
            && let Some(mut arrival) = self.migrations.arrivals.remove(&tid)
        {
            // The commit was revoked: the items return to the task's location.
            for direct_item in arrival.direct_items.drain() {
                match direct_item {
                    PendingItem::Control(item) => self.deliver(tid, item),
                    // Dropped, because links retransmit.
                    PendingItem::Frame(_) => {}
                }
            }
        }
        if previous_host == own_host {
            let other_hosts = self.other_hosts();
            if let Some(task) = self.tasks.get_mut(tid) {
                task.undrained_hosts = other_hosts;
            }
        } else if previous_host != host && self.table.get(previous_host).is_some() {
            self.outputs.push_back(Output::SendData {
                host: previous_host,
                message: DataMsg::RouteDrained { dst: tid, epoch },
            });
        }
        self.notify_peers_of_migration(tid);
    }

    pub(super) fn send_record(&mut self, migration: &Migration, is_complete: bool) {
        if let Some(task) = self.tasks.get(migration.tid) {
            let record = Box::new(self.task_record(task));
            let message = DataMsg::Record {
                dst: migration.tid,
                migration: migration.id,
                record,
                is_final: is_complete,
            };
            self.outputs.push_back(Output::SendData {
                host: migration.to,
                message,
            });
        }
    }

    pub(super) fn transfer_ownership(&mut self, committed_migration: &Migration) {
        let (dst, migration, target) = (
            committed_migration.tid,
            committed_migration.id,
            committed_migration.to,
        );
        self.send_record(committed_migration, true);
        let Some(mut task) = self.tasks.live_tasks.remove(&dst) else {
            return;
        };
        self.remember_forwarding(committed_migration, Box::new(self.task_record(&task)));
        self.forget_guest(&task);
        for item in task.inbox.drain() {
            self.forward_item(dst, target, migration, item);
        }
        let epoch = self.locations.epoch_of(dst);
        // A host that joined after the migration has never used the old location.
        let is_awaited = |host: &HostId| {
            self.table.get(*host).is_some() && !task.drained_hosts.contains(&(epoch, *host))
        };
        let awaited_hosts = task
            .undrained_hosts
            .iter()
            .copied()
            .filter(is_awaited)
            .collect();
        self.migrations.forwarding.insert(
            dst,
            Forwarding {
                migration,
                target,
                epoch,
                awaited_hosts,
            },
        );
        self.advance_forwarding(dst);
        // This task may have been the last one for which a daemon that shuts down waits.
        self.advance_stop();
    }

    fn remember_forwarding(&mut self, migration: &Migration, record: Box<TaskRecord>) {
        let (now, retained_until) = (self.now, Some(self.delivery_certain_at()));
        self.migrations
            .unconfirmed_transfers
            .retain(|_, transfer| transfer.is_needed(now));
        let transfer = ForwardedItems {
            target: migration.to,
            migration: migration.id,
            record,
            items: Vec::new(),
            is_complete: false,
            retained_until,
        };
        self.migrations
            .unconfirmed_transfers
            .insert(migration.tid, transfer);
    }

    /// Returns the time at which everything sent now has arrived, unless the session is known to be
    /// broken by then.
    fn delivery_certain_at(&self) -> Micros {
        self.now + self.config.lease + self.config.lease
    }

    /// Forwards an item to the target of a task that has migrated away. An item that the session
    /// may lose and nobody retransmits is also retained.
    pub(super) fn forward_item(
        &mut self,
        dst: Tid,
        target: HostId,
        migration: MigrationId,
        item: PendingItem,
    ) {
        let delivery_time = self.delivery_certain_at();
        let transfer = self
            .migrations
            .unconfirmed_transfers
            .get_mut(&dst)
            .filter(|open_transfer| open_transfer.migration == migration);
        // Link frames are not retained, because their senders retransmit them. The exception is the
        // frames of a process that has exited.
        let transfer = transfer.filter(|open_transfer| {
            matches!(item, PendingItem::Control(_)) || open_transfer.record.handoff.is_some()
        });
        if let Some(open_transfer) = transfer {
            open_transfer.items.push(item.clone());
            open_transfer.retained_until = open_transfer.retained_until.map(|_| delivery_time);
        }
        self.outputs.push_back(Output::SendData {
            host: target,
            message: DataMsg::Forwarded {
                dst,
                migration,
                item,
            },
        });
    }

    /// Retains the items that were forwarded to a live daemon whose session has broken, because
    /// messages in transit may be lost.
    pub(super) fn retain_forwarded_items(&mut self, host: HostId) {
        let now = self.now;
        for transfer in self
            .migrations
            .unconfirmed_transfers
            .values_mut()
            .filter(|transfer| transfer.target == host && transfer.is_needed(now))
        {
            transfer.retained_until = None;
        }
    }

    /// Handles a new session with a daemon. If there was an earlier session, repeats the messages
    /// that may have been lost with the earlier session.
    pub(super) fn repeat_forwarded_items(&mut self, host: HostId) {
        if self.migrations.known_hosts.insert(host) {
            return;
        }
        let (now, delivery_time) = (self.now, Some(self.delivery_certain_at()));
        for (dst, transfer) in &mut self.migrations.unconfirmed_transfers {
            if transfer.target != host || !transfer.is_needed(now) {
                continue;
            }
            transfer.retained_until = delivery_time;
            let (dst, migration, record) = (*dst, transfer.migration, transfer.record.clone());
            let mut send = |message| self.outputs.push_back(Output::SendData { host, message });
            send(DataMsg::Record {
                dst,
                migration,
                record,
                is_final: true,
            });
            for item in transfer.items.iter().cloned() {
                send(DataMsg::Forwarded {
                    dst,
                    migration,
                    item,
                });
            }
            if transfer.is_complete {
                send(DataMsg::ForwardingComplete { dst, migration });
            }
        }
        for Location {
            tid,
            host: new_host,
            previous_host,
            epoch,
        } in self.locations.all_locations()
        {
            if previous_host == host && new_host != host {
                self.outputs.push_back(Output::SendData {
                    host,
                    message: DataMsg::RouteDrained { dst: tid, epoch },
                });
            }
        }
    }

    /// Records that a host sends no more items to the old location of a task.
    pub(super) fn record_route_drained(&mut self, host: HostId, tid: Tid, epoch: Epoch) {
        if let Some(forwarding) = self.migrations.forwarding.get_mut(&tid) {
            if forwarding.epoch == epoch {
                forwarding.awaited_hosts.remove(&host);
            }
            self.advance_forwarding(tid);
        } else if let Some(task) = self.tasks.get_mut(tid) {
            task.drained_hosts
                .retain(|(drained_epoch, _)| *drained_epoch >= epoch);
            task.drained_hosts.insert((epoch, host));
        }
    }

    fn advance_forwarding(&mut self, dst: Tid) {
        if self
            .migrations
            .forwarding
            .get(&dst)
            .is_some_and(|d| d.awaited_hosts.is_empty())
            && let Some(Forwarding {
                migration, target, ..
            }) = self.migrations.forwarding.remove(&dst)
        {
            self.outputs.push_back(Output::SendData {
                host: target,
                message: DataMsg::ForwardingComplete { dst, migration },
            });
            let delivery_time = self.delivery_certain_at();
            let transfer = self
                .migrations
                .unconfirmed_transfers
                .get_mut(&dst)
                .filter(|transfer| transfer.migration == migration);
            if let Some(transfer) = transfer {
                (transfer.is_complete, transfer.retained_until) =
                    (true, transfer.retained_until.map(|_| delivery_time));
            }
        }
    }

    /// Handles the record of an arriving task. A complete record starts the sequence of forwarded
    /// items. For a restart engine the first record takes the place of the images.
    pub(super) fn handle_record(
        &mut self,
        tid: Tid,
        migration: MigrationId,
        record: TaskRecord,
        is_complete: bool,
    ) {
        let Some(arrival) = self
            .migrations
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.migration == migration)
        else {
            return;
        };
        let is_first_record = arrival.restarts_program && arrival.record.is_none();
        if is_complete {
            // A complete record starts the sequence of forwarded items; a repeated record starts it
            // again.
            (arrival.forwarded_items, arrival.has_all_forwarded) = (Inbox::default(), false);
        }
        if is_complete || !arrival.is_record_complete {
            arrival.record = Some(record);
            arrival.is_record_complete |= is_complete;
        }
        if is_first_record {
            // A restart engine transfers the record instead of images.
            self.pass_to_target(migration, TargetEvent::ImagesReceived(Ok(0)));
        }
        self.advance_arrival(tid);
    }

    /// Queues an item that the source has forwarded.
    pub(super) fn handle_forwarded(&mut self, tid: Tid, migration: MigrationId, item: PendingItem) {
        match self
            .migrations
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.migration == migration)
        {
            Some(arrival) => arrival.forwarded_items.push(item),
            None => self.log_warning(format!(
                "an item was forwarded for {tid}, which is not migrating to this host; dropped"
            )),
        }
    }

    /// Records that the source has forwarded all items.
    pub(super) fn handle_forwarded_all(&mut self, tid: Tid, migration: MigrationId) {
        if let Some(arrival) = self
            .migrations
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.migration == migration)
        {
            arrival.has_all_forwarded = true;
        }
        self.advance_arrival(tid);
    }

    /// Makes an arriving task a task of this host when its record, all forwarded items, its process
    /// and its library have arrived. For a task that has already exited, the library need not
    /// arrive.
    pub(super) fn advance_arrival(&mut self, tid: Tid) {
        let Some(arrival) = self.migrations.arrivals.get_mut(&tid) else {
            return;
        };
        if arrival.has_run && arrival.exit_report.is_none() {
            // A program that is just starting has no signal handlers yet. A signal that the program
            // would handle must not end it, so only terminating signals are sent.
            let is_new_program = arrival.restarts_program;
            let may_be_sent =
                |signal: &i32| !is_new_program || TERMINATING_SIGNALS.contains(signal);
            for signal in std::mem::take(&mut arrival.pending_signals)
                .into_iter()
                .filter(may_be_sent)
            {
                self.outputs
                    .push_back(Output::SendToTasker(ToTasker::Signal { tid, signal }));
            }
        }
        let has_arrived = arrival.is_located
            && arrival.is_record_complete
            && arrival.has_all_forwarded
            && arrival.has_run;
        if !has_arrived
            || (arrival.conn.is_none()
                && arrival.exit_report.is_none()
                && !arrival.library_quiesced)
        {
            return;
        }
        let Some(mut arrival) = self.migrations.arrivals.remove(&tid) else {
            return;
        };
        if !arrival.library_quiesced {
            self.outputs.push_back(Output::RemoveToken {
                path: self.config.paths.resume_token_path(arrival.migration),
            });
        }
        let Some(record) = arrival.record.take() else {
            return;
        };
        let (hosts, epoch) = (record.known_hosts.clone(), record.hosts_epoch);
        let mut task = Task::from_record(record);
        (task.pid, task.suspension) = (arrival.pid, arrival.suspension);
        task.namespace_pid = arrival.namespace_pid.unwrap_or(task.namespace_pid);
        if arrival.restarts_program {
            task.connection_phase = ConnectionPhase::Expected;
            task.spawn_token = arrival.spawn_token;
            task.awaits_restarted_process = arrival.conn.is_none();
        }
        for item in arrival
            .forwarded_items
            .drain()
            .into_iter()
            .chain(arrival.direct_items.drain())
        {
            task.inbox.push(item);
        }
        if task.restart_info.is_some() {
            // For other tasks, a task that is restarted from a checkpoint starts now.
            let (parent, name, user) = (task.parent, task.name.clone(), self.config.uid);
            self.record_event(EventKind::TaskStarted {
                tid,
                parent,
                name,
                user,
            });
        }
        self.tasks.insert(task);
        if let Some(conn) = arrival.conn {
            self.bind_and_welcome(conn, tid);
            self.flush_inbox(tid);
        }
        if let Some((status, usage)) = arrival.exit_report {
            self.handle_process_exit(tid, status, usage);
            return self.start_queued_migration(tid);
        }
        if arrival.restarts_program {
            self.pause_if_required(tid);
        } else {
            self.adopt_arrived_guest(
                tid,
                Some(arrival.migration).filter(|_| arrival.library_quiesced),
            );
        }
        self.end_expired_preemptions();
        self.recheck_notifications(tid, &hosts, epoch);
        self.start_queued_migration(tid);
    }

    /// Handles the removal of a host from the host table. Forgets what was forwarded to the host,
    /// no longer waits for its messages, and completes the arrival of the tasks whose source was
    /// the host.
    pub(super) fn forget_migration_host(&mut self, host: HostId) {
        self.notify_coordinators_of_lost_host(host);
        self.migrations
            .unconfirmed_transfers
            .retain(|_, transfer| transfer.target != host);
        self.migrations.known_hosts.remove(&host);
        let departed_tasks: Vec<Tid> = self.migrations.forwarding.keys().copied().collect();
        self.migrations
            .forwarding
            .retain(|_, forwarding| forwarding.target != host);
        for tid in departed_tasks {
            if let Some(forwarding) = self.migrations.forwarding.get_mut(&tid) {
                forwarding.awaited_hosts.remove(&host);
            }
            self.advance_forwarding(tid);
        }
        let orphaned_tasks: Vec<Tid> = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.source == host && a.is_located)
            .map(|a| a.tid)
            .collect();
        for tid in orphaned_tasks {
            if let Some(arrival) = self.migrations.arrivals.get_mut(&tid) {
                // The items that the lost source held back are lost with it. Links retransmit their
                // frames, and the items from the handoff of an exited process have arrived with the
                // record. All other items count as part of the loss of that host.
                (arrival.is_record_complete, arrival.has_all_forwarded) = (true, true);
                arrival
                    .record
                    .get_or_insert_with(|| ArrivingTask::minimal_record(tid));
            }
            self.advance_arrival(tid);
        }
    }
}

impl ArrivingTask {
    pub(super) fn new(tid: Tid, migration: MigrationId, source: HostId) -> Self {
        Self {
            tid,
            migration,
            source,
            record: None,
            is_record_complete: false,
            forwarded_items: Inbox::default(),
            has_all_forwarded: false,
            direct_items: Inbox::default(),
            is_located: false,
            has_run: false,
            run_ordered: false,
            is_dead: false,
            exit_report: None,
            conn: None,
            pause_ordered: false,
            suspension: None,
            library_quiesced: false,
            pending_signals: Vec::new(),
            pid: 0,
            namespace_pid: None,
            restart_group: None,
            restart_verdict: None,
            restarts_program: false,
            spawn_token: None,
        }
    }

    /// Sets the state of the task to the state that was stored next to its images.
    pub(super) fn set_saved_state(&mut self, record: TaskRecord, saved_items: Vec<PendingItem>) {
        (self.record, self.is_record_complete, self.has_all_forwarded) = (Some(record), true, true);
        saved_items
            .into_iter()
            .for_each(|item| self.forwarded_items.push(item));
    }

    /// Records the order to run the task, because its process at the source has been killed. A
    /// suspended task stays paused.
    pub(super) fn record_run_order(&mut self, now: Micros, suspensions: Suspensions) {
        (self.run_ordered, self.suspension) =
            (true, TaskSuspension::update(None, now, suspensions));
    }

    /// Returns the migration whose coordinator decides on suspensions of the task; `None` if this
    /// host decides.
    pub(super) fn deciding_migration(&self) -> Option<MigrationId> {
        (self.is_located && !self.run_ordered && !self.is_dead).then_some(self.migration)
    }

    /// True if the task's process on this host is dead, even if the death is not reported yet.
    pub(super) fn is_lost(&self) -> bool {
        self.is_dead
    }

    /// Ends a pause of the task. Returns the id under which the task's library must be resumed;
    /// `None` if the library is not quiesced.
    pub(super) fn end_pause(&mut self) -> Option<MigrationId> {
        self.pause_ordered = false;
        (std::mem::take(&mut self.library_quiesced) && !self.restarts_program)
            .then_some(self.migration)
    }

    /// Records that the task's process on this host is dead.
    pub(super) fn mark_lost(&mut self) {
        (self.has_run, self.is_dead) = (true, true);
        self.exit_report
            .get_or_insert((KILLED_STATUS, Usage::default()));
    }

    /// Returns a minimal record, for a task whose source was lost before the record arrived.
    fn minimal_record(tid: Tid) -> TaskRecord {
        let task = Task::new(tid, Tid::NONE, ConnectionPhase::Detached);
        TaskRecord {
            tid,
            parent: task.parent,
            name: task.name,
            flags: sempa_proto::table::TASK_FORKED | sempa_proto::table::TASK_CONNECTED,
            spawn_token: None,
            output_sink: task.output_sink,
            trace_sink: task.trace_sink,
            exit_rm: None,
            watermarks: Vec::new(),
            open_requests: Vec::new(),
            untimed_requests: Vec::new(),
            restart_info: None,
            launch: None,
            handoff: None,
            notifications: Vec::new(),
            redirect_address: RedirectAddress::default(),
            known_hosts: Vec::new(),
            hosts_epoch: Epoch(u64::MAX),
            namespace_pid: 0,
        }
    }
}
