//! Placement queries and drains. A placement query returns the hosts that would accept a task. All
//! tasks migrate off a drained host, which stays empty until `undrain`.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::event::EventKind;
use sempa_proto::table::TASK_CONNECTED;
use sempa_tests::requirements::require_testbed_with_env;
use sempa_tests::run::{CommandResult, RunningCommand, run_successfully};
use sempa_tests::testbed::wait_until_no_process;
use sempa_tests::vm::{EventEntry, VmSettings};
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

fn with_three_hosts(rm: Option<&str>, test: impl FnOnce(&Vm)) {
    with_three_hosts_and_env(&[], rm, test);
}

/// Runs `test` on a virtual machine of three hosts with the environment variables `env`. `rm` is
/// the command that starts the resource manager; without it there is no resource manager.
fn with_three_hosts_and_env(env: &[(&str, &str)], rm: Option<&str>, test: impl FnOnce(&Vm)) {
    let bed = require_testbed_with_env(3, env);
    let settings = VmSettings {
        rm_command: rm.map(String::from),
        env: VmSettings::owned_env(env),
        ..VmSettings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    test(&vm);
    vm.halt_and_wait().expect("halts");
}

fn run_pvm(vm: &Vm, args: &[&str]) -> CommandResult {
    vm.run_pvm(args).or_panic_with_logs(vm)
}

/// Checks that a task answers and that its memory is unchanged.
fn check_memory(vm: &Vm, tid: &str) {
    let mut command = vm.user_command(
        vm.testbed().host(1),
        vm.user_home().join("pvm3/bin/LINUX64/hold"),
    );
    command.args(["ask", tid]);
    let output = run_successfully(command, TIMEOUT).or_panic_with_logs(vm);
    assert!(output.stdout.contains("sum GOOD"), "{output:?}");
}

fn rm_registration_count(vm: &Vm) -> usize {
    let is_registration = |kind: &EventKind| matches!(kind, EventKind::RmRegistered { .. });
    vm.events()
        .expect("events")
        .iter()
        .filter(|entry| is_registration(&entry.kind))
        .count()
}

/// Each host answers whether it would accept a task, and a migration confirms the answer.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn can_migrate_lists_accepting_hosts() {
    with_three_hosts(None, |vm| {
        let folder_on_host = |n: usize| vm.testbed().host(n).machine_path("/tmp/only-there");
        std::fs::create_dir(folder_on_host(2)).expect("made");
        let tid = vm
            .spawn_connected(&["-h2:/tmp/only-there", "hold", "1"])
            .expect("spawned");
        check_memory(vm, &tid);
        let no_host_output = run_pvm(vm, &["can-migrate", &tid]);
        let missing_folder_line = "no: /tmp/only-there: it does not exist on the target";
        assert!(
            !no_host_output.succeeded() && no_host_output.stdout.ends_with("no host accepts it\n"),
            "{no_host_output:?}"
        );
        assert_eq!(
            no_host_output.stdout.matches(missing_folder_line).count(),
            2,
            "{no_host_output:?}"
        );
        std::fs::create_dir(folder_on_host(3)).expect("made");
        let one_host_output = run_pvm(vm, &["can-migrate", &tid]);
        assert!(
            one_host_output.succeeded()
                && one_host_output
                    .stdout
                    .ends_with("nearest host that accepts it: h3\n"),
            "{one_host_output:?}"
        );
        let h1_answer = vm.pvm_json(&["can-migrate", &tid, "h1"]);
        assert!(h1_answer.is_err(), "it exits with 1: {h1_answer:?}");
        let h3_answer = vm
            .pvm_json(&["can-migrate", &tid, "h3"])
            .expect("h3 would do");
        assert_eq!(
            (&h3_answer[0]["hosts"][0]["takes"], &h3_answer[0]["host"]),
            (&true.into(), &"h2".into())
        );
        assert_eq!(
            vm.host_of(&tid).expect("alive"),
            "h2",
            "asking moves nothing"
        );
        let events = vm.events().expect("events");
        assert!(
            !events
                .iter()
                .any(|entry| matches!(entry.kind, EventKind::MigrationFailed { .. })),
            "nor is it a move"
        );
        vm.migrate_or_panic(&tid, "h3");
        check_memory(vm, &tid);
        let unknown_task_output = run_pvm(vm, &["can-migrate", "t40001"]);
        assert!(
            !unknown_task_output.succeeded()
                && unknown_task_output
                    .stderr
                    .contains("t40001 cannot migrate: "),
            "{unknown_task_output:?}"
        );
        let unknown_host_output = run_pvm(vm, &["can-migrate", &tid, "h9"]);
        assert!(
            !unknown_host_output.succeeded()
                && unknown_host_output.stderr.contains("there is no such host"),
            "{unknown_host_output:?}"
        );
    });
}

