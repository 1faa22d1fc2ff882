//! Six tasks on three hosts exchange messages, each with all others, and migrate at the same time.

use sempa_proto::event::EventKind;
use sempa_tests::fake_criu::{self, misbehaviours, set_behaviour};
use sempa_tests::faults::is_full;
use sempa_tests::owner_agent::OwnerAgent;
use sempa_tests::requirements::{testbed, testbed_with_own_engine};
use sempa_tests::rng::Rng;
use sempa_tests::run::RunningCommand;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
const FINISH_TIMEOUT: Duration = Duration::from_secs(240);
/// Number of migrations: by default, and if all cases are requested.
const MIGRATIONS: [usize; 2] = [15, 50];
/// Number of migrations after each of which all routes must be restored: by default, and if all
/// cases are requested.
const MOVES_WITH_ROUTES: [usize; 2] = [6, 12];
/// Number of times the guests of a host are stopped: by default, and if all cases are requested.
const STOPS: [usize; 2] = [6, 16];
const HOSTS: [&str; 3] = ["h1", "h2", "h3"];

fn default_or_full([default, full]: [usize; 2]) -> usize {
    if is_full() { full } else { default }
}

fn start(bed: &Testbed) -> Vm<'_> {
    let vm = Vm::start(bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm
}

/// The director process, and its workers as (tid, host).
struct AllToAll {
    director: RunningCommand,
    workers: Vec<(String, String)>,
}

impl AllToAll {
    fn start(vm: &Vm, words: &[&str]) -> AllToAll {
        let program = vm.compile_program("all_to_all").expect("gcc");
        let mut command = vm.command(vm.bed().host(1), program);
        command.args(words).args(HOSTS);
        let director = RunningCommand::start(command, Stdio::piped()).expect("it starts");
        let workers = wait_for(TIMEOUT, || {
            let out = director.out_so_far().map_err(|error| error.to_string())?;
            let lines = out.lines().filter_map(|line| line.strip_prefix("worker "));
            let workers: Vec<(String, String)> = lines
                .filter_map(|line| {
                    let words: Vec<&str> = line.split(' ').collect();
                    Some((words.get(1)?.to_string(), words.get(2)?.to_string()))
                })
                .collect();
            let talking = (0..6).all(|i| out.contains(&format!("progress {i} ")));
            if workers.len() == 6 && talking {
                Ok(workers)
            } else {
                Err(format!(
                    "not all talk yet: {} {}",
                    last_chars(&out),
                    director.err_so_far().unwrap_or_default()
                ))
            }
        });
        AllToAll {
            director,
            workers: workers.or_panic_with_logs(vm),
        }
    }

