//! Master-worker programs in C and C++: in one process, and on hosts where workers and masters are
//! killed.

use sempa_tests::requirements::{
    build_folder, installed_prefix, panic_if_unmet, require_program, require_testbed,
};
use sempa_tests::run::{RunningCommand, run_successfully, run_to_end};
use sempa_tests::vm::{Task, VmSettings};
use sempa_tests::{CommandResult, OrPanicWithLogs, Testbed, Vm, wait_for};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const TIMEOUT: Duration = Duration::from_secs(300);
const POLL_TIMEOUT: Duration = Duration::from_secs(60);
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-pedantic", "-Werror"];
/// Depth of the tree of `work_count` and time per node in microseconds: some 10 s of computing.
const TREE: [&str; 2] = ["13", "600"];
/// Size of the problem of `work_mw` and time per node in microseconds.
const KNAPSACK: [&str; 2] = ["60", "2000"];

fn repository_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn interface_folder() -> PathBuf {
    repository_folder().join("master-worker/capi")
}

/// Copies the library of the build to `folder`, where programs find it.
fn install_library(folder: &Path) {
    let library = build_folder().expect("a folder").join("libsempa_work.so");
    let missing = "libsempa_work.so is not built: run cargo build -p sempa-work-capi".to_string();
    panic_if_unmet((!library.exists()).then_some(missing));
    let installed = folder.join("libsempa_work.so.1");
    fs::copy(library, &installed).expect("a copy");
    std::os::unix::fs::symlink(installed, folder.join("libsempa_work.so")).expect("a link");
}

/// Returns the compiler for C11 or C++11 with the interface's headers.
fn compiler(source: &Path) -> Command {
    let is_c = source.extension().is_some_and(|ending| ending == "c");
    let (name, standard) = match is_c {
        true => ("gcc", "-std=c11"),
        false => ("g++", "-std=c++11"),
    };
    require_program(name, name);
    let mut compiler = Command::new(name);
    compiler.args([standard, "-O1"]).args(WARNINGS);
    for headers in ["include", "cpp"] {
        compiler.arg("-I").arg(interface_folder().join(headers));
    }
    compiler.arg(source);
    compiler
}

/// Compiles a source into `program`, in the folder of the library.
fn compile(source: &Path, program: &Path, options: &[&str]) {
    let mut compiler = compiler(source);
    compiler
        .arg("-o")
        .arg(program)
        .arg("-L")
        .arg(program.parent().expect("a folder"))
        .args(["-lsempa_work", "-lm", "-Wl,-rpath,$ORIGIN"])
        .args(options);
    run_successfully(compiler, TIMEOUT).expect("the program compiles");
}

fn test_program(name: &str) -> PathBuf {
    repository_folder().join("tests/programs").join(name)
}

/// Returns the word after `name` in the output of a program.
fn word<'a>(result: &'a CommandResult, name: &str) -> &'a str {
    let line = result.stdout.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next())
    });
    line.flatten()
        .unwrap_or_else(|| panic!("no {name} in {result:?}"))
}

fn number(result: &CommandResult, name: &str) -> u64 {
    word(result, name).parse().expect("a number")
}

/// The headers compile alone as C11 and C++11, and a program uses all functions in one process.
#[test]
fn interface_works_in_one_process() {
    let folder = TempDir::new().expect("a folder");
    install_library(folder.path());
    for (name, text) in [
        (
            "c.c",
            "#include <sempa_work.h>\nint main(void) { return sempa_work_tid(); }\n",
        ),
        (
            "c.cc",
            "#include <sempa_work.h>\nint main() { return sempa_work_tid(); }\n",
        ),
        (
            "mw.cc",
            "#include <MW.h>\n#include <MWRMComm.h>\n#include <MWTask.h>\n#include <MWWorker.h>\n#include <MWDriver.h>\n#include <MWMap.h>\nint main() {}\n",
        ),
    ] {
        let source = folder.path().join(name);
        fs::write(&source, text).expect("a file");
        let mut compiler = compiler(&source);
        compiler.arg("-fsyntax-only");
        run_successfully(compiler, TIMEOUT).expect("the header compiles");
    }
    let program = folder.path().join("work_api");
    compile(&test_program("work_api.c"), &program, &[]);
    let result = run_successfully(Command::new(program), TIMEOUT).expect("the calls work");
    assert_eq!(result.stdout, "ok\n");
}

