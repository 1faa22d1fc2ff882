//! Keeps the order of items for a task while it changes hosts, and updates its location.
//!
//! 1. From the order to quiesce on, the source holds back all items for the task.
//! 2. When the new location is distributed, every daemon sends its items for the task to the
//!    target. After the last item that a daemon sent to the source, it sends a
//!    [`DataMsg::RouteDrained`] to the source.
//! 3. After the commit the source forwards the items that it held back, in order. When a
//!    [`DataMsg::RouteDrained`] has arrived from every daemon, the source sends a
//!    [`DataMsg::ForwardedAll`].
//! 4. The target holds back items that other daemons send to it directly. The task receives these
//!    after all forwarded items.
//!
//! A session between two live daemons may break and lose messages in transit. The source therefore
//! remembers for a while what it has forwarded. When a new session is established, both daemons
//! repeat these messages.

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
    from: HostId,
    /// State of the task; final when the source has released the task.
    pub(super) record: Option<TaskRecord>,
    record_complete: bool,
    /// Items that the source has forwarded.
    forwarded_items: Inbox,
    all_forwarded: bool,
    /// Items that other daemons have sent directly to this host.
    pub(super) direct_items: Inbox,
    /// True if this host is the task's location.
    pub(super) is_located: bool,
    /// True if the task's process runs on this host, or has exited.
    pub(super) has_run: bool,
    /// True if the tasker was ordered to run the task.
    pub(super) run_ordered: bool,
    /// True if the task's process on this host is dead. If the commit is not revoked, this has
    /// ended the task.
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
    /// Signals that arrived before the task ran.
    pub(super) signals: Vec<i32>,
    pub(super) pid: i32,
    /// Set if the task does not migrate, but is restarted from a checkpoint.
    pub(super) restart_group: Option<RestartGroup>,
    /// Verdict on a restart engine, for the case that CRIU is not possible.
    pub(super) restart_verdict: RestartVerdict,
    /// True if the task's program is started again on this host.
    pub(super) by_restart: bool,
    /// Spawn token by which the restarted program claims the task's tid.
    pub(super) spawn_token: Option<i32>,
}

/// A task that has migrated away. Items that still arrive for it are forwarded until all daemons
/// use its new location.
#[derive(Debug)]
pub(super) struct Forwarding {
    pub(super) migration: MigrationId,
    pub(super) to: HostId,
    epoch: Epoch,
    awaited_hosts: BTreeSet<HostId>,
}

/// State and items that were forwarded to the target. They are retained as long as the session may
/// turn out to have broken.
#[derive(Debug)]
pub(super) struct ForwardedItems {
    to: HostId,
    migration: MigrationId,
    record: Box<TaskRecord>,
    /// Forwarded items, without link frames that their senders retransmit.
    items: Vec<PendingItem>,
    all_sent: bool,
    /// Time until which the items are retained; `None` if they are retained until the target is
    /// connected again.
    retained_until: Option<Micros>,
}

impl ForwardedItems {
    fn is_needed(&self, now: Micros) -> bool {
        self.retained_until.is_none_or(|until| until > now)
    }
}

impl Machine {
    /// True if this is the spawn token of a program that is started again on this host.
    pub(super) fn is_respawn_token(&self, spawn_token: i32) -> bool {
        self.migrations
            .arrivals
            .values()
            .any(|arrival| arrival.spawn_token == Some(spawn_token))
    }

    /// Handles the connection of an arriving task's program, which was started again on this host.
    pub(super) fn connect_respawned(&mut self, conn: ConnId, spawn_token: i32) {
        let Some(arrival) = self
            .migrations
            .arrivals
            .values_mut()
            .find(|arrival| arrival.spawn_token == Some(spawn_token))
        else {
            return;
        };
        // Another process that presents the same token is refused.
        arrival.spawn_token = None;
        arrival.conn = Some(conn);
        let tid = arrival.tid;
        self.conns.bind_when_record_arrives(conn, tid);
        self.advance_arrival(tid);
    }

