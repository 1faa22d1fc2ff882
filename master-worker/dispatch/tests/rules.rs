//! Rules of the dispatcher, one by one. Several are faults of MW's later releases.

use sempa_work_dispatch::{
    AttemptId, AttemptOutcome, AttemptReport, ClassId, Dispatcher, Event, Groups, Key, LossReason,
    Micros, NewTask, Output, PauseCause, PausePolicy, RefusedTasks, RunStatistics, Settings,
    TaskId, WorkerId,
};

const SECOND: Micros = 1_000_000;
const CLASS: ClassId = ClassId(0);

fn dispatcher(settings: Settings) -> Dispatcher {
    Dispatcher::new(settings, 1, RunStatistics::default(), 0)
}

fn task(id: u64, key: f64) -> NewTask {
    NewTask {
        id: TaskId(id),
        key: Key::new(key).expect("a number"),
        groups: Groups::ALL,
    }
}

fn outputs(dispatcher: &mut Dispatcher) -> Vec<Output> {
    std::iter::from_fn(|| dispatcher.poll()).collect()
}

/// Adds a worker on `host` that is ready.
fn add_worker(dispatcher: &mut Dispatcher, now: Micros, id: u64, host: &str) {
    add_worker_of(dispatcher, now, id, host, Groups::ALL, None);
}

fn add_worker_of(
    dispatcher: &mut Dispatcher,
    now: Micros,
    id: u64,
    host: &str,
    groups: Groups,
    benchmark: Option<Micros>,
) {
    let worker = WorkerId(id);
    let started = Event::WorkerStarted {
        worker,
        class: CLASS,
        groups,
        host: host.into(),
    };
    dispatcher.handle(now, started);
    dispatcher.handle(now, Event::WorkerReady { worker, benchmark });
}

/// Returns the attempts in the dispatches among `outputs`: worker, task, attempt.
fn dispatches(outputs: &[Output]) -> Vec<(u64, u64, AttemptId)> {
    let mut found = Vec::new();
    for output in outputs {
        if let Output::Dispatch {
            worker, attempts, ..
        } = output
        {
            found.extend(
                attempts
                    .iter()
                    .map(|(task, attempt)| (worker.0, task.0, *attempt)),
            );
        }
    }
    found
}

fn tasks_of(outputs: &[Output]) -> Vec<(u64, u64)> {
    let attempts = dispatches(outputs).into_iter();
    attempts.map(|(worker, task, _)| (worker, task)).collect()
}

fn report(dispatcher: &mut Dispatcher, now: Micros, attempt: (u64, u64, AttemptId), wall: Micros) {
    let (worker, task, attempt) = attempt;
    let report = AttemptReport {
        task: TaskId(task),
        attempt,
        outcome: AttemptOutcome::Completed,
        cpu: wall,
        wall,
    };
    let worker = WorkerId(worker);
    dispatcher.handle(now, Event::Attempt { worker, report });
}

/// Pauses a worker for the owner of its host.
fn pause(dispatcher: &mut Dispatcher, now: Micros, id: u64) {
    let paused = Event::WorkerPaused {
        worker: WorkerId(id),
        cause: PauseCause::Owner,
    };
    dispatcher.handle(now, paused);
}

fn quiet_settings() -> Settings {
    Settings {
        second_copies: false,
        look_ahead: 0,
        ..Settings::default()
    }
}

/// The lowest key comes first, also for keys that change while tasks wait (points 8 and 9).
#[test]
fn lowest_key_first_also_after_changes_of_keys() {
    let mut run = dispatcher(quiet_settings());
    let tasks = [task(1, 3.0), task(2, 1.0), task(3, 2.0)];
    run.add_tasks(0, &tasks).expect("added");
    assert!(run.set_key(TaskId(1), Key::new(0.5).expect("a number")));
    add_worker(&mut run, 0, 1, "a");
    let mut order = Vec::new();
    for now in 1..=3 {
        let dispatched = dispatches(&outputs(&mut run));
        order.push(dispatched[0].1);
        report(&mut run, now, dispatched[0], 1);
    }
    assert_eq!(order, [1, 2, 3]);
    assert!(outputs(&mut run).contains(&Output::AllTasksClosed));
}

