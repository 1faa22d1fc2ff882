//! Installs the Python package in a fresh virtual environment, and runs Python programs as tasks.
//!
//! With `SEMPA_TEST_FULL` the tests build and install the wheel. Otherwise they install the native
//! module of the workspace's build and the Python files, because the wheel compiles all crates once
//! more.

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use procfs::process::{ProcState, Process};
use sempa_tests::faults::tests_all_cases;
use sempa_tests::programs::compile_into;
use sempa_tests::requirements::{
    build_folder, find_in_path, installed_prefix, panic_if_unmet, require_program, require_testbed,
};
use sempa_tests::run::{RunningCommand, run_successfully, run_to_end};
use sempa_tests::vm::VmSettings;
use sempa_tests::{CommandResult, Vm, wait_for};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time limit for the build of the wheel, with all crates, on a loaded machine.
const BUILD_TIMEOUT: Duration = Duration::from_secs(1200);
/// Time limit for the installation of packages from the Python index.
const INSTALL_TIMEOUT: Duration = Duration::from_secs(300);
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(180);
/// Programs in Python, by their path in the project.
const PROGRAMS: [&str; 13] = [
    "examples/python/monte_carlo.py",
    "tests/programs/py_asyncio.py",
    "tests/programs/py_broker.py",
    "tests/programs/py_content.py",
    "tests/programs/py_counter.py",
    "tests/programs/py_ring.py",
    "tests/programs/py_services.py",
    "tests/programs/py_waits.py",
    "tests/programs/py_work.py",
    "tests/programs/py_work_journal.py",
    "tests/programs/py_work_speed.py",
    "python/examples/speed.py",
    "python/examples/sums.py",
];
/// Exit status of a program that comes after the end of its session.
const EXIT_OVER: i32 = 79;
/// First line of the example with ten tasks.
const PI_LINE: &str = "pi is about 3.14245\n";
/// Oldest version of Python that has the buffer protocol in its stable ABI.
const VERSION_CHECK: &str =
    "import sys; assert sys.version_info >= (3, 11), sys.version; print(sys.executable)";

/// What the tests install.
enum PackageSource {
    Wheel(PathBuf),
    /// The native module of the workspace's build.
    NativeModule(PathBuf),
}

/// The package, and the folder in which the tests keep what they need to build it.
struct WheelBuild {
    source: PackageSource,
    interpreter: PathBuf,
    folder: PathBuf,
    /// Tests run in processes of their own; this lock lets one of them build.
    _lock: Flock<File>,
}

impl WheelBuild {
    /// Builds the wheel with maturin from PATH, or else from the Python index, if all tests run.
    ///
    /// # Panics
    /// Python is too old, maturin cannot be installed, or the build fails.
    fn make() -> Self {
        let folder = build_folder().expect("a folder").join("python-wheel");
        fs::create_dir_all(&folder).expect("a folder");
        let lock_file = File::create(folder.join("lock")).expect("a file");
        let lock = Flock::lock(lock_file, FlockArg::LockExclusive)
            .map_err(|(_, errno)| errno)
            .expect("the lock");
        let interpreter = require_python();
        let tools = make_tools(&interpreter, &folder);
        let source = if tests_all_cases() {
            PackageSource::Wheel(build_wheel(&interpreter, &tools, &folder))
        } else {
            let module = build_folder().expect("a folder").join("libsempa_pvm.so");
            let missing = "libsempa_pvm.so is not built: run cargo build -p sempa-pvm-python";
            panic_if_unmet((!module.exists()).then(|| missing.to_string()));
            PackageSource::NativeModule(module)
        };
        Self {
            source,
            interpreter,
            folder,
            _lock: lock,
        }
    }

