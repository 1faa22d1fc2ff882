//! Jobs with programs that write their own checkpoints, alone or beside others.

use super::{Scene, lost, spawn_as};
use crate::tests::scene::{stopped_until, welcome};
use crate::tests::sim::{Sim, host, seeds};
use sempa_proto::checkpoint::CutFailure;
use sempa_proto::engine::Engine;
use sempa_proto::group::{GroupReply, GroupRequest};
use sempa_proto::migration::{Failure, Refusal, Step};
use sempa_proto::owner::Leave;
use sempa_proto::task::{Reply, Request, SpawnRequest};
use sempa_proto::{HostId, Micros, Tid};

/// A program, and what its spawn says of it.
fn request(file: &str, env: &[&str]) -> SpawnRequest {
    let env = env.iter().map(|entry| entry.as_bytes().to_vec()).collect();
    SpawnRequest {
        file: file.into(),
        env,
        count: 1,
        ..SpawnRequest::default()
    }
}

/// One that keeps what it has got and sent in a file.
fn keeper() -> SpawnRequest {
    request(
        "keeper",
        &["SEMPA_ENGINE=own:wait=3", "SEMPA_STATE=state-{tid}"],
    )
}

/// A job of these programs, all of which the first one has spawned.
fn job_of(seed: u64, hosts: usize, requests: Vec<SpawnRequest>) -> Scene {
    let (mut sim, console) = Sim::cluster(seed, hosts);
    let mut tids: Vec<Tid> = Vec::new();
    for request in requests {
        let by = tids.first().map_or(console, |root| sim.proc_of(*root));
        tids.extend(spawn_as(&mut sim, by, request));
    }
    Scene { sim, console, tids }
}

/// A job of so many tasks, some of which keep their state themselves, and those; at least one does.
fn mixed(seed: u64, hosts: usize, tasks: usize) -> (Scene, Vec<Tid>) {
    let keeps = |n: usize| n as u64 == seed % tasks as u64 || (seed >> n) & 1 == 1;
    let requests = (0..tasks)
        .map(|n| {
            if keeps(n) {
                keeper()
            } else {
                request("child", &[])
            }
        })
        .collect();
    let scene = job_of(seed, hosts, requests);
    let mut keepers: Vec<Tid> = scene
        .tids
        .iter()
        .enumerate()
        .filter(|(n, _)| keeps(*n))
        .map(|(_, tid)| *tid)
        .collect();
    keepers.sort_unstable();
    (scene, keepers)
}

#[test]
fn a_job_of_programs_that_write_their_own_checkpoints_goes_on_from_them_as_if_nothing_had_been_between()
 {
    for seed in seeds(80) {
        let (mut scene, keepers) = mixed(seed, 4, 6);
        scene.chatter(60);
        let asked = scene.begin_checkpoint(None);
        scene.chatter(120);
        let report = scene
            .answer(asked)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(
            (report.tasks.len(), &report.own),
            (6, &keepers),
            "seed {seed}"
        );
        // It goes on, and has lost nothing by that.
        scene.until_all_are_back();
        scene.chatter(40);
        scene.until_all_are_back();
        scene.until_all_is_heard();
        // What it has said since then did not happen.
        scene.chatter(40);
        scene.end_all();
        let mut scene = if seed % 2 == 0 { scene } else { lost(scene) };
        scene.restarts_and_talks(&report.set);
    }
}

#[test]
fn a_checkpoint_that_fails_anywhere_leaves_programs_that_were_asked_running_and_nothing_behind() {
    let (mut good, mut bad) = (0, 0);
    for seed in seeds(100) {
        let (mut scene, _) = mixed(seed, 3, 5);
        *(if scene.checkpoint_may_fail() {
            &mut good
        } else {
            &mut bad
        }) += 1;
    }
    assert!(good > 5 && bad > 5, "{good} went well, {bad} failed");
}

