//! The task's program without a virtual machine, on hosts of its own, moved by nothing but CRIU: all of it at once
//! ([`Bare`]), or at first only what it needs to run, with its memory after it ([`Followed`]).

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

/// The host of bare CRIU, and the one to which memory follows from there or back.
pub(super) const APART: [usize; 2] = [3, 4];
/// The port at which the source hands out memory.
const PORT: &str = "7000";
/// Numbers of processes whose memory follows are above this: free on either host, because nobody counts as far as that.
const NUMBERS_FROM: u32 = 30_000;
/// How large a pipe may be at most, on this whole machine.
const PIPE_LIMIT: &str = "/proc/sys/fs/pipe-max-size";
/// CRIU holds memory that is to follow in pipes that large.
const PIPE_BYTES: u64 = 16 << 20;

/// A process and who waits for it.
struct Alone {
    notes: Notes,
    /// The process, or the engine that has restored it and waits for it.
    running: Running,
    /// Its number on its host.
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

    /// Ends it. If that is not reached, it ends with its host.
    fn end(self, host: &Host) -> Result<()> {
        let mut kill = host.command("kill");
        kill.args(["-9", &self.pid.to_string()]);
        must(kill, STEP_TIME)?;
        self.running.finish(STEP_TIME).map(drop)
    }
}

/// A command of the engine on a host.
fn criu(host: &Host, engine: &Path, word: &str, images: &Path) -> Command {
    let mut command = host.command(engine);
    command
        .arg(word)
        .arg("-D")
        .arg(images)
        .args(["-o", &log_of(word), "--network-lock", "skip"]);
    command
}

/// The name of a command's log.
fn log_of(word: &str) -> String {
    format!("{word}.log")
}

/// The size of all files of a folder.
fn bytes(folder: &Path) -> Result<u64> {
    fs::read_dir(folder)?
        .map(|entry| Ok(entry?.metadata()?.len()))
        .sum()
}

/// What a command of the engine says of its trouble. That it may not raise a limit is none.
fn errors(images: &Path, word: &str) -> String {
    let log = fs::read_to_string(images.join(log_of(word))).unwrap_or_default();
    let lines = log
        .lines()
        .filter(|line| line.contains("Error") && !line.contains("RLIMIT_NOFILE"));
    lines.map(|line| format!("\ncriu {word}: {line}")).collect()
}

/// Dumped to memory, copied, restored on the same host.
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
        // Its number has to be free: whoever waited for the process has ended with it.
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

/// Restored on another host from images without its memory, which a daemon of the engine fetches from the source meanwhile
/// (lazy pages). Source and copy are there at the same time, under the same number: that needs two hosts.
pub(super) struct Followed<'a> {
    bed: &'a Testbed,
    engine: PathBuf,
    process: Alone,
    /// The numbers of its host and of the other one.
    at: usize,
    other: usize,
    /// Put back when this is dropped.
    _limit: PipeLimit,
}

/// What the engine does in such a move, all at the same time.
struct Parts {
    dump: Running,
    pages: Running,
    restore: Running,
}

impl<'a> Followed<'a> {
    pub(super) fn start(vm: &Vm<'a>, engine: &Path, mib: u32) -> Result<Followed<'a>> {
        let limit = PipeLimit::raise()?;
        let (bed, [other, at]) = (vm.bed(), APART);
        // Bare CRIU's process is on the other host, and every command there takes a number.
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
        // The source is gone, and with it whoever waited for it.
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
    /// Waits until the process runs again, or one of these has failed: then it never will.
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

    /// Waits until nothing is missing: nobody has memory to fetch or to hand out any more. Who restored the process, and waits for it.
    fn arrived(self) -> Result<Running> {
        self.pages
            .finish(STEP_TIME)?
            .expect_good("criu lazy-pages")?;
        self.dump.finish(STEP_TIME)?.expect_good("criu dump")?;
        Ok(self.restore)
    }
}

/// Starts a command of the engine that goes on for long, and waits until it says that others can turn to it. For that it gets a
/// pipe in the place of its input, of which it has no need: whoever enters a host hands on these three, whatever else is open.
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

/// Pipes as large as the engine wants them. Without CAP_SYS_RESOURCE it gets none above the limit of the machine, does not look
/// at the answer, and hands out memory until the pipe is full.
struct PipeLimit {
    /// What it was, if it was less.
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
        // It is only a limit: where it cannot be put back, nobody is worse off.
        let _ = self
            .before
            .take()
            .map(|before| fs::write(PIPE_LIMIT, before));
    }
}
