//! Runs a farm of tasks with different amounts of work on hosts whose processor shares are made
//! unequal by control groups.

use crate::layout::prefix_in_hosts;
use crate::limits::HostCgroups;
use crate::run::{RunningCommand, run_successfully, wait_for};
use crate::testbed::Testbed;
use crate::vm::{COMMAND_TIMEOUT, Vm, VmSettings};
use anyhow::{Context, Result, ensure};
use sempa_proto::event::EventKind;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// Timeout of the program that measures a unit. The program computes for seconds of processor time,
/// which take minutes on a machine that has much other load.
const UNIT_TIMEOUT: Duration = Duration::from_secs(600);

/// A testbed whose hosts may each use a different share of one processor.
#[derive(Debug)]
pub struct UnequalHosts {
    // Field order: the testbed is dropped before the control groups, because only empty control
    // groups can be removed.
    testbed: Testbed,
    cgroups: Vec<HostCgroups>,
    processor_shares: Vec<f64>,
}

/// The result of one task of a farm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskResult {
    /// The tid, as the console prints it.
    pub tid: String,
    pub unit_count: u32,
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
    /// Creates hosts h1, h2, …, one for each element of `processor_shares`: the share of one
    /// processor to which [`Self::start_vm`] limits the host. Call
    /// [`crate::limits::unmet_cpu_requirement`] first; it returns a reason if the machine cannot
    /// limit processors.
    pub fn new(prefix: &Path, processor_shares: &[f64]) -> Result<Self> {
        let testbed = Testbed::new(processor_shares.len(), Some(prefix), &[])?;
        let cgroups = testbed
            .hosts()
            .iter()
            .map(HostCgroups::new)
            .collect::<Result<_>>()?;
        Ok(Self {
            testbed,
            cgroups,
            processor_shares: processor_shares.to_vec(),
        })
    }

    pub fn testbed(&self) -> &Testbed {
        &self.testbed
    }

    /// Returns the control groups of host number `i`, counted from 1 as in its name.
    pub fn cgroup(&self, i: usize) -> &HostCgroups {
        &self.cgroups[i - 1]
    }

    /// Starts a virtual machine on all hosts, without a resource manager, and compiles the program
    /// of the farm's tasks. Then limits all processes of each host to the share of the host.
    pub fn start_vm(&self) -> Result<Vm<'_>> {
        // The hosts are not limited while the virtual machine starts.
        self.cgroups
            .iter()
            .try_for_each(HostCgroups::remove_processor_limit)?;
        let vm = Vm::start(&self.testbed, VmSettings::default())?;
        vm.compile_program("labour")?;
        let slave_names: Vec<&str> = self.testbed.hosts()[1..]
            .iter()
            .map(|host| host.name())
            .collect();
        vm.add_hosts(&slave_names)?;
        for ((cgroup, host), processor_share) in self
            .cgroups
            .iter()
            .zip(self.testbed.hosts())
            .zip(&self.processor_shares)
        {
            cgroup.add_host_processes(host)?;
            cgroup.set_processor_share(*processor_share)?;
        }
        Ok(vm)
    }

    fn program_path(&self, name: &str) -> Result<PathBuf> {
        Ok(
            prefix_in_hosts(self.testbed.prefix().context("programs are installed")?)
                .join("bin")
                .join(name),
        )
    }

    /// Starts a resource manager that rebalances, and waits until the load watchers of all hosts
    /// run. The resource manager ends with the virtual machine.
    pub fn start_resource_manager(&self, vm: &Vm<'_>) -> Result<RunningCommand> {
        let mut command = vm.user_command(self.testbed.host(1), self.program_path("pvm-rm")?);
        command.arg("--balance");
        let rm = RunningCommand::start(command, Stdio::null())?;
        vm.wait_for_event(COMMAND_TIMEOUT, "a registered resource manager", |entry| {
            matches!(entry.kind, EventKind::RmRegistered { .. })
        })?;
        wait_for(COMMAND_TIMEOUT, || {
            let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
            let watcher_count = tasks
                .iter()
                .filter(|task| task.name.ends_with("pvm-load-watcher"))
                .count();
            if watcher_count == self.processor_shares.len() {
                Ok(())
            } else {
                Err(format!("{watcher_count} load watchers: {tasks:?}"))
            }
        })?;
        Ok(rm)
    }

    /// Starts a farm from h1, with one task for each number of work units in `units_per_task`. The
    /// tasks declare that a unit takes `declared_unit_s` seconds on an ordinary processor. If
    /// `declared_unit_s` is `None`, they declare nothing.
    ///
    /// # Errors
    /// The farm does not start.
    pub fn start_farm(
        &self,
        vm: &Vm<'_>,
        declared_unit_s: Option<f64>,
        units_per_task: &[u32],
    ) -> Result<RunningCommand> {
        let mut command = vm.user_command(
            self.testbed.host(1),
            vm.user_home().join("pvm3/bin/LINUX64/labour"),
        );
        command
            .arg("farm")
            .arg(declared_unit_s.unwrap_or(0.0).to_string())
            .args(units_per_task.iter().map(u32::to_string));
        RunningCommand::start(command, Stdio::null())
    }

    /// Compiles and runs a program that measures a unit of work. Returns the processor time in
    /// seconds that a unit takes on this machine.
    pub fn measure_unit_s(&self) -> Result<f64> {
        let prefix = self.testbed.prefix().context("programs are installed")?;
        let program = crate::programs::compile_into(
            "labour",
            prefix,
            &self.testbed.root_home().join("pvm3/bin/LINUX64"),
        )?;
        let mut command = self.testbed.outside_host().root_command(program);
        command.arg("unit");
        let unit_us: f64 = run_successfully(command, UNIT_TIMEOUT)?
            .stdout
            .trim()
            .parse()?;
        Ok(unit_us / 1e6)
    }
}

