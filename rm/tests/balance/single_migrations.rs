//! Which tasks migrate, and what their migrations depend on.

use crate::{JobSim, SimHost, host_id};
use pvm_rm::decide::{
    CONFIDENCE_HALF_LIFE, COOLDOWN, HostPair, IDLE_TARGET_COOLDOWN, MigrationSample,
    PendingPredictions, PlacementPolicy, REBALANCES_MAX, TaskView, plan_rebalances,
};
use sempa_proto::Micros;

/// A task that has declared much work migrates to the fast host, with the reason in the log.
#[test]
fn declared_large_task_goes_to_fast_host() {
    let machines = [
        SimHost {
            cores: 1,
            speed: 500,
        },
        SimHost {
            cores: 1,
            speed: 2000,
        },
    ];
    let mut farm =
        JobSim::new(&machines, &[1000.0, 400.0, 400.0], PlacementPolicy::Load).with_declared_work();
    for (work, host) in farm.tasks.iter_mut().zip([1, 2, 2]) {
        work.host = host_id(host);
    }
    for _ in 0..30 {
        farm.advance_second(&[0.0, 0.0]);
    }
    farm.update_snapshot(&[0.0, 0.0]);
    let shifts = plan_rebalances(&farm.snapshot);
    let giant = shifts
        .iter()
        .find(|s| s.tid == farm.tasks[0].tid)
        .expect("the giant goes");
    assert_eq!((giant.from, giant.to), (host_id(1), host_id(2)));
    let why = giant.reason.to_string();
    assert!(
        why.contains(" of a processor instead of 0.50 lets its job end ")
            && why.contains(" s sooner, saves its tasks "),
        "{why}"
    );
}

/// A task on a slow host migrates to a free one, and the decision contains the reason.
#[test]
fn task_leaves_slow_host_with_reason() {
    let machines = [
        SimHost {
            cores: 1,
            speed: 500,
        },
        SimHost {
            cores: 1,
            speed: 1000,
        },
    ];
    let mut farm = JobSim::new(&machines, &[1000.0], PlacementPolicy::Load);
    farm.tasks[0].host = host_id(1);
    for _ in 0..100 {
        farm.advance_second(&[0.0, 0.0]);
    }
    farm.update_snapshot(&[0.0, 0.0]);
    let shifts = plan_rebalances(&farm.snapshot);
    assert_eq!(shifts.len(), 1);
    let why = shifts[0].reason.to_string();
    assert_eq!(
        why,
        "1.00 of a processor instead of 0.50 saves tasks 50.0 s and costs 0.7 s"
    );
}

/// A task does not migrate if it has just started, if its spawn named the host, or if it has
/// migrated often.
#[test]
fn young_named_and_often_migrated_tasks_stay() {
    let machines = [
        SimHost {
            cores: 1,
            speed: 500,
        },
        SimHost {
            cores: 1,
            speed: 1000,
        },
    ];
    let with = |change: &dyn Fn(&mut TaskView)| {
        let mut farm = JobSim::new(&machines, &[1000.0], PlacementPolicy::Load);
        farm.tasks[0].host = host_id(1);
        for _ in 0..100 {
            farm.advance_second(&[0.0, 0.0]);
        }
        farm.update_snapshot(&[0.0, 0.0]);
        change(&mut farm.snapshot.hosts.edit(host_id(1)).expect("a host").tasks[0]);
        plan_rebalances(&farm.snapshot).len()
    };
    let now = Micros::from_secs(100);
    assert_eq!(with(&|_| ()), 1);
    assert_eq!(with(&|t| t.host_named = true), 0);
    assert_eq!(with(&|t| t.pinned = true), 0);
    assert_eq!(with(&|t| t.started_at = Micros(now.0 - COOLDOWN.0 + 1)), 0);
    assert_eq!(
        with(&|t| t.recent_migrations = vec![Micros(now.0 - IDLE_TARGET_COOLDOWN.0 + 1)]),
        0
    );
    assert_eq!(
        with(&|t| t.recent_rebalances = vec![Micros(1); REBALANCES_MAX]),
        0
    );
    assert_eq!(
        with(&|t| t.work_done = Micros::from_millis(500)),
        0,
        "it ends before the move has paid off"
    );
    assert_eq!(
        with(&|t| t.memory_bytes = 100 << 30),
        0,
        "the move takes longer than the rest of its life"
    );
}

