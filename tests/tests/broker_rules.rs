//! Promises of a session to its users, on real hosts: limits, rights, the broker's own foreman,
//! owners who take hosts back, lost hosts, and a clean end.

use sempa_broker_client::directory::SessionEntry;
use sempa_tests::broker_vm::{BrokerVm, EXIT_OVER, TIMEOUT, sum_of_squares, total};
use sempa_tests::faults::SHORT_LEASE_ENV;
use sempa_tests::owner_agent::TestOwnerAgent;
use sempa_tests::requirements::require_testbed;
use sempa_tests::run::RunningCommand;
use sempa_tests::testbed::Host;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, wait_for};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;

/// Path of the program that acts as an owner agent.
const OWNER_AGENT_PROGRAM: &str = env!("CARGO_BIN_EXE_owner-speaks");
/// Largest number of brokers on one host.
const SESSIONS_PER_HOST_MAX: usize = 48;

/// Starts a member that stays until its input ends, and waits until the member has joined.
fn stay(broker: &BrokerVm, host: &Host, session: &str) -> RunningCommand {
    let arguments = ["broker-probe", "join", session, "worker", "60"];
    let member = RunningCommand::start(broker.command(host, &arguments), Stdio::piped());
    let member = member.expect("starts");
    broker.wait_for_line(&member, "joined as member");
    member
}

/// Waits until `pvm-broker members` says that the session is over.
fn wait_until_over(broker: &BrokerVm, session: &str) {
    wait_for(TIMEOUT, || {
        let result = broker.broker(&["members", session]);
        match result.status.code() {
            Some(EXIT_OVER) => Ok(()),
            _ => Err(format!("{result:?}")),
        }
    })
    .or_panic_with_logs(&broker.vm);
}

/// Kills the broker of the only session.
fn kill_broker(broker: &BrokerVm) {
    for host in broker.vm.testbed().hosts() {
        host.kill_matching_processes(|line| line.contains("pvm-broker serve"));
    }
    wait_for(TIMEOUT, || match broker.broker_pids() {
        pids if pids.is_empty() => Ok(()),
        pids => Err(format!("{pids:?}")),
    })
    .or_panic_with_logs(&broker.vm);
}

/// A limit on members, joins, messages or bytes refuses with its name. Joins and sends that wait
/// succeed when there is room.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn limits_refuse_with_their_names() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    let refused_join = |session: &str, seconds: &str| {
        let arguments = ["broker-probe", "join", session, "worker", seconds];
        let result = broker.run_on(bed.host(1), &arguments);
        assert_eq!(result.status.code(), Some(1), "{result:?}");
        result.stderr
    };
    broker.broker_succeeds(&["start", "joins", "--joins-per-second", "0"]);
    let text = refused_join("joins", "1");
    assert!(
        text.contains("the limit joins-per-second of the session is reached"),
        "{text}"
    );

    broker.broker_succeeds(&["start", "members", "--members", "1"]);
    let mut first = stay(&broker, bed.host(1), "members");
    let text = refused_join("members", "1");
    assert!(
        text.contains("the limit members of the session is reached"),
        "{text}"
    );
    let waiting = ["broker-probe", "join", "members", "worker", "60"];
    let second = broker.start_on(bed.host(1), &waiting);
    drop(first.take_stdin());
    broker.expect_status(first, 0);
    broker.expect_status(second, 0);

    for (limit, value, bytes, expected) in [
        ("member-messages", "3", "5", "after 3"),
        ("member-bytes", "100", "30", "after 3"),
        ("session-messages", "2", "5", "after 2"),
        ("session-bytes", "100", "50", "after 2"),
        ("message-bytes", "100", "101", "after 0"),
    ] {
        broker.broker_succeeds(&["start", limit, &format!("--{limit}"), value]);
        let output = broker.output_of(&["broker-probe", "fill", limit, bytes]);
        let refusal = format!("{expected}: full (limit {limit})\n");
        let room = if limit == "message-bytes" {
            ""
        } else {
            "with room: taken\n"
        };
        assert_eq!(output, refusal + room);
    }
    for session in ["joins", "members", "member-messages", "member-bytes"] {
        broker.broker_succeeds(&["end", session, "--within", "0"]);
    }
    for session in ["session-messages", "session-bytes", "message-bytes"] {
        broker.broker_succeeds(&["end", session, "--within", "0"]);
    }
    broker.end();
}

