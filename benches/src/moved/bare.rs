//! Migrates the task's program with CRIU alone, without a virtual machine, on hosts of its own: by
//! stop-and-copy ([`Bare`]) or by post-copy ([`Followed`]).

use super::{IMAGES, Notes, Once, STEP_TIME, ms, now_us};
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
pub(super) const APART: [usize; 2] = [3, 4];
/// Port on which the source serves memory pages.
const PORT: &str = "7000";
/// Process ids of post-copy processes are above this: free on both hosts, because no other process
/// gets such an id.
const NUMBERS_FROM: u32 = 30_000;
/// Machine-wide limit of the size of a pipe.
const PIPE_LIMIT: &str = "/proc/sys/fs/pipe-max-size";
/// Size of the pipes in which CRIU holds memory for post-copy.
const PIPE_BYTES: u64 = 16 << 20;

/// A process, and the program that waits for it.
struct Alone {
    notes: Notes,
    /// The process, or the CRIU that restored it and waits for it.
    running: Running,
    /// Process id on its host.
    pid: i64,
}

impl Alone {
    fn start(vm: &Vm<'_>, host: &Host, mib: u32, name: &str) -> Result<Alone> {
        let notes = Notes(vm.bed().folder().join(format!("notes-{mib}-{name}")));
        let mut command = host.command(vm.home().join("pvm3/bin/LINUX64/memory"));
        command.arg(mib.to_string()).arg(&notes.0).arg("alone");
        let running = Running::start(command, Stdio::null())?;
        let pid = notes.ready()?;
        Ok(Alone {
            notes,
            running,
            pid,
        })
    }

    /// Kills the process. If this is not reached, the process ends with its host.
    fn end(self, host: &Host) -> Result<()> {
        let mut kill = host.command("kill");
        kill.args(["-9", &self.pid.to_string()]);
        must(kill, STEP_TIME)?;
        self.running.finish(STEP_TIME).map(drop)
    }
}

/// Returns a CRIU command on a host.
fn criu(host: &Host, engine: &Path, word: &str, images: &Path) -> Command {
    let mut command = host.command(engine);
    command
        .arg(word)
        .arg("-D")
        .arg(images)
        .args(["-o", &log_of(word), "--network-lock", "skip"]);
    command
}

/// Returns the name of a command's log file.
fn log_of(word: &str) -> String {
    format!("{word}.log")
}

/// Returns the total size of the files in a folder.
fn bytes(folder: &Path) -> Result<u64> {
    fs::read_dir(folder)?
        .map(|entry| Ok(entry?.metadata()?.len()))
        .sum()
}

/// Returns the errors in the log of a CRIU command, except the harmless one about RLIMIT_NOFILE.
fn errors(images: &Path, word: &str) -> String {
    let log = fs::read_to_string(images.join(log_of(word))).unwrap_or_default();
    let lines = log
        .lines()
        .filter(|line| line.contains("Error") && !line.contains("RLIMIT_NOFILE"));
    lines.map(|line| format!("\ncriu {word}: {line}")).collect()
}

/// Stop-and-copy: dumps to memory, copies, and restores on the same host.
pub(super) struct Bare<'a> {
    host: &'a Host,
    engine: PathBuf,
    process: Alone,
}

