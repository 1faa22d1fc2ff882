//! Evaluates a run: compares the event log, the workers' clocks and the kernel's counts of
//! processor time with the script's own list of logins. Performs no input or output.

use super::kernels::{ProcessSamples, ProcessorTime};
use sempa_proto::event::EventKind;
use sempa_proto::migration::{MigrationCause, Step};
use sempa_tests::vm::EventEntry;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

#[cfg(test)]
mod tests;

/// Maximum time that a guest may run after the owner's login, in microseconds.
pub(super) const GUEST_RUN_AFTER_LOGIN_MAX_US: u64 = 50_000;
/// Maximum time, in microseconds, from a login until the host has no guests, if the guests have a
/// host to which they can migrate. The transfer of the guests' memory may take additional time, at
/// the rate [`TRANSFER_BYTES_PER_S`]. If the limit is exceeded, the events are reported.
const VACATING_MAX_US: u64 = 1_000_000;
/// Rate in bytes per second from which the additional time for a transfer is computed.
const TRANSFER_BYTES_PER_S: u64 = 100_000_000;
/// Maximum processor time in microseconds that the kernel may count for a process after the limit
/// for guests, while the process is being stopped.
const STOPPING_PROCESSOR_TIME_MAX_US: u64 = 1_000;
/// Maximum time in microseconds between the end of a decision's reason and the execution of the
/// decision.
const DECISION_DELAY_MAX_US: u64 = 1_000_000;
/// Maximum percentage of workers and kernels that may remain without a result, because a task ended
/// during the measurement or a process was not found early enough.
const SKIPPED_PERCENT_MAX: usize = 5;

/// The clocks of all workers, by tid as the console prints it.
pub(super) type WorkerClocks = BTreeMap<String, WorkerClock>;

/// A worker's record of the times at which it ran, in microseconds since 1970. Before its first and
/// after its last reading of the clock, the worker's state is unknown.
#[derive(Debug, Default)]
pub(super) struct WorkerClock {
    pub(super) first_reading_us: u64,
    pub(super) last_reading_us: u64,
    /// Times in which the worker did not run: pairs of two successive readings that are far apart.
    pub(super) gaps_us: Vec<(u64, u64)>,
}

/// The time for which a worker ran on a host after the owner's login.
#[derive(Debug, PartialEq, Eq)]
enum RunAfterLogin {
    /// The worker stopped at this time, in microseconds since 1970.
    StoppedAt(u64),
    /// The worker ran until the end of the observed period.
    RanUntilEnd,
    /// Unknown, because the worker had not read its clock yet or had ended.
    Unknown,
}

impl WorkerClock {
    /// Returns how long the worker ran after the login at `login_at_us`. At the time
    /// `stopped_by_us` the worker is known to be stopped.
    fn run_after_login(&self, login_at_us: u64, stopped_by_us: u64) -> RunAfterLogin {
        match self
            .gaps_us
            .iter()
            .find(|(gap_start, gap_end)| *gap_start < stopped_by_us && *gap_end >= stopped_by_us)
        {
            Some((gap_start, _)) => RunAfterLogin::StoppedAt(*gap_start),
            None if self.first_reading_us >= stopped_by_us
                || self.last_reading_us <= login_at_us + GUEST_RUN_AFTER_LOGIN_MAX_US =>
            {
                RunAfterLogin::Unknown
            }
            None => RunAfterLogin::RanUntilEnd,
        }
    }
}

/// A login on a host as recorded by the script, in microseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScriptedLogin {
    pub(super) host_index: u16,
    /// Time just before the login.
    pub(super) login_at_us: u64,
    /// Time after the logout was complete.
    pub(super) logout_at_us: u64,
}

