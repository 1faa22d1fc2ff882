//! Tests of the causal order of one task: holds and their ends, restarts, folded marks, handoffs.

use super::{
    CausalOrder, FOLD_MARKS_MIN, HOLD_AGE_MAX, Mark, OrderMessage, Past, Position, Restart,
};
use crate::ids::Tid;
use std::collections::BTreeSet;

const OWN: Tid = Tid::from_raw(0x40001);
const SENDER: Tid = Tid::from_raw(0x40002);
const TELLER: Tid = Tid::from_raw(0x40003);
const OTHER: Tid = Tid::from_raw(0x80001);

fn mark_of_sender(incarnation: u16) -> Mark {
    Mark {
        receiver: OWN,
        sender: SENDER,
        incarnation,
        sender_incarnation: incarnation,
        end_seq: 2,
        stamp: 5,
    }
}

/// A message of the sender to a task on another host.
fn mark_to_other() -> Mark {
    Mark {
        receiver: OTHER,
        ..mark_of_sender(0)
    }
}

fn position(end_seq: u64) -> Position {
    position_in(0, end_seq)
}

fn position_in(incarnation: u16, end_seq: u64) -> Position {
    Position {
        incarnation,
        end_seq,
    }
}

fn list(id: u64, marks: Vec<Mark>) -> OrderMessage {
    OrderMessage::Marks { id, marks }
}

/// Lets the teller name a message of the sender and then send a message, which is held.
fn held_order(mark: Mark) -> CausalOrder<&'static str> {
    let mut order = CausalOrder::new(OWN, 0);
    order.accept_order_message(TELLER, position(2), 6, list(1, vec![mark]));
    order.accept_message(TELLER, position(3), 7, "later");
    assert!(order.is_holding(TELLER));
    order
}

