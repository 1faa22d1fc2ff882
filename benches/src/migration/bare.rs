//! Migrates a process of the measured program with CRIU alone, without a virtual machine: by
//! stop-and-copy ([`StopAndCopy`]) or by post-copy ([`PostCopy`]). The hosts are used for nothing
//! else.

use super::{GapRecord, IMAGE_FOLDER, MigrationTimes, STEP_TIMEOUT, ms_between, now_us};
use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use sempa_tests::run::{RunningCommand, run_ok, wait_for};
use sempa_tests::testbed::{Host, NETWORK, Testbed};
use sempa_tests::vm::Vm;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;

/// Numbers of the two hosts. Stop-and-copy uses the first one; post-copy migrates between both.
pub(super) const BARE_HOSTS: [usize; 2] = [3, 4];
/// Port on which the source of a post-copy migration serves memory pages.
const PAGE_SERVER_PORT: &str = "7000";
/// The process of a post-copy migration has an id above this. Other processes have lower ids, so
/// the id is free on both hosts.
const PID_MIN: u32 = 30_000;
/// File with the kernel's limit of the size of a pipe, for the whole machine.
const PIPE_LIMIT: &str = "/proc/sys/fs/pipe-max-size";
/// Size of the pipes in which CRIU stores memory for post-copy, in bytes.
const CRIU_PIPE_BYTES: u64 = 16 << 20;

/// A process of the measured program, and the command that waits for its end.
struct BareProcess {
    gap_record: GapRecord,
    /// The command that started or restored the process and waits for its end.
    waiting_command: RunningCommand,
    /// Id of the process, as seen on its host.
    pid: i64,
}

impl BareProcess {
    fn start(vm: &Vm<'_>, host: &Host, mib: u32, name: &str) -> Result<BareProcess> {
        let notes = GapRecord(vm.bed().folder().join(format!("notes-{mib}-{name}")));
        let mut command = host.command(vm.home().join("pvm3/bin/LINUX64/memory"));
        command.arg(mib.to_string()).arg(&notes.0).arg("alone");
        let running = RunningCommand::start(command, Stdio::null())?;
        let pid = notes.await_ready()?;
        Ok(BareProcess {
            gap_record: notes,
            waiting_command: running,
            pid,
        })
    }

    /// Kills the process. A process that is not killed ends with its host.
    fn kill(self, host: &Host) -> Result<()> {
        let mut kill = host.command("kill");
        kill.args(["-9", &self.pid.to_string()]);
        run_ok(kill, STEP_TIMEOUT)?;
        self.waiting_command.finish(STEP_TIMEOUT).map(drop)
    }
}

/// Returns a command that runs CRIU on a host with the command word `word`.
fn criu_command(host: &Host, engine: &Path, word: &str, images: &Path) -> Command {
    let mut command = host.command(engine);
    command
        .arg(word)
        .arg("-D")
        .arg(images)
        .args(["-o", &log_name(word), "--network-lock", "skip"]);
    command
}

/// Returns the name of the log file of a CRIU command.
fn log_name(word: &str) -> String {
    format!("{word}.log")
}

/// Returns the total size of the files in a folder, in bytes.
fn folder_bytes(folder: &Path) -> Result<u64> {
    fs::read_dir(folder)?
        .map(|entry| Ok(entry?.metadata()?.len()))
        .sum()
}

/// Returns the errors in the log of a CRIU command, except for a harmless one about RLIMIT_NOFILE.
fn log_errors(images: &Path, word: &str) -> String {
    let log = fs::read_to_string(images.join(log_name(word))).unwrap_or_default();
    let lines = log
        .lines()
        .filter(|line| line.contains("Error") && !line.contains("RLIMIT_NOFILE"));
    lines.map(|line| format!("\ncriu {word}: {line}")).collect()
}

/// Stop-and-copy: dumps a process to images in memory, copies the images, and restores the process
/// on the same host.
pub(super) struct StopAndCopy<'a> {
    host: &'a Host,
    engine: PathBuf,
    process: BareProcess,
}

