//! Suspends and resumes tasks on request of users and of the resource manager. A suspended task
//! stays paused, also through migrations, until it is resumed.
//!
//! - A request goes to the daemon of the task, as a signal does. The task is paused like a guest
//!   whose host has a present owner (see `guests`), and it can migrate in the same way. It is
//!   paused while it is suspended or the owner is present.
//! - While the task migrates, the coordinator of the migration decides, because the source or the
//!   target may be lost, and the remaining host must apply the suspensions. A source or target that
//!   receives a request passes it to the coordinator, and replies when the coordinator has decided.
//! - A preempted task stays suspended until a resource manager ends the preemption. If there is no
//!   resource manager for [`PREEMPTION_EXPIRY_LEASES`] leases, each daemon ends the preemptions of
//!   its own tasks without asking other daemons.
use super::guests::SUSPEND_QUIESCE_TIMEOUT;
use super::rpc::{ReplyAddress, no_task_reply};
use super::{Machine, Timer};
use sempa_proto::host::{HostMsg, HostReply, HostRequest};
use sempa_proto::suspend::{SuspendCause, SuspendOrder, Suspensions};
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Micros, MigrationId, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Largest number of requests of this daemon that wait for a coordinator; further requests are
/// refused.
const FORWARDED_ORDERS_MAX: usize = 65_536;

/// Time without a resource manager after which preemptions end, in leases; one minute by default. A
/// resource manager that has died is restarted within seconds, the loss of its host is noticed
/// after one lease, and a person who starts another resource manager needs some time.
const PREEMPTION_EXPIRY_LEASES: u64 = 6;

/// Suspension of a task of this host.
#[derive(Clone, Copy, Debug)]
pub(super) struct TaskSuspension {
    /// Time at which the task was suspended, or at which it arrived on this host as a suspended
    /// task.
    pub(super) suspended_at: Micros,
    pub(super) suspensions: Suspensions,
}

