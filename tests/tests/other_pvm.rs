//! Libraries and daemons of another PVM, and libraries that are missing on one host: the user
//! learns what was loaded or started, and what to do.

use sempa_proto::event::EventKind;
use sempa_tests::requirements::{require_program, require_testbed};
use sempa_tests::run::{run_successfully, run_to_end};
use sempa_tests::vm::{EventEntry, OrPanicWithLogs, VmSettings};
use sempa_tests::{Testbed, Vm};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(90);
/// Debian's library, of the package libpvm3, and its daemon, of the package pvm.
const DEBIAN_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libpvm3.so.3";
const DEBIAN_DAEMON: &str = "/usr/bin/pvmd";
/// A folder that the hosts do not share.
const PRIVATE_FOLDER: &str = "/tmp/private";

fn start_vm<'a>(bed: &'a Testbed, settings: VmSettings) -> Vm<'a> {
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    vm
}

/// Returns the start script of `tests/programs`, copied to a folder that all hosts share.
fn start_script(vm: &Vm) -> String {
    let script = vm.user_home().join("launch.sh");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/launch.sh");
    fs::copy(source, &script).expect("a copy");
    script.display().to_string()
}

fn foreign_library_events(vm: &Vm) -> Vec<EventEntry> {
    let events = vm.events().or_panic_with_logs(vm);
    let is_foreign = |entry: &EventEntry| matches!(entry.kind, EventKind::ForeignLibrary { .. });
    events.into_iter().filter(is_foreign).collect()
}

