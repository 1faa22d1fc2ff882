//! Rebalancing on hosts with different shares of the processors, which are set by control groups. A
//! task migrates if a gain is predicted; in a balanced farm no task migrates.

use sempa_proto::event::EventKind;
use sempa_proto::migration::MigrationCause;
use sempa_tests::farm::{FarmResult, UnequalHosts, spawned_tids};
use sempa_tests::requirements::{lacks, prefix, require};
use sempa_tests::run::RunningCommand;
use sempa_tests::vm::EventEntry;
use sempa_tests::{OrPanicWithLogs, Vm, limits, wait_for};
use serde_json::Value;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for all work of the farm on a loaded machine.
const FARM_TIMEOUT: Duration = Duration::from_secs(600);

/// Makes hosts, one for each of these shares of a processor.
fn unequal_hosts(shares: &[f64]) -> UnequalHosts {
    require(lacks().or_else(limits::lacks));
    prefix()
        .and_then(|prefix| UnequalHosts::new(&prefix, shares))
        .unwrap_or_else(|error| panic!("no hosts: {error:#}"))
}

/// Converts seconds of processor time to units of work. `unit` is the number of seconds per unit.
fn units_from_seconds(unit: f64, seconds: &[f64]) -> Vec<u32> {
    seconds
        .iter()
        .map(|seconds| ((seconds / unit) as u32).max(1))
        .collect()
}

fn tids(farm: &RunningCommand, count: usize) -> Vec<String> {
    let look = || {
        spawned_tids(
            &farm.out_so_far().map_err(|error| error.to_string())?,
            count,
        )
        .ok_or("not all are spawned".into())
    };
    wait_for(TIMEOUT, look).expect("tasks are spawned")
}

/// Waits for the end of the farm. Checks that each task has done its work once, with the correct
/// result.
fn finish_farm(vm: &Vm, farm: RunningCommand, count: usize) -> FarmResult {
    let done = farm
        .finish(FARM_TIMEOUT)
        .and_then(|done| done.expect_success("the farm"));
    let harvest = done
        .and_then(|done| FarmResult::parse(&done.out))
        .or_panic_with_logs(vm);
    assert!(
        harvest.tasks.len() == count && harvest.tasks.iter().all(|task| task.is_correct),
        "{harvest:?}"
    );
    harvest
}

/// Returns the migrations for rebalancing, as (tid, index of the new host).
fn rebalancing_migrations(vm: &Vm) -> Vec<(String, u16)> {
    let of_load = |entry: EventEntry| match entry.kind {
        EventKind::Migrated {
            tid,
            to,
            cause: MigrationCause::Load { .. },
            ..
        } => Some((tid.to_string(), to.index())),
        _ => None,
    };
    vm.events()
        .expect("the log")
        .into_iter()
        .filter_map(of_load)
        .collect()
}

/// Returns (predicted gain, predicted cost) of each decided migration of a task, in microseconds.
fn predicted_gains_and_costs(vm: &Vm, tid: &str) -> Vec<(u64, u64)> {
    let answer = vm
        .json(&["why", tid])
        .expect("an answer")
        .pop()
        .expect("one value");
    let decisions = answer["decisions"].as_array().cloned().unwrap_or_default();
    let go = |decision: &Value| {
        let expected = &decision["decided"]["Go"]["expected"];
        Some((expected["gain"].as_u64()?, expected["cost"].as_u64()?))
    };
    decisions.iter().filter_map(go).collect()
}

/// A task on a slow host migrates to a host that has finished its work. No other task migrates.
#[test]
#[ignore = "system tier: needs root, hosts, CRIU and processor control groups"]
fn unbalanced_farm_is_rebalanced_once() {
    let hosts = unequal_hosts(&[0.5, 0.1, 0.5]);
    let vm = hosts.start().expect("a virtual machine");
    // Without a resource manager the daemons place round robin: one task is on the slow h2, a short
    // one on h3, and a long one on h1.
    let units = units_from_seconds(
        hosts.measure_unit_seconds().expect("gcc"),
        &[12.0, 1.0, 20.0],
    );
    let farm = hosts.start_farm(&vm, None, &units).expect("it starts");
    let tids = tids(&farm, 3);
    let places: Vec<String> = tids
        .iter()
        .map(|tid| vm.host_of(tid).expect("it runs"))
        .collect();
    assert_eq!(places[0], "h2", "{places:?}");
    let manager = hosts
        .start_resource_manager(&vm)
        .expect("a resource manager");

    let slow = format!("labour {}", units[0]);
    let arrived = || {
        let on = |i: &usize| {
            hosts
                .bed()
                .host(*i)
                .processes()
                .into_iter()
                .find(|(_, line)| line.ends_with(&slow))
        };
        [1, 3]
            .iter()
            .find_map(|i| Some((*i, on(i)?.0)))
            .ok_or_else(|| "nobody has left h2".to_string())
    };
    let (to, pid) = wait_for(FARM_TIMEOUT, arrived).or_panic_with_logs(&vm);
    let limited = || {
        hosts
            .group(to)
            .contains(pid)
            .map_err(|error| error.to_string())
    };
    assert_eq!(
        limited(),
        Ok(true),
        "the limit of its new host counts for it"
    );
    finish_farm(&vm, farm, 3);

    let moved = rebalancing_migrations(&vm);
    // All other tasks were on the best hosts, so they did not migrate.
    let whole = [(tids[0].clone(), u16::try_from(to).expect("a host"))];
    assert_eq!(moved, whole, "{}", vm.logs());
    let expected = predicted_gains_and_costs(&vm, &tids[0]);
    assert!(
        expected.iter().all(|(gain, cost)| gain > cost && *cost > 0) && !expected.is_empty(),
        "{expected:?}"
    );
    vm.halt().expect("it ends");
    drop(manager);
}