/// The results of a run, as they are written to the JSON file.
#[derive(Debug, Default, Serialize)]
pub(super) struct OwnersOutcome {
    pub(super) good: bool,
    pub(super) reasons: Vec<String>,
    pub(super) seconds: u64,
    pub(super) visits: usize,
    /// Number of visits that ended before the limit [`VACATING_MAX_US`], while the host still
    /// had guests.
    pub(super) short_visits: usize,
    /// Times from the login record until a worker stopped, by the worker's own clock, in
    /// microseconds; sorted.
    pub(super) stood_still_us: Vec<u64>,
    /// Number of workers on an owner's host for which the time in `stood_still_us` is unknown.
    pub(super) workers_skipped: usize,
    /// Processor time that tablix2's kernels used on an owner's host after
    /// [`GUEST_RUN_AFTER_LOGIN_MAX_US`], by the operating system's count, in microseconds; sorted.
    pub(super) kernels_got_us: Vec<u64>,
    /// Processor time that dumps used inside these kernels in the same period, in microseconds;
    /// sorted.
    pub(super) dumps_got_us: Vec<u64>,
    /// Processor time that the operating system used to end these kernels, in microseconds; sorted.
    pub(super) ends_got_us: Vec<u64>,
    /// Number of tablix2's kernels on an owner's host whose processor time was not observed.
    pub(super) kernels_skipped: usize,
    /// Times from the login record until the load watcher detected the login, in microseconds;
    /// sorted.
    pub(super) seen_us: Vec<u64>,
    /// Times from the load watcher's directive until all guests had stopped, in microseconds;
    /// sorted.
    pub(super) held_us: Vec<u64>,
    /// Times from the login record until no guest was left on the host, in microseconds; sorted.
    pub(super) clean_us: Vec<u64>,
    /// The times of `clean_us` for hosts that had a guest at the login.
    pub(super) cleared_us: Vec<u64>,
    /// Times from the login record until no guest was left on the host, in microseconds; sorted.
    /// Contains only hosts with a guest that temporarily had no host to which it could migrate;
    /// `clean_us` does not contain these hosts.
    pub(super) nowhere_us: Vec<u64>,
    /// Hosts that still had guests after their limit, with the events.
    pub(super) late: Vec<LateHost>,
    /// Workers that ran longer after a login than the limit permits.
    pub(super) ran_on: Vec<LateWorker>,
    /// Kernels of tablix2 that used the processor longer after a login than the limit permits.
    pub(super) got_on: Vec<LateKernel>,
    pub(super) moves: usize,
    pub(super) failed_moves: usize,
    /// Number of runs of tablix2 that have ended.
    pub(super) searches: usize,
    /// Number of timetables that were checked and are correct.
    pub(super) timetables: usize,
    /// Number of farms that have ended.
    pub(super) farms: usize,
    /// Number of correct results of the farms' tasks.
    pub(super) results: usize,
}

/// A host that still had guests after its limit.
#[derive(Debug, Serialize)]
pub(super) struct LateHost {
    pub(super) host: String,
    pub(super) clean_us: u64,
    /// The limit for this host in microseconds: [`VACATING_MAX_US`] and the time for the
    /// transfers.
    pub(super) promised_us: u64,
    /// Events on the host, each with its milliseconds after the login record.
    pub(super) story: Vec<String>,
}

/// A worker that ran longer after the owner's login than the limit permits.
#[derive(Debug, Serialize)]
pub(super) struct LateWorker {
    pub(super) worker: String,
    pub(super) ran_us: u64,
    /// Events on the worker's host, each with its milliseconds after the login record.
    pub(super) story: Vec<String>,
}

/// A kernel of tablix2 that used the processor longer after the owner's login than the limit
/// permits.
#[derive(Debug, Serialize)]
pub(super) struct LateKernel {
    pub(super) pid: u32,
    pub(super) got_us: u64,
    /// The kernel's use of the processor and the events on its host, each with its milliseconds
    /// after the login record.
    pub(super) story: Vec<String>,
}

/// A decision of the resource manager, as `pvm why` prints it.
#[derive(Debug, Deserialize)]
pub(super) struct RmDecision {
    pub(super) at_us: u64,
    pub(super) text: String,
    pub(super) decided: serde_json::Value,
}

/// For each host, by index, its name and the decisions about it.
pub(super) type DecisionsByHost = BTreeMap<u16, (String, Vec<RmDecision>)>;

/// An owner's visit, as recorded in the event log.
struct OwnerVisit {
    host_index: u16,
    login_at_us: u64,
}

/// Returns the visits in the event log.
fn visits(events: &[EventEntry]) -> impl Iterator<Item = OwnerVisit> {
    events.iter().filter_map(|entry| match entry.kind {
        EventKind::OwnerPresent { host, since, .. } => Some(OwnerVisit {
            host_index: host.index(),
            login_at_us: since.0,
        }),
        _ => None,
    })
}

/// Returns the first value that `extract` returns for an event at or after the time `start_us`;
/// `None` if `extract` returns `None` for all these events.
fn first_match_since<T>(
    events: &[EventEntry],
    start_us: u64,
    extract: impl Fn(&EventEntry) -> Option<T>,
) -> Option<T> {
    events
        .iter()
        .filter(|entry| entry.at_us >= start_us)
        .find_map(extract)
}

