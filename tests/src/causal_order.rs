//! Runs the programs that check causal order (`tests/programs/causal_*.c`) on Debian's PVM 3.4.6
//! and on Sempa. `tests/programs/causal.h` describes what the programs print.

use crate::programs;
use crate::real_pvm::RealVm;
use crate::requirements::{panic_if_unmet, require_program, unmet_requirement};
use crate::run::{RunningCommand, run_to_end, wait_for};
use crate::testbed::Testbed;
use crate::vm::{Vm, VmSettings};
use anyhow::{Context, Result, bail};
use std::fmt::Write;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time limit for one run of a program on a loaded machine.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the start of a program's tasks on a loaded machine.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of processes that compute at the same time: one for each processor of a small machine.
const LOAD_PROCESS_COUNT: usize = 2;
/// Maximum number of times that PVM's daemons are started. A daemon exceeds PVM's time limit if the
/// machine is loaded.
const PVM_STARTS_MAX: usize = 3;
/// All programs that check causal order.
const PROGRAM_NAMES: [&str; 8] = [
    "causal_relay",
    "causal_groups",
    "causal_mailbox",
    "causal_spawn",
    "causal_notify",
    "causal_signal",
    "causal_farm",
    "causal_quiet",
];
/// Folder below a home in which `pvm_spawn` searches for programs.
const SPAWN_FOLDER: &str = "pvm3/bin/LINUX64";

/// The result of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CausalReport {
    /// Number of observations of receivers.
    pub checked_count: u64,
    /// Number of observations that contradict causal order.
    pub violation_count: u64,
    /// Largest number of messages of a flood that came before an earlier message of a quiet task.
    pub overtaken_count: u64,
}

impl CausalReport {
    /// True if there are observations and none contradicts causal order.
    pub fn is_in_order(&self) -> bool {
        self.checked_count > 0 && self.violation_count == 0
    }

    /// Parses the line that a program prints at its end; `None` if `output` has no such line.
    pub fn parse(output: &str) -> Option<Self> {
        let line = output.lines().find(|line| line.starts_with("causal "))?;
        let number = |name: &str| {
            let mut fields = line.split(' ');
            fields.find_map(|field| field.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        };
        Some(Self {
            checked_count: number("checked")?,
            violation_count: number("violations")?,
            overtaken_count: number("overtaken")?,
        })
    }
}

/// A virtual machine of one of the two systems, with its master on h1.
#[derive(Debug)]
enum System<'a> {
    Pvm(RealVm<'a>),
    Sempa(Vm<'a>),
}

/// A virtual machine on which the programs run, and the results of the runs so far.
#[derive(Debug)]
pub struct CausalOrderCheck<'a> {
    testbed: &'a Testbed,
    system: System<'a>,
    program_folder: PathBuf,
    host_count: usize,
    report_lines: Vec<String>,
    failure_count: usize,
    /// Largest number of overtaking messages in any run.
    overtaken_max: u64,
}

/// Makes a testbed without Sempa, for PVM.
///
/// # Panics
/// The machine does not meet a requirement, or a host does not start.
pub fn require_pvm_testbed(host_count: usize) -> Testbed {
    panic_if_unmet(unmet_requirement());
    require_program("/usr/bin/pvm", "pvm");
    require_program("/usr/include/pvm3.h", "pvm-dev");
    Testbed::new(host_count, None, &[]).unwrap_or_else(|error| panic!("no testbed: {error:#}"))
}

impl<'a> CausalOrderCheck<'a> {
    /// Starts PVM on the first `host_count` hosts of a testbed without Sempa, and compiles the
    /// programs with PVM's header and libraries.
    ///
    /// # Errors
    /// A program does not compile, or a host cannot be added.
    pub fn on_pvm(testbed: &'a Testbed, host_count: usize) -> Result<Self> {
        let program_folder = testbed.root_home().join(SPAWN_FOLDER);
        for name in PROGRAM_NAMES {
            programs::compile_for_pvm(name, &program_folder)?;
        }
        let group_server = program_folder.join("pvmgs");
        if !group_server.exists() {
            symlink("/usr/bin/pvmgs", group_server)?;
        }
        let system = System::Pvm(start_pvm(testbed, host_count)?);
        Ok(Self::new(testbed, system, program_folder, host_count))
    }

