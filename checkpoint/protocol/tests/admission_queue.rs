//! Tests the admission queue of tasks that depart from one host: their order, and how many depart
//! at a time.

use checkpoint_protocol::{
    Coordinator, CoordinatorOutput, DEPARTURES_MAX, DEPARTURES_WITH_SMALLER_MAX, MIGRATIONS_MAX,
    SIZE_WAIT_MAX,
};
use proptest::prelude::*;
use sempa_proto::engine::Engine;
use sempa_proto::event::EventKind;
use sempa_proto::migration::{
    Failure, MigrationCause, MigrationOrder, Step, StepReport, TaskFacts, Usage,
};
use sempa_proto::suspend::Suspensions;
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

const MIB: u64 = 1 << 20;

fn host(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

/// A coordinator with migrations away from host 2 to host 3, and their progress according to the
/// coordinator's orders.
#[derive(Default)]
struct QueueSimulation {
    coordinator: Coordinator,
    now: Micros,
    sizes: BTreeMap<MigrationId, u64>,
    /// True if the targets choose post-copy.
    post_copy: bool,
    /// True if the sources support pre-copy.
    pre_copy: bool,
    /// Sizes in MiB of the admitted tasks, in the order of their admission.
    admitted_mib: Vec<u64>,
    departing: BTreeMap<MigrationId, u64>,
    results: BTreeMap<MigrationId, bool>,
    /// Completed steps, in the order in which the coordinator logged them.
    completed_steps: Vec<(MigrationId, Step)>,
}

impl QueueSimulation {
    fn begin(&mut self, number: i32, mib: u64) -> MigrationId {
        self.begin_for(
            number,
            mib,
            MigrationCause::Requested {
                requested_by: HostId::MASTER.tid(),
            },
        )
    }

    fn begin_for(&mut self, number: i32, mib: u64, cause: MigrationCause) -> MigrationId {
        let tid = Tid::from_raw(0x80000 + number);
        let id = self
            .coordinator
            .begin(self.now, tid, host(2), host(3), cause)
            .expect("there is room");
        self.sizes.insert(id, mib * MIB);
        self.run_outputs();
        id
    }

    fn run_outputs(&mut self) {
        while let Some(output) = self.coordinator.poll() {
            match output {
                CoordinatorOutput::Order {
                    migration,
                    order: MigrationOrder::Prepare { facts, .. },
                    ..
                } => {
                    assert_eq!(facts.resident_bytes, self.sizes[&migration.id]);
                    self.admitted_mib.push(facts.resident_bytes / MIB);
                    self.departing.insert(migration.id, facts.resident_bytes);
                }
                CoordinatorOutput::Ended { id, result } => {
                    self.departing.remove(&id);
                    self.results.insert(id, result.is_ok());
                }
                CoordinatorOutput::LogEvent(EventKind::MigrationFailed { id, .. }) => {
                    self.departing.remove(&id);
                }
                CoordinatorOutput::LogEvent(EventKind::MigrationStep { id, step, .. }) => {
                    self.completed_steps.push((id, step))
                }
                _ => {}
            }
        }
    }

    fn report(&mut self, id: MigrationId, from: u16, report: StepReport) {
        self.coordinator.on_report(self.now, host(from), id, report);
        self.run_outputs();
    }

    fn report_inspected(&mut self, id: MigrationId) {
        let facts = TaskFacts {
            resident_bytes: self.sizes[&id],
            ..TaskFacts::default()
        };
        let (suspended, memory_can_follow, can_pre_copy) =
            (Suspensions::default(), self.pre_copy, self.pre_copy);
        self.report(
            id,
            2,
            StepReport::Inspected {
                facts,
                suspensions: suspended,
                supports_post_copy: memory_can_follow,
                supports_pre_copy: can_pre_copy,
            },
        );
    }

    /// Reports that the target accepts the task and has chosen this engine.
    fn report_prepared(&mut self, id: MigrationId, engine: Engine) {
        let (verdict, token, memory_follows) = (Vec::new(), PathBuf::new(), self.post_copy);
        self.report(
            id,
            3,
            StepReport::Prepared {
                verdict,
                resume_token: token,
                post_copy: memory_follows,
                engine,
            },
        );
    }

    /// Reports that the images have arrived.
    fn report_received(&mut self, id: MigrationId) {
        self.report_prepared(id, Engine::Criu);
        self.report(id, 2, StepReport::Stopped);
        self.departing.remove(&id);
        self.report(
            id,
            3,
            StepReport::Received {
                bytes: self.sizes[&id],
            },
        );
    }

    /// Reports all steps that follow the arrival of the images.
    fn report_remaining_steps(&mut self, id: MigrationId) {
        self.report_until_running(id);
        self.report(id, 3, StepReport::Arrived);
    }

    /// Reports the steps until the task runs at the target; its memory may still be incomplete.
    fn report_until_running(&mut self, id: MigrationId) {
        self.report(id, 3, StepReport::Restored);
        self.coordinator.on_location_recorded(id, Ok(()));
        self.coordinator.on_location_announced(self.now, id);
        self.report(id, 2, StepReport::SourceGone(Usage::default()));
        self.report(id, 3, StepReport::Running);
    }

    fn advance_to_deadline(&mut self) -> bool {
        let Some(at) = self.coordinator.next_deadline() else {
            return false;
        };
        self.now = self.now.max(at);
        self.coordinator.on_timer(self.now);
        self.run_outputs();
        true
    }
}

/// If many tasks of one host migrate, the smallest depart first, a few at a time.
#[test]
fn smallest_tasks_depart_first() {
    let mut world = QueueSimulation::default();
    let sizes = [900, 3, 700, 1, 50, 2, 40, 30];
    let all: Vec<MigrationId> = (1..)
        .zip(sizes)
        .map(|(number, mib)| world.begin(number, mib))
        .collect();
    for id in &all {
        assert!(
            world.admitted_mib.is_empty(),
            "not before it is known how large all are"
        );
        world.report_inspected(*id);
    }
    assert_eq!(world.admitted_mib, [1, 2, 3, 30]);
    for expected in [40, 50, 700, 900] {
        let next = *world
            .departing
            .iter()
            .min_by_key(|(_, bytes)| **bytes)
            .expect("somebody")
            .0;
        world.report_received(next);
        assert_eq!(
            world.admitted_mib.last(),
            Some(&expected),
            "as soon as the images of another one are there"
        );
        world.report_remaining_steps(next);
    }
    assert_eq!(world.results.len(), 4);
}

/// While the size of one task is unknown, another task waits at most [`SIZE_WAIT_MAX`]. A single
/// task does not wait.
#[test]
fn unknown_size_delays_admission_briefly() {
    let mut world = QueueSimulation::default();
    let (_unreported, known) = (world.begin(1, 5), world.begin(2, 7));
    world.report_inspected(known);
    assert_eq!(world.admitted_mib, [0; 0]);
    assert_eq!(world.coordinator.next_deadline(), Some(SIZE_WAIT_MAX));
    assert!(world.advance_to_deadline());
    assert_eq!(world.admitted_mib, [7]);
    let alone = QueueSimulation::default();
    let mut world = alone;
    let id = world.begin(1, 5);
    world.report_inspected(id);
    assert_eq!(
        (world.admitted_mib.as_slice(), world.now),
        (&[5][..], Micros(0)),
        "who is alone waits for nobody"
    );
}

/// Programs that write their own checkpoints occupy no slot.
#[test]
fn restarted_programs_occupy_no_slot() {
    let mut world = QueueSimulation::default();
    for number in 1..=2 * DEPARTURES_MAX as i32 {
        let id = world.begin(number, 1);
        world.report_inspected(id);
        world.report_prepared(id, Engine::Restart { timeout_s: 3600 });
    }
    let id = world.begin(100, 4096);
    world.report_inspected(id);
    assert_eq!(world.admitted_mib.last(), Some(&4096));
}

/// Post-copy memory occupies a slot, but a task that is paused for an owner does not wait for that
/// slot.
#[test]
fn paused_task_ignores_post_copy_slots() {
    let mut world = QueueSimulation {
        post_copy: true,
        ..QueueSimulation::default()
    };
    let first: Vec<MigrationId> = (1..=DEPARTURES_MAX as i32)
        .map(|number| world.begin(number, 100))
        .collect();
    first.iter().for_each(|id| world.report_inspected(*id));
    for id in &first {
        world.report_received(*id);
        world.report_until_running(*id);
    }
    let large = world.begin(20, 200);
    world.report_inspected(large);
    let small = world.begin(21, 3);
    world.report_inspected(small);
    assert_eq!(
        world.admitted_mib[DEPARTURES_MAX..],
        [3],
        "the link is full of what is smaller than the large one"
    );
    let unwanted = world.begin_for(
        22,
        300,
        MigrationCause::Owner {
            why: "olga is there".into(),
        },
    );
    world.report_inspected(unwanted);
    assert_eq!(
        world.admitted_mib.last(),
        Some(&300),
        "who stands still for an owner runs again the sooner"
    );
    world.report(first[0], 3, StepReport::Arrived);
    assert_eq!(
        world.admitted_mib.last(),
        Some(&300),
        "the small one and three others are on the link"
    );
    world.report(first[1], 3, StepReport::Arrived);
    assert_eq!(world.admitted_mib.last(), Some(&200));
}

/// Pre-copy occupies a slot like post-copy. A task that is evicted for an owner does not wait for
/// slots of pre-copies, and is not pre-copied.
#[test]
fn eviction_skips_pre_copy() {
    let mut world = QueueSimulation {
        post_copy: true,
        pre_copy: true,
        ..QueueSimulation::default()
    };
    let first: Vec<MigrationId> = (1..=DEPARTURES_MAX as i32)
        .map(|number| world.begin(number, 100))
        .collect();
    first.iter().for_each(|id| world.report_inspected(*id));
    first
        .iter()
        .for_each(|id| world.report_prepared(*id, Engine::Criu));
    let large = world.begin(20, 200);
    world.report_inspected(large);
    let unwanted = world.begin_for(
        22,
        300,
        MigrationCause::Owner {
            why: "olga is there".into(),
        },
    );
    world.report_inspected(unwanted);
    assert_eq!(
        world.admitted_mib.last(),
        Some(&300),
        "what goes ahead of the others is in nobody's way who stands still"
    );
    world.report_prepared(unwanted, Engine::Criu);
    world.report(unwanted, 2, StepReport::PreCopied { bytes: 1 });
    world.report(unwanted, 2, StepReport::Quiesced);
    let steps = |world: &QueueSimulation| {
        world
            .completed_steps
            .iter()
            .filter(|(_, step)| *step == Step::PreCopy)
            .map(|(id, _)| *id)
            .collect::<Vec<_>>()
    };
    assert_eq!(steps(&world), [], "nothing goes ahead where an owner waits");
    for id in &first {
        world.report(*id, 2, StepReport::PreCopied { bytes: 1 });
    }
    assert_eq!(steps(&world), first);
}

/// Small tasks do not wait for large tasks that are already departing, until the limit for tasks of
/// any size is reached.
#[test]
fn small_tasks_do_not_wait_for_large_ones() {
    let mut world = QueueSimulation::default();
    for number in 1..=DEPARTURES_MAX as i32 {
        let id = world.begin(number, 4096);
        world.report_inspected(id);
    }
    let large = world.begin(20, 4096);
    world.report_inspected(large);
    assert_eq!(world.departing.len(), DEPARTURES_MAX);
    for number in 30..40 {
        let id = world.begin(number, 1);
        world.report_inspected(id);
    }
    assert_eq!(world.departing.len(), DEPARTURES_WITH_SMALLER_MAX);
    assert_eq!(world.admitted_mib[DEPARTURES_MAX..], [1; 4]);
}

/// The loss of source or target fails the queued migrations as well.
#[test]
fn lost_host_fails_queued_migrations() {
    for lost in [2, 3] {
        let mut world = QueueSimulation::default();
        let all: Vec<MigrationId> = (1..=9).map(|number| world.begin(number, 9)).collect();
        all.iter().for_each(|id| world.report_inspected(*id));
        world.coordinator.on_host_lost(world.now, host(lost));
        world.run_outputs();
        assert_eq!(world.results, all.iter().map(|id| (*id, false)).collect());
        assert_eq!(
            (
                world.coordinator.next_deadline(),
                world.coordinator.active_count()
            ),
            (None, 0)
        );
    }
}

/// A cancelled migration frees its slot for the next one in the queue.
#[test]
fn cancelled_migration_frees_its_slot() {
    let mut world = QueueSimulation::default();
    let all: Vec<MigrationId> = (1..=5).map(|number| world.begin(number, 9)).collect();
    all.iter().for_each(|id| world.report_inspected(*id));
    assert_eq!(world.departing.len(), DEPARTURES_MAX);
    world.coordinator.cancel(all[0], "nobody wants it");
    world.run_outputs();
    assert!(world.advance_to_deadline());
    assert_eq!(
        (world.departing.len(), world.admitted_mib.len(), world.now),
        (DEPARTURES_MAX, 5, Micros(0))
    );
}

proptest! {
    /// Migrations start, fail, stall or complete in a random order. The number of departing tasks
    /// never exceeds the limits, no task is admitted before a smaller queued task, and every
    /// migration ends.
    #[test]
    fn every_migration_ends_within_the_limits(steps in proptest::collection::vec((0..6_u8, any::<u16>()), 1..300)) {
        let (mut world, mut open, mut number) = (QueueSimulation::default(), Vec::<MigrationId>::new(), 0);
        let mut inspected = BTreeMap::<MigrationId, bool>::new();
        for (step, dice) in steps {
            let admitted_before = world.admitted_mib.len();
            let waiting = |world: &QueueSimulation, open: &[MigrationId], inspected: &BTreeMap<MigrationId, bool>| {
                let waits = open.iter().filter(|id| inspected.contains_key(id) && !world.departing.contains_key(id));
                waits.filter(|id| inspected[id]).map(|id| world.sizes[id] / MIB).min()
            };
            let selected = (!open.is_empty()).then(|| open[usize::from(dice) % open.len()]);
            match (step, selected) {
                (0 | 1, _) if open.len() < MIGRATIONS_MAX => {
                    number += 1;
                    open.push(world.begin(number, u64::from(dice % 512) + 1));
                }
                (2, Some(id)) if !inspected.contains_key(&id) => {
                    inspected.insert(id, true);
                    world.report_inspected(id);
                }
                (3, Some(id)) if world.departing.contains_key(&id) => {
                    inspected.insert(id, false);
                    world.report_received(id);
                    world.report_remaining_steps(id);
                }
                (4, Some(id)) => {
                    let why = Failure::Engine("dice".into());
                    let step = if inspected.contains_key(&id) { Step::Prepare } else { Step::Inspect };
                    world.report(id, 2, StepReport::Failed { step, why });
                }
                (5, _) => {
                    world.now = world.now + Micros(u64::from(dice) * 10);
                    world.coordinator.on_timer(world.now);
                    world.run_outputs();
                }
                _ => {}
            }
            open.retain(|id| !world.results.contains_key(id));
            prop_assert!(world.departing.len() <= DEPARTURES_WITH_SMALLER_MAX);
            if let (Some(last), Some(waits)) = (world.admitted_mib[admitted_before..].last(), waiting(&world, &open, &inspected)) {
                prop_assert!(*last <= waits, "{last} went before {waits}");
            }
        }
        // Migrations that never report end at their deadlines.
        for _ in 0..1000 {
            if !world.advance_to_deadline() {
                break;
            }
        }
        prop_assert_eq!(world.coordinator.active_count(), 0);
    }
}

/// Only migrations that are queued for departure from a drained host are cancelled in favor of a
/// checkpoint.
#[test]
fn only_queued_drain_migrations_are_cancelled() {
    let mut world = QueueSimulation::default();
    let by = HostId::MASTER.tid();
    let tids = |numbers: &[i32]| {
        numbers
            .iter()
            .map(|number| Tid::from_raw(0x80000 + number))
            .collect::<BTreeSet<_>>()
    };
    for number in 0..=DEPARTURES_MAX as i32 {
        let id = world.begin_for(
            number,
            100 + number as u64,
            MigrationCause::Drain { requested_by: by },
        );
        world.report_inspected(id);
    }
    let requested = world.begin_for(50, 900, MigrationCause::Requested { requested_by: by });
    world.report_inspected(requested);
    world.now = world.now + SIZE_WAIT_MAX;
    world.coordinator.on_timer(world.now);
    world.run_outputs();
    assert_eq!(world.departing.len(), DEPARTURES_MAX);
    let last = DEPARTURES_MAX as i32;
    assert!(
        !world.coordinator.cancel_queued(&tids(&[0])),
        "it is on its way"
    );
    assert!(
        !world.coordinator.cancel_queued(&tids(&[50])),
        "somebody wants it there"
    );
    assert!(
        !world.coordinator.cancel_queued(&tids(&[60])),
        "it does not move"
    );
    assert!(
        !world.coordinator.cancel_queued(&tids(&[last, 0])),
        "what for, if the other one goes?"
    );
    assert!(world.coordinator.cancel_queued(&tids(&[last, 60])));
    assert!(
        tids(&[last])
            .iter()
            .all(|tid| world.coordinator.migration_of(*tid).is_none())
    );
    world.run_outputs();
    assert_eq!(world.results.values().collect::<Vec<_>>(), [&false]);
}
