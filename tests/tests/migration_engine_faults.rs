//! Engines that fail or report false results, full disks, and too little memory during a
//! migration. Each failure is reported in one line, the task continues at the source, and no files
//! or processes remain.
//!
//! A seed selects some of the cases; with `SEMPA_TEST_FULL=1` all cases are tried.

use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_tests::fake_criu::{self, set_behaviour, take_misbehaviours};
use sempa_tests::faults::leftover_names;
use sempa_tests::limits;
use sempa_tests::migration_steps::{self, MigrationFaults, sampled_points, task_may_be_lost};
use sempa_tests::requirements::{self, require_testbed_with_env, require_testbed_with_own_engine};
use sempa_tests::ring_job::{ENDLESS_ROUND_COUNT, RingJob};
use sempa_tests::rng::{print_seed, sample_cases};
use sempa_tests::run::{CommandResult, run_successfully};
use sempa_tests::vm::VmSettings;
use sempa_tests::{Host, Testbed, Vm, wait_for};
use std::fs;
use std::time::{Duration, SystemTime};

const TIMEOUT: Duration = Duration::from_secs(120);
/// Memory of a task, in MiB.
const TASK_MIB: &str = "24";
/// Behaviours of the fake CRIU that make it fail, each with a part of the resulting error message.
const FAILING_BEHAVIOURS: [(&str, &str); 4] = [
    ("silent", "ended without a reply"),
    ("garbage", "is malformed"),
    ("killed", "killed by signal 9"),
    ("hang", "not done within"),
];
const POST_COPY_ALWAYS: (&str, &str) = ("SEMPA_POST_COPY", "always");
const POST_COPY_NEVER: (&str, &str) = ("SEMPA_POST_COPY", "never");
/// Environment variable that sets a transfer rate in bytes per second. At this rate the transfer
/// of the memory exceeds the engine's timeout.
const SLOW_RATE_ENV: (&str, &str) = ("SEMPA_MOVE_RATE", "1000000");
/// Kinds of images that are truncated to half their size.
const IMAGE_KINDS: [&str; 8] = [
    "inventory",
    "pstree",
    "files",
    "core-",
    "mm-",
    "fdinfo-",
    "pagemap-",
    "pages-",
];
/// Behaviours of the fake CRIU in which it reports a restore that it has not done, each with a
/// part of the resulting error message.
const FALSE_REPORTS: [(&str, &str); 2] = [
    ("nothing", "let the task run without permission"),
    ("nobody", "no descriptor for process 4194304"),
];

fn ok_or_panic<T>(vm: &Vm<'_>, description: &str, result: anyhow::Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{description}: {error:#}\n{}", vm.events_and_logs()))
}