/// All tasks migrate off the drained host. Until `undrain`, no task is placed on this host, even by
/// the next resource manager after the first one was killed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drained_host_stays_empty_until_undrained() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tids: Vec<String> = (0..2)
            .map(|_| vm.spawn_connected(&["-h2", "hold", "4"]).expect("spawned"))
            .collect();
        tids.iter().for_each(|tid| check_memory(vm, tid));
        let drain_output = run_pvm(vm, &["drain", "h2", "--deadline", "50s"]);
        assert!(
            drain_output.succeeded(),
            "{drain_output:?}\n{}",
            vm.events_and_logs()
        );
        assert!(
            drain_output
                .stdout
                .starts_with("h2 accepts no tasks; 2 must leave\n")
                && drain_output.stdout.contains("\nh2 is empty after ")
        );
        for tid in &tids {
            assert!(
                drain_output.stdout.contains(&format!("{tid} has left (")),
                "{drain_output:?}"
            );
            assert_ne!(vm.host_of(tid).expect("alive"), "h2");
            check_memory(vm, tid);
        }
        let check_spawn_refused = |vm: &Vm| {
            let spawn_output = run_pvm(vm, &["spawn", "-h2", "hold", "1"]);
            assert!(
                !spawn_output.succeeded(),
                "{spawn_output:?}\n{}",
                vm.events_and_logs()
            );
        };
        check_spawn_refused(vm);
        let why_output = run_pvm(vm, &["why", "h2"]);
        assert!(
            why_output
                .stdout
                .contains("now: nothing is placed on h2: it is drained at the request of"),
            "{why_output:?}"
        );
        let previous_count = rm_registration_count(vm);
        let rm_process = vm
            .testbed()
            .host(1)
            .processes()
            .into_iter()
            .find(|(_, line)| line.contains("pvm-rm"))
            .expect("it runs");
        let pid = Pid::from_raw(rm_process.0.cast_signed());
        // Once the event is in the log, the file of the resource manager contains the drain.
        vm.wait_for_event(TIMEOUT, "drain", |entry| {
            matches!(entry.kind, EventKind::DrainStarted { .. })
        })
        .expect("in the log");
        kill(pid, Signal::SIGKILL).expect("it is there");
        wait_for(TIMEOUT, || {
            if rm_registration_count(vm) > previous_count {
                Ok(())
            } else {
                Err("no other resource manager".into())
            }
        })
        .or_panic_with_logs(vm);
        check_spawn_refused(vm);
        let undrain_output = run_pvm(vm, &["undrain", "h2"]);
        assert_eq!(
            (undrain_output.succeeded(), undrain_output.stdout.as_str()),
            (true, "h2 accepts tasks\n"),
            "{undrain_output:?}"
        );
        let tid = vm
            .spawn_connected(&["-h2", "hold", "1"])
            .or_panic_with_logs(vm);
        assert_eq!(vm.host_of(&tid).expect("alive"), "h2");
        let unknown_host_output = run_pvm(vm, &["drain", "h9"]);
        assert!(
            !unknown_host_output.succeeded()
                && unknown_host_output.stderr.contains("knows no host h9"),
            "{unknown_host_output:?}"
        );
    });
}

