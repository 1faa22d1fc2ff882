//! Groups, mailbox entries and contexts in checkpoints.

use super::JobScenario;
use crate::HostId;
use crate::tests::sim::{Sim, seeds};
use sempa_proto::checkpoint::RestartFailure;
use sempa_proto::group::{GroupReply, GroupRequest};
use sempa_proto::task::{MailboxRequest, Reply, Request};
use sempa_proto::{Message, Micros, RequestId, Tid};

/// Members of a group that wait in a barrier complete it after a restart in a new virtual machine.
#[test]
fn barrier_completes_in_new_virtual_machine() {
    for seed in seeds(30) {
        let mut scene = JobScenario::new(seed, 3, 4);
        for tid in scene.tids.clone() {
            let proc = scene.sim.proc_of(tid);
            let reply = scene.sim.ask(
                proc,
                Request::Group(GroupRequest::Join {
                    group: b"us".into(),
                }),
            );
            assert!(
                matches!(reply, Reply::Group(GroupReply::Number(_))),
                "{reply:?}"
            );
        }
        let barrier = |sim: &mut Sim, tid: Tid| {
            let proc = sim.proc_of(tid);
            (
                tid,
                sim.request(
                    proc,
                    Request::Group(GroupRequest::Barrier {
                        group: b"us".into(),
                        count: 4,
                    }),
                ),
            )
        };
        let waiting: Vec<(Tid, RequestId)> = scene.tids[..3]
            .iter()
            .copied()
            .map(|tid| barrier(&mut scene.sim, tid))
            .collect();
        scene.sim.advance(Micros::from_millis(20));
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let mut scene = rebuild_virtual_machine(scene);
        let places = scene
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert!(
            places.iter().all(|(_, at)| *at == HostId::MASTER),
            "{places:?}"
        );
        scene.run_until_all_connected();
        let last = barrier(&mut scene.sim, scene.tids[3]);
        let all: Vec<(Tid, RequestId)> = waiting.into_iter().chain([last]).collect();
        scene.sim.run_until("all have met", |sim| {
            all.iter().all(|(tid, id)| {
                let replies = &sim.procs[sim.proc_of(*tid)].replies;
                matches!(replies.get(id), Some(Reply::Group(GroupReply::Number(0))))
            })
        });
    }
}

/// Loses the whole virtual machine. Creates a new one with the same store.
pub(super) fn rebuild_virtual_machine(scene: JobScenario) -> JobScenario {
    let JobScenario {
        sim: Sim {
            image_store: old,
            seed,
            ..
        },
        tids,
        ..
    } = scene;
    let spared = old.highest_task_numbers();
    let mut sim = Sim::with(seed + 1000, |config| {
        config.reserved_ids_max = spared.clone()
    });
    sim.image_store.adopt_checkpoints(old);
    let console = sim.enrol(HostId::MASTER);
    assert!(
        !tids.contains(&sim.procs[console].tid()),
        "a number was given away (seed {seed})"
    );
    JobScenario { sim, console, tids }
}

fn new_context(sim: &mut Sim, proc: usize) -> i32 {
    let Reply::Context(ctx) = sim.ask(proc, Request::NewContext) else {
        panic!("no context")
    };
    ctx
}

fn put_mail(scene: &mut JobScenario, by: usize, name: &str, body: &'static [u8]) {
    let (src, dst, body) = (Tid::NONE, Tid::NONE, bytes::Bytes::from_static(body));
    let message = Message {
        src,
        dst,
        ctx: 0,
        tag: 0,
        wid: 0,
        enc: 0,
        body,
    };
    let put = MailboxRequest::Put {
        name: name.into(),
        flags: 0,
        message,
    };
    let reply = scene.sim.ask(by, Request::Mailbox(put));
    assert_eq!(reply, Reply::MailboxIndex(0));
}

fn take_mail(scene: &mut JobScenario, name: &str) -> Option<bytes::Bytes> {
    let take = MailboxRequest::Take {
        name: name.into(),
        index: 0,
        flags: 0,
    };
    match scene.sim.ask(scene.console, Request::Mailbox(take)) {
        Reply::Mailbox(message) => Some(message.body),
        _ => None,
    }
}

/// Tasks own their mailbox entries and contexts again after a restart in a new virtual machine.
#[test]
fn restart_restores_mailbox_and_contexts() {
    for seed in seeds(20) {
        let mut scene = JobScenario::new(seed, 3, 4);
        let (mut owned, console) = (Vec::new(), scene.console);
        for tid in scene.tids.clone() {
            let proc = scene.sim.proc_of(tid);
            owned.push((tid, new_context(&mut scene.sim, proc)));
        }
        let (first, last) = (
            scene.sim.proc_of(scene.tids[0]),
            scene.sim.proc_of(scene.tids[3]),
        );
        put_mail(&mut scene, first, "ours", b"as it was");
        put_mail(&mut scene, console, "theirs", b"of the console");
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        put_mail(&mut scene, first, "ours", b"what did not happen");
        let free = |ctx| Request::FreeContext { ctx };
        assert_eq!(scene.sim.ask(last, free(owned[3].1)), Reply::Done);
        let mut scene = rebuild_virtual_machine(scene);
        let theirs = new_context(&mut scene.sim, scene.console);
        assert!(owned.iter().all(|(_, ctx)| *ctx != theirs), "seed {seed}");
        scene
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.run_until_all_connected();
        assert_eq!(
            take_mail(&mut scene, "ours").as_deref(),
            Some(&b"as it was"[..]),
            "seed {seed}"
        );
        assert_eq!(take_mail(&mut scene, "theirs"), None, "seed {seed}");
        for (tid, ctx) in owned {
            let (console, proc) = (scene.console, scene.sim.proc_of(tid));
            assert!(
                matches!(scene.sim.ask(console, free(ctx)), Reply::Failed { .. }),
                "seed {seed}"
            );
            assert_eq!(
                scene.sim.ask(proc, free(ctx)),
                Reply::Done,
                "{tid} (seed {seed})"
            );
        }
        scene.kill_all();
        assert_eq!(
            take_mail(&mut scene, "ours"),
            None,
            "an entry goes with its owner (seed {seed})"
        );
    }
}