    /// Handles the reconnection of a library that had quiesced.
    pub(super) fn reconnect_library(&mut self, conn: ConnId, tid: Tid, migration: MigrationId) {
        if let Some(arrival) = self
            .migrations
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.migration == migration && a.is_located)
        {
            if let Some(older) = arrival.conn.replace(conn) {
                self.conns.retire(older);
                self.outputs.push_back(Output::CloseTask { conn: older });
            }
            self.conns.bind_when_record_arrives(conn, tid);
            return self.advance_arrival(tid);
        }
        let is_migrating = self
            .migrations
            .sources
            .get(&migration)
            .is_some_and(|s| s.migration().tid == tid);
        let may = |t: &&mut Task| {
            (is_migrating || t.has_resume_id(migration))
                && t.holds_items
                && t.phase != ConnectionPhase::Left
        };
        let Some(task) = self.tasks.get_mut(tid).filter(may) else {
            return self
                .refuse_connection(conn, format!("{tid} is not expected here ({migration})"));
        };
        task.quiesced = false;
        if let Some(older) = task.conn() {
            self.conns.retire(older);
        }
        self.welcome(conn, tid);
        self.notify_sources_reconnected(tid);
        self.handle_guest_reconnected(tid);
    }

    /// Handles the master's order that sets the location of a task.
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
            previous_host: from,
            epoch,
        } = location;
        if !self.locations.update(location) {
            return;
        }
        // A task that has ended may have been restarted.
        self.tasks.known_exits.forget(tid);
        let me = self.config.host;
        if tid.birth_host() == Some(me) {
            // A task from a checkpoint may have a number that this daemon has not allocated.
            self.tasks.reserve_ids_up_to(tid.local_part());
        }
        if host == me {
            if self.tasks.get(tid).is_none() {
                let arrival = self.migrations.arrivals.entry(tid);
                arrival
                    .or_insert_with(|| ArrivingTask::new(tid, MigrationId(0), from))
                    .is_located = true;
            }
        } else if self
            .migrations
            .arrivals
            .get(&tid)
            .is_some_and(|a| a.is_located && (!a.has_run || a.is_dead))
            && let Some(mut arrival) = self.migrations.arrivals.remove(&tid)
        {
            // The commit was revoked.
            for held in arrival.direct_items.drain() {
                match held {
                    PendingItem::Control(item) => self.deliver(tid, item),
                    // Dropped, because links retransmit.
                    PendingItem::Frame(_) => {}
                }
            }
        }
        if from == me {
            let others = self.other_hosts();
            if let Some(task) = self.tasks.get_mut(tid) {
                task.undrained_hosts = others;
            }
        } else if from != host && self.table.get(from).is_some() {
            self.outputs.push_back(Output::SendData {
                host: from,
                message: DataMsg::RouteDrained { dst: tid, epoch },
            });
        }
        self.notify_peers_of_migration(tid);
    }

    pub(super) fn send_record(&mut self, of: &Migration, complete: bool) {
        if let Some(task) = self.tasks.get(of.tid) {
            let record = Box::new(self.task_record(task));
            let message = DataMsg::Record {
                dst: of.tid,
                migration: of.id,
                record,
                complete,
            };
            self.outputs.push_back(Output::SendData {
                host: of.to,
                message,
            });
        }
    }

    pub(super) fn transfer_ownership(&mut self, of: &Migration) {
        let (dst, migration, to) = (of.tid, of.id, of.to);
        self.send_record(of, true);
        let Some(mut task) = self.tasks.live.remove(&dst) else {
            return;
        };
        self.remember_forwarding(of, Box::new(self.task_record(&task)));
        self.forget_guest(&task);
        for held in task.inbox.drain() {
            self.forward(dst, to, migration, held);
        }
        let epoch = self.locations.epoch_of(dst);
        // A host that joined later has never used the old location.
        let open = |host: &HostId| {
            self.table.get(*host).is_some() && !task.drained_hosts.contains(&(epoch, *host))
        };
        let awaited_hosts = task.undrained_hosts.iter().copied().filter(open).collect();
        self.migrations.forwarding.insert(
            dst,
            Forwarding {
                migration,
                to,
                epoch,
                awaited_hosts,
            },
        );
        self.advance_forwarding(dst);
        // A daemon that is shutting down may have waited only for this task.
        self.advance_stop();
    }

    fn remember_forwarding(&mut self, of: &Migration, record: Box<TaskRecord>) {
        let (now, kept_until) = (self.now, Some(self.delivery_known_at()));
        self.migrations
            .unconfirmed_transfers
            .retain(|_, forwarded| forwarded.is_needed(now));
        let forwarded = ForwardedItems {
            to: of.to,
            migration: of.id,
            record,
            items: Vec::new(),
            all_sent: false,
            retained_until: kept_until,
        };
        self.migrations
            .unconfirmed_transfers
            .insert(of.tid, forwarded);
    }

    /// Returns the time at which everything sent now has arrived, or the session is known to be
    /// broken.
    fn delivery_known_at(&self) -> Micros {
        self.now + self.config.lease + self.config.lease
    }

    /// Forwards an item for a task that has migrated away.
    pub(super) fn forward(
        &mut self,
        dst: Tid,
        to: HostId,
        migration: MigrationId,
        held: PendingItem,
    ) {
        let until = self.delivery_known_at();
        let remembered = self
            .migrations
            .unconfirmed_transfers
            .get_mut(&dst)
            .filter(|handed| handed.migration == migration);
        // Link frames are retransmitted, except those of a process that has exited.
        let remembered = remembered.filter(|handed| {
            matches!(held, PendingItem::Control(_)) || handed.record.handoff.is_some()
        });
        if let Some(handed) = remembered {
            handed.items.push(held.clone());
            handed.retained_until = handed.retained_until.map(|_| until);
        }
        self.outputs.push_back(Output::SendData {
            host: to,
            message: DataMsg::Forwarded {
                dst,
                migration,
                item: held,
            },
        });
    }

    /// Retains the items that were forwarded to a live daemon whose session has broken, because
    /// messages in transit may be lost.
    pub(super) fn retain_forwarded_for(&mut self, host: HostId) {
        let now = self.now;
        for handed in self
            .migrations
            .unconfirmed_transfers
            .values_mut()
            .filter(|handed| handed.to == host && handed.is_needed(now))
        {
            handed.retained_until = None;
        }
    }

    /// Handles a new session with a daemon. If there was an earlier session, repeats the messages
    /// that may have been lost with it.
    pub(super) fn repeat_forwarded(&mut self, host: HostId) {
        if self.migrations.known_hosts.insert(host) {
            return;
        }
        let (now, until) = (self.now, Some(self.delivery_known_at()));
        for (dst, handed) in &mut self.migrations.unconfirmed_transfers {
            if handed.to != host || !handed.is_needed(now) {
                continue;
            }
            handed.retained_until = until;
            let (dst, migration, record) = (*dst, handed.migration, handed.record.clone());
            let mut send = |message| self.outputs.push_back(Output::SendData { host, message });
            send(DataMsg::Record {
                dst,
                migration,
                record,
                complete: true,
            });
            for held in handed.items.iter().cloned() {
                send(DataMsg::Forwarded {
                    dst,
                    migration,
                    item: held,
                });
            }
            if handed.all_sent {
                send(DataMsg::ForwardedAll { dst, migration });
            }
        }
        for Location {
            tid,
            host: to,
            previous_host: from,
            epoch,
        } in self.locations.all()
        {
            if from == host && to != host {
                self.outputs.push_back(Output::SendData {
                    host,
                    message: DataMsg::RouteDrained { dst: tid, epoch },
                });
            }
        }
    }

    /// Records that a host sends no more items to the old location of a task.
    pub(super) fn record_route_drained(&mut self, host: HostId, tid: Tid, epoch: Epoch) {
        if let Some(departed) = self.migrations.forwarding.get_mut(&tid) {
            if departed.epoch == epoch {
                departed.awaited_hosts.remove(&host);
            }
            self.advance_forwarding(tid);
        } else if let Some(task) = self.tasks.get_mut(tid) {
            task.drained_hosts.retain(|(older, _)| *older >= epoch);
            task.drained_hosts.insert((epoch, host));
        }
    }

    fn advance_forwarding(&mut self, dst: Tid) {
        if self
            .migrations
            .forwarding
            .get(&dst)
            .is_some_and(|d| d.awaited_hosts.is_empty())
            && let Some(Forwarding { migration, to, .. }) = self.migrations.forwarding.remove(&dst)
        {
            self.outputs.push_back(Output::SendData {
                host: to,
                message: DataMsg::ForwardedAll { dst, migration },
            });
            let until = self.delivery_known_at();
            let handed = self
                .migrations
                .unconfirmed_transfers
                .get_mut(&dst)
                .filter(|handed| handed.migration == migration);
            if let Some(handed) = handed {
                (handed.all_sent, handed.retained_until) =
                    (true, handed.retained_until.map(|_| until));
            }
        }
    }

    /// Handles the record of an arriving task.
    pub(super) fn handle_record(
        &mut self,
        tid: Tid,
        migration: MigrationId,
        record: TaskRecord,
        complete: bool,
    ) {
        let Some(arrival) = self
            .migrations
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.migration == migration)
        else {
            return;
        };
        let is_first_record = arrival.by_restart && arrival.record.is_none();
        if complete {
            // A repeated record is followed by all forwarded items again.
            (arrival.forwarded_items, arrival.all_forwarded) = (Inbox::default(), false);
        }
        if complete || !arrival.record_complete {
            arrival.record = Some(record);
            arrival.record_complete |= complete;
        }
        if is_first_record {
            // With a restart engine, the record takes the place of the images.
            self.target_event(migration, TargetEvent::Received(Ok(0)));
        }
        self.advance_arrival(tid);
    }

    /// Queues an item that the source has forwarded.
    pub(super) fn handle_forwarded(&mut self, tid: Tid, migration: MigrationId, held: PendingItem) {
        match self
            .migrations
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.migration == migration)
        {
            Some(arrival) => arrival.forwarded_items.push(held),
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
            arrival.all_forwarded = true;
        }
        self.advance_arrival(tid);
    }

    /// Makes an arriving task a task of this host when its record, all forwarded items, its process
    /// and its library have arrived. A task that has already exited needs no library.
    pub(super) fn advance_arrival(&mut self, tid: Tid) {
        let Some(arrival) = self.migrations.arrivals.get_mut(&tid) else {
            return;
        };
        if arrival.has_run && arrival.exit_report.is_none() {
            // A program that is just starting has no signal handlers yet: signals that it would
            // handle must not end it.
            let anew = arrival.by_restart;
            let counts = |signal: &i32| !anew || TERMINATING_SIGNALS.contains(signal);
            for signal in std::mem::take(&mut arrival.signals)
                .into_iter()
                .filter(counts)
            {
                self.outputs
                    .push_back(Output::ToTasker(ToTasker::Signal { tid, signal }));
            }
        }
        let here = arrival.is_located
            && arrival.record_complete
            && arrival.all_forwarded
            && arrival.has_run;
        if !here
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
                path: self.config.paths.resume_token(arrival.migration),
            });
        }
        let Some(record) = arrival.record.take() else {
            return;
        };
        let (hosts, epoch) = (record.known_hosts.clone(), record.hosts_epoch);
        let mut task = Task::from_record(record);
        (task.pid, task.suspension) = (arrival.pid, arrival.suspension);
        if arrival.by_restart {
            (task.phase, task.spawn_token, task.awaits_restarted_process) = (
                ConnectionPhase::Expected,
                arrival.spawn_token,
                arrival.conn.is_none(),
            );
        }
        for held in arrival
            .forwarded_items
            .drain()
            .into_iter()
            .chain(arrival.direct_items.drain())
        {
            task.inbox.push(held);
        }
        if task.restart.is_some() {
            // To other tasks, a task that is restarted from a checkpoint starts now.
            let (parent, name, user) = (task.parent, task.name.clone(), self.config.uid);
            self.record(EventKind::TaskStarted {
                tid,
                parent,
                name,
                user,
            });
        }
        self.tasks.insert(task);
        if let Some(conn) = arrival.conn {
            self.welcome(conn, tid);
            self.flush_inbox(tid);
        }
        if let Some((status, used)) = arrival.exit_report {
            self.handle_process_exit(tid, status, used);
            return self.start_queued_migration(tid);
        }
        if arrival.by_restart {
            self.pause_if_required(tid);
        } else {
            self.adopt_arrived_guest(
                tid,
                Some(arrival.migration).filter(|_| arrival.library_quiesced),
            );
        }
        self.expire_preemptions();
        self.recheck_notifies(tid, &hosts, epoch);
        self.start_queued_migration(tid);
    }

    /// Handles the removal of a host from the host table.
    pub(super) fn forget_migration_host(&mut self, host: HostId) {
        self.notify_coordinators_of_lost_host(host);
        self.migrations
            .unconfirmed_transfers
            .retain(|_, handed| handed.to != host);
        self.migrations.known_hosts.remove(&host);
        let departed: Vec<Tid> = self.migrations.forwarding.keys().copied().collect();
        self.migrations.forwarding.retain(|_, d| d.to != host);
        for tid in departed {
            if let Some(d) = self.migrations.forwarding.get_mut(&tid) {
                d.awaited_hosts.remove(&host);
            }
            self.advance_forwarding(tid);
        }
        let orphans: Vec<Tid> = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.from == host && a.is_located)
            .map(|a| a.tid)
            .collect();
        for tid in orphans {
            if let Some(arrival) = self.migrations.arrivals.get_mut(&tid) {
                // Items that the lost source held back are lost with it. Links retransmit, and the
                // items that an exited process had left have come with the record. All other items
                // count as part of the loss of that host.
                (arrival.record_complete, arrival.all_forwarded) = (true, true);
                arrival
                    .record
                    .get_or_insert_with(|| ArrivingTask::bare_record(tid));
            }
            self.advance_arrival(tid);
        }
    }
}

