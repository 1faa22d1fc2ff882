//! A fixture for tests: a task and two taskers between which the task migrates.

use super::TASK_USER;
use super::common::migration_steps::{
    MigrationMeasurements, inspect_and_wait, migrate_task_while, prepare_and_wait,
    require_migration,
};
use super::common::{Tasker, migration_id, start_order, tid, user_dir};
use sempa_proto::migration::{Refusal, RequiredFile, TaskFacts};
use sempa_proto::tasker::ToTasker;
use std::cell::OnceCell;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Text that a test program prints when it is ready to migrate.
const READY: &[u8] = b"ready\n";
/// Text that a test program prints when all its checks were successful.
const CHECKS_PASSED: &[u8] = b"right\n";
/// Wait status of a test program whose checks were all successful: exit status 7.
const SUCCESS_STATUS: i32 = 7 << 8;

/// Starts a tasker for the tasks of [`TASK_USER`], as [`Tasker::start_wrapped`] does.
pub(crate) fn start_tasker(wrapper: &[&str], env: &[(&str, &str)]) -> Tasker {
    Tasker::start_wrapped_for(TASK_USER, wrapper, env)
}

/// A tasker that is started when it is first used. Few refusals need one at the target.
#[derive(Default)]
pub(crate) struct TargetTasker(OnceCell<Tasker>);

impl Deref for TargetTasker {
    type Target = Tasker;

    fn deref(&self) -> &Tasker {
        self.0.get_or_init(|| start_tasker(&[], &[]))
    }
}

impl DerefMut for TargetTasker {
    fn deref_mut(&mut self) -> &mut Tasker {
        let _: &Tasker = self;
        self.0.get_mut().expect("it has been started")
    }
}

pub(crate) struct MigrationFixture {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) source: Tasker,
    pub(crate) target: TargetTasker,
    pub(crate) output: Vec<u8>,
    /// An additional variable for the task's environment, as `NAME=VALUE`.
    pub(crate) task_variable: Option<&'static str>,
    last_migration_number: u64,
}

impl MigrationFixture {
    /// Starts two taskers.
    ///
    /// # Panics
    /// No task can migrate on this machine.
    pub(crate) fn new() -> Self {
        Self::with_target(|_| start_tasker(&[], &[]))
    }

    /// As [`MigrationFixture::new`]; the target's tasker is started when it is first used.
    ///
    /// # Panics
    /// No task can migrate on this machine.
    pub(crate) fn for_refusal() -> Self {
        Self::create(|_| TargetTasker::default())
    }

    /// Creates a fixture like [`MigrationFixture::new`], but `start_target` starts the target's
    /// tasker. The argument of `start_target` is the directory of the fixture.
    pub(crate) fn with_target(start_target: impl FnOnce(&Path) -> Tasker) -> Self {
        Self::create(|dir| TargetTasker(start_target(dir).into()))
    }

    fn create(make_target: impl FnOnce(&Path) -> TargetTasker) -> Self {
        require_migration();
        let dir = user_dir(TASK_USER);
        let data_dir = dir.path().join("data");
        std::fs::create_dir(&data_dir).expect("dir");
        std::os::unix::fs::chown(&data_dir, TASK_USER, TASK_USER).expect("root may do so");
        let target = make_target(dir.path());
        Self {
            source: start_tasker(&[], &[]),
            target,
            dir,
            output: Vec::new(),
            task_variable: None,
            last_migration_number: 0,
        }
    }

    /// Compiles the test program `source_name` with the compiler's arguments `compiler_args`.
    /// Returns the path of the program.
    pub(crate) fn compile(
        &self,
        compiler: &str,
        compiler_args: &[&str],
        source_name: &str,
    ) -> PathBuf {
        let name = source_name.split('.').next().expect("a name");
        let program_path = self.dir.path().join(name);
        let compiler_args = ["-O1", "-o", program_path.to_str().expect("text")]
            .into_iter()
            .chain(compiler_args.iter().copied());
        let compiler_output = Command::new(compiler)
            .args(compiler_args)
            .arg(source_path(source_name))
            .status()
            .expect("a compiler");
        assert!(compiler_output.success());
        std::os::unix::fs::chown(&program_path, TASK_USER, TASK_USER).expect("root may do so");
        program_path
    }

    /// Compiles the C program `program_name`. Returns the path of the compiled program.
    pub(crate) fn compile_c(&self, program_name: &str) -> PathBuf {
        self.compile("gcc", &["-pthread"], &format!("{program_name}.c"))
    }

    /// Starts a program as the task. The arguments of the program are `leading_args`, the name
    /// `row` of the table row, the directory of the fixture, and `last_arg`. Waits until the
    /// program is ready.
    ///
    /// # Panics
    /// The kernel lacks the feature that the row is about.
    pub(crate) fn start_and_wait_until_ready(
        &mut self,
        program: &Path,
        leading_args: &[&str],
        row: &str,
        last_arg: &str,
    ) {
        let dir_text = self.dir.path().to_str().expect("text").to_string();
        let program_args: Vec<&str> = leading_args
            .iter()
            .copied()
            .chain([row, &dir_text, last_arg])
            .collect();
        let mut order = start_order(tid(1), program, &program_args);
        order.env.extend(
            self.task_variable
                .map(|variable| variable.as_bytes().to_vec()),
        );
        self.source.send(ToTasker::Start(order));
        let is_unsupported = |text: &[u8]| text.starts_with(b"unable");
        let is_ready = |text: &[u8]| text.windows(READY.len()).any(|w| w == READY);
        self.source
            .wait_for_output(tid(1), &mut self.output, |text| {
                is_ready(text) || is_unsupported(text)
            });
        assert!(
            !is_unsupported(&self.output),
            "cannot run here: {row}: {}",
            String::from_utf8_lossy(&self.output)
        );
    }

