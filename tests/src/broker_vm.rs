//! A virtual machine with the broker's programs, for tests of sessions.

use crate::requirements::{build_folder, panic_if_unmet, require_program};
use crate::run::{CommandResult, RunningCommand, run_successfully, run_to_end, wait_for};
use crate::testbed::{Host, Testbed};
use crate::vm::{OrPanicWithLogs, Vm, VmSettings};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time limit for each step of a test.
pub const TIMEOUT: Duration = Duration::from_secs(120);
/// Exit status of a program that comes after the end of its session.
pub const EXIT_OVER: i32 = 79;

/// A virtual machine with the broker's programs.
#[derive(Debug)]
pub struct BrokerVm<'a> {
    pub vm: Vm<'a>,
}

pub fn programs_folder(vm: &Vm) -> PathBuf {
    vm.user_home().join("pvm3/bin/LINUX64")
}

pub fn repository_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Compiles C sources against the broker's library of the build.
pub fn compile(output: &Path, sources: &[PathBuf], options: &[&str]) {
    require_program("gcc", "gcc");
    let libraries = output.parent().expect("a folder");
    let mut compiler = Command::new("gcc");
    compiler
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(output)
        .args(options)
        .args(sources)
        .arg("-I")
        .arg(repository_folder().join("broker/capi/include"))
        .arg("-L")
        .arg(libraries)
        .args(["-lsempa_broker", "-lm", "-Wl,-rpath,$ORIGIN"]);
    run_successfully(compiler, TIMEOUT).expect("gcc compiles");
}

impl<'a> BrokerVm<'a> {
    /// Starts a virtual machine on all hosts and installs the broker's programs in the folder where
    /// `spawn` searches.
    pub fn start(bed: &'a Testbed) -> Self {
        Self::start_with_hosts(bed, bed.hosts().len())
    }

    /// As [`BrokerVm::start`], on the first `host_count` hosts.
    pub fn start_with_hosts(bed: &'a Testbed, host_count: usize) -> Self {
        Self::start_with_settings(bed, host_count, VmSettings::default())
    }

    /// As [`BrokerVm::start_with_hosts`], with settings of the virtual machine.
    ///
    /// # Panics
    /// The virtual machine does not start, or a program is not built.
    pub fn start_with_settings(bed: &'a Testbed, host_count: usize, settings: VmSettings) -> Self {
        let vm = Vm::start(bed, settings).expect("a virtual machine");
        let hosts = &bed.hosts()[1..host_count];
        let names: Vec<&str> = hosts.iter().map(Host::name).collect();
        if !names.is_empty() {
            vm.add_hosts(&names).expect("they join");
        }
        let folder = programs_folder(&vm);
        fs::create_dir_all(&folder).expect("a folder");
        let build = build_folder().expect("a folder");
        let programs = [
            "pvm-broker",
            "broker-probe",
            "broker-churn",
            "libsempa_broker.so",
        ];
        for name in programs {
            let file = build.join(name);
            let missing = format!(
                "{name} is not built: run cargo build -p pvm-broker -p sempa-broker-capi -p sempa-tests"
            );
            panic_if_unmet((!file.exists()).then_some(missing));
            // A child process copies, because another test may fork while a copy is open.
            let mut copy = Command::new("cp");
            copy.arg(file).arg(folder.join(name));
            run_successfully(copy, TIMEOUT).expect("a copy");
        }
        let soname = folder.join("libsempa_broker.so.1");
        std::os::unix::fs::symlink("libsempa_broker.so", soname).expect("a link");
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
        for name in ["broker_foreman", "broker_worker", "broker_threads"] {
            let source = programs.join(format!("{name}.c"));
            compile(&folder.join(name), &[source], &["-pthread"]);
        }
        Self { vm }
    }

    pub fn command(&self, host: &Host, program_and_args: &[&str]) -> Command {
        let program = programs_folder(&self.vm).join(program_and_args[0]);
        let mut command = self.vm.user_command(host, program);
        command.args(&program_and_args[1..]);
        command
    }

    pub fn h1(&self) -> &Host {
        self.vm.testbed().host(1)
    }

    pub fn start_on(&self, host: &Host, program_and_args: &[&str]) -> RunningCommand {
        RunningCommand::start(self.command(host, program_and_args), Stdio::null()).expect("starts")
    }

    /// Starts a foreman on h1 whose session ends when the returned command's input is closed.
    pub fn start_foreman(&self, session: &str, tasks: usize, workers: usize) -> RunningCommand {
        let (tasks, workers) = (tasks.to_string(), workers.to_string());
        let arguments = ["broker_foreman", session, &tasks, &workers, "hold"];
        RunningCommand::start(self.command(self.h1(), &arguments), Stdio::piped()).expect("starts")
    }

    /// Runs `pvm-broker` on h1.
    pub fn broker(&self, arguments: &[&str]) -> CommandResult {
        let arguments = [&["pvm-broker"], arguments].concat();
        run_to_end(self.command(self.h1(), &arguments), TIMEOUT).or_panic_with_logs(&self.vm)
    }