/// Returns the events on the visited host until the time `end_us`, each with its time.
fn events_of_visit(visit: &OwnerVisit, end_us: u64, events: &[EventEntry]) -> Vec<(u64, String)> {
    let concerns_host = |entry: &&EventEntry| match &entry.kind {
        EventKind::MigrationStep { from, .. } => from.index() == visit.host_index,
        EventKind::OwnerPresent { host, .. } | EventKind::GuestsPaused { host, .. } => {
            host.index() == visit.host_index
        }
        _ => false,
    };
    let events_until_end = events
        .iter()
        .filter(|entry| (visit.login_at_us..=end_us).contains(&entry.at_us))
        .filter(concerns_host);
    events_until_end
        .map(|entry| (entry.at_us, entry.text.clone()))
        .collect()
}

/// Formats the timed texts of a visit as lines of text, in order of time.
fn format_story(visit: &OwnerVisit, mut timed_texts: Vec<(u64, String)>) -> Vec<String> {
    timed_texts.sort();
    timed_texts
        .iter()
        .map(|(at_us, text)| format_story_line(visit, *at_us, text))
        .collect()
}

/// Formats an event as a line of text that begins with the time after the login in milliseconds.
fn format_story_line(visit: &OwnerVisit, at_us: u64, text: &str) -> String {
    format!("{:.1} {text}", (at_us - visit.login_at_us) as f64 / 1e3)
}

/// Returns the tids of the guests that were paused first after the start of the visit.
fn first_paused_guests<'a>(
    events: &'a [EventEntry],
    visit: &OwnerVisit,
) -> impl Iterator<Item = String> + use<'a> {
    let guests_paused_on_host = |entry: &'a EventEntry| match &entry.kind {
        EventKind::GuestsPaused { host, guests, .. } if host.index() == visit.host_index => {
            Some(guests)
        }
        _ => None,
    };
    let guests = events
        .iter()
        .filter(|entry| entry.at_us >= visit.login_at_us)
        .find_map(guests_paused_on_host);
    guests.into_iter().flatten().map(|tid| tid.to_string())
}

/// Returns the time at which the guests of the visited host were resumed or the owner had logged
/// out, whichever was first; `None` if the event log contains neither event.
fn visit_end(events: &[EventEntry], visit: &OwnerVisit) -> Option<u64> {
    first_match_since(events, visit.login_at_us, |entry| match &entry.kind {
        EventKind::GuestsResumed { host, .. } | EventKind::OwnerAbsent { host, .. } => {
            (host.index() == visit.host_index).then_some(entry.at_us)
        }
        _ => None,
    })
}

impl OwnersOutcome {
    /// Evaluates a complete run, and stores the results in `self`.
    pub(super) fn evaluate_run(
        &mut self,
        events: &[EventEntry],
        scripted_logins: &[ScriptedLogin],
        decisions: &DecisionsByHost,
        clocks: &WorkerClocks,
        kernel_samples: &ProcessSamples,
    ) {
        self.evaluate_events(events, scripted_logins);
        for visit in visits(events) {
            let vacating_or_logout_time = |entry: &EventEntry| match entry.kind {
                EventKind::HostVacated { host } if host.index() == visit.host_index => {
                    Some(Ok(entry.at_us - visit.login_at_us))
                }
                EventKind::OwnerAbsent { host, .. } if host.index() == visit.host_index => {
                    Some(Err(entry.at_us))
                }
                _ => None,
            };
            let end_us = events.last().map_or(visit.login_at_us, |entry| entry.at_us);
            match first_match_since(events, visit.login_at_us, vacating_or_logout_time)
                .unwrap_or(Err(end_us))
            {
                Ok(clean_us) => self.evaluate_vacating_time(&visit, clean_us, events, decisions),
                Err(end_us) if end_us.saturating_sub(visit.login_at_us) <= VACATING_MAX_US => {
                    self.short_visits += 1
                }
                Err(end_us) => {
                    let OwnerVisit {
                        host_index: host,
                        login_at_us: since,
                    } = visit;
                    self.reasons.push(format!(
                        "host {host} was not clean from {since} to {end_us}, the whole time that its owner was present"
                    ));
                }
            }
            self.evaluate_kernels(&visit, events, clocks, kernel_samples);
        }
        clocks
            .iter()
            .for_each(|(worker, clock)| self.evaluate_worker(worker, clock, events));
        scripted_logins
            .iter()
            .filter(|scripted_login| !is_in_event_log(scripted_login, events))
            .for_each(|scripted_login| {
                self.reasons.push(format!(
                    "no load watcher noticed the owner on host {} from {} to {}",
                    scripted_login.host_index,
                    scripted_login.login_at_us,
                    scripted_login.logout_at_us
                ));
            });
        let Self {
            stood_still_us,
            seen_us,
            held_us,
            clean_us,
            ..
        } = self;
        [stood_still_us, seen_us, held_us, clean_us]
            .into_iter()
            .for_each(|times_us| times_us.sort_unstable());
        let Self {
            cleared_us,
            nowhere_us,
            kernels_got_us,
            dumps_got_us,
            ends_got_us,
            ..
        } = self;
        [
            cleared_us,
            nowhere_us,
            kernels_got_us,
            dumps_got_us,
            ends_got_us,
        ]
        .into_iter()
        .for_each(|times_us| times_us.sort_unstable());
        self.set_result();
    }

