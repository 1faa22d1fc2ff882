//! Engines that fail or lie, full disks and short memory during a migration. Each failure is
//! reported in one line, the task continues at the source, and no files or processes remain.
//!
//! A seed chooses some of the cases; with `SEMPA_TEST_FULL=1` all are tried.

use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_tests::fake_criu::{self, behave, take_misbehaved};
use sempa_tests::faults::leftovers;
use sempa_tests::limits;
use sempa_tests::move_steps::{self, MoveFaults, may_be_lost, sampled_points};
use sempa_tests::needs::{self, testbed_with_env, testbed_with_own_engine};
use sempa_tests::ring_job::{ENDLESS, Job};
use sempa_tests::rng::{sample, seed};
use sempa_tests::run::{Done, must};
use sempa_tests::vm::Settings;
use sempa_tests::{Host, Testbed, Vm, eventually};
use std::fs;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
/// Memory of a task, in MiB.
const MIB: &str = "24";
/// What an engine does instead of the request, and words of the error that follows.
const LIES: [(&str, &str); 4] = [
    ("silent", "ended without a reply"),
    ("garbage", "is malformed"),
    ("killed", "killed by signal 9"),
    ("hang", "not done within"),
];
const ALWAYS: (&str, &str) = ("SEMPA_POST_COPY", "always");
const NEVER: (&str, &str) = ("SEMPA_POST_COPY", "never");
/// Bytes per second at which memory takes longer than the engine waits.
const SLOWLY: (&str, &str) = ("SEMPA_MOVE_RATE", "1000000");
/// Kinds of images that are cut in half.
const IMAGES: [&str; 8] = [
    "inventory",
    "pstree",
    "files",
    "core-",
    "mm-",
    "fdinfo-",
    "pagemap-",
    "pages-",
];
/// What an engine reports that has restored nothing, and words of the error that follows.
const CLAIMS: [(&str, &str); 2] = [
    ("nothing", "let the task run without permission"),
    ("nobody", "no descriptor for process 4194304"),
];

fn check<T>(vm: &Vm<'_>, what: &str, done: anyhow::Result<T>) -> T {
    done.unwrap_or_else(|error| panic!("{what}: {error:#}\n{}", vm.logs()))
}

