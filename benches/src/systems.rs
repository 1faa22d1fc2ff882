//! Runs the measured systems. Debian's PVM and Sempa each have a testbed; the MPI systems run on
//! the hosts of PVM's testbed. All systems are ready at the same time and their runs alternate, so
//! that other load on the machine affects all systems equally.

use crate::figures::{System, TimeSummaries, TimeSummary, parse_samples};
use crate::peers_table_rows::{Measurement, MeasurementKind, VmSetup};
use anyhow::{Context, Result, bail};
use sempa_tests::real_pvm::RealVm;
use sempa_tests::run::{run_successfully, run_to_end};
use sempa_tests::testbed::{Host, wait_until_no_process};
use sempa_tests::vm::VmSettings;
use sempa_tests::{Testbed, Vm, requirements, ssh};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for one run of a measured program.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for a compilation on a loaded machine.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for the daemons of deleted hosts to exit.
const DAEMON_EXIT_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of hosts in each testbed.
const HOST_COUNT: usize = 4;
/// Divisor of each measurement's number of rounds in a quick run.
const QUICK_ROUNDS_DIVISOR: usize = 5;
/// Options that make ssh use the key exchange algorithm that Sempa's daemon requests when the
/// daemon adds hosts.
const X25519_OPTIONS: [&str; 2] = ["-o", "KexAlgorithms=^curve25519-sha256"];
/// Divisor of the number of MPICH's rounds if there are more processes than cores. MPICH polls
/// without yielding, so each of these rounds needs a time slice of the kernel.
const MPICH_OVERSUBSCRIBED_ROUNDS_DIVISOR: usize = 100;

/// Result of one measurement on one system.
#[derive(Clone, Debug, Default)]
pub(crate) struct SystemResult {
    /// The summaries of the times, one element for each successful repetition.
    pub(crate) repetitions: Vec<TimeSummaries>,
    /// Reason of the failure, after which the system was not measured again; `None` if all
    /// repetitions succeeded.
    pub(crate) failure: Option<String>,
}

/// The results of all systems for each measurement, in the order of the measurements.
pub(crate) type MeasuredRows = Vec<Vec<(System, SystemResult)>>;

/// Returns the folder with the sources of the C programs.
fn source_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers")
}

/// Runs the measurements on all systems.
///
/// # Errors
/// A testbed cannot be created, a program does not compile, or a virtual machine does not start.
pub(crate) fn measure_rows(
    prefix: &Path,
    measurements: &[Measurement],
    repetition_count: usize,
    is_quick: bool,
) -> Result<MeasuredRows> {
    let mut results: MeasuredRows = vec![Vec::new(); measurements.len()];
    if measurements.is_empty() {
        return Ok(results);
    }
    let (pvm_testbed, sempa_testbed) = new_testbeds(prefix, HOST_COUNT)?;
    for setup in [VmSetup::OneHost, VmSetup::TwoHosts, VmSetup::OneHostWithRm] {
        if measurements
            .iter()
            .all(|measurement| measurement.setup != setup)
        {
            continue;
        }
        let systems = RunningSystems::start(&pvm_testbed, &sempa_testbed, setup)?;
        for (measurement, results_by_system) in measurements
            .iter()
            .zip(&mut results)
            .filter(|(measurement, _)| measurement.setup == setup)
        {
            *results_by_system =
                systems.measure_alternately(measurement, repetition_count, is_quick);
        }
        systems.halt()?;
    }
    Ok(results)
}

/// Creates two testbeds and compiles the programs on them. The first testbed is for PVM, the second
/// for Sempa.
///
/// # Errors
/// The machine does not meet a requirement of a testbed, or a program does not compile.
pub(crate) fn new_testbeds(prefix: &Path, host_count: usize) -> Result<(Testbed, Testbed)> {
    if let Some(unmet_requirement) = requirements::unmet_requirement() {
        bail!("bench peers: {unmet_requirement}");
    }
    let testbeds = (
        Testbed::new(host_count, None, &[])?,
        Testbed::new(host_count, Some(prefix), &[])?,
    );
    compile_programs(&testbeds.0)?;
    compile_programs(&testbeds.1)?;
    Ok(testbeds)
}

