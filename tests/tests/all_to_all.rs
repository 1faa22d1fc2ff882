//! Six tasks on three hosts exchange messages, each with all others, and migrate at the same time.

use sempa_proto::event::EventKind;
use sempa_tests::fake_criu::{self, misbehaviours, set_behaviour};
use sempa_tests::faults::tests_all_cases;
use sempa_tests::owner_agent::TestOwnerAgent;
use sempa_tests::requirements::{require_testbed, require_testbed_with_own_engine};
use sempa_tests::rng::Rng;
use sempa_tests::run::RunningCommand;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
const FINISH_TIMEOUT: Duration = Duration::from_secs(240);
/// Number of migrations: by default, and with `SEMPA_TEST_FULL=1`.
const MIGRATION_COUNTS: [usize; 2] = [15, 50];
/// Number of migrations after each of which all routes must be restored: by default, and with
/// `SEMPA_TEST_FULL=1`.
const ROUTED_MIGRATION_COUNTS: [usize; 2] = [6, 12];
/// Number of times the guests of a host are stopped: by default, and with `SEMPA_TEST_FULL=1`.
const STOP_COUNTS: [usize; 2] = [6, 16];
const HOST_NAMES: [&str; 3] = ["h1", "h2", "h3"];

fn default_or_full([default, full]: [usize; 2]) -> usize {
    if tests_all_cases() { full } else { default }
}

fn start(bed: &Testbed) -> Vm<'_> {
    let vm = Vm::start(bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm
}

/// A running program in which every worker exchanges messages with all others: its director
/// process, and its workers as (tid, host).
struct AllToAllRun {
    director: RunningCommand,
    workers: Vec<(String, String)>,
}

impl AllToAllRun {
    fn start(vm: &Vm, words: &[&str]) -> Self {
        let program = vm.compile_program("all_to_all").expect("gcc");
        let mut command = vm.user_command(vm.testbed().host(1), program);
        command.args(words).args(HOST_NAMES);
        let director = RunningCommand::start(command, Stdio::piped()).expect("it starts");
        let workers = wait_for(TIMEOUT, || {
            let out = director
                .stdout_so_far()
                .map_err(|error| error.to_string())?;
            let lines = out.lines().filter_map(|line| line.strip_prefix("worker "));
            let workers: Vec<(String, String)> = lines
                .filter_map(|line| {
                    let words: Vec<&str> = line.split(' ').collect();
                    Some((words.get(1)?.to_string(), words.get(2)?.to_string()))
                })
                .collect();
            let are_all_sending = (0..6).all(|i| out.contains(&format!("progress {i} ")));
            if workers.len() == 6 && are_all_sending {
                Ok(workers)
            } else {
                Err(format!(
                    "not all talk yet: {} {}",
                    last_300_bytes(&out),
                    director.stderr_so_far().unwrap_or_default()
                ))
            }
        });
        Self {
            director,
            workers: workers.or_panic_with_logs(vm),
        }
    }

    /// Requests all workers to finish, and waits for the end of the director. Panics if a message
    /// was lost, repeated, damaged or out of order. Returns the director's output without its
    /// progress lines.
    fn finish(mut self, vm: &Vm) -> String {
        self.director
            .take_stdin()
            .expect("piped")
            .write_all(b"end\n")
            .expect("it listens");
        let output = self
            .director
            .wait_or_kill(FINISH_TIMEOUT)
            .or_panic_with_logs(vm);
        let summary = output
            .stdout
            .lines()
            .filter(|line| !line.starts_with("progress"))
            .collect::<Vec<_>>()
            .join("\n");
        assert!(
            output.succeeded(),
            "{}\n{summary}\n{}\n{}",
            output.status,
            output.stderr,
            vm.events_and_logs()
        );
        assert!(
            summary.contains("lost=0 doubled=0 disordered=0 damaged=0"),
            "{summary}"
        );
        summary
    }
}

/// Returns the number of direct routes so far, by (worker, other worker).
fn route_counts(out: &str) -> HashMap<(usize, usize), u32> {
    let parse_route = |line: &str| {
        let mut tokens = line.strip_prefix("route ")?.split(' ');
        let worker_pair = (tokens.next()?.parse().ok()?, tokens.next()?.parse().ok()?);
        Some((worker_pair, tokens.next()?.parse().ok()?))
    };
    out.lines().filter_map(parse_route).collect()
}