/// A host has at most 48 brokers. The next session starts on another host, or is refused with the
/// name of the limit, until a session ends.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_full_host_gets_no_more_sessions() {
    let bed = require_testbed(2);
    let broker = BrokerVm::start_with_hosts(&bed, 1);
    let start = |number: usize| broker.broker(&["start", &format!("s{number}"), "--idle", "1000"]);
    for number in 0..SESSIONS_PER_HOST_MAX {
        let result = start(number);
        assert!(result.succeeded(), "{number}: {result:?}");
    }
    let result = start(48);
    assert_eq!(result.status.code(), Some(1), "{result:?}");
    assert!(
        result
            .stderr
            .contains("the limit sessions-per-host is reached"),
        "{result:?}"
    );
    broker.broker_succeeds(&["end", "s0", "--within", "0"]);
    wait_until_over(&broker, "s0");
    let result = start(48);
    assert!(result.succeeded(), "{result:?}");
    broker.vm.add_hosts(&["h2"]).expect("it joins");
    let result = start(49);
    assert!(result.succeeded(), "{result:?}");
    let sessions: Value =
        serde_json::from_str(&broker.broker_succeeds(&["sessions", "--json"])).expect("JSON");
    assert_eq!(sessions["s49"]["Running"]["host"], "h2", "{sessions}");
    broker.vm.halt_and_wait().expect("halts");
    let leftovers = bed.host(1).leftover_files(bed.folder());
    assert_eq!(leftovers, Vec::<PathBuf>::new());
}

/// The virtual machine remembers a limited number of ended sessions. Each new session removes old
/// entries and no new ones.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn old_ended_sessions_are_forgotten() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    let probe = broker.start_on(bed.host(1), &["broker-probe", "remember", "old", "740"]);
    broker.expect_status(probe, 0);
    let sessions = || -> BTreeMap<String, SessionEntry> {
        let text = broker.broker_succeeds(&["sessions", "--json"]);
        serde_json::from_str(&text).expect("JSON")
    };
    assert_eq!(sessions().len(), 740);
    for number in 0..6 {
        let session = format!("new{number}");
        broker.broker_succeeds(&["start", &session]);
        broker.broker_succeeds(&["end", &session, "--within", "0"]);
        wait_until_over(&broker, &session);
    }
    let sessions = sessions();
    // The last session was added after the last removal.
    assert_eq!(sessions.len(), 737);
    for number in 0..6 {
        let session = format!("new{number}");
        assert!(sessions.contains_key(&session), "{sessions:?}");
    }
    broker.end();
}

/// A session without members ends after its idle time, and late comers learn that. A new session of
/// the same name begins only if the user says so.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_session_without_members_ends() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    broker.broker_succeeds(&["start", "idle", "--idle", "5"]);
    let file = broker.session_file("idle");
    let member = stay(&broker, bed.outside_host(), &file);
    broker.expect_status(without_input(member), 0);
    wait_until_over(&broker, "idle");
    assert_eq!(
        broker.broker(&["start", "idle"]).status.code(),
        Some(EXIT_OVER)
    );
    // The old broker still answers late comers from outside.
    broker.broker_succeeds(&["start", "idle", "--new"]);
    let late = broker.run_on(
        bed.outside_host(),
        &["broker-probe", "join", &file, "worker", "60"],
    );
    assert_eq!(late.status.code(), Some(EXIT_OVER), "{late:?}");
    let worker = broker.start_on(bed.host(1), &["broker_worker", "idle", "1", "0"]);
    broker.wait_until_present("idle", 1);
    broker.broker_succeeds(&["end", "idle", "--within", "0"]);
    broker.expect_status(worker, EXIT_OVER);
    broker.vm.halt_and_wait().expect("halts");
}

fn without_input(mut member: RunningCommand) -> RunningCommand {
    drop(member.take_stdin());
    member
}

/// A late comer with a session file learns that the session is over, also when no broker listens
/// any more, if its host is part of the virtual machine.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_late_comer_learns_from_the_record_of_the_virtual_machine() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    broker.broker_succeeds(&["start", "past", "--linger", "0"]);
    let file = broker.session_file("past");
    broker.broker_succeeds(&["end", "past", "--within", "0"]);
    wait_for(TIMEOUT, || match broker.broker_pids() {
        pids if pids.is_empty() => Ok(()),
        pids => Err(format!("{pids:?}")),
    })
    .or_panic_with_logs(&broker.vm);
    let late = broker.run_on(
        bed.host(1),
        &["broker-probe", "join", &file, "worker", "60"],
    );
    assert_eq!(late.status.code(), Some(EXIT_OVER), "{late:?}");
    // Nobody can tell a program on another host.
    let stranger = broker.run_on(
        bed.outside_host(),
        &["broker-probe", "join", &file, "worker", "3"],
    );
    assert_eq!(stranger.status.code(), Some(1), "{stranger:?}");
    broker.end();
}

