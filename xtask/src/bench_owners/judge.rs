//! Compares the event log, the clocks of workers and the kernel's counts of a run with the script's
//! own table of logins. It does no input or output.

use super::kernels::{Seen, Used};
use sempa_proto::event::EventKind;
use sempa_proto::migration::{MigrationCause, Step};
use sempa_tests::vm::Entry;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The limit for guests: none of them runs longer than this after an owner's login.
pub(super) const PROMISE_US: u64 = 50_000;
/// The limit for a host: this long after the login no guest is left, if the guests have a host to
/// go to. The transfer of what its tasks hold takes additional time, at the link's rate in bytes
/// per second. Longer times are reported with their story.
const CLEAN_US: u64 = 1_000_000;
const LINK: u64 = 100_000_000;
/// Processor time that the kernel may count for a process while it is being stopped.
const STOPPING_US: u64 = 1_000;
/// A decision may be carried out this long after its reason has ended.
const AFTER_US: u64 = 1_000_000;
/// The percentage of cases that may remain unjudged: a task that ended at that moment, or a process
/// that was not found in time.
const SKIPPED_PERCENT_MAX: usize = 5;

/// The clocks of all workers, by tid as printed.
pub(super) type Clocks = BTreeMap<String, Clock>;

/// A worker's own clock, in microseconds since 1970. The worker's state is unknown before its first
/// reading of the clock and after its last.
#[derive(Debug, Default)]
pub(super) struct Clock {
    pub(super) first: u64,
    pub(super) last: u64,
    /// Pairs of successive readings that are far apart.
    pub(super) gaps: Vec<(u64, u64)>,
}

/// How long a worker ran on a host after its owner came.
#[derive(Debug, PartialEq, Eq)]
enum Ran {
    /// It stopped at this time.
    Until(u64),
    /// It ran until the end.
    On,
    /// It had not read its clock yet, or had ended.
    Unknown,
}

impl Clock {
    /// Returns how long the worker ran after an owner came. `end` is a time at which it is known to
    /// be stopped.
    fn ran(&self, since: u64, end: u64) -> Ran {
        match self
            .gaps
            .iter()
            .find(|(from, to)| *from < end && *to >= end)
        {
            Some((from, _)) => Ran::Until(*from),
            None if self.first >= end || self.last <= since + PROMISE_US => Ran::Unknown,
            None => Ran::On,
        }
    }
}

/// A person's stay on a host by the record of the script that logged them in and out, in
/// microseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stay {
    pub(super) host: u16,
    /// The time just before the login.
    pub(super) from: u64,
    /// The time after the logout had completed.
    pub(super) to: u64,
}

/// The results of a run, as written to the JSON file.
#[derive(Debug, Default, Serialize)]
pub(super) struct Outcome {
    pub(super) good: bool,
    pub(super) reasons: Vec<String>,
    pub(super) seconds: u64,
    pub(super) visits: usize,
    /// Visits that were over before the limit for a clean host, on hosts that were clean.
    pub(super) short_visits: usize,
    /// Microseconds from the login record until a worker stopped, by its own clock; sorted.
    pub(super) stood_still_us: Vec<u64>,
    /// Workers on an owner's host for which that time is unknown.
    pub(super) workers_skipped: usize,
    /// Processor time of tablix2's kernels on hosts whose owner had come longer ago than the limit,
    /// by the kernel's count; sorted.
    pub(super) kernels_got_us: Vec<u64>,
    /// Processor time that dumps used inside these processes meanwhile; sorted.
    pub(super) dumps_got_us: Vec<u64>,
    /// Processor time that the kernel used to end these processes; sorted.
    pub(super) ends_got_us: Vec<u64>,
    /// Kernels of tablix2 on an owner's host that were not observed.
    pub(super) kernels_skipped: usize,
    /// Microseconds from the login record until the load watcher noticed; sorted.
    pub(super) seen_us: Vec<u64>,
    /// Microseconds from the load watcher's directive until all guests had stopped; sorted.
    pub(super) held_us: Vec<u64>,
    /// Microseconds from the login record until no guest was left; sorted.
    pub(super) clean_us: Vec<u64>,
    /// The same, only for hosts that had a guest; sorted.
    pub(super) cleared_us: Vec<u64>,
    /// The same, only for hosts with a guest that temporarily had no host to go to; sorted.
    pub(super) nowhere_us: Vec<u64>,
    /// The hosts that were clean later than the limit, with their stories.
    pub(super) late: Vec<Late>,
    pub(super) ran_on: Vec<RanOn>,
    pub(super) got_on: Vec<GotOn>,
    pub(super) moves: usize,
    pub(super) failed_moves: usize,
    /// Runs of tablix2 that have ended, and their checked timetables.
    pub(super) searches: usize,
    pub(super) timetables: usize,
    /// Farms that have ended, and their tasks with a right result.
    pub(super) farms: usize,
    pub(super) results: usize,
}