/// No host accepts the job, so the drain makes a checkpoint of the job and ends the job.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn unmigratable_job_is_checkpointed_and_ended() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let folder_on_host = |n: usize| vm.testbed().host(n).machine_path("/tmp/only-there");
        std::fs::create_dir(folder_on_host(2)).expect("made");
        let tid = vm
            .spawn_connected(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        check_memory(vm, &tid);
        let drain_output = run_pvm(vm, &["drain", "h2", "--deadline", "2s", "--checkpoint"]);
        assert!(
            drain_output.succeeded() && drain_output.stdout.contains("h2 is empty after "),
            "{drain_output:?}\n{}",
            vm.events_and_logs()
        );
        let restart_hint = drain_output
            .stdout
            .lines()
            .find_map(|line| line.strip_prefix(&format!("job {tid} has ended; 'restart ")));
        let checkpoint_name = restart_hint
            .and_then(|rest| rest.split('\'').next())
            .unwrap_or_else(|| panic!("{drain_output:?}"));
        let wait_result = wait_for(TIMEOUT, || {
            let tasks = vm.tasks().map_err(|error| error.to_string())?;
            if tasks.iter().any(|task| task.tid == tid) {
                Err(format!("{tasks:?}"))
            } else {
                Ok(())
            }
        });
        wait_result.or_panic_with_logs(vm);
        let refused_output = run_pvm(vm, &["restart", checkpoint_name, "--on", "h3"]);
        assert!(
            !refused_output.succeeded() && refused_output.stderr.contains("/tmp/only-there"),
            "{refused_output:?}"
        );
        std::fs::create_dir(folder_on_host(3)).expect("made");
        let restart_output = run_pvm(vm, &["restart", checkpoint_name, "--on", "h3"]);
        assert!(
            restart_output.succeeded() && restart_output.stdout == format!("{tid} runs on h3\n"),
            "{restart_output:?}\n{}",
            vm.events_and_logs()
        );
        check_memory(vm, &tid);
    });
}

/// Only the job that no host accepts is checkpointed and ended. All other jobs migrate.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn only_unmigratable_job_is_checkpointed() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        std::fs::create_dir(vm.testbed().host(2).machine_path("/tmp/only-there")).expect("made");
        let unmigratable_tid = vm
            .spawn_connected(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        let migratable_tids: Vec<String> = ["6", "1", "3"]
            .iter()
            .map(|mib| vm.spawn_connected(&["-h2", "hold", mib]).expect("spawned"))
            .collect();
        migratable_tids
            .iter()
            .chain([&unmigratable_tid])
            .for_each(|tid| check_memory(vm, tid));
        let drain_output = run_pvm(vm, &["drain", "h2", "--deadline", "15s", "--checkpoint"]);
        assert!(
            drain_output.succeeded() && drain_output.stdout.contains("h2 is empty after "),
            "{drain_output:?}\n{}",
            vm.events_and_logs()
        );
        assert!(
            drain_output
                .stdout
                .contains(&format!("job {unmigratable_tid} has ended; 'restart ")),
            "{drain_output:?}"
        );
        for tid in &migratable_tids {
            let departure_line = drain_output
                .stdout
                .lines()
                .find(|line| line.starts_with(&format!("{tid} has left (")));
            assert!(
                departure_line.is_some_and(|line| line.ends_with(" MB)")),
                "{drain_output:?}"
            );
            assert_ne!(vm.host_of(tid).expect("alive"), "h2");
            check_memory(vm, tid);
        }
        let (deadline_us, checkpoint_times_us) = drain_deadline_and_checkpoint_times(vm);
        assert_eq!(checkpoint_times_us.len(), 1, "the others were not written");
        assert!(
            checkpoint_times_us[0] < deadline_us.expect("a deadline"),
            "not only when its time is over"
        );
    });
}

/// Returns the text between `prefix` and the next space, in the first line that starts with
/// `prefix`; `None` if no line does.
fn text_after_prefix<'a>(out: &'a str, prefix: &str) -> Option<&'a str> {
    out.lines()
        .find_map(|line| line.strip_prefix(prefix))?
        .split(' ')
        .next()
}

