//! Spawns that wait long while smaller ones overtake them.

use crate::common::{Bed, client, request, rm as own, world};
use crate::{ask, with_conduct};
use bytes::Bytes;
use pvm_rm::decide::{Limits, RESERVE_AFTER};
use pvm_rm::policy::Conduct;
use pvm_rm::service::TAG_POLICY;
use pvm_rm::spawns::Rules;
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{CTX_RM, HostState, RmQuery, RmReply};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::VecDeque;

/// Two hosts that take two tasks each and are full of small tasks. One of these ends every ten
/// seconds, when the next one already waits.
struct Busy {
    bed: Bed,
    running: VecDeque<Tid>,
    last: i32,
    small: u32,
}

impl Busy {
    fn new(limits: Limits, guests: GuestLimits) -> Busy {
        let vm = world(2);
        vm.0.borrow_mut().limits = guests;
        let rules = Rules {
            wait: Micros::from_secs(3600),
            limits,
        };
        let bed = Bed::quiet_with(
            &vm,
            with_conduct(Conduct {
                rules,
                give_way: false,
                ..Conduct::default()
            }),
        );
        let mut busy = Busy {
            bed,
            running: VecDeque::new(),
            last: 1000,
            small: 0,
        };
        (0..4).for_each(|_| busy.ask_small());
        assert_eq!(busy.running.len(), 4);
        busy
    }

    fn ask_small(&mut self) {
        self.last += 1;
        self.bed.world().spawn(self.last, &request(1));
        self.bed.settle();
        self.start();
    }

    /// Lets the hosts carry out the start orders.
    fn start(&mut self) {
        let execs = self.bed.world().took_execs();
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
                self.small += 1;
            }
        }
        self.bed.settle();
    }

    /// Lets ten seconds pass, in which a small task is requested before another one ends.
    fn round(&mut self) {
        self.ask_small();
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
        self.bed.signs_of_life(&[1, 2]);
        self.start();
        self.bed.pass(Micros::from_secs(10));
        self.start();
    }
}

fn two_each() -> GuestLimits {
    GuestLimits {
        guests_max: Some(2),
        ..GuestLimits::default()
    }
}

/// Asserts that a large request waits while small ones are placed, until hosts are reserved for it;
/// then it is placed.
fn waits_and_gets(mut busy: Busy, large: &SpawnRequest, said: &str) {
    busy.bed.world().spawn(7, large);
    busy.bed.settle();
    let before = busy.small;
    for _ in 0..RESERVE_AFTER.0 / 10_000_000 - 1 {
        busy.round();
    }
    assert_eq!(
        busy.bed.world().answer(7),
        None,
        "small ones always came first"
    );
    assert!(
        busy.small > before + 5,
        "and they have got their places: {}",
        busy.small - before
    );
    for _ in 0..8 {
        busy.round();
    }
    let answer = busy
        .bed
        .world()
        .answer(7)
        .unwrap_or_else(|| panic!("{:?}", busy.bed.world().notes()));
    assert!(answer.expect("good").iter().all(Result::is_ok));
    assert_eq!(
        busy.bed
            .world()
            .notes()
            .iter()
            .filter(|note| note.contains(said))
            .count(),
        1,
        "said once"
    );
    let (behind, waiting) = (busy.small, busy.last);
    for _ in 0..6 {
        busy.round();
    }
    assert!(
        busy.small > behind && busy.last > waiting,
        "small ones go on"
    );
}

/// A spawn that needs a whole host gets one although small spawns take what becomes free.
#[test]
fn whole_host_is_reserved_for_long_waiting_spawn() {
    let large = SpawnRequest {
        place: "?same-host".into(),
        ..request(2)
    };
    waits_and_gets(
        Busy::new(Limits::default(), two_each()),
        &large,
        "hosts are reserved for it",
    );
}

