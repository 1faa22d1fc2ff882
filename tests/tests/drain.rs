//! Placement queries and drains. A placement query returns the hosts that would accept a task. All
//! tasks migrate off a drained host, which stays empty until `undrain`.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::event::EventKind;
use sempa_proto::table::TASK_CONNECTED;
use sempa_tests::requirements::testbed_with_env;
use sempa_tests::run::{CommandResult, RunningCommand, run_ok};
use sempa_tests::testbed::wait_until_no_process;
use sempa_tests::vm::{EventEntry, Settings};
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

fn with_three_hosts(rm: Option<&str>, test: impl FnOnce(&Vm)) {
    with_three_hosts_in(&[], rm, test);
}

/// Runs `test` on a virtual machine of three hosts with the environment variables `env` and the
/// resource manager `rm`.
fn with_three_hosts_in(env: &[(&str, &str)], rm: Option<&str>, test: impl FnOnce(&Vm)) {
    let bed = testbed_with_env(3, env);
    let settings = Settings {
        rm: rm.map(String::from),
        env: Settings::env_of(env),
        ..Settings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    test(&vm);
    vm.halt().expect("halts");
}

fn pvm(vm: &Vm, words: &[&str]) -> CommandResult {
    vm.pvm(words).or_panic_with_logs(vm)
}

/// Checks that a task answers and that its memory is unchanged.
fn check_memory(vm: &Vm, tid: &str) {
    let mut command = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
    command.args(["ask", tid]);
    let done = run_ok(command, TIMEOUT).or_panic_with_logs(vm);
    assert!(done.out.contains("sum GOOD"), "{done:?}");
}

fn rm_registration_count(vm: &Vm) -> usize {
    let is = |kind: &EventKind| matches!(kind, EventKind::RmRegistered { .. });
    vm.events()
        .expect("events")
        .iter()
        .filter(|entry| is(&entry.kind))
        .count()
}

/// Each host answers whether it would accept a task, and a migration confirms the answer.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn can_migrate_lists_accepting_hosts() {
    with_three_hosts(None, |vm| {
        let place = |n: usize| vm.bed().host(n).machine_path("/tmp/only-there");
        std::fs::create_dir(place(2)).expect("made");
        let tid = vm
            .spawn(&["-h2:/tmp/only-there", "hold", "1"])
            .expect("spawned");
        check_memory(vm, &tid);
        let nobody = pvm(vm, &["can-migrate", &tid]);
        let missing = "no: /tmp/only-there: it does not exist on the target";
        assert!(
            !nobody.succeeded() && nobody.out.ends_with("no host accepts it\n"),
            "{nobody:?}"
        );
        assert_eq!(nobody.out.matches(missing).count(), 2, "{nobody:?}");
        std::fs::create_dir(place(3)).expect("made");
        let one = pvm(vm, &["can-migrate", &tid]);
        assert!(
            one.succeeded() && one.out.ends_with("nearest host that accepts it: h3\n"),
            "{one:?}"
        );
        let values = vm.json(&["can-migrate", &tid, "h1"]);
        assert!(values.is_err(), "it exits with 1: {values:?}");
        let there = vm.json(&["can-migrate", &tid, "h3"]).expect("h3 would do");
        assert_eq!(
            (&there[0]["hosts"][0]["takes"], &there[0]["host"]),
            (&true.into(), &"h2".into())
        );
        assert_eq!(
            vm.host_of(&tid).expect("alive"),
            "h2",
            "asking moves nothing"
        );
        let moves = vm.events().expect("events");
        assert!(
            !moves
                .iter()
                .any(|entry| matches!(entry.kind, EventKind::MigrationFailed { .. })),
            "nor is it a move"
        );
        vm.must_migrate(&tid, "h3");
        check_memory(vm, &tid);
        let refused = pvm(vm, &["can-migrate", "t40001"]);
        assert!(
            !refused.succeeded() && refused.err.contains("t40001 cannot migrate: "),
            "{refused:?}"
        );
        let nowhere = pvm(vm, &["can-migrate", &tid, "h9"]);
        assert!(
            !nowhere.succeeded() && nowhere.err.contains("there is no such host"),
            "{nowhere:?}"
        );
    });
}

