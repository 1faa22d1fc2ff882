//! Tests of the resource manager's service with a fake virtual machine in virtual time.

mod balancing;
mod chooser;
mod common;
mod declined_starts;
mod drain;
mod kill;
mod load_watchers;
mod owners;
mod placement_leases;
mod policy;
mod queries;
mod queueing;
mod refusals;
mod registration;
mod spawning;
mod suspend;
mod vacate;
mod waiting;

use bytes::Bytes;
use common::{
    TestBed, client_tid, fake_vm, host_id, request, rm_tid, spawned_task_info, task_id, task_info,
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

fn pack_int(value: i32) -> Bytes {
    let mut body = Packer::new(Encoding::Xdr);
    body.pack_int(value);
    body.finish()
}

fn owner_cause() -> MigrationCause {
    MigrationCause::Owner {
        why: "alice on pts/0".into(),
    }
}

fn task_ended_event(tid: Tid) -> EventKind {
    EventKind::TaskEnded {
        tid,
        status: 0,
        used: Usage::default(),
    }
}

/// Returns a service with these rules for waiting spawns. Its only host has a present owner.
fn occupied_bed(rules: SpawnRules) -> TestBed {
    let vm = fake_vm(1);
    let options = options_with_policy(EffectivePolicy {
        spawn_rules: rules,
        ..EffectivePolicy::default()
    });
    let mut bed = TestBed::start_with_options(&vm, options);
    bed.report_owner_present(1);
    bed
}

/// The service processes consecutive events together. A request that follows the events is
/// processed immediately afterwards.
#[test]
fn events_are_batched_up_to_next_request() {
    let mut bed = bed_with_two_tasks_on_h2();
    for tid in [task_id(2, 1), task_id(1, 5)] {
        bed.state().log_event(host_id(2), task_ended_event(tid));
    }
    bed.state().request_spawn(1, &request(1));
    bed.state()
        .log_event(host_id(1), task_ended_event(task_id(9, 9)));
    bed.service.step().expect("it goes on");
    assert!(
        [task_id(2, 1), task_id(1, 5)]
            .iter()
            .all(|tid| !bed.service.model().has_task(*tid))
    );
    assert_eq!(bed.state().take_start_orders().len(), 1);
    assert_eq!(bed.state().inbox.len(), 1);
}

/// Tasks that were restarted from a checkpoint are added to the model again.
#[test]
fn restarted_tasks_return_to_model() {
    let mut bed = bed_with_two_tasks_on_h2();
    let tids = [task_id(2, 7), task_id(3, 9)];
    bed.state()
        .tasks
        .extend(tids.map(|tid| spawned_task_info(tid, 3)));
    for tid in tids {
        let started_event = EventKind::TaskStarted {
            tid,
            parent: client_tid(),
            name: "worker".into(),
            user: 0,
        };
        bed.state().log_event(host_id(2), started_event);
        bed.state().log_event(host_id(2), task_ended_event(tid));
    }
    bed.process_inbox();
    assert!(tids.iter().all(|tid| !bed.service.model().has_task(*tid)));
    let tasks = tids.map(|tid| (tid, host_id(3))).to_vec();
    let restarted_event = EventKind::Restarted {
        checkpoint: "s".into(),
        job: tids[0],
        tasks,
        why: "h2 was lost".into(),
    };
    bed.state().log_event(host_id(1), restarted_event);
    bed.advance(Micros::from_secs(2));
    assert!(tids.iter().all(|tid| bed.service.model().has_task(*tid)));
    assert_eq!(bed.service.model().host_of(tids[1]), Some(host_id(3)));
}

/// If events were missed, the resource manager requests a new task list.
#[test]
fn missed_events_trigger_a_new_list() {
    let mut bed = bed_with_two_tasks_on_h2();
    bed.state().log_event(
        host_id(1),
        EventKind::Note {
            text: String::new(),
        },
    );
    bed.process_inbox();
    let list_count = bed.state().task_list_count;
    bed.advance(Micros::from_secs(3));
    assert_eq!(
        bed.state().task_list_count,
        list_count,
        "nothing was missed"
    );
    bed.state().tasks.push(spawned_task_info(task_id(3, 4), 3));
    bed.state().skip_event_number();
    bed.state().log_event(
        host_id(1),
        EventKind::Note {
            text: String::new(),
        },
    );
    bed.advance(Micros::from_secs(1));
    assert_eq!(bed.state().task_list_count, list_count + 1);
    assert!(bed.service.model().has_task(task_id(3, 4)));
}

proptest! {
    /// Messages with arbitrary content do not stop the service. Tasks send them in both contexts,
    /// and daemons send them in the base context.
    #[test]
    fn invalid_messages_do_not_stop_service(messages in prop::collection::vec(
        (prop::sample::select(vec![task_id(1, 2), Tid::MY_DAEMON, host_id(2).daemon_tid(), TestBed::watcher_tid(1)]),
         prop::bool::ANY, 0_i32..20, 990_i32..1010, prop::collection::vec(any::<u8>(), 0..64)), 0..60,
    )) {
        let vm = fake_vm(2);
        let mut bed = TestBed::start_with_watchers(&vm);
        for (src, is_base_ctx, tag, wid, body) in messages {
            let (ctx, tag) = if is_base_ctx || !src.is_task() { (CTX_BASE, SM_SPAWN + tag) } else { (CTX_RM, tag) };
            bed.state().post_message(src, ctx, tag, wid, body.into());
        }
        bed.process_inbox();
        bed.advance(Micros::from_secs(1));
    }
}

/// Returns a service with three hosts. Two tasks were started on h2 before the resource manager.
fn bed_with_two_tasks_on_h2() -> TestBed {
    let vm = fake_vm(3);
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
    TestBed::start_with_watchers(&vm)
}

/// Returns options with load watchers and this policy.
fn options_with_policy(policy: EffectivePolicy) -> Options {
    Options {
        policy,
        command_line_policy: policy,
        starts_watchers: true,
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

/// Sends a query of the client and returns the reply. Panics if the last reply does not belong to
/// the query.
fn query(bed: &mut TestBed, rm_query: &RmQuery) -> RmReply {
    let body = rm::encode(rm_query).expect("it can be written").into();
    bed.state()
        .post_message(client_tid(), CTX_RM, TAG_QUERY, 4711, body);
    bed.process_inbox();
    let (receiver, tag, wid, body) = bed.state().rm_messages.pop().expect("an answer");
    assert_eq!((receiver, tag, wid), (client_tid(), TAG_REPLY, 4711));
    rm::decode(&body)
        .expect("it can be read")
        .expect("of this version")
}

/// A valid change of the policy file applies immediately. An invalid change, or a change that
/// another task sends, is ignored.
#[test]
fn valid_policy_change_applies_at_once() {
    let vm = fake_vm(3);
    let mut bed = TestBed::try_start_with(
        &vm,
        Options {
            policy_file: "rm.toml".into(),
            ..Options::default()
        },
    )
    .expect("no other");
    let change_policy = |bed: &mut TestBed, text: &'static str| {
        bed.state().post_message(
            rm_tid(),
            CTX_RM,
            TAG_POLICY,
            0,
            Bytes::from_static(text.as_bytes()),
        );
        bed.process_inbox();
        bed.state()
            .recorded_notes()
            .last()
            .cloned()
            .unwrap_or_default()
    };
    let place_and_list_hosts = |bed: &mut TestBed| {
        bed.state().request_spawn(1, &request(3));
        bed.process_inbox();
        bed.state()
            .take_start_orders()
            .iter()
            .map(|e| e.host.index())
            .collect::<Vec<_>>()
    };
    let note = change_policy(&mut bed, "placing = \"round-robin\"\nuser_tasks = 3\n");
    assert!(
        note.starts_with("the policy in rm.toml is in force: placing round-robin, balance off"),
        "{note}"
    );
    assert_eq!(place_and_list_hosts(&mut bed), [1, 2, 3]);
    let note = change_policy(
        &mut bed,
        "placing = \"round-robin\"\nuser_tasks = 2\nfoo = 1\n",
    );
    assert!(
        note.starts_with("rm.toml, line 3: unknown field `foo`"),
        "{note}"
    );
    assert_eq!(
        place_and_list_hosts(&mut bed).len(),
        3,
        "three are still allowed"
    );
    change_policy(&mut bed, "user_tasks = 2\n");
    assert_eq!(place_and_list_hosts(&mut bed), [], "and now two");
    bed.state().post_message(
        client_tid(),
        CTX_RM,
        TAG_POLICY,
        0,
        Bytes::from_static(b"user_tasks = 9"),
    );
    bed.process_inbox();
    assert_eq!(place_and_list_hosts(&mut bed), [], "nobody else may say so");
}