/// Hosts h1 to h3 with the stand-in of CRIU.
fn with_fake_criu(env: &[(&str, &str)], test: impl FnOnce(&Testbed, &Vm<'_>)) {
    let bed = testbed_with_env(3, env);
    fake_criu::install(&bed);
    let settings = Settings {
        env: Settings::env_of(env),
        ..Settings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.program("hold").expect("gcc");
    test(&bed, &vm);
    vm.halt().expect("halts");
}

/// Spawns a task on h2 that has touched its memory. The taskers have tried their engines.
fn a_task(vm: &Vm<'_>) -> String {
    a_task_with(vm, &[])
}

/// As [`a_task`], with additional arguments for the program.
fn a_task_with(vm: &Vm<'_>, more: &[&str]) -> String {
    let tid = check(
        vm,
        "spawn",
        vm.spawn(&[&["-h2", "hold", MIB], more].concat()),
    );
    lives_on(vm, &tid, "h2", "at the beginning");
    let ready = eventually(TIMEOUT, || {
        let asked = vm
            .pvm(&["can-migrate", &tid, "h3"])
            .map_err(|error| error.to_string())?;
        if asked.good() {
            Ok(())
        } else {
            Err(asked.out + &asked.err)
        }
    });
    check(vm, "the engines work", ready);
    tid
}

/// Checks that the task answers from this host, and that its memory is unchanged.
fn lives_on(vm: &Vm<'_>, tid: &str, host: &str, what: &str) {
    let mut command = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
    command.args(["ask", tid]);
    let done = check(vm, what, must(command, TIMEOUT));
    assert!(
        done.out.contains("sum GOOD"),
        "{what}: {done:?}\n{}",
        vm.logs()
    );
    assert_eq!(check(vm, what, vm.host_of(tid)), host, "{what}");
}

/// Waits until no host has images, memory, tokens or an engine, and only h2 has the task.
fn nothing_is_left(vm: &Vm<'_>, what: &str) {
    let clean = eventually(TIMEOUT, || {
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
    check(vm, what, clean);
}

fn failures(vm: &Vm<'_>, tid: &str) -> Vec<(Step, String)> {
    let events = check(vm, "events", vm.events());
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

/// Migrates the task from h2 to h3, which must fail at this step with these words in one line. The
/// task continues at h2, and nothing is left.
fn fails(vm: &Vm<'_>, tid: &str, step: Step, what: &str, words: &str) {
    let before = failures(vm, tid).len();
    let done = check(vm, what, vm.migrate_when_ready(tid, "h3"));
    assert!(
        !done.good() && done.err.lines().count() == 1,
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
    lives_on(vm, tid, "h2", what);
    nothing_is_left(vm, what);
}

/// As [`fails`], with an engine on this host that misbehaves.
fn lie_fails(vm: &Vm<'_>, tid: &str, (host, word): (&str, &str), step: Step, words: &str) {
    let what = format!("{word} on {host}");
    behave(vm.bed(), host, word);
    fails(vm, tid, step, &what, words);
    behave(vm.bed(), host, "");
    assert!(
        !take_misbehaved(vm.bed(), host).is_empty(),
        "{what}: the engine was not called"
    );
}

/// The images contain all memory.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_lying_engine_leaves_the_task_at_the_source() {
    let seed = seed();
    with_fake_criu(&[NEVER], |_, vm| {
        let tid = a_task(vm);
        for (word, words) in sample(LIES, 2, seed) {
            lie_fails(vm, &tid, ("h2", word), Step::Dump, words);
        }
        for kind in sample(IMAGES, 2, seed) {
            let word = format!("cut {kind}*.img");
            lie_fails(vm, &tid, ("h2", &word), Step::Dump, kind);
        }
        let missing = "is missing although the engine reported success";
        lie_fails(vm, &tid, ("h2", "empty"), Step::Dump, missing);
        for (word, words) in sample(LIES.into_iter().chain(CLAIMS), 2, seed) {
            lie_fails(vm, &tid, ("h3", word), Step::Restore, words);
        }
        vm.must_migrate(&tid, "h3");
        lives_on(vm, &tid, "h3", "in the end");
    });
}

/// With post-copy. After a failure a tasker uses no post-copy for a while, so each case has new
/// taskers.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_lying_lazy_engine_leaves_the_task_at_the_source() {
    let at_source = [
        ("silent", "ended without a reply"),
        ("garbage", "is malformed"),
        ("hang", "not done within"),
        ("cut core-*.img", "core-"),
    ];
    let at_target = [
        ("silent", "ended without a reply"),
        ("hang", "not done within"),
    ];
    let fetching = [("lazy-silent", ""), ("lazy-garbage", ""), ("lazy-hang", "")];
    let seed = seed();
    let dumps = sample(at_source, 1, seed).into_iter();
    let restores = sample(at_target, 1, seed).into_iter();
    let restores = restores.chain(sample(fetching, 1, seed));
    let cases = dumps.map(|lie| ("h2", Step::Dump, lie));
    let cases = cases.chain(restores.map(|lie| ("h3", Step::Restore, lie)));
    with_fake_criu(&[ALWAYS], |_, vm| {
        for (host, step, (word, words)) in cases {
            let tid = a_task(vm);
            lie_fails(vm, &tid, (host, word), step, words);
            // The next migration transfers all memory.
            vm.must_migrate(&tid, "h3");
            lives_on(vm, &tid, "h3", "afterwards");
            for words in [
                &["kill", &*tid][..],
                &["delete", "h2", "h3"],
                &["add", "h2", "h3"],
            ] {
                let done = check(vm, word, vm.pvm(words));
                assert!(done.good(), "{words:?}: {done:?}\n{}", vm.logs());
            }
        }
    });
}

/// The first dump gets as far as a file whose memory is not the task's own, and some of its images
/// have left the host. The second dump makes more files.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_arrives_whole_after_a_repeated_dump() {
    with_fake_criu(&[NEVER], |bed, vm| {
        let tid = a_task_with(vm, &["memfd"]);
        // An engine that ends before it is stopped does not count.
        let stalled = [(2, "h2", "h3"), (3, "h3", "h2")]
            .into_iter()
            .cycle()
            .take(6)
            .any(|(source, from, to)| {
                behave(bed, from, "stall 1048576");
                vm.must_migrate(&tid, to);
                lives_on(vm, &tid, to, "afterwards");
                let log = bed.host(source).path("/tmp/sempa-0/pvm/pvml");
                let told = eventually(TIMEOUT, || {
                    let log = fs::read_to_string(&log).map_err(|error| error.to_string())?;
                    let told = log.lines().rev().find_map(|line| {
                        line.split_once(" bytes on the wire without zeros; ")
                            .map(|(_, rest)| !rest.starts_with("0 "))
                    });
                    told.ok_or(log)
                });
                check(vm, "what has left", told)
            });
        assert!(stalled, "no engine was stopped in time");
    });
}

/// An engine reports that all memory has arrived, and it has not. The source's copy is dead by
/// then: the task must end before it reads zeros.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn memory_reported_too_early_ends_the_task() {
    with_fake_criu(&[ALWAYS, SLOWLY], |bed, vm| {
        let tid = a_task(vm);
        behave(bed, "h3", "lazy-early");
        let done = check(vm, "migrate", vm.migrate_when_ready(&tid, "h3"));
        assert!(
            !done.good() && done.err.lines().count() == 1,
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
            told[0].1.contains("success although memory is missing"),
            "{told:?}"
        );
        let gone = eventually(TIMEOUT, || match vm.tasks() {
            Ok(tasks) if tasks.iter().all(|task| task.tid != tid) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        check(vm, "it has ended", gone);
        nothing_is_left(vm, "lazy-early");
        assert_eq!(take_misbehaved(bed, "h3"), ["lazy-pages-lazy-early"]);
    });
}

/// Takes all free room from the file system of a host's daemon, or gives it back.
fn fill(host: &Host, full: bool) {
    let size = if full {
        "$(df -k --output=used /tmp | tail -1 | tr -d ' ')k"
    } else {
        "4g"
    };
    let done = host.shell(&format!("mount -n -o remount,size={size} /tmp"), TIMEOUT);
    assert!(done.as_ref().is_ok_and(Done::good), "{done:?}");
}

/// The disk of the source, the target or the master is full from a step on: whatever the steps
/// write, images, records and tokens, finds no room.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_full_disk_at_any_step_costs_no_task() {
    let bed = testbed_with_own_engine(move_steps::HOSTS);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    let mut faults = MoveFaults::new(&vm, may_be_lost).expect("an oracle");
    let seed = usize::try_from(seed()).expect("a seed");
    for (turn, whose) in (seed..).zip(["source", "target", "master"]) {
        for points in sampled_points(turn) {
            let what = format!("disk of the {whose} full from {points:?} on");
            let moves = check(&vm, &what, faults.hold(&points));
            let hosts: Vec<&Host> = match whose {
                "source" => moves.iter().map(|held| bed.host(held.source)).collect(),
                "target" => moves.iter().map(|held| bed.host(held.target)).collect(),
                _ => vec![bed.host(1)],
            };
            hosts.iter().for_each(|host| fill(host, true));
            check(&vm, &what, faults.resume(&moves));
            let ended = check(&vm, &what, faults.wait_for_end(moves));
            hosts.iter().for_each(|host| fill(host, false));
            for held in &ended {
                let told = failures(&vm, &held.tid);
                assert!(
                    told.iter().all(|(_, why)| why.lines().count() == 1),
                    "{what}: {told:?}"
                );
                eprintln!("{what}, {:?}: {told:?}", held.point);
            }
            let alive = check(&vm, &what, faults.judge_ended(ended, |_| false));
            assert_eq!(alive, points.len(), "{what}");
        }
    }
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_file_without_room_leaves_the_task_at_the_source() {
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
    vm.program("ring_job").expect("gcc");
    let place = |host: usize| bed.host(host).path("/tmp/ring");
    fs::create_dir(place(2)).expect("made");
    let small = bed.host(3).shell(
        "mkdir /tmp/ring && mount -t tmpfs -o size=8k none /tmp/ring && ! head -c 9000 /dev/zero >/tmp/ring/filler",
        TIMEOUT,
    );
    assert!(small.as_ref().is_ok_and(Done::good), "{small:?}");
    let words = ["-h2", "ring_job", "4", ENDLESS, "-2000", "/tmp/ring"];
    let tid = check(&vm, "spawn", vm.spawn(&words));
    let job = Job::at(place(2), tid);
    job.go_on(&vm, 20);
    let done = check(&vm, "migrate", vm.migrate_when_ready(&job.tid, "h3"));
    assert!(
        !done.good() && done.err.lines().count() == 1 && done.err.contains("/tmp/ring/log"),
        "{done:?}\n{}",
        vm.logs()
    );
    eprintln!("{}", done.err.trim());
    assert_eq!(check(&vm, "where it is", vm.host_of(&job.tid)), "h2");
    job.go_on(&vm, 20);
    nothing_is_left(&vm, "no room for a file");
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
    needs::require(limits::lacks_memory());
    let bed = testbed_with_own_engine(3);
    // The group must be dropped after the testbed, when it is empty.
    let (group, bed) = (limits::MemoryLimit::new(bed.host(3)).expect("a group"), bed);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.program("hold").expect("gcc");
    let tid = a_task(&vm);
    let large = check(&vm, "spawn", vm.spawn(&["-h2", "hold", "160"]));
    lives_on(&vm, &large, "h2", "at the beginning");
    group.take_in(bed.host(3)).expect("all of its processes");
    group.leave(128 << 20).expect("a limit");
    fails(&vm, &large, Step::Prepare, "no memory for it", "memory");
    let asked = check(&vm, "can-migrate", vm.pvm(&["can-migrate", &large, "h3"]));
    assert!(!asked.good() && asked.out.contains("memory"), "{asked:?}");
    // There is room for the small task.
    vm.must_migrate(&tid, "h3");
    lives_on(&vm, &tid, "h3", "the small one");
    group.lift().expect("no limit");
    vm.must_migrate(&large, "h3");
    lives_on(&vm, &large, "h3", "the large one");
    vm.halt().expect("halts");
}