    /// Lets all workers finish. Panics if a message was lost, repeated, damaged or out of order.
    /// Returns the director's output.
    fn finish(mut self, vm: &Vm) -> String {
        self.director
            .take_stdin()
            .expect("piped")
            .write_all(b"end\n")
            .expect("it listens");
        let done = self.director.finish(FINISH_TIMEOUT).or_panic_with_logs(vm);
        let summary = done
            .out
            .lines()
            .filter(|line| !line.starts_with("progress"))
            .collect::<Vec<_>>()
            .join("\n");
        assert!(
            done.succeeded(),
            "{}\n{summary}\n{}\n{}",
            done.status,
            done.err,
            vm.logs()
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
    let route = |line: &str| {
        let mut words = line.strip_prefix("route ")?.split(' ');
        let pair = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some((pair, words.next()?.parse().ok()?))
    };
    out.lines().filter_map(route).collect()
}

/// Migrates workers that use direct routes, one after another. Before each migration, every
/// conversation of the previously migrated worker has a new route in both directions.
fn move_and_wait_for_routes(vm: &Vm, talk: &mut AllToAll) {
    let mut rng = Rng::new(1);
    let all_have = |who: &[usize], least: &dyn Fn((usize, usize)) -> u32| {
        let found = wait_for(TIMEOUT, || {
            let now = route_counts(
                &talk
                    .director
                    .out_so_far()
                    .map_err(|error| error.to_string())?,
            );
            let pairs = who.iter().flat_map(|one| {
                (0..6)
                    .filter(move |other| other != one)
                    .map(move |other| (*one, other))
            });
            let lacks = |pair: &(usize, usize)| now.get(pair).copied().unwrap_or(0) < least(*pair);
            let missing: Vec<_> = pairs
                .flat_map(|(a, b)| [(a, b), (b, a)])
                .filter(lacks)
                .collect();
            if missing.is_empty() {
                Ok(now)
            } else {
                Err(format!("no route yet: {missing:?} of {now:?}"))
            }
        });
        found.or_panic_with_logs(vm)
    };
    let mut before = all_have(&[0, 1, 2, 3, 4, 5], &|_| 1);
    for number in 0..default_or_full(MOVES_WITH_ROUTES) {
        // The workers that compute, block and send large messages migrate first; then random
        // workers migrate.
        let who = if number < 3 { number } else { rng.below(6) };
        let (tid, host) = &mut talk.workers[who];
        let others: Vec<&str> = HOSTS.into_iter().filter(|name| name != host).collect();
        let to = others[rng.below(2)];
        eprintln!("move {number}: {tid} from {host} to {to}");
        vm.must_migrate(tid, to);
        *host = to.to_string();
        before = all_have(&[who], &|pair| before[&pair] + 1);
    }
}

fn last_chars(text: &str) -> &str {
    let from = text.len().saturating_sub(300);
    text.get(from..).unwrap_or(text)
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn messages_arrive_once_through_random_moves() {
    let bed = testbed(3);
    let vm = start(&bed);
    let mut talk = AllToAll::start(&vm, &[]);
    let mut rng = Rng::new(7);
    for number in 0..default_or_full(MIGRATIONS) {
        // The workers that compute, block and send large messages migrate first; then random
        // workers migrate.
        let who = if number < 3 { number } else { rng.below(6) };
        let (tid, host) = &mut talk.workers[who];
        let others: Vec<&str> = HOSTS.into_iter().filter(|name| name != host).collect();
        let to = others[rng.below(2)];
        eprintln!("move {number}: {tid} from {host} to {to}");
        vm.must_migrate(tid, to);
        *host = to.to_string();
    }
    for (tid, host) in &talk.workers {
        assert_eq!(&vm.host_of(tid).expect("a task"), host);
    }
    eprintln!("{}", talk.finish(&vm));
    vm.halt().expect("halts");
}

/// After each migration the direct routes are restored. No message is lost, repeated or out of
/// order.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn direct_routes_are_restored_after_moves() {
    let bed = testbed(3);
    let vm = start(&bed);
    let mut talk = AllToAll::start(&vm, &["-d"]);
    move_and_wait_for_routes(&vm, &mut talk);
    eprintln!("{}", talk.finish(&vm));
    vm.halt().expect("halts");
}

/// Children that a task has forked affect neither its messages nor its direct routes.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn forked_children_do_not_disturb_moves() {
    let bed = testbed(3);
    let vm = start(&bed);
    let mut talk = AllToAll::start(&vm, &["-f"]);
    move_and_wait_for_routes(&vm, &mut talk);
    let summary = talk.finish(&vm);
    eprintln!("{summary}");
    let children = summary.lines().find_map(|line| {
        line.strip_prefix("children: ")?
            .split(',')
            .next()?
            .parse()
            .ok()
    });
    assert!(children.is_some_and(|count: u32| count > 0), "{summary}");
    vm.halt().expect("halts");
}

/// Waits until the migration of a task is complete.
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
    let bed = testbed(3);
    let vm = start(&bed);
    let mut owners: Vec<OwnerAgent> = vm.bed().hosts()[1..]
        .iter()
        .map(|host| OwnerAgent::new(&vm, host, env!("CARGO_BIN_EXE_owner-speaks")))
        .collect();
    let mut talk = AllToAll::start(&vm, &[]);
    let mut rng = Rng::new(11);
    for number in 0..default_or_full(STOPS) {
        let (place, other) = [("h2", "h3"), ("h3", "h2")][number % 2];
        let owner = &mut owners[number % 2];
        let theirs: Vec<usize> = (0..6).filter(|who| talk.workers[*who].1 == place).collect();
        owner.direct(&format!("stop number {number}"));
        let told = |entry: &sempa_tests::vm::EventEntry| match &entry.kind {
            EventKind::GuestsPaused { guests, why, .. } => {
                assert!(
                    *why != format!("number {number}") || guests.len() == theirs.len(),
                    "{guests:?}"
                );
                *why == format!("number {number}")
            }
            _ => false,
        };
        vm.wait_for_event(TIMEOUT, "stopped guests", told)
            .or_panic_with_logs(&vm);
        if number % 3 != 0 && !theirs.is_empty() {
            let who = theirs[rng.below(theirs.len())];
            let to = if rng.below(2) == 0 { "h1" } else { other };
            eprintln!(
                "stop {number}: {} from {place} to {to}",
                talk.workers[who].0
            );
            vm.must_migrate(&talk.workers[who].0, to);
            talk.workers[who].1 = to.to_string();
            wait_until_migrated(&vm, &talk.workers[who].0);
        }
        owner.direct("welcome nobody is there");
        // Workers that have left do not return without a request.
        if let Some(away) = (0..6)
            .find(|who| talk.workers[*who].1 == "h1")
            .filter(|_| theirs.len() < 2)
        {
            vm.must_migrate(&talk.workers[away].0, place);
            talk.workers[away].1 = place.to_string();
            wait_until_migrated(&vm, &talk.workers[away].0);
        }
    }
    eprintln!("{}", talk.finish(&vm));
    vm.halt().expect("halts");
}

