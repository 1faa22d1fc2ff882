//! Runs Debian's unmodified NPpvm with a receiver and a sender on one host.

use crate::figures::System;
use crate::systems::RunningSystems;
use anyhow::{Context, Result, bail};
use sempa_tests::run::{RunningCommand, run, run_ok};
use std::process::Stdio;
use std::time::Duration;

/// Time limit for a run of the sender.
const RUN_TIMEOUT: Duration = Duration::from_secs(240);
/// Time limit for the receiver to enroll.
const ENROLL_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest message in a full run, in bytes. NPpvm itself chooses the sizes up to this one.
const SIZE_MAX: &str = "16777216";
/// Largest message in a quick run, in bytes.
const SIZE_MAX_QUICK: &str = "65536";

/// Runs NPpvm once. Returns (bytes, one-way microseconds) for each message size that NPpvm has
/// chosen.
pub(crate) fn run_netpipe(
    peers: &RunningSystems,
    system: System,
    quick: bool,
) -> Result<Vec<(f64, f64)>> {
    let args = [
        "-u",
        if quick { SIZE_MAX_QUICK } else { SIZE_MAX },
        "-p",
        "0",
    ];
    let mut receiver = peers.command(system, "/usr/bin/NPpvm");
    receiver.args(args);
    let receiver = RunningCommand::start(receiver, Stdio::null())?;
    // The sender searches the task list only once, so the receiver must be enrolled before.
    let mut enrolled = peers.measuring_program(system);
    enrolled.args(["await", "tasks=1"]);
    run_ok(enrolled, ENROLL_TIMEOUT).context("waiting for the receiver")?;
    let mut sender = peers.command(system, "/usr/bin/NPpvm");
    sender.args(["-h", "h1"]).args(args);
    let done = run(sender, RUN_TIMEOUT)?.expect_success("NPpvm")?;
    receiver.finish(ENROLL_TIMEOUT)?;
    let points = parse_output(&(done.out.clone() + &done.err));
    if points.is_empty() {
        bail!("it tells no times: {}", done.out.trim());
    }
    Ok(points)
}

/// Parses lines such as `  3:       4 bytes   2000 times -->      0.62 Mbps in      49.10 usec`.
fn parse_output(output: &str) -> Vec<(f64, f64)> {
    let point = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let mut words = rest.split_whitespace();
        let bytes: f64 = words.next()?.parse().ok()?;
        let us: f64 = rest
            .split_once(" in ")?
            .1
            .split_whitespace()
            .next()?
            .parse()
            .ok()?;
        rest.contains("bytes").then_some((bytes, us))
    };
    output.lines().filter_map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines with sizes and times are parsed, others are not.
    #[test]
    fn only_lines_with_times_are_parsed() {
        let out = "Send and receive buffers\nNow starting the main loop\n  0:       1 bytes  13 times -->      0.20 Mbps in      38.00 usec\n";
        assert_eq!(parse_output(out), [(1.0, 38.0)]);
    }
}
