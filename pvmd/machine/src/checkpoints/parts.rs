//! Parts of checkpoints. A part is the state of one task, from the pause of the task until the
//! store has stored the part.

use crate::tasks::Task;
use crate::{Machine, Output};
use checkpoint_protocol::SourceEvent;
use sempa_proto::checkpoint::{CHECKPOINT_VERSION, StoreFailure};
use sempa_proto::host::PendingItem;
use sempa_proto::host::SavedTask;
use sempa_proto::migration::{Failure, Step, StepReport};
use sempa_proto::task::ToTask;
use sempa_proto::{HostId, MigrationId, RequestId, Tid};

impl Machine {
    /// Makes the dump of a task wait until the task has received the replies to its requests. If
    /// `open_requests` is given, all other tasks of the job are already stopped, and only the
    /// requests in `open_requests` may remain unanswered.
    pub(crate) fn begin_awaiting_replies(
        &mut self,
        id: MigrationId,
        tid: Tid,
        open_requests: Option<Vec<RequestId>>,
    ) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.permitted_open_requests =
            open_requests.map(|open_requests| open_requests.into_iter().collect());
        task.settling_part = Some(id);
        self.migrations
            .settled_parts
            .extend(task.take_settled_part());
    }

    /// Handles a task that has received all replies. If all other tasks of the job are stopped, the
    /// state of the task is saved immediately: it must belong to the same moment as the memory of
    /// all tasks of the job, and these tasks continue soon. If last messages for the task are still
    /// queued, the dump fails instead.
    pub(crate) fn handle_part_settled(&mut self, id: MigrationId) {
        let tid = self
            .migrations
            .sources
            .get(&id)
            .map(|source| source.migration().tid);
        if let Some(task) = tid
            .and_then(|tid| self.tasks.get(tid))
            .filter(|task| task.permitted_open_requests.is_some())
        {
            if let Err(why) = self.check_last_messages_received(task) {
                return self.pass_to_source(id, SourceEvent::Dumped(Err(why)));
            }
            let record = Box::new(self.build_saved_task(task));
            self.migrations.part_records.insert(id, record);
        }
        self.pass_to_source(id, SourceEvent::RequestsSettled);
    }

    /// Removes the data that this host stores for the snapshot part of a task.
    pub(crate) fn forget_part(&mut self, id: MigrationId, tid: Tid) {
        self.migrations.part_records.remove(&id);
        if let Some(task) = self.tasks.get_mut(tid) {
            (task.settling_part, task.permitted_open_requests) = (None, None);
            task.awaited_exits.clear();
        }
    }

    fn build_saved_task(&self, task: &Task) -> SavedTask {
        let handoff_item_count = task
            .respawn_state
            .as_ref()
            .map_or(0, |respawn_state| respawn_state.handoff_item_count);
        let is_saved = |(position, item): &(usize, &PendingItem)| match item {
            // Messages about routes and resource managers refer to the time of the checkpoint. The
            // restarted library is informed of the current resource manager.
            PendingItem::Control(ToTask::Route { .. } | ToTask::RmChanged { .. }) => false,
            PendingItem::Control(_) => true,
            // Link data is in the memory of the tasks. The exception is the data that an exited
            // process has handed off: it is at the head of the inbox. Later frames may come from
            // tasks that were already dumped and have continued.
            PendingItem::Frame(_) => *position < handoff_item_count,
        };
        let saved_items = task
            .inbox
            .items
            .iter()
            .enumerate()
            .filter(is_saved)
            .map(|(_, item)| item.clone())
            .collect();
        SavedTask {
            version: CHECKPOINT_VERSION,
            record: self.task_record(task),
            waiting_items: saved_items,
        }
    }

    /// Sends the images of a dumped task to the store. Meanwhile the task runs again, or is about
    /// to be started again.
    pub(crate) fn upload_part(&mut self, id: MigrationId) {
        let Some(record) = self.migrations.part_records.remove(&id) else {
            return;
        };
        let receiver = self.master.is_none().then_some(HostId::MASTER);
        if receiver.is_some() {
            self.migrations.uploading_parts.insert(id);
        }
        self.outputs.push_back(Output::UploadPart {
            migration: id,
            record,
            receiver,
        });
    }

    /// Handles the result of sending a part to the master. Removes the images from this host, and
    /// reports a failure to the master.
    pub(crate) fn handle_part_uploaded(&mut self, id: MigrationId, result: Result<(), Failure>) {
        if self.migrations.uploading_parts.remove(&id) {
            self.outputs.push_back(Output::DropImages { migration: id });
            if let Err(why) = result {
                self.send_step_report(
                    id,
                    StepReport::Failed {
                        step: Step::Transfer,
                        failure: why,
                    },
                );
            }
        }
    }

    /// True if `id` is a part of a snapshot in progress.
    pub(crate) fn is_snapshot_part(&self, id: MigrationId) -> bool {
        self.master
            .as_ref()
            .is_some_and(|master| master.checkpoints.snapshots.snapshot_of(id).is_some())
    }

    /// Handles the end of a transfer of a part's images to the master, successful or not.
    pub(crate) fn handle_part_received(&mut self, id: MigrationId, result: Result<(), Failure>) {
        if let Some(job_checkpoints) = self.job_checkpoints() {
            job_checkpoints.snapshots.on_images_received(id, result);
        }
    }

    /// Handles the store's report on a part. `Err` contains the reason why the store could not
    /// store the part.
    pub(crate) fn handle_part_stored(&mut self, id: MigrationId, result: Result<(), StoreFailure>) {
        let now = self.now;
        self.outputs.push_back(Output::DropImages { migration: id });
        if let Some(job_checkpoints) = self.job_checkpoints() {
            job_checkpoints.snapshots.on_images_stored(now, id, result);
        }
    }
}