/// The programs with MW's classes work in one process; two orders of tasks have the same result.
#[test]
fn classes_work_in_one_process() {
    let folder = TempDir::new().expect("a folder");
    install_library(folder.path());
    let program = folder.path().join("work_mw");
    compile(&test_program("work_mw.cc"), &program, &[]);
    let api = folder.path().join("work_mw_api");
    compile(&test_program("work_mw_api.cc"), &api, &[]);
    let mut command = Command::new(&api);
    command.env("SEMPA_WORK_IN_PROCESS", "1");
    let result = run_successfully(command, TIMEOUT).expect("the classes work");
    assert_eq!(result.stdout, "ok\n");
    let mut greedy = Command::new(&api);
    greedy.arg("greedy").env("SEMPA_WORK_IN_PROCESS", "1");
    let result = run_to_end(greedy, TIMEOUT).expect("ends");
    assert!(!result.succeeded(), "{result:?}");
    assert!(result.stderr.contains("unpacked more"), "{result:?}");
    for mode in ["best", "depth"] {
        let mut command = Command::new(&program);
        command.args(["40", "0", mode]);
        command.env("SEMPA_WORK_IN_PROCESS", "1");
        let result = run_successfully(command, TIMEOUT).expect("succeeds");
        assert_eq!(word(&result, "best"), word(&result, "table"), "{result:?}");
        assert_eq!(word(&result, "results"), word(&result, "accepted"));
        assert_eq!(number(&result, "starts"), 1);
    }
    // The same numbers as a function of the workers, and as classes.
    for name in ["monte_carlo", "monte_carlo_mw"] {
        let example = folder.path().join(name);
        let source = repository_folder().join(format!("examples/cpp/{name}.cpp"));
        compile(&source, &example, &[]);
        let mut command = Command::new(example);
        command.arg("10").env("SEMPA_WORK_IN_PROCESS", "1");
        let result = run_successfully(command, TIMEOUT).expect("succeeds");
        assert_eq!(result.stdout, "pi is about 3.14080\n", "{name}");
    }
}

/// A virtual machine of two hosts, with programs in a folder that both share.
struct Programs<'a> {
    vm: Vm<'a>,
}

impl<'a> Programs<'a> {
    fn start(bed: &'a Testbed) -> Self {
        let vm = Vm::start(bed, VmSettings::default()).expect("a virtual machine");
        vm.add_hosts(&["h2"]).expect("it joins");
        install_library(&vm.user_home());
        Self { vm }
    }

    /// Compiles a program that also calls functions of libpvm3.
    fn compile_with_pvm(&self, source: &str, name: &str) -> PathBuf {
        let prefix = installed_prefix().expect("an installation");
        let headers = format!("-I{}", prefix.join("include").display());
        let libraries = format!("-L{}", prefix.join("lib").display());
        self.compile(source, name, &[&headers, &libraries, "-lpvm3"])
    }

    fn compile(&self, source: &str, name: &str, options: &[&str]) -> PathBuf {
        let program = self.vm.user_home().join(name);
        compile(&test_program(source), &program, options);
        program
    }

    fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = self.vm.user_command(self.vm.testbed().host(1), program);
        command.args(arguments);
        command
    }

    fn start_command(&self, command: Command) -> RunningCommand {
        RunningCommand::start(command, Stdio::null()).expect("starts")
    }

    fn result(&self, running: RunningCommand) -> CommandResult {
        let result = running.wait_or_kill(TIMEOUT).or_panic_with_logs(&self.vm);
        assert!(
            result.succeeded(),
            "{result:?}\n{}",
            self.vm.events_and_logs()
        );
        result
    }

    /// Kills a worker on h2 that has joined the run.
    fn kill_worker(&self, master: &RunningCommand, program: &Path) {
        wait_for(POLL_TIMEOUT, || {
            let output = master.stdout_so_far().map_err(|error| error.to_string())?;
            match output.contains("ready h2") {
                true => Ok(()),
                false => Err(output),
            }
        })
        .or_panic_with_logs(&self.vm);
        let pid = self.worker_on_h2(program);
        let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("the worker runs");
    }

    /// Waits for a worker on h2 and returns its process.
    fn worker_on_h2(&self, program: &Path) -> u32 {
        let program = program.display().to_string();
        wait_for(POLL_TIMEOUT, || {
            let processes = self.vm.testbed().host(2).processes();
            let mut workers = processes.iter().filter(|(_, line)| line.trim() == program);
            let worker = workers.next().map(|(pid, _)| *pid);
            worker.ok_or_else(|| format!("{processes:?}"))
        })
        .or_panic_with_logs(&self.vm)
    }

    /// Kills the master when the journal has grown by `bytes`.
    fn kill_after_progress(&self, mut master: RunningCommand, journal: &Path, bytes: u64) {
        let size_before = journal_size(journal);
        wait_for(POLL_TIMEOUT, || {
            if let Some(status) = master.poll_status().map_err(|error| error.to_string())? {
                panic!("the master ended before the kill: {status}");
            }
            match journal_size(journal) {
                size if size > size_before + bytes => Ok(()),
                size => Err(format!("{size} bytes in the journal")),
            }
        })
        .or_panic_with_logs(&self.vm);
        master.kill_children_and_wait().expect("killed");
    }
}

/// Size of all files of a journal in bytes.
fn journal_size(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some(entry.metadata().ok()?.len()))
        .sum()
}