/// Migrates workers that use direct routes, one after another. Before the next migration, the
/// migrated worker must have a new route to and from every other worker.
fn migrate_and_wait_for_routes(vm: &Vm, exchange: &mut AllToAllRun) {
    let mut rng = Rng::new(1);
    let wait_for_route_counts =
        |worker: &[usize], required_count: &dyn Fn((usize, usize)) -> u32| {
            let wait_result = wait_for(TIMEOUT, || {
                let counts = route_counts(
                    &exchange
                        .director
                        .stdout_so_far()
                        .map_err(|error| error.to_string())?,
                );
                let pairs = worker.iter().flat_map(|worker_index| {
                    (0..6)
                        .filter(move |peer_index| peer_index != worker_index)
                        .map(move |peer_index| (*worker_index, peer_index))
                });
                let has_too_few_routes = |pair: &(usize, usize)| {
                    counts.get(pair).copied().unwrap_or(0) < required_count(*pair)
                };
                let missing_routes: Vec<_> = pairs
                    .flat_map(|(a, b)| [(a, b), (b, a)])
                    .filter(has_too_few_routes)
                    .collect();
                if missing_routes.is_empty() {
                    Ok(counts)
                } else {
                    Err(format!("no route yet: {missing_routes:?} of {counts:?}"))
                }
            });
            wait_result.or_panic_with_logs(vm)
        };
    let mut previous_counts = wait_for_route_counts(&[0, 1, 2, 3, 4, 5], &|_| 1);
    for number in 0..default_or_full(ROUTED_MIGRATION_COUNTS) {
        // The workers that compute, block and send large messages migrate first; then random
        // workers migrate.
        let worker = if number < 3 {
            number
        } else {
            rng.next_below(6)
        };
        let (tid, host) = &mut exchange.workers[worker];
        let other_hosts: Vec<&str> = HOST_NAMES.into_iter().filter(|name| name != host).collect();
        let target = other_hosts[rng.next_below(2)];
        eprintln!("move {number}: {tid} from {host} to {target}");
        vm.migrate_or_panic(tid, target);
        *host = target.to_string();
        previous_counts = wait_for_route_counts(&[worker], &|pair| previous_counts[&pair] + 1);
    }
}

fn last_300_bytes(text: &str) -> &str {
    let start = text.len().saturating_sub(300);
    text.get(start..).unwrap_or(text)
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn messages_arrive_once_through_random_moves() {
    let bed = require_testbed(3);
    let vm = start(&bed);
    let mut exchange = AllToAllRun::start(&vm, &[]);
    let mut rng = Rng::new(7);
    for number in 0..default_or_full(MIGRATION_COUNTS) {
        // The workers that compute, block and send large messages migrate first; then random
        // workers migrate.
        let worker = if number < 3 {
            number
        } else {
            rng.next_below(6)
        };
        let (tid, host) = &mut exchange.workers[worker];
        let other_hosts: Vec<&str> = HOST_NAMES.into_iter().filter(|name| name != host).collect();
        let target = other_hosts[rng.next_below(2)];
        eprintln!("move {number}: {tid} from {host} to {target}");
        vm.migrate_or_panic(tid, target);
        *host = target.to_string();
    }
    for (tid, host) in &exchange.workers {
        assert_eq!(&vm.host_of(tid).expect("a task"), host);
    }
    eprintln!("{}", exchange.finish(&vm));
    vm.halt_and_wait().expect("halts");
}

/// After each migration the direct routes are restored. No message is lost, repeated or out of
/// order.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn direct_routes_are_restored_after_moves() {
    let bed = require_testbed(3);
    let vm = start(&bed);
    let mut exchange = AllToAllRun::start(&vm, &["-d"]);
    migrate_and_wait_for_routes(&vm, &mut exchange);
    eprintln!("{}", exchange.finish(&vm));
    vm.halt_and_wait().expect("halts");
}

/// Children that a worker has forked affect neither the worker's messages nor its direct routes
/// while the workers migrate.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn forked_children_do_not_disturb_moves() {
    let bed = require_testbed(3);
    let vm = start(&bed);
    let mut exchange = AllToAllRun::start(&vm, &["-f"]);
    migrate_and_wait_for_routes(&vm, &mut exchange);
    let summary = exchange.finish(&vm);
    eprintln!("{summary}");
    let child_count = summary.lines().find_map(|line| {
        line.strip_prefix("children: ")?
            .split(',')
            .next()?
            .parse()
            .ok()
    });
    assert!(child_count.is_some_and(|count: u32| count > 0), "{summary}");
    vm.halt_and_wait().expect("halts");
}

/// Waits until the console lists the task as not migrating.
fn wait_until_migrated(vm: &Vm, tid: &str) {
    wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let task = tasks
            .into_iter()
            .find(|task| task.tid == tid)
            .ok_or("it is not listed")?;
        if task.moving {
            Err(format!("{task:?}"))
        } else {
            Ok(())
        }
    })
    .or_panic_with_logs(vm);
}