impl<'a> Bare<'a> {
    pub(super) fn start(vm: &Vm<'a>, engine: &Path, mib: u32) -> Result<Bare<'a>> {
        let host = vm.bed().host(APART[0]);
        Ok(Bare {
            host,
            engine: engine.to_path_buf(),
            process: Alone::start(vm, host, mib, "bare")?,
        })
    }

    pub(super) fn once(&mut self) -> Result<Once> {
        let (from, to) = (Path::new(IMAGES).join("from"), Path::new(IMAGES).join("to"));
        let inside = self.host.path(IMAGES);
        fs::create_dir_all(inside.join("from"))?;
        let mut dump = criu(self.host, &self.engine, "dump", &from);
        dump.args(["-t", &self.process.pid.to_string()]);
        let begin = now_us();
        let told =
            |error: Error, which, word| anyhow!("{error:#}{}", errors(&inside.join(which), word));
        must(dump, STEP_TIME).map_err(|error| told(error, "from", "dump"))?;
        let dumped = now_us();
        let mut copy = self.host.command("cp");
        copy.arg("-r").arg(&from).arg(&to);
        must(copy, STEP_TIME)?;
        let copied = now_us();
        // The restored process needs the same process id. It is free, because the program that
        // waited for the process has ended too.
        let restore = Running::start(criu(self.host, &self.engine, "restore", &to), Stdio::null())?;
        std::mem::replace(&mut self.process.running, restore).finish(STEP_TIME)?;
        let gap = self.process.notes.gap(dumped);
        let (stood, until) = gap.map_err(|error| told(error, "to", "restore"))?;
        let bytes = bytes(&inside.join("from"))?;
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
        Ok(Once {
            freeze_ms: ms(stood, until),
            total_ms,
            arrived_ms: total_ms,
            bytes,
            steps,
        })
    }

    pub(super) fn end(self) -> Result<()> {
        self.process.end(self.host)
    }
}

/// Post-copy: restores on another host from images without memory, while a CRIU daemon (lazy-pages)
/// fetches the memory from the source. Source and copy exist at the same time under the same
/// process id, which requires two hosts.
pub(super) struct Followed<'a> {
    bed: &'a Testbed,
    engine: PathBuf,
    process: Alone,
    /// Indexes of the process's host and of the other one.
    at: usize,
    other: usize,
    /// Restored when this is dropped.
    _limit: PipeLimit,
}

/// The CRIU processes of a post-copy migration, which run at the same time.
struct Parts {
    dump: Running,
    pages: Running,
    restore: Running,
}

impl<'a> Followed<'a> {
    pub(super) fn start(vm: &Vm<'a>, engine: &Path, mib: u32) -> Result<Followed<'a>> {
        let limit = PipeLimit::raise()?;
        let (bed, [other, at]) = (vm.bed(), APART);
        // Every command on the other host consumes a process id, so the ids of this process start
        // much higher.
        let next = format!("echo {NUMBERS_FROM} > /proc/sys/kernel/ns_last_pid");
        bed.host(at)
            .shell(&next, STEP_TIME)?
            .expect_good("the number of the next process")?;
        let process = Alone::start(vm, bed.host(at), mib, "followed")?;
        ensure!(
            process.pid > i64::from(NUMBERS_FROM),
            "the process has the number {}",
            process.pid
        );
        Ok(Followed {
            bed,
            engine: engine.to_path_buf(),
            process,
            at,
            other,
            _limit: limit,
        })
    }

    pub(super) fn once(&mut self) -> Result<Once> {
        let (from, to) = (self.bed.host(self.at), self.bed.host(self.other));
        let (here, there) = (from.path(IMAGES), to.path(IMAGES));
        fs::create_dir_all(&here)?;
        let once = self.moved(from, to).map_err(|error| {
            let logs = [(&here, "dump"), (&there, "lazy-pages"), (&there, "restore")];
            anyhow!(
                "{error:#}{}",
                logs.map(|(images, word)| errors(images, word)).concat()
            )
        })?;
        fs::remove_dir_all(here)?;
        fs::remove_dir_all(there)?;
        std::mem::swap(&mut self.at, &mut self.other);
        Ok(once)
    }

    fn moved(&mut self, from: &Host, to: &Host) -> Result<Once> {
        let images = Path::new(IMAGES);
        let address = format!("{NETWORK}.{}", self.at);
        let port = ["--port", PORT, "--address", &address];
        let mut dump = criu(from, &self.engine, "dump", images);
        dump.arg("--lazy-pages")
            .args(port)
            .args(["-t", &self.process.pid.to_string()]);
        let begin = now_us();
        let dump = ready(dump).context("criu dump")?;
        let dumped = now_us();
        let mut copy = Command::new("cp");
        copy.arg("-r").arg(from.path(IMAGES)).arg(to.path(IMAGES));
        must(copy, STEP_TIME)?;
        let copied = now_us();
        let mut pages = criu(to, &self.engine, "lazy-pages", images);
        pages.arg("--page-server").args(port);
        let pages = ready(pages).context("criu lazy-pages")?;
        let served = now_us();
        let mut restore = criu(to, &self.engine, "restore", images);
        restore.arg("--lazy-pages");
        let mut parts = Parts {
            dump,
            pages,
            restore: Running::start(restore, Stdio::null())?,
        };
        let (stood, until) = parts.gap(&self.process.notes, dumped)?;
        let bytes = bytes(&to.path(IMAGES))?;
        let restore = parts.arrived()?;
        let arrived = now_us().max(until);
        // The source has exited, and with it the program that waited for it.
        std::mem::replace(&mut self.process.running, restore).finish(STEP_TIME)?;
        self.process.notes.pairs("gap").map_err(Error::msg)?;
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
        Ok(Once {
            freeze_ms,
            total_ms,
            arrived_ms,
            bytes,
            steps,
        })
    }

    pub(super) fn end(self) -> Result<()> {
        self.process.end(self.bed.host(self.at))
    }
}

impl Parts {
    /// Waits until the process runs again. Fails if one of the CRIU processes fails before.
    fn gap(&mut self, notes: &Notes, at: i64) -> Result<(i64, i64)> {
        eventually(STEP_TIME, || {
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
            notes.gap_at(at).map(Ok)
        })?
        .map_err(Error::msg)
    }

