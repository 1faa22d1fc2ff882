//! The transfer of a task between hosts: which memory is sent, where images are stored, and which
//! connection is used.

use nix::sys::signal::{Signal, kill};
use sempa_tests::faults::{daemon_pid, kill_and_wait};
use sempa_tests::hold_tasks::{check_memory, with_hosts, with_prepared_hosts};
use sempa_tests::migration_steps::{Victim, victim_process};
use sempa_tests::requirements;
use sempa_tests::run::RunningCommand;
use sempa_tests::testbed::{NETWORK_PREFIX, sent_bytes_total};
use sempa_tests::{Host, OrPanicWithLogs, Testbed, Vm, wait_for};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a task that contains only zeros, as (argument of the task's program: MiB with a minus
/// sign for zeros, bytes).
const ZERO_MEMORY: (&str, u64) = ("-96", 96 << 20);
/// Maximum number of bytes that a host sends when it migrates a task with [`ZERO_MEMORY`],
/// including all other messages.
const SENT_BYTES_MAX: u64 = 8 << 20;

/// Pages that contain only zeros are sent neither with the images nor after the start of the task
/// at the target.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn zero_pages_are_not_sent() {
    for (policy, description) in [("never", "in the images"), ("always", "behind the task")] {
        with_hosts(2, &[("SEMPA_POST_COPY", policy)], |vm| {
            let tid = vm
                .spawn_connected(&["-h1", "hold", ZERO_MEMORY.0])
                .expect("spawned");
            check_memory(vm, &tid);
            let bytes_before = sent_bytes_total(vm.testbed().host(1));
            vm.migrate_or_panic(&tid, "h2");
            let migration_bytes = sent_bytes_total(vm.testbed().host(1)) - bytes_before;
            assert!(
                migration_bytes < SENT_BYTES_MAX,
                "{description}: {migration_bytes} bytes have left for {}",
                ZERO_MEMORY.1
            );
            check_memory(vm, &tid);
        });
    }
}

/// Returns the paths of all image folders below the folder `top_folder` of a host.
fn image_folders(host: &Host, top_folder: &str) -> Vec<PathBuf> {
    fn collect(folder: &Path, paths: &mut Vec<PathBuf>) {
        for path in std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
        {
            let name = path
                .file_name()
                .map(|name| name.to_string_lossy().into_owned())
                .unwrap_or_default();
            match () {
                () if name.starts_with("images-") => paths.push(path),
                () if name.starts_with("sempa-testbed-") || !path.is_dir() => {}
                () => collect(&path, paths),
            }
        }
    }
    let mut paths = Vec::new();
    collect(&host.machine_path(top_folder), &mut paths);
    paths
}