    /// Makes a virtual environment with the package. Returns its interpreter.
    fn install_into(&self, environment: &Path) -> PathBuf {
        let mut venv = Command::new(&self.interpreter);
        venv.args(["-m", "venv", "--without-pip"]).arg(environment);
        run_successfully(venv, INSTALL_TIMEOUT).expect("a virtual environment");
        let interpreter = environment.join("bin/python");
        match &self.source {
            PackageSource::Wheel(wheel) => {
                let mut pip = self.pip(&interpreter);
                pip.args(["--no-index", "--no-deps"]).arg(wheel);
                run_successfully(pip, INSTALL_TIMEOUT).expect("the wheel is installed");
            }
            PackageSource::NativeModule(module) => copy_package(&interpreter, module),
        }
        interpreter
    }

    /// Installs a package from the Python index. Returns the reason if this is impossible.
    fn install_package(&self, interpreter: &Path, package: &str) -> Result<(), String> {
        let mut pip = self.pip(interpreter);
        pip.arg(package);
        run_successfully(pip, INSTALL_TIMEOUT)
            .map(drop)
            .map_err(|error| format!("{package} cannot be installed: {error:#}"))
    }

    /// Returns the command that installs packages for another interpreter.
    fn pip(&self, interpreter: &Path) -> Command {
        let mut pip = Command::new(self.folder.join("tools/bin/pip"));
        pip.arg("--python").arg(interpreter);
        pip.args(["install", "--quiet", "--disable-pip-version-check"]);
        pip
    }
}

/// Copies the Python files and the native module to the folder from which `interpreter` imports.
fn copy_package(interpreter: &Path, module: &Path) {
    let mut python = Command::new(interpreter);
    python.args([
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
    ]);
    let output = run_successfully(python, PROGRAM_TIMEOUT).expect("a folder for packages");
    let package = Path::new(output.stdout.trim()).join("sempa_pvm");
    fs::create_dir_all(&package).expect("a folder");
    for entry in fs::read_dir(project_file("python/python/sempa_pvm")).expect("the files") {
        let path = entry.expect("an entry").path();
        if path.is_file() {
            fs::copy(&path, package.join(path.file_name().expect("a name"))).expect("a copy");
        }
    }
    fs::copy(module, package.join("_native.abi3.so")).expect("a copy");
}

/// Builds the wheel and returns its path.
fn build_wheel(interpreter: &Path, tools: &Path, folder: &Path) -> PathBuf {
    let maturin = find_in_path("maturin").unwrap_or_else(|| {
        require_package(tools, "maturin");
        tools.join("bin/maturin")
    });
    let wheels = folder.join("wheels");
    // An older wheel could be installed in place of the new one.
    let _ = fs::remove_dir_all(&wheels);
    let mut build = Command::new(maturin);
    build
        .current_dir(project_file("python"))
        .env_remove("CARGO_TARGET_DIR")
        .args(["build", "--profile", "ci", "--interpreter"])
        .arg(interpreter)
        .arg("--target-dir")
        .arg(folder.join("target"))
        .arg("--out")
        .arg(&wheels);
    run_successfully(build, BUILD_TIMEOUT).expect("the wheel is built");
    fs::read_dir(&wheels)
        .expect("a folder")
        .find_map(|entry| {
            let path = entry.expect("an entry").path();
            (path.extension()? == "whl").then_some(path)
        })
        .expect("a wheel")
}

/// Returns the path of Python.
///
/// # Panics
/// The machine has no Python, or it is too old.
fn require_python() -> PathBuf {
    require_program("python3", "python3");
    let mut python = Command::new("python3");
    python.args(["-c", VERSION_CHECK]);
    let output = run_to_end(python, PROGRAM_TIMEOUT).expect("it ends");
    let reason = format!("python3 is older than 3.11: {}", output.stderr);
    panic_if_unmet((!output.succeeded()).then_some(reason));
    PathBuf::from(output.stdout.trim())
}