/// A task whose worker is lost goes to the front, not behind the newer tasks (point 7).
#[test]
fn lost_task_keeps_its_place() {
    let mut run = dispatcher(quiet_settings());
    let tasks: Vec<_> = (1..=4).map(|id| task(id, 0.0)).collect();
    run.add_tasks(0, &tasks).expect("added");
    add_worker(&mut run, 0, 1, "a");
    assert_eq!(tasks_of(&outputs(&mut run)), [(1, 1)]);
    let lost = Event::WorkerLost {
        worker: WorkerId(1),
        reason: LossReason::HostLost,
    };
    run.handle(1, lost);
    add_worker(&mut run, 2, 2, "b");
    assert_eq!(tasks_of(&outputs(&mut run)), [(2, 1)]);
}

/// A worker that a pause stops with the last task does not hold the run (point 2).
#[test]
fn last_task_of_a_paused_worker_gets_a_second_copy() {
    let mut run = dispatcher(Settings {
        pause_policy: PausePolicy::Duplicate,
        ..quiet_settings()
    });
    run.add_tasks(0, &[task(1, 0.0)]).expect("added");
    add_worker(&mut run, 0, 1, "a");
    let first = dispatches(&outputs(&mut run))[0];
    add_worker(&mut run, 0, 2, "b");
    pause(&mut run, SECOND, 1);
    let second = dispatches(&outputs(&mut run))[0];
    assert_eq!((second.0, second.1), (2, 1));
    assert_ne!(second.2, first.2, "each attempt has a number of its own");
    report(&mut run, 2 * SECOND, second, SECOND);
    let accepted = outputs(&mut run);
    assert!(matches!(
        accepted[0],
        Output::Cancel {
            worker: WorkerId(1),
            ..
        }
    ));
    assert!(matches!(
        accepted[1],
        Output::Accept {
            worker: WorkerId(2),
            ..
        }
    ));
    run.handle(
        3 * SECOND,
        Event::WorkerResumed {
            worker: WorkerId(1),
        },
    );
    report(&mut run, 4 * SECOND, first, 4 * SECOND);
    assert!(matches!(outputs(&mut run)[..], [Output::Discard { .. }]));
    assert_eq!(run.report(4 * SECOND).counts.results_discarded, 1);
}

/// With the policy keep, a pause changes nothing; with reassign, the task waits again after the
/// time, and a late result is accepted if it is the first one (point 3).
#[test]
fn reassigned_task_accepts_the_first_of_both_results() {
    let after = 10 * SECOND;
    let mut run = dispatcher(Settings {
        pause_policy: PausePolicy::Reassign { after },
        ..quiet_settings()
    });
    run.add_tasks(0, &[task(1, 0.0)]).expect("added");
    add_worker(&mut run, 0, 1, "a");
    let first = dispatches(&outputs(&mut run))[0];
    add_worker(&mut run, 0, 2, "b");
    pause(&mut run, SECOND, 1);
    assert_eq!(outputs(&mut run), []);
    run.handle(12 * SECOND, Event::Tick);
    let second = dispatches(&outputs(&mut run))[0];
    assert_eq!((second.0, second.1), (2, 1));
    run.handle(
        13 * SECOND,
        Event::WorkerResumed {
            worker: WorkerId(1),
        },
    );
    report(&mut run, 14 * SECOND, first, 14 * SECOND);
    let accepted = outputs(&mut run);
    assert!(accepted.iter().any(|o| matches!(
        o,
        Output::Accept {
            worker: WorkerId(1),
            ..
        }
    )));
    report(&mut run, 15 * SECOND, second, SECOND);
    assert!(matches!(outputs(&mut run)[..], [Output::Discard { .. }]));
}

/// A result that the master does not expect is discarded and counted; the run goes on (point 4).
#[test]
fn unexpected_results_end_nothing() {
    let mut run = dispatcher(quiet_settings());
    run.add_tasks(0, &[task(1, 0.0)]).expect("added");
    add_worker(&mut run, 0, 1, "a");
    let dispatched = dispatches(&outputs(&mut run))[0];
    report(&mut run, 1, (1, 77, dispatched.2), 1);
    report(&mut run, 1, (99, 78, dispatched.2), 1);
    assert_eq!(outputs(&mut run).len(), 2);
    report(&mut run, 2, dispatched, 1);
    let accepted = outputs(&mut run);
    assert!(matches!(accepted[0], Output::Accept { .. }));
    assert_eq!(run.report(2).counts.results_discarded, 2);
}