    /// Starts Sempa on the first host of a testbed, and compiles the programs with Sempa's header
    /// and libraries.
    ///
    /// # Errors
    /// The virtual machine does not start, or a program does not compile.
    pub fn on_sempa(testbed: &'a Testbed) -> Result<Self> {
        let vm = Vm::start(testbed, VmSettings::default())?;
        for name in PROGRAM_NAMES {
            vm.compile_program(name)?;
        }
        let program_folder = vm.user_home().join(SPAWN_FOLDER);
        Ok(Self::new(testbed, System::Sempa(vm), program_folder, 1))
    }

    fn new(
        testbed: &'a Testbed,
        system: System<'a>,
        program_folder: PathBuf,
        host_count: usize,
    ) -> Self {
        Self {
            testbed,
            system,
            program_folder,
            host_count,
            report_lines: Vec::new(),
            failure_count: 0,
            overtaken_max: 0,
        }
    }

    /// Returns Sempa's virtual machine.
    ///
    /// # Panics
    /// The system is PVM.
    pub fn vm(&self) -> &Vm<'a> {
        match &self.system {
            System::Sempa(vm) => vm,
            System::Pvm(_) => panic!("the system is PVM"),
        }
    }

    /// Adds all other hosts of the testbed to Sempa's virtual machine.
    ///
    /// # Errors
    /// A host does not join.
    pub fn add_other_hosts(&mut self) -> Result<()> {
        let other_hosts = &self.testbed.hosts()[1..];
        let names: Vec<&str> = other_hosts.iter().map(|host| host.name()).collect();
        self.vm().add_hosts(&names)?;
        self.host_count = self.testbed.hosts().len();
        Ok(())
    }

    /// Returns a command that runs `run` on h1. `run` is a program's name without `causal_`, and
    /// its options, separated by spaces. The program's tasks run on `hosts` in turn; if `hosts` is
    /// empty, the system places them.
    pub fn command(&self, run: &str, hosts: &[&str]) -> Command {
        let mut words = run.split(' ');
        let name = format!("causal_{}", words.next().unwrap_or_default());
        let (program, host) = (self.program_folder.join(name), self.testbed.host(1));
        let mut command = match &self.system {
            System::Pvm(vm) => vm.command(host, program),
            System::Sempa(vm) => vm.user_command(host, program),
        };
        command.args(words).args(hosts);
        command
    }

    /// Runs each of `runs` with tasks on `hosts`, and records the results. Stops after a run
    /// without a result, because its tasks may still run.
    pub fn check_runs(&mut self, runs: &[String], hosts: &[&str]) {
        for run in runs {
            let result = run_to_end(self.command(run, hosts), RUN_TIMEOUT);
            let report = result.and_then(|result| {
                CausalReport::parse(&result.stdout).with_context(|| format!("{result:?}"))
            });
            let has_result = report.is_ok();
            self.record(run, hosts, report);
            if !has_result {
                return;
            }
        }
    }

    /// Records the result of a run.
    pub fn record(&mut self, run: &str, hosts: &[&str], report: Result<CausalReport>) {
        let (is_failure, text) = match report {
            Ok(report) => {
                self.overtaken_max = self.overtaken_max.max(report.overtaken_count);
                let counts = format!(
                    "{} of {} violate the order, {} overtaken",
                    report.violation_count, report.checked_count, report.overtaken_count
                );
                (!report.is_in_order(), counts)
            }
            Err(error) => (true, format!("no result: {error:#}")),
        };
        self.failure_count += usize::from(is_failure);
        let mark = if is_failure { "FAILED" } else { "ok" };
        let placement = if hosts.is_empty() {
            "anywhere".to_string()
        } else {
            hosts.join(",")
        };
        self.report_lines.push(format!(
            "{mark:<7}{run:<40} {} hosts, {placement:<10} {text}",
            self.host_count
        ));
    }

    /// Records a failure if `overtaken_count` or more messages overtook another one in any run.
    pub fn expect_overtaken_below(&mut self, overtaken_count: u64) {
        if self.overtaken_max >= overtaken_count {
            self.failure_count += 1;
            self.report_lines.push(format!(
                "FAILED {} messages overtook a quiet one, limit {overtaken_count}",
                self.overtaken_max
            ));
        }
    }

    /// Ends the virtual machine and prints all results.
    ///
    /// # Panics
    /// A run failed, or the virtual machine does not end.
    pub fn finish(self) {
        let mut table = String::new();
        for line in &self.report_lines {
            writeln!(table, "{line}").expect("a text grows");
        }
        eprint!("{table}");
        assert!(!self.report_lines.is_empty(), "nothing has run");
        match self.system {
            System::Pvm(vm) => vm.halt_or_kill().expect("PVM ends"),
            System::Sempa(vm) => {
                let logs = if self.failure_count > 0 {
                    vm.events_and_logs()
                } else {
                    String::new()
                };
                let halt_result = vm.halt_and_wait();
                assert!(self.failure_count == 0, "{table}{logs}");
                halt_result.expect("halts");
            }
        }
        assert!(self.failure_count == 0, "{table}");
    }
}

