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
/// Number of workers on the host without the broker.
const REMOTE_WORKERS: u64 = 40;
/// Memory of the two buffers of a direct route between hosts, in KiB. After some messages, the
/// broker has such a route to each remote worker.
const DIRECT_ROUTE_KIB: u64 = 2 * 384;
/// Largest growth of the broker's own memory during the run, in KiB.
const MEMORY_GROWTH_MAX_KIB: u64 = REMOTE_WORKERS * DIRECT_ROUTE_KIB + (8 << 10);
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

/// Memory and descriptors of the broker.
struct Resources {
    /// Memory that only the broker uses, in KiB.
    own_kib: u64,
    /// Memory that the broker shares with the daemon, in KiB. Rings and pools have a fixed size;
    /// their pages become resident as they are used for the first time.
    shared_kib: u64,
    descriptors: usize,
}

fn broker_resources(broker: &BrokerVm) -> Resources {
    let pids = broker.broker_pids();
    let [(_, pid)] = pids[..] else {
        panic!("one broker: {pids:?}")
    };
    let proc = Path::new("/proc").join(pid.to_string());
    let status = std::fs::read_to_string(proc.join("status")).expect("it runs");
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        kib.expect("a size")
    };
    Resources {
        own_kib: kib("RssAnon:"),
        shared_kib: kib("RssShmem:"),
        descriptors: std::fs::read_dir(proc.join("fd")).expect("it runs").count(),
    }
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
    broker.broker_succeeds(&["start", "churn", "--grace", "1", "--linger", "5"]);
    let file = broker.session_file("churn");
    let (workers, departures_text) = (WORKERS.to_string(), departures.to_string());
    let remote_workers = REMOTE_WORKERS.to_string();
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
        start_workers(bed.host(2), "churn", &remote_workers),
        start_workers(bed.outside_host(), &file, "45"),
    ];
    wait_for_line(&broker, &foreman, "all present");
    let before = broker_resources(&broker);
    let summary = wait_for_line(&broker, &foreman, "{");
    let after = broker_resources(&broker);
    for (when, resources) in [("before", &before), ("after", &after)] {
        println!(
            "{when}: {} KiB of its own, {} KiB shared, {} descriptors",
            resources.own_kib, resources.shared_kib, resources.descriptors
        );
    }
    println!("{summary}");
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
    assert!(after.own_kib < before.own_kib + MEMORY_GROWTH_MAX_KIB);
    assert!(after.descriptors <= before.descriptors + DESCRIPTOR_GROWTH_MAX);
    broker.release(foreman);
    for launcher in launchers {
        broker.expect_status(launcher, 0);
    }
    broker.end();
}
