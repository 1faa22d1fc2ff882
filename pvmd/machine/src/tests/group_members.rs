//! Members of a group on several hosts: they meet in barriers, end, migrate, and lose their hosts.

use super::sim::{Sim, host, seeds};
use crate::HostId;
use sempa_proto::group::{GroupReply, GroupRequest};
use sempa_proto::task::{Reply, Request, SpawnRequest};
use sempa_proto::{Micros, PvmError, RequestId, Tid};

fn group() -> Vec<u8> {
    b"workers".to_vec()
}

fn join() -> Request {
    Request::Group(GroupRequest::Join { group: group() })
}

fn barrier(count: i32) -> Request {
    Request::Group(GroupRequest::Barrier {
        group: group(),
        count,
    })
}

fn number_or_code(reply: &Reply) -> i32 {
    match reply {
        Reply::Group(GroupReply::Number(number)) => *number,
        Reply::Failed { error, .. } => error.code(),
        other => panic!("{other:?}"),
    }
}

fn group_size(sim: &mut Sim, console: usize) -> i32 {
    let reply = sim.ask(
        console,
        Request::Group(GroupRequest::Size { group: group() }),
    );
    number_or_code(&reply)
}

fn create_members(sim: &mut Sim, hosts: u16) -> Vec<usize> {
    let procs: Vec<usize> = (1..=hosts).map(|h| sim.enrol(host(h))).collect();
    for (instance, proc) in procs.iter().enumerate() {
        let reply = sim.ask(*proc, join());
        assert_eq!(number_or_code(&reply), instance as i32);
    }
    procs
}

fn all_answered(sim: &Sim, open: &[(usize, RequestId)]) -> bool {
    open.iter()
        .all(|(proc, id)| sim.procs[*proc].replies.contains_key(id))
}

/// Members on all hosts meet in a barrier, which fails at once when a member ends.
#[test]
fn barrier_spans_hosts_and_fails_on_member_exit() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let procs = create_members(&mut sim, 3);
        let open: Vec<(usize, RequestId)> = procs
            .iter()
            .map(|p| (*p, sim.request(*p, barrier(3))))
            .collect();
        sim.run_until("the barrier", |s| all_answered(s, &open));
        assert!(
            open.iter()
                .all(|(p, id)| number_or_code(&sim.procs[*p].replies[id]) == 0),
            "seed {seed}"
        );
        let open: Vec<(usize, RequestId)> = procs[1..]
            .iter()
            .map(|p| (*p, sim.request(*p, barrier(3))))
            .collect();
        sim.advance(Micros::from_millis(50));
        assert!(!all_answered(&sim, &open[..1]), "seed {seed}");
        sim.close(procs[0]);
        sim.run_until("word of the end", |s| all_answered(s, &open));
        for (proc, id) in &open {
            let reply = &sim.procs[*proc].replies[id];
            assert!(
                matches!(
                    reply,
                    Reply::Failed {
                        error: PvmError::NoGroup,
                        ..
                    }
                ),
                "seed {seed}: {reply:?}"
            );
        }
        assert_eq!(group_size(&mut sim, console), 2);
    }
}

/// The loss of a host removes its members and fails their barrier.
#[test]
fn lost_host_removes_its_members() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let procs = create_members(&mut sim, 3);
        let open: Vec<(usize, RequestId)> = procs[..2]
            .iter()
            .map(|p| (*p, sim.request(*p, barrier(3))))
            .collect();
        sim.advance(Micros::from_millis(50));
        sim.kill_host(host(3));
        sim.run_until("word of the loss", |s| all_answered(s, &open));
        assert!(
            open.iter()
                .all(|(p, id)| number_or_code(&sim.procs[*p].replies[id]) == -19),
            "seed {seed}"
        );
        assert_eq!(group_size(&mut sim, console), 2);
    }
}

/// A task that ended before its join request arrived is soon removed from the group.
#[test]
fn join_after_exit_is_undone() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let stays = sim.enrol(HostId::MASTER);
        sim.ask(stays, join());
        let ends = sim.enrol(host(2));
        sim.request(ends, join());
        let wait = Micros(sim.rng.below(300));
        sim.advance(wait);
        sim.close(ends);
        sim.advance(Micros::from_millis(200));
        assert_eq!(group_size(&mut sim, console), 1, "seed {seed}");
    }
}

/// A member continues to wait in a barrier while it migrates.
#[test]
fn barrier_wait_survives_migration() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let request = SpawnRequest {
            file: "child".into(),
            count: 1,
            flags: 1,
            place: "h2".into(),
            ..Default::default()
        };
        let Reply::Spawned(results) = sim.ask(console, Request::Spawn(request)) else {
            panic!("no task")
        };
        let tid: Tid = results[0].expect("started");
        sim.run_until("it is there", |s| s.procs[s.proc_of(tid)].welcome.is_some());
        let mover = sim.proc_of(tid);
        sim.ask(mover, join());
        sim.ask(console, join());
        let open = sim.request(mover, barrier(2));
        let wait = Micros(sim.rng.below(20_000));
        sim.advance(wait);
        let migrate = Request::Migrate {
            tid,
            to: "h3".into(),
            cause: None,
            wait: true,
        };
        let moving = sim.request(console, migrate);
        let wait = Micros(sim.rng.below(40_000));
        sim.advance(wait);
        // The last member enters before, during or after the migration.
        let reply = sim.ask(console, barrier(2));
        assert_eq!(number_or_code(&reply), 0);
        sim.run_until("the move", |s| {
            s.procs[console].replies.contains_key(&moving)
        });
        assert!(
            matches!(sim.procs[console].replies[&moving], Reply::Migrated(Ok(_))),
            "seed {seed}"
        );
        sim.run_until("the answer, at its new place", |s| {
            all_answered(s, &[(mover, open)])
        });
        assert_eq!(number_or_code(&sim.procs[mover].replies[&open]), 0);
        assert_eq!(sim.procs[mover].host, host(3));
        assert_eq!(group_size(&mut sim, console), 2);
    }
}
