//! Migrates a process of the measured program with CRIU alone, without a virtual machine: by
//! stop-and-copy ([`StopAndCopy`]) or by post-copy ([`PostCopy`]). The hosts have no other
//! processes of the benchmark.

use super::{GapRecord, IMAGE_FOLDER, MigrationTimes, STEP_TIMEOUT, ms_between, now_us};
use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use sempa_tests::run::{RunningCommand, run_successfully, wait_for};
use sempa_tests::testbed::{Host, NETWORK_PREFIX, Testbed};
use sempa_tests::vm::Vm;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;

/// Numbers of the hosts for CRIU alone. Stop-and-copy uses the first host; post-copy migrates
/// between both.
pub(super) const BARE_HOST_NUMBERS: [usize; 2] = [3, 4];
/// Port on which the source of a post-copy migration serves memory pages.
const PAGE_SERVER_PORT: &str = "7000";
/// The process of a post-copy migration has a process id greater than this number. Other processes
/// have lower ids, so the id is free on both hosts.
const LAST_LOWER_PID: u32 = 30_000;
/// File with the kernel's limit for the size of a pipe; the limit applies to the whole machine.
const PIPE_LIMIT_FILE: &str = "/proc/sys/fs/pipe-max-size";
/// Size of the pipes in which CRIU stores memory for post-copy, in bytes.
const CRIU_PIPE_BYTES: u64 = 16 << 20;

/// A process of the measured program, and the command that waits for its end.
struct BareProcess {
    gap_record: GapRecord,
    /// The command that started or restored the process and waits for its end.
    restore_or_start_command: RunningCommand,
    /// Process id, as the process itself sees it on its host.
    pid: i64,
}

impl BareProcess {
    fn start(vm: &Vm<'_>, host: &Host, mib: u32, name: &str) -> Result<Self> {
        let gap_record = GapRecord(vm.testbed().folder().join(format!("notes-{mib}-{name}")));
        let mut command = host.root_command(vm.user_home().join("pvm3/bin/LINUX64/memory"));
        command.arg(mib.to_string()).arg(&gap_record.0).arg("alone");
        let running_command = RunningCommand::start(command, Stdio::null())?;
        let pid = gap_record.wait_until_ready()?;
        Ok(Self {
            gap_record,
            restore_or_start_command: running_command,
            pid,
        })
    }

    /// Kills the process and ends the command that waits for it. Without a call of this method, the
    /// process ends with its host.
    fn kill(self, host: &Host) -> Result<()> {
        let mut kill = host.root_command("kill");
        kill.args(["-9", &self.pid.to_string()]);
        run_successfully(kill, STEP_TIMEOUT)?;
        self.restore_or_start_command
            .wait_or_kill(STEP_TIMEOUT)
            .map(drop)
    }
}

/// Returns a command that runs CRIU on a host with the command word `command_word`, such as `dump`,
/// and with the image folder `images`.
fn criu_command(host: &Host, engine: &Path, command_word: &str, images: &Path) -> Command {
    let mut command = host.root_command(engine);
    command.arg(command_word).arg("-D").arg(images).args([
        "-o",
        &log_name(command_word),
        "--network-lock",
        "skip",
    ]);
    command
}

/// Returns the name of the log file of CRIU's command `command_word`.
fn log_name(command_word: &str) -> String {
    format!("{command_word}.log")
}

/// Returns the total size in bytes of the files in a folder.
fn folder_bytes(folder: &Path) -> Result<u64> {
    fs::read_dir(folder)?
        .map(|entry| Ok(entry?.metadata()?.len()))
        .sum()
}

/// Returns the errors in the log of a CRIU command, one line each, except for a harmless error
/// about RLIMIT_NOFILE.
fn log_errors(images: &Path, command_word: &str) -> String {
    let log = fs::read_to_string(images.join(log_name(command_word))).unwrap_or_default();
    let lines = log
        .lines()
        .filter(|line| line.contains("Error") && !line.contains("RLIMIT_NOFILE"));
    lines
        .map(|line| format!("\ncriu {command_word}: {line}"))
        .collect()
}

/// Stop-and-copy: dumps a process to images in memory, copies the images, and restores the process
/// on the same host.
pub(super) struct StopAndCopy<'a> {
    host: &'a Host,
    engine: PathBuf,
    process: BareProcess,
}