impl ArrivingTask {
    pub(super) fn new(tid: Tid, migration: MigrationId, from: HostId) -> ArrivingTask {
        ArrivingTask {
            tid,
            migration,
            from,
            record: None,
            record_complete: false,
            forwarded_items: Inbox::default(),
            all_forwarded: false,
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
            signals: Vec::new(),
            pid: 0,
            restart_group: None,
            restart_verdict: None,
            by_restart: false,
            spawn_token: None,
        }
    }

    /// Sets the state of the task to the state that was stored next to its images.
    pub(super) fn set_saved_state(&mut self, record: TaskRecord, waiting: Vec<PendingItem>) {
        (self.record, self.record_complete, self.all_forwarded) = (Some(record), true, true);
        waiting
            .into_iter()
            .for_each(|held| self.forwarded_items.push(held));
    }

    /// Records the order to run the task: its process at the source is gone. A suspended task stays
    /// paused.
    pub(super) fn record_run_order(&mut self, now: Micros, suspended: Suspensions) {
        (self.run_ordered, self.suspension) = (true, TaskSuspension::updated(None, now, suspended));
    }

    /// Returns the migration whose coordinator decides on suspensions of the task; `None` if this
    /// host decides.
    pub(super) fn deciding_migration(&self) -> Option<MigrationId> {
        (self.is_located && !self.run_ordered && !self.is_dead).then_some(self.migration)
    }

