//! The hosts that would accept a task are known before a migration; and hosts are drained, kept
//! empty and used again.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::event::EventKind;
use sempa_proto::table::TASK_CONNECTED;
use sempa_tests::needs::testbed_with_env;
use sempa_tests::run::{Done, Running, must};
use sempa_tests::testbed::gone;
use sempa_tests::vm::{Entry, Settings};
use sempa_tests::{Sure, Vm, eventually};
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

fn with_three_hosts(rm: Option<&str>, test: impl FnOnce(&Vm)) {
    with_three_hosts_in(&[], rm, test);
}

/// As [`with_three_hosts`], with additional environment variables.
fn with_three_hosts_in(env: &[(&str, &str)], rm: Option<&str>, test: impl FnOnce(&Vm)) {
    let bed = testbed_with_env(3, env);
    let settings = Settings {
        rm: rm.map(String::from),
        env: Settings::env_of(env),
        ..Settings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.program("hold").expect("gcc");
    test(&vm);
    vm.halt().expect("halts");
}

fn pvm(vm: &Vm, words: &[&str]) -> Done {
    vm.pvm(words).sure(vm)
}

/// Checks that the task answers and that its memory is unchanged.
fn lives(vm: &Vm, tid: &str) {
    let mut command = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
    command.args(["ask", tid]);
    let done = must(command, TIMEOUT).sure(vm);
    assert!(done.out.contains("sum GOOD"), "{done:?}");
}

fn registered(vm: &Vm) -> usize {
    let is = |kind: &EventKind| matches!(kind, EventKind::RmRegistered { .. });
    vm.events()
        .expect("events")
        .iter()
        .filter(|entry| is(&entry.kind))
        .count()
}

/// Hosts answer in advance whether they would accept a task, and a migration confirms the answer.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn can_migrate_tells_which_hosts_take_a_task() {
    with_three_hosts(None, |vm| {
        let place = |n: usize| vm.bed().host(n).path("/tmp/only-there");
        std::fs::create_dir(place(2)).expect("made");
        let tid = vm
            .spawn(&["-h2:/tmp/only-there", "hold", "1"])
            .expect("spawned");
        lives(vm, &tid);
        let nobody = pvm(vm, &["can-migrate", &tid]);
        let missing = "no: /tmp/only-there: it does not exist on the target";
        assert!(
            !nobody.good() && nobody.out.ends_with("no host would take it\n"),
            "{nobody:?}"
        );
        assert_eq!(nobody.out.matches(missing).count(), 2, "{nobody:?}");
        std::fs::create_dir(place(3)).expect("made");
        let one = pvm(vm, &["can-migrate", &tid]);
        assert!(
            one.good()
                && one
                    .out
                    .ends_with("the nearest host that would take it: h3\n"),
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
        lives(vm, &tid);
        let refused = pvm(vm, &["can-migrate", "t40001"]);
        assert!(
            !refused.good() && refused.err.contains("t40001 cannot migrate: "),
            "{refused:?}"
        );
        let nowhere = pvm(vm, &["can-migrate", &tid, "h9"]);
        assert!(
            !nowhere.good() && nowhere.err.contains("there is no such host"),
            "{nowhere:?}"
        );
    });
}

/// All tasks leave, the next resource manager keeps the host empty, and undrain ends that.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drained_host_stays_empty_until_undrained() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tids: Vec<String> = (0..2)
            .map(|_| vm.spawn(&["-h2", "hold", "4"]).expect("spawned"))
            .collect();
        tids.iter().for_each(|tid| lives(vm, tid));
        let done = pvm(vm, &["drain", "h2", "--deadline", "50s"]);
        assert!(done.good(), "{done:?}\n{}", vm.logs());
        assert!(
            done.out.starts_with("h2 takes no tasks; 2 are to leave\n")
                && done.out.contains("\nh2 is empty after ")
        );
        for tid in &tids {
            assert!(done.out.contains(&format!("{tid} has left (")), "{done:?}");
            assert_ne!(vm.host_of(tid).expect("alive"), "h2");
            lives(vm, tid);
        }
        let refused = |vm: &Vm| {
            let spawn = pvm(vm, &["spawn", "-h2", "hold", "1"]);
            assert!(!spawn.good(), "{spawn:?}\n{}", vm.logs());
        };
        refused(vm);
        let why = pvm(vm, &["why", "h2"]);
        assert!(
            why.out
                .contains("now: nothing is placed on h2: it is being emptied, or kept empty"),
            "{why:?}"
        );
        let before = registered(vm);
        let rm = vm
            .bed()
            .host(1)
            .processes()
            .into_iter()
            .find(|(_, line)| line.contains("pvm-rm"))
            .expect("it runs");
        let pid = nix::unistd::Pid::from_raw(rm.0.cast_signed());
        // The order is on the disk when it is in the log.
        vm.event(TIMEOUT, "drain", |entry| {
            matches!(entry.kind, EventKind::DrainStarted { .. })
        })
        .expect("in the log");
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("it is there");
        eventually(TIMEOUT, || {
            if registered(vm) > before {
                Ok(())
            } else {
                Err("no other resource manager".into())
            }
        })
        .sure(vm);
        refused(vm);
        let again = pvm(vm, &["undrain", "h2"]);
        assert_eq!(
            (again.good(), again.out.as_str()),
            (true, "h2 takes tasks\n"),
            "{again:?}"
        );
        let tid = vm.spawn(&["-h2", "hold", "1"]).sure(vm);
        assert_eq!(vm.host_of(&tid).expect("alive"), "h2");
        let unknown = pvm(vm, &["drain", "h9"]);
        assert!(
            !unknown.good() && unknown.err.contains("knows no host h9"),
            "{unknown:?}"
        );
    });
}

