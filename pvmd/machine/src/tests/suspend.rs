//! Suspensions of tasks. A suspended task stays paused on every host to which it migrates.

use super::scenario::{
    GUEST_PAUSE_MAX, Scenario, list_events, list_tasks, migrate_request, send_number_if_running,
    spawn, spawn_on, stop_guests_request, welcome_guests_request,
};
use super::sim::{Received, Sim, host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::host::PendingItem;
use sempa_proto::link::{FRAGMENT_BYTES_MAX, WINDOW_BYTES_MAX};
use sempa_proto::suspend::SuspendCause;
use sempa_proto::task::{Reply, Request, RmServices};
use sempa_proto::{HostId, Micros, PvmError, RequestId, Tid};

const SETTLE_TIME: Micros = Micros::from_secs(1);

/// Suspended tasks stay paused, and no message is lost, even if requests, migrations and owners'
/// visits overlap.
#[test]
fn suspended_tasks_stay_paused_and_lose_no_messages() {
    let (mut migrated_count, mut suspended_migration_count) = (0, 0);
    // With seed 669, a task is resumed to quiesce for a migration, and the migration is refused
    // before the task has quiesced.
    for seed in seeds(150).chain([669]) {
        let mut scenario = Scenario::with_faults(seed);
        for _ in 0..60 {
            scenario.exchange_messages();
            let n = scenario.sim.rng.below(3) as usize;
            let tid = scenario.tids[scenario.sim.rng.below(6) as usize];
            match scenario.sim.rng.below(12) {
                0 => scenario.send_directive(n, stop_guests_request()),
                1 => scenario.send_directive(n, welcome_guests_request()),
                2 | 3 => scenario.request_random_migration(),
                4 | 5 => scenario.set_suspended(tid, true),
                6 | 7 => scenario.set_suspended(tid, false),
                _ => {}
            }
            scenario.assert_paused();
        }
        suspended_migration_count += scenario
            .suspend_times
            .keys()
            .filter(|tid| scenario.open_migrations.iter().any(|(t, _)| t == *tid))
            .count();
        migrated_count += scenario.resume_all_and_check();
    }
    assert!(
        migrated_count > 100 && suspended_migration_count > 100,
        "{migrated_count} moves, {suspended_migration_count} of tasks suspended at the end"
    );
}

/// A suspended task migrates without running. It stays suspended and receives its messages when it
/// is resumed.
#[test]
fn suspended_task_migrates_without_running() {
    for seed in seeds(100) {
        let mut scenario = Scenario::new(seed);
        scenario.exchange_messages();
        let (console, p, tid) = (scenario.console, scenario.procs[2], scenario.tids[2]);
        scenario.set_suspended(tid, true);
        scenario.sim.advance(SETTLE_TIME);
        scenario.assert_paused();
        for target_name in ["h1", "h3", "h2"] {
            for n in [0, 1, 4, 5] {
                send_number_if_running(
                    &mut scenario.sim,
                    &mut scenario.sent_counts,
                    scenario.procs[n],
                    tid,
                );
            }
            let migration_reply = scenario.sim.ask(console, migrate_request(tid, target_name));
            assert!(
                matches!(migration_reply, Reply::Migrated(Ok(_))),
                "{migration_reply:?} (seed {seed})"
            );
            assert!(scenario.sim.procs[p].is_frozen(), "seed {seed}");
            assert!(
                list_tasks(&mut scenario.sim, console)
                    .iter()
                    .any(|t| t.tid == tid && t.suspended),
                "seed {seed}"
            );
            scenario.sim.advance(SETTLE_TIME);
            assert!(
                list_tasks(&mut scenario.sim, console)
                    .iter()
                    .any(|t| t.tid == tid && t.suspended && !t.migrating)
            );
        }
        assert_eq!(
            scenario.sim.procs[p].quiesce_runs, 0,
            "it never ran (seed {seed})"
        );
        scenario.set_suspended(tid, false);
        scenario.sim.run_until("it goes on", |s| {
            !s.procs[p].is_frozen() && s.procs[p].conn.is_some()
        });
        scenario.resume_all_and_check();
    }
}

/// A suspended guest runs again only after it was resumed and the owner has left, in either order.
#[test]
fn suspended_guest_needs_resume_and_absent_owner() {
    for resumes_first in [false, true] {
        let mut scenario = Scenario::new(9);
        let (p, tid) = (scenario.procs[2], scenario.tids[2]);
        scenario.set_suspended(tid, true);
        scenario.sim.advance(SETTLE_TIME);
        scenario.send_directive(1, stop_guests_request());
        scenario.sim.advance(SETTLE_TIME);
        if resumes_first {
            scenario.set_suspended(tid, false);
        } else {
            scenario.send_directive(1, welcome_guests_request());
        }
        scenario.sim.advance(SETTLE_TIME);
        assert!(scenario.sim.procs[p].is_frozen());
        let other_guest = scenario.procs[3];
        assert_eq!(
            scenario.sim.procs[other_guest].is_frozen(),
            resumes_first,
            "its neighbour is not suspended"
        );
        if resumes_first {
            scenario.send_directive(1, welcome_guests_request());
        } else {
            scenario.set_suspended(tid, false);
        }
        scenario.sim.run_until("it goes on", |s| {
            !s.procs[p].is_frozen() && s.procs[p].conn.is_some()
        });
        scenario.resume_all_and_check();
    }
}

/// An owner arrives while a suspended task is quiescing. The task pauses within the same time limit
/// as other guests.
#[test]
fn owner_does_not_wait_for_quiescing_suspended_task() {
    for seed in seeds(100) {
        let mut scenario = Scenario::new(seed);
        scenario.sim.random_faults.slow_quiesce_percent = 50;
        scenario.set_suspended(scenario.tids[2], true);
        let delay = Micros(scenario.sim.rng.below(200_000));
        scenario.sim.advance(delay);
        scenario.send_directive(1, stop_guests_request());
        scenario.sim.advance(GUEST_PAUSE_MAX + Micros(1));
        scenario.assert_paused();
        scenario.resume_all_and_check();
    }
}

/// The task list and the event log report suspended tasks, and why they are suspended. A request
/// that changes nothing causes no event.
#[test]
fn suspension_is_visible_in_list_and_log() {
    let mut scenario = Scenario::new(3);
    let (console, tid) = (scenario.console, scenario.tids[2]);
    let requester = scenario.sim.procs[console].tid();
    scenario.set_suspended(tid, true);
    scenario.set_suspended(tid, true);
    let tasks = list_tasks(&mut scenario.sim, console);
    let suspended_tids: Vec<Tid> = tasks
        .iter()
        .filter(|t| t.suspended)
        .map(|t| t.tid)
        .collect();
    assert_eq!(suspended_tids, [tid]);
    assert!(tasks.iter().all(|t| !t.paused && !t.migrating));
    let cause = SuspendCause::Preempted {
        why: "there is room".into(),
    };
    let resume_request = Request::Suspend {
        tid,
        suspend: false,
        cause: Some(cause),
    };
    assert_eq!(scenario.sim.ask(console, resume_request), Reply::Done);
    let tasks = list_tasks(&mut scenario.sim, console);
    assert!(
        tasks.iter().any(|t| t.tid == tid && t.suspended),
        "nobody has taken back what was asked for"
    );
    scenario.set_suspended(tid, false);
    scenario.set_suspended(tid, false);
    let events = list_events(&mut scenario.sim, console);
    let events: Vec<&EventKind> = events
        .iter()
        .filter(|e| matches!(e, EventKind::Suspended { .. } | EventKind::Resumed { .. }))
        .collect();
    let suspended_event = EventKind::Suspended {
        tid,
        cause: SuspendCause::Requested {
            requested_by: requester,
        },
    };
    let resumed_event = EventKind::Resumed {
        tid,
        cause: SuspendCause::Requested {
            requested_by: requester,
        },
    };
    assert_eq!(
        events,
        [&suspended_event, &resumed_event],
        "what changes nothing is no event"
    );
    scenario.resume_all_and_check();
}

/// Only spawned tasks that do not serve the virtual machine can be suspended. A refusal contains
/// the reason.
#[test]
fn only_ordinary_spawned_tasks_can_be_suspended() {
    let mut scenario = Scenario::new(5);
    let (console, owner_agent) = (scenario.console, scenario.owner_agents[1]);
    let command_line_tid = scenario.sim.procs[owner_agent].tid();
    let unknown_tid = Tid::for_task(host(2), 4000).expect("an id");
    for (tid, expected_error, expected_text) in [
        (
            command_line_tid,
            PvmError::Denied,
            "no daemon has started it",
        ),
        (unknown_tid, PvmError::NoTask, "there is no task"),
        (host(2).tid(), PvmError::BadParam, "not the id of a task"),
    ] {
        for must_suspend in [true, false] {
            let reply = scenario.sim.ask(
                console,
                Request::Suspend {
                    tid,
                    suspend: must_suspend,
                    cause: None,
                },
            );
            let Reply::Failed { error, reason } = reply else {
                panic!("{reply:?}")
            };
            assert!(
                error == expected_error && reason.contains(expected_text),
                "{error:?}: {reason}"
            );
        }
    }
    let rm = spawn(&mut scenario.sim, console, spawn_on("h2", "rm", 1))[0];
    let services = RmServices {
        placement: false,
        vm_requests: false,
        task_exits: true,
    };
    scenario.sim.ask(rm, Request::RegisterRm(services));
    let tid = scenario.sim.procs[rm].tid();
    let reply = scenario.sim.ask(
        console,
        Request::Suspend {
            tid,
            suspend: true,
            cause: None,
        },
    );
    assert!(
        matches!(&reply, Reply::Failed { error: PvmError::Denied, reason } if reason.contains("serves")),
        "{reply:?}"
    );
    scenario.resume_all_and_check();
}

/// The exit of a suspended task is reported once, for every cause of the exit.
#[test]
fn exit_of_suspended_task_is_reported_once() {
    let (mut exit_count, mut tasker_kill_count, mut host_kill_count) = (0, 0, 0);
    for seed in seeds(200) {
        let mut scenario = Scenario::with_exit_notification(seed);
        let console = scenario.console;
        scenario.set_suspended(scenario.tids[2], true);
        scenario.wait_and_maybe_migrate(300_000);
        match scenario.sim.rng.below(4) {
            0 => {
                let victim = scenario.procs[2];
                scenario.sim.exit_proc(victim, 9);
                exit_count += 1;
            }
            1 => {
                scenario.sim.ask(
                    console,
                    Request::Signal {
                        tid: scenario.tids[2],
                        signal: 9,
                    },
                );
                exit_count += 1;
            }
            2 => {
                scenario.sim.kill_tasker(host(2));
                tasker_kill_count += 1;
            }
            _ => {
                scenario.sim.kill_host(host(2));
                host_kill_count += 1;
            }
        }
        let tasks = scenario.assert_exits_reported_once();
        let suspended_tids: Vec<Tid> = tasks
            .iter()
            .filter(|t| t.suspended)
            .map(|t| t.tid)
            .collect();
        assert!(
            suspended_tids.iter().all(|tid| *tid == scenario.tids[2]),
            "{suspended_tids:?} (seed {seed})"
        );
        for must_suspend in [true, false] {
            let reply = scenario.sim.ask(
                console,
                Request::Suspend {
                    tid: scenario.tids[2],
                    suspend: must_suspend,
                    cause: None,
                },
            );
            let is_listed = tasks.iter().any(|t| t.tid == scenario.tids[2]);
            let is_no_task_error = matches!(
                reply,
                Reply::Failed {
                    error: PvmError::NoTask,
                    ..
                }
            );
            assert_eq!(reply == Reply::Done, is_listed, "{reply:?} (seed {seed})");
            assert_eq!(is_no_task_error, !is_listed, "{reply:?} (seed {seed})");
        }
        scenario.assert_all_run();
    }
    assert!(
        exit_count > 20 && tasker_kill_count > 20 && host_kill_count > 20,
        "{exit_count} ends, {tasker_kill_count} taskers, {host_kill_count} hosts"
    );
}

/// Two processes, the console on h1 and a process on h4, that suspend and resume a task with one
/// request at a time.
struct SuspendCaller {
    tid: Tid,
    caller_procs: [usize; 2],
    /// The calling process and its unanswered request; the flag is true if the request suspends the
    /// task.
    open_request: Option<(usize, RequestId, bool)>,
    /// True if the last request suspended the task, false if it resumed the task; `None` before the
    /// first request, while a request is unanswered, and after a failure.
    confirmed_suspended: Option<bool>,
    /// The task's host at the time of the last successful reply.
    confirmation_host: HostId,
}

impl SuspendCaller {
    /// If the reply to the open request has arrived, records whether the task is suspended.
    fn poll_reply(&mut self, sim: &mut Sim) {
        let p = sim.proc_of(self.tid);
        if let Some((caller, id, suspend)) = self.open_request
            && let Some(reply) = sim.procs[caller].replies.remove(&id)
        {
            self.open_request = None;
            (self.confirmed_suspended, self.confirmation_host) =
                ((reply == Reply::Done).then_some(suspend), sim.procs[p].host);
        }
    }

    fn send_request(&mut self, sim: &mut Sim) {
        if self.open_request.is_none() {
            let caller = self.caller_procs[sim.rng.below(2) as usize];
            let must_suspend = sim.rng.below(3) > 0;
            let request = Request::Suspend {
                tid: self.tid,
                suspend: must_suspend,
                cause: None,
            };
            (self.open_request, self.confirmed_suspended) = (
                Some((caller, sim.request(caller, request), must_suspend)),
                None,
            );
        }
    }
}

/// Kills a host. With probability one half for each other host, the messages in flight from the
/// killed host are lost.
fn kill_with_message_loss(sim: &mut Sim, victim: HostId) {
    for peer_host in [HostId::MASTER, host(3), host(4)] {
        if sim.rng.below(2) == 0 {
            sim.drop_in_flight(victim, peer_host);
        }
    }
    sim.kill_host(victim);
}

/// Asserts that suspensions and resumptions alternate in the event log, and that the last event
/// agrees with `is_suspended`.
fn assert_suspension_events(sim: &mut Sim, console: usize, is_suspended: bool) {
    let seed = sim.seed;
    let transitions: Vec<bool> = list_events(sim, console)
        .iter()
        .filter_map(|event| match event {
            EventKind::Suspended { .. } => Some(true),
            EventKind::Resumed { .. } => Some(false),
            _ => None,
        })
        .collect();
    assert!(
        transitions.windows(2).all(|pair| pair[0] != pair[1]),
        "{transitions:?} (seed {seed})"
    );
    assert_eq!(
        transitions.last().copied().unwrap_or(false),
        is_suspended,
        "{transitions:?} (seed {seed})"
    );
}

/// A task whose suspension was confirmed never runs, even if a host is lost at any step of its
/// migration.
#[test]
fn confirmed_suspension_survives_faults_in_migration() {
    let (mut migrated_count, mut source_lost_count, mut stay_count) = (0, 0, 0);
    for seed in seeds(1500) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let p = spawn(&mut sim, console, spawn_on("h2", "child", 1))[0];
        let tid = sim.procs[p].tid();
        let callers = [console, sim.enrol(host(4))];
        let mut caller = SuspendCaller {
            tid,
            caller_procs: callers,
            open_request: None,
            confirmed_suspended: None,
            confirmation_host: host(2),
        };
        let migration_request = sim.request(console, migrate_request(tid, "h3"));
        let end = sim.now + Micros::from_millis(80);
        let loss_time = sim.now + Micros(sim.rng.below(60_000));
        let mut lost_host = None;
        while sim.now < end {
            if sim.now >= loss_time && lost_host.is_none() {
                let victim = host(2 + sim.rng.below(2) as u16);
                lost_host = Some(victim);
                match sim.rng.below(4) {
                    0 => {}
                    1 => sim.kill_tasker(victim),
                    _ => kill_with_message_loss(&mut sim, victim),
                }
            }
            if sim.rng.below(8) == 0 {
                caller.send_request(&mut sim);
            }
            sim.step();
            caller.poll_reply(&mut sim);
            let proc = &sim.procs[p];
            let is_stopped_at_target =
                caller.confirmed_suspended == Some(true) && caller.confirmation_host != proc.host;
            assert!(
                !is_stopped_at_target || proc.is_frozen() || proc.exited,
                "it runs (seed {seed})"
            );
        }
        sim.run_until("the end of the move", |s| {
            s.procs[console].replies.contains_key(&migration_request)
        });
        sim.advance(Micros::from_secs(10));
        caller.poll_reply(&mut sim);
        assert_eq!(caller.open_request, None, "an answer (seed {seed})");
        let tasks = list_tasks(&mut sim, console);
        let (Some(task), Some(was_suspended)) = (
            tasks.iter().find(|t| t.tid == tid),
            caller.confirmed_suspended,
        ) else {
            continue;
        };
        assert_eq!(
            (task.suspended, sim.procs[p].is_frozen()),
            (was_suspended, was_suspended),
            "on {} (seed {seed})",
            task.host
        );
        let is_source_alive = sim.nodes[&host(2)].is_alive;
        *if task.host != host(3) {
            &mut stay_count
        } else if is_source_alive {
            &mut migrated_count
        } else {
            &mut source_lost_count
        } += u32::from(was_suspended);
        assert_suspension_events(&mut sim, console, task.suspended);
    }
    assert!(
        migrated_count > 50 && source_lost_count > 20 && stay_count > 50,
        "{migrated_count} moved, {source_lost_count} lost sources, {stay_count} stayed"
    );
}