/// The cooldown after a migration is shorter if the target has no tasks.
#[test]
fn cooldown_is_shorter_for_empty_target() {
    let machines = [500, 4000].map(|speed| SimHost { cores: 1, speed });
    let goes = |sizes: &[f64], change: &dyn Fn(&mut TaskView)| {
        let mut farm = JobSim::new(&machines, sizes, PlacementPolicy::Load);
        farm.tasks
            .iter_mut()
            .zip([1, 2])
            .for_each(|(work, host)| work.host = host_id(host));
        for _ in 0..100 {
            farm.advance_second(&[0.0, 0.0]);
        }
        farm.update_snapshot(&[0.0, 0.0]);
        change(&mut farm.snapshot.hosts.edit(host_id(1)).expect("a host").tasks[0]);
        !plan_rebalances(&farm.snapshot).is_empty()
    };
    let shifted = |ago: u64| {
        move |task: &mut TaskView| task.recent_rebalances = vec![Micros::from_secs(100 - ago)]
    };
    let (alone, beside): (&[f64], &[f64]) = (&[1000.0], &[1000.0, 1000.0]);
    assert_eq!(
        [goes(alone, &shifted(9)), goes(alone, &shifted(10))],
        [false, true]
    );
    assert_eq!(
        [goes(beside, &shifted(29)), goes(beside, &shifted(30))],
        [false, true],
        "it holds up the other one there"
    );
    let now = Micros::from_secs(100);
    assert!(
        !goes(beside, &|t| t.recent_migrations =
            vec![Micros(now.0 - COOLDOWN.0 + 1)]),
        "nor after a move for another reason"
    );
    assert!(goes(beside, &|t| t.recent_migrations =
        vec![Micros(now.0 - COOLDOWN.0)]));
}

/// If a link is slow, fewer migrations use it; migrations over other links are not affected.
#[test]
fn slow_link_affects_only_its_own_migrations() {
    // Two free hosts are possible targets for the task on the slow host.
    let machines = [500, 1000, 900].map(|speed| SimHost { cores: 1, speed });
    let with = |moves: &[(u16, u64)]| {
        let mut farm = JobSim::new(&machines, &[1000.0], PlacementPolicy::Load);
        farm.tasks[0].host = host_id(1);
        for _ in 0..100 {
            farm.advance_second(&[0.0; 3]);
        }
        farm.update_snapshot(&[0.0; 3]);
        let host = |i: u16| farm.snapshot.host(host_id(i)).expect("a host").clone();
        let journey = |(to, seconds): &(u16, u64)| MigrationSample {
            pair: Some(HostPair::between(&host(1), &host(*to))),
            slowness: 1.0,
            image_bytes: 200_000,
            resident_bytes: 1 << 30,
            frozen: Micros::from_millis(300),
            complete_after: Micros::from_secs(*seconds),
        };
        let journeys: Vec<MigrationSample> = moves.iter().map(journey).collect();
        journeys
            .iter()
            .for_each(|journey| farm.snapshot.estimates.record_migration(journey));
        farm.snapshot.hosts.edit(host_id(1)).expect("a host").tasks[0].memory_bytes = 1 << 30;
        farm.snapshot.hosts.refresh(farm.snapshot.now);
        plan_rebalances(&farm.snapshot)
            .first()
            .map(|shift| shift.to)
    };
    assert_eq!(with(&[]), Some(host_id(2)), "the fastest one");
    assert_eq!(
        with(&[(2, 10), (3, 10)]),
        Some(host_id(2)),
        "it is worth ten seconds"
    );
    assert_eq!(with(&[(2, 60), (3, 60)]), None, "it is not worth a minute");
    assert_eq!(
        with(&[(2, 60), (3, 2)]),
        Some(host_id(3)),
        "the other link is as it was seen"
    );
}

