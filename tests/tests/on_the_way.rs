//! The transfer of a task between hosts: which memory is sent, where images are stored, and which
//! connection is used.

use nix::sys::signal::{Signal, kill};
use sempa_tests::faults::{daemon_of, kill_and_wait};
use sempa_tests::hold_tasks::{check_memory, with_changed_hosts, with_hosts};
use sempa_tests::migration_steps::{Victim, process_of};
use sempa_tests::requirements;
use sempa_tests::run::RunningCommand;
use sempa_tests::testbed::{NETWORK, sent_bytes};
use sempa_tests::{Host, OrPanicWithLogs, Testbed, Vm, wait_for};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a task that contains only zeros, as (argument of its program in MiB, bytes).
const ZEROS: (&str, u64) = ("-96", 96 << 20);
/// Maximum number of bytes that a host sends for such a task, including other messages.
const SENT_BYTES_MAX: u64 = 8 << 20;

/// Pages that contain only zeros are sent neither with the images nor after the task runs.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn zero_pages_are_not_sent() {
    for (policy, ways) in [("never", "in the images"), ("always", "behind the task")] {
        with_hosts(2, &[("SEMPA_POST_COPY", policy)], |vm| {
            let tid = vm.spawn(&["-h1", "hold", ZEROS.0]).expect("spawned");
            check_memory(vm, &tid);
            let before = sent_bytes(vm.bed().host(1));
            vm.must_migrate(&tid, "h2");
            let bytes = sent_bytes(vm.bed().host(1)) - before;
            assert!(
                bytes < SENT_BYTES_MAX,
                "{ways}: {bytes} bytes have left for {}",
                ZEROS.1
            );
            check_memory(vm, &tid);
        });
    }
}

/// Returns the paths of the image folders below the folder `top` of a host.
fn image_folders(host: &Host, top: &str) -> Vec<PathBuf> {
    fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
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
                () if name.starts_with("images-") => found.push(path),
                () if name.starts_with("sempa-testbed-") || !path.is_dir() => {}
                () => collect(&path, found),
            }
        }
    }
    let mut found = Vec::new();
    collect(&host.machine_path(top), &mut found);
    found
}

/// Images are stored in memory although `/tmp` is on a disk. After the migration no images remain.
#[test]
#[ignore = "system tier: needs root, hosts, CRIU and a /tmp on a disk"]
fn images_stay_in_memory_if_tmp_is_on_disk() {
    let is_disk = |path: &Path| {
        nix::sys::statfs::statfs(path)
            .is_ok_and(|of| of.filesystem_type() != nix::sys::statfs::TMPFS_MAGIC)
    };
    requirements::require(requirements::lacks_disk());
    let on_disk =
        |bed: &Testbed| (1..=3).for_each(|i| bed.put_tmp_on_disk(i).expect("another /tmp"));
    with_changed_hosts(3, &[("SEMPA_POST_COPY", "never")], on_disk, |vm| {
        let bed = vm.bed();
        assert!(
            is_disk(&bed.host(2).machine_path("/tmp/sempa-0/pvm")),
            "the daemon has its socket on the disk"
        );
        let tid = vm.spawn(&["-h2", "hold", "4"]).expect("spawned");
        check_memory(vm, &tid);
        // At these points the source has all images, and then the target.
        for (step, holder) in [("dump", 2), ("transfer", 3)] {
            std::fs::write(
                bed.breakpoints_folder()
                    .expect("it has some")
                    .join(format!("{tid}-{step}")),
                "",
            )
            .expect("written");
            let reached = bed
                .breakpoints_folder()
                .expect("it has some")
                .join(format!("{tid}-{step}.reached"));
            let mut moving = vm.start_migrate(&tid, "h3").expect("it begins");
            wait_for(TIMEOUT, || {
                if reached.exists() {
                    Ok(())
                } else {
                    Err(format!("{step} is not reached"))
                }
            })
            .or_panic_with_logs(vm);
            let host = bed.host(holder);
            assert_eq!(image_folders(host, "/tmp"), Vec::<PathBuf>::new(), "{step}");
            assert!(
                !image_folders(host, "/dev/shm").is_empty(),
                "{step}: somewhere they must be"
            );
            // The daemon may be about to stop itself, so the signal is repeated.
            wait_for(TIMEOUT, || {
                for pid in bed.hosts().iter().filter_map(daemon_of) {
                    let _ = kill(pid, Signal::SIGCONT);
                }
                moving
                    .poll()
                    .map_err(|error| error.to_string())?
                    .map(drop)
                    .ok_or("it still moves".into())
            })
            .expect("it goes on");
            moving
                .finish(TIMEOUT)
                .expect("it ends")
                .expect_success("migrate")
                .expect("it has moved");
            check_memory(vm, &tid);
            vm.must_migrate(&tid, "h2");
        }
        vm.pvm(&["kill", &tid])
            .expect("the console runs")
            .expect_success("kill")
            .expect("killed");
        for host in bed.hosts() {
            let gone =
                || match [image_folders(host, "/tmp"), image_folders(host, "/dev/shm")].concat() {
                    left if left.is_empty() => Ok(()),
                    left => Err(format!("{left:?}")),
                };
            wait_for(TIMEOUT, gone).expect("no images are left");
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
            let (two, three) = (vm.bed().host(2), vm.bed().host(3));
            // TCP packets from h2 to h3 are dropped: answers of h2 are lost, and its connections to
            // h3 fail.
            let cut = two.shell(
                &format!("ip rule add pref 1 to {NETWORK}.3 ipproto tcp blackhole"),
                TIMEOUT,
            );
            cut.and_then(|done| done.expect_success("ip rule"))
                .expect("the kernel has rules for protocols");
            let by_tcp = format!("timeout 3 bash -c 'echo > /dev/tcp/{NETWORK}.2/22'");
            assert!(
                !three.shell(&by_tcp, TIMEOUT).expect("bash").succeeded(),
                "TCP gets through"
            );
            let tid = vm.spawn(&["-h2", "hold", "24"]).expect("spawned");
            check_memory(vm, &tid);
            for host in ["h3", "h2", "h3"] {
                vm.must_migrate(&tid, host);
                assert_eq!(vm.host_of(&tid).expect("it lives"), host);
                check_memory(vm, &tid);
            }
            let log = std::fs::read_to_string(three.machine_path("/tmp/sempa-0/pvm/pvml"))
                .expect("a log");
            let found = log
                .lines()
                .filter(|line| line.contains("TCP does not get to"))
                .count();
            assert_eq!(found, 1, "it is found out once, and remembered: {log}");
        });
    }
}