/// Spawns a task that registers as resource manager.
fn spawn_resource_manager(scenario: &mut Scenario) -> usize {
    let p = spawn(&mut scenario.sim, scenario.console, spawn_on("h1", "rm", 1))[0];
    scenario.sim.ask(
        p,
        Request::RegisterRm(RmServices {
            placement: true,
            vm_requests: false,
            task_exits: true,
        }),
    );
    p
}

fn preempt(scenario: &mut Scenario, rm: usize, tid: Tid) {
    let cause = Some(SuspendCause::Preempted {
        why: "user 7 waits".into(),
    });
    assert_eq!(
        scenario.sim.ask(
            rm,
            Request::Suspend {
                tid,
                suspend: true,
                cause
            }
        ),
        Reply::Done
    );
}

/// Preempted tasks resume after a time without a resource manager. Tasks that a user suspended do
/// not resume.
#[test]
fn preempted_tasks_resume_without_resource_manager() {
    let mut migrated_count = 0;
    for seed in seeds(60) {
        let mut scenario = Scenario::new(seed);
        let rm = spawn_resource_manager(&mut scenario);
        let (preempted_tid, preempted_and_suspended_tid, suspended_tid) =
            (scenario.tids[2], scenario.tids[3], scenario.tids[4]);
        for tid in [preempted_tid, preempted_and_suspended_tid] {
            preempt(&mut scenario, rm, tid);
        }
        scenario.set_suspended(preempted_and_suspended_tid, true);
        scenario.set_suspended(suspended_tid, true);
        scenario.sim.advance(SETTLE_TIME);
        scenario.sim.exit_proc(rm, 9);
        let rm_end_time = scenario.sim.now;
        // At this time a host may already know that there is no resource manager. The task may
        // migrate before or after its resumption.
        let (console, delay) = (scenario.console, Micros(scenario.sim.rng.below(3_100_000)));
        scenario.sim.advance(delay);
        let p = scenario.procs[2];
        let was_frozen = scenario.sim.procs[p].is_frozen();
        assert!(
            was_frozen || scenario.sim.now.since(rm_end_time) >= Micros::from_secs(3),
            "seed {seed}"
        );
        let reply = scenario
            .sim
            .ask(console, migrate_request(preempted_tid, "h3"));
        migrated_count += u32::from(was_frozen && matches!(reply, Reply::Migrated(Ok(_))));
        scenario.sim.run_until("it goes on", |s| {
            !s.procs[p].is_frozen() && s.procs[p].conn.is_some()
        });
        assert!(
            scenario.sim.now.since(rm_end_time) >= Micros::from_secs(3),
            "not before its time (seed {seed})"
        );
        scenario.sim.advance(Micros::from_secs(20));
        let suspended_tids: Vec<Tid> = list_tasks(&mut scenario.sim, console)
            .iter()
            .filter(|t| t.suspended)
            .map(|t| t.tid)
            .collect();
        assert_eq!(
            suspended_tids,
            [preempted_and_suspended_tid, suspended_tid],
            "seed {seed}"
        );
        let events = list_events(&mut scenario.sim, console);
        let resume_events: Vec<&EventKind> = events
            .iter()
            .filter(|e| matches!(e, EventKind::Resumed { .. }))
            .collect();
        let [EventKind::Resumed { tid, cause }] = resume_events[..] else {
            panic!("{resume_events:?} (seed {seed})")
        };
        assert!(
            *tid == preempted_tid && cause.to_string().contains("no resource manager has served"),
            "{cause}"
        );
        scenario.resume_all_and_check();
    }
    assert!(
        migrated_count > 20,
        "{migrated_count} were moved as they stood"
    );
}

