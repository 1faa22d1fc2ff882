//! Suspends and resumes tasks on request of users and of the resource manager. A suspended task
//! stays paused, also through migrations, until it is resumed.
//!
//! - A request goes to the daemon of the task, as a signal does. The task is paused and migrates in
//!   the same way as a guest whose host's owner is present (see `guests`). It is paused while at
//!   least one of the two reasons applies.
//! - While the task migrates, the coordinator of the migration decides: either end may be lost, and
//!   the other one must apply the suspensions. An end that receives a request passes it to the
//!   coordinator, and replies when the coordinator has decided.
//! - A preempted task stays suspended until a resource manager ends the preemption. If there is no
//!   resource manager for the duration of [`NO_RM_LEASES`], each daemon ends the preemptions of its
//!   own tasks without asking others.

use super::asks::{Back, no_task};
use super::guests::SUSPEND_TIME;
use super::{Machine, Timer};
use sempa_proto::host::{HostMsg, HostReply, HostRequest};
use sempa_proto::suspend::{SuspendCause, SuspendOrder, Suspensions};
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Micros, MigrationId, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Largest number of requests that wait for coordinators; further ones are refused.
const PASSED_ON_MAX: usize = 65_536;

/// Time without a resource manager after which preemptions end, in leases; one minute by default. A
/// resource manager that has died is restarted within seconds, the loss of its host is noticed
/// after one lease, and a person who starts another one first reads why there is none.
const NO_RM_LEASES: u64 = 6;

/// Suspension of a task of this host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspended {
    /// Time at which the task was suspended or arrived here suspended.
    pub(super) since: Micros,
    pub(super) holds: Suspensions,
}

impl Suspended {
    /// Returns the state for these suspensions; `None` if there are none. An existing suspension
    /// keeps its time.
    pub(super) fn from(
        before: Option<Suspended>,
        now: Micros,
        holds: Suspensions,
    ) -> Option<Suspended> {
        holds.is_suspended().then_some(Suspended {
            since: before.map_or(now, |before| before.since),
            holds,
        })
    }
}

/// A request that was passed to the coordinator of a migration.
#[derive(Debug)]
struct PassedOn {
    migration: MigrationId,
    /// The requester that waits for the reply.
    back: Back,
    order: SuspendOrder,
}

/// Requests that no coordinator has decided yet.
#[derive(Debug, Default)]
pub(super) struct Suspending {
    passed_on: BTreeMap<RequestId, PassedOn>,
    last: RequestId,
}

impl Machine {
    /// Handles a request to suspend or resume a task of this host.
    pub(super) fn suspend(&mut self, back: Back, order: SuspendOrder) {
        let Some(migration) = self.suspended_by_coordinator(order.tid) else {
            let reply = self.suspend_here(&order);
            return self.answer(back, HostReply::Reply(reply));
        };
        if self.suspending.passed_on.len() >= PASSED_ON_MAX {
            let reason = format!(
                "{PASSED_ON_MAX} orders to suspend tasks that move wait already; nothing has changed"
            );
            return self.answer(
                back,
                HostReply::Reply(Reply::Failed {
                    error: PvmError::OutOfRes,
                    reason,
                }),
            );
        }
        self.suspending.last = self.suspending.last.next();
        let id = self.suspending.last;
        self.suspending.passed_on.insert(
            id,
            PassedOn {
                migration,
                back,
                order: order.clone(),
            },
        );
        if self.master.is_some() {
            self.coordinate_suspend(self.config.host, migration, id, &order);
        } else {
            self.tell_host(
                HostId::MASTER,
                HostMsg::SuspendMigrating {
                    migration,
                    id,
                    order,
                },
            );
        }
    }

    /// Returns the migration whose coordinator decides on the suspensions of a task; `None` if this
    /// daemon decides.
    fn suspended_by_coordinator(&self, tid: Tid) -> Option<MigrationId> {
        let source = self
            .moves
            .sources
            .values()
            .find(|s| s.migration().tid == tid && s.coordinator_decides_suspension());
        let arrival = || self.moves.arrivals.get(&tid)?.decided_by();
        // A later request must not overtake an earlier one.
        let passed_on = || {
            self.suspending
                .passed_on
                .values()
                .find(|p| p.order.tid == tid)
                .map(|p| p.migration)
        };
        source
            .map(|source| source.migration().id)
            .or_else(arrival)
            .or_else(passed_on)
    }