/// A host that still had guests after the limit.
#[derive(Debug, Serialize)]
pub(super) struct Late {
    pub(super) host: String,
    pub(super) clean_us: u64,
    /// The limit for this host.
    pub(super) promised_us: u64,
    /// Events with their milliseconds after the login record.
    pub(super) story: Vec<String>,
}

/// A worker that ran longer than the limit after the owner had come.
#[derive(Debug, Serialize)]
pub(super) struct RanOn {
    pub(super) worker: String,
    pub(super) ran_us: u64,
    /// Events on its host, with their milliseconds after the login record.
    pub(super) story: Vec<String>,
}

/// A kernel of tablix2 that used the processor longer than the limit after the owner had come.
#[derive(Debug, Serialize)]
pub(super) struct GotOn {
    pub(super) pid: u32,
    pub(super) got_us: u64,
    /// Its processor time and the events on its host, with their milliseconds after the login
    /// record.
    pub(super) story: Vec<String>,
}

/// A decision of the resource manager, as `pvm why` prints it.
#[derive(Debug, Deserialize)]
pub(super) struct Decision {
    pub(super) at_us: u64,
    pub(super) text: String,
    pub(super) decided: serde_json::Value,
}

/// Each host's name and the decisions about it, by host index.
pub(super) type Decisions = BTreeMap<u16, (String, Vec<Decision>)>;

/// A person's visit by the event log of the virtual machine.
struct Visit {
    host: u16,
    since: u64,
}

/// Returns the visits by their login records.
fn visits(events: &[Entry]) -> impl Iterator<Item = Visit> {
    events.iter().filter_map(|entry| match entry.kind {
        EventKind::OwnerPresent { host, since, .. } => Some(Visit {
            host: host.index(),
            since: since.0,
        }),
        _ => None,
    })
}

/// Returns what `says` finds in the first event at or after a time for which it finds something.
fn after<T>(events: &[Entry], since: u64, says: impl Fn(&Entry) -> Option<T>) -> Option<T> {
    events
        .iter()
        .filter(|entry| entry.at_us >= since)
        .find_map(says)
}

/// Returns the events on the visited host until a time, each with its time.
fn happened(visit: &Visit, until: u64, events: &[Entry]) -> Vec<(u64, String)> {
    let here = |entry: &&Entry| match &entry.kind {
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

/// Returns the lines of a story in order of time.
fn story(visit: &Visit, mut happened: Vec<(u64, String)>) -> Vec<String> {
    happened.sort();
    happened
        .iter()
        .map(|(at_us, text)| told(visit, *at_us, text))
        .collect()
}

/// Returns a line of a story.
fn told(visit: &Visit, at_us: u64, text: &str) -> String {
    format!("{:.1} {text}", (at_us - visit.since) as f64 / 1e3)
}

/// Returns the guests that were stopped for a visit.
fn stopped<'a>(events: &'a [Entry], visit: &Visit) -> impl Iterator<Item = String> + use<'a> {
    let of_host = |entry: &'a Entry| match &entry.kind {
        EventKind::GuestsPaused { host, guests, .. } if host.index() == visit.host => Some(guests),
        _ => None,
    };
    let guests = events
        .iter()
        .filter(|entry| entry.at_us >= visit.since)
        .find_map(of_host);
    guests.into_iter().flatten().map(|tid| tid.to_string())
}

