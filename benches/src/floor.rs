//! Measures the round trips that the machine and its kernel achieve without a message-passing
//! library. These times are lower bounds for the times in the table.

use crate::figures::{TimeSummary, combine_repetitions, parse_samples};
use crate::peers_table_rows::Unit;
use crate::systems::compile_program;
use anyhow::{Context, Result, bail};
use sempa_tests::run::{RunningCommand, run_to_end};
use sempa_tests::{Testbed, requirements};
use serde::Serialize;
use std::process::Stdio;
use std::time::Duration;

/// Name that selects this measurement in `--only`.
pub(crate) const SELECTOR_NAME: &str = "floor";
/// Number of repetitions of each figure.
const REPETITION_COUNT: usize = 3;
/// Time limit for one run of the measuring program.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);

const BYTES_PER_MIB: f64 = 1_048_576.0;

/// A measured figure: title, unit, arguments of the measuring program, and number of rounds.
type FloorBenchmark = (&'static str, Unit, &'static [&'static str], usize);

const FLOOR_BENCHMARKS: [FloorBenchmark; 11] = [
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
        Unit::MegabytesPerSecond(BYTES_PER_MIB),
        &["copy", "size=1048576"],
        200,
    ),
    (
        "one copy of 16 MiB in memory",
        Unit::MegabytesPerSecond(16.0 * BYTES_PER_MIB),
        &["copy", "size=16777216"],
        30,
    ),
    (
        "1 MiB there and back, Unix socket",
        Unit::RoundTripGigabytesPerSecond(BYTES_PER_MIB),
        &["socket", "size=1048576", "cores=0,1"],
        100,
    ),
    (
        "stream of 1 MiB, plain TCP to the other host",
        Unit::MegabytesPerSecond(BYTES_PER_MIB),
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

/// The measured value of one figure, and the times from which the value is computed.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FloorResult {
    pub(crate) title: &'static str,
    pub(crate) unit: &'static str,
    /// The result, in `unit`.
    pub(crate) value: f64,
    /// The summary of the times from which `value` is computed.
    pub(crate) time: TimeSummary,
}

/// Measures the figures of [`FLOOR_BENCHMARKS`] on a new testbed. Returns their results in the same
/// order.
pub(crate) fn measure_floor(is_quick: bool) -> Result<Vec<FloorResult>> {
    if let Some(unmet_requirement) = requirements::unmet_requirement() {
        bail!("bench peers: {unmet_requirement}");
    }
    let testbed = Testbed::new(2, None, &[])?;
    compile_program(&testbed, "gcc", "floor", None)?;
    eprintln!("bench peers: floor");
    FLOOR_BENCHMARKS
        .iter()
        .map(|benchmark| measure_figure(&testbed, benchmark, is_quick).with_context(|| benchmark.0))
        .collect()
}

fn measure_figure(
    testbed: &Testbed,
    (title, unit, args, round_count): &FloorBenchmark,
    is_quick: bool,
) -> Result<FloorResult> {
    let program = testbed.root_home().join("pvm3/bin/LINUX64/floor");
    let round_count = if is_quick {
        (round_count / 5).max(2)
    } else {
        *round_count
    };
    let mut summaries = Vec::new();
    for _ in 0..REPETITION_COUNT {
        let mut server_command = testbed.host(2).root_command(&program);
        server_command.arg("serve");
        // The server exits when its only client disconnects.
        let server = (args[0] == "tcp")
            .then(|| RunningCommand::start(server_command, Stdio::null()))
            .transpose()?;
        let mut command = testbed.host(1).root_command(&program);
        command.args(*args).args([
            format!("rounds={round_count}"),
            format!("warm={}", (round_count / 10).max(1)),
        ]);
        summaries.push(parse_samples(
            &run_to_end(command, RUN_TIMEOUT)?
                .expect_success("floor")?
                .stdout,
        )?);
        server
            .map(|server| server.wait_or_kill(RUN_TIMEOUT))
            .transpose()?;
    }
    let time = combine_repetitions(&summaries, "time").context("no times")?;
    Ok(FloorResult {
        title,
        unit: unit.symbol(),
        value: unit.convert_us(time.median_us),
        time,
    })
}