fn compile_programs(testbed: &Testbed) -> Result<()> {
    // Both testbeds compile with Debian's header, so that both systems run the same program.
    compile_program(testbed, "gcc", "peers", Some("-lpvm3"))?;
    compile_program(testbed, "mpicc.openmpi", "twin", None)?;
    compile_program(testbed, "mpicc.mpich", "twin", None)
}

/// Compiles the C program `source` with `compiler`, and with the linker option `library` if it is
/// given. The program is written to the folder of root's home in which `spawn` searches.
///
/// # Errors
/// The compiler fails; the error contains its output.
pub(crate) fn compile_program(
    testbed: &Testbed,
    compiler: &str,
    source: &str,
    library: Option<&str>,
) -> Result<()> {
    let mut command = Command::new(compiler);
    command.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o"]);
    command.arg(
        testbed
            .root_home()
            .join("pvm3/bin/LINUX64")
            .join(program_name(compiler, source)),
    );
    command
        .arg(source_folder().join(source).with_extension("c"))
        .args(library);
    run_successfully(command, COMPILE_TIMEOUT)
        .with_context(|| format!("compiling {source}.c with {compiler}"))?;
    Ok(())
}

fn program_name(compiler: &str, source: &str) -> String {
    match compiler.split_once('.') {
        Some((_, mpi_name)) => format!("{source}-{mpi_name}"),
        None => source.to_string(),
    }
}

/// The parameters for one run of the measuring program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProgramRun<'a> {
    pub(crate) args: &'a [String],
    /// Number of processes if the program is an MPI program.
    pub(crate) mpi_ranks: usize,
    /// True if there are more processes than cores, so that waiting processes must yield.
    pub(crate) is_oversubscribed: bool,
    /// True if the processes run on two hosts.
    pub(crate) uses_two_hosts: bool,
}

/// The running virtual machines of PVM and of Sempa.
pub(crate) struct RunningSystems<'a> {
    pvm_testbed: &'a Testbed,
    sempa_testbed: &'a Testbed,
    pvm: RealVm<'a>,
    sempa: Vm<'a>,
}

impl<'a> RunningSystems<'a> {
    /// Starts both virtual machines. Depending on `setup`, also adds the host h2 to both, or starts
    /// a resource manager in Sempa's virtual machine.
    ///
    /// # Errors
    /// A virtual machine does not start, or the host cannot be added.
    pub(crate) fn start(
        pvm_testbed: &'a Testbed,
        sempa_testbed: &'a Testbed,
        setup: VmSetup,
    ) -> Result<Self> {
        let rm = (setup == VmSetup::OneHostWithRm).then(|| "pvm-rm".to_string());
        let settings = VmSettings {
            rm_command: rm,
            ..VmSettings::default()
        };
        let pvm = RealVm::start(pvm_testbed)?;
        let sempa = Vm::start(sempa_testbed, settings)?;
        let systems = RunningSystems {
            pvm_testbed,
            sempa_testbed,
            pvm,
            sempa,
        };
        if setup == VmSetup::TwoHosts {
            for system in [System::Pvm, System::Sempa] {
                let mut command = systems.measuring_program_command(system);
                command.args(["add_hosts", "host=h2", "keep=1"]);
                run_successfully(command, RUN_TIMEOUT)
                    .with_context(|| format!("a second host for {}", system.name()))?;
            }
        }
        Ok(systems)
    }

    /// Halts both virtual machines.
    ///
    /// # Errors
    /// A process of a virtual machine remains.
    pub(crate) fn halt(self) -> Result<()> {
        self.sempa.halt_and_wait()?;
        self.pvm.halt_or_kill()
    }

    /// Runs a measurement `repetition_count` times on each system. Each repetition runs all
    /// systems, one after another. A system whose run has failed is not run again.
    fn measure_alternately(
        &self,
        measurement: &Measurement,
        repetition_count: usize,
        is_quick: bool,
    ) -> Vec<(System, SystemResult)> {
        let is_measured = |system: &System| system.uses_pvm_calls() || measurement.mpi_ranks > 0;
        let mut results: Vec<(System, SystemResult)> = System::ALL
            .into_iter()
            .filter(is_measured)
            .map(|system| (system, SystemResult::default()))
            .collect();
        for repetition in 1..=repetition_count {
            eprintln!(
                "bench peers: {} ({repetition} of {repetition_count})",
                measurement.args.join(" ")
            );
            // Every second repetition reverses the order, because caches may be cold for the system
            // that is measured first.
            if repetition % 2 == 0 {
                results.reverse();
            }
            for (system, result) in results
                .iter_mut()
                .filter(|(_, result)| result.failure.is_none())
            {
                match self.measure_once(*system, measurement, is_quick) {
                    Ok(samples) => result.repetitions.push(samples),
                    Err(error) => result.failure = Some(format!("{error:#}")),
                }
            }
        }
        results.sort_by_key(|(system, _)| *system);
        results
    }

