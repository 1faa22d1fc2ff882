//! Engines that fail or lie, disks that are full and memory that is short while a task is moved: one plain sentence each, the task
//! goes on where it was, and nothing is left behind.

use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_tests::fake_criu::{self, behave, take_misbehaved};
use sempa_tests::limits;
use sempa_tests::move_steps::{self, MoveFaults, may_be_lost, sampled_points};
use sempa_tests::needs::{self, testbed_with_env, testbed_with_own_engine};
use sempa_tests::ring_job::Job;
use sempa_tests::rng::seed;
use sempa_tests::run::{Done, must};
use sempa_tests::vm::Settings;
use sempa_tests::{Host, Testbed, Vm, eventually};
use std::fs;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(120);
/// Memory of a task; so much follows it where that is possible and not forbidden.
const MIB: &str = "24";
/// What an engine that does not carry out a request may do instead, and a word of the sentence that follows from it.
const LIES: [(&str, &str); 4] = [
    ("silent", "ended without an answer"),
    ("garbage", "cannot be read"),
    ("killed", "killed by signal 9"),
    ("hang", "not done within"),
];
const ALWAYS: (&str, &str) = ("SEMPA_POST_COPY", "always");
const NEVER: (&str, &str) = ("SEMPA_POST_COPY", "never");
/// So slowly, in bytes per second, that memory is on its way for longer than the engine bears with it.
const SLOWLY: (&str, &str) = ("SEMPA_MOVE_RATE", "1000000");
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
/// What an engine may say that has built nothing, and what is said of it.
const CLAIMS: [(&str, &str); 2] = [
    ("nothing", "let the task run without asking"),
    ("nobody", "no descriptor for process 4194304"),
];

fn check<T>(vm: &Vm<'_>, what: &str, done: anyhow::Result<T>) -> T {
    done.unwrap_or_else(|error| panic!("{what}: {error:#}\n{}", vm.logs()))
}