impl<'a> StopAndCopy<'a> {
    pub(super) fn start_process(vm: &Vm<'a>, engine: &Path, mib: u32) -> Result<Self> {
        let host = vm.testbed().host(BARE_HOST_NUMBERS[0]);
        Ok(StopAndCopy {
            host,
            engine: engine.to_path_buf(),
            process: BareProcess::start(vm, host, mib, "bare")?,
        })
    }

    pub(super) fn migrate_once(&mut self) -> Result<MigrationTimes> {
        let (from, to) = (
            Path::new(IMAGE_FOLDER).join("from"),
            Path::new(IMAGE_FOLDER).join("to"),
        );
        let image_folder = self.host.machine_path(IMAGE_FOLDER);
        fs::create_dir_all(image_folder.join("from"))?;
        let mut dump_command = criu_command(self.host, &self.engine, "dump", &from);
        dump_command.args(["-t", &self.process.pid.to_string()]);
        let begin_us = now_us();
        let error_with_log = |error: Error, images, command_word| {
            anyhow!(
                "{error:#}{}",
                log_errors(&image_folder.join(images), command_word)
            )
        };
        run_successfully(dump_command, STEP_TIMEOUT)
            .map_err(|error| error_with_log(error, "from", "dump"))?;
        let dumped_us = now_us();
        let mut copy_command = self.host.root_command("cp");
        copy_command.arg("-r").arg(&from).arg(&to);
        run_successfully(copy_command, STEP_TIMEOUT)?;
        let copied_us = now_us();
        // The restored process needs the process id of the old process. The id is free: the command
        // that waited for the old process has ended and has reaped the old process.
        let restore_command = RunningCommand::start(
            criu_command(self.host, &self.engine, "restore", &to),
            Stdio::null(),
        )?;
        std::mem::replace(&mut self.process.restore_or_start_command, restore_command)
            .wait_or_kill(STEP_TIMEOUT)?;
        let gap = self.process.gap_record.wait_for_gap(dumped_us);
        let (stopped_us, resumed_us) =
            gap.map_err(|error| error_with_log(error, "to", "restore"))?;
        let bytes = folder_bytes(&image_folder.join("from"))?;
        fs::remove_dir_all(image_folder)?;
        let steps = [
            ("dump", begin_us, dumped_us),
            ("copy", dumped_us, copied_us),
            ("restore", copied_us, resumed_us),
        ];
        let steps = steps
            .map(|(step, from, to)| (step.to_string(), ms_between(from, to)))
            .to_vec();
        let total_ms = ms_between(begin_us, resumed_us);
        Ok(MigrationTimes {
            freeze_ms: ms_between(stopped_us, resumed_us),
            total_ms,
            arrived_ms: total_ms,
            bytes,
            steps,
        })
    }

    pub(super) fn kill_process(self) -> Result<()> {
        self.process.kill(self.host)
    }
}

/// Post-copy: restores a process on another host from images without memory, while a CRIU daemon
/// (lazy-pages) fetches the memory from the source. The source process and the restored process
/// exist at the same time with the same process id, so two hosts are needed.
pub(super) struct PostCopy<'a> {
    testbed: &'a Testbed,
    engine: PathBuf,
    process: BareProcess,
    /// Number of the host where the process runs.
    source_host: usize,
    /// Number of the target of the next migration.
    target_host: usize,
    /// The raised limit of the machine for the size of a pipe. The previous limit is restored when
    /// this value is dropped.
    _pipe_limit: RaisedPipeLimit,
}

/// The CRIU processes of a post-copy migration. All of them run at the same time.
struct CriuProcesses {
    dump_command: RunningCommand,
    lazy_pages_command: RunningCommand,
    restore_command: RunningCommand,
}

impl<'a> PostCopy<'a> {
    pub(super) fn start_process(vm: &Vm<'a>, engine: &Path, mib: u32) -> Result<Self> {
        let pipe_limit = RaisedPipeLimit::raise_if_low()?;
        let (testbed, [target_host, source_host]) = (vm.testbed(), BARE_HOST_NUMBERS);
        // Every command on the other host uses a process id on that host, so the id of the measured
        // process must be much higher than the ids of commands.
        let set_last_pid = format!("echo {LAST_LOWER_PID} > /proc/sys/kernel/ns_last_pid");
        testbed
            .host(source_host)
            .run_shell(&set_last_pid, STEP_TIMEOUT)?
            .expect_success("the number of the next process")?;
        let process = BareProcess::start(vm, testbed.host(source_host), mib, "followed")?;
        ensure!(
            process.pid > i64::from(LAST_LOWER_PID),
            "the process has the number {}",
            process.pid
        );
        Ok(PostCopy {
            testbed,
            engine: engine.to_path_buf(),
            process,
            source_host,
            target_host,
            _pipe_limit: pipe_limit,
        })
    }

