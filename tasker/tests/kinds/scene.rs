//! A task and two taskers between which it migrates, from the start of the task to its end.

use super::common::moving::{Moved, inspect, move_task_while, prepare, require_moves};
use super::common::{Tasker, migration, order, tid};
use sempa_proto::migration::{Refusal, RequiredFile, TaskFacts};
use sempa_proto::tasker::ToTasker;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Text that a program prints when it is set up.
const READY: &[u8] = b"ready\n";
/// Text that a program prints when all its checks were successful.
const RIGHT: &[u8] = b"right\n";
/// Wait status of a program whose checks were all successful.
const GOOD: i32 = 7 << 8;

pub(crate) struct Scene {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) here: Tasker,
    pub(crate) there: Tasker,
    pub(crate) output: Vec<u8>,
    /// An additional variable for the task's environment, as `NAME=VALUE`.
    pub(crate) variable: Option<&'static str>,
    moves: u64,
}

impl Scene {
    /// Starts two taskers.
    ///
    /// # Panics
    /// No task can migrate on this machine.
    pub(crate) fn begin() -> Scene {
        Scene::begin_with(|_| Tasker::start())
    }

    /// As [`Scene::begin`], but the target's tasker is started by `target`, whose argument is the
    /// directory of the scene.
    pub(crate) fn begin_with(target: impl FnOnce(&Path) -> Tasker) -> Scene {
        require_moves();
        let dir = tempfile::tempdir().expect("dir");
        std::fs::create_dir(dir.path().join("data")).expect("dir");
        let there = target(dir.path());
        Scene {
            here: Tasker::start(),
            there,
            dir,
            output: Vec::new(),
            variable: None,
            moves: 0,
        }
    }

    /// Compiles the test program `source` and returns its path.
    pub(crate) fn compile(&self, compiler: &str, words: &[&str], source: &str) -> PathBuf {
        let name = source.split('.').next().expect("a name");
        let out = self.dir.path().join(name);
        let words = ["-O1", "-o", out.to_str().expect("text")]
            .into_iter()
            .chain(words.iter().copied());
        let done = Command::new(compiler)
            .args(words)
            .arg(program(source))
            .status()
            .expect("a compiler");
        assert!(done.success());
        out
    }

    /// Compiles the test program in C of this family and returns its path.
    pub(crate) fn compile_c(&self, family: &str) -> PathBuf {
        self.compile("gcc", &["-pthread"], &format!("{family}.c"))
    }

    /// Starts a program as the task. Its arguments are `before`, the name of a table row, the
    /// directory of the scene, and `extra`. Waits until the program is ready.
    ///
    /// # Panics
    /// The kernel lacks the feature that the row is about.
    pub(crate) fn start(&mut self, program: &Path, before: &[&str], row: &str, extra: &str) {
        let place = self.dir.path().to_str().expect("text").to_string();
        let words: Vec<&str> = before.iter().copied().chain([row, &place, extra]).collect();
        let mut order = order(tid(1), program, &words);
        order
            .env
            .extend(self.variable.map(|variable| variable.as_bytes().to_vec()));
        self.here.send(ToTasker::Start(order));
        let unable = |text: &[u8]| text.starts_with(b"unable");
        let is_ready = |text: &[u8]| text.windows(READY.len()).any(|w| w == READY);
        self.here.output_until(tid(1), &mut self.output, |text| {
            is_ready(text) || unable(text)
        });
        assert!(
            !unable(&self.output),
            "cannot run here: {row}: {}",
            String::from_utf8_lossy(&self.output)
        );
    }

    /// Migrates the task to the other tasker. Calls `meanwhile` while the task exists only as
    /// images.
    pub(crate) fn moves_while(&mut self, meanwhile: &mut dyn FnMut()) -> Moved {
        self.moves += 1;
        move_task_while(
            &mut self.here,
            &mut self.there,
            tid(1),
            self.moves,
            &mut self.output,
            meanwhile,
        )
    }

