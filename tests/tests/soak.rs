//! Tasks that exchange messages migrate many times. Every message arrives once, and no files,
//! processes or other resources of a migration remain.

use sempa_tests::crowd::Crowd;
use sempa_tests::footprint::{Footprint, KINDS, TASKS_KIND};
use sempa_tests::requirements::testbed;
use sempa_tests::rng::Rng;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
const HOSTS: [&str; 4] = ["h1", "h2", "h3", "h4"];
const WORKERS: usize = 12;
/// Number of neighbours on each side with which a worker exchanges messages.
const NEIGHBOURS_PER_SIDE: usize = 2;
/// Migrations, as (migrations at the same time, repetitions).
const ROUNDS: [(usize, usize); 2] = [(1, 12), (3, 4)];

/// Migrations before the first count, as (migrations at the same time, repetitions). Hosts keep
/// some resources from their first migrations.
const WARM_UP: [(usize, usize); 1] = [(4, 3)];
/// Number of descriptors that a tasker holds for a spare process-id namespace and its process.
/// Taskers keep some namespaces for the next tasks.
const SPARE_NAMESPACE_DESCRIPTORS: u64 = 3;

/// Returns the numbers of descriptors and threads of the virtual machine's own processes, by kind.
/// Those of spare namespaces are subtracted.
fn resource_counts(footprint: &Footprint) -> Vec<(&'static str, [u64; 2])> {
    let count = |kind: usize| {
        let sum = &footprint.kinds[kind];
        let namespaces = if KINDS[kind] == "taskers" {
            sum.processes - HOSTS.len() as u64
        } else {
            0
        };
        (
            KINDS[kind],
            [
                sum.descriptors - SPARE_NAMESPACE_DESCRIPTORS * namespaces,
                sum.threads - namespaces,
            ],
        )
    };
    (0..TASKS_KIND).map(count).collect()
}

/// Starts tasks that exchange messages, migrates them, and checks that every message arrived once.
fn migrate_crowd(vm: &Vm, rounds: &[(usize, usize)], rng: &mut Rng) {
    let mut crowd =
        Crowd::start(vm, WORKERS, NEIGHBOURS_PER_SIDE, &[], &HOSTS).or_panic_with_logs(vm);
    for (at_once, times) in rounds {
        for _ in 0..*times {
            crowd
                .migrate_random(vm, rng, *at_once)
                .or_panic_with_logs(vm);
        }
    }
    crowd.check_hosts(vm).expect("where they were moved to");
    let account = crowd.finish().or_panic_with_logs(vm);
    assert!(account.is_faultless(), "{account:?}\n{}", vm.logs());
    eprintln!("{account:?}");
    sempa_tests::wait_for(TIMEOUT, || {
        match Footprint::measure(vm).kinds[TASKS_KIND].processes {
            0 => Ok(()),
            left => Err(format!("{left} tasks are left")),
        }
    })
    .expect("all end");
}

/// Twelve tasks exchange messages. 24 migrations lose no messages and leave no files, processes or
/// other resources.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn many_moves_lose_nothing_and_leave_nothing() {
    let bed = testbed(HOSTS.len());
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&HOSTS[1..]).expect("the others join");
    let mut rng = Rng::new(5);
    migrate_crowd(&vm, &WARM_UP, &mut rng);
    let quiet = Footprint::measure(&vm);
    migrate_crowd(&vm, &ROUNDS, &mut rng);
    // Idle threads exit only after some time.
    let same = wait_for(TIMEOUT, || {
        let now = Footprint::measure(&vm);
        let (before, after) = (resource_counts(&quiet), resource_counts(&now));
        let grown = before
            .iter()
            .zip(&after)
            .filter(|((_, before), (_, after))| before.iter().zip(after).any(|(b, a)| a > b));
        let mut left: Vec<String> = grown
            .map(|(before, after)| format!("{before:?}, now {after:?}"))
            .collect();
        left.extend(
            (now.files > quiet.files).then(|| format!("{} files, now {}", quiet.files, now.files)),
        );
        if left.is_empty() {
            Ok(())
        } else {
            Err(left.join("; "))
        }
    });
    same.unwrap_or_else(|error| panic!("{error:#}"));
    vm.halt().expect("halts");
}
