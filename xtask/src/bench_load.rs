//! `cargo xtask bench load`: what a load watcher costs its host, beside the figures of SEMPA's.

use crate::install;
use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A row: what it is, the figure's name, SEMPA's own figure, what we allow ourselves.
const ROWS: [(&str, &str, &str, f64); 5] = [
    ("a sample, every second", "sample_busy_us", "10-170", 12.0),
    ("a sample, every 5 seconds", "sample_quiet_us", "10-170", 12.0),
    ("is it news, and when to look next", "judge_us", "0.2-0.4", 0.2),
    ("writing a report down", "write_us", "0.6-0.8", 1.0),
    ("from a login record until it is known", "login_us", "", 5000.0),
];

/// Measures and prints. False if a figure is above what is allowed.
///
/// # Errors
/// The build fails, or the program says something else.
pub(crate) fn run() -> Result<bool> {
    let out = install::cargo(&["bench", "-q", "-p", "pvm-load-watcher", "--bench", "load"])?
        .stderr(std::process::Stdio::inherit())
        .output()?;
    if !out.status.success() {
        bail!("the measurement failed: {}", out.status);
    }
    let text = String::from_utf8(out.stdout)?;
    let figures: Value = serde_json::from_str(text.trim()).context("the measurement printed something else")?;
    println!("{:38} {:>10} {:>10} {:>10}", "microseconds, median", "ours", "allowed", "SEMPA");
    let mut good = true;
    for (what, name, sempa, most) in ROWS {
        let ours = figures[name].as_f64().with_context(|| format!("there is no {name}"))?;
        good &= ours <= most;
        println!("{what:38} {ours:10.2} {most:10.1} {sempa:>10}");
    }
    let second = figures["sample_quiet_us"].as_f64().unwrap_or(0.0) / 5e6;
    println!("share of a processor while nothing changes: {:.4} %", second * 100.0);
    Ok(good)
}
