//! Spawns that wait for a long time while smaller ones are placed before them.

use crate::common::{TestBed, client, request, rm_tid as own, world};
use crate::{options_with_policy, query};
use bytes::Bytes;
use pvm_rm::decide::{Limits, RESERVE_AFTER};
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::TAG_POLICY;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{CTX_RM, HostState, RmQuery, RmReply};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::VecDeque;

/// Two hosts with room for two tasks each, which are full of small tasks. One small task ends every
/// ten seconds; the next one is requested shortly before.
struct BusyHosts {
    bed: TestBed,
    running: VecDeque<Tid>,
    last_wait_id: i32,
    small_started: u32,
}

impl BusyHosts {
    fn new(limits: Limits, guests: GuestLimits) -> BusyHosts {
        let vm = world(2);
        vm.0.borrow_mut().limits = guests;
        let rules = SpawnRules {
            wait: Micros::from_secs(3600),
            limits,
        };
        let bed = TestBed::quiet_with(
            &vm,
            options_with_policy(EffectivePolicy {
                rules,
                give_way: false,
                ..EffectivePolicy::default()
            }),
        );
        let mut busy = BusyHosts {
            bed,
            running: VecDeque::new(),
            last_wait_id: 1000,
            small_started: 0,
        };
        (0..4).for_each(|_| busy.request_small());
        assert_eq!(busy.running.len(), 4);
        busy
    }

    fn request_small(&mut self) {
        self.last_wait_id += 1;
        self.bed.world().spawn(self.last_wait_id, &request(1));
        self.bed.settle();
        self.start();
    }

    /// Lets the hosts carry out all orders to start tasks.
    fn start(&mut self) {
        let execs = self.bed.world().take_start_orders();
        for exec in &execs {
            let tids = self.bed.world().ack(exec);
            for tid in &tids {
                let kind = EventKind::TaskStarted {
                    tid: *tid,
                    parent: client(),
                    name: "worker".into(),
                    user: 0,
                };
                self.bed.world().event(exec.host, kind);
            }
            if exec.request.count == 1 {
                self.running.extend(&tids);
                self.small_started += 1;
            }
        }
        self.bed.settle();
    }

    /// Simulates ten seconds: a small task is requested, then another one ends.
    fn round(&mut self) {
        self.request_small();
        if let Some(tid) = self.running.pop_front() {
            let host = tid.birth_host().expect("a task");
            self.bed.world().event(
                host,
                EventKind::TaskEnded {
                    tid,
                    status: 0,
                    used: Usage::default(),
                },
            );
        }
        self.bed.report_absent_owners(&[1, 2]);
        self.start();
        self.bed.advance(Micros::from_secs(10));
        self.start();
    }
}

fn two_each() -> GuestLimits {
    GuestLimits {
        guests_max: Some(2),
        ..GuestLimits::default()
    }
}

/// Asserts that the request `large` waits while small ones are placed, until hosts are reserved for
/// it, and is then placed. `said`: text of the log entry about the reservation, which must occur
/// once.
fn check_reservation(mut busy: BusyHosts, large: &SpawnRequest, expected_note: &str) {
    busy.bed.world().spawn(7, large);
    busy.bed.settle();
    let before = busy.small_started;
    for _ in 0..RESERVE_AFTER.0 / 10_000_000 - 1 {
        busy.round();
    }
    assert_eq!(
        busy.bed.world().spawn_reply(7),
        None,
        "small ones always came first"
    );
    assert!(
        busy.small_started > before + 5,
        "and they have got their places: {}",
        busy.small_started - before
    );
    for _ in 0..8 {
        busy.round();
    }
    let answer = busy
        .bed
        .world()
        .spawn_reply(7)
        .unwrap_or_else(|| panic!("{:?}", busy.bed.world().notes()));
    assert!(answer.expect("good").iter().all(Result::is_ok));
    assert_eq!(
        busy.bed
            .world()
            .notes()
            .iter()
            .filter(|note| note.contains(expected_note))
            .count(),
        1,
        "said once"
    );
    let (behind, waiting) = (busy.small_started, busy.last_wait_id);
    for _ in 0..6 {
        busy.round();
    }
    assert!(
        busy.small_started > behind && busy.last_wait_id > waiting,
        "small ones go on"
    );
}

/// A spawn that needs a whole host is placed although small spawns use every slot that becomes
/// free.
#[test]
fn whole_host_is_reserved_for_long_waiting_spawn() {
    let large = SpawnRequest {
        place: "?same-host".into(),
        ..request(2)
    };
    check_reservation(
        BusyHosts::new(Limits::default(), two_each()),
        &large,
        "hosts are reserved for it",
    );
}

/// The reply to a query for a host states that it is reserved for a spawn that has waited for a
/// long time.
#[test]
fn host_query_reports_reservation() {
    let mut busy = BusyHosts::new(Limits::default(), two_each());
    busy.bed.world().spawn(
        7,
        &SpawnRequest {
            place: "?same-host".into(),
            ..request(2)
        },
    );
    busy.bed.settle();
    let kept = |busy: &mut BusyHosts| -> Vec<String> {
        let of = |host: &str| match query(&mut busy.bed, &RmQuery::HostDecisions(host.into())) {
            RmReply::Decisions {
                host_state: Some(HostState::Used(but)),
                ..
            } => but,
            // The host is full.
            RmReply::Decisions {
                host_state: Some(HostState::Excluded { .. }),
                ..
            } => Vec::new(),
            other => panic!("{other:?}"),
        };
        ["h1", "h2"]
            .into_iter()
            .flat_map(of)
            .filter(|but| but.contains("reserved"))
            .collect()
    };
    assert_eq!(kept(&mut busy), [""; 0]);
    let mut said = Vec::new();
    for _ in 0..RESERVE_AFTER.0 / 10_000_000 + 8 {
        busy.round();
        said.extend(kept(&mut busy));
    }
    let sentence = format!(
        "it is reserved for 2 worker for {}, which have waited long",
        client()
    );
    assert!(
        !said.is_empty() && said.iter().all(|text| *text == sentence),
        "{said:?}"
    );
    assert!(
        busy.bed.world().spawn_reply(7).is_some() && kept(&mut busy).is_empty(),
        "it has its place"
    );
}