/// All tasks leave the drained host. The next resource manager keeps the host empty, until
/// `undrain`.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drained_host_stays_empty_until_undrained() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tids: Vec<String> = (0..2)
            .map(|_| vm.spawn(&["-h2", "hold", "4"]).expect("spawned"))
            .collect();
        tids.iter().for_each(|tid| check_memory(vm, tid));
        let done = pvm(vm, &["drain", "h2", "--deadline", "50s"]);
        assert!(done.succeeded(), "{done:?}\n{}", vm.logs());
        assert!(
            done.out.starts_with("h2 accepts no tasks; 2 must leave\n")
                && done.out.contains("\nh2 is empty after ")
        );
        for tid in &tids {
            assert!(done.out.contains(&format!("{tid} has left (")), "{done:?}");
            assert_ne!(vm.host_of(tid).expect("alive"), "h2");
            check_memory(vm, tid);
        }
        let refused = |vm: &Vm| {
            let spawn = pvm(vm, &["spawn", "-h2", "hold", "1"]);
            assert!(!spawn.succeeded(), "{spawn:?}\n{}", vm.logs());
        };
        refused(vm);
        let why = pvm(vm, &["why", "h2"]);
        assert!(
            why.out
                .contains("now: nothing is placed on h2: it is drained at the request of"),
            "{why:?}"
        );
        let before = rm_registration_count(vm);
        let rm = vm
            .bed()
            .host(1)
            .processes()
            .into_iter()
            .find(|(_, line)| line.contains("pvm-rm"))
            .expect("it runs");
        let pid = nix::unistd::Pid::from_raw(rm.0.cast_signed());
        // When the event is in the log, the drain is in the resource manager's file, too.
        vm.wait_for_event(TIMEOUT, "drain", |entry| {
            matches!(entry.kind, EventKind::DrainStarted { .. })
        })
        .expect("in the log");
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("it is there");
        wait_for(TIMEOUT, || {
            if rm_registration_count(vm) > before {
                Ok(())
            } else {
                Err("no other resource manager".into())
            }
        })
        .or_panic_with_logs(vm);
        refused(vm);
        let again = pvm(vm, &["undrain", "h2"]);
        assert_eq!(
            (again.succeeded(), again.out.as_str()),
            (true, "h2 accepts tasks\n"),
            "{again:?}"
        );
        let tid = vm.spawn(&["-h2", "hold", "1"]).or_panic_with_logs(vm);
        assert_eq!(vm.host_of(&tid).expect("alive"), "h2");
        let unknown = pvm(vm, &["drain", "h9"]);
        assert!(
            !unknown.succeeded() && unknown.err.contains("knows no host h9"),
            "{unknown:?}"
        );
    });
}

/// No host accepts the job, so the drain makes a checkpoint of it and ends it.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn unmigratable_job_is_checkpointed_and_ended() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let place = |n: usize| vm.bed().host(n).machine_path("/tmp/only-there");
        std::fs::create_dir(place(2)).expect("made");
        let tid = vm
            .spawn(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        check_memory(vm, &tid);
        let done = pvm(vm, &["drain", "h2", "--deadline", "2s", "--checkpoint"]);
        assert!(
            done.succeeded() && done.out.contains("h2 is empty after "),
            "{done:?}\n{}",
            vm.logs()
        );
        let says = done
            .out
            .lines()
            .find_map(|line| line.strip_prefix(&format!("job {tid} has ended; 'restart ")));
        let set = says
            .and_then(|rest| rest.split('\'').next())
            .unwrap_or_else(|| panic!("{done:?}"));
        let gone = wait_for(TIMEOUT, || {
            let left = vm.tasks().map_err(|error| error.to_string())?;
            if left.iter().any(|task| task.tid == tid) {
                Err(format!("{left:?}"))
            } else {
                Ok(())
            }
        });
        gone.or_panic_with_logs(vm);
        let not_there = pvm(vm, &["restart", set, "--on", "h3"]);
        assert!(
            !not_there.succeeded() && not_there.err.contains("/tmp/only-there"),
            "{not_there:?}"
        );
        std::fs::create_dir(place(3)).expect("made");
        let again = pvm(vm, &["restart", set, "--on", "h3"]);
        assert!(
            again.succeeded() && again.out == format!("{tid} runs on h3\n"),
            "{again:?}\n{}",
            vm.logs()
        );
        check_memory(vm, &tid);
    });
}

