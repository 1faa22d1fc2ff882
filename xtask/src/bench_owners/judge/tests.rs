//! Tests of the evaluation with event logs and clock readings that are written by hand.

use super::*;
use sempa_proto::{HostId, Micros, MigrationId, Tid};

fn host_id(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn tid(number: u32) -> Tid {
    Tid::for_task(host_id(1), number).expect("a task")
}

fn event_log(kinds: Vec<(u64, EventKind)>) -> Vec<EventEntry> {
    let entry = |(number, (at_us, kind)): (u64, (u64, EventKind))| EventEntry {
        number,
        at_us,
        host: None,
        text: kind.to_string(),
        kind,
    };
    (1..).zip(kinds).map(entry).collect()
}

fn migrated_event(from: u16, bytes: u64) -> EventKind {
    let (id, reason, zero_duration) = (MigrationId(1), "olga on pts/0".to_string(), Micros(0));
    EventKind::Migrated {
        id,
        tid: tid(7),
        from: host_id(from),
        to: host_id(1),
        cause: MigrationCause::Owner { why: reason },
        bytes,
        resident: bytes,
        frozen: zero_duration,
        transfer_time: zero_duration,
    }
}

fn owner_present_event(host: u16, since: u64) -> EventKind {
    let (since, detection_time) = (Micros(since), Micros(since + 100));
    EventKind::OwnerPresent {
        host: host_id(host),
        since,
        detected_at: detection_time,
        why: "olga on pts/0".into(),
    }
}

const LOGIN_ON_HOST_2: ScriptedLogin = ScriptedLogin {
    host_index: 2,
    login_at_us: 900,
    logout_at_us: 9_000_000,
};

fn evaluated_outcome(
    events: &[EventEntry],
    scripted_logins: &[ScriptedLogin],
    clocks: &WorkerClocks,
    kernel_samples: &ProcessSamples,
) -> OwnersOutcome {
    let mut outcome = OwnersOutcome::default();
    outcome.evaluate_run(
        events,
        scripted_logins,
        &DecisionsByHost::new(),
        clocks,
        kernel_samples,
    );
    outcome
}

fn has_reason(outcome: &OwnersOutcome, phrase: &str) -> bool {
    outcome.reasons.iter().any(|reason| reason.contains(phrase))
}

/// A host with guests until the end of the visit or of the event log fails the run, unless the
/// visit ends before the limit.
#[test]
fn host_never_free_of_guests_fails_run() {
    let owner_absent_event = || EventKind::OwnerAbsent {
        host: host_id(2),
        why: "no user is logged in".into(),
    };
    let visit = |later_events: Vec<(u64, EventKind)>| {
        let events = event_log([vec![(1000, owner_present_event(2, 1000))], later_events].concat());
        evaluated_outcome(
            &events,
            &[LOGIN_ON_HOST_2],
            &WorkerClocks::new(),
            &ProcessSamples::default(),
        )
    };
    let is_never_clean = |later_events| has_reason(&visit(later_events), "host 2 was not clean");
    let after_limit_us = 1000 + VACATING_MAX_US + 1;
    assert!(is_never_clean(vec![(after_limit_us, owner_absent_event())]));
    assert!(
        is_never_clean(vec![(
            after_limit_us,
            EventKind::Note {
                text: "the end".into()
            }
        )]),
        "the log ends"
    );
    assert!(!is_never_clean(vec![
        (2000, EventKind::HostVacated { host: host_id(2) }),
        (after_limit_us, owner_absent_event())
    ]));
    assert!(!is_never_clean(vec![(
        after_limit_us - 1,
        owner_absent_event()
    )]));
    assert_eq!(
        visit(vec![(after_limit_us - 1, owner_absent_event())]).short_visits,
        1
    );
}

/// A migration for the owner fails the run, unless the owner was logged in on the source host at
/// that time.
#[test]
fn migration_for_owner_needs_owner_on_host() {
    let migration_log = |at, from| {
        event_log(vec![
            (1000, owner_present_event(2, 1000)),
            (at, migrated_event(from, 0)),
        ])
    };
    let has_false_migration = |events: &[EventEntry], logins: &[ScriptedLogin]| {
        has_reason(
            &evaluated_outcome(
                events,
                logins,
                &WorkerClocks::new(),
                &ProcessSamples::default(),
            ),
            "a false reason",
        )
    };
    assert!(!has_false_migration(
        &migration_log(2000, 2),
        &[LOGIN_ON_HOST_2]
    ));
    assert!(
        has_false_migration(&migration_log(2000, 3), &[LOGIN_ON_HOST_2]),
        "she was on another host"
    );
    assert!(
        has_false_migration(&migration_log(20_000_000, 2), &[LOGIN_ON_HOST_2]),
        "she had left long ago"
    );
    assert!(
        has_false_migration(&migration_log(2000, 2), &[]),
        "she was nowhere"
    );
}

/// Guests that remain on a host after the limit fail the run. The limit includes time for the
/// transfer of the guests' memory.
#[test]
fn host_with_late_guests_fails_run() {
    let outcome_with_vacating = |at, bytes| {
        let vacated_event = EventKind::HostVacated { host: host_id(2) };
        let events = event_log(vec![
            (1000, owner_present_event(2, 1000)),
            (2000, migrated_event(2, bytes)),
            (at, vacated_event),
        ]);
        evaluated_outcome(
            &events,
            &[LOGIN_ON_HOST_2],
            &WorkerClocks::new(),
            &ProcessSamples::default(),
        )
    };
    assert!(outcome_with_vacating(900_000, 0).late.is_empty());
    assert!(has_reason(
        &outcome_with_vacating(1_200_000, 0),
        "had guests for longer than was promised"
    ));
    assert!(
        outcome_with_vacating(1_200_000, 50_000_000).late.is_empty(),
        "half a second for its bytes"
    );
    assert_eq!(outcome_with_vacating(900_000, 0).cleared_us, [899_000]);
}

/// Returns the event log of a login on host 2 whose two guests are paused and later resumed.
fn events_with_paused_guests() -> Vec<EventEntry> {
    let guests = vec![tid(7), tid(8)];
    let paused_event = EventKind::GuestsPaused {
        host: host_id(2),
        guests: guests.clone(),
        duration: Micros(9),
        why: String::new(),
        leftovers: Vec::new(),
    };
    let resumed_event = EventKind::GuestsResumed {
        host: host_id(2),
        guests,
        why: String::new(),
    };
    event_log(vec![
        (1000, owner_present_event(2, 1000)),
        (20_000, paused_event),
        (200_000, resumed_event),
    ])
}

/// Returns the clock readings of task 7. A gap is a time between two readings, as (begin, end).
fn worker_clocks(first_us: u64, last_us: u64, gaps: Vec<(u64, u64)>) -> WorkerClocks {
    WorkerClocks::from([(
        tid(7).to_string(),
        WorkerClock {
            first_reading_us: first_us,
            last_reading_us: last_us,
            gaps_us: gaps,
        },
    )])
}

/// Each worker and each kernel on an owner's host must be counted in one of two ways: with a
/// result, or as skipped.
#[test]
fn guests_are_judged_or_counted_as_skipped() {
    let events = events_with_paused_guests();
    let gaps = |gap| worker_clocks(500, 900_000, vec![gap]);
    let good_outcome = evaluated_outcome(
        &events,
        &[LOGIN_ON_HOST_2],
        &gaps((11_000, 210_000)),
        &ProcessSamples::default(),
    );
    assert_eq!(
        (good_outcome.stood_still_us, good_outcome.kernels_skipped),
        (vec![10_000], 1),
        "nobody has looked at the kernel"
    );
    let late_outcome = evaluated_outcome(
        &events,
        &[LOGIN_ON_HOST_2],
        &gaps((90_000, 210_000)),
        &ProcessSamples::default(),
    );
    assert!(has_reason(&late_outcome, "a worker ran longer") && late_outcome.ran_on.len() == 1);
    let running_outcome = evaluated_outcome(
        &events,
        &[LOGIN_ON_HOST_2],
        &gaps((300_000, 400_000)),
        &ProcessSamples::default(),
    );
    assert!(
        has_reason(&running_outcome, "a worker ran longer")
            && running_outcome.ran_on[0].ran_us == 199_000
    );
    let skipped_counts = |first, last| {
        let outcome = evaluated_outcome(
            &events,
            &[LOGIN_ON_HOST_2],
            &worker_clocks(first, last, vec![]),
            &ProcessSamples::default(),
        );
        (outcome.workers_skipped, outcome.ran_on.len())
    };
    assert_eq!(
        skipped_counts(200_000, 900_000),
        (1, 0),
        "it did not look at its clock yet"
    );
    assert_eq!(
        skipped_counts(199_000, 900_000),
        (0, 1),
        "it looked at its clock, and where is the gap?"
    );
    assert_eq!(
        skipped_counts(500, 1000 + GUEST_RUN_AFTER_LOGIN_MAX_US),
        (1, 0),
        "it looked at its clock no more"
    );
    assert_eq!(
        skipped_counts(500, 1001 + GUEST_RUN_AFTER_LOGIN_MAX_US),
        (0, 1),
        "nobody was to run then"
    );
    let unfinished_outcome = evaluated_outcome(
        &events[..2],
        &[LOGIN_ON_HOST_2],
        &gaps((11_000, 210_000)),
        &ProcessSamples::default(),
    );
    assert_eq!(unfinished_outcome.workers_skipped, 1);
}

#[test]
fn undetected_login_fails_run() {
    let events = event_log(vec![(1000, owner_present_event(2, 1000))]);
    assert!(!has_reason(
        &evaluated_outcome(
            &events,
            &[LOGIN_ON_HOST_2],
            &WorkerClocks::new(),
            &ProcessSamples::default()
        ),
        "no load watcher noticed"
    ));
    let login_on_other_host = ScriptedLogin {
        host_index: 3,
        ..LOGIN_ON_HOST_2
    };
    assert!(has_reason(
        &evaluated_outcome(
            &events,
            &[login_on_other_host],
            &WorkerClocks::new(),
            &ProcessSamples::default()
        ),
        "no load watcher noticed"
    ));
}
