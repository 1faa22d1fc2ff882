//! Keeps the order of items for a task while it changes hosts, and updates its location.
//!
//! 1. From the order to quiesce on, the source keeps all items for the task.
//! 2. When the new location is distributed, every daemon sends its items for the task to the
//!    target. After the last item that it sent to the source, it sends a [`DataMsg::RouteDrained`] there.
//! 3. After the commit the source forwards what it kept, in order. When the last `Passed` has
//!    arrived, it sends a [`DataMsg::ForwardedAll`].
//! 4. The target keeps items that come directly. The task gets them after all forwarded ones.
//!
//! A session between two live daemons may break and lose messages in transit. The source therefore
//! remembers for a while what it has forwarded. When a new session is established, both daemons
//! repeat these messages.

use super::engines::{DEADLY, Other};
use super::suspend::Suspended;
use super::tasks::{Inbox, Phase, Task};
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
const KILLED: i32 = 9;

/// A task on its way to this host.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) tid: Tid,
    pub(super) migration: MigrationId,
    from: HostId,
    /// State of the task; complete when the source has given it up.
    pub(super) record: Option<TaskRecord>,
    complete: bool,
    /// Items that waited at the source.
    handed: Inbox,
    all_handed: bool,
    /// Items that came here directly.
    pub(super) own: Inbox,
    /// This host is the task's location.
    pub(super) located: bool,
    /// Its process runs, or has exited.
    pub(super) ran: bool,
    /// The tasker was ordered to run it.
    pub(super) run_ordered: bool,
    /// Its copy here is dead. If the commit stands, this has ended the task.
    lost: bool,
    pub(super) exited: Option<(i32, Usage)>,
    /// Connection on which its library has reconnected.
    pub(super) conn: Option<ConnId>,
    /// The tasker was ordered to pause it.
    pub(super) held: bool,
    /// Suspensions as far as known. Until the task is ordered to run, the coordinator's state takes
    /// precedence.
    pub(super) suspended: Option<Suspended>,
    /// The task has not run here yet: its library waits for the resume token.
    pub(super) waits: bool,
    /// Signals that arrived before the task ran.
    pub(super) signals: Vec<i32>,
    pub(super) pid: i32,
    /// Set if the task does not migrate, but is restarted from a checkpoint.
    pub(super) begins: Option<RestartGroup>,
    /// Verdict on a restart engine, for the case that CRIU is not possible.
    pub(super) other: Other,
    /// Its program is started again here.
    pub(super) anew: bool,
    /// Spawn token by which that program claims its tid.
    pub(super) epid: Option<i32>,
}

/// A task that has left. Items that still come for it are forwarded until all daemons use its new
/// location.
#[derive(Debug)]
pub(super) struct Departed {
    pub(super) migration: MigrationId,
    pub(super) to: HostId,
    epoch: Epoch,
    awaiting: BTreeSet<HostId>,
}

/// What was forwarded to the target, for as long as the session may turn out to have broken.
#[derive(Debug)]
pub(super) struct HandedOver {
    to: HostId,
    migration: MigrationId,
    record: Box<TaskRecord>,
    /// Without the frames of links, which retransmit.
    items: Vec<PendingItem>,
    all: bool,
    /// Time until which this is kept. `None`: until the target is connected again.
    until: Option<Micros>,
}

impl HandedOver {
    fn counts(&self, now: Micros) -> bool {
        self.until.is_none_or(|until| until > now)
    }
}

impl Machine {
    /// True if this is the spawn token of a program that is started again here.
    pub(super) fn is_beginning(&self, epid: i32) -> bool {
        self.moves
            .arrivals
            .values()
            .any(|arrival| arrival.epid == Some(epid))
    }

    /// Handles the connection of an arriving task's program, which was started again here.
    pub(super) fn comes_anew(&mut self, conn: ConnId, epid: i32) {
        let Some(arrival) = self
            .moves
            .arrivals
            .values_mut()
            .find(|arrival| arrival.epid == Some(epid))
        else {
            return;
        };
        // Another process that presents the same token is refused.
        arrival.epid = None;
        arrival.conn = Some(conn);
        let tid = arrival.tid;
        self.conns.park(conn, tid);
        self.arrival_step(tid);
    }

