//! Measures the cost of a load watcher: taking a sample of the real /proc, deciding whether to
//! report the sample, and encoding a report. Also measures the delay until the load watcher notices
//! a login.
//!
//! Prints one line of JSON; `cargo xtask bench load` compares the line with SEMPA's figures.

use pvm_load_watcher::file_watcher::{FileWatcher, WatchedPath, read_login_records};
use pvm_load_watcher::owner::LoginRecords;
use pvm_load_watcher::report::{
    Reporter, SAMPLE_INTERVAL_CHANGING_LOAD, SAMPLE_INTERVAL_STEADY_LOAD,
};
use pvm_load_watcher::sampler::Sampler;
use pvm_load_watcher::utmp::{DEAD_PROCESS, USER_PROCESS, encode_record};
use sempa_proto::load::{GuestLimits, LoadReport, LoadSample, Login, OwnerVerdict};
use sempa_proto::owner::GuestAccess;
use sempa_proto::{HostId, Micros, frame};
use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

/// Number of measured logins.
const LOGIN_COUNT: usize = 51;
/// Time limit for a login to be noticed; long enough for a busy machine.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(20);
/// Number of samples that are taken before the measured ones.
const WARMUP_SAMPLE_COUNT: u64 = 12;
/// Total duration of the warm-up samples, in milliseconds.
const WARMUP_DURATION_MS: u64 = 1200;
/// Number of measured samples with each set of parameters.
const SAMPLE_COUNT: usize = 4000;
/// Number of decisions or reports in one measurement. The duration of a single decision or report
/// is too short for the clock.
const CALLS_PER_MEASUREMENT: usize = 1000;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Calls `action` `call_count` times. Returns the duration of each call in microseconds.
fn time_each_call(call_count: usize, mut action: impl FnMut(usize)) -> Vec<f64> {
    let time_call = |n| {
        let start = Instant::now();
        action(n);
        start.elapsed().as_secs_f64() * 1e6
    };
    (0..call_count).map(time_call).collect()
}

/// Measures the duration of taking a sample, in microseconds. Computes the mean of each group of
/// thirty samples, because not every sample reads every file. Returns the median and the minimum of
/// these means.
fn measure_sampling(interval: Micros, memory_matters: bool) -> (f64, f64) {
    let mut sampler = Sampler::open(Path::new("/proc")).expect("this is Linux");
    sampler.set_memory_matters(memory_matters);
    // After two reads of /proc/stat the sampler knows whether processor time is stolen.
    for n in 0..WARMUP_SAMPLE_COUNT {
        sampler.sample(Micros(n)).expect("this is Linux");
        std::thread::sleep(Duration::from_millis(
            WARMUP_DURATION_MS / WARMUP_SAMPLE_COUNT,
        ));
    }
    let take_sample = |n: usize| {
        black_box(
            sampler
                .sample(Micros(n as u64 * interval.0))
                .expect("this is Linux"),
        );
    };
    let window_means: Vec<f64> = time_each_call(SAMPLE_COUNT, take_sample)
        .chunks(30)
        .map(|w| w.iter().sum::<f64>() / w.len() as f64)
        .collect();
    let minimum = window_means.iter().copied().fold(f64::MAX, f64::min);
    (median(window_means), minimum)
}

/// Measures the time from the write of a login record, into a file like the system's, until the
/// load watcher has read the record. Returns the times in microseconds.
fn measure_login_delay() -> Vec<f64> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("utmp");
    let alice = Login {
        user_name: "alice".into(),
        terminal: "pts/0".into(),
        origin: "h9".into(),
        at: Micros::from_secs(1000),
    };
    let write_record = |record_type| {
        fs::write(&path, encode_record(record_type, &alice)).expect("the bench's own file")
    };
    let mut watcher = FileWatcher::new(vec![WatchedPath::file(path.clone())]);
    let mut wait_until_records_equal = |expected: LoginRecords| {
        loop {
            watcher.set_missing_watches(0);
            if read_login_records(&path) == expected {
                break;
            }
            assert!(
                watcher.wait(LOGIN_TIMEOUT, None).path_changed(0),
                "it is not noticed"
            );
        }
    };
    let mut time_login = |_| {
        write_record(DEAD_PROCESS);
        wait_until_records_equal(LoginRecords::Logins(Vec::new()));
        let start = Instant::now();
        write_record(USER_PROCESS);
        wait_until_records_equal(LoginRecords::Logins(vec![alice.clone()]));
        start.elapsed().as_secs_f64() * 1e6
    };
    (0..LOGIN_COUNT).map(&mut time_login).collect()
}

fn load_sample(n: usize) -> LoadSample {
    let busy_share = (n % 7) as f32 / 7.0;
    LoadSample {
        cores: 8,
        runnable_threads: n as u32 % 5,
        busy_share,
        available_bytes: 1 << 33,
        ..LoadSample::default()
    }
}

fn main() {
    let (changing_us, steady_us, with_memory_us) = (
        measure_sampling(SAMPLE_INTERVAL_CHANGING_LOAD, false),
        measure_sampling(SAMPLE_INTERVAL_STEADY_LOAD, false),
        measure_sampling(SAMPLE_INTERVAL_CHANGING_LOAD, true),
    );
    let absent_owner = OwnerVerdict::Absent { since: None };
    let mut reporter = Reporter::default();
    reporter.record_report(
        Micros(0),
        load_sample(3),
        absent_owner.clone(),
        "no user is logged in".into(),
    );
    let decide_batch = |n: usize| {
        for i in 0..CALLS_PER_MEASUREMENT {
            let sample = black_box(load_sample(n + i));
            black_box(reporter.must_report_load(Micros(i as u64), &sample));
            black_box(reporter.next_sample_interval(&sample));
        }
    };
    let decision_us = median(time_each_call(200, decide_batch)) / CALLS_PER_MEASUREMENT as f64;
    let report = LoadReport {
        host: HostId::MASTER,
        at: Micros(1),
        sample: load_sample(1),
        owner_verdict: absent_owner,
        confidence_percent: 90,
        owner_reason: "no user is logged in".into(),
        logins: Vec::new(),
        guest_access: GuestAccess::Welcome,
        access_reason: String::new(),
        guest_limits: GuestLimits::default(),
    };
    let encode_batch = |_| {
        for _ in 0..CALLS_PER_MEASUREMENT {
            black_box(frame::to_bytes(black_box(&report)).expect("a report can be written"));
        }
    };
    let encoding_us = median(time_each_call(200, encode_batch)) / CALLS_PER_MEASUREMENT as f64;
    let login_delay_us = median(measure_login_delay());
    let figures = serde_json::json!({
        "sample_busy_us": changing_us.0, "sample_busy_best_us": changing_us.1,
        "sample_quiet_us": steady_us.0, "sample_quiet_best_us": steady_us.1,
        "sample_kept_us": with_memory_us.0, "sample_kept_best_us": with_memory_us.1,
        "judge_us": decision_us, "write_us": encoding_us, "login_us": login_delay_us,
    });
    println!("{figures}");
}