    pub(super) fn migrate_once(&mut self) -> Result<MigrationTimes> {
        let (from, to) = (
            self.testbed.host(self.source_host),
            self.testbed.host(self.target_host),
        );
        let (source_images, target_images) = (
            from.machine_path(IMAGE_FOLDER),
            to.machine_path(IMAGE_FOLDER),
        );
        fs::create_dir_all(&source_images)?;
        let times = self.dump_and_restore(from, to).map_err(|error| {
            let logs = [
                (&source_images, "dump"),
                (&target_images, "lazy-pages"),
                (&target_images, "restore"),
            ];
            anyhow!(
                "{error:#}{}",
                logs.map(|(images, command_word)| log_errors(images, command_word))
                    .concat()
            )
        })?;
        fs::remove_dir_all(source_images)?;
        fs::remove_dir_all(target_images)?;
        std::mem::swap(&mut self.source_host, &mut self.target_host);
        Ok(times)
    }

    fn dump_and_restore(&mut self, from: &Host, to: &Host) -> Result<MigrationTimes> {
        let images = Path::new(IMAGE_FOLDER);
        let address = format!("{NETWORK_PREFIX}.{}", self.source_host);
        let port_options = ["--port", PAGE_SERVER_PORT, "--address", &address];
        let mut dump_command = criu_command(from, &self.engine, "dump", images);
        dump_command
            .arg("--lazy-pages")
            .args(port_options)
            .args(["-t", &self.process.pid.to_string()]);
        let begin_us = now_us();
        let dump_command = start_until_ready(dump_command).context("criu dump")?;
        let dumped_us = now_us();
        let mut copy_command = Command::new("cp");
        copy_command
            .arg("-r")
            .arg(from.machine_path(IMAGE_FOLDER))
            .arg(to.machine_path(IMAGE_FOLDER));
        run_successfully(copy_command, STEP_TIMEOUT)?;
        let copied_us = now_us();
        let mut lazy_pages = criu_command(to, &self.engine, "lazy-pages", images);
        lazy_pages.arg("--page-server").args(port_options);
        let lazy_pages = start_until_ready(lazy_pages).context("criu lazy-pages")?;
        let pages_ready_us = now_us();
        let mut restore_command = criu_command(to, &self.engine, "restore", images);
        restore_command.arg("--lazy-pages");
        let mut processes = CriuProcesses {
            dump_command,
            lazy_pages_command: lazy_pages,
            restore_command: RunningCommand::start(restore_command, Stdio::null())?,
        };
        let (stopped_us, resumed_us) = processes.await_gap(&self.process.gap_record, dumped_us)?;
        let bytes = folder_bytes(&to.machine_path(IMAGE_FOLDER))?;
        let restore_command = processes.wait_for_memory()?;
        let arrived_us = now_us().max(resumed_us);
        // The source process has exited, so the command that waited for it ends.
        std::mem::replace(&mut self.process.restore_or_start_command, restore_command)
            .wait_or_kill(STEP_TIMEOUT)?;
        self.process
            .gap_record
            .number_pairs("gap")
            .map_err(Error::msg)?;
        let steps = [
            ("dump", begin_us, dumped_us),
            ("copy", dumped_us, copied_us),
            ("serve", copied_us, pages_ready_us),
            ("restore", pages_ready_us, resumed_us),
        ];
        let steps = steps
            .map(|(step, from, to)| (step.to_string(), ms_between(from, to)))
            .to_vec();
        let (freeze_ms, total_ms, arrived_ms) = (
            ms_between(stopped_us, resumed_us),
            ms_between(begin_us, resumed_us),
            ms_between(begin_us, arrived_us),
        );
        Ok(MigrationTimes {
            freeze_ms,
            total_ms,
            arrived_ms,
            bytes,
            steps,
        })
    }

