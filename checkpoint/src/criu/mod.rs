//! CRIU as the dump engine: it writes any stopped process tree and builds it again, with nothing to be linked in.
//!
//! One `criu swrk` process per request, spoken to over a socket pair with the message types of `rust-criu`. CRIU runs in
//! a process group of its own and is killed, group and all, at a deadline or when the call is called off. The options are
//! those of a tested recipe: the source stays stopped, nothing is locked in the network, the process-id namespace
//! is outside the image, the restored root is a child of the caller.

mod ahead;
mod arrival;
mod complete;
mod crossing;
mod images;
mod log;
mod notes;
mod options;
mod owner;
mod pagemap;
mod pinned;
mod precopy;
mod process;
mod ptrace;
mod relay;
mod rescue;
mod serving;
mod uffd_keeper;
mod withheld;
mod words;

pub use notes::KernelNotes;
pub use owner::belong_to;
pub use pinned::Pinned;
pub use precopy::acknowledge as acknowledge_pre_copy;

use crate::engine::{
    Arriving, Checking, DumpJob, Dumping, Engine, Held, Limits, PreCopyStop, ReceivedPages,
    RestoreJob, Restoring, SentPages, Serving,
};
use nix::fcntl::{FallocateFlags, fallocate};
use process::{Program, Swrk, Word};
use sempa_proto::migration::Failure;
use sempa_proto::tasker::DumpReport;
use std::ffi::OsString;
use std::fs::File;
use std::io::{PipeReader, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use withheld::Withheld;

/// Where CRIU is looked for after the variable and before PATH.
const USUAL_PLACES: [&str; 2] = ["/opt/sempa/criu/sbin/criu", "/opt/criu/sbin/criu"];
/// How to get a working engine.
pub const HOW_TO_GET: &str = "get one with `cargo xtask criu`, which is found within five minutes, or start the daemon with \
     SEMPA_CRIU set to the path of a working criu";

/// How long a dump that is called off may take to end by itself before it is killed.
const CALLED_OFF_GRACE: Duration = Duration::from_secs(2);

const DUMP_LOG: &str = "dump.log";
const RESTORE_LOG: &str = "restore.log";
const CHECK_LOG: &str = "check.log";
/// What the engine wrote on its standard error before its log was open.
const STDERR: &str = "criu.stderr";
/// A file that is there for a moment, to see what the file system can do.
const HOLE: &str = "hole";

/// CRIU at a certain path.
#[derive(Clone, Debug)]
pub struct Criu {
    program: PathBuf,
}

impl Criu {
    /// Finds the program: SEMPA_CRIU, the usual places, PATH. `env` looks a variable up.
    ///
    /// # Errors
    /// One sentence: where it was looked for and how to get it.
    pub fn locate(env: impl Fn(&str) -> Option<OsString>) -> Result<Criu, String> {
        if let Some(set) = env("SEMPA_CRIU").filter(|v| !v.is_empty()) {
            let program = PathBuf::from(set);
            return match program.is_file() {
                true => Ok(Criu { program }),
                false => Err(format!(
                    "there is no dump engine at SEMPA_CRIU={}: put one there, which is found within five minutes, or get one with \
                     `cargo xtask criu` and start the daemon without SEMPA_CRIU",
                    program.display()
                )),
            };
        }
        let path = env("PATH").unwrap_or_default();
        let in_path = std::env::split_paths(&path).map(|dir| dir.join("criu"));
        USUAL_PLACES
            .iter()
            .map(PathBuf::from)
            .chain(in_path)
            .find(|program| program.is_file())
            .map(|program| Criu { program })
            .ok_or_else(|| {
                format!(
                    "no dump engine in {} or PATH: {HOW_TO_GET}",
                    USUAL_PLACES.join(", ")
                )
            })
    }

    /// The program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    fn start(
        &self,
        dir: &Path,
        log: &'static str,
        inherit: &[&OwnedFd],
        variables: &[(&'static str, String)],
        request: impl FnOnce(i32) -> Vec<u8>,
    ) -> Result<Swrk, Failure> {
        let open = |e: std::io::Error| {
            Failure::Io(format!(
                "cannot open the image directory {}: {e}",
                dir.display()
            ))
        };
        let images = File::open(dir).map_err(open)?;
        let request = request(images.as_raw_fd());
        let inherit: Vec<BorrowedFd<'_>> = inherit.iter().map(|fd| fd.as_fd()).collect();
        Swrk::start(
            &self.program,
            dir,
            images,
            log,
            &inherit,
            variables,
            &request,
        )
    }
}

impl Engine for Criu {
    fn probe(&self) -> Result<String, String> {
        process::version(&self.program).map_err(|why| {
            format!(
                "the dump engine {} does not run: {why}; {HOW_TO_GET}",
                self.program.display()
            )
        })
    }

    fn start_dump(&self, job: DumpJob) -> Result<Box<dyn Dumping>, Failure> {
        // Without these two a dump is as good, only an engine that is killed may harm the task.
        let before = rescue::Snapshot::take(&job.processes).ok();
        let (relay, ends) = relay::Relay::start(job.pid, &job.processes).ok().unzip();
        let mut inherit = ends
            .as_ref()
            .map_or(Vec::new(), |ends| ends.descriptors().to_vec());
        let mut variables = ends.as_ref().map_or(Vec::new(), relay::Ends::variables);
        let unknown = |e| Failure::Engine(format!("nobody knows which memory could follow: {e}"));
        let follows = job
            .asked_on
            .as_ref()
            .map(|_| Withheld::of(&job.processes))
            .transpose()
            .map_err(unknown)?;
        let list = follows
            .as_ref()
            .map(Withheld::list)
            .transpose()
            .map_err(unknown)?;
        inherit.extend(&list);
        variables.extend(list.as_ref().map(relay::withheld));
        let request = |images| options::dump(&job, images, DUMP_LOG);
        let mut swrk = self.start(&job.dir, DUMP_LOG, &inherit, &variables, request)?;
        swrk.hurry();
        swrk.end_by_itself_within(CALLED_OFF_GRACE);
        let follows = follows.zip(job.asked_on.map(Arc::new));
        Ok(Box::new(Dump {
            swrk,
            relay,
            dir: job.dir,
            before,
            follows,
            sent: job.sent,
        }))
    }

    fn start_check(&self, dir: &Path) -> Result<Box<dyn Checking>, Failure> {
        let unknown = |e| {
            Failure::Engine(format!(
                "the kernel does not tell which memory is there: {e}"
            ))
        };
        withheld::possible().map_err(unknown)?;
        let io = |e: std::io::Error| Failure::Io(format!("no descriptor for the engine: {e}"));
        let (loaded, tells) = std::io::pipe().map_err(io)?;
        let (library, tells) = (relay::library().map_err(io)?, OwnedFd::from(tells));
        let arguments = ["check", "--feature", "uffd-noncoop"]
            .into_iter()
            .map(AsRef::as_ref);
        let inherit = [library.as_fd(), tells.as_fd()];
        let program = Program::start(
            &self.program,
            arguments,
            dir,
            &inherit,
            &relay::tells_of_loading(&library, &tells),
        )?;
        Ok(Box::new(Check {
            program,
            log: dir.join(CHECK_LOG),
            loaded,
        }))
    }

    fn may_try_again(&self, root: i32, failure: &Failure) -> bool {
        crossing::may_try_again(root, failure)
    }

    fn start_restore(&self, job: RestoreJob) -> Result<Box<dyn Restoring>, Failure> {
        let inherit = [&job.pid_namespace, &job.output];
        // The task then never needs its memory twice: images in memory turn into the task, page by page.
        let uses_up = can_shrink(&job.dir);
        let request = |images| options::restore(&job, images, RESTORE_LOG, uses_up);
        let swrk = self.start(&job.dir, RESTORE_LOG, &inherit, &[], request)?;
        Ok(Box::new(Restore { swrk }))
    }

    fn send_ahead(
        &self,
        processes: &[i32],
        stream: &OwnedFd,
        stop: &PreCopyStop,
    ) -> Result<SentPages, Failure> {
        precopy::send(processes, stream, stop)
    }

    fn take_ahead(&self, stream: &OwnedFd, bytes_max: u64) -> Result<ReceivedPages, Failure> {
        precopy::receive(stream, bytes_max)
    }

    fn start_arrival(
        &self,
        dir: &Path,
        ask_on: OwnedFd,
        ahead: ReceivedPages,
    ) -> Result<Box<dyn Arriving>, Failure> {
        Ok(Box::new(arrival::Arrival::start(
            &self.program,
            dir,
            ask_on,
            ahead,
        )?))
    }
}

struct Check {
    program: Program,
    log: PathBuf,
    /// Has a byte when the program has loaded a library of ours, and no more writers when it has ended.
    loaded: PipeReader,
}

impl Checking for Check {
    fn engine_pid(&self) -> i32 {
        self.program.pid()
    }

    fn finish(mut self: Box<Self>, limits: &Limits) -> Result<(), Failure> {
        self.program.finish(limits, &self.log)?;
        match self.loaded.read(&mut [0]) {
            Ok(1) => Ok(()),
            _ => Err(Failure::Engine(
                "the engine does not load the libraries by which memory follows: is it linked statically?".into(),
            )),
        }
    }
}

struct Dump {
    // Dropped, and ended, in this order.
    swrk: Swrk,
    relay: Option<relay::Relay>,
    dir: PathBuf,
    /// What the task was like before.
    before: Option<rescue::Snapshot>,
    /// The memory that is not written, and where it will be asked for.
    follows: Option<(Withheld, Arc<OwnedFd>)>,
    /// What the other host has of it already.
    sent: Option<Arc<SentPages>>,
}

impl Dump {
    /// Waits for the end of the engine, and looks at what it has written.
    fn wait_for_images(&mut self, limits: &Limits) -> Result<(), Failure> {
        self.swrk.finish(limits)?;
        if let Some((withheld, _)) = &self.follows {
            withheld.note_in(&self.dir)?;
        }
        complete::check(&self.dir)
    }
}

impl Dumping for Dump {
    fn engine_pid(&self) -> i32 {
        self.swrk.pid()
    }

    fn finish(
        mut self: Box<Self>,
        limits: &Limits,
    ) -> Result<(DumpReport, Option<Box<dyn Serving>>), Failure> {
        let done = self.wait_for_images(limits);
        if done.is_err() {
            self.swrk.kill();
        }
        // Whatever it left in the task's way is gone, and the task stands still, when this returns.
        drop(self.relay.take());
        if let (Err(why), Some(before)) = (&done, &self.before) {
            before.put_back_if(why);
        }
        done?;
        // The logs are of use only when something failed; the images travel without them.
        for log in [DUMP_LOG, STDERR] {
            let _ = std::fs::remove_file(self.dir.join(log));
        }
        let report = measure(&self.dir);
        let report =
            report.map_err(|e| Failure::Io(format!("cannot read {}: {e}", self.dir.display())))?;
        let sent = self.sent.take();
        let serve = |(withheld, asked_on)| {
            Ok(Box::new(serving::Serve::start(withheld, asked_on, sent)?) as Box<dyn Serving>)
        };
        Ok((report, self.follows.take().map(serve).transpose()?))
    }
}

/// Whether parts of files in a directory can be given back to the file system. The engine takes a failure there for its own.
fn can_shrink(dir: &Path) -> bool {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let path = dir.join(HOLE);
    let shrinks = File::create(&path).is_ok_and(|file| fallocate(&file, flags, 0, 1).is_ok());
    let _ = std::fs::remove_file(path);
    shrinks
}

/// Counts the files of a directory.
fn measure(dir: &Path) -> std::io::Result<DumpReport> {
    let mut report = DumpReport::default();
    for entry in std::fs::read_dir(dir)? {
        let meta = entry?.metadata()?;
        if meta.is_file() {
            report.files += 1;
            report.bytes += meta.len();
        }
    }
    Ok(report)
}

struct Restore {
    swrk: Swrk,
}

impl Restoring for Restore {
    fn engine_pid(&self) -> i32 {
        self.swrk.pid()
    }

    fn hold(mut self: Box<Self>, limits: &Limits) -> Result<Box<dyn Held>, Failure> {
        loop {
            match self.swrk.hear(limits)? {
                Word::Notify { script, pid } if script == "post-restore" => {
                    return Ok(Box::new(HeldTask {
                        swrk: self.swrk,
                        pid,
                    }));
                }
                Word::Notify { .. } => self.swrk.answer(true),
                Word::Done => {
                    let why = "the engine let the task run without asking".to_string();
                    self.swrk.kill();
                    return Err(Failure::Engine(why));
                }
            }
        }
    }
}

struct HeldTask {
    swrk: Swrk,
    pid: i32,
}

impl Held for HeldTask {
    fn pid(&self) -> i32 {
        self.pid
    }

    fn release(mut self: Box<Self>, limits: &Limits) -> Result<(), Failure> {
        self.swrk.begin();
        self.swrk.answer(true);
        self.swrk.finish(limits)
    }

    fn refuse(mut self: Box<Self>) {
        // What it built lies in a namespace whose init the caller kills; nothing has to be asked of the engine.
        self.swrk.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_comes_first_and_a_wrong_one_is_told() {
        let found = Criu::locate(|name| (name == "SEMPA_CRIU").then(|| "/bin/true".into()))
            .expect("it is a file");
        assert_eq!(found.program(), Path::new("/bin/true"));
        let why = Criu::locate(|name| (name == "SEMPA_CRIU").then(|| "/no/criu".into()))
            .expect_err("it is missing");
        assert!(
            why.contains("SEMPA_CRIU=/no/criu") && why.contains("cargo xtask criu"),
            "{why}"
        );
    }

    #[test]
    fn whether_files_can_shrink_is_found_out_and_leaves_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        // The kernel's own answer is as good as the other; a directory that is not there has none.
        can_shrink(dir.path());
        assert_eq!(std::fs::read_dir(dir.path()).expect("readable").count(), 0);
        assert!(!can_shrink(&dir.path().join("none")));
    }

    #[test]
    fn an_engine_that_does_not_work_says_so() {
        for program in ["/bin/false", "/etc/passwd", "/bin/echo"] {
            let why = Criu {
                program: program.into(),
            }
            .probe()
            .expect_err("no engine");
            assert!(
                why.contains(program) && why.contains("cargo xtask criu"),
                "{why}"
            );
        }
    }
}