/// The job that no host accepts continues on the drained host, and has a checkpoint at the
/// deadline. After the drained host was deleted, the job restarts from the checkpoint on another
/// host.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn unmigratable_job_has_checkpoint_by_deadline() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let folder_on_host = |n: usize| vm.testbed().host(n).machine_path("/tmp/only-there");
        std::fs::create_dir(folder_on_host(2)).expect("made");
        let tid = vm
            .spawn_connected(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        check_memory(vm, &tid);
        let drain_output = run_pvm(vm, &["drain", "h2", "--deadline", "8s"]);
        let checkpoint_name = text_after_prefix(
            &drain_output.stdout,
            &format!("job {tid} is in the store as "),
        );
        let checkpoint_name =
            checkpoint_name.unwrap_or_else(|| panic!("{drain_output:?}\n{}", vm.events_and_logs()));
        let loss_line =
            format!("job {tid} loses its work since {checkpoint_name} if h2 leaves now\n");
        assert!(
            !drain_output.succeeded() && drain_output.stdout.contains(&loss_line),
            "{drain_output:?}"
        );
        assert!(
            drain_output
                .stdout
                .contains(&format!("{tid} is still there: no host accepts it")),
            "{drain_output:?}"
        );
        assert_eq!(vm.host_of(&tid).or_panic_with_logs(vm), "h2");
        check_memory(vm, &tid);
        let drain_json = run_pvm(vm, &["--json", "drain", "h2", "--deadline", "8s"]);
        let drain_json: serde_json::Value =
            serde_json::from_str(drain_json.stdout.trim()).expect("one value");
        assert_eq!(
            (
                &drain_json["sets"],
                drain_json["kept"].as_array().map(Vec::len)
            ),
            (&serde_json::json!([]), Some(1))
        );
        assert!(run_pvm(vm, &["delete", "h2"]).succeeded());
        std::fs::create_dir(folder_on_host(3)).expect("made");
        let restart_output = run_pvm(vm, &["restart", checkpoint_name, "--on", "h3"]);
        assert!(
            restart_output.succeeded() && restart_output.stdout == format!("{tid} runs on h3\n"),
            "{restart_output:?}\n{}",
            vm.events_and_logs()
        );
        check_memory(vm, &tid);
    });
}

/// Returns the deadline of the newest drain, `None` if the drain has no deadline, and the
/// completion times of the checkpoints after the drain's start. All times are in microseconds since
/// 1970.
fn drain_deadline_and_checkpoint_times(vm: &Vm) -> (Option<u64>, Vec<u64>) {
    let events = vm.events().or_panic_with_logs(vm);
    let is_drain_start = |entry: &EventEntry| matches!(entry.kind, EventKind::DrainStarted { .. });
    let start_index = events
        .iter()
        .rposition(is_drain_start)
        .expect("one is emptied");
    let EventKind::DrainStarted {
        deadline: drain_deadline,
        ..
    } = &events[start_index].kind
    else {
        unreachable!("it was just found")
    };
    let checkpoint_events = events[start_index..]
        .iter()
        .filter(|entry| matches!(entry.kind, EventKind::Checkpointed { .. }));
    (
        drain_deadline.map(|drain_deadline| drain_deadline.0),
        checkpoint_events.map(|entry| entry.at_us).collect(),
    )
}

/// If a job is checkpointed periodically, a drain makes no additional checkpoint of the job. The
/// output of the drain states since when the work of the job would be lost.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_writes_no_second_checkpoint() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        std::fs::create_dir(vm.testbed().host(2).machine_path("/tmp/only-there")).expect("made");
        let tid = vm
            .spawn_connected(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        check_memory(vm, &tid);
        vm.pvm_json(&["checkpoint", "--every", "1h", &tid])
            .or_panic_with_logs(vm);
        let drain_output = run_pvm(vm, &["drain", "h2", "--deadline", "9s"]);
        assert!(
            !drain_output.succeeded() && !drain_output.stdout.contains("is being checkpointed"),
            "{drain_output:?}"
        );
        assert!(
            drain_output
                .stdout
                .contains(&format!("job {tid} loses its work since ")),
            "{drain_output:?}"
        );
        assert_eq!(
            drain_deadline_and_checkpoint_times(vm).1.len(),
            1,
            "{drain_output:?}\n{}",
            vm.events_and_logs()
        );
        check_memory(vm, &tid);
    });
}