    /// Adds a reason for each exceeded limit, and sets `good` if there are no reasons.
    fn set_result(&mut self) {
        let limit_ms = GUEST_RUN_AFTER_LOGIN_MAX_US / 1000;
        let late_worker_count = self
            .stood_still_us
            .iter()
            .filter(|us| **us > GUEST_RUN_AFTER_LOGIN_MAX_US)
            .count();
        let late_kernel_count = self
            .kernels_got_us
            .iter()
            .filter(|us| **us > STOPPING_PROCESSOR_TIME_MAX_US)
            .count();
        for (description, count) in [
            (
                format!(
                    "times a worker ran longer than {limit_ms} ms after its owner had returned"
                ),
                late_worker_count,
            ),
            (
                format!(
                    "times a kernel of tablix2 got the processor longer than {limit_ms} ms after an owner had come"
                ),
                late_kernel_count,
            ),
            (
                "hosts had guests for longer than was promised".to_string(),
                self.late.len(),
            ),
        ] {
            self.reasons
                .extend((count > 0).then(|| format!("{count} {description}")));
        }
        for (description, skipped_count, evaluated_count) in [
            ("workers", self.workers_skipped, self.stood_still_us.len()),
            (
                "kernels of tablix2",
                self.kernels_skipped,
                self.kernels_got_us.len(),
            ),
        ] {
            if evaluated_count == 0
                || skipped_count * 100 > (skipped_count + evaluated_count) * SKIPPED_PERCENT_MAX
            {
                self.reasons.push(format!(
                    "only {evaluated_count} of {} {description} on hosts with owners could be judged",
                    evaluated_count + skipped_count
                ));
            }
        }
        self.good = self.reasons.is_empty();
    }

    /// Counts the migrations and checks their causes. Collects the times of detections and pauses.
    fn evaluate_events(&mut self, events: &[EventEntry], scripted_logins: &[ScriptedLogin]) {
        // Time of the first step of each migration, in microseconds since 1970, by the migration's
        // id.
        let mut migration_starts = BTreeMap::new();
        for entry in events {
            match &entry.kind {
                EventKind::MigrationStep { id, .. } => {
                    migration_starts.entry(*id).or_insert(entry.at_us);
                }
                EventKind::Migrated {
                    id, from, cause, ..
                } => {
                    self.moves += 1;
                    let start_us = migration_starts.get(id).copied().unwrap_or(entry.at_us);
                    let covers_start = |scripted_login: &ScriptedLogin| {
                        scripted_login.host_index == from.index()
                            && (scripted_login.login_at_us
                                ..=scripted_login.logout_at_us + DECISION_DELAY_MAX_US)
                                .contains(&start_us)
                    };
                    let names_owner =
                        matches!(cause, MigrationCause::Owner { why } if why.contains("olga"));
                    if !names_owner || !scripted_logins.iter().any(covers_start) {
                        self.reasons
                            .push(format!("a migration for a false reason: {}", entry.text));
                    }
                }
                EventKind::MigrationFailed { .. } => self.failed_moves += 1,
                EventKind::OwnerPresent {
                    since,
                    detected_at: detection_time,
                    ..
                } => self.seen_us.push(detection_time.since(*since).0),
                EventKind::GuestsPaused {
                    duration: pause_duration,
                    guests,
                    ..
                } if !guests.is_empty() => self.held_us.push(pause_duration.0),
                _ => {}
            }
        }
    }

