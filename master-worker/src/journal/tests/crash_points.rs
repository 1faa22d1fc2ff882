//! A scripted run ends at each of its calls, and another master goes on.

use super::faulty_storage::Loss;
use super::*;

/// Longest write of the script in bytes: torn writes end at each of these bytes.
const TORN_BYTES_MAX: usize = 160;
const RANDOM_LOSSES: u64 = 6;
/// Enough to lose each of three removals without the others.
const RANDOM_REMOVAL_LOSSES: u64 = 60;
/// Calls of the script at least. Some snapshots are refused while another one is written.
const CALLS_MIN: u64 = 20;

fn script(waits_for_snapshots: bool) -> Vec<Step> {
    let mut steps = vec![
        Step::Append(added(0..4)),
        Step::Settle,
        Step::Append(accepted(0, 4..6)),
        Step::Append(failed(1, 1)),
        Step::Settle,
        Step::BeginSnapshot,
        Step::Append(quarantined(2)),
        Step::Settle,
        Step::SettleSnapshot,
        Step::Append(failed(1, 2)),
        Step::Append(Record::KeyChanged { task: 3, key: -1.0 }),
        Step::BeginSnapshot,
        Step::Settle,
        Step::SettleSnapshot,
        Step::Append(Record::Pruned { tasks: vec![4, 5] }),
        Step::Append(Record::Statistics {
            statistics: Bytes::from_static(b"worker 1"),
        }),
        Step::Settle,
    ];
    if !waits_for_snapshots {
        steps.retain(|step| !matches!(step, Step::SettleSnapshot));
        steps.push(Step::SettleSnapshot);
    }
    steps
}

fn all_losses() -> impl Iterator<Item = Loss> {
    [Loss::Kill, Loss::Unsynced]
        .into_iter()
        .chain((0..=TORN_BYTES_MAX).map(Loss::TornAt))
        .chain((0..RANDOM_LOSSES).map(Loss::Random))
}

/// Runs the script on a disk that ends at a call. Returns false if the script is shorter.
fn run_until_crash(storage: &FaultyStorage, steps: &[Step], history: &mut History) -> bool {
    if let Ok(mut run) = TestRun::open(storage, history) {
        let _ = run.run(steps, history);
        run.close(history);
    }
    storage.has_crashed()
}

/// Calls `check` with the disk and the history after an end at each call of the script.
fn at_each_crash(steps: &[Step], mut check: impl FnMut(u64, &FaultyStorage, &History)) {
    for call in 1.. {
        let (storage, mut history) = (FaultyStorage::default(), History::default());
        storage.crash_at(call);
        if !run_until_crash(&storage, steps, &mut history) {
            assert!(call > CALLS_MIN, "the script has only {call} calls");
            assert_eq!(history.durable, history.records.len());
            return;
        }
        check(call, &storage, &history);
    }
}

/// Returns true if the end of the log was cut.
fn check_recovery(storage: &FaultyStorage, history: &mut History, label: &str) -> bool {
    let previous = match recover(storage) {
        Ok(opened) => {
            history.check(&opened.previous, opened.generation);
            opened.previous
        }
        Err(e) => panic!("{label}: {e}"),
    };
    let leftover = |name: &String| name.starts_with(".tmp-");
    assert!(
        !storage.file_names().iter().any(leftover),
        "{label}: {:?}",
        storage.file_names()
    );
    matches!(previous, Previous::Unfinished(recovered) if recovered.truncated.is_some())
}

/// After an end at any call and any loss of unsynced data, the next master finds all durable
/// records, in order and once.
#[test]
fn every_durable_record_survives_a_crash_at_each_call() {
    for waits_for_snapshots in [true, false] {
        at_each_crash(&script(waits_for_snapshots), |call, storage, history| {
            for loss in all_losses() {
                let label = format!("call {call}, {loss:?}");
                let (disk, mut history) = (storage.after(loss), history.clone());
                check_recovery(&disk, &mut history, &label);
                // What was recovered is durable now, and what was cut is gone.
                let disk = disk.after(Loss::Unsynced);
                let is_cut_again = check_recovery(&disk, &mut history, &label);
                assert!(!is_cut_again, "{label}");
            }
        });
    }
}

/// The next master ends at each call of its own start, too.
#[test]
fn recovery_can_be_interrupted_at_each_call() {
    at_each_crash(&script(true), |call, storage, history| {
        for first_loss in [Loss::Kill, Loss::TornAt(20), Loss::Random(call)] {
            let disk = storage.after(first_loss);
            for second_call in 1.. {
                let disk = disk.after(Loss::Kill);
                disk.crash_at(second_call);
                let is_complete = recover(&disk).is_ok();
                for second_loss in [Loss::Kill, Loss::Unsynced, Loss::Random(call + second_call)] {
                    let label = format!("{call} {first_loss:?}, {second_call} {second_loss:?}");
                    check_recovery(&disk.after(second_loss), &mut history.clone(), &label);
                }
                if is_complete && !disk.has_crashed() {
                    break;
                }
            }
        }
    });
}

/// A recovered journal takes further records and snapshots, and those survive, too.
#[test]
fn run_goes_on_after_a_crash_at_each_call() {
    at_each_crash(&script(false), |call, storage, history| {
        for loss in [Loss::Kill, Loss::Unsynced, Loss::Random(call)] {
            let (disk, mut history) = (storage.after(loss), history.clone());
            let mut run = TestRun::start(&disk, &mut history);
            let steps = [
                Step::Append(added(100..103)),
                Step::BeginSnapshot,
                Step::Append(accepted(101, 103..104)),
                Step::Settle,
                Step::SettleSnapshot,
            ];
            run.complete(&steps, &mut history);
            run.close(&mut history);
            assert_eq!(history.durable, history.records.len());
            let label = format!("call {call}, {loss:?}");
            check_recovery(&disk.after(Loss::Unsynced), &mut history, &label);
        }
    });
}

/// A run that was finished leaves no file, and is never started again after an end at any call.
#[test]
fn finished_run_is_not_restarted_after_a_crash_at_each_call() {
    for call in 1.. {
        let (storage, mut history) = (FaultyStorage::default(), History::default());
        let mut run = TestRun::start(&storage, &mut history);
        let steps = [
            Step::Append(added(0..2)),
            Step::BeginSnapshot,
            Step::SettleSnapshot,
            Step::Append(Record::Finished),
            Step::Settle,
        ];
        run.complete(&steps, &mut history);
        run.close(&mut history);
        storage.crash_at(call);
        let removal = recovery::remove_finished(&storage);
        let random_losses = (0..RANDOM_REMOVAL_LOSSES).map(Loss::Random);
        for loss in [Loss::Kill, Loss::Unsynced]
            .into_iter()
            .chain(random_losses)
        {
            let disk = storage.after(loss);
            let opened = recover_valid(&disk);
            assert!(
                !matches!(opened.previous, Previous::Unfinished(_)),
                "call {call}, {loss:?}"
            );
            assert_eq!(disk.file_names(), ["log-1"]);
            assert_eq!(opened.generation, 1);
        }
        if !storage.has_crashed() {
            removal.expect("no call has failed");
            assert_eq!(storage.file_names(), Vec::<String>::new());
            break;
        }
    }
}
