//! Services tell the tasks that use them which messages of other tasks are in transit.

use super::handoff_log::procs_of;
use super::restart_engine::{self, migrate};
use super::scenario::list_events;
use super::sim::{Sim, host};
use super::tasks::{send_to_daemon, spawn_request, spawned_tids};
use crate::{Event, HostId};
use sempa_proto::causal::{Mark, Past, STAMP_MAX};
use sempa_proto::event::EventKind;
use sempa_proto::group::GroupRequest;
use sempa_proto::sm::{SM_EXEC, SM_EXECACK, pack_exec, unpack_tids};
use sempa_proto::task::{
    MailboxRequest, NotifyRequest, NotifySubjects, Reply, Request, RmServices, SPAWN_HOST,
    SpawnRequest, ToDaemon, ToTask,
};
use sempa_proto::{Micros, Tid};

const SIGUSR1: i32 = 10;
const SIGKILL: i32 = 9;

fn mark(receiver: Tid, sender: Tid, end_seq: u64) -> Mark {
    Mark {
        receiver,
        sender,
        incarnation: 0,
        sender_incarnation: 0,
        end_seq,
        stamp: end_seq,
    }
}

/// Returns the lists of marks that a process was told.
fn told_lists(sim: &Sim, proc: usize) -> Vec<Vec<Mark>> {
    let told_list = |message: &ToTask| match message {
        ToTask::Past(past) if !past.marks.is_empty() => Some(past.marks.clone()),
        _ => None,
    };
    sim.procs[proc]
        .daemon_messages
        .iter()
        .filter_map(told_list)
        .collect()
}

fn join(group: &[u8]) -> Request {
    Request::Group(GroupRequest::Join {
        group: group.to_vec(),
    })
}

fn size_of(group: &[u8]) -> Request {
    Request::Group(GroupRequest::Size {
        group: group.to_vec(),
    })
}

/// A task on each of three hosts.
fn three_tasks(seed: u64) -> (Sim, [usize; 3], [Tid; 3]) {
    let (mut sim, _) = Sim::cluster(seed, 3);
    let procs = [1, 2, 3].map(|index| sim.enrol(host(index)));
    let tids = procs.map(|proc| sim.procs[proc].tid());
    (sim, procs, tids)
}

/// A reply of the group service follows the marks of the tasks that have used the same group, and
/// of no others.
#[test]
fn group_replies_follow_marks_of_the_same_group() {
    let (mut sim, [a, b, c], [a_tid, b_tid, c_tid]) = three_tasks(1);
    let in_transit = mark(c_tid, b_tid, 7);
    sim.tell_marks(b, vec![in_transit]);
    sim.ask(b, join(b"phase"));
    assert!(told_lists(&sim, b).is_empty(), "these are its own marks");
    sim.ask(a, join(b"other"));
    assert!(told_lists(&sim, a).is_empty(), "another group");
    sim.ask(c, join(b"phase"));
    assert_eq!(told_lists(&sim, c), [[in_transit]]);
    let later = mark(a_tid, b_tid, 3);
    sim.tell_marks(b, vec![later]);
    sim.ask(b, size_of(b"phase"));
    sim.ask(a, join(b"phase"));
    assert_eq!(told_lists(&sim, a), [[later]]);
    sim.tell_marks(b, vec![]);
    sim.ask(c, join(b"third"));
    sim.ask(c, size_of(b"phase"));
    assert_eq!(told_lists(&sim, c), [[in_transit]], "nothing is in transit");
}

/// A task that takes a message from the mailbox learns what its owner had sent before.
#[test]
fn mailbox_replies_follow_marks_of_the_owner() {
    let (mut sim, [_, b, c], [a_tid, b_tid, _]) = three_tasks(2);
    let in_transit = mark(a_tid, b_tid, 4);
    sim.tell_marks(b, vec![in_transit]);
    let message = sempa_proto::Message {
        src: b_tid,
        dst: Tid::NONE,
        ctx: 0,
        tag: 0,
        wid: 0,
        enc: 0,
        body: bytes::Bytes::from_static(b"entry"),
    };
    let put = MailboxRequest::Put {
        name: "results".into(),
        flags: 0,
        message,
    };
    assert!(matches!(
        sim.ask(b, Request::Mailbox(put)),
        Reply::MailboxIndex(_)
    ));
    let take = MailboxRequest::Take {
        name: "results".into(),
        index: 0,
        flags: 0,
    };
    assert!(matches!(
        sim.ask(c, Request::Mailbox(take)),
        Reply::Mailbox(_)
    ));
    assert_eq!(told_lists(&sim, c), [[in_transit]]);
}

/// A new task begins with the marks of the task that has spawned it, wherever it starts.
#[test]
fn spawned_task_begins_with_marks_of_its_spawner() {
    let (mut sim, [a, ..], [a_tid, _, c_tid]) = three_tasks(3);
    let in_transit = mark(c_tid, a_tid, 9);
    sim.tell_marks(a, vec![in_transit]);
    let request = SpawnRequest {
        where_arg: "h2".into(),
        flags: SPAWN_HOST,
        ..spawn_request("child", 1)
    };
    let child = spawned_tids(sim.ask(a, Request::Spawn(request)))[0].expect("started");
    sim.run_until("the child is welcome", |sim| {
        sim.procs[sim.proc_of(child)].welcome.is_some()
    });
    let child_proc = &sim.procs[sim.proc_of(child)];
    let welcome = child_proc.welcome.as_ref().expect("just seen");
    assert_eq!(welcome.past.marks, [in_transit]);
    assert_eq!(welcome.past.clock, 1);
}

