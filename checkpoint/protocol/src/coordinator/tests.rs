use super::*;

fn host(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn task(task_number: usize) -> Tid {
    Tid::for_task(host(2), task_number as u32).expect("a task")
}

fn begin(
    coordinator: &mut Coordinator,
    task_number: usize,
    from: u16,
    to: u16,
) -> Result<MigrationId, Refusal> {
    coordinator.begin_migration(
        Micros(0),
        task(task_number),
        host(from),
        host(to),
        MigrationCause::Requested {
            requested_by: HostId::MASTER.tid(),
        },
    )
}

/// Returns the results of all migrations that have ended, and discards the other outputs.
fn take_results(
    coordinator: &mut Coordinator,
) -> Vec<(MigrationId, Result<MigrationReport, MigrationError>)> {
    let to_result = |output| match output {
        CoordinatorOutput::Ended { id, result } => Some((id, result)),
        _ => None,
    };
    std::iter::from_fn(|| coordinator.poll())
        .filter_map(to_result)
        .collect()
}

/// With 64 migrations in progress another migration is refused until one of the 64 has ended.
#[test]
fn migrations_beyond_the_limit_are_refused() {
    let mut coordinator = Coordinator::new();
    let begin = |coordinator: &mut Coordinator, task_number| begin(coordinator, task_number, 2, 3);
    let ids: Vec<MigrationId> = (1..=64)
        .map(|n| begin(&mut coordinator, n).expect("there is room"))
        .collect();
    assert_eq!(
        begin(&mut coordinator, 65),
        Err(Refusal::TooManyMigrations { limit: 64 })
    );
    assert_eq!(
        begin(&mut coordinator, 64),
        Err(Refusal::AlreadyMigrating(ids[63])),
        "that is the better reason"
    );
    assert_eq!(coordinator.active_count(), 64);
    coordinator.cancel(ids[0], "nobody wants it");
    assert_eq!(take_results(&mut coordinator).len(), 1);
    assert!(begin(&mut coordinator, 65).is_ok());
    assert_eq!(
        begin(&mut coordinator, 66),
        Err(Refusal::TooManyMigrations { limit: 64 })
    );
}

/// If the source or the target is lost before the commit, the migration fails, and the reason
/// names the lost host. Other migrations continue.
#[test]
fn lost_host_fails_its_migrations_only() {
    for lost_index in [2, 3] {
        let mut coordinator = Coordinator::new();
        let id = begin(&mut coordinator, 1, 2, 3).expect("there is room");
        let other_id = begin(&mut coordinator, 2, 4, 5).expect("there is room");
        coordinator.on_host_lost(Micros(1), host(lost_index), Micros(1));
        let failure = Failure::HostLost(host(lost_index));
        assert_eq!(
            take_results(&mut coordinator),
            [(
                id,
                Err(MigrationError {
                    step: Step::Inspect,
                    failure
                })
            )]
        );
        assert_eq!(
            coordinator
                .migration_of(task(2))
                .map(|migration| migration.id),
            Some(other_id)
        );
    }
}

/// If the source is lost during the commit and its tasks have ended, the target runs its copy
/// when the location is announced. Until then no deadline is due.
#[test]
fn target_of_lost_source_runs_after_the_announcement() {
    let mut coordinator = Coordinator::new();
    let id = begin(&mut coordinator, 1, 2, 3).expect("there is room");
    let m = coordinator.migrations.get_mut(&id).expect("begun");
    (m.step, m.deadline, m.is_announcing) = (Step::Commit, None, true);
    let now = Micros(5);
    coordinator.on_host_lost(now, host(2), now);
    coordinator.on_timer(now);
    assert_eq!(coordinator.next_deadline(), None);
    coordinator.on_location_announced(now, id);
    assert_eq!(coordinator.next_deadline(), Some(now));
    coordinator.on_timer(now);
    let has_run_order = std::iter::from_fn(|| coordinator.poll()).any(|output| {
        let CoordinatorOutput::Order {
            host: to, order, ..
        } = output
        else {
            return false;
        };
        to == host(3) && matches!(order, MigrationOrder::Run(_))
    });
    assert!(has_run_order);
}
