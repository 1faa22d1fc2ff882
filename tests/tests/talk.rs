//! Six tasks on three hosts talk, everybody to everybody, and are moved while they do.

use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_tests::needs::testbed;
use sempa_tests::rng::Rng;
use sempa_tests::run::Running;
use sempa_tests::speaker::Speaker;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Vm, eventually};
use std::collections::HashMap;
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(240);
const MOVES: usize = 50;
/// Moves of the tests in which routes are waited for after each.
const MOVES_WITH_ROUTES: usize = 12;
/// Times that guests of a host are stopped.
const STOPS: usize = 16;
const HOSTS: [&str; 3] = ["h1", "h2", "h3"];

/// The director, and its workers as (tid, host).
struct Talk {
    director: Running,
    workers: Vec<(String, String)>,
}

impl Talk {
    fn start(vm: &Vm, words: &[&str]) -> Talk {
        let program = vm.program("all_to_all").expect("gcc");
        let mut command = vm.command(vm.bed().host(1), program);
        command.args(words).args(HOSTS);
        let director = Running::start(command, Stdio::piped()).expect("it starts");
        let workers = eventually(SOON, || {
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
                    tail(&out),
                    director.err_so_far().unwrap_or_default()
                ))
            }
        });
        Talk {
            director,
            workers: workers.sure(vm),
        }
    }

    /// Has everybody finish; panics unless nothing was lost, doubled, damaged or out of order.
    fn finish(mut self, vm: &Vm) -> String {
        self.director
            .take_stdin()
            .expect("piped")
            .write_all(b"end\n")
            .expect("it listens");
        let done = self.director.finish(LONG).sure(vm);
        let summary = done
            .out
            .lines()
            .filter(|line| !line.starts_with("progress"))
            .collect::<Vec<_>>()
            .join("\n");
        assert!(
            done.good(),
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

/// How many direct routes each worker has had to each other one.
fn routes(out: &str) -> HashMap<(usize, usize), u32> {
    let route = |line: &str| {
        let mut words = line.strip_prefix("route ")?.split(' ');
        let pair = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some((pair, words.next()?.parse().ok()?))
    };
    out.lines().filter_map(route).collect()
}

/// Moves workers who want direct routes, one after the other; each time both sides of all its conversations have a route
/// again before the next one.
fn move_and_wait_for_routes(vm: &Vm, talk: &mut Talk) {
    let mut rng = Rng::new(1);
    let all_have = |who: &[usize], least: &dyn Fn((usize, usize)) -> u32| {
        let found = eventually(SOON, || {
            let now = routes(
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
        found.sure(vm)
    };
    let mut before = all_have(&[0, 1, 2, 3, 4, 5], &|_| 1);
    for number in 0..MOVES_WITH_ROUTES {
        // Each of the three that compute, block and send large messages is moved, and others.
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

fn tail(text: &str) -> &str {
    let from = text.len().saturating_sub(300);
    text.get(from..).unwrap_or(text)
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn nothing_is_lost_doubled_or_out_of_order_through_fifty_random_moves() {
    let bed = testbed(3);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let mut talk = Talk::start(&vm, &[]);
    let mut rng = Rng::new(7);
    let mut moved: HashMap<usize, usize> = HashMap::new();
    for number in 0..MOVES {
        // The three that compute, block and send large messages are moved as often as all others together.
        let who = rng.below(6);
        let (tid, host) = &mut talk.workers[who];
        let others: Vec<&str> = HOSTS.into_iter().filter(|name| name != host).collect();
        let to = others[rng.below(2)];
        eprintln!("move {number}: {tid} from {host} to {to}");
        vm.must_migrate(tid, to);
        *host = to.to_string();
        *moved.entry(who).or_default() += 1;
    }
    assert!(
        (0..3).all(|who| moved.contains_key(&who)),
        "the three special tasks have moved: {moved:?}"
    );
    for (tid, host) in &talk.workers {
        assert_eq!(&vm.host_of(tid).expect("a task"), host);
    }
    eprintln!("{}", talk.finish(&vm));
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn direct_routes_lose_double_and_reorder_nothing_when_tasks_are_moved_and_are_there_again_after_it()
{
    let bed = testbed(3);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let mut talk = Talk::start(&vm, &["-d"]);
    move_and_wait_for_routes(&vm, &mut talk);
    eprintln!("{}", talk.finish(&vm));
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn children_that_tasks_fork_disturb_neither_their_direct_routes_nor_their_moves() {
    let bed = testbed(3);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let mut talk = Talk::start(&vm, &["-f"]);
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
    assert!(children.is_some_and(|count: u32| count >= 100), "{summary}");
    vm.halt().expect("halts");
}

/// Waits until the daemon of its new host has a task for its own.
fn belongs(vm: &Vm, tid: &str) {
    eventually(SOON, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let task = tasks
            .into_iter()
            .find(|task| task.tid == tid)
            .ok_or("it is in no list")?;
        if task.moving {
            Err(format!("{task:?}"))
        } else {
            Ok(())
        }
    })
    .sure(vm);
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_that_are_stopped_moved_and_go_on_while_they_talk_lose_double_and_reorder_nothing() {
    let bed = testbed(3);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let mut owners: Vec<Speaker> = vm.bed().hosts()[1..]
        .iter()
        .map(|host| Speaker::new(&vm, host, env!("CARGO_BIN_EXE_owner-speaks")))
        .collect();
    let mut talk = Talk::start(&vm, &[]);
    let mut rng = Rng::new(11);
    for number in 0..STOPS {
        let (place, other) = [("h2", "h3"), ("h3", "h2")][number % 2];
        let owner = &mut owners[number % 2];
        let theirs: Vec<usize> = (0..6).filter(|who| talk.workers[*who].1 == place).collect();
        owner.say(&format!("stop number {number}"));
        let told = |entry: &sempa_tests::vm::Entry| match &entry.kind {
            EventKind::GuestsPaused { guests, why, .. } => {
                assert!(
                    *why != format!("number {number}") || guests.len() == theirs.len(),
                    "{guests:?}"
                );
                *why == format!("number {number}")
            }
            _ => false,
        };
        vm.event(SOON, "guests that stand still", told).sure(&vm);
        if number % 3 != 0 && !theirs.is_empty() {
            let who = theirs[rng.below(theirs.len())];
            let to = if rng.below(2) == 0 { "h1" } else { other };
            eprintln!(
                "stop {number}: {} from {place} to {to}",
                talk.workers[who].0
            );
            vm.must_migrate(&talk.workers[who].0, to);
            talk.workers[who].1 = to.to_string();
            belongs(&vm, &talk.workers[who].0);
        }
        owner.say("welcome nobody is there");
        // Those that have left do not come back by themselves.
        if let Some(away) = (0..6)
            .find(|who| talk.workers[*who].1 == "h1")
            .filter(|_| theirs.len() < 2)
        {
            vm.must_migrate(&talk.workers[away].0, place);
            talk.workers[away].1 = place.to_string();
            belongs(&vm, &talk.workers[away].0);
        }
    }
    eprintln!("{}", talk.finish(&vm));
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn peers_compute_and_talk_on_while_a_task_is_moved() {
    let bed = testbed(3);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let talk = Talk::start(&vm, &["-b", "192"]);
    let tid = talk.workers[2].0.clone();
    vm.must_migrate(&tid, "h1");
    let events = vm.events().expect("the log");
    let at = |what: &str, is_it: &dyn Fn(&EventKind) -> bool| {
        events
            .iter()
            .find(|entry| is_it(&entry.kind))
            .unwrap_or_else(|| panic!("no {what}: {events:?}"))
            .at_us
    };
    let from = at("stop", &|kind| {
        matches!(
            kind,
            EventKind::MigrationStep {
                step: Step::Stop,
                ..
            }
        )
    });
    let to = at("restore", &|kind| {
        matches!(
            kind,
            EventKind::MigrationStep {
                step: Step::Restore,
                ..
            }
        )
    });
    assert!(from < to, "{events:?}");
    let out = eventually(SOON, || {
        let out = talk
            .director
            .out_so_far()
            .map_err(|error| error.to_string())?;
        let last = out
            .lines()
            .filter_map(progress)
            .map(|(_, at, _)| at)
            .max()
            .unwrap_or(0);
        if last > to + 100_000 {
            Ok(out)
        } else {
            Err("no progress after the move".to_string())
        }
    })
    .expect("progress");
    for peer in [0, 1, 3, 4, 5] {
        let within = out
            .lines()
            .filter_map(progress)
            .filter(|(who, at, _)| *who == peer && (from..to).contains(at));
        let counts: Vec<u64> = within.map(|(_, _, count)| count).collect();
        assert!(
            counts.len() >= 2 && counts.last() > counts.first(),
            "worker {peer} stood still in the {} ms of the move: {counts:?}",
            (to - from) / 1000
        );
    }
    talk.finish(&vm);
    vm.halt().expect("halts");
}

/// (worker, time in microseconds, count) of a line of the director.
fn progress(line: &str) -> Option<(usize, u64, u64)> {
    let mut words = line.strip_prefix("progress ")?.split(' ');
    Some((
        words.next()?.parse().ok()?,
        words.next()?.parse().ok()?,
        words.next()?.parse().ok()?,
    ))
}
