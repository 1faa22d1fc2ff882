//! Suspends and resumes tasks on request of users and of the resource manager. A suspended task
//! stays paused, also through migrations, until it is resumed.
//!
//! - A request goes to the daemon of the task, as a signal does. The task is paused and migrates in
//!   the same way as a guest whose host's owner is present (see `guests`). It is paused while at
//!   least one of the two reasons applies.
//! - While the task migrates, the coordinator of the migration decides, because the source or the
//!   target may be lost, and the remaining host must apply the suspensions. A source or target that
//!   receives a request passes it to the coordinator, and replies when the coordinator has decided.
//! - A preempted task stays suspended until a resource manager ends the preemption. If there is no
//!   resource manager for the duration of [`PREEMPTION_EXPIRY_LEASES`], each daemon ends the
//!   preemptions of its own tasks without asking others.
use super::guests::SUSPEND_QUIESCE_TIMEOUT;
use super::rpc::{ReplyAddress, no_task_reply};
use super::{Machine, Timer};
use sempa_proto::host::{HostMsg, HostReply, HostRequest};
use sempa_proto::suspend::{SuspendCause, SuspendOrder, Suspensions};
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Micros, MigrationId, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Largest number of requests that wait for coordinators; further ones are refused.
const FORWARDED_ORDERS_MAX: usize = 65_536;

/// Time without a resource manager after which preemptions end, in leases; one minute by default. A
/// resource manager that has died is restarted within seconds, the loss of its host is noticed
/// after one lease, and a person who starts another resource manager first reads why there is none.
const PREEMPTION_EXPIRY_LEASES: u64 = 6;

/// Suspension of a task of this host.
#[derive(Clone, Copy, Debug)]
pub(super) struct TaskSuspension {
    /// Time at which the task was suspended, or arrived on this host suspended.
    pub(super) since: Micros,
    pub(super) suspensions: Suspensions,
}

impl TaskSuspension {
    /// Returns the state for these suspensions; `None` if there are none. An existing suspension
    /// keeps its time.
    pub(super) fn updated(
        before: Option<TaskSuspension>,
        now: Micros,
        suspensions: Suspensions,
    ) -> Option<TaskSuspension> {
        suspensions.is_suspended().then_some(TaskSuspension {
            since: before.map_or(now, |before| before.since),
            suspensions,
        })
    }
}

/// A request that was passed to the coordinator of a migration.
#[derive(Debug)]
struct ForwardedOrder {
    migration: MigrationId,
    /// The requester that waits for the reply.
    reply_to: ReplyAddress,
    order: SuspendOrder,
}

/// Requests that no coordinator has decided yet.
#[derive(Debug, Default)]
pub(super) struct ForwardedOrders {
    forwarded: BTreeMap<RequestId, ForwardedOrder>,
    last_id: RequestId,
}

