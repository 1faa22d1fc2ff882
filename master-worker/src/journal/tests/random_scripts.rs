//! Random runs of several masters, each of which ends at a random call.

use super::faulty_storage::{Loss, Random};
use super::*;
use proptest::prelude::*;

/// Masters of one run.
const MASTERS: u64 = 4;

fn record() -> impl Strategy<Value = Record> {
    let id = 0..40_u64;
    let payload = proptest::collection::vec(any::<u8>(), 0..200).prop_map(Bytes::from);
    let stored = (
        id.clone(),
        -5.0..5.0_f64,
        any::<u64>(),
        any::<i64>(),
        payload.clone(),
    )
        .prop_map(|(id, key, groups, position, payload)| StoredTask {
            id,
            key,
            groups,
            position,
            payload,
        });
    let tasks = proptest::collection::vec(stored, 0..4);
    prop_oneof![
        3 => tasks.clone().prop_map(|tasks| Record::TasksAdded { tasks }),
        4 => (id.clone(), tasks, payload.clone()).prop_map(|(task, added, result)| {
            let stats = TaskStats::default();
            Record::Accepted { task, attempt: 2, result, returned: 0, added, stats }
        }),
        2 => (id.clone(), any::<u64>(), payload.clone()).prop_map(|(task, attempt, reason)| {
            Record::AttemptFailed(FailedAttempt { task, attempt, reason })
        }),
        1 => (id.clone(), payload.clone())
            .prop_map(|(task, history)| Record::Quarantined { task, history }),
        1 => proptest::collection::vec(id.clone(), 0..5)
            .prop_map(|tasks| Record::Pruned { tasks }),
        1 => (id, -9.0..9.0_f64).prop_map(|(task, key)| Record::KeyChanged { task, key }),
        1 => payload.prop_map(|statistics| Record::Statistics { statistics }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => record().prop_map(Step::Append),
        2 => Just(Step::Settle),
        1 => Just(Step::BeginSnapshot),
        1 => Just(Step::SettleSnapshot),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn random_runs_keep_every_durable_record(
        steps in proptest::collection::vec(step(), 1..40),
        seed in any::<u64>(),
    ) {
        let mut random = Random(seed);
        let (mut storage, mut history) = (FaultyStorage::default(), History::default());
        for _ in 0..MASTERS {
            storage.crash_at(1 + random.below(80));
            if let Ok(mut run) = TestRun::open(&storage, &mut history) {
                let _ = run.run(&steps, &mut history);
                run.close(&mut history);
            }
            let loss = match random.below(4) {
                0 => Loss::Kill,
                1 => Loss::Unsynced,
                2 => Loss::TornAt(random.below(300) as usize),
                _ => Loss::Random(random.next()),
            };
            storage = storage.after(loss);
        }
        let opened = recover_valid(&storage);
        history.check(&opened.previous, opened.generation);
    }
}