    /// Handles the return of a library that had quiesced.
    pub(super) fn resume(&mut self, conn: ConnId, tid: Tid, migration: MigrationId) {
        if let Some(arrival) = self
            .moves
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.migration == migration && a.located)
        {
            if let Some(older) = arrival.conn.replace(conn) {
                self.conns.retire(older);
                self.out.push_back(Output::CloseTask { conn: older });
            }
            self.conns.park(conn, tid);
            return self.arrival_step(tid);
        }
        let moving = self
            .moves
            .sources
            .get(&migration)
            .is_some_and(|s| s.migration().tid == tid);
        let may =
            |t: &&mut Task| (moving || t.waits_for(migration)) && t.hold && t.phase != Phase::Left;
        let Some(task) = self.tasks.get_mut(tid).filter(may) else {
            return self.refuse(conn, format!("{tid} is not waited for here ({migration})"));
        };
        task.quiesced = false;
        if let Some(older) = task.conn() {
            self.conns.retire(older);
        }
        self.welcome(conn, tid);
        self.move_task_came_back(tid);
        self.guest_came_back(tid);
    }

    /// Handles the master's order that sets the location of a task.
    pub(super) fn located_order(&mut self, location: Location) {
        let Location { tid, epoch, .. } = location;
        if epoch <= self.epoch {
            return self.log(format!(
                "a place of {tid} of epoch {epoch} is older than {}; it was refused",
                self.epoch
            ));
        }
        self.epoch = epoch;
        self.apply_location(location);
        self.tell_host(HostId::MASTER, HostMsg::TaskLocationAck { tid, epoch });
    }

    pub(super) fn apply_location(&mut self, location: Location) {
        let Location {
            tid,
            host,
            from,
            epoch,
        } = location;
        if !self.locations.set(location) {
            return;
        }
        // A task that has ended may have been restarted.
        self.tasks.ends.forget(tid);
        let me = self.config.host;
        if tid.birth_host() == Some(me) {
            // A task from a checkpoint may have a number that this daemon has not allocated.
            self.tasks.spare(tid.local_part());
        }
        if host == me {
            if self.tasks.get(tid).is_none() {
                let arrival = self.moves.arrivals.entry(tid);
                arrival
                    .or_insert_with(|| Arrival::new(tid, MigrationId(0), from))
                    .located = true;
            }
        } else if self
            .moves
            .arrivals
            .get(&tid)
            .is_some_and(|a| a.located && (!a.ran || a.lost))
            && let Some(mut arrival) = self.moves.arrivals.remove(&tid)
        {
            // The commit was revoked.
            for held in arrival.own.drain() {
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
                task.awaiting = others;
            }
        } else if from != host && self.table.get(from).is_some() {
            self.out.push_back(Output::Carry {
                host: from,
                carried: DataMsg::RouteDrained { dst: tid, epoch },
            });
        }
        self.tell_peers_of_move(tid);
    }

    pub(super) fn send_record(&mut self, of: &Migration, complete: bool) {
        if let Some(task) = self.tasks.get(of.tid) {
            let record = Box::new(self.record_of(task));
            let carried = DataMsg::Record {
                dst: of.tid,
                migration: of.id,
                record,
                complete,
            };
            self.out.push_back(Output::Carry {
                host: of.to,
                carried,
            });
        }
    }

    pub(super) fn hand_task_over(&mut self, of: &Migration) {
        let (dst, migration, to) = (of.tid, of.id, of.to);
        self.send_record(of, true);
        let Some(mut task) = self.tasks.live.remove(&dst) else {
            return;
        };
        self.remember_handing(of, Box::new(self.record_of(&task)));
        self.guest_gone(&task);
        for held in task.inbox.drain() {
            self.hand_on(dst, to, migration, held);
        }
        let epoch = self.locations.epoch(dst);
        // A host that joined later has never used the old location.
        let open = |host: &HostId| {
            self.table.get(*host).is_some() && !task.passed.contains(&(epoch, *host))
        };
        let awaiting = task.awaiting.iter().copied().filter(open).collect();
        self.moves.departed.insert(
            dst,
            Departed {
                migration,
                to,
                epoch,
                awaiting,
            },
        );
        self.departed_step(dst);
        // A daemon that is shutting down may have waited only for this task.
        self.stop_step();
    }

    fn remember_handing(&mut self, of: &Migration, record: Box<TaskRecord>) {
        let (now, until) = (self.now, Some(self.handing_doubtful_until()));
        self.moves
            .handed_over
            .retain(|_, handed| handed.counts(now));
        let handed = HandedOver {
            to: of.to,
            migration: of.id,
            record,
            items: Vec::new(),
            all: false,
            until,
        };
        self.moves.handed_over.insert(of.tid, handed);
    }

    /// Returns the time at which everything sent now has arrived, or the session is known to be
    /// broken.
    fn handing_doubtful_until(&self) -> Micros {
        self.now + self.config.lease + self.config.lease
    }

    /// Forwards an item for a task that has left.
    pub(super) fn hand_on(
        &mut self,
        dst: Tid,
        to: HostId,
        migration: MigrationId,
        held: PendingItem,
    ) {
        let until = self.handing_doubtful_until();
        let remembered = self
            .moves
            .handed_over
            .get_mut(&dst)
            .filter(|handed| handed.migration == migration);
        // Link frames are retransmitted, except those of a process that has exited.
        let remembered = remembered.filter(|handed| {
            matches!(held, PendingItem::Control(_)) || handed.record.handoff.is_some()
        });
        if let Some(handed) = remembered {
            handed.items.push(held.clone());
            handed.until = handed.until.map(|_| until);
        }
        self.out.push_back(Output::Carry {
            host: to,
            carried: DataMsg::Forwarded {
                dst,
                migration,
                item: held,
            },
        });
    }

    /// Keeps what was forwarded to a live daemon whose session has broken, because messages in
    /// transit may be lost.
    pub(super) fn handing_broke(&mut self, host: HostId) {
        let now = self.now;
        for handed in self
            .moves
            .handed_over
            .values_mut()
            .filter(|handed| handed.to == host && handed.counts(now))
        {
            handed.until = None;
        }
    }

    /// Handles a new session with a daemon. If there was an earlier session, repeats what may have
    /// been lost with it.
    pub(super) fn hand_over_again(&mut self, host: HostId) {
        if self.moves.heard.insert(host) {
            return;
        }
        let (now, until) = (self.now, Some(self.handing_doubtful_until()));
        for (dst, handed) in &mut self.moves.handed_over {
            if handed.to != host || !handed.counts(now) {
                continue;
            }
            handed.until = until;
            let (dst, migration, record) = (*dst, handed.migration, handed.record.clone());
            let mut say = |carried| self.out.push_back(Output::Carry { host, carried });
            say(DataMsg::Record {
                dst,
                migration,
                record,
                complete: true,
            });
            for held in handed.items.iter().cloned() {
                say(DataMsg::Forwarded {
                    dst,
                    migration,
                    item: held,
                });
            }
            if handed.all {
                say(DataMsg::ForwardedAll { dst, migration });
            }
        }
        for Location {
            tid,
            host: to,
            from,
            epoch,
        } in self.locations.all()
        {
            if from == host && to != host {
                self.out.push_back(Output::Carry {
                    host,
                    carried: DataMsg::RouteDrained { dst: tid, epoch },
                });
            }
        }
    }

    /// Notes that a host sends nothing more to the old location of a task.
    pub(super) fn passed(&mut self, host: HostId, tid: Tid, epoch: Epoch) {
        if let Some(departed) = self.moves.departed.get_mut(&tid) {
            if departed.epoch == epoch {
                departed.awaiting.remove(&host);
            }
            self.departed_step(tid);
        } else if let Some(task) = self.tasks.get_mut(tid) {
            task.passed.retain(|(older, _)| *older >= epoch);
            task.passed.insert((epoch, host));
        }
    }

    fn departed_step(&mut self, dst: Tid) {
        if self
            .moves
            .departed
            .get(&dst)
            .is_some_and(|d| d.awaiting.is_empty())
            && let Some(Departed { migration, to, .. }) = self.moves.departed.remove(&dst)
        {
            self.out.push_back(Output::Carry {
                host: to,
                carried: DataMsg::ForwardedAll { dst, migration },
            });
            let until = self.handing_doubtful_until();
            let handed = self
                .moves
                .handed_over
                .get_mut(&dst)
                .filter(|handed| handed.migration == migration);
            if let Some(handed) = handed {
                (handed.all, handed.until) = (true, handed.until.map(|_| until));
            }
        }
    }

    /// Handles the record of an arriving task.
    pub(super) fn record_came(
        &mut self,
        tid: Tid,
        migration: MigrationId,
        record: TaskRecord,
        complete: bool,
    ) {
        let Some(arrival) = self
            .moves
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.migration == migration)
        else {
            return;
        };
        let begins = arrival.anew && arrival.record.is_none();
        if complete {
            // A repeated record is followed by all forwarded items again.
            (arrival.handed, arrival.all_handed) = (Inbox::default(), false);
        }
        if complete || !arrival.complete {
            arrival.record = Some(record);
            arrival.complete |= complete;
        }
        if begins {
            // With a restart engine, the record takes the place of the images.
            self.target_event(migration, TargetEvent::Received(Ok(0)));
        }
        self.arrival_step(tid);
    }

    /// Keeps an item that waited at the source.
    pub(super) fn handed(&mut self, tid: Tid, migration: MigrationId, held: PendingItem) {
        match self
            .moves
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.migration == migration)
        {
            Some(arrival) => arrival.handed.push(held),
            None => self.log(format!(
                "something was handed over for {tid}, which is not on its way here; dropped"
            )),
        }
    }

    /// Notes that no more items wait at the source.
    pub(super) fn handed_all(&mut self, tid: Tid, migration: MigrationId) {
        if let Some(arrival) = self
            .moves
            .arrivals
            .get_mut(&tid)
            .filter(|a| a.migration == migration)
        {
            arrival.all_handed = true;
        }
        self.arrival_step(tid);
    }

    /// Makes an arriving task a task of this host when everything is here: its record, the items
    /// that waited, its process, and its library unless the task has exited meanwhile.
    pub(super) fn arrival_step(&mut self, tid: Tid) {
        let Some(arrival) = self.moves.arrivals.get_mut(&tid) else {
            return;
        };
        if arrival.ran && arrival.exited.is_none() {
            // A program that is just starting has no signal handlers yet: signals that it would
            // handle must not end it.
            let anew = arrival.anew;
            let counts = |signal: &i32| !anew || DEADLY.contains(signal);
            for signal in std::mem::take(&mut arrival.signals)
                .into_iter()
                .filter(counts)
            {
                self.out
                    .push_back(Output::ToTasker(ToTasker::Signal { tid, signal }));
            }
        }
        let here = arrival.located && arrival.complete && arrival.all_handed && arrival.ran;
        if !here || (arrival.conn.is_none() && arrival.exited.is_none() && !arrival.waits) {
            return;
        }
        let Some(mut arrival) = self.moves.arrivals.remove(&tid) else {
            return;
        };
        if !arrival.waits {
            self.out.push_back(Output::RemoveToken {
                path: self.config.place.resume_token(arrival.migration),
            });
        }
        let Some(record) = arrival.record.take() else {
            return;
        };
        let (hosts, epoch) = (record.known_hosts.clone(), record.hosts_epoch);
        let mut task = Task::from_record(record);
        (task.pid, task.suspended) = (arrival.pid, arrival.suspended);
        if arrival.anew {
            (task.phase, task.epid, task.returning) =
                (Phase::Expected, arrival.epid, arrival.conn.is_none());
        }
        for held in arrival
            .handed
            .drain()
            .into_iter()
            .chain(arrival.own.drain())
        {
            task.inbox.push(held);
        }
        if task.restart.is_some() {
            // For all other tasks it starts now.
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
            self.open_inbox(tid);
        }
        if let Some((status, used)) = arrival.exited {
            self.process_exited(tid, status, used);
            return self.settled(tid);
        }
        if arrival.anew {
            self.stand_if_it_has_to(tid);
        } else {
            self.guest_arrived(tid, Some(arrival.migration).filter(|_| arrival.waits));
        }
        self.go_on_without_rm();
        self.recheck_watches(tid, &hosts, epoch);
        self.settled(tid);
    }

    /// Handles the removal of a host from the host table.
    pub(super) fn moves_host_gone(&mut self, host: HostId) {
        self.coordinator_lost(host);
        self.moves.handed_over.retain(|_, handed| handed.to != host);
        self.moves.heard.remove(&host);
        let departed: Vec<Tid> = self.moves.departed.keys().copied().collect();
        self.moves.departed.retain(|_, d| d.to != host);
        for tid in departed {
            if let Some(d) = self.moves.departed.get_mut(&tid) {
                d.awaiting.remove(&host);
            }
            self.departed_step(tid);
        }
        let orphans: Vec<Tid> = self
            .moves
            .arrivals
            .values()
            .filter(|a| a.from == host && a.located)
            .map(|a| a.tid)
            .collect();
        for tid in orphans {
            if let Some(arrival) = self.moves.arrivals.get_mut(&tid) {
                // Items that the source had kept are lost with it. Links retransmit, and what an
                // exited process had left has come with the record. The rest is part of the loss of
                // that host.
                (arrival.complete, arrival.all_handed) = (true, true);
                arrival
                    .record
                    .get_or_insert_with(|| Arrival::bare_record(tid));
            }
            self.arrival_step(tid);
        }
    }
}

