//! Inventories: lists of the tasks of all hosts. The master requests them before and during a
//! checkpoint, before a restart, and to find out whether a job has ended.

use super::{EXIT_CHECK_INTERVAL, Inventory, InventoryPurpose, JobActivity, OpenInventory};
use crate::Machine;
use crate::rpc::RpcPurpose;
use sempa_proto::checkpoint::{CheckpointFailure, RestartFailure};
use sempa_proto::host::HostRequest;
use sempa_proto::table::{TASK_SERVICE_FLAGS, TaskInfo};
use sempa_proto::{HostId, Tid};
use std::collections::BTreeSet;

impl Machine {
    /// Requests the tasks of all hosts. The result is handled when all hosts have replied.
    pub(super) fn request_inventory(&mut self, purpose: InventoryPurpose) {
        let hosts: Vec<HostId> = self.table.hosts.iter().map(|host| host.id).collect();
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        job_checkpoints.last_inventory_number += 1;
        let inventory_number = job_checkpoints.last_inventory_number;
        job_checkpoints.inventories.insert(
            inventory_number,
            OpenInventory {
                purpose,
                missing_reply_count: hosts.len(),
                inventory: Inventory::default(),
                silent_host: None,
            },
        );
        for host in hosts {
            self.call_host(
                host,
                HostRequest::Inventory,
                RpcPurpose::Inventory {
                    inventory_number,
                    host,
                },
            );
        }
    }

    /// Handles the reply of one host to an inventory request. `Err` contains the lost host that has
    /// not replied.
    pub(crate) fn handle_inventory(
        &mut self,
        inventory_number: u64,
        inventory: Result<Inventory, HostId>,
    ) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let Some(open_inventory) = job_checkpoints.inventories.get_mut(&inventory_number) else {
            return;
        };
        match inventory {
            Ok(inventory) => {
                open_inventory.inventory.tasks.extend(inventory.tasks);
                open_inventory
                    .inventory
                    .context_owners
                    .extend(inventory.context_owners);
            }
            Err(host) => open_inventory.silent_host = Some(host),
        }
        open_inventory.missing_reply_count -= 1;
        if open_inventory.missing_reply_count > 0 {
            return;
        }
        let Some(OpenInventory {
            purpose,
            mut inventory,
            silent_host,
            ..
        }) = job_checkpoints.inventories.remove(&inventory_number)
        else {
            return;
        };
        let counts_leftovers = matches!(
            purpose,
            InventoryPurpose::CheckTasksEnded(_) | InventoryPurpose::ReleaseClaims
        );
        if !counts_leftovers {
            inventory.tasks.retain(|task| !task.is_leftover());
        }
        match (purpose, silent_host) {
            (InventoryPurpose::BeginCheckpoint(job), None) => {
                self.begin_snapshot(job, &inventory.tasks)
            }
            // A checkpoint without the tasks of the silent host would be incomplete.
            (InventoryPurpose::BeginCheckpoint(job), Some(host)) => {
                self.handle_incomplete_inventory(job, host)
            }
            (InventoryPurpose::VerifySnapshot(snapshot), None) => {
                self.verify_snapshot(snapshot, inventory)
            }
            (InventoryPurpose::VerifySnapshot(snapshot), Some(host)) => {
                if let Some(job_checkpoints) = self.job_checkpoints() {
                    job_checkpoints
                        .snapshots
                        .on_count_failed(snapshot, CheckpointFailure::HostLost(host));
                }
            }
            (InventoryPurpose::CheckTasksEnded(job), None) => {
                self.check_tasks_ended(job, &inventory.tasks)
            }
            (InventoryPurpose::CheckTasksEnded(job), Some(_)) => {
                self.schedule_check(job, EXIT_CHECK_INTERVAL)
            }
            (InventoryPurpose::BeginRestart(restart_number), None) => {
                self.begin_restart(restart_number, &inventory)
            }
            (InventoryPurpose::BeginRestart(restart_number), Some(host)) => {
                self.finish_restart(restart_number, Err(RestartFailure::HostLost(host)));
            }
            (InventoryPurpose::CheckJobEnded(job), None) => {
                self.check_job_ended(job, &inventory.tasks)
            }
            // The silent host may have tasks of the job, so the job's checkpoints are retained.
            (InventoryPurpose::CheckJobEnded(job), Some(_)) => self.release_later(job),
            (InventoryPurpose::ReleaseClaims, None) => {
                self.release_ended_jobs(Some(&inventory.tasks))
            }
            (InventoryPurpose::ReleaseClaims, Some(_)) => self.release_ended_jobs(None),
        }
    }

    fn handle_incomplete_inventory(&mut self, job: Tid, host: HostId) {
        let is_taking_inventory = self
            .job_checkpoints()
            .and_then(|k| k.jobs.get(&job))
            .is_some_and(|job| job.activity == JobActivity::TakingInventory);
        if is_taking_inventory {
            self.finish_checkpoint(job, Err(CheckpointFailure::HostLost(host)));
        }
    }
}

/// Returns the tasks of a job, and the leftovers of its tasks if `tasks` contains leftovers: its
/// first task, the `known_tids` members, and all tasks that any of these has spawned. Adds the
/// tasks found to `known_tids`. Tasks that serve the virtual machine belong to no job.
pub(super) fn job_members(
    job: Tid,
    known_tids: &mut BTreeSet<Tid>,
    tasks: &[TaskInfo],
) -> Vec<TaskInfo> {
    known_tids.insert(job);
    loop {
        let known_count = known_tids.len();
        let children = tasks
            .iter()
            .filter(|task| known_tids.contains(&task.parent))
            .map(|task| task.tid);
        let children: Vec<Tid> = children.collect();
        known_tids.extend(children);
        if known_tids.len() == known_count {
            break;
        }
    }
    let mut members: Vec<TaskInfo> = tasks
        .iter()
        .filter(|task| known_tids.contains(&task.tid) && task.flags & TASK_SERVICE_FLAGS == 0)
        .cloned()
        .collect();
    // During a migration both hosts may report the task.
    members.sort_by_key(|task| (task.tid, task.migrating));
    members.dedup_by_key(|task| task.tid);
    members
}
