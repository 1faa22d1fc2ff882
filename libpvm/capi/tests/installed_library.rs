//! The optimized `libpvm3` that users install: its exported names, and the instructions that the
//! calls of the message path execute. Counts do not depend on the speed or load of the machine.

mod common;

use common::vm::{RunningProgram, Vm};
use common::{Program, include_dir};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Number of round trips that `counted.c` measures.
const ROUND_TRIPS: u64 = 1000;

/// Maximum number of instructions of each call: what was measured, and about 3 %. The goal is 1,000
/// for all calls together. Lower a limit when the count falls.
const INSTRUCTION_LIMITS: [(&str, u64); 5] = [
    ("pvm_initsend", 144),
    ("pvm_pkint", 172),
    ("pvm_send", 757),
    ("pvm_recv", 1034),
    ("pvm_upkint", 177),
];

/// Maximum number of locked operations and full fences of each call, in the order of `counted.c`.
/// The goal is 3 for all calls together. Lower a limit when the count falls. While a program is
/// executed one instruction at a time, a thread of the library takes the lock of the state away
/// from the program again and again, so that this lock is an ordinary mutex here: 2 of a send and 2
/// of a receive.
const LOCKED_OPERATION_LIMITS: [(&str, u64); 5] = [
    ("pvm_initsend", 0),
    ("pvm_pkint", 0),
    ("pvm_send", 4),
    ("pvm_recv", 3),
    ("pvm_upkint", 0),
];

/// Numbers of unreceived messages in front of those that are received.
const FRONT_MESSAGE_COUNTS: [u32; 2] = [50, 5000];
/// Number of round trips that `spaced.c` measures.
const SPACED_ROUND_TRIPS: u64 = 200;
/// Maximum number of system calls of each task in 100 spaced round trips. A task must sleep and
/// must wake its peer; the rest are timers and retries of waiting awake.
const SPACED_SYSTEM_CALLS_MAX: u64 = 230;

/// Maximum of additional instructions of a receive for any number of messages in front, in percent.
/// The number of instructions of a wait varies by several percent on a loaded machine. A scan of 50
/// messages would add more than half.
const FRONT_PERCENT_MAX: u64 = 20;

/// Returns the path of the optimized library.
fn optimized_library(file_name: &str) -> PathBuf {
    let test_program = std::env::current_exe().expect("a test has a path");
    test_program
        .ancestors()
        .map(|folder| folder.join("release-library").join(file_name))
        .find(|path| path.is_file())
        .unwrap_or_else(|| {
            panic!(
                "cannot run here: {file_name} is missing: cargo xtask test installed_library \
                 builds it"
            )
        })
}

/// Returns a folder that contains the optimized library under the name that programs load.
fn library_folder() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    symlink(
        optimized_library("libpvm3.so"),
        folder.path().join("libpvm3.so.3"),
    )
    .expect("a link");
    folder
}

/// Returns a command that runs a program with arguments as a task of the master's host, with the
/// optimized library. `starter` is a program with its arguments that starts the task.
fn task_command(
    (vm, library_folder): (&Vm, &TempDir),
    starter: &[&OsStr],
    program: &Program,
    arguments: &[&OsStr],
) -> Command {
    let task_command = vm.command_on("master", program);
    let mut words = starter.iter().copied().chain([program.path().as_os_str()]);
    let mut command = Command::new(words.next().expect("a program"));
    command.args(words).args(arguments);
    for (name, value) in task_command.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.env("LD_LIBRARY_PATH", library_folder.path());
    command
}

/// Runs the two tasks of `counted.c`. The asking task has the role `role` and is started by
/// `starter`, a program with its arguments. Returns the output of the asking task.
fn run_counted_tasks(starter: &[&OsStr], role: &str, front_message_count: u32) -> String {
    let (vm, program) = (Vm::start(), Program::compile("counted", &include_dir()));
    let (library_folder, folder) = (library_folder(), TempDir::new().expect("a folder"));
    let (answers_path, front_message_count) = (
        folder.path().join("answers"),
        front_message_count.to_string(),
    );
    let start = |starter: &[&OsStr], role: &str| {
        let arguments = [
            role.as_ref(),
            answers_path.as_os_str(),
            front_message_count.as_ref(),
        ];
        let command = task_command((&vm, &library_folder), starter, &program, &arguments);
        RunningProgram::start(command)
    };
    let answering_task = start(&[], "answer");
    let output = start(starter, role).wait_for_success();
    answering_task.wait_for_success();
    output
}