impl<'a> StopAndCopy<'a> {
    pub(super) fn start(vm: &Vm<'a>, engine: &Path, mib: u32) -> Result<StopAndCopy<'a>> {
        let host = vm.bed().host(BARE_HOSTS[0]);
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
        let inside = self.host.machine_path(IMAGE_FOLDER);
        fs::create_dir_all(inside.join("from"))?;
        let mut dump = criu_command(self.host, &self.engine, "dump", &from);
        dump.args(["-t", &self.process.pid.to_string()]);
        let begin = now_us();
        let told = |error: Error, which, word| {
            anyhow!("{error:#}{}", log_errors(&inside.join(which), word))
        };
        run_ok(dump, STEP_TIMEOUT).map_err(|error| told(error, "from", "dump"))?;
        let dumped = now_us();
        let mut copy = self.host.command("cp");
        copy.arg("-r").arg(&from).arg(&to);
        run_ok(copy, STEP_TIMEOUT)?;
        let copied = now_us();
        // The restored process needs the id of the old one. The id is free, because the command
        // that waited for the old process has ended and so has reaped it.
        let restore = RunningCommand::start(
            criu_command(self.host, &self.engine, "restore", &to),
            Stdio::null(),
        )?;
        std::mem::replace(&mut self.process.waiting_command, restore).finish(STEP_TIMEOUT)?;
        let gap = self.process.gap_record.await_gap(dumped);
        let (stood, until) = gap.map_err(|error| told(error, "to", "restore"))?;
        let bytes = folder_bytes(&inside.join("from"))?;
        fs::remove_dir_all(inside)?;
        let steps = [
            ("dump", begin, dumped),
            ("copy", dumped, copied),
            ("restore", copied, until),
        ];
        let steps = steps
            .map(|(step, from, to)| (step.to_string(), ms_between(from, to)))
            .to_vec();
        let total_ms = ms_between(begin, until);
        Ok(MigrationTimes {
            freeze_ms: ms_between(stood, until),
            total_ms,
            arrived_ms: total_ms,
            bytes,
            steps,
        })
    }

    pub(super) fn kill(self) -> Result<()> {
        self.process.kill(self.host)
    }
}

/// Post-copy: restores a process on another host from images without memory, while a CRIU daemon
/// (lazy-pages) fetches the memory from the source. The source and the copy exist at the same time
/// with the same process id, so this needs two hosts.
pub(super) struct PostCopy<'a> {
    bed: &'a Testbed,
    engine: PathBuf,
    process: BareProcess,
    /// Number of the host where the process runs.
    current_host: usize,
    /// Number of the host that is the target of the next migration.
    other_host: usize,
    /// Dropping restores the machine's limit.
    _limit: PipeLimit,
}

/// The CRIU processes of a post-copy migration. All of them run at the same time.
struct CriuProcesses {
    dump: RunningCommand,
    pages: RunningCommand,
    restore: RunningCommand,
}

impl<'a> PostCopy<'a> {
    pub(super) fn start(vm: &Vm<'a>, engine: &Path, mib: u32) -> Result<PostCopy<'a>> {
        let limit = PipeLimit::raise()?;
        let (bed, [other, at]) = (vm.bed(), BARE_HOSTS);
        // Every command on the other host uses a process id there, so the id of this process must
        // be much higher than those.
        let next = format!("echo {PID_MIN} > /proc/sys/kernel/ns_last_pid");
        bed.host(at)
            .shell(&next, STEP_TIMEOUT)?
            .expect_success("the number of the next process")?;
        let process = BareProcess::start(vm, bed.host(at), mib, "followed")?;
        ensure!(
            process.pid > i64::from(PID_MIN),
            "the process has the number {}",
            process.pid
        );
        Ok(PostCopy {
            bed,
            engine: engine.to_path_buf(),
            process,
            current_host: at,
            other_host: other,
            _limit: limit,
        })
    }

    pub(super) fn migrate_once(&mut self) -> Result<MigrationTimes> {
        let (from, to) = (
            self.bed.host(self.current_host),
            self.bed.host(self.other_host),
        );
        let (here, there) = (
            from.machine_path(IMAGE_FOLDER),
            to.machine_path(IMAGE_FOLDER),
        );
        fs::create_dir_all(&here)?;
        let once = self.migrate(from, to).map_err(|error| {
            let logs = [(&here, "dump"), (&there, "lazy-pages"), (&there, "restore")];
            anyhow!(
                "{error:#}{}",
                logs.map(|(images, word)| log_errors(images, word)).concat()
            )
        })?;
        fs::remove_dir_all(here)?;
        fs::remove_dir_all(there)?;
        std::mem::swap(&mut self.current_host, &mut self.other_host);
        Ok(once)
    }

    fn migrate(&mut self, from: &Host, to: &Host) -> Result<MigrationTimes> {
        let images = Path::new(IMAGE_FOLDER);
        let address = format!("{NETWORK}.{}", self.current_host);
        let port = ["--port", PAGE_SERVER_PORT, "--address", &address];
        let mut dump = criu_command(from, &self.engine, "dump", images);
        dump.arg("--lazy-pages")
            .args(port)
            .args(["-t", &self.process.pid.to_string()]);
        let begin = now_us();
        let dump = start_until_ready(dump).context("criu dump")?;
        let dumped = now_us();
        let mut copy = Command::new("cp");
        copy.arg("-r")
            .arg(from.machine_path(IMAGE_FOLDER))
            .arg(to.machine_path(IMAGE_FOLDER));
        run_ok(copy, STEP_TIMEOUT)?;
        let copied = now_us();
        let mut pages = criu_command(to, &self.engine, "lazy-pages", images);
        pages.arg("--page-server").args(port);
        let pages = start_until_ready(pages).context("criu lazy-pages")?;
        let served = now_us();
        let mut restore = criu_command(to, &self.engine, "restore", images);
        restore.arg("--lazy-pages");
        let mut parts = CriuProcesses {
            dump,
            pages,
            restore: RunningCommand::start(restore, Stdio::null())?,
        };
        let (stood, until) = parts.await_gap(&self.process.gap_record, dumped)?;
        let bytes = folder_bytes(&to.machine_path(IMAGE_FOLDER))?;
        let restore = parts.await_arrival()?;
        let arrived = now_us().max(until);
        // The source process has exited, and so has the command that waited for it.
        std::mem::replace(&mut self.process.waiting_command, restore).finish(STEP_TIMEOUT)?;
        self.process
            .gap_record
            .number_pairs("gap")
            .map_err(Error::msg)?;
        let steps = [
            ("dump", begin, dumped),
            ("copy", dumped, copied),
            ("serve", copied, served),
            ("restore", served, until),
        ];
        let steps = steps
            .map(|(step, from, to)| (step.to_string(), ms_between(from, to)))
            .to_vec();
        let (freeze_ms, total_ms, arrived_ms) = (
            ms_between(stood, until),
            ms_between(begin, until),
            ms_between(begin, arrived),
        );
        Ok(MigrationTimes {
            freeze_ms,
            total_ms,
            arrived_ms,
            bytes,
            steps,
        })
    }

    pub(super) fn kill(self) -> Result<()> {
        self.process.kill(self.bed.host(self.current_host))
    }
}

impl CriuProcesses {
    /// Waits until the process runs again after it was stopped at time `at`. Returns the begin and
    /// the end of the gap. The inner error reports a CRIU process that has failed.
    fn await_gap(&mut self, notes: &GapRecord, at: i64) -> Result<(i64, i64)> {
        wait_for(STEP_TIMEOUT, || {
            for (part, word) in [
                (&mut self.dump, "dump"),
                (&mut self.pages, "lazy-pages"),
                (&mut self.restore, "restore"),
            ] {
                match part.poll() {
                    Ok(Some(status)) if !status.success() || word == "restore" => {
                        return Ok(Err(format!(
                            "criu {word} ended before the process ran: {status}"
                        )));
                    }
                    Ok(_) => {}
                    Err(error) => return Ok(Err(format!("criu {word}: {error:#}"))),
                }
            }
            notes.find_gap(at).map(Ok)
        })?
        .map_err(Error::msg)
    }

