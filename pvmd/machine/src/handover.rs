//! A task changes hosts: what this daemon keeps, hands over and takes in meanwhile, and who is told of the new place.
//!
//! The order of what is for a moving task is kept like this. From the order to let go on, the source keeps all. When the
//! new place is made known, every daemon sends what it has for the task to the target from then on, and a
//! [`Carried::Passed`] behind the last that it sent to the source. After the commit the source hands over what it kept,
//! in order, and a [`Carried::HandedAll`] when the last `Passed` is there. The target keeps what comes to it directly and
//! gives it to the task after all that was handed over.
//!
//! A session between two daemons may break while both live, and take with it what was on its way. So the source remembers for
//! a while what it has handed over, and both say all of this again when they hear each other again.

use super::engines::{DEADLY, Other};
use super::suspend::Suspended;
use super::tasks::{Inbox, Phase, Task};
use super::{ConnId, Machine, Output};
use checkpoint_protocol::TargetEvent;
use sempa_proto::event::EventKind;
use sempa_proto::host::{Carried, Held, HostMsg, Location, TaskRecord};
use sempa_proto::migration::{Move, Timeline, Usage};
use sempa_proto::suspend::Holds;
use sempa_proto::task::RedirectAt;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{Epoch, HostId, Micros, MigrationId, Tid};
use std::collections::BTreeSet;

/// Wait status of a task that was killed: signal 9.
const KILLED: i32 = 9;

/// A task on its way here.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) tid: Tid,
    pub(super) migration: MigrationId,
    from: HostId,
    /// What it is; complete when the source has let it go.
    pub(super) record: Option<TaskRecord>,
    complete: bool,
    /// What waited at the source.
    handed: Inbox,
    all_handed: bool,
    /// What came here directly.
    pub(super) own: Inbox,
    /// Its place is here.
    pub(super) located: bool,
    /// Its process runs, or has ended.
    pub(super) ran: bool,
    /// The tasker was told to let it run.
    pub(super) run_ordered: bool,
    /// Its copy here is lost. If the commit stands, the task has ended by that.
    lost: bool,
    pub(super) exited: Option<(i32, Usage)>,
    /// Its library has come back on this connection.
    pub(super) conn: Option<ConnId>,
    /// The tasker was told to hold it.
    pub(super) held: bool,
    /// It is suspended, as far as is known; before it is let run the coordinator knows better.
    pub(super) suspended: Option<Suspended>,
    /// It has never run here: its library waits for the token.
    pub(super) waits: bool,
    /// Signals that came before it ran.
    pub(super) signals: Vec<i32>,
    pub(super) pid: i32,
    /// It does not move: it is started again from a checkpoint.
    pub(super) begins: Option<Timeline>,
    /// Whether its program could be started again here, if CRIU cannot take it.
    pub(super) other: Other,
    /// Its program is started again here.
    pub(super) anew: bool,
    /// The number by which that claims its tid.
    pub(super) epid: Option<i32>,
}

/// A task that has left; what still comes for it is handed over until all daemons know.
#[derive(Debug)]
pub(super) struct Departed {
    pub(super) migration: MigrationId,
    pub(super) to: HostId,
    epoch: Epoch,
    awaiting: BTreeSet<HostId>,
}

/// What was handed over, for as long as the session may still turn out to have broken.
#[derive(Debug)]
pub(super) struct HandedOver {
    to: HostId,
    migration: MigrationId,
    record: Box<TaskRecord>,
    /// Without the frames of links that send again.
    items: Vec<Held>,
    all: bool,
    /// `None`: until the target is heard again.
    until: Option<Micros>,
}

impl HandedOver {
    fn counts(&self, now: Micros) -> bool {
        self.until.is_none_or(|until| until > now)
    }
}

impl Machine {
    /// True for the number of a program that is started again here.
    pub(super) fn is_beginning(&self, epid: i32) -> bool {
        self.moves
            .arrivals
            .values()
            .any(|arrival| arrival.epid == Some(epid))
    }

    /// The program of a task on its way here, that was started again, has connected.
    pub(super) fn comes_anew(&mut self, conn: ConnId, epid: i32) {
        let Some(arrival) = self
            .moves
            .arrivals
            .values_mut()
            .find(|arrival| arrival.epid == Some(epid))
        else {
            return;
        };
        // Whoever else knows the number is too late.
        arrival.epid = None;
        arrival.conn = Some(conn);
        let tid = arrival.tid;
        self.conns.park(conn, tid);
        self.arrival_step(tid);
    }

    /// A library comes back after it let go.
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
            .is_some_and(|s| s.of().tid == tid);
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

