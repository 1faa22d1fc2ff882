//! Judges a run: compares the event log, the workers' clocks and the kernel's counts of processor
//! time with the script's own list of logins. Does no input or output.

use super::kernels::{ProcessSamples, ProcessorTime};
use sempa_proto::event::EventKind;
use sempa_proto::migration::{MigrationCause, Step};
use sempa_tests::vm::EventEntry;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum time that a guest may run after the owner's login, in microseconds.
pub(super) const GUEST_RUN_AFTER_LOGIN_MAX_US: u64 = 50_000;
/// Maximum time after a login until no guest is left on the host, in microseconds, if the guests
/// have a host to migrate to. The transfer of the guests' memory may take additional time, at the
/// rate [`LINK_BYTES_PER_S`]. If the limit is exceeded, the events are reported.
const GUESTS_GONE_MAX_US: u64 = 1_000_000;
/// Rate in bytes per second by which the additional time for a transfer is computed.
const LINK_BYTES_PER_S: u64 = 100_000_000;
/// Processor time in microseconds that the kernel may count for a process while the process is
/// being stopped.
const STOPPING_MAX_US: u64 = 1_000;
/// Maximum time in microseconds between the end of a decision's reason and the execution of the
/// decision.
const DECISION_DELAY_MAX_US: u64 = 1_000_000;
/// Maximum percentage of cases that may remain unjudged, because a task ended at that moment or a
/// process was not found early enough.
const SKIPPED_PERCENT_MAX: usize = 5;

/// The clocks of all workers, by tid as the console prints it.
pub(super) type Clocks = BTreeMap<String, Clock>;

/// A worker's record of when it ran, in microseconds since 1970. Before its first and after its
/// last reading of the clock, the worker's state is unknown.
#[derive(Debug, Default)]
pub(super) struct Clock {
    pub(super) first: u64,
    pub(super) last: u64,
    /// Times in which the worker did not run, as pairs of successive readings that are far apart.
    pub(super) gaps: Vec<(u64, u64)>,
}

/// How long a worker ran on a host after the owner's login.
#[derive(Debug, PartialEq, Eq)]
enum RunAfterLogin {
    /// The worker stopped at this time.
    Until(u64),
    /// The worker ran until the end of the observed time.
    UntilEnd,
    /// The worker had not read its clock yet, or had ended.
    Unknown,
}

impl Clock {
    /// Returns how long the worker ran after the login at `since`. The worker is known to be
    /// stopped at `end`.
    fn run_after_login(&self, since: u64, end: u64) -> RunAfterLogin {
        match self
            .gaps
            .iter()
            .find(|(from, to)| *from < end && *to >= end)
        {
            Some((from, _)) => RunAfterLogin::Until(*from),
            None if self.first >= end || self.last <= since + GUEST_RUN_AFTER_LOGIN_MAX_US => {
                RunAfterLogin::Unknown
            }
            None => RunAfterLogin::UntilEnd,
        }
    }
}

/// A login on a host as recorded by the script, in microseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScriptedLogin {
    pub(super) host: u16,
    /// Time just before the login.
    pub(super) from: u64,
    /// Time after the logout was complete.
    pub(super) to: u64,
}

