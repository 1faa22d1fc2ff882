//! Migrates the task's program with CRIU alone, without a virtual machine, on hosts of its own: by
//! stop-and-copy ([`StopAndCopy`]) or by post-copy ([`PostCopy`]).

use super::{GapRecord, IMAGE_FOLDER, MigrationTimes, STEP_TIMEOUT, ms, now_us};
use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use sempa_tests::run::{Running, eventually, must};
use sempa_tests::testbed::{Host, NETWORK, Testbed};
use sempa_tests::vm::Vm;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;

/// Indexes of the host for stop-and-copy, and of the second host for post-copy, which migrates
/// between the two.
pub(super) const BARE_HOSTS: [usize; 2] = [3, 4];
/// Port on which the source serves memory pages.
const PAGE_SERVER_PORT: &str = "7000";
/// Process ids of post-copy processes are above this: free on both hosts, because no other process
/// gets such an id.
const PID_MIN: u32 = 30_000;
/// Machine-wide limit of the size of a pipe.
const PIPE_LIMIT: &str = "/proc/sys/fs/pipe-max-size";
/// Size of the pipes in which CRIU holds memory for post-copy.
const CRIU_PIPE_BYTES: u64 = 16 << 20;

/// A process, and the program that waits for it.
struct BareProcess {
    notes: GapRecord,
    /// The process, or the CRIU that restored it and waits for it.
    running: Running,
    /// Process id on its host.
    pid: i64,
}

impl BareProcess {
    fn start(vm: &Vm<'_>, host: &Host, mib: u32, name: &str) -> Result<BareProcess> {
        let notes = GapRecord(vm.bed().folder().join(format!("notes-{mib}-{name}")));
        let mut command = host.command(vm.home().join("pvm3/bin/LINUX64/memory"));
        command.arg(mib.to_string()).arg(&notes.0).arg("alone");
        let running = Running::start(command, Stdio::null())?;
        let pid = notes.await_ready()?;
        Ok(BareProcess {
            notes,
            running,
            pid,
        })
    }

    /// Kills the process. If this is not reached, the process ends with its host.
    fn kill(self, host: &Host) -> Result<()> {
        let mut kill = host.command("kill");
        kill.args(["-9", &self.pid.to_string()]);
        must(kill, STEP_TIMEOUT)?;
        self.running.finish(STEP_TIMEOUT).map(drop)
    }
}

/// Returns a CRIU command on a host.
fn criu(host: &Host, engine: &Path, word: &str, images: &Path) -> Command {
    let mut command = host.command(engine);
    command
        .arg(word)
        .arg("-D")
        .arg(images)
        .args(["-o", &log_name(word), "--network-lock", "skip"]);
    command
}

/// Returns the name of a command's log file.
fn log_name(word: &str) -> String {
    format!("{word}.log")
}

/// Returns the total size of the files in a folder.
fn folder_bytes(folder: &Path) -> Result<u64> {
    fs::read_dir(folder)?
        .map(|entry| Ok(entry?.metadata()?.len()))
        .sum()
}

/// Returns the errors in the log of a CRIU command, except the harmless one about RLIMIT_NOFILE.
fn log_errors(images: &Path, word: &str) -> String {
    let log = fs::read_to_string(images.join(log_name(word))).unwrap_or_default();
    let lines = log
        .lines()
        .filter(|line| line.contains("Error") && !line.contains("RLIMIT_NOFILE"));
    lines.map(|line| format!("\ncriu {word}: {line}")).collect()
}

