//! Causal order: if a task sends to a second one and then causes, through any other tasks or
//! services, a message of a third one to the second, then the second receives its own message
//! first. The programs `tests/programs/causal_*.c` count violations.

use sempa_tests::causal_order::{
    CausalOrderCheck, CausalReport, EndlessRelay, require_pvm_testbed, start_load,
};
use sempa_tests::requirements::require_testbed;
use sempa_tests::rng::Rng;
use sempa_tests::{OrPanicWithLogs, wait_for};
use std::fs;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
const HOST_COUNT: usize = 3;
/// Hosts of the tasks of a program, which are used in turn. The first two tasks are the sender and
/// the receiver in most programs.
const PLACEMENTS: [&[&str]; 3] = [
    &["h1", "h2", "h3"],
    &["h1", "h1", "h2"],
    &["h2", "h3", "h2"],
];
/// Bytes of data in a message, and number of rounds that take about the same time: a small message,
/// messages of one and of many fragments, and messages that are not copied within a host.
const SIZES_AND_ROUNDS: [(usize, usize); 5] = [
    (8, 1000),
    (4096, 500),
    (65_536, 150),
    (307_200, 40),
    (2_097_152, 8),
];
/// Programs whose rounds need a spawn or several calls of the daemons.
const SERVICES: [(&str, usize); 3] = [("mailbox", 40), ("spawn -k 3", 5), ("notify -k 3", 5)];
/// Kinds of calls of groups after which messages must be there.
const GROUP_EVENTS: [&str; 4] = ["barrier", "gather", "reduce", "cast"];
/// Number of messages that a quiet task sends to its partner before it sends one to the receiver.
/// Each of them would advance a logical clock.
const QUIET_AHEAD_COUNT: u64 = 100_000;
/// Number of migrations during a run.
const MIGRATION_COUNT: usize = 6;
/// Number of checkpoints before a host is killed.
const CHECKPOINT_COUNT: usize = 2;

/// Returns the runs of `causal_relay`: a word through other tasks follows data.
fn relay_runs() -> Vec<String> {
    let mut runs = Vec::new();
    for (size, rounds) in SIZES_AND_ROUNDS {
        // The receiver takes what comes, slowly or not; or it waits for the word and then looks
        // for the data; or both the word and a small message follow the data. The word is also
        // replaced by a multicast.
        for options in ["", " -b", " -p", " -w", " -m"] {
            runs.push(format!("relay -n {rounds} -s {size}{options}"));
        }
    }
    runs
}

/// Returns runs of `causal_relay` with long chains, and with routes that the program chooses.
fn chain_and_route_runs() -> Vec<String> {
    let mut runs = Vec::new();
    for (size, rounds) in [(8, 500), (65_536, 100), (307_200, 30)] {
        for options in ["-k 5", "-k 5 -p", "-r dont", "-t"] {
            runs.push(format!("relay -n {rounds} -s {size} {options}"));
        }
    }
    runs
}

/// Returns the runs in which a call of a group is the cause.
fn group_runs() -> Vec<String> {
    let mut runs = Vec::new();
    for event in GROUP_EVENTS {
        for (size, rounds) in SIZES_AND_ROUNDS {
            let rounds = (rounds / 10).clamp(4, 50);
            runs.push(format!("groups -n {rounds} -s {size} -e {event}"));
        }
    }
    runs
}

/// Returns the runs in which a service of the daemons is the cause.
fn service_runs() -> Vec<String> {
    let mut runs = Vec::new();
    for (program, rounds) in SERVICES {
        for (size, _) in SIZES_AND_ROUNDS {
            runs.push(format!("{program} -n {rounds} -s {size}"));
        }
    }
    runs
}

/// Returns the runs in which a signal is the cause. PVM 3.4.6 does not keep this order: its daemon
/// sends the signal while data waits in the daemon.
fn signal_runs() -> Vec<String> {
    let runs = SIZES_AND_ROUNDS.iter();
    runs.map(|(size, rounds)| format!("signal -n {} -s {size}", rounds.clamp(&10, &200)))
        .collect()
}