/// Makes the virtual environment with pip, unless it exists. Returns its folder.
fn make_tools(interpreter: &Path, folder: &Path) -> PathBuf {
    let tools = folder.join("tools");
    if !tools.join("bin/pip").exists() {
        let mut venv = Command::new(interpreter);
        venv.args(["-m", "venv", "--clear"]).arg(&tools);
        let failure = run_successfully(venv, INSTALL_TIMEOUT).err();
        panic_if_unmet(failure.map(|error| format!("install python3-venv: {error:#}")));
    }
    tools
}

/// Requires a package in the environment of the tools.
fn require_package(tools: &Path, package: &str) {
    if tools.join("bin").join(package).exists() {
        return;
    }
    let mut pip = Command::new(tools.join("bin/pip"));
    pip.args(["install", "--quiet", "--disable-pip-version-check", package]);
    let failure = run_successfully(pip, INSTALL_TIMEOUT).err();
    panic_if_unmet(failure.map(|error| format!("{package} cannot be installed: {error:#}")));
}

/// Returns the absolute path of a file of the project.
fn project_file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A virtual machine whose hosts have the Python package.
struct PythonHosts<'a> {
    vm: Vm<'a>,
    build: WheelBuild,
    interpreter: PathBuf,
}

impl PythonHosts<'_> {
    fn script(&self, name: &str) -> PathBuf {
        self.vm.testbed().folder().join("scripts").join(name)
    }

    fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let host = self.vm.testbed().host(1);
        let mut command = self.vm.user_command(host, &self.interpreter);
        command.arg(self.script(name)).args(arguments);
        command
    }

    /// Asserts that a program on h1 succeeds and prints exactly `text`.
    fn check_output(&self, name: &str, arguments: &[&str], text: &str) {
        let output = run_to_end(self.command(name, arguments), PROGRAM_TIMEOUT)
            .unwrap_or_else(|error| panic!("{error:#}\n{}", self.vm.events_and_logs()));
        assert!(
            output.succeeded() && output.stdout == text,
            "{name}: {}\n{}\n{}\n{}",
            output.status,
            output.stdout,
            output.stderr,
            self.vm.events_and_logs()
        );
    }
}

fn with_python_hosts(host_count: usize, test: impl FnOnce(&PythonHosts)) {
    let build = WheelBuild::make();
    let bed = require_testbed(host_count);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    if host_count > 1 {
        vm.add_hosts(&["h2"]).expect("it joins");
    }
    let scripts = bed.folder().join("scripts");
    fs::create_dir_all(&scripts).expect("a folder");
    for program in PROGRAMS {
        let source = project_file(program);
        let name = source.file_name().expect("a name");
        fs::copy(&source, scripts.join(name)).expect("a copy");
    }
    let interpreter = build.install_into(&bed.folder().join("venv"));
    let hosts = PythonHosts {
        vm,
        build,
        interpreter,
    };
    test(&hosts);
    hosts.vm.halt_and_wait().expect("halts");
}

/// Returns the process of a command that runs in a host, where the command's own process is
/// `nsenter`.
fn program_process(command: &RunningCommand) -> Result<Process, String> {
    let process_of = |pid: i32| Process::new(pid).map_err(|error| error.to_string());
    let parent = process_of(command.process_id().cast_signed())?;
    let children = parent
        .task_main_thread()
        .and_then(|thread| thread.children())
        .map_err(|error| error.to_string())?;
    let child = children.first().ok_or("no child process")?;
    process_of(child.cast_signed())
}

/// Bytes, arrays, numpy arrays, pickled objects and PVM items arrive unchanged; damaged contents
/// raise exceptions.
#[test]
#[ignore = "system tier: needs root, hosts and maturin"]
fn contents_arrive_unchanged() {
    with_python_hosts(1, |hosts| {
        let numpy = hosts.build.install_package(&hosts.interpreter, "numpy");
        let arguments: &[&str] = match &numpy {
            Ok(()) => &["numpy"],
            Err(reason) => {
                eprintln!("numpy arrays are not tested: {reason}");
                &[]
            }
        };
        hosts.check_output("py_content.py", arguments, "contents are right\n");
    });
}

