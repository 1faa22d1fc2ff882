//! A failed migration: the task continues at the source, and the event log has the reason.

use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Step};
use sempa_tests::requirements::testbed_with_env;
use sempa_tests::run::run_ok;
use sempa_tests::vm::{EventEntry, Settings};
use sempa_tests::{Host, OrPanicWithLogs, Testbed, Vm, wait_for};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Replaces CRIU by a script. On hosts with a file `hold-HOST` the script writes its process number
/// and waits until the gate is opened, before it executes the real CRIU. On other hosts it executes
/// the real CRIU at once.
fn put_gated_engine(bed: &Testbed) {
    let link = bed.engine().expect("an engine of its own");
    let real = fs::read_link(link).expect("a link");
    let folder = bed.folder().display();
    let script = format!(
        "#!/bin/bash\nhost=$(hostname)\nif [[ $1 == swrk && -e {folder}/hold-$host ]]; then\n\
         echo $$ >{folder}/fresh-$host; mv {folder}/fresh-$host {folder}/at-$host\n\
         read -r _ <{folder}/gate-$host\nfi\nexec {} \"$@\"\n",
        real.display()
    );
    replace(link, &script);
    for host in bed.hosts() {
        let gate = bed.folder().join(format!("gate-{}", host.name()));
        nix::unistd::mkfifo(
            &gate,
            nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR,
        )
        .expect("a pipe");
    }
}

fn replace(link: &Path, script: &str) {
    let fresh = link.with_extension("fresh");
    fs::write(&fresh, script).expect("written");
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)).expect("executable");
    fs::rename(&fresh, link).expect("in place");
}

fn enable_gate(bed: &Testbed, host: &Host) {
    let _ = fs::remove_file(bed.folder().join(format!("at-{}", host.name())));
    fs::write(bed.folder().join(format!("hold-{}", host.name())), "").expect("written");
}

fn disable_gate(bed: &Testbed, host: &Host) {
    fs::remove_file(bed.folder().join(format!("hold-{}", host.name()))).expect("removed");
}

/// Opens the gate, so that the waiting engine continues.
fn open_gate(bed: &Testbed, host: &Host) {
    fs::write(bed.folder().join(format!("gate-{}", host.name())), "go\n")
        .expect("somebody waits at the gate");
}

/// Waits until the engine of a host waits at the gate. Returns its process number on the host.
fn wait_for_engine_at_gate(bed: &Testbed, host: &Host) -> String {
    let file = bed.folder().join(format!("at-{}", host.name()));
    wait_for(TIMEOUT, || {
        fs::read_to_string(&file).map_err(|_| format!("no engine at the gate of {}", host.name()))
    })
    .expect("an engine at the gate")
    .trim()
    .to_string()
}

fn kill_9(host: &Host, pid: &str) {
    assert!(
        host.shell(&format!("kill -9 {pid}"), TIMEOUT)
            .expect("runs")
            .succeeded(),
        "kill -9 {pid} on {}",
        host.name()
    );
}

