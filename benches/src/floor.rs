//! Measures the round trips that the machine and its kernel achieve without a message-passing
//! library: lower bounds for the times in the table.

use crate::figures::{TimeSummary, combine_repetitions, parse_samples};
use crate::rows::Unit;
use crate::systems::compile_one;
use anyhow::{Context, Result, bail};
use sempa_tests::run::{RunningCommand, run};
use sempa_tests::{Testbed, requirements};
use serde::Serialize;
use std::process::Stdio;
use std::time::Duration;

/// Word that selects this measurement in `--only`.
pub(crate) const SELECTOR_NAME: &str = "floor";
/// Repetitions of each figure.
const FLOOR_REPETITIONS: usize = 3;
/// Time limit for one run of the program.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);

const MIB: f64 = 1_048_576.0;

/// A figure, as (title, unit, arguments of the program, number of rounds).
type FloorBenchmark = (&'static str, Unit, &'static [&'static str], usize);

const FIGURES: [FloorBenchmark; 11] = [
    (
        "round trip, two cores spinning on words in shared memory",
        Unit::Micros,
        &["spin", "cores=0,1"],
        20000,
    ),
    (
        "round trip, futexes in shared memory, a core each",
        Unit::Micros,
        &["futex", "cores=0,1"],
        5000,
    ),
    (
        "round trip, futexes in shared memory, one core",
        Unit::Micros,
        &["futex", "cores=0,0"],
        5000,
    ),
    (
        "round trip of 8 B, Unix socket, a core each",
        Unit::Micros,
        &["socket", "cores=0,1"],
        5000,
    ),
    (
        "round trip of 8 B, Unix socket, one core",
        Unit::Micros,
        &["socket", "cores=0,0"],
        5000,
    ),
    (
        "round trip of 8 B, TCP to the other host",
        Unit::Micros,
        &["tcp", "host=h2"],
        3000,
    ),
    (
        "one copy of 1 MiB in memory",
        Unit::MegabytesPerSecond(MIB),
        &["copy", "size=1048576"],
        200,
    ),
    (
        "one copy of 16 MiB in memory",
        Unit::MegabytesPerSecond(16.0 * MIB),
        &["copy", "size=16777216"],
        30,
    ),
    (
        "1 MiB there and back, Unix socket",
        Unit::RoundTripGigabytesPerSecond(MIB),
        &["socket", "size=1048576", "cores=0,1"],
        100,
    ),
    (
        "stream of 1 MiB, plain TCP to the other host",
        Unit::MegabytesPerSecond(MIB),
        &["tcp", "size=1048576", "batch=50", "host=h2"],
        5,
    ),
    (
        "a small process from its start to its first word",
        Unit::Millis,
        &["start"],
        50,
    ),
];

/// The result of one figure.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FloorResult {
    pub(crate) title: &'static str,
    pub(crate) unit: &'static str,
    /// The result, in `unit`.
    pub(crate) value: f64,
    /// The summary of the times from which `value` is computed.
    pub(crate) time: TimeSummary,
}

/// Measures all figures and returns their results.
pub(crate) fn measure_floor(quick: bool) -> Result<Vec<FloorResult>> {
    if let Some(lack) = requirements::lacks() {
        bail!("bench peers: {lack}");
    }
    let bed = Testbed::new(2, None, &[])?;
    compile_one(&bed, "gcc", "floor", None)?;
    eprintln!("bench peers: floor");
    FIGURES
        .iter()
        .map(|figure| measure_one(&bed, figure, quick).with_context(|| figure.0))
        .collect()
}

fn measure_one(
    bed: &Testbed,
    (title, unit, args, rounds): &FloorBenchmark,
    quick: bool,
) -> Result<FloorResult> {
    let program = bed.home().join("pvm3/bin/LINUX64/floor");
    let rounds = if quick { (rounds / 5).max(2) } else { *rounds };
    let mut all = Vec::new();
    for _ in 0..FLOOR_REPETITIONS {
        let mut serve = bed.host(2).command(&program);
        serve.arg("serve");
        // The server exits when its only client disconnects.
        let server = (args[0] == "tcp")
            .then(|| RunningCommand::start(serve, Stdio::null()))
            .transpose()?;
        let mut command = bed.host(1).command(&program);
        command.args(*args).args([
            format!("rounds={rounds}"),
            format!("warm={}", (rounds / 10).max(1)),
        ]);
        all.push(parse_samples(
            &run(command, RUN_TIMEOUT)?.expect_success("floor")?.out,
        )?);
        server
            .map(|server| server.finish(RUN_TIMEOUT))
            .transpose()?;
    }
    let time = combine_repetitions(&all, "time").context("no times")?;
    Ok(FloorResult {
        title,
        unit: unit.name(),
        value: unit.convert(time.median_us),
        time,
    })
}