/// No host accepts the job, so the drain writes a checkpoint and ends the job.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_stuck_job_leaves_as_a_checkpoint() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let place = |n: usize| vm.bed().host(n).path("/tmp/only-there");
        std::fs::create_dir(place(2)).expect("made");
        let tid = vm
            .spawn(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        lives(vm, &tid);
        let done = pvm(vm, &["drain", "h2", "--deadline", "2s", "--checkpoint"]);
        assert!(
            done.good() && done.out.contains("h2 is empty after "),
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
        let gone = eventually(TIMEOUT, || {
            let left = vm.tasks().map_err(|error| error.to_string())?;
            if left.iter().any(|task| task.tid == tid) {
                Err(format!("{left:?}"))
            } else {
                Ok(())
            }
        });
        gone.sure(vm);
        let not_there = pvm(vm, &["restart", set, "--on", "h3"]);
        assert!(
            !not_there.good() && not_there.err.contains("/tmp/only-there"),
            "{not_there:?}"
        );
        std::fs::create_dir(place(3)).expect("made");
        let again = pvm(vm, &["restart", set, "--on", "h3"]);
        assert!(
            again.good() && again.out == format!("{tid} runs on h3\n"),
            "{again:?}\n{}",
            vm.logs()
        );
        lives(vm, &tid);
    });
}

/// Only the job that no host accepts is checkpointed; the others migrate.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn stuck_jobs_are_checkpointed_before_the_deadline() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        std::fs::create_dir(vm.bed().host(2).path("/tmp/only-there")).expect("made");
        let stays = vm
            .spawn(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        let goes: Vec<String> = ["6", "1", "3"]
            .iter()
            .map(|mib| vm.spawn(&["-h2", "hold", mib]).expect("spawned"))
            .collect();
        goes.iter().chain([&stays]).for_each(|tid| lives(vm, tid));
        let done = pvm(vm, &["drain", "h2", "--deadline", "15s", "--checkpoint"]);
        assert!(
            done.good() && done.out.contains("h2 is empty after "),
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
            lives(vm, tid);
        }
        let (until, written) = drain_and_sets(vm);
        assert_eq!(written.len(), 1, "the others were not written");
        assert!(
            written[0] < until.expect("a deadline"),
            "not only when its time is over"
        );
    });
}

