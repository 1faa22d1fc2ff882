//! Engines that fail or report false results, full disks, and too little memory during a migration.
//! Each failure is reported in one line, the task continues at the source, and no files or
//! processes remain.
//!
//! A seed selects some of the cases; with `SEMPA_TEST_FULL=1` all are tried.

use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_tests::fake_criu::{self, set_behaviour, take_misbehaviours};
use sempa_tests::faults::leftovers;
use sempa_tests::limits;
use sempa_tests::migration_steps::{self, MigrationFaults, may_be_lost, sampled_points};
use sempa_tests::requirements::{self, testbed_with_env, testbed_with_own_engine};
use sempa_tests::ring_job::{ENDLESS_ROUNDS, Job};
use sempa_tests::rng::{sample, seed};
use sempa_tests::run::{CommandResult, run_ok};
use sempa_tests::vm::Settings;
use sempa_tests::{Host, Testbed, Vm, wait_for};
use std::fs;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
/// Memory of a task, in MiB.
const TASK_MIB: &str = "24";
/// Command words that make the fake CRIU fail, each with words of the error that follows.
const FAILURES: [(&str, &str); 4] = [
    ("silent", "ended without an answer"),
    ("garbage", "cannot be read"),
    ("killed", "killed by signal 9"),
    ("hang", "not done within"),
];
const POST_COPY_ALWAYS: (&str, &str) = ("SEMPA_POST_COPY", "always");
const POST_COPY_NEVER: (&str, &str) = ("SEMPA_POST_COPY", "never");
/// Transfer rate in bytes per second with which the transfer of the memory exceeds the engine's
/// timeout.
const SLOW_RATE: (&str, &str) = ("SEMPA_MOVE_RATE", "1000000");
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
/// Command words that make the fake CRIU report a restore that it has not done, each with words of
/// the error that follows.
const FALSE_REPORTS: [(&str, &str); 2] = [
    ("nothing", "let the task run without asking"),
    ("nobody", "no descriptor for process 4194304"),
];

fn ok_or_panic<T>(vm: &Vm<'_>, what: &str, done: anyhow::Result<T>) -> T {
    done.unwrap_or_else(|error| panic!("{what}: {error:#}\n{}", vm.logs()))
}