/// The network is slow and the store is on the drained host. The large jobs wait until the small
/// jobs have migrated; during this wait large jobs are checkpointed and ended.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn queued_jobs_are_stored_while_others_leave() {
    let env = [
        ("SEMPA_MOVE_RATE", "1000000"),
        ("SEMPA_POST_COPY", "never"),
        ("SEMPA_PRE_COPY", "never"),
    ];
    with_three_hosts_and_env(&env, Some("pvm-rm"), |vm| {
        let spawn_on_h1 = |mib: &str| {
            vm.spawn_connected(&["-h1", "hold", mib])
                .or_panic_with_logs(vm)
        };
        let small_tids: Vec<String> = (0..4).map(|_| spawn_on_h1("4")).collect();
        let large_tids: Vec<String> = (0..6).map(|_| spawn_on_h1("8")).collect();
        small_tids
            .iter()
            .chain(&large_tids)
            .for_each(|tid| check_memory(vm, tid));
        let drain_output = run_pvm(vm, &["drain", "h1", "--deadline", "20s", "--checkpoint"]);
        // The order of the events, not of the lines: a line is printed after its event, and on a
        // slow machine small jobs may still migrate when the deadline ends the wait.
        let events = vm.events().or_panic_with_logs(vm);
        let early_jobs: Vec<String> = events
            .iter()
            .take_while(|entry| !matches!(entry.kind, EventKind::Migrated { .. }))
            .filter_map(|entry| match &entry.kind {
                EventKind::Checkpointed { job, .. } => Some(job.to_string()),
                _ => None,
            })
            .collect();
        assert!(
            !early_jobs.is_empty() && early_jobs.iter().all(|job| large_tids.contains(job)),
            "{drain_output:?}\n{}",
            vm.events_and_logs()
        );
        let ends_job = |job: &String| {
            let line = format!("job {job} has ended; 'restart ");
            drain_output.stdout.contains(&line)
        };
        assert!(early_jobs.iter().all(ends_job), "{drain_output:?}");
    });
}

/// Spawns a task that only h2 accepts. Returns its tid.
fn spawn_unmigratable(vm: &Vm) -> String {
    std::fs::create_dir_all(vm.testbed().host(2).machine_path("/tmp/only-there"))
        .or_panic_with_logs(vm);
    let tid = vm
        .spawn_connected(&["-h2:/tmp/only-there", "hold", "2"])
        .or_panic_with_logs(vm);
    check_memory(vm, &tid);
    tid
}

/// Starts a drain with the console and waits until the host accepts no tasks.
fn start_drain(vm: &Vm, args: &[&str]) -> RunningCommand {
    let drain = vm.start_pvm(args).or_panic_with_logs(vm);
    let check_started = || match drain.stdout_so_far() {
        Ok(out) if out.contains(" accepts no tasks; ") => Ok(()),
        other => Err(format!("{other:?} {:?}", drain.stderr_so_far())),
    };
    wait_for(TIMEOUT, check_started).or_panic_with_logs(vm);
    drain
}

/// Argument of the process that executes a drain. The console command that a user types only shows
/// the progress.
const EXECUTOR_OPTION: &str = "--apart";

/// Sends a signal to the typed console command, but not to the process that executes the drain.
fn signal_typed_command(vm: &Vm, arguments: &str, signal: Signal) {
    let line_end = format!("bin/pvm {arguments}");
    let is_typed_command =
        |line: &str| !line.contains(EXECUTOR_OPTION) && line.ends_with(line_end.trim());
    // `nsenter` and `env` show the same arguments until they execute the command. Only the command
    // itself starts with `/`.
    let mut processes = vm
        .testbed()
        .host(1)
        .processes()
        .into_iter()
        .filter(|(_, line)| is_typed_command(line));
    let (pid, _) = processes
        .find(|(_, line)| line.starts_with('/'))
        .expect("it runs");
    kill(Pid::from_raw(pid.cast_signed()), signal).expect("it is there");
}

