//! A session of 125 workers in which one worker leaves and one joins each second.

use sempa_tests::broker_vm::{BrokerVm, assert_counts_add_up};
use sempa_tests::faults::tests_all_cases;
use sempa_tests::requirements::require_testbed;
use sempa_tests::run::RunningCommand;
use sempa_tests::testbed::Host;
use sempa_tests::{OrPanicWithLogs, wait_for};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(1_200);
const WORKERS: usize = 125;
/// Largest growth of the broker's memory during the run, in KiB: room for the notices and for the
/// journal's buffer.
const MEMORY_GROWTH_MAX_KIB: u64 = 16 << 10;
/// Largest growth of the number of the broker's descriptors: connections of workers that are about
/// to be gone.
const DESCRIPTOR_GROWTH_MAX: usize = 16;

/// Departures, and the time between two of them.
struct Schedule {
    departures: usize,
    interval: Duration,
}

/// Ten minutes with `SEMPA_TEST_FULL=1`; otherwise fewer departures at a higher rate.
fn schedule() -> Schedule {
    match tests_all_cases() {
        true => Schedule {
            departures: 600,
            interval: Duration::from_secs(1),
        },
        false => Schedule {
            departures: 36,
            interval: Duration::from_millis(200),
        },
    }
}

/// Memory in KiB and descriptors of the broker.
fn broker_resources(broker: &BrokerVm) -> (u64, usize) {
    let pids = broker.broker_pids();
    let [(_, pid)] = pids[..] else {
        panic!("one broker: {pids:?}")
    };
    let proc = Path::new("/proc").join(pid.to_string());
    let status = std::fs::read_to_string(proc.join("status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    let descriptors = std::fs::read_dir(proc.join("fd")).expect("it runs").count();
    (kib.expect("a size"), descriptors)
}

fn wait_for_line(broker: &BrokerVm, foreman: &RunningCommand, start: &str) -> String {
    wait_for(TIMEOUT, || {
        let output = foreman.stdout_so_far().map_err(|error| error.to_string())?;
        let complete = output.rfind('\n').map_or("", |end| &output[..end]);
        let line = complete.lines().find(|line| line.starts_with(start));
        let errors = || foreman.stderr_so_far().unwrap_or_default();
        line.map(String::from)
            .ok_or_else(|| format!("no {start:?} in {output:?} {}", errors()))
    })
    .or_panic_with_logs(&broker.vm)
}

/// Each message is received once, comes back, or is counted as dropped; no member is forgotten; the
/// broker's memory and descriptors do not grow with the departures.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn one_of_125_workers_leaves_and_one_joins_each_second() {
    let Schedule {
        departures,
        interval,
    } = schedule();
    let bed = require_testbed(2);
    let broker = BrokerVm::start(&bed);
    broker.broker_succeeds(&["start", "churn", "--grace", "1"]);
    let file = broker.session_file("churn");
    let (workers, departures_text) = (WORKERS.to_string(), departures.to_string());
    let interval_ms = interval.as_millis().to_string();
    let arguments = [
        "broker-churn",
        "foreman",
        "churn",
        &workers,
        &departures_text,
        &interval_ms,
    ];
    let foreman = RunningCommand::start(broker.command(bed.host(1), &arguments), Stdio::piped())
        .expect("starts");
    let start_workers = |host: &Host, session: &str, count: &str| {
        broker.start_on(host, &["broker-churn", "workers", session, count])
    };
    let launchers = [
        start_workers(bed.host(1), "churn", "40"),
        start_workers(bed.host(2), "churn", "40"),
        start_workers(bed.outside_host(), &file, "45"),
    ];
    wait_for_line(&broker, &foreman, "all present");
    let (memory_before, descriptors_before) = broker_resources(&broker);
    let summary = wait_for_line(&broker, &foreman, "{");
    let (memory_after, descriptors_after) = broker_resources(&broker);
    println!(
        "{summary}\nmemory {memory_before} to {memory_after} KiB, descriptors {descriptors_before} to \
         {descriptors_after}"
    );
    let summary: Value = serde_json::from_str(&summary).expect("JSON");
    assert_eq!(summary["errors"], Value::Array(Vec::new()), "{summary}");
    assert_eq!(summary["departures"], departures, "{summary}");
    assert!(summary["returned"].as_u64() > Some(0), "{summary}");
    let report = broker.report("churn");
    assert_counts_add_up(&report);
    assert_eq!(
        report["counts"]["joins"],
        1 + WORKERS + departures,
        "{report}"
    );
    assert_eq!(
        report["counts"]["returned"], summary["returned"],
        "{report}"
    );
    let members = report["members"].as_array().expect("members");
    let present = members.iter().filter(|member| member["state"] == "present");
    assert_eq!(present.count(), 1 + WORKERS, "{report}");
    assert!(memory_after < memory_before + MEMORY_GROWTH_MAX_KIB);
    assert!(descriptors_after <= descriptors_before + DESCRIPTOR_GROWTH_MAX);
    broker.release(foreman);
    for launcher in launchers {
        broker.expect_status(launcher, 0);
    }
    broker.end();
}
