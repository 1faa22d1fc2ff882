//! Rebalancing on hosts with different shares of a processor. Control groups limit the shares. A
//! task migrates only if the resource manager predicts a gain.

use sempa_proto::event::EventKind;
use sempa_proto::migration::MigrationCause;
use sempa_tests::farm::{FarmResult, UnequalHosts, spawned_tids};
use sempa_tests::requirements::{installed_prefix, panic_if_unmet, unmet_requirement};
use sempa_tests::run::RunningCommand;
use sempa_tests::vm::EventEntry;
use sempa_tests::{OrPanicWithLogs, Vm, limits, wait_for};
use serde_json::Value;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for all work of the farm on a loaded machine.
const FARM_TIMEOUT: Duration = Duration::from_secs(600);

/// Makes one host for each element of `shares`: the fraction of a processor that the host may use.
fn unequal_hosts(shares: &[f64]) -> UnequalHosts {
    panic_if_unmet(unmet_requirement().or_else(limits::unmet_cpu_requirement));
    installed_prefix()
        .and_then(|prefix| UnequalHosts::new(&prefix, shares))
        .unwrap_or_else(|error| panic!("no hosts: {error:#}"))
}

/// Converts seconds of processor time to units of work. `unit_seconds` is the number of seconds per
/// unit.
fn units_from_seconds(unit_seconds: f64, seconds: &[f64]) -> Vec<u32> {
    seconds
        .iter()
        .map(|seconds| ((seconds / unit_seconds) as u32).max(1))
        .collect()
}

fn wait_for_spawned_tids(farm: &RunningCommand, count: usize) -> Vec<String> {
    let find_tids = || {
        spawned_tids(
            &farm.stdout_so_far().map_err(|error| error.to_string())?,
            count,
        )
        .ok_or("not all are spawned".into())
    };
    wait_for(TIMEOUT, find_tids).expect("tasks are spawned")
}

/// Waits for the end of the farm. Checks that each task has done its work once, with the correct
/// result.
fn wait_and_check_farm(vm: &Vm, farm: RunningCommand, count: usize) -> FarmResult {
    let farm_output = farm
        .wait_or_kill(FARM_TIMEOUT)
        .and_then(|farm_output| farm_output.expect_success("the farm"));
    let farm_result = farm_output
        .and_then(|farm_output| FarmResult::parse(&farm_output.stdout))
        .or_panic_with_logs(vm);
    assert!(
        farm_result.tasks.len() == count && farm_result.tasks.iter().all(|task| task.is_correct),
        "{farm_result:?}"
    );
    farm_result
}

/// Returns the tid and the index of the target host for each migration that was caused by load.
fn rebalancing_migrations(vm: &Vm) -> Vec<(String, u16)> {
    let tid_and_target = |entry: EventEntry| match entry.kind {
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
        .filter_map(tid_and_target)
        .collect()
}

/// Returns (predicted gain, predicted cost) of each decided migration of a task, in microseconds.
fn predicted_gains_and_costs(vm: &Vm, tid: &str) -> Vec<(u64, u64)> {
    let explanation = vm
        .pvm_json(&["why", tid])
        .expect("an answer")
        .pop()
        .expect("one value");
    let decisions = explanation["decisions"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let gain_and_cost = |decision: &Value| {
        let prediction = &decision["decided"]["Go"]["expected"];
        Some((prediction["gain"].as_u64()?, prediction["cost"].as_u64()?))
    };
    decisions.iter().filter_map(gain_and_cost).collect()
}

/// The task on the slow host migrates to a host whose own task has finished. No other task
/// migrates.
#[test]
#[ignore = "system tier: needs root, hosts, CRIU and processor control groups"]
fn unbalanced_farm_is_rebalanced_once() {
    let hosts = unequal_hosts(&[0.5, 0.1, 0.5]);
    let vm = hosts.start_vm().expect("a virtual machine");
    // Without a resource manager the daemons place round robin. The task on the slow h2 has medium
    // work, the task on h3 the least, and the task on h1 the most.
    let units = units_from_seconds(hosts.measure_unit_s().expect("gcc"), &[12.0, 1.0, 20.0]);
    let farm = hosts.start_farm(&vm, None, &units).expect("it starts");
    let tids = wait_for_spawned_tids(&farm, 3);
    let host_names: Vec<String> = tids
        .iter()
        .map(|tid| vm.host_of(tid).expect("it runs"))
        .collect();
    assert_eq!(host_names[0], "h2", "{host_names:?}");
    let manager = hosts
        .start_resource_manager(&vm)
        .expect("a resource manager");

    let slow_task_command = format!("labour {}", units[0]);
    let find_arrival = || {
        let slow_task_process = |i: &usize| {
            hosts
                .testbed()
                .host(*i)
                .processes()
                .into_iter()
                .find(|(_, line)| line.ends_with(&slow_task_command))
        };
        [1, 3]
            .iter()
            .find_map(|i| Some((*i, slow_task_process(i)?.0)))
            .ok_or_else(|| "nobody has left h2".to_string())
    };
    let (target_index, pid) = wait_for(FARM_TIMEOUT, find_arrival).or_panic_with_logs(&vm);
    let is_in_target_group = || {
        hosts
            .cgroup(target_index)
            .contains_process(pid)
            .map_err(|error| error.to_string())
    };
    assert_eq!(
        is_in_target_group(),
        Ok(true),
        "the limit of its new host counts for it"
    );
    wait_and_check_farm(&vm, farm, 3);

    let migrations = rebalancing_migrations(&vm);
    // All other tasks were on the best hosts, so they did not migrate.
    let expected_migrations = [(
        tids[0].clone(),
        u16::try_from(target_index).expect("a host"),
    )];
    assert_eq!(migrations, expected_migrations, "{}", vm.events_and_logs());
    let gains_and_costs = predicted_gains_and_costs(&vm, &tids[0]);
    assert!(
        gains_and_costs
            .iter()
            .all(|(gain, cost)| gain > cost && *cost > 0)
            && !gains_and_costs.is_empty(),
        "{gains_and_costs:?}"
    );
    vm.halt_and_wait().expect("it ends");
    drop(manager);
}
