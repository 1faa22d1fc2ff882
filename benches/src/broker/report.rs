//! Table, JSON and plot of `bench broker`.

use super::measurements::{Figures, Kind, Measurement, MemberPlace};
use crate::figures::median;
use crate::machine_info::MachineInfo;
use crate::plot::{Chart, Series};
use anyhow::Result;
use serde::Serialize;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// The result of a row.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RowResult {
    name: &'static str,
    title: &'static str,
    medians: Figures,
    repetitions: Vec<Figures>,
    /// Number of members for the plot.
    #[serde(skip)]
    members: Option<(MemberPlace, usize)>,
}

impl RowResult {
    pub(super) fn new(measurement: &Measurement, repetitions: Vec<Figures>) -> Self {
        let names = repetitions.first().into_iter().flat_map(Figures::keys);
        let medians = names.filter_map(|name| {
            let values = repetitions.iter().filter_map(|figures| figures.get(name));
            Some((name.clone(), median(values.copied().collect())?))
        });
        let members = match measurement.kind {
            Kind::Farm { members, .. } => Some((measurement.place, members)),
            _ => None,
        };
        Self {
            name: measurement.name,
            title: measurement.title,
            medians: medians.collect(),
            repetitions,
            members,
        }
    }
}

/// The figures in the order of the table, with their units.
const FIGURES: [(&str, &str); 10] = [
    ("messages_per_second", "messages/s"),
    ("joins_per_second", "joins/s"),
    ("sessions_per_second", "sessions started/s"),
    ("send_us", "us: a send until the verdict"),
    ("answer_us", "us: a message and its answer"),
    ("empty_ns", "ns: without messages"),
    ("stored_ns", "ns: with 50 messages that do not match"),
    ("memory_mib", "MiB of memory per broker"),
    ("descriptors", "descriptors per broker"),
    ("end_ms", "ms: from the foreman's word to the last end"),
];

/// All results of a run.
#[derive(Serialize)]
pub(super) struct BrokerReport {
    machine: MachineInfo,
    rows: Vec<RowResult>,
}

impl BrokerReport {
    pub(super) fn new(machine: MachineInfo) -> Self {
        Self {
            machine,
            rows: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, row: RowResult) {
        self.rows.push(row);
        self.machine.update_load_after();
    }

    /// Formats the machine and the table.
    pub(super) fn format(&self) -> String {
        let mut text = self.machine.format();
        for row in &self.rows {
            let mut title = row.title;
            for (name, unit) in FIGURES {
                let Some(value) = row.medians.get(name) else {
                    continue;
                };
                let values = row
                    .repetitions
                    .iter()
                    .filter_map(|figures| figures.get(name));
                let (least, most) = values
                    .fold((f64::INFINITY, 0.0_f64), |(least, most), value| {
                        (least.min(*value), most.max(*value))
                    });
                let _ = writeln!(
                    text,
                    "{title:40} {value:>12.1} {unit} ({least:.1} to {most:.1})"
                );
                title = "";
            }
        }
        text
    }

    fn chart(&self) -> Chart {
        let series = [
            (MemberPlace::Inside, "members inside"),
            (MemberPlace::Outside, "members outside, TLS"),
        ];
        let series = series.map(|(place, name)| {
            let points = self.rows.iter().filter_map(|row| {
                let (_, members) = row.members.filter(|(other, _)| *other == place)?;
                Some((members as f64, *row.medians.get("messages_per_second")?))
            });
            Series {
                name: name.to_string(),
                points: points.collect(),
                p99: Vec::new(),
            }
        });
        Chart {
            name: "broker".into(),
            title: "Messages of 8 B between a foreman and its members".into(),
            x: "members".into(),
            y: "messages per second".into(),
            more_is_better: true,
            series: series.into(),
        }
    }

    pub(super) fn write_files(&self, folder: &Path) -> Result<()> {
        fs::write(folder.join("broker.txt"), self.format())?;
        let json = serde_json::to_string_pretty(self)? + "\n";
        fs::write(folder.join("broker.json"), json)?;
        if let Some(svg) = self.chart().logarithmic_svg() {
            fs::write(folder.join("broker.svg"), svg)?;
        }
        Ok(())
    }
}