fn deliver(order: &mut CausalOrder<&'static str>) -> Vec<&'static str> {
    order.end_without_look();
    std::iter::from_fn(|| order.next_delivery()).collect()
}

/// Returns the marks of a list.
fn marks_of(list: Option<OrderMessage>) -> Vec<Mark> {
    match list {
        Some(OrderMessage::Marks { marks, .. }) => marks,
        list => panic!("no marks: {list:?}"),
    }
}

/// A reply of a service follows the last message that a task had sent before it used the
/// service, even if a look finds the message after the reply has arrived.
#[test]
fn reply_follows_message_with_the_clock_of_its_past() {
    let mut order = CausalOrder::new(OWN, 0);
    order.accept_past(Past {
        clock: 5,
        marks: Vec::new(),
    });
    order.accept_notice("reply");
    order.begin_look();
    order.accept_message(SENDER, position(2), 5, "message");
    order.end_look();
    while order.is_waiting_for_look() {
        order.begin_look();
        order.end_look();
    }
    let delivered: Vec<_> = std::iter::from_fn(|| order.next_delivery()).collect();
    assert_eq!(delivered, ["message", "reply"]);
}

/// A mark may name the position of an answer that arrived while messages were held back.
#[test]
fn position_advances_over_answers_behind_held_messages() {
    let mut order = held_order(mark_of_sender(0));
    order.accept_order_message(TELLER, position(4), 0, OrderMessage::Arrived { id: 7 });
    let mark_of_answer = Mark {
        sender: TELLER,
        end_seq: 4,
        ..mark_of_sender(0)
    };
    assert!(!order.has_passed(&mark_of_answer));
    order.accept_message(SENDER, position(2), 1, "first");
    assert!(order.has_passed(&mark_of_answer));
    assert_eq!(order.held_count(), 0);
}

// ---- the end of a hold

/// A mark that names a message that does not exist holds nothing back once the sender has
/// answered.
#[test]
fn mark_of_missing_message_ends_with_answer() {
    let mut order = held_order(Mark {
        end_seq: 1 << 40,
        stamp: 1 << 40,
        ..mark_of_sender(0)
    });
    order.ask_awaited();
    let Some((SENDER, OrderMessage::Ask { stamp, .. })) = order.next_answer() else {
        panic!("the sender is asked");
    };
    let answer = OrderMessage::AllSent { stamp, clock: 3 };
    order.accept_order_message(SENDER, position(2), 0, answer);
    assert_eq!(deliver(&mut order), ["later"]);
}

/// The end of a sender ends the wait for its messages.
#[test]
fn hold_ends_with_end_of_sender() {
    let mut order = held_order(mark_of_sender(0));
    order.handle_peer_end(SENDER);
    assert_eq!(deliver(&mut order), ["later"]);
}

/// A sender that does not answer cannot hold messages of others back for ever.
#[test]
fn hold_ends_after_time_limit() {
    let mut order = held_order(mark_of_sender(0));
    order.ask_awaited();
    for _ in 0..HOLD_AGE_MAX {
        assert_eq!(order.age_holds(), []);
    }
    assert!(order.is_holding(TELLER));
    assert_eq!(order.age_holds(), [mark_of_sender(0)]);
    assert_eq!(deliver(&mut order), ["later"]);
    order.accept_order_message(OTHER, position(2), 6, list(1, vec![mark_of_sender(0)]));
    order.accept_message(OTHER, position(3), 7, "another");
    assert_eq!(deliver(&mut order), ["another"], "no second wait");
}

// ---- restarts

/// A mark of an earlier incarnation may name a message that its sender sends again. The sender
/// is asked; its answer follows such messages.
#[test]
fn mark_of_earlier_incarnation_is_asked_about() {
    let mut order: CausalOrder<()> = CausalOrder::new(OWN, 0);
    order.roll_back(Restart {
        incarnation: 1,
        members: BTreeSet::from([OWN]),
    });
    order.accept_past(Past {
        clock: 9,
        marks: vec![mark_of_sender(0)],
    });
    assert!(order.is_past_awaited());
    let question = OrderMessage::Ask {
        stamp: 5,
        wants_list: false,
    };
    assert_eq!(order.next_answer(), Some((SENDER, question)));
    let answer = OrderMessage::AllSent { stamp: 5, clock: 8 };
    order.accept_order_message(SENDER, position_in(1, 2), 0, answer);
    assert!(!order.is_past_awaited());
}

/// A service may know marks of what a task had sent between the checkpoint and the restart. A
/// restored task that hears them waits for nothing else than an answer of the restored sender.
#[test]
fn marks_of_the_abandoned_timeline_hold_nothing_for_long() {
    let members: BTreeSet<Tid> = [OWN, SENDER, TELLER].into();
    let restart = || Restart {
        incarnation: 1,
        members: members.clone(),
    };
    let abandoned_mark = Mark {
        end_seq: 12,
        stamp: 50,
        ..mark_of_sender(0)
    };
    let mut teller: CausalOrder<()> = CausalOrder::new(TELLER, 0);
    teller.roll_back(restart());
    teller.accept_past(Past {
        clock: 1,
        marks: vec![abandoned_mark],
    });
    let told_marks = marks_of(teller.list_for(OWN));
    assert_eq!(told_marks, [abandoned_mark], "not of the new incarnation");
    let mut order = CausalOrder::new(OWN, 0);
    order.roll_back(restart());
    order.accept_order_message(TELLER, position_in(1, 2), 6, list(1, told_marks));
    order.accept_message(TELLER, position_in(1, 3), 7, "later");
    let Some((SENDER, OrderMessage::Ask { stamp: 50, .. })) = order.next_answer() else {
        panic!("the sender is asked at once");
    };
    let answer = OrderMessage::AllSent {
        stamp: 50,
        clock: 8,
    };
    order.accept_order_message(SENDER, position_in(1, 2), 0, answer);
    assert_eq!(deliver(&mut order), ["later"]);
}

/// Messages of an earlier incarnation that are held back are delivered behind the messages that
/// they wait for, and before those of the new incarnation.
#[test]
fn reset_keeps_order_of_held_messages() {
    let mut order = held_order(mark_of_sender(0));
    order.handle_link_reset(TELLER, 1);
    order.accept_message(TELLER, position_in(1, 2), 1, "newest");
    assert_eq!(deliver(&mut order), [""; 0]);
    order.accept_message(SENDER, position(2), 5, "first");
    assert_eq!(deliver(&mut order), ["first", "later", "newest"]);
    let mut answers = std::iter::from_fn(|| order.next_answer());
    assert!(
        answers.all(|(peer, _)| peer != TELLER),
        "a restarted teller expects no answer to an earlier list"
    );
}

/// A message to a restarted peer is void, so it no longer stands for the marks that its list has
/// told the peer.
#[test]
fn marks_of_unanswered_list_survive_reset() {
    let mut order: CausalOrder<()> = CausalOrder::new(OWN, 0);
    order.accept_order_message(TELLER, position(2), 6, list(1, vec![mark_to_other()]));
    assert_eq!(marks_of(order.list_for(OTHER)), [mark_to_other()]);
    order.next_stamp();
    order.record_sent(OTHER, position(3), false);
    let covering_mark = marks_of(order.list_for(TELLER));
    assert_eq!(covering_mark.len(), 1);
    assert_eq!(covering_mark[0].sender, OWN);
    order.handle_link_reset(OTHER, 1);
    assert_eq!(marks_of(order.list_for(TELLER)), [mark_to_other()]);
}

// ---- folded marks

/// A folded mark holds messages back until its sender has answered, or until a later message of
/// the sender has arrived.
#[test]
fn folded_mark_waits_for_sender() {
    let mut order = held_order(Mark::folded(SENDER, 0, 5));
    order.accept_message(SENDER, position(2), 5, "first");
    assert_eq!(deliver(&mut order), ["first", "later"]);
}

/// A task that sends to thousands of new tasks tells each of them few marks, and the last mark
/// stands for all messages before it.
#[test]
fn scatter_tells_each_receiver_few_marks() {
    const RECEIVERS: usize = 4000;
    let mut order: CausalOrder<()> = CausalOrder::new(OWN, 0);
    let mut mark_count = 0;
    for number in 0..RECEIVERS {
        let receiver = Tid::from_raw(0x80001 + number as i32);
        if let Some(OrderMessage::Marks { marks, .. }) = order.list_for(receiver) {
            mark_count += marks.len();
            let is_complete = marks.len() == number || marks[0].stamp >= order.clock() - 1;
            assert!(is_complete, "{number}: {marks:?}");
        }
        order.next_stamp();
        order.record_sent(receiver, position(2), false);
    }
    assert!(mark_count <= FOLD_MARKS_MIN * FOLD_MARKS_MIN + RECEIVERS);
}

// ---- tids and processes

/// Messages of an ended task say nothing about a new task with the same tid.
#[test]
fn mark_of_reused_tid_is_passed_on() {
    let mut order: CausalOrder<()> = CausalOrder::new(OWN, 0);
    let old_mark = Mark {
        end_seq: 50,
        stamp: 90,
        ..mark_to_other()
    };
    order.accept_order_message(TELLER, position(2), 91, list(1, vec![old_mark]));
    // The teller knows that the old message has arrived, and so does its sender.
    order.accept_order_message(TELLER, position(3), 92, list(2, vec![]));
    order.accept_order_message(SENDER, position(2), 95, list(1, vec![]));
    order.handle_peer_end(SENDER);
    order.accept_order_message(TELLER, position(4), 96, list(3, vec![mark_to_other()]));
    assert_eq!(marks_of(order.list_for(OTHER)), [mark_to_other()]);
}

/// The next process of a task passes on the marks of the previous one, also those of a list that a
/// peer has not answered.
#[test]
fn next_process_passes_on_marks() {
    let mut order: CausalOrder<()> = CausalOrder::new(OWN, 0);
    let mark_to_teller = Mark {
        receiver: TELLER,
        ..mark_of_sender(0)
    };
    let marks = vec![mark_to_other(), mark_to_teller];
    order.accept_order_message(TELLER, position(2), 6, list(1, marks));
    marks_of(order.list_for(OTHER));
    let mut next_order: CausalOrder<()> = CausalOrder::new(OWN, 0);
    let past = order.past_for_successor();
    assert!(past.clock >= order.clock());
    next_order.accept_spawn(past);
    let mut told_marks = marks_of(next_order.list_for(OTHER));
    told_marks.sort_by_key(Mark::key);
    assert_eq!(told_marks, [mark_to_teller, mark_to_other()]);
}
