//! `cargo xtask bench load`: measures what a load watcher costs its host, and compares the results
//! with SEMPA's figures. Measures single operations of a load watcher, and a load watcher that runs
//! on a host of a virtual machine.

use crate::install;
use anyhow::{Context, Result, bail};
use procfs::process::Process;
use sempa_tests::run::run_ok;
use sempa_tests::testbed::Host;
use sempa_tests::vm::Settings;
use sempa_tests::{Testbed, Vm, requirements, wait_for};
use serde::Serialize;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Rows of the table, as (description, name of the figure, SEMPA's figure, our maximum).
const ROWS: [(&str, &str, &str, f64); 6] = [
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
/// Maximum share of the machine's processors in use, 0.0 to 1.0, on a quiet machine. On a busier
/// machine the share of the load watcher is reported and not judged.
const QUIET_BUSY_SHARE_MAX: f64 = 0.05;
/// Time after which a load watcher has no more startup costs.
const STARTUP_DURATION: Duration = Duration::from_secs(30);
/// Time limit for each condition that the benchmark waits for.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Name of the program that sends load reports and measures the duration of the calls.
const SENDER_PROGRAM: &str = "report-cost";

/// The processor time that a running load watcher has used.
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
/// `results`. Returns false if a figure exceeds its maximum.
pub(crate) fn run(prefix: &Path, minutes: u64, results: &Path) -> Result<bool> {
    let out = install::cargo(&[
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
    if !out.status.success() {
        bail!("the measurement failed: {}", out.status);
    }
    let text = String::from_utf8(out.stdout)?;
    let mut figures: Value =
        serde_json::from_str(text.trim()).context("the measurement printed something else")?;
    if let Some(lack) = requirements::lacks() {
        bail!("bench load: {lack}");
    }
    let bed = Testbed::new(2, Some(prefix), &[])?;
    let vm = Vm::start(
        &bed,
        Settings {
            rm: Some("pvm-rm --policy load".to_string()),
            ..Settings::default()
        },
    )?;
    let measured =
        measure(&vm, Duration::from_secs(60 * minutes)).inspect_err(|_| eprintln!("{}", vm.logs()));
    vm.halt()?;
    let (live, sent) = measured?;
    figures["send_us"] = sent.into();
    println!(
        "{:38} {:>10} {:>10} {:>10}",
        "microseconds, median", "ours", "allowed", "SEMPA"
    );
    let mut good = true;
    for (what, name, sempa, most) in ROWS {
        let ours = figures[name]
            .as_f64()
            .with_context(|| format!("there is no {name}"))?;
        good &= ours <= most;
        println!("{what:38} {ours:10.2} {most:10.1} {sempa:>10}");
    }
    println!(
        "{:38} {sent:10.2} {:>10} {:>10}",
        "sending it, when nothing else is due", "", ""
    );
    let WatcherUsage {
        seconds,
        used_us,
        percent,
        busy,
        quiet,
    } = &live;
    println!(
        "a load watcher at work: {percent:.4} % of a processor ({used_us:.0} us in {seconds:.0} s; the machine was {:.0} % busy)",
        busy * 100.0
    );
    good &= !quiet || *percent <= LIVE_PERCENT_MAX;
    figures["live"] = serde_json::to_value(&live)?;
    fs::create_dir_all(results)?;
    let file = results.join("load.json");
    fs::write(&file, serde_json::to_vec_pretty(&figures)?)
        .with_context(|| file.display().to_string())?;
    println!("the same as JSON: {}", file.display());
    Ok(good)
}

/// Measures the running load watcher of h2. Also returns the microseconds for sending a report from
/// h2.
fn measure(vm: &Vm, span: Duration) -> Result<(WatcherUsage, f64)> {
    vm.add(&["h2"])?;
    let host = vm.bed().host(2);
    let watcher = wait_for(WAIT_TIMEOUT, || {
        watcher_pid(host).ok_or("no load watcher runs".to_string())
    })?;
    std::thread::sleep(STARTUP_DURATION);
    let (begin, from, busy) = (Instant::now(), used_ns(watcher)?, machine_ticks()?);
    std::thread::sleep(span);
    let (seconds, to, after) = (
        begin.elapsed().as_secs_f64(),
        used_ns(watcher)?,
        machine_ticks()?,
    );
    let used_us = (to - from) / 1e3;
    let busy = 1.0 - (after.1 - busy.1) / (after.0 - busy.0).max(1.0);
    let live = WatcherUsage {
        seconds,
        used_us,
        percent: used_us / seconds / 1e4,
        busy,
        quiet: busy <= QUIET_BUSY_SHARE_MAX,
    };
    let program = vm.home().join(SENDER_PROGRAM);
    fs::copy(requirements::build_folder()?.join(SENDER_PROGRAM), &program)
        .context("the program that sends reports")?;
    let said = run_ok(vm.command(host, program), WAIT_TIMEOUT)?.out;
    let took: Vec<f64> = said
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<_, _>>()
        .context(said.clone())?;
    let median = took.get(took.len() / 2).context("it has sent nothing")?;
    Ok((live, median / 1e3))
}

/// Returns the process number of a host's load watcher; `None` if it does not run.
fn watcher_pid(host: &Host) -> Option<u32> {
    let is = |line: &str| {
        line.split(' ')
            .next()
            .is_some_and(|path| path.ends_with("pvm-load-watcher"))
    };
    host.processes()
        .into_iter()
        .find(|(_, line)| is(line))
        .map(|(pid, _)| pid)
}

/// Returns the processor time that all threads of a process have used, in nanoseconds.
fn used_ns(pid: u32) -> Result<f64> {
    let mut sum = 0.0;
    let watcher = Process::new(pid.cast_signed()).context("the load watcher has ended")?;
    for thread in watcher.tasks()? {
        sum += thread?.schedstat()?.sum_exec_runtime as f64;
    }
    Ok(sum)
}

/// Returns the processor time of this machine since it was started: in total, and the idle part.
/// The unit is ticks.
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
