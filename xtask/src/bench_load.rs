//! `cargo xtask bench load`: measures the processor time that a load watcher uses on its host, and
//! compares the results with SEMPA's figures. Measures single operations of a load watcher, and a
//! load watcher that runs on a host of a virtual machine.

use anyhow::{Context, Result, bail};
use procfs::process::Process;
use sempa_tests::run::run_successfully;
use sempa_tests::testbed::Host;
use sempa_tests::vm::VmSettings;
use sempa_tests::{Testbed, Vm, requirements, wait_for};
use serde::Serialize;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use xtask_install as install;

/// Rows of the table, as (description, key in the JSON output, SEMPA's figure, maximum of our
/// figure in microseconds).
const FIGURE_ROWS: [(&str, &str, &str, f64); 6] = [
    ("a sample, every second", "sample_busy_us", "10-170", 12.0),
    (
        "a sample, every 5 seconds",
        "sample_quiet_us",
        "10-170",
        12.0,
    ),
    (
        "a sample where an owner keeps memory free",
        "sample_kept_us",
        "10-170",
        12.0,
    ),
    (
        "is it news, and when to look next",
        "judge_us",
        "0.2-0.4",
        0.2,
    ),
    (
        "handing a report over, for who judges",
        "write_us",
        "0.6-0.8",
        1.0,
    ),
    (
        "from a login record until it is known",
        "login_us",
        "",
        5000.0,
    ),
];
/// Maximum share of a processor, in percent, that a load watcher may use on an idle host.
const LIVE_PERCENT_MAX: f64 = 0.01;
/// Maximum share of the machine's processors in use, 0.0 to 1.0, at which the machine counts as
/// quiet. On a busier machine the load watcher's share is reported but not compared with
/// [`LIVE_PERCENT_MAX`].
const QUIET_BUSY_SHARE_MAX: f64 = 0.05;
/// Time after the start of a load watcher during which it has startup costs.
const STARTUP_DURATION: Duration = Duration::from_secs(30);
/// Time limit for each condition that the benchmark waits for.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Name of the program that sends load reports and measures the duration of each call.
const SENDER_PROGRAM: &str = "report-cost";

/// The processor time that a running load watcher has used during a measurement.
#[derive(Debug, Serialize)]
struct WatcherUsage {
    seconds: f64,
    /// Processor time of all threads of the load watcher during the measurement, in microseconds.
    used_us: f64,
    percent: f64,
    /// Share of the machine's processors that were in use during the measurement, 0.0 to 1.0.
    busy: f64,
    quiet: bool,
}

/// Runs the measurement for `minutes` minutes and prints the results. Writes JSON to the folder
/// `results_folder`. Returns false if a figure exceeds its maximum.
pub(crate) fn run(prefix: &Path, minutes: u64, results_folder: &Path) -> Result<bool> {
    let bench_output = install::cargo_command(&[
        "bench",
        "--locked",
        "-q",
        "-p",
        "pvm-load-watcher",
        "--bench",
        "load",
    ])?
    .stderr(std::process::Stdio::inherit())
    .output()?;
    if !bench_output.status.success() {
        bail!("the measurement failed: {}", bench_output.status);
    }
    let text = String::from_utf8(bench_output.stdout)?;
    let mut figures: Value =
        serde_json::from_str(text.trim()).context("the measurement printed something else")?;
    if let Some(missing_requirement) = requirements::unmet_requirement() {
        bail!("bench load: {missing_requirement}");
    }
    let testbed = Testbed::new(2, Some(prefix), &[])?;
    let vm = Vm::start(
        &testbed,
        VmSettings {
            rm_command: Some("pvm-rm --policy load".to_string()),
            ..VmSettings::default()
        },
    )?;
    let measurement = measure_watcher_and_reports(&vm, Duration::from_secs(60 * minutes))
        .inspect_err(|_| eprintln!("{}", vm.events_and_logs()));
    vm.halt_and_wait()?;
    let (watcher_usage, report_us) = measurement?;
    figures["send_us"] = report_us.into();
    println!(
        "{:38} {:>10} {:>10} {:>10}",
        "microseconds, median", "ours", "allowed", "SEMPA"
    );
    let mut succeeded = true;
    for (description, name, sempa_figure, maximum_us) in FIGURE_ROWS {
        let our_figure = figures[name]
            .as_f64()
            .with_context(|| format!("there is no {name}"))?;
        succeeded &= our_figure <= maximum_us;
        println!("{description:38} {our_figure:10.2} {maximum_us:10.1} {sempa_figure:>10}");
    }
    println!(
        "{:38} {report_us:10.2} {:>10} {:>10}",
        "sending it, when nothing else is due", "", ""
    );
    let WatcherUsage {
        seconds,
        used_us,
        percent,
        busy,
        quiet,
    } = &watcher_usage;
    println!(
        "a load watcher at work: {percent:.4} % of a processor ({used_us:.0} us in {seconds:.0} s; the machine was {:.0} % busy)",
        busy * 100.0
    );
    succeeded &= !quiet || *percent <= LIVE_PERCENT_MAX;
    figures["live"] = serde_json::to_value(&watcher_usage)?;
    fs::create_dir_all(results_folder)?;
    let json_path = results_folder.join("load.json");
    fs::write(&json_path, serde_json::to_vec_pretty(&figures)?)
        .with_context(|| json_path.display().to_string())?;
    println!("the same as JSON: {}", json_path.display());
    Ok(succeeded)
}

