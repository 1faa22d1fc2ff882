//! Runs Debian's unmodified NPpvm with a receiver and a sender on one host.

use crate::figures::System;
use crate::systems::RunningSystems;
use anyhow::{Context, Result, bail};
use sempa_tests::run::{RunningCommand, run_successfully, run_to_end};
use std::process::Stdio;
use std::time::Duration;

/// Time limit for one run of the sender.
const RUN_TIMEOUT: Duration = Duration::from_secs(240);
/// Time limit for the receiver to enroll.
const ENROLL_TIMEOUT: Duration = Duration::from_secs(60);
/// Size of the largest message in a full run, in bytes. NPpvm selects the sizes up to this limit.
const MESSAGE_BYTES_MAX: &str = "16777216";
/// Size of the largest message in a quick run, in bytes.
const QUICK_MESSAGE_BYTES_MAX: &str = "65536";

/// Runs NPpvm once. Returns (message size in bytes, one-way time in microseconds) for each message
/// size that NPpvm has selected.
pub(crate) fn run_netpipe(
    systems: &RunningSystems,
    system: System,
    is_quick: bool,
) -> Result<Vec<(f64, f64)>> {
    let arguments = [
        "-u",
        if is_quick {
            QUICK_MESSAGE_BYTES_MAX
        } else {
            MESSAGE_BYTES_MAX
        },
        "-p",
        "0",
    ];
    let mut receiver = systems.command_on_h1(system, "/usr/bin/NPpvm");
    receiver.args(arguments);
    let receiver = RunningCommand::start(receiver, Stdio::null())?;
    // The sender searches the task list only once, so the receiver must be enrolled before the
    // sender starts.
    let mut enrollment_wait = systems.measuring_program_command(system);
    enrollment_wait.args(["await", "tasks=1"]);
    run_successfully(enrollment_wait, ENROLL_TIMEOUT).context("waiting for the receiver")?;
    let mut sender = systems.command_on_h1(system, "/usr/bin/NPpvm");
    sender.args(["-h", "h1"]).args(arguments);
    let result = run_to_end(sender, RUN_TIMEOUT)?.expect_success("NPpvm")?;
    receiver.wait_or_kill(ENROLL_TIMEOUT)?;
    let points = parse_output(&(result.stdout.clone() + &result.stderr));
    if points.is_empty() {
        bail!("no times in its output: {}", result.stdout.trim());
    }
    Ok(points)
}

/// Parses lines such as `  3:       4 bytes   2000 times -->      0.62 Mbps in      49.10 usec`,
/// and ignores other lines.
fn parse_output(output: &str) -> Vec<(f64, f64)> {
    let parse_line = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let mut fields = rest.split_whitespace();
        let bytes: f64 = fields.next()?.parse().ok()?;
        let us: f64 = rest
            .split_once(" in ")?
            .1
            .split_whitespace()
            .next()?
            .parse()
            .ok()?;
        rest.contains("bytes").then_some((bytes, us))
    };
    output.lines().filter_map(parse_line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_with_times_are_parsed() {
        let output = "Send and receive buffers\nNow starting the main loop\n  0:       1 bytes  13 times -->      0.20 Mbps in      38.00 usec\n";
        assert_eq!(parse_output(output), [(1.0, 38.0)]);
    }
}
