//! After a failed migration the task continues at the source, and the event log contains the
//! reason.

use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Step};
use sempa_tests::requirements::require_testbed_with_env;
use sempa_tests::run::run_successfully;
use sempa_tests::vm::{EventEntry, VmSettings};
use sempa_tests::{Host, OrPanicWithLogs, Testbed, Vm, wait_for};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Replaces CRIU by a script, which waits for its request. On a host with a file `hold-HOST` the
/// script then writes its process number, waits until a test calls [`open_gate`], and executes the
/// real CRIU. On other hosts the script executes the real CRIU at once.
fn install_gated_engine(bed: &Testbed) {
    let engine_path = bed.engine().expect("an engine of its own");
    let criu_path = fs::read_link(engine_path).expect("a link");
    let folder = bed.folder().display();
    let script = format!(
        "#!/bin/bash\nhost=$(hostname)\n\
         [[ $1 != swrk ]] || until read -t 0 -u $2; do sleep 0.01; done\nif [[ $1 == swrk && -e {folder}/hold-$host ]]; then\n\
         echo $$ >{folder}/fresh-$host; mv {folder}/fresh-$host {folder}/at-$host\n\
         read -r _ <{folder}/gate-$host\nfi\nexec {} \"$@\"\n",
        criu_path.display()
    );
    replace_script(engine_path, &script);
    for host in bed.hosts() {
        let gate_path = bed.folder().join(format!("gate-{}", host.name()));
        nix::unistd::mkfifo(
            &gate_path,
            nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR,
        )
        .expect("a pipe");
    }
}

fn replace_script(path: &Path, script: &str) {
    let new_path = path.with_extension("fresh");
    fs::write(&new_path, script).expect("written");
    fs::set_permissions(&new_path, fs::Permissions::from_mode(0o755)).expect("executable");
    fs::rename(&new_path, path).expect("in place");
}

fn enable_gate(bed: &Testbed, host: &Host) {
    let _ = fs::remove_file(bed.folder().join(format!("at-{}", host.name())));
    fs::write(bed.folder().join(format!("hold-{}", host.name())), "").expect("written");
}

fn disable_gate(bed: &Testbed, host: &Host) {
    fs::remove_file(bed.folder().join(format!("hold-{}", host.name()))).expect("removed");
}

/// Opens the gate of a host: the engine that waits there continues.
fn open_gate(bed: &Testbed, host: &Host) {
    fs::write(bed.folder().join(format!("gate-{}", host.name())), "go\n")
        .expect("somebody waits at the gate");
}

/// Waits until the engine of a host waits at the gate. Returns the process number of the engine on
/// the host.
fn wait_for_engine_at_gate(bed: &Testbed, host: &Host) -> String {
    let pid_file = bed.folder().join(format!("at-{}", host.name()));
    wait_for(TIMEOUT, || {
        fs::read_to_string(&pid_file)
            .map_err(|_| format!("no engine at the gate of {}", host.name()))
    })
    .expect("an engine at the gate")
    .trim()
    .to_string()
}

fn kill_process(host: &Host, pid: &str) {
    assert!(
        host.run_shell(&format!("kill -9 {pid}"), TIMEOUT)
            .expect("runs")
            .succeeded(),
        "kill -9 {pid} on {}",
        host.name()
    );
}

