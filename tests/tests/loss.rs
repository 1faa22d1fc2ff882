//! Measures how much work a job with checkpoints loses when a host dies, as counted by the job
//! itself. Also tests the death of all hosts at once.

use sempa_proto::event::EventKind;
use sempa_tests::faults::is_full;
use sempa_tests::requirements::testbed;
use sempa_tests::ring_job::{ComputedRound, Job};
use sempa_tests::rng::{Rng, seed};
use sempa_tests::testbed::Host;
use sempa_tests::vm::{EventEntry, Settings};
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time of work that may be lost.
const LOST_TIME_MAX: Duration = Duration::from_secs(5);
/// Microseconds for which each task of the job computes in a round.
const ROUND_WORK_US: i32 = 4000;

fn now_us() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(since.as_micros()).expect("fits")
}

/// Returns the complete checkpoints in the event log, as (time of completion, name).
fn checkpoints(events: &[EventEntry]) -> Vec<(u64, String)> {
    let checkpoint = |entry: &EventEntry| match &entry.kind {
        EventKind::Checkpointed {
            checkpoint: set, ..
        } => Some((entry.at_us, set.clone())),
        _ => None,
    };
    events.iter().filter_map(checkpoint).collect()
}

/// Returns the names of the checkpoints to which the job has rolled back, in order.
fn restarts(events: &[EventEntry]) -> Vec<String> {
    let restart = |entry: &EventEntry| match &entry.kind {
        EventKind::Restarted {
            checkpoint: set, ..
        } => Some(set.clone()),
        _ => None,
    };
    events.iter().filter_map(restart).collect()
}

/// Returns the number of rounds that were lost with a host killed at the time `killed`, and the
/// time from the last retained round until then. Returns `None` until the job computes again.
fn lost_work(marks: &[ComputedRound], killed: u64) -> Option<(i64, Duration)> {
    let back = marks
        .windows(2)
        .position(|pair| pair[1].1 > killed && pair[1].0 <= pair[0].0)?;
    let (last, first_again) = (marks[back], marks[back + 1]);
    let kept = marks[..=back]
        .iter()
        .rev()
        .find(|(round, _)| *round < first_again.0)?;
    Some((
        last.0 - first_again.0 + 1,
        Duration::from_micros(killed.saturating_sub(kept.1)),
    ))
}

/// The order in which the processes of a host are killed.
#[derive(Clone, Copy, PartialEq)]
enum KillOrder {
    /// All processes are killed at once.
    Sudden,
    /// The tasks are killed first, so that the daemon reports their death.
    TasksFirst,
}

fn kill_host(vm: &Vm<'_>, host: &Host, death: KillOrder) {
    if death == KillOrder::TasksFirst {
        let is_killed = |kind: &EventKind| matches!(kind, EventKind::TaskEnded { status: 9, .. });
        let count = || {
            let events = vm.events().or_panic_with_logs(vm);
            let killed = events.iter().filter(|entry| is_killed(&entry.kind));
            killed.count()
        };
        let before = count();
        host.kill_matching(|line| line.contains("ring_job"));
        let is_known = || {
            if count() > before {
                Ok(())
            } else {
                Err("the deaths are not reported".to_string())
            }
        };
        wait_for(TIMEOUT, is_known).or_panic_with_logs(vm);
    }
    host.kill_all();
}

/// Waits until a new checkpoint is complete. Returns the time of its completion.
fn wait_for_checkpoint(vm: &Vm<'_>) -> u64 {
    let before = checkpoints(&vm.events().or_panic_with_logs(vm)).len();
    let newest = wait_for(TIMEOUT, || {
        let events = vm.events().map_err(|error| error.to_string())?;
        let made = checkpoints(&events);
        match made.last() {
            Some((at, _)) if made.len() > before => Ok(*at),
            _ => Err("no newer checkpoint".to_string()),
        }
    });
    newest.or_panic_with_logs(vm)
}

/// Kills a host and waits until the job has rolled back to its newest checkpoint and computes
/// again. Returns the time of work that was lost.
fn kill_and_wait_for_rollback(vm: &Vm<'_>, job: &Job, host: &Host, death: KillOrder) -> Duration {
    let before = vm.events().or_panic_with_logs(vm);
    let killed = now_us();
    kill_host(vm, host, death);
    let count = restarts(&before).len();
    let back_to = wait_for(TIMEOUT, || {
        let events = vm.events().map_err(|error| error.to_string())?;
        let restarts = restarts(&events);
        let newest = restarts.last().filter(|_| restarts.len() > count);
        newest.cloned().ok_or("no restart".to_string())
    })
    .or_panic_with_logs(vm);
    // The newest checkpoint may have become complete after the kill.
    let made = checkpoints(&vm.events().or_panic_with_logs(vm));
    let old = checkpoints(&before).len();
    let newest = made[old - 1..].iter().map(|(_, name)| name);
    assert!(
        newest.clone().any(|name| *name == back_to),
        "back to {back_to}: {made:?}"
    );
    let (rounds, time) = wait_for(TIMEOUT, || {
        lost_work(&job.computed_rounds(), killed)
            .ok_or("the job does not compute again".to_string())
    })
    .or_panic_with_logs(vm);
    eprintln!("{}: {rounds} rounds and {time:.2?} lost", host.name());
    time
}