/// Python tasks on two hosts and a task in C between them understand each other's PVM items.
#[test]
#[ignore = "system tier: needs root, hosts, gcc and maturin"]
fn ring_of_python_tasks_includes_task_in_c() {
    require_program("gcc", "gcc");
    with_python_hosts(2, |hosts| {
        hosts
            .vm
            .compile_program("py_ring_link")
            .expect("it compiles");
        hosts.check_output(
            "py_ring.py",
            &["200"],
            "the tökén is 1000 and weighs 1.0 after 200 rounds of 5 tasks\n",
        );
    });
}

/// The example of the documentation computes its result on two hosts.
#[test]
#[ignore = "system tier: needs root, hosts and maturin"]
fn example_of_documentation_computes_its_result() {
    with_python_hosts(2, |hosts| {
        let expected_output = "the sum of 1000 squares is 332833500\n";
        hosts.check_output("sums.py", &["1000"], expected_output);
    });
}

/// Groups, mailbox, tables, spawns, timeouts, signals, notices, events and changes of hosts.
#[test]
#[ignore = "system tier: needs root, hosts and maturin"]
fn services_of_virtual_machine_are_available() {
    with_python_hosts(2, |hosts| {
        hosts.check_output("py_services.py", &[], "services are right\n");
    });
}

/// Coroutines wait for messages, notices and events; a cancelled coroutine loses nothing.
#[test]
#[ignore = "system tier: needs root, hosts and maturin"]
fn coroutines_wait_for_messages() {
    with_python_hosts(1, |hosts| {
        hosts.check_output("py_asyncio.py", &[], "coroutines are right\n");
    });
}

/// SIGINT raises `KeyboardInterrupt` in every call that waits, and the task can be used
/// afterwards.
#[test]
#[ignore = "system tier: needs root, hosts and maturin"]
fn keyboard_interrupts_end_waits() {
    with_python_hosts(1, |hosts| {
        for way in [
            "recv", "notices", "barrier", "mailbox", "events", "asyncio", "work",
        ] {
            let command = hosts.command("py_waits.py", &[way]);
            let running = RunningCommand::start(command, Stdio::null()).expect("it starts");
            let process = wait_for(PROGRAM_TIMEOUT, || {
                let output = running.stdout_so_far().map_err(|error| error.to_string())?;
                let process = program_process(&running)?;
                let state = process.stat().and_then(|stat| stat.state());
                match state {
                    Ok(ProcState::Sleeping) if output.starts_with("waiting") => Ok(process),
                    other => Err(format!("{way}: {other:?}, {output}")),
                }
            });
            let process = process.expect("it waits");
            kill(Pid::from_raw(process.pid()), Signal::SIGINT).expect("a signal");
            let output = running.wait_or_kill(PROGRAM_TIMEOUT).expect("it ends");
            assert!(
                output.succeeded() && output.stdout.ends_with("waits for tag 2\n"),
                "{way}: {output:?}"
            );
        }
    });
}

/// A Python task with an event loop and a received array migrates to another host and back. It goes
/// on with its state, its process id and its received memory.
#[test]
#[ignore = "system tier: needs root, hosts, CRIU and maturin"]
fn migrated_python_task_goes_on() {
    with_python_hosts(2, |hosts| {
        hosts.check_output("py_counter.py", &[], "the counter went on\n");
    });
}