/// Runs `test` on a virtual machine with hosts h1 to h3, on which a fake CRIU is installed.
fn with_fake_criu(env: &[(&str, &str)], test: impl FnOnce(&Testbed, &Vm<'_>)) {
    let bed = testbed_with_env(3, env);
    fake_criu::install(&bed);
    let settings = Settings {
        env: Settings::env_of(env),
        ..Settings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    test(&bed, &vm);
    vm.halt().expect("halts");
}

/// Spawns a task on h2. Waits until the task has written to all of its memory, and until the
/// taskers' engine probes have ended.
fn spawn_task(vm: &Vm<'_>) -> String {
    spawn_task_with(vm, &[])
}

/// As [`spawn_task`], with additional arguments for the task's program.
fn spawn_task_with(vm: &Vm<'_>, more: &[&str]) -> String {
    let tid = ok_or_panic(
        vm,
        "spawn",
        vm.spawn(&[&["-h2", "hold", TASK_MIB], more].concat()),
    );
    check_task_on(vm, &tid, "h2", "at the beginning");
    let ready = wait_for(TIMEOUT, || {
        let asked = vm
            .pvm(&["can-migrate", &tid, "h3"])
            .map_err(|error| error.to_string())?;
        if asked.succeeded() {
            Ok(())
        } else {
            Err(asked.out + &asked.err)
        }
    });
    ok_or_panic(vm, "the engines work", ready);
    tid
}

/// Checks that a task answers from `host` and that its memory is unchanged.
fn check_task_on(vm: &Vm<'_>, tid: &str, host: &str, what: &str) {
    let mut command = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
    command.args(["ask", tid]);
    let done = ok_or_panic(vm, what, run_ok(command, TIMEOUT));
    assert!(
        done.out.contains("sum GOOD"),
        "{what}: {done:?}\n{}",
        vm.logs()
    );
    assert_eq!(ok_or_panic(vm, what, vm.host_of(tid)), host, "{what}");
}

/// Waits until no host has images, resume tokens or an engine process, and only h2 has a process of
/// the task.
fn wait_until_clean(vm: &Vm<'_>, what: &str) {
    let clean = wait_for(TIMEOUT, || {
        let mut left = Vec::new();
        for host in vm.bed().hosts() {
            left.extend(leftovers(host));
            let lines = host.processes().into_iter().map(|(_, line)| line);
            let copy = |line: &String| host.name() != "h2" && line.contains("LINUX64/hold");
            left.extend(lines.filter(|line| fake_criu::is_engine(line) || copy(line)));
        }
        if left.is_empty() {
            Ok(())
        } else {
            Err(left.join(", "))
        }
    });
    ok_or_panic(vm, what, clean);
}

fn failures(vm: &Vm<'_>, tid: &str) -> Vec<(Step, String)> {
    let events = ok_or_panic(vm, "events", vm.events());
    let failure = |kind: &EventKind| match kind {
        EventKind::MigrationFailed {
            tid: of, step, why, ..
        } if of.to_string() == tid => Some((*step, why.to_string())),
        _ => None,
    };
    events
        .iter()
        .filter_map(|entry| failure(&entry.kind))
        .collect()
}

/// Migrates a task from h2 to h3. The migration must fail at `step`, with one line that contains
/// `words`. Checks that the task continues on h2 and nothing else remains.
fn check_migration_fails(vm: &Vm<'_>, tid: &str, step: Step, what: &str, words: &str) {
    let before = failures(vm, tid).len();
    let done = ok_or_panic(vm, what, vm.migrate_when_ready(tid, "h3"));
    assert!(
        !done.succeeded() && done.err.lines().count() == 1,
        "{what}: {done:?}\n{}",
        vm.logs()
    );
    assert!(done.err.contains(words), "{what}: {done:?}\n{}", vm.logs());
    eprintln!("{what}: {}", done.err.trim());
    let told = failures(vm, tid);
    assert!(
        told.len() == before + 1 && told[before].0 == step,
        "{what}: {told:?}\n{}",
        vm.logs()
    );
    check_task_on(vm, tid, "h2", what);
    wait_until_clean(vm, what);
}

/// As [`fails`], with an engine on `host` that fails by the command word `word`.
fn check_failing_engine(
    vm: &Vm<'_>,
    tid: &str,
    (host, word): (&str, &str),
    step: Step,
    words: &str,
) {
    let what = format!("{word} on {host}");
    set_behaviour(vm.bed(), host, word);
    check_migration_fails(vm, tid, step, &what, words);
    set_behaviour(vm.bed(), host, "");
    assert!(
        !take_misbehaviours(vm.bed(), host).is_empty(),
        "{what}: the engine was not called"
    );
}

/// Without post-copy, so the images contain all memory.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn failing_engine_leaves_task_at_source() {
    let seed = seed();
    with_fake_criu(&[POST_COPY_NEVER], |_, vm| {
        let tid = spawn_task(vm);
        for (word, words) in sample(FAILURES, 2, seed) {
            check_failing_engine(vm, &tid, ("h2", word), Step::Dump, words);
        }
        for kind in sample(IMAGE_KINDS, 2, seed) {
            let word = format!("cut {kind}*.img");
            check_failing_engine(vm, &tid, ("h2", &word), Step::Dump, kind);
        }
        let missing = "is missing although the engine said that all was written";
        check_failing_engine(vm, &tid, ("h2", "empty"), Step::Dump, missing);
        for (word, words) in sample(FAILURES.into_iter().chain(FALSE_REPORTS), 2, seed) {
            check_failing_engine(vm, &tid, ("h3", word), Step::Restore, words);
        }
        vm.must_migrate(&tid, "h3");
        check_task_on(vm, &tid, "h3", "in the end");
    });
}

/// With post-copy. A tasker does not use post-copy for some time after a failure, so each case has
/// new taskers.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn failing_post_copy_engine_leaves_task_at_source() {
    let at_source = [
        ("silent", "ended without an answer"),
        ("garbage", "cannot be read"),
        ("hang", "not done within"),
        ("cut core-*.img", "core-"),
    ];
    let at_target = [
        ("silent", "ended without an answer"),
        ("hang", "not done within"),
    ];
    let fetching = [("lazy-silent", ""), ("lazy-garbage", ""), ("lazy-hang", "")];
    let seed = seed();
    let dumps = sample(at_source, 1, seed).into_iter();
    let restores = sample(at_target, 1, seed).into_iter();
    let restores = restores.chain(sample(fetching, 1, seed));
    let cases = dumps.map(|lie| ("h2", Step::Dump, lie));
    let cases = cases.chain(restores.map(|lie| ("h3", Step::Restore, lie)));
    with_fake_criu(&[POST_COPY_ALWAYS], |_, vm| {
        for (host, step, (word, words)) in cases {
            let tid = spawn_task(vm);
            check_failing_engine(vm, &tid, (host, word), step, words);
            // The next migration uses no post-copy.
            vm.must_migrate(&tid, "h3");
            check_task_on(vm, &tid, "h3", "afterwards");
            for words in [
                &["kill", &*tid][..],
                &["delete", "h2", "h3"],
                &["add", "h2", "h3"],
            ] {
                let done = ok_or_panic(vm, word, vm.pvm(words));
                assert!(done.succeeded(), "{words:?}: {done:?}\n{}", vm.logs());
            }
        }
    });
}