/// Only the job that no host accepts is checkpointed and ended. All other jobs migrate.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn only_unmigratable_job_is_checkpointed() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        std::fs::create_dir(vm.bed().host(2).machine_path("/tmp/only-there")).expect("made");
        let stays = vm
            .spawn(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        let goes: Vec<String> = ["6", "1", "3"]
            .iter()
            .map(|mib| vm.spawn(&["-h2", "hold", mib]).expect("spawned"))
            .collect();
        goes.iter()
            .chain([&stays])
            .for_each(|tid| check_memory(vm, tid));
        let done = pvm(vm, &["drain", "h2", "--deadline", "15s", "--checkpoint"]);
        assert!(
            done.succeeded() && done.out.contains("h2 is empty after "),
            "{done:?}\n{}",
            vm.logs()
        );
        assert!(
            done.out
                .contains(&format!("job {stays} has ended; 'restart ")),
            "{done:?}"
        );
        for tid in &goes {
            let left = done
                .out
                .lines()
                .find(|line| line.starts_with(&format!("{tid} has left (")));
            assert!(left.is_some_and(|line| line.ends_with(" MB)")), "{done:?}");
            assert_ne!(vm.host_of(tid).expect("alive"), "h2");
            check_memory(vm, tid);
        }
        let (until, written) = drain_deadline_and_checkpoints(vm);
        assert_eq!(written.len(), 1, "the others were not written");
        assert!(
            written[0] < until.expect("a deadline"),
            "not only when its time is over"
        );
    });
}

/// Returns the word that follows `begin` in the line that starts with `begin`.
fn word_after<'a>(out: &'a str, begin: &str) -> Option<&'a str> {
    out.lines()
        .find_map(|line| line.strip_prefix(begin))?
        .split(' ')
        .next()
}

/// The job that no host accepts continues on the drained host. At the deadline it has a checkpoint,
/// from which it can be restarted on another host after the drained one has gone.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn unmigratable_job_has_checkpoint_by_deadline() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let place = |n: usize| vm.bed().host(n).machine_path("/tmp/only-there");
        std::fs::create_dir(place(2)).expect("made");
        let tid = vm
            .spawn(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        check_memory(vm, &tid);
        let done = pvm(vm, &["drain", "h2", "--deadline", "8s"]);
        let set = word_after(&done.out, &format!("job {tid} is in the store as "));
        let set = set.unwrap_or_else(|| panic!("{done:?}\n{}", vm.logs()));
        let told = format!("job {tid} loses its work since {set} if h2 leaves now\n");
        assert!(!done.succeeded() && done.out.contains(&told), "{done:?}");
        assert!(
            done.out
                .contains(&format!("{tid} is still there: no host accepts it")),
            "{done:?}"
        );
        assert_eq!(vm.host_of(&tid).or_panic_with_logs(vm), "h2");
        check_memory(vm, &tid);
        let value = pvm(vm, &["--json", "drain", "h2", "--deadline", "8s"]);
        let value: serde_json::Value = serde_json::from_str(value.out.trim()).expect("one value");
        assert_eq!(
            (&value["sets"], value["kept"].as_array().map(Vec::len)),
            (&serde_json::json!([]), Some(1))
        );
        assert!(pvm(vm, &["delete", "h2"]).succeeded());
        std::fs::create_dir(place(3)).expect("made");
        let again = pvm(vm, &["restart", set, "--on", "h3"]);
        assert!(
            again.succeeded() && again.out == format!("{tid} runs on h3\n"),
            "{again:?}\n{}",
            vm.logs()
        );
        check_memory(vm, &tid);
    });
}