/// If all workers hang, the tasks wait again without any message (point 5).
#[test]
fn time_limit_of_an_attempt_needs_no_message() {
    let mut run = dispatcher(Settings {
        attempt_timeout: Some(SECOND),
        ..quiet_settings()
    });
    run.add_tasks(0, &[task(1, 0.0)]).expect("added");
    add_worker(&mut run, 0, 1, "a");
    outputs(&mut run);
    let mut now = 0;
    let mut failed = None;
    while failed.is_none() {
        now = run
            .next_wakeup()
            .expect("a time of the next check")
            .max(now + 1);
        assert!(now < 3 * SECOND);
        run.handle(now, Event::Tick);
        let found = outputs(&mut run);
        failed = found.into_iter().find_map(|output| match output {
            Output::AttemptFailed { record, .. } => Some(record.reason),
            _ => None,
        });
    }
    assert_eq!(failed, Some(LossReason::OverTime));
}

/// Short tasks are sent in batches with some ahead; long ones one by one (point 6).
#[test]
fn batches_follow_the_duration_of_tasks() {
    let settings = Settings {
        second_copies: false,
        ..Settings::default()
    };
    for (duration, batch) in [(100, 200), (10_000, 2), (2 * SECOND, 1)] {
        let mut run = dispatcher(settings.clone());
        let tasks: Vec<_> = (1..=1000).map(|id| task(id, 0.0)).collect();
        run.add_tasks(0, &tasks).expect("added");
        add_worker(&mut run, 0, 1, "a");
        let first = dispatches(&outputs(&mut run));
        assert_eq!(first.len(), 1, "nothing is known before the first result");
        report(&mut run, duration, first[0], duration);
        let dispatched = dispatches(&outputs(&mut run));
        assert_eq!(dispatched.len(), batch, "tasks of {duration} µs");
    }
}

/// An idle worker takes over what another one holds ahead.
#[test]
fn tasks_ahead_are_taken_back_for_an_idle_worker() {
    let mut run = dispatcher(Settings {
        second_copies: false,
        ..Settings::default()
    });
    let tasks: Vec<_> = (1..=3).map(|id| task(id, 0.0)).collect();
    run.add_tasks(0, &tasks).expect("added");
    add_worker(&mut run, 0, 1, "a");
    let first = dispatches(&outputs(&mut run));
    report(&mut run, 10_000, first[0], 10_000);
    assert_eq!(dispatches(&outputs(&mut run)).len(), 2);
    add_worker(&mut run, 10_001, 2, "b");
    let recalls = outputs(&mut run);
    let Output::Recall { worker, attempts } = &recalls[0] else {
        panic!("{recalls:?}");
    };
    assert_eq!((worker.0, attempts.len()), (1, 1));
    let returned = Event::TasksReturned {
        worker: *worker,
        attempts: attempts.clone(),
    };
    run.handle(10_002, returned);
    assert_eq!(tasks_of(&outputs(&mut run)), [(2, 3)]);
}

/// A straggler gets one second copy, never two, and the first attempt goes on.
#[test]
fn straggler_gets_one_second_copy() {
    let mut run = dispatcher(Settings {
        look_ahead: 0,
        ..Settings::default()
    });
    let tasks: Vec<_> = (1..=2).map(|id| task(id, 0.0)).collect();
    run.add_tasks(0, &tasks).expect("added");
    for id in 1..=3 {
        add_worker(&mut run, 0, id, "a");
    }
    let first = dispatches(&outputs(&mut run));
    report(&mut run, SECOND, first[0], SECOND);
    let mut copies = Vec::new();
    for now in 1..100 {
        run.handle(now * SECOND / 5, Event::Tick);
        copies.extend(tasks_of(&outputs(&mut run)));
    }
    assert_eq!(copies.len(), 1);
    assert_eq!(copies[0].1, first[1].1);
}

