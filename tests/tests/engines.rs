//! Migration without CRIU: by a self-checkpoint of the task, or by a restart of its program.

use sempa_proto::event::EventKind;
use sempa_proto::migration::Failure;
use sempa_tests::requirements::{testbed, testbed_with_own_engine};
use sempa_tests::run::run_ok;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the path of the file in which a task stores its counter. All hosts of a testbed share
/// the folder.
fn count_file(vm: &Vm) -> String {
    vm.home().join("again.count").display().to_string()
}

fn exported_engine(engine: &str) -> Vec<(String, String)> {
    let pair = |name: &str, value: &str| (name.to_string(), value.to_string());
    vec![
        pair("SEMPA_ENGINE", engine),
        pair("PVM_EXPORT", "SEMPA_ENGINE"),
    ]
}

/// Runs `test` on a virtual machine of two hosts that have no CRIU. Spawned tasks request the
/// migration engine `engine`.
fn without_criu(engine: &str, test: impl FnOnce(&Vm)) {
    let bed = testbed_with_own_engine(2);
    fs::remove_file(bed.engine().expect("an engine of its own")).expect("removed");
    let vm = Vm::start(
        &bed,
        Settings {
            env: exported_engine(engine),
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    with_two_hosts(&vm, test);
}

fn with_two_hosts(vm: &Vm, test: impl FnOnce(&Vm)) {
    vm.add(&["h2"]).expect("h2 joins");
    vm.compile_program("again").expect("gcc");
    test(vm);
    vm.halt().expect("halts");
}

/// Sends `count` questions to a task. Returns for each answer its number, the number of restarts of
/// the task, and the task's working directory.
fn ask(vm: &Vm, how: &str, tid: &str, count: usize) -> Vec<(u32, u32, String)> {
    let mut command = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/again"));
    command.args([how, tid, &count.to_string()]);
    let done = run_ok(command, TIMEOUT).or_panic_with_logs(vm);
    parse_answers(&done.out)
}

fn parse_answers(out: &str) -> Vec<(u32, u32, String)> {
    let one = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [number, "again", again, "in", place] = words[..] else {
            panic!("{line}")
        };
        (
            number.parse().expect("a number"),
            again.parse().expect("a number"),
            place.to_string(),
        )
    };
    out.lines().map(one).collect()
}

fn numbers(answers: &[(u32, u32, String)]) -> Vec<u32> {
    answers.iter().map(|(number, ..)| *number).collect()
}

fn check_migration(vm: &Vm, tid: &str, host: &str, by: &str) {
    let asked = vm.pvm(&["can-migrate", tid, host]).expect("ends");
    assert!(
        asked.succeeded() && asked.out.contains(&format!("yes, by {by}")),
        "{asked:?}\n{}",
        vm.logs()
    );
    let moved = vm.migrate_when_ready(tid, host).expect("ends");
    assert!(
        moved.succeeded() && moved.out.contains(&format!("migrated to {host} by {by}")),
        "{moved:?}\n{}",
        vm.logs()
    );
    assert_eq!(vm.host_of(tid).expect("alive"), host);
}

fn failure(vm: &Vm) -> Failure {
    let is_it = |kind: &EventKind| matches!(kind, EventKind::MigrationFailed { .. });
    let entry = vm.wait_for_event(TIMEOUT, "failed move", |entry| is_it(&entry.kind));
    match entry.or_panic_with_logs(vm).kind {
        EventKind::MigrationFailed { why, .. } => why,
        other => panic!("{other:?}"),
    }
}

/// Migrates a task with its self-checkpoint to the other host and back. The task's counter
/// continues.
fn check_counter_migrates(vm: &Vm) {
    let file = count_file(vm);
    let place = vm.home().join("place");
    fs::create_dir_all(&place).expect("a folder");
    let tid = vm
        .spawn(&[&format!("-h2:{}", place.display()), "again", &file])
        .expect("spawned");
    assert_eq!(numbers(&ask(vm, "ask", &tid, 3)), [1, 2, 3]);
    check_migration(vm, &tid, "h1", "its own checkpoint");
    let after = ask(vm, "ask", &tid, 2);
    assert_eq!(numbers(&after), [4, 5]);
    assert!(
        after
            .iter()
            .all(|(_, again, dir)| *again == 1 && *dir == place.display().to_string()),
        "{after:?}"
    );
    check_migration(vm, &tid, "h2", "its own checkpoint");
    let after = ask(vm, "ask", &tid, 1);
    assert_eq!((after[0].0, after[0].1), (6, 2));
    let said = vm
        .events()
        .expect("events")
        .into_iter()
        .filter(|entry| matches!(entry.kind, EventKind::MigrationEngine { .. }));
    assert_eq!(said.count(), 2, "\n{}", vm.logs());
    let ended = vm.events().expect("events").into_iter();
    let ended =
        ended.filter(|entry| matches!(&entry.kind, EventKind::TaskEnded { tid: of, .. } if of.to_string() == tid));
    assert_eq!(ended.count(), 0, "it has never ended");
}

/// A task migrates by its self-checkpoint although no host has CRIU.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_migrates_by_self_checkpoint() {
    without_criu("own", check_counter_migrates);
}