/// If the actual gain of migrations is a third of the prediction, unprofitable migrations stop
/// until that observation is old.
#[test]
fn overestimated_gains_reduce_confidence_for_a_while() {
    let machines = [500, 1000].map(|speed| SimHost { cores: 1, speed });
    let mut farm = JobSim::new(&machines, &[1000.0], PlacementPolicy::Load);
    farm.tasks[0].host = host_id(1);
    for _ in 0..100 {
        farm.advance_second(&[0.0; 2]);
    }
    farm.update_snapshot(&[0.0; 2]);
    let bytes = |farm: &mut JobSim, bytes| {
        farm.snapshot.hosts.edit(host_id(1)).expect("a host").tasks[0].memory_bytes = bytes;
        farm.snapshot.hosts.refresh(farm.snapshot.now);
        plan_rebalances(&farm.snapshot)
    };
    let shift = bytes(&mut farm, 2 << 30)
        .pop()
        .expect("it saves fifty seconds and costs thirteen");
    // Tasks end after a third of the work that was predicted for them.
    for n in 0..40 {
        let (mut promises, at) = (
            PendingPredictions::default(),
            Micros(farm.snapshot.now.0 - 40_000_000 + n),
        );
        promises.follow(&shift);
        promises.record_arrival(at, shift.tid, shift.to, (Micros(0), Micros::from_secs(1)));
        let done = Micros(shift.reason.work_left.0 / 3);
        assert!(
            promises
                .conclude(at + done, shift.tid, done, &mut farm.snapshot.estimates)
                .is_some()
        );
    }
    assert_eq!(
        bytes(&mut farm, 2 << 30),
        [],
        "a third of fifty seconds is not worth it"
    );
    let small = bytes(&mut farm, 1 << 20)
        .pop()
        .expect("of a small one it still is");
    assert!(
        small.reason.gain.0 * 2 < shift.reason.gain.0
            && small.reason.computed_gain == shift.reason.computed_gain,
        "{small:?}"
    );
    // No task migrates in this period. Only the tested times are simulated, because samples would
    // expire.
    let later = farm.snapshot.now + Micros(6 * CONFIDENCE_HALF_LIFE.0);
    let host = |farm: &mut JobSim, id| {
        let host = farm.snapshot.hosts.edit(host_id(id)).expect("a host");
        host.sample.as_mut().expect("sampled").received_at = later;
    };
    (1..=2).for_each(|id| host(&mut farm, id));
    farm.snapshot.hosts.refresh(later);
    farm.snapshot.now = later;
    assert_eq!(bytes(&mut farm, 2 << 30).len(), 1, "it is tried once more");
}

/// A task does not migrate to another network than that of its peers for a small gain.
#[test]
fn task_stays_near_its_peers_for_small_gain() {
    // The task has half a processor. Two free hosts offer slightly more. The better of them is in
    // another network in one of the cases.
    let machines = [1000, 1000, 630, 680].map(|speed| SimHost { cores: 1, speed });
    let with = |far: &[u16], alone: bool| {
        let mut farm = JobSim::new(&machines, &[1000.0; 3], PlacementPolicy::Load);
        for (work, host) in farm.tasks.iter_mut().zip([1, 1, 2]) {
            work.host = host_id(host);
        }
        for _ in 0..200 {
            farm.advance_second(&[0.0; 4]);
        }
        farm.update_snapshot(&[0.0; 4]);
        for id in far {
            farm.snapshot.hosts.edit(host_id(*id)).expect("a host").zone = 7;
        }
        if alone {
            farm.snapshot
                .hosts
                .edit(host_id(2))
                .expect("a host")
                .tasks
                .clear();
            farm.snapshot.hosts.edit(host_id(2)).expect("a host").speed = 1;
        }
        farm.snapshot.hosts.refresh(farm.snapshot.now);
        plan_rebalances(&farm.snapshot)
            .first()
            .map(|shift| shift.to)
    };
    assert_eq!(with(&[], false), Some(host_id(4)), "the best one");
    assert_eq!(with(&[4], false), Some(host_id(3)), "the best one nearby");
    assert_eq!(
        with(&[3, 4], false),
        Some(host_id(4)),
        "a tenth less is still a fifth more"
    );
    assert_eq!(
        with(&[4], true),
        Some(host_id(4)),
        "who talks to nobody elsewhere goes anywhere"
    );
}

/// The gain of a job with barriers is that of its slowest task.
#[test]
fn barrier_job_is_judged_by_slowest_task() {
    // Two hosts of half speed run one task each. A third host of full speed is free.
    let slow = SimHost {
        cores: 1,
        speed: 500,
    };
    let barrier = |machines: &[SimHost], tasks_on: &[u16]| {
        let mut farm = JobSim::new(
            machines,
            &vec![1000.0; tasks_on.len()],
            PlacementPolicy::Load,
        );
        farm.barrier = true;
        for (work, host) in farm.tasks.iter_mut().zip(tasks_on) {
            work.host = host_id(*host);
        }
        for _ in 0..100 {
            farm.advance_second(&vec![0.0; machines.len()]);
        }
        farm.update_snapshot(&vec![0.0; machines.len()]);
        plan_rebalances(&farm.snapshot)
    };
    let fast = SimHost {
        cores: 1,
        speed: 1000,
    };
    assert!(
        barrier(&[slow, slow, fast], &[1, 2]).is_empty(),
        "the other one stays as slow"
    );
    let both = barrier(&[slow, slow, SimHost { cores: 2, ..fast }], &[1, 2]);
    assert_eq!(both.len(), 2, "together they gain");
    assert!(both.iter().all(|s| s.reason.barrier && s.to == host_id(3)));
    assert_eq!(
        barrier(&[slow, fast, fast], &[1, 2]).len(),
        1,
        "the slowest one holds the other up"
    );
}
