//! Makes a timeline of the events after an owner's login, from the event log. The timeline is
//! printed as a table and written as JSON.

use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_tests::vm::EventEntry;
use serde::Serialize;
use std::collections::BTreeMap;

/// What happened to the guests of one host after one login. All times with the unit `ms` are
/// milliseconds after the login record.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Timeline {
    /// The name of the owner's host.
    pub(crate) host: String,
    /// Time of the login record, in microseconds since 1970.
    pub(crate) login_at_us: u64,
    /// The load watcher's reason why the owner is present.
    pub(crate) why: String,
    /// Time at which the load watcher detected the login.
    pub(crate) login_seen_ms: Option<f64>,
    /// Time at which the last guest had stopped.
    pub(crate) guests_stopped_ms: Option<f64>,
    /// The migrations of guests off the host.
    pub(crate) moves: Vec<GuestMigration>,
    /// Time at which no guest was left on the host.
    pub(crate) host_clean_ms: Option<f64>,
    /// Migrations that have failed, each with the reason.
    pub(crate) failures: Vec<String>,
}

/// The migration of one task. All times are milliseconds after the login record, except for
/// `frozen_ms`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct GuestMigration {
    pub(crate) tid: String,
    /// Name of the source host.
    pub(crate) from: String,
    /// Name of the target host.
    pub(crate) to: String,
    /// Size of the images in bytes.
    pub(crate) bytes: u64,
    /// Time at which all processes of the task had stopped.
    pub(crate) stopped_ms: Option<f64>,
    /// Time at which all images were written.
    pub(crate) dumped_ms: Option<f64>,
    /// Time at which all images had arrived on the target and were verified.
    pub(crate) transferred_ms: Option<f64>,
    /// Time at which the task ran again.
    pub(crate) running_ms: Option<f64>,
    /// Milliseconds from the task's disconnection from its daemon until the task ran again.
    pub(crate) frozen_ms: Option<f64>,
}

impl Timeline {
    /// Returns the timeline of the first login on the host `index`; `None` if the event log has no
    /// login there. `names` are the host names by index.
    pub(crate) fn from_events(
        index: u16,
        names: &BTreeMap<u16, String>,
        events: &[EventEntry],
    ) -> Option<Timeline> {
        let name = |index: u16| {
            names
                .get(&index)
                .cloned()
                .unwrap_or_else(|| format!("host {index}"))
        };
        let (since, seen, why) = first_login(index, events)?;
        let after = |at_us: u64| Some((at_us as f64 - since as f64) / 1000.0);
        let mut line = Timeline {
            host: name(index),
            login_at_us: since,
            why,
            login_seen_ms: after(seen),
            ..Timeline::default()
        };
        let mut journeys: Vec<(u64, GuestMigration)> = Vec::new();
        for entry in events.iter().filter(|entry| entry.at_us >= since) {
            let at = after(entry.at_us);
            match &entry.kind {
                EventKind::MigrationStep {
                    id,
                    tid,
                    from,
                    to,
                    step,
                    bytes,
                } if from.index() == index => {
                    let route = (name(from.index()), name(to.index()));
                    let journey = journey_of(&mut journeys, id.0, *tid, route);
                    match step {
                        Step::Stop => journey.stopped_ms = at,
                        Step::Dump => (journey.dumped_ms, journey.bytes) = (at, *bytes),
                        Step::Transfer => journey.transferred_ms = at,
                        _ => {}
                    }
                }
                EventKind::Migrated {
                    id,
                    from,
                    bytes,
                    frozen,
                    ..
                } if from.index() == index => {
                    if let Some((_, journey)) =
                        journeys.iter_mut().find(|(number, _)| *number == id.0)
                    {
                        (journey.running_ms, journey.bytes) = (at, *bytes);
                        journey.frozen_ms = Some(frozen.0 as f64 / 1000.0);
                    }
                }
                EventKind::GuestsPaused { host, .. }
                    if host.index() == index && line.guests_stopped_ms.is_none() =>
                {
                    line.guests_stopped_ms = at;
                }
                EventKind::MigrationFailed { from, .. } if from.index() == index => {
                    line.failures.push(entry.text.clone())
                }
                EventKind::HostVacated { host }
                    if host.index() == index && line.host_clean_ms.is_none() =>
                {
                    line.host_clean_ms = at;
                }
                _ => {}
            }
        }
        line.moves = journeys
            .into_iter()
            .map(|(_, journey)| journey)
            .filter(|one| one.running_ms.is_some())
            .collect();
        // If there was no directive for the whole host, each task was stopped by its own migration.
        let by_moves = || {
            line.moves
                .iter()
                .filter_map(|one| one.stopped_ms)
                .reduce(f64::max)
        };
        line.guests_stopped_ms = line.guests_stopped_ms.or_else(by_moves);
        Some(line)
    }

    /// Returns the parts that are missing in the timeline; empty if it is complete.
    pub(crate) fn missing_parts(&self) -> Vec<String> {
        let mut lacks = Vec::new();
        if self.moves.is_empty() {
            lacks.push(format!("no guest of {} has migrated", self.host));
        }
        for journey in &self.moves {
            let steps = [
                journey.stopped_ms,
                journey.dumped_ms,
                journey.transferred_ms,
                journey.running_ms,
            ];
            if steps.iter().any(Option::is_none) {
                lacks.push(format!(
                    "steps of {} are missing in the event log: {journey:?}",
                    journey.tid
                ));
            }
        }
        if self.host_clean_ms.is_none() {
            lacks.push(format!("{} was never clean", self.host));
        }
        lacks
    }

