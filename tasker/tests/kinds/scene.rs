//! A task and two taskers between which it migrates, from the start of the task to its end.

use super::common::moving::{
    MigrationMeasurements, inspect, migrate_task_while, prepare, require_migration,
};
use super::common::{Tasker, migration, start_order, tid};
use sempa_proto::migration::{Refusal, RequiredFile, TaskFacts};
use sempa_proto::tasker::ToTasker;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Text that a program prints when it is set up.
const READY: &[u8] = b"ready\n";
/// Text that a program prints when all its checks were successful.
const CHECKS_PASSED: &[u8] = b"right\n";
/// Wait status of a program whose checks were all successful.
const SUCCESS_STATUS: i32 = 7 << 8;

pub(crate) struct Scene {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) source: Tasker,
    pub(crate) target: Tasker,
    pub(crate) output: Vec<u8>,
    /// An additional variable for the task's environment, as `NAME=VALUE`.
    pub(crate) variable: Option<&'static str>,
    last_migration: u64,
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
        require_migration();
        let dir = tempfile::tempdir().expect("dir");
        std::fs::create_dir(dir.path().join("data")).expect("dir");
        let there = target(dir.path());
        Scene {
            source: Tasker::start(),
            target: there,
            dir,
            output: Vec::new(),
            variable: None,
            last_migration: 0,
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
            .arg(source_path(source))
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
        let mut order = start_order(tid(1), program, &words);
        order
            .env
            .extend(self.variable.map(|variable| variable.as_bytes().to_vec()));
        self.source.send(ToTasker::Start(order));
        let unable = |text: &[u8]| text.starts_with(b"unable");
        let is_ready = |text: &[u8]| text.windows(READY.len()).any(|w| w == READY);
        self.source
            .wait_for_output(tid(1), &mut self.output, |text| {
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
    pub(crate) fn migrate_while(&mut self, meanwhile: &mut dyn FnMut()) -> MigrationMeasurements {
        self.last_migration += 1;
        migrate_task_while(
            &mut self.source,
            &mut self.target,
            tid(1),
            self.last_migration,
            &mut self.output,
            meanwhile,
        )
    }

    /// Migrates the task to the other tasker and back.
    pub(crate) fn migrate_there_and_back(&mut self) -> MigrationMeasurements {
        self.migrate_while(&mut || {});
        std::mem::swap(&mut self.source, &mut self.target);
        let moved = self.migrate_while(&mut || {});
        std::mem::swap(&mut self.source, &mut self.target);
        moved
    }

    /// Returns the facts of the task, or the reason why it may not migrate.
    pub(crate) fn inspect(&mut self) -> Result<TaskFacts, Refusal> {
        self.last_migration += 1;
        inspect(&mut self.source, tid(1), migration(self.last_migration))
    }

    /// Returns the target's reasons for refusing the task.
    pub(crate) fn verdict(&mut self) -> Vec<Refusal> {
        let facts = self.inspect().expect("it may leave");
        prepare(
            &mut self.target,
            tid(1),
            migration(self.last_migration),
            facts,
        )
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
    pub(crate) fn assert_ends_successfully(mut self) -> String {
        std::fs::write(self.dir.path().join("go"), "").expect("write");
        let (rest, status, _) = self.source.wait_for_exit(tid(1));
        self.output.extend(rest);
        let said = String::from_utf8_lossy(&self.output).into_owned();
        assert!(self.output.ends_with(CHECKS_PASSED), "{said}");
        assert_eq!(status, SUCCESS_STATUS, "{said}");
        self.source.stop();
        self.target.stop();
        said
    }
}

/// Starts a tasker that simulates another host: it has its own addresses, terminals and directory
/// `data`. The shell command `prepare` runs first; the variable `$data` contains the path of that
/// directory.
pub(crate) fn start_other_host(dir: &Path, prepare: &str) -> Tasker {
    let script = format!(
        "ip link set lo up && mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts && data={}/data && \
         mount -t tmpfs none $data && {prepare} && exec \"$@\"",
        dir.display()
    );
    Tasker::start_wrapped(
        &["unshare", "--mount", "--net", "sh", "-c", &script, "sh"],
        &[],
    )
}

/// Returns the path of a program's source.
pub(crate) fn source_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/programs/kinds")
        .join(name)
}

/// Asserts that a program in C keeps the state that its table row is about.
pub(crate) fn assert_survives(family: &str, row: &str) {
    assert_ends_printing(Scene::begin(), family, row, "");
}

/// As [`survives`], with a target that simulates another host.
pub(crate) fn assert_survives_on_other_host(family: &str, row: &str, prepare: &str) {
    assert_ends_printing(
        Scene::begin_with(|dir| start_other_host(dir, prepare)),
        family,
        row,
        "",
    );
}

/// Asserts that a program in C prints `expected` after its migration.
pub(crate) fn assert_prints_after_migration(family: &str, row: &str, expected: &str) {
    assert_ends_printing(Scene::begin(), family, row, &format!("{expected}\n"));
}

fn assert_ends_printing(mut scene: Scene, family: &str, row: &str, expected: &str) {
    let program = scene.compile_c(family);
    scene.start(&program, &[], row, "");
    scene.migrate_there_and_back();
    assert_eq!(
        scene.assert_ends_successfully(),
        format!("ready\n{expected}right\n")
    );
}

/// Asserts that a program in C is refused with this reason and continues.
pub(crate) fn assert_refused(row: &str, extra: &str, reason: &str) {
    let mut scene = Scene::begin();
    let program = scene.compile_c("refused");
    scene.start(&program, &[], row, extra);
    let result = scene.inspect();
    assert!(
        matches!(&result, Err(Refusal::UnsupportedResource { what }) if what.contains(reason)),
        "{row}: {result:?}"
    );
    scene.assert_ends_successfully();
}