/// The results of a run, as they are written to the JSON file.
#[derive(Debug, Default, Serialize)]
pub(super) struct Outcome {
    pub(super) good: bool,
    pub(super) reasons: Vec<String>,
    pub(super) seconds: u64,
    pub(super) visits: usize,
    /// Number of visits that ended before the limit for a host without guests, while guests were
    /// still there.
    pub(super) short_visits: usize,
    /// Times from the login record until a worker stopped, by the worker's own clock, in
    /// microseconds; sorted.
    pub(super) stood_still_us: Vec<u64>,
    /// Number of workers on an owner's host for which that time is unknown.
    pub(super) workers_skipped: usize,
    /// Processor time of tablix2's kernels on a host whose owner had logged in earlier than the
    /// limit before, by the operating system's count, in microseconds; sorted.
    pub(super) kernels_got_us: Vec<u64>,
    /// Processor time that dumps used inside the same processes in the same time, in microseconds;
    /// sorted.
    pub(super) dumps_got_us: Vec<u64>,
    /// Processor time that the operating system used to end the same processes, in microseconds;
    /// sorted.
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
    /// As `clean_us`, only for hosts that had a guest at the login.
    pub(super) cleared_us: Vec<u64>,
    /// As `clean_us`, only for hosts with a guest that temporarily had no host to migrate to.
    pub(super) nowhere_us: Vec<u64>,
    /// Hosts that still had guests after the limit, with the events.
    pub(super) late: Vec<LateHost>,
    pub(super) ran_on: Vec<LateWorker>,
    pub(super) got_on: Vec<LateKernel>,
    pub(super) moves: usize,
    pub(super) failed_moves: usize,
    /// Number of runs of tablix2 that have ended.
    pub(super) searches: usize,
    /// Number of timetables that were checked and are correct.
    pub(super) timetables: usize,
    /// Number of farms that have ended.
    pub(super) farms: usize,
    /// Number of tasks of these farms that had a correct result.
    pub(super) results: usize,
}

/// A host that still had guests after the limit for this host.
#[derive(Debug, Serialize)]
pub(super) struct LateHost {
    pub(super) host: String,
    pub(super) clean_us: u64,
    /// The limit for this host in microseconds.
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
pub(super) struct Decision {
    pub(super) at_us: u64,
    pub(super) text: String,
    pub(super) decided: serde_json::Value,
}

/// Name of the host and the decisions about the host, by host index.
pub(super) type Decisions = BTreeMap<u16, (String, Vec<Decision>)>;

/// An owner's visit, as recorded in the event log.
struct Visit {
    host: u16,
    since: u64,
}

/// Returns the visits in the event log.
fn visits(events: &[EventEntry]) -> impl Iterator<Item = Visit> {
    events.iter().filter_map(|entry| match entry.kind {
        EventKind::OwnerPresent { host, since, .. } => Some(Visit {
            host: host.index(),
            since: since.0,
        }),
        _ => None,
    })
}

/// Applies `says` to the events at or after the time `since`, and returns its first result that is
/// not `None`.
fn find_after<T>(
    events: &[EventEntry],
    since: u64,
    says: impl Fn(&EventEntry) -> Option<T>,
) -> Option<T> {
    events
        .iter()
        .filter(|entry| entry.at_us >= since)
        .find_map(says)
}

/// Returns the events on the visited host until the time `until`, each with its time.
fn events_of_visit(visit: &Visit, until: u64, events: &[EventEntry]) -> Vec<(u64, String)> {
    let here = |entry: &&EventEntry| match &entry.kind {
        EventKind::MigrationStep { from, .. } => from.index() == visit.host,
        EventKind::OwnerPresent { host, .. } | EventKind::GuestsPaused { host, .. } => {
            host.index() == visit.host
        }
        _ => false,
    };
    let meanwhile = events
        .iter()
        .filter(|entry| (visit.since..=until).contains(&entry.at_us))
        .filter(here);
    meanwhile
        .map(|entry| (entry.at_us, entry.text.clone()))
        .collect()
}

/// Returns the events of a visit as lines of text, in order of time.
fn story_lines(visit: &Visit, mut happened: Vec<(u64, String)>) -> Vec<String> {
    happened.sort();
    happened
        .iter()
        .map(|(at_us, text)| story_line(visit, *at_us, text))
        .collect()
}

/// Returns an event as a line of text, with its milliseconds after the login record.
fn story_line(visit: &Visit, at_us: u64, text: &str) -> String {
    format!("{:.1} {text}", (at_us - visit.since) as f64 / 1e3)
}

/// Returns the tids of the guests that were stopped for a visit.
fn stopped_guests<'a>(
    events: &'a [EventEntry],
    visit: &Visit,
) -> impl Iterator<Item = String> + use<'a> {
    let of_host = |entry: &'a EventEntry| match &entry.kind {
        EventKind::GuestsPaused { host, guests, .. } if host.index() == visit.host => Some(guests),
        _ => None,
    };
    let guests = events
        .iter()
        .filter(|entry| entry.at_us >= visit.since)
        .find_map(of_host);
    guests.into_iter().flatten().map(|tid| tid.to_string())
}