/// A start script makes a program load Debian's library. The program succeeds without being a
/// task. Its spawner and the event log learn of it, once for each task, and the remedy that they
/// name works.
fn check_start_script(settings: VmSettings) {
    require_program(DEBIAN_LIBRARY, "libpvm3");
    let bed = require_testbed(2);
    let vm = start_vm(&bed, settings);
    let program = vm.compile_program("careless").expect("it compiles");
    let (script, program) = (start_script(&vm), program.display().to_string());
    let output = vm
        .run_pvm(&["spawn", "->", "-h2", &script, &program])
        .or_panic_with_logs(&vm);
    assert!(output.stdout.contains("alone"), "{output:?}");
    let report = output
        .stdout
        .lines()
        .find(|line| line.contains("Sempa: "))
        .unwrap_or_else(|| panic!("{output:?}\n{}", vm.events_and_logs()));
    for text in [
        "on h2: ",
        &program,
        "loaded /usr/lib/x86_64-linux-gnu/libpvm3.so.3",
        "instead of Sempa's ",
        "LD_PRELOAD=",
    ] {
        assert!(report.contains(text), "{text:?} is not in {report}");
    }
    let events = foreign_library_events(&vm);
    assert_eq!(events.len(), 1, "{events:?}");
    let (_, sentence) = report.split_once("Sempa: ").expect("the sentence");
    assert_eq!(events[0].text, sentence);

    let remedy = sentence
        .split_whitespace()
        .find_map(|word| word.strip_prefix("LD_PRELOAD="))
        .expect("the remedy");
    let mut spawn = vm.pvm_command(&["spawn", "->", "-h2", &script, &program]);
    spawn
        .env("LD_PRELOAD", remedy)
        .env("PVM_EXPORT", "LD_PRELOAD");
    let output = run_to_end(spawn, TIMEOUT).or_panic_with_logs(&vm);
    assert!(output.stdout.contains("a task"), "{output:?}");
    assert_eq!(foreign_library_events(&vm).len(), 1);
    vm.halt_and_wait().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's library of PVM"]
fn library_of_another_pvm_is_reported() {
    check_start_script(VmSettings::default());
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's library of PVM"]
fn library_of_another_pvm_is_reported_to_ordinary_user() {
    check_start_script(VmSettings {
        runs_as_alice: true,
        ..VmSettings::default()
    });
}

/// A program needs a library that only h1 has.
#[test]
#[ignore = "system tier: needs root, hosts and gcc"]
fn library_that_one_host_lacks_is_reported() {
    require_program("gcc", "gcc");
    let bed = require_testbed(2);
    let vm = start_vm(&bed, VmSettings::default());
    let home = vm.user_home();
    let private_folder = bed.host(1).machine_path(PRIVATE_FOLDER);
    fs::create_dir_all(&private_folder).expect("a folder");
    let compile = |source: &str, arguments: &[&str], output: &Path| {
        let source_path = home.join("source.c");
        fs::write(&source_path, source).expect("a file");
        let mut gcc = Command::new("gcc");
        gcc.arg("-o").arg(output).arg(&source_path).args(arguments);
        run_successfully(gcc, TIMEOUT).expect("it compiles");
    };
    let library = private_folder.join("libonly1.so");
    compile(
        "int only_on_h1(void) { return 0; }",
        &["-shared", "-fPIC", "-Wl,-soname,libonly1.so"],
        &library,
    );
    let program = home.join("needy");
    compile(
        "#include <stdio.h>\nint only_on_h1(void);\nint main(void) { puts(\"it runs\"); return only_on_h1(); }",
        &[
            &library.display().to_string(),
            &format!("-Wl,-rpath,{PRIVATE_FOLDER}"),
        ],
        &program,
    );
    let program = program.display().to_string();
    let spawn_on = |host: &str| {
        vm.run_pvm(&["spawn", "->", host, &program])
            .or_panic_with_logs(&vm)
    };
    let output = spawn_on("-h1");
    assert!(output.stdout.contains("it runs"), "{output:?}");
    let output = spawn_on("-h2");
    let report = output
        .stdout
        .lines()
        .find(|line| line.contains("Sempa: "))
        .unwrap_or_else(|| panic!("{output:?}\n{}", vm.events_and_logs()));
    for text in ["on h2: ", "libonly1.so", "cannot open shared object file"] {
        assert!(report.contains(text), "{text:?} is not in {report}");
    }
    let events = vm.events().or_panic_with_logs(&vm);
    let missing: Vec<&EventEntry> = events
        .iter()
        .filter(|entry| matches!(entry.kind, EventKind::LibraryMissing { .. }))
        .collect();
    assert_eq!(missing.len(), 1, "{events:?}");
    let (_, sentence) = report.split_once("Sempa: ").expect("the sentence");
    assert_eq!(missing[0].text, sentence);
    vm.halt_and_wait().expect("halts");
}

/// `add` fails if the user's setting names Debian's daemon.
#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn daemon_of_another_pvm_that_a_setting_names_is_reported() {
    require_program(DEBIAN_DAEMON, "pvm");
    let bed = require_testbed(2);
    let settings = VmSettings {
        env: VmSettings::owned_env(&[("PVM_DPATH", DEBIAN_DAEMON)]),
        ..VmSettings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    let output = vm.run_pvm(&["add", "h2"]).or_panic_with_logs(&vm);
    assert!(!output.succeeded(), "{output:?}");
    let text = output.stdout + &output.stderr;
    for part in [
        "\"/usr/bin/pvmd\" starts the daemon of another PVM",
        "dx= or PVM_DPATH",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    vm.halt_and_wait().expect("halts");
}

/// The installation exists on h1 only, and the path of h2 finds Debian's daemon.
#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn daemon_of_another_pvm_in_path_is_reported() {
    require_program(DEBIAN_DAEMON, "pvm");
    let installed = sempa_tests::requirements::installed_prefix().expect("installed programs");
    let bed = Testbed::new(2, None, &[]).expect("a testbed without programs");
    let host = bed.host(1);
    let prefix = Path::new(PRIVATE_FOLDER);
    let mut copy = Command::new("cp");
    copy.arg("-a")
        .arg(&installed)
        .arg(host.machine_path(PRIVATE_FOLDER));
    run_successfully(copy, TIMEOUT).expect("a copy");
    let run_pvm = |arguments: &[&str]| {
        let mut command = host.root_command(prefix.join("bin/pvm"));
        command.env("PVM_ALLOW_ROOT", "1").args(arguments);
        run_to_end(command, TIMEOUT).expect("it ends")
    };
    run_pvm(&["start"])
        .expect_success("starting the virtual machine")
        .expect("it starts");
    let output = run_pvm(&["add", "h2"]);
    assert!(!output.succeeded(), "{output:?}");
    let text = output.stdout + &output.stderr;
    for part in [
        "/tmp/private/bin/pvmd does not exist there",
        "/usr/bin/pvmd, which PATH finds there, is the daemon of another PVM",
        "PVM_DPATH",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    run_pvm(&["halt"]).expect_success("halt").expect("it halts");
}