/// Returns the deadline of the newest drain, and the times after the start of that drain at which
/// checkpoints were complete, in microseconds since 1970.
fn drain_deadline_and_checkpoints(vm: &Vm) -> (Option<u64>, Vec<u64>) {
    let events = vm.events().or_panic_with_logs(vm);
    let begun = |entry: &EventEntry| matches!(entry.kind, EventKind::DrainStarted { .. });
    let first = events.iter().rposition(begun).expect("one is emptied");
    let EventKind::DrainStarted {
        deadline: until, ..
    } = &events[first].kind
    else {
        unreachable!("it was just found")
    };
    let sets = events[first..]
        .iter()
        .filter(|entry| matches!(entry.kind, EventKind::Checkpointed { .. }));
    (
        until.map(|until| until.0),
        sets.map(|entry| entry.at_us).collect(),
    )
}

/// A drain uses the periodic checkpoints of the job, and makes no additional one.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_writes_no_second_checkpoint() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        std::fs::create_dir(vm.bed().host(2).machine_path("/tmp/only-there")).expect("made");
        let tid = vm
            .spawn(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        check_memory(vm, &tid);
        vm.json(&["checkpoint", "--every", "1h", &tid])
            .or_panic_with_logs(vm);
        let done = pvm(vm, &["drain", "h2", "--deadline", "9s"]);
        assert!(
            !done.succeeded() && !done.out.contains("is being checkpointed"),
            "{done:?}"
        );
        assert!(
            done.out
                .contains(&format!("job {tid} loses its work since ")),
            "{done:?}"
        );
        assert_eq!(
            drain_deadline_and_checkpoints(vm).1.len(),
            1,
            "{done:?}\n{}",
            vm.logs()
        );
        check_memory(vm, &tid);
    });
}

/// The network is slow and the store is on the drained host. Jobs that wait for their migration are
/// checkpointed during the wait.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn queued_jobs_are_stored_while_others_leave() {
    let env = [
        ("SEMPA_MOVE_RATE", "1000000"),
        ("SEMPA_POST_COPY", "never"),
        ("SEMPA_PRE_COPY", "never"),
    ];
    with_three_hosts_in(&env, Some("pvm-rm"), |vm| {
        let spawn = |mib: &str| vm.spawn(&["-h1", "hold", mib]).or_panic_with_logs(vm);
        let go: Vec<String> = (0..4).map(|_| spawn("4")).collect();
        let wait: Vec<String> = (0..6).map(|_| spawn("8")).collect();
        go.iter().chain(&wait).for_each(|tid| check_memory(vm, tid));
        let done = pvm(vm, &["drain", "h1", "--deadline", "20s", "--checkpoint"]);
        let told = done
            .out
            .lines()
            .take_while(|line| !line.contains(" has left ("));
        let told: Vec<&str> = told
            .filter(|line| line.contains(" has ended; 'restart "))
            .collect();
        let waited = |line: &&str| {
            wait.iter()
                .any(|tid| line.starts_with(&format!("job {tid} ")))
        };
        assert!(
            !told.is_empty() && told.iter().all(waited),
            "{done:?}\n{}",
            vm.logs()
        );
    });
}

/// Spawns a task that only h2 accepts. Returns its tid.
fn spawn_unmigratable(vm: &Vm) -> String {
    std::fs::create_dir_all(vm.bed().host(2).machine_path("/tmp/only-there"))
        .or_panic_with_logs(vm);
    let tid = vm
        .spawn(&["-h2:/tmp/only-there", "hold", "2"])
        .or_panic_with_logs(vm);
    check_memory(vm, &tid);
    tid
}

/// Starts a drain with the console and waits until the host accepts no tasks.
fn start_drain(vm: &Vm, words: &[&str]) -> RunningCommand {
    let drain = vm.start_pvm(words).or_panic_with_logs(vm);
    let told = || match drain.out_so_far() {
        Ok(out) if out.contains(" accepts no tasks; ") => Ok(()),
        other => Err(format!("{other:?} {:?}", drain.err_so_far())),
    };
    wait_for(TIMEOUT, told).or_panic_with_logs(vm);
    drain
}

/// Argument of the process that executes a drain. The console command that a user types only shows
/// the progress.
const EXECUTOR_OPTION: &str = "--apart";

