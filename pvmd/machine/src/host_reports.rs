//! Reports of this host's state for tasks that ask for them.

use super::Machine;
use super::io::{ServiceUse, World};
use super::rpc::ReplyAddress;
use sempa_proto::Tid;
use sempa_proto::host::HostReply;
use sempa_proto::load::is_load_watcher;
use sempa_proto::migration::Usage;
use sempa_proto::owner::GuestAccess;
use sempa_proto::table::{Departure, HostReport, TASK_FORKED, TASK_SERVICE_FLAGS, TaskInfo};
use sempa_proto::task::Reply;
use sempa_proto::tasker_service::ServiceObstacle;
use std::collections::VecDeque;

/// Requesters that wait for a report until the end of the current event, when [`World`] is
/// available.
#[derive(Debug, Default)]
pub(super) struct PendingReports(VecDeque<(ReplyAddress, bool)>);

impl PendingReports {
    /// Adds a requester. If `with_tasks` is true, its report includes the usage of each task.
    pub(super) fn push(&mut self, requester: ReplyAddress, with_tasks: bool) {
        self.0.push_back((requester, with_tasks));
    }
}

impl Machine {
    /// Sends a report to the next requester. Returns false if there is none.
    pub(super) fn send_pending_report(&mut self, world: &dyn World) -> bool {
        let Some((requester, with_tasks)) = self.pending_reports.0.pop_front() else {
            return false;
        };
        let mut report = self.host_report(world);
        if with_tasks {
            report.task_usages = self.task_usages(world);
        }
        self.send_host_reply(
            requester,
            HostReply::Reply(Reply::HostReport(Box::new(report))),
        );
        true
    }

    fn host_report(&self, world: &dyn World) -> HostReport {
        let tasks = self.list_tasks(None);
        let spawned_tasks = tasks.iter().filter(|task| is_spawned_task(task));
        let is_stopped = |task: &&TaskInfo| task.paused || task.suspended;
        let directive = self.owner_control.active_directive.as_ref();
        HostReport {
            version: env!("CARGO_PKG_VERSION").to_string(),
            lease: self.config.lease,
            task_count: spawned_tasks.clone().count() as u32,
            stopped_task_count: spawned_tasks.filter(is_stopped).count() as u32,
            guest_access: directive.map_or(GuestAccess::Welcome, |active| active.directive.access),
            access_reason: directive
                .map_or_else(String::new, |active| active.directive.reason.clone()),
            usage: world.host_usage(),
            task_usages: Vec::new(),
            departures: self.departures(world),
            service_obstacle: self.service_obstacle(),
        }
    }

    /// Returns why CRIU migrates no task of this daemon's user here, as far as the tasker service
    /// is the reason.
    fn service_obstacle(&self) -> Option<ServiceObstacle> {
        let is_unprivileged =
            matches!(self.engine, Some(Err(_))) && !self.missing_capabilities.is_empty();
        match &self.service_use {
            ServiceUse::Missing(obstacle) => Some(obstacle.clone()),
            ServiceUse::ForUser if is_unprivileged => Some(ServiceObstacle::Unprivileged(
                self.missing_capabilities.join(", "),
            )),
            ServiceUse::ForUser | ServiceUse::AsRoot => None,
        }
    }

    fn departures(&self, world: &dyn World) -> Vec<Departure> {
        let sources = self.migrations.sources.iter();
        let departures = sources.map(|(id, source)| Departure {
            tid: source.migration().tid,
            migration: *id,
            sent_bytes: world.sent_bytes(*id),
        });
        departures.collect()
    }

    fn task_usages(&self, world: &dyn World) -> Vec<(Tid, Usage)> {
        let spawned_tasks = self.tasks.live_tasks.values();
        let usages = spawned_tasks.filter(|task| task.is_spawned()).map(|task| {
            let usage = world.process_usage(task.pid);
            (task.tid, usage.merged_with(task.earlier_usage))
        });
        usages.collect()
    }
}

/// True for a task that a user has spawned: not for consoles, and not for tasks that serve the
/// virtual machine.
fn is_spawned_task(task: &TaskInfo) -> bool {
    task.flags & TASK_FORKED != 0
        && task.flags & TASK_SERVICE_FLAGS == 0
        && !is_load_watcher(&task.name)
}