    /// The master says where a task runs from now on.
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
        self.tell_host(HostId::MASTER, HostMsg::LocatedAck { tid, epoch });
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
        // One that has ended may have begun again.
        self.tasks.ends.forget(tid);
        let me = self.config.host;
        if tid.home() == Some(me) {
            // A task from a checkpoint may have a number that this daemon has not given out.
            self.tasks.spare(tid.local());
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
            // The commit was taken back.
            for held in arrival.own.drain() {
                match held {
                    Held::Item(item) => self.deliver(tid, item),
                    // Links send again.
                    Held::Link(_) => {}
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
                carried: Carried::Passed { dst: tid, epoch },
            });
        }
        self.tell_peers_of_move(tid);
    }

    pub(super) fn send_record(&mut self, of: &Move, complete: bool) {
        if let Some(task) = self.tasks.get(of.tid) {
            let record = Box::new(self.record_of(task));
            let carried = Carried::Record {
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

    pub(super) fn hand_task_over(&mut self, of: &Move) {
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
        // A host that joined later never had another place in mind.
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
        // A daemon that is ending may have waited for this task only.
        self.stop_step();
    }

    fn remember_handing(&mut self, of: &Move, record: Box<TaskRecord>) {
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

    /// What is sent now has come by then, or the session is known to have broken.
    fn handing_doubtful_until(&self) -> Micros {
        self.now + self.config.lease + self.config.lease
    }

    /// Hands over what waits for a task that has left.
    pub(super) fn hand_on(&mut self, dst: Tid, to: HostId, migration: MigrationId, held: Held) {
        let until = self.handing_doubtful_until();
        let remembered = self
            .moves
            .handed_over
            .get_mut(&dst)
            .filter(|handed| handed.migration == migration);
        // Frames of links are sent again, but for those of a process that has ended.
        let remembered = remembered
            .filter(|handed| matches!(held, Held::Item(_)) || handed.record.successor.is_some());
        if let Some(handed) = remembered {
            handed.items.push(held.clone());
            handed.until = handed.until.map(|_| until);
        }
        self.out.push_back(Output::Carry {
            host: to,
            carried: Carried::Handed {
                dst,
                migration,
                held,
            },
        });
    }

    /// The session with another daemon has broken, which lives: what was on its way there may be lost.
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

    /// Another daemon is heard. If it was heard before, what went there through the session before may be lost.
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
            say(Carried::Record {
                dst,
                migration,
                record,
                complete: true,
            });
            for held in handed.items.iter().cloned() {
                say(Carried::Handed {
                    dst,
                    migration,
                    held,
                });
            }
            if handed.all {
                say(Carried::HandedAll { dst, migration });
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
                    carried: Carried::Passed { dst: tid, epoch },
                });
            }
        }
    }

    /// A host has nothing more on the way to the old place.
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
                carried: Carried::HandedAll { dst, migration },
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

    /// The record of a task on its way here.
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
            // Said again, everything behind it will be, too.
            (arrival.handed, arrival.all_handed) = (Inbox::default(), false);
        }
        if complete || !arrival.complete {
            arrival.record = Some(record);
            arrival.complete |= complete;
        }
        if begins {
            // It takes the place of images.
            self.target_event(migration, TargetEvent::Received(Ok(0)));
        }
        self.arrival_step(tid);
    }

    /// Something that waited at the source.
    pub(super) fn handed(&mut self, tid: Tid, migration: MigrationId, held: Held) {
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

    /// Nothing more waits at the source.
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

    /// A task on its way here becomes a task of this host when all is there: its record, what waited for it, its
    /// process, and its library, unless it has ended meanwhile.
    pub(super) fn arrival_step(&mut self, tid: Tid) {
        let Some(arrival) = self.moves.arrivals.get_mut(&tid) else {
            return;
        };
        if arrival.ran && arrival.exited.is_none() {
            // A program that is just beginning would be ended by any signal that it has prepared for no more than that.
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
                path: self.config.place.token(arrival.migration),
            });
        }
        let Some(record) = arrival.record.take() else {
            return;
        };
        let (hosts, epoch) = (record.hosts.clone(), record.epoch);
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
            // To everybody else it begins.
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

    /// A host is out of the table.
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
                // What was kept at the source is lost with it: links send again (what a process has left that is no more has come
                // with its record), the rest is the loss of that host.
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

    /// All that there is to know of it lay beside its images.
    pub(super) fn take_whole(&mut self, record: TaskRecord, waiting: Vec<Held>) {
        (self.record, self.complete, self.all_handed) = (Some(record), true, true);
        waiting.into_iter().for_each(|held| self.handed.push(held));
    }

    /// Its copy at the source is gone: it may run, unless it is suspended.
    pub(super) fn may_run(&mut self, now: Micros, suspended: Holds) {
        (self.run_ordered, self.suspended) = (true, Suspended::from(None, now, suspended));
    }

    /// The move whose coordinator decides whether it is suspended; none when that is decided here.
    pub(super) fn decided_by(&self) -> Option<MigrationId> {
        (self.located && !self.run_ordered && !self.lost).then_some(self.migration)
    }

    /// True when its copy here is dead, which may not have been told yet.
    pub(super) fn is_lost(&self) -> bool {
        self.lost
    }

    /// It need not stand still; answers what its library waits for, if it does.
    pub(super) fn free(&mut self) -> Option<MigrationId> {
        self.held = false;
        (std::mem::take(&mut self.waits) && !self.anew).then_some(self.migration)
    }

    /// Its copy here is dead.
    pub(super) fn lose(&mut self) {
        (self.ran, self.lost) = (true, true);
        self.exited.get_or_insert((KILLED, Usage::default()));
    }

    /// All that is known of a task whose source was lost before it said more.
    fn bare_record(tid: Tid) -> TaskRecord {
        let task = Task::new(tid, Tid::NONE, Phase::Detached);
        TaskRecord {
            tid,
            parent: task.parent,
            name: task.name,
            flags: sempa_proto::table::TASK_FORKED | sempa_proto::table::TASK_CONNECTED,
            epid: None,
            output: task.output,
            trace: task.trace,
            rm: None,
            marks: Vec::new(),
            requests: Vec::new(),
            meetings: Vec::new(),
            restart: None,
            begin: None,
            successor: None,
            watches: Vec::new(),
            redirect_at: RedirectAt::default(),
            hosts: Vec::new(),
            epoch: Epoch(u64::MAX),
        }
    }
}