    fn measure_once(
        &self,
        system: System,
        measurement: &Measurement,
        is_quick: bool,
    ) -> Result<TimeSummaries> {
        if measurement.kind == MeasurementKind::Login {
            return self.measure_logins(system, measurement);
        }
        let mut round_count = if is_quick {
            (measurement.round_count / QUICK_ROUNDS_DIVISOR).max(2)
        } else {
            measurement.round_count
        };
        if system == System::Mpich && measurement.is_oversubscribed {
            round_count = (round_count / MPICH_OVERSUBSCRIBED_ROUNDS_DIVISOR).max(2);
        }
        let mut arguments: Vec<String> = measurement
            .args
            .iter()
            .map(|argument| (*argument).to_string())
            .collect();
        arguments.extend([
            format!("rounds={round_count}"),
            format!("warm={}", (round_count / 10).max(1)),
        ]);
        let uses_two_hosts = measurement.setup == VmSetup::TwoHosts;
        self.run_measuring_program(
            system,
            &ProgramRun {
                args: &arguments,
                mpi_ranks: measurement.mpi_ranks,
                is_oversubscribed: measurement.is_oversubscribed,
                uses_two_hosts,
            },
        )
    }

    /// Runs the measuring program of a system once.
    ///
    /// # Errors
    /// The program fails, does not end, or prints no samples.
    pub(crate) fn run_measuring_program(
        &self,
        system: System,
        program_run: &ProgramRun,
    ) -> Result<TimeSummaries> {
        let mut command = if system.uses_pvm_calls() {
            self.measuring_program_command(system)
        } else {
            self.mpi_launcher_command(system, program_run)?
        };
        // The MPI launcher has already placed the processes, so the argument `host=` is omitted.
        command.args(
            program_run
                .args
                .iter()
                .filter(|argument| system.uses_pvm_calls() || !argument.starts_with("host=")),
        );
        let result = run_to_end(command, RUN_TIMEOUT)?.expect_success(system.name())?;
        parse_samples(&result.stdout)
    }

    /// Returns a command that runs the measuring program on h1.
    pub(crate) fn measuring_program_command(&self, system: System) -> Command {
        self.command_on_h1(
            system,
            self.testbed(system)
                .root_home()
                .join("pvm3/bin/LINUX64/peers"),
        )
    }

    /// Returns a command that runs `program` on h1 with the environment variables of the system's
    /// virtual machine.
    pub(crate) fn command_on_h1(&self, system: System, program: impl AsRef<Path>) -> Command {
        let host = self.testbed(system).host(1);
        if system == System::Pvm {
            self.pvm.command(host, program)
        } else {
            self.sempa.user_command(host, program)
        }
    }