/// A program that waits for messages is requested by a message to write its self-checkpoint.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn program_is_asked_to_exit_by_message() {
    without_criu("own:message=77:wait=30", |vm| {
        let tid = vm
            .spawn(&["-h2", "again", &count_file(vm), "waits"])
            .expect("spawned");
        assert_eq!(numbers(&ask(vm, "ask", &tid, 3)), [1, 2, 3]);
        check_migration(vm, &tid, "h1", "its own checkpoint");
        assert_eq!(
            numbers(&ask(vm, "flood", &tid, 20)),
            (4..24).collect::<Vec<u32>>()
        );
        check_migration(vm, &tid, "h2", "its own checkpoint");
        let after = ask(vm, "ask", &tid, 1);
        assert_eq!((after[0].0, after[0].1), (24, 2));
        let said = vm.logs();
        assert_eq!(said.matches("is to write within 30 s").count(), 2, "{said}");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn ordinary_users_task_migrates_by_self_checkpoint() {
    let bed = testbed(2);
    let settings = Settings {
        as_alice: true,
        env: exported_engine("criu,own:signal=USR1:exit=85:wait=30"),
        ..Settings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    with_two_hosts(&vm, |vm| {
        let tid = vm
            .spawn(&["-h2", "again", &count_file(vm)])
            .expect("spawned");
        assert_eq!(numbers(&ask(vm, "ask", &tid, 3)), [1, 2, 3]);
        check_migration(vm, &tid, "h1", "its own checkpoint");
        assert_eq!(numbers(&ask(vm, "ask", &tid, 2)), [4, 5]);
    });
}

/// Questions that are in transit during a migration are answered exactly once, in order.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_moving_task_answers_all_questions_in_order() {
    without_criu("own", |vm| {
        let tid = vm
            .spawn(&["-h2", "again", &count_file(vm)])
            .expect("spawned");
        let mut next = 1;
        for (host, again) in ["h1", "h2", "h1", "h2", "h1", "h2"].into_iter().zip(1..) {
            let mut command =
                vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/again"));
            command.args(["until", &tid, &again.to_string()]);
            let asking =
                sempa_tests::run::RunningCommand::start(command, std::process::Stdio::null())
                    .expect("starts");
            wait_for(TIMEOUT, || match asking.out_so_far() {
                Ok(out) if out.contains('\n') => Ok(()),
                other => Err(format!("nothing has been answered yet: {other:?}")),
            })
            .expect("answers");
            check_migration(vm, &tid, host, "its own checkpoint");
            let done = asking.finish(TIMEOUT).expect("ends");
            assert!(done.succeeded(), "{}\n{}", done.out, vm.logs());
            let answers = parse_answers(&done.out);
            let count = u32::try_from(answers.len()).expect("few");
            assert!(count > 1, "it answered before and after: {}", done.out);
            assert_eq!(
                numbers(&answers),
                (next..next + count).collect::<Vec<u32>>()
            );
            next += count;
        }
        assert_eq!(
            numbers(&ask(vm, "flood", &tid, 100)),
            (next..next + 100).collect::<Vec<u32>>()
        );
    });
}

/// A task migrates by a restart of its program although no host has CRIU.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn restartable_task_migrates_and_starts_over() {
    without_criu("restart:wait=20", |vm| {
        let tid = vm
            .spawn(&["-h2", "again", &count_file(vm), "plain"])
            .expect("spawned");
        assert_eq!(numbers(&ask(vm, "ask", &tid, 3)), [1, 2, 3]);
        check_migration(vm, &tid, "h1", "restart");
        let after = ask(vm, "ask", &tid, 2);
        assert_eq!((numbers(&after), after[0].1), (vec![1, 2], 1));
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_program_that_ignores_the_signal_stays() {
    without_criu("own:wait=1", |vm| {
        let tid = vm
            .spawn(&["-h2", "again", &count_file(vm), "deaf"])
            .expect("spawned");
        assert_eq!(numbers(&ask(vm, "ask", &tid, 3)), [1, 2, 3]);
        let refused = vm.migrate(&tid, "h1").expect("ends");
        assert!(
            !refused.succeeded() && refused.err.contains("asked by signal 10"),
            "{refused:?}"
        );
        assert!(matches!(failure(vm), Failure::Engine(why) if why.contains("within 1 s")));
        let after = ask(vm, "ask", &tid, 2);
        assert_eq!(
            (
                numbers(&after),
                after[0].1,
                vm.host_of(&tid).expect("alive")
            ),
            (vec![4, 5], 0, "h2".to_string())
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn program_that_exits_late_restarts_at_source() {
    without_criu("own:wait=1", |vm| {
        let tid = vm
            .spawn(&["-h2", "again", &count_file(vm), "late"])
            .expect("spawned");
        assert!(!vm.migrate(&tid, "h1").expect("ends").succeeded());
        // The task answers the questions that arrive before it checks its inbox for the last time,
        // and exits. The next question waits for the new process.
        let after = ask(vm, "until", &tid, 1);
        let all: Vec<u32> = (1..=after.len() as u32).collect();
        let (last, before) = after.split_last().expect("an answer at least");
        assert_eq!((numbers(&after), last.1), (all, 1));
        assert!(
            !before.is_empty() && before.iter().all(|(_, again, _)| *again == 0),
            "{after:?}"
        );
        assert_eq!(vm.host_of(&tid).expect("alive"), "h2");
    });
}

/// A program that is killed or exits with another status after the request to exit has ended; it is
/// not restarted.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn program_that_dies_on_request_has_ended() {
    without_criu("own", |vm| {
        for (how, status) in [("other", 3 << 8), ("dies", 9)] {
            let tid = vm
                .spawn(&["-h2", "again", &count_file(vm), how])
                .expect("spawned");
            let refused = vm.migrate(&tid, "h1").expect("ends");
            assert!(
                !refused.succeeded() && refused.err.contains("the task ended"),
                "{refused:?}"
            );
            let is_end = |kind: &EventKind| matches!(kind, EventKind::TaskEnded { tid: of, status: with, .. } if of.to_string() == tid && *with == status);
            vm.wait_for_event(TIMEOUT, "end of the task", |entry| is_end(&entry.kind))
                .or_panic_with_logs(vm);
            wait_for(TIMEOUT, || match vm.tasks() {
                Ok(tasks) if tasks.iter().all(|task| task.tid != tid) => Ok(()),
                other => Err(format!("{tid} is still there: {other:?}")),
            })
            .expect("it is gone");
        }
    });
}

/// A host without the program or the working directory refuses the task. A program with a wrong
/// setting is not started.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn missing_programs_and_wrong_settings_are_named() {
    without_criu("own", |vm| {
        let local = vm.bed().host(2).machine_path("/tmp").join("only-here");
        fs::create_dir_all(&local).expect("a folder");
        let tid = vm
            .spawn(&["-h2:/tmp/only-here", "again", &count_file(vm)])
            .expect("spawned");
        let asked = vm.pvm(&["can-migrate", &tid]).expect("ends");
        assert!(
            asked
                .out
                .contains("/tmp/only-here: this host has no such directory"),
            "{asked:?}"
        );
        let refused = vm.migrate(&tid, "h1").expect("ends");
        assert!(
            !refused.succeeded() && refused.err.contains("no such directory"),
            "{refused:?}"
        );
        assert_eq!(
            numbers(&ask(vm, "ask", &tid, 1)),
            [1],
            "it was not even asked"
        );
        let none = vm.pvm(&["checkpoint", &tid]).expect("ends");
        assert!(
            !none.succeeded() && none.err.contains("SEMPA_STATE"),
            "{none:?}"
        );
        let mut bad = vm.command(
            vm.bed().host(1),
            vm.bed().prefix().expect("programs").join("bin/pvm"),
        );
        bad.env("SEMPA_ENGINE", "own:signal=KILL")
            .args(["spawn", "-h2", "again"]);
        let bad = sempa_tests::run::run(bad, TIMEOUT).expect("ends");
        let said = format!("{}{}", bad.out, bad.err);
        assert!(
            said.contains("\"own:signal=KILL\" is not understood")
                || said.contains("Bad parameter"),
            "{bad:?}"
        );
    });
}
