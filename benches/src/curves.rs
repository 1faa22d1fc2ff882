//! Measures round trips as functions of the message size, of the number of tasks on a host, of the
//! number of peers of one task, and of the number of hosts.

use crate::figures::{MeasurementFailure, System, TimeSummaries, combine_repetitions, median};
use crate::netpipe;
use crate::peers_table_rows::VmSetup;
use crate::plot::{Chart, Series};
use crate::systems::{ProgramRun, RunningSystems, SystemResult, new_testbeds};
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Names of the curves, with which `--only` selects them.
pub(crate) const CURVE_NAMES: [&str; 5] = ["sizes", "netpipe", "tasks", "peers", "hosts"];

/// Number of repetitions of each point in a full run.
const FULL_REPETITION_COUNT: usize = 5;
/// Number of repetitions of each point in a quick run.
const QUICK_REPETITION_COUNT: usize = 1;
/// Maximum number of bytes that are sent for one point of the size curve. This limit reduces the
/// number of rounds with large messages.
const POINT_BYTES_MAX: usize = 64 << 20;
const MESSAGE_SIZES: [usize; 10] = [
    8,
    64,
    512,
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
];
const TASK_COUNTS: [usize; 6] = [2, 8, 32, 128, 512, 1000];
const PEER_COUNTS: [usize; 6] = [2, 8, 32, 128, 512, 1000];
const HOST_COUNTS: [usize; 5] = [2, 4, 8, 16, 32];

/// The charts of a run, and the measurements that failed.
#[derive(Debug, Default)]
pub(crate) struct CurveResults {
    pub(crate) charts: Vec<Chart>,
    pub(crate) failures: Vec<MeasurementFailure>,
}

/// Identifies a line of a chart: the system, and true if the tasks request PVM's direct routes.
type LineKey = (System, bool);

const ALL_LINE_KEYS: [LineKey; 6] = [
    (System::Pvm, false),
    (System::Pvm, true),
    (System::Sempa, false),
    (System::Sempa, true),
    (System::OpenMpi, false),
    (System::Mpich, false),
];
const PVM_LINE_KEYS: [LineKey; 4] = [
    (System::Pvm, false),
    (System::Pvm, true),
    (System::Sempa, false),
    (System::Sempa, true),
];

/// Measures the curve `name`, one of [`CURVE_NAMES`], on new virtual machines of PVM and Sempa, and
/// the curve `sizes` also on the MPI systems. Returns the charts, and the measurements that failed.
pub(crate) fn measure_curve(prefix: &Path, name: &str, is_quick: bool) -> Result<CurveResults> {
    let mut curves = CurveResults::default();
    if name == "hosts" {
        curves.measure_hosts(prefix, is_quick)?;
        return Ok(curves);
    }
    let (pvm_testbed, sempa_testbed) = new_testbeds(prefix, 1)?;
    let systems = RunningSystems::start(&pvm_testbed, &sempa_testbed, VmSetup::OneHost)?;
    match name {
        "sizes" => curves.measure_sizes(&systems, is_quick),
        "tasks" => {
            let round_count_option = format_rounds_option(if is_quick { 200 } else { 1000 });
            let arguments = |n: usize| {
                vec![
                    "rtt".to_string(),
                    format!("idle={}", n - 2),
                    round_count_option.clone(),
                ]
            };
            let lines = curves.measure_lines(
                &systems,
                name,
                &PVM_LINE_KEYS,
                selected_points(&TASK_COUNTS, is_quick),
                is_quick,
                arguments,
            );
            curves.add_latency_chart(
                name,
                "round trip of 8 B beside tasks that wait",
                "tasks on the host",
                lines,
            );
        }
        "peers" => {
            let arguments = |n: usize| {
                vec![
                    "fan".to_string(),
                    format!("tasks={n}"),
                    format_rounds_option((2000 / n).clamp(3, 200)),
                    format_warm_option(1),
                ]
            };
            let lines = curves.measure_lines(
                &systems,
                name,
                &PVM_LINE_KEYS,
                selected_points(&PEER_COUNTS, is_quick),
                is_quick,
                arguments,
            );
            curves.add_latency_chart(
                name,
                "round trip of 8 B with many peers in turn",
                "peers of one task",
                lines,
            );
        }
        _ => curves.measure_netpipe(&systems, is_quick),
    }
    systems.halt()?;
    Ok(curves)
}

fn format_warm_option(round_count: usize) -> String {
    format!("warm={round_count}")
}

fn format_rounds_option(round_count: usize) -> String {
    format!("rounds={round_count}")
}

/// Returns the number of repetitions for each point.
fn repetition_count(is_quick: bool) -> usize {
    if is_quick {
        QUICK_REPETITION_COUNT
    } else {
        FULL_REPETITION_COUNT
    }
}

