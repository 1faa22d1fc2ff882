//! Real programs that migrate several times while they compute finish with the result of a run
//! without migrations: Debian's unmodified tablix2, tasks in Python with ctypes, and tasks in
//! Fortran with OpenMP.

use sempa_tests::requirements::{require_program, testbed};
use sempa_tests::run::{RunningCommand, run_ok};
use sempa_tests::timetable::{self, School, Solution};
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(300);
/// Number of migrations of each job. The tasks of a job migrate in turn.
const MIGRATION_COUNT: usize = 8;
/// Number of rounds that a job computes between two migrations.
const ROUNDS_BETWEEN: usize = 3;
const HOSTS: [&str; 3] = ["h1", "h2", "h3"];
/// Part of the console's message about a migration of a task that has ended.
const TASK_ENDED_TEXT: &str = "there is no such task";
/// Number of tablix2's kernels.
const KERNELS: usize = 2;
/// Argument of tablix2: number of populations without improvement after which a kernel stops.
const FINISH_OPTION: &str = "finish=400";
const SCHOOL: School = School {
    classes: 10,
    teachers: 13,
    days: 5,
    lessons_per_day: 6,
    concurrent_lessons: 7,
};

fn with_three_hosts(needs: &[&str], test: impl FnOnce(&Vm<'_>)) {
    for name in needs {
        require_program(name, name);
    }
    let bed = testbed(HOSTS.len());
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&HOSTS[1..]).expect("the others join");
    test(&vm);
    vm.halt().expect("halts");
}

fn wait_until<T>(vm: &Vm<'_>, look: impl FnMut() -> Result<T, String>) -> T {
    wait_for(TIMEOUT, look).or_panic_with_logs(vm)
}

/// Returns the tids of all tasks of a program.
fn tids(vm: &Vm<'_>, program: &str) -> Vec<String> {
    let tasks = vm.tasks().or_panic_with_logs(vm);
    tasks
        .into_iter()
        .filter(|task| task.name.ends_with(program))
        .map(|task| task.tid)
        .collect()
}

/// Migrates a task to another host. `number` selects the host. Returns false if the task has ended.
fn migrate_to_next(vm: &Vm<'_>, tid: &str, number: usize) -> bool {
    let Ok(from) = vm.host_of(tid) else {
        return false;
    };
    let others: Vec<&str> = HOSTS.into_iter().filter(|name| *name != from).collect();
    let to = others[number % others.len()];
    eprintln!("move {number}: {tid} from {from} to {to}");
    let done = vm.migrate_when_ready(tid, to).or_panic_with_logs(vm);
    if !done.succeeded() && done.err.contains(TASK_ENDED_TEXT) {
        return false;
    }
    assert!(done.succeeded(), "{done:?}\n{}", vm.logs());
    true
}

/// A job of two tasks that writes one line for each round (`tests/programs/digest.py`,
/// `waves.f90`).
struct Job<'a> {
    vm: &'a Vm<'a>,
    program: &'static str,
    folder: PathBuf,
}

impl<'a> Job<'a> {
    fn start(vm: &'a Vm<'a>, program: &'static str, name: &str, rounds: usize) -> Job<'a> {
        let folder = vm.home().join(name);
        fs::create_dir(&folder).expect("made");
        let words = [
            "-h2",
            program,
            folder.to_str().expect("text"),
            &rounds.to_string(),
        ];
        vm.spawn(&words).or_panic_with_logs(vm);
        Job {
            vm,
            program,
            folder,
        }
    }

    fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        text.lines().map(str::to_string).collect()
    }

    fn wait_for_rounds(&self) {
        let until = self.log().len() + ROUNDS_BETWEEN;
        wait_until(self.vm, || match self.log().len() {
            rounds if rounds >= until => Ok(()),
            rounds => Err(format!(
                "{} has come to round {rounds}, not {until}",
                self.program
            )),
        });
    }

    /// Waits for the end of all tasks of the job. Returns the lines of its log and its result.
    fn finish(self) -> (Vec<String>, String) {
        let result = wait_until(self.vm, || {
            let text = fs::read_to_string(self.folder.join("result"));
            text.map_err(|_| {
                format!(
                    "no result of {} after {} rounds",
                    self.program,
                    self.log().len()
                )
            })
        });
        wait_until(self.vm, || match tids(self.vm, self.program) {
            left if left.is_empty() => Ok(()),
            left => Err(format!("{left:?} have not ended")),
        });
        (self.log(), result)
    }
}

/// Runs the job with migrations of both tasks, and then without migrations for the same number of
/// rounds. Checks that the results are equal.
fn check_same_result(vm: &Vm<'_>, program: &'static str) {
    let job = Job::start(vm, program, "moved", 0);
    job.wait_for_rounds();
    let both = tids(vm, program);
    assert_eq!(both.len(), 2, "{both:?}");
    for number in 0..MIGRATION_COUNT {
        assert!(
            migrate_to_next(vm, &both[number % both.len()], number / both.len()),
            "a task has ended early"
        );
        job.wait_for_rounds();
    }
    fs::write(job.folder.join("enough"), "").expect("written");
    let moved = job.finish();
    assert!(
        moved.0.len() > MIGRATION_COUNT * ROUNDS_BETWEEN,
        "{} rounds",
        moved.0.len()
    );
    let undisturbed = Job::start(vm, program, "undisturbed", moved.0.len()).finish();
    let first = moved
        .0
        .iter()
        .zip(&undisturbed.0)
        .find(|(moved, undisturbed)| moved != undisturbed);
    assert_eq!(first, None, "the first round that differs");
    assert!(moved == undisturbed, "{} and {}", moved.1, undisturbed.1);
    eprintln!(
        "{program}: {} rounds, {MIGRATION_COUNT} moves, {}",
        moved.0.len(),
        moved.1.trim()
    );
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("programs")
        .join(name)
}

