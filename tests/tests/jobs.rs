//! Operations on whole jobs of real processes: ending a job, starting a job from a file, and
//! listing waiting spawns. A further test follows events.

use sempa_proto::event::EventKind;
use sempa_tests::requirements::require_testbed;
use sempa_tests::run::RunningCommand;
use sempa_tests::vm::{EventEntry, VmSettings};
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

fn with_rm(test: impl FnOnce(&Vm)) {
    with_rm_command("pvm-rm", test);
}

/// Runs `test` on a virtual machine of two hosts. The command `rm_command` starts its resource
/// manager.
fn with_rm_command(rm_command: &str, test: impl FnOnce(&Vm)) {
    let bed = require_testbed(2);
    let vm = Vm::start(
        &bed,
        VmSettings {
            rm_command: Some(rm_command.into()),
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    test(&vm);
    vm.halt_and_wait().expect("halts");
}

/// A job whose tasks ignore the request to exit is killed. No process of the job remains.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_that_ignores_exit_request_is_killed() {
    with_rm(|vm| {
        let program = vm.compile_program("deaf").expect("gcc");
        let mut command = vm.user_command(vm.testbed().host(1), program);
        command.arg("5");
        let mut parent_task = RunningCommand::start(command, Stdio::null()).expect("it starts");
        let out = wait_for(TIMEOUT, || {
            let out = parent_task
                .stdout_so_far()
                .map_err(|error| format!("{error:#}"))?;
            if out.ends_with('\n') {
                Ok(out)
            } else {
                Err(format!("{out}\n{}", vm.events_and_logs()))
            }
        });
        let tid = out
            .expect("all are there")
            .trim()
            .strip_prefix("ready ")
            .expect("its tid")
            .to_string();
        let deaf_task_count = || {
            vm.tasks()
                .expect("tasks")
                .into_iter()
                .filter(|task| task.name.ends_with("deaf"))
                .count()
        };
        assert_eq!(deaf_task_count(), 5);
        let answer = vm.pvm_json(&["job", "kill", &tid]).or_panic_with_logs(vm);
        let count_of = |name: &str| answer[0][name].as_u64();
        assert_eq!(
            (count_of("asked"), count_of("left")),
            (Some(6), Some(0)),
            "{answer:?}"
        );
        // Five tasks ignore the request to exit; one task obeys.
        assert_eq!(count_of("forced"), Some(5), "{answer:?}");
        assert_eq!(deaf_task_count(), 0);
        let status = wait_for(TIMEOUT, || {
            parent_task
                .poll_status()
                .map_err(|e| format!("{e:#}"))?
                .ok_or("it runs".to_string())
        });
        assert!(!status.expect("it was killed").success());
        for host in vm.testbed().hosts() {
            let processes = host.processes();
            assert!(
                processes.iter().all(|(_, line)| !line.contains("/deaf")),
                "{processes:?}"
            );
        }
    });
}

/// A job file starts its tasks on the hosts that it requests. An error in the file is reported with
/// the number of its line.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_file_starts_its_tasks_on_their_hosts() {
    with_rm(|vm| {
        vm.compile_program("hold").expect("gcc");
        let job_file = vm.testbed().folder().join("job.toml");
        let write_job_file =
            |text: &str| std::fs::write(&job_file, text).expect("it can be written");
        let path = job_file.to_string_lossy().into_owned();
        write_job_file(
            "program = \"hold\"\narguments = [\"1\"]\ncount = 2\nwants = \"host = h2\"\n[environment]\nCOLOUR = \"blue\"\n",
        );
        vm.run_pvm(&["spawn", "--job", &path])
            .expect("pvm")
            .expect_success("spawn")
            .expect("it is started");
        let tasks = vm.tasks().expect("tasks");
        let hold_tasks: Vec<_> = tasks
            .iter()
            .filter(|task| task.name.ends_with("hold"))
            .collect();
        assert_eq!(hold_tasks.len(), 2, "{tasks:?}");
        for task in hold_tasks {
            assert_eq!(task.host.as_deref(), Some("h2"), "{task:?}");
            vm.run_pvm(&["kill", &task.tid])
                .expect("pvm")
                .expect_success("kill")
                .expect("it ends");
        }
        write_job_file("program = \"hold\"\n\ncuont = 2\n");
        let refused_output = vm.run_pvm(&["spawn", "--job", &path]).expect("pvm");
        assert!(
            !refused_output.succeeded()
                && refused_output
                    .stderr
                    .contains("job.toml, line 3: unknown field `cuont`"),
            "{refused_output:?}"
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_waiting_spawn_is_listed_with_the_jobs() {
    with_rm_command("pvm-rm --wait 600 --user-tasks 1", |vm| {
        vm.compile_program("hold").expect("gcc");
        let first_tid = vm.spawn_connected(&["hold", "1"]).expect("spawned");
        let second_spawn = vm.start_pvm(&["spawn", "hold", "1"]).expect("it starts");
        let waiting_spawns = || {
            vm.pvm_json(&["job", "list"])
                .map_err(|error| format!("{error:#}"))
                .map(|values| values[0]["waiting"].clone())
        };
        let waiting_spawn = wait_for(TIMEOUT, || match waiting_spawns()? {
            spawns if spawns.as_array().is_some_and(|spawns| spawns.len() == 1) => {
                Ok(spawns[0].clone())
            }
            other => Err(other.to_string()),
        });
        let waiting_spawn = waiting_spawn.or_panic_with_logs(vm);
        let limit_text =
            "the limit --user-tasks of the resource manager is 1, and the user has 1 task";
        assert_eq!(
            (&waiting_spawn["count"], &waiting_spawn["turn"]),
            (&1.into(), &1.into()),
            "{waiting_spawn}"
        );
        assert_eq!(waiting_spawn["why"], limit_text, "{waiting_spawn}");
        let text = vm.run_pvm(&["job", "list"]).expect("pvm").stdout;
        let last_line = text.lines().last().unwrap_or_default();
        assert!(
            last_line.starts_with("waiting: 1 of hold for job t"),
            "{text}"
        );
        assert!(
            last_line.ends_with(&format!(", number 1 in turn: {limit_text}")),
            "{text}"
        );
        vm.run_pvm(&["kill", &first_tid])
            .expect("pvm")
            .expect_success("kill")
            .expect("it ends");
        assert!(
            second_spawn
                .wait_or_kill(TIMEOUT)
                .expect("it has its place")
                .succeeded()
        );
        assert_eq!(
            waiting_spawns().expect("told").as_array().map(Vec::len),
            Some(0)
        );
    });
}

/// A console that follows events prints one event per line, and ends with the virtual machine.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn followed_events_arrive_one_per_line() {
    let bed = require_testbed(2);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.compile_program("hold").expect("gcc");
    let follower = vm
        .start_pvm(&["events", "--follow", "--json"])
        .expect("it starts");
    let events = || -> Result<Vec<EventEntry>, String> {
        let out = follower
            .stdout_so_far()
            .map_err(|error| format!("{error:#}"))?;
        // The last line of the output may be incomplete.
        let complete_lines = out.rfind('\n').map_or("", |end| &out[..end]);
        Ok(complete_lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
            .collect())
    };
    let events_until = |description: &str, is_expected: &dyn Fn(&EventKind) -> bool| {
        let events_until = wait_for(TIMEOUT, || {
            let events = events()?;
            if events.iter().any(|entry| is_expected(&entry.kind)) {
                Ok(events)
            } else {
                Err(format!("{events:?}"))
            }
        });
        events_until
            .unwrap_or_else(|error| panic!("{description}: {error:#}\n{}", vm.events_and_logs()))
    };
    // The console prints the earlier events first, then each new event when it happens.
    let first_count = events_until("the first entry", &|_| true).len();
    vm.add_hosts(&["h2"]).expect("it joins");
    events_until(
        "the other host",
        &|kind| matches!(kind, EventKind::HostAdded { name, .. } if name == "h2"),
    );
    let tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
    vm.run_pvm(&["kill", &tid])
        .expect("pvm")
        .expect_success("kill")
        .expect("it ends");
    let is_task_end = |kind: &EventKind| matches!(kind, EventKind::TaskEnded { tid: ended_tid, .. } if ended_tid.to_string() == tid);
    let entries = events_until("the end of a task", &is_task_end);
    assert!(entries.len() > first_count);
    assert!(
        entries
            .windows(2)
            .all(|pair| pair[1].number == pair[0].number + 1),
        "without gaps: {entries:?}"
    );
    vm.halt_and_wait().expect("halts");
    let output = follower
        .wait_or_kill(TIMEOUT)
        .expect("it ends with the virtual machine");
    assert!(!output.stdout.is_empty(), "{output:?}");
}
