//! Groups, mailbox entries and contexts in checkpoints.

use super::JobScenario;
use crate::HostId;
use crate::tests::sim::{Sim, seeds};
use sempa_proto::checkpoint::RestartFailure;
use sempa_proto::group::{GroupReply, GroupRequest};
use sempa_proto::task::{MailboxRequest, Reply, Request};
use sempa_proto::{Message, Micros, RequestId, Tid};

/// Members of a group wait in a barrier during a checkpoint. After a restart in a new virtual
/// machine they complete the barrier.
#[test]
fn barrier_completes_in_new_virtual_machine() {
    for seed in seeds(30) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        for tid in scenario.tids.clone() {
            let proc = scenario.sim.proc_of(tid);
            let reply = scenario.sim.ask(
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
        let enter_barrier = |sim: &mut Sim, tid: Tid| {
            let proc = sim.proc_of(tid);
            (
                tid,
                sim.request(
                    proc,
                    Request::Group(GroupRequest::Barrier {
                        group: b"us".into(),
                        required_members: 4,
                    }),
                ),
            )
        };
        let waiting_requests: Vec<(Tid, RequestId)> = scenario.tids[..3]
            .iter()
            .copied()
            .map(|tid| enter_barrier(&mut scenario.sim, tid))
            .collect();
        scenario.sim.advance(Micros::from_millis(20));
        let report = scenario
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let mut scenario = rebuild_virtual_machine(scenario);
        let task_hosts = scenario
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert!(
            task_hosts
                .iter()
                .all(|(_, host_id)| *host_id == HostId::MASTER),
            "{task_hosts:?}"
        );
        scenario.run_until_all_connected();
        let last_entry = enter_barrier(&mut scenario.sim, scenario.tids[3]);
        let barrier_requests: Vec<(Tid, RequestId)> =
            waiting_requests.into_iter().chain([last_entry]).collect();
        scenario.sim.run_until("all have met", |sim| {
            barrier_requests.iter().all(|(tid, id)| {
                let replies = &sim.procs[sim.proc_of(*tid)].replies;
                matches!(replies.get(id), Some(Reply::Group(GroupReply::Number(0))))
            })
        });
    }
}

/// Drops the whole virtual machine and creates a new one with the same store.
pub(super) fn rebuild_virtual_machine(scenario: JobScenario) -> JobScenario {
    let JobScenario {
        sim: Sim {
            image_store: old_store,
            seed,
            ..
        },
        tids,
        ..
    } = scenario;
    let reserved_ids_max = old_store.highest_task_numbers();
    let mut sim = Sim::with_config(seed + 1000, |config| {
        config.reserved_ids_max = reserved_ids_max.clone()
    });
    sim.image_store.adopt_checkpoints(old_store);
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

fn put_mailbox_entry(scenario: &mut JobScenario, proc: usize, name: &str, body: &'static [u8]) {
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
    let put_request = MailboxRequest::Put {
        name: name.into(),
        flags: 0,
        message,
    };
    let reply = scenario.sim.ask(proc, Request::Mailbox(put_request));
    assert_eq!(reply, Reply::MailboxIndex(0));
}

fn take_mailbox_entry(scenario: &mut JobScenario, name: &str) -> Option<bytes::Bytes> {
    let take_request = MailboxRequest::Take {
        name: name.into(),
        index: 0,
        flags: 0,
    };
    match scenario
        .sim
        .ask(scenario.console, Request::Mailbox(take_request))
    {
        Reply::Mailbox(message) => Some(message.body),
        _ => None,
    }
}

/// Tasks own their mailbox entries and contexts again after a restart in a new virtual machine. The
/// entries of tasks outside the job are not restored.
#[test]
fn restart_restores_mailbox_and_contexts() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let (mut task_contexts, console) = (Vec::new(), scenario.console);
        for tid in scenario.tids.clone() {
            let proc = scenario.sim.proc_of(tid);
            task_contexts.push((tid, new_context(&mut scenario.sim, proc)));
        }
        let (first_proc, last_proc) = (
            scenario.sim.proc_of(scenario.tids[0]),
            scenario.sim.proc_of(scenario.tids[3]),
        );
        put_mailbox_entry(&mut scenario, first_proc, "ours", b"as it was");
        put_mailbox_entry(&mut scenario, console, "theirs", b"of the console");
        let report = scenario
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        put_mailbox_entry(&mut scenario, first_proc, "ours", b"what did not happen");
        let free_request = |ctx| Request::FreeContext { ctx };
        assert_eq!(
            scenario
                .sim
                .ask(last_proc, free_request(task_contexts[3].1)),
            Reply::Done
        );
        let mut scenario = rebuild_virtual_machine(scenario);
        let console_ctx = new_context(&mut scenario.sim, scenario.console);
        assert!(
            task_contexts.iter().all(|(_, ctx)| *ctx != console_ctx),
            "seed {seed}"
        );
        scenario
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scenario.run_until_all_connected();
        assert_eq!(
            take_mailbox_entry(&mut scenario, "ours").as_deref(),
            Some(&b"as it was"[..]),
            "seed {seed}"
        );
        assert_eq!(
            take_mailbox_entry(&mut scenario, "theirs"),
            None,
            "seed {seed}"
        );
        for (tid, ctx) in task_contexts {
            let (console, proc) = (scenario.console, scenario.sim.proc_of(tid));
            assert!(
                matches!(
                    scenario.sim.ask(console, free_request(ctx)),
                    Reply::Failed { .. }
                ),
                "seed {seed}"
            );
            assert_eq!(
                scenario.sim.ask(proc, free_request(ctx)),
                Reply::Done,
                "{tid} (seed {seed})"
            );
        }
        scenario.kill_all_tasks();
        assert_eq!(
            take_mailbox_entry(&mut scenario, "ours"),
            None,
            "an entry goes with its owner (seed {seed})"
        );
    }
}