/// Sends a signal to the typed console command, but not to the process that executes the drain.
fn signal_command(vm: &Vm, words: &str, signal: Signal) {
    let own = format!("bin/pvm {words}");
    let typed = |line: &str| !line.contains(EXECUTOR_OPTION) && line.ends_with(own.trim());
    // `nsenter` and `env` have these words in their command lines until they execute the command,
    // so they are excluded.
    let mut found = vm
        .bed()
        .host(1)
        .processes()
        .into_iter()
        .filter(|(_, line)| typed(line));
    let (pid, _) = found
        .find(|(_, line)| line.starts_with('/'))
        .expect("it runs");
    kill(Pid::from_raw(pid.cast_signed()), signal).expect("it is there");
}

/// Checks that the newest drain was executed by its deadline: one checkpoint of the job was made,
/// the job continues, and no process of the drain is left.
fn check_drained_job(vm: &Vm, tid: &str) {
    let written = |entry: &EventEntry| matches!(&entry.kind, EventKind::Checkpointed { job, .. } if job.to_string() == tid);
    wait_for(TIMEOUT, || {
        match drain_deadline_and_checkpoints(vm).1.len() {
            0 => Err(format!("nothing was written\n{}", vm.logs())),
            _ => Ok(()),
        }
    })
    .or_panic_with_logs(vm);
    wait_until_no_process(vm.bed().host(1), EXECUTOR_OPTION, TIMEOUT).or_panic_with_logs(vm);
    let (until, sets) = drain_deadline_and_checkpoints(vm);
    assert!(vm.events().or_panic_with_logs(vm).iter().any(written));
    assert_eq!(sets.len(), 1, "{}", vm.logs());
    assert!(until.is_some_and(|until| sets[0] < until), "{}", vm.logs());
    assert_eq!(vm.host_of(tid).or_panic_with_logs(vm), "h2");
    check_memory(vm, tid);
}

/// The job has a checkpoint at the deadline although the console command was killed or interrupted.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_survives_its_command() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tid = spawn_unmigratable(vm);
        let words = ["drain", "h2", "--deadline", "9s"];
        let killed = start_drain(vm, &words);
        signal_command(vm, &words.join(" "), Signal::SIGKILL);
        let killed = killed.finish(TIMEOUT).or_panic_with_logs(vm);
        assert!(
            !killed.succeeded() && !killed.out.contains("is being checkpointed"),
            "it was before: {killed:?}"
        );
        check_drained_job(vm, &tid);
        let words = ["drain", "h2", "--deadline", "10s"];
        let interrupted = start_drain(vm, &words);
        signal_command(vm, &words.join(" "), Signal::SIGINT);
        let interrupted = interrupted.finish(TIMEOUT).or_panic_with_logs(vm);
        assert_eq!(interrupted.status.code(), Some(130), "{interrupted:?}");
        assert_eq!(
            interrupted.err,
            "drain: h2 is still being drained; 'undrain h2' cancels it\n"
        );
        check_drained_job(vm, &tid);
    });
}

/// The job has a checkpoint at the deadline although the resource managers are killed until then.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_survives_its_resource_managers() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tid = spawn_unmigratable(vm);
        let drain = start_drain(vm, &["drain", "h2", "--deadline", "14s"]);
        let before = rm_registration_count(vm);
        for number in 1..=2 {
            let rm = vm
                .bed()
                .host(1)
                .processes()
                .into_iter()
                .find(|(_, line)| line.contains("pvm-rm"))
                .expect("it runs");
            kill(Pid::from_raw(rm.0.cast_signed()), Signal::SIGKILL).expect("it is there");
            let again = || {
                if rm_registration_count(vm) >= before + number {
                    Ok(())
                } else {
                    Err("no other one".to_string())
                }
            };
            wait_for(TIMEOUT, again).or_panic_with_logs(vm);
        }
        let done = drain.finish(TIMEOUT).or_panic_with_logs(vm);
        assert!(
            word_after(&done.out, &format!("job {tid} is in the store as ")).is_some(),
            "{done:?}\n{}",
            vm.logs()
        );
        check_drained_job(vm, &tid);
    });
}