/// Returns the instructions of each call in the function `measured` of `counted.c`, as the average
/// of all calls.
fn count_instructions(front_message_count: u32) -> BTreeMap<String, u64> {
    let folder = TempDir::new().expect("a folder");
    let counts_path = folder.path().join("counts");
    let output_option = format!("--callgrind-out-file={}", counts_path.display());
    let starter = ["valgrind", "--tool=callgrind", &output_option].map(OsStr::new);
    run_counted_tasks(&starter, "ask", front_message_count);
    let counts = std::fs::read_to_string(counts_path).expect("callgrind writes it");
    average_costs(&counts, "measured")
}

/// Returns the average inclusive cost of each function that `caller` calls, from the text of a file
/// of callgrind.
fn average_costs(text: &str, caller: &str) -> BTreeMap<String, u64> {
    // A function's name stands only where its number appears for the first time.
    let mut names: BTreeMap<&str, &str> = BTreeMap::new();
    let (mut function, mut callee) = ("", "");
    let mut totals: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some((role @ ("fn" | "cfn"), value)) = line.split_once('=') {
            let (number, name) = value.split_once(' ').unwrap_or((value, ""));
            if !name.is_empty() {
                names.insert(number, name);
            }
            let name = names[number];
            if role == "fn" {
                function = name;
            } else {
                callee = name;
            }
        } else if let Some(call) = line.strip_prefix("calls=") {
            let number = |text: Option<&str>| -> u64 {
                text.and_then(|text| text.parse().ok())
                    .unwrap_or_else(|| panic!("{line} is not followed by a cost"))
            };
            let call_count = number(call.split(' ').next());
            let cost = number(lines.next().and_then(|line| line.split(' ').nth(1)));
            if function == caller {
                let total = totals.entry(callee).or_default();
                *total = (total.0 + call_count, total.1 + cost);
            }
        }
    }
    totals
        .into_iter()
        .filter(|(_, (call_count, _))| *call_count == ROUND_TRIPS)
        .map(|(name, (call_count, cost))| (name.to_string(), cost / call_count))
        .collect()
}

#[test]
#[ignore = "system tier: needs gcc and valgrind"]
fn installed_library_executes_few_instructions() {
    let counts = count_instructions(0);
    println!("{counts:?}");
    let over_limit: Vec<(&str, u64, u64)> = INSTRUCTION_LIMITS
        .iter()
        .map(|(name, limit)| (*name, counts[*name], *limit))
        .filter(|(_, count, limit)| count > limit)
        .collect();
    assert!(
        over_limit.is_empty(),
        "calls with their counts and limits: {over_limit:?}"
    );
}

/// The counts are exact: `locks.c` executes the calls one instruction at a time.
#[test]
#[ignore = "system tier: needs gcc"]
fn installed_library_executes_few_locked_operations() {
    let tracer = Program::compile("locks", &include_dir());
    let output = run_counted_tasks(&[tracer.path().as_os_str()], "step", 0);
    println!("{output}");
    let sections: Vec<&str> = output
        .lines()
        .filter(|line| line.starts_with("section "))
        .collect();
    assert_eq!(sections.len(), LOCKED_OPERATION_LIMITS.len(), "{output}");
    for (section, (name, limit)) in sections.into_iter().zip(LOCKED_OPERATION_LIMITS) {
        let numbers: Vec<u64> = section
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|word| word.parse().ok())
            .collect();
        let [_, call_count, _, locked_count] = numbers[..] else {
            panic!("four numbers, not {section}");
        };
        assert!(
            call_count > 0 && locked_count <= limit * call_count,
            "{name}: {section}, but the limit of each is {limit}"
        );
    }
}

