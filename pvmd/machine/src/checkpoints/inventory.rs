//! Inventories: the master requests the tasks of all hosts, before and during a checkpoint, before
//! a restart, and to find out whether a job has ended.

use super::{EXIT_CHECK_INTERVAL, Inventory, InventoryPurpose, JobActivity, OpenInventory};
use crate::Machine;
use crate::rpc::RpcPurpose;
use sempa_proto::checkpoint::{CheckpointFailure, RestartFailure};
use sempa_proto::host::HostRequest;
use sempa_proto::table::{TASK_SERVICE_FLAGS, TaskInfo};
use sempa_proto::{HostId, Tid};
use std::collections::BTreeSet;

impl Machine {
    /// Takes an inventory: requests the tasks of all hosts.
    pub(super) fn take_inventory(&mut self, purpose: InventoryPurpose) {
        let hosts: Vec<HostId> = self.table.hosts.iter().map(|host| host.id).collect();
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        job_checkpoints.last_inventory_number += 1;
        let number = job_checkpoints.last_inventory_number;
        job_checkpoints.inventories.insert(
            number,
            OpenInventory {
                purpose,
                missing_replies: hosts.len(),
                collected: Inventory::default(),
                silent_host: None,
            },
        );
        for host in hosts {
            self.call_host(
                host,
                HostRequest::Inventory,
                RpcPurpose::Inventory {
                    inventory: number,
                    host,
                },
            );
        }
    }

    /// Handles the reply of one host to an inventory request, or the loss of that host (`Err`).
    pub(crate) fn handle_inventory(&mut self, number: u64, found: Result<Inventory, HostId>) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let Some(count) = job_checkpoints.inventories.get_mut(&number) else {
            return;
        };
        match found {
            Ok(found) => {
                count.collected.tasks.extend(found.tasks);
                count.collected.context_owners.extend(found.context_owners);
            }
            Err(host) => count.silent_host = Some(host),
        }
        count.missing_replies -= 1;
        if count.missing_replies > 0 {
            return;
        }
        let Some(OpenInventory {
            purpose,
            collected: found,
            silent_host,
            ..
        }) = job_checkpoints.inventories.remove(&number)
        else {
            return;
        };
        match (purpose, silent_host) {
            (InventoryPurpose::BeginCheckpoint(job), None) => {
                self.begin_snapshot(job, &found.tasks)
            }
            // A checkpoint without the tasks of the silent host would be incomplete.
            (InventoryPurpose::BeginCheckpoint(job), Some(host)) => {
                self.handle_incomplete_inventory(job, host)
            }
            (InventoryPurpose::VerifySnapshot(cut), None) => self.verify_snapshot(cut, found),
            (InventoryPurpose::VerifySnapshot(cut), Some(host)) => {
                if let Some(job_checkpoints) = self.job_checkpoints() {
                    job_checkpoints
                        .snapshots
                        .on_count_failed(cut, CheckpointFailure::HostLost(host));
                }
            }
            (InventoryPurpose::CheckGone(job), None) => self.check_job_gone(job, &found.tasks),
            (InventoryPurpose::CheckGone(job), Some(_)) => {
                self.schedule_check(job, EXIT_CHECK_INTERVAL)
            }
            (InventoryPurpose::BeginRestart(wanted), None) => self.begin_restart(wanted, &found),
            (InventoryPurpose::BeginRestart(wanted), Some(host)) => {
                self.finish_restart(wanted, Err(RestartFailure::HostLost(host)));
            }
            (InventoryPurpose::CheckEnded(job), None) => self.check_job_ended(job, &found.tasks),
            // The silent host may have tasks of the job, so the job's checkpoints are retained.
            (InventoryPurpose::CheckEnded(_), Some(_)) => {}
        }
    }

    fn handle_incomplete_inventory(&mut self, job: Tid, host: HostId) {
        let counting = self
            .job_checkpoints()
            .and_then(|k| k.jobs.get(&job))
            .is_some_and(|job| job.activity == JobActivity::TakingInventory);
        if counting {
            self.finish_checkpoint(job, Err(CheckpointFailure::HostLost(host)));
        }
    }
}

/// Returns the tasks of a job: its first task, known members, and everything that any of them has
/// spawned. Tasks that serve the virtual machine belong to no job.
pub(super) fn job_members(
    job: Tid,
    known: &mut BTreeSet<Tid>,
    tasks: &[TaskInfo],
) -> Vec<TaskInfo> {
    known.insert(job);
    loop {
        let before = known.len();
        let children = tasks
            .iter()
            .filter(|task| known.contains(&task.parent))
            .map(|task| task.tid);
        let children: Vec<Tid> = children.collect();
        known.extend(children);
        if known.len() == before {
            break;
        }
    }
    let mut all: Vec<TaskInfo> = tasks
        .iter()
        .filter(|task| known.contains(&task.tid) && task.flags & TASK_SERVICE_FLAGS == 0)
        .cloned()
        .collect();
    // During a migration both hosts may report the task.
    all.sort_by_key(|task| (task.tid, task.migrating));
    all.dedup_by_key(|task| task.tid);
    all
}