/// Returns when the guests of a host were resumed, or its owner had left, after a visit began.
fn over(events: &[Entry], visit: &Visit) -> Option<u64> {
    after(events, visit.since, |entry| match &entry.kind {
        EventKind::GuestsResumed { host, .. } | EventKind::OwnerAbsent { host, .. } => {
            (host.index() == visit.host).then_some(entry.at_us)
        }
        _ => None,
    })
}

impl Outcome {
    /// Judges a run that is over.
    pub(super) fn judge(
        &mut self,
        events: &[Entry],
        stays: &[Stay],
        decisions: &Decisions,
        clocks: &Clocks,
        seen: &Seen,
    ) {
        self.judge_events(events, stays);
        for visit in visits(events) {
            let clean = |entry: &Entry| match entry.kind {
                EventKind::HostVacated { host } if host.index() == visit.host => {
                    Some(Ok(entry.at_us - visit.since))
                }
                EventKind::OwnerAbsent { host, .. } if host.index() == visit.host => {
                    Some(Err(entry.at_us))
                }
                _ => None,
            };
            let end = events.last().map_or(visit.since, |entry| entry.at_us);
            match after(events, visit.since, clean).unwrap_or(Err(end)) {
                Ok(clean_us) => self.judge_clean(&visit, clean_us, events, decisions),
                Err(end) if end.saturating_sub(visit.since) <= CLEAN_US => self.short_visits += 1,
                Err(end) => {
                    let Visit { host, since } = visit;
                    self.reasons.push(format!(
                        "host {host} was not clean from {since} to {end}, the whole time that its owner was present"
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
            .filter(|stay| !was_seen(stay, events))
            .for_each(|stay| {
                self.reasons.push(format!(
                    "no load watcher noticed the owner on host {} from {} to {}",
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
        self.sum_up();
    }

    fn sum_up(&mut self) {
        let promise = PROMISE_US / 1000;
        let late = self
            .stood_still_us
            .iter()
            .filter(|us| **us > PROMISE_US)
            .count();
        let got = self
            .kernels_got_us
            .iter()
            .filter(|us| **us > STOPPING_US)
            .count();
        for (what, count) in [
            (
                format!("times a worker ran longer than {promise} ms after its owner had returned"),
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
                    "only {judged} of {} {what} on hosts with owners could be judged",
                    judged + skipped
                ));
            }
        }
        self.good = self.reasons.is_empty();
    }

    fn judge_events(&mut self, events: &[Entry], stays: &[Stay]) {
        // Start time of each migration.
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
                    let there = |stay: &Stay| {
                        stay.host == from.index() && (stay.from..=stay.to + AFTER_US).contains(&at)
                    };
                    let says_so =
                        matches!(cause, MigrationCause::Owner { why } if why.contains("olga"));
                    if !says_so || !stays.iter().any(there) {
                        self.reasons
                            .push(format!("a migration for a false reason: {}", entry.text));
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

    /// Judges how soon a host had no guest after a login.
    fn judge_clean(
        &mut self,
        visit: &Visit,
        clean_us: u64,
        events: &[Entry],
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
        let left = |entry: &Entry| match &entry.kind {
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
        let promised_us = CLEAN_US + went.iter().sum::<u64>() * 1_000_000 / LINK;
        if clean_us <= promised_us {
            return;
        }
        let step = |entry: &&Entry| match &entry.kind {
            EventKind::MigrationStep { from, .. } => {
                from.index() == visit.host && within(entry.at_us)
            }
            _ => false,
        };
        let steps = events
            .iter()
            .filter(step)
            .map(|entry| (entry.at_us, entry.text.clone()));
        let story = story(
            visit,
            decided
                .iter()
                .map(|d| (d.at_us, d.text.clone()))
                .chain(steps)
                .collect(),
        );
        let host = of_host.map(|(name, _)| name.clone()).unwrap_or_default();
        self.late.push(Late {
            host,
            clean_us,
            promised_us,
            story,
        });
    }

    /// Judges the processor time of tablix2's kernels on a visited host after the limit, until they
    /// had left or the visit was over.
    fn judge_kernels(&mut self, visit: &Visit, events: &[Entry], clocks: &Clocks, seen: &Seen) {
        let guests = stopped(events, visit).collect::<BTreeSet<String>>();
        let kernels = guests
            .iter()
            .filter(|tid| !clocks.contains_key(*tid))
            .count();
        let Some(end) = over(events, visit).filter(|end| *end > visit.since + PROMISE_US) else {
            return;
        };
        let got = seen.got_us(visit.host, visit.since + PROMISE_US, end);
        self.kernels_skipped += kernels.saturating_sub(got.len());
        self.kernels_got_us
            .extend(got.iter().map(|(_, used)| used.program));
        self.dumps_got_us
            .extend(got.iter().map(|(_, used)| used.dump));
        self.ends_got_us
            .extend(got.iter().map(|(_, used)| used.end));
        for (process, used) in got.iter().filter(|(_, used)| used.program > STOPPING_US) {
            let until = end.min(visit.since + CLEAN_US);
            let line =
                |(at, more): (u64, Used)| (at, format!("it has used microseconds: {more:?}"));
            let used_then = seen
                .steps(*process, visit.since, until)
                .into_iter()
                .map(line);
            let story = story(
                visit,
                happened(visit, until, events)
                    .into_iter()
                    .chain(used_then)
                    .collect(),
            );
            self.got_on.push(GotOn {
                pid: process.1,
                got_us: used.program,
                story,
            });
        }
    }

    /// Judges for each visit to the worker's host how long the worker still ran.
    fn judge_worker(&mut self, worker: &str, clock: &Clock, events: &[Entry]) {
        for visit in visits(events) {
            let stood = |entry: &Entry| match &entry.kind {
                EventKind::GuestsPaused { host, guests, .. } if host.index() == visit.host => {
                    Some(guests.iter().any(|tid| tid.to_string() == worker))
                }
                _ => None,
            };
            if after(events, visit.since, stood) != Some(true) {
                continue;
            }
            // The worker did not run between its stop and this event.
            let end = |entry: &Entry| match &entry.kind {
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
            let Some(end) = after(events, visit.since, end) else {
                self.workers_skipped += 1;
                continue;
            };
            let ran_us = match clock.ran(visit.since, end) {
                Ran::Until(from) => from.saturating_sub(visit.since),
                Ran::On => end - visit.since,
                Ran::Unknown => {
                    self.workers_skipped += 1;
                    continue;
                }
            };
            self.stood_still_us.push(ran_us);
            if ran_us > PROMISE_US {
                let watched = [
                    (clock.first, "it looks at its clock"),
                    (clock.last, "its last look at its clock"),
                ];
                let of_clock = watched
                    .into_iter()
                    .filter(|(at_us, _)| *at_us >= visit.since);
                let of_clock = of_clock.map(|(at_us, what)| (at_us, what.to_string()));
                let story = story(
                    &visit,
                    happened(&visit, end, events)
                        .into_iter()
                        .chain(of_clock)
                        .collect(),
                );
                self.ran_on.push(RanOn {
                    worker: worker.into(),
                    ran_us,
                    story,
                });
            }
        }
    }
}

/// True if the event log contains a stay.
fn was_seen(stay: &Stay, events: &[Entry]) -> bool {
    let mut there = false;
    for entry in events
        .iter()
        .filter(|entry| entry.at_us <= stay.to + AFTER_US)
    {
        match &entry.kind {
            EventKind::OwnerPresent { host, .. } if host.index() == stay.host => there = true,
            // The departure of an earlier visitor may be noticed late.
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

    fn log(kinds: Vec<(u64, EventKind)>) -> Vec<Entry> {
        let entry = |(number, (at_us, kind)): (u64, (u64, EventKind))| Entry {
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

    const STAY: Stay = Stay {
        host: 2,
        from: 900,
        to: 9_000_000,
    };

    fn judged(events: &[Entry], stays: &[Stay], clocks: &Clocks, seen: &Seen) -> Outcome {
        let mut outcome = Outcome::default();
        outcome.judge(events, stays, &Decisions::new(), clocks, seen);
        outcome
    }

    fn says(outcome: &Outcome, words: &str) -> bool {
        outcome.reasons.iter().any(|reason| reason.contains(words))
    }

    #[test]
    fn a_host_that_is_never_clean_makes_a_run_bad_unless_its_visitor_left_before_it_had_to_be() {
        let goes = || EventKind::OwnerAbsent {
            host: h(2),
            why: "no user is logged in".into(),
        };
        let visit = |then: Vec<(u64, EventKind)>| {
            let events = log([vec![(1000, comes(2, 1000))], then].concat());
            judged(&events, &[STAY], &Clocks::new(), &Seen::default())
        };
        let never_clean = |then| says(&visit(then), "host 2 was not clean");
        let late = 1000 + CLEAN_US + 1;
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

    #[test]
    fn a_move_is_true_only_if_she_was_on_that_host_then() {
        let move_at = |at, from| log(vec![(1000, comes(2, 1000)), (at, moved(from, 0))]);
        let false_one = |events: &[Entry], stays: &[Stay]| {
            says(
                &judged(events, stays, &Clocks::new(), &Seen::default()),
                "a false reason",
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

    #[test]
    fn a_host_that_is_clean_too_late_makes_the_run_bad_and_what_its_tasks_hold_is_allowed_for() {
        let clean_at = |at, bytes| {
            let clean = EventKind::HostVacated { host: h(2) };
            let events = log(vec![
                (1000, comes(2, 1000)),
                (2000, moved(2, bytes)),
                (at, clean),
            ]);
            judged(&events, &[STAY], &Clocks::new(), &Seen::default())
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

    #[test]
    fn workers_and_kernels_beside_an_owner_are_judged_or_counted_as_skipped() {
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
        let good = judged(&events, &[STAY], &gaps((11_000, 210_000)), &Seen::default());
        assert_eq!(
            (good.stood_still_us, good.kernels_skipped),
            (vec![10_000], 1),
            "nobody has looked at the kernel"
        );
        let late = judged(&events, &[STAY], &gaps((90_000, 210_000)), &Seen::default());
        assert!(says(&late, "a worker ran longer") && late.ran_on.len() == 1);
        let never = judged(
            &events,
            &[STAY],
            &gaps((300_000, 400_000)),
            &Seen::default(),
        );
        assert!(says(&never, "a worker ran longer") && never.ran_on[0].ran_us == 199_000);
        let skipped = |first, last| {
            let outcome = judged(
                &events,
                &[STAY],
                &clocks(first, last, vec![]),
                &Seen::default(),
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
            skipped(500, 1000 + PROMISE_US),
            (1, 0),
            "it looked at its clock no more"
        );
        assert_eq!(
            skipped(500, 1001 + PROMISE_US),
            (0, 1),
            "nobody was to run then"
        );
        let unfinished = judged(
            &events[..2],
            &[STAY],
            &gaps((11_000, 210_000)),
            &Seen::default(),
        );
        assert_eq!(unfinished.workers_skipped, 1);
    }

    #[test]
    fn a_login_that_nobody_noticed_makes_the_run_bad() {
        let events = log(vec![(1000, comes(2, 1000))]);
        assert!(!says(
            &judged(&events, &[STAY], &Clocks::new(), &Seen::default()),
            "no load watcher noticed"
        ));
        let other = Stay { host: 3, ..STAY };
        assert!(says(
            &judged(&events, &[other], &Clocks::new(), &Seen::default()),
            "no load watcher noticed"
        ));
    }
}