    /// True if the task's process on this host is dead, even if that is not reported yet.
    pub(super) fn is_lost(&self) -> bool {
        self.is_dead
    }

    /// Ends a pause of the task. Returns the id under which its library must be resumed, if it is
    /// quiesced.
    pub(super) fn end_pause(&mut self) -> Option<MigrationId> {
        self.pause_ordered = false;
        (std::mem::take(&mut self.library_quiesced) && !self.by_restart).then_some(self.migration)
    }

    /// Records that the task's process on this host is dead.
    pub(super) fn mark_lost(&mut self) {
        (self.has_run, self.is_dead) = (true, true);
        self.exit_report
            .get_or_insert((KILLED_STATUS, Usage::default()));
    }

    /// Returns a minimal record, for a task whose source was lost before it sent one.
    fn bare_record(tid: Tid) -> TaskRecord {
        let task = Task::new(tid, Tid::NONE, ConnectionPhase::Detached);
        TaskRecord {
            tid,
            parent: task.parent,
            name: task.name,
            flags: sempa_proto::table::TASK_FORKED | sempa_proto::table::TASK_CONNECTED,
            spawn_token: None,
            output: task.output,
            trace: task.trace,
            exit_rm: None,
            watermarks: Vec::new(),
            requests: Vec::new(),
            untimed_requests: Vec::new(),
            restart: None,
            launch: None,
            handoff: None,
            notifications: Vec::new(),
            redirect_address: RedirectAddress::default(),
            known_hosts: Vec::new(),
            hosts_epoch: Epoch(u64::MAX),
        }
    }
}