    fn testbed(&self, system: System) -> &'a Testbed {
        if system == System::Sempa {
            self.sempa_testbed
        } else {
            self.pvm_testbed
        }
    }

    /// Returns a command that runs the MPI launcher on h1 of PVM's testbed. None of Sempa's
    /// libraries is installed there.
    fn mpi_launcher_command(&self, system: System, program_run: &ProgramRun) -> Result<Command> {
        let testbed = self.pvm_testbed;
        let remote_shell = self.pvm.rsh_script();
        let rank_count_text = program_run.mpi_ranks.to_string();
        let mut command = match system {
            System::OpenMpi => {
                let mut command = testbed.host(1).root_command("mpirun.openmpi");
                command.args([
                    "--allow-run-as-root",
                    "--bind-to",
                    "none",
                    "--oversubscribe",
                    "-n",
                    &rank_count_text,
                ]);
                command.args([
                    "--mca",
                    "mpi_yield_when_idle",
                    if program_run.is_oversubscribed {
                        "1"
                    } else {
                        "0"
                    },
                ]);
                if program_run.uses_two_hosts {
                    command.args(["--host", "h1:1,h2:1", "--mca", "btl_tcp_if_include", "eth0"]);
                    command
                        .args([
                            "--mca",
                            "oob_tcp_if_include",
                            "eth0",
                            "--mca",
                            "plm_rsh_agent",
                        ])
                        .arg(remote_shell);
                }
                command
            }
            System::Mpich => {
                let mut command = testbed.host(1).root_command("mpirun.mpich");
                command.args(["-bind-to", "none", "-n", &rank_count_text]);
                if program_run.uses_two_hosts {
                    command.args([
                        "-hosts",
                        "h1,h2",
                        "-ppn",
                        "1",
                        "-iface",
                        "eth0",
                        "-launcher",
                        "ssh",
                    ]);
                    command.arg("-launcher-exec").arg(remote_shell);
                    // MPICH's transport treats hosts that share a kernel as one host. The transport
                    // then fails because these hosts share no memory.
                    command.args([
                        "-genv",
                        "UCX_TLS",
                        "tcp,self",
                        "-genv",
                        "UCX_NET_DEVICES",
                        "eth0",
                    ]);
                }
                command
            }
            _ => bail!("{} is not an MPI", system.name()),
        };
        let mpi_compiler = if system == System::OpenMpi {
            "mpicc.openmpi"
        } else {
            "mpicc.mpich"
        };
        command.arg(
            testbed
                .root_home()
                .join("pvm3/bin/LINUX64")
                .join(program_name(mpi_compiler, "twin")),
        );
        Ok(command)
    }

    /// Adds and deletes hosts with the measuring program. Also measures ssh logins to the same
    /// hosts without PVM. Returns the times of both when the daemons have exited.
    fn measure_logins(&self, system: System, measurement: &Measurement) -> Result<TimeSummaries> {
        let testbed = self.testbed(system);
        let host_names: Vec<&str> = measurement
            .args
            .iter()
            .filter_map(|argument| argument.strip_prefix("host="))
            .flat_map(|list| list.split(','))
            .collect();
        // ssh is measured with its defaults, and with the key exchange algorithm that Sempa's
        // daemon requests.
        let mut ssh_times = TimeSummaries::new();
        for (name, hosts) in [("ssh", &host_names[..1]), ("ssh_all", &host_names[..])] {
            ssh_times.insert(
                name.to_string(),
                TimeSummary::of_single_time(measure_ssh_logins_us(testbed, hosts, &[])?),
            );
            ssh_times.insert(
                format!("{name}_x25519"),
                TimeSummary::of_single_time(measure_ssh_logins_us(
                    testbed,
                    hosts,
                    &X25519_OPTIONS,
                )?),
            );
        }
        let mut command = self.measuring_program_command(system);
        command.args(measurement.args);
        let result = run_to_end(command, RUN_TIMEOUT)?.expect_success(system.name())?;
        let mut samples = parse_samples(&result.stdout)?;
        samples.extend(ssh_times);
        testbed
            .hosts()
            .iter()
            .skip(1)
            .try_for_each(|host: &Host| wait_until_no_process(host, "pvmd", DAEMON_EXIT_TIMEOUT))?;
        Ok(samples)
    }
}

/// Runs `ssh HOST true` on all these hosts at the same time. Returns the time in microseconds until
/// all have ended.
fn measure_ssh_logins_us(testbed: &Testbed, hosts: &[&str], options: &[&str]) -> Result<f64> {
    let start_login = |host: &str| {
        let mut command = testbed.host(1).root_command("ssh");
        command
            .arg("-F")
            .arg(ssh::client_config_path(testbed.folder(), "root"))
            .args(options)
            .args([host, "true"]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.spawn().context("ssh")
    };
    let started_at = Instant::now();
    let logins = hosts
        .iter()
        .map(|host| start_login(host))
        .collect::<Result<Vec<_>>>()?;
    let exit_statuses = logins
        .into_iter()
        .map(|mut start_login| start_login.wait())
        .collect::<std::io::Result<Vec<_>>>()?;
    let elapsed_us = started_at.elapsed().as_secs_f64() * 1e6;
    match exit_statuses.iter().find(|status| !status.success()) {
        None => Ok(elapsed_us),
        Some(status) => bail!("a bare ssh to one of {hosts:?}: {status}"),
    }
}