/// Functions, drivers, workers and coroutines work in one process.
#[test]
fn work_is_right_in_one_process() {
    let build = WheelBuild::make();
    let folder = tempfile::tempdir().expect("a folder");
    let interpreter = build.install_into(&folder.path().join("venv"));
    let run_in_process = |script: &str, arguments: &[&str]| {
        let mut program = Command::new(&interpreter);
        program
            .arg(project_file(script))
            .args(arguments)
            .env("SEMPA_WORK_IN_PROCESS", "1");
        run_successfully(program, PROGRAM_TIMEOUT)
            .expect("it succeeds")
            .stdout
    };
    let output = run_in_process("tests/programs/py_work.py", &[]);
    assert_eq!(output, "work is right\n");
    let output = run_in_process("examples/python/monte_carlo.py", &["10"]);
    assert!(output.starts_with(PI_LINE), "{output}");
    assert!(output.contains("10 tasks in 10 attempts"), "{output}");
}

/// Functions, drivers, workers, coroutines and numpy arrays, on two hosts.
#[test]
#[ignore = "system tier: needs root, hosts and maturin"]
fn work_is_right_on_hosts() {
    with_python_hosts(2, |hosts| {
        let arguments: &[&str] = match hosts.build.install_package(&hosts.interpreter, "numpy") {
            Ok(()) => &["numpy"],
            Err(reason) => {
                eprintln!("numpy arrays are not tested: {reason}");
                &[]
            }
        };
        hosts.check_output("py_work.py", arguments, "work is right\n");
        let output = run_to_end(hosts.command("monte_carlo.py", &["10"]), PROGRAM_TIMEOUT);
        let output = output.expect("it ends");
        assert!(
            output.succeeded() && output.stdout.starts_with(PI_LINE),
            "{output:?}"
        );
    });
}

/// A master that was killed continues from its journal with all results, and with its workers.
#[test]
#[ignore = "system tier: needs root, hosts and maturin"]
fn killed_master_in_python_continues() {
    with_python_hosts(2, |hosts| {
        for way in ["class", "function"] {
            let journal = hosts.vm.testbed().folder().join(format!("journal-{way}"));
            let arguments = [way, journal.to_str().expect("a path")];
            let command = hosts.command("py_work_journal.py", &arguments);
            let running = RunningCommand::start(command, Stdio::null()).expect("it starts");
            let process = wait_for(PROGRAM_TIMEOUT, || {
                let output = running.stdout_so_far().map_err(|error| error.to_string())?;
                match output.lines().count() >= 20 {
                    true => program_process(&running),
                    false => Err(output),
                }
            });
            let process = process.expect("it has results");
            kill(Pid::from_raw(process.pid()), Signal::SIGKILL).expect("a signal");
            let killed = running.wait_or_kill(PROGRAM_TIMEOUT).expect("it ends");
            assert!(!killed.stdout.contains("sum"), "{way}: {killed:?}");
            let command = hosts.command("py_work_journal.py", &arguments);
            let output = run_to_end(command, PROGRAM_TIMEOUT)
                .unwrap_or_else(|error| panic!("{error:#}\n{}", hosts.vm.events_and_logs()));
            assert!(
                output.succeeded()
                    && output
                        .stdout
                        .ends_with("sum 8955050 masters 2 workers True\n"),
                "{way}: {output:?}\n{}",
                hosts.vm.events_and_logs()
            );
        }
    });
}

/// A foreman gives tasks to workers of which one leaves and one is killed. Programs that come after
/// the end of the session have their own exit status.
#[test]
#[ignore = "system tier: needs root, hosts and maturin"]
fn broker_session_has_members_that_come_and_go() {
    let broker = build_folder().expect("a folder").join("pvm-broker");
    let missing = "pvm-broker is not built: run cargo build -p pvm-broker".to_string();
    panic_if_unmet((!broker.exists()).then_some(missing));
    with_python_hosts(2, |hosts| {
        let folder = hosts.vm.user_home().join("pvm3/bin/LINUX64");
        fs::create_dir_all(&folder).expect("a folder");
        fs::copy(&broker, folder.join("pvm-broker")).expect("a copy");
        hosts.check_output("py_broker.py", &[], "the session is right\n");
        let late = run_to_end(hosts.command("py_broker.py", &["leave"]), PROGRAM_TIMEOUT);
        let late = late.expect("it ends");
        assert_eq!(late.status.code(), Some(EXIT_OVER), "{late:?}");
        let sentence = "py_broker.py: the session py-squares is over: a foreman has ended it";
        assert!(late.stderr.starts_with(sentence), "{late:?}");
    });
}

