//! Replays of recordings, under the recorded policy and another one.

use pvm_rm::decide::Policy;
use pvm_rm::policy::Conduct;
use pvm_rm::recording::{Entry, Input};
use pvm_rm::replay::{self, recorded_policy};
use sempa_proto::load::{GuestLimits, LoadReport, LoadSample, OwnerVerdict};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::migration::Usage;
use sempa_proto::owner::{EvictionMode, GuestAccess};
use sempa_proto::table::{HostEntry, HostTable};
use sempa_proto::task::{SPAWN_NO_PARENT, SpawnRequest};
use sempa_proto::{Epoch, HostId, Micros, Tid};
use std::sync::Arc;

fn h(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn table(speeds: &[i32]) -> HostTable {
    let host = |(i, speed): (usize, &i32)| {
        let (name, arch) = (format!("h{}", i + 1), "LINUX64".to_string());
        HostEntry {
            id: h(i as u16 + 1),
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

fn report(host: u16, there: bool) -> Input {
    let (at, seen) = (Micros(8), Micros(8));
    let (owner, guests) = if there {
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
        host: h(host),
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
    Input::Report { report, own: 0 }
}

fn entry(second: u64, input: Input) -> Entry {
    Entry {
        at: Micros::from_secs(second),
        input,
    }
}

/// Three hosts, the third twice as fast, and a spawn of `count` tasks of 60 seconds each.
fn farm(conduct: Conduct, count: u32) -> Vec<Entry> {
    let caller = Tid::task(h(1), 2).expect("a task");
    let tids: Vec<Tid> = (10..10 + count)
        .filter_map(|n| Tid::task(h(1), n))
        .collect();
    let request = SpawnRequest {
        file: "worker".into(),
        count,
        ..SpawnRequest::default()
    };
    let mut all = vec![
        entry(1, Input::Policy(conduct)),
        entry(1, Input::Hosts(table(&[1000, 1000, 2000]))),
    ];
    all.extend((1..=3).map(|host| entry(1, report(host, false))));
    let number = (caller, 7);
    all.push(entry(
        20,
        Input::Spawn {
            number,
            caller: h(1),
            user: 0,
            job: caller,
            request,
        },
    ));
    all.push(entry(
        20,
        Input::Started {
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
            .map(|tid| entry(200, Input::Ended { tid, used })),
    );
    all
}

/// On unequal hosts the load policy is faster than round-robin.
#[test]
fn load_policy_beats_round_robin_on_unequal_hosts() {
    let round_robin = Conduct {
        placing: Policy::RoundRobin,
        ..Conduct::default()
    };
    let entries = farm(round_robin, 4);
    assert_eq!(recorded_policy(&entries), round_robin.into());
    let slow = replay::run(&entries, round_robin).expect("it runs");
    let fast = replay::run(&entries, Conduct::default()).expect("it runs");
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
    let text = replay::table([("recorded", &slow), ("other", &fast)]);
    assert!(
        text.contains("tasks that did all their work") && text.contains("tasks started on h3"),
        "{text}"
    );
    assert_eq!(
        fast,
        replay::run(&entries, Conduct::default()).expect("it runs"),
        "the same again"
    );
}

/// Tasks migrate in a replay for balancing, and for owners under any policy.
#[test]
fn replay_balances_and_evicts() {
    let balanced = Conduct {
        placing: Policy::RoundRobin,
        balance: true,
        ..Conduct::default()
    };
    let mut entries = farm(balanced, 6);
    let figures = replay::run(&entries, balanced).expect("it runs");
    assert!(
        figures.moves_load >= 1 && figures.finished == 6,
        "{figures:?}"
    );
    entries.push(entry(40, report(3, true)));
    entries.sort_by_key(|entry| entry.at);
    let plain = Conduct {
        placing: Policy::RoundRobin,
        ..Conduct::default()
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

/// A spawn that may wait does so in a replay; a policy without waiting refuses it.
#[test]
fn replayed_spawn_waits_only_if_policy_allows() {
    let patient = Conduct {
        rules: pvm_rm::spawns::Rules {
            wait: Micros::from_secs(300),
            ..Default::default()
        },
        ..Conduct::default()
    };
    let mut entries = farm(patient, 6);
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
    let refused = replay::run(&entries, Conduct::default()).expect("it runs");
    assert_eq!((refused.started, refused.refused), (0, 6));
}

/// A drained host gets no tasks in a replay until the drain is over.
#[test]
fn replayed_drain_keeps_host_empty() {
    let plain = Conduct::default();
    let by = Tid::task(h(1), 3).expect("a task");
    let drain = |begun| Input::Drain {
        host: "h3".into(),
        by,
        begun,
        within: None,
    };
    let with = |inputs: &[(u64, bool)]| {
        let mut entries = farm(plain, 4);
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

/// A report that the owner is present and wants jobs that cannot migrate checkpointed, or that the
/// owner has left.
fn parking(host: u16, there: bool) -> Input {
    let Input::Report { mut report, own } = report(host, there) else {
        unreachable!("a report")
    };
    if let GuestAccess::Paused { eviction: then, .. } = &mut report.access {
        *then = EvictionMode::Checkpoint;
    }
    Input::Report { report, own }
}

/// Jobs that owners want checkpointed are vacated in a replay and restarted when there is room.
#[test]
fn replay_vacates_and_restarts_jobs() {
    let plain = Conduct::default();
    // A root task that computes little, spawns one task, and ends when that task has ended.
    let (console, master) = (
        Tid::task(h(1), 2).expect("a task"),
        Tid::task(h(1), 9).expect("a task"),
    );
    let first = SpawnRequest {
        file: "master".into(),
        count: 1,
        flags: SPAWN_NO_PARENT,
        ..SpawnRequest::default()
    };
    let mut entries = farm(plain, 1);
    for entry in &mut entries {
        match &mut entry.input {
            Input::Spawn { number, job, .. } => (number.0, *job) = (master, master),
            Input::Started { number, .. } => number.0 = master,
            _ => {}
        }
    }
    entries.push(entry(
        15,
        Input::Spawn {
            number: (console, 1),
            caller: h(1),
            user: 0,
            job: console,
            request: first,
        },
    ));
    entries.push(entry(
        15,
        Input::Started {
            number: (console, 1),
            tids: vec![master],
        },
    ));
    entries.push(entry(
        201,
        Input::Ended {
            tid: master,
            used: Usage {
                user: Micros::from_secs(1),
                ..Usage::default()
            },
        },
    ));
    let with = |more: Vec<Entry>| {
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
    let owners =
        |second: u64, there: bool| (1..=3).map(move |host| entry(second, parking(host, there)));
    let parked = with(owners(40, true).chain(owners(640, false)).collect());
    assert_eq!((parked.finished, parked.parked), (2, 1), "{parked:?}");
    // A third of the work was done in the 20 seconds before the owners came; the rest takes 40
    // seconds.
    let back = Micros::from_secs(640).since(Micros::from_secs(1)).0 as f64 / 1e6;
    let left = parked.last_end_s - back;
    assert_eq!(undisturbed.last_end_s.round(), 79.0, "{undisturbed:?}");
    assert!((40.0..50.0).contains(&left), "{left} {parked:?}");
    let text = replay::table([("recorded", &undisturbed), ("other", &parked)]);
    assert!(text.contains("jobs vacated because of owners"), "{text}");
}

/// A task that was recorded as ended twice has the sum of its work in a replay.
#[test]
fn task_that_ended_twice_has_all_its_work() {
    let plain = Conduct::default();
    let mut entries = farm(plain, 1);
    let tid = Tid::task(h(1), 10).expect("a task");
    entries.push(entry(
        400,
        Input::Ended {
            tid,
            used: Usage {
                user: Micros::from_secs(40),
                ..Usage::default()
            },
        },
    ));
    let figures = replay::run(&entries, plain).expect("it runs");
    // The task runs on the host that is twice as fast.
    assert_eq!(
        (figures.finished, figures.run_mean_s.round()),
        (1, 50.0),
        "{figures:?}"
    );
}

/// The users of a recording are distinct users in its replay.
#[test]
fn replay_keeps_users_apart() {
    let mut entries = farm(Conduct::default(), 2);
    let other = Tid::task(h(2), 3).expect("a task");
    let request = SpawnRequest {
        file: "worker".into(),
        count: 1,
        ..SpawnRequest::default()
    };
    let input = Input::Spawn {
        number: (other, 1),
        caller: h(2),
        user: 6,
        job: other,
        request,
    };
    entries.push(entry(30, input));
    let tid = Tid::task(h(2), 9).expect("a task");
    entries.push(entry(
        30,
        Input::Started {
            number: (other, 1),
            tids: vec![tid],
        },
    ));
    let used = Usage {
        user: Micros::from_secs(60),
        ..Usage::default()
    };
    entries.push(entry(200, Input::Ended { tid, used }));
    entries.sort_by_key(|entry| entry.at);
    let figures = replay::run(&entries, Conduct::default()).expect("it runs");
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
    let rules = pvm_rm::spawns::Rules {
        limits,
        ..Default::default()
    };
    let limited = replay::run(
        &entries,
        Conduct {
            rules,
            ..Conduct::default()
        },
    )
    .expect("it runs");
    assert_eq!(
        (limited.started, limited.refused),
        (1, 2),
        "one is allowed to each: {limited:?}"
    );
}

/// Labels of hosts are part of a recording and apply under any policy.
#[test]
fn host_labels_are_part_of_recording() {
    let mut entries = farm(Conduct::default(), 2);
    for entry in &mut entries {
        if let Input::Spawn { request, .. } = &mut entry.input {
            request.place = "?disk = ssd".into();
        }
    }
    let round_robin = Conduct {
        placing: Policy::RoundRobin,
        ..Conduct::default()
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
    entries.insert(2, entry(1, Input::labels(&labels).expect("there are some")));
    for conduct in [round_robin, Conduct::default()] {
        let figures = replay::run(&entries, conduct).expect("it runs");
        assert_eq!(
            (figures.placed.get("h2"), figures.started),
            (Some(&2), 2),
            "{figures:?}"
        );
    }
    assert_eq!(Input::labels(&Default::default()), None);
}

/// Policy changes of a recording are replayed unless another policy is given.
#[test]
fn recorded_policy_changes_are_replayed() {
    let round_robin = Conduct {
        placing: Policy::RoundRobin,
        ..Conduct::default()
    };
    let mut entries = farm(round_robin, 4);
    assert!(!recorded_policy(&entries).changes);
    entries.push(entry(10, Input::Policy(Conduct::default())));
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
