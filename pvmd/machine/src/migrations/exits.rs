//! Exits of tasks whose images are being transferred: only the coordinator knows whether such a
//! task has ended.

use crate::Machine;
use checkpoint_protocol::SourceEvent;
use sempa_proto::migration::{MigrationOrder, StepReport, Usage};
use sempa_proto::{MigrationId, Tid};

impl Machine {
    /// Handles the exit of a task whose images are being transferred. If the migration is
    /// committed, the task continues at the target; if not, it has ended. Only the coordinator
    /// knows whether the migration is committed. Returns true if the coordinator's decision must be
    /// awaited.
    pub(crate) fn defer_exit(&mut self, tid: Tid, status: i32, usage: Usage) -> bool {
        let is_shutting_down = self.shutdown.is_some();
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let Some(id) = task.transferring_migration.filter(|_| !is_shutting_down) else {
            return false;
        };
        task.exit_report = Some((status, usage));
        let Some(source) = self.migrations.sources.get_mut(&id) else {
            return self.migrations.undecided_exits.contains_key(&id);
        };
        if task.is_being_killed {
            source.handle(SourceEvent::Killed(usage));
        } else {
            let migration = source.migration().clone();
            source.handle(SourceEvent::TaskExited);
            self.migrations.undecided_exits.insert(id, migration);
        }
        true
    }

    /// Handles the coordinator's decision on the migration of a task that has exited on this host.
    /// If the coordinator orders the release, the task continues at the target; otherwise the task
    /// ends.
    pub(super) fn resolve_deferred_exit(&mut self, id: MigrationId, order: &MigrationOrder) {
        let Some(migration) = self.migrations.undecided_exits.remove(&id) else {
            return;
        };
        let continues_at_target = *order == MigrationOrder::Release;
        let Some(task) = self.tasks.get_mut(migration.tid) else {
            return self.settle_leftovers(migration.tid, continues_at_target);
        };
        let (status, usage) = task.exit_report.unwrap_or_default();
        task.transferring_migration = None;
        // Before the target may run its copies of these processes.
        self.settle_leftovers(migration.tid, continues_at_target);
        if continues_at_target {
            self.send_step_report(id, StepReport::SourceKilled(usage));
            self.transfer_ownership(&migration);
        } else {
            self.end_task(migration.tid, status, usage);
        }
    }
}
