//! Suspended tasks stay paused on every host to which they migrate.

use super::scenario::{
    GUEST_PAUSE_MAX, Scenario, list_events, list_tasks, migrate_request, send_numbered, spawn,
    spawn_on, stop_guests, welcome_guests,
};
use super::sim::{Received, Sim, host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::host::PendingItem;
use sempa_proto::link::{FRAGMENT_BYTES_MAX, WINDOW_BYTES_MAX};
use sempa_proto::suspend::SuspendCause;
use sempa_proto::task::{Reply, Request, RmServices};
use sempa_proto::{HostId, Micros, PvmError, RequestId, Tid};

const SETTLE_TIME: Micros = Micros::from_secs(1);

/// Suspended tasks stay paused and lose no messages, however requests, migrations and owners
/// overlap.
#[test]
fn suspended_tasks_stay_paused_and_lose_no_messages() {
    let (mut moved, mut moved_suspended) = (0, 0);
    // With seed 669 a task is resumed to quiesce for a migration, and the migration is refused
    // meanwhile.
    for seed in seeds(150).chain([669]) {
        let mut scene = Scenario::with_faults(seed);
        for _ in 0..60 {
            scene.exchange_messages();
            let n = scene.sim.rng.below(3) as usize;
            let tid = scene.tids[scene.sim.rng.below(6) as usize];
            match scene.sim.rng.below(12) {
                0 => scene.send_directive(n, stop_guests()),
                1 => scene.send_directive(n, welcome_guests()),
                2 | 3 => scene.migrate_one(),
                4 | 5 => scene.suspend(tid, true),
                6 | 7 => scene.suspend(tid, false),
                _ => {}
            }
            scene.assert_paused();
        }
        moved_suspended += scene
            .suspended_at
            .keys()
            .filter(|tid| scene.open_migrations.iter().any(|(t, _)| t == *tid))
            .count();
        moved += scene.finish();
    }
    assert!(
        moved > 100 && moved_suspended > 100,
        "{moved} moves, {moved_suspended} of tasks suspended at the end"
    );
}

/// A suspended task migrates without running, stays suspended, and receives its messages when it
/// resumes.
#[test]
fn suspended_task_migrates_without_running() {
    for seed in seeds(100) {
        let mut scene = Scenario::new(seed);
        scene.exchange_messages();
        let (console, p, tid) = (scene.console, scene.procs[2], scene.tids[2]);
        scene.suspend(tid, true);
        scene.sim.advance(SETTLE_TIME);
        scene.assert_paused();
        for to in ["h1", "h3", "h2"] {
            for n in [0, 1, 4, 5] {
                send_numbered(&mut scene.sim, &mut scene.sent_counts, scene.procs[n], tid);
            }
            let done = scene.sim.ask(console, migrate_request(tid, to));
            assert!(
                matches!(done, Reply::Migrated(Ok(_))),
                "{done:?} (seed {seed})"
            );
            assert!(scene.sim.procs[p].is_frozen(), "seed {seed}");
            assert!(
                list_tasks(&mut scene.sim, console)
                    .iter()
                    .any(|t| t.tid == tid && t.suspended),
                "seed {seed}"
            );
            scene.sim.advance(SETTLE_TIME);
            assert!(
                list_tasks(&mut scene.sim, console)
                    .iter()
                    .any(|t| t.tid == tid && t.suspended && !t.migrating)
            );
        }
        assert_eq!(
            scene.sim.procs[p].quiesce_runs, 0,
            "it never ran (seed {seed})"
        );
        scene.suspend(tid, false);
        scene.sim.run_until("it goes on", |s| {
            !s.procs[p].is_frozen() && s.procs[p].conn.is_some()
        });
        scene.finish();
    }
}

/// A suspended guest runs again only when it is resumed and the owner is away, in either order.
#[test]
fn suspended_guest_needs_resume_and_absent_owner() {
    for resume_first in [false, true] {
        let mut scene = Scenario::new(9);
        let (p, tid) = (scene.procs[2], scene.tids[2]);
        scene.suspend(tid, true);
        scene.sim.advance(SETTLE_TIME);
        scene.send_directive(1, stop_guests());
        scene.sim.advance(SETTLE_TIME);
        if resume_first {
            scene.suspend(tid, false);
        } else {
            scene.send_directive(1, welcome_guests());
        }
        scene.sim.advance(SETTLE_TIME);
        assert!(scene.sim.procs[p].is_frozen());
        let other = scene.procs[3];
        assert_eq!(
            scene.sim.procs[other].is_frozen(),
            resume_first,
            "its neighbour is not suspended"
        );
        if resume_first {
            scene.send_directive(1, welcome_guests());
        } else {
            scene.suspend(tid, false);
        }
        scene.sim.run_until("it goes on", |s| {
            !s.procs[p].is_frozen() && s.procs[p].conn.is_some()
        });
        scene.finish();
    }
}

/// An owner who arrives while a suspended task is quiescing waits no longer than for other guests.
#[test]
fn owner_does_not_wait_for_quiescing_suspended_task() {
    for seed in seeds(100) {
        let mut scene = Scenario::new(seed);
        scene.sim.random_faults.slow_quiesce_percent = 50;
        scene.suspend(scene.tids[2], true);
        let wait = Micros(scene.sim.rng.below(200_000));
        scene.sim.advance(wait);
        scene.send_directive(1, stop_guests());
        scene.sim.advance(GUEST_PAUSE_MAX + Micros(1));
        scene.assert_paused();
        scene.finish();
    }
}

/// The task list and the event log report suspended tasks and the reason.
#[test]
fn suspension_is_visible_in_list_and_log() {
    let mut scene = Scenario::new(3);
    let (console, tid) = (scene.console, scene.tids[2]);
    let by = scene.sim.procs[console].tid();
    scene.suspend(tid, true);
    scene.suspend(tid, true);
    let list = list_tasks(&mut scene.sim, console);
    let still: Vec<Tid> = list.iter().filter(|t| t.suspended).map(|t| t.tid).collect();
    assert_eq!(still, [tid]);
    assert!(list.iter().all(|t| !t.paused && !t.migrating));
    let cause = SuspendCause::Preempted {
        why: "there is room".into(),
    };
    let room = Request::Suspend {
        tid,
        suspend: false,
        cause: Some(cause),
    };
    assert_eq!(scene.sim.ask(console, room), Reply::Done);
    let list = list_tasks(&mut scene.sim, console);
    assert!(
        list.iter().any(|t| t.tid == tid && t.suspended),
        "nobody has taken back what was asked for"
    );
    scene.suspend(tid, false);
    scene.suspend(tid, false);
    let told = list_events(&mut scene.sim, console);
    let told: Vec<&EventKind> = told
        .iter()
        .filter(|e| matches!(e, EventKind::Suspended { .. } | EventKind::Resumed { .. }))
        .collect();
    let first = EventKind::Suspended {
        tid,
        cause: SuspendCause::Requested { requested_by: by },
    };
    let second = EventKind::Resumed {
        tid,
        cause: SuspendCause::Requested { requested_by: by },
    };
    assert_eq!(told, [&first, &second], "what changes nothing is no event");
    scene.finish();
}

/// Only spawned tasks that do not serve the virtual machine can be suspended; a refusal names the
/// reason.
#[test]
fn only_ordinary_spawned_tasks_can_be_suspended() {
    let mut scene = Scenario::new(5);
    let (console, speaker) = (scene.console, scene.owner_agents[1]);
    let from_a_command_line = scene.sim.procs[speaker].tid();
    let unknown_tid = Tid::task(host(2), 4000).expect("an id");
    for (tid, code, word) in [
        (
            from_a_command_line,
            PvmError::Denied,
            "no daemon has started it",
        ),
        (unknown_tid, PvmError::NoTask, "there is no task"),
        (host(2).tid(), PvmError::BadParam, "not the id of a task"),
    ] {
        for suspend in [true, false] {
            let reply = scene.sim.ask(
                console,
                Request::Suspend {
                    tid,
                    suspend,
                    cause: None,
                },
            );
            let Reply::Failed { error, reason } = reply else {
                panic!("{reply:?}")
            };
            assert!(
                error == code && reason.contains(word),
                "{error:?}: {reason}"
            );
        }
    }
    let rm = spawn(&mut scene.sim, console, spawn_on("h2", "rm", 1))[0];
    let serves = sempa_proto::task::RmServices {
        spawn: false,
        other_requests: false,
        task_exits: true,
    };
    scene.sim.ask(rm, Request::RegisterRm(serves));
    let tid = scene.sim.procs[rm].tid();
    let reply = scene.sim.ask(
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
    scene.finish();
}

/// The exit of a suspended task is reported once, for every cause of the exit.
#[test]
fn exit_of_suspended_task_is_reported_once() {
    let (mut ends, mut taskers, mut hosts) = (0, 0, 0);
    for seed in seeds(200) {
        let mut scene = Scenario::with_exit_notification(seed);
        let console = scene.console;
        scene.suspend(scene.tids[2], true);
        scene.wait_randomly(300_000);
        match scene.sim.rng.below(4) {
            0 => {
                let victim = scene.procs[2];
                scene.sim.exit(victim, 9);
                ends += 1;
            }
            1 => {
                scene.sim.ask(
                    console,
                    Request::Signal {
                        tid: scene.tids[2],
                        signal: 9,
                    },
                );
                ends += 1;
            }
            2 => {
                scene.sim.kill_tasker(host(2));
                taskers += 1;
            }
            _ => {
                scene.sim.kill_host(host(2));
                hosts += 1;
            }
        }
        let list = scene.assert_exits_reported_once();
        let suspended: Vec<Tid> = list.iter().filter(|t| t.suspended).map(|t| t.tid).collect();
        assert!(
            suspended.iter().all(|tid| *tid == scene.tids[2]),
            "{suspended:?} (seed {seed})"
        );
        for suspend in [true, false] {
            let reply = scene.sim.ask(
                console,
                Request::Suspend {
                    tid: scene.tids[2],
                    suspend,
                    cause: None,
                },
            );
            let there = list.iter().any(|t| t.tid == scene.tids[2]);
            let is_told = matches!(
                reply,
                Reply::Failed {
                    error: PvmError::NoTask,
                    ..
                }
            );
            assert_eq!(reply == Reply::Done, there, "{reply:?} (seed {seed})");
            assert_eq!(is_told, !there, "{reply:?} (seed {seed})");
        }
        scene.assert_all_run();
    }
    assert!(
        ends > 20 && taskers > 20 && hosts > 20,
        "{ends} ends, {taskers} taskers, {hosts} hosts"
    );
}

/// Processes on h1 and h4 that suspend or resume a task, one request at a time.
struct SuspendCaller {
    tid: Tid,
    callers: [usize; 2],
    /// The calling process, its open request, and true if the request suspends the task.
    open_request: Option<(usize, RequestId, bool)>,
    /// True if the last successful request suspended the task, false if it resumed the task; `None`
    /// while a request is open.
    confirmed_suspended: Option<bool>,
    /// The task's host when the last successful request was answered.
    confirmed_on_host: HostId,
}

impl SuspendCaller {
    /// Records the reply to the open request, if it has arrived.
    fn poll_reply(&mut self, sim: &mut Sim) {
        let p = sim.proc_of(self.tid);
        if let Some((caller, id, suspend)) = self.open_request
            && let Some(reply) = sim.procs[caller].replies.remove(&id)
        {
            self.open_request = None;
            (self.confirmed_suspended, self.confirmed_on_host) =
                ((reply == Reply::Done).then_some(suspend), sim.procs[p].host);
        }
    }

    fn send_request(&mut self, sim: &mut Sim) {
        if self.open_request.is_none() {
            let caller = self.callers[sim.rng.below(2) as usize];
            let suspend = sim.rng.below(3) > 0;
            let request = Request::Suspend {
                tid: self.tid,
                suspend,
                cause: None,
            };
            (self.open_request, self.confirmed_suspended) =
                (Some((caller, sim.request(caller, request), suspend)), None);
        }
    }
}

/// Kills a host. Messages in flight from it to each other host are lost with probability one half.
fn kill_with_message_loss(sim: &mut Sim, victim: HostId) {
    for to in [HostId::MASTER, host(3), host(4)] {
        if sim.rng.below(2) == 0 {
            sim.drop_in_flight(victim, to);
        }
    }
    sim.kill_host(victim);
}

/// The event log has suspensions and resumptions in turn, and the last one is the current state.
fn check_suspension_events(sim: &mut Sim, console: usize, suspended: bool) {
    let seed = sim.seed;
    let told: Vec<bool> = list_events(sim, console)
        .iter()
        .filter_map(|event| match event {
            EventKind::Suspended { .. } => Some(true),
            EventKind::Resumed { .. } => Some(false),
            _ => None,
        })
        .collect();
    assert!(
        told.windows(2).all(|two| two[0] != two[1]),
        "{told:?} (seed {seed})"
    );
    assert_eq!(
        told.last().copied().unwrap_or(false),
        suspended,
        "{told:?} (seed {seed})"
    );
}

/// A task whose suspension was confirmed runs on no host, even if a host is lost at any step of its
/// migration.
#[test]
fn confirmed_suspension_survives_faults_in_migration() {
    let (mut moved, mut source_lost, mut stayed) = (0, 0, 0);
    for seed in seeds(1500) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let p = spawn(&mut sim, console, spawn_on("h2", "child", 1))[0];
        let tid = sim.procs[p].tid();
        let callers = [console, sim.enrol(host(4))];
        let mut caller = SuspendCaller {
            tid,
            callers,
            open_request: None,
            confirmed_suspended: None,
            confirmed_on_host: host(2),
        };
        let moving = sim.request(console, migrate_request(tid, "h3"));
        let end = sim.now + Micros::from_millis(80);
        let lose_at = sim.now + Micros(sim.rng.below(60_000));
        let mut lost = None;
        while sim.now < end {
            if sim.now >= lose_at && lost.is_none() {
                let victim = host(2 + sim.rng.below(2) as u16);
                lost = Some(victim);
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
            let came_suspended =
                caller.confirmed_suspended == Some(true) && caller.confirmed_on_host != proc.host;
            assert!(
                !came_suspended || proc.is_frozen() || proc.exited,
                "it runs (seed {seed})"
            );
        }
        sim.run_until("the end of the move", |s| {
            s.procs[console].replies.contains_key(&moving)
        });
        sim.advance(Micros::from_secs(10));
        caller.poll_reply(&mut sim);
        assert_eq!(caller.open_request, None, "an answer (seed {seed})");
        let list = list_tasks(&mut sim, console);
        let (Some(task), Some(told)) = (
            list.iter().find(|t| t.tid == tid),
            caller.confirmed_suspended,
        ) else {
            continue;
        };
        assert_eq!(
            (task.suspended, sim.procs[p].is_frozen()),
            (told, told),
            "on {} (seed {seed})",
            task.host
        );
        let alive = sim.nodes[&host(2)].is_alive;
        *if task.host != host(3) {
            &mut stayed
        } else if alive {
            &mut moved
        } else {
            &mut source_lost
        } += u32::from(told);
        check_suspension_events(&mut sim, console, task.suspended);
    }
    assert!(
        moved > 50 && source_lost > 20 && stayed > 50,
        "{moved} moved, {source_lost} lost sources, {stayed} stayed"
    );
}

/// Spawns a task that registers as resource manager.
fn spawn_resource_manager(scene: &mut Scenario) -> usize {
    let p = spawn(&mut scene.sim, scene.console, spawn_on("h1", "rm", 1))[0];
    scene.sim.ask(
        p,
        Request::RegisterRm(RmServices {
            spawn: true,
            other_requests: false,
            task_exits: true,
        }),
    );
    p
}

fn preempt(scene: &mut Scenario, rm: usize, tid: Tid) {
    let cause = Some(SuspendCause::Preempted {
        why: "user 7 waits".into(),
    });
    assert_eq!(
        scene.sim.ask(
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

/// Preempted tasks resume when there has been no resource manager for a while; tasks that a user
/// suspended do not.
#[test]
fn preempted_tasks_resume_without_resource_manager() {
    let mut moved = 0;
    for seed in seeds(60) {
        let mut scene = Scenario::new(seed);
        let rm = spawn_resource_manager(&mut scene);
        let (preempted, both, asked) = (scene.tids[2], scene.tids[3], scene.tids[4]);
        for tid in [preempted, both] {
            preempt(&mut scene, rm, tid);
        }
        scene.suspend(both, true);
        scene.suspend(asked, true);
        scene.sim.advance(SETTLE_TIME);
        scene.sim.exit(rm, 9);
        let died = scene.sim.now;
        // By now a host may know that there is no resource manager, and the task may migrate at any
        // time.
        let (console, wait) = (scene.console, Micros(scene.sim.rng.below(3_100_000)));
        scene.sim.advance(wait);
        let p = scene.procs[2];
        let before = scene.sim.procs[p].is_frozen();
        assert!(
            before || scene.sim.now.since(died) >= Micros::from_secs(3),
            "seed {seed}"
        );
        let reply = scene.sim.ask(console, migrate_request(preempted, "h3"));
        moved += u32::from(before && matches!(reply, Reply::Migrated(Ok(_))));
        scene.sim.run_until("it goes on", |s| {
            !s.procs[p].is_frozen() && s.procs[p].conn.is_some()
        });
        assert!(
            scene.sim.now.since(died) >= Micros::from_secs(3),
            "not before its time (seed {seed})"
        );
        scene.sim.advance(Micros::from_secs(20));
        let suspended: Vec<Tid> = list_tasks(&mut scene.sim, console)
            .iter()
            .filter(|t| t.suspended)
            .map(|t| t.tid)
            .collect();
        assert_eq!(suspended, [both, asked], "seed {seed}");
        let told = list_events(&mut scene.sim, console);
        let resumed: Vec<&EventKind> = told
            .iter()
            .filter(|e| matches!(e, EventKind::Resumed { .. }))
            .collect();
        let [EventKind::Resumed { tid, cause }] = resumed[..] else {
            panic!("{resumed:?} (seed {seed})")
        };
        assert!(
            *tid == preempted && cause.to_string().contains("no resource manager has served"),
            "{cause}"
        );
        scene.finish();
    }
    assert!(moved > 20, "{moved} were moved as they stood");
}

/// Preempted tasks stay paused when a new resource manager registers within the time limit; the new
/// resource manager can resume them.
#[test]
fn new_resource_manager_keeps_tasks_preempted() {
    for seed in seeds(40) {
        let mut scene = Scenario::new(seed);
        let rm = spawn_resource_manager(&mut scene);
        let (p, tid) = (scene.procs[2], scene.tids[2]);
        preempt(&mut scene, rm, tid);
        scene.sim.advance(SETTLE_TIME);
        for _ in 0..3 {
            let rm = (0..scene.sim.procs.len())
                .rev()
                .find(|p| scene.sim.procs[*p].spawned_tid.is_some())
                .expect("the last");
            scene.sim.exit(rm, 9);
            let wait = Micros(scene.sim.rng.below(2_500_000));
            scene.sim.advance(wait);
            spawn_resource_manager(&mut scene);
            scene.sim.advance(Micros::from_secs(30));
            assert!(scene.sim.procs[p].is_frozen(), "seed {seed}");
        }
        let last = (0..scene.sim.procs.len())
            .rev()
            .find(|p| scene.sim.procs[*p].spawned_tid.is_some())
            .expect("the last");
        let cause = Some(SuspendCause::Preempted {
            why: "there is room".into(),
        });
        assert_eq!(
            scene.sim.ask(
                last,
                Request::Suspend {
                    tid,
                    suspend: false,
                    cause
                }
            ),
            Reply::Done
        );
        scene.sim.run_until("it goes on", |s| {
            !s.procs[p].is_frozen() && s.procs[p].conn.is_some()
        });
        scene.finish();
    }
}

/// The inbox of a paused task never holds more than the windows of its senders.
#[test]
fn inbox_of_paused_task_is_bounded_by_windows() {
    const SENDERS: usize = 4;
    const EACH: usize = 2 * WINDOW_BYTES_MAX / MESSAGE;
    const MESSAGE: usize = 1 << 20;
    let (mut sim, console) = Sim::cluster(1, 2);
    let receiver = spawn(&mut sim, console, spawn_on("h1", "child", 1))[0];
    let tid = sim.procs[receiver].tid();
    let mut senders = spawn(
        &mut sim,
        console,
        spawn_on("h1", "child", SENDERS as u32 / 2),
    );
    senders.extend(spawn(
        &mut sim,
        console,
        spawn_on("h2", "child", SENDERS as u32 / 2),
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
        .flat_map(|sender| (0..EACH).map(move |n| (*sender, n)))
    {
        sim.send_message(sender, tid, &[7; MESSAGE]);
    }
    sim.advance(Micros::from_secs(3));
    let held = |s: &Sim| {
        let task = s.nodes[&HostId::MASTER]
            .machine
            .tasks
            .get(tid)
            .expect("it is there");
        let frames = task.inbox.iter().filter_map(|held| {
            if let PendingItem::Frame(frame) = held {
                Some(frame.len())
            } else {
                None
            }
        });
        frames.sum::<usize>()
    };
    let (windows, kept) = (SENDERS * WINDOW_BYTES_MAX, held(&sim));
    assert!(kept >= windows, "they have sent what they may: {kept}");
    // The last fragment may exceed the rest of a window; frame heads and control frames are small.
    assert!(
        kept <= windows + SENDERS * 2 * FRAGMENT_BYTES_MAX,
        "{kept} bytes are held, the windows are {windows}"
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
    let all = SENDERS * EACH;
    let come = |s: &Sim| {
        s.procs[receiver]
            .received
            .iter()
            .filter(|seen| matches!(seen, Received::Message(..)))
            .count()
    };
    sim.run_until("all that they had sent", |s| come(s) == all);
    assert_eq!(held(&sim), 0);
}
