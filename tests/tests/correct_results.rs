//! Real programs that migrate several times while they compute finish with the result of a run
//! without migrations: Debian's unmodified tablix2, tasks in Python with ctypes, and tasks in
//! Fortran with OpenMP.

use sempa_tests::requirements::{require_program, require_testbed};
use sempa_tests::run::run_successfully;
use sempa_tests::tablix::{SearchParameters, TABLIX_PROGRAMS, TablixSearch};
use sempa_tests::timetable::{School, Solution};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(300);
/// Number of migrations of each job. The tasks of a job migrate in turn.
const MIGRATION_COUNT: usize = 8;
/// Number of rounds that a job computes between two migrations.
const ROUNDS_BETWEEN_MIGRATIONS: usize = 3;
const HOST_NAMES: [&str; 3] = ["h1", "h2", "h3"];
/// The console's message about a migration of a task that has ended contains this text.
const TASK_ENDED_TEXT: &str = "there is no such task";
/// The console's message about a task that has opened a temporary file since the target's check
/// contains one of these texts: the target lacks the file, and the task continues at the source. A
/// kernel of tablix2 writes its result through a temporary file just before its end.
const TEMPORARY_FILE_TEXTS: [&str; 2] = [
    "Can't open file tmp/file",
    "the task has opened it, or it has changed, since the target was asked",
];
/// Number of tablix2's kernels, that is, its tasks that search.
const KERNEL_COUNT: usize = 2;
const SEARCH: SearchParameters = SearchParameters {
    school: SCHOOL,
    kernel_count: KERNEL_COUNT,
    finish_option: "finish=400",
};
const SCHOOL: School = School {
    class_count: 10,
    teacher_count: 13,
    day_count: 5,
    lessons_per_day: 6,
    concurrent_lesson_count: 7,
};

fn with_three_hosts(required_programs: &[&str], test: impl FnOnce(&Vm<'_>)) {
    for name in required_programs {
        require_program(name, name);
    }
    let bed = require_testbed(HOST_NAMES.len());
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&HOST_NAMES[1..]).expect("the others join");
    test(&vm);
    vm.halt_and_wait().expect("halts");
}

fn wait_until<T>(vm: &Vm<'_>, check: impl FnMut() -> Result<T, String>) -> T {
    wait_for(TIMEOUT, check).or_panic_with_logs(vm)
}

/// Returns the tids of all running tasks of a program.
fn program_tids(vm: &Vm<'_>, program: &str) -> Vec<String> {
    let tasks = vm.tasks().or_panic_with_logs(vm);
    tasks
        .into_iter()
        .filter(|task| task.name.ends_with(program))
        .map(|task| task.tid)
        .collect()
}

/// Migrates a task to one of the other hosts, which `number` selects. Returns false if the task has
/// ended or writes its result.
fn migrate_to_other_host(vm: &Vm<'_>, tid: &str, number: usize) -> bool {
    let Ok(source) = vm.host_of(tid) else {
        return false;
    };
    let other_hosts: Vec<&str> = HOST_NAMES
        .into_iter()
        .filter(|name| *name != source)
        .collect();
    let target = other_hosts[number % other_hosts.len()];
    eprintln!("move {number}: {tid} from {source} to {target}");
    let output = vm.migrate_when_ready(tid, target).or_panic_with_logs(vm);
    let mut end_texts = TEMPORARY_FILE_TEXTS.iter().chain([&TASK_ENDED_TEXT]);
    if !output.succeeded() && end_texts.any(|text| output.stderr.contains(text)) {
        return false;
    }
    assert!(output.succeeded(), "{output:?}\n{}", vm.events_and_logs());
    true
}

/// A job of two tasks that writes one line for each round into its log. Its program is
/// `tests/programs/digest.py` or `waves.f90`.
struct Job<'a> {
    vm: &'a Vm<'a>,
    program: &'static str,
    folder: PathBuf,
}

impl<'a> Job<'a> {
    fn start(vm: &'a Vm<'a>, program: &'static str, name: &str, round_count: usize) -> Self {
        let folder = vm.user_home().join(name);
        fs::create_dir(&folder).expect("made");
        let args = [
            "-h2",
            program,
            folder.to_str().expect("text"),
            &round_count.to_string(),
        ];
        vm.spawn_connected(&args).or_panic_with_logs(vm);
        Job {
            vm,
            program,
            folder,
        }
    }

    fn log_lines(&self) -> Vec<String> {
        let text = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        text.lines().map(str::to_string).collect()
    }

    fn wait_for_rounds(&self) {
        let required_round_count = self.log_lines().len() + ROUNDS_BETWEEN_MIGRATIONS;
        wait_until(self.vm, || match self.log_lines().len() {
            rounds if rounds >= required_round_count => Ok(()),
            rounds => Err(format!(
                "{} has come to round {rounds}, not {required_round_count}",
                self.program
            )),
        });
    }