/// Preempted tasks stay paused if a new resource manager registers within the time limit. The new
/// resource manager can resume the tasks.
#[test]
fn new_resource_manager_keeps_tasks_preempted() {
    for seed in seeds(40) {
        let mut scenario = Scenario::new(seed);
        let rm = spawn_resource_manager(&mut scenario);
        let (p, tid) = (scenario.procs[2], scenario.tids[2]);
        preempt(&mut scenario, rm, tid);
        scenario.sim.advance(SETTLE_TIME);
        for _ in 0..3 {
            let rm = (0..scenario.sim.procs.len())
                .rev()
                .find(|p| scenario.sim.procs[*p].spawned_tid.is_some())
                .expect("the last");
            scenario.sim.exit_proc(rm, 9);
            let delay = Micros(scenario.sim.rng.below(2_500_000));
            scenario.sim.advance(delay);
            spawn_resource_manager(&mut scenario);
            scenario.sim.advance(Micros::from_secs(30));
            assert!(scenario.sim.procs[p].is_frozen(), "seed {seed}");
        }
        let last_rm = (0..scenario.sim.procs.len())
            .rev()
            .find(|p| scenario.sim.procs[*p].spawned_tid.is_some())
            .expect("the last");
        let cause = Some(SuspendCause::Preempted {
            why: "there is room".into(),
        });
        assert_eq!(
            scenario.sim.ask(
                last_rm,
                Request::Suspend {
                    tid,
                    suspend: false,
                    cause
                }
            ),
            Reply::Done
        );
        scenario.sim.run_until("it goes on", |s| {
            !s.procs[p].is_frozen() && s.procs[p].conn.is_some()
        });
        scenario.resume_all_and_check();
    }
}

