//! Makes a timeline of the events after an owner's login, from the event log. The timeline is
//! printed while the events happen, and written as JSON.

use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_tests::vm::EventEntry;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// The events that concern the guests of one host after one login. All fields with the suffix `_ms`
/// are milliseconds after the login record.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Timeline {
    /// The name of the owner's host.
    pub(crate) host: String,
    /// Time of the login record, in microseconds since 1970.
    pub(crate) login_at_us: u64,
    /// The reason, as reported by the load watcher, why the owner is present.
    pub(crate) why: String,
    /// Time at which the load watcher detected the login; `None` if unknown.
    pub(crate) login_seen_ms: Option<f64>,
    /// Time at which all guests had stopped; `None` if the event log does not show when they
    /// stopped.
    pub(crate) guests_stopped_ms: Option<f64>,
    /// The completed migrations of guests off the host.
    pub(crate) moves: Vec<GuestMigration>,
    /// Time at which the last guest had left the host; `None` if guests remained.
    pub(crate) host_clean_ms: Option<f64>,
    /// Descriptions of the migrations that have failed, from the event log.
    pub(crate) failures: Vec<String>,
}

/// The migration of one task. All fields with the suffix `_ms` except `frozen_ms` are milliseconds
/// after the login record; `None` if the event log does not contain the step.
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
    /// Duration in milliseconds from the task's disconnection from its daemon until the task ran
    /// again.
    pub(crate) frozen_ms: Option<f64>,
}

impl Timeline {
    /// Returns the timeline of the first login on the host `host_index`; `None` if the event log
    /// contains no login on this host. `names` are the host names by index.
    pub(crate) fn from_events(
        host_index: u16,
        names: &BTreeMap<u16, String>,
        events: &[EventEntry],
    ) -> Option<Self> {
        let mut timeline = Self::with_unfinished(host_index, names, events)?;
        timeline
            .moves
            .retain(|completed_migration| completed_migration.running_ms.is_some());
        Some(timeline)
    }

    /// As [`Timeline::from_events`], with migrations that have begun but are not complete.
    fn with_unfinished(
        host_index: u16,
        names: &BTreeMap<u16, String>,
        events: &[EventEntry],
    ) -> Option<Self> {
        let host_name = |host_index: u16| {
            names
                .get(&host_index)
                .cloned()
                .unwrap_or_else(|| format!("host {host_index}"))
        };
        let (login_us, detected_at_us, why) = find_first_login(host_index, events)?;
        let ms_after_login = |at_us: u64| Some((at_us as f64 - login_us as f64) / 1000.0);
        let mut timeline = Self {
            host: host_name(host_index),
            login_at_us: login_us,
            why,
            login_seen_ms: ms_after_login(detected_at_us),
            ..Self::default()
        };
        let mut migrations: Vec<(u64, GuestMigration)> = Vec::new();
        for entry in events.iter().filter(|entry| entry.at_us >= login_us) {
            let at_ms = ms_after_login(entry.at_us);
            match &entry.kind {
                EventKind::MigrationStep {
                    id,
                    tid,
                    from,
                    to,
                    step,
                    bytes,
                } if from.index() == host_index => {
                    let host_names = (host_name(from.index()), host_name(to.index()));
                    let migration = find_or_add_migration(&mut migrations, id.0, *tid, host_names);
                    match step {
                        Step::Stop => migration.stopped_ms = at_ms,
                        Step::Dump => (migration.dumped_ms, migration.bytes) = (at_ms, *bytes),
                        Step::Transfer => migration.transferred_ms = at_ms,
                        _ => {}
                    }
                }
                EventKind::Migrated {
                    id,
                    from,
                    bytes,
                    frozen,
                    ..
                } if from.index() == host_index => {
                    if let Some((_, migration)) = migrations
                        .iter_mut()
                        .find(|(migration_id, _)| *migration_id == id.0)
                    {
                        (migration.running_ms, migration.bytes) = (at_ms, *bytes);
                        migration.frozen_ms = Some(frozen.0 as f64 / 1000.0);
                    }
                }
                EventKind::GuestsPaused { host, .. }
                    if host.index() == host_index && timeline.guests_stopped_ms.is_none() =>
                {
                    timeline.guests_stopped_ms = at_ms;
                }
                EventKind::MigrationFailed { from, .. } if from.index() == host_index => {
                    timeline.failures.push(entry.text.clone())
                }
                EventKind::HostVacated { host }
                    if host.index() == host_index && timeline.host_clean_ms.is_none() =>
                {
                    timeline.host_clean_ms = at_ms;
                }
                _ => {}
            }
        }
        timeline.moves = migrations
            .into_iter()
            .map(|(_, migration)| migration)
            .collect();
        // Without a directive for the whole host, each task was stopped by its own migration.
        let last_stop_ms = || {
            let is_clean = timeline.host_clean_ms.is_some();
            timeline
                .moves
                .iter()
                .filter(|_| is_clean)
                .filter_map(|completed_migration| completed_migration.stopped_ms)
                .reduce(f64::max)
        };
        timeline.guests_stopped_ms = timeline.guests_stopped_ms.or_else(last_stop_ms);
        Some(timeline)
    }