/// Returns the indexes below `system_count` that are not in `failed_indexes`, in the order in which
/// a repetition measures the systems. Every second repetition reverses the order, because caches
/// may be cold for the system that is measured first.
fn system_order(
    system_count: usize,
    repetition: usize,
    failed_indexes: &BTreeSet<usize>,
) -> Vec<usize> {
    let mut indexes: Vec<usize> = (0..system_count)
        .filter(|index| !failed_indexes.contains(index))
        .collect();
    if repetition % 2 == 1 {
        indexes.reverse();
    }
    indexes
}

/// Adds a point to a line: the medians, over all repetitions, of the median and of the 99th
/// percentile. Adds nothing if no repetition has measured the round trip.
fn add_point(series: &mut Series, x: f64, repetitions: &[TimeSummaries]) {
    if let Some(round_trip) = combine_repetitions(repetitions, "rtt") {
        series.points.push((x, round_trip.median_us));
        series.p99.push((x, round_trip.p99_us));
    }
}

fn selected_points(points: &[usize], is_quick: bool) -> &[usize] {
    if is_quick { &points[..3] } else { points }
}

impl CurveResults {
    fn measure_sizes(&mut self, systems: &RunningSystems, is_quick: bool) {
        let arguments = |size: usize| {
            let round_count = (POINT_BYTES_MAX / size).clamp(5, if is_quick { 200 } else { 2000 });
            let cores_option = "cores=0,1".to_string();
            vec![
                "rtt".to_string(),
                format!("size={size}"),
                cores_option,
                format_rounds_option(round_count),
                format_warm_option((round_count / 10).max(1)),
            ]
        };
        let lines = self.measure_lines(
            systems,
            "sizes",
            &ALL_LINE_KEYS,
            &MESSAGE_SIZES,
            is_quick,
            arguments,
        );
        let bandwidth = |series: &Series| Series {
            name: series.name.clone(),
            points: series
                .points
                .iter()
                .map(|(size, round_trip_us)| (*size, 2.0 * size / round_trip_us))
                .collect(),
            ..Series::default()
        };
        self.charts.push(Chart {
            name: "bandwidth".to_string(),
            title: "round trip on one host: bandwidth over message size".to_string(),
            x: "bytes of a message".to_string(),
            y: "MB/s".to_string(),
            more_is_better: true,
            series: lines.iter().map(bandwidth).collect(),
        });
        self.add_latency_chart(
            "latency",
            "round trip on one host: time over message size",
            "bytes of a message",
            lines,
        );
    }

    fn add_latency_chart(&mut self, name: &str, title: &str, x: &str, series: Vec<Series>) {
        let (name, title, x) = (name.to_string(), title.to_string(), x.to_string());
        self.charts.push(Chart {
            name,
            title,
            x,
            y: "microseconds".to_string(),
            more_is_better: false,
            series,
        });
    }

    /// Runs the measuring program for each point and each line, and returns the lines. Each
    /// repetition measures all lines, one after another. A line ends at the first point for which
    /// the program fails.
    fn measure_lines(
        &mut self,
        systems: &RunningSystems,
        name: &str,
        lines: &[LineKey],
        points: &[usize],
        is_quick: bool,
        arguments: impl Fn(usize) -> Vec<String>,
    ) -> Vec<Series> {
        let line_name = |(system, is_direct): &LineKey| match (system.uses_pvm_calls(), is_direct) {
            (true, true) => format!("{}, direct", system.name()),
            _ => system.name().to_string(),
        };
        let mut series: Vec<Series> = lines
            .iter()
            .map(|line| Series {
                name: line_name(line),
                ..Series::default()
            })
            .collect();
        let mut failed_lines = BTreeSet::new();
        for point in points {
            eprintln!("bench peers: {name} {point}");
            let mut results = vec![SystemResult::default(); lines.len()];
            for repetition in 0..repetition_count(is_quick) {
                for line_index in system_order(lines.len(), repetition, &failed_lines) {
                    let (system, is_direct) = &lines[line_index];
                    let mut program_arguments = arguments(*point);
                    program_arguments.push(format!("direct={}", u8::from(*is_direct)));
                    let program_run = ProgramRun {
                        args: &program_arguments,
                        mpi_ranks: 2,
                        is_oversubscribed: false,
                        uses_two_hosts: false,
                    };
                    match systems.run_measuring_program(*system, &program_run) {
                        Ok(samples) => results[line_index].repetitions.push(samples),
                        Err(error) => {
                            failed_lines.insert(line_index);
                            let text = format!(
                                "{name} {point}, {}: {error:#}",
                                line_name(&lines[line_index])
                            );
                            self.failures.push(MeasurementFailure {
                                system: *system,
                                text,
                            });
                        }
                    }
                }
            }
            for (results, series) in results.iter().zip(&mut series) {
                add_point(series, *point as f64, &results.repetitions);
            }
        }
        series
    }