/// Images are stored in memory although `/tmp` is on a disk. After the migration no images remain.
#[test]
#[ignore = "system tier: needs root, hosts, CRIU and a /tmp on a disk"]
fn images_stay_in_memory_if_tmp_is_on_disk() {
    let is_on_disk = |path: &Path| {
        nix::sys::statfs::statfs(path)
            .is_ok_and(|file_system| file_system.filesystem_type() != nix::sys::statfs::TMPFS_MAGIC)
    };
    requirements::panic_if_unmet(requirements::missing_disk_reason());
    let move_tmp_to_disk =
        |bed: &Testbed| (1..=3).for_each(|i| bed.move_tmp_to_disk(i).expect("another /tmp"));
    with_prepared_hosts(3, &[("SEMPA_POST_COPY", "never")], move_tmp_to_disk, |vm| {
        let bed = vm.testbed();
        assert!(
            is_on_disk(&bed.host(2).machine_path("/tmp/sempa-0/pvm")),
            "the daemon has its socket on the disk"
        );
        let tid = vm.spawn_connected(&["-h2", "hold", "4"]).expect("spawned");
        check_memory(vm, &tid);
        // After the dump the source has all images; after the transfer the target has them.
        for (step, host_number) in [("dump", 2), ("transfer", 3)] {
            std::fs::write(
                bed.breakpoints_folder()
                    .expect("it has some")
                    .join(format!("{tid}-{step}")),
                "",
            )
            .expect("written");
            let marker = bed
                .breakpoints_folder()
                .expect("it has some")
                .join(format!("{tid}-{step}.reached"));
            let mut migrate_command = vm.start_migration(&tid, "h3").expect("it begins");
            wait_for(TIMEOUT, || {
                if marker.exists() {
                    Ok(())
                } else {
                    Err(format!("{step} is not reached"))
                }
            })
            .or_panic_with_logs(vm);
            let host = bed.host(host_number);
            assert_eq!(image_folders(host, "/tmp"), Vec::<PathBuf>::new(), "{step}");
            assert!(
                !image_folders(host, "/dev/shm").is_empty(),
                "{step}: somewhere they must be"
            );
            // The daemon may be about to stop itself, so the signal is repeated.
            wait_for(TIMEOUT, || {
                for pid in bed.hosts().iter().filter_map(daemon_pid) {
                    let _ = kill(pid, Signal::SIGCONT);
                }
                migrate_command
                    .poll_status()
                    .map_err(|error| error.to_string())?
                    .map(drop)
                    .ok_or("it still moves".into())
            })
            .expect("it goes on");
            migrate_command
                .wait_or_kill(TIMEOUT)
                .expect("it ends")
                .expect_success("migrate")
                .expect("it has moved");
            check_memory(vm, &tid);
            vm.migrate_or_panic(&tid, "h2");
        }
        vm.run_pvm(&["kill", &tid])
            .expect("the console runs")
            .expect_success("kill")
            .expect("killed");
        for host in bed.hosts() {
            let check_no_images =
                || match [image_folders(host, "/tmp"), image_folders(host, "/dev/shm")].concat() {
                    folders if folders.is_empty() => Ok(()),
                    folders => Err(format!("{folders:?}")),
                };
            wait_for(TIMEOUT, check_no_images).expect("no images are left");
        }
    });
}

/// A task and its memory migrate over the session of the daemons if TCP between the hosts is
/// blocked.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn tasks_move_over_the_session_without_tcp() {
    for policy in ["never", "always"] {
        with_hosts(3, &[("SEMPA_POST_COPY", policy)], |vm| {
            let (source, target) = (vm.testbed().host(2), vm.testbed().host(3));
            // TCP packets from h2 to h3 are dropped: h3 receives no answers of h2, and connections
            // of h2 to h3 fail.
            let rule_output = source.run_shell(
                &format!("ip rule add pref 1 to {NETWORK_PREFIX}.3 ipproto tcp blackhole"),
                TIMEOUT,
            );
            rule_output
                .and_then(|output| output.expect_success("ip rule"))
                .expect("the kernel has rules for protocols");
            let tcp_command = format!("timeout 3 bash -c 'echo > /dev/tcp/{NETWORK_PREFIX}.2/22'");
            assert!(
                !target
                    .run_shell(&tcp_command, TIMEOUT)
                    .expect("bash")
                    .succeeded(),
                "TCP gets through"
            );
            let tid = vm.spawn_connected(&["-h2", "hold", "24"]).expect("spawned");
            check_memory(vm, &tid);
            for host in ["h3", "h2", "h3"] {
                vm.migrate_or_panic(&tid, host);
                assert_eq!(vm.host_of(&tid).expect("it lives"), host);
                check_memory(vm, &tid);
            }
            let log = std::fs::read_to_string(target.machine_path("/tmp/sempa-0/pvm/pvml"))
                .expect("a log");
            let message_count = log
                .lines()
                .filter(|line| line.contains("TCP does not reach"))
                .count();
            assert_eq!(
                message_count, 1,
                "it is found out once, and remembered: {log}"
            );
        });
    }
}

/// Path of a file that only h2 has.
const COPIED_FILE_PATH: &str = "/tmp/carried-along";
/// Environment variables with which the file is copied to the target of a migration.
const COPY_FILES_ENV: [(&str, &str); 3] = [
    ("PVM_EXPORT", "SEMPA_FILES"),
    ("SEMPA_FILES", "copy"),
    ("SEMPA_LEASE_MS", "5000"),
];

