//! Tests the admission queue of tasks that depart from one host: their order, and how many depart
//! at a time.

use checkpoint_protocol::{
    Coordinator, CoordinatorOutput, MIGRATIONS_MAX, SIZE_WAIT_MAX, SMALLER_DEPARTURES_MAX,
    TOTAL_DEPARTURES_MAX,
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
    task_bytes: BTreeMap<MigrationId, u64>,
    /// True if the targets choose post-copy.
    uses_post_copy: bool,
    /// True if the sources support pre-copy.
    uses_pre_copy: bool,
    /// Sizes in MiB of the admitted tasks, in the order of their admission.
    admitted_mib: Vec<u64>,
    departing_bytes: BTreeMap<MigrationId, u64>,
    /// Migrations that have ended: true if the migration was successful.
    successes: BTreeMap<MigrationId, bool>,
    /// Completed steps, in the order in which the coordinator logged them.
    completed_steps: Vec<(MigrationId, Step)>,
}

impl QueueSimulation {
    fn begin(&mut self, task_number: i32, size_mib: u64) -> MigrationId {
        self.begin_with_cause(
            task_number,
            size_mib,
            MigrationCause::Requested {
                requested_by: HostId::MASTER.tid(),
            },
        )
    }

    fn begin_with_cause(
        &mut self,
        task_number: i32,
        size_mib: u64,
        cause: MigrationCause,
    ) -> MigrationId {
        let tid = Tid::from_raw(0x80000 + task_number);
        let id = self
            .coordinator
            .begin_migration(self.now, tid, host(2), host(3), cause)
            .expect("there is room");
        self.task_bytes.insert(id, size_mib * MIB);
        self.execute_outputs();
        id
    }

    fn execute_outputs(&mut self) {
        while let Some(output) = self.coordinator.poll() {
            match output {
                CoordinatorOutput::Order {
                    migration,
                    order: MigrationOrder::Prepare { facts, .. },
                    ..
                } => {
                    assert_eq!(facts.memory_bytes, self.task_bytes[&migration.id]);
                    self.admitted_mib.push(facts.memory_bytes / MIB);
                    self.departing_bytes
                        .insert(migration.id, facts.memory_bytes);
                }
                CoordinatorOutput::Ended { id, result } => {
                    self.departing_bytes.remove(&id);
                    self.successes.insert(id, result.is_ok());
                }
                CoordinatorOutput::LogEvent(EventKind::MigrationFailed { id, .. }) => {
                    self.departing_bytes.remove(&id);
                }
                CoordinatorOutput::LogEvent(EventKind::MigrationStep { id, step, .. }) => {
                    self.completed_steps.push((id, step))
                }
                _ => {}
            }
        }
    }

    fn report(&mut self, id: MigrationId, host_index: u16, report: StepReport) {
        self.coordinator
            .on_report(self.now, host(host_index), id, report);
        self.execute_outputs();
    }

    fn report_inspected(&mut self, id: MigrationId) {
        let facts = TaskFacts {
            memory_bytes: self.task_bytes[&id],
            ..TaskFacts::default()
        };
        let (suspensions, supports_post_copy, supports_pre_copy) = (
            Suspensions::default(),
            self.uses_pre_copy,
            self.uses_pre_copy,
        );
        self.report(
            id,
            2,
            StepReport::Inspected {
                facts,
                suspensions,
                supports_post_copy,
                supports_pre_copy,
            },
        );
    }

    /// Reports that the target accepts the task and has chosen this engine.
    fn report_prepared(&mut self, id: MigrationId, engine: Engine) {
        let (verdict, resume_token, uses_post_copy) =
            (Vec::new(), PathBuf::new(), self.uses_post_copy);
        self.report(
            id,
            3,
            StepReport::Prepared {
                verdict,
                resume_token_path: resume_token,
                post_copy: uses_post_copy,
                engine,
            },
        );
    }