/// Returns the word after this beginning of a line.
fn word_after<'a>(out: &'a str, begin: &str) -> Option<&'a str> {
    out.lines()
        .find_map(|line| line.strip_prefix(begin))?
        .split(' ')
        .next()
}

/// The job continues on the host, and can be restarted elsewhere after the host has gone.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_stuck_job_is_stored_by_the_deadline() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let place = |n: usize| vm.bed().host(n).path("/tmp/only-there");
        std::fs::create_dir(place(2)).expect("made");
        let tid = vm
            .spawn(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        lives(vm, &tid);
        let done = pvm(vm, &["drain", "h2", "--deadline", "8s"]);
        let set = word_after(&done.out, &format!("job {tid} is in the store as "));
        let set = set.unwrap_or_else(|| panic!("{done:?}\n{}", vm.logs()));
        let told = format!("job {tid} loses what it has done since {set} if h2 leaves now\n");
        assert!(!done.good() && done.out.contains(&told), "{done:?}");
        assert!(
            done.out
                .contains(&format!("{tid} is still there: no host accepts it")),
            "{done:?}"
        );
        assert_eq!(vm.host_of(&tid).sure(vm), "h2");
        lives(vm, &tid);
        let value = pvm(vm, &["--json", "drain", "h2", "--deadline", "8s"]);
        let value: serde_json::Value = serde_json::from_str(value.out.trim()).expect("one value");
        assert_eq!(
            (&value["sets"], value["kept"].as_array().map(Vec::len)),
            (&serde_json::json!([]), Some(1))
        );
        assert!(pvm(vm, &["delete", "h2"]).good());
        std::fs::create_dir(place(3)).expect("made");
        let again = pvm(vm, &["restart", set, "--on", "h3"]);
        assert!(
            again.good() && again.out == format!("{tid} runs on h3\n"),
            "{again:?}\n{}",
            vm.logs()
        );
        lives(vm, &tid);
    });
}

/// Returns the deadline of the last drain, and when checkpoints were complete after it began, in
/// microseconds since 1970.
fn drain_and_sets(vm: &Vm) -> (Option<u64>, Vec<u64>) {
    let events = vm.events().sure(vm);
    let begun = |entry: &Entry| matches!(entry.kind, EventKind::DrainStarted { .. });
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

/// A drain uses the checkpoints that the daemons make of the job already.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_writes_no_second_checkpoint() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        std::fs::create_dir(vm.bed().host(2).path("/tmp/only-there")).expect("made");
        let tid = vm
            .spawn(&["-h2:/tmp/only-there", "hold", "2"])
            .expect("spawned");
        lives(vm, &tid);
        vm.json(&["checkpoint", "--every", "1h", &tid]).sure(vm);
        let done = pvm(vm, &["drain", "h2", "--deadline", "9s"]);
        assert!(
            !done.good() && !done.out.contains("is being written"),
            "{done:?}"
        );
        assert!(
            done.out
                .contains(&format!("job {tid} loses what it has done since ")),
            "{done:?}"
        );
        assert_eq!(drain_and_sets(vm).1.len(), 1, "{done:?}\n{}", vm.logs());
        lives(vm, &tid);
    });
}