#[test]
#[ignore = "system tier: needs root, hosts, CRIU and python3"]
fn moved_python_tasks_finish_with_the_right_result() {
    with_three_hosts(&["python3"], |vm| {
        let program = vm.home().join("pvm3/bin/LINUX64/digest");
        fs::copy(source("digest.py"), &program).expect("copied");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("executable");
        check_same_result(vm, "digest");
    });
}

/// Tasks in Fortran that compute with OpenMP finish with the correct result after migrations.
#[test]
#[ignore = "system tier: needs root, hosts, CRIU and gfortran"]
fn moved_fortran_tasks_finish_with_the_right_result() {
    with_three_hosts(&["gfortran"], |vm| {
        let prefix = vm.bed().prefix().expect("installed");
        let mut gfortran = Command::new("gfortran");
        gfortran
            .args(["-O2", "-fopenmp", "-fallow-argument-mismatch", "-o"])
            .arg(vm.home().join("pvm3/bin/LINUX64/waves"));
        gfortran
            .arg(source("waves.f90"))
            .arg("-I")
            .arg(prefix.join("include"));
        gfortran
            .arg("-L")
            .arg(prefix.join("lib"))
            .args(["-lfpvm3", "-lgpvm3", "-lpvm3"]);
        run_ok(gfortran, TIMEOUT).expect("gfortran takes it");
        check_same_result(vm, "waves");
    });
}

/// A running search of tablix2 and the folder of its results.
struct Search {
    running: RunningCommand,
    folder: PathBuf,
}

impl Search {
    fn start(vm: &Vm<'_>, name: &str) -> Search {
        let folder = vm.home().join(name);
        fs::create_dir(&folder).expect("made");
        let problem = folder.join("school.xml");
        fs::write(&problem, timetable::problem(SCHOOL, 1)).expect("written");
        let mut command = vm.command(vm.bed().host(1), "tablix2");
        command.args([
            "-n",
            &KERNELS.to_string(),
            "-d",
            "3",
            "-p",
            FINISH_OPTION,
            "-o",
        ]);
        command.arg(folder.join("found_")).arg(&problem);
        Search {
            running: RunningCommand::start(command, Stdio::null()).expect("it starts"),
            folder,
        }
    }

    /// Returns the number of progress reports of all kernels so far.
    fn report_count(&self) -> usize {
        let out =
            |text: anyhow::Result<String>| text.unwrap_or_default().matches(" reports ").count();
        out(self.running.out_so_far()) + out(self.running.err_so_far())
    }

    /// Waits until the kernels have made more progress reports. Returns false if they have
    /// finished.
    fn wait_for_progress(&self, vm: &Vm<'_>) -> bool {
        let until = self.report_count() + KERNELS;
        wait_until(vm, || match self.report_count() {
            _ if tids(vm, "tablix2_kernel").len() < KERNELS => Ok(false),
            now if now >= until => Ok(true),
            now => Err(format!(
                "{now} reports, not {until}: {}",
                self.running.err_so_far().unwrap_or_default()
            )),
        })
    }

    /// Waits for the end of the search and checks the hard constraints. Returns the timetables, one
    /// for each kernel.
    fn finish(self, vm: &Vm<'_>) -> Vec<Solution> {
        let done = self.running.finish(TIMEOUT).or_panic_with_logs(vm);
        assert!(done.succeeded(), "{done:?}\n{}", vm.logs());
        let solution = |number: usize| {
            let table = self.folder.join(format!("{number}.csv"));
            let mut command = vm.command(vm.bed().host(1), "tablix2_output");
            command
                .arg("-o")
                .arg(&table)
                .arg("csv")
                .arg(self.folder.join(format!("found_result{number}.xml")));
            run_ok(command, TIMEOUT).expect("tablix2 reads its own result");
            timetable::check_solution(&fs::read_to_string(table).expect("written"))
                .expect("nobody is needed twice")
        };
        (0..KERNELS).map(solution).collect()
    }
}

/// A search with migrations finds timetables with the same lessons as a search without migrations.
#[test]
#[ignore = "system tier: needs root, hosts, CRIU and tablix2"]
fn moved_tablix_kernels_find_good_timetables() {
    with_three_hosts(&["tablix2", "tablix2_output"], |vm| {
        let search = Search::start(vm, "moved");
        let mut kernels = Vec::new();
        wait_until(vm, || {
            kernels = tids(vm, "tablix2_kernel");
            if kernels.len() == KERNELS {
                Ok(())
            } else {
                Err(format!("{kernels:?} are there"))
            }
        });
        // The duration of the search is random, so it may end before the last migration.
        let mut moves = 0;
        while moves < MIGRATION_COUNT
            && (moves < KERNELS || search.wait_for_progress(vm))
            && migrate_to_next(vm, &kernels[moves % KERNELS], moves / KERNELS)
        {
            moves += 1;
        }
        assert!(moves >= KERNELS, "the search has ended too early");
        let moved = search.finish(vm);
        let undisturbed = Search::start(vm, "undisturbed").finish(vm);
        // A search is random: the hard constraints are met in every result, but the soft ones
        // differ.
        let lessons = |found: &[Solution]| {
            found
                .iter()
                .map(|solution| solution.lessons)
                .collect::<Vec<_>>()
        };
        assert_eq!(lessons(&moved), lessons(&undisturbed));
        assert_eq!(
            lessons(&moved),
            vec![SCHOOL.days * SCHOOL.lessons_per_day * SCHOOL.concurrent_lessons; KERNELS]
        );
        eprintln!("{moves} moves; moved: {moved:?}; undisturbed: {undisturbed:?}");
    });
}