/// A worker's session file makes no foreman, and a worker outside may neither end the session nor
/// list its members. A foreman's file may.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_workers_secret_has_only_a_workers_rights() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    broker.broker_succeeds(&["start", "rights"]);
    let file = broker.session_file("rights");
    let result = broker.run_on(bed.outside_host(), &["broker-probe", "rights", &file]);
    let lines: Vec<&str> = result.stdout.lines().collect();
    let [finish, report, foreman] = lines[..] else {
        panic!("{result:?}")
    };
    assert_eq!(finish, "finish: not allowed");
    for line in [report, foreman] {
        assert!(line.contains("the secret is that of a worker"), "{line}");
    }
    let foreman_file = broker.vm.user_home().join("foreman.session");
    let foreman_file = foreman_file.to_str().expect("UTF-8");
    broker.broker_succeeds(&["secret", "rights", "--foreman", "--output", foreman_file]);
    let arguments = ["broker-probe", "join", foreman_file, "foreman", "60"];
    let joined = broker.run_on(bed.outside_host(), &arguments);
    assert!(joined.succeeded(), "{joined:?}");
    broker.broker_succeeds(&["end", "rights", "--within", "0"]);
    wait_until_over(&broker, "rights");
    broker.vm.halt_and_wait().expect("halts");
}

/// The list of members, as text and as JSON, tells host, speed, state and traffic; the log of the
/// virtual machine tells who came and went.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn users_see_members_and_events() {
    let bed = require_testbed(1);
    let settings = VmSettings {
        rm_command: Some("pvm-rm".into()),
        ..VmSettings::default()
    };
    let broker = BrokerVm::start_with_settings(&bed, 1, settings);
    let member = stay(&broker, bed.host(1), "seen");
    let report = broker.report("seen");
    let seen = &report["members"][0];
    assert_eq!(seen["profile"]["host"], "h1", "{report}");
    assert_eq!(seen["profile"]["factor"], 1500, "{report}");
    assert_eq!(seen["profile"]["program"], "broker-probe", "{report}");
    let names = [
        "state",
        "sent",
        "received",
        "waiting",
        "waiting_bytes",
        "oldest",
        "incarnation",
    ];
    assert!(names.iter().all(|name| !seen[*name].is_null()), "{report}");
    let text = broker.broker_succeeds(&["members", "seen"]);
    for word in ["MEMBER", "OLDEST", "1 joins", "worker", "present", "h1 t"] {
        assert!(text.contains(word), "{text}");
    }
    let tasks = broker.vm.tasks().expect("tasks");
    assert!(
        tasks.iter().any(|task| task.name == "pvm-broker"),
        "{tasks:?}"
    );
    broker.expect_status(without_input(member), 0);
    for event in ["member 1 joined from h1", "member 1 is gone: left"] {
        wait_for(TIMEOUT, || {
            let log = broker.vm.events_and_logs();
            match log.contains(&format!("session seen: {event}")) {
                true => Ok(()),
                false => Err(format!("no {event:?} in {log}")),
            }
        })
        .expect("the log tells");
    }
    broker.broker_succeeds(&["end", "seen", "--within", "0"]);
    broker.end();
}

/// A probe removes nothing, and the receive after it gets the probed message, in each thread.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_receive_after_a_probe_gets_the_probed_message() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    let output = broker.output_of(&["broker_threads", "threads"]);
    assert_eq!(output, "received 1000\n");
    broker.end();
}

/// The broker starts the foreman. When that foreman dies, workers wait for the next one or the
/// session ends, also if the foreman dies before it joins.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn the_broker_starts_a_foreman() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    for policy in ["wait", "end"] {
        let foreman = format!("broker_foreman {policy} 100000 1");
        broker.broker_succeeds(&[
            "start",
            policy,
            "--foreman",
            &foreman,
            "--foreman-death",
            policy,
        ]);
        let worker = broker.start_on(bed.host(1), &["broker_worker", policy, "1", "1"]);
        wait_for(TIMEOUT, || {
            let report = broker.report(policy);
            match report["counts"]["delivered"].as_u64() > Some(50) {
                true => Ok(()),
                false => Err(report.to_string()),
            }
        })
        .or_panic_with_logs(&broker.vm);
        bed.host(1)
            .kill_matching_processes(|line| line.contains("broker_foreman"));
        if policy == "wait" {
            let next = broker.start_foreman(policy, 200, 1);
            broker.wait_for_line(&next, "results 200");
            assert_eq!(total(&broker.release(next), "sum"), sum_of_squares(200));
        }
        broker.expect_status(worker, EXIT_OVER);
    }
    // This foreman ends before it joins, because it has no arguments.
    let early = [
        "start",
        "early",
        "--foreman",
        "broker_foreman",
        "--foreman-death",
        "end",
    ];
    broker.broker_succeeds(&early);
    wait_until_over(&broker, "early");
    let missing = broker.broker(&["start", "missing", "--foreman", "no_such_program"]);
    assert!(
        missing.stderr.contains("no_such_program was not started"),
        "{missing:?}"
    );
    broker.end();
}