    /// Waits until all memory has been transferred. Returns the CRIU that restored the process and
    /// waits for it.
    fn arrived(self) -> Result<Running> {
        self.pages
            .finish(STEP_TIME)?
            .expect_good("criu lazy-pages")?;
        self.dump.finish(STEP_TIME)?.expect_good("criu dump")?;
        Ok(self.restore)
    }
}

/// Starts a long-running CRIU command and waits until it reports that it is ready.
///
/// The status pipe takes the place of standard input, which CRIU does not need: entering a host
/// passes on only the three standard descriptors.
fn ready(mut command: Command) -> Result<Running> {
    command.args(["--status-fd", "0"]);
    let (mut word, its_end) = std::io::pipe()?;
    let running = Running::start(command, its_end.into())?;
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(word.read(&mut [0])));
    match told.recv_timeout(STEP_TIME) {
        Ok(Ok(1)) => Ok(running),
        Ok(_) => bail!(
            "it ended before it was ready: {:?}",
            running.finish(STEP_TIME)?
        ),
        Err(_) => bail!("it is not ready after {} s", STEP_TIME.as_secs()),
    }
}

/// Raises the machine's pipe size limit to what CRIU needs. Without CAP_SYS_RESOURCE CRIU cannot
/// exceed the limit; it ignores the error and fills the pipe until it blocks.
struct PipeLimit {
    /// The previous limit, if it was lower.
    before: Option<String>,
}

impl PipeLimit {
    fn raise() -> Result<PipeLimit> {
        let before = fs::read_to_string(PIPE_LIMIT)
            .context(PIPE_LIMIT)?
            .trim()
            .to_string();
        if before.parse::<u64>().context(PIPE_LIMIT)? >= PIPE_BYTES {
            return Ok(PipeLimit { before: None });
        }
        fs::write(PIPE_LIMIT, PIPE_BYTES.to_string()).with_context(|| {
            format!("CRIU has memory follow through pipes of {PIPE_BYTES} bytes, and {PIPE_LIMIT} cannot be raised")
        })?;
        Ok(PipeLimit {
            before: Some(before),
        })
    }
}

impl Drop for PipeLimit {
    fn drop(&mut self) {
        // An error does not matter: a higher limit harms no process.
        let _ = self
            .before
            .take()
            .map(|before| fs::write(PIPE_LIMIT, before));
    }
}