/// A checkpoint is not restarted if other tasks own its mailbox entries or contexts.
#[test]
fn restart_refused_on_mailbox_or_context_conflict() {
    let mut scenario = JobScenario::new(7, 2, 2);
    let (first_proc, console) = (scenario.sim.proc_of(scenario.tids[0]), scenario.console);
    put_mailbox_entry(&mut scenario, first_proc, "ours", b"1");
    let report = scenario
        .checkpoint(None)
        .expect("nothing stands in the way");
    scenario.kill_all_tasks();
    put_mailbox_entry(&mut scenario, console, "ours", b"2");
    assert_eq!(
        scenario.restart(&report.name, &[]),
        Err(RestartFailure::MailboxInUse(vec!["ours 0".into()]))
    );
    assert_eq!(
        take_mailbox_entry(&mut scenario, "ours").as_deref(),
        Some(&b"2"[..])
    );
    let delete_request = MailboxRequest::Delete {
        name: "ours".into(),
        index: 0,
    };
    assert_eq!(
        scenario.sim.ask(console, Request::Mailbox(delete_request)),
        Reply::Done
    );
    scenario
        .restart(&report.name, &[])
        .expect("nothing stands in the way any more");
    scenario.run_until_all_connected();
    let first_proc = scenario.sim.proc_of(scenario.tids[0]);
    let ctx = new_context(&mut scenario.sim, first_proc);
    let report = scenario
        .checkpoint(None)
        .expect("nothing stands in the way");
    scenario.kill_all_tasks();
    let machine = &mut scenario
        .sim
        .nodes
        .get_mut(&host_of_context(ctx))
        .expect("there")
        .machine;
    let other_tid = Tid::from_raw(0x40999);
    machine.reserve_contexts(vec![(ctx, other_tid)]);
    assert_eq!(
        scenario.restart(&report.name, &[]),
        Err(RestartFailure::ContextsInUse(vec![ctx]))
    );
}

fn host_of_context(ctx: i32) -> HostId {
    Tid::from_raw(ctx).birth_host().expect("a host gave it out")
}

/// A barrier completes during a checkpoint. After the restart all members have passed it, or none
/// has.
#[test]
fn barrier_during_checkpoint_is_all_or_none() {
    for seed in seeds(120) {
        let mut scenario = JobScenario::new(seed, 4, 4);
        for tid in scenario.tids.clone() {
            let proc = scenario.sim.proc_of(tid);
            scenario.sim.ask(
                proc,
                Request::Group(GroupRequest::Join {
                    group: b"us".into(),
                }),
            );
        }
        // Every task enters the barrier again as soon as it has passed it. The process of a task
        // counts the passes.
        let reenter_barriers = |scenario: &mut JobScenario| {
            for tid in scenario.tids.clone() {
                let proc = scenario.sim.proc_of(tid);
                let p = &scenario.sim.procs[proc];
                if p.exited || p.is_frozen() || p.conn.is_none() {
                    continue;
                }
                let pending_count = p.pending_request_count();
                if pending_count == 0 {
                    scenario.sim.request(
                        proc,
                        Request::Group(GroupRequest::Barrier {
                            group: b"us".into(),
                            required_members: 4,
                        }),
                    );
                }
            }
            let delay = Micros(scenario.sim.rng.below(1_500));
            scenario.sim.advance(delay);
        };
        for _ in 0..scenario.sim.rng.below(40) {
            reenter_barriers(&mut scenario);
        }
        let checkpoint_request = scenario.begin_checkpoint(None);
        let console = scenario.console;
        while !scenario.sim.procs[console]
            .replies
            .contains_key(&checkpoint_request)
        {
            reenter_barriers(&mut scenario);
        }
        let Reply::Checkpointed(Ok(report)) =
            scenario.sim.procs[console].replies[&checkpoint_request].clone()
        else {
            panic!(
                "{:?} (seed {seed})",
                scenario.sim.procs[console].replies[&checkpoint_request]
            )
        };
        scenario.kill_all_tasks();
        scenario
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scenario.run_until_all_connected();
        let pass_counts = |scenario: &JobScenario| -> Vec<usize> {
            scenario
                .tids
                .iter()
                .map(|tid| scenario.sim.procs[scenario.sim.proc_of(*tid)].replies.len())
                .collect()
        };
        let counts_before = pass_counts(&scenario);
        let max_count = counts_before.iter().max().copied().unwrap_or_default();
        for _ in 0..400 {
            reenter_barriers(&mut scenario);
        }
        let counts_after = pass_counts(&scenario);
        assert!(
            counts_after.iter().all(|count| *count > max_count + 3),
            "{counts_before:?}, then {counts_after:?} (seed {seed})"
        );
        let (min_count, max_count) = (counts_after.iter().min(), counts_after.iter().max());
        assert!(
            max_count.copied() <= min_count.map(|min_count| min_count + 1),
            "{counts_after:?} (seed {seed})"
        );
    }
}