/// A worker that pauses for the owner keeps its number and its messages. A worker that the owner
/// ends is gone with the reason "moved out", and its task goes to another worker.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn an_owner_moves_a_worker_out() {
    let bed = require_testbed(2);
    let broker = BrokerVm::start(&bed);
    broker.broker_succeeds(&["start", "owner", "--host", "h1"]);
    let foreman = broker.start_foreman("owner", 1500, 2);
    broker.wait_for_line(&foreman, "foreman is member 1");
    let spawn = ["-h2", "broker_worker", "owner", "1", "1"];
    broker.vm.spawn_connected(&spawn).expect("spawned");
    let staying = broker.start_on(bed.host(1), &["broker_worker", "owner", "1", "1"]);
    broker.wait_for_line(&foreman, "50 done");
    let mut owner = TestOwnerAgent::start(&broker.vm, bed.host(2), OWNER_AGENT_PROGRAM);
    owner.send_directive("stop olga is there");
    broker.wait_for_line(&foreman, "200 done");
    assert_eq!(broker.report("owner")["members"][1]["state"], "present");
    owner.send_directive("welcome olga has left");
    broker.wait_for_line(&foreman, "400 done");
    owner.send_directive("kill 0 olga wants her host");
    broker.wait_for_line(&foreman, "results 1500");
    let report = broker.report("owner");
    let members = report["members"].as_array().expect("members");
    let moved_out = members.iter().filter(|m| m["state"]["gone"] == "moved-out");
    assert_eq!(moved_out.count(), 1, "{report}");
    let output = broker.release(foreman);
    assert_eq!(total(&output, "sum"), sum_of_squares(1500));
    assert_eq!(
        (total(&output, "departures"), total(&output, "moved-out")),
        (1, 1)
    );
    broker.expect_status(staying, EXIT_OVER);
    broker.end();
}

/// The virtual machine halts while a killed broker has no successor: the journal is removed.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_halt_removes_the_journal_of_a_killed_broker() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    broker.broker_succeeds(&["start", "killed"]);
    kill_broker(&broker);
    let state = broker.vm.user_home().join(".local/state/sempa/broker");
    assert!(state.exists(), "the journal is there for the next broker");
    // Waits until the virtual machine has halted, and checks that nothing is left.
    broker.vm.halt_and_wait().expect("halts");
    assert!(!state.exists(), "{}", state.display());
    let leftovers = bed.host(1).leftover_files(bed.folder());
    assert_eq!(leftovers, Vec::<PathBuf>::new());
}

/// Without its journal, the session of a killed broker is over for all members.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_session_without_a_journal_is_over() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    let worker = broker.start_on(bed.host(1), &["broker_worker", "lost", "1", "0"]);
    broker.wait_until_present("lost", 1);
    let state = broker.vm.user_home().join(".local/state/sempa/broker");
    std::fs::remove_dir_all(state).expect("removed");
    kill_broker(&broker);
    broker.expect_status(worker, EXIT_OVER);
    broker.end();
}

/// The host of the broker is lost. On another host with the same home directory, the session goes
/// on from the journal.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_session_survives_its_brokers_host_in_a_shared_home() {
    let bed = require_testbed(2);
    let settings = VmSettings {
        env: VmSettings::owned_env(&[SHORT_LEASE_ENV]),
        ..VmSettings::default()
    };
    let broker = BrokerVm::start_with_settings(&bed, 2, settings);
    broker.broker_succeeds(&["start", "shared", "--host", "h2"]);
    let foreman = broker.start_foreman("shared", 600, 1);
    let worker = broker.start_on(bed.host(1), &["broker_worker", "shared", "1", "2"]);
    broker.wait_for_line(&foreman, "100 done");
    assert_eq!(broker.broker_pids()[0].0, 2);
    bed.host(2).kill_all_processes();
    broker.wait_for_line(&foreman, "results 600");
    let output = broker.release(foreman);
    assert_eq!(total(&output, "sum"), sum_of_squares(600));
    assert_eq!(
        (total(&output, "departures"), total(&output, "doubled")),
        (0, 0)
    );
    broker.expect_status(worker, EXIT_OVER);
    broker.vm.halt_and_wait().expect("halts");
}