/// A task that gets a message now and then makes two system calls for each: it sleeps until the
/// message arrives, and wakes the peer that sleeps until the answer arrives.
#[test]
#[ignore = "system tier: needs gcc"]
fn spaced_round_trips_make_few_system_calls() {
    let (vm, program) = (Vm::start(), Program::compile("spaced", &include_dir()));
    let (library_folder, tracer) = (
        library_folder(),
        Program::compile("system_calls", &include_dir()),
    );
    let tasks = ["answer", "ask"].map(|role| {
        let starter = [tracer.path().as_os_str()];
        let context = (&vm, &library_folder);
        RunningProgram::start(task_command(context, &starter, &program, &[role.as_ref()]))
    });
    for output in tasks.map(RunningProgram::wait_for_success) {
        println!("{output}");
        let total = output.lines().find_map(|line| line.strip_prefix("total "));
        let total: u64 = total
            .and_then(|total| total.parse().ok())
            .unwrap_or_else(|| panic!("no total in:\n{output}"));
        assert!(
            total > 0 && total * 100 <= SPACED_ROUND_TRIPS * SPACED_SYSTEM_CALLS_MAX,
            "{SPACED_ROUND_TRIPS} round trips:\n{output}"
        );
    }
}

#[test]
#[ignore = "system tier: needs gcc and valgrind"]
fn installed_library_skips_unreceived_messages_at_no_cost() {
    let receive_cost = |front_message_count| count_instructions(front_message_count)["pvm_recv"];
    let cost = receive_cost(0);
    for front_message_count in FRONT_MESSAGE_COUNTS {
        let cost_behind = receive_cost(front_message_count);
        println!("{front_message_count} messages in front: {cost_behind} instead of {cost}");
        assert!(
            cost_behind * 100 <= cost * (100 + FRONT_PERCENT_MAX),
            "{front_message_count} messages in front: {cost_behind} instead of {cost}"
        );
    }
}

/// Returns what a tool of binutils prints about a file.
fn inspect(tool: &str, options: &[&str], path: &Path) -> String {
    let output = Command::new(tool)
        .args(options)
        .arg(path)
        .output()
        .expect("binutils");
    assert!(output.status.success(), "{tool} {}", path.display());
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Optimization removes no name, and no other library is needed. Other tests examine the library of
/// the test build.
#[test]
#[ignore = "system tier: needs gcc"]
fn installed_library_is_complete() {
    let names = |path: &Path| -> Vec<String> {
        let list = inspect("nm", &["-D", "--defined-only"], path);
        let mut names: Vec<String> = list
            .lines()
            .filter_map(|line| line.split_whitespace().nth(2).map(str::to_string))
            .collect();
        names.sort();
        names
    };
    let shared_library = optimized_library("libpvm3.so");
    assert_eq!(names(&shared_library), names(&common::built_library()));
    let dependencies = |path: &Path| -> Vec<String> {
        let section = inspect("readelf", &["-d", "-W"], path);
        let is_dependency = |line: &&str| {
            ["(NEEDED)", "(SONAME)"]
                .iter()
                .any(|kind| line.contains(kind))
        };
        section
            .lines()
            .filter(is_dependency)
            .filter_map(|line| line.split_once('[').map(|(_, name)| name.to_string()))
            .collect()
    };
    assert_eq!(
        dependencies(&shared_library),
        dependencies(&common::built_library())
    );
    let folder = TempDir::new().expect("a folder");
    let program = folder.path().join("offline");
    common::compile_and_link(
        &common::source_path("offline"),
        &include_dir(),
        &["-Wno-stringop-overread"],
        &optimized_library("libpvm3.a"),
        &program,
    );
    let mut command = Command::new(program);
    command
        .env("PVM_TMP", folder.path())
        .env("PVM_ALLOW_ROOT", "1")
        .env_remove("PVMSOCK")
        .env_remove("PVM_VMID");
    common::assert_success(&command.output().expect("runs"));
}