    /// Handles a decision of the coordinator. `None`: it does not decide for this end any more, and
    /// the open requests of this migration are handled again.
    pub(super) fn suspend_decided(
        &mut self,
        migration: MigrationId,
        id: RequestId,
        suspended: Option<Suspensions>,
    ) {
        if let Some(holds) = suspended {
            if let Some(PassedOn { back, order, .. }) = self.suspending.passed_on.remove(&id) {
                self.hold_as(order.tid, holds);
                self.answer(back, HostReply::Reply(Reply::Done));
            }
            return;
        }
        // A source that never held its task is not notified of the end of the migration.
        self.moves
            .sources
            .retain(|id, source| *id != migration || source.buffers_incoming());
        let all = std::mem::take(&mut self.suspending.passed_on);
        let (over, open) = all
            .into_iter()
            .partition(|(_, passed)| passed.migration == migration);
        self.suspending.passed_on = open;
        let over: BTreeMap<RequestId, PassedOn> = over;
        for PassedOn { back, order, .. } in over.into_values() {
            let tid = order.tid;
            let place = self.location(tid).filter(|host| *host != self.config.host);
            match place.filter(|_| self.suspended_by_coordinator(tid) == Some(migration)) {
                // The copy here is being killed, or will be.
                Some(host) => self.answer(back, HostReply::MovedTo(host)),
                None => self.question(back, HostRequest::Suspend(order)),
            }
        }
    }

    /// Suspends or resumes a task of this host without a coordinator.
    fn suspend_here(&mut self, order: &SuspendOrder) -> Reply {
        let tid = order.tid;
        match (self.tasks.get(tid), self.moves.arrivals.get(&tid)) {
            (Some(task), _) if task.exited.is_some() => return no_task(tid),
            (Some(task), _) if !task.spawned() || task.serves() => {
                return no_guest(order, task.spawned());
            }
            (None, Some(arrival)) if arrival.is_lost() => return no_task(tid),
            (None, None) => return no_task(tid),
            _ => {}
        }
        let before = self.holds_of(tid);
        let after = before.apply(order);
        if let Some(event) = before.change_event(after, order) {
            self.record(event);
        }
        self.hold_as(tid, after);
        Reply::Done
    }

    /// Returns the suspensions of a task on this host.
    pub(super) fn holds_of(&self, tid: Tid) -> Suspensions {
        let suspended = match self.tasks.get(tid) {
            Some(task) => task.suspended,
            None => self
                .moves
                .arrivals
                .get(&tid)
                .and_then(|arrival| arrival.suspended),
        };
        suspended
            .map(|suspended| suspended.holds)
            .unwrap_or_default()
    }

    /// Applies these suspensions to a task of this host: pauses it, or resumes it if there are
    /// none.
    pub(super) fn hold_as(&mut self, tid: Tid, holds: Suspensions) {
        let (now, welcome) = (self.now, !self.hosting.is_stopped());
        if let Some(task) = self.tasks.get_mut(tid).filter(|task| task.exited.is_none()) {
            let before = task.suspended;
            task.suspended = Suspended::from(before, now, holds);
            match (before.is_some(), holds.is_suspended()) {
                (false, true) => self.hold_guest(tid),
                (true, false) if welcome => self.free_guest(tid),
                _ => {}
            }
        } else if let Some(arrival) = self
            .moves
            .arrivals
            .get_mut(&tid)
            .filter(|arrival| arrival.run_ordered)
        {
            let before = arrival.suspended;
            arrival.suspended = Suspended::from(before, now, holds);
            match (before.is_some(), holds.is_suspended()) {
                (false, true) => self.hold_arrival(tid, SUSPEND_TIME),
                (true, false) if arrival.held && welcome => self.free_arrival(tid),
                _ => {}
            }
        }
        if holds.preempted {
            self.go_on_without_rm();
        }
    }

    /// Resumes preempted tasks if there has been no resource manager for [`NO_RM_LEASES`];
    /// otherwise sets a timer for that moment. A migrating task is resumed by the host where its
    /// migration ends.
    pub(super) fn go_on_without_rm(&mut self) {
        let Some(since) = self.rm.none_since() else {
            return;
        };
        let here = self
            .tasks
            .live
            .values()
            .map(|task| (task.tid, task.suspended));
        let coming = self
            .moves
            .arrivals
            .values()
            .filter(|a| a.run_ordered)
            .map(|a| (a.tid, a.suspended));
        let gives_way = |suspended: Option<Suspended>| suspended.is_some_and(|s| s.holds.preempted);
        let all: Vec<Tid> = here
            .chain(coming)
            .filter(|(_, s)| gives_way(*s))
            .map(|(tid, _)| tid)
            .collect();
        if all.is_empty() {
            return;
        }
        let patience = Micros(self.config.lease.0.saturating_mul(NO_RM_LEASES));
        let left = (since + patience).since(self.now);
        if left > Micros(0) {
            return self.timer(left, Timer::NoRm);
        }
        let why = format!(
            "no resource manager has served this host for {} s",
            patience.0 / 1_000_000
        );
        for tid in all {
            if self.suspended_by_coordinator(tid).is_none() {
                self.suspend_here(&SuspendOrder {
                    tid,
                    suspend: false,
                    cause: SuspendCause::Preempted { why: why.clone() },
                });
            }
        }
    }
}

fn no_guest(order: &SuspendOrder, spawned: bool) -> Reply {
    let SuspendOrder { tid, suspend, .. } = order;
    let what = if *suspend { "suspended" } else { "resumed" };
    let why = if spawned {
        "it serves the virtual machine"
    } else {
        "no daemon has started it; whoever did can stop it with its shell's means"
    };
    Reply::Failed {
        error: PvmError::Denied,
        reason: format!("{tid} was not {what}: {why}"),
    }
}