/// Hosts h1 to h3 with an engine that lies when it is told to.
fn with_liars(env: &[(&str, &str)], test: impl FnOnce(&Testbed, &Vm<'_>)) {
    let bed = testbed_with_env(3, env);
    fake_criu::install(&bed);
    let env = env
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    let vm = Vm::start(
        &bed,
        Settings {
            env,
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.program("hold").expect("gcc");
    test(&bed, &vm);
    vm.halt().expect("halts");
}

/// A task on h2 that has its memory. What a tasker tries its engine with when it starts is over.
fn a_task(vm: &Vm<'_>) -> String {
    a_task_with(vm, &[])
}

/// The same, with this to hold besides.
fn a_task_with(vm: &Vm<'_>, more: &[&str]) -> String {
    let tid = check(
        vm,
        "spawn",
        vm.spawn(&[&["-h2", "hold", MIB], more].concat()),
    );
    lives_on(vm, &tid, "h2", "at the beginning");
    let ready = eventually(LONG, || {
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

/// The task answers, and its memory is what it was.
fn lives_on(vm: &Vm<'_>, tid: &str, host: &str, what: &str) {
    let mut command = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
    command.args(["ask", tid]);
    let done = check(vm, what, must(command, SOON));
    assert!(
        done.out.contains("sum GOOD"),
        "{what}: {done:?}\n{}",
        vm.logs()
    );
    assert_eq!(check(vm, what, vm.host_of(tid)), host, "{what}");
}

/// No host has images, memory, tokens or an engine, and only h2 has the task.
fn nothing_is_left(vm: &Vm<'_>, what: &str) {
    let clean = eventually(LONG, || {
        let mut left = Vec::new();
        for host in vm.bed().hosts() {
            for entry in fs::read_dir(host.path("/tmp/sempa-0/pvm"))
                .into_iter()
                .flatten()
                .flatten()
            {
                let name = entry.file_name().to_string_lossy().into_owned();
                let ours = ["images-", "memory-", "resume-", ".tmp-"]
                    .iter()
                    .any(|begin| name.starts_with(begin));
                left.extend(ours.then(|| format!("{name} on {}", host.name())));
            }
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

/// A move from h2 to h3 that has to fail at this step with these words in one sentence; the task goes on at h2, and nothing is left.
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

/// The same with an engine on this host that lies.
fn lie_fails(vm: &Vm<'_>, tid: &str, (host, word): (&str, &str), step: Step, words: &str) {
    let what = format!("{word} on {host}");
    behave(vm.bed(), host, word);
    fails(vm, tid, step, &what, words);
    behave(vm.bed(), host, "");
    assert!(
        !take_misbehaved(vm.bed(), host).is_empty(),
        "{what}: nobody has asked it"
    );
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_engine_that_lies_at_either_end_of_a_move_leaves_the_task_where_it_was() {
    with_liars(&[NEVER], |_, vm| {
        let tid = a_task(vm);
        for (word, words) in LIES {
            lie_fails(vm, &tid, ("h2", word), Step::Dump, words);
        }
        for kind in IMAGES {
            lie_fails(
                vm,
                &tid,
                ("h2", &format!("cut {kind}*.img")),
                Step::Dump,
                kind,
            );
        }
        lie_fails(
            vm,
            &tid,
            ("h2", "empty"),
            Step::Dump,
            "is missing although the engine said that all was written",
        );
        for (word, words) in LIES.into_iter().chain(CLAIMS) {
            lie_fails(vm, &tid, ("h3", word), Step::Restore, words);
        }
        vm.must_migrate(&tid, "h3");
        lives_on(vm, &tid, "h3", "in the end");
    });
}

/// After a failure a tasker has tasks take their memory along for a while: each lie meets taskers that have known none.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_engine_that_lies_where_memory_is_to_follow_leaves_the_task_where_it_was() {
    with_liars(&[ALWAYS], |_, vm| {
        let at_source = [
            ("silent", "ended without an answer"),
            ("garbage", "cannot be read"),
            ("hang", "not done within"),
        ];
        let at_source = at_source.into_iter().chain([("cut core-*.img", "core-")]);
        let at_target = [
            ("silent", "ended without an answer"),
            ("hang", "not done within"),
        ];
        let fetching = [("lazy-silent", ""), ("lazy-garbage", ""), ("lazy-hang", "")];
        let all = at_source.map(|lie| ("h2", Step::Dump, lie));
        let all = all.chain(
            at_target
                .into_iter()
                .chain(fetching)
                .map(|lie| ("h3", Step::Restore, lie)),
        );
        for (host, step, (word, words)) in all {
            let tid = a_task(vm);
            lie_fails(vm, &tid, (host, word), step, words);
            // What it takes along is all that it has.
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

/// The first dump gets as far as a file of the memory that is not the task's own, and the second one makes more files.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_whose_dump_is_begun_anew_when_images_of_it_have_left_already_arrives_whole() {
    with_liars(&[("SEMPA_POST_COPY", "never")], |bed, vm| {
        let tid = a_task_with(vm, &["memfd"]);
        // An engine that is done before it is stopped is no such engine.
        let stalled = [(2, "h2", "h3"), (3, "h3", "h2")]
            .into_iter()
            .cycle()
            .take(6)
            .any(|(source, from, to)| {
                behave(bed, from, "stall 1048576");
                vm.must_migrate(&tid, to);
                lives_on(vm, &tid, to, "afterwards");
                let log = bed.host(source).path("/tmp/sempa-0/pvm/pvml");
                let told = eventually(SOON, || {
                    let log = fs::read_to_string(&log).map_err(|error| error.to_string())?;
                    let told = log.lines().rev().find_map(|line| {
                        line.split_once("in vain before that: ")
                            .map(|(_, n)| n != "0")
                    });
                    told.ok_or(log)
                });
                check(vm, "what has left", told)
            });
        assert!(stalled, "no engine was stopped in time");
    });
}

/// The source's copy is dead by then: this is the end of a task whose memory does not come.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_engine_that_says_too_early_that_all_memory_is_there_ends_the_task_before_it_could_find_zeros()
{
    with_liars(&[ALWAYS, SLOWLY], |bed, vm| {
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
            told[0].1.contains("as if all memory were there"),
            "{told:?}"
        );
        let gone = eventually(SOON, || match vm.tasks() {
            Ok(tasks) if tasks.iter().all(|task| task.tid != tid) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        check(vm, "it has ended", gone);
        nothing_is_left(vm, "lazy-early");
        assert_eq!(take_misbehaved(bed, "h3"), ["lazy-pages-lazy-early"]);
    });
}

/// The file system of a host's daemon has no room for another page, or has what it had.
fn fill(host: &Host, full: bool) {
    let size = if full {
        "$(df -k --output=used /tmp | tail -1 | tr -d ' ')k"
    } else {
        "4g"
    };
    let done = host.shell(&format!("mount -n -o remount,size={size} /tmp"), SOON);
    assert!(done.as_ref().is_ok_and(Done::good), "{done:?}");
}

/// Each step that there is, so that what is written in each of them, images, records and tokens, meets a full disk.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_disk_that_is_full_from_whatever_step_on_at_either_end_or_at_the_master_costs_no_task() {
    let bed = testbed_with_own_engine(move_steps::HOSTS);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    let mut rounds = MoveFaults::new(&vm, may_be_lost).expect("an oracle");
    let seed = usize::try_from(seed()).expect("a seed");
    for (turn, whose) in (seed..).zip(["source", "target", "master"]) {
        for group in sampled_points(turn) {
            let what = format!("disk of the {whose} full from {group:?} on");
            let cells = check(&vm, &what, rounds.hold(&group));
            let hosts: Vec<&Host> = match whose {
                "source" => cells.iter().map(|cell| bed.host(cell.source)).collect(),
                "target" => cells.iter().map(|cell| bed.host(cell.target)).collect(),
                _ => vec![bed.host(1)],
            };
            hosts.iter().for_each(|host| fill(host, true));
            check(&vm, &what, rounds.resume(&cells));
            let ended = check(&vm, &what, rounds.wait_for_end(cells));
            hosts.iter().for_each(|host| fill(host, false));
            for cell in &ended {
                let told = failures(&vm, &cell.tid);
                assert!(
                    told.iter().all(|(_, why)| why.lines().count() == 1),
                    "{what}: {told:?}"
                );
                eprintln!("{what}, {:?}: {told:?}", cell.point);
            }
            let alive = check(&vm, &what, rounds.judge_ended(ended, |_| false));
            assert_eq!(alive, group.len(), "{what}");
        }
    }
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_file_that_goes_along_and_has_no_room_at_the_target_leaves_the_task_where_it_was() {
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
        SOON,
    );
    assert!(small.as_ref().is_ok_and(Done::good), "{small:?}");
    let words = ["-h2", "ring_job", "4", "600", "2000", "/tmp/ring"];
    let tid = check(&vm, "spawn", vm.spawn(&words));
    let job = Job::at(place(2), 600, tid);
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
fn a_host_whose_control_group_has_no_memory_for_a_task_does_not_take_it_and_says_so() {
    needs::require(limits::lacks_memory());
    let bed = testbed_with_own_engine(3);
    // It goes after the testbed: it is empty then.
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
    // There is room for the small one.
    vm.must_migrate(&tid, "h3");
    lives_on(&vm, &tid, "h3", "the small one");
    group.lift().expect("no limit");
    vm.must_migrate(&large, "h3");
    lives_on(&vm, &large, "h3", "the large one");
    vm.halt().expect("halts");
}
