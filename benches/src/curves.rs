//! Measures round trips as functions of the message size, of the number of tasks on a host, of the
//! number of peers of one task, and of the number of hosts.

use crate::figures::{MeasurementFailure, System, TimeSummaries, combine_repetitions, median};
use crate::netpipe;
use crate::plot::{Chart, Series};
use crate::rows::VmSetup;
use crate::systems::{ProgramRun, RunningSystems, SystemResult, new_beds};
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Names of the curves, for selection by `--only`.
pub(crate) const NAMES: [&str; 5] = ["sizes", "netpipe", "tasks", "peers", "hosts"];

/// Number of repetitions of each point in a full run.
const REPETITIONS_FULL: usize = 5;
/// Number of repetitions of each point in a quick run.
const REPETITIONS_QUICK: usize = 1;
/// Maximum number of bytes that one point of the size curve sends. It limits the number of rounds
/// with large messages.
const POINT_BYTES_MAX: usize = 64 << 20;
const SIZES: [usize; 10] = [
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
const TASKS: [usize; 6] = [2, 8, 32, 128, 512, 1000];
const PEERS: [usize; 6] = [2, 8, 32, 128, 512, 1000];
const HOSTS: [usize; 5] = [2, 4, 8, 16, 32];

/// The charts of a run, and the measurements that failed.
#[derive(Debug, Default)]
pub(crate) struct CurveResults {
    pub(crate) charts: Vec<Chart>,
    pub(crate) failures: Vec<MeasurementFailure>,
}

/// Identifies a line of a chart: the system, and true if the tasks request PVM's direct route.
type LineKey = (System, bool);

const ALL_LINES: [LineKey; 6] = [
    (System::Pvm, false),
    (System::Pvm, true),
    (System::Sempa, false),
    (System::Sempa, true),
    (System::OpenMpi, false),
    (System::Mpich, false),
];
const PVM_LINES: [LineKey; 4] = [
    (System::Pvm, false),
    (System::Pvm, true),
    (System::Sempa, false),
    (System::Sempa, true),
];

/// Measures the curve `name` on new virtual machines.
pub(crate) fn measure(prefix: &Path, name: &str, quick: bool) -> Result<CurveResults> {
    let mut curves = CurveResults::default();
    if name == "hosts" {
        curves.hosts(prefix, quick)?;
        return Ok(curves);
    }
    let (theirs, ours) = new_beds(prefix, 1)?;
    let peers = RunningSystems::start(&theirs, &ours, VmSetup::OneHost)?;
    match name {
        "sizes" => curves.sizes(&peers, quick),
        "tasks" => {
            let count = rounds_option(if quick { 200 } else { 1000 });
            let words =
                |n: usize| vec!["rtt".to_string(), format!("idle={}", n - 2), count.clone()];
            let lines = curves.sweep(
                &peers,
                name,
                &PVM_LINES,
                selected_points(&TASKS, quick),
                quick,
                words,
            );
            curves.latency(
                name,
                "round trip of 8 B beside tasks that wait",
                "tasks on the host",
                lines,
            );
        }
        "peers" => {
            let words = |n: usize| {
                vec![
                    "fan".to_string(),
                    format!("tasks={n}"),
                    rounds_option((2000 / n).clamp(3, 200)),
                    warm_option(1),
                ]
            };
            let lines = curves.sweep(
                &peers,
                name,
                &PVM_LINES,
                selected_points(&PEERS, quick),
                quick,
                words,
            );
            curves.latency(
                name,
                "round trip of 8 B with many peers in turn",
                "peers of one task",
                lines,
            );
        }
        _ => curves.netpipe(&peers, quick),
    }
    peers.halt()?;
    Ok(curves)
}

fn warm_option(count: usize) -> String {
    format!("warm={count}")
}

fn rounds_option(count: usize) -> String {
    format!("rounds={count}")
}

/// Returns the number of repetitions of each point.
fn repetitions(quick: bool) -> usize {
    if quick {
        REPETITIONS_QUICK
    } else {
        REPETITIONS_FULL
    }
}

/// Returns the indexes below `count` that are not in `failed`, in the order in which a repetition
/// measures the systems. Every second repetition reverses the order, because the first system may
/// find cold caches.
fn system_order(count: usize, repetition: usize, failed: &BTreeSet<usize>) -> Vec<usize> {
    let mut all: Vec<usize> = (0..count).filter(|place| !failed.contains(place)).collect();
    if repetition % 2 == 1 {
        all.reverse();
    }
    all
}

/// Adds a point to a line, with the median and the 99th percentile of the repetitions.
fn add_point(series: &mut Series, x: f64, repetitions: &[TimeSummaries]) {
    if let Some(trip) = combine_repetitions(repetitions, "rtt") {
        series.points.push((x, trip.median_us));
        series.p99.push((x, trip.p99_us));
    }
}

fn selected_points(points: &[usize], quick: bool) -> &[usize] {
    if quick { &points[..3] } else { points }
}

impl CurveResults {
    fn sizes(&mut self, peers: &RunningSystems, quick: bool) {
        let words = |size: usize| {
            let count = (POINT_BYTES_MAX / size).clamp(5, if quick { 200 } else { 2000 });
            let pinned = "cores=0,1".to_string();
            vec![
                "rtt".to_string(),
                format!("size={size}"),
                pinned,
                rounds_option(count),
                warm_option((count / 10).max(1)),
            ]
        };
        let lines = self.sweep(peers, "sizes", &ALL_LINES, &SIZES, quick, words);
        let speed = |series: &Series| Series {
            name: series.name.clone(),
            points: series
                .points
                .iter()
                .map(|(size, us)| (*size, 2.0 * size / us))
                .collect(),
            ..Series::default()
        };
        self.charts.push(Chart {
            name: "bandwidth".to_string(),
            title: "round trip on one host: bandwidth over message size".to_string(),
            x: "bytes of a message".to_string(),
            y: "MB/s".to_string(),
            more_is_better: true,
            series: lines.iter().map(speed).collect(),
        });
        self.latency(
            "latency",
            "round trip on one host: time over message size",
            "bytes of a message",
            lines,
        );
    }

    fn latency(&mut self, name: &str, title: &str, x: &str, series: Vec<Series>) {
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

    /// Runs the measuring program for each point and each line, and returns the lines. The lines
    /// take turns within a repetition. A line ends at the first point where the program fails.
    fn sweep(
        &mut self,
        peers: &RunningSystems,
        name: &str,
        lines: &[LineKey],
        points: &[usize],
        quick: bool,
        words: impl Fn(usize) -> Vec<String>,
    ) -> Vec<Series> {
        let named = |(system, direct): &LineKey| match (system.is_pvm(), direct) {
            (true, true) => format!("{}, direct", system.name()),
            _ => system.name().to_string(),
        };
        let mut series: Vec<Series> = lines
            .iter()
            .map(|line| Series {
                name: named(line),
                ..Series::default()
            })
            .collect();
        let mut ended = BTreeSet::new();
        for point in points {
            eprintln!("bench peers: {name} {point}");
            let mut given = vec![SystemResult::default(); lines.len()];
            for repetition in 0..repetitions(quick) {
                for place in system_order(lines.len(), repetition, &ended) {
                    let (system, direct) = &lines[place];
                    let mut all = words(*point);
                    all.push(format!("direct={}", u8::from(*direct)));
                    let call = ProgramRun {
                        args: &all,
                        ranks: 2,
                        oversubscribed: false,
                        on_two_hosts: false,
                    };
                    match peers.run(*system, &call) {
                        Ok(samples) => given[place].repetitions.push(samples),
                        Err(error) => {
                            ended.insert(place);
                            let text =
                                format!("{name} {point}, {}: {error:#}", named(&lines[place]));
                            self.failures.push(MeasurementFailure {
                                system: *system,
                                text,
                            });
                        }
                    }
                }
            }
            for (given, series) in given.iter().zip(&mut series) {
                add_point(series, *point as f64, &given.repetitions);
            }
        }
        series
    }

    /// Runs NPpvm on both systems in turn. Each run yields one time for each message size that
    /// NPpvm has chosen.
    fn netpipe(&mut self, peers: &RunningSystems, quick: bool) {
        let systems = [System::Pvm, System::Sempa];
        let mut times: [BTreeMap<u64, Vec<f64>>; 2] = Default::default();
        let mut ended = BTreeSet::new();
        for repetition in 0..repetitions(quick) {
            for place in system_order(systems.len(), repetition, &ended) {
                let system = systems[place];
                eprintln!(
                    "bench peers: NPpvm on {} ({} of {})",
                    system.name(),
                    repetition + 1,
                    repetitions(quick)
                );
                match netpipe::run_netpipe(peers, system, quick) {
                    Ok(points) => {
                        points.into_iter().for_each(|(size, us)| {
                            times[place].entry(size as u64).or_default().push(us)
                        });
                    }
                    Err(error) => {
                        ended.insert(place);
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
                .filter_map(|(size, all)| Some((size as f64, median(all)?)));
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
        self.latency(
            "netpipe",
            "NPpvm on one host: time of one way",
            "bytes of a message",
            series,
        );
    }

    /// Measures round trips between a task on h1 and one task on each other host, for increasing
    /// numbers of hosts. All daemons run on this machine.
    fn hosts(&mut self, prefix: &Path, quick: bool) -> Result<()> {
        let points = selected_points(&HOSTS, quick);
        let most = points.last().copied().unwrap_or(2);
        let (theirs, ours) = new_beds(prefix, most)?;
        let peers = RunningSystems::start(&theirs, &ours, VmSetup::OneHost)?;
        let systems = [System::Pvm, System::Sempa];
        let mut series = systems.map(|system| Series {
            name: system.name().to_string(),
            ..Series::default()
        });
        let (mut up, mut ended) = (1, BTreeSet::new());
        for point in points {
            eprintln!("bench peers: hosts {point}");
            let names = |from: usize| {
                (from..=*point)
                    .map(|i| format!("h{i}"))
                    .collect::<Vec<_>>()
                    .join(",")
            };
            let add = [
                "add_hosts".to_string(),
                "keep=1".to_string(),
                format!("host={}", names(up + 1)),
            ];
            let all = [
                "fan".to_string(),
                format!("tasks={}", point - 1),
                format!("host={}", names(2)),
                rounds_option(100),
                warm_option(5),
            ];
            let mut given = [const { Vec::new() }; 2];
            // Turn 0 adds the hosts to both virtual machines. The following turns are the
            // repetitions.
            for turn in 0..=repetitions(quick) {
                for place in system_order(systems.len(), turn, &ended) {
                    let words: &[String] = if turn == 0 { &add } else { &all };
                    match peers.run(
                        systems[place],
                        &ProgramRun {
                            args: words,
                            ranks: 2,
                            oversubscribed: false,
                            on_two_hosts: false,
                        },
                    ) {
                        Ok(samples) => given[place].push(samples),
                        Err(error) => {
                            ended.insert(place);
                            let text =
                                format!("hosts {point}, {}: {error:#}", systems[place].name());
                            self.failures.push(MeasurementFailure {
                                system: systems[place],
                                text,
                            });
                        }
                    }
                }
            }
            for (given, series) in given.iter().zip(&mut series) {
                add_point(series, *point as f64, given);
            }
            up = *point;
        }
        self.latency(
            "hosts",
            "round trip of 8 B with a task on each other host",
            "hosts",
            series.to_vec(),
        );
        peers.halt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every second repetition reverses the order of the systems.
    #[test]
    fn every_second_repetition_reverses_order() {
        let ended = BTreeSet::from([1]);
        assert_eq!(system_order(3, 0, &ended), [0, 2]);
        assert_eq!(system_order(3, 1, &ended), [2, 0]);
        assert_eq!(system_order(3, 2, &BTreeSet::new()), [0, 1, 2]);
    }
}
