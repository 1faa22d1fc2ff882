//! Migration without CRIU: by a self-checkpoint of the task, or by a restart of its program.

use sempa_proto::event::EventKind;
use sempa_proto::migration::Failure;
use sempa_tests::requirements::{require_testbed, require_testbed_with_own_engine};
use sempa_tests::run::run_successfully;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the path of the file in which a task stores its counter. All hosts of a testbed share
/// the folder of this file.
fn counter_file_path(vm: &Vm) -> String {
    vm.user_home().join("again.count").display().to_string()
}

fn engine_env(engine: &str) -> Vec<(String, String)> {
    let pair = |name: &str, value: &str| (name.to_string(), value.to_string());
    vec![
        pair("SEMPA_ENGINE", engine),
        pair("PVM_EXPORT", "SEMPA_ENGINE"),
    ]
}

/// Runs `test` on a virtual machine of two hosts that have no CRIU. Spawned tasks request the
/// migration engine `engine`.
fn with_hosts_without_criu(engine: &str, test: impl FnOnce(&Vm)) {
    let bed = require_testbed_with_own_engine(2);
    fs::remove_file(bed.engine().expect("an engine of its own")).expect("removed");
    let vm = Vm::start(
        &bed,
        VmSettings {
            env: engine_env(engine),
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    with_two_hosts(&vm, test);
}

fn with_two_hosts(vm: &Vm, test: impl FnOnce(&Vm)) {
    vm.add_hosts(&["h2"]).expect("h2 joins");
    vm.compile_program("again").expect("gcc");
    test(vm);
    vm.halt_and_wait().expect("halts");
}

/// Asks a task questions with the program `again` in the mode `mode`. In the modes `ask` and
/// `flood`, `count` is the number of questions; in the mode `until`, the number of restarts at
/// which the program stops. Returns for each answer its number, the number of restarts of the task,
/// and the task's working directory.
fn ask_questions(vm: &Vm, mode: &str, tid: &str, count: usize) -> Vec<(u32, u32, String)> {
    let mut command = vm.user_command(
        vm.testbed().host(1),
        vm.user_home().join("pvm3/bin/LINUX64/again"),
    );
    command.args([mode, tid, &count.to_string()]);
    let output = run_successfully(command, TIMEOUT).or_panic_with_logs(vm);
    parse_answers(&output.stdout)
}

fn parse_answers(out: &str) -> Vec<(u32, u32, String)> {
    let parse_answer = |line: &str| {
        let tokens: Vec<&str> = line.split(' ').collect();
        let [number, "again", restart_count, "in", folder] = tokens[..] else {
            panic!("{line}")
        };
        (
            number.parse().expect("a number"),
            restart_count.parse().expect("a number"),
            folder.to_string(),
        )
    };
    out.lines().map(parse_answer).collect()
}

fn answer_numbers(answers: &[(u32, u32, String)]) -> Vec<u32> {
    answers.iter().map(|(number, ..)| *number).collect()
}

fn migrate_and_check(vm: &Vm, tid: &str, host: &str, engine_name: &str) {
    let query_output = vm.run_pvm(&["can-migrate", tid, host]).expect("ends");
    assert!(
        query_output.succeeded()
            && query_output
                .stdout
                .contains(&format!("yes, by {engine_name}")),
        "{query_output:?}\n{}",
        vm.events_and_logs()
    );
    let migrate_output = vm.migrate_when_ready(tid, host).expect("ends");
    assert!(
        migrate_output.succeeded()
            && migrate_output
                .stdout
                .contains(&format!("migrated to {host} by {engine_name}")),
        "{migrate_output:?}\n{}",
        vm.events_and_logs()
    );
    assert_eq!(vm.host_of(tid).expect("alive"), host);
}

fn wait_for_migration_failure(vm: &Vm) -> Failure {
    let is_failure = |kind: &EventKind| matches!(kind, EventKind::MigrationFailed { .. });
    let entry = vm.wait_for_event(TIMEOUT, "failed move", |entry| is_failure(&entry.kind));
    match entry.or_panic_with_logs(vm).kind {
        EventKind::MigrationFailed { why, .. } => why,
        other => panic!("{other:?}"),
    }
}

/// Migrates a task with its self-checkpoint to the other host and back. The task's counter
/// continues.
fn check_counter_migrates(vm: &Vm) {
    let counter_path = counter_file_path(vm);
    let folder = vm.user_home().join("place");
    fs::create_dir_all(&folder).expect("a folder");
    let tid = vm
        .spawn_connected(&[&format!("-h2:{}", folder.display()), "again", &counter_path])
        .expect("spawned");
    assert_eq!(
        answer_numbers(&ask_questions(vm, "ask", &tid, 3)),
        [1, 2, 3]
    );
    migrate_and_check(vm, &tid, "h1", "its own checkpoint");
    let answers = ask_questions(vm, "ask", &tid, 2);
    assert_eq!(answer_numbers(&answers), [4, 5]);
    assert!(
        answers
            .iter()
            .all(|(_, restart_count, dir)| *restart_count == 1
                && *dir == folder.display().to_string()),
        "{answers:?}"
    );
    migrate_and_check(vm, &tid, "h2", "its own checkpoint");
    let answers = ask_questions(vm, "ask", &tid, 1);
    assert_eq!((answers[0].0, answers[0].1), (6, 2));
    let engine_events = vm
        .events()
        .expect("events")
        .into_iter()
        .filter(|entry| matches!(entry.kind, EventKind::MigrationEngine { .. }));
    assert_eq!(engine_events.count(), 2, "\n{}", vm.events_and_logs());
    let end_events = vm.events().expect("events").into_iter();
    let end_events =
        end_events.filter(|entry| matches!(&entry.kind, EventKind::TaskEnded { tid: ended_tid, .. } if ended_tid.to_string() == tid));
    assert_eq!(end_events.count(), 0, "it has never ended");
}

/// A task migrates by its self-checkpoint although no host has CRIU.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_migrates_by_self_checkpoint() {
    with_hosts_without_criu("own", check_counter_migrates);
}

/// With `message=77` in the engine setting, the daemon requests the self-checkpoint by a message,
/// because the program waits for messages.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn program_is_asked_to_exit_by_message() {
    with_hosts_without_criu("own:message=77:wait=30", |vm| {
        let tid = vm
            .spawn_connected(&["-h2", "again", &counter_file_path(vm), "waits"])
            .expect("spawned");
        assert_eq!(
            answer_numbers(&ask_questions(vm, "ask", &tid, 3)),
            [1, 2, 3]
        );
        migrate_and_check(vm, &tid, "h1", "its own checkpoint");
        assert_eq!(
            answer_numbers(&ask_questions(vm, "flood", &tid, 20)),
            (4..24).collect::<Vec<u32>>()
        );
        migrate_and_check(vm, &tid, "h2", "its own checkpoint");
        let answers = ask_questions(vm, "ask", &tid, 1);
        assert_eq!((answers[0].0, answers[0].1), (24, 2));
        let logs = vm.events_and_logs();
        assert_eq!(logs.matches("is to write within 30 s").count(), 2, "{logs}");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn ordinary_users_task_migrates_by_self_checkpoint() {
    let bed = require_testbed(2);
    let settings = VmSettings {
        runs_as_alice: true,
        env: engine_env("criu,own:signal=USR1:exit=85:wait=30"),
        ..VmSettings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    with_two_hosts(&vm, |vm| {
        let tid = vm
            .spawn_connected(&["-h2", "again", &counter_file_path(vm)])
            .expect("spawned");
        assert_eq!(
            answer_numbers(&ask_questions(vm, "ask", &tid, 3)),
            [1, 2, 3]
        );
        migrate_and_check(vm, &tid, "h1", "its own checkpoint");
        assert_eq!(answer_numbers(&ask_questions(vm, "ask", &tid, 2)), [4, 5]);
    });
}

/// Questions that are in transit during a migration are answered exactly once, in order.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_moving_task_answers_all_questions_in_order() {
    with_hosts_without_criu("own", |vm| {
        let tid = vm
            .spawn_connected(&["-h2", "again", &counter_file_path(vm)])
            .expect("spawned");
        let mut next_number = 1;
        for (host, restart_count) in ["h1", "h2", "h1", "h2", "h1", "h2"].into_iter().zip(1..) {
            let mut command = vm.user_command(
                vm.testbed().host(1),
                vm.user_home().join("pvm3/bin/LINUX64/again"),
            );
            command.args(["until", &tid, &restart_count.to_string()]);
            let questioner =
                sempa_tests::run::RunningCommand::start(command, std::process::Stdio::null())
                    .expect("starts");
            wait_for(TIMEOUT, || match questioner.stdout_so_far() {
                Ok(out) if out.contains('\n') => Ok(()),
                other => Err(format!("nothing has been answered yet: {other:?}")),
            })
            .expect("answers");
            migrate_and_check(vm, &tid, host, "its own checkpoint");
            let output = questioner.wait_or_kill(TIMEOUT).expect("ends");
            assert!(
                output.succeeded(),
                "{}\n{}",
                output.stdout,
                vm.events_and_logs()
            );
            let answers = parse_answers(&output.stdout);
            let answer_count = u32::try_from(answers.len()).expect("few");
            assert!(
                answer_count > 1,
                "it answered before and after: {}",
                output.stdout
            );
            assert_eq!(
                answer_numbers(&answers),
                (next_number..next_number + answer_count).collect::<Vec<u32>>()
            );
            next_number += answer_count;
        }
        assert_eq!(
            answer_numbers(&ask_questions(vm, "flood", &tid, 100)),
            (next_number..next_number + 100).collect::<Vec<u32>>()
        );
    });
}

/// A task migrates by a restart of its program although no host has CRIU. The task's counter starts
/// at 1 again.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn restartable_task_migrates_and_starts_over() {
    with_hosts_without_criu("restart:wait=20", |vm| {
        let tid = vm
            .spawn_connected(&["-h2", "again", &counter_file_path(vm), "plain"])
            .expect("spawned");
        assert_eq!(
            answer_numbers(&ask_questions(vm, "ask", &tid, 3)),
            [1, 2, 3]
        );
        migrate_and_check(vm, &tid, "h1", "restart");
        let answers = ask_questions(vm, "ask", &tid, 2);
        assert_eq!((answer_numbers(&answers), answers[0].1), (vec![1, 2], 1));
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_program_that_ignores_the_signal_stays() {
    with_hosts_without_criu("own:wait=1", |vm| {
        let tid = vm
            .spawn_connected(&["-h2", "again", &counter_file_path(vm), "deaf"])
            .expect("spawned");
        assert_eq!(
            answer_numbers(&ask_questions(vm, "ask", &tid, 3)),
            [1, 2, 3]
        );
        let refused_output = vm.migrate(&tid, "h1").expect("ends");
        assert!(
            !refused_output.succeeded() && refused_output.stderr.contains("asked by signal 10"),
            "{refused_output:?}"
        );
        assert!(
            matches!(wait_for_migration_failure(vm), Failure::Engine(why) if why.contains("within 1 s"))
        );
        let answers = ask_questions(vm, "ask", &tid, 2);
        assert_eq!(
            (
                answer_numbers(&answers),
                answers[0].1,
                vm.host_of(&tid).expect("alive")
            ),
            (vec![4, 5], 0, "h2".to_string())
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn program_that_exits_late_restarts_at_source() {
    with_hosts_without_criu("own:wait=1", |vm| {
        let tid = vm
            .spawn_connected(&["-h2", "again", &counter_file_path(vm), "late"])
            .expect("spawned");
        assert!(!vm.migrate(&tid, "h1").expect("ends").succeeded());
        // The task answers all questions that arrive before its last check of the inbox, and then
        // exits. The next question waits for the new process.
        let answers = ask_questions(vm, "until", &tid, 1);
        let expected_numbers: Vec<u32> = (1..=answers.len() as u32).collect();
        let (last_answer, earlier_answers) = answers.split_last().expect("an answer at least");
        assert_eq!(
            (answer_numbers(&answers), last_answer.1),
            (expected_numbers, 1)
        );
        assert!(
            !earlier_answers.is_empty()
                && earlier_answers
                    .iter()
                    .all(|(_, restart_count, _)| *restart_count == 0),
            "{answers:?}"
        );
        assert_eq!(vm.host_of(&tid).expect("alive"), "h2");
    });
}

/// After the request to exit, a program is killed or exits with an unexpected status. The program
/// is not restarted, and its task has ended.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn program_that_dies_on_request_has_ended() {
    with_hosts_without_criu("own", |vm| {
        for (mode, status) in [("other", 3 << 8), ("dies", 9)] {
            let tid = vm
                .spawn_connected(&["-h2", "again", &counter_file_path(vm), mode])
                .expect("spawned");
            let refused_output = vm.migrate(&tid, "h1").expect("ends");
            assert!(
                !refused_output.succeeded() && refused_output.stderr.contains("the task ended"),
                "{refused_output:?}"
            );
            let is_end = |kind: &EventKind| matches!(kind, EventKind::TaskEnded { tid: ended_tid, status: end_status, .. } if ended_tid.to_string() == tid && *end_status == status);
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

/// A host without the program or the working directory refuses the task. A checkpoint of a task
/// without the setting `SEMPA_STATE` is refused. A program with a wrong engine setting is not
/// started.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn missing_programs_and_wrong_settings_are_named() {
    with_hosts_without_criu("own", |vm| {
        let local_folder = vm.testbed().host(2).machine_path("/tmp").join("only-here");
        fs::create_dir_all(&local_folder).expect("a folder");
        let tid = vm
            .spawn_connected(&["-h2:/tmp/only-here", "again", &counter_file_path(vm)])
            .expect("spawned");
        let query_output = vm.run_pvm(&["can-migrate", &tid]).expect("ends");
        assert!(
            query_output
                .stdout
                .contains("/tmp/only-here: this host has no such directory"),
            "{query_output:?}"
        );
        let refused_output = vm.migrate(&tid, "h1").expect("ends");
        assert!(
            !refused_output.succeeded() && refused_output.stderr.contains("no such directory"),
            "{refused_output:?}"
        );
        assert_eq!(
            answer_numbers(&ask_questions(vm, "ask", &tid, 1)),
            [1],
            "it was not even asked"
        );
        let checkpoint_output = vm.run_pvm(&["checkpoint", &tid]).expect("ends");
        assert!(
            !checkpoint_output.succeeded() && checkpoint_output.stderr.contains("SEMPA_STATE"),
            "{checkpoint_output:?}"
        );
        let mut wrong_spawn = vm.user_command(
            vm.testbed().host(1),
            vm.testbed().prefix().expect("programs").join("bin/pvm"),
        );
        wrong_spawn
            .env("SEMPA_ENGINE", "own:signal=KILL")
            .args(["spawn", "-h2", "again"]);
        let wrong_spawn = sempa_tests::run::run_to_end(wrong_spawn, TIMEOUT).expect("ends");
        let spawn_message = format!("{}{}", wrong_spawn.stdout, wrong_spawn.stderr);
        assert!(
            spawn_message.contains("\"own:signal=KILL\" is not understood")
                || spawn_message.contains("Bad parameter"),
            "{wrong_spawn:?}"
        );
    });
}