/// Returns the runs in which a master closes the pictures of a collector.
fn farm_runs() -> Vec<String> {
    let mut runs = Vec::new();
    for (size, rounds) in SIZES_AND_ROUNDS {
        let rounds = (rounds / 4).clamp(4, 50);
        for options in ["", " -b"] {
            runs.push(format!("farm -k 3 -n {rounds} -s {size}{options}"));
        }
    }
    runs
}

fn start_sempa(testbed: &sempa_tests::Testbed) -> CausalOrderCheck<'_> {
    CausalOrderCheck::on_sempa(testbed).unwrap_or_else(|error| panic!("{error:#}"))
}

/// Runs `runs` on one host, and then on three hosts with each of `placements`.
fn check_on_one_and_three_hosts(runs: &[String], placements: &[&[&str]]) {
    let bed = require_testbed(HOST_COUNT);
    let mut check = start_sempa(&bed);
    check.check_runs(runs, &[]);
    check.add_other_hosts().expect("the others join");
    for hosts in placements {
        check.check_runs(runs, hosts);
    }
    check.finish();
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn data_precedes_words_through_other_tasks() {
    check_on_one_and_three_hosts(&relay_runs(), &PLACEMENTS);
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn data_precedes_words_through_chains_on_any_route() {
    check_on_one_and_three_hosts(&chain_and_route_runs(), &PLACEMENTS[..2]);
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn data_is_there_after_group_calls() {
    check_on_one_and_three_hosts(&group_runs(), &PLACEMENTS[..1]);
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn data_precedes_effects_of_mailbox_spawn_and_notify() {
    let mut runs = service_runs();
    runs.push("notify -x -k 3 -n 5 -s 4096".to_string());
    check_on_one_and_three_hosts(&runs, &PLACEMENTS[..1]);
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn data_is_there_when_a_signal_is_handled() {
    check_on_one_and_three_hosts(&signal_runs(), &PLACEMENTS[..1]);
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn no_piece_is_missing_when_a_picture_is_closed() {
    check_on_one_and_three_hosts(&farm_runs(), &PLACEMENTS);
}

/// A message of a quiet task does not wait until clocks of busy tasks have caught up with it.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn quiet_message_does_not_wait_behind_floods() {
    let bed = require_testbed(HOST_COUNT);
    let mut check = start_sempa(&bed);
    let shared_file = check.vm().user_home().join("causal-count");
    let run = format!(
        "quiet -n 2 -k {QUIET_AHEAD_COUNT} -f {}",
        shared_file.display()
    );
    check.check_runs(std::slice::from_ref(&run), &[]);
    check.add_other_hosts().expect("the others join");
    check.check_runs(&[run], PLACEMENTS[0]);
    // A loaded machine delays each message, also a quiet one, but not by the time in which floods
    // send as many messages as the quiet task is ahead.
    check.expect_overtaken_below(QUIET_AHEAD_COUNT / 2);
    check.finish();
}

/// One run of each program and kind of run, while other processes want the processors.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn order_holds_while_other_processes_compute() {
    let bed = require_testbed(HOST_COUNT);
    let mut check = start_sempa(&bed);
    let runs = [
        "relay -n 500 -s 8",
        "relay -n 500 -s 8 -p",
        "relay -n 100 -s 65536",
        "relay -n 20 -s 307200 -w",
        "relay -n 20 -s 307200 -m",
        "relay -n 5 -s 2097152",
        "relay -n 50 -s 65536 -k 5",
        "groups -n 10 -s 65536 -e barrier",
        "groups -n 10 -s 307200 -e gather",
        "mailbox -n 20 -s 65536",
        "spawn -k 2 -n 3 -s 65536",
        "notify -k 2 -n 3 -s 65536",
        "signal -n 20 -s 65536",
        "farm -k 3 -n 10 -s 65536",
    ]
    .map(str::to_string);
    let load = start_load().expect("it starts");
    check.check_runs(&runs, &[]);
    check.add_other_hosts().expect("the others join");
    check.check_runs(&runs, PLACEMENTS[0]);
    drop(load);
    check.finish();
}

/// The receiver and the relay of a run without an end migrate by turns.
fn check_migrations(options: &str) {
    let bed = require_testbed(HOST_COUNT);
    let mut check = start_sempa(&bed);
    check.add_other_hosts().expect("the others join");
    let relay = EndlessRelay::start(&check, options, PLACEMENTS[0])
        .unwrap_or_else(|error| panic!("{error:#}"));
    let mut hosts = [("receiver", "h2"), ("relay", "h3")];
    let mut rng = Rng::new(31);
    for number in 0..MIGRATION_COUNT {
        let (role, host) = &mut hosts[number % 2];
        let targets: Vec<&str> = ["h1", "h2", "h3"]
            .into_iter()
            .filter(|target| target != host)
            .collect();
        *host = targets[rng.next_below(targets.len())];
        let tid = relay.tid(role).expect("it has started");
        check.vm().migrate_or_panic(&tid, host);
    }
    relay.end(&mut check).expect("a file is made");
    check.finish();
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn small_messages_stay_in_order_in_migrations() {
    check_migrations("-s 8 -w");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn large_messages_stay_in_order_in_migrations() {
    check_migrations("-s 307200 -w");
}

/// A job with messages on their way rolls back to a checkpoint when a host is killed, and goes on.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn messages_stay_in_order_after_a_rollback() {
    let bed = require_testbed(HOST_COUNT);
    let mut check = start_sempa(&bed);
    check.add_other_hosts().expect("the others join");
    let home = check.vm().user_home();
    let [end_file, result_file] = ["causal-end", "causal-result"].map(|name| home.join(name));
    let arguments = format!(
        "-h2 causal_relay -s 65536 -u {} -o {} h2 h3 h2",
        end_file.display(),
        result_file.display()
    );
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let vm = check.vm();
    let tid = vm.spawn_connected(&arguments).or_panic_with_logs(vm);
    vm.run_pvm(&["checkpoint", "--every", "1s", &tid])
        .and_then(|result| result.expect_success("a checkpoint"))
        .or_panic_with_logs(vm);
    let wait_for_checkpoints = |count: usize| {
        wait_for(TIMEOUT, || match vm.checkpoint_count() {
            new_count if new_count >= count => Ok(new_count),
            new_count => Err(format!("{new_count} checkpoints")),
        })
        .or_panic_with_logs(vm)
    };
    let count = wait_for_checkpoints(CHECKPOINT_COUNT);
    bed.host(3).kill_all_processes();
    vm.wait_for_rollback(TIMEOUT, "h3 was lost")
        .or_panic_with_logs(vm);
    wait_for_checkpoints(count + 1);
    fs::write(&end_file, "").expect("a file is made");
    let report = wait_for(TIMEOUT, || {
        let output = fs::read_to_string(&result_file).map_err(|error| error.to_string())?;
        CausalReport::parse(&output).ok_or(output)
    });
    check.record("relay -s 65536 (rolled back)", &["h2", "h3", "h2"], report);
    check.finish();
}

/// PVM 3.4.6 judges the programs: where it keeps the order, they must not find violations.
fn check_on_pvm(host_count: usize, runs: &[String], placements: &[&[&str]]) {
    let bed = require_pvm_testbed(host_count);
    let mut check =
        CausalOrderCheck::on_pvm(&bed, host_count).unwrap_or_else(|error| panic!("{error:#}"));
    for hosts in placements {
        check.check_runs(runs, hosts);
    }
    check.finish();
}

/// On one host, PVM's only daemon passes on all messages in the order in which it gets them.
#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn pvm_keeps_causal_order_on_one_host() {
    let runs = [
        relay_runs(),
        chain_and_route_runs(),
        group_runs(),
        service_runs(),
        farm_runs(),
        vec!["quiet -n 2 -k 20000".to_string()],
    ];
    check_on_pvm(1, &runs.concat(), &[&[]]);
}

/// Between two hosts, data and words for the receiver go through the same queue of PVM's daemons.
/// PVM does not keep the order between three hosts, because each pair of daemons has its own queue.
#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn pvm_keeps_causal_order_between_two_hosts() {
    let runs = [relay_runs(), chain_and_route_runs(), farm_runs()];
    check_on_pvm(2, &runs.concat(), &[&["h1", "h2", "h1"]]);
}
