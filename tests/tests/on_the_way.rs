//! The transfer of a task from host to host: which memory is sent, and by which route.

use nix::sys::signal::{Signal, kill};
use sempa_tests::faults::{daemon_of, kill_and_wait};
use sempa_tests::holders::{is_whole, with_changed_hosts, with_hosts};
use sempa_tests::move_steps::{Victim, process_of};
use sempa_tests::needs;
use sempa_tests::run::Running;
use sempa_tests::testbed::{NETWORK, left};
use sempa_tests::{Host, Sure, Testbed, Vm, eventually};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a task that is full of zeros: the argument of its program in MiB, and bytes.
const ZEROS: (&str, u64) = ("-96", 96 << 20);
/// Bound for the bytes that a host sends for such a task, including other messages.
const LEAVES_MAX: u64 = 8 << 20;

/// Zero pages are sent neither in the images nor after the task.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn zero_pages_are_not_sent() {
    for (policy, ways) in [("never", "in the images"), ("always", "behind the task")] {
        with_hosts(2, &[("SEMPA_POST_COPY", policy)], |vm| {
            let tid = vm.spawn(&["-h1", "hold", ZEROS.0]).expect("spawned");
            is_whole(vm, &tid);
            let before = left(vm.bed().host(1));
            vm.must_migrate(&tid, "h2");
            let bytes = left(vm.bed().host(1)) - before;
            assert!(
                bytes < LEAVES_MAX,
                "{ways}: {bytes} bytes have left for {}",
                ZEROS.1
            );
            is_whole(vm, &tid);
        });
    }
}

/// Returns the folders of images below this folder of a host.
fn images(host: &Host, top: &str) -> Vec<PathBuf> {
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
    collect(&host.path(top), &mut found);
    found
}