    /// Prints the timeline as a table.
    pub(crate) fn print(&self) {
        println!(
            "\nWhat happened on {} ({}), in ms since the login:\n",
            self.host, self.why
        );
        let row = |at: Option<f64>, what: &str| match at {
            Some(at) => println!("  {at:>9.1}  {what}"),
            None => println!("          -  {what}"),
        };
        row(Some(0.0), "login record written by sshd");
        row(self.login_seen_ms, "login seen by the load watcher");
        let mut rows: Vec<(Option<f64>, String)> = Vec::new();
        for one in &self.moves {
            let way = format!("{} {} -> {}", one.tid, one.from, one.to);
            rows.push((one.stopped_ms, format!("{way}  stopped")));
            rows.push((
                one.dumped_ms,
                format!("{way}  dumped, {:.1} MiB", one.bytes as f64 / 1_048_576.0),
            ));
            rows.push((
                one.transferred_ms,
                format!("{way}  transferred and verified"),
            ));
            let frozen = one.frozen_ms.unwrap_or_default();
            rows.push((
                one.running_ms,
                format!("{way}  running again, frozen {frozen:.1} ms"),
            ));
        }
        rows.push((self.guests_stopped_ms, "all guests stopped".to_string()));
        rows.push((self.host_clean_ms, format!("{} is clean", self.host)));
        rows.sort_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(std::cmp::Ordering::Equal));
        for (at, what) in rows {
            row(at, &what);
        }
        for failure in &self.failures {
            println!("             {failure}");
        }
        println!();
    }
}

/// Returns the first login on the host `index`: its time, the time of its detection, and the reason
/// for which the owner counts as present.
fn first_login(index: u16, events: &[EventEntry]) -> Option<(u64, u64, String)> {
    events.iter().find_map(|entry| match &entry.kind {
        EventKind::OwnerPresent {
            host,
            since,
            detected_at: seen,
            why,
        } if host.index() == index => Some((since.0, seen.0, why.clone())),
        _ => None,
    })
}

/// Returns the migration with the number `id`. Adds it if it is not in the list.
fn journey_of(
    journeys: &mut Vec<(u64, GuestMigration)>,
    id: u64,
    tid: Tid,
    (from, to): (String, String),
) -> &mut GuestMigration {
    let found = journeys.iter().position(|(number, _)| *number == id);
    let at_index = found.unwrap_or_else(|| {
        let migration = GuestMigration {
            tid: tid.to_string(),
            from,
            to,
            ..GuestMigration::default()
        };
        journeys.push((id, migration));
        journeys.len() - 1
    });
    &mut journeys[at_index].1
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::migration::MigrationCause;
    use sempa_proto::{HostId, Micros, MigrationId, Tid};

    fn entry(at_us: u64, kind: EventKind) -> EventEntry {
        EventEntry {
            number: 0,
            at_us,
            host: None,
            text: kind.to_string(),
            kind,
        }
    }

    #[test]
    fn timeline_is_made_from_events() {
        let (h1, h2) = (HostId::MASTER, HostId::new(2).expect("an index"));
        let (id, tid) = (MigrationId(7), Tid::task(h2, 1).expect("a tid"));
        let step = |step, bytes| EventKind::MigrationStep {
            id,
            tid,
            from: h2,
            to: h1,
            step,
            bytes,
        };
        let cause = MigrationCause::Owner { why: "x".into() };
        let events = [
            entry(500, step(Step::Stop, 0)),
            entry(
                1_003_000,
                EventKind::OwnerPresent {
                    host: h2,
                    since: Micros(1_000_000),
                    detected_at: Micros(1_002_000),
                    why: "x".into(),
                },
            ),
            entry(1_010_000, step(Step::Stop, 0)),
            entry(1_020_000, step(Step::Dump, 5)),
            entry(1_030_000, step(Step::Transfer, 5)),
            entry(
                1_040_000,
                EventKind::Migrated {
                    id,
                    tid,
                    from: h2,
                    to: h1,
                    cause,
                    bytes: 5,
                    resident: 5,
                    frozen: Micros(30_500),
                    transfer_time: Micros(30_500),
                },
            ),
            entry(1_041_000, EventKind::HostVacated { host: h2 }),
        ];
        let names = BTreeMap::from([(1, "h1".to_string()), (2, "h2".to_string())]);
        let line = Timeline::from_events(2, &names, &events).expect("a login");
        assert_eq!(line.missing_parts(), Vec::<String>::new());
        assert_eq!(
            (
                line.login_seen_ms,
                line.guests_stopped_ms,
                line.host_clean_ms
            ),
            (Some(2.0), Some(10.0), Some(41.0))
        );
        assert_eq!(
            (
                line.moves[0].running_ms,
                line.moves[0].frozen_ms,
                line.moves[0].bytes
            ),
            (Some(40.0), Some(30.5), 5)
        );
        assert!(Timeline::from_events(1, &names, &events).is_none());
        assert!(
            !Timeline::from_events(2, &names, &events[..3])
                .expect("a login")
                .missing_parts()
                .is_empty()
        );
    }
}