/// Runs `test` on a virtual machine with hosts h1 to h3, on which a fake CRIU is installed.
fn with_fake_criu(env: &[(&str, &str)], test: impl FnOnce(&Testbed, &Vm<'_>)) {
    let bed = require_testbed_with_env(3, env);
    fake_criu::install(&bed);
    let settings = VmSettings {
        env: VmSettings::owned_env(env),
        ..VmSettings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    test(&bed, &vm);
    vm.halt_and_wait().expect("halts");
}

/// Spawns a task on h2. Waits until the task has written to all of its memory, and until the
/// taskers' engine probes have ended.
fn spawn_ready_task(vm: &Vm<'_>) -> String {
    spawn_ready_task_with(vm, &[])
}

/// As [`spawn_ready_task`], with additional arguments for the task's program.
fn spawn_ready_task_with(vm: &Vm<'_>, extra_args: &[&str]) -> String {
    let tid = ok_or_panic(
        vm,
        "spawn",
        vm.spawn_connected(&[&["-h2", "hold", TASK_MIB], extra_args].concat()),
    );
    check_task_on(vm, &tid, "h2", "at the beginning");
    ok_or_panic(
        vm,
        "the engines work",
        vm.wait_until_migratable(&tid, "h3", TIMEOUT),
    );
    tid
}

/// Checks that a task answers from `host` and that its memory is unchanged.
fn check_task_on(vm: &Vm<'_>, tid: &str, host: &str, description: &str) {
    let mut command = vm.user_command(
        vm.testbed().host(1),
        vm.user_home().join("pvm3/bin/LINUX64/hold"),
    );
    command.args(["ask", tid]);
    let output = ok_or_panic(vm, description, run_successfully(command, TIMEOUT));
    assert!(
        output.stdout.contains("sum GOOD"),
        "{description}: {output:?}\n{}",
        vm.events_and_logs()
    );
    assert_eq!(
        ok_or_panic(vm, description, vm.host_of(tid)),
        host,
        "{description}"
    );
}

/// Waits until no host has images, resume tokens or an engine process, and no host except h2 has a
/// process of the task.
fn wait_until_nothing_remains(vm: &Vm<'_>, description: &str) {
    let wait_result = wait_for(TIMEOUT, || {
        let mut remains = Vec::new();
        for host in vm.testbed().hosts() {
            remains.extend(leftover_names(host));
            let lines = host.processes().into_iter().map(|(_, line)| line);
            let is_copy = |line: &String| host.name() != "h2" && line.contains("LINUX64/hold");
            remains.extend(
                lines.filter(|line| fake_criu::is_engine_command_line(line) || is_copy(line)),
            );
        }
        if remains.is_empty() {
            Ok(())
        } else {
            Err(remains.join(", "))
        }
    });
    ok_or_panic(vm, description, wait_result);
}

/// Returns the step and the reason of each failed migration of a task.
fn failed_migrations(vm: &Vm<'_>, tid: &str) -> Vec<(Step, String)> {
    let events = ok_or_panic(vm, "events", vm.events());
    let step_and_reason = |kind: &EventKind| match kind {
        EventKind::MigrationFailed {
            tid: failed_tid,
            step,
            why,
            ..
        } if failed_tid.to_string() == tid => Some((*step, why.to_string())),
        _ => None,
    };
    events
        .iter()
        .filter_map(|entry| step_and_reason(&entry.kind))
        .collect()
}

/// Migrates a task from h2 to h3. The migration must fail at `step`; the last line on standard
/// error must contain `error_text`. Checks that the task continues on h2 and that no files or
/// other processes remain.
fn check_migration_fails(vm: &Vm<'_>, tid: &str, step: Step, description: &str, error_text: &str) {
    let previous_count = failed_migrations(vm, tid).len();
    let output = ok_or_panic(vm, description, vm.migrate_when_ready(tid, "h3"));
    // The lines before report the progress.
    let last_line = output.stderr.lines().last().unwrap_or_default();
    assert!(
        !output.succeeded() && last_line.contains(error_text),
        "{description}: {output:?}\n{}",
        vm.events_and_logs()
    );
    eprintln!("{description}: {}", output.stderr.trim());
    let recorded_failures = failed_migrations(vm, tid);
    assert!(
        recorded_failures.len() == previous_count + 1
            && recorded_failures[previous_count].0 == step,
        "{description}: {recorded_failures:?}\n{}",
        vm.events_and_logs()
    );
    check_task_on(vm, tid, "h2", description);
    wait_until_nothing_remains(vm, description);
}

/// As [`check_migration_fails`], while the engine on `host` has the behaviour `behaviour`. Checks
/// that the engine was called.
fn check_failing_engine(
    vm: &Vm<'_>,
    tid: &str,
    (host, behaviour): (&str, &str),
    step: Step,
    error_text: &str,
) {
    let description = format!("{behaviour} on {host}");
    set_behaviour(vm.testbed(), host, behaviour);
    check_migration_fails(vm, tid, step, &description, error_text);
    set_behaviour(vm.testbed(), host, "");
    assert!(
        !take_misbehaviours(vm.testbed(), host).is_empty(),
        "{description}: the engine was not called"
    );
}

/// The migrations use no post-copy, so the images contain all memory.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn failing_engine_leaves_task_at_source() {
    let seed = print_seed();
    with_fake_criu(&[POST_COPY_NEVER], |_, vm| {
        let tid = spawn_ready_task(vm);
        for (behaviour, error_text) in sample_cases(FAILING_BEHAVIOURS, 2, seed) {
            check_failing_engine(vm, &tid, ("h2", behaviour), Step::Dump, error_text);
        }
        for kind in sample_cases(IMAGE_KINDS, 2, seed) {
            let behaviour = format!("cut {kind}*.img");
            check_failing_engine(vm, &tid, ("h2", &behaviour), Step::Dump, kind);
        }
        let missing_image_text = "is missing although the engine reported success";
        check_failing_engine(vm, &tid, ("h2", "empty"), Step::Dump, missing_image_text);
        for (behaviour, error_text) in
            sample_cases(FAILING_BEHAVIOURS.into_iter().chain(FALSE_REPORTS), 2, seed)
        {
            check_failing_engine(vm, &tid, ("h3", behaviour), Step::Restore, error_text);
        }
        vm.migrate_or_panic(&tid, "h3");
        check_task_on(vm, &tid, "h3", "in the end");
    });
}

/// The migrations use post-copy. A tasker does not use post-copy for some time after a failure, so
/// each case has new taskers.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn failing_post_copy_engine_leaves_task_at_source() {
    let source_cases = [
        ("silent", "ended without a reply"),
        ("garbage", "is malformed"),
        ("hang", "not done within"),
        ("cut core-*.img", "core-"),
    ];
    let target_cases = [
        ("silent", "ended without a reply"),
        ("hang", "not done within"),
    ];
    let fetch_cases = [("lazy-silent", ""), ("lazy-garbage", ""), ("lazy-hang", "")];
    let seed = print_seed();
    let dump_cases = sample_cases(source_cases, 1, seed).into_iter();
    let restore_cases = sample_cases(target_cases, 1, seed).into_iter();
    let restore_cases = restore_cases.chain(sample_cases(fetch_cases, 1, seed));
    let cases = dump_cases.map(|case| ("h2", Step::Dump, case));
    let cases = cases.chain(restore_cases.map(|case| ("h3", Step::Restore, case)));
    with_fake_criu(&[POST_COPY_ALWAYS], |_, vm| {
        for (host, step, (behaviour, texts)) in cases {
            let tid = spawn_ready_task(vm);
            check_failing_engine(vm, &tid, (host, behaviour), step, texts);
            // The next migration uses no post-copy.
            vm.migrate_or_panic(&tid, "h3");
            check_task_on(vm, &tid, "h3", "afterwards");
            for texts in [
                &["kill", &*tid][..],
                &["delete", "h2", "h3"],
                &["add", "h2", "h3"],
            ] {
                let output = ok_or_panic(vm, behaviour, vm.run_pvm(texts));
                assert!(
                    output.succeeded(),
                    "{texts:?}: {output:?}\n{}",
                    vm.events_and_logs()
                );
            }
        }
    });
}

