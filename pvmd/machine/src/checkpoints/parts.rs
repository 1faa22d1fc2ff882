//! Parts of checkpoints: the state of one task, from its pause on its host until the store has it.

use crate::tasks::Task;
use crate::{Machine, Output};
use checkpoint_protocol::SourceEvent;
use sempa_proto::checkpoint::CHECKPOINT_VERSION;
use sempa_proto::host::PendingItem;
use sempa_proto::host::SavedTask;
use sempa_proto::migration::{Failure, Step, StepReport};
use sempa_proto::task::ToTask;
use sempa_proto::{HostId, MigrationId, RequestId, Tid};

impl Machine {
    /// Waits until a task that is being stopped for a checkpoint has received the replies to its
    /// requests. If `open` is given, all other tasks of the job are stopped as well, and only these
    /// requests may remain unanswered.
    pub(crate) fn await_replies(
        &mut self,
        id: MigrationId,
        tid: Tid,
        open: Option<Vec<RequestId>>,
    ) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.permitted_open_requests = open.map(|open| open.into_iter().collect());
        task.settling_part = Some(id);
        self.migrations
            .settled_parts
            .extend(task.take_settled_part());
    }

    /// Handles a task that has received all replies. Its state is saved immediately, because it
    /// must belong to the same moment as the memory of all tasks; the other tasks continue soon.
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
                return self.source_event(id, SourceEvent::Dumped(Err(why)));
            }
            let record = Box::new(self.saved_task(task));
            self.migrations.part_records.insert(id, record);
        }
        self.source_event(id, SourceEvent::RequestsSettled);
    }

    /// Removes the data that this host stores for the checkpoint of a task.
    pub(crate) fn forget_part(&mut self, id: MigrationId, tid: Tid) {
        self.migrations.part_records.remove(&id);
        if let Some(task) = self.tasks.get_mut(tid) {
            (task.settling_part, task.permitted_open_requests) = (None, None);
            task.awaited_exits.clear();
        }
    }

    fn saved_task(&self, task: &Task) -> SavedTask {
        let left = task
            .respawning
            .as_ref()
            .map_or(0, |respawning| respawning.left_items);
        let is_saved = |(place, held): &(usize, &PendingItem)| match held {
            // Messages about routes and resource managers refer to the time of the checkpoint. The
            // restarted library is informed of the current resource manager.
            PendingItem::Control(ToTask::Route { .. } | ToTask::RmChanged { .. }) => false,
            PendingItem::Control(_) => true,
            // Link data is in the memory of the tasks, except for the items that an exited process
            // has left at the head of the inbox. Later frames may come from tasks that were already
            // dumped and have continued.
            PendingItem::Frame(_) => *place < left,
        };
        let waiting = task
            .inbox
            .queue
            .iter()
            .enumerate()
            .filter(is_saved)
            .map(|(_, held)| held.clone())
            .collect();
        SavedTask {
            version: CHECKPOINT_VERSION,
            record: self.task_record(task),
            waiting,
        }
    }

    /// Sends the images of a dumped task to the store. The task continues, or is about to be
    /// started again.
    pub(crate) fn upload_part(&mut self, id: MigrationId) {
        let Some(record) = self.migrations.part_records.remove(&id) else {
            return;
        };
        let to = self.master.is_none().then_some(HostId::MASTER);
        if to.is_some() {
            self.migrations.uploading_parts.insert(id);
        }
        self.outputs.push_back(Output::UploadPart {
            migration: id,
            record,
            to,
        });
    }

    /// Handles the result of sending a part to the master.
    pub(crate) fn handle_part_uploaded(&mut self, id: MigrationId, result: Result<(), Failure>) {
        if self.migrations.uploading_parts.remove(&id) {
            self.outputs.push_back(Output::DropImages { migration: id });
            if let Err(why) = result {
                self.send_step_report(
                    id,
                    StepReport::Failed {
                        step: Step::Transfer,
                        why,
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

    /// Handles the store's report that it has stored a part. `Err` is the reason why it could not.
    pub(crate) fn handle_part_stored(&mut self, id: MigrationId, result: Result<(), String>) {
        let now = self.now;
        self.outputs.push_back(Output::DropImages { migration: id });
        if let Some(job_checkpoints) = self.job_checkpoints() {
            job_checkpoints.snapshots.on_images_stored(now, id, result);
        }
    }
}