/// If a spawn waits because of its user's limit, later spawns of the user are placed after it.
#[test]
fn limited_spawn_precedes_later_ones_of_user() {
    let limits = Limits {
        user_tasks: Some(4),
        job_tasks: None,
    };
    check_reservation(
        BusyHosts::new(limits, GuestLimits::default()),
        &request(3),
        "other requests of its user and its job wait for it",
    );
}

/// A spawn of more tasks than a limit could ever allow is refused immediately and does not delay
/// other spawns.
#[test]
fn spawn_above_limit_is_refused_at_once() {
    let limits = Limits {
        user_tasks: Some(4),
        job_tasks: None,
    };
    let mut busy = BusyHosts::new(limits, GuestLimits::default());
    busy.bed.world().spawn(7, &request(5));
    busy.bed.world().spawn(8, &request(3));
    busy.bed.settle();
    assert_eq!(
        busy.bed.world().spawn_reply(7),
        Some(Ok(vec![Err(PvmError::OutOfRes); 5]))
    );
    let why = busy.bed.world().notes().pop().expect("a note says why");
    assert!(
        why.contains("the user has 4 tasks, and 4 are allowed"),
        "{why}"
    );
    // Three more tasks are allowed when two of the four have ended, or when the limit changes.
    assert_eq!(busy.bed.world().spawn_reply(8), None);
    for _ in 0..RESERVE_AFTER.0 / 10_000_000 + 1 {
        busy.bed.report_absent_owners(&[1, 2]);
        busy.bed.advance(Micros::from_secs(10));
    }
    let notes = busy.bed.world().notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("other requests of its user and its job wait for it")),
        "{notes:?}"
    );
    busy.bed.world().post(
        own(),
        CTX_RM,
        TAG_POLICY,
        0,
        Bytes::from_static(b"user_tasks = 2"),
    );
    busy.bed.settle();
    assert_eq!(
        busy.bed.world().spawn_reply(8),
        Some(Ok(vec![Err(PvmError::OutOfRes); 3]))
    );
    let (ended, small) = (std::mem::take(&mut busy.running), busy.small_started);
    for tid in ended {
        let host = tid.birth_host().expect("a task");
        busy.bed.world().event(
            host,
            EventKind::TaskEnded {
                tid,
                status: 0,
                used: Usage::default(),
            },
        );
    }
    busy.bed.settle();
    busy.request_small();
    assert_eq!(
        busy.small_started,
        small + 1,
        "later ones do not wait for it"
    );
}

/// No host is reserved for a spawn that no host could take.
#[test]
fn no_reservation_for_impossible_spawn() {
    let mut busy = BusyHosts::new(Limits::default(), two_each());
    busy.bed.world().spawn(
        7,
        &SpawnRequest {
            place: "?same-host".into(),
            ..request(3)
        },
    );
    for _ in 0..RESERVE_AFTER.0 / 10_000_000 + 6 {
        busy.round();
    }
    assert_eq!(busy.bed.world().spawn_reply(7), None);
    assert!(
        busy.small_started > 15,
        "the others go on: {}",
        busy.small_started
    );
    assert!(
        !busy
            .bed
            .world()
            .notes()
            .iter()
            .any(|note| note.contains("reserved for it"))
    );
}

/// Memory that was promised to a spawn is not promised to another one until load reports can
/// include its use.
#[test]
fn promised_memory_is_not_promised_twice() {
    let vm = world(1);
    vm.0.borrow_mut().available_bytes = 5 << 30;
    let mut bed = TestBed::quiet(&vm);
    let large = |count| SpawnRequest {
        place: "?memory >= 2G".into(),
        ..request(count)
    };
    // Three requests arrive before the host has started any task.
    (1..=3).for_each(|wid| bed.world().spawn(wid, &large(1)));
    bed.settle();
    let execs = bed.world().take_start_orders();
    assert_eq!(execs.len(), 2, "five gigabytes are enough for two");
    assert_eq!(
        bed.world().spawn_reply(3).expect("refused").expect("tried"),
        [Err(PvmError::OutOfRes)]
    );
    let notes = bed.world().notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("memory >= 2G excludes h1 (1.0G)")),
        "{notes:?}"
    );
    execs.iter().for_each(|exec| drop(bed.world().ack(exec)));
    // This report may be older than the tasks, so the promise remains.
    bed.advance(Micros::from_secs(20));
    bed.report_absent_owners(&[1]);
    bed.world().spawn(4, &large(1));
    bed.settle();
    assert!(bed.world().take_start_orders().is_empty());
    // The tasks have not used the memory, and reports of this time would include its use. So the
    // promise ends.
    bed.advance(Micros::from_secs(11));
    bed.report_absent_owners(&[1]);
    bed.world().spawn(5, &large(2));
    bed.settle();
    assert_eq!(bed.world().take_start_orders()[0].request.count, 2);
}