    /// Waits until all memory has been transferred. Returns the CRIU process that has restored the
    /// process and waits for it.
    fn await_arrival(self) -> Result<RunningCommand> {
        self.pages
            .finish(STEP_TIMEOUT)?
            .expect_success("criu lazy-pages")?;
        self.dump
            .finish(STEP_TIMEOUT)?
            .expect_success("criu dump")?;
        Ok(self.restore)
    }
}

/// Starts a long-running CRIU command and waits until it reports that it is ready.
///
/// The status pipe replaces standard input, which CRIU does not need. A command in a host inherits
/// only the three standard descriptors.
fn start_until_ready(mut command: Command) -> Result<RunningCommand> {
    command.args(["--status-fd", "0"]);
    let (mut word, its_end) = std::io::pipe()?;
    let running = RunningCommand::start(command, its_end.into())?;
    let (ready_sender, ready_receiver) = mpsc::channel();
    std::thread::spawn(move || ready_sender.send(word.read(&mut [0])));
    match ready_receiver.recv_timeout(STEP_TIMEOUT) {
        Ok(Ok(1)) => Ok(running),
        Ok(_) => bail!(
            "it ended before it was ready: {:?}",
            running.finish(STEP_TIMEOUT)?
        ),
        Err(_) => bail!("it is not ready after {} s", STEP_TIMEOUT.as_secs()),
    }
}

/// Raises the machine's pipe size limit to the size that CRIU needs. Without CAP_SYS_RESOURCE CRIU
/// cannot exceed the limit: it ignores the error and fills the pipe until it blocks.
struct PipeLimit {
    /// The limit before; `None` if it was high enough.
    previous: Option<String>,
}

impl PipeLimit {
    fn raise() -> Result<PipeLimit> {
        let before = fs::read_to_string(PIPE_LIMIT)
            .context(PIPE_LIMIT)?
            .trim()
            .to_string();
        if before.parse::<u64>().context(PIPE_LIMIT)? >= CRIU_PIPE_BYTES {
            return Ok(PipeLimit { previous: None });
        }
        fs::write(PIPE_LIMIT, CRIU_PIPE_BYTES.to_string()).with_context(|| {
            format!("CRIU has memory follow through pipes of {CRIU_PIPE_BYTES} bytes, and {PIPE_LIMIT} cannot be raised")
        })?;
        Ok(PipeLimit {
            previous: Some(before),
        })
    }
}

impl Drop for PipeLimit {
    fn drop(&mut self) {
        // An error is ignored: a higher limit harms no process.
        let _ = self
            .previous
            .take()
            .map(|before| fs::write(PIPE_LIMIT, before));
    }
}
