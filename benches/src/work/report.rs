//! Table, JSON and plots of `bench work`.

use super::FarmFigures;
use super::own_rows::{Goal, OwnRow};
use super::peers::{FarmSystem, GRAINS_US};
use crate::figures::median;
use crate::machine_info::MachineInfo;
use crate::plot::{Chart, Series};
use anyhow::Result;
use serde::Serialize;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Maximum number of characters of a failure's text in the table.
const FAILURE_CHARS_MAX: usize = 200;

/// Returns the medians of each figure; `None` without repetitions.
fn medians(repetitions: &[FarmFigures]) -> Option<FarmFigures> {
    let median_of =
        |select: fn(&FarmFigures) -> f64| median(repetitions.iter().map(select).collect());
    let optional = |select: fn(&FarmFigures) -> Option<f64>| {
        median(repetitions.iter().filter_map(select).collect())
    };
    Some(FarmFigures {
        tasks: repetitions.first()?.tasks,
        seconds: median_of(|figures| figures.seconds)?,
        tasks_per_second: median_of(|figures| figures.tasks_per_second)?,
        efficiency: median_of(|figures| figures.efficiency)?,
        gap_median_us: optional(|figures| figures.gap_median_us),
        gap_p99_us: optional(|figures| figures.gap_p99_us),
        master_us_per_task: optional(|figures| figures.master_us_per_task),
        machine_us_per_task: median_of(|figures| figures.machine_us_per_task)?,
    })
}

/// The result of a row that only the framework has.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RowResult {
    name: &'static str,
    title: &'static str,
    medians: FarmFigures,
    repetitions: Vec<FarmFigures>,
    goal: String,
    met: Option<bool>,
    #[serde(skip)]
    waiting: Option<u64>,
}

impl RowResult {
    pub(super) fn new(row: &OwnRow, repetitions: &[FarmFigures]) -> Self {
        let medians = medians(repetitions).unwrap_or_default();
        Self {
            name: row.name,
            title: row.title,
            medians,
            repetitions: repetitions.to_vec(),
            goal: Goal::text(row.goal),
            met: row.goal.is_met(&medians),
            waiting: row.waiting,
        }
    }
}

/// The result of one system with one grain.
#[derive(Clone, Debug)]
pub(super) struct PeerResult {
    pub(super) system: FarmSystem,
    grain_us: u64,
    pub(super) repetitions: Vec<FarmFigures>,
    /// Reason of the failure, after which the system was not measured again.
    pub(super) failure: Option<String>,
}

impl PeerResult {
    pub(super) fn new(system: FarmSystem, grain_us: u64) -> Self {
        Self {
            system,
            grain_us,
            repetitions: Vec::new(),
            failure: None,
        }
    }
}

#[derive(Serialize)]
struct StoredPeer<'a> {
    system: &'static str,
    grain_us: u64,
    medians: Option<FarmFigures>,
    repetitions: &'a [FarmFigures],
    failure: &'a Option<String>,
}

#[derive(Serialize)]
struct StoredReport<'a> {
    machine: &'a MachineInfo,
    rows: &'a [RowResult],
    systems: Vec<StoredPeer<'a>>,
}

/// All results of a run.
pub(super) struct WorkReport {
    machine: MachineInfo,
    rows: Vec<RowResult>,
    peers: Vec<PeerResult>,
}

fn microseconds(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_string(), |value| format!("{value:.1}"))
}

impl WorkReport {
    pub(super) fn new(machine: MachineInfo) -> Self {
        Self {
            machine,
            rows: Vec::new(),
            peers: Vec::new(),
        }
    }

    pub(super) fn add_row(&mut self, row: RowResult) {
        self.rows.push(row);
        self.machine.update_load_after();
    }

    pub(super) fn add_peer(&mut self, peer: PeerResult) {
        self.peers.push(peer);
        self.machine.update_load_after();
    }

    pub(super) fn meets_goals(&self) -> bool {
        self.rows.iter().all(|row| row.met != Some(false))
    }

    /// Formats the tables that have results.
    pub(super) fn format(&self) -> String {
        let mut text = self.machine.format();
        if !self.rows.is_empty() {
            self.format_rows(&mut text);
        }
        if !self.peers.is_empty() {
            self.format_peers(&mut text);
        }
        text
    }

    fn format_rows(&self, text: &mut String) {
        let _ = writeln!(
            text,
            "\n{:34} {:>9} {:>10} {:>9} {:>9} {:>9} {:>9}  goal",
            "master-worker, 2 workers",
            "tasks/s",
            "efficiency",
            "gap, us",
            "p99, us",
            "master us",
            "all us"
        );
        for row in &self.rows {
            let figures = &row.medians;
            let efficiency = if figures.efficiency > 0.0 {
                format!("{:.3}", figures.efficiency)
            } else {
                "-".to_string()
            };
            let verdict = match row.met {
                Some(true) => " (met)",
                Some(false) => " (missed)",
                None => "",
            };
            let _ = writeln!(
                text,
                "{:34} {:>9.0} {:>10} {:>9} {:>9} {:>9} {:>9.1}  {}{verdict}",
                row.title,
                figures.tasks_per_second,
                efficiency,
                microseconds(figures.gap_median_us),
                microseconds(figures.gap_p99_us),
                microseconds(figures.master_us_per_task),
                figures.machine_us_per_task,
                row.goal,
            );
        }
    }