/// Prints how many tasks without work a run of two workers finishes in a second.
#[test]
#[ignore = "system tier: needs root, hosts and maturin"]
fn tasks_without_work_are_finished() {
    with_python_hosts(2, |hosts| {
        let command = hosts.command("py_work_speed.py", &["100000"]);
        let output = run_to_end(command, PROGRAM_TIMEOUT).expect("it ends");
        assert!(output.succeeded(), "{output:?}");
        assert!(output.stdout.contains("100000 tasks in"), "{output:?}");
        println!("{}", output.stdout);
    });
}

/// Without a virtual machine, a program in Python prints the sentence that a program in C prints.
#[test]
#[ignore = "system tier: needs gcc and maturin"]
fn python_and_c_print_one_sentence_without_virtual_machine() {
    require_program("gcc", "gcc");
    let build = WheelBuild::make();
    let folder = tempfile::tempdir().expect("a folder");
    let interpreter = build.install_into(&folder.path().join("venv"));
    let prefix = installed_prefix().expect("installed programs");
    let c_program = compile_into("careless", &prefix, folder.path()).expect("it compiles");
    let run_without_vm = |mut command: Command| -> CommandResult {
        command
            .env_clear()
            .env("HOME", folder.path())
            .env("PVM_TMP", folder.path())
            .env("PVM_ALLOW_ROOT", "1")
            .env("LD_LIBRARY_PATH", prefix.join("lib"));
        run_to_end(command, PROGRAM_TIMEOUT).expect("it ends")
    };
    let c_text = run_without_vm(Command::new(c_program)).stderr;
    let first_line = c_text.lines().next().unwrap_or_default();
    let (_, sentence) = first_line
        .split_once("] ")
        .expect("a sentence of the library");
    let mut program = Command::new(&interpreter);
    program
        .arg(project_file("tests/programs/py_waits.py"))
        .arg("recv");
    let output = run_without_vm(program);
    assert_eq!(output.stderr, format!("py_waits.py: {sentence}\n"));
    assert_eq!(output.status.code(), Some(1));
    // Without `run`, the program gets an exception with the same sentence.
    let mut program = Command::new(&interpreter);
    program.args(["-c", "import sempa_pvm; sempa_pvm.Vm.enroll()"]);
    let output = run_without_vm(program);
    let expected_line = format!("sempa_pvm.NotEnrolledError: {sentence}");
    assert_eq!(output.stderr.lines().last(), Some(expected_line.as_str()));
}

/// The type stubs describe the native module, and mypy accepts the package and programs that use
/// it.
#[test]
#[ignore = "system tier: needs maturin and mypy"]
fn type_stubs_match_native_module() {
    let build = WheelBuild::make();
    let folder = tempfile::tempdir().expect("a folder");
    let environment = folder.path().join("venv");
    let interpreter = build.install_into(&environment);
    panic_if_unmet(build.install_package(&interpreter, "mypy").err());
    let run_tool = |arguments: &[&str]| {
        let mut tool = Command::new(&interpreter);
        tool.current_dir(folder.path()).args(arguments);
        run_successfully(tool, INSTALL_TIMEOUT).expect("no findings")
    };
    run_tool(&["-m", "mypy.stubtest", "sempa_pvm"]);
    run_tool(&["-m", "mypy", "--strict", "-p", "sempa_pvm"]);
    let programs: Vec<String> = PROGRAMS
        .iter()
        .map(|program| project_file(program).display().to_string())
        .collect();
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    let options = [
        "-m",
        "mypy",
        "--check-untyped-defs",
        "--ignore-missing-imports",
    ];
    run_tool(&[&options[..], &programs].concat());
}