/// A task that kills its worker is quarantined after the limit of attempts (point 1). Losses for
/// owners and hosts do not count.
#[test]
fn quarantine_counts_only_reasons_that_blame_the_task() {
    let mut run = dispatcher(quiet_settings());
    run.add_tasks(0, &[task(1, 0.0)]).expect("added");
    let mut now = 0;
    let mut history = None;
    for id in 1..=40 {
        now += 100 * SECOND;
        add_worker(&mut run, now, id, if id % 2 == 0 { "a" } else { "b" });
        let found = outputs(&mut run);
        if dispatches(&found).is_empty() {
            break;
        }
        let reason = match id % 2 {
            0 => LossReason::Killed { signal: 11 },
            _ => LossReason::Owner,
        };
        let worker = WorkerId(id);
        run.handle(now + 1, Event::WorkerLost { worker, reason });
        history = outputs(&mut run)
            .into_iter()
            .find_map(|output| match output {
                Output::Quarantined { history, .. } => Some(history),
                _ => None,
            });
        if history.is_some() {
            break;
        }
    }
    let history = history.expect("quarantined");
    assert_eq!(history.len(), 10);
    let counted = history.iter().filter(|record| record.is_counted);
    assert_eq!(counted.count(), 5);
    assert!(
        history
            .iter()
            .all(|record| ["a", "b"].contains(&&*record.host))
    );
    assert_eq!(run.open_task_count(), 0);
    assert_eq!(run.quarantined_tasks().count(), 1);
}

/// After a counted loss, a task goes to another host and waits before that.
#[test]
fn failed_task_avoids_its_host_and_waits() {
    let mut run = dispatcher(quiet_settings());
    run.add_tasks(0, &[task(1, 0.0)]).expect("added");
    add_worker(&mut run, 0, 1, "a");
    outputs(&mut run);
    let lost = Event::WorkerLost {
        worker: WorkerId(1),
        reason: LossReason::Killed { signal: 9 },
    };
    run.handle(1, lost);
    add_worker(&mut run, 2, 2, "a");
    add_worker(&mut run, 2, 3, "b");
    assert_eq!(tasks_of(&outputs(&mut run)), []);
    assert_eq!(run.next_wakeup(), Some(1 + SECOND));
    run.handle(1 + SECOND, Event::Tick);
    assert_eq!(tasks_of(&outputs(&mut run)), [(3, 1)]);
}

/// Several tasks that may have caused a loss are executed alone until the cause is known.
#[test]
fn suspects_are_executed_alone() {
    let mut run = dispatcher(Settings {
        second_copies: false,
        ..Settings::default()
    });
    let tasks: Vec<_> = (1..=60).map(|id| task(id, 0.0)).collect();
    run.add_tasks(0, &tasks).expect("added");
    add_worker(&mut run, 0, 1, "a");
    let first = dispatches(&outputs(&mut run));
    report(&mut run, 1, first[0], 1);
    assert!(dispatches(&outputs(&mut run)).len() > 10);
    let lost = Event::WorkerLost {
        worker: WorkerId(1),
        reason: LossReason::Killed { signal: 11 },
    };
    run.handle(2, lost);
    add_worker(&mut run, 3, 2, "a");
    let alone = dispatches(&outputs(&mut run));
    assert_eq!(alone.len(), 1);
    assert_eq!(run.report(3).counts.attempts_failed, 0);
}

#[test]
fn groups_and_factors_select_workers() {
    let mut run = dispatcher(quiet_settings());
    let group = |number| Groups::single(number).expect("a group");
    add_worker_of(&mut run, 0, 1, "a", group(1), Some(2 * SECOND));
    add_worker_of(&mut run, 0, 2, "b", group(1).union(group(2)), Some(SECOND));
    outputs(&mut run);
    let tasks = [
        NewTask {
            groups: group(2),
            ..task(1, 0.0)
        },
        NewTask {
            groups: group(1),
            ..task(2, 0.0)
        },
        NewTask {
            groups: group(3),
            ..task(3, 0.0)
        },
    ];
    run.add_tasks(0, &tasks[1..2]).expect("added");
    assert_eq!(
        tasks_of(&outputs(&mut run)),
        [(2, 2)],
        "the faster worker first"
    );
    let later = [
        NewTask {
            id: TaskId(4),
            ..tasks[0]
        },
        NewTask {
            id: TaskId(5),
            ..tasks[2]
        },
    ];
    run.add_tasks(1, &later).expect("added");
    assert_eq!(
        tasks_of(&outputs(&mut run)),
        [],
        "no worker of these groups is idle"
    );
    assert_eq!(run.waiting_task_count(), 2);
}