/// The engine waits after a migration has stopped its task. All other workers make progress.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn peers_make_progress_during_a_move() {
    let bed = testbed_with_own_engine(3);
    fake_criu::install(&bed);
    let vm = start(&bed);
    let talk = AllToAll::start(&vm, &[]);
    let (tid, host) = &talk.workers[2];
    set_behaviour(&bed, host, "wait");
    let moving = vm.start_migrate(tid, "h1").expect("it begins");
    wait_for(TIMEOUT, || match misbehaviours(&bed, host) {
        none if none.is_empty() => Err("no engine waits".to_string()),
        _ => Ok(()),
    })
    .or_panic_with_logs(&vm);
    let reported = || {
        let out = talk.director.out_so_far().map_err(|e| e.to_string())?;
        let lines: Vec<(usize, u64)> = out.lines().filter_map(parse_progress).collect();
        Ok::<_, String>(lines)
    };
    let before = reported().expect("a report").len();
    wait_for(TIMEOUT, || {
        let since = &reported()?[before..];
        for peer in [0, 1, 3, 4, 5] {
            let counts: BTreeSet<u64> = since
                .iter()
                .filter_map(|(who, count)| (*who == peer).then_some(*count))
                .collect();
            if counts.len() < 2 {
                return Err(format!("worker {peer} makes no progress: {counts:?}"));
            }
        }
        Ok(())
    })
    .or_panic_with_logs(&vm);
    set_behaviour(&bed, host, "");
    let done = moving.finish(TIMEOUT).or_panic_with_logs(&vm);
    assert!(done.succeeded(), "{done:?}\n{}", vm.logs());
    talk.finish(&vm);
    vm.halt().expect("halts");
}

/// Returns (worker, count) of a line `progress WORKER TIME COUNT` of the director.
fn parse_progress(line: &str) -> Option<(usize, u64)> {
    let mut words = line.strip_prefix("progress ")?.split(' ');
    let (worker, _time, count) = (words.next()?, words.next()?, words.next()?);
    Some((worker.parse().ok()?, count.parse().ok()?))
}