/// Stop-and-copy: dumps to memory, copies, and restores on the same host.
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
        let inside = self.host.path(IMAGE_FOLDER);
        fs::create_dir_all(inside.join("from"))?;
        let mut dump = criu(self.host, &self.engine, "dump", &from);
        dump.args(["-t", &self.process.pid.to_string()]);
        let begin = now_us();
        let told = |error: Error, which, word| {
            anyhow!("{error:#}{}", log_errors(&inside.join(which), word))
        };
        must(dump, STEP_TIMEOUT).map_err(|error| told(error, "from", "dump"))?;
        let dumped = now_us();
        let mut copy = self.host.command("cp");
        copy.arg("-r").arg(&from).arg(&to);
        must(copy, STEP_TIMEOUT)?;
        let copied = now_us();
        // The restored process needs the same process id. It is free, because the program that
        // waited for the process has ended too.
        let restore = Running::start(criu(self.host, &self.engine, "restore", &to), Stdio::null())?;
        std::mem::replace(&mut self.process.running, restore).finish(STEP_TIMEOUT)?;
        let gap = self.process.notes.await_gap(dumped);
        let (stood, until) = gap.map_err(|error| told(error, "to", "restore"))?;
        let bytes = folder_bytes(&inside.join("from"))?;
        fs::remove_dir_all(inside)?;
        let steps = [
            ("dump", begin, dumped),
            ("copy", dumped, copied),
            ("restore", copied, until),
        ];
        let steps = steps
            .map(|(step, from, to)| (step.to_string(), ms(from, to)))
            .to_vec();
        let total_ms = ms(begin, until);
        Ok(MigrationTimes {
            freeze_ms: ms(stood, until),
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

/// Post-copy: restores on another host from images without memory, while a CRIU daemon (lazy-pages)
/// fetches the memory from the source. Source and copy exist at the same time under the same
/// process id, which requires two hosts.
pub(super) struct PostCopy<'a> {
    bed: &'a Testbed,
    engine: PathBuf,
    process: BareProcess,
    /// Indexes of the process's host and of the other one.
    current_host: usize,
    other_host: usize,
    /// Restored when this is dropped.
    _limit: PipeLimit,
}

/// The CRIU processes of a post-copy migration, which run at the same time.
struct CriuProcesses {
    dump: Running,
    pages: Running,
    restore: Running,
}

impl<'a> PostCopy<'a> {
    pub(super) fn start(vm: &Vm<'a>, engine: &Path, mib: u32) -> Result<PostCopy<'a>> {
        let limit = PipeLimit::raise()?;
        let (bed, [other, at]) = (vm.bed(), BARE_HOSTS);
        // Every command on the other host consumes a process id, so the ids of this process start
        // much higher.
        let next = format!("echo {PID_MIN} > /proc/sys/kernel/ns_last_pid");
        bed.host(at)
            .shell(&next, STEP_TIMEOUT)?
            .expect_good("the number of the next process")?;
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
        let (here, there) = (from.path(IMAGE_FOLDER), to.path(IMAGE_FOLDER));
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
        let mut dump = criu(from, &self.engine, "dump", images);
        dump.arg("--lazy-pages")
            .args(port)
            .args(["-t", &self.process.pid.to_string()]);
        let begin = now_us();
        let dump = start_until_ready(dump).context("criu dump")?;
        let dumped = now_us();
        let mut copy = Command::new("cp");
        copy.arg("-r")
            .arg(from.path(IMAGE_FOLDER))
            .arg(to.path(IMAGE_FOLDER));
        must(copy, STEP_TIMEOUT)?;
        let copied = now_us();
        let mut pages = criu(to, &self.engine, "lazy-pages", images);
        pages.arg("--page-server").args(port);
        let pages = start_until_ready(pages).context("criu lazy-pages")?;
        let served = now_us();
        let mut restore = criu(to, &self.engine, "restore", images);
        restore.arg("--lazy-pages");
        let mut parts = CriuProcesses {
            dump,
            pages,
            restore: Running::start(restore, Stdio::null())?,
        };
        let (stood, until) = parts.await_gap(&self.process.notes, dumped)?;
        let bytes = folder_bytes(&to.path(IMAGE_FOLDER))?;
        let restore = parts.await_arrival()?;
        let arrived = now_us().max(until);
        // The source has exited, and with it the program that waited for it.
        std::mem::replace(&mut self.process.running, restore).finish(STEP_TIMEOUT)?;
        self.process.notes.number_pairs("gap").map_err(Error::msg)?;
        let steps = [
            ("dump", begin, dumped),
            ("copy", dumped, copied),
            ("serve", copied, served),
            ("restore", served, until),
        ];
        let steps = steps
            .map(|(step, from, to)| (step.to_string(), ms(from, to)))
            .to_vec();
        let (freeze_ms, total_ms, arrived_ms) =
            (ms(stood, until), ms(begin, until), ms(begin, arrived));
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
    /// Waits until the process runs again. Fails if one of the CRIU processes fails before.
    fn await_gap(&mut self, notes: &GapRecord, at: i64) -> Result<(i64, i64)> {
        eventually(STEP_TIMEOUT, || {
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

    /// Waits until all memory has been transferred. Returns the CRIU that restored the process and
    /// waits for it.
    fn await_arrival(self) -> Result<Running> {
        self.pages
            .finish(STEP_TIMEOUT)?
            .expect_good("criu lazy-pages")?;
        self.dump.finish(STEP_TIMEOUT)?.expect_good("criu dump")?;
        Ok(self.restore)
    }
}

/// Starts a long-running CRIU command and waits until it reports that it is ready.
///
/// The status pipe takes the place of standard input, which CRIU does not need: entering a host
/// passes on only the three standard descriptors.
fn start_until_ready(mut command: Command) -> Result<Running> {
    command.args(["--status-fd", "0"]);
    let (mut word, its_end) = std::io::pipe()?;
    let running = Running::start(command, its_end.into())?;
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

/// Raises the machine's pipe size limit to what CRIU needs. Without CAP_SYS_RESOURCE CRIU cannot
/// exceed the limit; it ignores the error and fills the pipe until it blocks.
struct PipeLimit {
    /// The previous limit, if it was lower.
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
            format!("CRIU needs pipes of {CRIU_PIPE_BYTES} bytes for post-copy, and {PIPE_LIMIT} cannot be raised")
        })?;
        Ok(PipeLimit {
            previous: Some(before),
        })
    }
}

impl Drop for PipeLimit {
    fn drop(&mut self) {
        // An error does not matter: a higher limit harms no process.
        let _ = self
            .previous
            .take()
            .map(|before| fs::write(PIPE_LIMIT, before));
    }
}