/// The size of a paused task's inbox is limited by the windows of its senders.
#[test]
fn inbox_of_paused_task_is_bounded_by_windows() {
    const SENDER_COUNT: usize = 4;
    const MESSAGES_PER_SENDER: usize = 2 * WINDOW_BYTES_MAX / MESSAGE_BYTES;
    const MESSAGE_BYTES: usize = 1 << 20;
    let (mut sim, console) = Sim::cluster(1, 2);
    let receiver = spawn(&mut sim, console, spawn_on("h1", "child", 1))[0];
    let tid = sim.procs[receiver].tid();
    let mut senders = spawn(
        &mut sim,
        console,
        spawn_on("h1", "child", SENDER_COUNT as u32 / 2),
    );
    senders.extend(spawn(
        &mut sim,
        console,
        spawn_on("h2", "child", SENDER_COUNT as u32 / 2),
    ));
    assert_eq!(
        sim.ask(
            console,
            Request::Suspend {
                tid,
                suspend: true,
                cause: None
            }
        ),
        Reply::Done
    );
    sim.run_until("it is frozen", |s| s.procs[receiver].is_frozen());
    for (sender, _) in senders
        .iter()
        .flat_map(|sender| (0..MESSAGES_PER_SENDER).map(move |n| (*sender, n)))
    {
        sim.send_message(sender, tid, &[7; MESSAGE_BYTES]);
    }
    sim.advance(Micros::from_secs(3));
    let inbox_bytes = |s: &Sim| {
        let task = s.nodes[&HostId::MASTER]
            .machine
            .tasks
            .get(tid)
            .expect("it is there");
        let frames = task.inbox.iter().filter_map(|inbox_bytes| {
            if let PendingItem::Frame(frame) = inbox_bytes {
                Some(frame.len())
            } else {
                None
            }
        });
        frames.sum::<usize>()
    };
    let (window_bytes, bytes) = (SENDER_COUNT * WINDOW_BYTES_MAX, inbox_bytes(&sim));
    assert!(
        bytes >= window_bytes,
        "they have sent what they may: {bytes}"
    );
    // The last fragment may exceed the remaining window by its size. Frame heads and control frames
    // are smaller than a fragment.
    assert!(
        bytes <= window_bytes + SENDER_COUNT * 2 * FRAGMENT_BYTES_MAX,
        "{bytes} bytes are held, the windows are {window_bytes}"
    );
    assert_eq!(
        sim.ask(
            console,
            Request::Suspend {
                tid,
                suspend: false,
                cause: None
            }
        ),
        Reply::Done
    );
    let message_count = SENDER_COUNT * MESSAGES_PER_SENDER;
    let arrived_count = |s: &Sim| {
        s.procs[receiver]
            .received
            .iter()
            .filter(|item| matches!(item, Received::Message(..)))
            .count()
    };
    sim.run_until("all that they had sent", |s| {
        arrived_count(s) == message_count
    });
    assert_eq!(inbox_bytes(&sim), 0);
}
