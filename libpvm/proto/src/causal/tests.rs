//! Tests of the causal order of one task: replies, positions and restarts.

use super::{CausalOrder, Mark, OrderMessage, Past, Position, Restart};
use crate::ids::Tid;
use std::collections::BTreeSet;

const OWN: Tid = Tid::from_raw(0x40001);
const STRANGER: Tid = Tid::from_raw(0x40002);

fn mark_of_stranger(incarnation: u16) -> Mark {
    Mark {
        receiver: OWN,
        sender: STRANGER,
        incarnation,
        end_seq: 2,
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
    let position = Position {
        incarnation: 0,
        end_seq: 2,
    };
    order.accept_message(STRANGER, position, 5, "message");
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
    let teller = Tid::from_raw(0x40003);
    let position = |end_seq| Position {
        incarnation: 0,
        end_seq,
    };
    let mut order: CausalOrder<()> = CausalOrder::new(OWN, 0);
    let list = OrderMessage::Marks {
        id: 1,
        marks: vec![mark_of_stranger(0)],
    };
    order.accept_order_message(teller, position(2), list);
    order.accept_order_message(teller, position(3), OrderMessage::Arrived { id: 7 });
    assert!(!order.has_passed_position(teller, position(3)));
    order.accept_message(STRANGER, position(2), 1, ());
    assert!(order.has_passed_position(teller, position(3)));
    assert_eq!(order.held_count(), 0);
}

/// A service may know marks of what a task had sent between the checkpoint and the restart. No
/// restored task passes them on: the receiver would take them for marks of the new incarnation.
#[test]
fn restored_task_forgets_marks_of_the_abandoned_timeline() {
    let (receiver, sender) = (Tid::from_raw(0x40003), STRANGER);
    let mark = |incarnation, end_seq| Mark {
        receiver,
        sender,
        incarnation,
        end_seq,
    };
    let mut order: CausalOrder<()> = CausalOrder::new(OWN, 0);
    order.roll_back(Restart {
        incarnation: 1,
        members: [OWN, receiver, sender].into(),
    });
    let mut told_marks = |marks: Vec<Mark>| {
        order.accept_past(Past { clock: 1, marks });
        order.list_for(receiver)
    };
    assert_eq!(told_marks(vec![mark(0, 12)]), None);
    let Some(OrderMessage::Marks { marks, .. }) = told_marks(vec![mark(1, 9)]) else {
        panic!("the mark of the new incarnation is told");
    };
    assert_eq!(marks, [mark(1, 9)]);
}

/// A task that was restarted does not wait for a message that another task had sent to it
/// before the restart: the message went to the earlier process. It waits for one of the new
/// incarnation.
#[test]
fn restarted_task_waits_for_new_messages_only() {
    let mut order: CausalOrder<()> = CausalOrder::new(OWN, 0);
    let told = |order: &mut CausalOrder<()>, incarnation| {
        order.accept_past(Past {
            clock: 1,
            marks: vec![mark_of_stranger(incarnation)],
        })
    };
    assert_eq!(told(&mut order, 0), [mark_of_stranger(0)]);
    order.roll_back(Restart {
        incarnation: 1,
        members: BTreeSet::from([OWN]),
    });
    assert_eq!(told(&mut order, 0), []);
    assert_eq!(told(&mut order, 1), [mark_of_stranger(1)]);
}