    pub fn broker_succeeds(&self, arguments: &[&str]) -> String {
        let result = self.broker(arguments);
        assert!(
            result.succeeded(),
            "{arguments:?}: {result:?}\n{}",
            self.vm.events_and_logs()
        );
        result.stdout
    }

    pub fn report(&self, session: &str) -> Value {
        let text = self.broker_succeeds(&["members", session, "--json"]);
        serde_json::from_str(&text).expect("JSON")
    }

    /// Waits until `count` members are present.
    pub fn wait_until_present(&self, session: &str, count: usize) {
        wait_for(TIMEOUT, || {
            // A broker that was killed answers again after a while.
            let result = self.broker(&["members", session, "--json"]);
            let report: Value = serde_json::from_str(&result.stdout)
                .map_err(|error| format!("{error}: {result:?}"))?;
            let members = report["members"].as_array().ok_or("no members")?;
            let present = members.iter().filter(|m| m["state"] == "present").count();
            match present == count {
                true => Ok(()),
                false => Err(report.to_string()),
            }
        })
        .or_panic_with_logs(&self.vm);
    }

    /// Writes the session file of a worker outside and returns its path.
    pub fn session_file(&self, session: &str) -> String {
        let path = self.vm.user_home().join(format!("{session}.session"));
        let path = path.to_str().expect("UTF-8").to_string();
        self.broker_succeeds(&["secret", session, "--output", &path]);
        path
    }

    /// Runs a program on a host until the program ends.
    pub fn run_on(&self, host: &Host, program_and_args: &[&str]) -> CommandResult {
        run_to_end(self.command(host, program_and_args), TIMEOUT).or_panic_with_logs(&self.vm)
    }

    /// Runs a program on h1 that must succeed, and returns its output.
    pub fn output_of(&self, program_and_args: &[&str]) -> String {
        let result = self.run_on(self.h1(), program_and_args);
        assert!(result.succeeded(), "{program_and_args:?}: {result:?}");
        result.stdout
    }

    /// Returns the processes of the broker on all hosts, as (host number, pid).
    pub fn broker_pids(&self) -> Vec<(usize, u32)> {
        let hosts = (1..).zip(self.vm.testbed().hosts());
        let processes = hosts.flat_map(|(number, host)| {
            let processes = host.processes().into_iter();
            processes
                .filter(|(_, line)| line.contains("pvm-broker serve"))
                .map(move |(pid, _)| (number, pid))
                .collect::<Vec<_>>()
        });
        processes.collect()
    }

    pub fn wait_for_line(&self, command: &RunningCommand, text: &str) {
        wait_for(TIMEOUT, || {
            let output = command.stdout_so_far().map_err(|e| e.to_string())?;
            let errors = command.stderr_so_far().map_err(|e| e.to_string())?;
            match output.contains(text) {
                true => Ok(()),
                false => Err(format!("no {text:?} in {output:?} {errors:?}")),
            }
        })
        .or_panic_with_logs(&self.vm);
    }

    /// Closes the input of a foreman, and waits until it has ended the session.
    pub fn release(&self, mut foreman: RunningCommand) -> String {
        drop(foreman.take_stdin());
        let result = foreman.wait_or_kill(TIMEOUT).or_panic_with_logs(&self.vm);
        assert!(
            result.succeeded(),
            "{result:?}\n{}",
            self.vm.events_and_logs()
        );
        result.stdout
    }

    pub fn expect_status(&self, command: RunningCommand, status: i32) {
        let result = command.wait_or_kill(TIMEOUT).or_panic_with_logs(&self.vm);
        assert_eq!(
            result.status.code(),
            Some(status),
            "{result:?}\n{}",
            self.vm.events_and_logs()
        );
    }

    /// Waits until no broker and no file of a session is left, halts, and checks both again.
    pub fn end(self) {
        let state = self.vm.user_home().join(".local/state/sempa/broker");
        wait_for(TIMEOUT, || {
            let pids = self.broker_pids();
            match pids.is_empty() && !state.exists() {
                true => Ok(()),
                false => Err(format!("{pids:?}, {}: {}", state.display(), state.exists())),
            }
        })
        .or_panic_with_logs(&self.vm);
        self.vm.halt_and_wait().expect("halts");
        for host in self.vm.testbed().hosts() {
            let leftovers = host.leftover_files(self.vm.testbed().folder());
            assert_eq!(leftovers, Vec::<PathBuf>::new(), "{}", host.name());
        }
    }
}

pub fn sum_of_squares(count: u64) -> u64 {
    (0..count).map(|number| number * number).sum()
}

/// Returns the value after `name` in the foreman's line of totals.
pub fn total(output: &str, name: &str) -> u64 {
    let line = output
        .lines()
        .find(|line| line.starts_with("results"))
        .expect("totals");
    let mut words = line.split(' ').skip_while(|word| *word != name);
    words.nth(1).and_then(|w| w.parse().ok()).expect("a number")
}

/// Asserts that the broker counts every message it has taken.
pub fn assert_counts_add_up(report: &Value) {
    let count = |name: &str| report["counts"][name].as_u64().expect("a count");
    let waiting = report["waiting"].as_u64().expect("a count");
    assert_eq!(
        count("taken"),
        count("delivered") + count("returned") + count("dropped") + waiting,
        "{report}"
    );
}