/// Guests are stopped, migrate while they are stopped, and are resumed. Every message arrives once.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn messages_arrive_once_to_stopped_guests() {
    let bed = require_testbed(3);
    let vm = start(&bed);
    let mut owner_agents: Vec<TestOwnerAgent> = vm.testbed().hosts()[1..]
        .iter()
        .map(|host| TestOwnerAgent::start(&vm, host, env!("CARGO_BIN_EXE_owner-speaks")))
        .collect();
    let mut exchange = AllToAllRun::start(&vm, &[]);
    let mut rng = Rng::new(11);
    for number in 0..default_or_full(STOP_COUNTS) {
        let (host_name, other_host) = [("h2", "h3"), ("h3", "h2")][number % 2];
        let owner_agent = &mut owner_agents[number % 2];
        let workers_on_host: Vec<usize> = (0..6)
            .filter(|worker| exchange.workers[*worker].1 == host_name)
            .collect();
        owner_agent.send_directive(&format!("stop number {number}"));
        let is_stop_event = |entry: &sempa_tests::vm::EventEntry| match &entry.kind {
            EventKind::GuestsPaused { guests, why, .. } => {
                assert!(
                    *why != format!("number {number}") || guests.len() == workers_on_host.len(),
                    "{guests:?}"
                );
                *why == format!("number {number}")
            }
            _ => false,
        };
        vm.wait_for_event(TIMEOUT, "stopped guests", is_stop_event)
            .or_panic_with_logs(&vm);
        if number % 3 != 0 && !workers_on_host.is_empty() {
            let worker = workers_on_host[rng.next_below(workers_on_host.len())];
            let target = if rng.next_below(2) == 0 {
                "h1"
            } else {
                other_host
            };
            eprintln!(
                "stop {number}: {} from {host_name} to {target}",
                exchange.workers[worker].0
            );
            vm.migrate_or_panic(&exchange.workers[worker].0, target);
            exchange.workers[worker].1 = target.to_string();
            wait_until_migrated(&vm, &exchange.workers[worker].0);
        }
        owner_agent.send_directive("welcome nobody is there");
        // Workers on h1 do not return by themselves. If the host `host_name` had fewer than two
        // workers, one of the workers on h1 is migrated to this host.
        if let Some(returning_worker) = (0..6)
            .find(|worker| exchange.workers[*worker].1 == "h1")
            .filter(|_| workers_on_host.len() < 2)
        {
            vm.migrate_or_panic(&exchange.workers[returning_worker].0, host_name);
            exchange.workers[returning_worker].1 = host_name.to_string();
            wait_until_migrated(&vm, &exchange.workers[returning_worker].0);
        }
    }
    eprintln!("{}", exchange.finish(&vm));
    vm.halt_and_wait().expect("halts");
}

/// The engine of a migration waits while the task is stopped. All other workers make progress
/// meanwhile.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn peers_make_progress_during_a_move() {
    let bed = require_testbed_with_own_engine(3);
    fake_criu::install(&bed);
    let vm = start(&bed);
    let exchange = AllToAllRun::start(&vm, &[]);
    let (tid, host) = &exchange.workers[2];
    set_behaviour(&bed, host, "wait");
    let migrate_command = vm.start_migration(tid, "h1").expect("it begins");
    wait_for(TIMEOUT, || match misbehaviours(&bed, host) {
        calls if calls.is_empty() => Err("no engine waits".to_string()),
        _ => Ok(()),
    })
    .or_panic_with_logs(&vm);
    let progress_reports = || {
        let out = exchange
            .director
            .stdout_so_far()
            .map_err(|e| e.to_string())?;
        let lines: Vec<(usize, u64)> = out.lines().filter_map(parse_progress).collect();
        Ok::<_, String>(lines)
    };
    let previous_count = progress_reports().expect("a report").len();
    wait_for(TIMEOUT, || {
        let new_reports = &progress_reports()?[previous_count..];
        for peer in [0, 1, 3, 4, 5] {
            let counts: BTreeSet<u64> = new_reports
                .iter()
                .filter_map(|(worker, count)| (*worker == peer).then_some(*count))
                .collect();
            if counts.len() < 2 {
                return Err(format!("worker {peer} makes no progress: {counts:?}"));
            }
        }
        Ok(())
    })
    .or_panic_with_logs(&vm);
    set_behaviour(&bed, host, "");
    let output = migrate_command
        .wait_or_kill(TIMEOUT)
        .or_panic_with_logs(&vm);
    assert!(output.succeeded(), "{output:?}\n{}", vm.events_and_logs());
    exchange.finish(&vm);
    vm.halt_and_wait().expect("halts");
}

/// Returns (worker, count) of the director's line `progress WORKER TIME COUNT`; `None` for other
/// lines.
fn parse_progress(line: &str) -> Option<(usize, u64)> {
    let mut tokens = line.strip_prefix("progress ")?.split(' ');
    let (worker, _time, count) = (tokens.next()?, tokens.next()?, tokens.next()?);
    Some((worker.parse().ok()?, count.parse().ok()?))
}