    /// Returns a description of each event that is missing in the timeline; empty if the timeline
    /// is complete.
    pub(crate) fn missing_events(&self) -> Vec<String> {
        let mut descriptions = Vec::new();
        if self.moves.is_empty() {
            descriptions.push(format!("no guest of {} has migrated", self.host));
        }
        for migration in &self.moves {
            let steps = [
                migration.stopped_ms,
                migration.dumped_ms,
                migration.transferred_ms,
                migration.running_ms,
            ];
            if steps.iter().any(Option::is_none) {
                descriptions.push(format!(
                    "steps of {} are missing in the event log: {migration:?}",
                    migration.tid
                ));
            }
        }
        if self.host_clean_ms.is_none() {
            descriptions.push(format!("{} was never clean", self.host));
        }
        descriptions
    }

    /// Returns the times and descriptions of all rows whose time is known, in the order of time.
    fn rows(&self) -> Vec<(f64, String)> {
        let mut rows = vec![
            (Some(0.0), "login record written by sshd".to_string()),
            (
                self.login_seen_ms,
                format!("login seen by the load watcher ({})", self.why),
            ),
        ];
        for migration in &self.moves {
            let task_and_hosts =
                format!("{} {} -> {}", migration.tid, migration.from, migration.to);
            rows.push((migration.stopped_ms, format!("{task_and_hosts}  stopped")));
            rows.push((
                migration.dumped_ms,
                format!(
                    "{task_and_hosts}  dumped, {:.1} MiB",
                    migration.bytes as f64 / 1_048_576.0
                ),
            ));
            rows.push((
                migration.transferred_ms,
                format!("{task_and_hosts}  transferred and verified"),
            ));
            let frozen_ms = migration.frozen_ms.unwrap_or_default();
            rows.push((
                migration.running_ms,
                format!("{task_and_hosts}  running again, frozen {frozen_ms:.1} ms"),
            ));
        }
        rows.push((self.guests_stopped_ms, "all guests stopped".to_string()));
        rows.push((self.host_clean_ms, format!("{} is clean", self.host)));
        let rows = rows.into_iter();
        let mut rows: Vec<(f64, String)> = rows
            .filter_map(|(at_ms, description)| Some((at_ms?, description)))
            .collect();
        rows.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        rows
    }
}

/// Prints the rows of a timeline as they become known.
#[derive(Debug, Default)]
pub(crate) struct LiveTimeline {
    printed_rows: BTreeSet<String>,
    printed_failures: usize,
}

impl LiveTimeline {
    /// Prints the rows that were not printed before. Before the login is known, there is none.
    pub(crate) fn print_new(
        &mut self,
        host_index: u16,
        names: &BTreeMap<u16, String>,
        events: &[EventEntry],
    ) {
        for line in self.new_lines(host_index, names, events) {
            println!("{line}");
        }
    }