#[test]
fn pruning_closes_waiting_tasks_and_cancels_running_ones() {
    let mut run = dispatcher(quiet_settings());
    let tasks = [task(1, 5.0), task(2, 7.0), task(3, 9.0)];
    run.add_tasks(0, &tasks).expect("added");
    add_worker(&mut run, 0, 1, "a");
    let running = dispatches(&outputs(&mut run))[0];
    assert_eq!(run.best_running_key(), Key::new(5.0));
    assert_eq!(run.best_waiting_key(), Key::new(7.0));
    let bound = |value| Key::new(value).expect("a number");
    assert_eq!(run.prune(1, bound(8.0), false), [TaskId(3)]);
    assert_eq!(run.prune(1, bound(1.0), true), [TaskId(2), TaskId(1)]);
    assert!(
        outputs(&mut run)
            .iter()
            .any(|o| matches!(o, Output::Cancel { .. }))
    );
    report(&mut run, 2, running, 1);
    assert!(
        outputs(&mut run)
            .iter()
            .any(|o| matches!(o, Output::Discard { .. }))
    );
    assert_eq!(run.report(2).counts.tasks_pruned, 3);
}

/// Fewer workers than before: idle ones leave first, then those with tasks after their results
/// (point 15).
#[test]
fn lower_target_releases_idle_workers_first() {
    let mut run = dispatcher(quiet_settings());
    run.add_tasks(0, &[task(1, 0.0)]).expect("added");
    run.set_target(0, CLASS, 3);
    for id in 1..=3 {
        add_worker(&mut run, 0, id, "a");
    }
    let first = dispatches(&outputs(&mut run))[0];
    run.set_target(1, CLASS, 1);
    let released = outputs(&mut run);
    let idle: Vec<_> = [1, 2, 3].into_iter().filter(|id| *id != first.0).collect();
    for id in idle {
        assert!(released.contains(&Output::ReleaseWorker {
            worker: WorkerId(id)
        }));
    }
    run.set_target(2, CLASS, 0);
    assert_eq!(outputs(&mut run), []);
    report(&mut run, 3, first, 3);
    let released = outputs(&mut run);
    assert!(released.contains(&Output::ReleaseWorker {
        worker: WorkerId(first.0)
    }));
}

/// Requests for workers come in steps, back off after failures, and follow new hosts at once.
#[test]
fn requests_for_workers_follow_hosts() {
    let mut run = dispatcher(quiet_settings());
    run.set_target(0, CLASS, 20);
    let request = |count| Output::StartWorkers {
        class: CLASS,
        count,
    };
    assert_eq!(outputs(&mut run), [request(6), Output::AllTasksClosed]);
    run.handle(1, Event::Tick);
    assert_eq!(outputs(&mut run), [request(6)]);
    run.handle(2, Event::Tick);
    assert_eq!(outputs(&mut run), [], "twelve are outstanding");
    run.handle(
        3,
        Event::StartFailed {
            class: CLASS,
            count: 12,
        },
    );
    run.handle(4, Event::Tick);
    assert_eq!(outputs(&mut run), [], "the next request is delayed");
    assert_eq!(run.next_wakeup(), Some(3 + SECOND));
    run.handle(5, Event::HostAvailable);
    assert_eq!(outputs(&mut run), [request(6)]);
}

/// A restarted master gives the workers of the earlier one time to return.
#[test]
fn restarted_master_waits_for_its_workers() {
    let mut run = Dispatcher::new(quiet_settings(), 2, RunStatistics::default(), 0);
    run.set_target(0, CLASS, 2);
    assert_eq!(outputs(&mut run), [Output::AllTasksClosed]);
    let wakeup = run.next_wakeup().expect("a request is due later");
    add_worker(&mut run, 1, 1, "a");
    run.handle(wakeup, Event::Tick);
    let request = Output::StartWorkers {
        class: CLASS,
        count: 1,
    };
    assert_eq!(outputs(&mut run), [request]);
}

