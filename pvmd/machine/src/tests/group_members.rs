//! Members of a group on several hosts: they wait in barriers, end, migrate, and lose their hosts.

use super::sim::{Sim, host, seeds};
use crate::HostId;
use sempa_proto::group::{GroupReply, GroupRequest};
use sempa_proto::task::{Reply, Request, SpawnRequest};
use sempa_proto::{Micros, PvmError, RequestId, Tid};

fn group_name() -> Vec<u8> {
    b"workers".to_vec()
}

fn join_request() -> Request {
    Request::Group(GroupRequest::Join {
        group: group_name(),
    })
}

fn barrier_request(count: i32) -> Request {
    Request::Group(GroupRequest::Barrier {
        group: group_name(),
        required_members: count,
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
        Request::Group(GroupRequest::Size {
            group: group_name(),
        }),
    );
    number_or_code(&reply)
}

fn create_members(sim: &mut Sim, hosts: u16) -> Vec<usize> {
    let procs: Vec<usize> = (1..=hosts).map(|h| sim.enrol(host(h))).collect();
    for (instance, proc) in procs.iter().enumerate() {
        let reply = sim.ask(*proc, join_request());
        assert_eq!(number_or_code(&reply), instance as i32);
    }
    procs
}

fn are_all_answered(sim: &Sim, open_requests: &[(usize, RequestId)]) -> bool {
    open_requests
        .iter()
        .all(|(proc, id)| sim.procs[*proc].replies.contains_key(id))
}

/// Members on all hosts complete a barrier. The next barrier fails immediately when a member ends.
#[test]
fn barrier_spans_hosts_and_fails_on_member_exit() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let procs = create_members(&mut sim, 3);
        let open_requests: Vec<(usize, RequestId)> = procs
            .iter()
            .map(|p| (*p, sim.request(*p, barrier_request(3))))
            .collect();
        sim.run_until("the barrier", |s| are_all_answered(s, &open_requests));
        assert!(
            open_requests
                .iter()
                .all(|(p, id)| number_or_code(&sim.procs[*p].replies[id]) == 0),
            "seed {seed}"
        );
        let open_requests: Vec<(usize, RequestId)> = procs[1..]
            .iter()
            .map(|p| (*p, sim.request(*p, barrier_request(3))))
            .collect();
        sim.advance(Micros::from_millis(50));
        assert!(!are_all_answered(&sim, &open_requests[..1]), "seed {seed}");
        sim.close_connection(procs[0]);
        sim.run_until("word of the end", |s| are_all_answered(s, &open_requests));
        for (proc, id) in &open_requests {
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

/// The loss of a host removes its members from the group and fails the barrier of the remaining
/// members.
#[test]
fn lost_host_removes_its_members() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let procs = create_members(&mut sim, 3);
        let open_requests: Vec<(usize, RequestId)> = procs[..2]
            .iter()
            .map(|p| (*p, sim.request(*p, barrier_request(3))))
            .collect();
        sim.advance(Micros::from_millis(50));
        sim.kill_host(host(3));
        sim.run_until("word of the loss", |s| are_all_answered(s, &open_requests));
        assert!(
            open_requests
                .iter()
                .all(|(p, id)| number_or_code(&sim.procs[*p].replies[id]) == -19),
            "seed {seed}"
        );
        assert_eq!(group_size(&mut sim, console), 2);
    }
}

/// A task that ended before its join request arrived is removed from the group within a short time.
#[test]
fn join_after_exit_is_undone() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let member_proc = sim.enrol(HostId::MASTER);
        sim.ask(member_proc, join_request());
        let ending_proc = sim.enrol(host(2));
        sim.request(ending_proc, join_request());
        let delay = Micros(sim.rng.below(300));
        sim.advance(delay);
        sim.close_connection(ending_proc);
        sim.advance(Micros::from_millis(200));
        assert_eq!(group_size(&mut sim, console), 1, "seed {seed}");
    }
}

/// A member waits in a barrier during its migration and is released at the target.
#[test]
fn barrier_wait_survives_migration() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let request = SpawnRequest {
            program: "child".into(),
            task_count: 1,
            flags: 1,
            where_arg: "h2".into(),
            ..Default::default()
        };
        let Reply::Spawned(results) = sim.ask(console, Request::Spawn(request)) else {
            panic!("no task")
        };
        let tid: Tid = results[0].expect("started");
        sim.run_until("it is there", |s| s.procs[s.proc_of(tid)].welcome.is_some());
        let member_proc = sim.proc_of(tid);
        sim.ask(member_proc, join_request());
        sim.ask(console, join_request());
        let open_request = sim.request(member_proc, barrier_request(2));
        let delay = Micros(sim.rng.below(20_000));
        sim.advance(delay);
        let migrate_request = Request::Migrate {
            tid,
            target: "h3".into(),
            cause: None,
            wait_for_end: true,
        };
        let migration_request = sim.request(console, migrate_request);
        let delay = Micros(sim.rng.below(40_000));
        sim.advance(delay);
        // The console, the last member, enters before, during or after the migration.
        let reply = sim.ask(console, barrier_request(2));
        assert_eq!(number_or_code(&reply), 0);
        sim.run_until("the move", |s| {
            s.procs[console].replies.contains_key(&migration_request)
        });
        assert!(
            matches!(
                sim.procs[console].replies[&migration_request],
                Reply::Migrated(Ok(_))
            ),
            "seed {seed}"
        );
        sim.run_until("the answer, at its new place", |s| {
            are_all_answered(s, &[(member_proc, open_request)])
        });
        assert_eq!(
            number_or_code(&sim.procs[member_proc].replies[&open_request]),
            0
        );
        assert_eq!(sim.procs[member_proc].host, host(3));
        assert_eq!(group_size(&mut sim, console), 2);
    }
}