/// The first dump is stopped at a file of memory that the task shares, when some images have
/// already been sent to the target. The repeated dump writes more files.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_arrives_whole_after_a_repeated_dump() {
    with_fake_criu(&[POST_COPY_NEVER], |bed, vm| {
        let tid = spawn_task_with(vm, &["memfd"]);
        // A case in which the engine ends before it is stopped does not count.
        let stalled = [(2, "h2", "h3"), (3, "h3", "h2")]
            .into_iter()
            .cycle()
            .take(6)
            .any(|(source, from, to)| {
                set_behaviour(bed, from, "stall 1048576");
                vm.must_migrate(&tid, to);
                check_task_on(vm, &tid, to, "afterwards");
                let log = bed.host(source).machine_path("/tmp/sempa-0/pvm/pvml");
                let told = wait_for(TIMEOUT, || {
                    let log = fs::read_to_string(&log).map_err(|error| error.to_string())?;
                    let told = log.lines().rev().find_map(|line| {
                        line.split_once("in vain before that: ")
                            .map(|(_, n)| n != "0")
                    });
                    told.ok_or(log)
                });
                ok_or_panic(vm, "what has left", told)
            });
        assert!(stalled, "no engine was stopped in time");
    });
}

/// The engine at the target reports that all memory has arrived although it has not. By then the
/// source's copy is dead, so the task must be ended before it reads zeros.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn memory_reported_too_early_ends_the_task() {
    with_fake_criu(&[POST_COPY_ALWAYS, SLOW_RATE], |bed, vm| {
        let tid = spawn_task(vm);
        set_behaviour(bed, "h3", "lazy-early");
        let done = ok_or_panic(vm, "migrate", vm.migrate_when_ready(&tid, "h3"));
        assert!(
            !done.succeeded() && done.err.lines().count() == 1,
            "{done:?}\n{}",
            vm.logs()
        );
        eprintln!("{}", done.err.trim());
        let told = failures(vm, &tid);
        assert!(
            told.len() == 1 && told[0].0 == Step::Arrive,
            "{told:?}\n{}",
            vm.logs()
        );
        assert!(
            told[0].1.contains("as if all memory were there"),
            "{told:?}"
        );
        let gone = wait_for(TIMEOUT, || match vm.tasks() {
            Ok(tasks) if tasks.iter().all(|task| task.tid != tid) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        ok_or_panic(vm, "it has ended", gone);
        wait_until_clean(vm, "lazy-early");
        assert_eq!(take_misbehaviours(bed, "h3"), ["lazy-pages-lazy-early"]);
    });
}

/// Fills the file system of a host's daemon if `full` is true; otherwise makes it usable again.
fn set_disk_full(host: &Host, full: bool) {
    let size = if full {
        "$(df -k --output=used /tmp | tail -1 | tr -d ' ')k"
    } else {
        "4g"
    };
    let done = host.shell(&format!("mount -n -o remount,size={size} /tmp"), TIMEOUT);
    assert!(
        done.as_ref().is_ok_and(CommandResult::succeeded),
        "{done:?}"
    );
}

/// The disk of the source, of the target or of the master becomes full at some step. All files that
/// later steps write (images, records, resume tokens) fail. No task is lost.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn full_disk_at_any_step_loses_no_task() {
    let bed = testbed_with_own_engine(migration_steps::HOST_COUNT);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    let mut faults = MigrationFaults::new(&vm, may_be_lost).expect("an oracle");
    let seed = usize::try_from(seed()).expect("a seed");
    for (turn, whose) in (seed..).zip(["source", "target", "master"]) {
        for points in sampled_points(turn) {
            let what = format!("disk of the {whose} full from {points:?} on");
            let moves = ok_or_panic(&vm, &what, faults.hold(&points));
            let hosts: Vec<&Host> = match whose {
                "source" => moves.iter().map(|held| bed.host(held.source)).collect(),
                "target" => moves.iter().map(|held| bed.host(held.target)).collect(),
                _ => vec![bed.host(1)],
            };
            hosts.iter().for_each(|host| set_disk_full(host, true));
            ok_or_panic(&vm, &what, faults.resume(&moves));
            let ended = ok_or_panic(&vm, &what, faults.wait_for_end(moves));
            hosts.iter().for_each(|host| set_disk_full(host, false));
            for held in &ended {
                let told = failures(&vm, &held.tid);
                assert!(
                    told.iter().all(|(_, why)| why.lines().count() == 1),
                    "{what}: {told:?}"
                );
                eprintln!("{what}, {:?}: {told:?}", held.point);
            }
            let alive = ok_or_panic(&vm, &what, faults.judge_ended(ended, |_| false));
            assert_eq!(alive, points.len(), "{what}");
        }
    }
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn full_target_disk_leaves_task_at_source() {
    let bed = testbed_with_own_engine(3);
    let env = [("SEMPA_FILES", "copy"), ("PVM_EXPORT", "SEMPA_FILES")]
        .map(|(name, value)| (name.into(), value.into()));
    let vm = Vm::start(
        &bed,
        Settings {
            env: env.into(),
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.compile_program("ring_job").expect("gcc");
    let place = |host: usize| bed.host(host).machine_path("/tmp/ring");
    fs::create_dir(place(2)).expect("made");
    let small = bed.host(3).shell(
        "mkdir /tmp/ring && mount -t tmpfs -o size=8k none /tmp/ring && ! head -c 9000 /dev/zero >/tmp/ring/filler",
        TIMEOUT,
    );
    assert!(
        small.as_ref().is_ok_and(CommandResult::succeeded),
        "{small:?}"
    );
    let words = ["-h2", "ring_job", "4", ENDLESS_ROUNDS, "-2000", "/tmp/ring"];
    let tid = ok_or_panic(&vm, "spawn", vm.spawn(&words));
    let job = Job::existing(place(2), tid);
    job.wait_for_rounds(&vm, 20);
    let done = ok_or_panic(&vm, "migrate", vm.migrate_when_ready(&job.tid, "h3"));
    assert!(
        !done.succeeded() && done.err.lines().count() == 1 && done.err.contains("/tmp/ring/log"),
        "{done:?}\n{}",
        vm.logs()
    );
    eprintln!("{}", done.err.trim());
    assert_eq!(ok_or_panic(&vm, "where it is", vm.host_of(&job.tid)), "h2");
    job.wait_for_rounds(&vm, 20);
    wait_until_clean(&vm, "no room for a file");
    let left: Vec<_> = fs::read_dir(place(3))
        .expect("there")
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert_eq!(left, ["filler"]);
    job.finish(&vm);
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts, CRIU and memory control groups"]
fn a_control_group_without_memory_refuses_the_task() {
    requirements::require(limits::lacks_memory());
    let bed = testbed_with_own_engine(3);
    // The control group can be removed only when it is empty, so it must be dropped after the
    // testbed.
    let (group, bed) = (limits::MemoryLimit::new(bed.host(3)).expect("a group"), bed);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    let tid = spawn_task(&vm);
    let large = ok_or_panic(&vm, "spawn", vm.spawn(&["-h2", "hold", "160"]));
    check_task_on(&vm, &large, "h2", "at the beginning");
    group.add_host(bed.host(3)).expect("all of its processes");
    group.limit_above_current_use(128 << 20).expect("a limit");
    check_migration_fails(&vm, &large, Step::Prepare, "no memory for it", "memory");
    let asked = ok_or_panic(&vm, "can-migrate", vm.pvm(&["can-migrate", &large, "h3"]));
    assert!(
        !asked.succeeded() && asked.out.contains("memory"),
        "{asked:?}"
    );
    // The memory suffices for the small task.
    vm.must_migrate(&tid, "h3");
    check_task_on(&vm, &tid, "h3", "the small one");
    group.remove_limit().expect("no limit");
    vm.must_migrate(&large, "h3");
    check_task_on(&vm, &large, "h3", "the large one");
    vm.halt().expect("halts");
}