/// The network is slow and the store is on the host itself: jobs that wait for their turn to
/// migrate are written there meanwhile.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn queued_jobs_are_stored_while_others_leave() {
    let env = [
        ("SEMPA_MOVE_RATE", "1000000"),
        ("SEMPA_POST_COPY", "never"),
        ("SEMPA_PRE_COPY", "never"),
    ];
    with_three_hosts_in(&env, Some("pvm-rm"), |vm| {
        let spawn = |mib: &str| vm.spawn(&["-h1", "hold", mib]).sure(vm);
        let go: Vec<String> = (0..4).map(|_| spawn("4")).collect();
        let wait: Vec<String> = (0..6).map(|_| spawn("8")).collect();
        go.iter().chain(&wait).for_each(|tid| lives(vm, tid));
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

/// Spawns a task that only h2 accepts.
fn spawn_what_stays(vm: &Vm) -> String {
    std::fs::create_dir_all(vm.bed().host(2).path("/tmp/only-there")).sure(vm);
    let tid = vm.spawn(&["-h2:/tmp/only-there", "hold", "2"]).sure(vm);
    lives(vm, &tid);
    tid
}

/// Starts a drain and waits until the host is being emptied.
fn begin(vm: &Vm, words: &[&str]) -> Running {
    let drain = vm.start_pvm(words).sure(vm);
    let told = || match drain.out_so_far() {
        Ok(out) if out.contains(" takes no tasks; ") => Ok(()),
        other => Err(format!("{other:?} {:?}", drain.err_so_far())),
    };
    eventually(TIMEOUT, told).sure(vm);
    drain
}

/// An argument of the process that executes a drain; the typed command only shows its progress.
const APART: &str = "--apart";

/// Sends a signal to the typed command, not to the process that executes it.
fn signal_command(vm: &Vm, words: &str, signal: Signal) {
    let own = format!("bin/pvm {words}");
    let typed = |line: &str| !line.contains(APART) && line.ends_with(own.trim());
    // `nsenter` and `env` have these words until they have started it.
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

/// Checks that the last drain was executed by its deadline: the job is in the store, once, and
/// continues; no process of the drain is left.
fn is_written_and_goes_on(vm: &Vm, tid: &str) {
    let written = |entry: &Entry| matches!(&entry.kind, EventKind::Checkpointed { job, .. } if job.to_string() == tid);
    eventually(TIMEOUT, || match drain_and_sets(vm).1.len() {
        0 => Err(format!("nothing was written\n{}", vm.logs())),
        _ => Ok(()),
    })
    .sure(vm);
    gone(vm.bed().host(1), APART, TIMEOUT).sure(vm);
    let (until, sets) = drain_and_sets(vm);
    assert!(vm.events().sure(vm).iter().any(written));
    assert_eq!(sets.len(), 1, "{}", vm.logs());
    assert!(until.is_some_and(|until| sets[0] < until), "{}", vm.logs());
    assert_eq!(vm.host_of(tid).sure(vm), "h2");
    lives(vm, tid);
}

/// The job is in the store at the deadline although the command was killed or interrupted.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_survives_its_command() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tid = spawn_what_stays(vm);
        let words = ["drain", "h2", "--deadline", "9s"];
        let killed = begin(vm, &words);
        signal_command(vm, &words.join(" "), Signal::SIGKILL);
        let killed = killed.finish(TIMEOUT).sure(vm);
        assert!(
            !killed.good() && !killed.out.contains("is being written"),
            "it was before: {killed:?}"
        );
        is_written_and_goes_on(vm, &tid);
        let words = ["drain", "h2", "--deadline", "10s"];
        let interrupted = begin(vm, &words);
        signal_command(vm, &words.join(" "), Signal::SIGINT);
        let interrupted = interrupted.finish(TIMEOUT).sure(vm);
        assert_eq!(interrupted.status.code(), Some(130), "{interrupted:?}");
        assert_eq!(
            interrupted.err,
            "drain: h2 goes on being emptied; 'undrain h2' calls it off\n"
        );
        is_written_and_goes_on(vm, &tid);
    });
}

/// The job is in the store at the deadline although resource managers are killed until then.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_survives_its_resource_managers() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tid = spawn_what_stays(vm);
        let drain = begin(vm, &["drain", "h2", "--deadline", "14s"]);
        let before = registered(vm);
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
                if registered(vm) >= before + number {
                    Ok(())
                } else {
                    Err("no other one".to_string())
                }
            };
            eventually(TIMEOUT, again).sure(vm);
        }
        let done = drain.finish(TIMEOUT).sure(vm);
        assert!(
            word_after(&done.out, &format!("job {tid} is in the store as ")).is_some(),
            "{done:?}\n{}",
            vm.logs()
        );
        is_written_and_goes_on(vm, &tid);
    });
}