/// A CRIU that was killed while it wrote its cache of kernel features has left an empty file. The
/// file is removed, the engine's probe writes the cache, and every dump and restore uses it. The
/// cache is the machine's and remains.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn stale_kernel_cache_is_replaced() {
    const CACHE: &str = "/run/criu.kdat";
    let bed = require_testbed_with_own_engine(3);
    fake_criu::install_logger(&bed);
    let long_ago = SystemTime::now() - Duration::from_secs(3600);
    for host in bed.hosts() {
        let stale_file = fs::File::create(host.machine_path(&format!("{CACHE}.tmp")));
        let stale_file = stale_file.expect("writable");
        stale_file.set_modified(long_ago).expect("its owner");
    }
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("they join");
    vm.compile_program("hold").expect("gcc");
    let tid = spawn_ready_task(&vm);
    vm.migrate_or_panic(&tid, "h3");
    vm.migrate_or_panic(&tid, "h2");
    check_task_on(&vm, &tid, "h2", "in the end");
    let logs = fake_criu::engine_logs(&bed);
    // Two migrations, and the probes of their hosts, have a dump and a restore each.
    assert!(logs.len() >= 8, "{logs:?}");
    for log in logs {
        assert!(
            log.contains(&format!("Loaded kdat cache from {CACHE}")),
            "{log}"
        );
    }
    vm.halt_and_wait().expect("halts");
    for host in bed.hosts().iter().skip(1) {
        assert!(host.machine_path(CACHE).exists(), "{}", host.name());
        assert!(!host.machine_path(&format!("{CACHE}.tmp")).exists());
    }
}