/// N, P, A and η by hand: two workers, the second twice as fast.
#[test]
fn statistics_follow_the_formulas() {
    let mut run = dispatcher(quiet_settings());
    run.add_tasks(0, &[task(1, 0.0), task(2, 0.0)])
        .expect("added");
    add_worker_of(&mut run, 0, 1, "a", Groups::ALL, Some(2 * SECOND));
    add_worker_of(&mut run, 0, 2, "b", Groups::ALL, Some(SECOND));
    let dispatched = dispatches(&outputs(&mut run));
    report(&mut run, 4 * SECOND, dispatched[0], 4 * SECOND);
    report(&mut run, 4 * SECOND, dispatched[1], 2 * SECOND);
    pause(&mut run, 6 * SECOND, 1);
    let result = run.report(8 * SECOND);
    // u: 6 s with f = 1 and 8 s with f = 2; t: 4 s and 2 s; W: 8 s.
    assert_eq!(result.cpu_s, 6.0);
    assert_eq!(result.normalized_s, 4.0 + 2.0 * 2.0);
    assert_eq!(result.pool_performance, Some((6.0 + 16.0) / 8.0));
    assert_eq!(result.average_workers, Some(14.0 / 8.0));
    assert_eq!(result.average_workers_with_paused, Some(16.0 / 8.0));
    assert_eq!(result.efficiency, Some(6.0 / 14.0));
    assert_eq!(result.normalized_per_wall, Some(1.0));
    let empty = dispatcher(quiet_settings()).report(0);
    assert_eq!(empty.efficiency, None, "no quotient by zero (point 17)");
    let mut resumed = run.statistics_up_to(8 * SECOND);
    resumed.add_recovered_task(1.0, 0, 0);
    let counts = &resumed.counts;
    assert_eq!((counts.results_accepted, counts.attempts), (3, 3));
    let mut next = Dispatcher::new(quiet_settings(), 2, resumed, 0);
    let continued = next.report(0);
    assert_eq!(continued.wall_s, result.wall_s);
    assert_eq!(continued.average_workers, result.average_workers);
    assert_eq!(continued.efficiency, result.efficiency);
    add_worker_of(&mut next, 0, 3, "a", Groups::ALL, Some(4 * SECOND));
    let factor = next.workers(0)[0].factor;
    assert_eq!(factor, 0.5, "the first benchmark remains the reference");
}

#[test]
fn tasks_beyond_a_limit_are_refused_as_a_whole() {
    let mut settings = quiet_settings();
    settings.limits.tasks = 2;
    settings.limits.group_sets = 1;
    let mut run = dispatcher(settings);
    let tasks = [task(1, 0.0), task(2, 0.0), task(3, 0.0)];
    let refused = RefusedTasks::TooMany {
        open: 0,
        new: 3,
        limit: 2,
    };
    assert_eq!(run.add_tasks(0, &tasks), Err(refused));
    assert_eq!(run.open_task_count(), 0);
    let other_group = NewTask {
        groups: Groups::single(1).expect("a group"),
        ..task(2, 0.0)
    };
    let refused = RefusedTasks::TooManyGroupSets { limit: 1 };
    assert_eq!(run.add_tasks(0, &[task(1, 0.0), other_group]), Err(refused));
    run.add_tasks(0, &[task(5, 0.0)])
        .expect("within the limits");
    assert_eq!(
        run.add_tasks(0, &[task(5, 0.0)]),
        Err(RefusedTasks::OldId(TaskId(5)))
    );
}