#[test]
fn a_restart_of_such_a_job_that_fails_anywhere_leaves_nothing_running_and_may_be_tried_again() {
    let mut bad = 0;
    for seed in seeds(60) {
        let (mut scene, _) = mixed(seed, 3, 4);
        scene.chatter(30);
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.until_all_are_back();
        scene.end_all();
        bad += scene.restart_may_fail(&report.set);
        scene.until_all_are_back();
        scene.chatter(60);
        scene.until_all_are_back();
        scene.until_all_is_heard();
        scene.sim.pass(Micros::from_secs(2));
        assert_eq!(scene.sim.sets.left(), (0, 0), "seed {seed}");
    }
    assert!(bad > 10, "{bad} restarts failed");
}

#[test]
fn hosts_that_are_lost_at_any_moment_leave_such_a_job_that_goes_on() {
    for seed in seeds(80) {
        let (mut scene, _) = mixed(seed, 5, 6);
        let first = scene.checkpoint(Some(Micros::from_millis(500)));
        first.unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let mut hosts: Vec<u16> = (2..=5).collect();
        for _ in 0..3 {
            let rounds = scene.sim.dice.roll(300);
            scene.chatter(rounds);
            let which = scene.sim.dice.roll(hosts.len() as u64) as usize;
            scene.sim.kill_host(host(hosts.remove(which)));
        }
        scene.sim.pass(Micros::from_secs(8));
        let job = scene.job();
        let never = Request::Checkpoint {
            job,
            pace: Some(sempa_proto::checkpoint::Pace::Never),
            end: false,
            wait: true,
        };
        assert_eq!(scene.sim.ask(scene.console, never), Reply::Done);
        scene.sim.pass(Micros::from_secs(8));
        scene.until_all_are_back();
        scene.chatter(60);
        scene.until_all_are_back();
        scene.until_all_is_heard();
        scene.sim.pass(Micros::from_secs(2));
        let is_alive = |at: HostId| scene.sim.nodes[&at].alive;
        assert_eq!(scene.sim.sets.left_on(is_alive), 0, "seed {seed}");
    }
}