/// The first dump is stopped while it writes a file of shared memory, after some images were sent
/// to the target. The repeated dump writes more files.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_arrives_whole_after_a_repeated_dump() {
    with_fake_criu(&[POST_COPY_NEVER], |bed, vm| {
        let tid = spawn_ready_task_with(vm, &["memfd"]);
        // A migration whose engine ends before it is stopped does not count.
        let was_stopped = [(2, "h2", "h3"), (3, "h3", "h2")]
            .into_iter()
            .cycle()
            .take(6)
            .any(|(source_number, source_name, target_name)| {
                set_behaviour(bed, source_name, "stall 1048576");
                vm.migrate_or_panic(&tid, target_name);
                check_task_on(vm, &tid, target_name, "afterwards");
                let log = bed
                    .host(source_number)
                    .machine_path("/tmp/sempa-0/pvm/pvml");
                let repeated_dump_result = wait_for(TIMEOUT, || {
                    let log = fs::read_to_string(&log).map_err(|error| error.to_string())?;
                    let repeated_dump_result = log.lines().rev().find_map(|line| {
                        line.split_once(" bytes on the wire without zeros; ")
                            .map(|(_, rest)| !rest.starts_with("0 "))
                    });
                    repeated_dump_result.ok_or(log)
                });
                ok_or_panic(vm, "what has left", repeated_dump_result)
            });
        assert!(was_stopped, "no engine was stopped in time");
    });
}