/// Measures the running load watcher of h2 for the duration `duration`. Also returns the median
/// time for sending a report from h2, in microseconds.
fn measure_watcher_and_reports(vm: &Vm, duration: Duration) -> Result<(WatcherUsage, f64)> {
    vm.add_hosts(&["h2"])?;
    let host = vm.testbed().host(2);
    let watcher = wait_for(WAIT_TIMEOUT, || {
        watcher_pid(host).ok_or("no load watcher runs".to_string())
    })?;
    std::thread::sleep(STARTUP_DURATION);
    let (start, start_ns, start_ticks) = (
        Instant::now(),
        processor_time_ns(watcher)?,
        machine_ticks()?,
    );
    std::thread::sleep(duration);
    let (seconds, end_ns, end_ticks) = (
        start.elapsed().as_secs_f64(),
        processor_time_ns(watcher)?,
        machine_ticks()?,
    );
    let used_us = (end_ns - start_ns) / 1e3;
    let start_ticks = 1.0 - (end_ticks.1 - start_ticks.1) / (end_ticks.0 - start_ticks.0).max(1.0);
    let watcher_usage = WatcherUsage {
        seconds,
        used_us,
        percent: used_us / seconds / 1e4,
        busy: start_ticks,
        quiet: start_ticks <= QUIET_BUSY_SHARE_MAX,
    };
    let program = vm.user_home().join(SENDER_PROGRAM);
    fs::copy(requirements::build_folder()?.join(SENDER_PROGRAM), &program)
        .context("the program that sends reports")?;
    let sender_output = run_successfully(vm.user_command(host, program), WAIT_TIMEOUT)?.stdout;
    let call_times_ns: Vec<f64> = sender_output
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<_, _>>()
        .context(sender_output.clone())?;
    let median_ns = call_times_ns
        .get(call_times_ns.len() / 2)
        .context("it has sent nothing")?;
    Ok((watcher_usage, median_ns / 1e3))
}

/// Returns the pid of a host's load watcher; `None` if the load watcher does not run.
fn watcher_pid(host: &Host) -> Option<u32> {
    let is_load_watcher = |line: &str| {
        line.split(' ')
            .next()
            .is_some_and(|path| path.ends_with("pvm-load-watcher"))
    };
    host.processes()
        .into_iter()
        .find(|(_, line)| is_load_watcher(line))
        .map(|(pid, _)| pid)
}

/// Returns the processor time that all threads of a process have used, in nanoseconds.
fn processor_time_ns(pid: u32) -> Result<f64> {
    let mut total_ns = 0.0;
    let process = Process::new(pid.cast_signed()).context("the load watcher has ended")?;
    for thread in process.tasks()? {
        total_ns += thread?.schedstat()?.sum_exec_runtime as f64;
    }
    Ok(total_ns)
}

/// Returns the processor time of this machine since its boot, in ticks: the total time and the idle
/// time.
fn machine_ticks() -> Result<(f64, f64)> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    let ticks: Vec<f64> = line
        .split_whitespace()
        .skip(1)
        .take(8)
        .filter_map(|n| n.parse().ok())
        .collect();
    Ok((ticks.iter().sum(), ticks.iter().skip(3).take(2).sum()))
}