    /// Runs NPpvm alternately on both systems. Each run measures one time for each message size
    /// that NPpvm has selected.
    fn measure_netpipe(&mut self, running_systems: &RunningSystems, is_quick: bool) {
        let systems = [System::Pvm, System::Sempa];
        let mut times: [BTreeMap<u64, Vec<f64>>; 2] = Default::default();
        let mut failed_systems = BTreeSet::new();
        for repetition in 0..repetition_count(is_quick) {
            for system_index in system_order(systems.len(), repetition, &failed_systems) {
                let system = systems[system_index];
                eprintln!(
                    "bench peers: NPpvm on {} ({} of {})",
                    system.name(),
                    repetition + 1,
                    repetition_count(is_quick)
                );
                match netpipe::run_netpipe(running_systems, system, is_quick) {
                    Ok(points) => {
                        points.into_iter().for_each(|(size, us)| {
                            times[system_index].entry(size as u64).or_default().push(us)
                        });
                    }
                    Err(error) => {
                        failed_systems.insert(system_index);
                        self.failures.push(MeasurementFailure {
                            system,
                            text: format!("NPpvm on {}: {error:#}", system.name()),
                        });
                    }
                }
            }
        }
        let line = |(system, times): (System, BTreeMap<u64, Vec<f64>>)| {
            let points = times
                .into_iter()
                .filter_map(|(size, times_us)| Some((size as f64, median(times_us)?)));
            Series {
                name: system.name().to_string(),
                points: points.collect(),
                ..Series::default()
            }
        };
        let series = systems
            .into_iter()
            .zip(times)
            .map(line)
            .filter(|line| !line.points.is_empty())
            .collect();
        self.add_latency_chart(
            "netpipe",
            "NPpvm on one host: time of one way",
            "bytes of a message",
            series,
        );
    }

    /// Measures round trips between a task on h1 and one task on each other host, for increasing
    /// numbers of hosts. All daemons run on this machine.
    fn measure_hosts(&mut self, prefix: &Path, is_quick: bool) -> Result<()> {
        let points = selected_points(&HOST_COUNTS, is_quick);
        let host_count_max = points.last().copied().unwrap_or(2);
        let (pvm_testbed, sempa_testbed) = new_testbeds(prefix, host_count_max)?;
        let running_systems =
            RunningSystems::start(&pvm_testbed, &sempa_testbed, VmSetup::OneHost)?;
        let systems = [System::Pvm, System::Sempa];
        let mut series = systems.map(|system| Series {
            name: system.name().to_string(),
            ..Series::default()
        });
        let (mut added_host_count, mut failed_systems) = (1, BTreeSet::new());
        for point in points {
            eprintln!("bench peers: hosts {point}");
            let names = |first_host: usize| {
                (first_host..=*point)
                    .map(|i| format!("h{i}"))
                    .collect::<Vec<_>>()
                    .join(",")
            };
            let add_arguments = [
                "add_hosts".to_string(),
                "keep=1".to_string(),
                format!("host={}", names(added_host_count + 1)),
            ];
            let measure_arguments = [
                "fan".to_string(),
                format!("tasks={}", point - 1),
                format!("host={}", names(2)),
                format_rounds_option(100),
                format_warm_option(5),
            ];
            let mut summaries = [const { Vec::new() }; 2];
            // Turn 0 adds the hosts to both virtual machines. Each later turn is a repetition.
            for turn in 0..=repetition_count(is_quick) {
                for system_index in system_order(systems.len(), turn, &failed_systems) {
                    let arguments: &[String] = if turn == 0 {
                        &add_arguments
                    } else {
                        &measure_arguments
                    };
                    match running_systems.run_measuring_program(
                        systems[system_index],
                        &ProgramRun {
                            args: arguments,
                            mpi_ranks: 2,
                            is_oversubscribed: false,
                            uses_two_hosts: false,
                        },
                    ) {
                        Ok(samples) => summaries[system_index].push(samples),
                        Err(error) => {
                            failed_systems.insert(system_index);
                            let text = format!(
                                "hosts {point}, {}: {error:#}",
                                systems[system_index].name()
                            );
                            self.failures.push(MeasurementFailure {
                                system: systems[system_index],
                                text,
                            });
                        }
                    }
                }
            }
            for (summaries, series) in summaries.iter().zip(&mut series) {
                add_point(series, *point as f64, summaries);
            }
            added_host_count = *point;
        }
        self.add_latency_chart(
            "hosts",
            "round trip of 8 B with a task on each other host",
            "hosts",
            series.to_vec(),
        );
        running_systems.halt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_second_repetition_reverses_order() {
        let failed_indexes = BTreeSet::from([1]);
        assert_eq!(system_order(3, 0, &failed_indexes), [0, 2]);
        assert_eq!(system_order(3, 1, &failed_indexes), [2, 0]);
        assert_eq!(system_order(3, 2, &BTreeSet::new()), [0, 1, 2]);
    }
}
