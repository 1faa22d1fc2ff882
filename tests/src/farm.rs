//! Runs a farm of tasks with different amounts of work on hosts whose processor shares are made
//! unequal by control groups.

use crate::layout::prefix_in_hosts;
use crate::limits::HostCgroups;
use crate::run::{RunningCommand, run_ok, wait_for};
use crate::testbed::Testbed;
use crate::vm::{COMMAND_TIMEOUT, Settings, Vm};
use anyhow::{Context, Result, ensure};
use sempa_proto::event::EventKind;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// A testbed whose hosts have different shares of one processor each.
#[derive(Debug)]
pub struct UnequalHosts {
    // The testbed is dropped before the control groups, which can be removed only when they are
    // empty.
    bed: Testbed,
    groups: Vec<HostCgroups>,
    shares: Vec<f64>,
}

/// The result of one task of a farm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskResult {
    /// The tid, as the console prints it.
    pub tid: String,
    pub units: u32,
    /// Microseconds from the first spawn of the farm until the result of this task arrived.
    pub elapsed_us: u64,
    /// True if the task's result was correct.
    pub is_correct: bool,
}

/// The results of all tasks of a farm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FarmResult {
    /// The tasks, in the order in which they ended.
    pub tasks: Vec<TaskResult>,
    /// Microseconds from the first spawn of the farm until the last result arrived.
    pub elapsed_us: u64,
}

impl UnequalHosts {
    /// Makes hosts h1, h2, …, one for each of these shares of one processor.
    /// [`crate::limits::lacks`] tells whether the machine can limit processors.
    pub fn new(prefix: &Path, shares: &[f64]) -> Result<UnequalHosts> {
        let bed = Testbed::new(shares.len(), Some(prefix), &[])?;
        let groups = bed
            .hosts()
            .iter()
            .map(HostCgroups::new)
            .collect::<Result<_>>()?;
        Ok(UnequalHosts {
            bed,
            groups,
            shares: shares.to_vec(),
        })
    }

    pub fn bed(&self) -> &Testbed {
        &self.bed
    }

    /// Returns the control group of host number `i`, counted from 1 as in its name.
    pub fn group(&self, i: usize) -> &HostCgroups {
        &self.groups[i - 1]
    }

    /// Starts a virtual machine on all hosts, without a resource manager. When it runs, limits the
    /// daemons and their children to the shares of their hosts.
    pub fn start(&self) -> Result<Vm<'_>> {
        // The hosts are not limited while the virtual machine starts.
        self.groups.iter().try_for_each(HostCgroups::remove_limit)?;
        let vm = Vm::start(&self.bed, Settings::default())?;
        vm.compile_program("labour")?;
        let others: Vec<&str> = self.bed.hosts()[1..]
            .iter()
            .map(|host| host.name())
            .collect();
        vm.add(&others)?;
        for ((group, host), share) in self.groups.iter().zip(self.bed.hosts()).zip(&self.shares) {
            group.add_host(host)?;
            group.set_share(*share)?;
        }
        Ok(vm)
    }

    fn program(&self, name: &str) -> Result<PathBuf> {
        Ok(
            prefix_in_hosts(self.bed.prefix().context("programs are installed")?)
                .join("bin")
                .join(name),
        )
    }

    /// Starts a resource manager that rebalances, and waits for the load watchers of all hosts. The
    /// resource manager ends with the virtual machine.
    pub fn start_resource_manager(&self, vm: &Vm<'_>) -> Result<RunningCommand> {
        let mut command = vm.command(self.bed.host(1), self.program("pvm-rm")?);
        command.arg("--balance");
        let running = RunningCommand::start(command, Stdio::null())?;
        vm.wait_for_event(COMMAND_TIMEOUT, "a registered resource manager", |entry| {
            matches!(entry.kind, EventKind::RmRegistered { .. })
        })?;
        wait_for(COMMAND_TIMEOUT, || {
            let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
            let watchers = tasks
                .iter()
                .filter(|task| task.name.ends_with("pvm-load-watcher"))
                .count();
            if watchers == self.shares.len() {
                Ok(())
            } else {
                Err(format!("{watchers} load watchers: {tasks:?}"))
            }
        })?;
        Ok(running)
    }

    /// Starts a farm from h1, with one task for each number of work units in `units`. The tasks
    /// declare that a unit takes `unit` seconds on an ordinary processor; if `unit` is `None`, they
    /// declare nothing.
    ///
    /// # Errors
    /// The farm does not start.
    pub fn start_farm(
        &self,
        vm: &Vm<'_>,
        unit: Option<f64>,
        units: &[u32],
    ) -> Result<RunningCommand> {
        let mut command = vm.command(self.bed.host(1), vm.home().join("pvm3/bin/LINUX64/labour"));
        command
            .arg("farm")
            .arg(unit.unwrap_or(0.0).to_string())
            .args(units.iter().map(u32::to_string));
        RunningCommand::start(command, Stdio::null())
    }

    /// Compiles and runs a program that measures a unit of work. Returns the processor time in
    /// seconds that a unit takes on this machine.
    pub fn measure_unit_seconds(&self) -> Result<f64> {
        let prefix = self.bed.prefix().context("programs are installed")?;
        let program =
            crate::programs::compile("labour", prefix, &self.bed.home().join("pvm3/bin/LINUX64"))?;
        let mut command = self.bed.desk().command(program);
        command.arg("unit");
        let us: f64 = run_ok(command, COMMAND_TIMEOUT)?.out.trim().parse()?;
        Ok(us / 1e6)
    }
}

