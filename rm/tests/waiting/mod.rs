//! Spawns that wait for long behind smaller ones.

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
use sempa_proto::rm::{Answer, CTX_RM, HostNow, Question};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::VecDeque;

/// Two hosts that take two tasks each, full of small ones, of which one ends every ten seconds, when the next one waits already.
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

    /// The hosts start what they were told to.
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

    /// Ten seconds, in which a small one is asked for before another one ends.
    fn round(&mut self) {
        self.ask_small();
        if let Some(tid) = self.running.pop_front() {
            let host = tid.home().expect("a task");
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
        cores: Some(2),
        ..GuestLimits::default()
    }
}

/// A large request waits behind small ones as long as nothing is kept for it, and no longer.
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

#[test]
fn a_spawn_that_needs_a_whole_host_gets_one_although_small_ones_take_what_becomes_free() {
    let large = SpawnRequest {
        place: "?same-host".into(),
        ..request(2)
    };
    waits_and_gets(
        Busy::new(Limits::default(), two_each()),
        &large,
        "hosts are kept for it",
    );
}

#[test]
fn of_a_host_that_is_kept_for_a_spawn_that_has_waited_for_long_that_is_what_holds_now() {
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
        let of = |host: &str| match ask(&mut busy.bed, &Question::WhyHost(host.into())) {
            Answer::Why {
                now: Some(HostNow::Used(but)),
                ..
            } => but,
            // It is full.
            Answer::Why {
                now: Some(HostNow::LeftOut { .. }),
                ..
            } => Vec::new(),
            other => panic!("{other:?}"),
        };
        ["h1", "h2"]
            .into_iter()
            .flat_map(of)
            .filter(|but| but.contains("kept"))
            .collect()
    };
    assert_eq!(kept(&mut busy), [""; 0]);
    let mut said = Vec::new();
    for _ in 0..RESERVE_AFTER.0 / 10_000_000 + 8 {
        busy.round();
        said.extend(kept(&mut busy));
    }
    let sentence = format!(
        "it is kept for 2 worker for {}, which have waited for long",
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

#[test]
fn a_spawn_that_its_users_limit_keeps_waiting_gets_its_turn_before_later_ones_of_the_user() {
    let limits = Limits {
        user_tasks: Some(4),
        job_tasks: None,
    };
    waits_and_gets(
        Busy::new(limits, GuestLimits::default()),
        &request(3),
        "others wait until it is",
    );
}

#[test]
fn a_spawn_of_more_than_is_ever_allowed_is_refused_at_once_and_keeps_nobody_waiting() {
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
    // Three are allowed once two of the four have ended, unless the limit changes before that.
    assert_eq!(busy.bed.world().answer(8), None);
    for _ in 0..RESERVE_AFTER.0 / 10_000_000 + 1 {
        busy.bed.signs_of_life(&[1, 2]);
        busy.bed.pass(Micros::from_secs(10));
    }
    let notes = busy.bed.world().notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("others wait until it is")),
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
        let host = tid.home().expect("a task");
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

#[test]
fn nothing_is_kept_for_a_spawn_that_all_hosts_together_could_not_take() {
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
            .any(|note| note.contains("kept for it"))
    );
}

#[test]
fn memory_that_was_promised_to_a_spawn_is_not_promised_again_until_watchers_can_have_seen_it() {
    let vm = world(1);
    vm.0.borrow_mut().memory = 5 << 30;
    let mut bed = Bed::quiet(&vm);
    let large = |count| SpawnRequest {
        place: "?memory >= 2G".into(),
        ..request(count)
    };
    // Three at the same moment, before the host has started any.
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
    // A report that may be older than they are changes nothing.
    bed.pass(Micros::from_secs(20));
    bed.signs_of_life(&[1]);
    bed.world().spawn(4, &large(1));
    bed.settle();
    assert!(bed.world().took_execs().is_empty());
    // They have not taken what they asked for, and that is known by now.
    bed.pass(Micros::from_secs(11));
    bed.signs_of_life(&[1]);
    bed.world().spawn(5, &large(2));
    bed.settle();
    assert_eq!(bed.world().took_execs()[0].request.count, 2);
}