fn with_three_hosts(test: impl FnOnce(&Vm)) {
    // The images must contain all memory in these tests.
    let all_at_once = ("SEMPA_POST_COPY", "never");
    let bed = testbed_with_env(3, &[all_at_once]);
    put_gated_engine(&bed);
    let env = vec![(all_at_once.0.to_string(), all_at_once.1.to_string())];
    let vm = Vm::start(
        &bed,
        Settings {
            env,
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    // The first migration waits for the tasker's engine probe. The gate must not hold the probe, so
    // a migration is made before.
    let first = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
    vm.must_migrate(&first, "h3");
    assert!(vm.pvm(&["kill", &first]).expect("ends").succeeded());
    wait_for(TIMEOUT, || match vm.tasks() {
        Ok(tasks) if tasks.iter().all(|task| task.tid != first) => Ok(()),
        other => Err(format!("{first} is still there: {other:?}")),
    })
    .expect("the first task ends");
    test(&vm);
    vm.halt().expect("halts");
}

/// Checks that a task runs on `host`, answers, and that its memory is unchanged.
fn check_task_on(vm: &Vm, tid: &str, host: &str) {
    let mut command = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
    command.args(["ask", tid]);
    let done = run_ok(command, TIMEOUT).or_panic_with_logs(vm);
    assert!(done.out.contains("sum GOOD"), "{done:?}");
    assert_eq!(vm.host_of(tid).expect("alive"), host);
}

fn wait_for_failure(vm: &Vm) -> EventEntry {
    vm.wait_for_event(TIMEOUT, "failed move", |entry| {
        matches!(entry.kind, EventKind::MigrationFailed { .. })
    })
    .or_panic_with_logs(vm)
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_killed_dump_leaves_the_task_at_the_source() {
    with_three_hosts(|vm| {
        let (bed, source) = (vm.bed(), vm.bed().host(2));
        let tid = vm.spawn(&["-h2", "hold", "8"]).expect("spawned");
        enable_gate(bed, source);
        let moving = vm.start_migrate(&tid, "h3").expect("starts");
        kill_9(source, &wait_for_engine_at_gate(bed, source));
        let done = moving.finish(TIMEOUT).expect("ends");
        assert!(
            !done.succeeded() && done.err.lines().count() == 1,
            "{done:?}"
        );
        let entry = wait_for_failure(vm);
        assert!(
            matches!(
                &entry.kind,
                EventKind::MigrationFailed {
                    step: Step::Dump,
                    why: Failure::Killed { signal: 9 },
                    ..
                }
            ),
            "{entry:?}"
        );
        check_task_on(vm, &tid, "h2");
        disable_gate(bed, source);
        vm.must_migrate(&tid, "h3");
        check_task_on(vm, &tid, "h3");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_dump_killed_while_writing_leaves_the_task() {
    with_three_hosts(|vm| {
        let (bed, source) = (vm.bed(), vm.bed().host(2));
        let tid = vm.spawn(&["-h2", "hold", "384"]).expect("spawned");
        check_task_on(vm, &tid, "h2");
        enable_gate(bed, source);
        let moving = vm.start_migrate(&tid, "h3").expect("starts");
        let engine = wait_for_engine_at_gate(bed, source);
        open_gate(bed, source);
        let place = source.machine_path("/tmp/sempa-0/pvm");
        wait_for(TIMEOUT, || {
            let pages = fs::read_dir(&place)
                .into_iter()
                .flatten()
                .flatten()
                .map(|entry| entry.path().join("pages-1.img"));
            let written = pages
                .filter_map(|file| fs::metadata(file).ok())
                .map(|meta| meta.len())
                .max();
            if written.is_some_and(|bytes| bytes > 1 << 20) {
                Ok(())
            } else {
                Err("no pages yet".to_string())
            }
        })
        .expect("the dump writes");
        kill_9(source, &engine);
        let done = moving.finish(TIMEOUT).expect("ends");
        assert!(!done.succeeded(), "{done:?}");
        assert!(
            matches!(
                wait_for_failure(vm).kind,
                EventKind::MigrationFailed {
                    step: Step::Dump,
                    ..
                }
            ),
            "{:?}",
            wait_for_failure(vm)
        );
        check_task_on(vm, &tid, "h2");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_killed_restore_leaves_the_task_at_the_source() {
    with_three_hosts(|vm| {
        let (bed, target) = (vm.bed(), vm.bed().host(3));
        let tid = vm.spawn(&["-h2", "hold", "8"]).expect("spawned");
        enable_gate(bed, target);
        let moving = vm.start_migrate(&tid, "h3").expect("starts");
        kill_9(target, &wait_for_engine_at_gate(bed, target));
        let done = moving.finish(TIMEOUT).expect("ends");
        assert!(!done.succeeded(), "{done:?}");
        let entry = wait_for_failure(vm);
        assert!(
            matches!(
                &entry.kind,
                EventKind::MigrationFailed {
                    step: Step::Restore,
                    why: Failure::Killed { signal: 9 },
                    ..
                }
            ),
            "{entry:?}"
        );
        check_task_on(vm, &tid, "h2");
        let left: Vec<_> = target
            .processes()
            .into_iter()
            .filter(|(_, line)| line.contains("hold"))
            .collect();
        assert!(left.is_empty(), "half a copy is left: {left:?}");
        disable_gate(bed, target);
        vm.must_migrate(&tid, "h3");
        check_task_on(vm, &tid, "h3");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_killed_transfer_leaves_the_task_at_the_source() {
    with_three_hosts(|vm| {
        let (bed, source, target) = (vm.bed(), vm.bed().host(2), vm.bed().host(3));
        let tid = vm.spawn(&["-h2", "hold", "64"]).expect("spawned");
        check_task_on(vm, &tid, "h2");
        enable_gate(bed, source);
        let moving = vm.start_migrate(&tid, "h3").expect("starts");
        wait_for_engine_at_gate(bed, source);
        // The daemon that receives the images is stopped, so that the transfer begins and cannot
        // end.
        let daemon = target
            .processes()
            .into_iter()
            .find(|(_, line)| line.contains("bin/pvmd"))
            .expect("a daemon")
            .0;
        let signal = |name| {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(daemon.cast_signed()), name)
                .expect("it is there");
        };
        signal(nix::sys::signal::Signal::SIGSTOP);
        open_gate(bed, source);
        vm.wait_for_event(TIMEOUT, "end of the dump", |entry| {
            matches!(
                entry.kind,
                EventKind::MigrationStep {
                    step: Step::Dump,
                    ..
                }
            )
        })
        .or_panic_with_logs(vm);
        signal(nix::sys::signal::Signal::SIGKILL);
        let done = moving.finish(TIMEOUT).expect("ends");
        assert!(!done.succeeded(), "{done:?}");
        let entry = wait_for_failure(vm);
        assert!(
            matches!(
                &entry.kind,
                EventKind::MigrationFailed {
                    step: Step::Transfer,
                    ..
                }
            ),
            "{entry:?}"
        );
        check_task_on(vm, &tid, "h2");
        sempa_tests::testbed::wait_until_no_process(target, "pvm-tasker", TIMEOUT)
            .expect("the tasker ends with its daemon");
        disable_gate(bed, source);
        vm.must_migrate(&tid, "h1");
        check_task_on(vm, &tid, "h1");
    });
}

/// The migration fails if the disk of the source or that of the target is full.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_full_disk_leaves_the_task_at_the_source() {
    with_three_hosts(|vm| {
        let (bed, tid) = (vm.bed(), vm.spawn(&["-h2", "hold", "64"]).expect("spawned"));
        let resize = |host: &Host, size: &str| {
            let done = host
                .shell(&format!("mount -n -o remount,size={size} /tmp"), TIMEOUT)
                .expect("runs");
            assert!(done.succeeded(), "{done:?}");
        };
        for (index, step) in [(3, Step::Transfer), (2, Step::Dump)] {
            check_task_on(vm, &tid, "h2");
            resize(bed.host(index), "20m");
            let done = vm.migrate_when_ready(&tid, "h3").expect("ends");
            assert!(
                !done.succeeded() && done.err.contains("No space left on device"),
                "{done:?}"
            );
            vm.wait_for_event(
                TIMEOUT,
                "failed move at that step",
                |entry| matches!(&entry.kind, EventKind::MigrationFailed { step: failed, .. } if *failed == step),
            )
            .or_panic_with_logs(vm);
            check_task_on(vm, &tid, "h2");
            resize(bed.host(index), "4g");
        }
        vm.must_migrate(&tid, "h3");
        check_task_on(vm, &tid, "h3");
    });
}

/// A migration and a checkpoint of a task with a debugger are refused with the reason.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_with_debugger_is_not_migrated() {
    let bed = testbed_with_env(2, &[]);
    // The replaced debugger does not attach. The option of the spawn alone shows that the task is
    // to be debugged.
    let debugger = bed.home().join("debugger");
    replace(&debugger, "#!/bin/sh\nexec \"$@\"\n");
    let env = vec![("PVM_DEBUGGER".to_string(), debugger.display().to_string())];
    let vm = Vm::start(
        &bed,
        Settings {
            env,
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    vm.compile_program("hold").expect("gcc");
    let (debugged, other) = (
        vm.spawn(&["-?", "-h1", "hold", "1"]),
        vm.spawn(&["-h1", "hold", "1"]),
    );
    let (debugged, other) = (debugged.expect("spawned"), other.expect("spawned"));
    check_task_on(&vm, &debugged, "h1");
    let why = "it was spawned to be debugged (PvmTaskDebug)";
    for words in [
        &["can-migrate", debugged.as_str()][..],
        &["migrate", &debugged, "h2"],
        &["checkpoint", &debugged],
    ] {
        let done = vm.pvm(words).expect("ends");
        assert!(
            !done.succeeded() && (done.err.contains(why) || done.out.contains(why)),
            "{words:?}: {done:?}"
        );
    }
    check_task_on(&vm, &debugged, "h1");
    vm.must_migrate(&other, "h2");
    vm.halt().expect("halts");
}