    /// Migrates the task from the source to the target. Calls `run_meanwhile` while the task exists
    /// only as images.
    pub(crate) fn migrate_while(
        &mut self,
        run_meanwhile: &mut dyn FnMut(),
    ) -> MigrationMeasurements {
        self.last_migration_number += 1;
        migrate_task_while(
            &mut self.source,
            &mut self.target,
            tid(1),
            self.last_migration_number,
            &mut self.output,
            run_meanwhile,
        )
    }

    /// Migrates the task to the target and back. Returns the measurements of the second migration.
    pub(crate) fn migrate_there_and_back(&mut self) -> MigrationMeasurements {
        self.migrate_while(&mut || {});
        std::mem::swap(&mut self.source, &mut *self.target);
        let measurements = self.migrate_while(&mut || {});
        std::mem::swap(&mut self.source, &mut *self.target);
        measurements
    }

    /// Returns the facts of the task, or the reason why the task may not migrate.
    pub(crate) fn inspect(&mut self) -> Result<TaskFacts, Refusal> {
        self.last_migration_number += 1;
        inspect_and_wait(
            &mut self.source,
            tid(1),
            migration_id(self.last_migration_number),
        )
    }

    /// Returns the target's reasons for refusing the task.
    pub(crate) fn query_verdict(&mut self) -> Vec<Refusal> {
        let facts = self.inspect().expect("it may leave");
        prepare_and_wait(
            &mut self.target,
            tid(1),
            migration_id(self.last_migration_number),
            facts,
        )
    }

    /// Returns the requirement of the open file `name` in the fixture's directory; `None` if the
    /// task's facts do not contain the file.
    pub(crate) fn file_requirement(&mut self, name: &str) -> Option<RequiredFile> {
        let path = self.dir.path().join(name);
        self.inspect()
            .expect("it may leave")
            .files
            .into_iter()
            .find(|required_file| required_file.path == path)
    }

    /// Lets the task check its state, and asserts that the task ends successfully. Returns the
    /// task's whole output.
    pub(crate) fn assert_ends_successfully(mut self) -> String {
        std::fs::write(self.dir.path().join("go"), "").expect("write");
        let (last_output, status, _) = self.source.wait_for_exit(tid(1));
        self.output.extend(last_output);
        let output = String::from_utf8_lossy(&self.output).into_owned();
        assert!(self.output.ends_with(CHECKS_PASSED), "{output}");
        assert_eq!(status, SUCCESS_STATUS, "{output}");
        self.source.stop_and_wait();
        if let Some(target) = self.target.0.into_inner() {
            target.stop_and_wait();
        }
        output
    }
}

/// Starts a tasker that simulates another host: it has its own addresses, terminals and directory
/// `data`. The shell command `prepare` runs first; the variable `$data` contains the path of the
/// directory `data`.
pub(crate) fn start_other_host(dir: &Path, prepare: &str) -> Tasker {
    let script = format!(
        "ip link set lo up && mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts && data={}/data && \
         mount -t tmpfs none $data && {prepare} && exec \"$@\"",
        dir.display()
    );
    start_tasker(
        &["unshare", "--mount", "--net", "sh", "-c", &script, "sh"],
        &[],
    )
}

/// Returns the path of the source of a test program.
pub(crate) fn source_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/programs/kinds")
        .join(name)
}

/// Asserts that a C program keeps the state that its table row is about.
pub(crate) fn assert_survives(program_name: &str, row: &str) {
    assert_ends_printing(MigrationFixture::new(), program_name, row, "");
}

/// Asserts the same as [`assert_survives`], with a target that simulates another host.
pub(crate) fn assert_survives_on_other_host(program_name: &str, row: &str, prepare: &str) {
    assert_ends_printing(
        MigrationFixture::with_target(|dir| start_other_host(dir, prepare)),
        program_name,
        row,
        "",
    );
}

/// Asserts that a C program prints `expected` after its migration. `row` names the table row that
/// the program checks.
pub(crate) fn assert_prints_after_migration(program_name: &str, row: &str, expected: &str) {
    assert_ends_printing(
        MigrationFixture::new(),
        program_name,
        row,
        &format!("{expected}\n"),
    );
}

fn assert_ends_printing(
    mut fixture: MigrationFixture,
    program_name: &str,
    row: &str,
    expected: &str,
) {
    let program = fixture.compile_c(program_name);
    fixture.start_and_wait_until_ready(&program, &[], row, "");
    fixture.migrate_there_and_back();
    assert_eq!(
        fixture.assert_ends_successfully(),
        format!("ready\n{expected}right\n")
    );
}
