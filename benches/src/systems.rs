//! Runs the measured systems. Debian's PVM and Sempa each have a testbed; the MPIs run on the hosts
//! of PVM's testbed. All systems are up at the same time and their runs alternate, so that other
//! load on the machine affects all systems equally.

use crate::figures::{System, TimeSummaries, TimeSummary, parse_samples};
use crate::rows::{Measurement, MeasurementKind, VmSetup};
use anyhow::{Context, Result, bail};
use sempa_tests::real_pvm::RealVm;
use sempa_tests::run::{run, run_ok};
use sempa_tests::testbed::{Host, wait_until_no_process};
use sempa_tests::vm::Settings;
use sempa_tests::{Testbed, Vm, requirements, ssh};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for one run of a program.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for a compilation on a loaded machine.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for the daemons of deleted hosts to exit.
const DAEMON_EXIT_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of hosts in each testbed.
const HOSTS: usize = 4;
/// Divisor of the number of rounds in a quick run.
const QUICK_DIVISOR: usize = 5;
/// Options that make ssh use the key exchange algorithm that our daemon requests when it adds
/// hosts.
const X25519_OPTIONS: [&str; 2] = ["-o", "KexAlgorithms=^curve25519-sha256"];
/// Divisor of the number of MPICH's rounds if there are more processes than cores. MPICH polls
/// without yielding, so each round then takes a time slice of the kernel.
const MPICH_OVERSUBSCRIBED_DIVISOR: usize = 100;

/// Result of one measurement on one system.
#[derive(Clone, Debug, Default)]
pub(crate) struct SystemResult {
    /// The times of each successful repetition.
    pub(crate) repetitions: Vec<TimeSummaries>,
    /// Reason of the first failure; `None` if all repetitions succeeded.
    pub(crate) failure: Option<String>,
}

/// For each measurement, in the requested order: the results of all systems.
pub(crate) type MeasuredRows = Vec<Vec<(System, SystemResult)>>;

/// Returns the folder with the sources of the C programs.
fn source_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers")
}

/// Runs the measurements on all systems.
///
/// # Errors
/// Fails if no testbed can be created, a program does not compile, or a virtual machine does not
/// start.
pub(crate) fn measure(
    prefix: &Path,
    measurements: &[Measurement],
    repetitions: usize,
    quick: bool,
) -> Result<MeasuredRows> {
    let mut measured: MeasuredRows = vec![Vec::new(); measurements.len()];
    if measurements.is_empty() {
        return Ok(measured);
    }
    let (theirs, ours) = new_beds(prefix, HOSTS)?;
    for stage in [VmSetup::OneHost, VmSetup::TwoHosts, VmSetup::Managed] {
        if measurements.iter().all(|one| one.setup != stage) {
            continue;
        }
        let peers = RunningSystems::start(&theirs, &ours, stage)?;
        for (one, place) in measurements
            .iter()
            .zip(&mut measured)
            .filter(|(one, _)| one.setup == stage)
        {
            *place = peers.measure_in_turns(one, repetitions, quick);
        }
        peers.halt()?;
    }
    Ok(measured)
}

/// Creates two testbeds with the programs installed: the first one for PVM, the second one for our
/// system.
///
/// # Errors
/// Fails if the machine lacks something for a testbed or a program does not compile.
pub(crate) fn new_beds(prefix: &Path, hosts: usize) -> Result<(Testbed, Testbed)> {
    if let Some(missing) = requirements::lacks() {
        bail!("bench peers: {missing}");
    }
    let beds = (
        Testbed::new(hosts, None, &[])?,
        Testbed::new(hosts, Some(prefix), &[])?,
    );
    compile(&beds.0)?;
    compile(&beds.1)?;
    Ok(beds)
}

fn compile(bed: &Testbed) -> Result<()> {
    // Both testbeds compile with Debian's header, so that both systems run the same program.
    compile_one(bed, "gcc", "peers", Some("-lpvm3"))?;
    compile_one(bed, "mpicc.openmpi", "twin", None)?;
    compile_one(bed, "mpicc.mpich", "twin", None)
}

/// Compiles one of the C programs into the folder where `spawn` searches.
///
/// # Errors
/// Fails if the compiler fails; the error has its output.
pub(crate) fn compile_one(
    bed: &Testbed,
    compiler: &str,
    source: &str,
    library: Option<&str>,
) -> Result<()> {
    let mut command = Command::new(compiler);
    command.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o"]);
    command.arg(
        bed.home()
            .join("pvm3/bin/LINUX64")
            .join(program_name(compiler, source)),
    );
    command
        .arg(source_folder().join(source).with_extension("c"))
        .args(library);
    run_ok(command, COMPILE_TIMEOUT)
        .with_context(|| format!("compiling {source}.c with {compiler}"))?;
    Ok(())
}

fn program_name(compiler: &str, source: &str) -> String {
    match compiler.split_once('.') {
        Some((_, kind)) => format!("{source}-{kind}"),
        None => source.to_string(),
    }
}