    fn new_lines(
        &mut self,
        host_index: u16,
        names: &BTreeMap<u16, String>,
        events: &[EventEntry],
    ) -> Vec<String> {
        let mut lines = Vec::new();
        let Some(timeline) = Timeline::with_unfinished(host_index, names, events) else {
            return lines;
        };
        if self.printed_rows.is_empty() {
            lines.push(format!(
                "\nWhat happens on {}, in ms since the login:\n",
                timeline.host
            ));
        }
        for (at_ms, description) in timeline.rows() {
            if self.printed_rows.insert(description.clone()) {
                lines.push(format!("  {at_ms:>9.1}  {description}"));
            }
        }
        let new_failures = timeline.failures.iter().skip(self.printed_failures);
        lines.extend(new_failures.map(|failure| format!("             {failure}")));
        self.printed_failures = timeline.failures.len();
        lines
    }
}

/// Returns the first login on the host `host_index`: the time of the login and the time of its
/// detection, in microseconds since 1970, and the reason for which the owner counts as present.
/// `None` if there is no login.
fn find_first_login(host_index: u16, events: &[EventEntry]) -> Option<(u64, u64, String)> {
    events.iter().find_map(|entry| match &entry.kind {
        EventKind::OwnerPresent {
            host,
            since,
            detected_at: detection_time,
            why,
        } if host.index() == host_index => Some((since.0, detection_time.0, why.clone())),
        _ => None,
    })
}

/// Returns the migration with the number `id` from the list. If the list does not contain the
/// migration, adds it with the task's tid and the names of its hosts.
fn find_or_add_migration(
    migrations: &mut Vec<(u64, GuestMigration)>,
    id: u64,
    tid: Tid,
    (source_name, target_name): (String, String),
) -> &mut GuestMigration {
    let position = migrations
        .iter()
        .position(|(migration_id, _)| *migration_id == id);
    let index = position.unwrap_or_else(|| {
        let migration = GuestMigration {
            tid: tid.to_string(),
            from: source_name,
            to: target_name,
            ..GuestMigration::default()
        };
        migrations.push((id, migration));
        migrations.len() - 1
    });
    &mut migrations[index].1
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
        let (id, tid) = (MigrationId(7), Tid::for_task(h2, 1).expect("a tid"));
        let migration_step = |migration_step, bytes| EventKind::MigrationStep {
            id,
            tid,
            from: h2,
            to: h1,
            step: migration_step,
            bytes,
        };
        let cause = MigrationCause::Owner { why: "x".into() };
        let events = [
            entry(500, migration_step(Step::Stop, 0)),
            entry(
                1_003_000,
                EventKind::OwnerPresent {
                    host: h2,
                    since: Micros(1_000_000),
                    detected_at: Micros(1_002_000),
                    why: "x".into(),
                },
            ),
            entry(1_010_000, migration_step(Step::Stop, 0)),
            entry(1_020_000, migration_step(Step::Dump, 5)),
            entry(1_030_000, migration_step(Step::Transfer, 5)),
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
        let timeline = Timeline::from_events(2, &names, &events).expect("a login");
        assert_eq!(timeline.missing_events(), Vec::<String>::new());
        assert_eq!(
            (
                timeline.login_seen_ms,
                timeline.guests_stopped_ms,
                timeline.host_clean_ms
            ),
            (Some(2.0), Some(10.0), Some(41.0))
        );
        assert_eq!(
            (
                timeline.moves[0].running_ms,
                timeline.moves[0].frozen_ms,
                timeline.moves[0].bytes
            ),
            (Some(40.0), Some(30.5), 5)
        );
        // Each row appears once, as soon as its event is known.
        let mut live_timeline = LiveTimeline::default();
        let mut line_counts = |count: usize| {
            let lines = live_timeline.new_lines(2, &names, &events[..count]);
            lines.len()
        };
        assert_eq!([1, 2, 3, 3].map(&mut line_counts), [0, 3, 1, 0]);
        assert_eq!([4, 7, 7].map(&mut line_counts), [1, 4, 0]);
        assert!(Timeline::from_events(1, &names, &events).is_none());
        assert!(
            !Timeline::from_events(2, &names, &events[..3])
                .expect("a login")
                .missing_events()
                .is_empty()
        );
    }
}