/// A checkpoint is not restarted if other tasks own its mailbox entries or contexts.
#[test]
fn restart_refused_on_mailbox_or_context_conflict() {
    let mut scene = JobScenario::new(7, 2, 2);
    let (first, console) = (scene.sim.proc_of(scene.tids[0]), scene.console);
    put_mail(&mut scene, first, "ours", b"1");
    let report = scene.checkpoint(None).expect("nothing stands in the way");
    scene.kill_all();
    put_mail(&mut scene, console, "ours", b"2");
    assert_eq!(
        scene.restart(&report.name, &[]),
        Err(RestartFailure::MailboxInUse(vec!["ours 0".into()]))
    );
    assert_eq!(take_mail(&mut scene, "ours").as_deref(), Some(&b"2"[..]));
    let gone = MailboxRequest::Delete {
        name: "ours".into(),
        index: 0,
    };
    assert_eq!(scene.sim.ask(console, Request::Mailbox(gone)), Reply::Done);
    scene
        .restart(&report.name, &[])
        .expect("nothing stands in the way any more");
    scene.run_until_all_connected();
    let first = scene.sim.proc_of(scene.tids[0]);
    let ctx = new_context(&mut scene.sim, first);
    let report = scene.checkpoint(None).expect("nothing stands in the way");
    scene.kill_all();
    let machine = &mut scene
        .sim
        .nodes
        .get_mut(&host_of(ctx))
        .expect("there")
        .machine;
    let other = Tid::from_raw(0x40999);
    machine.reserve_contexts(vec![(ctx, other)]);
    assert_eq!(
        scene.restart(&report.name, &[]),
        Err(RestartFailure::ContextsInUse(vec![ctx]))
    );
}

fn host_of(ctx: i32) -> HostId {
    Tid::from_raw(ctx).birth_host().expect("a host gave it out")
}

/// A barrier that completes during a checkpoint has, after the restart, been passed by all members
/// or by none.
#[test]
fn barrier_during_checkpoint_is_all_or_none() {
    for seed in seeds(120) {
        let mut scene = JobScenario::new(seed, 4, 4);
        for tid in scene.tids.clone() {
            let proc = scene.sim.proc_of(tid);
            scene.sim.ask(
                proc,
                Request::Group(GroupRequest::Join {
                    group: b"us".into(),
                }),
            );
        }
        // Every task enters the barrier again as soon as it has passed it; its process counts the
        // passes.
        let step = |scene: &mut JobScenario| {
            for tid in scene.tids.clone() {
                let proc = scene.sim.proc_of(tid);
                let p = &scene.sim.procs[proc];
                if p.exited || p.is_frozen() || p.conn.is_none() {
                    continue;
                }
                let open = p.pending_request_count();
                if open == 0 {
                    scene.sim.request(
                        proc,
                        Request::Group(GroupRequest::Barrier {
                            group: b"us".into(),
                            count: 4,
                        }),
                    );
                }
            }
            let wait = Micros(scene.sim.rng.below(1_500));
            scene.sim.advance(wait);
        };
        for _ in 0..scene.sim.rng.below(40) {
            step(&mut scene);
        }
        let asked = scene.begin_checkpoint(None);
        let console = scene.console;
        while !scene.sim.procs[console].replies.contains_key(&asked) {
            step(&mut scene);
        }
        let Reply::Checkpointed(Ok(report)) = scene.sim.procs[console].replies[&asked].clone()
        else {
            panic!(
                "{:?} (seed {seed})",
                scene.sim.procs[console].replies[&asked]
            )
        };
        scene.kill_all();
        scene
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.run_until_all_connected();
        let passed = |scene: &JobScenario| -> Vec<usize> {
            scene
                .tids
                .iter()
                .map(|tid| scene.sim.procs[scene.sim.proc_of(*tid)].replies.len())
                .collect()
        };
        let before = passed(&scene);
        let most = before.iter().max().copied().unwrap_or_default();
        for _ in 0..400 {
            step(&mut scene);
        }
        let after = passed(&scene);
        assert!(
            after.iter().all(|count| *count > most + 3),
            "{before:?}, then {after:?} (seed {seed})"
        );
        let (least, most) = (after.iter().min(), after.iter().max());
        assert!(
            most.copied() <= least.map(|least| least + 1),
            "{after:?} (seed {seed})"
        );
    }
}
