//! Several tasks leave their hosts at once: in which order, and how many at a time.

use checkpoint::protocol::{
    Coordinator, CoordinatorOutput, GATHER_TIME, LEAVE_AT_ONCE_MAX, LEAVE_AT_ONCE_WITH_SMALLER_MAX,
    MOVES_OPEN_MAX,
};
use proptest::prelude::*;
use sempa_proto::engine::Engine;
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Cause, Failure, Order, Report, Step, TaskFacts, Usage};
use sempa_proto::suspend::Holds;
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

const MIB: u64 = 1 << 20;

fn host(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

/// Moves away from the second host, and how far each has got by what the coordinator has ordered.
#[derive(Default)]
struct World {
    coordinator: Coordinator,
    now: Micros,
    sizes: BTreeMap<MigrationId, u64>,
    /// The targets say so.
    memory_follows: bool,
    /// A part of it goes ahead, but where an owner waits.
    pre_copies: bool,
    /// In the order in which they were let go.
    gone: Vec<u64>,
    leaving: BTreeMap<MigrationId, u64>,
    ended: BTreeMap<MigrationId, bool>,
    /// That have ended, as the log says.
    steps: Vec<(MigrationId, Step)>,
}

impl World {
    fn begin(&mut self, number: i32, mib: u64) -> MigrationId {
        self.begin_for(
            number,
            mib,
            Cause::Asked {
                by: HostId::MASTER.tid(),
            },
        )
    }

    fn begin_for(&mut self, number: i32, mib: u64, cause: Cause) -> MigrationId {
        let tid = Tid::from_raw(0x80000 + number);
        let id = self
            .coordinator
            .begin(self.now, tid, host(2), host(3), cause)
            .expect("there is room");
        self.sizes.insert(id, mib * MIB);
        self.heed();
        id
    }

    fn heed(&mut self) {
        while let Some(output) = self.coordinator.poll() {
            match output {
                CoordinatorOutput::Order {
                    of,
                    order: Order::Prepare { facts, .. },
                    ..
                } => {
                    assert_eq!(facts.resident_bytes, self.sizes[&of.id]);
                    self.gone.push(facts.resident_bytes / MIB);
                    self.leaving.insert(of.id, facts.resident_bytes);
                }
                CoordinatorOutput::Ended { id, result } => {
                    self.leaving.remove(&id);
                    self.ended.insert(id, result.is_ok());
                }
                CoordinatorOutput::Event(EventKind::MoveFailed { id, .. }) => {
                    self.leaving.remove(&id);
                }
                CoordinatorOutput::Event(EventKind::Moving { id, step, .. }) => {
                    self.steps.push((id, step))
                }
                _ => {}
            }
        }
    }

    fn report(&mut self, id: MigrationId, from: u16, report: Report) {
        self.coordinator.report(self.now, host(from), id, report);
        self.heed();
    }

    fn inspected(&mut self, id: MigrationId) {
        let facts = TaskFacts {
            resident_bytes: self.sizes[&id],
            ..TaskFacts::default()
        };
        let (suspended, memory_can_follow, can_pre_copy) =
            (Holds::default(), self.pre_copies, self.pre_copies);
        self.report(
            id,
            2,
            Report::Inspected {
                facts,
                suspended,
                memory_can_follow,
                can_pre_copy,
            },
        );
    }

    /// The target would take it, in this way.
    fn prepared(&mut self, id: MigrationId, engine: Engine) {
        let (verdict, token, memory_follows) = (Vec::new(), PathBuf::new(), self.memory_follows);
        self.report(
            id,
            3,
            Report::Prepared {
                verdict,
                token,
                memory_follows,
                engine,
            },
        );
    }

    /// Its images have arrived.
    fn received(&mut self, id: MigrationId) {
        self.prepared(id, Engine::Criu);
        self.report(id, 2, Report::Stopped);
        self.leaving.remove(&id);
        self.report(
            id,
            3,
            Report::Received {
                bytes: self.sizes[&id],
            },
        );
    }

    /// What is left of its way.
    fn arrives(&mut self, id: MigrationId) {
        self.runs(id);
        self.report(id, 3, Report::Arrived);
    }

    /// It runs at the target; its memory may follow.
    fn runs(&mut self, id: MigrationId) {
        self.report(id, 3, Report::Restored);
        self.coordinator.recorded(id, Ok(()));
        self.coordinator.located(self.now, id);
        self.report(id, 2, Report::SourceGone(Usage::default()));
        self.report(id, 3, Report::Running);
    }

    fn wake(&mut self) -> bool {
        let Some(at) = self.coordinator.next_wakeup() else {
            return false;
        };
        self.now = self.now.max(at);
        self.coordinator.wake(self.now);
        self.heed();
        true
    }
}

#[test]
fn of_many_tasks_that_leave_a_host_the_smallest_go_first_and_a_few_at_a_time() {
    let mut world = World::default();
    let sizes = [900, 3, 700, 1, 50, 2, 40, 30];
    let all: Vec<MigrationId> = (1..)
        .zip(sizes)
        .map(|(number, mib)| world.begin(number, mib))
        .collect();
    for id in &all {
        assert!(
            world.gone.is_empty(),
            "not before it is known how large all are"
        );
        world.inspected(*id);
    }
    assert_eq!(world.gone, [1, 2, 3, 30]);
    for expected in [40, 50, 700, 900] {
        let next = *world
            .leaving
            .iter()
            .min_by_key(|(_, bytes)| **bytes)
            .expect("somebody")
            .0;
        world.received(next);
        assert_eq!(
            world.gone.last(),
            Some(&expected),
            "as soon as the images of another one are there"
        );
        world.arrives(next);
    }
    assert_eq!(world.ended.len(), 4);
}

#[test]
fn nobody_waits_long_for_a_task_about_which_nothing_is_known() {
    let mut world = World::default();
    let (_mute, known) = (world.begin(1, 5), world.begin(2, 7));
    world.inspected(known);
    assert_eq!(world.gone, [0; 0]);
    assert_eq!(world.coordinator.next_wakeup(), Some(GATHER_TIME));
    assert!(world.wake());
    assert_eq!(world.gone, [7]);
    let alone = World::default();
    let mut world = alone;
    let id = world.begin(1, 5);
    world.inspected(id);
    assert_eq!(
        (world.gone.as_slice(), world.now),
        (&[5][..], Micros(0)),
        "who is alone waits for nobody"
    );
}

#[test]
fn nobody_waits_for_programs_that_write_their_own_checkpoints() {
    let mut world = World::default();
    for number in 1..=2 * LEAVE_AT_ONCE_MAX as i32 {
        let id = world.begin(number, 1);
        world.inspected(id);
        world.prepared(id, Engine::Restart { wait: 3600 });
    }
    let id = world.begin(100, 4096);
    world.inspected(id);
    assert_eq!(world.gone.last(), Some(&4096));
}

#[test]
fn memory_that_follows_its_task_has_a_turn_too_and_nobody_stands_still_for_it() {
    let mut world = World {
        memory_follows: true,
        ..World::default()
    };
    let first: Vec<MigrationId> = (1..=LEAVE_AT_ONCE_MAX as i32)
        .map(|number| world.begin(number, 100))
        .collect();
    first.iter().for_each(|id| world.inspected(*id));
    for id in &first {
        world.received(*id);
        world.runs(*id);
    }
    let large = world.begin(20, 200);
    world.inspected(large);
    let small = world.begin(21, 3);
    world.inspected(small);
    assert_eq!(
        world.gone[LEAVE_AT_ONCE_MAX..],
        [3],
        "the link is full of what is smaller than the large one"
    );
    let unwanted = world.begin_for(
        22,
        300,
        Cause::Owner {
            why: "olga is there".into(),
        },
    );
    world.inspected(unwanted);
    assert_eq!(
        world.gone.last(),
        Some(&300),
        "who stands still for an owner runs again the sooner"
    );
    world.report(first[0], 3, Report::Arrived);
    assert_eq!(
        world.gone.last(),
        Some(&300),
        "the small one and three others are on the link"
    );
    world.report(first[1], 3, Report::Arrived);
    assert_eq!(world.gone.last(), Some(&200));
}

#[test]
fn memory_that_goes_ahead_has_a_turn_too_and_an_owner_waits_neither_for_that_nor_for_his_own() {
    let mut world = World {
        memory_follows: true,
        pre_copies: true,
        ..World::default()
    };
    let first: Vec<MigrationId> = (1..=LEAVE_AT_ONCE_MAX as i32)
        .map(|number| world.begin(number, 100))
        .collect();
    first.iter().for_each(|id| world.inspected(*id));
    first
        .iter()
        .for_each(|id| world.prepared(*id, Engine::Criu));
    let large = world.begin(20, 200);
    world.inspected(large);
    let unwanted = world.begin_for(
        22,
        300,
        Cause::Owner {
            why: "olga is there".into(),
        },
    );
    world.inspected(unwanted);
    assert_eq!(
        world.gone.last(),
        Some(&300),
        "what goes ahead of the others is in nobody's way who stands still"
    );
    world.prepared(unwanted, Engine::Criu);
    world.report(unwanted, 2, Report::PreCopied { bytes: 1 });
    world.report(unwanted, 2, Report::Quiesced);
    let steps = |world: &World| {
        world
            .steps
            .iter()
            .filter(|(_, step)| *step == Step::PreCopy)
            .map(|(id, _)| *id)
            .collect::<Vec<_>>()
    };
    assert_eq!(steps(&world), [], "nothing goes ahead where an owner waits");
    for id in &first {
        world.report(*id, 2, Report::PreCopied { bytes: 1 });
    }
    assert_eq!(steps(&world), first);
}

#[test]
fn small_tasks_do_not_wait_for_large_ones_that_are_leaving_already() {
    let mut world = World::default();
    for number in 1..=LEAVE_AT_ONCE_MAX as i32 {
        let id = world.begin(number, 4096);
        world.inspected(id);
    }
    let large = world.begin(20, 4096);
    world.inspected(large);
    assert_eq!(world.leaving.len(), LEAVE_AT_ONCE_MAX);
    for number in 30..40 {
        let id = world.begin(number, 1);
        world.inspected(id);
    }
    assert_eq!(world.leaving.len(), LEAVE_AT_ONCE_WITH_SMALLER_MAX);
    assert_eq!(world.gone[LEAVE_AT_ONCE_MAX..], [1; 4]);
}

#[test]
fn a_task_whose_turn_never_comes_because_its_hosts_are_lost_is_told() {
    for lost in [2, 3] {
        let mut world = World::default();
        let all: Vec<MigrationId> = (1..=9).map(|number| world.begin(number, 9)).collect();
        all.iter().for_each(|id| world.inspected(*id));
        world.coordinator.host_lost(world.now, host(lost));
        world.heed();
        assert_eq!(world.ended, all.iter().map(|id| (*id, false)).collect());
        assert_eq!(
            (world.coordinator.next_wakeup(), world.coordinator.open()),
            (None, 0)
        );
    }
}

#[test]
fn a_move_that_is_called_off_makes_room_for_the_next() {
    let mut world = World::default();
    let all: Vec<MigrationId> = (1..=5).map(|number| world.begin(number, 9)).collect();
    all.iter().for_each(|id| world.inspected(*id));
    assert_eq!(world.leaving.len(), LEAVE_AT_ONCE_MAX);
    world.coordinator.call_off(all[0], "nobody wants it");
    world.heed();
    assert!(world.wake());
    assert_eq!(
        (world.leaving.len(), world.gone.len(), world.now),
        (LEAVE_AT_ONCE_MAX, 5, Micros(0))
    );
}

proptest! {
    /// Whatever is begun, fails, is mute or arrives in whatever order: never too many leave at once, nobody goes before
    /// somebody smaller who waits, and all come to an end.
    #[test]
    fn all_get_their_turn_and_never_too_many_have_it(steps in proptest::collection::vec((0..6_u8, any::<u16>()), 1..300)) {
        let (mut world, mut open, mut number) = (World::default(), Vec::<MigrationId>::new(), 0);
        let mut inspected = BTreeMap::<MigrationId, bool>::new();
        for (step, dice) in steps {
            let gone = world.gone.len();
            let waiting = |world: &World, open: &[MigrationId], inspected: &BTreeMap<MigrationId, bool>| {
                let waits = open.iter().filter(|id| inspected.contains_key(id) && !world.leaving.contains_key(id));
                waits.filter(|id| inspected[id]).map(|id| world.sizes[id] / MIB).min()
            };
            let which = (!open.is_empty()).then(|| open[usize::from(dice) % open.len()]);
            match (step, which) {
                (0 | 1, _) if open.len() < MOVES_OPEN_MAX => {
                    number += 1;
                    open.push(world.begin(number, u64::from(dice % 512) + 1));
                }
                (2, Some(id)) if !inspected.contains_key(&id) => {
                    inspected.insert(id, true);
                    world.inspected(id);
                }
                (3, Some(id)) if world.leaving.contains_key(&id) => {
                    inspected.insert(id, false);
                    world.received(id);
                    world.arrives(id);
                }
                (4, Some(id)) => {
                    let why = Failure::Engine("dice".into());
                    let step = if inspected.contains_key(&id) { Step::Prepare } else { Step::Inspect };
                    world.report(id, 2, Report::Failed { step, why });
                }
                (5, _) => {
                    world.now = world.now + Micros(u64::from(dice) * 10);
                    world.coordinator.wake(world.now);
                    world.heed();
                }
                _ => {}
            }
            open.retain(|id| !world.ended.contains_key(id));
            prop_assert!(world.leaving.len() <= LEAVE_AT_ONCE_WITH_SMALLER_MAX);
            if let (Some(last), Some(waits)) = (world.gone[gone..].last(), waiting(&world, &open, &inspected)) {
                prop_assert!(*last <= waits, "{last} went before {waits}");
            }
        }
        // Those of which nothing was heard come to their deadlines, and so do those that do not go on.
        for _ in 0..1000 {
            if !world.wake() {
                break;
            }
        }
        prop_assert_eq!(world.coordinator.open(), 0);
    }
}

#[test]
fn only_a_task_that_waits_for_its_turn_to_leave_a_drained_host_gives_way_to_a_checkpoint() {
    let mut world = World::default();
    let by = HostId::MASTER.tid();
    let of = |numbers: &[i32]| {
        numbers
            .iter()
            .map(|number| Tid::from_raw(0x80000 + number))
            .collect::<BTreeSet<_>>()
    };
    for number in 0..=LEAVE_AT_ONCE_MAX as i32 {
        let id = world.begin_for(number, 100 + number as u64, Cause::Drain { by });
        world.inspected(id);
    }
    let asked = world.begin_for(50, 900, Cause::Asked { by });
    world.inspected(asked);
    world.now = world.now + GATHER_TIME;
    world.coordinator.wake(world.now);
    world.heed();
    assert_eq!(world.leaving.len(), LEAVE_AT_ONCE_MAX);
    let last = LEAVE_AT_ONCE_MAX as i32;
    assert!(!world.coordinator.give_way(&of(&[0])), "it is on its way");
    assert!(
        !world.coordinator.give_way(&of(&[50])),
        "somebody wants it there"
    );
    assert!(!world.coordinator.give_way(&of(&[60])), "it does not move");
    assert!(
        !world.coordinator.give_way(&of(&[last, 0])),
        "what for, if the other one goes?"
    );
    assert!(world.coordinator.give_way(&of(&[last, 60])));
    assert!(
        of(&[last])
            .iter()
            .all(|tid| world.coordinator.of_task(*tid).is_none())
    );
    world.heed();
    assert_eq!(world.ended.values().collect::<Vec<_>>(), [&false]);
}