    /// Records the time `clean_us` from the login until the host had no guests: in `nowhere_us` if
    /// a guest temporarily had no other host, otherwise in `clean_us`. If a time in `clean_us`
    /// exceeds the limit, adds the host to `late`, with the decisions and migration steps of the
    /// visit.
    fn evaluate_vacating_time(
        &mut self,
        visit: &OwnerVisit,
        clean_us: u64,
        events: &[EventEntry],
        decisions: &DecisionsByHost,
    ) {
        let vacated_at_us = visit.login_at_us + clean_us;
        let is_during_visit = |at_us: u64| at_us >= visit.login_at_us && at_us <= vacated_at_us;
        let host_decisions = decisions.get(&visit.host_index);
        let visit_decisions: Vec<&RmDecision> = host_decisions
            .into_iter()
            .flat_map(|(_, decision_list)| decision_list)
            .filter(|d| is_during_visit(d.at_us))
            .collect();
        let found_no_host = |d: &&RmDecision| {
            d.decided["Stays"]["why"]
                .as_str()
                .is_some_and(|why| why.starts_with("no host"))
        };
        if visit_decisions.iter().any(found_no_host) {
            return self.nowhere_us.push(clean_us);
        }
        self.clean_us.push(clean_us);
        let migrated_bytes = |entry: &EventEntry| match &entry.kind {
            EventKind::Migrated { from, bytes, .. }
                if from.index() == visit.host_index && is_during_visit(entry.at_us) =>
            {
                Some(*bytes)
            }
            _ => None,
        };
        let migration_sizes: Vec<u64> = events.iter().filter_map(migrated_bytes).collect();
        if !migration_sizes.is_empty() {
            self.cleared_us.push(clean_us);
        }
        let promised_us = VACATING_MAX_US
            + migration_sizes.iter().sum::<u64>() * 1_000_000 / TRANSFER_BYTES_PER_S;
        if clean_us <= promised_us {
            return;
        }
        let is_migration_step = |entry: &&EventEntry| match &entry.kind {
            EventKind::MigrationStep { from, .. } => {
                from.index() == visit.host_index && is_during_visit(entry.at_us)
            }
            _ => false,
        };
        let steps = events
            .iter()
            .filter(is_migration_step)
            .map(|entry| (entry.at_us, entry.text.clone()));
        let story = format_story(
            visit,
            visit_decisions
                .iter()
                .map(|d| (d.at_us, d.text.clone()))
                .chain(steps)
                .collect(),
        );
        let host = host_decisions
            .map(|(name, _)| name.clone())
            .unwrap_or_default();
        self.late.push(LateHost {
            host,
            clean_us,
            promised_us,
            story,
        });
    }

    /// Records the processor time that tablix2's kernels used on a visited host after the limit for
    /// guests, until the kernels had left the host or the visit had ended. Reports each kernel that
    /// used more than the permitted time.
    fn evaluate_kernels(
        &mut self,
        visit: &OwnerVisit,
        events: &[EventEntry],
        clocks: &WorkerClocks,
        kernel_samples: &ProcessSamples,
    ) {
        let guests = first_paused_guests(events, visit).collect::<BTreeSet<String>>();
        let kernel_count = guests
            .iter()
            .filter(|tid| !clocks.contains_key(*tid))
            .count();
        let Some(visit_end_us) = visit_end(events, visit).filter(|visit_end_us| {
            *visit_end_us > visit.login_at_us + GUEST_RUN_AFTER_LOGIN_MAX_US
        }) else {
            return;
        };
        let processor_times = kernel_samples.processor_time_between(
            visit.host_index,
            visit.login_at_us + GUEST_RUN_AFTER_LOGIN_MAX_US,
            visit_end_us,
        );
        self.kernels_skipped += kernel_count.saturating_sub(processor_times.len());
        self.kernels_got_us.extend(
            processor_times
                .iter()
                .map(|(_, processor_time)| processor_time.program_us),
        );
        self.dumps_got_us.extend(
            processor_times
                .iter()
                .map(|(_, processor_time)| processor_time.dump_us),
        );
        self.ends_got_us.extend(
            processor_times
                .iter()
                .map(|(_, processor_time)| processor_time.exit_us),
        );
        for (process, processor_time) in processor_times.iter().filter(|(_, processor_time)| {
            processor_time.program_us > STOPPING_PROCESSOR_TIME_MAX_US
        }) {
            let story_end_us = visit_end_us.min(visit.login_at_us + VACATING_MAX_US);
            let format_use = |(at_us, additional_time): (u64, ProcessorTime)| {
                (
                    at_us,
                    format!("it has used microseconds: {additional_time:?}"),
                )
            };
            let use_lines = kernel_samples
                .usage_increments(*process, visit.login_at_us, story_end_us)
                .into_iter()
                .map(format_use);
            let story = format_story(
                visit,
                events_of_visit(visit, story_end_us, events)
                    .into_iter()
                    .chain(use_lines)
                    .collect(),
            );
            self.got_on.push(LateKernel {
                pid: process.1,
                got_us: processor_time.program_us,
                story,
            });
        }
    }