/// `undrain` ends a drain whose console command was killed. A second drain with another deadline
/// replaces the first one. Only one checkpoint of the job is made.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_later_drain_or_undrain_replaces_a_drain() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tid = spawn_unmigratable(vm);
        let words = ["drain", "h2", "--deadline", "1h", "--checkpoint"];
        let killed = start_drain(vm, &words);
        signal_command(vm, &words.join(" "), Signal::SIGKILL);
        killed.finish(TIMEOUT).or_panic_with_logs(vm);
        assert!(pvm(vm, &["undrain", "h2"]).succeeded());
        wait_until_no_process(vm.bed().host(1), EXECUTOR_OPTION, TIMEOUT).or_panic_with_logs(vm);
        let earlier = start_drain(vm, &words);
        // A drain command without a deadline only shows the progress of the drain.
        let looks_on = start_drain(vm, &["drain", "h2"]);
        let later = pvm(vm, &["drain", "h2", "--deadline", "8s"]);
        assert!(
            word_after(&later.out, &format!("job {tid} is in the store as ")).is_some(),
            "{later:?}"
        );
        let earlier = earlier.finish(TIMEOUT).or_panic_with_logs(vm);
        assert!(
            !earlier.succeeded() && earlier.out.contains("a later drain of h2 by "),
            "{earlier:?}"
        );
        let looked_on = looks_on.finish(TIMEOUT).or_panic_with_logs(vm);
        assert!(!looked_on.out.contains("a later drain"), "{looked_on:?}");
        check_drained_job(vm, &tid);
    });
}

/// The drain checkpoints a job that was started by the console that runs the drain, although that
/// console ends.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_outlives_its_console() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        std::fs::create_dir(vm.bed().host(2).machine_path("/tmp/only-there"))
            .or_panic_with_logs(vm);
        let start = || {
            let mut command = vm.pvm_command(&[]);
            command.env("TERM", "dumb");
            RunningCommand::start(command, Stdio::piped()).or_panic_with_logs(vm)
        };
        let mut console = start();
        let mut keys = console.take_stdin().expect("piped");
        keys.write_all(b"spawn -h2:/tmp/only-there hold 2\n")
            .or_panic_with_logs(vm);
        let of_console = || {
            let tasks = vm.tasks().map_err(|error| error.to_string())?;
            let task = tasks
                .iter()
                .find(|task| task.name.ends_with("hold") && task.flags & TASK_CONNECTED != 0);
            task.map(|task| task.tid.clone())
                .ok_or_else(|| format!("{tasks:?}"))
        };
        let tid = wait_for(TIMEOUT, of_console).or_panic_with_logs(vm);
        keys.write_all(b"drain h2 --deadline 8s\n")
            .or_panic_with_logs(vm);
        let written = || match console.out_so_far().map_err(|error| error.to_string())? {
            out if out.contains(&format!("job {tid} is in the store as ")) => Ok(out),
            out => Err(out),
        };
        let out = wait_for(TIMEOUT, written).or_panic_with_logs(vm);
        assert!(
            out.contains("h2 accepts no tasks; 1 must leave\n")
                && out.contains(" is still there: no host"),
            "{out}"
        );
        let orders = |vm: &Vm| {
            let events = vm.events().or_panic_with_logs(vm);
            events
                .iter()
                .filter(|entry| matches!(entry.kind, EventKind::DrainStarted { .. }))
                .count()
        };
        keys.write_all(b"drain h2 --deadline 8s\n")
            .or_panic_with_logs(vm);
        wait_for(TIMEOUT, || {
            if orders(vm) == 2 {
                Ok(())
            } else {
                Err("no second order".to_string())
            }
        })
        .or_panic_with_logs(vm);
        signal_command(vm, "", Signal::SIGKILL);
        console.finish(TIMEOUT).or_panic_with_logs(vm);
        check_drained_job(vm, &tid);
    });
}

/// Without a resource manager a drain fails. The error says what is missing, and nothing changes.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_needs_a_resource_manager() {
    with_three_hosts(None, |vm| {
        let done = pvm(vm, &["drain", "h2"]);
        assert!(
            !done.succeeded()
                && done
                    .err
                    .contains("this needs a resource manager, and none is running"),
            "{done:?}"
        );
        assert!(vm.spawn(&["-h2", "hold", "1"]).is_ok());
    });
}