impl Arrival {
    pub(super) fn new(tid: Tid, migration: MigrationId, from: HostId) -> Arrival {
        Arrival {
            tid,
            migration,
            from,
            record: None,
            complete: false,
            handed: Inbox::default(),
            all_handed: false,
            own: Inbox::default(),
            located: false,
            ran: false,
            run_ordered: false,
            lost: false,
            exited: None,
            conn: None,
            held: false,
            suspended: None,
            waits: false,
            signals: Vec::new(),
            pid: 0,
            begins: None,
            other: None,
            anew: false,
            epid: None,
        }
    }

    /// Takes the state that was stored next to the task's images.
    pub(super) fn take_whole(&mut self, record: TaskRecord, waiting: Vec<PendingItem>) {
        (self.record, self.complete, self.all_handed) = (Some(record), true, true);
        waiting.into_iter().for_each(|held| self.handed.push(held));
    }

    /// Notes the order to run: the copy at the source is gone. A suspended task stays paused.
    pub(super) fn may_run(&mut self, now: Micros, suspended: Suspensions) {
        (self.run_ordered, self.suspended) = (true, Suspended::from(None, now, suspended));
    }

    /// Returns the migration whose coordinator decides on suspensions of the task; `None` if this
    /// host decides.
    pub(super) fn decided_by(&self) -> Option<MigrationId> {
        (self.located && !self.run_ordered && !self.lost).then_some(self.migration)
    }

    /// True if its copy here is dead, even if that is not reported yet.
    pub(super) fn is_lost(&self) -> bool {
        self.lost
    }

    /// Ends a pause of the task. Returns the id under which its library must be resumed, if it is
    /// quiesced.
    pub(super) fn free(&mut self) -> Option<MigrationId> {
        self.held = false;
        (std::mem::take(&mut self.waits) && !self.anew).then_some(self.migration)
    }

    /// Marks its copy here as dead.
    pub(super) fn lose(&mut self) {
        (self.ran, self.lost) = (true, true);
        self.exited.get_or_insert((KILLED, Usage::default()));
    }

    /// Returns a minimal record, for a task whose source was lost before it sent one.
    fn bare_record(tid: Tid) -> TaskRecord {
        let task = Task::new(tid, Tid::NONE, Phase::Detached);
        TaskRecord {
            tid,
            parent: task.parent,
            name: task.name,
            flags: sempa_proto::table::TASK_FORKED | sempa_proto::table::TASK_CONNECTED,
            spawn_token: None,
            output: task.output,
            trace: task.trace,
            rm: None,
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
