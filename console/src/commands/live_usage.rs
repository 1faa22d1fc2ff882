//! Resources that running tasks have used so far. The resource manager learns them when a task
//! ends.

use crate::clock::unix_micros;
use crate::virtual_machine::{VirtualMachine, describe_host};
use libpvm::Error;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{JobUsage, TaskUsage};
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;

/// The usage of each running task at one moment.
pub(super) struct LiveUsages {
    usages: BTreeMap<Tid, Usage>,
    read_at: Micros,
}

impl LiveUsages {
    /// Asks all hosts. A host that does not answer contributes nothing.
    ///
    /// # Errors
    /// The hosts cannot be listed.
    pub(super) fn read(machine: &dyn VirtualMachine) -> Result<Self, Error> {
        let mut usages = BTreeMap::new();
        for host in machine.hosts()?.hosts {
            if let Ok(report) = describe_host(machine, host.id, true) {
                usages.extend(report.task_usages);
            }
        }
        Ok(Self {
            usages,
            read_at: unix_micros(),
        })
    }

    /// Sets the usage of a task if it runs.
    pub(super) fn add_to_task(&self, task: &mut TaskUsage) {
        if task.end.is_none()
            && let Some(usage) = self.usages.get(&task.tid)
        {
            task.usage = *usage;
        }
    }

    /// Adds the usage of the running tasks of a job to its totals. `tasks` are all tasks of the
    /// job.
    pub(super) fn add_to_job(&self, job: &mut JobUsage, tasks: &[TaskUsage]) {
        for task in tasks.iter().filter(|task| task.end.is_none()) {
            let usage = self.usages.get(&task.tid).copied().unwrap_or_default();
            job.totals.usage = job.totals.usage.merged_with(usage);
            // The clocks of the hosts may differ.
            let wall_time = self.read_at.since(task.started_at);
            job.totals.wall_time = job.totals.wall_time + wall_time;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::rm::{TaskOutcome, UsageTotals};

    fn task(tid: i32, end: Option<(Micros, TaskOutcome)>) -> TaskUsage {
        TaskUsage {
            tid: Tid::from_raw(tid),
            job: Tid::from_raw(0x40001),
            user: 7,
            program: "worker".into(),
            host: "ha1".into(),
            started_at: Micros(100),
            end,
            usage: Usage::default(),
            migrations: 0,
            evictions: 0,
            counts_toward_limits: true,
            suspension: None,
            suspended_time: Micros(0),
        }
    }

    /// Only running tasks contribute: the totals of the resource manager contain the others.
    #[test]
    fn running_tasks_contribute_their_usage() {
        let usage = Usage {
            user: Micros(5),
            ..Usage::default()
        };
        let live_usages = LiveUsages {
            usages: [1, 2].map(|tid| (Tid::from_raw(tid), usage)).into(),
            read_at: Micros(400),
        };
        let mut tasks = [
            task(1, None),
            task(2, Some((Micros(200), TaskOutcome::Status(0)))),
        ];
        let mut job = JobUsage {
            job: Tid::from_raw(0x40001),
            user: 7,
            program: "master".into(),
            started_at: Micros(100),
            ended_at: None,
            totals: UsageTotals::default(),
            suspension: None,
        };
        live_usages.add_to_job(&mut job, &tasks);
        assert_eq!(
            (job.totals.usage.user, job.totals.wall_time),
            (Micros(5), Micros(300))
        );
        tasks
            .iter_mut()
            .for_each(|task| live_usages.add_to_task(task));
        assert_eq!(
            [tasks[0].usage.user, tasks[1].usage.user],
            [Micros(5), Micros(0)]
        );
    }
}