impl TaskSuspension {
    /// Replaces the suspensions of a task. Returns `None` if `suspensions` is empty. The time of
    /// the result is that of `previous_suspension`, or `now` if the task was not suspended.
    pub(super) fn update(
        previous_suspension: Option<Self>,
        now: Micros,
        suspensions: Suspensions,
    ) -> Option<Self> {
        suspensions.is_suspended().then_some(Self {
            suspended_at: previous_suspension
                .map_or(now, |previous_suspension| previous_suspension.suspended_at),
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
    orders: BTreeMap<RequestId, ForwardedOrder>,
    last_id: RequestId,
}

impl Machine {
    /// Handles a request to suspend or resume a task of this host.
    pub(super) fn handle_suspend_order(&mut self, reply_to: ReplyAddress, order: SuspendOrder) {
        let Some(migration) = self.deciding_migration(order.tid) else {
            let reply = self.apply_suspend_order(&order);
            return self.send_host_reply(reply_to, HostReply::Reply(reply));
        };
        if self.forwarded_suspend_orders.orders.len() >= FORWARDED_ORDERS_MAX {
            let reason = format!(
                "{FORWARDED_ORDERS_MAX} requests to suspend migrating tasks are waiting already; nothing has changed"
            );
            return self.send_host_reply(
                reply_to,
                HostReply::Reply(Reply::Failed {
                    error: PvmError::OutOfRes,
                    reason,
                }),
            );
        }
        self.forwarded_suspend_orders.last_id = self.forwarded_suspend_orders.last_id.next();
        let id = self.forwarded_suspend_orders.last_id;
        self.forwarded_suspend_orders.orders.insert(
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
        let departing_source = self
            .migrations
            .sources
            .values()
            .find(|s| s.migration().tid == tid && s.coordinator_decides_suspension());
        let arrival_migration = || self.migrations.arrivals.get(&tid)?.deciding_migration();
        // A later request for the same task must not overtake a forwarded request.
        let forwarded_migration = || {
            self.forwarded_suspend_orders
                .orders
                .values()
                .find(|p| p.order.tid == tid)
                .map(|p| p.migration)
        };
        departing_source
            .map(|departing_source| departing_source.migration().id)
            .or_else(arrival_migration)
            .or_else(forwarded_migration)
    }

    /// Handles a decision of the coordinator. If `decision` is `None`, the coordinator no longer
    /// decides for this host, and the open requests of this migration are handled again.
    pub(super) fn handle_suspend_decision(
        &mut self,
        migration: MigrationId,
        id: RequestId,
        decision: Option<Suspensions>,
    ) {
        if let Some(suspensions) = decision {
            if let Some(ForwardedOrder {
                reply_to, order, ..
            }) = self.forwarded_suspend_orders.orders.remove(&id)
            {
                self.apply_suspensions(order.tid, suspensions);
                self.send_host_reply(reply_to, HostReply::Reply(Reply::Done));
            }
            return;
        }
        // A source that has not begun to buffer items for its task is not notified of the end of
        // the migration. Such a source is removed here.
        self.migrations
            .sources
            .retain(|id, source| *id != migration || source.buffers_incoming());
        let all_orders = std::mem::take(&mut self.forwarded_suspend_orders.orders);
        let (affected_orders, remaining_orders) = all_orders
            .into_iter()
            .partition(|(_, forwarded_order)| forwarded_order.migration == migration);
        self.forwarded_suspend_orders.orders = remaining_orders;
        let affected_orders: BTreeMap<RequestId, ForwardedOrder> = affected_orders;
        for ForwardedOrder {
            reply_to, order, ..
        } in affected_orders.into_values()
        {
            let tid = order.tid;
            let other_host = self.location(tid).filter(|host| *host != self.config.host);
            match other_host.filter(|_| self.deciding_migration(tid) == Some(migration)) {
                // The task's process on this host is being killed, or will be killed.
                Some(host) => self.send_host_reply(reply_to, HostReply::MigratedTo(host)),
                None => self.serve_host_request(reply_to, HostRequest::Suspend(order)),
            }
        }
    }

    /// Suspends or resumes a task of this host without a coordinator.
    fn apply_suspend_order(&mut self, order: &SuspendOrder) -> Reply {
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
        let old_suspensions = self.suspensions_of(tid);
        let new_suspensions = old_suspensions.apply_order(order);
        if let Some(event) = old_suspensions.change_event(new_suspensions, order) {
            self.record_event(event);
        }
        self.apply_suspensions(tid, new_suspensions);
        Reply::Done
    }

    /// Returns the suspensions of a task that runs on this host or migrates to it.
    pub(super) fn suspensions_of(&self, tid: Tid) -> Suspensions {
        let suspension = match self.tasks.get(tid) {
            Some(task) => task.suspension,
            None => self
                .migrations
                .arrivals
                .get(&tid)
                .and_then(|arrival| arrival.suspension),
        };
        suspension
            .map(|suspension| suspension.suspensions)
            .unwrap_or_default()
    }

    /// Applies suspensions to a task of this host: pauses the task if it was not suspended, or
    /// resumes it if `suspensions` is empty.
    pub(super) fn apply_suspensions(&mut self, tid: Tid, suspensions: Suspensions) {
        let (now, guests_may_run) = (self.now, !self.owner_control.pauses_guests());
        if let Some(task) = self
            .tasks
            .get_mut(tid)
            .filter(|task| task.exit_report.is_none())
        {
            let old_suspension = task.suspension;
            task.suspension = TaskSuspension::update(old_suspension, now, suspensions);
            match (old_suspension.is_some(), suspensions.is_suspended()) {
                (false, true) => self.pause_guest(tid),
                (true, false) if guests_may_run => self.resume_guest(tid),
                _ => {}
            }
        } else if let Some(arrival) = self
            .migrations
            .arrivals
            .get_mut(&tid)
            .filter(|arrival| arrival.run_ordered)
        {
            let old_suspension = arrival.suspension;
            arrival.suspension = TaskSuspension::update(old_suspension, now, suspensions);
            match (old_suspension.is_some(), suspensions.is_suspended()) {
                (false, true) => self.pause_arrival(tid, SUSPEND_QUIESCE_TIMEOUT),
                (true, false) if arrival.pause_ordered && guests_may_run => {
                    self.resume_arrival(tid)
                }
                _ => {}
            }
        }
        if suspensions.preempted {
            self.end_expired_preemptions();
        }
    }

    /// Resumes preempted tasks if there has been no resource manager for
    /// [`PREEMPTION_EXPIRY_LEASES`] leases; otherwise sets a timer for the end of that time. A
    /// migrating task is resumed by the host where its migration ends.
    pub(super) fn end_expired_preemptions(&mut self) {
        let Some(absent_since) = self.rm_state.absent_since() else {
            return;
        };
        let local_tasks = self
            .tasks
            .live_tasks
            .values()
            .map(|task| (task.tid, task.suspension));
        let arriving_tasks = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.run_ordered)
            .map(|a| (a.tid, a.suspension));
        let is_preempted = |suspension: Option<TaskSuspension>| {
            suspension.is_some_and(|s| s.suspensions.preempted)
        };
        let preempted_tasks: Vec<Tid> = local_tasks
            .chain(arriving_tasks)
            .filter(|(_, s)| is_preempted(*s))
            .map(|(tid, _)| tid)
            .collect();
        if preempted_tasks.is_empty() {
            return;
        }
        let timeout = Micros(self.config.lease.0.saturating_mul(PREEMPTION_EXPIRY_LEASES));
        let remaining_time = (absent_since + timeout).since(self.now);
        if remaining_time > Micros(0) {
            return self.set_timer(remaining_time, Timer::PreemptionExpiry);
        }
        let why = format!(
            "no resource manager has served this host for {} s",
            timeout.0 / 1_000_000
        );
        for tid in preempted_tasks {
            if self.deciding_migration(tid).is_none() {
                self.apply_suspend_order(&SuspendOrder {
                    tid,
                    suspend: false,
                    cause: SuspendCause::Preempted { why: why.clone() },
                });
            }
        }
    }
}

fn not_suspendable_reply(order: &SuspendOrder, is_spawned: bool) -> Reply {
    let SuspendOrder { tid, suspend, .. } = order;
    let participle = if *suspend { "suspended" } else { "resumed" };
    let why = if is_spawned {
        "it serves the virtual machine"
    } else {
        "no daemon has started it; use the job control of the shell that has"
    };
    Reply::Failed {
        error: PvmError::Denied,
        reason: format!("{tid} was not {participle}: {why}"),
    }
}
