//! Tasks that are suspended: they stand still until somebody lets them go on, wherever they are moved meanwhile.
//!
//! The order belongs to the task and is its daemon's business, as a signal is. How it stands still, and how it moves as it
//! stands, is as for guests whose host's owner is there (`guests`): it stands still while either is so.
//!
//! While the task changes hosts the coordinator of the move keeps the order: either end may be lost, and the other one goes on
//! by it. An end that is told something then passes it on, and says that it is done when the coordinator knows.
//!
//! What gives way to another user does so until a resource manager says that there is room again. When there is none any more,
//! each daemon ends that for its own tasks, without asking anybody.

use super::asks::{Back, no_task};
use super::guests::SUSPEND_TIME;
use super::{Machine, Timer};
use sempa_proto::host::{Answer, HostMsg, Question};
use sempa_proto::suspend::{Cause, Holds, Order};
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Micros, MigrationId, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Orders that wait for coordinators at most; more are refused.
const PASSED_ON_MAX: usize = 65_536;

/// What a resource manager has suspended by itself goes on when there has been none for so many leases, a minute by default: one
/// that has died is started again within seconds, that its host is lost is noticed after a lease, and a person who starts
/// another one wants to read first why there is none.
const NO_RM_LEASES: u64 = 6;

/// A task that stands still because somebody wants it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspended {
    /// Since when, here.
    pub(super) since: Micros,
    /// For whom.
    pub(super) holds: Holds,
}

impl Suspended {
    /// What becomes of it when this holds.
    pub(super) fn from(before: Option<Suspended>, now: Micros, holds: Holds) -> Option<Suspended> {
        holds.any().then_some(Suspended {
            since: before.map_or(now, |before| before.since),
            holds,
        })
    }
}

/// An order that was passed on to the coordinator of a move.
#[derive(Debug)]
struct PassedOn {
    migration: MigrationId,
    /// Who waits for an answer.
    back: Back,
    order: Order,
}

/// Orders that coordinators have not decided on.
#[derive(Debug, Default)]
pub(super) struct Suspending {
    passed_on: BTreeMap<RequestId, PassedOn>,
    last: RequestId,
}

impl Machine {
    /// Somebody wants a task of this host suspended, or to go on.
    pub(super) fn suspend(&mut self, back: Back, order: Order) {
        let Some(migration) = self.suspended_by_coordinator(order.tid) else {
            let reply = self.suspend_here(&order);
            return self.answer(back, Answer::Reply(reply));
        };
        if self.suspending.passed_on.len() >= PASSED_ON_MAX {
            let reason = format!(
                "{PASSED_ON_MAX} orders to suspend tasks that move wait already; nothing has changed"
            );
            return self.answer(
                back,
                Answer::Reply(Reply::Failed {
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
                HostMsg::SuspendMoving {
                    migration,
                    id,
                    order,
                },
            );
        }
    }

    /// The move whose coordinator keeps the order for a task; none when this daemon does.
    fn suspended_by_coordinator(&self, tid: Tid) -> Option<MigrationId> {
        let source = self
            .moves
            .sources
            .values()
            .find(|s| s.of().tid == tid && s.is_decided_elsewhere());
        let arrival = || self.moves.arrivals.get(&tid)?.decided_by();
        // What was said before counts before what is said now.
        let passed_on = || {
            self.suspending
                .passed_on
                .values()
                .find(|p| p.order.tid == tid)
                .map(|p| p.migration)
        };
        source
            .map(|source| source.of().id)
            .or_else(arrival)
            .or_else(passed_on)
    }

    /// The coordinator has decided, or does not for this end any more.
    pub(super) fn suspend_decided(
        &mut self,
        migration: MigrationId,
        id: RequestId,
        suspended: Option<Holds>,
    ) {
        if let Some(holds) = suspended {
            if let Some(PassedOn { back, order, .. }) = self.suspending.passed_on.remove(&id) {
                self.hold_as(order.tid, holds);
                self.answer(back, Answer::Reply(Reply::Done));
            }
            return;
        }
        // A source that has never held anything was not told the end of its move.
        self.moves
            .sources
            .retain(|id, source| *id != migration || source.holds());
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
                // The copy here is about to be killed, or is being killed.
                Some(host) => self.answer(back, Answer::Elsewhere(host)),
                None => self.question(back, Question::Suspend(order)),
            }
        }
    }

    /// Decides about a task of this host.
    fn suspend_here(&mut self, order: &Order) -> Reply {
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
        let after = before.after(order);
        if let Some(event) = before.change(after, order) {
            self.record(event);
        }
        self.hold_as(tid, after);
        Reply::Done
    }

    /// For whom a task that is here stands still.
    pub(super) fn holds_of(&self, tid: Tid) -> Holds {
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

    /// Has a task that is here stand still for these from now on, or go on if there is nobody.
    pub(super) fn hold_as(&mut self, tid: Tid, holds: Holds) {
        let (now, welcome) = (self.now, !self.hosting.is_stopped());
        if let Some(task) = self.tasks.get_mut(tid).filter(|task| task.exited.is_none()) {
            let before = task.suspended;
            task.suspended = Suspended::from(before, now, holds);
            match (before.is_some(), holds.any()) {
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
            match (before.is_some(), holds.any()) {
                (false, true) => self.hold_arrival(tid, SUSPEND_TIME),
                (true, false) if arrival.held && welcome => self.free_arrival(tid),
                _ => {}
            }
        }
        if holds.gives_way {
            self.go_on_without_rm();
        }
    }

    /// Tasks that give way go on if there has been no resource manager for long; else that is looked at again in time. One that
    /// is changing hosts is looked at where it comes to rest.
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
        let gives_way = |suspended: Option<Suspended>| suspended.is_some_and(|s| s.holds.gives_way);
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
                self.suspend_here(&Order {
                    tid,
                    suspend: false,
                    cause: Cause::Share { why: why.clone() },
                });
            }
        }
    }
}

fn no_guest(order: &Order, spawned: bool) -> Reply {
    let Order { tid, suspend, .. } = order;
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
