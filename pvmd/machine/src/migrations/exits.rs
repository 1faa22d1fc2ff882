//! Exits of tasks whose images are being transferred: only the coordinator knows whether such a
//! task has ended.

use crate::Machine;
use checkpoint_protocol::SourceEvent;
use sempa_proto::migration::{MigrationOrder, StepReport, Usage};
use sempa_proto::{MigrationId, Tid};

impl Machine {
    /// Handles the exit of a task whose images are being transferred. If the migration is
    /// committed, the task continues at the target; if not, it has ended. Only the coordinator
    /// knows which. Returns true if its decision must be awaited.
    pub(crate) fn defer_exit(&mut self, tid: Tid, status: i32, used: Usage) -> bool {
        let stopping = self.shutdown.is_some();
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let Some(id) = task.transferring_migration.filter(|_| !stopping) else {
            return false;
        };
        task.exit_report = Some((status, used));
        let Some(source) = self.migrations.sources.get_mut(&id) else {
            return self.migrations.undecided_exits.contains_key(&id);
        };
        if task.is_being_killed {
            source.handle(SourceEvent::Killed(used));
        } else {
            let of = source.migration().clone();
            source.handle(SourceEvent::TaskExited);
            self.migrations.undecided_exits.insert(id, of);
        }
        true
    }

    /// Handles the coordinator's decision whether the migration of a task that has exited on this
    /// host continues.
    pub(super) fn resolve_deferred_exit(&mut self, id: MigrationId, order: &MigrationOrder) {
        let Some(of) = self.migrations.undecided_exits.remove(&id) else {
            return;
        };
        let Some(task) = self.tasks.get_mut(of.tid) else {
            return;
        };
        let (status, used) = task.exit_report.unwrap_or_default();
        task.transferring_migration = None;
        if *order == MigrationOrder::Release {
            self.send_step_report(id, StepReport::SourceGone(used));
            self.transfer_ownership(&of);
        } else {
            self.end_task(of.tid, status, used);
        }
    }
}