    /// Migrates the task to the other tasker and back.
    pub(crate) fn moves_there_and_back(&mut self) -> Moved {
        self.moves_while(&mut || {});
        std::mem::swap(&mut self.here, &mut self.there);
        let moved = self.moves_while(&mut || {});
        std::mem::swap(&mut self.here, &mut self.there);
        moved
    }

    /// Returns the facts of the task, or the reason why it may not migrate.
    pub(crate) fn inspect(&mut self) -> Result<TaskFacts, Refusal> {
        self.moves += 1;
        inspect(&mut self.here, tid(1), migration(self.moves))
    }

    /// Returns the target's reasons for refusing the task.
    pub(crate) fn verdict(&mut self) -> Vec<Refusal> {
        let facts = self.inspect().expect("it may leave");
        prepare(&mut self.there, tid(1), migration(self.moves), facts)
    }

    /// Returns the requirement of a file that the task has open; `None` if the facts do not contain
    /// it.
    pub(crate) fn fact(&mut self, name: &str) -> Option<RequiredFile> {
        let path = self.dir.path().join(name);
        self.inspect()
            .expect("it may leave")
            .files
            .into_iter()
            .find(|fact| fact.path == path)
    }

    /// Lets the task check its state, asserts that it ends successfully, and returns all its
    /// output.
    pub(crate) fn ends_right(mut self) -> String {
        std::fs::write(self.dir.path().join("go"), "").expect("write");
        let (rest, status, _) = self.here.follow_to_the_end(tid(1));
        self.output.extend(rest);
        let said = String::from_utf8_lossy(&self.output).into_owned();
        assert!(self.output.ends_with(RIGHT), "{said}");
        assert_eq!(status, GOOD, "{said}");
        self.here.stop();
        self.there.stop();
        said
    }
}

/// Starts a tasker that simulates another host: it has its own addresses, terminals and directory
/// `data`. The shell command `prepare` runs first; the variable `$data` contains the path of that
/// directory.
pub(crate) fn other_host(dir: &Path, prepare: &str) -> Tasker {
    let script = format!(
        "ip link set lo up && mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts && data={}/data && \
         mount -t tmpfs none $data && {prepare} && exec \"$@\"",
        dir.display()
    );
    Tasker::start_by(
        &["unshare", "--mount", "--net", "sh", "-c", &script, "sh"],
        &[],
    )
}

/// Returns the path of a program's source.
pub(crate) fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/programs/kinds")
        .join(name)
}

/// Asserts that a program in C keeps the state that its table row is about.
pub(crate) fn survives(family: &str, row: &str) {
    ends_saying(Scene::begin(), family, row, "");
}

/// As [`survives`], with a target that simulates another host.
pub(crate) fn survives_elsewhere(family: &str, row: &str, prepare: &str) {
    ends_saying(
        Scene::begin_with(|dir| other_host(dir, prepare)),
        family,
        row,
        "",
    );
}

/// Asserts that a program in C prints `expected` after its migration.
pub(crate) fn becomes(family: &str, row: &str, expected: &str) {
    ends_saying(Scene::begin(), family, row, &format!("{expected}\n"));
}

fn ends_saying(mut scene: Scene, family: &str, row: &str, expected: &str) {
    let program = scene.compile_c(family);
    scene.start(&program, &[], row, "");
    scene.moves_there_and_back();
    assert_eq!(scene.ends_right(), format!("ready\n{expected}right\n"));
}

/// Asserts that a program in C is refused with this reason and continues.
pub(crate) fn is_refused(row: &str, extra: &str, reason: &str) {
    let mut scene = Scene::begin();
    let program = scene.compile_c("refused");
    scene.start(&program, &[], row, extra);
    let result = scene.inspect();
    assert!(
        matches!(&result, Err(Refusal::UnsupportedResource { what }) if what.contains(reason)),
        "{row}: {result:?}"
    );
    scene.ends_right();
}