    fn format_peers(&self, text: &mut String) {
        let _ = write!(text, "\n{:26} {:>9} {:>9}", "system", "empty: /s", "all us");
        for grain_us in &GRAINS_US[1..] {
            let _ = write!(text, " {:>8}", format!("{} ms", *grain_us as f64 / 1e3));
        }
        text.push_str("  (efficiency by grain)\n");
        for system in FarmSystem::ALL {
            let mut results = self.peers.iter().filter(|peer| peer.system == system);
            let Some(empty) = results.next() else {
                continue;
            };
            let figures = medians(&empty.repetitions);
            let cell = |value: Option<f64>, digits: usize| match value {
                Some(value) => format!("{value:.digits$}"),
                None => "failed".to_string(),
            };
            let _ = write!(
                text,
                "{:26} {:>9} {:>9}",
                system.name(),
                cell(figures.map(|figures| figures.tasks_per_second), 0),
                cell(figures.map(|figures| figures.machine_us_per_task), 1),
            );
            for result in results {
                let efficiency = medians(&result.repetitions).map(|figures| figures.efficiency);
                let _ = write!(text, " {:>8}", cell(efficiency, 3));
            }
            text.push('\n');
        }
        for peer in &self.peers {
            if let Some(failure) = &peer.failure {
                let failure: String = failure.chars().take(FAILURE_CHARS_MAX).collect();
                let name = peer.system.name();
                let _ = writeln!(text, "failed: {name}, {} us: {failure}", peer.grain_us);
            }
        }
    }

    /// Efficiency over grain, a line for each system.
    fn efficiency_chart(&self) -> Chart {
        let series_of = |system: FarmSystem| Series {
            name: system.name().to_string(),
            points: self
                .peers
                .iter()
                .filter(|peer| peer.system == system && peer.grain_us > 0)
                .filter_map(|peer| {
                    let figures = medians(&peer.repetitions)?;
                    Some((peer.grain_us as f64 / 1e3, figures.efficiency))
                })
                .collect(),
            p99: Vec::new(),
        };
        Chart {
            name: "work-efficiency".to_string(),
            title: "Task farm: efficiency of two workers".to_string(),
            x: "processor time of a task, ms".to_string(),
            y: "efficiency".to_string(),
            more_is_better: true,
            series: FarmSystem::ALL
                .into_iter()
                .map(series_of)
                .filter(|series| !series.points.is_empty())
                .collect(),
        }
    }

    /// Tasks per second over the number of waiting tasks.
    fn waiting_chart(&self) -> Chart {
        let point = |row: &RowResult| Some((row.waiting? as f64, row.medians.tasks_per_second));
        Chart {
            name: "work-waiting".to_string(),
            title: "Master-worker: empty tasks, by key".to_string(),
            x: "waiting tasks".to_string(),
            y: "tasks per second".to_string(),
            more_is_better: true,
            series: vec![Series {
                name: "Sempa".to_string(),
                points: self.rows.iter().filter_map(point).collect(),
                p99: Vec::new(),
            }],
        }
    }

    /// Writes `work.txt`, `work.json` and the plots.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(super) fn write_files(&self, folder: &Path) -> Result<()> {
        fs::write(folder.join("work.txt"), self.format())?;
        let systems = self.peers.iter().map(|peer| StoredPeer {
            system: peer.system.name(),
            grain_us: peer.grain_us,
            medians: medians(&peer.repetitions),
            repetitions: &peer.repetitions,
            failure: &peer.failure,
        });
        let stored = StoredReport {
            machine: &self.machine,
            rows: &self.rows,
            systems: systems.collect(),
        };
        let json = serde_json::to_string_pretty(&stored)? + "\n";
        fs::write(folder.join("work.json"), json)?;
        for chart in [self.efficiency_chart(), self.waiting_chart()] {
            if let Some(svg) = chart.logarithmic_svg() {
                fs::write(folder.join(format!("{}.svg", chart.name)), svg)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_figures_are_independent() {
        let run = |rate: f64, gap: Option<f64>| FarmFigures {
            tasks: 10,
            tasks_per_second: rate,
            gap_p99_us: gap,
            ..FarmFigures::default()
        };
        let repetitions = [run(1.0, Some(9.0)), run(3.0, None), run(2.0, Some(7.0))];
        let medians = medians(&repetitions).expect("three repetitions");
        assert_eq!(medians.tasks_per_second, 2.0);
        assert_eq!(medians.gap_p99_us, Some(8.0));
        assert_eq!(super::medians(&[]), None);
    }
}
