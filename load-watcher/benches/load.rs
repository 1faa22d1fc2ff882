//! Measures the cost of a load watcher: taking a sample of the real /proc, deciding whether to
//! report the sample, and encoding a report. Also measures the delay until a login is noticed.
//!
//! Prints one line of JSON; `cargo xtask bench load` compares it with SEMPA's figures.

use pvm_load_watcher::file_watcher::{FileWatcher, WatchedPath, read_login_records};
use pvm_load_watcher::owner::LoginRecords;
use pvm_load_watcher::report::{Reporter, SAMPLE_INTERVAL_BUSY, SAMPLE_INTERVAL_QUIET};
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
const LOGINS: usize = 51;
/// Time limit for a login to be noticed; long enough for a busy machine.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(20);
/// Number of samples before the measured ones.
const WARMUP_SAMPLES: u64 = 12;
/// Total duration of these samples, in milliseconds.
const WARMUP_MS: u64 = 1200;
/// Number of samples of each kind.
const SAMPLES: usize = 4000;
/// Number of decisions or reports per measurement; the time of a single one is too short for the
/// clock.
const BATCH: usize = 1000;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns the duration of each call of `act`, in microseconds.
fn time_each_call(times: usize, mut act: impl FnMut(usize)) -> Vec<f64> {
    let time = |n| {
        let begin = Instant::now();
        act(n);
        begin.elapsed().as_secs_f64() * 1e6
    };
    (0..times).map(time).collect()
}

/// Measures the cost of a sample in microseconds. Computes the means over windows of thirty
/// samples, because not every sample reads every file; returns the median and the minimum of these
/// means.
fn measure_sampling(pause: Micros, memory_matters: bool) -> (f64, f64) {
    let mut sampler = Sampler::open(Path::new("/proc")).expect("this is Linux");
    sampler.set_memory_matters(memory_matters);
    // After two reads of /proc/stat the sampler knows whether processor time is stolen.
    for n in 0..WARMUP_SAMPLES {
        sampler.sample(Micros(n)).expect("this is Linux");
        std::thread::sleep(Duration::from_millis(WARMUP_MS / WARMUP_SAMPLES));
    }
    let act = |n: usize| {
        black_box(
            sampler
                .sample(Micros(n as u64 * pause.0))
                .expect("this is Linux"),
        );
    };
    let windows: Vec<f64> = time_each_call(SAMPLES, act)
        .chunks(30)
        .map(|w| w.iter().sum::<f64>() / w.len() as f64)
        .collect();
    let best = windows.iter().copied().fold(f64::MAX, f64::min);
    (median(windows), best)
}

/// Measures the time from writing a login record, in a file like the system's, until the load
/// watcher has read it.
fn measure_login_delay() -> Vec<f64> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("utmp");
    let alice = Login {
        user: "alice".into(),
        line: "pts/0".into(),
        from: "h9".into(),
        at: Micros::from_secs(1000),
    };
    let write = |kind| fs::write(&path, encode_record(kind, &alice)).expect("the bench's own file");
    let mut watch = FileWatcher::new(vec![WatchedPath::file(path.clone())]);
    let mut until = |wanted: LoginRecords| {
        loop {
            watch.arm(0);
            if read_login_records(&path) == wanted {
                break;
            }
            assert!(
                watch.wait(LOGIN_TIMEOUT, None).path_changed(0),
                "it is not noticed"
            );
        }
    };
    let mut time = |_| {
        write(DEAD_PROCESS);
        until(LoginRecords::Logins(Vec::new()));
        let begin = Instant::now();
        write(USER_PROCESS);
        until(LoginRecords::Logins(vec![alice.clone()]));
        begin.elapsed().as_secs_f64() * 1e6
    };
    (0..LOGINS).map(&mut time).collect()
}

fn sample(n: usize) -> LoadSample {
    let busy = (n % 7) as f32 / 7.0;
    LoadSample {
        cores: 8,
        running: n as u32 % 5,
        busy,
        available_bytes: 1 << 33,
        ..LoadSample::default()
    }
}

fn main() {
    let (busy, quiet, kept) = (
        measure_sampling(SAMPLE_INTERVAL_BUSY, false),
        measure_sampling(SAMPLE_INTERVAL_QUIET, false),
        measure_sampling(SAMPLE_INTERVAL_BUSY, true),
    );
    let absent = OwnerVerdict::Absent { since: None };
    let mut reporter = Reporter::default();
    reporter.record_sent(
        Micros(0),
        sample(3),
        absent.clone(),
        "nobody is logged in".into(),
    );
    let judge = |n: usize| {
        for i in 0..BATCH {
            let sample = black_box(sample(n + i));
            black_box(reporter.must_report_load(Micros(i as u64), &sample));
            black_box(reporter.interval_after(&sample));
        }
    };
    let judging = median(time_each_call(200, judge)) / BATCH as f64;
    let report = LoadReport {
        host: HostId::MASTER,
        at: Micros(1),
        sample: sample(1),
        owner_verdict: absent,
        confidence: 90,
        owner_reason: "nobody is logged in".into(),
        logins: Vec::new(),
        access: GuestAccess::Welcome,
        access_reason: String::new(),
        limits: GuestLimits::default(),
    };
    let write = |_| {
        for _ in 0..BATCH {
            black_box(frame::to_bytes(black_box(&report)).expect("a report can be written"));
        }
    };
    let writing = median(time_each_call(200, write)) / BATCH as f64;
    let logins = median(measure_login_delay());
    let figures = serde_json::json!({
        "sample_busy_us": busy.0, "sample_busy_best_us": busy.1,
        "sample_quiet_us": quiet.0, "sample_quiet_best_us": quiet.1,
        "sample_kept_us": kept.0, "sample_kept_best_us": kept.1,
        "judge_us": judging, "write_us": writing, "login_us": logins,
    });
    println!("{figures}");
}