    pub(super) fn kill_process(self) -> Result<()> {
        self.process.kill(self.testbed.host(self.source_host))
    }
}

impl CriuProcesses {
    /// Waits until the process runs again after the gap that contains the time `stopped_us`, in
    /// microseconds since 1970. Returns the start and the end of the gap.
    ///
    /// # Errors
    /// A CRIU process has failed, or the process does not run within [`STEP_TIMEOUT`].
    fn await_gap(&mut self, gap_record: &GapRecord, stopped_us: i64) -> Result<(i64, i64)> {
        wait_for(STEP_TIMEOUT, || {
            for (process, command_word) in [
                (&mut self.dump_command, "dump"),
                (&mut self.lazy_pages_command, "lazy-pages"),
                (&mut self.restore_command, "restore"),
            ] {
                match process.poll_status() {
                    Ok(Some(status)) if !status.success() || command_word == "restore" => {
                        return Ok(Err(format!(
                            "criu {command_word} ended before the process ran: {status}"
                        )));
                    }
                    Ok(_) => {}
                    Err(error) => return Ok(Err(format!("criu {command_word}: {error:#}"))),
                }
            }
            gap_record.find_gap(stopped_us).map(Ok)
        })?
        .map_err(Error::msg)
    }

    /// Waits until all memory has been transferred. Returns the command that has restored the
    /// process and waits for its end.
    fn wait_for_memory(self) -> Result<RunningCommand> {
        self.lazy_pages_command
            .wait_or_kill(STEP_TIMEOUT)?
            .expect_success("criu lazy-pages")?;
        self.dump_command
            .wait_or_kill(STEP_TIMEOUT)?
            .expect_success("criu dump")?;
        Ok(self.restore_command)
    }
}

/// Starts a long-running CRIU command and waits until CRIU reports that it is ready.
///
/// The status pipe replaces standard input, which CRIU does not need. No other descriptor can be
/// used, because a command in a host inherits only the three standard descriptors.
///
/// # Errors
/// CRIU ends before it is ready, or is not ready within [`STEP_TIMEOUT`].
fn start_until_ready(mut command: Command) -> Result<RunningCommand> {
    command.args(["--status-fd", "0"]);
    let (mut status_reader, status_writer) = std::io::pipe()?;
    let running_command = RunningCommand::start(command, status_writer.into())?;
    let (ready_sender, ready_receiver) = mpsc::channel();
    std::thread::spawn(move || ready_sender.send(status_reader.read(&mut [0])));
    match ready_receiver.recv_timeout(STEP_TIMEOUT) {
        Ok(Ok(1)) => Ok(running_command),
        Ok(_) => bail!(
            "it ended before it was ready: {:?}",
            running_command.wait_or_kill(STEP_TIMEOUT)?
        ),
        Err(_) => bail!("it is not ready after {} s", STEP_TIMEOUT.as_secs()),
    }
}

/// Raises the machine's limit for the size of a pipe to the size that CRIU needs. Without
/// CAP_SYS_RESOURCE, CRIU cannot exceed the limit; CRIU ignores the error and writes to the pipe
/// until a write blocks. Dropping the value restores the previous limit.
struct RaisedPipeLimit {
    /// The limit before the change; `None` if the limit was high enough.
    previous: Option<String>,
}

impl RaisedPipeLimit {
    fn raise_if_low() -> Result<Self> {
        let previous_limit = fs::read_to_string(PIPE_LIMIT_FILE)
            .context(PIPE_LIMIT_FILE)?
            .trim()
            .to_string();
        if previous_limit.parse::<u64>().context(PIPE_LIMIT_FILE)? >= CRIU_PIPE_BYTES {
            return Ok(Self { previous: None });
        }
        fs::write(PIPE_LIMIT_FILE, CRIU_PIPE_BYTES.to_string()).with_context(|| {
            format!("CRIU needs pipes of {CRIU_PIPE_BYTES} bytes for post-copy, and {PIPE_LIMIT_FILE} cannot be raised")
        })?;
        Ok(Self {
            previous: Some(previous_limit),
        })
    }
}

impl Drop for RaisedPipeLimit {
    fn drop(&mut self) {
        // An error is ignored, because a higher limit harms no process.
        let _ = self
            .previous
            .take()
            .map(|previous_limit| fs::write(PIPE_LIMIT_FILE, previous_limit));
    }
}