/// A run in C counts each node once, although a worker is killed, and then the master twice.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn c_run_counts_each_node_once() {
    let bed = require_testbed(2);
    let programs = Programs::start(&bed);
    let program = programs.compile("work_count.c", "work_count", &[]);
    let sequential = run_to_end(programs.command(&program, &TREE), TIMEOUT);
    let nodes = number(&sequential.or_panic_with_logs(&programs.vm), "nodes");

    let arguments = [&TREE[..], &["killed-worker", "", "4"]].concat();
    let running = programs.start_command(programs.command(&program, &arguments));
    programs.kill_worker(&running, &program);
    let result = programs.result(running);
    assert_eq!(number(&result, "nodes"), nodes, "{result:?}");
    assert_eq!(number(&result, "finished"), 1);
    assert_eq!(number(&result, "workers_lost"), 1, "{result:?}");
    assert_eq!(number(&result, "lost_events"), 1);

    let journal = programs.vm.user_home().join("journal");
    let journal_text = journal.display().to_string();
    let arguments = [&TREE[..], &["killed-master", &journal_text, "4"]].concat();
    for _ in 0..2 {
        let running = programs.start_command(programs.command(&program, &arguments));
        programs.kill_after_progress(running, &journal, 8_000);
    }
    let running = programs.start_command(programs.command(&program, &arguments));
    let result = programs.result(running);
    assert_eq!(number(&result, "nodes"), nodes, "{result:?}");
    assert_eq!(number(&result, "masters"), 3);
    assert!(number(&result, "repeated") > 0, "{result:?}");
    assert_eq!(number(&result, "configured"), 1, "once for each master");
    assert!(!journal.exists(), "a finished run leaves no journal");
    programs.vm.halt_and_wait().expect("halts");
}

/// A run with MW's classes finds the optimum, although a worker and the master are killed. The
/// worker is a program of its own.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn ported_run_finds_the_optimum() {
    let bed = require_testbed(2);
    let programs = Programs::start(&bed);
    let master = programs.compile("work_mw.cc", "work_mw", &[]);
    let worker = programs.compile("work_mw.cc", "work_mw_worker", &["-DWORKER_ONLY"]);
    let worker_text = worker.display().to_string();
    for mode in ["best", "depth"] {
        let journal = programs.vm.user_home().join(mode);
        let arguments = [&KNAPSACK[..], &[mode, "4", &worker_text]].concat();
        let command = || {
            let mut command = programs.command(&master, &arguments);
            command.env("SEMPA_WORK_JOURNAL", &journal);
            command
        };
        let running = programs.start_command(command());
        programs.kill_worker(&running, &worker);
        programs.kill_after_progress(running, &journal, 3_000);
        let result = programs.result(programs.start_command(command()));
        assert_eq!(word(&result, "best"), word(&result, "table"), "{result:?}");
        assert_eq!(number(&result, "finished"), 1);
        // Each result is handled once, also over the restart.
        assert_eq!(
            word(&result, "results"),
            word(&result, "accepted"),
            "{result:?}"
        );
        assert!(!journal.exists(), "a finished run leaves no journal");
    }
    programs.vm.halt_and_wait().expect("halts");
}

/// A program may use this library and libpvm3: the process is two tasks. A worker must join its run
/// first.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn program_may_call_pvm_too() {
    let bed = require_testbed(2);
    let programs = Programs::start(&bed);
    let program = programs.compile_with_pvm("work_pvm.c", "work_pvm");
    let result = programs.result(programs.start_command(programs.command(&program, &[])));
    assert_eq!(result.stdout, "sum 210, same task 1, tid of the run 0\n");
    let mut late = programs.command(&program, &["late"]);
    late.env("SEMPA_WORK_RUN", "pvm");
    let result = programs.result(programs.start_command(late));
    assert!(
        result.stdout.starts_with("-10 ") && result.stdout.contains("sempa_work_worker first"),
        "{result:?}"
    );
    programs.vm.halt_and_wait().expect("halts");
}

/// A worker that is two tasks cannot migrate: the console says so, and the run continues.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn worker_with_two_tasks_stays() {
    let bed = require_testbed(2);
    let programs = Programs::start(&bed);
    let program = programs.compile_with_pvm("work_pvm.c", "work_pvm");
    let running = programs.start_command(programs.command(&program, &["300"]));
    programs.worker_on_h2(&program);
    let tasks = programs.vm.tasks().or_panic_with_logs(&programs.vm);
    // The tasks of libpvm3 are not spawned, so they have no name.
    let is_worker = |task: &&Task| task.host.as_deref() == Some("h2") && !task.name.is_empty();
    let worker = tasks.iter().find(is_worker).expect("a worker");
    let is_other = |task: &&Task| task.pid == worker.pid && task.host == worker.host;
    wait_for(POLL_TIMEOUT, || {
        let tasks = programs.vm.tasks().map_err(|error| error.to_string())?;
        match tasks.iter().filter(is_other).count() {
            2 => Ok(()),
            count => Err(format!("{count} tasks: {tasks:?}")),
        }
    })
    .or_panic_with_logs(&programs.vm);
    let refused = programs.vm.migrate(&worker.tid, "h1");
    let refused = refused.or_panic_with_logs(&programs.vm);
    assert!(
        refused
            .stderr
            .contains("it has a process that is a task of its own"),
        "{refused:?}"
    );
    let result = programs.result(running);
    assert_eq!(result.stdout, "sum 210, same task 1, tid of the run 0\n");
    programs.vm.halt_and_wait().expect("halts");
}
