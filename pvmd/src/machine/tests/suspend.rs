//! Tasks stand still while they are suspended, wherever they are moved.

use super::scene::{PROMISE, Scene, events, listed, migrate, on, spawn, stopped, talk, welcome};
use super::sim::{host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::suspend::Cause;
use sempa_proto::task::{NotifyRequest, NotifyWhat, Reply, Request};
use sempa_proto::{Micros, PvmError, Tid};

const LONG: Micros = Micros::from_secs(1);

#[test]
fn suspended_tasks_stand_still_however_words_moves_and_owners_cross_and_nothing_is_lost() {
    let (mut moved, mut moved_suspended) = (0, 0);
    // 669: a task is let run for coming back, comes back, and the move for whose sake that was is refused meanwhile.
    for seed in seeds(150).chain([669]) {
        let mut scene = Scene::new(seed);
        scene.sim.faults.late_percent = 25;
        scene.sim.faults.step_fails_percent = if seed % 2 == 0 { 8 } else { 0 };
        for _ in 0..60 {
            scene.go_on();
            let n = scene.sim.dice.roll(3) as usize;
            let tid = scene.tids[scene.sim.dice.roll(6) as usize];
            match scene.sim.dice.roll(12) {
                0 => scene.say(n, stopped()),
                1 => scene.say(n, welcome()),
                2 | 3 => scene.move_one(),
                4 | 5 => scene.suspend(tid, true),
                6 | 7 => scene.suspend(tid, false),
                _ => {}
            }
            scene.assert_still();
        }
        moved_suspended += scene.suspended_at.keys().filter(|tid| scene.open.iter().any(|(t, _)| t == *tid)).count();
        moved += scene.end();
    }
    assert!(moved > 100 && moved_suspended > 100, "{moved} moves, {moved_suspended} of tasks suspended at the end");
}

#[test]
fn a_suspended_task_moves_without_running_stays_suspended_and_takes_what_was_sent_to_it_when_it_goes_on() {
    for seed in seeds(100) {
        let mut scene = Scene::new(seed);
        scene.go_on();
        let (console, p, tid) = (scene.console, scene.procs[2], scene.tids[2]);
        scene.suspend(tid, true);
        scene.sim.pass(LONG);
        scene.assert_still();
        for to in ["h1", "h3", "h2"] {
            for n in [0, 1, 4, 5] {
                talk(&mut scene.sim, &mut scene.sent, scene.procs[n], tid);
            }
            let done = scene.sim.ask(console, migrate(tid, to));
            assert!(matches!(done, Reply::Moved(Ok(_))), "{done:?} (seed {seed})");
            assert!(scene.sim.procs[p].is_frozen(), "seed {seed}");
            assert!(listed(&mut scene.sim, console).iter().any(|t| t.tid == tid && t.suspended), "seed {seed}");
            scene.sim.pass(LONG);
            assert!(listed(&mut scene.sim, console).iter().any(|t| t.tid == tid && t.suspended && !t.moving));
        }
        assert_eq!(scene.sim.procs[p].eased, 0, "it never ran (seed {seed})");
        scene.suspend(tid, false);
        scene.sim.until("it goes on", |s| !s.procs[p].is_frozen() && s.procs[p].conn.is_some());
        scene.end();
    }
}

#[test]
fn a_suspended_guest_goes_on_when_it_is_resumed_and_its_host_has_no_owner_whatever_comes_first() {
    for resume_first in [false, true] {
        let mut scene = Scene::new(9);
        let (p, tid) = (scene.procs[2], scene.tids[2]);
        scene.suspend(tid, true);
        scene.sim.pass(LONG);
        scene.say(1, stopped());
        scene.sim.pass(LONG);
        if resume_first {
            scene.suspend(tid, false);
        } else {
            scene.say(1, welcome());
        }
        scene.sim.pass(LONG);
        assert!(scene.sim.procs[p].is_frozen());
        let other = scene.procs[3];
        assert_eq!(scene.sim.procs[other].is_frozen(), resume_first, "its neighbour is not suspended");
        if resume_first {
            scene.say(1, welcome());
        } else {
            scene.suspend(tid, false);
        }
        scene.sim.until("it goes on", |s| !s.procs[p].is_frozen() && s.procs[p].conn.is_some());
        scene.end();
    }
}

#[test]
fn an_owner_who_comes_while_a_suspended_task_is_letting_go_waits_no_longer_for_it_than_for_others() {
    for seed in seeds(100) {
        let mut scene = Scene::new(seed);
        scene.sim.faults.late_percent = 50;
        scene.suspend(scene.tids[2], true);
        let wait = Micros(scene.sim.dice.roll(200_000));
        scene.sim.pass(wait);
        scene.say(1, stopped());
        scene.sim.pass(PROMISE + Micros(1));
        scene.assert_still();
        scene.end();
    }
}

#[test]
fn the_list_of_tasks_and_the_event_log_tell_who_is_suspended_and_why() {
    let mut scene = Scene::new(3);
    let (console, tid) = (scene.console, scene.tids[2]);
    let by = scene.sim.procs[console].tid();
    scene.suspend(tid, true);
    scene.suspend(tid, true);
    let list = listed(&mut scene.sim, console);
    let still: Vec<Tid> = list.iter().filter(|t| t.suspended).map(|t| t.tid).collect();
    assert_eq!(still, [tid]);
    assert!(list.iter().all(|t| !t.stopped && !t.moving));
    let cause = Cause::Share { why: "user 7 has taken less".into() };
    let resume = Request::Suspend { tid, suspend: false, cause: Some(cause.clone()) };
    assert_eq!(scene.sim.ask(console, resume), Reply::Done);
    scene.suspend(tid, false);
    let told = events(&mut scene.sim, console);
    let told: Vec<&EventKind> =
        told.iter().filter(|e| matches!(e, EventKind::Suspended { .. } | EventKind::Resumed { .. })).collect();
    let first = EventKind::Suspended { tid, cause: Cause::Asked { by } };
    let second = EventKind::Resumed { tid, cause };
    assert_eq!(told, [&first, &second], "what changes nothing is no event");
    scene.end();
}

#[test]
fn only_spawned_tasks_that_do_not_serve_the_virtual_machine_are_suspended_and_the_reason_says_which_is_which() {
    let mut scene = Scene::new(5);
    let (console, speaker) = (scene.console, scene.speakers[1]);
    let from_a_command_line = scene.sim.procs[speaker].tid();
    let nobody = Tid::task(host(2), 4000).expect("an id");
    for (tid, code, word) in [
        (from_a_command_line, PvmError::Denied, "no daemon has started it"),
        (nobody, PvmError::NoTask, "there is no task"),
        (host(2).tid(), PvmError::BadParam, "not the id of a task"),
    ] {
        for suspend in [true, false] {
            let reply = scene.sim.ask(console, Request::Suspend { tid, suspend, cause: None });
            let Reply::Failed { error, reason } = reply else { panic!("{reply:?}") };
            assert!(error == code && reason.contains(word), "{error:?}: {reason}");
        }
    }
    let rm = spawn(&mut scene.sim, console, on("h2", "rm", 1))[0];
    let serves = sempa_proto::task::RmServes { spawn: false, others: false };
    scene.sim.ask(rm, Request::RegisterRm(serves));
    let tid = scene.sim.procs[rm].tid();
    let reply = scene.sim.ask(console, Request::Suspend { tid, suspend: true, cause: None });
    assert!(
        matches!(&reply, Reply::Failed { error: PvmError::Denied, reason } if reason.contains("serves")),
        "{reply:?}"
    );
    scene.end();
}

#[test]
fn the_end_of_a_suspended_task_is_told_once_however_it_comes() {
    let (mut ends, mut taskers, mut hosts) = (0, 0, 0);
    for seed in seeds(200) {
        let mut scene = Scene::new(seed);
        scene.sim.faults.late_percent = 25;
        let console = scene.console;
        let what = NotifyWhat::TaskExit(scene.tids[2..4].to_vec());
        scene.sim.ask(console, Request::Notify(NotifyRequest { what, ctx: 0, tag: 1, cancel: false }));
        scene.go_on();
        scene.suspend(scene.tids[2], true);
        let wait = Micros(scene.sim.dice.roll(300_000));
        scene.sim.pass(wait);
        if seed % 2 == 0 {
            scene.move_one();
        }
        match scene.sim.dice.roll(4) {
            0 => {
                let victim = scene.procs[2];
                scene.sim.exit(victim, 9);
                ends += 1;
            }
            1 => {
                scene.sim.ask(console, Request::Signal { tid: scene.tids[2], signal: 9 });
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
        scene.sim.pass(Micros::from_secs(20));
        let list = listed(&mut scene.sim, console);
        for tid in &scene.tids[2..4] {
            let alive = list.iter().filter(|t| t.tid == *tid).count();
            let dead = scene.sim.procs[console].notes(1);
            let dead = dead.iter().filter(|m| m.body[..4] == tid.raw().to_be_bytes()).count();
            assert_eq!(alive + dead, 1, "{tid} (seed {seed})");
        }
        let suspended: Vec<Tid> = list.iter().filter(|t| t.suspended).map(|t| t.tid).collect();
        assert!(suspended.iter().all(|tid| *tid == scene.tids[2]), "{suspended:?} (seed {seed})");
        for suspend in [true, false] {
            let reply = scene.sim.ask(console, Request::Suspend { tid: scene.tids[2], suspend, cause: None });
            let there = list.iter().any(|t| t.tid == scene.tids[2]);
            let is_told = matches!(reply, Reply::Failed { error: PvmError::NoTask, .. });
            assert_eq!(reply == Reply::Done, there, "{reply:?} (seed {seed})");
            assert_eq!(is_told, !there, "{reply:?} (seed {seed})");
        }
        scene.sim.pass(Micros::from_secs(3));
        for p in &scene.procs {
            let proc = &scene.sim.procs[*p];
            assert!(proc.exited || (!proc.is_frozen() && proc.conn.is_some()), "seed {seed}");
        }
    }
    assert!(ends > 20 && taskers > 20 && hosts > 20, "{ends} ends, {taskers} taskers, {hosts} hosts");
}