impl FarmResult {
    /// Parses the output of a farm.
    ///
    /// # Errors
    /// The output is not the output of a farm that has ended.
    pub fn parse(output: &str) -> Result<Self> {
        let (mut tasks, mut elapsed_us) = (Vec::new(), None);
        for line in output.lines() {
            match *line.split(' ').collect::<Vec<_>>() {
                ["task", tid, unit_count, elapsed_us, word] => {
                    let (unit_count, elapsed_us) = (unit_count.parse()?, elapsed_us.parse()?);
                    tasks.push(TaskResult {
                        tid: tid.to_string(),
                        unit_count,
                        elapsed_us,
                        is_correct: word == "right",
                    });
                }
                ["farm", total_us_text] => elapsed_us = Some(total_us_text.parse()?),
                _ => ensure!(line.starts_with("spawned "), "no line of a farm: {line}"),
            }
        }
        Ok(Self {
            tasks,
            elapsed_us: elapsed_us.with_context(|| format!("the farm has not ended: {output}"))?,
        })
    }
}

/// Returns the tids of a running farm's tasks, in the order of their spawns; `None` unless the farm
/// has spawned exactly `task_count` tasks. `output` is the farm's output.
pub fn spawned_tids(output: &str, task_count: usize) -> Option<Vec<String>> {
    let tids = output
        .lines()
        .filter_map(|line| line.strip_prefix("spawned ")?.split(' ').next());
    let tids: Vec<String> = tids.map(str::to_string).collect();
    (tids.len() == task_count).then_some(tids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_a_running_farm_is_refused() {
        let partial_output = "spawned t40002 3\nspawned t40003 9\n";
        assert_eq!(
            spawned_tids(partial_output, 2),
            Some(vec!["t40002".to_string(), "t40003".to_string()])
        );
        assert_eq!(spawned_tids(partial_output, 3), None);
        assert!(FarmResult::parse(partial_output).is_err());
        let result = FarmResult::parse(&format!(
            "{partial_output}task t40003 9 70 right\ntask t40002 3 80 wrong\nfarm 81\n"
        ));
        let result = result.expect("it has ended");
        assert_eq!((result.elapsed_us, result.tasks.len()), (81, 2));
        let last_task = TaskResult {
            tid: "t40002".into(),
            unit_count: 3,
            elapsed_us: 80,
            is_correct: false,
        };
        assert_eq!(result.tasks[1], last_task);
        assert!(FarmResult::parse("something else\n").is_err());
    }
}