/// A run of `causal_relay` without an end, whose tasks migrate.
#[derive(Debug)]
pub struct EndlessRelay {
    run: String,
    hosts: Vec<String>,
    director: RunningCommand,
    end_file: PathBuf,
}

impl EndlessRelay {
    /// Starts `causal_relay` with `options`, and with its sender, receiver and relay on `hosts`.
    ///
    /// # Errors
    /// The tasks do not start.
    pub fn start(check: &CausalOrderCheck<'_>, options: &str, hosts: &[&str]) -> Result<Self> {
        let end_file = check.vm().user_home().join("causal-end");
        let run = format!("relay {options} -u {}", end_file.display());
        let _ = fs::remove_file(&end_file);
        let director = RunningCommand::start(check.command(&run, hosts), Stdio::null())?;
        let relay = Self {
            run: format!("relay {options} (migrating)"),
            hosts: hosts.iter().map(|host| host.to_string()).collect(),
            director,
            end_file,
        };
        wait_for(START_TIMEOUT, || {
            relay.tid("relay").map_err(|error| format!("{error:#}"))
        })?;
        Ok(relay)
    }

    /// Returns the tid of the task with the role `role`: `sender`, `receiver` or `relay`.
    ///
    /// # Errors
    /// The task has not started.
    pub fn tid(&self, role: &str) -> Result<String> {
        let output = self.director.stdout_so_far()?;
        let find_tid = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            (words.first() == Some(&"task") && words.get(1) == Some(&role))
                .then(|| words.get(2).map(|tid| tid.to_string()))?
        };
        output
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
            .find_map(find_tid)
            .with_context(|| format!("no {role}: {output} {:?}", self.director.stderr_so_far()))
    }

    /// Ends the run and records its result.
    ///
    /// # Errors
    /// The file that ends the run cannot be made.
    pub fn end(self, check: &mut CausalOrderCheck<'_>) -> Result<()> {
        File::create(&self.end_file)?;
        let report = self.director.wait_or_kill(RUN_TIMEOUT).and_then(|result| {
            CausalReport::parse(&result.stdout).with_context(|| format!("{result:?}"))
        });
        let hosts: Vec<&str> = self.hosts.iter().map(String::as_str).collect();
        check.record(&self.run, &hosts, report);
        Ok(())
    }
}

/// Starts processes that compute with low priority. They end when the returned values are dropped.
///
/// # Errors
/// A process does not start.
pub fn start_load() -> Result<Vec<RunningCommand>> {
    (0..LOAD_PROCESS_COUNT)
        .map(|_| {
            let mut command = Command::new("nice");
            command.args(["-n", "5", "sh", "-c", "while :; do :; done"]);
            RunningCommand::start(command, Stdio::null())
        })
        .collect()
}

/// Starts PVM on the first `host_count` hosts.
fn start_pvm(testbed: &Testbed, host_count: usize) -> Result<RealVm<'_>> {
    let names: Vec<&str> = testbed.hosts()[1..host_count]
        .iter()
        .map(|host| host.name())
        .collect();
    let mut last_output = String::new();
    for _ in 0..PVM_STARTS_MAX {
        let vm = RealVm::start(testbed)?;
        if names.is_empty() {
            return Ok(vm);
        }
        let command_file = testbed.folder().join("pvm-commands");
        fs::write(&command_file, format!("add {}\nquit\n", names.join(" ")))?;
        let console = vm.command(testbed.host(1), "/usr/bin/pvm");
        let result = RunningCommand::start(console, File::open(command_file)?.into())?
            .wait_or_kill(START_TIMEOUT)?;
        if result
            .stdout
            .contains(&format!("{} successful", names.len()))
        {
            return Ok(vm);
        }
        last_output = format!("{result:?}");
        vm.halt_or_kill()?;
    }
    bail!("PVM adds no hosts here: {last_output}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_is_found_among_other_lines() {
        let output = "task sender t40002 h1\ncausal relay checked=7 violations=2 overtaken=1\n";
        let report = CausalReport {
            checked_count: 7,
            violation_count: 2,
            overtaken_count: 1,
        };
        assert_eq!(CausalReport::parse(output), Some(report));
        assert!(!report.is_in_order());
        assert_eq!(CausalReport::parse("causal relay checked=7\n"), None);
    }
}