/// The engine at the target reports that all memory has arrived although it has not. By then the
/// source's copy is dead, so the task must be ended before it reads zeros.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn memory_reported_too_early_ends_the_task() {
    with_fake_criu(&[POST_COPY_ALWAYS, SLOW_RATE_ENV], |bed, vm| {
        let tid = spawn_ready_task(vm);
        set_behaviour(bed, "h3", "lazy-early");
        let output = ok_or_panic(vm, "migrate", vm.migrate_when_ready(&tid, "h3"));
        assert!(
            output.failed_with_one_sentence(),
            "{output:?}\n{}",
            vm.events_and_logs()
        );
        eprintln!("{}", output.stderr.trim());
        let recorded_failures = failed_migrations(vm, &tid);
        assert!(
            recorded_failures.len() == 1 && recorded_failures[0].0 == Step::Arrive,
            "{recorded_failures:?}\n{}",
            vm.events_and_logs()
        );
        assert!(
            recorded_failures[0]
                .1
                .contains("success although memory is missing"),
            "{recorded_failures:?}"
        );
        let wait_result = wait_for(TIMEOUT, || match vm.tasks() {
            Ok(tasks) if tasks.iter().all(|task| task.tid != tid) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        ok_or_panic(vm, "it has ended", wait_result);
        wait_until_nothing_remains(vm, "lazy-early");
        assert_eq!(take_misbehaviours(bed, "h3"), ["lazy-pages-lazy-early"]);
    });
}

/// If `is_full` is true, limits the file system of a host's daemon to its used size; otherwise
/// enlarges it again.
fn set_disk_full(host: &Host, is_full: bool) {
    let size = if is_full {
        "$(df -k --output=used /tmp | tail -1 | tr -d ' ')k"
    } else {
        "4g"
    };
    let output = host.run_shell(&format!("mount -n -o remount,size={size} /tmp"), TIMEOUT);
    assert!(
        output.as_ref().is_ok_and(CommandResult::succeeded),
        "{output:?}"
    );
}

/// From some step on, the disk of the source, the target or the master is full. Later steps cannot
/// write their files (images, records, resume tokens). No task is lost.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn full_disk_at_any_step_loses_no_task() {
    let bed = require_testbed_with_own_engine(migration_steps::HOST_COUNT);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    let mut faults = MigrationFaults::new(&vm, task_may_be_lost).expect("an oracle");
    let seed = usize::try_from(print_seed()).expect("a seed");
    for (sample_index, disk_owner) in (seed..).zip(["source", "target", "master"]) {
        for points in sampled_points(sample_index) {
            let description = format!("disk of the {disk_owner} full from {points:?} on");
            let held_migrations = ok_or_panic(&vm, &description, faults.start_and_hold(&points));
            let hosts: Vec<&Host> = match disk_owner {
                "source" => held_migrations
                    .iter()
                    .map(|migration| bed.host(migration.source_host))
                    .collect(),
                "target" => held_migrations
                    .iter()
                    .map(|migration| bed.host(migration.target_host))
                    .collect(),
                _ => vec![bed.host(1)],
            };
            hosts.iter().for_each(|host| set_disk_full(host, true));
            ok_or_panic(&vm, &description, faults.resume_daemons(&held_migrations));
            let ended_migrations = ok_or_panic(
                &vm,
                &description,
                faults.wait_for_migration_ends(held_migrations),
            );
            hosts.iter().for_each(|host| set_disk_full(host, false));
            for migration in &ended_migrations {
                let recorded_failures = failed_migrations(&vm, &migration.tid);
                assert!(
                    recorded_failures
                        .iter()
                        .all(|(_, why)| why.lines().count() == 1),
                    "{description}: {recorded_failures:?}"
                );
                eprintln!(
                    "{description}, {:?}: {recorded_failures:?}",
                    migration.point
                );
            }
            let alive_count = ok_or_panic(
                &vm,
                &description,
                faults.check_ended_migrations(ended_migrations, |_| false),
            );
            assert_eq!(alive_count, points.len(), "{description}");
        }
    }
    vm.halt_and_wait().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn full_target_disk_leaves_task_at_source() {
    let bed = require_testbed_with_own_engine(3);
    let env = [("SEMPA_FILES", "copy"), ("PVM_EXPORT", "SEMPA_FILES")]
        .map(|(name, value)| (name.into(), value.into()));
    let vm = Vm::start(
        &bed,
        VmSettings {
            env: env.into(),
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm.compile_program("ring_job").expect("gcc");
    let ring_folder = |host: usize| bed.host(host).machine_path("/tmp/ring");
    fs::create_dir(ring_folder(2)).expect("made");
    let mount_output = bed.host(3).run_shell(
        "mkdir /tmp/ring && mount -t tmpfs -o size=8k none /tmp/ring && ! head -c 9000 /dev/zero >/tmp/ring/filler",
        TIMEOUT,
    );
    assert!(
        mount_output.as_ref().is_ok_and(CommandResult::succeeded),
        "{mount_output:?}"
    );
    let args = [
        "-h2",
        "ring_job",
        "4",
        ENDLESS_ROUND_COUNT,
        "-2000",
        "/tmp/ring",
    ];
    let tid = ok_or_panic(&vm, "spawn", vm.spawn_connected(&args));
    let job = RingJob::from_existing(ring_folder(2), tid);
    job.wait_for_rounds(&vm, 20);
    let output = ok_or_panic(&vm, "migrate", vm.migrate_when_ready(&job.tid, "h3"));
    assert!(
        output.failed_with_one_sentence() && output.stderr.contains("/tmp/ring/log"),
        "{output:?}\n{}",
        vm.events_and_logs()
    );
    eprintln!("{}", output.stderr.trim());
    assert_eq!(ok_or_panic(&vm, "where it is", vm.host_of(&job.tid)), "h2");
    job.wait_for_rounds(&vm, 20);
    wait_until_nothing_remains(&vm, "no room for a file");
    let file_names: Vec<_> = fs::read_dir(ring_folder(3))
        .expect("there")
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert_eq!(file_names, ["filler"]);
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts, CRIU and memory control groups"]
fn a_control_group_without_memory_refuses_the_task() {
    requirements::panic_if_unmet(limits::unmet_memory_requirement());
    let bed = require_testbed_with_own_engine(3);
    // A control group can be removed only when it is empty, so `memory_limit` must be dropped
    // after the testbed.
    let (memory_limit, bed) = (
        limits::HostMemoryCgroup::new(bed.host(3)).expect("a group"),
        bed,
    );
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    let tid = spawn_ready_task(&vm);
    let large_tid = ok_or_panic(&vm, "spawn", vm.spawn_connected(&["-h2", "hold", "160"]));
    check_task_on(&vm, &large_tid, "h2", "at the beginning");
    memory_limit
        .add_host_processes(bed.host(3))
        .expect("all of its processes");
    memory_limit
        .limit_to_current_use_plus(128 << 20)
        .expect("a limit");
    check_migration_fails(&vm, &large_tid, Step::Prepare, "no memory for it", "memory");
    let query_output = ok_or_panic(
        &vm,
        "can-migrate",
        vm.run_pvm(&["can-migrate", &large_tid, "h3"]),
    );
    assert!(
        !query_output.succeeded() && query_output.stdout.contains("memory"),
        "{query_output:?}"
    );
    // The memory suffices for the small task.
    vm.migrate_or_panic(&tid, "h3");
    check_task_on(&vm, &tid, "h3", "the small one");
    memory_limit.remove_memory_limit().expect("no limit");
    vm.migrate_or_panic(&large_tid, "h3");
    check_task_on(&vm, &large_tid, "h3", "the large one");
    vm.halt_and_wait().expect("halts");
}