/// A worker of an earlier master returns with its tasks: they run nowhere else, and tasks that are
/// closed are canceled.
#[test]
fn returned_worker_keeps_its_tasks() {
    let mut run = dispatcher(quiet_settings());
    run.restore_tasks(0, &[task(1, 0.0), task(2, 0.0)], Some(TaskId(9)));
    let held = [(TaskId(2), AttemptId(7)), (TaskId(5), AttemptId(8))];
    let returned = Event::WorkerReturned {
        worker: WorkerId(1),
        class: CLASS,
        groups: Groups::ALL,
        host: "a".into(),
        benchmark: None,
        held_attempts: held.to_vec(),
    };
    run.handle(0, returned);
    let found = outputs(&mut run);
    let canceled = Output::Cancel {
        worker: WorkerId(1),
        task: TaskId(5),
        attempt: AttemptId(8),
    };
    assert!(found.contains(&canceled), "{found:?}");
    report(&mut run, 1, (1, 2, AttemptId(7)), 1);
    assert!(
        outputs(&mut run)
            .iter()
            .any(|o| matches!(o, Output::Accept { .. }))
    );
}

/// A task that the driver abandons is closed: its worker is told, and a late result does not count.
#[test]
fn abandoned_task_is_closed_and_its_worker_continues() {
    let mut run = dispatcher(quiet_settings());
    run.add_tasks(0, &[task(1, 0.0), task(2, 0.0), task(3, 0.0)])
        .expect("added");
    add_worker(&mut run, 0, 1, "a");
    let first = dispatches(&outputs(&mut run))[0];
    assert_eq!(run.executing_task(WorkerId(1)), Some(TaskId(1)));
    assert_eq!(run.executing_task(WorkerId(2)), None);
    let closed = [TaskId(1), TaskId(2), TaskId(9)];
    assert_eq!(run.cancel(1, &closed), [TaskId(1), TaskId(2)]);
    let canceled = Output::Cancel {
        worker: WorkerId(1),
        task: TaskId(1),
        attempt: first.2,
    };
    assert_eq!(outputs(&mut run), [canceled]);
    assert_eq!(run.executing_task(WorkerId(1)), None);
    report(&mut run, 2, first, 2);
    let found = outputs(&mut run);
    assert!(matches!(found[0], Output::Discard { .. }), "{found:?}");
    assert_eq!(tasks_of(&found), [(1, 3)]);
    assert_eq!(run.report(2).counts.tasks_pruned, 2);
}

/// While a callback of the driver takes long, workers have tasks ahead: after the first such time,
/// they hold tasks for a time of this length.
#[test]
fn workers_hold_tasks_for_the_time_of_a_callback() {
    const DURATION: Micros = 10_000;
    const CALLBACK: Micros = SECOND;
    let mut run = dispatcher(Settings {
        second_copies: false,
        ..Settings::default()
    });
    let tasks: Vec<_> = (1..=2_000).map(|id| task(id, 0.0)).collect();
    run.add_tasks(0, &tasks).expect("added");
    add_worker(&mut run, 0, 1, "a");
    let mut held: std::collections::VecDeque<_> = dispatches(&outputs(&mut run)).into();
    let mut now = 0;
    for _ in 0..10 {
        now += DURATION;
        let finished = held.pop_front().expect("a task");
        report(&mut run, now, finished, DURATION);
        held.extend(dispatches(&outputs(&mut run)));
    }
    assert!(held.len() < 5, "short look-ahead: {} tasks", held.len());
    run.note_busy(CALLBACK);
    let enough = (CALLBACK / DURATION) as usize;
    for _ in 0..500 {
        now += DURATION;
        let finished = held.pop_front().expect("a task");
        report(&mut run, now, finished, DURATION);
        held.extend(dispatches(&outputs(&mut run)));
        run.note_busy(CALLBACK);
        assert!(held.len() >= enough.min(run.open_task_count()));
    }
    // The allowance decays when callbacks are short again.
    for _ in 0..1_000 {
        now += SECOND / 10;
        run.handle(now, Event::Tick);
    }
    run.note_busy(10);
    while held.len() > 5 {
        now += DURATION;
        report(&mut run, now, held.pop_front().expect("a task"), DURATION);
        assert_eq!(dispatches(&outputs(&mut run)), [], "{} left", held.len());
    }
    assert!(run.waiting_task_count() > 0);
}

