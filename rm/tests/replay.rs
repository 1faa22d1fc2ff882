//! Replays of recordings, under the recorded policy and under another one.

use pvm_rm::decide::PlacementPolicy;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::recording::{RecordedInput, RecordingEntry};
use pvm_rm::replay::{self, recorded_policy};
use sempa_proto::load::{GuestLimits, LoadReport, LoadSample, OwnerVerdict};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::migration::Usage;
use sempa_proto::owner::{EvictionMode, GuestAccess};
use sempa_proto::table::{HostEntry, HostTable};
use sempa_proto::task::{SPAWN_NO_PARENT, SpawnRequest};
use sempa_proto::{Epoch, HostId, Micros, Tid};
use std::sync::Arc;

fn host_id(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn table(speeds: &[i32]) -> HostTable {
    let host = |(i, speed): (usize, &i32)| {
        let (name, arch) = (format!("h{}", i + 1), "LINUX64".to_string());
        HostEntry {
            id: host_id(i as u16 + 1),
            name,
            arch,
            speed: *speed,
            dsig: DSIG_X86_64,
            addresses: Vec::new(),
        }
    };
    HostTable {
        epoch: Epoch(1),
        hosts: speeds.iter().enumerate().map(host).collect(),
    }
}

fn report(host: u16, present: bool) -> RecordedInput {
    let (at, seen) = (Micros(8), Micros(8));
    let (owner, guests) = if present {
        (
            OwnerVerdict::Present {
                since: at,
                detected_at: seen,
            },
            GuestAccess::Paused {
                evict_at: Some(at),
                eviction: EvictionMode::Move,
            },
        )
    } else {
        (OwnerVerdict::Absent { since: None }, GuestAccess::Welcome)
    };
    let sample = LoadSample {
        cores: 1,
        available_bytes: 8 << 30,
        ..LoadSample::default()
    };
    let (why, guests_why, limits) = (
        "olga on pts/1".to_string(),
        String::new(),
        GuestLimits::default(),
    );
    let (confidence, logins) = (90, Vec::new());
    let report = LoadReport {
        host: host_id(host),
        at,
        sample,
        owner_verdict: owner,
        confidence,
        owner_reason: why,
        logins,
        access: guests,
        access_reason: guests_why,
        limits,
    };
    RecordedInput::Report { report, own: 0 }
}

fn entry(second: u64, input: RecordedInput) -> RecordingEntry {
    RecordingEntry {
        at: Micros::from_secs(second),
        input,
    }
}

/// Returns a recording with three hosts, of which the third is twice as fast, and a spawn of
/// `count` tasks of 60 seconds each.
fn spawn_recording(conduct: EffectivePolicy, count: u32) -> Vec<RecordingEntry> {
    let caller = Tid::task(host_id(1), 2).expect("a task");
    let tids: Vec<Tid> = (10..10 + count)
        .filter_map(|n| Tid::task(host_id(1), n))
        .collect();
    let request = SpawnRequest {
        file: "worker".into(),
        count,
        ..SpawnRequest::default()
    };
    let mut all = vec![
        entry(1, RecordedInput::Policy(conduct)),
        entry(1, RecordedInput::Hosts(table(&[1000, 1000, 2000]))),
    ];
    all.extend((1..=3).map(|host| entry(1, report(host, false))));
    let number = (caller, 7);
    all.push(entry(
        20,
        RecordedInput::Spawn {
            number,
            caller: host_id(1),
            user: 0,
            job: caller,
            request,
        },
    ));
    all.push(entry(
        20,
        RecordedInput::Started {
            number,
            tids: tids.clone(),
        },
    ));
    let used = Usage {
        user: Micros::from_secs(60),
        ..Usage::default()
    };
    all.extend(
        tids.into_iter()
            .map(|tid| entry(200, RecordedInput::Ended { tid, used })),
    );
    all
}

/// On unequal hosts, tasks end earlier under the load policy than under round robin.
#[test]
fn load_policy_beats_round_robin_on_unequal_hosts() {
    let round_robin = EffectivePolicy {
        placing: PlacementPolicy::RoundRobin,
        ..EffectivePolicy::default()
    };
    let entries = spawn_recording(round_robin, 4);
    assert_eq!(recorded_policy(&entries), round_robin.into());
    let slow = replay::run(&entries, round_robin).expect("it runs");
    let fast = replay::run(&entries, EffectivePolicy::default()).expect("it runs");
    assert_eq!(
        (slow.started, slow.finished, fast.started, fast.finished),
        (4, 4, 4, 4)
    );
    assert_eq!((slow.placed["h3"], fast.placed["h3"]), (1, 2));
    // Two tasks on a slow host take 120 s, two on the fast host 60 s.
    assert_eq!(
        (slow.last_end_s - fast.last_end_s).round(),
        60.0,
        "{slow:?} {fast:?}"
    );
    let text = replay::comparison_table([("recorded", &slow), ("other", &fast)]);
    assert!(
        text.contains("tasks that did all their work") && text.contains("tasks started on h3"),
        "{text}"
    );
    assert_eq!(
        fast,
        replay::run(&entries, EffectivePolicy::default()).expect("it runs"),
        "the same again"
    );
}

/// In a replay tasks migrate for rebalancing if the policy enables it, and because of owners under
/// every policy.
#[test]
fn replay_balances_and_evicts() {
    let balanced = EffectivePolicy {
        placing: PlacementPolicy::RoundRobin,
        balance: true,
        ..EffectivePolicy::default()
    };
    let mut entries = spawn_recording(balanced, 6);
    let figures = replay::run(&entries, balanced).expect("it runs");
    assert!(
        figures.moves_load >= 1 && figures.finished == 6,
        "{figures:?}"
    );
    entries.push(entry(40, report(3, true)));
    entries.sort_by_key(|entry| entry.at);
    let plain = EffectivePolicy {
        placing: PlacementPolicy::RoundRobin,
        ..EffectivePolicy::default()
    };
    let figures = replay::run(&entries, plain).expect("it runs");
    assert_eq!(
        (figures.moves_owner, figures.moves_load, figures.finished),
        (2, 0, 6)
    );
    assert!(
        figures.stood_still_s > 0.0 && figures.stood_still_s < 30.0,
        "{figures:?}"
    );
}

/// In a replay a spawn waits for a free host if the policy allows it, and is refused otherwise.
#[test]
fn replayed_spawn_waits_only_if_policy_allows() {
    let patient = EffectivePolicy {
        rules: pvm_rm::spawns::SpawnRules {
            wait: Micros::from_secs(300),
            ..Default::default()
        },
        ..EffectivePolicy::default()
    };
    let mut entries = spawn_recording(patient, 6);
    entries.extend((1..=3).map(|host| entry(10, report(host, true))));
    entries.push(entry(80, report(2, false)));
    entries.sort_by_key(|entry| entry.at);
    let waited = replay::run(&entries, patient).expect("it runs");
    assert_eq!(
        (waited.started, waited.refused, waited.finished),
        (6, 0, 6),
        "{waited:?}"
    );
    assert!((waited.waited_most_s - 60.0).abs() < 1.0, "{waited:?}");
    let refused = replay::run(&entries, EffectivePolicy::default()).expect("it runs");
    assert_eq!((refused.started, refused.refused), (0, 6));
}

/// In a replay no task is placed on a drained host until the end of the drain.
#[test]
fn replayed_drain_keeps_host_empty() {
    let plain = EffectivePolicy::default();
    let by = Tid::task(host_id(1), 3).expect("a task");
    let drain = |begun| RecordedInput::Drain {
        host: "h3".into(),
        by,
        begun,
        within: None,
    };
    let with = |inputs: &[(u64, bool)]| {
        let mut entries = spawn_recording(plain, 4);
        entries.extend(
            inputs
                .iter()
                .map(|(second, begun)| entry(*second, drain(*begun))),
        );
        entries.sort_by_key(|entry| entry.at);
        replay::run(&entries, plain).expect("it runs")
    };
    let before = with(&[(10, true)]);
    assert_eq!(
        (before.placed.get("h3"), before.started, before.finished),
        (None, 4, 4),
        "{before:?}"
    );
    let over = with(&[(10, true), (15, false)]);
    assert_eq!(over.placed["h3"], 2, "{over:?}");
    let during = with(&[(40, true)]);
    assert_eq!(
        (during.placed["h3"], during.moves_owner, during.finished),
        (2, 2, 4),
        "{during:?}"
    );
}

/// Returns a report in which the owner is present and requests the checkpoint of jobs that cannot
/// migrate (`there`), or is absent.
fn report_with_checkpoint_mode(host: u16, there: bool) -> RecordedInput {
    let RecordedInput::Report { mut report, own } = report(host, there) else {
        unreachable!("a report")
    };
    if let GuestAccess::Paused { eviction: then, .. } = &mut report.access {
        *then = EvictionMode::Checkpoint;
    }
    RecordedInput::Report { report, own }
}

/// If owners request it, jobs are vacated in a replay and restarted when there is room.
#[test]
fn replay_vacates_and_restarts_jobs() {
    let plain = EffectivePolicy::default();
    // A top task computes little, spawns one task, and ends after that task.
    let (console, master) = (
        Tid::task(host_id(1), 2).expect("a task"),
        Tid::task(host_id(1), 9).expect("a task"),
    );
    let first = SpawnRequest {
        file: "master".into(),
        count: 1,
        flags: SPAWN_NO_PARENT,
        ..SpawnRequest::default()
    };
    let mut entries = spawn_recording(plain, 1);
    for entry in &mut entries {
        match &mut entry.input {
            RecordedInput::Spawn { number, job, .. } => (number.0, *job) = (master, master),
            RecordedInput::Started { number, .. } => number.0 = master,
            _ => {}
        }
    }
    entries.push(entry(
        15,
        RecordedInput::Spawn {
            number: (console, 1),
            caller: host_id(1),
            user: 0,
            job: console,
            request: first,
        },
    ));
    entries.push(entry(
        15,
        RecordedInput::Started {
            number: (console, 1),
            tids: vec![master],
        },
    ));
    entries.push(entry(
        201,
        RecordedInput::Ended {
            tid: master,
            used: Usage {
                user: Micros::from_secs(1),
                ..Usage::default()
            },
        },
    ));
    let with = |more: Vec<RecordingEntry>| {
        let mut all = entries.clone();
        all.extend(more);
        all.sort_by_key(|entry| entry.at);
        replay::run(&all, plain).expect("it runs")
    };
    let undisturbed = with(Vec::new());
    assert_eq!(
        (
            undisturbed.finished,
            undisturbed.parked,
            undisturbed.refused
        ),
        (2, 0, 0),
        "{undisturbed:?}"
    );
    let owners = |second: u64, there: bool| {
        (1..=3).map(move |host| entry(second, report_with_checkpoint_mode(host, there)))
    };
    let parked = with(owners(40, true).chain(owners(640, false)).collect());
    assert_eq!((parked.finished, parked.parked), (2, 1), "{parked:?}");
    // The task had done a third of its work in the 20 seconds before the owners arrived. The
    // remaining work takes 40 seconds.
    let back = Micros::from_secs(640).since(Micros::from_secs(1)).0 as f64 / 1e6;
    let left = parked.last_end_s - back;
    assert_eq!(undisturbed.last_end_s.round(), 79.0, "{undisturbed:?}");
    assert!((40.0..50.0).contains(&left), "{left} {parked:?}");
    let text = replay::comparison_table([("recorded", &undisturbed), ("other", &parked)]);
    assert!(text.contains("jobs vacated because of owners"), "{text}");
}

/// If two ends of a task were recorded, its work in the replay is the sum of both.
#[test]
fn task_that_ended_twice_has_all_its_work() {
    let plain = EffectivePolicy::default();
    let mut entries = spawn_recording(plain, 1);
    let tid = Tid::task(host_id(1), 10).expect("a task");
    entries.push(entry(
        400,
        RecordedInput::Ended {
            tid,
            used: Usage {
                user: Micros::from_secs(40),
                ..Usage::default()
            },
        },
    ));
    let figures = replay::run(&entries, plain).expect("it runs");
    // The task runs on the host with double speed.
    assert_eq!(
        (figures.finished, figures.run_mean_s.round()),
        (1, 50.0),
        "{figures:?}"
    );
}

/// Different users of a recording are different users in its replay.
#[test]
fn replay_keeps_users_apart() {
    let mut entries = spawn_recording(EffectivePolicy::default(), 2);
    let other = Tid::task(host_id(2), 3).expect("a task");
    let request = SpawnRequest {
        file: "worker".into(),
        count: 1,
        ..SpawnRequest::default()
    };
    let input = RecordedInput::Spawn {
        number: (other, 1),
        caller: host_id(2),
        user: 6,
        job: other,
        request,
    };
    entries.push(entry(30, input));
    let tid = Tid::task(host_id(2), 9).expect("a task");
    entries.push(entry(
        30,
        RecordedInput::Started {
            number: (other, 1),
            tids: vec![tid],
        },
    ));
    let used = Usage {
        user: Micros::from_secs(60),
        ..Usage::default()
    };
    entries.push(entry(200, RecordedInput::Ended { tid, used }));
    entries.sort_by_key(|entry| entry.at);
    let figures = replay::run(&entries, EffectivePolicy::default()).expect("it runs");
    let of = |user: u32| (figures.users[&user].answered, figures.users[&user].finished);
    assert_eq!(
        (of(0), of(6), figures.users.len()),
        ((1, 2), (1, 1), 2),
        "{figures:?}"
    );
    let limits = pvm_rm::decide::Limits {
        user_tasks: Some(1),
        job_tasks: None,
    };
    let rules = pvm_rm::spawns::SpawnRules {
        limits,
        ..Default::default()
    };
    let limited = replay::run(
        &entries,
        EffectivePolicy {
            rules,
            ..EffectivePolicy::default()
        },
    )
    .expect("it runs");
    assert_eq!(
        (limited.started, limited.refused),
        (1, 2),
        "one is allowed to each: {limited:?}"
    );
}

/// Labels of hosts are part of a recording and apply under every policy.
#[test]
fn host_labels_are_part_of_recording() {
    let mut entries = spawn_recording(EffectivePolicy::default(), 2);
    for entry in &mut entries {
        if let RecordedInput::Spawn { request, .. } = &mut entry.input {
            request.place = "?disk = ssd".into();
        }
    }
    let round_robin = EffectivePolicy {
        placing: PlacementPolicy::RoundRobin,
        ..EffectivePolicy::default()
    };
    let before = replay::run(&entries, round_robin).expect("an older record runs");
    assert_eq!(
        (before.started, before.refused),
        (0, 2),
        "nobody knows: {before:?}"
    );
    let labels = [(
        "h2".to_string(),
        Arc::new([("disk".to_string(), "ssd".to_string())].into()),
    )]
    .into();
    entries.insert(
        2,
        entry(1, RecordedInput::labels(&labels).expect("there are some")),
    );
    for conduct in [round_robin, EffectivePolicy::default()] {
        let figures = replay::run(&entries, conduct).expect("it runs");
        assert_eq!(
            (figures.placed.get("h2"), figures.started),
            (Some(&2), 2),
            "{figures:?}"
        );
    }
    assert_eq!(RecordedInput::labels(&Default::default()), None);
}

/// Recorded policy changes are replayed, unless the replay uses another policy.
#[test]
fn recorded_policy_changes_are_replayed() {
    let round_robin = EffectivePolicy {
        placing: PlacementPolicy::RoundRobin,
        ..EffectivePolicy::default()
    };
    let mut entries = spawn_recording(round_robin, 4);
    assert!(!recorded_policy(&entries).changes_as_recorded);
    entries.push(entry(10, RecordedInput::Policy(EffectivePolicy::default())));
    entries.sort_by_key(|entry| entry.at);
    let recorded = replay::run(&entries, recorded_policy(&entries)).expect("it runs");
    let constant = replay::run(&entries, round_robin).expect("it runs");
    assert_eq!(
        (recorded.placed["h3"], constant.placed["h3"]),
        (2, 1),
        "{recorded:?} {constant:?}"
    );
    assert_eq!(
        recorded.policy,
        format!("{}; later as recorded", constant.policy)
    );
}