    /// Waits for the end of all tasks of the job. Returns the lines of the job's log and the job's
    /// result.
    fn finish(self) -> (Vec<String>, String) {
        let result = wait_until(self.vm, || {
            let text = fs::read_to_string(self.folder.join("result"));
            text.map_err(|_| {
                format!(
                    "no result of {} after {} rounds",
                    self.program,
                    self.log_lines().len()
                )
            })
        });
        wait_until(self.vm, || match program_tids(self.vm, self.program) {
            remaining_tids if remaining_tids.is_empty() => Ok(()),
            remaining_tids => Err(format!("{remaining_tids:?} have not ended")),
        });
        (self.log_lines(), result)
    }
}

/// Runs the job with migrations of both tasks, and then without migrations for the same number of
/// rounds. Checks that the results are equal.
fn check_same_result(vm: &Vm<'_>, program: &'static str) {
    let job = Job::start(vm, program, "moved", 0);
    job.wait_for_rounds();
    let job_tids = program_tids(vm, program);
    assert_eq!(job_tids.len(), 2, "{job_tids:?}");
    for number in 0..MIGRATION_COUNT {
        assert!(
            migrate_to_other_host(
                vm,
                &job_tids[number % job_tids.len()],
                number / job_tids.len()
            ),
            "a task has ended early"
        );
        job.wait_for_rounds();
    }
    fs::write(job.folder.join("enough"), "").expect("written");
    let migrated_result = job.finish();
    assert!(
        migrated_result.0.len() > MIGRATION_COUNT * ROUNDS_BETWEEN_MIGRATIONS,
        "{} rounds",
        migrated_result.0.len()
    );
    let reference_result = Job::start(vm, program, "undisturbed", migrated_result.0.len()).finish();
    let first_difference = migrated_result
        .0
        .iter()
        .zip(&reference_result.0)
        .find(|(migrated_result, reference_result)| migrated_result != reference_result);
    assert_eq!(first_difference, None, "the first round that differs");
    assert!(
        migrated_result == reference_result,
        "{} and {}",
        migrated_result.1,
        reference_result.1
    );
    eprintln!(
        "{program}: {} rounds, {MIGRATION_COUNT} moves, {}",
        migrated_result.0.len(),
        migrated_result.1.trim()
    );
}

fn source_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("programs")
        .join(name)
}

#[test]
#[ignore = "system tier: needs root, hosts, CRIU and python3"]
fn moved_python_tasks_finish_with_the_right_result() {
    with_three_hosts(&["python3"], |vm| {
        let program = vm.user_home().join("pvm3/bin/LINUX64/digest");
        fs::copy(source_path("digest.py"), &program).expect("copied");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("executable");
        check_same_result(vm, "digest");
    });
}

/// The tasks are Fortran programs that compute with OpenMP.
#[test]
#[ignore = "system tier: needs root, hosts, CRIU and gfortran"]
fn moved_fortran_tasks_finish_with_the_right_result() {
    with_three_hosts(&["gfortran"], |vm| {
        let prefix = vm.testbed().prefix().expect("installed");
        let mut gfortran = Command::new("gfortran");
        gfortran
            .args(["-O2", "-fopenmp", "-fallow-argument-mismatch", "-o"])
            .arg(vm.user_home().join("pvm3/bin/LINUX64/waves"));
        gfortran
            .arg(source_path("waves.f90"))
            .arg("-I")
            .arg(prefix.join("include"));
        gfortran
            .arg("-L")
            .arg(prefix.join("lib"))
            .args(["-lfpvm3", "-lgpvm3", "-lpvm3"]);
        run_successfully(gfortran, TIMEOUT).expect("gfortran takes it");
        check_same_result(vm, "waves");
    });
}

/// A search with migrations finds valid timetables with the same number of lessons as a search
/// without migrations.
#[test]
#[ignore = "system tier: needs root, hosts, CRIU and tablix2"]
fn moved_tablix_kernels_find_good_timetables() {
    with_three_hosts(&TABLIX_PROGRAMS, |vm| {
        let search = TablixSearch::start(vm, "moved", SEARCH);
        let kernel_tids = search.wait_for_kernels(vm);
        // The duration of the search is random, so it may end before the last migration.
        let mut migration_count = 0;
        while migration_count < MIGRATION_COUNT
            && (migration_count < KERNEL_COUNT || search.wait_for_progress(vm))
            && migrate_to_other_host(
                vm,
                &kernel_tids[migration_count % KERNEL_COUNT],
                migration_count / KERNEL_COUNT,
            )
        {
            migration_count += 1;
        }
        assert!(
            migration_count >= KERNEL_COUNT,
            "the search has ended too early"
        );
        let migrated_solutions = search.finish(vm);
        let reference_solutions = TablixSearch::start(vm, "undisturbed", SEARCH).finish(vm);
        // Searches are random. Every result meets the hard constraints, but the results differ in
        // how they meet the soft constraints.
        let lesson_counts = |solutions: &[Solution]| {
            solutions
                .iter()
                .map(|solution| solution.lesson_count)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            lesson_counts(&migrated_solutions),
            lesson_counts(&reference_solutions)
        );
        assert_eq!(
            lesson_counts(&migrated_solutions),
            vec![
                SCHOOL.day_count * SCHOOL.lessons_per_day * SCHOOL.concurrent_lesson_count;
                KERNEL_COUNT
            ]
        );
        eprintln!(
            "{migration_count} moves; moved: {migrated_solutions:?}; undisturbed: {reference_solutions:?}"
        );
    });
}