/// Processor time counts as it was measured: more than the duration for a task with threads, less
/// for a task that waits (point 16).
#[test]
fn processor_time_is_not_replaced_by_the_duration() {
    let mut run = dispatcher(quiet_settings());
    run.add_tasks(0, &[task(1, 0.0), task(2, 0.0)])
        .expect("added");
    for id in 1..=2 {
        add_worker(&mut run, 0, id, "a");
    }
    let dispatched = dispatches(&outputs(&mut run));
    for ((worker, task, attempt), cpu) in dispatched.into_iter().zip([8 * SECOND, 1_000]) {
        let report = AttemptReport {
            task: TaskId(task),
            attempt,
            outcome: AttemptOutcome::Completed,
            cpu,
            wall: 2 * SECOND,
        };
        let worker = WorkerId(worker);
        run.handle(2 * SECOND, Event::Attempt { worker, report });
    }
    let result = run.report(2 * SECOND);
    assert_eq!(result.cpu_s, 8.001);
    assert_eq!((result.task_cpu_s.min, result.task_cpu_s.max), (0.001, 8.0));
}

/// Without a benchmark all factors are 1, and each quotient is a number as soon as there is
/// something to divide by (point 17).
#[test]
fn run_without_benchmark_has_the_factor_1() {
    let mut run = dispatcher(quiet_settings());
    run.add_tasks(0, &[task(1, 0.0)]).expect("added");
    add_worker(&mut run, 0, 1, "a");
    let dispatched = dispatches(&outputs(&mut run));
    report(&mut run, SECOND, dispatched[0], SECOND);
    let result = run.report(SECOND);
    assert_eq!(run.workers(SECOND)[0].factor, 1.0);
    assert_eq!(result.pool_performance, Some(1.0));
    assert_eq!(result.normalized_s, result.cpu_s);
    assert_eq!(result.factor.mean, 1.0);
}

/// The story of a task has only attempts that may have begun, and counts those that count, also
/// after a restart.
#[test]
fn history_of_a_restarted_task_has_attempts_that_do_not_count() {
    let mut run = dispatcher(Settings {
        second_copies: false,
        ..Settings::default()
    });
    let tasks: Vec<_> = (1..=3).map(|id| task(id, 0.0)).collect();
    run.add_tasks(0, &tasks).expect("added");
    add_worker(&mut run, 0, 1, "a");
    let first = dispatches(&outputs(&mut run));
    report(&mut run, 10_000, first[0], 10_000);
    assert_eq!(dispatches(&outputs(&mut run)).len(), 2, "one task ahead");
    let lost = |worker, reason| Event::WorkerLost {
        worker: WorkerId(worker),
        reason,
    };
    run.handle(20_000, lost(1, LossReason::Owner));
    add_worker(&mut run, 30_000, 2, "b");
    run.handle(40_000, lost(2, LossReason::Killed { signal: 11 }));
    let mut history = Vec::new();
    for output in outputs(&mut run) {
        match output {
            Output::AttemptLost { task, record } | Output::AttemptFailed { task, record, .. } => {
                assert_eq!(task, TaskId(2), "task 3 was never begun: {record:?}");
                history.push(record);
            }
            _ => {}
        }
    }
    let counted: Vec<bool> = history.iter().map(|record| record.is_counted).collect();
    assert_eq!(counted, [false, true]);

    let mut next = Dispatcher::new(quiet_settings(), 2, RunStatistics::default(), 0);
    next.restore_tasks(0, &[task(2, 0.0)], Some(TaskId(3)));
    next.restore_attempts(TaskId(2), history.clone());
    let mut now = 0;
    let mut quarantined = None;
    for id in 11..=20 {
        now += 100 * SECOND;
        add_worker(&mut next, now, id, "a");
        if dispatches(&outputs(&mut next)).is_empty() {
            break;
        }
        next.handle(now + 1, lost(id, LossReason::Ended { status: 1 }));
        quarantined = outputs(&mut next)
            .into_iter()
            .find_map(|output| match output {
                Output::Quarantined { history, .. } => Some(history),
                _ => None,
            });
        if quarantined.is_some() {
            break;
        }
    }
    let story = quarantined.expect("quarantined");
    assert_eq!(story[..2], history[..]);
    assert_eq!(story.len(), 6, "one for the owner, five that count");
}