/// A query for a host reports that it is reserved for a spawn that has waited long.
#[test]
fn host_query_reports_reservation() {
    let mut busy = Busy::new(Limits::default(), two_each());
    busy.bed.world().spawn(
        7,
        &SpawnRequest {
            place: "?same-host".into(),
            ..request(2)
        },
    );
    busy.bed.settle();
    let kept = |busy: &mut Busy| -> Vec<String> {
        let of = |host: &str| match ask(&mut busy.bed, &RmQuery::HostDecisions(host.into())) {
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
        busy.bed.world().answer(7).is_some() && kept(&mut busy).is_empty(),
        "it has its place"
    );
}

/// A spawn that waits because of its user's limit is placed before later spawns of the user.
#[test]
fn limited_spawn_precedes_later_ones_of_user() {
    let limits = Limits {
        user_tasks: Some(4),
        job_tasks: None,
    };
    waits_and_gets(
        Busy::new(limits, GuestLimits::default()),
        &request(3),
        "other requests of its user and its job wait for it",
    );
}

/// A spawn of more tasks than a limit ever allows is refused at once and delays no other spawn.
#[test]
fn spawn_above_limit_is_refused_at_once() {
    let limits = Limits {
        user_tasks: Some(4),
        job_tasks: None,
    };
    let mut busy = Busy::new(limits, GuestLimits::default());
    busy.bed.world().spawn(7, &request(5));
    busy.bed.world().spawn(8, &request(3));
    busy.bed.settle();
    assert_eq!(
        busy.bed.world().answer(7),
        Some(Ok(vec![Err(PvmError::OutOfRes); 5]))
    );
    let why = busy.bed.world().notes().pop().expect("a note says why");
    assert!(
        why.contains("the user has 4 tasks, and 4 are allowed"),
        "{why}"
    );
    // Three tasks are allowed once two of the four have ended, unless the limit changes first.
    assert_eq!(busy.bed.world().answer(8), None);
    for _ in 0..RESERVE_AFTER.0 / 10_000_000 + 1 {
        busy.bed.signs_of_life(&[1, 2]);
        busy.bed.pass(Micros::from_secs(10));
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
        busy.bed.world().answer(8),
        Some(Ok(vec![Err(PvmError::OutOfRes); 3]))
    );
    let (ended, small) = (std::mem::take(&mut busy.running), busy.small);
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
    busy.ask_small();
    assert_eq!(busy.small, small + 1, "later ones do not wait for it");
}

/// No host is reserved for a spawn that no host could take.
#[test]
fn no_reservation_for_impossible_spawn() {
    let mut busy = Busy::new(Limits::default(), two_each());
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
    assert_eq!(busy.bed.world().answer(7), None);
    assert!(busy.small > 15, "the others go on: {}", busy.small);
    assert!(
        !busy
            .bed
            .world()
            .notes()
            .iter()
            .any(|note| note.contains("reserved for it"))
    );
}

/// Memory that was promised to a spawn is not promised again until load reports can show its use.
#[test]
fn promised_memory_is_not_promised_twice() {
    let vm = world(1);
    vm.0.borrow_mut().memory = 5 << 30;
    let mut bed = Bed::quiet(&vm);
    let large = |count| SpawnRequest {
        place: "?memory >= 2G".into(),
        ..request(count)
    };
    // Three requests at the same moment, before the host has started any task.
    (1..=3).for_each(|wid| bed.world().spawn(wid, &large(1)));
    bed.settle();
    let execs = bed.world().took_execs();
    assert_eq!(execs.len(), 2, "five gigabytes are enough for two");
    assert_eq!(
        bed.world().answer(3).expect("refused").expect("tried"),
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
    // A report that may predate the tasks changes nothing.
    bed.pass(Micros::from_secs(20));
    bed.signs_of_life(&[1]);
    bed.world().spawn(4, &large(1));
    bed.settle();
    assert!(bed.world().took_execs().is_empty());
    // The tasks have not used the requested memory, and reports show that by now.
    bed.pass(Micros::from_secs(11));
    bed.signs_of_life(&[1]);
    bed.world().spawn(5, &large(2));
    bed.settle();
    assert_eq!(bed.world().took_execs()[0].request.count, 2);
}