#[test]
fn what_those_say_who_go_on_before_a_program_is_written_is_not_in_the_set() {
    for seed in seeds(80) {
        let at = |request: SpawnRequest, host: &str| SpawnRequest {
            flags: 1,
            place: host.into(),
            ..request
        };
        let mut scene = job_of(
            seed,
            3,
            vec![at(request("child", &[]), "h2"), at(keeper(), "h3")],
        );
        let [root, own] = scene.tids[..] else {
            panic!("two")
        };
        scene.chatter(20);
        let asked = scene.begin_checkpoint(None);
        scene
            .sim
            .until("it is asked", |sim| sim.procs[sim.proc_of(own)].exited);
        scene.sim.until("the other one stands", |sim| {
            sim.procs[sim.proc_of(root)].is_frozen()
        });
        let moment = Micros(scene.sim.dice.roll(8_000));
        scene.sim.pass(moment);
        scene
            .sim
            .slow_down_orders(host(3), Micros::from_millis(100));
        let console = scene.console;
        while !scene.sim.procs[console].replies.contains_key(&asked) {
            scene.talk(root, own);
            scene.sim.pass(Micros::from_millis(2));
        }
        let report = scene
            .answer(asked)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.until_all_are_back();
        scene.until_all_is_heard();
        scene.end_all();
        scene
            .restart(&report.set, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.until_all_are_back();
        // It has not said it.
        scene.sim.pass(Micros::from_millis(500));
        scene.until_all_is_heard();
    }
}

#[test]
fn an_owner_may_come_and_go_at_any_moment_of_such_a_checkpoint() {
    let (mut good, mut bad) = (0, 0);
    for seed in seeds(120) {
        let (mut scene, _) = mixed(seed, 3, 5);
        scene.chatter(20);
        let speaker = scene.sim.enrol(host(2));
        let asked = scene.begin_checkpoint(None);
        let moment = Micros(scene.sim.dice.roll(60_000));
        scene.sim.pass(moment);
        assert_eq!(
            scene
                .sim
                .ask(speaker, stopped_until(None, Leave::Checkpoint)),
            Reply::Done
        );
        let while_he_is_there = Micros(scene.sim.dice.roll(9_000_000));
        scene.sim.pass(while_he_is_there);
        assert_eq!(scene.sim.ask(speaker, welcome()), Reply::Done);
        let result = scene.answer(asked);
        scene.until_all_are_back();
        scene.chatter(40);
        scene.until_all_are_back();
        scene.until_all_is_heard();
        let Ok(report) = result else {
            bad += 1;
            continue;
        };
        good += 1;
        scene.end_all();
        scene
            .restart(&report.set, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.until_all_are_back();
        scene.chatter(40);
        scene.until_all_are_back();
        scene.until_all_is_heard();
    }
    assert!(good > 20, "{good} went well, {bad} failed");
}

/// Why there is no checkpoint of a job.
fn why_not(scene: &mut Scene) -> (Tid, Step, Failure) {
    match scene.checkpoint(None) {
        Err(CutFailure::Task { tid, step, why }) => (tid, step, why),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_stands_in_the_way_of_a_checkpoint_is_said_and_nobody_is_asked() {
    let restart = request("child", &["SEMPA_ENGINE=restart"]);
    let no_files = request("keeper", &["SEMPA_ENGINE=own"]);
    let heedless = request(
        "heedless-keeper",
        &["SEMPA_ENGINE=own:signal=12", "SEMPA_STATE=state-{tid}"],
    );
    let by_restart = Refusal::NotByCriu {
        engine: Engine::Restart { wait: 5 },
    };
    let not_minded = Refusal::NotMinded { signal: 12 };
    for (request, refusal) in [
        (restart, by_restart),
        (no_files, Refusal::NoState),
        (heedless, not_minded),
    ] {
        let mut scene = job_of(3, 2, vec![keeper(), request]);
        let second = scene.tids[1];
        assert_eq!(
            why_not(&mut scene),
            (second, Step::Inspect, Failure::Refused(vec![refusal]))
        );
        let asked = scene
            .tids
            .iter()
            .filter(|tid| scene.sim.was_asked(scene.sim.proc_of(**tid)));
        assert_eq!(asked.count(), 0);
    }
    let mut scene = job_of(3, 2, vec![keeper()]);
    let job = scene.job();
    let hold = Request::Suspend {
        tid: job,
        suspend: true,
        cause: None,
    };
    assert_eq!(scene.sim.ask(scene.console, hold), Reply::Done);
    assert_eq!(
        why_not(&mut scene),
        (
            job,
            Step::Inspect,
            Failure::Refused(vec![Refusal::Suspended])
        )
    );
}

#[test]
fn the_first_way_by_which_a_task_can_be_written_is_taken() {
    for (engines, by_itself) in [
        ("own,criu", true),
        ("criu,own", false),
        ("own,restart", true),
        ("restart,criu", false),
    ] {
        let env = [
            &*format!("SEMPA_ENGINE={engines}"),
            "SEMPA_STATE=state-{tid}",
        ];
        let mut scene = job_of(4, 2, vec![request("keeper", &env)]);
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{engines}: {why}"));
        assert_eq!(report.own == report.tasks, by_itself, "{engines}");
        scene.until_all_are_back();
    }
}

#[test]
fn a_program_that_does_not_end_in_its_time_is_a_reason_for_no_checkpoint_and_all_go_on() {
    let deaf = SpawnRequest {
        file: "deaf".into(),
        ..keeper()
    };
    let mut scene = job_of(5, 3, vec![keeper(), request("child", &[]), deaf]);
    scene.chatter(30);
    let (tid, step, why) = why_not(&mut scene);
    assert_eq!((tid, step), (scene.tids[2], Step::Quiesce));
    assert!(why.to_string().contains("within 3 s"), "{why}");
    scene.until_all_are_back();
    scene.chatter(60);
    scene.until_all_are_back();
    scene.until_all_is_heard();
    // It may do so yet: it is asked again when it does not count any more.
    let before = scene.sim.now;
    let (tid, _, why) = why_not(&mut scene);
    assert_eq!(tid, scene.tids[2]);
    assert!(scene.sim.now.since(before) > Micros::from_secs(50), "{why}");
}

#[test]
fn a_checkpoint_that_was_called_off_while_a_program_wrote_is_made_when_it_has() {
    for seed in seeds(20) {
        let deaf = SpawnRequest {
            file: "deaf keeper".into(),
            ..keeper()
        };
        let mut scene = job_of(seed, 3, vec![keeper(), deaf]);
        let slow = scene.sim.proc_of(scene.tids[1]);
        let first = why_not(&mut scene);
        assert_eq!(first.1, Step::Quiesce);
        let asked = scene.begin_checkpoint(None);
        scene.sim.pass(Micros::from_secs(8));
        // Late, and as agreed: it is started again, and the next process does it at once.
        scene.sim.end_in_order(slow, 85 << 8);
        scene
            .sim
            .until("another process", |sim| sim.proc_of(scene.tids[1]) != slow);
        let new = scene.sim.proc_of(scene.tids[1]);
        scene.sim.call_program(new, "keeper");
        let report = scene
            .answer(asked)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(report.own.len(), 2, "seed {seed}");
        scene.until_all_are_back();
    }
}

#[test]
fn a_program_that_waits_in_a_barrier_when_it_ends_is_in_no_set() {
    let mut scene = job_of(6, 2, vec![keeper(), request("child", &[])]);
    for tid in scene.tids.clone() {
        let proc = scene.sim.proc_of(tid);
        scene.sim.ask(
            proc,
            Request::Group(GroupRequest::Join {
                group: b"us".into(),
            }),
        );
    }
    let (root, other) = (
        scene.sim.proc_of(scene.tids[0]),
        scene.sim.proc_of(scene.tids[1]),
    );
    let barrier = || {
        Request::Group(GroupRequest::Barrier {
            group: b"us".into(),
            count: 2,
        })
    };
    scene.sim.request(root, barrier());
    scene.sim.pass(Micros::from_millis(20));
    let (tid, step, why) = why_not(&mut scene);
    assert_eq!((tid, step), (scene.tids[0], Step::Dump));
    assert!(why.to_string().contains("barrier"), "{why}");
    scene.until_all_are_back();
    // It counts where it is, as in a move.
    assert!(matches!(
        scene.sim.ask(other, barrier()),
        Reply::Group(GroupReply::Number(_))
    ));
}

#[test]
fn a_program_that_has_written_nothing_of_what_its_spawn_names_is_told_of() {
    let mut scene = job_of(
        7,
        2,
        vec![
            keeper(),
            SpawnRequest {
                file: "forgetful".into(),
                ..keeper()
            },
        ],
    );
    scene.checkpoint(None).expect("nothing stands in the way");
    scene.until_all_are_back();
    let log = scene.sim.nodes[&HostId::MASTER].log.join("\n") + &scene.sim.story();
    let told = format!(
        "{} has ended as one that has written its own checkpoint, and none of the files",
        scene.tids[1]
    );
    assert!(
        log.contains(&told)
            && !log.contains(&told.replace(&scene.tids[1].to_string(), &scene.tids[0].to_string())),
        "{log}"
    );
}

#[test]
fn a_program_that_was_written_moves_as_soon_as_it_runs_again_and_where_it_goes_the_set_goes_on() {
    for seed in seeds(30) {
        let (mut scene, keepers) = mixed(seed, 4, 4);
        scene.chatter(30);
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let moving = Request::Migrate {
            tid: keepers[0],
            to: "h4".into(),
            cause: None,
            wait: true,
        };
        let reply = scene.sim.ask(scene.console, moving);
        let there = scene.sim.procs[scene.sim.proc_of(keepers[0])].host;
        assert!(
            matches!(reply, Reply::Moved(Ok(_))) || there == host(4),
            "{reply:?} (seed {seed})"
        );
        scene.until_all_are_back();
        scene.chatter(30);
        scene.until_all_are_back();
        scene.until_all_is_heard();
        scene.end_all();
        let places = scene
            .restart(&report.set, &["h1", "h2"])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert!(
            places
                .iter()
                .all(|(_, at)| [HostId::MASTER, host(2)].contains(at)),
            "{places:?}"
        );
        scene.until_all_are_back();
        scene.chatter(60);
        scene.until_all_are_back();
        scene.until_all_is_heard();
    }
}
