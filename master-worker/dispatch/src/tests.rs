//! Costs of the dispatcher, as numbers of examined tasks.

use crate::{
    AttemptId, AttemptOutcome, AttemptReport, ClassId, Dispatcher, Event, Groups, Key, LossReason,
    NewTask, Output, RunStatistics, Settings, TaskId, WorkerId,
};

const WORKER: WorkerId = WorkerId(1);

fn start_worker(run: &mut Dispatcher, worker: WorkerId) {
    let started = Event::WorkerStarted {
        worker,
        class: ClassId(0),
        groups: Groups::ALL,
        host: "a".into(),
    };
    run.handle(0, started);
    let ready = Event::WorkerReady {
        worker,
        benchmark: None,
    };
    run.handle(0, ready);
}

fn add_tasks(run: &mut Dispatcher, count: u64) {
    let task = |id| NewTask {
        id: TaskId(id),
        key: Key::default(),
        groups: Groups::ALL,
    };
    let tasks: Vec<NewTask> = (1..=count).map(task).collect();
    run.add_tasks(0, &tasks).expect("below the limit");
}

fn report(run: &mut Dispatcher, worker: WorkerId, (task, attempt): (TaskId, AttemptId)) {
    let report = AttemptReport {
        task,
        attempt,
        outcome: AttemptOutcome::Completed,
        cpu: 1,
        wall: 1,
    };
    run.handle(1, Event::Attempt { worker, report });
}

/// Moves the attempts of new dispatches to `queue`.
fn take_dispatched(run: &mut Dispatcher, queue: &mut Vec<(TaskId, AttemptId)>) {
    while let Some(output) = run.poll() {
        if let Output::Dispatch { attempts, .. } = output {
            queue.extend(attempts);
        }
    }
}

/// Each result costs the same however many tasks the worker holds (point 14 of the README's table).
#[test]
fn result_of_a_worker_with_many_tasks_examines_few_tasks() {
    const TASKS: u64 = 20_000;
    for tasks_per_worker in [2, 512] {
        let mut settings = Settings::default();
        settings.limits.tasks_per_worker = tasks_per_worker;
        let mut run = Dispatcher::new(settings, 1, RunStatistics::default(), 0);
        add_tasks(&mut run, TASKS);
        start_worker(&mut run, WORKER);
        let (mut queue, mut greatest) = (Vec::new(), 0);
        let mut next = 0;
        take_dispatched(&mut run, &mut queue);
        while next < queue.len() {
            report(&mut run, WORKER, queue[next]);
            next += 1;
            take_dispatched(&mut run, &mut queue);
            greatest = greatest.max(run.pool.get(WORKER).expect("present").held.len());
        }
        assert_eq!(next as u64, TASKS);
        assert_eq!(greatest, tasks_per_worker, "the worker holds many tasks");
        let examined = run.pool.get(WORKER).expect("present").held.examined.get();
        assert!(
            examined <= 2 * TASKS as usize,
            "{examined} tasks were examined for {TASKS} results"
        );
    }
}

/// The maintained number of suspects is right after each kind of change.
#[test]
fn worker_with_a_suspect_gets_no_task_ahead_until_the_suspect_is_closed() {
    let settings = Settings {
        second_copies: false,
        ..Settings::default()
    };
    let mut run = Dispatcher::new(settings, 1, RunStatistics::default(), 0);
    add_tasks(&mut run, 60);
    start_worker(&mut run, WORKER);
    let mut queue = Vec::new();
    take_dispatched(&mut run, &mut queue);
    report(&mut run, WORKER, queue[0]);
    take_dispatched(&mut run, &mut queue);
    let suspects = queue.len() - 1;
    assert!(suspects > 10);
    let reason = LossReason::Killed { signal: 11 };
    let worker = WORKER;
    run.handle(2, Event::WorkerLost { worker, reason });
    let next = WorkerId(2);
    start_worker(&mut run, next);
    let mut alone_count = 0;
    loop {
        let mut dispatched = Vec::new();
        take_dispatched(&mut run, &mut dispatched);
        let held = &run.pool.get(next).expect("present").held;
        if !held.has_suspect() {
            break;
        }
        assert_eq!((dispatched.len(), held.len()), (1, 1));
        alone_count += 1;
        report(&mut run, next, dispatched[0]);
    }
    assert_eq!(alone_count, suspects);
}