/// Images stay in memory although `/tmp` is on a disk, and nothing is left of them.
#[test]
#[ignore = "system tier: needs root, hosts, CRIU and a /tmp on a disk"]
fn images_stay_in_memory_if_tmp_is_on_disk() {
    let is_disk = |path: &Path| {
        nix::sys::statfs::statfs(path)
            .is_ok_and(|of| of.filesystem_type() != nix::sys::statfs::TMPFS_MAGIC)
    };
    needs::require(needs::lacks_disk());
    let on_disk =
        |bed: &Testbed| (1..=3).for_each(|i| bed.put_tmp_on_disk(i).expect("another /tmp"));
    with_changed_hosts(3, &[("SEMPA_POST_COPY", "never")], on_disk, |vm| {
        let bed = vm.bed();
        assert!(
            is_disk(&bed.host(2).path("/tmp/sempa-0/pvm")),
            "the daemon has its socket on the disk"
        );
        let tid = vm.spawn(&["-h2", "hold", "4"]).expect("spawned");
        is_whole(vm, &tid);
        // At these points the source, and then the target, has all images.
        for (step, holder) in [("dump", 2), ("transfer", 3)] {
            std::fs::write(
                bed.steps()
                    .expect("it has some")
                    .join(format!("{tid}-{step}")),
                "",
            )
            .expect("written");
            let reached = bed
                .steps()
                .expect("it has some")
                .join(format!("{tid}-{step}.reached"));
            let mut moving = vm.start_migrate(&tid, "h3").expect("it begins");
            eventually(TIMEOUT, || {
                if reached.exists() {
                    Ok(())
                } else {
                    Err(format!("{step} is not reached"))
                }
            })
            .sure(vm);
            let host = bed.host(holder);
            assert_eq!(images(host, "/tmp"), Vec::<PathBuf>::new(), "{step}");
            assert!(
                !images(host, "/dev/shm").is_empty(),
                "{step}: somewhere they must be"
            );
            // The daemon may be about to stop itself.
            eventually(TIMEOUT, || {
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
                .expect_good("migrate")
                .expect("it has moved");
            is_whole(vm, &tid);
            vm.must_migrate(&tid, "h2");
        }
        vm.pvm(&["kill", &tid])
            .expect("the console runs")
            .expect_good("kill")
            .expect("killed");
        for host in bed.hosts() {
            let gone = || match [images(host, "/tmp"), images(host, "/dev/shm")].concat() {
                left if left.is_empty() => Ok(()),
                left => Err(format!("{left:?}")),
            };
            eventually(TIMEOUT, gone).expect("no images are left");
        }
    });
}

/// A host that TCP does not reach gets the task and its memory over the daemons' session.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn tasks_move_over_the_session_without_tcp() {
    for policy in ["never", "always"] {
        with_hosts(3, &[("SEMPA_POST_COPY", policy)], |vm| {
            let (two, three) = (vm.bed().host(2), vm.bed().host(3));
            // TCP packets from h2 to h3 are dropped: its answers are lost, and its own connections
            // fail.
            let cut = two.shell(
                &format!("ip rule add pref 1 to {NETWORK}.3 ipproto tcp blackhole"),
                TIMEOUT,
            );
            cut.and_then(|done| done.expect_good("ip rule"))
                .expect("the kernel has rules for protocols");
            let by_tcp = format!("timeout 3 bash -c 'echo > /dev/tcp/{NETWORK}.2/22'");
            assert!(
                !three.shell(&by_tcp, TIMEOUT).expect("bash").good(),
                "TCP gets through"
            );
            let tid = vm.spawn(&["-h2", "hold", "24"]).expect("spawned");
            is_whole(vm, &tid);
            for host in ["h3", "h2", "h3"] {
                vm.must_migrate(&tid, host);
                assert_eq!(vm.host_of(&tid).expect("it lives"), host);
                is_whole(vm, &tid);
            }
            let log = std::fs::read_to_string(three.path("/tmp/sempa-0/pvm/pvml")).expect("a log");
            let found = log
                .lines()
                .filter(|line| line.contains("TCP does not reach"))
                .count();
            assert_eq!(found, 1, "it is found out once, and remembered: {log}");
        });
    }
}

/// A file that only h2 has, and the settings by which the file migrates with a task.
const CARRIED: &str = "/tmp/carried-along";
const CARRY: [(&str, &str); 3] = [
    ("PVM_EXPORT", "SEMPA_FILES"),
    ("SEMPA_FILES", "copy"),
    ("SEMPA_LEASE_MS", "5000"),
];

/// Starts a migration to h3 that is held when the task and its file are there.
fn held_when_it_is_built(vm: &Vm, tid: &str) -> Running {
    let steps = vm.bed().steps().expect("it has some");
    let reached = steps.join(format!("{tid}-restore.reached"));
    let _ = std::fs::remove_file(&reached);
    std::fs::write(steps.join(format!("{tid}-restore")), "").expect("written");
    let moving = vm.start_migrate(tid, "h3").expect("it begins");
    eventually(TIMEOUT, || {
        if reached.exists() {
            Ok(())
        } else {
            Err("it is not built".into())
        }
    })
    .sure(vm);
    assert!(vm.bed().host(3).path(CARRIED).exists());
    moving
}

fn has_no_file_and_goes_on(vm: &Vm, tid: &str) {
    eventually(TIMEOUT, || {
        // The daemon may be about to stop itself.
        for pid in vm.bed().hosts().iter().filter_map(daemon_of) {
            let _ = kill(pid, Signal::SIGCONT);
        }
        if vm.bed().host(3).path(CARRIED).exists() {
            Err("it is still there".into())
        } else {
            Ok(())
        }
    })
    .sure(vm);
    assert!(
        vm.bed().host(2).path(CARRIED).exists(),
        "the task has its own"
    );
    is_whole(vm, tid);
    assert_eq!(vm.host_of(tid).expect("it lives"), "h2");
}

/// The target's tasker, or its whole host, is killed before the task runs.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn copied_files_are_removed_after_a_failed_move() {
    with_hosts(3, &CARRY, |vm| {
        let tid = vm.spawn(&["-h2", "hold", "1", CARRIED]).expect("spawned");
        is_whole(vm, &tid);
        let three = vm.bed().host(3);
        let tasker = || process_of(three, Victim::TargetTasker).expect("it has a tasker");

        let moving = held_when_it_is_built(vm, &tid);
        kill_and_wait(tasker());
        has_no_file_and_goes_on(vm, &tid);
        assert!(!moving.finish(TIMEOUT).expect("the console ends").good());

        // The next tasker tries its engine first; until then the host refuses tasks.
        let tried = || {
            let log = std::fs::read_to_string(three.path("/tmp/sempa-0/pvm/pvml"))
                .map_err(|error| error.to_string())?;
            let times = log
                .lines()
                .filter(|line| line.contains("tasks can be migrated"))
                .count();
            if times == 2 {
                Ok(())
            } else {
                Err(format!("engines were tried {times} times: {log}"))
            }
        };
        eventually(TIMEOUT, tried).expect("another tasker");
        let moving = held_when_it_is_built(vm, &tid);
        kill_and_wait(tasker());
        kill(daemon_of(three).expect("it has a daemon"), Signal::SIGKILL).expect("killed");
        assert!(!moving.finish(TIMEOUT).expect("the console ends").good());
        assert!(three.path(CARRIED).exists(), "nobody is there to remove it");
        eventually(TIMEOUT, || {
            vm.add(&["h3"]).map_err(|error| format!("{error:#}"))
        })
        .expect("another daemon");
        has_no_file_and_goes_on(vm, &tid);

        vm.must_migrate(&tid, "h3");
        assert!(
            three.path(CARRIED).exists(),
            "and it is carried along all the same"
        );
        is_whole(vm, &tid);
    });
}