/// Checks that the newest drain was executed by its deadline: one checkpoint of the job was made,
/// the job continues, and no process of the drain is left.
fn check_drained_job(vm: &Vm, tid: &str) {
    let is_job_checkpoint = |entry: &EventEntry| matches!(&entry.kind, EventKind::Checkpointed { job, .. } if job.to_string() == tid);
    wait_for(TIMEOUT, || {
        match drain_deadline_and_checkpoint_times(vm).1.len() {
            0 => Err(format!("nothing was written\n{}", vm.events_and_logs())),
            _ => Ok(()),
        }
    })
    .or_panic_with_logs(vm);
    wait_until_no_process(vm.testbed().host(1), EXECUTOR_OPTION, TIMEOUT).or_panic_with_logs(vm);
    let (deadline_us, checkpoint_times_us) = drain_deadline_and_checkpoint_times(vm);
    assert!(
        vm.events()
            .or_panic_with_logs(vm)
            .iter()
            .any(is_job_checkpoint)
    );
    assert_eq!(checkpoint_times_us.len(), 1, "{}", vm.events_and_logs());
    assert!(
        deadline_us.is_some_and(|deadline_us| checkpoint_times_us[0] < deadline_us),
        "{}",
        vm.events_and_logs()
    );
    assert_eq!(vm.host_of(tid).or_panic_with_logs(vm), "h2");
    check_memory(vm, tid);
}

/// The job has a checkpoint at the deadline although the console command was killed or interrupted.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_survives_its_command() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tid = spawn_unmigratable(vm);
        let args = ["drain", "h2", "--deadline", "9s"];
        let killed_drain = start_drain(vm, &args);
        signal_typed_command(vm, &args.join(" "), Signal::SIGKILL);
        let killed_drain = killed_drain.wait_or_kill(TIMEOUT).or_panic_with_logs(vm);
        assert!(
            !killed_drain.succeeded() && !killed_drain.stdout.contains("is being checkpointed"),
            "it was before: {killed_drain:?}"
        );
        check_drained_job(vm, &tid);
        let args = ["drain", "h2", "--deadline", "10s"];
        let interrupted_drain = start_drain(vm, &args);
        signal_typed_command(vm, &args.join(" "), Signal::SIGINT);
        let interrupted_drain = interrupted_drain
            .wait_or_kill(TIMEOUT)
            .or_panic_with_logs(vm);
        assert_eq!(
            interrupted_drain.status.code(),
            Some(130),
            "{interrupted_drain:?}"
        );
        assert_eq!(
            interrupted_drain.stderr,
            "drain: h2 is still being drained; 'undrain h2' cancels it\n"
        );
        check_drained_job(vm, &tid);
    });
}

/// The job has a checkpoint at the deadline although the resource manager is killed twice before
/// the deadline.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_survives_its_resource_managers() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tid = spawn_unmigratable(vm);
        let drain = start_drain(vm, &["drain", "h2", "--deadline", "14s"]);
        let previous_count = rm_registration_count(vm);
        for kill_count in 1..=2 {
            let rm_process = vm
                .testbed()
                .host(1)
                .processes()
                .into_iter()
                .find(|(_, line)| line.contains("pvm-rm"))
                .expect("it runs");
            kill(Pid::from_raw(rm_process.0.cast_signed()), Signal::SIGKILL).expect("it is there");
            let check_registered = || {
                if rm_registration_count(vm) >= previous_count + kill_count {
                    Ok(())
                } else {
                    Err("no other one".to_string())
                }
            };
            wait_for(TIMEOUT, check_registered).or_panic_with_logs(vm);
        }
        let drain_output = drain.wait_or_kill(TIMEOUT).or_panic_with_logs(vm);
        assert!(
            text_after_prefix(
                &drain_output.stdout,
                &format!("job {tid} is in the store as ")
            )
            .is_some(),
            "{drain_output:?}\n{}",
            vm.events_and_logs()
        );
        check_drained_job(vm, &tid);
    });
}