/// The command of the earlier drain was killed. No checkpoint is written twice.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_later_drain_or_undrain_replaces_a_drain() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        let tid = spawn_what_stays(vm);
        let words = ["drain", "h2", "--deadline", "1h", "--checkpoint"];
        let killed = begin(vm, &words);
        signal_command(vm, &words.join(" "), Signal::SIGKILL);
        killed.finish(TIMEOUT).sure(vm);
        assert!(pvm(vm, &["undrain", "h2"]).good());
        gone(vm.bed().host(1), APART, TIMEOUT).sure(vm);
        let earlier = begin(vm, &words);
        // A drain without a deadline only shows progress.
        let looks_on = begin(vm, &["drain", "h2"]);
        let later = pvm(vm, &["drain", "h2", "--deadline", "8s"]);
        assert!(
            word_after(&later.out, &format!("job {tid} is in the store as ")).is_some(),
            "{later:?}"
        );
        let earlier = earlier.finish(TIMEOUT).sure(vm);
        assert!(
            !earlier.good()
                && earlier
                    .out
                    .contains("a later order to empty h2 counts, that of "),
            "{earlier:?}"
        );
        let looked_on = looks_on.finish(TIMEOUT).sure(vm);
        assert!(!looked_on.out.contains("a later order"), "{looked_on:?}");
        is_written_and_goes_on(vm, &tid);
    });
}

/// A drain checkpoints a job that the console itself has started.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_outlives_its_console() {
    with_three_hosts(Some("pvm-rm"), |vm| {
        std::fs::create_dir(vm.bed().host(2).path("/tmp/only-there")).sure(vm);
        let start = || {
            let mut command = vm.pvm_command(&[]);
            command.env("TERM", "dumb");
            Running::start(command, Stdio::piped()).sure(vm)
        };
        let mut console = start();
        let mut keys = console.take_stdin().expect("piped");
        keys.write_all(b"spawn -h2:/tmp/only-there hold 2\n")
            .sure(vm);
        let of_console = || {
            let tasks = vm.tasks().map_err(|error| error.to_string())?;
            let task = tasks
                .iter()
                .find(|task| task.name.ends_with("hold") && task.flags & TASK_CONNECTED != 0);
            task.map(|task| task.tid.clone())
                .ok_or_else(|| format!("{tasks:?}"))
        };
        let tid = eventually(TIMEOUT, of_console).sure(vm);
        keys.write_all(b"drain h2 --deadline 8s\n").sure(vm);
        let written = || match console.out_so_far().map_err(|error| error.to_string())? {
            out if out.contains(&format!("job {tid} is in the store as ")) => Ok(out),
            out => Err(out),
        };
        let out = eventually(TIMEOUT, written).sure(vm);
        assert!(
            out.contains("h2 takes no tasks; 1 is to leave\n")
                && out.contains(" is still there: no host"),
            "{out}"
        );
        let orders = |vm: &Vm| {
            let events = vm.events().sure(vm);
            events
                .iter()
                .filter(|entry| matches!(entry.kind, EventKind::DrainStarted { .. }))
                .count()
        };
        keys.write_all(b"drain h2 --deadline 8s\n").sure(vm);
        eventually(TIMEOUT, || {
            if orders(vm) == 2 {
                Ok(())
            } else {
                Err("no second order".to_string())
            }
        })
        .sure(vm);
        signal_command(vm, "", Signal::SIGKILL);
        console.finish(TIMEOUT).sure(vm);
        is_written_and_goes_on(vm, &tid);
    });
}

/// The error says what is missing, and nothing changes.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_drain_needs_a_resource_manager() {
    with_three_hosts(None, |vm| {
        let done = pvm(vm, &["drain", "h2"]);
        assert!(
            !done.good() && done.err.contains("no resource manager runs"),
            "{done:?}"
        );
        assert!(vm.spawn(&["-h2", "hold", "1"]).is_ok());
    });
}