    /// Reports that the target is prepared for CRIU, and that the images have arrived.
    fn report_received(&mut self, id: MigrationId) {
        self.report_prepared(id, Engine::Criu);
        self.report(id, 2, StepReport::Stopped);
        self.departing_bytes.remove(&id);
        self.report(
            id,
            3,
            StepReport::Received {
                image_bytes: self.task_bytes[&id],
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
        self.report(id, 2, StepReport::SourceKilled(Usage::default()));
        self.report(id, 3, StepReport::Running);
    }

    fn advance_to_deadline(&mut self) -> bool {
        let Some(deadline) = self.coordinator.next_deadline() else {
            return false;
        };
        self.now = self.now.max(deadline);
        self.coordinator.on_timer(self.now);
        self.execute_outputs();
        true
    }
}

/// If many tasks of one host migrate, the smallest depart first, a few at a time.
#[test]
fn smallest_tasks_depart_first() {
    let mut simulation = QueueSimulation::default();
    let sizes_mib = [900, 3, 700, 1, 50, 2, 40, 30];
    let ids: Vec<MigrationId> = (1..)
        .zip(sizes_mib)
        .map(|(task_number, mib)| simulation.begin(task_number, mib))
        .collect();
    for id in &ids {
        assert!(
            simulation.admitted_mib.is_empty(),
            "not before it is known how large all are"
        );
        simulation.report_inspected(*id);
    }
    assert_eq!(simulation.admitted_mib, [1, 2, 3, 30]);
    for expected_mib in [40, 50, 700, 900] {
        let next_id = *simulation
            .departing_bytes
            .iter()
            .min_by_key(|(_, departing_bytes)| **departing_bytes)
            .expect("somebody")
            .0;
        simulation.report_received(next_id);
        assert_eq!(
            simulation.admitted_mib.last(),
            Some(&expected_mib),
            "as soon as the images of another one are there"
        );
        simulation.report_remaining_steps(next_id);
    }
    assert_eq!(simulation.successes.len(), 4);
}

/// While the size of one task is unknown, another task waits at most [`SIZE_WAIT_MAX`]. A single
/// task does not wait.
#[test]
fn unknown_size_delays_admission_briefly() {
    let mut simulation = QueueSimulation::default();
    let (_unreported_id, reported_id) = (simulation.begin(1, 5), simulation.begin(2, 7));
    simulation.report_inspected(reported_id);
    assert_eq!(simulation.admitted_mib, [0; 0]);
    assert_eq!(simulation.coordinator.next_deadline(), Some(SIZE_WAIT_MAX));
    assert!(simulation.advance_to_deadline());
    assert_eq!(simulation.admitted_mib, [7]);
    let single_simulation = QueueSimulation::default();
    let mut simulation = single_simulation;
    let id = simulation.begin(1, 5);
    simulation.report_inspected(id);
    assert_eq!(
        (simulation.admitted_mib.as_slice(), simulation.now),
        (&[5][..], Micros(0)),
        "who is alone waits for nobody"
    );
}

/// Programs that write their own checkpoints occupy no slot.
#[test]
fn restarted_programs_occupy_no_slot() {
    let mut simulation = QueueSimulation::default();
    for task_number in 1..=2 * SMALLER_DEPARTURES_MAX as i32 {
        let id = simulation.begin(task_number, 1);
        simulation.report_inspected(id);
        simulation.report_prepared(id, Engine::Restart { timeout_s: 3600 });
    }
    let id = simulation.begin(100, 4096);
    simulation.report_inspected(id);
    assert_eq!(simulation.admitted_mib.last(), Some(&4096));
}

/// Post-copy memory occupies a slot, but a task that is paused for an owner does not wait for that
/// slot.
#[test]
fn paused_task_ignores_post_copy_slots() {
    let mut simulation = QueueSimulation {
        uses_post_copy: true,
        ..QueueSimulation::default()
    };
    let first_ids: Vec<MigrationId> = (1..=SMALLER_DEPARTURES_MAX as i32)
        .map(|task_number| simulation.begin(task_number, 100))
        .collect();
    first_ids
        .iter()
        .for_each(|id| simulation.report_inspected(*id));
    for id in &first_ids {
        simulation.report_received(*id);
        simulation.report_until_running(*id);
    }
    let large_id = simulation.begin(20, 200);
    simulation.report_inspected(large_id);
    let small_id = simulation.begin(21, 3);
    simulation.report_inspected(small_id);
    assert_eq!(
        simulation.admitted_mib[SMALLER_DEPARTURES_MAX..],
        [3],
        "the link is full of what is smaller than the large one"
    );
    let evicted_id = simulation.begin_with_cause(
        22,
        300,
        MigrationCause::Owner {
            why: "olga is there".into(),
        },
    );
    simulation.report_inspected(evicted_id);
    assert_eq!(
        simulation.admitted_mib.last(),
        Some(&300),
        "a task paused for an owner runs again sooner"
    );
    simulation.report(first_ids[0], 3, StepReport::Arrived);
    assert_eq!(
        simulation.admitted_mib.last(),
        Some(&300),
        "the small one and three others are on the link"
    );
    simulation.report(first_ids[1], 3, StepReport::Arrived);
    assert_eq!(simulation.admitted_mib.last(), Some(&200));
}

/// Pre-copy occupies a slot like post-copy. A task that is evicted for an owner does not wait for
/// slots of pre-copies, and is not pre-copied.
#[test]
fn eviction_skips_pre_copy() {
    let mut simulation = QueueSimulation {
        uses_post_copy: true,
        uses_pre_copy: true,
        ..QueueSimulation::default()
    };
    let first_ids: Vec<MigrationId> = (1..=SMALLER_DEPARTURES_MAX as i32)
        .map(|task_number| simulation.begin(task_number, 100))
        .collect();
    first_ids
        .iter()
        .for_each(|id| simulation.report_inspected(*id));
    first_ids
        .iter()
        .for_each(|id| simulation.report_prepared(*id, Engine::Criu));
    let large_id = simulation.begin(20, 200);
    simulation.report_inspected(large_id);
    let evicted_id = simulation.begin_with_cause(
        22,
        300,
        MigrationCause::Owner {
            why: "olga is there".into(),
        },
    );
    simulation.report_inspected(evicted_id);
    assert_eq!(
        simulation.admitted_mib.last(),
        Some(&300),
        "pre-copied memory does not delay a task that is paused"
    );
    simulation.report_prepared(evicted_id, Engine::Criu);
    simulation.report(evicted_id, 2, StepReport::PreCopied { sent_bytes: 1 });
    simulation.report(evicted_id, 2, StepReport::Quiesced);
    let logged_steps = |simulation: &QueueSimulation| {
        simulation
            .completed_steps
            .iter()
            .filter(|(_, step)| *step == Step::PreCopy)
            .map(|(id, _)| *id)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        logged_steps(&simulation),
        [],
        "nothing goes ahead where an owner waits"
    );
    for id in &first_ids {
        simulation.report(*id, 2, StepReport::PreCopied { sent_bytes: 1 });
    }
    assert_eq!(logged_steps(&simulation), first_ids);
}

/// Small tasks do not wait for large tasks that are already departing, until
/// [`TOTAL_DEPARTURES_MAX`] tasks are departing.
#[test]
fn small_tasks_do_not_wait_for_large_ones() {
    let mut simulation = QueueSimulation::default();
    for task_number in 1..=SMALLER_DEPARTURES_MAX as i32 {
        let id = simulation.begin(task_number, 4096);
        simulation.report_inspected(id);
    }
    let large_id = simulation.begin(20, 4096);
    simulation.report_inspected(large_id);
    assert_eq!(simulation.departing_bytes.len(), SMALLER_DEPARTURES_MAX);
    for task_number in 30..40 {
        let id = simulation.begin(task_number, 1);
        simulation.report_inspected(id);
    }
    assert_eq!(simulation.departing_bytes.len(), TOTAL_DEPARTURES_MAX);
    assert_eq!(simulation.admitted_mib[SMALLER_DEPARTURES_MAX..], [1; 4]);
}

/// The loss of source or target fails the queued migrations as well.
#[test]
fn lost_host_fails_queued_migrations() {
    for lost_index in [2, 3] {
        let mut simulation = QueueSimulation::default();
        let ids: Vec<MigrationId> = (1..=9)
            .map(|task_number| simulation.begin(task_number, 9))
            .collect();
        ids.iter().for_each(|id| simulation.report_inspected(*id));
        simulation
            .coordinator
            .on_host_lost(simulation.now, host(lost_index), simulation.now);
        simulation.execute_outputs();
        assert_eq!(
            simulation.successes,
            ids.iter().map(|id| (*id, false)).collect()
        );
        assert_eq!(
            (
                simulation.coordinator.next_deadline(),
                simulation.coordinator.active_count()
            ),
            (None, 0)
        );
    }
}

/// A cancelled migration frees its slot for the next one in the queue.
#[test]
fn cancelled_migration_frees_its_slot() {
    let mut simulation = QueueSimulation::default();
    let ids: Vec<MigrationId> = (1..=5)
        .map(|task_number| simulation.begin(task_number, 9))
        .collect();
    ids.iter().for_each(|id| simulation.report_inspected(*id));
    assert_eq!(simulation.departing_bytes.len(), SMALLER_DEPARTURES_MAX);
    simulation.coordinator.cancel(ids[0], "nobody wants it");
    simulation.execute_outputs();
    assert!(simulation.advance_to_deadline());
    assert_eq!(
        (
            simulation.departing_bytes.len(),
            simulation.admitted_mib.len(),
            simulation.now
        ),
        (SMALLER_DEPARTURES_MAX, 5, Micros(0))
    );
}

proptest! {
    /// Migrations start, fail, stall or complete in a random order. The number of departing tasks
    /// never exceeds the limits, no task is admitted while a smaller task waits, and every
    /// migration ends.
    #[test]
    fn every_migration_ends_within_the_limits(steps in proptest::collection::vec((0..6_u8, any::<u16>()), 1..300)) {
        let (mut simulation, mut open_ids, mut task_number) = (QueueSimulation::default(), Vec::<MigrationId>::new(), 0);
        let mut inspected_ids = BTreeMap::<MigrationId, bool>::new();
        for (step, random_number) in steps {
            let admitted_before = simulation.admitted_mib.len();
            let queued_bytes = |simulation: &QueueSimulation, open_ids: &[MigrationId], inspected_ids: &BTreeMap<MigrationId, bool>| {
                let queued_ids = open_ids.iter().filter(|id| inspected_ids.contains_key(id) && !simulation.departing_bytes.contains_key(id));
                queued_ids.filter(|id| inspected_ids[id]).map(|id| simulation.task_bytes[id] / MIB).min()
            };
            let selected_id = (!open_ids.is_empty()).then(|| open_ids[usize::from(random_number) % open_ids.len()]);
            match (step, selected_id) {
                (0 | 1, _) if open_ids.len() < MIGRATIONS_MAX => {
                    task_number += 1;
                    open_ids.push(simulation.begin(task_number, u64::from(random_number % 512) + 1));
                }
                (2, Some(id)) if !inspected_ids.contains_key(&id) => {
                    inspected_ids.insert(id, true);
                    simulation.report_inspected(id);
                }
                (3, Some(id)) if simulation.departing_bytes.contains_key(&id) => {
                    inspected_ids.insert(id, false);
                    simulation.report_received(id);
                    simulation.report_remaining_steps(id);
                }
                (4, Some(id)) => {
                    let failure = Failure::Engine("dice".into());
                    let step = if inspected_ids.contains_key(&id) { Step::Prepare } else { Step::Inspect };
                    simulation.report(id, 2, StepReport::Failed { step, failure });
                }
                (5, _) => {
                    simulation.now = simulation.now + Micros(u64::from(random_number) * 10);
                    simulation.coordinator.on_timer(simulation.now);
                    simulation.execute_outputs();
                }
                _ => {}
            }
            open_ids.retain(|id| !simulation.successes.contains_key(id));
            prop_assert!(simulation.departing_bytes.len() <= TOTAL_DEPARTURES_MAX);
            if let (Some(last_mib), Some(queued_ids)) = (simulation.admitted_mib[admitted_before..].last(), queued_bytes(&simulation, &open_ids, &inspected_ids)) {
                prop_assert!(*last_mib <= queued_ids, "{last_mib} went before {queued_ids}");
            }
        }
        // Migrations that never report end at their deadlines.
        for _ in 0..1000 {
            if !simulation.advance_to_deadline() {
                break;
            }
        }
        prop_assert_eq!(simulation.coordinator.active_count(), 0);
    }
}

/// Only migrations that are queued for departure from a drained host are cancelled in favor of a
/// checkpoint.
#[test]
fn only_queued_drain_migrations_are_cancelled() {
    let mut simulation = QueueSimulation::default();
    let requester = HostId::MASTER.tid();
    let tids = |numbers: &[i32]| {
        numbers
            .iter()
            .map(|task_number| Tid::from_raw(0x80000 + task_number))
            .collect::<BTreeSet<_>>()
    };
    for task_number in 0..=SMALLER_DEPARTURES_MAX as i32 {
        let id = simulation.begin_with_cause(
            task_number,
            100 + task_number as u64,
            MigrationCause::Drain {
                requested_by: requester,
            },
        );
        simulation.report_inspected(id);
    }
    let requested_id = simulation.begin_with_cause(
        50,
        900,
        MigrationCause::Requested {
            requested_by: requester,
        },
    );
    simulation.report_inspected(requested_id);
    simulation.now = simulation.now + SIZE_WAIT_MAX;
    simulation.coordinator.on_timer(simulation.now);
    simulation.execute_outputs();
    assert_eq!(simulation.departing_bytes.len(), SMALLER_DEPARTURES_MAX);
    let last_number = SMALLER_DEPARTURES_MAX as i32;
    assert!(
        !simulation.coordinator.cancel_if_all_queued(&tids(&[0])),
        "it is migrating"
    );
    assert!(
        !simulation.coordinator.cancel_if_all_queued(&tids(&[50])),
        "somebody wants it there"
    );
    assert!(
        !simulation.coordinator.cancel_if_all_queued(&tids(&[60])),
        "it does not move"
    );
    assert!(
        !simulation
            .coordinator
            .cancel_if_all_queued(&tids(&[last_number, 0])),
        "what for, if the other one goes?"
    );
    assert!(
        simulation
            .coordinator
            .cancel_if_all_queued(&tids(&[last_number, 60]))
    );
    assert!(
        tids(&[last_number])
            .iter()
            .all(|tid| simulation.coordinator.migration_of(*tid).is_none())
    );
    simulation.execute_outputs();
    assert_eq!(simulation.successes.values().collect::<Vec<_>>(), [&false]);
}