fn with_three_hosts(test: impl FnOnce(&Vm)) {
    // With post-copy the images would not contain all memory, which these tests require.
    let post_copy_setting = ("SEMPA_POST_COPY", "never");
    let bed = require_testbed_with_env(3, &[post_copy_setting]);
    install_gated_engine(&bed);
    let env = vec![(
        post_copy_setting.0.to_string(),
        post_copy_setting.1.to_string(),
    )];
    let vm = Vm::start(
        &bed,
        VmSettings {
            env,
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    // The first migration waits for the tasker's engine probe. A migration before the test ensures
    // that the gate does not block the probe.
    let first_tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
    vm.migrate_or_panic(&first_tid, "h3");
    assert!(vm.run_pvm(&["kill", &first_tid]).expect("ends").succeeded());
    wait_for(TIMEOUT, || match vm.tasks() {
        Ok(tasks) if tasks.iter().all(|task| task.tid != first_tid) => Ok(()),
        other => Err(format!("{first_tid} is still there: {other:?}")),
    })
    .expect("the first task ends");
    test(&vm);
    vm.halt_and_wait().expect("halts");
}

/// Checks that a task runs on `host` and answers, and that its memory is unchanged.
fn check_task_on(vm: &Vm, tid: &str, host: &str) {
    let mut command = vm.user_command(
        vm.testbed().host(1),
        vm.user_home().join("pvm3/bin/LINUX64/hold"),
    );
    command.args(["ask", tid]);
    let output = run_successfully(command, TIMEOUT).or_panic_with_logs(vm);
    assert!(output.stdout.contains("sum GOOD"), "{output:?}");
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
        let (bed, source) = (vm.testbed(), vm.testbed().host(2));
        let tid = vm.spawn_connected(&["-h2", "hold", "8"]).expect("spawned");
        enable_gate(bed, source);
        let migrate_command = vm.start_migration(&tid, "h3").expect("starts");
        kill_process(source, &wait_for_engine_at_gate(bed, source));
        let output = migrate_command.wait_or_kill(TIMEOUT).expect("ends");
        assert!(output.failed_with_one_sentence(), "{output:?}");
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
        vm.migrate_or_panic(&tid, "h3");
        check_task_on(vm, &tid, "h3");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_dump_killed_while_writing_leaves_the_task() {
    with_three_hosts(|vm| {
        let (bed, source) = (vm.testbed(), vm.testbed().host(2));
        let tid = vm
            .spawn_connected(&["-h2", "hold", "384"])
            .expect("spawned");
        check_task_on(vm, &tid, "h2");
        enable_gate(bed, source);
        let migrate_command = vm.start_migration(&tid, "h3").expect("starts");
        let engine_pid = wait_for_engine_at_gate(bed, source);
        open_gate(bed, source);
        let image_parent = source.machine_path("/tmp/sempa-0/pvm");
        wait_for(TIMEOUT, || {
            let page_files = fs::read_dir(&image_parent)
                .into_iter()
                .flatten()
                .flatten()
                .map(|entry| entry.path().join("pages-1.img"));
            let largest_bytes = page_files
                .filter_map(|file| fs::metadata(file).ok())
                .map(|meta| meta.len())
                .max();
            if largest_bytes.is_some_and(|bytes| bytes > 1 << 20) {
                Ok(())
            } else {
                Err("no pages yet".to_string())
            }
        })
        .expect("the dump writes");
        kill_process(source, &engine_pid);
        let output = migrate_command.wait_or_kill(TIMEOUT).expect("ends");
        assert!(!output.succeeded(), "{output:?}");
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
        let (bed, target) = (vm.testbed(), vm.testbed().host(3));
        let tid = vm.spawn_connected(&["-h2", "hold", "8"]).expect("spawned");
        enable_gate(bed, target);
        let migrate_command = vm.start_migration(&tid, "h3").expect("starts");
        kill_process(target, &wait_for_engine_at_gate(bed, target));
        let output = migrate_command.wait_or_kill(TIMEOUT).expect("ends");
        assert!(!output.succeeded(), "{output:?}");
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
        let remaining_processes: Vec<_> = target
            .processes()
            .into_iter()
            .filter(|(_, line)| line.contains("hold"))
            .collect();
        assert!(
            remaining_processes.is_empty(),
            "half a copy is left: {remaining_processes:?}"
        );
        disable_gate(bed, target);
        vm.migrate_or_panic(&tid, "h3");
        check_task_on(vm, &tid, "h3");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_killed_transfer_leaves_the_task_at_the_source() {
    with_three_hosts(|vm| {
        let (bed, source, target) = (vm.testbed(), vm.testbed().host(2), vm.testbed().host(3));
        let tid = vm.spawn_connected(&["-h2", "hold", "64"]).expect("spawned");
        check_task_on(vm, &tid, "h2");
        enable_gate(bed, source);
        let migrate_command = vm.start_migration(&tid, "h3").expect("starts");
        wait_for_engine_at_gate(bed, source);
        // The daemon that receives the images is stopped, so the transfer begins but cannot
        // complete.
        let daemon_pid = target
            .processes()
            .into_iter()
            .find(|(_, line)| line.contains("bin/pvmd"))
            .expect("a daemon")
            .0;
        let signal_daemon = |signal_kind| {
            nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(daemon_pid.cast_signed()),
                signal_kind,
            )
            .expect("it is there");
        };
        signal_daemon(nix::sys::signal::Signal::SIGSTOP);
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
        signal_daemon(nix::sys::signal::Signal::SIGKILL);
        let output = migrate_command.wait_or_kill(TIMEOUT).expect("ends");
        assert!(!output.succeeded(), "{output:?}");
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
        vm.migrate_or_panic(&tid, "h1");
        check_task_on(vm, &tid, "h1");
    });
}

/// The migration fails if the disk of the source or the disk of the target is full.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_full_disk_leaves_the_task_at_the_source() {
    with_three_hosts(|vm| {
        let (bed, tid) = (
            vm.testbed(),
            vm.spawn_connected(&["-h2", "hold", "64"]).expect("spawned"),
        );
        let resize_tmp = |host: &Host, size: &str| {
            let output = host
                .run_shell(&format!("mount -n -o remount,size={size} /tmp"), TIMEOUT)
                .expect("runs");
            assert!(output.succeeded(), "{output:?}");
        };
        for (host_number, step) in [(3, Step::Transfer), (2, Step::Dump)] {
            check_task_on(vm, &tid, "h2");
            resize_tmp(bed.host(host_number), "20m");
            let output = vm.migrate_when_ready(&tid, "h3").expect("ends");
            assert!(
                !output.succeeded() && output.stderr.contains("No space left on device"),
                "{output:?}"
            );
            vm.wait_for_event(
                TIMEOUT,
                "failed move at that step",
                |entry| matches!(&entry.kind, EventKind::MigrationFailed { step: failed_step, .. } if *failed_step == step),
            )
            .or_panic_with_logs(vm);
            check_task_on(vm, &tid, "h2");
            resize_tmp(bed.host(host_number), "4g");
        }
        vm.migrate_or_panic(&tid, "h3");
        check_task_on(vm, &tid, "h3");
    });
}

/// A migration and a checkpoint of a task with a debugger are refused with the reason.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_with_debugger_is_not_migrated() {
    let bed = require_testbed_with_env(2, &[]);
    // The debugger is a script that does not attach to the task. The spawn's option `-?` alone
    // marks the task as debugged.
    let debugger_path = bed.root_home().join("debugger");
    replace_script(&debugger_path, "#!/bin/sh\nexec \"$@\"\n");
    let env = vec![(
        "PVM_DEBUGGER".to_string(),
        debugger_path.display().to_string(),
    )];
    let vm = Vm::start(
        &bed,
        VmSettings {
            env,
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    vm.compile_program("hold").expect("gcc");
    let (debugged_tid, plain_tid) = (
        vm.spawn_connected(&["-?", "-h1", "hold", "1"]),
        vm.spawn_connected(&["-h1", "hold", "1"]),
    );
    let (debugged_tid, plain_tid) = (debugged_tid.expect("spawned"), plain_tid.expect("spawned"));
    check_task_on(&vm, &debugged_tid, "h1");
    let reason = "it was spawned to be debugged (PvmTaskDebug)";
    for args in [
        &["can-migrate", debugged_tid.as_str()][..],
        &["migrate", &debugged_tid, "h2"],
        &["checkpoint", &debugged_tid],
    ] {
        let output = vm.run_pvm(args).expect("ends");
        assert!(
            !output.succeeded()
                && (output.stderr.contains(reason) || output.stdout.contains(reason)),
            "{args:?}: {output:?}"
        );
    }
    check_task_on(&vm, &debugged_tid, "h1");
    vm.migrate_or_panic(&plain_tid, "h2");
    vm.halt_and_wait().expect("halts");
}