/// Returns the time at which the guests of the visited host were resumed or its owner had logged
/// out, whichever was first; `None` if neither happened.
fn visit_end(events: &[EventEntry], visit: &Visit) -> Option<u64> {
    find_after(events, visit.since, |entry| match &entry.kind {
        EventKind::GuestsResumed { host, .. } | EventKind::OwnerAbsent { host, .. } => {
            (host.index() == visit.host).then_some(entry.at_us)
        }
        _ => None,
    })
}

impl Outcome {
    /// Judges a complete run, and stores the results in `self`.
    pub(super) fn judge(
        &mut self,
        events: &[EventEntry],
        stays: &[ScriptedLogin],
        decisions: &Decisions,
        clocks: &Clocks,
        seen: &ProcessSamples,
    ) {
        self.judge_events(events, stays);
        for visit in visits(events) {
            let clean = |entry: &EventEntry| match entry.kind {
                EventKind::HostVacated { host } if host.index() == visit.host => {
                    Some(Ok(entry.at_us - visit.since))
                }
                EventKind::OwnerAbsent { host, .. } if host.index() == visit.host => {
                    Some(Err(entry.at_us))
                }
                _ => None,
            };
            let end = events.last().map_or(visit.since, |entry| entry.at_us);
            match find_after(events, visit.since, clean).unwrap_or(Err(end)) {
                Ok(clean_us) => self.judge_clean(&visit, clean_us, events, decisions),
                Err(end) if end.saturating_sub(visit.since) <= GUESTS_GONE_MAX_US => {
                    self.short_visits += 1
                }
                Err(end) => {
                    let Visit { host, since } = visit;
                    self.reasons.push(format!(
                        "host {host} was not clean from {since} to {end}, as long as somebody was there"
                    ));
                }
            }
            self.judge_kernels(&visit, events, clocks, seen);
        }
        clocks
            .iter()
            .for_each(|(worker, clock)| self.judge_worker(worker, clock, events));
        stays
            .iter()
            .filter(|stay| !is_in_event_log(stay, events))
            .for_each(|stay| {
                self.reasons.push(format!(
                    "nobody noticed that somebody was on host {} from {} to {}",
                    stay.host, stay.from, stay.to
                ));
            });
        let Outcome {
            stood_still_us,
            seen_us,
            held_us,
            clean_us,
            ..
        } = self;
        [stood_still_us, seen_us, held_us, clean_us]
            .into_iter()
            .for_each(|all| all.sort_unstable());
        let Outcome {
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
        .for_each(|all| all.sort_unstable());
        self.set_verdict();
    }

    fn set_verdict(&mut self) {
        let promise = GUEST_RUN_AFTER_LOGIN_MAX_US / 1000;
        let late = self
            .stood_still_us
            .iter()
            .filter(|us| **us > GUEST_RUN_AFTER_LOGIN_MAX_US)
            .count();
        let got = self
            .kernels_got_us
            .iter()
            .filter(|us| **us > STOPPING_MAX_US)
            .count();
        for (what, count) in [
            (
                format!("times a worker ran longer than {promise} ms beside an owner"),
                late,
            ),
            (
                format!(
                    "times a kernel of tablix2 got the processor longer than {promise} ms after an owner had come"
                ),
                got,
            ),
            (
                "hosts had guests for longer than was promised".to_string(),
                self.late.len(),
            ),
        ] {
            self.reasons
                .extend((count > 0).then(|| format!("{count} {what}")));
        }
        for (what, skipped, judged) in [
            ("workers", self.workers_skipped, self.stood_still_us.len()),
            (
                "kernels of tablix2",
                self.kernels_skipped,
                self.kernels_got_us.len(),
            ),
        ] {
            if judged == 0 || skipped * 100 > (skipped + judged) * SKIPPED_PERCENT_MAX {
                self.reasons.push(format!(
                    "only {judged} of {} {what} beside owners could be judged",
                    judged + skipped
                ));
            }
        }
        self.good = self.reasons.is_empty();
    }

    fn judge_events(&mut self, events: &[EventEntry], stays: &[ScriptedLogin]) {
        // Start time of each migration, by its id.
        let mut began = BTreeMap::new();
        for entry in events {
            match &entry.kind {
                EventKind::MigrationStep { id, .. } => {
                    began.entry(*id).or_insert(entry.at_us);
                }
                EventKind::Migrated {
                    id, from, cause, ..
                } => {
                    self.moves += 1;
                    let at = began.get(id).copied().unwrap_or(entry.at_us);
                    let there = |stay: &ScriptedLogin| {
                        stay.host == from.index()
                            && (stay.from..=stay.to + DECISION_DELAY_MAX_US).contains(&at)
                    };
                    let says_so =
                        matches!(cause, MigrationCause::Owner { why } if why.contains("olga"));
                    if !says_so || !stays.iter().any(there) {
                        self.reasons.push(format!(
                            "a move for a reason that is not true: {}",
                            entry.text
                        ));
                    }
                }
                EventKind::MigrationFailed { .. } => self.failed_moves += 1,
                EventKind::OwnerPresent {
                    since,
                    detected_at: seen,
                    ..
                } => self.seen_us.push(seen.since(*since).0),
                EventKind::GuestsPaused {
                    duration: took,
                    guests,
                    ..
                } if !guests.is_empty() => self.held_us.push(took.0),
                _ => {}
            }
        }
    }

    /// Judges the time from a login until the host had no guests.
    fn judge_clean(
        &mut self,
        visit: &Visit,
        clean_us: u64,
        events: &[EventEntry],
        decisions: &Decisions,
    ) {
        let until = visit.since + clean_us;
        let within = |at_us: u64| at_us >= visit.since && at_us <= until;
        let of_host = decisions.get(&visit.host);
        let decided: Vec<&Decision> = of_host
            .into_iter()
            .flat_map(|(_, all)| all)
            .filter(|d| within(d.at_us))
            .collect();
        let nowhere = |d: &&Decision| {
            d.decided["Stays"]["why"]
                .as_str()
                .is_some_and(|why| why.starts_with("no host"))
        };
        if decided.iter().any(nowhere) {
            return self.nowhere_us.push(clean_us);
        }
        self.clean_us.push(clean_us);
        let left = |entry: &EventEntry| match &entry.kind {
            EventKind::Migrated { from, bytes, .. }
                if from.index() == visit.host && within(entry.at_us) =>
            {
                Some(*bytes)
            }
            _ => None,
        };
        let went: Vec<u64> = events.iter().filter_map(left).collect();
        if !went.is_empty() {
            self.cleared_us.push(clean_us);
        }
        let promised_us =
            GUESTS_GONE_MAX_US + went.iter().sum::<u64>() * 1_000_000 / LINK_BYTES_PER_S;
        if clean_us <= promised_us {
            return;
        }
        let step = |entry: &&EventEntry| match &entry.kind {
            EventKind::MigrationStep { from, .. } => {
                from.index() == visit.host && within(entry.at_us)
            }
            _ => false,
        };
        let steps = events
            .iter()
            .filter(step)
            .map(|entry| (entry.at_us, entry.text.clone()));
        let story = story_lines(
            visit,
            decided
                .iter()
                .map(|d| (d.at_us, d.text.clone()))
                .chain(steps)
                .collect(),
        );
        let host = of_host.map(|(name, _)| name.clone()).unwrap_or_default();
        self.late.push(LateHost {
            host,
            clean_us,
            promised_us,
            story,
        });
    }

    /// Judges the processor time that tablix2's kernels used on a visited host after the limit for
    /// guests, until the kernels had left the host or the visit was over.
    fn judge_kernels(
        &mut self,
        visit: &Visit,
        events: &[EventEntry],
        clocks: &Clocks,
        seen: &ProcessSamples,
    ) {
        let guests = stopped_guests(events, visit).collect::<BTreeSet<String>>();
        let kernels = guests
            .iter()
            .filter(|tid| !clocks.contains_key(*tid))
            .count();
        let Some(end) = visit_end(events, visit)
            .filter(|end| *end > visit.since + GUEST_RUN_AFTER_LOGIN_MAX_US)
        else {
            return;
        };
        let got = seen.processor_time_between(
            visit.host,
            visit.since + GUEST_RUN_AFTER_LOGIN_MAX_US,
            end,
        );
        self.kernels_skipped += kernels.saturating_sub(got.len());
        self.kernels_got_us
            .extend(got.iter().map(|(_, used)| used.program));
        self.dumps_got_us
            .extend(got.iter().map(|(_, used)| used.dump));
        self.ends_got_us
            .extend(got.iter().map(|(_, used)| used.end));
        for (process, used) in got
            .iter()
            .filter(|(_, used)| used.program > STOPPING_MAX_US)
        {
            let until = end.min(visit.since + GUESTS_GONE_MAX_US);
            let line = |(at, more): (u64, ProcessorTime)| {
                (at, format!("it has used microseconds: {more:?}"))
            };
            let used_then = seen
                .steps(*process, visit.since, until)
                .into_iter()
                .map(line);
            let story = story_lines(
                visit,
                events_of_visit(visit, until, events)
                    .into_iter()
                    .chain(used_then)
                    .collect(),
            );
            self.got_on.push(LateKernel {
                pid: process.1,
                got_us: used.program,
                story,
            });
        }
    }

    /// Judges how long a worker still ran, for each visit to the worker's host.
    fn judge_worker(&mut self, worker: &str, clock: &Clock, events: &[EventEntry]) {
        for visit in visits(events) {
            let stood = |entry: &EventEntry| match &entry.kind {
                EventKind::GuestsPaused { host, guests, .. } if host.index() == visit.host => {
                    Some(guests.iter().any(|tid| tid.to_string() == worker))
                }
                _ => None,
            };
            if find_after(events, visit.since, stood) != Some(true) {
                continue;
            }
            // The worker cannot have run between its stop and this event.
            let end = |entry: &EventEntry| match &entry.kind {
                EventKind::MigrationStep {
                    tid,
                    from,
                    step: Step::Transfer,
                    ..
                } => {
                    (from.index() == visit.host && tid.to_string() == worker).then_some(entry.at_us)
                }
                EventKind::GuestsResumed { host, .. } => {
                    (host.index() == visit.host).then_some(entry.at_us)
                }
                _ => None,
            };
            let Some(end) = find_after(events, visit.since, end) else {
                self.workers_skipped += 1;
                continue;
            };
            let ran_us = match clock.run_after_login(visit.since, end) {
                RunAfterLogin::Until(from) => from.saturating_sub(visit.since),
                RunAfterLogin::UntilEnd => end - visit.since,
                RunAfterLogin::Unknown => {
                    self.workers_skipped += 1;
                    continue;
                }
            };
            self.stood_still_us.push(ran_us);
            if ran_us > GUEST_RUN_AFTER_LOGIN_MAX_US {
                let watched = [
                    (clock.first, "it looks at its clock"),
                    (clock.last, "its last look at its clock"),
                ];
                let of_clock = watched
                    .into_iter()
                    .filter(|(at_us, _)| *at_us >= visit.since);
                let of_clock = of_clock.map(|(at_us, what)| (at_us, what.to_string()));
                let story = story_lines(
                    &visit,
                    events_of_visit(&visit, end, events)
                        .into_iter()
                        .chain(of_clock)
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

/// True if the event log contains this login.
fn is_in_event_log(stay: &ScriptedLogin, events: &[EventEntry]) -> bool {
    let mut there = false;
    for entry in events
        .iter()
        .filter(|entry| entry.at_us <= stay.to + DECISION_DELAY_MAX_US)
    {
        match &entry.kind {
            EventKind::OwnerPresent { host, .. } if host.index() == stay.host => there = true,
            // The logout of an earlier visitor may be detected late.
            EventKind::OwnerAbsent { host, .. }
                if host.index() == stay.host && entry.at_us < stay.to =>
            {
                there = false
            }
            _ => {}
        }
        if there && entry.at_us >= stay.from {
            return true;
        }
    }
    there
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::{HostId, Micros, MigrationId, Tid};

    fn h(index: u16) -> HostId {
        HostId::new(index).expect("an index")
    }

    fn t(number: u32) -> Tid {
        Tid::task(h(1), number).expect("a task")
    }

    fn log(kinds: Vec<(u64, EventKind)>) -> Vec<EventEntry> {
        let entry = |(number, (at_us, kind)): (u64, (u64, EventKind))| EventEntry {
            number,
            at_us,
            host: None,
            text: kind.to_string(),
            kind,
        };
        (1..).zip(kinds).map(entry).collect()
    }

    fn moved(from: u16, bytes: u64) -> EventKind {
        let (id, why, frozen) = (MigrationId(1), "olga on pts/0".to_string(), Micros(0));
        EventKind::Migrated {
            id,
            tid: t(7),
            from: h(from),
            to: h(1),
            cause: MigrationCause::Owner { why },
            bytes,
            resident: bytes,
            frozen,
            transfer_time: frozen,
        }
    }

    fn comes(host: u16, since: u64) -> EventKind {
        let (since, seen) = (Micros(since), Micros(since + 100));
        EventKind::OwnerPresent {
            host: h(host),
            since,
            detected_at: seen,
            why: "olga on pts/0".into(),
        }
    }

    const STAY: ScriptedLogin = ScriptedLogin {
        host: 2,
        from: 900,
        to: 9_000_000,
    };

    fn judged(
        events: &[EventEntry],
        stays: &[ScriptedLogin],
        clocks: &Clocks,
        seen: &ProcessSamples,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        outcome.judge(events, stays, &Decisions::new(), clocks, seen);
        outcome
    }

    fn says(outcome: &Outcome, words: &str) -> bool {
        outcome.reasons.iter().any(|reason| reason.contains(words))
    }

    /// A host that never becomes free of guests fails the run, unless the visitor left before the
    /// limit.
    #[test]
    fn host_never_free_of_guests_fails_run() {
        let goes = || EventKind::OwnerAbsent {
            host: h(2),
            why: "nobody is logged in".into(),
        };
        let visit = |then: Vec<(u64, EventKind)>| {
            let events = log([vec![(1000, comes(2, 1000))], then].concat());
            judged(&events, &[STAY], &Clocks::new(), &ProcessSamples::default())
        };
        let never_clean = |then| says(&visit(then), "host 2 was not clean");
        let late = 1000 + GUESTS_GONE_MAX_US + 1;
        assert!(never_clean(vec![(late, goes())]));
        assert!(
            never_clean(vec![(
                late,
                EventKind::Note {
                    text: "the end".into()
                }
            )]),
            "the log ends"
        );
        assert!(!never_clean(vec![
            (2000, EventKind::HostVacated { host: h(2) }),
            (late, goes())
        ]));
        assert!(!never_clean(vec![(late - 1, goes())]));
        assert_eq!(visit(vec![(late - 1, goes())]).short_visits, 1);
    }

    /// A migration for an owner is correct only if the owner was logged in on that host at that
    /// time.
    #[test]
    fn migration_for_owner_needs_owner_on_host() {
        let move_at = |at, from| log(vec![(1000, comes(2, 1000)), (at, moved(from, 0))]);
        let false_one = |events: &[EventEntry], stays: &[ScriptedLogin]| {
            says(
                &judged(events, stays, &Clocks::new(), &ProcessSamples::default()),
                "a reason that is not true",
            )
        };
        assert!(!false_one(&move_at(2000, 2), &[STAY]));
        assert!(
            false_one(&move_at(2000, 3), &[STAY]),
            "she was on another host"
        );
        assert!(
            false_one(&move_at(20_000_000, 2), &[STAY]),
            "she had left long ago"
        );
        assert!(false_one(&move_at(2000, 2), &[]), "she was nowhere");
    }

    /// A host with guests after the limit fails the run. The limit includes time for the transfer
    /// of the guests' memory.
    #[test]
    fn host_with_late_guests_fails_run() {
        let clean_at = |at, bytes| {
            let clean = EventKind::HostVacated { host: h(2) };
            let events = log(vec![
                (1000, comes(2, 1000)),
                (2000, moved(2, bytes)),
                (at, clean),
            ]);
            judged(&events, &[STAY], &Clocks::new(), &ProcessSamples::default())
        };
        assert!(clean_at(900_000, 0).late.is_empty());
        assert!(says(
            &clean_at(1_200_000, 0),
            "had guests for longer than was promised"
        ));
        assert!(
            clean_at(1_200_000, 50_000_000).late.is_empty(),
            "half a second for its bytes"
        );
        assert_eq!(clean_at(900_000, 0).cleared_us, [899_000]);
    }

    /// Workers and kernels on an owner's host are either judged or counted as skipped.
    #[test]
    fn guests_are_judged_or_counted_as_skipped() {
        let guests = vec![t(7), t(8)];
        let stopped = EventKind::GuestsPaused {
            host: h(2),
            guests: guests.clone(),
            duration: Micros(9),
            why: String::new(),
        };
        let go_on = EventKind::GuestsResumed {
            host: h(2),
            guests,
            why: String::new(),
        };
        let events = log(vec![
            (1000, comes(2, 1000)),
            (20_000, stopped),
            (200_000, go_on),
        ]);
        let clocks =
            |first, last, gaps| Clocks::from([(t(7).to_string(), Clock { first, last, gaps })]);
        let gaps = |gap| clocks(500, 900_000, vec![gap]);
        let good = judged(
            &events,
            &[STAY],
            &gaps((11_000, 210_000)),
            &ProcessSamples::default(),
        );
        assert_eq!(
            (good.stood_still_us, good.kernels_skipped),
            (vec![10_000], 1),
            "nobody has looked at the kernel"
        );
        let late = judged(
            &events,
            &[STAY],
            &gaps((90_000, 210_000)),
            &ProcessSamples::default(),
        );
        assert!(says(&late, "a worker ran longer") && late.ran_on.len() == 1);
        let never = judged(
            &events,
            &[STAY],
            &gaps((300_000, 400_000)),
            &ProcessSamples::default(),
        );
        assert!(says(&never, "a worker ran longer") && never.ran_on[0].ran_us == 199_000);
        let skipped = |first, last| {
            let outcome = judged(
                &events,
                &[STAY],
                &clocks(first, last, vec![]),
                &ProcessSamples::default(),
            );
            (outcome.workers_skipped, outcome.ran_on.len())
        };
        assert_eq!(
            skipped(200_000, 900_000),
            (1, 0),
            "it did not look at its clock yet"
        );
        assert_eq!(
            skipped(199_000, 900_000),
            (0, 1),
            "it looked at its clock, and where is the gap?"
        );
        assert_eq!(
            skipped(500, 1000 + GUEST_RUN_AFTER_LOGIN_MAX_US),
            (1, 0),
            "it looked at its clock no more"
        );
        assert_eq!(
            skipped(500, 1001 + GUEST_RUN_AFTER_LOGIN_MAX_US),
            (0, 1),
            "nobody was to run then"
        );
        let unfinished = judged(
            &events[..2],
            &[STAY],
            &gaps((11_000, 210_000)),
            &ProcessSamples::default(),
        );
        assert_eq!(unfinished.workers_skipped, 1);
    }

    #[test]
    fn undetected_login_fails_run() {
        let events = log(vec![(1000, comes(2, 1000))]);
        assert!(!says(
            &judged(&events, &[STAY], &Clocks::new(), &ProcessSamples::default()),
            "nobody noticed"
        ));
        let other = ScriptedLogin { host: 3, ..STAY };
        assert!(says(
            &judged(
                &events,
                &[other],
                &Clocks::new(),
                &ProcessSamples::default()
            ),
            "nobody noticed"
        ));
    }
}