/// Starts a migration to h3 and waits until a breakpoint stops it after the restore of the task and
/// its file. Returns the running `migrate` command.
fn start_and_hold_after_restore(vm: &Vm, tid: &str) -> RunningCommand {
    let breakpoint_folder = vm.testbed().breakpoints_folder().expect("it has some");
    let marker = breakpoint_folder.join(format!("{tid}-restore.reached"));
    let _ = std::fs::remove_file(&marker);
    std::fs::write(breakpoint_folder.join(format!("{tid}-restore")), "").expect("written");
    let migrate_command = vm.start_migration(tid, "h3").expect("it begins");
    wait_for(TIMEOUT, || {
        if marker.exists() {
            Ok(())
        } else {
            Err("it is not built".into())
        }
    })
    .or_panic_with_logs(vm);
    assert!(vm.testbed().host(3).machine_path(COPIED_FILE_PATH).exists());
    migrate_command
}

fn wait_until_file_is_removed(vm: &Vm, tid: &str) {
    wait_for(TIMEOUT, || {
        // The daemon may be about to stop itself, so the signal is repeated.
        for pid in vm.testbed().hosts().iter().filter_map(daemon_pid) {
            let _ = kill(pid, Signal::SIGCONT);
        }
        if vm.testbed().host(3).machine_path(COPIED_FILE_PATH).exists() {
            Err("it is still there".into())
        } else {
            Ok(())
        }
    })
    .or_panic_with_logs(vm);
    assert!(
        vm.testbed().host(2).machine_path(COPIED_FILE_PATH).exists(),
        "the task has its own"
    );
    check_memory(vm, tid);
    assert_eq!(vm.host_of(tid).expect("it lives"), "h2");
}

/// In the first migration the target's tasker is killed before the task runs, and the copied file
/// is removed. In the second migration the tasker and the daemon are killed, and the next daemon
/// removes the file. A third migration succeeds and copies the file.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn copied_files_are_removed_after_a_failed_move() {
    with_hosts(3, &COPY_FILES_ENV, |vm| {
        let tid = vm
            .spawn_connected(&["-h2", "hold", "1", COPIED_FILE_PATH])
            .expect("spawned");
        check_memory(vm, &tid);
        let target = vm.testbed().host(3);
        let target_tasker =
            || victim_process(target, Victim::TargetTasker).expect("it has a tasker");

        let migrate_command = start_and_hold_after_restore(vm, &tid);
        kill_and_wait(target_tasker());
        wait_until_file_is_removed(vm, &tid);
        assert!(
            !migrate_command
                .wait_or_kill(TIMEOUT)
                .expect("the console ends")
                .succeeded()
        );

        // A new tasker first runs its engine probe. Until the probe has ended, the host refuses
        // tasks.
        let check_probed = || {
            let log = std::fs::read_to_string(target.machine_path("/tmp/sempa-0/pvm/pvml"))
                .map_err(|error| error.to_string())?;
            let probe_count = log
                .lines()
                .filter(|line| line.contains("tasks can be migrated"))
                .count();
            if probe_count == 2 {
                Ok(())
            } else {
                Err(format!("engines were tried {probe_count} times: {log}"))
            }
        };
        wait_for(TIMEOUT, check_probed).expect("another tasker");
        let migrate_command = start_and_hold_after_restore(vm, &tid);
        kill_and_wait(target_tasker());
        kill(
            daemon_pid(target).expect("it has a daemon"),
            Signal::SIGKILL,
        )
        .expect("killed");
        assert!(
            !migrate_command
                .wait_or_kill(TIMEOUT)
                .expect("the console ends")
                .succeeded()
        );
        assert!(
            target.machine_path(COPIED_FILE_PATH).exists(),
            "nobody is there to remove it"
        );
        wait_for(TIMEOUT, || {
            vm.add_hosts(&["h3"]).map_err(|error| format!("{error:#}"))
        })
        .expect("another daemon");
        wait_until_file_is_removed(vm, &tid);

        vm.migrate_or_panic(&tid, "h3");
        assert!(
            target.machine_path(COPIED_FILE_PATH).exists(),
            "and it is carried along all the same"
        );
        check_memory(vm, &tid);
    });
}
