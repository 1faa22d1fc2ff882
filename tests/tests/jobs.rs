//! Operations on whole jobs of real processes: end a job, start a job from a file, list waiting
//! spawns. Also tests that events can be followed.

use sempa_proto::event::EventKind;
use sempa_tests::requirements::testbed;
use sempa_tests::run::RunningCommand;
use sempa_tests::vm::{EventEntry, Settings};
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

fn with_rm(test: impl FnOnce(&Vm)) {
    with_rm_command("pvm-rm", test);
}

/// Runs `test` on a virtual machine of two hosts with the resource manager `rm`.
fn with_rm_command(rm: &str, test: impl FnOnce(&Vm)) {
    let bed = testbed(2);
    let vm = Vm::start(
        &bed,
        Settings {
            rm: Some(rm.into()),
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    test(&vm);
    vm.halt().expect("halts");
}

/// A job that ignores the request to exit is killed. No process of it remains.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_that_ignores_exit_request_is_killed() {
    with_rm(|vm| {
        let program = vm.compile_program("deaf").expect("gcc");
        let mut command = vm.command(vm.bed().host(1), program);
        command.arg("5");
        let mut top = RunningCommand::start(command, Stdio::null()).expect("it starts");
        let out = wait_for(TIMEOUT, || {
            let out = top.out_so_far().map_err(|error| format!("{error:#}"))?;
            if out.ends_with('\n') {
                Ok(out)
            } else {
                Err(format!("{out}\n{}", vm.logs()))
            }
        });
        let tid = out
            .expect("all are there")
            .trim()
            .strip_prefix("ready ")
            .expect("its tid")
            .to_string();
        let deaf = || {
            vm.tasks()
                .expect("tasks")
                .into_iter()
                .filter(|task| task.name.ends_with("deaf"))
                .count()
        };
        assert_eq!(deaf(), 5);
        let answer = vm.json(&["job", "kill", &tid]).or_panic_with_logs(vm);
        let count = |name: &str| answer[0][name].as_u64();
        assert_eq!(
            (count("asked"), count("left")),
            (Some(6), Some(0)),
            "{answer:?}"
        );
        // Five tasks ignore the request to exit; one task obeys.
        assert_eq!(count("forced"), Some(5), "{answer:?}");
        assert_eq!(deaf(), 0);
        let status = wait_for(TIMEOUT, || {
            top.poll()
                .map_err(|e| format!("{e:#}"))?
                .ok_or("it runs".to_string())
        });
        assert!(!status.expect("it was killed").success());
        for host in vm.bed().hosts() {
            let left = host.processes();
            assert!(
                left.iter().all(|(_, line)| !line.contains("/deaf")),
                "{left:?}"
            );
        }
    });
}

/// A job file starts its tasks on the hosts that it requests. An error in the file is reported with
/// its line.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_file_starts_its_tasks_on_their_hosts() {
    with_rm(|vm| {
        vm.compile_program("hold").expect("gcc");
        let file = vm.bed().folder().join("job.toml");
        let write = |text: &str| std::fs::write(&file, text).expect("it can be written");
        let path = file.to_string_lossy().into_owned();
        write(
            "program = \"hold\"\narguments = [\"1\"]\ncount = 2\nwants = \"host = h2\"\n[environment]\nCOLOUR = \"blue\"\n",
        );
        vm.pvm(&["spawn", "--job", &path])
            .expect("pvm")
            .expect_success("spawn")
            .expect("it is started");
        let tasks = vm.tasks().expect("tasks");
        let held: Vec<_> = tasks
            .iter()
            .filter(|task| task.name.ends_with("hold"))
            .collect();
        assert_eq!(held.len(), 2, "{tasks:?}");
        for task in held {
            assert_eq!(task.host.as_deref(), Some("h2"), "{task:?}");
            vm.pvm(&["kill", &task.tid])
                .expect("pvm")
                .expect_success("kill")
                .expect("it ends");
        }
        write("program = \"hold\"\n\ncuont = 2\n");
        let wrong = vm.pvm(&["spawn", "--job", &path]).expect("pvm");
        assert!(
            !wrong.succeeded()
                && wrong
                    .err
                    .contains("job.toml, line 3: unknown field `cuont`"),
            "{wrong:?}"
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_waiting_spawn_is_listed_with_the_jobs() {
    with_rm_command("pvm-rm --wait 600 --user-tasks 1", |vm| {
        vm.compile_program("hold").expect("gcc");
        let first = vm.spawn(&["hold", "1"]).expect("spawned");
        let second = vm.start_pvm(&["spawn", "hold", "1"]).expect("it starts");
        let waiting = || {
            vm.json(&["job", "list"])
                .map_err(|error| format!("{error:#}"))
                .map(|all| all[0]["waiting"].clone())
        };
        let one = wait_for(TIMEOUT, || match waiting()? {
            list if list.as_array().is_some_and(|list| list.len() == 1) => Ok(list[0].clone()),
            other => Err(other.to_string()),
        });
        let one = one.or_panic_with_logs(vm);
        assert_eq!(
            (&one["count"], &one["turn"]),
            (&1.into(), &1.into()),
            "{one}"
        );
        assert_eq!(
            one["why"], "the user has 1 tasks, and 1 are allowed",
            "{one}"
        );
        let text = vm.pvm(&["job", "list"]).expect("pvm").out;
        let last = text.lines().last().unwrap_or_default();
        assert!(last.starts_with("waiting: 1 of hold for job t"), "{text}");
        assert!(
            last.ends_with(", number 1 in turn: the user has 1 tasks, and 1 are allowed"),
            "{text}"
        );
        vm.pvm(&["kill", &first])
            .expect("pvm")
            .expect_success("kill")
            .expect("it ends");
        assert!(
            second
                .finish(TIMEOUT)
                .expect("it has its place")
                .succeeded()
        );
        assert_eq!(waiting().expect("told").as_array().map(Vec::len), Some(0));
    });
}

/// A console that follows events prints one event per line, and ends with the virtual machine.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn followed_events_arrive_one_per_line() {
    let bed = testbed(2);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.compile_program("hold").expect("gcc");
    let follower = vm
        .start_pvm(&["events", "--follow", "--json"])
        .expect("it starts");
    let told = || -> Result<Vec<EventEntry>, String> {
        let out = follower
            .out_so_far()
            .map_err(|error| format!("{error:#}"))?;
        // The last line of the output may be incomplete.
        let whole = out.rfind('\n').map_or("", |end| &out[..end]);
        Ok(whole
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
            .collect())
    };
    let seen = |what: &str, is: &dyn Fn(&EventKind) -> bool| {
        let seen = wait_for(TIMEOUT, || {
            let told = told()?;
            if told.iter().any(|entry| is(&entry.kind)) {
                Ok(told)
            } else {
                Err(format!("{told:?}"))
            }
        });
        seen.unwrap_or_else(|error| panic!("{what}: {error:#}\n{}", vm.logs()))
    };
    // The console prints the earlier events first, then each new event when it happens.
    let before = seen("the first entry", &|_| true).len();
    vm.add(&["h2"]).expect("it joins");
    seen(
        "the other host",
        &|kind| matches!(kind, EventKind::HostAdded { name, .. } if name == "h2"),
    );
    let tid = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
    vm.pvm(&["kill", &tid])
        .expect("pvm")
        .expect_success("kill")
        .expect("it ends");
    let ended = |kind: &EventKind| matches!(kind, EventKind::TaskEnded { tid: of, .. } if of.to_string() == tid);
    let all = seen("the end of a task", &ended);
    assert!(all.len() > before);
    assert!(
        all.windows(2)
            .all(|pair| pair[1].number == pair[0].number + 1),
        "without gaps: {all:?}"
    );
    vm.halt().expect("halts");
    let done = follower
        .finish(TIMEOUT)
        .expect("it ends with the virtual machine");
    assert!(!done.out.is_empty(), "{done:?}");
}
