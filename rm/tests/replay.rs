//! Replays of recordings under the recorded policy and under other policies.

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

fn host_table(speeds: &[i32]) -> HostTable {
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

/// Returns a report in which the owner is present and requests migrations, or is absent.
fn owner_report(host: u16, is_owner_present: bool) -> RecordedInput {
    let (time, detected_at) = (Micros(8), Micros(8));
    let (owner, access) = if is_owner_present {
        (
            OwnerVerdict::Present {
                since: time,
                detected_at,
            },
            GuestAccess::Paused {
                evict_at: Some(time),
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
    let (owner_reason, access_reason, limits) = (
        "olga on pts/1".to_string(),
        String::new(),
        GuestLimits::default(),
    );
    let (confidence, logins) = (90, Vec::new());
    let report = LoadReport {
        host: host_id(host),
        at: time,
        sample,
        owner_verdict: owner,
        confidence_percent: confidence,
        owner_reason,
        logins,
        guest_access: access,
        access_reason,
        guest_limits: limits,
    };
    RecordedInput::Report {
        report,
        vm_task_count: 0,
    }
}

fn entry_at(time_s: u64, input: RecordedInput) -> RecordingEntry {
    RecordingEntry {
        at: Micros::from_secs(time_s),
        input,
    }
}

/// Returns a recording of a spawn of `count` tasks with 60 seconds of work each. The third of the
/// three hosts is twice as fast as the first two.
fn spawn_recording(policy: EffectivePolicy, count: u32) -> Vec<RecordingEntry> {
    let caller = Tid::for_task(host_id(1), 2).expect("a task");
    let tids: Vec<Tid> = (10..10 + count)
        .filter_map(|n| Tid::for_task(host_id(1), n))
        .collect();
    let request = SpawnRequest {
        program: "worker".into(),
        task_count: count,
        ..SpawnRequest::default()
    };
    let mut entries = vec![
        entry_at(1, RecordedInput::Policy(policy)),
        entry_at(1, RecordedInput::Hosts(host_table(&[1000, 1000, 2000]))),
    ];
    entries.extend((1..=3).map(|host| entry_at(1, owner_report(host, false))));
    let request_number = (caller, 7);
    entries.push(entry_at(
        20,
        RecordedInput::Spawn {
            request_id: request_number,
            caller_host: host_id(1),
            user: 0,
            job: caller,
            request,
        },
    ));
    entries.push(entry_at(
        20,
        RecordedInput::SpawnAnswered {
            request_id: request_number,
            tids: tids.clone(),
        },
    ));
    let usage = Usage {
        user: Micros::from_secs(60),
        ..Usage::default()
    };
    entries.extend(
        tids.into_iter()
            .map(|tid| entry_at(200, RecordedInput::TaskEnded { tid, usage })),
    );
    entries
}

/// On hosts of different speeds, tasks end earlier under the load policy than under round robin.
#[test]
fn load_policy_beats_round_robin_on_unequal_hosts() {
    let round_robin_policy = EffectivePolicy {
        placement: PlacementPolicy::RoundRobin,
        ..EffectivePolicy::default()
    };
    let entries = spawn_recording(round_robin_policy, 4);
    assert_eq!(recorded_policy(&entries), round_robin_policy.into());
    let round_robin_figures =
        replay::replay_recording(&entries, round_robin_policy).expect("it runs");
    let load_figures =
        replay::replay_recording(&entries, EffectivePolicy::default()).expect("it runs");
    assert_eq!(
        (
            round_robin_figures.started,
            round_robin_figures.finished,
            load_figures.started,
            load_figures.finished
        ),
        (4, 4, 4, 4)
    );
    assert_eq!(
        (round_robin_figures.placed["h3"], load_figures.placed["h3"]),
        (1, 2)
    );
    // Two tasks on a slow host take 120 s, two on the fast host 60 s.
    assert_eq!(
        (round_robin_figures.last_end_s - load_figures.last_end_s).round(),
        60.0,
        "{round_robin_figures:?} {load_figures:?}"
    );
    let text =
        replay::comparison_table([("recorded", &round_robin_figures), ("other", &load_figures)]);
    assert!(
        text.contains("tasks that did all their work") && text.contains("tasks started on h3"),
        "{text}"
    );
    assert_eq!(
        load_figures,
        replay::replay_recording(&entries, EffectivePolicy::default()).expect("it runs"),
        "the same again"
    );
}

/// In a replay, tasks migrate for rebalancing only if the policy enables rebalancing. They migrate
/// because of owners under every policy.
#[test]
fn replay_balances_and_evicts() {
    let balancing_policy = EffectivePolicy {
        placement: PlacementPolicy::RoundRobin,
        rebalances: true,
        ..EffectivePolicy::default()
    };
    let mut entries = spawn_recording(balancing_policy, 6);
    let figures = replay::replay_recording(&entries, balancing_policy).expect("it runs");
    assert!(
        figures.moves_load >= 1 && figures.finished == 6,
        "{figures:?}"
    );
    entries.push(entry_at(40, owner_report(3, true)));
    entries.sort_by_key(|entry| entry.at);
    let round_robin_policy = EffectivePolicy {
        placement: PlacementPolicy::RoundRobin,
        ..EffectivePolicy::default()
    };
    let figures = replay::replay_recording(&entries, round_robin_policy).expect("it runs");
    assert_eq!(
        (figures.moves_owner, figures.moves_load, figures.finished),
        (2, 0, 6)
    );
    assert!(
        figures.stood_still_s > 0.0 && figures.stood_still_s < 30.0,
        "{figures:?}"
    );
}

/// In a replay, a spawn waits for a free host if the policy allows waiting. Otherwise the spawn is
/// refused.
#[test]
fn replayed_spawn_waits_only_if_policy_allows() {
    let waiting_policy = EffectivePolicy {
        spawn_rules: pvm_rm::spawns::SpawnRules {
            wait_max: Micros::from_secs(300),
            ..Default::default()
        },
        ..EffectivePolicy::default()
    };
    let mut entries = spawn_recording(waiting_policy, 6);
    entries.extend((1..=3).map(|host| entry_at(10, owner_report(host, true))));
    entries.push(entry_at(80, owner_report(2, false)));
    entries.sort_by_key(|entry| entry.at);
    let waiting_figures = replay::replay_recording(&entries, waiting_policy).expect("it runs");
    assert_eq!(
        (
            waiting_figures.started,
            waiting_figures.refused,
            waiting_figures.finished
        ),
        (6, 0, 6),
        "{waiting_figures:?}"
    );
    assert!(
        (waiting_figures.waited_most_s - 60.0).abs() < 1.0,
        "{waiting_figures:?}"
    );
    let refusing_figures =
        replay::replay_recording(&entries, EffectivePolicy::default()).expect("it runs");
    assert_eq!((refusing_figures.started, refusing_figures.refused), (0, 6));
}

/// In a replay no task is placed on a drained host until the end of the drain.
#[test]
fn replayed_drain_keeps_host_empty() {
    let default_policy = EffectivePolicy::default();
    let requester = Tid::for_task(host_id(1), 3).expect("a task");
    let drain_input = |is_start| RecordedInput::Drain {
        host: "h3".into(),
        requester,
        is_start,
        time_until_deadline: None,
    };
    let replay_with = |inputs: &[(u64, bool)]| {
        let mut entries = spawn_recording(default_policy, 4);
        entries.extend(
            inputs
                .iter()
                .map(|(time_s, is_start)| entry_at(*time_s, drain_input(*is_start))),
        );
        entries.sort_by_key(|entry| entry.at);
        replay::replay_recording(&entries, default_policy).expect("it runs")
    };
    let early_drain_figures = replay_with(&[(10, true)]);
    assert_eq!(
        (
            early_drain_figures.placed.get("h3"),
            early_drain_figures.started,
            early_drain_figures.finished
        ),
        (None, 4, 4),
        "{early_drain_figures:?}"
    );
    let ended_drain_figures = replay_with(&[(10, true), (15, false)]);
    assert_eq!(
        ended_drain_figures.placed["h3"], 2,
        "{ended_drain_figures:?}"
    );
    let late_drain_figures = replay_with(&[(40, true)]);
    assert_eq!(
        (
            late_drain_figures.placed["h3"],
            late_drain_figures.moves_owner,
            late_drain_figures.finished
        ),
        (2, 2, 4),
        "{late_drain_figures:?}"
    );
}

/// Returns a report of a host. If `is_owner_present` is true, the owner is present and requests the
/// checkpoint of jobs that cannot migrate. Otherwise the owner is absent.
fn report_with_checkpoint_mode(host: u16, is_owner_present: bool) -> RecordedInput {
    let RecordedInput::Report {
        mut report,
        vm_task_count: vm_tasks,
    } = owner_report(host, is_owner_present)
    else {
        unreachable!("a report")
    };
    if let GuestAccess::Paused {
        eviction: eviction_mode,
        ..
    } = &mut report.guest_access
    {
        *eviction_mode = EvictionMode::Checkpoint;
    }
    RecordedInput::Report {
        report,
        vm_task_count: vm_tasks,
    }
}

/// Returns a recording in which the first task of a job, with one second of work, spawns a task
/// with 60 seconds of work and ends after the spawned task.
fn recording_with_top_task(policy: EffectivePolicy) -> Vec<RecordingEntry> {
    let (console, top_task) = (
        Tid::for_task(host_id(1), 2).expect("a task"),
        Tid::for_task(host_id(1), 9).expect("a task"),
    );
    let top_request = SpawnRequest {
        program: "master".into(),
        task_count: 1,
        flags: SPAWN_NO_PARENT,
        ..SpawnRequest::default()
    };
    let mut entries = spawn_recording(policy, 1);
    for entry in &mut entries {
        match &mut entry.input {
            RecordedInput::Spawn {
                request_id: number,
                job,
                ..
            } => (number.0, *job) = (top_task, top_task),
            RecordedInput::SpawnAnswered {
                request_id: number, ..
            } => number.0 = top_task,
            _ => {}
        }
    }
    entries.push(entry_at(
        15,
        RecordedInput::Spawn {
            request_id: (console, 1),
            caller_host: host_id(1),
            user: 0,
            job: console,
            request: top_request,
        },
    ));
    entries.push(entry_at(
        15,
        RecordedInput::SpawnAnswered {
            request_id: (console, 1),
            tids: vec![top_task],
        },
    ));
    entries.push(entry_at(
        201,
        RecordedInput::TaskEnded {
            tid: top_task,
            usage: Usage {
                user: Micros::from_secs(1),
                ..Usage::default()
            },
        },
    ));
    entries
}

/// If the owners request checkpoints, a replay vacates jobs and restarts them when there is room.
#[test]
fn replay_vacates_and_restarts_jobs() {
    let default_policy = EffectivePolicy::default();
    let entries = recording_with_top_task(default_policy);
    let replay_with = |owner_entries: Vec<RecordingEntry>| {
        let mut all_entries = entries.clone();
        all_entries.extend(owner_entries);
        all_entries.sort_by_key(|entry| entry.at);
        replay::replay_recording(&all_entries, default_policy).expect("it runs")
    };
    let figures_without_owners = replay_with(Vec::new());
    assert_eq!(
        (
            figures_without_owners.finished,
            figures_without_owners.parked,
            figures_without_owners.refused
        ),
        (2, 0, 0),
        "{figures_without_owners:?}"
    );
    let owner_reports = |time_s: u64, are_present: bool| {
        (1..=3).map(move |host| entry_at(time_s, report_with_checkpoint_mode(host, are_present)))
    };
    let figures_with_owners = replay_with(
        owner_reports(40, true)
            .chain(owner_reports(640, false))
            .collect(),
    );
    assert_eq!(
        (figures_with_owners.finished, figures_with_owners.parked),
        (2, 1),
        "{figures_with_owners:?}"
    );
    // The task had done a third of its work in the 20 seconds before the owners arrived. The
    // remaining work takes 40 seconds.
    let departure_s = Micros::from_secs(640).since(Micros::from_secs(1)).0 as f64 / 1e6;
    let remaining_s = figures_with_owners.last_end_s - departure_s;
    assert_eq!(
        figures_without_owners.last_end_s.round(),
        79.0,
        "{figures_without_owners:?}"
    );
    assert!(
        (40.0..50.0).contains(&remaining_s),
        "{remaining_s} {figures_with_owners:?}"
    );
    let text = replay::comparison_table([
        ("recorded", &figures_without_owners),
        ("other", &figures_with_owners),
    ]);
    assert!(text.contains("jobs vacated because of owners"), "{text}");
}

/// If two ends of a task were recorded, its work in the replay is the sum of the work at both ends.
#[test]
fn task_that_ended_twice_has_all_its_work() {
    let default_policy = EffectivePolicy::default();
    let mut entries = spawn_recording(default_policy, 1);
    let tid = Tid::for_task(host_id(1), 10).expect("a task");
    entries.push(entry_at(
        400,
        RecordedInput::TaskEnded {
            tid,
            usage: Usage {
                user: Micros::from_secs(40),
                ..Usage::default()
            },
        },
    ));
    let figures = replay::replay_recording(&entries, default_policy).expect("it runs");
    // The task runs on the host with double speed.
    assert_eq!(
        (figures.finished, figures.run_mean_s.round()),
        (1, 50.0),
        "{figures:?}"
    );
}

/// In a replay, each user of the recording has separate figures and separate limits.
#[test]
fn replay_keeps_users_apart() {
    let mut entries = spawn_recording(EffectivePolicy::default(), 2);
    let second_caller = Tid::for_task(host_id(2), 3).expect("a task");
    let request = SpawnRequest {
        program: "worker".into(),
        task_count: 1,
        ..SpawnRequest::default()
    };
    let input = RecordedInput::Spawn {
        request_id: (second_caller, 1),
        caller_host: host_id(2),
        user: 6,
        job: second_caller,
        request,
    };
    entries.push(entry_at(30, input));
    let tid = Tid::for_task(host_id(2), 9).expect("a task");
    entries.push(entry_at(
        30,
        RecordedInput::SpawnAnswered {
            request_id: (second_caller, 1),
            tids: vec![tid],
        },
    ));
    let usage = Usage {
        user: Micros::from_secs(60),
        ..Usage::default()
    };
    entries.push(entry_at(200, RecordedInput::TaskEnded { tid, usage }));
    entries.sort_by_key(|entry| entry.at);
    let figures = replay::replay_recording(&entries, EffectivePolicy::default()).expect("it runs");
    let user_counts = |user: u32| (figures.users[&user].answered, figures.users[&user].finished);
    assert_eq!(
        (user_counts(0), user_counts(6), figures.users.len()),
        ((1, 2), (1, 1), 2),
        "{figures:?}"
    );
    let limits = pvm_rm::decide::TaskLimits {
        user_tasks_max: Some(1),
        job_tasks_max: None,
    };
    let rules = pvm_rm::spawns::SpawnRules {
        task_limits: limits,
        ..Default::default()
    };
    let limited_figures = replay::replay_recording(
        &entries,
        EffectivePolicy {
            spawn_rules: rules,
            ..EffectivePolicy::default()
        },
    )
    .expect("it runs");
    assert_eq!(
        (limited_figures.started, limited_figures.refused),
        (1, 2),
        "one is allowed to each: {limited_figures:?}"
    );
}

/// The labels of hosts are part of a recording. They apply under every policy.
#[test]
fn host_labels_are_part_of_recording() {
    let mut entries = spawn_recording(EffectivePolicy::default(), 2);
    for entry in &mut entries {
        if let RecordedInput::Spawn { request, .. } = &mut entry.input {
            request.where_arg = "?disk = ssd".into();
        }
    }
    let round_robin_policy = EffectivePolicy {
        placement: PlacementPolicy::RoundRobin,
        ..EffectivePolicy::default()
    };
    let unlabelled_figures =
        replay::replay_recording(&entries, round_robin_policy).expect("an older record runs");
    assert_eq!(
        (unlabelled_figures.started, unlabelled_figures.refused),
        (0, 2),
        "nobody knows: {unlabelled_figures:?}"
    );
    let labels = [(
        "h2".to_string(),
        Arc::new([("disk".to_string(), "ssd".to_string())].into()),
    )]
    .into();
    entries.insert(
        2,
        entry_at(1, RecordedInput::labels(&labels).expect("there are some")),
    );
    for policy in [round_robin_policy, EffectivePolicy::default()] {
        let figures = replay::replay_recording(&entries, policy).expect("it runs");
        assert_eq!(
            (figures.placed.get("h2"), figures.started),
            (Some(&2), 2),
            "{figures:?}"
        );
    }
    assert_eq!(RecordedInput::labels(&Default::default()), None);
}

/// A replay applies the recorded policy changes, unless it uses another policy.
#[test]
fn recorded_policy_changes_are_replayed() {
    let round_robin_policy = EffectivePolicy {
        placement: PlacementPolicy::RoundRobin,
        ..EffectivePolicy::default()
    };
    let mut entries = spawn_recording(round_robin_policy, 4);
    assert!(!recorded_policy(&entries).replays_changes);
    entries.push(entry_at(
        10,
        RecordedInput::Policy(EffectivePolicy::default()),
    ));
    entries.sort_by_key(|entry| entry.at);
    let recorded_figures =
        replay::replay_recording(&entries, recorded_policy(&entries)).expect("it runs");
    let constant_figures = replay::replay_recording(&entries, round_robin_policy).expect("it runs");
    assert_eq!(
        (recorded_figures.placed["h3"], constant_figures.placed["h3"]),
        (2, 1),
        "{recorded_figures:?} {constant_figures:?}"
    );
    assert_eq!(
        recorded_figures.policy,
        format!("{}; later as recorded", constant_figures.policy)
    );
}