/// Kills hosts at random times while a job with periodic checkpoints runs. `interval_option` is the
/// console's option for the checkpoint interval. Each time the job must roll back to its newest
/// checkpoint, and finally its result must be correct. The lost time depends on the machine, so
/// only the campaign compares it with [`LOST_TIME_MAX`].
fn kill_hosts_under_job(interval_option: &str, death: KillOrder) {
    let bed = testbed(3);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let job = Job::start_slow(&vm, "-h2", ROUND_WORK_US);
    job.wait_for_rounds(&vm, 5);
    vm.json(&["checkpoint", interval_option, "5s", &job.tid])
        .or_panic_with_logs(&vm);
    let (mut rng, mut times) = (Rng::new(seed()), Vec::new());
    let deaths = if is_full() { 6 } else { 1 };
    let first = rng.below(2);
    for number in first..first + deaths {
        let victim = bed.host(2 + number % 2);
        // The time of the kill is up to six seconds after a checkpoint: just before the next one is
        // complete, or within a second after it.
        let moment = wait_for_checkpoint(&vm) + rng.below(6_000_000) as u64;
        wait_for(TIMEOUT, || {
            if now_us() >= moment {
                Ok(())
            } else {
                Err("too early".to_string())
            }
        })
        .or_panic_with_logs(&vm);
        times.push(kill_and_wait_for_rollback(&vm, &job, victim, death));
        vm.add(&[victim.name()]).or_panic_with_logs(&vm);
    }
    job.finish(&vm);
    if is_full() {
        check_lost_times(&vm, &times);
    }
    vm.halt().expect("halts");
}

/// Checks the lost times. Only meaningful on a machine without other load.
fn check_lost_times(vm: &Vm<'_>, times: &[Duration]) {
    /// Additional time that may be lost on a slow machine, if an event warns that checkpoints take
    /// too long.
    const MARGIN: Duration = Duration::from_secs(4);
    let too_slow =
        |kind: &EventKind| matches!(kind, EventKind::Note { text } if text.contains("may be lost"));
    let events = vm.events().or_panic_with_logs(vm);
    let warned = events.iter().any(|entry| too_slow(&entry.kind));
    let bound = if warned {
        LOST_TIME_MAX + MARGIN
    } else {
        LOST_TIME_MAX
    };
    assert!(
        times.iter().all(|time| *time <= bound),
        "{times:?}, warned: {warned}"
    );
}

/// With a checkpoint every five seconds, the job rolls back to the newest one and finishes with the
/// correct result.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_with_checkpoint_interval_loses_little() {
    kill_hosts_under_job("--every", KillOrder::TasksFirst);
}

/// With a bound of five seconds for lost work, the job rolls back and finishes with the correct
/// result.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_with_loss_bound_loses_little() {
    kill_hosts_under_job("--loss", KillOrder::Sudden);
}

/// All hosts of a virtual machine are killed at once. A new virtual machine restarts the job.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_restarts_after_the_death_of_all_hosts() {
    let bed = testbed(3);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let job = Job::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    vm.json(&["checkpoint", "--every", "1s", &job.tid])
        .or_panic_with_logs(&vm);
    for _ in 0..2 {
        wait_for_checkpoint(&vm);
    }
    job.wait_for_rounds(&vm, 3);
    for host in bed.hosts() {
        host.kill_all();
    }
    let vm = Vm::start(&bed, Settings::default()).or_panic_with_logs(&vm);
    vm.add(&["h2", "h3"]).or_panic_with_logs(&vm);
    let listed = vm.pvm(&["checkpoints"]).or_panic_with_logs(&vm);
    let names = listed
        .out
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    let newest = names
        .filter(|name| name.starts_with(&job.tid))
        .max()
        .unwrap_or_else(|| panic!("{listed:?}"));
    let again = vm.pvm(&["restart", newest]).or_panic_with_logs(&vm);
    assert!(again.succeeded(), "{again:?}\n{}", vm.logs());
    job.finish(&vm);
    vm.halt().expect("halts");
}