/// The notification of a task's end follows the messages that the task has sent to others and that
/// were not acknowledged.
#[test]
fn exit_notification_follows_messages_to_others() {
    let (mut sim, [a, b, _], [_, b_tid, c_tid]) = three_tasks(4);
    let notify = NotifyRequest {
        subjects: NotifySubjects::TaskExit(vec![b_tid]),
        ctx: 0,
        tag: 5,
        is_cancellation: false,
    };
    assert_eq!(sim.ask(a, Request::Notify(notify)), Reply::Done);
    sim.send_message(b, c_tid, b"last words");
    sim.ask(b, Request::Exit { watermarks: vec![] });
    sim.run_until("the watcher is notified", |sim| {
        !sim.procs[a].notifications(5).is_empty()
    });
    let last_words = Mark {
        stamp: STAMP_MAX,
        ..mark(c_tid, b_tid, 2)
    };
    assert_eq!(told_lists(&sim, a), [[last_words]]);
}

/// A signal waits until the library of its task has the earlier messages, but not for ever; a
/// signal that ends the task does not wait.
#[test]
fn signal_waits_for_earlier_messages() {
    let (mut sim, [a, _, c], [a_tid, _, c_tid]) = three_tasks(5);
    let signal = |signal| Request::Signal { tid: c_tid, signal };
    let questions = |sim: &Sim| {
        let is_question = |message: &&ToTask| matches!(message, ToTask::AwaitMarks { .. });
        sim.procs[c]
            .daemon_messages
            .iter()
            .filter(is_question)
            .count()
    };
    assert_eq!(sim.ask(a, signal(SIGUSR1)), Reply::Done);
    assert_eq!(questions(&sim), 0, "nothing is in transit");
    sim.tell_marks(a, vec![mark(c_tid, a_tid, 2)]);
    sim.procs[c].answers_marks = true;
    assert_eq!(sim.ask(a, signal(SIGUSR1)), Reply::Done);
    assert_eq!(questions(&sim), 1);
    sim.procs[c].answers_marks = false;
    assert_eq!(sim.ask(a, signal(SIGUSR1)), Reply::Done, "after some time");
    assert_eq!(questions(&sim), 2);
    assert_eq!(sim.ask(a, signal(SIGKILL)), Reply::Done);
    assert_eq!(questions(&sim), 2);
}

/// A task that a resource manager starts begins with the past of the resource manager, which
/// includes that of the spawner, wherever it starts.
#[test]
fn task_of_resource_manager_begins_with_its_marks() {
    for target in [HostId::MASTER, host(2)] {
        let (mut sim, procs, [a_tid, b_tid, c_tid]) = three_tasks(6);
        let rm = sim.enrol(HostId::MASTER);
        let services = RmServices {
            placement: true,
            vm_requests: false,
            task_exits: false,
        };
        sim.ask(rm, Request::RegisterRm(services));
        sim.run_until("the hosts know", |sim| {
            procs.iter().all(|proc| sim.procs[*proc].rm_info.is_some())
        });
        let in_transit = mark(b_tid, a_tid, 9);
        sim.tell_marks(rm, vec![in_transit]);
        let exec = pack_exec(c_tid, &spawn_request("child", 1), 0, 1);
        send_to_daemon(&mut sim, rm, target.daemon_tid(), SM_EXEC, 7, exec);
        sim.run_until("the task is started", |sim| {
            !sim.procs[rm].notifications(SM_EXECACK).is_empty()
        });
        let ack = sim.procs[rm].notifications(SM_EXECACK)[0].clone();
        let child = unpack_tids(ack.body).expect("tids")[0].expect("started");
        sim.run_until("the child is welcome", |sim| {
            sim.procs[sim.proc_of(child)].welcome.is_some()
        });
        let welcome = sim.procs[sim.proc_of(child)].welcome.as_ref();
        assert_eq!(welcome.expect("just seen").past.marks, [in_transit]);
    }
}

/// A process that replaces an earlier process of the same task knows the marks of that process.
#[test]
fn next_process_begins_with_marks_of_the_previous_one() {
    let (mut sim, console) = Sim::cluster(7, 3);
    let request = restart_engine::spawn_request("child", "own:wait=3", "h2");
    let tid = restart_engine::spawn(&mut sim, console, request);
    let past = Past {
        clock: 17,
        marks: vec![mark(sim.procs[console].tid(), Tid::from_raw(0x40009), 3)],
    };
    let first_proc = sim.proc_of(tid);
    sim.procs[first_proc].past = past.clone();
    assert!(migrate(&mut sim, console, tid, "h3").is_ok());
    let procs = procs_of(&sim, tid);
    let welcome = sim.procs[procs[1]].welcome.as_ref().expect("it is there");
    assert_eq!(welcome.handoff.as_ref().expect("replaced").past, past);
}

/// The event log names a task that no longer waits for messages.
#[test]
fn overdue_marks_are_recorded() {
    let (mut sim, console) = Sim::cluster(8, 2);
    let waiting = sim.enrol(host(2));
    let (conn, host_id) = (sim.procs[waiting].conn.expect("connected"), host(2));
    let message = ToDaemon::MarksOverdue { count: 3 };
    sim.send_from_proc(conn, host_id, Event::TaskControl { conn, message });
    let name = sim.procs[waiting].tid().to_string();
    sim.run_until("the daemon has it", |sim| {
        let log = &sim.nodes[&host(2)].log;
        log.iter().any(|line| line.contains("has waited too long"))
    });
    let is_report = |event: &EventKind| match event {
        EventKind::Note { text } => text.starts_with(&name),
        _ => false,
    };
    sim.advance(Micros::from_millis(20));
    let events = list_events(&mut sim, console);
    assert!(events.iter().any(is_report), "{events:?}");
}
