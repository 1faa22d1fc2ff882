//! Tests of the resource manager's service, with a fake virtual machine and virtual time.

mod answers;
mod balancing;
mod choice;
mod common;
mod declined;
mod drain;
mod grants;
mod kill;
mod load_watchers;
mod owners;
mod park;
mod policy;
mod queueing;
mod refusals;
mod registration;
mod spawning;
mod suspend;
mod waiting;

use bytes::Bytes;
use common::{
    TestBed, client, host_id, request, rm_tid as own, spawned_task_info, task_id, task_info, world,
};
use proptest::prelude::*;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::{Options, TAG_POLICY};
use pvm_rm::spawns::SpawnRules;
use pvm_rm::store::StoreLocation;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::event::EventKind;
use sempa_proto::message::CTX_BASE;
use sempa_proto::migration::{MigrationCause, Usage};
use sempa_proto::rm::{self, CTX_RM, RmQuery, RmReply, TAG_QUERY, TAG_REPLY};
use sempa_proto::sm::SM_SPAWN;
use sempa_proto::table::TASK_FORKED;
use sempa_proto::{Micros, Tid};

fn packed_int(value: i32) -> Bytes {
    let mut body = Packer::new(Encoding::Xdr);
    body.int(value);
    body.finish()
}

fn owner_cause() -> MigrationCause {
    MigrationCause::Owner {
        why: "alice on pts/0".into(),
    }
}

fn task_ended(tid: Tid) -> EventKind {
    EventKind::TaskEnded {
        tid,
        status: 0,
        used: Usage::default(),
    }
}

/// Returns a service with one host whose owner is present, and these rules for waiting spawns.
fn occupied_bed(rules: SpawnRules) -> TestBed {
    let vm = world(1);
    let options = options_with_policy(EffectivePolicy {
        rules,
        ..EffectivePolicy::default()
    });
    let mut bed = TestBed::quiet_with(&vm, options);
    bed.report_owner_present(1);
    bed
}

/// Consecutive events are processed together, and a request that follows them is processed
/// immediately after them.
#[test]
fn events_are_batched_up_to_next_request() {
    let mut bed = two_tasks_on_h2();
    for tid in [task_id(2, 1), task_id(1, 5)] {
        bed.world().event(host_id(2), task_ended(tid));
    }
    bed.world().spawn(1, &request(1));
    bed.world().event(host_id(1), task_ended(task_id(9, 9)));
    bed.service.step().expect("it goes on");
    assert!(
        [task_id(2, 1), task_id(1, 5)]
            .iter()
            .all(|tid| !bed.service.model().has_task(*tid))
    );
    assert_eq!(bed.world().take_start_orders().len(), 1);
    assert_eq!(bed.world().inbox.len(), 1);
}

/// Tasks that were restarted from a checkpoint are added to the model again.
#[test]
fn restarted_tasks_are_known_again() {
    let mut bed = two_tasks_on_h2();
    let tids = [task_id(2, 7), task_id(3, 9)];
    bed.world()
        .tasks
        .extend(tids.map(|tid| spawned_task_info(tid, 3)));
    for tid in tids {
        let started = EventKind::TaskStarted {
            tid,
            parent: client(),
            name: "worker".into(),
            user: 0,
        };
        bed.world().event(host_id(2), started);
        bed.world().event(host_id(2), task_ended(tid));
    }
    bed.settle();
    assert!(tids.iter().all(|tid| !bed.service.model().has_task(*tid)));
    let tasks = tids.map(|tid| (tid, host_id(3))).to_vec();
    let restarted = EventKind::Restarted {
        checkpoint: "s".into(),
        job: tids[0],
        tasks,
        why: "h2 was lost".into(),
    };
    bed.world().event(host_id(1), restarted);
    bed.advance(Micros::from_secs(2));
    assert!(tids.iter().all(|tid| bed.service.model().has_task(*tid)));
    assert_eq!(bed.service.model().host_of(tids[1]), Some(host_id(3)));
}

/// If events were missed, the resource manager requests a new task list.
#[test]
fn missed_events_trigger_a_new_list() {
    let mut bed = two_tasks_on_h2();
    bed.world().event(
        host_id(1),
        EventKind::Note {
            text: String::new(),
        },
    );
    bed.settle();
    let lists = bed.world().list_count;
    bed.advance(Micros::from_secs(3));
    assert_eq!(bed.world().list_count, lists, "nothing was missed");
    bed.world().tasks.push(spawned_task_info(task_id(3, 4), 3));
    bed.world().miss_event();
    bed.world().event(
        host_id(1),
        EventKind::Note {
            text: String::new(),
        },
    );
    bed.advance(Micros::from_secs(1));
    assert_eq!(bed.world().list_count, lists + 1);
    assert!(bed.service.model().has_task(task_id(3, 4)));
}