    /// Records how long a worker ran after the login of each visit to its host. Reports the worker
    /// if this time exceeds the limit.
    fn evaluate_worker(&mut self, worker: &str, clock: &WorkerClock, events: &[EventEntry]) {
        for visit in visits(events) {
            let is_pause_of_worker = |entry: &EventEntry| match &entry.kind {
                EventKind::GuestsPaused { host, guests, .. }
                    if host.index() == visit.host_index =>
                {
                    Some(guests.iter().any(|tid| tid.to_string() == worker))
                }
                _ => None,
            };
            if first_match_since(events, visit.login_at_us, is_pause_of_worker) != Some(true) {
                continue;
            }
            // The worker cannot have run between its stop and the event that `stopped_by_us` finds.
            let stopped_by_us = |entry: &EventEntry| match &entry.kind {
                EventKind::MigrationStep {
                    tid,
                    from: stopped_at,
                    step: Step::Transfer,
                    ..
                } => (stopped_at.index() == visit.host_index && tid.to_string() == worker)
                    .then_some(entry.at_us),
                EventKind::GuestsResumed { host, .. } => {
                    (host.index() == visit.host_index).then_some(entry.at_us)
                }
                _ => None,
            };
            let Some(stopped_by_us) = first_match_since(events, visit.login_at_us, stopped_by_us)
            else {
                self.workers_skipped += 1;
                continue;
            };
            let ran_us = match clock.run_after_login(visit.login_at_us, stopped_by_us) {
                RunAfterLogin::StoppedAt(stopped_at) => {
                    stopped_at.saturating_sub(visit.login_at_us)
                }
                RunAfterLogin::RanUntilEnd => stopped_by_us - visit.login_at_us,
                RunAfterLogin::Unknown => {
                    self.workers_skipped += 1;
                    continue;
                }
            };
            self.stood_still_us.push(ran_us);
            if ran_us > GUEST_RUN_AFTER_LOGIN_MAX_US {
                let clock_readings = [
                    (clock.first_reading_us, "it looks at its clock"),
                    (clock.last_reading_us, "its last look at its clock"),
                ];
                let clock_lines = clock_readings
                    .into_iter()
                    .filter(|(at_us, _)| *at_us >= visit.login_at_us);
                let clock_lines =
                    clock_lines.map(|(at_us, description)| (at_us, description.to_string()));
                let story = format_story(
                    &visit,
                    events_of_visit(&visit, stopped_by_us, events)
                        .into_iter()
                        .chain(clock_lines)
                        .collect(),
                );
                self.ran_on.push(LateWorker {
                    worker: worker.into(),
                    ran_us,
                    story,
                });
            }
        }
    }
}

/// True if the event log contains the login `scripted_login`.
fn is_in_event_log(scripted_login: &ScriptedLogin, events: &[EventEntry]) -> bool {
    let mut is_present = false;
    for entry in events
        .iter()
        .filter(|entry| entry.at_us <= scripted_login.logout_at_us + DECISION_DELAY_MAX_US)
    {
        match &entry.kind {
            EventKind::OwnerPresent { host, .. } if host.index() == scripted_login.host_index => {
                is_present = true
            }
            // The logout of the previous owner may be detected late.
            EventKind::OwnerAbsent { host, .. }
                if host.index() == scripted_login.host_index
                    && entry.at_us < scripted_login.logout_at_us =>
            {
                is_present = false
            }
            _ => {}
        }
        if is_present && entry.at_us >= scripted_login.login_at_us {
            return true;
        }
    }
    is_present
}