/// The parameters of one run of the measuring program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProgramRun<'a> {
    pub(crate) args: &'a [String],
    /// Number of processes of the corresponding MPI program.
    pub(crate) ranks: usize,
    /// True if there are more processes than cores.
    pub(crate) oversubscribed: bool,
    /// True if the processes run on two hosts.
    pub(crate) on_two_hosts: bool,
}

/// The running virtual machines of PVM and of Sempa.
pub(crate) struct RunningSystems<'a> {
    pvm_bed: &'a Testbed,
    sempa_bed: &'a Testbed,
    pvm: RealVm<'a>,
    sempa: Vm<'a>,
}

impl<'a> RunningSystems<'a> {
    /// Starts both virtual machines for this setup.
    ///
    /// # Errors
    /// Fails if one of them does not start.
    pub(crate) fn start(
        theirs: &'a Testbed,
        ours: &'a Testbed,
        stage: VmSetup,
    ) -> Result<RunningSystems<'a>> {
        let rm = (stage == VmSetup::Managed).then(|| "pvm-rm".to_string());
        let settings = Settings {
            rm,
            ..Settings::default()
        };
        let pvm = RealVm::start(theirs)?;
        let sempa = Vm::start(ours, settings)?;
        let peers = RunningSystems {
            pvm_bed: theirs,
            sempa_bed: ours,
            pvm,
            sempa,
        };
        if stage == VmSetup::TwoHosts {
            for system in [System::Pvm, System::Sempa] {
                let mut command = peers.measuring_program(system);
                command.args(["add_hosts", "host=h2", "keep=1"]);
                run_ok(command, RUN_TIMEOUT)
                    .with_context(|| format!("a second host for {}", system.name()))?;
            }
        }
        Ok(peers)
    }

    /// Halts both virtual machines.
    ///
    /// # Errors
    /// Fails if a process of them remains.
    pub(crate) fn halt(self) -> Result<()> {
        self.sempa.halt()?;
        self.pvm.halt()
    }

    /// Runs a measurement `repetitions` times on each system. The systems take turns. A system
    /// whose run has failed is not run again.
    fn measure_in_turns(
        &self,
        measurement: &Measurement,
        repetitions: usize,
        quick: bool,
    ) -> Vec<(System, SystemResult)> {
        let takes_part = |system: &System| system.is_pvm() || measurement.mpi_ranks > 0;
        let mut all: Vec<(System, SystemResult)> = System::ALL
            .into_iter()
            .filter(takes_part)
            .map(|system| (system, SystemResult::default()))
            .collect();
        for repetition in 1..=repetitions {
            eprintln!(
                "bench peers: {} ({repetition} of {repetitions})",
                measurement.args.join(" ")
            );
            // Every second repetition reverses the order, because the first system may find cold
            // caches.
            if repetition % 2 == 0 {
                all.reverse();
            }
            for (system, given) in all.iter_mut().filter(|(_, given)| given.failure.is_none()) {
                match self.run_once(*system, measurement, quick) {
                    Ok(samples) => given.repetitions.push(samples),
                    Err(error) => given.failure = Some(format!("{error:#}")),
                }
            }
        }
        all.sort_by_key(|(system, _)| *system);
        all
    }

    fn run_once(
        &self,
        system: System,
        measurement: &Measurement,
        quick: bool,
    ) -> Result<TimeSummaries> {
        if measurement.kind == MeasurementKind::Login {
            return self.measure_login(system, measurement);
        }
        let mut rounds = if quick {
            (measurement.rounds / QUICK_DIVISOR).max(2)
        } else {
            measurement.rounds
        };
        if system == System::Mpich && measurement.oversubscribed {
            rounds = (rounds / MPICH_OVERSUBSCRIBED_DIVISOR).max(2);
        }
        let mut words: Vec<String> = measurement
            .args
            .iter()
            .map(|word| (*word).to_string())
            .collect();
        words.extend([
            format!("rounds={rounds}"),
            format!("warm={}", (rounds / 10).max(1)),
        ]);
        let apart = measurement.setup == VmSetup::TwoHosts;
        self.run(
            system,
            &ProgramRun {
                args: &words,
                ranks: measurement.mpi_ranks,
                oversubscribed: measurement.oversubscribed,
                on_two_hosts: apart,
            },
        )
    }

    /// Runs the measuring program of a system once.
    ///
    /// # Errors
    /// Fails if the program fails, does not end, or prints no samples.
    pub(crate) fn run(&self, system: System, call: &ProgramRun) -> Result<TimeSummaries> {
        let mut command = if system.is_pvm() {
            self.measuring_program(system)
        } else {
            self.mpi_launcher(system, call)?
        };
        // The MPI launcher has already placed the processes, so the argument `host=` is omitted.
        command.args(
            call.args
                .iter()
                .filter(|word| system.is_pvm() || !word.starts_with("host=")),
        );
        let done = run(command, RUN_TIMEOUT)?.expect_success(system.name())?;
        parse_samples(&done.out)
    }

    /// Returns a command that runs the measuring program on h1.
    pub(crate) fn measuring_program(&self, system: System) -> Command {
        self.command(
            system,
            self.bed(system).home().join("pvm3/bin/LINUX64/peers"),
        )
    }

    /// Returns a command that runs `program` on h1 with the environment of the system's virtual
    /// machine.
    pub(crate) fn command(&self, system: System, program: impl AsRef<Path>) -> Command {
        let host = self.bed(system).host(1);
        if system == System::Pvm {
            self.pvm.command(host, program)
        } else {
            self.sempa.command(host, program)
        }
    }

    fn bed(&self, system: System) -> &'a Testbed {
        if system == System::Sempa {
            self.sempa_bed
        } else {
            self.pvm_bed
        }
    }

    /// Returns a command that runs the MPI launcher on h1 of PVM's testbed. None of our libraries
    /// is installed there.
    fn mpi_launcher(&self, system: System, call: &ProgramRun) -> Result<Command> {
        let bed = self.pvm_bed;
        let shell = self.pvm.remote_shell();
        let ranks = call.ranks.to_string();
        let mut command = match system {
            System::OpenMpi => {
                let mut command = bed.host(1).command("mpirun.openmpi");
                command.args([
                    "--allow-run-as-root",
                    "--bind-to",
                    "none",
                    "--oversubscribe",
                    "-n",
                    &ranks,
                ]);
                command.args([
                    "--mca",
                    "mpi_yield_when_idle",
                    if call.oversubscribed { "1" } else { "0" },
                ]);
                if call.on_two_hosts {
                    command.args(["--host", "h1:1,h2:1", "--mca", "btl_tcp_if_include", "eth0"]);
                    command
                        .args([
                            "--mca",
                            "oob_tcp_if_include",
                            "eth0",
                            "--mca",
                            "plm_rsh_agent",
                        ])
                        .arg(shell);
                }
                command
            }
            System::Mpich => {
                let mut command = bed.host(1).command("mpirun.mpich");
                command.args(["-bind-to", "none", "-n", &ranks]);
                if call.on_two_hosts {
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
                    command.arg("-launcher-exec").arg(shell);
                    // MPICH's transport treats hosts that share a kernel as one host, and then
                    // fails because they share no memory.
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
            _ => bail!("{} is no MPI", system.name()),
        };
        let kind = if system == System::OpenMpi {
            "mpicc.openmpi"
        } else {
            "mpicc.mpich"
        };
        command.arg(
            bed.home()
                .join("pvm3/bin/LINUX64")
                .join(program_name(kind, "twin")),
        );
        Ok(command)
    }

    /// Adds and deletes hosts with the measuring program. Also measures plain ssh logins to the
    /// same hosts.
    fn measure_login(&self, system: System, measurement: &Measurement) -> Result<TimeSummaries> {
        let bed = self.bed(system);
        let all: Vec<&str> = measurement
            .args
            .iter()
            .filter_map(|word| word.strip_prefix("host="))
            .flat_map(|l| l.split(','))
            .collect();
        // ssh is measured with its defaults, and with the key exchange algorithm that our daemon
        // requests.
        let mut bare = TimeSummaries::new();
        for (name, hosts) in [("ssh", &all[..1]), ("ssh_all", &all[..])] {
            bare.insert(
                name.to_string(),
                TimeSummary::one(measure_ssh_logins(bed, hosts, &[])?),
            );
            bare.insert(
                format!("{name}_x25519"),
                TimeSummary::one(measure_ssh_logins(bed, hosts, &X25519_OPTIONS)?),
            );
        }
        let mut command = self.measuring_program(system);
        command.args(measurement.args);
        let done = run(command, RUN_TIMEOUT)?.expect_success(system.name())?;
        let mut samples = parse_samples(&done.out)?;
        samples.extend(bare);
        bed.hosts()
            .iter()
            .skip(1)
            .try_for_each(|host: &Host| wait_until_no_process(host, "pvmd", DAEMON_EXIT_TIMEOUT))?;
        Ok(samples)
    }
}

/// Runs `ssh HOST true` on all these hosts at the same time. Returns the microseconds until all
/// have ended.
fn measure_ssh_logins(bed: &Testbed, hosts: &[&str], options: &[&str]) -> Result<f64> {
    let login = |host: &str| {
        let mut command = bed.host(1).command("ssh");
        command
            .arg("-F")
            .arg(ssh::client_config(bed.folder(), "root"))
            .args(options)
            .args([host, "true"]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.spawn().context("ssh")
    };
    let begun = Instant::now();
    let logins = hosts
        .iter()
        .map(|host| login(host))
        .collect::<Result<Vec<_>>>()?;
    let ended = logins
        .into_iter()
        .map(|mut login| login.wait())
        .collect::<std::io::Result<Vec<_>>>()?;
    let us = begun.elapsed().as_secs_f64() * 1e6;
    match ended.iter().find(|status| !status.success()) {
        None => Ok(us),
        Some(status) => bail!("a bare ssh to one of {hosts:?}: {status}"),
    }
}