proptest! {
    /// A message with arbitrary bytes from a task does not stop the service. Events are accepted
    /// only from daemons.
    #[test]
    fn invalid_messages_are_survived(messages in prop::collection::vec(
        (prop::sample::select(vec![task_id(1, 2), Tid::MY_DAEMON, host_id(2).daemon_tid(), TestBed::watcher(1)]),
         prop::bool::ANY, 0_i32..20, 990_i32..1010, prop::collection::vec(any::<u8>(), 0..64)), 0..60,
    )) {
        let vm = world(2);
        let mut bed = TestBed::quiet(&vm);
        for (src, base, tag, wid, body) in messages {
            let (ctx, tag) = if base || !src.is_task() { (CTX_BASE, SM_SPAWN + tag) } else { (CTX_RM, tag) };
            bed.world().post(src, ctx, tag, wid, body.into());
        }
        bed.settle();
        bed.advance(Micros::from_secs(1));
    }
}

/// Returns a service with three hosts, and two tasks on h2 that were started before the resource
/// manager.
fn two_tasks_on_h2() -> TestBed {
    let vm = world(3);
    vm.0.borrow_mut().tasks.extend([
        spawned_task_info(task_id(2, 1), 2),
        spawned_task_info(task_id(1, 5), 2),
    ]);
    vm.0.borrow_mut().tasks.push(task_info(
        task_id(2, 9),
        2,
        TASK_FORKED,
        "/opt/bin/pvm-load-watcher",
    ));
    TestBed::quiet(&vm)
}

/// Returns options with load watchers and this policy.
fn options_with_policy(policy: EffectivePolicy) -> Options {
    Options {
        policy,
        command_line_policy: policy,
        watchers: true,
        ..Options::default()
    }
}

/// Returns options with a history in this directory.
fn options_with_history(dir: &std::path::Path) -> Options {
    let location = Some(StoreLocation {
        dir: dir.to_path_buf(),
        file_name: "rm.redb".into(),
    });
    Options {
        store_location: location,
        ..Options::default()
    }
}

fn query(bed: &mut TestBed, question: &RmQuery) -> RmReply {
    let body = rm::encode(question).expect("it can be written").into();
    bed.world().post(client(), CTX_RM, TAG_QUERY, 4711, body);
    bed.settle();
    let (to, tag, wid, body) = bed.world().answers.pop().expect("an answer");
    assert_eq!((to, tag, wid), (client(), TAG_REPLY, 4711));
    rm::decode(&body)
        .expect("it can be read")
        .expect("of this version")
}

/// A valid change of the policy file applies immediately; an invalid one is ignored.
#[test]
fn valid_policy_change_applies_at_once() {
    let vm = world(3);
    let mut bed = TestBed::with(
        &vm,
        Options {
            policy_file: "rm.toml".into(),
            ..Options::default()
        },
    )
    .expect("no other");
    let change = |bed: &mut TestBed, text: &'static str| {
        bed.world().post(
            own(),
            CTX_RM,
            TAG_POLICY,
            0,
            Bytes::from_static(text.as_bytes()),
        );
        bed.settle();
        bed.world().notes().last().cloned().unwrap_or_default()
    };
    let hosts = |bed: &mut TestBed| {
        bed.world().spawn(1, &request(3));
        bed.settle();
        bed.world()
            .take_start_orders()
            .iter()
            .map(|e| e.host.index())
            .collect::<Vec<_>>()
    };
    let note = change(&mut bed, "placing = \"round-robin\"\nuser_tasks = 3\n");
    assert!(
        note.starts_with("the policy in rm.toml is in force: placing round-robin, balance off"),
        "{note}"
    );
    assert_eq!(hosts(&mut bed), [1, 2, 3]);
    let note = change(
        &mut bed,
        "placing = \"round-robin\"\nuser_tasks = 2\nfoo = 1\n",
    );
    assert!(
        note.starts_with("rm.toml, line 3: unknown field `foo`"),
        "{note}"
    );
    assert_eq!(hosts(&mut bed).len(), 3, "three are still allowed");
    change(&mut bed, "user_tasks = 2\n");
    assert_eq!(hosts(&mut bed), [], "and now two");
    bed.world().post(
        client(),
        CTX_RM,
        TAG_POLICY,
        0,
        Bytes::from_static(b"user_tasks = 9"),
    );
    bed.settle();
    assert_eq!(hosts(&mut bed), [], "nobody else may say so");
}