/// Path of a file that only h2 has.
const COPIED_FILE: &str = "/tmp/carried-along";
/// Environment variables with which the file is copied to the target of a migration.
const COPY_FILES_ENV: [(&str, &str); 3] = [
    ("PVM_EXPORT", "SEMPA_FILES"),
    ("SEMPA_FILES", "copy"),
    ("SEMPA_LEASE_MS", "5000"),
];

/// Starts a migration to h3, and waits until it is held after the restore of the task and its file.
fn start_and_hold_after_restore(vm: &Vm, tid: &str) -> RunningCommand {
    let steps = vm.bed().breakpoints_folder().expect("it has some");
    let reached = steps.join(format!("{tid}-restore.reached"));
    let _ = std::fs::remove_file(&reached);
    std::fs::write(steps.join(format!("{tid}-restore")), "").expect("written");
    let moving = vm.start_migrate(tid, "h3").expect("it begins");
    wait_for(TIMEOUT, || {
        if reached.exists() {
            Ok(())
        } else {
            Err("it is not built".into())
        }
    })
    .or_panic_with_logs(vm);
    assert!(vm.bed().host(3).machine_path(COPIED_FILE).exists());
    moving
}

fn wait_until_file_is_removed(vm: &Vm, tid: &str) {
    wait_for(TIMEOUT, || {
        // The daemon may be about to stop itself, so the signal is repeated.
        for pid in vm.bed().hosts().iter().filter_map(daemon_of) {
            let _ = kill(pid, Signal::SIGCONT);
        }
        if vm.bed().host(3).machine_path(COPIED_FILE).exists() {
            Err("it is still there".into())
        } else {
            Ok(())
        }
    })
    .or_panic_with_logs(vm);
    assert!(
        vm.bed().host(2).machine_path(COPIED_FILE).exists(),
        "the task has its own"
    );
    check_memory(vm, tid);
    assert_eq!(vm.host_of(tid).expect("it lives"), "h2");
}

/// The target's tasker or the whole target host is killed before the task runs. The copied file is
/// removed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn copied_files_are_removed_after_a_failed_move() {
    with_hosts(3, &COPY_FILES_ENV, |vm| {
        let tid = vm
            .spawn(&["-h2", "hold", "1", COPIED_FILE])
            .expect("spawned");
        check_memory(vm, &tid);
        let three = vm.bed().host(3);
        let tasker = || process_of(three, Victim::TargetTasker).expect("it has a tasker");

        let moving = start_and_hold_after_restore(vm, &tid);
        kill_and_wait(tasker());
        wait_until_file_is_removed(vm, &tid);
        assert!(
            !moving
                .finish(TIMEOUT)
                .expect("the console ends")
                .succeeded()
        );

        // A new tasker first runs its engine probe. Until the probe has ended, the host refuses
        // tasks.
        let tried = || {
            let log = std::fs::read_to_string(three.machine_path("/tmp/sempa-0/pvm/pvml"))
                .map_err(|error| error.to_string())?;
            let times = log
                .lines()
                .filter(|line| line.contains("tasks can be moved"))
                .count();
            if times == 2 {
                Ok(())
            } else {
                Err(format!("engines were tried {times} times: {log}"))
            }
        };
        wait_for(TIMEOUT, tried).expect("another tasker");
        let moving = start_and_hold_after_restore(vm, &tid);
        kill_and_wait(tasker());
        kill(daemon_of(three).expect("it has a daemon"), Signal::SIGKILL).expect("killed");
        assert!(
            !moving
                .finish(TIMEOUT)
                .expect("the console ends")
                .succeeded()
        );
        assert!(
            three.machine_path(COPIED_FILE).exists(),
            "nobody is there to remove it"
        );
        wait_for(TIMEOUT, || {
            vm.add(&["h3"]).map_err(|error| format!("{error:#}"))
        })
        .expect("another daemon");
        wait_until_file_is_removed(vm, &tid);

        vm.must_migrate(&tid, "h3");
        assert!(
            three.machine_path(COPIED_FILE).exists(),
            "and it is carried along all the same"
        );
        check_memory(vm, &tid);
    });
}