/// `undrain` ends a drain whose console command was killed. A second drain with another deadline
/// replaces an earlier drain. Only one checkpoint of the job is made.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_later_drain_or_undrain_replaces_a_drain() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tid = spawn_unmigratable(vm);
        let args = ["drain", "h2", "--deadline", "1h", "--checkpoint"];
        let killed_drain = start_drain(vm, &args);
        signal_typed_command(vm, &args.join(" "), Signal::SIGKILL);
        killed_drain.wait_or_kill(TIMEOUT).or_panic_with_logs(vm);
        assert!(run_pvm(vm, &["undrain", "h2"]).succeeded());
        wait_until_no_process(vm.testbed().host(1), EXECUTOR_OPTION, TIMEOUT)
            .or_panic_with_logs(vm);
        let earlier_drain = start_drain(vm, &args);
        // A drain command without a deadline only shows the progress of the drain.
        let progress_command = start_drain(vm, &["drain", "h2"]);
        let later_drain = run_pvm(vm, &["drain", "h2", "--deadline", "8s"]);
        assert!(
            text_after_prefix(
                &later_drain.stdout,
                &format!("job {tid} is in the store as ")
            )
            .is_some(),
            "{later_drain:?}"
        );
        let earlier_drain = earlier_drain.wait_or_kill(TIMEOUT).or_panic_with_logs(vm);
        assert!(
            !earlier_drain.succeeded() && earlier_drain.stdout.contains("a later drain of h2 by "),
            "{earlier_drain:?}"
        );
        let progress_output = progress_command
            .wait_or_kill(TIMEOUT)
            .or_panic_with_logs(vm);
        assert!(
            !progress_output.stdout.contains("a later drain"),
            "{progress_output:?}"
        );
        check_drained_job(vm, &tid);
    });
}

/// An interactive console starts a job and drains the job's host. The drain checkpoints the job
/// although the console is killed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_outlives_its_console() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        std::fs::create_dir(vm.testbed().host(2).machine_path("/tmp/only-there"))
            .or_panic_with_logs(vm);
        let start_console = || {
            let mut command = vm.pvm_command(&[]);
            command.env("TERM", "dumb");
            RunningCommand::start(command, Stdio::piped()).or_panic_with_logs(vm)
        };
        let mut console = start_console();
        let mut console_input = console.take_stdin().expect("piped");
        console_input
            .write_all(b"spawn -h2:/tmp/only-there hold 2\n")
            .or_panic_with_logs(vm);
        let find_tid = || {
            let tasks = vm.tasks().map_err(|error| error.to_string())?;
            let task = tasks
                .iter()
                .find(|task| task.name.ends_with("hold") && task.flags & TASK_CONNECTED != 0);
            task.map(|task| task.tid.clone())
                .ok_or_else(|| format!("{tasks:?}"))
        };
        let tid = wait_for(TIMEOUT, find_tid).or_panic_with_logs(vm);
        console_input
            .write_all(b"drain h2 --deadline 8s\n")
            .or_panic_with_logs(vm);
        let stored_output = || match console.stdout_so_far().map_err(|error| error.to_string())? {
            out if out.contains(&format!("job {tid} is in the store as ")) => Ok(out),
            out => Err(out),
        };
        let out = wait_for(TIMEOUT, stored_output).or_panic_with_logs(vm);
        assert!(
            out.contains("h2 accepts no tasks; 1 must leave\n")
                && out.contains(" is still there: no host"),
            "{out}"
        );
        let drain_start_count = |vm: &Vm| {
            let events = vm.events().or_panic_with_logs(vm);
            events
                .iter()
                .filter(|entry| matches!(entry.kind, EventKind::DrainStarted { .. }))
                .count()
        };
        console_input
            .write_all(b"drain h2 --deadline 8s\n")
            .or_panic_with_logs(vm);
        wait_for(TIMEOUT, || {
            if drain_start_count(vm) == 2 {
                Ok(())
            } else {
                Err("no second order".to_string())
            }
        })
        .or_panic_with_logs(vm);
        signal_typed_command(vm, "", Signal::SIGKILL);
        console.wait_or_kill(TIMEOUT).or_panic_with_logs(vm);
        check_drained_job(vm, &tid);
    });
}

/// Without a resource manager a drain fails with an error that names the resource manager. The host
/// still accepts tasks.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_needs_a_resource_manager() {
    with_three_hosts(None, |vm| {
        let drain_output = run_pvm(vm, &["drain", "h2"]);
        assert!(
            !drain_output.succeeded()
                && drain_output
                    .stderr
                    .contains("this needs a resource manager, and none is running"),
            "{drain_output:?}"
        );
        assert!(vm.spawn_connected(&["-h2", "hold", "1"]).is_ok());
    });
}