impl FarmResult {
    /// Parses the output of a farm.
    ///
    /// # Errors
    /// The output is not that of a farm that has ended.
    pub fn parse(out: &str) -> Result<FarmResult> {
        let (mut tasks, mut us) = (Vec::new(), None);
        for line in out.lines() {
            match *line.split(' ').collect::<Vec<_>>() {
                ["task", tid, units, us, word] => {
                    let (units, us) = (units.parse()?, us.parse()?);
                    tasks.push(TaskResult {
                        tid: tid.to_string(),
                        units,
                        elapsed_us: us,
                        is_correct: word == "right",
                    });
                }
                ["farm", all] => us = Some(all.parse()?),
                _ => ensure!(line.starts_with("spawned "), "no line of a farm: {line}"),
            }
        }
        Ok(FarmResult {
            tasks,
            elapsed_us: us.with_context(|| format!("the farm has not ended: {out}"))?,
        })
    }
}

/// Returns the tids of a running farm's tasks, in the order of their spawns; `None` while fewer
/// than `count` tasks are spawned.
pub fn spawned_tids(out: &str, count: usize) -> Option<Vec<String>> {
    let tids = out
        .lines()
        .filter_map(|line| line.strip_prefix("spawned ")?.split(' ').next());
    let tids: Vec<String> = tids.map(str::to_string).collect();
    (tids.len() == count).then_some(tids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_farm_is_read_when_it_has_ended() {
        let begun = "spawned t40002 3\nspawned t40003 9\n";
        assert_eq!(
            spawned_tids(begun, 2),
            Some(vec!["t40002".to_string(), "t40003".to_string()])
        );
        assert_eq!(spawned_tids(begun, 3), None);
        assert!(FarmResult::parse(begun).is_err());
        let harvest = FarmResult::parse(&format!(
            "{begun}task t40003 9 70 right\ntask t40002 3 80 wrong\nfarm 81\n"
        ));
        let harvest = harvest.expect("it has ended");
        assert_eq!((harvest.elapsed_us, harvest.tasks.len()), (81, 2));
        let last = TaskResult {
            tid: "t40002".into(),
            units: 3,
            elapsed_us: 80,
            is_correct: false,
        };
        assert_eq!(harvest.tasks[1], last);
        assert!(FarmResult::parse("something else\n").is_err());
    }
}