impl Machine {
    /// Handles a request to suspend or resume a task of this host.
    pub(super) fn handle_suspend_order(&mut self, reply_to: ReplyAddress, order: SuspendOrder) {
        let Some(migration) = self.deciding_migration(order.tid) else {
            let reply = self.suspend_local(&order);
            return self.send_host_reply(reply_to, HostReply::Reply(reply));
        };
        if self.forwarded_suspends.forwarded.len() >= FORWARDED_ORDERS_MAX {
            let reason = format!(
                "{FORWARDED_ORDERS_MAX} orders to suspend tasks that move wait already; nothing has changed"
            );
            return self.send_host_reply(
                reply_to,
                HostReply::Reply(Reply::Failed {
                    error: PvmError::OutOfRes,
                    reason,
                }),
            );
        }
        self.forwarded_suspends.last_id = self.forwarded_suspends.last_id.next();
        let id = self.forwarded_suspends.last_id;
        self.forwarded_suspends.forwarded.insert(
            id,
            ForwardedOrder {
                migration,
                reply_to,
                order: order.clone(),
            },
        );
        if self.master.is_some() {
            self.pass_suspend_to_coordinator(self.config.host, migration, id, &order);
        } else {
            self.send_to_host(
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
    fn deciding_migration(&self, tid: Tid) -> Option<MigrationId> {
        let source = self
            .migrations
            .sources
            .values()
            .find(|s| s.migration().tid == tid && s.coordinator_decides_suspension());
        let arrival = || self.migrations.arrivals.get(&tid)?.deciding_migration();
        // A later request must not overtake an earlier one.
        let passed_on = || {
            self.forwarded_suspends
                .forwarded
                .values()
                .find(|p| p.order.tid == tid)
                .map(|p| p.migration)
        };
        source
            .map(|source| source.migration().id)
            .or_else(arrival)
            .or_else(passed_on)
    }

    /// Handles a decision of the coordinator. `None` means that the coordinator does not decide for
    /// this host any more: the open requests of this migration are handled again.
    pub(super) fn handle_suspend_decision(
        &mut self,
        migration: MigrationId,
        id: RequestId,
        suspended: Option<Suspensions>,
    ) {
        if let Some(holds) = suspended {
            if let Some(ForwardedOrder {
                reply_to, order, ..
            }) = self.forwarded_suspends.forwarded.remove(&id)
            {
                self.apply_suspensions(order.tid, holds);
                self.send_host_reply(reply_to, HostReply::Reply(Reply::Done));
            }
            return;
        }
        // A source that never held its task is not notified of the end of the migration.
        self.migrations
            .sources
            .retain(|id, source| *id != migration || source.buffers_incoming());
        let all = std::mem::take(&mut self.forwarded_suspends.forwarded);
        let (affected, remaining) = all
            .into_iter()
            .partition(|(_, passed)| passed.migration == migration);
        self.forwarded_suspends.forwarded = remaining;
        let affected: BTreeMap<RequestId, ForwardedOrder> = affected;
        for ForwardedOrder {
            reply_to, order, ..
        } in affected.into_values()
        {
            let tid = order.tid;
            let place = self.location(tid).filter(|host| *host != self.config.host);
            match place.filter(|_| self.deciding_migration(tid) == Some(migration)) {
                // The task's process on this host is being killed, or will be.
                Some(host) => self.send_host_reply(reply_to, HostReply::MigratedTo(host)),
                None => self.serve_host_request(reply_to, HostRequest::Suspend(order)),
            }
        }
    }

    /// Suspends or resumes a task of this host without a coordinator.
    fn suspend_local(&mut self, order: &SuspendOrder) -> Reply {
        let tid = order.tid;
        match (self.tasks.get(tid), self.migrations.arrivals.get(&tid)) {
            (Some(task), _) if task.exit_report.is_some() => return no_task_reply(tid),
            (Some(task), _) if !task.is_spawned() || task.is_service() => {
                return not_suspendable_reply(order, task.is_spawned());
            }
            (None, Some(arrival)) if arrival.is_lost() => return no_task_reply(tid),
            (None, None) => return no_task_reply(tid),
            _ => {}
        }
        let before = self.suspensions_of(tid);
        let after = before.apply(order);
        if let Some(event) = before.change_event(after, order) {
            self.record(event);
        }
        self.apply_suspensions(tid, after);
        Reply::Done
    }

    /// Returns the suspensions of a task on this host.
    pub(super) fn suspensions_of(&self, tid: Tid) -> Suspensions {
        let suspended = match self.tasks.get(tid) {
            Some(task) => task.suspension,
            None => self
                .migrations
                .arrivals
                .get(&tid)
                .and_then(|arrival| arrival.suspension),
        };
        suspended
            .map(|suspended| suspended.suspensions)
            .unwrap_or_default()
    }

    /// Applies these suspensions to a task of this host: pauses it, or resumes it if there are
    /// none.
    pub(super) fn apply_suspensions(&mut self, tid: Tid, holds: Suspensions) {
        let (now, welcome) = (self.now, !self.owner_control.pauses_guests());
        if let Some(task) = self
            .tasks
            .get_mut(tid)
            .filter(|task| task.exit_report.is_none())
        {
            let before = task.suspension;
            task.suspension = TaskSuspension::updated(before, now, holds);
            match (before.is_some(), holds.is_suspended()) {
                (false, true) => self.pause_guest(tid),
                (true, false) if welcome => self.resume_guest(tid),
                _ => {}
            }
        } else if let Some(arrival) = self
            .migrations
            .arrivals
            .get_mut(&tid)
            .filter(|arrival| arrival.run_ordered)
        {
            let before = arrival.suspension;
            arrival.suspension = TaskSuspension::updated(before, now, holds);
            match (before.is_some(), holds.is_suspended()) {
                (false, true) => self.pause_arrival(tid, SUSPEND_QUIESCE_TIMEOUT),
                (true, false) if arrival.pause_ordered && welcome => self.resume_arrival(tid),
                _ => {}
            }
        }
        if holds.preempted {
            self.expire_preemptions();
        }
    }

    /// Resumes preempted tasks if there has been no resource manager for
    /// [`PREEMPTION_EXPIRY_LEASES`]; otherwise sets a timer for that moment. A migrating task is
    /// resumed by the host where its migration ends.
    pub(super) fn expire_preemptions(&mut self) {
        let Some(since) = self.rm.absent_since() else {
            return;
        };
        let here = self
            .tasks
            .live
            .values()
            .map(|task| (task.tid, task.suspension));
        let arriving = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.run_ordered)
            .map(|a| (a.tid, a.suspension));
        let gives_way =
            |suspended: Option<TaskSuspension>| suspended.is_some_and(|s| s.suspensions.preempted);
        let all: Vec<Tid> = here
            .chain(arriving)
            .filter(|(_, s)| gives_way(*s))
            .map(|(tid, _)| tid)
            .collect();
        if all.is_empty() {
            return;
        }
        let timeout = Micros(self.config.lease.0.saturating_mul(PREEMPTION_EXPIRY_LEASES));
        let left = (since + timeout).since(self.now);
        if left > Micros(0) {
            return self.set_timer(left, Timer::PreemptionExpiry);
        }
        let why = format!(
            "no resource manager has served this host for {} s",
            timeout.0 / 1_000_000
        );
        for tid in all {
            if self.deciding_migration(tid).is_none() {
                self.suspend_local(&SuspendOrder {
                    tid,
                    suspend: false,
                    cause: SuspendCause::Preempted { why: why.clone() },
                });
            }
        }
    }
}

fn not_suspendable_reply(order: &SuspendOrder, spawned: bool) -> Reply {
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
